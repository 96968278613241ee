//! Evicts streams whose receiver has read nothing for too long, or while memory is short.

use crate::{config::Config, metrics::Metrics};
use causeway_rt::log_throttle::LogThrottle;
use causeway_tunnel::{
    buffered::MemoryBudget,
    eviction::{self, Bounds},
};
use std::sync::Arc;

/// Returns the eviction bounds of a configuration.
fn eviction_bounds(config: &Config) -> Bounds {
    let limits = &config.limits;
    Bounds {
        max_memory: limits.stalled,
        max_tcp_memory: Some(limits.tcp_memory).filter(|bytes| *bytes > 0),
        response_timeout: Some(config.timeouts.download),
    }
}

/// Runs until the future is dropped.
pub(crate) async fn run(config: Config, memory_budget: Arc<MemoryBudget>, metrics: Arc<Metrics>) {
    let (log_throttle, mut streams) = (LogThrottle::default(), 0);
    let on_evicted = |shortage: eviction::Shortage, count: usize| {
        metrics.count_evicted(shortage.as_str(), count);
        streams += count;
        if log_throttle.record().is_some() {
            tracing::warn!(
                reason = shortage.as_str(),
                streams,
                "streams were reset because their peers do not read the buffered bytes (limits.stalled, limits.tcp_memory, timeouts.download)"
            );
            streams = 0;
        }
    };
    eviction::guard(
        memory_budget.stall_monitor(),
        eviction_bounds(&config),
        on_evicted,
    )
    .await;
}
