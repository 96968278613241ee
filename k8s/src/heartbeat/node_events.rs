//! Events on Nodes when their heartbeats are delegated, and when they are direct again.
//!
//! One task writes them. An API server that is slow with events must not delay the renewal of Leases.

use crate::event_writer::{EventContent, EventType, EventWriter, node_reference};
use tokio::sync::mpsc;

/// Events that wait for the API. At the limit further events are dropped.
const MAX_QUEUED: usize = 256;

/// Change of a node, with the version of the object that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NodeEvent {
    /// The Lease is renewed by heartbeats that this member carries.
    Delegated {
        node: String,
        delegate: String,
        version: String,
    },
    /// The node renews its Lease itself again.
    Direct { node: String, version: String },
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
        let (event_type, reason, note, node, version) = match &event {
            NodeEvent::Delegated {
                node,
                delegate,
                version,
            } => {
                let note = format!("heartbeat delegated through {delegate}");
                (
                    EventType::Warning,
                    "HeartbeatDelegated",
                    note,
                    node,
                    version,
                )
            }
            NodeEvent::Direct { node, version } => {
                let note = "the node sends its own heartbeats again".to_owned();
                (EventType::Normal, "HeartbeatDirect", note, node, version)
            }
        };
        let content = EventContent {
            regarding: &node_reference(node),
            reason,
            action: "RenewLease",
            note: &note,
            occurrence: version,
        };
        writer.write(event_type, &content).await;
    }
}
