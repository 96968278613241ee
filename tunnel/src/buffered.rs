//! Counts of the bytes that have arrived at this end and have not been consumed: of a tunnel, and of the whole process.
//!
//! The engine buffers up to a window for each stream whose consumer stalls, and reports the amount only per stream. So this module
//! lists each stream while it can hold bytes, and the code that sizes windows adds the bytes up from time to time. The bytes
//! of a tunnel count into the [`MemoryBudget`] of its process, which covers all tunnels and all other unread bytes of the
//! process.

use crate::{
    engine::FlowControl,
    stall_monitor::{Progress, ProgressMark, StallMonitor, StallSource, StalledStream},
};
use slab::Slab;
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::Instant;

/// Minimum time between two samples of the buffered bytes, while bytes move.
pub const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// The streams of one tunnel that can hold unread bytes.
#[derive(Debug)]
pub(crate) struct BufferedStreams {
    this: Weak<Self>,
    streams: Mutex<Inner>,
    memory_budget: Arc<MemoryBudget>,
    /// Whether the monitor of stalls checks these streams.
    is_checked: AtomicBool,
}

#[derive(Debug)]
struct Inner {
    receivers: Slab<StreamEntry>,
    /// Sending halves that had to wait for the other end's window.
    senders: Slab<Sender>,
    /// Contribution of the streams to the sums of process and node.
    total_share: BudgetShare,
    stalled_share: BudgetShare,
    /// Whether the tunnel has ended: no more bytes arrive, and each stream releases its bytes when its reader is dropped.
    is_ended: bool,
}

#[derive(Debug)]
struct StreamEntry {
    flow: FlowControl,
    /// Bytes that the stream held at the last sample.
    last_buffered: usize,
    progress: Arc<Progress>,
    progress_mark: ProgressMark,
}

#[derive(Debug)]
struct Sender {
    progress: Arc<Progress>,
    progress_mark: ProgressMark,
}

/// Bytes that the streams of a tunnel hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BufferedBytes {
    /// Bytes of all streams.
    pub total: usize,
    /// Bytes of the streams that hold the same amount as at the last sample, which means that they are not being consumed.
    pub stalled: usize,
}

impl BufferedStreams {
    /// Returns the bytes that all streams hold now. Queries each stream, and stores nothing.
    pub(crate) fn total_bytes(&self) -> usize {
        let streams = self.lock();
        let open = streams.receivers.iter();
        open.map(|(_, stream)| stream.flow.used_capacity()).sum()
    }

