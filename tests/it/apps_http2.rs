//! Apps that choose HTTP/2 where the gateway itself speaks TLS to them: requests share a connection, and nothing else.

use crate::{
    apps::asked,
    recheck::compiled,
    recheck_apps::{Streams, but_tester},
    testbed::{TestBed, URL},
    world::{
        app::answer::pattern,
        authority::Authority,
        client::{Wire, assert_problem, whole},
        frames::{self, DATA, HEADERS, PREFACE, SETTINGS},
        gateway::Build,
        until,
    },
};
use causeway_edge::config::Protocol;
use causeway_gateway::{config::Config, state::PolicyWriter};
use futures_util::future::join_all;
use http_body_util::{BodyExt, Collected, Full, combinators::UnsyncBoxBody};
use hyper::body::Bytes;
use hyper::{
    HeaderMap, Method, Request, Response,
    body::{Body, Frame, Incoming},
    header::CONTENT_LENGTH,
    server::conn::http2,
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::ServerConfig;
use serde_json::json;
use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, mpsc},
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;

const PATIENCE: Duration = Duration::from_mins(2);

type ResponseBody = UnsyncBoxBody<Bytes, io::Error>;

/// State of an upstream: counts of its connections and requests, and the waiting requests.
#[derive(Default)]
struct Record {
    connections: AtomicUsize,
    requests: AtomicUsize,
    /// Requests that wait at `/gate`.
    waiting: AtomicUsize,
    /// Endless answers that are over.
    given_up: AtomicUsize,
    /// Number of endless answers that may break off.
    breaks: AtomicUsize,
    /// Connections that have ended in order.
    ended: AtomicUsize,
    /// Bodies of answered requests at `/keeps`.
    kept: std::sync::Mutex<Vec<Incoming>>,
    /// Requests the end of connections.
    leave: std::sync::Mutex<CancellationToken>,
}

/// An app that speaks HTTP/2, until it is dropped.
struct App {
    address: SocketAddr,
    seen: Arc<Record>,
    gate: Arc<Semaphore>,
    _serving: JoinSet<()>,
}

fn with_alpn(tls: &Arc<ServerConfig>) -> TlsAcceptor {
    let mut tls = ServerConfig::clone(tls);
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    TlsAcceptor::from(Arc::new(tls))
}

impl App {
    /// An app that accepts this many streams at once on each connection.
    async fn start(authority: &Authority, streams: u32) -> Self {
        let tls = with_alpn(&authority.serve(&authority.app(&["edge-1"]), false));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (seen, gate) = (Arc::<Record>::default(), Arc::new(Semaphore::new(0)));
        let mut serving = JoinSet::new();
        let (saw, opens) = (seen.clone(), gate.clone());
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (tcp, _) = listener.accept().await.unwrap();
                let (tls, seen, gate) = (tls.clone(), saw.clone(), opens.clone());
                connections.spawn(async move {
                    let Ok(io) = tls.accept(tcp).await else {
                        return;
                    };
                    seen.connections.fetch_add(1, SeqCst);
                    serve(io, streams, seen, gate).await;
                });
            }
        });
        Self {
            address,
            seen,
            gate,
            _serving: serving,
        }
    }

    fn connections(&self) -> usize {
        self.seen.connections.load(SeqCst)
    }

    /// Waits until this many requests wait at its gate.
    async fn until_waiting(&self, many: usize) {
        until("all wait at the gate", async || {
            self.seen.waiting.load(SeqCst) == many
        })
        .await;
    }

    /// Requests the end of all present connections.
    fn leave(&self) {
        let mut leave = self.seen.leave.lock().unwrap();
        std::mem::take(&mut *leave).cancel();
    }
}

