//! Informer that fills `state::nodes` from Node objects: the nodes, their location and their addresses.
//!
//! 1. A paged list, then a watch with bookmarks. Cached nodes stay in use while the API does not respond.
//! 2. Only labels, addresses and pod networks of a Node object are stored, as far as they are trusted: a kubelet writes its
//!    own object. Three kinds of addresses are ignored: common ones, those outside the networks of the configuration, and
//!    those beyond the number that a machine has. The policy ignores labels that a kubelet can write. If several nodes have
//!    one address, `state::nodes` decides.
//! 3. Changes are written to the table together, with a delay of at most a tenth of a second.

use crate::{
    client::{WATCH_TIMEOUT, watch_error_message},
    heartbeat::NODE_ANNOTATION,
};
use causeway_certs::NodeName;
use causeway_gateway::{
    config::{Kubernetes, Label},
    control::drain::ReadinessBlock,
    metrics::KubernetesMetrics,
    state::{ClusterNode, NodesWriter},
};
use futures_util::{StreamExt, TryStreamExt, future::OptionFuture};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, ResourceExt,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use rustls_pki_types::UnixTime;
use std::{collections::BTreeMap, net::IpAddr, pin::pin, time::Duration};
use tokio::time::{Instant, sleep_until};

/// Number of nodes in one response of the API.
const PAGE_SIZE: u32 = 500;
/// Time to wait for further changes after the first one. So the changes of many nodes at once are one change of the table.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// Maximum number of trusted addresses of one node: a machine has one or two of each family.
const MAX_ADDRESSES: usize = 16;
/// Interval at which a lasting outage is logged again.
const LOG_INTERVAL: Duration = Duration::from_mins(5);

/// Informer that synchronizes the table of nodes with the cluster.
pub(crate) struct NodeInformer {
    /// The cluster's API.
    pub client: Client,
    /// Configuration of the trusted facts.
    pub settings: Kubernetes,
    /// Table of nodes.
    pub nodes: NodesWriter,
    /// Metrics of the informer.
    pub metrics: KubernetesMetrics,
}

impl NodeInformer {
    /// Runs the informer. Never returns. Drops `hold` when the table is complete for the first time.
    pub(crate) async fn run(self, hold: ReadinessBlock) {
        let config = watcher::Config::default().page_size(PAGE_SIZE);
        let config = config.timeout(WATCH_TIMEOUT);
        let api = Api::<Node>::all(self.client.clone());
        // Fields that are not needed are dropped before the next page arrives.
        let settings = &self.settings;
        let events = watcher(api, config)
            .default_backoff()
            .map_ok(|event| reduce_event(&event, settings));
        let mut events = pin!(events);
        let mut cache = NodeCache::default();
        let mut health = ApiHealth::new(hold, self.nodes.clone(), self.metrics.clone());
        let mut write_at: Option<Instant> = None;
        loop {
            tokio::select! {
                event = events.next() => match event {
                    Some(Ok(seen)) => {
                        // The watch emits the start of a list before it sends the request.
                        if !matches!(seen, NodeEvent::ListStarted) {
                            health.record_success();
                        }
                        if cache.apply(seen) {
                            write_at.get_or_insert_with(|| Instant::now() + DEBOUNCE);
                        }
                    }
                    Some(Err(error)) => health.record_failure(&error),
                    // A watcher never ends.
                    None => return,
                },
                Some(()) = OptionFuture::from(write_at.map(sleep_until)) => {
                    write_at = None;
                    self.nodes.replace_cluster(cache.nodes.clone());
                    health.record_update(&cache.nodes);
                }
            }
        }
    }
}

/// An event of a watch, reduced to the stored attributes.
enum NodeEvent {
    /// A list begins.
    ListStarted,
    /// A node of the list that is in progress.
    Listed(NodeName, ClusterNode),
    /// The list is complete.
    ListCompleted,
    /// A node was added or changed.
    Changed(NodeName, ClusterNode),
    /// A node was removed.
    Deleted(NodeName),
    /// A node whose name is invalid.
    InvalidName,
}

