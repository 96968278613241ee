//! Metrics of a cluster's nodes.

use super::declared::Label;
use prometheus_client::metrics::{family::Family, gauge::Gauge};

/// Handles of the metrics of a cluster's nodes.
#[derive(Clone, Debug)]
pub struct KubernetesMetrics {
    nodes: Family<[Label; 1], Gauge>,
    lost: Gauge,
}

impl KubernetesMetrics {
    pub(super) fn from_gauges(nodes: &Family<[Label; 1], Gauge>, lost: &Gauge) -> Self {
        Self {
            nodes: nodes.clone(),
            lost: lost.clone(),
        }
    }

    /// Sets the number of nodes in the cluster: at the edge, and elsewhere.
    pub fn set_nodes(&self, edge: usize, elsewhere: usize) {
        for (place, count) in [("edge", edge), ("elsewhere", elsewhere)] {
            let gauge = self.nodes.get_or_create(&[("place", place)]);
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// Sets the time since which the cluster's API does not answer, in Unix seconds; `None` while it answers.
    pub fn set_lost(&self, since: Option<u64>) {
        let since = i64::try_from(since.unwrap_or_default()).unwrap_or(i64::MAX);
        self.lost.set(since);
    }
}
