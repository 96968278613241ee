//! Names that a cluster's own signers give to nodes.

use causeway_tls::NodeName;
use std::fmt;
use x509_parser::{
    oid_registry::{OID_X509_COMMON_NAME, OID_X509_ORGANIZATION_NAME},
    prelude::{FromDer, X509CertificationRequest},
    x509::X509Name,
};

/// Form in which a signer of the cluster's own names a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignerProfile {
    /// `kubernetes.io/kube-apiserver-client-kubelet`: the name of a kubelet, `O=system:nodes, CN=system:node:NODE`.
    Kubelet,
    /// `kubernetes.io/kube-apiserver-client`: `O=causeway:edges, CN=causeway:edge:NODE`.
    Client,
}

impl SignerProfile {
    /// Returns the profile of a signer by its name, or `None` if it is not one of the cluster's own signers for clients.
    pub fn from_signer_name(signer: &str) -> Option<Self> {
        match signer {
            "kubernetes.io/kube-apiserver-client-kubelet" => Some(Self::Kubelet),
            "kubernetes.io/kube-apiserver-client" => Some(Self::Client),
            _ => None,
        }
    }

    /// Returns the only organization.
    pub fn organization(self) -> &'static str {
        match self {
            Self::Kubelet => "system:nodes",
            Self::Client => "causeway:edges",
        }
    }

    /// Returns the prefix of the node's name in the only common name.
    pub fn common_name_prefix(self) -> &'static str {
        match self {
            Self::Kubelet => "system:node:",
            Self::Client => "causeway:edge:",
        }
    }

    /// Whether a request in DER is an edge's, because these signers also receive other requests.
    pub fn is_edge_request(self, request: &[u8]) -> bool {
        let Ok((_, request)) = X509CertificationRequest::from_der(request) else {
            return false;
        };
        let subject = &request.certification_request_info.subject;
        let mut organizations = subject.iter_organization();
        let mut names = subject.iter_common_name();
        organizations.any(|name| name.as_str() == Ok(self.organization()))
            || names.any(|name| {
                name.as_str()
                    .is_ok_and(|name| name.starts_with(self.common_name_prefix()))
            })
    }

    /// Returns the node of a subject that has exactly this form.
    pub(crate) fn node_of_subject(self, subject: &X509Name<'_>) -> Option<NodeName> {
        let (mut organization, mut common) = (None, None);
        for attribute in subject.iter_attributes() {
            let slot = match attribute.attr_type() {
                oid if *oid == OID_X509_ORGANIZATION_NAME => &mut organization,
                oid if *oid == OID_X509_COMMON_NAME => &mut common,
                _ => return None,
            };
            if slot.replace(attribute.as_str().ok()?).is_some() {
                return None;
            }
        }
        if organization? != self.organization() {
            return None;
        }
        let name = common?.strip_prefix(self.common_name_prefix())?;
        let node = NodeName::parse(name).ok()?;
        (node.as_str() == name).then_some(node)
    }
}

impl fmt::Display for SignerProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "O={}, CN={}NODE",
            self.organization(),
            self.common_name_prefix()
        )
    }
}
