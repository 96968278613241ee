//! Signatures of delegated heartbeats: a node that has lost its gateways signs that its kubelet is alive, and another node
//! carries the statement to a gateway.
//!
//! The signed bytes begin with a fixed context, so that the signature is valid for nothing else. The bytes that TLS 1.3 signs
//! begin with spaces, those of TLS 1.2 with a handshake type. A certificate request is DER. The length of each field precedes it.
//! A nonce of the gateway makes each statement fresh; no clock is compared.

use crate::leaf::LeafCertificate;
use causeway_tls::{NodeName, provider};
use rustls::SignatureScheme;
use rustls_pki_types::CertificateDer;
use webpki::EndEntityCert;

/// First bytes of the signed bytes, with the version of their format.
const CONTEXT: &[u8] = b"causeway delegated heartbeat, version 1\0";
/// Signature scheme of the keys that edges generate.
const SCHEME: SignatureScheme = SignatureScheme::ECDSA_NISTP256_SHA256;

/// Statement that a node signs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeartbeatStatement<'a> {
    /// Nonce of the gateway.
    pub nonce: &'a str,
    /// The node.
    pub node: &'a NodeName,
    /// State of the node's kubelet, as one word.
    pub kubelet: &'a str,
}

/// Error of a signature.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum HeartbeatSignatureError {
    /// The key is not ECDSA P-256.
    #[error("the key of the node's certificate cannot sign heartbeats: it must be ECDSA P-256")]
    Key,
    /// The key failed to sign.
    #[error("the key of the node's certificate cannot sign: {0}")]
    Sign(rustls::Error),
    /// The signature is not by the key of the certificate.
    #[error("the signature is not by the key of the node's certificate")]
    Invalid,
}

impl HeartbeatStatement<'_> {
    /// Signs the statement with the key of the node's certificate. Returns an ASN.1 ECDSA signature.
    ///
    /// # Errors
    /// If the key is not ECDSA P-256, or fails to sign.
    pub fn sign(&self, leaf: &LeafCertificate) -> Result<Vec<u8>, HeartbeatSignatureError> {
        let signer = leaf.certified_key().key.choose_scheme(&[SCHEME]);
        let signer = signer.ok_or(HeartbeatSignatureError::Key)?;
        signer
            .sign(&self.bytes())
            .map_err(HeartbeatSignatureError::Sign)
    }

    /// Verifies that the key of `certificate` has signed the statement. The certificate itself is not verified.
    ///
    /// # Errors
    /// If the signature is not by this key.
    pub fn verify(
        &self,
        certificate: &CertificateDer<'_>,
        signature: &[u8],
    ) -> Result<(), HeartbeatSignatureError> {
        let certificate =
            EndEntityCert::try_from(certificate).map_err(|_| HeartbeatSignatureError::Invalid)?;
        let provider = provider();
        let schemes = provider.signature_verification_algorithms.mapping.iter();
        let algorithms = schemes
            .filter(|(scheme, _)| *scheme == SCHEME)
            .flat_map(|(_, algorithms)| algorithms.iter());
        let bytes = self.bytes();
        let verified = algorithms.into_iter().any(|algorithm| {
            let verified = certificate.verify_signature(*algorithm, &bytes, signature);
            verified.is_ok()
        });
        verified
            .then_some(())
            .ok_or(HeartbeatSignatureError::Invalid)
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = CONTEXT.to_vec();
        for field in [self.nonce, self.node.as_str(), self.kubelet] {
            let length = u64::try_from(field.len()).unwrap_or(u64::MAX);
            bytes.extend_from_slice(&length.to_be_bytes());
            bytes.extend_from_slice(field.as_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Ca, EdgeIdentity, PrivateKey, TrustDomain, VerifiedPublicKey};
    use std::time::Duration;

    fn edge(ca: &Ca, node: &str) -> EdgeIdentity {
        let key = PrivateKey::generate().unwrap();
        let csr = VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
        let node = NodeName::parse(node).unwrap();
        let issued = ca.issue_edge(&csr, &node, Duration::from_mins(1)).unwrap();
        EdgeIdentity::new(&ca.root_pem(), &issued.pem(), &key.key_pem()).unwrap()
    }

    #[test]
    fn only_the_signed_statement_of_the_own_key_verifies() {
        let ca = Ca::create(&TrustDomain::parse("td").unwrap()).unwrap();
        let (one, two) = (edge(&ca, "edge-1"), edge(&ca, "edge-2"));
        let statement = HeartbeatStatement {
            nonce: "n",
            node: &one.node,
            kubelet: "alive",
        };
        let signature = statement.sign(&one.leaf).unwrap();
        let (own, other) = (&one.leaf.chain()[0], &two.leaf.chain()[0]);
        assert_eq!(statement.verify(own, &signature), Ok(()));
        let invalid = Err(HeartbeatSignatureError::Invalid);
        assert_eq!(statement.verify(other, &signature), invalid);
        for changed in [
            HeartbeatStatement {
                nonce: "m",
                ..statement
            },
            HeartbeatStatement {
                node: &two.node,
                ..statement
            },
            HeartbeatStatement {
                kubelet: "dead",
                ..statement
            },
        ] {
            assert_eq!(changed.verify(own, &signature), invalid, "{changed:?}");
        }
        assert_eq!(statement.verify(own, &signature[1..]), invalid);
        assert_eq!(statement.verify(own, &[]), invalid);
    }

    #[test]
    fn fields_cannot_be_shifted_into_each_other() {
        let node = NodeName::parse("a").unwrap();
        let of = |nonce, kubelet| {
            HeartbeatStatement {
                nonce,
                node: &node,
                kubelet,
            }
            .bytes()
        };
        assert_ne!(of("x", "yz"), of("xy", "z"));
        assert!(of("x", "y").starts_with(b"causeway "));
    }
}
