//! Requests as the upstream sees them, and responses as the client sees them. The tests replay heads byte for byte as the
//! parts of Kubernetes send them, with the fields that this hop adds, removes or leaves unchanged.

use crate::{
    testbed::{TestBed, URL},
    world::{
        GATEWAY_NAME, World,
        app::{App, Head, PauseGate, Script, answer},
        client::{exchange, read, read_to_end},
        edge::Edge,
        gateway::listener,
    },
};
use causeway_edge::config::Protocol;
use causeway_gateway::config::{ErrorFormat, Listener, ListenerProtocol};
use std::time::Duration;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::client::TlsStream;

const EXEC: &str =
    "GET /exec/default/probe-1/ticker?command=echo&command=hi&error=1&output=1 HTTP/1.1
Host: 10.97.0.1:6443
User-Agent: kubectl/v0.0.0 (linux/amd64) kubernetes/$Format
Connection: Upgrade
Kubectl-Command: kubectl exec
Kubectl-Session: f1cde287-0000-4000-8000-000000000000
Sec-Websocket-Key: 7UO9d9Ho3mwbcMtnlJY9oQ==
Sec-Websocket-Protocol: v5.channel.k8s.io
Sec-Websocket-Version: 13
Upgrade: websocket
X-Forwarded-For: 10.97.0.1

";
pub(crate) const EXEC_SPDY: &str =
    "POST /exec/default/probe-1/ticker?command=echo&command=hi&error=1&output=1 HTTP/1.1
Host: 10.97.0.1:6443
User-Agent: kubectl/v0.0.0 (linux/amd64) kubernetes/$Format
Content-Length: 0
Connection: Upgrade
Kubectl-Command: kubectl exec
Kubectl-Session: 929fb67b-0000-4000-8000-000000000000
Upgrade: SPDY/3.1
X-Forwarded-For: 10.97.0.1
X-Stream-Protocol-Version: v5.channel.k8s.io
X-Stream-Protocol-Version: v4.channel.k8s.io
X-Stream-Protocol-Version: v3.channel.k8s.io
X-Stream-Protocol-Version: v2.channel.k8s.io
X-Stream-Protocol-Version: channel.k8s.io

";
const EXEC_SPDY_TRANSLATED: &str =
    "POST /exec/default/probe-1/ticker?command=echo&command=hi&error=1&output=1 HTTP/1.1
Host: edge-1:10250
User-Agent: Go-http-client/1.1
Content-Length: 0
Connection: Upgrade
Upgrade: SPDY/3.1
X-Stream-Protocol-Version: v5.channel.k8s.io
X-Stream-Protocol-Version: v4.channel.k8s.io
X-Stream-Protocol-Version: v3.channel.k8s.io
X-Stream-Protocol-Version: v2.channel.k8s.io
X-Stream-Protocol-Version: channel.k8s.io

";
const PORT_FORWARD: &str = "GET /portForward/default/probe-1 HTTP/1.1
Host: 10.97.0.1:6443
User-Agent: kubectl/v0.0.0 (linux/amd64) kubernetes/$Format
Connection: Upgrade
Kubectl-Command: kubectl port-forward
Kubectl-Session: f1cde287-0000-4000-8000-000000000000
Sec-Websocket-Key: 7UO9d9Ho3mwbcMtnlJY9oQ==
Sec-Websocket-Protocol: SPDY/3.1+portforward.k8s.io
Sec-Websocket-Version: 13
Upgrade: websocket
X-Forwarded-For: 10.97.0.1

";
const LOGS: &str = "GET /containerLogs/default/probe-1/ticker?follow=true&tailLines=1 HTTP/1.1
Host: edge-1:10250
User-Agent: Go-http-client/1.1
Accept-Encoding: gzip

