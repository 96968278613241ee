//! The tunnels of an edge: dialled, kept, replaced, and left in order.
//!
//! Its tunnels are `slots`, all of them at one gateway, and at another one if that fails; or (`every`) some at each address
//! that the gateways' names lead to, each gateway by one address only (`reached`), and at all gateways behind one address
//! (`seek`). A tunnel says hello (`greeting`) and serves (`session`).

mod bulk;
mod every;
mod greeting;
mod heard;
mod only;
mod reached;
mod seek;
mod session;
mod slots;

use super::{
    changes::Changes, dial::Dialler, gateways::Gateways, held::Held, reader::Told,
    rejoin::RejoinState, trouble::Trouble, vouch::Cluster,
};
use crate::{
    config::{AtGateways, Config},
    metrics::Metrics,
    state::Writer,
};
use arc_swap::ArcSwap;
use causeway_tunnel::{backoff::Backoff, hello::Listed, server::Asked, unread::Pressure};
use futures_util::future::BoxFuture;
pub(crate) use reached::Reached;
pub(crate) use session::NewestSessions;
use slots::Slots;
use std::{net::IpAddr, sync::Arc, time::Duration};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

/// How much longer than its streams a tunnel may take to leave.
const LEAVING: Duration = Duration::from_secs(2);

/// What a stream is handed to: the way, of which nothing is known here.
pub(crate) type Serve = Arc<dyn Fn(Asked) -> BoxFuture<'static, ()> + Send + Sync>;

/// Takes up which node ports a gateway lists, which was dialled from this address of the node.
pub(crate) type List = Arc<dyn Fn(Listed, Option<IpAddr>) + Send + Sync>;

/// What all tunnels of an edge share.
pub(crate) struct Links {
    pub(crate) config: Config,
    pub(crate) node: String,
    pub(crate) instance: String,
    /// The node's ports that are served now.
    pub(crate) ports: Arc<ArcSwap<Vec<u16>>>,
    pub(crate) dialler: Dialler,
    pub(crate) gateways: Gateways,
    /// Which gateways are reached, where all of them are.
    pub(crate) reached: Reached,
    /// The newest session of each slot at each gateway.
    pub(crate) newest: NewestSessions,
    pub(crate) serve: Serve,
    pub(crate) list: List,
    /// What hears with whom this node reads, where it does.
    pub(crate) members: Option<Told>,
    pub(crate) metrics: Arc<Metrics>,
    /// Bytes that streams of all tunnels leave unread here.
    pub(crate) pressure: Arc<Pressure>,
    /// Places for streams, of all tunnels.
    pub(crate) places: Arc<Semaphore>,
    pub(crate) state: Arc<Writer>,
    /// Changes whenever tunnels are to be dialled anew, since what they would be dialled with is another.
    pub(crate) anew: watch::Sender<()>,
    /// The identity by which tunnels are dialled.
    pub(crate) held: Held,
    /// A gateway asks for a new certificate to be had within this time.
    pub(crate) renewal: watch::Sender<Duration>,
    /// Inputs of the decision whether the identity is replaced.
    pub(crate) rejoin: Arc<RejoinState>,
    /// The edge stops.
    pub(crate) stop: CancellationToken,
    /// Says who this node is, where its certificate has ended.
    pub(crate) cluster: Option<Arc<dyn Cluster>>,
}

/// Why there is no tunnel.
enum Missed {
    Trouble(Trouble),
    /// The gateway of this instance has tunnels already, or is not the one whose tunnel is to be taken over.
    Reached(String),
}

impl From<Trouble> for Missed {
    fn from(trouble: Trouble) -> Self {
        Self::Trouble(trouble)
    }
}

impl Links {
    /// Pauses between attempts, as the configuration has them.
    pub(super) fn backoff(&self) -> Backoff {
        let bounds = &self.config.backoff;
        Backoff::new(bounds.silent_max, bounds.refused_max)
    }

    /// Keeps the tunnels until the edge stops, then leaves in order.
    pub(crate) async fn run(self: Arc<Self>, changes: Changes) {
        let stop = self.stop.clone();
        match self.config.tunnels.gateways {
            AtGateways::One => {
                let leaving = Slots::anywhere(self).run(None, &stop, changes).await;
                leaving.end(&stop).await;
            }
            AtGateways::Every => Box::pin(every::run(self, changes)).await,
        }
    }
}

#[cfg(test)]
mod tests;
