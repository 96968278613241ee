//! Rate limits of delegated heartbeats, for each pool and for each node.

use causeway_certs::NodeName;
use causeway_tunnel::control_stream::NodePoolMembers;
use std::{collections::HashMap, time::Duration};
use tokio::time::Instant;

/// Heartbeats of one pool at once: one of each member.
const POOL_BURST: u32 = 256;
const _: () = assert!(POOL_BURST as usize == NodePoolMembers::MAX_MEMBERS);
/// Interval in which a pool gets another one: a whole pool's within the interval of heartbeats.
const POOL_INTERVAL: Duration = Duration::from_millis(39);
/// Shortest interval between two heartbeats of one node.
const NODE_INTERVAL: Duration = Duration::from_secs(5);

/// Limiter of all pools and nodes.
#[derive(Default)]
pub(super) struct HeartbeatRateLimiter {
    /// Time at which each pool's allowance is whole again: a leaky bucket (the generic cell rate algorithm).
    pools: HashMap<String, Instant>,
    /// Time of the last heartbeat of each node.
    nodes: HashMap<NodeName, Instant>,
}

impl HeartbeatRateLimiter {
    /// Takes one heartbeat from the allowance of a pool. Returns whether there was one.
    pub(super) fn take_of_pool(&mut self, pool: &str, now: Instant) -> bool {
        let whole = self.pools.get(pool).copied().unwrap_or(now).max(now);
        let next = whole + POOL_INTERVAL;
        let allowed = next <= now + POOL_INTERVAL * POOL_BURST;
        if allowed {
            self.pools.insert(pool.to_owned(), next);
        }
        allowed
    }

    /// Returns whether a node may send a heartbeat now, and notes that it has.
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
        self.pools.is_empty() && self.nodes.is_empty()
    }

    /// Removes what has no effect any more.
    pub(super) fn forget(&mut self, now: Instant) {
        self.pools.retain(|_, whole| *whole > now);
        self.nodes.retain(|_, last| now < *last + NODE_INTERVAL);
    }
}
