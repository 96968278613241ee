//! Hundreds of clients that misbehave: their cost falls on themselves, and no resource stays in use.
//!
//! Gateway and edge are processes, so that the test can count their files and threads from outside. With
//! `CAUSEWAY_TEST_FULL=1` each attack lasts as long as the promise says, and memory and CPU time are measured.

use crate::{
    testbed::{TestBed, URL},
    world::{
        PATIENCE,
        app::{App, answer},
        client::{read, read_head},
        frames::{
            ACK, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PING, PREFACE, RST_STREAM,
            WINDOW_UPDATE, fields, frame, next, send, settings,
        },
        process::{GatewayProcess, Process, Usage},
        tool::{full, need},
        until,
    },
};
use futures_util::{
    FutureExt,
    future::{join_all, select_all},
};
use socket2::SockRef;
use std::{cell::Cell, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, interval, sleep, timeout},
};

const LISTENER: &str = "listeners: [{ name: web, protocol: http, listen: \"127.0.0.1:0\", port: 9100, anonymous: true }]";
const GET: &str = "GET / HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
/// Time that a gateway gives clients for a head, unless its configuration says otherwise.
const HEADER: Duration = Duration::from_secs(10);

/// An edge keeps some idle connections to its app.
const KEPT: usize = 64;
/// Growth of memory in bytes that is allowed since an earlier crowd of the same size.
const GROWTH: usize = 64 << 20;

/// Maximum cost in bytes of the first crowd: the budgets of two tunnels, which allocators release gradually.
const FIRST: usize = 160 << 20;

/// A site under attack, and its resource usage before.
struct Attack {
    site: GatewayProcess,
    edge: Process,
    before: [Usage; 2],
    /// Time that the gateway gives clients for a head.
    header: Duration,
}

/// Sends a head on a new connection. Returns the connection when the answer has begun, or when there is none.
///
/// The gateway rightly closes the connection of a client that this machine stops for `header` between connecting and sending.
/// Such a client tries again.
async fn ask(site: &GatewayProcess, head: &str, header: Duration) -> TcpStream {
    loop {
        let begun = Instant::now();
        let mut wire = TcpStream::connect(&site.listener).await.unwrap();
        wire.set_nodelay(true).unwrap();
        let sent = wire.write_all(head.as_bytes()).await;
        let is_late = begun.elapsed() >= header;
        let answer = timeout(PATIENCE, wire.peek(&mut [0])).await;
        let is_answered = sent.is_ok() && matches!(answer, Ok(Ok(1)));
        if is_answered || !is_late {
            return wire;
        }
    }
}

impl Attack {
    async fn of(app: &App, configuration: &str) -> Self {
        let site = GatewayProcess::with_listeners(&format!("{LISTENER}\n{configuration}")).await;
        Self::at(site, app, HEADER).await
    }

    async fn at(site: GatewayProcess, app: &App, header: Duration) -> Self {
        let edge = site.join("edge-1", app.port()).await;
        let mut siege = Self {
            before: [site.gateway.usage(), edge.usage()],
            site,
            edge,
            header,
        };
        // Objects that the first request makes stay.
        siege.answers().await;
        siege.before = siege.now();
        siege
    }

    fn now(&self) -> [Usage; 2] {
        [self.site.gateway.usage(), self.edge.usage()]
    }

    /// Takes the current memory use as the cost of a crowd; each further crowd finds that memory allocated.
    fn settled(&mut self) {
        for (before, now) in self
            .before
            .iter_mut()
            .zip([self.site.gateway.usage(), self.edge.usage()])
        {
            before.memory = now.memory;
        }
    }

    async fn dial(&self) -> TcpStream {
        let tcp = TcpStream::connect(&self.site.listener).await.unwrap();
        tcp.set_nodelay(true).unwrap();
        tcp
    }

    /// Checks that the gateway serves an ordinary client.
    async fn answers(&self) {
        let asked = async { read_head(&mut ask(&self.site, GET, self.header).await).await };
        let head = timeout(PATIENCE, asked).await;
        let head = head.expect("an ordinary client waits without end");
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    }

