//! Delegated heartbeats: statements of nodes without a gateway, carried by other members of their pools.
//!
//! 1. Members of node pools get a nonce every few seconds over their tunnels.
//! 2. A heartbeat is accepted once for each node and nonce, if the key of the node's certificate has signed it. The certificate is
//!    verified as that of an edge that connects. So no member can forge or replay the heartbeat
//!    of another node, or delay it for longer than a nonce is valid.
//! 3. The node and its delegate must belong to one pool, and the node to the cluster. Each delegate, pool and node has a limit
//!    (`rate_limit`), so that a stolen site can flood neither the gateway nor the API of the cluster.
//! 4. Accepted heartbeats go to the component that renews Leases, which decides by the age of the Lease.

mod rate_limit;

/// Issued nonces that are still valid, the oldest first.
#[derive(Default)]
struct Nonces(VecDeque<Nonce>);

struct Nonce {
    text: String,
    issued: Instant,
    /// Nodes that have used it.
    used: HashSet<NodeName>,
}

/// Reason why a nonce is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NonceRefused {
    /// It was never issued, or is too old.
    Stale,
    /// The node has used it before.
    Replayed,
}

impl Nonces {
    /// Returns a new nonce.
    fn issue(&mut self, now: Instant) -> String {
        self.remove_expired(now);
        let text = format!("{:032x}", rand::random::<u128>());
        self.0.push_back(Nonce {
            text: text.clone(),
            issued: now,
            used: HashSet::new(),
        });
        text
    }

    /// Checks whether a nonce is valid now.
    fn check(&mut self, text: &str, now: Instant) -> Result<(), NonceRefused> {
        self.find(text, now).map(drop)
    }

    /// Records that a node has used a nonce.
    fn spend(&mut self, text: &str, node: &NodeName, now: Instant) -> Result<(), NonceRefused> {
        let nonce = self.find(text, now)?;
        if !nonce.used.insert(node.clone()) {
            return Err(NonceRefused::Replayed);
        }
        Ok(())
    }

    fn find(&mut self, text: &str, now: Instant) -> Result<&mut Nonce, NonceRefused> {
        self.remove_expired(now);
        let found = self.0.iter_mut().find(|nonce| nonce.text == text);
        found.ok_or(NonceRefused::Stale)
    }

    /// Removes nonces that are too old.
    fn remove_expired(&mut self, now: Instant) {
        self.0.retain(|nonce| now <= nonce.issued + NONCE_LIFETIME);
    }
}

#[cfg(test)]
mod tests;

