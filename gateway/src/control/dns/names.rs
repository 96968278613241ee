//! Zones and node table from which the DNS server answers.

use super::{
    handler::{Transport, answer},
    zones::Zones,
};
use crate::{metrics::Metrics, state::Nodes};
use arc_swap::ArcSwap;
use std::sync::Arc;

/// Maximum length of a query in bytes; a name has at most 255.
pub(super) const MAX_QUERY_SIZE: usize = 4096;

/// DNS zones, which a reload replaces, and the table of nodes. Cheap to clone.
#[derive(Clone, Debug)]
pub struct NodeNames {
    zones: Arc<ArcSwap<Zones>>,
    nodes: Nodes,
    pub(super) metrics: Arc<Metrics>,
}

impl NodeNames {
    /// Returns the names in these zones, resolved by the table `nodes`.
    pub fn new(zones: Zones, nodes: Nodes, metrics: Arc<Metrics>) -> Self {
        Self {
            zones: Arc::new(ArcSwap::from_pointee(zones)),
            nodes,
            metrics,
        }
    }

    /// Replaces the zones, and returns whether they have changed.
    pub fn replace(&self, zones: Zones) -> bool {
        let changed = **self.zones.load() != zones;
        self.zones.store(Arc::new(zones));
        changed
    }

    pub(super) fn answer(&self, question: &[u8], transport: Transport) -> Option<Vec<u8>> {
        let (outcome, bytes) = answer(question, transport, (&self.zones.load(), &self.nodes));
        self.metrics.count_dns_query(outcome.as_str());
        bytes
    }
}
