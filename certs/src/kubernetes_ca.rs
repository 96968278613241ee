//! Certificates in which a cluster's own signers name a node (`kubernetes.io/…`). An edge presents such a certificate once,
//! in exchange for one of ours.
//!
//! The CA behind these signers has made the certificates of kubelets, users and components as well. So only the exact subject
//! counts: the one organization and the one common name that the signer gives to nodes, and no alternative name.

use causeway_tls::NodeName;
use rustls::server::danger::ClientCertVerifier;
use rustls_pki_types::{CertificateDer, UnixTime};
use std::{fmt, sync::Arc, time::Duration};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::certificate::Certificate;
use crate::signer_profile::SignerProfile;
use crate::verify::peer::{PeerRejected, Purpose};
use crate::verify::roots::{TrustError, client_verifier};

/// Maximum lifetime of a certificate that is presented: two hours are requested, and signers begin somewhat earlier.
pub const MAX_CERTIFICATE_LIFETIME: Duration = Duration::from_hours(3);

/// A node that has presented its certificate, and the first second of the certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedNodeCertificate {
    /// The node.
    pub node: NodeName,
    /// First second of the certificate, in Unix seconds.
    pub since: u64,
}

/// The CA of a cluster's signers, and the form in which they name nodes.
#[derive(Debug, Clone)]
pub struct ClusterCa {
    subject: SignerProfile,
    roots: Vec<CertificateDer<'static>>,
    pub(crate) verifier: Arc<dyn ClientCertVerifier>,
}

/// Two values are equal if they accept the same nodes.
impl PartialEq for ClusterCa {
    fn eq(&self, other: &Self) -> bool {
        (self.subject, &self.roots) == (other.subject, &other.roots)
    }
}

impl ClusterCa {
    /// Returns the CA certificates of the signers.
    pub fn roots(&self) -> &[CertificateDer<'static>] {
        &self.roots
    }

    /// Returns a verifier with these roots.
    pub fn new(
        roots: Vec<CertificateDer<'static>>,
        subject: SignerProfile,
    ) -> Result<Self, TrustError> {
        let verifier = client_verifier(&roots)?;
        Ok(Self {
            subject,
            roots,
            verifier,
        })
    }

    /// Returns the node that this chain names, if the chain is valid now. A certificate with a longer lifetime was made for
    /// another purpose.
    pub fn verify_node(
        &self,
        chain: Option<&[CertificateDer<'_>]>,
        now: UnixTime,
    ) -> Result<VerifiedNodeCertificate, PeerRejected> {
        let (leaf, issuers) = chain
            .and_then(<[_]>::split_first)
            .ok_or(PeerRejected::NoCertificate)?;
        let verified = self.verifier.verify_client_cert(leaf, issuers, now);
        verified.map_err(|error| PeerRejected::Invalid(error.to_string()))?;
        let invalid = |why: &dyn fmt::Display| PeerRejected::Invalid(why.to_string());
        let (_, parsed) = X509Certificate::from_der(leaf).map_err(|error| invalid(&error))?;
        let usage = parsed.extended_key_usage();
        let usage = usage.map_err(|error| invalid(&error))?;
        if !usage.is_some_and(|usage| usage.value.client_auth) {
            let wanted = Purpose::Edge;
            return Err(PeerRejected::WrongPurpose { wanted });
        }
        let names = parsed.subject_alternative_name();
        let names = names.map_err(|error| invalid(&error))?;
        let node = self.subject.node_of_subject(parsed.subject());
        let node = node.filter(|_| names.is_none());
        let node = node.ok_or_else(|| PeerRejected::Subject {
            found: parsed.subject().to_string(),
            wanted: self.subject.to_string(),
        })?;
        let parsed_leaf = Certificate::parse(leaf).map_err(|error| invalid(&error))?;
        let (not_before, lifetime) = (
            parsed_leaf.not_before,
            parsed_leaf.not_after.saturating_sub(parsed_leaf.not_before),
        );
        if lifetime > MAX_CERTIFICATE_LIFETIME.as_secs() {
            return Err(invalid(&format_args!(
                "its lifetime is {lifetime} s, but a certificate for this purpose may have at most {} s",
                MAX_CERTIFICATE_LIFETIME.as_secs()
            )));
        }
        Ok(VerifiedNodeCertificate {
            node,
            since: not_before,
        })
    }
}

#[cfg(test)]
mod tests;
