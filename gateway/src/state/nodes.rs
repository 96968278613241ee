//! Nodes that this gateway serves: names, confirmed addresses, pod networks.
//!
//! This table owns the names and addresses of nodes. An address is in the table only if an enrolment record (or, with Kubernetes,
//! the Node object) confirms it. An address that only the edge itself reports is never in the table. `claims` decides which of
//! several nodes with one address is reached by it. There are two sources: the enrolment records, and the cluster, if there is
//! one. For a node's addresses and pods the cluster takes precedence over the record. For labels and pools the record takes
//! precedence, because a token contains its owner's data, while a kubelet writes its own Node object.

mod claims;
mod pod_lookup;
mod writer;

use super::pods::Pods;
use arc_swap::{ArcSwap, ArcSwapOption};
use causeway_certs::{Fingerprint, NodeName};
use causeway_tunnel::target;
use claims::{AddressClaims, ClaimHolder, ClaimPriority};
pub use claims::{AddressConflict, AddressConflicts};
use ipnet::IpNet;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
    sync::{Arc, Weak},
};
pub use writer::NodesWriter;

/// Confirmed data of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Addresses that name this node to clients.
    pub addresses: Vec<IpAddr>,
    /// Networks of the pods on the node.
    pub pod_networks: Vec<IpNet>,
    /// Pool of the node.
    pub pool: Option<String>,
    /// Pool of the node if the policy may use it: from a token, or from a label that no kubelet can write.
    pub policy_pool: Option<String>,
    /// Labels that the policy may use.
    pub labels: BTreeMap<String, String>,
    /// Whether a Node with this name in the cluster decides if the node is at the edge. False if a token names exactly this node.
    pub follows_cluster: bool,
    /// Time of the last enrolment, in Unix seconds. Certificates that were issued before are no longer valid for the node.
    pub joined_at: u64,
    /// SHA-256 of the public key with which the node last joined by a token.
    pub join_key: Option<Fingerprint>,
    /// Reason of the revocation, if the node is revoked.
    pub revoked: Option<String>,
}

/// Data of a node in the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterNode {
    /// Whether the node is at the edge. Other nodes are reached by their own addresses. A node that joined here by its name is at
    /// the edge in any case.
    pub is_edge: bool,
    /// Creation time of the Node object, in Unix seconds.
    pub created_at: u64,
    /// Addresses of the node.
    pub addresses: Vec<IpAddr>,
    /// Those of the addresses that are for pods only. A node at the edge has them only if its record confirms them: its kubelet could
    /// take the address of a pod of another node.
    pub pod_addresses: Vec<IpAddr>,
    /// The addresses by which a node that is not at the edge is reached from outside.
    pub external_addresses: Vec<IpAddr>,
    /// Networks of the pods on the node.
    pub pod_networks: Vec<IpNet>,
    /// Labels that the policy may use.
    pub labels: BTreeMap<String, String>,
    /// Pool in the node's pool label.
    pub pool: Option<String>,
    /// Whether the policy may use the pool in that label.
    pub is_policy_pool: bool,
    /// Whether its Lease is renewed by delegated heartbeats.
    pub delegated: bool,
}

/// Location of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeLocation {
    /// The node is at the edge, and is reached through a tunnel.
    Edge(NodeName),
    /// The node is elsewhere, and is reached by these addresses.
    Elsewhere(Vec<IpAddr>),
}

/// Reason of a revocation by the configuration, if the node's record has none.
pub(crate) const REVOKED_BY_CONFIG: &str = "tunnel.revoked names it";

/// Number of label changes after which the change of a removed node is no longer recorded.
const RELABEL_HISTORY: u64 = 1024;

/// Sources of the data of nodes.
#[derive(Clone, Debug, Default)]
struct NodeSources {
    /// Nodes that have joined, from the enrolment records.
    records: BTreeMap<NodeName, Node>,
    /// Zones in which nodes have names as well, each in lower case with a leading dot.
    zones: Arc<[String]>,
    cluster: Cluster,
    /// Nodes that are revoked, whatever the records contain.
    revoked: Arc<BTreeSet<NodeName>>,
}

/// The nodes of the cluster.
#[derive(Clone, Debug, Default)]
enum Cluster {
    /// The gateway does not follow a cluster.
    #[default]
    None,
    /// The first list of nodes has not arrived yet, for this reason.
    Pending(Arc<str>),
    /// The last list that arrived, with later changes.
    Known(Arc<BTreeMap<NodeName, ClusterNode>>),
}

impl Cluster {
    fn members(&self) -> Option<&BTreeMap<NodeName, ClusterNode>> {
        match self {
            Self::Known(members) => Some(members),
            Self::None | Self::Pending(_) => None,
        }
    }
}

#[derive(Debug, Default)]
struct Table {
    sources: NodeSources,
    /// Nodes at the edge, from records and cluster.
    nodes: BTreeMap<NodeName, Node>,
    by_address: HashMap<IpAddr, AddressClaims>,
    /// Addresses of the cluster's nodes that are not at the edge.
    elsewhere: HashSet<IpAddr>,
    /// Pod networks, longest prefix first.
    pod_networks: Vec<(IpNet, NodeName)>,
    /// Number of tables in which a node had other labels or another pool than in the previous table.
    relabel_generation: u64,
    /// Generation of the last such change, by node.
    relabelled_at: BTreeMap<NodeName, u64>,
}

