use super::*;
use crate::ca::file::CaFile;
use crate::{KnownName, LeafCertificate, LiveCa, SniCertResolver, VerifiedPublicKey};
use causeway_tls::{NodeName, TrustDomain};
use rcgen::{DnType, Issuer};
use rustls_pki_types::{CertificateSigningRequestDer, pem::PemObject};
use std::sync::Arc;
use time::{Duration as Span, OffsetDateTime};

const DAY: Duration = Duration::from_hours(24);

/// Change of a CA's signature.
type Change = fn(&mut CertificateParams);

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

/// A company with a root and an issuing CA.
struct Company {
    root: rcgen::Certificate,
    issuing: rcgen::Certificate,
    issuer: Issuer<'static, KeyPair>,
}

impl Company {
    fn new() -> Self {
        Self::with(&rcgen::PKCS_ECDSA_P256_SHA256, |_| {}, |_| {})
    }

    fn with(kind: &'static rcgen::SignatureAlgorithm, root: Change, issuing: Change) -> Self {
        let (mut root_params, root_key) =
            (params("Root", None), KeyPair::generate_for(kind).unwrap());
        root(&mut root_params);
        let root = root_params.self_signed(&root_key).unwrap();
        let mut below = params("Issuing", Some(1));
        issuing(&mut below);
        let key = KeyPair::generate_for(kind).unwrap();
        let issuer = Issuer::new(root_params, root_key);
        let issuing = below.signed_by(&key, &issuer).unwrap();
        Self {
            root,
            issuing,
            issuer: Issuer::new(below, key),
        }
    }

    /// Signs the pending request, unchanged except for one change.
    fn sign(&self, ca: &Ca, change: Change) -> String {
        let pem = ca.listener_request_pem().unwrap().unwrap();
        let der = CertificateSigningRequestDer::from_pem_slice(pem.as_bytes()).unwrap();
        let key = VerifiedPublicKey::verify(&der).unwrap();
        let mut params = params("Listeners", Some(0));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        change(&mut params);
        let signed = params.signed_by(key.public_key(), &self.issuer);
        signed.unwrap().pem()
    }

    fn chain(&self, ca: &Ca) -> String {
        self.sign(ca, |_| {}) + &self.issuing.pem() + &self.root.pem()
    }
}

/// Returns the chain that a company makes for the pending request.
pub(crate) fn signed_request(ca: &Ca) -> String {
    Company::new().chain(ca)
}

fn requesting() -> Ca {
    let ca = Ca::create(&TrustDomain::parse("td.example").unwrap()).unwrap();
    ca.request_listener_ca().unwrap().0
}

fn again(ca: &Ca) -> Ca {
    let text = serde_json::to_string(&CaFile::from_ca(ca)).unwrap();
    let file = serde_json::from_str::<CaFile>(&text).unwrap();
    file.into_ca().unwrap()
}

fn names() -> Vec<HostName> {
    ["edge-1", "10.0.0.1"]
        .map(|name| HostName::parse(name).unwrap())
        .into()
}

fn import(ca: Ca, chain: &str) -> Ca {
    let (ca, step) = ca.import_listener_chain(chain, &names()).unwrap();
    assert_eq!(step, RotationStep::Applied);
    again(&ca)
}

fn leaf(ca: &Ca) -> LeafCertificate {
    ca.issue_listener(&names(), DAY).unwrap()
}

/// Whether a client that trusts only `root` verifies a listener.
fn trusts(root: &CertificateDer<'_>, ca: &Ca) -> bool {
    let leaf = leaf(ca);
    let (own, behind) = leaf.chain().split_first().unwrap();
    let own = EndEntityCert::try_from(own).unwrap();
    let anchors = [webpki::anchor_from_trusted_cert(root).unwrap()];
    let algorithms = provider().signature_verification_algorithms.all;
    let (now, usage) = (UnixTime::now(), KeyUsage::server_auth());
    own.verify_for_usage(algorithms, &anchors, behind, now, usage, None, None)
        .is_ok()
}

