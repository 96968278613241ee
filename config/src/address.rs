//! Addresses: where to listen, and `host:port` texts.
//!
//! `ListenAddr` is a socket address or `unix:/path`. `ListenAddrs` finds two addresses that cannot be bound together. The
//! kernel would find them too, but it cannot name their keys. A wildcard takes every address of its family, and `[::]` takes
//! all IPv4 addresses as well.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::ConfigErrors;

/// Address of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddr {
    /// A TCP address.
    Tcp(SocketAddr),
    /// A unix socket (made with mode 0600).
    Unix(PathBuf),
}

impl ListenAddr {
    /// Whether only this machine can reach the address.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Tcp(address) => address.ip().to_canonical().is_loopback(),
            Self::Unix(_) => true,
        }
    }

    /// Whether the two addresses cannot be bound at once. Port 0 is a free port each time.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (one, two) = match (self, other) {
            (Self::Unix(one), Self::Unix(two)) => return one == two,
            (Self::Tcp(one), Self::Tcp(two)) => (one, two),
            _ => return false,
        };
        let (from, to) = (one.ip().to_canonical(), two.ip().to_canonical());
        let covers = |any: std::net::IpAddr, ip: std::net::IpAddr| {
            any.is_unspecified() && (any.is_ipv6() || ip.is_ipv4())
        };
        one.port() != 0
            && one.port() == two.port()
            && (from == to || covers(from, to) || covers(to, from))
    }
}

impl fmt::Display for ListenAddr {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(out),
            Self::Unix(path) => write!(out, "unix:{}", path.display()),
        }
    }
}

impl FromStr for ListenAddr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            return if path.is_absolute() {
                Ok(Self::Unix(path))
            } else {
                Err(format!(
                    "\"{text}\": the path of a unix socket begins with /"
                ))
            };
        }
        parse_socket_address(text)
            .map(Self::Tcp)
            .map_err(|fault| format!("{fault}, or unix:/path"))
    }
}

impl From<SocketAddr> for ListenAddr {
    fn from(address: SocketAddr) -> Self {
        Self::Tcp(address)
    }
}

impl Serialize for ListenAddr {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ListenAddr {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?
            .parse()
            .map_err(de::Error::custom)
    }
}

impl schemars::JsonSchema for ListenAddr {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Listen".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "format": "listen" })
    }
}

/// `#[serde(with = "SocketAddrStr")]` for a `SocketAddr`.
#[derive(Debug)]
pub struct SocketAddrStr;

impl SocketAddrStr {
    /// Writes `127.0.0.1:10265`.
    pub fn serialize<S: Serializer>(value: &SocketAddr, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    /// Reads `127.0.0.1:10265`.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<SocketAddr, D::Error> {
        parse_socket_address(&String::deserialize(from)?).map_err(de::Error::custom)
    }
}

impl schemars::JsonSchema for SocketAddrStr {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Address".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "format": "listen" })
    }
}

fn parse_socket_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        format!(
            "\"{text}\" is not a listen address; write IP:PORT with a port up to 65535, such as \
             0.0.0.0:10263 or [::]:10263"
        )
    })
}

/// Listeners of one process, to find those that cannot be bound together.
#[derive(Debug, Default)]
pub struct ListenAddrs(Vec<(String, String, ListenAddr)>);

impl ListenAddrs {
    /// Adds the listener at `path`, called `name` in messages. Reports a fault if it conflicts with an earlier one.
    pub fn add(
        &mut self,
        path: &str,
        name: &str,
        listen: impl Into<ListenAddr>,
        faults: &mut ConfigErrors,
    ) {
        let listen = listen.into();
        let earlier = self.0.iter().find(|(_, _, taken)| taken.overlaps(&listen));
        if let Some((other, other_name, taken)) = earlier {
            let remedy = "give one of the two another port or path";
            let message = format!("{listen} overlaps with {other_name} ({taken}); {remedy}");
            faults.add_against(path, other, message);
        }
        self.0.push((path.into(), name.into(), listen));
    }
}

