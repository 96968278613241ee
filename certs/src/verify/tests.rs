use super::*;
use crate::verify::roots::root_store;
use crate::verify_crls;
use crate::{
    Ca, Certificate, EdgeIdentity, Fingerprint, Identity, IssuerPurpose, LeafCertificate,
    ListenerName, NodeName, OpenMode, PrivateKey, Store, TrustDomain, VerifiedPublicKey,
};
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyPair, SanType};
use rustls::client::ClientConfig;
use rustls::crypto::aws_lc_rs::Ticketer;
use rustls::server::{ProducesTickets, ServerConfig};
use rustls::time_provider::TimeProvider;
use rustls::{CertificateError, ClientConnection, HandshakeKind, ServerConnection};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use std::io;
use std::sync::Arc;
use std::time::Duration;

const HOUR: Duration = Duration::from_hours(1);

struct World {
    ca: Ca,
    trust: TrustStore,
    tickets: TicketSecret,
}

impl World {
    fn new() -> Self {
        Self::with(Ca::create(&TrustDomain::parse("td").unwrap()).unwrap())
    }

    fn with(ca: Ca) -> Self {
        let trust = TrustStore::from_ca(&ca).unwrap();
        Self {
            ca,
            trust,
            tickets: TicketSecret::random(),
        }
    }

    fn gateway(&self) -> LeafCertificate {
        self.ca
            .issue_gateway(&[ListenerName::parse("gw.example").unwrap()], HOUR)
            .unwrap()
    }

    fn edge(&self) -> EdgeIdentity {
        let key = PrivateKey::generate().unwrap();
        let csr = VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
        let issued = self
            .ca
            .issue_edge(&csr, &NodeName::parse("edge-1").unwrap(), HOUR)
            .unwrap();
        EdgeIdentity::new(&self.ca.bundle_pem(), &issued.pem(), &key.key_pem()).unwrap()
    }

    fn client(&self) -> LeafCertificate {
        self.ca.issue_client("ann", &["ops".into()], HOUR).unwrap()
    }

    fn tunnel(&self) -> Arc<ServerConfig> {
        tunnel_server(self.gateway().resolver(), &self.trust, &self.tickets).unwrap()
    }

    fn join(&self) -> Arc<ServerConfig> {
        join_server(self.gateway().resolver(), &self.trust, None).unwrap()
    }

    /// Returns a faulty joining port, which issues tickets with these keys.
    fn leaky_join(&self, ticketer: Arc<dyn ProducesTickets>) -> Arc<ServerConfig> {
        let mut join = ServerConfig::clone(&self.join());
        (join.ticketer, join.send_tls13_tickets) = (ticketer, 2);
        Arc::new(join)
    }

    fn check(
        &self,
        chain: &[CertificateDer<'_>],
        purpose: Purpose,
    ) -> Result<Identity, PeerRejected> {
        check_peer(
            Some(chain),
            purpose,
            UnixTime::now(),
            &self.trust,
            &none_revoked,
        )
    }

    /// Returns the trust of a listener that accepts our clients and those of `other`.
    fn listener(&self, other: &Ca) -> TrustStore {
        let listener = ListenerClientTrust {
            accepts_own: true,
            client_roots: vec![other.root().clone()],
        };
        TrustStore::listener(&self.ca, &listener).unwrap()
    }
}

fn edge_1() -> Identity {
    Identity::Edge(NodeName::parse("edge-1").unwrap())
}

/// Returns a client that trusts `ca` for `edge-1`, with a certificate or none, as curl would.
fn curl(ca: &Ca, leaf: Option<&LeafCertificate>, alpn: &[&[u8]]) -> Arc<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(root_store([ca.root()]).unwrap());
    let mut config = match leaf {
        Some(leaf) => builder
            .with_client_auth_cert(leaf.chain().to_vec(), leaf.key())
            .unwrap(),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    Arc::new(config)
}

fn dial(
    client: &Arc<ClientConfig>,
    server: &Arc<ServerConfig>,
    name: &'static str,
) -> Result<(ClientConnection, ServerConnection), rustls::Error> {
    let name = ServerName::try_from(name).unwrap();
    let mut client = ClientConnection::new(Arc::clone(client), name).unwrap();
    let mut server = ServerConnection::new(Arc::clone(server)).unwrap();
    // Both ends finish: the client's certificate is verified, and tickets sent, last.
    for _ in 0..6 {
        pump(&mut client, &mut server)?;
        pump(&mut server, &mut client)?;
    }
    assert!(!client.is_handshaking() && !server.is_handshaking());
    Ok((client, server))
}

fn pump<A, B, C, D>(from: &mut A, to: &mut B) -> Result<(), rustls::Error>
where
    A: std::ops::DerefMut<Target = rustls::ConnectionCommon<C>>,
    B: std::ops::DerefMut<Target = rustls::ConnectionCommon<D>>,
    C: rustls::SideData,
    D: rustls::SideData,
{
    let mut wire = Vec::new();
    while from.wants_write() {
        from.write_tls(&mut wire).unwrap();
    }
    let mut wire = wire.as_slice();
    while !wire.is_empty() {
        to.read_tls(&mut wire).unwrap();
        to.process_new_packets()?;
    }
    Ok(())
}

#[derive(Debug)]
struct Later(Duration);

impl TimeProvider for Later {
    fn current_time(&self) -> Option<UnixTime> {
        Some(later(self.0))
    }
}

fn later(by: Duration) -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(UnixTime::now().as_secs()) + by)
}

