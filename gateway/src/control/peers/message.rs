//! Messages of the control connection between two gateways, one JSON object per line.
//!
//! The gateway that has dialled sends its hello, and receives the hello of the other gateway and then that gateway's nodes: all of
//! them between `snapshot` and `synchronized`, later each change. The lines of one stream arrive in order and complete, so a change
//! needs no number.

use crate::state::directory::HeldState;
use causeway_certs::NodeName;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// Version of these messages. Gateways of different versions do not forward to each other.
pub(crate) const PROTOCOL: u32 = 1;
/// Maximum number of nodes in one message. So many names of 253 bytes fit into a line of 64 KiB.
pub(super) const MAX_NODES: usize = 200;

/// First message of each gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PeerHello {
    /// [`PROTOCOL`] of the gateway.
    pub(crate) protocol: u32,
    /// The gateway's own version, for people.
    pub(crate) version: String,
    /// Random identifier of the process.
    pub(crate) instance: String,
    /// Whether the gateway that has dialled wants the nodes of the other one. It does not on connections for requests.
    #[serde(default)]
    pub(crate) wants_nodes: bool,
}

/// State of a node in a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeEntry {
    node: NodeName,
    /// `None` if the gateway holds no tunnel of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    state: Option<EntryState>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum EntryState {
    Connected,
    #[serde(other)]
    Draining,
}

impl NodeEntry {
    pub(super) fn new(node: NodeName, state: Option<HeldState>) -> Self {
        let state = state.map(|state| match state {
            HeldState::Connected => EntryState::Connected,
            HeldState::Draining => EntryState::Draining,
        });
        Self { node, state }
    }

    pub(super) fn into_parts(self) -> (NodeName, Option<HeldState>) {
        let state = self.state.map(|state| match state {
            EntryState::Connected => HeldState::Connected,
            EntryState::Draining => HeldState::Draining,
        });
        (self.node, state)
    }
}

/// Message between two gateways.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum PeerMessage {
    /// First message of each gateway.
    Hello(PeerHello),
    /// All nodes follow, and earlier ones are void at the next `synchronized`.
    Snapshot,
    /// States of nodes.
    Nodes {
        /// The nodes.
        nodes: Vec<NodeEntry>,
    },
    /// All nodes were sent.
    Synchronized,
    /// Addresses at which clients reach the gateway, if it has a DNS server with `dns.addresses`.
    Addresses {
        /// The addresses.
        addresses: Vec<IpAddr>,
    },
    /// The gateway drains: new requests should go to other gateways.
    Draining,
    /// Message of a later version.
    #[serde(other)]
    Unknown,
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_tunnel::{control_stream::parse_message, wire::MAX_MESSAGE};

    #[test]
    fn the_longest_message_fits_into_a_line_and_returns_unchanged() {
        let name = |nth: usize| {
            let label = "n".repeat(60);
            NodeName::parse(&format!("{nth:03}.{label}.{label}.{label}.{label}")).unwrap()
        };
        let nodes = (0..MAX_NODES).map(|nth| NodeEntry::new(name(nth), Some(HeldState::Draining)));
        let message = PeerMessage::Nodes {
            nodes: nodes.collect(),
        };
        let line = serde_json::to_vec(&message).unwrap();
        assert!(line.len() < MAX_MESSAGE, "{}", line.len());
        assert_eq!(parse_message::<PeerMessage>(&line).unwrap(), message);
    }

    #[test]
    fn later_messages_and_states_are_accepted() {
        let later = br#"{"type":"of_a_later_version","nodes":1}"#;
        assert_eq!(
            parse_message::<PeerMessage>(later).unwrap(),
            PeerMessage::Unknown
        );
        let entry: NodeEntry =
            serde_json::from_str(r#"{"node":"edge-1","state":"of_a_later_version"}"#).unwrap();
        assert_eq!(entry.into_parts().1, Some(HeldState::Draining));
    }
}
