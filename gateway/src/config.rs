//! The gateway's configuration: typed, with a default and a reason for each number.
//!
//! Users read the doc comments of this module: they become the help of flags and the reference in the README. This module reads
//! neither files nor the environment, which the binary does. `validate` finds all faults that types cannot express, and reports
//! them together.

mod api_cache;
mod discovery;
mod dns;
mod egress;
pub(crate) mod identity_headers;
mod jwt;
mod kubernetes;
mod listener;
mod peers;
pub mod policy;
pub(crate) mod redirect;
mod state;
mod tunnel_identity;
mod upstream_tls;
mod validate;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use causeway_certs::NodeName;
use causeway_config::{ByteSize, DurationStr, IpNetList, SocketAddrStr, Specified};
pub use causeway_config::{
    ConfigError, ListenAddr, Log, LogFormat, ReloadSender, Validate, host_port,
};
use causeway_tunnel::{control_stream::AnnouncedPorts, liveness::KeepaliveConfig};

pub use api_cache::{AccessLevel, AccessRule, ApiCache};
pub use dns::Dns;
use dns::canonical;
pub(crate) use egress::matches_any;
pub use egress::{Egress, EgressLimits, EgressRule, EgressSubjects, EgressTargets};
pub use identity_headers::IdentityHeaders;
pub use jwt::{Algorithm, Jwks, Jwt};
pub use kubernetes::{
    AdvertisedService, CoreDnsHosts, CsrSigning, DiscoveredEndpoints, Heartbeats, HostsFormat,
    Kubernetes, Label, NodePorts, PodObjects, PortList, YurtHub, is_restricted,
};
pub use listener::{
    Certificate, ClientAuth, ErrorFormat, ForwardingHeader, Listener, ListenerProtocol, Serial,
    TokenReview,
};
pub use peers::Peers;
pub use redirect::Redirect;
pub use state::{Etcd, State};
pub use tunnel_identity::Identity;
pub use upstream_tls::UpstreamTls;

/// The configuration of `causeway gateway`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Directory of the CA, the tokens and the known nodes; created with mode 0700.
    pub data_dir: PathBuf,
    /// Worker threads, each of which serves its own nodes; 0 is one per CPU.
    pub workers: usize,
    /// Listener for tunnels of edges.
    pub tunnel: Tunnel,
    /// Health, metrics and status.
    pub admin: Admin,
    /// Listeners for clients. Without this key: one `https` listener on 0.0.0.0:10263 for clients with a certificate of the own CA.
    pub listeners: Vec<Listener>,
    /// The DNS server that answers names of nodes; without this key there is none.
    #[serde(skip_serializing_if = "Specified::is_absent")]
    pub dns: Specified<Dns>,
    /// Redirects connections to the nodes' own addresses to listeners, by rules in this host's kernel. Without this key: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub redirect: Option<Redirect>,
    /// File of the access policy. Without this key every client that a listener admits may do everything on every node.
    #[serde(skip_serializing_if = "Specified::is_absent")]
    pub policy: Specified<PathBuf>,
    /// Node ports to which this gateway itself speaks TLS, in place of the node's edge, whose port then has the scheme `tcp`. The key is on the gateway alone.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub upstream_tls: BTreeMap<u16, UpstreamTls>,
    /// The cluster whose nodes this gateway serves.
    pub kubernetes: Option<Kubernetes>,
    /// Stores the durable state of all gateways that name the same place: nodes, revocations, join tokens, pinned keys and the CA. Without this key: it is in `data_dir` alone, or in Secrets of the cluster (`kubernetes.state`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<State>,
    /// Other gateways, to which this gateway forwards requests for nodes that it does not hold itself. Without this key: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peers: Option<Box<Peers>>,
    /// Cluster resources that edges may read, for clients on their nodes. Without this key: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_cache: Option<ApiCache>,
    /// Connections that edges open, to the cloud or to each other. Without this key every such connection is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress: Option<Egress>,
    /// Limits of what the gateway serves.
    pub limits: Limits,
    /// Timeouts.
    pub timeouts: Timeouts,
    /// Streams that get an access record: `all`, `failures` or `none`.
    pub access_log: AccessLog,
    /// File of the audit log, JSON lines: refused clients with the reason, and the start and end of each session with its client. The gateway appends to the file and reopens it at each reload (SIGHUP), so that logrotate can move it away.
    #[serde(skip_serializing_if = "Specified::is_absent")]
    pub audit_log: Specified<PathBuf>,
    /// The log.
    pub log: Log,
    /// Announcement to edges of the node ports that the cluster lists; set by [`Config::with_listed_ports`], and by no file.
    #[serde(skip)]
    pub announced_ports: Option<AnnouncedPorts>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            data_dir: "/var/lib/causeway".into(),
            // A node's tunnels and clients share a thread, so more threads than CPUs would only cause context switches.
            workers: 0,
            tunnel: Tunnel::default(),
            admin: Admin::default(),
            listeners: vec![Listener::https()],
            dns: Specified::default(),
            redirect: None,
            policy: Specified::default(),
            upstream_tls: BTreeMap::new(),
            kubernetes: None,
            state: None,
            peers: None,
            api_cache: None,
            egress: None,
            limits: Limits::default(),
            timeouts: Timeouts::default(),
            access_log: AccessLog::All,
            audit_log: Specified::default(),
            log: Log::default(),
            announced_ports: None,
        }
    }
}

