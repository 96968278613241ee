//! Tests of the data path over a tunnel in memory, to upstreams on real sockets.

mod hostile;
mod shared;

use super::*;
use crate::config::{Config, Timeouts};
use bytes::Bytes;
use causeway_certs::{
    Ca, ListenerName, TrustDomain, TrustStore,
    verify::{CertificateRequirement, listener_server},
};
use causeway_rt::socket::{CountedIo, ResetOnClose};
use causeway_tunnel::{
    StreamError, StreamKind, StreamSender, Tunnel,
    control_stream::AnnouncedPorts,
    edge_side::{self, IncomingStream},
    gateway_side, wire,
};
use futures_util::FutureExt;
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body::Frame;
use http_body_util::StreamBody;
use serde_json::{Value, json};
use std::{convert::Infallible, future::poll_fn, sync::Mutex, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    time::{sleep, timeout},
};

const SOON: Duration = Duration::from_mins(2);

/// Gateway side of a tunnel, and an edge that serves the edge side.
struct World {
    tunnel: Tunnel,
    way: Arc<Proxy>,
    /// Data path for new streams, which also checks the open ones.
    newest: Arc<Mutex<Arc<Proxy>>>,
    _tasks: TaskGroup,
}

impl World {
    async fn start(config: Value) -> Self {
        Self::listing(config, &AnnouncedPorts::default()).await
    }

    /// Starts an edge whose gateway lists these ports.
    async fn listing(config: Value, listed: &AnnouncedPorts) -> Self {
        let tasks = TaskGroup::default();
        let way = way(config, listed);
        let newest = Arc::new(Mutex::new(way.clone()));
        let (near, far) = tokio::io::duplex(1 << 20);
        // Without counted bytes each end would take the other one for dead after its read timeout.
        let (near, far) = (CountedIo::new(near), CountedIo::new(far));
        let (near_activity, far_activity) = (near.traffic(), far.traffic());
        let settings = edge_side::EdgeSideConfig::default();
        let server = edge_side::accept(far, far_activity, settings);
        let settings = gateway_side::GatewaySideConfig::default();
        let connected = gateway_side::connect(near, near_activity, settings);
        let (server, connected) = tokio::join!(server, connected);
        let (mut server, (tunnel, driver)) = (server.unwrap(), connected.unwrap());
        tasks.spawn(tracing::info_span!("gateway"), async move {
            drop(driver.run().await);
        });
        let streams = TaskGroup::default();
        let ways = newest.clone();
        tasks.spawn(tracing::info_span!("edge"), async move {
            while let Ok(IncomingStream::Stream(asked)) = server.next_stream().await {
                let ways = ways.clone();
                streams.spawn(tracing::info_span!("stream"), async move {
                    let newest = || ways.lock().unwrap().clone();
                    let way = newest();
                    way.serve(asked, newest).await;
                });
            }
        });
        // SETTINGS come first: an upgrade may be sent only after them.
        tokio::task::yield_now().await;
        let world = Self {
            tunnel,
            way,
            newest,
            _tasks: tasks,
        };
        let _ = world.ask(get("/"), StreamKind::Request, "edge-1:1").await;
        world
    }

    /// Starts an edge whose port 80 leads to an upstream.
    async fn with_app() -> (Self, TcpListener) {
        Self::with_app_as("http").await
    }

    async fn with_app_as(scheme: &str) -> (Self, TcpListener) {
        let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = app.local_addr().unwrap().to_string();
        let world =
            Self::start(json!({ "ports": { "80": { "target": target, "scheme": scheme } } })).await;
        (world, app)
    }

    /// Puts another configuration into effect.
    fn reload(&self, config: Value) {
        let next = way(config, &AnnouncedPorts::default());
        let last = std::mem::replace(&mut *self.newest.lock().unwrap(), next);
        last.replaced().cancel();
    }

    async fn open(
        &self,
        head: Request<()>,
        ask: StreamKind,
        target: &str,
        end: bool,
    ) -> gateway_side::OpenStream {
        self.tunnel
            .open(head, &ask, &target.parse().unwrap(), end)
            .await
            .unwrap()
    }

    async fn ask(
        &self,
        head: Request<()>,
        ask: StreamKind,
        target: &str,
    ) -> Result<Response<StreamReceiver>, StreamError> {
        let opened = self.open(head, ask, target, true).await;
        timeout(SOON, opened.response).await.unwrap()
    }

    async fn get(&self, path: &str) -> Response<StreamReceiver> {
        self.ask(get(path), StreamKind::Request, "edge-1:80")
            .await
            .unwrap()
    }
}

/// Returns a data path with this configuration.
fn way(config: Value, listed: &AnnouncedPorts) -> Arc<Proxy> {
    let mut config: Config = serde_json::from_value(config).unwrap();
    let timeouts = &mut config.timeouts;
    if timeouts.dial == Timeouts::default().dial {
        // Upstreams of this process answer, however slow the machine is.
        timeouts.dial = SOON;
    }
    let policy = Policy::new("edge-1", &config).unwrap();
    let policy = policy.with_announced(listed, &LocalNode::default());
    let bounds = (config.timeouts, config.limits.max_headers);
    Arc::new(Proxy::new(policy, bounds, Arc::default(), Arc::default()))
}

