//! How a conversation ends, in words for the log and for metrics.

use crate::{audit, seldom::Seldom};
use causeway_tunnel::{
    Ended, StreamError,
    hello::{ControlError, Dismissal},
};
use std::net::SocketAddr;
use tracing::{debug, warn};

/// How a conversation ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    #[error("{0}")]
    Tunnel(Ended),
    #[error("the edge left: {0:?}")]
    Left(String),
    #[error("another tunnel of the same process has taken over, and its last stream has ended")]
    TakenOver,
    #[error("{1}")]
    Dismissed(Dismissal, String),
    #[error("the nodes of the cluster are not known yet")]
    Early,
    #[error("control stream: {0}")]
    Control(#[from] ControlError),
}

impl End {
    /// One word, for metrics.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Self::Tunnel(ended) => ended.word(),
            Self::Left(_) => "left",
            Self::TakenOver => "taken_over",
            Self::Early => "early",
            Self::Dismissed(why, _) => why.word(),
            Self::Control(ControlError::TooSlow(_)) => "hello_timeout",
            Self::Control(
                ControlError::TooLong
                | ControlError::Malformed(_)
                | ControlError::Stream(StreamError::Nonsense(_)),
            ) => "malformed",
            Self::Control(ControlError::Stream(_) | ControlError::Closed) => "control_lost",
        }
    }

    /// An edge whose link broke during the hello is ordinary; one that was refused wants a look.
    pub(super) fn log_refusal(&self, edge: &str, from: SocketAddr, early: &Seldom) {
        if matches!(self, Self::Early) {
            if let Some(times) = early.happened() {
                warn!(edge, peer = %from, times, why = %self, "sent edges away for now");
                audit::refused_edge(edge, &from, self.word(), self);
            }
        } else if self.word() == "control_lost" {
            debug!(edge, peer = %from, why = %self, "an edge hung up during its hello");
        } else {
            warn!(edge, peer = %from, why = %self, "refused an edge");
            audit::refused_edge(edge, &from, self.word(), self);
        }
    }

    /// A control stream breaks with its tunnel: then the tunnel's own words say more.
    pub(super) fn blame(self, ended: Ended) -> Self {
        match (self, ended) {
            (end @ Self::Control(_), Ended::Closed) => end,
            (Self::Control(_), ended) => Self::Tunnel(ended),
            (end, _) => end,
        }
    }
}
