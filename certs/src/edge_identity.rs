//! The edge's identity: the result of enrolment on a node, which each later start loads.
//!
//! Holds the node's name, leaf, roots and trust domain, and the gateway addresses that the edge has received since. All of it
//! is checked on construction: the certificate is for our key, and an issuer below a root has signed it. The names are read
//! from the certificates, never from other statements of the gateway.

use std::time::Duration;

use causeway_tls::{Fingerprint, NameError, NodeName, TrustDomain, pem};
use rustls_pki_types::{CertificateDer, UnixTime};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::certificate::Certificate;
use crate::external::{self, ExternalIdentityError};
use crate::gateway_revocations::GatewayRevocations;
use crate::identity::{self, Identity};
use crate::leaf::{LeafCertificate, LeafCertificateError};
use crate::verify::peer::{PeerRejected, Purpose, check_peer, none_revoked};
use crate::verify::roots::TrustError;
use crate::verify::trust_store::TrustStore;
use causeway_config::Secret;

/// Error that makes certificates and key unusable as an identity of an edge.
#[derive(Debug, Error)]
pub enum EdgeIdentityError {
    /// The root's PEM cannot be parsed.
    #[error("unreadable root certificate: {0}")]
    Root(String),
    /// Chain and key do not match.
    #[error(transparent)]
    Leaf(#[from] LeafCertificateError),
    /// The root names no trust domain.
    #[error("the root certificate is not Causeway's: {0}")]
    Domain(#[from] NameError),
    /// The root is unusable.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The root did not sign the certificate, or did not sign it for an edge.
    #[error("the edge's certificate is not valid: {0}")]
    Refused(#[from] PeerRejected),
}

/// Maximum number of roots that an edge receives: a rotation has two.
const MAX_ROOTS: usize = 4;

/// An enrolled edge.
#[derive(Debug, Clone)]
pub struct EdgeIdentity {
    /// Name of the node in the certificate.
    pub node: NodeName,
    /// The edge's certificate with its key.
    pub leaf: LeafCertificate,
    /// Roots of edges and gateways: one, or two during a rotation.
    pub roots: Vec<CertificateDer<'static>>,
    /// Trust domain that the roots name.
    pub trust_domain: TrustDomain,
    /// Further addresses of gateways, from their hello.
    pub gateways: Vec<String>,
    /// Revocations of gateways' certificates that the edge has received. They are stored in a file of their own.
    pub revoked_gateways: GatewayRevocations,
    /// Whether an external CA issues and renews the identity and provides the roots of the gateways.
    pub is_external: bool,
}

/// Form of the identity in the data directory: one file, so that key and certificate change at once.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EdgeFile {
    /// All roots, one PEM block after the other.
    root: String,
    certificate: String,
    key: String,
    gateways: Vec<String>,
}

impl EdgeIdentity {
    /// Combines the parts that enrolment or renewal returned. The present validity of the certificate is not checked. An edge
    /// that was off for long still presents its identity, and the gateway refuses it. If a machine sets its clock late, the
    /// identity is valid as soon as the clock is right.
    pub fn new(roots_pem: &str, chain_pem: &str, key: &Secret) -> Result<Self, EdgeIdentityError> {
        let identity = Self::assemble(roots_pem, chain_pem, key)?;
        let trust_store = TrustStore::from_roots(&identity.roots, &identity.trust_domain)?;
        let not_after = identity.leaf.not_after();
        check_peer(
            Some(identity.leaf.chain()),
            Purpose::Edge,
            not_after,
            &trust_store,
            &none_revoked,
        )?;
        Ok(identity)
    }

    /// Builds the identity from parts that an external CA has issued for this node: the roots of gateways, the certificate
    /// with its chain, and its key. The gateways decide whether they accept the certificate and whether it is valid now.
    pub fn from_external(
        roots_pem: &str,
        chain_pem: &str,
        key_pem: &str,
    ) -> Result<Self, ExternalIdentityError> {
        let (leaf, node, trust_domain) = external::load_edge(chain_pem, key_pem)?;
        Ok(Self {
            node,
            leaf,
            roots: external::parse_roots(roots_pem)?,
            trust_domain,
            gateways: Vec::new(),
            revoked_gateways: GatewayRevocations::default(),
            is_external: true,
        })
    }

    /// Returns the trust store by which this edge recognises a gateway.
    pub(crate) fn trust_store(&self) -> Result<TrustStore, TrustError> {
        if self.is_external {
            return TrustStore::external(&self.roots, &self.trust_domain);
        }
        let trust = TrustStore::from_roots(&self.roots, &self.trust_domain)?;
        Ok(trust.with_revoked_gateways(self.revoked_gateways.serials().into()))
    }

    /// Returns the serial number of the certificate that a gateway presented earlier, if it is revoked.
    pub fn revoked_serial(&self, gateway: &[CertificateDer<'_>]) -> Option<String> {
        let parsed = Certificate::parse(gateway.first()?).ok()?;
        Some(parsed.serial_hex()).filter(|serial| self.revoked_gateways.is_revoked(serial))
    }

    /// Whether this edge still trusts a gateway that presented this chain earlier. The dates were checked at that time.
    pub fn trusts_gateway(&self, gateway: &[CertificateDer<'_>]) -> bool {
        let parsed = gateway.first().map(Certificate::parse);
        let not_after = parsed.and_then(Result::ok).unwrap_or_default().not_after;
        let not_after = UnixTime::since_unix_epoch(Duration::from_secs(not_after));
        let (now, purpose) = (UnixTime::now().min(not_after), Purpose::Gateway);
        self.trust_store().is_ok_and(|trust| {
            check_peer(Some(gateway), purpose, now, &trust, &none_revoked).is_ok()
        })
    }

    /// Returns the trust domain that the roots name.
    pub fn trust_domain_of(roots_pem: &str) -> Result<TrustDomain, EdgeIdentityError> {
        read_roots(roots_pem).map(|(_, domain)| domain)
    }

    /// Builds the identity from parts that were checked before, or that the calling function checks. The root that signed a
    /// certificate may have been retired while the certificate is still in use.
    fn assemble(roots_pem: &str, chain_pem: &str, key: &Secret) -> Result<Self, EdgeIdentityError> {
        let leaf = LeafCertificate::load(chain_pem, key.expose())?;
        let (roots, trust_domain) = read_roots(roots_pem)?;
        let certificate = leaf.chain().first().ok_or(PeerRejected::NoCertificate)?;
        let identity = Identity::from_own_certificate(certificate, &trust_domain)
            .map_err(PeerRejected::Identity)?;
        let Identity::Edge(node) = identity else {
            return Err(PeerRejected::WrongKind {
                wanted: Purpose::Edge,
                found: identity.kind(),
            }
            .into());
        };
        Ok(Self {
            node,
            leaf,
            roots,
            trust_domain,
            gateways: Vec::new(),
            revoked_gateways: GatewayRevocations::default(),
            is_external: false,
        })
    }

    /// Returns the fingerprints of the roots.
    pub fn fingerprints(&self) -> Vec<Fingerprint> {
        self.roots
            .iter()
            .map(|root| Fingerprint::of_certificate(root))
            .collect()
    }

    /// Whether all roots of this PEM are already trusted. Returns `false` if the text cannot be parsed.
    pub fn trusts_all(&self, roots_pem: &str) -> bool {
        read_roots(roots_pem)
            .is_ok_and(|(roots, _)| roots.iter().all(|root| self.roots.contains(root)))
    }

    /// Parses the roots that a gateway sends. Refuses roots of another trust domain, and sets without a root that is already
    /// trusted: the successor of a root is first trusted beside it.
    pub fn read_roots(
        &self,
        roots_pem: &str,
    ) -> Result<Vec<CertificateDer<'static>>, EdgeIdentityError> {
        let (roots, domain) = read_roots(roots_pem)?;
        TrustStore::from_roots(&roots, &domain)?;
        if domain != self.trust_domain {
            return Err(EdgeIdentityError::Root(format!(
                "it is of trust domain {domain}, but this edge is of {}",
                self.trust_domain
            )));
        }
        if !roots.iter().any(|root| self.roots.contains(root)) {
            let why = "none of the new roots is trusted already".to_owned();
            return Err(EdgeIdentityError::Root(why));
        }
        Ok(roots)
    }

    pub(crate) fn to_file(&self) -> EdgeFile {
        EdgeFile {
            root: pem::encode_chain(&self.roots),
            certificate: self.leaf.chain_pem(),
            key: self.leaf.key_pem().expose().to_owned(),
            gateways: self.gateways.clone(),
        }
    }

    pub(crate) fn from_file(file: EdgeFile) -> Result<Self, EdgeIdentityError> {
        let key = Secret::new(file.key);
        let identity = Self::assemble(&file.root, &file.certificate, &key)?;
        Ok(Self {
            gateways: file.gateways,
            ..identity
        })
    }
}

/// Parses roots, and returns them with the trust domain that they name. A text has a few roots at most.
fn read_roots(
    text: &str,
) -> Result<(Vec<CertificateDer<'static>>, TrustDomain), EdgeIdentityError> {
    let roots = pem::parse_certificates(text).map_err(EdgeIdentityError::Root)?;
    if roots.len() > MAX_ROOTS {
        let why = format!("there are more than {MAX_ROOTS} certificates");
        return Err(EdgeIdentityError::Root(why));
    }
    let domain = |root| {
        let parsed = Certificate::parse(root).map_err(NameError::from)?;
        if !parsed.is_ca {
            return Err(EdgeIdentityError::Root(
                "it may not sign certificates".into(),
            ));
        }
        Ok(identity::trust_domain_of_root(&parsed)?)
    };
    let mut domains = roots.iter().map(domain).collect::<Result<Vec<_>, _>>()?;
    domains.dedup();
    match domains.pop() {
        Some(one) if domains.is_empty() => Ok((roots, one)),
        _ => {
            let why = "the certificates are of several trust domains".to_owned();
            Err(EdgeIdentityError::Root(why))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Ca, PrivateKey, VerifiedPublicKey};
    use std::time::Duration;

    fn ca() -> Ca {
        Ca::create(&TrustDomain::parse("td").unwrap()).unwrap()
    }

    fn enrol(ca: &Ca) -> (PrivateKey, String) {
        let key = PrivateKey::generate().unwrap();
        let csr = VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
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
        assert_eq!(edge.fingerprints(), ca.fingerprints());
    }

    #[test]
    fn successive_roots_are_accepted_and_foreign_roots_are_refused() {
        let ca = ca();
        let (key, chain) = enrol(&ca);
        let mut edge = EdgeIdentity::new(&ca.root_pem(), &chain, &key.key_pem()).unwrap();
        let stranger = Ca::create(&TrustDomain::parse("td").unwrap()).unwrap();
        assert!(edge.read_roots(&stranger.root_pem()).is_err());
        let both = ca.root_pem() + &stranger.root_pem();
        edge.roots = edge.read_roots(&both).unwrap();
        edge.roots = edge.read_roots(&stranger.root_pem()).unwrap();
        let elsewhere = Ca::create(&TrustDomain::parse("other").unwrap()).unwrap();
        assert!(
            edge.read_roots(&(stranger.root_pem() + &elsewhere.root_pem()))
                .is_err()
        );
        assert!(edge.read_roots(&chain).is_err(), "no authority");
        // The roots did not issue its own certificate; it still loads.
        let again = EdgeIdentity::from_file(edge.to_file()).unwrap();
        assert_eq!((again.roots.len(), again.node), (1, edge.node));
    }

    #[test]
    fn another_root_or_another_key_is_refused() {
        let ours = ca();
        let (key, chain) = enrol(&ours);
        let other = PrivateKey::generate().unwrap();
        assert!(EdgeIdentity::new(&ca().root_pem(), &chain, &key.key_pem()).is_err());
        assert!(EdgeIdentity::new(&ours.root_pem(), &chain, &other.key_pem()).is_err());
    }

    #[test]
    fn a_clients_certificate_is_no_edges() {
        let ca = ca();
        let client = ca.issue_client("ann", &[], Duration::from_mins(1)).unwrap();
        let refused = EdgeIdentity::new(&ca.root_pem(), &client.chain_pem(), &client.key_pem());
        assert!(matches!(
            refused,
            Err(EdgeIdentityError::Refused(PeerRejected::WrongKind { .. }))
        ));
    }
}
