//! The nodes that this gateway is for: names, confirmed addresses, pod networks.
//!
//! Owns who is known by which name and address. An address is here only when an enrolment record (or,
//! with Kubernetes, the Node object) confirms it: what an edge says of itself never is. Two nodes may
//! share an address behind their NATs; such an address names nobody.
//! There are two writers: the records of who has joined, and the cluster, where there is one. What the cluster says of a
//! node's addresses, pods and labels holds before what its record says.

mod writer;

use arc_swap::ArcSwap;
use causeway_certs::NodeName;
use ipnet::IpNet;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};
pub use writer::NodesWriter;

/// What is confirmed of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Addresses that name this node to callers.
    pub addresses: Vec<IpAddr>,
    /// Networks of the pods on it.
    pub pod_networks: Vec<IpNet>,
    /// The pool that it counts to.
    pub pool: Option<String>,
    /// What it is labelled with.
    pub labels: BTreeMap<String, String>,
    /// When it joined last, in Unix seconds: certificates that were issued before are not its own any more.
    pub joined_at: u64,
    /// Why it is not welcome any more, if it is not.
    pub revoked: Option<String>,
}

/// What a cluster says of one of its nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Member {
    /// It is at the edge. Others are reached by their own addresses; one that has joined here is at the edge anyhow.
    pub edge: bool,
    /// Its own addresses.
    pub addresses: Vec<IpAddr>,
    /// Of these those by which it is reached from outside, where it is elsewhere.
    pub outward: Vec<IpAddr>,
    /// Networks of the pods on it.
    pub pod_networks: Vec<IpNet>,
    /// What it is labelled with.
    pub labels: BTreeMap<String, String>,
    /// The pool that a label of it names.
    pub pool: Option<String>,
}

/// Where a node is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// At the edge: it is reached through a tunnel.
    Edge(NodeName),
    /// Elsewhere, by its own addresses.
    Elsewhere(Vec<IpAddr>),
}

/// What a node's record has not to say, since the configuration does: that it is not welcome.
pub(crate) const REVOKED: &str = "tunnel.revoked names it";

/// What is said of nodes, each by somebody else.
#[derive(Clone, Debug, Default)]
struct Said {
    /// Who has joined, as the records say.
    records: BTreeMap<NodeName, Node>,
    /// In which nodes have names as well: each in lower case, with the dot before it.
    zones: Arc<[String]>,
    cluster: Cluster,
    /// Who is not welcome, whatever the records say.
    revoked: Arc<BTreeSet<NodeName>>,
}

/// The nodes of the cluster.
#[derive(Clone, Debug, Default)]
enum Cluster {
    /// The gateway follows no cluster.
    #[default]
    None,
    /// The first list of nodes has not arrived, for this reason.
    Pending(Arc<str>),
    /// The last list that arrived, with the changes since.
    Known(Arc<BTreeMap<NodeName, Member>>),
}

impl Cluster {
    fn members(&self) -> Option<&BTreeMap<NodeName, Member>> {
        match self {
            Self::Known(members) => Some(members),
            Self::None | Self::Pending(_) => None,
        }
    }
}

#[derive(Debug, Default)]
struct Table {
    said: Said,
    /// Nodes at the edge, by records and cluster.
    nodes: BTreeMap<NodeName, Node>,
    by_address: HashMap<IpAddr, Vec<NodeName>>,
    /// Longest prefix first.
    pod_networks: Vec<(IpNet, NodeName)>,
}

/// Addresses that several nodes have, with the names of these nodes.
pub type AddressConflicts = BTreeMap<IpAddr, BTreeSet<NodeName>>;

/// What an address names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Named {
    /// One node, by an address of its own.
    Node(NodeName),
    /// A pod on this node.
    Pod(NodeName),
    /// Several nodes.
    Several(Vec<NodeName>),
    /// None.
    Nobody,
}

/// The reading side: a cheap clone that never waits.
#[derive(Clone, Debug, Default)]
pub struct Nodes(Arc<ArcSwap<Table>>);

