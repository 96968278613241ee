//! The accepting ends: the two configurations of the tunnel port, and those of listeners.
//!
//! A listener creates ticket keys of its own. The tunnel's keys are derived from a secret that outlives the process. The port
//! that issues certificates resumes no session. So sessions never cross from one configuration, listener or
//! client-certificate mode to another. The tunnel port selects one of its two configurations by the `ClientHello`'s ALPN.
//! Both only prove the possession of a key and a chain; `check_peer` returns the identity.

use super::{
    issuers::{CertificateRequirement, ClientVerifier},
    roots::TrustError,
    session_tickets::{SharedTicketer, TicketSecret},
    trust_store::TrustStore,
};
use crate::{identity::IssuerPurpose, kubernetes_ca::ClusterCa, leaf::LeafCertificate};
use causeway_tls::provider;
use rustls::{
    SupportedProtocolVersion,
    crypto::aws_lc_rs::Ticketer,
    server::{
        NoServerSessionStorage, ProducesTickets, ResolvesServerCert, ServerConfig,
        WebPkiClientVerifier, danger::ClientCertVerifier,
    },
    version,
};
use rustls_pki_types::{CertificateDer, ServerName};
use std::{fmt, sync::Arc};
use webpki::EndEntityCert;

/// ALPN of the tunnel (draft-thomson-ptth-potato).
pub(super) const ALPN_TUNNEL: &[u8] = b"rh2";
/// ALPN of a connection between two gateways.
pub(super) const ALPN_PEER: &[u8] = b"rh2-peer";
/// ALPN of an edge's connection for egress.
pub(super) const ALPN_EGRESS: &[u8] = b"h2-egress";

/// Returns the configuration of the tunnel: TLS 1.3, `rh2`, and a required client certificate that `trust` accepts.
pub fn tunnel_server(
    leaf: Arc<dyn ResolvesServerCert>,
    trust: &TrustStore,
    tickets: &TicketSecret,
) -> Result<Arc<ServerConfig>, TrustError> {
    let verifier = edge_verifier(trust, None, CertificateRequirement::Required)?;
    let tickets = Some(Arc::new(SharedTicketer::new(tickets)) as Arc<dyn ProducesTickets>);
    let versions = [&version::TLS13];
    Ok(build_server_config(
        &versions,
        verifier,
        leaf,
        &[ALPN_TUNNEL],
        tickets,
    )?)
}

/// Returns the configuration for connections that edges open for egress: TLS 1.3, `h2-egress`, and a required certificate of an
/// edge that `trust` accepts. No session resumes, because such a connection lives for long.
pub fn egress_server(
    leaf: Arc<dyn ResolvesServerCert>,
    trust: &TrustStore,
) -> Result<Arc<ServerConfig>, TrustError> {
    let verifier = edge_verifier(trust, None, CertificateRequirement::Required)?;
    Ok(build_server_config(
        &[&version::TLS13],
        verifier,
        leaf,
        &[ALPN_EGRESS],
        None,
    )?)
}

/// Returns the configuration for other gateways: TLS 1.3, `rh2-peer`, and a required certificate of a gateway that `trust`
/// accepts. No session resumes, because peers connect rarely.
pub fn peer_server(
    leaf: Arc<dyn ResolvesServerCert>,
    trust: &TrustStore,
) -> Result<Arc<ServerConfig>, TrustError> {
    let verifier = ClientVerifier::new(
        trust.issuers.clone(),
        trust.foreign_client_verifier()?,
        (IssuerPurpose::Replicas, CertificateRequirement::Required),
    );
    let versions = [&version::TLS13];
    Ok(build_server_config(
        &versions,
        verifier,
        leaf,
        &[ALPN_PEER],
        None,
    )?)
}

/// Returns the configuration for joining and the edge's other requests: TLS 1.3, `h2` or `http/1.1`. A client certificate that
/// `trust` accepts, or one of the cluster's, is optional. No session resumes here: an edge that requests a certificate proves its
/// key each time.
pub fn join_server(
    leaf: Arc<dyn ResolvesServerCert>,
    trust: &TrustStore,
    cluster: Option<&ClusterCa>,
) -> Result<Arc<ServerConfig>, TrustError> {
    let verifier = edge_verifier(trust, cluster, CertificateRequirement::Optional)?;
    Ok(build_server_config(
        &[&version::TLS13],
        verifier,
        leaf,
        &ALPN_CONTROL,
        None,
    )?)
}

fn edge_verifier(
    trust: &TrustStore,
    cluster: Option<&ClusterCa>,
    requirement: CertificateRequirement,
) -> Result<Arc<dyn ClientCertVerifier>, TrustError> {
    let other_verifier = trust.foreign_client_verifier()?;
    let other_verifier = other_verifier.or_else(|| cluster.map(|cluster| cluster.verifier.clone()));
    Ok(ClientVerifier::new(
        trust.issuers.clone(),
        other_verifier,
        (IssuerPurpose::Edges, requirement),
    ))
}

