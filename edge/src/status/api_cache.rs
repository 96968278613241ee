//! Status of the API cache, computed by the cache on request.

use causeway_watch_cache::Status;
use serde::Serialize;
use std::{fmt, sync::OnceLock};

/// State of the API cache of an edge.
#[derive(Clone, Debug, Serialize, schemars::JsonSchema)]
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
    /// Resources that are cached.
    pub resources: Vec<Status>,
}

/// Function that returns the state of the API cache.
type StatusFn = Box<dyn Fn() -> ApiCacheStatus + Send + Sync>;

/// Slot for the status function of the API cache, empty if there is no cache.
#[derive(Default)]
pub(super) struct ApiCacheStatusSlot(OnceLock<StatusFn>);

impl ApiCacheStatusSlot {
    pub(super) fn set(&self, status_fn: StatusFn) {
        // The API cache starts only once.
        let _ = self.0.set(status_fn);
    }

    pub(super) fn status(&self) -> Option<ApiCacheStatus> {
        self.0.get().map(|status_fn| status_fn())
    }
}

impl fmt::Debug for ApiCacheStatusSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiCacheStatusSlot").finish_non_exhaustive()
    }
}
