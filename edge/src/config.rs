//! The edge's configuration: typed, with a default and a reason for each number.
//!
//! The doc comments are written for users: they become the help of flags and the reference in the README. This module reads
//! neither files nor the environment, because the binary does that. `validate` reports all errors that no type can express,
//! and reports them together.

mod allow;
mod api_cache;
mod egress;
mod health_check;
mod tunnel_mode;
mod validate;

pub use allow::{Allow, AllowedHost, Port, Protocol, Service};
pub use api_cache::{ApiCache, MemberListener, ServerCertificate, YurtHubListener};
use causeway_config::{ByteSize, ConfigErrors, DurationStr, SocketAddrStr};
pub use causeway_config::{ConfigError, Log, LogFormat, ReloadSender, Secret, Validate};
pub use egress::{Egress, EgressListener, EgressProxy};
pub use health_check::HealthCheck;
pub(crate) use health_check::{MAX_HEALTH_CHECKS, MIN_HEALTH_INTERVAL};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    path::PathBuf,
    str::FromStr,
    time::Duration,
};
pub use tunnel_mode::TunnelMode;

/// Interval of the health checks of the kubelet.
pub(crate) const PROBE_INTERVAL: Duration = Duration::from_secs(5);

/// The configuration of `causeway edge`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Directory of the key, the certificate and the announced gateway addresses; created with mode 0700.
    pub data_dir: PathBuf,
    /// Name of this node. If the stored identity is of another node, the edge joins again with this name.
    pub node: Option<String>,
    /// `host:port` of the gateways.
    pub gateways: Vec<String>,
    /// Join token of `causeway token create`. The edge uses it if it has no identity, or if gateways refuse the stored identity. A token is used once.
    pub join: Option<Secret>,
    /// File that contains the join token, instead of `join`; read each time a token is needed.
    pub join_file: Option<PathBuf>,
    /// Certificate that an external CA issues and renews, instead of a certificate obtained with a join token.
    pub identity: Option<Identity>,
    /// Cluster that provides this node's first certificate, instead of a join token; requires `kubernetes.certificates` at the gateways.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubernetes: Option<Kubernetes>,
    /// Proxy between this node and the gateways: `http://user:password@host:port` or `socks5://…`; `HTTPS_PROXY` if absent.
    pub proxy: Option<Secret>,
    /// Hosts, domains and networks to which the edge connects without the proxy, `HOST:PORT` for one port, `*` for everything; `NO_PROXY` if absent.
    pub no_proxy: Vec<String>,
    /// Health and metrics.
    pub admin: Admin,
    /// Ports and hosts that the gateway may reach through this node.
    pub allow: Allow,
    /// Ports of the node that the edge serves, each with its upstream. No other ports are served, except those of `listed_ports`.
    pub ports: BTreeMap<u16, Port>,
    /// Services behind this node, by name: `printer: 10.0.3.7:631`, or the keys of a port. Clients reach `printer` of the node `edge-1` as `printer.edge-1`. `allow.hosts` must permit the target.
    pub services: BTreeMap<String, Service>,
    /// Node ports (`9100`, `9000-9999`) that the edge also serves once the gateway's cluster lists them. The upstream is on loopback, or else on this node's own addresses; `ports` has precedence. `[]` means no ports. If absent: all ports with `kubernetes`, no ports without. The ports of the edge's own admin listener and of the API cache are only included if they are listed individually, not by a range.
    #[serde(skip_serializing_if = "Option::is_none")]
    // A key without a value is an error; it does not count as a missing key.
    #[schemars(with = "Vec<PortRange>")]
    pub listed_ports: Option<Vec<PortRange>>,
    /// Labels announced to the gateway.
    pub labels: BTreeMap<String, String>,
    /// Addresses of the node, announced to the gateway, which confirms them before it routes by them. Upstreams of listed ports are also searched at these addresses.
    pub addresses: Vec<IpAddr>,
    /// Node pool, the group of nodes on one site network. Announced to the gateway, which confirms it.
    pub pool: Option<String>,
    /// Cache of cluster objects for this node's own programs and the members of its node pool; disabled if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_cache: Option<ApiCache>,
    /// Listeners on this node that lead to the cloud or to other nodes, through a connection to a gateway; none if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress: Option<Egress>,
    /// Delegated heartbeats: while this node has no gateway, other members of its pool report that its kubelet is alive, so that its pods are not evicted; disabled if absent. Write `{}` for the defaults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heartbeat: Option<Heartbeat>,
    /// The tunnels to the gateway.
    pub tunnels: Tunnels,
    /// Limits on streams, memory and headers.
    pub limits: Limits,
    /// Timeouts.
    pub timeouts: Timeouts,
    /// Delay before the edge connects to a gateway again.
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
            services: BTreeMap::new(),
            listed_ports: None,
            labels: BTreeMap::new(),
            addresses: Vec::new(),
            pool: None,
            api_cache: None,
            egress: None,
            heartbeat: None,
            tunnels: Tunnels::default(),
            limits: Limits::default(),
            timeouts: Timeouts::default(),
            backoff: Backoff::default(),
            log: Log::default(),
        }
    }
}

