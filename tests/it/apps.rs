//! Apps to which the gateway itself speaks TLS, with a key that no edge has. Requests equal those that an edge would send.

use crate::{
    testbed::{TestBed, URL},
    world::{
        World,
        app::{App, End, Head, PauseGate, Script, answer, answer::pattern},
        authority::Authority,
        client::{assert_problem, exchange, read, read_head, read_to_end, whole},
        edge::Edge,
        gateway::listener,
        until,
    },
};
use causeway_certs::LeafCertificate;
use causeway_edge::config::Protocol;
use causeway_gateway::config::{self, Config, ErrorFormat, Listener, ListenerProtocol};
use futures_util::future::join_all;
use http_body_util::BodyExt;
use hyper::Request;
use std::{
    fs,
    path::{Path, PathBuf},
    pin::pin,
    time::Duration,
};
use tokio::{io::AsyncWriteExt, net::TcpListener, task::JoinSet};
use tokio_rustls::TlsAcceptor;

const KUBELET: u16 = 10250;
const EXEC: &str = "POST /exec HTTP/1.1\r\nHost: edge-1:9100\r\nContent-Length: 0\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
     X-Stream-Protocol-Version: v5\r\nX-Stream-Protocol-Version: v4\r\nX-Stream-Protocol-Version: v3\r\n\
     X-Stream-Protocol-Version: v2\r\nX-Stream-Protocol-Version: v1\r\n\r\n";

pub(crate) fn by_path(head: &Head) -> Script {
    match head.path().as_str() {
        "/mirror" => answer::mirror(),
        "/continue" => answer::after_continue("continued"),
        "/hints" => answer::after_hints("hinted"),
        "/head" => answer::to_head(1_000_000),
        "/until-close" => answer::until_close("all of it"),
        "/refused" => answer::refuse_upgrade("403 Forbidden", "not you"),
        "/exec" => answer::switch("SPDY/3.1", &pattern(3_000)),
        "/endless" => answer::endless(),
        "/once" => answer::ok("once").close(),
        "/large" => answer::bytes(&pattern(8 << 20)),
        _ => answer::ok("well"),
    }
}

