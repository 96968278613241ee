//! Policy of the targets that this edge serves. The node's owner decides finally.
//!
//! Two lists must both permit a target: the served ports of the node, each with its upstream, and the addresses to which the
//! edge may connect. The second list is checked again after name resolution, with the address that the edge is about to
//! connect to. So no name leads to an address that is not allowed. A target that is not this node requires its host in
//! `allow.hosts`. If that host turns out to be this machine (loopback or an address of the node), only the node's ports are
//! served, because otherwise every local port would be open. A service behind the node is permitted like a port, by its name and
//! by the address.

use super::{
    upstream::{Upstream, UpstreamKey},
    upstream_tls::{self, TlsError},
};
use crate::config::{Allow, AnnouncedPortPolicy, Config, Port, Protocol, Service};
use causeway_rt::host_addresses;
use causeway_tunnel::{
    RejectCode, StreamKind, Target, control_stream::AnnouncedPorts, error::Rejected,
    wire::MAX_REPORTED_SERVICES,
};
use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
};

/// Facts about the node, known while an edge runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LocalNode {
    /// Ports of the edge's own listeners that have no authentication.
    pub(crate) ports: Vec<u16>,
    /// Local addresses of the connections to gateways, which are addresses of this node.
    pub(crate) addresses: Vec<IpAddr>,
}

/// Compiled allow-list.
#[derive(Clone)]
pub(crate) struct Policy {
    node: Arc<str>,
    addresses: Vec<IpAddr>,
    /// Whether an address belongs to an interface of this host.
    is_host_address: fn(IpAddr) -> bool,
    allow: Allow,
    ports: BTreeMap<u16, Arc<Upstream>>,
    services: BTreeMap<String, Arc<Upstream>>,
    /// Policy for the ports that a gateway may list.
    announced_rules: AnnouncedPortPolicy,
    announced: BTreeMap<u16, Arc<Upstream>>,
}

impl Policy {
    /// Compiles the configuration for `node`. Reads the TLS files of the upstreams.
    pub(crate) fn new(node: &str, config: &Config) -> Result<Self, TlsError> {
        let node: Arc<str> = node.into();
        let ports = config.ports.iter().map(|(number, port)| {
            let (id, key) = (UpstreamKey::Port(*number), format!("ports.{number}"));
            let upstream = configured_upstream(id, &node, (&key, port), &port.target(*number))?;
            Ok((*number, Arc::new(upstream)))
        });
        let ports = ports.collect::<Result<_, _>>()?;
        let services = config.services.iter().map(|(name, Service(port))| {
            let (id, key) = (
                UpstreamKey::Service(name.clone()),
                format!("services.{name}"),
            );
            let target = port.target.as_deref().unwrap_or_default();
            let upstream = configured_upstream(id, &node, (&key, port), target)?;
            Ok((name.clone(), Arc::new(upstream)))
        });
        let services = services.collect::<Result<_, _>>()?;
        Ok(Self {
            node,
            addresses: config.addresses.iter().map(IpAddr::to_canonical).collect(),
            is_host_address: host_addresses::is_own,
            allow: config.allow.clone(),
            ports,
            services,
            announced_rules: AnnouncedPortPolicy::from_config(config),
            announced: BTreeMap::new(),
        })
    }

    /// Returns the policy with these listed ports. A configured port has precedence over a listed one. A port that is listed
    /// for HTTP and for TCP is served as TCP.
    pub(crate) fn with_announced(self, announced: &AnnouncedPorts, local_node: &LocalNode) -> Self {
        let with_scheme = |scheme| move |port: &u16| (*port, scheme);
        let ports = announced.http.iter().map(with_scheme(Protocol::Http));
        let ports = ports.chain(announced.tcp.iter().map(with_scheme(Protocol::Tcp)));
        let is_permitted = |port: u16| self.announced_rules.permits(port, &local_node.ports);
        let ports = ports.filter(|(port, _)| is_permitted(*port) && !self.ports.contains_key(port));
        let mut fallback_addresses = self.addresses.clone();
        for ip in local_node.addresses.iter().map(IpAddr::to_canonical) {
            if !ip.is_loopback() && !fallback_addresses.contains(&ip) {
                fallback_addresses.push(ip);
            }
        }
        let to_upstream = |port: u16, scheme| Upstream {
            id: UpstreamKey::Port(port),
            node: self.node.clone(),
            target: Target::new("127.0.0.1", port),
            // The gateway that lists the port does not know where the node's apps listen.
            fallback_addresses: fallback_addresses.clone(),
            scheme,
            tls: None,
            proxy_protocol: false,
            health_check: None,
        };
        let announced = ports
            .map(|(port, scheme)| (port, Arc::new(to_upstream(port, scheme))))
            .collect();
        Self { announced, ..self }
    }