impl Config {
    /// Returns the files that the configuration names and that are read while an edge runs.
    pub fn files(&self) -> Vec<PathBuf> {
        let files_of_port =
            |port: &Port| [&port.ca, &port.certificate, &port.key].map(Clone::clone);
        let identity = self.identity.iter().flat_map(Identity::files);
        let services = self.services.values().map(|service| &service.0);
        let ports = self.ports.values().chain(services);
        let ports = ports.flat_map(files_of_port).flatten();
        let paths = identity.chain(self.api_cache.iter().flat_map(ApiCache::files));
        paths.cloned().chain(ports).collect()
    }
}

/// Files of a certificate that an external CA (cert-manager, Vault, a company's PKI) issues and renews; each is watched.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// File of this node's certificate and its intermediates. The certificate contains exactly one URI, `spiffe://TRUST-DOMAIN/edge/NODE`.
    pub chain: PathBuf,
    /// File of the certificate's private key.
    pub key: PathBuf,
    /// File of the CAs that issue the gateways' certificates. These contain exactly one URI, `spiffe://TRUST-DOMAIN/gateway`.
    pub ca: PathBuf,
}

impl Identity {
    fn files(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.chain, &self.key, &self.ca].into_iter()
    }
}

/// Cluster that issues this node's first certificate through its API. Gateways renew the certificate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Kubernetes {
    /// Kubeconfig file with this node's credentials for the API server, such as the kubelet's. If absent, the edge uses the service account of its pod.
    pub kubeconfig: Option<PathBuf>,
    /// Name of the signer, the same as `kubernetes.certificates.signer` of the gateway. If it is a signer of the cluster itself, the edge presents the certificate to a gateway and receives a certificate of Causeway's CA for it.
    pub signer: String,
    /// Namespace of the `ConfigMap` with the gateways' CA.
    pub namespace: String,
    /// Name of the `ConfigMap` with the gateways' CA in the key `ca.crt`.
    pub name: String,
}