#[test]
fn company_root_clients_verify_listeners_through_rotation() {
    let (company, ca) = (Company::new(), requesting());
    assert!(!trusts(company.root.der(), &ca) && trusts(ca.root(), &ca));
    let chain = company.chain(&ca);
    let ca = import(ca, &chain);
    assert_eq!(leaf(&ca).chain().len(), 3, "the root is not sent");
    assert!(ca.listener_request_pem().unwrap().is_none());
    assert_eq!(ca.listener_ca().unwrap().root.subject, "Root");
    let ours = ca.bundle_pem();
    assert_eq!(ca.client_bundle_pem(), ours.clone() + &company.root.pem());
    let gateway = ca.issue_gateway(&[], DAY).unwrap();
    assert_eq!(
        gateway.chain()[2..],
        [ca.root().clone()],
        "edges trust our root"
    );
    let mut ca = ca;
    for step in [Ca::prepare, Ca::activate, Ca::retire] {
        ca = again(&step(ca).unwrap().0);
        assert!(trusts(company.root.der(), &ca));
    }
    assert_ne!(ca.bundle_pem(), ours);
    let (ca, step) = ca.import_listener_chain(&chain, &names()).unwrap();
    assert_eq!(step, RotationStep::Unchanged);
    assert!(trusts(company.root.der(), &ca));
}

#[test]
fn a_request_stays_until_its_chain_is_imported_then_key_changes() {
    let (company, ca) = (Company::new(), requesting());
    let request = |ca: &Ca| ca.listener_request_pem().unwrap().unwrap();
    let (first, key) = (request(&ca), company.chain(&ca));
    let (ca, step) = again(&ca).request_listener_ca().unwrap();
    assert_eq!(step, RotationStep::Unchanged);
    assert!(crate::csr::is_same_request(
        first.as_bytes(),
        request(&ca).as_bytes()
    ));
    let before = import(ca, &key);
    let (ca, step) = before.request_listener_ca().unwrap();
    assert_eq!(step, RotationStep::Applied);
    assert!(!crate::csr::is_same_request(
        first.as_bytes(),
        request(&ca).as_bytes()
    ));
    assert!(
        trusts(company.root.der(), &ca),
        "the old chain is in use meanwhile"
    );
    let other = Company::new();
    let chain = other.chain(&ca);
    let ca = import(ca, &chain);
    assert!(trusts(other.root.der(), &ca) && !trusts(company.root.der(), &ca));
}

#[test]
fn a_chain_renewed_for_the_same_key_needs_no_new_request() {
    let (company, ca) = (Company::new(), requesting());
    let (first, second) = (company.chain(&ca), company.chain(&ca));
    let ca = import(ca, &first);
    let before = ca.version();
    let ca = import(ca, &second);
    assert!(trusts(company.root.der(), &ca) && ca.version() != before);
}

#[test]
fn a_ca_signs_the_request_with_every_kind_of_key() {
    for kind in [
        &rcgen::PKCS_RSA_SHA256,
        &rcgen::PKCS_ECDSA_P384_SHA384,
        &rcgen::PKCS_ECDSA_P521_SHA512,
        &rcgen::PKCS_ED25519,
    ] {
        let (company, ca) = (Company::with(kind, |_| {}, |_| {}), requesting());
        let chain = company.chain(&ca);
        assert!(trusts(company.root.der(), &import(ca, &chain)), "{kind:?}");
    }
}

#[test]
fn a_leaf_expires_no_later_than_any_certificate_of_its_chain() {
    let company = Company::with(
        &rcgen::PKCS_ECDSA_P256_SHA256,
        |_| {},
        |params| params.not_after = OffsetDateTime::now_utc() + Span::hours(2),
    );
    let ca = requesting();
    let chain = company.chain(&ca);
    let ca = import(ca, &chain);
    let first = ca.listener_ca().unwrap().first_to_expire;
    assert_eq!(first.subject, "Issuing");
    let ends = first.not_after;
    assert_eq!(leaf(&ca).not_after(), ends);
    assert!(ends.as_secs() < UnixTime::now().as_secs() + DAY.as_secs());
}

#[test]
fn an_expired_chain_gives_way_to_our_own_intermediate() {
    let (company, ca) = (Company::new(), requesting());
    let chain = company.chain(&ca);
    let mut ca = import(ca, &chain);
    ca.listeners.chain.as_mut().unwrap().signer.parsed.not_after = 1;
    assert!(trusts(ca.root(), &ca) && !trusts(company.root.der(), &ca));
}

