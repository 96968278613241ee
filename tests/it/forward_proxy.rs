//! `connect` listeners as HTTP proxies: CONNECT over both versions of HTTP, requests in absolute form, and clients without TLS.

use crate::world::{
    GATEWAY_NAME, World,
    app::{App, Script},
    client::{Client, Connection, assert_problem, exchange, read, read_to_end, whole},
    edge::Edge,
    gateway::{anonymous, listener},
    tool::{Tool, need},
};
use causeway_edge::config::Protocol;
use causeway_gateway::config::{ClientAuth, Listener, ListenerProtocol};
use data_encoding::BASE64;
use hyper::{Method, Request, Response, Version, body::Incoming};
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWriteExt;

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
