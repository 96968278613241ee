//! The tunnel port: TLS, then either a tunnel or an edge's own requests.
//!
//! The ALPN in the `ClientHello` selects the configuration: `rh2` requires a certificate, `h2` and `http/1.1` make it optional.
//! TLS has a timeout, and the certificate is checked, resumed or not. A tunnel moves to the worker of its node, where its session
//! begins. An edge that connects by `h2` with its certificate is served by `control::api_cache`, if that is configured, and all
//! other requests by `control::enrol`. Handshakes are spread over the workers and never awaited in the accept loop. Every task
//! belongs to [`TunnelListener::run`], whose end ends them.

mod close_reason;
mod connection;
mod context;
mod session;
mod tls;

#[cfg(test)]
mod tests;

use crate::{
    audit,
    control::{
        api_cache::{AccessDenied, ApiCacheServer, AuthorizedEdge},
        eligibility::untrusted_reason,
        http::{self, Peer},
    },
    state::registry::EdgeCertificate,
    worker::WorkerId,
};
use causeway_certs::{Identity, NodeName, PeerRejected};
use causeway_rt::{
    connection_limit::{ConnectionLimit, Slot},
    lingering_close,
    listener::{self, BoundSocket},
    socket::DetachedSocket,
    task::TaskGroup,
};
use causeway_tunnel::wire;
use context::HandshakenEdge;
pub use context::{Places, TunnelListener};
use std::{io, net::SocketAddr, pin::pin, sync::Arc, time::Duration};
use tls::{AlpnProtocol, Io, TlsError};
pub use tls::{LiveTls, Tls};
use tokio::{sync::mpsc, time::timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info_span, warn};

/// Time, beyond the drain time, for a tunnel to get the last message and to disconnect.
const FAREWELL: Duration = Duration::from_secs(2);
/// The label of this listener in metrics.
const LISTENER: &str = "tunnel";

/// Reason why a connection failed.
#[derive(Debug, thiserror::Error)]
enum HandshakeError {
    #[error("{}", said(.0))]
    Tls(#[from] io::Error),
    #[error("no TLS handshake within {0:?}")]
    TooSlow(Duration),
    #[error("{0}")]
    Peer(#[from] PeerRejected),
    #[error("the gateway is stopping")]
    Stopping,
    #[error("too many edges are connecting at the same time")]
    Full,
    #[error(
        "the connection was closed before its first request to make room for another connection"
    )]
    Evicted,
    #[error(transparent)]
    Unread(#[from] AccessDenied),
}

/// Returns the text of rustls for an error of TLS, otherwise that of the system.
fn said(error: &io::Error) -> String {
    match tls_error(error) {
        Some(error) => error.to_string(),
        None => error.to_string(),
    }
}

fn tls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

impl HandshakeError {
    /// Returns one word for the metric, and whether an operator should look at the error.
    fn weigh(&self) -> (&'static str, bool) {
        let error = match self {
            Self::TooSlow(_) => return ("timeout", false),
            Self::Peer(_) => return ("certificate", true),
            Self::Stopping => return ("draining", false),
            // Counted and logged as such.
            Self::Evicted => return ("evicted", false),
            Self::Full | Self::Unread(AccessDenied::Full) => return ("full", true),
            Self::Unread(AccessDenied::Unwelcome(_)) => return ("not_admitted", true),
            Self::Tls(error) => tls_error(error),
        };
        match error {
            None => ("peer_gone", false),
            Some(rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented) => {
                ("certificate", true)
            }
            Some(rustls::Error::NoApplicationProtocol) => ("alpn", true),
            Some(rustls::Error::AlertReceived(_)) => ("peer_alert", true),
            Some(_) => ("protocol", false),
        }
    }
}

/// State that handshakes share with the accept loop.
#[derive(Clone)]
struct HandshakeContext {
    admission: Arc<TunnelListener>,
    arrived: mpsc::Sender<Box<HandshakenEdge>>,
    arriving: ConnectionLimit,
    shaking: ConnectionLimit,
    joining: ConnectionLimit,
    renewing: ConnectionLimit,
    stop: CancellationToken,
}

impl TunnelListener {
    /// Waits until this node can be checked, and returns whether it can. A node that only the cluster can know waits until the
    /// cluster has named its nodes: a rejection now would keep it away for a minute. If every node with a trusted certificate is
    /// admitted, the cluster is not asked.
    async fn can_judge(&self, node: &NodeName, bound: Duration) -> bool {
        let Some(mut changes) = self.cluster.clone() else {
            return true;
        };
        if self.tls.load().lets_any_in() {
            return true;
        }
        let known = async {
            while !self.nodes.has_cluster() && self.nodes.get(node).is_none() {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        timeout(bound, known).await.is_ok()
    }

    /// Accepts edges until `stop`. Then lets the tunnels continue for the drain time (`control::drain` empties them meanwhile),
    /// and returns when the last is gone. Dropping the future ends all at once.
    pub async fn run(self, listener: BoundSocket, stop: CancellationToken) {
        let listener = match listener.attach() {
            Ok(listener) => listener,
            Err(error) => {
                tracing::error!(%error, "the listener of the tunnel port cannot be registered with the runtime");
                return;
            }
        };
        let grace = self.drain + FAREWELL;
        let workers: Vec<WorkerId> = self.workers.all().collect();
        let mut next = workers.iter().copied().cycle();
        let (arrived, mut arrivals) = mpsc::channel(self.places.handshakes);
        let limit = |name, most| self.metrics.connection_limit(name, most);
        let desk = HandshakeContext {
            arriving: limit("tunnel_arriving", self.places.arriving),
            shaking: limit("tunnel_handshakes", self.places.handshakes),
            joining: limit("joining", self.places.joining),
            renewing: limit("renewing", self.places.renewing),
            admission: Arc::new(self),
            arrived,
            stop: stop.clone(),
        };
        let tasks = TaskGroup::new(&CancellationToken::new());
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(arrived) = arrivals.recv() => desk.admission.carry(&tasks, arrived),
                (socket, peer) = listener.accept() => {
                    let (listener::RemoteAddr::Tcp(from), Ok(slot)) = (peer, desk.arriving.admit(peer)) else {
                        continue;
                    };
                    let worker = next.next().unwrap_or(WorkerId(0));
                    let span = info_span!("handshake", %from);
                    let runtime = desk.admission.workers.runtime(worker);
                    tasks.spawn_on(runtime, span, desk.clone().greet(slot, socket.detach(), from));
                }
            }
        }
        // An edge that is refused at once tries another gateway sooner than an edge that waits in a queue.
        drop((listener, arrivals));
        tasks.drain(grace).await;
    }

