//! Ports and hosts that a gateway may reach through a node. The node's owner decides finally.
//!
//! Two lists must both permit a target: the served ports of the node, each with its target, and the hosts to which the edge
//! may connect. By default the hosts are loopback and there are no ports. The certificate of a target is verified unless
//! `verify` is `false`.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::str::FromStr;

use super::health_check::HealthCheck;
use causeway_config::canonical_network;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::de::{self, MapAccess, Visitor, value::MapAccessDeserializer};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Allow-list of ports and hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Allow {
    /// Networks, addresses and host names to which the edge may connect.
    pub hosts: Vec<AllowedHost>,
    /// Whether upgrades (websocket, SPDY) are allowed.
    pub upgrades: bool,
}

impl Default for Allow {
    fn default() -> Self {
        Self {
            // Only services of the node itself: by default a gateway cannot reach the site's network.
            hosts: vec![
                AllowedHost::Net(IpNet::V4(Ipv4Net::new_assert(
                    Ipv4Addr::new(127, 0, 0, 0),
                    8,
                ))),
                AllowedHost::Net(IpNet::V6(Ipv6Net::new_assert(
                    std::net::Ipv6Addr::LOCALHOST,
                    128,
                ))),
            ],
            upgrades: true,
        }
    }
}

impl Allow {
    /// Whether the edge may connect to this address, whatever name resolved to it.
    pub fn permits(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.hosts.iter().any(|host| match host {
            AllowedHost::Net(net) => net.contains(&address),
            AllowedHost::Name(_) => false,
        })
    }

    /// Whether the list contains this very address, and not only a network that includes it.
    pub fn lists_address(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        let is_address =
            |net: &IpNet| net.prefix_len() == net.max_prefix_len() && net.addr() == address;
        self.hosts
            .iter()
            .any(|host| matches!(host, AllowedHost::Net(net) if is_address(net)))
    }

    /// Whether the edge may connect to this name, whatever address it resolves to.
    pub fn permits_name(&self, name: &str) -> bool {
        self.hosts.iter().any(|host| match host {
            AllowedHost::Name(allowed) => allowed.eq_ignore_ascii_case(name),
            AllowedHost::Net(_) => false,
        })
    }
}

/// Network, address or host name to which the edge may connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllowedHost {
    /// `10.0.0.0/8`, or one address.
    Net(IpNet),
    /// Host name, whatever address it resolves to.
    Name(String),
}

impl FromStr for AllowedHost {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(net) = text.parse::<IpNet>() {
            return canonical_network(net).map(Self::Net);
        }
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Self::Net(address.to_canonical().into()));
        }
        let is_host_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        let is_numeric = text.chars().all(|c| c.is_ascii_digit() || c == '.');
        if is_numeric || !text.chars().all(is_host_char) {
            return Err(format!(
                "\"{text}\" is not a network, an address or a host name; write 10.0.0.0/8, \
                 192.168.1.7 or printer.local, without a port"
            ));
        }
        Ok(Self::Name(text.to_ascii_lowercase()))
    }
}

impl fmt::Display for AllowedHost {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Net(net) => net.fmt(out),
            Self::Name(name) => name.fmt(out),
        }
    }
}

impl Serialize for AllowedHost {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for AllowedHost {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?
            .parse()
            .map_err(de::Error::custom)
    }
}

impl schemars::JsonSchema for AllowedHost {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "AllowedHost".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string" })
    }
}

/// Port of the node and its upstream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Port {
    /// `host:port` of the upstream; 127.0.0.1 and the same port if absent.
    pub target: Option<String>,
    /// Protocol of the upstream: `http`, `h2c` (HTTP/2 in the clear, as gRPC servers use it), `https` or `tcp` (bytes only).
    pub scheme: Protocol,
    /// PEM file of the CAs that may issue the upstream's certificate (`https`).
    pub ca: Option<PathBuf>,
    /// Name that the upstream's certificate must contain (`https`); the host of `target` if absent.
    pub server_name: Option<String>,
    /// PEM file of the client certificate that the edge presents to the upstream (`https`).
    pub certificate: Option<PathBuf>,
    /// PEM file of the certificate's private key.
    pub key: Option<PathBuf>,
    /// Whether the edge verifies the upstream's certificate (`https`). `false` accepts any certificate.
    pub verify: bool,
    /// Begins each TCP session with a PROXY v2 header, which contains the client's address (`tcp`).
    pub proxy_protocol: bool,
    /// Health check of the upstream; none if absent. Write `{}` for the defaults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health_check: Option<HealthCheck>,
}

