use super::*;
use crate::control::rejoin_state::TokenSource;
use IdentityRefusal::{NotAccepted, UnknownCa};
use RejoinReason::{Refused, Requested};
use causeway_certs::{Ca, NodeAttributes, NodeName, OpenMode, Store, TrustDomain};
use std::time::Duration;

/// Returns a token of a new CA.
fn token() -> JoinToken {
    let data = tempfile::tempdir().unwrap();
    let store = Store::open(data.path(), OpenMode::Create).unwrap();
    let ca = Ca::create(&TrustDomain::parse("test").unwrap()).unwrap();
    store.save_ca(&ca).unwrap();
    let node = NodeName::parse("edge-1").unwrap();
    let tokens = store.tokens().unwrap();
    tokens
        .create(&node, Duration::from_hours(1), NodeAttributes::default())
        .unwrap()
}

#[test]
fn a_token_rejoins_once_and_never_at_a_foreign_gateway() {
    let (token, other) = (token(), token());
    let (same, another) = ([token.root], [other.root]);
    let (itself, before) = (Some(token.id.as_str()), Some(other.id.as_str()));
    for (reason, joined_by, roots, expected) in [
        (Requested, None, same, Ok(())),
        (Requested, before, same, Ok(())),
        (Requested, before, another, Ok(())),
        (Requested, itself, same, Err(TokenUnusable::AlreadyUsed)),
        (Refused(NotAccepted), None, same, Ok(())),
        (Refused(NotAccepted), before, another, Ok(())),
        (
            Refused(NotAccepted),
            itself,
            same,
            Err(TokenUnusable::AlreadyUsed),
        ),
        (Refused(UnknownCa), before, another, Ok(())),
        (
            Refused(UnknownCa),
            before,
            same,
            Err(TokenUnusable::CaMismatch),
        ),
        (
            Refused(UnknownCa),
            itself,
            another,
            Err(TokenUnusable::AlreadyUsed),
        ),
    ] {
        let judged = check_token(&token, joined_by, &roots, reason);
        assert_eq!(judged, expected, "{reason:?} {joined_by:?}");
    }
}

#[test]
fn a_file_with_a_token_is_read_when_the_token_is_needed() {
    let data = tempfile::tempdir().unwrap();
    let path = data.path().join("token");
    let source = TokenSource {
        token: None,
        file: Some(path.clone()),
    };
    let missing = source.read().unwrap_err().to_string();
    assert!(missing.contains("causeway token create"), "{missing}");
    let token = token();
    std::fs::write(&path, format!(" {}\n", token.text().expose())).unwrap();
    assert_eq!(source.read().unwrap(), Some(token));
    assert_eq!(TokenSource::default().read().unwrap(), None);
}
