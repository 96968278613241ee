//! Configuration of one listener: its address, its protocol, and the clients that it serves.
//!
//! `name`, `protocol` and `listen` have no default, so that no listener opens by mistake. Without `anonymous: true`, clients have
//! to authenticate by certificate or token, or by the mode of a unix socket.

use std::path::PathBuf;

use causeway_config::{IpNetList, ListenAddr};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::identity_headers::IdentityHeaders;
use super::jwt::Jwt;

/// Listener for clients.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "independent switches of a user's file"
)]
pub struct Listener {
    /// Name in logs and metrics; unique.
    pub name: String,
    /// Protocol of the clients: `https`, `http`, `tcp`, `connect` or `passthrough`.
    pub protocol: ListenerProtocol,
    /// `IP:PORT` or `unix:/path`. `$(NAME)` is a variable of the environment, such as a pod's own address.
    pub listen: ListenAddr,
    /// Node that all clients of this listener reach. A `tcp` listener needs this key, or one of the next three in its place. At a `passthrough` listener, the node of clients that send no server name.
    #[serde(default)]
    pub node: Option<String>,
    /// Nodes of which each connection reaches one: a connected node whose health checks succeed, with the fewest open streams.
    #[serde(default)]
    pub nodes: Option<Vec<String>>,
    /// Node pool, in place of `nodes`: its confirmed members.
    #[serde(default)]
    pub pool: Option<String>,
    /// Label selector as in Kubernetes (`site=north,tier in (a,b),!spare`), in place of `nodes`: all nodes whose confirmed labels match.
    #[serde(default)]
    pub node_selector: Option<String>,
    /// Node port that this listener stands for; 10250 for `https`, required for `tcp` and `passthrough`.
    #[serde(default)]
    pub port: Option<u16>,
    /// Certificate presented to clients. Without this key the gateway issues one from the own CA.
    #[serde(default)]
    pub certificate: Option<Certificate>,
    /// Names in the certificate that the gateway issues if a client requests no node.
    #[serde(default)]
    pub names: Vec<String>,
    /// Authentication of clients.
    #[serde(default)]
    pub client_auth: ClientAuth,
    /// Node ports of kubelets. At these ports the cluster's API must allow the request as well (`SubjectAccessReview` of `nodes/metrics`, `nodes/proxy` and so on, as kubelet requests it). Empty is none.
    #[serde(default)]
    pub subject_access_review: Vec<u16>,
    /// Ends the streams of a client whose certificate, JWT or reviewed token has expired, and refuses new ones on its open connections.
    #[serde(default = "yes")]
    pub disconnect_expired: bool,
    /// Passes the client's `Authorization` to the upstream instead of removing it.
    #[serde(default)]
    pub forward_authorization: bool,
    /// Request fields that tell the upstream who the client is, and that clients cannot set.
    #[serde(default)]
    pub identity_headers: IdentityHeaders,
    /// Request fields that tell the upstream the client's address, and the scheme and host of the request. The gateway removes what clients send in these and similar fields.
    #[serde(default = "ForwardingHeader::all")]
    pub forwarding_headers: Vec<ForwardingHeader>,
    /// Networks of proxies in front of this listener. Their values of such fields remain: `Forwarded` and `X-Forwarded-For` are appended to, `X-Real-IP` becomes the last address of `X-Forwarded-For` that is in none of these networks.
    #[serde(default, with = "IpNetList")]
    pub trusted_proxies: Vec<IpNet>,
    /// Serves clients that cannot be authenticated. A `tcp` listener with this key is plain TCP, without TLS. A `passthrough` listener requires it, because its clients authenticate at the upstream.
    #[serde(default)]
    pub anonymous: bool,
    /// Networks from which anonymous clients are served; empty is all.
    #[serde(default, with = "IpNetList")]
    pub anonymous_from: Vec<IpNet>,
    /// Node ports at which anonymous clients are served; empty is all.
    #[serde(default)]
    pub anonymous_ports: Vec<u16>,
    /// Format of errors: `problem` (RFC 9457), or `kubernetes` if the clients are kube-apiservers.
    #[serde(default)]
    pub errors: ErrorFormat,
    /// Networks from which a `connect` listener serves clients without TLS; other clients are disconnected, and `listen` must be in one of the networks. Only loopback, private (RFC 1918), unique local (RFC 4193) and link-local networks are permitted. Empty is TLS.
    #[serde(default, with = "IpNetList")]
    pub plaintext_networks: Vec<IpNet>,
    /// Connections arrive by DNAT: the original destination address gives node and port.
    #[serde(default)]
    pub original_destination: bool,
    /// Networks in which a `connect` listener itself dials addresses that no edge serves (pods and Services in the cloud); empty is none.
    #[serde(default, with = "IpNetList")]
    pub direct_networks: Vec<IpNet>,
    /// Lists of the nodes that a client may reach, at a `connect` listener: `/.well-known/causeway/nodes` and `/.well-known/causeway/http_sd`. `false` disables them, and with them `causeway login` and `causeway nodes`.
    #[serde(default = "yes")]
    pub node_list: bool,
    /// Networks from which connections begin with a PROXY v2 header. Its source is the client, and with `original_destination` its destination gives node and port. Connections from other networks are served without a header.
    #[serde(default, with = "IpNetList")]
    pub proxy_protocol: Vec<IpNet>,
}