fn reduce_event(event: &Event<Node>, settings: &Kubernetes) -> NodeEvent {
    let node = match event {
        Event::Init => return NodeEvent::ListStarted,
        Event::InitDone => return NodeEvent::ListCompleted,
        Event::InitApply(node) | Event::Apply(node) | Event::Delete(node) => node,
    };
    let Ok(name) = NodeName::parse(&node.name_any()) else {
        tracing::warn!(
            node = node.name_any(),
            "a Node object has a name that is not valid in Causeway"
        );
        return NodeEvent::InvalidName;
    };
    match event {
        Event::Delete(_) => NodeEvent::Deleted(name),
        Event::InitApply(_) => NodeEvent::Listed(name, cluster_node(node, settings)),
        _ => NodeEvent::Changed(name, cluster_node(node, settings)),
    }
}

/// Returns the trusted attributes of a Node object.
fn cluster_node(node: &Node, settings: &Kubernetes) -> ClusterNode {
    let labels = node.labels();
    let has_label = |label: &Label| {
        let value = labels.get(&label.key);
        value.is_some_and(|value| label.value.as_ref().is_none_or(|wanted| wanted == value))
    };
    let status = node.status.as_ref();
    let addresses = status.and_then(|status| status.addresses.as_ref());
    let of_type = |kind: &'static str| {
        let all = addresses.into_iter().flatten();
        all.filter(move |address| address.type_ == kind)
    };
    // Internal addresses come first, regardless of the order in the object.
    let mut trusted: Vec<IpAddr> = of_type("InternalIP")
        .chain(of_type("ExternalIP"))
        .filter_map(|address| address.address.parse::<IpAddr>().ok())
        .map(|address| address.to_canonical())
        .filter(|address| is_own(*address, &settings.address_networks))
        .collect();
    // Edges that dial a wrong address find no valid certificate there.
    let addresses_outside = |kind| {
        let all = of_type(kind).filter_map(|address| address.address.parse::<IpAddr>().ok());
        all.filter(|address| is_own(*address, &[]))
            .collect::<Vec<_>>()
    };
    let mut outward = addresses_outside("ExternalIP");
    if outward.is_empty() {
        outward = addresses_outside("InternalIP");
    }
    let mut unique = std::collections::HashSet::new();
    trusted.retain(|address| unique.insert(*address));
    let created = node.metadata.creation_timestamp.as_ref();
    let pod_cidrs = node.spec.as_ref().and_then(|spec| spec.pod_cidrs.as_ref());
    let pod_networks = pod_cidrs
        .into_iter()
        .flatten()
        .filter_map(|text| text.parse::<IpNet>().ok())
        .filter(|net| settings.pod_networks.iter().any(|all| all.contains(net)))
        .collect();
    ClusterNode {
        is_edge: settings.edge_labels.iter().any(has_label),
        // A Node without a creation time was not created by a cluster and has no priority over others.
        created_at: created.map_or(u64::MAX, |time| {
            u64::try_from(time.0.as_second()).unwrap_or_default()
        }),
        pod_addresses: (trusted.iter().copied())
            .filter(|address| is_for_pods(*address, settings))
            .collect(),
        addresses: trusted,
        external_addresses: outward,
        pod_networks,
        pool: labels
            .get(&settings.pool_label)
            .filter(|pool| !pool.is_empty())
            .cloned(),
        is_policy_pool: settings.trusts_label(&settings.pool_label),
        delegated: node.annotations().contains_key(NODE_ANNOTATION),
        labels: labels
            .iter()
            .filter(|(key, _)| settings.trusts_label(key))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect(),
    }
}

/// Whether an address is for pods only. Only networks that are listed for nodes as well have both.
fn is_for_pods(address: IpAddr, settings: &Kubernetes) -> bool {
    let within = |all: &[IpNet]| all.iter().any(|net| net.contains(&address));
    settings.pods.is_some() && within(&settings.pod_networks) && !within(&settings.address_networks)
}

