//! Error responses to clients: each row of the error table, through a real listener.
//!
//! `assert_problem` compares status, problem, `Proxy-Status`, Retry-After and access record.

use crate::fleet::LATE_REQUEST;
use crate::world::{
    GATEWAY_NAME, PATIENCE, World,
    app::{App, PauseGate, Script, answer},
    client::{Answer, assert_problem, exchange, read, read_to_end, whole},
    gateway::{anonymous, fixed, listener},
    link::Link,
    until,
};
use causeway_edge::config::Protocol;
use causeway_gateway::{
    config::{ClientAuth, ErrorFormat, Listener, ListenerProtocol},
    proxy::authz::{Action, Authorize, AuthzDecision, AuthzRequest},
};
use futures_util::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::{
    HeaderMap, Request,
    body::{Bytes, Frame},
};
use socket2::{Domain, Socket, Type};
use std::{
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};
use tokio::io::AsyncWriteExt;

const SOON: Duration = Duration::from_millis(200);
/// Time without an answer after which a kernel counts as full. A busy kernel needs longer than usual for an answer.
const FULL: Duration = Duration::from_secs(2);

fn upgrade(url: &str) -> Request<crate::world::client::Body> {
    Request::get(url)
        .header("connection", "Upgrade")
        .header("upgrade", "websocket")
        .body(whole(""))
        .unwrap()
}

/// A target whose kernel accepts no more connections and refuses none: a dial to it hangs.
struct FullBacklog {
    address: SocketAddr,
    _listener: Socket,
    _waiting: Vec<TcpStream>,
}

impl FullBacklog {
    fn new() -> Self {
        let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        listener
            .bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())
            .unwrap();
        listener.listen(0).unwrap();
        let address = listener.local_addr().unwrap().as_socket().unwrap();
        let mut waiting = Vec::new();
        while let Ok(one) = TcpStream::connect_timeout(&address, FULL) {
            waiting.push(one);
        }
        Self {
            address,
            _listener: listener,
            _waiting: waiting,
        }
    }
}

#[tokio::test]
async fn an_unknown_node_is_404() {
    let listener = anonymous("plain", ListenerProtocol::Http);
    let world = World::build().listener(listener).start().await;
    let answer = world.client_at("plain").get("http://edge-9:9100/").await;
    assert_problem(
        &answer,
        404,
        "node_unknown",
        "no node matches Host \"edge-9:9100\"",
    );
    let client = world.client().sni(GATEWAY_NAME);
    let answer = client.http2().get("https://edge-9:9100/").await;
    assert_problem(
        &answer,
        404,
        "node_unknown",
        "SNI \"gateway.test\" or Host \"edge-9:9100\"",
    );
    assert_eq!(world.metrics().await.outcomes("plain", "node_unknown"), 1);
    assert_eq!(world.metrics().await.outcomes("https", "node_unknown"), 1);
}

#[tokio::test]
async fn a_server_name_of_no_node_gets_a_tls_alert_and_is_counted() {
    let world = World::start().await;
    for name in ["edge-9", "edge-9", "nobody.example"] {
        let refused = world.client().tls_stream(name, &["h2"]).await.unwrap_err();
        let alert = refused.get_ref().and_then(|inner| inner.downcast_ref());
        assert!(
            matches!(
                alert,
                Some(rustls::Error::AlertReceived(
                    rustls::AlertDescription::UnrecognisedName
                ))
            ),
            "{refused:?}"
        );
    }
    let log = world.log().text();
    let lines: Vec<_> = log
        .lines()
        .filter(|line| line.contains("no node has this name"))
        .collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].contains("edge-9"), "{log}");
    let labels = [("listener", "https"), ("why", "unrecognized_name")];
    let metrics = world.metrics().await;
    assert_eq!(metrics.sum("handshakes_failed_total", &labels), 3);
    // With the name of the listener, or without a name, the Host decides.
    for name in [GATEWAY_NAME, "127.0.0.1"] {
        world.client().tls_stream(name, &["h2"]).await.unwrap();
    }
}

