//! Eviction of stalled streams while memory runs short.
//!
//! A stream is stalled when bytes wait for its consumer and the consumer takes none. Each stalled stream holds memory here
//! and in the kernel's socket buffers. It also holds memory in the socket buffers of an upstream on the same machine, which
//! no window of ours bounds. The kernel has one pool of memory for all TCP sockets (`net.ipv4.tcp_mem`). Once the pool is
//! empty, the tunnel's own socket gets no memory either, and every stream of the node hangs. So [`guard`] resets the streams
//! that have been stalled for longest, as many as needed, long before that.

pub use crate::stream::Eviction;

use crate::stall_monitor::{StallMonitor, StalledStream};
use causeway_rt::tcp_memory::TcpMemory;
use std::{sync::atomic::Ordering::Relaxed, time::Duration};
use tokio::time::{Instant, sleep};

/// Memory of a stalled stream, in bytes, besides the content of its window: the buffers of HTTP and TLS. Stalled downloads
/// cost 200 KiB each at the gateway, and 270 KiB at the edge.
pub const STREAM_OVERHEAD_BYTES: usize = 320 << 10;
/// Maximum kernel memory of a stream on one machine, in bytes: the limits of an upstream's send buffer and of the edge's
/// receive buffer. These are the defaults of `net.ipv4.tcp_wmem` and `tcp_rmem`.
const MAX_SOCKET_BUFFERS: usize = (4 << 20) + (6 << 20);
/// Interval between two checks while streams may be stalled.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Time for which a stream must be stalled before it may be evicted. Readers on long links cause shorter pauses.
const MIN_STALL: Duration = Duration::from_millis(100);
/// The minimum stall while the kernel's TCP memory has passed its limit by less than half. Other programs may be the cause
/// then.
const SLOW_STALL: Duration = Duration::from_secs(5);
/// Number of checks without a stalled stream after which the guard sleeps.
const IDLE_CHECKS: u32 = 20;

impl StalledStream {
    fn cost(&self) -> usize {
        self.buffered + STREAM_OVERHEAD_BYTES
    }
}

/// Limits on the cost of stalled streams.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Limit on the memory of this process, in bytes.
    pub max_memory: usize,
    /// Limit on the kernel's memory for TCP, in bytes, as the kernel counts it for all processes. If absent, half of the
    /// value at which the kernel comes under memory pressure.
    pub max_tcp_memory: Option<usize>,
    /// Time for which the reader of a plain response may consume nothing.
    pub response_timeout: Option<Duration>,
}

/// Reason of an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shortage {
    /// This process exceeds its own memory limit ([`Bounds::max_memory`]).
    Memory,
    /// The kernel's memory for TCP exceeds its limit ([`Bounds::max_tcp_memory`]).
    TcpMemory,
    /// The reader consumed nothing for too long ([`Bounds::response_timeout`]).
    Time,
}

impl Shortage {
    /// All reasons.
    pub const ALL: [Self; 3] = [Self::Memory, Self::TcpMemory, Self::Time];

    /// Returns the reason as a word, for logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::TcpMemory => "tcp_memory",
            Self::Time => "time",
        }
    }
}

/// Returns the number of stalled streams to evict, the longest stalled first, so that the kernel's memory falls from `used`
/// bytes below `limit`. The kernel does not report the memory of each stream, so each is taken to hold an equal part. If the
/// streams together cannot hold an eighth of the memory, none is evicted: other programs use that memory, and an eviction
/// would free too little.
fn excess_of_kernel(stalled: usize, used: usize, limit: usize) -> usize {
    let excess = used.saturating_sub(limit);
    if excess == 0 || stalled.saturating_mul(MAX_SOCKET_BUFFERS) < used / 8 {
        return 0;
    }
    stalled.saturating_mul(excess).div_ceil(used).min(stalled)
}

/// Returns the number of streams to evict, the longest stalled first, so that the cost of all streams falls below `limit`.
fn excess_of_process(stalled: &[StalledStream], limit: usize) -> usize {
    let mut remaining_cost: usize = stalled.iter().map(StalledStream::cost).sum();
    stalled
        .iter()
        .take_while(|stream| {
            let is_over = remaining_cost > limit;
            remaining_cost -= stream.cost();
            is_over
        })
        .count()
}

