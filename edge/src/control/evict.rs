//! Eviction of streams whose peer does not read while memory runs short.

use crate::{config::Limits, metrics::Metrics};
use causeway_tunnel::{
    buffered::MemoryBudget,
    eviction::{self, Bounds},
};
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;
use tracing::warn;

/// Minimum time between two log messages about evictions.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Evicts stalled streams until the future is dropped.
pub(crate) async fn run(limits: Limits, memory_budget: Arc<MemoryBudget>, metrics: Arc<Metrics>) {
    let bounds = Bounds {
        max_memory: limits.stalled,
        max_tcp_memory: Some(limits.tcp_memory).filter(|bytes| *bytes > 0),
        // The gateway handles idle readers, because only it knows which streams are sessions.
        response_timeout: None,
    };
    let (mut streams, mut last_logged) = (0, None::<Instant>);
    let on_evicted = |shortage: eviction::Shortage, count: usize| {
        metrics.count_evicted(shortage.as_str(), count);
        streams += count;
        if last_logged.is_none_or(|last| last.elapsed() >= LOG_INTERVAL) {
            last_logged = Some(Instant::now());
            warn!(
                reason = shortage.as_str(),
                streams,
                "streams were reset, because their buffered bytes were not read (limits.stalled, limits.tcp_memory)"
            );
            streams = 0;
        }
    };
    eviction::guard(memory_budget.stall_monitor(), bounds, on_evicted).await;
}
