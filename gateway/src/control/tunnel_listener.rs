//! The tunnel port: TLS, then either a tunnel or HTTP requests of an edge.
//!
//! The ALPN in the `ClientHello` selects the configuration: `rh2` requires the certificate of an edge, `rh2-peer` that of another
//! gateway (`peer`), `h2-egress` that of an edge that opens streams itself (`egress`), and `h2` and `http/1.1` make an edge's
//! certificate optional.
//! TLS has a timeout, and the certificate is checked, resumed or not. A tunnel moves to the worker of its node, where its session
//! begins. `control::api_cache` serves an edge that connects by `h2` with its certificate, if the API cache is configured.
//! `control::enrol` serves all other requests. Handshakes are spread over the workers and never awaited in the accept loop.
//! [`TunnelListener::run`] owns every task, and ends them when it ends.

mod connection;
mod context;
mod egress;
mod handshake_error;
pub(crate) mod peer;
mod session;
mod tls;

#[cfg(test)]
mod tests;

use crate::{
    audit,
    control::{
        api_cache::{ApiCacheServer, AuthorizedEdge},
        eligibility::untrusted_reason,
        http::{self, Peer},
    },
    proxy_protocol,
    shared_state::SharedState,
    state::registry::EdgeCertificate,
    worker::WorkerId,
};
use causeway_certs::{Identity, NodeName, PeerRejected};
use causeway_rt::{
    connection_limit::{Busy, ConnectionLimit, Slot},
    lingering_close,
    listener::{self, BoundSocket},
    log_throttle::LogThrottle,
    socket::{DetachedSocket, Socket, set_tunnel_options},
    task::TaskGroup,
    turns::Turn,
};
use causeway_tunnel::wire;
use context::HandshakenEdge;
pub use context::{EgressEdge, EgressHandler, EgressLink, TunnelListener, TunnelPortLimits};
use handshake_error::{HandshakeError, tls_error};
use std::{io, net::SocketAddr, pin::pin, sync::Arc, time::Duration};
pub(crate) use tls::edge_verifier;
use tls::{AlpnProtocol, Io, TlsError};
pub use tls::{LiveTls, Tls};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info_span, warn};

/// Time beyond the drain time for a tunnel to receive the last message and to disconnect.
const GOODBYE_TIME: Duration = Duration::from_secs(2);
/// Time for the connections of enrolments that are open when the gateway stops: a second more than [`http::serve`] lets them live. A
/// request that takes longer ends with its connection, and the edge repeats it at another gateway or at the next process.
const MAX_ENROLMENT_WAIT: Duration = http::SHORT_REQUEST_LIMITS
    .last_request
    .saturating_add(http::SHORT_REQUEST_LIMITS.grace)
    .saturating_add(Duration::from_secs(1));
/// Interval of checks whether enrolments have ended.
const ENROLMENT_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The label of this listener in metrics.
const METRICS_LABEL: &str = "tunnel";

/// State that the handshakes share with the accept loop.
#[derive(Clone)]
struct HandshakeContext {
    admission: Arc<TunnelListener>,
    handshaken_sender: mpsc::Sender<Box<HandshakenEdge>>,
    tls_limit: ConnectionLimit,
    tunnel_handshake_limit: ConnectionLimit,
    joining: ConnectionLimit,
    renewing: ConnectionLimit,
    overload_throttle: Arc<LogThrottle>,
    stop: CancellationToken,
}

impl TunnelListener {
    /// Waits until this node can be checked, and returns whether it can. A node that only the cluster can know waits until the
    /// nodes of the cluster are loaded. A node that this gateway does not know is looked up in the shared state, because it may
    /// have joined through another gateway a moment ago. A rejection would keep it away for a minute. If every node with a
    /// trusted certificate is admitted, the function does not wait.
    async fn wait_until_checkable(&self, node: &NodeName, wait_limit: Duration) -> bool {
        if self.tls.load().admits_any_node() {
            return true;
        }
        let checkable = async {
            if let Some(shared) = &self.shared_state
                && self.nodes.get(node).is_none()
                && self.fetch_node(shared, node).await.is_none()
            {
                return false;
            }
            let Some(mut changes) = self.cluster.clone() else {
                return true;
            };
            while !self.nodes.has_cluster() && self.nodes.get(node).is_none() {
                if changes.changed().await.is_err() {
                    break;
                }
            }
            true
        };
        timeout(wait_limit, checkable).await.unwrap_or(false)
    }

