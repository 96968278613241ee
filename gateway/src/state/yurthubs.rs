//! Where `YurtHub`s of each pool read at its edges, as far as these are connected here.

use causeway_certs::NodeName;
use causeway_watch_cache::GroupVersionResource;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// Of each pool that has any.
pub type YurtHubEndpoints = BTreeMap<String, NodePoolEndpoints>;

/// Where hubs of one pool read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePoolEndpoints {
    /// The IP of each edge that serves hubs.
    pub at: BTreeMap<NodeName, IpAddr>,
    /// What hubs can read at each of them.
    pub resources: BTreeSet<GroupVersionResource>,
}

impl NodePoolEndpoints {
    /// One edge more, which lets these be read. It is left out where there are as many as hubs are told, where it has nothing of what those
    /// before it have, and where nobody could reach it by what it says.
    pub(crate) fn add(
        &mut self,
        node: &NodeName,
        at: IpAddr,
        resources: BTreeSet<GroupVersionResource>,
    ) {
        let nowhere = at.is_unspecified() || at.is_loopback() || at.is_multicast();
        let common: BTreeSet<GroupVersionResource> = if self.at.is_empty() {
            resources
        } else {
            &self.resources & &resources
        };
        if nowhere || common.is_empty() || self.at.len() >= MOST {
            tracing::debug!(%node, %at, "YurtHubs are not told of this edge");
            return;
        }
        self.resources = common;
        self.at.insert(node.clone(), at);
    }
}

/// Edges of one pool that hubs are told: they take turns among them, and go round those that do not answer.
const MOST: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hubs_are_told_what_all_of_a_pools_edges_have_and_of_none_that_would_leave_them_nothing() {
        let set = |all: &[&str]| -> BTreeSet<GroupVersionResource> {
            all.iter().map(|text| text.parse().unwrap()).collect()
        };
        let mut hubs = NodePoolEndpoints::default();
        let node = |name: String| NodeName::parse(&name).unwrap();
        let add = |hubs: &mut NodePoolEndpoints, name: &str, at: &str, has: &[&str]| {
            let before = hubs.at.len();
            hubs.add(&node(name.to_owned()), at.parse().unwrap(), set(has));
            hubs.at.len() > before
        };
        let both = ["v1/services", "v1/pods"];
        for nowhere in ["0.0.0.0", "127.0.0.1", "::1", "224.0.0.1"] {
            assert!(!add(&mut hubs, "edge-0", nowhere, &both), "{nowhere}");
        }
        assert!(!add(&mut hubs, "edge-0", "10.1.0.1", &[]));
        assert!(add(&mut hubs, "edge-0", "10.1.0.1", &both));
        assert!(!add(&mut hubs, "edge-1", "10.1.0.2", &["v1/nodes"]));
        for number in 1..MOST {
            let name = format!("edge-{number}");
            assert!(add(&mut hubs, &name, "10.1.0.2", &["v1/pods"]));
        }
        assert!(!add(&mut hubs, "one-more", "10.1.0.3", &both));
        assert_eq!((hubs.at.len(), hubs.resources), (MOST, set(&["v1/pods"])));
    }
}
