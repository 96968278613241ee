//! The edge's identity: what enrolment leaves on a node and each later start takes up again.
//!
//! Holds node name, leaf, root and trust domain, and the gateway addresses learned meanwhile.
//! All of it is checked when put together: the certificate is for our key, the root has signed
//! it, and the names are read from the two certificates, never from what the gateway says beside.

use rustls_pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::certificate::Certificate;
use crate::identity::{self, Identity};
use crate::leaf::{Leaf, LeafError};
use crate::name::{NameError, NodeName, TrustDomain};
use crate::pem;
use crate::secret::{Fingerprint, Secret};
use crate::verify::{PeerRefused, Purpose, Trust, TrustError, check_peer, none_revoked};

/// Why certificates and key make no identity of an edge.
#[derive(Debug, Error)]
pub enum EdgeIdentityError {
    /// The root's PEM does not read.
    #[error("unreadable root certificate: {0}")]
    Root(String),
    /// Chain and key do not go together.
    #[error(transparent)]
    Leaf(#[from] LeafError),
    /// The root names no trust domain.
    #[error("the root certificate is not Causeway's: {0}")]
    Domain(#[from] NameError),
    /// The root is unusable.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The root did not sign the certificate, or not for an edge.
    #[error("the edge's certificate does not hold: {0}")]
    Refused(#[from] PeerRefused),
}

/// An enrolled edge.
#[derive(Debug, Clone)]
pub struct EdgeIdentity {
    /// The node, as the certificate says.
    pub node: NodeName,
    /// The edge's certificate with its key.
    pub leaf: Leaf,
    /// The root that signs edges and gateways.
    pub root: CertificateDer<'static>,
    /// The trust domain, as the root says.
    pub trust_domain: TrustDomain,
    /// Further addresses of the gateway, learned from its hello.
    pub gateways: Vec<String>,
}

/// The form in the data directory: one file, so that key and certificate change at once.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EdgeFile {
    root: String,
    certificate: String,
    key: String,
    gateways: Vec<String>,
}

impl EdgeIdentity {
    /// Puts together what enrolment or renewal brought. Whether the certificate holds now is not asked here: an edge
    /// that was off for long shall still say who it is, and be refused by the gateway; and a machine
    /// that gets its time late shall be there when it does.
    pub fn new(root_pem: &str, chain_pem: &str, key: &Secret) -> Result<Self, EdgeIdentityError> {
        let root = pem::certificates(root_pem)
            .map_err(EdgeIdentityError::Root)?
            .swap_remove(0);
        let leaf = Leaf::load(chain_pem, key.expose())?;
        let facts = Certificate::read(&root).map_err(NameError::from)?;
        let trust_domain = identity::domain_of_root(&facts)?;
        let trust = Trust::new(&root, &trust_domain)?;
        let within = leaf.not_after();
        let identity = check_peer(
            Some(leaf.chain()),
            Purpose::Edge,
            within,
            &trust,
            &none_revoked,
        )?;
        let Identity::Edge(node) = identity else {
            return Err(PeerRefused::Kind {
                wanted: Purpose::Edge,
                found: identity.kind(),
            }
            .into());
        };
        Ok(Self {
            node,
            leaf,
            root,
            trust_domain,
            gateways: Vec::new(),
        })
    }

    /// The fingerprint of the root.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.root)
    }

    pub(crate) fn to_file(&self) -> EdgeFile {
        EdgeFile {
            root: pem::encode_chain(std::slice::from_ref(&self.root)),
            certificate: self.leaf.chain_pem(),
            key: self.leaf.key_pem().expose().to_owned(),
            gateways: self.gateways.clone(),
        }
    }

    pub(crate) fn from_file(file: EdgeFile) -> Result<Self, EdgeIdentityError> {
        let key = Secret::new(file.key);
        let identity = Self::new(&file.root, &file.certificate, &key)?;
        Ok(Self {
            gateways: file.gateways,
            ..identity
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Ca, CsrKey, EdgeKey};
    use std::time::Duration;

    fn ca() -> Ca {
        Ca::create(&TrustDomain::parse("td").unwrap()).unwrap()
    }

    fn enrol(ca: &Ca) -> (EdgeKey, String) {
        let key = EdgeKey::generate().unwrap();
        let csr = CsrKey::verify(&key.request().unwrap()).unwrap();
        let node = NodeName::parse("edge-1").unwrap();
        let issued = ca.issue_edge(&csr, &node, Duration::from_mins(1)).unwrap();
        (key, issued.pem())
    }

    #[test]
    fn the_names_come_from_the_certificates() {
        let ca = ca();
        let (key, chain) = enrol(&ca);
        let edge = EdgeIdentity::new(&ca.root_pem(), &chain, &key.key_pem()).unwrap();
        assert_eq!(
            (edge.node.as_str(), edge.trust_domain.as_str()),
            ("edge-1", "td")
        );
        assert_eq!(edge.fingerprint(), ca.fingerprint());
    }

    #[test]
    fn another_root_or_another_key_is_refused() {
        let ours = ca();
        let (key, chain) = enrol(&ours);
        let other = EdgeKey::generate().unwrap();
        assert!(EdgeIdentity::new(&ca().root_pem(), &chain, &key.key_pem()).is_err());
        assert!(EdgeIdentity::new(&ours.root_pem(), &chain, &other.key_pem()).is_err());
    }

    #[test]
    fn a_callers_certificate_is_no_edges() {
        let ca = ca();
        let caller = ca.issue_caller("ann", &[], Duration::from_mins(1)).unwrap();
        let refused = EdgeIdentity::new(&ca.root_pem(), &caller.chain_pem(), &caller.key_pem());
        assert!(matches!(
            refused,
            Err(EdgeIdentityError::Refused(PeerRefused::Kind { .. }))
        ));
    }
}