    /// Loads the record of a node from the shared state, if it has one. Returns nothing if the engine does not answer.
    async fn fetch_node(&self, shared: &SharedState, node: &NodeName) -> Option<()> {
        match shared.fetch_node(node).await {
            Ok(Some(record)) => self.record_writer.add_stored(record),
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%node, %error, "cannot look up node {node} in the shared state");
                return None;
            }
        }
        Some(())
    }

    /// Accepts edges until `stop`. Cancels `enrolment_ended` when no edge is being enrolled any more. From `drain` on, tunnels
    /// continue for the drain time, while `control::drain` empties them, and the function returns when the last one has ended.
    /// Dropping the future ends all tunnels at once.
    pub async fn run(
        self,
        listener: BoundSocket,
        (stop, drain): (CancellationToken, CancellationToken),
        enrolment_ended: CancellationToken,
    ) {
        let enrolment_guard = enrolment_ended.drop_guard();
        let listener = match listener.attach() {
            Ok(listener) => listener,
            Err(error) => {
                tracing::error!(%error, "the listener of the tunnel port cannot be registered with the runtime");
                return;
            }
        };
        let grace = self.drain + GOODBYE_TIME;
        let workers: Vec<WorkerId> = self.workers.all().collect();
        let mut next = workers.iter().copied().cycle();
        let (handshaken_sender, mut handshaken_receiver) = mpsc::channel(self.limits.handshakes);
        let limit = |name, max| self.metrics.connection_limit(name, max);
        let context = HandshakeContext {
            tls_limit: limit("tunnel_arriving", self.limits.arriving),
            tunnel_handshake_limit: limit("tunnel_handshakes", self.limits.handshakes),
            joining: limit("joining", self.limits.joining),
            renewing: limit("renewing", self.limits.renewing),
            admission: Arc::new(self),
            handshaken_sender,
            overload_throttle: Arc::default(),
            stop: stop.clone(),
        };
        let tasks = TaskGroup::new(&CancellationToken::new());
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(arrived) = handshaken_receiver.recv() => context.admission.spawn_session(&tasks, arrived),
                (socket, peer) = listener.accept() => {
                    let (listener::RemoteAddr::Tcp(from), Ok(slot)) = (peer, context.tls_limit.admit(peer)) else {
                        continue;
                    };
                    let worker = next.next().unwrap_or(WorkerId(0));
                    let span = info_span!("handshake", from = tracing::field::Empty);
                    let runtime = context.admission.workers.runtime(worker);
                    let socket = (socket.detach(), worker);
                    tasks.spawn_on(runtime, span, context.clone().handle_connection(slot, socket, from));
                }
            }
        }
        // New connections are refused from here, because a refused edge tries another gateway sooner than an edge in a queue.
        drop((listener, handshaken_receiver));
        let enrolment = async {
            let enrolling = [&context.joining, &context.renewing];
            let end = Instant::now() + MAX_ENROLMENT_WAIT;
            while enrolling.iter().any(|limit| limit.open_connections() > 0) && Instant::now() < end
            {
                sleep(ENROLMENT_POLL_INTERVAL).await;
            }
            drop(enrolment_guard);
        };
        let tunnels = async {
            drain.cancelled().await;
            tasks.drain(grace).await
        };
        tokio::join!(tunnels, enrolment);
    }

    /// Spawns the session with an edge on the worker of its node.
    fn spawn_session(self: &Arc<Self>, tasks: &TaskGroup, edge: Box<HandshakenEdge>) {
        let node = edge.node.as_ref();
        let worker = node.map_or(WorkerId(0), |node| self.workers.worker_of(node));
        let name = node.map_or("(refused)", NodeName::as_str);
        let span = info_span!("tunnel", node = name, from = %edge.from);
        let session = session::run(self.clone(), edge);
        tasks.spawn_on(self.workers.runtime(worker), span, session);
    }
}

impl HandshakeContext {
    /// Handles one connection, from its first byte to its tunnel or to the end of its requests.
    async fn handle_connection(
        self,
        slot: Slot,
        (socket, worker): (io::Result<DetachedSocket>, WorkerId),
        peer: SocketAddr,
    ) {
        let received = slot.run(pin!(self.receive_source(socket, peer))).await;
        let (socket, from) = match received.unwrap_or(Err(HandshakeError::Evicted)) {
            Ok(received) => received,
            Err(handshake_error) => return self.report_failure(peer, &handshake_error),
        };
        tracing::Span::current().record("from", tracing::field::display(from));
        // A balancer's connections count for the source that its header states, so no source takes the places of all others.
        let slot = if from == peer {
            slot
        } else {
            drop(slot);
            match self.tls_limit.admit(from.ip()) {
                Ok(own_slot) => own_slot,
                Err(_) => return,
            }
        };
        let socket = (socket, worker);
        let finished = slot.run(pin!(self.finish_tls(&slot, socket, from))).await;
        let handshaken = match finished {
            Some(Ok(Some(shaken))) => shaken,
            Some(Ok(None)) => return,
            Some(Err(handshake_error)) => return self.report_failure(from, &handshake_error),
            None => return self.report_failure(from, &HandshakeError::Evicted),
        };
        drop(slot);
        let result = match handshaken {
            (AlpnProtocol::Tunnel, io, round_trip) => {
                self.send_to_session(io, from, round_trip).await
            }
            (AlpnProtocol::Peer, io, round_trip) => {
                Box::pin(self.serve_peer(io, from, round_trip)).await
            }
            (AlpnProtocol::Egress, io, round_trip) => {
                Box::pin(self.serve_egress(io, (from, worker), round_trip)).await
            }
            // Boxed: serving HTTP takes ten times the memory of a handshake, and a tunnel never needs it.
            (AlpnProtocol::Join, io, _) => Box::pin(self.serve_join(io, from)).await,
        };
        if let Err(failed) = result {
            self.report_failure(from, &failed);
        }
    }

