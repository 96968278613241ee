//! Throttle for log messages: a repeated failure is logged once, and again every five minutes; its end is logged once.
//!
//! A gateway retries for as long as it runs: a line for each try would hide all others.

use causeway_rt::log_throttle::FailureThrottle;
use tokio::time::Instant;

/// Log throttle of an operation that may fail repeatedly.
pub(crate) struct LogThrottle {
    what: &'static str,
    since: Option<Instant>,
    said: FailureThrottle,
}

impl LogThrottle {
    /// Returns a throttle for `what`, the name of the operation in the log. No failure is recorded yet.
    pub(crate) fn new(what: &'static str) -> Self {
        Self {
            what,
            since: None,
            said: FailureThrottle::default(),
        }
    }

    /// Logs a failure.
    pub(crate) fn say(&mut self, why: &str) {
        self.says(why);
    }

    /// Logs a failure. Returns `false` if it was logged lately.
    pub(crate) fn says(&mut self, why: &str) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        if !self.said.is_news(why) {
            tracing::debug!(why, "{} still fails", self.what);
            return false;
        }
        tracing::warn!(why, lasts = ?since.elapsed(), "{} failed; retrying", self.what);
        true
    }

    /// Records a success.
    pub(crate) fn over(&mut self) {
        self.said = FailureThrottle::default();
        if let Some(since) = self.since.take() {
            tracing::info!(lasted = ?since.elapsed(), "{} succeeds again", self.what);
        }
    }
}
