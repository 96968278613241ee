//! Requests that are refused, broken off or not HTTP: the client can read the reason, and the record names the cause.

use crate::testbed::TestBed;
use crate::world::{
    World,
    app::{App, PauseGate, Script, answer},
    client::{Wire, assert_problem, exchange, read, read_head, read_to_end},
    frames::{self, DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, RST_STREAM, WINDOW_UPDATE},
    gateway::{anonymous, fixed},
    until,
};
use causeway_gateway::config::{ErrorFormat, ListenerProtocol};
use serde_json::Value;
use tokio::io::AsyncWriteExt;

/// More than all buffers of the path hold.
const LARGE: usize = 20 << 20;

async fn site() -> (World, impl Sized) {
    let world = Box::pin(World::start()).await;
    let app = App::saying("it").await;
    let edge = world.edge("edge-1").port(9100, app.address()).join().await;
    (world, (app, edge))
}

fn records(world: &World, reason: &str) -> Vec<Value> {
    let records = world.log().records().into_iter();
    records
        .filter(|record| record["reason"] == reason)
        .collect()
}

/// Waits for a record with this reason and returns it.
async fn recorded(world: &World, reason: &str) -> Value {
    until("it is recorded", async || {
        !records(world, reason).is_empty()
    })
    .await;
    records(world, reason).remove(0)
}

/// Begins a POST on the first stream of an HTTP/2 connection, with the first bytes of its body.
async fn begin_upload(wire: &mut dyn Wire, authority: &str, first: &[u8]) {
    let list = frames::fields(&[
        (":method", "POST"),
        (":scheme", "https"),
        (":path", "/"),
        (":authority", authority),
    ]);
    let begin = [
        PREFACE.to_vec(),
        frames::settings(&[]),
        frames::frame(HEADERS, END_HEADERS, 1, &list),
        frames::frame(DATA, 0, 1, first),
    ];
    frames::send(wire, &begin.concat()).await.unwrap();
}

/// A POST of a body to a port that is not served. The client reads the answer only after the body's end.
#[tokio::test]
async fn a_refused_upload_is_drained_and_the_connection_continues() {
    let (world, _site) = site().await;
    let mut wire = world
        .client()
        .tls_stream("edge-1", &["http/1.1"])
        .await
        .unwrap();
    for _ in 0..2 {
        let head =
            format!("POST / HTTP/1.1\r\nHost: edge-1:9999\r\nContent-Length: {LARGE}\r\n\r\n");
        wire.write_all(head.as_bytes()).await.unwrap();
        wire.write_all(&vec![b'x'; LARGE]).await.unwrap();
        let answer = read_head(&mut wire).await;
        assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
        let length = answer.to_ascii_lowercase();
        let (_, length) = length.split_once("content-length: ").unwrap();
        let length = length.split_once('\r').unwrap().0.parse().unwrap();
        read(&mut wire, length).await;
    }
}

#[tokio::test]
async fn a_refused_upload_over_http_2_is_answered_and_not_reset() {
    let (world, _site) = site().await;
    let mut wire = world.client().wire("edge-1", &["h2"]).await.unwrap();
    begin_upload(&mut *wire, "edge-1:9999", &[0; 1000]).await;
    let mut status = 0;
    loop {
        let frame = frames::next(&mut *wire).await.unwrap();
        assert_ne!(frame.kind, RST_STREAM, "{status}");
        if frame.kind == HEADERS {
            status = frame.status();
        }
        if frame.ends() {
            break;
        }
    }
    assert_eq!(status, 403);
    // The answer is complete, and the gateway reads the rest of the body as well: it opens its window repeatedly.
    let (mut sent, mut opened) = (0, 0);
    while opened < 2 * 256 * 1024 {
        while sent + 10_000 <= 60_000 + opened {
            let data = frames::frame(DATA, 0, 1, &[0; 10_000]);
            frames::send(&mut *wire, &data).await.unwrap();
            sent += 10_000;
        }
        let frame = frames::next(&mut *wire).await.unwrap();
        assert_ne!(frame.kind, RST_STREAM, "{:?} after {sent}", frame.payload);
        if frame.kind == WINDOW_UPDATE && frame.stream == 1 {
            let bytes: [u8; 4] = frame.payload.try_into().unwrap();
            opened += usize::try_from(u32::from_be_bytes(bytes)).unwrap();
        }
    }
    let end = frames::frame(DATA, END_STREAM, 1, &[]);
    frames::send(&mut *wire, &end).await.unwrap();
}