/// Splits `host:port`: a name, an IPv4 address, or an IPv6 address in brackets. The host is returned without brackets.
pub fn host_port(text: &str) -> Result<(&str, u16), String> {
    let fault = || {
        format!(
            "\"{text}\" is not HOST:PORT; write it as gateway.example:10262 or [2001:db8::1]:10262"
        )
    };
    let (host, port) = text.rsplit_once(':').ok_or_else(fault)?;
    let port: u16 = port.parse().map_err(|_| fault())?;
    if port == 0 {
        return Err(format!(
            "\"{text}\": cannot connect to port 0; ports are 1 to 65535"
        ));
    }
    if let Some(inner) = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
    {
        // The zone names an interface of this machine (RFC 4007 section 11).
        let address = match inner.split_once('%') {
            Some((address, zone)) if !zone.is_empty() => address,
            Some(_) => return Err(fault()),
            None => inner,
        };
        return match address.parse::<std::net::Ipv6Addr>() {
            Ok(_) => Ok((inner, port)),
            Err(_) => Err(fault()),
        };
    }
    let is_host_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if host.is_empty() || !host.chars().all(is_host_char) {
        return Err(fault());
    }
    Ok((host, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overlap(one: &str, two: &str) -> bool {
        let (one, two): (ListenAddr, ListenAddr) = (one.parse().unwrap(), two.parse().unwrap());
        assert_eq!(one.overlaps(&two), two.overlaps(&one));
        one.overlaps(&two)
    }

    #[test]
    fn a_wildcard_takes_its_family_and_ipv6s_takes_both() {
        for (one, two) in [
            ("127.0.0.1:1", "127.0.0.1:1"),
            ("0.0.0.0:1", "127.0.0.1:1"),
            ("[::]:1", "127.0.0.1:1"),
            ("[::]:1", "0.0.0.0:1"),
            ("[::]:1", "[::1]:1"),
            ("[::ffff:127.0.0.1]:1", "127.0.0.1:1"),
            ("unix:/run/a", "unix:/run/a"),
        ] {
            assert!(overlap(one, two), "{one} {two}");
        }
        for (one, two) in [
            ("127.0.0.1:1", "127.0.0.2:1"),
            ("0.0.0.0:1", "0.0.0.0:2"),
            ("0.0.0.0:1", "[::1]:1"),
            ("0.0.0.0:0", "0.0.0.0:0"),
            ("unix:/run/a", "unix:/run/b"),
            ("unix:/run/a", "0.0.0.0:1"),
        ] {
            assert!(!overlap(one, two), "{one} {two}");
        }
    }

    #[test]
    fn a_listen_address_reads_back_as_written() {
        for text in [
            "0.0.0.0:10263",
            "[::]:10263",
            "unix:/run/causeway/connect.sock",
        ] {
            assert_eq!(text.parse::<ListenAddr>().unwrap().to_string(), text);
        }
        assert!(
            "10263"
                .parse::<ListenAddr>()
                .unwrap_err()
                .contains("IP:PORT")
        );
        assert!(
            "unix:a"
                .parse::<ListenAddr>()
                .unwrap_err()
                .contains("begins with /")
        );
    }

    #[test]
    fn a_host_and_port_is_taken_apart() {
        assert_eq!(
            host_port("gateway.example:10262"),
            Ok(("gateway.example", 10262))
        );
        assert_eq!(host_port("[::1]:1"), Ok(("::1", 1)));
        let zone = Ok(("fe80::1%eth0", 10262));
        assert_eq!(host_port("[fe80::1%eth0]:10262"), zone);
        assert!(host_port("[fe80::1%]:10262").is_err());
        for bad in [
            "",
            "host",
            ":1",
            "host:0",
            "host:x",
            "host:65536",
            "::1:1",
            "[x]:1",
            "a b:1",
        ] {
            assert!(host_port(bad).is_err(), "{bad}");
        }
    }
}
