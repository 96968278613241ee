//! Connected nodes that have an API cache, and the leaders among them.

use crate::state::{TunnelInfo, advertised::SharedCell};
use causeway_certs::NodeName;
use causeway_tunnel::{Tunnel, control_stream::YurtHubAddr};
use std::collections::BTreeMap;

/// Leader of each pool, shared with the admin API.
pub(super) type NodePoolLeaders = SharedCell<BTreeMap<String, NodeName>>;

/// Connected node with an API cache.
pub(super) struct ConnectedReader {
    pub(super) node: NodeName,
    pub(super) pool: Option<String>,
    /// Addresses at which the node serves other members.
    pub(super) addresses: Vec<String>,
    /// Endpoint at which the node serves `YurtHub`s.
    pub(super) yurthub: Option<Box<YurtHubAddr>>,
    pub(super) instance: String,
    /// Tunnels over which announcements are sent.
    pub(super) tunnels: Vec<TunnelInfo>,
}

impl ConnectedReader {
    pub(super) fn tunnel_handles(&self) -> impl Iterator<Item = &Tunnel> {
        self.tunnels.iter().map(|edge| &edge.tunnel.tunnel)
    }

    /// Whether other members may use this node.
    pub(super) fn serves_members(&self) -> bool {
        !self.addresses.is_empty() && self.active_tunnels().next().is_some()
    }

    /// Returns the tunnels that do not drain, including tunnels that do not answer.
    pub(super) fn active_tunnels(&self) -> impl Iterator<Item = &Tunnel> {
        self.tunnel_handles().filter(|tunnel| !tunnel.is_draining())
    }

    /// Returns the number of open streams in the node's tunnels.
    pub(super) fn streams(&self) -> usize {
        self.tunnel_handles()
            .map(|tunnel| tunnel.load().open_streams())
            .sum()
    }

    pub(super) fn can_lead(&self) -> bool {
        !self.addresses.is_empty() && self.is_open()
    }

    pub(super) fn is_open(&self) -> bool {
        self.tunnel_handles().any(Tunnel::is_open)
    }
}
