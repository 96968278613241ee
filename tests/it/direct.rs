//! Connect listener that dials addresses that no connected edge serves, and only in its networks.

use crate::world::{
    GATEWAY_NAME, PATIENCE, World,
    app::{App, End, PauseGate, Script, answer::pattern},
    client::{Answer, Wire, assert_problem, exchange, read_to_end},
    frames::{
        DATA, END_HEADERS, Frame, HEADERS, PREFACE, RST_STREAM, WINDOW_UPDATE, fields, frame, next,
        send, settings,
    },
    gateway::{anonymous, listener},
    until,
};
use causeway_certs::NodeName;
use causeway_edge::config::Protocol;
use causeway_gateway::{
    config::{ErrorFormat, Kubernetes, Listener, ListenerProtocol, policy},
    state::{ClusterNode, Pod, Policy, PolicyWriter},
};
use futures_util::FutureExt;
use serde_json::{Value, json};
use std::{collections::BTreeSet, io::ErrorKind};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tokio_rustls::client::TlsStream;

const HELLO: &str = "HTTP/1.1 200 ";

/// Listener without authentication that dials on loopback.
fn dialling(name: &str) -> Listener {
    Listener {
        direct_networks: vec!["127.0.0.0/8".parse().unwrap()],
        ..anonymous(name, ListenerProtocol::Connect)
    }
}

async fn world() -> World {
    let narrow = Listener {
        direct_networks: vec!["127.9.0.0/16".parse().unwrap()],
        ..anonymous("narrow", ListenerProtocol::Connect)
    };
    let api = Listener {
        errors: ErrorFormat::Kubernetes,
        ..dialling("api")
    };
    let known = Listener {
        anonymous: false,
        ..dialling("known")
    };
    let build = World::build().listener(dialling("wide")).listener(narrow);
    let build = build.listener(api).listener(known);
    build
        .listener(listener("closed", ListenerProtocol::Connect))
        .start()
        .await
}