    /// Creates the list of a tunnel whose node has this budget.
    pub(crate) fn new(memory_budget: Arc<MemoryBudget>, node_budget: &NodeBudget) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            streams: Mutex::new(Inner {
                receivers: Slab::new(),
                senders: Slab::new(),
                total_share: BudgetShare::new(memory_budget.clone()),
                stalled_share: node_budget.share(),
                is_ended: false,
            }),
            memory_budget,
            is_checked: AtomicBool::new(false),
        })
    }

    fn notify_possible_stall(&self) {
        self.memory_budget.stall_monitor.notify_possible_stall(self);
    }

    /// Records that bytes may have arrived since the last sample.
    pub(crate) fn mark_changed(&self) {
        self.memory_budget.stall_monitor.add(self);
    }

    /// Returns the bytes that all streams hold now. Queries each stream, so it is too costly for every poll.
    pub(crate) fn sample(&self) -> BufferedBytes {
        let buffered = self.lock().sample();
        if buffered.total > 0 {
            self.notify_possible_stall();
        }
        buffered
    }

    /// Records that the tunnel has ended. Bytes for a stalled reader stay in memory until the reader is dropped.
    pub(crate) fn mark_ended(&self) {
        let mut streams = self.lock();
        let buffered = streams.sample();
        streams.stalled_share.set(buffered.total);
        streams.is_ended = true;
        drop(streams);
        if buffered.total > 0 {
            self.notify_possible_stall();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StallSource for BufferedStreams {
    fn collect_stalled(&self, now: Instant, found: &mut Vec<StalledStream>) -> bool {
        let mut streams = self.lock();
        let mut has_waiting = false;
        for (_, stream) in &mut streams.receivers {
            let buffered = stream.flow.used_capacity();
            has_waiting |= buffered > 0;
            let since = stream
                .progress_mark
                .update(buffered > 0, &stream.progress, now);
            found.extend(since.map(|since| StalledStream {
                since,
                buffered,
                progress: stream.progress.clone(),
            }));
        }
        for (_, sender) in &mut streams.senders {
            let is_waiting = sender.progress.is_blocked();
            has_waiting |= is_waiting;
            let since = sender
                .progress_mark
                .update(is_waiting, &sender.progress, now);
            found.extend(since.map(|since| StalledStream {
                since,
                buffered: 0,
                progress: sender.progress.clone(),
            }));
        }
        has_waiting
    }

    fn is_checked(&self) -> &AtomicBool {
        &self.is_checked
    }

    fn downgrade(&self) -> Weak<dyn StallSource> {
        self.this.clone()
    }
}

impl Inner {
    fn sample(&mut self) -> BufferedBytes {
        let mut sum = BufferedBytes::default();
        for (_, stream) in &mut self.receivers {
            let buffered = stream.flow.used_capacity();
            sum.total += buffered;
            if buffered == stream.last_buffered {
                sum.stalled += buffered;
            }
            stream.last_buffered = buffered;
        }
        self.total_share.set(sum.total);
        self.stalled_share.set(sum.stalled);
        sum
    }

    fn remove(&mut self, key: usize) -> Option<StreamEntry> {
        let removed = self.receivers.try_remove(key)?;
        if self.is_ended {
            for share in [&mut self.total_share, &mut self.stalled_share] {
                share.set(share.bytes().saturating_sub(removed.last_buffered));
            }
        }
        Some(removed)
    }
}

/// Entry of a stream among those that can hold unread bytes. Dropping it removes the stream.
#[derive(Debug)]
pub(crate) struct BufferedStream {
    buffered_streams: Arc<BufferedStreams>,
    key: usize,
    progress: Arc<Progress>,
}

impl BufferedStream {
    /// Adds a stream.
    pub(crate) fn new(buffered_streams: &Arc<BufferedStreams>, flow: FlowControl) -> Self {
        let progress = Arc::<Progress>::default();
        let stream = StreamEntry {
            flow,
            last_buffered: 0,
            progress: progress.clone(),
            progress_mark: ProgressMark::default(),
        };
        let mut streams = buffered_streams.lock();
        if streams.receivers.is_empty() {
            // Most tunnels have one stream most of the time; a vector begins with the memory of four.
            streams.receivers.reserve_exact(1);
        }
        let (key, is_ended) = (streams.receivers.insert(stream), streams.is_ended);
        drop(streams);
        if is_ended {
            // No further sample reports the bytes that have arrived.
            buffered_streams.notify_possible_stall();
        }
        Self {
            buffered_streams: buffered_streams.clone(),
            key,
            progress,
        }
    }

    pub(crate) fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Ready once the stream is evicted. A stream without an entry never is.
    pub(crate) fn poll_evicted(entry: Option<&Self>, cx: &mut Context<'_>) -> Poll<()> {
        entry.map_or(Poll::Pending, |entry| entry.progress.poll_evicted(cx))
    }
}

impl Drop for BufferedStream {
    fn drop(&mut self) {
        let stream = self.buffered_streams.lock().remove(self.key);
        // Dropped outside of the lock, because it may take the engine's lock.
        drop(stream);
    }
}

/// Entry of a sending half among those that may wait for the other end's window.
#[derive(Debug)]
pub(crate) struct SenderEntry {
    buffered_streams: Arc<BufferedStreams>,
    key: usize,
    progress: Arc<Progress>,
}

impl SenderEntry {
    pub(crate) fn new(buffered_streams: &Arc<BufferedStreams>) -> Self {
        let progress = Arc::<Progress>::default();
        let sender = Sender {
            progress: progress.clone(),
            progress_mark: ProgressMark::default(),
        };
        let key = buffered_streams.lock().senders.insert(sender);
        Self {
            buffered_streams: buffered_streams.clone(),
            key,
            progress,
        }
    }

    /// Records that the sender waits.
    pub(crate) fn mark_blocked(&self) {
        self.progress.set_blocked(true);
        self.buffered_streams.notify_possible_stall();
    }

    pub(crate) fn progress(&self) -> &Progress {
        &self.progress
    }
}

impl Drop for SenderEntry {
    fn drop(&mut self) {
        self.buffered_streams.lock().senders.try_remove(self.key);
    }
}

/// Budget for the unread bytes of a process.
#[derive(Debug)]
pub struct MemoryBudget {
    bytes: AtomicUsize,
    limit: usize,
    stall_monitor: StallMonitor,
}

impl MemoryBudget {
    /// Creates an empty budget of `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self {
            bytes: AtomicUsize::new(0),
            limit,
            stall_monitor: StallMonitor::default(),
        }
    }

    /// Returns the monitor of the streams that may be stalled.
    pub fn stall_monitor(&self) -> &StallMonitor {
        &self.stall_monitor
    }

    /// Returns the number of unread bytes at the last sample of each part.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    /// Returns the maximum number of unread bytes.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Returns the bytes that the moving streams of a tunnel may share, if it has a budget of its own and holds `stalled` bytes.
    /// There are none while at least half of the limit is used.
    pub(crate) fn allowance(&self, budget: usize, stalled: usize) -> usize {
        if self.is_high() {
            return 0;
        }
        budget.saturating_sub(stalled)
    }

    /// Whether windows have to be small, because at least half of the limit is used.
    pub fn is_high(&self) -> bool {
        self.bytes() >= self.limit / 2
    }

    /// Whether the budget has no room for another stream.
    pub fn is_full(&self) -> bool {
        self.bytes() >= self.limit
    }
}