#[test]
fn an_edge_and_a_gateway_meet_under_any_name() {
    let world = World::new();
    let (client, server) = dial(
        &tunnel_client(&world.edge()).unwrap(),
        &world.tunnel(),
        "192.0.2.1",
    )
    .unwrap();
    assert_eq!(server.alpn_protocol(), Some(&b"rh2"[..]));
    assert_eq!(
        world
            .check(server.peer_certificates().unwrap(), Purpose::Edge)
            .unwrap(),
        edge_1()
    );
    let gateway = world.check(client.peer_certificates().unwrap(), Purpose::Gateway);
    assert_eq!(gateway.unwrap(), Identity::Gateway);
    let suite = client.negotiated_cipher_suite().unwrap().suite();
    assert_eq!(suite, rustls::CipherSuite::TLS13_AES_128_GCM_SHA256);
}

#[test]
fn an_edge_of_another_root_does_not_get_in() {
    let (world, other) = (World::new(), World::new());
    let mut edge = other.edge();
    edge.roots = vec![world.ca.root().clone()];
    assert!(dial(&tunnel_client(&edge).unwrap(), &world.tunnel(), "gw").is_err());
    let chain = other.edge();
    let refused = world.check(chain.leaf.chain(), Purpose::Edge);
    assert_eq!(refused, Err(PeerRejected::UnknownIssuer));
}

#[test]
fn a_gateway_of_another_root_is_refused_by_the_edge() {
    let (world, other) = (World::new(), World::new());
    let failed = dial(
        &tunnel_client(&world.edge()).unwrap(),
        &other.tunnel(),
        "gw",
    )
    .unwrap_err();
    assert_eq!(failed, rustls::CertificateError::UnknownIssuer.into());
}

#[test]
fn the_tunnel_wants_a_certificate_and_rh2() {
    let world = World::new();
    let nobody = ClientConfig::clone(&join_client(world.ca.fingerprint()).unwrap());
    let mut with_rh2 = nobody.clone();
    with_rh2.alpn_protocols = vec![b"rh2".to_vec()];
    let refused = dial(&Arc::new(with_rh2), &world.tunnel(), "gw").unwrap_err();
    assert_eq!(refused, rustls::Error::NoCertificatesPresented);
    assert!(dial(&Arc::new(nobody), &world.tunnel(), "gw").is_err());
    let missing = check_peer(
        None,
        Purpose::Edge,
        UnixTime::now(),
        &world.trust,
        &none_revoked,
    );
    assert_eq!(missing, Err(PeerRejected::NoCertificate));
    assert_eq!(
        world.check(&[], Purpose::Edge),
        Err(PeerRejected::NoCertificate)
    );
}

#[test]
fn an_edge_cannot_pose_as_a_gateway_nor_can_a_listener() {
    let world = World::new();
    let listener = world
        .ca
        .issue_listener(&[ListenerName::parse("gw").unwrap()], HOUR)
        .unwrap();
    for leaf in [world.edge().leaf, world.client(), listener] {
        let server = tunnel_server(leaf.resolver(), &world.trust, &world.tickets).unwrap();
        assert!(dial(&tunnel_client(&world.edge()).unwrap(), &server, "gw").is_err());
    }
}

#[test]
fn a_token_recognises_its_gateway_and_yields_the_root() {
    let world = World::new();
    let client = join_client(world.ca.fingerprint()).unwrap();
    let (client, server) = dial(&client, &world.join(), "gw").unwrap();
    assert_eq!(server.alpn_protocol(), Some(&b"h2"[..]));
    assert!(server.peer_certificates().is_none());
    let root = pinned_root(client.peer_certificates().unwrap(), world.ca.fingerprint());
    assert_eq!(root.as_ref(), Some(world.ca.root()));
}

#[test]
fn a_token_of_another_ca_names_both_fingerprints() {
    let (world, other) = (World::new(), World::new());
    let client = join_client(other.ca.fingerprint()).unwrap();
    let failed = dial(&client, &world.join(), "gw").unwrap_err();
    let wrong = *UnexpectedCa::find(&failed).unwrap();
    let expected = UnexpectedCa {
        presented: world.ca.fingerprint(),
        expected: other.ca.fingerprint(),
    };
    assert_eq!(wrong, expected);
    let text = wrong.to_string();
    assert!(text.contains(&world.ca.fingerprint().to_string()), "{text}");
    let wrapped = io::Error::new(io::ErrorKind::InvalidData, failed);
    assert_eq!(UnexpectedCa::find(&wrapped), Some(&expected));
    assert_eq!(UnexpectedCa::find(&io::Error::other("x")), None);
    assert!(text.contains("root was replaced") && text.contains("causeway token create"));
}

#[test]
fn a_listener_certificate_is_not_accepted_as_another_ca_gateway() {
    let world = World::new();
    let names = [crate::ListenerName::parse("gw").unwrap()];
    let listener = world.ca.issue_listener(&names, HOUR).unwrap();
    let server = join_server(listener.resolver(), &world.trust, None).unwrap();
    for client in [
        join_client(world.ca.fingerprint()).unwrap(),
        control_client(&world.edge()).unwrap(),
    ] {
        let failed = dial(&client, &server, "gw").unwrap_err();
        assert!(NotAGateway::is_in(&failed), "{failed}");
        assert_eq!(UnexpectedCa::find(&failed), None);
    }
}

