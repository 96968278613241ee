//! Registry of the tunnels of this gateway, by node.
//!
//! The registry owns the only map from node name to live tunnels, and selects among them. It never dials, waits or calls
//! Kubernetes: `control::tunnel_listener` writes it, and `proxy` reads it. The newest registration wins. Removal compares tunnel
//! ids, so the teardown of a half-dead tunnel cannot unregister its successor. A tunnel leaves when another one has taken over or
//! its edge has announced it. A draining tunnel stays registered until its streams have ended. Only a tunnel that its own process
//! has given up is closed. The registry has a shard for each worker, so a request takes no lock that another worker's requests
//! hold.

mod rank;
mod shard;
mod waiting;

use crate::{
    state::directory::{Directory, HeldState, Peer, PeerLink, TunnelId, is_late},
    worker::{WorkerId, Workers},
};
use arc_swap::ArcSwapOption;
use causeway_certs::{Fingerprint, NodeName};
use causeway_tunnel::{
    Tunnel,
    buffered::NodeBudget,
    control_stream::{EdgeHello, GatewayMessage},
    wire::MAX_TUNNELS_PER_EDGE,
};
use rustls::pki_types::CertificateDer;
use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};
use tokio::{
    sync::{Notify, Semaphore, SemaphorePermit, broadcast, mpsc},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

pub use rank::NodeRank;
use shard::{Shard, ShardEntry};

/// Tunnel to register, whose hello was answered and checked.
#[derive(Clone, Debug)]
pub struct NewTunnel {
    /// The tunnel.
    pub tunnel: Tunnel,
    /// Hello of the edge.
    pub hello: Arc<EdgeHello>,
    /// Address from which the edge dialled.
    pub remote_address: SocketAddr,
    /// Certificate of the edge on this tunnel.
    pub certificate: EdgeCertificate,
    /// Roots that the edge trusts, if it reports them.
    pub roots: Arc<ArcSwapOption<Vec<Fingerprint>>>,
    /// Digest of the CRLs of gateways that the edge has acknowledged last.
    pub crls: Arc<ArcSwapOption<Fingerprint>>,
    /// Node ports whose health checks fail, as the edge has reported them last; none by default.
    pub unhealthy_ports: Arc<ArcSwapOption<Vec<u16>>>,
    /// Channel to the tunnel's control stream. Boxed, because a channel allocates 32 messages at the start.
    pub control: mpsc::Sender<Box<GatewayMessage>>,
    /// Cancelled when another tunnel has taken over. This tunnel then closes with its last stream.
    pub taken_over: CancellationToken,
}

/// Certificate of an edge on a tunnel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EdgeCertificate {
    /// Serial number in hexadecimal.
    pub serial: String,
    /// Time of issue, in Unix seconds.
    pub issued_at: u64,
    /// End of the validity in Unix seconds, inclusive.
    pub not_after: u64,
    /// Root under which the certificate was verified.
    pub root: Option<Fingerprint>,
    /// Whole certificate chain, if an external CA has issued it, because the root alone is then not sufficient.
    pub external_chain: Option<Arc<[CertificateDer<'static>]>>,
}

/// Registered tunnel, as other modules see it.
#[derive(Clone, Debug)]
pub struct TunnelInfo {
    /// Identifier of the tunnel.
    pub id: TunnelId,
    /// The tunnel and its data.
    pub tunnel: NewTunnel,
    /// Time of the registration.
    pub since: SystemTime,
    /// Whether the tunnel closes with its last stream.
    is_leaving: bool,
}

impl TunnelInfo {
    /// Whether the tunnel closes with its last stream, because another one has taken over or its edge has announced it. Such a
    /// tunnel gets a new stream only if the edge stops and the node has no other tunnel.
    pub fn is_leaving(&self) -> bool {
        self.is_leaving
    }

    /// Returns the number of clients' streams that are open on the tunnel.
    pub fn streams(&self) -> usize {
        let streams = self.tunnel.tunnel.load().open_streams();
        streams.saturating_sub(CONTROL_STREAMS)
    }
}

/// Time at which a node lost its last tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndTime {
    /// The time by the wall clock, for people.
    pub wall_clock: SystemTime,
    /// The same for comparisons, because the wall clock may be corrected.
    instant: Instant,
}