impl Default for MemoryBudget {
    /// Creates a budget without a limit.
    fn default() -> Self {
        Self::new(usize::MAX)
    }
}

/// Budget shared by the tunnels of one node. Their streams together may leave as many bytes unread as one budget allows,
/// however many tunnels an edge has dialled for bulk. Opening a stream wakes the driver of its own tunnel. The driver of
/// another tunnel of the node sees the new stream at its next poll: at its next byte or probe.
#[derive(Debug, Default)]
pub struct NodeBudget {
    streams: AtomicUsize,
    stalled_budget: Arc<MemoryBudget>,
}

impl NodeBudget {
    /// Returns the number of streams that are open in all tunnels of the node.
    pub(crate) fn open_streams(&self) -> usize {
        self.streams.load(Relaxed)
    }

    /// Returns the counter of the open streams.
    pub(crate) fn stream_count(&self) -> &AtomicUsize {
        &self.streams
    }

    /// Returns the bytes that stalled streams hold in all tunnels of the node.
    pub(crate) fn stalled_bytes(&self) -> usize {
        self.stalled_budget.bytes()
    }

    /// Returns the share of one tunnel in the stalled bytes.
    pub(crate) fn share(&self) -> BudgetShare {
        BudgetShare::new(self.stalled_budget.clone())
    }
}

/// Share in the unread bytes, of one tunnel or of one body that is being sent into a tunnel. Dropping it subtracts the share.
#[derive(Debug)]
pub struct BudgetShare {
    memory_budget: Arc<MemoryBudget>,
    bytes: usize,
}

impl BudgetShare {
    /// Creates a share of 0 bytes.
    pub fn new(memory_budget: Arc<MemoryBudget>) -> Self {
        Self {
            memory_budget,
            bytes: 0,
        }
    }

    /// Returns the bytes that the share adds now.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Changes the share to this many bytes.
    pub fn set(&mut self, bytes: usize) {
        let total = &self.memory_budget.bytes;
        if bytes >= self.bytes {
            total.fetch_add(bytes - self.bytes, Relaxed);
        } else {
            total.fetch_sub(self.bytes - bytes, Relaxed);
        }
        self.bytes = bytes;
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pressure_is_the_sum_of_its_parts() {
        let pressure = Arc::new(MemoryBudget::new(100));
        let mut near = BudgetShare::new(pressure.clone());
        let mut far = BudgetShare::new(pressure.clone());
        near.set(30);
        far.set(30);
        assert_eq!(
            (pressure.bytes(), pressure.is_high(), pressure.is_full()),
            (60, true, false)
        );
        near.set(70);
        assert!(pressure.is_full());
        near.set(10);
        drop(far);
        assert_eq!((pressure.bytes(), pressure.is_high()), (10, false));
        drop(near);
        assert_eq!(pressure.bytes(), 0);
        assert!(!MemoryBudget::default().is_high());
    }
}
