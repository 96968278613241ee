//! Automatic renewal of certificates: no connection is dropped and no request refused while certificates are replaced.
//!
//! With `CAUSEWAY_TEST_FULL=1` it continues for two minutes.

use crate::{
    testbed::{TestBed, URL},
    world::{
        World,
        app::{App, Script, answer, answer::pattern},
        client::{Client, ListenerAddress, exchange, read, whole},
        gateway::listener,
        process::{GatewayProcess, causeway},
        tool::{full, need},
        until,
    },
};
use causeway_certs::{Ca, Certificate, LeafCertificate, Store};
use causeway_edge::config::Protocol;
use causeway_gateway::config::{self, ClientAuth, Listener, ListenerProtocol};
use http_body_util::BodyExt;
use hyper::Request;
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    io::AsyncWriteExt,
    time::{Instant, sleep},
};

/// Lifetime of an edge's certificate. A third of it is left when the renewal begins, more than a machine stops for.
const SHORT: Duration = Duration::from_secs(40);
/// Pause between two requests, and between two messages of a session. Time is the subject of these tests: traffic goes on while
/// certificates are renewed and roots are replaced.
pub(crate) const PACE: Duration = Duration::from_millis(100);
const EXEC: &str =
    "GET /exec HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
/// Size in bytes of a part that the upstream sends at once, and number of parts in a second: the download lasts about as long
/// as the test.
const PIECE: usize = 512;
const PIECES: u64 = 450;

pub(crate) fn span() -> Duration {
    Duration::from_secs(if full() { 120 } else { 30 })
}

fn pieces(span: Duration) -> usize {
    usize::try_from(span.as_secs() * PIECES).unwrap()
}