/// Result of looking up an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddressMatch {
    /// A node, by one of its own addresses.
    Node(NodeName),
    /// A pod on this node.
    Pod(NodeName),
    /// Several nodes share the address.
    Several(Vec<NodeName>),
    /// The address is in the networks of pods, and no running pod has it, or several pods have it. Only if Pod objects are followed.
    NoPod,
    /// The pod with the address, and its node, are not known now, for this reason. Only if Pod objects are followed.
    Undecided(Arc<str>),
    /// No node has the address.
    Unknown,
}

/// Read access to the table. Cheap to clone; reads never wait.
#[derive(Clone, Debug, Default)]
pub struct Nodes {
    table: Arc<ArcSwap<Table>>,
    pods: Pods,
}

/// Names of the nodes that a condition selects, found once for each table.
#[derive(Debug, Default)]
pub struct NodeSelection(ArcSwapOption<SelectedNames>);

#[derive(Debug)]
struct SelectedNames {
    /// Table in which the names were found. It is not kept alive, but no other table has its address meanwhile.
    table: Weak<Table>,
    names: Arc<[NodeName]>,
}

impl NodeSelection {
    /// Returns the names of the nodes that match `is_selected`, which must be the same condition at each call.
    pub fn update(&self, nodes: &Nodes, is_selected: impl Fn(&Node) -> bool) -> Arc<[NodeName]> {
        self.update_by(nodes, |all| {
            let selected = all.iter().filter(|(_, node)| is_selected(node));
            selected.map(|(name, _)| name.clone()).collect()
        })
    }

    /// Returns those of these names, which must be the same at each call, whose nodes are not revoked.
    pub fn update_listed(&self, nodes: &Nodes, listed: &[NodeName]) -> Arc<[NodeName]> {
        self.update_by(nodes, |all| {
            let is_revoked =
                |name: &NodeName| all.get(name).is_some_and(|node| node.revoked.is_some());
            let admitted = listed.iter().filter(|name| !is_revoked(name));
            admitted.cloned().collect()
        })
    }

    fn update_by(
        &self,
        nodes: &Nodes,
        find: impl FnOnce(&BTreeMap<NodeName, Node>) -> Arc<[NodeName]>,
    ) -> Arc<[NodeName]> {
        let table = nodes.table.load_full();
        let found = self.0.load();
        if let Some(found) = &*found
            && std::ptr::eq(found.table.as_ptr(), Arc::as_ptr(&table))
        {
            return found.names.clone();
        }
        let names = find(&table.nodes);
        self.0.store(Some(Arc::new(SelectedNames {
            table: Arc::downgrade(&table),
            names: names.clone(),
        })));
        names
    }
}

impl Table {
    fn from_sources(sources: NodeSources) -> Self {
        let mut nodes = sources.records.clone();
        for node in nodes.values_mut() {
            node.policy_pool.clone_from(&node.pool);
        }
        let mut by_address: HashMap<IpAddr, AddressClaims> = HashMap::new();
        let mut elsewhere = HashSet::new();
        for (name, member) in sources.cluster.members().into_iter().flatten() {
            if sources.is_at_edge(name, member) {
                nodes
                    .entry(name.clone())
                    .or_default()
                    .apply_cluster_data(member);
            } else {
                nodes.remove(name);
                elsewhere.extend(member.addresses.iter().map(IpAddr::to_canonical));
                add_claims(&mut by_address, name, &member.addresses, |_| {
                    ClaimPriority::Elsewhere
                });
            }
        }
        for name in sources.revoked.iter() {
            if let Some(node) = nodes.get_mut(name) {
                node.revoked = Some(REVOKED_BY_CONFIG.to_owned());
            }
        }
        let mut pod_networks = Vec::new();
        for (name, node) in &nodes {
            add_claims(&mut by_address, name, &node.addresses, |address| {
                sources.claim_priority(name, address)
            });
            pod_networks.extend(node.pod_networks.iter().map(|net| (*net, name.clone())));
        }
        // Keeps only addresses that at least one node of this table claims.
        by_address.retain(|_, claims| claims.names().any(|name| nodes.contains_key(name)));
        pod_networks.sort_by_key(|(net, _)| std::cmp::Reverse(net.prefix_len()));
        Self {
            sources,
            nodes,
            by_address,
            elsewhere,
            pod_networks,
            relabel_generation: 0,
            relabelled_at: BTreeMap::new(),
        }
    }

    /// Records the nodes that have other labels or another pool than in the table `previous`.
    fn record_relabels(&mut self, previous: &Self) {
        let all = self.nodes.keys().chain(previous.nodes.keys());
        let changed: BTreeSet<NodeName> = all
            .filter(|name| self.pool_and_labels(name) != previous.pool_and_labels(name))
            .cloned()
            .collect();
        let generation = previous.relabel_generation + u64::from(!changed.is_empty());
        let mut generations = previous.relabelled_at.clone();
        generations.extend(changed.into_iter().map(|name| (name, generation)));
        // Readers poll every second, so the change of a removed node is stored for long enough.
        generations
            .retain(|name, at| self.nodes.contains_key(name) || generation - *at < RELABEL_HISTORY);
        (self.relabel_generation, self.relabelled_at) = (generation, generations);
    }

    /// Returns the pool and the labels of a node; empty for an unknown node.
    fn pool_and_labels(
        &self,
        name: &NodeName,
    ) -> (Option<&str>, Option<&BTreeMap<String, String>>) {
        let node = self.nodes.get(name);
        let pool = node.and_then(|node| node.pool.as_deref());
        let labels = node.map(|node| &node.labels);
        (pool, labels.filter(|labels| !labels.is_empty()))
    }
}

