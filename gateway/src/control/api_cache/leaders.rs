//! Leader assignment: the edge of each pool that reads at the gateway, and the addresses of the pool's other members.
//!
//! Every second, and when an edge connects or a node changes:
//! 1. edges with an API cache are grouped by their confirmed pools;
//! 2. each pool gets a leader, one of its candidates: a leader remains while it is connected and answers;
//! 3. each tunnel gets each change once. A change of the leader is announced at once, and so is each change of members to the
//!    leader, since members connect to it next. The others get changes of members together, since the edges of a site that is
//!    back reconnect one by one.
//!
//! A node that was connected and has lost its uplink remains a member: it reads at another member. It leads no pool.
//!
//! The leader is advice: an edge whose leader is silent reads at the gateway itself.

use super::{
    ApiCacheServer,
    connected_reader::ConnectedReader,
    leader_policy::{self, Candidate},
    membership_message::{members, with_itself},
};
use crate::state::{
    NodePoolEndpoints, Nodes, NodesWriter, Registry, TunnelId, TunnelInfo, YurtHubEndpoints,
};
use causeway_certs::NodeName;
use causeway_config::host_port;
use causeway_tunnel::{
    Tunnel,
    control_stream::{GatewayMessage, NodePoolMember, NodePoolMembers},
};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    convert::Infallible,
    sync::Arc,
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

/// Interval of checks.
const LOOK: Duration = Duration::from_secs(1);
/// Pause after each check: a fleet that reconnects is checked together.
const PAUSE: Duration = Duration::from_millis(100);
/// Interval of announcements of members that came or went.
const GATHER: Duration = Duration::from_secs(3);
/// Maximum number of announced addresses of one edge: one of each family on each of two networks.
const MOST_ADDRESSES: usize = 4;
/// Maximum length of an address: a DNS name and a port.
const LONGEST: usize = 260;

/// Last announcement, and its time.
#[derive(Clone)]
struct LastAnnouncement {
    members: Arc<NodePoolMembers>,
    at: Instant,
}

/// Assigns leaders and announces them to edges.
pub(crate) struct LeaderAssigner {
    reading: ApiCacheServer,
    registry: Registry,
    nodes: NodesWriter,
    /// Time since which each edge process is connected.
    since: HashMap<NodeName, (String, Instant)>,
    /// Last announcement by pool.
    said: HashMap<Option<String>, LastAnnouncement>,
    /// Last announcement to each tunnel.
    told: HashMap<TunnelId, LastAnnouncement>,
    /// Addresses at which each node that has been connected serves other members.
    met: BTreeMap<NodeName, Vec<String>>,
}

impl LeaderAssigner {
    pub(crate) fn new(reading: &ApiCacheServer, registry: &Registry, nodes: &NodesWriter) -> Self {
        Self {
            reading: reading.clone(),
            registry: registry.clone(),
            nodes: nodes.clone(),
            since: HashMap::new(),
            said: HashMap::new(),
            told: HashMap::new(),
            met: BTreeMap::new(),
        }
    }

    /// Runs until `stop`: edges that are asked to connect elsewhere need no leader here.
    pub(crate) async fn run(self, stop: CancellationToken) {
        stop.run_until_cancelled(self.keep()).await;
    }

    async fn keep(mut self) -> Infallible {
        let mut nodes = self.nodes.changes();
        let stirred = self.reading.stirred.clone();
        loop {
            // Each event only causes an earlier check.
            let sooner = async {
                tokio::select! {
                    changed = nodes.changed() => changed.is_ok(),
                    () = stirred.notified() => false,
                }
            };
            if timeout(LOOK, sooner).await.unwrap_or(false) {
                self.reading.judge(|_, _| None);
            }
            self.look(Instant::now());
            sleep(PAUSE).await;
        }
    }

    fn look(&mut self, now: Instant) {
        let all = gather(&self.registry, &self.nodes.reader());
        self.age(&all, now);
        let away = self.away(&all);
        let mut pools: BTreeMap<Option<&str>, Vec<&ConnectedReader>> = BTreeMap::new();
        for here in &all {
            pools.entry(here.pool.as_deref()).or_default().push(here);
        }
        let before = self.reading.led.all();
        let mut led = BTreeMap::new();
        let mut said = HashMap::new();
        let mut hubs = YurtHubEndpoints::new();
        for (pool, own) in pools {
            let leader = pool.and_then(|pool| self.leader(before.get(pool), &own, now));
            if let (Some(pool), Some(leader)) = (pool, leader) {
                led.insert(pool.to_owned(), leader.clone());
            }
            let absent = away
                .get(&pool.map(str::to_owned))
                .map_or(&[][..], Vec::as_slice);
            if let Some(pool) = pool
                && let Some(of_pool) = self.hubs(pool, leader, &own)
            {
                hubs.insert(pool.to_owned(), of_pool);
            }
            let pool = pool.map(str::to_owned);
            let next = LastAnnouncement {
                members: Arc::new(members(pool.clone(), leader, (&own, absent))),
                at: now,
            };
            let saying = self.saying(&next);
            for here in own {
                let leads = Some(&here.node) == leader;
                self.tell(here, if leads { &next } else { &saying }, &next);
            }
            said.insert(pool, saying);
        }
        self.said = said;
        self.reading.hubs.send_if_modified(|known| {
            let differs = *known != hubs;
            *known = hubs;
            differs
        });
        self.reading.metrics.leaders(led.len());
        if led != before {
            tracing::debug!(?led, "pool leaders changed");
            self.reading.led.replace(led);
        }
    }

