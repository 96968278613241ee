//! Clients that send no requests: how long their connections stay open, and for what reasons.

use crate::{
    testbed::{TestBed, URL},
    world::{
        PATIENCE,
        app::{
            App, PauseGate, Script,
            answer::{self, pattern},
        },
        client::{Wire, exchange, read, read_to_end, whole},
        frames::{
            ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, Frame, GOAWAY, HEADERS, PING,
            PREFACE, WINDOW_UPDATE, fields, frame, next, send, settings,
        },
    },
};
use causeway_edge::config::Protocol;
use http_body_util::BodyExt;
use hyper::Request;
use std::time::Duration;
use tokio::{io::AsyncReadExt, time::timeout};

/// Setting of HTTP/2 (RFC 9113, section 6.5.2).
const INITIAL_WINDOW_SIZE: u16 = 4;

async fn testbed(gate: &PauseGate) -> (App, TestBed) {
    Box::pin(testbed_with(gate, 3, 1)).await
}

/// An app that answers `/held` when the gate opens, `/early` before it has read the request's body, `/large` with as many
/// KiB as its query says, and all other paths at once. The times for a head and of an idle connection are in seconds.
async fn testbed_with(gate: &PauseGate, header: u64, idle: u64) -> (App, TestBed) {
    let gate = gate.clone();
    let app = App::http(move |head| match head.path().as_str() {
        path if path.starts_with("/large?") => answer::bytes(&large_body(&path[7..])),
        "/held" => answer::parts("text/plain", &["held"], &gate),
        "/early" => Script::new()
            .write("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nwell")
            .body(),
        _ => answer::ok("well"),
    })
    .await;
    let build = TestBed::build().config(|config| {
        config.timeouts.header = Duration::from_secs(header);
        config.timeouts.idle_keepalive = Duration::from_secs(idle);
    });
    let testbed = TestBed::along(build, Protocol::Http, app.address()).await;
    (app, testbed)
}

fn get(path: &str) -> Vec<u8> {
    fields(&[
        (":method", "GET"),
        (":scheme", "https"),
        (":authority", "edge-1:9100"),
        (":path", path),
    ])
}

/// Opens a connection and requests this path on it.
async fn asked(testbed: &TestBed, path: &str) -> Box<dyn Wire> {
    let mut wire = testbed.http2().wire("edge-1", &["h2"]).await.unwrap();
    let asks = frame(HEADERS, END_HEADERS | END_STREAM, 1, &get(path));
    let all = [PREFACE, &settings(&[]), &asks].concat();
    send(&mut *wire, &all).await.unwrap();
    wire
}

/// Reads to the connection's end, and acknowledges each PING if it `answers`. Returns all received frames.
async fn read_frames(wire: &mut dyn Wire, answers: bool) -> Vec<Frame> {
    let mut frames = Vec::new();
    let reading = async {
        while let Ok(frame_) = next(wire).await {
            if answers && frame_.kind == PING && frame_.flags & ACK == 0 {
                // A read of an ended connection shows the end.
                let _ = send(wire, &frame(PING, ACK, 0, &frame_.payload)).await;
            }
            frames.push(frame_);
        }
    };
    let ended = timeout(PATIENCE, reading).await;
    assert!(ended.is_ok(), "still open after {PATIENCE:?}: {frames:?}");
    frames
}

#[tokio::test]
async fn an_http2_client_without_a_request_is_sent_away_in_order() {
    let (_app, testbed) = Box::pin(testbed(&PauseGate::new())).await;
    for answers in [true, false] {
        let mut wire = asked(&testbed, "/").await;
        let frames = read_frames(&mut *wire, answers).await;
        assert!(frames.iter().any(Frame::ends), "{frames:?}");
        let last = frames.iter().rfind(|frame| frame.kind == GOAWAY);
        let code = last.and_then(|frame| frame.payload.get(4..8));
        assert_eq!(code, Some(&[0; 4][..]), "{frames:?}");
    }
}

#[tokio::test]
async fn an_http2_client_with_an_unfinished_answer_is_kept() {
    let gate = PauseGate::new();
    let (_app, testbed) = Box::pin(testbed(&gate)).await;
    let mut kept = testbed.http2().connect("edge-1").await.unwrap();
    let request = Request::get(format!("{URL}held")).body(whole("")).unwrap();
    let answer = kept.open(request).await.unwrap();
    // Two later connections are gone before this one sends its next request.
    for _ in 0..2 {
        read_frames(&mut *asked(&testbed, "/").await, true).await;
    }
    assert_eq!(kept.get(URL).await.unwrap().text(), "well");
    gate.open();
    gate.open();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "held");
}

