//! Informer that fills `state::nodes` from Node objects: the nodes, their place and their addresses.
//!
//! 1. A paged list, then a watch with bookmarks; cached nodes are served on while the API is away.
//! 2. Of a Node object only labels, addresses and pod networks are stored, as far as they are trusted: a kubelet writes its own
//!    object. A common address, or one outside the networks of the configuration, is ignored. So are more addresses than a
//!    machine has. The policy ignores labels that a kubelet can write. If several nodes have one address, `state::nodes` decides.
//! 3. Changes are put into the table together, at most a tenth of a second late.

use crate::client::{WATCH_TIMEOUT, watch_error_message};
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

/// Nodes in one answer of the API.
const PAGE: u32 = 500;
/// Time to wait for further changes after the first one: a fleet that flaps is one change of the table.
const GATHER: Duration = Duration::from_millis(100);
/// Maximum number of trusted addresses of one node: a machine has one or two of each family.
const MOST_ADDRESSES: usize = 16;
/// Interval at which a lasting outage is logged again.
const SAY: Duration = Duration::from_mins(5);

/// Informer that keeps the table of nodes in step with the cluster.
pub struct NodeInformer {
    /// The cluster's API.
    pub client: Client,
    /// Configuration of the trusted facts.
    pub rules: Kubernetes,
    /// The table.
    pub nodes: NodesWriter,
    /// Metrics of the informer.
    pub metrics: KubernetesMetrics,
}

impl NodeInformer {
    /// Runs the informer. Never returns. Drops `hold` when the table is complete for the first time.
    pub async fn run(self, hold: ReadinessBlock) {
        let config = watcher::Config::default().page_size(PAGE);
        let config = config.timeout(WATCH_TIMEOUT);
        let api = Api::<Node>::all(self.client.clone());
        // Fields that are not needed are dropped before the next page arrives.
        let rules = &self.rules;
        let events = watcher(api, config)
            .default_backoff()
            .map_ok(|event| seen(&event, rules));
        let mut events = pin!(events);
        let mut known = NodeCache::default();
        let mut touch = ApiHealth::new(hold, self.nodes.clone(), self.metrics.clone());
        let mut write: Option<Instant> = None;
        loop {
            tokio::select! {
                event = events.next() => match event {
                    Some(Ok(seen)) => {
                        // The watch emits the start of a list before it sends the request.
                        if !matches!(seen, NodeEvent::Anew) {
                            touch.heard();
                        }
                        if known.take(seen) {
                            write.get_or_insert_with(|| Instant::now() + GATHER);
                        }
                    }
                    Some(Err(error)) => touch.lost(&error),
                    // A watcher never ends.
                    None => return,
                },
                Some(()) = OptionFuture::from(write.map(sleep_until)) => {
                    write = None;
                    self.nodes.cluster(known.members.clone());
                    touch.written(&known.members);
                }
            }
        }
    }
}

/// An event of a watch, reduced to the stored facts.
enum NodeEvent {
    /// A list begins.
    Anew,
    /// A node of the list that is in progress.
    Listed(NodeName, ClusterNode),
    /// The list is complete.
    Whole,
    /// A node came or changed.
    Changed(NodeName, ClusterNode),
    /// A node went.
    Gone(NodeName),
    /// A node whose name is invalid.
    Nameless,
}

fn seen(event: &Event<Node>, rules: &Kubernetes) -> NodeEvent {
    let node = match event {
        Event::Init => return NodeEvent::Anew,
        Event::InitDone => return NodeEvent::Whole,
        Event::InitApply(node) | Event::Apply(node) | Event::Delete(node) => node,
    };
    let Ok(name) = NodeName::parse(&node.name_any()) else {
        tracing::warn!(
            node = node.name_any(),
            "a Node object has a name that is not valid in Causeway"
        );
        return NodeEvent::Nameless;
    };
    match event {
        Event::Delete(_) => NodeEvent::Gone(name),
        Event::InitApply(_) => NodeEvent::Listed(name, member(node, rules)),
        _ => NodeEvent::Changed(name, member(node, rules)),
    }
}

/// Returns the trusted facts of a Node object.
fn member(node: &Node, rules: &Kubernetes) -> ClusterNode {
    let labels = node.labels();
    let has = |label: &Label| {
        let value = labels.get(&label.key);
        value.is_some_and(|value| label.value.as_ref().is_none_or(|wanted| wanted == value))
    };
    let status = node.status.as_ref();
    let addresses = status.and_then(|status| status.addresses.as_ref());
    let of = |kind: &'static str| {
        let all = addresses.into_iter().flatten();
        all.filter(move |address| address.type_ == kind)
    };
    // Internal addresses come first, regardless of the order in the object.
    let mut believed: Vec<IpAddr> = of("InternalIP")
        .chain(of("ExternalIP"))
        .filter_map(|address| address.address.parse::<IpAddr>().ok())
        .map(|address| address.to_canonical())
        .filter(|address| is_own(*address, &rules.address_networks))
        .collect();
    // Edges that dial a wrong address find no valid certificate there.
    let outside = |kind| {
        let all = of(kind).filter_map(|address| address.address.parse::<IpAddr>().ok());
        all.filter(|address| is_own(*address, &[]))
            .collect::<Vec<_>>()
    };
    let mut outward = outside("ExternalIP");
    if outward.is_empty() {
        outward = outside("InternalIP");
    }
    let mut unique = std::collections::HashSet::new();
    believed.retain(|address| unique.insert(*address));
    let created = node.metadata.creation_timestamp.as_ref();
    let pods = node.spec.as_ref().and_then(|spec| spec.pod_cidrs.as_ref());
    let pod_networks = pods
        .into_iter()
        .flatten()
        .filter_map(|text| text.parse::<IpNet>().ok())
        .filter(|net| rules.pod_networks.iter().any(|all| all.contains(net)))
        .collect();
    ClusterNode {
        edge: rules.edge_labels.iter().any(has),
        // A Node without a creation time was not created by a cluster and has no priority over others.
        created: created.map_or(u64::MAX, |time| {
            u64::try_from(time.0.as_second()).unwrap_or_default()
        }),
        addresses: believed,
        outward,
        pod_networks,
        pool: labels
            .get(&rules.pool_label)
            .filter(|pool| !pool.is_empty())
            .cloned(),
        pool_counts: rules.counts_label(&rules.pool_label),
        labels: labels
            .iter()
            .filter(|(key, _)| rules.counts_label(key))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect(),
    }
}

