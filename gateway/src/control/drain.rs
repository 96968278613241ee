//! Graceful shutdown: makes the edges connect to other gateways, then waits for open streams.
//!
//! 1. The gateway reports that it is not ready, so that load balancers send it no new clients.
//! 2. Each tunnel receives the message, spread over a short period, because a fleet that reconnects all at once would overload
//!    the other gateways. An edge that is connected to another gateway announces it (`control::tunnel_listener` then drains its
//!    tunnel). Listeners stay open meanwhile.
//! 3. If any edge has not announced that, it has no other gateway. While any stream lasts, also one that an edge has opened to the
//!    cloud, listeners stay open for these edges, because the next process is not running yet and could not bind the port.
//! 4. The listeners close, and clients that have already connected are served. Then tunnels that are still open get no new
//!    streams.
//! 5. Open streams, and requests that wait for an edge which connects to another gateway, get the remaining time. Then all tunnels
//!    are closed.
//!
//! A client that is refused here can therefore reach the edge through another gateway, if there is one. If another process takes
//! over (`successor`), the listeners close as soon as it accepts clients, and steps 2 and 3 are left out: the edges have already
//! connected to it.

use super::successor::Successor;
use crate::{
    metrics::Metrics,
    state::{EgressUsage, Registry, TunnelInfo},
};
use causeway_tunnel::control_stream::GatewayMessage;
use std::{
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU8, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;

/// Maximum period over which edges are notified, or a quarter of the grace period if that is shorter.
const ANNOUNCE_SPREAD: Duration = Duration::from_secs(3);
/// Period per edge, so that few edges are notified at once. An edge that restarts meanwhile can only connect elsewhere.
const ANNOUNCE_INTERVAL: Duration = Duration::from_millis(10);
/// Minimum time for which listeners stay open, or a quarter of the grace period if that is shorter. A load balancer has to see
/// `/readyz` fail first; until then, refused clients would be lost.
const MIN_LISTENERS_OPEN: Duration = Duration::from_secs(3);
/// Time for clients that connected before the listeners closed to send a request, or half of the grace period if that is shorter.
const LATE_REQUEST_WAIT: Duration = Duration::from_secs(1);
/// The same time if no edge waits for the end of this process, because another one has taken over, or because all edges are connected
/// to other gateways. It is the default of `timeouts.tls`, in which a client that has connected may be silent.
const MAX_LATE_REQUEST_WAIT: Duration = Duration::from_secs(10);
/// Age from which a stream counts as lasting, or an eighth of the grace period if that is shorter. Short requests end within it.
const STREAM_SETTLE_AGE: Duration = Duration::from_secs(1);
/// Time for connections of edges to the cloud and to other edges, if the edges have no other gateway, or a quarter of the grace
/// period if that is shorter. Many never end, such as the watches of a kubelet.
const EGRESS_WAIT: Duration = Duration::from_secs(5);
/// Interval of checks while waiting.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
const STARTING: u8 = 0;
const READY: u8 = 1;
const DRAINING: u8 = 2;

/// Readiness of the gateway to serve clients, and the reasons why it is not ready. Not ready at the start. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    stage: Arc<AtomicU8>,
    hold_reasons: Reasons,
    faults: Reasons,
}

/// Reasons of the [`ReadinessBlock`]s that are not dropped yet, oldest first.
type Reasons = Arc<Mutex<Vec<Weak<Mutex<String>>>>>;

/// Condition that a gateway needs before clients should be sent to it, or a fault that does not keep clients away. Dropping
/// the block reports that the condition is met, or that the fault is over.
#[derive(Debug)]
pub struct ReadinessBlock(Arc<Mutex<String>>);

impl ReadinessBlock {
    /// Replaces the text of the reason.
    pub fn set_reason(&self, reason: impl Into<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = reason.into();
    }
}

impl Readiness {
    /// Reports that all listeners are bound. A gateway that drains does not become ready again.
    pub fn set_ready(&self) {
        // A stage other than STARTING does not change.
        let stage = &self.stage;
        let _ = stage.compare_exchange(STARTING, READY, Relaxed, Relaxed);
    }

    /// Reports that the gateway drains.
    pub fn set_draining(&self) {
        self.stage.store(DRAINING, Relaxed);
    }

    /// Whether the gateway drains.
    pub fn is_draining(&self) -> bool {
        self.stage.load(Relaxed) == DRAINING
    }

    /// Keeps clients away until the returned block is dropped.
    pub fn hold(&self, reason: impl Into<String>) -> ReadinessBlock {
        add_reason(&self.hold_reasons, reason)
    }

    /// Reports a fault that does not keep clients away, until the returned block is dropped.
    pub fn report_fault(&self, fault: impl Into<String>) -> ReadinessBlock {
        add_reason(&self.faults, fault)
    }

