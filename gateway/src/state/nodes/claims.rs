//! Nodes that share an address, and the one that is reached by it.
//!
//! A kubelet writes its own Node object, so a claim in a Node object must not take an address away from another node. The address
//! of a node elsewhere is never routed to an edge. An address that a token has confirmed belongs to that node. Otherwise the node
//! with the oldest Node object has the address. The cluster records the age of the objects, so the same node has the address
//! after a restart and at each gateway.

use causeway_certs::NodeName;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// Priority of a node's claim to an address; the smallest value is the strongest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ClaimPriority {
    /// The node is elsewhere, not at the edge.
    Elsewhere,
    /// A token, or a command at the gateway, has confirmed the address.
    Token,
    /// The Node object contains the address; its creation time in Unix seconds.
    Object(u64),
}

/// All nodes with one address, the strongest claim first.
#[derive(Clone, Debug, Default)]
pub(super) struct AddressClaims(BTreeSet<(ClaimPriority, NodeName)>);

/// Node that is reached by an address.
pub(super) enum ClaimHolder<'a> {
    Edge(&'a NodeName),
    Elsewhere(&'a NodeName),
    /// Tokens have confirmed the address for several nodes, for example behind NATs. None of them is reached by it.
    Several(Vec<&'a NodeName>),
}

/// Nodes that share an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressConflict {
    /// All nodes with the address.
    pub nodes: BTreeSet<NodeName>,
    /// The node that is reached by the address; `None` if tokens have confirmed it for several nodes.
    pub holder: Option<NodeName>,
}

/// Addresses that several nodes share.
pub type AddressConflicts = BTreeMap<IpAddr, AddressConflict>;

impl AddressClaims {
    pub(super) fn add(&mut self, priority: ClaimPriority, node: &NodeName) {
        self.0.insert((priority, node.clone()));
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &NodeName> {
        self.0.iter().map(|(_, name)| name)
    }

    /// Returns the node that is reached by the address, if there is any claim.
    pub(super) fn holder(&self) -> Option<ClaimHolder<'_>> {
        let (priority, first) = self.0.first()?;
        let same_priority = self.0.iter().take_while(|(other, _)| other == priority);
        let alike: Vec<_> = same_priority.map(|(_, name)| name).collect();
        Some(match priority {
            ClaimPriority::Elsewhere => ClaimHolder::Elsewhere(first),
            ClaimPriority::Token if alike.len() > 1 => ClaimHolder::Several(alike),
            ClaimPriority::Token | ClaimPriority::Object(_) => ClaimHolder::Edge(first),
        })
    }

    /// Whether the strongest claim is only that of a Node object of an edge, which its kubelet writes.
    pub(super) fn is_by_object(&self) -> bool {
        matches!(self.0.first(), Some((ClaimPriority::Object(_), _)))
    }

    /// Returns the conflict, if several nodes have the address.
    pub(super) fn conflict(&self) -> Option<AddressConflict> {
        if self.0.len() < 2 {
            return None;
        }
        let holder = match self.holder()? {
            ClaimHolder::Edge(node) | ClaimHolder::Elsewhere(node) => Some(node.clone()),
            ClaimHolder::Several(_) => None,
        };
        Some(AddressConflict {
            nodes: self.names().cloned().collect(),
            holder,
        })
    }
}