impl Listener {
    /// Port of the kubelet, the default node port of an `https` listener.
    pub const KUBELET: u16 = 10250;

    /// Returns the default listener: it accepts certificates of the own CA only.
    pub fn https() -> Self {
        let listen = ListenAddr::Tcp(std::net::SocketAddr::from(([0, 0, 0, 0], 10263)));
        Self::new("https", ListenerProtocol::Https, listen)
    }

    /// Returns a listener with defaults for all other settings.
    pub fn new(name: impl Into<String>, protocol: ListenerProtocol, listen: ListenAddr) -> Self {
        Self {
            name: name.into(),
            protocol,
            listen,
            node: None,
            nodes: None,
            pool: None,
            node_selector: None,
            port: None,
            certificate: None,
            names: Vec::new(),
            client_auth: ClientAuth::default(),
            subject_access_review: Vec::new(),
            disconnect_expired: true,
            forward_authorization: false,
            identity_headers: IdentityHeaders::default(),
            forwarding_headers: ForwardingHeader::all(),
            trusted_proxies: Vec::new(),
            anonymous: false,
            anonymous_from: Vec::new(),
            anonymous_ports: Vec::new(),
            errors: ErrorFormat::Problem,
            plaintext_networks: Vec::new(),
            original_destination: false,
            direct_networks: Vec::new(),
            node_list: true,
            proxy_protocol: Vec::new(),
        }
    }

    /// Returns the set keys that say which nodes the listener serves; at most one may be set.
    pub fn node_keys(&self) -> Vec<&'static str> {
        let keys = [
            ("node", self.node.is_some()),
            ("nodes", self.nodes.is_some()),
            ("pool", self.pool.is_some()),
            ("node_selector", self.node_selector.is_some()),
        ];
        let set = keys.into_iter().filter(|(_, is_set)| *is_set);
        set.map(|(key, _)| key).collect()
    }

    /// Returns the node port of requests to this listener, if there is one.
    pub fn node_port(&self) -> Option<u16> {
        match self.protocol {
            ListenerProtocol::Https => self.port.or(Some(Self::KUBELET)),
            ListenerProtocol::Http
            | ListenerProtocol::Tcp
            | ListenerProtocol::Connect
            | ListenerProtocol::Passthrough => self.port,
        }
    }

    /// Whether TLS of clients ends here. `http` and `passthrough` listeners and unix sockets end no TLS. Neither does an anonymous
    /// `tcp` listener: ssh and netcat do not use TLS, and if the upstream sends first, the gateway cannot distinguish the two cases. A `connect`
    /// listener with `plaintext_networks` has none either, because many clients cannot speak TLS to a proxy.
    pub fn has_tls(&self) -> bool {
        let is_plain = match self.protocol {
            ListenerProtocol::Http | ListenerProtocol::Passthrough => true,
            ListenerProtocol::Tcp => self.anonymous,
            ListenerProtocol::Connect => !self.plaintext_networks.is_empty(),
            ListenerProtocol::Https => false,
        };
        !is_plain && matches!(self.listen, ListenAddr::Tcp(_))
    }
}

fn yes() -> bool {
    true
}

/// Request field that describes the client's request to the upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub enum ForwardingHeader {
    /// Address, host and scheme in one (RFC 7239).
    #[serde(alias = "forwarded")]
    Forwarded,
    /// The client's address.
    #[serde(rename = "X-Forwarded-For", alias = "x-forwarded-for")]
    XForwardedFor,
    /// `http` or `https`.
    #[serde(rename = "X-Forwarded-Proto", alias = "x-forwarded-proto")]
    XForwardedProto,
    /// The host of the client's request.
    #[serde(rename = "X-Forwarded-Host", alias = "x-forwarded-host")]
    XForwardedHost,
    /// The client's address, never a list.
    #[serde(rename = "X-Real-IP", alias = "x-real-ip")]
    XRealIp,
}

