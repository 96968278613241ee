//! Limit on connections that any peer may open, with a share for each source network.
//!
//! 1. A source may hold three times as many places as are free. So one source alone gets three quarters of all places, and
//!    the free ones stay available to others (dynamic thresholds; Choudhury and Hahne, 1998).
//! 2. A source beyond its share gets the place of its own oldest connection that is silent, or else idle. If no place is
//!    free, a source within its share gets a place of the source that holds most places. Among several such sources it takes
//!    the place of the oldest connection. So a newcomer is evicted only after as many arrivals as there are places, from
//!    however many sources they come.
//! 3. A connection is silent until [`Slot::busy`] was called once, and idle whenever no guard of that call is held. A busy or
//!    protected connection is never evicted. Its use is counted by its own atomics, since each request counts. So the table
//!    may list a connection that is busy by now, and removes it when it searches for one to evict.
//! 4. An observer counts each eviction and refusal. The log reports them at most once a minute.
//! 5. [`ConnectionLimit::acquire`] waits for a place instead of evicting: sources take turns, and each is first in, first
//!    out.

use crate::listener::RemoteAddr;
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    fmt,
    net::IpAddr,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{sync::oneshot, time::Instant};
use tokio_util::sync::CancellationToken;

/// Number of places that a source may hold for each free place.
const MAX_SHARE_DIVISOR: usize = 3;

/// Origin of a connection: an IPv4 address, an IPv6 /64 network, or a local user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// IP address. Only the first 64 bits of an IPv6 address are kept, since a host chooses the rest by itself.
    Network(IpAddr),
    /// A user of this machine.
    User(u32),
}

impl From<IpAddr> for Source {
    fn from(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = address.to_bits() >> 64 << 64;
                Self::Network(std::net::Ipv6Addr::from_bits(network).into())
            }
            four @ IpAddr::V4(_) => Self::Network(four),
        }
    }
}

impl From<RemoteAddr> for Source {
    fn from(peer: RemoteAddr) -> Self {
        match peer {
            RemoteAddr::Tcp(address) => address.ip().into(),
            RemoteAddr::Unix(uid) => Self::User(uid),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network(four @ IpAddr::V4(_)) => four.fmt(f),
            Self::Network(six @ IpAddr::V6(_)) => write!(f, "{six}/64"),
            Self::User(uid) => write!(f, "unix:uid={uid}"),
        }
    }
}

/// Outcome of a connection for lack of places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectReason {
    /// The connection lost its place to another one.
    Evicted,
    /// The connection got no place.
    Refused,
}

impl RejectReason {
    /// Returns the label for metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Evicted => "evicted",
            Self::Refused => "refused",
        }
    }
}

/// Minimum interval between two log lines about one limit.
const LOG_INTERVAL: Duration = Duration::from_mins(1);

type Observer = Box<dyn Fn(RejectReason) + Send + Sync>;

/// Limit on connections. Cheap to clone.
#[derive(Clone)]
pub struct ConnectionLimit(Arc<Inner>);

struct Inner {
    name: &'static str,
    max_connections: usize,
    table: Mutex<Table>,
    observer: Observer,
}

impl fmt::Debug for ConnectionLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (most, held) = (self.0.max_connections, self.open_connections());
        f.debug_struct("ConnectionLimit")
            .field("most", &most)
            .field("held", &held)
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Table {
    /// Connections, in the order of their arrival.
    slots: BTreeMap<u64, ConnectionEntry>,
    sources: HashMap<Source, SourceUsage>,
    /// Sources from which a place can be taken. The last one is the first to lose a place.
    evictable: BTreeSet<EvictionRank>,
    waiters: HashMap<Source, VecDeque<oneshot::Sender<Slot>>>,
    source_queue: VecDeque<Source>,
    next_id: u64,
    /// Number of connections that were rejected since the last log line.
    rejected: usize,
    last_logged: Option<Instant>,
}

struct ConnectionEntry {
    source: Source,
    activity: Arc<Activity>,
    evicted: CancellationToken,
}

/// Activity of one connection.
#[derive(Debug)]
struct Activity {
    /// Number of guards in use.
    busy_guards: AtomicUsize,
    /// Whether a guard was ever taken.
    was_used: AtomicBool,
    /// Whether the table lists the connection as evictable. A busy connection is not evicted even so.
    is_evictable: AtomicBool,
}