impl Config {
    /// Returns the files that the configuration names. A change of their contents is a change of the configuration.
    pub fn files(&self) -> Vec<PathBuf> {
        let listener_files = |listener: &Listener| {
            let certificate_files = listener.certificate.iter();
            let shown = certificate_files.flat_map(|files| [&files.chain, &files.key]);
            let clients = listener
                .client_auth
                .client_ca
                .iter()
                .chain(&listener.client_auth.tokens);
            let issuers = listener.client_auth.jwt.iter().flat_map(Jwt::files);
            shown
                .chain(clients)
                .chain(issuers)
                .cloned()
                .collect::<Vec<_>>()
        };
        let listeners = self.listeners.iter().flat_map(listener_files);
        let tunnel = self.tunnel.identity.iter().flat_map(Identity::files);
        let policy = self.policy.0.iter().chain(tunnel).cloned();
        let upstream_tls = self
            .upstream_tls
            .values()
            .flat_map(UpstreamTls::files)
            .cloned();
        let cluster_ca = self.signer().into_iter().flat_map(|rules| &rules.client_ca);
        policy
            .chain(listeners)
            .chain(upstream_tls)
            .chain(cluster_ca.cloned())
            .chain(self.state.iter().flat_map(State::files).cloned())
            .collect()
    }

    /// Returns the rules for signing the cluster's certificate requests, if the gateway handles them.
    pub fn signer(&self) -> Option<&CsrSigning> {
        self.kubernetes.as_ref()?.certificates.as_ref()
    }

    /// Returns the zones in which nodes have names as well: those of the DNS server and of the hosts file.
    pub fn zones(&self) -> Vec<String> {
        let dns_zones = self.dns.0.iter().flat_map(|dns| &dns.zones);
        let kubernetes = self.kubernetes.iter();
        let hosts_zones =
            kubernetes.flat_map(|rules| rules.hosts.iter().flat_map(|hosts| &hosts.zones));
        dns_zones.chain(hosts_zones).cloned().collect()
    }

    /// Returns the addresses to which names of edge nodes resolve: `dns.addresses`, else those of the listeners. Empty if neither
    /// provides an address.
    pub fn node_name_addresses(&self) -> Vec<IpAddr> {
        match &self.dns.0 {
            Some(dns) if !dns.addresses.is_empty() => canonical(dns.addresses.iter().copied()),
            _ => self.listener_addresses(),
        }
    }

    /// Returns the addresses of the listeners, or nothing if one of them is a wildcard. Loopback is used only if there is no
    /// other address, because a gateway often has additional listeners for its own machine.
    fn listener_addresses(&self) -> Vec<IpAddr> {
        let address = |listen: &ListenAddr| match listen {
            ListenAddr::Tcp(address) => Some(address.ip()),
            ListenAddr::Unix(_) => None,
        };
        let listens = self.listeners.iter();
        let all = canonical(listens.filter_map(|listener| address(&listener.listen)));
        if all.iter().any(IpAddr::is_unspecified) {
            return Vec::new();
        }
        let (local, public): (Vec<_>, Vec<_>) = all.into_iter().partition(IpAddr::is_loopback);
        if public.is_empty() { local } else { public }
    }

