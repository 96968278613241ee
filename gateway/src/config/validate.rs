//! Checks of a gateway's configuration that types cannot express.
//!
//! Every check adds to one list, so that a user sees all faults at once. The rule for listeners is that nothing is open by
//! default. A listener that cannot authenticate clients is a fault unless it has `anonymous: true`.

use std::{collections::HashSet, net::IpAddr};

use causeway_certs::NodeName;
use causeway_config::{ConfigError, ConfigErrors, ListenAddr, ListenAddrs, Validate, host_port};
use causeway_tunnel::{request_target::MAX_OVERFLOW_BYTES, wire};
use causeway_watch_cache::LabelSelector;
use ipnet::IpNet;

use super::{Config, ForwardingHeader, Listener, ListenerProtocol};

impl Validate for Config {
    fn validate(&self) -> Vec<ConfigError> {
        let mut faults = ConfigErrors::default();
        self.numbers(&mut faults);
        self.addresses(&mut faults);
        let of_a_cluster = self.kubernetes.is_some();
        if let Some(identity) = &self.tunnel.identity {
            identity.validate(of_a_cluster, &mut faults);
        }
        if let Some(dns) = &self.dns.0 {
            dns.validate(&self.listener_addresses(), &mut faults);
        }
        self.validate_kubernetes(&mut faults);
        if let Some(state) = &self.state {
            let kubernetes = self.kubernetes.as_ref();
            let secret = kubernetes.and_then(|rules| rules.state.as_ref());
            state.validate(secret.is_some(), &mut faults);
        }
        if let Some(peers) = &self.peers {
            peers.validate(&mut faults);
        }
        if let Some(api_cache) = &self.api_cache {
            api_cache.validate(of_a_cluster, &mut faults);
        }
        if let Some(egress) = &self.egress {
            let kubernetes = self.kubernetes.as_ref();
            let follows_pods = kubernetes.is_some_and(|kubernetes| kubernetes.pods.is_some());
            egress.validate(follows_pods, &mut faults);
        }
        let mut names = HashSet::new();
        for (index, listener) in self.listeners.iter().enumerate() {
            let path = format!("listeners[{index}]");
            if !names.insert(listener.name.as_str()) {
                let message = format!(
                    "the name \"{}\" is used by an earlier listener; each listener needs its own name",
                    listener.name
                );
                faults.add(format!("{path}.name"), message);
            }
            ListenerValidator {
                listener,
                path,
                faults: &mut faults,
            }
            .run();
        }
        if let Some(redirect) = &self.redirect {
            let networks = self.kubernetes.as_ref().map(|rules| &rules.pod_networks);
            let networks = networks.map(Vec::as_slice).unwrap_or_default();
            redirect.check(&self.listeners, networks, &mut faults);
        }
        self.check_reviews(&mut faults);
        for (port, app) in &self.upstream_tls {
            app.validate(*port, of_a_cluster, &mut faults);
        }
        faults.into_vec()
    }

    fn validate_files(&self) -> Vec<ConfigError> {
        let mut faults = ConfigErrors::default();
        if let Some(file) = &self.policy.0 {
            faults.check_file("policy", file);
        }
        if let Some(identity) = &self.tunnel.identity {
            for (key, file) in [("chain", &identity.chain), ("key", &identity.key)] {
                if let Some(file) = file {
                    faults.check_file(format!("tunnel.identity.{key}"), file);
                }
            }
            for (index, file) in identity.client_ca.iter().enumerate() {
                faults.check_file(format!("tunnel.identity.client_ca[{index}]"), file);
            }
        }
        if let Some(cluster) = &self.kubernetes
            && let Some(file) = &cluster.kubeconfig
        {
            faults.check_file("kubernetes.kubeconfig", file);
        }
        if let Some(state) = &self.state {
            state.validate_files(&mut faults);
        }
        for (index, file) in self
            .signer()
            .into_iter()
            .flat_map(|rules| &rules.client_ca)
            .enumerate()
        {
            faults.check_file(format!("kubernetes.certificates.client_ca[{index}]"), file);
        }
        if let Some(api_cache) = &self.api_cache
            && let Some(directory) = &api_cache.manifests
        {
            faults.check_directory("api_cache.manifests", directory);
        }
        faults.into_vec()
    }
}

