//! The dialling ends: an edge's tunnel, its other requests, and joining by a token or by the CA of its cluster.
//!
//! A gateway is recognised by its certificate alone: below one of our private roots, signed by the issuer for gateways, for
//! servers, with the URI `spiffe://<trust domain>/gateway`. The dialled name is not compared, since only gateways receive
//! that URI. So an edge may dial an address that no certificate lists, such as a load balancer's or one from the hello. While
//! joining, the root is the certificate in the server's own chain whose SHA-256 the token carries.

use super::{
    peer::{PeerRejected, Purpose, check_peer, none_revoked},
    roots::TrustError,
    server::{ALPN_CONTROL, ALPN_EGRESS, ALPN_PEER, ALPN_TUNNEL},
    trust_store::{RevokedSerials, TrustStore},
};
use crate::{
    certificate::Certificate, edge_identity::EdgeIdentity, gateway_revocations::GatewayRevocations,
    identity, leaf::LeafCertificate,
};
use causeway_tls::{Fingerprint, pem, provider};
use rustls::{
    CertificateError, DigitallySignedStruct, Error, OtherError, SignatureScheme,
    client::{
        ClientConfig,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature},
    version,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use std::{error::Error as StdError, io, sync::Arc};
use thiserror::Error as ThisError;

/// The gateway belongs to another CA than the token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ThisError)]
#[error(
    "the gateway's CA is {presented}, the token expects {expected}: \
     the CA root was replaced after the token was created, the token is of another gateway, or the connection \
     is intercepted; create a new token at this gateway: causeway token create --node NODE"
)]
pub struct UnexpectedCa {
    /// The last certificate of the chain that the server presented.
    pub presented: Fingerprint,
    /// Fingerprint that the token carries.
    pub expected: Fingerprint,
}

impl UnexpectedCa {
    /// Finds this error among the causes of a failed handshake, `io::Error` and `rustls::Error` included.
    pub fn find<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a Self> {
        find_cause(error)
    }
}

/// Error for a server whose certificate does not name a gateway: the server is not a gateway's tunnel port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ThisError)]
#[error("the server's certificate is not the certificate of a gateway's tunnel port")]
pub struct NotAGateway;

impl NotAGateway {
    /// Whether a handshake failed with this error.
    pub fn is_in(error: &(dyn StdError + 'static)) -> bool {
        find_cause::<Self>(error).is_some()
    }
}

/// Finds an error of type `T` among the causes of `error`, `io::Error` and `rustls::Error` included.
fn find_cause<'a, T: StdError + 'static>(error: &'a (dyn StdError + 'static)) -> Option<&'a T> {
    if let Some(found) = error.downcast_ref::<T>() {
        return Some(found);
    }
    // Neither type returns its inner error as `source`.
    let inner: Option<&'a (dyn StdError + 'static)> =
        if let Some(error) = error.downcast_ref::<io::Error>() {
            error.get_ref().map(|inner| inner as _)
        } else if let Some(Error::InvalidCertificate(CertificateError::Other(OtherError(inner)))) =
            error.downcast_ref::<Error>()
        {
            Some(&**inner)
        } else {
            error.source()
        };
    inner.and_then(find_cause)
}

/// Returns the configuration of the edge's end of a tunnel: TLS 1.3, `rh2`, with the edge's certificate.
pub fn tunnel_client(edge: &EdgeIdentity) -> Result<Arc<ClientConfig>, TrustError> {
    enrolled_client_config(edge, &[ALPN_TUNNEL])
}

/// Returns the configuration of an edge's connection for egress: as for the tunnel, but with `h2-egress`.
pub fn egress_client(edge: &EdgeIdentity) -> Result<Arc<ClientConfig>, TrustError> {
    enrolled_client_config(edge, &[ALPN_EGRESS])
}

/// Returns the configuration for the edge's other requests (renewal and so on): as for the tunnel, but with `h2` or
/// `http/1.1`.
pub fn control_client(edge: &EdgeIdentity) -> Result<Arc<ClientConfig>, TrustError> {
    enrolled_client_config(edge, &ALPN_CONTROL)
}

/// Returns the configuration of a gateway that dials another gateway: TLS 1.3, `rh2-peer`, with the gateway's own certificate.
pub fn peer_client(
    leaf: &LeafCertificate,
    trust: &TrustStore,
) -> Result<Arc<ClientConfig>, TrustError> {
    client_config(
        RootSource::Root(trust.clone()),
        (leaf.chain().to_vec(), leaf),
        &[ALPN_PEER],
    )
}

/// Returns the configuration for joining by a token: without a certificate, and with the gateway recognised by the token's
/// fingerprint. [`UnexpectedCa::find`] recognises its failure.
pub fn join_client(root: Fingerprint) -> Result<Arc<ClientConfig>, TrustError> {
    rejoin_client(root, &GatewayRevocations::default())
}

/// Returns the configuration for joining by a token like [`join_client`], which refuses gateways with revoked certificates.
pub fn rejoin_client(
    root: Fingerprint,
    revoked: &GatewayRevocations,
) -> Result<Arc<ClientConfig>, TrustError> {
    let root_source = RootSource::Pinned(root, revoked.serials().into());
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(GatewayCertVerifier::new(root_source)))
        .with_no_client_auth();
    config.alpn_protocols = owned_alpn(&ALPN_CONTROL);
    Ok(Arc::new(config))
}

