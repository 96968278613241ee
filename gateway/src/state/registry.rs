//! The registry: which tunnels this replica holds, by node.
//!
//! Owns the only map from node name to live tunnels, and the choice among them.
//! Never dials, waits or asks Kubernetes: `control::admit` writes, `proxy` reads.
//! The newest registration wins; removal compares tunnel ids, so the teardown
//! of a half-dead tunnel cannot unregister its successor. A tunnel that leaves (another
//! one has taken over, or its edge has announced it) stays on the list until its streams
//! have ended, whatever is registered beside it. Only a tunnel that its own process has
//! given up is closed. The registry has a shard for each worker: a request takes no lock
//! that another worker's requests hold.

use crate::worker::{WorkerId, Workers};
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
    collections::{HashMap, VecDeque},
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};
use tokio::{
    sync::{Notify, Semaphore, mpsc},
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

/// The identity of one tunnel in this process; higher is newer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TunnelId(pub u64);

/// A tunnel that may be registered: its hello is answered and checked.
#[derive(Clone, Debug)]
pub struct NewTunnel {
    /// The tunnel.
    pub tunnel: Tunnel,
    /// Hello of the edge.
    pub hello: Arc<EdgeHello>,
    /// Address from which the edge dialled.
    pub remote_address: SocketAddr,
    /// The certificate of the edge on this tunnel.
    pub certificate: EdgeCertificate,
    /// The roots that the edge trusts, if it announces them.
    pub roots: Arc<ArcSwapOption<Vec<Fingerprint>>>,
    /// Messages for the tunnel's control stream. Boxed: a channel has room for 32 of them from the start.
    pub control: mpsc::Sender<Box<GatewayMessage>>,
    /// Cancelled when another tunnel has taken over: this one closes with its last stream.
    pub taken_over: CancellationToken,
}

/// Certificate of an edge on a tunnel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EdgeCertificate {
    /// Its serial number, in hexadecimal.
    pub serial: String,
    /// When it was issued, in Unix seconds.
    pub issued_at: u64,
    /// Its last second, in Unix time.
    pub not_after: u64,
    /// The root on which it hangs.
    pub root: Option<Fingerprint>,
    /// The whole certificate chain, if an external CA has issued it: the root alone is then not sufficient.
    pub external_chain: Option<Arc<[CertificateDer<'static>]>>,
}

/// A registered tunnel, as seen from outside.
#[derive(Clone, Debug)]
pub struct TunnelInfo {
    /// The tunnel's identity.
    pub id: TunnelId,
    /// The tunnel and its data.
    pub tunnel: NewTunnel,
    /// When it was registered.
    pub since: SystemTime,
    /// It closes with its last stream.
    is_leaving: bool,
}

impl TunnelInfo {
    /// Whether the tunnel closes with its last stream: another one has taken over, or its edge has announced it. It gets a
    /// new stream only if the edge stops and the node has no other tunnel.
    pub fn is_leaving(&self) -> bool {
        self.is_leaving
    }

    /// Returns the number of clients' streams that are open on the tunnel.
    pub fn streams(&self) -> usize {
        let streams = self.tunnel.tunnel.load().open_streams();
        streams.saturating_sub(CONTROL_STREAMS)
    }
}

/// Why a node has no tunnel to choose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeUnavailable {
    /// It was never seen by this process.
    NeverSeen,
    /// It was last seen then, from there.
    LastSeen {
        /// When its last tunnel ended.
        ended_at: SystemTime,
        /// Address from which that tunnel came.
        remote_address: SocketAddr,
    },
    /// Its tunnels are connected and do not answer.
    Suspect {
        /// Address from which the newest of them came.
        remote_address: SocketAddr,
    },
    /// All its tunnels drain.
    Draining,
}

