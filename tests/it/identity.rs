//! Authentication: edges by certificate, clients by the method that their listener names, enrolment by a join token.
//!
//! Nothing is open by default, and each refused peer learns why.

use crate::world::{
    GATEWAY_NAME, LIFE, World,
    app::{App, Script},
    client::{assert_problem, read, read_to_end, whole},
    edge::Edge,
    gateway::{anonymous, fixed, listener},
    until,
};
use causeway_certs::{
    Ca, EdgeIdentity, NodeName, OpenMode, PrivateKey, Store, TrustDomain, VerifiedPublicKey, verify,
};
use causeway_edge::{EnrolError, Error, config::Protocol};
use causeway_gateway::config::{ClientAuth, ListenAddr, Listener, ListenerProtocol};
use hyper::Request;
use rustls::{AlertDescription as Alert, ClientConfig, pki_types::ServerName};
use std::{
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::sync::CancellationToken;

fn other_ca() -> Ca {
    Ca::create(&TrustDomain::parse("world.test").unwrap()).unwrap()
}

/// An edge's identity from this CA, for the name of a node of the world.
fn identity(world: &World, ca: &Ca, life: Duration) -> EdgeIdentity {
    let key = PrivateKey::generate().unwrap();
    let request = VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
    let node = NodeName::parse("edge-1").unwrap();
    let issued = ca.issue_edge(&request, &node, life).unwrap();
    let identity = EdgeIdentity::new(&ca.root_pem(), &issued.pem(), &key.key_pem()).unwrap();
    EdgeIdentity {
        roots: vec![world.ca().root().clone()],
        ..identity
    }
}

/// Opens TLS to the tunnel port.
async fn handshake(
    world: &World,
    config: Arc<ClientConfig>,
    alpn: &str,
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut config = ClientConfig::clone(&config);
    config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
    let tcp = TcpStream::connect(world.tunnel()).await.unwrap();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    TlsConnector::from(Arc::new(config))
        .connect(name, tcp)
        .await
}

/// The alert with which the tunnel port ends TLS.
async fn alert(world: &World, config: Arc<ClientConfig>, alpn: &str) -> Alert {
    // With TLS 1.3 a client's handshake ends before the server has verified its certificate.
    let error = match handshake(world, config, alpn).await {
        Ok(mut tls) => read_to_end(&mut tls).await.unwrap_err(),
        Err(error) => error,
    };
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    match inner {
        Some(rustls::Error::AlertReceived(alert)) => *alert,
        _ => panic!("{error:?}"),
    }
}

#[tokio::test]
async fn no_edge_gets_in_without_a_certificate() {
    let world = World::start().await;
    let nobody = verify::join_client(world.ca().fingerprint()).unwrap();
    assert_eq!(
        alert(&world, nobody, "rh2").await,
        Alert::CertificateRequired
    );
    until_counted(&world, "tunnel").await;
}

#[tokio::test]
async fn an_unknown_certificate_is_refused_and_both_ends_say_why() {
    let world = World::start().await;
    for alpn in ["rh2", "http/1.1"] {
        let stranger = identity(&world, &other_ca(), LIFE);
        let stranger = verify::tunnel_client(&stranger).unwrap();
        let told = alert(&world, stranger, alpn).await;
        assert!(
            matches!(told, Alert::UnknownCA | Alert::DecryptError),
            "{told:?}"
        );
    }
    until("the gateway's log has the reason", async || {
        let log = world.log().text();
        log.matches("refused a connection to the tunnel port")
            .count()
            == 2
    })
    .await;
}

/// Receives the reason of the refusal, continues to write, and only then reads the reason from the TLS session.
async fn refused_while_talking(tls: TlsStream<TcpStream>) -> rustls::Error {
    let (mut tcp, mut session) = tls.into_inner();
    let mut told = Vec::new();
    tcp.read_to_end(&mut told).await.unwrap();
    // A reset in answer to the first write would fail the others.
    for _ in 0..3 {
        tcp.write_all(&[0; 1024]).await.unwrap();
    }
    let mut told = told.as_slice();
    let read = std::iter::repeat_with(|| {
        session.read_tls(&mut told).unwrap();
        session.process_new_packets()
    });
    read.take(10).find_map(Result::err).unwrap()
}

#[tokio::test]
async fn a_refused_client_that_keeps_sending_can_read_the_reason() {
    let world = World::start().await;
    let stranger = identity(&world, &other_ca(), LIFE);
    let edge = verify::tunnel_client(&stranger).unwrap();
    let edge = handshake(&world, edge, "rh2").await.unwrap();
    let told = refused_while_talking(edge).await;
    assert!(matches!(told, rustls::Error::AlertReceived(_)), "{told}");

    let stranger = other_ca().issue_client("tester", &[], LIFE).unwrap();
    let client = world.client().certificate(&stranger);
    let client = client.tls_stream(GATEWAY_NAME, &[]).await.unwrap();
    let told = refused_while_talking(client).await;
    assert!(matches!(told, rustls::Error::AlertReceived(_)), "{told}");
}

/// Joins edge-1 and stops it. Its certificate has expired then; the gateway issues certificates for the usual time.
async fn expired_edge(world: &World) -> (Edge, Store) {
    let mut edge = world.edge("edge-1").open().await.unwrap();
    edge.stop().await;
    let store = Store::open(edge.folder(), OpenMode::Existing).unwrap();
    let expiring = identity(world, world.ca(), Duration::from_secs(1));
    store.save_edge(&expiring).unwrap();
    let end = Duration::from_secs(expiring.leaf.not_after().as_secs() + 1);
    until("the certificate has expired", async || {
        SystemTime::now() > SystemTime::UNIX_EPOCH + end
    })
    .await;
    (edge, store)
}

#[tokio::test]
async fn an_edge_with_an_expired_certificate_reports_it() {
    let world = World::start().await;
    let (mut edge, _) = expired_edge(&world).await;
    edge.forget_token();
    edge.start().await.unwrap();
    until("the edge is refused", async || {
        edge.status().state == "refused"
    })
    .await;
    let trouble = edge.status().trouble.unwrap();
    assert!(
        trouble.what.contains("CertificateExpired"),
        "{}",
        trouble.what
    );
}

#[tokio::test]
async fn an_expired_edge_joins_again_with_a_fresh_token() {
    let world = World::start().await;
    let (mut edge, store) = expired_edge(&world).await;
    let first = store.edge().unwrap().unwrap().leaf.not_after();
    edge.take_token(&world.token("edge-1", LIFE));
    edge.start().await.unwrap();
    until("the edge is connected", async || {
        edge.status().state == "connected"
    })
    .await;
    assert_ne!(store.edge().unwrap().unwrap().leaf.not_after(), first);
}

#[tokio::test]
async fn a_removed_node_is_refused_and_gets_the_remedy() {
    let mut world = World::start().await;
    let mut edge = world.edge("edge-1").join().await;
    edge.stop().await;
    world.stop_gateway().await;
    let node = NodeName::parse("edge-1").unwrap();
    assert!(world.store().nodes().remove(&node).unwrap());
    world.start_gateway().await;
    edge.start().await.unwrap();
    until("the edge is refused", async || {
        edge.status().state == "refused"
    })
    .await;
    let trouble = edge.status().trouble.unwrap();
    assert!(
        trouble.what.contains("join again with a new token"),
        "{}",
        trouble.what
    );
}

#[tokio::test]
async fn an_edges_certificate_is_no_clients_and_a_clients_is_no_edges() {
    let world = World::start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let edge = identity(&world, world.ca(), LIFE);
    let client = world.client().certificate(&edge.leaf);
    let answer = client.get("https://edge-1:9100/").await;
    let says = "certificate: a certificate of kind edge cannot be used as client";
    assert_problem(&answer, 401, "unauthenticated", says);
    assert_eq!(app.requests(), 0);
    until_counted(&world, "https").await;

    // Refusals of joining and renewing; `control::admit` tests the refusals of tunnels, which first exchange messages.
    let leaf = world.client_leaf("tester");
    let client = verify::tunnel_client(&EdgeIdentity { leaf, ..edge }).unwrap();
    let mut tls = handshake(&world, client, "http/1.1").await.unwrap();
    assert!(
        read_to_end(&mut tls).await.is_err(),
        "closed without an answer"
    );
    until_counted(&world, "tunnel").await;
}

/// Waits until one handshake has failed for its certificate.
async fn until_counted(world: &World, listener: &str) {
    until("it was counted", async || {
        let metrics = world.metrics().await;
        metrics.sum("handshakes_failed_total", &[("listener", listener)]) == 1
    })
    .await;
}

#[tokio::test]
async fn a_client_of_another_ca_gets_no_connection() {
    let world = World::start().await;
    let stranger = other_ca().issue_client("tester", &[], LIFE).unwrap();
    let client = world.client().sni(GATEWAY_NAME).certificate(&stranger);
    let request = Request::get("https://edge-1:9100/")
        .body(whole(""))
        .unwrap();
    assert!(client.try_send(request).await.is_err());
    until_counted(&world, "https").await;
    // The client has an alert; the logs of both ends have the reason.
    let log = world.log().text();
    let message = log
        .lines()
        .filter(|line| line.contains("invalid peer certificate"));
    let targets = message.map(|line| line.contains("\"target\":\"audit\""));
    assert_eq!(targets.collect::<Vec<_>>(), [false, true], "{log}");
}

#[tokio::test]
async fn a_listener_may_trust_another_ca_instead_of_our_own() {
    let build = World::build();
    let theirs = other_ca();
    let file = build.folder().join("theirs.pem");
    std::fs::write(&file, theirs.root_pem()).unwrap();
    let listener = Listener {
        client_auth: ClientAuth {
            own_ca: false,
            client_ca: vec![file],
            ..ClientAuth::default()
        },
        ..listener("theirs", ListenerProtocol::Https)
    };
    let world = build.listener(listener).start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let leaf = theirs.issue_client("scraper", &[], LIFE).unwrap();
    let client = world.client_at("theirs");
    let answer = client
        .clone()
        .certificate(&leaf)
        .get("https://edge-1:9100/")
        .await;
    assert_eq!(answer.text(), "it");
    let request = Request::get("https://edge-1:9100/")
        .body(whole(""))
        .unwrap();
    assert!(client.try_send(request).await.is_err());
}

async fn refused(plan: crate::world::edge::Plan<'_>) -> Error {
    let Err(error) = plan.open().await else {
        panic!("the edge joined");
    };
    error
}

#[tokio::test]
async fn an_invalid_token_names_its_fault() {
    let world = World::start().await;
    let text = |token: causeway_certs::JoinToken| token.text().expose().to_owned();

    let expired = text(world.token("edge-1", Duration::ZERO));
    let error = refused(world.edge("edge-1").token(&expired)).await;
    assert!(
        matches!(error, Error::Enrol(EnrolError::Expired(_))),
        "{error}"
    );
    assert!(error.to_string().contains("expired"), "{error}");

    let used = text(world.token("edge-1", LIFE));
    drop(world.edge("edge-1").token(&used).join().await);
    let elsewhere = world.folder().join("second");
    let plan = world.edge("edge-1").token(&used);
    let error = refused(plan.config(|config| config.data_dir = elsewhere)).await;
    assert!(
        matches!(error, Error::Enrol(EnrolError::Used(_))),
        "{error}"
    );
    assert!(error.to_string().contains("already used"), "{error}");

    let other = text(world.token("edge-2", LIFE));
    let plan = world.edge("edge-3").token(&other);
    let error = refused(plan.config(|config| config.node = Some("edge-3".to_owned()))).await;
    assert!(
        matches!(error, Error::Enrol(EnrolError::OtherNode(_))),
        "{error}"
    );
    assert!(error.to_string().contains("for node edge-2"), "{error}");
    // A refusal uses up no token.
    drop(world.edge("edge-2").token(&other).join().await);

    let stranger = World::start().await;
    let unknown = text(stranger.token("edge-4", LIFE));
    let error = refused(world.edge("edge-4").token(&unknown)).await;
    assert!(
        matches!(error, Error::Enrol(EnrolError::UnexpectedCa(_))),
        "{error}"
    );
    let node = NodeName::parse("edge-4").unwrap();
    let tokens = stranger.store().tokens().unwrap();
    let token = tokens.all().unwrap().pop().unwrap();
    assert_eq!(
        (token.nodes.node(), token.used.len()),
        (Some(node), 0),
        "the wrong gateway did not get the token"
    );

    let forgotten = world.token("edge-5", LIFE);
    world
        .store()
        .tokens()
        .unwrap()
        .remove(&forgotten.id)
        .unwrap();
    let error = refused(world.edge("edge-5").token(&text(forgotten))).await;
    assert!(
        matches!(error, Error::Enrol(EnrolError::Unknown(_))),
        "{error}"
    );

    let error = refused(world.edge("edge-6").token("cwj1.half")).await;
    assert!(matches!(error, Error::Token(_)), "{error}");
}

#[tokio::test]
async fn an_edge_that_has_joined_needs_its_token_no_more() {
    let mut world = World::start().await;
    let app = App::saying("it").await;
    let mut edge = world.edge("edge-1").port(9100, app.address()).join().await;
    edge.kill().await;
    edge.forget_token();
    world.kill_gateway().await;
    world.start_gateway().await;
    edge.start().await.unwrap();
    world.until_tunnels("edge-1", 1).await;
    assert_eq!(
        world.client().get("https://edge-1:9100/").await.text(),
        "it"
    );
}

#[tokio::test]
async fn an_edge_without_identity_and_token_names_the_missing_part() {
    let world = World::start().await;
    let folder = world.folder().join("empty");
    let config = causeway_edge::Config {
        data_dir: folder,
        gateways: vec![world.tunnel().to_string()],
        ..Default::default()
    };
    let opened = causeway_edge::Edge::open(config, &CancellationToken::new()).await;
    let error = opened.unwrap_err().to_string();
    assert!(error.contains("causeway token create"), "{error}");
}

/// Returns all files of a directory, with their modes.
fn modes(folder: &Path) -> Vec<(String, u32)> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mode = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.unwrap();
        // A new file that has just replaced another one is not found by its first name.
        let metadata = entry.metadata().ok()?;
        let mode = metadata.permissions().mode() & 0o777;
        Some((entry.file_name().to_string_lossy().into_owned(), mode))
    };
    entries.filter_map(mode).collect()
}

