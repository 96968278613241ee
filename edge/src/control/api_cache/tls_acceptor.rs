//! TLS acceptor of the API cache: handshakes are tasks, a bounded number of them, each with a bound in time; connections are
//! bounded, too, and handed over to one server. Of both each source has a share (`ConnectionLimit`), and each client has a
//! quota of the connections. A handshake that rests gives its place to another one. The client is authorized after the
//! handshake and for as long as the connection stays.

use super::quota::Quota;
use crate::{
    control::http_server::{
        AcceptedConnections, ConnectionPlace, LimitedConnection, keep_place, set_keepalive,
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
use std::{net::SocketAddr, pin::pin, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info_span, warn};

/// A handshake takes two round trips of a site.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Handshakes at once: each costs a signature or two.
const HANDS: usize = 256;
/// Time for which a message that was logged once is logged at debug only.
const QUIET: Duration = Duration::from_mins(10);

/// Certificate chain that the client has presented: its certificate, and the certificates behind it.
pub(super) type PresentedChain = Arc<[CertificateDer<'static>]>;

/// Policy that decides which clients are admitted.
pub(super) trait ClientPolicy: Send + Sync + 'static {
    /// How handshakes go now.
    ///
    /// # Errors
    /// If there can be none now.
    fn accepts(&self) -> Result<TlsAcceptor, String>;

    /// Returns the name of the client that has presented this chain, or the reason why it may not stay.
    fn guest(&self, chain: &[CertificateDer<'_>]) -> Result<String, String>;

    /// Returns once a guest has to go, with why.
    fn goes(&self, chain: PresentedChain) -> BoxFuture<'static, String>;
}

/// A listener, with whom it lets in, as whom, and how many.
pub(super) struct QuotaAcceptor {
    pub(super) listener: TcpListener,
    pub(super) host: Arc<dyn ClientPolicy>,
    /// A word for them in the log.
    pub(super) guests: &'static str,
    /// Metrics of the edge.
    pub(super) metrics: Arc<Metrics>,
    /// Connections at once.
    pub(super) most: usize,
    /// Of these, for one of its guests.
    pub(super) each: usize,
}

impl QuotaAcceptor {
    /// Serves admitted clients, until `stop`.
    pub(super) async fn run(self, router: Router, stop: CancellationToken) {
        let Ok(address) = self.listener.local_addr() else {
            return;
        };
        let (hand_over, accepted) = mpsc::channel(1);
        let tasks = Arc::new(TaskGroup::new(&stop));
        let hall = AcceptQueue {
            shaking: self.metrics.connection_limit("reader_handshakes", HANDS),
            places: self.metrics.connection_limit("api_cache", self.most),
            staying: Quota::new(),
            each: self.each,
            host: self.host,
            guests: self.guests,
            hand_over,
            stop: stop.clone(),
            refused: Arc::default(),
        };
        let listener = AcceptedConnections { accepted, address };
        let router = router.layer(middleware::from_fn(keep_place));
        let service = router.into_make_service_with_connect_info::<ConnectionPlace>();
        tokio::select! {
            served = async { axum::serve(listener, service).await } => {
                debug!(?served, "an API cache listener stopped");
            }
            () = hall.accept(self.listener, &tasks) => {}
            () = stop.cancelled() => {}
        }
    }
}

/// Between the listener and the server.
#[derive(Clone)]
struct AcceptQueue {
    shaking: ConnectionLimit,
    places: ConnectionLimit,
    /// Limit on connections, shared by their sources.
    staying: Quota<String>,
    each: usize,
    host: Arc<dyn ClientPolicy>,
    guests: &'static str,
    hand_over: mpsc::Sender<(LimitedConnection<TlsStream<TcpStream>>, SocketAddr)>,
    stop: CancellationToken,
    /// Throttle of the log message about refused clients.
    refused: Arc<LogThrottle>,
}

impl AcceptQueue {
    async fn accept(&self, mut listener: TcpListener, tasks: &TaskGroup) {
        loop {
            let (tcp, from) = Listener::accept(&mut listener).await;
            let Ok(hand) = self.shaking.admit(from.ip()) else {
                continue;
            };
            set_keepalive(&tcp);
            let hall = self.clone();
            tasks.spawn(info_span!("guest", kind = self.guests, %from), async move {
                let shaken = hand.run(pin!(timeout(HANDSHAKE, hall.shake(tcp)))).await;
                match shaken {
                    Some(Ok(Ok(tls))) => {
                        drop(hand);
                        hall.keep(tls, from).await;
                    }
                    Some(Ok(Err((why, tcp)))) => {
                        hall.refused(&why);
                        hand.run(pin!(lingering_close::close(tcp))).await;
                    }
                    Some(Err(_)) => hall.refused("TLS handshake timeout"),
                    // The connection limit counts and logs evictions.
                    None => {}
                }
            });
        }
    }

    /// Logs the reason why a client was refused.
    fn refused(&self, why: &str) {
        let guests = self.guests;
        if self.refused.happened_within(QUIET).is_some() {
            warn!(
                why,
                guests, "client refused; further ones are logged at debug level for ten minutes"
            );
        } else {
            debug!(why, guests, "client refused");
        }
    }

    /// Performs the TLS handshake; on failure returns the reason, and the socket by which the client can be told.
    async fn shake(&self, tcp: TcpStream) -> Result<TlsStream<TcpStream>, (String, TcpStream)> {
        let accepts = match self.host.accepts() {
            Ok(accepts) => accepts,
            Err(why) => return Err((why, tcp)),
        };
        let shaken = accepts.accept(tcp).into_fallible().await;
        shaken.map_err(|(error, tcp)| {
            let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
            let content = InvalidMessage::InvalidContentType;
            if inner == Some(&rustls::Error::InvalidMessage(content)) {
                let why = "the client does not use TLS, which this listener requires (https://)";
                return (why.to_owned(), tcp);
            }
            (error.to_string(), tcp)
        })
    }

    /// Hands the connection over, and closes it once the client has to go.
    async fn keep(&self, tls: TlsStream<TcpStream>, from: SocketAddr) {
        let chain = tls.get_ref().1.peer_certificates().unwrap_or_default();
        let chain: PresentedChain = chain.iter().map(|one| one.clone().into_owned()).collect();
        let who = match self.host.guest(&chain) {
            Ok(who) => who,
            Err(why) => return self.refused(&why),
        };
        let Some(_share) = self.staying.take(who.clone(), self.each) else {
            return self.refused("the client has reached its limit of connections");
        };
        let Ok(place) = self.places.admit(from.ip()) else {
            return;
        };
        if !chain.is_empty() {
            // The client is authenticated, so it is not evicted for new connections.
            place.settle();
        }
        let over = self.stop.child_token();
        let connection = LimitedConnection::new(tls, place, over.clone());
        if self.hand_over.send((connection, from)).await.is_err() {
            return;
        }
        tokio::select! {
            () = over.cancelled() => {}
            why = self.host.goes(chain) => {
                debug!(who, why, "closing the connection of a client");
                over.cancel();
            }
        }
    }
}
