//! The tunnel port's listener, and an edge between its handshake and its session.

use super::tls::{Io, LiveTls};
use crate::{
    config,
    control::{
        api_cache::ApiCacheServer, heartbeat::HeartbeatVerifier, node_records::NodeRecordWriter,
    },
    metrics::Metrics,
    state::{AdvertisedGateways, AnnouncedPortsCell, Nodes, Registry, registry::EdgeCertificate},
    worker::Workers,
};
use axum::Router;
use causeway_certs::{LiveCa, NodeName, PeerRejected};
use causeway_rt::{log_throttle::LogThrottle, socket::DetachedSocket};
use causeway_tunnel::buffered::MemoryBudget;
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::sync::watch;

/// Connection limits of the tunnel port.
#[derive(Clone, Copy, Debug)]
pub struct TunnelPortLimits {
    /// Connections that have not finished their handshake. At the limit, the oldest connection that has not sent a whole
    /// `ClientHello` is closed.
    pub arriving: usize,
    /// Handshakes whose `ClientHello` has arrived, each with TLS state of its own. Others wait, each source in its own queue.
    pub handshakes: usize,
    /// Connections of peers without a certificate: joining takes some milliseconds.
    pub joining: usize,
    /// Connections of edges that renew their certificates. A peer without a certificate cannot use these.
    pub renewing: usize,
}

impl Default for TunnelPortLimits {
    fn default() -> Self {
        Self {
            // As many as the accept queue of the kernel holds; each task takes 7 KiB.
            arriving: 4096,
            handshakes: 1024,
            joining: 256,
            renewing: 256,
        }
    }
}

/// Listener of the tunnel port, which admits edges.
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
    /// Changes of the table, if a cluster names its nodes.
    pub cluster: Option<watch::Receiver<()>>,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// The tunnel port's TLS.
    pub tls: LiveTls,
    /// Writer of records of nodes that connect without having joined.
    pub record_writer: NodeRecordWriter,
    /// The CA that signs.
    pub ca: LiveCa,
    /// Timeouts and limits.
    pub settings: config::Tunnel,
    /// Connection limits.
    pub limits: TunnelPortLimits,
    /// Memory budget of bytes that clients leave unread, in all tunnels.
    pub memory_budget: Arc<MemoryBudget>,
    /// Time in which a leaving edge's open streams may end.
    pub drain: Duration,
    /// Addresses of gateways; the first is this one's name, for people.
    pub advertised: AdvertisedGateways,
    /// The node ports that the cluster lists.
    pub announced_ports: AnnouncedPortsCell,
    /// Routes for edges' own requests.
    pub enrol: Router,
    /// Server of the API cache, if edges may read.
    pub api_cache: Option<ApiCacheServer>,
    /// Verifier of delegated heartbeats, if they are enabled.
    pub heartbeats: Option<HeartbeatVerifier>,
    /// Log throttle for edges that connect before the cluster has named its nodes: a whole fleet retries until then.
    pub(crate) early_throttle: Arc<LogThrottle>,
}

/// Edge whose TLS handshake is done, between two workers.
pub(super) struct HandshakenEdge {
    /// The connection without its socket.
    pub(super) io: Io,
    pub(super) socket: DetachedSocket,
    /// Node of the certificate, or the reason why the edge is rejected.
    pub(super) node: Result<NodeName, PeerRejected>,
    pub(super) certificate: Option<EdgeCertificate>,
    pub(super) from: SocketAddr,
    pub(super) round_trip: Duration,
}
