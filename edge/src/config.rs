//! The edge's configuration: typed, with a default and a reason for each number.
//!
//! Doc comments here are what a user reads: they become the help of flags and the
//! reference in the README. Neither files nor the environment are read here (the binary
//! does that); `validate` finds what no type can express, all of it at once.

mod allow;
pub(crate) mod announced_ports;
mod api_cache;
mod port_ranges;
mod validate;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use allow::{Allow, AllowedHost, Port, Protocol};
pub use api_cache::{ApiCache, MemberListener, ServerCertificate, YurtHubListener};
use causeway_config::{ByteSize, DurationStr, SocketAddrStr};
pub use causeway_config::{ConfigError, Log, LogFormat, ReloadSender, Secret, Validate};
pub use port_ranges::PortRange;

/// The configuration of `causeway edge`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Directory of the key, the certificate and the learnt gateways; made with mode 0700.
    pub data_dir: PathBuf,
    /// Name of this node. If the stored identity is of another node, the edge joins by this name.
    pub node: Option<String>,
    /// `host:port` of the gateways.
    pub gateways: Vec<String>,
    /// Token of `causeway token create`. Used where there is no identity, or gateways refuse the stored one; a token is used once.
    pub join: Option<Secret>,
    /// File with that token, in place of `join`; read whenever a token is needed.
    pub join_file: Option<PathBuf>,
    /// A certificate that an external CA issues and renews, in place of the one that a token brings.
    pub identity: Option<Identity>,
    /// The cluster that says who this node is, in place of a token; the gateways' `kubernetes.certificates` are for that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubernetes: Option<Kubernetes>,
    /// Proxy between this node and the gateways: `http://user:password@host:port` or `socks5://…`; `HTTPS_PROXY` if absent.
    pub proxy: Option<Secret>,
    /// Hosts, domains and networks that are dialled without the proxy, `HOST:PORT` for one port, `*` for everything; `NO_PROXY` if absent.
    pub no_proxy: Vec<String>,
    /// Health and metrics.
    pub admin: Admin,
    /// Ports and hosts that the gateway may reach through this node.
    pub allow: Allow,
    /// The node's ports that are served, and where each leads. No other port is, but for those of `listed_ports`.
    pub ports: BTreeMap<u16, Port>,
    /// Node ports (`9100`, `9000-9999`) that are served as well as soon as the gateway's cluster lists them, over loopback or else by this node's own addresses; `ports` wins. `[]` is none. Absent it is all with `kubernetes`, and none without. The edge's own admin port, and the reader's, are among them only if they are named alone, in no range.
    #[serde(skip_serializing_if = "Option::is_none")]
    // A key without a value is a fault, and not as good as none.
    #[schemars(with = "Vec<PortRange>")]
    pub listed_ports: Option<Vec<PortRange>>,
    /// Labels announced to the gateway.
    pub labels: BTreeMap<String, String>,
    /// The node's addresses announced to the gateway, which confirms them before it routes by them. If ports are listed, their upstreams are looked for there, too.
    pub addresses: Vec<IpAddr>,
    /// The group of nodes on one site network, announced to the gateway, which confirms it.
    pub pool: Option<String>,
    /// Cache of cluster objects for this node's own programs and the members of its node pool; disabled if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_cache: Option<ApiCache>,
    /// The tunnels to the gateway.
    pub tunnels: Tunnels,
    /// Limits on what is served.
    pub limits: Limits,
    /// How long is waited at most.
    pub timeouts: Timeouts,
    /// How long is waited before a gateway is dialled anew.
    pub backoff: Backoff,
    /// The log.
    pub log: Log,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            data_dir: "/var/lib/causeway-edge".into(),
            node: None,
            gateways: Vec::new(),
            join: None,
            join_file: None,
            identity: None,
            kubernetes: None,
            proxy: None,
            no_proxy: Vec::new(),
            admin: Admin::default(),
            allow: Allow::default(),
            ports: BTreeMap::new(),
            listed_ports: None,
            labels: BTreeMap::new(),
            addresses: Vec::new(),
            pool: None,
            api_cache: None,
            tunnels: Tunnels::default(),
            limits: Limits::default(),
            timeouts: Timeouts::default(),
            backoff: Backoff::default(),
            log: Log::default(),
        }
    }
}