#[test]
fn a_listener_shows_our_own_intermediate_as_soon_as_the_chain_has_expired() {
    let (company, ca) = (Company::new(), requesting());
    let chain = company.chain(&ca);
    let ca = import(ca, &chain);
    let mut ended = again(&ca);
    let live = LiveCa::new(ca);
    let resolver =
        SniCertResolver::new(live.clone(), vec![], Arc::new(|_| Some(KnownName::Node))).unwrap();
    let shown = || resolver.leaf_for_sni(Some("edge-1")).unwrap().cert[1].clone();
    let before = shown();
    assert_eq!(before, pem::parse_certificates(&chain).unwrap()[0]);
    // The same chain at a later time.
    ended
        .listeners
        .chain
        .as_mut()
        .unwrap()
        .signer
        .parsed
        .not_after = 1;
    assert_ne!(
        ended.version(),
        live.get().version(),
        "a gateway notices it"
    );
    live.swap(ended);
    assert_eq!(
        facts_of(&shown()).uris,
        ["spiffe://td.example/issuer/listeners"]
    );
}

#[test]
fn a_ca_that_an_earlier_version_had_signed_is_read() {
    let ca = requesting();
    let mut file = serde_json::to_value(CaFile::from_ca(&ca)).unwrap();
    file["roots"][0]["above"] = "-----BEGIN CERTIFICATE-----".into();
    let read = serde_json::from_value::<CaFile>(file).unwrap().into_ca();
    let again = read.unwrap();
    assert_eq!(again.version(), ca.version());
    let written = serde_json::to_value(CaFile::from_ca(&again)).unwrap();
    assert!(written["roots"][0].get("above").is_none());
}

fn facts_of(certificate: &CertificateDer<'_>) -> Certificate {
    Certificate::parse(certificate).unwrap()
}

/// Permits this DNS name, and no IP address.
fn limit(params: &mut CertificateParams, name: &str) {
    let all = rcgen::CidrSubnet::V4([0; 4], [0; 4]);
    params.name_constraints = Some(rcgen::NameConstraints {
        permitted_subtrees: vec![rcgen::GeneralSubtree::DnsName(name.into())],
        excluded_subtrees: vec![rcgen::GeneralSubtree::IpAddress(all)],
    });
}

#[test]
fn names_that_a_chain_does_not_permit_have_certificates_of_our_own_ca() {
    let (company, ca) = (Company::new(), requesting());
    let own = company.sign(&ca, |it| limit(it, "edge-1"));
    let chain = own + &company.issuing.pem() + &company.root.pem();
    let [edge, address] = names().try_into().unwrap();
    let ca = ca.import_listener_chain(&chain, std::slice::from_ref(&edge));
    let ca = again(&ca.unwrap().0);
    assert!(ca.listener_ca().unwrap().has_name_constraints);
    let below = |names: &[HostName]| {
        let leaf = ca.issue_listener(names, DAY).unwrap();
        leaf.chain()[1] == pem::parse_certificates(&chain).unwrap()[0]
    };
    let edge_2 = HostName::parse("edge-2").unwrap();
    assert!(below(std::slice::from_ref(&edge)) && below(&[]));
    assert!(!below(&[edge.clone(), address.clone()]) && !below(std::slice::from_ref(&edge_2)));
    let outside = vec![address.clone(), edge_2.clone()];
    assert_eq!(ca.names_outside_chain(vec![edge, address, edge_2]), outside);
    let reported = || {
        ca.listeners
            .chain
            .as_ref()
            .unwrap()
            .reported
            .lock()
            .unwrap()
            .len()
    };
    assert_eq!(reported(), 2);
    assert!(!below(&outside[1..]));
    assert_eq!(reported(), 2, "once for each name");
}

#[test]
fn an_address_is_no_common_name() {
    let ca = requesting();
    let common = |names: &[HostName]| {
        let leaf = ca.issue_listener(names, DAY).unwrap();
        facts_of(&leaf.chain()[0]).common_name.unwrap()
    };
    let [edge, address] = names().try_into().unwrap();
    assert_eq!(common(&[address.clone(), edge]), "edge-1");
    assert_eq!(common(&[address]), "causeway listener");
}

#[test]
fn a_new_request_replaces_a_pending_one_and_its_key() {
    let (company, ca) = (Company::new(), requesting());
    let stolen = company.chain(&ca);
    let (ca, step) = ca.renew_listener_request().unwrap();
    let ca = again(&ca);
    assert_eq!((step, ca.listeners.generation), (RotationStep::Applied, 2));
    let chain = company.chain(&ca);
    assert!(ca.import_listener_chain(&stolen, &[]).is_err());
    let (ca, _) = requesting().renew_listener_request().unwrap();
    assert!(ca.import_listener_chain(&chain, &[]).is_err());
}

