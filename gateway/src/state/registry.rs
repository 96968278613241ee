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
    wire::MOST_TUNNELS,
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
    pub welcome: Arc<EdgeHello>,
    /// Address from which the edge dialled.
    pub from: SocketAddr,
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
    pub given: Option<Arc<[CertificateDer<'static>]>>,
}

/// A registered tunnel, as seen from outside.
#[derive(Clone, Debug)]
pub struct TunnelInfo {
    /// The tunnel's identity.
    pub id: TunnelId,
    /// The tunnel and its data.
    pub admitted: NewTunnel,
    /// When it was registered.
    pub since: SystemTime,
    /// It closes with its last stream.
    leaving: bool,
}

impl TunnelInfo {
    /// Whether the tunnel closes with its last stream: another one has taken over, or its edge has announced it. It gets a
    /// new stream only if the edge stops and the node has no other tunnel.
    pub fn is_leaving(&self) -> bool {
        self.leaving
    }

    /// Returns the number of clients' streams that are open on the tunnel.
    pub fn streams(&self) -> usize {
        let streams = self.admitted.tunnel.load().streams();
        streams.saturating_sub(CONTROL)
    }
}

/// Why a node has no tunnel to choose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeUnavailable {
    /// It was never seen by this process.
    Never,
    /// It was last seen then, from there.
    Last {
        /// When its last tunnel ended.
        seen: SystemTime,
        /// Address from which that tunnel came.
        from: SocketAddr,
    },
    /// Its tunnels are connected and do not answer.
    Suspect {
        /// Address from which the newest of them came.
        from: SocketAddr,
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
        by: String,
        /// Address from which that instance dialled.
        from: SocketAddr,
    },
    /// This instance has [`MOST_TUNNELS`] already.
    Full,
}

/// A tunnel that a registration replaced.
#[derive(Debug)]
pub struct ReplacedTunnel {
    /// The tunnel.
    pub edge: TunnelInfo,
    /// Effect of the replacement on it.
    pub fate: ReplaceMode,
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
    last: Option<(SystemTime, SocketAddr)>,
    streams: Arc<AtomicUsize>,
    siblings: Arc<NodeBudget>,
    /// Wakes requests that wait for a tunnel of this node.
    arrival: Option<Arc<Notify>>,
}

/// Requests that wait for tunnels at most. Further ones are refused at once.
const MOST_WAITING: usize = 4096;

/// Every tunnel has its control stream open.
const CONTROL: usize = 1;

/// Leaving tunnels of a node without streams that wait for their end; the oldest beyond these is closed.
const MOST_IDLE: usize = 16;

/// Replaced instances of a node that are remembered: two of them, or three, are an accident.
const REMEMBERED: usize = 16;

type Shard = Mutex<HashMap<NodeName, NodeTunnels>>;