    /// Returns the addresses of edge nodes in the hosts file: `kubernetes.hosts.addresses`, else those that the DNS server
    /// returns.
    pub fn hosts_file_addresses(&self) -> Vec<IpAddr> {
        let hosts = self.kubernetes.as_ref();
        let hosts = hosts.and_then(|rules| rules.hosts.as_ref());
        match hosts {
            Some(hosts) if !hosts.addresses.is_empty() => {
                canonical(hosts.addresses.iter().copied())
            }
            _ => self.node_name_addresses(),
        }
    }
}

impl AsRef<Log> for Config {
    fn as_ref(&self) -> &Log {
        &self.log
    }
}

/// The tunnel port, at which edges connect, join and renew.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Tunnel {
    /// Address of the tunnel port.
    #[serde(with = "SocketAddrStr")]
    pub listen: SocketAddr,
    /// `host:port` by which edges reach this gateway; the hosts are also the names in its certificate.
    pub advertise: Vec<String>,
    /// `host:port` of further gateways, announced to edges when they connect.
    pub gateways: Vec<String>,
    /// Number of gateways, 64 or fewer, announced to edges. Edges with `tunnels.gateways: every`, or with a number, look for that many gateways behind each address, such as a load balancer's. Without this key: the number that `kubernetes.advertise` counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// Names of revoked nodes, which are refused in any case: for gateways that share a configuration and no data directory. Other nodes are revoked by `causeway node revoke`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub revoked: Vec<String>,
    /// Networks of balancers, whose connections to the tunnel port begin with a PROXY v2 header. Its source counts as the edge's address in limits, logs and `status`. Connections from other networks are served without a header.
    #[serde(skip_serializing_if = "Vec::is_empty", with = "IpNetList")]
    pub proxy_protocol: Vec<IpNet>,
    /// Certificates of the gateway and of all edges that an external CA issues and renews, in place of those of the own CA.
    pub identity: Option<Identity>,
    /// Timeout of an edge's TLS handshake.
    #[serde(with = "DurationStr")]
    pub handshake_timeout: Duration,
    /// Maximum number of connections that have not finished their TLS handshake. All edges of a gateway that fails connect at once. One source (an IPv4 address, an IPv6 /64) gets three quarters of them at most. At the limit, the oldest connection that has not sent a whole `ClientHello` is closed for a new one.
    pub max_handshakes: usize,
    /// Timeout of the answer to the hello.
    #[serde(with = "DurationStr")]
    pub hello_timeout: Duration,
    /// Time without a read, or without a write, after which the gateway sends a PING.
    #[serde(with = "DurationStr")]
    pub ping_after: Duration,
    /// Time without a read after a PING, after which the tunnel gets no new streams.
    #[serde(with = "DurationStr")]
    pub ping_timeout: Duration,
    /// Further time without a read, after which the gateway closes the tunnel.
    #[serde(with = "DurationStr")]
    pub close_after: Duration,
    /// Bytes that the open streams of one node share for large flow-control windows. Each stream has 64 KiB in any case (256 KiB
    /// over links of 2 ms or more).
    #[serde(with = "ByteSize")]
    pub memory: usize,
    /// Maximum number of concurrent streams of one tunnel.
    pub max_streams_per_tunnel: usize,
    /// Lifetime of an edge's certificate; edges renew after two thirds of it.
    #[serde(with = "DurationStr")]
    pub edge_certificate_lifetime: Duration,
}

impl Tunnel {
    /// Returns the time limits of the keepalive of edges and other gateways.
    pub(crate) fn keepalive(&self) -> KeepaliveConfig {
        KeepaliveConfig {
            probe_after: self.ping_after,
            suspect_after: self.ping_timeout,
            close_after: self.close_after,
            ..KeepaliveConfig::default()
        }
    }
}

