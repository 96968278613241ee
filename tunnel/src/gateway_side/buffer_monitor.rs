//! Monitor of the unread bytes in a tunnel's streams, which detects more of them than an honest edge may have sent.
//!
//! Asking every stream is costly, so all are weighed once per [`SAMPLE_INTERVAL`]. Between two weighings a fast edge could
//! send more than all that it may leave here. So a quick check takes place, too, whenever a whole budget of bytes has been
//! read, or unconsumed small frames cost a part of it more than at the last quick check.

use crate::{
    buffered::{BufferedBytes, SAMPLE_INTERVAL},
    load::TunnelLoad,
};
use tokio::time::Instant;

/// How many times a tunnel's budget may be unread before the edge is taken for one that keeps to no window: a change of
/// windows takes a round trip.
const OVERRUN_FACTOR: usize = 4;
/// Divisor of a budget: small frames may cost this part more before the next check. Ten bytes from the socket cost hundreds.
const RECHECK_FRACTION: usize = 4;
/// Divisor of a budget: small frames may cost this part before windows follow.
const IGNORE_FRACTION: usize = 8;
/// The least window, which each stream has beyond the budget.
const MIN_STREAM_WINDOW: usize = 64 << 10;

/// Returns twice the cost of small frames, in bytes: h2's list of them grows by copying, and its earlier memory is freed
/// later.
pub(super) fn small_frame_cost(load: &TunnelLoad) -> usize {
    load.small().cost_of_all().saturating_mul(2)
}

/// Returns the cost of small frames, or 0 when it is below 1/8 of the budget: short bursts cost little, and windows do not
/// follow them.
pub(super) fn significant_small_frame_cost(load: &TunnelLoad, budget: usize) -> usize {
    let cost = small_frame_cost(load);
    if cost < budget / IGNORE_FRACTION {
        0
    } else {
        cost
    }
}

/// Monitor of the streams of one tunnel: the last sample, and its time.
#[derive(Debug)]
pub(super) struct BufferMonitor {
    held: BufferedBytes,
    weighed: Instant,
    /// Bytes that had been read from the socket at the last quick check.
    glanced: u64,
    /// Cost of small frames at the last quick check, or less, in bytes.
    small: usize,
}

impl BufferMonitor {
    pub(super) fn new() -> Self {
        Self {
            held: BufferedBytes::default(),
            weighed: Instant::now(),
            glanced: 0,
            small: 0,
        }
    }

    /// When the streams are to be weighed without anything happening before.
    pub(super) fn due(&self, load: &TunnelLoad, last_read: Instant) -> Option<Instant> {
        // Whether bytes arrived after the last sample.
        let arrived = last_read > self.weighed || self.held.all > self.held.stalled;
        (self.holds(load) && arrived).then(|| self.weighed + SAMPLE_INTERVAL)
    }

    /// Asks the streams what they hold, but not too often.
    pub(super) fn sample(&mut self, load: &TunnelLoad) {
        if self.holds(load) && self.weighed.elapsed() >= SAMPLE_INTERVAL {
            self.weighed = Instant::now();
            self.held = load.weigh();
        }
    }

    /// Returns the bytes that the streams hold, if that is more than their windows allow. `read` is the number of all bytes
    /// from the socket, and `budget` the number of bytes that the tunnel may leave unread.
    pub(super) fn overrun(&mut self, load: &TunnelLoad, read: u64, budget: usize) -> Option<usize> {
        let most = budget.saturating_mul(OVERRUN_FACTOR) + load.streams() * MIN_STREAM_WINDOW;
        let (small, glanced) = (
            load.small().cost_of_all(),
            self.quick_check(load, read, budget),
        );
        // The sample counts small frames only once.
        let held = self.held.all.saturating_add(small).max(glanced);
        (held > most).then_some(held)
    }

    /// Returns the bytes that the streams hold if much has arrived since the last quick check, else 0.
    fn quick_check(&mut self, load: &TunnelLoad, read: u64, budget: usize) -> usize {
        let small = load.small().cost_of_all();
        self.small = self.small.min(small);
        if read - self.glanced < budget as u64 && small - self.small < budget / RECHECK_FRACTION {
            return 0;
        }
        (self.glanced, self.small) = (read, small);
        load.unread() + small_frame_cost(load)
    }

    /// Whether there can be anything to weigh: a tunnel that has nothing but its control stream, whose lines are taken as
    /// they come, is woken by nothing but probes.
    fn holds(&self, load: &TunnelLoad) -> bool {
        self.held.all > 0 || load.streams() > 1
    }
}
