//! TLS to upstreams: trusted CAs, expected names, and the client certificate of the gateway.
//!
//! A certificate must be valid for servers and name the node, or a confirmed address of the node. The confirmed addresses are
//! looked up at each handshake, and no session is resumed without that check. With `pin: true`, its key must be the first one
//! that the gateway received (`pin`). Only `verify: false` trusts any certificate, though the upstream must hold its key.

use super::pin::PinVerifier;
use crate::state::{Nodes, Pins};
use causeway_certs::{
    LeafCertificate, NodeName,
    verify::{self, provider},
};
use causeway_upstream::connection::{Alpn, AlpnConfigs};
use http::{HeaderMap, header::AUTHORIZATION};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
    client::{
        Resumption, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    sign::SingleCertAndKey,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use std::sync::Arc;
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

/// Policy for trusting an upstream's certificate.
#[derive(Debug, PartialEq)]
pub(crate) enum ServerTrust {
    /// Certificates that these CAs have signed for the node.
    Signed(Vec<CertificateDer<'static>>),
    /// Certificates with the pinned key.
    Pinned,
    /// Any certificate.
    Any,
}

/// Contents of an upstream's configuration and of the files that it names. Two upstreams with equal contents are equal.
#[derive(Debug, PartialEq)]
pub(crate) struct UpstreamTlsSource {
    /// Policy for trusting its certificate.
    pub(crate) trust: ServerTrust,
    /// Client certificate that the gateway presents.
    pub(crate) client_certificate: Option<LeafCertificate>,
}

/// TLS configuration of the upstream of one port.
#[derive(Debug)]
pub(crate) struct UpstreamTls {
    source: UpstreamTlsSource,
    configs: AlpnConfigs,
    /// Pinned keys, if the upstream is verified by its key.
    pins: Option<Pins>,
    retired: CancellationToken,
}

impl UpstreamTls {
    /// Returns the TLS configuration for this source.
    ///
    /// # Errors
    /// If none of the CAs is valid, or the client certificate is not.
    pub(crate) fn new(
        source: UpstreamTlsSource,
        port: u16,
        (nodes, pins): (&Nodes, &Pins),
    ) -> Result<Self, String> {
        let verifier: Arc<dyn ServerCertVerifier> = match &source.trust {
            ServerTrust::Any => Arc::new(verify::NoServerVerification),
            ServerTrust::Pinned => Arc::new(PinVerifier {
                pins: pins.clone(),
                port,
            }),
            ServerTrust::Signed(ca_certificates) => {
                let mut roots = RootCertStore::empty();
                let (added, _) = roots.add_parsable_certificates(ca_certificates.iter().cloned());
                if added == 0 {
                    return Err("holds no usable CA certificate".to_owned());
                }
                let chain =
                    WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider())
                        .build()
                        .map_err(|error| error.to_string())?;
                Arc::new(NodeNameVerifier {
                    chain,
                    nodes: nodes.clone(),
                })
            }
        };
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        let mut config = match &source.client_certificate {
            None => builder.with_no_client_auth(),
            Some(leaf) => {
                let client_certificate = SingleCertAndKey::from(leaf.certified_key());
                builder.with_client_cert_resolver(Arc::new(client_certificate))
            }
        };
        config.resumption = Resumption::disabled();
        let is_pinned = source.trust == ServerTrust::Pinned;
        Ok(Self {
            pins: is_pinned.then(|| pins.clone()),
            source,
            // Kubelets negotiate no ALPN protocol, or either HTTP version.
            configs: AlpnConfigs::new(config),
            retired: CancellationToken::new(),
        })
    }

    /// Returns the pinned keys, if the upstream is verified by its key.
    pub(super) fn pins(&self) -> Option<&Pins> {
        self.pins.as_ref()
    }

    pub(super) fn source(&self) -> &UpstreamTlsSource {
        &self.source
    }

    /// Removes a client's credential if the gateway presents its own, because an upstream must not have to choose.
    pub(super) fn strip_authorization(&self, fields: &mut HeaderMap) {
        if self.source.client_certificate.is_some() {
            fields.remove(AUTHORIZATION);
        }
    }

    pub(super) fn connector(&self, alpn: Alpn) -> TlsConnector {
        TlsConnector::from(self.configs.config_for(alpn))
    }

    /// Marks these credentials as replaced by others.
    pub(super) fn retire(&self) {
        self.retired.cancel();
    }

    /// Returns the token that is cancelled when other credentials replace these.
    pub(super) fn retired(&self) -> &CancellationToken {
        &self.retired
    }
}

/// Returns the server name for upstreams of this node.
pub(super) fn server_name(node: &NodeName) -> Option<ServerName<'static>> {
    ServerName::try_from(node.to_string()).ok()
}

/// Verifier that requires the node's name or one of its confirmed addresses in the certificate.
#[derive(Debug)]
struct NodeNameVerifier {
    chain: Arc<WebPkiServerVerifier>,
    nodes: Nodes,
}

impl ServerCertVerifier for NodeNameVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verify_name = |name: &ServerName<'_>| {
            self.chain
                .verify_server_cert(leaf, intermediates, name, ocsp, now)
        };
        let name_error = match verify_name(name) {
            Err(error) if is_name_error(&error) => error,
            done => return done,
        };
        let Ok(node) = NodeName::parse(&name.to_str()) else {
            return Err(name_error);
        };
        let addresses = self.nodes.with(&node, |node| node.addresses.clone());
        let matching = addresses
            .into_iter()
            .find_map(|address| verify_name(&ServerName::from(address)).ok());
        matching.ok_or(name_error)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chain
            .verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chain
            .verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}

fn is_name_error(error: &rustls::Error) -> bool {
    matches!(
        error,
        rustls::Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. }
        )
    )
}
