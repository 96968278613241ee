//! Load of a tunnel: how many streams, how many bytes, and whether one of them is bulk.
//!
//! Written by the streams as they move bytes, read by the code that selects a tunnel or dials a second one. Only atomics,
//! but for the list of streams that can hold unread bytes: nothing here waits.

use crate::{
    buffered::{
        BufferedBytes, BufferedStream, BufferedStreams, MemoryBudget, NodeBudget, SenderEntry,
    },
    small_frames::{SmallFrameCounter, SmallFrames},
    wire,
};
use futures_util::task::AtomicWaker;
use h2::{FlowControl, Reason};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{sync::Notify, time::Instant};

/// A stream is bulk once it has moved more than this many bytes within [`BULK_SPAN`], unless the edge says otherwise
/// ([`crate::control_stream::EdgeHello::bulk_after`]).
pub const BULK_BYTES: u64 = 1024 * 1024;
/// See [`BULK_BYTES`].
pub const BULK_SPAN: Duration = Duration::from_secs(2);

/// Every tunnel has its control stream open.
const CONTROL: usize = 1;

/// The load of one tunnel.
#[derive(Debug)]
pub struct TunnelLoad {
    began: Instant,
    /// A stream is bulk once it has moved more than this many bytes within [`BULK_SPAN`].
    bulk: AtomicU64,
    /// Open streams in two generations.
    streams: [AtomicUsize; 2],
    /// Generation of streams that are opened now. The first one holds the control stream for good.
    generation: AtomicUsize,
    siblings: Arc<NodeBudget>,
    opened: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
    /// Milliseconds after `began` at which bulk was last seen, plus one; 0 is never.
    bulk_at: AtomicU64,
    bulk_seen: Notify,
    /// Number of the node's streams at which the task that sizes windows is woken.
    crowd: AtomicUsize,
    crowded: AtomicWaker,
    unread: Arc<BufferedStreams>,
    small: Arc<SmallFrames>,
}

impl Default for TunnelLoad {
    fn default() -> Self {
        Self::new(BULK_BYTES)
    }
}

impl TunnelLoad {
    /// A load that calls a stream bulk once it has moved more than `bulk` bytes within [`BULK_SPAN`].
    pub fn new(bulk: u64) -> Self {
        Self::shared(bulk, Arc::default(), Arc::default())
    }

    fn shared(bulk: u64, siblings: Arc<NodeBudget>, pressure: Arc<MemoryBudget>) -> Self {
        Self {
            began: Instant::now(),
            bulk: AtomicU64::new(bulk),
            streams: Default::default(),
            generation: AtomicUsize::new(0),
            opened: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            bulk_at: AtomicU64::new(0),
            bulk_seen: Notify::new(),
            crowd: AtomicUsize::new(usize::MAX),
            crowded: AtomicWaker::new(),
            unread: BufferedStreams::new(pressure, &siblings),
            siblings,
            small: Arc::default(),
        }
    }

    /// The load of a tunnel whose streams count for the process.
    pub(crate) fn of_process(bulk: u64, pressure: Arc<MemoryBudget>) -> Self {
        Self::shared(bulk, Arc::default(), pressure)
    }

    /// The load of one of several tunnels of a node, whose unread bytes count for the process.
    pub(crate) fn among(siblings: Arc<NodeBudget>, pressure: Arc<MemoryBudget>) -> Self {
        Self::shared(BULK_BYTES, siblings, pressure)
    }

    /// From now on calls a stream bulk once it has moved more than `bytes` within [`BULK_SPAN`].
    pub fn set_bulk(&self, bytes: u64) {
        self.bulk.store(bytes, Relaxed);
    }

    /// The tunnel has ended; its readers may be there a while longer.
    pub(crate) fn end(&self) {
        self.unread.end(&self.small);
    }

    /// Returns the budget that the tunnels of the node share.
    pub(crate) fn siblings(&self) -> &NodeBudget {
        &self.siblings
    }

    /// Streams that are open now.
    pub fn streams(&self) -> usize {
        self.streams.iter().map(|part| part.load(Relaxed)).sum()
    }

    /// Returns whether all streams that were open at the previous call have ended, and counts those that are open now for the
    /// next call. The first call returns true. The tunnel's first stream is its control stream and does not count.
    pub fn turn_over(&self) -> bool {
        let ended = self.earlier() == 0;
        if ended {
            self.generation.fetch_xor(1, Relaxed);
        }
        ended
    }

