//! Evicts streams whose receiver reads nothing, while memory is short or for too long.

use crate::{config::Config, metrics::Metrics};
use causeway_rt::log_throttle::LogThrottle;
use causeway_tunnel::{
    buffered::MemoryBudget,
    eviction::{self, Bounds},
};
use std::sync::Arc;

/// Returns the bounds of a configuration.
fn bounds(config: &Config) -> Bounds {
    let limits = &config.limits;
    Bounds {
        memory: limits.stalled,
        tcp_memory: Some(limits.tcp_memory).filter(|bytes| *bytes > 0),
        patience: Some(config.timeouts.download),
    }
}

/// Runs until it is dropped.
pub(crate) async fn run(config: Config, pressure: Arc<MemoryBudget>, metrics: Arc<Metrics>) {
    let (said, mut streams) = (LogThrottle::default(), 0);
    let evicted = |shortage: eviction::Shortage, count: usize| {
        metrics.evicted(shortage.word(), count);
        streams += count;
        if said.happened().is_some() {
            tracing::warn!(
                reason = shortage.word(),
                streams,
                "streams were reset because their peers do not read the buffered bytes (limits.stalled, limits.tcp_memory, timeouts.download)"
            );
            streams = 0;
        }
    };
    eviction::guard(pressure.stalls(), bounds(&config), evicted).await;
}
