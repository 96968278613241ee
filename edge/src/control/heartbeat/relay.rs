//! Relay of heartbeats at a pool member: hands out the gateways' nonces, and sends signed heartbeats to the gateway of the nonce.
//!
//! A member cannot forge a heartbeat, since it has no other node's key. It still checks that a client sends heartbeats of its
//! own node only, and not more often than necessary. The gateway verifies signatures for each heartbeat, which costs time.

use crate::{
    control::http_server::ConnectionPlace,
    metrics::{Metrics, RelayOutcome},
};
use axum::{
    Json, Router,
    extract::{ConnectInfo, DefaultBodyLimit, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use causeway_tunnel::heartbeat::{
    DelegatedHeartbeat, HeartbeatNonce, MAX_HEARTBEAT, MAX_NONCE, NONCE_INTERVAL, PATH,
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{sync::mpsc, time::Instant};
use tracing::debug;

/// Heartbeats that wait for a tunnel. A tunnel with more of them is probably lost.
const MAX_QUEUED: usize = 64;
/// Age up to which a nonce is handed out. A tunnel without a newer one is probably lost, and its gateway would accept the nonce
/// for a moment only.
const MAX_NONCE_AGE: Duration = NONCE_INTERVAL.saturating_add(Duration::from_secs(3));
/// Shortest interval between two heartbeats of one node.
const MIN_INTERVAL: Duration = Duration::from_secs(5);

/// Relay of a pool member. Cheap to clone.
#[derive(Clone)]
pub(crate) struct HeartbeatRelay(Arc<Inner>);

struct Inner {
    state: Mutex<RelayState>,
    metrics: Arc<Metrics>,
}

#[derive(Default)]
struct RelayState {
    next_id: u64,
    tunnels: BTreeMap<u64, TunnelEntry>,
    /// Time of the last heartbeat of each node.
    last_heartbeats: HashMap<String, Instant>,
}

struct TunnelEntry {
    nonce: Option<(String, Instant)>,
    heartbeats_tx: mpsc::Sender<Box<DelegatedHeartbeat>>,
}

/// Relay's end at one tunnel, until the tunnel ends or its gateway drains.
pub(crate) struct TunnelRelay {
    relay: HeartbeatRelay,
    id: u64,
    heartbeats_rx: mpsc::Receiver<Box<DelegatedHeartbeat>>,
}

/// Reason why a heartbeat is not relayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum RelayRefused {
    #[error("this member has no gateway at the moment")]
    NoGateway,
    #[error("the nonce is not one of this member's tunnels, or it is too old")]
    Nonce,
    #[error("a node sends its own heartbeats only")]
    Node,
    #[error("a field is too long")]
    TooLong,
    #[error("this node sends heartbeats too often")]
    TooOften,
}

impl RelayRefused {
    fn status(self) -> StatusCode {
        match self {
            Self::NoGateway => StatusCode::SERVICE_UNAVAILABLE,
            Self::Nonce => StatusCode::CONFLICT,
            Self::Node => StatusCode::FORBIDDEN,
            Self::TooLong => StatusCode::PAYLOAD_TOO_LARGE,
            Self::TooOften => StatusCode::TOO_MANY_REQUESTS,
        }
    }

    fn outcome(self) -> RelayOutcome {
        match self {
            Self::NoGateway => RelayOutcome::NoGateway,
            Self::Nonce => RelayOutcome::Nonce,
            Self::Node | Self::TooLong => RelayOutcome::Refused,
            Self::TooOften => RelayOutcome::TooOften,
        }
    }
}

impl HeartbeatRelay {
    pub(crate) fn new(metrics: &Arc<Metrics>) -> Self {
        Self(Arc::new(Inner {
            state: Mutex::default(),
            metrics: metrics.clone(),
        }))
    }

    fn state(&self) -> MutexGuard<'_, RelayState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a tunnel to the relay, without a nonce.
    pub(crate) fn tunnel(&self) -> TunnelRelay {
        let (heartbeats_tx, heartbeats_rx) = mpsc::channel(MAX_QUEUED);
        let mut state = self.state();
        let id = state.next_id;
        state.next_id += 1;
        let entry = TunnelEntry {
            nonce: None,
            heartbeats_tx,
        };
        state.tunnels.insert(id, entry);
        TunnelRelay {
            relay: self.clone(),
            id,
            heartbeats_rx,
        }
    }

    /// Returns the routes for pool members.
    pub(crate) fn routes(&self) -> Router {
        Router::new()
            .route(PATH, get(nonce).post(forward))
            .layer(DefaultBodyLimit::max(MAX_HEARTBEAT))
            .with_state(self.clone())
    }

    /// Returns the newest nonce, if it is fresh.
    pub(super) fn nonce(&self) -> Option<String> {
        let state = self.state();
        let nonces = state
            .tunnels
            .values()
            .filter_map(|entry| entry.nonce.as_ref());
        let (nonce, received) = nonces.max_by_key(|(_, received)| *received)?;
        (received.elapsed() <= MAX_NONCE_AGE).then(|| nonce.clone())
    }

    /// Queues the heartbeat of this client for the tunnel of its nonce.
    pub(super) fn forward(
        &self,
        client: &str,
        heartbeat: DelegatedHeartbeat,
    ) -> Result<(), RelayRefused> {
        if heartbeat.node != client {
            return Err(RelayRefused::Node);
        }
        if !heartbeat.is_within_limits() {
            return Err(RelayRefused::TooLong);
        }
        let mut state = self.state();
        let last_heartbeats = &mut state.last_heartbeats;
        last_heartbeats.retain(|_, last| last.elapsed() < MIN_INTERVAL);
        if last_heartbeats.contains_key(client) {
            return Err(RelayRefused::TooOften);
        }
        let has_nonce = |entry: &&TunnelEntry| {
            let nonce = entry.nonce.as_ref();
            nonce.is_some_and(|(nonce, received_at)| {
                *nonce == heartbeat.nonce && received_at.elapsed() <= MAX_NONCE_AGE
            })
        };
        let entry = state.tunnels.values().find(has_nonce);
        let entry = entry.ok_or(RelayRefused::Nonce)?;
        let queued = entry.heartbeats_tx.try_send(Box::new(heartbeat));
        queued.map_err(|_| RelayRefused::NoGateway)?;
        state
            .last_heartbeats
            .insert(client.to_owned(), Instant::now());
        Ok(())
    }
}

impl TunnelRelay {
    /// Replaces the nonce by the newest of the gateway.
    pub(crate) fn set_nonce(&self, nonce: String) {
        if nonce.is_empty() || nonce.len() > MAX_NONCE {
            debug!("a gateway sent a nonce of invalid length");
            return;
        }
        if let Some(entry) = self.relay.state().tunnels.get_mut(&self.id) {
            entry.nonce = Some((nonce, Instant::now()));
        }
    }

    /// Returns the next heartbeat to send. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Box<DelegatedHeartbeat> {
        match self.heartbeats_rx.recv().await {
            Some(heartbeat) => heartbeat,
            // The relay holds the sender until this is dropped.
            None => std::future::pending().await,
        }
    }
}

impl Drop for TunnelRelay {
    fn drop(&mut self) {
        self.relay.state().tunnels.remove(&self.id);
    }
}

async fn nonce(State(relay): State<HeartbeatRelay>) -> Response {
    match relay.nonce() {
        Some(nonce) => Json(HeartbeatNonce { nonce }).into_response(),
        None => refuse(&relay, RelayRefused::NoGateway),
    }
}

async fn forward(
    State(relay): State<HeartbeatRelay>,
    ConnectInfo(place): ConnectInfo<ConnectionPlace>,
    Json(heartbeat): Json<DelegatedHeartbeat>,
) -> Response {
    let Some(client) = place.client() else {
        return refuse(&relay, RelayRefused::Node);
    };
    match relay.forward(client, heartbeat) {
        Ok(()) => {
            debug!(
                node = client,
                "sending the heartbeat of a pool member to a gateway"
            );
            relay.0.metrics.heartbeat.count_relayed(RelayOutcome::Sent);
            StatusCode::ACCEPTED.into_response()
        }
        Err(refused) => {
            debug!(node = client, why = %refused, "refused the heartbeat of a pool member");
            refuse(&relay, refused)
        }
    }
}

fn refuse(relay: &HeartbeatRelay, refused: RelayRefused) -> Response {
    relay.0.metrics.heartbeat.count_relayed(refused.outcome());
    (refused.status(), format!("{refused}\n")).into_response()
}