impl Table {
    /// Returns the edge node with exactly this name.
    fn edge_by_name(&self, name: &str) -> Option<NodeName> {
        if let Some((known, _)) = self.nodes.get_key_value(name) {
            return Some(known.clone());
        }
        let name = NodeName::parse(name).ok()?;
        self.nodes.contains_key(&name).then_some(name)
    }
}

impl NodeSources {
    /// Whether a node of the cluster is reached through a tunnel.
    fn is_at_edge(&self, name: &NodeName, member: &ClusterNode) -> bool {
        let record = self.records.get(name);
        member.is_edge || record.is_some_and(|record| !record.follows_cluster)
    }

    /// Returns the priority of an edge node's claim to one of its addresses.
    fn claim_priority(&self, name: &NodeName, address: IpAddr) -> ClaimPriority {
        let record = self.records.get(name);
        let mut confirmed = record.into_iter().flat_map(|record| &record.addresses);
        if confirmed.any(|confirmed| confirmed.to_canonical() == address) {
            return ClaimPriority::Token;
        }
        let member = self.cluster.members().and_then(|all| all.get(name));
        ClaimPriority::Object(member.map_or(u64::MAX, |member| member.created_at))
    }
}

impl Node {
    /// Applies the cluster's data about the node.
    fn apply_cluster_data(&mut self, member: &ClusterNode) {
        let confirmed = std::mem::take(&mut self.addresses);
        let is_own = |address: &&IpAddr| {
            !member.pod_addresses.contains(address) || confirmed.contains(address)
        };
        self.addresses = member.addresses.iter().filter(is_own).copied().collect();
        self.pod_networks.clone_from(&member.pod_networks);
        let record_labels = std::mem::replace(&mut self.labels, member.labels.clone());
        self.labels.extend(record_labels);
        if self.pool.is_none() {
            self.pool.clone_from(&member.pool);
            self.policy_pool = member.pool.clone().filter(|_| member.is_policy_pool);
        }
    }
}

fn add_claims(
    claims_by_address: &mut HashMap<IpAddr, AddressClaims>,
    name: &NodeName,
    addresses: &[IpAddr],
    priority: impl Fn(IpAddr) -> ClaimPriority,
) {
    for address in addresses {
        let address = address.to_canonical();
        let claims = claims_by_address.entry(address).or_default();
        claims.add(priority(address), name);
    }
}

/// Returns the error message for a node that its record revokes.
pub(crate) fn record_revoked(node: &NodeName, reason: &str) -> String {
    format!("node {node} is revoked: {reason}; to admit it again: `causeway node allow {node}`")
}

impl Nodes {
    /// Returns the location of the node with this name, if there is one. Names are compared as in [`Nodes::by_name`].
    pub fn location(&self, name: &str) -> Option<NodeLocation> {
        let table = self.table.load();
        let name = name.strip_suffix('.').unwrap_or(name);
        if let Some(edge) = table.edge_by_name(name) {
            return Some(NodeLocation::Edge(edge));
        }
        let name = NodeName::parse(name).ok()?;
        let member = table.sources.cluster.members()?.get(&name)?;
        Some(NodeLocation::Elsewhere(member.addresses.clone()))
    }

    /// Whether the cluster's node with exactly this name is at the edge; `None` if the cluster has no such node.
    pub fn cluster_says_edge(&self, name: &NodeName) -> Option<bool> {
        let table = self.table.load();
        let member = table.sources.cluster.members()?.get(name)?;
        Some(table.sources.is_at_edge(name, member))
    }

    /// Whether a node of the cluster that is not at the edge has this address.
    pub fn is_elsewhere(&self, address: IpAddr) -> bool {
        self.table
            .load()
            .elsewhere
            .contains(&address.to_canonical())
    }

    /// Returns the nodes of the cluster whose Leases are renewed by delegated heartbeats.
    pub fn delegated(&self) -> BTreeSet<NodeName> {
        let table = self.table.load();
        let members = table.sources.cluster.members().into_iter().flatten();
        let delegated = members.filter(|(_, member)| member.delegated);
        delegated.map(|(name, _)| name.clone()).collect()
    }

    /// Whether the Lease of this node of the cluster is renewed by delegated heartbeats.
    pub fn is_delegated(&self, name: &NodeName) -> bool {
        let table = self.table.load();
        let member = table
            .sources
            .cluster
            .members()
            .and_then(|all| all.get(name));
        member.is_some_and(|member| member.delegated)
    }

    /// Whether the nodes of the cluster are loaded.
    pub fn has_cluster(&self) -> bool {
        self.table.load().sources.cluster.members().is_some()
    }

    /// Returns the reason why the nodes of the cluster are not loaded yet; `None` if they are loaded or no cluster is followed.
    ///
    /// Until then, a name or an address without a record may still belong to an edge, and labels and pools may be missing.
    pub fn pending_reason(&self) -> Option<Arc<str>> {
        match &self.table.load().sources.cluster {
            Cluster::Pending(reason) => Some(reason.clone()),
            Cluster::None | Cluster::Known(_) => None,
        }
    }

    /// Whether there is any enrolment record.
    pub fn has_records(&self) -> bool {
        !self.table.load().sources.records.is_empty()
    }

    /// Returns the location of each node, or `None` until the nodes of the cluster are loaded. An empty result would mean that
    /// there are no nodes.
    pub fn locations(&self) -> Option<BTreeMap<NodeName, NodeLocation>> {
        let table = self.table.load();
        let cluster = table.sources.cluster.members()?.iter();
        let elsewhere = |(name, member): (&NodeName, &ClusterNode)| {
            (
                name.clone(),
                NodeLocation::Elsewhere(member.addresses.clone()),
            )
        };
        let mut all: BTreeMap<NodeName, NodeLocation> = cluster.map(elsewhere).collect();
        let edges = table.nodes.keys();
        all.extend(edges.map(|name| (name.clone(), NodeLocation::Edge(name.clone()))));
        Some(all)
    }

