//! Context of the tunnel port's listener, and an edge between its handshake and its session.

use super::tls::{Io, LiveTls};
use crate::{
    audit, config,
    control::{
        api_cache::ApiCacheServer, gateway_revocation::GatewayRevocation,
        heartbeat::HeartbeatVerifier, node_records::NodeRecordWriter, peers::ForwardHandler,
    },
    metrics::Metrics,
    shared_state::SharedState,
    state::{
        AdvertisedGateways, AnnouncedPortsCell, Nodes, Registry, egress::NodeEgress,
        registry::EdgeCertificate,
    },
    worker::{WorkerId, Workers},
};
use axum::Router;
use causeway_certs::{LiveCa, NodeName, PeerRejected};
use causeway_rt::{log_throttle::LogThrottle, socket::DetachedSocket};
use causeway_tunnel::{
    StreamError, TunnelEnd,
    buffered::MemoryBudget,
    control_stream::{ControlStreamError, GoAway},
    edge_side::StreamRequest,
};
use futures_util::future::BoxFuture;
use std::{fmt, net::SocketAddr, sync::Arc, time::Duration};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

/// Connection limits of the tunnel port.
#[derive(Clone, Copy, Debug)]
pub struct TunnelPortLimits {
    /// Maximum number of connections that have not finished their handshake. At the limit, the oldest connection that has not
    /// sent a whole `ClientHello` is closed.
    pub arriving: usize,
    /// Maximum number of concurrent handshakes whose `ClientHello` has arrived, each with its own TLS state. Others wait in a
    /// queue per source.
    pub handshakes: usize,
    /// Maximum number of connections of peers without a certificate. Joining takes some milliseconds.
    pub joining: usize,
    /// Maximum number of connections of edges that renew their certificates. Peers without a certificate do not count here.
    pub renewing: usize,
}

impl Default for TunnelPortLimits {
    fn default() -> Self {
        Self {
            arriving: config::Tunnel::default().max_handshakes,
            handshakes: 1024,
            joining: 256,
            renewing: 256,
        }
    }
}

/// Listener of the tunnel port.
#[derive(Clone, Debug)]
pub struct TunnelListener {
    /// Random identifier of the process.
    pub instance: Arc<str>,
    /// Workers that serve tunnels.
    pub workers: Workers,
    /// Registry of tunnels.
    pub registry: Registry,
    /// The table of nodes.
    pub nodes: Nodes,
    /// Notifies of changes of the table, if a cluster provides the nodes.
    pub cluster: Option<watch::Receiver<()>>,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// The tunnel port's TLS.
    pub tls: LiveTls,
    /// Writer of records of nodes that connect without an enrolment.
    pub record_writer: NodeRecordWriter,
    /// State that gateways share, in which unknown nodes are looked up.
    pub shared_state: Option<SharedState>,
    /// The CA that signs.
    pub ca: LiveCa,
    /// Timeouts and limits.
    pub settings: config::Tunnel,
    /// Connection limits.
    pub limits: TunnelPortLimits,
    /// Memory budget of bytes that clients have not read yet, for all tunnels.
    pub memory_budget: Arc<MemoryBudget>,
    /// Time that the open streams of a draining edge get.
    pub drain: Duration,
    /// Addresses of gateways. The first one is the display name of this gateway.
    pub advertised: AdvertisedGateways,
    /// The node ports that the cluster lists.
    pub announced_ports: AnnouncedPortsCell,
    /// Revocations of gateways' certificates, which edges receive.
    pub gateway_revocation: GatewayRevocation,
    /// Routes for enrolment and renewal.
    pub enrol: Router,
    /// Server of the API cache, if it is enabled.
    pub api_cache: Option<ApiCacheServer>,
    /// Handler of requests that other gateways forward, if there are other gateways.
    pub peer_streams: Option<ForwardHandler>,
    /// Request path of the streams that edges open.
    pub egress: EgressHandler,
    /// Verifier of delegated heartbeats, if they are enabled.
    pub heartbeats: Option<HeartbeatVerifier>,
    /// Log throttle for edges that connect before the nodes of the cluster are loaded, because a whole fleet retries until then.
    pub(crate) early_throttle: Arc<LogThrottle>,
}