#[tokio::test]
async fn a_client_that_rejects_the_listener_certificate_is_logged() {
    let listener = fixed("one", ListenerProtocol::Https, "edge-1", 9100);
    let world = World::build().listener(listener).start().await;
    let client = world.client_at("one");
    let refused = client.tls_stream("other.example", &["h2"]).await;
    assert!(refused.is_err());
    until("the refusal is logged", async || {
        let log = world.log().text();
        let mut lines = log.lines();
        lines.any(|line| {
            line.contains("a client refuses the certificate") && line.contains("other.example")
        })
    })
    .await;
}

#[tokio::test]
async fn a_disconnected_node_is_503_with_time_and_address() {
    let mut world = World::start().await;
    let app = App::saying("it").await;
    let mut edge = world.edge("edge-1").port(9100, app.address()).join().await;
    edge.stop().await;
    world.until_tunnels("edge-1", 0).await;
    let answer = world.client().get("https://edge-1:9100/").await;
    assert_problem(
        &answer,
        503,
        "node_not_connected",
        "edge-1 is not connected; it was last seen at 2",
    );
    assert_problem(
        &answer,
        503,
        "node_not_connected",
        "its last tunnel came from 127.0.0.1:",
    );

    world.stop_gateway().await;
    world.start_gateway().await;
    let answer = world.client().get("https://edge-1:9100/").await;
    assert_problem(
        &answer,
        503,
        "node_not_connected",
        "has not connected since this gateway started",
    );
}

#[tokio::test]
async fn a_node_with_a_silent_link_is_503_until_it_answers() {
    let world = World::build().config(|config| {
        config.tunnel.ping_after = SOON;
        config.tunnel.ping_timeout = SOON;
        config.tunnel.close_after = PATIENCE;
    });
    let world = world.start().await;
    let link = Link::to(world.tunnel()).await;
    let app = App::saying("it").await;
    let edge = world.edge("edge-1").port(9100, app.address());
    let _edge = edge.only_by(&link).join().await;
    link.silence();
    let state = async |wanted: &str| world.node("edge-1").await["state"] == wanted;
    until("the gateway knows", async || state("suspect").await).await;
    let answer = world.client().get("https://edge-1:9100/").await;
    assert_problem(
        &answer,
        503,
        "node_not_connected",
        "edge-1 does not answer on its tunnel from 127.0.0.1:",
    );
    link.restore();
    // With such short times a busy machine makes the node suspect again, for a moment.
    until("it answers again", async || {
        let answer = world.client().get("https://edge-1:9100/").await;
        answer.text() == "it"
    })
    .await;
}

#[tokio::test]
async fn an_unauthenticated_client_is_401_with_the_tried_methods() {
    let build = World::build();
    let token = build.token("prometheus");
    let clients = |own_ca| ClientAuth {
        own_ca,
        tokens: Some(build.tokens()),
        ..ClientAuth::default()
    };
    let both = Listener {
        client_auth: clients(true),
        ..listener("both", ListenerProtocol::Https)
    };
    let tokens = Listener {
        client_auth: clients(false),
        ..listener("tokens", ListenerProtocol::Http)
    };
    let world = build.listener(both).listener(tokens).start().await;
    let refused = async |client: crate::world::client::Client, says: &str, asks: &str| {
        let answer = client.get("https://edge-1:9100/").await;
        assert_problem(&answer, 401, "unauthenticated", says);
        assert_eq!(answer.field("www-authenticate"), asks);
    };
    let bearer = "Bearer realm=\"causeway\"";
    let invalid = "Bearer realm=\"causeway\", error=\"invalid_token\"";
    let (https, both) = (
        world.client().sni(GATEWAY_NAME),
        world.client_at("both").sni(GATEWAY_NAME),
    );
    let tokens = world.client_at("tokens");
    let others =
        "(a client does not send a certificate from a CA that this listener does not list)";
    let nothing =
        |what: &str| format!("no credentials were presented; this listener requires {what}");
    let unknown = || "token: not known to this listener".to_owned();
    let longer = tokens.clone().bearer(&format!("{token}x"));
    for (client, says, challenge) in [
        (
            https.nobody(),
            nothing(&format!("a client certificate {others}")),
            "",
        ),
        (
            both.clone().nobody(),
            nothing(&format!("a client certificate or a bearer token {others}")),
            bearer,
        ),
        (both.nobody().bearer("cwc1.wrong"), unknown(), invalid),
        (tokens.clone(), nothing("a bearer token"), bearer),
        (
            tokens.clone().field("authorization", "Basic eDp5"),
            "contains no bearer token".to_owned(),
            bearer,
        ),
        (longer, unknown(), invalid),
    ] {
        refused(client, &says, challenge).await;
    }
    let answer = tokens.bearer(&token).get("http://edge-1:9100/").await;
    assert_problem(&answer, 404, "node_unknown", "edge-1");
}