/// Evicts the streams that have been stalled for longest whenever a limit is exceeded. Runs as long as the process has
/// streams.
pub async fn guard(
    monitor: &StallMonitor,
    bounds: Bounds,
    mut on_evicted: impl FnMut(Shortage, usize),
) {
    let tcp_memory = TcpMemory::open(bounds.max_tcp_memory);
    loop {
        monitor.stall_notify.notified().await;
        monitor.is_checking.store(true, Relaxed);
        let mut idle_checks = 0;
        while idle_checks < IDLE_CHECKS {
            let now = Instant::now();
            let stalled = monitor.sample_stalled(now);
            idle_checks = if stalled.is_empty() {
                idle_checks + 1
            } else {
                0
            };
            for (shortage, count) in evict_excess(&stalled, now, &bounds, tcp_memory.as_ref()) {
                on_evicted(shortage, count);
            }
            sleep(CHECK_INTERVAL).await;
        }
        monitor.is_checking.store(false, Relaxed);
        // A stall that began between the last check and the line above was not reported.
        monitor.notify_if_stalled();
    }
}

/// Evicts streams until all limits are met.
fn evict_excess(
    stalled: &[StalledStream],
    now: Instant,
    bounds: &Bounds,
    tcp_memory: Option<&TcpMemory>,
) -> Vec<(Shortage, usize)> {
    let evictable = stalled.partition_point(|stream| now - stream.since >= MIN_STALL);
    let evictable = &stalled[..evictable];
    for stream in evictable {
        stream.progress.mark_stalled();
    }
    if evictable.is_empty() {
        return Vec::new();
    }
    let kernel_count = tcp_memory.map_or(0, |memory| {
        let used = memory.used().unwrap_or_default();
        let slow_count = evictable.partition_point(|stream| now - stream.since >= SLOW_STALL);
        let limit = memory.limit();
        let urgent_count = excess_of_kernel(stalled.len(), used, limit.saturating_add(limit / 2));
        let slow_excess = excess_of_kernel(stalled.len(), used, limit);
        urgent_count
            .min(evictable.len())
            .max(slow_excess.min(slow_count))
    });
    let process_count = excess_of_process(stalled, bounds.max_memory).min(evictable.len());
    let (shortage, count) = if kernel_count >= process_count {
        (Shortage::TcpMemory, kernel_count)
    } else {
        (Shortage::Memory, process_count)
    };
    let (to_evict, to_keep) = evictable.split_at(count);
    for stream in to_evict {
        stream.progress.evict();
    }
    let mut timed_out = 0;
    if let Some(response_timeout) = bounds.response_timeout {
        let is_timed_out = |stream: &&StalledStream| {
            stream.progress.is_response() && now - stream.since >= response_timeout
        };
        for stream in to_keep.iter().filter(is_timed_out) {
            stream.progress.evict();
            timed_out += 1;
        }
    }
    let all = [(shortage, count), (Shortage::Time, timed_out)];
    all.into_iter().filter(|(_, count)| *count > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stall_monitor::{Progress, ProgressMark};
    use std::sync::Arc;

    fn stalled(held: &[usize]) -> Vec<StalledStream> {
        let since = Instant::now();
        held.iter()
            .map(|held| StalledStream {
                since,
                buffered: *held,
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
    async fn the_longest_stalled_streams_end_first_and_short_pauses_none() {
        let bounds = Bounds {
            max_memory: STREAM_OVERHEAD_BYTES,
            max_tcp_memory: None,
            response_timeout: None,
        };
        let old = stalled(&[0, 0]);
        tokio::time::advance(MIN_STALL).await;
        let young = stalled(&[0, 0]);
        let all: Vec<_> = old.iter().chain(&young).cloned().collect();
        let gone = evict_excess(&all, Instant::now(), &bounds, None);
        assert_eq!(gone, [(Shortage::Memory, 2)]);
        assert!(old.iter().all(|stream| stream.progress.is_evicted()));
        assert!(!young.iter().any(|stream| stream.progress.is_evicted()));
    }

    #[tokio::test(start_paused = true)]
    async fn unread_answers_time_out_and_sessions_do_not() {
        let bounds = Bounds {
            max_memory: usize::MAX,
            max_tcp_memory: None,
            response_timeout: Some(Duration::from_mins(1)),
        };
        let streams = stalled(&[0, 0]);
        Eviction::new(&streams[1].progress).mark_response();
        tokio::time::advance(Duration::from_secs(59)).await;
        assert!(evict_excess(&streams, Instant::now(), &bounds, None).is_empty());
        tokio::time::advance(Duration::from_secs(1)).await;
        let gone = evict_excess(&streams, Instant::now(), &bounds, None);
        assert_eq!(gone, [(Shortage::Time, 1)]);
        assert!(streams[1].progress.is_evicted());
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_makes_progress_restarts_its_timeout() {
        let (progress, mut mark) = (Progress::default(), ProgressMark::default());
        let began = Instant::now();
        assert_eq!(mark.update(true, &progress, began), Some(began));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(mark.update(true, &progress, Instant::now()), Some(began));
        progress.record_chunk();
        let later = Instant::now();
        assert_eq!(mark.update(true, &progress, later), Some(later));
        assert_eq!(mark.update(false, &progress, later), None);
    }
}