    /// Checks that streams, connections, files and threads are as before, and that the tunnel is the same.
    async fn end(self) {
        let metrics = async || self.site.metrics().await;
        until("nothing is open, and nothing unread", async || {
            let metrics = metrics().await;
            let left = ["open_streams", "open_connections", "buffered_bytes"];
            left.iter().all(|name| metrics.sum(name, &[]) == 0)
        })
        .await;
        let (last, full) = (Cell::new(self.before), full());
        let wait = until("files and threads are as before", async || {
            last.set(self.now());
            let both = last.get().into_iter().zip(self.before);
            both.into_iter().all(|(now, before)| {
                now.files <= before.files + KEPT
                    && now.threads <= before.threads
                    && (!full || now.memory <= before.memory.max(FIRST) + GROWTH)
            })
        });
        let waited = std::panic::AssertUnwindSafe(wait).catch_unwind().await;
        assert!(waited.is_ok(), "{:#?} was {:#?}", last.get(), self.before);
        let metrics = metrics().await;
        assert_eq!(
            metrics.sum("tunnels_ended_total", &[]),
            0,
            "a tunnel was lost: {:#?}",
            self.site.gateway.written().ended()
        );
        self.answers().await;
    }
}

fn rounds(few: usize, all: usize) -> usize {
    if full() { all } else { few }
}

#[tokio::test]
async fn hundreds_of_killed_clients_leave_no_resources() {
    need!("curl");
    let app = App::http(|head| match head.path().as_str() {
        "/endless" => answer::endless(),
        _ => answer::ok("well"),
    })
    .await;
    let mut siege = Attack::of(&app, "").await;
    let mut each = interval(Duration::from_millis(400));
    let rounds = rounds(4, 60);
    for round in 0..rounds {
        each.tick().await;
        if round == rounds / 2 {
            siege.settled();
        }
        let begun = join_all((0..256).map(|_| async {
            let mut wire = siege.dial().await;
            let get = GET.replace(" / ", " /endless ");
            wire.write_all(get.as_bytes()).await.unwrap();
            wire.readable().await.unwrap();
            wire
        }));
        for wire in begun.await {
            // The kernel does the same for a process that is killed with bytes unread.
            SockRef::from(&wire)
                .set_linger(Some(Duration::ZERO))
                .unwrap();
        }
        siege.answers().await;
    }
    siege.end().await;
}

#[tokio::test]
async fn rapid_resets_end_only_their_own_connection() {
    const ALL: u32 = 10_000;
    let app = App::saying("well").await;
    let testbed = TestBed::to(&app).await;
    let mut other = testbed.http2().connect("edge-1").await.unwrap();
    let rounds = async {
        let mut most = 0;
        for _ in 0..5 {
            most = most.max(resets(&testbed, ALL).await);
        }
        most
    };
    let mut rounds = std::pin::pin!(rounds);
    let mut served = 0;
    let most = loop {
        tokio::select! {
            most = rounds.as_mut() => break most,
            answer = other.get(URL) => assert_eq!(answer.unwrap().text(), "well"),
        }
        served += 1;
    };
    assert!(most < ALL, "{most} requests were reset on one connection");
    assert!(served > 0, "no other client was served meanwhile");
    assert_eq!(other.get(URL).await.unwrap().text(), "well");
    drop(other);
    testbed.until_idle().await;
    assert_eq!(testbed.metrics().await.sum("tunnels_ended_total", &[]), 0);
}

#[tokio::test]
async fn unread_bodies_hold_no_more_permits_than_exist() {
    const STREAMS: u32 = 250;
    let app = App::saying("well").await;
    let testbed = TestBed::to(&app).await;
    let head = fields(&[
        (":method", "POST"),
        (":scheme", "https"),
        (":authority", "edge-1:9999"),
        (":path", "/"),
    ]);
    let evicted = [("limit", "discarded_bodies"), ("outcome", "evicted")];
    let mut wires = Vec::new();
    // One source may have three quarters of 1,024.
    until("the oldest bodies are cut off", async || {
        let mut wire = testbed.http2().wire("edge-1", &["h2"]).await.unwrap();
        // Without a header table each status is a literal.
        let mut begin = [PREFACE, &settings(&[(1, 0)])].concat();
        for number in 0..STREAMS {
            begin.extend(frame(HEADERS, END_HEADERS, 2 * number + 1, &head));
        }
        send(&mut *wire, &begin).await.unwrap();
        let mut answered = 0;
        while answered < STREAMS {
            let frame = next(&mut *wire).await.unwrap();
            answered += u32::from(frame.kind == HEADERS && frame.status() == 403);
        }
        wires.push(wire);
        let metrics = testbed.metrics().await;
        metrics.sum("connections_rejected_total", &evicted) > 0
    })
    .await;
    assert!(wires.len() > 3, "{} connections", wires.len());
    loop {
        let frame = next(&mut *wires[0]).await.unwrap();
        if frame.kind == RST_STREAM {
            assert_eq!(frame.stream, 1, "the oldest");
            break;
        }
    }
    assert_eq!(testbed.client().get(URL).await.text(), "well");
}