    /// Returns the edge node with this name, alone or in one of the zones, if it is known. Names are compared without case and
    /// without the root's dot (RFC 3986 §3.2.2). Otherwise a name with that dot would not route to its node, and would be treated
    /// as a foreign Host.
    pub fn by_name(&self, name: &str) -> Option<NodeName> {
        let table = self.table.load();
        let name = name.strip_suffix('.').unwrap_or(name);
        let find_in_zone = |zone: &String| {
            let (name, end) = name.split_at_checked(name.len().checked_sub(zone.len())?)?;
            end.eq_ignore_ascii_case(zone)
                .then(|| table.edge_by_name(name))?
        };
        // A node whose own name ends with a zone takes precedence over nodes within that zone.
        table
            .edge_by_name(name)
            .or_else(|| table.sources.zones.iter().find_map(find_in_zone))
    }

    /// Returns the edge node and the service that the name `SERVICE.NODE` means, alone or in one of the zones. A node that itself has
    /// this name takes precedence, so there is no service while the nodes of the cluster are not loaded.
    pub fn service_by_name(&self, name: &str) -> Option<(NodeName, String)> {
        let (service, node) = name.split_once('.')?;
        let service = service.to_ascii_lowercase();
        if !target::is_service_name(&service) || self.by_name(name).is_some() {
            return None;
        }
        let node = self.by_name(node)?;
        self.pending_reason().is_none().then_some((node, service))
    }

    /// Returns the match of an address: a node by its confirmed addresses, else the node of the pod with this address. If Pod
    /// objects are not followed, the networks of the nodes' pods say on which node the pod is. An edge that has an address only by its
    /// Node object does not take it from a pod elsewhere.
    pub fn by_address(&self, address: IpAddr) -> AddressMatch {
        let table = self.table.load();
        let address = address.to_canonical();
        // Nor is it the address of a pod of an edge node.
        if table.elsewhere.contains(&address) {
            return AddressMatch::Unknown;
        }
        let claims = table.by_address.get(&address);
        match claims.and_then(AddressClaims::holder) {
            Some(ClaimHolder::Edge(node)) => {
                let is_unproven = claims.is_some_and(AddressClaims::is_by_object);
                let of_pod = is_unproven.then(|| self.elsewhere_pod_match(&table, address));
                return of_pod
                    .flatten()
                    .unwrap_or_else(|| AddressMatch::Node(node.clone()));
            }
            Some(ClaimHolder::Elsewhere(_)) => return AddressMatch::Unknown,
            Some(ClaimHolder::Several(all)) => {
                return AddressMatch::Several(all.into_iter().cloned().collect());
            }
            None => {}
        }
        if let Some(found) = self.pod_match(&table, address) {
            return found;
        }
        let mut matching = table
            .pod_networks
            .iter()
            .filter(|(net, _)| net.contains(&address));
        let Some((net, node)) = matching.next() else {
            return AddressMatch::Unknown;
        };
        let mut all = vec![node.clone()];
        let same_prefix = matching.take_while(|(other, _)| other.prefix_len() == net.prefix_len());
        all.extend(
            same_prefix
                .map(|(_, node)| node.clone())
                .filter(|other| other != node),
        );
        match all.pop() {
            Some(only) if all.is_empty() => AddressMatch::Pod(only),
            Some(last) => {
                all.push(last);
                AddressMatch::Several(all)
            }
            None => AddressMatch::Unknown,
        }
    }

    /// Reads the confirmed data of a node. An unknown node has empty data.
    pub fn with<T>(&self, name: &NodeName, read: impl FnOnce(&Node) -> T) -> T {
        match self.table.load().nodes.get(name) {
            Some(node) => read(node),
            None => read(&Node::default()),
        }
    }

    /// Returns the nodes whose labels or pool have changed since generation `number`, and the generation for the next call.
    pub fn relabelled_since(&self, number: u64) -> (u64, BTreeSet<NodeName>) {
        let table = self.table.load();
        if table.relabel_generation == number {
            return (number, BTreeSet::new());
        }
        let since = table.relabelled_at.iter().filter(|(_, at)| **at > number);
        (
            table.relabel_generation,
            since.map(|(name, _)| name.clone()).collect(),
        )
    }

    /// Returns the confirmed data of a node.
    pub fn get(&self, name: &NodeName) -> Option<Node> {
        self.table.load().nodes.get(name).cloned()
    }

    /// Whether a name of the form `SERVICE.NODE` is that of a node: it then leads to that node, and to no service.
    pub fn hides_service(&self, service: &str, node: &NodeName) -> bool {
        let name = NodeName::parse(&format!("{service}.{node}"));
        name.is_ok_and(|name| self.table.load().nodes.contains_key(&name))
    }

    /// Returns the names of all nodes with a record.
    pub fn record_names(&self) -> BTreeSet<NodeName> {
        self.table.load().sources.records.keys().cloned().collect()
    }

    /// Returns the record of a node that has joined, independent of the cluster's data.
    pub fn get_record(&self, name: &NodeName) -> Option<Node> {
        self.table.load().sources.records.get(name).cloned()
    }

