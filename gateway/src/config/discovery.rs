//! Completes a configuration with data that the gateway discovers at run time: paths of requested certificates, and the addresses
//! and node ports that the cluster lists.

use std::collections::{BTreeMap, BTreeSet};

use causeway_certs::{Requested, Store};
use causeway_config::{ConfigError, ConfigErrors, ListenAddr, Validate};
use causeway_tunnel::control_stream::AnnouncedPorts;

use super::{Config, DiscoveredEndpoints, Listener, ListenerProtocol, NodePorts};

impl Config {
    /// Returns this configuration with the paths at which the gateway stores requested certificates.
    #[must_use]
    pub fn with_certificate_paths(mut self) -> Self {
        if let Some(identity) = &mut self.tunnel.identity
            && identity.signer.is_some()
        {
            let path = Store::issued_certificate_path(&self.data_dir, Requested::Identity);
            (identity.chain, identity.key) = (Some(path.clone()), Some(path));
        }
        for (port, app) in &mut self.upstream_tls {
            if app.signer.is_some() {
                let path =
                    Store::issued_certificate_path(&self.data_dir, Requested::AppClient(*port));
                (app.certificate, app.key) = (Some(path.clone()), Some(path));
            }
        }
        self
    }

    /// Returns this configuration without the paths that [`Config::with_certificate_paths`] has added.
    fn without_stored_paths(mut self) -> Self {
        if let Some(identity) = &mut self.tunnel.identity
            && identity.signer.is_some()
        {
            (identity.chain, identity.key) = (None, None);
        }
        for app in self.upstream_tls.values_mut() {
            if app.signer.is_some() {
                (app.certificate, app.key) = (None, None);
            }
        }
        self
    }

    /// Returns this configuration with the endpoints that the cluster provides.
    #[must_use]
    pub fn with_endpoints(mut self, endpoints: &DiscoveredEndpoints) -> Self {
        let rules = self.kubernetes.as_ref();
        if rules.is_some_and(|rules| rules.advertise.is_some()) {
            let own = std::mem::take(&mut self.tunnel.advertise);
            let all = &mut self.tunnel.advertise;
            for each in endpoints.addresses.iter().cloned().chain(own) {
                if !all.contains(&each) {
                    all.push(each);
                }
            }
            // A number that the user sets explicitly is intended.
            self.tunnel.replicas = self.tunnel.replicas.or(endpoints.replicas);
        }
        self
    }

    /// Returns this configuration with these listed node ports.
    ///
    /// # Errors
    /// All faults of the resulting configuration.
    pub fn with_listed_ports(mut self, listed: &NodePorts) -> Result<Self, Vec<ConfigError>> {
        let rules = self.kubernetes.as_ref();
        let Some(rules) = rules.and_then(|rules| rules.ports.clone()) else {
            return Ok(self);
        };
        let mut faults = ConfigErrors::default();
        let each = listed.http.intersection(&listed.https);
        for port in each {
            faults.add(port.to_string(), "is listed both as http and as https");
        }
        for (key, kind, ports) in [
            ("https", ListenerProtocol::Https, &listed.https),
            ("http", ListenerProtocol::Http, &listed.http),
        ] {
            let mut named = rules.listeners();
            let named = named.find(|(_, each, _)| *each == kind);
            let listener = named.and_then(|(_, _, name)| {
                let mut listeners = self.listeners.iter();
                listeners.find(|listener| listener.name == name).cloned()
            });
            match listener {
                Some(listener) => self.add_listeners(&listener, ports, &mut faults),
                None if ports.is_empty() || rules.listeners().next().is_none() => {}
                None => faults.add(
                    format!("{key}-proxy-ports"),
                    format!(
                        "this gateway has no listener for these ports; name one in kubernetes.ports.{key}"
                    ),
                ),
            }
        }
        let announced = self.announced_ports(listed);
        let count = announced.http.len() + announced.tcp.len();
        if count > AnnouncedPorts::MAX_PORTS {
            let most = AnnouncedPorts::MAX_PORTS;
            let message = format!(
                "with all others, {count} ports are listed, but edges accept at most {most}"
            );
            faults.add("localhost-proxy-ports", message);
        }
        self.announced_ports = Some(announced);
        let mut faults = faults.into_vec();
        if faults.is_empty() {
            faults = self.clone().without_stored_paths().validate();
        }
        if faults.is_empty() {
            Ok(self)
        } else {
            Err(faults)
        }
    }

    /// Returns the announcement of these ports to edges.
    fn announced_ports(&self, listed: &NodePorts) -> AnnouncedPorts {
        let http = listed.http.union(&listed.loopback);
        let tcp = listed.https.iter().chain(self.upstream_tls.keys());
        AnnouncedPorts {
            http: http.copied().collect(),
            tcp: tcp.copied().collect(),
        }
    }

