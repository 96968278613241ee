//! Progress of streams, and the list of the stalled streams of a process.

use futures_util::task::AtomicWaker;
use std::{
    cmp::Reverse,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{
            AtomicBool, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
            fence,
        },
    },
    task::{Context, Poll},
};
use tokio::{sync::Notify, time::Instant};

/// Progress of one direction of a stream, and whether the stream was evicted.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    chunks_moved: AtomicUsize,
    /// Whether the sender waits for the peer's window.
    is_blocked: AtomicBool,
    /// Whether the stream is stalled. Its holder then also checks whether the other end has evicted it.
    is_stalled: AtomicBool,
    /// Whether the stream is a plain response. Its reader has a time limit of its own
    /// ([`crate::eviction::Bounds::response_timeout`]).
    is_response: AtomicBool,
    is_evicted: AtomicBool,
    waker: AtomicWaker,
}

impl Progress {
    /// Counts a chunk that moved.
    pub(crate) fn record_chunk(&self) {
        self.chunks_moved.fetch_add(1, Relaxed);
    }

    pub(crate) fn set_blocked(&self, blocked: bool) {
        self.is_blocked.store(blocked, Relaxed);
    }

    pub(crate) fn is_blocked(&self) -> bool {
        self.is_blocked.load(Relaxed)
    }

    /// Ready once the stream is evicted.
    pub(crate) fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.waker.register(cx.waker());
        if self.is_evicted.load(Relaxed) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    pub(crate) fn is_evicted(&self) -> bool {
        self.is_evicted.load(Relaxed)
    }

    /// Whether the stream is stalled, so that its holder also checks for an eviction by the other end.
    pub(crate) fn is_stalled(&self) -> bool {
        self.is_stalled.load(Relaxed)
    }

    /// Records that the other end has evicted the stream. The holder of the stream calls this.
    pub(crate) fn set_evicted(&self) {
        self.is_evicted.store(true, Relaxed);
    }

    /// Whether the reader has a time limit of its own.
    pub(crate) fn is_response(&self) -> bool {
        self.is_response.load(Relaxed)
    }

    pub(crate) fn mark_response(&self) {
        self.is_response.store(true, Relaxed);
    }

    /// Marks the stream as stalled, and wakes its holder to check for an eviction by the other end.
    pub(crate) fn mark_stalled(&self) {
        if !self.is_stalled.swap(true, Relaxed) {
            self.waker.wake();
        }
    }

    pub(crate) fn evict(&self) {
        self.is_evicted.store(true, Relaxed);
        self.waker.wake();
    }
}

/// Time since which one direction of a stream is stalled, by comparison of two samples.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ProgressMark {
    chunks_moved: usize,
    since: Option<Instant>,
}

impl ProgressMark {
    /// Samples a direction. `is_waiting` states whether bytes wait in it. Returns the time since which none has moved.
    pub(crate) fn update(
        &mut self,
        is_waiting: bool,
        progress: &Progress,
        now: Instant,
    ) -> Option<Instant> {
        let moved = progress.chunks_moved.load(Relaxed);
        if !is_waiting {
            self.since = None;
        } else if self.since.is_none() || moved != self.chunks_moved {
            *self = Self {
                chunks_moved: moved,
                since: Some(now),
            };
        }
        self.since
    }
}

/// A stalled stream.
#[derive(Clone, Debug)]
pub(crate) struct StalledStream {
    pub(crate) since: Instant,
    /// Bytes that wait at this end.
    pub(crate) buffered: usize,
    pub(crate) progress: Arc<Progress>,
}

/// Streams of a tunnel, some of which may be stalled.
pub(crate) trait StallSource: fmt::Debug + Send + Sync {
    /// Adds the stalled streams: bytes wait in them and did so at the last check, and none has moved since. Returns whether bytes wait
    /// in any stream.
    fn collect_stalled(&self, now: Instant, found: &mut Vec<StalledStream>) -> bool;

    /// Returns the mark of a source that the monitor checks.
    fn is_checked(&self) -> &AtomicBool;

    /// Returns a reference to this source for the monitor.
    fn downgrade(&self) -> Weak<dyn StallSource>;
}

/// Streams of a process that may be stalled.
#[derive(Debug, Default)]
pub struct StallMonitor {
    /// Sources in which bytes waited at the last check, or were reported since. All others are idle, and there may be thousands.
    checked: Mutex<Vec<Weak<dyn StallSource>>>,
    /// Number of stalled streams at the last check.
    stalled_count: AtomicUsize,
    /// Whether the guard checks regularly and needs no wake-up.
    pub(crate) is_checking: AtomicBool,
    pub(crate) stall_notify: Notify,
}

