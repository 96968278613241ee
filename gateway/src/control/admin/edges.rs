//! The edges in the admin API: one row a node, and its tunnels on request.
//!
//! A node is listed if it is enrolled or connected. Properties that an edge reports itself (version, labels, ports, addresses)
//! are unverified; the pool is the confirmed one. Scripts may rely on the field names.

use crate::state::{
    EgressUsage, Nodes, Registry, TunnelInfo,
    directory::{HeldState, Peer},
};
use causeway_certs::NodeName;
use causeway_tunnel::Tunnel;
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// State of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum NodeState {
    /// A tunnel accepts streams.
    Connected,
    /// Its tunnels do not answer.
    Suspect,
    /// The edge drains.
    Draining,
    /// The node has no tunnel, neither at this gateway nor at another one.
    Away,
    /// The node is revoked.
    Revoked,
}

/// One node.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(super) struct EdgeSummary {
    /// Name of the node.
    node: NodeName,
    /// State of the node.
    state: NodeState,
    /// Start of the current state, connected or away (RFC 3339); `null` if this process never saw the node.
    since: Option<String>,
    /// Time at which the gateway last saw the node (RFC 3339).
    last_seen: Option<String>,
    /// Round-trip time of the nearest tunnel, in milliseconds.
    rtt_ms: Option<f64>,
    /// Open streams.
    streams: usize,
    /// Bytes from clients to the node, over the tunnels that are open.
    bytes_up: u64,
    /// Bytes from the node to clients, over the tunnels that are open.
    bytes_down: u64,
    /// Version of the edge.
    version: Option<String>,
    /// Address from which the edge connected.
    address: Option<SocketAddr>,
    /// Number of tunnels at this gateway.
    tunnels: usize,
    /// Addresses of the other gateways that have tunnels of the node.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    gateways: Vec<String>,
    /// Random identifier of the edge process.
    instance: Option<String>,
    /// Confirmed node pool.
    pool: Option<String>,
    /// Confirmed addresses, by which clients may name the node.
    addresses: Vec<IpAddr>,
    /// Other nodes that share a confirmed address of this node, by address: none of these nodes is reached by it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    address_conflicts: BTreeMap<IpAddr, Vec<NodeName>>,
    /// Ports that the edge serves, as the edge reports them.
    ports: Vec<u16>,
    /// Ports whose health checks fail, as the edge reports them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unhealthy_ports: Vec<u16>,
    /// Labels that the edge reports.
    labels: BTreeMap<String, String>,
    /// Labels confirmed at joining, which the policy uses.
    confirmed_labels: BTreeMap<String, String>,
    /// Reason of the revocation.
    revoked: Option<String>,
    /// Role in reading the cluster's resources, if the edge reads them.
    #[serde(skip_serializing_if = "Option::is_none")]
    reading: Option<CacheRole>,
    /// Connections that programs on the node have opened through this gateway; absent while its edge is not connected for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    egress_connections: Option<usize>,
    /// Whether the node's Lease is renewed by delegated heartbeats.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    heartbeat_delegated: bool,
}

/// Role of an edge in reading the cluster's resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum CacheRole {
    /// Reads at the gateway, for its pool.
    Leader,
    /// Reads at the leader of its pool.
    Follower,
    /// Reads at the gateway, for itself.
    Alone,
}

/// Leader of each pool; `None` if the API cache is disabled.
pub(super) type Leaders = Option<BTreeMap<String, NodeName>>;

/// One node with its tunnels.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(super) struct EdgeDetail {
    #[serde(flatten)]
    row: EdgeSummary,
    /// Addresses of the node as its edge sees them; the gateway does not route by these.
    claimed_addresses: Vec<IpAddr>,
    /// The tunnels.
    details: Vec<TunnelSummary>,
}

/// One tunnel.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
struct TunnelSummary {
    /// Number of the tunnel at this gateway.
    id: u64,
    /// Index of the tunnel among those of the edge.
    slot: u32,
    /// State of the tunnel.
    state: NodeState,
    /// Start of the tunnel (RFC 3339).
    since: String,
    /// Round-trip time, in milliseconds.
    rtt_ms: f64,
    /// Open streams.
    streams: usize,
    /// Streams opened so far.
    streams_opened: u64,
    /// Bytes from clients to the node.
    bytes_up: u64,
    /// Bytes from the node to clients.
    bytes_down: u64,
    /// Address from which the edge connected.
    address: SocketAddr,
    /// Serial number of the certificate that the tunnel was opened with.
    certificate: String,
    /// Expiry of that certificate (RFC 3339).
    certificate_ends: String,
}