/// Edge that opens streams.
#[derive(Clone, Debug)]
pub struct EgressEdge {
    /// Node in its certificate.
    pub node: NodeName,
    /// Address from which it connected.
    pub address: SocketAddr,
    /// Worker that serves the connection.
    pub worker: WorkerId,
}

/// Serves one stream.
type ServeStreamFn = Arc<dyn Fn(StreamRequest) -> BoxFuture<'static, ()> + Send + Sync>;

/// Whether the edge must use another connection for new streams.
type MustLeaveFn = Box<dyn Fn() -> bool + Send + Sync>;

/// Connection of an edge that opens streams, as the request path sees it.
pub struct EgressLink {
    /// Serves one stream.
    pub(crate) serve_stream: ServeStreamFn,
    /// Usage of the node on all its connections.
    pub(crate) usage: Arc<NodeEgress>,
    /// Cancelled when newer connections of the same edge replace this one.
    pub(crate) replaced: CancellationToken,
    /// Whether the edge must use another connection for new streams, because this gateway stops. This one ends with its last stream.
    pub(crate) must_leave: MustLeaveFn,
}

/// Request path for the streams that edges open.
#[derive(Clone)]
pub struct EgressHandler(
    /// Begins a connection, or returns `None` if no further connection is allowed.
    pub Arc<dyn Fn(EgressEdge) -> Option<EgressLink> + Send + Sync>,
);

impl fmt::Debug for EgressHandler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EgressHandler")
    }
}

/// Edge that has finished its TLS handshake, on the way to the worker of its session.
pub(super) struct HandshakenEdge {
    /// The TLS connection without its socket.
    pub(super) io: Io,
    pub(super) socket: DetachedSocket,
    /// Node of the certificate, or the reason why the edge is rejected.
    pub(super) node: Result<NodeName, PeerRejected>,
    pub(super) certificate: Option<EdgeCertificate>,
    pub(super) from: SocketAddr,
    pub(super) round_trip: Duration,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum CloseReason {
    #[error("{0}")]
    Tunnel(TunnelEnd),
    #[error("the edge disconnected: {0:?}")]
    EdgeLeft(String),
    #[error(
        "a newer tunnel of the same edge process replaced this tunnel, and the last stream of this tunnel has ended"
    )]
    TakenOver,
    #[error("{1}")]
    Dismissed(GoAway, String),
    #[error("the nodes of the cluster have not been loaded yet")]
    NodesPending,
    #[error("control stream: {0}")]
    Control(#[from] ControlStreamError),
}

impl CloseReason {
    /// Returns the metric label of the reason.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Self::Tunnel(ended) => ended.as_str(),
            Self::EdgeLeft(_) => "left",
            Self::TakenOver => "taken_over",
            Self::NodesPending => "early",
            Self::Dismissed(why, _) => why.as_str(),
            Self::Control(ControlStreamError::TooSlow(_)) => "hello_timeout",
            Self::Control(
                ControlStreamError::TooLong
                | ControlStreamError::Malformed(_)
                | ControlStreamError::Stream(StreamError::ProtocolViolation(_)),
            ) => "malformed",
            Self::Control(ControlStreamError::Stream(_) | ControlStreamError::Closed) => {
                "control_lost"
            }
        }
    }

    /// Logs the end. A connection lost during the hello is ordinary and not a warning; a refused edge is a warning.
    pub(super) fn log_refusal(&self, edge: &str, from: SocketAddr, early: &LogThrottle) {
        if matches!(self, Self::NodesPending) {
            if let Some(times) = early.record() {
                warn!(edge, peer = %from, times, why = %self, "temporarily refused edges");
                audit::log_rejected_edge(edge, &from, self.word(), self);
            }
        } else if self.word() == "control_lost" {
            debug!(edge, peer = %from, why = %self, "an edge closed the connection during its hello");
        } else {
            warn!(edge, peer = %from, why = %self, "refused an edge");
            audit::log_rejected_edge(edge, &from, self.word(), self);
        }
    }

    /// Returns the more informative of two reasons. A control stream fails together with its tunnel, whose own error is more
    /// precise.
    pub(super) fn prefer_tunnel_end(self, ended: TunnelEnd) -> Self {
        match (self, ended) {
            (end @ Self::Control(_), TunnelEnd::Closed) => end,
            (Self::Control(_), ended) => Self::Tunnel(ended),
            (end, _) => end,
        }
    }
}