impl EndTime {
    fn now() -> Self {
        Self {
            wall_clock: SystemTime::now(),
            instant: Instant::now(),
        }
    }

    /// Returns the duration since then.
    pub fn elapsed(self) -> Duration {
        self.instant.elapsed()
    }
}

/// Reason why no tunnel of a node can be selected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeUnavailable {
    /// This process never saw the node.
    NeverSeen,
    /// The node has no tunnel now; the end of its last one.
    LastSeen {
        /// Time at which its last tunnel ended.
        ended_at: EndTime,
        /// Address from which the edge dialled that tunnel.
        remote_address: SocketAddr,
    },
    /// Another gateway had the node's last tunnel.
    LeftPeer {
        /// Time at which that gateway no longer held the node.
        ended_at: EndTime,
        /// Address of that gateway.
        gateway: Arc<str>,
    },
    /// The node's tunnels are connected and do not answer.
    Suspect {
        /// Address from which the edge dialled the newest of these tunnels.
        remote_address: SocketAddr,
    },
    /// All tunnels of the node drain.
    Draining,
}

/// Reason why a tunnel was not registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegisterError {
    /// This instance of the edge was superseded by another one that is still running.
    Superseded {
        /// The instance that took over the node.
        instance: String,
        /// Address from which that instance dialled.
        remote_address: SocketAddr,
    },
    /// This instance already has [`MAX_TUNNELS_PER_EDGE`] tunnels.
    TooManyTunnels,
}

/// Tunnel that a registration replaced.
#[derive(Debug)]
pub struct ReplacedTunnel {
    /// The tunnel.
    pub tunnel: TunnelInfo,
    /// Effect of the replacement on the tunnel.
    pub mode: ReplaceMode,
}

/// Effect of a registration on the tunnel that it replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplaceMode {
    /// Another process took over the node. The edge is notified, and its streams continue until they end.
    Superseded,
    /// The same process has dialled again, and has given this tunnel up.
    Lost,
    /// The same process has dialled again, and uses this tunnel until its streams have ended.
    TakenOver,
}

#[derive(Debug, Default)]
struct NodeTunnels {
    tunnels: Vec<TunnelInfo>,
    /// Instances that were replaced while their successor is running, limited to the latest ones.
    superseded: VecDeque<String>,
    last_seen: Option<(EndTime, SocketAddr)>,
    /// Time at which the last other gateway no longer held the node, and the address of that gateway.
    left_peer: Option<(EndTime, Arc<str>)>,
    streams: Arc<AtomicUsize>,
    node_budget: Arc<NodeBudget>,
    /// Notifies requests that wait for a tunnel of this node.
    tunnel_registered: Option<Arc<Notify>>,
}

/// Number of streams of an idle tunnel, which has its control stream open.
const CONTROL_STREAMS: usize = 1;

/// Number of changed nodes that are kept for peers that have not read them yet. A peer that needs more receives all nodes again.
const MAX_KEPT_CHANGES: usize = 4096;

/// Maximum number of draining tunnels of a node without streams that wait for their end. Beyond it, the oldest is closed.
const MAX_IDLE_LEAVING: usize = 16;

/// Maximum number of stored replaced instances of a node. Two or three running instances are a mistake.
const MAX_SUPERSEDED: usize = 16;

/// Registry of tunnels. Cheap to clone, for any thread.
#[derive(Clone, Debug)]
pub struct Registry {
    shards: Arc<[Mutex<Shard<NodeTunnels>>]>,
    workers: Workers,
    next_id: Arc<AtomicU64>,
    /// Time at which this gateway began to serve clients, if it has.
    serving_since: Arc<OnceLock<Instant>>,
    started_at: Instant,
    wait_permits: Arc<Semaphore>,
    /// Cancelled when the gateway drains.
    drain_token: CancellationToken,
    /// Copy of the token's state for requests, because reading the token takes a lock.
    is_draining: Arc<AtomicBool>,
    /// Cancelled when the drain time is over, and tunnels are closed together with their streams.
    drain_expired: CancellationToken,
    /// Whether this gateway has no fewer nodes than the average of the gateways.
    is_crowded: Arc<AtomicBool>,
    /// Nodes that other gateways hold.
    directory: Directory,
    /// Sender of the nodes whose tunnels have changed.
    changes: broadcast::Sender<NodeName>,
    /// Number of times that a tunnel was registered here or a peer has reported a node.
    arrivals: Arc<AtomicU64>,
}

