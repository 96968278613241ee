//! One front of the configuration: a listener for callers, and whom it serves.
//!
//! `name`, `kind` and `listen` have no default, so that no front opens by a slip. Nothing
//! here is open without `anonymous: true`: callers are authenticated by certificate or
//! token, or by the mode of a unix socket.

use std::path::PathBuf;

use causeway_config::{IpNetList, ListenAddr};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::{IdentityHeaders, Jwt};

/// A listener for callers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "independent switches of a user's file"
)]
pub struct Listener {
    /// Name in logs and metrics; unique.
    pub name: String,
    /// What callers speak: `https`, `http`, `tcp` or `connect`.
    pub kind: ListenerProtocol,
    /// `IP:PORT` or `unix:/path`. `$(NAME)` is a variable of the environment, such as a pod's own address.
    pub listen: ListenAddr,
    /// The node that all callers of this front mean; required for `tcp`.
    #[serde(default)]
    pub node: Option<String>,
    /// The node port that this listener stands for; 10250 for `https`, required for `tcp`.
    #[serde(default)]
    pub port: Option<u16>,
    /// Certificate shown to callers; without it one is minted from the own CA.
    #[serde(default)]
    pub certificate: Option<Certificate>,
    /// Names in the certificate that is minted when a caller asks for no node.
    #[serde(default)]
    pub names: Vec<String>,
    /// How callers are known.
    #[serde(default)]
    pub callers: ClientAuth,
    /// Node ports that are kubelets': there the cluster's API has to allow as well what a caller does (`SubjectAccessReview` of `nodes/metrics`, `nodes/proxy` and so on, as kubelet asks it); empty is none.
    #[serde(default)]
    pub subject_access_review: Vec<u16>,
    /// End the streams of a client whose certificate, JWT or reviewed token has expired, and refuse new ones on its open connections.
    #[serde(default = "yes")]
    pub disconnect_expired: bool,
    /// Pass the caller's `Authorization` on to the app instead of keeping it here.
    #[serde(default)]
    pub forward_authorization: bool,
    /// Tell the app who calls, in fields that callers cannot set.
    #[serde(default)]
    pub identity_headers: IdentityHeaders,
    /// Request fields that tell the app the client's address, and the scheme and host that it asks for. What clients send in these and alike fields is removed.
    #[serde(default = "ForwardingHeader::all")]
    pub forwarding_headers: Vec<ForwardingHeader>,
    /// Networks of proxies in front of this listener. What they send in such fields is kept: `Forwarded` and `X-Forwarded-For` are appended to, `X-Real-IP` becomes the last address of `X-Forwarded-For` that is in none of these networks.
    #[serde(default, with = "IpNetList")]
    pub trusted_proxies: Vec<IpNet>,
    /// Serve callers that cannot be known. A `tcp` front that does is plain TCP, without TLS.
    #[serde(default)]
    pub anonymous: bool,
    /// Networks from which such callers are served; empty is all.
    #[serde(default, with = "IpNetList")]
    pub anonymous_from: Vec<IpNet>,
    /// Node ports at which such callers are served; empty is all.
    #[serde(default)]
    pub anonymous_ports: Vec<u16>,
    /// Form of failures: `problem` (RFC 9457), or `kubernetes` where callers are kube-apiservers.
    #[serde(default)]
    pub errors: ErrorFormat,
    /// Connections arrive by DNAT: the address dialled names node and port.
    #[serde(default)]
    pub original_destination: bool,
    /// Networks in which a `connect` front dials itself what is at no node's edge (pods and Services in the cloud); empty is none.
    #[serde(default, with = "IpNetList")]
    pub direct: Vec<IpNet>,
    /// Networks from which connections begin with a PROXY v2 header: its source calls, and with `original_destination` its destination names node and port. Others are served without one.
    #[serde(default, with = "IpNetList")]
    pub proxy_protocol: Vec<IpNet>,
}

impl Listener {
    /// kubelet's port, which is what an `https` front stands for unless told otherwise.
    pub const KUBELET: u16 = 10250;

    /// The front of a configuration that names none: certificates of the own CA only.
    pub fn https() -> Self {
        let listen = ListenAddr::Tcp(std::net::SocketAddr::from(([0, 0, 0, 0], 10263)));
        Self::new("https", ListenerProtocol::Https, listen)
    }

