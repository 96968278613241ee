//! Movement of streams, and the list of the streams of a process that stand still.

use futures_util::task::AtomicWaker;
use std::{
    cmp::Reverse,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll},
};
use tokio::{sync::Notify, time::Instant};

/// Movement of one direction of a stream, and whether the stream was evicted.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    moved: AtomicUsize,
    /// The sender waits for the peer's window.
    blocked: AtomicBool,
    /// The stream stands still: its holder also looks whether the other end has evicted it.
    still: AtomicBool,
    /// A plain answer, whose reader has a bound of its own ([`crate::eviction::Bounds::patience`]).
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

    /// Whether the holder also looks if the other end has evicted the stream.
    pub(crate) fn is_stalled(&self) -> bool {
        self.still.load(Relaxed)
    }

    /// Notes that the other end has evicted the stream, as its holder has seen.
    pub(crate) fn set_evicted(&self) {
        self.evicted.store(true, Relaxed);
    }

    /// Whether the reader has a bound of its own.
    pub(crate) fn is_answer(&self) -> bool {
        self.answer.load(Relaxed)
    }

    pub(crate) fn set_answer(&self) {
        self.answer.store(true, Relaxed);
    }

    /// Has the holder look whether the other end has evicted the stream.
    pub(crate) fn mark_stalled(&self) {
        if !self.still.swap(true, Relaxed) {
            self.waker.wake();
        }
    }

    pub(crate) fn evict(&self) {
        self.evicted.store(true, Relaxed);
        self.waker.wake();
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

/// Streams of a tunnel, some of which may stand still.
pub(crate) trait StallSource: fmt::Debug + Send + Sync {
    /// Adds the streams that stand still: bytes wait in them and did at the last look, and none has moved since.
    fn stalled(&self, now: Instant, found: &mut Vec<StalledStream>);
}

/// Streams of a process that may stand still.
#[derive(Debug, Default)]
pub struct StallMonitor {
    tunnels: Mutex<Vec<Weak<dyn StallSource>>>,
    /// Streams that stood still at the last look.
    count: AtomicUsize,
    /// The guard looks regularly, and need not be woken.
    pub(crate) looking: AtomicBool,
    pub(crate) begun: Notify,
}

impl StallMonitor {
    /// Adds the streams of a tunnel, until they are dropped.
    pub(crate) fn add(&self, tunnel: Weak<dyn StallSource>) {
        let mut tunnels = self.tunnels();
        if tunnels.len() == tunnels.capacity() {
            tunnels.retain(|tunnel| tunnel.strong_count() > 0);
        }
        tunnels.push(tunnel);
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
    pub(crate) fn look(&self, now: Instant) -> Vec<StalledStream> {
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

    fn tunnels(&self) -> MutexGuard<'_, Vec<Weak<dyn StallSource>>> {
        self.tunnels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the guard if a stream stands still.
    pub(crate) fn may_begin_unless_idle(&self) {
        if !self.look(Instant::now()).is_empty() {
            self.begun.notify_one();
        }
    }
}
