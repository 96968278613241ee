//! Metrics of the API cache.

use crate::status::ApiCacheStatus;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RoleLabel {
    role: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResourceLabel {
    resource: String,
}

/// Metrics of the API cache. An edge without a cache has none of them.
pub(super) struct ApiCacheMetrics {
    registry: Registry,
    role: Family<RoleLabel, Gauge>,
    ready: Gauge,
    lost: Gauge,
    objects: Family<ResourceLabel, Gauge>,
    watchers: Family<ResourceLabel, Gauge>,
    changes: Counter,
}

impl ApiCacheMetrics {
    pub(super) fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("causeway_edge"),
            role: Family::default(),
            ready: Gauge::default(),
            lost: Gauge::default(),
            objects: Family::default(),
            watchers: Family::default(),
            changes: Counter::default(),
        };
        let registry = &mut metrics.registry;
        let role = "Role of this edge in its pool: pending (has not read all objects yet), follower or leader";
        registry.register("api_cache_role", role, metrics.role.clone());
        let ready = "Whether all resources have been read and are connected to their source";
        registry.register("api_cache_ready", ready, metrics.ready.clone());
        registry.register_with_unit(
            "api_cache_lost_timestamp",
            "Time since which a resource has been disconnected from its source, in Unix time; 0 if all are connected",
            Unit::Seconds,
            metrics.lost.clone(),
        );
        let objects = "Cached objects, by resource";
        registry.register("api_cache_objects", objects, metrics.objects.clone());
        let watchers = "Open watches of clients, by resource";
        registry.register("api_cache_watchers", watchers, metrics.watchers.clone());
        let changes = "Changes of the source that the API cache reads from";
        registry.register("api_cache_changes", changes, metrics.changes.clone());
        metrics
    }

    /// Updates the metrics from the status.
    pub(super) fn update(&self, status: &ApiCacheStatus) {
        for role in ["pending", "follower", "leader"] {
            let gauge = self.role.get_or_create(&RoleLabel { role });
            gauge.set((status.role == role).into());
        }
        self.ready.set(status.ready.into());
        let to_i64 = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let lost = status.resources.iter().filter_map(|one| one.lost).min();
        let lost = i64::try_from(lost.unwrap_or(0) / 1000).unwrap_or(i64::MAX);
        self.lost.set(lost);
        for resource in &status.resources {
            let label = ResourceLabel {
                resource: resource.resource.clone(),
            };
            let objects = self.objects.get_or_create(&label);
            objects.set(to_i64(resource.objects));
            let watchers = self.watchers.get_or_create(&label);
            watchers.set(to_i64(resource.watchers));
        }
    }

    /// Counts a change of the source.
    pub(super) fn count_source_change(&self) {
        self.changes.inc();
    }

    pub(super) fn registry(&self) -> &Registry {
        &self.registry
    }
}
