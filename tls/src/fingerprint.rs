//! Fingerprints: the SHA-256 of a certificate, of a public key or of a secret.
//!
//! The hash of a secret is compared through `subtle`, so the time of the comparison reveals nothing.

use std::fmt;
use std::str::FromStr;

use data_encoding::{HEXLOWER, HEXLOWER_PERMISSIVE};
use rustls_pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use thiserror::Error;

/// A SHA-256: of a root certificate (its fingerprint), of a public key, or of a secret (its stored form).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub struct Fingerprint([u8; 32]);

/// A text is not 64 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("a SHA-256 is 64 hexadecimal digits")]
pub struct FingerprintError;

impl Fingerprint {
    /// Returns the fingerprint of a certificate: SHA-256 of its DER.
    pub fn of_certificate(certificate: &CertificateDer<'_>) -> Self {
        Self::digest(certificate)
    }

    /// Returns the fingerprint of a certificate's public key: SHA-256 of its `SubjectPublicKeyInfo` in DER. A certificate that is
    /// renewed with the same key has the same fingerprint. Returns `None` if the input is not a certificate.
    pub fn of_key(certificate: &CertificateDer<'_>) -> Option<Self> {
        let parsed = rustls::server::ParsedCertificate::try_from(certificate).ok()?;
        Some(Self::digest(&parsed.subject_public_key_info()))
    }

    /// Returns the SHA-256 of these bytes.
    pub fn digest(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Returns the fingerprint with these bytes.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Returns the 32 bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Compares in constant time, for hashes of secrets.
    pub fn matches(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&HEXLOWER.encode(&self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

impl FromStr for Fingerprint {
    type Err = FingerprintError;

    fn from_str(text: &str) -> Result<Self, FingerprintError> {
        let bytes = HEXLOWER_PERMISSIVE.decode(text.as_bytes()).ok();
        let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or(FingerprintError)
    }
}

impl TryFrom<String> for Fingerprint {
    type Error = FingerprintError;
    fn try_from(text: String) -> Result<Self, FingerprintError> {
        text.parse()
    }
}

impl From<Fingerprint> for String {
    fn from(fingerprint: Fingerprint) -> Self {
        fingerprint.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::PublicKeyData;

    #[test]
    fn a_printed_fingerprint_parses_back() {
        let one = Fingerprint::digest(b"x");
        assert_eq!(one.to_string().parse(), Ok(one));
        assert_eq!(one.to_string().to_uppercase().parse(), Ok(one));
        for bad in ["", "ab", &"g".repeat(64), &"é".repeat(32), &"a".repeat(65)] {
            assert_eq!(bad.parse::<Fingerprint>(), Err(FingerprintError), "{bad}");
        }
    }

    #[test]
    fn certificates_of_one_key_share_its_fingerprint() {
        let key = rcgen::KeyPair::generate().unwrap();
        let made = |name: &str| {
            let params = rcgen::CertificateParams::new([name.to_owned()]).unwrap();
            params.self_signed(&key).unwrap().der().clone()
        };
        let expected = Fingerprint::digest(&key.subject_public_key_info());
        for name in ["a", "b"] {
            assert_eq!(Fingerprint::of_key(&made(name)), Some(expected));
        }
        assert_ne!(
            Fingerprint::of_certificate(&made("a")),
            Fingerprint::of_certificate(&made("b"))
        );
        assert_eq!(Fingerprint::of_key(&CertificateDer::from(&b"x"[..])), None);
    }

    #[test]
    fn hashes_of_secrets_match_only_themselves() {
        let one = Fingerprint::digest(b"x");
        assert!(one.matches(&Fingerprint::digest(b"x")));
        assert!(!one.matches(&Fingerprint::digest(b"y")));
    }
}