/// Maximum number of requests that wait for tunnels. Further requests are refused at once.
const MAX_WAITING_REQUESTS: usize = 4096;

/// Permit of one request to wait for tunnels.
#[derive(Debug)]
pub struct WaitPermit<'a>(
    #[expect(dead_code, reason = "dropping it returns the permit")] SemaphorePermit<'a>,
);

/// Tunnel selected for one request.
#[derive(Clone, Debug)]
pub struct SelectedTunnel {
    /// The tunnel.
    pub tunnel: Tunnel,
    /// Identifier of the tunnel.
    pub id: TunnelId,
    /// Number of open streams of the node's clients; see `proxy::limits`.
    pub streams: Arc<AtomicUsize>,
    /// The other gateway that holds the node, if this gateway does not. The tunnel is then a link to that gateway.
    pub peer: Option<Arc<Peer>>,
}

impl SelectedTunnel {
    /// Whether the tunnel does not answer at present, so that another gateway's tunnel is better.
    pub fn is_late(&self) -> bool {
        is_late(&self.tunnel)
    }
}

impl Registry {
    /// Returns an empty registry with a shard for each worker.
    pub fn new(workers: &Workers) -> Self {
        Self {
            shards: Shard::all(workers.all().count()),
            workers: workers.clone(),
            next_id: Arc::new(AtomicU64::new(1)),
            serving_since: Arc::default(),
            started_at: Instant::now(),
            wait_permits: Arc::new(Semaphore::new(MAX_WAITING_REQUESTS)),
            drain_token: CancellationToken::new(),
            is_draining: Arc::default(),
            drain_expired: CancellationToken::new(),
            is_crowded: Arc::default(),
            directory: Directory::default(),
            changes: broadcast::Sender::new(MAX_KEPT_CHANGES),
            arrivals: Arc::default(),
        }
    }

    /// Sets whether this gateway has no fewer nodes than the average, so that it takes no edge of another gateway.
    pub fn set_crowded(&self, is_crowded: bool) {
        self.is_crowded.store(is_crowded, Relaxed);
    }

    /// Whether this gateway takes no edge of another gateway.
    pub fn is_crowded(&self) -> bool {
        self.is_crowded.load(Relaxed)
    }

    /// Returns the directory of the nodes that other gateways hold.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Returns an identifier for one more connection that carries streams.
    pub fn next_tunnel_id(&self) -> TunnelId {
        TunnelId(self.next_id.fetch_add(1, Relaxed))
    }

    /// Returns a receiver of the nodes whose tunnels change from now on.
    pub fn watch_changes(&self) -> broadcast::Receiver<NodeName> {
        self.changes.subscribe()
    }

    /// Notifies peers that a tunnel of this node has begun to drain.
    pub fn notify_change(&self, node: &NodeName) {
        if self.changes.receiver_count() > 0 {
            // The send fails only if the last receiver has just gone.
            let _ = self.changes.send(node.clone());
        }
    }

    /// Wakes the requests that wait for a tunnel of this node, because a peer holds it now.
    pub fn wake_waiting(&self, node: &NodeName) {
        if let Some(entry) = self.shard(node).nodes.get_mut(node)
            && let Some(arrival) = entry.tunnel_registered.take()
        {
            arrival.notify_waiters();
        }
    }

    /// Records that a peer no longer holds this node. Requests then wait for the node as after the loss of an own tunnel.
    pub fn record_left_peer(&self, node: &NodeName, gateway: &Arc<str>) {
        self.shard(node).entry(node).left_peer = Some((EndTime::now(), gateway.clone()));
    }

