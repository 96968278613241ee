//! Leader assignment: selects the edge of each pool that reads at the gateway, and announces the pool's members to its edges.
//!
//! Every second, and when an edge connects or a node changes:
//! 1. edges with an API cache are grouped by their confirmed pools;
//! 2. each pool gets one of its candidates as leader: a leader remains while it is connected and answers;
//! 3. each tunnel receives each change once. A change of the leader is announced at once. The leader receives each change of
//!    members at once as well, since members connect to it next. Other members receive changes of members in batches, because the
//!    edges of a site reconnect one by one after an outage.
//!
//! A node that was connected and has lost its uplink remains a member: it reads from another member. It does not lead a pool.
//!
//! The leader is advice: an edge whose leader is silent reads from the gateway itself.

use super::{
    ApiCacheServer,
    leader_policy::{self, Candidate, ConnectedReader},
};
use crate::state::{
    NodePoolEndpoints, Nodes, NodesWriter, Registry, TunnelId, TunnelInfo, YurtHubEndpoints,
};
use causeway_certs::NodeName;
use causeway_config::host_port;
use causeway_tunnel::{
    Tunnel,
    control_stream::{GatewayMessage, NodePoolMember, NodePoolMembers},
    wire::MAX_MESSAGE,
};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    convert::Infallible,
    sync::Arc,
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

/// Bytes that a message needs beside names and addresses, per member and for the whole message.
const FIELD_OVERHEAD: usize = 32;

/// Interval of checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Pause after each check, so that one check covers a fleet that reconnects.
const CHECK_PAUSE: Duration = Duration::from_millis(100);
/// Minimum interval between announcements of members that joined or left.
const MEMBERS_INTERVAL: Duration = Duration::from_secs(3);
/// Maximum number of announced addresses of one edge: one of each family on each of two networks.
const MAX_ADDRESSES: usize = 4;
/// Maximum length of an address: a DNS name and a port.
const MAX_ADDRESS_LEN: usize = 260;

/// Last announcement, and its time.
#[derive(Clone)]
struct LastAnnouncement {
    members: Arc<NodePoolMembers>,
    at: Instant,
}

/// Assigns leaders and announces them to edges.
pub(crate) struct LeaderAssigner {
    api_cache: ApiCacheServer,
    registry: Registry,
    nodes: NodesWriter,
    /// Time since which each edge process is connected.
    connected_since: HashMap<NodeName, (String, Instant)>,
    /// Last announcement by pool.
    last_by_pool: HashMap<Option<String>, LastAnnouncement>,
    /// Last announcement to each tunnel.
    last_by_tunnel: HashMap<TunnelId, LastAnnouncement>,
    /// Addresses at which each node that has been connected serves other members.
    known_addresses: BTreeMap<NodeName, Vec<String>>,
}

impl LeaderAssigner {
    pub(crate) fn new(reading: &ApiCacheServer, registry: &Registry, nodes: &NodesWriter) -> Self {
        Self {
            api_cache: reading.clone(),
            registry: registry.clone(),
            nodes: nodes.clone(),
            connected_since: HashMap::new(),
            last_by_pool: HashMap::new(),
            last_by_tunnel: HashMap::new(),
            known_addresses: BTreeMap::new(),
        }
    }

    /// Runs until `stop`. A draining gateway assigns no leaders, because its edges move to other gateways.
    pub(crate) async fn run(self, stop: CancellationToken) {
        stop.run_until_cancelled(self.run_checks()).await;
    }

    async fn run_checks(mut self) -> Infallible {
        let mut nodes = self.nodes.subscribe();
        let leaders_changed = self.api_cache.leaders_changed.clone();
        loop {
            // Each event only causes an earlier check.
            let early_check = async {
                tokio::select! {
                    changed = nodes.changed() => changed.is_ok(),
                    () = leaders_changed.notified() => false,
                }
            };
            if timeout(CHECK_INTERVAL, early_check).await.unwrap_or(false) {
                self.api_cache.close_rejected(|_, _| None);
            }
            self.check(Instant::now());
            sleep(CHECK_PAUSE).await;
        }
    }