async fn asked(world: &World, listener: &str, target: &str) -> (TlsStream<TcpStream>, String) {
    let client = world.client_at(listener);
    let mut wire = client.tls_stream(GATEWAY_NAME, &[]).await.unwrap();
    let head = format!("CONNECT {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
    let answer = exchange(&mut wire, head).await;
    (wire, answer)
}

async fn refused(world: &World, listener: &str, target: &str) -> Answer {
    let head = format!("CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n");
    world.client_at(listener).raw(GATEWAY_NAME, head).await
}

#[tokio::test]
async fn non_edge_targets_are_dialled_directly_and_edges_by_tunnel() {
    let world = world().await;
    let (app, at_edge) = (
        App::tcp(Script::new().echo()).await,
        App::saying("edge").await,
    );
    let _edge = world
        .edge("edge-1")
        .port(9100, at_edge.address())
        .join()
        .await;

    let (mut wire, answer) = asked(&world, "wide", &app.address().to_string()).await;
    assert!(answer.starts_with(HELLO), "{answer}");
    wire.write_all(b"there and back").await.unwrap();
    wire.shutdown().await.unwrap();
    assert_eq!(read_to_end(&mut wire).await.unwrap(), b"there and back");

    let by_name = format!("localhost:{}", app.port());
    assert!(asked(&world, "wide", &by_name).await.1.starts_with(HELLO));

    let (mut wire, answer) = asked(&world, "wide", "edge-1:9100").await;
    assert!(answer.starts_with(HELLO), "{answer}");
    let answer = exchange(&mut wire, "GET / HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(answer.starts_with(HELLO), "{answer}");
    assert_eq!(at_edge.requests(), 1);

    until("all three were recorded", async || {
        world.metrics().await.outcomes("wide", "ok") >= 1
    })
    .await;
    let records = world.log().records();
    let first = &records[0];
    let path = app.address().to_string();
    assert_eq!(
        (&first["path"], &first["status"]),
        (&path.into(), &200.into())
    );
    assert_eq!((&first["up"], &first["down"]), (&14.into(), &14.into()));
}

#[tokio::test]
async fn direct_targets_must_be_in_the_listeners_networks() {
    let world = world().await;
    let app = App::tcp(Script::new().echo()).await;
    let address = app.address().to_string();
    let by_name = format!("localhost:{}", app.port());
    for target in [&address, &by_name] {
        let answer = refused(&world, "narrow", target).await;
        assert_problem(
            &answer,
            403,
            "forbidden",
            "in no network that listener \"narrow\" dials itself",
        );
    }
    let mapped = format!("[::ffff:127.0.0.1]:{}", app.port());
    assert_eq!(refused(&world, "narrow", &mapped).await.status, 403);
    let answer = refused(&world, "closed", &address).await;
    assert_problem(&answer, 404, "node_unknown", "127.0.0.1");
    let answer = refused(&world, "wide", "nobody.invalid:80").await;
    assert_problem(&answer, 404, "node_unknown", "nobody.invalid");
    let nobody = world.client_at("known").nobody();
    let head = format!("CONNECT {address} HTTP/1.1\r\nHost: x\r\n\r\n");
    let answer = nobody.raw(GATEWAY_NAME, head).await;
    assert_eq!(answer.status, 407, "{answer}");
    assert_eq!(app.connections(), 0);
}

#[tokio::test]
async fn a_failed_direct_dial_reports_its_reason() {
    let world = world().await;
    let closed = App::refusing();
    let answer = refused(&world, "wide", &closed.address().to_string()).await;
    let port = closed.port().to_string();
    assert_problem(&answer, 502, "target_refused", &port);
}

#[tokio::test]
async fn server_first_targets_wait_for_kube_apiservers_first_byte() {
    let world = world().await;
    let app = App::tcp(Script::new().write("220 well\r\n").echo()).await;
    let target = app.address().to_string();
    let (mut wire, answer) = asked(&world, "wide", &target).await;
    assert!(answer.starts_with(HELLO), "{answer}");
    let mut banner = [0; 10];
    wire.read_exact(&mut banner).await.unwrap();
    assert_eq!(&banner, b"220 well\r\n");

    let (mut wire, answer) = asked(&world, "api", &target).await;
    assert!(
        answer.ends_with("\r\n\r\n"),
        "nothing behind the answer: {answer}"
    );
    wire.write_all(b"x").await.unwrap();
    let mut both = [0; 11];
    wire.read_exact(&mut both).await.unwrap();
    assert_eq!(&both, b"220 well\r\nx");
}

#[tokio::test]
async fn a_reset_on_one_side_is_a_reset_on_the_other() {
    let world = world().await;
    let gate = PauseGate::new();
    let breaking = App::tcp(Script::new().until(&gate).reset()).await;
    let (mut wire, _) = asked(&world, "wide", &breaking.address().to_string()).await;
    gate.open();
    let error = read_to_end(&mut wire).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);

    let app = App::tcp(Script::new().silence()).await;
    let (wire, _) = asked(&world, "wide", &app.address().to_string()).await;
    let (tcp, _) = wire.into_inner();
    tcp.set_zero_linger().unwrap();
    drop(tcp);
    assert_eq!(app.end().await, End::Reset);
}

/// Number of bytes that a target sends before it resets its connection.
const LAST_BYTES: usize = 48 << 10;

/// Accepts a connection, and resets it behind these bytes.
async fn accept_and_reset(app: &TcpListener, sent: &[u8]) {
    let (mut accepted, _) = app.accept().await.unwrap();
    accepted.write_all(sent).await.unwrap();
    accepted.set_zero_linger().unwrap();
}

/// Receives these bytes and then a reset; or an end, if the error of a write may have consumed the reset.
async fn receive_all(wire: &mut dyn Wire, may_end: bool, sent: &[u8]) {
    let (mut received, mut buf) = (Vec::new(), [0; 4096]);
    loop {
        match timeout(PATIENCE, wire.read(&mut buf)).await.unwrap() {
            Ok(0) if may_end => break,
            Ok(0) => panic!("an end in order behind {} bytes", received.len()),
            Ok(read) => received.extend_from_slice(&buf[..read]),
            // An end without the alert of TLS.
            Err(error) if may_end && error.kind() == ErrorKind::UnexpectedEof => break,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset);
                break;
            }
        }
    }
    assert!(received == sent, "{} bytes", received.len());
}

/// Starts a gateway that dials targets itself.
async fn dialling_world() -> World {
    let api = Listener {
        errors: ErrorFormat::Kubernetes,
        ..dialling("api")
    };
    let build = World::build().listener(dialling("wide")).listener(api);
    build.start().await
}

