//! Eviction of streams that stand still while memory runs short.
//!
//! A stream stands still when bytes wait for its consumer and the consumer takes none. Each such stream holds memory here,
//! in the kernel's socket buffers, and in those of an upstream on the same machine, which no window of ours bounds. The
//! kernel has one pool of memory for all TCP sockets (`net.ipv4.tcp_mem`). Once the pool is empty, the tunnel's own socket
//! gets no memory either, and every stream of the node hangs. So [`guard`] resets the streams that have stood still for
//! longest, as many as needed, long before that.

use crate::{buffered::BufferedStreams, stream::StreamSender};
use causeway_rt::tcp_memory::TcpMemory;
use futures_util::task::AtomicWaker;
use std::{
    cmp::Reverse,
    future::poll_fn,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    sync::Notify,
    time::{Instant, sleep},
};

/// Memory of a stream that stands still, in bytes, besides what waits in its window: the buffers of HTTP and TLS. Stalled
/// downloads cost 200 KiB each at the gateway, and 270 KiB at the edge.
pub const STREAM_OVERHEAD_BYTES: usize = 320 << 10;
/// Memory of the kernel that a stream can hold on one machine, in bytes: the sum to which the default `net.ipv4.tcp_wmem`
/// and `tcp_rmem` let an upstream's send buffer and the edge's receive buffer grow.
const MAX_SOCKET_BUFFERS: usize = (4 << 20) + (6 << 20);
/// Interval between two looks while streams may stand still.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Time that a stream stands still before it may be evicted. Shorter pauses are those of readers on long links.
const MIN_STALL: Duration = Duration::from_millis(100);
/// The same while the kernel's memory has only passed its bound, maybe because of other programs, and not yet half as much again.
const SLOW_AFTER: Duration = Duration::from_secs(5);
/// Looks without a stream that stands still, after which the guard rests.
const IDLE_CHECKS: u32 = 20;

/// Movement of one direction of a stream, and whether the stream was evicted.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    moved: AtomicUsize,
    /// The sender waits for the peer's window.
    blocked: AtomicBool,
    /// The stream stands still: its holder also looks whether the other end has evicted it.
    still: AtomicBool,
    /// A plain answer, whose reader has a bound of its own ([`Bounds::patience`]).
    answer: AtomicBool,
    evicted: AtomicBool,
    waker: AtomicWaker,
}

impl Progress {
    /// Counts a chunk that moved.
    pub(crate) fn moved(&self) {
        self.moved.fetch_add(1, Relaxed);
    }

    pub(crate) fn set_blocked(&self, blocked: bool) {
        self.blocked.store(blocked, Relaxed);
    }

    pub(crate) fn is_blocked(&self) -> bool {
        self.blocked.load(Relaxed)
    }

    /// Ready once the stream is evicted.
    pub(crate) fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.waker.register(cx.waker());
        if self.evicted.load(Relaxed) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    pub(crate) fn is_evicted(&self) -> bool {
        self.evicted.load(Relaxed)
    }

    /// Has the holder look whether the other end has evicted the stream.
    fn mark_stalled(&self) {
        if !self.still.swap(true, Relaxed) {
            self.waker.wake();
        }
    }

    fn evict(&self) {
        self.evicted.store(true, Relaxed);
        self.waker.wake();
    }
}

/// Handle by which the task that holds a stream learns that the stream is evicted. The task has to drop the stream then.
#[derive(Clone, Debug)]
pub struct Eviction {
    progress: Arc<Progress>,
    /// The near half, which has ended, and reports a reset by the other end.
    send: Arc<Mutex<Option<StreamSender>>>,
}

impl Eviction {
    pub(crate) fn new(progress: &Arc<Progress>) -> Self {
        Self {
            progress: progress.clone(),
            send: Arc::default(),
        }
    }

    /// Also listens to evictions by the other end, of which a reader that takes nothing does not hear. `send` has ended.
    pub fn attach_sender(&self, send: StreamSender) {
        *self.send() = Some(send);
    }

    /// Drops the half that was given to [`Eviction::attach_sender`]: the stream has ended for its holder.
    pub fn release(&self) {
        let send = self.send().take();
        drop(send);
    }