/// Why a tunnel was not registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegisterError {
    /// This instance of the edge was superseded by another, which lives.
    Superseded {
        /// The instance that took the node over.
        instance: String,
        /// Address from which that instance dialled.
        remote_address: SocketAddr,
    },
    /// This instance has [`MAX_TUNNELS_PER_EDGE`] already.
    TooManyTunnels,
}

/// A tunnel that a registration replaced.
#[derive(Debug)]
pub struct ReplacedTunnel {
    /// The tunnel.
    pub tunnel: TunnelInfo,
    /// Effect of the replacement on it.
    pub mode: ReplaceMode,
}

/// Effect of a replacement on the tunnel that a registration replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplaceMode {
    /// Another process took the node over: the edge is informed, and its streams go on until they end.
    Superseded,
    /// Its own process dialled anew, and has given this one up.
    Lost,
    /// Its own process dialled anew, and uses this one until its streams have ended.
    TakenOver,
}

#[derive(Debug, Default)]
struct NodeTunnels {
    tunnels: Vec<TunnelInfo>,
    /// Instances that were replaced while their successor lives; the latest of them.
    superseded: VecDeque<String>,
    last_seen: Option<(SystemTime, SocketAddr)>,
    streams: Arc<AtomicUsize>,
    node_budget: Arc<NodeBudget>,
    /// Wakes requests that wait for a tunnel of this node.
    tunnel_registered: Option<Arc<Notify>>,
}

/// Requests that wait for tunnels at most. Further ones are refused at once.
const MAX_WAITING_REQUESTS: usize = 4096;

/// Every tunnel has its control stream open.
const CONTROL_STREAMS: usize = 1;

/// Leaving tunnels of a node without streams that wait for their end; the oldest beyond these is closed.
const MAX_IDLE_LEAVING: usize = 16;

/// Replaced instances of a node that are remembered: two of them, or three, are an accident.
const MAX_SUPERSEDED: usize = 16;

type Shard = Mutex<HashMap<NodeName, NodeTunnels>>;

/// The registry; a cheap clone for any thread.
#[derive(Clone, Debug)]
pub struct Registry {
    shards: Arc<[Shard]>,
    workers: Workers,
    next_id: Arc<AtomicU64>,
    started_at: Instant,
    wait_permits: Arc<Semaphore>,
    /// No tunnel is waited for any more.
    drain_token: CancellationToken,
    /// The same, for requests: a look at the token takes a lock.
    is_draining: Arc<AtomicBool>,
    /// The drain's time is over, and tunnels are closed with their streams.
    drain_expired: Arc<AtomicBool>,
}

/// A choice for one request.
#[derive(Clone, Debug)]
pub struct SelectedTunnel {
    /// The tunnel.
    pub tunnel: Tunnel,
    /// Its identity.
    pub id: TunnelId,
    /// Number of open streams of the node's clients; see `proxy::limits`.
    pub streams: Arc<AtomicUsize>,
}

impl Registry {
    /// An empty registry with a shard for each worker.
    pub fn new(workers: &Workers) -> Self {
        Self {
            shards: workers.all().map(|_| Shard::default()).collect(),
            workers: workers.clone(),
            next_id: Arc::new(AtomicU64::new(1)),
            started_at: Instant::now(),
            wait_permits: Arc::new(Semaphore::new(MAX_WAITING_REQUESTS)),
            drain_token: CancellationToken::new(),
            is_draining: Arc::default(),
            drain_expired: Arc::default(),
        }
    }

    /// Returns the budget that all tunnels of a node share, registered or about to be.
    pub fn node_budget(&self, node: &NodeName) -> Arc<NodeBudget> {
        let mut shard = self.shard(node);
        shard.entry(node.clone()).or_default().node_budget.clone()
    }

