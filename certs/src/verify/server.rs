//! The accepting ends: the two configurations of the tunnel port, and those of listeners.
//!
//! A listener creates ticket keys of its own. The tunnel's keys are derived from a secret that outlives the process. The port
//! that issues certificates resumes no session. So sessions never cross from one configuration, listener or
//! client-certificate mode to another. The tunnel port selects one of its two configurations by the `ClientHello`'s ALPN.
//! Both only prove the possession of a key and a chain; `check_peer` returns the identity.

use super::{
    issuers::ClientVerifier,
    roots::TrustError,
    session_tickets::{SharedTicketer, TicketSecret},
    trust_store::TrustStore,
};
use crate::{crypto::provider, identity::IssuerPurpose, kubernetes_ca::ClusterCa};
use rustls::{
    SupportedProtocolVersion,
    crypto::aws_lc_rs::Ticketer,
    server::{
        NoServerSessionStorage, ProducesTickets, ResolvesServerCert, ServerConfig,
        WebPkiClientVerifier, danger::ClientCertVerifier,
    },
    version,
};
use std::sync::Arc;

/// ALPN of the tunnel (draft-thomson-ptth-potato).
pub(super) const ALPN_TUNNEL: &[u8] = b"rh2";

/// Returns the configuration of the tunnel: TLS 1.3, `rh2`, and a required client certificate that `trust` accepts.
pub fn tunnel_server(
    leaf: Arc<dyn ResolvesServerCert>,
    trust: &TrustStore,
    tickets: &TicketSecret,
) -> Result<Arc<ServerConfig>, TrustError> {
    let verifier = edge_verifier(trust, None, true)?;
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

/// Returns the configuration for joining and the edge's other requests: TLS 1.3, `h2` or `http/1.1`. A client certificate that
/// `trust` accepts, or one of the cluster's, is optional. No session resumes here: an edge that requests a certificate proves its
/// key each time.
pub fn join_server(
    leaf: Arc<dyn ResolvesServerCert>,
    trust: &TrustStore,
    cluster: Option<&ClusterCa>,
) -> Result<Arc<ServerConfig>, TrustError> {
    let verifier = edge_verifier(trust, cluster, false)?;
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
    required: bool,
) -> Result<Arc<dyn ClientCertVerifier>, TrustError> {
    let requirement = (IssuerPurpose::Edges, required);
    let other_verifier = trust.foreign_client_verifier()?;
    let other_verifier = other_verifier.or_else(|| cluster.map(|cluster| cluster.verifier.clone()));
    Ok(ClientVerifier::new(
        trust.issuers.clone(),
        other_verifier,
        requirement,
    ))
}

/// Returns the configuration of a listener: TLS 1.2 and 1.3, and client certificates that `trust` accepts. `required`
/// determines whether a certificate is required.
pub fn listener_server(
    leaves: Arc<dyn ResolvesServerCert>,
    trust: &TrustStore,
    required: bool,
    alpn: &[&[u8]],
) -> Result<Arc<ServerConfig>, TrustError> {
    let trusts_nobody = trust.issuers.is_none() && trust.foreign_verifier.is_none();
    let verifier = match (trusts_nobody, required) {
        (true, true) => return Err(TrustError::NoTrustedRoots),
        (true, false) => WebPkiClientVerifier::no_client_auth(),
        (false, required) => ClientVerifier::new(
            trust.issuers.clone(),
            trust.foreign_verifier.clone(),
            (IssuerPurpose::Clients, required),
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
