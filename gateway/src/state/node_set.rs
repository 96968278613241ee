//! Set of nodes that a listener serves: its members, and the order in which they are tried.
//!
//! Membership follows the table of nodes, and availability the registry. Members of equal rank take turns, so that short
//! connections spread over all of them. A member whose target has failed is tried last for a while: otherwise the node without
//! any stream, which is the one that fails, would be tried first each time.

use super::{Node, Nodes, Registry, nodes::NodeSelection};
use arc_swap::ArcSwapOption;
use causeway_certs::NodeName;
use causeway_watch_cache::LabelSelector;
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::Instant;

/// Time for which a member whose target has failed is tried last.
const FAILURE_TIME: Duration = Duration::from_secs(10);

/// Maximum number of available members that are compared for one connection, which limits its cost in a large set.
const MAX_CANDIDATES: usize = 256;

/// Condition for the members of a set.
#[derive(Debug)]
pub enum NodeSelector {
    /// Nodes with these names.
    Names(Arc<[NodeName]>),
    /// Nodes in this pool. A pool that a kubelet can write does not count.
    Pool(String),
    /// Nodes whose confirmed labels match.
    Labels(LabelSelector),
}

/// Time for which the connected members of a large set are not searched again, unless none of them is available.
const SEARCH_INTERVAL: Duration = Duration::from_millis(100);

/// Nodes of which each connection of a listener reaches one.
#[derive(Debug)]
pub struct NodeSet {
    selector: NodeSelector,
    selection: NodeSelection,
    /// Number of searches so far, which rotates members of equal rank.
    searches: AtomicUsize,
    /// Times of the last failures, by member.
    failures: Mutex<HashMap<NodeName, Instant>>,
    /// Connected members of a large set, as they were found last.
    connected: ArcSwapOption<ConnectedMembers>,
}

/// Connected members of a large set.
#[derive(Debug)]
struct ConnectedMembers {
    names: Arc<[NodeName]>,
    /// Members among which they were found.
    members: Arc<[NodeName]>,
    /// [`Registry::arrivals`] before the search.
    arrivals: u64,
    found_at: Instant,
}

impl NodeSet {
    /// Returns the set of the nodes that match.
    pub fn new(selector: NodeSelector) -> Self {
        Self {
            selector,
            selection: NodeSelection::default(),
            searches: AtomicUsize::new(0),
            failures: Mutex::default(),
            connected: ArcSwapOption::empty(),
        }
    }

    /// Returns the members, without revoked nodes.
    pub fn members(&self, nodes: &Nodes) -> Arc<[NodeName]> {
        match &self.selector {
            NodeSelector::Names(names) => self.selection.update_listed(nodes, names),
            NodeSelector::Pool(_) | NodeSelector::Labels(_) => {
                self.selection.update(nodes, |node| self.selects(node))
            }
        }
    }

    /// Whether the data of a node makes it a member.
    fn selects(&self, node: &Node) -> bool {
        let is_selected = match &self.selector {
            NodeSelector::Names(_) => false,
            NodeSelector::Pool(pool) => node.policy_pool.as_ref() == Some(pool),
            NodeSelector::Labels(selector) => {
                selector.matches(|key| node.labels.get(key).map(String::as_str))
            }
        };
        is_selected && node.revoked.is_none()
    }

    /// Whether a node is a member.
    pub fn contains(&self, name: &NodeName, nodes: &Nodes) -> bool {
        match &self.selector {
            NodeSelector::Names(names) => names.contains(name),
            NodeSelector::Pool(_) | NodeSelector::Labels(_) => {
                nodes.with(name, |node| self.selects(node))
            }
        }
    }

    /// Returns the reason why the members are not known yet. A selector could match a node whose labels are missing.
    pub fn pending_reason(&self, nodes: &Nodes) -> Option<Arc<str>> {
        match &self.selector {
            NodeSelector::Names(_) => None,
            NodeSelector::Pool(_) | NodeSelector::Labels(_) => nodes.pending_reason(),
        }
    }

    /// Returns the available members for a stream to a port, the best first: those without a recent failure, then by
    /// [`Registry::rank`]. Only members for which `may_serve` returns true are compared.
    pub fn candidates(
        &self,
        nodes: &Nodes,
        registry: &Registry,
        port: Option<u16>,
        may_serve: impl Fn(&NodeName) -> bool,
    ) -> Vec<NodeName> {
        let members = self.connected_members(nodes, registry);
        let ranked = self.rank_members(&members, (registry, port), &may_serve);
        if !ranked.is_empty() {
            return ranked;
        }
        // A member may have connected after the last search.
        match self.find_connected(nodes, registry) {
            found if Arc::ptr_eq(&found, &members) => ranked,
            found => self.rank_members(&found, (registry, port), &may_serve),
        }
    }