#[tokio::test]
async fn keys_are_their_owners_only() {
    let world = World::start().await;
    let edge = world.edge("edge-1").join().await;
    for folder in [edge.folder(), world.folder().join("gateway")] {
        let itself = std::fs::metadata(&folder).unwrap().permissions().mode();
        assert_eq!(itself & 0o777, 0o700, "{}", folder.display());
        let files = modes(&folder);
        assert!(files.len() > 1, "{files:?}");
        assert!(files.iter().all(|(_, mode)| *mode == 0o600), "{files:?}");
    }
}

#[tokio::test]
async fn anonymous_clients_need_a_listed_network_and_port() {
    let narrow = |name, kind| Listener {
        anonymous_from: vec!["127.0.0.2/32".parse().unwrap()],
        anonymous_ports: vec![9100],
        ..anonymous(name, kind)
    };
    let bytes = Listener {
        anonymous: true,
        anonymous_from: vec!["127.0.0.2/32".parse().unwrap()],
        ..fixed("bytes", ListenerProtocol::Tcp, "edge-1", 22)
    };
    let world = World::build().listener(narrow("plain", ListenerProtocol::Http));
    let world = world
        .listener(narrow("open", ListenerProtocol::Https))
        .listener(bytes)
        .start()
        .await;
    let app = App::saying("it").await;
    let echo = App::tcp(Script::new().write("hello")).await;
    let edge = world
        .edge("edge-1")
        .port(9100, app.address())
        .port(9101, app.address());
    let _edge = edge.port_as(22, Protocol::Tcp, echo.address()).join().await;

    let elsewhere = "does not serve clients from this address";
    let plain = world.client_at("plain").from("127.0.0.2");
    assert_eq!(plain.get("http://edge-1:9100/").await.text(), "it");
    let answer = plain.get("http://edge-1:9101/").await;
    assert_problem(&answer, 401, "unauthenticated", elsewhere);
    let answer = plain.from("127.0.0.3").get("http://edge-1:9100/").await;
    assert_problem(&answer, 401, "unauthenticated", elsewhere);
    let open = world.client_at("open");
    let answer = open
        .clone()
        .nobody()
        .from("127.0.0.3")
        .get("https://edge-1:9100/")
        .await;
    assert_problem(
        &answer,
        401,
        "unauthenticated",
        "no credentials were presented; this listener requires a client certificate",
    );
    let answer = open.from("127.0.0.3").get("https://edge-1:9101/").await;
    assert_eq!(
        answer.text(),
        "it",
        "a certificate is not bound to a network"
    );

    let bytes = world.client_at("bytes");
    let mut near = bytes.clone().from("127.0.0.2").wire("", &[]).await.unwrap();
    assert_eq!(read(&mut near, 5).await, b"hello");
    let mut far = bytes.from("127.0.0.3").wire("", &[]).await.unwrap();
    assert!(read_to_end(&mut far).await.is_err(), "reset");
    assert_eq!(echo.connections(), 1);
}

