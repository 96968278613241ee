//! Directory: the nodes that other gateways (peers) hold, and the links by which requests reach them.
//!
//! Only the gateway that holds a node's tunnel states that it does. `control::peers` writes what each peer states, and removes it
//! with the connection that stated it. So an entry is at most as old as that connection is silent. An entry that is wrong costs
//! one round trip: the peer refuses the request, and the next holder receives it (`proxy::peer`).

use super::peer_addresses::PeerAddresses;
use crate::{
    state::pool_reports::{PeerPool, PoolExchange, PoolReport},
    worker::WorkerId,
};
use arc_swap::{ArcSwap, ArcSwapOption};
use causeway_certs::NodeName;
use causeway_tunnel::Tunnel;
use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

/// Time for which a peer that has refused a request for a node is not asked for that node, or is asked last.
pub const REFUSAL_TIME: Duration = Duration::from_secs(1);
/// Time without an answer to a probe after which another tunnel or peer is preferred.
pub(crate) const MIN_LATE: Duration = Duration::from_secs(1);
/// The same in round trips, for long links.
const LATE_ROUND_TRIPS: u32 = 4;

/// Maximum number of pools about which a peer may report: each of 20,000 edges could be in a pool of its own.
pub(crate) const MAX_POOLS: usize = 20_000;
/// Maximum length of a pool's name. The value of a label has at most 63 bytes.
pub(crate) const MAX_POOL_NAME_LEN: usize = 253;

/// Identifier of a tunnel, or of a link to a peer, in this process; higher is newer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TunnelId(pub u64);

/// Gateway that forwards requests to this one. The certificates of all gateways have the same identity, so the serial number tells
/// which gateway this is.
#[derive(Clone, Debug)]
pub struct ForwardingGateway {
    /// Address from which it has connected.
    pub address: SocketAddr,
    /// Serial number of its certificate, in hexadecimal.
    pub serial: Arc<str>,
}

/// Directory of a gateway. Cheap to clone, for any thread.
#[derive(Clone, Debug, Default)]
pub struct Directory {
    peers: Arc<ArcSwap<Vec<Arc<Peer>>>>,
    /// Held while the list changes.
    change_lock: Arc<Mutex<()>>,
    removed: Arc<Notify>,
    /// Addresses at which clients reach this gateway, as it states them to its peers.
    own_addresses: watch::Sender<Arc<[IpAddr]>>,
    pools: PoolExchange,
    addresses: PeerAddresses,
}

/// State of a node at the gateway that holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldState {
    /// A tunnel takes streams.
    Connected,
    /// All tunnels of the node drain.
    Draining,
}

/// Reason for which a peer has refused a request for a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerRefusal {
    /// The peer has no usable tunnel of the node. It is not asked for a moment.
    NotHeld,
    /// The tunnel at the peer does not answer at present. The peer is asked last for a moment.
    Late,
}

/// Entry of a node at a peer.
#[derive(Debug)]
struct HeldNode {
    state: HeldState,
    /// Reason for which the peer has refused a request for the node, and the time until which the refusal counts.
    refusal: Option<(PeerRefusal, Instant)>,
    /// Cancelled when the peer holds the node no longer, or its tunnels drain. Idle connections through the peer then end.
    leaving: CancellationToken,
}

impl HeldNode {
    fn new(state: HeldState) -> Self {
        Self {
            state,
            refusal: None,
            leaving: CancellationToken::new(),
        }
    }
}

/// Another gateway, while its control connection is open.
#[derive(Debug)]
pub struct Peer {
    /// Address at which this gateway reached it, `host:port`.
    pub address: Arc<str>,
    /// Random identifier of its process.
    pub instance: String,
    /// Version of its program.
    pub version: String,
    /// Serial number of its certificate, in hexadecimal.
    pub serial: String,
    /// Time at which the connection was opened.
    pub since: SystemTime,
    /// Its control connection.
    control: Tunnel,
    nodes: RwLock<HashMap<NodeName, HeldNode>>,
    /// Ports whose health checks fail, of its nodes that have such ports.
    unhealthy_ports: RwLock<HashMap<NodeName, Vec<u16>>>,
    /// Its reports about node pools.
    pools: Mutex<HashMap<String, Arc<PoolReport>>>,
    /// Cancelled when a newer connection to the same process has replaced this one.
    replaced: CancellationToken,
    /// Connections for requests, one for each worker.
    links: Box<[ArcSwapOption<PeerLink>]>,
    /// Addresses at which clients reach it, as it states them.
    addresses: ArcSwap<Vec<IpAddr>>,
    /// Whether all of its nodes are known.
    is_synchronized: AtomicBool,
    is_draining: AtomicBool,
}

