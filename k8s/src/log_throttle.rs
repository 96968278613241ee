//! What keeps failing is said once, and again every five minutes; and that it is over, once.
//!
//! A gateway goes on trying for as long as it runs: at each try a line would hide all others.

use std::time::Duration;
use tokio::time::Instant;

/// An outage that lasts is said again this often.
const SAY: Duration = Duration::from_mins(5);

/// Something that may fail again and again.
pub(crate) struct LogThrottle {
    what: &'static str,
    since: Option<Instant>,
    said: Option<(String, Instant)>,
}

impl LogThrottle {
    /// Nothing has failed yet of `what`, which is what the log says of it.
    pub(crate) fn new(what: &'static str) -> Self {
        Self {
            what,
            since: None,
            said: None,
        }
    }

    /// It failed.
    pub(crate) fn say(&mut self, why: &str) {
        self.says(why);
    }

    /// It failed. False: that has been said lately.
    pub(crate) fn says(&mut self, why: &str) -> bool {
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        let known = self.said.as_ref();
        if known.is_some_and(|(said, at)| said == why && at.elapsed() < SAY) {
            tracing::debug!(why, "{} still fails", self.what);
            return false;
        }
        tracing::warn!(why, lasts = ?since.elapsed(), "{} fails; trying on", self.what);
        self.said = Some((why.to_owned(), now));
        true
    }

    /// It went well.
    pub(crate) fn over(&mut self) {
        self.said = None;
        if let Some(since) = self.since.take() {
            tracing::info!(lasted = ?since.elapsed(), "{} goes well again", self.what);
        }
    }
}
