//! Trusted signers.

use std::collections::BTreeSet;
use std::sync::Arc;

use arc_swap::ArcSwap;
use causeway_tls::{Fingerprint, TrustDomain};
use rustls::RootCertStore;
use rustls::server::danger::ClientCertVerifier;
use rustls_pki_types::{CertificateDer, TrustAnchor};

use super::issuers::Issuers;
use super::roots::{TrustError, build_verifier, root_store};
use crate::ca::Ca;

/// Client certificates that a listener accepts.
#[derive(Debug, Clone, Default)]
pub struct ListenerClientTrust {
    /// Whether certificates that our own CA issued to clients are accepted.
    pub accepts_own: bool,
    /// Further roots, from the listener's configuration.
    pub client_roots: Vec<CertificateDer<'static>>,
}

/// Signers that an acceptor or a dialler trusts: our own issuers, foreign roots, or both.
#[derive(Debug, Clone)]
pub struct TrustStore {
    pub(super) domain: TrustDomain,
    /// Our roots, if only these are known. A chain is then verified up to one of them.
    pub(super) roots: Arc<RootCertStore>,
    /// Our own issuers, if they are known.
    pub(super) issuers: Option<Arc<Issuers>>,
    pub(super) foreign_verifier: Option<Arc<dyn ClientCertVerifier>>,
    /// Fingerprint of each of `roots` by name and key, if an external CA provides them. Intermediates then state no purposes.
    pub(super) external_roots: Option<Arc<[Fingerprint]>>,
    /// Revoked certificates of gateways.
    pub(super) revoked_gateways: RevokedSerials,
}

/// Serial numbers of revoked certificates, in hexadecimal. Cheap to clone; all clones share the list.
#[derive(Debug, Clone, Default)]
pub struct RevokedSerials(Arc<ArcSwap<BTreeSet<String>>>);

impl RevokedSerials {
    /// Replaces the list.
    pub fn replace(&self, serials: BTreeSet<String>) {
        self.0.store(Arc::new(serials));
    }

    /// Whether the certificate with this serial number is revoked.
    pub fn contains(&self, serial: &str) -> bool {
        self.0.load().contains(serial)
    }
}

impl From<BTreeSet<String>> for RevokedSerials {
    fn from(serials: BTreeSet<String>) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(serials)))
    }
}

impl TrustStore {
    /// Returns a store that trusts only certificates of this CA: for tunnels and joining, at a gateway.
    pub fn from_ca(ca: &Ca) -> Result<Self, TrustError> {
        Ok(Self {
            domain: ca.trust_domain().clone(),
            roots: root_store(ca.roots().into_iter().map(|(_, root)| root))?,
            issuers: Some(Arc::new(Issuers::from_ca(ca)?)),
            foreign_verifier: None,
            external_roots: None,
            revoked_gateways: RevokedSerials::default(),
        })
    }

    /// Returns a store that trusts only certificates below these roots, with which edges verify gateways.
    pub fn from_roots<'a>(
        roots: impl IntoIterator<Item = &'a CertificateDer<'static>>,
        domain: &TrustDomain,
    ) -> Result<Self, TrustError> {
        Ok(Self {
            domain: domain.clone(),
            roots: root_store(roots)?,
            issuers: None,
            foreign_verifier: None,
            external_roots: None,
            revoked_gateways: RevokedSerials::default(),
        })
    }

    /// Returns a store for edges or gateways with certificates of an external CA. It trusts every certificate below these roots
    /// that has an identity of this trust domain.
    pub fn external(
        roots: &[CertificateDer<'static>],
        domain: &TrustDomain,
    ) -> Result<Self, TrustError> {
        let trust = Self::from_roots(roots, domain)?;
        Ok(Self {
            external_roots: Some(trust.roots.roots.iter().map(root_key).collect()),
            ..trust
        })
    }

    /// Returns the store, which now refuses these certificates of gateways.
    #[must_use]
    pub fn with_revoked_gateways(self, revoked_gateways: RevokedSerials) -> Self {
        Self {
            revoked_gateways,
            ..self
        }
    }

    /// Whether an external CA issues the trusted certificates.
    pub fn is_external(&self) -> bool {
        self.external_roots.is_some()
    }

    /// Returns the store for a listener's configuration. Our own roots among the configured foreign roots count as our own.
    pub fn listener(ca: &Ca, listener: &ListenerClientTrust) -> Result<Self, TrustError> {
        let own_roots = ca.roots();
        let is_ours = |other: &&CertificateDer<'_>| own_roots.iter().any(|(_, root)| root == other);
        let (own_listed, foreign): (Vec<_>, Vec<_>) =
            listener.client_roots.iter().partition(is_ours);
        let mut trust = Self::from_ca(ca)?;
        if !listener.accepts_own && own_listed.is_empty() {
            (trust.roots, trust.issuers) = (root_store([])?, None);
        }
        if !foreign.is_empty() {
            trust.foreign_verifier = Some(build_verifier(&root_store(foreign)?)?);
        }
        Ok(trust)
    }

    /// Whether this is a trusted root: one of ours, or one of an external CA.
    pub fn is_trusted_root(&self, root: Fingerprint) -> bool {
        let issuers = self.issuers.as_deref();
        let external_roots = self.external_roots.as_deref();
        issuers.is_some_and(|issuers| issuers.contains_root(root))
            || external_roots.is_some_and(|given| given.contains(&root))
    }

    /// Returns the verifier of client certificates that are not ours.
    pub(super) fn foreign_client_verifier(
        &self,
    ) -> Result<Option<Arc<dyn ClientCertVerifier>>, TrustError> {
        let external_verifier = self
            .external_roots
            .as_ref()
            .map(|_| build_verifier(&self.roots));
        Ok(external_verifier
            .transpose()?
            .or_else(|| self.foreign_verifier.clone()))
    }

    /// Whether a URI is in our own trust domain, for which another root cannot certify names.
    pub fn is_own_uri(&self, uri: &str) -> bool {
        let Some((scheme, rest)) = uri.split_once("://") else {
            return false;
        };
        let domain = rest.split('/').next().unwrap_or_default();
        scheme.eq_ignore_ascii_case("spiffe") && domain.eq_ignore_ascii_case(self.domain.as_str())
    }

    /// Returns the URI that identifies a client with this name in a certificate of our own root.
    pub fn client_uri(&self, name: &str) -> String {
        crate::identity::client_uri(&self.domain, name)
    }
}

/// Returns the fingerprint of an external CA's root, by its name and key. A root that is renewed with the same key has the same
/// fingerprint.
pub(super) fn root_key(root: &TrustAnchor<'_>) -> Fingerprint {
    Fingerprint::digest(&[&*root.subject, &*root.subject_public_key_info].concat())
}
