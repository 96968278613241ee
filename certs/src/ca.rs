//! Certificate authority: a root, the certificates that it signs, and the root that replaces it in a rotation.
//!
//! Owns the keys. Every certificate is built here from the arguments of a function. From a certificate request only the
//! verified public key is taken (`VerifiedPublicKey`), never its names, its usages or a request to be a CA. Each kind of leaf
//! has an intermediate of its own (`root`) and an extended key usage of its own. So neither a certificate nor an issuer's key
//! can stand in for another kind.
//!
//! A rotation has three steps. `prepare` creates a second root, which is trusted and signs nothing. `activate` lets it sign;
//! the first root signs a cross certificate for peers that know only the first root. `retire` drops the first root. Another
//! CA may sign an intermediate for listeners' certificates (`listener_ca`), for clients that trust only that CA. This module
//! never decides who may have a certificate: a token or the operator does.

mod error;
pub(crate) mod file;
mod listener_ca;
mod root;
mod rotation;

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use causeway_tls::{Fingerprint, GatewayName, ListenerName, NodeName, TrustDomain, name, pem};
use rcgen::{Issuer, KeyPair};
use rustls_pki_types::{CertificateDer, UnixTime};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::certificate::Certificate;
use crate::csr::VerifiedPublicKey;
use crate::identity::{self, IssuerPurpose};
use crate::leaf::LeafCertificate;
use causeway_config::Secret;
pub use error::CaError;
use listener_ca::ListenerCa;
#[cfg(test)]
pub(crate) use listener_ca::signed_request;
pub use listener_ca::{CaCertificateInfo, ListenerCaInfo};
pub(crate) use root::to_offset_date_time;
use root::{LeafProfile, Root};

/// Lifetime of a certificate that a gateway issues for itself.
pub const GATEWAY_LIFETIME: Duration = Duration::from_hours(7 * 24);

/// A certificate for a key that another process holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IssuedCertificate {
    /// The certificate.
    pub certificate: CertificateDer<'static>,
    /// Last second of validity.
    pub not_after: UnixTime,
    /// Serial number in the certificate.
    pub serial: Vec<u8>,
    /// Fingerprint of the root above the certificate.
    pub root: Fingerprint,
    /// Chain from the certificate to the root.
    chain_tail: Vec<CertificateDer<'static>>,
}

impl IssuedCertificate {
    /// Returns the serial number in hexadecimal.
    pub fn serial_hex(&self) -> String {
        crate::secret::hex(&self.serial)
    }

    /// Returns the certificate and its chain as PEM.
    pub fn pem(&self) -> String {
        pem::encode_chain(std::slice::from_ref(&self.certificate))
            + &pem::encode_chain(&self.chain_tail)
    }
}

/// Role of a root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RootStage {
    /// The root signs.
    Active,
    /// The root is trusted, and will sign.
    Prepared,
    /// The root is still trusted, but no longer signs.
    Retiring,
}

/// Whether a step of a rotation was made now or before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RotationStep {
    /// The step was made now.
    Applied,
    /// The step had been made before.
    Unchanged,
}

/// State by which a change of a CA is detected: its roots, their stages, and the intermediate that signs for listeners.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CaVersion {
    active: Fingerprint,
    other: Option<(RootStage, Fingerprint)>,
    /// The chain of listeners, and whether it is valid. If it is not, listeners present our own intermediate.
    listeners: Option<(Fingerprint, bool)>,
}

/// A root with its key, and during a rotation the root that replaces it or that it replaced. `Debug` shows no key.
pub struct Ca {
    active: Root,
    other: Option<(RootStage, Root)>,
    /// Whether this CA is a placeholder that no peer trusts.
    is_placeholder: bool,
    listeners: ListenerCa,
}

impl std::fmt::Debug for Ca {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let other = self.other.as_ref();
        out.debug_struct("Ca")
            .field("domain", &self.active.domain)
            .field("fingerprint", &self.active.fingerprint)
            .field(
                "other",
                &other.map(|(stage, root)| (stage, root.fingerprint)),
            )
            .finish_non_exhaustive()
    }
}

/// A certificate that signs trusted leaves.
pub(crate) struct TrustAnchor<'a> {
    /// Purpose of the certificates that the anchor signs; `None` stands for all purposes.
    pub(crate) purpose: Option<IssuerPurpose>,
    /// The root above the anchor.
    pub(crate) root: Fingerprint,
    pub(crate) certificate: &'a CertificateDer<'static>,
}

impl Ca {
    /// Creates a new root with a new key.
    pub fn create(domain: &TrustDomain) -> Result<Self, CaError> {
        Ok(Self {
            active: Root::create(domain)?,
            other: None,
            is_placeholder: false,
            listeners: ListenerCa::default(),
        })
    }

    /// Loads a root that signs leaves itself, and its key, and checks that they match.
    pub fn load(certificate_pem: &str, key_pem: &str) -> Result<Self, CaError> {
        Ok(Self {
            active: Root::load(certificate_pem, key_pem)?,
            other: None,
            is_placeholder: false,
            listeners: ListenerCa::default(),
        })
    }

