//! Streams to upstreams that speak HTTP/2. They share connections, and no stream waits for the end of another.

use super::*;
use causeway_upstream::http2_pool::MAX_CONNECTIONS;
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// HTTP/2 upstream. It does not answer `/watch` at all, nor `/herd` on the first connection.
struct App {
    /// Maximum number of simultaneous streams of a connection.
    allows: u32,
    connections: AtomicUsize,
    closed: AtomicUsize,
    /// One permit for each waiting request.
    waiting: Semaphore,
    /// Token that ends the first connection.
    over: CancellationToken,
}

impl App {
    /// Starts the upstream, and an edge whose port 80 leads to it.
    async fn start(allows: u32, timeouts: Value) -> (World, Arc<Self>, TaskGroup) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = listener.local_addr().unwrap().to_string();
        let app = Arc::new(Self {
            allows,
            connections: AtomicUsize::new(0),
            closed: AtomicUsize::new(0),
            waiting: Semaphore::new(0),
            over: CancellationToken::new(),
        });
        let tasks = TaskGroup::default();
        tasks.spawn(tracing::info_span!("app"), app.clone().serve(listener));
        let port = json!({ "target": target, "scheme": "h2c" });
        let world = World::start(json!({ "ports": { "80": port }, "timeouts": timeouts })).await;
        (world, app, tasks)
    }

    async fn serve(self: Arc<Self>, listener: TcpListener) {
        let connections = TaskGroup::default();
        while let Ok((tcp, _)) = listener.accept().await {
            let app = self.clone();
            connections.spawn(tracing::info_span!("app"), app.connection(tcp));
        }
    }

    async fn connection(self: Arc<Self>, tcp: TcpStream) {
        let first = self.connections.fetch_add(1, SeqCst) == 0;
        let service = hyper::service::service_fn(|request: Request<hyper::body::Incoming>| {
            let path = request.uri().path();
            let waits = path == "/watch" || path == "/herd" && first;
            if waits {
                self.waiting.add_permits(1);
            }
            async move {
                if waits {
                    std::future::pending::<()>().await;
                }
                Ok::<_, Infallible>(Response::new(String::from("ok")))
            }
        });
        let serving = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .max_concurrent_streams(self.allows)
            .serve_connection(TokioIo::new(tcp), service);
        tokio::select! {
            _ = serving => {}
            () = self.over.cancelled(), if first => {}
        }
        self.closed.fetch_add(1, SeqCst);
    }

    /// Waits until this number of further requests are waiting.
    async fn watched(&self, times: u32) {
        let waiting = timeout(SOON, self.waiting.acquire_many(times)).await;
        waiting.expect("each reached the app").unwrap().forget();
    }
}

async fn watch(world: &World, times: usize) -> Vec<gateway_side::OpenStream> {
    let mut watches = Vec::new();
    for _ in 0..times {
        watches.push(
            world
                .open(get("/watch"), StreamKind::Request, "edge-1:80", true)
                .await,
        );
    }
    watches
}

#[tokio::test]
async fn streams_over_the_http2_limit_share_a_temporary_connection() {
    let (world, app, _tasks) = App::start(2, json!({ "upstream_idle": "1ms" })).await;
    let watches = watch(&world, 5).await;
    app.watched(5).await;
    assert_eq!(app.connections.load(SeqCst), 3);
    assert_eq!(text(world.get("/").await.into_body()).await.unwrap(), "ok");
    assert_eq!(app.connections.load(SeqCst), 3);
    world.way.sweep();
    assert_eq!(app.closed.load(SeqCst), 0);
    drop(watches);
    let surplus_closes = async {
        while app.closed.load(SeqCst) < 2 {
            world.way.sweep();
            tokio::task::yield_now().await;
        }
    };
    timeout(SOON, surplus_closes).await.unwrap();
    assert_eq!(text(world.get("/").await.into_body()).await.unwrap(), "ok");
    assert_eq!(app.connections.load(SeqCst), 3);
}

#[tokio::test]
async fn a_stream_at_the_http2_limit_waits_for_a_slot_within_a_bound() {
    let (world, app, _tasks) = App::start(1, json!({ "dial": "30s" })).await;
    let mut watches = Vec::new();
    for _ in 0..MAX_CONNECTIONS {
        watches.extend(watch(&world, 1).await);
        app.watched(1).await;
    }
    let answer = pass_until(&world, world.get("/")).await;
    let (reason, detail) = failure(&answer);
    assert_eq!(reason, "target-timeout", "{detail}");
    assert!(
        detail.contains("has reached its own limit of streams"),
        "{detail}"
    );
    let waiting = world
        .open(get("/"), StreamKind::Request, "edge-1:80", true)
        .await;
    watches.pop();
    let answer = timeout(SOON, waiting.response).await.unwrap().unwrap();
    assert_eq!(text(answer.into_body()).await.unwrap(), "ok");
    assert_eq!(app.connections.load(SeqCst), MAX_CONNECTIONS);
}