/// Returns the configuration for joining with a certificate that a cluster's signer has issued for this node. Gateways are
/// recognised by these roots, and refused if their certificates are revoked.
pub fn csr_exchange_client(
    roots_pem: &str,
    node_certificate: &LeafCertificate,
    revoked: &GatewayRevocations,
) -> Result<Arc<ClientConfig>, TrustError> {
    let unusable = |error: &dyn StdError| TrustError::Root(error.to_string());
    let roots = pem::parse_certificates(roots_pem).map_err(TrustError::Root)?;
    let domain = EdgeIdentity::trust_domain_of(roots_pem).map_err(|error| unusable(&error))?;
    let trust = TrustStore::from_roots(&roots, &domain)?;
    let root_source = RootSource::Root(trust.with_revoked_gateways(revoked.serials().into()));
    client_config(
        root_source,
        (node_certificate.chain().to_vec(), node_certificate),
        &ALPN_CONTROL,
    )
}

/// Returns the certificate of a chain that has this fingerprint. After joining, that is the root to store.
pub fn pinned_root(
    chain: &[CertificateDer<'_>],
    root: Fingerprint,
) -> Option<CertificateDer<'static>> {
    let found = chain
        .iter()
        .find(|certificate| Fingerprint::of_certificate(certificate) == root)?;
    Some(found.clone().into_owned())
}

fn enrolled_client_config(
    edge: &EdgeIdentity,
    alpn: &[&[u8]],
) -> Result<Arc<ClientConfig>, TrustError> {
    // The gateway knows our intermediates, so only the leaf is sent.
    let chain_length = if edge.is_external { usize::MAX } else { 1 };
    let chain = edge
        .leaf
        .chain()
        .iter()
        .take(chain_length)
        .cloned()
        .collect();
    client_config(
        RootSource::Root(edge.trust_store()?),
        (chain, &edge.leaf),
        alpn,
    )
}

fn client_config(
    root_source: RootSource,
    (chain, leaf): (Vec<CertificateDer<'static>>, &LeafCertificate),
    alpn: &[&[u8]],
) -> Result<Arc<ClientConfig>, TrustError> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(GatewayCertVerifier::new(root_source)))
        .with_client_auth_cert(chain, leaf.key())?;
    config.alpn_protocols = owned_alpn(alpn);
    Ok(Arc::new(config))
}

pub(super) fn owned_alpn(alpn: &[&[u8]]) -> Vec<Vec<u8>> {
    alpn.iter().map(|protocol| protocol.to_vec()).collect()
}

/// Source of the trusted root.
#[derive(Debug)]
enum RootSource {
    Root(TrustStore),
    Pinned(Fingerprint, RevokedSerials),
}

/// Verifier that accepts gateways of one root, independent of the dialled name.
#[derive(Debug)]
struct GatewayCertVerifier {
    anchor: RootSource,
    provider: Arc<CryptoProvider>,
}

impl GatewayCertVerifier {
    fn new(root_source: RootSource) -> Self {
        Self {
            anchor: root_source,
            provider: provider(),
        }
    }
}

impl ServerCertVerifier for GatewayCertVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let parsed = Certificate::parse(end_entity).map_err(other_error)?;
        if !identity::names_gateway(&parsed) {
            return Err(other_error(NotAGateway));
        }
        let pinned;
        let trust_store = match &self.anchor {
            RootSource::Root(trust) => trust,
            RootSource::Pinned(expected, revoked) => {
                let trust = pinned_trust_store(end_entity, intermediates, *expected)?;
                pinned = trust.with_revoked_gateways(revoked.clone());
                &pinned
            }
        };
        let mut chain = vec![end_entity.clone()];
        chain.extend_from_slice(intermediates);
        check_peer(
            Some(&chain),
            Purpose::Gateway,
            now,
            trust_store,
            &none_revoked,
        )
        .map_err(to_tls_error)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

/// Returns the trust store of the certificate that the token names. That certificate must be a CA of its own: a pinned leaf
/// would certify itself.
fn pinned_trust_store(
    end_entity: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    expected: Fingerprint,
) -> Result<TrustStore, Error> {
    let Some(root) = pinned_root(intermediates, expected) else {
        let presented = Fingerprint::of_certificate(intermediates.last().unwrap_or(end_entity));
        return Err(other_error(UnexpectedCa {
            presented,
            expected,
        }));
    };
    let parsed = Certificate::parse(&root).map_err(other_error)?;
    let domain = identity::trust_domain_of_root(&parsed).map_err(other_error)?;
    TrustStore::from_roots([&root], &domain).map_err(other_error)
}

/// Converts a rejection into rustls' error, with the matching TLS alert.
pub(super) fn to_tls_error(rejection: PeerRejected) -> Error {
    match rejection {
        PeerRejected::UnknownIssuer => CertificateError::UnknownIssuer.into(),
        PeerRejected::Expired { .. } => CertificateError::Expired.into(),
        PeerRejected::NotYetValid { .. } => CertificateError::NotValidYet.into(),
        PeerRejected::Revoked(_) => CertificateError::Revoked.into(),
        rejection => other_error(rejection),
    }
}

pub(super) fn other_error(error: impl StdError + Send + Sync + 'static) -> Error {
    CertificateError::Other(OtherError(Arc::new(error))).into()
}