/// The files of an app's configuration.
pub(crate) fn asked(
    folder: &Path,
    authority: &Authority,
    client: Option<&LeafCertificate>,
) -> config::UpstreamTls {
    let file = |name: &str, text: &str| -> PathBuf {
        let path = folder.join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let shown = client.map(|leaf| {
        let chain = file("client.pem", &leaf.chain_pem());
        (chain, file("client.key", leaf.key_pem().expose()))
    });
    let (certificate, key) = shown.unzip();
    config::UpstreamTls {
        ca: Some(file("apps.pem", authority.pem())),
        certificate,
        key,
        ..config::UpstreamTls::default()
    }
}

/// A world whose gateway speaks TLS to port 10250 of all nodes, and admits edges.
async fn world(authority: &Authority, client: Option<&LeafCertificate>) -> World {
    let build = World::build();
    let ours = asked(build.folder(), authority, client);
    let build = build.config(|config| drop(config.upstream_tls.insert(KUBELET, ours)));
    let plain = Listener {
        errors: ErrorFormat::Kubernetes,
        ..listener("kubernetes", ListenerProtocol::Https)
    };
    build.listener(plain).start().await
}

async fn edge(world: &World, node: &str, app: &App) -> Edge {
    let plan = world.edge(node);
    plan.port_as(KUBELET, Protocol::Tcp, app.address())
        .address("192.0.2.7")
        .join()
        .await
}

#[tokio::test]
async fn requests_pass_with_bodies_and_connections_are_reused() {
    let (app, testbed) = TestBed::secured(by_path).await;
    // More bytes would start a second tunnel, which has separate connections.
    let large = pattern(1 << 18);
    for client in [testbed.client(), testbed.http2()] {
        assert_eq!(client.get(URL).await.text(), "well");
        let url = format!("{URL}mirror");
        let mirrored = client.ask("POST", &url, large.clone());
        assert_eq!(mirrored.await.body, large);
        assert_eq!(client.get(&format!("{URL}hints")).await.text(), "hinted");
        let head = client.ask("HEAD", &format!("{URL}head"), "").await;
        assert_eq!(head.field("content-length"), "1000000");
        let expecting = client.clone().field("expect", "100-continue");
        let url = format!("{URL}continue");
        let continued = expecting.ask("PUT", &url, "more");
        assert_eq!(continued.await.text(), "continued");
    }
    assert_eq!(app.connections(), 1, "one after the other");
    let head = app.head().await;
    let seen = [head.value("host"), head.value("via")].map(Option::unwrap);
    assert_eq!(seen, ["edge-1:9100", "1.1 causeway"]);
    assert!(head.value("forwarded").unwrap().contains("for=127.0.0.1"));
    let clients = (0..64).map(|number| {
        let (client, url) = (testbed.client(), format!("{URL}mirror"));
        async move {
            let body = pattern(1_000 * number);
            let answer = client.ask("POST", &url, body.clone()).await;
            assert_eq!(answer.body, body);
        }
    });
    join_all(clients).await;
    let before = app.connections();
    for _ in 0..20 {
        assert_eq!(testbed.client().get(URL).await.status, 200);
    }
    assert_eq!(app.connections(), before);
    testbed.until_idle().await;
}

#[tokio::test]
async fn an_upstream_may_close_between_requests_or_end_an_answer_so() {
    let (app, testbed) = TestBed::secured(by_path).await;
    let client = testbed.client();
    for number in 1..=5 {
        let answer = client.get(&format!("{URL}once")).await;
        assert_eq!(answer.text(), "once");
        assert_eq!(app.connections(), number);
    }
    assert_eq!(
        client.get(&format!("{URL}until-close")).await.text(),
        "all of it"
    );
    assert_eq!(client.ask("POST", URL, "body").await.text(), "well");
}

#[tokio::test]
async fn an_upgrade_keeps_fields_and_bytes_behind_the_101() {
    let (app, testbed) = TestBed::secured(by_path).await;
    let mut wire = testbed.tls().await;
    let head = exchange(&mut wire, EXEC).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert!(head.to_lowercase().contains("upgrade: spdy/3.1"), "{head}");
    assert_eq!(read(&mut wire, 3_000).await, pattern(3_000));
    let asked = app.head().await;
    let versions = asked.values("X-Stream-Protocol-Version");
    assert_eq!(versions, ["v5", "v4", "v3", "v2", "v1"]);
    assert!(asked.line().starts_with("POST /exec "));
    assert_eq!(asked.value("Content-Length").unwrap(), "0");
    let titled = |name: &str| asked.fields().iter().any(|(found, _)| found == name);
    assert!(titled("X-Stream-Protocol-Version") && titled("Upgrade"));
    let bytes = pattern(1 << 20);
    let (mut read_half, mut write_half) = tokio::io::split(wire);
    let sending = async {
        write_half.write_all(&bytes).await.unwrap();
        write_half.shutdown().await.unwrap();
    };
    let (echoed, ()) = tokio::join!(read_to_end(&mut read_half), sending);
    assert!(echoed.unwrap() == bytes);
    assert_eq!(app.end().await, End::Finished);
    testbed.until_idle().await;
}

#[tokio::test]
async fn a_refused_upgrade_passes_whole_and_a_client_reset_is_passed() {
    let (app, testbed) = TestBed::secured(by_path).await;
    let client = testbed.client();
    let refused = client
        .raw("edge-1", EXEC.replace("/exec", "/refused"))
        .await;
    assert_eq!((refused.status, refused.text().as_str()), (403, "not you"));
    assert_eq!(refused.field("x-refused-by"), "the app");
    let mut wire = testbed.tls().await;
    exchange(&mut wire, EXEC).await;
    read(&mut wire, 3_000).await;
    let socket = socket2::SockRef::from(wire.get_ref().0);
    socket.set_linger(Some(Duration::ZERO)).unwrap();
    drop(wire);
    assert_eq!(app.end().await, End::Reset);
    testbed.until_idle().await;
}

#[tokio::test]
async fn an_abandoned_answer_is_reset_and_its_connection_not_reused() {
    let (app, testbed) = TestBed::secured(by_path).await;
    for client in [testbed.client(), testbed.http2()] {
        let mut connection = client.connect("edge-1").await.unwrap();
        let request = Request::get(format!("{URL}endless")).body(whole(""));
        let mut answer = connection.open(request.unwrap()).await.unwrap();
        answer.frame().await.unwrap().unwrap();
        drop((answer, connection));
        assert_eq!(app.end().await, End::Reset);
        assert_eq!(client.get(URL).await.text(), "well");
    }
    testbed.until_idle().await;
}

#[tokio::test]
async fn a_stalled_reader_delays_no_other_stream() {
    let (_app, testbed) = TestBed::secured(by_path).await;
    let mut stalled = Vec::new();
    for client in [testbed.client(), testbed.http2()] {
        let mut connection = client.connect("edge-1").await.unwrap();
        let request = Request::get(format!("{URL}endless")).body(whole(""));
        let answer = connection.open(request.unwrap()).await.unwrap();
        stalled.push((connection, answer));
        let large = client.get(&format!("{URL}large")).await;
        assert!(large.body == pattern(8 << 20));
    }
}

#[tokio::test]
async fn a_client_certificate_is_sent_and_a_reload_replaces_it() {
    let authority = Authority::new();
    let (first, second) = (authority.client("first"), authority.client("second"));
    let mut world = world(&authority, Some(&first)).await;
    let tls = authority.serve(&authority.app(&["edge-1"]), true);
    let app = App::https(tls, by_path).await;
    let _edge = edge(&world, "edge-1", &app).await;
    let url = "https://edge-1:10250/";
    for _ in 0..2 {
        assert_eq!(world.client().get(url).await.text(), "well");
    }
    assert_eq!(app.shown(), [first.chain()[0].to_vec()]);
    let unchanged = world.reload(|_| {}).unwrap();
    assert!(!unchanged.upstream_tls);
    assert_eq!(world.client().get(url).await.text(), "well");
    assert_eq!(app.connections(), 1);

    let folder = world.folder().to_owned();
    asked(&folder, &authority, Some(&second));
    let changed = world.reload(|_| {}).unwrap();
    assert!(changed.upstream_tls);
    assert!(changed.to_string().contains("upstream_tls"), "{changed}");
    assert_eq!(
        app.end().await,
        End::Finished,
        "idle connections end at once"
    );
    assert_eq!(world.client().get(url).await.text(), "well");
    let both = [&first, &second].map(|leaf| leaf.chain()[0].to_vec());
    assert_eq!(app.shown(), both);

    fs::write(folder.join("client.key"), "no key").unwrap();
    let refused = world.reload(|_| {}).unwrap_err().to_string();
    assert!(refused.contains("upstream_tls.10250"), "{refused}");
    assert_eq!(world.client().get(url).await.text(), "well");
    world.reload(|config| config.upstream_tls.clear()).unwrap();
    let bytes = world.client().get(url).await;
    assert_problem(&bytes, 403, "edge_policy", "tcp only");
}

#[tokio::test]
async fn a_missing_client_certificate_is_reported_with_the_tls_alert() {
    let authority = Authority::new();
    let world = world(&authority, None).await;
    let tls = authority.serve(&authority.app(&["edge-1"]), true);
    let app = App::https(tls, by_path).await;
    let _edge = edge(&world, "edge-1", &app).await;
    let answer = world.client().get("https://edge-1:10250/").await;
    assert_problem(&answer, 502, "target_broken", "CertificateRequired");
    let kubernetes = world.client_at("kubernetes");
    let answer = kubernetes.get("https://edge-1:10250/").await;
    assert_eq!(
        (answer.status, answer.field("content-type")),
        (502, "text/plain; charset=utf-8")
    );
    assert!(answer.text().contains("port 10250 of edge-1"), "{answer}");
}

#[tokio::test]
async fn upstream_certificates_need_node_or_address_ca_and_validity() {
    let (ours, other) = (Authority::new(), Authority::new());
    let mut world = world(&ours, None).await;
    let url = "https://edge-1:10250/";
    for (leaf, says) in [
        (ours.app(&["edge-1"]), None),
        (ours.app(&["192.0.2.7"]), None),
        (
            ours.app(&["edge-2", "192.0.2.8"]),
            Some("a certificate for edge-2, 192.0.2.8, but neither for edge-1"),
        ),
        (ours.client("edge-1"), Some("not trusted")),
        (ours.expired_app(&["edge-1"]), Some("expired")),
        (
            other.app(&["edge-1"]),
            Some("none of the CAs of upstream_tls"),
        ),
    ] {
        let app = App::https(ours.serve(&leaf, false), by_path).await;
        let edge = edge(&world, "edge-1", &app).await;
        let answer = world.client().get(url).await;
        match says {
            None => assert_eq!(answer.text(), "well"),
            Some(says) => assert_problem(&answer, 502, "target_broken", says),
        }
        assert_eq!(app.requests(), usize::from(says.is_none()));
        drop(edge);
        world.until_tunnels("edge-1", 0).await;
        fs::remove_dir_all(world.folder().join("edge-1")).unwrap();
    }
    let leaf = other.expired_app(&["edge-2"]);
    let app = App::https(other.serve(&leaf, false), by_path).await;
    let _edge = edge(&world, "edge-1", &app).await;
    let any = config::UpstreamTls {
        verify: false,
        ..config::UpstreamTls::default()
    };
    world
        .reload(|config| drop(config.upstream_tls.insert(KUBELET, any)))
        .unwrap();
    assert_eq!(world.client().get(url).await.text(), "well");
}

#[tokio::test]
async fn a_non_tls_absent_or_resetting_upstream_names_port_and_node() {
    let authority = Authority::new();
    let build = World::build();
    let ours = asked(build.folder(), &authority, None);
    let build = build.config(|config| {
        for port in [1, 2, 5] {
            config.upstream_tls.insert(port, ours.clone());
        }
    });
    let world = build.start().await;
    let in_the_clear = Script::new().write("HTTP/1.1 400 Bad Request\r\n\r\n");
    let clear = App::tcp(in_the_clear.close()).await;
    let refusing = App::refusing();
    let resetting = App::tcp(Script::new().reset()).await;
    let joining = world.edge("edge-1");
    let joining = joining.port_as(5, Protocol::Tcp, resetting.address());
    let joining = joining.port_as(1, Protocol::Tcp, clear.address());
    let joining = joining.port_as(2, Protocol::Tcp, refusing.address());
    let _edge = joining.join().await;
    for (port, status, reason, says) in [
        (
            1,
            502,
            "target_broken",
            "port 1 of edge-1 does not speak TLS",
        ),
        (2, 502, "target_refused", "edge-1 could not dial"),
        (4, 403, "edge_policy", "edge-1"),
        (
            5,
            502,
            "target_broken",
            "port 5 of edge-1 reset the connection during the TLS handshake",
        ),
    ] {
        let answer = world.client().get(&format!("https://edge-1:{port}/")).await;
        assert_problem(&answer, status, reason, says);
    }
}

#[tokio::test]
async fn a_silent_upstream_names_port_and_node() {
    let authority = Authority::new();
    let build = World::build();
    let ours = asked(build.folder(), &authority, None);
    let build = build.config(|config| {
        config.upstream_tls.insert(KUBELET, ours);
        config.timeouts.connect = Duration::from_millis(500);
    });
    let world = build.start().await;
    let silent = App::tcp(Script::new().silence()).await;
    let _edge = edge(&world, "edge-1", &silent).await;
    let says = "port 10250 of edge-1 did not complete TLS";
    // The time is also that of the edge's dial, during which this machine may stop.
    until("the edge dials in time", async || {
        let answer = world.client().get("https://edge-1:10250/").await;
        assert_problem(&answer, 504, "target_timeout", "edge-1");
        answer.text().contains(says)
    })
    .await;
    while silent.end().await != End::Reset {}
}

#[tokio::test]
async fn a_tunnel_lost_during_an_answer_resets_its_client() {
    let gate = PauseGate::new();
    let waits = gate.clone();
    let (_app, mut testbed) =
        TestBed::secured(move |_| answer::parts("text/plain", &["a", "b"], &waits)).await;
    let mut connection = testbed.client().connect("edge-1").await.unwrap();
    let request = Request::get(URL).body(whole("")).unwrap();
    let asking = connection.open(request);
    let (answer, ()) = tokio::join!(asking, async { gate.open() });
    let mut answer = answer.unwrap();
    answer.frame().await.unwrap().unwrap();
    testbed.edge.kill().await;
    let rest = answer.collect().await;
    assert!(rest.is_err(), "a break-off is not an end");
    until("the record has the reason", async || {
        testbed.metrics().await.outcomes("https", "tunnel_lost") == 1
    })
    .await;
}

#[tokio::test]
async fn an_edge_that_leaves_waits_for_no_connection_that_rests() {
    let (app, mut testbed) = TestBed::secured(by_path).await;
    let client = testbed.client();
    join_all((0..8).map(|_| client.get(URL))).await;
    let connections = app.connections();
    testbed.edge.stop().await;
    for _ in 0..connections {
        assert_eq!(app.end().await, End::Finished);
    }
    testbed.edge.start().await.unwrap();
    testbed.until_tunnels("edge-1", 1).await;
    assert_eq!(client.get(URL).await.text(), "well");
    assert_eq!(app.connections(), connections + 1);
}

#[tokio::test]
async fn connections_are_never_shared_between_nodes() {
    let authority = Authority::new();
    let world = world(&authority, None).await;
    let mut apps = Vec::new();
    for node in ["edge-1", "edge-2"] {
        let tls = authority.serve(&authority.app(&[node]), false);
        let app = App::https(tls, move |_| answer::ok(node)).await;
        // Both have the same address behind their NATs.
        let edge = edge(&world, node, &app).await;
        apps.push((node, app, edge));
    }
    for _ in 0..5 {
        for (node, _, _) in &apps {
            let answer = world.client().get(&format!("https://{node}:10250/")).await;
            assert_eq!(answer.text(), *node);
        }
    }
    for (_, app, _) in &apps {
        assert_eq!((app.connections(), app.requests()), (1, 5));
    }
}

/// A world with these time limits, its edge, and an app that has received one request.
async fn asked_once(change: impl FnOnce(&mut Config)) -> (World, Edge, App) {
    let authority = Authority::new();
    let tls = authority.serve(&authority.app(&["edge-1"]), false);
    let app = App::https(tls, by_path).await;
    // In a block of its own, because moved values would be part of this future.
    let starting = {
        let build = World::build();
        let ours = asked(build.folder(), &authority, None);
        let build = build.config(|config| {
            config.upstream_tls.insert(KUBELET, ours);
            change(config);
        });
        Box::pin(build.start())
    };
    let world = starting.await;
    let edge = edge(&world, "edge-1", &app).await;
    let answer = world.client().get("https://edge-1:10250/").await;
    assert_eq!(answer.text(), "well");
    (world, edge, app)
}

#[tokio::test]
async fn a_connection_that_rests_for_too_long_is_ended_in_order() {
    let short = |config: &mut Config| config.timeouts.idle_keepalive = Duration::from_millis(300);
    let (world, _edge, app) = asked_once(short).await;
    assert_eq!(app.end().await, End::Finished);
    let answer = world.client().get("https://edge-1:10250/").await;
    assert_eq!(answer.text(), "well");
    assert_eq!(app.connections(), 2);
}

#[tokio::test]
async fn a_gateway_that_stops_waits_for_no_connection_that_rests() {
    // Longer than the test waits for its end.
    let grace = Duration::from_hours(1);
    let (mut world, _edge, app) = asked_once(|config| config.timeouts.drain = grace).await;
    world.stop_gateway().await;
    assert_eq!(app.end().await, End::Finished);
}

#[tokio::test]
async fn an_edge_that_stops_waits_for_no_connection_that_rests() {
    // Longer than the test waits for its end.
    let long = Duration::from_hours(1);
    let (world, mut first, app) = asked_once(|config| config.timeouts.idle_keepalive = long).await;
    first.kill().await;
    let patient = world.edge("edge-1");
    let patient = patient.port_as(KUBELET, Protocol::Tcp, app.address());
    let patient = patient.config(|config| config.timeouts.drain = long);
    let mut edge = patient.join().await;
    let answer = world.client().get("https://edge-1:10250/").await;
    assert_eq!(answer.text(), "well");
    edge.stop().await;
}

#[tokio::test]
async fn an_upload_that_the_upstream_does_not_read_is_504() {
    let authority = Authority::new();
    let tls = TlsAcceptor::from(authority.serve(&authority.app(&["edge-1"]), false));
    let deaf = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = deaf.local_addr().unwrap();
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        let mut open = Vec::new();
        loop {
            let (tcp, _) = deaf.accept().await.unwrap();
            open.push(tls.accept(tcp).await);
        }
    });
    let build = World::build();
    let ours = asked(build.folder(), &authority, None);
    let build = build.config(|config| {
        config.upstream_tls.insert(KUBELET, ours);
        config.timeouts.upload = Duration::from_secs(2);
    });
    let world = build.start().await;
    let joining = world.edge("edge-1");
    let _edge = joining
        .port_as(KUBELET, Protocol::Tcp, address)
        .join()
        .await;
    // If this machine stops for the time of the upload, its bytes are gone before the test sees them.
    until("waiting bytes count", async || upload(&world).await).await;
    until("nothing is left of it", async || {
        let metrics = world.metrics().await;
        metrics.sum("open_streams", &[]) + metrics.sum("buffered_bytes", &[]) == 0
    })
    .await;
}

/// Sends an upload until it is refused. Returns whether its waiting bytes were seen in the metrics.
async fn upload(world: &World) -> bool {
    let client = world.client();
    let mut wire = client.tls_stream("edge-1", &["http/1.1"]).await.unwrap();
    let head = "PUT / HTTP/1.1\r\nHost: edge-1:10250\r\nContent-Length: 1000000000\r\n\r\n";
    wire.write_all(head.as_bytes()).await.unwrap();
    let (mut reading, mut writing) = tokio::io::split(wire);
    let mut sending = JoinSet::new();
    sending.spawn(async move {
        let chunk = vec![0; 1 << 16];
        while writing.write_all(&chunk).await.is_ok() {}
    });
    let mut refused = pin!(read_head(&mut reading));
    let mut is_counted = false;
    let head = loop {
        tokio::select! {
            head = refused.as_mut() => break head,
            metrics = world.metrics(), if !is_counted => {
                is_counted = metrics.sum("buffered_bytes", &[]) > 0;
            }
        }
    };
    assert!(head.starts_with("HTTP/1.1 504 "), "{head}");
    assert!(head.contains("target_timeout"), "{head}");
    sending.shutdown().await;
    is_counted
}
