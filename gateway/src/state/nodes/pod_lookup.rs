//! Lookup of pods: the table of pods says on which node a pod is, and the table of nodes how that node is reached.

use super::{AddressMatch, Cluster, Nodes, Table};
use crate::state::pods::{self, DestinationPod, Pod, PodLookup, PodMatch};
use causeway_certs::NodeName;
use ipnet::IpNet;
use std::{
    collections::{BTreeSet, HashSet},
    net::IpAddr,
    sync::Arc,
};

/// Location of the node of a pod.
enum PodNode {
    Edge(NodeName),
    Elsewhere,
    Unknown,
}

/// Networks of pods of the cluster's nodes that are not at the edge.
struct ElsewhereNetworks {
    networks: HashSet<IpNet>,
    /// The lengths of their prefixes. There are few, so that a lookup is cheap.
    lengths: BTreeSet<u8>,
}

impl ElsewhereNetworks {
    fn new(table: &Table) -> Self {
        let members = table.sources.cluster.members().into_iter().flatten();
        let elsewhere = members.filter(|(name, _)| !table.nodes.contains_key(*name));
        let networks = elsewhere.flat_map(|(_, member)| &member.pod_networks);
        let networks: HashSet<_> = networks.map(IpNet::trunc).collect();
        let lengths = networks.iter().map(IpNet::prefix_len).collect();
        Self { networks, lengths }
    }

    fn contain(&self, address: IpAddr) -> bool {
        let mut lengths = self.lengths.iter();
        lengths.any(|length| {
            let network = IpNet::new(address, *length);
            network.is_ok_and(|network| self.networks.contains(&network.trunc()))
        })
    }
}

impl Table {
    fn node_of(&self, pod: &Pod) -> PodNode {
        if self.nodes.contains_key(&pod.node) {
            return PodNode::Edge(pod.node.clone());
        }
        let members = self.sources.cluster.members();
        if members.is_some_and(|all| all.contains_key(&pod.node)) {
            PodNode::Elsewhere
        } else {
            PodNode::Unknown
        }
    }
}

impl Nodes {
    /// Returns the match of an address that no node has, or `None` if the table of pods does not decide about it.
    pub(super) fn pod_match(&self, table: &Table, address: IpAddr) -> Option<AddressMatch> {
        let found = self.pods.by_address(address);
        if found != PodLookup::NotFollowed
            && let Cluster::Pending(reason) = &table.sources.cluster
        {
            return Some(AddressMatch::Undecided(reason.clone()));
        }
        match found {
            PodLookup::NotFollowed => None,
            PodLookup::Unavailable(reason) => Some(AddressMatch::Undecided(reason)),
            PodLookup::Unknown => Some(AddressMatch::NoPod),
            // An edge takes no address from a pod elsewhere, nor makes it unreachable.
            PodLookup::Several(all) => {
                let mut nodes = all.iter().map(|pod| table.node_of(pod));
                let is_elsewhere = nodes.any(|node| matches!(node, PodNode::Elsewhere));
                Some(if is_elsewhere {
                    AddressMatch::Unknown
                } else {
                    AddressMatch::NoPod
                })
            }
            PodLookup::Pod(pod) => Some(match table.node_of(&pod) {
                PodNode::Edge(node) => AddressMatch::Pod(node),
                PodNode::Elsewhere => AddressMatch::Unknown,
                PodNode::Unknown => AddressMatch::NoPod,
            }),
        }
    }

    /// Returns the match of an address that an edge has by its Node object alone, if a pod elsewhere has the address, or may have it.
    /// A pod at another edge takes no address from a node.
    pub(super) fn elsewhere_pod_match(
        &self,
        table: &Table,
        address: IpAddr,
    ) -> Option<AddressMatch> {
        let found = self.pod_match(table, address)?;
        matches!(found, AddressMatch::Unknown | AddressMatch::Undecided(_)).then_some(found)
    }

    /// Returns the pod with this address on an edge node, or, without a node, the pod that is not at the edge. A pod at the edge takes no
    /// address from a pod elsewhere.
    pub fn destination_pod(&self, address: IpAddr, node: Option<&NodeName>) -> DestinationPod {
        if !self.is_pod_address(address) {
            return DestinationPod::None;
        }
        let table = self.table.load();
        let is_destination = |pod: &Pod| match node {
            Some(node) => pod.node == *node,
            None => matches!(table.node_of(pod), PodNode::Elsewhere),
        };
        let mut pods = match self.pods.by_address(address) {
            PodLookup::NotFollowed => return DestinationPod::None,
            PodLookup::Unavailable(reason) => return DestinationPod::Undecided(reason),
            PodLookup::Unknown => Vec::new(),
            PodLookup::Pod(pod) => vec![pod],
            // An address of several pods leads to no edge.
            PodLookup::Several(_) if node.is_some() => Vec::new(),
            PodLookup::Several(all) => all,
        };
        pods.retain(|pod| is_destination(pod));
        match pods.as_slice() {
            [only] => DestinationPod::Pod(only.name.clone()),
            _ => DestinationPod::Unknown,
        }
    }

