use super::file::CaFile;
use super::root::distinguished_name;
use super::*;
use crate::NameError;
use crate::PrivateKey;
use crate::identity::Identity;
use causeway_tls::HostName;
use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose,
    PublicKeyData, SanType,
};

const DAY: Duration = Duration::from_hours(24);

fn ca() -> Ca {
    Ca::create(&TrustDomain::parse("td.example").unwrap()).unwrap()
}

fn facts(leaf: &LeafCertificate) -> Certificate {
    Certificate::parse(&leaf.chain()[0]).unwrap()
}

/// Returns a request with names, usages and CA:TRUE, none of which may be granted.
fn greedy_request() -> Vec<u8> {
    let mut params = CertificateParams::new(vec!["edge-9".to_owned()]).unwrap();
    params.subject_alt_names.push(SanType::URI(
        "spiffe://td.example/gateway".try_into().unwrap(),
    ));
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.distinguished_name = distinguished_name("root", Some("system:masters".into()));
    params
        .serialize_request(&KeyPair::generate().unwrap())
        .unwrap()
        .der()
        .to_vec()
}

#[test]
fn trap_12_only_the_key_is_taken_from_a_request() {
    let ca = ca();
    let key = VerifiedPublicKey::verify(&greedy_request()).unwrap();
    let node = NodeName::parse("edge-1").unwrap();
    let issued = ca.issue_edge(&key, &node, DAY).unwrap();
    let facts = Certificate::parse(&issued.certificate).unwrap();
    assert_eq!(facts.uris, ["spiffe://td.example/edge/edge-1"]);
    assert!(facts.client_auth && !facts.server_auth && !facts.is_ca);
    assert_eq!(facts.common_name.as_deref(), Some("edge-1"));
    assert!(facts.organizations.is_empty());
    assert_eq!(facts.public_key, key.public_key().subject_public_key_info());
    assert_eq!(
        (issued.serial, issued.not_after.as_secs()),
        (facts.serial, facts.not_after)
    );
}

#[test]
fn a_root_is_one_for_ten_years_and_reads_back() {
    let ca = ca();
    let facts = Certificate::parse(ca.root()).unwrap();
    assert!(facts.is_ca && !facts.client_auth && !facts.server_auth);
    assert!(facts.not_after - UnixTime::now().as_secs() > 3649 * 86_400);
    let text = serde_json::to_string(&CaFile::from_ca(&ca)).unwrap();
    let file: CaFile = serde_json::from_str(&text).unwrap();
    let again = file.into_ca().unwrap();
    assert_eq!(
        (again.root(), again.fingerprint()),
        (ca.root(), ca.fingerprint())
    );
    assert_eq!(again.trust_domain().as_str(), "td.example");
}

#[test]
fn a_root_that_is_none_or_has_another_key_is_refused() {
    let (one, two) = (ca(), ca());
    let part = |certificate: &str, key: &str| match Ca::load(certificate, key) {
        Err(CaError::Unusable { part, .. }) => part,
        other => panic!("{other:?}"),
    };
    assert_eq!(part(&one.root_pem(), two.key_pem().expose()), "key");
    assert_eq!(part(&one.root_pem(), "nonsense"), "key");
    assert_eq!(part("nonsense", one.key_pem().expose()), "certificate");
    let leaf = one.issue_listener(&[], DAY).unwrap();
    assert_eq!(
        part(&leaf.chain_pem(), leaf.key_pem().expose()),
        "certificate"
    );
}