    /// Returns the state of a node that this gateway holds.
    pub fn held_state(&self, node: &NodeName) -> Option<HeldState> {
        self.shard(node).nodes.get(node)?.held_state()
    }

    /// Returns all nodes that this gateway holds. Locks one shard at a time.
    pub fn held_nodes(&self) -> Vec<(NodeName, HeldState)> {
        let mut held = Vec::new();
        for shard in self.shards.iter() {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let nodes = shard
                .nodes
                .iter()
                .filter_map(|(node, entry)| Some((node.clone(), entry.held_state()?)));
            held.extend(nodes);
        }
        held
    }

    /// Returns the memory budget that all tunnels of a node share, registered or not.
    pub fn node_budget(&self, node: &NodeName) -> Arc<NodeBudget> {
        self.shard(node).entry(node).node_budget.clone()
    }

    /// Registers a tunnel. Returns the tunnels that it replaces, whose edges must be notified and which must be closed.
    ///
    /// # Errors
    /// If this instance of the edge was superseded by another one, or has the maximum number of tunnels.
    pub fn register(
        &self,
        node: &NodeName,
        new_tunnel: NewTunnel,
    ) -> Result<(TunnelId, Vec<ReplacedTunnel>), RegisterError> {
        let (id, replaced) = self.insert(node, new_tunnel)?;
        self.notify_change(node);
        Ok((id, replaced))
    }

    fn insert(
        &self,
        node: &NodeName,
        new_tunnel: NewTunnel,
    ) -> Result<(TunnelId, Vec<ReplacedTunnel>), RegisterError> {
        let mut shard = self.shard(node);
        let entry = shard.entry(node);
        let instance = new_tunnel.hello.instance.clone();
        let successor = entry
            .tunnels
            .iter()
            .find(|edge| !edge.is_leaving && edge.tunnel.hello.instance != instance);
        if let Some(newer) = successor.filter(|_| entry.superseded.contains(&instance)) {
            return Err(RegisterError::Superseded {
                instance: newer.tunnel.hello.instance.clone(),
                remote_address: newer.tunnel.remote_address,
            });
        }
        let slot = new_tunnel.hello.slot;
        if entry.count_other_slots(&instance, slot) >= MAX_TUNNELS_PER_EDGE {
            return Err(RegisterError::TooManyTunnels);
        }
        entry.supersede_others(&instance);
        let replaced = entry.make_room(&new_tunnel.hello);
        let id = self.next_tunnel_id();
        // Most nodes have one tunnel, and a vector begins with the memory of four.
        entry.tunnels.reserve_exact(1);
        entry.tunnels.push(TunnelInfo {
            id,
            tunnel: new_tunnel,
            since: SystemTime::now(),
            is_leaving: false,
        });
        if let Some(arrival) = entry.tunnel_registered.take() {
            arrival.notify_waiters();
        }
        self.record_arrival();
        Ok((id, replaced))
    }

    /// Records that a tunnel's edge has announced that it leaves.
    pub fn mark_leaving(&self, node: &NodeName, id: TunnelId) {
        let mut shard = self.shard(node);
        let tunnels = shard.nodes.get_mut(node).map(|entry| &mut entry.tunnels);
        let mut tunnels = tunnels.into_iter().flatten();
        let is_new = tunnels
            .find(|edge| edge.id == id)
            .is_some_and(|edge| !std::mem::replace(&mut edge.is_leaving, true));
        drop(shard);
        if is_new {
            self.notify_change(node);
        }
    }

    /// Removes a tunnel, if it is registered. Returns whether it was.
    pub fn unregister(&self, node: &NodeName, id: TunnelId) -> bool {
        let mut shard = self.shard(node);
        let Some(entry) = shard.nodes.get_mut(node) else {
            return false;
        };
        let Some(at) = entry.tunnels.iter().position(|edge| edge.id == id) else {
            return false;
        };
        let removed = entry.tunnels.remove(at);
        entry.last_seen = Some((EndTime::now(), removed.tunnel.remote_address));
        if entry.tunnels.is_empty() {
            entry.superseded.clear();
        }
        drop(shard);
        self.notify_change(node);
        true
    }

