//! The end in order: ask the edges to go elsewhere, then wait for what is open.
//!
//! 1. The gateway says that it is not ready, so that nobody sends it new callers.
//! 2. Each tunnel is told, spread over a short span: a fleet that dials anew at once is a storm. An edge that
//!    has gone elsewhere says so (`control::admit` then drains its tunnel). Fronts stay open meanwhile.
//! 3. Edges that are still here have nowhere else to go. While any stream lasts, fronts stay open for them: the process that
//!    follows this one is not there yet, and would be of no use without the port.
//! 4. The fronts close, and whoever has come already is served. Then a tunnel that is still here gets no new streams.
//! 5. Open streams get the time that is left; then all tunnels are closed.
//!
//! A caller that is refused here therefore finds the edge at another gateway, if there is one.

use crate::{
    metrics::Metrics,
    state::{Registry, TunnelInfo},
};
use causeway_tunnel::control_stream::GatewayMessage;
use std::{
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU8, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

/// The edges are told within this time, or within a quarter of the grace.
const SPREAD: Duration = Duration::from_secs(3);
/// How long fronts stay open at least, or a quarter of the grace: whoever balances callers learns from
/// `/readyz` first, and refusing them at once would lose some.
const LAME_DUCK: Duration = Duration::from_secs(3);
/// How long whoever came before the fronts closed may take to say what they want, or half of the grace.
const LATE: Duration = Duration::from_secs(1);
/// A stream lasts from this age on, or from an eighth of the grace: short requests end within it.
const SETTLE: Duration = Duration::from_secs(1);
/// How often is looked whether what was waited for has come.
const LOOK: Duration = Duration::from_millis(100);
const STARTING: u8 = 0;
const READY: u8 = 1;
const DRAINING: u8 = 2;

/// Whether callers should be sent here; a cheap clone. At first they should not.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    stage: Arc<AtomicU8>,
    holds: Reasons,
    faults: Reasons,
}

/// Reasons that somebody still holds, oldest first.
type Reasons = Arc<Mutex<Vec<Weak<Mutex<String>>>>>;

/// Something that a gateway needs before callers should be sent to it, or a fault that does not keep callers away. Dropping
/// it says that it is there, or that the fault is over.
#[derive(Debug)]
pub struct ReadinessBlock(Arc<Mutex<String>>);

impl ReadinessBlock {
    /// Says anew what is waited for.
    pub fn says(&self, why: impl Into<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = why.into();
    }
}

impl Readiness {
    /// All listeners are bound. A gateway that drains does not become ready again.
    pub fn ready(&self) {
        // Anything but STARTING stays as it is.
        let stage = &self.stage;
        let _ = stage.compare_exchange(STARTING, READY, Relaxed, Relaxed);
    }

    /// The gateway drains.
    pub fn drains(&self) {
        self.stage.store(DRAINING, Relaxed);
    }

    /// Whether the gateway drains.
    pub fn is_draining(&self) -> bool {
        self.stage.load(Relaxed) == DRAINING
    }

    /// Holds callers off until what is returned is dropped.
    pub fn hold(&self, why: impl Into<String>) -> ReadinessBlock {
        enter(&self.holds, why)
    }

    /// Reports a fault that keeps no callers away, until what is returned is dropped.
    pub fn fault(&self, what: impl Into<String>) -> ReadinessBlock {
        enter(&self.faults, what)
    }

    /// What callers are held off for, if for anything.
    pub fn held(&self) -> Option<String> {
        list(&self.holds).into_iter().next()
    }

    /// Faults that keep no callers away.
    pub fn faults(&self) -> Vec<String> {
        list(&self.faults)
    }

    /// Why callers should not be sent here, if they should not and it is this gateway's own doing.
    pub fn why_not(&self) -> Option<&'static str> {
        match self.stage.load(Relaxed) {
            READY => None,
            DRAINING => Some("the gateway is draining"),
            _ => Some("the gateway is starting: not all listeners are bound"),
        }
    }
}

fn enter(reasons: &Reasons, why: impl Into<String>) -> ReadinessBlock {
    let reason = Arc::new(Mutex::new(why.into()));
    let mut reasons = reasons.lock().unwrap_or_else(PoisonError::into_inner);
    reasons.push(Arc::downgrade(&reason));
    ReadinessBlock(reason)
}

fn list(reasons: &Reasons) -> Vec<String> {
    let mut reasons = reasons.lock().unwrap_or_else(PoisonError::into_inner);
    reasons.retain(|reason| reason.strong_count() > 0);
    let reasons = reasons.iter().filter_map(Weak::upgrade);
    let text = |reason: Arc<Mutex<String>>| {
        let text = reason.lock().unwrap_or_else(PoisonError::into_inner);
        text.clone()
    };
    reasons.map(text).collect()
}

