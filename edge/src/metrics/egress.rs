//! Metrics of connections that programs on this node open to the cloud.

use super::Metrics;
use causeway_tunnel::copy::ByteCounters;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};
use std::sync::{Arc, atomic::Ordering::Relaxed};

/// Outcome of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EgressOutcome {
    /// Both directions ended in order.
    Done,
    /// No rule of the gateway allows the destination.
    Denied,
    /// The gateway could not connect to the destination.
    Failed,
    /// No gateway was connected in time.
    NoGateway,
    /// The program aborted the connection.
    Aborted,
    /// The gateway or the destination aborted the connection, or the gateway was lost.
    Reset,
    /// The program sent no usable request to the proxy.
    Malformed,
    /// The limit of open connections was reached.
    Limit,
}

impl EgressOutcome {
    fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Denied => "denied",
            Self::Failed => "failed",
            Self::NoGateway => "no-gateway",
            Self::Aborted => "aborted",
            Self::Reset => "reset",
            Self::Malformed => "malformed",
            Self::Limit => "limit",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DirectionLabel {
    direction: &'static str,
}

/// Metrics of egress.
#[derive(Clone, Debug, Default)]
pub(super) struct EgressMetrics {
    connections: Family<OutcomeLabel, Counter>,
    open: Gauge,
    bytes: Family<DirectionLabel, Counter>,
}

impl EgressMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "egress_connections",
            "Connections of programs on this node through egress listeners that have ended, by outcome: done, denied, failed, no-gateway, aborted (by the program), reset, malformed or limit",
            self.connections.clone(),
        );
        registry.register(
            "egress_open_connections",
            "Open connections of programs on this node through egress listeners",
            self.open.clone(),
        );
        registry.register_with_unit(
            "egress",
            "Payload of ended connections through egress listeners, by direction: sent (to the gateway) or received",
            Unit::Bytes,
            self.bytes.clone(),
        );
    }

    fn count(&self, outcome: EgressOutcome) {
        let outcome = outcome.as_str();
        self.connections
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
    }
}

impl Metrics {
    /// Counts a connection that has ended at once.
    pub(crate) fn count_egress(&self, outcome: EgressOutcome) {
        self.egress.count(outcome);
    }

    /// Returns the guard of an open connection.
    pub(crate) fn egress_guard(&self) -> EgressGuard {
        self.egress.open.inc();
        EgressGuard {
            metrics: self.egress.clone(),
            bytes: Arc::default(),
            outcome: EgressOutcome::Aborted,
        }
    }
}

/// Guard of an open connection, which counts the connection when it is dropped.
#[derive(Debug)]
pub(crate) struct EgressGuard {
    metrics: EgressMetrics,
    bytes: Arc<ByteCounters>,
    outcome: EgressOutcome,
}

impl EgressGuard {
    /// Returns the counters of the connection's bytes.
    pub(crate) fn bytes(&self) -> Arc<ByteCounters> {
        self.bytes.clone()
    }

    /// Ends the connection with this outcome.
    pub(crate) fn finish(mut self, outcome: EgressOutcome) {
        self.outcome = outcome;
    }
}

impl Drop for EgressGuard {
    fn drop(&mut self) {
        self.metrics.open.dec();
        self.metrics.count(self.outcome);
        for (direction, bytes) in [("sent", &self.bytes.up), ("received", &self.bytes.down)] {
            let label = DirectionLabel { direction };
            let counter = self.metrics.bytes.get_or_create(&label);
            counter.inc_by(bytes.load(Relaxed));
        }
    }
}