    /// Begins the session with an edge on the worker of its node.
    fn carry(self: &Arc<Self>, tasks: &TaskGroup, arrived: Box<HandshakenEdge>) {
        let node = arrived.node.as_ref();
        let worker = node.map_or(WorkerId(0), |node| self.workers.of(node));
        let name = node.map_or("(refused)", NodeName::as_str);
        let span = info_span!("tunnel", node = name, from = %arrived.from);
        let conversation = session::run(self.clone(), arrived);
        tasks.spawn_on(self.workers.runtime(worker), span, conversation);
    }
}

impl HandshakeContext {
    /// Handles one connection, from its first byte to its tunnel or to the end of its requests.
    async fn greet(self, slot: Slot, socket: io::Result<DetachedSocket>, from: SocketAddr) {
        let shaken = match slot.run(pin!(self.shake(&slot, socket, from))).await {
            Some(Ok(Some(shaken))) => shaken,
            Some(Ok(None)) => return,
            Some(Err(failed)) => return self.refused(from, &failed),
            None => return self.refused(from, &HandshakeError::Evicted),
        };
        drop(slot);
        let done = match shaken {
            (AlpnProtocol::Tunnel, io, round_trip) => self.hand_over(io, from, round_trip).await,
            // Boxed: serving HTTP takes ten times the room of a handshake, and a tunnel never needs it.
            (AlpnProtocol::Join, io, _) => Box::pin(self.join(io, from)).await,
        };
        if let Err(failed) = done {
            self.refused(from, &failed);
        }
    }

    /// Finishes TLS within its timeout. Returns `None` if the handshake failed and the peer was told the reason.
    async fn shake(
        &self,
        slot: &Slot,
        socket: io::Result<DetachedSocket>,
        from: SocketAddr,
    ) -> Result<Option<(AlpnProtocol, Io, Duration)>, HandshakeError> {
        let bound = self.admission.settings.handshake_timeout;
        let tls = self.admission.tls.load_full();
        let turn = async {
            let busy = slot.busy();
            (busy, self.shaking.acquire(from.ip()).await)
        };
        match timeout(bound, tls.handshake(socket, turn)).await {
            Ok(Ok(shaken)) => Ok(Some(shaken)),
            Ok(Err(TlsError { error, socket })) => {
                self.refused(from, &error.into());
                // The lingering close lets the peer read the alert; the connection keeps its place until then.
                if let Some(socket) = socket {
                    lingering_close::close(socket).await;
                }
                Ok(None)
            }
            Err(_) => Err(HandshakeError::TooSlow(bound)),
        }
    }

