//! Readers and uploads that stall: each holds up itself, and all of them hold no more than the budget.

use crate::{
    road::{Road, URL},
    world::{
        app::{
            App,
            answer::{self, pattern},
        },
        caller::{Body, Wire, assert_problem, exchange},
        tool::full,
        until,
    },
};
use causeway_edge::config::Scheme;
use futures_util::{future::join_all, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::{
    Request,
    body::{Bytes, Frame},
};
use socket2::{Domain, Socket, Type};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::{interval, timeout},
};

const MIB: usize = 1 << 20;
/// The window that a caller's stream over HTTP/2 has.
const HTTP2_WINDOW: u64 = 256 << 10;
/// The least window that a stream has.
const FLOOR: usize = 64 << 10;
/// What one look may come late by, on a loaded machine.
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

/// Small requests and a whole download, beside whatever else there is.
async fn others_are_served(road: &Road, whole: &[u8]) {
    let callers = join_all((0..64).map(|_| async {
        for _ in 0..5 {
            let answer = road.caller().get(URL).await;
            assert_eq!((answer.status, answer.text().as_str()), (200, "well"));
        }
    }));
    let download = async {
        let answer = road.caller().get(&format!("{URL}download")).await;
        assert!(answer.body == whole, "the download is not what was sent");
    };
    let all = timeout(Duration::from_mins(5), async {
        tokio::join!(callers, download)
    });
    all.await.expect("others wait for those who stall");
}