impl Default for Kubernetes {
    fn default() -> Self {
        Self {
            kubeconfig: None,
            // Same values as at the gateway.
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

/// Number and distribution of the tunnels of an edge.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Tunnels {
    /// A number from 1 to 64: tunnels to that many gateways, among the addresses that the names in `gateways` resolve to, and the gateways behind one address if the gateways announce their number. A hash of the node name and the address chooses them, so that edges spread evenly, and the next gateway replaces one that is away. `every`: tunnels to each of these gateways. `one`: tunnels to one gateway, and to another gateway if the first one fails.
    pub gateways: TunnelMode,
    /// With `every` or a number: interval at which the names are resolved again. With a number it is also the time for which a gateway that has returned must be connected before the tunnels to its replacement leave; up to twice as long, at random.
    #[serde(with = "DurationStr")]
    pub resolve_after: Duration,
    /// Maximum number of tunnels, at most 16; with `every` or a number, to each gateway.
    pub max: usize,
    /// Number of bytes of one stream after which the edge opens an additional tunnel.
    #[serde(with = "ByteSize")]
    pub bulk_after: usize,
    /// Time after which the edge closes an additional tunnel that no stream has used that much, at least 2 s.
    #[serde(with = "DurationStr")]
    pub bulk_idle: Duration,
}

impl Default for Tunnels {
    fn default() -> Self {
        Self {
            gateways: TunnelMode::default(),
            // A new replica is useless until edges connect, so the interval is short; name servers answer from caches.
            resolve_after: Duration::from_secs(15),
            // One for bulk transfers and one for small requests; more were not faster in measurements.
            max: 2,
            // Above any log page or metrics scrape, below any image or backup.
            bulk_after: 1 << 20,
            bulk_idle: Duration::from_mins(1),
        }
    }
}

/// Limits on streams, memory and headers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Maximum number of streams of all tunnels; further streams get 503. Each stream has a connection to an upstream.
    pub streams: usize,
    /// Memory limit for stalled streams, whose client or upstream does not read: 320 KiB each, and the buffered bytes of an upload. Above the limit, the edge resets the streams that have been stalled longest.
    #[serde(with = "ByteSize")]
    pub stalled: usize,
    /// Limit on the TCP buffers of all processes in this machine's kernel (`mem` in `/proc/net/sockstat`), in bytes. Above the limit, the edge resets stalled streams, longest first. Each stalled stream uses up to 4 MiB of these buffers. 0 means half of the kernel's memory pressure threshold (`net.ipv4.tcp_mem`).
    #[serde(with = "ByteSize")]
    pub tcp_memory: usize,
    /// Maximum number of header fields in an HTTP/1.1 response of an upstream; a response with more fields becomes 502.
    pub max_headers: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // Twenty times the number of pods on a kubelet's node. Each stream uses one file descriptor.
            streams: 4_096,
            // Enough for 800 stalled downloads and the uploads of two tunnels.
            stalled: 256 << 20,
            // 0: the kernel derives its threshold from the machine's memory.
            tcp_memory: 0,
            // hyper's own default.
            max_headers: 100,
        }
    }
}

/// Timeouts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Timeouts {
    /// TCP handshake with a gateway.
    #[serde(with = "DurationStr")]
    pub tcp: Duration,
    /// TLS handshake with a gateway.
    #[serde(with = "DurationStr")]
    pub tls: Duration,
    /// Hello of a gateway.
    #[serde(with = "DurationStr")]
    pub hello: Duration,
    /// Time without received bytes after which a tunnel is closed and opened again.
    #[serde(with = "DurationStr")]
    pub silence: Duration,
    /// TCP and TLS handshake with an upstream.
    #[serde(with = "DurationStr")]
    pub dial: Duration,
    /// Response of an upstream to an upgrade.
    #[serde(with = "DurationStr")]
    pub upgrade: Duration,
    /// Time after which an idle connection to an upstream is closed.
    #[serde(with = "DurationStr")]
    pub upstream_idle: Duration,
    /// Maximum time for open streams to end when the edge stops.
    #[serde(with = "DurationStr")]
    pub drain: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            // A returned network is noticed by the next attempt, so attempts are short.
            tcp: Duration::from_secs(2),
            // Two round trips on the slowest usable link, and a busy gateway during a reconnect storm.
            tls: Duration::from_secs(5),
            hello: Duration::from_secs(5),
            // The gateway PINGs an idle tunnel every 5 s: three of them are missing.
            silence: Duration::from_secs(15),
            // Below the gateway's bound of 10 s, so that the client gets the edge's reason.
            dial: Duration::from_secs(5),
            upgrade: Duration::from_secs(30),
            // Below the idle timeouts of nginx (75 s) and Go (90 s).
            upstream_idle: Duration::from_mins(1),
            // Kubernetes' default grace before it kills.
            drain: Duration::from_secs(30),
        }
    }
}

