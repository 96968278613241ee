//! The site network: neighbours of one pool read here, over TLS with the nodes' own certificates.
//!
//! A view from here is fresh only while this node reads at a gateway itself; when it does not any more, its neighbours are closed,
//! to ask anew. Handshakes are tasks, a bounded number of them, each with a bound in time. Who comes is asked again after the handshake, and
//! whenever the list of members changes: whoever is no member any more is closed. What this node shows and believes is its
//! identity as it is at each handshake, so a renewed certificate and another root need no word here.

use super::{choose::At, told::Told};
use crate::control::{
    held::Held,
    listen::{Any, Kept, watch_over},
};
use axum::{Router, serve::Listener};
use causeway_certs::verify::Site;
use causeway_tunnel::{socket::AnyIo, task::Tasks};
use rustls_pki_types::{CertificateDer, UnixTime};
use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch},
    time::{sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, TlsConnector, server::TlsStream};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, info_span};

/// A neighbour's handshake takes two round trips of a site.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Handshakes at once: each costs a signature or two.
const HANDS: usize = 64;
/// Connections at once: each watch of a member is one, and there are 256 members.
const MOST: usize = 512;
/// How often a neighbour that stays is looked at again: certificates end, and roots go out of use.
const AGAIN: Duration = Duration::from_mins(1);

/// What this node shows and believes on its site network. Cheap to clone.
#[derive(Clone)]
pub(super) struct Tls(Arc<Inner>);

struct Inner {
    held: Held,
    told: Told,
    made: Mutex<Option<Arc<Made>>>,
}

/// Both ends, of one identity.
pub(super) struct Made {
    site: Arc<Site>,
    accepts: TlsAcceptor,
    pub(super) dials: TlsConnector,
}

impl Tls {
    pub(super) fn new(held: Held, told: Told) -> Self {
        let made = Mutex::default();
        Self(Arc::new(Inner { held, told, made }))
    }

    /// Both ends as this node is now.
    ///
    /// # Errors
    /// If its certificate has no place on a site network.
    pub(super) fn now(&self) -> Result<Arc<Made>, String> {
        let identity = self.0.held.identity();
        let mut made = self.0.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(made) = made.as_ref().filter(|made| made.site.is_of(&identity)) {
            return Ok(made.clone());
        }
        let build = || {
            let site = Site::new(&identity, self.0.told.is_member())?;
            Ok(Made {
                accepts: site.server()?.into(),
                dials: site.client()?.into(),
                site,
            })
        };
        let both = build().map_err(|error: causeway_certs::verify::TrustError| {
            format!("this node's certificate is not for its neighbours: {error}")
        })?;
        Ok(made.insert(Arc::new(both)).clone())
    }

    /// The node that has shown this, if it is a neighbour still.
    fn neighbour(&self, chain: &[CertificateDer<'_>]) -> Result<String, String> {
        let member = self.now()?.site.member(chain, UnixTime::now());
        member
            .map(|node| node.as_str().to_owned())
            .map_err(|refused| refused.to_string())
    }
}

/// Serves members of the pool, until `stop`.
pub(super) async fn run(
    listener: TcpListener,
    router: Router,
    (tls, at): (Tls, watch::Receiver<Arc<At>>),
    stop: CancellationToken,
) {
    let Ok(address) = listener.local_addr() else {
        return;
    };
    let (hand_over, made) = mpsc::channel(1);
    let tasks = Arc::new(Tasks::new(&stop));
    let door = Door {
        tls,
        at,
        hand_over,
        stop: stop.clone(),
    };
    tokio::select! {
        served = async { axum::serve(Any::Made(made, address), router).await } => {
            debug!(?served, "the site listener ended");
        }
        () = door.accept(listener, &tasks) => {}
        () = stop.cancelled() => {}
    }
}

/// Where neighbours come in.
#[derive(Clone)]
struct Door {
    tls: Tls,
    at: watch::Receiver<Arc<At>>,
    hand_over: mpsc::Sender<(AnyIo, SocketAddr)>,
    stop: CancellationToken,
}

impl Door {
    async fn accept(&self, mut listener: TcpListener, tasks: &Tasks) {
        let (hands, places) = (
            Arc::new(Semaphore::new(HANDS)),
            Arc::new(Semaphore::new(MOST)),
        );
        loop {
            // What waits here is in the system's queue, which has its bound.
            let Ok(hand) = hands.clone().acquire_owned().await else {
                return;
            };
            let (tcp, from) = Listener::accept(&mut listener).await;
            let Ok(place) = places.clone().try_acquire_owned() else {
                debug!(%from, "the site has as many connections as it takes");
                continue;
            };
            watch_over(&tcp);
            let door = self.clone();
            tasks.spawn(info_span!("neighbour", %from), async move {
                let shaken = timeout(HANDSHAKE, door.shake(tcp)).await;
                drop(hand);
                match shaken {
                    Ok(Ok(tls)) => door.keep(tls, from, place).await,
                    Ok(Err(why)) => debug!(why, "refused"),
                    Err(_) => debug!("refused: no TLS in time"),
                }
            });
        }
    }

    async fn shake(&self, tcp: TcpStream) -> Result<TlsStream<TcpStream>, String> {
        let accepts = self.tls.now()?.accepts.clone();
        let tls = accepts.accept(tcp).await;
        tls.map_err(|error| error.to_string())
    }

    /// Hands the connection over, and closes it once whoever came is no neighbour any more.
    async fn keep(&self, tls: TlsStream<TcpStream>, from: SocketAddr, place: OwnedSemaphorePermit) {
        let chain = tls.get_ref().1.peer_certificates().unwrap_or_default();
        let chain: Vec<_> = chain.iter().map(|one| one.clone().into_owned()).collect();
        let mut told = self.tls.0.told.changes();
        let node = match self.tls.neighbour(&chain) {
            Ok(node) => node,
            Err(why) => return debug!(why, "refused"),
        };
        let over = self.stop.child_token();
        let kept = Kept::new(Box::new(tls), place, over.clone());
        if self.hand_over.send((Box::new(kept), from)).await.is_err() {
            return;
        }
        tokio::select! {
            () = over.cancelled() => {}
            why = self.turns_stranger(&chain, &mut told) => {
                info!(node, why, "no neighbour any more: its connection is closed");
                over.cancel();
            }
            () = self.loses_touch() => {
                debug!(node, "this node does not read at a gateway any more: its neighbour's connection is closed");
                over.cancel();
            }
        }
    }

    /// Returns when this node, which has read at a gateway, does not any more: whoever reads here is to ask anew.
    async fn loses_touch(&self) {
        let mut at = self.at.clone();
        // Whoever chooses is there as long as this is.
        let _ = at.wait_for(|at| at.is_first_hand()).await;
        let _ = at.wait_for(|at| !at.is_first_hand()).await;
    }

    /// Returns once this is no neighbour's any more, with why.
    async fn turns_stranger(
        &self,
        chain: &[CertificateDer<'_>],
        told: &mut watch::Receiver<causeway_tunnel::hello::Members>,
    ) -> String {
        loop {
            if let Err(why) = self.tls.neighbour(chain) {
                return why;
            }
            tokio::select! {
                changed = told.changed() => if changed.is_err() {
                    return "this edge ends".to_owned();
                },
                () = sleep(AGAIN) => {}
            }
        }
    }
}