#[derive(Debug)]
struct NoSecrets;

impl Authorize for NoSecrets {
    fn authorize(&self, ask: &AuthzRequest<'_>) -> AuthzDecision {
        let (client, port) = (&ask.client.name, ask.destination.port().expect("a port"));
        let node = ask.destination.node().expect("a node");
        let sentence = format!(
            "{client} may not {} {} of {node}:{port}",
            ask.method, ask.path
        );
        match (ask.action, ask.path) {
            (Action::Request, "/open") => AuthzDecision::Allow,
            (Action::Request, "/asked") => AuthzDecision::Pending(Box::pin(async { Ok(()) })),
            (Action::Request, "/dependency_unavailable") => {
                AuthzDecision::Pending(Box::pin(std::future::pending()))
            }
            (Action::Upgrade, _) => {
                AuthzDecision::Pending(Box::pin(async { Err(sentence.into()) }))
            }
            _ => AuthzDecision::Deny(sentence.into()),
        }
    }
}

#[tokio::test]
async fn an_unauthorized_client_is_403_without_edge_contact() {
    let build = World::build().authorizer(NoSecrets);
    let world = build
        .config(|config| config.timeouts.authorize = SOON)
        .start()
        .await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let client = world.client();
    let answer = client.get("https://edge-1:9100/secret?key=1").await;
    assert_problem(
        &answer,
        403,
        "forbidden",
        "tester may not GET /secret of edge-1:9100",
    );
    let answer = client.send(upgrade("https://edge-1:9100/open")).await;
    assert_problem(
        &answer,
        403,
        "forbidden",
        "tester may not GET /open of edge-1:9100",
    );
    let answer = client
        .get("https://edge-1:9100/dependency_unavailable")
        .await;
    assert_problem(
        &answer,
        503,
        "dependency_unavailable",
        "was not decided within 200ms",
    );
    assert_eq!(app.requests(), 0);
    assert_eq!(client.get("https://edge-1:9100/open").await.text(), "it");
    assert_eq!(client.get("https://edge-1:9100/asked").await.text(), "it");
}

#[tokio::test]
async fn a_target_that_the_edges_owner_does_not_serve_is_403() {
    let world = World::start().await;
    let app = App::saying("it").await;
    let edge = world.edge("edge-1").port(9100, app.address());
    let edge = edge.port_as(22, Protocol::Tcp, app.address());
    let _edge = edge
        .config(|config| config.allow.upgrades = false)
        .join()
        .await;
    let client = world.client();
    let answer = client.get("https://edge-1:10250/").await;
    assert_problem(
        &answer,
        403,
        "edge_policy",
        "edge-1 does not serve port 10250",
    );
    let answer = client.get("https://edge-1:22/").await;
    assert_problem(&answer, 403, "edge_policy", "as tcp only");
    let answer = client.send(upgrade("https://edge-1:9100/")).await;
    assert_problem(&answer, 403, "edge_policy", "does not allow upgrades");
    assert_eq!(app.connections(), 0);
}

#[tokio::test]
async fn a_refused_port_is_502_and_names_the_target() {
    let world = World::build()
        .listener(listener("connect", ListenerProtocol::Connect))
        .start()
        .await;
    let app = App::refusing();
    let _edge = world.edge("edge-1").port(9, app.address()).join().await;
    let target = app.address().to_string();
    let answer = world.client().get("https://edge-1:9/").await;
    assert_problem(&answer, 502, "target_refused", &target);
    let answer = world.client().send(upgrade("https://edge-1:9/")).await;
    assert_problem(&answer, 502, "target_refused", &target);
    let answer = connect(&world, "connect", "edge-1:9").await;
    assert_problem(&answer, 502, "target_refused", &target);
}