/// Maximum delay before the edge connects to a gateway again. The delay is random up to this value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Backoff {
    /// Maximum delay if the network does not respond.
    #[serde(with = "DurationStr")]
    pub silent_max: Duration,
    /// Maximum delay if the gateway refused the edge, or with `every` if the gateway does not respond although another one does. It is also the maximum delay between requests to the cluster's API (`kubernetes`), whether it refuses or does not answer.
    #[serde(with = "DurationStr")]
    pub refused_max: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self {
            // Attempts on a silent network cost nothing, and a long delay keeps the edge disconnected.
            silent_max: Duration::from_secs(2),
            // A refusal costs the gateway a handshake: 19,000 edges make 630 a second at most.
            refused_max: Duration::from_mins(1),
        }
    }
}

/// Policy for the ports that a gateway may list at an edge.
///
/// A node of a cluster serves the ports that its cluster lists, unless its owner restricts them. Any other edge serves none
/// unless its owner allows them. The edge's own listeners that have no authentication are opened neither by default nor by a
/// range.
#[derive(Clone, Debug)]
pub(crate) struct AnnouncedPortPolicy {
    ranges: Vec<PortRange>,
    /// Whether this edge runs on a node of a cluster. The node's own addresses then count like loopback.
    pub(crate) is_cluster_node: bool,
}

impl AnnouncedPortPolicy {
    /// Returns the policy that this configuration describes.
    pub(crate) fn from_config(config: &Config) -> Self {
        let is_cluster_node = config.kubernetes.is_some();
        let all_ports = || is_cluster_node.then_some(PortRange(1..=u16::MAX));
        let ranges = match &config.listed_ports {
            Some(configured) => configured.clone(),
            None => all_ports().into_iter().collect(),
        };
        Self {
            ranges,
            is_cluster_node,
        }
    }

    /// Whether no port may be listed.
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether this port may be listed. The edge's own listeners have the ports `own_ports`.
    pub(crate) fn permits(&self, port: u16, own_ports: &[u16]) -> bool {
        let permits_port = |range: &PortRange| {
            let is_exact = range.0 == (port..=port);
            is_exact || (!own_ports.contains(&port) && range.contains(port))
        };
        self.ranges.iter().any(permits_port)
    }
}

/// Delegated heartbeats over the listener for pool members (`api_cache.members`). Gateways accept them with `kubernetes.heartbeats.enabled`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Heartbeat {
    /// Address of the kubelet's health check, which is asked for `/healthz` over HTTP (`healthzBindAddress` and `healthzPort` of the kubelet's configuration).
    #[serde(with = "SocketAddrStr")]
    pub kubelet: SocketAddr,
    /// Time for which a successful health check of the kubelet counts. At least 5 s, which is the interval of the checks. No heartbeat is sent after this time, or after two failed checks in succession.
    #[serde(with = "DurationStr")]
    pub alive_for: Duration,
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self {
            // The kubelet's own default.
            kubelet: SocketAddr::from(([127, 0, 0, 1], 10248)),
            // Two checks.
            alive_for: Duration::from_secs(10),
        }
    }
}

impl Heartbeat {
    /// Checks these keys. `has_members` is whether this node has a listener for pool members.
    fn validate(&self, has_members: bool, faults: &mut ConfigErrors) {
        if !has_members {
            let message = "heartbeats are delegated to other members of the pool over the listener for pool members, which is not configured, so there is no delegate; add api_cache.members";
            faults.add("heartbeat", message);
        }
        if self.alive_for < PROBE_INTERVAL {
            let message = format!(
                "must be at least {PROBE_INTERVAL:?}, because the kubelet is checked every {PROBE_INTERVAL:?}"
            );
            faults.add("heartbeat.alive_for", message);
        }
    }
}

