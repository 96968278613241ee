//! Step 1: listeners accept clients and describe their connections.
//!
//! Each worker accepts from its own clone of a listener's socket. If the ClientHello, the original destination or a fixed node
//! names the node before HTTP is spoken, it also selects the worker. The socket moves there once, before it is served. Handshakes
//! run in tasks of their own, each within a bound.

pub mod accept;
pub mod conn_io;
mod header_timeout;
pub mod idle_timer;
pub mod proxy_protocol;
mod request_line;
pub use request_line::LongTarget;

pub mod http;
pub mod tcp;

use crate::{
    config::{ErrorFormat, ListenerProtocol, Serial},
    metrics::{ConnectionGuard, ListenerMetrics},
    proxy::{
        authn::{Authenticator, ConnectionCredentials},
        forwarding_headers::{CachedValues, ForwardingHeaders},
        identity_headers::IdentityHeaderFields,
        route::RouteInput,
    },
    state::{Nodes, nodes::AddressMatch},
};
use arc_swap::ArcSwap;
use causeway_certs::{Fingerprint, NodeName, SniCertResolver, verify::TrustStore};
use causeway_rt::{connection_limit::Slot, listener::RemoteAddr, log_throttle::LogThrottle};
use causeway_tunnel::informational::InformationalResponses;
use conn_io::ConnState;
use idle_timer::IdleTimer;
use ipnet::IpNet;
use rustls::ServerConfig;
use rustls_pki_types::CertificateDer;
use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};
use tokio::time::Instant;

/// Time in which streams may still begin on a connection whose listener has been replaced: its client learns of that within a
/// second and a round trip, unless it reads nothing.
const RETIRE_GRACE: Duration = Duration::from_secs(3);

/// A cloud-facing listener, as configured.
#[derive(Debug)]
pub struct Listener {
    /// Its name in configuration and log.
    pub name: String,
    /// The protocol that it speaks.
    pub protocol: ListenerProtocol,
    /// The node that it stands for, if it stands for one.
    pub node: Option<NodeName>,
    /// The node port that it stands for.
    pub port: Option<u16>,
    /// The port that it listens on, which stands for nothing.
    pub bound_port: Option<u16>,
    /// TLS, if it speaks it.
    pub tls: Option<ArcSwap<ListenerTls>>,
    /// Authentication of its clients.
    pub authentication: Authenticator,
    /// The node ports that are kubelets', at which the cluster's API decides too.
    pub kubelets: Vec<u16>,
    /// The client certificates that are revoked.
    pub revoked: BTreeSet<Serial>,
    /// Whether streams end when the certificate or JWT of their client expires.
    pub disconnect_expired: bool,
    /// Whether the client's Authorization goes to the upstream.
    pub forward_authorization: bool,
    /// The fields that tell the upstream who the client is.
    pub identity_headers: IdentityHeaderFields,
    /// The fields that tell the upstream the client's address, the scheme and the host.
    pub forwarding: ForwardingHeaders,
    /// Form of its error responses.
    pub error_format: ErrorFormat,
    /// Whether DNAT's original destination is asked for.
    pub original_destination: bool,
    /// Networks in which the gateway dials the target of a CONNECT itself, if the target is at no edge.
    pub direct_networks: Vec<IpNet>,
    /// Networks whose connections begin with a PROXY v2 header that names the client.
    pub proxy_protocol: Vec<IpNet>,
    /// Its metrics.
    pub metrics: Arc<ListenerMetrics>,
    /// Limits the log lines of clients that ask for an unknown name or refuse the certificate.
    pub(crate) tls_refusal_throttle: LogThrottle,
    /// Connections that this listener dials itself and that failed because this process is out of file descriptors, local
    /// ports or memory.
    pub(crate) exhaustion_throttle: LogThrottle,
    /// Time from which nothing begins here any more, once it is known.
    pub(crate) retired_at: OnceLock<Instant>,
    /// The listener that has replaced this one, if one has.
    pub(crate) successor: OnceLock<Arc<Listener>>,
}

/// Certificate and trust roots of a listener.
#[derive(Debug)]
pub struct ListenerTls {
    /// TLS configuration with the certificate.
    pub server_config: Arc<ServerConfig>,
    /// Trust roots for client certificates.
    pub trust: TrustStore,
    /// Resolver that makes the leaf for an address, if leaves are made here.
    pub leaves: Option<Arc<SniCertResolver>>,
}

impl ListenerTls {
    /// Returns whether no certificate that is made here bears this server name.
    fn lacks_certificate_for(&self, server_name: &str) -> bool {
        let leaves = self.leaves.as_ref();
        leaves.is_some_and(|leaves| !leaves.recognizes(server_name))
    }

