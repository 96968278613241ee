//! Delegated heartbeats: statements of nodes without a gateway, carried by other members of their pools.
//!
//! 1. Members of node pools get a nonce every few seconds over their tunnels (`nonces`).
//! 2. A heartbeat is accepted once for each node and nonce, if the key of the node's certificate has signed it. The certificate is
//!    verified as that of an edge that connects. So no member can forge, replay or delay the heartbeat of another node.
//! 3. The node and its delegate must belong to one pool, and the node to the cluster. Each pool has a limit (`rate_limit`), so
//!    that a stolen site cannot flood the API of the cluster.
//! 4. Accepted heartbeats go to the component that renews Leases, which decides by the age of the Lease.

mod nonces;
mod rate_limit;

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
    heartbeat::{DelegatedHeartbeat, KubeletState, NONCE_INTERVAL},
};
use nonces::{NonceRefused, Nonces};
use rate_limit::HeartbeatRateLimiter;
use rustls::pki_types::CertificateDer;
use std::{
    collections::HashMap,
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

/// Interval in which tunnels that need a nonce are looked for: all tunnels get theirs spread over [`NONCE_INTERVAL`].
const LOOK: Duration = Duration::from_secs(1);
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
    #[error("the node or its pool sends too many heartbeats")]
    TooMany,
    #[error("the cluster's API does not take heartbeats as fast as they arrive")]
    Overloaded,
}

impl HeartbeatRefused {
    /// Returns the value of the metric's label.
    fn word(&self) -> &'static str {
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
    accepted: mpsc::Sender<AcceptedHeartbeat>,
    /// Taken by the component that renews Leases.
    accepting: Mutex<Option<AcceptedHeartbeats>>,
    refused: LogThrottle,
}

#[derive(Default)]
struct State {
    nonces: Nonces,
    rates: HeartbeatRateLimiter,
}

impl fmt::Debug for HeartbeatVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeartbeatVerifier").finish_non_exhaustive()
    }
}

impl HeartbeatVerifier {
    /// Returns a verifier of heartbeats of these nodes.
    pub(crate) fn new(nodes: &Nodes, verify_edge: VerifyEdgeFn, metrics: &Arc<Metrics>) -> Self {
        let (accepted, accepting) = mpsc::channel(MAX_QUEUED);
        Self(Arc::new(Inner {
            nodes: nodes.clone(),
            verify_edge,
            metrics: metrics.clone(),
            state: Mutex::default(),
            accepted,
            accepting: Mutex::new(Some(accepting)),
            refused: LogThrottle::default(),
        }))
    }

