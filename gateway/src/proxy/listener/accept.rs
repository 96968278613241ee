//! Accepts the connections of a listener, selects the worker that serves each, and handles a changed listener configuration.
//!
//! A [`ListenerSocket`] accepts as long as its socket exists, and refers to the current configuration. If the node is known
//! before HTTP, it selects the worker. The socket moves to that worker once.

mod https;
mod passthrough;
mod refusal;

use super::{ClientConnection, Listener, conn_io::ClientIo, http, tcp};
use crate::{
    config::ListenerProtocol,
    proxy::{
        Proxy,
        authn::{AuthMethod, ClientIdentity, ConnectionCredentials, UID_PREFIX},
        forwarding_headers::CachedValues,
        route,
    },
    proxy_protocol,
    worker::{WorkerId, Workers},
};
use arc_swap::{ArcSwap, ArcSwapOption};
use bytes::Bytes;
use causeway_certs::{NodeName, verify::PeerRejected};
use causeway_rt::{
    connection_limit::Slot,
    listener::{BoundSocket, RemoteAddr, SocketListener, original_destination},
    socket::{DetachedSocket, Socket},
};
use causeway_tunnel::{informational::InformationalResponses, reset_codes::AbortedStreams};
use https::ClientHello;
use passthrough::PassthroughHello;
use std::{
    net::SocketAddr,
    pin::pin,
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::debug_span;

/// Time for the runtime to be notified of a connection that the kernel has accepted.
const ACCEPT_QUEUE_WAIT: Duration = Duration::from_millis(2);
/// Maximum time in which a closing listener still accepts queued connections, because in a flood the queue never empties.
const MAX_ACCEPT_DRAIN: Duration = Duration::from_secs(1);

/// Interval of checks while a reload replaces a listener, which takes about as long.
const RELOAD_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Socket of one listener. It accepts as long as the socket exists, and refers to the current configuration.
#[derive(Debug)]
pub struct ListenerSocket {
    config: ArcSwap<ListenerConfig>,
    stop: CancellationToken,
    /// Cancelled when another process accepts on the same socket.
    handed_over: CancellationToken,
}

impl ListenerSocket {
    /// Returns a socket that is served by these proxies, by worker, and closes when `stop` is cancelled. If `handed_over` is
    /// cancelled before, another process serves the connections in the queue.
    pub fn new(
        workers: &Workers,
        proxies: Vec<Proxy>,
        (stop, handed_over): (CancellationToken, CancellationToken),
    ) -> Arc<Self> {
        Arc::new_cyclic(|socket| {
            let config = ListenerConfig {
                workers: workers.clone(),
                proxies: proxies.into(),
                stop: stop.child_token(),
                entrance: socket.clone(),
            };
            Self {
                config: ArcSwap::from_pointee(config),
                stop,
                handed_over,
            }
        })
    }

    /// Starts accepting on every worker until the socket is closed. Returns at once.
    ///
    /// # Errors
    /// If the socket cannot be shared with the workers.
    pub fn start_accepting(self: &Arc<Self>, listener: &BoundSocket) -> std::io::Result<()> {
        let config = self.config.load_full();
        for worker in config.workers.all() {
            let (socket, listener) = (self.clone(), listener.try_clone()?);
            let proxy = &config.proxies[worker.0];
            let span = debug_span!("listener", name = proxy.listener.name);
            let runtime = config.workers.runtime(worker);
            proxy.tasks.spawn_on(runtime, span, async move {
                match listener.attach() {
                    Ok(listener) => socket.accept(worker, listener).await,
                    Err(error) => {
                        tracing::error!(%error, "a listener cannot listen on this worker");
                    }
                }
            });
        }
        Ok(())
    }

    /// Retires the current configuration, which will be replaced or closed.
    pub fn retire(&self, has_grace_period: bool) {
        self.config.load().listener().retire(has_grace_period);
    }

    /// Replaces the configuration for new clients and those in a handshake. Existing connections end gracefully: open streams are
    /// finished, and no new ones begin.
    pub fn replace_config(&self, proxies: Vec<Proxy>) {
        let old = self.config.load_full();
        let config = ListenerConfig {
            proxies: proxies.into(),
            stop: self.stop.child_token(),
            ..ListenerConfig::clone(&old)
        };
        self.config.store(Arc::new(config));
        old.stop.cancel();
    }

    /// Stops accepting clients. Existing connections end gracefully.
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
            self.config.load().dispatch(worker, socket, peer);
        }
        if self.handed_over.is_cancelled() {
            return;
        }
        // The queue is emptied first, because the kernel would reset the connections in it together with their requests.
        let end = Instant::now() + MAX_ACCEPT_DRAIN;
        while Instant::now() < end
            && let Ok((socket, peer)) = timeout(ACCEPT_QUEUE_WAIT, listener.accept()).await
        {
            self.config.load().dispatch(worker, socket, peer);
        }
    }
}