impl Table {
    fn of(said: Said) -> Self {
        let Said {
            records, cluster, ..
        } = &said;
        let mut nodes = records.clone();
        // An address that a node elsewhere has as well is not one edge's alone.
        let mut by_address: HashMap<IpAddr, Vec<NodeName>> = HashMap::new();
        for (name, member) in cluster.members().into_iter().flatten() {
            if member.edge || records.contains_key(name) {
                let node = nodes.entry(name.clone()).or_default();
                node.addresses.clone_from(&member.addresses);
                node.pod_networks.clone_from(&member.pod_networks);
                node.labels.clone_from(&member.labels);
                // A token's word is its owner's, and a label the kubelet's.
                if node.pool.is_none() {
                    node.pool.clone_from(&member.pool);
                }
            } else {
                enter(&mut by_address, name, &member.addresses);
            }
        }
        for name in said.revoked.iter() {
            if let Some(node) = nodes.get_mut(name) {
                node.revoked = Some(REVOKED.to_owned());
            }
        }
        let mut pod_networks = Vec::new();
        for (name, node) in &nodes {
            enter(&mut by_address, name, &node.addresses);
            pod_networks.extend(node.pod_networks.iter().map(|net| (*net, name.clone())));
        }
        // Of one that is not here alone nothing is known but its own addresses.
        by_address.retain(|_, named| named.iter().any(|name| nodes.contains_key(name)));
        pod_networks.sort_by_key(|(net, _)| std::cmp::Reverse(net.prefix_len()));
        Self {
            said,
            nodes,
            by_address,
            pod_networks,
        }
    }
}

impl Table {
    /// The node at the edge of exactly this name.
    fn edge(&self, name: &str) -> Option<NodeName> {
        if let Some((known, _)) = self.nodes.get_key_value(name) {
            return Some(known.clone());
        }
        let name = NodeName::parse(name).ok()?;
        self.nodes.contains_key(&name).then_some(name)
    }
}

fn enter(all: &mut HashMap<IpAddr, Vec<NodeName>>, name: &NodeName, addresses: &[IpAddr]) {
    for address in addresses {
        let named = all.entry(address.to_canonical()).or_default();
        if !named.contains(name) {
            named.push(name.clone());
        }
    }
}

/// That a node's record says that it is not welcome.
pub(crate) fn recorded(node: &NodeName, reason: &str) -> String {
    format!("node {node} is revoked: {reason}; it is let in again by `causeway edge allow {node}`")
}

impl Nodes {
    /// Where the node of this name is, if there is one. Names compare as in [`Nodes::by_name`].
    pub fn place(&self, name: &str) -> Option<Place> {
        let table = self.0.load();
        let name = name.strip_suffix('.').unwrap_or(name);
        if let Some(edge) = table.edge(name) {
            return Some(Place::Edge(edge));
        }
        let name = NodeName::parse(name).ok()?;
        let member = table.said.cluster.members()?.get(&name)?;
        Some(Place::Elsewhere(member.addresses.clone()))
    }

    /// Whether the cluster's node of exactly this name is at the edge; nothing where the cluster has none.
    pub fn is_clusters_edge(&self, name: &NodeName) -> Option<bool> {
        let table = self.0.load();
        let member = table.said.cluster.members()?.get(name)?;
        Some(member.edge || table.said.records.contains_key(name))
    }

    /// Whether the cluster has named its nodes.
    pub fn has_cluster(&self) -> bool {
        self.0.load().said.cluster.members().is_some()
    }

    /// Returns why the nodes of the cluster are not known yet, or `None` if they are or no cluster is followed.
    ///
    /// Until then a name or an address that no record has may still be an edge's, and labels and pools may be missing.
    pub fn pending(&self) -> Option<Arc<str>> {
        match &self.0.load().said.cluster {
            Cluster::Pending(reason) => Some(reason.clone()),
            Cluster::None | Cluster::Known(_) => None,
        }
    }

    /// Whether any record of a node is known.
    pub fn has_records(&self) -> bool {
        !self.0.load().said.records.is_empty()
    }

    /// Where each node is, once the cluster has named its own: before, nobody is to conclude that there are none.
    pub fn places(&self) -> Option<BTreeMap<NodeName, Place>> {
        let table = self.0.load();
        let cluster = table.said.cluster.members()?.iter();
        let elsewhere = |(name, member): (&NodeName, &Member)| {
            (name.clone(), Place::Elsewhere(member.addresses.clone()))
        };
        let mut all: BTreeMap<NodeName, Place> = cluster.map(elsewhere).collect();
        let edges = table.nodes.keys();
        all.extend(edges.map(|name| (name.clone(), Place::Edge(name.clone()))));
        Some(all)
    }

