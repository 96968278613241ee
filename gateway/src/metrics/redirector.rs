//! Every metric of a redirector; a doc comment here is the metric's help text.

use super::{ClusterMetrics, Label, Open};
use causeway_rt::Exposition;
use causeway_tunnel::connection_limit::ConnectionLimit;
use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use std::sync::Arc;

const PREFIX: &str = "causeway_redirect";

declare! {
    /// Callers' connections that are open.
    open_connections: Gauge,
    /// Callers' connections that were passed on to a gateway.
    connections: Counter,
    /// Callers' connections that were reset before they came to a gateway, by why.
    connections_failed: Family<[Label; 1], Counter>,
    /// Connections that were refused for want of a place, or evicted since another one needed theirs, by limit.
    connections_turned_away: Family<[Label; 2], Counter>,
    /// Gateways that could not be reached when a connection was to be passed on.
    gateways_failed: Counter,
    /// Addresses of nodes of which connections are led away.
    addresses: Gauge,
    /// Configurations that were read anew, by what came of it.
    reloads: Family<[Label; 1], Counter>,
    /// Nodes of the cluster, by where they are.
    cluster_nodes: Family<[Label; 1], Gauge>,
    /// Since when the cluster's API does not answer, in Unix time; 0 while it does.
    cluster_lost_timestamp_seconds: Gauge,
}

/// The metrics of one redirector.
#[derive(Debug)]
pub struct RedirectorMetrics {
    registry: Registry,
    declared: Declared,
}

/// A caller's connection, for as long as it is open.
#[derive(Debug)]
pub struct CallerGuard {
    _open: Open,
}

impl RedirectorMetrics {
    /// The metrics of a redirector that has done nothing yet.
    #[allow(clippy::new_ret_no_self, reason = "always shared between tasks")]
    pub fn new() -> Arc<Self> {
        let declared = Declared::default();
        let mut registry = Registry::with_prefix(PREFIX);
        declared.register(&mut registry);
        Arc::new(Self { registry, declared })
    }

    /// Returns a limit on connections whose refusals and evictions are counted.
    pub fn connection_limit(self: &Arc<Self>, name: &'static str, most: usize) -> ConnectionLimit {
        let metrics = self.clone();
        ConnectionLimit::new(name, most, move |turned| {
            let labels = [("limit", name), ("outcome", turned.as_str())];
            let turned_away = &metrics.declared.connections_turned_away;
            turned_away.get_or_create(&labels).inc();
        })
    }

    /// Returns all metrics and those of the process as text.
    pub fn encode(&self, format: Exposition) -> String {
        format.encode(&[&self.registry])
    }

    /// What is counted of a cluster's nodes.
    pub fn cluster(&self) -> ClusterMetrics {
        let lost = &self.declared.cluster_lost_timestamp_seconds;
        ClusterMetrics::of(&self.declared.cluster_nodes, lost)
    }

    /// A caller has come.
    pub fn caller(&self) -> CallerGuard {
        CallerGuard {
            _open: Open::new(&self.declared.open_connections),
        }
    }

    /// A caller's connection was passed on.
    pub fn passed_on(&self) {
        self.declared.connections.inc();
    }

    /// A caller's connection was reset.
    pub fn failed(&self, why: &'static str) {
        let labels = [("why", why)];
        self.declared
            .connections_failed
            .get_or_create(&labels)
            .inc();
    }

    /// A gateway could not be reached.
    pub fn gateway_failed(&self) {
        self.declared.gateways_failed.inc();
    }

    /// A configuration was read anew, and taken up or refused.
    pub fn reloaded(&self, well: bool) {
        let labels = [("outcome", if well { "ok" } else { "refused" })];
        self.declared.reloads.get_or_create(&labels).inc();
    }

    /// So many addresses are led away.
    pub fn addresses(&self, count: usize) {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        self.declared.addresses.set(count);
    }
}