#[test]
fn a_foreign_leaf_followed_by_our_root_is_refused() {
    let (world, stranger) = (World::new(), World::new());
    let leaf = stranger.gateway();
    let key = leaf.key_pem();
    let chain = pem_chain(&[leaf.chain()[0].clone(), world.ca.root().clone()]);
    let forged = LeafCertificate::load(&chain, key.expose()).unwrap();
    let server = join_server(forged.resolver(), &stranger.trust, None).unwrap();
    let client = join_client(world.ca.fingerprint()).unwrap();
    assert_eq!(
        dial(&client, &server, "gw").unwrap_err(),
        rustls::CertificateError::UnknownIssuer.into()
    );
}

#[test]
fn a_token_that_pins_a_leaf_does_not_make_it_a_root() {
    let world = World::new();
    let client = join_client(Fingerprint::of_certificate(&world.gateway().chain()[0])).unwrap();
    let failed = dial(&client, &world.join(), "gw").unwrap_err();
    assert!(UnexpectedCa::find(&failed).is_some());
}

fn pem_chain(chain: &[CertificateDer<'_>]) -> String {
    causeway_tls::encode_chain(chain)
}

#[test]
fn an_expired_edge_is_refused_in_the_handshake_and_after() {
    let world = World::new();
    let mut server = ServerConfig::clone(&world.tunnel());
    server.time_provider = Arc::new(Later(HOUR * 2));
    let edge = world.edge();
    let failed = dial(&tunnel_client(&edge).unwrap(), &Arc::new(server), "gw").unwrap_err();
    assert!(failed.to_string().contains("expired"), "{failed}");
    let at = |now| {
        check_peer(
            Some(edge.leaf.chain()),
            Purpose::Edge,
            now,
            &world.trust,
            &none_revoked,
        )
    };
    assert!(matches!(
        at(later(HOUR * 2)),
        Err(PeerRejected::Expired { .. })
    ));
    let before = UnixTime::since_unix_epoch(HOUR);
    assert!(matches!(at(before), Err(PeerRejected::NotYetValid { .. })));
    assert!(at(later(Duration::ZERO)).is_ok());
}

#[test]
fn an_edge_that_was_known_is_refused_once_it_expired() {
    let world = World::new();
    let edge = tunnel_client(&world.edge()).unwrap();
    let tunnel = world.tunnel();
    dial(&edge, &tunnel, "gw").unwrap();
    let mut server = ServerConfig::clone(&tunnel);
    server.time_provider = Arc::new(Later(HOUR * 2));
    // Other keys: the second handshake is a full one.
    server.ticketer = Ticketer::new().unwrap();
    let failed = dial(&edge, &Arc::new(server), "gw").unwrap_err();
    assert!(failed.to_string().contains("expired"), "{failed}");
}

/// Returns the CRLs that revoke this certificate of a gateway.
fn crls_against(world: &World, leaf: &LeafCertificate) -> String {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path(), OpenMode::Create).unwrap();
    let serial = Certificate::parse(&leaf.chain()[0]).unwrap().serial_hex();
    store.revoke_gateway(&serial, "stolen").unwrap();
    let list = store.revoked_gateways().unwrap();
    world.ca.sign_crls(&list).unwrap().unwrap()
}

#[test]
fn a_revoked_gateway_is_refused_by_every_client_of_an_edge() {
    let world = World::new();
    let (stolen, mut edge) = (world.gateway(), world.edge());
    let tunnel = tunnel_server(stolen.resolver(), &world.trust, &world.tickets).unwrap();
    let join = join_server(stolen.resolver(), &world.trust, None).unwrap();
    dial(&tunnel_client(&edge).unwrap(), &tunnel, "gw").unwrap();
    let text = crls_against(&world, &stolen);
    let (revoked, errors) = verify_crls(&text, &edge.roots, &edge.trust_domain).unwrap();
    assert!(errors.is_empty());
    edge.revoked_gateways = revoked;
    assert!(edge.revoked_serial(stolen.chain()).is_some());
    assert!(edge.revoked_serial(world.gateway().chain()).is_none());
    let root = world.ca.fingerprint();
    let clients = [
        (tunnel_client(&edge).unwrap(), &tunnel),
        (control_client(&edge).unwrap(), &join),
        (rejoin_client(root, &edge.revoked_gateways).unwrap(), &join),
        (
            csr_exchange_client(&world.ca.bundle_pem(), &edge.leaf, &edge.revoked_gateways)
                .unwrap(),
            &join,
        ),
    ];
    for (client, server) in clients {
        let refused = dial(&client, server, "gw").unwrap_err();
        assert_eq!(refused, CertificateError::Revoked.into());
    }
    // Another certificate of a gateway is accepted.
    dial(&tunnel_client(&edge).unwrap(), &world.tunnel(), "gw").unwrap();
}