    /// Ready once the stream is evicted, by this end or the other one. One task at a time is woken.
    pub fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.progress.poll_evicted(cx).is_ready() {
            return Poll::Ready(());
        }
        if !self.progress.still.load(Relaxed) {
            return Poll::Pending;
        }
        let mut send = self.send();
        match send.as_mut().map(|send| send.poll_reset(cx)) {
            Some(Poll::Ready(error)) if error.is_eviction() => {
                self.progress.evicted.store(true, Relaxed);
                Poll::Ready(())
            }
            // What came before another end is still good, and the reader hears of the end behind it.
            Some(Poll::Ready(_)) => {
                *send = None;
                Poll::Pending
            }
            Some(Poll::Pending) | None => Poll::Pending,
        }
    }

    /// Waits until the stream is evicted.
    pub async fn evicted(&self) {
        poll_fn(|cx| self.poll_evicted(cx)).await;
    }

    /// Whether the stream is evicted.
    pub fn is_evicted(&self) -> bool {
        self.progress.is_evicted()
    }

    /// Evicts the stream, for another reason than memory.
    pub fn evict(&self) {
        self.progress.evict();
    }

    /// Makes the stream subject to [`Bounds::patience`].
    pub fn answer(&self) {
        self.progress.answer.store(true, Relaxed);
    }

    fn send(&self) -> MutexGuard<'_, Option<StreamSender>> {
        self.send.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Since when one direction of a stream stands still, by comparison of two looks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ProgressMark {
    moved: usize,
    since: Option<Instant>,
}

impl ProgressMark {
    /// Looks at a direction in which bytes wait, or none do. Returns since when nothing has moved.
    pub(crate) fn look(
        &mut self,
        waits: bool,
        progress: &Progress,
        now: Instant,
    ) -> Option<Instant> {
        let moved = progress.moved.load(Relaxed);
        if !waits {
            self.since = None;
        } else if self.since.is_none() || moved != self.moved {
            *self = Self {
                moved,
                since: Some(now),
            };
        }
        self.since
    }
}

/// A stream that stands still.
#[derive(Clone, Debug)]
pub(crate) struct StalledStream {
    pub(crate) since: Instant,
    /// Bytes that wait at this end.
    pub(crate) held: usize,
    pub(crate) progress: Arc<Progress>,
}

impl StalledStream {
    fn cost(&self) -> usize {
        self.held + STREAM_OVERHEAD_BYTES
    }
}

/// Streams of a process that may stand still.
#[derive(Debug, Default)]
pub struct StallMonitor {
    tunnels: Mutex<Vec<Weak<BufferedStreams>>>,
    /// Streams that stood still at the last look.
    count: AtomicUsize,
    /// The guard looks regularly, and need not be woken.
    looking: AtomicBool,
    begun: Notify,
}

impl StallMonitor {
    /// Adds the streams of a tunnel, until they are dropped.
    pub(crate) fn add(&self, tunnel: &Arc<BufferedStreams>) {
        let mut tunnels = self.tunnels();
        if tunnels.len() == tunnels.capacity() {
            tunnels.retain(|tunnel| tunnel.strong_count() > 0);
        }
        tunnels.push(Arc::downgrade(tunnel));
    }

    /// Wakes the guard, since a stream may stand still.
    pub(crate) fn may_begin(&self) {
        if !self.looking.load(Relaxed) {
            self.begun.notify_one();
        }
    }

    /// Streams that stood still at the last look.
    pub fn count(&self) -> usize {
        self.count.load(Relaxed)
    }

    /// Streams that stand still now, the longest first.
    fn look(&self, now: Instant) -> Vec<StalledStream> {
        let mut tunnels = self.tunnels();
        tunnels.retain(|tunnel| tunnel.strong_count() > 0);
        let tunnels: Vec<_> = tunnels.iter().filter_map(Weak::upgrade).collect();
        let mut stalled = Vec::new();
        for tunnel in tunnels {
            tunnel.stalled(now, &mut stalled);
        }
        self.count.store(stalled.len(), Relaxed);
        stalled.sort_unstable_by_key(|stream| (stream.since, Reverse(stream.held)));
        stalled
    }

