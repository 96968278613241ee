//! What the DNS server answers for: its zones, and what they say of every edge.
//!
//! Made of a configuration, whole or not at all, and never changed: a reload puts another in its place. A zone has no
//! records of its own but SOA and NS. Its server is `ns.dns` in it, a name that no one-label node can take away.

use crate::config::{Config, Dns};
use hickory_proto::{
    ProtoError,
    rr::{
        Name,
        rdata::{NS, SOA},
    },
};
use std::net::IpAddr;

/// How long it may be kept that a name is none: an edge that joins is to be found at once.
pub(super) const NEGATIVE: u32 = 1;

/// The zones of a gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Zones {
    all: Vec<Zone>,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) ttl: u32,
}

/// A zone whose names are nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Zone {
    pub(super) apex: Name,
    pub(super) ns: NS,
    pub(super) soa: SOA,
}

impl Zones {
    /// Those of this configuration; none where it has no such section.
    ///
    /// # Errors
    /// If a zone is no name, which a configuration that has been validated has not.
    pub fn of(config: &Config) -> Result<Self, String> {
        let Some(dns) = &config.dns.0 else {
            return Ok(Self::default());
        };
        let zone =
            |text: &String| Zone::of(text).map_err(|error| format!("dns.zones: {text}: {error}"));
        let all: Result<Vec<Zone>, String> = dns.zones.iter().map(zone).collect();
        Ok(Self {
            all: all?,
            addresses: config.named_addresses(),
            ttl: seconds(dns),
        })
    }

    /// The zone that a name belongs to: the longest, for one may lie in another.
    pub(super) fn holding(&self, name: &Name) -> Option<&Zone> {
        let holding = self.all.iter().filter(|zone| zone.apex.zone_of(name));
        holding.max_by_key(|zone| zone.apex.iter().len())
    }
}

impl Zone {
    fn of(text: &str) -> Result<Self, ProtoError> {
        let mut apex = Name::from_ascii(text)?.to_lowercase();
        apex.set_fqdn(true);
        let server = Name::from_ascii("ns.dns")?.append_domain(&apex)?;
        let answerable = Name::from_ascii("hostmaster")?.append_domain(&apex)?;
        // Nobody copies the zone: serial and times of secondaries say nothing.
        let soa = SOA::new(server.clone(), answerable, 1, 3600, 600, 86_400, NEGATIVE);
        Ok(Self {
            apex,
            ns: NS(server),
            soa,
        })
    }

    /// What stands before the zone, as it would name a node; empty at the apex. None where it cannot name any: a dot inside
    /// of a label would pass for one between labels.
    pub(super) fn within(&self, name: &Name) -> Option<String> {
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

fn seconds(dns: &Dns) -> u32 {
    u32::try_from(dns.ttl.as_secs()).unwrap_or(u32::MAX)
}