    /// Returns the socket and the source of a connection: that of its PROXY header, if its peer is a balancer that sends one. The
    /// header has the time limit of a handshake.
    async fn receive_source(
        &self,
        socket: io::Result<DetachedSocket>,
        peer: SocketAddr,
    ) -> Result<(Socket, SocketAddr), HandshakeError> {
        let mut socket = socket?.attach()?;
        if let Some(tcp) = socket.tcp() {
            set_tunnel_options(tcp);
        }
        let settings = &self.admission.settings;
        if !proxy_protocol::is_proxied(&settings.proxy_protocol, peer.ip()) {
            return Ok((socket, peer));
        }
        let header = timeout(
            settings.handshake_timeout,
            proxy_protocol::read(&mut socket),
        )
        .await;
        let header = header.map_err(|_| HandshakeError::TooSlow(settings.handshake_timeout))?;
        let proxied = header.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => HandshakeError::ProxyHeader(error),
            // Such as a health check, which sends nothing.
            _ => HandshakeError::Tls(error),
        })?;
        Ok((socket, proxied.map_or(peer, |proxied| proxied.source)))
    }

    /// Finishes TLS within its timeout. Returns `None` if the handshake failed and the peer received the reason.
    async fn finish_tls(
        &self,
        slot: &Slot,
        (socket, worker): (Socket, WorkerId),
        from: SocketAddr,
    ) -> Result<Option<(AlpnProtocol, Io, Duration)>, HandshakeError> {
        let handshake_timeout = self.admission.settings.handshake_timeout;
        let tls = self.admission.tls.load_full();
        let accepts_peers = self.admission.peer_streams.is_some();
        let handshake = async {
            if let Some(tcp) = socket.tcp() {
                tcp.readable().await?;
            }
            let acquire_slot = self.acquire_handshake_slot(slot, worker, from);
            // Boxed, so that a connection that is still silent takes little memory.
            let socket = (socket, accepts_peers);
            Box::pin(tls.handshake(socket, acquire_slot)).await
        };
        match timeout(handshake_timeout, handshake).await {
            Ok(Ok(shaken)) => Ok(Some(shaken)),
            Ok(Err(TlsError { error, socket })) => {
                self.report_failure(from, &error);
                // The lingering close lets the peer read the alert. The connection counts against the limit until then.
                if let Some(socket) = socket {
                    lingering_close::close(socket).await;
                }
                Ok(None)
            }
            Err(_) => Err(HandshakeError::TooSlow(handshake_timeout)),
        }
    }

    /// Waits until a handshake may be computed: until one of the limited number is free, and for a turn of the worker. The wait is
    /// at most half the timeout of the handshake, because a peer that has waited for longer would end the handshake soon after
    /// its start, and so waste it.
    async fn acquire_handshake_slot(
        &self,
        slot: &Slot,
        worker: WorkerId,
        from: SocketAddr,
    ) -> Result<((Busy, Slot), Turn<'_>), HandshakeError> {
        let wait_limit = self.admission.settings.handshake_timeout / 2;
        let busy_guard = slot.busy();
        let acquiring = async {
            let place = self.tunnel_handshake_limit.acquire(from.ip()).await;
            let turn = self.admission.workers.edge_turns(worker).acquire().await;
            ((busy_guard, place), turn)
        };
        let acquired = timeout(wait_limit, acquiring).await;
        acquired.map_err(|_| HandshakeError::Overloaded(wait_limit))
    }

    /// Counts and logs a failed connection.
    fn report_failure(&self, from: SocketAddr, handshake_error: &HandshakeError) {
        let (word, is_notable) = handshake_error.classify();
        self.admission.metrics.handshake_failed(METRICS_LABEL, word);
        if let HandshakeError::Tls(error) = handshake_error
            && let Some(rustls::Error::AlertReceived(alert)) = tls_error(error)
        {
            let cause = tls::likely_cause(*alert);
            warn!(peer = %from, ?alert, cause, "the peer ended the TLS handshake with an alert");
            return;
        }
        if let HandshakeError::Overloaded(_) = handshake_error {
            if let Some(times) = self.overload_throttle.record() {
                warn!(times, peer = %from, why = %handshake_error, "refused connections to the tunnel port; their edges dial again");
            }
        } else if is_notable {
            warn!(peer = %from, why = %handshake_error, "refused a connection to the tunnel port");
            audit::log_rejected_edge("(unknown)", &from, word, handshake_error);
        } else {
            debug!(peer = %from, why = %handshake_error, "a connection to the tunnel port ended before its handshake");
        }
    }

    async fn send_to_session(
        &self,
        mut io: Io,
        from: SocketAddr,
        round_trip: Duration,
    ) -> Result<(), HandshakeError> {
        let (node, certificate) = match self.admission.tls.load().verify_edge(&io) {
            Ok((node, shown)) => (Ok(node), Some(shown)),
            Err(rejection) => (Err(rejection), None),
        };
        let socket = io.get_mut().0.take().ok_or(HandshakeError::Stopping)?;
        let edge = Box::new(HandshakenEdge {
            io,
            socket: socket.detach()?,
            node,
            certificate,
            from,
            round_trip,
        });
        self.handshaken_sender
            .send(edge)
            .await
            .map_err(|_| HandshakeError::Stopping)
    }

    async fn serve_join(&self, io: Io, from: SocketAddr) -> Result<(), HandshakeError> {
        let tls = self.admission.tls.load_full();
        let speaks_http2 = io.get_ref().1.alpn_protocol() == Some(wire::ALPN_H2);
        if let Some(api_cache) = self.admission.api_cache.as_ref().filter(|_| speaks_http2)
            && let Ok((node, certificate)) = tls.verify_edge(&io)
        {
            return self
                .serve_api_cache(api_cache, io, (node, certificate), from)
                .await;
        }
        let unidentified = (None, 0, None, None);
        let (identity, issued, root, vouched) = match tls.verify_peer_certificate(&io) {
            Ok(proven) => (Some(proven.identity), proven.issued_at, proven.root, None),
            Err(PeerRejected::NoCertificate) => unidentified,
            Err(refused @ PeerRejected::UnknownIssuer) => match tls.verify_join_certificate(&io) {
                Some(node) => (None, 0, None, Some(node?)),
                None => return Err(refused.into()),
            },
            Err(refused) => return Err(refused.into()),
        };
        // A certificate of the cluster's signers identifies a node as well.
        let is_identified = identity.is_some() || vouched.is_some();
        let limit = if is_identified {
            &self.renewing
        } else {
            &self.joining
        };
        let slot = limit.admit(from.ip()).map_err(|_| HandshakeError::Full)?;
        // A successor may have read the data directory already.
        if self.stop.is_cancelled() {
            return Err(HandshakeError::Stopping);
        }
        let peer = Peer {
            address: Some(from.ip().to_canonical()),
            identity,
            issued_at: issued,
            root,
            cluster_certificate: vouched,
        };
        let (router, stop) = (self.admission.enrol.clone(), self.stop.clone());
        let limits = http::SHORT_REQUEST_LIMITS;
        let serving = pin!(http::serve(
            io,
            router,
            (peer, Some(&slot)),
            limits,
            stop.into()
        ));
        slot.run(serving).await.ok_or(HandshakeError::Evicted)
    }

    /// Serves an edge that reads resources of its cluster through the API cache.
    async fn serve_api_cache(
        &self,
        api_cache: &ApiCacheServer,
        io: Io,
        (node, certificate): (NodeName, EdgeCertificate),
        from: SocketAddr,
    ) -> Result<(), HandshakeError> {
        let admission = &self.admission;
        // If the gateway cannot check the node in time, it refuses the edge, and the edge retries.
        let wait_limit = admission.settings.hello_timeout / 2;
        admission.wait_until_checkable(&node, wait_limit).await;
        let reader = AuthorizedEdge {
            io,
            peer: Peer {
                address: Some(from.ip().to_canonical()),
                identity: Some(Identity::Edge(node.clone())),
                issued_at: certificate.issued_at,
                root: certificate.root,
                cluster_certificate: None,
            },
            certificate,
            node: node.clone(),
        };
        let rejection = |shown: &EdgeCertificate| {
            untrusted_reason(admission.tls.load().is_still_trusted(shown), &node, shown)
        };
        let stop_and_drain = (self.stop.clone(), admission.drain);
        Ok(api_cache.serve(reader, rejection, stop_and_drain).await?)
    }
}