/// Begins this many requests and resets each at once, until the gateway ends the connection. Returns the number of
/// requests.
async fn resets(testbed: &TestBed, all: u32) -> u32 {
    const BATCH: u32 = 50;
    let head = fields(&[
        (":method", "GET"),
        (":scheme", "https"),
        (":authority", "edge-1:9100"),
        (":path", "/"),
    ]);
    let mut wire = testbed.http2().wire("edge-1", &["h2"]).await.unwrap();
    let begin = [PREFACE, &settings(&[])].concat();
    send(&mut *wire, &begin).await.unwrap();
    for first in (0..all).step_by(BATCH as usize) {
        let one = |number: u32| {
            let (stream, cancel) = (2 * number + 1, 8_u32.to_be_bytes());
            let asked = frame(HEADERS, END_HEADERS | END_STREAM, stream, &head);
            [asked, frame(RST_STREAM, 0, stream, &cancel)].concat()
        };
        let mut batch: Vec<u8> = (first..first + BATCH).flat_map(one).collect();
        batch.extend(frame(PING, 0, 0, &[7; 8]));
        let alive = async {
            send(&mut *wire, &batch).await?;
            loop {
                let frame = next(&mut *wire).await?;
                match frame.kind {
                    GOAWAY => return Ok(false),
                    PING if frame.flags & ACK != 0 => return Ok(true),
                    _ => {}
                }
            }
        };
        // An end without a GOAWAY counts too.
        let alive: std::io::Result<bool> = timeout(PATIENCE, alive).await.unwrap();
        if !alive.unwrap_or(false) {
            return first + BATCH;
        }
    }
    all
}

#[tokio::test]
async fn a_thousand_idle_upgrades_stay_and_each_still_works() {
    need!("curl");
    let app = App::http(|_| answer::switch("echo", b"")).await;
    let header = Duration::from_secs(2);
    let short = "timeouts: { header: 2s, idle_keepalive: 2s }";
    let site = GatewayProcess::with_listeners(&format!("{LISTENER}\n{short}")).await;
    let edge = site.join("edge-1", app.port()).await;
    let before = [site.gateway.usage(), edge.usage()];
    let head =
        "GET / HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n";
    let mut wires = Vec::new();
    for _ in 0..20 {
        let more = join_all((0..50).map(|_| async {
            let mut wire = ask(&site, head, header).await;
            let answer = read_head(&mut wire).await;
            assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
            wire
        }));
        wires.extend(more.await);
    }
    let open = site.metrics().await.sum("open_streams", &[]);
    assert_eq!(open, 1_000);
    // The gateway ends a connection that has not upgraded in this time.
    let mut idle = TcpStream::connect(&site.listener).await.unwrap();
    let ended = timeout(PATIENCE, idle.read_u8()).await.unwrap();
    assert!(ended.is_err(), "{ended:?}");
    if full() {
        // Time itself is the subject: an idle session must not end.
        sleep(Duration::from_mins(10)).await;
    }
    for (number, wire) in wires.iter_mut().enumerate() {
        let message = format!("{number:08}");
        wire.write_all(message.as_bytes()).await.unwrap();
        assert_eq!(read(wire, message.len()).await, message.as_bytes());
    }
    drop(wires);
    let siege = Attack {
        site,
        edge,
        before,
        header,
    };
    siege.end_idle().await;
}