    /// Returns the number of streams that were open at the last [`TunnelLoad::turn_over`] that returned true, and still are.
    pub fn earlier(&self) -> usize {
        match self.generation.load(Relaxed) {
            0 => self.streams[1].load(Relaxed),
            _ => self.streams[0].load(Relaxed).saturating_sub(CONTROL),
        }
    }

    /// Streams opened since the tunnel began.
    pub fn opened(&self) -> u64 {
        self.opened.load(Relaxed)
    }

    /// Payload bytes sent into the tunnel since it began.
    pub fn sent(&self) -> u64 {
        self.sent.load(Relaxed)
    }

    /// Payload bytes received from the tunnel since it began.
    pub fn received(&self) -> u64 {
        self.received.load(Relaxed)
    }

    /// Whether a stream moved bulk within the last [`BULK_SPAN`].
    pub fn is_bulky(&self, now: Instant) -> bool {
        self.bulk_age(now).is_some_and(|age| age <= BULK_SPAN)
    }

    /// How long ago a stream last moved bulk.
    pub fn bulk_age(&self, now: Instant) -> Option<Duration> {
        let at = self.bulk_at.load(Relaxed).checked_sub(1)?;
        Some(now.saturating_duration_since(self.began + Duration::from_millis(at)))
    }

    /// Waits until a stream moves bulk.
    pub async fn bulk(&self) {
        self.bulk_seen.notified().await;
    }

    /// Returns the bytes that have arrived and have not been consumed, without the additional cost of small frames.
    pub fn unread(&self) -> usize {
        self.unread.total()
    }

    /// Returns the bytes that have arrived and have not been consumed. Asks each stream, so it is too costly for every poll.
    pub fn weigh(&self) -> BufferedBytes {
        self.unread.weigh(&self.small)
    }

    /// Returns the counter of small frames.
    pub(crate) fn small(&self) -> &Arc<SmallFrames> {
        &self.small
    }

    pub(crate) fn set_crowd(&self, streams: usize) {
        self.crowd.store(streams, Relaxed);
    }

    pub(crate) fn crowded(&self) -> &AtomicWaker {
        &self.crowded
    }

    fn mark_bulk(&self, now: Instant) {
        let age = now.saturating_duration_since(self.began).as_millis();
        self.bulk_at
            .store(u64::try_from(age).unwrap_or(u64::MAX - 1) + 1, Relaxed);
        self.bulk_seen.notify_one();
    }
}

/// One open stream; dropping the last clone closes the count.
#[derive(Clone, Debug)]
pub(crate) struct OpenStreamGuard(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    load: Arc<TunnelLoad>,
    generation: usize,
    withdrawn: AtomicBool,
}

impl OpenStreamGuard {
    /// Has this end's reset of the stream say that its policy does not allow the stream any more.
    pub(crate) fn withdraw(&self) {
        self.0.withdrawn.store(true, Relaxed);
    }

    /// Counts a stream, unless there are `limit` already.
    pub(crate) fn new(load: &Arc<TunnelLoad>, limit: usize) -> Option<Self> {
        let generation = load.generation.load(Relaxed);
        load.streams[generation].fetch_add(1, Relaxed);
        let crowd = load.siblings.count().fetch_add(1, Relaxed) + 1;
        let open = Self(Arc::new(Inner {
            load: load.clone(),
            generation,
            withdrawn: AtomicBool::new(false),
        }));
        if load.streams() > limit {
            return None;
        }
        load.opened.fetch_add(1, Relaxed);
        if crowd >= load.crowd.load(Relaxed) {
            load.crowded.wake();
        }
        Some(open)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.load.streams[self.generation].fetch_sub(1, Relaxed);
        self.load.siblings.count().fetch_sub(1, Relaxed);
    }
}

/// The bytes of one direction of a stream.
#[derive(Debug)]
pub(crate) struct ByteCounter {
    open: OpenStreamGuard,
    since: Instant,
    recent: u64,
    small: Option<SmallFrameCounter>,
}

impl ByteCounter {
    pub(crate) fn new(open: OpenStreamGuard) -> Self {
        Self {
            open,
            since: Instant::now(),
            recent: 0,
            small: None,
        }
    }

    /// As [`Moved::new`], of the stream with this number, whose small frames are counted.
    pub(crate) fn of(open: OpenStreamGuard, stream: u32) -> Self {
        let small = SmallFrameCounter::new(&open.0.load.small, stream);
        Self {
            small: Some(small),
            ..Self::new(open)
        }
    }

