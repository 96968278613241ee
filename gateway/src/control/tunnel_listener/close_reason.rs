//! How a conversation ends, in words for the log and for metrics.

use crate::{audit, log_throttle::LogThrottle};
use causeway_tunnel::{
    StreamError, TunnelEnd,
    control_stream::{ControlStreamError, GoAway},
};
use std::net::SocketAddr;
use tracing::{debug, warn};

/// How a conversation ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum CloseReason {
    #[error("{0}")]
    Tunnel(TunnelEnd),
    #[error("the edge left: {0:?}")]
    Left(String),
    #[error("another tunnel of the same process has taken over, and its last stream has ended")]
    TakenOver,
    #[error("{1}")]
    Dismissed(GoAway, String),
    #[error("the nodes of the cluster are not known yet")]
    Early,
    #[error("control stream: {0}")]
    Control(#[from] ControlStreamError),
}

impl CloseReason {
    /// One word, for metrics.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Self::Tunnel(ended) => ended.word(),
            Self::Left(_) => "left",
            Self::TakenOver => "taken_over",
            Self::Early => "early",
            Self::Dismissed(why, _) => why.word(),
            Self::Control(ControlStreamError::TooSlow(_)) => "hello_timeout",
            Self::Control(
                ControlStreamError::TooLong
                | ControlStreamError::Malformed(_)
                | ControlStreamError::Stream(StreamError::Nonsense(_)),
            ) => "malformed",
            Self::Control(ControlStreamError::Stream(_) | ControlStreamError::Closed) => {
                "control_lost"
            }
        }
    }

    /// An edge whose link broke during the hello is ordinary; one that was refused wants a look.
    pub(super) fn log_refusal(&self, edge: &str, from: SocketAddr, early: &LogThrottle) {
        if matches!(self, Self::Early) {
            if let Some(times) = early.happened() {
                warn!(edge, peer = %from, times, why = %self, "sent edges away for now");
                audit::log_rejected_edge(edge, &from, self.word(), self);
            }
        } else if self.word() == "control_lost" {
            debug!(edge, peer = %from, why = %self, "an edge hung up during its hello");
        } else {
            warn!(edge, peer = %from, why = %self, "refused an edge");
            audit::log_rejected_edge(edge, &from, self.word(), self);
        }
    }

    /// A control stream breaks with its tunnel: then the tunnel's own words say more.
    pub(super) fn blame(self, ended: TunnelEnd) -> Self {
        match (self, ended) {
            (end @ Self::Control(_), TunnelEnd::Closed) => end,
            (Self::Control(_), ended) => Self::Tunnel(ended),
            (end, _) => end,
        }
    }
}