/// The fronts, as far as a drain has to know them.
pub struct DrainListeners<'a> {
    /// Closes them.
    pub close: &'a CancellationToken,
    /// How many callers are connected.
    pub callers: &'a (dyn Fn() -> usize + Sync),
}

/// Empties the gateway within `grace`, and closes the fronts once the edges are gone.
/// Returns early when nothing is left to wait for.
pub async fn drain(
    registry: &Registry,
    metrics: &Metrics,
    readiness: &Readiness,
    fronts: DrainListeners<'_>,
    grace: Duration,
) {
    readiness.drains();
    metrics.drains();
    // An edge that is away does not come back here.
    registry.close();
    let begin = Instant::now();
    let end = begin + grace;
    let going = async {
        announce_drain(registry, grace, SPREAD.min(grace / 4)).await;
        // Half of the time is for going elsewhere: open streams, which alone need the rest, go on meanwhile.
        let half = begin + grace / 2;
        until(half, || {
            registry.all().iter().all(|(_, edge)| is_leaving(edge))
        })
        .await;
    };
    tokio::join!(going, sleep(LAME_DUCK.min(grace / 4)));
    let end = serve_on(registry, end, grace).await;
    fronts.close.cancel();
    // Some are in the system's queue, and in no count before this.
    sleep(LOOK.min(grace / 4)).await;
    let late = end.min(Instant::now() + LATE.min(grace / 2));
    until(late, || (fronts.callers)() == 0).await;
    for (_, edge) in registry.all() {
        edge.admitted.tunnel.drain();
    }
    until(end, || {
        registry.all().iter().all(|(_, edge)| edge.streams() == 0)
    })
    .await;
    let left = registry.all();
    let streams: usize = left.iter().map(|(_, edge)| edge.streams()).sum();
    if streams > 0 {
        tracing::warn!(streams, "the drain time is over: open streams are ended");
    }
    registry.end();
    for (_, edge) in left {
        edge.admitted.tunnel.close();
    }
}

/// Waits while edges are here that have not left, and streams last. Returns when the streams that are open then are ended:
/// where edges stay nobody serves them in the meantime.
async fn serve_on(registry: &Registry, end: Instant, grace: Duration) -> Instant {
    let settle = SETTLE.min(grace / 8);
    let last = end - LATE.min(grace / 8);
    let tunnels = || registry.all().into_iter().map(|(_, edge)| edge);
    if tunnels().all(|edge| edge.is_leaving()) {
        return end;
    }
    for edge in tunnels() {
        // What rests between two requests is no stream that lasts.
        edge.admitted.tunnel.leave();
    }
    tracing::info!("edges have nowhere else to go: listeners stay open while streams last");
    // Every tunnel is asked each time.
    let lasts = || {
        let lasting = tunnels().filter(|edge| !edge.admitted.tunnel.load().turn_over());
        lasting.count() > 0
    };
    lasts();
    loop {
        sleep_until(last.min(Instant::now() + settle)).await;
        if !lasts() {
            return end.min(Instant::now() + LATE + settle);
        }
        if Instant::now() >= last {
            return end;
        }
    }
}

/// Tells every tunnel that is here now, each at a moment of its own within `spread`.
async fn announce_drain(registry: &Registry, grace: Duration, spread: Duration) {
    let begin = Instant::now();
    let mut edges: Vec<(Duration, TunnelInfo)> = registry
        .all()
        .into_iter()
        .map(|(_, edge)| (spread.mul_f64(rand::random()), edge))
        .collect();
    edges.sort_by_key(|(after, _)| *after);
    tracing::info!(
        tunnels = edges.len(),
        ?grace,
        "draining: asking edges to connect elsewhere"
    );
    for (after, edge) in edges {
        sleep_until(begin + after).await;
        let left = grace.saturating_sub(begin.elapsed()).as_millis();
        let line = GatewayMessage::Drain {
            grace_ms: u64::try_from(left).unwrap_or(u64::MAX),
        };
        // A tunnel whose control stream is gone or stuck is about to end by itself.
        let _ = edge.admitted.control.try_send(Box::new(line));
    }
}

async fn until(end: Instant, done: impl Fn() -> bool) {
    while !done() && Instant::now() < end {
        sleep(LOOK).await;
    }
}

fn is_leaving(edge: &TunnelInfo) -> bool {
    edge.is_leaving() || !edge.admitted.welcome.elsewhere
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_are_held_off_until_everything_is_there_that_is_waited_for() {
        let readiness = Readiness::default();
        assert_eq!(readiness.held(), None);
        let (nodes, other) = (readiness.hold("no nodes yet"), readiness.hold("another"));
        assert_eq!(readiness.held().as_deref(), Some("no nodes yet"));
        nodes.says("no nodes yet: refused");
        assert_eq!(readiness.held().as_deref(), Some("no nodes yet: refused"));
        drop(nodes);
        assert_eq!(readiness.held().as_deref(), Some("another"));
        drop(other);
        assert_eq!(readiness.held(), None);
    }
}
