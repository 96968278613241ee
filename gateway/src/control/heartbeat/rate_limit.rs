//! Rate limits of delegated heartbeats: for each delegate, for each pool, and for each node.
//!
//! The limit of a delegate applies before signatures are verified, and protects the CPU of the gateway. The limits of a node and
//! of its pool apply to verified heartbeats, and protect the API of the cluster. So heartbeats that a delegate forges take nothing
//! from the allowance of its pool.

use causeway_certs::NodeName;
use causeway_tunnel::control_stream::NodePoolMembers;
use std::{borrow::Borrow, collections::HashMap, hash::Hash, time::Duration};
use tokio::time::Instant;

/// Heartbeats of one delegate, or of one pool, at once: one of each member.
const BURST: u32 = 256;
const _: () = assert!(BURST as usize == NodePoolMembers::MAX_MEMBERS);
/// Interval at which one more is allowed: those of a full pool within the interval of heartbeats.
const INTERVAL: Duration = Duration::from_millis(39);
/// Shortest interval between two heartbeats of one node.
const NODE_INTERVAL: Duration = Duration::from_secs(5);

/// Limiter of all delegates, pools and nodes.
#[derive(Default)]
pub(super) struct HeartbeatRateLimiter {
    delegates: Buckets<NodeName>,
    pools: Buckets<String>,
    /// Time of the last heartbeat of each node.
    nodes: HashMap<NodeName, Instant>,
}

/// Leaky bucket of each key (the generic cell rate algorithm): the time at which the whole burst is allowed again.
struct Buckets<K>(HashMap<K, Instant>);

impl<K> Default for Buckets<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Eq + Hash> Buckets<K> {
    /// Takes one heartbeat from the allowance of a key. Returns whether there was one.
    fn take<Q>(&mut self, key: &Q, now: Instant) -> bool
    where
        K: Borrow<Q>,
        Q: ?Sized + Eq + Hash + ToOwned<Owned = K>,
    {
        let full_at = self.0.get(key).copied().unwrap_or(now).max(now);
        let next = full_at + INTERVAL;
        let allowed = next <= now + INTERVAL * BURST;
        if allowed {
            self.0.insert(key.to_owned(), next);
        }
        allowed
    }
}

impl HeartbeatRateLimiter {
    /// Takes one heartbeat from the allowance of a delegate. Returns whether there was one.
    pub(super) fn take_of_delegate(&mut self, delegate: &NodeName, now: Instant) -> bool {
        self.delegates.take(delegate, now)
    }

    /// Takes one heartbeat from the allowance of a pool. Returns whether there was one.
    pub(super) fn take_of_pool(&mut self, pool: &str, now: Instant) -> bool {
        self.pools.take(pool, now)
    }

    /// Records a heartbeat of a node. Returns whether the node may send one now.
    pub(super) fn take_of_node(&mut self, node: &NodeName, now: Instant) -> bool {
        let last = self.nodes.get(node);
        let allowed = last.is_none_or(|last| now >= *last + NODE_INTERVAL);
        if allowed {
            self.nodes.insert(node.clone(), now);
        }
        allowed
    }

    /// Whether no limit is in effect.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.delegates.0.is_empty() && self.pools.0.is_empty() && self.nodes.is_empty()
    }

    /// Removes entries that have no effect any more.
    pub(super) fn remove_expired(&mut self, now: Instant) {
        self.delegates.0.retain(|_, full_at| *full_at > now);
        self.pools.0.retain(|_, full_at| *full_at > now);
        self.nodes.retain(|_, last| now < *last + NODE_INTERVAL);
    }
}