#[tokio::test]
async fn an_http2_head_that_does_not_end_ends_its_connection() {
    let (_app, testbed) = Box::pin(testbed(&PauseGate::new())).await;
    let mut wire = asked(&testbed, "/held").await;
    while next(&mut *wire).await.unwrap().kind != HEADERS {}
    let (first, rest) = (get("/"), fields(&[("x-trickles", "x")]));
    let mut all = frame(HEADERS, END_STREAM, 3, &first);
    all.extend(frame(CONTINUATION, 0, 3, &rest));
    send(&mut *wire, &all).await.unwrap();
    read_frames(&mut *wire, false).await;
    assert_eq!(slow_heads(&testbed).await, 1);
    testbed.until_idle().await;
}

/// Returns the number of connections that ended because a head was too slow.
async fn slow_heads(testbed: &TestBed) -> u64 {
    let slow = [("limit", "slow_head")];
    testbed.metrics().await.sum("limits_reached_total", &slow)
}

/// Opens an HTTP/1.1 connection.
async fn http1_wire(testbed: &TestBed) -> Box<dyn Wire> {
    let client = testbed.client();
    client.wire("edge-1", &["http/1.1"]).await.unwrap()
}

const HTTP1_GET: &str = "GET / HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";

/// Sends the head of a request, and reads the response with the body `well`.
async fn answered(wire: &mut Box<dyn Wire>, head: &str) {
    let response = exchange(&mut **wire, head).await;
    assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
    assert_eq!(read(wire, 4).await, b"well");
}

/// Waits until a later connection has ended: at least for the time of an idle connection.
async fn outlive_idle_connection(testbed: &TestBed) {
    let mut wire = http1_wire(testbed).await;
    // A pause of the machine can make this head too slow, which takes even longer. The connection is only a clock here.
    let _ = send(&mut *wire, HTTP1_GET.as_bytes()).await;
    let _ = read_to_end(&mut wire).await;
}

/// Number of connections that outlive, one after the other, an idle connection whose client does not close it: its idle time
/// of one second, and three more seconds to close it.
const OUTLIVING: usize = 6;

#[tokio::test]
async fn an_http1_client_without_a_request_is_sent_away_in_order() {
    let (_app, testbed) = testbed(&PauseGate::new()).await;
    let mut wire = http1_wire(&testbed).await;
    answered(&mut wire, HTTP1_GET).await;
    let rest = read_to_end(&mut wire).await.unwrap();
    assert_eq!(rest, b"", "it ends in order");
    testbed.until_idle().await;
}

#[tokio::test]
async fn an_http1_client_with_an_unfinished_answer_is_kept() {
    let gate = PauseGate::new();
    let (_app, testbed) = Box::pin(testbed(&gate)).await;
    let mut wire = http1_wire(&testbed).await;
    let head = HTTP1_GET.replace("GET /", "GET /held");
    send(&mut *wire, head.as_bytes()).await.unwrap();
    for _ in 0..OUTLIVING {
        outlive_idle_connection(&testbed).await;
    }
    gate.open();
    gate.open();
    let response = exchange(&mut *wire, "").await;
    assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
    let body = b"4\r\nheld\r\n0\r\n\r\n";
    assert_eq!(read(&mut wire, body.len()).await, body);
    answered(&mut wire, HTTP1_GET).await;
}

#[tokio::test]
async fn an_http1_upload_that_continues_after_the_answer_is_kept() {
    let (_app, testbed) = Box::pin(testbed(&PauseGate::new())).await;
    // The bytes of one client arrive until the end, and those of the other only then.
    let (mut steady, mut paused) = (http1_wire(&testbed).await, http1_wire(&testbed).await);
    let length = 4 + OUTLIVING + 1;
    let upload = format!(
        "POST /early HTTP/1.1\r\nHost: edge-1:9100\r\nContent-Length: {length}\r\n\r\nfour"
    );
    answered(&mut steady, &upload).await;
    answered(&mut paused, &upload).await;
    for _ in 0..OUTLIVING {
        send(&mut *steady, b"x").await.unwrap();
        outlive_idle_connection(&testbed).await;
    }
    answered(&mut steady, &format!("x{HTTP1_GET}")).await;
    let rest = "x".repeat(OUTLIVING + 1);
    answered(&mut paused, &format!("{rest}{HTTP1_GET}")).await;
}