    /// Returns the upstream of a node port.
    fn port(&self, port: u16) -> Option<&Arc<Upstream>> {
        self.ports.get(&port).or_else(|| self.announced.get(&port))
    }

    /// Returns the upstream of a stream's target, if this edge serves the target with this kind of stream.
    pub(crate) fn select_upstream(
        &self,
        target: &Target,
        kind: &StreamKind,
    ) -> Result<Arc<Upstream>, Rejected> {
        let upstream = if self.is_self(target) {
            self.port(target.port).cloned().ok_or_else(|| {
                let detail = format!("{} does not serve port {}", self.node, target.port);
                RejectCode::Policy.with_detail(detail)
            })?
        } else if let Some(name) = target.service_of(&self.node) {
            self.service(name, target.port)?
        } else if target.port == 0 {
            let detail = format!("the target {target} has no port");
            return Err(RejectCode::Malformed.with_detail(detail));
        } else {
            self.find_other(target)?
        };
        match kind {
            StreamKind::Upgrade(_) if !self.allow.upgrades => {
                Err(self.reject("does not allow upgrades"))
            }
            StreamKind::Upgrade(_) | StreamKind::Request if upstream.scheme == Protocol::Tcp => {
                Err(self.reject(&format!("serves {target} as tcp only, with CONNECT")))
            }
            _ => Ok(upstream),
        }
    }

    /// Returns the upstream of a service. A client may name its port or leave it out (0).
    fn service(&self, name: &str, port: u16) -> Result<Arc<Upstream>, Rejected> {
        let upstream = self.services.get(name).ok_or_else(|| {
            let detail = format!("{} has no service {name}", self.node);
            RejectCode::ServiceUnknown.with_detail(detail)
        })?;
        let own = upstream.target.port;
        if port != 0 && port != own {
            return Err(self.reject(&format!("serves {name} at port {own} only, not at {port}")));
        }
        Ok(upstream.clone())
    }

    /// Returns the address to connect to, for an upstream that resolved to `address`, if the policy permits it.
    pub(crate) fn permitted_address(
        &self,
        upstream: &Upstream,
        address: SocketAddr,
    ) -> Option<SocketAddr> {
        let ip = address.ip().to_canonical();
        let is_named = self.allow.permits_name(&upstream.target.host);
        let is_loopback = ip.is_loopback() || ip.is_unspecified();
        let is_local = || is_loopback || self.is_of_this_host(ip);
        let is_permitted = match upstream.id {
            // A name that resolves to this machine must not bypass the list of ports: a hostile DNS server
            // could open all of them. `localhost` and an address are allowed if configured explicitly, loopback by `ports` only.
            UpstreamKey::Other(_) if is_local() => {
                let is_written =
                    !is_loopback && upstream.target.ip().map(|own| own.to_canonical()) == Some(ip);
                is_named && upstream.target.host.eq_ignore_ascii_case("localhost")
                    || is_written && self.allow.lists_address(ip)
            }
            // The same is true for a machine of the site that claims the name of a service.
            UpstreamKey::Service(_) if is_local() => {
                let is_configured = upstream.target.host.eq_ignore_ascii_case("localhost")
                    || upstream.target.ip() == Some(ip);
                is_configured && (is_named || self.allow.permits(ip))
            }
            _ => is_named || self.allow.permits(ip) || self.is_own_address(upstream, ip),
        };
        is_permitted.then(|| SocketAddr::new(ip, address.port()))
    }

    /// Whether an address is one of this machine, also behind NAT64. The interfaces are read, because `addresses` does not list
    /// all: a machine has addresses of other networks, of containers and of VPNs, and they change.
    fn is_of_this_host(&self, ip: IpAddr) -> bool {
        let host = host_addresses::strip_nat64(ip);
        host.is_loopback() || self.addresses.contains(&host) || (self.is_host_address)(ip)
    }