    /// Selects a tunnel of this gateway for a new stream, or a link to a peer that holds the node. The own tunnel is preferred,
    /// unless it does not answer, or drains and the peer's does not.
    ///
    /// # Errors
    /// The reason why this gateway has no tunnel, if no peer has one either.
    pub fn select_tunnel(&self, node: &NodeName) -> Result<SelectedTunnel, NodeUnavailable> {
        let own = match self.select_own_tunnel(node) {
            Ok((own, false)) if !own.is_late() => return Ok(own),
            own => own,
        };
        let selected = self.directory.select(node, self.worker(node));
        match selected.filter(|selected| own.is_err() || !selected.is_last_resort) {
            Some(selected) => Ok(self.through_peer(node, selected.peer, &selected.link)),
            None => own.map(|(own, _)| own),
        }
    }

    /// Returns another tunnel or peer than this one, if there is one that answers and does not drain.
    pub fn select_other(
        &self,
        node: &NodeName,
        (id, peer): (TunnelId, Option<&Peer>),
    ) -> Option<SelectedTunnel> {
        if let Ok((own, false)) = self.select_own_tunnel(node)
            && own.id != id
            && !own.is_late()
        {
            return Some(own);
        }
        let other = self.directory.alternative(node, self.worker(node), peer);
        other.map(|(peer, link)| self.through_peer(node, peer, &link))
    }

    fn through_peer(&self, node: &NodeName, peer: Arc<Peer>, link: &PeerLink) -> SelectedTunnel {
        SelectedTunnel {
            tunnel: link.tunnel.clone(),
            id: link.id,
            streams: self.streams_of(node),
            peer: Some(peer),
        }
    }

    /// Returns the ports of a node whose health checks fail, as the edge reports them to this gateway.
    pub fn unhealthy_ports(&self, node: &NodeName) -> Vec<u16> {
        let shard = self.shard(node);
        let entry = shard.nodes.get(node);
        entry.map(NodeTunnels::unhealthy_ports).unwrap_or_default()
    }

    fn streams_of(&self, node: &NodeName) -> Arc<AtomicUsize> {
        self.shard(node).entry(node).streams.clone()
    }

    /// Selects the best open tunnel of this gateway for a new stream: not draining before draining, one that answers before one that
    /// does not, not bulk before bulk, then the fewest streams. Also returns whether that tunnel drains.
    ///
    /// # Errors
    /// The reason why no tunnel can be selected.
    pub fn select_own_tunnel(
        &self,
        node: &NodeName,
    ) -> Result<(SelectedTunnel, bool), NodeUnavailable> {
        let now = Instant::now();
        let shard = self.shard(node);
        let entry = shard.nodes.get(node).ok_or(NodeUnavailable::NeverSeen)?;
        let best = entry
            .tunnels
            .iter()
            .filter(|edge| edge.tunnel.tunnel.is_open())
            .min_by_key(|edge| {
                let tunnel = &edge.tunnel.tunnel;
                let load = tunnel.load();
                let (is_late, is_bulk) = (is_late(tunnel), load.is_bulk(now));
                (edge.is_leaving, is_late, is_bulk, load.open_streams())
            });
        match best {
            Some(edge) => {
                let selected = SelectedTunnel {
                    tunnel: edge.tunnel.tunnel.clone(),
                    id: edge.id,
                    streams: entry.streams.clone(),
                    peer: None,
                };
                Ok((selected, edge.is_leaving))
            }
            None => Err(entry.unavailable()),
        }
    }

    /// Records that this gateway or a peer has a tunnel of a further node.
    pub fn record_arrival(&self) {
        self.arrivals.fetch_add(1, Relaxed);
    }

    /// Returns the number of arrivals of nodes so far. As long as it stays the same, no further node is connected.
    pub fn arrivals(&self) -> u64 {
        self.arrivals.load(Relaxed)
    }