/// The places of one source.
#[derive(Default)]
struct SourceUsage {
    count: usize,
    /// Connections that were silent at the last check.
    silent: BTreeSet<u64>,
    /// Connections that were idle at the last check.
    idle: BTreeSet<u64>,
}

/// Rank of a source from which a place can be taken: the number of its places, whether one is silent, and its oldest such
/// connection.
type EvictionRank = (usize, bool, Reverse<u64>, Source);

impl SourceUsage {
    /// Returns the rank of this source, if a place can be taken from it.
    fn rank(&self, source: Source) -> Option<EvictionRank> {
        let silent = self.silent.first();
        let oldest = silent.or(self.idle.first())?;
        Some((self.count, silent.is_some(), Reverse(*oldest), source))
    }
}

impl Table {
    /// Changes the usage of a source, and updates the order of sources.
    fn update_usage(&mut self, source: Source, change: impl FnOnce(&mut SourceUsage)) {
        let usage = self.sources.entry(source).or_default();
        let before = usage.rank(source);
        change(usage);
        let (after, count) = (usage.rank(source), usage.count);
        if before != after {
            if let Some(before) = before {
                self.evictable.remove(&before);
            }
            self.evictable.extend(after);
        }
        if count == 0 {
            self.sources.remove(&source);
        }
    }

    fn count(&self, source: Source) -> usize {
        self.sources.get(&source).map_or(0, |usage| usage.count)
    }

    /// Whether a source is within its share of `free` places.
    fn has_room(&self, source: Source, free: usize) -> bool {
        free > 0 && self.count(source) < free.saturating_mul(MAX_SHARE_DIVISOR)
    }

    /// Returns the connection to evict for a new connection of this source.
    fn select_victim(&mut self, source: Source, free: usize) -> Option<u64> {
        if free > 0 {
            // A source that is refused although slots are free has exceeded its share.
            return self.eviction_candidate(source);
        }
        loop {
            let (.., largest) = *self.evictable.last()?;
            if largest != source && self.count(largest) <= self.count(source) {
                return self.eviction_candidate(source);
            }
            // A source without evictable connections is no longer listed.
            if let Some(id) = self.eviction_candidate(largest) {
                return Some(id);
            }
        }
    }

    /// Returns the oldest connection of this source that is silent, or else idle.
    fn eviction_candidate(&mut self, source: Source) -> Option<u64> {
        loop {
            let usage = self.sources.get(&source)?;
            let id = *usage.silent.first().or(usage.idle.first())?;
            let is_silent = usage.silent.contains(&id);
            let activity = self.slots.get(&id)?.activity.clone();
            let is_busy = activity.busy_guards.load(SeqCst) > 0 && {
                // A connection that becomes idle after this point is listed again.
                activity.is_evictable.store(false, SeqCst);
                activity.busy_guards.load(SeqCst) > 0
            };
            if !is_busy {
                activity.is_evictable.store(true, SeqCst);
                if !is_silent || !activity.was_used.load(SeqCst) {
                    return Some(id);
                }
            }
            self.update_usage(source, |usage| {
                usage.silent.remove(&id);
                if is_busy {
                    usage.idle.remove(&id);
                } else {
                    usage.idle.insert(id);
                }
            });
        }
    }

    /// Lists a connection that is no longer busy.
    fn mark_evictable(&mut self, id: u64) {
        let Some(entry) = self.slots.get(&id) else {
            return;
        };
        entry.activity.is_evictable.store(true, SeqCst);
        self.update_usage(entry.source, |usage| {
            usage.idle.insert(id);
        });
    }

    fn remove(&mut self, id: u64) -> Option<ConnectionEntry> {
        let entry = self.slots.remove(&id)?;
        self.update_usage(entry.source, |usage| {
            usage.count -= 1;
            usage.silent.remove(&id);
            usage.idle.remove(&id);
        });
        Some(entry)
    }