    /// Returns the members that are probably connected. In a large set, those that have connected during the last
    /// `SEARCH_INTERVAL` may be missing.
    pub fn connected_members(&self, nodes: &Nodes, registry: &Registry) -> Arc<[NodeName]> {
        match &*self.connected.load() {
            Some(found)
                if found.found_at.elapsed() < SEARCH_INTERVAL
                    && Arc::ptr_eq(&found.members, &self.members(nodes)) =>
            {
                found.names.clone()
            }
            _ => self.find_connected(nodes, registry),
        }
    }

    /// Returns the connected members. In a small set, returns all members: to rank them is cheaper.
    fn find_connected(&self, nodes: &Nodes, registry: &Registry) -> Arc<[NodeName]> {
        let members = self.members(nodes);
        if members.len() <= MAX_CANDIDATES {
            return members;
        }
        let arrivals = registry.arrivals();
        if let Some(found) = &*self.connected.load()
            && found.arrivals == arrivals
            && Arc::ptr_eq(&found.members, &members)
        {
            return found.names.clone();
        }
        let connected = members.iter().filter(|name| registry.is_connected(name));
        let names: Arc<[_]> = connected.cloned().collect();
        self.connected.store(Some(Arc::new(ConnectedMembers {
            names: names.clone(),
            members,
            arrivals,
            found_at: Instant::now(),
        })));
        names
    }

    fn rank_members(
        &self,
        members: &[NodeName],
        (registry, port): (&Registry, Option<u16>),
        may_serve: impl Fn(&NodeName) -> bool,
    ) -> Vec<NodeName> {
        let start = self.searches.fetch_add(1, Relaxed) % members.len().max(1);
        let (last, first) = members.split_at(start);
        let failed = self.recent_failures();
        let available = first.iter().chain(last).filter_map(|name| {
            let rank = registry.rank(name, port)?;
            if rank.is_unhealthy || !may_serve(name) {
                return None;
            }
            Some((failed.contains_key(name), rank, name))
        });
        let mut ranked: Vec<_> = available.take(MAX_CANDIDATES).collect();
        ranked.sort_by_key(|(has_failed, rank, _)| (*has_failed, *rank));
        ranked
            .into_iter()
            .map(|(_, _, name)| name.clone())
            .collect()
    }

