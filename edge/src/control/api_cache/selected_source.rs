//! The source that the API cache is filled from.

use causeway_tunnel::control_stream::NodePoolMember;
use causeway_watch_cache::{ListWatch, ReflectorError};
use std::{fmt, sync::Arc, time::Duration};

/// Source that is read from.
#[derive(Clone)]
pub(super) struct SelectedSource {
    /// Another one at each change.
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

/// Message of a store whose source has ended.
pub(super) struct SourceLost {
    pub(super) generation: u64,
    pub(super) error: ReflectorError,
    /// How long it was followed.
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
    /// At the beginning.
    pub(super) fn unselected() -> Arc<Self> {
        Arc::new(Self {
            generation: 0,
            kind: SourceKind::Unselected,
            source: None,
        })
    }

    /// Whether the objects come from a gateway, and from no other member.
    pub(super) fn is_from_gateway(&self) -> bool {
        self.kind == SourceKind::Gateway
    }
}