#[tokio::test]
async fn a_client_that_leaves_during_its_upload_is_no_target_fault() {
    let (world, _site) = site().await;
    let mut wire = world
        .client()
        .tls_stream("edge-1", &["http/1.1"])
        .await
        .unwrap();
    let head = "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nContent-Length: 1000\r\n\r\nsome of it";
    wire.write_all(head.as_bytes()).await.unwrap();
    until("the request is in flight", async || {
        world.metrics().await.sum("open_streams", &[]) == 1
    })
    .await;
    drop(wire);
    let record = recorded(&world, "client_closed").await;
    assert_eq!(record["status"], 499, "{record}");
    world.until_idle().await;

    let mut wire = world.client().wire("edge-1", &["h2"]).await.unwrap();
    begin_upload(&mut *wire, "edge-1:9100", b"some of it").await;
    until("the request is in flight", async || {
        world.metrics().await.sum("open_streams", &[]) == 1
    })
    .await;
    let cancel = frames::frame(RST_STREAM, 0, 1, &8_u32.to_be_bytes());
    frames::send(&mut *wire, &cancel).await.unwrap();
    until("both are recorded", async || {
        records(&world, "client_closed").len() == 2
    })
    .await;
    assert_eq!(world.metrics().await.outcomes("https", "target_broken"), 0);
    assert!(records(&world, "target_broken").is_empty());
}

