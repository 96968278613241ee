//! Load of a tunnel: number of streams, number of bytes, and whether one of the streams is bulk.
//!
//! Streams write it as they move bytes. The code that selects a tunnel or dials a second one reads it. Except for the list of
//! streams that can hold unread bytes, the load consists of atomics, so nothing here waits.

use crate::{
    buffered::{
        BufferedBytes, BufferedStream, BufferedStreams, MemoryBudget, NodeBudget, SenderEntry,
    },
    engine::{FlowControl, Reason},
    wire,
};
use futures_util::task::AtomicWaker;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{sync::Notify, time::Instant};

/// Number of bytes. A stream is bulk once it has moved more bytes than this within [`BULK_SPAN`], unless the edge sends
/// another value ([`crate::control_stream::EdgeHello::bulk_after`]).
pub const BULK_BYTES: u64 = 1024 * 1024;
/// Period of the measurement for [`BULK_BYTES`].
pub const BULK_SPAN: Duration = Duration::from_secs(2);

/// Every tunnel has its control stream open.
const CONTROL_STREAMS: usize = 1;

/// The load of one tunnel.
#[derive(Debug)]
pub struct TunnelLoad {
    created_at: Instant,
    /// Number of bytes. A stream is bulk once it has moved more bytes than this within [`BULK_SPAN`].
    bulk_threshold: AtomicU64,
    /// Open streams in two generations.
    open_streams: [AtomicUsize; 2],
    /// Generation of new streams. The first generation holds the control stream permanently.
    generation: AtomicUsize,
    node_budget: Arc<NodeBudget>,
    streams_opened: AtomicU64,
    bytes_sent: AtomicU64,
    bytes_received: AtomicU64,
    /// Time of the last bulk, in milliseconds after `created_at`, plus one; 0 is never.
    last_bulk_ms: AtomicU64,
    bulk_notify: Notify,
    driver_waker: AtomicWaker,
    buffered_streams: Arc<BufferedStreams>,
}

impl Default for TunnelLoad {
    fn default() -> Self {
        Self::new(BULK_BYTES)
    }
}

impl TunnelLoad {
    /// Creates a load in which a stream is bulk once it has moved more than `bulk_threshold` bytes within [`BULK_SPAN`].
    pub fn new(bulk_threshold: u64) -> Self {
        Self::with_budgets(bulk_threshold, Arc::default(), Arc::default())
    }

    fn with_budgets(
        bulk_threshold: u64,
        node_budget: Arc<NodeBudget>,
        memory_budget: Arc<MemoryBudget>,
    ) -> Self {
        Self {
            created_at: Instant::now(),
            bulk_threshold: AtomicU64::new(bulk_threshold),
            open_streams: Default::default(),
            generation: AtomicUsize::new(0),
            streams_opened: AtomicU64::new(0),
            bytes_sent: AtomicU64::new(0),
            bytes_received: AtomicU64::new(0),
            last_bulk_ms: AtomicU64::new(0),
            bulk_notify: Notify::new(),
            driver_waker: AtomicWaker::new(),
            buffered_streams: BufferedStreams::new(memory_budget, &node_budget),
            node_budget,
        }
    }

    /// Creates the load of a tunnel whose unread bytes count against the process's budget.
    pub(crate) fn for_process(bulk_threshold: u64, memory_budget: Arc<MemoryBudget>) -> Self {
        Self::with_budgets(bulk_threshold, Arc::default(), memory_budget)
    }

    /// Creates the load of one of several tunnels of a node. Its unread bytes count against the budgets of the node and of
    /// the process.
    pub(crate) fn for_node(node_budget: Arc<NodeBudget>, memory_budget: Arc<MemoryBudget>) -> Self {
        Self::with_budgets(BULK_BYTES, node_budget, memory_budget)
    }

    /// Changes the number of bytes that a stream must move within [`BULK_SPAN`] to be bulk.
    pub fn set_bulk_threshold(&self, bytes: u64) {
        self.bulk_threshold.store(bytes, Relaxed);
    }

    /// Records that the tunnel has ended. Its readers may exist for some time after that.
    pub(crate) fn mark_ended(&self) {
        self.buffered_streams.mark_ended();
    }

    /// Returns the budget that the tunnels of the node share.
    pub(crate) fn node_budget(&self) -> &NodeBudget {
        &self.node_budget
    }

    /// Returns the number of streams that are open now.
    pub fn open_streams(&self) -> usize {
        self.open_streams
            .iter()
            .map(|part| part.load(Relaxed))
            .sum()
    }