    /// Returns the reason why clients are kept away, if there is one.
    pub fn hold_reason(&self) -> Option<String> {
        active_reasons(&self.hold_reasons).into_iter().next()
    }

    /// Returns faults that do not keep clients away.
    pub fn faults(&self) -> Vec<String> {
        active_reasons(&self.faults)
    }

    /// Returns the reason why clients should not be sent here, if the reason is that the gateway is starting or draining.
    pub fn not_ready_reason(&self) -> Option<&'static str> {
        match self.stage.load(Relaxed) {
            READY => None,
            DRAINING => Some("the gateway is draining"),
            _ => Some("the gateway is starting: not all listeners are bound"),
        }
    }
}

fn add_reason(reasons: &Reasons, text: impl Into<String>) -> ReadinessBlock {
    let reason = Arc::new(Mutex::new(text.into()));
    let mut reasons = reasons.lock().unwrap_or_else(PoisonError::into_inner);
    reasons.push(Arc::downgrade(&reason));
    ReadinessBlock(reason)
}

fn active_reasons(reasons: &Reasons) -> Vec<String> {
    let mut reasons = reasons.lock().unwrap_or_else(PoisonError::into_inner);
    reasons.retain(|reason| reason.strong_count() > 0);
    let reasons = reasons.iter().filter_map(Weak::upgrade);
    let text = |reason: Arc<Mutex<String>>| {
        let text = reason.lock().unwrap_or_else(PoisonError::into_inner);
        text.clone()
    };
    reasons.map(text).collect()
}

/// Listeners of the gateway, as far as a drain needs them.
pub struct DrainListeners<'a> {
    /// Closes the listeners.
    pub close: &'a CancellationToken,
    /// Function that returns the number of connected clients.
    pub clients: &'a (dyn Fn() -> usize + Sync),
    /// Connections that edges have opened to the cloud and to other edges.
    pub egress: EgressUsage,
    /// Process that takes the listeners over, if there is one.
    pub successor: Successor,
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
    readiness.set_draining();
    metrics.set_draining();
    // An edge that disconnects from now on does not reconnect to this gateway.
    registry.start_drain();
    let end = Instant::now() + grace;
    let successor = &listeners.successor;
    let end = tokio::select! {
        biased;
        () = successor.serving.cancelled() => end,
        end = wait_for_edges(registry, &listeners.egress, (end, grace)) => {
            // The edges may still be connecting to the successor.
            let _ = timeout_at(end, successor.wait_until_serving(Duration::ZERO)).await;
            end
        }
    };
    listeners.close.cancel();
    if !successor.serving.is_cancelled() {
        // The edges need the next process, which may not start before the end of this one.
        let staying = registry.all().into_iter();
        let staying = staying.filter(|(_, edge)| !edge.is_leaving());
        staying.for_each(|(node, _)| listeners.egress.end_links(&node));
    }
    // Connections that wait in the kernel's accept queue are counted only after this time.
    sleep(POLL_INTERVAL.min(grace / 4)).await;
    let late_request_wait = if successor.serving.is_cancelled() || have_all_left(registry) {
        MAX_LATE_REQUEST_WAIT
    } else {
        LATE_REQUEST_WAIT
    };
    let late_deadline = end.min(Instant::now() + late_request_wait.min(grace / 2));
    poll_until(late_deadline, || (listeners.clients)() == 0).await;
    for (node, edge) in registry.all() {
        edge.tunnel.tunnel.drain();
        registry.notify_change(&node);
    }
    // A tunnel whose last stream has ended is closed at once, so that an edge that knows no other gateway dials again.
    poll_until(end, || {
        let mut is_busy = registry.has_waiting_requests();
        registry.for_each_tunnel(|_, edge| {
            if edge.streams() > 0 {
                is_busy = true;
            } else {
                edge.tunnel.tunnel.close();
            }
        });
        !is_busy
    })
    .await;
    let remaining = registry.all();
    let streams: usize = remaining.iter().map(|(_, edge)| edge.streams()).sum();
    if streams > 0 {
        tracing::warn!(streams, "the drain time is over: closing the open streams");
    }
    registry.expire_drain();
    for (_, edge) in remaining {
        edge.tunnel.tunnel.close();
    }
}

/// Asks the edges to connect to other gateways, and waits until they have left, or until the streams of those that stay have
/// ended. Returns the time at which the streams that are open then must end.
async fn wait_for_edges(
    registry: &Registry,
    egress: &EgressUsage,
    (end, grace): (Instant, Duration),
) -> Instant {
    let edges_leaving = async {
        announce_drain(registry, grace, false).await;
        // Edges have half of the time to connect to other gateways; open streams continue and may use the rest.
        let half = end - grace / 2;
        poll_until(half, || !has_tunnel(registry, |edge| !is_leaving(edge))).await;
    };
    tokio::join!(edges_leaving, sleep(MIN_LISTENERS_OPEN.min(grace / 4)));
    wait_for_remaining_edges(registry, egress, (end, grace)).await
}

