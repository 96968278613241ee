//! Egress: listeners on this node that lead to the cloud or to other nodes.

use causeway_config::{ConfigErrors, SocketAddrStr};
use causeway_tunnel::{Target, target};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// Port in a request for a destination that has a name and a port at the gateway.
const DEFAULT_PORT: u16 = 443;

/// Listeners on this node that lead to the cloud or to other nodes, through a connection to a gateway. The gateway's `egress.rules` must allow each destination.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Egress {
    /// Listeners with one destination each.
    pub listeners: Vec<EgressListener>,
    /// Proxy for any destination; disabled if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy: Option<EgressProxy>,
    /// Maximum number of open connections to these listeners together. Each listener has an equal share, at least 1, so that the programs of one never take the connections of another.
    pub max_connections: usize,
}

/// Listener with one destination.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EgressListener {
    /// Address at which programs connect. Every program that can reach it can reach the destination, so it is never a wildcard: loopback for programs of this node, an address of a bridge for its pods.
    #[serde(with = "SocketAddrStr")]
    pub listen: SocketAddr,
    /// Destination: a key of the gateway's `egress.destinations` without a port, or `host:port`. The gateway resolves the name of a host. A host that is the name of another node leads to that node.
    pub to: String,
}

/// Proxy for HTTP and SOCKS5.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EgressProxy {
    /// Address at which programs connect, for HTTP (CONNECT, and requests for `http://…`) and SOCKS5 alike. The proxy has no passwords, so the address is never a wildcard. The gateway resolves names (`socks5h`).
    #[serde(with = "SocketAddrStr")]
    pub listen: SocketAddr,
}

impl Default for Egress {
    fn default() -> Self {
        Self {
            listeners: Vec::new(),
            proxy: None,
            // The same as the default limit of the gateway.
            max_connections: 1024,
        }
    }
}

impl EgressListener {
    /// Returns the destination, as the edge asks the gateway for it.
    pub(crate) fn target(&self) -> Result<Target, String> {
        let (host, port) = target::split_host_port(&self.to).map_err(|error| error.to_string())?;
        Ok(Target::new(host, port.unwrap_or(DEFAULT_PORT)))
    }
}

impl Egress {
    /// Returns the listen addresses, with the paths of their keys.
    fn listen_addresses(&self) -> impl Iterator<Item = (String, SocketAddr)> {
        let fixed = self.listeners.iter().enumerate();
        let fixed =
            fixed.map(|(index, each)| (format!("egress.listeners[{index}].listen"), each.listen));
        let proxy = self.proxy.iter();
        fixed.chain(proxy.map(|proxy| ("egress.proxy.listen".to_owned(), proxy.listen)))
    }
}

impl Egress {
    /// Checks these keys. `admin` is the address of the admin listener.
    pub(super) fn validate(&self, admin: SocketAddr, errors: &mut ConfigErrors) {
        if self.listeners.is_empty() && self.proxy.is_none() {
            let message = "opens no listener; add listeners or proxy, or remove the key";
            errors.add("egress", message);
        }
        errors.check_at_least_one("egress", &[("max_connections", self.max_connections)]);
        for (index, listener) in self.listeners.iter().enumerate() {
            if let Err(why) = listener.target() {
                let message = format!(
                    "\"{}\" is not a destination; write host:port, or a key of the gateway's egress.destinations ({why})",
                    listener.to
                );
                errors.add(format!("egress.listeners[{index}].to"), message);
            }
        }
        let mut earlier: Vec<(String, SocketAddr)> = vec![("admin.listen".to_owned(), admin)];
        for (path, address) in self.listen_addresses() {
            let ip = address.ip().to_canonical();
            if ip.is_unspecified() || ip.is_multicast() {
                let message = format!(
                    "{address} would let every machine of the site use this node's connection, and there is no authentication; write 127.0.0.1:{port}, or an address of a bridge for pods",
                    port = address.port()
                );
                errors.add(path.clone(), message);
            }
            if is_link_local_without_scope(address) {
                let message = format!(
                    "{address} is a link-local address, which cannot be bound without its interface; add the index of the interface, such as [{ip}%2]:{port}, or write another address",
                    port = address.port()
                );
                errors.add(path.clone(), message);
            }
            let same = |other: &&(String, SocketAddr)| address.port() != 0 && other.1 == address;
            if let Some((other, _)) = earlier.iter().find(same) {
                let message = format!("{other} has the same address {address}; use another port");
                errors.add_against(path.clone(), other, message);
            }
            earlier.push((path, address));
        }
    }
}

/// Whether the address cannot be bound, because it exists on every interface (RFC 4007 §6).
fn is_link_local_without_scope(address: SocketAddr) -> bool {
    matches!(address, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() && v6.scope_id() == 0)
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use causeway_config::Validate;
    use serde_json::{Value, json};

    fn faults(egress: &Value) -> Vec<String> {
        let config: Config = serde_json::from_value(json!({ "egress": egress })).unwrap();
        let faults = config.validate().into_iter();
        faults.map(|fault| fault.to_string()).collect()
    }

    #[test]
    fn egress_listeners_are_no_wildcards_and_have_a_destination() {
        let good = json!({
            "listeners": [
                { "listen": "127.0.0.1:6443", "to": "kube-apiserver" },
                { "listen": "169.254.20.11:443", "to": "registry.example:443" },
                { "listen": "[fe80::1%2]:443", "to": "[2001:db8::1]:443" },
            ],
            "proxy": { "listen": "10.244.1.1:1080" },
        });
        assert_eq!(faults(&good), Vec::<String>::new());
        for (listen, to, fault) in [
            (
                "0.0.0.0:6443",
                "a:1",
                "egress.listeners[0].listen: 0.0.0.0:6443 would let",
            ),
            (
                "[::]:6443",
                "a:1",
                "egress.listeners[0].listen: [::]:6443 would let",
            ),
            ("[::ffff:0.0.0.0]:6443", "a:1", "would let"),
            ("[fe80::1]:443", "a:1", "is a link-local address"),
            (
                "127.0.0.1:6443",
                "a b:1",
                "egress.listeners[0].to: \"a b:1\" is not",
            ),
            (
                "127.0.0.1:6443",
                "a:0",
                "egress.listeners[0].to: \"a:0\" is not",
            ),
            (
                "127.0.0.1:10266",
                "a:1",
                "admin.listen has the same address",
            ),
        ] {
            let found = faults(&json!({ "listeners": [{ "listen": listen, "to": to }] }));
            assert!(found.len() == 1 && found[0].contains(fault), "{found:#?}");
        }
        let twice = json!({
            "listeners": [{ "listen": "127.0.0.1:1080", "to": "a:1" }],
            "proxy": { "listen": "127.0.0.1:1080" },
        });
        assert!(faults(&twice)[0].starts_with("egress.proxy.listen"));
        assert!(faults(&json!({}))[0].starts_with("egress: opens no listener"));
    }
}