    /// Enters the stream among those that can hold unread bytes.
    pub(crate) fn holds(&self, stream: u32, flow: FlowControl) -> BufferedStream {
        BufferedStream::new(&self.open.0.load.unread, stream, flow)
    }

    /// Streams of the tunnel that are open now.
    pub(crate) fn streams(&self) -> usize {
        self.open.0.load.streams()
    }

    /// The stream that the bytes are of.
    pub(crate) fn open(&self) -> &OpenStreamGuard {
        &self.open
    }

    /// The code by which this end gives the stream up.
    pub(crate) fn code(&self) -> Reason {
        if self.open.0.withdrawn.load(Relaxed) {
            wire::WITHDRAWN
        } else {
            Reason::CANCEL
        }
    }

    /// Enters the stream among those whose senders may wait.
    pub(crate) fn waits(&self) -> SenderEntry {
        SenderEntry::new(&self.open.0.load.unread)
    }

    pub(crate) fn sent(&mut self, bytes: usize) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.open.0.load.sent.fetch_add(bytes, Relaxed);
        self.add(bytes);
    }

    /// A frame was taken, maybe an empty one.
    pub(crate) fn received(&mut self, bytes: usize) {
        if let Some(small) = &self.small {
            small.took(bytes);
        }
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.open.0.load.received.fetch_add(bytes, Relaxed);
        self.add(bytes);
    }

    fn add(&mut self, bytes: u64) {
        self.recent += bytes;
        if self.recent <= self.open.0.load.bulk.load(Relaxed) {
            return;
        }
        let now = Instant::now();
        if now - self.since <= BULK_SPAN {
            self.open.0.load.mark_bulk(now);
        }
        self.since = now;
        self.recent = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stream_is_bulk_while_it_moves_a_mebibyte_in_two_seconds() {
        let load = Arc::new(TunnelLoad::default());
        let mut fast = ByteCounter::new(OpenStreamGuard::new(&load, 9).unwrap());
        fast.received(1024 * 1024);
        assert!(!load.is_bulky(Instant::now()), "exactly 1 MiB is not more");
        fast.received(1);
        assert!(load.is_bulky(Instant::now()));
        tokio::time::advance(Duration::from_millis(2_001)).await;
        assert!(!load.is_bulky(Instant::now()));

        load.set_bulk(1000);
        ByteCounter::new(OpenStreamGuard::new(&load, 9).unwrap()).received(1001);
        assert!(load.is_bulky(Instant::now()), "as at the edge");
        tokio::time::advance(Duration::from_millis(2_001)).await;
        load.set_bulk(BULK_BYTES);

        let mut slow = ByteCounter::new(OpenStreamGuard::new(&load, 9).unwrap());
        for _ in 0..10 {
            tokio::time::advance(Duration::from_secs(1)).await;
            slow.sent(300_000);
        }
        assert!(!load.is_bulky(Instant::now()), "300 kB/s is not bulk");
    }

    #[test]
    fn a_stream_counts_until_its_last_half_is_gone() {
        let load = Arc::new(TunnelLoad::default());
        let open = OpenStreamGuard::new(&load, 1).unwrap();
        assert!(OpenStreamGuard::new(&load, 1).is_none(), "over the limit");
        let half = open.clone();
        drop(open);
        assert_eq!(load.streams(), 1);
        drop(half);
        assert_eq!(load.streams(), 0);
        assert_eq!(load.opened(), 1);
    }

    #[test]
    fn lasting_streams_are_distinguished_from_successive_streams() {
        let load = Arc::new(TunnelLoad::default());
        let _control = OpenStreamGuard::new(&load, 3).unwrap();
        let session = OpenStreamGuard::new(&load, 3).unwrap();
        assert!(load.turn_over());
        let mut request = OpenStreamGuard::new(&load, 3).unwrap();
        assert!(OpenStreamGuard::new(&load, 3).is_none(), "over the limit");
        assert!(!load.turn_over());
        assert_eq!((load.earlier(), load.streams()), (1, 3));
        drop(session);
        for _ in 0..3 {
            assert!(load.turn_over());
            request = OpenStreamGuard::new(&load, 3).unwrap();
        }
        assert!(load.turn_over());
        assert!(!load.turn_over(), "the last one lasts");
        drop(request);
        assert!(load.turn_over());
    }
}
