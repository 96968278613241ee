//! Counts of the bytes that have arrived at this end and have not been consumed: of a tunnel, and of the whole process.
//!
//! h2 buffers up to a window for each stream whose consumer stalls, and reports the amount only stream by stream. So each
//! stream is entered here while it can hold bytes, and the code that sizes windows adds them up from time to time. The bytes
//! of a tunnel count into the [`MemoryBudget`] of its process, which covers all tunnels together and everything else that
//! waits unread in the process.

use crate::{
    small_frames::SmallFrames,
    stall_monitor::{Progress, ProgressMark, StallMonitor, StallSource, StalledStream},
};
use h2::FlowControl;
use slab::Slab;
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::Instant;

/// Streams are asked what they hold not more often than this, while bytes move.
pub const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// The streams of one tunnel that can hold unread bytes.
#[derive(Debug)]
pub(crate) struct BufferedStreams {
    streams: Mutex<Inner>,
    pressure: Arc<MemoryBudget>,
}

#[derive(Debug)]
struct Inner {
    open: Slab<StreamEntry>,
    /// Those that send, and had to wait for the other end's window.
    senders: Slab<Sender>,
    /// Contribution of the streams to the sums of process and node.
    all: BudgetShare,
    stalled: BudgetShare,
    /// Nothing arrives any more, and each gives back what it holds when its reader goes.
    ended: bool,
}

#[derive(Debug)]
struct StreamEntry {
    id: u32,
    flow: FlowControl,
    /// Bytes that the stream held at the last look.
    held: usize,
    progress: Arc<Progress>,
    mark: ProgressMark,
}

#[derive(Debug)]
struct Sender {
    progress: Arc<Progress>,
    mark: ProgressMark,
}

/// Bytes that the streams of a tunnel hold, with the additional cost of their small frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BufferedBytes {
    /// All of them.
    pub all: usize,
    /// Bytes of the streams that hold just as much as the last time: they are not being consumed.
    pub stalled: usize,
}

impl BufferedStreams {
    /// Bytes that all streams hold now. Asks each of them, and remembers nothing.
    pub(crate) fn total(&self) -> usize {
        let streams = self.streams();
        let open = streams.open.iter();
        open.map(|(_, stream)| stream.flow.used_capacity()).sum()
    }

    /// Of a tunnel among `siblings`.
    pub(crate) fn new(pressure: Arc<MemoryBudget>, siblings: &NodeBudget) -> Arc<Self> {
        let unread = Arc::new(Self {
            streams: Mutex::new(Inner {
                open: Slab::new(),
                senders: Slab::new(),
                all: BudgetShare::new(pressure.clone()),
                stalled: siblings.part(),
                ended: false,
            }),
            pressure,
        });
        let source: Arc<dyn StallSource> = unread.clone();
        unread.pressure.stalls.add(Arc::downgrade(&source));
        unread
    }

    /// Returns the bytes that all streams hold now. Asks each of them, so it is too costly for every poll.
    pub(crate) fn weigh(&self, small: &SmallFrames) -> BufferedBytes {
        let held = self.streams().weigh(small);
        if held.all > 0 {
            self.pressure.stalls.may_begin();
        }
        held
    }

    /// The tunnel has ended: what arrived for a reader that stalls is in memory until he goes.
    pub(crate) fn end(&self, small: &SmallFrames) {
        let mut streams = self.streams();
        let held = streams.weigh(small);
        streams.stalled.set(held.all);
        streams.ended = true;
    }

    fn streams(&self) -> MutexGuard<'_, Inner> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StallSource for BufferedStreams {
    fn stalled(&self, now: Instant, found: &mut Vec<StalledStream>) {
        let mut streams = self.streams();
        for (_, stream) in &mut streams.open {
            let held = stream.flow.used_capacity();
            let since = stream.mark.look(held > 0, &stream.progress, now);
            found.extend(since.map(|since| StalledStream {
                since,
                held,
                progress: stream.progress.clone(),
            }));
        }
        for (_, sender) in &mut streams.senders {
            let waits = sender.progress.is_blocked();
            let since = sender.mark.look(waits, &sender.progress, now);
            found.extend(since.map(|since| StalledStream {
                since,
                held: 0,
                progress: sender.progress.clone(),
            }));
        }
    }
}

impl Inner {
    fn weigh(&mut self, small: &SmallFrames) -> BufferedBytes {
        let mut sum = BufferedBytes::default();
        for (_, stream) in &mut self.open {
            // After windows have shrunk, a peer may wait for capacity that the reader has already released.
            // h2 sends that update only with the next release, so this releases 0 bytes for streams without held bytes.
            if stream.flow.used_capacity() == 0 {
                let _ = stream.flow.release_capacity(0);
            }
            let held = stream.flow.used_capacity() + small.cost(stream.id);
            sum.all += held;
            if held == stream.held {
                sum.stalled += held;
            }
            stream.held = held;
        }
        self.all.set(sum.all);
        self.stalled.set(sum.stalled);
        sum
    }