/// The bytes of a target that has reset its connection are unread when the client's first bytes are sent to it.
#[tokio::test]
async fn the_last_bytes_of_a_dialled_target_precede_its_reset() {
    let sent = pattern(LAST_BYTES);
    let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = app.local_addr().unwrap().to_string();
    let world = dialling_world().await;
    for listener in ["wide", "api"] {
        let (mut wire, answer) = asked(&world, listener, &target).await;
        assert!(answer.starts_with(HELLO), "{listener}: {answer}");
        accept_and_reset(&app, &sent).await;
        // If the relay of "wide" has ended already, this may fail.
        let written = wire.write_all(b"first").await;
        receive_all(&mut wire, written.is_err(), &sent).await;
    }
}

#[tokio::test]
async fn the_last_bytes_of_a_target_precede_its_reset_over_http2() {
    let sent = pattern(LAST_BYTES);
    let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = app.local_addr().unwrap().to_string();
    let world = dialling_world().await;
    let client = world.client_at("api");
    let mut wire = client.wire(GATEWAY_NAME, &["h2"]).await.unwrap();
    let head = fields(&[(":method", "CONNECT"), (":authority", &target)]);
    let head = frame(HEADERS, END_HEADERS, 1, &head);
    let opening = [PREFACE, &settings(&[]), &head].concat();
    send(&mut *wire, &opening).await.unwrap();
    let answer = next_of(&mut *wire).await;
    assert_eq!((answer.kind, answer.status()), (HEADERS, 200));
    accept_and_reset(&app, &sent).await;
    send(&mut *wire, &frame(DATA, 0, 1, b"first"))
        .await
        .unwrap();
    let mut received = Vec::new();
    let end = loop {
        match next_of(&mut *wire).await {
            data if data.kind == DATA => received.extend_from_slice(&data.payload),
            end => break end,
        }
    };
    assert!(received == sent, "{} bytes", received.len());
    let code = &end.payload[..];
    assert_eq!((end.kind, code), (RST_STREAM, &[0, 0, 0, 10][..]));
}

#[tokio::test]
async fn the_last_bytes_of_a_target_at_an_edge_precede_its_reset() {
    let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at_edge = Listener {
        node: Some("edge-1".to_owned()),
        port: Some(7),
        ..anonymous("tcp", ListenerProtocol::Tcp)
    };
    let world = World::build().listener(at_edge).start().await;
    let edge = world.edge("edge-1");
    let edge = edge.port_as(7, Protocol::Tcp, app.local_addr().unwrap());
    let _edge = edge.join().await;
    let mut wire = world.client_at("tcp").tcp_stream().await;
    let (mut accepted, _) = app.accept().await.unwrap();
    // A reset before the edge knows that it is connected would be a failed dial.
    accepted.write_all(b"x").await.unwrap();
    wire.read_exact(&mut [0]).await.unwrap();
    // A tunnel takes the last bytes as far as its buffers and windows accept them at once.
    let few = pattern(4 << 10);
    accepted.write_all(&few).await.unwrap();
    accepted.set_zero_linger().unwrap();
    drop(accepted);
    receive_all(&mut wire, false, &few).await;
}

/// Returns the next frame of stream 1, except updates of its window.
async fn next_of(wire: &mut dyn Wire) -> Frame {
    loop {
        let frame = timeout(PATIENCE, next(wire)).await.unwrap().unwrap();
        if frame.stream == 1 && frame.kind != WINDOW_UPDATE {
            return frame;
        }
    }
}

#[tokio::test]
async fn direct_sessions_count_against_their_clients_limit() {
    let build = World::build().listener(dialling("wide"));
    let world = build
        .config(|config| config.limits.per_client = 1)
        .start()
        .await;
    let app = App::tcp(Script::new().echo()).await;
    let target = app.address().to_string();
    let (wire, answer) = asked(&world, "wide", &target).await;
    assert!(answer.starts_with(HELLO), "{answer}");
    let answer = refused(&world, "wide", &target).await;
    assert_problem(&answer, 503, "limit_reached", "limit");
    drop(wire);
    until("a connection is free again", async || {
        asked(&world, "wide", &target).await.1.starts_with(HELLO)
    })
    .await;
}