/// Returns the configuration of a listener: TLS 1.2 and 1.3, and client certificates that `trust` accepts.
///
/// # Errors
/// If a certificate is required and `trust` accepts none, or TLS cannot be set up.
pub fn listener_server(
    leaves: Arc<dyn ResolvesServerCert>,
    trust: &TrustStore,
    requirement: CertificateRequirement,
    alpn: &[&[u8]],
) -> Result<Arc<ServerConfig>, TrustError> {
    let trusts_nobody = trust.issuers.is_none() && trust.foreign_verifier.is_none();
    let verifier = match (trusts_nobody, requirement) {
        (true, CertificateRequirement::Required) => return Err(TrustError::NoTrustedRoots),
        (true, _) => WebPkiClientVerifier::no_client_auth(),
        (false, _) => ClientVerifier::new(
            trust.issuers.clone(),
            trust.foreign_verifier.clone(),
            (IssuerPurpose::Clients, requirement),
        ),
    };
    let versions = [&version::TLS13, &version::TLS12];
    let tickets = Ticketer::new()?;
    Ok(build_server_config(
        &versions,
        verifier,
        leaves,
        alpn,
        Some(tickets),
    )?)
}

pub(super) fn build_server_config(
    versions: &[&'static SupportedProtocolVersion],
    verifier: Arc<dyn ClientCertVerifier>,
    leaf: Arc<dyn ResolvesServerCert>,
    alpn: &[&[u8]],
    tickets: Option<Arc<dyn ProducesTickets>>,
) -> Result<Arc<ServerConfig>, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(versions)?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(leaf);
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    if let Some(tickets) = tickets {
        config.ticketer = tickets;
    } else {
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
    }
    // OpenSSL clients prefer AES-256, which costs a fifth of the throughput without benefit.
    config.ignore_client_order = true;
    Ok(Arc::new(config))
}

/// ALPN of joining and of an edge's other requests.
pub(super) const ALPN_CONTROL: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// TLS configuration of a listener without client authentication.
#[derive(Clone)]
pub struct ServerOnlyTls {
    certificate: CertificateDer<'static>,
    server_config: Arc<ServerConfig>,
}

impl fmt::Debug for ServerOnlyTls {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ServerOnlyTls").finish_non_exhaustive()
    }
}

impl ServerOnlyTls {
    /// Returns a configuration that presents this certificate.
    ///
    /// # Errors
    /// If TLS cannot be set up.
    pub fn new(leaf: &LeafCertificate) -> Result<Self, TrustError> {
        let certificate = leaf.certified_key().end_entity_cert()?.clone().into_owned();
        let versions = [&version::TLS13, &version::TLS12];
        let no_client_auth = WebPkiClientVerifier::no_client_auth();
        let tickets = Some(Ticketer::new()?);
        let server = build_server_config(
            &versions,
            no_client_auth,
            leaf.resolver(),
            &ALPN_CONTROL,
            tickets,
        )?;
        Ok(Self {
            certificate,
            server_config: server,
        })
    }

    /// Returns the configuration of the accepting end: TLS 1.2 and 1.3, `h2` or `http/1.1`.
    pub fn server_config(&self) -> Arc<ServerConfig> {
        self.server_config.clone()
    }

    /// Whether a client that connects to this name or IP address accepts the certificate for it (RFC 9525).
    pub fn matches_host(&self, host: &str) -> bool {
        let Ok(name) = ServerName::try_from(host) else {
            return false;
        };
        EndEntityCert::try_from(&self.certificate)
            .is_ok_and(|shown| shown.verify_is_valid_for_subject_name(&name).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair};

    #[test]
    fn a_certificate_is_valid_only_for_its_names_and_addresses() {
        let names = ["kubernetes.default.svc", "*.example.com", "127.0.0.1"];
        let params = CertificateParams::new(names.map(str::to_owned)).unwrap();
        let key = KeyPair::generate().unwrap();
        let made = params.self_signed(&key).unwrap();
        let leaf = LeafCertificate::load(&made.pem(), &key.serialize_pem()).unwrap();
        let shown = ServerOnlyTls::new(&leaf).unwrap();
        for host in ["Kubernetes.default.svc", "a.example.com", "127.0.0.1"] {
            assert!(shown.matches_host(host), "{host}");
        }
        for host in [
            "kubernetes.default",
            "example.com",
            "a.b.example.com",
            "127.0.0.2",
            "::1",
            "",
            "a b",
        ] {
            assert!(!shown.matches_host(host), "{host}");
        }
    }
}
