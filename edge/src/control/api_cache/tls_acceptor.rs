//! TLS acceptor of the API cache.
//!
//! Each handshake is a task. The number of handshakes and the time of each are limited. The number of connections is limited
//! as well, and all of them are passed to one server. Each source address has a share of both limits (`ConnectionLimit`), and
//! each client has a quota of the connections. An idle handshake can lose its slot to another one. The client is authorized
//! after the handshake, and for as long as the connection is open.

use crate::{
    control::http_server::{
        AcceptedConnections, ConnectionPlace, LimitedConnection, hold_slot, set_keepalive,
    },
    metrics::Metrics,
};
use axum::{Router, middleware, serve::Listener};
use causeway_rt::{
    connection_limit::ConnectionLimit, lingering_close, log_throttle::LogThrottle, task::TaskGroup,
};
use futures_util::future::BoxFuture;
use rustls::InvalidMessage;
use rustls_pki_types::CertificateDer;
use std::{
    collections::HashMap,
    hash::Hash,
    net::SocketAddr,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info_span, warn};

/// Time limit of a handshake, which takes two round trips on a site network.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of simultaneous handshakes. Each costs one or two signatures.
const MAX_HANDSHAKES: usize = 256;
/// Time for which a repeated message is logged at debug level only.
const LOG_INTERVAL: Duration = Duration::from_mins(10);