    /// Registers a tunnel. Returns the tunnels that it replaces, which must be informed and closed.
    ///
    /// # Errors
    /// If this instance of the edge was superseded by another, or has as many tunnels as it may have.
    pub fn register(
        &self,
        node: &NodeName,
        new_tunnel: NewTunnel,
    ) -> Result<(TunnelId, Vec<ReplacedTunnel>), RegisterError> {
        let mut shard = self.shard(node);
        let entry = shard.entry(node.clone()).or_default();
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
        let id = TunnelId(self.next_id.fetch_add(1, Relaxed));
        entry.tunnels.push(TunnelInfo {
            id,
            tunnel: new_tunnel,
            since: SystemTime::now(),
            is_leaving: false,
        });
        if let Some(arrival) = entry.tunnel_registered.take() {
            arrival.notify_waiters();
        }
        Ok((id, replaced))
    }

    /// Notes that a tunnel's edge has announced that it leaves.
    pub fn mark_leaving(&self, node: &NodeName, id: TunnelId) {
        let mut shard = self.shard(node);
        let tunnels = shard.get_mut(node).map(|held| &mut held.tunnels);
        if let Some(edge) = tunnels.into_iter().flatten().find(|edge| edge.id == id) {
            edge.is_leaving = true;
        }
    }

    /// Removes a tunnel, if it is still the one that is registered. True if it was.
    pub fn unregister(&self, node: &NodeName, id: TunnelId) -> bool {
        let mut shard = self.shard(node);
        let Some(entry) = shard.get_mut(node) else {
            return false;
        };
        let Some(at) = entry.tunnels.iter().position(|edge| edge.id == id) else {
            return false;
        };
        let removed = entry.tunnels.remove(at);
        entry.last_seen = Some((SystemTime::now(), removed.tunnel.remote_address));
        if entry.tunnels.is_empty() {
            entry.superseded.clear();
        }
        true
    }

    /// Chooses a tunnel for a new stream: open, not leaving, not bulky, fewest streams.
    ///
    /// # Errors
    /// Why there is none.
    pub fn select_tunnel(&self, node: &NodeName) -> Result<SelectedTunnel, NodeUnavailable> {
        let now = Instant::now();
        let shard = self.shard(node);
        let entry = shard.get(node).ok_or(NodeUnavailable::NeverSeen)?;
        let best = entry
            .tunnels
            .iter()
            .filter(|edge| edge.tunnel.tunnel.is_open())
            .min_by_key(|edge| {
                let load = edge.tunnel.tunnel.load();
                (edge.is_leaving, load.is_bulk(now), load.open_streams())
            });
        match best {
            Some(edge) => Ok(SelectedTunnel {
                tunnel: edge.tunnel.tunnel.clone(),
                id: edge.id,
                streams: entry.streams.clone(),
            }),
            None => Err(entry.unavailable()),
        }
    }

