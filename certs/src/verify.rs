//! Who is let in: rustls' configurations and the check after every handshake.
//!
//! Owns the crypto provider, every `ServerConfig` and `ClientConfig` that carries identity, and
//! `check_peer`. A tunnel's session resumes wherever its secret is shared, a front's at that front
//! alone, and none where certificates are issued: what was made without a client certificate can never
//! resume where one is required.
//! The one rule: a handshake, resumed or not, proves nothing until `check_peer` has said who the
//! peer is, by the signature of one that signs in our name or by a foreign root's, which are never confused.

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
pub use server::{front_server, join_server, tunnel_server};
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

/// Why a configuration could not be built.
#[derive(Debug, Error)]
pub enum TrustError {
    /// A root certificate is unusable.
    #[error("unusable root certificate: {0}")]
    Root(String),
    /// A certificate is not for the address at which it is to be shown.
    #[error("the certificate is not for {0}: {1}")]
    Name(IpAddr, String),
    /// Certificates are required, but nobody is trusted to issue one.
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

/// Whose client certificates a front accepts.
#[derive(Debug, Clone, Default)]
pub struct ListenerClientTrust {
    /// Callers whose certificates our own CA issued.
    pub own: bool,
    /// Further roots, from the front's configuration.
    pub client_roots: Vec<CertificateDer<'static>>,
    /// Whether the handshake fails without a certificate.
    pub require: bool,
}

/// Whom an acceptor or a dialler believes: those who sign in our name, foreign roots, or both.
#[derive(Debug, Clone)]
pub struct TrustStore {
    domain: TrustDomain,
    /// Our roots, where only these are known: then a chain leads there.
    roots: Arc<RootCertStore>,
    /// Who signs in our name, where that is known.
    issuers: Option<Arc<Issuers>>,
    foreign: Option<Arc<dyn ClientCertVerifier>>,
    /// By what each of `roots` is known, where these are another system's: then intermediates say nothing of purposes.
    given: Option<Arc<[Fingerprint]>>,
}

impl TrustStore {
    /// What a CA signs, and nobody else: tunnels and joining, at a gateway.
    pub fn of(ca: &Ca) -> Result<Self, TrustError> {
        Ok(Self {
            domain: ca.trust_domain().clone(),
            roots: store(ca.roots().into_iter().map(|(_, root)| root))?,
            issuers: Some(Arc::new(Issuers::of(ca)?)),
            foreign: None,
            given: None,
        })
    }

    /// What hangs below these roots, and nothing else: gateways, as edges see them.
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

    /// Edges, or gateways, by certificates that another system makes: whatever hangs below these roots and is one of this
    /// trust domain.
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

    /// Whether another system makes what is believed here.
    pub fn is_given(&self) -> bool {
        self.given.is_some()
    }

    /// Whom a front's configuration names. Our roots among its foreign ones count as our own.
    pub fn front(ca: &Ca, front: &ListenerClientTrust) -> Result<Self, TrustError> {
        let ours = ca.roots();
        let is_ours = |other: &&CertificateDer<'_>| ours.iter().any(|(_, root)| root == other);
        let (named, foreign): (Vec<_>, Vec<_>) = front.client_roots.iter().partition(is_ours);
        let mut trust = Self::of(ca)?;
        if !front.own && named.is_empty() {
            (trust.roots, trust.issuers) = (store([])?, None);
        }
        if !foreign.is_empty() {
            trust.foreign = Some(verifier(&store(foreign)?)?);
        }
        Ok(trust)
    }

    /// Whether this is a root of ours, or one that was given, whose certificates are believed.
    pub fn knows(&self, root: Fingerprint) -> bool {
        let issuers = self.issuers.as_deref();
        let given = self.given.as_deref();
        issuers.is_some_and(|issuers| issuers.know(root))
            || given.is_some_and(|given| given.contains(&root))
    }

    /// What verifies clients' certificates that are not ours.
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

    /// The URI by which a caller is known whom our own root names so.
    pub fn caller_uri(&self, name: &str) -> String {
        crate::identity::caller_uri(&self.domain, name)
    }
}

/// A root that another system brings is known by its name and key: renewed with the same key it is the same.
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

/// The same below these.
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
