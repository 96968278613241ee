//! Graceful shutdown: asks the edges to connect elsewhere, then waits for open streams.
//!
//! 1. The gateway reports that it is not ready, so that it gets no new clients.
//! 2. Each tunnel gets the message, spread over a short period: a fleet that reconnects at once is a storm. An edge that
//!    has connected elsewhere says so (`control::tunnel_listener` then drains its tunnel). Listeners stay open meanwhile.
//! 3. Edges that are still connected have no other gateway. While any stream lasts, listeners stay open for them: the process
//!    that follows this one is not running yet, and could not use the port.
//! 4. The listeners close, and clients that have connected already are served. Then a tunnel that is still open gets no new
//!    streams.
//! 5. Open streams get the remaining time; then all tunnels are closed.
//!
//! A client that is refused here therefore finds the edge at another gateway, if there is one.

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

/// Period over which edges are informed, or a quarter of the grace period.
const SPREAD: Duration = Duration::from_secs(3);
/// Minimum time for which listeners stay open, or a quarter of the grace period: a load balancer has to see `/readyz` first,
/// and refusing clients at once would lose some.
const LAME_DUCK: Duration = Duration::from_secs(3);
/// Time for clients that connected before the listeners closed to send a request, or half of the grace period.
const LATE: Duration = Duration::from_secs(1);
/// Age from which a stream counts as lasting, or an eighth of the grace period: short requests end within it.
const SETTLE: Duration = Duration::from_secs(1);
/// Interval of checks while waiting.
const LOOK: Duration = Duration::from_millis(100);
const STARTING: u8 = 0;
const READY: u8 = 1;
const DRAINING: u8 = 2;

/// Whether clients should be sent to this gateway. At first they should not. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    stage: Arc<AtomicU8>,
    holds: Reasons,
    faults: Reasons,
}

/// Reasons whose blocks still exist, oldest first.
type Reasons = Arc<Mutex<Vec<Weak<Mutex<String>>>>>;

/// Condition that a gateway needs before clients should be sent to it, or a fault that does not keep clients away. Dropping
/// the block reports that the condition is met, or that the fault is over.
#[derive(Debug)]
pub struct ReadinessBlock(Arc<Mutex<String>>);

impl ReadinessBlock {
    /// Replaces the text of the reason.
    pub fn says(&self, why: impl Into<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = why.into();
    }
}

impl Readiness {
    /// Reports that all listeners are bound. A gateway that drains does not become ready again.
    pub fn ready(&self) {
        // Anything but STARTING stays as it is.
        let stage = &self.stage;
        let _ = stage.compare_exchange(STARTING, READY, Relaxed, Relaxed);
    }

    /// Reports that the gateway drains.
    pub fn drains(&self) {
        self.stage.store(DRAINING, Relaxed);
    }

    /// Whether the gateway drains.
    pub fn is_draining(&self) -> bool {
        self.stage.load(Relaxed) == DRAINING
    }

    /// Keeps clients away until the returned block is dropped.
    pub fn hold(&self, why: impl Into<String>) -> ReadinessBlock {
        enter(&self.holds, why)
    }

    /// Reports a fault that does not keep clients away, until the returned block is dropped.
    pub fn fault(&self, what: impl Into<String>) -> ReadinessBlock {
        enter(&self.faults, what)
    }

    /// Returns the reason why clients are kept away, if there is one.
    pub fn held(&self) -> Option<String> {
        list(&self.holds).into_iter().next()
    }

    /// Returns faults that do not keep clients away.
    pub fn faults(&self) -> Vec<String> {
        list(&self.faults)
    }

    /// Returns the reason why clients should not be sent here, if the gateway's own stage is the reason.
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

/// The listeners, as a drain needs them.
pub struct DrainListeners<'a> {
    /// Closes the listeners.
    pub close: &'a CancellationToken,
    /// Returns the number of connected clients.
    pub clients: &'a (dyn Fn() -> usize + Sync),
}

/// Drains the gateway within `grace`, and closes the listeners once the edges are gone.
/// Returns early when nothing is left to wait for.
pub async fn drain(
    registry: &Registry,
    metrics: &Metrics,
    readiness: &Readiness,
    listeners: DrainListeners<'_>,
    grace: Duration,
) {
    readiness.drains();
    metrics.drains();
    // An edge that has disconnected does not reconnect to this gateway.
    registry.close();
    let begin = Instant::now();
    let end = begin + grace;
    let going = async {
        announce_drain(registry, grace, SPREAD.min(grace / 4)).await;
        // Edges have half of the time to connect to other gateways; open streams continue and may use the rest.
        let half = begin + grace / 2;
        until(half, || {
            registry.all().iter().all(|(_, edge)| is_leaving(edge))
        })
        .await;
    };
    tokio::join!(going, sleep(LAME_DUCK.min(grace / 4)));
    let end = serve_on(registry, end, grace).await;
    listeners.close.cancel();
    // Some connections are still in the kernel's queue and not counted before this.
    sleep(LOOK.min(grace / 4)).await;
    let late = end.min(Instant::now() + LATE.min(grace / 2));
    until(late, || (listeners.clients)() == 0).await;
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
        tracing::warn!(streams, "the drain time is over: closing the open streams");
    }
    registry.end();
    for (_, edge) in left {
        edge.admitted.tunnel.close();
    }
}

/// Waits while edges are connected that have not left, and streams last. Returns the time at which the streams that are open
/// then must end. If edges stay, no gateway serves them in the meantime.
async fn serve_on(registry: &Registry, end: Instant, grace: Duration) -> Instant {
    let settle = SETTLE.min(grace / 8);
    let last = end - LATE.min(grace / 8);
    let tunnels = || registry.all().into_iter().map(|(_, edge)| edge);
    if tunnels().all(|edge| edge.is_leaving()) {
        return end;
    }
    for edge in tunnels() {
        // An idle connection between two requests does not count as an open stream.
        edge.admitted.tunnel.leave();
    }
    tracing::info!("edges have no other gateway: listeners stay open until all streams have ended");
    // Every tunnel is checked each time.
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

/// Informs every connected tunnel, each at a random time within `spread`.
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
        "draining: asking edges to connect to other gateways"
    );
    for (after, edge) in edges {
        sleep_until(begin + after).await;
        let left = grace.saturating_sub(begin.elapsed()).as_millis();
        let line = GatewayMessage::Drain {
            grace_ms: u64::try_from(left).unwrap_or(u64::MAX),
        };
        // A tunnel whose control stream is closed or stuck ends by itself soon.
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
    fn clients_wait_until_all_startup_conditions_are_met() {
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
