//! Verification of peers: rustls' configurations and the check after every handshake.
//!
//! Owns the crypto provider, every `ServerConfig` and `ClientConfig` that carries identity, and `check_peer`. A tunnel's TLS
//! session resumes at every gateway that shares its secret, a listener's at that listener alone, and none resumes where
//! certificates are issued. A session that was made without a client certificate can never resume where one is required. The one
//! rule: a handshake, resumed or not, proves nothing until `check_peer` has returned the identity of the peer. The identity comes
//! by one of our own issuers or by a foreign root, and the two are never confused.

mod client;
mod insecure;
mod issuers;
mod peer;
mod plain_server;
mod pool_member;
mod server;
mod session_tickets;
mod yurthub;

use std::net::IpAddr;
use std::sync::{Arc, LazyLock};

use rustls::RootCertStore;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls_pki_types::{CertificateDer, TrustAnchor};
use thiserror::Error;

pub use client::{
    NotAGateway, UnexpectedCa, control_client, csr_exchange_client, join_client, pinned_root,
    tunnel_client,
};
pub use insecure::NoServerVerification;
pub use peer::{
    IsRevokedFn, PeerRejected, Purpose, VerifiedPeer, check_peer, none_revoked, verify_peer,
};
pub use plain_server::ServerOnlyTls;
pub use pool_member::{IsMemberFn, PoolMemberRejected, PoolMemberTls};
pub use server::{join_server, listener_server, tunnel_server};
pub use session_tickets::TicketSecret;
pub use yurthub::YurtHubServerTls;

use crate::ca::Ca;
use crate::name::TrustDomain;
use crate::secret::Fingerprint;
use issuers::Issuers;

/// ALPN of the tunnel (draft-thomson-ptth-potato).
const ALPN_TUNNEL: &[u8] = b"rh2";
/// ALPN of joining and of the edge's other requests.
const ALPN_CONTROL: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// Error of building a configuration.
#[derive(Debug, Error)]
pub enum TrustError {
    /// A root certificate is unusable.
    #[error("unusable root certificate: {0}")]
    Root(String),
    /// The certificate is not valid for the address at which it is to be shown.
    #[error("the certificate is not for {0}: {1}")]
    Name(IpAddr, String),
    /// Certificates are required, but no root is trusted to issue one.
    #[error("a client certificate is required but no CA is trusted to issue one")]
    NobodyTrusted,
    /// rustls refused.
    #[error(transparent)]
    Tls(#[from] rustls::Error),
}

/// aws-lc-rs with AES-GCM first: with AES in the processor it is the fastest by far.
pub fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
        use aws_lc_rs::cipher_suite as suite;
        let cipher_suites = vec![
            suite::TLS13_AES_128_GCM_SHA256,
            suite::TLS13_AES_256_GCM_SHA384,
            suite::TLS13_CHACHA20_POLY1305_SHA256,
            suite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
            suite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
            suite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
            suite::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
            suite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
            suite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
        ];
        Arc::new(CryptoProvider {
            cipher_suites,
            ..aws_lc_rs::default_provider()
        })
    });
    Arc::clone(&PROVIDER)
}

/// Makes `provider` the process's default, for libraries that ask for one. Later calls change
/// nothing, so that each test may call it.
pub fn install_provider() {
    // Fails only where a default is installed already.
    let _ = CryptoProvider::clone(&provider()).install_default();
}

/// Client certificates that a listener accepts.
#[derive(Debug, Clone, Default)]
pub struct ListenerClientTrust {
    /// Whether certificates that our own CA issued to clients are accepted.
    pub own: bool,
    /// Further roots, from the listener's configuration.
    pub client_roots: Vec<CertificateDer<'static>>,
    /// Whether the handshake fails without a certificate.
    pub require: bool,
}

/// Signers that an acceptor or a dialler trusts: our own issuers, foreign roots, or both.
#[derive(Debug, Clone)]
pub struct TrustStore {
    domain: TrustDomain,
    /// Our roots, where only these are known: then a chain leads there.
    roots: Arc<RootCertStore>,
    /// Our own issuers, if they are known.
    issuers: Option<Arc<Issuers>>,
    foreign: Option<Arc<dyn ClientCertVerifier>>,
    /// Fingerprint of each of `roots` by name and key, if they are an external CA's. Then intermediates state no purposes.
    given: Option<Arc<[Fingerprint]>>,
}

