//! Evicts streams whose peer takes nothing while memory runs short.

use crate::{config::Limits, metrics::Metrics};
use causeway_tunnel::{
    buffered::MemoryBudget,
    eviction::{self, Bounds},
};
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;
use tracing::warn;

/// Evictions are logged not more often than this.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Runs until it is dropped.
pub(crate) async fn run(limits: Limits, pressure: Arc<MemoryBudget>, metrics: Arc<Metrics>) {
    let bounds = Bounds {
        memory: limits.stalled,
        tcp_memory: Some(limits.tcp_memory).filter(|bytes| *bytes > 0),
        // The gateway handles idle readers, because only it knows which streams are sessions.
        patience: None,
    };
    let (mut streams, mut said) = (0, None::<Instant>);
    let evicted = |shortage: eviction::Shortage, count: usize| {
        metrics.evicted(shortage.word(), count);
        streams += count;
        if said.is_none_or(|said| said.elapsed() >= LOG_INTERVAL) {
            said = Some(Instant::now());
            warn!(
                reason = shortage.word(),
                streams,
                "streams were reset, because their buffered bytes were not read (limits.stalled, limits.tcp_memory)"
            );
            streams = 0;
        }
    };
    eviction::guard(pressure.stalls(), bounds, evicted).await;
}
