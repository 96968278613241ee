//! The gateway's configuration: typed, with a default and a reason for each number.
//!
//! Doc comments here are what a user reads: they become the help of flags and the
//! reference in the README. Neither files nor the environment are read here (the binary
//! does that); `validate` finds what no type can express, all of it at once.

mod api_cache;
mod dns;
pub(crate) mod identity_headers;
mod jwt;
mod kubernetes;
mod listener;
pub mod policy;
pub(crate) mod redirect;
mod tunnel_identity;
mod upstream_tls;
mod validate;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use causeway_certs::NodeName;
use causeway_config::{ByteSize, DurationStr, SocketAddrStr, Specified};
pub use causeway_config::{
    ConfigError, ListenAddr, Log, LogFormat, ReloadSender, Validate, host_port,
};
use causeway_tunnel::control_stream::AnnouncedPorts;

pub use api_cache::{AccessLevel, AccessRule, ApiCache};
pub use dns::Dns;
pub use identity_headers::IdentityHeaders;
pub use jwt::{Algorithm, Jwks, Jwt};
pub use kubernetes::{
    AdvertisedService, CoreDnsHosts, CsrSigning, DiscoveredEndpoints, HostsFormat, Kubernetes,
    Label, NodePorts, PortList, YurtHub, is_restricted,
};
pub use listener::{
    Certificate, ClientAuth, ErrorFormat, ForwardingHeader, Listener, ListenerProtocol, Serial,
    TokenReview,
};
pub use redirect::Redirect;
pub use tunnel_identity::Identity;
pub use upstream_tls::UpstreamTls;

/// The configuration of `causeway gateway`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Directory of the CA, the tokens and the known nodes; made with mode 0700.
    pub data_dir: PathBuf,
    /// Threads that serve, each with its own nodes; 0 is one per CPU.
    pub cores: usize,
    /// Where edges arrive.
    pub tunnel: Tunnel,
    /// Health, metrics and status.
    pub admin: Admin,
    /// Where callers arrive. Without this key: one `https` front on 0.0.0.0:10263 for callers with a certificate of the own CA.
    pub fronts: Vec<Listener>,
    /// The DNS server that answers names of nodes; without this key there is none.
    #[serde(skip_serializing_if = "Specified::is_absent")]
    pub dns: Specified<Dns>,
    /// Leads callers of the nodes' own addresses to fronts, by rules in this host's kernel. Without this key: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub redirect: Option<Redirect>,
    /// File of the rules of who may do what on which node. Without it whoever a front lets in may do everything on every node.
    #[serde(skip_serializing_if = "Specified::is_absent")]
    pub policy: Specified<PathBuf>,
    /// Node ports to which this gateway itself speaks TLS, in place of the node's edge, whose port is then of scheme `tcp`: the key lies here alone.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub apps: BTreeMap<u16, UpstreamTls>,
    /// The cluster whose nodes this gateway is for.
    pub kubernetes: Option<Kubernetes>,
    /// What edges may read of the cluster, for whoever asks on their nodes. Without this key: nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub readers: Option<ApiCache>,
    /// What is served at most.
    pub limits: Limits,
    /// How long is waited at most.
    pub timeouts: Timeouts,
    /// Which streams get an access record: `all`, `failures` or `none`.
    pub access_log: AccessLog,
    /// File of the audit log, JSON lines: who was refused what, and who opened and closed which session. Appended to; may be moved away at any time.
    #[serde(skip_serializing_if = "Specified::is_absent")]
    pub audit_log: Specified<PathBuf>,
    /// The log.
    pub log: Log,
    /// What edges are told of the node ports that the cluster lists: by [`Config::listing`], and by no file.
    #[serde(skip)]
    pub listed: Option<AnnouncedPorts>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            data_dir: "/var/lib/causeway".into(),
            // A node's tunnels and callers share a thread: more threads than CPUs only switch.
            cores: 0,
            tunnel: Tunnel::default(),
            admin: Admin::default(),
            fronts: vec![Listener::https()],
            dns: Specified::default(),
            redirect: None,
            policy: Specified::default(),
            apps: BTreeMap::new(),
            kubernetes: None,
            readers: None,
            limits: Limits::default(),
            timeouts: Timeouts::default(),
            access_log: AccessLog::All,
            audit_log: Specified::default(),
            log: Log::default(),
            listed: None,
        }
    }
}

impl Config {
    /// The files that it names: what they say counts as much as what it says itself.
    pub fn files(&self) -> Vec<PathBuf> {
        let of_front = |front: &Listener| {
            let shown = front.certificate.iter();
            let shown = shown.flat_map(|files| [&files.chain, &files.key]);
            let callers = front.callers.client_ca.iter().chain(&front.callers.tokens);
            let issuers = front.callers.jwt.iter().flat_map(Jwt::files);
            shown
                .chain(callers)
                .chain(issuers)
                .cloned()
                .collect::<Vec<_>>()
        };
        let fronts = self.fronts.iter().flat_map(of_front);
        let tunnel = self.tunnel.identity.iter().flat_map(Identity::files);
        let policy = self.policy.0.iter().chain(tunnel).cloned();
        let apps = self.apps.values().flat_map(UpstreamTls::files).cloned();
        let cluster = self.signer().into_iter().flat_map(|rules| &rules.client_ca);
        policy
            .chain(fronts)
            .chain(apps)
            .chain(cluster.cloned())
            .collect()
    }
}