    fn check(&mut self, now: Instant) {
        let readers = collect_readers(&self.registry, &self.nodes.reader());
        self.update_connected_since(&readers, now);
        let disconnected = self.disconnected_members(&readers);
        let mut pools: BTreeMap<Option<&str>, Vec<&ConnectedReader>> = BTreeMap::new();
        for reader in &readers {
            pools
                .entry(reader.pool.as_deref())
                .or_default()
                .push(reader);
        }
        let previous_leaders = self.api_cache.leaders.get();
        let mut led = BTreeMap::new();
        let mut announcements = HashMap::new();
        let mut yurthub_endpoints = YurtHubEndpoints::new();
        for (pool, pool_readers) in pools {
            let leader = pool
                .and_then(|pool| self.elect_leader(previous_leaders.get(pool), &pool_readers, now));
            if let (Some(pool), Some(leader)) = (pool, leader) {
                led.insert(pool.to_owned(), leader.clone());
            }
            let disconnected_members = disconnected
                .get(&pool.map(str::to_owned))
                .map_or(&[][..], Vec::as_slice);
            if let Some(pool) = pool
                && let Some(pool_endpoints) = self.pool_endpoints(pool, leader, &pool_readers)
            {
                yurthub_endpoints.insert(pool.to_owned(), pool_endpoints);
            }
            let pool = pool.map(str::to_owned);
            let next = LastAnnouncement {
                members: Arc::new(pool_members(
                    pool.clone(),
                    leader,
                    (&pool_readers, disconnected_members),
                )),
                at: now,
            };
            let announcement = self.select_announcement(&next);
            for reader in pool_readers {
                let is_leader = Some(&reader.node) == leader;
                self.announce(reader, if is_leader { &next } else { &announcement }, &next);
            }
            announcements.insert(pool, announcement);
        }
        self.last_by_pool = announcements;
        self.api_cache
            .yurthub_endpoints
            .send_if_modified(|current| {
                let has_changed = *current != yurthub_endpoints;
                *current = yurthub_endpoints;
                has_changed
            });
        self.api_cache.metrics.set_leaders(led.len());
        if led != previous_leaders {
            tracing::debug!(?led, "pool leaders changed");
            self.api_cache.leaders.replace(led);
        }
    }

    /// Updates the time at which each process connected, and removes nodes and tunnels that are no longer connected.
    fn update_connected_since(&mut self, readers: &[ConnectedReader], now: Instant) {
        let mut connected_since = HashMap::with_capacity(readers.len());
        for reader in readers {
            let previous = self.connected_since.remove(&reader.node);
            let same_instance = previous.filter(|(instance, _)| *instance == reader.instance);
            let new_entry = || (reader.instance.clone(), now);
            connected_since.insert(reader.node.clone(), same_instance.unwrap_or_else(new_entry));
        }
        self.connected_since = connected_since;
        let ids = readers.iter().flat_map(|here| &here.tunnels);
        let ids: HashSet<TunnelId> = ids.map(|edge| edge.id).collect();
        self.last_by_tunnel.retain(|id, _| ids.contains(id));
    }