impl ForwardingHeader {
    /// Returns all forwarding headers.
    pub fn all() -> Vec<Self> {
        vec![
            Self::Forwarded,
            Self::XForwardedFor,
            Self::XForwardedProto,
            Self::XForwardedHost,
            Self::XRealIp,
        ]
    }
}

/// Protocol that the clients of a listener speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ListenerProtocol {
    /// HTTP/1.1 and HTTP/2 over TLS, which ends at the gateway.
    Https,
    /// HTTP/1.1 and HTTP/2 without TLS.
    Http,
    /// Any bytes, to one node and port.
    Tcp,
    /// HTTP CONNECT, and requests whose target is `http://NODE:PORT/…`.
    Connect,
    /// TLS that ends at the upstream. The server name (SNI) of the ClientHello names the node.
    Passthrough,
}

impl ListenerProtocol {
    /// Whether the gateway forwards bytes that it does not parse, so that they carry no token for it.
    pub fn is_opaque(self) -> bool {
        matches!(self, Self::Tcp | Self::Passthrough)
    }

    /// Returns the word used in configuration, logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Https => "https",
            Self::Http => "http",
            Self::Tcp => "tcp",
            Self::Connect => "connect",
            Self::Passthrough => "passthrough",
        }
    }
}

/// A certificate and its key, in PEM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Certificate {
    /// File of the certificate and the intermediates after it.
    pub chain: PathBuf,
    /// File of the key.
    pub key: PathBuf,
}

/// Authentication of clients.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ClientAuth {
    /// Accepts client certificates of the own CA (`causeway client certificate`).
    pub own_ca: bool,
    /// Accepts client certificates of these CAs (PEM files).
    pub client_ca: Vec<PathBuf>,
    /// Serial numbers of client certificates that are revoked, in hexadecimal as `openssl x509 -serial` and the audit log write them. Their open streams end at the reload.
    pub revoked: Vec<Serial>,
    /// Accepts bearer tokens of this file (`causeway client token`), which contains hashes only. Gateways do not share it: give each gateway the same file.
    pub tokens: Option<PathBuf>,
    /// Accepts JWTs of these issuers.
    pub jwt: Vec<Jwt>,
    /// Accepts bearer tokens that the cluster's API confirms (`TokenReview`), such as a service account's; `{}` for tokens whose audience is the API server itself.
    pub token_review: Option<TokenReview>,
}

impl ClientAuth {
    /// Whether a token may identify a client.
    pub fn accepts_bearer_tokens(&self) -> bool {
        self.tokens.is_some() || !self.jwt.is_empty() || self.token_review.is_some()
    }
}

impl Default for ClientAuth {
    fn default() -> Self {
        Self {
            // The gateway's own CA always exists, so a listener without client settings is closed, not broken.
            own_ca: true,
            client_ca: Vec::new(),
            revoked: Vec::new(),
            tokens: None,
            jwt: Vec::new(),
            token_review: None,
        }
    }
}

/// The serial number of a certificate (RFC 5280 section 4.1.2.2): hexadecimal, in lower case and without leading zeros.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub struct Serial(String);

impl Serial {
    /// Returns the serial number as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Serial {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let digits = text.replace(':', "").to_ascii_lowercase();
        let hexadecimal = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        if digits.is_empty() || !hexadecimal {
            return Err(format!(
                "\"{text}\" is not a valid serial number; write it in hexadecimal and in quotes, as `openssl x509 -serial` prints it"
            ));
        }
        Ok(Self(digits.trim_start_matches('0').to_owned()))
    }
}

impl From<Serial> for String {
    fn from(serial: Serial) -> Self {
        serial.0
    }
}

/// Tokens that the cluster's API reviews.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TokenReview {
    /// Accepted audiences: `aud` of a token must contain one of these. Empty is the API server itself.
    pub audiences: Vec<String>,
}

/// Format of an error.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum ErrorFormat {
    /// Status, `application/problem+json` and `Proxy-Status`.
    #[default]
    Problem,
    /// 502 with `text/plain` and no Retry-After, or for an upgrade a `Status`: kubectl shows this text to its user in every case.
    Kubernetes,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serial_number_formats_are_equivalent() {
        for text in ["0AB1:02", "ab102", "00:0a:b1:02"] {
            let serial = Serial::try_from(text.to_owned()).unwrap();
            assert_eq!(serial.as_str(), "ab102", "{text}");
        }
        for text in ["", "0x12", "ann"] {
            assert!(Serial::try_from(text.to_owned()).is_err(), "{text}");
        }
    }
}
