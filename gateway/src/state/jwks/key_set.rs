//! Set of keys (JWKS, RFC 7517): the keys that can verify a signature, and the selection of a token's key.
//!
//! This module parses untrusted bytes, and uses only supported keys: encryption keys, shared secrets and unsupported curves are
//! ignored. A key verifies only signatures of its own kind, so a token cannot make a public key serve as a secret.

use jsonwebtoken::{
    Algorithm, AlgorithmFamily, DecodingKey,
    jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyAlgorithm, KeyOperations, PublicKeyUse},
};
use serde::Deserialize;
use serde_json::Value;

/// Maximum number of keys, which is more than any issuer has at once.
const MAX_KEYS: usize = 256;

/// Keys of an issuer.
#[derive(Clone, Debug)]
pub struct KeySet(Vec<Key>);

#[derive(Clone, Debug)]
struct Key {
    jwk: Jwk,
    key: DecodingKey,
}

/// Equality of the JWKs, independent of the derived keys.
impl PartialEq for KeySet {
    fn eq(&self, other: &Self) -> bool {
        let jwks = |set: &Self| set.0.iter().map(|key| key.jwk.clone()).collect::<Vec<_>>();
        jwks(self) == jwks(other)
    }
}

/// Result of looking up the key of a token.
#[derive(Clone, Copy, Debug)]
pub enum KeyLookup<'a> {
    /// The key was found.
    Key(&'a DecodingKey),
    /// The key is not in this set.
    None,
    /// The token names no key, and several keys are possible.
    Several,
}

#[derive(Deserialize)]
struct RawJwk {
    keys: Vec<Value>,
}

impl KeySet {
    /// Parses a set of keys.
    ///
    /// # Errors
    /// If the text is not a set, or has no key that can verify a signature.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let raw: RawJwk = serde_json::from_slice(text)
            .map_err(|error| format!("this is not a JSON Web Key Set (JWKS): {error}"))?;
        if raw.keys.len() > MAX_KEYS {
            return Err(format!("it contains more than {MAX_KEYS} keys"));
        }
        let keys: Vec<Key> = raw.keys.into_iter().filter_map(parse_key).collect();
        if keys.is_empty() {
            let message =
                "it contains no key that can verify signatures (RSA, P-256, P-384 or Ed25519)";
            return Err(message.to_owned());
        }
        Ok(Self(keys))
    }

    /// Returns the key with the id `key_id` for a token with this algorithm. A token without an id matches the only possible key.
    pub fn find(&self, key_id: Option<&str>, algorithm: Algorithm) -> KeyLookup<'_> {
        let matches_id =
            |key: &&Key| key_id.is_none() || key.jwk.common.key_id.as_deref() == key_id;
        let mut candidates = self
            .0
            .iter()
            .filter(matches_id)
            .filter(|key| key.supports(algorithm));
        match (candidates.next(), candidates.next()) {
            (None, _) => KeyLookup::None,
            (Some(key), None) => KeyLookup::Key(&key.key),
            (Some(_), Some(_)) => KeyLookup::Several,
        }
    }
}

impl Key {
    fn supports(&self, algorithm: Algorithm) -> bool {
        let declared_algorithm = self.jwk.common.key_algorithm;
        let curve_matches = match &self.jwk.algorithm {
            AlgorithmParameters::EllipticCurve(curve) => match curve.curve {
                EllipticCurve::P256 => algorithm == Algorithm::ES256,
                EllipticCurve::P384 => algorithm == Algorithm::ES384,
                _ => false,
            },
            _ => true,
        };
        let algorithm_matches =
            declared_algorithm.is_none_or(|output| output == KeyAlgorithm::from(algorithm));
        curve_matches && algorithm_matches && self.key.family() == algorithm.family()
    }
}

fn parse_key(value: Value) -> Option<Key> {
    let jwk: Jwk = serde_json::from_value(value).ok()?;
    let is_for_verification = match (&jwk.common.public_key_use, &jwk.common.key_operations) {
        (Some(PublicKeyUse::Signature) | None, None) => true,
        (Some(PublicKeyUse::Signature) | None, Some(operations)) => {
            operations.contains(&KeyOperations::Verify)
        }
        _ => false,
    };
    let key = DecodingKey::from_jwk(&jwk).ok()?;
    (is_for_verification && key.family() != AlgorithmFamily::Hmac).then_some(Key { jwk, key })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use serde_json::json;

    /// Public key of RFC 8037, appendix A.2.
    const X: &str = "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo";

    pub(in crate::state::jwks) fn ed25519(id: &str) -> String {
        json!({ "keys": [{ "kty": "OKP", "crv": "Ed25519", "x": X, "kid": id }] }).to_string()
    }

    fn found(set: &KeySet, id: Option<&str>, algorithm: Algorithm) -> &'static str {
        match set.find(id, algorithm) {
            KeyLookup::Key(_) => "one",
            KeyLookup::None => "none",
            KeyLookup::Several => "several",
        }
    }

    #[test]
    fn a_key_is_found_by_its_id_and_algorithm() {
        let set = json!({ "keys": [
            { "kty": "OKP", "crv": "Ed25519", "x": X, "kid": "a" },
            { "kty": "RSA", "n": "AQAB", "e": "AQAB", "kid": "a" },
            { "kty": "RSA", "n": "AQAB", "e": "AQAB", "kid": "b", "alg": "PS256" },
            { "kty": "EC", "crv": "P-256", "x": "AA", "y": "AA", "kid": "c", "use": "sig" },
        ] });
        let set = KeySet::parse(set.to_string().as_bytes()).unwrap();
        for (id, algorithm, expected) in [
            (Some("a"), Algorithm::EdDSA, "one"),
            (Some("a"), Algorithm::RS256, "one"),
            (Some("a"), Algorithm::ES256, "none"),
            (Some("a"), Algorithm::HS256, "none"),
            (Some("b"), Algorithm::PS256, "one"),
            (Some("b"), Algorithm::RS256, "none"),
            (Some("c"), Algorithm::ES256, "one"),
            (Some("c"), Algorithm::ES384, "none"),
            (Some("d"), Algorithm::EdDSA, "none"),
            (None, Algorithm::EdDSA, "one"),
            (None, Algorithm::PS256, "several"),
            (None, Algorithm::HS256, "none"),
        ] {
            assert_eq!(found(&set, id, algorithm), expected, "{id:?} {algorithm:?}");
        }
    }

    #[test]
    fn unusable_keys_are_skipped() {
        for other in [
            json!({ "kty": "oct", "k": "c2VjcmV0", "kid": "a", "alg": "HS256" }),
            json!({ "kty": "OKP", "crv": "Ed25519", "x": X, "use": "enc" }),
            json!({ "kty": "OKP", "crv": "Ed25519", "x": X, "key_ops": ["encrypt"] }),
            json!({ "kty": "OKP", "crv": "X448", "x": X }),
            json!({ "kty": "RSA", "n": "*", "e": "AQAB" }),
            json!("text"),
        ] {
            let text = json!({ "keys": [other] }).to_string();
            let refused = KeySet::parse(text.as_bytes()).unwrap_err();
            assert!(refused.contains("contains no key"), "{text}: {refused}");
        }
        for text in ["", "[]", "{}", r#"{ "keys": 1 }"#, "<html>"] {
            assert!(KeySet::parse(text.as_bytes()).is_err(), "{text}");
        }
    }
}