/// The registry; a cheap clone for any thread.
#[derive(Clone, Debug)]
pub struct Registry {
    shards: Arc<[Shard]>,
    workers: Workers,
    next: Arc<AtomicU64>,
    began: Instant,
    waiting: Arc<Semaphore>,
    /// No tunnel is waited for any more.
    closed: CancellationToken,
    /// The same, for requests: a look at the token takes a lock.
    drains: Arc<AtomicBool>,
    /// The drain's time is over, and tunnels are closed with their streams.
    over: Arc<AtomicBool>,
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
            next: Arc::new(AtomicU64::new(1)),
            began: Instant::now(),
            waiting: Arc::new(Semaphore::new(MOST_WAITING)),
            closed: CancellationToken::new(),
            drains: Arc::default(),
            over: Arc::default(),
        }
    }

    /// Returns the budget that all tunnels of a node share, registered or about to be.
    pub fn siblings(&self, node: &NodeName) -> Arc<NodeBudget> {
        let mut shard = self.shard(node);
        shard.entry(node.clone()).or_default().siblings.clone()
    }

    /// Registers a tunnel. Returns the tunnels that it replaces, which must be informed and closed.
    ///
    /// # Errors
    /// If this instance of the edge was superseded by another, or has as many tunnels as it may have.
    pub fn register(
        &self,
        node: &NodeName,
        admitted: NewTunnel,
    ) -> Result<(TunnelId, Vec<ReplacedTunnel>), RegisterError> {
        let mut shard = self.shard(node);
        let held = shard.entry(node.clone()).or_default();
        let instance = admitted.welcome.instance.clone();
        let successor = held
            .tunnels
            .iter()
            .find(|edge| !edge.leaving && edge.admitted.welcome.instance != instance);
        if let Some(edge) = successor.filter(|_| held.superseded.contains(&instance)) {
            return Err(RegisterError::Superseded {
                by: edge.admitted.welcome.instance.clone(),
                from: edge.admitted.from,
            });
        }
        let slot = admitted.welcome.slot;
        if held.others(&instance, slot) >= MOST_TUNNELS {
            return Err(RegisterError::Full);
        }
        held.supersede_others(&instance);
        let replaced = held.make_room(&admitted.welcome);
        let id = TunnelId(self.next.fetch_add(1, Relaxed));
        held.tunnels.push(TunnelInfo {
            id,
            admitted,
            since: SystemTime::now(),
            leaving: false,
        });
        if let Some(arrival) = held.arrival.take() {
            arrival.notify_waiters();
        }
        Ok((id, replaced))
    }

    /// Notes that a tunnel's edge has announced that it leaves.
    pub fn leaves(&self, node: &NodeName, id: TunnelId) {
        let mut shard = self.shard(node);
        let tunnels = shard.get_mut(node).map(|held| &mut held.tunnels);
        if let Some(edge) = tunnels.into_iter().flatten().find(|edge| edge.id == id) {
            edge.leaving = true;
        }
    }

    /// Removes a tunnel, if it is still the one that is registered. True if it was.
    pub fn unregister(&self, node: &NodeName, id: TunnelId) -> bool {
        let mut shard = self.shard(node);
        let Some(held) = shard.get_mut(node) else {
            return false;
        };
        let Some(at) = held.tunnels.iter().position(|edge| edge.id == id) else {
            return false;
        };
        let gone = held.tunnels.remove(at);
        held.last = Some((SystemTime::now(), gone.admitted.from));
        if held.tunnels.is_empty() {
            held.superseded.clear();
        }
        true
    }

    /// Chooses a tunnel for a new stream: open, not leaving, not bulky, fewest streams.
    ///
    /// # Errors
    /// Why there is none.
    pub fn pick(&self, node: &NodeName) -> Result<SelectedTunnel, NodeUnavailable> {
        let now = Instant::now();
        let shard = self.shard(node);
        let held = shard.get(node).ok_or(NodeUnavailable::Never)?;
        let best = held
            .tunnels
            .iter()
            .filter(|edge| edge.admitted.tunnel.is_open())
            .min_by_key(|edge| {
                let load = edge.admitted.tunnel.load();
                (edge.leaving, load.is_bulky(now), load.streams())
            });
        match best {
            Some(edge) => Ok(SelectedTunnel {
                tunnel: edge.admitted.tunnel.clone(),
                id: edge.id,
                streams: held.streams.clone(),
            }),
            None => Err(held.away()),
        }
    }

    /// Chooses a tunnel as [`Registry::pick`] does. A node that had a tunnel less than `bound` ago is waited for until `bound`
    /// is over, and so is any node as long ago as this gateway started: its edge is probably dialling.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn pick_within(
        &self,
        node: &NodeName,
        bound: Duration,
    ) -> Result<SelectedTunnel, NodeUnavailable> {
        let away = match self.pick(node) {
            Err(away) if !self.closed.is_cancelled() => away,
            picked => return picked,
        };
        let since = match away {
            NodeUnavailable::Last { seen, .. } => {
                seen.elapsed().unwrap_or_default().min(self.began.elapsed())
            }
            NodeUnavailable::Never => self.began.elapsed(),
            NodeUnavailable::Draining => Duration::ZERO,
            NodeUnavailable::Suspect { .. } => return Err(away),
        };
        let left = bound.saturating_sub(since);
        let Ok(_place) = self.waiting.try_acquire() else {
            return Err(away);
        };
        let come = self.closed.run_until_cancelled(self.arrival(node));
        match timeout(left, come).await {
            Ok(Some(picked)) => Ok(picked),
            _ => self.pick(node),
        }
    }

    /// Waits until the node has a tunnel that can be chosen.
    async fn arrival(&self, node: &NodeName) -> SelectedTunnel {
        loop {
            let arrival = {
                let mut shard = self.shard(node);
                let held = shard.entry(node.clone()).or_default();
                held.arrival.get_or_insert_default().clone()
            };
            let mut arrived = pin!(arrival.notified());
            // A change that arrives before the check below is noticed as well.
            arrived.as_mut().enable();
            if let Ok(picked) = self.pick(node) {
                return picked;
            }
            arrived.await;
        }
    }

    /// Lets no request wait for a tunnel any more: this gateway drains.
    pub fn close(&self) {
        self.drains.store(true, Relaxed);
        self.closed.cancel();
    }

    /// Waits until this gateway drains.
    pub async fn closed(&self) {
        self.closed.cancelled().await;
    }

    /// Whether this gateway drains.
    pub fn is_closed(&self) -> bool {
        self.drains.load(Relaxed)
    }

    /// Notes that the drain's time is over: the streams that are still open end for that reason.
    pub fn end(&self) {
        self.over.store(true, Relaxed);
    }

    /// Whether the drain's time is over.
    pub fn is_over(&self) -> bool {
        self.over.load(Relaxed)
    }

    /// Whether any tunnel of this node is registered.
    pub fn holds(&self, node: &NodeName) -> bool {
        self.shard(node)
            .get(node)
            .is_some_and(|held| !held.tunnels.is_empty())
    }

    /// The tunnels of one node, and when and from where its last one was seen.
    pub fn of(&self, node: &NodeName) -> (Vec<TunnelInfo>, Option<(SystemTime, SocketAddr)>) {
        match self.shard(node).get(node) {
            Some(held) => (held.tunnels.clone(), held.last),
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
    pub fn connected(&self) -> usize {
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
        self.workers.of(node)
    }

    fn shard(&self, node: &NodeName) -> MutexGuard<'_, HashMap<NodeName, NodeTunnels>> {
        self.shards[self.workers.of(node).0]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl NodeTunnels {
    /// Remembers the other processes of this node, which must not take it back while their successor lives.
    fn supersede_others(&mut self, instance: &str) {
        let others = self.tunnels.iter().map(|edge| &edge.admitted.welcome);
        for other in others.filter(|other| other.instance != instance) {
            if !self.superseded.contains(&other.instance) {
                self.superseded.push_back(other.instance.clone());
            }
        }
        self.superseded.retain(|known| known != instance);
        let beyond = self.superseded.len().saturating_sub(REMEMBERED);
        self.superseded.drain(..beyond);
    }

    /// Puts the tunnels that a new one replaces out of use. Each keeps its streams, unless its own process has given it up.
    /// A process that dials without end leaves no more idle tunnels than [`MOST_IDLE`].
    fn make_room(&mut self, new: &EdgeHello) -> Vec<ReplacedTunnel> {
        let (mut replaced, mut kept) = (Vec::new(), Vec::new());
        for mut edge in std::mem::take(&mut self.tunnels) {
            let old = &edge.admitted.welcome;
            let fate = if edge.leaving {
                None
            } else if old.instance != new.instance {
                Some(ReplaceMode::Superseded)
            } else if old.slot != new.slot {
                None
            } else if new.takes_over {
                Some(ReplaceMode::TakenOver)
            } else {
                Some(ReplaceMode::Lost)
            };
            if let Some(fate) = fate {
                // Takes effect at once: from here on the new tunnel is selected.
                edge.leaving = true;
                edge.admitted.tunnel.drain();
                let edge = edge.clone();
                replaced.push(ReplacedTunnel { edge, fate });
            }
            if fate != Some(ReplaceMode::Lost) {
                kept.push(edge);
            }
        }
        let is_idle = |edge: &TunnelInfo| edge.leaving && edge.streams() == 0;
        let mut beyond = kept.iter().filter(|edge| is_idle(edge)).count();
        beyond = beyond.saturating_sub(MOST_IDLE);
        for edge in kept.extract_if(.., |edge| {
            let closes = beyond > 0 && is_idle(edge);
            beyond -= usize::from(closes);
            closes
        }) {
            let fate = ReplaceMode::Lost;
            replaced.push(ReplacedTunnel { edge, fate });
        }
        self.tunnels = kept;
        replaced
    }

    /// Tunnels of an instance besides the one in this slot.
    fn others(&self, instance: &str, slot: u32) -> u32 {
        let others = self.tunnels.iter().filter(|edge| {
            let welcome = &edge.admitted.welcome;
            welcome.instance == instance && welcome.slot != slot && !edge.leaving
        });
        u32::try_from(others.count()).unwrap_or(u32::MAX)
    }

    fn away(&self) -> NodeUnavailable {
        let mut newest_first = self.tunnels.iter().rev().map(|edge| &edge.admitted);
        if let Some(newest) = newest_first.find(|admitted| !admitted.tunnel.is_closed()) {
            return if newest.tunnel.is_draining() {
                NodeUnavailable::Draining
            } else {
                NodeUnavailable::Suspect { from: newest.from }
            };
        }
        // A tunnel that has just ended is registered until its conversation has noticed that.
        let ended = self.tunnels.last();
        let ended = ended.map(|edge| (SystemTime::now(), edge.admitted.from));
        match ended.or(self.last) {
            Some((seen, from)) => NodeUnavailable::Last { seen, from },
            None => NodeUnavailable::Never,
        }
    }
}

#[cfg(test)]
mod tests;