    /// Returns the accepted heartbeats, the first time.
    pub fn accepted(&self) -> Option<AcceptedHeartbeats> {
        let accepting = &self.0.accepting;
        accepting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a heartbeat that this node has carried.
    pub(super) fn receive(&self, delegate: &NodeName, beat: &DelegatedHeartbeat) {
        let Err(refused) = self.accept(delegate, beat) else {
            return;
        };
        let inner = &self.0;
        inner.metrics.delegated_beat(refused.word());
        if let Some(count) = inner.refused.record() {
            let node: String = beat.node.chars().take(64).collect();
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
        beat: &DelegatedHeartbeat,
    ) -> Result<(), HeartbeatRefused> {
        let (inner, now) = (&self.0, Instant::now());
        if !beat.is_within_limits() {
            let why = "a field is too long".to_owned();
            return Err(HeartbeatRefused::Malformed(why));
        }
        if beat.kubelet != KubeletState::Alive {
            return Err(HeartbeatRefused::Kubelet);
        }
        // Before signatures are verified, which cost most.
        let pool = inner.nodes.with(delegate, |known| known.pool.clone());
        let pool = pool.ok_or(HeartbeatRefused::Pool)?;
        self.state().nonces.check(&beat.nonce, now)?;
        if !self.state().rates.take_of_pool(&pool, now) {
            return Err(HeartbeatRefused::TooMany);
        }
        let node = self.verify(beat)?;
        let same_pool = inner
            .nodes
            .with(&node, |known| known.pool.as_deref() == Some(&*pool));
        if node == *delegate || !same_pool || inner.nodes.cluster_says_edge(&node) != Some(true) {
            return Err(HeartbeatRefused::Pool);
        }
        {
            let mut state = self.state();
            state.nonces.spend(&beat.nonce, &node, now)?;
            if !state.rates.take_of_node(&node, now) {
                return Err(HeartbeatRefused::TooMany);
            }
        }
        let accepted = AcceptedHeartbeat {
            node,
            delegate: delegate.clone(),
        };
        let queued = inner.accepted.try_send(accepted);
        queued.map_err(|_| HeartbeatRefused::Overloaded)
    }

    /// Returns the node that has signed a heartbeat.
    fn verify(&self, beat: &DelegatedHeartbeat) -> Result<NodeName, HeartbeatRefused> {
        let chain = parse_certificates(&beat.chain).map_err(HeartbeatRefused::Malformed)?;
        if chain.len() > MAX_CHAIN {
            let why = "it has too many certificates".to_owned();
            return Err(HeartbeatRefused::Malformed(why));
        }
        let signature = BASE64_STANDARD.decode(&beat.signature);
        let signature =
            signature.map_err(|error| HeartbeatRefused::Malformed(error.to_string()))?;
        let forged = |why: &dyn fmt::Display| HeartbeatRefused::Forged(why.to_string());
        let shown = (self.0.verify_edge)(&chain);
        let (node, certificate) = shown.map_err(|error| forged(&error))?;
        if node.as_str() != beat.node {
            return Err(forged(&format_args!("the certificate is of node {node}")));
        }
        let statement = HeartbeatStatement {
            nonce: &beat.nonce,
            node: &node,
            kubelet: beat.kubelet.word(),
        };
        let leaf = chain.first().ok_or_else(|| forged(&"no certificate"))?;
        let signed = statement.verify(leaf, &signature);
        signed.map_err(|error| forged(&error))?;
        match rejection_reason(&self.0.nodes, &node, &certificate) {
            None => Ok(node),
            Some(why) => Err(HeartbeatRefused::Rejected(why)),
        }
    }

    /// Hands out nonces until `stop`.
    pub(crate) async fn run(self, registry: Registry, stop: CancellationToken) {
        stop.run_until_cancelled(self.keep(registry)).await;
    }

    async fn keep(self, registry: Registry) -> Infallible {
        let mut last: HashMap<TunnelId, Instant> = HashMap::new();
        let mut ticks = interval(LOOK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.look(&registry, &mut last);
        }
    }

    /// Sends a nonce to each tunnel that needs one.
    fn look(&self, registry: &Registry, last: &mut HashMap<TunnelId, Instant>) {
        let now = Instant::now();
        self.state().rates.forget(now);
        let members = registry.all().into_iter();
        let members: Vec<_> = members
            .filter(|(node, edge)| self.relays(node, edge))
            .collect();
        let before = std::mem::take(last);
        let mut nonce = None;
        for (_, edge) in members {
            let sent = before.get(&edge.id).copied();
            if let Some(sent) = sent.filter(|sent| now < *sent + NONCE_INTERVAL) {
                last.insert(edge.id, sent);
                continue;
            }
            let nonce = nonce.get_or_insert_with(|| self.state().nonces.issue(now));
            let line = GatewayMessage::HeartbeatNonce {
                nonce: nonce.clone(),
            };
            // An edge whose send buffer is full gets a nonce at the next look.
            if edge.tunnel.control.try_send(Box::new(line)).is_ok() {
                last.insert(edge.id, now);
            }
        }
    }

    /// Whether a tunnel's edge relays heartbeats of other members of its pool.
    fn relays(&self, node: &NodeName, edge: &TunnelInfo) -> bool {
        let welcome = &edge.tunnel.hello;
        let serves = welcome.site.as_ref().is_some_and(|site| !site.is_empty());
        serves
            && welcome.heartbeats
            && !edge.is_leaving()
            && self.0.nodes.with(node, |known| known.pool.is_some())
    }
}
