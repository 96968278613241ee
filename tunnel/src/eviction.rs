//! Eviction of streams that stand still while memory runs short.
//!
//! A stream stands still when bytes wait for its consumer and the consumer takes none. Each such stream holds memory here,
//! in the kernel's socket buffers, and in those of an upstream on the same machine, which no window of ours bounds. The
//! kernel has one pool of memory for all TCP sockets (`net.ipv4.tcp_mem`). Once the pool is empty, the tunnel's own socket
//! gets no memory either, and every stream of the node hangs. So [`guard`] resets the streams that have stood still for
//! longest, as many as needed, long before that.

pub use crate::stream::Eviction;

use crate::stall_monitor::{StallMonitor, StalledStream};
use causeway_rt::tcp_memory::TcpMemory;
use std::{sync::atomic::Ordering::Relaxed, time::Duration};
use tokio::time::{Instant, sleep};

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

impl StalledStream {
    fn cost(&self) -> usize {
        self.held + STREAM_OVERHEAD_BYTES
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
        // A stall that began between the last check and the line above was not reported.
        stalls.may_begin_unless_idle();
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
        let is_late =
            |stream: &&StalledStream| stream.progress.is_answer() && now - stream.since >= patience;
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
    use crate::stall_monitor::{Progress, ProgressMark};
    use std::sync::Arc;

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
    async fn the_longest_stalled_streams_end_first_and_short_pauses_none() {
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
    async fn unread_answers_time_out_and_sessions_do_not() {
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
    async fn a_reader_that_makes_progress_restarts_its_timeout() {
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
