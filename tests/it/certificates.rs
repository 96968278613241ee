//! Certificates that look after themselves: nothing is dropped and nothing refused while they are replaced.
//!
//! `CAUSEWAY_TEST_FULL=1` keeps it up for two minutes.

use crate::{
    road::{Road, URL},
    world::{
        app::{App, Script, answer, answer::pattern},
        caller::{exchange, read, whole},
        until,
    },
};
use causeway_edge::config::Scheme;
use http_body_util::BodyExt;
use hyper::Request;
use serde_json::Value;
use std::{collections::BTreeSet, env, time::Duration};
use tokio::{
    io::AsyncWriteExt,
    time::{Instant, sleep},
};

/// Life of an edge's certificate.
const SHORT: Duration = Duration::from_secs(20);
/// Between two requests, and between two messages of a session.
const PACE: Duration = Duration::from_millis(100);
const EXEC: &str =
    "GET /exec HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
/// What the app sends at once of a download, and how many of these go into a second: it lasts about as long as the test.
const PIECE: usize = 512;
const PIECES: u64 = 450;

fn span() -> Duration {
    let full = env::var_os("CAUSEWAY_TEST_FULL").is_some_and(|value| value == "1");
    Duration::from_secs(if full { 120 } else { 30 })
}

fn pieces(span: Duration) -> usize {
    usize::try_from(span.as_secs() * PIECES).unwrap()
}

/// An app with something short, something long and a session.
async fn app(span: Duration) -> App {
    let times = pieces(span);
    let app = App::http(move |head| match head.path().as_str() {
        "/exec" => answer::switch("websocket", b""),
        "/slow" => {
            let length = PIECE * times;
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
            Script::new()
                .body()
                .write(head)
                .paced(pattern(PIECE), times)
        }
        _ => answer::ok("it"),
    });
    let app = app.await;
    app.forget().await;
    app
}

/// A session that answers for as long as `ends` lasts.
async fn session(road: &Road, ends: Instant) {
    let mut wire = road.tls().await;
    let head = exchange(&mut wire, EXEC).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    while Instant::now() < ends {
        wire.write_all(b"message").await.unwrap();
        assert_eq!(read(&mut wire, 7).await, b"message");
        // Time is the subject.
        sleep(PACE).await;
    }
}

/// A download that takes as long as the app says, whole.
async fn download(road: &Road, span: Duration) {
    let mut connection = road.caller().connect("edge-1").await.unwrap();
    let request = Request::get(format!("{URL}slow")).body(whole("")).unwrap();
    let mut body = connection.open(request).await.unwrap().into_body();
    let (piece, mut at) = (pattern(PIECE), 0);
    while let Some(frame) = body.frame().await {
        for byte in frame.unwrap().into_data().unwrap() {
            assert_eq!(byte, piece[at % PIECE], "at {at}");
            at += 1;
        }
    }
    assert_eq!(at, PIECE * pieces(span));
}

/// Requests without a break, on a connection that is kept and on new ones. How many.
async fn requests(road: &Road, ends: Instant) -> usize {
    let mut kept = road.caller().connect("edge-1").await.unwrap();
    let mut count = 0;
    while Instant::now() < ends {
        for answer in [kept.get(URL).await.unwrap(), road.caller().get(URL).await] {
            assert_eq!((answer.status, answer.text().as_str()), (200, "it"));
            count += 1;
        }
        sleep(PACE).await;
    }
    count
}

async fn tunnels(road: &Road) -> Vec<Value> {
    let node = road.node("edge-1").await;
    node["details"].as_array().cloned().unwrap_or_default()
}

#[tokio::test]
async fn certificates_of_twenty_seconds_are_renewed_and_nothing_is_dropped_or_refused() {
    let span = span();
    let app = app(span).await;
    let build = Road::build().config(|config| config.tunnel.edge_certificate_lifetime = SHORT);
    let road = Road::along(build, Scheme::Http, app.address()).await;
    let (ends, mut serials) = (Instant::now() + span, BTreeSet::new());
    let renewals = async {
        while Instant::now() < ends {
            for tunnel in tunnels(&road).await {
                serials.insert(tunnel["certificate"].as_str().unwrap().to_owned());
            }
            sleep(PACE).await;
        }
    };
    let (requests, (), (), ()) = tokio::join!(
        requests(&road, ends),
        session(&road, ends),
        download(&road, span),
        renewals
    );
    assert!(requests > 100, "{requests}");
    // The first of them comes at once, since a certificate begins an hour before it is issued.
    assert!(serials.len() > 2, "{serials:?}");
    let status = road.edge.status();
    assert!(status.certificate.unwrap().trouble.is_none());
    road.until_idle().await;
    until("what was taken over from has gone", async || {
        tunnels(&road).await.len() == 1
    })
    .await;
}