#[test]
fn a_replaced_root_stays_for_clients_until_its_chain_has_ended() {
    let (first, second) = (Company::new(), Company::new());
    let mut ca = requesting();
    for _ in 0..2 {
        let chain = first.chain(&ca);
        ca = import(ca, &chain).request_listener_ca().unwrap().0;
    }
    let ours = ca.bundle_pem();
    assert_eq!(ca.client_bundle_pem(), ours.clone() + &first.root.pem());
    let chain = second.chain(&ca);
    let mut ca = import(ca, &chain);
    let both = ours.clone() + &second.root.pem() + &first.root.pem();
    assert_eq!(ca.client_bundle_pem(), both);
    ca.listeners.former_roots[0].expires = 1;
    assert_eq!(ca.client_bundle_pem(), ours + &second.root.pem());
}

#[test]
fn a_chain_that_is_removed_gives_way_to_our_own_intermediate() {
    let (company, ca) = (Company::new(), requesting());
    let chain = company.chain(&ca);
    let (ca, step) = import(ca, &chain).remove_listener_chain();
    let ca = again(&ca);
    assert_eq!((step, ca.listeners.generation), (RotationStep::Applied, 3));
    assert!(trusts(ca.root(), &ca) && !trusts(company.root.der(), &ca));
    assert_eq!(
        (ca.listener_ca(), ca.client_bundle_pem()),
        (None, ca.bundle_pem())
    );
    assert_eq!(ca.remove_listener_chain().1, RotationStep::Unchanged);
}

#[test]
fn a_chain_in_the_reverse_order_is_imported() {
    let (company, ca) = (Company::new(), requesting());
    let own = company.sign(&ca, |_| {});
    let ca = import(ca, &(company.root.pem() + &company.issuing.pem() + &own));
    assert!(trusts(company.root.der(), &ca));
    let chain = own + &company.issuing.pem() + &company.root.pem();
    let (_, step) = ca.import_listener_chain(&chain, &names()).unwrap();
    assert_eq!(step, RotationStep::Unchanged);
}

#[test]
fn names_of_certificates_are_shown_without_control_characters() {
    let company = Company::with(
        &rcgen::PKCS_ECDSA_P256_SHA256,
        |it| {
            it.distinguished_name
                .push(DnType::CommonName, "Ro\u{1b}[2Kot\u{202e}");
        },
        |_| {},
    );
    let ca = requesting();
    let chain = company.chain(&ca);
    let root = import(ca, &chain).listener_ca().unwrap().root;
    assert_eq!(root.subject, "Ro\u{fffd}[2Kot\u{fffd}");
    assert_eq!(
        root.fingerprint,
        Fingerprint::of_certificate(company.root.der())
    );
}

#[test]
fn a_chain_that_is_wrong_is_refused_with_the_reason() {
    let ok: Change = |_| {};
    let client: Change = |it| it.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let no_usage: Change = |it| it.extended_key_usages.clear();
    let both: Change = |it| {
        it.extended_key_usages
            .push(ExtendedKeyUsagePurpose::ClientAuth);
    };
    let any: Change = |it| it.extended_key_usages.push(ExtendedKeyUsagePurpose::Any);
    let past: Change = |it| it.not_after = OffsetDateTime::now_utc() - Span::days(1);
    let future: Change = |it| it.not_before = OffsetDateTime::now_utc() + Span::days(1);
    let no_ca: Change = |it| it.is_ca = IsCa::ExplicitNoCa;
    let no_signing: Change = |it| it.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    let narrow: Change = |it| it.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    let other_name: Change = |it| limit(it, "other.example");
    for (root, issuing, own, why) in [
        (ok, ok, no_ca, "Listeners may not sign certificates"),
        (ok, ok, no_signing, "Listeners may not sign certificates"),
        (ok, ok, past, "Listeners expired at"),
        (ok, ok, future, "Listeners is not valid before"),
        (ok, ok, client, "Listeners is not for servers"),
        (
            ok,
            ok,
            no_usage,
            "Listeners may sign certificates of clients",
        ),
        (ok, ok, both, "Listeners may sign certificates of clients"),
        (ok, ok, any, "extendedKeyUsage=serverAuth"),
        (ok, no_signing, ok, "Issuing may not sign certificates"),
        (ok, past, ok, "Issuing expired at"),
        (ok, client, ok, "Issuing is not for servers"),
        (
            ok,
            narrow,
            ok,
            "Issuing permits 0 CAs below it (pathLenConstraint), and 1 stand",
        ),
        (past, ok, ok, "Root expired at"),
        (
            narrow,
            ok,
            ok,
            "Root permits 0 CAs below it (pathLenConstraint), and 2 stand",
        ),
        (ok, other_name, ok, "name constraints do not permit edge-1"),
        (ok, ok, other_name, "name constraints do not permit edge-1"),
    ] {
        let company = Company::with(&rcgen::PKCS_ECDSA_P256_SHA256, root, issuing);
        let ca = requesting();
        let chain = company.sign(&ca, own) + &company.issuing.pem() + &company.root.pem();
        let refused = ca.import_listener_chain(&chain, &names()).unwrap_err();
        assert!(refused.to_string().contains(why), "{why}: {refused}");
    }
}