use super::eligibility::rejection_reason;
use crate::{
    metrics::Metrics,
    state::{Nodes, Registry, TunnelId, TunnelInfo, registry::EdgeCertificate},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use causeway_certs::{HeartbeatStatement, NodeName, PeerRejected, parse_certificates};
use causeway_rt::log_throttle::LogThrottle;
use causeway_tunnel::{
    control_stream::GatewayMessage,
    heartbeat::{DelegatedHeartbeat, KubeletState, NONCE_INTERVAL, NONCE_LIFETIME},
};
use rate_limit::HeartbeatRateLimiter;
use rustls::pki_types::CertificateDer;
use std::{
    collections::{HashMap, HashSet, VecDeque},
    convert::Infallible,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{
    sync::mpsc,
    time::{Instant, MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

/// Interval between two searches for tunnels that need a nonce. It spreads the nonces of all tunnels over [`NONCE_INTERVAL`].
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Accepted heartbeats that wait for the API of the cluster. At the limit further ones are dropped; each node sends another soon.
const MAX_QUEUED: usize = 1024;
/// Maximum number of certificates of a chain: a leaf, its issuer, and another one.
const MAX_CHAIN: usize = 3;

/// Accepted heartbeat of a node without a gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceptedHeartbeat {
    /// The node, whose kubelet is alive.
    pub node: NodeName,
    /// Pool member that has carried the heartbeat.
    pub delegate: NodeName,
    /// Time at which the gateway received the heartbeat.
    pub received_at: Instant,
}

/// Reason why a heartbeat is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum HeartbeatRefused {
    #[error("it is malformed: {0}")]
    Malformed(String),
    #[error("the kubelet of the node is not alive")]
    Kubelet,
    #[error("its nonce is unknown or too old")]
    Stale,
    #[error("its nonce was used by this node before")]
    Replayed,
    #[error("it is not authentic: {0}")]
    Forged(String),
    #[error("{0}")]
    Rejected(String),
    #[error("the node and the node that carries its heartbeat are not of one pool of the cluster")]
    Pool,
    #[error("the node, its pool, or the node that carries the heartbeat sends too many heartbeats")]
    TooMany,
    #[error("the cluster's API does not take heartbeats as fast as they arrive")]
    Overloaded,
}

impl HeartbeatRefused {
    /// Returns the value of the metric's label.
    fn label(&self) -> &'static str {
        match self {
            Self::Malformed(_) => "malformed",
            Self::Kubelet => "kubelet",
            Self::Stale => "stale",
            Self::Replayed => "replayed",
            Self::Forged(_) => "forged",
            Self::Rejected(_) => "rejected",
            Self::Pool => "pool",
            Self::TooMany => "too_many",
            Self::Overloaded => "overloaded",
        }
    }
}

impl From<NonceRefused> for HeartbeatRefused {
    fn from(refused: NonceRefused) -> Self {
        match refused {
            NonceRefused::Stale => Self::Stale,
            NonceRefused::Replayed => Self::Replayed,
        }
    }
}

/// Receiver of accepted heartbeats.
pub type AcceptedHeartbeats = mpsc::Receiver<AcceptedHeartbeat>;

/// Function that verifies a chain as that of an edge which connects, and returns the node and the certificate.
pub(crate) type VerifyEdgeFn = Box<
    dyn Fn(&[CertificateDer<'_>]) -> Result<(NodeName, EdgeCertificate), PeerRejected>
        + Send
        + Sync,
>;

/// Verifier of delegated heartbeats. Cheap to clone.
#[derive(Clone)]
pub struct HeartbeatVerifier(Arc<Inner>);

struct Inner {
    nodes: Nodes,
    verify_edge: VerifyEdgeFn,
    metrics: Arc<Metrics>,
    state: Mutex<State>,
    accepted_tx: mpsc::Sender<AcceptedHeartbeat>,
    /// Taken by the component that renews Leases.
    accepted_rx: Mutex<Option<AcceptedHeartbeats>>,
    refused_throttle: LogThrottle,
}

#[derive(Default)]
struct State {
    nonces: Nonces,
    rate_limiter: HeartbeatRateLimiter,
}

impl fmt::Debug for HeartbeatVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeartbeatVerifier").finish_non_exhaustive()
    }
}

impl HeartbeatVerifier {
    /// Returns a verifier of heartbeats of these nodes.
    pub(crate) fn new(nodes: &Nodes, verify_edge: VerifyEdgeFn, metrics: &Arc<Metrics>) -> Self {
        let (accepted_tx, accepted_rx) = mpsc::channel(MAX_QUEUED);
        Self(Arc::new(Inner {
            nodes: nodes.clone(),
            verify_edge,
            metrics: metrics.clone(),
            state: Mutex::default(),
            accepted_tx,
            accepted_rx: Mutex::new(Some(accepted_rx)),
            refused_throttle: LogThrottle::default(),
        }))
    }

    /// Returns the receiver of accepted heartbeats at the first call, and `None` later.
    pub fn take_accepted(&self) -> Option<AcceptedHeartbeats> {
        let accepted_rx = &self.0.accepted_rx;
        accepted_rx
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Verifies a heartbeat that this node has carried, and queues it if it is valid.
    pub(super) fn receive(&self, delegate: &NodeName, heartbeat: &DelegatedHeartbeat) {
        let Err(refused) = self.accept(delegate, heartbeat) else {
            return;
        };
        let inner = &self.0;
        inner.metrics.count_delegated_heartbeat(refused.label());
        if let Some(count) = inner.refused_throttle.record() {
            let node: String = heartbeat.node.chars().take(64).collect();
            tracing::warn!(
                %delegate,
                node,
                why = %refused,
                count,
                "a delegated heartbeat was refused"
            );
        }
    }

    fn accept(
        &self,
        delegate: &NodeName,
        heartbeat: &DelegatedHeartbeat,
    ) -> Result<(), HeartbeatRefused> {
        let (inner, now) = (&self.0, Instant::now());
        if !heartbeat.is_within_limits() {
            let why = "a field is too long".to_owned();
            return Err(HeartbeatRefused::Malformed(why));
        }
        if heartbeat.kubelet != KubeletState::Alive {
            return Err(HeartbeatRefused::Kubelet);
        }
        let pool = inner.nodes.with(delegate, |known| known.pool.clone());
        let pool = pool.ok_or(HeartbeatRefused::Pool)?;
        {
            // Signatures cost most, so only heartbeats within the delegate's limit are verified.
            let mut state = self.state();
            state.nonces.check(&heartbeat.nonce, now)?;
            if !state.rate_limiter.take_of_delegate(delegate, now) {
                return Err(HeartbeatRefused::TooMany);
            }
        }
        let node = self.verify(heartbeat)?;
        let same_pool = inner
            .nodes
            .with(&node, |known| known.pool.as_deref() == Some(&*pool));
        if node == *delegate || !same_pool || inner.nodes.cluster_says_edge(&node) != Some(true) {
            return Err(HeartbeatRefused::Pool);
        }
        {
            let mut state = self.state();
            state.nonces.spend(&heartbeat.nonce, &node, now)?;
            let rate_limiter = &mut state.rate_limiter;
            if !rate_limiter.take_of_node(&node, now) || !rate_limiter.take_of_pool(&pool, now) {
                return Err(HeartbeatRefused::TooMany);
            }
        }
        let accepted = AcceptedHeartbeat {
            node,
            delegate: delegate.clone(),
            received_at: now,
        };
        let queued = inner.accepted_tx.try_send(accepted);
        queued.map_err(|_| HeartbeatRefused::Overloaded)
    }

    /// Returns the node that has signed a heartbeat.
    fn verify(&self, heartbeat: &DelegatedHeartbeat) -> Result<NodeName, HeartbeatRefused> {
        let chain = parse_certificates(&heartbeat.chain).map_err(HeartbeatRefused::Malformed)?;
        if chain.len() > MAX_CHAIN {
            let why = "it has too many certificates".to_owned();
            return Err(HeartbeatRefused::Malformed(why));
        }
        let signature = BASE64_STANDARD.decode(&heartbeat.signature);
        let signature =
            signature.map_err(|error| HeartbeatRefused::Malformed(error.to_string()))?;
        let forged = |why: &dyn fmt::Display| HeartbeatRefused::Forged(why.to_string());
        let verified = (self.0.verify_edge)(&chain);
        let (node, certificate) = verified.map_err(|error| forged(&error))?;
        if node.as_str() != heartbeat.node {
            return Err(forged(&format_args!("the certificate is of node {node}")));
        }
        let statement = HeartbeatStatement {
            nonce: &heartbeat.nonce,
            node: &node,
            kubelet: heartbeat.kubelet.as_str(),
        };
        let leaf = chain.first().ok_or_else(|| forged(&"no certificate"))?;
        let signed = statement.verify(leaf, &signature);
        signed.map_err(|error| forged(&error))?;
        match rejection_reason(&self.0.nodes, &node, &certificate) {
            None => Ok(node),
            Some(why) => Err(HeartbeatRefused::Rejected(why)),
        }
    }

    /// Sends nonces to pool members until `stop`.
    pub(crate) async fn run(self, registry: Registry, stop: CancellationToken) {
        stop.run_until_cancelled(self.issue_nonces(registry)).await;
    }

    async fn issue_nonces(self, registry: Registry) -> Infallible {
        let mut last: HashMap<TunnelId, Instant> = HashMap::new();
        let mut ticks = interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.send_nonces(&registry, &mut last);
        }
    }

    /// Sends a nonce to each tunnel that needs one.
    fn send_nonces(&self, registry: &Registry, last: &mut HashMap<TunnelId, Instant>) {
        let now = Instant::now();
        self.state().rate_limiter.remove_expired(now);
        let members = registry.all().into_iter();
        let members: Vec<_> = members
            .filter(|(node, edge)| self.is_relay(node, edge))
            .collect();
        let previous = std::mem::take(last);
        let mut nonce = None;
        for (_, edge) in members {
            let sent = previous.get(&edge.id).copied();
            if let Some(sent) = sent.filter(|sent| now < *sent + NONCE_INTERVAL) {
                last.insert(edge.id, sent);
                continue;
            }
            let nonce = nonce.get_or_insert_with(|| self.state().nonces.issue(now));
            let line = GatewayMessage::HeartbeatNonce {
                nonce: nonce.clone(),
            };
            // An edge whose send buffer is full gets a nonce in the next round.
            if edge.tunnel.control.try_send(Box::new(line)).is_ok() {
                last.insert(edge.id, now);
            }
        }
    }

    /// Whether a tunnel's edge relays heartbeats of other members of its pool.
    fn is_relay(&self, node: &NodeName, edge: &TunnelInfo) -> bool {
        let hello = &edge.tunnel.hello;
        let has_listener = hello.site.as_ref().is_some_and(|site| !site.is_empty());
        has_listener
            && hello.heartbeats
            && !edge.is_leaving()
            && self.0.nodes.with(node, |known| known.pool.is_some())
    }
}
