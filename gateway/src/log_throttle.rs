//! Throttle for log lines about frequent events, so that a flood of events does not flood the log.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tokio::time::Instant;

/// It is said not more often than this.
pub(crate) const SAY: Duration = Duration::from_secs(10);

/// Something that is counted, and said now and then.
#[derive(Debug, Default)]
pub(crate) struct LogThrottle(Mutex<ThrottleState>);

#[derive(Debug, Default)]
struct ThrottleState {
    since: usize,
    said: Option<Instant>,
}

impl LogThrottle {
    /// Notes that it happened. Where it is time to say so: how often it has since it was said last.
    pub(crate) fn happened(&self) -> Option<usize> {
        self.happened_within(SAY)
    }

    /// Notes an event. Returns the number of events since the last report, if that is at least `pause` ago.
    pub(crate) fn happened_within(&self, pause: Duration) -> Option<usize> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.since += 1;
        if state.said.is_some_and(|said| said.elapsed() < pause) {
            return None;
        }
        state.said = Some(Instant::now());
        Some(std::mem::take(&mut state.since))
    }
}
