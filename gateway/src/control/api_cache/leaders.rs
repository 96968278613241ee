//! Leader assignment: selects the edge of each pool that reads at a gateway, and announces the pool's members to its edges.
//!
//! Every second, and when an edge connects or a node changes:
//! 1. edges with an API cache are grouped by their confirmed pools;
//! 2. each pool gets one of its candidates as leader: a leader remains while it is connected and answers (`leader_policy`).
//!    Gateways that are connected to each other name the same leader (`leader_naming`);
//! 3. each peer receives the members and candidates that are connected here, and the leader, when they change;
//! 4. each tunnel receives each change once. A change of the leader is announced at once. The leader receives each change of
//!    members at once as well, since members connect to it next. Other members receive changes of members in batches, because the
//!    edges of a site reconnect one by one after an outage.
//!
//! A change that a peer reports causes a check of its pool alone.
//!
//! A node that was connected and has lost its uplink remains a member: it reads from another member. It does not lead a pool.
//!
//! The leader is advice: an edge whose leader is silent reads from the gateway itself.

use super::{
    ApiCacheServer,
    leader_naming::{LeaderNaming, NamingInput},
    leader_policy::{self, Candidate, ConnectedReader},
};
use crate::state::{
    NodePoolEndpoints, Nodes, NodesWriter, Registry, TunnelId, TunnelInfo, YurtHubEndpoints,
    pool_reports::{
        NamedLeader, PeerPool, PoolReport, PoolReports, ReportedMember, announceable_addresses,
    },
};
use causeway_certs::NodeName;
use causeway_tunnel::{
    Tunnel,
    control_stream::{GatewayMessage, NodePoolMember, NodePoolMembers},
    wire::MAX_MESSAGE,
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    convert::Infallible,
    sync::Arc,
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;

/// Bytes that a message needs beside names and addresses, per member and for the whole message.
const FIELD_OVERHEAD: usize = 32;

/// Interval of checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Pause after each check, so that one check covers a fleet that reconnects.
const CHECK_PAUSE: Duration = Duration::from_millis(100);
/// Minimum interval between announcements of members that joined or left.
const MEMBERS_INTERVAL: Duration = Duration::from_secs(3);

/// Last announcement, and its time.
#[derive(Clone)]
struct LastAnnouncement {
    members: Arc<NodePoolMembers>,
    at: Instant,
}

/// Reason for a check before its time.
enum EarlyCheck {
    /// Nodes have changed.
    Nodes,
    /// An edge has connected.
    Edges,
    /// Peers have reported changes.
    Peers,
}

/// Results of a check, for other components.
#[derive(Default)]
struct CheckResults {
    leaders: BTreeMap<String, NodeName>,
    yurthub_endpoints: YurtHubEndpoints,
    reports: PoolReports,
}

/// Connected nodes by pool.
type ReadersByPool<'a> = BTreeMap<Option<&'a str>, Vec<&'a ConnectedReader>>;
/// Addresses of the members of a pool.
type MemberAddresses<'a> = BTreeMap<&'a NodeName, &'a [String]>;

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
    /// Addresses at which each node that has been connected serves other members, here or at a peer.
    known_addresses: BTreeMap<NodeName, Vec<String>>,
    /// Members that were connected earlier, and are not connected here.
    disconnected: BTreeMap<Option<String>, Vec<NodePoolMember>>,
    /// Nodes of each pool that were connected here at the last check of all pools.
    nodes_by_pool: BTreeMap<String, Vec<NodeName>>,
    /// Leader of each pool with an edge here.
    naming: BTreeMap<String, LeaderNaming>,
    /// Identifier of this process, if the gateway has peers.
    instance: Option<Arc<str>>,
    /// Whether this gateway drains. It then only reports to its peers.
    is_draining: bool,
}