    /// Records that the target of a member could not be reached.
    pub fn record_failure(&self, name: &NodeName) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.insert(name.clone(), Instant::now());
    }

    fn recent_failures(&self) -> HashMap<NodeName, Instant> {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.retain(|_, at| at.elapsed() < FAILURE_TIME);
        failures.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{ClusterNode, NodesWriter, directory::HeldState, registry::tests::World};

    fn name(text: &str) -> NodeName {
        NodeName::parse(text).unwrap()
    }

    fn names(all: &[&str]) -> Vec<NodeName> {
        all.iter().map(|text| name(text)).collect()
    }

    fn labelled(pool: &str, labels: &[(&str, &str)]) -> Node {
        let labels = labels.iter();
        Node {
            pool: Some(pool.to_owned()),
            labels: labels
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
            ..Node::default()
        }
    }

    fn members(set: &NodeSet, nodes: &Nodes) -> Vec<NodeName> {
        set.members(nodes).to_vec()
    }

    #[test]
    fn pool_and_labels_select_admitted_nodes_and_follow_their_changes() {
        let writer = NodesWriter::default();
        writer.upsert(name("edge-1"), labelled("mill", &[("site", "north")]));
        writer.upsert(name("edge-2"), labelled("mill", &[("site", "south")]));
        writer.upsert(name("edge-3"), labelled("quay", &[]));
        let nodes = writer.reader();
        let pool = NodeSet::new(NodeSelector::Pool("mill".to_owned()));
        let selector = LabelSelector::parse("site in (north,south),!spare").unwrap();
        let labels = NodeSet::new(NodeSelector::Labels(selector));
        assert_eq!(members(&pool, &nodes), names(&["edge-1", "edge-2"]));
        assert_eq!(members(&labels, &nodes), names(&["edge-1", "edge-2"]));
        let spare = [("site", "north"), ("spare", "")];
        writer.upsert(name("edge-1"), labelled("quay", &spare));
        assert_eq!(members(&pool, &nodes), names(&["edge-2"]));
        assert_eq!(members(&labels, &nodes), names(&["edge-2"]));
        assert!(labels.contains(&name("edge-2"), &nodes));
        assert!(!labels.contains(&name("edge-1"), &nodes));
        writer.replace_revoked([name("edge-2")].into());
        assert_eq!(members(&pool, &nodes), []);
        assert_eq!(members(&labels, &nodes), []);
        let listed = names(&["edge-1", "edge-2", "unknown"]);
        let listed = NodeSet::new(NodeSelector::Names(listed.into()));
        assert_eq!(members(&listed, &nodes), names(&["edge-1", "unknown"]));
    }

    #[test]
    fn a_pool_that_a_kubelet_can_write_selects_no_node() {
        let writer = NodesWriter::default();
        let member = |is_policy_pool| ClusterNode {
            is_edge: true,
            pool: Some("mill".to_owned()),
            is_policy_pool,
            ..ClusterNode::default()
        };
        let pool = NodeSet::new(NodeSelector::Pool("mill".to_owned()));
        let nodes = writer.reader();
        writer.set_pending("no list yet");
        assert!(pool.pending_reason(&nodes).is_some());
        writer.replace_cluster([(name("edge-1"), member(false))].into());
        assert_eq!(members(&pool, &nodes), []);
        writer.replace_cluster([(name("edge-1"), member(true))].into());
        assert_eq!(members(&pool, &nodes), names(&["edge-1"]));
        assert!(pool.pending_reason(&nodes).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn members_are_tried_by_failures_then_streams_and_take_turns() {
        let world = World::new();
        let all = names(&["edge-1", "edge-2", "edge-3", "away"]);
        let set = NodeSet::new(NodeSelector::Names(all.clone().into()));
        let nodes = Nodes::default();
        let best = || set.candidates(&nodes, &world.registry, Some(80), |_| true);
        assert_eq!(best(), []);
        let mut tunnels = Vec::new();
        for node in &all[..3] {
            tunnels.push(world.register_node(node).await);
        }
        let mut first: Vec<_> = (0..4).map(|_| best()[0].clone()).collect();
        first.sort_unstable();
        first.dedup();
        assert_eq!(first, all[..3]);
        let busy = world.registry.select_tunnel(&all[0]).unwrap();
        busy.streams.fetch_add(1, Relaxed);
        for _ in 0..4 {
            let order = best();
            assert_eq!(order.len(), 3);
            assert_eq!(order[2], all[0]);
        }
        set.record_failure(&all[1]);
        for _ in 0..4 {
            assert_eq!(best(), names(&["edge-3", "edge-1", "edge-2"]));
        }
        tokio::time::advance(FAILURE_TIME).await;
        assert_eq!(best()[2], all[0]);
        // A node that leaves comes last, and a node without a tunnel is left out.
        world.registry.mark_leaving(&all[1], tunnels[1].0);
        assert_eq!(best(), names(&["edge-3", "edge-1", "edge-2"]));
        world.registry.unregister(&all[2], tunnels[2].0);
        assert_eq!(best(), names(&["edge-1", "edge-2"]));
    }

    #[tokio::test(start_paused = true)]
    async fn connected_members_of_a_large_set_are_searched_rarely() {
        let world = World::new();
        let all: Vec<_> = (0..3000)
            .map(|number| name(&format!("edge-{number}")))
            .collect();
        let set = NodeSet::new(NodeSelector::Names(all.clone().into()));
        let (writer, registry) = (NodesWriter::default(), &world.registry);
        let nodes = writer.reader();
        let candidates = || set.candidates(&nodes, registry, Some(80), |_| true);
        assert_eq!(candidates(), []);
        let (first, _) = world.register_node(&all[2998]).await;
        assert_eq!(
            candidates(),
            all[2998..2999],
            "an empty result is searched again"
        );
        let found = set.connected_members(&nodes, registry);
        assert_eq!(*found, all[2998..2999]);
        world.register_node(&all[7]).await;
        assert!(Arc::ptr_eq(
            &found,
            &set.connected_members(&nodes, registry)
        ));
        registry.unregister(&all[2998], first);
        assert_eq!(candidates(), all[7..8]);
        world.register_node(&all[8]).await;
        tokio::time::advance(SEARCH_INTERVAL).await;
        assert_eq!(candidates().len(), 2);
        writer.upsert(all[7].clone(), Node::default());
        writer.replace_revoked([all[7].clone()].into());
        assert_eq!(candidates(), all[8..9]);
    }

    #[tokio::test(start_paused = true)]
    async fn members_at_peers_come_after_own_ones_and_keep_their_health() {
        let world = World::new();
        let set = NodeSet::new(NodeSelector::Names(names(&["edge-1", "edge-2"]).into()));
        let nodes = Nodes::default();
        let best = |port| set.candidates(&nodes, &world.registry, Some(port), |_| true);
        // The peer holds edge-1.
        let peer = world.peer("near", HeldState::Connected).await;
        world.register_node(&name("edge-2")).await;
        for _ in 0..2 {
            assert_eq!(best(80), names(&["edge-2", "edge-1"]));
        }
        peer.set_unhealthy_ports(name("edge-1"), vec![80]);
        assert_eq!(best(80), names(&["edge-2"]));
        assert_eq!(best(443).len(), 2, "another port");
        peer.replace_nodes([].into());
        peer.replace_nodes([(name("edge-1"), HeldState::Connected)].into());
        assert_eq!(best(80).len(), 2, "the peer has lost the node meanwhile");
    }
}