#[test]
fn a_revoked_gateway_is_refused_by_other_gateways() {
    let world = World::new();
    let stolen = world.gateway();
    let serial = Certificate::parse(&stolen.chain()[0]).unwrap().serial_hex();
    let revoked = RevokedSerials::default();
    let trust = world.trust.clone().with_revoked_gateways(revoked.clone());
    let check = || {
        let now = UnixTime::now();
        let chain = Some(stolen.chain());
        check_peer(chain, Purpose::Peer, now, &trust, &none_revoked)
    };
    let dialled = peer_client(&world.gateway(), &trust).unwrap();
    let server = peer_server(stolen.resolver(), &world.trust).unwrap();
    assert_eq!(check(), Ok(Identity::Gateway));
    dial(&dialled, &server, "gw").unwrap();
    // The list counts at once, also for a configuration that was built before.
    revoked.replace([serial.clone()].into());
    let refused = check().unwrap_err().to_string();
    assert!(
        refused.contains(&format!("{serial} is revoked")),
        "{refused}"
    );
    let refused = dial(&dialled, &server, "gw").unwrap_err();
    assert_eq!(refused, CertificateError::Revoked.into());
}

#[test]
fn a_renewing_edge_is_known_on_the_control_port() {
    let world = World::new();
    let client = control_client(&world.edge()).unwrap();
    let (_client, server) = dial(&client, &world.join(), "gw").unwrap();
    assert_eq!(
        world
            .check(server.peer_certificates().unwrap(), Purpose::Edge)
            .unwrap(),
        edge_1()
    );
}

#[test]
fn trap_10_a_resumed_session_is_checked_again() {
    let world = World::new();
    let (client, server) = (tunnel_client(&world.edge()).unwrap(), world.tunnel());
    dial(&client, &server, "gw").unwrap();
    let (client, server) = dial(&client, &server, "gw").unwrap();
    assert_eq!(server.handshake_kind(), Some(HandshakeKind::Resumed));
    let chain = server.peer_certificates().unwrap();
    let serial = Certificate::parse(&chain[0]).unwrap().serial;
    let revoked = |found: &[u8], who: &Identity| found == serial && *who == edge_1();
    let check = |now, revoked| check_peer(Some(chain), Purpose::Edge, now, &world.trust, revoked);
    assert!(check(UnixTime::now(), &none_revoked).is_ok());
    assert!(matches!(
        check(UnixTime::now(), &revoked),
        Err(PeerRejected::Revoked(_))
    ));
    assert!(matches!(
        check(later(HOUR * 2), &none_revoked),
        Err(PeerRejected::Expired { .. })
    ));
    assert!(
        world
            .check(client.peer_certificates().unwrap(), Purpose::Gateway)
            .is_ok()
    );
}

/// Returns a client without a certificate that offers the tickets of the joining port to the tunnel port.
fn crossing(world: &World) -> Arc<ClientConfig> {
    let mut config = ClientConfig::clone(&join_client(world.ca.fingerprint()).unwrap());
    config.alpn_protocols = vec![b"h2".to_vec(), b"rh2".to_vec()];
    Arc::new(config)
}

#[test]
fn a_session_without_certificate_does_not_resume_in_the_tunnel() {
    let world = World::new();
    let join = world.leaky_join(Ticketer::new().unwrap());
    let client = crossing(&world);
    dial(&client, &join, "gw").unwrap();
    let refused = dial(&client, &world.tunnel(), "gw").unwrap_err();
    assert_eq!(refused, rustls::Error::NoCertificatesPresented);
    // The client did hold tickets: at the port that issued them, the next session resumes.
    let (_client, server) = dial(&client, &join, "gw").unwrap();
    assert_eq!(server.handshake_kind(), Some(HandshakeKind::Resumed));
}

#[test]
fn sessions_do_not_resume_with_certificates_from_files() {
    let world = World::new();
    let client = control_client(&world.edge()).unwrap();
    let join = world.join();
    for _ in 0..2 {
        let (_client, server) = dial(&client, &join, "gw").unwrap();
        assert_eq!(server.handshake_kind(), Some(HandshakeKind::Full));
    }
    // Not even a session that a holder of the secret has forged.
    let (client, tunnel) = (crossing(&world), world.tunnel());
    dial(&client, &world.leaky_join(tunnel.ticketer.clone()), "gw").unwrap();
    let (_client, server) = dial(&client, &join, "gw").unwrap();
    assert_eq!(server.handshake_kind(), Some(HandshakeKind::Full));
}

#[test]
fn a_session_resumes_only_at_a_gateway_that_shares_the_secret() {
    let world = World::new();
    for (tickets, kind) in [
        (world.tickets.clone(), HandshakeKind::Resumed),
        (TicketSecret::random(), HandshakeKind::Full),
    ] {
        let client = tunnel_client(&world.edge()).unwrap();
        dial(&client, &world.tunnel(), "gw").unwrap();
        let leaf = world.gateway();
        let other = tunnel_server(leaf.resolver(), &world.trust, &tickets).unwrap();
        let (_client, server) = dial(&client, &other, "gw").unwrap();
        assert_eq!(server.handshake_kind(), Some(kind));
        let chain = server.peer_certificates().unwrap();
        assert_eq!(world.check(chain, Purpose::Edge).unwrap(), edge_1());
    }
}