#[tokio::test]
async fn a_head_that_cannot_be_parsed_has_an_answer_and_a_record() {
    let (world, _site) = site().await;
    let long = format!(
        "GET /{} HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: close\r\n\r\n",
        "x".repeat(70_000)
    );
    let large = format!(
        "GET / HTTP/1.1\r\nHost: edge-1:9100\r\nX-Large: {}\r\n\r\n",
        "x".repeat(300_000)
    );
    for (head, status, reason) in [
        (
            "GET /<x>{ HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n",
            400,
            "malformed",
        ),
        ("GARBAGE\r\n\r\n", 400, "malformed"),
        ("GET / HTTP/1.1\r\nHost edge-1\r\n\r\n", 400, "malformed"),
        (&*long, 414, "uri_too_long"),
        (
            "GET / HTTP/2.0\r\nHost: edge-1:9100\r\n\r\n",
            505,
            "version_not_supported",
        ),
        (&*large, 431, "header_too_large"),
    ] {
        let before = records(&world, reason).len();
        let mut wire = world
            .client()
            .tls_stream("edge-1", &["http/1.1"])
            .await
            .unwrap();
        wire.write_all(head.as_bytes()).await.unwrap();
        let answer = String::from_utf8(read_to_end(&mut wire).await.unwrap()).unwrap();
        let (fields, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(
            fields.starts_with(&format!("HTTP/1.1 {status} ")),
            "{answer}"
        );
        assert!(
            fields.contains("Proxy-Status: causeway; error="),
            "{answer}"
        );
        let problem: Value = serde_json::from_str(body).unwrap();
        assert_eq!(problem["reason"], reason, "{answer}");
        until("it is recorded", async || {
            records(&world, reason).len() == before + 1
        })
        .await;
        assert_eq!(records(&world, reason)[before]["status"], status);
    }
    let metrics = world.metrics().await;
    assert_eq!(metrics.outcomes("https", "malformed"), 3);
    for reason in ["uri_too_long", "version_not_supported", "header_too_large"] {
        assert_eq!(metrics.outcomes("https", reason), 1, "{reason}");
    }
}

#[tokio::test]
async fn kubectl_reads_that_a_head_is_too_large() {
    let mut listener = anonymous("kubelets", ListenerProtocol::Https);
    listener.errors = ErrorFormat::Kubernetes;
    listener.node = Some("edge-1".to_owned());
    let world = World::build().listener(listener).start().await;
    let mut wire = world
        .client_at("kubelets")
        .tls_stream("gateway.test", &["http/1.1"])
        .await
        .unwrap();
    let head = format!(
        "POST /exec HTTP/1.1\r\nHost: edge-1\r\nX-Large: {}\r\n\r\n",
        "x".repeat(300_000)
    );
    wire.write_all(head.as_bytes()).await.unwrap();
    let answer = String::from_utf8(read_to_end(&mut wire).await.unwrap()).unwrap();
    assert!(answer.starts_with("HTTP/1.1 502 "), "{answer}");
    assert!(answer.contains("larger than can be parsed"), "{answer}");
}

/// RFC 7301, section 3.2; RFC 9113, section 3.4.
#[tokio::test]
async fn the_negotiated_alpn_protocol_is_spoken() {
    let (world, _site) = site().await;
    let request = "GET / HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
    let preface = [PREFACE, &frames::settings(&[])].concat();
    for (alpn, first) in [
        ("h2", request.as_bytes()),
        ("http/1.1", &*preface),
        ("http/1.0", &*preface),
    ] {
        let mut wire = world.client().wire("edge-1", &[alpn]).await.unwrap();
        wire.write_all(first).await.unwrap();
        let message = read_to_end(&mut wire).await.unwrap_or_default();
        assert!(!message.starts_with(b"HTTP/1.1 200"), "{alpn}");
        assert!(
            message.is_empty() || message[3] == frames::SETTINGS || message[3] == frames::GOAWAY,
            "{alpn}: {message:?}"
        );
    }
    let mut old = world
        .client()
        .tls_stream("edge-1", &["http/1.0"])
        .await
        .unwrap();
    let answer = exchange(&mut old, "GET / HTTP/1.0\r\nHost: edge-1:9100\r\n\r\n").await;
    assert!(
        answer.starts_with("HTTP/1.0 200 ") || answer.starts_with("HTTP/1.1 200 "),
        "{answer}"
    );
    // Without ALPN the first bytes decide.
    for first in [request.as_bytes(), &*preface] {
        let mut wire = world.client().wire("edge-1", &[]).await.unwrap();
        wire.write_all(first).await.unwrap();
        let message = read(&mut wire, 9).await;
        assert!(
            message.starts_with(b"HTTP/1.1 ") || message[3] == frames::SETTINGS,
            "{message:?}"
        );
    }
}

#[tokio::test]
async fn plain_http_on_a_tls_port_gets_an_explanation() {
    let (world, _site) = site().await;
    let mut tcp = world.client().tcp_stream().await;
    tcp.write_all(b"GET / HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n")
        .await
        .unwrap();
    let answer = String::from_utf8(read_to_end(&mut tcp).await.unwrap()).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{head}");
    assert!(
        head.contains(&format!("Content-Length: {}", body.len())),
        "{head}"
    );
    assert!(body.contains("https://"), "{body}");
}

#[tokio::test]
async fn an_empty_port_is_absent_and_unknown_statuses_have_no_phrase() {
    let mut listener = fixed("app", ListenerProtocol::Http, "edge-1", 9100);
    listener.anonymous = true;
    let world = World::build().listener(listener).start().await;
    let app =
        App::http(|_| Script::new().write("HTTP/1.1 299 Odd\r\nContent-Length: 0\r\n\r\n")).await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let mut wire = world.client_at("app").wire("", &[]).await.unwrap();
    let answer = exchange(&mut wire, "GET / HTTP/1.1\r\nHost: edge-1:\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 299 \r\n"), "{answer}");
}

