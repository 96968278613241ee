//! Clients that send no requests: how long their connections stay open, and for what reasons.

use crate::{
    testbed::{TestBed, URL},
    world::{
        app::{App, PauseGate, Script, answer},
        client::{Wire, exchange, read, read_to_end, whole},
        frames::{
            ACK, CONTINUATION, END_HEADERS, END_STREAM, Frame, GOAWAY, HEADERS, PING, PREFACE,
            fields, frame, next, send, settings,
        },
    },
};
use causeway_edge::config::Protocol;
use http_body_util::BodyExt;
use hyper::Request;
use std::time::Duration;
use tokio::{io::AsyncReadExt, time::timeout};

const LONG: Duration = Duration::from_secs(20);

async fn testbed(gate: &PauseGate) -> (App, TestBed) {
    Box::pin(testbed_with(gate, 3, 1)).await
}

/// An app that answers `/held` when the gate opens, `/early` before it has read the request's body, and all other
/// paths at once. The times for a head and of an idle connection are in seconds.
async fn testbed_with(gate: &PauseGate, header: u64, idle: u64) -> (App, TestBed) {
    let gate = gate.clone();
    let app = App::http(move |head| match head.path().as_str() {
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
    let ended = timeout(LONG, reading).await;
    assert!(ended.is_ok(), "still open after {LONG:?}: {frames:?}");
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

/// Waits for longer than a connection may be idle: as long as several ones take that end one after the other.
async fn outlive_idle_connections(testbed: &TestBed, count: usize) {
    for _ in 0..count {
        let mut wire = http1_wire(testbed).await;
        answered(&mut wire, HTTP1_GET).await;
        assert_eq!(
            read_to_end(&mut wire).await.unwrap(),
            b"",
            "it ends in order"
        );
    }
}

#[tokio::test]
async fn an_http1_client_without_a_request_is_sent_away_in_order() {
    let (_app, testbed) = testbed(&PauseGate::new()).await;
    outlive_idle_connections(&testbed, 1).await;
    testbed.until_idle().await;
}

#[tokio::test]
async fn an_http1_client_with_an_unfinished_answer_or_upload_is_kept() {
    let gate = PauseGate::new();
    let (_app, testbed) = Box::pin(testbed_with(&gate, 1, 1)).await;
    let (mut waits, mut sends) = (http1_wire(&testbed).await, http1_wire(&testbed).await);
    send(
        &mut *waits,
        HTTP1_GET.replace("GET /", "GET /held").as_bytes(),
    )
    .await
    .unwrap();
    let upload = "POST /early HTTP/1.1\r\nHost: edge-1:9100\r\nContent-Length: 8\r\n\r\nfour";
    answered(&mut sends, upload).await;
    // An idle client gets another second to close its connection.
    outlive_idle_connections(&testbed, 4).await;
    gate.open();
    gate.open();
    let response = exchange(&mut *waits, "").await;
    assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
    let body = b"4\r\nheld\r\n0\r\n\r\n";
    assert_eq!(read(&mut waits, body.len()).await, body);
    let next = format!("more{HTTP1_GET}");
    answered(&mut sends, &next).await;
}

#[tokio::test]
async fn a_slow_http1_head_ends_its_connection_at_the_first_and_a_later_request() {
    let (_app, testbed) = Box::pin(testbed_with(&PauseGate::new(), 1, 3600)).await;
    for (seen, requests) in (0..).zip([0, 2]) {
        let mut wire = http1_wire(&testbed).await;
        for _ in 0..requests {
            answered(&mut wire, HTTP1_GET).await;
        }
        assert_eq!(slow_heads(&testbed).await, seen);
        send(&mut *wire, b"GET / HTTP/1.1\r\nHost: ").await.unwrap();
        let ended = timeout(LONG, wire.read_u8()).await;
        ended.expect("it ends").expect_err("no response");
        assert_eq!(slow_heads(&testbed).await, seen + 1);
    }
    testbed.until_idle().await;
}
