use super::*;
use crate::ca::CaFile;
use crate::identity::Identity;
use crate::name::{HostName, TrustDomain};
use crate::verify::{
    ListenerClientTrust, PeerRejected, Purpose, TrustStore, check_peer, none_revoked,
};
use crate::{LeafCertificate, LiveCa, NodeName, PrivateKey, SniCertResolver, VerifiedPublicKey};
use rcgen::{BasicConstraints, DnType, IsCa, KeyUsagePurpose, SignatureAlgorithm};
use std::sync::Arc;
use time::{Duration as Span, OffsetDateTime};

/// A change that makes a CA unusable.
type Change = Box<dyn Fn(&mut CertificateParams)>;

const DAY: Duration = Duration::from_hours(24);

/// A company with a root and a CA below it.
struct Company {
    root: CertificateDer<'static>,
    chain: String,
    key: String,
}

fn params(name: &str, depth: Option<u8>) -> CertificateParams {
    let mut params = CertificateParams::default();
    params
        .distinguished_name
        .push(DnType::OrganizationName, "Company");
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(depth.map_or(
        BasicConstraints::Unconstrained,
        BasicConstraints::Constrained,
    ));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params.use_authority_key_identifier_extension = true;
    params
}

impl Company {
    fn found() -> Self {
        Self::with(None, Some(3), |_| {})
    }

    fn with(
        root: Option<u8>,
        depth: Option<u8>,
        change: impl FnOnce(&mut CertificateParams),
    ) -> Self {
        Self::signing_by(&rcgen::PKCS_ECDSA_P256_SHA256, root, depth, change)
    }

    fn signing_by(
        kind: &'static SignatureAlgorithm,
        root: Option<u8>,
        depth: Option<u8>,
        change: impl FnOnce(&mut CertificateParams),
    ) -> Self {
        let (params_of_root, root_key) = (params("Root", root), KeyPair::generate().unwrap());
        let root = params_of_root.self_signed(&root_key).unwrap();
        let mut below = params("Issuing", depth);
        change(&mut below);
        let key = KeyPair::generate_for(kind).unwrap();
        let signed = below.signed_by(&key, &Issuer::new(params_of_root, root_key));
        Self {
            chain: signed.unwrap().pem() + &root.pem(),
            root: root.der().clone(),
            key: key.serialize_pem(),
        }
    }

    fn ca(&self) -> OperatorCa {
        OperatorCa::load(&self.chain, &self.key).unwrap()
    }

    fn refused(&self) -> String {
        OperatorCa::load(&self.chain, &self.key)
            .unwrap_err()
            .to_string()
    }
}

fn ca() -> Ca {
    Ca::create(&TrustDomain::parse("td.example").unwrap()).unwrap()
}

fn again(ca: &Ca) -> Ca {
    let text = serde_json::to_string(&CaFile::of(ca)).unwrap();
    serde_json::from_str::<CaFile>(&text)
        .unwrap()
        .read()
        .unwrap()
}

fn front(ca: &Ca) -> LeafCertificate {
    ca.mint_front(&[HostName::parse("edge-1").unwrap()], DAY)
        .unwrap()
}

/// Whether a peer that trusts only `root` trusts the certificates that listeners show.
fn believes(root: &CertificateDer<'_>, ca: &Ca) -> bool {
    let leaf = front(ca);
    let (own, behind) = leaf.chain().split_first().unwrap();
    let own = EndEntityCert::try_from(own).unwrap();
    let anchors = [webpki::anchor_from_trusted_cert(root).unwrap()];
    let algorithms = provider().signature_verification_algorithms.all;
    let (now, usage) = (UnixTime::now(), KeyUsage::server_auth());
    own.verify_for_usage(algorithms, &anchors, behind, now, usage, None, None)
        .is_ok()
}

/// Whether each certificate that a listener sends is signed by the one behind it.
fn is_one_line(ca: &Ca) -> bool {
    let leaf = front(ca);
    let line: Vec<_> = leaf
        .chain()
        .iter()
        .map(|der| CaConstraints::read(der).unwrap())
        .collect();
    line.windows(2)
        .all(|pair| pair[0].issuer.der == pair[1].subject.der)
}

