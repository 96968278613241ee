//! Every metric of the edge, declared once.
//!
//! The data path updates the metrics through guards and single calls, and no other module creates labels. A field that is
//! never updated is dead code and fails the build.

mod api_cache;
mod egress;

use crate::status::ApiCacheStatus;
use api_cache::ApiCacheMetrics;
use causeway_certs::LeafCertificate;
use causeway_rt::{Exposition, connection_limit::ConnectionLimit};
use causeway_tunnel::{RejectCode, StreamKind};
use egress::EgressMetrics;
pub(crate) use egress::{EgressGuard, EgressOutcome};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};
use std::{collections::BTreeMap, fmt, sync::OnceLock, time::Duration};

/// Outcome of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamOutcome {
    /// The stream ended in order.
    Done,
    /// The edge refused the stream, or could not reach its upstream.
    Refused(RejectCode),
    /// The client closed the stream.
    ClientClosed,
    /// The upstream failed before the stream had ended.
    UpstreamFailed,
    /// The tunnel was lost.
    TunnelLost,
    /// The edge reset the stream, because its buffered bytes were not consumed.
    Evicted,
}

impl StreamOutcome {
    fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Refused(refusal) => refusal.as_str(),
            Self::ClientClosed => "client-closed",
            Self::UpstreamFailed => "upstream-failed",
            Self::TunnelLost => "tunnel-lost",
            Self::Evicted => "evicted",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StreamLabels {
    kind: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ListenerLabel {
    listener: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LimitLabels {
    limit: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CauseLabel {
    cause: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PortLabel {
    port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

/// Metrics of one edge.
pub(crate) struct Metrics {
    registry: Registry,
    streams: Family<StreamLabels, Counter>,
    open_streams: Family<KindLabel, Gauge>,
    dials: Family<OutcomeLabel, Counter>,
    dial_failures: Family<CauseLabel, Counter>,
    dial_seconds: Histogram,
    healthy: Family<PortLabel, Gauge>,
    connections: Family<OutcomeLabel, Counter>,
    retries: Counter,
    rejected_connections: Family<LimitLabels, Counter>,
    stalled: Gauge,
    evicted: Family<ReasonLabel, Counter>,
    tunnels: Gauge,
    attempts: Family<OutcomeLabel, Counter>,
    certificate_expiry: Gauge,
    listener_certificate_expiry: Family<ListenerLabel, Gauge>,
    renewals: Family<OutcomeLabel, Counter>,
    reloads: Family<OutcomeLabel, Counter>,
    last_reload_successful: Gauge,
    api_cache: OnceLock<ApiCacheMetrics>,
    egress: EgressMetrics,
    pub(crate) heartbeat: HeartbeatMetrics,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("causeway_edge"),
            streams: Family::default(),
            open_streams: Family::default(),
            dials: Family::default(),
            dial_failures: Family::default(),
            // From the 50 µs of a loopback connection to the seconds of the dial timeout.
            dial_seconds: Histogram::new(exponential_buckets(0.000_05, 4.0, 10)),
            healthy: Family::default(),
            connections: Family::default(),
            retries: Counter::default(),
            rejected_connections: Family::default(),
            stalled: Gauge::default(),
            evicted: Family::default(),
            tunnels: Gauge::default(),
            attempts: Family::default(),
            certificate_expiry: Gauge::default(),
            listener_certificate_expiry: Family::default(),
            renewals: Family::default(),
            reloads: Family::default(),
            last_reload_successful: Gauge::default(),
            api_cache: OnceLock::new(),
            egress: EgressMetrics::default(),
            heartbeat: HeartbeatMetrics::default(),
        };
        // The initial configuration counts as loaded.
        metrics.last_reload_successful.set(1);
        metrics.register();
        metrics.register_dials();
        metrics.register_stalls();
        metrics.register_expiries();
        metrics.egress.register(&mut metrics.registry);
        metrics.heartbeat.register(&mut metrics.registry);
        metrics
    }
}

/// Returns name, type and help of all metrics, as an edge exposes them (`OpenMetrics`).
pub fn describe() -> String {
    let metrics = Metrics::default();
    metrics.api_cache.get_or_init(ApiCacheMetrics::new);
    metrics.encode(Exposition::OpenMetrics)
}

impl Metrics {
    fn register(&mut self) {
        let registry = &mut self.registry;
        let streams = self.streams.clone();
        registry.register(
            "streams",
            "Streams that have ended, by kind and outcome",
            streams,
        );
        let open = self.open_streams.clone();
        registry.register("open_streams", "Open streams, by kind", open);
        let connections = self.connections.clone();
        registry.register(
            "upstream_connections",
            "Upstream connections used for requests, by kind: new or reused",
            connections,
        );
        let retries = self.retries.clone();
        registry.register(
            "upstream_retries",
            "Requests that were retried because an idle connection closed without any response bytes",
            retries,
        );
        let turned_away = self.rejected_connections.clone();
        registry.register(
            "connections_rejected",
            "Connections that were refused or evicted because a limit was reached, by limit",
            turned_away,
        );
        let tunnels = self.tunnels.clone();
        registry.register("tunnels", "Open tunnels", tunnels);
        let attempts = self.attempts.clone();
        registry.register(
            "tunnel_attempts",
            "Attempts to open a tunnel, by outcome",
            attempts,
        );
        let renewals = self.renewals.clone();
        registry.register(
            "renewals",
            "Attempts to renew this node's certificate, by outcome",
            renewals,
        );
        let reloads = self.reloads.clone();
        registry.register("reloads", "Configuration reloads, by outcome", reloads);
        registry.register(
            "last_reload_successful",
            "Whether the last configuration reload succeeded",
            self.last_reload_successful.clone(),
        );
    }

    fn register_dials(&mut self) {
        let registry = &mut self.registry;
        let dials = self.dials.clone();
        registry.register(
            "upstream_dials",
            "Attempts to open a TCP connection to an upstream, by outcome",
            dials,
        );
        registry.register(
            "upstream_dial_failures",
            "Failed TCP connections to upstreams, by cause: target-refused, target-timeout, target-unresolved, resolve-timeout, target-unreachable, policy, or exhausted (this edge is out of file descriptors, local ports or memory)",
            self.dial_failures.clone(),
        );
        registry.register_with_unit(
            "upstream_dial",
            "Time to open a TCP connection to an upstream, including name resolution",
            Unit::Seconds,
            self.dial_seconds.clone(),
        );
        registry.register(
            "upstream_healthy",
            "Whether the health check of an upstream succeeds, by node port; only ports with a health check",
            self.healthy.clone(),
        );
    }

    fn register_stalls(&mut self) {
        let registry = &mut self.registry;
        registry.register(
            "stalled_streams",
            "Streams with buffered bytes that are not being read, at the last check",
            self.stalled.clone(),
        );
        registry.register(
            "evicted_streams",
            "Stalled streams that were reset, by exhausted limit: memory (limits.stalled) or tcp_memory (limits.tcp_memory)",
            self.evicted.clone(),
        );
    }

    fn register_expiries(&mut self) {
        let registry = &mut self.registry;
        registry.register_with_unit(
            "certificate_expiry_timestamp",
            "Expiry of this node's certificate, in Unix time",
            Unit::Seconds,
            self.certificate_expiry.clone(),
        );
        let listeners = self.listener_certificate_expiry.clone();
        registry.register_with_unit(
            "listener_certificate_expiry_timestamp",
            "Expiry of the certificate of an API cache listener, in Unix time",
            Unit::Seconds,
            listeners,
        );
    }

    /// Returns all metrics of the edge and of its process as text.
    pub(crate) fn encode(&self, format: Exposition) -> String {
        match self.api_cache.get() {
            Some(api_cache) => format.encode(&[&self.registry, api_cache.registry()]),
            None => format.encode(&[&self.registry]),
        }
    }

    /// Counts a dial that ended, with the cause if it failed.
    pub(crate) fn record_dial(&self, failure: Option<RejectCode>, elapsed: Duration) {
        let outcome = if failure.is_none() {
            "connected"
        } else {
            "failed"
        };
        if let Some(failure) = failure {
            let cause = failure.as_str();
            let failures = self.dial_failures.get_or_create(&CauseLabel { cause });
            failures.inc();
        }
        self.dials.get_or_create(&OutcomeLabel { outcome }).inc();
        self.dial_seconds.observe(elapsed.as_secs_f64());
    }

    /// Sets whether the upstreams of ports are healthy.
    pub(crate) fn set_upstream_health(&self, states: impl IntoIterator<Item = (u16, bool)>) {
        self.healthy.clear();
        for (port, is_healthy) in states {
            let gauge = self.healthy.get_or_create(&PortLabel { port });
            gauge.set(is_healthy.into());
        }
    }

    /// Counts a request on a pooled connection, or on a new one.
    pub(crate) fn count_connection(&self, reused: bool) {
        let outcome = if reused { "reused" } else { "new" };
        self.connections
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
    }

    /// Sets the number of stalled streams.
    pub(crate) fn set_stalled(&self, streams: usize) {
        self.stalled.set(i64::try_from(streams).unwrap_or(i64::MAX));
    }

    /// Counts stalled streams that were reset.
    pub(crate) fn count_evicted(&self, reason: &'static str, streams: usize) {
        let streams = u64::try_from(streams).unwrap_or(u64::MAX);
        self.evicted
            .get_or_create(&ReasonLabel { reason })
            .inc_by(streams);
    }

    /// Counts a request that was sent again.
    pub(crate) fn count_retry(&self) {
        self.retries.inc();
    }

    /// Returns a limit on connections whose refusals and evictions are counted.
    pub(crate) fn connection_limit(&self, name: &'static str, max: usize) -> ConnectionLimit {
        let counts = self.rejected_connections.clone();
        ConnectionLimit::new(name, max, move |reject_reason| {
            let (limit, outcome) = (name, reject_reason.as_str());
            counts.get_or_create(&LimitLabels { limit, outcome }).inc();
        })
    }

    /// Counts an attempt to open a tunnel, by its outcome.
    pub(crate) fn count_attempt(&self, outcome: &'static str) {
        self.attempts.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Sets the expiry of this node's certificate, in Unix seconds.
    pub(crate) fn set_certificate_expiry(&self, seconds: u64) {
        let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
        self.certificate_expiry.set(seconds);
    }

    /// Sets the expiry of the certificates of these listeners.
    pub(crate) fn set_listener_expiries(&self, leaves: &BTreeMap<&'static str, LeafCertificate>) {
        for (listener, leaf) in leaves {
            let seconds = i64::try_from(leaf.not_after().as_secs()).unwrap_or(i64::MAX);
            let listener = ListenerLabel { listener };
            let gauge = self.listener_certificate_expiry.get_or_create(&listener);
            gauge.set(seconds);
        }
    }

    /// Counts an attempt to renew the certificate, by its outcome.
    pub(crate) fn count_renewal(&self, outcome: &'static str) {
        self.renewals.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Counts a reload of the configuration, which was applied or refused.
    pub(crate) fn count_reload(&self, is_ok: bool) {
        let outcome = if is_ok { "ok" } else { "refused" };
        self.reloads.get_or_create(&OutcomeLabel { outcome }).inc();
        self.last_reload_successful.set(is_ok.into());
    }

    /// Records that parts of the initial configuration are not in use.
    pub(crate) fn mark_startup_errors(&self) {
        self.last_reload_successful.set(0);
    }

    /// Updates the metrics of the API cache.
    pub(crate) fn update_api_cache(&self, status: &ApiCacheStatus) {
        self.api_cache
            .get_or_init(ApiCacheMetrics::new)
            .update(status);
    }

    /// Counts a change of the source.
    pub(crate) fn count_source_change(&self) {
        self.api_cache
            .get_or_init(ApiCacheMetrics::new)
            .count_source_change();
    }

    /// Counts a tunnel as open until the guard is dropped.
    pub(crate) fn tunnel_guard(&self) -> TunnelGuard {
        self.tunnels.inc();
        TunnelGuard(self.tunnels.clone())
    }
}

/// Guard of an open tunnel.
#[derive(Debug)]
pub(crate) struct TunnelGuard(Gauge);

impl Drop for TunnelGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Guard of a stream that is served. Dropping the guard counts the outcome of the stream.
pub(crate) struct StreamGuard<'a> {
    metrics: &'a Metrics,
    kind: &'static str,
    ending: StreamOutcome,
}

impl<'a> StreamGuard<'a> {
    pub(crate) fn new(metrics: &'a Metrics, kind: &StreamKind) -> Self {
        let kind = match kind {
            StreamKind::Request => "request",
            StreamKind::Upgrade(_) => "upgrade",
            StreamKind::Tcp => "tcp",
        };
        metrics
            .open_streams
            .get_or_create(&KindLabel { kind })
            .inc();
        Self {
            metrics,
            kind,
            // Outcome of a stream whose task is dropped when the edge stops.
            ending: StreamOutcome::TunnelLost,
        }
    }

    pub(crate) fn set_outcome(&mut self, outcome: StreamOutcome) {
        self.ending = outcome;
    }
}

impl Drop for StreamGuard<'_> {
    fn drop(&mut self) {
        let (kind, outcome) = (self.kind, self.ending.as_str());
        self.metrics
            .open_streams
            .get_or_create(&KindLabel { kind })
            .dec();
        self.metrics
            .streams
            .get_or_create(&StreamLabels { kind, outcome })
            .inc();
    }
}

/// Result of a request of another pool member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RelayOutcome {
    /// The heartbeat was sent to a gateway.
    Sent,
    /// This node has no gateway itself.
    NoGateway,
    /// The nonce is not of a tunnel of this node, or is too old.
    Nonce,
    /// The member sends heartbeats too often.
    TooOften,
    /// The heartbeat is another node's, or too long.
    Refused,
}

impl RelayOutcome {
    fn as_str(self) -> &'static str {
        match self {
            Self::Sent => "sent",
            Self::NoGateway => "no_gateway",
            Self::Nonce => "nonce",
            Self::TooOften => "too_often",
            Self::Refused => "refused",
        }
    }
}

/// Counts of heartbeats, and the state of the kubelet.
#[derive(Default)]
pub(crate) struct HeartbeatMetrics {
    sent: Family<OutcomeLabel, Counter>,
    relayed: Family<OutcomeLabel, Counter>,
    kubelet_alive: Gauge,
}

impl HeartbeatMetrics {
    fn register(&self, registry: &mut Registry) {
        registry.register(
            "heartbeats_delegated",
            "Heartbeats of this node for which it asked other members of its pool, by outcome: accepted or failed",
            self.sent.clone(),
        );
        registry.register(
            "heartbeats_relayed",
            "Requests of other pool members to relay a heartbeat, by outcome: sent, no_gateway, nonce, too_often or refused",
            self.relayed.clone(),
        );
        registry.register(
            "kubelet_alive",
            "Whether the kubelet of this node has passed its health check within heartbeat.alive_for",
            self.kubelet_alive.clone(),
        );
    }

    /// Counts an attempt to delegate a heartbeat of this node.
    pub(crate) fn count_sent(&self, accepted: bool) {
        let outcome = if accepted { "accepted" } else { "failed" };
        self.sent.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Counts a request of another member.
    pub(crate) fn count_relayed(&self, outcome: RelayOutcome) {
        let outcome = outcome.as_str();
        self.relayed.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Sets the state of the kubelet.
    pub(crate) fn set_kubelet_alive(&self, alive: bool) {
        self.kubelet_alive.set(alive.into());
    }
}