impl Default for Port {
    fn default() -> Self {
        Self {
            target: None,
            scheme: Protocol::Http,
            ca: None,
            server_name: None,
            certificate: None,
            key: None,
            // Skipping verification must be explicit.
            verify: true,
            proxy_protocol: false,
            health_check: None,
        }
    }
}

impl Port {
    /// Returns the `host:port` to which the edge connects for the node's port `number`.
    pub fn target(&self, number: u16) -> Cow<'_, str> {
        match &self.target {
            Some(target) => target.into(),
            None => format!("127.0.0.1:{number}").into(),
        }
    }
}

/// Service behind the node: its upstream, as of a port. The text `HOST:PORT` stands for the target alone.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Service(pub Port);

impl<'de> Deserialize<'de> for Service {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct TargetOrUpstream;

        // Not an untagged enum, because the error would name no key.
        impl<'de> Visitor<'de> for TargetOrUpstream {
            type Value = Port;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("HOST:PORT, or the keys of an upstream")
            }

            fn visit_str<E: de::Error>(self, target: &str) -> Result<Port, E> {
                Ok(Port {
                    target: Some(target.to_owned()),
                    ..Port::default()
                })
            }

            fn visit_map<A: MapAccess<'de>>(self, keys: A) -> Result<Port, A::Error> {
                Port::deserialize(MapAccessDeserializer::new(keys))
            }
        }

        from.deserialize_any(TargetOrUpstream).map(Self)
    }
}

impl schemars::JsonSchema for Service {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Service".into()
    }

    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let mut schema = Port::json_schema(generator);
        schema.insert("type".into(), serde_json::json!(["object", "string"]));
        let description = "Service behind the node. `HOST:PORT` stands for `target` alone.";
        schema.insert("description".into(), description.into());
        if let Some(properties) = schema.get_mut("properties") {
            properties["target"]["description"] = "`HOST:PORT` of the upstream; required.".into();
            if let Some(properties) = properties.as_object_mut() {
                // Only sets of nodes use health checks, and they serve no services.
                properties.remove("health_check");
            }
        }
        schema
    }
}

/// Protocol of an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// HTTP/1.1 in the clear; also raw bytes with CONNECT.
    Http,
    /// HTTP/2 in the clear with prior knowledge; upgrades use HTTP/1.1.
    H2c,
    /// HTTP/1.1 or HTTP/2 over TLS, as the upstream selects.
    Https,
    /// Bytes only, with CONNECT.
    Tcp,
}

impl Protocol {
    /// Returns the name of the protocol in configuration and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::H2c => "h2c",
            Self::Https => "https",
            Self::Tcp => "tcp",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_may_be_dialled_by_default() {
        let allow = Allow::default();
        for address in ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"] {
            assert!(allow.permits(address.parse().unwrap()), "{address}");
        }
        for address in [
            "10.0.0.1",
            "0.0.0.0",
            "::",
            "169.254.169.254",
            "::ffff:10.0.0.1",
        ] {
            assert!(!allow.permits(address.parse().unwrap()), "{address}");
        }
        assert!(!allow.permits_name("localhost"));
    }

    #[test]
    fn a_host_is_a_network_an_address_or_a_name() {
        for (text, written) in [
            ("10.0.0.0/8", "10.0.0.0/8"),
            ("192.168.1.7", "192.168.1.7/32"),
            ("::1", "::1/128"),
            ("Printer.local", "printer.local"),
        ] {
            assert_eq!(text.parse::<AllowedHost>().unwrap().to_string(), written);
        }
        for bad in ["", "10.0.0", "10.0.0.0/33", "10.1.2.3/8", "host:80", "a b"] {
            assert!(
                bad.parse::<AllowedHost>()
                    .unwrap_err()
                    .contains("10.0.0.0/8"),
                "{bad}"
            );
        }
    }

    #[test]
    fn a_port_maps_to_itself_on_loopback_by_default() {
        assert_eq!(Port::default().target(9100), "127.0.0.1:9100");
        let port = Port {
            target: Some("[::1]:80".into()),
            ..Port::default()
        };
        assert_eq!(port.target(9100), "[::1]:80");
    }
}
