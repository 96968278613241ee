//! Metrics of the API cache that edges read.

use super::{Metrics, declared::OpenGauge};
use causeway_watch_cache::Status;

/// A connection by which an edge reads, for as long as it is open.
#[derive(Debug)]
pub struct ApiCacheConnectionGuard {
    _open: OpenGauge,
}

impl Metrics {
    /// An edge reads.
    pub fn reader_guard(&self) -> ApiCacheConnectionGuard {
        ApiCacheConnectionGuard {
            _open: OpenGauge::new(&self.declared.api_cache_connections),
        }
    }

    /// Sets how many edges may read at once.
    pub fn set_reader_limit(&self, connections: usize) {
        self.declared
            .api_cache_connections_limit
            .set(to_i64(connections));
    }

    /// So many pools have a leader here.
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