    /// Records since when each process is connected, and forgets nodes and tunnels that are not connected.
    fn age(&mut self, all: &[ConnectedReader], now: Instant) {
        let mut since = HashMap::with_capacity(all.len());
        for here in all {
            let known = self.since.remove(&here.node);
            let same = known.filter(|(instance, _)| *instance == here.instance);
            let fresh = || (here.instance.clone(), now);
            since.insert(here.node.clone(), same.unwrap_or_else(fresh));
        }
        self.since = since;
        let ids = all.iter().flat_map(|here| &here.tunnels);
        let ids: HashSet<TunnelId> = ids.map(|edge| edge.id).collect();
        self.told.retain(|id, _| ids.contains(id));
    }

    fn leader<'a>(
        &self,
        current: Option<&NodeName>,
        own: &[&'a ConnectedReader],
        now: Instant,
    ) -> Option<&'a NodeName> {
        // The current leader stays, suspect or not, until another candidate has answered.
        let leads = |here: &ConnectedReader| Some(&here.node) == current && here.serves();
        let able = own.iter().filter(|here| here.may_lead() || leads(here));
        let candidates = able.map(|here| {
            let since = self.since.get(&here.node);
            Candidate::of(
                here,
                since.map_or(Duration::ZERO, |(_, since)| now - *since),
            )
        });
        let candidates: Vec<_> = candidates.collect();
        let asked = leader_policy::candidates_to_probe(current, &candidates);
        let heres = own.iter().filter(|here| asked.contains(&&here.node));
        heres
            .flat_map(|here| here.staying())
            .for_each(Tunnel::probe);
        leader_policy::elect(current, &candidates)
    }

    /// Returns the endpoints for `YurtHub`s of this pool: the leader's first, then those of others that serve them.
    fn hubs(
        &self,
        pool: &str,
        leader: Option<&NodeName>,
        own: &[&ConnectedReader],
    ) -> Option<NodePoolEndpoints> {
        let granted = self.reading.granted(pool);
        let mut all = NodePoolEndpoints::default();
        let leads = |here: &&&ConnectedReader| Some(&here.node) == leader;
        let others = own.iter().filter(|here| !leads(here));
        for here in own.iter().filter(leads).chain(others) {
            let Some(hubs) = here.hubs.as_ref().filter(|_| here.is_open()) else {
                continue;
            };
            let named = hubs.resources.iter().filter_map(|text| text.parse().ok());
            let read = named.filter(|resource| granted.contains(resource));
            all.add(&here.node, hubs.at, read.collect());
        }
        (!all.at.is_empty()).then_some(all)
    }

    /// Returns the announcement to a pool from now on: this one, or the last one if that suffices for a while.
    fn saying(&mut self, next: &LastAnnouncement) -> LastAnnouncement {
        let Some(before) = self.said.remove(&next.members.pool) else {
            return next.clone();
        };
        let same_leader = before.members.leader == next.members.leader;
        let early = next.at.saturating_duration_since(before.at) < GATHER;
        if before.members == next.members || (same_leader && early) {
            return before;
        }
        next.clone()
    }

    /// Returns nodes by pool that have been connected, are not now, and are neither removed nor revoked.
    fn away(&mut self, all: &[ConnectedReader]) -> BTreeMap<Option<String>, Vec<NodePoolMember>> {
        let nodes = self.nodes.reader();
        self.met
            .retain(|node, _| nodes.get(node).is_some() && nodes.revoked(node).is_none());
        for here in all {
            self.met.insert(here.node.clone(), here.at.clone());
        }
        let here: HashSet<_> = all.iter().map(|here| &here.node).collect();
        let mut away: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (node, at) in self
            .met
            .iter()
            .filter(|(node, at)| !here.contains(node) && !at.is_empty())
        {
            let pool = nodes.with(node, |known| known.pool.clone());
            let member = NodePoolMember {
                node: node.to_string(),
                at: at.clone(),
            };
            away.entry(pool).or_default().push(member);
        }
        away
    }

    /// Sends the announcement to each of the node's tunnels, unless the tunnel got this or a later one. A new tunnel gets `now`,
    /// the current state: it may be cut off before long.
    fn tell(&mut self, here: &ConnectedReader, saying: &LastAnnouncement, now: &LastAnnouncement) {
        for edge in &here.tunnels {
            let told = self.told.get(&edge.id);
            let known =
                |told: &LastAnnouncement| told.members == saying.members || told.at > saying.at;
            if told.is_some_and(known) {
                continue;
            }
            let saying = if told.is_some() { saying } else { now };
            let line = GatewayMessage::Pool(with_itself(&saying.members, here));
            // An edge whose send buffer is full receives the message at the next check.
            if edge.admitted.control.try_send(Box::new(line)).is_ok() {
                self.told.insert(edge.id, saying.clone());
            }
        }
    }
}

/// Returns all nodes with an API cache, in the order of their names.
fn gather(registry: &Registry, nodes: &Nodes) -> Vec<ConnectedReader> {
    let mut all: BTreeMap<NodeName, Vec<TunnelInfo>> = BTreeMap::new();
    for (node, edge) in registry.all() {
        if !edge.is_leaving() && edge.admitted.welcome.site.is_some() {
            all.entry(node).or_default().push(edge);
        }
    }
    let here = |(node, tunnels): (NodeName, Vec<TunnelInfo>)| {
        let welcome = &tunnels.last()?.admitted.welcome;
        let known = nodes.get(&node)?;
        let site = welcome.site.iter().flatten();
        // The data that an edge reports about itself is sent to the other edges.
        let site = site.filter(|at| at.len() <= LONGEST && host_port(at).is_ok());
        let site = site.cloned();
        Some(ConnectedReader {
            at: site.take(MOST_ADDRESSES).collect(),
            hubs: welcome.hubs.clone(),
            instance: welcome.instance.clone(),
            pool: known.pool,
            tunnels,
            node,
        })
    };
    all.into_iter().filter_map(here).collect()
}
