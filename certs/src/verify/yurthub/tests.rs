use super::*;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    SanType,
};
use std::time::Duration;

/// Address at which the certificate is presented.
const AT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 1, 0, 5));

struct Cluster {
    root: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl Cluster {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params
            .distinguished_name
            .push(DnType::CommonName, "kubernetes");
        let key = KeyPair::generate().unwrap();
        Self {
            root: params.self_signed(&key).unwrap().der().clone(),
            issuer: Issuer::new(params, key),
        }
    }

    /// Returns a certificate with this group and name, for this use, with this remaining lifetime.
    fn made(
        &self,
        (group, name): (&str, &str),
        usage: ExtendedKeyUsagePurpose,
        life: Duration,
    ) -> LeafCertificate {
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::OrganizationName, group);
        params.distinguished_name.push(DnType::CommonName, name);
        params.subject_alt_names = vec![SanType::IpAddress(AT)];
        params.extended_key_usages = vec![usage];
        let now = std::time::SystemTime::now();
        params.not_before = (now - Duration::from_hours(2)).into();
        params.not_after = (now + life).into();
        let key = KeyPair::generate().unwrap();
        let made = params.signed_by(&key, &self.issuer).unwrap();
        LeafCertificate::load(&made.pem(), &key.serialize_pem()).unwrap()
    }
}

#[test]
fn only_a_nodes_own_certificate_of_the_clusters_ca_reads() {
    let (cluster, other) = (Cluster::new(), Cluster::new());
    let day = Duration::from_hours(24);
    let server = ExtendedKeyUsagePurpose::ServerAuth;
    let client = ExtendedKeyUsagePurpose::ClientAuth;
    let node = ("system:nodes", "system:node:edge-1");
    let shown = cluster.made(node, server.clone(), day);
    let roots = std::slice::from_ref(&cluster.root);
    let hubs = YurtHubServerTls::new(&shown, roots, AT).unwrap();
    let other_address = YurtHubServerTls::new(&shown, roots, IpAddr::from([10, 1, 0, 6]));
    let why = other_address.unwrap_err().to_string();
    assert!(why.contains("not for 10.1.0.6"), "{why}");
    let judged = |leaf: &LeafCertificate, after: Duration| {
        let now = UnixTime::now().as_secs() + after.as_secs();
        hubs.verify_node(
            leaf.chain(),
            UnixTime::since_unix_epoch(Duration::from_secs(now)),
        )
    };
    let good = cluster.made(node, client.clone(), day);
    assert_eq!(judged(&good, Duration::ZERO).unwrap(), "edge-1");
    assert!(
        judged(&good, 2 * day).is_err(),
        "the certificate has expired by then"
    );
    for (leaf, why) in [
        (other.made(node, client.clone(), day), "another CA's"),
        (cluster.made(node, server, day), "a server's"),
        (
            cluster.made(("system:masters", "admin"), client.clone(), day),
            "a person's",
        ),
        (
            cluster.made(("system:nodes", "edge-1"), client.clone(), day),
            "of another name",
        ),
        (
            cluster.made(("nodes", "system:node:edge-1"), client, day),
            "of another group",
        ),
    ] {
        assert!(judged(&leaf, Duration::ZERO).is_err(), "{why}");
    }
    assert_eq!(
        hubs.verify_node(&[], UnixTime::now()),
        Err(PeerRejected::NoCertificate),
        "without any"
    );
}