/// An upstream that answers without reading a body, and closes: this resets its connection.
#[tokio::test]
async fn an_early_answer_of_an_upstream_that_closes_is_passed() {
    let world = World::start().await;
    let answer = "HTTP/1.1 413 Content Too Large\r\nContent-Length: 9\r\n\r\ntoo large";
    let app = App::http(move |_| Script::new().write(answer).close()).await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    hangs_up_on_uploads(&world).await;
    // The same if the gateway itself speaks TLS.
    let (_app, testbed) = Box::pin(TestBed::secured(move |_| {
        Script::new().write(answer).close()
    }))
    .await;
    hangs_up_on_uploads(&testbed).await;
}

async fn hangs_up_on_uploads(world: &World) {
    for client in [world.client(), world.client().http2()] {
        for _ in 0..10 {
            let answer = client
                .ask("POST", "https://edge-1:9100/", vec![b'x'; LARGE])
                .await;
            assert_eq!((answer.status, &*answer.text()), (413, "too large"));
        }
    }
}

/// RFC 3986 section 2: a URI is ASCII. Otherwise policy and upstream could see different paths, depending on which of them
/// encodes the path.
#[tokio::test]
async fn a_target_that_is_not_ascii_is_refused_over_both_versions() {
    let (world, _site) = site().await;
    for path in ["/\u{e4}", "/a?q=\u{e4}"] {
        let head = format!("GET {path} HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n");
        let answer = world.client().raw("edge-1", head).await;
        assert_problem(&answer, 400, "malformed", "not ASCII");
        let mut wire = world.client().wire("edge-1", &["h2"]).await.unwrap();
        let list = frames::fields(&[
            (":method", "GET"),
            (":scheme", "https"),
            (":path", path),
            (":authority", "edge-1:9100"),
        ]);
        let head = frames::frame(HEADERS, END_HEADERS | END_STREAM, 1, &list);
        let begin = [PREFACE, &frames::settings(&[]), &head].concat();
        frames::send(&mut *wire, &begin).await.unwrap();
        let status = loop {
            let frame = frames::next(&mut *wire).await.unwrap();
            if frame.kind == HEADERS {
                break frame.status();
            }
        };
        assert_eq!(status, 400, "{path}");
    }
    let head = "GET /%C3%A4 HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
    assert_eq!(world.client().raw("edge-1", head).await.status, 200);
}

/// Bytes after an early answer still belong to the body, and bytes before an answer may end within a head: the gateway's
/// own parser of request lines touches neither.
#[tokio::test]
async fn only_request_lines_are_read_as_such() {
    let world = World::start().await;
    let gate = PauseGate::new();
    let opened = gate.clone();
    let app = App::http(move |head| match head.path().as_str() {
        "/early" => Script::new()
            .write("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            .body(),
        "/held" => Script::new()
            .until(&opened)
            .write("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        _ => answer::ok(&head.value("X-A").unwrap_or_default()),
    })
    .await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let long = format!("GET /?{} HTTP/1.2\r\n\r\n", "x".repeat(100_000));
    for body in ["GET / HTTP/1.2\r\n\r\n", &long] {
        let mut wire = world
            .client()
            .tls_stream("edge-1", &["http/1.1"])
            .await
            .unwrap();
        let length = body.len();
        let head = format!(
            "POST /early HTTP/1.1\r\nHost: edge-1:9100\r\nContent-Length: {length}\r\n\r\n"
        );
        let head = exchange(&mut wire, head).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        wire.write_all(body.as_bytes()).await.unwrap();
        assert!(app.body().await == body.as_bytes(), "{length}");
    }
    let mut wire = world
        .client()
        .tls_stream("edge-1", &["http/1.1"])
        .await
        .unwrap();
    let first = "GET /held HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
    let begun = "GET / HTTP/1.1\r\nHost: edge-1:9100\r\nX-A: ";
    wire.write_all(first.as_bytes()).await.unwrap();
    until("the upstream gets a request", async || app.requests() == 3).await;
    wire.write_all(begun.as_bytes()).await.unwrap();
    gate.open();
    let head = read_head(&mut wire).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let value = "GET /b HTTP/1.2";
    let head = exchange(&mut wire, format!("{value}\r\n\r\n")).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert_eq!(read(&mut wire, value.len()).await, value.as_bytes());
}
