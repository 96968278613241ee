//! Zones, node table and directory from which the DNS server answers.

use super::{
    handler::{Transport, answer},
    holders,
    zones::Zones,
};
use crate::{
    metrics::Metrics,
    state::{Nodes, Registry},
};
use arc_swap::ArcSwap;
use causeway_certs::NodeName;
use std::sync::Arc;

/// Maximum length of a query in bytes; a name has at most 255.
pub(super) const MAX_QUERY_SIZE: usize = 4096;

/// DNS zones, which a reload replaces, the table of nodes, and the gateways that hold them. Cheap to clone.
#[derive(Clone, Debug)]
pub struct NodeNames {
    zones: Arc<ArcSwap<Zones>>,
    nodes: Nodes,
    registry: Registry,
    pub(super) metrics: Arc<Metrics>,
}

impl NodeNames {
    /// Returns the names in these zones, resolved by the table `nodes`. States this gateway's addresses to the others.
    pub fn new(zones: Zones, nodes: Nodes, registry: Registry, metrics: Arc<Metrics>) -> Self {
        registry
            .directory()
            .state_addresses(&zones.stated_addresses);
        Self {
            zones: Arc::new(ArcSwap::from_pointee(zones)),
            nodes,
            registry,
            metrics,
        }
    }

    /// Replaces the zones, and returns whether they have changed.
    pub fn replace(&self, zones: Zones) -> bool {
        let changed = **self.zones.load() != zones;
        let directory = self.registry.directory();
        directory.state_addresses(&zones.stated_addresses);
        self.zones.store(Arc::new(zones));
        changed
    }

    pub(super) fn answer(&self, question: &[u8], transport: Transport) -> Option<Vec<u8>> {
        let zones = self.zones.load();
        let edge_addresses = |node: &NodeName| {
            if zones.prefers_holders {
                holders::addresses(&zones.addresses, node, &self.registry)
            } else {
                zones.addresses.clone()
            }
        };
        let (outcome, bytes) = answer(question, transport, (&zones, &self.nodes), &edge_addresses);
        self.metrics.count_dns_query(outcome.as_str());
        bytes
    }
}
