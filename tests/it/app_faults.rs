//! Faults and oddities of an upstream. The client gets the row of the table of errors, with every HTTP version. The tunnel
//! stays up, the next request is served, and nothing is left behind.

use crate::{
    testbed::TestBed,
    world::{
        app::{App, Head, PauseGate, Script, answer, answer::pattern},
        client::{Answer, CallError, Client, assert_problem},
        tool::full,
        until,
    },
};
use futures_util::future::{join, join_all};
use std::time::Duration;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

/// More than a request takes on any machine.
const PATIENCE: Duration = Duration::from_mins(2);

/// Expected response to a client for one path.
enum Expected {
    /// An error of Causeway with this reason.
    Broken,
    /// The app's own answer with this status, which the closure checks.
    Answer(u16, fn(&Answer) -> bool),
    /// An answer that begins and breaks off.
    Reset,
}

struct Fault {
    path: &'static str,
    script: fn() -> Script,
    row: Expected,
}

const fn fault(path: &'static str, script: fn() -> Script, row: Expected) -> Fault {
    Fault { path, script, row }
}

const FAULTS: &[Fault] = &[
    fault("/garbage", answer::garbage, Expected::Broken),
    fault("/closes", answer::close, Expected::Broken),
    fault("/resets", || Script::new().reset(), Expected::Broken),
    fault("/half-a-head", || half_a_head().close(), Expected::Broken),
    fault(
        "/head-and-reset",
        || half_a_head().reset(),
        Expected::Broken,
    ),
    fault(
        "/another-version",
        || answers("HTTP/3.7 200 OK\r\n\r\n"),
        Expected::Broken,
    ),
    fault(
        "/two-lengths",
        || answers("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc"),
        Expected::Broken,
    ),
    fault(
        "/a-coding-of-its-own",
        || answers("HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
        Expected::Broken,
    ),
    fault(
        "/a-switch-nobody-asked-for",
        || answers("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"),
        Expected::Broken,
    ),
    fault("/a-head-without-end", endless_head, Expected::Broken),
    fault("/hints-without-end", endless_hints, Expected::Broken),
    fault(
        "/closes-in-mid-body",
        answer::close_in_mid_body,
        Expected::Reset,
    ),
    fault(
        "/resets-in-mid-body",
        || cut_short().reset(),
        Expected::Reset,
    ),
    fault(
        "/closes-in-mid-chunk",
        || chunked("400\r\ncut short").close(),
        Expected::Reset,
    ),
    fault(
        "/chunks-of-no-size",
        || chunked("5\r\nfirst\r\nno size at all\r\n"),
        Expected::Reset,
    ),
    fault(
        "/before-the-body",
        answer::before_the_body,
        Expected::Answer(413, |answer| answer.text() == "too much"),
    ),
    fault("/hints", || hints(200), Expected::Answer(200, is_hinted)),
    fault(
        "/processing",
        || answers("HTTP/1.1 102 Processing\r\n\r\n").write(hinted()),
        Expected::Answer(200, is_hinted),
    ),
    fault(
        "/chunks-of-1",
        || chunked("").chunks(1, SMALL),
        Expected::Answer(200, |answer| answer.body == pattern(SMALL)),
    ),
    fault(
        "/chunks-of-64",
        || chunked("").chunks(64, SMALL),
        Expected::Answer(200, |answer| answer.body == pattern(SMALL)),
    ),
    fault(
        "/a-head-of-60-kib",
        || large_head(60 << 10, 1),
        Expected::Answer(200, |answer| answer.field("x-large-0").len() == 60 << 10),
    ),
    fault(
        "/60-fields-of-1-kib",
        || large_head(1 << 10, 60),
        Expected::Answer(200, |answer| {
            (0..60).all(|number| answer.field(&format!("x-large-{number}")).len() == 1 << 10)
        }),
    ),
    fault(
        "/a-head-of-a-mib",
        || large_head(1 << 18, 4),
        Expected::Broken,
    ),
];

const SMALL: usize = 1 << 18;
const HEAD: &str = "HTTP/1.1 200 OK\r\n";
const HINT: &str = "HTTP/1.1 103 Early Hints\r\nLink: </style.css>; rel=preload\r\n\r\n";

#[tokio::test]
async fn an_apps_fault_is_its_clients_row_and_the_tunnel_lives_on() {
    let app = App::http(faulty).await;
    holds_of_each(&TestBed::to(&app).await).await;
}

#[tokio::test]
async fn an_upstream_tls_fault_is_recorded_for_its_client() {
    let (app, testbed) = TestBed::secured(faulty).await;
    holds_of_each(&testbed).await;
    drop(app);
}

fn faulty(head: &Head) -> Script {
    let path = head.path();
    let fault = FAULTS.iter().find(|fault| fault.path == path);
    fault.map_or_else(|| answer::ok("well"), |fault| (fault.script)())
}

async fn holds_of_each(testbed: &TestBed) {
    let first = testbed.tunnels().await[0];
    for client in [testbed.client(), testbed.http2()] {
        for fault in FAULTS {
            let path = fault.path;
            let asked = timeout(PATIENCE, ask(&client, path)).await;
            let outcome = asked.unwrap_or_else(|_| panic!("{path}: no end within {PATIENCE:?}"));
            fault.row.holds(path, outcome);
            let after = ask(&client, "/well").await;
            assert_eq!(after.unwrap().text(), "well", "after {path}");
        }
    }
    // A second tunnel for bulk may exist; the first is the one from before.
    assert_eq!(testbed.tunnels().await[0], first);
    testbed.until_idle().await;
}

/// For an app that writes single bytes, not every byte may cost a frame, a TLS record and a write. The bytes before a pause
/// are not held back.
#[tokio::test]
async fn short_chunks_of_an_upstream_are_joined_without_delay() {
    const MANY: usize = 1 << 14;
    let gate = PauseGate::new();
    let waits = gate.clone();
    let (app, testbed) = TestBed::secured(move |_| {
        let end = "1\r\nx\r\n".repeat(MANY) + "0\r\n\r\n";
        chunked("5\r\nfirst\r\n").until(&waits).write(end)
    })
    .await;
    let mut wire = testbed.tcp("plain").await;
    let head = b"GET / HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: close\r\n\r\n";
    wire.write_all(head).await.unwrap();
    let mut answer = Vec::new();
    let came = async {
        while !answer.ends_with(b"\r\n5\r\nfirst\r\n") {
            assert_ne!(wire.read_buf(&mut answer).await.unwrap(), 0);
        }
    };
    timeout(PATIENCE, came).await.expect("the first chunk");
    answer.clear();
    gate.open();
    let rest = timeout(PATIENCE, wire.read_to_end(&mut answer)).await;
    rest.expect("the rest").unwrap();
    let (bytes, chunks) = chunks_of(&answer);
    assert_eq!(bytes, MANY);
    assert!(chunks < MANY / 16, "{chunks} chunks of {MANY}");
    drop(app);
}

/// Returns the bytes in chunks of a whole body, and the number of chunks.
fn chunks_of(mut body: &[u8]) -> (usize, usize) {
    let (mut bytes, mut chunks) = (0, 0);
    loop {
        let end = body.windows(2).position(|two| two == b"\r\n").unwrap();
        let size = std::str::from_utf8(&body[..end]).unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            return (bytes, chunks);
        }
        (bytes, chunks) = (bytes + size, chunks + 1);
        body = body[end + 2 + size..].strip_prefix(b"\r\n").unwrap();
    }
}

