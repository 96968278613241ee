//! Leads callers of the nodes' own addresses from a host where no gateway runs to one elsewhere.
//!
//! Owns a listener, to which the kernel leads them (`control::nat`, the gateway's own), and passes each on: to a front,
//! with a PROXY v2 header, so that the gateway knows who calls and where to, and decides as ever. Which addresses are
//! nodes' at the edge is the word of whoever fills the table of nodes. Of a client's bytes it sees
//! whether they begin a TLS handshake (`first_flight`), and nothing else; it believes nobody.

mod admin;
mod config;
mod first_flight;
mod gateways;
mod reload;
mod session;

use crate::{
    control::{
        drain::{Hold, Readiness},
        http,
        nat::{Nat, NatError},
    },
    metrics::RedirectorMetrics,
    seldom::Seldom,
    state::{Nodes, NodesWriter},
};
use arc_swap::ArcSwap;
use causeway_config::Reloads;
use causeway_tunnel::{
    connection_limit::ConnectionLimit,
    listener::{self, Listener, Peer},
    socket::{Abort, Socket},
    task::Tasks,
};
pub use config::{Admin, Cluster, Config, Limits, Timeouts};
use gateways::Gateways;
use reload::Takers;
pub use reload::{Changed, Reloader};
use std::{io, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug_span, info_span};

/// What is not a session gets to end.
const FAREWELL: Duration = Duration::from_secs(5);
/// Enough for the runtime to hear of a connection that the kernel has taken.
const QUEUED: Duration = Duration::from_millis(2);
/// When this stops it takes those at most for so long: in a flood the queue never empties.
const EMPTYING: Duration = Duration::from_secs(1);

/// What keeps callers from being led elsewhere.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A listener cannot be bound.
    #[error("{what} cannot listen on {address}: {cause}")]
    Listen {
        /// Which.
        what: &'static str,
        /// Where.
        address: SocketAddr,
        /// Why; most often the address is in use.
        cause: io::Error,
    },
    /// The rules cannot be written.
    #[error(transparent)]
    Rules(#[from] NatError),
}

impl Error {
    /// Whether one that is started again as it is would end the same way, until its owner changes something.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Rules(NatError::NotAllowed))
    }
}

/// What passes callers on needs to know.
#[derive(Debug)]
struct Passing {
    takers: ArcSwap<Takers>,
    nodes: Nodes,
    timeouts: Timeouts,
    metrics: Arc<RedirectorMetrics>,
    /// Callers whom no gateway took.
    lost: Seldom,
}

/// How a redirector fares; a cheap clone.
#[derive(Clone, Debug)]
pub struct Fares {
    readiness: Readiness,
    nodes: Nodes,
}

impl Fares {
    /// Of one that is as ready as this says, for these nodes.
    pub fn new(readiness: &Readiness, nodes: Nodes) -> Self {
        let readiness = readiness.clone();
        Self { readiness, nodes }
    }

    /// What it lacks, if anything.
    pub fn trouble(&self) -> Option<String> {
        if self.readiness.is_draining() {
            return Some("connections are drained, and nobody is led here any more".to_owned());
        }
        self.readiness.held()
    }

    /// Addresses of which callers are led away.
    pub fn addresses(&self) -> usize {
        self.nodes.edge_addresses().len()
    }
}

/// One whose listeners are bound and whose rules stand.
#[derive(Debug)]
pub struct Redirector {
    passing: Arc<Passing>,
    room: ConnectionLimit,
    listener: listener::Bound,
    admin: listener::Bound,
    addresses: [SocketAddr; 2],
    nat: Nat,
    nodes: NodesWriter,
    readiness: Readiness,
    reloader: Reloader,
    reloads: Reloads,
}

impl Redirector {
    /// Binds the listeners of this configuration, which has been validated, and writes the rules, which lead nobody
    /// away before there are nodes.
    ///
    /// # Errors
    /// What cannot be bound or written.
    pub fn bind(config: Config) -> Result<Self, Error> {
        let (listener, listens) = bound("listen", config.listen)?;
        let (admin, shown) = bound("admin.listen", config.admin.listen)?;
        let nodes = NodesWriter::default();
        let (led, leads) = watch::channel(reload::led(&config, listens));
        let nat = Nat::install(&config.table, &nodes, leads)?;
        let passing = Passing {
            takers: ArcSwap::from_pointee(Takers::of(&config, &Takers::default())),
            nodes: nodes.reader(),
            timeouts: config.timeouts.clone(),
            metrics: RedirectorMetrics::new(),
            lost: Seldom::default(),
        };
        let passing = Arc::new(passing);
        let room = passing
            .metrics
            .connection_limit("connections", config.limits.connections);
        Ok(Self {
            reloader: Reloader::new(config, passing.clone(), (listens, led)),
            reloads: Reloads::default(),
            passing,
            room,
            listener,
            admin,
            addresses: [listens, shown],
            nat,
            nodes,
            readiness: Readiness::default(),
        })
    }

