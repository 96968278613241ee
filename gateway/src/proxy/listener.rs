//! Step 1: listeners, which accept clients and describe their connections.
//!
//! Each worker accepts from its own clone of a listener's socket. If the ClientHello, the original destination or a fixed node
//! names the node before HTTP is spoken, the node also selects the worker. The socket moves to that worker once, before it is
//! served. Handshakes run in their own tasks, each with a timeout.

pub mod accept;
pub mod conn_io;
mod header_timeout;
pub mod idle_timer;
mod request_line;
pub mod stream_reset;
pub use request_line::LongTarget;

pub mod http;
pub mod tcp;

use crate::{
    config::{ErrorFormat, ListenerProtocol, Serial},
    error::Error,
    metrics::{ConnectionGuard, ListenerMetrics},
    proxy::{
        authn::{Authenticator, ConnectionCredentials},
        forwarding_headers::{CachedValues, ForwardingHeaders},
        identity_headers::IdentityHeaderFields,
        request,
        route::{RouteInput, ServiceNames},
    },
    proxy_protocol,
    state::{NodeSet, Nodes, nodes::AddressMatch},
};
use ::http::{Method, Request};
use arc_swap::{ArcSwap, ArcSwapOption};
use causeway_certs::{Fingerprint, NodeName, SniCertResolver, verify::TrustStore};
use causeway_rt::{connection_limit::Slot, listener::RemoteAddr, log_throttle::LogThrottle};
use causeway_tunnel::{
    informational::InformationalResponses, reset_codes::AbortedStreams, target::split_host_port,
};
use conn_io::ConnState;
use idle_timer::IdleTimer;
use ipnet::IpNet;
use rustls::ServerConfig;
use rustls_pki_types::CertificateDer;
use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    sync::{Arc, OnceLock},
    time::Duration,
};
use tokio::time::Instant;

/// Time in which streams may still begin on a connection whose listener has been replaced. A client that reads is notified within
/// a second and a round trip.
const RETIRE_GRACE: Duration = Duration::from_secs(3);

/// Configured listener for clients.
#[derive(Debug)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "independent switches of a user's file"
)]
pub struct Listener {
    /// Name in configuration and log.
    pub name: String,
    /// Protocol of the clients.
    pub protocol: ListenerProtocol,
    /// Node to which all requests go, if the listener has a fixed one.
    pub node: Option<NodeName>,
    /// Nodes of which each connection reaches one, if the listener serves a set of nodes.
    pub node_set: Option<Arc<NodeSet>>,
    /// Node port of the requests that name none.
    pub port: Option<u16>,
    /// Whether clients get the lists of nodes, if this is a proxy.
    pub has_node_list: bool,
    /// Names by which clients reach the listener itself.
    pub names: Vec<String>,
    /// Port of the listening socket, which is not used for routing.
    pub bound_port: Option<u16>,
    /// TLS configuration, if the listener uses TLS.
    pub tls: Option<ArcSwap<ListenerTls>>,
    /// Authentication of its clients.
    pub authentication: Authenticator,
    /// Node ports of kubelets, at which the cluster's API decides too.
    pub kubelets: Vec<u16>,
    /// Serial numbers of revoked client certificates.
    pub revoked: BTreeSet<Serial>,
    /// Whether streams end when the certificate or JWT of their client expires.
    pub disconnect_expired: bool,
    /// Whether the client's Authorization is forwarded to the upstream.
    pub forward_authorization: bool,
    /// Fields with the client's identity for the upstream.
    pub identity_headers: IdentityHeaderFields,
    /// Fields with the client's address, the scheme and the host for the upstream.
    pub forwarding: ForwardingHeaders,
    /// Form of its error responses.
    pub error_format: ErrorFormat,
    /// Networks from which clients are served without TLS; empty if the listener uses TLS or has no such restriction.
    pub plaintext_networks: Vec<IpNet>,
    /// Whether the original destination before DNAT is looked up.
    pub original_destination: bool,
    /// Networks in which the gateway dials the target of a CONNECT itself, if no edge serves the target.
    pub direct_networks: Vec<IpNet>,
    /// Networks of peers whose connections begin with a PROXY v2 header with the client's address.
    pub proxy_protocol: Vec<IpNet>,
    /// Metrics of this listener.
    pub metrics: Arc<ListenerMetrics>,
    /// Throttle of the log lines about clients that request an unknown name or refuse the certificate.
    pub(crate) tls_refusal_throttle: LogThrottle,
    /// Throttle of the log lines about failed connections that this listener dials itself. The cause is that the process has no
    /// file descriptors, local ports or memory left.
    pub(crate) exhaustion_throttle: LogThrottle,
    /// Time from which no stream begins here, once the listener is retired.
    pub(crate) retired_at: OnceLock<Instant>,
    /// The listener that has replaced this one, if one has.
    pub(crate) successor: OnceLock<Arc<Listener>>,
}