#[test]
fn shared_ticket_keys_do_not_resume_without_a_certificate() {
    let world = World::new();
    let (client, tunnel) = (crossing(&world), world.tunnel());
    dial(&client, &world.leaky_join(tunnel.ticketer.clone()), "gw").unwrap();
    let (_client, server) = dial(&client, &tunnel, "gw").unwrap();
    let chain = server.peer_certificates();
    let now = UnixTime::now();
    let refused = check_peer(chain, Purpose::Edge, now, &world.trust, &none_revoked);
    assert_eq!(refused, Err(PeerRejected::NoCertificate));
}

#[test]
fn a_listener_knows_our_clients_and_foreign_ones_apart() {
    let (world, other) = (World::new(), World::new());
    let trust = world.listener(&other.ca);
    let leaf = world
        .ca
        .issue_listener(&[ListenerName::parse("edge-1").unwrap()], HOUR)
        .unwrap();
    let server = listener_server(
        leaf.resolver(),
        &trust,
        CertificateRequirement::Required,
        &[b"http/1.1"],
    )
    .unwrap();
    let identity = |client: &LeafCertificate| {
        let client = curl(&world.ca, Some(client), &[b"http/1.1"]);
        let (_client, server) = dial(&client, &server, "edge-1").unwrap();
        let chain = server.peer_certificates();
        check_peer(
            chain,
            Purpose::Client,
            UnixTime::now(),
            &trust,
            &none_revoked,
        )
        .unwrap()
    };
    let ann = Identity::Client {
        name: "ann".into(),
        groups: vec!["ops".into()],
    };
    assert_eq!(identity(&world.client()), ann);
    let foreign = Identity::Foreign {
        common_name: Some("ann".into()),
        organizations: vec!["ops".into()],
        uris: vec!["spiffe://td/client/ann".into()],
    };
    assert_eq!(identity(&other.client()), foreign);
    assert!(dial(&curl(&world.ca, None, &[]), &server, "edge-1").is_err());
}

#[test]
fn each_kind_of_certificate_serves_its_own_purpose() {
    let world = World::new();
    let (edge, client, gateway) = (world.edge().leaf, world.client(), world.gateway());
    let kind = |leaf: &LeafCertificate, purpose| match world.check(leaf.chain(), purpose) {
        Err(PeerRejected::WrongKind { found, .. }) => found,
        other => panic!("{other:?}"),
    };
    assert_eq!(kind(&edge, Purpose::Client), "edge");
    assert_eq!(kind(&client, Purpose::Edge), "client");
    // Only a gateway is the client of another gateway, although its certificate permits both usages.
    assert_eq!(kind(&gateway, Purpose::Client), "gateway");
    assert_eq!(kind(&gateway, Purpose::Edge), "gateway");
    assert_eq!(kind(&edge, Purpose::Peer), "edge");
    assert_eq!(kind(&client, Purpose::Peer), "client");
    assert_eq!(
        world.check(gateway.chain(), Purpose::Peer),
        Ok(Identity::Gateway)
    );
    let wrong = |leaf: &LeafCertificate, purpose| world.check(leaf.chain(), purpose).unwrap_err();
    assert_eq!(
        wrong(&edge, Purpose::Gateway),
        PeerRejected::WrongPurpose {
            wanted: Purpose::Gateway
        }
    );
    let text = world
        .check(edge.chain(), Purpose::Client)
        .unwrap_err()
        .to_string();
    assert_eq!(text, "a certificate of kind edge cannot be used as client");
}

#[test]
fn a_foreign_ca_cannot_mint_an_edge() {
    let (world, other) = (World::new(), World::new());
    let trust = world.listener(&other.ca);
    let check = |leaf: &LeafCertificate, purpose| {
        check_peer(
            Some(leaf.chain()),
            purpose,
            UnixTime::now(),
            &trust,
            &none_revoked,
        )
    };
    let (edge, gateway) = (other.edge().leaf, other.gateway());
    assert_eq!(
        check(&edge, Purpose::Edge),
        Err(PeerRejected::UnknownIssuer)
    );
    // In the same trust domain it names one of our machines, and a client is not one of them.
    assert_eq!(
        check(&edge, Purpose::Client),
        Err(PeerRejected::WrongKind {
            wanted: Purpose::Client,
            found: "edge"
        })
    );
    assert_eq!(
        check(&gateway, Purpose::Gateway),
        Err(PeerRejected::UnknownIssuer)
    );
}

#[test]
fn a_listener_without_our_ca_refuses_its_clients() {
    let (world, other) = (World::new(), World::new());
    let listener = ListenerClientTrust {
        client_roots: vec![other.ca.root().clone()],
        ..ListenerClientTrust::default()
    };
    let trust = TrustStore::listener(&world.ca, &listener).unwrap();
    let check = |leaf: &LeafCertificate| {
        check_peer(
            Some(leaf.chain()),
            Purpose::Client,
            UnixTime::now(),
            &trust,
            &none_revoked,
        )
    };
    assert_eq!(check(&world.client()), Err(PeerRejected::UnknownIssuer));
    assert_eq!(check(&other.client()).unwrap().kind(), "foreign");
}

#[test]
fn our_root_among_a_listeners_foreign_ones_is_still_ours() {
    let world = World::new();
    let listener = ListenerClientTrust {
        client_roots: vec![world.ca.root().clone()],
        ..ListenerClientTrust::default()
    };
    let trust = TrustStore::listener(&world.ca, &listener).unwrap();
    let now = UnixTime::now();
    let check = |leaf: &LeafCertificate| {
        check_peer(
            Some(leaf.chain()),
            Purpose::Client,
            now,
            &trust,
            &none_revoked,
        )
    };
    assert_eq!(check(&world.client()).unwrap().kind(), "client");
    assert!(matches!(
        check(&world.edge().leaf),
        Err(PeerRejected::WrongKind { .. })
    ));
}

