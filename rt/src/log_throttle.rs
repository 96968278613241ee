//! Throttles for log lines, so that neither many events nor a lasting failure flood the log.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tokio::time::Instant;

/// Minimum interval between two log lines about the same frequent event.
const MIN_INTERVAL: Duration = Duration::from_secs(10);

/// Interval at which a lasting failure is logged again.
const REPEAT_INTERVAL: Duration = Duration::from_mins(5);

/// Throttle of a frequent event. It counts the events, and logs them at intervals.
#[derive(Debug, Default)]
pub struct LogThrottle(Mutex<ThrottleState>);

#[derive(Debug, Default)]
struct ThrottleState {
    count: usize,
    last_logged: Option<Instant>,
}

impl LogThrottle {
    /// Records an event. Returns the number of events since the last log line, if the next line is due.
    pub fn record(&self) -> Option<usize> {
        self.record_within(MIN_INTERVAL)
    }

    /// Records an event. Returns the number of events since the last log line, if that was at least `interval` ago.
    pub fn record_within(&self, interval: Duration) -> Option<usize> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.count += 1;
        if state
            .last_logged
            .is_some_and(|last| last.elapsed() < interval)
        {
            return None;
        }
        state.last_logged = Some(Instant::now());
        Some(std::mem::take(&mut state.count))
    }
}

/// Throttle of a failure that may last. It is logged when it begins, when it changes, and at intervals.
#[derive(Debug, Default)]
pub struct FailureThrottle(Option<(String, Instant)>);

impl FailureThrottle {
    /// Records a failure. Returns whether to log it: its message is new, or was not logged for a while.
    pub fn should_log(&mut self, message: &str) -> bool {
        let previous = self.0.as_ref();
        let should_log =
            !previous.is_some_and(|(last, at)| last == message && at.elapsed() < REPEAT_INTERVAL);
        if should_log {
            self.0 = Some((message.to_owned(), Instant::now()));
        }
        should_log
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_failure_that_lasts_is_logged_when_it_changes_and_now_and_then() {
        let mut logged = FailureThrottle::default();
        assert!(logged.should_log("refused"));
        for _ in 0..100 {
            assert!(!logged.should_log("refused"));
        }
        assert!(logged.should_log("silent") && logged.should_log("refused"));
        tokio::time::advance(REPEAT_INTERVAL).await;
        assert!(logged.should_log("refused"));
    }
}