/// An app with short answers, a long answer and sessions.
pub(crate) async fn app(span: Duration) -> App {
    let times = pieces(span);
    let app = App::http(move |head| match head.path().as_str() {
        "/exec" => answer::switch("websocket", b""),
        "/unending" => Script::new()
            .body()
            .write("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            .paced(chunk(), usize::MAX),
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

/// A chunk of a body without a length.
fn chunk() -> Vec<u8> {
    let head = format!("{PIECE:x}\r\n").into_bytes();
    [head, pattern(PIECE), b"\r\n".to_vec()].concat()
}

/// A session that answers for as long as `goes_on` returns true.
async fn session(client: &Client, goes_on: impl Fn() -> bool) {
    let mut wire = client.tls_stream("edge-1", &["http/1.1"]).await.unwrap();
    let head = exchange(&mut wire, EXEC).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    while goes_on() {
        wire.write_all(b"message").await.unwrap();
        assert_eq!(read(&mut wire, 7).await, b"message");
        // Time is the subject.
        sleep(PACE).await;
    }
}

/// A whole download that takes as long as the app needs.
async fn download(client: &Client, span: Duration) {
    let mut connection = client.connect("edge-1").await.unwrap();
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

/// A download that ends only by a reset.
async fn cut_download(client: &Client) {
    let mut connection = client.connect("edge-1").await.unwrap();
    let request = Request::get(format!("{URL}unending"));
    let request = request.body(whole("")).unwrap();
    let body = connection.open(request).await.unwrap().into_body();
    assert!(body.collect().await.is_err(), "it came to its end");
}

/// Sends requests without pauses, on one kept connection and on new ones, until `ends`. A slow machine gets more time for at
/// least 100 of them.
///
/// A client with another certificate needs another connection: a connection that was authenticated under a removed root
/// accepts no new request.
async fn requests(client: impl Fn() -> (usize, Client), ends: Instant) {
    let (mut certificate, first) = client();
    let mut kept = first.connect("edge-1").await.unwrap();
    let mut count = 0;
    while Instant::now() < ends || count < 100 {
        let (now, client) = client();
        if now != certificate {
            certificate = now;
            kept = client.connect("edge-1").await.unwrap();
        }
        for answer in [kept.get(URL).await.unwrap(), client.get(URL).await] {
            assert_eq!((answer.status, answer.text().as_str()), (200, "it"));
            count += 1;
        }
        // Time is the subject: the pace of the requests.
        sleep(PACE).await;
    }
}

/// Runs all of these clients during `meanwhile`: no connection is dropped and no request refused.
pub(crate) async fn nothing_is_lost(
    client: &Client,
    (span, ends): (Duration, Instant),
    meanwhile: impl Future<Output = ()>,
) {
    tokio::join!(
        requests(|| (0, client.clone()), ends),
        session(client, || Instant::now() < ends),
        download(client, span),
        meanwhile
    );
}

async fn tunnels(testbed: &TestBed) -> Vec<Value> {
    let node = testbed.node("edge-1").await;
    node["details"].as_array().cloned().unwrap_or_default()
}

#[tokio::test]
async fn short_lived_certificates_renew_without_dropped_requests() {
    let span = span();
    let app = app(span).await;
    let build = TestBed::build().config(|config| config.tunnel.edge_certificate_lifetime = SHORT);
    let testbed = TestBed::along(build, Protocol::Http, app.address()).await;
    let (ends, mut serials) = (Instant::now() + span, BTreeSet::new());
    let mut count_serials = async || {
        for tunnel in tunnels(&testbed).await {
            serials.insert(tunnel["certificate"].as_str().unwrap().to_owned());
        }
        serials.len()
    };
    let renewals = async {
        while Instant::now() < ends {
            count_serials().await;
            // Time is the subject: tunnels are read at intervals much shorter than a certificate's life.
            sleep(PACE).await;
        }
        // The first renewal starts at once, because a certificate begins an hour before it is issued.
        until("the certificate is renewed repeatedly", async || {
            count_serials().await > 2
        })
        .await;
    };
    let client = testbed.client();
    Box::pin(nothing_is_lost(&client, (span, ends), renewals)).await;
    let status = testbed.edge.status();
    assert!(status.certificate.unwrap().trouble.is_none());
    testbed.until_idle().await;
    until("the replaced tunnel has ended", async || {
        tunnels(&testbed).await.len() == 1
    })
    .await;
}

/// Runs `ca rotate`. Returns its output, and whether it succeeded.
async fn rotate(site: &GatewayProcess, step: &str) -> (bool, String) {
    let order = causeway("ca rotate").args(step.split_whitespace());
    let done = order.flag("--data-dir", site.data()).run().await;
    let text = format!("{}{}", done.stdout, done.stderr);
    (done.code == Some(0), text)
}

/// The client alice with a certificate from the current signing root. She trusts only that root.
async fn alice(site: &GatewayProcess) -> Client {
    let made = causeway("client certificate --name alice").flag("--out", site.path("."));
    made.flag("--data-dir", site.data()).run().await.ok();
    let text = |name: &str| fs::read_to_string(site.path(name)).unwrap();
    let leaf = LeafCertificate::load(&text("alice.pem"), &text("alice-key.pem")).unwrap();
    // The signing root comes first.
    let place = ListenerAddress::Tls(site.listener.parse().unwrap());
    site.nobody_at(place).certificate(&leaf)
}

fn roots(data: &Path) -> usize {
    let store = Store::open(data, causeway_certs::OpenMode::Existing);
    store.unwrap().edge().unwrap().unwrap().roots.len()
}

/// Runs all three steps, also in the wrong order, with clients during the steps: `current` uses the old root until shortly
/// before its end. `is_old_unused` returns true once no request and no session is open with the old certificate.
async fn whole_rotation(
    site: &GatewayProcess,
    (app, token): (&App, &str),
    current: &Mutex<(usize, Client)>,
    is_old_unused: impl Fn() -> bool,
) {
    assert!(!rotate(site, "activate").await.0, "nothing is prepared");
    for _ in 0..2 {
        let (done, message) = rotate(site, "prepare").await;
        assert!(done && message.contains("prepared"), "{message}");
    }
    let (done, message) = rotate(site, "retire").await;
    assert!(!done && message.contains("rotate activate"), "{message}");
    until("the edge trusts both roots", async || {
        roots(&site.edge_data("edge-1")) == 2
    })
    .await;
    until("all connected edges trust both roots", async || {
        rotate(site, "activate").await.0
    })
    .await;
    assert!(rotate(site, "activate").await.0, "it may be repeated");
    // Peers that know only the old root: a token from before, and clients.
    let joining = site.edge("edge-2", app.port()).flag("--join", token);
    let mut joining = joining.start();
    joining.wait_for_line("tunnel registered").await;
    assert_eq!(roots(&site.edge_data("edge-2")), 2);
    let told = site
        .curl("edge-1", "")
        .args(["--cacert".into(), site.path("old.pem")]);
    assert_eq!(told.run().await.ok().text(), "it");
    let (done, message) = rotate(site, "retire").await;
    assert!(!done && message.contains("edge-3"), "{message}");
    let shown = causeway("status").flag("--data-dir", site.data()).run();
    assert!(shown.await.ok().stdout.contains("a new root signs"));
    until("only edge-3 prevents it", async || {
        let (done, message) = rotate(site, "retire").await;
        !done && message.contains("1 enrolled edges") && message.contains("edge-3")
    })
    .await;
    let new = alice(site).await;
    *current.lock().unwrap() = (1, new);
    until(
        "nothing is in flight with the old certificate",
        async || is_old_unused(),
    )
    .await;
    let (done, message) = rotate(site, "retire --force").await;
    assert!(done && message.contains("no longer trusted"), "{message}");
    until("the old root is gone", async || {
        roots(&site.edge_data("edge-1")) == 1
    })
    .await;
    let mut gone = site.edge("edge-3", app.port()).start();
    gone.wait_for_line("cannot open a tunnel").await;
    joining.stop().await.ok();
}

#[tokio::test]
async fn a_complete_root_rotation_drops_and_refuses_no_request() {
    need!("curl");
    let span = span();
    let app = app(span).await;
    // One connection is idle during the whole test.
    let site = GatewayProcess::with("timeouts: { idle_keepalive: 1h }").await;
    for (now, old) in [
        (site.data().join("ca.pem"), "old.pem"),
        (site.path("alice.pem"), "was.pem"),
        (site.path("alice-key.pem"), "was-key.pem"),
    ] {
        fs::copy(now, site.path(old)).unwrap();
    }
    let mut edge = site.join("edge-1", app.port()).await;
    let token = site.token("--node edge-2").await;
    site.join("edge-3", app.port()).await.kill().await;
    let current = Mutex::new((0, alice(&site).await));
    let (requests_moved, session_ended) = (AtomicBool::new(false), AtomicBool::new(false));
    // `requests` asks for the next client when all earlier requests have been answered.
    let client = || {
        let client = current.lock().unwrap().clone();
        requests_moved.store(client.0 == 1, Relaxed);
        client
    };
    let (ends, (_, first)) = (Instant::now() + span, client());
    let mut kept = first.connect("edge-1").await.unwrap();
    assert_eq!(kept.get(URL).await.unwrap().status, 200);
    let retired = || current.lock().unwrap().0 == 1;
    tokio::join!(
        async {
            requests(client, ends).await;
            requests_moved.store(true, Relaxed);
        },
        async {
            session(&first, || !retired()).await;
            session_ended.store(true, Relaxed);
        },
        async {
            cut_download(&first).await;
            assert!(retired(), "it was cut before its root was retired");
        },
        whole_rotation(&site, (&app, &token), &current, || {
            requests_moved.load(Relaxed) && session_ended.load(Relaxed)
        })
    );
    edge.wait_for_line("certificate is renewed").await;
    assert_eq!(alice(&site).await.get(URL).await.status, 200);
    let late = Request::get(URL).body(whole("")).unwrap();
    assert!(first.try_send(late).await.is_err());
    let refused = kept.get(URL).await.unwrap();
    assert_eq!(refused.status, 401, "also on a kept connection");
    let told = site.curl("edge-1", "").run().await.ok().text();
    assert_eq!(told, "it", "with the roots that clients use");
    let by_the_old = site.curl_as_nobody("edge-1", "");
    let by_the_old = by_the_old
        .args(["--cert".into(), site.path("was.pem")])
        .args(["--key".into(), site.path("was-key.pem")]);
    assert!(!by_the_old.run().await.text().contains("it"));
}

#[tokio::test]
async fn each_certificate_in_use_has_a_metric_and_an_expiry_warning() {
    let build = World::build();
    let other = Ca::create(&"others.test".parse().unwrap()).unwrap();
    let minute = Duration::from_mins(1);
    let file = |name: &str, text: &str| {
        let path = build.folder().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let shown = other.issue_listener(&["it.test".parse().unwrap()], minute);
    let shown = shown.unwrap();
    let client = other.issue_client("causeway", &[], minute).unwrap();
    let ca = file("other.pem", &other.root_pem());
    let listener = Listener {
        certificate: Some(config::Certificate {
            chain: file("shown.pem", &shown.chain_pem()),
            key: file("shown.key", shown.key_pem().expose()),
        }),
        client_auth: ClientAuth {
            client_ca: vec![ca.clone()],
            ..ClientAuth::default()
        },
        ..listener("given", ListenerProtocol::Https)
    };
    let app = config::UpstreamTls {
        ca: Some(ca),
        certificate: Some(file("client.pem", &client.chain_pem())),
        key: Some(file("client.key", client.key_pem().expose())),
        ..config::UpstreamTls::default()
    };
    let build = build.listener(listener);
    let build = build.config(|config| drop(config.upstream_tls.insert(10250, app)));
    let world = build.start().await;

    let metrics = world.metrics().await;
    let ends = |used_for: &str| {
        let labels = [("certificate", used_for)];
        metrics.sum("certificate_expiry_timestamp_seconds", &labels)
    };
    let root = Certificate::parse(other.root()).unwrap().not_after;
    for (used_for, expected) in [
        ("listener:given", shown.not_after().as_secs()),
        ("listener_client_ca:given", root),
        ("app:10250", client.not_after().as_secs()),
        ("app_ca:10250", root),
        (
            "ca",
            Certificate::parse(world.ca().root()).unwrap().not_after,
        ),
    ] {
        assert_eq!(ends(used_for), expected, "{used_for}");
    }
    for made in ["tunnel", "listener:https"] {
        assert!(ends(made) > shown.not_after().as_secs(), "{made}");
    }
    until("those that end are named in the log", async || {
        let log = world.log().text();
        let named = |used_for| is_warned_of(&log, used_for);
        named("listener:given") && named("app:10250") && !named("tunnel") && !named("ca")
    })
    .await;
}

fn is_warned_of(log: &str, used_for: &str) -> bool {
    let message = format!("\"used_for\":\"{used_for}\"");
    let mut lines = log.lines().filter(|line| line.contains(&message));
    lines.any(|line| line.contains("expires soon") || line.contains("has expired"))
}
