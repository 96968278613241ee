//! Step 1: fronts accept callers and know their connections.
//!
//! Each core accepts from its own clone of a front's socket. Whatever names the node before HTTP is spoken (the
//! ClientHello, the original destination, a fixed node) also names the core, and the socket moves there
//! once, before it is served. Handshakes run in tasks of their own, each within a bound.

mod blocks;
pub mod idle;
pub mod io;

pub mod https;

pub mod http;
pub mod tcp;

use crate::{
    config::{ErrorForm, Kind},
    core::{CoreId, Cores},
    metrics::{ConnectionGuard, FrontMetrics},
    proxy::{
        Proxy, Shared,
        caller::{Authentication, Caller, LastToken, Method, UID},
        limits::Taken,
        route::Asked,
    },
};
use ::http::HeaderValue;
use causeway_certs::{NodeName, verify::Trust};
use causeway_tunnel::{
    listener::{Bound, Listener, Peer, original_destination},
    socket::{Detached, Socket},
};
use idle::Idle;
use io::Condition;
use rustls::ServerConfig;
use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::debug_span;

/// Enough for the runtime to hear of a connection that the kernel has taken.
const QUEUED: Duration = Duration::from_millis(2);
/// A front that closes takes those at most for so long: in a flood the queue never empties.
const EMPTYING: Duration = Duration::from_secs(1);

/// A cloud-facing listener, as configured.
#[derive(Debug)]
pub struct Front {
    /// Its name in configuration and log.
    pub name: String,
    /// What it speaks.
    pub kind: Kind,
    /// The node that it stands for, if it stands for one.
    pub node: Option<NodeName>,
    /// The node port that it stands for.
    pub port: Option<u16>,
    /// The port that it listens on, which stands for nothing.
    pub listens: Option<u16>,
    /// TLS, if it speaks it, and whom it trusts.
    pub tls: Option<(Arc<ServerConfig>, Trust)>,
    /// Who is let in.
    pub authentication: Authentication,
    /// Whether the caller's Authorization goes to the app.
    pub forward_authorization: bool,
    /// How failures look.
    pub errors: ErrorForm,
    /// Whether DNAT's original destination is asked for.
    pub original_destination: bool,
    /// What is counted of it.
    pub metrics: Arc<FrontMetrics>,
}

impl Front {
    /// What a stream's connection, this front and the head's `authority` say about where it goes.
    pub fn asked<'a>(
        &'a self,
        connection: &'a Connection,
        authority: Option<&'a str>,
    ) -> Asked<'a> {
        Asked {
            sni: connection.sni.as_deref(),
            original: connection.original,
            fixed: self.node.as_ref(),
            port: self.port,
            authority,
        }
    }
}

/// One connection of a caller, for as long as anything of it is served: upgraded sessions too.
#[derive(Debug)]
pub struct Connection {
    /// The other end of the socket.
    pub peer: Peer,
    /// The server name of the ClientHello.
    pub sni: Option<String>,
    /// The destination before DNAT.
    pub original: Option<SocketAddr>,
    /// Whether TLS is spoken.
    pub tls: bool,
    /// The caller, where the connection says it (certificate, unix socket).
    pub caller: Option<Caller>,
    /// The socket's condition.
    pub condition: Arc<Condition>,
    /// Its requests that are open, where HTTP/2 is spoken.
    pub idle: Arc<Idle>,
    /// What each of its streams may hold unread, where HTTP/2 is spoken.
    pub window: u32,
    pub(crate) last_token: LastToken,
    /// What `Forwarded` said last, and for which authority: a kept-alive caller mostly names one.
    pub(crate) forwarded: Mutex<Option<(Option<Box<str>>, HeaderValue)>>,
    nobody: OnceLock<Caller>,
    _room: Taken,
    _open: ConnectionGuard,
}

impl Connection {
    /// The unidentified caller of a front that serves nobody in particular.
    pub fn nobody(&self, shared: &Shared) -> Caller {
        let make = || {
            let name = self
                .peer
                .ip()
                .map_or_else(|| "unix".to_owned(), |ip| ip.to_string());
            Caller::new(&name, Vec::new(), Method::Anonymous, shared)
        };
        self.nobody.get_or_init(make).clone()
    }
}

/// A caller's socket that was just accepted.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) peer: Peer,
    pub(crate) original: Option<SocketAddr>,
    pub(crate) room: Taken,
}

impl Arrival {
    fn connection(
        self,
        proxy: &Proxy,
        sni: Option<String>,
        tls: bool,
        caller: Option<Caller>,
    ) -> Connection {
        Connection {
            peer: self.peer,
            sni,
            original: self.original,
            tls,
            caller,
            condition: Arc::default(),
            idle: Arc::default(),
            last_token: LastToken::default(),
            window: http::window(proxy),
            forwarded: Mutex::default(),
            nobody: OnceLock::new(),
            _room: self.room,
            _open: proxy.front.metrics.connection(),
        }
    }
}

/// The door of one front: its socket, and its proxy on each core.
#[derive(Clone, Debug)]
pub struct Door {
    cores: Cores,
    /// By core.
    proxies: Arc<[Proxy]>,
    stop: CancellationToken,
}