impl AsRef<Log> for Config {
    fn as_ref(&self) -> &Log {
        &self.log
    }
}

/// The tunnel port: where edges dial in, join and renew.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Tunnel {
    /// Address of the tunnel port.
    #[serde(with = "SocketAddrStr")]
    pub listen: SocketAddr,
    /// `host:port` by which edges reach this gateway; the hosts are also the names in its certificate.
    pub advertise: Vec<String>,
    /// `host:port` of further gateways, told to edges when they connect.
    pub gateways: Vec<String>,
    /// How many gateways there are, 64 or fewer, told to edges: those with `tunnels.gateways: every` look for all of them behind each address, as of a balancer. Without it: what `kubernetes.advertise` counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// Names of nodes that are not welcome, whatever else is known of them: for gateways that share a configuration and no data directory. Others are revoked by `causeway edge revoke`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub revoked: Vec<String>,
    /// Certificates that another system makes and renews, the gateway's and all edges', in place of those of the own CA.
    pub identity: Option<Identity>,
    /// Bound of an edge's TLS handshake.
    #[serde(with = "DurationStr")]
    pub handshake_timeout: Duration,
    /// Bound of the hello's answer.
    #[serde(with = "DurationStr")]
    pub hello_timeout: Duration,
    /// A PING is sent when nothing was read, or nothing written, for this long.
    #[serde(with = "DurationStr")]
    pub ping_after: Duration,
    /// A tunnel gets no new streams when nothing was read for this long after a PING.
    #[serde(with = "DurationStr")]
    pub ping_timeout: Duration,
    /// A tunnel is closed when still nothing was read after this much more.
    #[serde(with = "DurationStr")]
    pub close_after: Duration,
    /// Bytes that the open streams of one node may leave unread; windows shrink to keep it.
    #[serde(with = "ByteSize")]
    pub memory: usize,
    /// Streams that one tunnel carries at once.
    pub max_streams_per_tunnel: usize,
    /// Life of an edge's certificate; edges renew after two thirds of it.
    #[serde(with = "DurationStr")]
    pub edge_certificate_lifetime: Duration,
}

impl Default for Tunnel {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([0, 0, 0, 0], 10262)),
            advertise: Vec::new(),
            gateways: Vec::new(),
            replicas: None,
            revoked: Vec::new(),
            identity: None,
            // A handshake is two round trips; the slowest usable link has about 1 s each.
            handshake_timeout: Duration::from_secs(5),
            hello_timeout: Duration::from_secs(5),
            // 5 + 5 + 5 s: a silent death is known at both ends within 15 s.
            ping_after: Duration::from_secs(5),
            ping_timeout: Duration::from_secs(5),
            close_after: Duration::from_secs(5),
            // 64 stalled readers then hold 1 MiB each, with what HTTP and TLS hold beside the windows; and it still fills
            // 5 Gbit/s over 50 ms. The design says 64 MiB.
            memory: 32 << 20,
            max_streams_per_tunnel: 10_000,
            // Long enough for a node that is off over a weekend, short for a stolen key.
            edge_certificate_lifetime: Duration::from_hours(7 * 24),
        }
    }
}

