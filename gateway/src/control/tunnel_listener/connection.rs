//! One admitted connection: the tunnel, the task that drives it, and its registration.
//!
//! The driver is a separate task on the worker of the node, so that moving bytes does not wake the session. The
//! [`TunnelConnection`] owns the driver, and the [`Registration`] owns the entry in the registry. Dropping either on any path
//! cleans up completely.

use super::context::{CloseReason, HandshakenEdge, TunnelListener};
use crate::{
    control::eligibility::goaway_message,
    metrics::TunnelGuard,
    state::{
        Registry, TunnelId,
        registry::{RegisterError, ReplaceMode, ReplacedTunnel},
    },
};
use causeway_certs::NodeName;
use causeway_rt::task::TaskGroup;
use causeway_tunnel::{
    Tunnel, TunnelEnd,
    control_stream::{ControlStream, ControlStreamError, GatewayMessage, GoAway},
    gateway_side::{self, GatewaySideConfig},
    wire::MAX_TUNNELS_PER_EDGE,
};
use futures_util::future::BoxFuture;
use std::{future::pending, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, timeout},
};
use tracing::Span;

/// Interval of checks whether a draining edge's streams have ended.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Time without streams after which a draining tunnel without a deadline is closed.
const IDLE_CLOSE_AFTER: Duration = Duration::from_secs(1);
/// Number of streams of an idle tunnel, whose only stream is the control stream.
const CONTROL_STREAMS: usize = 1;

/// Tunnel and the task that drives it.
pub(super) struct TunnelConnection {
    pub(super) tunnel: Tunnel,
    end_receiver: oneshot::Receiver<TunnelEnd>,
    tunnel_end: Option<TunnelEnd>,
    /// Timeout of each wait for a message or the disconnect of the edge.
    pub(super) bound: Duration,
    _driver: TaskGroup,
}

impl TunnelConnection {
    /// Starts HTTP/2 on this worker.
    pub(super) async fn open(
        admission: &TunnelListener,
        edge: Box<HandshakenEdge>,
    ) -> Result<Self, TunnelEnd> {
        let failed = |error: std::io::Error| TunnelEnd::Failed(error.to_string());
        let HandshakenEdge {
            mut io,
            socket,
            round_trip,
            node,
            ..
        } = *edge;
        let traffic = {
            let counted = io.get_mut().0;
            counted.put(socket.attach().map_err(failed)?);
            counted.traffic()
        };
        let config = &admission.settings;
        let settings = GatewaySideConfig {
            keepalive: config.keepalive(),
            budget: config.memory,
            // A refused edge has no streams.
            node_budget: node.map_or_else(
                |_| Arc::default(),
                |node| admission.registry.node_budget(&node),
            ),
            max_streams: config
                .max_streams_per_tunnel
                .saturating_add(CONTROL_STREAMS),
            control_streams: CONTROL_STREAMS,
            round_trip,
            memory_budget: admission.memory_budget.clone(),
            is_trusted: false,
        };
        let (tunnel, driver) = timeout(
            config.hello_timeout,
            gateway_side::connect(io, traffic, settings),
        )
        .await
        .map_err(|_| TunnelEnd::Silent)??;
        let (end_sender, end_receiver) = oneshot::channel();
        let tasks = TaskGroup::default();
        let drive = Box::pin(driver.run());
        tasks.spawn(Span::current(), async move {
            // The send fails only if the session is being dropped.
            let _ = end_sender.send(drive.await);
        });
        Ok(Self {
            tunnel,
            end_receiver,
            tunnel_end: None,
            bound: config.hello_timeout,
            _driver: tasks,
        })
    }

    /// Waits until the tunnel has ended. Cancel-safe.
    pub(super) async fn wait_ended(&mut self) -> TunnelEnd {
        if let Some(ended) = &self.tunnel_end {
            return ended.clone();
        }
        let ended = (&mut self.end_receiver).await.unwrap_or(TunnelEnd::Closed);
        self.tunnel_end.insert(ended).clone()
    }

    /// Closes the tunnel, unless it has already ended.
    pub(super) async fn close(&mut self) -> TunnelEnd {
        self.tunnel.close();
        self.wait_ended().await
    }

    pub(super) async fn send_message(
        &self,
        control: &mut ControlStream,
        message: &GatewayMessage,
    ) -> Result<(), ControlStreamError> {
        timeout(self.bound, control.send(message))
            .await
            .map_err(|_| ControlStreamError::TooSlow(self.bound))?
    }

    /// Makes the edge disconnect with this reason. The edge closes the connection when it has read the reason; after a timeout,
    /// the gateway closes it.
    pub(super) async fn dismiss(
        &mut self,
        control: &mut ControlStream,
        why: GoAway,
        detail: String,
    ) -> CloseReason {
        let message = goaway_message(why, detail.clone());
        self.send_goaway(control, &message).await;
        CloseReason::Dismissed(why, detail)
    }

