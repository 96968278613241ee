//! Throttle for log messages: a repeated failure is logged once, and again every five minutes; its end is logged once.
//!
//! A gateway retries as long as it runs, and a line for each attempt would hide all other lines.

use causeway_rt::log_throttle::FailureThrottle;
use tokio::time::Instant;

/// Log throttle of an operation that may fail repeatedly.
pub(crate) struct LogThrottle {
    what: &'static str,
    failing_since: Option<Instant>,
    throttle: FailureThrottle,
}

impl LogThrottle {
    /// Returns a throttle for `operation`, the name of the operation in the log. No failure is recorded yet.
    pub(crate) fn new(operation: &'static str) -> Self {
        Self {
            what: operation,
            failing_since: None,
            throttle: FailureThrottle::default(),
        }
    }

    /// Logs a failure.
    pub(crate) fn log_failure(&mut self, why: &str) {
        self.log_failure_once(why);
    }

    /// Logs a failure. Returns `false` if it was logged recently.
    pub(crate) fn log_failure_once(&mut self, why: &str) -> bool {
        let since = *self.failing_since.get_or_insert_with(Instant::now);
        if !self.throttle.should_log(why) {
            tracing::debug!(why, "{} still fails", self.what);
            return false;
        }
        tracing::warn!(why, lasts = ?since.elapsed(), "{} failed; retrying", self.what);
        true
    }

    /// Records a success.
    pub(crate) fn log_recovery(&mut self) {
        self.throttle = FailureThrottle::default();
        if let Some(since) = self.failing_since.take() {
            tracing::info!(lasted = ?since.elapsed(), "{} succeeds again", self.what);
        }
    }
}
