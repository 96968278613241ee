//! Accepts the connections of a listener, selects the worker that serves each, and handles a changed listener configuration.
//!
//! A [`ListenerSocket`] accepts for as long as its socket exists, and leads to the current configuration. If anything before HTTP
//! names the node, it selects the worker. The socket moves there once.

mod https;

use super::{ClientConnection, Listener, conn_io, http, proxy_protocol, tcp};
use crate::{
    config::ListenerProtocol,
    proxy::{
        Proxy,
        authn::{AuthMethod, ClientIdentity, ConnectionCredentials, UID},
        forwarding_headers::LastValues,
        route::{self, RouteInput},
    },
    worker::{WorkerId, Workers},
};
use arc_swap::ArcSwap;
use causeway_certs::verify::PeerRejected;
use causeway_rt::{
    connection_limit::Slot,
    listener::{BoundSocket, RemoteAddr, SocketListener, original_destination},
    socket::{DetachedSocket, Socket},
};
use causeway_tunnel::informational::InformationalResponses;
use std::{
    net::SocketAddr,
    pin::pin,
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::debug_span;

/// Enough for the runtime to hear of a connection that the kernel has taken.
const QUEUED: Duration = Duration::from_millis(2);
/// Maximum time in which a listener that closes still accepts queued connections: in a flood the queue never empties.
const EMPTYING: Duration = Duration::from_secs(1);

/// Socket of one listener: accepts for as long as the socket exists, and leads to the current configuration.
#[derive(Debug)]
pub struct ListenerSocket {
    door: ArcSwap<ListenerConfig>,
    stop: CancellationToken,
}

impl ListenerSocket {
    /// Returns a socket that leads to these proxies, by worker, and closes when `stop` is cancelled.
    pub fn new(workers: &Workers, proxies: Vec<Proxy>, stop: CancellationToken) -> Arc<Self> {
        Arc::new_cyclic(|entrance| {
            let door = ListenerConfig {
                workers: workers.clone(),
                proxies: proxies.into(),
                stop: stop.child_token(),
                entrance: entrance.clone(),
            };
            Self {
                door: ArcSwap::from_pointee(door),
                stop,
            }
        })
    }

    /// Accepts on every worker until it is closed. Returns at once.
    ///
    /// # Errors
    /// If the socket cannot be shared with the workers.
    pub fn open(self: &Arc<Self>, listener: &BoundSocket) -> std::io::Result<()> {
        let door = self.door.load_full();
        for worker in door.workers.all() {
            let (entrance, listener) = (self.clone(), listener.try_clone()?);
            let proxy = &door.proxies[worker.0];
            let span = debug_span!("listener", name = proxy.listener.name);
            let runtime = door.workers.runtime(worker);
            proxy.tasks.spawn_on(runtime, span, async move {
                match listener.attach() {
                    Ok(listener) => entrance.accept(worker, listener).await,
                    Err(error) => {
                        tracing::error!(%error, "a listener cannot listen on this worker");
                    }
                }
            });
        }
        Ok(())
    }

    /// Retires the current configuration, which is about to be replaced or closed.
    pub fn retire(&self, linger: bool) {
        self.door.load().listener().retire(linger);
    }

    /// Leads new clients, and those in a handshake, to these proxies. Existing connections end in order: what they have begun is
    /// finished, and nothing new begins on them.
    pub fn replace(&self, proxies: Vec<Proxy>) {
        let old = self.door.load_full();
        let door = ListenerConfig {
            proxies: proxies.into(),
            stop: self.stop.child_token(),
            ..ListenerConfig::clone(&old)
        };
        self.door.store(Arc::new(door));
        old.stop.cancel();
    }

    /// Accepts no further client; existing connections end in order.
    pub fn close(&self) {
        self.stop.cancel();
    }

    async fn accept(self: Arc<Self>, worker: WorkerId, listener: SocketListener) {
        loop {
            let (socket, peer) = tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                accepted = listener.accept() => accepted,
            };
            self.door.load().dispatch(worker, socket, peer);
        }
        // The kernel would reset connections in its accept queue, with their requests: the queue is emptied first.
        let end = Instant::now() + EMPTYING;
        while Instant::now() < end
            && let Ok((socket, peer)) = timeout(QUEUED, listener.accept()).await
        {
            self.door.load().dispatch(worker, socket, peer);
        }
    }
}

/// Current configuration of one listener: its proxy on each worker, and the token that ends its connections.
#[derive(Clone, Debug)]
pub(super) struct ListenerConfig {
    workers: Workers,
    /// By worker.
    pub(super) proxies: Arc<[Proxy]>,
    pub(super) stop: CancellationToken,
    entrance: Weak<ListenerSocket>,
}

impl ListenerConfig {
    /// Returns the listener, which is the same on all workers.
    fn listener(&self) -> &Listener {
        &self.proxies[0].listener
    }

    /// Returns the current configuration, for a client that came in by this one and has begun nothing yet. Returns `None` if the
    /// listener is gone, or has another kind.
    pub(super) fn by_now(self) -> Option<Self> {
        if !self.listener().is_retired() {
            return Some(self);
        }
        let now = self.entrance.upgrade()?.door.load_full();
        let (old, new) = (self.listener(), now.listener());
        let same = old.kind == new.kind && old.tls.is_some() == new.tls.is_some();
        (same && !new.is_retired()).then(|| Self::clone(&now))
    }