";
const STATS: &str = "GET /stats/summary HTTP/1.1
Host: 10.97.0.1:6443
User-Agent: kubectl/v0.0.0 (linux/amd64) kubernetes/$Format
Accept: application/json, */*
Accept-Encoding: gzip
Kubectl-Command: kubectl get
Kubectl-Session: 9c810d1b-0000-4000-8000-000000000000
X-Forwarded-For: 10.97.0.1
X-Forwarded-Uri: /api/v1/nodes/edge-1/proxy/stats/summary

";
/// Frames that a kubelet sends after the head of its 101: stdout, status, close.
const FRAMES: &[u8] = b"\x82\x01\x01\x82\x04\x01hi\n\x82\x23\x03{\"metadata\":{},\"status\":\"Success\"}\x88\x02\x03\xe8";

#[tokio::test]
async fn exec_by_websocket_reaches_the_kubelet_field_for_field() {
    let head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: AyyNT6S6LRi6iXh+SKsX14i969I=\r\nSec-WebSocket-Protocol: v5.channel.k8s.io\r\n\r\n";
    let script = Script::new()
        .write([head.as_bytes(), FRAMES].concat())
        .close();
    let app = App::http(move |_| script.clone()).await;
    let (world, _edge) = kubelet(&app).await;
    for exec in [EXEC, PORT_FORWARD] {
        let mut wire = tls(&world).await;
        let answer = exchange(&mut wire, crlf(exec)).await;
        assert!(
            answer.starts_with("HTTP/1.1 101 Switching Protocols\r\n"),
            "{answer}"
        );
        for (name, value) in [
            ("upgrade", "websocket"),
            ("connection", "Upgrade"),
            ("sec-websocket-accept", "AyyNT6S6LRi6iXh+SKsX14i969I="),
            ("sec-websocket-protocol", "v5.channel.k8s.io"),
        ] {
            assert_eq!(values(&answer, name), [value], "{answer}");
        }
        assert_eq!(read_to_end(&mut wire).await.unwrap(), FRAMES);
        assert_same(&app.head().await, exec);
    }
}

#[tokio::test]
async fn exec_by_spdy_reaches_the_kubelet_field_for_field() {
    let app = App::http(|_| answer::switch("SPDY/3.1", b"\x80\x03")).await;
    let (world, _edge) = kubelet(&app).await;
    for exec in [EXEC_SPDY, EXEC_SPDY_TRANSLATED] {
        let mut wire = tls(&world).await;
        let answer = exchange(&mut wire, crlf(exec)).await;
        assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
        assert_eq!(values(&answer, "upgrade"), ["SPDY/3.1"], "{answer}");
        let version = values(&answer, "x-stream-protocol-version");
        assert_eq!(version, ["v4.channel.k8s.io"], "{answer}");
        assert_eq!(read(&mut wire, 2).await, b"\x80\x03");
        assert_same(&app.head().await, exec);
    }
}

#[tokio::test]
async fn logs_by_http_2_reach_a_kubelet_that_speaks_http_1() {
    let app = App::saying("a line\n").await;
    let (world, _edge) = kubelet(&app).await;
    let client = world.client().http2();
    let client = client.field("accept-encoding", "gzip");
    let client = client.field("user-agent", "Go-http-client/2.0");
    let path = "/containerLogs/default/probe-1/ticker?tailLines=2";
    let answer = client.get(&format!("https://edge-1:10250{path}")).await;
    assert_eq!(answer.text(), "a line\n");
    let sent = format!(
        "GET {path} HTTP/1.1\nHost: edge-1:10250\nAccept-Encoding: gzip\nUser-Agent: Go-http-client/2.0\n\n"
    );
    assert_same_by(&app.head().await, &sent, "2");
}

#[tokio::test]
async fn logs_that_follow_are_flushed_line_by_line() {
    let gate = PauseGate::new();
    let script = gate.clone();
    let lines = ["line 1\n", "line 2\n"];
    let app = App::http(move |_| answer::parts("text/plain", &lines, &script)).await;
    let (world, _edge) = kubelet(&app).await;
    let mut wire = tls(&world).await;
    let answer = exchange(&mut wire, crlf(LOGS)).await;
    assert_eq!(
        values(&answer, "transfer-encoding"),
        ["chunked"],
        "{answer}"
    );
    for line in lines {
        gate.open();
        assert_eq!(
            read(&mut wire, 12).await,
            format!("7\r\n{line}\r\n").as_bytes()
        );
    }
    assert_same(&app.head().await, LOGS);
}

/// On one kept connection the Host changes from request to request, and names the node only sometimes.
#[tokio::test]
async fn node_proxy_and_logs_share_a_connection_for_all_hosts() {
    let app = App::saying("{}").await;
    let (world, _edge) = kubelet(&app).await;
    let mut wire = tls(&world).await;
    for head in [LOGS, STATS, LOGS] {
        let answer = exchange(&mut wire, crlf(head)).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        assert_eq!(read(&mut wire, 2).await, b"{}");
        assert_same(&app.head().await, head);
    }
    let client = world.client().http2().sni("edge-1").host("10.97.0.1:6443");
    let mut connection = client.connect("edge-1").await.unwrap();
    let answer = connection
        .get("https://edge-1/stats/summary")
        .await
        .unwrap();
    assert_eq!(answer.text(), "{}");
    assert_eq!(app.head().await.value("host").unwrap(), "10.97.0.1:6443");
}

#[tokio::test]
async fn an_egress_selector_gets_a_bare_200_before_any_other_byte() {
    let app = App::tcp(Script::new().write("I speak first").echo()).await;
    let strict = Listener {
        errors: ErrorFormat::Kubernetes,
        ..listener("egress", ListenerProtocol::Connect)
    };
    let build = World::build()
        .listener(strict)
        .listener(listener("other", ListenerProtocol::Connect));
    let world = build.start().await;
    let edge = world
        .edge("edge-1")
        .port_as(10250, Protocol::Tcp, app.address());
    let _edge = edge.address("10.97.0.11").join().await;
    let head = "CONNECT edge-1:10250 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
    for target in ["edge-1:10250", "10.97.0.11:10250"] {
        let mut waiting = connected(&world, "egress").await;
        let answer = exchange(&mut waiting, head.replace("edge-1:10250", target)).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        for framing in ["content-length", "transfer-encoding", "connection"] {
            assert!(values(&answer, framing).is_empty(), "{answer}");
        }
        // The bytes of another listener's client arrive at once, and later on the same tunnel. Bytes that have not arrived
        // by then are held back.
        let mut other = connected(&world, "other").await;
        exchange(&mut other, head).await;
        assert_eq!(read(&mut other, 13).await, b"I speak first");
        let early = timeout(Duration::ZERO, waiting.read_u8()).await;
        assert!(early.is_err(), "{early:?}");
        waiting.write_all(b"\x16").await.unwrap();
        assert_eq!(read(&mut waiting, 14).await, b"I speak first\x16");
    }
}

#[tokio::test]
async fn a_trace_passes_unchanged_and_none_is_added() {
    let (secured, asked_here) = TestBed::secured(|_| answer::ok("it")).await;
    let app = App::saying("it").await;
    let testbed = TestBed::to(&app).await;
    let theirs = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    for (app, testbed) in [(&app, &testbed), (&secured, &asked_here)] {
        for client in [testbed.client(), testbed.http2()] {
            for traceparent in [theirs, "00-nonsense", theirs.split_at(54).0] {
                let client = client.clone().field("traceparent", traceparent);
                client.field("tracestate", "a=b").get(URL).await;
                let head = app.head().await;
                assert_eq!(head.values("traceparent"), [traceparent]);
                assert_eq!(head.values("tracestate"), ["a=b"]);
            }
            client.get(URL).await;
            let head = app.head().await;
            assert_eq!(head.value("traceparent"), None, "{head:?}");
            assert_eq!(head.value("tracestate"), None, "{head:?}");
        }
        let mut wire = testbed.tls().await;
        let upgrade = "GET / HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
        exchange(&mut wire, upgrade).await;
        assert_eq!(app.head().await.value("traceparent"), None);
    }
    testbed.until_idle().await;
    // Returns the log of both worlds.
    assert!(testbed.log().record(&theirs[3..35]).is_some());
}

#[tokio::test]
async fn this_hop_is_appended_after_the_previous_hops() {
    let answer = "HTTP/1.1 200 OK\r\nVia: 1.1 inner\r\nContent-Length: 0\r\n\r\n";
    let app = App::http(move |_| Script::new().write(answer)).await;
    let testbed = TestBed::to(&app).await;
    let answer = testbed.client().field("via", "1.1 outer").get(URL).await;
    assert_eq!(
        app.head().await.values("via"),
        ["1.1 outer", "1.1 causeway"]
    );
    let via: Vec<_> = answer.fields.get_all("via").iter().collect();
    assert_eq!(via, ["1.1 inner", "2 causeway"]);
}

#[tokio::test]
async fn our_private_fields_pass_neither_from_clients_nor_from_apps() {
    let answer = "HTTP/1.1 200 OK\r\nCauseway-Failure: target_refused\r\nCauseway-Detail: lies\r\nCauseway-Switched: websocket\r\nCauseway-Anything: 1\r\nContent-Length: 2\r\n\r\nit";
    let app = App::http(move |_| Script::new().write(answer)).await;
    let testbed = TestBed::to(&app).await;
    for client in [testbed.client(), testbed.http2()] {
        let client = client.field("causeway-target", "127.0.0.1:1");
        let client = client.field("causeway-anything", "1");
        let answer = client.field("causeway-control", "1").get(URL).await;
        assert_eq!((answer.status, answer.text().as_str()), (200, "it"));
        let ours = |name: &str| name.to_ascii_lowercase().starts_with("causeway-");
        assert!(
            !answer.fields.keys().any(|name| ours(name.as_str())),
            "{answer}"
        );
        let fields = app.head().await.fields();
        assert!(!fields.iter().any(|(name, _)| ours(name)), "{fields:?}");
    }
    let mut wire = testbed.tls().await;
    let upgrade =
        "GET / HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
    let answer = exchange(&mut wire, upgrade).await;
    assert!(
        answer.starts_with("HTTP/1.1 200 "),
        "an app cannot switch to our protocol: {answer}"
    );
}

#[tokio::test]
async fn fields_of_one_connection_stay_on_it() {
    let answer = "HTTP/1.1 200 OK\r\nConnection: X-Back\r\nX-Back: 1\r\nKeep-Alive: timeout=5\r\nProxy-Connection: keep-alive\r\nX-Stays: 1\r\nContent-Length: 0\r\n\r\n";
    let app = App::http(move |_| Script::new().write(answer)).await;
    let testbed = TestBed::to(&app).await;
    let mut wire = testbed.tls().await;
    let head = "GET / HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: X-Hop, keep-alive\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nProxy-Connection: keep-alive\r\nTE: gzip, trailers\r\nX-Stays: 1\r\n\r\n";
    let answer = exchange(&mut wire, head).await;
    let head = app.head().await;
    for gone in ["x-hop", "keep-alive", "proxy-connection"] {
        assert!(head.values(gone).is_empty(), "{gone}: {head:?}");
    }
    assert_eq!(head.values("te"), ["trailers"]);
    assert_eq!(head.values("x-stays"), ["1"]);
    for gone in ["x-back", "keep-alive", "proxy-connection"] {
        assert!(values(&answer, gone).is_empty(), "{answer}");
    }
    assert_eq!(values(&answer, "x-stays"), ["1"]);
}

#[tokio::test]
async fn cookies_that_http_2_splits_are_one_field_to_an_http_1_app() {
    let app = App::saying("it").await;
    let testbed = TestBed::to(&app).await;
    let client = testbed
        .http2()
        .field("cookie", "a=1")
        .field("cookie", "b=2");
    client.field("cookie", "c=3").get(URL).await;
    assert_eq!(app.head().await.values("cookie"), ["a=1; b=2; c=3"]);
}

#[tokio::test]
async fn cookies_that_an_app_sets_stay_apart() {
    let answer =
        "HTTP/1.1 200 OK\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nContent-Length: 0\r\n\r\n";
    let app = App::http(move |_| Script::new().write(answer)).await;
    let testbed = TestBed::to(&app).await;
    for client in [testbed.client(), testbed.http2()] {
        let answer = client.get(URL).await;
        let set: Vec<_> = answer.fields.get_all("set-cookie").iter().collect();
        assert_eq!(set, ["a=1", "b=2"]);
    }
}

#[tokio::test]
async fn authorization_is_removed_unless_the_listener_forwards_it() {
    let app = App::saying("it").await;
    for forwards in [false, true] {
        let build = World::build().listener(Listener {
            forward_authorization: forwards,
            ..listener("https", ListenerProtocol::Https)
        });
        let testbed = TestBed::along(build, Protocol::Http, app.address()).await;
        for client in [testbed.client(), testbed.http2()] {
            client.bearer("secret").get(URL).await;
            let found = app.head().await.value("authorization");
            assert_eq!(found, forwards.then(|| "Bearer secret".to_owned()));
        }
    }
}

#[tokio::test]
async fn paths_and_queries_pass_as_they_were_written() {
    let app = App::saying("it").await;
    let testbed = TestBed::to(&app).await;
    for path in [
        "/a//b/../c?x=%2F&y=a+b&&",
        "/%E2%82%AC%2e?",
        "/?q='|{}",
        "/*",
    ] {
        let mut wire = testbed.tls().await;
        let head = format!("GET {path} HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n");
        let answer = exchange(&mut wire, head).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{path}: {answer}");
        assert_eq!(app.head().await.path(), path);
    }
    let mut wire = testbed.tls().await;
    let answer = exchange(&mut wire, "OPTIONS * HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert_eq!(app.head().await.line(), "OPTIONS * HTTP/1.1");
}

/// edge-1 with `app` as its kubelet.
pub(crate) async fn kubelet(app: &App) -> (World, Edge) {
    let world = World::start().await;
    let edge = world.edge("edge-1").port(10250, app.address()).join().await;
    (world, edge)
}

pub(crate) async fn tls(world: &World) -> TlsStream<TcpStream> {
    let opened = world.client().tls_stream("edge-1", &["http/1.1"]).await;
    opened.unwrap()
}

/// Opens TLS to a connect listener as kube-apiserver does: without ALPN.
async fn connected(world: &World, listener: &str) -> TlsStream<TcpStream> {
    let client = world.client_at(listener);
    client.tls_stream(GATEWAY_NAME, &[]).await.unwrap()
}

/// Returns a head in its form on the wire.
pub(crate) fn crlf(head: &str) -> String {
    head.replace('\n', "\r\n")
}

/// Returns the values of a head's fields of one name, in their order.
pub(crate) fn values(head: &str, name: &str) -> Vec<String> {
    let fields = head.lines().filter_map(|line| line.split_once(": "));
    let named = fields.filter(|(found, _)| found.eq_ignore_ascii_case(name));
    named.map(|(_, value)| value.to_owned()).collect()
}

/// Checks that the app got the sent fields, and the fields that this hop adds.
#[track_caller]
fn assert_same(head: &Head, sent: &str) {
    assert_same_by(head, sent, "1.1");
}

#[track_caller]
fn assert_same_by(head: &Head, sent: &str, version: &str) {
    let (line, fields) = sent.split_once('\n').unwrap();
    assert_eq!(head.line(), line);
    let mut sent: Vec<(String, String)> = fields
        .lines()
        .filter_map(|field| field.split_once(": "))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let host = sent.iter().find(|(name, _)| name == "Host").unwrap();
    let host = host.1.clone();
    // The sender is not a proxy that the listener trusts.
    sent.retain(|(name, _)| name != "X-Forwarded-For");
    for (name, value) in [
        (
            "Forwarded",
            format!("for=127.0.0.1;host=\"{host}\";proto=https"),
        ),
        ("Via", format!("{version} causeway")),
        ("X-Forwarded-For", "127.0.0.1".into()),
        ("X-Forwarded-Host", host),
        ("X-Forwarded-Proto", "https".into()),
        ("X-Real-Ip", "127.0.0.1".into()),
    ] {
        sent.push((name.into(), value));
    }
    let mut got = head.fields();
    // A stable sort: fields of one name keep their order, and number.
    sent.sort_by(|one, other| one.0.cmp(&other.0));
    got.sort_by(|one, other| one.0.cmp(&other.0));
    assert_eq!(got, sent);
}