/// Time and address at which a node's last tunnel was seen.
type LastSeen = Option<(SystemTime, SocketAddr)>;
/// Another gateway that holds a node.
type Holder = (Arc<Peer>, HeldState);

/// Returns all nodes in the order of their names.
pub(super) fn list_edges(
    registry: &Registry,
    (nodes, egress): (&Nodes, &EgressUsage),
    leaders: &Leaders,
) -> Vec<EdgeSummary> {
    let mut tunnels: BTreeMap<NodeName, Vec<TunnelInfo>> = BTreeMap::new();
    for name in nodes.names() {
        tunnels.insert(name, Vec::new());
    }
    for (name, edge) in registry.all() {
        tunnels.entry(name).or_default().push(edge);
    }
    for peer in registry.directory().peers().iter() {
        for name in peer.node_names() {
            tunnels.entry(name).or_default();
        }
    }
    let mut rows = Vec::with_capacity(tunnels.len());
    for (node, edges) in tunnels {
        let last = if edges.is_empty() {
            registry.node_tunnels(&node).1
        } else {
            None
        };
        let holders = registry.directory().holders(&node);
        rows.push(edge_summary(
            node,
            (&edges, last, &holders),
            (nodes, egress),
            leaders,
        ));
    }
    rows
}

/// Returns one node, if it is known.
pub(super) fn find_edge(
    registry: &Registry,
    (nodes, egress): (&Nodes, &EgressUsage),
    (node, led): (&NodeName, &Leaders),
) -> Option<EdgeDetail> {
    let (edges, last) = registry.node_tunnels(node);
    let holders = registry.directory().holders(node);
    if edges.is_empty() && holders.is_empty() && nodes.get(node).is_none() {
        return None;
    }
    let claimed = edges.last().map(|edge| edge.tunnel.hello.addresses.clone());
    Some(EdgeDetail {
        claimed_addresses: claimed.unwrap_or_default(),
        details: edges.iter().map(tunnel_summary).collect(),
        row: edge_summary(node.clone(), (&edges, last, &holders), (nodes, egress), led),
    })
}

/// Returns the other nodes that share addresses with this node.
fn conflicts(
    node: &NodeName,
    addresses: &[IpAddr],
    nodes: &Nodes,
) -> BTreeMap<IpAddr, Vec<NodeName>> {
    let conflicting_nodes = |address: &IpAddr| {
        let conflict = nodes.address_conflict(*address)?;
        let all = conflict.nodes.into_iter();
        Some((*address, all.filter(|other| other != node).collect()))
    };
    addresses.iter().filter_map(conflicting_nodes).collect()
}

fn edge_summary(
    node: NodeName,
    (edges, last, holders): (&[TunnelInfo], LastSeen, &[Holder]),
    (nodes, egress): (&Nodes, &EgressUsage),
    led: &Leaders,
) -> EdgeSummary {
    let node_data = nodes.get(&node).unwrap_or_default();
    let newest = edges.last().map(|edge| &edge.tunnel);
    let hello = newest.map(|newest| newest.hello.as_ref());
    let tunnels = || edges.iter().map(|edge| &edge.tunnel.tunnel);
    let last_seen_at = last.map(|(seen, _)| seen);
    let last_seen = newest.map_or(last_seen_at, |_| Some(SystemTime::now()));
    let has_api_cache = hello.is_some_and(|welcome| welcome.site.is_some());
    let leaders = led.as_ref().filter(|_| has_api_cache);
    EdgeSummary {
        egress_connections: egress.open_connections(&node),
        heartbeat_delegated: nodes.is_delegated(&node),
        reading: leaders.map(|led| cache_role(&node, led, node_data.pool.as_deref())),
        state: if node_data.revoked.is_some() {
            NodeState::Revoked
        } else {
            node_state(edges).or_at_peers(holders)
        },
        gateways: holders
            .iter()
            .map(|(peer, _)| peer.address.to_string())
            .collect(),
        since: edges
            .iter()
            .map(|edge| edge.since)
            .min()
            .or(last_seen_at)
            .map(rfc3339),
        last_seen: last_seen.map(rfc3339),
        rtt_ms: tunnels().map(Tunnel::round_trip).min().map(millis),
        streams: edges.iter().map(TunnelInfo::streams).sum(),
        bytes_up: tunnels().map(|tunnel| tunnel.load().bytes_sent()).sum(),
        bytes_down: tunnels().map(|tunnel| tunnel.load().bytes_received()).sum(),
        version: hello.map(|welcome| welcome.version.clone()),
        address: newest
            .map(|newest| newest.remote_address)
            .or(last.map(|(_, from)| from)),
        tunnels: edges.len(),
        instance: hello.map(|welcome| welcome.instance.clone()),
        pool: node_data.pool,
        confirmed_labels: node_data.labels,
        revoked: node_data.revoked,
        address_conflicts: conflicts(&node, &node_data.addresses, nodes),
        addresses: node_data.addresses,
        ports: hello
            .map(|welcome| welcome.ports.clone())
            .unwrap_or_default(),
        unhealthy_ports: unhealthy_ports(&node, edges, holders),
        labels: hello
            .map(|welcome| welcome.labels.clone())
            .unwrap_or_default(),
        node,
    }
}

