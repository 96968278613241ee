//! Secrets, and the encodings of random and binary values. The only source of randomness of this crate.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use causeway_config::Secret;
use data_encoding::HEXLOWER;

/// Returns a new secret of 32 random bytes, as base64url.
pub(crate) fn random_secret() -> Secret {
    Secret::new(base64url(&random_bytes::<32>()))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    HEXLOWER.encode(bytes)
}

/// Parses lower-case hexadecimal digits.
pub(crate) fn from_hex(text: &str) -> Option<Vec<u8>> {
    HEXLOWER.decode(text.as_bytes()).ok()
}

/// Returns bytes from the thread's cryptographic generator.
pub(crate) fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    rand::fill(&mut bytes);
    bytes
}

pub(crate) fn base64url(bytes: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

pub(crate) fn from_base64url(text: &str) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_random_secrets_are_the_same() {
        assert_ne!(random_secret(), random_secret());
    }
}