#[test]
fn whoever_trusts_the_operators_root_alone_believes_fronts_and_so_does_who_trusts_ours() {
    let (company, plain) = (Company::found(), ca());
    assert!(!believes(&company.root, &plain));
    let (signed, step) = plain.signed_by(&company.ca()).unwrap();
    assert_eq!(step, RotationStep::Made);
    let signed = again(&signed);
    assert!(believes(&company.root, &signed) && believes(signed.root(), &signed));
    assert!(is_one_line(&signed));
    let leaf = front(&signed);
    assert_eq!(leaf.chain().len(), 4, "the operator's root is not sent");
    let gateway = signed.issue_gateway(&[], DAY).unwrap();
    assert_eq!(
        gateway.chain()[2..],
        [signed.root().clone()],
        "edges go by our root"
    );
    let above = signed.above();
    assert_eq!(
        (above.len(), above[0].by.as_str(), above[0].root),
        (1, "Issuing", signed.fingerprint())
    );
    let facts = Certificate::read(signed.root()).unwrap();
    assert_eq!(
        above[0].not_after.as_secs(),
        facts.not_after,
        "the company outlives it"
    );
}

#[test]
fn through_a_rotation_whoever_trusts_any_one_root_believes_fronts() {
    let company = Company::found();
    let all = |ca: &Ca, roots: &[&CertificateDer<'_>]| {
        is_one_line(ca) && roots.iter().all(|root| believes(root, ca))
    };
    let (first, _) = ca().signed_by(&company.ca()).unwrap();
    let old = first.root().clone();
    let (prepared, _) = first.prepare().unwrap();
    assert!(prepared.leaves_operator());
    let next = prepared.roots()[1].1.clone();
    let (prepared, step) = again(&prepared).prepare_signed_by(&company.ca()).unwrap();
    assert_eq!(
        (step, prepared.roots()[1].1),
        (RotationStep::Made, &next),
        "it is the same, signed"
    );
    assert!(!prepared.leaves_operator() && all(&prepared, &[&old, &company.root]));
    let (active, _) = again(&prepared).activate().unwrap();
    assert!(!active.leaves_operator() && all(&active, &[&old, &next, &company.root]));
    let (resigned, _) = again(&active).signed_by(&Company::found().ca()).unwrap();
    assert!(!believes(&company.root, &resigned) && all(&resigned, &[&old, &next]));
    let (retired, _) = again(&active).retire().unwrap();
    assert!(all(&retired, &[&next, &company.root]) && !believes(&old, &retired));
}

/// No order of certificates would do for everybody if it did not.
#[test]
fn what_prepares_a_root_by_an_operators_ca_has_the_one_that_signs_signed_too_unless_it_is() {
    let (company, other) = (Company::found(), Company::found());
    let (prepared, _) = ca().prepare_signed_by(&company.ca()).unwrap();
    assert_eq!(prepared.above().len(), 2);
    let old = prepared.root().clone();
    let (active, _) = prepared.activate().unwrap();
    for root in [&old, active.root(), &company.root] {
        assert!(is_one_line(&active) && believes(root, &active));
    }
    let (signed, _) = ca().signed_by(&company.ca()).unwrap();
    let (prepared, _) = signed.prepare_signed_by(&other.ca()).unwrap();
    assert!(believes(&company.root, &prepared) && !believes(&other.root, &prepared));
    let (refused, early) = (prepared.activate().unwrap().0, other.ca());
    assert!(matches!(
        refused.prepare_signed_by(&early),
        Err(CaError::Order(_))
    ));
}

#[test]
fn a_root_that_the_operators_ca_has_not_signed_is_noticed_before_it_takes_the_place_of_one_that_it_has()
 {
    let (signed, _) = ca().signed_by(&Company::found().ca()).unwrap();
    assert!(!signed.leaves_operator());
    let (active, _) = signed.prepare().unwrap().0.activate().unwrap();
    assert!(active.leaves_operator());
    let (retired, _) = active.retire().unwrap();
    assert!(!retired.leaves_operator() && retired.above().is_empty());
}