/// Checks that only the client of a silent upstream waits for it. The wait ends when the client leaves.
#[tokio::test]
async fn silent_upstreams_delay_only_their_own_clients() {
    let app = App::http(|head| match head.path().as_str() {
        "/silent" => answer::silence(),
        _ => answer::ok("well"),
    })
    .await;
    let testbed = TestBed::to(&app).await;
    let first = testbed.tunnels().await[0];
    let mut waiting = Vec::new();
    for _ in 0..200 {
        let mut wire = testbed.tcp("plain").await;
        let head = b"GET /silent HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
        wire.write_all(head).await.unwrap();
        waiting.push(wire);
    }
    until("all of them wait", async || app.requests() == 200).await;
    for client in [testbed.client(), testbed.http2()] {
        assert_eq!(ask(&client, "/well").await.unwrap().text(), "well");
    }
    drop(waiting);
    testbed.until_idle().await;
    assert_eq!(testbed.tunnels().await[0], first);
}

/// Early hints are frames, and too many frames end a tunnel with the streams of all clients.
#[tokio::test]
async fn floods_of_hints_end_no_tunnel() {
    let gate = PauseGate::new();
    let waits = gate.clone();
    let app = App::http(move |head| match head.path().as_str() {
        "/waits" => Script::new().body().until(&waits).write(hinted()),
        "/hints" => Script::new()
            .body()
            .paced(HINT.repeat(10), 90)
            .write(hinted()),
        _ => answer::ok("well"),
    })
    .await;
    let testbed = TestBed::to(&app).await;
    let first = testbed.tunnels().await[0];
    let client = testbed.http2();
    let waiting = ask(&client, "/waits");
    let hinting = async {
        // 900 hints each.
        for _ in 0..if full() { 32 } else { 14 } {
            for answer in join_all((0..8).map(|_| ask(&client, "/hints"))).await {
                assert!(is_hinted(&answer.unwrap()));
            }
        }
        gate.open();
    };
    let both = timeout(2 * PATIENCE, join(waiting, hinting)).await;
    assert!(is_hinted(&both.expect("both end").0.unwrap()));
    assert_eq!(testbed.tunnels().await[0], first);
}