    /// Starts a new generation of streams if all streams that were open at the previous call have ended. Returns whether they
    /// have ended. The first call returns true. The tunnel's first stream is its control stream and does not count.
    pub fn rotate_generation(&self) -> bool {
        let ended = self.earlier_streams() == 0;
        if ended {
            self.generation.fetch_xor(1, Relaxed);
        }
        ended
    }

    /// Returns the number of streams that were open at the last [`TunnelLoad::rotate_generation`] that returned true and are
    /// still open.
    pub fn earlier_streams(&self) -> usize {
        match self.generation.load(Relaxed) {
            0 => self.open_streams[1].load(Relaxed),
            _ => self.open_streams[0]
                .load(Relaxed)
                .saturating_sub(CONTROL_STREAMS),
        }
    }

    /// Returns the number of streams opened since the tunnel began.
    pub fn streams_opened(&self) -> u64 {
        self.streams_opened.load(Relaxed)
    }

    /// Returns the payload bytes sent into the tunnel since it began.
    pub fn bytes_sent(&self) -> u64 {
        self.bytes_sent.load(Relaxed)
    }

    /// Returns the payload bytes received from the tunnel since it began.
    pub fn bytes_received(&self) -> u64 {
        self.bytes_received.load(Relaxed)
    }

    /// Whether a stream moved bulk within the last [`BULK_SPAN`].
    pub fn is_bulk(&self, now: Instant) -> bool {
        self.bulk_age(now).is_some_and(|age| age <= BULK_SPAN)
    }

    /// Returns the time since a stream last moved bulk.
    pub fn bulk_age(&self, now: Instant) -> Option<Duration> {
        let last_bulk_ms = self.last_bulk_ms.load(Relaxed).checked_sub(1)?;
        Some(now.saturating_duration_since(self.created_at + Duration::from_millis(last_bulk_ms)))
    }

    /// Waits until a stream moves bulk.
    pub async fn wait_for_bulk(&self) {
        self.bulk_notify.notified().await;
    }

    /// Returns the bytes that have arrived and have not been consumed.
    pub fn unread_bytes(&self) -> usize {
        self.buffered_streams.total_bytes()
    }

    /// Returns the bytes that have arrived and have not been consumed. Queries each stream, so it is too costly for every
    /// poll.
    pub fn sample_buffered(&self) -> BufferedBytes {
        self.buffered_streams.sample()
    }

    /// Records that bytes may have arrived since the last sample.
    pub(crate) fn mark_buffered_changed(&self) {
        self.buffered_streams.mark_changed();
    }

    pub(crate) fn driver_waker(&self) -> &AtomicWaker {
        &self.driver_waker
    }

    fn mark_bulk(&self, now: Instant) {
        let age = now.saturating_duration_since(self.created_at).as_millis();
        self.last_bulk_ms
            .store(u64::try_from(age).unwrap_or(u64::MAX - 1) + 1, Relaxed);
        self.bulk_notify.notify_one();
    }
}

/// One open stream. Dropping the last clone removes the stream from the count.
#[derive(Clone, Debug)]
pub(crate) struct OpenStreamGuard(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    load: Arc<TunnelLoad>,
    generation: usize,
    opened_at: Instant,
    withdrawn: AtomicBool,
}

impl OpenStreamGuard {
    /// Marks the stream as withdrawn: the code of this end's reset then states that the policy does not allow the stream any
    /// more.
    pub(crate) fn withdraw(&self) {
        self.0.withdrawn.store(true, Relaxed);
    }

    /// Counts a new stream, or returns `None` if `limit` streams are open already.
    pub(crate) fn new(load: &Arc<TunnelLoad>, limit: usize) -> Option<Self> {
        let generation = load.generation.load(Relaxed);
        load.open_streams[generation].fetch_add(1, Relaxed);
        load.node_budget.stream_count().fetch_add(1, Relaxed);
        let guard = Self(Arc::new(Inner {
            load: load.clone(),
            generation,
            opened_at: Instant::now(),
            withdrawn: AtomicBool::new(false),
        }));
        if load.open_streams() > limit {
            return None;
        }
        load.streams_opened.fetch_add(1, Relaxed);
        Some(guard)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.load.open_streams[self.generation].fetch_sub(1, Relaxed);
        self.load.node_budget.stream_count().fetch_sub(1, Relaxed);
    }
}

/// Counter of the bytes in one direction of a stream.
#[derive(Debug)]
pub(crate) struct ByteCounter {
    guard: OpenStreamGuard,
    window_start: Instant,
    window_bytes: u64,
}