/// Connection to a peer on which requests are forwarded.
#[derive(Clone, Debug)]
pub struct PeerLink {
    /// The connection.
    pub tunnel: Tunnel,
    /// Identifier, unique among the tunnels of this process.
    pub id: TunnelId,
}

/// Peer that was selected for a request.
#[derive(Clone, Debug)]
pub struct SelectedPeer {
    /// The peer.
    pub peer: Arc<Peer>,
    /// Connection to use.
    pub link: Arc<PeerLink>,
    /// Whether the node or the peer drains, or the peer does not answer at present.
    pub is_last_resort: bool,
}

/// Rank of a peer for a node; the lowest is the best: whether the peer or its tunnel of the node does not answer at present, and
/// whether one of both drains.
type PeerRank = (bool, bool);
const BEST_RANK: PeerRank = (false, false);

/// Whether a tunnel has not answered a probe for long enough that another one is better.
pub(super) fn is_late(tunnel: &Tunnel) -> bool {
    tunnel.unanswered_for() > max_unanswered(tunnel, MIN_LATE)
}

/// Waits until a tunnel has not answered a probe for longer than `limit`, or than a few round trips if the link is long.
pub(crate) async fn until_unanswered(tunnel: &Tunnel, limit: Duration) {
    loop {
        // Requests wait here until their responses, so most of them need no timer.
        tunnel.wait_for_unanswered_probe().await;
        let remaining = max_unanswered(tunnel, limit).checked_sub(tunnel.unanswered_for());
        let Some(remaining) = remaining else { return };
        sleep(remaining + Duration::from_millis(1)).await;
    }
}

fn max_unanswered(tunnel: &Tunnel, limit: Duration) -> Duration {
    limit.max(tunnel.round_trip() * LATE_ROUND_TRIPS)
}

impl Peer {
    /// Returns a peer without nodes and links.
    pub fn new(
        address: &str,
        (instance, version): (String, String),
        control: Tunnel,
        workers: usize,
    ) -> Self {
        Self {
            address: address.into(),
            instance,
            version,
            serial: String::new(),
            since: SystemTime::now(),
            control,
            nodes: RwLock::default(),
            unhealthy_ports: RwLock::default(),
            pools: Mutex::default(),
            replaced: CancellationToken::new(),
            links: (0..workers).map(|_| ArcSwapOption::empty()).collect(),
            addresses: ArcSwap::default(),
            is_synchronized: AtomicBool::new(false),
            is_draining: AtomicBool::new(false),
        }
    }

    /// Sets the ports of a node whose health checks fail.
    pub fn set_unhealthy_ports(&self, node: NodeName, ports: Vec<u16>) {
        let mut all = self.write_unhealthy_ports();
        if ports.is_empty() {
            all.remove(&node);
        } else {
            all.insert(node, ports);
        }
    }

    /// Returns the ports of a node whose health checks fail.
    pub fn unhealthy_ports(&self, node: &NodeName) -> Vec<u16> {
        let all = self
            .unhealthy_ports
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        all.get(node).cloned().unwrap_or_default()
    }

    fn write_unhealthy_ports(&self) -> RwLockWriteGuard<'_, HashMap<NodeName, Vec<u16>>> {
        let all = self.unhealthy_ports.write();
        all.unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces all nodes of the peer.
    pub fn replace_nodes(&self, states: HashMap<NodeName, HeldState>) {
        self.write_unhealthy_ports()
            .retain(|node, _| states.contains_key(node));
        let mut nodes = self.write_nodes();
        nodes.retain(|node, held| {
            let is_held = states.contains_key(node);
            if !is_held {
                held.leaving.cancel();
            }
            is_held
        });
        for (node, state) in states {
            set_state(&mut nodes, node, state);
        }
        self.is_synchronized.store(true, Relaxed);
    }

