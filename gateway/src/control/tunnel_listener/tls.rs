//! The tunnel port's TLS: the presented certificate, the trusted CAs, and the handshake.

use super::handshake_error::HandshakeError;
use crate::{control::heartbeat::VerifyEdgeFn, state::registry::EdgeCertificate};
use arc_swap::ArcSwap;
use causeway_certs::{
    ClusterCa, Identity, NodeName, PeerRejected, Purpose, TrustStore, VerifiedNodeCertificate,
    verify::{self, TicketSecret, TrustError, VerifiedPeer, verify_peer},
};
use causeway_rt::{
    read_limit::{MAX_CLIENT_HELLO, ReadLimit},
    socket::{CountedIo, Socket},
    turns::Turn,
};
use causeway_tunnel::wire;
use rustls::{
    AlertDescription as Alert, ServerConfig,
    pki_types::{CertificateDer, UnixTime},
    server::{ClientHello, ResolvesServerCert},
};
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;
use tokio_rustls::{LazyConfigAcceptor, StartHandshake, server::TlsStream};

/// Connection of an edge.
pub(super) type Io = TlsStream<CountedIo<Socket>>;

/// TLS of the tunnel port: one configuration for each protocol, and the trusted CAs.
#[derive(Clone, Debug)]
pub struct Tls {
    tunnel: Arc<ServerConfig>,
    join: Arc<ServerConfig>,
    peer: Arc<ServerConfig>,
    egress: Arc<ServerConfig>,
    trust: TrustStore,
    admits_any_node: bool,
    /// CA of the cluster's signers, for joining.
    cluster: Option<ClusterCa>,
}

/// The current TLS of the tunnel port.
pub type LiveTls = Arc<ArcSwap<Tls>>;

/// Returns a function that verifies chains of edges by the TLS that is current then.
pub(crate) fn edge_verifier(tls: &LiveTls) -> VerifyEdgeFn {
    let tls = tls.clone();
    Box::new(move |chain| tls.load().edge_of(chain))
}

impl Tls {
    /// Returns the TLS of a gateway that presents `leaf`, trusts the CAs of `trust` and encrypts session tickets with `tickets`.
    ///
    /// # Errors
    /// If the trusted CAs cannot verify any peer.
    pub fn new(
        leaf: Arc<dyn ResolvesServerCert>,
        trust: TrustStore,
        tickets: &TicketSecret,
    ) -> Result<Self, TrustError> {
        Ok(Self {
            tunnel: verify::tunnel_server(leaf.clone(), &trust, tickets)?,
            join: verify::join_server(leaf.clone(), &trust, None)?,
            peer: verify::peer_server(leaf.clone(), &trust)?,
            egress: verify::egress_server(leaf, &trust)?,
            trust,
            admits_any_node: false,
            cluster: None,
        })
    }

    /// Sets whether every node with a trusted certificate is admitted.
    #[must_use]
    pub fn any_node(self, any_node: bool) -> Self {
        Self {
            admits_any_node: any_node,
            ..self
        }
    }

    /// Sets the CA of the cluster's signers, whose certificates let nodes join.
    ///
    /// # Errors
    /// If the trusted CAs cannot verify any peer.
    pub fn with_cluster_ca(
        self,
        leaf: Arc<dyn ResolvesServerCert>,
        cluster: Option<ClusterCa>,
    ) -> Result<Self, TrustError> {
        if cluster.is_none() {
            return Ok(self);
        }
        Ok(Self {
            join: verify::join_server(leaf, &self.trust, cluster.as_ref())?,
            cluster,
            ..self
        })
    }

    /// Returns the trusted CAs.
    pub fn trust(&self) -> &TrustStore {
        &self.trust
    }

    /// Whether every node with a trusted certificate is admitted.
    pub(super) fn admits_any_node(&self) -> bool {
        self.admits_any_node
    }