/// Whether an address can belong to one node, and is in a trusted network.
fn is_own(address: IpAddr, networks: &[IpNet]) -> bool {
    let is_reserved = address.is_loopback() || address.is_unspecified() || address.is_multicast();
    let is_link_local = match address {
        IpAddr::V4(address) => address.is_link_local() || address.is_broadcast(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    let is_trusted = networks.is_empty() || networks.iter().any(|net| net.contains(&address));
    !is_reserved && !is_link_local && is_trusted
}

/// Cached nodes of the cluster.
#[derive(Default)]
struct NodeCache {
    nodes: BTreeMap<NodeName, ClusterNode>,
    /// Nodes of a list that is not complete yet.
    pending_list: Option<BTreeMap<NodeName, ClusterNode>>,
}

impl NodeCache {
    /// Applies an event. Returns whether the table must be written.
    fn apply(&mut self, event: NodeEvent) -> bool {
        match event {
            NodeEvent::ListStarted => {
                self.pending_list = Some(BTreeMap::new());
                false
            }
            NodeEvent::Listed(name, mut member) => {
                self.limit_addresses(&name, &mut member);
                self.pending_list
                    .get_or_insert_default()
                    .insert(name, member);
                false
            }
            NodeEvent::ListCompleted => {
                self.nodes = self.pending_list.take().unwrap_or_default();
                // The first list is written even if it is empty.
                true
            }
            NodeEvent::Changed(name, mut member) => {
                self.limit_addresses(&name, &mut member);
                // Most changes are heartbeats.
                self.nodes.insert(name, member.clone()) != Some(member)
            }
            NodeEvent::Deleted(name) => self.nodes.remove(&name).is_some(),
            NodeEvent::InvalidName => false,
        }
    }

    /// Removes addresses beyond the number that a node can have.
    fn limit_addresses(&self, name: &NodeName, member: &mut ClusterNode) {
        member.external_addresses.truncate(MAX_ADDRESSES);
        let count = member.addresses.len();
        member.addresses.truncate(MAX_ADDRESSES);
        let previous = self.nodes.get(name);
        let is_new = previous.is_none_or(|known| known.addresses != member.addresses);
        if count > MAX_ADDRESSES && is_new {
            tracing::warn!(
                node = %name,
                addresses = count,
                believed = MAX_ADDRESSES,
                "a Node object has too many addresses; the first ones are used and the others ignored"
            );
        }
    }
}

/// Connection state of the API, and its log.
struct ApiHealth {
    metrics: KubernetesMetrics,
    nodes: NodesWriter,
    readiness_block: Option<ReadinessBlock>,
    failing_since: Option<Instant>,
    last_logged: Option<Instant>,
}

impl ApiHealth {
    fn new(
        readiness_block: ReadinessBlock,
        nodes: NodesWriter,
        metrics: KubernetesMetrics,
    ) -> Self {
        Self {
            metrics,
            nodes,
            readiness_block: Some(readiness_block),
            failing_since: None,
            last_logged: None,
        }
    }

    fn record_success(&mut self) {
        if let Some(since) = self.failing_since.take() {
            self.last_logged = None;
            self.metrics.set_lost(None);
            tracing::info!(outage = ?since.elapsed(), "the cluster's API answers again");
        }
    }

    fn record_failure(&mut self, error: &watcher::Error) {
        let why = watch_error_message(error);
        let since = *self.failing_since.get_or_insert_with(|| {
            self.metrics.set_lost(Some(UnixTime::now().as_secs()));
            Instant::now()
        });
        if let Some(block) = &self.readiness_block {
            let reason = format!("the nodes of the cluster have not been loaded yet: {why}");
            self.nodes.set_pending(&reason);
            block.set_reason(reason);
        }
        if self
            .last_logged
            .is_some_and(|message| message.elapsed() < LOG_INTERVAL)
        {
            tracing::debug!(why, "the cluster's API still fails");
            return;
        }
        self.last_logged = Some(Instant::now());
        let age = since.elapsed();
        if self.readiness_block.is_some() {
            tracing::warn!(why, "the cluster's nodes cannot be listed; retrying");
        } else {
            tracing::warn!(
                why,
                ?age,
                "the cluster's nodes cannot be watched; the gateway continues with the last known nodes"
            );
        }
    }

    fn record_update(&mut self, members: &BTreeMap<NodeName, ClusterNode>) {
        let edge = members.values().filter(|member| member.is_edge).count();
        self.metrics.set_nodes(edge, members.len() - edge);
        if self.readiness_block.take().is_some() {
            tracing::info!(
                nodes = members.len(),
                edge,
                "the cluster's nodes have been loaded"
            );
        } else {
            tracing::debug!(nodes = members.len(), edge, "the cluster's nodes changed");
        }
    }
}

#[cfg(test)]
mod tests;
