//! Connections that edges open: the rules, and what each node uses.
//!
//! A reload writes the rules, and the request path reads them without waiting. The request path counts the connections and the bytes of
//! each node, and the admin API reads the counters.

use crate::config::Egress;
use arc_swap::ArcSwap;
use causeway_certs::NodeName;
use causeway_rt::log_throttle::LogThrottle;
use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Time that one stream takes from the allowance of its node. Each stream costs a task and a line of the access log, even if it is reset
/// at once.
const STREAM_TIME: Duration = Duration::from_millis(5);
/// Time whose streams may be opened at once after a pause: 2,000 streams.
const STREAM_BURST: Duration = Duration::from_secs(10);
/// Maximum number of connections of one edge to this gateway: one, and earlier ones whose streams have not ended.
pub(crate) const MAX_LINKS: usize = 8;
/// Time whose bytes may move at once after a pause.
const BURST: Duration = Duration::from_millis(250);
const BURSTS_PER_SECOND: usize = 4;
/// Maximum time after which a connection that waits looks at the rate again.
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// Minimum number of bytes that a connection may move at once, because each chunk costs time.
const MIN_CHUNK: usize = 1024;
const NANOS_PER_SECOND: u128 = 1_000_000_000;

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
pub struct EgressUsage(Arc<Mutex<HashMap<NodeName, Arc<NodeEgress>>>>);

/// Usage of one node, on all its connections to this gateway.
#[derive(Debug, Default)]
pub struct NodeEgress {
    /// Connections of the edge to this gateway, oldest first. Each token is cancelled when its connection has ended or must end.
    links: Mutex<VecDeque<CancellationToken>>,
    /// Connections that programs on the node have opened.
    pub(crate) streams: Arc<AtomicUsize>,
    bucket: Mutex<Bucket>,
    /// Time at which the allowance of streams is full again; `None` before the first stream.
    streams_full_at: Mutex<Option<Instant>>,
    /// Throttle of the log lines about failed connections, because the edge dials again.
    pub(crate) failure_throttle: LogThrottle,
    /// Throttle of the log lines about connections that this gateway ends for newer ones.
    pub(crate) replacement_throttle: LogThrottle,
}

impl EgressUsage {
    /// Returns the usage of a node.
    pub(crate) fn node(&self, node: &NodeName) -> Arc<NodeEgress> {
        let mut nodes = self.lock();
        if let Some(usage) = nodes.get(node) {
            return usage.clone();
        }
        // Entries of disconnected nodes are removed when the table would grow. Not before the allowance of streams is full: otherwise an
        // edge that connects again would have a new one.
        if nodes.len() == nodes.capacity() {
            let now = Instant::now();
            nodes.retain(|_, usage| is_connected(usage) || !usage.has_full_allowance(now));
        }
        nodes.entry(node.clone()).or_default().clone()
    }

    /// Returns the number of connections that programs on a node have opened, if its edge is connected for them.
    pub(crate) fn open_connections(&self, node: &NodeName) -> Option<usize> {
        let nodes = self.lock();
        let usage = nodes.get(node).filter(|usage| is_connected(usage))?;
        Some(usage.streams.load(Relaxed))
    }

    /// Returns the number of connections that programs on all nodes have opened.
    pub(crate) fn all_open_connections(&self) -> usize {
        let nodes = self.lock();
        let all = nodes.values().map(|usage| usage.streams.load(Relaxed));
        all.sum()
    }