#[tokio::test]
async fn readers_that_stall_hold_up_nobody_and_no_more_than_the_budget() {
    let whole = Arc::new(pattern(32 * MIB));
    let app = serving(&whole).await;
    let road = Road::to(&app).await;
    let count = many();
    let mut stalled = Vec::new();
    for _ in 0..count {
        let mut wire = road.tcp("plain").await;
        let head = exchange(&mut wire, get("/endless")).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        stalled.push(wire);
    }
    others_are_served(&road, &whole).await;
    let unread = usize::try_from(road.metrics().await.sum("unread_bytes", &[])).unwrap();
    // Bulk has brought a second tunnel, and both share one budget.
    let allowed = 32 * MIB + count * FLOOR + SLACK;
    assert!(
        unread <= allowed,
        "{unread} bytes unread, {allowed} allowed"
    );
    assert!(
        unread > 16 * MIB,
        "{unread} bytes unread: nobody has stalled"
    );

    drop(stalled);
    until("nothing of it stays", async || {
        let metrics = road.metrics().await;
        metrics.sum("open_streams", &[]) == 0 && metrics.sum("unread_bytes", &[]) == 0
    })
    .await;
    assert_eq!(
        road.metrics()
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
async fn one_that_stalls_and_one_that_is_slow_hold_up_nobody() {
    let whole = Arc::new(pattern(32 * MIB));
    let app = serving(&whole).await;
    let road = Road::to(&app).await;
    let mut wires = Vec::new();
    for _ in 0..2 {
        let mut wire = road.tcp("plain").await;
        exchange(&mut wire, get("/endless")).await;
        wires.push(wire);
    }
    let (slow, _stalled) = (wires.remove(0), wires);
    let over = AtomicBool::new(false);
    let served = async {
        others_are_served(&road, &whole).await;
        over.store(true, Relaxed);
    };
    tokio::join!(served, read_slowly(slow, &over));
}

#[tokio::test]
async fn uploads_that_stall_hold_no_more_at_the_edge_than_its_budget() {
    let deaf = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let road = Road::to_as(Scheme::Http, deaf.local_addr().unwrap()).await;
    let count = 48;
    let mut stalled = Vec::new();
    for _ in 0..count {
        let mut wire = road.tcp("plain").await;
        fill(&mut wire).await;
        stalled.push((wire, deaf.accept().await.unwrap()));
    }
    let unread: usize = road
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
    until("nothing of it stays", async || {
        road.edge
            .status()
            .tunnels
            .iter()
            .all(|tunnel| tunnel.unread == 0)
    })
    .await;
}

#[tokio::test]
async fn an_upload_of_which_the_app_takes_nothing_is_504_however_its_caller_went() {
    let deaf = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let build = Road::build().config(|config| config.timeouts.upload = Duration::from_secs(2));
    let road = Road::along(build, Scheme::Http, deaf.local_addr().unwrap()).await;
    let (mut stays, mut leaves) = (road.tcp("plain").await, road.tcp("plain").await);
    fill(&mut stays).await;
    fill(&mut leaves).await;
    // With bytes of its own still on the way this is a FIN, of which nobody hears who does not read.
    leaves.shutdown().await.unwrap();
    let head = crate::world::caller::read_head(&mut stays).await;
    assert!(head.starts_with("HTTP/1.1 504 "), "{head}");
    assert!(head.contains("target_timeout"), "{head}");
    until("nothing is left of either", async || {
        road.metrics().await.sum("open_streams", &[]) == 0
    })
    .await;
}

#[tokio::test]
async fn where_callers_leave_too_much_unread_new_ones_get_503_until_that_is_over() {
    let app = serving(&Arc::default()).await;
    let build = Road::build().config(|config| config.limits.unread = FLOOR / 2);
    let road = Road::along(build, Scheme::Http, app.address()).await;
    let mut stalled: TcpStream = road.tcp("plain").await;
    exchange(&mut stalled, get("/endless")).await;
    // What is unread goes up and down until the systems' buffers are full as well.
    until("new callers are refused", async || {
        let answer = road.caller().get(URL).await;
        let refused = answer.status == 503;
        if refused {
            assert_problem(&answer, 503, "limit_reached", "(limits.unread)");
        }
        refused
    })
    .await;
    drop(stalled);
    until("callers are served again", async || {
        road.caller().get(URL).await.status == 200
    })
    .await;
}

#[tokio::test]
async fn uploads_over_http2_that_stall_count_as_unread_and_others_on_their_connection_pass() {
    let app = App::saying("well").await;
    let deaf = deaf();
    let build = Road::build().config(|config| config.limits.unread = 4 * MIB);
    let world = build.start().await;
    let edge = world.edge("edge-1").port(9100, app.address());
    let edge = edge.port(9101, deaf.local_addr().unwrap()).join().await;
    let road = Road::of(world, edge);
    let unread = async || road.metrics().await.sum("unread_bytes", &[]);

    let mut connection = road.http2().connect("edge-1").await.unwrap();
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
    // It goes up and down until the systems' buffers are full as well.
    until("a new one on the same connection is refused", async || {
        let answer = connection.get(URL).await.unwrap();
        let refused = answer.status != 200;
        if refused {
            assert_problem(&answer, 503, "limit_reached", "(limits.unread)");
        }
        refused
    })
    .await;
    // Whatever was let in before has a window, and a chunk on its way.
    let most = limit + 26 * (HTTP2_WINDOW + 32 * 1024);
    assert!(unread().await <= most, "{} of {most}", unread().await);

    drop(stalled);
    road.until_idle().await;
    until("nothing of it stays", async || unread().await == 0).await;
    assert_eq!(connection.get(URL).await.unwrap().status, 200);
}

#[tokio::test]
async fn uploads_over_http1_that_stall_count_for_what_the_gateway_has_read_of_them() {
    let deaf = deaf();
    let road = Road::to_as(Scheme::Http, deaf.local_addr().unwrap()).await;
    let unread = async || road.metrics().await.sum("unread_bytes", &[]);
    let mut wire = road.tcp("plain").await;
    fill(&mut wire).await;
    until("what was read counts", async || unread().await > 0).await;
    assert!(unread().await <= 2 * 128 * 1024, "{}", unread().await);
    // Its caller alone could go unheard, behind bytes of its own that nobody reads.
    drop((wire, deaf));
    until("nothing of it stays", async || unread().await == 0).await;
}

/// An app that takes connections and reads nothing of them; neither does its system.
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

/// Uploads until nothing is taken any more.
async fn fill(wire: &mut impl Wire) {
    let head = "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nContent-Length: 1000000000\r\n\r\n";
    wire.write_all(head.as_bytes()).await.unwrap();
    let chunk = vec![0; 64 << 10];
    while let Ok(written) = timeout(Duration::from_millis(500), wire.write_all(&chunk)).await {
        written.unwrap();
    }
}
