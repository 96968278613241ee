//! Reasons for the end of a session, with their texts for the log and for metrics.

use crate::audit;
use causeway_rt::log_throttle::LogThrottle;
use causeway_tunnel::{
    StreamError, TunnelEnd,
    control_stream::{ControlStreamError, GoAway},
};
use std::net::SocketAddr;
use tracing::{debug, warn};

#[derive(Debug, thiserror::Error)]
pub(super) enum CloseReason {
    #[error("{0}")]
    Tunnel(TunnelEnd),
    #[error("the edge disconnected: {0:?}")]
    EdgeLeft(String),
    #[error(
        "a newer tunnel of the same edge process replaced this tunnel, and the last stream of this tunnel has ended"
    )]
    TakenOver,
    #[error("{1}")]
    Dismissed(GoAway, String),
    #[error("the nodes of the cluster have not been loaded yet")]
    NodesPending,
    #[error("control stream: {0}")]
    Control(#[from] ControlStreamError),
}

impl CloseReason {
    /// Returns the metric label of the reason.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Self::Tunnel(ended) => ended.as_str(),
            Self::EdgeLeft(_) => "left",
            Self::TakenOver => "taken_over",
            Self::NodesPending => "early",
            Self::Dismissed(why, _) => why.as_str(),
            Self::Control(ControlStreamError::TooSlow(_)) => "hello_timeout",
            Self::Control(
                ControlStreamError::TooLong
                | ControlStreamError::Malformed(_)
                | ControlStreamError::Stream(StreamError::ProtocolViolation(_)),
            ) => "malformed",
            Self::Control(ControlStreamError::Stream(_) | ControlStreamError::Closed) => {
                "control_lost"
            }
        }
    }

    /// Logs the end. A connection lost during the hello is ordinary and not a warning; a refused edge is a warning.
    pub(super) fn log_refusal(&self, edge: &str, from: SocketAddr, early: &LogThrottle) {
        if matches!(self, Self::NodesPending) {
            if let Some(times) = early.record() {
                warn!(edge, peer = %from, times, why = %self, "temporarily refused edges");
                audit::log_rejected_edge(edge, &from, self.word(), self);
            }
        } else if self.word() == "control_lost" {
            debug!(edge, peer = %from, why = %self, "an edge closed the connection during its hello");
        } else {
            warn!(edge, peer = %from, why = %self, "refused an edge");
            audit::log_rejected_edge(edge, &from, self.word(), self);
        }
    }

    /// Returns the more informative of two reasons. A control stream fails together with its tunnel, whose own error is more
    /// precise.
    pub(super) fn prefer_tunnel_end(self, ended: TunnelEnd) -> Self {
        match (self, ended) {
            (end @ Self::Control(_), TunnelEnd::Closed) => end,
            (Self::Control(_), ended) => Self::Tunnel(ended),
            (end, _) => end,
        }
    }
}