    /// The node at the edge of this name, alone or in one of the zones, if it is known. Names compare without case, and the
    /// root's dot (RFC 3986 §3.2.2) makes no other name: a node that it hid from the route would pass for somebody else's Host.
    pub fn by_name(&self, name: &str) -> Option<NodeName> {
        let table = self.0.load();
        let name = name.strip_suffix('.').unwrap_or(name);
        let within = |zone: &String| {
            let (name, end) = name.split_at_checked(name.len().checked_sub(zone.len())?)?;
            end.eq_ignore_ascii_case(zone).then(|| table.edge(name))?
        };
        // A node whose own name ends like a zone is itself, before any other.
        table
            .edge(name)
            .or_else(|| table.said.zones.iter().find_map(within))
    }

    /// What an address names: a node by its confirmed addresses, else by its pods' networks.
    pub fn by_address(&self, address: IpAddr) -> Named {
        let table = self.0.load();
        let address = address.to_canonical();
        match table.by_address.get(&address).map(Vec::as_slice) {
            Some([one]) => return Named::Node(one.clone()),
            Some([]) | None => {}
            Some(several) => return Named::Several(several.to_vec()),
        }
        let mut holding = table
            .pod_networks
            .iter()
            .filter(|(net, _)| net.contains(&address));
        let Some((net, node)) = holding.next() else {
            return Named::Nobody;
        };
        let mut all = vec![node.clone()];
        let alike = holding.take_while(|(other, _)| other.prefix_len() == net.prefix_len());
        all.extend(
            alike
                .map(|(_, node)| node.clone())
                .filter(|other| other != node),
        );
        match all.pop() {
            Some(only) if all.is_empty() => Named::Pod(only),
            Some(last) => {
                all.push(last);
                Named::Several(all)
            }
            None => Named::Nobody,
        }
    }

    /// Reads what is confirmed of a node; of one that is not known, nothing is.
    pub fn with<T>(&self, name: &NodeName, read: impl FnOnce(&Node) -> T) -> T {
        match self.0.load().nodes.get(name) {
            Some(node) => read(node),
            None => read(&Node::default()),
        }
    }

    /// What is confirmed of a node.
    pub fn get(&self, name: &NodeName) -> Option<Node> {
        self.0.load().nodes.get(name).cloned()
    }

    /// Returns the names of all nodes that the records have.
    pub fn record_names(&self) -> BTreeSet<NodeName> {
        self.0.load().said.records.keys().cloned().collect()
    }

    /// What the records say of a node that has joined, whatever a cluster knows of it.
    pub fn recorded(&self, name: &NodeName) -> Option<Node> {
        self.0.load().said.records.get(name).cloned()
    }

    /// Why a node is not welcome, by its record or by the configuration, whether it is known or not; and by what it is let in
    /// again.
    pub fn revoked(&self, name: &NodeName) -> Option<String> {
        let table = self.0.load();
        if table.said.revoked.contains(name) {
            return Some(format!(
                "node {name} is revoked: {REVOKED}; it is let in again when that does not"
            ));
        }
        let reason = table.nodes.get(name)?.revoked.as_ref()?;
        Some(recorded(name, reason))
    }

    /// Returns the confirmed addresses that only nodes at the edge have. One that several of them have leads to the gateway
    /// as well, which answers with their names instead of leaving clients to time out.
    pub fn edge_addresses(&self) -> BTreeSet<IpAddr> {
        let table = self.0.load();
        let at_edge = |named: &[NodeName]| named.iter().all(|name| table.nodes.contains_key(name));
        let addresses = table.by_address.iter().filter(|(_, named)| at_edge(named));
        addresses.map(|(address, _)| *address).collect()
    }

    /// Returns the confirmed addresses that several nodes have, at least one of them at the edge, with these nodes.
    pub fn address_conflicts(&self) -> AddressConflicts {
        let table = self.0.load();
        let shared = table.by_address.iter().filter(|(_, named)| named.len() > 1);
        shared
            .map(|(address, named)| (*address, named.iter().cloned().collect()))
            .collect()
    }

