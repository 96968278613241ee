//! `connect` listeners as HTTP proxies: CONNECT over both versions of HTTP, requests in absolute form, and clients without TLS.

use crate::world::{
    GATEWAY_NAME, PATIENCE, World,
    app::{App, End, PauseGate, Script},
    authority::Authority,
    client::{Client, Connection, Wire, assert_problem, exchange, read, read_to_end, whole},
    edge::Edge,
    frames::{
        DATA, END_HEADERS, END_STREAM, Frame, HEADERS, PING, PREFACE, RST_STREAM, WINDOW_UPDATE,
        fields, frame, next, send, settings,
    },
    gateway::{Build, anonymous, listener},
    tool::{Tool, need},
    until,
};
use causeway_certs::{Ca, Certificate, TrustDomain};
use causeway_edge::config::Protocol;
use causeway_gateway::{
    config::{ClientAuth, Listener, ListenerProtocol, Serial, policy},
    state::{Policy, PolicyWriter},
};
use data_encoding::BASE64;
use hyper::{Method, Request, Response, Version, body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use std::{fs, net::SocketAddr, time::Duration};
use tokio::{
    io::{AsyncWriteExt, Interest},
    net::TcpListener,
    task::JoinSet,
    time::timeout,
};

/// Payload of the reset of an aborted session (RFC 9113 §8.5).
const CONNECT_ERROR: &[u8] = &[0, 0, 0, 10];

/// Proxy without TLS for these networks of loopback.
fn plain(name: &str, networks: &[&str]) -> Listener {
    let networks = networks.iter();
    Listener {
        plaintext_networks: networks.map(|network| network.parse().unwrap()).collect(),
        ..anonymous(name, ListenerProtocol::Connect)
    }
}

/// A world whose proxy accepts a token, with TLS and without.
async fn with_tokens() -> (World, String) {
    let build = World::build();
    let token = build.token("ann");
    let with_token = |listener| Listener {
        anonymous: false,
        client_auth: ClientAuth {
            tokens: Some(build.tokens()),
            ..ClientAuth::default()
        },
        ..listener
    };
    let tls = with_token(listener("tls", ListenerProtocol::Connect));
    let plain = with_token(plain("plain", &["127.0.0.0/8"]));
    let world = build.listener(tls).listener(plain).start().await;
    (world, token)
}

async fn edge(world: &World, app: &App) -> Edge {
    let edge = world.edge("edge-1").port(9100, app.address());
    edge.port(80, app.address()).join().await
}

/// Credentials of a user with this password.
fn basic(password: &str) -> String {
    format!(
        "Basic {}",
        BASE64.encode(format!("any:{password}").as_bytes())
    )
}

#[tokio::test]
async fn a_request_in_absolute_form_reaches_the_node_without_the_proxys_fields() {
    let app = App::saying("hello").await;
    let build = World::build().listener(plain("proxy", &["127.0.0.0/8"]));
    let world = build.start().await;
    let _edge = edge(&world, &app).await;
    let client = world.client_at("proxy").nobody();
    let head = "GET http://edge-1:9100/metrics?a=b HTTP/1.1\r\nHost: elsewhere\r\n\
        Proxy-Authorization: Basic YTpi\r\nProxy-Connection: keep-alive\r\nConnection: X-Hop\r\nX-Hop: 1\r\n\
        Authorization: Bearer for-the-app\r\n\r\n";
    let answer = client.raw("", head).await;
    assert_eq!((answer.status, answer.text().as_str()), (200, "hello"));
    let received = app.head().await;
    assert_eq!(received.line(), "GET /metrics?a=b HTTP/1.1");
    assert_eq!(received.values("host"), ["edge-1:9100"]);
    let authorization = received.value("authorization");
    assert_eq!(authorization.as_deref(), Some("Bearer for-the-app"));
    for removed in ["proxy-authorization", "proxy-connection", "x-hop"] {
        assert_eq!(received.value(removed), None, "{received:?}");
    }
    let answer = client.raw("", "GET http://edge-1/ HTTP/1.0\r\n\r\n").await;
    assert_eq!(answer.status, 200, "the port of http is 80");
    assert_eq!(app.head().await.values("host"), ["edge-1"]);
    for (target, status, reason, words) in [
        (
            "https://edge-1:9100/",
            400,
            "malformed",
            "has to send a CONNECT",
        ),
        ("ftp://edge-1/", 400, "malformed", "begin with http://"),
        (
            "http://a@edge-1:9100/",
            400,
            "malformed",
            "user information",
        ),
        ("/", 405, "method_not_allowed", "http://NODE:PORT/"),
        ("http://elsewhere/", 404, "node_unknown", "elsewhere"),
    ] {
        let head = format!("GET {target} HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n");
        assert_problem(&client.raw("", head).await, status, reason, words);
    }
    assert_eq!(app.requests(), 2);
}

#[tokio::test]
async fn a_proxy_asks_for_the_credential_with_407_and_takes_a_token_as_password() {
    let app = App::saying("hello").await;
    let (world, token) = with_tokens().await;
    let _edge = edge(&world, &app).await;
    for name in ["tls", "plain"] {
        let client = world.client_at(name).nobody();
        let connect = async |field: String| {
            let head = format!("CONNECT edge-1:9100 HTTP/1.1\r\nHost: x\r\n{field}\r\n");
            client.raw(GATEWAY_NAME, head).await
        };
        let get = async |field: String| {
            let head = format!("GET http://edge-1:9100/ HTTP/1.1\r\nHost: x\r\n{field}\r\n");
            client.raw(GATEWAY_NAME, head).await
        };
        let own = |value: String| format!("Proxy-Authorization: {value}\r\n");
        for refused in [
            connect(String::new()).await,
            connect(own(basic("wrong"))).await,
            connect(own("Digest a".to_owned())).await,
            get(String::new()).await,
            get(own("Bearer wrong".to_owned())).await,
            get(format!("Authorization: Bearer {token}\r\n")).await,
        ] {
            assert_problem(&refused, 407, "unauthenticated", "");
            assert_eq!(refused.json()["status"], 407);
            let challenges = refused.fields.get_all("proxy-authenticate").iter();
            let challenges: Vec<_> = challenges.map(|value| value.to_str().unwrap()).collect();
            assert_eq!(challenges.len(), 2, "{challenges:?}");
            assert!(challenges[0].starts_with("Bearer realm="), "{challenges:?}");
            assert_eq!(challenges[1], "Basic realm=\"causeway\"");
            assert!(!refused.fields.contains_key("www-authenticate"));
        }
        assert_eq!(connect(own(basic(&token))).await.status, 200);
        assert_eq!(connect(own(format!("Bearer {token}"))).await.status, 200);
        let authorization = format!("Authorization: Bearer {token}\r\n");
        assert_eq!(connect(authorization).await.status, 200);
        assert_eq!(get(own(basic(&token))).await.text(), "hello");
        assert_eq!(app.head().await.value("proxy-authorization"), None);
    }
    let clients: Vec<_> = world.log().records();
    assert!(clients.iter().any(|record| record["client"] == "ann"));
    // Other listeners know no Basic, and ask as before.
    let client = world
        .client()
        .nobody()
        .field("authorization", &basic(&token));
    assert_eq!(client.get("https://edge-1:9100/").await.status, 401);
}

#[tokio::test]
async fn the_gateways_own_resources_ask_as_an_origin_server() {
    let (world, token) = with_tokens().await;
    for name in ["tls", "plain"] {
        let client = world.client_at(name).nobody();
        let ask = async |line: &str, field: &str| {
            let head = format!("{line} HTTP/1.1\r\nHost: x\r\n{field}\r\n");
            client.raw(GATEWAY_NAME, head).await
        };
        let nodes = "GET /.well-known/causeway/nodes";
        for field in [
            String::new(),
            "Authorization: Bearer wrong\r\n".to_owned(),
            format!("Proxy-Authorization: Bearer {token}\r\n"),
        ] {
            let refused = ask(nodes, &field).await;
            assert_problem(&refused, 401, "unauthenticated", "");
            let challenges = refused.fields.get_all("www-authenticate").iter();
            let challenges: Vec<_> = challenges.map(|value| value.to_str().unwrap()).collect();
            assert!(challenges[0].starts_with("Bearer realm="), "{challenges:?}");
            assert_eq!(challenges[1..], ["Basic realm=\"causeway\""]);
            assert!(!refused.fields.contains_key("proxy-authenticate"));
        }
        for credential in [format!("Bearer {token}"), basic(&token)] {
            let answer = ask(nodes, &format!("Authorization: {credential}\r\n")).await;
            assert_eq!(
                (answer.status, &answer.json()["client"]),
                (200, &json!("ann"))
            );
        }
        for (line, allow) in [("POST /.well-known/causeway/nodes", "GET"), ("GET /", "")] {
            let refused = ask(line, "").await;
            assert_problem(&refused, 405, "method_not_allowed", "");
            assert_eq!(refused.fields["allow"], allow, "{line}");
        }
    }
}

#[tokio::test]
async fn a_web_page_that_rebinds_its_name_gets_no_list() {
    let own = Listener {
        names: vec!["proxy.test:3128".to_owned()],
        ..plain("own", &["127.0.0.0/8"])
    };
    let tls = anonymous("tls", ListenerProtocol::Connect);
    let world = World::build().listener(own).listener(tls).start().await;
    for (listener, host, status) in [
        ("own", "page.test", 421),
        ("own", "edge-1:3128", 421),
        ("own", "", 421),
        ("own", "Proxy.test", 200),
        ("own", "proxy.test:3128", 200),
        ("own", "localhost:3128", 200),
        ("own", "127.0.0.1:3128", 200),
        ("own", "[::1]:3128", 200),
        ("tls", "page.test", 200),
    ] {
        for path in ["nodes", "http_sd?port=9100"] {
            let head = format!("GET /.well-known/causeway/{path} HTTP/1.1\r\nHost: {host}\r\n\r\n");
            let client = world.client_at(listener).nobody();
            let answer = client.raw(GATEWAY_NAME, head).await;
            assert_eq!(answer.status, status, "{listener} {host} {path}");
        }
    }
}

/// A reset could discard the reason at the client (RFC 9112, section 9.6).
#[tokio::test]
async fn a_refusal_that_ends_the_connection_ends_it_in_order() {
    let app = App::saying("hello").await;
    let (world, token) = with_tokens().await;
    let _edge = edge(&world, &app).await;
    for name in ["tls", "plain"] {
        let client = world.client_at(name).nobody();
        for (line, fields, reason) in [
            ("CONNECT edge-9:22 HTTP/1.0", "", "node_unknown"),
            (
                "CONNECT edge-9:22 HTTP/1.1",
                "Connection: close\r\n",
                "node_unknown",
            ),
            (
                "CONNECT edge-1:1 HTTP/1.1",
                "Connection: close\r\n",
                "edge_policy",
            ),
            (
                "GET http://edge-9:9100/ HTTP/1.1",
                "Connection: close, Upgrade\r\nUpgrade: websocket\r\n",
                "node_unknown",
            ),
        ] {
            let mut wire = client.wire(GATEWAY_NAME, &["http/1.1"]).await.unwrap();
            let head =
                format!("{line}\r\nHost: x\r\nProxy-Authorization: Bearer {token}\r\n{fields}\r\n");
            wire.write_all(head.as_bytes()).await.unwrap();
            let answer = read_to_end(&mut wire).await;
            let answer = answer.unwrap_or_else(|error| panic!("{line} at {name}: {error}"));
            let answer = String::from_utf8(answer).unwrap();
            let reason = format!("\"reason\":\"{reason}\"");
            assert!(answer.contains(&reason), "{line} at {name}: {answer}");
        }
    }
}

#[tokio::test]
async fn a_certificate_that_proves_nothing_does_not_stand_in_the_way_of_a_token() {
    let app = App::saying("hello").await;
    let (mut build, ca) = (
        World::build(),
        Ca::create(&TrustDomain::parse("other").unwrap()).unwrap(),
    );
    let token = build.token("ann");
    let authority = Authority::new();
    let trusted = build.folder().join("trusted.pem");
    fs::write(&trusted, authority.pem()).unwrap();
    let authenticated = Listener {
        client_auth: ClientAuth {
            tokens: Some(build.tokens()),
            client_ca: vec![trusted],
            ..ClientAuth::default()
        },
        ..listener("tokens", ListenerProtocol::Https)
    };
    // A rejected certificate never makes a client anonymous.
    let open = Listener {
        anonymous: true,
        ..authenticated.clone()
    };
    let open = Listener {
        name: "open".to_owned(),
        ..open
    };
    build = build.listener(authenticated).listener(open);
    let world = build.start().await;
    let _edge = edge(&world, &app).await;
    let unknown = ca
        .issue_client("ann", &[], Duration::from_hours(1))
        .unwrap();
    let (expired, server) = (authority.expired_app(&["ann"]), authority.app(&["ann"]));
    for (leaf, why) in [
        (unknown, "is not issued by a CA that is trusted here"),
        (expired, "expired at 2021-01-01"),
        (server, "purpose does not permit use as client"),
    ] {
        for name in ["tokens", "open"] {
            let client = world.client_at(name).certificate(&leaf);
            let answer = client.get("https://edge-1:9100/").await;
            assert_problem(&answer, 401, "unauthenticated", "certificate: ");
            assert!(answer.text().contains(why), "{answer}");
            let wrong = client.clone().bearer("wrong");
            let refused = wrong.get("https://edge-1:9100/").await;
            assert_problem(&refused, 401, "unauthenticated", "token: ");
            assert!(refused.text().contains(why), "{refused}");
            let accepted = client.bearer(&token).get("https://edge-1:9100/").await;
            assert_eq!(accepted.text(), "hello", "{why}");
        }
        // A listener without tokens refuses the handshake.
        let request = Request::get("https://edge-1:9100/").body(whole(""));
        let strict = world.client().certificate(&leaf);
        let refused = strict.try_send(request.unwrap()).await;
        refused.map(|answer| answer.to_string()).unwrap_err();
    }
}

/// A certificate that is genuine and refused is no missing one.
#[tokio::test]
async fn a_token_does_not_hide_that_a_certificate_is_revoked() {
    let app = App::saying("hello").await;
    let mut build = World::build();
    let token = build.token("ann");
    let ca = Ca::create(&TrustDomain::parse("other").unwrap()).unwrap();
    let trusted = build.folder().join("trusted.pem");
    fs::write(&trusted, ca.root_pem()).unwrap();
    let hour = Duration::from_hours(1);
    let [stays, revoked] = [(); 2].map(|()| ca.issue_client("ann", &[], hour).unwrap());
    let serial = Certificate::parse(&revoked.chain()[0])
        .unwrap()
        .serial_hex();
    let tokens = Listener {
        client_auth: ClientAuth {
            tokens: Some(build.tokens()),
            client_ca: vec![trusted],
            revoked: vec![Serial::try_from(serial.to_uppercase()).unwrap()],
            ..ClientAuth::default()
        },
        ..listener("tokens", ListenerProtocol::Https)
    };
    build = build.listener(tokens);
    let world = build.start().await;
    let _edge = edge(&world, &app).await;
    let client = world.client_at("tokens").bearer(&token);
    for (leaf, status) in [(stays, 200), (revoked, 401)] {
        let client = client.clone().certificate(&leaf);
        let answer = client.get("https://edge-1:9100/").await;
        assert_eq!(answer.status, status, "{answer}");
        assert!(
            status == 200 || answer.text().contains("certificate: revoked"),
            "{answer}"
        );
    }
}

#[tokio::test]
async fn only_the_named_networks_are_served_without_tls() {
    let app = App::saying("hello").await;
    let near = plain("near", &["127.0.0.1/32", "127.0.0.2/32"]);
    let world = World::build().listener(near).start().await;
    let _edge = edge(&world, &app).await;
    let head = "GET http://edge-1:9100/ HTTP/1.1\r\nHost: x\r\n\r\n";
    let from = |address: &str| world.client_at("near").nobody().from(address);
    assert_eq!(from("127.0.0.2").raw("", head).await.text(), "hello");
    let mut refused = from("127.0.0.3").tcp_stream().await;
    // The end may come before the request is written, and then as a reset.
    let _ = refused.write_all(head.as_bytes()).await;
    let read = read_to_end(&mut refused).await.unwrap_or_default();
    assert!(read.is_empty(), "{read:?}");
    let failures = world.metrics().await;
    let labels = [("listener", "connect"), ("why", "network")];
    assert_eq!(failures.sum("handshakes_failed_total", &labels), 1);
    assert_eq!(app.requests(), 1);
}

/// Returns the answer, and the connection, which a session needs.
async fn connect_over_http2(client: &Client, authority: &str) -> (Connection, Response<Incoming>) {
    let mut connection = client.connect(GATEWAY_NAME).await.unwrap();
    let request = Request::builder().method(Method::CONNECT).uri(authority);
    let request = request.version(Version::HTTP_2).body(whole("")).unwrap();
    let answer = connection.open_as_is(request).await.unwrap();
    (connection, answer)
}

#[tokio::test]
async fn a_connect_over_http2_is_a_session_with_half_close() {
    let app = App::tcp(Script::new().write("first").read_to_end().write("last")).await;
    let build = World::build().listener(listener("proxy", ListenerProtocol::Connect));
    let world = build.start().await;
    let edge = world
        .edge("edge-1")
        .port_as(22, Protocol::Tcp, app.address());
    let _edge = edge.join().await;
    let client = world.client_at("proxy").http2().sni(GATEWAY_NAME);
    let (_connection, answer) = connect_over_http2(&client, "edge-1:22").await;
    assert_eq!(answer.status(), 200);
    let mut session = TokioIo::new(hyper::upgrade::on(answer).await.unwrap());
    assert_eq!(read(&mut session, 5).await, b"first");
    session.write_all(b"hello").await.unwrap();
    session.shutdown().await.unwrap();
    assert_eq!(read_to_end(&mut session).await.unwrap(), b"last");
    assert_eq!(app.body().await, b"hello");
    let (_, answer) = connect_over_http2(&client, "edge-9:22").await;
    assert_eq!(answer.status(), 404);
    let nobody = client.clone().nobody();
    let (_, answer) = connect_over_http2(&nobody, "edge-1:22").await;
    assert_eq!(answer.status(), 407);
    // Clients in Go write an HTTP/1.1 CONNECT although they have negotiated h2.
    let head = "CONNECT edge-1:22 HTTP/1.1\r\nHost: edge-1:22\r\n\r\n";
    let mut wire = client
        .tls_stream(GATEWAY_NAME, &["h2", "http/1.1"])
        .await
        .unwrap();
    assert_eq!(wire.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let answer = exchange(&mut wire, head).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert_eq!(read(&mut wire, 5).await, b"first");
}

/// Sessions over one HTTP/2 connection, written frame by frame.
struct Http2Sessions {
    world: World,
    _edge: Edge,
    wire: Box<dyn Wire>,
    last_stream: u32,
}

impl Http2Sessions {
    /// Starts a world whose edge serves these apps at the ports from 1 on. The gateway itself dials names of this host.
    async fn start(apps: &[SocketAddr]) -> Self {
        Self::start_with(apps, |build| build).await
    }

    /// Starts another world in the same way.
    async fn start_with(apps: &[SocketAddr], change: impl FnOnce(Build) -> Build) -> Self {
        let proxy = Listener {
            direct_networks: vec!["127.0.0.1/32".parse().unwrap()],
            ..listener("proxy", ListenerProtocol::Connect)
        };
        let world = change(World::build().listener(proxy)).start().await;
        let edge = world.edge("edge-1");
        let edge = (1..).zip(apps).fold(edge, |edge, (port, app)| {
            edge.port_as(port, Protocol::Tcp, *app)
        });
        let edge = edge.join().await;
        let client = world.client_at("proxy");
        let wire = client.wire(GATEWAY_NAME, &["h2"]).await.unwrap();
        let mut sessions = Self {
            world,
            _edge: edge,
            wire,
            last_stream: 0,
        };
        sessions.send(&[PREFACE, &settings(&[])].concat()).await;
        sessions
    }

    async fn send(&mut self, bytes: &[u8]) {
        send(&mut *self.wire, bytes).await.unwrap();
    }

    /// Returns the next frame of the last session, except updates of its window.
    async fn next(&mut self) -> Frame {
        next_of(&mut *self.wire, self.last_stream).await
    }

    /// Opens a session and returns its stream.
    async fn open(&mut self, authority: &str) -> u32 {
        self.last_stream += if self.last_stream == 0 { 1 } else { 2 };
        let head = fields(&[(":method", "CONNECT"), (":authority", authority)]);
        let head = frame(HEADERS, END_HEADERS, self.last_stream, &head);
        self.send(&head).await;
        let answer = self.next().await;
        assert_eq!(
            (answer.kind, answer.status()),
            (HEADERS, 200),
            "{authority}"
        );
        self.last_stream
    }

    /// Resets the last session with this error code.
    async fn reset(&mut self, code: u8) {
        let reset = frame(RST_STREAM, 0, self.last_stream, &[0, 0, 0, code]);
        self.send(&reset).await;
    }
}

/// Returns the targets of the app at a port of the edge: by the edge, and dialled by the gateway.
fn targets(port: u16, app: SocketAddr) -> [String; 2] {
    [
        format!("edge-1:{port}"),
        format!("localhost:{}", app.port()),
    ]
}

/// Returns the next frame of the connection.
async fn next_frame(wire: &mut dyn Wire) -> Frame {
    timeout(PATIENCE, next(wire)).await.unwrap().unwrap()
}

async fn next_of(wire: &mut dyn Wire, stream: u32) -> Frame {
    loop {
        let frame = next_frame(wire).await;
        if frame.stream == stream && frame.kind != WINDOW_UPDATE {
            return frame;
        }
    }
}

#[tokio::test]
async fn an_aborted_session_over_http2_is_a_reset_and_spares_the_other_sessions() {
    let gate = PauseGate::new();
    let echo = App::tcp(Script::new().echo()).await;
    let breaking = Script::new().write("part").until(&gate);
    let breaking = App::tcp(breaking.write("last").reset()).await;
    let silent = App::tcp(Script::new().silence()).await;
    let mut sessions = Http2Sessions::start(&[&echo, &breaking, &silent].map(App::address)).await;
    let spared = sessions.open("edge-1:1").await;
    for target in targets(2, breaking.address()) {
        sessions.open(&target).await;
        let part = sessions.next().await;
        assert_eq!((part.kind, &part.payload[..]), (DATA, &b"part"[..]));
        gate.open();
        let last = sessions.next().await;
        assert_eq!(
            (last.kind, &last.payload[..]),
            (DATA, &b"last"[..]),
            "{target}"
        );
        let end = sessions.next().await;
        assert_eq!(
            (end.kind, &end.payload[..]),
            (RST_STREAM, CONNECT_ERROR),
            "{target}"
        );
    }
    for target in targets(3, silent.address()) {
        // Codes that hyper takes for an ordinary end: NO_ERROR and CANCEL.
        for code in [0, 8] {
            sessions.open(&target).await;
            sessions.reset(code).await;
            assert_eq!(silent.end().await, End::Reset, "{target}: {code}");
        }
    }
    sessions.send(&frame(DATA, 0, spared, b"alive")).await;
    let echoed = next_of(&mut *sessions.wire, spared).await;
    assert_eq!(echoed.payload, b"alive");
    let last = [
        frame(DATA, END_STREAM, spared, &[]),
        frame(PING, 0, 0, &[1; 8]),
    ];
    sessions.send(&last.concat()).await;
    let end = next_of(&mut *sessions.wire, spared).await;
    assert!(end.ends(), "{end:?}");
    // A complete session has no reset behind its end.
    sessions.send(&frame(PING, 0, 0, &[2; 8])).await;
    loop {
        let frame = next_frame(&mut *sessions.wire).await;
        assert_ne!(frame.stream, spared, "{frame:?}");
        if frame.payload == [2; 8] {
            break;
        }
    }
}

/// hyper resets a stream whose own half has ended with `NO_ERROR`.
#[tokio::test]
async fn a_session_that_is_aborted_behind_its_half_close_is_no_complete_one() {
    let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = app.local_addr().unwrap();
    let mut sessions = Http2Sessions::start(&[address]).await;
    for target in targets(1, address) {
        let stream = sessions.open(&target).await;
        let (mut accepted, _) = app.accept().await.unwrap();
        accepted.shutdown().await.unwrap();
        let half_close = sessions.next().await;
        assert!(half_close.ends(), "{target}: {half_close:?}");
        accepted.set_zero_linger().unwrap();
        drop(accepted);
        // Only a write shows that the app is gone.
        sessions.send(&frame(DATA, 0, stream, b"lost")).await;
        let end = sessions.next().await;
        assert_eq!(
            (end.kind, &end.payload[..]),
            (RST_STREAM, CONNECT_ERROR),
            "{target}"
        );
    }
}

fn compiled(rules: &Value) -> Policy {
    let policy: policy::Policy = serde_json::from_value(json!({ "rules": rules })).unwrap();
    Policy::compile(&policy).unwrap()
}

#[tokio::test]
async fn a_session_over_http2_that_the_policy_ends_is_reset_and_recorded() {
    let echo = App::tcp(Script::new().echo()).await;
    let rules = PolicyWriter::new(None);
    let policy = rules.reader();
    let apps = [echo.address()];
    let start = Http2Sessions::start_with(&apps, |build| build.policy(policy));
    let mut sessions = Box::pin(start).await;
    for target in targets(1, echo.address()) {
        rules.replace(Some(compiled(&json!([{ "then": "allow" }]))));
        let stream = sessions.open(&target).await;
        sessions.send(&frame(DATA, 0, stream, b"alive")).await;
        assert_eq!(sessions.next().await.payload, b"alive", "{target}");
        rules.replace(Some(compiled(&json!([]))));
        let end = sessions.next().await;
        assert_eq!(
            (end.kind, &end.payload[..]),
            (RST_STREAM, CONNECT_ERROR),
            "{target}"
        );
        sessions.world.until_idle().await;
    }
    let records = sessions.world.log().records();
    let reasons = records.iter().map(|record| record["reason"].clone());
    assert_eq!(reasons.collect::<Vec<_>>(), ["forbidden", "forbidden"]);
}

#[tokio::test]
async fn unread_sessions_over_http2_are_reset_when_memory_is_short() {
    let app = App::tcp(Script::new().forever(vec![7; 64 << 10])).await;
    let change = |build: Build| {
        build.config(|config| {
            config.tunnel.memory = 4 << 20;
            config.limits.stalled = 8 << 20;
        })
    };
    let mut sessions = Box::pin(Http2Sessions::start_with(&[app.address()], change)).await;
    let head = fields(&[(":method", "CONNECT"), (":authority", "edge-1:1")]);
    let opening = (0..100).map(|index| frame(HEADERS, END_HEADERS, 2 * index + 1, &head));
    sessions.send(&opening.collect::<Vec<_>>().concat()).await;
    // The client never enlarges the window of a stream.
    let end = loop {
        let frame = next_frame(&mut *sessions.wire).await;
        if frame.kind == RST_STREAM {
            break frame;
        }
    };
    assert_eq!(end.payload, CONNECT_ERROR);
    until("the lost streams are counted", async || {
        let metrics = sessions.world.metrics().await;
        metrics.sum("evicted_streams_total", &[("reason", "memory")]) > 0
    })
    .await;
}

#[tokio::test]
async fn hyper_takes_an_aborted_session_over_http2_for_an_error() {
    let gate = PauseGate::new();
    let script = Script::new().write("part").until(&gate);
    let app = App::tcp(script.write("last").reset()).await;
    let proxy = Listener {
        direct_networks: vec!["127.0.0.1/32".parse().unwrap()],
        ..listener("proxy", ListenerProtocol::Connect)
    };
    let world = World::build().listener(proxy).start().await;
    let edge = world.edge("edge-1");
    let _edge = edge.port_as(1, Protocol::Tcp, app.address()).join().await;
    let client = world.client_at("proxy");
    let io = client.tls_stream(GATEWAY_NAME, &["h2"]).await.unwrap();
    let connecting = http2::handshake(TokioExecutor::new(), TokioIo::new(io));
    let (mut sender, connection) = connecting.await.unwrap();
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    for target in targets(1, app.address()) {
        let request = Request::builder().method(Method::CONNECT).uri(&target);
        let request = request.version(Version::HTTP_2).body(whole(""));
        let answer = sender.send_request(request.unwrap()).await.unwrap();
        assert_eq!(answer.status(), 200, "{target}");
        let mut session = TokioIo::new(hyper::upgrade::on(answer).await.unwrap());
        assert_eq!(read(&mut session, 4).await, b"part", "{target}");
        gate.open();
        assert_eq!(read(&mut session, 4).await, b"last", "{target}");
        let end = read_to_end(&mut session).await;
        assert!(end.is_err(), "{target}: {end:?}");
    }
}

#[tokio::test]
async fn a_session_over_http2_that_is_only_half_open_ends_with_its_reset() {
    let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = app.local_addr().unwrap();
    let mut sessions = Http2Sessions::start(&[address]).await;
    for target in targets(1, address) {
        let stream = sessions.open(&target).await;
        let half_close = frame(DATA, END_STREAM, stream, b"hello");
        sessions.send(&half_close).await;
        let (mut accepted, _) = app.accept().await.unwrap();
        assert_eq!(read_to_end(&mut accepted).await.unwrap(), b"hello");
        let open = sessions.world.metrics().await.sum("open_streams", &[]);
        assert_eq!(open, 1, "{target}");
        // Nothing is read from this client any more, or written to it.
        sessions.reset(8).await;
        let ended = timeout(PATIENCE, accepted.ready(Interest::ERROR)).await;
        ended.expect("the app learns of the reset").unwrap();
        sessions.world.until_idle().await;
    }
}

#[tokio::test]
async fn a_request_body_that_its_client_resets_is_never_complete() {
    let app = App::http(|_| Script::new().body()).await;
    let world = World::start().await;
    let _edge = edge(&world, &app).await;
    let mut wire = world.client().wire("edge-1", &["h2"]).await.unwrap();
    let wire = &mut *wire;
    send(wire, &[PREFACE, &settings(&[])].concat())
        .await
        .unwrap();
    for (stream, code) in [(1, 0), (3, 8)] {
        let head = fields(&[
            (":method", "POST"),
            (":scheme", "https"),
            (":authority", "edge-1:9100"),
            (":path", "/"),
        ]);
        let head = frame(HEADERS, END_HEADERS, stream, &head);
        send(wire, &[head, frame(DATA, 0, stream, b"part")].concat())
            .await
            .unwrap();
        app.head().await;
        let reset = frame(RST_STREAM, 0, stream, &[0, 0, 0, code]);
        send(wire, &reset).await.unwrap();
        assert_eq!(app.end().await, End::Reset, "{code}");
    }
}

#[tokio::test]
async fn curl_uses_a_proxy_without_tls_for_requests_and_for_tunnels() {
    need!("curl");
    let app = App::saying("hello").await;
    let (world, token) = with_tokens().await;
    let _edge = edge(&world, &app).await;
    let proxy = world.listener("plain");
    for tunnel in [false, true] {
        let curl = |user: &str| {
            let curl = Tool::curl().args(["-w", " %{http_code} %{http_connect}"]);
            let curl = curl.args(["-x", &format!("http://{user}@{proxy}")]);
            let curl = if tunnel { curl.args(["-p"]) } else { curl };
            curl.args(["http://edge-1:9100/metrics"]).run()
        };
        let output = curl(&format!("ann:{token}")).await.ok().text();
        let expected = if tunnel {
            "hello 200 200"
        } else {
            "hello 200 000"
        };
        assert_eq!(output, expected);
        let refused = curl("ann:wrong").await.text();
        let (tail, detail) = (
            if tunnel { "000 407" } else { "407 000" },
            "token: not known",
        );
        assert!(refused.ends_with(tail), "{refused}");
        assert_eq!(refused.contains(detail), !tunnel, "{refused}");
    }
}

/// As `ProxyCommand nc -X connect -x gateway:port %h %p` of OpenSSH.
#[tokio::test]
async fn netcat_connects_through_a_proxy_without_tls() {
    need!("nc");
    let app = App::tcp(Script::new().write("SSH-2.0-app\r\n").read_to_end()).await;
    let build = World::build().listener(plain("proxy", &["127.0.0.0/8"]));
    let world = build.start().await;
    let edge = world
        .edge("edge-1")
        .port_as(22, Protocol::Tcp, app.address());
    let _edge = edge.join().await;
    let proxy = world.listener("proxy").to_string();
    let nc = Tool::nc().args(["-X", "connect", "-x", &proxy, "edge-1", "22"]);
    let output = nc.input("SSH-2.0-client\r\n").run().await.ok();
    assert_eq!(output.text(), "SSH-2.0-app\r\n");
    assert_eq!(app.body().await, b"SSH-2.0-client\r\n");
}