#[test]
fn each_kind_has_its_purpose_and_its_identity() {
    let ca = ca();
    let names = [
        HostName::parse("gw.example").unwrap(),
        HostName::parse("::1").unwrap(),
    ];
    let gateway = ca.issue_gateway(&names, DAY).unwrap();
    let listener = ca.issue_listener(&names, DAY).unwrap();
    let client = ca
        .issue_client("ann", &["ops".into(), "dev".into()], DAY)
        .unwrap();
    let of = |leaf: &LeafCertificate| {
        Identity::from_own_certificate(&leaf.chain()[0], ca.trust_domain())
    };
    assert_eq!(of(&gateway).unwrap(), Identity::Gateway);
    assert!(matches!(
        of(&listener),
        Err(NameError::NotOneIdentity { count: 0 })
    ));
    let groups = vec!["ops".to_owned(), "dev".to_owned()];
    assert_eq!(
        of(&client).unwrap(),
        Identity::Client {
            name: "ann".into(),
            groups
        }
    );
    let usage = |leaf: &LeafCertificate| (facts(leaf).client_auth, facts(leaf).server_auth);
    assert_eq!(
        (usage(&gateway), usage(&listener), usage(&client)),
        ((true, true), (false, true), (true, false))
    );
    assert_eq!(gateway.chain()[2], *ca.root());
    let signer = |leaf: &LeafCertificate| Certificate::parse(&leaf.chain()[1]).unwrap().uris;
    let signers = [&gateway, &listener, &client].map(signer).concat();
    let uris =
        ["replicas", "listeners", "clients"].map(|of| format!("spiffe://td.example/issuer/{of}"));
    assert_eq!(signers, uris);
}

/// Returns a CA that was created this long ago.
fn old_ca(age: Duration) -> Ca {
    let domain = TrustDomain::parse("td.example").unwrap();
    let begins = UnixTime::now().as_secs() - age.as_secs();
    Ca {
        active: Root::create_valid_from(&domain, begins).unwrap(),
        other: None,
        is_placeholder: false,
        listeners: ListenerCa::default(),
    }
}

#[test]
fn server_certificates_begin_with_the_ca_for_every_signer() {
    let mut ca = old_ca(500 * DAY);
    let begins = Certificate::parse(ca.root()).unwrap().not_before;
    let names = [HostName::parse("gw.example").unwrap()];
    for step in [Ca::prepare, Ca::activate, Ca::retire] {
        let gateway = ca.issue_gateway(&names, DAY).unwrap();
        for certificate in gateway.chain() {
            assert_eq!(Certificate::parse(certificate).unwrap().not_before, begins);
        }
        let listener = ca.issue_listener(&names, DAY).unwrap();
        assert_eq!(facts(&listener).not_before, begins);
        ca = step(ca).unwrap().0;
    }
    assert_eq!(Certificate::parse(ca.root()).unwrap().not_before, begins);
}

#[test]
fn a_listener_certificate_stays_within_clients_maximum_validity() {
    let ca = old_ca(2000 * DAY);
    let listener = facts(&ca.issue_listener(&[], 7 * DAY).unwrap());
    let life = Duration::from_secs(listener.not_after - listener.not_before);
    assert!(life < 825 * DAY && life > 824 * DAY, "{life:?}");
}

#[test]
fn a_client_certificate_begins_when_it_is_issued() {
    let ca = old_ca(500 * DAY);
    let now = UnixTime::now().as_secs();
    let key =
        VerifiedPublicKey::verify(&PrivateKey::generate().unwrap().request().unwrap()).unwrap();
    let node = NodeName::parse("edge-1").unwrap();
    let edge = ca.issue_edge(&key, &node, DAY).unwrap().certificate;
    let client = facts(&ca.issue_client("ann", &[], DAY).unwrap());
    for one in [Certificate::parse(&edge).unwrap(), client] {
        assert!(one.issued_at().abs_diff(now) < 60, "{one:?}");
    }
}

#[test]
fn a_leaf_begins_an_hour_ago_and_never_outlives_its_root() {
    let ca = ca();
    let leaf = facts(
        &ca.issue_listener(&[], Duration::from_secs(u64::MAX))
            .unwrap(),
    );
    let now = UnixTime::now().as_secs();
    assert!(leaf.not_before <= now - 3595);
    assert_eq!(
        leaf.not_after,
        Certificate::parse(ca.root()).unwrap().not_after
    );
}