fn get(path: &str) -> Request<()> {
    let uri = format!("http://edge-1:80{path}");
    Request::get(uri).body(()).unwrap()
}

fn failure(answer: &Response<StreamReceiver>) -> (&str, &str) {
    let field = |name| {
        answer
            .headers()
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    };
    (field(wire::FAILURE), field(wire::DETAIL))
}

async fn text(mut body: StreamReceiver) -> Result<String, StreamError> {
    let mut text = Vec::new();
    while let Some(chunk) = timeout(SOON, body.next_chunk()).await.unwrap() {
        text.extend_from_slice(&chunk?);
    }
    Ok(String::from_utf8(text).unwrap())
}

/// Reads the request that an upstream receives, up to and including `end`.
async fn read_to(app: &mut TcpStream, end: &str) -> String {
    let mut read = String::new();
    let mut byte = [0];
    while !read.ends_with(end) {
        let count = timeout(SOON, app.read(&mut byte)).await.unwrap().unwrap();
        assert_eq!(count, 1, "closed after {read:?}");
        read.push(char::from(byte[0]));
    }
    read
}

async fn accept(app: &TcpListener) -> TcpStream {
    timeout(SOON, app.accept()).await.unwrap().unwrap().0
}

/// Returns a socket that does not listen. Connections to its address are refused, and no other test gets the port.
fn closed_port(address: &str) -> std::io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(address.parse().unwrap())?;
    Ok(socket)
}

/// Returns the output of `event`, and lets time pass until then. A limit of the edge that is longer than any stop of the machine
/// ends soon so. Each step is shorter than the time after which a tunnel counts as silent, and the tunnel is used in between.
async fn pass_until<T>(world: &World, event: impl Future<Output = T>) -> T {
    let mut event = pin!(event);
    loop {
        if let Some(output) = event.as_mut().now_or_never() {
            return output;
        }
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(1)).await;
        tokio::time::resume();
        let _ = world.ask(get("/"), StreamKind::Request, "edge-1:1").await;
    }
}

const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

#[tokio::test]
async fn a_head_reaches_the_app_as_the_client_sent_it() {
    let (world, app) = World::with_app().await;
    let mut head = get("/a?b=c");
    for (name, value) in [
        ("x-version", "v5"),
        ("x-version", "v4"),
        ("cookie", "a=1"),
        ("cookie", "b=2"),
    ] {
        head.headers_mut()
            .append(name, HeaderValue::from_static(value));
    }
    let asking = world.ask(head, StreamKind::Request, "edge-1:80");
    let serving = async {
        let mut app = accept(&app).await;
        let head = read_to(&mut app, "\r\n\r\n").await;
        let answer = "HTTP/1.1 404 No\r\nKeep-Alive: 5\r\nConnection: X-Hop\r\nX-Hop: 1\r\nCauseway-Failure: policy\r\n\
                      X-Kept: 1\r\nX-Kept: 2\r\nContent-Length: 3\r\n\r\nabc";
        app.write_all(answer.as_bytes()).await.unwrap();
        (head, app)
    };
    let (answer, (head, _app)) = tokio::join!(asking, serving);
    assert!(head.starts_with("GET /a?b=c HTTP/1.1\r\n"), "{head}");
    for line in [
        "\r\nHost: edge-1:80\r\n",
        "\r\nX-Version: v5\r\nX-Version: v4\r\n",
        "\r\nCookie: a=1; b=2\r\n",
    ] {
        assert!(head.contains(line), "{head}");
    }
    let framed = head.to_lowercase();
    assert!(
        !framed.contains("content-length") && !framed.contains("transfer-encoding"),
        "{head}"
    );
    let answer = answer.unwrap();
    assert_eq!(answer.status(), StatusCode::NOT_FOUND);
    let mut names: Vec<_> = answer
        .headers()
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_bytes()))
        .collect();
    // The sort is stable, because the order of fields with one name has a meaning.
    names.sort_by_key(|(name, _)| *name);
    assert_eq!(
        names,
        [
            ("content-length", &b"3"[..]),
            ("x-kept", b"1"),
            ("x-kept", b"2")
        ]
    );
    assert_eq!(text(answer.into_body()).await.unwrap(), "abc");
}