    /// A front with everything else at its default.
    pub fn new(name: impl Into<String>, kind: ListenerProtocol, listen: ListenAddr) -> Self {
        Self {
            name: name.into(),
            kind,
            listen,
            node: None,
            port: None,
            certificate: None,
            names: Vec::new(),
            callers: ClientAuth::default(),
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
            original_destination: false,
            direct: Vec::new(),
            proxy_protocol: Vec::new(),
        }
    }

    /// The node port that this listener stands for, if any.
    pub fn node_port(&self) -> Option<u16> {
        match self.kind {
            ListenerProtocol::Https => self.port.or(Some(Self::KUBELET)),
            ListenerProtocol::Http | ListenerProtocol::Tcp | ListenerProtocol::Connect => self.port,
        }
    }

    /// Callers speak TLS here. `http` and unix sockets never do, nor does a `tcp` front that serves anybody: ssh
    /// and netcat speak none, and where the app speaks first there is nothing to tell the two by.
    pub fn has_tls(&self) -> bool {
        let bare = self.kind == ListenerProtocol::Http
            || (self.kind == ListenerProtocol::Tcp && self.anonymous);
        !bare && matches!(self.listen, ListenAddr::Tcp(_))
    }
}

fn yes() -> bool {
    true
}

/// A request field that tells the app of the client's request.
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
    /// The host that the client asks for.
    #[serde(rename = "X-Forwarded-Host", alias = "x-forwarded-host")]
    XForwardedHost,
    /// The client's address, never a list.
    #[serde(rename = "X-Real-IP", alias = "x-real-ip")]
    XRealIp,
}

impl ForwardingHeader {
    /// Returns all of them.
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

/// What callers of a front speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ListenerProtocol {
    /// HTTP/1.1 and HTTP/2 over TLS, which ends here.
    Https,
    /// HTTP/1.1 and HTTP/2 in the clear.
    Http,
    /// Any bytes, to one node and port.
    Tcp,
    /// HTTP CONNECT.
    Connect,
}

impl ListenerProtocol {
    /// The word used in configuration, logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Https => "https",
            Self::Http => "http",
            Self::Tcp => "tcp",
            Self::Connect => "connect",
        }
    }
}

/// A certificate and its key, in PEM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Certificate {
    /// File of the certificate and the intermediates behind it.
    pub chain: PathBuf,
    /// File of the key.
    pub key: PathBuf,
}

/// How callers are known.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ClientAuth {
    /// By a caller certificate of the own CA (`causeway ca caller`).
    pub own_ca: bool,
    /// By a client certificate of these CAs (PEM files).
    pub client_ca: Vec<PathBuf>,
    /// Serial numbers of client certificates that are revoked, in hexadecimal as `openssl x509 -serial` and the audit log write them. Their open streams end at the reload.
    pub revoked: Vec<Serial>,
    /// By a bearer token of this file (`causeway caller token`), which keeps hashes only.
    pub tokens: Option<PathBuf>,
    /// By a JWT of these issuers.
    pub jwt: Vec<Jwt>,
    /// By a bearer token that the cluster's API knows (`TokenReview`), such as a service account's; `{}` for tokens that are for the API server itself.
    pub token_review: Option<TokenReview>,
}

impl Default for ClientAuth {
    fn default() -> Self {
        Self {
            // The one CA that is always there: a front without a word about callers is closed, not broken.
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
                "\"{text}\" is no serial number; write it in hexadecimal and in quotes, as `openssl x509 -serial` prints it"
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

/// Tokens about which the cluster's API is asked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TokenReview {
    /// For whom they must be: their `aud` holds one of these. Empty is the API server itself.
    pub audiences: Vec<String>,
}

/// The form of a failure.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum ErrorFormat {
    /// Status, `application/problem+json` and `Proxy-Status`.
    #[default]
    Problem,
    /// 502 with `text/plain` and no Retry-After, or for an upgrade a `Status`: what kubectl shows its user in every case.
    Kubernetes,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_serial_number_is_the_same_however_it_is_written() {
        for text in ["0AB1:02", "ab102", "00:0a:b1:02"] {
            let serial = Serial::try_from(text.to_owned()).unwrap();
            assert_eq!(serial.as_str(), "ab102", "{text}");
        }
        for text in ["", "0x12", "ann"] {
            assert!(Serial::try_from(text.to_owned()).is_err(), "{text}");
        }
    }
}
