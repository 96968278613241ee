//! Constraints of a CA certificate: what the CA may sign, and which CA has signed it.
//!
//! Used for certificates that other CAs have made; the constraints of our own are known. Names are stored as their bytes, since
//! only equal bytes are an equal name to every verifier.

use rustls_pki_types::CertificateDer;
use x509_parser::x509::X509Name;

use super::{CertificateError, malformed, parse, text};

/// Constraints of a CA certificate.
#[derive(Debug)]
pub(crate) struct CaConstraints {
    pub(crate) subject: DistinguishedName,
    pub(crate) issuer: DistinguishedName,
    /// Whether it may sign certificates. Where no key usage is said, none is denied.
    pub(crate) signs: bool,
    /// Number of CAs that may come between this one and a leaf.
    pub(crate) depth: Option<u32>,
    /// Whether certificates below the CA may be a server's.
    pub(crate) servers: bool,
    /// Whether the CA constrains the names below it.
    pub(crate) limits_names: bool,
}

/// A distinguished name.
#[derive(Debug)]
pub(crate) struct DistinguishedName {
    pub(crate) der: Vec<u8>,
    /// Common name of the CA, or the whole name if it has none.
    pub(crate) common: String,
}

impl DistinguishedName {
    fn of(name: &X509Name<'_>) -> Self {
        let common = name.iter_common_name().next();
        let common = common.and_then(|common| text(common.as_str()));
        Self {
            der: name.as_raw().to_vec(),
            common: common.unwrap_or_else(|| name.to_string()),
        }
    }
}

impl CaConstraints {
    /// Reads a certificate; trailing bytes are refused.
    pub(crate) fn read(der: &CertificateDer<'_>) -> Result<Self, CertificateError> {
        let parsed = parse(der)?;
        let constraints = parsed.basic_constraints().map_err(malformed)?;
        let constraints = constraints.map(|constraints| constraints.value);
        let usage = parsed.key_usage().map_err(malformed)?;
        let purposes = parsed.extended_key_usage().map_err(malformed)?;
        let names = parsed.name_constraints().map_err(malformed)?;
        Ok(Self {
            subject: DistinguishedName::of(parsed.subject()),
            issuer: DistinguishedName::of(parsed.issuer()),
            signs: constraints.is_some_and(|constraints| constraints.ca)
                && usage.is_none_or(|usage| usage.value.key_cert_sign()),
            depth: constraints.and_then(|constraints| constraints.path_len_constraint),
            servers: purposes.is_none_or(|usage| usage.value.server_auth || usage.value.any),
            limits_names: names.is_some(),
        })
    }

    /// Whether it has signed itself, as far as its names say.
    pub(crate) fn is_root(&self) -> bool {
        self.subject.der == self.issuer.der
    }
}