#[tokio::test]
async fn a_connection_is_kept_and_a_closed_one_costs_no_request() {
    let (world, app) = World::with_app().await;
    let serving = async {
        let mut first = accept(&app).await;
        for _ in 0..3 {
            read_to(&mut first, "\r\n\r\n").await;
            first.write_all(OK).await.unwrap();
        }
        // The fourth request finds the kept connection closed in the meantime.
        read_to(&mut first, "\r\n\r\n").await;
        drop(first);
        let mut second = accept(&app).await;
        read_to(&mut second, "\r\n\r\n").await;
        second.write_all(OK).await.unwrap();
        second
    };
    let asking = async {
        for _ in 0..4 {
            let answer = world.get("/").await;
            assert_eq!(
                (answer.status(), failure(&answer)),
                (StatusCode::OK, ("", ""))
            );
            assert_eq!(text(answer.into_body()).await.unwrap(), "ok");
            // The connection returns to the pool one turn after the response was read.
            while world.way.client.pool.idle() == 0 {
                tokio::task::yield_now().await;
            }
        }
    };
    timeout(SOON, async { tokio::join!(serving, asking) })
        .await
        .unwrap();
}

#[tokio::test]
async fn a_request_that_is_sent_again_has_its_interim_answers() {
    let (world, app) = World::with_app().await;
    let serving = async {
        let mut first = accept(&app).await;
        read_to(&mut first, "\r\n\r\n").await;
        first.write_all(OK).await.unwrap();
        read_to(&mut first, "\r\n\r\n").await;
        drop(first);
        let mut second = accept(&app).await;
        read_to(&mut second, "\r\n\r\n").await;
        let hints = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n";
        second.write_all(hints).await.unwrap();
        second
    };
    let asking = async {
        drop(world.get("/").await);
        while world.way.client.pool.idle() == 0 {
            tokio::task::yield_now().await;
        }
        let mut opened = world
            .open(get("/"), StreamKind::Request, "edge-1:80", true)
            .await;
        let interim = opened.response.next_informational().await.unwrap();
        assert_eq!(interim.unwrap().status(), 103);
    };
    timeout(SOON, async { tokio::join!(serving, asking) })
        .await
        .unwrap();
}

#[tokio::test]
async fn a_get_answered_by_garbage_or_a_reset_is_not_retried() {
    for (says, words) in [
        (&b"not HTTP at all\r\n\r\n"[..], "that is not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "closed the connection"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n", "closed the connection"),
        (b"", "broke the connection"),
    ] {
        let (world, app) = World::with_app().await;
        let serving = async {
            let mut first = accept(&app).await;
            read_to(&mut first, "\r\n\r\n").await;
            first.write_all(OK).await.unwrap();
            read_to(&mut first, "\r\n\r\n").await;
            if says.is_empty() {
                causeway_rt::socket::ResetOnClose::abort(&first);
            }
            first.write_all(says).await.unwrap();
        };
        let asking = async {
            drop(world.get("/").await);
            while world.way.client.pool.idle() == 0 {
                tokio::task::yield_now().await;
            }
            let answer = world.get("/").await;
            let (reason, detail) = failure(&answer);
            assert_eq!(reason, "target-broken", "{detail}");
            assert!(detail.contains(words), "{detail}");
        };
        timeout(SOON, async { tokio::join!(serving, asking) })
            .await
            .unwrap();
        assert!(app.accept().now_or_never().is_none(), "{words}");
    }
}

#[tokio::test]
async fn a_body_without_length_is_chunked_and_an_early_answer_passes() {
    let (world, app) = World::with_app().await;
    let mut opened = world
        .open(get("/"), StreamKind::Request, "edge-1:80", false)
        .await;
    let mut app = accept(&app).await;
    let head = read_to(&mut app, "\r\n\r\n").await;
    assert!(
        head.contains("\r\nTransfer-Encoding: chunked\r\n"),
        "{head}"
    );
    opened
        .send
        .send_data(Bytes::from_static(b"abc"))
        .await
        .unwrap();
    assert_eq!(read_to(&mut app, "abc\r\n").await, "3\r\nabc\r\n");
    app.write_all(OK).await.unwrap();
    let answer = timeout(SOON, opened.response).await.unwrap().unwrap();
    assert_eq!(text(answer.into_body()).await.unwrap(), "ok");
    opened
        .send
        .send_last(Bytes::from_static(b"d"))
        .await
        .unwrap();
    assert_eq!(read_to(&mut app, "0\r\n\r\n").await, "1\r\nd\r\n0\r\n\r\n");
}

#[tokio::test]
async fn an_upload_read_after_the_answer_is_cut_only_by_silence() {
    let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = app.local_addr().unwrap().to_string();
    let idle = Duration::from_secs(30);
    let config =
        json!({ "ports": { "80": { "target": target } }, "timeouts": { "upstream_idle": "30s" } });
    let world = World::start(config).await;
    let mut opened = world
        .open(get("/"), StreamKind::Request, "edge-1:80", false)
        .await;
    let mut app = accept(&app).await;
    read_to(&mut app, "\r\n\r\n").await;
    app.write_all(OK).await.unwrap();
    let answer = timeout(SOON, opened.response).await.unwrap().unwrap();
    assert_eq!(text(answer.into_body()).await.unwrap(), "ok");
    let answered = tokio::time::Instant::now();
    while answered.elapsed() < 3 * idle / 2 {
        let part = Bytes::from_static(b"part");
        opened.send.send_data(part).await.unwrap();
        assert_eq!(read_to(&mut app, "part\r\n").await, "4\r\npart\r\n");
        // The test is about time: the upload never pauses for as long as the limit.
        pass_until(&world, sleep(idle / 10)).await;
    }
    pass_until(&world, assert_reset(app)).await;
}