    /// Sets the state of one node; `None` if the peer no longer holds it.
    pub fn set_node(&self, node: NodeName, state: Option<HeldState>) {
        let mut nodes = self.write_nodes();
        match state {
            Some(state) => set_state(&mut nodes, node, state),
            None => {
                if let Some(held) = nodes.remove(&node) {
                    held.leaving.cancel();
                }
            }
        }
    }

    /// Records that the peer has refused a request for the node. Idle connections through the peer to the node end.
    pub fn record_refusal(&self, node: &NodeName, refusal: PeerRefusal) {
        if let Some(held) = self.write_nodes().get_mut(node) {
            held.refusal = Some((refusal, Instant::now() + REFUSAL_TIME));
            held.leaving.cancel();
            held.leaving = CancellationToken::new();
        }
    }

    /// Returns the token that is cancelled when the peer holds the node no longer, or its tunnels drain.
    pub fn leaving_token(&self, node: &NodeName) -> CancellationToken {
        let held = self.read_nodes();
        let token = held.get(node).map(|held| held.leaving.clone());
        token.unwrap_or_else(|| {
            let left = CancellationToken::new();
            left.cancel();
            left
        })
    }

    /// Returns the token that is cancelled when a newer connection to the same process has replaced this one.
    pub fn replaced(&self) -> &CancellationToken {
        &self.replaced
    }

    /// Returns the number of nodes at the peer that have a tunnel that does not drain.
    pub fn active_node_count(&self) -> usize {
        let nodes = self.read_nodes();
        let states = nodes.values().map(|held| held.state);
        states
            .filter(|state| *state == HeldState::Connected)
            .count()
    }

    /// Replaces the addresses at which clients reach the peer.
    pub fn set_addresses(&self, addresses: Vec<IpAddr>) {
        self.addresses.store(Arc::new(addresses));
    }

    /// Returns the addresses at which clients reach the peer; empty if it has stated none.
    pub fn addresses(&self) -> Arc<Vec<IpAddr>> {
        self.addresses.load_full()
    }

    /// Records that the peer drains.
    pub fn mark_draining(&self) {
        self.is_draining.store(true, Relaxed);
        for held in self.read_nodes().values() {
            held.leaving.cancel();
        }
    }

