//! Properties of a certificate, read once from its DER.
//!
//! Owns the only use of the X.509 parser for certificates. The input is untrusted, so nothing here panics. A certificate that
//! parses proves nothing until `verify` has checked its signer.

use std::time::Duration;

use causeway_tls::NameError;
use rustls_pki_types::{CertificateDer, UnixTime};
use thiserror::Error;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};
use x509_parser::x509::X509Name;

/// Time by which our certificates are valid before their issue, for clocks that are behind.
pub(crate) const CLOCK_SKEW: Duration = Duration::from_hours(1);

/// The bytes are not a certificate, or one of its fields is malformed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("not a readable certificate: {0}")]
pub struct CertificateError(String);

impl From<CertificateError> for NameError {
    fn from(error: CertificateError) -> Self {
        Self::Certificate(error.to_string())
    }
}

/// The properties of one certificate.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "each is a fact of its own in the certificate"
)]
pub struct Certificate {
    /// Bytes of the serial number, as in the certificate.
    pub serial: Vec<u8>,
    /// First second of validity, in Unix time.
    pub not_before: u64,
    /// Last second of validity, in Unix time.
    pub not_after: u64,
    /// The subject's first common name.
    pub common_name: Option<String>,
    /// The subject's organizations, in order.
    pub organizations: Vec<String>,
    /// URI alternative names, in order.
    pub uris: Vec<String>,
    /// Whether the extended key usage names clientAuth.
    pub client_auth: bool,
    /// Whether the extended key usage names serverAuth.
    pub server_auth: bool,
    /// Whether the certificate is for any use: it has no extended key usage, or one that names anyExtendedKeyUsage (RFC 5280
    /// section 4.2.1.12).
    pub is_any_purpose: bool,
    /// Whether the certificate may sign certificates: basicConstraints CA and keyCertSign.
    pub is_ca: bool,
    /// The DER of the subject's public key with its algorithm.
    pub public_key: Vec<u8>,
}

impl Certificate {
    /// Parses a certificate. Trailing bytes are refused.
    pub fn parse(der: &CertificateDer<'_>) -> Result<Self, CertificateError> {
        let parsed = parse_x509(der)?;
        let usage = parsed.extended_key_usage().map_err(malformed)?;
        let constraints = parsed.basic_constraints().map_err(malformed)?;
        let key_usage = parsed.key_usage().map_err(malformed)?;
        let subject = parsed.subject();
        Ok(Self {
            serial: parsed.raw_serial().to_vec(),
            not_before: unix_seconds(parsed.validity().not_before.timestamp()),
            not_after: unix_seconds(parsed.validity().not_after.timestamp()),
            common_name: subject
                .iter_common_name()
                .find_map(|name| owned_text(name.as_str())),
            organizations: subject
                .iter_organization()
                .filter_map(|name| owned_text(name.as_str()))
                .collect(),
            uris: uris(&parsed)?,
            client_auth: usage.as_ref().is_some_and(|usage| usage.value.client_auth),
            server_auth: usage.as_ref().is_some_and(|usage| usage.value.server_auth),
            is_any_purpose: usage.as_ref().is_none_or(|usage| usage.value.any),
            is_ca: constraints.is_some_and(|constraints| constraints.value.ca)
                && key_usage.is_some_and(|usage| usage.value.key_cert_sign()),
            public_key: parsed.public_key().raw.to_vec(),
        })
    }

    /// Whether `now` is within the validity.
    pub fn is_valid_at(&self, now: UnixTime) -> bool {
        (self.not_before..=self.not_after).contains(&now.as_secs())
    }

    /// Returns the time when our own CA issued the certificate, in Unix seconds.
    pub fn issued_at(&self) -> u64 {
        self.not_before.saturating_add(CLOCK_SKEW.as_secs())
    }

    /// Returns the serial number in hexadecimal.
    pub fn serial_hex(&self) -> String {
        crate::secret::hex(&self.serial)
    }
}

