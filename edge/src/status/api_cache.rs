//! How reading goes: asked of whoever reads, when somebody wants to know.

use causeway_watch_cache::Status;
use serde::Serialize;
use std::{fmt, sync::OnceLock};

/// How reading at the edge goes.
#[derive(Clone, Debug, Serialize)]
pub struct ApiCacheStatus {
    /// `pending` (has not read everything yet), `follower` or `leader`.
    pub role: &'static str,
    /// Whether there is something to serve of everything that is read.
    pub healthy: bool,
    /// Whether all of it is there and in touch with its source.
    pub ready: bool,
    /// The pool, as a gateway confirmed it.
    pub pool: Option<String>,
    /// The node that reads at a gateway for the pool.
    pub leader: Option<String>,
    /// The gateway (`host:port`) or the node that is read from now.
    pub reads_at: Option<String>,
    /// The nodes that read together.
    pub members: Vec<String>,
    /// What is read.
    pub resources: Vec<Status>,
}

/// Says how reading goes.
type StatusFn = Box<dyn Fn() -> ApiCacheStatus + Send + Sync>;

/// Whoever reads, if anybody does.
#[derive(Default)]
pub(super) struct ApiCacheStatusSlot(OnceLock<StatusFn>);

impl ApiCacheStatusSlot {
    pub(super) fn begin(&self, says: StatusFn) {
        // An edge begins to read once.
        let _ = self.0.set(says);
    }

    pub(super) fn status(&self) -> Option<ApiCacheStatus> {
        self.0.get().map(|says| says())
    }
}

impl fmt::Debug for ApiCacheStatusSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiCacheStatusSlot").finish_non_exhaustive()
    }
}