    /// Whether the peer drains.
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Relaxed)
    }

    /// Whether all nodes of the peer are known.
    pub fn is_synchronized(&self) -> bool {
        self.is_synchronized.load(Relaxed)
    }

    /// Whether the peer does not answer at present.
    pub fn is_suspect(&self) -> bool {
        self.control.is_suspect()
    }

    /// Returns the control connection.
    pub fn control(&self) -> &Tunnel {
        &self.control
    }

    /// Returns the state of a node at the peer, if the peer holds it.
    pub fn node(&self, node: &NodeName) -> Option<HeldState> {
        Some(self.read_nodes().get(node)?.state)
    }

    /// Returns the state of a node for a new request and whether its tunnel was late a moment ago, if the peer may be asked.
    fn usable_node(&self, node: &NodeName, now: Instant) -> Option<(HeldState, bool)> {
        let nodes = self.read_nodes();
        let held = nodes.get(node)?;
        let refusal = held.refusal.filter(|(_, until)| now < *until);
        match refusal {
            Some((PeerRefusal::NotHeld, _)) => None,
            Some((PeerRefusal::Late, _)) => Some((held.state, true)),
            None => Some((held.state, false)),
        }
    }

    /// Returns the link for a new request to a node, if the peer may be asked, and the rank of the peer among others.
    fn candidate(
        &self,
        node: &NodeName,
        worker: WorkerId,
        now: Instant,
    ) -> Option<(Arc<PeerLink>, PeerRank)> {
        let (state, was_late) = self.usable_node(node, now)?;
        let link = self.link(worker)?;
        let is_late = was_late || self.is_suspect() || is_late(&link.tunnel);
        let drains = state == HeldState::Draining || self.is_draining();
        Some((link, (is_late, drains)))
    }

    /// Returns the number of nodes that the peer holds.
    pub fn node_count(&self) -> usize {
        self.read_nodes().len()
    }

    /// Returns the names of the nodes that the peer holds.
    pub fn node_names(&self) -> Vec<NodeName> {
        self.read_nodes().keys().cloned().collect()
    }

    /// Stores a report about a pool; `None` if the peer has no member of the pool any more. Returns false if the peer has reported
    /// too many pools, or if the name of the pool is too long.
    pub fn set_pool(&self, pool: String, report: Option<PoolReport>) -> bool {
        let mut pools = self.lock_pools();
        let Some(report) = report else {
            pools.remove(&pool);
            return true;
        };
        let has_space = pools.len() < MAX_POOLS || pools.contains_key(&pool);
        if !has_space || pool.len() > MAX_POOL_NAME_LEN {
            return false;
        }
        pools.insert(pool, Arc::new(report));
        true
    }

    /// Returns the report about a pool, with the state of the peer.
    fn pool(&self, pool: &str) -> Option<PeerPool> {
        let report = self.lock_pools().get(pool)?.clone();
        let is_late = self.is_suspect() || is_late(&self.control);
        Some(PeerPool {
            instance: self.instance.clone(),
            is_active: !is_late && !self.is_draining(),
            unanswered_for: is_late.then(|| self.control.unanswered_for()),
            report,
        })
    }

    fn pool_names(&self) -> Vec<String> {
        self.lock_pools().keys().cloned().collect()
    }

    fn lock_pools(&self) -> MutexGuard<'_, HashMap<String, Arc<PoolReport>>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the link of a worker, or removes it.
    pub fn set_link(&self, worker: WorkerId, link: Option<PeerLink>) {
        if let Some(slot) = self.links.get(worker.0) {
            slot.store(link.map(Arc::new));
        }
    }

    /// Returns the number of open links.
    pub fn link_count(&self) -> usize {
        self.links.iter().filter_map(usable_link).count()
    }

    /// Returns the link of this worker, or another one if that is not open.
    fn link(&self, worker: WorkerId) -> Option<Arc<PeerLink>> {
        let own = self.links.get(worker.0).and_then(usable_link);
        own.or_else(|| self.links.iter().find_map(usable_link))
    }

    fn read_nodes(&self) -> RwLockReadGuard<'_, HashMap<NodeName, HeldNode>> {
        self.nodes.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_nodes(&self) -> RwLockWriteGuard<'_, HashMap<NodeName, HeldNode>> {
        self.nodes.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn set_state(nodes: &mut HashMap<NodeName, HeldNode>, node: NodeName, state: HeldState) {
    let held = nodes.entry(node).or_insert_with(|| HeldNode::new(state));
    if state == HeldState::Draining {
        held.leaving.cancel();
    } else if held.leaving.is_cancelled() {
        held.leaving = CancellationToken::new();
    }
    held.state = state;
    // The peer states what it holds now.
    held.refusal = None;
}

fn usable_link(slot: &ArcSwapOption<PeerLink>) -> Option<Arc<PeerLink>> {
    slot.load_full().filter(|link| link.tunnel.is_open())
}

impl Directory {
    /// States the addresses at which clients reach this gateway to all peers.
    pub fn state_addresses(&self, addresses: &[IpAddr]) {
        self.own_addresses.send_if_modified(|stated| {
            let is_new = **stated != *addresses;
            if is_new {
                *stated = addresses.into();
            }
            is_new
        });
    }

    /// Returns a receiver of the addresses at which clients reach this gateway.
    pub fn watch_own_addresses(&self) -> watch::Receiver<Arc<[IpAddr]>> {
        self.own_addresses.subscribe()
    }

    /// Returns all peers.
    pub fn peers(&self) -> Arc<Vec<Arc<Peer>>> {
        self.peers.load_full()
    }

    /// Returns the addresses at which other gateways are dialled.
    pub fn addresses(&self) -> &PeerAddresses {
        &self.addresses
    }

    /// Whether the process is connected by another address than this one.
    pub fn is_connected_elsewhere(&self, instance: &str, address: &str) -> bool {
        let peers = self.peers.load();
        let mut same = peers.iter().filter(|known| known.instance == instance);
        same.any(|known| *known.address != *address)
    }

    /// Adds a peer. Replaces the earlier connection to the same process at the same address. Returns false if the process is
    /// connected by another address.
    pub fn add(&self, peer: &Arc<Peer>) -> bool {
        let _changing = self.change();
        if self.is_connected_elsewhere(&peer.instance, &peer.address) {
            return false;
        }
        let mut all = Vec::clone(&self.peers.load());
        let mut pools = peer.pool_names();
        for replaced in all.extract_if(.., |known| known.instance == peer.instance) {
            replaced.replaced.cancel();
            pools.extend(replaced.pool_names());
        }
        all.push(peer.clone());
        self.peers.store(Arc::new(all));
        self.pools.mark_changed(pools);
        true
    }

