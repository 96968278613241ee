//! The source that the API cache is filled from.

use causeway_tunnel::control_stream::NodePoolMember;
use causeway_watch_cache::{ListWatch, ReflectorError};
use std::{fmt, sync::Arc, time::Duration};

/// Source that the API cache currently reads from.
#[derive(Clone)]
pub(super) struct SelectedSource {
    /// Number that changes with each selection.
    pub(super) generation: u64,
    pub(super) kind: SourceKind,
    pub(super) source: Option<Arc<dyn ListWatch>>,
}

/// Kind and name of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SourceKind {
    Unselected,
    Gateway,
    Leader(NodePoolMember),
    Member(NodePoolMember),
}

/// Message from a store whose source has ended.
pub(super) struct SourceLost {
    pub(super) generation: u64,
    pub(super) error: ReflectorError,
    /// Time for which the store followed the source.
    pub(super) duration: Duration,
}

impl fmt::Display for SourceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unselected => f.write_str("no source"),
            Self::Gateway => f.write_str("a gateway"),
            Self::Leader(leader) => write!(f, "pool leader {}", leader.node),
            Self::Member(member) => write!(f, "pool member {}", member.node),
        }
    }
}

impl SelectedSource {
    /// Returns the initial selection, which has no source.
    pub(super) fn unselected() -> Arc<Self> {
        Arc::new(Self {
            generation: 0,
            kind: SourceKind::Unselected,
            source: None,
        })
    }

    /// Whether the objects come directly from a gateway.
    pub(super) fn is_from_gateway(&self) -> bool {
        self.kind == SourceKind::Gateway
    }
}
