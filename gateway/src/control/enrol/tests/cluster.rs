//! Joining with a certificate that a signer of the cluster has issued.

use super::{Counter, over_the_port};
use crate::{
    control::tests::world::{World, name},
    state::ClusterNode,
};
use causeway_certs::{
    ClusterCa, EdgeIdentity, GatewayRevocations, LeafCertificate, SignerProfile,
    verify::{TicketSecret, csr_exchange_client},
};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair,
};
use rustls::ClientConfig;
use serde_json::{Value, json};
use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

/// The cluster's CA, which also issues certificates that are not for nodes, and the age of the certificates that it issues.
struct Signer(Issuer<'static, KeyPair>, Duration);

impl Signer {
    /// Creates the CA, and makes the gateway trust it.
    fn believed_by(world: &World) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name = subject(None, "kubernetes");
        let key = KeyPair::generate().unwrap();
        let root = params.self_signed(&key).unwrap().der().clone();
        let trust = ClusterCa::new(vec![root], SignerProfile::Kubelet).unwrap();
        world.believe(trust, &TicketSecret::random());
        Self(Issuer::new(params, key), Duration::from_mins(5))
    }

    fn client(&self, organization: &str, name: &str) -> LeafCertificate {
        let mut params = CertificateParams::default();
        params.distinguished_name = subject(Some(organization), name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let began = SystemTime::now() - self.1;
        params.not_before = began.into();
        params.not_after = (began + Duration::from_hours(2)).into();
        let key = KeyPair::generate().unwrap();
        let made = params.signed_by(&key, &self.0).unwrap();
        LeafCertificate::load(&made.pem(), &key.serialize_pem()).unwrap()
    }

    fn kubelet(&self, node: &str) -> LeafCertificate {
        self.client("system:nodes", &format!("system:node:{node}"))
    }
}

fn subject(organization: Option<&str>, common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    if let Some(organization) = organization {
        name.push(DnType::OrganizationName, organization);
    }
    name.push(DnType::CommonName, common);
    name
}

fn showing(world: &World, leaf: &LeafCertificate) -> Arc<ClientConfig> {
    csr_exchange_client(&world.ca.bundle_pem(), leaf, &GatewayRevocations::default()).unwrap()
}

async fn asks(counter: &Counter, path: &str, leaf: &LeafCertificate) -> Value {
    let body = json!({ "csr": counter.csr(), "version": "1" });
    let config = showing(&counter.world, leaf);
    over_the_port(&counter.world, config, path, body).await
}

#[tokio::test]
async fn a_node_with_its_cluster_certificate_gets_one_of_our_ca() {
    let counter = Counter::open();
    let world = &counter.world;
    let mut signer = Signer::believed_by(world);
    let edge = ClusterNode {
        is_edge: true,
        ..ClusterNode::default()
    };
    let members = [
        (name("edge-1"), edge),
        (name("cloud"), ClusterNode::default()),
    ];
    world.nodes.replace_cluster(members.into());
    let kubelet = signer.kubelet("edge-1");
    let message = asks(&counter, "/v1/vouched", &kubelet).await;
    let (root, chain) = (&message["root"], &message["certificate"]);
    let (root, chain) = (root.as_str().unwrap(), chain.as_str().unwrap());
    let edge = EdgeIdentity::new(root, chain, &counter.key.key_pem()).unwrap();
    assert_eq!(edge.node, name("edge-1"));
    world.joined(&edge, "a", 0).await;

    // A certificate that is presented a second time is still accepted; an older one is not.
    let again = asks(&counter, "/v1/vouched", &kubelet).await;
    assert_eq!(again["node"], "edge-1");
    signer.1 = Duration::from_mins(10);
    let earlier = signer.kubelet("edge-1");
    for (leaf, path, reason) in [
        (&earlier, "/v1/vouched", "certificate_replaced"),
        (&kubelet, "/v1/renew", "certificate_missing"),
        (&signer.kubelet("cloud"), "/v1/vouched", "node_refused"),
        (&signer.kubelet("edge-9"), "/v1/vouched", "node_refused"),
        (&edge.leaf, "/v1/vouched", "certificate_missing"),
    ] {
        let message = asks(&counter, path, leaf).await;
        assert_eq!(message["reason"], reason, "{message}");
    }
}

#[tokio::test]
async fn other_cluster_ca_certificates_neither_enrol_nor_open_tunnels() {
    let counter = Counter::open();
    let world = &counter.world;
    let signer = Signer::believed_by(world);
    for leaf in [
        signer.client("system:masters", "admin"),
        signer.client("system:masters", "system:node:edge-1"),
        signer.client("system:nodes", "edge-1"),
    ] {
        let io = world.tls(showing(world, &leaf)).await;
        let mut io = io.unwrap();
        // The client's handshake ends before the gateway has verified the certificate.
        let message = tokio::io::AsyncReadExt::read(&mut io, &mut [0; 1]).await;
        assert!(!matches!(message, Ok(1)), "{message:?}");
    }
    world
        .until(|world| {
            world.counted(r#"handshakes_failed_total{listener="tunnel",why="certificate"} 3"#)
        })
        .await;
    let mut tunnel = ClientConfig::clone(&showing(world, &signer.kubelet("edge-1")));
    tunnel.alpn_protocols = vec![b"rh2".to_vec()];
    let io = world.tls(Arc::new(tunnel)).await;
    let refused = match io {
        Ok(mut io) => tokio::io::AsyncReadExt::read(&mut io, &mut [0; 1]).await,
        Err(error) => Err(error),
    };
    assert!(!matches!(refused, Ok(1)), "{refused:?}");
    assert!(world.store.nodes().all().unwrap().is_empty());
}
