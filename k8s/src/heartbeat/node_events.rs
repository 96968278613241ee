//! Events on Nodes when their heartbeats are delegated, and when they are direct again.
//!
//! One task writes them. An API server that is slow with events must not delay the renewal of Leases.

use crate::event_writer::{EventContent, EventType, EventWriter, node_reference};
use tokio::sync::mpsc;

/// Events that wait for the API. At the limit further events are dropped.
const MAX_QUEUED: usize = 256;

/// Change of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NodeChange {
    /// The Lease is renewed by heartbeats that a pool member carries.
    Delegated { delegate: String },
    /// The node renews its Lease itself again.
    Direct,
}

/// Event about a change of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodeEvent {
    pub(super) node: String,
    pub(super) change: NodeChange,
    /// Version of the object that was written for the change: each change has an event of its own.
    pub(super) version: String,
}

/// Queue of events. Cheap to clone.
#[derive(Clone)]
pub(super) struct EventQueue(mpsc::Sender<NodeEvent>);

impl EventQueue {
    /// Returns a queue, and the receiver for [`write_events`].
    pub(super) fn new() -> (Self, mpsc::Receiver<NodeEvent>) {
        let (events_tx, events_rx) = mpsc::channel(MAX_QUEUED);
        (Self(events_tx), events_rx)
    }

    /// Queues an event.
    pub(super) fn push(&self, event: NodeEvent) {
        if let Err(error) = self.0.try_send(event) {
            tracing::debug!(%error, "an event about a delegated node was dropped");
        }
    }
}

/// Writes queued events until all queues are dropped.
pub(super) async fn write_events(mut writer: EventWriter, mut events: mpsc::Receiver<NodeEvent>) {
    while let Some(event) = events.recv().await {
        let (event_type, reason, text) = match &event.change {
            NodeChange::Delegated { delegate } => {
                let text = format!("heartbeat delegated through {delegate}");
                (EventType::Warning, "HeartbeatDelegated", text)
            }
            NodeChange::Direct => {
                let text = "the node sends its own heartbeats again".to_owned();
                (EventType::Normal, "HeartbeatDirect", text)
            }
        };
        let content = EventContent {
            regarding: &node_reference(&event.node),
            reason,
            action: "RenewLease",
            note: &text,
            occurrence: &event.version,
        };
        writer.write(event_type, &content).await;
    }
}
