//! Tests with our own CA in place of an external CA: only the content of the certificates counts.

use super::*;
use crate::verify::{PeerRejected, Purpose, TrustStore, none_revoked, verify_peer};
use crate::{Ca, EdgeIdentity, PrivateKey, VerifiedPublicKey};
use rustls_pki_types::UnixTime;
use std::time::Duration;

const LIFE: Duration = Duration::from_hours(1);

fn domain() -> TrustDomain {
    TrustDomain::parse("company.test").unwrap()
}

fn ca() -> Ca {
    Ca::create(&domain()).unwrap()
}

fn made(ca: &Ca, node: &str) -> (String, String) {
    let key = PrivateKey::generate().unwrap();
    let csr = VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
    let issued = ca.issue_edge(&csr, &NodeName::parse(node).unwrap(), LIFE);
    (issued.unwrap().pem(), key.key_pem().expose().to_owned())
}

#[test]
fn identity_and_trust_domain_are_read_from_the_certificate() {
    let ca = ca();
    let shown = ca.issue_gateway(&[], LIFE).unwrap();
    let (_, of) = load_gateway(&shown.chain_pem(), shown.key_pem().expose()).unwrap();
    assert_eq!(of, domain());
    let (chain, key) = made(&ca, "edge-1");
    let edge = EdgeIdentity::from_external(&ca.root_pem(), &chain, &key).unwrap();
    assert_eq!(
        (edge.node.as_str(), edge.trust_domain),
        ("edge-1", domain())
    );
    let message = |error: ExternalIdentityError| error.to_string();
    let wrong = message(load_gateway(&chain, &key).unwrap_err());
    assert!(
        wrong.contains("for edge edge-1") && wrong.contains("/gateway"),
        "{wrong}"
    );
    let shown = (shown.chain_pem(), shown.key_pem());
    let wrong = message(super::load_edge(&shown.0, shown.1.expose()).unwrap_err());
    assert!(
        wrong.contains("for gateway") && wrong.contains("/edge/NODE"),
        "{wrong}"
    );
    let listener = ca.issue_listener(&[], LIFE).unwrap();
    let wrong =
        message(load_gateway(&listener.chain_pem(), listener.key_pem().expose()).unwrap_err());
    assert!(wrong.contains("0 identities"), "{wrong}");
    assert!(message(parse_roots(&chain).unwrap_err()).contains("may not sign"));
    assert!(parse_roots("").is_err());
}

#[test]
fn certificates_below_a_named_root_are_accepted_by_that_root() {
    let (ca, other) = (ca(), self::ca());
    let below = parse_roots(&ca.root_pem()).unwrap();
    let trust = TrustStore::external(&below, &domain()).unwrap();
    let prove = |ca: &Ca, trust: &TrustStore| {
        let (chain, key) = made(ca, "edge-1");
        let (leaf, ..) = super::load_edge(&chain, &key).unwrap();
        verify_peer(
            Some(leaf.chain()),
            Purpose::Edge,
            UnixTime::now(),
            trust,
            &none_revoked,
        )
    };
    let proven = prove(&ca, &trust).unwrap();
    assert!(trust.is_trusted_root(proven.root.unwrap()));
    assert_eq!(prove(&other, &trust), Err(PeerRejected::UnknownIssuer));
    let both = [below, parse_roots(&other.root_pem()).unwrap()].concat();
    let both = TrustStore::external(&both, &domain()).unwrap();
    assert!(
        both.is_trusted_root(proven.root.unwrap()),
        "one more changes nothing"
    );
    let later = prove(&other, &both).unwrap();
    assert!(
        both.is_trusted_root(later.root.unwrap()) && !trust.is_trusted_root(later.root.unwrap())
    );
    let elsewhere = TrustDomain::parse("other.test").unwrap();
    let elsewhere =
        TrustStore::external(&parse_roots(&ca.root_pem()).unwrap(), &elsewhere).unwrap();
    assert!(matches!(
        prove(&ca, &elsewhere),
        Err(PeerRejected::Identity(_))
    ));
}