#[tokio::test]
async fn interim_answers_pass_and_a_body_may_wait_for_them() {
    let (world, app) = World::with_app().await;
    let mut head = get("/");
    *head.method_mut() = http::Method::POST;
    head.headers_mut()
        .insert("expect", HeaderValue::from_static("100-continue"));
    head.headers_mut()
        .insert("content-length", HeaderValue::from_static("4"));
    let mut opened = world
        .open(head, StreamKind::Request, "edge-1:80", false)
        .await;
    let mut app = accept(&app).await;
    let head = read_to(&mut app, "\r\n\r\n").await;
    assert!(
        head.contains("Expect: 100-continue") && head.contains("Content-Length: 4"),
        "{head}"
    );
    app.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")
        .await
        .unwrap();
    let interim = timeout(SOON, opened.response.next_informational())
        .await
        .unwrap()
        .unwrap();
    assert_eq!(interim.unwrap().status(), StatusCode::CONTINUE);
    opened
        .send
        .send_last(Bytes::from_static(b"body"))
        .await
        .unwrap();
    assert_eq!(read_to(&mut app, "body").await, "body");
    app.write_all(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
        .await
        .unwrap();
    app.write_all(OK).await.unwrap();
    let interim = timeout(SOON, opened.response.next_informational())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert_eq!(
        (interim.status().as_u16(), &interim.headers()["link"]),
        (103, &HeaderValue::from_static("</a>"))
    );
    assert_eq!(opened.response.await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn a_head_request_has_the_length_and_no_body() {
    let (world, app) = World::with_app().await;
    let mut head = get("/");
    *head.method_mut() = http::Method::HEAD;
    let serving = async {
        let mut app = accept(&app).await;
        read_to(&mut app, "\r\n\r\n").await;
        app.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            .await
            .unwrap();
        app
    };
    let (answer, _app) = tokio::join!(world.ask(head, StreamKind::Request, "edge-1:80"), serving);
    let answer = answer.unwrap();
    assert_eq!(answer.headers()["content-length"], "1000");
    assert_eq!(text(answer.into_body()).await.unwrap(), "");
}

async fn assert_reset(mut app: TcpStream) {
    let ended = timeout(SOON, app.read(&mut [0])).await.unwrap();
    let kind = ended.map_err(|error| error.kind());
    assert_eq!(kind, Err(std::io::ErrorKind::ConnectionReset));
}

#[tokio::test]
async fn a_client_that_goes_away_ends_the_apps_request_at_once() {
    let (world, app) = World::with_app().await;
    let opened = world
        .open(get("/"), StreamKind::Request, "edge-1:80", true)
        .await;
    let mut waiting = accept(&app).await;
    read_to(&mut waiting, "\r\n\r\n").await;
    drop(opened);
    assert_reset(waiting).await;

    let opened = world
        .open(get("/"), StreamKind::Request, "edge-1:80", true)
        .await;
    let mut streaming = accept(&app).await;
    read_to(&mut streaming, "\r\n\r\n").await;
    streaming
        .write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n")
        .await
        .unwrap();
    let mut body = opened.response.await.unwrap().into_body();
    assert_eq!(body.next_chunk().await.unwrap().unwrap(), "ok");
    drop((body, opened.send));
    assert_reset(streaming).await;
}

#[tokio::test]
async fn an_aborting_upstream_resets_the_stream_without_a_clean_end() {
    for head in [
        "Content-Length: 100\r\n\r\nok",
        "Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
    ] {
        for reset in [true, false] {
            let (world, app) = World::with_app().await;
            let serving = async {
                let mut app = accept(&app).await;
                read_to(&mut app, "\r\n\r\n").await;
                app.write_all(format!("HTTP/1.1 200 OK\r\n{head}").as_bytes())
                    .await
                    .unwrap();
                app
            };
            let (answer, app) = tokio::join!(world.get("/"), serving);
            let mut body = answer.into_body();
            assert_eq!(body.next_chunk().await.unwrap().unwrap(), "ok");
            if reset {
                app.abort();
            }
            drop(app);
            let end = timeout(SOON, body.next_chunk()).await.unwrap();
            assert!(
                matches!(end, Some(Err(StreamError::Reset { .. }))),
                "{head:?} {reset} {end:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_reset_ends_a_close_delimited_answer_as_a_reset() {
    let (world, app) = World::with_app().await;
    let serving = async {
        let mut app = accept(&app).await;
        read_to(&mut app, "\r\n\r\n").await;
        app.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nok")
            .await
            .unwrap();
        app
    };
    let (answer, app) = tokio::join!(world.get("/"), serving);
    let mut body = answer.into_body();
    assert_eq!(body.next_chunk().await.unwrap().unwrap(), "ok");
    app.abort();
    drop(app);
    let end = timeout(SOON, body.next_chunk()).await.unwrap();
    assert!(
        matches!(end, Some(Err(StreamError::Reset { .. }))),
        "{end:?}"
    );
}

#[tokio::test]
async fn a_malformed_or_empty_answer_is_target_broken() {
    let tls = b"\x15\x03\x01\x00\x02\x02\x46";
    for (says, words) in [
        (&b"SSH-2.0-OpenSSH_9.9\r\n"[..], "that is not HTTP"),
        (tls, "that is not HTTP"),
        (b"", "closed the connection"),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
            "without a request to do so",
        ),
    ] {
        let (world, app) = World::with_app().await;
        let serving = async {
            let mut app = accept(&app).await;
            read_to(&mut app, "\r\n\r\n").await;
            app.write_all(says).await.unwrap();
        };
        let (answer, ()) = tokio::join!(world.get("/"), serving);
        let (reason, detail) = failure(&answer);
        assert_eq!(reason, "target-broken", "{detail}");
        assert!(
            detail.contains(words) && detail.contains("on edge-1"),
            "{detail}"
        );
    }
}

#[tokio::test]
async fn a_refused_port_names_its_target_for_every_stream_kind() {
    let closed = closed_port("127.0.0.1:0").unwrap();
    let free = closed.local_addr().unwrap();
    let world = World::start(json!({ "ports": { "80": { "target": free.to_string() } } })).await;
    for ask in [
        StreamKind::Request,
        StreamKind::Tcp,
        StreamKind::Upgrade("websocket".into()),
    ] {
        let answer = world.ask(get("/"), ask, "edge-1:80").await.unwrap();
        let detail = format!("edge-1 could not dial {free}: connection refused");
        assert_eq!(failure(&answer), ("target-refused", detail.as_str()));
    }
    let answer = world
        .ask(get("/"), StreamKind::Tcp, "edge-1:22")
        .await
        .unwrap();
    assert_eq!(
        failure(&answer),
        ("policy", "edge-1 does not serve port 22")
    );
}

#[tokio::test]
async fn an_upgrade_keeps_method_fields_and_the_bytes_behind_the_101() {
    let (world, app) = World::with_app().await;
    let mut head = get("/exec");
    *head.method_mut() = http::Method::POST;
    for version in ["v5", "v4", "v3", "v2", "v1"] {
        head.headers_mut().append(
            "x-stream-protocol-version",
            HeaderValue::from_static(version),
        );
    }
    let mut opened = world
        .open(
            head,
            StreamKind::Upgrade("SPDY/3.1".into()),
            "edge-1:80",
            false,
        )
        .await;
    let mut app = accept(&app).await;
    let head = read_to(&mut app, "\r\n\r\n").await;
    assert!(head.starts_with("POST /exec HTTP/1.1\r\n"), "{head}");
    let versions = ["v5", "v4", "v3", "v2", "v1"];
    let versions = versions
        .map(|each| format!("X-Stream-Protocol-Version: {each}\r\n"))
        .concat();
    for line in [
        versions.as_str(),
        "Upgrade: SPDY/3.1\r\n",
        "Connection: Upgrade\r\n",
        "Content-Length: 0\r\n",
    ] {
        assert!(head.contains(line), "{head}");
    }
    let answer = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
                  X-Stream-Protocol-Version: v4\r\n\r\nfirst";
    app.write_all(answer.as_bytes()).await.unwrap();
    let answer = timeout(SOON, opened.response).await.unwrap().unwrap();
    assert_eq!(
        (answer.status(), &answer.headers()[wire::SWITCHED]),
        (StatusCode::OK, &HeaderValue::from_static("SPDY/3.1"))
    );
    assert_eq!(answer.headers()["x-stream-protocol-version"], "v4");
    assert!(!answer.headers().contains_key("upgrade"));
    let mut body = answer.into_body();
    assert_eq!(
        timeout(SOON, body.next_chunk())
            .await
            .unwrap()
            .unwrap()
            .unwrap(),
        "first"
    );
    end_session(&mut opened.send, app, body).await;
}

/// Ends a session in order: the client sends its last bytes and half-closes, then the upstream sends its last bytes and closes.
async fn end_session(send: &mut StreamSender, mut app: TcpStream, body: StreamReceiver) {
    send.send_last(Bytes::from_static(b"-end")).await.unwrap();
    assert_eq!(read_to(&mut app, "-end").await, "-end");
    assert_eq!(
        timeout(SOON, app.read(&mut [0])).await.unwrap().unwrap(),
        0,
        "half-close"
    );
    app.write_all(b"pong").await.unwrap();
    drop(app);
    assert_eq!(text(body).await.unwrap(), "pong");
}

#[tokio::test]
async fn the_body_of_an_upgrade_goes_before_the_session_bytes() {
    let (world, app) = World::with_app().await;
    let mut head = get("/exec");
    *head.method_mut() = http::Method::POST;
    head.headers_mut()
        .insert(wire::CONTENT, HeaderValue::from_static("3"));
    let (ask, target) = (
        StreamKind::Upgrade("tcp".into()),
        "edge-1:80".parse().unwrap(),
    );
    let refused = world.tunnel.open(head.clone(), &ask, &target, false).await;
    let refused = refused.unwrap_err().to_string();
    assert!(
        refused.contains("does not support upgrades with a body"),
        "{refused}"
    );
    world.tunnel.allow_upgrade_bodies(true);
    let mut opened = world
        .open(head, StreamKind::Upgrade("tcp".into()), "edge-1:80", false)
        .await;
    // The body and the first bytes of the session are sent in one frame.
    let bytes = Bytes::from_static(b"xyzping");
    opened.send.send_data(bytes).await.unwrap();
    let mut app = accept(&app).await;
    let head = read_to(&mut app, "\r\n\r\n").await;
    assert!(head.contains("Content-Length: 3\r\n"), "{head}");
    let mut body = [0; 3];
    app.read_exact(&mut body).await.unwrap();
    assert_eq!(&body, b"xyz");
    let answer = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n";
    app.write_all(answer.as_bytes()).await.unwrap();
    let answer = timeout(SOON, opened.response).await.unwrap().unwrap();
    assert_eq!(failure(&answer), ("", ""));
    assert_eq!(read_to(&mut app, "ping").await, "ping");
    end_session(&mut opened.send, app, answer.into_body()).await;
}

#[tokio::test]
async fn a_dial_that_fails_says_why_and_is_counted_by_its_cause() {
    let closed = closed_port("127.0.0.1:0").unwrap();
    let free = closed.local_addr().unwrap().to_string();
    // The name has a label that is too long, so the edge does not query a name server.
    let no_name = format!("{}.invalid:80", "x".repeat(64));
    for (target, cause) in [(&no_name, "target-unresolved"), (&free, "target-refused")] {
        let world = World::start(json!({ "ports": { "80": { "target": target } } })).await;
        let answer = world.get("/").await;
        assert_eq!(failure(&answer).0, cause, "{:?}", failure(&answer));
        let counted = format!("causeway_edge_upstream_dial_failures_total{{cause=\"{cause}\"}} 1");
        let metrics = world
            .way
            .client
            .metrics
            .encode(causeway_rt::Exposition::OpenMetrics);
        assert!(metrics.contains(&counted), "{metrics}");
    }
}

#[tokio::test]
async fn an_apps_refusal_of_an_upgrade_comes_back_whole() {
    let (world, app) = World::with_app().await;
    let asking = world
        .open(
            get("/"),
            StreamKind::Upgrade("websocket".into()),
            "edge-1:80",
            false,
        )
        .await;
    let mut app = accept(&app).await;
    read_to(&mut app, "\r\n\r\n").await;
    app.write_all(b"HTTP/1.1 403 Forbidden\r\nX-Why: no\r\nContent-Length: 4\r\n\r\nnope")
        .await
        .unwrap();
    let answer = timeout(SOON, asking.response).await.unwrap().unwrap();
    assert_eq!(
        (answer.status(), &answer.headers()["x-why"]),
        (StatusCode::FORBIDDEN, &HeaderValue::from_static("no"))
    );
    assert!(!answer.headers().contains_key(wire::SWITCHED));
    assert_eq!(text(answer.into_body()).await.unwrap(), "nope");
}

#[tokio::test]
async fn a_refused_upgrade_in_a_coding_of_its_own_is_target_broken() {
    let (world, app) = World::with_app().await;
    let websocket = StreamKind::Upgrade("websocket".into());
    let asking = world.open(get("/"), websocket, "edge-1:80", false).await;
    let mut app = accept(&app).await;
    read_to(&mut app, "\r\n\r\n").await;
    app.write_all(
        b"HTTP/1.1 403 No\r\nTransfer-Encoding: gzip, chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
    )
    .await
    .unwrap();
    let answer = timeout(SOON, asking.response).await.unwrap().unwrap();
    let (reason, detail) = failure(&answer);
    assert_eq!(reason, "target-broken", "{detail}");
    assert!(detail.contains("Transfer-Encoding"), "{detail}");
}

#[tokio::test]
async fn an_unanswered_upgrade_times_out() {
    let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = app.local_addr().unwrap().to_string();
    let config =
        json!({ "ports": { "80": { "target": target } }, "timeouts": { "upgrade": "300ms" } });
    let world = World::start(config).await;
    let asking = world
        .open(
            get("/"),
            StreamKind::Upgrade("websocket".into()),
            "edge-1:80",
            false,
        )
        .await;
    let _app = accept(&app).await;
    let answer = timeout(SOON, asking.response).await.unwrap().unwrap();
    assert_eq!(failure(&answer).0, "target-timeout");
}

#[tokio::test]
async fn a_reset_of_a_session_reaches_the_other_side_as_a_reset() {
    for ask in [StreamKind::Tcp, StreamKind::Upgrade("x".into())] {
        for by_app in [true, false] {
            let (world, app) = World::with_app().await;
            let opened = world.open(get("/"), ask.clone(), "edge-1:80", false).await;
            let mut app = accept(&app).await;
            if matches!(ask, StreamKind::Upgrade(_)) {
                read_to(&mut app, "\r\n\r\n").await;
                app.write_all(b"HTTP/1.1 101 OK\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
                    .await
                    .unwrap();
            }
            let gateway_side::OpenStream { mut send, response } = opened;
            let mut body = timeout(SOON, response).await.unwrap().unwrap().into_body();
            if by_app {
                app.abort();
                drop(app);
                let end = timeout(SOON, body.next_chunk()).await.unwrap();
                assert!(
                    matches!(end, Some(Err(StreamError::Reset { .. }))),
                    "{end:?}"
                );
            } else {
                send.abort();
                let error = timeout(SOON, app.read(&mut [0]))
                    .await
                    .unwrap()
                    .unwrap_err();
                assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
            }
        }
    }
}

#[tokio::test]
async fn upstream_tls_verifies_the_named_ca_and_offers_a_certificate() {
    let ca = Ca::create(&TrustDomain::parse("site").unwrap()).unwrap();
    let other = Ca::create(&TrustDomain::parse("site").unwrap()).unwrap();
    let hour = Duration::from_hours(1);
    let names = [ListenerName::parse("localhost").unwrap()];
    let leaf = ca.issue_listener(&names, hour).unwrap();
    let client = ca.issue_client("edge", &[], hour).unwrap();
    let (trust, alpn): (_, [&[u8]; 2]) = (TrustStore::from_ca(&ca).unwrap(), [b"h2", b"http/1.1"]);
    let server = listener_server(
        leaf.resolver(),
        &trust,
        CertificateRequirement::Required,
        &alpn,
    )
    .unwrap();
    let files = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = files.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let (certificate, key) = (
        file("c", &client.chain_pem()),
        file("k", client.key_pem().expose()),
    );
    let (good, bad) = (file("good", &ca.root_pem()), file("bad", &other.root_pem()));
    for (roots, verify, word) in [
        (Some(good), true, ""),
        (Some(bad), true, "target-broken"),
        (None, false, ""),
    ] {
        let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = json!({
            "target": app.local_addr().unwrap().to_string(), "scheme": "https", "server_name": "localhost",
            "ca": roots, "verify": verify, "certificate": certificate, "key": key,
        });
        let world = World::start(json!({ "ports": { "80": port } })).await;
        let acceptor = tokio_rustls::TlsAcceptor::from(server.clone());
        let serving = async {
            let (tcp, _) = app.accept().await.unwrap();
            let Ok(tls) = acceptor.accept(tcp).await else {
                return;
            };
            assert_eq!(tls.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
            let service = hyper::service::service_fn(|request: Request<_>| async move {
                assert_eq!(request.uri().scheme_str(), Some("https"));
                Ok::<_, Infallible>(Response::new(String::from("ok")))
            });
            let io = hyper_util::rt::TokioIo::new(tls);
            let executor = hyper_util::rt::TokioExecutor::new();
            let _ = hyper::server::conn::http2::Builder::new(executor)
                .serve_connection(io, service)
                .await;
        };
        tokio::select! {
            () = async { serving.await; std::future::pending().await } => {}
            answer = world.get("/") => {
                assert_eq!(failure(&answer).0, word, "{}", failure(&answer).1);
            }
        }
    }
}

/// Serves calls like gRPC: each chunk is sent back, and trailers follow.
async fn serve_http2(app: TcpListener) {
    let streams = TaskGroup::default();
    while let Ok((tcp, _)) = app.accept().await {
        let service =
            hyper::service::service_fn(|request: Request<hyper::body::Incoming>| async move {
                assert_eq!(
                    (request.uri().scheme_str(), &request.headers()["te"]),
                    (Some("http"), &HeaderValue::from_static("trailers"))
                );
                assert_eq!(request.uri().authority().unwrap(), "edge-1:80");
                let mut trailers = HeaderMap::new();
                trailers.insert("grpc-status", HeaderValue::from_static("0"));
                let trailers = std::future::ready(Some(Ok(trailers)));
                Ok::<_, Infallible>(Response::new(http_body_util::BodyExt::with_trailers(
                    request.into_body(),
                    trailers,
                )))
            });
        let connection =
            hyper::server::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new())
                .serve_connection(hyper_util::rt::TokioIo::new(tcp), service);
        streams.spawn(
            tracing::info_span!("app"),
            async move { drop(connection.await) },
        );
    }
}

#[tokio::test]
async fn grpc_goes_by_http2_both_ways_at_once_with_trailers() {
    for (scheme, kind) in [("http", "application/grpc+proto"), ("h2c", "text/plain")] {
        let (world, app) = World::with_app_as(scheme).await;
        let tasks = TaskGroup::default();
        tasks.spawn(tracing::info_span!("app"), serve_http2(app));
        for _ in 0..2 {
            let mut head = get("/service/call");
            *head.method_mut() = http::Method::POST;
            head.headers_mut()
                .insert("te", HeaderValue::from_static("trailers"));
            head.headers_mut()
                .insert("content-type", HeaderValue::from_static(kind));
            let mut opened = world
                .open(head, StreamKind::Request, "edge-1:80", false)
                .await;
            let answer = timeout(SOON, opened.response).await.unwrap().unwrap();
            assert_eq!(failure(&answer), ("", ""));
            let mut body = answer.into_body();
            for message in ["one", "two"] {
                opened.send.send_data(Bytes::from(message)).await.unwrap();
                assert_eq!(
                    timeout(SOON, body.next_chunk())
                        .await
                        .unwrap()
                        .unwrap()
                        .unwrap(),
                    message
                );
            }
            opened.send.end().unwrap();
            assert!(timeout(SOON, body.next_chunk()).await.unwrap().is_none());
            let trailers = poll_fn(|cx| body.poll_trailers(cx)).await.unwrap().unwrap();
            assert_eq!(trailers["grpc-status"], "0");
        }
    }
}

/// Serves responses of a hundred thousand chunks of 64 bytes (6.4 MB).
async fn serve_small_chunks(app: TcpListener) {
    while let Ok((tcp, _)) = app.accept().await {
        let service = hyper::service::service_fn(|_: Request<hyper::body::Incoming>| async move {
            let chunk = Bytes::from_static(&[7; 64]);
            let chunks = std::iter::repeat_n(chunk, 100_000)
                .map(|chunk| Ok::<_, Infallible>(Frame::data(chunk)));
            Ok::<_, Infallible>(Response::new(StreamBody::new(futures_util::stream::iter(
                chunks,
            ))))
        });
        let _ = hyper::server::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new())
            .serve_connection(hyper_util::rt::TokioIo::new(tcp), service)
            .await;
    }
}

#[tokio::test]
async fn trap_1_an_http2_app_may_answer_in_chunks_of_a_few_bytes() {
    let (world, app) = World::with_app_as("h2c").await;
    let tasks = TaskGroup::default();
    tasks.spawn(tracing::info_span!("app"), serve_small_chunks(app));
    let mut body = world.get("/").await.into_body();
    let mut received = 0;
    while let Some(chunk) = timeout(SOON, body.next_chunk()).await.unwrap() {
        received += chunk.unwrap().len();
    }
    assert_eq!(received, 6_400_000);
}

#[tokio::test]
async fn a_stream_is_authorized_by_the_address_that_it_connects_to() {
    // The edge tries this node port on loopback first, and then at the node's other address.
    let (app, _closed) = loop {
        let app = TcpListener::bind("127.0.0.2:0").await.unwrap();
        let port = app.local_addr().unwrap().port();
        if let Ok(closed) = closed_port(&format!("127.0.0.1:{port}")) {
            break (app, closed);
        }
    };
    let port = app.local_addr().unwrap().port();
    let begins = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n";
    let switches = "HTTP/1.1 101 OK\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n";
    for (scheme, ask, says) in [
        ("http", StreamKind::Request, begins),
        ("http", StreamKind::Upgrade("x".into()), switches),
        ("tcp", StreamKind::Tcp, ""),
    ] {
        let listed = |is: &str| if scheme == is { vec![port] } else { Vec::new() };
        let listed = AnnouncedPorts {
            http: listed("http"),
            tcp: listed("tcp"),
        };
        let config = json!({ "kubernetes": {}, "addresses": ["127.0.0.2"] });
        let world = World::listing(config, &listed).await;
        let target = format!("edge-1:{port}");
        let opened = world.open(get("/"), ask, &target, false).await;
        let mut app = accept(&app).await;
        app.write_all(says.as_bytes()).await.unwrap();
        let mut body = timeout(SOON, opened.response)
            .await
            .unwrap()
            .unwrap()
            .into_body();
        let allow_hosts = |hosts: &[&str]| {
            let ports = json!({ port.to_string(): { "scheme": scheme } });
            world.reload(json!({ "ports": ports, "allow": { "hosts": hosts } }));
        };
        for hosts in [&["127.0.0.2"][..], &["127.0.0.1", "127.0.0.2"]] {
            allow_hosts(hosts);
            app.write_all(b"more").await.unwrap();
            let more = timeout(SOON, body.next_chunk()).await.unwrap();
            assert_eq!(more.unwrap().unwrap(), "more", "{scheme}");
        }
        allow_hosts(&["127.0.0.1"]);
        let end = timeout(SOON, body.next_chunk()).await.unwrap();
        assert!(
            matches!(end, Some(Err(StreamError::Reset { .. }))),
            "{scheme}: {end:?}"
        );
    }
}
