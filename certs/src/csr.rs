//! Requests for certificates: made on the edge, checked on the gateway.
//!
//! The edge's key never leaves it: `EdgeKey` makes it and a request that proves its possession.
//! `CsrKey` is what the gateway takes from a request: the public key, after its signature was
//! verified. Names, usages and CA:TRUE in a request are not even read.

use rcgen::{CertificateParams, KeyPair, SubjectPublicKeyInfo};
use thiserror::Error;
use x509_parser::prelude::{FromDer, X509CertificationRequest};
use x509_parser::public_key::PublicKey;

use crate::secret::Secret;

/// Largest request that is looked at: an RSA-8192 request takes about 3 KiB.
const MAX_REQUEST: usize = 16 * 1024;
/// Shortest RSA key that is signed (NIST SP 800-57: 112 bits of security).
const MIN_RSA_BITS: usize = 2048;
/// id-Ed25519 (RFC 8410, section 3).
const ED25519: &str = "1.3.101.112";

/// Why a request was refused.
#[derive(Debug, Error)]
pub enum CsrError {
    /// Larger than any honest request.
    #[error("the certificate request has {0} bytes, more than the {MAX_REQUEST} allowed")]
    TooLarge(usize),
    /// Not a certificate request.
    #[error("not a certificate request (PKCS #10 in DER): {0}")]
    Malformed(String),
    /// The sender does not hold the key.
    #[error("the certificate request is not signed by its own key")]
    Signature,
    /// A kind of key that is not signed.
    #[error("{0} keys are not accepted: use ECDSA P-256 or P-384, Ed25519, or RSA from 2048 bits")]
    Key(String),
    /// The key could not be made or used on this machine.
    #[error("cannot make the key or its request: {0}")]
    Local(#[source] rcgen::Error),
}

/// The public key of a request whose signature was verified.
#[derive(Debug)]
pub struct CsrKey(SubjectPublicKeyInfo);

impl CsrKey {
    /// Takes the key out of a request in DER, if the sender holds it and it is strong enough.
    pub fn verify(der: &[u8]) -> Result<Self, CsrError> {
        if der.len() > MAX_REQUEST {
            return Err(CsrError::TooLarge(der.len()));
        }
        let (rest, request) = X509CertificationRequest::from_der(der)
            .map_err(|error| CsrError::Malformed(error.to_string()))?;
        if !rest.is_empty() {
            return Err(CsrError::Malformed("bytes follow the request".into()));
        }
        let key = &request.certification_request_info.subject_pki;
        check_strength(key)?;
        request
            .verify_signature()
            .map_err(|_| CsrError::Signature)?;
        SubjectPublicKeyInfo::from_der(key.raw)
            .map(Self)
            .map_err(|_| CsrError::Key(key.algorithm.algorithm.to_id_string()))
    }

    pub(crate) fn public_key(&self) -> &SubjectPublicKeyInfo {
        &self.0
    }
}

fn check_strength(key: &x509_parser::x509::SubjectPublicKeyInfo<'_>) -> Result<(), CsrError> {
    let malformed = |error: x509_parser::error::X509Error| CsrError::Malformed(error.to_string());
    match key.parsed().map_err(malformed)? {
        PublicKey::RSA(rsa) if rsa.key_size() >= MIN_RSA_BITS => Ok(()),
        PublicKey::RSA(rsa) => Err(CsrError::Key(format!("RSA-{}", rsa.key_size()))),
        PublicKey::EC(point) if matches!(point.key_size(), 256 | 384) => Ok(()),
        PublicKey::EC(point) => Err(CsrError::Key(format!("EC-{}", point.key_size()))),
        _ if key.algorithm.algorithm.to_id_string() == ED25519 => Ok(()),
        _ => Err(CsrError::Key(key.algorithm.algorithm.to_id_string())),
    }
}

/// The edge's own key, P-256. `Debug` does not show it.
pub struct EdgeKey(KeyPair);

impl std::fmt::Debug for EdgeKey {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("EdgeKey(***)")
    }
}

impl EdgeKey {
    /// Makes a new key.
    pub fn generate() -> Result<Self, CsrError> {
        KeyPair::generate().map(Self).map_err(CsrError::Local)
    }

    /// Reads a key that `key_pem` has written.
    pub fn load(pem: &str) -> Result<Self, CsrError> {
        KeyPair::from_pem(pem).map(Self).map_err(CsrError::Local)
    }

    /// A request for this key, in DER. It names nobody: the name comes from the token.
    pub fn request(&self) -> Result<Vec<u8>, CsrError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        let request = params.serialize_request(&self.0).map_err(CsrError::Local)?;
        Ok(request.der().to_vec())
    }

    /// The private key as PEM.
    pub fn key_pem(&self) -> Secret {
        Secret::new(self.0.serialize_pem())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{PKCS_ECDSA_P384_SHA384, PKCS_ED25519, PKCS_RSA_SHA256, SignatureAlgorithm};

    fn request(algorithm: &'static SignatureAlgorithm) -> Vec<u8> {
        let key = KeyPair::generate_for(algorithm).unwrap();
        CertificateParams::default()
            .serialize_request(&key)
            .unwrap()
            .der()
            .to_vec()
    }

    #[test]
    fn an_edges_request_is_accepted() {
        let key = EdgeKey::generate().unwrap();
        CsrKey::verify(&key.request().unwrap()).unwrap();
        assert_eq!(
            EdgeKey::load(key.key_pem().expose()).unwrap().key_pem(),
            key.key_pem()
        );
    }

    #[test]
    fn the_other_strong_keys_are_accepted() {
        for algorithm in [&PKCS_ECDSA_P384_SHA384, &PKCS_ED25519, &PKCS_RSA_SHA256] {
            CsrKey::verify(&request(algorithm)).unwrap();
        }
    }

    #[test]
    fn a_p521_key_is_refused_by_name() {
        let refused = CsrKey::verify(&request(&rcgen::PKCS_ECDSA_P521_SHA512)).unwrap_err();
        assert!(matches!(refused, CsrError::Key(_)), "{refused}");
    }

    #[test]
    fn a_request_with_another_key_is_refused() {
        let mut der = request(&rcgen::PKCS_ECDSA_P256_SHA256);
        let other = EdgeKey::generate().unwrap();
        let (mine, theirs) = (point(&der), other.0.public_key_raw().to_vec());
        let at = der
            .windows(mine.len())
            .position(|window| window == mine)
            .unwrap();
        der[at..at + theirs.len()].copy_from_slice(&theirs);
        assert!(matches!(CsrKey::verify(&der), Err(CsrError::Signature)));
    }

    fn point(der: &[u8]) -> Vec<u8> {
        let (_, request) = X509CertificationRequest::from_der(der).unwrap();
        request
            .certification_request_info
            .subject_pki
            .subject_public_key
            .data
            .to_vec()
    }

    #[test]
    fn what_is_no_request_is_refused() {
        assert!(matches!(CsrKey::verify(b""), Err(CsrError::Malformed(_))));
        assert!(matches!(
            CsrKey::verify(&vec![0x30; 17_000]),
            Err(CsrError::TooLarge(17_000))
        ));
        let mut long = request(&rcgen::PKCS_ECDSA_P256_SHA256);
        long.push(0);
        assert!(matches!(CsrKey::verify(&long), Err(CsrError::Malformed(_))));
        let short = &request(&rcgen::PKCS_ECDSA_P256_SHA256)[..40];
        assert!(matches!(CsrKey::verify(short), Err(CsrError::Malformed(_))));
    }
}