    /// Removes a peer, with all of its entries, unless another connection has replaced it. Returns whether it was removed.
    pub fn remove(&self, peer: &Arc<Peer>) -> bool {
        let _changing = self.change();
        let mut all = Vec::clone(&self.peers.load());
        let Some(index) = all.iter().position(|known| Arc::ptr_eq(known, peer)) else {
            return false;
        };
        all.remove(index);
        self.peers.store(Arc::new(all));
        self.removed.notify_waiters();
        self.pools.mark_changed(peer.pool_names());
        true
    }

    /// Returns the reports of this gateway about node pools, and the pools about which peers have reported changes.
    pub fn pool_exchange(&self) -> &PoolExchange {
        &self.pools
    }

    /// Returns the reports of all peers about a pool.
    pub fn pool_reports(&self, pool: &str) -> Vec<PeerPool> {
        let peers = self.peers.load();
        peers.iter().filter_map(|peer| peer.pool(pool)).collect()
    }

    /// Returns a future that ends when a peer is removed from now on.
    pub fn peer_removed(&self) -> impl Future<Output = ()> + use<> {
        self.removed.clone().notified_owned()
    }

    /// Selects the best peer that holds the node: one that answers before one that does not, then one that does not drain, then
    /// a link without bulk, then the link with the fewest streams. A peer that has just refused a request, because it does not
    /// hold the node, is not selected.
    pub fn select(&self, node: &NodeName, worker: WorkerId) -> Option<SelectedPeer> {
        let now = Instant::now();
        let peers = self.peers.load();
        let candidates = peers.iter().filter_map(|peer| {
            let (link, rank) = peer.candidate(node, worker, now)?;
            Some((peer, link, rank))
        });
        let (peer, link, rank) = candidates.min_by_key(|(_, link, rank)| {
            let load = link.tunnel.load();
            (*rank, load.is_bulk(now), load.open_streams())
        })?;
        Some(SelectedPeer {
            peer: peer.clone(),
            link,
            is_last_resort: rank != BEST_RANK,
        })
    }

    /// Returns a peer that holds the node, answers and does not drain: another one than `asked`.
    pub fn alternative(
        &self,
        node: &NodeName,
        worker: WorkerId,
        asked: Option<&Peer>,
    ) -> Option<(Arc<Peer>, Arc<PeerLink>)> {
        let now = Instant::now();
        let peers = self.peers.load();
        let mut others = peers
            .iter()
            .filter(|peer| asked.is_none_or(|asked| peer.instance != asked.instance));
        others.find_map(|peer| {
            let (link, rank) = peer.candidate(node, worker, now)?;
            (rank == BEST_RANK).then(|| (peer.clone(), link))
        })
    }

    /// Returns the peers that hold a node.
    pub fn holders(&self, node: &NodeName) -> Vec<(Arc<Peer>, HeldState)> {
        let peers = self.peers.load();
        let holders = peers
            .iter()
            .filter_map(|peer| Some((peer.clone(), peer.node(node)?)));
        holders.collect()
    }

    /// Returns the number of peers that answer, that do not answer at present, and that drain, and the number of nodes that they
    /// hold.
    pub fn count(&self) -> ([usize; 3], usize) {
        let peers = self.peers.load();
        let mut by_state = [0; 3];
        for peer in peers.iter() {
            let state = match (peer.is_suspect(), peer.is_draining()) {
                (true, _) => 1,
                (false, true) => 2,
                (false, false) => 0,
            };
            by_state[state] += 1;
        }
        (by_state, peers.iter().map(|peer| peer.node_count()).sum())
    }

    /// Whether any peer answers and does not drain, so that edges can connect to it.
    pub fn has_active_peer(&self) -> bool {
        let peers = self.peers.load();
        let mut peers = peers.iter();
        peers.any(|peer| !peer.is_suspect() && !peer.is_draining())
    }

    /// Returns the longest time for which a peer has not answered a probe.
    pub fn lag(&self) -> Duration {
        let peers = self.peers.load();
        let lags = peers.iter().map(|peer| peer.control.unanswered_for());
        lags.max().unwrap_or_default()
    }

    fn change(&self) -> MutexGuard<'_, ()> {
        self.change_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