impl LeaderAssigner {
    /// Returns an assigner. `instance` is the identifier of this process, if it has peers.
    pub(crate) fn new(
        reading: &ApiCacheServer,
        (registry, instance): (&Registry, Option<Arc<str>>),
        nodes: &NodesWriter,
    ) -> Self {
        Self {
            api_cache: reading.clone(),
            registry: registry.clone(),
            nodes: nodes.clone(),
            connected_since: HashMap::new(),
            last_by_pool: HashMap::new(),
            last_by_tunnel: HashMap::new(),
            known_addresses: BTreeMap::new(),
            disconnected: BTreeMap::new(),
            nodes_by_pool: BTreeMap::new(),
            naming: BTreeMap::new(),
            instance,
            is_draining: false,
        }
    }

    /// Runs until `drain`, and then only reports to peers until `close`. A draining gateway assigns no leaders, because its edges
    /// move to other gateways. These have to know meanwhile which of the edges are still here.
    pub(crate) async fn run(mut self, drain: CancellationToken, close: CancellationToken) {
        drain.run_until_cancelled(self.run_checks()).await;
        self.is_draining = true;
        if self.instance.is_some() {
            // The peers have to know at once that this gateway names no leaders any more.
            self.api_cache.request_leader_check();
            close.run_until_cancelled(self.run_checks()).await;
        }
    }

    async fn run_checks(&mut self) -> Infallible {
        let mut nodes = self.nodes.subscribe();
        let leaders_changed = self.api_cache.leaders_changed.clone();
        let exchange = self.registry.directory().pool_exchange().clone();
        let mut next_check = Instant::now() + CHECK_INTERVAL;
        loop {
            // Each event only causes an earlier check.
            let early_check = async {
                tokio::select! {
                    changed = nodes.changed() => changed.map_or(EarlyCheck::Edges, |()| EarlyCheck::Nodes),
                    () = leaders_changed.notified() => EarlyCheck::Edges,
                    () = exchange.changed() => EarlyCheck::Peers,
                }
            };
            let event = timeout_at(next_check, early_check).await;
            if matches!(event, Ok(EarlyCheck::Nodes)) {
                self.api_cache.close_rejected(|_, _| None);
            }
            let (now, changed) = (Instant::now(), exchange.take_changed());
            if matches!(event, Ok(EarlyCheck::Peers)) && now < next_check {
                self.check_pools_of_peers(&changed, now);
            } else {
                self.check(now);
                next_check = Instant::now() + CHECK_PAUSE + CHECK_INTERVAL;
            }
            sleep(CHECK_PAUSE).await;
        }
    }

    /// Checks all pools.
    fn check(&mut self, now: Instant) {
        let nodes = self.nodes.reader();
        let readers = collect_readers(self.registry.all(), &nodes);
        self.update_connected_since(&readers, now);
        let pools = group_by_pool(&readers);
        self.disconnected = self.disconnected_members(&readers);
        self.last_by_pool
            .retain(|pool, _| pools.contains_key(&pool.as_deref()));
        self.naming
            .retain(|pool, _| pools.contains_key(&Some(pool.as_str())));
        let connected = pools.iter().filter_map(|(pool, readers)| {
            let nodes = readers.iter().map(|here| here.node.clone());
            Some(((*pool)?.to_owned(), nodes.collect()))
        });
        self.nodes_by_pool = connected.collect();
        self.check_pools(pools, CheckResults::default(), now);
    }

    /// Checks the pools about which peers have reported changes, as far as they have edges here.
    fn check_pools_of_peers(&mut self, changed: &BTreeSet<String>, now: Instant) {
        let nodes = changed
            .iter()
            .filter_map(|pool| self.nodes_by_pool.get(pool));
        let tunnels = nodes.flatten().flat_map(|node| {
            let (tunnels, _) = self.registry.node_tunnels(node);
            tunnels.into_iter().map(|edge| (node.clone(), edge))
        });
        let readers = collect_readers(tunnels, &self.nodes.reader());
        let mut pools = group_by_pool(&readers);
        // A node may have changed its pool since the last check of all pools.
        pools.retain(|pool, _| pool.is_some_and(|pool| changed.contains(pool)));
        if pools.is_empty() {
            return;
        }
        let results = CheckResults {
            leaders: self.api_cache.leaders.get(),
            yurthub_endpoints: self.api_cache.yurthub_endpoints.borrow().clone(),
            reports: self.registry.directory().pool_exchange().own(),
        };
        self.check_pools(pools, results, now);
    }

