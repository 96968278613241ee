//! Measurements of clients: request latencies and failures. Each client counts its own; they are joined at the end.

use crate::report::rounded;
use hdrhistogram::Histogram;
use serde::Serialize;
use serde_json::{Value, json};
use std::{collections::BTreeMap, time::Duration};

/// Longest time that the histogram distinguishes, in microseconds.
const LONGEST: u64 = 600_000_000;

/// Latencies, in microseconds, with three digits.
#[derive(Clone, Debug)]
pub(crate) struct Latencies(Histogram<u64>);

impl Latencies {
    /// Returns an empty histogram.
    pub(crate) fn new() -> Self {
        let histogram = Histogram::new_with_bounds(1, LONGEST, 3);
        Self(histogram.expect("the limits are valid"))
    }

    /// Adds one.
    pub(crate) fn add(&mut self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(LONGEST);
        self.0.saturating_record(micros.clamp(1, LONGEST));
    }

    /// Adds those of another client.
    pub(crate) fn join(&mut self, other: &Self) {
        self.0 += &other.0;
    }

    /// Returns the number of latencies.
    pub(crate) fn count(&self) -> u64 {
        self.0.len()
    }

    /// Returns each time with its count, in order: the reader can join results of several processes to one histogram.
    pub(crate) fn counts(&self) -> Vec<(u64, u64)> {
        let recorded = self.0.iter_recorded();
        recorded
            .map(|step| (step.value_iterated_to(), step.count_at_value()))
            .collect()
    }

    /// Their percentiles, in microseconds.
    pub(crate) fn summary(&self) -> Value {
        json!({
            "mean": rounded(self.0.mean(), 1),
            "p50": self.0.value_at_quantile(0.5),
            "p90": self.0.value_at_quantile(0.9),
            "p99": self.0.value_at_quantile(0.99),
            "p99.9": self.0.value_at_quantile(0.999),
            "max": self.0.max(),
        })
    }
}

/// Maximum number of kinds of failure that are counted separately.
const KINDS: usize = 16;

/// Failures and how often each occurred.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(transparent)]
pub(crate) struct Failures(BTreeMap<String, u64>);

impl Failures {
    /// Adds one of this kind.
    pub(crate) fn add(&mut self, kind: String) {
        self.more(kind, 1);
    }

    /// Adds those of another client.
    pub(crate) fn join(&mut self, other: Self) {
        for (kind, count) in other.0 {
            self.more(kind, count);
        }
    }

    /// Returns the number of all failures.
    pub(crate) fn count(&self) -> u64 {
        self.0.values().sum()
    }

    fn more(&mut self, kind: String, count: u64) {
        let known = self.0.len() < KINDS || self.0.contains_key(&kind);
        let kind = if known { kind } else { "others".into() };
        *self.0.entry(kind).or_default() += count;
    }
}

/// Returns the rate per second of that many in that time.
pub(crate) fn per_second(count: u64, took: Duration) -> f64 {
    // A count beyond 2^53 would not be reached in a lifetime.
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    let count = count as f64;
    rounded(count / took.as_secs_f64().max(1e-9), 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_of_several_callers_are_one_histogram() {
        let (mut one, mut two) = (Latencies::new(), Latencies::new());
        (1..=99).for_each(|_| one.add(Duration::from_micros(100)));
        two.add(Duration::from_secs(1));
        one.join(&two);
        let summary = one.summary();
        assert_eq!((one.count(), &summary["p50"]), (100, &json!(100)));
        assert!(summary["max"].as_u64().is_some_and(|max| max > 990_000));
        let counts = one.counts();
        assert_eq!((counts[0], counts.len()), ((100, 99), 2));
    }
}