    /// Returns the reason why a node is revoked, by its record or by the configuration, and the way to admit it again. The node
    /// need not be known.
    pub fn revocation_reason(&self, name: &NodeName) -> Option<String> {
        let table = self.table.load();
        if table.sources.revoked.contains(name) {
            return Some(format!(
                "node {name} is revoked: {REVOKED_BY_CONFIG}; to admit it again, remove it there"
            ));
        }
        let known = table.nodes.get(name);
        let known = known.or_else(|| table.sources.records.get(name))?;
        Some(record_revoked(name, known.revoked.as_ref()?))
    }

    /// Returns the confirmed addresses that no node elsewhere has. This includes an address that tokens have confirmed for
    /// several nodes. The gateway answers requests to it with the nodes' names, instead of leaving clients to time out.
    pub fn edge_addresses(&self) -> BTreeSet<IpAddr> {
        let table = self.table.load();
        let at_edge =
            |claims: &AddressClaims| !matches!(claims.holder(), Some(ClaimHolder::Elsewhere(_)));
        let addresses = table
            .by_address
            .iter()
            .filter(|(_, claims)| at_edge(claims));
        addresses.map(|(address, _)| *address).collect()
    }

    /// Returns the confirmed addresses that several nodes share, at least one of them at the edge, with these nodes.
    pub fn address_conflicts(&self) -> AddressConflicts {
        let table = self.table.load();
        let shared = table.by_address.iter();
        shared
            .filter_map(|(address, claims)| Some((*address, claims.conflict()?)))
            .collect()
    }

    /// Returns all nodes that share this address and the one that is reached by it, if several nodes share it.
    pub fn address_conflict(&self, address: IpAddr) -> Option<AddressConflict> {
        let table = self.table.load();
        table.by_address.get(&address.to_canonical())?.conflict()
    }

    /// Returns two sets of pod networks of edges. Networks in the first set belong to one edge alone: they contain neither pods
    /// nor addresses of other nodes, and are not inside another node's networks. The second set has the remaining networks.
    pub fn edge_pod_networks(&self) -> [BTreeSet<IpNet>; 2] {
        let table = self.table.load();
        let mut all: Vec<(IpNet, &NodeName, bool)> = Vec::new();
        for (name, node) in &table.nodes {
            all.extend(node.addresses.iter().map(|ip| ((*ip).into(), name, false)));
            all.extend(node.pod_networks.iter().map(|net| (*net, name, true)));
        }
        for (name, member) in table.sources.cluster.members().into_iter().flatten() {
            if !table.nodes.contains_key(name) {
                let own = member.addresses.iter().map(|ip| IpNet::from(*ip));
                let nets = own.chain(member.pod_networks.iter().copied());
                all.extend(nets.map(|net| (net, name, false)));
            }
        }
        let all = all.into_iter();
        let all = all.map(|(net, name, pods)| (net.trunc(), name, pods));
        disjoint_pod_networks(all.collect())
    }

    /// Returns the addresses by which the cluster's nodes elsewhere are reached from outside, in the order of the node names.
    pub fn external_addresses(&self) -> Vec<IpAddr> {
        let table = self.table.load();
        let members = table.sources.cluster.members().into_iter().flatten();
        let elsewhere = members.filter(|(name, _)| !table.nodes.contains_key(*name));
        let all = elsewhere.flat_map(|(_, member)| member.external_addresses.iter().copied());
        all.collect()
    }

    /// Returns all names, in order.
    pub fn names(&self) -> Vec<NodeName> {
        self.table.load().nodes.keys().cloned().collect()
    }
}