#[test]
fn a_chain_with_wrong_certificates_or_order_is_refused() {
    let (company, other) = (Company::new(), Company::new());
    let ca = requesting();
    let text = serde_json::to_string(&CaFile::from_ca(&ca)).unwrap();
    let own = company.sign(&ca, |_| {});
    let (issuing, root) = (company.issuing.pem(), company.root.pem());
    for (chain, why) in [
        (String::new(), "no certificate"),
        (
            own.clone(),
            "it ends at Listeners, which Issuing has signed: append",
        ),
        (
            own.clone() + &issuing,
            "it ends at Issuing, which Root has signed: append",
        ),
        (
            own.clone() + &root,
            "Listeners is signed by Issuing, but the next certificate is Root",
        ),
        (
            own.clone() + &root + &issuing,
            "Listeners is signed by Issuing, but the next certificate is Root",
        ),
        (
            issuing.clone() + &root,
            "another public key than the request",
        ),
        (
            signed_request(&requesting()),
            "another public key than the request",
        ),
        (
            own.clone() + &other.issuing.pem() + &root,
            "signature of Listeners is not by the key of Issuing",
        ),
        (
            own.clone() + &issuing + &other.root.pem(),
            "signature of Issuing is not by the key of Root",
        ),
    ] {
        let ca = serde_json::from_str::<CaFile>(&text)
            .unwrap()
            .into_ca()
            .unwrap();
        let imported = ca.import_listener_chain(&chain, &names());
        let refused = imported.unwrap_err().to_string();
        assert!(refused.contains(why), "{why}: {refused}");
    }
    let none = Ca::create(&TrustDomain::parse("td.example").unwrap()).unwrap();
    let refused = none
        .import_listener_chain(&company.chain(&ca), &[])
        .unwrap_err();
    assert!(
        refused.to_string().contains("`causeway ca csr`"),
        "{refused}"
    );
}

#[test]
fn a_chain_vouches_for_no_edge_and_no_client() {
    let (company, ca) = (Company::new(), requesting());
    let chain = company.chain(&ca);
    let before = ca.anchors().len();
    let ca = import(ca, &chain);
    assert_eq!(ca.anchors().len(), before);
    let client = ca.issue_client("ann", &[], DAY).unwrap();
    let edge_key = crate::PrivateKey::generate().unwrap();
    let key = VerifiedPublicKey::verify(&edge_key.request().unwrap()).unwrap();
    let edge = ca.issue_edge(&key, &NodeName::parse("edge-1").unwrap(), DAY);
    let edge = pem::parse_certificates(&edge.unwrap().pem()).unwrap();
    let root = webpki::anchor_from_trusted_cert(company.root.der()).unwrap();
    let listeners = &leaf(&ca).chain()[1..].to_vec();
    for own in [edge.as_slice(), client.chain()] {
        let behind = [&own[1..], listeners].concat();
        let leaf = EndEntityCert::try_from(&own[0]).unwrap();
        let verified = leaf.verify_for_usage(
            provider().signature_verification_algorithms.all,
            std::slice::from_ref(&root),
            &behind,
            UnixTime::now(),
            KeyUsage::client_auth(),
            None,
            None,
        );
        assert!(matches!(verified, Err(webpki::Error::UnknownIssuer)));
    }
}

#[test]
fn a_listener_shows_an_imported_chain_from_then_on() {
    let (company, ca) = (Company::new(), requesting());
    let (live, chain) = (LiveCa::new(again(&ca)), company.chain(&ca));
    let resolver =
        SniCertResolver::new(live.clone(), vec![], Arc::new(|_| Some(KnownName::Node))).unwrap();
    let before = resolver.leaf_for_sni(Some("edge-1")).unwrap();
    live.swap(again(&ca));
    assert!(Arc::ptr_eq(
        &before,
        &resolver.leaf_for_sni(Some("edge-1")).unwrap()
    ));
    live.swap(import(ca, &chain));
    let after = resolver.leaf_for_sni(Some("edge-1")).unwrap();
    assert_eq!(after.cert.last(), Some(company.issuing.der()));
}
