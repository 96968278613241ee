//! One admitted connection: the tunnel, the task that drives it, and its place in the registry.
//!
//! The driver is a task of its own, on the core of the node: what moves bytes is woken without the
//! conversation. It belongs to the [`Link`], and the place to [`Registered`]: dropping either on
//! any path leaves nothing behind.

use super::{Admission, Arrived, end::End};
use crate::{
    control::expel::dismissal,
    metrics::TunnelGuard,
    state::{
        Registry, TunnelId,
        registry::{Fate, Replaced, Unregistered},
    },
};
use causeway_certs::NodeName;
use causeway_tunnel::{
    Ended, Tunnel,
    client::{self, Settings},
    hello::{Control, ControlError, Dismissal, ToEdge},
    liveness::Bounds,
    task::Tasks,
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
pub(super) struct Link {
    pub(super) tunnel: Tunnel,
    over: oneshot::Receiver<Ended>,
    ended: Option<Ended>,
    /// Of each wait for the edge.
    pub(super) bound: Duration,
    _driver: Tasks,
}

impl Link {
    /// Begins HTTP/2 on this core.
    pub(super) async fn open(admission: &Admission, arrived: Box<Arrived>) -> Result<Self, Ended> {
        let failed = |error: std::io::Error| Ended::Failed(error.to_string());
        let Arrived {
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
        let settings = Settings {
            liveness: Bounds {
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
        let (tunnel, driver) =
            timeout(config.hello_timeout, client::connect(io, traffic, settings))
                .await
                .map_err(|_| Ended::Silent)??;
        let (tell, over) = oneshot::channel();
        let tasks = Tasks::default();
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
    pub(super) async fn ended(&mut self) -> Ended {
        if let Some(ended) = &self.ended {
            return ended.clone();
        }
        let ended = (&mut self.over).await.unwrap_or(Ended::Closed);
        self.ended.insert(ended).clone()
    }

    /// Closes the tunnel, if it has not ended by itself.
    pub(super) async fn close(&mut self) -> Ended {
        self.tunnel.close();
        self.ended().await
    }

    pub(super) async fn tell(
        &self,
        control: &mut Control,
        line: &ToEdge,
    ) -> Result<(), ControlError> {
        timeout(self.bound, control.tell(line))
            .await
            .map_err(|_| ControlError::TooSlow(self.bound))?
    }

    /// Sends the edge away. It hangs up when it has read why; else it is hung up on after a bound.
    pub(super) async fn dismiss(
        &mut self,
        control: &mut Control,
        why: Dismissal,
        detail: String,
    ) -> End {
        let line = dismissal(why, detail.clone());
        self.send_away(control, &line).await;
        End::Dismissed(why, detail)
    }

    /// The same, in these words.
    pub(super) async fn send_away(&mut self, control: &mut Control, line: &ToEdge) {
        if self.tell(control, line).await.is_ok() {
            control.close();
            let bound = self.bound;
            // Either way it is over.
            let _ = timeout(bound, self.ended()).await;
        }
    }
}

/// A tunnel takes no new streams and goes when the open ones have ended.
pub(super) struct Leaving {
    /// They have ended.
    idle: BoxFuture<'static, ()>,
    pub(super) end: End,
}

impl Leaving {
    /// They are given until then; without it, as long as they like.
    pub(super) fn new(tunnel: &Tunnel, until: Option<Instant>, end: End) -> Self {
        let tunnel = tunnel.clone();
        Self {
            idle: Box::pin(async move { idle(&tunnel, until).await }),
            end,
        }
    }
}

/// Waits until it has left, if it is leaving.
pub(super) async fn over(leaving: &mut Option<Leaving>) {
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
pub(super) struct Registered {
    registry: Registry,
    node: NodeName,
    id: TunnelId,
    tunnel: Tunnel,
    _open: TunnelGuard,
}

impl Registered {
    pub(super) fn new(
        admission: &Admission,
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

impl Registered {
    /// Notes that the edge has announced that this tunnel leaves.
    pub(super) fn leaves(&self) {
        self.tunnel.leave();
        self.registry.leaves(&self.node, self.id);
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.tunnel.close();
        self.registry.unregister(&self.node, self.id);
    }
}

/// Why a tunnel was not registered, for its edge.
pub(super) fn explain(node: &NodeName, refused: &Unregistered) -> (Dismissal, String) {
    match refused {
        Unregistered::Superseded { from, .. } => {
            let detail = format!("{node} is served by a later process that dialled from {from}");
            (Dismissal::Superseded, detail)
        }
        Unregistered::Full => {
            let detail = format!("{node} has as many tunnels as it may have: {MOST_TUNNELS}");
            (Dismissal::Full, detail)
        }
    }
}

/// Takes the tunnels that a newer one replaced out of use.
pub(super) fn retire(node: &NodeName, from: SocketAddr, replaced: Vec<Replaced>) {
    for Replaced { edge, fate } in replaced {
        let old = edge.admitted;
        match fate {
            Fate::TakenOver => old.taken_over.cancel(),
            // The same process knows that it dialled anew.
            Fate::Lost => old.tunnel.close(),
            Fate::Superseded => {
                let detail = format!("a later process of node {node} dialled from {from}");
                let line = dismissal(Dismissal::Superseded, detail);
                // One that reads no lines hears nothing.
                if old.control.try_send(Box::new(line)).is_err() {
                    old.taken_over.cancel();
                }
            }
        }
    }
}