    fn elect_leader<'a>(
        &self,
        current: Option<&NodeName>,
        pool_readers: &[&'a ConnectedReader],
        now: Instant,
    ) -> Option<&'a NodeName> {
        // The current leader stays, suspect or not, until another candidate has answered.
        let is_current_leader =
            |here: &ConnectedReader| Some(&here.node) == current && here.serves_members();
        let eligible = pool_readers
            .iter()
            .filter(|here| here.can_lead() || is_current_leader(here));
        let candidates = eligible.map(|here| {
            let since = self.connected_since.get(&here.node);
            Candidate::from_reader(
                here,
                since.map_or(Duration::ZERO, |(_, since)| now - *since),
            )
        });
        let candidates: Vec<_> = candidates.collect();
        let to_probe = leader_policy::candidates_to_probe(current, &candidates);
        let probed_readers = pool_readers
            .iter()
            .filter(|here| to_probe.contains(&&here.node));
        probed_readers
            .flat_map(|here| here.active_tunnels())
            .for_each(Tunnel::request_probe);
        leader_policy::elect(current, &candidates)
    }

    /// Returns the endpoints for `YurtHub`s of this pool: the leader's first, then those of other nodes that serve `YurtHub`s.
    fn pool_endpoints(
        &self,
        pool: &str,
        leader: Option<&NodeName>,
        pool_readers: &[&ConnectedReader],
    ) -> Option<NodePoolEndpoints> {
        let granted = self.api_cache.readable_resources(pool);
        let mut endpoints = NodePoolEndpoints::default();
        let is_leader = |here: &&&ConnectedReader| Some(&here.node) == leader;
        let others = pool_readers.iter().filter(|here| !is_leader(here));
        for reader in pool_readers.iter().filter(is_leader).chain(others) {
            let Some(yurthub) = reader.yurthub.as_ref().filter(|_| reader.is_open()) else {
                continue;
            };
            let declared = yurthub
                .resources
                .iter()
                .filter_map(|text| text.parse().ok());
            let readable = declared.filter(|resource| granted.contains(resource));
            endpoints.add(&reader.node, yurthub.at, readable.collect());
        }
        (!endpoints.addresses.is_empty()).then_some(endpoints)
    }

    /// Returns the announcement that a pool gets from now on: this one, or the last one if that suffices for a while.
    fn select_announcement(&mut self, next: &LastAnnouncement) -> LastAnnouncement {
        let Some(previous) = self.last_by_pool.remove(&next.members.pool) else {
            return next.clone();
        };
        let same_leader = previous.members.leader == next.members.leader;
        let is_early = next.at.saturating_duration_since(previous.at) < MEMBERS_INTERVAL;
        if previous.members == next.members || (same_leader && is_early) {
            return previous;
        }
        next.clone()
    }

    /// Returns, by pool, the nodes that were connected earlier and are not now, and that are neither removed nor revoked. A node
    /// with delegated heartbeats counts too: it may have been connected to this gateway before its restart, and members must
    /// admit it.
    fn disconnected_members(
        &mut self,
        readers: &[ConnectedReader],
    ) -> BTreeMap<Option<String>, Vec<NodePoolMember>> {
        let nodes = self.nodes.reader();
        self.known_addresses
            .retain(|node, _| nodes.get(node).is_some() && nodes.revocation_reason(node).is_none());
        for reader in readers {
            self.known_addresses
                .insert(reader.node.clone(), reader.addresses.clone());
        }
        let connected: HashSet<_> = readers.iter().map(|here| &here.node).collect();
        let mut disconnected: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (node, at) in self
            .known_addresses
            .iter()
            .filter(|(node, at)| !connected.contains(node) && !at.is_empty())
        {
            let pool = nodes.with(node, |known| known.pool.clone());
            let member = NodePoolMember {
                node: node.to_string(),
                at: at.clone(),
            };
            disconnected.entry(pool).or_default().push(member);
        }
        for node in nodes.delegated() {
            let addresses = self.known_addresses.get(&node);
            let is_listed = addresses.is_some_and(|at| !at.is_empty());
            let is_revoked = nodes.revocation_reason(&node).is_some();
            let Some(data) = nodes.get(&node) else {
                continue;
            };
            if is_listed || is_revoked || connected.contains(&node) {
                continue;
            }
            let member = NodePoolMember {
                node: node.to_string(),
                at: Vec::new(),
            };
            disconnected.entry(data.pool).or_default().push(member);
        }
        disconnected
    }

    /// Sends the announcement to each of the node's tunnels, unless the tunnel received this or a later one. A new tunnel
    /// receives `current`, because its uplink may fail soon.
    fn announce(
        &mut self,
        reader: &ConnectedReader,
        announcement: &LastAnnouncement,
        current: &LastAnnouncement,
    ) {
        for edge in &reader.tunnels {
            let last_sent = self.last_by_tunnel.get(&edge.id);
            let is_up_to_date = |last: &LastAnnouncement| {
                last.members == announcement.members || last.at > announcement.at
            };
            if last_sent.is_some_and(is_up_to_date) {
                continue;
            }
            let saying = if last_sent.is_some() {
                announcement
            } else {
                current
            };
            let message = GatewayMessage::Pool(with_own_member(&saying.members, reader));
            // An edge whose send buffer is full receives the message at the next check.
            if edge.tunnel.control.try_send(Box::new(message)).is_ok() {
                self.last_by_tunnel.insert(edge.id, saying.clone());
            }
        }
    }
}

