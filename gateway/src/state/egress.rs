//! Connections that edges open: the rules, and what each node uses.
//!
//! A reload writes the rules, and the request path reads them without waiting. The request path counts the connections and the bytes of
//! each node, and the admin API reads the counters.

use crate::config::Egress;
use arc_swap::ArcSwap;
use causeway_certs::NodeName;
use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Maximum number of connections of one edge to this gateway: one, and earlier ones whose streams have not ended.
pub(crate) const MAX_LINKS: usize = 8;
/// Time whose bytes may move at once after a pause.
const BURST: Duration = Duration::from_millis(250);

/// The current rules. Cheap to clone; all clones change together.
#[derive(Clone, Debug, Default)]
pub struct EgressRules(Arc<ArcSwap<Egress>>);

impl EgressRules {
    /// Returns these rules. Without any, every connection is denied.
    pub fn new(egress: Option<&Egress>) -> Self {
        let rules = Self::default();
        rules.replace(egress);
        rules
    }

    /// Returns the rules that are in force now.
    pub fn load(&self) -> Arc<Egress> {
        self.0.load_full()
    }

    /// Returns the limit of the bytes per second of one node; 0 is no limit.
    pub(crate) fn bytes_per_second(&self) -> usize {
        self.0.load().limits.bytes_per_second
    }

    /// Replaces the rules, for every new connection at once, and for open connections soon.
    pub(crate) fn replace(&self, egress: Option<&Egress>) {
        self.0.store(Arc::new(egress.cloned().unwrap_or_default()));
    }
}

/// Usage of all nodes. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct EgressUsage(Arc<Mutex<HashMap<NodeName, Weak<NodeEgress>>>>);

/// Usage of one node, on all its connections to this gateway.
#[derive(Debug, Default)]
pub struct NodeEgress {
    /// Connections of the edge to this gateway, oldest first. Each token is cancelled when its connection has ended or must end.
    links: Mutex<VecDeque<CancellationToken>>,
    /// Connections that programs on the node have opened.
    pub(crate) streams: Arc<AtomicUsize>,
    /// Time at which the token bucket of the bytes is full again; `None` before the first byte.
    full_at: Mutex<Option<Instant>>,
}

impl EgressUsage {
    /// Returns the usage of a node.
    pub(crate) fn node(&self, node: &NodeName) -> Arc<NodeEgress> {
        let mut nodes = self.lock();
        if let Some(usage) = nodes.get(node).and_then(Weak::upgrade) {
            return usage;
        }
        // Entries of disconnected nodes are removed when the table would grow.
        if nodes.len() == nodes.capacity() {
            nodes.retain(|_, usage| usage.strong_count() > 0);
        }
        let usage = Arc::default();
        nodes.insert(node.clone(), Arc::downgrade(&usage));
        usage
    }

    /// Returns the number of connections that programs on a node have opened, if its edge is connected for them.
    pub(crate) fn open_connections(&self, node: &NodeName) -> Option<usize> {
        let usage = self.lock().get(node)?.upgrade()?;
        Some(usage.streams.load(Relaxed))
    }

    /// Returns the number of connections that programs on all nodes have opened.
    pub(crate) fn all_open_connections(&self) -> usize {
        let nodes = self.lock();
        let all = nodes.values().filter_map(Weak::upgrade);
        all.map(|usage| usage.streams.load(Relaxed)).sum()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeName, Weak<NodeEgress>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NodeEgress {
    /// Adds a connection of the edge. If there are too many, the oldest one must end, so that earlier connections whose streams last
    /// never keep the edge away. Returns the token that tells the new connection to end. The connection cancels it at its own end.
    pub(crate) fn add_link(&self) -> CancellationToken {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.retain(|link| !link.is_cancelled());
        if links.len() >= MAX_LINKS
            && let Some(oldest) = links.pop_front()
        {
            oldest.cancel();
        }
        let link = CancellationToken::new();
        links.push_back(link.clone());
        link
    }

    /// Takes tokens for these bytes, which have moved already. Returns the time before which their connection must move no more.
    pub(crate) fn take_bytes(
        &self,
        bytes: usize,
        bytes_per_second: usize,
        now: Instant,
    ) -> Option<Instant> {
        if bytes_per_second == 0 || bytes == 0 {
            return None;
        }
        #[allow(
            clippy::cast_precision_loss,
            reason = "a fraction of a nanosecond does not matter"
        )]
        let duration = Duration::from_secs_f64(bytes as f64 / bytes_per_second as f64);
        let mut full_at = self.full_at.lock().unwrap_or_else(PoisonError::into_inner);
        let next = full_at.map_or(now, |full_at| full_at.max(now)) + duration;
        *full_at = Some(next);
        let wait_until = next.checked_sub(BURST)?;
        (wait_until > now).then_some(wait_until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_beyond_the_burst_wait_until_the_rate_allows_them() {
        let (usage, now) = (NodeEgress::default(), Instant::now());
        let rate = 1_000_000;
        assert_eq!(usage.take_bytes(250_000, rate, now), None, "the burst");
        let wait = usage.take_bytes(500_000, rate, now).unwrap();
        assert_eq!(wait - now, Duration::from_millis(500));
        // Another connection of the node waits for both.
        let wait = usage.take_bytes(100_000, rate, now).unwrap();
        assert_eq!(wait - now, Duration::from_millis(600));
        let later = now + Duration::from_secs(10);
        assert_eq!(usage.take_bytes(250_000, rate, later), None);
        assert_eq!(usage.take_bytes(usize::MAX, 0, later), None, "no limit");
    }

    #[test]
    fn the_newest_connection_of_an_edge_replaces_the_oldest_one_at_the_limit() {
        let usage = NodeEgress::default();
        let mut links: Vec<_> = (0..MAX_LINKS).map(|_| usage.add_link()).collect();
        let is_open = |link: &CancellationToken| !link.is_cancelled();
        assert!(links.iter().all(is_open));
        // A connection that has ended makes room.
        links.remove(3).cancel();
        links.push(usage.add_link());
        assert!(links.iter().all(is_open));
        for _ in 0..3 {
            links.push(usage.add_link());
            assert!(links.remove(0).is_cancelled(), "the oldest");
            assert!(links.iter().all(is_open), "the others");
        }
    }

    #[test]
    fn a_node_without_a_connection_has_no_usage() {
        let (usage, node) = (EgressUsage::default(), NodeName::parse("edge-1").unwrap());
        assert_eq!(usage.open_connections(&node), None);
        let own = usage.node(&node);
        usage.node(&node).streams.fetch_add(1, Relaxed);
        assert_eq!(usage.open_connections(&node), Some(1), "one counter");
        let other = usage.node(&NodeName::parse("edge-2").unwrap());
        other.streams.fetch_add(2, Relaxed);
        assert_eq!(usage.all_open_connections(), 3);
        drop(own);
        assert_eq!(usage.all_open_connections(), 2);
        assert_eq!(usage.open_connections(&node), None);
    }
}