impl Tunnel {
    /// The nodes that are revoked here, of a configuration that has been validated.
    pub(crate) fn unwelcome(&self) -> BTreeSet<NodeName> {
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
    /// Address of health, metrics and status; it authenticates nobody, so keep it on loopback.
    #[serde(with = "SocketAddrStr")]
    pub listen: SocketAddr,
    /// Further address, of `/metrics` alone, for scrapers elsewhere: `IP:PORT` or `unix:/path`. It authenticates nobody either.
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

/// What is served at most; beyond it callers get 503 with Retry-After.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Streams in all.
    pub streams: usize,
    /// Streams of one caller.
    pub per_caller: usize,
    /// Streams to one node.
    pub per_node: usize,
    /// Clients' connections in all. One source (an IPv4 address, an IPv6 /64) gets three quarters of them at most; where no place is free, the oldest connection without an open stream is closed for a new one.
    pub connections: usize,
    /// Bytes that callers may leave unread of answers, and apps of uploads, in all: from half of it windows are small, beyond it new streams get 503.
    #[serde(with = "ByteSize")]
    pub unread: usize,
    /// Memory of streams that stand still, because the caller does not read or the app does not: 320 KiB each, and what waits in their windows. Beyond it those that have stood still for longest are reset.
    #[serde(with = "ByteSize")]
    pub stalled: usize,
    /// Bytes of TCP buffers in this machine's kernel, of all processes (`mem` in `/proc/net/sockstat`), beyond which streams that stand still are reset, the longest first. 0 is half of where the kernel says that memory is short (`net.ipv4.tcp_mem`).
    #[serde(with = "ByteSize")]
    pub tcp_memory: usize,
    /// Bytes of a request's target: path and query. What is longer gets 414.
    #[serde(with = "ByteSize")]
    pub uri_bytes: usize,
    /// The same at listeners with `errors: kubernetes`, for `kubectl exec` with long arguments. 65,534 bytes is what a path, and a target over HTTP/2, can have at most; a query over HTTP/1.1 may be as long as this.
    #[serde(with = "ByteSize")]
    pub kubernetes_uri_bytes: usize,
    /// Bytes of the fields of a request's head.
    #[serde(with = "ByteSize")]
    pub header_bytes: usize,
    /// Fields in a request's head, and in the head of an answer at ports of `apps` over HTTP/1.1.
    pub headers: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // 50,000 idle upgrades cost about 1 GiB at the 20 KiB each that we promise.
            streams: 50_000,
            // kube-apiserver is one caller, and so is one Prometheus: high, but not all.
            per_caller: 10_000,
            per_node: 10_000,
            // Below the 20,000 descriptors that distributions commonly allow a service.
            connections: 15_000,
            // Eight tunnels' whole budgets: stalled callers of one node never come near it.
            unread: 512 << 20,
            // 680 of them with the least window: long before new streams get 503.
            stalled: 256 << 20,
            // The kernel knows how much memory the machine has.
            tcp_memory: 0,
            // What `http::Uri` holds, and more than any browser sends.
            uri_bytes: 64 << 10,
            // As much as kube-apiserver itself takes of a head (http.DefaultMaxHeaderBytes).
            kubernetes_uri_bytes: 1 << 20,
            // Twice the largest head that kube-apiserver sends with client groups inside.
            header_bytes: 64 << 10,
            // hyper's own default.
            headers: 100,
        }
    }
}

/// How long is waited at most.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Timeouts {
    /// A caller's TLS handshake.
    #[serde(with = "DurationStr")]
    pub tls: Duration,
    /// A request's head, from its first byte or the connection's start.
    #[serde(with = "DurationStr")]
    pub header: Duration,
    /// The edge's answer to CONNECT, which includes its dial to the target.
    #[serde(with = "DurationStr")]
    pub open: Duration,
    /// The app's answer to an upgrade.
    #[serde(with = "DurationStr")]
    pub upgrade_first_byte: Duration,
    /// The app's taking something of a request's body that waits.
    #[serde(with = "DurationStr")]
    pub upload: Duration,
    /// A caller's taking something of an answer that waits; sessions have no such bound.
    #[serde(with = "DurationStr")]
    pub download: Duration,
    /// A caller's connection without a request.
    #[serde(with = "DurationStr")]
    pub idle_keepalive: Duration,
    /// What open streams get to end when the gateway stops.
    #[serde(with = "DurationStr")]
    pub drain: Duration,
    /// An authorization asked of somebody else, and keys of an issuer of JWTs.
    #[serde(with = "DurationStr")]
    pub authorize: Duration,
    /// A request to a node whose last tunnel ended, waiting for the next one: it waits until this long after that end, or after the gateway's start, and is answered 503 then. `0s` answers at once.
    #[serde(with = "DurationStr")]
    pub reconnect: Duration,
    /// A gateway that has just started, until the edges that it had at its end are back: it is not ready (`/readyz`) before, and serves all the same. `0s` waits for none.
    #[serde(with = "DurationStr")]
    pub edges: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            // What Go's and HAProxy's defaults allow a slow client.
            tls: Duration::from_secs(10),
            header: Duration::from_secs(10),
            // kube-apiserver sets no bound of its own; edges give up a dial after 5 s.
            open: Duration::from_secs(10),
            // kubelet pulls a terminal up within seconds, even on a busy node.
            upgrade_first_byte: Duration::from_secs(30),
            // An app that flushes to a slow disk pauses for a minute or two, and goes on.
            upload: Duration::from_mins(5),
            // The same for callers: somebody reads a page of a log, and goes on.
            download: Duration::from_mins(5),
            // Go's client keeps idle connections for 90 s: close no earlier than it does.
            idle_keepalive: Duration::from_secs(90),
            // Kubernetes' default grace before it kills.
            drain: Duration::from_secs(30),
            authorize: Duration::from_secs(3),
            // An edge dials every 2 s while no gateway answers; its handshake and a slow link come on top.
            reconnect: Duration::from_secs(5),
            // Behind a balancer an edge finds a gateway that is back by some attempts, about one a second.
            edges: Duration::from_secs(10),
        }
    }
}

/// Which streams get an access record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AccessLog {
    /// Every stream.
    All,
    /// Streams that failed, here or at the app (5xx).
    Failures,
    /// No stream.
    None,
}