impl Config {
    fn numbers(&self, faults: &mut ConfigErrors) {
        let tunnel = &self.tunnel;
        faults.check_not_zero(
            "tunnel",
            &[
                ("handshake_timeout", tunnel.handshake_timeout),
                ("hello_timeout", tunnel.hello_timeout),
                ("ping_after", tunnel.ping_after),
                ("ping_timeout", tunnel.ping_timeout),
                ("close_after", tunnel.close_after),
                (
                    "edge_certificate_lifetime",
                    tunnel.edge_certificate_lifetime,
                ),
            ],
        );
        let timeouts = &self.timeouts;
        faults.check_not_zero(
            "timeouts",
            &[
                ("tls", timeouts.tls),
                ("header", timeouts.header),
                ("connect", timeouts.connect),
                ("upgrade_first_byte", timeouts.upgrade_first_byte),
                ("upload", timeouts.upload),
                ("download", timeouts.download),
                ("idle_keepalive", timeouts.idle_keepalive),
                ("drain", timeouts.drain),
                ("authorize", timeouts.authorize),
            ],
        );
        faults.check_at_least_one(
            "tunnel",
            &[
                ("memory", tunnel.memory),
                ("max_handshakes", tunnel.max_handshakes),
                ("max_streams_per_tunnel", tunnel.max_streams_per_tunnel),
            ],
        );
        let replicas = tunnel.replicas;
        if replicas.is_some_and(|replicas| !(1..=wire::MAX_GATEWAYS_PER_EDGE).contains(&replicas)) {
            let message = format!(
                "must be from 1 to {}: the number of gateways to which each edge has tunnels",
                wire::MAX_GATEWAYS_PER_EDGE
            );
            faults.add("tunnel.replicas", message);
        }
        self.validate_limits(faults);
    }

    fn validate_limits(&self, faults: &mut ConfigErrors) {
        let limits = &self.limits;
        faults.check_at_least_one(
            "limits",
            &[
                ("streams", limits.streams),
                ("per_client", limits.per_client),
                ("per_node", limits.per_node),
                ("connections", limits.connections),
                ("buffered_bytes", limits.buffered_bytes),
                ("stalled", limits.stalled),
                ("max_uri_bytes", limits.max_uri_bytes),
                ("max_kubernetes_uri_bytes", limits.max_kubernetes_uri_bytes),
                ("max_header_bytes", limits.max_header_bytes),
                ("max_headers", limits.max_headers),
            ],
        );
        for (key, bytes) in [
            ("max_uri_bytes", limits.max_uri_bytes),
            ("max_kubernetes_uri_bytes", limits.max_kubernetes_uri_bytes),
        ] {
            if bytes > MAX_OVERFLOW_BYTES {
                let message = format!(
                    "must be at most {MAX_OVERFLOW_BYTES}, the maximum size of a request target in bytes"
                );
                faults.add(format!("limits.{key}"), message);
            }
        }
    }

    fn addresses(&self, faults: &mut ConfigErrors) {
        let mut listeners = ListenAddrs::default();
        listeners.add("tunnel.listen", "tunnel.listen", self.tunnel.listen, faults);
        listeners.add("admin.listen", "admin.listen", self.admin.listen, faults);
        if let Some(listen) = &self.admin.metrics_listen {
            let path = "admin.metrics_listen";
            listeners.add(path, path, listen.clone(), faults);
        }
        if let Some(dns) = &self.dns.0 {
            listeners.add("dns.listen", "dns.listen", dns.listen, faults);
        }
        for (index, listener) in self.listeners.iter().enumerate() {
            let path = format!("listeners[{index}].listen");
            let name = format!("listener \"{}\"", listener.name);
            listeners.add(&path, &name, listener.listen.clone(), faults);
        }
        let lists = [
            ("advertise", &self.tunnel.advertise),
            ("gateways", &self.tunnel.gateways),
        ];
        for (index, node) in self.tunnel.revoked.iter().enumerate() {
            if let Err(error) = NodeName::parse(node) {
                faults.add(format!("tunnel.revoked[{index}]"), error.to_string());
            }
        }
        for (key, list) in lists {
            for (index, text) in list.iter().enumerate() {
                if let Err(message) = host_port(text) {
                    faults.add(format!("tunnel.{key}[{index}]"), message);
                }
            }
        }
    }
}