#[test]
fn a_listener_without_client_ca_neither_asks_nor_requires() {
    let world = World::new();
    let leaf = world
        .ca
        .issue_listener(&[ListenerName::parse("edge-1").unwrap()], HOUR)
        .unwrap();
    let listener = ListenerClientTrust::default();
    let trust = TrustStore::listener(&world.ca, &listener).unwrap();
    let server = |requirement| listener_server(leaf.resolver(), &trust, requirement, &[]);
    let optional = server(CertificateRequirement::Optional).unwrap();
    let client = curl(&world.ca, Some(&world.client()), &[]);
    let (_client, accepted) = dial(&client, &optional, "edge-1").unwrap();
    assert!(accepted.peer_certificates().is_none());
    let refused = server(CertificateRequirement::Required);
    assert!(matches!(refused, Err(TrustError::NoTrustedRoots)));
}

#[test]
fn a_deferred_certificate_of_an_unknown_ca_passes_the_handshake_only() {
    let (world, other) = (World::new(), World::new());
    let listener = ListenerClientTrust {
        accepts_own: true,
        ..ListenerClientTrust::default()
    };
    let trust = TrustStore::listener(&world.ca, &listener).unwrap();
    let leaf = world
        .ca
        .issue_listener(&[ListenerName::parse("edge-1").unwrap()], HOUR)
        .unwrap();
    let client = curl(&world.ca, Some(&other.client()), &[]);
    let dialled = |requirement| {
        let server = listener_server(leaf.resolver(), &trust, requirement, &[]).unwrap();
        dial(&client, &server, "edge-1")
    };
    dialled(CertificateRequirement::Optional).unwrap_err();
    let (_client, server) = dialled(CertificateRequirement::Deferred).unwrap();
    let chain = server.peer_certificates();
    let now = UnixTime::now();
    let found = check_peer(chain, Purpose::Client, now, &trust, &none_revoked);
    assert_eq!(found, Err(PeerRejected::UnknownIssuer));
}

/// Returns a CA certificate with this subject and its key, valid until this year.
fn foreign_ca(
    name: &str,
    last_year: i32,
    above: Option<&Issuer<'_, KeyPair>>,
) -> (CertificateDer<'static>, KeyPair) {
    let (key, mut ca) = (KeyPair::generate().unwrap(), params(&[], &[]));
    ca.distinguished_name.push(rcgen::DnType::CommonName, name);
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    ca.not_after = rcgen::date_time_ymd(last_year, 1, 1);
    let made = match above {
        Some(above) => ca.signed_by(&key, above),
        None => ca.self_signed(&key),
    };
    (made.unwrap().der().clone(), key)
}

#[test]
fn an_expired_certificate_or_issuer_proves_nothing_and_a_revoked_certificate_does() {
    let world = World::new();
    let (root, root_key) = foreign_ca("root", 2100, None);
    let listener = ListenerClientTrust {
        accepts_own: true,
        client_roots: vec![root.clone()],
    };
    let trust = TrustStore::listener(&world.ca, &listener).unwrap();
    let root = Issuer::from_ca_cert_der(&root, root_key).unwrap();
    let server_leaf = world
        .ca
        .issue_listener(&[ListenerName::parse("edge-1").unwrap()], HOUR)
        .unwrap();
    let server = listener_server(
        server_leaf.resolver(),
        &trust,
        CertificateRequirement::Deferred,
        &[],
    );
    let server = server.unwrap();
    for (issuer_ends, leaf_ends, is_revoked) in
        [(2100, 2020, false), (2020, 2100, false), (2100, 2100, true)]
    {
        let (above, key) = foreign_ca("intermediate", issuer_ends, Some(&root));
        let issuer = Issuer::from_ca_cert_der(&above, key).unwrap();
        let own = KeyPair::generate().unwrap();
        let mut leaf = params(&[], &[ExtendedKeyUsagePurpose::ClientAuth]);
        leaf.distinguished_name
            .push(rcgen::DnType::CommonName, "ann");
        leaf.not_after = rcgen::date_time_ymd(leaf_ends, 1, 1);
        let leaf = leaf.signed_by(&own, &issuer).unwrap().der().clone();
        let chain = vec![leaf, above];
        let client = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(root_store([world.ca.root()]).unwrap())
            .with_client_auth_cert(chain, own.into())
            .unwrap();
        let (_client, accepted) = dial(&Arc::new(client), &server, "edge-1").unwrap();
        let refused = check_peer(
            accepted.peer_certificates(),
            Purpose::Client,
            UnixTime::now(),
            &trust,
            &|_, _| is_revoked,
        );
        let refused = refused.unwrap_err();
        assert_eq!(refused.is_unverified(), !is_revoked, "{refused}");
        assert_eq!(
            matches!(refused, PeerRejected::Revoked(_)),
            is_revoked,
            "{refused}"
        );
        assert_eq!(
            matches!(refused, PeerRejected::IssuerPeriod(_)),
            issuer_ends == 2020,
            "{refused}"
        );
    }
}