    /// Checks pools, and replaces the earlier results for them.
    fn check_pools(&mut self, pools: ReadersByPool<'_>, mut results: CheckResults, now: Instant) {
        for (pool, readers) in pools {
            self.check_pool(pool, &readers, &mut results, now);
        }
        if self.instance.is_some() {
            let exchange = self.registry.directory().pool_exchange();
            exchange.publish(results.reports);
        }
        if self.is_draining {
            return;
        }
        self.api_cache
            .yurthub_endpoints
            .send_if_modified(|current| {
                let has_changed = *current != results.yurthub_endpoints;
                *current = results.yurthub_endpoints;
                has_changed
            });
        let led_here = results
            .leaders
            .values()
            .filter(|leader| self.registry.has_tunnel(leader));
        self.api_cache.metrics.set_leaders(led_here.count());
        if results.leaders != self.api_cache.leaders.get() {
            tracing::debug!(leaders = ?results.leaders, "pool leaders changed");
            self.api_cache.leaders.replace(results.leaders);
        }
    }

    fn check_pool(
        &mut self,
        pool: Option<&str>,
        readers: &[&ConnectedReader],
        results: &mut CheckResults,
        now: Instant,
    ) {
        let peers = pool.map_or_else(Vec::new, |pool| self.peer_pools(pool));
        let leader = pool
            .and_then(|pool| self.name_leader(pool, (readers, &peers), &mut results.reports, now));
        if self.is_draining {
            return;
        }
        if let Some(pool) = pool {
            self.remember_members(pool, &peers);
            match &leader {
                Some(leader) => results.leaders.insert(pool.to_owned(), leader.clone()),
                None => results.leaders.remove(pool),
            };
            match self.pool_endpoints(pool, leader.as_ref(), readers) {
                Some(endpoints) => results.yurthub_endpoints.insert(pool.to_owned(), endpoints),
                None => results.yurthub_endpoints.remove(pool),
            };
        }
        let pool = pool.map(str::to_owned);
        let disconnected = self.disconnected.get(&pool).map_or(&[][..], Vec::as_slice);
        let connected = member_addresses(readers, &peers);
        let next = LastAnnouncement {
            members: Arc::new(pool_members(
                pool.clone(),
                leader.as_ref(),
                (&connected, disconnected),
            )),
            at: now,
        };
        let announcement = self.select_announcement(&next);
        for reader in readers {
            let is_leader = Some(&reader.node) == leader.as_ref();
            self.announce(reader, if is_leader { &next } else { &announcement }, &next);
        }
        self.last_by_pool.insert(pool, announcement);
    }

    /// Returns the reports of peers about a pool, without nodes that this gateway does not know as members of the pool, or that are
    /// revoked here.
    fn peer_pools(&self, pool: &str) -> Vec<PeerPool> {
        let nodes = self.nodes.reader();
        let is_member = |node: &NodeName| {
            nodes.with(node, |known| known.pool.as_deref() == Some(pool))
                && nodes.revocation_reason(node).is_none()
        };
        let mut peers = self.registry.directory().pool_reports(pool);
        for peer in &mut peers {
            let members = peer.report.members.iter().map(|member| &member.node);
            let leader = peer.report.leader.iter().map(|leader| &leader.node);
            if !members.chain(leader).all(is_member) {
                let report = Arc::make_mut(&mut peer.report);
                report.members.retain(|member| is_member(&member.node));
                report.leader.take_if(|leader| !is_member(&leader.node));
            }
        }
        peers
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

    /// Names the leader of a pool together with the peers, and updates the report that they receive.
    fn name_leader(
        &mut self,
        pool: &str,
        (readers, peers): (&[&ConnectedReader], &[PeerPool]),
        reports: &mut PoolReports,
        now: Instant,
    ) -> Option<NodeName> {
        let mut naming = self.naming.remove(pool).unwrap_or_default();
        let current = naming.leader().map(|leader| leader.node.clone());
        let own = self.own_candidates(current.as_ref(), readers, now);
        let candidates = leader_policy::merge_candidates(&own, peers, now);
        let to_probe = leader_policy::candidates_to_probe(current.as_ref(), &candidates);
        let probed_readers = readers.iter().filter(|here| to_probe.contains(&&here.node));
        probed_readers
            .flat_map(|here| here.active_tunnels())
            .for_each(Tunnel::request_probe);
        let input = NamingInput {
            pool,
            instance: self.instance.as_deref(),
            may_name: !own.is_empty() && !self.is_draining,
            has_peers: !self.registry.directory().peers().is_empty(),
            candidates: &candidates,
            peers,
        };
        let leader = naming.update(&input, now).cloned();
        if self.instance.is_some() {
            let candidates = (own.as_slice(), candidates.as_slice());
            self.update_report(pool, (readers, candidates), (leader.clone(), reports), now);
        }
        self.naming.insert(pool.to_owned(), naming);
        Some(leader?.node)
    }

    /// Returns the candidates that are connected here.
    fn own_candidates<'a>(
        &self,
        current: Option<&NodeName>,
        readers: &[&'a ConnectedReader],
        now: Instant,
    ) -> Vec<Candidate<'a>> {
        // The current leader stays, suspect or not, until another candidate has answered.
        let is_current_leader =
            |here: &ConnectedReader| Some(&here.node) == current && here.serves_members();
        let eligible = readers
            .iter()
            .filter(|here| here.can_lead() || is_current_leader(here));
        let candidates = eligible.map(|here| {
            let since = self.connected_since.get(&here.node);
            Candidate::from_reader(
                here,
                since.map_or(Duration::ZERO, |(_, since)| now - *since),
            )
        });
        candidates.collect()
    }

