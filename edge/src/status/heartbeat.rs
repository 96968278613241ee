//! Status of delegated heartbeats.

use schemars::JsonSchema;
use serde::Serialize;

/// State of the heartbeats of an edge.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct HeartbeatStatus {
    /// `alive`, `not_alive`, or `unknown` before the first health check.
    pub kubelet: &'static str,
    /// Pool member that has taken the last heartbeat, while this node has no gateway.
    pub delegate: Option<String>,
    /// Time of the last heartbeat that a pool member has taken, in milliseconds since the Unix epoch.
    pub last_sent: Option<u64>,
    /// Why no pool member takes the heartbeats, while this node has no gateway.
    pub trouble: Option<String>,
}

impl Default for HeartbeatStatus {
    fn default() -> Self {
        Self {
            kubelet: "unknown",
            delegate: None,
            last_sent: None,
            trouble: None,
        }
    }
}

impl HeartbeatStatus {
    /// A member has taken a heartbeat.
    pub(crate) fn sent(&mut self, node: &str) {
        self.delegate = Some(node.to_owned());
        self.last_sent = Some(super::now());
        self.trouble = None;
    }
}