impl ByteCounter {
    pub(crate) fn new(guard: OpenStreamGuard) -> Self {
        Self {
            window_start: guard.0.opened_at,
            guard,
            window_bytes: 0,
        }
    }

    /// Adds the stream to those that can hold unread bytes.
    pub(crate) fn register_receiver(&self, flow: FlowControl) -> BufferedStream {
        BufferedStream::new(&self.guard.0.load.buffered_streams, flow)
    }

    /// Returns the guard of the counted stream.
    pub(crate) fn guard(&self) -> &OpenStreamGuard {
        &self.guard
    }

    /// Returns the code with which this end resets the stream.
    pub(crate) fn reset_code(&self) -> Reason {
        if self.guard.0.withdrawn.load(Relaxed) {
            wire::WITHDRAWN
        } else {
            Reason::CANCEL
        }
    }

    /// Adds the stream to those whose senders may wait.
    pub(crate) fn register_sender(&self) -> SenderEntry {
        SenderEntry::new(&self.guard.0.load.buffered_streams)
    }

    pub(crate) fn record_sent(&mut self, bytes: usize) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.guard.0.load.bytes_sent.fetch_add(bytes, Relaxed);
        self.add_bytes(bytes);
    }

    pub(crate) fn record_received(&mut self, bytes: usize) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.guard.0.load.bytes_received.fetch_add(bytes, Relaxed);
        self.add_bytes(bytes);
    }

    fn add_bytes(&mut self, bytes: u64) {
        self.window_bytes += bytes;
        if self.window_bytes <= self.guard.0.load.bulk_threshold.load(Relaxed) {
            return;
        }
        let now = Instant::now();
        if now - self.window_start <= BULK_SPAN {
            self.guard.0.load.mark_bulk(now);
        }
        self.window_start = now;
        self.window_bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stream_is_bulk_while_it_moves_a_mebibyte_in_two_seconds() {
        let load = Arc::new(TunnelLoad::default());
        let mut fast = ByteCounter::new(OpenStreamGuard::new(&load, 9).unwrap());
        fast.record_received(1024 * 1024);
        assert!(!load.is_bulk(Instant::now()), "exactly 1 MiB is not more");
        fast.record_received(1);
        assert!(load.is_bulk(Instant::now()));
        tokio::time::advance(Duration::from_millis(2_001)).await;
        assert!(!load.is_bulk(Instant::now()));

        load.set_bulk_threshold(1000);
        ByteCounter::new(OpenStreamGuard::new(&load, 9).unwrap()).record_received(1001);
        assert!(load.is_bulk(Instant::now()), "as at the edge");
        tokio::time::advance(Duration::from_millis(2_001)).await;
        load.set_bulk_threshold(BULK_BYTES);

        let mut slow = ByteCounter::new(OpenStreamGuard::new(&load, 9).unwrap());
        for _ in 0..10 {
            tokio::time::advance(Duration::from_secs(1)).await;
            slow.record_sent(300_000);
        }
        assert!(!load.is_bulk(Instant::now()), "300 kB/s is not bulk");
    }

    #[test]
    fn a_stream_counts_until_its_last_half_is_gone() {
        let load = Arc::new(TunnelLoad::default());
        let open = OpenStreamGuard::new(&load, 1).unwrap();
        assert!(OpenStreamGuard::new(&load, 1).is_none(), "over the limit");
        let half = open.clone();
        drop(open);
        assert_eq!(load.open_streams(), 1);
        drop(half);
        assert_eq!(load.open_streams(), 0);
        assert_eq!(load.streams_opened(), 1);
    }

    #[test]
    fn lasting_streams_are_distinguished_from_successive_streams() {
        let load = Arc::new(TunnelLoad::default());
        let _control = OpenStreamGuard::new(&load, 3).unwrap();
        let session = OpenStreamGuard::new(&load, 3).unwrap();
        assert!(load.rotate_generation());
        let mut request = OpenStreamGuard::new(&load, 3).unwrap();
        assert!(OpenStreamGuard::new(&load, 3).is_none(), "over the limit");
        assert!(!load.rotate_generation());
        assert_eq!((load.earlier_streams(), load.open_streams()), (1, 3));
        drop(session);
        for _ in 0..3 {
            assert!(load.rotate_generation());
            request = OpenStreamGuard::new(&load, 3).unwrap();
        }
        assert!(load.rotate_generation());
        assert!(!load.rotate_generation(), "the last one lasts");
        drop(request);
        assert!(load.rotate_generation());
    }
}