    /// Whether both addresses are those of one pod.
    pub fn is_same_pod(&self, one: IpAddr, other: IpAddr) -> bool {
        one.to_canonical() == other.to_canonical()
            || matches!(
                (self.pods.by_address(one), self.pods.by_address(other)),
                (PodLookup::Pod(one), PodLookup::Pod(other)) if Arc::ptr_eq(&one, &other)
            )
    }

    /// Returns the addresses by which pods of edge nodes are reached, except those in the networks of pods of nodes that are not at the
    /// edge: a stolen kubelet could report the address of an interface of such a node, which no Pod or Node object has. `None` if the
    /// pods, or the nodes of the cluster, are not known now.
    pub fn edge_pod_addresses(&self) -> Option<BTreeSet<IpAddr>> {
        if self.pending_reason().is_some() {
            return None;
        }
        let mut all = self.pods.addresses()?;
        let elsewhere = ElsewhereNetworks::new(&self.table.load());
        all.retain(|address| {
            matches!(self.by_address(*address), AddressMatch::Pod(_))
                && !elsewhere.contain(*address)
        });
        Some(all.into_iter().collect())
    }

    /// Whether Pod objects are followed, and the cluster's API has neither returned them nor refused to.
    pub fn awaits_pods(&self) -> bool {
        self.pods.are_pending()
    }

    /// Whether the cluster's Pod objects are followed.
    pub fn follows_pods(&self) -> bool {
        self.pods.are_followed()
    }

    /// Whether only the table of pods can say which node has this address, or that none has it.
    pub fn is_pod_address(&self, address: IpAddr) -> bool {
        self.pods.by_address(address) != PodLookup::NotFollowed
            && !self.is_elsewhere(address)
            && !matches!(
                self.by_address(address),
                AddressMatch::Node(_) | AddressMatch::Several(_)
            )
    }

    /// Whether the name is that of a pod, `POD.NAMESPACE.pod`, alone or in one of the zones, and not the name of a
    /// node. The pod need not exist. False if Pod objects are not followed.
    pub fn is_pod_name(&self, name: &str) -> bool {
        self.parse_pod_name(name).is_some()
    }

    /// Returns the pod with this name, alone or in one of the zones; `None` if the name is not that of a pod.
    pub fn pod_by_name(&self, name: &str) -> Option<PodMatch> {
        let key = self.parse_pod_name(name)?;
        if let Some(reason) = self.pending_reason() {
            return Some(PodMatch::Undecided(reason));
        }
        let pod = match self.pods.by_name(&key) {
            PodLookup::Pod(pod) => pod,
            PodLookup::Unavailable(reason) => return Some(PodMatch::Undecided(reason)),
            PodLookup::Unknown | PodLookup::NotFollowed | PodLookup::Several(_) => {
                return Some(PodMatch::Unknown);
            }
        };
        // An address that another pod or a node has as well is not the pod's alone.
        let mut own = pod.addresses.iter().copied();
        Some(match self.table.load().node_of(&pod) {
            PodNode::Edge(node) => own
                .find(|address| self.by_address(*address) == AddressMatch::Pod(node.clone()))
                .map_or(PodMatch::Unknown, |address| PodMatch::Pod(node, address)),
            PodNode::Elsewhere => PodMatch::Elsewhere(
                own.filter(|address| self.by_address(*address) == AddressMatch::Unknown)
                    .collect(),
            ),
            PodNode::Unknown => PodMatch::Unknown,
        })
    }

    /// Returns the namespace in the name of a pod, alone or in one of the zones. The pod need not exist.
    pub fn pod_namespace(&self, name: &str) -> Option<String> {
        let key = self.parse_pod_name(name)?;
        let (namespace, _) = key.split_once('/')?;
        Some(namespace.to_owned())
    }

    fn parse_pod_name(&self, name: &str) -> Option<String> {
        if !self.pods.are_followed() || self.by_name(name).is_some() {
            return None;
        }
        let name = name.strip_suffix('.').unwrap_or(name);
        let in_zone = |zone: &String| {
            let (name, end) = name.split_at_checked(name.len().checked_sub(zone.len())?)?;
            end.eq_ignore_ascii_case(zone)
                .then(|| pods::parse_host(name))?
        };
        let table = self.table.load();
        pods::parse_host(name).or_else(|| table.sources.zones.iter().find_map(in_zone))
    }
}
