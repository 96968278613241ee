//! Certificates by which a cluster's own signers name a node (`kubernetes.io/…`): shown once, in exchange for one of ours.
//!
//! The CA behind these signers has made the certificates of kubelets, users and components as well. So only the exact subject
//! counts: the one organization and the one common name that the signer gives to nodes, and no alternative name.

use rustls::server::danger::ClientCertVerifier;
use rustls_pki_types::{CertificateDer, UnixTime};
use std::{fmt, sync::Arc, time::Duration};
use x509_parser::{
    oid_registry::{OID_X509_COMMON_NAME, OID_X509_ORGANIZATION_NAME},
    prelude::{FromDer, X509Certificate, X509CertificationRequest},
    x509::X509Name,
};

use crate::certificate::Certificate;
use crate::name::NodeName;
use crate::verify::{self, PeerRejected, Purpose, TrustError};

/// Form in which a signer of the cluster's own names a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignerProfile {
    /// `kubernetes.io/kube-apiserver-client-kubelet`: as kubelets are named, `O=system:nodes, CN=system:node:NODE`.
    Kubelet,
    /// `kubernetes.io/kube-apiserver-client`: `O=causeway:edges, CN=causeway:edge:NODE`.
    Client,
}

impl SignerProfile {
    /// Returns the profile of a signer by its name, or `None` if it is none of the cluster's own for clients.
    pub fn of(signer: &str) -> Option<Self> {
        match signer {
            "kubernetes.io/kube-apiserver-client-kubelet" => Some(Self::Kubelet),
            "kubernetes.io/kube-apiserver-client" => Some(Self::Client),
            _ => None,
        }
    }

    /// The one organization.
    pub fn organization(self) -> &'static str {
        match self {
            Self::Kubelet => "system:nodes",
            Self::Client => "causeway:edges",
        }
    }

    /// Returns the prefix of the node's name in the one common name.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Kubelet => "system:node:",
            Self::Client => "causeway:edge:",
        }
    }

    /// Whether a request in DER is meant as that of an edge: others ask these signers, too.
    pub fn is_meant(self, request: &[u8]) -> bool {
        let Ok((_, request)) = X509CertificationRequest::from_der(request) else {
            return false;
        };
        let subject = &request.certification_request_info.subject;
        let mut organizations = subject.iter_organization();
        let mut names = subject.iter_common_name();
        organizations.any(|name| name.as_str() == Ok(self.organization()))
            || names.any(|name| {
                name.as_str()
                    .is_ok_and(|name| name.starts_with(self.prefix()))
            })
    }

    /// Returns the node of a subject that has exactly this form.
    pub(crate) fn node(self, subject: &X509Name<'_>) -> Option<NodeName> {
        let (mut organization, mut common) = (None, None);
        for attribute in subject.iter_attributes() {
            let place = match attribute.attr_type() {
                oid if *oid == OID_X509_ORGANIZATION_NAME => &mut organization,
                oid if *oid == OID_X509_COMMON_NAME => &mut common,
                _ => return None,
            };
            if place.replace(attribute.as_str().ok()?).is_some() {
                return None;
            }
        }
        if organization? != self.organization() {
            return None;
        }
        let name = common?.strip_prefix(self.prefix())?;
        let node = NodeName::parse(name).ok()?;
        (node.as_str() == name).then_some(node)
    }
}

impl fmt::Display for SignerProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "O={}, CN={}NODE", self.organization(), self.prefix())
    }
}

/// Longest lifetime of a certificate that is shown: two hours are requested, and signers begin somewhat earlier.
pub const SHOWN_AT_MOST: Duration = Duration::from_hours(3);

/// A node that has shown its certificate, and when that begins, in Unix seconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedNodeCertificate {
    /// The node.
    pub node: NodeName,
    /// The certificate's first second.
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
    /// The CA certificates of the signers.
    pub fn roots(&self) -> &[CertificateDer<'static>] {
        &self.roots
    }

    /// Returns a verifier with these roots.
    pub fn new(
        roots: Vec<CertificateDer<'static>>,
        subject: SignerProfile,
    ) -> Result<Self, TrustError> {
        let verifier = verify::client_verifier(&roots)?;
        Ok(Self {
            subject,
            roots,
            verifier,
        })
    }

    /// Returns the node that this chain names, if the chain is valid now. A certificate with a longer lifetime was made for
    /// another purpose.
    pub fn node(
        &self,
        chain: Option<&[CertificateDer<'_>]>,
        now: UnixTime,
    ) -> Result<VerifiedNodeCertificate, PeerRejected> {
        let (leaf, issuers) = chain
            .and_then(<[_]>::split_first)
            .ok_or(PeerRejected::Missing)?;
        let verified = self.verifier.verify_client_cert(leaf, issuers, now);
        verified.map_err(|error| PeerRejected::Invalid(error.to_string()))?;
        let unreadable = |why: &dyn fmt::Display| PeerRejected::Invalid(why.to_string());
        let (_, parsed) = X509Certificate::from_der(leaf).map_err(|error| unreadable(&error))?;
        let usage = parsed.extended_key_usage();
        let usage = usage.map_err(|error| unreadable(&error))?;
        if !usage.is_some_and(|usage| usage.value.client_auth) {
            let wanted = Purpose::Edge;
            return Err(PeerRejected::WrongPurpose { wanted });
        }
        let names = parsed.subject_alternative_name();
        let names = names.map_err(|error| unreadable(&error))?;
        let node = self.subject.node(parsed.subject());
        let node = node.filter(|_| names.is_none());
        let node = node.ok_or_else(|| PeerRejected::Subject {
            found: parsed.subject().to_string(),
            wanted: self.subject.to_string(),
        })?;
        let facts = Certificate::read(leaf).map_err(|error| unreadable(&error))?;
        let (since, life) = (
            facts.not_before,
            facts.not_after.saturating_sub(facts.not_before),
        );
        if life > SHOWN_AT_MOST.as_secs() {
            return Err(unreadable(&format_args!(
                "it lives for {life} s, and what is made to be shown here for {} s at most",
                SHOWN_AT_MOST.as_secs()
            )));
        }
        Ok(VerifiedNodeCertificate { node, since })
    }
}

#[cfg(test)]
mod tests;