impl Attack {
    /// As [`Attack::end`], for an app that does not answer an ordinary client.
    async fn end_idle(self) {
        until("streams, connections and files are as before", async || {
            let metrics = self.site.metrics().await;
            let open = metrics.sum("open_streams", &[]) + metrics.sum("open_connections", &[]);
            let both = self.now().into_iter().zip(self.before);
            open == 0
                && both
                    .into_iter()
                    .all(|(now, before)| now.files <= before.files + 8)
        })
        .await;
        assert_eq!(self.site.metrics().await.sum("tunnels_ended_total", &[]), 0);
    }
}

#[tokio::test]
async fn slow_heads_are_closed_and_slow_bodies_block_no_client() {
    need!("curl");
    let app = App::http(|head| match head.method().as_str() {
        "POST" => answer::mirror(),
        _ => answer::ok("well"),
    })
    .await;
    let site =
        GatewayProcess::with_listeners(&format!("{LISTENER}\ntimeouts: {{ header: 1s }}")).await;
    let siege = Attack::at(site, &app, Duration::from_secs(1)).await;
    let slow = join_all((0..200).map(|_| async {
        let mut wire = siege.dial().await;
        // One byte each 100 ms. The head never becomes complete.
        for byte in GET.trim_end().bytes().chain(std::iter::repeat(b'x')) {
            if wire.write_all(&[byte]).await.is_err() {
                break;
            }
            let ended = timeout(Duration::from_millis(100), wire.read_u8()).await;
            if ended.is_ok() {
                break;
            }
        }
    }));
    let bodies = join_all((0..200).map(|_| async {
        let mut wire = siege.dial().await;
        // In one call, which does not fail even if the gateway has closed the connection of a client that was stopped before.
        let post = "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nContent-Length: 1000000\r\n\r\nslow";
        wire.write_all(post.as_bytes()).await.unwrap();
        wire
    }))
    .await;
    let (slow, ()) = tokio::join!(timeout(PATIENCE, slow), siege.answers());
    slow.expect("a slow head is ended");
    siege.answers().await;
    drop(bodies);
    siege.end().await;
}

#[tokio::test]
async fn a_flood_up_to_the_file_limit_ends_and_clients_are_accepted() {
    need!("curl");
    let app = App::saying("well").await;
    let site =
        GatewayProcess::with_listeners(&format!("{LISTENER}\ntimeouts: {{ header: 3s }}")).await;
    let site = site.with_files(1024).await;
    let siege = Attack::at(site, &app, Duration::from_secs(3)).await;
    let mut flood = Vec::new();
    for _ in 0..15 {
        let more = join_all((0..100).map(|_| TcpStream::connect(&siege.site.listener)));
        flood.extend(more.await.into_iter().flatten());
    }
    assert_eq!(
        flood.len(),
        1_500,
        "the kernel buffers the bytes that the gateway does not read"
    );
    let [gateway, _] = siege.now();
    assert!(gateway.files <= 1024);
    let metrics = siege.site.metrics().await;
    assert_eq!(metrics.sum("tunnels", &[]), 1, "the edge is not replaced");

    // Checks that the gateway ends silent connections, in waves, and that it then serves an ordinary client.
    let from = siege.site.gateway.usage().cpu;
    let begun = Instant::now();
    until("an ordinary client is served again", async || {
        let mut wire = siege.dial().await;
        let sent = wire.write_all(GET.as_bytes()).await;
        let mut answer = [0; 13];
        sent.is_ok() && wire.read_exact(&mut answer).await.is_ok() && &answer == b"HTTP/1.1 200 "
    })
    .await;
    let (spent, took) = (
        siege.site.gateway.usage().cpu.saturating_sub(from),
        begun.elapsed(),
    );
    assert!(
        !full() || spent < took / 2 + Duration::from_millis(500),
        "busy: {spent:?} of {took:?}"
    );
    drop(flood);
    siege.end().await;
}

