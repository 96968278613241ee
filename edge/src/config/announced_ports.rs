//! Policy for the ports that a gateway may list, so that the edge serves them.
//!
//! A node of a cluster serves the ports that its cluster lists, unless its owner restricts them. Any other edge serves none
//! unless its owner allows them. The edge's own listeners that have no authentication are opened neither by default nor by a
//! range.

use super::{Config, PortRange};

/// Policy for the ports that a gateway may list at an edge.
#[derive(Clone, Debug)]
pub(crate) struct AnnouncedPortPolicy {
    ranges: Vec<PortRange>,
    /// Whether this edge runs on a node of a cluster. The node's own addresses then count like loopback.
    pub(crate) is_cluster_node: bool,
}

impl AnnouncedPortPolicy {
    /// Returns the policy that this configuration describes.
    pub(crate) fn from_config(config: &Config) -> Self {
        let is_cluster_node = config.kubernetes.is_some();
        let all_ports = || is_cluster_node.then_some(PortRange(1..=u16::MAX));
        let ranges = match &config.listed_ports {
            Some(configured) => configured.clone(),
            None => all_ports().into_iter().collect(),
        };
        Self {
            ranges,
            is_cluster_node,
        }
    }

    /// Whether no port may be listed.
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether this port may be listed. The edge's own listeners have the ports `own_ports`.
    pub(crate) fn permits(&self, port: u16, own_ports: &[u16]) -> bool {
        let permits_port = |range: &PortRange| {
            let is_exact = range.0 == (port..=port);
            is_exact || (!own_ports.contains(&port) && range.contains(port))
        };
        self.ranges.iter().any(permits_port)
    }
}
