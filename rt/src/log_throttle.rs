//! Throttles for log lines, so that a flood of events and a failure that lasts do not flood the log.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tokio::time::Instant;

/// The shortest interval between two log lines about the same frequent event.
const FREQUENT: Duration = Duration::from_secs(10);

/// Interval at which a failure that lasts is logged again.
const LASTING: Duration = Duration::from_mins(5);

/// Throttle of a frequent event, which is counted, and logged now and then.
#[derive(Debug, Default)]
pub struct LogThrottle(Mutex<ThrottleState>);

#[derive(Debug, Default)]
struct ThrottleState {
    since: usize,
    said: Option<Instant>,
}

impl LogThrottle {
    /// Notes an event. Returns the number of events since the last log line, if the next one is due.
    pub fn happened(&self) -> Option<usize> {
        self.happened_within(FREQUENT)
    }

    /// Notes an event. Returns the number of events since the last log line, if that is at least `pause` ago.
    pub fn happened_within(&self, pause: Duration) -> Option<usize> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.since += 1;
        if state.said.is_some_and(|said| said.elapsed() < pause) {
            return None;
        }
        state.said = Some(Instant::now());
        Some(std::mem::take(&mut state.since))
    }
}

/// Throttle of a failure that may last: it is logged when it begins, when it changes, and now and then.
#[derive(Debug, Default)]
pub struct FailureThrottle(Option<(String, Instant)>);

impl FailureThrottle {
    /// Notes a failure. Returns whether it is to be logged: one other than before, or one that was not logged for a while.
    pub fn is_news(&mut self, what: &str) -> bool {
        let last = self.0.as_ref();
        let is_news = !last.is_some_and(|(last, at)| last == what && at.elapsed() < LASTING);
        if is_news {
            self.0 = Some((what.to_owned(), Instant::now()));
        }
        is_news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_failure_that_lasts_is_logged_when_it_changes_and_now_and_then() {
        let mut logged = FailureThrottle::default();
        assert!(logged.is_news("refused"));
        for _ in 0..100 {
            assert!(!logged.is_news("refused"));
        }
        assert!(logged.is_news("silent") && logged.is_news("refused"));
        tokio::time::advance(LASTING).await;
        assert!(logged.is_news("refused"));
    }
}
