use super::*;

fn certificate(uris: &[&str], organizations: &[&str]) -> Certificate {
    Certificate {
        uris: uris.iter().map(ToString::to_string).collect(),
        organizations: organizations.iter().map(ToString::to_string).collect(),
        ..Certificate::default()
    }
}

fn identity(uris: &[&str]) -> Result<Identity, NameError> {
    Identity::from_own(
        &certificate(uris, &["a,b"]),
        &TrustDomain::parse("td.example").unwrap(),
    )
}

#[test]
fn each_uri_names_its_identity() {
    let edge = identity(&["spiffe://td.example/edge/edge-1"]).unwrap();
    assert_eq!(edge, Identity::Edge(NodeName::parse("edge-1").unwrap()));
    assert_eq!(
        identity(&["https://x", "spiffe://td.example/gateway"]).unwrap(),
        Identity::Gateway
    );
    let client = Identity::Client {
        name: "ann".into(),
        groups: vec!["a".into(), "b".into()],
    };
    assert_eq!(
        identity(&["spiffe://td.example/client/ann"]).unwrap(),
        client
    );
}

#[test]
fn exactly_one_identity_or_none() {
    assert!(matches!(
        identity(&[]),
        Err(NameError::NotOneIdentity { count: 0 })
    ));
    let two = [
        "spiffe://td.example/gateway",
        "SPIFFE://td.example/edge/edge-1",
    ];
    assert!(matches!(
        identity(&two),
        Err(NameError::NotOneIdentity { count: 2 })
    ));
}

#[test]
fn identities_of_other_trust_domains_are_unknown() {
    for uri in [
        "spiffe://other/gateway",
        "spiffe://td.example",
        "spiffe://td.example.evil/gateway",
        "spiffe://td.example/gateway/",
        "spiffe://td.example/gateway/x",
        "spiffe://td.example/Edge/edge-1",
        "spiffe://td.example/edge/EDGE-1",
        "spiffe://td.example/",
    ] {
        assert!(
            matches!(identity(&[uri]), Err(NameError::UnknownIdentity { .. })),
            "{uri}"
        );
    }
    assert!(identity(&["spiffe://td.example/edge/a/b"]).is_err());
    assert!(identity(&["spiffe://td.example/client/"]).is_err());
    assert!(identity(&["spiffe://td.example/client/a/b"]).is_err());
}

#[test]
fn a_foreign_certificate_is_foreign_for_every_content() {
    let claims = certificate(&["spiffe://td.example/edge/edge-1"], &["system:masters"]);
    assert_eq!(Identity::from_foreign(claims).kind(), "foreign");
}