async fn serve(io: TlsStream<TcpStream>, streams: u32, seen: Arc<Record>, gate: Arc<Semaphore>) {
    assert_eq!(io.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let leave = seen.leave.lock().unwrap().clone();
    let saw = seen.clone();
    let service = service_fn(move |request| answer(request, saw.clone(), gate.clone()));
    let connection = http2::Builder::new(TokioExecutor::new())
        .max_concurrent_streams(streams)
        .serve_connection(TokioIo::new(io), service);
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = leave.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if ended.is_ok() {
        seen.ended.fetch_add(1, SeqCst);
    }
}

fn text(text: impl Into<Bytes>) -> ResponseBody {
    Full::new(text.into())
        .map_err(|never| match never {})
        .boxed_unsync()
}

async fn answer(
    request: Request<Incoming>,
    seen: Arc<Record>,
    gate: Arc<Semaphore>,
) -> Result<Response<ResponseBody>, Infallible> {
    seen.requests.fetch_add(1, SeqCst);
    let body = match request.uri().path() {
        "/gate" => {
            seen.waiting.fetch_add(1, SeqCst);
            gate.acquire().await.unwrap().forget();
            seen.waiting.fetch_sub(1, SeqCst);
            text("through")
        }
        "/mirror" => request.into_body().map_err(io::Error::other).boxed_unsync(),
        "/authority" => text(request.uri().to_string()),
        "/keeps" => {
            seen.kept.lock().unwrap().push(request.into_body());
            text("well")
        }
        "/deaf" => {
            // The task ends with its connection.
            let _body = request.into_body();
            std::future::pending().await
        }
        "/trailers" => {
            let mut trailers = HeaderMap::new();
            trailers.insert("x-sum", "7".parse().unwrap());
            let trailers = async { Some(Ok(trailers)) };
            text("data").with_trailers(trailers).boxed_unsync()
        }
        "/large" => text(pattern(8 << 20)),
        "/endless" => EndlessBody(usize::MAX, seen).boxed_unsync(),
        "/breaks" => EndlessBody(3, seen).boxed_unsync(),
        // The client gets the whole answer, but the stream behind it does not end.
        "/unended" => {
            let chunks = usize::from(request.method() == Method::GET);
            let body = EndlessBody(chunks, seen).boxed_unsync();
            let answer = Response::builder().header(CONTENT_LENGTH, 1 << 14);
            return Ok(answer.body(body).unwrap());
        }
        _ => text("well"),
    };
    Ok(Response::new(body))
}

/// Body of this many chunks and no end after them: it breaks off when it may, and reports that it is over.
struct EndlessBody(usize, Arc<Record>);

impl Body for EndlessBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let Some(left) = self.0.checked_sub(1) else {
            let one_less = |breaks: usize| breaks.checked_sub(1);
            if self
                .1
                .breaks
                .fetch_update(SeqCst, SeqCst, one_less)
                .is_err()
            {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            return Poll::Ready(Some(Err(io::Error::other("broken off"))));
        };
        self.0 = left;
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[7; 1 << 14])))))
    }
}

impl Drop for EndlessBody {
    fn drop(&mut self) {
        self.1.given_up.fetch_add(1, SeqCst);
    }
}

/// Starts a gateway and an edge with this address as port 9100. The gateway itself speaks TLS to it.
async fn testbed(
    authority: &Authority,
    app: SocketAddr,
    change: impl FnOnce(&mut Config),
) -> TestBed {
    road_by(TestBed::build(), authority, app, change).await
}

async fn road_by(
    build: Build,
    authority: &Authority,
    app: SocketAddr,
    change: impl FnOnce(&mut Config),
) -> TestBed {
    let ours = asked(build.folder(), authority, None);
    let build = build.config(|config| {
        config.upstream_tls.insert(9100, ours);
        change(config);
    });
    Box::pin(TestBed::along(build, Protocol::Tcp, app)).await
}

/// Starts an app that accepts this many streams at once, and a gateway and an edge for it.
async fn to_app(streams: u32, change: impl FnOnce(&mut Config)) -> (App, TestBed) {
    let authority = Authority::new();
    let app = App::start(&authority, streams).await;
    let testbed = testbed(&authority, app.address, change).await;
    (app, testbed)
}

#[tokio::test]
async fn hundreds_of_requests_share_one_http2_connection() {
    const MANY: usize = 300;
    let (app, testbed) = to_app(1_000, |_| {}).await;
    let large = pattern(1 << 18);
    for client in [testbed.client(), testbed.http2()] {
        assert_eq!(client.get(URL).await.text(), "well");
        let url = format!("{URL}mirror");
        let mirrored = client.ask("POST", &url, large.clone());
        assert_eq!(mirrored.await.body, large);
        let named = client.get(&format!("{URL}authority?x=1")).await;
        assert_eq!(named.text(), "https://edge-1:9100/authority?x=1");
        assert!(named.field("via").contains("2 causeway"), "{named}");
    }
    let mut connection = testbed.http2().connect("edge-1").await.unwrap();
    let request = Request::get(format!("{URL}trailers"))
        .body(whole(""))
        .unwrap();
    let answer = connection.open(request).await.unwrap();
    let collected = answer.collect().await.unwrap();
    assert_eq!(collected.trailers().unwrap()["x-sum"], "7");
    assert_eq!(collected.to_bytes(), "data");

    let (client, url) = (testbed.client(), format!("{URL}gate"));
    let asking = join_all((0..MANY).map(|_| client.get(&url)));
    let met = async {
        app.until_waiting(MANY).await;
        app.gate.add_permits(MANY);
    };
    let (answers, ()) = tokio::join!(asking, met);
    assert!(answers.iter().all(|answer| answer.text() == "through"));
    assert_eq!(app.connections(), 1);
    let metrics = testbed.metrics().await;
    assert_eq!(
        metrics.sum("upstream_connections_total", &[("http", "2")]),
        1
    );
    testbed.until_idle().await;
}