impl Config {
    /// The files that it names and that count while an edge runs.
    pub fn files(&self) -> Vec<PathBuf> {
        let of_port = |port: &Port| [&port.ca, &port.certificate, &port.key].map(Clone::clone);
        let identity = self.identity.iter().flat_map(Identity::files);
        let ports = self.ports.values().flat_map(of_port).flatten();
        let given = identity.chain(self.api_cache.iter().flat_map(ApiCache::files));
        given.cloned().chain(ports).collect()
    }
}

/// Files of a certificate that an external CA (cert-manager, Vault, a company's PKI) issues and renews; each is watched.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// File of this node's certificate and the intermediates behind it; its one URI is `spiffe://TRUST-DOMAIN/edge/NODE`.
    pub chain: PathBuf,
    /// File of the key.
    pub key: PathBuf,
    /// File of the CAs on which certificates of gateways hang; their one URI is `spiffe://TRUST-DOMAIN/gateway`.
    pub ca: PathBuf,
}

impl Identity {
    fn files(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.chain, &self.key, &self.ca].into_iter()
    }
}

/// A cluster whose API is asked for this node's first certificate. Gateways renew it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Kubernetes {
    /// File by which the API server is reached as this node, such as its kubelet's; without it the edge is a pod with a service account.
    pub kubeconfig: Option<PathBuf>,
    /// Name of the signer that is asked, as `kubernetes.certificates.signer` of the gateway has it. What one of the cluster's own makes is shown to a gateway, which gives one of Causeway's for it.
    pub signer: String,
    /// Namespace of the `ConfigMap` with the gateways' CA.
    pub namespace: String,
    /// Name of that `ConfigMap`, whose key `ca.crt` it is.
    pub name: String,
}

impl Default for Kubernetes {
    fn default() -> Self {
        Self {
            kubeconfig: None,
            // As the gateway has them.
            signer: "causeway.io/edge".to_owned(),
            namespace: "kube-system".to_owned(),
            name: "causeway-ca".to_owned(),
        }
    }
}

impl AsRef<Log> for Config {
    fn as_ref(&self) -> &Log {
        &self.log
    }
}

/// The admin listener.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Admin {
    /// Address of health and metrics. It has no authentication, so bind it to loopback.
    #[serde(with = "SocketAddrStr")]
    pub listen: SocketAddr,
}

impl Default for Admin {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 10266)),
        }
    }
}

/// At which gateways an edge has tunnels.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum TunnelMode {
    /// At one, and at another one if that fails.
    #[default]
    One,
    /// At each address that their names lead to, and at each behind it.
    Every,
}

/// The tunnels that an edge keeps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Tunnels {
    /// `one`: at one gateway, and at another one if that fails; `every`: at each address that the names of gateways lead to, and at each gateway behind it where they say how many they are.
    pub gateways: TunnelMode,
    /// With `every`: how often the names are resolved anew.
    #[serde(with = "DurationStr")]
    pub resolve_after: Duration,
    /// Tunnels at most, 16 or fewer; with `every`, at each gateway.
    pub max: usize,
    /// A further tunnel is dialled once a stream has moved this much.
    #[serde(with = "ByteSize")]
    pub bulk_after: usize,
    /// It is closed when no stream has moved that much for this long.
    #[serde(with = "DurationStr")]
    pub bulk_idle: Duration,
}

