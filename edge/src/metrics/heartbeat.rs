//! Metrics of delegated heartbeats.

use super::OutcomeLabel;
use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

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
    pub(super) fn register(&self, registry: &mut Registry) {
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
