//! The target: the address that the edge dials for a stream, as seen from the node.
//!
//! A host that is the node's own name means the node itself, and only the edge knows its address. Parsing is pure and total:
//! any input of a client results in a target or in an error.

use std::{fmt, net::IpAddr, str::FromStr};

/// `host:port` as seen from the node. The host is a name or an address, without brackets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// A DNS name, the node's own name, or an IP address.
    pub host: String,
    /// The TCP port, never 0.
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
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self {
            host: host.into(),
            port,
        }
    }

    /// Returns the target as text, without the formatter, because every request needs it.
    pub fn to_host_port(&self) -> String {
        let mut text = String::with_capacity(self.host.len() + "[]:65535".len());
        if self.host.contains(':') {
            text.push('[');
            text.push_str(&self.host);
            text.push(']');
        } else {
            text.push_str(&self.host);
        }
        text.push(':');
        text.push_str(itoa::Buffer::new().format(self.port));
        text
    }

    /// Returns the host as an address, if it is one.
    pub fn ip(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }
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
        f.write_str(&self.to_host_port())
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