#[tokio::test]
async fn an_app_that_breaks_the_protocol_is_502() {
    let world = World::start().await;
    let garbage = App::http(|_| answer::garbage()).await;
    let closing = App::http(|_| answer::close()).await;
    let edge = world.edge("edge-1").port(80, garbage.address());
    let _edge = edge.port(81, closing.address()).join().await;
    for port in [80, 81] {
        let answer = world.client().get(&format!("https://edge-1:{port}/")).await;
        assert_problem(&answer, 502, "target_broken", "edge-1");
        let answer = world
            .client()
            .send(upgrade(&format!("https://edge-1:{port}/")))
            .await;
        assert_problem(&answer, 502, "target_broken", "edge-1");
    }
}

#[tokio::test]
async fn a_tunnel_that_is_lost_in_flight_is_502() {
    let world = World::start().await;
    let link = Link::to(world.tunnel()).await;
    let app = App::http(|_| answer::silence()).await;
    let edge = world.edge("edge-1").port(9100, app.address());
    let _edge = edge.only_by(&link).join().await;
    let client = world.client();
    let cut = async {
        app.head().await;
        link.cut();
    };
    let (answer, ()) = tokio::join!(client.get("https://edge-1:9100/"), cut);
    let output = "the tunnel of edge-1 was lost during the stream: the tunnel was lost: the peer closed the connection";
    assert_problem(&answer, 502, "tunnel_lost", output);
}

#[tokio::test]
async fn a_target_that_does_not_take_connections_is_504() {
    let build = World::build().listener(listener("connect", ListenerProtocol::Connect));
    let world = build.start().await;
    let deaf = FullBacklog::new();
    let edge = world.edge("edge-1").port(9100, deaf.address);
    let _edge = edge
        .config(|config| config.timeouts.dial = SOON)
        .join()
        .await;
    let says = deaf.address.to_string();
    let answer = world.client().get("https://edge-1:9100/").await;
    assert_problem(&answer, 504, "target_timeout", &says);
    let answer = connect(&world, "connect", "edge-1:9100").await;
    assert_problem(&answer, 504, "target_timeout", &says);
}

#[tokio::test]
async fn a_connect_is_answered_within_a_bound_of_the_gateways_own() {
    let build = World::build().listener(listener("connect", ListenerProtocol::Connect));
    let world = build
        .config(|config| config.timeouts.connect = SOON)
        .start()
        .await;
    let deaf = FullBacklog::new();
    let _edge = world.edge("edge-1").port(9100, deaf.address).join().await;
    let answer = connect(&world, "connect", "edge-1:9100").await;
    assert_problem(
        &answer,
        504,
        "target_timeout",
        "edge-1 did not connect to edge-1:9100 within 200ms",
    );
}

#[tokio::test]
async fn an_upgrade_without_a_first_byte_is_504_by_either_end() {
    let app = App::http(|_| answer::silence()).await;
    // The other end waits for so long that it never answers first.
    let world = World::build().config(|config| config.timeouts.upgrade_first_byte = PATIENCE);
    let world = world.start().await;
    let quick = world.edge("edge-1").port(9100, app.address());
    let _quick = quick
        .config(|config| config.timeouts.upgrade = SOON)
        .join()
        .await;
    let answer = world.client().send(upgrade("https://edge-1:9100/")).await;
    assert_problem(
        &answer,
        504,
        "target_timeout",
        "did not answer the upgrade within 200ms",
    );
    let world = World::build().config(|config| config.timeouts.upgrade_first_byte = SOON);
    let world = world.start().await;
    let slow = world.edge("edge-2").port(9100, app.address());
    let _slow = slow
        .config(|config| config.timeouts.upgrade = PATIENCE)
        .join()
        .await;
    let answer = world.client().send(upgrade("https://edge-2:9100/")).await;
    assert_problem(
        &answer,
        504,
        "target_timeout",
        "edge-2 did not answer the upgrade within 200ms",
    );
}