impl TrustStore {
    /// Returns a store that trusts only certificates of this CA: for tunnels and joining, at a gateway.
    pub fn of(ca: &Ca) -> Result<Self, TrustError> {
        Ok(Self {
            domain: ca.trust_domain().clone(),
            roots: store(ca.roots().into_iter().map(|(_, root)| root))?,
            issuers: Some(Arc::new(Issuers::of(ca)?)),
            foreign: None,
            given: None,
        })
    }

    /// Returns a store that trusts only certificates below these roots: for gateways, as edges see them.
    pub fn below<'a>(
        roots: impl IntoIterator<Item = &'a CertificateDer<'static>>,
        domain: &TrustDomain,
    ) -> Result<Self, TrustError> {
        Ok(Self {
            domain: domain.clone(),
            roots: store(roots)?,
            issuers: None,
            foreign: None,
            given: None,
        })
    }

    /// Returns a store for edges or gateways with certificates of an external CA. It trusts every certificate below these roots
    /// that has an identity of this trust domain.
    pub fn given(
        roots: &[CertificateDer<'static>],
        domain: &TrustDomain,
    ) -> Result<Self, TrustError> {
        let trust = Self::below(roots, domain)?;
        Ok(Self {
            given: Some(trust.roots.roots.iter().map(root_key).collect()),
            ..trust
        })
    }

    /// Whether an external CA makes the trusted certificates.
    pub fn is_given(&self) -> bool {
        self.given.is_some()
    }

    /// Returns the store for a listener's configuration. Our roots among its foreign ones count as our own.
    pub fn listener(ca: &Ca, listener: &ListenerClientTrust) -> Result<Self, TrustError> {
        let ours = ca.roots();
        let is_ours = |other: &&CertificateDer<'_>| ours.iter().any(|(_, root)| root == other);
        let (named, foreign): (Vec<_>, Vec<_>) = listener.client_roots.iter().partition(is_ours);
        let mut trust = Self::of(ca)?;
        if !listener.own && named.is_empty() {
            (trust.roots, trust.issuers) = (store([])?, None);
        }
        if !foreign.is_empty() {
            trust.foreign = Some(verifier(&store(foreign)?)?);
        }
        Ok(trust)
    }

    /// Whether this is a trusted root: one of ours, or one of an external CA.
    pub fn knows(&self, root: Fingerprint) -> bool {
        let issuers = self.issuers.as_deref();
        let given = self.given.as_deref();
        issuers.is_some_and(|issuers| issuers.know(root))
            || given.is_some_and(|given| given.contains(&root))
    }

    /// Returns the verifier of client certificates that are not ours.
    fn of_others(&self) -> Result<Option<Arc<dyn ClientCertVerifier>>, TrustError> {
        let given = self.given.as_ref().map(|_| verifier(&self.roots));
        Ok(given.transpose()?.or_else(|| self.foreign.clone()))
    }

    /// Whether a URI is of our own trust domain, in which another root has no say.
    pub fn is_own_uri(&self, uri: &str) -> bool {
        let Some((scheme, rest)) = uri.split_once("://") else {
            return false;
        };
        let domain = rest.split('/').next().unwrap_or_default();
        scheme.eq_ignore_ascii_case("spiffe") && domain.eq_ignore_ascii_case(self.domain.as_str())
    }

    /// Returns the URI that identifies a client to which our own root gave this name.
    pub fn client_uri(&self, name: &str) -> String {
        crate::identity::client_uri(&self.domain, name)
    }
}

/// Returns the fingerprint of an external CA's root, by its name and key. A root that is renewed with the same key has the same
/// fingerprint.
fn root_key(root: &TrustAnchor<'_>) -> Fingerprint {
    Fingerprint::digest(&[&*root.subject, &*root.subject_public_key_info].concat())
}

fn store<'a>(
    roots: impl IntoIterator<Item = &'a CertificateDer<'static>>,
) -> Result<Arc<RootCertStore>, TrustError> {
    let mut store = RootCertStore::empty();
    for root in roots {
        store
            .add(root.clone())
            .map_err(|error| TrustError::Root(error.to_string()))?;
    }
    Ok(Arc::new(store))
}

/// rustls' verifier of client certificates below `roots`.
fn verifier(roots: &Arc<RootCertStore>) -> Result<Arc<dyn ClientCertVerifier>, TrustError> {
    WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), provider())
        .build()
        .map_err(|error| TrustError::Root(error.to_string()))
}

/// Returns the verifier of client certificates below these roots.
pub(crate) fn client_verifier(
    roots: &[CertificateDer<'static>],
) -> Result<Arc<dyn ClientCertVerifier>, TrustError> {
    if roots.is_empty() {
        return Err(TrustError::NobodyTrusted);
    }
    verifier(&store(roots)?)
}

#[cfg(test)]
mod tests;