impl Default for Tunnel {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([0, 0, 0, 0], 10262)),
            advertise: Vec::new(),
            gateways: Vec::new(),
            replicas: None,
            revoked: Vec::new(),
            proxy_protocol: Vec::new(),
            identity: None,
            // A handshake is two round trips; the slowest usable link has about 1 s each.
            handshake_timeout: Duration::from_secs(5),
            max_handshakes: 16_384,
            hello_timeout: Duration::from_secs(5),
            // 5 + 5 + 5 s: both sides detect a lost connection within 15 s.
            ping_after: Duration::from_secs(5),
            ping_timeout: Duration::from_secs(5),
            close_after: Duration::from_secs(5),
            // Fills 5 Gbit/s over 50 ms. The design says 64 MiB.
            memory: 32 << 20,
            max_streams_per_tunnel: 10_000,
            // Long enough for a node that is off over a weekend, and short for a stolen key.
            edge_certificate_lifetime: Duration::from_hours(7 * 24),
        }
    }
}

impl Tunnel {
    /// Returns the revoked nodes of a configuration that has been validated.
    pub(crate) fn revoked_nodes(&self) -> BTreeSet<NodeName> {
        let names = self.revoked.iter();
        names
            .filter_map(|name| NodeName::parse(name).ok())
            .collect()
    }
}

/// The admin listener.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Admin {
    /// Address of health, metrics and status. It has no authentication, so keep it on loopback.
    #[serde(with = "SocketAddrStr")]
    pub listen: SocketAddr,
    /// Additional address, for `/metrics` alone, for scrapers on other hosts: `IP:PORT` or `unix:/path`. It has no authentication either.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics_listen: Option<ListenAddr>,
}

impl Default for Admin {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 10265)),
            metrics_listen: None,
        }
    }
}

/// Limits. Above a limit, clients get 503 with Retry-After.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Concurrent streams in total.
    pub streams: usize,
    /// Concurrent streams of one client at this gateway. Each gateway counts by itself, so at three gateways a client can have three times as many.
    pub per_client: usize,
    /// Concurrent streams to one node.
    pub per_node: usize,
    /// Client connections in total. One source (an IPv4 address, an IPv6 /64) gets three quarters of them at most. At the limit, the oldest connection without an open stream is closed for a new one.
    pub connections: usize,
    /// Bytes that clients may leave unread of answers, and upstreams of uploads, in total. Above half of this limit flow-control windows are small; above it new streams get 503.
    #[serde(with = "ByteSize")]
    pub buffered_bytes: usize,
    /// Memory of stalled streams, whose client or upstream does not read: 320 KiB each, and the bytes that wait in their windows. Above this limit the streams that have been stalled longest are reset.
    #[serde(with = "ByteSize")]
    pub stalled: usize,
    /// Bytes of TCP buffers in this machine's kernel, of all processes (`mem` in `/proc/net/sockstat`), above which stalled streams are reset, the longest first. 0 is half of the kernel's own limit for memory pressure (`net.ipv4.tcp_mem`).
    #[serde(with = "ByteSize")]
    pub tcp_memory: usize,
    /// Bytes of a request's target: path and query. A longer target gets 414.
    #[serde(with = "ByteSize")]
    pub max_uri_bytes: usize,
    /// The same at listeners with `errors: kubernetes`, for `kubectl exec` with long arguments. A path, and a target over HTTP/2, can have at most 65,534 bytes. A query over HTTP/1.1 may be as long as this limit.
    #[serde(with = "ByteSize")]
    pub max_kubernetes_uri_bytes: usize,
    /// Bytes of the header fields of a request.
    #[serde(with = "ByteSize")]
    pub max_header_bytes: usize,
    /// Number of header fields of a request, and of an answer over HTTP/1.1 at ports of `upstream_tls`.
    pub max_headers: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // 50,000 idle upgrades cost about 1 GiB at the promised 20 KiB each.
            streams: 50_000,
            // kube-apiserver is one client, and so is one Prometheus. The limit is high, but one client cannot use all streams.
            per_client: 10_000,
            per_node: 10_000,
            // Below the 20,000 descriptors that distributions commonly allow a service.
            connections: 15_000,
            // The whole budgets of eight tunnels, which the stalled clients of one node never reach.
            buffered_bytes: 512 << 20,
            // 680 stalled streams with the smallest window, long before new streams get 503.
            stalled: 256 << 20,
            // The kernel knows how much memory the machine has.
            tcp_memory: 0,
            // The maximum size of an `http::Uri`, and more than any browser sends.
            max_uri_bytes: 64 << 10,
            // The limit of kube-apiserver for a request head (http.DefaultMaxHeaderBytes).
            max_kubernetes_uri_bytes: 1 << 20,
            // Twice the largest head that kube-apiserver sends with client groups inside.
            max_header_bytes: 64 << 10,
            // hyper's own default.
            max_headers: 100,
        }
    }
}