/// Waits while edges that have not left are connected and have lasting streams. Returns the time at which the streams that are
/// open then must end. No gateway serves the edges that stay until the next process has started.
async fn wait_for_remaining_edges(
    registry: &Registry,
    egress: &EgressUsage,
    (end, grace): (Instant, Duration),
) -> Instant {
    let settle_age = STREAM_SETTLE_AGE.min(grace / 8);
    let last_check = end - LATE_REQUEST_WAIT.min(grace / 8);
    let egress_end = end - grace + EGRESS_WAIT.min(grace / 4);
    let stays_any = || has_tunnel(registry, |edge| !edge.is_leaving());
    if !stays_any() {
        return end;
    }
    // An idle connection between two requests does not count as an open stream.
    registry.for_each_tunnel(|_, edge| edge.tunnel.tunnel.leave());
    tracing::info!("edges have no other gateway: listeners stay open until all streams have ended");
    // Visits every tunnel, because `rotate_generation` has to run for each one. All streams of edges that leave count: they have all
    // the time, and edges that stay are served meanwhile.
    let has_lasting_streams = || {
        let has_lasting_tunnel = has_tunnel(registry, |edge| {
            let is_settled = edge.tunnel.tunnel.load().rotate_generation();
            !is_settled || (edge.is_leaving() && edge.streams() > 0)
        });
        let has_egress = Instant::now() < egress_end && egress.all_open_connections() > 0;
        has_lasting_tunnel || has_egress
    };
    has_lasting_streams();
    loop {
        sleep_until(last_check.min(Instant::now() + settle_age)).await;
        if !stays_any() || Instant::now() >= last_check {
            return end;
        }
        if !has_lasting_streams() {
            return end.min(Instant::now() + LATE_REQUEST_WAIT + settle_age);
        }
    }
}

/// Notifies every tunnel that is not leaving, each at a random time within 10 ms per tunnel, 3 s or a quarter of `grace`. With
/// `successor`, the edges connect to another process at the same address.
pub async fn announce_drain(registry: &Registry, grace: Duration, successor: bool) {
    let begin = Instant::now();
    let mut edges = registry.all();
    edges.retain(|(_, edge)| !edge.is_leaving());
    let number = u32::try_from(edges.len()).unwrap_or(u32::MAX);
    let spread = ANNOUNCE_SPREAD
        .min(ANNOUNCE_INTERVAL.saturating_mul(number))
        .min(grace / 4);
    let mut edges: Vec<(Duration, TunnelInfo)> = edges
        .into_iter()
        .map(|(_, edge)| (spread.mul_f64(rand::random()), edge))
        .collect();
    edges.sort_by_key(|(after, _)| *after);
    tracing::info!(
        tunnels = edges.len(),
        ?grace,
        successor,
        "draining: asking edges to connect again, to another gateway or to the successor"
    );
    for (after, edge) in edges {
        sleep_until(begin + after).await;
        let left = grace.saturating_sub(begin.elapsed()).as_millis();
        let message = GatewayMessage::Drain {
            grace_ms: u64::try_from(left).unwrap_or(u64::MAX),
            successor,
        };
        // A tunnel whose control stream is closed or stuck is about to end.
        let _ = edge.tunnel.control.try_send(Box::new(message));
    }
}

async fn poll_until(deadline: Instant, is_done: impl Fn() -> bool) {
    while !is_done() && Instant::now() < deadline {
        sleep(POLL_INTERVAL).await;
    }
}

/// Whether there are edges, and all of them leave: they are connected to other gateways, or stop.
fn have_all_left(registry: &Registry) -> bool {
    registry.connected_nodes() > 0 && !has_tunnel(registry, |edge| !edge.is_leaving())
}

/// Whether a predicate is true for a tunnel. Evaluates it for each one. No tunnel is copied, because a drain asks often.
fn has_tunnel(registry: &Registry, predicate: impl Fn(&TunnelInfo) -> bool) -> bool {
    let mut is_found = false;
    registry.for_each_tunnel(|_, edge| is_found |= predicate(edge));
    is_found
}