impl StallMonitor {
    /// Reports that bytes wait in a stream of this source, and wakes the guard, because the stream may be stalled.
    pub(crate) fn notify_possible_stall(&self, source: &dyn StallSource) {
        self.add(source);
        if !self.is_checking.load(Relaxed) {
            self.stall_notify.notify_one();
        }
    }

    /// Adds a source in which bytes may wait to those that the guard checks, whenever it checks.
    pub(crate) fn add(&self, source: &dyn StallSource) {
        // Either the guard sees the waiting bytes, or this function sees that the guard has removed the mark.
        fence(SeqCst);
        let is_checked = source.is_checked();
        if !is_checked.load(Relaxed) && !is_checked.swap(true, Relaxed) {
            let mut checked = self.checked();
            // While the guard sleeps, nothing else removes sources that are gone.
            if checked.len() == checked.capacity() {
                checked.retain(|source| source.strong_count() > 0);
            }
            checked.push(source.downgrade());
        }
    }

    /// Returns the number of stalled streams at the last check.
    pub fn stalled_count(&self) -> usize {
        self.stalled_count.load(Relaxed)
    }

    /// Returns the streams that are stalled now, the longest stalled first. Sources without waiting bytes are checked again once they
    /// report some.
    pub(crate) fn sample_stalled(&self, now: Instant) -> Vec<StalledStream> {
        let mut sources = std::mem::take(&mut *self.checked());
        let mut stalled = Vec::new();
        sources.retain(|source| {
            let Some(source) = source.upgrade() else {
                return false;
            };
            source.is_checked().store(false, Relaxed);
            fence(SeqCst);
            let has_waiting = source.collect_stalled(now, &mut stalled);
            // The source may have reported bytes, and so have been added, in between.
            has_waiting && !source.is_checked().swap(true, Relaxed)
        });
        self.checked().append(&mut sources);
        self.stalled_count.store(stalled.len(), Relaxed);
        stalled.sort_unstable_by_key(|stream| (stream.since, Reverse(stream.buffered)));
        stalled
    }

    fn checked(&self) -> MutexGuard<'_, Vec<Weak<dyn StallSource>>> {
        self.checked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the guard if a stream is stalled.
    pub(crate) fn notify_if_stalled(&self) {
        if !self.sample_stalled(Instant::now()).is_empty() {
            self.stall_notify.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Source that counts its checks.
    #[derive(Debug)]
    struct Source {
        this: Weak<Self>,
        is_checked: AtomicBool,
        has_waiting: AtomicBool,
        checks: AtomicUsize,
    }

    impl StallSource for Source {
        fn collect_stalled(&self, _: Instant, _: &mut Vec<StalledStream>) -> bool {
            self.checks.fetch_add(1, Relaxed);
            self.has_waiting.load(Relaxed)
        }

        fn is_checked(&self) -> &AtomicBool {
            &self.is_checked
        }

        fn downgrade(&self) -> Weak<dyn StallSource> {
            self.this.clone()
        }
    }

    #[test]
    fn a_source_is_checked_only_while_bytes_wait_in_it() {
        let source = Arc::new_cyclic(|this| Source {
            this: this.clone(),
            is_checked: AtomicBool::new(false),
            has_waiting: AtomicBool::new(true),
            checks: AtomicUsize::new(0),
        });
        let monitor = StallMonitor::default();
        let checks_of = |samples: usize| {
            let before = source.checks.load(Relaxed);
            for _ in 0..samples {
                monitor.sample_stalled(Instant::now());
            }
            source.checks.load(Relaxed) - before
        };
        assert_eq!(checks_of(3), 0, "nothing was reported");
        monitor.notify_possible_stall(&*source);
        monitor.notify_possible_stall(&*source);
        assert_eq!(checks_of(3), 3, "bytes wait");
        source.has_waiting.store(false, Relaxed);
        assert_eq!(checks_of(3), 1, "no bytes wait any more");
        monitor.notify_possible_stall(&*source);
        assert_eq!(checks_of(3), 1, "reported again");
        monitor.notify_possible_stall(&*source);
        drop(source);
        assert!(monitor.sample_stalled(Instant::now()).is_empty());
        assert!(monitor.checked().is_empty());
    }
}
