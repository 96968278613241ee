use super::*;
use crate::{Ca, GatewayName, LeafCertificate, PrivateKey, TrustDomain, VerifiedPublicKey};
use rustls::{ClientConnection, ProtocolVersion, ServerConnection};
use std::time::Duration;

const HOUR: Duration = Duration::from_hours(1);

fn ca() -> Ca {
    Ca::create(&TrustDomain::parse("td").unwrap()).unwrap()
}

fn edge(ca: &Ca, node: &str) -> EdgeIdentity {
    let key = PrivateKey::generate().unwrap();
    let csr = VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
    let issued = ca
        .issue_edge(&csr, &NodeName::parse(node).unwrap(), HOUR)
        .unwrap();
    EdgeIdentity::new(&ca.bundle_pem(), &issued.pem(), &key.key_pem()).unwrap()
}

/// Returns the configuration of this edge, in a pool with these members.
fn site(edge: &EdgeIdentity, members: &[&str]) -> Arc<PoolMemberTls> {
    let members: Vec<String> = members.iter().map(ToString::to_string).collect();
    let is_member = move |node: &NodeName| members.iter().any(|member| member == node.as_str());
    PoolMemberTls::new(edge, Arc::new(is_member)).unwrap()
}

/// Returns both ends of a handshake, or the error that prevents it.
fn shake(
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    meant: &str,
) -> Result<(ClientConnection, ServerConnection), Error> {
    let name = ServerName::try_from(meant.to_owned()).unwrap();
    let mut client = ClientConnection::new(client, name)?;
    let mut server = ServerConnection::new(server)?;
    for _ in 0..4 {
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).unwrap();
        }
        let mut read = &bytes[..];
        while !read.is_empty() {
            server.read_tls(&mut read).unwrap();
            server.process_new_packets()?;
        }
        bytes.clear();
        while server.wants_write() {
            server.write_tls(&mut bytes).unwrap();
        }
        let mut read = &bytes[..];
        while !read.is_empty() {
            client.read_tls(&mut read).unwrap();
            client.process_new_packets()?;
        }
    }
    assert!(!client.is_handshaking() && !server.is_handshaking());
    Ok((client, server))
}

const BOTH: [&str; 2] = ["edge-1", "edge-2"];

#[test]
fn pool_members_use_tls_1_3_without_resumption() {
    let ca = ca();
    let (one, two) = (edge(&ca, "edge-1"), edge(&ca, "edge-2"));
    let (near, far) = (
        site(&one, &BOTH).client_config().unwrap(),
        site(&two, &BOTH).server_config().unwrap(),
    );
    for _ in 0..2 {
        let (client, server) = shake(near.clone(), far.clone(), "edge-2").unwrap();
        assert_eq!(client.protocol_version(), Some(ProtocolVersion::TLSv1_3));
        assert_eq!(client.handshake_kind(), Some(rustls::HandshakeKind::Full));
        assert_eq!(server.alpn_protocol(), Some(&b"http/1.1"[..]));
        assert_eq!(server.server_name(), None, "no name travels");
        let shown = server.peer_certificates().unwrap();
        let known = site(&two, &BOTH).verify_member(shown, UnixTime::now());
        assert_eq!(known.unwrap(), one.node);
    }
}

#[test]
fn a_node_of_another_pool_is_refused_at_either_end() {
    let ca = ca();
    let (one, two) = (edge(&ca, "edge-1"), edge(&ca, "edge-2"));
    for (near, far) in [(&BOTH[..1], &BOTH[..]), (&BOTH[..], &BOTH[1..])] {
        let refused = shake(
            site(&one, near).client_config().unwrap(),
            site(&two, far).server_config().unwrap(),
            "edge-2",
        );
        let why = refused.map(drop).unwrap_err().to_string();
        assert!(why.contains("NotAMember"), "{why}");
    }
}

#[test]
fn a_different_pool_member_than_expected_is_refused() {
    let ca = ca();
    let (one, two) = (edge(&ca, "edge-1"), edge(&ca, "edge-2"));
    let all = ["edge-1", "edge-2", "edge-3"];
    let refused = shake(
        site(&one, &all).client_config().unwrap(),
        site(&two, &all).server_config().unwrap(),
        "edge-3",
    );
    let why = refused.map(drop).unwrap_err().to_string();
    assert!(why.contains("UnexpectedMember"), "{why}");
}

#[test]
fn a_certificate_of_another_ca_is_refused_for_every_name() {
    let (ours, other) = (ca(), ca());
    let (one, two) = (edge(&ours, "edge-1"), edge(&other, "edge-2"));
    for (dials, serves) in [(&one, &two), (&two, &one)] {
        let refused = shake(
            site(dials, &BOTH).client_config().unwrap(),
            site(serves, &BOTH).server_config().unwrap(),
            serves.node.as_str(),
        );
        assert!(matches!(refused, Err(Error::InvalidCertificate(_))));
    }
}

/// Returns the rejection of a peer of another kind that presents this leaf.
fn came_with(ca: &Ca, leaf: &LeafCertificate) -> PoolMemberRejected {
    let one = edge(ca, "edge-1");
    let everybody: IsMemberFn = Arc::new(|_| true);
    let site = PoolMemberTls::new(&one, everybody).unwrap();
    site.verify_member(leaf.chain(), UnixTime::now())
        .unwrap_err()
}

#[test]
fn gateways_and_clients_of_the_same_ca_are_no_neighbours() {
    let ca = ca();
    let names = [GatewayName::parse("gw.example").unwrap()];
    for leaf in [
        ca.issue_gateway(&names, HOUR).unwrap(),
        ca.issue_client("edge-2", &[], HOUR).unwrap(),
    ] {
        let refused = came_with(&ca, &leaf);
        assert!(matches!(refused, PoolMemberRejected::Peer(_)), "{refused}");
    }
}

#[test]
fn expired_certificates_are_refused() {
    let ca = ca();
    let one = edge(&ca, "edge-1");
    let later = UnixTime::since_unix_epoch(Duration::from_secs(one.leaf.not_after().as_secs() + 1));
    let refused = site(&one, &BOTH).verify_member(one.leaf.chain(), later);
    let expired = matches!(
        refused,
        Err(PoolMemberRejected::Peer(PeerRejected::Expired { .. }))
    );
    assert!(expired, "{refused:?}");
}

#[test]
fn a_certificate_of_another_system_has_no_site() {
    let mut given = edge(&ca(), "edge-1");
    given.is_external = true;
    assert!(PoolMemberTls::new(&given, Arc::new(|_| true)).is_err());
}

#[test]
fn a_member_with_a_slow_clock_accepts_its_neighbours() {
    let ca = ca();
    let (one, two) = (edge(&ca, "edge-1"), edge(&ca, "edge-2"));
    let epoch = UnixTime::since_unix_epoch(Duration::ZERO);
    let member = site(&one, &BOTH).verify_member(two.leaf.chain(), epoch);
    assert_eq!(member.unwrap(), two.node);
}