    /// Returns the TLS configuration for a client that dialled `original`. The leaf contains this address if the address names a
    /// node and nothing else that the client sends names one.
    fn config_for_address(&self, original: Option<SocketAddr>, nodes: &Nodes) -> Arc<ServerConfig> {
        let (Some(leaves), Some(original)) = (&self.leaves, original) else {
            return self.server_config.clone();
        };
        let node = match nodes.by_address(original.ip()) {
            AddressMatch::Node(node) => Some(node),
            // The client finds the address in the certificate, and reads in the answer which nodes have it.
            AddressMatch::Several(nodes) => nodes.into_iter().next(),
            AddressMatch::Pod(_) | AddressMatch::Unknown => None,
        };
        let Some(node) = node else {
            return self.server_config.clone();
        };
        let mut config = ServerConfig::clone(&self.server_config);
        config.cert_resolver = leaves.for_address(node, original.ip());
        Arc::new(config)
    }
}

impl Listener {
    /// The certificate that the listener shows under its own names, if it makes that itself.
    pub(crate) fn generated_certificate(&self) -> Option<CertificateDer<'static>> {
        let tls = self.tls.as_ref()?.load();
        let leaf = tls.leaves.as_ref()?.leaf_for_sni(None)?;
        leaf.cert.first().cloned()
    }

    /// Whether who came by this root is believed still.
    pub(crate) fn trusts_root(&self, root: Option<Fingerprint>) -> bool {
        match (root, &self.tls) {
            (Some(root), Some(tls)) => tls.load().trust.is_trusted_root(root),
            _ => true,
        }
    }

    /// Returns the listener that has replaced this one, or this one if none has.
    pub(crate) fn latest(self: &Arc<Self>) -> Arc<Self> {
        let mut listener = self;
        while let Some(successor) = listener.successor.get() {
            listener = successor;
        }
        listener.clone()
    }

    /// Whether connections of this peer begin with a PROXY v2 header.
    fn is_proxied(&self, peer: RemoteAddr) -> bool {
        let is_listed = |ip| self.proxy_protocol.iter().any(|net| net.contains(&ip));
        peer.ip().is_some_and(is_listed)
    }

    /// Retires this listener, which others replace. Streams that begin at once are finished. No stream begins at all without
    /// `has_grace_period`.
    fn retire(&self, has_grace_period: bool) {
        let grace_period = if has_grace_period {
            RETIRE_GRACE
        } else {
            Duration::ZERO
        };
        self.retired_at
            .get_or_init(|| Instant::now() + grace_period);
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.retired_at.get().is_some()
    }

    /// Whether nothing begins here any more.
    pub(crate) fn is_closed_to_streams(&self) -> bool {
        self.retired_at
            .get()
            .is_some_and(|end| Instant::now() >= *end)
    }

    /// Shows and trusts otherwise from now on, if it speaks TLS.
    pub fn replace_tls(&self, tls: ListenerTls) {
        if let Some(current) = &self.tls {
            current.store(Arc::new(tls));
        }
    }

    /// Returns the input of the route: from a stream's connection, this listener and the head's `authority`.
    pub fn route_input<'a>(
        &'a self,
        connection: &'a ClientConnection,
        authority: Option<&'a str>,
    ) -> RouteInput<'a> {
        RouteInput {
            sni: connection.sni.as_deref(),
            original: connection.original,
            fixed: self.node.as_ref(),
            port: self.port,
            authority,
        }
    }
}

/// One connection of a client, for as long as any part of it is served: upgraded sessions too.
#[derive(Debug)]
pub struct ClientConnection {
    /// The other end of the socket.
    pub peer: RemoteAddr,
    /// The server name of the ClientHello.
    pub sni: Option<String>,
    /// The destination before DNAT.
    pub original: Option<SocketAddr>,
    /// Whether TLS is spoken.
    pub tls: bool,
    /// The credentials of the client.
    pub(crate) credentials: ConnectionCredentials,
    /// The socket's condition.
    pub condition: Arc<ConnState>,
    /// Its requests that are open, where HTTP/2 is spoken.
    pub idle: Arc<IdleTimer>,
    /// Maximum bytes that each of its streams may buffer unread, if HTTP/2 is spoken.
    pub window: u32,
    /// Interim answers to its requests.
    pub(crate) interims: InformationalResponses,
    /// Values of the forwarding headers of the last request.
    pub(crate) forwarded: CachedValues,
    /// The place of the connection, which each of its streams holds.
    pub(crate) slot: Slot,
    _connection_guard: ConnectionGuard,
}
