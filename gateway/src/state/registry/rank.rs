//! Rank of a node among others, by which a listener for a set of nodes selects a member.

use super::{NodeTunnels, Registry};
use causeway_certs::NodeName;
use std::sync::atomic::Ordering::Relaxed;

/// Rank of a node among other nodes for a new stream; the lowest is the best. Of equal placement, fewer open streams of clients
/// are better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeRank {
    /// Whether the health check of the port fails. Such a node is not selected.
    pub is_unhealthy: bool,
    placement: Placement,
    streams: usize,
}

/// Gateway at which a node can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Placement {
    /// This gateway has a tunnel of the node.
    Own,
    /// Another gateway has one.
    Peer,
    /// Each tunnel drains or does not answer at present.
    LastResort,
}

impl NodeRank {
    /// Whether the node is healthy, and one of its tunnels answers and does not drain.
    pub fn is_good(self) -> bool {
        !self.is_unhealthy && self.placement != Placement::LastResort
    }
}

impl Registry {
    /// Returns the rank of a node for a new stream to a port; `None` if neither this gateway nor a peer has a usable tunnel of the
    /// node.
    pub fn rank(&self, node: &NodeName, port: Option<u16>) -> Option<NodeRank> {
        let own = self.select_own_tunnel(node);
        let mut unhealthy_ports = None;
        let placement = match &own {
            Ok((own, false)) if !own.is_late() => Placement::Own,
            own => match self.directory.select(node, self.worker(node)) {
                Some(selected) if !selected.is_last_resort => {
                    unhealthy_ports = Some(selected.peer.unhealthy_ports(node));
                    Placement::Peer
                }
                None if own.is_err() => return None,
                Some(selected) if own.is_err() => {
                    unhealthy_ports = Some(selected.peer.unhealthy_ports(node));
                    Placement::LastResort
                }
                _ => Placement::LastResort,
            },
        };
        let shard = self.shard(node);
        let entry = shard.nodes.get(node);
        let unhealthy_ports = unhealthy_ports.or_else(|| entry.map(NodeTunnels::unhealthy_ports));
        let streams = entry.map(|entry| entry.streams.load(Relaxed));
        Some(NodeRank {
            is_unhealthy: port
                .is_some_and(|port| unhealthy_ports.unwrap_or_default().contains(&port)),
            placement,
            streams: streams.unwrap_or_default(),
        })
    }
}