    fn tunnels(&self) -> MutexGuard<'_, Vec<Weak<BufferedStreams>>> {
        self.tunnels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bounds on what streams that stand still may cost.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Memory of this process, in bytes.
    pub memory: usize,
    /// The kernel's memory for TCP, in bytes, as the kernel counts it for all processes; half of where pressure begins if absent.
    pub tcp_memory: Option<usize>,
    /// Time that the reader of a plain answer may take nothing.
    pub patience: Option<Duration>,
}

/// Reason of an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shortage {
    /// This process's own memory ([`Bounds::memory`]).
    Memory,
    /// The kernel's memory for TCP ([`Bounds::tcp_memory`]).
    TcpMemory,
    /// The reader took nothing for too long ([`Bounds::patience`]).
    Time,
}

impl Shortage {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Memory, Self::TcpMemory, Self::Time];

    /// The word in logs and metrics.
    pub fn word(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::TcpMemory => "tcp_memory",
            Self::Time => "time",
        }
    }
}

/// Number of the `stalled` streams, the longest first, whose eviction brings `used` bytes of the kernel's memory below
/// `bound`. The kernel does not tell how much of it belongs to which stream, so each is taken to hold an equal part of all.
/// Streams that cannot hold an eighth of it together stay, since other programs use that memory and evicting the streams
/// would free too little.
fn excess_of_kernel(stalled: usize, used: usize, bound: usize) -> usize {
    let over = used.saturating_sub(bound);
    if over == 0 || stalled.saturating_mul(MAX_SOCKET_BUFFERS) < used / 8 {
        return 0;
    }
    stalled.saturating_mul(over).div_ceil(used).min(stalled)
}

/// Number of streams, the longest first, whose eviction brings what all cost below `bound`.
fn excess_of_process(stalled: &[StalledStream], bound: usize) -> usize {
    let mut left: usize = stalled.iter().map(StalledStream::cost).sum();
    stalled
        .iter()
        .take_while(|stream| {
            let over = left > bound;
            left -= stream.cost();
            over
        })
        .count()
}

/// Runs for as long as the process has streams: evicts those that have stood still for longest whenever a bound is passed.
pub async fn guard(
    stalls: &StallMonitor,
    bounds: Bounds,
    mut evicted: impl FnMut(Shortage, usize),
) {
    let memory = TcpMemory::open(bounds.tcp_memory);
    loop {
        stalls.begun.notified().await;
        stalls.looking.store(true, Relaxed);
        let mut quiet = 0;
        while quiet < IDLE_CHECKS {
            let now = Instant::now();
            let stalled = stalls.look(now);
            quiet = if stalled.is_empty() { quiet + 1 } else { 0 };
            for (shortage, count) in relieve(&stalled, now, &bounds, memory.as_ref()) {
                evicted(shortage, count);
            }
            sleep(CHECK_INTERVAL).await;
        }
        stalls.looking.store(false, Relaxed);
        // What began between the last look and the line above has told nobody.
        stalls.may_begin_unless_idle();
    }
}

impl StallMonitor {
    fn may_begin_unless_idle(&self) {
        if !self.look(Instant::now()).is_empty() {
            self.begun.notify_one();
        }
    }
}