impl NodeState {
    /// Returns the state of a node, with regard to the other gateways that hold it.
    fn or_at_peers(self, holders: &[Holder]) -> Self {
        let is_connected = holders
            .iter()
            .any(|(peer, state)| *state == HeldState::Connected && !peer.is_suspect());
        match self {
            Self::Connected => self,
            _ if is_connected => Self::Connected,
            Self::Away if !holders.is_empty() => Self::Draining,
            _ => self,
        }
    }
}

/// Returns the ports whose health checks fail, as the edge reports them to this gateway or to the other ones that hold the node.
fn unhealthy_ports(node: &NodeName, edges: &[TunnelInfo], holders: &[Holder]) -> Vec<u16> {
    if let Some(newest) = edges.last() {
        let reported = newest.tunnel.unhealthy_ports.load_full();
        return reported.map(|ports| Vec::clone(&ports)).unwrap_or_default();
    }
    let reported = holders.iter().map(|(peer, _)| peer.unhealthy_ports(node));
    reported.max_by_key(Vec::len).unwrap_or_default()
}

fn cache_role(
    node: &NodeName,
    leaders: &BTreeMap<String, NodeName>,
    pool: Option<&str>,
) -> CacheRole {
    match pool.and_then(|pool| leaders.get(pool)) {
        Some(leader) if leader == node => CacheRole::Leader,
        Some(_) => CacheRole::Follower,
        None => CacheRole::Alone,
    }
}

fn tunnel_summary(edge: &TunnelInfo) -> TunnelSummary {
    let tunnel = &edge.tunnel.tunnel;
    TunnelSummary {
        id: edge.id.0,
        slot: edge.tunnel.hello.slot,
        state: node_state(std::slice::from_ref(edge)),
        since: rfc3339(edge.since),
        rtt_ms: millis(tunnel.round_trip()),
        streams: edge.streams(),
        // The first stream of a tunnel is the control stream.
        streams_opened: tunnel.load().streams_opened().saturating_sub(1),
        bytes_up: tunnel.load().bytes_sent(),
        bytes_down: tunnel.load().bytes_received(),
        address: edge.tunnel.remote_address,
        certificate: edge.tunnel.certificate.serial.clone(),
        certificate_ends: rfc3339(
            UNIX_EPOCH + Duration::from_secs(edge.tunnel.certificate.not_after),
        ),
    }
}

/// Returns the state of a node, which is that of its best tunnel.
fn node_state(edges: &[TunnelInfo]) -> NodeState {
    let is_open = |edge: &TunnelInfo| edge.tunnel.tunnel.is_open();
    if edges.is_empty() {
        NodeState::Away
    } else if edges.iter().any(|edge| is_open(edge) && !edge.is_leaving()) {
        NodeState::Connected
    } else if edges
        .iter()
        .any(|edge| is_open(edge) || edge.tunnel.tunnel.is_draining())
    {
        NodeState::Draining
    } else {
        NodeState::Suspect
    }
}

fn rfc3339(when: SystemTime) -> String {
    humantime::format_rfc3339_millis(when).to_string()
}

fn millis(time: Duration) -> f64 {
    // The clock has a resolution of one microsecond.
    (time.as_secs_f64() * 1e6).round() / 1e3
}
