//! Errors of the CA.

use causeway_tls::NameError;
use thiserror::Error;

use crate::certificate::CertificateError;
use crate::leaf::LeafCertificateError;

/// Error of creating or loading a root, or of signing a certificate.
#[derive(Debug, Error)]
pub enum CaError {
    /// The stored CA is unusable.
    #[error("the CA's {part} is unusable: {why}")]
    Unusable {
        /// `certificate`, `key` or `file`.
        part: &'static str,
        /// Description of the fault.
        why: String,
    },
    /// The root has expired; no certificate that it signs would be accepted.
    #[error("the CA certificate has expired; create a new CA and enrol the edges again")]
    Expired,
    /// Another step of the rotation must come first.
    #[error("{0}")]
    Order(&'static str),
    /// A name does not fit into a certificate.
    #[error(transparent)]
    Name(#[from] NameError),
    /// Our own new certificate cannot be parsed.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// Our own new certificate and key do not match.
    #[error(transparent)]
    Leaf(#[from] LeafCertificateError),
    /// rcgen refused.
    #[error("cannot sign: {0}")]
    Sign(#[from] rcgen::Error),
}