    /// Replaces the report about a pool, unless it is unchanged.
    fn update_report(
        &self,
        pool: &str,
        (readers, (own, all)): (&[&ConnectedReader], (&[Candidate<'_>], &[Candidate<'_>])),
        (leader, reports): (Option<NamedLeader>, &mut PoolReports),
        now: Instant,
    ) {
        let previous = self.registry.directory().pool_exchange().own_report(pool);
        let previous_candidates = previous.iter().flat_map(|report| report.candidates());
        let previous_candidates: HashMap<_, _> = previous_candidates.collect();
        let own: HashMap<_, _> = own.iter().map(|one| (one.node(), one)).collect();
        let leader_node = leader.as_ref().map(|leader| &leader.node);
        let leading = leader_policy::find_leader(leader_node, all);
        let serving = readers.iter().filter(|here| here.serves_members());
        let members = serving.map(|here| {
            let candidate = own.get(&here.node);
            let since = self.connected_since.get(&here.node);
            let since = since.map_or(now, |(_, since)| *since);
            ReportedMember {
                node: here.node.clone(),
                at: here.addresses.clone(),
                candidate: candidate.map(|one| {
                    let previous = previous_candidates.get(&here.node).copied();
                    one.report(since, leading, (previous, now))
                }),
            }
        });
        let mut members: Vec<_> = members.collect();
        members.sort_by_key(|member| Some(&member.node) != leader_node);
        let report = PoolReport {
            is_draining: self.is_draining,
            leader: leader.clone(),
            members,
        };
        // An unchanged report stays the same object, so that it is not sent again.
        let unchanged = previous.clone().filter(|previous| **previous == report);
        let report = unchanged.unwrap_or_else(|| Arc::new(report));
        reports.insert(pool.to_owned(), report);
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

    /// Stores the addresses of members at peers, which may lose their uplinks. Until then they are listed as connected members.
    fn remember_members(&mut self, pool: &str, peers: &[PeerPool]) {
        for member in peers.iter().flat_map(|peer| &peer.report.members) {
            let known = self.known_addresses.get(&member.node);
            let is_connected_here = self.connected_since.contains_key(&member.node);
            if is_connected_here || known == Some(&member.at) {
                continue;
            }
            let disconnected = self.disconnected.entry(Some(pool.to_owned())).or_default();
            disconnected.retain(|known| known.node != member.node.as_str());
            disconnected.push(NodePoolMember {
                node: member.node.to_string(),
                at: member.at.clone(),
            });
            self.known_addresses
                .insert(member.node.clone(), member.at.clone());
        }
    }

    /// Returns, by pool, the nodes that were connected earlier and are not connected here now, and that are neither removed nor
    /// revoked. A node with delegated heartbeats counts too: it may have been connected to this gateway before its restart, and
    /// members must admit it.
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
            // An edge whose send buffer is full receives the message at the next check.
            let Ok(permit) = edge.tunnel.control.try_reserve() else {
                continue;
            };
            let message = GatewayMessage::Pool(with_own_member(&saying.members, reader));
            permit.send(Box::new(message));
            self.last_by_tunnel.insert(edge.id, saying.clone());
        }
    }
}

