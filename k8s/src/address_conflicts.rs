//! Writes an event on each Node object that has an address of another node.
//!
//! `state::nodes` finds the conflicting addresses; the gateway logs and counts them without a cluster as well.

use crate::event_writer::{EventContent, EventWriter, node_reference};
use causeway_certs::NodeName;
use causeway_gateway::state::{
    NodesWriter,
    nodes::{AddressConflict, AddressConflicts},
};
use kube::Client;
use std::{convert::Infallible, future::pending, net::IpAddr, time::Duration};
use tokio::time::sleep;

/// Minimum interval between two checks of a table that changes all the time.
const EVENT_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of other nodes that one event names.
const MAX_NAMES: usize = 10;

/// Writer of events about addresses that several nodes have.
pub(crate) struct ConflictEvents {
    /// The cluster's API.
    pub client: Client,
    /// The table of nodes.
    pub nodes: NodesWriter,
    /// This gateway's name.
    pub gateway: String,
}

impl ConflictEvents {
    /// Runs the controller. Never returns.
    pub(crate) async fn run(self) -> Infallible {
        let operation = "writing an event for a Node with an address of another node";
        let mut events = EventWriter::new(self.client, self.gateway, operation);
        let mut changes = self.nodes.subscribe();
        let nodes = self.nodes.reader();
        let mut reported = AddressConflicts::new();
        loop {
            let conflicts = nodes.address_conflicts();
            for (address, conflict) in &conflicts {
                if reported.get(address) == Some(conflict) {
                    continue;
                }
                let members = conflict
                    .nodes
                    .iter()
                    .filter(|name| nodes.cluster_says_edge(name).is_some());
                for member in members {
                    let note = format_note(*address, member, conflict);
                    let content = EventContent {
                        regarding: &node_reference(member.as_str()),
                        reason: "AddressConflict",
                        action: "Routing",
                        note: &note,
                        occurrence: "",
                    };
                    events.warn(&content).await;
                }
            }
            reported = conflicts;
            sleep(EVENT_INTERVAL).await;
            if changes.changed().await.is_err() {
                return pending().await;
            }
        }
    }
}

/// Returns the sentence for one of the nodes.
fn format_note(address: IpAddr, member: &NodeName, conflict: &AddressConflict) -> String {
    let others = conflict.nodes.iter().filter(|name| *name != member);
    let others: Vec<_> = others.take(MAX_NAMES).map(NodeName::as_str).collect();
    let others = others.join(", ");
    match &conflict.holder {
        Some(holder) if holder == member => {
            format!("{address} is also claimed by {others}: this node keeps the address")
        }
        Some(holder) => format!(
            "{address} is an address of {holder}, which keeps it: Causeway does not route the address to this node, use the name of this node"
        ),
        None => format!(
            "{address} is also an address of {others}: Causeway routes the address to none of these nodes, use their names"
        ),
    }
}