#[tokio::test]
async fn a_slow_http1_head_ends_its_connection() {
    let (_app, testbed) = Box::pin(testbed_with(&PauseGate::new(), 3, 3600)).await;
    // The first request of a connection, and a later one.
    for (seen, requests) in (0..).zip([0, 2]) {
        assert_eq!(slow_heads(&testbed).await, seen);
        let mut wire = http1_wire(&testbed).await;
        for _ in 0..requests {
            answered(&mut wire, HTTP1_GET).await;
        }
        send(&mut *wire, b"GET / HTTP/1.1\r\nHost: ").await.unwrap();
        let ended = timeout(PATIENCE, wire.read_u8()).await;
        ended.expect("it ends").expect_err("no response");
        assert_eq!(slow_heads(&testbed).await, seen + 1);
    }
    testbed.until_idle().await;
}

/// Returns the body of a `/large` answer of this many KiB.
fn large_body(kib: &str) -> Vec<u8> {
    pattern(kib.parse::<usize>().unwrap() << 10)
}

/// Sizes of answers in KiB, from those that the system buffers to those of which hyper cannot buffer the rest. hyper buffers
/// more than one step, so the rest of at least one answer is in its buffer.
fn large_sizes() -> impl Iterator<Item = usize> {
    (1..=16).map(|step| 64 * step)
}

/// Requests an answer of each size, through TLS and without, and reads nothing.
async fn request_large(testbed: &TestBed, is_http2: bool) -> Vec<(usize, Box<dyn Wire>)> {
    let alpn = [if is_http2 { "h2" } else { "http/1.1" }];
    let mut wires = Vec::new();
    for kib in large_sizes() {
        let path = format!("/large?{kib}");
        let request = if is_http2 {
            // The windows of stream and connection are larger than any of the answers.
            let window = 64_u32 << 20;
            let values = settings(&[(INITIAL_WINDOW_SIZE, window)]);
            let more = frame(WINDOW_UPDATE, 0, 0, &window.to_be_bytes());
            let head = frame(HEADERS, END_HEADERS | END_STREAM, 1, &get(&path));
            [PREFACE, &values, &more, &head].concat()
        } else {
            HTTP1_GET.replace("GET /", &format!("GET {path}")).into()
        };
        let plain: Box<dyn Wire> = Box::new(testbed.tcp("plain").await);
        let tls = testbed.client().wire("edge-1", &alpn).await.unwrap();
        for mut wire in [plain, tls] {
            send(&mut *wire, &request).await.unwrap();
            wires.push((kib, wire));
        }
    }
    wires
}

/// Reads the body of the HTTP/2 answer with stream 1.
async fn read_http2_body(wire: &mut dyn Wire) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let frame = timeout(PATIENCE, next(wire)).await;
        let frame = frame.expect("a frame").unwrap();
        if frame.kind == DATA {
            body.extend_from_slice(&frame.payload);
        }
        if frame.ends() {
            return body;
        }
    }
}

/// Reads nothing for longer than a connection may be idle, then the whole answers.
async fn pause_large(is_http2: bool) {
    let (_app, testbed) = Box::pin(testbed(&PauseGate::new())).await;
    let wires = request_large(&testbed, is_http2).await;
    for _ in 0..OUTLIVING {
        outlive_idle_connection(&testbed).await;
    }
    for (kib, mut wire) in wires {
        let body = if is_http2 {
            read_http2_body(&mut *wire).await
        } else {
            let head = exchange(&mut *wire, "").await;
            assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
            read(&mut wire, kib << 10).await
        };
        assert!(body == large_body(&kib.to_string()), "{kib} KiB differ");
    }
}

#[tokio::test]
async fn an_http1_client_that_pauses_gets_the_whole_answer() {
    Box::pin(pause_large(false)).await;
}

#[tokio::test]
async fn an_http2_client_that_pauses_gets_the_whole_answer() {
    Box::pin(pause_large(true)).await;
}