    /// Chooses a tunnel as [`Registry::select_tunnel`] does. A node that had a tunnel less than `wait_limit` ago is waited for until `wait_limit`
    /// is over, and so is any node as long ago as this gateway started: its edge is probably dialling.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn select_tunnel_within(
        &self,
        node: &NodeName,
        wait_limit: Duration,
    ) -> Result<SelectedTunnel, NodeUnavailable> {
        let unavailable = match self.select_tunnel(node) {
            Err(away) if !self.drain_token.is_cancelled() => away,
            picked => return picked,
        };
        let offline_for = match unavailable {
            NodeUnavailable::LastSeen { ended_at: seen, .. } => seen
                .elapsed()
                .unwrap_or_default()
                .min(self.started_at.elapsed()),
            NodeUnavailable::NeverSeen => self.started_at.elapsed(),
            NodeUnavailable::Draining => Duration::ZERO,
            NodeUnavailable::Suspect { .. } => return Err(unavailable),
        };
        let remaining = wait_limit.saturating_sub(offline_for);
        let Ok(_permit) = self.wait_permits.try_acquire() else {
            return Err(unavailable);
        };
        let next_tunnel = self
            .drain_token
            .run_until_cancelled(self.wait_for_tunnel(node));
        match timeout(remaining, next_tunnel).await {
            Ok(Some(picked)) => Ok(picked),
            _ => self.select_tunnel(node),
        }
    }

    /// Waits until the node has a tunnel that can be chosen.
    async fn wait_for_tunnel(&self, node: &NodeName) -> SelectedTunnel {
        loop {
            let notify = {
                let mut shard = self.shard(node);
                let entry = shard.entry(node.clone()).or_default();
                entry.tunnel_registered.get_or_insert_default().clone()
            };
            let mut notified = pin!(notify.notified());
            // A change that arrives before the check below is noticed as well.
            notified.as_mut().enable();
            if let Ok(picked) = self.select_tunnel(node) {
                return picked;
            }
            notified.await;
        }
    }

    /// Lets no request wait for a tunnel any more: this gateway drains.
    pub fn start_drain(&self) {
        self.is_draining.store(true, Relaxed);
        self.drain_token.cancel();
    }

    /// Waits until this gateway drains.
    pub async fn drain_started(&self) {
        self.drain_token.cancelled().await;
    }

    /// Whether this gateway drains.
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Relaxed)
    }

    /// Notes that the drain's time is over: the streams that are still open end for that reason.
    pub fn expire_drain(&self) {
        self.drain_expired.store(true, Relaxed);
    }

    /// Whether the drain's time is over.
    pub fn is_drain_expired(&self) -> bool {
        self.drain_expired.load(Relaxed)
    }

    /// Whether any tunnel of this node is registered.
    pub fn has_tunnel(&self, node: &NodeName) -> bool {
        self.shard(node)
            .get(node)
            .is_some_and(|held| !held.tunnels.is_empty())
    }

    /// The tunnels of one node, and when and from where its last one was seen.
    pub fn node_tunnels(
        &self,
        node: &NodeName,
    ) -> (Vec<TunnelInfo>, Option<(SystemTime, SocketAddr)>) {
        match self.shard(node).get(node) {
            Some(entry) => (entry.tunnels.clone(), entry.last_seen),
            None => (Vec::new(), None),
        }
    }

    /// All tunnels of all nodes. Locks one shard at a time.
    pub fn all(&self) -> Vec<(NodeName, TunnelInfo)> {
        let mut all = Vec::new();
        for shard in self.shards.iter() {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            for (node, held) in shard.iter() {
                all.extend(held.tunnels.iter().map(|edge| (node.clone(), edge.clone())));
            }
        }
        all
    }

    /// How many nodes have a tunnel. Locks one shard at a time.
    pub fn connected_nodes(&self) -> usize {
        let count = |shard: &Shard| {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard
                .values()
                .filter(|held| !held.tunnels.is_empty())
                .count()
        };
        self.shards.iter().map(count).sum()
    }

    /// The worker that a node belongs to.
    pub fn worker(&self, node: &NodeName) -> WorkerId {
        self.workers.worker_of(node)
    }

    fn shard(&self, node: &NodeName) -> MutexGuard<'_, HashMap<NodeName, NodeTunnels>> {
        self.shards[self.workers.worker_of(node).0]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl NodeTunnels {
    /// Remembers the other processes of this node, which must not take it back while their successor lives.
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

    /// Puts the tunnels that a new one replaces out of use. Each keeps its streams, unless its own process has given it up.
    /// A process that dials without end leaves no more idle tunnels than [`MAX_IDLE_LEAVING`].
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
                // Takes effect at once: from here on the new tunnel is selected.
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

    /// Tunnels of an instance besides the one in this slot.
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
        // A tunnel that has just ended is registered until its conversation has noticed that.
        let ended_tunnel = self.tunnels.last();
        let ended = ended_tunnel.map(|edge| (SystemTime::now(), edge.tunnel.remote_address));
        match ended.or(self.last_seen) {
            Some((seen, remote_address)) => NodeUnavailable::LastSeen {
                ended_at: seen,
                remote_address,
            },
            None => NodeUnavailable::NeverSeen,
        }
    }
}

#[cfg(test)]
mod tests;
