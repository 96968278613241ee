use super::*;
use crate::{PrivateKey, VerifiedPublicKey};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, SanType,
};
use rustls_pki_types::{CertificateSigningRequestDer, pem::PemObject};
use x509_parser::x509::X509Name;

struct Cluster {
    trust: ClusterCa,
    issuer: Issuer<'static, KeyPair>,
}

impl Cluster {
    fn new(subject: SignerProfile) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name = name(&[(DnType::CommonName, "kubernetes")]);
        let key = KeyPair::generate().unwrap();
        let root = params.self_signed(&key).unwrap().der().clone();
        Self {
            trust: ClusterCa::new(vec![root], subject).unwrap(),
            issuer: Issuer::new(params, key),
        }
    }

    fn node(&self, params: &CertificateParams) -> Result<NodeName, PeerRejected> {
        let key = KeyPair::generate().unwrap();
        let made = params.signed_by(&key, &self.issuer).unwrap();
        let shown = self
            .trust
            .verify_node(Some(&[made.der().clone()]), UnixTime::now());
        shown.map(|shown| shown.node)
    }
}

fn name(parts: &[(DnType, &str)]) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    for (kind, value) in parts {
        name.push(kind.clone(), *value);
    }
    name
}

fn client(parts: &[(DnType, &str)]) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = name(parts);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let now = std::time::SystemTime::now();
    params.not_before = (now - Duration::from_mins(5)).into();
    params.not_after = (now + Duration::from_hours(2)).into();
    params
}

const KUBELET: [(DnType, &str); 2] = [
    (DnType::OrganizationName, "system:nodes"),
    (DnType::CommonName, "system:node:edge-1"),
];

#[test]
fn a_node_is_known_by_its_exact_subject() {
    let kubelets = Cluster::new(SignerProfile::Kubelet);
    assert_eq!(kubelets.node(&client(&KUBELET)).unwrap().as_str(), "edge-1");
    let own = [
        (DnType::OrganizationName, "causeway:edges"),
        (DnType::CommonName, "causeway:edge:edge-1"),
    ];
    let clients = Cluster::new(SignerProfile::Client);
    assert_eq!(clients.node(&client(&own)).unwrap().as_str(), "edge-1");
    // A certificate of one signer is not accepted as one of the other.
    let refused = clients.node(&client(&KUBELET)).unwrap_err();
    assert!(matches!(refused, PeerRejected::Subject { .. }), "{refused}");
    assert!(kubelets.node(&client(&own)).is_err());
}

#[test]
fn no_other_certificate_of_the_clusters_ca_is_an_edges() {
    let cluster = Cluster::new(SignerProfile::Kubelet);
    let (organization, common) = (DnType::OrganizationName, DnType::CommonName);
    let node = (common.clone(), "system:node:edge-1");
    let nodes = (organization.clone(), "system:nodes");
    for parts in [
        vec![(common.clone(), "admin")],
        vec![node.clone()],
        vec![nodes.clone()],
        vec![(organization.clone(), "system:masters"), node.clone()],
        vec![(organization, "system:nodes "), node.clone()],
        vec![nodes.clone(), (common.clone(), "system:node:")],
        vec![nodes.clone(), (common.clone(), "system:node:Edge-1")],
        vec![nodes.clone(), (common, "system:nodeedge-1")],
        vec![nodes, node, (DnType::OrganizationalUnitName, "somewhere")],
    ] {
        let refused = cluster.node(&client(&parts)).unwrap_err();
        assert!(matches!(refused, PeerRejected::Subject { .. }), "{parts:?}");
    }
    let mut named = client(&KUBELET);
    named.subject_alt_names = vec![SanType::DnsName("listener".try_into().unwrap())];
    assert!(matches!(
        cluster.node(&named),
        Err(PeerRejected::Subject { .. })
    ));
    for usages in [vec![], vec![ExtendedKeyUsagePurpose::ServerAuth]] {
        let mut params = client(&KUBELET);
        params.extended_key_usages = usages;
        assert!(cluster.node(&params).is_err());
    }
    // A kubelet's own certificate is valid for a year.
    let mut long = client(&KUBELET);
    long.not_after = (std::time::SystemTime::now() + Duration::from_hours(4)).into();
    let refused = cluster.node(&long).unwrap_err();
    assert!(refused.to_string().contains("its lifetime is"), "{refused}");
    // A certificate of another cluster, and one of no cluster.
    let other = Cluster::new(SignerProfile::Kubelet);
    let key = KeyPair::generate().unwrap();
    let made = client(&KUBELET).signed_by(&key, &other.issuer).unwrap();
    let chain = [made.der().clone()];
    assert!(
        cluster
            .trust
            .verify_node(Some(&chain), UnixTime::now())
            .is_err()
    );
    assert_eq!(
        cluster.trust.verify_node(None, UnixTime::now()),
        Err(PeerRejected::NoCertificate)
    );
}

#[test]
fn of_two_organizations_or_names_neither_counts() {
    let country = (DnType::CountryName, "system:masters");
    let parts = [&KUBELET[..], &[country]].concat();
    let key = KeyPair::generate().unwrap();
    let made = client(&parts).self_signed(&key).unwrap();
    let (_, parsed) = X509Certificate::from_der(made.der()).unwrap();
    // rcgen writes one attribute of each kind: the test turns another attribute into the second.
    let written = parsed.subject().as_raw().to_vec();
    let at = written.windows(3).position(|oid| oid == [0x55, 4, 6]);
    for kind in [10, 3] {
        let mut twice = written.clone();
        twice[at.unwrap() + 2] = kind;
        let (_, name) = X509Name::from_der(&twice).unwrap();
        assert_eq!(
            SignerProfile::Kubelet.node_of_subject(&name),
            None,
            "{name}"
        );
    }
}

#[test]
fn a_request_for_these_signers_has_only_the_expected_subject() {
    let key = PrivateKey::generate().unwrap();
    let node = |name: &str| NodeName::parse(name).unwrap();
    let der = |pem: &str| {
        let der = CertificateSigningRequestDer::from_pem_slice(pem.as_bytes());
        der.unwrap().to_vec()
    };
    let subject = SignerProfile::Client;
    let request = der(&key.cluster_request(subject, &node("edge-1")).unwrap());
    VerifiedPublicKey::verify_subject(&request, subject, &node("edge-1")).unwrap();
    let refused = |subject, name| {
        let refused = VerifiedPublicKey::verify_subject(&request, subject, &node(name));
        refused.unwrap_err().to_string()
    };
    assert!(refused(subject, "edge-2").contains("is for node edge-1, and not for edge-2"));
    assert!(refused(SignerProfile::Kubelet, "edge-1").contains("has the subject"));
    let mut more = CertificateParams::default();
    more.distinguished_name = name(&[
        (DnType::OrganizationName, "causeway:edges"),
        (DnType::CommonName, "causeway:edge:edge-1"),
    ]);
    more.subject_alt_names = vec![SanType::DnsName("listener".try_into().unwrap())];
    let more = more.serialize_request(&KeyPair::generate().unwrap());
    let refused = VerifiedPublicKey::verify_subject(more.unwrap().der(), subject, &node("edge-1"));
    assert!(
        refused
            .unwrap_err()
            .to_string()
            .contains("more than its subject")
    );
}

#[test]
fn signers_that_make_no_clients_certificates_are_none_of_these() {
    for signer in ["causeway.io/edge", "kubernetes.io/kubelet-serving", ""] {
        assert_eq!(SignerProfile::from_signer_name(signer), None);
    }
}