#[test]
fn an_operators_ca_vouches_for_fronts_and_for_no_edge_or_caller_of_ours() {
    let company = Company::found();
    let (ca, _) = ca().signed_by(&company.ca()).unwrap();
    let key = PrivateKey::generate().unwrap();
    let csr = VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
    let edge = ca
        .issue_edge(&csr, &NodeName::parse("edge-1").unwrap(), DAY)
        .unwrap();
    let caller = ca.issue_caller("ann", &[], DAY).unwrap();
    let elsewhere = ListenerClientTrust {
        own: false,
        client_roots: vec![company.root.clone()],
        require: true,
    };
    let elsewhere = TrustStore::front(&ca, &elsewhere).unwrap();
    let above = &front(&ca).chain()[2..].to_vec();
    let edge = pem::certificates(&edge.pem()).unwrap();
    for own in [edge.as_slice(), caller.chain()] {
        let chain = [own, above].concat();
        let checked = check_peer(
            Some(&chain),
            Purpose::Caller,
            UnixTime::now(),
            &elsewhere,
            &none_revoked,
        );
        assert_eq!(
            checked,
            Err(PeerRejected::WrongPurpose {
                wanted: Purpose::Caller
            })
        );
    }
    let own = ListenerClientTrust {
        own: true,
        client_roots: vec![company.root],
        require: true,
    };
    let own = TrustStore::front(&ca, &own).unwrap();
    let known = check_peer(
        Some(caller.chain()),
        Purpose::Caller,
        UnixTime::now(),
        &own,
        &none_revoked,
    );
    assert!(matches!(known, Ok(Identity::Caller { .. })));
}

#[test]
fn every_kind_of_key_that_is_told_can_sign() {
    for kind in [
        &rcgen::PKCS_RSA_SHA256,
        &rcgen::PKCS_ECDSA_P384_SHA384,
        &rcgen::PKCS_ECDSA_P521_SHA512,
        &rcgen::PKCS_ED25519,
    ] {
        let company = Company::signing_by(kind, None, None, |_| {});
        let (signed, _) = ca().signed_by(&company.ca()).unwrap();
        assert!(believes(&company.root, &signed), "{kind:?}");
    }
}

#[test]
fn what_is_signed_ends_with_the_first_that_ends() {
    let ends = OffsetDateTime::now_utc() + Span::days(20);
    let company = Company::with(None, None, |params| params.not_after = ends);
    let (signed, _) = ca().signed_by(&company.ca()).unwrap();
    let above = u64::try_from(ends.unix_timestamp()).unwrap();
    assert_eq!(signed.above()[0].not_after.as_secs(), above);
}

#[test]
fn a_ca_that_permits_too_few_below_it_is_refused_with_what_to_ask_for() {
    for (root, depth, why) in [
        (None, Some(2), "Issuing permits 2 CAs"),
        (None, Some(0), "pathlen:3"),
        (Some(3), Some(3), "Root permits 3 CAs"),
    ] {
        let refused = Company::with(root, depth, |_| {}).refused();
        assert!(
            refused.contains(why) && refused.contains("without a limit"),
            "{refused}"
        );
    }
    for (root, depth) in [(Some(4), Some(3)), (None, None)] {
        let company = Company::with(root, depth, |_| {});
        let (prepared, _) = ca().prepare_signed_by(&company.ca()).unwrap();
        let (active, _) = prepared.activate().unwrap();
        assert!(believes(&company.root, &active));
    }
}

#[test]
fn a_ca_that_may_not_or_cannot_sign_is_refused_with_the_reason() {
    let now = OffsetDateTime::now_utc();
    let spoilt: [(Change, &str); 5] = [
        (
            Box::new(|params| params.is_ca = IsCa::ExplicitNoCa),
            "may not sign",
        ),
        (
            Box::new(|params| params.key_usages = vec![KeyUsagePurpose::DigitalSignature]),
            "may not sign",
        ),
        (
            Box::new(move |params| params.not_after = now - Span::days(1)),
            "ended at",
        ),
        (
            Box::new(move |params| params.not_before = now + Span::days(1)),
            "is not valid before",
        ),
        (
            Box::new(|params| {
                params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
            }),
            "is not for servers",
        ),
    ];
    for (change, why) in spoilt {
        let refused = Company::with(None, None, change).refused();
        assert!(refused.contains(why), "{refused}");
    }
    let (one, two) = (Company::found(), Company::found());
    let refused = |chain: &str, key: &str| OperatorCa::load(chain, key).unwrap_err().to_string();
    let mixed = one.chain.clone() + &two.chain;
    for (chain, key, why) in [
        (
            one.chain.as_str(),
            two.key.as_str(),
            "not the key of the first certificate",
        ),
        (&one.chain, "", "no private key in PEM"),
        (
            &one.chain,
            "-----BEGIN ENCRYPTED PRIVATE KEY-----\n",
            "openssl pkey",
        ),
        (
            &one.chain,
            "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n",
            "openssl pkey",
        ),
        ("\u{fffd}", &one.key, "no certificate"),
        (&mixed, &one.key, "Issuing stands behind it"),
    ] {
        assert!(refused(chain, key).contains(why), "{}", refused(chain, key));
    }
}