    /// Counts and logs a failed connection.
    fn refused(&self, from: SocketAddr, failed: &HandshakeError) {
        let (word, notable) = failed.weigh();
        self.admission.metrics.handshake_failed(LISTENER, word);
        if let HandshakeError::Tls(error) = failed
            && let Some(rustls::Error::AlertReceived(alert)) = tls_error(error)
        {
            let cause = tls::likely_cause(*alert);
            warn!(peer = %from, ?alert, cause, "the peer ended the TLS handshake with an alert");
            return;
        }
        if notable {
            warn!(peer = %from, why = %failed, "refused a connection to the tunnel port");
            audit::log_rejected_edge("(unknown)", &from, word, failed);
        } else {
            debug!(peer = %from, why = %failed, "a connection to the tunnel port ended before its handshake");
        }
    }

    async fn hand_over(
        &self,
        mut io: Io,
        from: SocketAddr,
        round_trip: Duration,
    ) -> Result<(), HandshakeError> {
        let (node, certificate) = match self.admission.tls.load().edge(&io) {
            Ok((node, shown)) => (Ok(node), Some(shown)),
            Err(refused) => (Err(refused), None),
        };
        let socket = io.get_mut().0.take().ok_or(HandshakeError::Stopping)?;
        let arrived = Box::new(HandshakenEdge {
            io,
            socket: socket.detach()?,
            node,
            certificate,
            from,
            round_trip,
        });
        self.arrived
            .send(arrived)
            .await
            .map_err(|_| HandshakeError::Stopping)
    }

    async fn join(&self, io: Io, from: SocketAddr) -> Result<(), HandshakeError> {
        let tls = self.admission.tls.load_full();
        let reads = io.get_ref().1.alpn_protocol() == Some(wire::ALPN_H2);
        if let Some(reading) = self.admission.reading.as_ref().filter(|_| reads)
            && let Ok((node, certificate)) = tls.edge(&io)
        {
            return self.read(reading, io, (node, certificate), from).await;
        }
        let nobody = (None, 0, None, None);
        let (identity, issued, root, vouched) = match tls.check(&io) {
            Ok(proven) => (Some(proven.identity), proven.issued_at, proven.root, None),
            Err(PeerRejected::Missing) => nobody,
            Err(refused @ PeerRejected::UnknownIssuer) => match tls.joins(&io) {
                Some(node) => (None, 0, None, Some(node?)),
                None => return Err(refused.into()),
            },
            Err(refused) => return Err(refused.into()),
        };
        // A certificate of the cluster's own signers names a node as well.
        let known = identity.is_some() || vouched.is_some();
        let limit = if known { &self.renewing } else { &self.joining };
        let slot = limit.admit(from.ip()).map_err(|_| HandshakeError::Full)?;
        let peer = Peer {
            address: Some(from.ip().to_canonical()),
            identity,
            issued,
            root,
            vouched,
        };
        let (router, stop) = (self.admission.enrol.clone(), self.stop.clone());
        let bounds = http::SHORT;
        let serving = pin!(http::serve(
            io,
            router,
            (peer, Some(&slot)),
            bounds,
            stop.into()
        ));
        slot.run(serving).await.ok_or(HandshakeError::Evicted)
    }

    /// Serves an edge that reads resources of its cluster.
    async fn read(
        &self,
        reading: &ApiCacheServer,
        io: Io,
        (node, certificate): (NodeName, EdgeCertificate),
        from: SocketAddr,
    ) -> Result<(), HandshakeError> {
        let admission = &self.admission;
        // While the gateway cannot check the node, it refuses the edge, and the edge retries.
        let bound = admission.settings.hello_timeout / 2;
        admission.can_judge(&node, bound).await;
        let reader = AuthorizedEdge {
            io,
            peer: Peer {
                address: Some(from.ip().to_canonical()),
                identity: Some(Identity::Edge(node.clone())),
                issued: certificate.issued_at,
                root: certificate.root,
                vouched: None,
            },
            certificate,
            node: node.clone(),
        };
        let judged = |shown: &EdgeCertificate| {
            untrusted_reason(admission.tls.load().believes(shown), &node, shown)
        };
        let until = (self.stop.clone(), admission.drain);
        Ok(reading.serve(reader, judged, until).await?)
    }
}
