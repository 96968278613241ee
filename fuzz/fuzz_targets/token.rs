//! Join tokens, files of clients' tokens, and key sets that verify JWTs.

#![no_main]

use causeway_certs::{JoinToken, StaticTokens};
use causeway_gateway::{proxy::authn::jwt, state::KeySet};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(token) = JoinToken::parse(text) {
        let message = token.text();
        assert_eq!(message.expose(), text.trim(), "a token has one spelling");
        assert!(!token.to_string().contains(message.expose()));
        // The text for a log contains no secret.
        let secret = message.expose().split('.').nth(2).unwrap_or_default();
        assert!(!format!("{token:?}").contains(secret));
    }
    if let Ok(tokens) = StaticTokens::parse(text) {
        assert!(tokens.len() <= text.lines().count());
        assert!(tokens.lookup(text).is_none(), "a hash is no token");
    }
    if let Ok(keys) = KeySet::parse(text.as_bytes()) {
        assert!(!jwt::is_jwt_shaped(text), "keys are no token");
        assert_eq!(KeySet::parse(text.as_bytes()), Ok(keys));
    }
});