/// One port, or a range of ports `FIRST-LAST`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortRange(RangeInclusive<u16>);

impl PortRange {
    /// Whether the range contains this port.
    pub fn contains(&self, port: u16) -> bool {
        self.0.contains(&port)
    }
}

impl FromStr for PortRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port > 0);
        match (port(first), port(last)) {
            (Some(first), Some(last)) if first <= last => Ok(Self(first..=last)),
            _ => Err(format!(
                "\"{text}\" is not a port or a range of ports; write 9100 or 9000-9999; ports are 1 to 65535"
            )),
        }
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, last) = (self.0.start(), self.0.end());
        if first == last {
            return first.fmt(f);
        }
        write!(f, "{first}-{last}")
    }
}

impl Serialize for PortRange {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PortRange {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?
            .parse()
            .map_err(de::Error::custom)
    }
}

impl schemars::JsonSchema for PortRange {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "PortRange".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_config::Validate;
    use serde_json::{Value, json};

    fn faults(heartbeat: &Value, members: bool) -> Vec<String> {
        let site = json!({ "listen": "10.1.0.5:10271", "addresses": ["10.1.0.5:10271"] });
        let api_cache = if members {
            json!({ "members": site })
        } else {
            json!({})
        };
        let config = json!({ "heartbeat": heartbeat, "api_cache": api_cache });
        let config: Config = serde_json::from_value(config).unwrap();
        let faults = config.validate().into_iter();
        faults
            .map(|fault| format!("{}: {}", fault.path, fault.message))
            .collect()
    }

    #[test]
    fn heartbeats_need_the_listener_for_pool_members() {
        assert_eq!(faults(&json!({}), true), Vec::<String>::new());
        let without = faults(&json!({}), false);
        assert!(
            without.len() == 1 && without[0].contains("there is no delegate"),
            "{without:#?}"
        );
        let short = faults(&json!({ "alive_for": "4s" }), true);
        assert!(
            short.len() == 1 && short[0].starts_with("heartbeat.alive_for"),
            "{short:#?}"
        );
    }

    #[test]
    fn a_written_port_or_range_parses_back() {
        for (text, inside, outside) in [
            ("9100", 9100, 9101),
            ("9000-9999", 9999, 8999),
            ("1-65535", 65535, 0),
        ] {
            let range: PortRange = text.parse().unwrap();
            assert_eq!(range.to_string(), text);
            assert!(range.contains(inside) && !range.contains(outside), "{text}");
        }
        for text in ["", "0", "0-5", "9-1", "65536", "a", "1-2-3", "-"] {
            assert!(text.parse::<PortRange>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_cluster_node_serves_listed_ports_within_its_owners_limits() {
        let of =
            |config| AnnouncedPortPolicy::from_config(&serde_json::from_value(config).unwrap());
        for (config, takes) in [
            (json!({}), [false; 3]),
            (json!({ "kubernetes": {} }), [true, true, false]),
            (json!({ "kubernetes": {}, "listed_ports": [] }), [false; 3]),
            (
                json!({ "kubernetes": {}, "listed_ports": ["9000-9999"] }),
                [true, false, false],
            ),
            (json!({ "listed_ports": ["1-65535"] }), [true, true, false]),
            (
                json!({ "listed_ports": ["9051", "10266"] }),
                [true, false, true],
            ),
        ] {
            let listable = of(config.clone());
            let takes_now = [9051, 22, 10266].map(|port| listable.permits(port, &[10266]));
            assert_eq!(takes_now, takes, "{config}");
            assert_eq!(listable.is_empty(), takes == [false; 3], "{config}");
            assert!(!listable.permits(0, &[10266]), "{config}");
        }
    }
}