    fn insert(&mut self, limit: &ConnectionLimit, source: Source, evictable: bool) -> Slot {
        let id = self.next_id;
        self.next_id += 1;
        let evicted = CancellationToken::new();
        let activity = Arc::new(Activity {
            busy_guards: AtomicUsize::new(usize::from(!evictable)),
            was_used: AtomicBool::new(false),
            is_evictable: AtomicBool::new(evictable),
        });
        let entry = ConnectionEntry {
            source,
            activity: activity.clone(),
            evicted: evicted.clone(),
        };
        self.slots.insert(id, entry);
        self.update_usage(source, |usage| {
            usage.count += 1;
            if evictable {
                usage.silent.insert(id);
            }
        });
        let limit = limit.clone();
        Slot(Arc::new(SlotInner {
            limit,
            id,
            evicted,
            activity,
        }))
    }
}

/// Error of a connection for which no place is free or can be taken from another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many connections")]
pub struct LimitReached;

impl ConnectionLimit {
    /// Creates a limit of `max_connections` connections, with a `name` for the log. `observer` is called for each connection
    /// that is evicted or refused.
    pub fn new(
        name: &'static str,
        max_connections: usize,
        observer: impl Fn(RejectReason) + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(Inner {
            name,
            max_connections,
            table: Mutex::default(),
            observer: Box::new(observer),
        }))
    }

    /// Returns the number of places in use.
    pub fn open_connections(&self) -> usize {
        self.with_table(|table| table.slots.len())
    }

    /// Takes a place at once, if necessary that of another connection.
    ///
    /// # Errors
    /// If there is no place.
    pub fn admit(&self, source: impl Into<Source>) -> Result<Slot, LimitReached> {
        let source = source.into();
        let (admitted, reject_reason) = self.with_table(|table| {
            let free = self.0.max_connections.saturating_sub(table.slots.len());
            if table.has_room(source, free) {
                return (Ok(table.insert(self, source, true)), None);
            }
            let victim = table
                .select_victim(source, free)
                .and_then(|id| table.remove(id));
            if let Some(victim) = victim {
                victim.evicted.cancel();
                self.log_rejection(RejectReason::Evicted, victim.source, table);
                let slot = table.insert(self, source, true);
                (Ok(slot), Some(RejectReason::Evicted))
            } else {
                self.log_rejection(RejectReason::Refused, source, table);
                (Err(LimitReached), Some(RejectReason::Refused))
            }
        });
        if let Some(reject_reason) = reject_reason {
            (self.0.observer)(reject_reason);
        }
        admitted
    }

    /// Waits for a slot. Its connection is not evicted. The calling code limits the wait.
    pub async fn acquire(&self, source: impl Into<Source>) -> Slot {
        let source = source.into();
        let granted = self.with_table(|table| {
            let free = self.0.max_connections.saturating_sub(table.slots.len());
            if !table.waiters.contains_key(&source) && table.has_room(source, free) {
                return Ok(table.insert(self, source, false));
            }
            let (grant, granted) = oneshot::channel();
            if !table.waiters.contains_key(&source) {
                table.source_queue.push_back(source);
            }
            table.waiters.entry(source).or_default().push_back(grant);
            Err(granted)
        });
        match granted {
            Ok(slot) => slot,
            Err(granted) => match granted.await {
                Ok(slot) => slot,
                // The table outlives all waiters and drops no grant.
                Err(_) => std::future::pending().await,
            },
        }
    }

    /// Logs at intervals that connections are rejected, with the source of the last one.
    fn log_rejection(&self, reject_reason: RejectReason, source: Source, table: &mut Table) {
        table.rejected += 1;
        if table
            .last_logged
            .is_some_and(|logged| logged.elapsed() < LOG_INTERVAL)
        {
            return;
        }
        table.last_logged = Some(Instant::now());
        let connections = std::mem::take(&mut table.rejected);
        let (limit, most, held) = (self.0.name, self.0.max_connections, table.count(source));
        let last = reject_reason.as_str();
        tracing::warn!(limit, most, connections, last, %source, held, "connections were rejected, because a limit was reached");
    }

    fn with_table<T>(&self, work: impl FnOnce(&mut Table) -> T) -> T {
        work(&mut self.0.table.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn release(&self, id: u64) {
        let granted = self.with_table(|table| {
            table.remove(id);
            self.grant(table)
        });
        for (grant, slot) in granted {
            // If the waiter is gone, the slot is returned at once.
            let _ = grant.send(slot);
        }
    }

    /// Grants free places to waiting connections.
    fn grant(&self, table: &mut Table) -> Vec<(oneshot::Sender<Slot>, Slot)> {
        let mut granted = Vec::new();
        for _ in 0..table.source_queue.len() {
            let free = self.0.max_connections.saturating_sub(table.slots.len());
            // A source keeps its turn until a slot is free.
            if free == 0 {
                break;
            }
            let Some(source) = table.source_queue.pop_front() else {
                break;
            };
            let Some(queue) = table.waiters.get_mut(&source) else {
                continue;
            };
            // Waiters leave about in the order of their arrival. Others that have left return their place at once.
            while queue.front().is_some_and(oneshot::Sender::is_closed) {
                queue.pop_front();
            }
            let next = if table.has_room(source, free) {
                table.waiters.get_mut(&source).and_then(VecDeque::pop_front)
            } else {
                None
            };
            if let Some(grant) = next {
                granted.push((grant, table.insert(self, source, false)));
            }
            if table.waiters.get(&source).is_some_and(VecDeque::is_empty) {
                table.waiters.remove(&source);
            } else {
                table.source_queue.push_back(source);
            }
        }
        granted
    }
}

/// Place of one connection. Dropping the last clone releases it.
#[derive(Clone, Debug)]
pub struct Slot(Arc<SlotInner>);

#[derive(Debug)]
struct SlotInner {
    limit: ConnectionLimit,
    id: u64,
    evicted: CancellationToken,
    activity: Arc<Activity>,
}

impl SlotInner {
    fn mark_busy(&self) {
        self.activity.busy_guards.fetch_add(1, SeqCst);
        self.activity.was_used.store(true, SeqCst);
    }

    fn mark_idle(&self) {
        let previous = self.activity.busy_guards.fetch_sub(1, SeqCst);
        if previous == 1 && !self.activity.is_evictable.load(SeqCst) {
            self.limit.with_table(|table| table.mark_evictable(self.id));
        }
    }
}

impl Drop for SlotInner {
    fn drop(&mut self) {
        self.limit.release(self.id);
    }
}

/// Guard that protects a connection from eviction.
#[derive(Debug)]
pub struct Busy(Slot);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.0.mark_idle();
    }
}