/// Returns a root with the subject of our root, but its own key.
fn namesake(world: &World) -> (Ca, CertificateDer<'static>) {
    let ca = Ca::create(world.ca.trust_domain()).unwrap();
    let root = ca.root().clone();
    (ca, root)
}

#[test]
fn a_foreign_root_of_the_same_name_stays_foreign() {
    let world = World::new();
    let (twin, root) = namesake(&world);
    let listener = ListenerClientTrust {
        accepts_own: true,
        client_roots: vec![root],
    };
    let trust = TrustStore::listener(&world.ca, &listener).unwrap();
    let client = twin.issue_client("ann", &[], HOUR).unwrap();
    let now = UnixTime::now();
    let found = check_peer(
        Some(client.chain()),
        Purpose::Client,
        now,
        &trust,
        &none_revoked,
    );
    assert_eq!(found.unwrap().kind(), "foreign");
}

/// Returns the issuer for this purpose below the CA's first root, with the key.
fn signer(ca: &Ca, purpose: IssuerPurpose) -> (CertificateDer<'static>, Issuer<'static, KeyPair>) {
    let file = serde_json::to_value(crate::ca::file::CaFile::from_ca(ca)).unwrap();
    let pair = &file["roots"][0]["issuers"][purpose.to_string()];
    let text = |part: &str| pair[part].as_str().unwrap().to_owned();
    let certificate = causeway_tls::parse_certificates(&text("certificate"))
        .unwrap()
        .remove(0);
    let key = KeyPair::from_pem(&text("key")).unwrap();
    let issuer = Issuer::from_ca_cert_der(&certificate, key).unwrap();
    (certificate, issuer)
}

fn params(uris: &[&str], usages: &[ExtendedKeyUsagePurpose]) -> CertificateParams {
    let mut params = CertificateParams::default();
    let uri = |text: &&str| SanType::URI((*text).try_into().unwrap());
    params.subject_alt_names = uris.iter().map(uri).collect();
    params.extended_key_usages = usages.to_vec();
    params
}

#[test]
fn certificates_without_purpose_or_with_two_ids_are_refused() {
    let world = World::new();
    let (_, issuer) = signer(&world.ca, IssuerPurpose::Edges);
    let check = |uris: &[&str], usages: &[ExtendedKeyUsagePurpose]| {
        let own = KeyPair::generate().unwrap();
        let leaf = params(uris, usages).signed_by(&own, &issuer).unwrap();
        world.check(&[leaf.der().clone()], Purpose::Edge)
    };
    let (edge, client) = (
        "spiffe://td/edge/edge-1",
        ExtendedKeyUsagePurpose::ClientAuth,
    );
    let wanted = Purpose::Edge;
    assert_eq!(
        check(&[edge], &[]),
        Err(PeerRejected::WrongPurpose { wanted })
    );
    assert_eq!(check(&[edge], std::slice::from_ref(&client)), Ok(edge_1()));
    let refused = check(&[edge, "spiffe://td/gateway"], &[client]);
    assert!(matches!(refused, Err(PeerRejected::Identity(_))));
}

#[test]
fn an_issuer_of_one_purpose_signs_for_no_other() {
    use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
    let world = World::new();
    let below = TrustStore::from_roots([world.ca.root()], world.ca.trust_domain()).unwrap();
    for (uri, purpose) in [
        ("spiffe://td/edge/edge-1", Purpose::Edge),
        ("spiffe://td/client/ann", Purpose::Client),
        ("spiffe://td/gateway", Purpose::Gateway),
        ("spiffe://td/gateway", Purpose::Peer),
    ] {
        for signs in IssuerPurpose::ALL {
            let (certificate, issuer) = signer(&world.ca, signs);
            let own = KeyPair::generate().unwrap();
            let leaf = params(&[uri], &[ClientAuth, ServerAuth]);
            let leaf = leaf.signed_by(&own, &issuer).unwrap().der().clone();
            // The chain also contains an issuer for the right purpose, which has signed nothing in it.
            let decoy = signer(&world.ca, purpose.required_issuer()).0;
            let chain = [leaf, decoy, certificate];
            for trust in [&world.trust, &below] {
                let now = UnixTime::now();
                let found = check_peer(Some(&chain), purpose, now, trust, &none_revoked);
                if signs == purpose.required_issuer() {
                    found.unwrap();
                    continue;
                }
                let (wanted, found) = (purpose, found.unwrap_err());
                let wrong = PeerRejected::WrongIssuer {
                    wanted,
                    found: signs,
                };
                assert!(
                    found == wrong || found == PeerRejected::WrongPurpose { wanted },
                    "{signs} as {purpose}: {found}"
                );
                if signs == IssuerPurpose::Replicas {
                    assert_eq!(found, wrong, "it permits both usages");
                }
            }
        }
    }
}

