//! The target: the address that the edge dials for a stream, as seen from the node.
//!
//! A host that is the node's own name means the node itself, and only the edge knows its address. A host `SERVICE.NODE` means a
//! service of the node, whose address only the edge knows as well. Parsing is pure and total: any input of a client results in a
//! target or in an error.

use std::{fmt, net::IpAddr, str::FromStr, sync::Arc};

/// `host:port` as seen from the node. The host is a name or an address, without brackets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// A DNS name, the node's own name, the name of one of its services, or an IP address.
    pub host: Arc<str>,
    /// The TCP port. 0 stands for the only port of a service, if the client names none.
    pub port: u16,
}

/// Error that makes a text unusable as a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// There is no `:port`.
    #[error("a target is host:port; the port is missing")]
    NoPort,
    /// The port is not a number from 1 to 65535.
    #[error("the port of a target must be a number from 1 to 65535")]
    BadPort,
    /// The host is empty, or has characters that no host may have.
    #[error("the host of a target must be a DNS name or an IP address (IPv6 in brackets)")]
    BadHost,
}

impl Target {
    /// Creates a target from its parts.
    pub fn new(host: impl Into<Arc<str>>, port: u16) -> Self {
        Self {
            host: host.into(),
            port,
        }
    }

    /// Creates the target of a service of a node.
    pub fn service(service: &str, node: &str, port: Option<u16>) -> Self {
        Self::new(format!("{service}.{node}"), port.unwrap_or(0))
    }

    /// Parses a target that the other end of a tunnel sends: only there the port may be missing.
    ///
    /// # Errors
    /// If the host is not a host, or the port is not a port.
    pub(crate) fn parse_private(text: &str) -> Result<Self, TargetError> {
        split_host_port(text).map(|(host, port)| Self::new(host, port.unwrap_or(0)))
    }

    /// Returns the name of the service of this node that the target means, if it means one.
    pub fn service_of(&self, node: &str) -> Option<&str> {
        let (service, rest) = self.host.split_once('.')?;
        let is_service = rest.eq_ignore_ascii_case(node) && is_service_name(service);
        (is_service && self.ip().is_none()).then_some(service)
    }

    /// Returns the target as text, without the formatter, because every request needs it.
    pub fn to_host_port(&self) -> String {
        self.parts(&mut itoa::Buffer::new()).concat()
    }

    /// Returns the parts of the target's text.
    fn parts<'a>(&'a self, buffer: &'a mut itoa::Buffer) -> [&'a str; 5] {
        let is_v6 = self.host.contains(':');
        let (open, close) = if is_v6 { ("[", "]") } else { ("", "") };
        let (colon, port) = match self.port {
            0 => ("", ""),
            port => (":", buffer.format(port)),
        };
        [open, &self.host, close, colon, port]
    }

    /// Returns the host as an address, if it is one.
    pub fn ip(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }
}

/// Maximum length of a label of a DNS name, in bytes (RFC 1035 §2.3.4).
const MAX_LABEL: usize = 63;

/// Whether a service may have this name: one label of a DNS name (RFC 1123 §2.1), in lower case.
pub fn is_service_name(text: &str) -> bool {
    let is_label_byte =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=MAX_LABEL).contains(&text.len())
        && text.bytes().all(is_label_byte)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// Splits `host:port`, `[v6]:port` or a bare host, as in a Host field or a CONNECT authority (RFC 9110 §7.2, RFC 3986 §3.2).
/// A missing port is `None`.
///
/// # Errors
/// If the host is empty or not a host, or the port is not a port.
pub fn split_host_port(text: &str) -> Result<(&str, Option<u16>), TargetError> {
    let (host, port) = if let Some(rest) = text.strip_prefix('[') {
        let (host, rest) = rest.split_once(']').ok_or(TargetError::BadHost)?;
        host.parse::<std::net::Ipv6Addr>()
            .map_err(|_| TargetError::BadHost)?;
        match rest.strip_prefix(':') {
            Some(port) => (host, Some(port)),
            None if rest.is_empty() => (host, None),
            None => return Err(TargetError::BadHost),
        }
    } else {
        match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        }
    };
    if !is_valid_host(host) {
        return Err(TargetError::BadHost);
    }
    // An empty port counts as no port (RFC 3986, section 3.2.3).
    let port = port.filter(|port| !port.is_empty());
    port.map(parse_port).transpose().map(|port| (host, port))
}

fn parse_port(text: &str) -> Result<u16, TargetError> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(TargetError::BadPort);
    }
    match text.parse() {
        Ok(0) | Err(_) => Err(TargetError::BadPort),
        Ok(port) => Ok(port),
    }
}

fn is_valid_host(host: &str) -> bool {
    let is_host_byte =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    let is_v6 = host.contains(':') && host.parse::<std::net::Ipv6Addr>().is_ok();
    !host.is_empty() && host.len() <= 255 && (is_v6 || host.bytes().all(is_host_byte))
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self, TargetError> {
        match split_host_port(text)? {
            (host, Some(port)) => Ok(Self::new(host, port)),
            (_, None) => Err(TargetError::NoPort),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut buffer = itoa::Buffer::new();
        let mut parts = self.parts(&mut buffer).into_iter();
        parts.try_for_each(|part| f.write_str(part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_printed_target_parses_back() {
        for text in ["edge-1:9100", "10.0.0.1:10250", "[::1]:80", "a_b.c:65535"] {
            assert_eq!(text.parse::<Target>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn the_target_of_a_service_needs_no_port_between_the_ends_of_a_tunnel() {
        for (port, text) in [(Some(631), "printer.edge-1:631"), (None, "printer.edge-1")] {
            let target = Target::service("printer", "edge-1", port);
            assert_eq!(target.to_string(), text);
            assert_eq!(Target::parse_private(text), Ok(target.clone()));
            assert_eq!(target.service_of("edge-1"), Some("printer"));
        }
        for (target, node) in [
            ("edge-1:80", "edge-1"),
            ("printer.edge-1:80", "edge-2"),
            ("a.printer.edge-1:80", "edge-1"),
            (".edge-1:80", "edge-1"),
            ("a_b.edge-1:80", "edge-1"),
            ("-a.edge-1:80", "edge-1"),
            ("10.0.0.5:80", "0.0.5"),
        ] {
            let target: Target = target.parse().unwrap();
            assert_eq!(target.service_of(node), None, "{target}");
        }
    }

    #[test]
    fn an_invalid_target_is_refused_with_its_reason() {
        for (text, why) in [
            ("edge-1", TargetError::NoPort),
            ("edge-1:", TargetError::NoPort),
            ("edge-1:0", TargetError::BadPort),
            ("edge-1:+80", TargetError::BadPort),
            ("edge-1:65536", TargetError::BadPort),
            (":80", TargetError::BadHost),
            ("a b:80", TargetError::BadHost),
            ("user@edge-1:80", TargetError::BadHost),
            ("[::1:80", TargetError::BadHost),
            ("[edge-1]:80", TargetError::BadHost),
            ("[::1]x:80", TargetError::BadHost),
            ("::1:80", TargetError::BadHost),
        ] {
            assert_eq!(text.parse::<Target>(), Err(why), "{text}");
        }
    }
}
