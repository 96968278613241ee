//! Bounded cache of nodes that the engine does not have.
//!
//! A removed node keeps a certificate with which its edge asks again and again. Each question would be a read of the engine.

use causeway_certs::NodeName;
use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tokio::time::Instant;

/// Time for which the engine is not asked again. A node that joins meanwhile is in the next synchronization.
const TTL: Duration = Duration::from_secs(5);
/// Maximum number of nodes in the cache.
const MAX_NODES: usize = 1024;

/// Nodes that the engine did not have a moment ago.
#[derive(Debug, Default)]
pub(super) struct AbsentNodes(Mutex<HashMap<NodeName, Instant>>);

impl AbsentNodes {
    /// Whether the engine did not have the node a moment ago.
    pub(super) fn contains(&self, node: &NodeName) -> bool {
        let nodes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.get(node).is_some_and(|since| since.elapsed() < TTL)
    }

    /// Records that the engine does not have the node. If the cache is full, the node is not recorded.
    pub(super) fn insert(&self, node: &NodeName) {
        let mut nodes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if nodes.len() >= MAX_NODES {
            nodes.retain(|_, since| since.elapsed() < TTL);
        }
        if nodes.len() < MAX_NODES {
            nodes.insert(node.clone(), Instant::now());
        }
    }

    /// Forgets all nodes, because an entry of the engine has changed.
    pub(super) fn clear(&self) {
        let mut nodes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_cache_is_short_and_bounded() {
        let absent = AbsentNodes::default();
        let node = |number: usize| NodeName::parse(&format!("edge-{number}")).unwrap();
        for number in 0..=MAX_NODES {
            absent.insert(&node(number));
        }
        assert!(absent.contains(&node(0)));
        assert!(!absent.contains(&node(MAX_NODES)));
        tokio::time::advance(TTL).await;
        assert!(!absent.contains(&node(0)));
        absent.insert(&node(MAX_NODES));
        assert_eq!(absent.0.lock().unwrap().len(), 1);
        absent.clear();
        assert!(!absent.contains(&node(MAX_NODES)));
    }
}
