//! Nodes of one worker, with a bound on those that are away.

use causeway_certs::NodeName;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};
use tokio::time::Instant;

/// Maximum number of nodes of a gateway that have neither a tunnel nor a stream. Beyond it, those that were away for longest are
/// forgotten: requests for them are refused like requests for nodes that the gateway has never seen.
pub(super) const MAX_AWAY: usize = 32 << 10;

/// Data of a node.
pub(super) trait ShardEntry: Default {
    /// Whether the node has a tunnel, a stream, or a request that waits for a tunnel.
    fn is_in_use(&self) -> bool;

    /// Returns the time at which the node was last seen, if it was.
    fn away_since(&self) -> Option<Instant>;
}

/// Nodes of one worker.
#[derive(Debug)]
pub(super) struct Shard<T> {
    pub(super) nodes: HashMap<NodeName, T>,
    /// Maximum number of nodes that are away.
    max_away: usize,
    /// Number of nodes at which those that are away are counted.
    sweep_at: usize,
}

impl<T: ShardEntry> Shard<T> {
    /// Returns the empty shards of this number of workers.
    pub(super) fn all(workers: usize) -> Arc<[Mutex<Self>]> {
        let max_away = MAX_AWAY.div_ceil(workers.max(1));
        let shard = || Self {
            nodes: HashMap::new(),
            max_away,
            sweep_at: max_away,
        };
        (0..workers).map(|_| Mutex::new(shard())).collect()
    }

    /// Returns the entry of a node, which is added if there is none.
    pub(super) fn entry(&mut self, node: &NodeName) -> &mut T {
        if self.nodes.len() >= self.sweep_at && !self.nodes.contains_key(node) {
            self.sweep();
        }
        self.nodes.entry(node.clone()).or_default()
    }

    /// Forgets the nodes that were away for longest. Half of the permitted number stays, so that the next call is far.
    fn sweep(&mut self) {
        let away = self.nodes.values().filter(|entry| !entry.is_in_use());
        let mut ends: Vec<_> = away.map(T::away_since).collect();
        ends.sort_unstable_by(|one, other| other.cmp(one));
        if let Some(oldest) = ends.get(self.max_away / 2) {
            self.nodes
                .retain(|_, entry| entry.is_in_use() || entry.away_since() > *oldest);
        }
        self.sweep_at = self.nodes.len() + self.max_away / 2;
    }
}
