//! Metrics of the gateway, each declared once. The doc comment of a declared metric is its help text.
//!
//! The request path updates metrics through guards and handles that are resolved when the gateway starts, so that a request takes
//! no lock. Labels have a fixed set of values (listeners, reasons), and never contain the name of a node or a client. The admin
//! API has the data of each node. Fields are private, so that an unused metric does not compile.

mod declared;
mod listener;

/// Handles of the metrics of a cluster's nodes.
#[derive(Clone, Debug)]
pub struct KubernetesMetrics {
    nodes: Family<[Label; 1], Gauge>,
    lost: Gauge,
}

impl KubernetesMetrics {
    fn from_gauges(nodes: &Family<[Label; 1], Gauge>, lost: &Gauge) -> Self {
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

/// Handles of the metrics of a cluster's pods.
#[derive(Clone, Debug)]
pub struct PodMetrics {
    pods: Gauge,
    limit: Gauge,
    conflicts: Gauge,
    lost: Gauge,
}

impl PodMetrics {
    /// Sets the number of pods in the table, the maximum number, and the number of addresses that several running pods have.
    pub fn set_pods(&self, count: usize, limit: usize, conflicts: usize) {
        self.pods.set(to_i64(count));
        self.limit.set(to_i64(limit));
        self.conflicts.set(to_i64(conflicts));
    }

    /// Sets the time since which the pods cannot be read, in Unix seconds; `None` while they can be.
    pub fn set_lost(&self, since: Option<u64>) {
        let since = i64::try_from(since.unwrap_or_default()).unwrap_or(i64::MAX);
        self.lost.set(since);
    }
}

/// Guard of an edge's connection to the API cache, for as long as it is open.
#[derive(Debug)]
pub struct ApiCacheConnectionGuard {
    _open: OpenGauge,
}

impl Metrics {
    /// Counts an edge's connection to the API cache until the guard is dropped.
    pub fn reader_guard(&self) -> ApiCacheConnectionGuard {
        ApiCacheConnectionGuard {
            _open: OpenGauge::new(&self.declared.api_cache_connections),
        }
    }

    /// Sets the maximum number of concurrent connections to the API cache.
    pub fn set_reader_limit(&self, connections: usize) {
        self.declared
            .api_cache_connections_limit
            .set(to_i64(connections));
    }

    /// Sets the number of pools with a leader at this gateway.
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

#[cfg(test)]
mod tests;

use causeway_rt::{
    Exposition,
    connection_limit::{ConnectionLimit, RejectReason},
};
use causeway_watch_cache::Status;
use declared::{Declared, Label, OpenGauge};
pub use listener::{ConnectionGuard, ListenerMetrics, StreamGuard, StreamOutcome};
use prometheus_client::{
    metrics::{family::Family, gauge::Gauge},
    registry::Registry,
};
use std::{sync::Arc, time::Duration};

const PREFIX: &str = "causeway_gateway";

/// The metrics of one gateway.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    declared: Declared,
}

/// Guard of a registered tunnel, for as long as it is registered.
#[derive(Debug)]
pub struct TunnelGuard {
    _open: OpenGauge,
}

/// Returns name, type and help of all metrics, in the format of a scrape (`OpenMetrics`).
pub fn describe() -> String {
    Metrics::new().encode(Exposition::OpenMetrics)
}

impl Metrics {
    /// Returns the metrics of a gateway that has just started.
    #[allow(clippy::new_ret_no_self, reason = "always shared between workers")]
    pub fn new() -> Arc<Self> {
        let declared = Declared::default();
        let mut registry = Registry::with_prefix(PREFIX);
        declared.register(&mut registry);
        // The configuration at the start counts as a successful reload.
        declared.last_reload_successful.set(1);
        Arc::new(Self { registry, declared })
    }

    /// Returns all metrics and those of the process as text.
    pub fn encode(&self, format: Exposition) -> String {
        format.encode(&[&self.registry])
    }

    /// Returns the handles of a listener, by its configured name.
    pub fn listener(&self, name: &str) -> Arc<ListenerMetrics> {
        Arc::new(ListenerMetrics::from_declared(&self.declared, name))
    }

    /// Counts a failed TLS handshake.
    pub fn handshake_failed(&self, listener: &'static str, stage: &'static str) {
        let labels = [("listener", listener), ("why", stage)];
        self.declared.handshakes_failed.get_or_create(&labels).inc();
    }

    /// Counts a stream that is served by another worker than its node's.
    pub fn count_worker_crossing(&self) {
        self.declared.streams_crossed.inc();
    }

    /// Counts a stream that is forwarded to another gateway.
    pub fn count_forwarded_stream(&self) {
        self.declared.streams_forwarded.inc();
    }

    /// Counts a stream that is served for another gateway.
    pub fn count_served_for_peer(&self) {
        self.declared.streams_served_for_peers.inc();
    }

    /// Counts a forwarded stream whose node had left the other gateway.
    pub fn count_stale_holder(&self) {
        self.declared.stale_holders.inc();
    }

    /// Counts a request that is sent a second time.
    pub fn count_repeated_request(&self) {
        self.declared.requests_repeated.inc();
    }

    /// Sets the number of other gateways by state, and the number of nodes that they hold.
    pub fn set_peers(&self, by_state: [(&'static str, usize); 3], nodes: usize) {
        for (state, number) in by_state {
            let labels = [("state", state)];
            self.declared
                .peers
                .get_or_create(&labels)
                .set(to_i64(number));
        }
        self.declared.peer_nodes.set(to_i64(nodes));
    }

    /// Sets the longest time for which another gateway has not answered.
    pub fn set_peer_lag(&self, lag: Duration) {
        self.declared.peer_lag_seconds.set(lag.as_secs_f64());
    }

    /// Counts a connection to an upstream.
    pub fn count_upstream_connection(&self, http2: bool) {
        let labels = [("http", if http2 { "2" } else { "1.1" })];
        self.declared
            .upstream_connections
            .get_or_create(&labels)
            .inc();
    }

    /// Counts stalled streams that were reset.
    pub fn count_evicted(&self, shortage: &'static str, streams: usize) {
        let labels = [("reason", shortage)];
        let streams = u64::try_from(streams).unwrap_or(u64::MAX);
        self.declared
            .evicted_streams
            .get_or_create(&labels)
            .inc_by(streams);
    }

    /// Counts a refusal because of a limit.
    pub fn count_limit_reached(&self, which: &'static str) {
        let labels = [("limit", which)];
        self.declared.limits_reached.get_or_create(&labels).inc();
    }

    /// Returns a connection limit whose refusals and evictions are counted.
    pub fn connection_limit(self: &Arc<Self>, name: &'static str, max: usize) -> ConnectionLimit {
        let metrics = self.clone();
        ConnectionLimit::new(name, max, move |turned| {
            let labels = [("limit", name), ("outcome", turned.as_str())];
            let turned_away = &metrics.declared.connections_rejected;
            turned_away.get_or_create(&labels).inc();
            if turned == RejectReason::Refused {
                metrics.count_limit_reached(name);
            }
        })
    }

    /// Counts a registered tunnel until the guard is dropped.
    pub fn tunnel_guard(&self) -> TunnelGuard {
        TunnelGuard {
            _open: OpenGauge::new(&self.declared.tunnels),
        }
    }

    /// Counts a registration: `ok`, or the reason of the rejection.
    pub fn count_registration(&self, outcome: &'static str) {
        let labels = [("outcome", outcome)];
        self.declared.registrations.get_or_create(&labels).inc();
    }

    /// Counts a tunnel that ended.
    pub fn count_tunnel_end(&self, why: &'static str) {
        let labels = [("why", why)];
        self.declared.tunnels_ended.get_or_create(&labels).inc();
    }

    /// Counts a certificate request by `enrol` or `renew`: `ok`, or the reason of the refusal.
    pub fn count_enrolment(&self, operation: &'static str, outcome: &'static str) {
        let labels = [("operation", operation), ("outcome", outcome)];
        self.declared.enrolments.get_or_create(&labels).inc();
    }

    /// Counts a fetch of the keys of a JWT issuer.
    pub fn count_jwks_fetch(&self, succeeded: bool) {
        let labels = [("outcome", if succeeded { "ok" } else { "failed" })];
        self.declared.jwks_fetches.get_or_create(&labels).inc();
    }

    /// Counts a review of a `token` or an `access` by the cluster's API.
    pub fn count_review(&self, question: &'static str, outcome: &'static str) {
        let labels = [("question", question), ("outcome", outcome)];
        self.declared.reviews.get_or_create(&labels).inc();
    }

    /// Counts a DNS query by its outcome.
    pub fn count_dns_query(&self, outcome: &'static str) {
        let labels = [("outcome", outcome)];
        self.declared.dns_queries.get_or_create(&labels).inc();
    }

    /// Sets the number of buffered bytes and of stalled streams.
    pub fn set_unread(&self, bytes: usize, stalled: usize) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.declared.buffered_bytes.set(bytes);
        let stalled = i64::try_from(stalled).unwrap_or(i64::MAX);
        self.declared.stalled_streams.set(stalled);
    }

    /// Sets the number of suspect tunnels.
    pub fn set_suspect_tunnels(&self, tunnels: usize) {
        self.declared
            .suspect_tunnels
            .set(i64::try_from(tunnels).unwrap_or(i64::MAX));
    }

    /// Sets the number of ports whose health checks fail.
    pub fn set_unhealthy_ports(&self, ports: usize) {
        self.declared.unhealthy_ports.set(to_i64(ports));
    }

    /// Sets the quantiles of the tunnels' round-trip times.
    pub fn set_round_trips(&self, mut all: Vec<Duration>) {
        all.sort_unstable();
        for (label, hundredths) in [("0.5", 50), ("0.9", 90), ("0.99", 99), ("1", 100)] {
            let rank = (all.len() * hundredths).div_ceil(100).saturating_sub(1);
            let round_trip = all.get(rank).copied().unwrap_or_default();
            let labels = [("quantile", label)];
            let gauge = self
                .declared
                .tunnel_round_trip_seconds
                .get_or_create(&labels);
            gauge.set(round_trip.as_secs_f64());
        }
    }

    /// Counts a configuration reload: the new configuration is in force, or was refused.
    pub fn count_reload(&self, succeeded: bool) {
        let labels = [("outcome", if succeeded { "ok" } else { "refused" })];
        self.declared.reloads.get_or_create(&labels).inc();
        self.declared.last_reload_successful.set(succeeded.into());
    }

    /// Returns the handles of the metrics of a cluster's nodes.
    pub fn kubernetes_metrics(&self) -> KubernetesMetrics {
        let lost = &self.declared.cluster_lost_timestamp_seconds;
        KubernetesMetrics::from_gauges(&self.declared.cluster_nodes, lost)
    }

    /// Returns the handles of the metrics of a cluster's pods.
    pub fn pod_metrics(&self) -> PodMetrics {
        PodMetrics {
            pods: self.declared.cluster_pods.clone(),
            limit: self.declared.cluster_pods_limit.clone(),
            conflicts: self.declared.pod_address_conflicts.clone(),
            lost: self.declared.cluster_pods_lost_timestamp_seconds.clone(),
        }
    }

    /// Sets the number of addresses that several nodes share.
    pub fn set_address_conflicts(&self, addresses: usize) {
        let addresses = i64::try_from(addresses).unwrap_or(i64::MAX);
        self.declared.node_address_conflicts.set(addresses);
    }

    /// Sets whether this gateway writes the hosts file.
    pub fn set_hosts_leading(&self, is_leader: bool) {
        self.declared.cluster_hosts_leading.set(is_leader.into());
    }

    /// Counts a write to the hosts file, or a removal.
    pub fn count_hosts_write(&self, succeeded: bool) {
        let labels = [("outcome", if succeeded { "ok" } else { "failed" })];
        let writes = &self.declared.cluster_hosts_writes;
        writes.get_or_create(&labels).inc();
    }

    /// Sets whether the list of ports in the cluster is refused.
    pub fn set_ports_refused(&self, refused: bool) {
        self.declared.cluster_ports_refused.set(refused.into());
    }

    /// Counts a certificate request at the cluster's API by outcome: `approved`, `signed`, `left` (unchanged) or `failed`.
    pub fn count_cluster_certificate(&self, outcome: &'static str) {
        let labels = [("outcome", outcome)];
        let certificates = &self.declared.cluster_certificates;
        certificates.get_or_create(&labels).inc();
    }

    /// Counts a delegated heartbeat.
    pub fn count_delegated_heartbeat(&self, result: &'static str) {
        let labels = [("result", result)];
        let heartbeats = &self.declared.delegated_heartbeats;
        heartbeats.get_or_create(&labels).inc();
    }

    /// Sets the number of nodes whose Lease is renewed by delegated heartbeats.
    pub fn set_delegated_nodes(&self, nodes: usize) {
        let nodes = i64::try_from(nodes).unwrap_or(i64::MAX);
        self.declared.delegated_nodes.set(nodes);
    }

    /// Sets whether this gateway manages delegated nodes.
    pub fn set_delegated_nodes_leading(&self, leads: bool) {
        self.declared.delegated_nodes_leading.set(leads.into());
    }

    /// Sets the expiry times of certificates, by use.
    pub fn set_certificate_expiries(&self, expiries: impl IntoIterator<Item = (String, u64)>) {
        let family = &self.declared.certificate_expiry_timestamp_seconds;
        family.clear();
        for (used_for, seconds) in expiries {
            let gauge = family.get_or_create(&[("certificate", used_for)]);
            gauge.set(i64::try_from(seconds).unwrap_or(i64::MAX));
        }
    }

    /// Reports that the gateway drains.
    pub fn set_draining(&self) {
        self.declared.draining.set(1);
    }
}