/// Splits the pod networks in `all` into those that overlap no network of another node, and the others.
fn disjoint_pod_networks(mut all: Vec<(IpNet, &NodeName, bool)>) -> [BTreeSet<IpNet>; 2] {
    // Two networks are nested or disjoint. Each one follows the networks that contain it.
    all.sort_unstable();
    let mut overlaps = vec![false; all.len()];
    let mut enclosing: Vec<usize> = Vec::new();
    for (index, (net, name, _)) in all.iter().enumerate() {
        enclosing.retain(|holder| all[*holder].0.contains(net));
        for outer in &enclosing {
            if all[*outer].1 != *name {
                (overlaps[*outer], overlaps[index]) = (true, true);
            }
        }
        enclosing.push(index);
    }
    let mut disjoint_and_shared = [BTreeSet::new(), BTreeSet::new()];
    for ((net, _, _), shared) in all.iter().zip(overlaps).filter(|((_, _, pods), _)| *pods) {
        disjoint_and_shared[usize::from(shared)].insert(*net);
    }
    disjoint_and_shared
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
    fn nodes_with_changed_labels_or_pool_are_reported_once() {
        let labelled = |pool: &str, label: &str| Node {
            pool: (!pool.is_empty()).then(|| pool.to_owned()),
            labels: [("site".to_owned(), label.to_owned())].into(),
            ..Node::default()
        };
        let writer = NodesWriter::default();
        let nodes = writer.reader();
        let mut seen = 0;
        let mut told = || {
            let (number, names) = nodes.relabelled_since(seen);
            seen = number;
            names
                .into_iter()
                .map(|name| name.to_string())
                .collect::<Vec<_>>()
        };
        writer.upsert(name("edge-1"), labelled("", "north"));
        writer.upsert(name("edge-2"), labelled("mill", "north"));
        assert_eq!(told(), ["edge-1", "edge-2"]);
        let readdressed = Node {
            addresses: vec!["10.0.0.1".parse().unwrap()],
            ..labelled("", "north")
        };
        writer.upsert(name("edge-1"), readdressed);
        writer.upsert(name("edge-3"), Node::default());
        assert!(told().is_empty(), "neither pool nor labels");
        writer.upsert(name("edge-2"), labelled("quay", "north"));
        assert_eq!(told(), ["edge-2"]);
        let member = ClusterNode {
            is_edge: true,
            labels: [("line".to_owned(), "south".to_owned())].into(),
            ..ClusterNode::default()
        };
        writer.replace_cluster([(name("edge-1"), member)].into());
        assert_eq!(told(), ["edge-1"]);
        writer.remove(&name("edge-2"));
        writer.upsert(name("edge-3"), labelled("", "north"));
        assert_eq!(told(), ["edge-2", "edge-3"], "a removed node has none");
        assert!(told().is_empty());
    }

    #[test]
    fn a_node_has_its_name_in_each_zone_as_well() {
        let writer = NodesWriter::default();
        writer.replace_zones(&[".".into(), "Nodes.Example".into(), "b.example.".into()]);
        for known in ["edge-1", "edge-2.nodes.example"] {
            writer.upsert(name(known), Node::default());
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
            nodes.location("edge-1.nodes.example").is_none(),
            "duplicates of a zone count once"
        );
        writer.replace_zones(&[]);
        assert_eq!(nodes.by_name("edge-1.nodes.example"), None);
    }

    #[test]
    fn a_node_is_found_by_name_then_address_then_pod_network() {
        let writer = NodesWriter::default();
        writer.upsert(name("edge-1"), node(&["10.0.0.1"], &["10.244.1.0/24"]));
        writer.upsert(name("edge-2"), node(&["10.0.0.2"], &["10.244.0.0/16"]));
        let nodes = writer.reader();
        let at = |text: &str| nodes.by_address(text.parse().unwrap());
        assert_eq!(nodes.by_name("EDGE-1"), Some(name("edge-1")));
        assert_eq!(nodes.by_name("Edge-1."), Some(name("edge-1")));
        assert_eq!(nodes.by_name("edge-1.."), None);
        assert_eq!(nodes.by_name("edge-1.nodes.example"), None);
        assert_eq!(nodes.by_name("."), None);
        assert_eq!(nodes.by_name("edge-3"), None);
        assert_eq!(at("10.0.0.2"), AddressMatch::Node(name("edge-2")));
        assert_eq!(at("::ffff:10.0.0.2"), AddressMatch::Node(name("edge-2")));
        assert_eq!(
            at("10.244.1.7"),
            AddressMatch::Pod(name("edge-1")),
            "longest prefix"
        );
        assert_eq!(at("10.244.2.7"), AddressMatch::Pod(name("edge-2")));
        assert_eq!(at("10.9.9.9"), AddressMatch::Unknown);
        writer.remove(&name("edge-2"));
        assert_eq!(at("10.0.0.2"), AddressMatch::Unknown);
    }

    fn member(edge: bool, addresses: &[&str], pods: &[&str]) -> ClusterNode {
        let node = node(addresses, pods);
        ClusterNode {
            is_edge: edge,
            external_addresses: Vec::new(),
            addresses: node.addresses,
            pod_networks: node.pod_networks,
            labels: [("site".to_owned(), "north".to_owned())].into(),
            pool: Some("of-a-label".to_owned()),
            ..ClusterNode::default()
        }
    }

    #[test]
    fn cluster_facts_override_a_record_and_record_only_facts_stay() {
        let writer = NodesWriter::default();
        let mut joined = node(&["192.168.0.1"], &[]);
        joined.joined_at = 7;
        joined.pool = Some("of-a-token".to_owned());
        joined.labels = [("tier".to_owned(), "gold".to_owned())].into();
        writer.upsert(name("edge-1"), joined);
        writer.upsert(name("edge-2"), node(&["10.0.0.2"], &[]));
        assert_eq!(writer.reader().locations(), None, "not known yet");
        writer.replace_cluster(
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
        assert_eq!(at("192.168.0.1"), AddressMatch::Unknown, "the record's");
        assert_eq!(at("10.0.0.1"), AddressMatch::Node(name("edge-1")));
        assert_eq!(at("10.244.1.7"), AddressMatch::Pod(name("edge-1")));
        assert_eq!(nodes.get(&name("edge-1")).unwrap().joined_at, 7);
        let labels = nodes.get(&name("edge-1")).unwrap().labels;
        assert_eq!((&*labels["site"], &*labels["tier"]), ("north", "gold"));
        let pool = |node| nodes.get(&name(node)).unwrap().pool.unwrap();
        assert_eq!(
            (&*pool("edge-1"), &*pool("edge-3")),
            ("of-a-token", "of-a-label")
        );
        // This node has no Node object.
        assert_eq!(at("10.0.0.2"), AddressMatch::Node(name("edge-2")));
        let edge = NodeLocation::Edge(name("edge-3"));
        assert_eq!(nodes.location("EDGE-3."), Some(edge));
        let own = vec!["10.0.9.1".parse().unwrap()];
        assert_eq!(
            nodes.location("Cloud-1"),
            Some(NodeLocation::Elsewhere(own))
        );
        assert_eq!(
            (nodes.by_name("cloud-1"), at("10.0.9.1")),
            (None, AddressMatch::Unknown)
        );
        assert_eq!(nodes.location("nobody"), None);
        let places = nodes.locations().unwrap();
        assert_eq!(places.len(), 4);
        for (name, place) in places {
            assert_eq!(nodes.location(name.as_str()), Some(place), "{name}");
        }

        // Nodes that join or leave later do not change the result, and the cluster does not change records.
        writer.upsert(name("edge-4"), Node::default());
        assert_eq!(at("10.0.0.1"), AddressMatch::Node(name("edge-1")));
        writer.replace_cluster(BTreeMap::new());
        assert_eq!(at("192.168.0.1"), AddressMatch::Node(name("edge-1")));
        assert_eq!(
            (nodes.location("edge-3"), nodes.location("cloud-1")),
            (None, None)
        );
    }

    #[test]
    fn token_labels_come_first_and_policy_ignores_kubelet_labels() {
        let writer = NodesWriter::default();
        let labels = |all: &[(&str, &str)]| -> BTreeMap<String, String> {
            let all = all.iter();
            all.map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect()
        };
        let token = Node {
            labels: labels(&[("tier", "gold")]),
            ..node(&[], &[])
        };
        let counted = |pool_counts| ClusterNode {
            labels: labels(&[("tier", "tin"), ("site", "north")]),
            pool: Some("east".to_owned()),
            is_policy_pool: pool_counts,
            ..member(true, &[], &[])
        };
        writer.upsert(name("edge-1"), token);
        for pool_counts in [false, true] {
            let members = [name("edge-1"), name("edge-2")].map(|name| (name, counted(pool_counts)));
            writer.replace_cluster(members.into());
            let get = |node| writer.reader().get(&name(node)).unwrap();
            let both = labels(&[("tier", "gold"), ("site", "north")]);
            assert_eq!(get("edge-1").labels, both);
            assert_eq!(get("edge-2").labels["tier"], "tin");
            for node in [get("edge-1"), get("edge-2")] {
                assert_eq!(node.pool.as_deref(), Some("east"));
                assert_eq!(node.policy_pool.is_some(), pool_counts);
            }
        }
        let token = Node {
            pool: Some("west".to_owned()),
            ..node(&[], &[])
        };
        writer.upsert(name("edge-1"), token);
        let known = writer.reader().get(&name("edge-1")).unwrap();
        assert_eq!(known.pool.as_deref(), Some("west"));
        assert_eq!(known.policy_pool, known.pool);
    }

    #[test]
    fn a_node_without_token_is_an_edge_if_the_cluster_says_so() {
        let writer = NodesWriter::default();
        let follows = Node {
            follows_cluster: true,
            revoked: Some("stolen".to_owned()),
            ..node(&["10.0.0.1"], &[])
        };
        writer.upsert(name("n"), follows);
        let nodes = writer.reader();
        let edge = Some(NodeLocation::Edge(name("n")));
        assert_eq!(nodes.location("n"), edge, "there is no cluster");
        writer.replace_cluster([(name("n"), member(false, &["10.0.9.1"], &[]))].into());
        assert!(matches!(
            nodes.location("n"),
            Some(NodeLocation::Elsewhere(_))
        ));
        assert_eq!(nodes.cluster_says_edge(&name("n")), Some(false));
        assert_eq!(nodes.by_name("n"), None);
        assert!(
            nodes.revocation_reason(&name("n")).is_some(),
            "the node stays revoked"
        );
        writer.replace_cluster([(name("n"), member(true, &["10.0.9.1"], &[]))].into());
        assert_eq!(nodes.location("n"), edge);
        writer.replace_cluster(BTreeMap::new());
        assert_eq!(
            nodes.location("n"),
            edge,
            "the cluster has none of this name"
        );
    }

    #[test]
    fn an_edge_cannot_claim_the_address_of_a_non_edge_node() {
        let writer = NodesWriter::default();
        let cluster = [
            (name("cloud-1"), member(false, &["10.0.9.1"], &[])),
            (name("edge-1"), member(true, &["10.0.9.1", "10.0.0.1"], &[])),
        ];
        writer.replace_cluster(cluster.into());
        let nodes = writer.reader();
        let at = |text: &str| nodes.by_address(text.parse().unwrap());
        assert_eq!(
            at("10.0.9.1"),
            AddressMatch::Unknown,
            "the cloud node's alone"
        );
        assert_eq!(at("10.0.0.1"), AddressMatch::Node(name("edge-1")));
        let own: IpAddr = "10.0.0.1".parse().unwrap();
        assert_eq!(nodes.edge_addresses(), [own].into());
        let shared: IpAddr = "10.0.9.1".parse().unwrap();
        let both = [name("cloud-1"), name("edge-1")];
        let conflict = AddressConflict {
            nodes: both.into(),
            holder: Some(name("cloud-1")),
        };
        assert_eq!(nodes.address_conflicts(), [(shared, conflict)].into());
    }

    #[test]
    fn a_claim_neither_takes_nor_gains_an_owned_address() {
        let writer = NodesWriter::default();
        let object = |edge, created, addresses: &[&str]| ClusterNode {
            created_at: created,
            ..member(edge, addresses, &[])
        };
        let stolen = &[
            "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.9.1", "10.0.0.5", "10.0.0.6",
        ];
        writer.upsert(name("edge-2"), node(&["10.0.0.2"], &[]));
        writer.upsert(name("edge-3"), node(&["10.0.0.3"], &[]));
        let members = [
            (name("edge-1"), object(true, 10, &["10.0.0.1"])),
            // A token has confirmed the address of this node, although its object is younger.
            (name("edge-2"), object(true, 30, &["10.0.0.2"])),
            (name("a-stolen"), object(true, 20, stolen)),
            (name("cloud-1"), object(false, 40, &["10.0.9.1"])),
            (name("edge-5"), object(true, 20, &["10.0.0.5"])),
            (name("edge-6"), object(true, 21, &["10.0.0.6"])),
        ];
        let nodes = writer.reader();
        for members in [members.clone(), members] {
            // The same data arrives again, as after a restart.
            writer.replace_cluster(BTreeMap::new());
            writer.replace_cluster(members.into());
            for (address, holder) in [
                ("10.0.0.1", Some("edge-1")),
                ("10.0.0.2", Some("edge-2")),
                ("10.0.0.3", Some("edge-3")),
                ("10.0.9.1", None),
                // With equal age, the first node by name has the address; otherwise the older node has it.
                ("10.0.0.5", Some("a-stolen")),
                ("10.0.0.6", Some("a-stolen")),
            ] {
                let found = nodes.by_address(address.parse().unwrap());
                let holder = holder.map_or(AddressMatch::Unknown, |holder| {
                    AddressMatch::Node(name(holder))
                });
                assert_eq!(found, holder, "{address}");
            }
            assert_eq!(nodes.address_conflicts().len(), 6);
            assert!(
                !nodes
                    .edge_addresses()
                    .contains(&"10.0.9.1".parse().unwrap())
            );
        }
    }

    #[test]
    fn an_address_that_tokens_confirm_of_two_nodes_names_neither() {
        let writer = NodesWriter::default();
        writer.upsert(name("edge-1"), node(&["192.168.0.2"], &["10.244.0.0/24"]));
        writer.upsert(name("edge-2"), node(&["192.168.0.2"], &["10.244.0.0/24"]));
        let nodes = writer.reader();
        let at = |text: &str| nodes.by_address(text.parse().unwrap());
        assert!(matches!(at("192.168.0.2"), AddressMatch::Several(all) if all.len() == 2));
        assert!(matches!(at("10.244.0.9"), AddressMatch::Several(all) if all.len() == 2));
    }

    #[test]
    fn addresses_of_each_node_are_listed_and_changes_are_sent() {
        let writer = NodesWriter::default();
        let (nodes, mut changes) = (writer.reader(), writer.subscribe());
        writer.upsert(name("edge-1"), node(&["10.0.0.1", "192.168.0.2"], &[]));
        writer.upsert(
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
            "the gateway reports that two nodes have the last one"
        );
        assert_eq!(nodes.address_conflicts().len(), 1);
        changes.mark_unchanged();
        writer.remove(&name("edge-1"));
        assert!(changes.has_changed().unwrap());
        assert_eq!(listed(&nodes), ["10.0.0.2", "192.168.0.2"]);
        assert_eq!(nodes.address_conflicts(), AddressConflicts::new());
    }

    #[test]
    fn a_pod_network_is_redirected_if_no_other_node_is_in_it() {
        let writer = NodesWriter::default();
        let edges = [
            (
                "edge-1",
                vec!["10.0.0.1"],
                vec!["10.244.1.0/24", "fd01::/64"],
            ),
            // The same network twice, and one inside another node's network.
            ("edge-2", vec![], vec!["10.244.2.0/24", "10.244.3.7/32"]),
            ("edge-3", vec![], vec!["10.244.2.0/24", "10.244.3.0/24"]),
            // The network of cloud pods, a node's own address, and another edge's network.
            ("edge-4", vec![], vec!["10.245.0.0/16", "10.9.0.0/24"]),
            ("edge-5", vec![], vec!["10.0.0.0/24", "10.244.5.0/24"]),
            ("edge-6", vec!["10.244.6.1"], vec!["10.244.6.0/24"]),
        ];
        let member = |edge, addresses: &[&str], pods: &[&str]| {
            let node = node(addresses, pods);
            ClusterNode {
                is_edge: edge,
                addresses: node.addresses,
                pod_networks: node.pod_networks,
                ..ClusterNode::default()
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
        writer.replace_cluster(all);
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

    #[test]
    fn an_edge_has_an_address_for_pods_only_if_its_record_confirms_it() {
        let (writer, name) = (NodesWriter::default(), NodeName::parse("edge-1").unwrap());
        let [confirmed, claimed]: [IpAddr; 2] =
            ["10.244.0.1", "10.244.0.9"].map(|text| text.parse().unwrap());
        let record = Node {
            addresses: vec![confirmed],
            ..Node::default()
        };
        writer.upsert(name.clone(), record);
        let member = ClusterNode {
            is_edge: true,
            addresses: vec![confirmed, claimed],
            pod_addresses: vec![confirmed, claimed],
            ..ClusterNode::default()
        };
        writer.replace_cluster([(name.clone(), member)].into());
        let known = writer.reader().get(&name).unwrap();
        assert_eq!(known.addresses, [confirmed]);
    }

    #[test]
    fn the_address_of_a_node_elsewhere_is_no_pod_of_an_edge() {
        let writer = NodesWriter::default();
        let [edge, cloud] = ["edge-1", "cloud-1"].map(|name| NodeName::parse(name).unwrap());
        let members = [
            ClusterNode {
                is_edge: true,
                pod_networks: vec!["10.244.1.0/24".parse().unwrap()],
                ..ClusterNode::default()
            },
            ClusterNode {
                addresses: vec!["10.244.1.3".parse().unwrap()],
                ..ClusterNode::default()
            },
        ];
        writer.replace_cluster([edge.clone(), cloud].into_iter().zip(members).collect());
        let found = |address: &str| writer.reader().by_address(address.parse().unwrap());
        assert_eq!(found("10.244.1.3"), AddressMatch::Unknown);
        assert_eq!(found("10.244.1.4"), AddressMatch::Pod(edge));
    }
}