#[tokio::test]
async fn an_abort_is_a_reset_both_ways_and_keeps_the_connection() {
    let (app, testbed) = to_app(100, |_| {}).await;
    let (beside, gate) = (testbed.client(), format!("{URL}gate"));
    let held = beside.get(&gate);
    let breaking = break_off(&app, &testbed);
    let (held, ()) = tokio::join!(held, breaking);
    assert_eq!(held.text(), "through");
    testbed.until_idle().await;
}

/// Clients and the app cancel answers, while one request waits at the gate.
async fn break_off(app: &App, testbed: &TestBed) {
    app.until_waiting(1).await;
    for (number, client) in [testbed.client(), testbed.http2()].into_iter().enumerate() {
        let mut connection = client.connect("edge-1").await.unwrap();
        let request = Request::get(format!("{URL}endless")).body(whole(""));
        let mut answer = connection.open(request.unwrap()).await.unwrap();
        answer.frame().await.unwrap().unwrap();
        drop((answer, connection));
        until("the app notices it", async || {
            app.seen.given_up.load(SeqCst) == 2 * number + 1
        })
        .await;
        let mut connection = client.connect("edge-1").await.unwrap();
        let request = Request::get(format!("{URL}breaks")).body(whole(""));
        let mut answer = connection.open(request.unwrap()).await.unwrap();
        answer.frame().await.unwrap().unwrap();
        app.seen.breaks.fetch_add(1, SeqCst);
        answer.collect().await.unwrap_err();
        assert_eq!(client.get(URL).await.text(), "well");
    }
    app.gate.add_permits(1);
}

#[tokio::test]
async fn the_upstream_stream_limit_is_kept_by_further_connections() {
    const MANY: usize = 8;
    let (app, testbed) = to_app(1, |_| {}).await;
    let (client, url) = (testbed.client(), format!("{URL}gate"));
    let asking = join_all((0..MANY).map(|_| client.get(&url)));
    let met = async {
        app.until_waiting(MANY).await;
        assert_eq!(app.connections(), MANY);
        app.gate.add_permits(MANY);
    };
    let (answers, ()) = tokio::join!(asking, met);
    assert!(answers.iter().all(|answer| answer.text() == "through"));
    for _ in 0..20 {
        assert_eq!(client.get(URL).await.text(), "well");
    }
    assert_eq!(app.connections(), MANY);
}

#[tokio::test]
async fn a_goaway_keeps_open_streams_and_moves_new_ones() {
    let (app, testbed) = to_app(100, |_| {}).await;
    let (client, url) = (testbed.client(), format!("{URL}gate"));
    let leaving = async {
        app.until_waiting(1).await;
        app.leave();
        for _ in 0..10 {
            assert_eq!(client.get(URL).await.text(), "well");
            let posted = client.ask("POST", &format!("{URL}mirror"), "body").await;
            assert_eq!(posted.text(), "body");
        }
        app.gate.add_permits(1);
    };
    let (answer, ()) = tokio::join!(client.get(&url), leaving);
    assert_eq!(answer.text(), "through");
    assert_eq!(app.connections(), 2);
    until("the first has ended in order", async || {
        app.seen.ended.load(SeqCst) == 1
    })
    .await;
    testbed.until_idle().await;
}

#[tokio::test]
async fn a_stalled_reader_or_upload_delays_no_other_stream() {
    let patience = Duration::from_secs(2);
    let (_app, testbed) = to_app(100, |config| config.timeouts.upload = patience).await;
    let mut stalled = Vec::new();
    for client in [testbed.client(), testbed.http2()] {
        let mut connection = client.connect("edge-1").await.unwrap();
        let request = Request::get(format!("{URL}endless")).body(whole(""));
        let answer = connection.open(request.unwrap()).await.unwrap();
        stalled.push((connection, answer));
        let large = client.get(&format!("{URL}large")).await;
        assert!(large.body == pattern(8 << 20));
    }
    until("unread bytes count", async || {
        testbed.metrics().await.sum("buffered_bytes", &[]) > 0
    })
    .await;
    let client = testbed.client();
    let deaf = format!("{URL}deaf");
    let upload = client.ask("PUT", &deaf, pattern(4 << 20));
    let beside = async {
        for _ in 0..20 {
            assert_eq!(client.get(URL).await.text(), "well");
        }
    };
    let (refused, ()) = tokio::join!(upload, beside);
    assert_problem(
        &refused,
        504,
        "target_timeout",
        "read nothing from the request body",
    );
    drop(stalled);
    testbed.until_idle().await;
}