    /// Whether this is an address of the node itself, for a port that its cluster lists. Such an address is permitted if
    /// loopback is.
    fn is_own_address(&self, upstream: &Upstream, ip: IpAddr) -> bool {
        let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
        self.announced_rules.is_cluster_node
            && upstream.fallback_addresses.contains(&ip)
            && self.allow.permits(loopback)
    }

    /// Whether a permitted address is permitted only because it is the node's own.
    pub(crate) fn is_own_only(&self, upstream: &Upstream, ip: IpAddr) -> bool {
        let is_named = self.allow.permits_name(&upstream.target.host);
        !is_named && !self.allow.permits(ip)
    }

    /// Returns the ports of the owner's configuration, with their upstreams.
    pub(super) fn configured_ports(&self) -> impl Iterator<Item = (u16, &Upstream)> {
        self.ports
            .iter()
            .map(|(port, upstream)| (*port, &**upstream))
    }

    /// Returns the node ports that are served.
    pub(crate) fn ports(&self) -> Vec<u16> {
        let all = self.ports.keys().chain(self.announced.keys());
        let mut all: Vec<_> = all.copied().collect();
        all.sort_unstable();
        all
    }

    /// Returns the port of each service that the edge reports to gateways.
    pub(crate) fn reported_services(&self) -> BTreeMap<String, u16> {
        let services = self.services.iter().take(MAX_REPORTED_SERVICES);
        services
            .map(|(name, upstream)| (name.clone(), upstream.target.port))
            .collect()
    }

    /// Returns the refusal of a target without any permitted address.
    pub(crate) fn not_allowed(&self, target: &Target) -> Rejected {
        self.reject(&format!(
            "does not allow {target}; see the keys allow.hosts and ports of the edge"
        ))
    }

    fn is_self(&self, target: &Target) -> bool {
        match target.ip() {
            // A node may be named by its address.
            Some(ip) => {
                let ip = ip.to_canonical();
                self.addresses.contains(&ip) || self.node.parse() == Ok(ip)
            }
            None => target.host.eq_ignore_ascii_case(&self.node),
        }
    }

    fn find_other(&self, target: &Target) -> Result<Arc<Upstream>, Rejected> {
        let ip = target.ip().map(|ip| ip.to_canonical());
        let matches_target = |app: &&Arc<Upstream>| {
            let is_same_host = match app.target.ip() {
                Some(own) => Some(own.to_canonical()) == ip,
                None => app.target.host.eq_ignore_ascii_case(&target.host),
            };
            is_same_host && app.target.port == target.port
        };
        if let Some(upstream) = self
            .ports
            .values()
            .chain(self.announced.values())
            .find(matches_target)
        {
            return Ok(upstream.clone());
        }
        let upstream = Upstream {
            id: UpstreamKey::Other(target.clone()),
            node: self.node.clone(),
            proxy_protocol: false,
            health_check: None,
            target: target.clone(),
            fallback_addresses: Vec::new(),
            scheme: Protocol::Http,
            tls: None,
        };
        match ip {
            // The addresses of a name are checked after resolution.
            Some(ip)
                if self
                    .permitted_address(&upstream, SocketAddr::new(ip, target.port))
                    .is_none() =>
            {
                Err(self.not_allowed(target))
            }
            _ => Ok(Arc::new(upstream)),
        }
    }

    fn reject(&self, what: &str) -> Rejected {
        RejectCode::Policy.with_detail(format!("{} {what}", self.node))
    }
}