/// Current configuration of one listener: its proxy on each worker, and the token that ends its connections.
#[derive(Clone, Debug)]
struct ListenerConfig {
    workers: Workers,
    /// Proxies by worker.
    proxies: Arc<[Proxy]>,
    stop: CancellationToken,
    entrance: Weak<ListenerSocket>,
}

impl ListenerConfig {
    /// Returns the listener of this configuration, which is the same on all workers.
    fn listener(&self) -> &Listener {
        &self.proxies[0].listener
    }

    /// Returns the current configuration for a client that arrived under this one and has no stream yet. During a reload, waits
    /// for the new configuration. Returns `None` if the listener is closed or has changed its kind.
    async fn current(self) -> Option<Self> {
        if !self.listener().is_retired() {
            return Some(self);
        }
        let socket = self.entrance.upgrade()?;
        let current = loop {
            let current = socket.config.load_full();
            if !current.listener().is_retired() {
                break current;
            }
            // A reload retires the listener first, then replaces or closes it. To drop the client meanwhile would reset it.
            if socket.stop.is_cancelled() {
                return None;
            }
            sleep(RELOAD_POLL_INTERVAL).await;
        };
        let (old, new) = (self.listener(), current.listener());
        let is_compatible = old.protocol == new.protocol && old.tls.is_some() == new.tls.is_some();
        is_compatible.then(|| Self::clone(&current))
    }

    fn dispatch(&self, worker: WorkerId, socket: Socket, peer: RemoteAddr) {
        let proxy = &self.proxies[worker.0];
        // TLS has not started yet, so only the metric and the log show the reason.
        let Some(slot) = proxy.shared.limits.admit_connection(peer) else {
            return;
        };
        let config = self.clone();
        let span = debug_span!("connection", %peer);
        proxy.tasks.spawn(span, async move {
            let slot_guard = slot.clone();
            let serving = pin!(config.prepare_connection(worker, socket, peer, slot));
            slot_guard.run(serving).await;
        });
    }

    async fn prepare_connection(
        self,
        worker: WorkerId,
        mut socket: Socket,
        peer: RemoteAddr,
        slot: Slot,
    ) {
        let listener = &self.proxies[worker.0].listener;
        let Some((peer, original)) = self.client_addresses(worker, &mut socket, peer).await else {
            return;
        };
        if !listener.serves_network(peer) {
            let (kind, metrics) = (
                listener.protocol.as_str(),
                &self.proxies[worker.0].shared.metrics,
            );
            metrics.handshake_failed(kind, "network");
            tracing::debug!(listener = listener.name, %peer, "a client is in no network that is served without TLS");
            return;
        }
        let mut accepted = AcceptedSocket {
            peer,
            original,
            member: None,
            room: slot,
        };
        let proxy = &self.proxies[worker.0];
        let (socket, start) = if listener.tls.is_some() {
            match https::read_client_hello(proxy, socket, &accepted).await {
                Some((socket, hello)) => (socket, Start::Tls(Box::new(hello))),
                None => return,
            }
        } else if listener.protocol == ListenerProtocol::Passthrough {
            match passthrough::read_client_hello(proxy, socket, (peer, original)).await {
                Some((socket, hello)) => (socket, Start::Passthrough(hello)),
                None => return,
            }
        } else {
            (socket, Start::Plain)
        };
        let server_name = start.server_name();
        let home_worker = self.home_worker(worker, server_name.as_deref(), &mut accepted);
        self.move_to_worker(
            (worker, home_worker),
            socket,
            move |config, socket| async move {
                let slot = accepted.room.clone();
                let serving = pin!(async {
                    match start {
                        Start::Tls(hello) => {
                            (config.serve_tls(home_worker, socket, *hello, accepted)).await;
                        }
                        start => {
                            (config.serve_plain(home_worker, socket, start, accepted)).await;
                        }
                    }
                });
                slot.run(serving).await;
            },
        );
    }