/// Keeps one stream of `tester` to edge-1 open, and sends one more request as `second` does.
async fn while_one_is_open(world: &World, second: &str, node: &str) -> Answer {
    let gate = PauseGate::new();
    let held = gate.clone();
    let app = App::http(move |head| match head.path().as_str() {
        "/held" => Script::new()
            .until(&held)
            .write("HTTP/1.1 204 No Content\r\n\r\n"),
        _ => answer::ok("it"),
    })
    .await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let _other = world.edge("edge-2").port(9100, app.address()).join().await;
    let holder = world.client();
    let client = world.client().certificate(&world.client_leaf(second));
    let url = format!("https://{node}:9100/");
    let act = async {
        app.head().await;
        let answer = client.get(&url).await;
        gate.open();
        answer
    };
    let (held, refused) = tokio::join!(holder.get("https://edge-1:9100/held"), act);
    assert_eq!(held.status, 204);
    world.until_idle().await;
    assert_eq!(
        client.get(&url).await.text(),
        "it",
        "all permits were returned"
    );
    refused
}

#[tokio::test]
async fn a_clients_limit_is_503_for_that_client_only() {
    let build = || World::build().config(|config| config.limits.per_client = 1);
    let answer = while_one_is_open(&build().start().await, "tester", "edge-2").await;
    assert_problem(
        &answer,
        503,
        "limit_reached",
        "this client has reached its limit of 1 open streams",
    );
    let answer = while_one_is_open(&build().start().await, "other", "edge-1").await;
    assert_eq!(answer.text(), "it");
}

#[tokio::test]
async fn a_nodes_limit_is_503_for_that_node_only() {
    let build = || World::build().config(|config| config.limits.per_node = 1);
    let answer = while_one_is_open(&build().start().await, "other", "edge-1").await;
    assert_problem(
        &answer,
        503,
        "node_limit_reached",
        "this node has reached its limit of 1 open streams",
    );
    let answer = while_one_is_open(&build().start().await, "tester", "edge-2").await;
    assert_eq!(answer.text(), "it");
}

#[tokio::test]
async fn the_gateways_limit_is_503_for_every_client() {
    let world = World::build().config(|config| config.limits.streams = 1);
    let answer = while_one_is_open(&world.start().await, "other", "edge-2").await;
    assert_problem(
        &answer,
        503,
        "limit_reached",
        "this gateway has reached its limit of 1 open streams",
    );
}

#[tokio::test]
async fn a_full_tunnel_is_503() {
    let world = World::build().config(|config| config.tunnel.max_streams_per_tunnel = 1);
    let answer = while_one_is_open(&world.start().await, "other", "edge-1").await;
    assert_problem(
        &answer,
        503,
        "node_limit_reached",
        "the tunnel of edge-1 has reached its maximum number of streams",
    );
}

#[tokio::test]
async fn a_draining_gateway_serves_every_admitted_client() {
    let world = World::build().config(|config| config.timeouts.drain = PATIENCE);
    let mut world = world.start().await;
    let app = App::http(|head| match head.path().as_str() {
        "/held" => answer::silence(),
        _ => answer::ok("it"),
    })
    .await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    // The listeners stay open as long as this request lasts.
    let connection = world.client().http2().connect("edge-1").await.unwrap();
    let request = Request::get("https://edge-1:9100/held").body(whole(""));
    let held = connection.hold(request.unwrap());
    app.head().await;
    world.drain_gateway();
    until("the gateway is not ready", async || {
        world.admin_text("/readyz").await.0 == 503
    })
    .await;
    let client = world.client();
    assert_eq!(client.get("https://edge-1:9100/").await.text(), "it");
    drop((held, connection));
    until("the listener is closed", async || {
        let (request, begin) = (Request::get("https://edge-1:9100/"), Instant::now());
        match client.try_send(request.body(whole("")).unwrap()).await {
            // The client connected before the listener closed, and a pause of the machine made its request too late.
            Ok(answer) if answer.status == 503 && begin.elapsed() >= LATE_REQUEST => {
                assert_problem(&answer, 503, "draining", "");
            }
            Ok(answer) => assert_eq!(answer.status, 200, "{answer}"),
            Err(_) => return true,
        }
        false
    })
    .await;
    world.stop_gateway().await;
}