    /// The networks of pods that are one edge's alone: neither another node's pods nor its own addresses lie in them, and
    /// they in nobody else's. Behind them those of edges' pods that are not.
    pub fn edge_pod_networks(&self) -> [BTreeSet<IpNet>; 2] {
        let table = self.0.load();
        let mut all: Vec<(IpNet, &NodeName, bool)> = Vec::new();
        for (name, node) in &table.nodes {
            all.extend(node.addresses.iter().map(|ip| ((*ip).into(), name, false)));
            all.extend(node.pod_networks.iter().map(|net| (*net, name, true)));
        }
        for (name, member) in table.said.cluster.members().into_iter().flatten() {
            if !table.nodes.contains_key(name) {
                let own = member.addresses.iter().map(|ip| IpNet::from(*ip));
                let nets = own.chain(member.pod_networks.iter().copied());
                all.extend(nets.map(|net| (net, name, false)));
            }
        }
        let all = all.into_iter();
        let all = all.map(|(net, name, pods)| (net.trunc(), name, pods));
        told_apart(all.collect())
    }

    /// By which addresses the cluster's nodes elsewhere are reached from outside, in the order of their names.
    pub fn outward(&self) -> Vec<IpAddr> {
        let table = self.0.load();
        let members = table.said.cluster.members().into_iter().flatten();
        let elsewhere = members.filter(|(name, _)| !table.nodes.contains_key(*name));
        let all = elsewhere.flat_map(|(_, member)| member.outward.iter().copied());
        all.collect()
    }

    /// All names, in order.
    pub fn names(&self) -> Vec<NodeName> {
        self.0.load().nodes.keys().cloned().collect()
    }
}