    fn remove(&mut self, key: usize) -> Option<StreamEntry> {
        let gone = self.open.try_remove(key)?;
        if self.ended {
            for part in [&mut self.all, &mut self.stalled] {
                part.set(part.bytes().saturating_sub(gone.held));
            }
        }
        Some(gone)
    }
}

/// A stream's place among those that can hold unread bytes.
#[derive(Debug)]
pub(crate) struct BufferedStream {
    unread: Arc<BufferedStreams>,
    key: usize,
    progress: Arc<Progress>,
}

impl BufferedStream {
    /// Enters a stream. It has to leave before its last other handle does, or it would never be given up.
    pub(crate) fn new(unread: &Arc<BufferedStreams>, id: u32, flow: FlowControl) -> Self {
        let progress = Arc::<Progress>::default();
        let stream = StreamEntry {
            id,
            flow,
            held: 0,
            progress: progress.clone(),
            mark: ProgressMark::default(),
        };
        let key = unread.streams().open.insert(stream);
        Self {
            unread: unread.clone(),
            key,
            progress,
        }
    }

    pub(crate) fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }
}

impl Drop for BufferedStream {
    fn drop(&mut self) {
        let stream = self.unread.streams().remove(self.key);
        // Dropped outside of the lock, because it may take h2's lock.
        drop(stream);
    }
}

/// A sender's place among those that may wait for the other end's window.
#[derive(Debug)]
pub(crate) struct SenderEntry {
    unread: Arc<BufferedStreams>,
    key: usize,
    progress: Arc<Progress>,
}

impl SenderEntry {
    pub(crate) fn new(unread: &Arc<BufferedStreams>) -> Self {
        let progress = Arc::<Progress>::default();
        let sender = Sender {
            progress: progress.clone(),
            mark: ProgressMark::default(),
        };
        let key = unread.streams().senders.insert(sender);
        Self {
            unread: unread.clone(),
            key,
            progress,
        }
    }

    /// Notes that the sender waits.
    pub(crate) fn blocked(&self) {
        self.progress.set_blocked(true);
        self.unread.pressure.stalls.may_begin();
    }

    pub(crate) fn progress(&self) -> &Progress {
        &self.progress
    }
}

impl Drop for SenderEntry {
    fn drop(&mut self) {
        self.unread.streams().senders.try_remove(self.key);
    }
}

/// Unread bytes of a process, and how many there may be.
#[derive(Debug)]
pub struct MemoryBudget {
    bytes: AtomicUsize,
    bound: usize,
    stalls: StallMonitor,
}

impl MemoryBudget {
    /// None yet; `bound` bytes at most.
    pub fn new(bound: usize) -> Self {
        Self {
            bytes: AtomicUsize::new(0),
            bound,
            stalls: StallMonitor::default(),
        }
    }

    /// The streams that may stand still.
    pub fn stalls(&self) -> &StallMonitor {
        &self.stalls
    }

    /// Bytes that were unread when each part last looked.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    /// Bytes that may be unread.
    pub fn bound(&self) -> usize {
        self.bound
    }

    /// Whether windows have to be small: half of the bound is taken.
    pub fn is_high(&self) -> bool {
        self.bytes() >= self.bound / 2
    }

    /// Whether there is room for no further stream.
    pub fn is_full(&self) -> bool {
        self.bytes() >= self.bound
    }
}

impl Default for MemoryBudget {
    /// Without a bound.
    fn default() -> Self {
        Self::new(usize::MAX)
    }
}

/// Budget shared by the tunnels of one node. Their streams may leave unread as much as one budget allows, however many
/// tunnels bulk has added. Opening a stream wakes the driver of its own tunnel. A sibling notices a crowd when it is polled
/// next, at its next byte or probe.
#[derive(Debug, Default)]
pub struct NodeBudget {
    streams: AtomicUsize,
    stalled: Arc<MemoryBudget>,
}

impl NodeBudget {
    /// Streams that are open in all of them.
    pub(crate) fn streams(&self) -> usize {
        self.streams.load(Relaxed)
    }

    /// One more, or one less.
    pub(crate) fn count(&self) -> &AtomicUsize {
        &self.streams
    }

    /// Bytes that stalled streams hold, in all of them.
    pub(crate) fn stalled(&self) -> usize {
        self.stalled.bytes()
    }

    /// Returns the share of one tunnel in the stalled bytes.
    pub(crate) fn part(&self) -> BudgetShare {
        BudgetShare::new(self.stalled.clone())
    }
}

/// Share of one tunnel, or of one body on its way into a tunnel, in the pressure. Dropping it subtracts the share.
#[derive(Debug)]
pub struct BudgetShare {
    pressure: Arc<MemoryBudget>,
    bytes: usize,
}

impl BudgetShare {
    /// Nothing yet.
    pub fn new(pressure: Arc<MemoryBudget>) -> Self {
        Self { pressure, bytes: 0 }
    }

    /// Returns the bytes that the share adds now.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds so much from now on.
    pub fn set(&mut self, bytes: usize) {
        let all = &self.pressure.bytes;
        if bytes >= self.bytes {
            all.fetch_add(bytes - self.bytes, Relaxed);
        } else {
            all.fetch_sub(self.bytes - bytes, Relaxed);
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