#[tokio::test]
async fn a_tcp_listener_wants_tls_with_a_certificate() {
    let listener = fixed("bytes", ListenerProtocol::Tcp, "edge-1", 22);
    let world = World::build().listener(listener).start().await;
    let app = App::tcp(Script::new().write("hello")).await;
    let edge = world
        .edge("edge-1")
        .port_as(22, Protocol::Tcp, app.address());
    let _edge = edge.join().await;
    let client = world.client_at("bytes");
    let nobody = client.clone().nobody().wire(GATEWAY_NAME, &[]).await;
    // The reset may overtake the end of the handshake.
    if let Ok(mut nobody) = nobody {
        assert!(read_to_end(&mut nobody).await.is_err(), "reset");
    }
    until("it was recorded", async || {
        world.metrics().await.outcomes("bytes", "unauthenticated") == 1
    })
    .await;
    assert_eq!(app.connections(), 0);
    let mut known = client.wire(GATEWAY_NAME, &[]).await.unwrap();
    assert_eq!(read(&mut known, 5).await, b"hello");
}

#[tokio::test]
async fn a_bearer_token_names_its_client_and_stays_at_the_gateway() {
    let build = World::build();
    let token = build.token("prometheus");
    let clients = ClientAuth {
        own_ca: false,
        tokens: Some(build.tokens()),
        ..ClientAuth::default()
    };
    let keeping = Listener {
        client_auth: clients,
        ..listener("keeping", ListenerProtocol::Http)
    };
    let passing = Listener {
        name: "passing".to_owned(),
        forward_authorization: true,
        ..keeping.clone()
    };
    let world = build.listener(keeping).listener(passing).start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    for (listener, passed) in [
        ("keeping", None),
        ("passing", Some(format!("Bearer {token}"))),
    ] {
        let client = world.client_at(listener).bearer(&token);
        assert_eq!(client.get("http://edge-1:9100/").await.text(), "it");
        assert_eq!(app.head().await.value("authorization"), passed);
    }
    world.until_idle().await;
    let records = world.log().records();
    assert!(
        records
            .iter()
            .all(|record| record["client"] == "prometheus" && record["by"] == "token"),
        "{records:?}"
    );
}