    /// Finishes the TLS handshake and serves the connection.
    async fn serve_tls(
        self,
        worker: WorkerId,
        socket: Socket,
        hello: ClientHello,
        accepted: AcceptedSocket,
    ) {
        let proxy = (&self.proxies[worker.0], self.workers.client_turns(worker));
        // Boxed, because it is larger than all that follows, and a connection may be open for hours after it.
        let handshake = Box::pin(https::finish_handshake(proxy, hello, socket, &accepted));
        let Some(stream) = handshake.await else {
            return;
        };
        // The listener may have been replaced during the handshake. The new listener then checks the client.
        let Some(config) = self.current().await else {
            return;
        };
        let proxy = &config.proxies[worker.0];
        let (server_name, client) = https::verify_client(proxy, &stream);
        let connection = Arc::new(accepted.connection(proxy, server_name, true, client));
        let io = ClientIo::tls(
            (stream, proxy.listener.is_proxy()),
            &connection.condition,
            proxy.error_format(),
        );
        serve(proxy, io, connection, config.stop.clone()).await;
    }

    /// Serves a connection whose TLS, if any, does not end here.
    async fn serve_plain(
        self,
        worker: WorkerId,
        socket: Socket,
        start: Start,
        accepted: AcceptedSocket,
    ) {
        let Some(config) = self.current().await else {
            return;
        };
        let proxy = &config.proxies[worker.0];
        let client = match accepted.peer {
            RemoteAddr::Unix(uid) => Some(ClientIdentity::new(
                &format!("{UID_PREFIX}{uid}"),
                Vec::new(),
                AuthMethod::Unix,
                &proxy.shared.limits,
            )),
            RemoteAddr::Tcp(_) => None,
        };
        let (server_name, unread) = match start {
            Start::Passthrough(hello) => (hello.server_name, hello.bytes),
            Start::Plain | Start::Tls(_) => (None, Bytes::new()),
        };
        let connection = Arc::new(accepted.connection(proxy, server_name, false, Ok(client)));
        let socket = (socket, unread);
        let io = ClientIo::plain(socket, &connection.condition, proxy.error_format());
        serve(proxy, io, connection, config.stop.clone()).await;
    }