#[tokio::test]
async fn a_request_that_the_end_of_a_drain_cuts_is_recorded_as_such() {
    let world = World::build().config(|config| config.timeouts.drain = SOON);
    let mut world = world.start().await;
    let app = App::http(|_| answer::silence()).await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let request = Request::get("https://edge-1:9100/").body(whole(""));
    let connection = world.client().http2().connect("edge-1").await.unwrap();
    let _held = connection.hold(request.unwrap());
    let mut wire = world.client().wire("edge-1", &["http/1.1"]).await.unwrap();
    let head = b"GET / HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
    wire.write_all(head).await.unwrap();
    until("both requests are in flight", async || app.requests() == 2).await;
    world.drain_gateway();
    world.stop_gateway().await;
    let records = world.log().records();
    assert_eq!(records.len(), 2);
    for record in records {
        assert_eq!(record["reason"], "draining", "{record}");
        assert_eq!(record["status"], 503, "{record}");
        let detail = record["detail"].as_str().unwrap();
        assert!(detail.contains("timeouts.drain"), "{record}");
    }
}

#[tokio::test]
async fn trailers_that_are_larger_than_a_head_are_431() {
    let app = App::saying("well").await;
    let build = World::build().config(|config| config.limits.max_header_bytes = 20_000);
    let world = build.start().await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let ask = async |size| {
        let mut trailers = HeaderMap::new();
        trailers.insert("x-large", "x".repeat(size).parse().unwrap());
        let frames = [Frame::data(Bytes::from("whole")), Frame::trailers(trailers)];
        let body = StreamBody::new(stream::iter(frames.map(Ok)));
        let request = Request::post("https://edge-1:9100/").body(BodyExt::boxed(body));
        world.client().http2().send(request.unwrap()).await
    };
    let answer = ask(25_000).await;
    let detail = "at most 100 of 20000 are allowed";
    assert_problem(&answer, 431, "header_too_large", detail);
    assert_eq!(ask(15_000).await.text(), "well");
    let metrics = world.metrics().await;
    assert_eq!(metrics.outcomes("https", "header_too_large"), 1);
    assert_eq!(app.body().await, b"whole");
    assert_eq!(app.requests(), 2);
}

#[tokio::test]
async fn a_head_that_is_too_large_is_431() {
    let world = World::build()
        .config(|config| config.limits.max_header_bytes = 20_000)
        .start()
        .await;
    for (client, size) in [(world.client(), 25_000), (world.client().http2(), 25_000)] {
        let client = client.sni(GATEWAY_NAME).field("x-large", &"x".repeat(size));
        let answer = client.get("https://edge-1:9100/").await;
        assert_problem(
            &answer,
            431,
            "header_too_large",
            "at most 20000 are allowed",
        );
    }
    // Beyond twice the limit the gateway keeps nothing of a head. Its answer then has no sentence.
    let huge = format!(
        "GET / HTTP/1.1\r\nHost: edge-1\r\nX-Huge: {}\r\n\r\n",
        "x".repeat(60_000)
    );
    assert_eq!(world.client().raw(GATEWAY_NAME, huge).await.status, 431);
    let many = format!(
        "GET / HTTP/1.1\r\nHost: edge-1\r\n{}\r\n",
        "X-Many: x\r\n".repeat(150)
    );
    assert_eq!(world.client().raw(GATEWAY_NAME, many).await.status, 431);
}

#[tokio::test]
async fn a_head_that_means_two_things_is_400() {
    let world = World::start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    for (head, says) in [
        (
            "GET / HTTP/1.1\r\nHost: edge-1:9100\r\nHost: edge-2:9100\r\n\r\n",
            "more than one Host",
        ),
        ("GET / HTTP/1.1\r\n\r\n", "needs a Host"),
        (
            "GET / HTTP/1.1\r\nHost: user@edge-1:9100\r\n\r\n",
            "must not have user information",
        ),
        (
            "GET / HTTP/1.1\r\nHost: edge-1 :9100\r\n\r\n",
            "the Host field does not contain a valid host",
        ),
        (
            "GET / HTTP/1.1\r\nHost: edge-1:99999\r\n\r\n",
            "edge-1:99999",
        ),
        (
            "GET http://edge-2:9100/ HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n",
            "names \"edge-2:9100\" and its Host \"edge-1:9100\"",
        ),
    ] {
        let answer = world.client().raw("edge-1", head).await;
        assert_problem(&answer, 400, "malformed", says);
    }
    let nonsense = world.client().raw("edge-1", "BREW\r\n\r\n").await;
    assert_eq!(nonsense.status, 400, "{nonsense}");
    assert_eq!(app.requests(), 0);
}