    /// Adds a listener for each of these ports, with `listener` as the template.
    fn add_listeners(
        &mut self,
        listener: &Listener,
        ports: &BTreeSet<u16>,
        faults: &mut ConfigErrors,
    ) {
        let configured: BTreeMap<u16, &Listener> = match &self.redirect {
            Some(redirect) if listener.original_destination => redirect.by_port(&self.listeners),
            _ => {
                let all = self
                    .listeners
                    .iter()
                    .filter(|each| !each.original_destination);
                all.filter_map(|each| Some((each.node_port()?, each)))
                    .collect()
            }
        };
        let unserved: Vec<u16> = ports
            .iter()
            .filter(|port| !configured.contains_key(port))
            .copied()
            .collect();
        let upstream_tls = listener
            .node_port()
            .and_then(|port| self.upstream_tls.get(&port))
            .cloned();
        for port in unserved {
            if listener.protocol == ListenerProtocol::Https
                && !self.upstream_tls.contains_key(&port)
            {
                let Some(app) = &upstream_tls else {
                    let message = format!(
                        "upstream_tls has no key for this port, which the listener \"{}\" would serve; add the port to upstream_tls",
                        listener.name
                    );
                    faults.add(format!("https-proxy-ports {port}"), message);
                    continue;
                };
                self.upstream_tls.insert(port, app.clone());
            }
            if let (true, Some(redirect)) = (listener.original_destination, &mut self.redirect) {
                redirect.ports.insert(port, listener.name.clone());
                let shared = self.listeners.iter_mut();
                for shared in shared.filter(|each| each.name == listener.name) {
                    if !shared.anonymous_ports.is_empty() {
                        shared.anonymous_ports.push(port);
                    }
                }
                continue;
            }
            let mut port_listener = listener.clone();
            port_listener.name = format!("{}-{port}", listener.name);
            port_listener.port = Some(port);
            port_listener.original_destination = false;
            if let ListenAddr::Tcp(address) = &mut port_listener.listen {
                address.set_port(port);
            }
            // The user opened this listener to anonymous clients for some ports. The listed ports are included, here and above.
            if !port_listener.anonymous_ports.is_empty() {
                port_listener.anonymous_ports = vec![port];
            }
            self.listeners.push(port_listener);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config(more: &serde_json::Value) -> Config {
        let mut config = json!({
            "kubernetes": { "ports": { "http": "plain", "https": "kubelets" } },
            "upstream_tls": { "10250": { "verify": false } },
            "listeners": [
                { "name": "plain", "protocol": "http", "listen": "127.0.0.1:10264", "port": 10255,
                  "anonymous": true, "anonymous_ports": [10255] },
                { "name": "kubelets", "protocol": "https", "listen": "0.0.0.0:10263" },
            ],
        });
        let more = more.as_object().unwrap().clone();
        config.as_object_mut().unwrap().extend(more);
        serde_json::from_value(config).unwrap()
    }

    fn advertised(advertise: &serde_json::Value) -> Config {
        let config = json!({
            "kubernetes": { "advertise": advertise },
            "tunnel": { "advertise": ["gw.example.com:10262"] },
        });
        serde_json::from_value(config).unwrap()
    }

    fn listed(http: &[u16], https: &[u16]) -> NodePorts {
        NodePorts {
            http: http.iter().copied().collect(),
            https: https.iter().copied().collect(),
            loopback: [10267].into(),
        }
    }

    fn said(faults: &[ConfigError]) -> String {
        let said: Vec<_> = faults.iter().map(ToString::to_string).collect();
        said.join("\n")
    }

    #[test]
    fn service_addresses_precede_configured_ones_without_duplicates() {
        let found = DiscoveredEndpoints {
            addresses: ["192.0.2.1:10262", "gw.example.com:10262"]
                .map(str::to_owned)
                .to_vec(),
            replicas: Some(3),
        };
        let with = advertised(&json!({})).with_endpoints(&found);
        assert_eq!(with.tunnel.advertise, found.addresses);
        assert_eq!(with.tunnel.replicas, Some(3));
        let without = advertised(&json!(null)).with_endpoints(&found);
        assert_eq!(without.tunnel.advertise, found.addresses[1..]);
        assert_eq!(without.tunnel.replicas, None);
        let mut own = advertised(&json!({}));
        own.tunnel.replicas = Some(2);
        assert_eq!(own.with_endpoints(&found).tunnel.replicas, Some(2));
    }

    #[test]
    fn a_listed_port_is_as_its_listener_with_a_listener_of_its_own() {
        let config = config(&json!({}))
            .with_listed_ports(&listed(&[9051, 10255], &[9443]))
            .unwrap();
        let listener = |name: &str| {
            config
                .listeners
                .iter()
                .find(|listener| listener.name == name)
        };
        let plain = listener("plain-9051").unwrap();
        assert_eq!(plain.listen.to_string(), "127.0.0.1:9051");
        assert_eq!(
            (plain.port, &plain.anonymous_ports),
            (Some(9051), &vec![9051])
        );
        let tls = listener("kubelets-9443").unwrap();
        assert_eq!(tls.listen.to_string(), "0.0.0.0:9443");
        assert_eq!(config.upstream_tls[&9443], config.upstream_tls[&10250]);
        assert_eq!(config.listeners.len(), 4, "10255 is there by hand");
        let told = config.announced_ports.unwrap();
        assert_eq!(
            (told.http, told.tcp),
            (vec![9051, 10255, 10267], vec![9443, 9443, 10250])
        );
    }

    #[test]
    fn ports_are_listed_beside_a_certificate_of_a_signer() {
        let config = config(&json!({
            "upstream_tls": { "10250": { "verify": false, "signer": "kubernetes.io/kube-apiserver-client" } },
        }));
        let config = config
            .with_certificate_paths()
            .with_listed_ports(&listed(&[9051], &[9443]));
        let apps = config.unwrap().upstream_tls;
        assert!(apps[&10250].certificate.is_some());
        assert_eq!(apps[&9443], apps[&10250]);
    }

    #[test]
    fn a_listener_with_original_destinations_gets_redirected_ports() {
        let config = config(&json!({
            "redirect": { "listeners": ["kubelets"] },
            "listeners": [{ "name": "kubelets", "protocol": "https", "listen": "0.0.0.0:10263", "original_destination": true }],
            "kubernetes": { "ports": { "https": "kubelets" } },
        }));
        let config = config.with_listed_ports(&listed(&[], &[9443])).unwrap();
        assert_eq!(config.listeners.len(), 1);
        assert_eq!(config.redirect.unwrap().ports[&9443], "kubelets");
        let config = self::config(&json!({
            "redirect": { "listeners": ["any"] },
            "listeners": [{ "name": "any", "protocol": "http", "listen": "0.0.0.0:10264", "port": 10255,
                         "original_destination": true, "anonymous": true, "anonymous_ports": [10255] }],
            "kubernetes": { "ports": { "http": "any" } },
        }));
        let config = config.with_listed_ports(&listed(&[9051], &[])).unwrap();
        assert_eq!(config.listeners[0].anonymous_ports, [10255, 9051]);
    }

    #[test]
    fn connect_listeners_alone_send_ports_to_edges_without_sockets() {
        let config = config(&json!({
            "kubernetes": { "ports": {} },
            "listeners": [{ "name": "api", "protocol": "connect", "listen": "unix:/run/it.sock" }],
        }));
        assert_eq!(said(&config.validate()), "");
        let config = config.with_listed_ports(&listed(&[9051], &[9443])).unwrap();
        assert_eq!(config.listeners.len(), 1);
        assert_eq!(config.announced_ports.unwrap().http, [9051, 10267]);
    }

    #[test]
    fn unsupported_ports_are_named() {
        let both = config(&json!({})).with_listed_ports(&listed(&[9443], &[9443]));
        assert!(said(&both.unwrap_err()).contains("9443: is listed both as http and as https"));
        let alone = json!({ "kubernetes": { "ports": { "https": "kubelets" } } });
        let alone = config(&alone).with_listed_ports(&listed(&[9051], &[]));
        assert!(said(&alone.unwrap_err()).contains("kubernetes.ports.http"));
        let crowd = NodePorts {
            loopback: (1..=u16::MAX).collect(),
            ..NodePorts::default()
        };
        let crowd = config(&json!({})).with_listed_ports(&crowd);
        assert!(
            said(&crowd.unwrap_err())
                .contains("65536 ports are listed, but edges accept at most 4096")
        );
        let bare = config(&json!({ "upstream_tls": {} })).with_listed_ports(&listed(&[], &[9443]));
        assert!(said(&bare.unwrap_err()).contains("upstream_tls has no key"));
        for (ports, says) in [
            (json!({}), "lists ports but no listener"),
            (
                json!({ "http": "kubelets" }),
                "does not have the protocol http",
            ),
            (json!({ "http": "nobody" }), "there is no listener"),
            (
                json!({ "http": "plain", "service": "A b" }),
                "not a valid object name",
            ),
        ] {
            let config = config(&json!({ "kubernetes": { "ports": ports } }));
            let said = said(&config.validate());
            assert!(said.contains(says), "{said}");
        }
    }
}