impl Expected {
    fn holds(&self, path: &str, outcome: Result<Answer, CallError>) {
        match (self, outcome) {
            (Self::Broken, Ok(answer)) => {
                assert_eq!(answer.status, 502, "{path}: {}", answer.text());
                assert_problem(&answer, 502, "target_broken", "edge-1");
            }
            (Self::Answer(status, approves), Ok(answer)) => {
                assert_eq!(answer.status, *status, "{path}");
                assert!(approves(&answer), "{path}: {:?}", answer.fields);
            }
            (Self::Reset, Err(_)) => {}
            (Self::Reset, Ok(answer)) => {
                panic!("{path} ended as if it were whole: {}", answer.status)
            }
            (_, Err(error)) => panic!("{path}: {error:?}"),
        }
    }
}

async fn ask(client: &Client, path: &str) -> Result<Answer, CallError> {
    let request = hyper::Request::post(format!("https://edge-1:9100{path}"));
    let body = crate::world::client::whole("asked");
    client.try_send(request.body(body).unwrap()).await
}

fn answers(bytes: impl Into<Vec<u8>>) -> Script {
    Script::new().body().write(bytes)
}

fn half_a_head() -> Script {
    answers("HTTP/1.1 200 OK\r\nContent-Le")
}

fn cut_short() -> Script {
    answers("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\ncut short")
}

fn chunked(body: &str) -> Script {
    answers(format!("{HEAD}Transfer-Encoding: chunked\r\n\r\n{body}"))
}

fn endless_head() -> Script {
    answers(HEAD).forever("X-More: of the same\r\n".repeat(50))
}

fn endless_hints() -> Script {
    Script::new()
        .body()
        .forever("HTTP/1.1 103 Early Hints\r\n\r\n".repeat(50))
}

fn hints(times: usize) -> Script {
    answers(HINT.repeat(times)).write(hinted())
}

fn hinted() -> &'static str {
    "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhinted"
}

fn is_hinted(answer: &Answer) -> bool {
    answer.text() == "hinted"
}

fn large_head(bytes: usize, fields: usize) -> Script {
    let value = "x".repeat(bytes);
    let fields = (0..fields).map(|number| format!("X-Large-{number}: {value}\r\n"));
    let fields: String = fields.collect();
    answers(format!("{HEAD}Content-Length: 2\r\n{fields}\r\nok"))
}