    /// Whether this gateway or a peer has a tunnel of this node.
    pub fn is_connected(&self, node: &NodeName) -> bool {
        let is_held = |peer: &Arc<Peer>| peer.node(node).is_some();
        self.has_tunnel(node) || self.directory.peers().iter().any(is_held)
    }

    /// Whether any tunnel of this node is registered.
    pub fn has_tunnel(&self, node: &NodeName) -> bool {
        self.shard(node)
            .nodes
            .get(node)
            .is_some_and(|entry| !entry.tunnels.is_empty())
    }

    /// Returns the tunnels of one node, and the time and address at which its last tunnel was seen.
    pub fn node_tunnels(
        &self,
        node: &NodeName,
    ) -> (Vec<TunnelInfo>, Option<(SystemTime, SocketAddr)>) {
        match self.shard(node).nodes.get(node) {
            Some(entry) => {
                let last_seen = entry.last_seen;
                let last_seen = last_seen.map(|(end, address)| (end.wall_clock, address));
                (entry.tunnels.clone(), last_seen)
            }
            None => (Vec::new(), None),
        }
    }

    /// Returns all tunnels of all nodes. Locks one shard at a time.
    pub fn all(&self) -> Vec<(NodeName, TunnelInfo)> {
        let mut all = Vec::new();
        self.for_each_tunnel(|node, edge| all.push((node.clone(), edge.clone())));
        all
    }

    /// Calls a function with each tunnel. Locks one shard at a time, so the function must be short.
    pub fn for_each_tunnel(&self, mut visit: impl FnMut(&NodeName, &TunnelInfo)) {
        for shard in self.shards.iter() {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            for (node, entry) in &shard.nodes {
                entry.tunnels.iter().for_each(|edge| visit(node, edge));
            }
        }
    }

    /// Returns the number of nodes with a tunnel. Locks one shard at a time.
    pub fn connected_nodes(&self) -> usize {
        let count = |shard: &Mutex<Shard<NodeTunnels>>| {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard
                .nodes
                .values()
                .filter(|entry| !entry.tunnels.is_empty())
                .count()
        };
        self.shards.iter().map(count).sum()
    }

    /// Returns the worker of a node.
    pub fn worker(&self, node: &NodeName) -> WorkerId {
        self.workers.worker_of(node)
    }

    fn shard(&self, node: &NodeName) -> MutexGuard<'_, Shard<NodeTunnels>> {
        self.shards[self.workers.worker_of(node).0]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl ShardEntry for NodeTunnels {
    fn is_in_use(&self) -> bool {
        let awaited = self.tunnel_registered.as_ref();
        !self.tunnels.is_empty()
            || Arc::strong_count(&self.streams) > 1
            || Arc::strong_count(&self.node_budget) > 1
            || awaited.is_some_and(|notify| Arc::strong_count(notify) > 1)
    }

    fn away_since(&self) -> Option<Instant> {
        let own = self.last_seen.map(|(end, _)| end.instant);
        own.max(self.left_peer.as_ref().map(|(end, _)| end.instant))
    }
}

impl NodeTunnels {
    /// Stores the other processes of this node, which must not take the node back while their successor is running.
    fn supersede_others(&mut self, instance: &str) {
        let other_hellos = self.tunnels.iter().map(|edge| &edge.tunnel.hello);
        for other in other_hellos.filter(|other| other.instance != instance) {
            if !self.superseded.contains(&other.instance) {
                self.superseded.push_back(other.instance.clone());
            }
        }
        self.superseded.retain(|known| known != instance);
        let excess = self.superseded.len().saturating_sub(MAX_SUPERSEDED);
        self.superseded.drain(..excess);
    }

