//! Readers and uploads that stall: each delays only itself, and together they hold no more than the budget.

use crate::{
    testbed::{TestBed, URL},
    world::{
        app::{
            App,
            answer::{self, pattern},
        },
        client::{Body, Wire, assert_problem, exchange, read, read_head},
        frames,
        tool::full,
        until,
    },
};
use causeway_edge::config::Protocol;
use futures_util::{future::join_all, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::{
    Request,
    body::{Bytes, Frame},
};
use socket2::{Domain, Socket, Type};
use std::{
    future::pending,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::{interval, sleep, timeout},
};

const MIB: usize = 1 << 20;
/// The window that a client's stream over HTTP/2 has.
const HTTP2_WINDOW: u64 = 256 << 10;
/// The least window that a stream has.
const FLOOR: usize = 64 << 10;
/// Longer than any test.
const LONG: Duration = Duration::from_hours(1);
/// Amount in bytes by which one measurement may be late on a loaded machine.
const SLACK: usize = 24 * MIB;

fn many() -> usize {
    if full() { 2_000 } else { 200 }
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n")
}

/// An app with an endless answer, one that is `whole`, and short ones.
async fn serving(whole: &Arc<Vec<u8>>) -> App {
    let whole = whole.clone();
    App::http(move |head| match head.path().as_str() {
        "/endless" => answer::endless(),
        "/download" => answer::bytes(&whole),
        _ => answer::ok("well"),
    })
    .await
}

/// Small requests and a whole download, beside the present load.
async fn others_are_served(testbed: &TestBed, whole: &[u8]) {
    let clients = join_all((0..64).map(|_| async {
        for _ in 0..5 {
            let answer = testbed.client().get(URL).await;
            assert_eq!((answer.status, answer.text().as_str()), (200, "well"));
        }
    }));
    let download = async {
        let answer = testbed.client().get(&format!("{URL}download")).await;
        assert!(answer.body == whole, "the download is not what was sent");
    };
    let all = timeout(Duration::from_mins(5), async {
        tokio::join!(clients, download)
    });
    all.await.expect("other clients wait for stalled ones");
}

#[tokio::test]
async fn stalled_readers_block_no_client_and_stay_within_the_budget() {
    let whole = Arc::new(pattern(32 * MIB));
    let app = serving(&whole).await;
    let testbed = TestBed::to(&app).await;
    let count = many();
    let mut stalled = Vec::new();
    for _ in 0..count {
        let mut wire = testbed.tcp("plain").await;
        let head = exchange(&mut wire, get("/endless")).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        stalled.push(wire);
    }
    others_are_served(&testbed, &whole).await;
    let unread =
        async || usize::try_from(testbed.metrics().await.sum("buffered_bytes", &[])).unwrap();
    until("they stall", async || unread().await > 16 * MIB).await;
    // A second tunnel for bulk exists, and both share one budget.
    let allowed = 32 * MIB + count * FLOOR + SLACK;
    let held = unread().await;
    assert!(held <= allowed, "{held} bytes unread, {allowed} allowed");

    drop(stalled);
    until("nothing of it is left", async || {
        let metrics = testbed.metrics().await;
        metrics.sum("open_streams", &[]) == 0 && metrics.sum("buffered_bytes", &[]) == 0
    })
    .await;
    assert_eq!(
        testbed
            .metrics()
            .await
            .sum("tunnels_ended_total", &[("why", "silent")]),
        0
    );
}

/// Reads a mebibyte each second and compares it, until `over`.
async fn read_slowly(mut wire: TcpStream, over: &AtomicBool) {
    let mut pace = interval(Duration::from_millis(100));
    let mut read = 0;
    let mut part = vec![0; MIB / 10];
    while !over.load(Relaxed) {
        pace.tick().await;
        wire.read_exact(&mut part).await.unwrap();
        read += part.len();
    }
    assert!(read > 0);
}

#[tokio::test]
async fn one_stalled_and_one_slow_reader_block_no_client() {
    let whole = Arc::new(pattern(32 * MIB));
    let app = serving(&whole).await;
    let testbed = TestBed::to(&app).await;
    let mut wires = Vec::new();
    for _ in 0..2 {
        let mut wire = testbed.tcp("plain").await;
        exchange(&mut wire, get("/endless")).await;
        wires.push(wire);
    }
    let (slow, _stalled) = (wires.remove(0), wires);
    let over = AtomicBool::new(false);
    let served = async {
        others_are_served(&testbed, &whole).await;
        over.store(true, Relaxed);
    };
    tokio::join!(served, read_slowly(slow, &over));
}

#[tokio::test]
async fn uploads_that_stall_hold_no_more_at_the_edge_than_its_budget() {
    let deaf = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let testbed = TestBed::to_as(Protocol::Http, deaf.local_addr().unwrap()).await;
    let count = 48;
    let mut stalled = Vec::new();
    for _ in 0..count {
        let mut wire = testbed.tcp("plain").await;
        fill(&testbed, &mut wire).await;
        stalled.push((wire, deaf.accept().await.unwrap()));
    }
    let unread: usize = testbed
        .edge
        .status()
        .tunnels
        .iter()
        .map(|tunnel| tunnel.unread)
        .sum();
    let allowed = 2 * 64 * MIB + count * FLOOR + SLACK;
    assert!(
        unread <= allowed,
        "{unread} bytes unread, {allowed} allowed"
    );
    drop(stalled);
    until("nothing of it is left", async || {
        testbed
            .edge
            .status()
            .tunnels
            .iter()
            .all(|tunnel| tunnel.unread == 0)
    })
    .await;
}

#[tokio::test]
async fn an_upload_unread_by_the_upstream_is_504_for_every_protocol() {
    let deaf = deaf();
    let build = TestBed::build().config(|config| config.timeouts.upload = Duration::from_secs(2));
    let testbed = TestBed::along(build, Protocol::Http, deaf.local_addr().unwrap()).await;
    let (mut stays, mut leaves) = (testbed.tcp("plain").await, testbed.tcp("plain").await);
    fill(&testbed, &mut leaves).await;
    // While own bytes are still in flight this is a FIN, which a peer that does not read does not notice. On a slow machine the
    // gateway may have reset the connection before.
    let _ = leaves.shutdown().await;
    let head = upload_until_answered(&mut stays).await;
    assert!(head.starts_with("HTTP/1.1 504 "), "{head}");
    assert!(head.contains("target_timeout"), "{head}");
    until("nothing is left of either", async || {
        testbed.metrics().await.sum("open_streams", &[]) == 0
    })
    .await;
}

#[tokio::test]
async fn too_much_unread_data_gives_new_requests_503_until_it_ends() {
    let app = serving(&Arc::default()).await;
    let build = TestBed::build().config(|config| config.limits.buffered_bytes = FLOOR / 2);
    let testbed = TestBed::along(build, Protocol::Http, app.address()).await;
    let mut stalled: TcpStream = testbed.tcp("plain").await;
    exchange(&mut stalled, get("/endless")).await;
    // The number of unread bytes varies until the systems' buffers are full as well.
    until("new clients are refused", async || {
        let answer = testbed.client().get(URL).await;
        let refused = answer.status == 503;
        if refused {
            assert_problem(&answer, 503, "limit_reached", "(limits.buffered_bytes)");
        }
        refused
    })
    .await;
    drop(stalled);
    until("clients are served again", async || {
        testbed.client().get(URL).await.status == 200
    })
    .await;
}

#[tokio::test]
async fn stalled_http2_uploads_count_as_unread_and_others_pass() {
    let app = App::saying("well").await;
    let deaf = deaf();
    let build = TestBed::build().config(|config| config.limits.buffered_bytes = 4 * MIB);
    let world = build.start().await;
    let edge = world.edge("edge-1").port(9100, app.address());
    let edge = edge.port(9101, deaf.local_addr().unwrap()).join().await;
    let testbed = TestBed::of(world, edge);
    let unread = async || testbed.metrics().await.sum("buffered_bytes", &[]);

    let mut connection = testbed.http2().connect("edge-1").await.unwrap();
    let mut stalled: Vec<_> = (0..6).map(|_| connection.hold(endless())).collect();
    until("six windows count", async || {
        unread().await >= 6 * HTTP2_WINDOW
    })
    .await;
    for _ in 0..50 {
        let answer = connection.get(URL).await.unwrap();
        assert_eq!((answer.status, answer.text().as_str()), (200, "well"));
    }

    stalled.extend((0..20).map(|_| connection.hold(endless())));
    let limit = 4 * u64::try_from(MIB).unwrap();
    until("the limit is reached", async || unread().await >= limit).await;
    // The number varies until the systems' buffers are full as well.
    until(
        "a new stream on the same connection is refused",
        async || {
            let answer = connection.get(URL).await.unwrap();
            let refused = answer.status != 200;
            if refused {
                assert_problem(&answer, 503, "limit_reached", "(limits.buffered_bytes)");
            }
            refused
        },
    )
    .await;
    // Bytes that were admitted before have a window, and a chunk in flight.
    let most = limit + 26 * (HTTP2_WINDOW + 32 * 1024);
    assert!(unread().await <= most, "{} of {most}", unread().await);

    drop(stalled);
    testbed.until_idle().await;
    until("nothing of it is left", async || unread().await == 0).await;
    assert_eq!(connection.get(URL).await.unwrap().status, 200);
}

#[tokio::test]
async fn stalled_http1_uploads_count_by_bytes_read_at_the_gateway() {
    let deaf = deaf();
    let testbed = TestBed::to_as(Protocol::Http, deaf.local_addr().unwrap()).await;
    let unread = async || testbed.metrics().await.sum("buffered_bytes", &[]);
    let mut wire = testbed.tcp("plain").await;
    fill(&testbed, &mut wire).await;
    until("the read bytes count", async || unread().await > 0).await;
    assert!(unread().await <= 2 * 128 * 1024, "{}", unread().await);
    // If only the client left, the gateway might not notice it, behind the client's unread bytes.
    drop((wire, deaf));
    until("nothing of it is left", async || unread().await == 0).await;
}

/// An app that accepts connections and reads nothing from them; its system buffers nothing either.
fn deaf() -> std::net::TcpListener {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let any = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    socket.bind(&any.into()).unwrap();
    socket.listen(128).unwrap();
    socket.into()
}

/// An upload to the app that reads nothing.
fn endless() -> Request<Body> {
    let endless = stream::repeat_with(|| Ok(Frame::data(Bytes::from(vec![0; 64 << 10]))));
    let body = BodyExt::boxed(StreamBody::new(endless));
    Request::post("https://edge-1:9101/").body(body).unwrap()
}

/// Number of requests to the gateway during which each task of this thread runs repeatedly.
const TURNS: usize = 10;

/// Head of an upload.
const UPLOAD: &str = "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nContent-Length: 1000000000\r\n\r\n";

/// Uploads until no more bytes are accepted.
async fn fill(testbed: &TestBed, wire: &mut impl Wire) {
    wire.write_all(UPLOAD.as_bytes()).await.unwrap();
    let chunk = vec![0; 64 << 10];
    loop {
        let is_full = async {
            sleep(Duration::from_millis(500)).await;
            // Time alone proves nothing: a paused machine stops the gateway and the edge as well.
            for _ in 0..TURNS {
                testbed.metrics().await;
            }
        };
        let written = tokio::select! {
            biased;
            written = wire.write_all(&chunk) => written,
            () = is_full => return,
        };
        // The upload was evicted meanwhile.
        if written.is_err() {
            return;
        }
    }
}

/// Uploads until the head of an answer comes, and returns it. A client that stopped before would be waited for if buffers on the
/// way still had room.
async fn upload_until_answered(wire: &mut impl Wire) -> String {
    let (mut reading, mut writing) = tokio::io::split(wire);
    let uploading = async {
        let mut written = writing.write_all(UPLOAD.as_bytes()).await;
        let chunk = vec![0; 64 << 10];
        while written.is_ok() {
            written = writing.write_all(&chunk).await;
        }
        pending::<()>().await;
    };
    tokio::select! {
        head = read_head(&mut reading) => head,
        () = uploading => unreachable!("it ends with the head"),
    }
}

/// Bytes that a stalled stream counts at least.
const OVERHEAD: usize = 320 << 10;

/// Readers that read only the head of an endless answer, if they get one.
async fn stall(testbed: &TestBed, count: usize) -> Vec<TcpStream> {
    let mut stalled = Vec::new();
    for _ in 0..count {
        let mut wire = testbed.tcp("plain").await;
        wire.write_all(get("/endless").as_bytes()).await.unwrap();
        stalled.push(wire);
    }
    stalled
}

/// A client over HTTP/2 that requests this many endless answers and reads no byte, with this window for each stream and the
/// maximum for the connection. Frames have the size that all clients accept.
async fn reads_nothing(testbed: &TestBed, window: u32, streams: u32) -> TcpStream {
    const INITIAL_WINDOW_SIZE: u16 = 4;
    const MAX_FRAME_SIZE: u16 = 5;
    let mut wire = testbed.tcp("plain").await;
    let more = ((1_u32 << 31) - 1 - 65_535).to_be_bytes();
    let mut begin = frames::PREFACE.to_vec();
    let values = [(INITIAL_WINDOW_SIZE, window), (MAX_FRAME_SIZE, 16 << 10)];
    begin.extend(frames::settings(&values));
    begin.extend(frames::frame(frames::WINDOW_UPDATE, 0, 0, &more));
    let head = frames::fields(&[
        (":method", "GET"),
        (":scheme", "http"),
        (":path", "/endless"),
        (":authority", "edge-1:9100"),
    ]);
    let flags = frames::END_STREAM | frames::END_HEADERS;
    for stream in 0..streams {
        let head = frames::frame(frames::HEADERS, flags, 1 + 2 * stream, &head);
        begin.extend(head);
    }
    wire.write_all(&begin).await.unwrap();
    wire
}

/// Clients over HTTP/2 that read nothing, with this window, beside others.
async fn stalled_over_http2(window: u32) {
    const STREAMS: u32 = 50;
    let whole = Arc::new(pattern(32 * MIB));
    let app = serving(&whole).await;
    // The edge closes no tunnel by itself, however long the test takes.
    let testbed = at_edge(app.address(), |config| config.tunnels.bulk_idle = LONG).await;
    // At most as many as may stall: none of them may be evicted.
    let mut stalled = Vec::new();
    for _ in 0..4 {
        stalled.push(reads_nothing(&testbed, window, STREAMS).await);
    }
    let count = 4 * usize::try_from(STREAMS).unwrap();
    until("all are open", async || {
        open_streams(&testbed).await == count
    })
    .await;
    others_are_served(&testbed, &whole).await;
    let unread =
        async || usize::try_from(testbed.metrics().await.sum("buffered_bytes", &[])).unwrap();
    until("they stall", async || unread().await > 4 * MIB).await;
    // A second tunnel for bulk exists, and both share one budget.
    let allowed = 32 * MIB + count * FLOOR + SLACK;
    let held = unread().await;
    assert!(held <= allowed, "{held} bytes unread, {allowed} allowed");
    until(
        "no other stream is open, and none was evicted",
        async || open_streams(&testbed).await == count,
    )
    .await;
    drop(stalled);
    until("nothing of it is left", async || {
        open_streams(&testbed).await == 0 && unread().await == 0
    })
    .await;
    assert_eq!(testbed.metrics().await.sum("tunnels_ended_total", &[]), 0);
}

#[tokio::test]
async fn http2_readers_with_default_windows_stay_within_the_budget() {
    Box::pin(stalled_over_http2(65_535)).await;
}

#[tokio::test]
async fn http2_readers_with_large_windows_stay_within_the_budget() {
    if full() {
        Box::pin(stalled_over_http2((1 << 31) - 1)).await;
    }
}

/// Sends one more request on a session that was open before.
async fn goes_on(session: &mut TcpStream) {
    let head = exchange(session, get("/")).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert_eq!(read(session, 4).await, b"well");
}

async fn open_streams(testbed: &TestBed) -> usize {
    usize::try_from(testbed.metrics().await.sum("open_streams", &[])).unwrap()
}

async fn evicted(testbed: &TestBed, reason: &str) -> u64 {
    let metrics = testbed.metrics().await;
    metrics.sum("evicted_streams_total", &[("reason", reason)])
}

/// Starts an edge with another configuration.
async fn at_edge(app: SocketAddr, change: impl FnOnce(&mut causeway_edge::Config)) -> TestBed {
    let world = TestBed::build().start().await;
    let edge = world.edge("edge-1").port(9100, app).config(change);
    let edge = edge.join().await;
    TestBed::of(world, edge)
}

#[tokio::test]
async fn only_stalled_readers_beyond_the_bound_are_reset() {
    let whole = Arc::new(pattern(4 * MIB));
    let app = serving(&whole).await;
    let bound = 40 * MIB;
    let build = TestBed::build().config(|config| {
        config.tunnel.memory = 4 * MIB;
        config.limits.stalled = bound;
    });
    let testbed = TestBed::along(build, Protocol::Http, app.address()).await;
    let mut session = testbed.tcp("bytes").await;
    goes_on(&mut session).await;
    let stalled = stall(&testbed, 300).await;
    until("at most the limit of streams stalls", async || {
        let open = open_streams(&testbed).await;
        evicted(&testbed, "memory").await > 0 && open <= bound / OVERHEAD + 1
    })
    .await;
    others_are_served(&testbed, &whole).await;
    goes_on(&mut session).await;
    assert!(
        open_streams(&testbed).await > 1,
        "streams below the limit stay"
    );
    drop(stalled);
    until("only the session stays", async || {
        open_streams(&testbed).await == 1
    })
    .await;
}

#[tokio::test]
async fn stalled_http2_streams_are_reset_and_the_connection_continues() {
    let whole = Arc::new(pattern(4 * MIB));
    let app = serving(&whole).await;
    let bound = 20 * MIB;
    let build = TestBed::build().config(|config| {
        config.tunnel.memory = 4 * MIB;
        config.limits.stalled = bound;
    });
    let testbed = TestBed::along(build, Protocol::Http, app.address()).await;
    let mut connection = testbed.http2().connect("edge-1").await.unwrap();
    let ask = || {
        let request = Request::get(format!("{URL}endless"));
        request.body(crate::world::client::whole("")).unwrap()
    };
    let stalled: Vec<_> = (0..200).map(|_| connection.hold(ask())).collect();
    until("at most the limit of streams stalls", async || {
        let open = open_streams(&testbed).await;
        evicted(&testbed, "memory").await > 0 && open <= bound / OVERHEAD
    })
    .await;
    others_are_served(&testbed, &whole).await;
    drop(stalled);
    assert_eq!(connection.get(URL).await.unwrap().status, 200);
}

#[tokio::test]
async fn an_http2_client_that_reads_no_bytes_loses_its_connection() {
    let app = serving(&Arc::default()).await;
    let build = TestBed::build().config(|config| {
        config.tunnel.memory = 4 * MIB;
        config.limits.stalled = 8 * MIB;
    });
    let testbed = TestBed::along(build, Protocol::Http, app.address()).await;
    let _wire = reads_nothing(&testbed, 1 << 30, 100).await;
    until("its streams are reset", async || {
        evicted(&testbed, "memory").await > 0
    })
    .await;
    until("its connection ends", async || {
        let metrics = testbed.metrics().await;
        metrics.sum("open_connections", &[("listener", "plain")]) == 0
    })
    .await;
    assert_eq!(testbed.client().get(URL).await.text(), "well");
}

#[tokio::test]
async fn stalled_streams_beyond_the_edges_bound_are_reset_there() {
    let whole = Arc::new(pattern(4 * MIB));
    let app = serving(&whole).await;
    let testbed = at_edge(app.address(), |config| config.limits.stalled = 4 * MIB).await;
    let _stalled = stall(&testbed, 100).await;
    until(
        "the edge has reset the streams beyond its limit",
        async || {
            let open = open_streams(&testbed).await;
            testbed.metrics().await.outcomes("plain", "limit_reached") > 0
                && open <= 4 * MIB / OVERHEAD
        },
    )
    .await;
    others_are_served(&testbed, &whole).await;
}

#[tokio::test]
async fn stalled_uploads_beyond_the_edges_bound_are_reset_there() {
    let deaf = deaf();
    let testbed = at_edge(deaf.local_addr().unwrap(), |config| {
        config.limits.stalled = 4 * MIB;
    })
    .await;
    let mut stalled = Vec::new();
    for _ in 0..24 {
        let mut wire = testbed.tcp("plain").await;
        fill(&testbed, &mut wire).await;
        stalled.push(wire);
    }
    until("at most the limit of streams stalls", async || {
        open_streams(&testbed).await <= 4 * MIB / OVERHEAD
    })
    .await;
}

#[tokio::test]
async fn low_kernel_tcp_memory_resets_stalled_streams() {
    let app = serving(&Arc::default()).await;
    let testbed = at_edge(app.address(), |config| config.limits.tcp_memory = 1).await;
    // The edge resets none of them if they together cannot hold an eighth of the kernel's memory, which other tests fill as
    // well: 32 are enough for gigabytes.
    let _stalled = stall(&testbed, 32).await;
    until("streams are reset", async || {
        testbed.metrics().await.outcomes("plain", "limit_reached") >= 4
    })
    .await;
    assert_eq!(testbed.client().get(URL).await.text(), "well");
}

#[tokio::test]
async fn an_unread_answer_times_out_and_a_session_does_not() {
    let app = serving(&Arc::default()).await;
    let build = TestBed::build().config(|config| config.timeouts.download = Duration::from_secs(1));
    let testbed = TestBed::along(build, Protocol::Http, app.address()).await;
    let mut session = testbed.tcp("bytes").await;
    exchange(&mut session, get("/endless")).await;
    let _stalled = stall(&testbed, 3).await;
    until("the answers are cancelled", async || {
        evicted(&testbed, "time").await == 3
    })
    .await;
    until("the session stays", async || {
        open_streams(&testbed).await == 1
    })
    .await;
    // It has stalled longest of the four. Less than this is in buffers of its path.
    for _ in 0..64 {
        read(&mut session, MIB).await;
    }
}

#[tokio::test]
async fn an_edge_with_all_streams_open_refuses_more_with_the_reason() {
    let app = serving(&Arc::default()).await;
    let testbed = at_edge(app.address(), |config| config.limits.streams = 1).await;
    let mut session = testbed.tcp("bytes").await;
    goes_on(&mut session).await;
    let refused = testbed.client().get(URL).await;
    assert_problem(&refused, 503, "node_limit_reached", "(limits.streams)");
    drop(session);
    until("a connection is free again", async || {
        testbed.client().get(URL).await.status == 200
    })
    .await;
}

/// An app whose system buffers as much of an answer as by default: megabytes.
async fn roomy() -> (SocketAddr, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        loop {
            let (mut wire, _) = listener.accept().await.unwrap();
            connections.spawn(async move {
                loop {
                    let head = read_head(&mut wire).await;
                    let length = if head.contains("/large") { 4 * MIB } else { 4 };
                    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n");
                    let body = if length == 4 {
                        b"well".to_vec()
                    } else {
                        vec![0; length]
                    };
                    let written = async {
                        wire.write_all(answer.as_bytes()).await?;
                        wire.write_all(&body).await
                    };
                    if head.is_empty() || written.await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    (address, tasks)
}

#[tokio::test]
async fn thousands_of_stalled_readers_leave_a_node_usable() {
    if !full() {
        return;
    }
    let (app, _tasks) = roomy().await;
    let build = TestBed::build().config(|config| config.limits.tcp_memory = 0);
    let world = build.start().await;
    let edge = world.edge("edge-1").port(9100, app);
    let edge = edge
        .config(|config| {
            config.limits.tcp_memory = 0;
            config.tunnels.bulk_idle = LONG;
        })
        .join()
        .await;
    let testbed = TestBed::of(world, edge);
    let mut session = testbed.tcp("bytes").await;
    goes_on(&mut session).await;

    let mut readers = Vec::new();
    for _ in 0..2_000 {
        let mut wire = testbed.tcp("plain").await;
        wire.write_all(get("/large").as_bytes()).await.unwrap();
        readers.push(wire);
    }
    let mut connections = Vec::new();
    for _ in 0..40 {
        let connection = testbed.http2().connect("edge-1").await.unwrap();
        let ask = || {
            let request = Request::get(format!("{URL}large"));
            request.body(crate::world::client::whole("")).unwrap()
        };
        let held: Vec<_> = (0..250).map(|_| connection.hold(ask())).collect();
        connections.push((connection, held));
    }
    for _ in 0..20 {
        let answer = testbed.client().get(URL).await;
        // For a moment the edge may have as many streams as it accepts.
        assert!([200, 503].contains(&answer.status), "{}", answer.status);
        goes_on(&mut session).await;
    }
    until("answers arrive again", async || {
        testbed.client().get(URL).await.status == 200
    })
    .await;
    assert_eq!(testbed.metrics().await.sum("tunnels_ended_total", &[]), 0);
}