fn compiled(rules: &Value) -> Policy {
    let policy: policy::Policy = serde_json::from_value(json!({ "rules": rules })).unwrap();
    Policy::compile(&policy).unwrap()
}

#[tokio::test]
async fn the_policy_decides_direct_dials_by_address_during_sessions() {
    let services =
        json!([{ "name": "services", "where": { "direct": ["127.0.0.0/16"] }, "then": "allow" }]);
    let rules = PolicyWriter::new(Some(compiled(&json!([]))));
    let build = World::build().policy(rules.reader());
    let world = build.listener(dialling("wide")).start().await;
    let app = App::tcp(Script::new().echo()).await;
    let (target, port) = (app.address().to_string(), app.port());
    let by_name = format!("localhost:{port}");
    let nodes = json!([{ "where": { "nodes": ["*"] }, "then": "allow" }]);
    let elsewhere = json!([{ "where": { "direct": ["10.0.0.0/8"] }, "then": "allow" }]);
    let ports = json!([{ "what": { "ports": [1] }, "then": "allow" }]);
    for denying in [json!([]), nodes, elsewhere, ports] {
        rules.replace(Some(compiled(&denying)));
        for target in [&target, &by_name] {
            let answer = refused(&world, "wide", target).await;
            let says = format!("connect to 127.0.0.1:{port}, which belongs to no edge");
            assert_problem(&answer, 403, "forbidden", &says);
        }
    }
    assert_eq!(app.connections(), 0, "nothing was dialled");
    rules.replace(Some(compiled(&services)));
    let mut open = Vec::new();
    for target in [&target, &by_name] {
        let (wire, answer) = asked(&world, "wide", target).await;
        assert!(answer.starts_with(HELLO), "{answer}");
        open.push(wire);
    }
    // Another policy that still allows it, and then no policy.
    rules.replace(Some(compiled(&json!([{ "then": "allow" }]))));
    for wire in &mut open {
        wire.write_all(b"x").await.unwrap();
        wire.read_exact(&mut [0]).await.unwrap();
    }
    rules.replace(Some(compiled(&json!([]))));
    for mut wire in open {
        let ended = read_to_end(&mut wire).await;
        assert!(ended.is_err(), "{ended:?}");
    }
}

/// A CONNECT to an edge's address must not be dialled from the gateway's host before the cluster has named its nodes.
#[tokio::test]
async fn direct_dials_wait_until_the_nodes_are_known() {
    let build = World::build().listener(dialling("wide"));
    let build = build.config(|config| {
        config.kubernetes = Some(Kubernetes {
            address_networks: vec!["10.0.0.0/8".parse().unwrap()],
            ..Kubernetes::default()
        });
    });
    let world = build.start().await;
    let app = App::tcp(Script::new().echo()).await;
    let address = app.address().to_string();
    for target in [address.as_str(), "edge-7:80", "localhost:80"] {
        let answer = refused(&world, "wide", target).await;
        assert_problem(
            &answer,
            503,
            "dependency_unavailable",
            "not been loaded yet",
        );
    }
    assert_eq!(app.connections(), 0);
    world
        .nodes()
        .set_pending("the nodes of the cluster have not been loaded yet: forbidden");
    let answer = refused(&world, "wide", &address).await;
    assert_problem(
        &answer,
        503,
        "dependency_unavailable",
        "not been loaded yet: forbidden",
    );
    world
        .nodes()
        .replace_cluster([(NodeName::parse("cloud-1").unwrap(), ClusterNode::default())].into());
    let (_wire, answer) = asked(&world, "wide", &address).await;
    assert!(answer.starts_with(HELLO), "{answer}");
}

/// Adds a node that is no edge, at these addresses.
fn add_node_elsewhere(world: &World, addresses: &[&str]) {
    let node = ClusterNode {
        addresses: addresses.iter().map(|each| each.parse().unwrap()).collect(),
        ..ClusterNode::default()
    };
    let nodes = [(NodeName::parse("cloud-1").unwrap(), node)];
    world.nodes().replace_cluster(nodes.into());
}