    /// Retires the tunnels that a new one replaces. Each keeps its streams, unless its own process has given it up. A process
    /// that dials endlessly leaves no more idle tunnels than [`MAX_IDLE_LEAVING`].
    fn make_room(&mut self, new_hello: &EdgeHello) -> Vec<ReplacedTunnel> {
        let (mut replaced, mut remaining) = (Vec::new(), Vec::new());
        for mut edge in std::mem::take(&mut self.tunnels) {
            let old = &edge.tunnel.hello;
            let mode = if edge.is_leaving {
                None
            } else if old.instance != new_hello.instance {
                Some(ReplaceMode::Superseded)
            } else if old.slot != new_hello.slot {
                None
            } else if new_hello.takes_over {
                Some(ReplaceMode::TakenOver)
            } else {
                Some(ReplaceMode::Lost)
            };
            if let Some(mode) = mode {
                // Takes effect at once: the new tunnel is selected from here on.
                edge.is_leaving = true;
                edge.tunnel.tunnel.drain();
                let edge = edge.clone();
                replaced.push(ReplacedTunnel { tunnel: edge, mode });
            }
            if mode != Some(ReplaceMode::Lost) {
                remaining.push(edge);
            }
        }
        let is_idle = |edge: &TunnelInfo| edge.is_leaving && edge.streams() == 0;
        let mut excess_idle = remaining.iter().filter(|edge| is_idle(edge)).count();
        excess_idle = excess_idle.saturating_sub(MAX_IDLE_LEAVING);
        for edge in remaining.extract_if(.., |edge| {
            let closes = excess_idle > 0 && is_idle(edge);
            excess_idle -= usize::from(closes);
            closes
        }) {
            let fate = ReplaceMode::Lost;
            replaced.push(ReplacedTunnel {
                tunnel: edge,
                mode: fate,
            });
        }
        self.tunnels = remaining;
        replaced
    }

    /// Returns the ports whose health checks fail, as the newest tunnel reports them.
    fn unhealthy_ports(&self) -> Vec<u16> {
        let newest = self.tunnels.last();
        let reported = newest.and_then(|edge| edge.tunnel.unhealthy_ports.load_full());
        reported.map(|ports| Vec::clone(&ports)).unwrap_or_default()
    }

    /// Returns the state of the node for peers; `None` if no tunnel is open.
    fn held_state(&self) -> Option<HeldState> {
        // A tunnel that does not answer at present counts: no change would be noticed when it does again.
        let is_connected = |edge: &TunnelInfo| {
            let tunnel = &edge.tunnel.tunnel;
            !edge.is_leaving && !tunnel.is_draining() && !tunnel.is_closed()
        };
        if self.tunnels.iter().any(is_connected) {
            return Some(HeldState::Connected);
        }
        let is_usable = |edge: &TunnelInfo| !edge.tunnel.tunnel.is_closed();
        self.tunnels
            .iter()
            .any(is_usable)
            .then_some(HeldState::Draining)
    }

    /// Returns the number of tunnels of an instance in other slots than this one.
    fn count_other_slots(&self, instance: &str, slot: u32) -> u32 {
        let other_tunnels = self.tunnels.iter().filter(|edge| {
            let hello = &edge.tunnel.hello;
            hello.instance == instance && hello.slot != slot && !edge.is_leaving
        });
        u32::try_from(other_tunnels.count()).unwrap_or(u32::MAX)
    }

    fn unavailable(&self) -> NodeUnavailable {
        let mut newest_first = self.tunnels.iter().rev().map(|edge| &edge.tunnel);
        if let Some(newest) = newest_first.find(|admitted| !admitted.tunnel.is_closed()) {
            return if newest.tunnel.is_draining() {
                NodeUnavailable::Draining
            } else {
                NodeUnavailable::Suspect {
                    remote_address: newest.remote_address,
                }
            };
        }
        // A tunnel that has just ended stays registered until its session has noticed the end.
        let ended_tunnel = self.tunnels.last();
        let ended = ended_tunnel.map(|edge| (EndTime::now(), edge.tunnel.remote_address));
        match (ended.or(self.last_seen), &self.left_peer) {
            (Some((seen, remote_address)), left_peer)
                if left_peer
                    .as_ref()
                    .is_none_or(|(left, _)| left.instant <= seen.instant) =>
            {
                NodeUnavailable::LastSeen {
                    ended_at: seen,
                    remote_address,
                }
            }
            (_, Some((ended_at, gateway))) => NodeUnavailable::LeftPeer {
                ended_at: *ended_at,
                gateway: gateway.clone(),
            },
            (_, None) => NodeUnavailable::NeverSeen,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