/// Whether an address can be one node's own, and is in a trusted network.
fn is_own(address: IpAddr, networks: &[IpNet]) -> bool {
    let shared = address.is_loopback() || address.is_unspecified() || address.is_multicast();
    let link_local = match address {
        IpAddr::V4(address) => address.is_link_local() || address.is_broadcast(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    let inside = networks.is_empty() || networks.iter().any(|net| net.contains(&address));
    !shared && !link_local && inside
}

/// Cached nodes of the cluster.
#[derive(Default)]
struct NodeCache {
    members: BTreeMap<NodeName, ClusterNode>,
    /// Nodes of a list that is not complete yet.
    listed: Option<BTreeMap<NodeName, ClusterNode>>,
}

impl NodeCache {
    /// Whether the table has to be written.
    fn take(&mut self, seen: NodeEvent) -> bool {
        match seen {
            NodeEvent::Anew => {
                self.listed = Some(BTreeMap::new());
                false
            }
            NodeEvent::Listed(name, mut member) => {
                self.bound(&name, &mut member);
                self.listed.get_or_insert_default().insert(name, member);
                false
            }
            NodeEvent::Whole => {
                self.members = self.listed.take().unwrap_or_default();
                // The first list says that it is empty, too.
                true
            }
            NodeEvent::Changed(name, mut member) => {
                self.bound(&name, &mut member);
                // Most changes are heartbeats.
                self.members.insert(name, member.clone()) != Some(member)
            }
            NodeEvent::Gone(name) => self.members.remove(&name).is_some(),
            NodeEvent::Nameless => false,
        }
    }

    /// Removes addresses beyond the number that a node can have.
    fn bound(&self, name: &NodeName, member: &mut ClusterNode) {
        member.outward.truncate(MOST_ADDRESSES);
        let all = member.addresses.len();
        member.addresses.truncate(MOST_ADDRESSES);
        let known = self.members.get(name);
        let is_new = known.is_none_or(|known| known.addresses != member.addresses);
        if all > MOST_ADDRESSES && is_new {
            tracing::warn!(
                node = %name,
                addresses = all,
                believed = MOST_ADDRESSES,
                "a Node object has too many addresses; the first ones are used and the others ignored"
            );
        }
    }
}

/// Connection state of the API, and its log.
struct ApiHealth {
    metrics: KubernetesMetrics,
    nodes: NodesWriter,
    hold: Option<ReadinessBlock>,
    lost: Option<Instant>,
    said: Option<Instant>,
}

impl ApiHealth {
    fn new(hold: ReadinessBlock, nodes: NodesWriter, metrics: KubernetesMetrics) -> Self {
        Self {
            metrics,
            nodes,
            hold: Some(hold),
            lost: None,
            said: None,
        }
    }

    fn heard(&mut self) {
        if let Some(since) = self.lost.take() {
            self.said = None;
            self.metrics.lost(None);
            tracing::info!(outage = ?since.elapsed(), "the cluster's API answers again");
        }
    }

    fn lost(&mut self, error: &watcher::Error) {
        let why = watch_error_message(error);
        let since = *self.lost.get_or_insert_with(|| {
            self.metrics.lost(Some(UnixTime::now().as_secs()));
            Instant::now()
        });
        if let Some(hold) = &self.hold {
            let reason = format!("the nodes of the cluster have not been loaded yet: {why}");
            self.nodes.pending(&reason);
            hold.says(reason);
        }
        if self.said.is_some_and(|said| said.elapsed() < SAY) {
            tracing::debug!(why, "the cluster's API still fails");
            return;
        }
        self.said = Some(Instant::now());
        let age = since.elapsed();
        if self.hold.is_some() {
            tracing::warn!(why, "the cluster's nodes cannot be listed; retrying");
        } else {
            tracing::warn!(
                why,
                ?age,
                "the cluster's nodes cannot be watched; the gateway continues with the last known nodes"
            );
        }
    }

    fn written(&mut self, members: &BTreeMap<NodeName, ClusterNode>) {
        let edge = members.values().filter(|member| member.edge).count();
        self.metrics.nodes(edge, members.len() - edge);
        if self.hold.take().is_some() {
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
