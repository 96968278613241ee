//! Status of the API cache, computed by the cache on request.

use causeway_watch_cache::Status;
use serde::Serialize;
use std::{fmt, sync::OnceLock};

/// State of the API cache of an edge.
#[derive(Clone, Debug, Serialize, schemars::JsonSchema)]
pub struct ApiCacheStatus {
    /// `pending` (the first synchronisation is not complete), `follower` or `leader`.
    pub role: &'static str,
    /// Whether objects of every resource can be served.
    pub healthy: bool,
    /// Whether every resource is complete and synchronised with its source.
    pub ready: bool,
    /// Node pool, as a gateway confirmed it.
    pub pool: Option<String>,
    /// Node that leads the pool: it reads at a gateway, and the other members read at it.
    pub leader: Option<String>,
    /// Gateway (`host:port`) or node that is the source now.
    pub reads_at: Option<String>,
    /// Members of the pool.
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
