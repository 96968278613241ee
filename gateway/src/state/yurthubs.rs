//! Endpoints at which the `YurtHub`s of each pool read, from the edges that are connected here.

use causeway_certs::NodeName;
use causeway_watch_cache::GroupVersionResource;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// Endpoints of each pool with at least one endpoint.
pub type YurtHubEndpoints = BTreeMap<String, NodePoolEndpoints>;

/// Endpoints at which the `YurtHub`s of one node pool read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePoolEndpoints {
    /// IP address of each edge that serves `YurtHub`s.
    pub addresses: BTreeMap<NodeName, IpAddr>,
    /// Resources that `YurtHub`s can read at each of these edges.
    pub resources: BTreeSet<GroupVersionResource>,
}

impl NodePoolEndpoints {
    /// Adds an edge that serves these resources. The edge is left out if the maximum number is reached, or if it shares no
    /// resource with the edges before it. It is also left out if its address is unreachable for others (unspecified, loopback or
    /// multicast).
    pub(crate) fn add(
        &mut self,
        node: &NodeName,
        at: IpAddr,
        resources: BTreeSet<GroupVersionResource>,
    ) {
        let is_unreachable = at.is_unspecified() || at.is_loopback() || at.is_multicast();
        let common_resources: BTreeSet<GroupVersionResource> = if self.addresses.is_empty() {
            resources
        } else {
            &self.resources & &resources
        };
        if is_unreachable
            || common_resources.is_empty()
            || self.addresses.len() >= MAX_ANNOUNCED_EDGES
        {
            tracing::debug!(%node, %at, "this edge is not announced to YurtHubs");
            return;
        }
        self.resources = common_resources;
        self.addresses.insert(node.clone(), at);
    }
}

/// Maximum number of announced edges of one pool. `YurtHub`s alternate between them, and avoid edges that do not answer.
const MAX_ANNOUNCED_EDGES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yurthubs_get_common_resources_and_skip_edges_without_any() {
        let set = |all: &[&str]| -> BTreeSet<GroupVersionResource> {
            all.iter().map(|text| text.parse().unwrap()).collect()
        };
        let mut hubs = NodePoolEndpoints::default();
        let node = |name: String| NodeName::parse(&name).unwrap();
        let add = |hubs: &mut NodePoolEndpoints, name: &str, at: &str, has: &[&str]| {
            let before = hubs.addresses.len();
            hubs.add(&node(name.to_owned()), at.parse().unwrap(), set(has));
            hubs.addresses.len() > before
        };
        let both = ["v1/services", "v1/pods"];
        for nowhere in ["0.0.0.0", "127.0.0.1", "::1", "224.0.0.1"] {
            assert!(!add(&mut hubs, "edge-0", nowhere, &both), "{nowhere}");
        }
        assert!(!add(&mut hubs, "edge-0", "10.1.0.1", &[]));
        assert!(add(&mut hubs, "edge-0", "10.1.0.1", &both));
        assert!(!add(&mut hubs, "edge-1", "10.1.0.2", &["v1/nodes"]));
        for number in 1..MAX_ANNOUNCED_EDGES {
            let name = format!("edge-{number}");
            assert!(add(&mut hubs, &name, "10.1.0.2", &["v1/pods"]));
        }
        assert!(!add(&mut hubs, "one-more", "10.1.0.3", &both));
        assert_eq!(
            (hubs.addresses.len(), hubs.resources),
            (MAX_ANNOUNCED_EDGES, set(&["v1/pods"]))
        );
    }
}