#[test]
fn a_renewal_with_the_same_key_has_another_serial() {
    let ca = ca();
    let key =
        VerifiedPublicKey::verify(&PrivateKey::generate().unwrap().request().unwrap()).unwrap();
    let node = NodeName::parse("edge-1").unwrap();
    let serial = || ca.issue_edge(&key, &node, DAY).unwrap().serial;
    let (first, second) = (serial(), serial());
    assert!(first != second && first.len() == 16);
}

#[test]
fn a_bad_clients_name_or_group_is_refused() {
    assert!(matches!(
        ca().issue_client("a/b", &[], DAY),
        Err(CaError::Name(_))
    ));
    assert!(matches!(
        ca().issue_client("a", &["b,c".into()], DAY),
        Err(CaError::Name(_))
    ));
}

#[test]
fn debug_does_not_show_the_key() {
    let ca = ca();
    let key = ca.key_pem();
    let line = key.expose().lines().nth(1).unwrap();
    assert!(!format!("{ca:?}").contains(line) && format!("{key:?}") == "***");
}

#[test]
fn a_root_without_purposes_signs_as_before() {
    let made = ca();
    let old = Ca::load(&made.root_pem(), made.key_pem().expose()).unwrap();
    let leaf = old.issue_client("ann", &[], DAY).unwrap();
    assert_eq!(leaf.chain().len(), 1);
    let gateway = old.issue_gateway(&[], DAY).unwrap();
    assert_eq!(gateway.chain()[1..], [old.root().clone()]);
}

#[test]
fn intermediates_that_were_mixed_up_are_refused() {
    let text = serde_json::to_string(&CaFile::from_ca(&ca())).unwrap();
    let mut file: serde_json::Value = serde_json::from_str(&text).unwrap();
    let issuers = file["roots"][0]["issuers"].as_object_mut().unwrap();
    let (edges, clients) = (issuers["edges"].clone(), issuers["clients"].clone());
    issuers.insert("edges".into(), clients);
    issuers.insert("clients".into(), edges);
    let file: CaFile = serde_json::from_value(file).unwrap();
    let refused = file.into_ca().unwrap_err().to_string();
    assert!(refused.contains("signs edges"), "{refused}");
}

#[test]
fn rotation_steps_are_ordered_and_repeatable() {
    let first = ca();
    let old = first.fingerprint();
    let order = |refused: Result<(Ca, RotationStep), CaError>| match refused {
        Err(CaError::Order(why)) => why,
        other => panic!("{other:?}"),
    };
    let again = |ca: &Ca| {
        let text = serde_json::to_string(&CaFile::from_ca(ca)).unwrap();
        serde_json::from_str::<CaFile>(&text)
            .unwrap()
            .into_ca()
            .unwrap()
    };
    assert!(order(again(&first).activate()).contains("rotate prepare"));
    assert_eq!(again(&first).retire().unwrap().1, RotationStep::Unchanged);

    let (prepared, step) = first.prepare().unwrap();
    assert_eq!((step, prepared.fingerprint()), (RotationStep::Applied, old));
    let both = prepared.fingerprints();
    let (prepared, step) = again(&prepared).prepare().unwrap();
    assert_eq!(
        (step, prepared.fingerprints()),
        (RotationStep::Unchanged, both.clone())
    );
    assert!(order(again(&prepared).retire()).contains("rotate activate"));

    let (active, step) = prepared.activate().unwrap();
    assert_eq!(
        (step, active.fingerprints()),
        (RotationStep::Applied, vec![both[1], old])
    );
    assert_eq!(
        again(&active).activate().unwrap().1,
        RotationStep::Unchanged
    );
    assert!(order(again(&active).prepare()).contains("rotate retire"));
    assert_eq!(active.other(), Some((RootStage::Retiring, old)));

    let (retired, step) = active.retire().unwrap();
    assert_eq!(
        (step, retired.fingerprints()),
        (RotationStep::Applied, vec![both[1]])
    );
    assert_eq!(again(&retired).retire().unwrap().1, RotationStep::Unchanged);
    assert_eq!(again(&retired).prepare().unwrap().1, RotationStep::Applied);
}