    /// Returns the source of a connection, and its original destination if the listener needs it. Both come from the PROXY header
    /// if one is required, otherwise from the kernel.
    async fn client_addresses(
        &self,
        worker: WorkerId,
        socket: &mut Socket,
        peer: RemoteAddr,
    ) -> Option<(RemoteAddr, Option<SocketAddr>)> {
        let proxy = &self.proxies[worker.0];
        let listener = &proxy.listener;
        let wanted_destination =
            |original| listener.original_destination.then_some(original).flatten();
        if !listener.is_proxied(peer) {
            return Some((peer, wanted_destination(original_destination(socket))));
        }
        let header = timeout(proxy.shared.timeouts.tls, proxy_protocol::read(socket)).await;
        match header.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())) {
            Ok(Some(proxied)) => Some((
                RemoteAddr::Tcp(proxied.source),
                wanted_destination(Some(proxied.destination)),
            )),
            Ok(None) => Some((peer, None)),
            Err(error) => {
                let kind = listener.protocol.as_str();
                proxy.shared.metrics.handshake_failed(kind, "proxy");
                tracing::debug!(listener = listener.name, %error, "a connection has no valid PROXY header");
                None
            }
        }
    }

    /// Returns the worker that owns the node named by the connection, or the member of the listener's set that is chosen here.
    /// Without a node, returns the worker that accepted the connection.
    fn home_worker(
        &self,
        accepting_worker: WorkerId,
        sni: Option<&str>,
        accepted: &mut AcceptedSocket,
    ) -> WorkerId {
        let proxy = &self.proxies[accepting_worker.0];
        let route_input = proxy
            .listener
            .connection_route_input(sni, accepted.original);
        let node = route::bound_node(&route_input, &proxy.shared.nodes).or_else(|| {
            accepted.member = proxy.first_member();
            accepted.member.clone()
        });
        node.map_or(accepting_worker, |node| self.workers.worker_of(&node))
    }

    /// Serves the socket on its home worker, and moves it there if necessary.
    fn move_to_worker<F>(
        self,
        (accepting_worker, home_worker): (WorkerId, WorkerId),
        socket: Socket,
        serve: impl FnOnce(Self, Socket) -> F + Send + 'static,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let tasks = self.proxies[home_worker.0].tasks.clone();
        let span = tracing::Span::current();
        if accepting_worker == home_worker {
            return tasks.spawn(span, serve(self, socket));
        }
        let runtime = self.workers.runtime(home_worker).clone();
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

/// Start of a connection, as far as it was read to select the worker.
enum Start {
    /// Nothing.
    Plain,
    /// ClientHello of a TLS connection that ends here.
    Tls(Box<ClientHello>),
    /// ClientHello of a TLS connection that ends at the upstream.
    Passthrough(PassthroughHello),
}

impl Start {
    /// Returns the server name, if the client sent one.
    fn server_name(&self) -> Option<String> {
        match self {
            Self::Plain => None,
            Self::Tls(hello) => hello.server_name(),
            Self::Passthrough(hello) => hello.server_name.clone(),
        }
    }
}

/// Client socket that was just accepted.
#[derive(Debug)]
pub(crate) struct AcceptedSocket {
    pub(crate) peer: RemoteAddr,
    pub(crate) original: Option<SocketAddr>,
    pub(crate) member: Option<NodeName>,
    pub(crate) room: Slot,
}

impl AcceptedSocket {
    pub(crate) fn connection(
        self,
        proxy: &Proxy,
        sni: Option<String>,
        tls: bool,
        client: Result<Option<ClientIdentity>, PeerRejected>,
    ) -> ClientConnection {
        if matches!(client, Ok(Some(_))) {
            self.room.protect();
        }
        ClientConnection {
            peer: self.peer,
            sni,
            original: self.original,
            member: ArcSwapOption::from_pointee(self.member),
            tls,
            credentials: ConnectionCredentials::new(client),
            condition: Arc::default(),
            idle: Arc::default(),
            window: http::stream_window(proxy),
            interims: InformationalResponses::default(),
            aborted: AbortedStreams::default(),
            forwarded: CachedValues::default(),
            slot: self.room,
            _connection_guard: proxy.listener.metrics.connection_guard(),
        }
    }
}

/// Serves one connection with the protocol of the listener.
async fn serve(
    proxy: &Proxy,
    io: ClientIo,
    connection: Arc<ClientConnection>,
    stop: CancellationToken,
) {
    match proxy.listener.protocol {
        ListenerProtocol::Tcp | ListenerProtocol::Passthrough => {
            tcp::serve(proxy, io, connection).await;
        }
        ListenerProtocol::Https | ListenerProtocol::Http | ListenerProtocol::Connect => {
            http::serve(proxy, io, connection, stop).await;
        }
    }
}