fn is_leaving(edge: &TunnelInfo) -> bool {
    edge.is_leaving() || !edge.tunnel.hello.elsewhere
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        state::registry::tests::{World, node, open},
        worker::Workers,
    };
    use causeway_certs::NodeName;
    use std::sync::atomic::AtomicUsize;

    const GRACE: Duration = Duration::from_secs(30);

    /// Drains a gateway with an edge that has left and has an open stream, and with another edge if `stays`. Returns the seconds after
    /// which the listeners closed, and after which the drain was over.
    async fn drained(stays: bool) -> (u64, u64) {
        let world = World::new();
        let left = NodeName::parse("edge-2").unwrap();
        let (id, tunnel) = world.register_node(&left).await;
        // The first stream of a tunnel is its control stream.
        let _streams = (open(&tunnel, "/").await, open(&tunnel, "/").await);
        world.registry.mark_leaving(&left, id);
        if stays {
            world.register_node(&node()).await;
        }
        let close = CancellationToken::new();
        let listeners = DrainListeners {
            close: &close,
            clients: &|| 0,
            egress: EgressUsage::default(),
            successor: Successor::default(),
        };
        let (metrics, readiness) = (Metrics::new(), Readiness::default());
        let began = Instant::now();
        let closed = async {
            close.cancelled().await;
            began.elapsed().as_secs()
        };
        let draining = async {
            drain(&world.registry, &metrics, &readiness, listeners, GRACE).await;
            began.elapsed().as_secs()
        };
        tokio::join!(closed, draining)
    }

    #[tokio::test(start_paused = true)]
    async fn listeners_close_early_only_if_no_edge_stays() {
        let end = GRACE.as_secs();
        assert_eq!(drained(false).await, (MIN_LISTENERS_OPEN.as_secs(), end));
        // The edge that stays has no other gateway.
        let open_until = end - LATE_REQUEST_WAIT.as_secs();
        assert_eq!(drained(true).await, (open_until, end));
    }

    #[tokio::test(start_paused = true)]
    async fn egress_connections_of_an_edge_that_stays_get_a_short_time() {
        for (egress, open_for) in [(0, 4), (1, 5)] {
            let usage = EgressUsage::default();
            let of_node = usage.node(&node());
            of_node.streams.store(egress, Relaxed);
            let link = of_node.add_link();
            let world = World::new();
            world.register_node(&node()).await;
            let close = CancellationToken::new();
            let listeners = DrainListeners {
                close: &close,
                clients: &|| 0,
                egress: usage.clone(),
                successor: Successor::default(),
            };
            let (metrics, readiness) = (Metrics::new(), Readiness::default());
            let began = Instant::now();
            let closed = async {
                close.cancelled().await;
                began.elapsed().as_secs()
            };
            let draining = drain(&world.registry, &metrics, &readiness, listeners, GRACE);
            let (closed_after, ()) = tokio::join!(closed, draining);
            assert_eq!(closed_after, open_for, "{egress} connections");
            assert!(link.is_cancelled());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_handover_a_silent_client_has_the_time_of_a_handshake() {
        let clients = AtomicUsize::new(1);
        let drained_after = async |is_handed_over: bool| {
            let (successor, close) = (Successor::default(), CancellationToken::new());
            if is_handed_over {
                successor.serving.cancel();
            }
            let clients = || clients.load(Relaxed);
            let listeners = DrainListeners {
                close: &close,
                clients: &clients,
                egress: EgressUsage::default(),
                successor,
            };
            let registry = Registry::new(&Workers::on_current_runtime());
            let metrics = Metrics::new();
            let readiness = Readiness::default();
            let began = Instant::now();
            let draining = drain(
                &registry,
                &metrics,
                &readiness,
                listeners,
                Duration::from_secs(30),
            );
            draining.await;
            began.elapsed()
        };
        let (ordinary, handed_over) = (drained_after(false).await, drained_after(true).await);
        let open = MIN_LISTENERS_OPEN;
        assert_eq!(ordinary, open + POLL_INTERVAL + LATE_REQUEST_WAIT);
        assert_eq!(handed_over, POLL_INTERVAL + MAX_LATE_REQUEST_WAIT);
        clients.store(0, Relaxed);
        assert_eq!(drained_after(true).await, POLL_INTERVAL);
    }

    #[test]
    fn clients_wait_until_all_startup_conditions_are_met() {
        let readiness = Readiness::default();
        assert_eq!(readiness.hold_reason(), None);
        let (nodes, other) = (readiness.hold("no nodes yet"), readiness.hold("another"));
        assert_eq!(readiness.hold_reason().as_deref(), Some("no nodes yet"));
        nodes.set_reason("no nodes yet: refused");
        assert_eq!(
            readiness.hold_reason().as_deref(),
            Some("no nodes yet: refused")
        );
        drop(nodes);
        assert_eq!(readiness.hold_reason().as_deref(), Some("another"));
        drop(other);
        assert_eq!(readiness.hold_reason(), None);
    }
}