/// Constraints of a CA certificate that another CA has issued; the constraints of our own are known. Names are stored as
/// bytes, since only equal bytes are an equal name to every verifier.
#[derive(Debug)]
pub(crate) struct CaConstraints {
    pub(crate) subject: DistinguishedName,
    pub(crate) issuer: DistinguishedName,
    /// Whether the CA may sign certificates. Without a key usage extension everything is permitted.
    pub(crate) can_sign: bool,
    /// Maximum number of CAs between this one and a leaf.
    pub(crate) path_length: Option<u32>,
    /// Whether certificates below the CA may be server certificates.
    pub(crate) allows_server_auth: bool,
    /// Whether the CA constrains the names below it.
    pub(crate) has_name_constraints: bool,
}

/// A distinguished name.
#[derive(Debug)]
pub(crate) struct DistinguishedName {
    pub(crate) der: Vec<u8>,
    /// Common name of the CA, or the whole name if it has none. Control characters are replaced: it is printed and logged.
    pub(crate) display_name: String,
}

impl DistinguishedName {
    fn from_x509(name: &X509Name<'_>) -> Self {
        let display_name = name.iter_common_name().next();
        let display_name = display_name.and_then(|common| owned_text(common.as_str()));
        Self {
            der: name.as_raw().to_vec(),
            display_name: display_name
                .unwrap_or_else(|| name.to_string())
                .replace(is_unprintable, "\u{fffd}"),
        }
    }
}

/// Whether a character controls a terminal, or the direction of the text after it.
fn is_unprintable(ch: char) -> bool {
    let is_direction_mark =
        matches!(ch, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    ch.is_control() || is_direction_mark
}

impl CaConstraints {
    /// Parses a certificate. Trailing bytes are refused.
    pub(crate) fn parse(der: &CertificateDer<'_>) -> Result<Self, CertificateError> {
        let parsed = parse_x509(der)?;
        let constraints = parsed.basic_constraints().map_err(malformed)?;
        let constraints = constraints.map(|constraints| constraints.value);
        let usage = parsed.key_usage().map_err(malformed)?;
        let purposes = parsed.extended_key_usage().map_err(malformed)?;
        let names = parsed.name_constraints().map_err(malformed)?;
        Ok(Self {
            subject: DistinguishedName::from_x509(parsed.subject()),
            issuer: DistinguishedName::from_x509(parsed.issuer()),
            can_sign: constraints.is_some_and(|constraints| constraints.ca)
                && usage.is_none_or(|usage| usage.value.key_cert_sign()),
            path_length: constraints.and_then(|constraints| constraints.path_len_constraint),
            allows_server_auth: purposes
                .is_none_or(|usage| usage.value.server_auth || usage.value.any),
            has_name_constraints: names.is_some(),
        })
    }

    /// Whether the certificate is self-signed, according to its names.
    pub(crate) fn is_root(&self) -> bool {
        self.subject.der == self.issuer.der
    }
}

fn parse_x509<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, CertificateError> {
    let (trailing, parsed) = X509Certificate::from_der(der).map_err(malformed)?;
    if !trailing.is_empty() {
        return Err(CertificateError(
            "there are extra bytes after the certificate".into(),
        ));
    }
    Ok(parsed)
}

fn uris(parsed: &X509Certificate<'_>) -> Result<Vec<String>, CertificateError> {
    let names = parsed.subject_alternative_name().map_err(malformed)?;
    let uri = |name: &GeneralName<'_>| match name {
        GeneralName::URI(uri) => Some((*uri).to_owned()),
        _ => None,
    };
    Ok(names.map_or_else(Vec::new, |names| {
        names.value.general_names.iter().filter_map(uri).collect()
    }))
}

fn malformed(error: impl std::fmt::Display) -> CertificateError {
    CertificateError(error.to_string())
}

fn owned_text<E>(value: Result<&str, E>) -> Option<String> {
    value.ok().map(str::to_owned)
}

/// Converts a timestamp to Unix seconds. Times before 1970 become 1970: a certificate that expired then has expired.
fn unix_seconds(timestamp: i64) -> u64 {
    u64::try_from(timestamp).unwrap_or(0)
}
/// Formats Unix seconds for people.
pub(crate) fn format_date(seconds: u64) -> String {
    // The format ends with the year 9999.
    let max_seconds = 253_402_300_799;
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds.min(max_seconds));
    humantime::format_rfc3339_seconds(time).to_string()
}
