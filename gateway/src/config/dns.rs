//! Configuration section `dns`: the server that resolves names of nodes.
//!
//! The server runs if the section is present. The addresses for the name of an edge node are configured here or follow from the
//! listeners' addresses. They are never guessed, because a wildcard address does not say how clients reach the listener.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use causeway_certs::NodeName;
use causeway_config::{ConfigErrors, DurationStr, SocketAddrStr};
use serde::{Deserialize, Serialize};

/// Maximum length of a zone in bytes. A node's name and the server's own name have to fit in front of it.
const MAX_ZONE: usize = 190;
/// Maximum of `ttl`. Answers that are cached for longer would be outdated when a node moves.
const MAX_TTL: Duration = Duration::from_hours(24);

/// The DNS server of node names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Dns {
    /// Address of the DNS server, for UDP and TCP.
    #[serde(with = "SocketAddrStr")]
    pub listen: SocketAddr,
    /// Zones in which nodes have names, `NODE.ZONE`. `.` is for bare names, and for forwarders that ask another server about names that are no nodes.
    pub zones: Vec<String>,
    /// Addresses that the name of an edge's node resolves to: those at which clients reach this gateway's listeners. Without this key: the addresses of the listeners, if none is a wildcard.
    pub addresses: Vec<IpAddr>,
    /// Whether the name of a node resolves to the `dns.addresses` of the gateways that have a tunnel of the node, and while there is no tunnel, to those of all gateways. This saves a hop between gateways (`peers`). A client must reach the addresses of each gateway.
    pub holders: bool,
    /// Time for which an answer may be cached, in whole seconds.
    #[serde(with = "DurationStr")]
    pub ttl: Duration,
}

impl Default for Dns {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 10253)),
            zones: Vec::new(),
            addresses: Vec::new(),
            holders: false,
            // When a node moves behind a tunnel or away from one, clients resolve its new address within this time.
            ttl: Duration::from_secs(1),
        }
    }
}

impl Dns {
    pub(super) fn validate(&self, listeners: &[IpAddr], faults: &mut ConfigErrors) {
        if self.zones.is_empty() {
            let empty_message = "is empty, so no name would be answered; set a zone, such as [nodes.example.internal]";
            faults.add("dns.zones", empty_message);
        }
        check_zones("dns.zones", &self.zones, faults);
        check_addresses("dns.addresses", &self.addresses, faults);
        if self.addresses.is_empty() && listeners.is_empty() {
            let message = "the addresses for edge node names are not known, because the listeners listen on all addresses; \
                           list the addresses at which clients reach the listeners";
            faults.add("dns.addresses", message);
        }
        if self.ttl.subsec_nanos() != 0 || self.ttl > MAX_TTL {
            faults.add("dns.ttl", "must be whole seconds, from 0s to 1day");
        }
    }
}

/// Checks that each zone is valid and that no zone is listed twice.
pub(super) fn check_zones(key: &str, zones: &[String], faults: &mut ConfigErrors) {
    let mut earlier = Vec::new();
    for (index, zone) in zones.iter().enumerate() {
        let path = format!("{key}[{index}]");
        let plain = normalize_zone(zone);
        match (plain.as_str(), NodeName::parse(&plain)) {
            ("", _) if zone == "." => {}
            (_, Err(error)) => faults.add(&path, error.to_string()),
            (name, Ok(_)) if name.len() > MAX_ZONE => {
                let message = format!(
                    "is longer than {MAX_ZONE} characters and leaves no room for node names"
                );
                faults.add(&path, message);
            }
            (_, Ok(_)) => {}
        }
        if earlier.contains(&plain) {
            faults.add(&path, "is the same zone as an earlier one; remove it");
        }
        earlier.push(plain);
    }
}

/// Checks that each address can be the address of a listener.
pub(super) fn check_addresses(key: &str, addresses: &[IpAddr], faults: &mut ConfigErrors) {
    for (index, address) in addresses.iter().enumerate() {
        if address.is_unspecified() || address.is_multicast() {
            let message = format!("{address} is not an address that a client can reach");
            faults.add(format!("{key}[{index}]"), message);
        }
    }
}

/// Returns a zone without the root's dot and in lower case; the root is empty.
fn normalize_zone(zone: &str) -> String {
    let zone = zone.strip_suffix('.').unwrap_or(zone);
    zone.to_ascii_lowercase()
}

/// Returns each address once, and IPv4-mapped addresses as IPv4.
pub(super) fn canonical(addresses: impl Iterator<Item = IpAddr>) -> Vec<IpAddr> {
    let mut all = Vec::new();
    for address in addresses.map(|address| address.to_canonical()) {
        if !all.contains(&address) {
            all.push(address);
        }
    }
    all
}