/// Groups nodes by their confirmed pools.
fn group_by_pool(readers: &[ConnectedReader]) -> ReadersByPool<'_> {
    let mut pools = ReadersByPool::new();
    for reader in readers {
        let pool = pools.entry(reader.pool.as_deref()).or_default();
        pool.push(reader);
    }
    pools
}

/// Returns the nodes with an API cache that have these tunnels and are not revoked, in the order of their names. The tunnels of a
/// revoked node may still be open.
fn collect_readers(
    tunnels: impl IntoIterator<Item = (NodeName, TunnelInfo)>,
    nodes: &Nodes,
) -> Vec<ConnectedReader> {
    let mut all: BTreeMap<NodeName, Vec<TunnelInfo>> = BTreeMap::new();
    for (node, edge) in tunnels {
        if !edge.is_leaving() && edge.tunnel.hello.site.is_some() {
            all.entry(node).or_default().push(edge);
        }
    }
    let to_reader = |(node, tunnels): (NodeName, Vec<TunnelInfo>)| {
        let hello = &tunnels.last()?.tunnel.hello;
        let node_data = nodes.get(&node)?;
        if nodes.revocation_reason(&node).is_some() {
            return None;
        }
        Some(ConnectedReader {
            addresses: announceable_addresses(hello.site.iter().flatten()),
            yurthub: hello.hubs.clone(),
            instance: hello.instance.clone(),
            pool: node_data.pool,
            tunnels,
            node,
        })
    };
    all.into_iter().filter_map(to_reader).collect()
}

/// Returns the members that are connected here or at a peer.
fn member_addresses<'a>(
    readers: &[&'a ConnectedReader],
    peers: &'a [PeerPool],
) -> MemberAddresses<'a> {
    let elsewhere = peers.iter().flat_map(|peer| &peer.report.members);
    let elsewhere = elsewhere.map(|member| (&member.node, member.at.as_slice()));
    let serving = readers.iter().filter(|here| here.serves_members());
    let here = serving.map(|here| (&here.node, here.addresses.as_slice()));
    // The last one counts: the addresses that are known here.
    elsewhere.chain(here).collect()
}

/// Returns the announcement to a pool. The leader comes first, so that it always fits. The other members follow by name, and then
/// members that are not connected.
fn pool_members(
    pool: Option<String>,
    leader: Option<&NodeName>,
    (connected, disconnected): (&MemberAddresses<'_>, &[NodePoolMember]),
) -> NodePoolMembers {
    if pool.is_none() {
        return NodePoolMembers::default();
    }
    let leader = leader.map(ToString::to_string);
    let known = connected.iter().map(|(node, at)| NodePoolMember {
        node: node.to_string(),
        at: at.to_vec(),
    });
    let mut ordered: Vec<_> = known.collect();
    let names: HashSet<_> = connected.keys().map(|node| node.as_str()).collect();
    let absent = disconnected
        .iter()
        .filter(|member| !names.contains(member.node.as_str()));
    ordered.extend(absent.cloned());
    ordered.sort_by_key(|member| Some(&member.node) != leader.as_ref());
    let mut remaining = members_budget();
    let fitting_members = ordered.into_iter().take_while(|member| {
        let size = max_member_size(member);
        let fits = size <= remaining;
        remaining = remaining.saturating_sub(size);
        fits
    });
    NodePoolMembers {
        members: fitting_members.take(NodePoolMembers::MAX_MEMBERS).collect(),
        leader,
        pool,
    }
}

/// Returns the announcement, extended by the receiving edge itself if that edge is a member.
fn with_own_member(members: &NodePoolMembers, reader: &ConnectedReader) -> NodePoolMembers {
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
