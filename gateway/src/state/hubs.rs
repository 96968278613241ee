//! Where `YurtHub`s of each pool read at its edges, as far as these are connected here.

use causeway_certs::NodeName;
use causeway_pool::Resource;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// Of each pool that has any.
pub type Hubs = BTreeMap<String, PoolHubs>;

/// Where hubs of one pool read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolHubs {
    /// The IP of each edge that serves hubs.
    pub at: BTreeMap<NodeName, IpAddr>,
    /// What hubs can read at each of them.
    pub resources: BTreeSet<Resource>,
}

impl PoolHubs {
    /// One edge more, which lets these be read. False: there are as many as hubs are told.
    pub(crate) fn add(
        &mut self,
        node: &NodeName,
        at: IpAddr,
        resources: BTreeSet<Resource>,
    ) -> bool {
        if self.at.len() >= MOST {
            return false;
        }
        if self.at.is_empty() {
            self.resources = resources;
        } else {
            self.resources.retain(|known| resources.contains(known));
        }
        self.at.insert(node.clone(), at);
        true
    }
}

/// Edges of one pool that hubs are told: they take turns among them, and go round those that do not answer.
const MOST: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hubs_are_told_what_all_of_a_pools_edges_have_and_no_more_edges_than_there_may_be() {
        let set = |all: &[&str]| -> BTreeSet<Resource> {
            all.iter().map(|text| text.parse().unwrap()).collect()
        };
        let mut hubs = PoolHubs::default();
        let at = IpAddr::from([10, 1, 0, 1]);
        for number in 0..MOST {
            let node = NodeName::parse(&format!("edge-{number}")).unwrap();
            let has = if number == 3 {
                set(&["v1/pods"])
            } else {
                set(&["v1/services", "v1/pods"])
            };
            assert!(hubs.add(&node, at, has));
        }
        assert!(!hubs.add(&NodeName::parse("one-more").unwrap(), at, set(&[])));
        assert_eq!((hubs.at.len(), hubs.resources), (MOST, set(&["v1/pods"])));
    }
}
