//! TLS for a node's `YurtHub`: a client with the certificate by which the cluster identifies its node.
//!
//! The server certificate is the cluster's, too, because `YurtHub` trusts only the cluster's CA. A certificate of that CA
//! alone is not enough, since it signs for people and controllers as well. The certificate has to be a node's
//! (`O=system:nodes`, `CN=system:node:NODE`, as the Node authorizer requires it). No session resumes, so each handshake
//! identifies the client.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use rustls::server::danger::ClientCertVerifier;
use rustls::{ServerConfig, version};
use rustls_pki_types::{CertificateDer, UnixTime};
use webpki::EndEntityCert;

use super::issuers::{CertificateRequirement, ClientVerifier};
use super::peer::PeerRejected;
use super::roots::{TrustError, client_verifier};
use super::server::ALPN_CONTROL;
use super::server::build_server_config;
use crate::certificate::Certificate;
use crate::identity::IssuerPurpose;
use crate::leaf::LeafCertificate;

/// Group of all nodes of a cluster, and the prefix of their names.
const NODE_GROUP_AND_PREFIX: (&str, &str) = ("system:nodes", "system:node:");

/// TLS configuration of a node's listener for `YurtHub`: accepted client certificates, and the server certificate.
#[derive(Clone)]
pub struct YurtHubServerTls {
    verifier: Arc<dyn ClientCertVerifier>,
    server_config: Arc<ServerConfig>,
}

impl fmt::Debug for YurtHubServerTls {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("YurtHubServerTls").finish_non_exhaustive()
    }
}

impl YurtHubServerTls {
    /// Returns a configuration that presents this certificate at that address, and accepts nodes with certificates below
    /// these roots.
    ///
    /// # Errors
    /// If a root is not a certificate, or the certificate is not valid for that address. In the latter case `YurtHub` would
    /// consider the listener healthy, and every request would fail.
    pub fn new(
        leaf: &LeafCertificate,
        roots: &[CertificateDer<'static>],
        address: IpAddr,
    ) -> Result<Self, TrustError> {
        let certificate = leaf.chain().first().ok_or(TrustError::NoTrustedRoots)?;
        EndEntityCert::try_from(certificate)
            .and_then(|shown| shown.verify_is_valid_for_subject_name(&address.into()))
            .map_err(|error| TrustError::Name(address, error.to_string()))?;
        let verifier = client_verifier(roots)?;
        let requirement = (IssuerPurpose::Clients, CertificateRequirement::Required);
        let clients = ClientVerifier::new(None, Some(verifier.clone()), requirement);
        let versions = [&version::TLS13, &version::TLS12];
        let server = build_server_config(&versions, clients, leaf.resolver(), &ALPN_CONTROL, None)?;
        Ok(Self {
            verifier,
            server_config: server,
        })
    }

    /// Returns the configuration of the accepting end.
    pub fn server_config(&self) -> Arc<ServerConfig> {
        self.server_config.clone()
    }

    /// Returns the node that this `YurtHub`'s chain names, if the node may still connect.
    ///
    /// # Errors
    /// If the chain does not belong to the cluster, has expired, or does not name a node.
    pub fn verify_node(
        &self,
        chain: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<String, PeerRejected> {
        let (leaf, issuers) = chain.split_first().ok_or(PeerRejected::NoCertificate)?;
        let invalid = |why: &dyn fmt::Display| PeerRejected::Invalid(why.to_string());
        let verified = self.verifier.verify_client_cert(leaf, issuers, now);
        verified.map_err(|error| invalid(&error))?;
        let parsed = Certificate::parse(leaf).map_err(|error| invalid(&error))?;
        let (group, prefix) = NODE_GROUP_AND_PREFIX;
        let is_in_group = parsed.organizations.iter().any(|one| one == group);
        let name = parsed.common_name.unwrap_or_default();
        match name.strip_prefix(prefix) {
            Some(node) if is_in_group && !node.is_empty() => Ok(node.to_owned()),
            _ => Err(PeerRejected::Subject {
                found: format!("O={}, CN={name}", parsed.organizations.join(",")),
                wanted: format!("O={group}, CN={prefix}NODE"),
            }),
        }
    }
}

#[cfg(test)]
mod tests;