    /// Sends this message, which makes the edge disconnect.
    pub(super) async fn send_goaway(
        &mut self,
        control: &mut ControlStream,
        message: &GatewayMessage,
    ) {
        if self.send_message(control, message).await.is_ok() {
            control.close();
            let bound = self.bound;
            // After the timeout the connection counts as ended as well.
            let _ = timeout(bound, self.wait_ended()).await;
        }
    }
}

/// Tunnel that accepts no new streams and closes when the open ones have ended.
pub(super) struct DrainingTunnel {
    /// Completes when the streams have ended.
    idle_future: BoxFuture<'static, ()>,
    pub(super) end: CloseReason,
}

impl DrainingTunnel {
    /// Drains the tunnel. Open streams may last until `until`; without `until` their time is unlimited.
    pub(super) fn new(tunnel: &Tunnel, until: Option<Instant>, end: CloseReason) -> Self {
        let tunnel = tunnel.clone();
        Self {
            idle_future: Box::pin(async move { wait_idle(&tunnel, until).await }),
            end,
        }
    }
}

/// Waits until the tunnel has drained, if it drains.
pub(super) async fn wait_drained(draining: &mut Option<DrainingTunnel>) {
    match draining {
        Some(leaving) => leaving.idle_future.as_mut().await,
        None => pending().await,
    }
}

/// Waits until no client's stream is open, at most until `end`. Without `end`, the wait includes a pause, so that a client that
/// selected the tunnel before it began to leave still gets its stream.
async fn wait_idle(tunnel: &Tunnel, end: Option<Instant>) {
    let idle_period = end.map_or(IDLE_CLOSE_AFTER, |_| Duration::ZERO);
    let mut last_active = Instant::now();
    while end.is_none_or(|end| Instant::now() < end) {
        if tunnel.load().open_streams() > CONTROL_STREAMS {
            last_active = Instant::now();
        } else if last_active.elapsed() >= idle_period {
            return;
        }
        sleep(IDLE_CHECK_INTERVAL).await;
    }
}

/// Entry of a tunnel in the registry. Dropping it removes the entry and closes the tunnel.
pub(super) struct Registration {
    registry: Registry,
    node: NodeName,
    id: TunnelId,
    tunnel: Tunnel,
    _tunnel_guard: TunnelGuard,
}

impl Registration {
    pub(super) fn new(
        admission: &TunnelListener,
        node: &NodeName,
        id: TunnelId,
        tunnel: &Tunnel,
    ) -> Self {
        Self {
            registry: admission.registry.clone(),
            node: node.clone(),
            id,
            tunnel: tunnel.clone(),
            _tunnel_guard: admission.metrics.tunnel_guard(),
        }
    }
}

impl Registration {
    /// Marks the tunnel as draining, because the edge has announced it.
    pub(super) fn mark_leaving(&self) {
        self.tunnel.leave();
        self.registry.mark_leaving(&self.node, self.id);
    }

    /// Notifies peers that the edge has reported other unhealthy ports.
    pub(super) fn notify_change(&self) {
        self.registry.notify_change(&self.node);
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.tunnel.close();
        self.registry.unregister(&self.node, self.id);
    }
}

/// Returns the reason and detail for the edge whose tunnel was not registered.
pub(super) fn register_error(node: &NodeName, rejection: &RegisterError) -> (GoAway, String) {
    match rejection {
        RegisterError::Superseded {
            remote_address: from,
            ..
        } => {
            let detail = format!("a newer edge process of {node} has connected from {from}");
            (GoAway::Superseded, detail)
        }
        RegisterError::TooManyTunnels => {
            let detail =
                format!("{node} has reached its maximum number of tunnels: {MAX_TUNNELS_PER_EDGE}");
            (GoAway::Full, detail)
        }
    }
}

/// Retires the tunnels that a newer tunnel replaced.
pub(super) fn retire_replaced(node: &NodeName, from: SocketAddr, replaced: Vec<ReplacedTunnel>) {
    for ReplacedTunnel {
        tunnel: edge,
        mode: fate,
    } in replaced
    {
        let old = edge.tunnel;
        match fate {
            ReplaceMode::TakenOver => old.taken_over.cancel(),
            // The same edge process knows that it has opened a new connection, so it gets no message.
            ReplaceMode::Lost => old.tunnel.close(),
            ReplaceMode::Superseded => {
                let detail =
                    format!("a newer edge process of node {node} has connected from {from}");
                let message = goaway_message(GoAway::Superseded, detail);
                // An edge that does not read the control stream receives nothing.
                if old.control.try_send(Box::new(message)).is_err() {
                    old.taken_over.cancel();
                }
            }
        }
    }
}