/// Certificate and trust roots of a listener.
#[derive(Debug)]
pub struct ListenerTls {
    /// TLS configuration, including the certificate.
    pub server_config: Arc<ServerConfig>,
    /// Trust roots for client certificates.
    pub trust: TrustStore,
    /// Resolver that issues the leaf for an address, if the gateway issues the leaves.
    pub leaves: Option<Arc<SniCertResolver>>,
    /// Roots that verify the leaves, as PEM, if the gateway issues the leaves.
    pub client_roots: Option<Arc<str>>,
}

impl ListenerTls {
    /// Whether the gateway issues the leaves, and none of them has this server name.
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
            // The client finds the address in the certificate, and the response lists the nodes that share it.
            AddressMatch::Several(nodes) => nodes.into_iter().next(),
            AddressMatch::Pod(_)
            | AddressMatch::NoPod
            | AddressMatch::Undecided(_)
            | AddressMatch::Unknown => None,
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
    /// Returns the certificate that the listener presents under its own names, if the gateway issues it.
    pub(crate) fn generated_certificate(&self) -> Option<CertificateDer<'static>> {
        let tls = self.tls.as_ref()?.load();
        let leaf = tls.leaves.as_ref()?.leaf_for_sni(None)?;
        leaf.cert.first().cloned()
    }

    /// Whether a client that was verified under this root is still trusted.
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
        peer.ip()
            .is_some_and(|ip| proxy_protocol::is_proxied(&self.proxy_protocol, ip))
    }

    /// Whether clients in the network of this peer are served.
    pub(crate) fn serves_network(&self, peer: RemoteAddr) -> bool {
        let is_listed = |ip| self.plaintext_networks.iter().any(|net| net.contains(&ip));
        self.plaintext_networks.is_empty() || peer.ip().is_some_and(is_listed)
    }

    /// Whether clients use this listener as an HTTP proxy (RFC 9110 §3.7).
    pub(crate) fn is_proxy(&self) -> bool {
        self.protocol == ListenerProtocol::Connect
    }

    /// Whether a `Host` is an address, or a name of the listener itself.
    pub(crate) fn is_own_host(&self, host: &str) -> bool {
        let Ok((host, _)) = split_host_port(host) else {
            return false;
        };
        let is_host = |name: &str| {
            split_host_port(name).is_ok_and(|(name, _)| name.eq_ignore_ascii_case(host))
        };
        host.parse::<IpAddr>().is_ok()
            || is_host("localhost")
            || self.names.iter().any(|name| is_host(name))
    }

    /// Whether `Authorization` is for the upstream. At a proxy, the client's credential is in `Proxy-Authorization`.
    pub(crate) fn forwards_authorization(&self) -> bool {
        self.forward_authorization || self.is_proxy()
    }

    /// Retires this listener, which others replace. Streams that began before are finished. With `has_grace_period`, streams may
    /// begin for a short time; without it none begins.
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

    /// Whether no stream may begin here any more.
    pub(crate) fn is_closed_to_streams(&self) -> bool {
        self.retired_at
            .get()
            .is_some_and(|end| Instant::now() >= *end)
    }

    /// Replaces the certificate and the trust roots, if the listener uses TLS.
    pub fn replace_tls(&self, tls: ListenerTls) {
        if let Some(current) = &self.tls {
            current.store(Arc::new(tls));
        }
    }

    /// Returns the node of a client that sent this server name, if the listener and not the name says it.
    fn fixed_node(&self, server_name: Option<&str>) -> Option<&NodeName> {
        let is_default = self.protocol == ListenerProtocol::Passthrough;
        self.node
            .as_ref()
            .filter(|_| !is_default || server_name.is_none())
    }

    /// Whether names of pods lead to pods here. The node of a passthrough listener is that of clients that send no name.
    fn resolves_pod_names(&self) -> bool {
        let is_default = self.protocol == ListenerProtocol::Passthrough;
        (self.node.is_none() || is_default) && self.node_set.is_none()
    }

    /// Returns the input of routing from this listener, the server name and the original destination.
    fn connection_route_input<'a>(
        &'a self,
        sni: Option<&'a str>,
        original: Option<SocketAddr>,
    ) -> RouteInput<'a> {
        let fixed = self.fixed_node(sni);
        // Names below that of a node may be those of addresses that the listener dials itself.
        let is_ordinary =
            fixed.is_some() || self.node_set.is_some() || !self.direct_networks.is_empty();
        let services = if is_ordinary {
            ServiceNames::Ordinary
        } else {
            ServiceNames::Service
        };
        RouteInput {
            sni,
            original,
            fixed,
            port: self.port,
            authority: None,
            services,
            has_pod_names: self.resolves_pod_names(),
            own_names: &self.names,
            is_proxy: self.is_proxy(),
        }
    }

    /// Returns the input of routing from the connection of a session without a head, and this listener.
    pub fn session_route_input<'a>(&'a self, connection: &'a ClientConnection) -> RouteInput<'a> {
        self.connection_route_input(connection.sni.as_deref(), connection.original)
    }

    /// Replaces the host of a request by that of its target, if this listener is a proxy.
    pub(crate) fn replace_host<B>(&self, request: &mut Request<B>) {
        if self.is_proxy() {
            request::replace_host(request);
        }
    }

    /// Returns the input of routing from the head of a request, its connection and this listener.
    ///
    /// # Errors
    /// [`Reason::Malformed`](crate::error::Reason::Malformed) if the head names no valid authority.
    pub fn route_input<'a, B>(
        &'a self,
        connection: &'a ClientConnection,
        request: &'a Request<B>,
    ) -> Result<RouteInput<'a>, Error> {
        let input = self.session_route_input(connection);
        let is_connect = request.method() == Method::CONNECT;
        let is_absolute = self.is_proxy() && !is_connect;
        let services = match input.services {
            // The target of a proxy is the port at the node, and not that of this listener.
            ServiceNames::Service if self.is_proxy() || is_connect => ServiceNames::ServiceAndPort,
            services => services,
        };
        Ok(RouteInput {
            authority: request::authority(request)?,
            services,
            // The port of an http URI without one (RFC 9110 §4.2.1).
            port: is_absolute.then_some(80).or(input.port),
            ..input
        })
    }
}

