//! Zones of the DNS server, and the addresses to which each zone resolves its edges.
//!
//! The zones are built from a configuration, completely or not at all, and are immutable: a reload replaces them. A zone has no
//! records of its own except SOA and NS. Its name server is `ns.dns` in the zone, which no node with a one-label name can take.

use crate::config::{Config, Dns};
use hickory_proto::{
    ProtoError,
    rr::{
        Name,
        rdata::{NS, SOA},
    },
};
use std::net::IpAddr;

/// TTL of negative answers, in seconds: an edge that joins must be found at once.
pub(super) const NEGATIVE_TTL: u32 = 1;

/// The zones of a gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Zones {
    all: Vec<Zone>,
    /// Addresses at which clients reach this gateway.
    pub(super) addresses: Vec<IpAddr>,
    /// Those of them that are configured, and are stated to other gateways.
    pub(super) stated_addresses: Vec<IpAddr>,
    /// Whether names resolve to the addresses of the gateways that hold a node (`dns.holders`).
    pub(super) prefers_holders: bool,
    pub(super) ttl: u32,
}

/// Zone whose names are the names of nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Zone {
    pub(super) apex: Name,
    pub(super) ns: NS,
    pub(super) soa: SOA,
}

impl Zones {
    /// Returns the zones of this configuration; empty if it has no section `dns`.
    ///
    /// # Errors
    /// If a zone is no valid name, which a validated configuration excludes.
    pub fn from_config(config: &Config) -> Result<Self, String> {
        let Some(dns) = &config.dns.0 else {
            return Ok(Self::default());
        };
        let parse_zone =
            |text: &String| Zone::of(text).map_err(|error| format!("dns.zones: {text}: {error}"));
        let all: Result<Vec<Zone>, String> = dns.zones.iter().map(parse_zone).collect();
        Ok(Self {
            all: all?,
            addresses: config.node_name_addresses(),
            stated_addresses: dns.addresses.clone(),
            prefers_holders: dns.holders,
            ttl: ttl_seconds(dns),
        })
    }

    /// Returns the zone that a name belongs to. The longest match counts, since one zone may be inside another.
    pub(super) fn find_zone(&self, name: &Name) -> Option<&Zone> {
        let holding = self.all.iter().filter(|zone| zone.apex.zone_of(name));
        holding.max_by_key(|zone| zone.apex.iter().len())
    }
}

impl Zone {
    fn of(text: &str) -> Result<Self, ProtoError> {
        let mut apex = Name::from_ascii(text)?.to_lowercase();
        apex.set_fqdn(true);
        let server = Name::from_ascii("ns.dns")?.append_domain(&apex)?;
        let responsible = Name::from_ascii("hostmaster")?.append_domain(&apex)?;
        // No secondary server copies the zone: the serial and the timers have no effect.
        let soa = SOA::new(
            server.clone(),
            responsible,
            1,
            3600,
            600,
            86_400,
            NEGATIVE_TTL,
        );
        Ok(Self {
            apex,
            ns: NS(server),
            soa,
        })
    }

    /// Returns the labels before the zone as the name of a node; empty at the apex. `None` if they cannot name a node, because a
    /// dot inside a label would look like a dot between labels.
    pub(super) fn node_name_in(&self, name: &Name) -> Option<String> {
        let labels = name.iter().len().saturating_sub(self.apex.iter().len());
        let mut text = String::new();
        for label in name.iter().take(labels) {
            if label.contains(&b'.') {
                return None;
            }
            if !text.is_empty() {
                text.push('.');
            }
            text.push_str(std::str::from_utf8(label).ok()?);
        }
        Some(text)
    }
}

fn ttl_seconds(dns: &Dns) -> u32 {
    u32::try_from(dns.ttl.as_secs()).unwrap_or(u32::MAX)
}