/// Timeouts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Timeouts {
    /// TLS handshake of a client.
    #[serde(with = "DurationStr")]
    pub tls: Duration,
    /// Head of a request, from its first byte or from the connection's start.
    #[serde(with = "DurationStr")]
    pub header: Duration,
    /// The edge's answer to CONNECT, which includes its dial to the target.
    #[serde(with = "DurationStr")]
    pub connect: Duration,
    /// The upstream's answer to an upgrade.
    #[serde(with = "DurationStr")]
    pub upgrade_first_byte: Duration,
    /// Upload without progress: the upstream reads nothing of the request body that waits.
    #[serde(with = "DurationStr")]
    pub upload: Duration,
    /// Download without progress: the client reads nothing of the answer that waits. Sessions have no such timeout.
    #[serde(with = "DurationStr")]
    pub download: Duration,
    /// Client connection without a request.
    #[serde(with = "DurationStr")]
    pub idle_keepalive: Duration,
    /// Time in which open streams may end when the gateway stops.
    #[serde(with = "DurationStr")]
    pub drain: Duration,
    /// Authorization by another system, and the fetch of a JWT issuer's keys.
    #[serde(with = "DurationStr")]
    pub authorize: Duration,
    /// Request to a node whose last tunnel has ended, which waits for the next tunnel. The request waits until this long after that end, or after the gateway's start, and then gets 503. `0s` answers at once.
    #[serde(with = "DurationStr")]
    pub reconnect: Duration,
    /// Start of a gateway, until the edges that it had before it stopped have reconnected. Until then it is not ready (`/readyz`), but it serves requests. `0s` does not wait.
    #[serde(with = "DurationStr")]
    pub edges: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            // The time that the defaults of Go and HAProxy allow a slow client.
            tls: Duration::from_secs(10),
            header: Duration::from_secs(10),
            // kube-apiserver has no timeout of its own. Edges give up a dial after 5 s.
            connect: Duration::from_secs(10),
            // kubelet opens a terminal within seconds, even on a busy node.
            upgrade_first_byte: Duration::from_secs(30),
            // An app that flushes to a slow disk pauses for one or two minutes and then continues.
            upload: Duration::from_mins(5),
            // Like `upload`, for clients: a user reads a page of a log, and continues.
            download: Duration::from_mins(5),
            // Go's client keeps idle connections for 90 s, so the gateway closes no earlier.
            idle_keepalive: Duration::from_secs(90),
            // Kubernetes' default grace period before it kills a pod.
            drain: Duration::from_secs(30),
            authorize: Duration::from_secs(3),
            // An edge dials every 2 s while no gateway answers. Its handshake and a slow link take additional time.
            reconnect: Duration::from_secs(5),
            // Behind a load balancer, an edge needs several attempts to find a gateway that has restarted, about one each second.
            edges: Duration::from_secs(10),
        }
    }
}

/// Streams that get an access record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AccessLog {
    /// Every stream.
    All,
    /// Streams that failed, at the gateway or at the upstream (5xx).
    Failures,
    /// No stream.
    None,
}

impl AccessLog {
    /// Whether a stream gets an access record.
    pub(crate) fn includes(self, has_failed: bool) -> bool {
        match self {
            Self::All => true,
            Self::Failures => has_failed,
            Self::None => false,
        }
    }
}
