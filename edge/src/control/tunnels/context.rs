//! Context that all tunnels of an edge share.

use super::connected_gateways::ConnectedGateways;
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
use causeway_certs::verify::{TrustError, tunnel_client};
use causeway_rt::backoff::Backoff;
use causeway_tunnel::{
    buffered::MemoryBudget, control_stream::AnnouncedPorts, edge_side::StreamRequest,
};
use futures_util::future::BoxFuture;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Time that a tunnel may take to close, in addition to the time for its streams.
pub(super) const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);

/// Function that serves a stream. It separates the control plane from the data path.
pub(crate) type ServeFn = Arc<dyn Fn(Box<StreamRequest>) -> BoxFuture<'static, ()> + Send + Sync>;

/// Function that takes over the node ports that a gateway lists. The address is that of the node from which the gateway was
/// dialled.
pub(crate) type AnnouncedPortsFn = Arc<dyn Fn(AnnouncedPorts, Option<IpAddr>) + Send + Sync>;

/// Ports whose health checks fail, or whose first check has not ended yet.
pub(crate) type UnhealthyPorts = Arc<BTreeSet<u16>>;

/// Context that all tunnels of an edge share.
pub(crate) struct TunnelContext {
    pub(crate) config: Config,
    pub(crate) node: String,
    pub(crate) instance: String,
    /// Node ports that the edge serves now.
    pub(crate) ports: Arc<ArcSwap<Vec<u16>>>,
    /// Ports of the services that the edge reports now.
    pub(crate) services: Arc<ArcSwap<BTreeMap<String, u16>>>,
    /// Results of the health checks of upstreams.
    pub(crate) unhealthy_ports: watch::Receiver<UnhealthyPorts>,
    pub(crate) connector: GatewayConnector,
    pub(crate) gateways: GatewayList,
    /// Gateways that are connected, if the edge has tunnels at several of them.
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
    /// Budget for the bytes that streams of all tunnels leave unread here.
    pub(crate) memory_budget: Arc<MemoryBudget>,
    /// Permits for streams of all tunnels.
    pub(crate) stream_permits: Arc<Semaphore>,
    pub(crate) status: Arc<StatusWriter>,
    /// Notification that new tunnels must replace the open ones, because the identity or the trusted roots have changed.
    pub(crate) reconnect: watch::Sender<()>,
    /// Identity that tunnels present.
    pub(crate) identity_store: IdentityStore,
    /// Time within which a gateway requests a new certificate.
    pub(crate) renewal_requests: watch::Sender<Duration>,
    /// Inputs of the decision whether the identity is replaced.
    pub(crate) rejoin: Arc<RejoinState>,
    /// Token that is cancelled when the edge stops.
    pub(crate) stop: CancellationToken,
    /// Client of the cluster, which authenticates this node if its certificate has expired.
    pub(crate) csr_client: Option<Arc<dyn CsrClient>>,
}

/// Reason why there is no tunnel.
pub(super) enum TunnelUnavailable {
    ConnectFailed(ConnectError),
    /// The gateway with this instance name already has tunnels, is not the gateway whose tunnel this one replaces, or is crowded while
    /// the edge searches a gateway in place of another crowded one.
    AlreadyConnected(String),
}

impl From<ConnectError> for TunnelUnavailable {
    fn from(error: ConnectError) -> Self {
        Self::ConnectFailed(error)
    }
}

impl TunnelContext {
    /// Dials from now on with the current identity, trusted roots and revocations.
    ///
    /// # Errors
    /// If TLS cannot be set up.
    pub(crate) fn update_tls(&self) -> Result<(), TrustError> {
        let tls = tunnel_client(&self.identity_store.identity())?;
        self.connector.set_tls(tls);
        Ok(())
    }

    /// Returns a back-off with the configured delays.
    pub(crate) fn backoff(&self) -> Backoff {
        let backoff_config = &self.config.backoff;
        Backoff::new(backoff_config.silent_max, backoff_config.refused_max)
    }
}

/// Newest session of each slot at each gateway process, for as long as its tunnel is open.
#[derive(Debug, Default)]
pub(crate) struct NewestSessions(Mutex<HashMap<(String, u32), CancellationToken>>);

impl NewestSessions {
    /// Whether the tunnel of the newest session of this slot at this gateway process is still open.
    pub(super) fn is_open(&self, gateway: &str, slot: u32) -> bool {
        let sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let session = sessions.get(&(gateway.to_owned(), slot));
        session.is_some_and(|ended| !ended.is_cancelled())
    }

    /// Adds a session as the newest one of its slot, until the returned guard is dropped.
    pub(super) fn insert(&self, gateway: String, slot: u32) -> DropGuard {
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|_, ended| !ended.is_cancelled());
        let ended = CancellationToken::new();
        sessions.insert((gateway, slot), ended.clone());
        ended.drop_guard()
    }
}