    /// The table of nodes, for whoever knows them.
    pub fn nodes(&self) -> NodesWriter {
        self.nodes.clone()
    }

    /// By which another configuration is put into force, at any time from now on.
    pub fn reloader(&self) -> Reloader {
        self.reloader.clone()
    }

    /// The same, whose admin listener has the configuration read anew by these.
    #[must_use]
    pub fn reloads(self, reloads: Reloads) -> Self {
        Self { reloads, ..self }
    }

    /// What is counted.
    pub fn metrics(&self) -> Arc<RedirectorMetrics> {
        self.passing.metrics.clone()
    }

    /// Is not ready (`/readyz`) until what is returned is dropped.
    pub fn hold(&self, why: impl Into<String>) -> Hold {
        self.readiness.hold(why)
    }

    /// By which to tell how it fares, at any time from now on.
    pub fn fares(&self) -> Fares {
        Fares::new(&self.readiness, self.nodes.reader())
    }

    /// Passes callers on until `stop`, then drains for at most the configured time, and takes the rules away.
    ///
    /// # Errors
    /// If the listener cannot be served.
    pub async fn run(self, stop: CancellationToken) -> io::Result<()> {
        let [listens, shown] = self.addresses;
        let (fares, grace) = (self.fares(), self.passing.timeouts.drain);
        let (control, closing) = (Tasks::default(), CancellationToken::new());
        control.spawn(info_span!("redirect"), self.nat.run(closing.clone()));
        let metrics = self.passing.metrics.clone();
        let reloads = self.reloads;
        let app = admin::App {
            fares,
            metrics,
            reloads,
        };
        let pages = admin::router(app, shown.ip());
        let limit = self
            .passing
            .metrics
            .connection_limit("admin_connections", http::CONNECTIONS);
        let ends = http::Stop {
            announced: stop.clone(),
            end: closing.clone(),
        };
        let admin = http::run(self.admin, pages, limit, ends);
        control.spawn(info_span!("admin"), admin);
        let door = Door {
            passing: self.passing,
            room: self.room,
            sessions: Tasks::default(),
        };
        tracing::info!(listen = %listens, admin = %shown, "redirect ready");
        // Once it is asked to stop, whoever comes is refused at once.
        door.accept(self.listener.attach()?, &stop).await;
        self.readiness.drains();
        // The rules stay as long as connections do that they have led here.
        let left = door.sessions.drain(grace).await;
        closing.cancel();
        let stuck = control.drain(FAREWELL).await;
        tracing::info!(cut = left, stuck, "redirect stopped");
        Ok(())
    }
}

fn bound(what: &'static str, address: SocketAddr) -> Result<(listener::Bound, SocketAddr), Error> {
    let failed = |cause| Error::Listen {
        what,
        address,
        cause,
    };
    let bound = listener::Bound::tcp(address).map_err(failed)?;
    let address = bound.local_addr().unwrap_or(address);
    Ok((bound, address))
}

/// Where callers come in.
struct Door {
    passing: Arc<Passing>,
    room: ConnectionLimit,
    sessions: Tasks,
}

impl Door {
    /// Until `stop`.
    async fn accept(&self, listener: Listener, stop: &CancellationToken) {
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                accepted = listener.accept() => self.let_in(accepted),
            }
        }
        // Whoever is in the kernel's queue would be reset: it is emptied first.
        let end = Instant::now() + EMPTYING;
        while Instant::now() < end
            && let Ok(accepted) = timeout(QUEUED, listener.accept()).await
        {
            self.let_in(accepted);
        }
    }

    fn let_in(&self, (socket, peer): (Socket, Peer)) {
        let passing = self.passing.clone();
        let Ok(room) = self.room.admit(peer) else {
            passing.metrics.failed("limit");
            socket.abort();
            return;
        };
        // A session moves bytes from its first moment on: a place is never taken from one.
        room.settle();
        self.sessions
            .spawn(debug_span!("connection", %peer), async move {
                let _open = (passing.metrics.caller(), room);
                session::serve(&passing, socket, peer).await;
            });
    }
}
