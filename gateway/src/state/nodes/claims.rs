//! Nodes that have one address, and which of them is reached by it.
//!
//! A kubelet writes its own Node object, so a claim there must take nothing away from anybody: the address of a node
//! elsewhere is never an edge's, one that a token has confirmed is that node's, and of all others the oldest Node object
//! has it. The age of objects is the cluster's, so the same node has the address after a restart and at each gateway.

use causeway_certs::NodeName;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// Source of a node's claim to an address: the smallest is the strongest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ClaimPriority {
    /// It is elsewhere, not at the edge.
    Elsewhere,
    /// A token, or a command at the gateway, has confirmed it.
    Token,
    /// Its Node object says so, which was made at this time, in Unix seconds.
    Object(u64),
}

/// All nodes that have one address, the strongest right first.
#[derive(Clone, Debug, Default)]
pub(super) struct AddressClaims(BTreeSet<(ClaimPriority, NodeName)>);

/// The node that is reached by an address.
pub(super) enum ClaimHolder<'a> {
    Edge(&'a NodeName),
    Elsewhere(&'a NodeName),
    /// Tokens have confirmed it of several, as behind their NATs: none of them is.
    Several(Vec<&'a NodeName>),
}

/// Nodes that have one address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressConflict {
    /// All of them.
    pub nodes: BTreeSet<NodeName>,
    /// The one that is reached by it; none where tokens have confirmed it of several.
    pub holder: Option<NodeName>,
}

/// Addresses that several nodes have.
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

    /// The conflict, if there are several.
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
