//! One admitted connection: the tunnel, the task that drives it, and its place in the registry.
//!
//! The driver is a task of its own, on the core of the node: what moves bytes is woken without the
//! conversation. It belongs to the [`Link`], and the place to [`Registered`]: dropping either on
//! any path leaves nothing behind.

use super::{HandshakenEdge, TunnelListener, close_reason::CloseReason};
use crate::{
    control::node_sync::goaway_message,
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
    liveness::KeepaliveConfig,
    wire::MOST_TUNNELS,
};
use futures_util::future::BoxFuture;
use std::{future::pending, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, timeout},
};
use tracing::Span;

/// How often is looked whether a leaving edge's streams have ended.
const LOOK: Duration = Duration::from_millis(100);
/// How long a tunnel that nobody hurries has been without streams when it goes.
const LINGER: Duration = Duration::from_secs(1);
/// Every tunnel has its control stream open.
const CONTROL: usize = 1;

/// A tunnel and the task that drives it, which ends with this value.
pub(super) struct TunnelConnection {
    pub(super) tunnel: Tunnel,
    over: oneshot::Receiver<TunnelEnd>,
    ended: Option<TunnelEnd>,
    /// Of each wait for the edge.
    pub(super) bound: Duration,
    _driver: TaskGroup,
}

impl TunnelConnection {
    /// Begins HTTP/2 on this core.
    pub(super) async fn open(
        admission: &TunnelListener,
        arrived: Box<HandshakenEdge>,
    ) -> Result<Self, TunnelEnd> {
        let failed = |error: std::io::Error| TunnelEnd::Failed(error.to_string());
        let HandshakenEdge {
            mut io,
            socket,
            round_trip,
            node,
            ..
        } = *arrived;
        let traffic = {
            let counted = io.get_mut().0;
            counted.put(socket.attach().map_err(failed)?);
            counted.traffic()
        };
        let config = &admission.settings;
        let settings = GatewaySideConfig {
            liveness: KeepaliveConfig {
                probe_after: config.ping_after,
                suspect_after: config.ping_timeout,
                close_after: config.close_after,
            },
            budget: config.memory,
            // Who is refused has no streams.
            siblings: node.map_or_else(
                |_| Arc::default(),
                |node| admission.registry.siblings(&node),
            ),
            max_streams: config.max_streams_per_tunnel.saturating_add(CONTROL),
            round_trip,
            pressure: admission.pressure.clone(),
        };
        let (tunnel, driver) = timeout(
            config.hello_timeout,
            gateway_side::connect(io, traffic, settings),
        )
        .await
        .map_err(|_| TunnelEnd::Silent)??;
        let (tell, over) = oneshot::channel();
        let tasks = TaskGroup::default();
        let drive = Box::pin(driver.run());
        tasks.spawn(Span::current(), async move {
            // Nobody listens only where the conversation is being dropped.
            let _ = tell.send(drive.await);
        });
        Ok(Self {
            tunnel,
            over,
            ended: None,
            bound: config.hello_timeout,
            _driver: tasks,
        })
    }

    /// Waits until the tunnel has ended. Cancel-safe.
    pub(super) async fn ended(&mut self) -> TunnelEnd {
        if let Some(ended) = &self.ended {
            return ended.clone();
        }
        let ended = (&mut self.over).await.unwrap_or(TunnelEnd::Closed);
        self.ended.insert(ended).clone()
    }

    /// Closes the tunnel, if it has not ended by itself.
    pub(super) async fn close(&mut self) -> TunnelEnd {
        self.tunnel.close();
        self.ended().await
    }

    pub(super) async fn tell(
        &self,
        control: &mut ControlStream,
        line: &GatewayMessage,
    ) -> Result<(), ControlStreamError> {
        timeout(self.bound, control.tell(line))
            .await
            .map_err(|_| ControlStreamError::TooSlow(self.bound))?
    }