/// Certificate chain that the client has presented: its own certificate and the intermediates.
pub(super) type PresentedChain = Arc<[CertificateDer<'static>]>;

/// Policy that decides which clients are admitted.
pub(super) trait ClientPolicy: Send + Sync + 'static {
    /// Returns the acceptor with the current TLS configuration.
    ///
    /// # Errors
    /// If no handshake is possible now.
    fn acceptor(&self) -> Result<TlsAcceptor, String>;

    /// Returns the name of the client that has presented this chain, or the reason why the client is refused.
    fn client_name(&self, chain: &[CertificateDer<'_>]) -> Result<String, String>;

    /// Returns the reason once the client must be disconnected.
    fn wait_for_revocation(&self, chain: PresentedChain) -> BoxFuture<'static, String>;
}

/// TLS listener with its admission policy and its limits.
pub(super) struct QuotaAcceptor {
    pub(super) listener: TcpListener,
    pub(super) policy: Arc<dyn ClientPolicy>,
    /// Kind of the clients, for the log.
    pub(super) client_kind: &'static str,
    /// Metrics of the edge.
    pub(super) metrics: Arc<Metrics>,
    /// Maximum number of connections.
    pub(super) max_connections: usize,
    /// Maximum number of connections of one client.
    pub(super) max_per_client: usize,
}

impl QuotaAcceptor {
    /// Serves admitted clients, until `stop`.
    pub(super) async fn run(self, router: Router, stop: CancellationToken) {
        let Ok(address) = self.listener.local_addr() else {
            return;
        };
        let (connections_tx, connections_rx) = mpsc::channel(1);
        let tasks = Arc::new(TaskGroup::new(&stop));
        let queue = AcceptQueue {
            handshake_limit: self
                .metrics
                .connection_limit("reader_handshakes", MAX_HANDSHAKES),
            connection_limit: self
                .metrics
                .connection_limit("api_cache", self.max_connections),
            quota: Quota::new(),
            max_per_client: self.max_per_client,
            policy: self.policy,
            client_kind: self.client_kind,
            connections_tx,
            stop: stop.clone(),
            refusal_log: Arc::default(),
        };
        let listener = AcceptedConnections {
            connections: connections_rx,
            address,
        };
        let router = router.layer(middleware::from_fn(hold_slot));
        let service = router.into_make_service_with_connect_info::<ConnectionPlace>();
        tokio::select! {
            served = async { axum::serve(listener, service).await } => {
                debug!(?served, "an API cache listener stopped");
            }
            () = queue.accept(self.listener, &tasks) => {}
            () = stop.cancelled() => {}
        }
    }
}

/// State that is shared by the tasks of accepted connections.
#[derive(Clone)]
struct AcceptQueue {
    handshake_limit: ConnectionLimit,
    connection_limit: ConnectionLimit,
    /// Number of connections of each client.
    quota: Quota<String>,
    max_per_client: usize,
    policy: Arc<dyn ClientPolicy>,
    client_kind: &'static str,
    connections_tx: mpsc::Sender<(LimitedConnection<TlsStream<TcpStream>>, SocketAddr)>,
    stop: CancellationToken,
    /// Throttle of the log message about refused clients.
    refusal_log: Arc<LogThrottle>,
}

impl AcceptQueue {
    async fn accept(&self, mut listener: TcpListener, tasks: &TaskGroup) {
        loop {
            let (tcp, from) = Listener::accept(&mut listener).await;
            let Ok(handshake_slot) = self.handshake_limit.admit(from.ip()) else {
                continue;
            };
            set_keepalive(&tcp);
            let queue = self.clone();
            tasks.spawn(
                info_span!("guest", kind = self.client_kind, %from),
                async move {
                    let handshake = handshake_slot
                        .run(pin!(timeout(
                            HANDSHAKE_TIMEOUT,
                            queue.perform_handshake(tcp)
                        )))
                        .await;
                    match handshake {
                        Some(Ok(Ok(tls))) => {
                            drop(handshake_slot);
                            queue.serve_until_revoked(tls, from).await;
                        }
                        Some(Ok(Err((why, tcp)))) => {
                            queue.log_refused(&why);
                            handshake_slot.run(pin!(lingering_close::close(tcp))).await;
                        }
                        Some(Err(_)) => queue.log_refused("TLS handshake timeout"),
                        // The connection limit counts and logs evictions.
                        None => {}
                    }
                },
            );
        }
    }

    /// Logs the reason why a client was refused.
    fn log_refused(&self, why: &str) {
        let guests = self.client_kind;
        if self.refusal_log.record_within(LOG_INTERVAL).is_some() {
            warn!(
                why,
                guests, "client refused; further ones are logged at debug level for ten minutes"
            );
        } else {
            debug!(why, guests, "client refused");
        }
    }

    /// Performs the TLS handshake. On failure returns the reason and the socket, for a lingering close, so that a sent alert
    /// is not lost.
    async fn perform_handshake(
        &self,
        tcp: TcpStream,
    ) -> Result<TlsStream<TcpStream>, (String, TcpStream)> {
        let acceptor = match self.policy.acceptor() {
            Ok(accepts) => accepts,
            Err(why) => return Err((why, tcp)),
        };
        let handshake = acceptor.accept(tcp).into_fallible().await;
        handshake.map_err(|(error, tcp)| {
            let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
            let content = InvalidMessage::InvalidContentType;
            if inner == Some(&rustls::Error::InvalidMessage(content)) {
                let why = "the client does not use TLS, which this listener requires (https://)";
                return (why.to_owned(), tcp);
            }
            (error.to_string(), tcp)
        })
    }

    /// Passes the connection to the server, and closes it once the policy revokes the client.
    async fn serve_until_revoked(&self, tls: TlsStream<TcpStream>, from: SocketAddr) {
        let chain = tls.get_ref().1.peer_certificates().unwrap_or_default();
        let chain: PresentedChain = chain
            .iter()
            .map(|certificate| certificate.clone().into_owned())
            .collect();
        let who = match self.policy.client_name(&chain) {
            Ok(who) => who,
            Err(why) => return self.log_refused(&why),
        };
        let Some(_share) = self.quota.acquire(who.clone(), self.max_per_client) else {
            return self.log_refused("the client has reached its limit of connections");
        };
        let Ok(slot) = self.connection_limit.admit(from.ip()) else {
            return;
        };
        if !chain.is_empty() {
            // The client is authenticated, so it is not evicted for new connections.
            slot.protect();
        }
        let close_token = self.stop.child_token();
        let connection = LimitedConnection::new(tls, slot, close_token.clone()).of(&who);
        if self.connections_tx.send((connection, from)).await.is_err() {
            return;
        }
        tokio::select! {
            () = close_token.cancelled() => {}
            why = self.policy.wait_for_revocation(chain) => {
                debug!(who, why, "closing the connection of a client");
                close_token.cancel();
            }
        }
    }
}

/// Number of guards that each key has. Cheap to clone.
#[derive(Clone)]
pub(super) struct Quota<K>(Arc<Mutex<HashMap<K, usize>>>);

/// One unit of a key's quota, which is returned when this is dropped.
pub(super) struct QuotaGuard<K: Eq + Hash> {
    quota: Quota<K>,
    key: K,
}

impl<K: Eq + Hash + Clone> Quota<K> {
    pub(super) fn new() -> Self {
        Self(Arc::default())
    }

    /// Takes one unit for this key, or returns `None` if the key has reached `limit`.
    pub(super) fn acquire(&self, key: K, limit: usize) -> Option<QuotaGuard<K>> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.get(&key).is_some_and(|count| *count >= limit) {
            return None;
        }
        *counts.entry(key.clone()).or_default() += 1;
        let quota = self.clone();
        Some(QuotaGuard { quota, key })
    }
}

impl<K: Eq + Hash> Drop for QuotaGuard<K> {
    fn drop(&mut self) {
        let mut counts = self.quota.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_client_has_its_share_and_returns_it() {
        let shares = Quota::new();
        let mut first: Vec<_> = (0..3).filter_map(|_| shares.acquire("first", 2)).collect();
        assert_eq!(first.len(), 2);
        assert!(shares.acquire("second", 2).is_some());
        first.pop();
        assert!(shares.acquire("first", 2).is_some());
        drop(first);
        assert!(shares.0.lock().unwrap().is_empty());
    }
}