/// Connection of a client. It exists as long as any part of it is served, including upgraded sessions.
#[derive(Debug)]
pub struct ClientConnection {
    /// Address of the peer.
    pub peer: RemoteAddr,
    /// The server name of the ClientHello.
    pub sni: Option<String>,
    /// The destination before DNAT.
    pub original: Option<SocketAddr>,
    /// Node of the listener's set that serves the connection.
    pub(crate) member: ArcSwapOption<NodeName>,
    /// Whether the connection uses TLS.
    pub tls: bool,
    /// The credentials of the client.
    pub(crate) credentials: ConnectionCredentials,
    /// State of the socket.
    pub condition: Arc<ConnState>,
    /// Open requests of the connection.
    pub idle: Arc<IdleTimer>,
    /// Maximum number of bytes that each stream may buffer unread, if the client speaks HTTP/2.
    pub window: u32,
    /// Interim responses to its requests.
    pub(crate) interims: InformationalResponses,
    /// HTTP/2 streams of aborted sessions.
    pub(crate) aborted: AbortedStreams,
    /// Values of the forwarding headers of the last request.
    pub(crate) forwarded: CachedValues,
    /// Slot of the connection, which each of its streams holds.
    pub(crate) slot: Slot,
    _connection_guard: ConnectionGuard,
}
