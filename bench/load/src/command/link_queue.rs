//! Link in one direction: bytes leave at the rate, and arrive the delay later, in order.
//!
//! Only times are stored here, so that the link can be tested without a clock: the owner of the bytes asks when they are
//! due. The queue before the link is a length of time: the time that the rate needs for the waiting bytes.

use crate::cli;
use std::time::Duration;
use tokio::time::Instant;

/// One direction.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinkQueue {
    asked: cli::LinkConditions,
    /// Time at which all bytes that have entered will have left.
    free: Instant,
}

impl LinkQueue {
    /// Empty.
    pub(super) fn new(asked: cli::LinkConditions, now: Instant) -> Self {
        Self { asked, free: now }
    }

    /// Returns when the queue has space, which may be now.
    pub(super) fn room(&self, now: Instant) -> Instant {
        self.free
            .checked_sub(self.asked.queue)
            .unwrap_or(now)
            .max(now)
    }

    /// Adds that many bytes; returns when they arrive.
    pub(super) fn enter(&mut self, bytes: usize, now: Instant) -> Instant {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.free = self.free.max(now) + takes(bytes, self.asked.rate);
        self.free + self.asked.delay
    }
}

/// Returns the time that the rate needs for that many bytes.
fn takes(bytes: u64, rate: Option<u64>) -> Duration {
    let Some(rate) = rate else {
        return Duration::ZERO;
    };
    let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_delayed_in_order() {
        let begin = Instant::now();
        let after = |millis| begin + Duration::from_millis(millis);
        let asked = cli::LinkConditions {
            delay: Duration::from_millis(25),
            rate: Some(1_000_000),
            queue: Duration::from_millis(10),
        };
        let mut link_queue = LinkQueue::new(asked, begin);
        assert_eq!(link_queue.enter(1_000, begin), after(26));
        assert_eq!(link_queue.enter(20_000, begin), after(46));
        assert_eq!(link_queue.room(begin), after(11));
        assert_eq!(link_queue.enter(1_000, after(100)), after(126));
    }

    #[test]
    fn without_a_rate_there_is_the_delay_alone() {
        let begin = Instant::now();
        let asked = cli::LinkConditions {
            delay: Duration::from_millis(5),
            rate: None,
            queue: Duration::ZERO,
        };
        let mut link_queue = LinkQueue::new(asked, begin);
        assert_eq!(link_queue.enter(1 << 30, begin), begin + asked.delay);
        assert_eq!(link_queue.room(begin), begin);
    }
}