#[tokio::test]
async fn an_idle_shared_connection_closes_without_delaying_requests() {
    let short = Duration::from_millis(300);
    let (app, mut testbed) = to_app(100, |config| config.timeouts.idle_keepalive = short).await;
    let ended = async |many: usize| {
        until("it has ended in order", async || {
            app.seen.ended.load(SeqCst) == many
        })
        .await;
    };
    assert_eq!(testbed.client().get(URL).await.text(), "well");
    ended(1).await;
    assert_eq!(testbed.client().get(URL).await.text(), "well");
    let stopping = timeout(PATIENCE, testbed.edge.stop());
    stopping
        .await
        .expect("an edge does not wait for idle connections");
    ended(2).await;
    assert_eq!(app.connections(), 2);
}

/// Starts an app whose first connection sends this flood. Returns the result of its clients on the next connections.
async fn floods(flood: Vec<u8>) {
    let authority = Authority::new();
    let tls = with_alpn(&authority.serve(&authority.app(&["edge-1"]), false));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (tell, mut told) = mpsc::unbounded_channel();
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        let mut connections = JoinSet::new();
        loop {
            let (tcp, _) = listener.accept().await.unwrap();
            let (tls, tell, flood) = (tls.clone(), tell.clone(), flood.clone());
            connections.spawn(async move {
                let mut io = tls.accept(tcp).await.unwrap();
                let mut preface = [0; PREFACE.len()];
                io.read_exact(&mut preface).await.unwrap();
                let settings = frames::settings(&[]);
                io.write_all(&settings).await.unwrap();
                let ack = frames::frame(SETTINGS, frames::ACK, 0, &[]);
                io.write_all(&ack).await.unwrap();
                while frames::next(&mut io).await.unwrap().kind != HEADERS {}
                let (mut read, mut write) = tokio::io::split(io);
                let many = flood.repeat((16 * 1024 / flood.len()).max(1));
                let writing = async { while write.write_all(&many).await.is_ok() {} };
                let mut nowhere = tokio::io::sink();
                let reading = tokio::io::copy(&mut read, &mut nowhere);
                tokio::select! {
                    () = writing => {}
                    _ = reading => {}
                }
                tell.send(()).unwrap();
            });
        }
    });
    let testbed = testbed(&authority, address, |_| {}).await;
    let first = testbed.tunnels().await;
    let answer = timeout(PATIENCE, testbed.client().ask("POST", URL, "")).await;
    let answer = answer.expect("an app that floods has an end");
    assert_problem(&answer, 502, "target_broken", "port 9100 of edge-1");
    timeout(PATIENCE, told.recv())
        .await
        .expect("its connection ends");
    assert_eq!(testbed.tunnels().await, first);
    testbed.until_idle().await;
}

#[tokio::test]
async fn an_app_that_floods_loses_its_own_connection_and_no_tunnel() {
    let ping = frames::frame(frames::PING, 0, 0, &[7; 8]);
    let empty = frames::settings(&[]);
    let hint = frames::fields(&[(":status", "103")]);
    let hint = frames::frame(HEADERS, frames::END_HEADERS, 1, &hint);
    for flood in [ping, empty, hint] {
        Box::pin(floods(flood)).await;
    }
}

#[tokio::test]
async fn http2_upstream_streams_end_if_their_client_loses_permission() {
    let rules = PolicyWriter::new(Some(compiled(&json!([{ "then": "allow" }]))));
    let authority = Authority::new();
    let app = App::start(&authority, 100).await;
    let build = TestBed::build().policy(rules.reader());
    let testbed = road_by(build, &authority, app.address, |_| {}).await;
    let mut streams = Streams::open(&testbed, "keeps", "deaf").await;
    until("all are open", async || {
        testbed.metrics().await.sum("open_streams", &[]) == 8
    })
    .await;
    rules.replace(Some(compiled(&but_tester())));
    streams.are_refused().await;
    testbed.until_idle().await;
    let kept = std::mem::take(&mut *app.seen.kept.lock().unwrap());
    assert_eq!(kept.len(), 2);
    for body in kept {
        assert!(
            body.collect().await.is_err(),
            "a part does not count as the whole"
        );
    }
    until("the app has seen the end of all downloads", async || {
        app.seen.given_up.load(SeqCst) == 4
    })
    .await;
    drop(streams);
}