#[tokio::test]
async fn an_edge_that_is_out_of_files_says_so_and_serves_again() {
    need!("curl");
    let app = App::http(|head| match head.path().as_str() {
        "/silence" => answer::silence(),
        _ => answer::ok("well"),
    })
    .await;
    let site = GatewayProcess::with_listeners(LISTENER).await;
    let token = site.token("--node edge-1").await;
    let few = crate::world::process::causeway_with_files(40);
    let mut edge = site
        .edge_of(few, "edge-1", app.port())
        .flag("--join", token)
        .start();
    edge.wait_for_line("tunnel registered").await;
    let mut silent = Vec::new();
    for _ in 0..60 {
        let mut wire = TcpStream::connect(&site.listener).await.unwrap();
        let get = GET.replace(" / ", " /silence ");
        wire.write_all(get.as_bytes()).await.unwrap();
        silent.push(wire);
    }
    // Requests for which no file was left get an answer that gives this reason.
    let answered = silent.iter_mut().map(|wire| Box::pin(read_head(wire)));
    let (head, ..) = timeout(PATIENCE, select_all(answered)).await.unwrap();
    assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
    let error = "error=proxy_internal_error; details=\"exhausted: ";
    assert!(head.contains(error), "{head}");
    edge.wait_for_line("this edge is out of file descriptors")
        .await;
    // Further requests get it too, well-formed or not.
    let mut wire = ask(&site, GET, HEADER).await;
    let head = read_head(&mut wire).await;
    assert!(head.starts_with("HTTP/1.1 "), "{head}");
    drop((silent, wire));
    until("it serves again", async || {
        let mut wire = ask(&site, GET, HEADER).await;
        read_head(&mut wire).await.starts_with("HTTP/1.1 200 ")
    })
    .await;
}

/// Listener with few connections, all of them used by the address from which the client connects as well.
#[tokio::test]
async fn silent_connections_keep_no_client_out() {
    let app = App::saying("here").await;
    // No connection ends for any other reason.
    let configuration = "limits: { connections: 16 }\ntimeouts: { header: 10m }";
    let siege = Attack::of(&app, configuration).await;
    let mut silent = Vec::new();
    for _ in 0..64 {
        silent.push(siege.dial().await);
    }
    // Each worker accepts connections, perhaps later than another one accepts a newer connection.
    let evicted = [("limit", "connections"), ("outcome", "evicted")];
    until("all others lose their places", async || {
        let metrics = siege.site.metrics().await;
        metrics.sum("connections_rejected_total", &evicted) >= 64 - 12
    })
    .await;
    siege.answers().await;
    drop(silent);
    siege.end().await;
}

/// Control frames of each kind that HTTP/2 servers answer or ignore without limit.
#[tokio::test]
async fn floods_of_control_frames_get_enhance_your_calm() {
    const PRIORITY: u8 = 2;
    const UNKNOWN: u8 = 0xfa;
    const ENHANCE_YOUR_CALM: [u8; 4] = 11_u32.to_be_bytes();
    let app = App::saying("here").await;
    let siege = Attack::of(&app, "").await;
    let floods = [
        (settings(&[]), 100),
        (frame(PING, 0, 0, &[7; 8]), 100),
        (frame(UNKNOWN, 0, 0, &[1]), 100),
        (frame(PRIORITY, 0, 7, &[0, 0, 0, 1, 0]), 1_000),
        (frame(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1]), 1_000),
    ];
    for (one, batch) in &floods {
        let mut wire = siege.dial().await;
        let begin = [PREFACE, &settings(&[])].concat();
        send(&mut wire, &begin).await.unwrap();
        // A ping shows when a batch was served: unread bytes delay no other client.
        let batch = [one.repeat(*batch), frame(PING, 0, 0, &[8; 8])].concat();
        let flood = async {
            for _ in 0..100 {
                send(&mut wire, &batch).await.unwrap();
                loop {
                    let frame = next(&mut wire).await.unwrap();
                    match frame.kind {
                        GOAWAY => return Some(frame.payload),
                        PING if frame.payload == [8; 8] => break,
                        _ => {}
                    }
                }
            }
            None
        };
        let goaway = timeout(PATIENCE, flood).await.unwrap();
        let goaway = goaway.expect("the flood is served without end");
        assert_eq!(goaway[4..8], ENHANCE_YOUR_CALM);
    }
    let metrics = siege.site.metrics().await;
    let counted = metrics.sum("limits_reached_total", &[("limit", "control_frames")]);
    assert_eq!(counted, u64::try_from(floods.len()).unwrap());
    siege.end().await;
}