#[test]
fn a_ca_whose_limits_on_names_our_own_do_not_keep_is_refused() {
    let limits = |permitted| {
        Company::with(None, None, |params| {
            params.name_constraints = Some(rcgen::NameConstraints {
                permitted_subtrees: vec![permitted],
                excluded_subtrees: vec![],
            });
        })
    };
    let mut other = rcgen::DistinguishedName::new();
    other.push(DnType::OrganizationName, "Company");
    let refused = limits(rcgen::GeneralSubtree::DirectoryName(other)).ca();
    let refused = ca().signed_by(&refused).unwrap_err().to_string();
    assert!(refused.contains("spiffe://td.example"), "{refused}");
    let company = limits(rcgen::GeneralSubtree::DnsName("edge-1".into()));
    assert!(company.ca().limits_names() && !Company::found().ca().limits_names());
    let (signed, _) = ca().signed_by(&company.ca()).unwrap();
    assert!(believes(&company.root, &signed));
}

#[test]
fn a_file_without_above_reads_and_one_with_anothers_is_refused() {
    let company = Company::found();
    let (signed, _) = ca().signed_by(&company.ca()).unwrap();
    let mut file = serde_json::to_value(CaFile::of(&signed)).unwrap();
    let key = company.key.lines().nth(1).unwrap();
    assert!(!file.to_string().contains(key), "the key is not kept");
    let (other, _) = ca().signed_by(&company.ca()).unwrap();
    let theirs = serde_json::to_value(CaFile::of(&other)).unwrap()["roots"][0]["above"].clone();
    file["roots"][0]["above"] = theirs;
    let refused = serde_json::from_value::<CaFile>(file.clone())
        .unwrap()
        .read();
    let refused = refused.unwrap_err().to_string();
    assert!(
        refused.contains("the operator's CA has signed another one"),
        "{refused}"
    );
    file["roots"][0].as_object_mut().unwrap().remove("above");
    let without = serde_json::from_value::<CaFile>(file)
        .unwrap()
        .read()
        .unwrap();
    assert!(without.above().is_empty() && without.fingerprint() == signed.fingerprint());
}

#[test]
fn a_front_shows_what_another_ca_has_signed_from_then_on() {
    let company = Company::found();
    let live = LiveCa::new(ca());
    let resolver = SniCertResolver::new(live.clone(), vec![], Arc::new(|_| true)).unwrap();
    let before = (resolver.leaf(Some("edge-1")).unwrap(), live.get().state());
    live.swap(again(&live.get()));
    assert!(Arc::ptr_eq(
        &before.0,
        &resolver.leaf(Some("edge-1")).unwrap()
    ));
    live.swap(again(&live.get()).signed_by(&company.ca()).unwrap().0);
    assert_ne!(live.get().state(), before.1);
    assert_eq!(
        resolver.leaf(Some("edge-1")).unwrap().cert.len(),
        before.0.cert.len() + 2
    );
}

/// A name as a directory has it: two values of a kind, and longer than 127 bytes.
#[test]
fn an_issuers_name_stands_byte_for_byte_in_what_it_signs() {
    let component = |value: &str| {
        let length = u8::try_from(value.len()).unwrap();
        let head = [0x31, length + 16, 0x30, length + 14, 0x06, 10];
        let kind = [
            0x09, 0x92, 0x26, 0x89, 0x93, 0xf2, 0x2c, 0x64, 0x01, 0x19, 0x16, length,
        ];
        [&head[..], &kind, value.as_bytes()].concat()
    };
    let parts = [
        component("example"),
        component(&"d".repeat(60)),
        component("corp"),
    ]
    .concat();
    let name = [
        &[0x30, 0x81, u8::try_from(parts.len()).unwrap()],
        parts.as_slice(),
    ]
    .concat();
    let key = KeyPair::generate().unwrap();
    let made = params("Causeway", None).self_signed(&key).unwrap();
    let made = der::issued_by(&name, made.der(), &key).unwrap();
    let read = CaConstraints::read(&made).unwrap();
    assert_eq!(
        (&read.issuer.der, read.subject.common.as_str()),
        (&name, "Causeway")
    );
    assert!(
        read.issuer.common.contains("DC=corp"),
        "{}",
        read.issuer.common
    );
    let (_, parsed) = x509_parser::parse_x509_certificate(&made).unwrap();
    parsed.verify_signature(Some(parsed.public_key())).unwrap();
    assert!(der::issued_by(&name, &CertificateDer::from(vec![0x30, 0x85, 1]), &key).is_err());
}