#[tokio::test]
async fn a_length_beside_chunks_hides_no_request() {
    let world = World::start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let hidden = "GET /hidden HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
    let head = "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nContent-Length: 55\r\nTransfer-Encoding: chunked\r\n\r\n";
    let mut wire = world.client().wire("edge-1", &["http/1.1"]).await.unwrap();
    let answer = exchange(&mut *wire, format!("{head}0\r\n\r\n{hidden}")).await;
    // RFC 9112 §6.3: a server refuses such a message, or its chunks count and the connection ends after it.
    assert!(
        answer.to_lowercase().contains("\r\nconnection: close\r\n"),
        "{answer}"
    );
    assert_eq!(read_to_end(&mut wire).await.unwrap(), b"it");
    assert_eq!(app.head().await.value("content-length"), None);
    assert_eq!(app.requests(), 1);
}

#[tokio::test]
async fn a_method_that_a_listener_does_not_serve_is_405() {
    let world = World::build()
        .listener(listener("connect", ListenerProtocol::Connect))
        .start()
        .await;
    let answer = connect(&world, "https", "edge-1:22").await;
    assert_problem(
        &answer,
        405,
        "method_not_allowed",
        "a listener with protocol connect",
    );
    let answer = world
        .client_at("connect")
        .sni(GATEWAY_NAME)
        .get("https://edge-1/")
        .await;
    let words = "it serves CONNECT, and requests whose target is http://";
    assert_problem(&answer, 405, "method_not_allowed", words);
    assert_eq!(answer.field("allow"), "", "a proxy itself has no such path");
}