#[test]
fn an_intermediate_makes_no_further_ones() {
    let world = World::new();
    let (above, issuer) = signer(&world.ca, IssuerPurpose::Clients);
    let mut forged = params(&["spiffe://td/issuer/edges"], &[]);
    forged.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Constrained(0));
    forged.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign];
    let key = KeyPair::generate().unwrap();
    let forged = forged.signed_by(&key, &issuer).unwrap().der().clone();
    let issuer = Issuer::from_ca_cert_der(&forged, key).unwrap();
    let leaf = params(
        &["spiffe://td/edge/edge-1"],
        &[ExtendedKeyUsagePurpose::ClientAuth],
    );
    let leaf = leaf
        .signed_by(&KeyPair::generate().unwrap(), &issuer)
        .unwrap();
    let chain = [leaf.der().clone(), forged, above];
    assert_eq!(
        world.check(&chain, Purpose::Edge),
        Err(PeerRejected::UnknownIssuer)
    );
    let below = TrustStore::from_roots([world.ca.root()], world.ca.trust_domain()).unwrap();
    let now = UnixTime::now();
    assert!(check_peer(Some(&chain), Purpose::Edge, now, &below, &none_revoked).is_err());
}

#[test]
fn a_root_without_purposes_is_trusted_for_all_kinds() {
    let made = World::new().ca;
    let ca = Ca::load(&made.root_pem(), made.key_pem().expose()).unwrap();
    let world = World::with(ca);
    let (edge, other) = (world.edge(), world.client());
    let (client, server) = dial(&tunnel_client(&edge).unwrap(), &world.tunnel(), "gw").unwrap();
    let chain = server.peer_certificates().unwrap();
    assert_eq!(world.check(chain, Purpose::Edge).unwrap(), edge_1());
    let chain = client.peer_certificates().unwrap();
    assert_eq!(
        world.check(chain, Purpose::Gateway).unwrap(),
        Identity::Gateway
    );
    assert_eq!(
        world.check(other.chain(), Purpose::Client).unwrap().kind(),
        "client"
    );
    let refused = world.check(other.chain(), Purpose::Edge);
    assert!(matches!(refused, Err(PeerRejected::WrongKind { .. })));
}

/// Returns the first CA, with or without separate purposes, and then its rotation, step by step.
fn rotated(kept_apart: bool) -> [Ca; 4] {
    let first = World::new().ca;
    let old = || {
        if kept_apart {
            let file = serde_json::to_value(crate::ca::file::CaFile::from_ca(&first)).unwrap();
            let file: crate::ca::file::CaFile = serde_json::from_value(file).unwrap();
            file.into_ca().unwrap()
        } else {
            Ca::load(&first.root_pem(), first.key_pem().expose()).unwrap()
        }
    };
    let again = |ca: &Ca| {
        let file = serde_json::to_value(crate::ca::file::CaFile::from_ca(ca)).unwrap();
        let file: crate::ca::file::CaFile = serde_json::from_value(file).unwrap();
        file.into_ca().unwrap()
    };
    let prepared = old().prepare().unwrap().0;
    let active = again(&prepared).activate().unwrap().0;
    let retired = again(&active).retire().unwrap().0;
    [old(), prepared, active, retired]
}

#[test]
fn peers_of_both_roots_trust_each_other_until_one_is_retired() {
    for kept_apart in [true, false] {
        let worlds = rotated(kept_apart).map(World::with);
        let [old, prepared, active, retired] = &worlds;
        let (first, last) = (old.ca.fingerprint(), retired.ca.fingerprint());
        // Three edges: one without the new root, one with the new root, and one with a certificate from the new root.
        let edges = [old.edge(), prepared.edge(), active.edge()];
        assert_eq!(edges[1].fingerprints(), [first, last]);
        let known = |edge: &EdgeIdentity, world: &World| {
            let shaken = dial(&tunnel_client(edge).unwrap(), &world.tunnel(), "gw");
            shaken.is_ok_and(|(_, server)| {
                let chain = server.peer_certificates().unwrap();
                world.check(chain, Purpose::Edge).is_ok()
            })
        };
        let joins = |root: Fingerprint, world: &World| {
            dial(&join_client(root).unwrap(), &world.join(), "gw").is_ok()
        };
        for (world, by_edges, by_tokens) in [
            (old, [true, true, false], [true, false]),
            (prepared, [true, true, true], [true, false]),
            (active, [true, true, true], [true, true]),
            (retired, [false, false, true], [false, true]),
        ] {
            let edges = edges.each_ref().map(|edge| known(edge, world));
            assert_eq!(edges, by_edges, "{:?}", world.ca);
            assert_eq!(
                [first, last].map(|root| joins(root, world)),
                by_tokens,
                "{:?}",
                world.ca
            );
        }
        // The root of each peer's certificate is known, and clients of either root verify the listeners.
        let chain = edges[0].leaf.chain();
        let now = UnixTime::now();
        let proven = verify_peer(
            Some(chain),
            Purpose::Edge,
            now,
            &active.trust,
            &none_revoked,
        );
        assert_eq!(proven.unwrap().root, Some(first));
        let leaf = active
            .ca
            .issue_listener(&[ListenerName::parse("edge-1").unwrap()], HOUR)
            .unwrap();
        let server = listener_server(
            leaf.resolver(),
            &active.trust,
            CertificateRequirement::Required,
            &[],
        )
        .unwrap();
        for ca in [&old.ca, &retired.ca] {
            let client = ca.issue_client("ann", &[], HOUR).unwrap();
            dial(&curl(ca, Some(&client), &[]), &server, "edge-1").unwrap();
        }
    }
}

#[test]
fn trap_14_the_provider_installs_more_than_once_and_is_aws_lc() {
    install_provider();
    install_provider();
    assert!(rustls::crypto::CryptoProvider::get_default().is_some());
}
