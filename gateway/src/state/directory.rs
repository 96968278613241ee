//! Directory: the nodes that other gateways (peers) hold, and the links by which requests reach them.
//!
//! Only the gateway that holds a node's tunnel states that it does. `control::peers` writes what each peer states, and removes it
//! with the connection that stated it. So an entry is at most as old as that connection is silent. An entry that is wrong costs
//! one round trip: the peer refuses the request, and the next holder receives it (`proxy::peer`).

use crate::worker::WorkerId;
use arc_swap::{ArcSwap, ArcSwapOption};
use causeway_certs::NodeName;
use causeway_tunnel::Tunnel;
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::SystemTime,
};
use tokio::time::Instant;

/// Identifier of a tunnel, or of a link to a peer, in this process; higher is newer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TunnelId(pub u64);

/// Directory of a gateway. Cheap to clone, for any thread.
#[derive(Clone, Debug, Default)]
pub struct Directory {
    peers: Arc<ArcSwap<Vec<Arc<Peer>>>>,
    /// Held while the list changes.
    change_lock: Arc<Mutex<()>>,
}

/// State of a node at the gateway that holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldState {
    /// A tunnel takes streams.
    Connected,
    /// All tunnels of the node drain.
    Draining,
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
    /// Time at which the connection was opened.
    pub since: SystemTime,
    /// Its control connection.
    control: Tunnel,
    nodes: RwLock<HashMap<NodeName, HeldState>>,
    /// Connections for requests, one for each worker.
    links: Box<[ArcSwapOption<PeerLink>]>,
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
            since: SystemTime::now(),
            control,
            nodes: RwLock::default(),
            links: (0..workers).map(|_| ArcSwapOption::empty()).collect(),
            is_synchronized: AtomicBool::new(false),
            is_draining: AtomicBool::new(false),
        }
    }

    /// Replaces all nodes of the peer.
    pub fn replace_nodes(&self, nodes: HashMap<NodeName, HeldState>) {
        *self.write_nodes() = nodes;
        self.is_synchronized.store(true, Relaxed);
    }

    /// Sets the state of one node; `None` if the peer no longer holds it.
    pub fn set_node(&self, node: NodeName, state: Option<HeldState>) {
        let mut nodes = self.write_nodes();
        match state {
            Some(state) => {
                nodes.insert(node, state);
            }
            None => {
                nodes.remove(&node);
            }
        }
    }

    /// Records that the peer drains.
    pub fn mark_draining(&self) {
        self.is_draining.store(true, Relaxed);
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
        self.read_nodes().get(node).copied()
    }

    /// Returns the number of nodes that the peer holds.
    pub fn node_count(&self) -> usize {
        self.read_nodes().len()
    }

    /// Returns the names of the nodes that the peer holds.
    pub fn node_names(&self) -> Vec<NodeName> {
        self.read_nodes().keys().cloned().collect()
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

    fn read_nodes(&self) -> RwLockReadGuard<'_, HashMap<NodeName, HeldState>> {
        self.nodes.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_nodes(&self) -> RwLockWriteGuard<'_, HashMap<NodeName, HeldState>> {
        self.nodes.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn usable_link(slot: &ArcSwapOption<PeerLink>) -> Option<Arc<PeerLink>> {
    slot.load_full().filter(|link| link.tunnel.is_open())
}

impl Directory {
    /// Returns all peers.
    pub fn peers(&self) -> Arc<Vec<Arc<Peer>>> {
        self.peers.load_full()
    }

    /// Adds a peer. Returns false if there is a peer with this instance already: the process has several addresses.
    pub fn add(&self, peer: &Arc<Peer>) -> bool {
        let _changing = self.change();
        let mut all = Vec::clone(&self.peers.load());
        if all.iter().any(|known| known.instance == peer.instance) {
            return false;
        }
        all.push(peer.clone());
        self.peers.store(Arc::new(all));
        true
    }

    /// Removes a peer, with all of its entries.
    pub fn remove(&self, peer: &Arc<Peer>) {
        let _changing = self.change();
        let mut all = Vec::clone(&self.peers.load());
        all.retain(|known| !Arc::ptr_eq(known, peer));
        self.peers.store(Arc::new(all));
    }

    /// Selects the best peer that holds the node: one that answers before one that does not, then one that does not drain, then
    /// a link without bulk, then the link with the fewest streams. `excluded` has refused the request already.
    pub fn select(
        &self,
        node: &NodeName,
        worker: WorkerId,
        excluded: Option<&Peer>,
    ) -> Option<SelectedPeer> {
        let now = Instant::now();
        let peers = self.peers.load();
        let candidates = peers.iter().filter_map(|peer| {
            if excluded.is_some_and(|excluded| std::ptr::eq(excluded, &raw const **peer)) {
                return None;
            }
            let drains = peer.node(node)? == HeldState::Draining || peer.is_draining();
            Some((peer, peer.link(worker)?, (peer.is_suspect(), drains)))
        });
        let (peer, link, rank) = candidates.min_by_key(|(_, link, rank)| {
            let load = link.tunnel.load();
            (*rank, load.is_bulk(now), load.open_streams())
        })?;
        Some(SelectedPeer {
            peer: peer.clone(),
            link,
            is_last_resort: rank != (false, false),
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

    fn change(&self) -> MutexGuard<'_, ()> {
        self.change_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