impl Default for Tunnels {
    fn default() -> Self {
        Self {
            gateways: TunnelMode::One,
            // A replica that comes is of use to nobody before its first edges are there; a name server lives on caches.
            resolve_after: Duration::from_secs(15),
            // One for bulk beside one for small requests; more measured no faster.
            max: 2,
            // Above any log page or metrics scrape, below any image or backup.
            bulk_after: 1 << 20,
            bulk_idle: Duration::from_mins(1),
        }
    }
}

/// Limits on what is served.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Streams of all tunnels; further ones get 503. Each has a connection to an upstream.
    pub streams: usize,
    /// Memory limit for stalled streams, whose client or upstream does not read: 320 KiB each, and the buffered bytes of an upload. Beyond it the streams that have been stalled for longest are reset.
    #[serde(with = "ByteSize")]
    pub stalled: usize,
    /// Bytes of TCP buffers in this machine's kernel, of all processes (`mem` in `/proc/net/sockstat`), beyond which stalled streams are reset, the longest first. Each holds up to 4 MiB of an upstream's answer there. 0 is half of the number at which the kernel says that memory is short (`net.ipv4.tcp_mem`).
    #[serde(with = "ByteSize")]
    pub tcp_memory: usize,
    /// Fields in the head of an upstream's answer over HTTP/1.1; an answer with more is 502.
    pub max_headers: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // Twenty times what a kubelet's node runs in pods; a descriptor each.
            streams: 4_096,
            // 800 downloads that stand still, beside which two tunnels' uploads have room.
            stalled: 256 << 20,
            // The kernel knows how much memory the machine has.
            tcp_memory: 0,
            // hyper's own default.
            max_headers: 100,
        }
    }
}

/// How long is waited at most.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Timeouts {
    /// A gateway's TCP handshake.
    #[serde(with = "DurationStr")]
    pub tcp: Duration,
    /// A gateway's TLS handshake.
    #[serde(with = "DurationStr")]
    pub tls: Duration,
    /// The gateway's hello.
    #[serde(with = "DurationStr")]
    pub hello: Duration,
    /// A tunnel on which nothing was read for this long is closed and dialled anew.
    #[serde(with = "DurationStr")]
    pub silence: Duration,
    /// TCP and TLS handshake of an upstream.
    #[serde(with = "DurationStr")]
    pub dial: Duration,
    /// Answer of an upstream to an upgrade.
    #[serde(with = "DurationStr")]
    pub upgrade: Duration,
    /// Time after which an idle connection to an upstream is closed.
    #[serde(with = "DurationStr")]
    pub upstream_idle: Duration,
    /// Time that open streams get to end when the edge stops.
    #[serde(with = "DurationStr")]
    pub drain: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            // A returned network is noticed by the next attempt, so attempts are short.
            tcp: Duration::from_secs(2),
            // Two round trips on the slowest usable link, and a busy gateway in a storm.
            tls: Duration::from_secs(5),
            hello: Duration::from_secs(5),
            // The gateway PINGs an idle tunnel every 5 s: three of them are missing.
            silence: Duration::from_secs(15),
            // Below the gateway's bound of 10 s, so that the client gets the edge's reason.
            dial: Duration::from_secs(5),
            upgrade: Duration::from_secs(30),
            // Below the 75 s after which nginx, and the 90 s after which Go, close theirs.
            upstream_idle: Duration::from_mins(1),
            // Kubernetes' default grace before it kills.
            drain: Duration::from_secs(30),
        }
    }
}

/// How long is waited, at random up to this, before a gateway is dialled anew.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Backoff {
    /// At most, where the network is silent.
    #[serde(with = "DurationStr")]
    pub silent_max: Duration,
    /// At most, where the gateway refused, or with `every` does not answer while another one does.
    #[serde(with = "DurationStr")]
    pub refused_max: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self {
            // A silent network costs nobody anything, and waiting keeps the edge away.
            silent_max: Duration::from_secs(2),
            // A refusal costs the gateway a handshake: 19,000 edges make 630 a second at most.
            refused_max: Duration::from_mins(1),
        }
    }
}