    fn dispatch(&self, worker: WorkerId, socket: Socket, peer: RemoteAddr) {
        let proxy = &self.proxies[worker.0];
        // TLS has not started yet: only the metric and the log show the reason.
        let Some(room) = proxy.shared.limits.connection(peer) else {
            return;
        };
        let door = self.clone();
        let span = debug_span!("connection", %peer);
        proxy.tasks.spawn(span, async move {
            let place = room.clone();
            let welcome = pin!(door.welcome(worker, socket, peer, room));
            place.run(welcome).await;
        });
    }

    async fn welcome(self, worker: WorkerId, mut socket: Socket, peer: RemoteAddr, room: Slot) {
        let listener = &self.proxies[worker.0].listener;
        let Some((peer, original)) = self.told(worker, &mut socket, peer).await else {
            return;
        };
        let arrival = AcceptedSocket {
            peer,
            original,
            room,
        };
        if listener.tls.is_some() {
            return https::accept_tls(self, worker, socket, arrival).await;
        }
        let home = self.home(worker, None, original);
        self.hand_over((worker, home), socket, move |door, socket| async move {
            let Some(door) = door.by_now() else {
                return;
            };
            let proxy = door.proxies[home.0].clone();
            let client = match peer {
                RemoteAddr::Unix(uid) => Some(ClientIdentity::new(
                    &format!("{UID}{uid}"),
                    Vec::new(),
                    AuthMethod::Unix,
                    &proxy.shared.limits,
                )),
                RemoteAddr::Tcp(_) => None,
            };
            let connection = Arc::new(arrival.connection(&proxy, None, false, Ok(client)));
            let place = connection.room.clone();
            let serving = pin!(serve(
                &proxy,
                conn_io::ClientIo::plain(socket, &connection.condition, proxy.form()),
                connection,
                door.stop.clone(),
            ));
            place.run(serving).await;
        });
    }

    /// Returns the source of a connection, and its original destination if the listener needs that: from a PROXY header if one is
    /// due, else from the kernel.
    async fn told(
        &self,
        worker: WorkerId,
        socket: &mut Socket,
        peer: RemoteAddr,
    ) -> Option<(RemoteAddr, Option<SocketAddr>)> {
        let proxy = &self.proxies[worker.0];
        let listener = &proxy.listener;
        let asked = |original| listener.original_destination.then_some(original).flatten();
        if !listener.is_proxied(peer) {
            return Some((peer, asked(original_destination(socket))));
        }
        let read = timeout(proxy.shared.timeouts.tls, proxy_protocol::read(socket)).await;
        match read.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())) {
            Ok(Some(told)) => Some((RemoteAddr::Tcp(told.source), asked(Some(told.destination)))),
            Ok(None) => Some((peer, None)),
            Err(error) => {
                let kind = listener.kind.as_str();
                proxy.shared.metrics.handshake_failed(kind, "proxy");
                tracing::debug!(listener = listener.name, %error, "a connection has no valid PROXY header");
                None
            }
        }
    }

    /// Returns the worker that owns the node which the connection names, or the worker that accepted the connection if it names
    /// none.
    pub(super) fn home(
        &self,
        here: WorkerId,
        sni: Option<&str>,
        original: Option<SocketAddr>,
    ) -> WorkerId {
        let proxy = &self.proxies[here.0];
        let asked = RouteInput {
            sni,
            original,
            fixed: proxy.listener.node.as_ref(),
            ..RouteInput::default()
        };
        route::node(&asked, &proxy.shared.nodes).map_or(here, |node| self.workers.of(&node))
    }

    /// Serves the socket on its home worker: here if that is here, else it moves.
    pub(super) fn hand_over<F>(
        self,
        (here, home): (WorkerId, WorkerId),
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
        let runtime = self.workers.runtime(home).clone();
        let detached = match socket.detach() {
            Ok(detached) => detached,
            Err(error) => {
                return tracing::warn!(%error, "a connection could not be moved to another worker");
            }
        };
        tasks.spawn_on(&runtime, span, async move {
            match DetachedSocket::attach(detached) {
                Ok(socket) => serve(self, socket).await,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be moved to another worker");
                }
            }
        });
    }
}

/// A client's socket that was just accepted.
#[derive(Debug)]
pub(crate) struct AcceptedSocket {
    pub(crate) peer: RemoteAddr,
    pub(crate) original: Option<SocketAddr>,
    pub(crate) room: Slot,
}

impl AcceptedSocket {
    fn connection(
        self,
        proxy: &Proxy,
        sni: Option<String>,
        tls: bool,
        client: Result<Option<ClientIdentity>, PeerRejected>,
    ) -> ClientConnection {
        if matches!(client, Ok(Some(_))) {
            self.room.settle();
        }
        ClientConnection {
            peer: self.peer,
            sni,
            original: self.original,
            tls,
            credentials: ConnectionCredentials::new(client),
            condition: Arc::default(),
            idle: Arc::default(),
            window: http::window(proxy),
            interims: InformationalResponses::default(),
            forwarded: LastValues::default(),
            room: self.room,
            _open: proxy.listener.metrics.connection(),
        }
    }
}

/// Serves one connection by the listener's kind.
pub(crate) async fn serve(
    proxy: &Proxy,
    io: conn_io::ClientIo,
    connection: Arc<ClientConnection>,
    stop: CancellationToken,
) {
    match proxy.listener.kind {
        ListenerProtocol::Tcp => tcp::serve(proxy, io, connection).await,
        ListenerProtocol::Https | ListenerProtocol::Http | ListenerProtocol::Connect => {
            http::serve(proxy, io, connection, stop).await;
        }
    }
}
