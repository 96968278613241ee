//! Histogram of durations that takes no lock: one atomic for each bucket.
//!
//! The client library's own histogram locks at every observation, and all workers would share that lock in the path of every
//! request. A scrape reads the buckets one by one, and may therefore miss concurrent observations. The count is derived from the
//! buckets and always agrees with them.

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, NoLabelSet},
    metrics::{MetricType, TypedMetric},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// Upper bounds in microseconds. A local upstream answers within 1 ms, a distant one within 100 ms; a session lasts hours.
const BOUNDS: [u64; 17] = [
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    60_000_000,
    600_000_000,
    3_600_000_000,
];

/// Histogram of durations. Cheap to clone; clones share the counts.
#[derive(Clone, Debug, Default)]
pub(super) struct AtomicHistogram(Arc<Buckets>);

#[derive(Debug, Default)]
struct Buckets {
    below: [AtomicU64; BOUNDS.len()],
    above: AtomicU64,
    sum_us: AtomicU64,
}

impl AtomicHistogram {
    /// Counts one duration.
    pub(super) fn observe(&self, duration: Duration) {
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS.partition_point(|bound| *bound < micros);
        self.0
            .below
            .get(bucket)
            .unwrap_or(&self.0.above)
            .fetch_add(1, Relaxed);
        self.0.sum_us.fetch_add(micros, Relaxed);
    }
}

fn seconds(micros: u64) -> f64 {
    Duration::from_micros(micros).as_secs_f64()
}

impl TypedMetric for AtomicHistogram {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for AtomicHistogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        let below = BOUNDS.iter().zip(&self.0.below);
        let mut buckets: Vec<(f64, u64)> = below
            .map(|(bound, count)| (seconds(*bound), count.load(Relaxed)))
            .collect();
        buckets.push((f64::INFINITY, self.0.above.load(Relaxed)));
        let count = buckets.iter().map(|(_, count)| count).sum();
        let sum = seconds(self.0.sum_us.load(Relaxed));
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}
