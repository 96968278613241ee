//! Where whoever is not of this machine comes in, over TLS: handshakes are tasks, a bounded number of them, each with a bound in
//! time; connections are bounded, too, and handed over to one server. Who comes is asked after the handshake and for as long as
//! the connection stays.

use crate::control::listen::{Any, Kept, watch_over};
use axum::{Router, serve::Listener};
use causeway_tunnel::{socket::AnyIo, task::Tasks};
use futures_util::future::BoxFuture;
use rustls_pki_types::CertificateDer;
use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info_span, warn};

/// A handshake takes two round trips of a site.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Handshakes at once: each costs a signature or two.
const HANDS: usize = 64;

/// What whoever comes has shown: its certificate, and what stands behind it.
pub(super) type Chain = Arc<[CertificateDer<'static>]>;

/// Who is let in.
pub(super) trait Host: Send + Sync + 'static {
    /// How handshakes go now.
    ///
    /// # Errors
    /// If there can be none now.
    fn accepts(&self) -> Result<TlsAcceptor, String>;

    /// Who has shown this, or why it may not stay.
    fn guest(&self, chain: &[CertificateDer<'_>]) -> Result<String, String>;

    /// Returns once a guest has to go, with why.
    fn goes(&self, chain: Chain) -> BoxFuture<'static, String>;
}

/// A listener, with whom it lets in, as whom, and how many.
pub(super) struct Door {
    pub(super) listener: TcpListener,
    pub(super) host: Arc<dyn Host>,
    /// A word for them in the log.
    pub(super) guests: &'static str,
    /// Connections at once.
    pub(super) most: usize,
}

impl Door {
    /// Serves whoever is let in, until `stop`.
    pub(super) async fn run(self, router: Router, stop: CancellationToken) {
        let Ok(address) = self.listener.local_addr() else {
            return;
        };
        let (hand_over, made) = mpsc::channel(1);
        let tasks = Arc::new(Tasks::new(&stop));
        let hall = Hall {
            host: self.host,
            guests: self.guests,
            hand_over,
            stop: stop.clone(),
            said: Arc::default(),
        };
        tokio::select! {
            served = async { axum::serve(Any::Made(made, address), router).await } => {
                debug!(?served, "a listener of the reader's ended");
            }
            () = hall.accept(self.listener, self.most, &tasks) => {}
            () = stop.cancelled() => {}
        }
    }
}

/// Between the listener and the server.
#[derive(Clone)]
struct Hall {
    host: Arc<dyn Host>,
    guests: &'static str,
    hand_over: mpsc::Sender<(AnyIo, SocketAddr)>,
    stop: CancellationToken,
    /// That somebody was refused has been said.
    said: Arc<AtomicBool>,
}

impl Hall {
    async fn accept(&self, mut listener: TcpListener, most: usize, tasks: &Tasks) {
        let (hands, places) = (
            Arc::new(Semaphore::new(HANDS)),
            Arc::new(Semaphore::new(most)),
        );
        loop {
            // What waits here is in the system's queue, which has its bound.
            let Ok(hand) = hands.clone().acquire_owned().await else {
                return;
            };
            let (tcp, from) = Listener::accept(&mut listener).await;
            let Ok(place) = places.clone().try_acquire_owned() else {
                debug!(%from, guests = self.guests, "there are as many connections as are taken");
                continue;
            };
            watch_over(&tcp);
            let hall = self.clone();
            tasks.spawn(info_span!("guest", kind = self.guests, %from), async move {
                let shaken = timeout(HANDSHAKE, hall.shake(tcp)).await;
                drop(hand);
                match shaken {
                    Ok(Ok(tls)) => hall.keep(tls, from, place).await,
                    Ok(Err(why)) => hall.refused(&why),
                    Err(_) => hall.refused("no TLS in time"),
                }
            });
        }
    }

    /// Says why somebody was not let in: once aloud, for whoever wonders why nobody reads here.
    fn refused(&self, why: &str) {
        if self.said.swap(true, Relaxed) {
            debug!(why, "refused");
        } else {
            let guests = self.guests;
            warn!(why, guests, "refused; further ones are told at debug");
        }
    }

    async fn shake(&self, tcp: TcpStream) -> Result<TlsStream<TcpStream>, String> {
        let tls = self.host.accepts()?.accept(tcp).await;
        tls.map_err(|error| error.to_string())
    }

    /// Hands the connection over, and closes it once whoever came has to go.
    async fn keep(&self, tls: TlsStream<TcpStream>, from: SocketAddr, place: OwnedSemaphorePermit) {
        let chain = tls.get_ref().1.peer_certificates().unwrap_or_default();
        let chain: Chain = chain.iter().map(|one| one.clone().into_owned()).collect();
        let who = match self.host.guest(&chain) {
            Ok(who) => who,
            Err(why) => return self.refused(&why),
        };
        let over = self.stop.child_token();
        let kept = Kept::new(Box::new(tls), place, over.clone());
        if self.hand_over.send((Box::new(kept), from)).await.is_err() {
            return;
        }
        tokio::select! {
            () = over.cancelled() => {}
            why = self.host.goes(chain) => {
                debug!(who, why, "its connection is closed");
                over.cancel();
            }
        }
    }
}
