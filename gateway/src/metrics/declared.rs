//! All metrics by name, with their help texts.

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, NoLabelSet},
    metrics::{MetricType, TypedMetric, counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

pub(super) type Label = (&'static str, &'static str);
/// Label of a listener; the user chooses its name.
pub(super) type ListenerLabel = (&'static str, String);
pub(super) type SecondsGauge = Gauge<f64, AtomicU64>;

macro_rules! declare {
    ($($(#[doc = $help:literal])+ $field:ident: $metric:ty,)+) => {
        #[derive(Debug, Default)]
        pub(super) struct Declared {
            $($(#[doc = $help])+ pub(super) $field: $metric,)+
        }

        impl Declared {
            pub(super) fn register(&self, registry: &mut Registry) {
                $(registry.register(
                    stringify!($field),
                    // The library adds the full stop.
                    concat!($($help),+).trim().trim_end_matches('.'),
                    self.$field.clone(),
                );)+
            }
        }
    };
}

// Declared after the macro, because macros are visible only from their definition on.

declare! {
    /// Open connections of clients.
    open_connections: Family<[ListenerLabel; 1], Gauge>,
    /// Connections of clients that were accepted.
    connections: Family<[ListenerLabel; 1], Counter>,
    /// TLS handshakes that failed, at listeners and at the tunnel port.
    handshakes_failed: Family<[Label; 2], Counter>,
    /// Streams that are open.
    open_streams: Family<[ListenerLabel; 1], Gauge>,
    /// Streams that ended, by outcome: ok, or the reason of the failure.
    streams: Family<[ListenerLabel; 2], Counter>,
    /// Streams that ended, by class of the status that the client saw.
    responses: Family<[ListenerLabel; 2], Counter>,
    /// Time from a stream's begin to its end.
    stream_duration_seconds: Family<[ListenerLabel; 1], AtomicHistogram>,
    /// Time from a stream's begin to the first byte of its answer.
    stream_first_byte_seconds: Family<[ListenerLabel; 1], AtomicHistogram>,
    /// Payload bytes of ended streams; up is from the client to the upstream.
    stream_bytes: Family<[ListenerLabel; 2], Counter>,
    /// Streams served by another worker than their node's.
    streams_crossed: Counter,
    /// Streams that this gateway forwarded to the gateway that holds the node.
    streams_forwarded: Counter,
    /// Streams that this gateway served for another gateway.
    streams_served_for_peers: Counter,
    /// Forwarded streams whose node had left the other gateway.
    stale_holders: Counter,
    /// Requests that were sent a second time, elsewhere, because their tunnel did not answer or was lost.
    requests_repeated: Counter,
    /// Other gateways, by state.
    peers: Family<[Label; 1], Gauge>,
    /// Nodes that other gateways hold.
    peer_nodes: Gauge,
    /// Longest time for which another gateway has not answered a probe, at the time of the scrape. What is known of its nodes may
    /// be so old.
    peer_lag_seconds: SecondsGauge,
    /// Times that a limit was reached.
    limits_reached: Family<[Label; 1], Counter>,
    /// Connections that were refused or evicted because a limit was reached, by limit.
    connections_rejected: Family<[Label; 2], Counter>,
    /// Tunnels that are registered.
    tunnels: Gauge,
    /// Tunnels that take no new streams because a probe is without an answer, at the time of the scrape.
    suspect_tunnels: Gauge,
    /// Ports of nodes with a tunnel here whose health checks fail, at the time of the scrape.
    unhealthy_ports: Gauge,
    /// Tunnels' connections whose hello was answered or refused.
    registrations: Family<[Label; 1], Counter>,
    /// Tunnels that ended.
    tunnels_ended: Family<[Label; 1], Counter>,
    /// Enrolments and renewals of certificates.
    enrolments: Family<[Label; 2], Counter>,
    /// Quantiles of the tunnels' round trips at the time of the scrape; 1 is the slowest tunnel.
    tunnel_round_trip_seconds: Family<[Label; 1], SecondsGauge>,
    /// Bytes buffered here when each stream was last sampled, of answers for clients and of uploads for upstreams.
    buffered_bytes: Gauge,
    /// Streams with buffered bytes that the receiver does not take, when each was last sampled.
    stalled_streams: Gauge,
    /// Streams that were reset because the receiver did not take their buffered bytes, by the exhausted resource: `memory`
    /// (`limits.stalled`), `tcp_memory` (`limits.tcp_memory`) or `time` (`timeouts.download`).
    evicted_streams: Family<[Label; 1], Counter>,
    /// DNS queries, by result.
    dns_queries: Family<[Label; 1], Counter>,
    /// Connections to upstreams to which the gateway itself speaks TLS, by the version of HTTP that the upstream chose.
    upstream_connections: Family<[Label; 1], Counter>,
    /// Whether the gateway drains.
    draining: Gauge,
    /// Fetches of the keys of issuers of JWTs, by outcome.
    jwks_fetches: Family<[Label; 1], Counter>,
    /// Reviews of clients that the cluster's API was asked for, by kind and by outcome.
    reviews: Family<[Label; 2], Counter>,
    /// Configuration reloads, by outcome.
    reloads: Family<[Label; 1], Counter>,
    /// Whether the last configuration reload succeeded.
    last_reload_successful: Gauge,
    /// Nodes of the cluster, by where they are.
    cluster_nodes: Family<[Label; 1], Gauge>,
    /// Pods of the cluster with addresses of their own. With more than the limit, the number at which it was exceeded. 0 unless `kubernetes.pods` is set.
    cluster_pods: Gauge,
    /// Maximum number of such pods (`kubernetes.pods.max_pods`), above which no pod is reached; 0 unless `kubernetes.pods` is set.
    cluster_pods_limit: Gauge,
    /// Addresses that several running pods have, so that no edge is reached by them. Counted again at each event of the cluster's API, at
    /// least once a minute; 0 unless `kubernetes.pods` is set.
    pod_address_conflicts: Gauge,
    /// Since when the cluster's pods cannot be read, in Unix time; 0 while they can be.
    cluster_pods_lost_timestamp_seconds: Gauge,
    /// Confirmed addresses that several nodes have, so that none of them is reached by it.
    node_address_conflicts: Gauge,
    /// Since when the cluster's API does not answer, in Unix time; 0 while it does.
    cluster_lost_timestamp_seconds: Gauge,
    /// Whether this gateway is the one that writes the cluster's hosts file.
    cluster_hosts_leading: Gauge,
    /// Writes of the cluster's hosts file, by outcome.
    cluster_hosts_writes: Family<[Label; 1], Counter>,
    /// Whether the list of ports in the cluster is refused as it is.
    cluster_ports_refused: Gauge,
    /// Certificate signing requests of the cluster's API, by action: approved, signed, left (unchanged), failed.
    cluster_certificates: Family<[Label; 1], Counter>,
    /// Objects that are cached for edges, by resource.
    api_cache_objects: Family<[ListenerLabel; 1], Gauge>,
    /// Version of the cluster of each cached resource.
    api_cache_version: Family<[ListenerLabel; 1], Gauge>,
    /// Time since which the source of a resource is lost, in Unix time; 0 while it is not lost.
    api_cache_lost_timestamp_seconds: Family<[ListenerLabel; 1], Gauge>,
    /// Watches that are open, by resource.
    api_cache_watchers: Family<[ListenerLabel; 1], Gauge>,
    /// Connections by which edges read.
    api_cache_connections: Gauge,
    /// Maximum number of concurrent connections of edges to the API cache (`api_cache.connections`).
    api_cache_connections_limit: Gauge,
    /// Pools with a leader among the edges that are connected here.
    api_cache_leaders: Gauge,
    /// Delegated heartbeats of nodes without a gateway, by result. Accepted ones: renewed (the Lease), fresh (the Lease needed no
    /// renewal), conflict, `no_lease`, `foreign_lease`, expired (the API answered too slowly) or failed. Refused ones: malformed,
    /// kubelet, stale, replayed, forged, rejected, pool, `too_many` or overloaded.
    delegated_heartbeats: Family<[Label; 1], Counter>,
    /// Nodes whose Lease is renewed by delegated heartbeats.
    delegated_nodes: Gauge,
    /// Whether this gateway is the one that manages delegated nodes: their taint, condition and return.
    delegated_nodes_leading: Gauge,
    /// Expiry of certificates in use, in Unix time, by use: tunnel, listener:NAME, app:PORT, ca and so on.
    certificate_expiry_timestamp_seconds: Family<[ListenerLabel; 1], Gauge>,
}

/// Guard of an open object. Dropping it decrements the gauge.
#[derive(Debug)]
pub(super) struct OpenGauge(Gauge);

impl OpenGauge {
    pub(super) fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for OpenGauge {
    fn drop(&mut self) {
        self.0.dec();
    }
}

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

/// Histogram of durations that takes no lock: one atomic for each bucket. Cheap to clone; clones share the counts.
///
/// The client library's own histogram locks at every observation, and all workers would share that lock in the path of every
/// request. A scrape reads the buckets one by one, and may therefore miss concurrent observations. The count is derived from
/// the buckets and always agrees with them.
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