#[tokio::test]
async fn streams_of_a_closed_connection_share_the_next_connection() {
    let (world, app, _tasks) = App::start(1_000, json!({})).await;
    assert_eq!(text(world.get("/").await.into_body()).await.unwrap(), "ok");
    let mut herd = Vec::new();
    for _ in 0..100 {
        let opened = world.open(get("/herd"), StreamKind::Request, "edge-1:80", true);
        herd.push(opened.await);
    }
    app.watched(100).await;
    app.over.cancel();
    for opened in herd {
        let answer = timeout(SOON, opened.response).await.unwrap().unwrap();
        assert_eq!(failure(&answer), ("", ""));
        assert_eq!(text(answer.into_body()).await.unwrap(), "ok");
    }
    assert_eq!(app.connections.load(SeqCst), 2);
}

#[tokio::test]
async fn a_request_that_goes_on_over_http1_has_its_form() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = listener.local_addr().unwrap().to_string();
    let port = json!({ "target": target, "scheme": "https", "verify": false });
    let world = World::start(json!({ "ports": { "80": port } })).await;
    let ca = Ca::create(&TrustDomain::parse("site").unwrap()).unwrap();
    let names = [ListenerName::parse("localhost").unwrap()];
    let leaf = ca.issue_listener(&names, Duration::from_hours(1)).unwrap();
    let accept = async |alpn: &[&[u8]]| {
        let trust = TrustStore::from_ca(&ca).unwrap();
        let server = listener_server(
            leaf.resolver(),
            &trust,
            CertificateRequirement::Optional,
            alpn,
        )
        .unwrap();
        let (tcp, _) = listener.accept().await.unwrap();
        let acceptor = tokio_rustls::TlsAcceptor::from(server);
        acceptor.accept(tcp).await.unwrap()
    };
    let app = async {
        let second = CancellationToken::new();
        let service = hyper::service::service_fn(|request: Request<hyper::body::Incoming>| {
            let waits = request.uri().path() == "/second";
            if waits {
                second.cancel();
            }
            async move {
                if waits {
                    std::future::pending::<()>().await;
                }
                Ok::<_, Infallible>(Response::new(String::from("ok")))
            }
        });
        let io = TokioIo::new(accept(&[b"h2"]).await);
        let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        tokio::select! {
            _ = builder.serve_connection(io, service) => {}
            () = second.cancelled() => {}
        }
        let mut tls = accept(&[b"http/1.1"]).await;
        let mut head = vec![0; 4096];
        let read = tls.read(&mut head).await.unwrap();
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        tls.write_all(answer).await.unwrap();
        tls.flush().await.unwrap();
        String::from_utf8(head[..read].to_vec()).unwrap()
    };
    let client = async {
        let first = world.get("/").await;
        assert_eq!(text(first.into_body()).await.unwrap(), "ok");
        let second = world.get("/second").await;
        assert_eq!(failure(&second), ("", ""));
    };
    let (head, ()) = timeout(SOON, async { tokio::join!(app, client) })
        .await
        .unwrap();
    assert!(head.starts_with("GET /second HTTP/1.1\r\nHost: "), "{head}");
}

#[tokio::test]
async fn an_app_that_does_not_begin_http2_is_a_target_that_failed() {
    for (says, dial, reason, words) in [
        (&b""[..], "300ms", "target-timeout", "did not start HTTP/2"),
        (b"HTTP/1.1 400 No\r\n\r\n", "2m", "target-broken", "HTTP/2"),
    ] {
        let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = app.local_addr().unwrap().to_string();
        let port = json!({ "target": target, "scheme": "h2c" });
        let config = json!({ "ports": { "80": port }, "timeouts": { "dial": dial } });
        let world = World::start(config).await;
        let serving = async {
            let mut app = accept(&app).await;
            app.write_all(says).await.unwrap();
            app
        };
        let (answer, _app) = tokio::join!(world.get("/"), serving);
        let (failed, detail) = failure(&answer);
        assert_eq!(failed, reason, "{detail}");
        assert!(detail.contains(words), "{detail}");
    }
}

/// Returns an HTTP/2 frame with a short payload.
fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap();
    let head = [0, 0, length, kind, flags, 0, 0, 0, stream];
    [&head[..], payload].concat()
}

/// Reads up to and including a HEADERS frame.
async fn asked(app: &mut TcpStream) {
    app.read_exact(&mut [0; 24]).await.unwrap();
    let mut head = [0; 9];
    while head[3] != 1 {
        app.read_exact(&mut head).await.unwrap();
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; usize::try_from(length).unwrap()];
        app.read_exact(&mut payload).await.unwrap();
    }
}

#[tokio::test]
async fn endless_interim_answers_over_http2_are_target_broken() {
    let (world, app) = World::with_app_as("h2c").await;
    let serving = async {
        let mut app = accept(&app).await;
        app.write_all(&frame(4, 0, 0, &[])).await.unwrap();
        asked(&mut app).await;
        // The frame has `:status` 103, never indexed.
        let hints = frame(1, 4, 1, b"\x08\x03103").repeat(100);
        while app.write_all(&hints).await.is_ok() {}
    };
    let (answer, ()) = timeout(SOON, async { tokio::join!(world.get("/"), serving) })
        .await
        .unwrap();
    let (reason, detail) = failure(&answer);
    assert_eq!(reason, "target-broken", "{detail}");
    assert!(
        detail.contains("too many interim responses") && detail.contains("on edge-1"),
        "{detail}"
    );
}