    /// Sends the edge away. It hangs up when it has read why; else it is hung up on after a bound.
    pub(super) async fn dismiss(
        &mut self,
        control: &mut ControlStream,
        why: GoAway,
        detail: String,
    ) -> CloseReason {
        let line = goaway_message(why, detail.clone());
        self.send_away(control, &line).await;
        CloseReason::Dismissed(why, detail)
    }

    /// The same, in these words.
    pub(super) async fn send_away(&mut self, control: &mut ControlStream, line: &GatewayMessage) {
        if self.tell(control, line).await.is_ok() {
            control.close();
            let bound = self.bound;
            // Either way it is over.
            let _ = timeout(bound, self.ended()).await;
        }
    }
}

/// A tunnel takes no new streams and goes when the open ones have ended.
pub(super) struct DrainingTunnel {
    /// They have ended.
    idle: BoxFuture<'static, ()>,
    pub(super) end: CloseReason,
}

impl DrainingTunnel {
    /// They are given until then; without it, as long as they like.
    pub(super) fn new(tunnel: &Tunnel, until: Option<Instant>, end: CloseReason) -> Self {
        let tunnel = tunnel.clone();
        Self {
            idle: Box::pin(async move { idle(&tunnel, until).await }),
            end,
        }
    }
}

/// Waits until it has left, if it is leaving.
pub(super) async fn drained(leaving: &mut Option<DrainingTunnel>) {
    match leaving {
        Some(leaving) => leaving.idle.as_mut().await,
        None => pending().await,
    }
}

/// Waits until no caller's stream is open, at most until `end`. Without an end nobody is in a hurry: a
/// caller that chose the tunnel before it began to leave gets its stream.
async fn idle(tunnel: &Tunnel, end: Option<Instant>) {
    let linger = end.map_or(LINGER, |_| Duration::ZERO);
    let mut quiet = Instant::now();
    while end.is_none_or(|end| Instant::now() < end) {
        if tunnel.load().streams() > CONTROL {
            quiet = Instant::now();
        } else if quiet.elapsed() >= linger {
            return;
        }
        sleep(LOOK).await;
    }
}

/// The tunnel's place in the registry; dropping it gives up the place and closes the tunnel.
pub(super) struct Registration {
    registry: Registry,
    node: NodeName,
    id: TunnelId,
    tunnel: Tunnel,
    _open: TunnelGuard,
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
            _open: admission.metrics.tunnel(),
        }
    }
}

impl Registration {
    /// Notes that the edge has announced that this tunnel leaves.
    pub(super) fn leaves(&self) {
        self.tunnel.leave();
        self.registry.leaves(&self.node, self.id);
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.tunnel.close();
        self.registry.unregister(&self.node, self.id);
    }
}

/// Why a tunnel was not registered, for its edge.
pub(super) fn register_error(node: &NodeName, refused: &RegisterError) -> (GoAway, String) {
    match refused {
        RegisterError::Superseded { from, .. } => {
            let detail = format!("{node} is served by a later process that dialled from {from}");
            (GoAway::Superseded, detail)
        }
        RegisterError::Full => {
            let detail = format!("{node} has as many tunnels as it may have: {MOST_TUNNELS}");
            (GoAway::Full, detail)
        }
    }
}

/// Takes the tunnels that a newer one replaced out of use.
pub(super) fn retire_replaced(node: &NodeName, from: SocketAddr, replaced: Vec<ReplacedTunnel>) {
    for ReplacedTunnel { edge, fate } in replaced {
        let old = edge.admitted;
        match fate {
            ReplaceMode::TakenOver => old.taken_over.cancel(),
            // The same process knows that it dialled anew.
            ReplaceMode::Lost => old.tunnel.close(),
            ReplaceMode::Superseded => {
                let detail = format!("a later process of node {node} dialled from {from}");
                let line = goaway_message(GoAway::Superseded, detail);
                // One that reads no lines hears nothing.
                if old.control.try_send(Box::new(line)).is_err() {
                    old.taken_over.cancel();
                }
            }
        }
    }
}