#[tokio::test]
async fn a_wrong_token_is_never_anonymous() {
    let build = World::build();
    build.token("prometheus");
    let listener = Listener {
        client_auth: ClientAuth {
            own_ca: false,
            tokens: Some(build.tokens()),
            ..ClientAuth::default()
        },
        ..anonymous("plain", ListenerProtocol::Http)
    };
    let world = build.listener(listener).start().await;
    let client = world.client_at("plain");
    let answer = client
        .clone()
        .bearer("cwc1.wrong")
        .get("http://edge-1:9100/")
        .await;
    assert_problem(
        &answer,
        401,
        "unauthenticated",
        "token: not known to this listener",
    );
    let answer = client.get("http://edge-1:9100/").await;
    assert_problem(&answer, 404, "node_unknown", "edge-1");
}

#[tokio::test]
async fn a_unix_socket_knows_its_client_by_the_kernel() {
    let build = World::build();
    let path = build.folder().join("connect.sock");
    let listener = Listener::new(
        "unix",
        ListenerProtocol::Connect,
        ListenAddr::Unix(path.clone()),
    );
    let world = build.listener(listener).start().await;
    let echo = App::tcp(Script::new().write("hello").echo()).await;
    let edge = world
        .edge("edge-1")
        .port_as(22, Protocol::Tcp, echo.address());
    let _edge = edge.join().await;
    let socket = std::fs::metadata(&path).unwrap();
    assert_eq!(socket.permissions().mode() & 0o777, 0o600);
    let client = world.client_at("unix");
    let mut wire = client.wire("", &[]).await.unwrap();
    let head = "CONNECT edge-1:22 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
    let answer = crate::world::client::exchange(&mut *wire, head).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert_eq!(read(&mut wire, 5).await, b"hello");
    drop(wire);
    world.until_idle().await;
    let records = world.log().records();
    assert_eq!(records[0]["client"], format!("uid:{}", socket.uid()));
    assert_eq!(records[0]["by"], "unix");
}

#[tokio::test]
async fn a_listener_certificate_is_issued_for_the_requested_node() {
    let world = World::start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    // The assertion is the client's own verification of the name.
    world.client().tls_stream("edge-1", &["h2"]).await.unwrap();
    let unknown = world.client().tls_stream("edge-9", &["h2"]).await;
    assert!(
        unknown.is_err(),
        "no certificate is issued for a name that is no node's"
    );
}