/// Returns the upstream of a configured port or service, which has this key in the configuration.
fn configured_upstream(
    id: UpstreamKey,
    node: &Arc<str>,
    (key, port): (&str, &Port),
    target: &str,
) -> Result<Upstream, TlsError> {
    let Ok(target) = target.parse::<Target>() else {
        return Err(TlsError::Target(key.to_owned(), target.to_owned()));
    };
    Ok(Upstream {
        id,
        node: node.clone(),
        tls: upstream_tls::load(key, port, &target)?,
        target,
        fallback_addresses: Vec::new(),
        scheme: port.scheme,
        proxy_protocol: port.proxy_protocol,
        health_check: port.health_check.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn policy(config: serde_json::Value) -> Policy {
        let config: Config = serde_json::from_value(config).unwrap();
        Policy::new("edge-1", &config).unwrap()
    }

    fn decide(policy: &Policy, target: &str) -> Result<String, RejectCode> {
        decide_as(policy, target, &StreamKind::Request)
    }

    fn decide_as(policy: &Policy, target: &str, kind: &StreamKind) -> Result<String, RejectCode> {
        match policy.select_upstream(&target.parse().unwrap(), kind) {
            Ok(app) => Ok(app.target.to_string()),
            Err(refused) => Err(refused.code),
        }
    }

    #[test]
    fn only_named_ports_are_served_at_their_configured_targets() {
        let policy = policy(json!({
            "ports": { "9100": { "target": "127.0.0.1:45123" }, "80": {} },
            "addresses": ["10.0.0.5"],
        }));
        assert_eq!(decide(&policy, "edge-1:9100").unwrap(), "127.0.0.1:45123");
        assert_eq!(decide(&policy, "EDGE-1:80").unwrap(), "127.0.0.1:80");
        assert_eq!(decide(&policy, "10.0.0.5:80").unwrap(), "127.0.0.1:80");
        assert_eq!(decide(&policy, "edge-1:22"), Err(RejectCode::Policy));
        let refused = policy
            .select_upstream(&"edge-1:22".parse().unwrap(), &StreamKind::Tcp)
            .err();
        assert_eq!(refused.unwrap().detail, "edge-1 does not serve port 22");
    }

    #[test]
    fn a_gateway_lists_only_ports_that_the_owner_allows() {
        let policy = policy(json!({
            "ports": { "9100": { "target": "127.0.0.1:45123" } },
            "listed_ports": ["9000-9999", "10250"],
        }));
        let listed = AnnouncedPorts {
            http: vec![9051, 9100, 22],
            tcp: vec![10250, 10255],
        };
        let with = policy
            .clone()
            .with_announced(&listed, &LocalNode::default());
        assert_eq!(with.ports(), [9051, 9100, 10250]);
        assert_eq!(decide(&with, "edge-1:9051").unwrap(), "127.0.0.1:9051");
        assert_eq!(decide(&with, "edge-1:9100").unwrap(), "127.0.0.1:45123");
        assert_eq!(decide(&with, "127.0.0.1:9051").unwrap(), "127.0.0.1:9051");
        assert!(decide_as(&with, "edge-1:10250", &StreamKind::Tcp).is_ok());
        for target in ["edge-1:22", "edge-1:10255", "edge-1:10250", "127.0.0.1:22"] {
            assert_eq!(decide(&with, target), Err(RejectCode::Policy), "{target}");
        }
        let without = with.with_announced(&AnnouncedPorts::default(), &LocalNode::default());
        assert_eq!(without.ports(), [9100]);
    }

    fn listed(ports: &[u16]) -> AnnouncedPorts {
        AnnouncedPorts {
            http: ports.to_vec(),
            tcp: Vec::new(),
        }
    }

    fn at(address: &str) -> LocalNode {
        LocalNode {
            ports: vec![10266],
            addresses: vec![address.parse().unwrap()],
        }
    }

    #[test]
    fn a_listed_port_is_dialled_at_allowed_own_addresses() {
        let with = |hosts: &[&str]| {
            let policy = policy(json!({
                "listed_ports": ["9100"], "addresses": ["10.0.0.5"], "allow": { "hosts": hosts },
            }));
            policy.with_announced(&listed(&[9100]), &at("10.0.0.5"))
        };
        let own: SocketAddr = "10.0.0.5:9100".parse().unwrap();
        for (hosts, may) in [
            (vec!["127.0.0.0/8"], None),
            (vec!["127.0.0.0/8", "10.0.0.5"], Some(own)),
        ] {
            let policy = with(&hosts);
            let app = policy.select_upstream(&"edge-1:9100".parse().unwrap(), &StreamKind::Request);
            let app = app.unwrap();
            assert_eq!(app.fallback_addresses, [own.ip()]);
            assert_eq!(policy.permitted_address(&app, own), may);
        }
    }

    #[test]
    fn a_cluster_node_serves_listed_ports_on_its_own_addresses() {
        let listing = |more: serde_json::Value, ports: &[u16], own: LocalNode| {
            let mut config = json!({ "kubernetes": {}, "addresses": ["10.0.0.5"] });
            let all = config.as_object_mut().unwrap();
            all.extend(more.as_object().unwrap().clone());
            policy(config).with_announced(&listed(ports), &own)
        };
        let nothing = json!({});
        let with = listing(nothing.clone(), &[9051, 22], at("::ffff:192.168.1.7"));
        let app = with
            .select_upstream(&"edge-1:9051".parse().unwrap(), &StreamKind::Request)
            .unwrap();
        for (address, may) in [
            ("127.0.0.1:9051", true),
            ("10.0.0.5:9051", true),
            ("192.168.1.7:9051", true),
            ("192.168.1.8:9051", false),
            ("10.0.0.6:9051", false),
        ] {
            let address = address.parse().unwrap();
            assert_eq!(
                with.permitted_address(&app, address),
                may.then_some(address)
            );
        }
        // The node's own addresses only permit listed ports.
        let other = with.select_upstream(&"192.168.1.7:22".parse().unwrap(), &StreamKind::Tcp);
        assert_eq!(other.unwrap_err().code, RejectCode::Policy);
        for (more, serves) in [
            (json!({ "listed_ports": [] }), vec![]),
            (json!({ "listed_ports": ["9000-9999"] }), vec![9051]),
            (nothing.clone(), vec![22, 9051]),
        ] {
            let with = listing(more, &[9051, 22], at("192.168.1.7"));
            assert_eq!(with.ports(), serves);
        }
        // If loopback is not allowed, the node's own addresses are not allowed.
        let hosts = json!({ "allow": { "hosts": ["192.168.9.0/24"] } });
        let with = listing(hosts, &[9051], at("192.168.1.7"));
        let own = "192.168.1.7:9051".parse().unwrap();
        assert_eq!(with.permitted_address(&app, own), None);
        // A gateway on the same host is dialled from loopback, which adds no address.
        let with = listing(nothing, &[9051], at("127.0.0.1"));
        let app = with
            .select_upstream(&"edge-1:9051".parse().unwrap(), &StreamKind::Request)
            .unwrap();
        assert_eq!(
            app.fallback_addresses,
            ["10.0.0.5".parse::<IpAddr>().unwrap()]
        );
    }

    #[test]
    fn defaults_and_ranges_never_open_the_edges_admin_listener() {
        let serves = |config: serde_json::Value| {
            let with = policy(config).with_announced(&listed(&[10265, 10266]), &at("10.0.0.5"));
            with.ports()
        };
        for (config, ports) in [
            (json!({ "kubernetes": {} }), vec![10265]),
            (json!({ "listed_ports": ["10000-10999"] }), vec![10265]),
            (json!({ "listed_ports": ["10266"] }), vec![10266]),
            (
                json!({ "kubernetes": {}, "ports": { "10266": {} } }),
                vec![10265, 10266],
            ),
        ] {
            assert_eq!(serves(config.clone()), ports, "{config}");
        }
    }

    #[test]
    fn a_listed_port_is_local_and_plain_bytes_if_listed_twice() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let twice = AnnouncedPorts {
            http: all,
            tcp: vec![9443],
        };
        let with = policy(json!({ "kubernetes": {} })).with_announced(&twice, &at("10.0.0.5"));
        assert_eq!(
            with.ports().len(),
            65_534,
            "neither port 0 nor its own port"
        );
        assert_eq!(decide(&with, "edge-1:9051").unwrap(), "127.0.0.1:9051");
        assert_eq!(decide(&with, "edge-1:9443"), Err(RejectCode::Policy));
        assert!(decide_as(&with, "edge-1:9443", &StreamKind::Tcp).is_ok());
        let elsewhere = serde_json::from_value::<AnnouncedPorts>(json!({
            "http": [9051], "tcp": [], "host": "10.9.9.9", "https": [9443],
        }));
        let with = with.with_announced(&elsewhere.unwrap(), &LocalNode::default());
        assert_eq!(with.ports(), [9051]);
        assert_eq!(decide(&with, "edge-1:9051").unwrap(), "127.0.0.1:9051");
    }

    #[test]
    fn a_node_can_be_named_by_its_address() {
        let config = serde_json::from_value(json!({ "ports": { "9100": {} } })).unwrap();
        let policy = Policy::new("10.0.0.5", &config).unwrap();
        assert_eq!(decide(&policy, "10.0.0.5:9100").unwrap(), "127.0.0.1:9100");
        assert_eq!(decide(&policy, "10.0.0.5:22"), Err(RejectCode::Policy));
    }

    #[test]
    fn this_machine_is_no_way_around_the_list_of_ports() {
        let policy = policy(json!({ "ports": { "9100": { "target": "127.0.0.1:45123" } } }));
        assert_eq!(
            decide(&policy, "127.0.0.1:45123").unwrap(),
            "127.0.0.1:45123"
        );
        for target in [
            "127.0.0.1:22",
            "[::1]:22",
            "[::ffff:127.0.0.1]:22",
            "0.0.0.0:22",
            "127.9.9.9:45123",
        ] {
            assert_eq!(decide(&policy, target), Err(RejectCode::Policy), "{target}");
        }
        let name = policy
            .select_upstream(&"localhost:22".parse().unwrap(), &StreamKind::Tcp)
            .unwrap();
        assert_eq!(
            policy.permitted_address(&name, "127.0.0.1:22".parse().unwrap()),
            None
        );
    }

    #[test]
    fn own_addresses_in_an_allowed_network_open_only_the_list_of_ports() {
        let policy = policy(json!({
            "addresses": ["10.0.0.5"],
            "allow": { "hosts": ["10.0.0.0/24", "10.0.0.8", "::/0", "::1"] },
            "ports": { "9100": { "target": "10.0.0.6:9100" } },
            "services": {
                "plc": { "target": "plc.local:22", "scheme": "tcp" },
                "own": { "target": "10.0.0.6:22", "scheme": "tcp" },
            },
        }));
        let own = |ip| {
            ["10.0.0.6", "10.0.0.8"]
                .map(str::parse)
                .contains(&Ok(host_addresses::strip_nat64(ip)))
        };
        let policy = Policy {
            is_host_address: own,
            ..policy
        };
        let permits = |target: &str, address: &str| {
            let target: Target = target.parse().unwrap();
            let upstream = policy.select_upstream(&target, &StreamKind::Tcp);
            let address = address.parse().unwrap();
            upstream.is_ok_and(|upstream| policy.permitted_address(&upstream, address).is_some())
        };
        for (target, address, permitted) in [
            ("plc.edge-1:22", "10.0.0.7:22", true),
            ("plc.edge-1:22", "10.0.0.5:22", false),
            ("plc.edge-1:22", "10.0.0.6:22", false),
            ("any.local:22", "10.0.0.7:22", true),
            ("any.local:22", "10.0.0.5:22", false),
            ("any.local:22", "[::ffff:10.0.0.6]:22", false),
            ("any.local:22", "[64:ff9b::a00:6]:22", false),
            ("any.local:22", "[64:ff9b::a00:5]:22", false),
            ("any.local:22", "[64:ff9b::a00:7]:22", true),
            ("10.0.0.7:22", "10.0.0.7:22", true),
            ("10.0.0.6:22", "10.0.0.6:22", false),
            // The owner has written the address.
            ("10.0.0.8:22", "10.0.0.8:22", true),
            ("[::ffff:10.0.0.8]:22", "10.0.0.8:22", true),
            ("any.local:22", "10.0.0.8:22", false),
            ("[::1]:22", "[::1]:22", false),
            ("own.edge-1:22", "10.0.0.6:22", true),
            ("edge-1:9100", "10.0.0.6:9100", true),
        ] {
            assert_eq!(permits(target, address), permitted, "{target} {address}");
        }
    }

    #[test]
    fn other_hosts_need_the_allow_list_and_mapped_addresses_unmap() {
        let policy = policy(json!({ "allow": { "hosts": ["192.168.1.0/24", "printer.local"] } }));
        for target in ["192.168.1.7:554", "[::ffff:192.168.1.7]:554"] {
            assert!(decide(&policy, target).is_ok(), "{target}");
        }
        for target in [
            "192.168.2.7:554",
            "169.254.169.254:80",
            "[::ffff:10.0.0.1]:80",
        ] {
            assert_eq!(decide(&policy, target), Err(RejectCode::Policy), "{target}");
        }
        let away: SocketAddr = "10.9.9.9:631".parse().unwrap();
        let named = policy
            .select_upstream(&"printer.local:631".parse().unwrap(), &StreamKind::Tcp)
            .unwrap();
        assert_eq!(policy.permitted_address(&named, away), Some(away));
        let other = policy
            .select_upstream(&"evil.local:631".parse().unwrap(), &StreamKind::Tcp)
            .unwrap();
        assert_eq!(policy.permitted_address(&other, away), None);
        let mapped = policy.permitted_address(&other, "[::ffff:192.168.1.7]:631".parse().unwrap());
        assert_eq!(mapped, Some("192.168.1.7:631".parse().unwrap()));
    }

    fn policy_of_loopback() -> Policy {
        policy(json!({
            "allow": { "hosts": ["127.0.0.0/8", "plc.local"] },
            "services": {
                "plc": { "target": "plc.local:22", "scheme": "tcp" },
                "own": { "target": "127.0.0.1:22", "scheme": "tcp" },
            },
        }))
    }

    #[test]
    fn a_service_is_found_by_its_name_and_needs_an_allowed_address() {
        let policy = policy(json!({
            "allow": { "hosts": ["10.0.3.0/24"] },
            "services": {
                "printer": "10.0.3.7:631",
                "nvr": { "target": "nvr.local:554", "scheme": "tcp" },
            },
        }));
        for target in ["printer.edge-1:631", "printer.EDGE-1:631"] {
            let target: Target = target.parse().unwrap();
            let upstream = policy.select_upstream(&target, &StreamKind::Request);
            assert_eq!(upstream.unwrap().target.to_string(), "10.0.3.7:631");
        }
        let portless = Target::service("printer", "edge-1", None);
        let upstream = policy.select_upstream(&portless, &StreamKind::Tcp).unwrap();
        assert_eq!(upstream.target.to_string(), "10.0.3.7:631");
        let refused = |target: &Target, kind: &StreamKind| {
            let rejected = policy.select_upstream(target, kind).unwrap_err();
            (rejected.code, rejected.detail.into_owned())
        };
        let other_port = Target::service("printer", "edge-1", Some(632));
        assert_eq!(
            refused(&other_port, &StreamKind::Tcp),
            (
                RejectCode::Policy,
                "edge-1 serves printer at port 631 only, not at 632".to_owned()
            )
        );
        let unknown = Target::service("scanner", "edge-1", None);
        assert_eq!(
            refused(&unknown, &StreamKind::Request),
            (
                RejectCode::ServiceUnknown,
                "edge-1 has no service scanner".to_owned()
            )
        );
        let bytes_only = Target::service("nvr", "edge-1", None);
        let refusal = refused(&bytes_only, &StreamKind::Request);
        assert_eq!(refusal.0, RejectCode::Policy);
        let named = policy
            .select_upstream(&bytes_only, &StreamKind::Tcp)
            .unwrap();
        for (address, permitted) in [("10.0.3.9:554", true), ("127.0.0.1:554", false)] {
            let address: SocketAddr = address.parse().unwrap();
            let checked = policy.permitted_address(&named, address);
            assert_eq!(checked, permitted.then_some(address));
        }
        let to_named = policy_of_loopback();
        let plc = Target::service("plc", "edge-1", None);
        let plc = to_named.select_upstream(&plc, &StreamKind::Tcp).unwrap();
        let local: SocketAddr = "127.0.0.1:22".parse().unwrap();
        assert_eq!(to_named.permitted_address(&plc, local), None);
        let own = Target::service("own", "edge-1", None);
        let own = to_named.select_upstream(&own, &StreamKind::Tcp).unwrap();
        assert_eq!(to_named.permitted_address(&own, local), Some(local));
        // Only a service may lack the port.
        let node = Target::new("192.168.1.7", 0);
        assert_eq!(refused(&node, &StreamKind::Tcp).0, RejectCode::Malformed);
    }

    #[test]
    fn a_tcp_port_serves_bytes_only_and_upgrades_can_be_disabled() {
        let policy = policy(json!({
            "ports": { "22": { "scheme": "tcp" }, "80": {} },
            "allow": { "upgrades": false, "hosts": ["127.0.0.0/8"] },
        }));
        assert!(decide_as(&policy, "edge-1:22", &StreamKind::Tcp).is_ok());
        assert_eq!(decide(&policy, "edge-1:22"), Err(RejectCode::Policy));
        let upgrade = StreamKind::Upgrade("websocket".into());
        assert_eq!(
            decide_as(&policy, "edge-1:80", &upgrade),
            Err(RejectCode::Policy)
        );
        assert!(decide(&policy, "edge-1:80").is_ok());
    }
}
