//! What lies unread in a tunnel's streams, and whether that is more than an honest edge may have sent.
//!
//! Asking every stream costs, so all are weighed once per [`WEIGH_AFTER`]. Between two weighings a fast edge could send more
//! than all that it may leave here: they are glanced at, too, whenever a whole budget of bytes has been read, or small frames
//! that nobody takes cost a part of it more than at the last glance.

use super::TunnelLoad;
use crate::buffered::{BufferedBytes, SAMPLE_INTERVAL};
use tokio::time::Instant;

/// How many times a tunnel's budget may be unread before the edge is taken for one that keeps to no window: a change of
/// windows takes a round trip.
const OVERRUN_FACTOR: usize = 4;
/// What part of a budget small frames may cost more until somebody looks: ten bytes from the socket cost hundreds.
const RECHECK_FRACTION: usize = 4;
/// What part of a budget small frames may cost before windows follow.
const IGNORE_FRACTION: usize = 8;
/// The least window, which each stream has beyond the budget.
const MIN_STREAM_WINDOW: usize = 64 << 10;

/// What small frames cost, twice, in bytes: the engine's list of them grows by copying, and what it was before is given back later.
pub(super) fn small_frame_cost(load: &TunnelLoad) -> usize {
    load.small().cost_of_all().saturating_mul(2)
}

/// That, where it is a part of the budget that counts: what only passes through costs little, and no window follows it.
pub(super) fn significant_small_frame_cost(load: &TunnelLoad, budget: usize) -> usize {
    let cost = small_frame_cost(load);
    if cost < budget / IGNORE_FRACTION {
        0
    } else {
        cost
    }
}

/// When the streams of one tunnel were asked, and what they held then.
#[derive(Debug)]
pub(super) struct BufferMonitor {
    held: BufferedBytes,
    weighed: Instant,
    /// What had been read from the socket at the last glance, in bytes.
    glanced: u64,
    /// What small frames have cost at the last glance, or less, in bytes.
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
        // What arrived behind the last look.
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

    /// What the streams hold in bytes, where that is more than their windows allow. `read` is all that has come from the
    /// socket, and `budget` what the tunnel may leave unread.
    pub(super) fn overrun(&mut self, load: &TunnelLoad, read: u64, budget: usize) -> Option<usize> {
        let most = budget.saturating_mul(OVERRUN_FACTOR) + load.streams() * MIN_STREAM_WINDOW;
        let (small, glanced) = (
            load.small().cost_of_all(),
            self.quick_check(load, read, budget),
        );
        // What was weighed counts small frames once.
        let held = self.held.all.saturating_add(small).max(glanced);
        (held > most).then_some(held)
    }

    /// What the streams hold, where much has come behind the last glance; else nothing.
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