    /// Whether a certificate that was trusted when it was presented is still trusted. Its dates were checked then.
    pub(in crate::control) fn is_still_trusted(&self, certificate: &EdgeCertificate) -> bool {
        let has_trusted_root = certificate
            .root
            .is_none_or(|root| self.trust.is_trusted_root(root));
        // If a root replaces an intermediate that was a trust anchor, certificates below that intermediate stay valid.
        has_trusted_root
            || certificate
                .external_chain
                .as_deref()
                .is_some_and(|chain| self.chain_is_trusted(chain, certificate))
    }

    fn chain_is_trusted(&self, chain: &[CertificateDer<'static>], shown: &EdgeCertificate) -> bool {
        let not_after = UnixTime::since_unix_epoch(Duration::from_secs(shown.not_after));
        let (at, revoked) = (UnixTime::now().min(not_after), &verify::none_revoked);
        verify_peer(Some(chain), Purpose::Edge, at, &self.trust, revoked).is_ok()
    }

    /// Returns the verified owner of the peer's certificate. Verifies resumed sessions as well.
    pub(super) fn verify_peer_certificate(&self, io: &Io) -> Result<VerifiedPeer, PeerRejected> {
        self.verify(io.get_ref().1.peer_certificates())
    }

    fn verify(&self, chain: Option<&[CertificateDer<'_>]>) -> Result<VerifiedPeer, PeerRejected> {
        let now = UnixTime::now();
        verify_peer(
            chain,
            Purpose::Edge,
            now,
            &self.trust,
            &verify::none_revoked,
        )
    }

    /// Checks that this is the chain of a gateway. Returns the serial number of its certificate, in hexadecimal.
    pub(super) fn verify_gateway(
        &self,
        chain: &[CertificateDer<'_>],
    ) -> Result<String, PeerRejected> {
        let (now, revoked) = (UnixTime::now(), &verify::none_revoked);
        let verified = verify_peer(Some(chain), Purpose::Peer, now, &self.trust, revoked)?;
        Ok(verified.serial)
    }

    /// Returns the node of the edge, and the certificate that it has presented.
    pub(super) fn verify_edge(&self, io: &Io) -> Result<(NodeName, EdgeCertificate), PeerRejected> {
        let chain = io.get_ref().1.peer_certificates().unwrap_or_default();
        self.edge_of(chain)
    }

    /// Returns the node that this chain names, and the certificate, verified as that of an edge that connects.
    fn edge_of(
        &self,
        chain: &[CertificateDer<'_>],
    ) -> Result<(NodeName, EdgeCertificate), PeerRejected> {
        let verified = self.verify(Some(chain))?;
        let Identity::Edge(node) = verified.identity else {
            let (wanted, found) = (Purpose::Edge, verified.identity.kind());
            return Err(PeerRejected::WrongKind { wanted, found });
        };
        let owned = |one: &CertificateDer<'_>| one.clone().into_owned();
        let is_external = self.trust.is_external();
        let external_chain = is_external.then(|| chain.iter().map(owned).collect());
        let certificate = EdgeCertificate {
            serial: verified.serial,
            // The external CA decides how and when a node gets a new certificate, so the time of issue does not matter.
            issued_at: if is_external {
                u64::MAX
            } else {
                verified.issued_at
            },
            not_after: verified.not_after,
            root: verified.root,
            external_chain,
        };
        Ok((node, certificate))
    }

    /// Returns the node that may join by the cluster's certificate of this peer, if such certificates are accepted.
    pub(super) fn verify_join_certificate(
        &self,
        io: &Io,
    ) -> Option<Result<VerifiedNodeCertificate, PeerRejected>> {
        let chain = io.get_ref().1.peer_certificates();
        let cluster = self.cluster.as_ref()?;
        Some(cluster.verify_node(chain, UnixTime::now()))
    }

    /// Finishes TLS, and measures the time of its last flight, which is one round trip. Awaits `acquire_slot` once the
    /// `ClientHello` has arrived, answers in the turn that it returns, and keeps its other result until the handshake is over. Other
    /// gateways are refused unless `accepts_peers`.
    pub(super) async fn handshake<T>(
        &self,
        (socket, accepts_peers): (Socket, bool),
        acquire_slot: impl Future<Output = Result<(T, Turn<'_>), HandshakeError>>,
    ) -> Result<(AlpnProtocol, Io, Duration), TlsError> {
        let acceptor = rustls::server::Acceptor::default();
        let limited = ReadLimit::new(CountedIo::new(socket), MAX_CLIENT_HELLO);
        let start = LazyConfigAcceptor::new(acceptor, limited).await?;
        let (protocol, config) = self.select_config(&start.client_hello(), accepts_peers);
        let (_slot, turn) = acquire_slot.await?;
        let start = StartHandshake::from_parts(start.accepted, start.io.into_inner());
        let (handshaken, round_trip) = turn
            .run(async {
                // `into_stream` computes the answer to the ClientHello.
                let handshaking = start.into_stream(config).into_fallible();
                let flight_sent_at = Instant::now();
                (handshaking.await, flight_sent_at.elapsed())
            })
            .await;
        let mut io = handshaken.map_err(|(error, socket)| TlsError {
            error: error.into(),
            socket: Some(socket),
        })?;
        io.get_mut().1.set_buffer_limit(Some(wire::TLS_BUFFER));
        Ok((protocol, io, round_trip))
    }

    fn select_config(
        &self,
        hello: &ClientHello<'_>,
        accepts_peers: bool,
    ) -> (AlpnProtocol, Arc<ServerConfig>) {
        let offers = |wanted| {
            hello
                .alpn()
                .into_iter()
                .flatten()
                .any(|name| name == wanted)
        };
        if offers(wire::ALPN_TUNNEL) {
            (AlpnProtocol::Tunnel, self.tunnel.clone())
        } else if accepts_peers && offers(wire::ALPN_PEER) {
            (AlpnProtocol::Peer, self.peer.clone())
        } else if offers(wire::ALPN_EGRESS) {
            (AlpnProtocol::Egress, self.egress.clone())
        } else {
            // This configuration refuses a client that offers neither protocol, with the correct alert.
            (AlpnProtocol::Join, self.join.clone())
        }
    }
}

/// Returns the likely cause of an alert with which an edge refused the gateway's certificate.
pub(super) fn likely_cause(alert: Alert) -> Option<&'static str> {
    match alert {
        Alert::CertificateExpired => Some(
            "an edge refuses this gateway's certificate because of its dates: the clock of the edge or of this gateway is wrong",
        ),
        Alert::CertificateRevoked => Some(
            "the other end knows that this gateway's certificate is revoked: revoke it at this gateway as well (causeway ca revoke-gateway), or \
             restart the gateway, so that it gets a new certificate",
        ),
        Alert::UnknownCA
        | Alert::CertificateUnknown
        | Alert::BadCertificate
        | Alert::DecryptError
        | Alert::AccessDenied => Some(
            "an edge refuses this gateway's certificate: the edge's token or certificate comes from another CA or from a root that \
             was retired; run `causeway token create --node NODE` on the gateway, then `causeway edge --rejoin` on the node with \
             that token",
        ),
        _ => None,
    }
}

/// Error of a TLS handshake.
pub(super) struct TlsError {
    pub(super) error: HandshakeError,
    /// Socket through which the peer can still receive the alert.
    pub(super) socket: Option<CountedIo<Socket>>,
}

impl<E: Into<HandshakeError>> From<E> for TlsError {
    fn from(error: E) -> Self {
        Self {
            error: error.into(),
            socket: None,
        }
    }
}

/// Protocol that was selected by ALPN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AlpnProtocol {
    Tunnel,
    Peer,
    Egress,
    Join,
}
