//! HTTP/2 clients that send no requests: how long their connections stay open, and for what reasons.

use crate::{
    testbed::{TestBed, URL},
    world::{
        app::{App, PauseGate, answer},
        client::{Wire, whole},
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
use tokio::time::timeout;

const LONG: Duration = Duration::from_secs(20);

/// An app that answers `/held` when the gate opens, and all other paths at once.
async fn testbed(gate: &PauseGate) -> (App, TestBed) {
    let gate = gate.clone();
    let app = App::http(move |head| match head.path().as_str() {
        "/held" => answer::parts("text/plain", &["held"], &gate),
        _ => answer::ok("well"),
    })
    .await;
    let build = TestBed::build().config(|config| {
        config.timeouts.header = Duration::from_secs(3);
        config.timeouts.idle_keepalive = Duration::from_secs(1);
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

/// Reads to the connection's end, and acknowledges each PING if it `answers`. Returns all received bytes.
async fn read_to_end(wire: &mut dyn Wire, answers: bool) -> Vec<Frame> {
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
        let frames = read_to_end(&mut *wire, answers).await;
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
        read_to_end(&mut *asked(&testbed, "/").await, true).await;
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
    read_to_end(&mut *wire, false).await;
    let slow = [("limit", "slow_head")];
    assert_eq!(
        testbed.metrics().await.sum("limits_reached_total", &slow),
        1
    );
    testbed.until_idle().await;
}