/// The client has its whole answer over HTTP/1.1, though the stream that carries it has not ended.
#[tokio::test]
async fn an_answer_is_whole_with_its_length_and_to_head_with_its_head() {
    let (_app, testbed) = to_app(100, |_| {}).await;
    let url = format!("{URL}unended");
    for method in ["GET", "HEAD"] {
        let answer = testbed.client().ask(method, &url, "").await;
        assert_eq!(answer.status, 200, "{answer}");
    }
    until("both are recorded", async || {
        testbed.log().records().len() == 2
    })
    .await;
    for record in testbed.log().records() {
        assert!(record["reason"].is_null(), "{record}");
    }
}

/// Frames of a stream: kind, flags and payload of each.
type StreamFrames = [(u8, u8, &'static [u8])];

/// Starts an app that answers each request with these frames.
async fn raw_app(
    answer: &'static StreamFrames,
    tls: Option<TlsAcceptor>,
) -> (SocketAddr, JoinSet<()>) {
    async fn serve(mut io: impl Wire, answer: &StreamFrames) {
        let mut preface = [0; PREFACE.len()];
        io.read_exact(&mut preface).await.unwrap();
        let ack = frames::frame(SETTINGS, frames::ACK, 0, &[]);
        let settings = [frames::settings(&[]), ack].concat();
        frames::send(&mut io, &settings).await.unwrap();
        while let Ok(request) = frames::next(&mut io).await {
            if request.kind == HEADERS {
                let frames = answer.iter().map(|(kind, flags, payload)| {
                    let is_of_connection = *kind == frames::GOAWAY;
                    let stream = if is_of_connection { 0 } else { request.stream };
                    frames::frame(*kind, *flags, stream, payload)
                });
                let answer = frames.collect::<Vec<_>>().concat();
                frames::send(&mut io, &answer).await.unwrap();
            }
        }
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        let mut connections = JoinSet::new();
        loop {
            let (tcp, _) = listener.accept().await.unwrap();
            let tls = tls.clone();
            connections.spawn(async move {
                match tls {
                    Some(tls) => serve(tls.accept(tcp).await.unwrap(), answer).await,
                    None => serve(tcp, answer).await,
                }
            });
        }
    });
    (address, serving)
}

/// Envoy has aborted responses with this code (envoyproxy/envoy#36200). Behind a whole response it is in order (RFC 9113 §8.1).
#[tokio::test]
async fn a_response_that_is_cut_off_without_an_error_is_never_whole() {
    const HEAD: (u8, u8, &[u8]) = (HEADERS, frames::END_HEADERS, frames::STATUS_200);
    const RESET: (u8, u8, &[u8]) = (frames::RST_STREAM, 0, &[0; 4]);
    /// Leaves out all streams.
    const LEAVE: (u8, u8, &[u8]) = (frames::GOAWAY, 0, &[0; 8]);
    const PART: &StreamFrames = &[HEAD, (DATA, 0, b"part"), RESET];
    const LEFT: &StreamFrames = &[HEAD, (DATA, 0, b"part"), LEAVE];
    const WHOLE: &StreamFrames = &[HEAD, (DATA, frames::END_STREAM, b"part"), RESET];
    let authority = Authority::new();
    // The frames arrive together, and the GOAWAY fails the connection before the head is passed on.
    let rows = [(PART, 200, false), (LEFT, 502, false), (WHOLE, 200, true)];
    for (answer, status, is_whole) in rows {
        let tls = with_alpn(&authority.serve(&authority.app(&["edge-1"]), false));
        let (address, _app) = raw_app(answer, Some(tls)).await;
        let by_gateway = testbed(&authority, address, |_| {}).await;
        let (address, _app) = raw_app(answer, None).await;
        let by_edge = TestBed::to_as(Protocol::H2c, address).await;
        for testbed in [by_gateway, by_edge] {
            for client in [testbed.client(), testbed.http2()] {
                let mut connection = client.connect("edge-1").await.unwrap();
                let request = Request::post(URL).body(whole("upload"));
                let answer = connection.open(request.unwrap()).await.unwrap();
                assert_eq!(answer.status(), status);
                let body = answer.collect().await.map(Collected::to_bytes);
                let is_part = body.as_ref().is_ok_and(|body| body == "part");
                assert_eq!(is_part, is_whole, "{body:?}");
            }
            testbed.until_idle().await;
        }
    }
}