#[tokio::test]
async fn the_next_address_of_a_name_is_dialled_after_one_that_fails() {
    let rules = json!([
        { "where": { "direct": ["127.0.0.2/32"] }, "then": "deny" },
        { "then": "allow" },
    ]);
    let rules = PolicyWriter::new(Some(compiled(&rules)));
    let build = World::build().policy(rules.reader());
    let world = build.listener(dialling("wide")).start().await;
    // A socket of another test may have the same port at the other address.
    let (app, denied) = loop {
        let app = App::tcp(Script::new().echo()).await;
        if let Ok(denied) = TcpListener::bind(("127.0.0.2", app.port())).await {
            break (app, denied);
        }
    };
    let target = format!("cloud-1:{}", app.port());
    let nobody = async || {
        let client = world.client_at("wide").nobody();
        let mut wire = client.tls_stream(GATEWAY_NAME, &[]).await.unwrap();
        let head = format!("CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n");
        (exchange(&mut wire, head).await, wire)
    };
    // The policy refuses the first address, and no server is at the second.
    add_node_elsewhere(&world, &["127.0.0.2", "127.0.0.3", "127.0.0.1"]);
    let (answer, mut wire) = nobody().await;
    assert!(answer.starts_with(HELLO), "{answer}");
    wire.write_all(b"x").await.unwrap();
    wire.read_exact(&mut [0]).await.unwrap();
    // The error is that of the last address.
    for (addresses, status) in [
        (["127.0.0.2", "127.0.0.3"], " 502 "),
        (["127.0.0.3", "127.0.0.2"], " 403 "),
    ] {
        add_node_elsewhere(&world, &addresses);
        let (answer, _) = nobody().await;
        let line = answer.lines().next().unwrap();
        assert!(line.contains(status), "{line}");
    }
    let accepted = denied.accept().now_or_never();
    assert!(accepted.is_none(), "a refused address was dialled");
}

#[tokio::test]
async fn anonymous_clients_of_direct_networks_do_not_learn_which_pods_exist() {
    let rules = json!([
        { "where": { "direct": ["10.250.0.0/16", "192.0.2.0/24"] }, "then": "deny" },
        { "then": "allow" },
    ]);
    let rules = PolicyWriter::new(Some(compiled(&rules)));
    let wide = |listener| Listener {
        direct_networks: vec!["0.0.0.0/0".parse().unwrap()],
        ..listener
    };
    let open = wide(anonymous("open", ListenerProtocol::Connect));
    let known = wide(listener("known", ListenerProtocol::Connect));
    let build = World::build().policy(rules.reader());
    let world = build.listener(open).listener(known).start().await;
    let targets = [
        ("10.250.0.3:80", 403, "forbidden"),
        ("cloud.a.pod:80", 403, "forbidden"),
        ("cloud-1:80", 403, "forbidden"),
        ("10.250.0.9:80", 404, "node_unknown"),
        ("nobody.a.pod:80", 404, "node_unknown"),
        ("nobody.invalid:80", 404, "node_unknown"),
    ];
    // Without pods there is nothing to hide.
    add_node_elsewhere(&world, &["192.0.2.1"]);
    let answer = refused(&world, "open", "cloud-1:80").await;
    assert_problem(&answer, 403, "forbidden", "192.0.2.1");

    let nodes = world.nodes();
    nodes.follow_pods(&["10.250.0.0/16".parse().unwrap()]);
    add_node_elsewhere(&world, &["192.0.2.1"]);
    let mut pods = nodes.pods(9).unwrap();
    let pod = Pod {
        name: "a/cloud".into(),
        node: NodeName::parse("cloud-1").unwrap(),
        addresses: ["10.250.0.3".parse().unwrap()].into(),
        ends_at: None,
    };
    pods.replace(vec![pod]).unwrap();
    let mut bodies = BTreeSet::new();
    for (target, status, reason) in targets {
        let head = format!("CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n");
        let client = world.client_at("open").nobody();
        let answer = client.raw(GATEWAY_NAME, head).await;
        assert_eq!(answer.status, 407, "{target}: {answer}");
        let mut body: Value = serde_json::from_str(&answer.text()).unwrap();
        body["trace"].take();
        bodies.insert(body.to_string());
        // A client that is known learns the reason.
        let answer = refused(&world, "known", target).await;
        assert_problem(&answer, status, reason, "");
    }
    assert_eq!(bodies.len(), 1, "{bodies:?}");
}
