//! Certificates of edges and gateways that an external CA issues and renews: cert-manager, Vault, a company's PKI.
//!
//! They carry the same identities as our own certificates, each as the certificate's only SPIFFE URI: `spiffe://<trust
//! domain>/gateway` with serverAuth, and `spiffe://<trust domain>/edge/<node>` with clientAuth. The signer differs: every
//! certificate below one of the configured roots is accepted, through any intermediates, and these intermediates state no
//! purposes.

use causeway_tls::{NameError, NodeName, TrustDomain, pem};
use rustls_pki_types::CertificateDer;
use thiserror::Error;

use crate::certificate::{CaConstraints, Certificate, CertificateError};
use crate::identity::{self, Identity};
use crate::leaf::{LeafCertificate, LeafCertificateError};

/// Maximum number of roots in one file: a company has a few, the whole web 150.
const MAX_ROOTS: usize = 64;

/// Error that makes files of an external CA unusable as an identity.
#[derive(Debug, Error)]
pub enum ExternalIdentityError {
    /// Chain and key do not match.
    #[error(transparent)]
    Leaf(#[from] LeafCertificateError),
    /// The certificate carries no identity, or a malformed one.
    #[error("{0}; the certificate must contain exactly one URI {1}")]
    Name(NameError, &'static str),
    /// The certificate carries an identity, but not the required one.
    #[error("the certificate is for {found}; it must contain exactly one URI {wanted}")]
    Kind {
        /// Identity in the certificate.
        found: String,
        /// Required URI.
        wanted: &'static str,
    },
    /// The extended key usage is missing.
    #[error("the extended key usage of the certificate does not contain {0}")]
    Usage(&'static str),
    /// The roots cannot be parsed.
    #[error("unreadable CA certificates: {0}")]
    Roots(String),
}

impl From<CertificateError> for ExternalIdentityError {
    fn from(error: CertificateError) -> Self {
        Self::Leaf(error.into())
    }
}

const GATEWAY_URI: &str = "spiffe://TRUST-DOMAIN/gateway";
const EDGE_URI: &str = "spiffe://TRUST-DOMAIN/edge/NODE";

/// Returns the certificate of a gateway's tunnel port, and the trust domain that it names. Its dates are not checked.
pub fn load_gateway(
    chain_pem: &str,
    key_pem: &str,
) -> Result<(LeafCertificate, TrustDomain), ExternalIdentityError> {
    let leaf = LeafCertificate::load(chain_pem, key_pem)?;
    let parsed = parse_leaf(&leaf)?;
    match identity_of(&parsed, GATEWAY_URI)? {
        (Identity::Gateway, domain) if parsed.server_auth => Ok((leaf, domain)),
        (Identity::Gateway, _) => Err(ExternalIdentityError::Usage("serverAuth")),
        (other, _) => Err(kind_error(&other, GATEWAY_URI)),
    }
}

/// Returns the certificate of an edge, its node, and the trust domain that it names. Its dates are not checked: the clock may be
/// wrong.
pub(crate) fn load_edge(
    chain_pem: &str,
    key_pem: &str,
) -> Result<(LeafCertificate, NodeName, TrustDomain), ExternalIdentityError> {
    let leaf = LeafCertificate::load(chain_pem, key_pem)?;
    let parsed = parse_leaf(&leaf)?;
    match identity_of(&parsed, EDGE_URI)? {
        (Identity::Edge(node), domain) if parsed.client_auth => Ok((leaf, node, domain)),
        (Identity::Edge(_), _) => Err(ExternalIdentityError::Usage("clientAuth")),
        (other, _) => Err(kind_error(&other, EDGE_URI)),
    }
}

/// Returns the roots, or the intermediates that serve as roots, of a PEM text: at least one, each of which may sign.
pub fn parse_roots(text: &str) -> Result<Vec<CertificateDer<'static>>, ExternalIdentityError> {
    let roots = pem::parse_certificates(text).map_err(ExternalIdentityError::Roots)?;
    if roots.len() > MAX_ROOTS {
        let why = format!("there are more than {MAX_ROOTS} certificates");
        return Err(ExternalIdentityError::Roots(why));
    }
    for root in &roots {
        let constraints = CaConstraints::parse(root)?;
        if !constraints.can_sign {
            let name = constraints.subject.display_name;
            let why = format!("{name:?} is not a CA certificate: it may not sign certificates");
            return Err(ExternalIdentityError::Roots(why));
        }
    }
    Ok(roots)
}

fn parse_leaf(leaf: &LeafCertificate) -> Result<Certificate, CertificateError> {
    // A leaf has at least one certificate.
    leaf.chain()
        .first()
        .map_or_else(|| Ok(Certificate::default()), Certificate::parse)
}

/// Returns the identity in the certificate, in the trust domain that the certificate itself states.
fn identity_of(
    parsed: &Certificate,
    wanted: &'static str,
) -> Result<(Identity, TrustDomain), ExternalIdentityError> {
    let parse_identity = || {
        let domain = identity::trust_domain_of(parsed)?;
        Ok((Identity::from_own(parsed, &domain)?, domain))
    };
    parse_identity().map_err(|error| ExternalIdentityError::Name(error, wanted))
}

fn kind_error(found: &Identity, wanted: &'static str) -> ExternalIdentityError {
    let found = found.to_string();
    ExternalIdentityError::Kind { found, wanted }
}

#[cfg(test)]
mod tests;