impl Slot {
    /// Protects the connection from eviction until the returned guard is dropped.
    #[must_use]
    pub fn busy(&self) -> Busy {
        self.0.mark_busy();
        Busy(self.clone())
    }

    /// Protects the connection from eviction permanently, because its peer has authenticated.
    pub fn protect(&self) {
        self.0.mark_busy();
    }

    /// Waits until the place was given to another connection.
    pub async fn evicted(&self) {
        self.0.evicted.cancelled().await;
    }

    /// Runs `work` to its end and returns its result, or returns `None` once the place was given to another connection.
    pub async fn run<T>(&self, work: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        tokio::select! {
            biased;
            done = work => Some(done),
            () = self.evicted() => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn limit(most: usize) -> (ConnectionLimit, Arc<Mutex<Vec<RejectReason>>>) {
        let events = Arc::new(Mutex::new(Vec::new()));
        let heard = events.clone();
        let limit = ConnectionLimit::new("test", most, move |turned| {
            heard.lock().unwrap().push(turned);
        });
        (limit, events)
    }

    fn source(last: u8) -> Source {
        IpAddr::from([192, 0, 2, last]).into()
    }

    fn is_evicted(slot: &Slot) -> bool {
        slot.evicted().now_or_never().is_some()
    }

    #[test]
    fn one_source_leaves_a_quarter_to_others() {
        let (limit, events) = limit(1024);
        let flood: Vec<_> = (0..4_000)
            .filter_map(|_| limit.admit(source(1)).ok())
            .collect();
        assert_eq!(flood.len(), 4_000, "each replaces the oldest");
        assert_eq!(flood.iter().filter(|slot| !is_evicted(slot)).count(), 768);
        assert!(is_evicted(&flood[0]) && !is_evicted(&flood[3_999]));
        let others: Vec<_> = (2..60)
            .map(|last| limit.admit(source(last)).unwrap())
            .collect();
        assert!(others.iter().all(|slot| !is_evicted(slot)));
        let turned = events.lock().unwrap();
        assert!(turned.iter().all(|turned| *turned == RejectReason::Evicted));
        assert_eq!(turned.len(), 4_000 - 768);
    }

    #[test]
    fn busy_connections_are_never_evicted_and_silent_ones_go_first() {
        let (limit, events) = limit(4);
        let [busy, settled, idle] = [(); 3].map(|()| limit.admit(source(1)).unwrap());
        let guard = busy.busy();
        settled.protect();
        drop(idle.busy());
        let silent = limit.admit(source(2)).unwrap();
        // The largest source loses a connection first: a silent one, or else an idle one.
        let third = limit.admit(source(3)).unwrap();
        assert!(is_evicted(&idle) && !is_evicted(&silent));
        third.protect();
        silent.protect();
        assert_eq!(limit.admit(source(4)).unwrap_err(), LimitReached);
        drop(guard);
        let fourth = limit.admit(source(4)).unwrap();
        assert!(is_evicted(&busy) && !is_evicted(&settled));
        assert_eq!(
            *events.lock().unwrap(),
            [
                RejectReason::Evicted,
                RejectReason::Refused,
                RejectReason::Evicted
            ]
        );
        drop((busy, settled, idle, silent, third, fourth));
        assert_eq!(limit.open_connections(), 0);
    }

    #[test]
    fn among_equal_sources_the_oldest_connection_is_evicted() {
        let (limit, _) = limit(64);
        // Many addresses below and above the new one, each with one silent connection.
        let crowd = |number: u16| {
            let [high, low] = number.to_be_bytes();
            let first = if number.is_multiple_of(2) { 10 } else { 203 };
            limit.admit(IpAddr::from([first, 0, high, low])).unwrap()
        };
        let mut held: Vec<_> = (0..64).map(crowd).collect();
        let newcomer = limit.admit(source(1)).unwrap();
        for later in 64..127 {
            held.push(crowd(later));
            assert!(!is_evicted(&newcomer), "{later}");
        }
        held.push(crowd(127));
        assert!(is_evicted(&newcomer), "it is the oldest by now");
        assert_eq!(held.iter().filter(|slot| !is_evicted(slot)).count(), 64);
        // An idle connection that was active is evicted after all silent ones.
        let idle = limit.admit(source(2)).unwrap();
        drop(idle.busy());
        held.extend((128..191).map(crowd));
        assert!(!is_evicted(&idle));
    }

    #[test]
    fn a_source_takes_no_slot_from_a_smaller_one() {
        let (limit, _) = limit(4);
        let many: Vec<_> = (0..3).map(|_| limit.admit(source(1)).unwrap()).collect();
        many.iter().for_each(Slot::protect);
        let few = limit.admit(source(2)).unwrap();
        assert_eq!(limit.admit(source(1)).unwrap_err(), LimitReached);
        assert!(!is_evicted(&few));
        assert!(limit.admit(source(2)).is_ok(), "its own");
    }

    #[tokio::test]
    async fn waiting_sources_take_turns_for_every_queue_length() {
        let (limit, _) = limit(4);
        let mut held: Vec<_> = (0..3)
            .map(|_| limit.acquire(source(1)).now_or_never().unwrap())
            .collect();
        let mut queue: Vec<_> = (0..100)
            .map(|_| Box::pin(limit.acquire(source(1))))
            .collect();
        for waiting in &mut queue {
            held.extend(waiting.now_or_never());
        }
        let other = limit.acquire(source(2)).now_or_never();
        assert!(other.is_some(), "a quarter is free");
        let mut second = Box::pin(limit.acquire(source(3)));
        assert!((&mut second).now_or_never().is_none());
        let full = held.len();
        drop(held.pop());
        drop(held.pop());
        assert!(second.now_or_never().is_some(), "one of {full} and a queue");
        drop(queue);
        drop((held, other));
        assert!(limit.acquire(source(1)).now_or_never().is_some());
    }

    #[test]
    fn a_source_is_an_address_or_the_network_of_one_host() {
        let of = |text: &str| Source::from(text.parse::<IpAddr>().unwrap()).to_string();
        assert_eq!(of("192.0.2.1"), "192.0.2.1");
        assert_eq!(of("::ffff:192.0.2.1"), "192.0.2.1");
        assert_eq!(of("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::/64");
        assert_eq!(Source::from(RemoteAddr::Unix(7)).to_string(), "unix:uid=7");
    }
}