/// Of these networks, with who has them, those of pods that share nothing with anybody else's, and those that do.
fn told_apart(mut all: Vec<(IpNet, &NodeName, bool)>) -> [BTreeSet<IpNet>; 2] {
    // Networks nest or lie apart: each comes behind those that hold it.
    all.sort_unstable();
    let mut shared = vec![false; all.len()];
    let mut holding: Vec<usize> = Vec::new();
    for (place, (net, name, _)) in all.iter().enumerate() {
        holding.retain(|holder| all[*holder].0.contains(net));
        for holder in &holding {
            if all[*holder].1 != *name {
                (shared[*holder], shared[place]) = (true, true);
            }
        }
        holding.push(place);
    }
    let mut apart = [BTreeSet::new(), BTreeSet::new()];
    for ((net, _, _), shared) in all.iter().zip(shared).filter(|((_, _, pods), _)| *pods) {
        apart[usize::from(shared)].insert(*net);
    }
    apart
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> NodeName {
        NodeName::parse(text).unwrap()
    }

    fn node(addresses: &[&str], pods: &[&str]) -> Node {
        Node {
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            pod_networks: pods.iter().map(|text| text.parse().unwrap()).collect(),
            ..Node::default()
        }
    }

    #[test]
    fn a_node_has_its_name_in_each_zone_as_well() {
        let writer = NodesWriter::default();
        writer.zones(&[".".into(), "Nodes.Example".into(), "b.example.".into()]);
        for known in ["edge-1", "edge-2.nodes.example"] {
            writer.put(name(known), Node::default());
        }
        let nodes = writer.reader();
        for (asked, found) in [
            ("edge-1.nodes.example", Some("edge-1")),
            ("EDGE-1.nodes.EXAMPLE.", Some("edge-1")),
            ("edge-1.b.example", Some("edge-1")),
            ("edge-2.nodes.example", Some("edge-2.nodes.example")),
            ("edge-2", None),
            ("edge-1.nodes.example.b.example", None),
            ("edge-1nodes.example", None),
            ("nodes.example", None),
            (".nodes.example", None),
            ("edge-1.other.example", None),
        ] {
            assert_eq!(nodes.by_name(asked), found.map(name), "{asked}");
        }
        assert!(
            nodes.place("edge-1.nodes.example").is_none(),
            "to DNS a zone is a zone once"
        );
        writer.zones(&[]);
        assert_eq!(nodes.by_name("edge-1.nodes.example"), None);
    }

    #[test]
    fn a_node_is_found_by_name_then_address_then_pod_network() {
        let writer = NodesWriter::default();
        writer.put(name("edge-1"), node(&["10.0.0.1"], &["10.244.1.0/24"]));
        writer.put(name("edge-2"), node(&["10.0.0.2"], &["10.244.0.0/16"]));
        let nodes = writer.reader();
        let at = |text: &str| nodes.by_address(text.parse().unwrap());
        assert_eq!(nodes.by_name("EDGE-1"), Some(name("edge-1")));
        assert_eq!(nodes.by_name("Edge-1."), Some(name("edge-1")));
        assert_eq!(nodes.by_name("edge-1.."), None);
        assert_eq!(nodes.by_name("edge-1.nodes.example"), None);
        assert_eq!(nodes.by_name("."), None);
        assert_eq!(nodes.by_name("edge-3"), None);
        assert_eq!(at("10.0.0.2"), Named::Node(name("edge-2")));
        assert_eq!(at("::ffff:10.0.0.2"), Named::Node(name("edge-2")));
        assert_eq!(
            at("10.244.1.7"),
            Named::Pod(name("edge-1")),
            "longest prefix"
        );
        assert_eq!(at("10.244.2.7"), Named::Pod(name("edge-2")));
        assert_eq!(at("10.9.9.9"), Named::Nobody);
        writer.remove(&name("edge-2"));
        assert_eq!(at("10.0.0.2"), Named::Nobody);
    }

    fn member(edge: bool, addresses: &[&str], pods: &[&str]) -> Member {
        let node = node(addresses, pods);
        Member {
            edge,
            outward: Vec::new(),
            addresses: node.addresses,
            pod_networks: node.pod_networks,
            labels: [("site".to_owned(), "north".to_owned())].into(),
            pool: Some("of-a-label".to_owned()),
        }
    }

    #[test]
    fn what_the_cluster_says_holds_before_a_record_and_what_a_record_alone_says_stays() {
        let writer = NodesWriter::default();
        let mut joined = node(&["192.168.0.1"], &[]);
        joined.joined_at = 7;
        joined.pool = Some("of-a-token".to_owned());
        writer.put(name("edge-1"), joined);
        writer.put(name("edge-2"), node(&["10.0.0.2"], &[]));
        assert_eq!(writer.reader().places(), None, "not known yet");
        writer.cluster(
            [
                (
                    name("edge-1"),
                    member(false, &["10.0.0.1"], &["10.244.1.0/24"]),
                ),
                (name("edge-3"), member(true, &["10.0.0.3"], &[])),
                (name("cloud-1"), member(false, &["10.0.9.1"], &[])),
            ]
            .into(),
        );
        let nodes = writer.reader();
        let at = |text: &str| nodes.by_address(text.parse().unwrap());
        assert_eq!(at("192.168.0.1"), Named::Nobody, "the record's");
        assert_eq!(at("10.0.0.1"), Named::Node(name("edge-1")));
        assert_eq!(at("10.244.1.7"), Named::Pod(name("edge-1")));
        assert_eq!(nodes.get(&name("edge-1")).unwrap().joined_at, 7);
        assert_eq!(nodes.get(&name("edge-1")).unwrap().labels["site"], "north");
        let pool = |node| nodes.get(&name(node)).unwrap().pool.unwrap();
        assert_eq!(
            (&*pool("edge-1"), &*pool("edge-3")),
            ("of-a-token", "of-a-label")
        );
        assert_eq!(
            at("10.0.0.2"),
            Named::Node(name("edge-2")),
            "no Node object"
        );
        assert_eq!(nodes.place("EDGE-3."), Some(Place::Edge(name("edge-3"))));
        let own = vec!["10.0.9.1".parse().unwrap()];
        assert_eq!(nodes.place("Cloud-1"), Some(Place::Elsewhere(own)));
        assert_eq!(
            (nodes.by_name("cloud-1"), at("10.0.9.1")),
            (None, Named::Nobody)
        );
        assert_eq!(nodes.place("nobody"), None);
        let places = nodes.places().unwrap();
        assert_eq!(places.len(), 4);
        for (name, place) in places {
            assert_eq!(nodes.place(name.as_str()), Some(place), "{name}");
        }

        // Whoever joins or goes later changes nothing of that, nor does the cluster change records.
        writer.put(name("edge-4"), Node::default());
        assert_eq!(at("10.0.0.1"), Named::Node(name("edge-1")));
        writer.cluster(BTreeMap::new());
        assert_eq!(at("192.168.0.1"), Named::Node(name("edge-1")));
        assert_eq!(
            (nodes.place("edge-3"), nodes.place("cloud-1")),
            (None, None)
        );
    }

    #[test]
    fn an_edge_that_claims_the_address_of_a_node_elsewhere_does_not_get_it() {
        let writer = NodesWriter::default();
        let cluster = [
            (name("cloud-1"), member(false, &["10.0.9.1"], &[])),
            (name("edge-1"), member(true, &["10.0.9.1", "10.0.0.1"], &[])),
        ];
        writer.cluster(cluster.into());
        let nodes = writer.reader();
        let at = |text: &str| nodes.by_address(text.parse().unwrap());
        assert!(matches!(at("10.0.9.1"), Named::Several(all) if all.len() == 2));
        assert_eq!(at("10.0.0.1"), Named::Node(name("edge-1")));
        let own: IpAddr = "10.0.0.1".parse().unwrap();
        assert_eq!(nodes.edge_addresses(), [own].into());
        let shared: IpAddr = "10.0.9.1".parse().unwrap();
        let both = [name("cloud-1"), name("edge-1")];
        assert_eq!(nodes.address_conflicts(), [(shared, both.into())].into());
    }

    #[test]
    fn an_address_of_two_nodes_names_neither() {
        let writer = NodesWriter::default();
        writer.put(name("edge-1"), node(&["192.168.0.2"], &["10.244.0.0/24"]));
        writer.put(name("edge-2"), node(&["192.168.0.2"], &["10.244.0.0/24"]));
        let nodes = writer.reader();
        let at = |text: &str| nodes.by_address(text.parse().unwrap());
        assert!(matches!(at("192.168.0.2"), Named::Several(all) if all.len() == 2));
        assert!(matches!(at("10.244.0.9"), Named::Several(all) if all.len() == 2));
    }

    #[test]
    fn addresses_of_one_node_each_are_listed_and_each_change_is_heard() {
        let writer = NodesWriter::default();
        let (nodes, mut changes) = (writer.reader(), writer.changes());
        writer.put(name("edge-1"), node(&["10.0.0.1", "192.168.0.2"], &[]));
        writer.put(
            name("edge-2"),
            node(&["::ffff:10.0.0.2", "192.168.0.2"], &[]),
        );
        assert!(changes.has_changed().unwrap());
        let listed = |nodes: &Nodes| {
            let all = nodes.edge_addresses();
            all.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(
            listed(&nodes),
            ["10.0.0.1", "10.0.0.2", "192.168.0.2"],
            "the gateway says that two nodes have the last one"
        );
        assert_eq!(nodes.address_conflicts().len(), 1);
        changes.mark_unchanged();
        writer.remove(&name("edge-1"));
        assert!(changes.has_changed().unwrap());
        assert_eq!(listed(&nodes), ["10.0.0.2", "192.168.0.2"]);
        assert_eq!(nodes.address_conflicts(), AddressConflicts::new());
    }

    #[test]
    fn a_network_of_pods_is_redirected_if_nobody_else_has_anything_in_it() {
        let writer = NodesWriter::default();
        let edges = [
            (
                "edge-1",
                vec!["10.0.0.1"],
                vec!["10.244.1.0/24", "fd01::/64"],
            ),
            // The same network twice, and one within another's.
            ("edge-2", vec![], vec!["10.244.2.0/24", "10.244.3.7/32"]),
            ("edge-3", vec![], vec!["10.244.2.0/24", "10.244.3.0/24"]),
            // What pods in the cloud have, a node's own address, another edge's.
            ("edge-4", vec![], vec!["10.245.0.0/16", "10.9.0.0/24"]),
            ("edge-5", vec![], vec!["10.0.0.0/24", "10.244.5.0/24"]),
            ("edge-6", vec!["10.244.6.1"], vec!["10.244.6.0/24"]),
        ];
        let member = |edge, addresses: &[&str], pods: &[&str]| {
            let node = node(addresses, pods);
            Member {
                edge,
                addresses: node.addresses,
                pod_networks: node.pod_networks,
                ..Member::default()
            }
        };
        let mut all: BTreeMap<_, _> = edges
            .iter()
            .map(|(node, addresses, pods)| (name(node), member(true, addresses, pods)))
            .collect();
        all.insert(
            name("cloud-1"),
            member(false, &["10.9.0.5"], &["10.245.7.0/24"]),
        );
        writer.cluster(all);
        let found = writer.reader().edge_pod_networks();
        let [found, shared] =
            found.map(|nets| nets.iter().map(ToString::to_string).collect::<Vec<_>>());
        let alone = [
            "10.244.1.0/24",
            "10.244.5.0/24",
            "10.244.6.0/24",
            "fd01::/64",
        ];
        assert_eq!(found, alone);
        let several = [
            "10.0.0.0/24",
            "10.9.0.0/24",
            "10.244.2.0/24",
            "10.244.3.0/24",
            "10.244.3.7/32",
            "10.245.0.0/16",
        ];
        assert_eq!(shared, several);
    }
}
