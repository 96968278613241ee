//! Progress of streams, and the list of the stalled streams of a process.

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
    /// Adds the stalled streams: bytes wait in them and did so at the last sample, and none has moved since.
    fn collect_stalled(&self, now: Instant, out: &mut Vec<StalledStream>);
}

/// Streams of a process that may be stalled.
#[derive(Debug, Default)]
pub struct StallMonitor {
    tunnels: Mutex<Vec<Weak<dyn StallSource>>>,
    /// Number of stalled streams at the last check.
    stalled_count: AtomicUsize,
    /// Whether the guard checks regularly and needs no wake-up.
    pub(crate) is_checking: AtomicBool,
    pub(crate) stall_notify: Notify,
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

    /// Wakes the guard, because a stream may be stalled.
    pub(crate) fn notify_possible_stall(&self) {
        if !self.is_checking.load(Relaxed) {
            self.stall_notify.notify_one();
        }
    }

    /// Returns the number of stalled streams at the last check.
    pub fn stalled_count(&self) -> usize {
        self.stalled_count.load(Relaxed)
    }

    /// Returns the streams that are stalled now, the longest stalled first.
    pub(crate) fn sample_stalled(&self, now: Instant) -> Vec<StalledStream> {
        let mut tunnels = self.tunnels();
        tunnels.retain(|tunnel| tunnel.strong_count() > 0);
        let tunnels: Vec<_> = tunnels.iter().filter_map(Weak::upgrade).collect();
        let mut stalled = Vec::new();
        for tunnel in tunnels {
            tunnel.collect_stalled(now, &mut stalled);
        }
        self.stalled_count.store(stalled.len(), Relaxed);
        stalled.sort_unstable_by_key(|stream| (stream.since, Reverse(stream.buffered)));
        stalled
    }

    fn tunnels(&self) -> MutexGuard<'_, Vec<Weak<dyn StallSource>>> {
        self.tunnels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the guard if a stream is stalled.
    pub(crate) fn notify_if_stalled(&self) {
        if !self.sample_stalled(Instant::now()).is_empty() {
            self.stall_notify.notify_one();
        }
    }
}
