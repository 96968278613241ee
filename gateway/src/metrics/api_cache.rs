//! Metrics of the API cache for edges.

use super::{Metrics, declared::OpenGauge};
use causeway_watch_cache::Status;

/// Guard of an edge's connection to the API cache, for as long as it is open.
#[derive(Debug)]
pub struct ApiCacheConnectionGuard {
    _open: OpenGauge,
}

impl Metrics {
    /// Counts an edge's connection to the API cache until the guard is dropped.
    pub fn reader_guard(&self) -> ApiCacheConnectionGuard {
        ApiCacheConnectionGuard {
            _open: OpenGauge::new(&self.declared.api_cache_connections),
        }
    }

    /// Sets the maximum number of concurrent connections to the API cache.
    pub fn set_reader_limit(&self, connections: usize) {
        self.declared
            .api_cache_connections_limit
            .set(to_i64(connections));
    }

    /// Sets the number of pools with a leader at this gateway.
    pub fn set_leaders(&self, pools: usize) {
        self.declared.api_cache_leaders.set(to_i64(pools));
    }

    /// Sets the metrics of each cached resource.
    pub fn set_resource_status(&self, statuses: impl Iterator<Item = Status>) {
        let declared = &self.declared;
        for status in statuses {
            let lost = status.lost.map_or(0, |since| to_i64(since / 1000));
            let labels = [("resource", status.resource)];
            for (family, value) in [
                (&declared.api_cache_objects, to_i64(status.objects)),
                (&declared.api_cache_version, to_i64(status.version)),
                (&declared.api_cache_lost_timestamp_seconds, lost),
                (&declared.api_cache_watchers, to_i64(status.watchers)),
            ] {
                family.get_or_create(&labels).set(value);
            }
        }
    }
}

fn to_i64(number: impl TryInto<i64>) -> i64 {
    number.try_into().unwrap_or(i64::MAX)
}