async fn connect(world: &World, listener: &str, authority: &str) -> Answer {
    let head = format!("CONNECT {authority} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
    world.client_at(listener).raw(GATEWAY_NAME, head).await
}

#[tokio::test]
async fn a_failed_connect_puts_the_sentence_into_the_reason_phrase() {
    let world = World::build()
        .listener(listener("connect", ListenerProtocol::Connect))
        .start()
        .await;
    let answer = connect(&world, "connect", "edge-9:22").await;
    assert_problem(&answer, 404, "node_unknown", "edge-9");
    let sentence = answer.json()["detail"].as_str().unwrap().to_owned();
    assert_eq!(answer.phrase.as_deref(), Some(sentence.as_str()));
    // Also if an egress selector leads to a listener of another kind.
    let answer = connect(&world, "https", "edge-9:22").await;
    let sentence = "CONNECT is served by a listener with protocol connect only";
    assert_problem(&answer, 405, "method_not_allowed", sentence);
    assert_eq!(answer.phrase.as_deref(), Some(sentence));
}

#[tokio::test]
async fn kube_apiservers_get_502_in_plain_text_and_no_retry_after() {
    let kubernetes = |name, kind| Listener {
        errors: ErrorFormat::Kubernetes,
        ..listener(name, kind)
    };
    let world = World::build().listener(kubernetes("api", ListenerProtocol::Https));
    let world = world
        .listener(kubernetes("connect", ListenerProtocol::Connect))
        .start()
        .await;
    let app = App::refusing();
    let mut edge = world.edge("edge-1").port(9, app.address()).join().await;
    let client = world.client_at("api").sni(GATEWAY_NAME);
    let mut all = vec![
        (client.get("https://edge-1:9/").await, "target_refused"),
        (client.get("https://edge-1:22/").await, "edge_policy"),
        (client.get("https://edge-9:9/").await, "node_unknown"),
        (
            connect(&world, "connect", "edge-1:9").await,
            "target_refused",
        ),
    ];
    edge.stop().await;
    world.until_tunnels("edge-1", 0).await;
    all.push((client.get("https://edge-1:9/").await, "node_not_connected"));
    all.push((
        connect(&world, "connect", "edge-1:9").await,
        "node_not_connected",
    ));
    for (answer, reason) in all {
        assert_eq!(answer.status, 502, "{answer}");
        assert_eq!(answer.field("content-type"), "text/plain; charset=utf-8");
        assert_eq!(answer.field("retry-after"), "");
        let details = format!("details=\"{reason}: ");
        assert!(answer.field("proxy-status").contains(&details), "{answer}");
        let text = answer.text();
        assert!(text.contains("edge-") && !text.contains('{'), "{text}");
    }
    let answer = connect(&world, "connect", "edge-1:9").await;
    assert_eq!(answer.phrase.as_deref(), Some(answer.text().trim_end()));
}

/// Checks the response to an upgrade. kubectl reads it as YAML if possible: of `reason: detail` it would show nothing.
#[tokio::test]
async fn kube_apiservers_get_a_status_for_an_upgrade_that_fails() {
    let listener = Listener {
        errors: ErrorFormat::Kubernetes,
        ..listener("api", ListenerProtocol::Https)
    };
    let world = World::build().listener(listener).start().await;
    let app = App::refusing();
    let _edge = world.edge("edge-1").port(9, app.address()).join().await;
    let client = world.client_at("api");
    let mut wire = client.tls_stream("edge-1", &["http/1.1"]).await.unwrap();
    let asked = "POST /exec HTTP/1.1\r\nHost: edge-1:9\r\nConnection: Upgrade\r\n\
                 Upgrade: SPDY/3.1\r\nContent-Length: 0\r\n\r\n";
    let head = exchange(&mut wire, asked).await.to_lowercase();
    assert!(head.starts_with("http/1.1 502 "), "{head}");
    assert!(
        head.contains("content-type: application/json\r\n"),
        "{head}"
    );
    let (_, length) = head.split_once("content-length: ").unwrap();
    let (length, _) = length.split_once("\r\n").unwrap();
    let body = read(&mut wire, length.parse().unwrap()).await;
    let status: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(
        (&status["kind"], &status["code"]),
        (&"Status".into(), &502.into())
    );
    let wanted = format!(
        "edge-1 could not dial {}: connection refused",
        app.address()
    );
    assert_eq!(status["message"], wanted);
}

#[tokio::test]
async fn a_tcp_session_that_cannot_begin_is_reset_and_recorded() {
    let listener = Listener {
        anonymous: true,
        ..fixed("bytes", ListenerProtocol::Tcp, "edge-1", 22)
    };
    let world = World::build().listener(listener).start().await;
    let app = App::refusing();
    let _edge = world.edge("edge-1").port(22, app.address()).join().await;
    let mut wire = world.client_at("bytes").wire("", &[]).await.unwrap();
    let error = read_to_end(&mut wire).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    until("it was recorded", async || {
        !world.log().records().is_empty()
    })
    .await;
    let record = world.log().records().remove(0);
    assert_eq!(record["reason"], "target_refused");
    assert_eq!(record["node"], "edge-1");
    assert_eq!(world.metrics().await.outcomes("bytes", "target_refused"), 1);
}

#[tokio::test]
async fn an_apps_own_failure_is_not_ours() {
    let world = World::start().await;
    let app =
        App::http(|_| answer::status("503 Service Unavailable", [("Retry-After", "7")], "busy"))
            .await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let mut wire = world
        .client()
        .tls_stream("edge-1", &["http/1.1"])
        .await
        .unwrap();
    let head = exchange(&mut wire, "GET / HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n").await;
    assert!(
        head.starts_with("HTTP/1.1 503 Service Unavailable\r\n"),
        "{head}"
    );
    let fields = head.to_lowercase();
    assert!(
        fields.contains("retry-after: 7") && !fields.contains("proxy-status"),
        "{head}"
    );
    drop(wire);
    world.until_idle().await;
    assert_eq!(world.metrics().await.outcomes("https", "ok"), 1);
}