/// Returns all nodes with an API cache, in the order of their names.
fn collect_readers(registry: &Registry, nodes: &Nodes) -> Vec<ConnectedReader> {
    let mut all: BTreeMap<NodeName, Vec<TunnelInfo>> = BTreeMap::new();
    for (node, edge) in registry.all() {
        if !edge.is_leaving() && edge.tunnel.hello.site.is_some() {
            all.entry(node).or_default().push(edge);
        }
    }
    let to_reader = |(node, tunnels): (NodeName, Vec<TunnelInfo>)| {
        let hello = &tunnels.last()?.tunnel.hello;
        let node_data = nodes.get(&node)?;
        let site_addresses = hello.site.iter().flatten();
        // Unverified addresses of an edge are sent to the other edges, so they are checked first.
        let site = site_addresses.filter(|at| at.len() <= MAX_ADDRESS_LEN && host_port(at).is_ok());
        let site = site.cloned();
        Some(ConnectedReader {
            addresses: site.take(MAX_ADDRESSES).collect(),
            yurthub: hello.hubs.clone(),
            instance: hello.instance.clone(),
            pool: node_data.pool,
            tunnels,
            node,
        })
    };
    all.into_iter().filter_map(to_reader).collect()
}

/// Returns the announcement to a pool. The leader comes first, so that it always fits. The other members follow by name, and then
/// members that are not connected.
pub(super) fn pool_members(
    pool: Option<String>,
    leader: Option<&NodeName>,
    (readers, disconnected): (&[&ConnectedReader], &[NodePoolMember]),
) -> NodePoolMembers {
    if pool.is_none() {
        return NodePoolMembers::default();
    }
    let is_leader = |here: &&&ConnectedReader| Some(&here.node) == leader;
    let serving_readers = || readers.iter().filter(|here| here.serves_members());
    let others = serving_readers().filter(|here| !is_leader(here));
    let ordered = serving_readers().filter(is_leader).chain(others);
    let mut remaining = members_budget();
    let ordered = ordered
        .map(|here| pool_member(here))
        .chain(disconnected.iter().cloned());
    let fitting_members = ordered.take_while(|member| {
        let size = max_member_size(member);
        let fits = size <= remaining;
        remaining = remaining.saturating_sub(size);
        fits
    });
    NodePoolMembers {
        members: fitting_members.take(NodePoolMembers::MAX_MEMBERS).collect(),
        leader: leader.map(ToString::to_string),
        pool,
    }
}

/// Returns the announcement, extended by the receiving edge itself if that edge is a member.
pub(super) fn with_own_member(
    members: &NodePoolMembers,
    reader: &ConnectedReader,
) -> NodePoolMembers {
    let mut announcement = members.clone();
    let is_listed = announcement
        .members
        .iter()
        .any(|one| one.node == reader.node.as_str());
    if members.pool.is_none() || is_listed || !reader.serves_members() {
        return announcement;
    }
    let member = pool_member(reader);
    let mut remaining = members_budget();
    for one in &announcement.members {
        remaining = remaining.saturating_sub(max_member_size(one));
    }
    while announcement.members.len() >= NodePoolMembers::MAX_MEMBERS
        || remaining < max_member_size(&member)
    {
        match announcement.members.pop() {
            Some(last) => remaining += max_member_size(&last),
            None => return announcement,
        }
    }
    announcement.members.push(member);
    announcement
}

fn pool_member(here: &ConnectedReader) -> NodePoolMember {
    NodePoolMember {
        node: here.node.to_string(),
        at: here.addresses.clone(),
    }
}

/// Returns the maximum number of bytes that a member needs in a message.
fn max_member_size(member: &NodePoolMember) -> usize {
    let at = member.at.iter().map(|at| at.len() + FIELD_OVERHEAD);
    member.node.len() + FIELD_OVERHEAD + at.sum::<usize>()
}

/// Returns the number of bytes for members in a message. The remaining bytes are for the names of the pool and the leader.
fn members_budget() -> usize {
    MAX_MESSAGE - MAX_MESSAGE / 8
}