    /// Tells the connections of the edge of a node to end.
    pub(crate) fn end_links(&self, node: &NodeName) {
        if let Some(usage) = self.lock().get(node) {
            let links = usage.links.lock().unwrap_or_else(PoisonError::into_inner);
            links.iter().for_each(CancellationToken::cancel);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeName, Arc<NodeEgress>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the edge has a connection, which holds the usage as well as the table.
fn is_connected(usage: &Arc<NodeEgress>) -> bool {
    Arc::strong_count(usage) > 1
}

impl NodeEgress {
    /// Whether the node may open one more stream now. All its connections share the allowance.
    pub(crate) fn take_stream(&self, now: Instant) -> bool {
        let mut full_at = self.lock_allowance();
        let next = full_at.map_or(now, |full_at| full_at.max(now)) + STREAM_TIME;
        let is_allowed = next - now <= STREAM_BURST;
        if is_allowed {
            *full_at = Some(next);
        }
        is_allowed
    }

    fn has_full_allowance(&self, now: Instant) -> bool {
        self.lock_allowance().is_none_or(|full_at| full_at <= now)
    }

    fn lock_allowance(&self) -> MutexGuard<'_, Option<Instant>> {
        let full_at = self.streams_full_at.lock();
        full_at.unwrap_or_else(PoisonError::into_inner)
    }

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

    /// Returns the number of bytes that all connections of the node have moved so far. A connection may move more once these are paid
    /// ([`NodeEgress::pause`]).
    pub(crate) fn moved(&self) -> u64 {
        self.lock_bucket().moved
    }

    /// Counts bytes that a connection has moved. Returns the new number of [`NodeEgress::moved`].
    pub(crate) fn count(&self, bytes: usize, bytes_per_second: usize, now: Instant) -> u64 {
        let mut bucket = self.lock_bucket();
        bucket.pay(bytes_per_second, now);
        bucket.moved = bucket.moved.saturating_add(count(bytes));
        bucket.moved
    }

    /// Returns the time until the rate has paid for the first `moved` bytes of the node, except for a burst. It is at most a second,
    /// because the rate may change meanwhile.
    pub(crate) fn pause(
        &self,
        moved: u64,
        bytes_per_second: usize,
        now: Instant,
    ) -> Option<Duration> {
        let mut bucket = self.lock_bucket();
        bucket.pay(bytes_per_second, now);
        let owed = moved.saturating_sub(bucket.paid);
        let time = time_of(owed, bytes_per_second)
            .checked_sub(BURST)
            .filter(|time| !time.is_zero())?;
        Some(time.min(MAX_PAUSE))
    }

    /// Returns the number of bytes that a connection may move at once. The connections of a node share the burst, so that few bytes
    /// are owed even if all move some at the same time.
    pub(crate) fn chunk_size(&self, bytes_per_second: usize) -> usize {
        let burst = bytes_per_second / BURSTS_PER_SECOND;
        let connections = self.streams.load(Relaxed).max(1);
        MIN_CHUNK.max(burst / connections)
    }

    fn lock_bucket(&self) -> MutexGuard<'_, Bucket> {
        self.bucket.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of a node that have moved, and that the rate has paid for.
#[derive(Debug, Default)]
struct Bucket {
    moved: u64,
    paid: u64,
    /// Time until which the rate has paid.
    paid_until: Option<Instant>,
}

impl Bucket {
    /// Pays with the rate for the time since the last payment.
    fn pay(&mut self, bytes_per_second: usize, now: Instant) {
        let since = now.saturating_duration_since(self.paid_until.unwrap_or(now));
        let nanos = since
            .as_nanos()
            .saturating_mul(count(bytes_per_second).into());
        let bytes = u64::try_from(nanos / NANOS_PER_SECOND).unwrap_or(u64::MAX);
        let paid = self.paid.saturating_add(bytes);
        if paid >= self.moved {
            (self.paid, self.paid_until) = (self.moved, Some(now));
        } else {
            // The time of a fraction of a byte is not lost.
            self.paid = paid;
            let until = self.paid_until.unwrap_or(now);
            self.paid_until = Some(until + time_of(bytes, bytes_per_second));
        }
    }
}

/// Returns the time in which the rate pays for these bytes.
fn time_of(bytes: u64, bytes_per_second: usize) -> Duration {
    let nanos = u128::from(bytes) * NANOS_PER_SECOND / u128::from(count(bytes_per_second).max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

fn count(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: usize = 1_000_000;

    #[test]
    fn bytes_beyond_the_burst_wait_until_the_rate_has_paid_for_them() {
        let (usage, now) = (NodeEgress::default(), Instant::now());
        assert_eq!(usage.pause(usage.moved(), RATE, now), None);
        let first = usage.count(250_000, RATE, now);
        assert_eq!(usage.pause(first, RATE, now), None, "the burst");
        let second = usage.count(500_000, RATE, now);
        assert_eq!(
            usage.pause(second, RATE, now),
            Some(Duration::from_millis(500))
        );
        let third = usage.count(100_000, RATE, now);
        assert_eq!(
            usage.pause(third, RATE, now),
            Some(Duration::from_millis(600)),
            "behind"
        );
        assert_eq!(
            usage.pause(second, RATE, now),
            Some(Duration::from_millis(500))
        );
        assert_eq!(
            usage.pause(usage.moved(), RATE, now),
            Some(Duration::from_millis(600)),
            "a new one"
        );
        let later = now + Duration::from_millis(100);
        assert_eq!(
            usage.pause(third, RATE, later),
            Some(Duration::from_millis(500))
        );
        let later = now + Duration::from_secs(10);
        assert_eq!(usage.pause(third, RATE, later), None);
        // The time without bytes allows no more than a burst.
        let fourth = usage.count(350_000, RATE, later);
        assert_eq!(
            usage.pause(fourth, RATE, later),
            Some(Duration::from_millis(100))
        );
    }

    #[test]
    fn a_changed_rate_pays_for_the_bytes_that_are_owed() {
        let (usage, now) = (NodeEgress::default(), Instant::now());
        let moved = usage.count(750_000, RATE, now);
        assert_eq!(
            usage.pause(moved, RATE, now),
            Some(Duration::from_millis(500))
        );
        assert_eq!(
            usage.pause(moved, 2 * RATE, now),
            Some(Duration::from_millis(125))
        );
        assert_eq!(
            usage.pause(moved, RATE / 10, now),
            Some(Duration::from_secs(1)),
            "at most"
        );
    }

    #[test]
    fn fractions_of_bytes_are_paid() {
        let (usage, now) = (NodeEgress::default(), Instant::now());
        let moved = usage.count(10_000, 10_000, now);
        for micros in 0..500_000 {
            let time = now + Duration::from_micros(micros);
            assert!(usage.pause(moved, 10_000, time).is_some());
        }
        let time = now + Duration::from_millis(751);
        assert_eq!(usage.pause(moved, 10_000, time), None);
    }

    #[test]
    fn the_connections_of_a_node_share_a_burst() {
        let usage = NodeEgress::default();
        assert_eq!(usage.chunk_size(RATE), 250_000);
        usage.streams.store(10, Relaxed);
        assert_eq!(usage.chunk_size(RATE), 25_000);
        usage.streams.store(1000, Relaxed);
        assert_eq!(usage.chunk_size(RATE), MIN_CHUNK);
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
        // The guards of its streams decrement the counter before.
        own.streams.store(0, Relaxed);
        drop(own);
        assert_eq!(usage.all_open_connections(), 2);
        assert_eq!(usage.open_connections(&node), None);
    }

    #[test]
    fn a_node_opens_a_burst_of_streams_and_then_so_many_per_second() {
        let (usage, now) = (NodeEgress::default(), Instant::now());
        let opened = |now| (0..10_000).filter(|_| usage.take_stream(now)).count();
        assert_eq!(opened(now), 2_000);
        assert_eq!(opened(now), 0);
        assert_eq!(opened(now + Duration::from_secs(1)), 200);
        assert_eq!(opened(now + Duration::from_mins(1)), 2_000);
    }

    #[test]
    fn a_new_connection_gives_no_new_allowance() {
        let (usage, node) = (EgressUsage::default(), NodeName::parse("edge-1").unwrap());
        let now = Instant::now();
        let connect = || {
            (0..10_000)
                .filter(|_| usage.node(&node).take_stream(now))
                .count()
        };
        assert_eq!((connect(), connect()), (2_000, 0));
        // The table removes entries when it grows.
        for number in 0..1_000 {
            usage.node(&NodeName::parse(&format!("other-{number}")).unwrap());
        }
        assert!(usage.lock().len() < 1_000, "others are removed");
        assert_eq!(connect(), 0);
    }
}
