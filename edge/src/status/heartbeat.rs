//! Status of delegated heartbeats.

use schemars::JsonSchema;
use serde::Serialize;

/// State of the heartbeats of an edge.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct HeartbeatStatus {
    /// `alive`, `not_alive`, or `unknown` before the first health check.
    pub kubelet: &'static str,
    /// Pool member that accepted the last heartbeat, while this node has no gateway.
    pub delegate: Option<String>,
    /// Time of the last heartbeat that a pool member accepted, in milliseconds since the Unix epoch.
    pub last_sent: Option<u64>,
    /// Reason why no pool member accepts the heartbeats, while this node has no gateway.
    pub last_error: Option<String>,
}

impl Default for HeartbeatStatus {
    fn default() -> Self {
        Self {
            kubelet: "unknown",
            delegate: None,
            last_sent: None,
            last_error: None,
        }
    }
}

impl HeartbeatStatus {
    /// Records a heartbeat that this member accepted.
    pub(crate) fn sent(&mut self, node: &str) {
        self.delegate = Some(node.to_owned());
        self.last_sent = Some(super::now());
        self.last_error = None;
    }

    /// Records a heartbeat that no member accepted.
    pub(crate) fn failed(&mut self, why: String) {
        (self.delegate, self.last_error) = (None, Some(why));
    }

    /// Records that no heartbeats are sent.
    pub(crate) fn clear(&mut self) {
        (self.delegate, self.last_error) = (None, None);
    }
}