/// Evicts what passes the bounds.
fn relieve(
    stalled: &[StalledStream],
    now: Instant,
    bounds: &Bounds,
    memory: Option<&TcpMemory>,
) -> Vec<(Shortage, usize)> {
    let ripe = stalled.partition_point(|stream| now - stream.since >= MIN_STALL);
    let ripe = &stalled[..ripe];
    for stream in ripe {
        stream.progress.mark_stalled();
    }
    if ripe.is_empty() {
        return Vec::new();
    }
    let kernel = memory.map_or(0, |memory| {
        let used = memory.used().unwrap_or_default();
        let slow = ripe.partition_point(|stream| now - stream.since >= SLOW_AFTER);
        let bound = memory.bound();
        let soon = excess_of_kernel(stalled.len(), used, bound.saturating_add(bound / 2));
        let late = excess_of_kernel(stalled.len(), used, bound);
        soon.min(ripe.len()).max(late.min(slow))
    });
    let process = excess_of_process(stalled, bounds.memory).min(ripe.len());
    let (shortage, count) = if kernel >= process {
        (Shortage::TcpMemory, kernel)
    } else {
        (Shortage::Memory, process)
    };
    let (gone, stay) = ripe.split_at(count);
    for stream in gone {
        stream.progress.evict();
    }
    let mut late = 0;
    if let Some(patience) = bounds.patience {
        let is_late = |stream: &&StalledStream| {
            stream.progress.answer.load(Relaxed) && now - stream.since >= patience
        };
        for stream in stay.iter().filter(is_late) {
            stream.progress.evict();
            late += 1;
        }
    }
    let all = [(shortage, count), (Shortage::Time, late)];
    all.into_iter().filter(|(_, count)| *count > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stalled(held: &[usize]) -> Vec<StalledStream> {
        let since = Instant::now();
        held.iter()
            .map(|held| StalledStream {
                since,
                held: *held,
                progress: Arc::default(),
            })
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn as_many_streams_are_evicted_as_the_bound_needs() {
        let streams = stalled(&[0, 0, 0, 0]);
        assert_eq!(excess_of_process(&streams, 4 * STREAM_OVERHEAD_BYTES), 0);
        assert_eq!(
            excess_of_process(&streams, 4 * STREAM_OVERHEAD_BYTES - 1),
            1
        );
        assert_eq!(excess_of_process(&streams, STREAM_OVERHEAD_BYTES), 3);
        assert_eq!(excess_of_process(&streams, 0), 4);
        assert_eq!(excess_of_kernel(100, 50, 50), 0);
        assert_eq!(excess_of_kernel(100, 100, 75), 25);
        assert_eq!(excess_of_kernel(3, 101, 100), 1, "at least one");
        assert_eq!(excess_of_kernel(0, 101, 100), 0);
        assert_eq!(excess_of_kernel(100, 8_000 << 20, 0), 100);
        assert_eq!(excess_of_kernel(99, 8_000 << 20, 0), 0, "others hold it");
    }

    #[tokio::test(start_paused = true)]
    async fn the_streams_that_stood_still_for_longest_go_first_and_short_pauses_are_nobodys_end() {
        let bounds = Bounds {
            memory: STREAM_OVERHEAD_BYTES,
            tcp_memory: None,
            patience: None,
        };
        let old = stalled(&[0, 0]);
        tokio::time::advance(MIN_STALL).await;
        let young = stalled(&[0, 0]);
        let all: Vec<_> = old.iter().chain(&young).cloned().collect();
        let gone = relieve(&all, Instant::now(), &bounds, None);
        assert_eq!(gone, [(Shortage::Memory, 2)]);
        assert!(old.iter().all(|stream| stream.progress.is_evicted()));
        assert!(!young.iter().any(|stream| stream.progress.is_evicted()));
    }

    #[tokio::test(start_paused = true)]
    async fn answers_that_nobody_takes_have_a_time_and_sessions_have_none() {
        let bounds = Bounds {
            memory: usize::MAX,
            tcp_memory: None,
            patience: Some(Duration::from_mins(1)),
        };
        let streams = stalled(&[0, 0]);
        Eviction::new(&streams[1].progress).answer();
        tokio::time::advance(Duration::from_secs(59)).await;
        assert!(relieve(&streams, Instant::now(), &bounds, None).is_empty());
        tokio::time::advance(Duration::from_secs(1)).await;
        let gone = relieve(&streams, Instant::now(), &bounds, None);
        assert_eq!(gone, [(Shortage::Time, 1)]);
        assert!(streams[1].progress.is_evicted());
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_takes_something_begins_anew() {
        let (progress, mut mark) = (Progress::default(), ProgressMark::default());
        let began = Instant::now();
        assert_eq!(mark.look(true, &progress, began), Some(began));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(mark.look(true, &progress, Instant::now()), Some(began));
        progress.moved();
        let later = Instant::now();
        assert_eq!(mark.look(true, &progress, later), Some(later));
        assert_eq!(mark.look(false, &progress, later), None);
    }
}