impl Door {
    /// A door whose connections end in order when `stop` is cancelled.
    pub fn new(cores: &Cores, proxies: Vec<Proxy>, stop: CancellationToken) -> Self {
        Self {
            cores: cores.clone(),
            proxies: proxies.into(),
            stop,
        }
    }

    /// Accepts on every core until `stop`. Returns at once.
    ///
    /// # Errors
    /// If the socket cannot be shared with the cores.
    pub fn open(&self, listener: &Bound) -> std::io::Result<()> {
        for core in self.cores.all() {
            let (door, listener) = (self.clone(), listener.try_clone()?);
            let proxy = &self.proxies[core.0];
            let span = debug_span!("front", name = proxy.front.name);
            proxy
                .tasks
                .spawn_on(self.cores.runtime(core), span, async move {
                    match listener.attach() {
                        Ok(listener) => door.accept(core, listener).await,
                        Err(error) => tracing::error!(%error, "a front cannot listen on this core"),
                    }
                });
        }
        Ok(())
    }

    async fn accept(self, core: CoreId, listener: Listener) {
        loop {
            let (socket, peer) = tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                accepted = listener.accept() => accepted,
            };
            self.let_in(core, socket, peer);
        }
        // Whoever is in the kernel's queue would be reset, with the request: it is emptied first.
        let end = Instant::now() + EMPTYING;
        while Instant::now() < end
            && let Ok((socket, peer)) = timeout(QUEUED, listener.accept()).await
        {
            self.let_in(core, socket, peer);
        }
    }

    fn let_in(&self, core: CoreId, socket: Socket, peer: Peer) {
        let proxy = &self.proxies[core.0];
        let Some(room) = proxy.shared.limits.connection() else {
            proxy.shared.metrics.limit("connections");
            // Not even TLS is spoken yet: this line and the metric are all that tells why.
            if let Some(turned_away) = proxy.shared.limits.turned_away() {
                tracing::warn!(
                    front = proxy.front.name,
                    turned_away,
                    "there are as many callers' connections as may be (limits.connections)"
                );
            }
            return;
        };
        let door = self.clone();
        let span = debug_span!("connection", %peer);
        proxy.tasks.spawn(
            span,
            async move { door.welcome(core, socket, peer, room).await },
        );
    }

    async fn welcome(self, core: CoreId, socket: Socket, peer: Peer, room: Taken) {
        let front = &self.proxies[core.0].front;
        let original = front
            .original_destination
            .then(|| original_destination(&socket))
            .flatten();
        let arrival = Arrival {
            peer,
            original,
            room,
        };
        if front.tls.is_some() {
            return https::welcome(self, core, socket, arrival).await;
        }
        let home = self.home(core, None, original);
        self.hand_over((core, home), socket, move |door, socket| async move {
            let proxy = door.proxies[home.0].clone();
            let caller = match peer {
                Peer::Unix(uid) => Some(Caller::new(
                    &format!("{UID}{uid}"),
                    Vec::new(),
                    Method::Unix,
                    &proxy.shared,
                )),
                Peer::Tcp(_) => None,
            };
            let connection = Arc::new(arrival.connection(&proxy, None, false, caller));
            serve(
                &proxy,
                io::Io::plain(socket, &connection.condition),
                connection,
                door.stop.clone(),
            )
            .await;
        });
    }

    /// The core that owns what the connection names; where it names nothing, the one that accepted it.
    fn home(&self, here: CoreId, sni: Option<&str>, original: Option<SocketAddr>) -> CoreId {
        let proxy = &self.proxies[here.0];
        let asked = Asked {
            sni,
            original,
            fixed: proxy.front.node.as_ref(),
            ..Asked::default()
        };
        super::route::node(&asked, &proxy.shared.nodes).map_or(here, |node| self.cores.of(&node))
    }

    /// Serves the socket on its home core: here if that is here, else it moves.
    fn hand_over<F>(
        self,
        (here, home): (CoreId, CoreId),
        socket: Socket,
        serve: impl FnOnce(Self, Socket) -> F + Send + 'static,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let tasks = self.proxies[home.0].tasks.clone();
        let span = tracing::Span::current();
        if here == home {
            return tasks.spawn(span, serve(self, socket));
        }
        let runtime = self.cores.runtime(home).clone();
        let detached = match socket.detach() {
            Ok(detached) => detached,
            Err(error) => return tracing::warn!(%error, "a connection could not change cores"),
        };
        tasks.spawn_on(&runtime, span, async move {
            match Detached::attach(detached) {
                Ok(socket) => serve(self, socket).await,
                Err(error) => tracing::warn!(%error, "a connection could not change cores"),
            }
        });
    }
}

/// Serves one connection by the front's kind.
pub(crate) async fn serve(
    proxy: &Proxy,
    io: io::Io,
    connection: Arc<Connection>,
    stop: CancellationToken,
) {
    match proxy.front.kind {
        Kind::Tcp => tcp::serve(proxy, io, connection).await,
        Kind::Https | Kind::Http | Kind::Connect => http::serve(proxy, io, connection, stop).await,
    }
}
