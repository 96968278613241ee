//! Context that all tunnels of an edge share.

use super::{connected_gateways::ConnectedGateways, newest_sessions::NewestSessions};
use crate::{
    config::Config,
    control::{
        api_cache::membership::Membership, connect_error::ConnectError, csr_bootstrap::CsrClient,
        dial::GatewayConnector, gateway_list::GatewayList, heartbeat::HeartbeatRelay,
        identity_store::IdentityStore, rejoin_state::RejoinState,
    },
    metrics::Metrics,
    status::StatusWriter,
};
use arc_swap::ArcSwap;
use causeway_rt::backoff::Backoff;
use causeway_tunnel::{
    buffered::MemoryBudget, control_stream::AnnouncedPorts, edge_side::StreamRequest,
};
use futures_util::future::BoxFuture;
use std::{net::IpAddr, sync::Arc, time::Duration};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

/// How much longer than its streams a tunnel may take to leave.
pub(super) const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);

/// Function that serves a stream. The data path is behind it, of which nothing is known here.
pub(crate) type ServeFn = Arc<dyn Fn(StreamRequest) -> BoxFuture<'static, ()> + Send + Sync>;

/// Takes up which node ports a gateway lists, which was dialled from this address of the node.
pub(crate) type AnnouncedPortsFn = Arc<dyn Fn(AnnouncedPorts, Option<IpAddr>) + Send + Sync>;

/// Context that all tunnels of an edge share.
pub(crate) struct TunnelContext {
    pub(crate) config: Config,
    pub(crate) node: String,
    pub(crate) instance: String,
    /// The node's ports that are served now.
    pub(crate) ports: Arc<ArcSwap<Vec<u16>>>,
    pub(crate) connector: GatewayConnector,
    pub(crate) gateways: GatewayList,
    /// Gateways that are connected, if the edge has tunnels at all of them.
    pub(crate) connected_gateways: ConnectedGateways,
    /// The newest session of each slot at each gateway.
    pub(crate) newest_sessions: NewestSessions,
    pub(crate) serve_stream: ServeFn,
    pub(crate) on_announced_ports: AnnouncedPortsFn,
    /// Membership that gateways update, if this node has an API cache.
    pub(crate) membership: Option<Membership>,
    /// Relay of heartbeats of other pool members, if this node has one.
    pub(crate) heartbeats: Option<HeartbeatRelay>,
    pub(crate) metrics: Arc<Metrics>,
    /// Bytes that streams of all tunnels leave unread here.
    pub(crate) memory_budget: Arc<MemoryBudget>,
    /// Places for streams, of all tunnels.
    pub(crate) stream_permits: Arc<Semaphore>,
    pub(crate) status: Arc<StatusWriter>,
    /// Changes whenever tunnels are to be dialled anew, since what they would be dialled with is another.
    pub(crate) reconnect: watch::Sender<()>,
    /// The identity by which tunnels are dialled.
    pub(crate) identity_store: IdentityStore,
    /// A gateway asks for a new certificate to be had within this time.
    pub(crate) renewal_requests: watch::Sender<Duration>,
    /// Inputs of the decision whether the identity is replaced.
    pub(crate) rejoin: Arc<RejoinState>,
    /// The edge stops.
    pub(crate) stop: CancellationToken,
    /// Says who this node is, where its certificate has ended.
    pub(crate) csr_client: Option<Arc<dyn CsrClient>>,
}

/// Why there is no tunnel.
pub(super) enum TunnelUnavailable {
    ConnectFailed(ConnectError),
    /// The gateway of this instance has tunnels already, or is not the one whose tunnel is to be taken over.
    AlreadyConnected(String),
}

impl From<ConnectError> for TunnelUnavailable {
    fn from(error: ConnectError) -> Self {
        Self::ConnectFailed(error)
    }
}

impl TunnelContext {
    /// Pauses between attempts, as the configuration has them.
    pub(crate) fn backoff(&self) -> Backoff {
        let backoff_config = &self.config.backoff;
        Backoff::new(backoff_config.silent_max, backoff_config.refused_max)
    }
}
