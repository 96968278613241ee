//! What a CA's certificate says of what it may sign, and of who has signed it.
//!
//! For certificates that others have made: of ours we know it. Names are kept as their bytes, since only the same bytes
//! are the same name to everybody.

use rustls_pki_types::CertificateDer;
use x509_parser::prelude::ParsedExtension;
use x509_parser::x509::X509Name;

use super::{CertificateError, malformed, parse, text};

/// Of what a certificate is an authority.
#[derive(Debug)]
pub(crate) struct CaConstraints {
    pub(crate) subject: DistinguishedName,
    pub(crate) issuer: DistinguishedName,
    /// The identifier of its key.
    pub(crate) key_id: Option<Vec<u8>>,
    /// Whether it may sign certificates. Where no key usage is said, none is denied.
    pub(crate) signs: bool,
    /// How many authorities may come between it and a leaf.
    pub(crate) depth: Option<u32>,
    /// Whether what hangs below it may be a server.
    pub(crate) servers: bool,
    /// Whether it says which names may stand below it.
    pub(crate) limits_names: bool,
}

/// A distinguished name.
#[derive(Debug)]
pub(crate) struct DistinguishedName {
    pub(crate) der: Vec<u8>,
    /// Its common name, or all of it where it has none.
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
        let mut extensions = parsed.extensions().iter();
        let key_id = extensions.find_map(|extension| match extension.parsed_extension() {
            ParsedExtension::SubjectKeyIdentifier(id) => Some(id.0.to_vec()),
            _ => None,
        });
        Ok(Self {
            subject: DistinguishedName::of(parsed.subject()),
            issuer: DistinguishedName::of(parsed.issuer()),
            key_id,
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