    /// Creates a CA that no peer trusts and that is not stored. A gateway uses it if its edges and listeners have certificates
    /// from elsewhere. No peer trusts the certificates that this CA would sign.
    pub fn placeholder(domain: &TrustDomain) -> Result<Self, CaError> {
        Ok(Self {
            is_placeholder: true,
            ..Self::create(domain)?
        })
    }

    /// Whether any peer could trust the certificates of this CA.
    pub fn is_trusted(&self) -> bool {
        !self.is_placeholder
    }

    /// Returns a CA whose listeners' intermediate ends at this time.
    #[cfg(test)]
    pub(crate) fn ending(not_after: UnixTime) -> Self {
        let domain = TrustDomain::parse("td.example").expect("a trust domain");
        let mut ca = Self::create(&domain).expect("a CA");
        ca.active.end_issuers(not_after);
        ca
    }

    /// Returns the root that signs.
    pub fn root(&self) -> &CertificateDer<'static> {
        &self.active.signer.certificate
    }

    /// Returns the root that signs, as PEM.
    pub fn root_pem(&self) -> String {
        self.active.signer.certificate_pem()
    }

    /// Returns all trusted roots, the active one first.
    pub fn roots(&self) -> Vec<(RootStage, &CertificateDer<'static>)> {
        self.all_roots()
            .map(|(stage, root)| (stage, &root.signer.certificate))
            .collect()
    }

    /// Returns all trusted roots as PEM, for edges.
    pub fn bundle_pem(&self) -> String {
        self.all_roots()
            .map(|(_, root)| root.signer.certificate_pem())
            .collect()
    }

    /// Returns all trusted roots as PEM for clients of listeners, such as `curl --cacert`. Includes the root of an imported
    /// chain, and those of replaced chains.
    pub fn client_bundle_pem(&self) -> String {
        self.bundle_pem() + &self.listeners.client_roots()
    }

    /// Returns the private key of the root that signs, as PEM.
    pub fn key_pem(&self) -> Secret {
        self.active.signer.key_pem()
    }

    /// Returns the trust domain that the root names.
    pub fn trust_domain(&self) -> &TrustDomain {
        &self.active.domain
    }

    /// Returns the fingerprint that a join token carries to identify this root.
    pub fn fingerprint(&self) -> Fingerprint {
        self.active.fingerprint
    }

    /// Returns the fingerprints of all trusted roots, that of the active root first.
    pub fn fingerprints(&self) -> Vec<Fingerprint> {
        self.all_roots().map(|(_, root)| root.fingerprint).collect()
    }

    /// Returns the version of the CA. If two versions are equal, the CAs are the same.
    pub fn version(&self) -> CaVersion {
        self.version_at(UnixTime::now())
    }

    /// Returns the version of the CA at a time; it changes when the chain of listeners expires.
    pub(crate) fn version_at(&self, now: UnixTime) -> CaVersion {
        let other = self.other.as_ref();
        CaVersion {
            active: self.fingerprint(),
            other: other.map(|(stage, root)| (*stage, root.fingerprint)),
            listeners: self.listeners.version_at(now),
        }
    }

    /// Whether the root that signs is older than the introduction of intermediates. Such a root permits no intermediate below
    /// it, not even below the next root. OpenSSL applies that limit if it knows only the old root.
    pub fn signs_leaves_directly(&self) -> bool {
        self.active.issuers().is_none()
    }

    fn all_roots(&self) -> impl Iterator<Item = (RootStage, &Root)> {
        let other = self.other.iter().map(|(stage, root)| (*stage, root));
        [(RootStage::Active, &self.active)].into_iter().chain(other)
    }

    /// Returns the certificates that sign trusted leaves.
    pub(crate) fn anchors(&self) -> Vec<TrustAnchor<'_>> {
        let purposes_of = |(_, root): (RootStage, &'_ Root)| match root.issuers() {
            None => vec![(None, root.fingerprint)],
            Some(_) => IssuerPurpose::ALL
                .map(|purpose| (Some(purpose), root.fingerprint))
                .into(),
        };
        let purposes: Vec<_> = self.all_roots().flat_map(purposes_of).collect();
        let certificates = self.all_roots().flat_map(|(_, root)| match root.issuers() {
            None => std::slice::from_ref(&root.signer),
            Some(issuers) => issuers,
        });
        let pairs = purposes.into_iter().zip(certificates);
        pairs
            .map(|((purpose, root), signer)| TrustAnchor {
                purpose,
                root,
                certificate: &signer.certificate,
            })
            .collect()
    }

    /// Returns the issuers of gateways' certificates with their keys, those of the active root first.
    pub(crate) fn gateway_issuers(
        &self,
    ) -> impl Iterator<Item = (&CertificateDer<'static>, &Issuer<'static, KeyPair>)> {
        let signers = self
            .all_roots()
            .map(|(_, root)| root.issuer_of(IssuerPurpose::Replicas));
        signers.map(|signer| (&signer.certificate, &signer.issuer))
    }

    /// Issues a certificate for an edge's key. It is valid for this node as a client, and for nothing else.
    pub fn issue_edge(
        &self,
        key: &VerifiedPublicKey,
        node: &NodeName,
        lifetime: Duration,
    ) -> Result<IssuedCertificate, CaError> {
        let profile = LeafProfile {
            common_name: node.as_str(),
            groups: None,
            uri: Some(identity::edge_uri(self.trust_domain(), node)),
            names: &[node.into()],
            lifetime,
        };
        let mut chain = self
            .active
            .sign(IssuerPurpose::Edges, key.public_key(), profile)?;
        let certificate = chain.remove(0);
        let parsed = Certificate::parse(&certificate)?;
        let not_after = UnixTime::since_unix_epoch(Duration::from_secs(parsed.not_after));
        Ok(IssuedCertificate {
            certificate,
            not_after,
            serial: parsed.serial,
            root: self.fingerprint(),
            chain_tail: chain,
        })
    }

    /// Issues a gateway's leaf for its tunnel port. The chain includes the roots, so that an edge that knows only the
    /// fingerprint of its token recognises this CA.
    pub fn issue_gateway(
        &self,
        names: &[GatewayName],
        lifetime: Duration,
    ) -> Result<LeafCertificate, CaError> {
        let profile = LeafProfile {
            common_name: "causeway gateway",
            groups: None,
            uri: Some(identity::gateway_uri(self.trust_domain())),
            names,
            lifetime,
        };
        let roots = self
            .all_roots()
            .filter(|(stage, _)| *stage != RootStage::Prepared);
        let roots = roots.map(|(_, root)| root.signer.certificate.clone());
        let chain_tail = self.cross_certificate().into_iter().chain(roots);
        self.issue_leaf(IssuerPurpose::Replicas, profile, chain_tail)
    }

    /// Issues a leaf that a listener presents to its clients under these names.
    pub fn issue_listener(
        &self,
        names: &[ListenerName],
        lifetime: Duration,
    ) -> Result<LeafCertificate, CaError> {
        if let Some(chain) = self.listeners.valid_chain()
            && let Some(leaf) = chain.issue(names, lifetime)?
        {
            return Ok(leaf);
        }
        let profile = LeafProfile::for_listener(names, lifetime);
        self.issue_leaf(IssuerPurpose::Listeners, profile, self.cross_certificate())
    }

    /// Issues a client certificate with its key. The groups are in one organization, separated by commas.
    pub fn issue_client(
        &self,
        name: &str,
        groups: &[String],
        lifetime: Duration,
    ) -> Result<LeafCertificate, CaError> {
        name::check_client(name)?;
        let groups = identity::join_groups(groups)?;
        let profile = LeafProfile {
            common_name: name,
            groups: Some(groups).filter(|groups| !groups.is_empty()),
            uri: Some(identity::client_uri(self.trust_domain(), name)),
            names: &[],
            lifetime,
        };
        self.issue_leaf(IssuerPurpose::Clients, profile, None)
    }

    /// Returns the cross certificate from the active root to the root before it, while that root is trusted.
    fn cross_certificate(&self) -> Option<CertificateDer<'static>> {
        let is_retiring = matches!(self.other, Some((RootStage::Retiring, _)));
        self.active
            .cross_certificate
            .clone()
            .filter(|_| is_retiring)
    }

    fn issue_leaf(
        &self,
        purpose: IssuerPurpose,
        profile: LeafProfile<'_>,
        chain_tail: impl IntoIterator<Item = CertificateDer<'static>>,
    ) -> Result<LeafCertificate, CaError> {
        issue_leaf(&self.active, purpose, profile, chain_tail)
    }
}

fn issue_leaf(
    root: &Root,
    purpose: IssuerPurpose,
    profile: LeafProfile<'_>,
    chain_tail: impl IntoIterator<Item = CertificateDer<'static>>,
) -> Result<LeafCertificate, CaError> {
    let key = KeyPair::generate()?;
    let mut chain = root.sign(purpose, &key, profile)?;
    chain.extend(chain_tail);
    Ok(LeafCertificate::new(chain, key.serialize_der())?)
}

/// The CA of a running process. Cheap to clone; all clones share one CA.
#[derive(Clone, Debug)]
pub struct LiveCa(Arc<ArcSwap<Ca>>);

impl LiveCa {
    /// Returns a handle to this CA, until another is swapped in.
    pub fn new(ca: Ca) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(ca)))
    }

    /// Returns the present CA.
    pub fn get(&self) -> Arc<Ca> {
        self.0.load_full()
    }

    /// Replaces the CA.
    pub fn swap(&self, ca: Ca) {
        self.0.store(Arc::new(ca));
    }
}

#[cfg(test)]
mod tests;