/// Fault of a key that changes request fields, on a listener that does not parse requests.
const NOT_READ: &str =
    "this listener does not parse what it forwards, so it can add nothing; remove this key";

const PASSTHROUGH_CLIENTS: &str = "the clients of a passthrough listener authenticate at the upstream, not at the gateway; set anonymous: true, \
     and say by anonymous_from and by the access policy which networks may reach which nodes";

/// Checks of one listener.
struct ListenerValidator<'a> {
    listener: &'a Listener,
    path: String,
    faults: &'a mut ConfigErrors,
}

impl ListenerValidator<'_> {
    fn run(mut self) {
        self.target();
        self.proxied();
        self.check_plaintext();
        self.files();
        self.check_clients();
        self.check_issuers();
        self.check_identity_headers();
        self.forwarding_headers();
        self.check_anonymous();
    }

    fn add(&mut self, key: &str, message: impl Into<String>) {
        self.faults.add(format!("{}.{key}", self.path), message);
    }

    /// Adds a fault that a missing key causes; its path is the listener itself.
    fn missing(&mut self, message: impl Into<String>) {
        self.faults.add(self.path.as_str(), message);
    }

    fn target(&mut self) {
        let listener = self.listener;
        if listener.name.is_empty() {
            self.add("name", "is empty; set a name for logs and metrics");
        }
        if let Some(node) = &listener.node
            && let Err(error) = NodeName::parse(node)
        {
            self.add("node", error.to_string());
        }
        if listener.port == Some(0) {
            self.add(
                "port",
                "0 is not a valid node port; use a port from 1 to 65535",
            );
        }
        self.check_node_set();
        if listener.protocol == ListenerProtocol::Tcp && !listener.original_destination {
            for (keys, absent) in [
                (
                    "\"node\" (or \"nodes\", \"pool\" or \"node_selector\")",
                    listener.node_keys().is_empty(),
                ),
                ("\"port\"", listener.port.is_none()),
            ] {
                if absent {
                    self.missing(format!(
                        "a tcp listener needs {keys}, because a plain TCP connection does not name its target"
                    ));
                }
            }
        }
        if listener.protocol == ListenerProtocol::Passthrough {
            self.check_passthrough();
        }
        if listener.protocol != ListenerProtocol::Connect && !listener.node_list {
            self.add(
                "node_list",
                "only connect listeners have lists of nodes; remove the key",
            );
        }
        if listener.protocol != ListenerProtocol::Connect && !listener.direct_networks.is_empty() {
            self.add(
                "direct_networks",
                "only a connect listener dials targets itself; remove this key",
            );
        }
        if listener.original_destination && matches!(listener.listen, ListenAddr::Unix(_)) {
            self.add(
                "original_destination",
                "a Unix socket has no original destination; remove this key or listen on IP:PORT",
            );
        }
    }

    /// Checks the keys of a listener whose TLS ends at the upstream.
    fn check_passthrough(&mut self) {
        let listener = self.listener;
        if listener.port.is_none() && !listener.original_destination {
            self.missing(
                "a passthrough listener needs \"port\", because a server name contains no port",
            );
        }
        if !listener.names.is_empty() {
            self.add(
                "names",
                "the upstream presents its own certificate; remove this key",
            );
        }
        if matches!(listener.listen, ListenAddr::Unix(_)) && !listener.anonymous {
            self.missing(PASSTHROUGH_CLIENTS);
        }
    }

    /// Checks the keys for a set of nodes.
    fn check_node_set(&mut self) {
        let listener = self.listener;
        if let [first, others @ ..] = &*listener.node_keys() {
            for key in others {
                self.add(
                    key,
                    format!("\"{first}\" already says which nodes this listener serves; keep one of the two"),
                );
            }
            let is_named_by_clients = matches!(
                listener.protocol,
                ListenerProtocol::Connect | ListenerProtocol::Passthrough
            );
            if *first != "node" && is_named_by_clients {
                let protocol = listener.protocol.as_str();
                let message =
                    format!("the clients of a {protocol} listener name the node; remove this key");
                self.add(first, message);
            } else if *first != "node" {
                self.check_set_destination(first);
            }
        }
        if let Some(nodes) = &listener.nodes {
            if nodes.is_empty() {
                self.add("nodes", "is empty; name at least one node");
            }
            for (index, node) in nodes.iter().enumerate() {
                if let Err(error) = NodeName::parse(node) {
                    self.add(&format!("nodes[{index}]"), error.to_string());
                }
            }
        }
        if listener.pool.as_deref().is_some_and(str::is_empty) {
            self.add("pool", "is empty; name a node pool");
        }
        match listener.node_selector.as_deref().map(LabelSelector::parse) {
            Some(Ok(selector)) if selector.is_empty() => {
                self.add("node_selector", "is empty; name at least one label");
            }
            Some(Err(why)) => self.add("node_selector", why),
            Some(Ok(_)) | None => {}
        }
    }

    /// Checks that a listener for a set of nodes has one node port, whose health decides.
    fn check_set_destination(&mut self, key: &str) {
        if self.listener.original_destination {
            self.add(
                key,
                "the original destination already names the node; remove one of the two",
            );
        }
        if self.listener.protocol == ListenerProtocol::Http && self.listener.port.is_none() {
            self.missing(format!("a listener with \"{key}\" needs \"port\""));
        }
    }

    fn proxied(&mut self) {
        if self.listener.proxy_protocol.is_empty() {
            return;
        }
        if matches!(self.listener.listen, ListenAddr::Unix(_)) {
            self.add(
                "proxy_protocol",
                "clients of a Unix socket have no IP address; remove this key",
            );
        }
    }

    /// Checks that credentials without TLS stay in private networks.
    fn check_plaintext(&mut self) {
        let networks = &self.listener.plaintext_networks;
        if networks.is_empty() {
            return;
        }
        for (index, network) in networks.iter().enumerate() {
            if !is_private(network) {
                let message = format!(
                    "{network} is no private network; without TLS, only loopback, private (RFC 1918), unique local and link-local networks are served"
                );
                self.add(&format!("plaintext_networks[{index}]"), message);
            }
        }
        match (self.listener.protocol, &self.listener.listen) {
            (ListenerProtocol::Connect, ListenAddr::Tcp(listen)) => {
                if !networks
                    .iter()
                    .any(|network| network.contains(&listen.ip()))
                {
                    let message = format!(
                        "{} is in none of the networks in plaintext_networks, so other clients could connect without TLS; use an address of one of them",
                        listen.ip()
                    );
                    self.add("listen", message);
                }
            }
            (ListenerProtocol::Connect, ListenAddr::Unix(_)) => {
                let message = "clients of a Unix socket have no IP address; remove this key";
                self.add("plaintext_networks", message);
            }
            _ => self.add(
                "plaintext_networks",
                "only a connect listener has this key; remove it",
            ),
        }
    }

    fn forwarding_headers(&mut self) {
        let listener = self.listener;
        if listener.protocol.is_opaque() {
            if listener.forwarding_headers != ForwardingHeader::all() {
                self.add("forwarding_headers", NOT_READ);
            }
            if !listener.trusted_proxies.is_empty() {
                self.add("trusted_proxies", NOT_READ);
            }
        } else if matches!(listener.listen, ListenAddr::Unix(_))
            && !listener.trusted_proxies.is_empty()
        {
            self.add(
                "trusted_proxies",
                "clients of a Unix socket have no IP address; remove this key",
            );
        }
    }

    fn files(&mut self) {
        let listener = self.listener;
        if let Some(certificate) = &listener.certificate {
            if listener.has_tls() {
                self.faults.check_file(
                    format!("{}.certificate.chain", self.path),
                    &certificate.chain,
                );
                self.faults
                    .check_file(format!("{}.certificate.key", self.path), &certificate.key);
            } else {
                let message = format!("{} is served without TLS; remove this key", self.location());
                self.add("certificate", message);
            }
        }
        for (index, file) in listener.client_auth.client_ca.iter().enumerate() {
            self.faults.check_file(
                format!("{}.client_auth.client_ca[{index}]", self.path),
                file,
            );
        }
        if let Some(file) = &listener.client_auth.tokens {
            self.faults
                .check_file(format!("{}.client_auth.tokens", self.path), file);
        }
    }

    fn location(&self) -> String {
        match self.listener.listen {
            ListenAddr::Unix(_) => "a unix socket".into(),
            ListenAddr::Tcp(_) if self.listener.protocol == ListenerProtocol::Tcp => {
                "an anonymous tcp listener".into()
            }
            ListenAddr::Tcp(_) if self.listener.protocol == ListenerProtocol::Connect => {
                "a connect listener with plaintext_networks".into()
            }
            ListenAddr::Tcp(_) => format!("protocol {}", self.listener.protocol.as_str()),
        }
    }

    fn check_clients(&mut self) {
        let listener = self.listener;
        let accepts_certificates =
            listener.client_auth.own_ca || !listener.client_auth.client_ca.is_empty();
        if !listener.has_tls() && !listener.client_auth.client_ca.is_empty() {
            let message = format!(
                "{} is served without TLS, so clients cannot show a certificate; use client_auth.tokens or client_auth.jwt",
                self.location()
            );
            self.add("client_auth.client_ca", message);
        }
        if listener.protocol.is_opaque() && listener.client_auth.tokens.is_some() {
            self.add(
                "client_auth.tokens",
                "a plain TCP connection cannot carry a token; use client_auth.client_ca",
            );
        }
        let accepts_tokens = listener.client_auth.accepts_bearer_tokens();
        let known = (listener.has_tls() && accepts_certificates)
            || (!listener.protocol.is_opaque() && accepts_tokens)
            // The mode of the socket (0600) admits only its owner.
            || matches!(listener.listen, ListenAddr::Unix(_));
        if !known && !listener.anonymous {
            let remedy = match listener.protocol {
                ListenerProtocol::Http => "set client_auth.tokens or client_auth.jwt",
                ListenerProtocol::Connect if !listener.has_tls() => {
                    "set client_auth.tokens or client_auth.jwt"
                }
                ListenerProtocol::Tcp => "set client_auth.own_ca: true or client_auth.client_ca",
                ListenerProtocol::Passthrough => return self.missing(PASSTHROUGH_CLIENTS),
                ListenerProtocol::Https | ListenerProtocol::Connect => {
                    "set client_auth.own_ca: true, client_auth.client_ca, client_auth.tokens or client_auth.jwt"
                }
            };
            self.missing(format!(
                "listener \"{}\" has no method to authenticate clients, so it would refuse all of them; {remedy}, or set \
                 anonymous: true to serve every client",
                listener.name
            ));
        }
    }

    fn check_anonymous(&mut self) {
        let listener = self.listener;
        for (key, given) in [
            ("anonymous_from", !listener.anonymous_from.is_empty()),
            ("anonymous_ports", !listener.anonymous_ports.is_empty()),
        ] {
            if given && !listener.anonymous {
                self.add(key, "restricts anonymous: true, which this listener does not have; add anonymous: true or remove this key");
            }
        }
        if let Some(index) = listener.anonymous_ports.iter().position(|port| *port == 0) {
            self.add(
                &format!("anonymous_ports[{index}]"),
                "0 is not a valid node port; use a port from 1 to 65535",
            );
        }
        if !listener.anonymous_from.is_empty() && matches!(listener.listen, ListenAddr::Unix(_)) {
            self.add(
                "anonymous_from",
                "clients of a Unix socket have no IP address; remove this key",
            );
        }
    }
}

/// Whether all addresses of a network are loopback, private, unique local or link-local.
fn is_private(network: &IpNet) -> bool {
    let (first, last) = (network.network(), network.broadcast());
    let is_private = |address: IpAddr| match address {
        IpAddr::V4(address) => {
            address.is_loopback() || address.is_private() || address.is_link_local()
        }
        IpAddr::V6(address) => {
            address.is_loopback() || address.is_unique_local() || address.is_unicast_link_local()
        }
    };
    // Each of these ranges is a prefix, and no two of them are neighbours.
    is_private(first) && is_private(last)
}

mod jwt;
mod kubernetes;

#[cfg(test)]
mod tests;
