//! Root certificates in the form that rustls requires.

use std::net::IpAddr;
use std::sync::Arc;

use causeway_tls::provider;
use rustls::RootCertStore;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls_pki_types::CertificateDer;
use thiserror::Error;

/// Error of building a configuration.
#[derive(Debug, Error)]
pub enum TrustError {
    /// A root certificate is unusable.
    #[error("unusable root certificate: {0}")]
    Root(String),
    /// The certificate is not valid for the address at which it would be presented.
    #[error("the certificate is not for {0}: {1}")]
    Name(IpAddr, String),
    /// Certificates are required, but no root is trusted to issue one.
    #[error("a client certificate is required, but no CA for client certificates is configured")]
    NoTrustedRoots,
    /// rustls refused.
    #[error(transparent)]
    Tls(#[from] rustls::Error),
}

pub(super) fn root_store<'a>(
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

/// Builds rustls' verifier of client certificates below `roots`.
pub(super) fn build_verifier(
    roots: &Arc<RootCertStore>,
) -> Result<Arc<dyn ClientCertVerifier>, TrustError> {
    WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), provider())
        .build()
        .map_err(|error| TrustError::Root(error.to_string()))
}

/// Returns the verifier of client certificates below these roots.
pub(crate) fn client_verifier(
    roots: &[CertificateDer<'static>],
) -> Result<Arc<dyn ClientCertVerifier>, TrustError> {
    if roots.is_empty() {
        return Err(TrustError::NoTrustedRoots);
    }
    build_verifier(&root_store(roots)?)
}
