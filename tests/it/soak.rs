//! Everything at once, for a long time: mixed load, edges that reconnect, clients that abort, SIGHUP.
//!
//! `CAUSEWAY_SOAK` sets the duration (`tests/soak 1h`); without it a run of some seconds shows that the soak itself works.
//! Two nodes stay and never fail a request. Two are killed and started again all the time, and every complete answer from
//! them must be right. Each body is compared byte for byte. At the end files, threads, streams and connections are as they
//! were at the start. If `CAUSEWAY_SOAK` is set, memory has not grown since the warm-up.

use crate::world::{
    app::{
        App,
        answer::{self, pattern},
    },
    process::{GatewayProcess, Process, Usage},
    tool::need,
    until,
};
use socket2::SockRef;
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};

const LISTENER: &str = "listeners: [{ name: web, protocol: http, listen: \"127.0.0.1:0\", port: 9100, anonymous: true }]";
const SHORT: Duration = Duration::from_secs(8);
/// Number of small requests that a load has at least. On a busy machine it lasts longer for them.
const REQUESTS: u64 = 100;
/// No single exchange takes longer, at a node that stays.
const PATIENCE: Duration = Duration::from_mins(5);
const DOWNLOAD: usize = 4 << 20;
const UPLOAD: usize = 512 << 10;
/// Allowed difference in memory between two measurements of the same load, in bytes.
const NOISE: usize = 48 << 20;

/// Counts of the work done.
#[derive(Default)]
struct Tally {
    requests: AtomicU64,
    bytes: AtomicU64,
    aborts: AtomicU64,
    sessions: AtomicU64,
    failures: AtomicU64,
    restarts: AtomicU64,
}

#[derive(Clone)]
struct Load {
    listener: String,
    whole: Arc<Vec<u8>>,
    tally: Arc<Tally>,
    until: Instant,
}

#[tokio::test]
async fn mixed_load_with_flapping_edges_leaks_and_corrupts_no_data() {
    need!("curl");
    let lasts = std::env::var("CAUSEWAY_SOAK").map_or(SHORT, |text| {
        humantime::parse_duration(&text).expect("CAUSEWAY_SOAK is a duration such as 5m")
    });
    let whole = Arc::new(pattern(DOWNLOAD));
    let sent = whole.clone();
    let app = App::http(move |head| match head.path().as_str() {
        "/whole" => answer::bytes(&sent),
        "/mirror" => answer::mirror(),
        "/echo" => answer::switch("echo", b""),
        _ => answer::ok("well"),
    })
    .await;
    app.forget().await;
    let site = GatewayProcess::with_listeners(LISTENER).await;
    let mut edges = Vec::new();
    for node in ["edge-1", "edge-2", "edge-3", "edge-4"] {
        edges.push(site.join(node, app.port()).await);
    }
    let load = Load {
        listener: site.listener.clone(),
        whole,
        tally: Arc::default(),
        until: Instant::now() + lasts,
    };
    let before = [site.gateway.usage(), edges[0].usage()];
    let mut workers = load.work();
    let samples = disturb(&load, &site, &mut edges, &app).await;
    while let Some(ended) = workers.join_next().await {
        ended.expect("a node that stays has failed a client");
    }
    report(&load.tally, lasts, &samples);
    if std::env::var_os("CAUSEWAY_SOAK").is_some() {
        flat(&samples);
    }

    until("streams and connections are gone", async || {
        let metrics = site.metrics().await;
        metrics.sum("open_streams", &[]) == 0
            && metrics.sum("open_connections", &[]) == 0
            && metrics.sum("buffered_bytes", &[]) == 0
            && metrics.sum("tunnels", &[]) >= 4
    })
    .await;
    until("files and threads are as before", async || {
        let now = [site.gateway.usage(), edges[0].usage()];
        let both = now.into_iter().zip(before);
        // A tunnel for bulk on each node, and some idle connections to the app.
        both.into_iter()
            .all(|(now, before)| now.files <= before.files + 40 && now.threads <= before.threads)
    })
    .await;
}

impl Load {
    fn work(&self) -> JoinSet<()> {
        let mut workers = JoinSet::new();
        for number in 0..4 {
            let node = format!("edge-{}", number + 1);
            for _ in 0..4 {
                workers.spawn(self.clone().repeat(node.clone(), Kind::Small));
            }
            for kind in [Kind::Download, Kind::Upload, Kind::Abort, Kind::Session] {
                workers.spawn(self.clone().repeat(node.clone(), kind));
            }
        }
        workers
    }

    /// Repeats one kind of exchange. No exchange with a node that stays fails.
    async fn repeat(self, node: String, kind: Kind) {
        let stays = matches!(node.as_str(), "edge-1" | "edge-2");
        while Instant::now() < self.until || self.tally.requests.load(Relaxed) < REQUESTS {
            let outcome = timeout(PATIENCE, self.exchange(&node, kind)).await;
            let late = || io::Error::other(format!("no end within {PATIENCE:?}"));
            if let Err(error) = outcome.unwrap_or_else(|_| Err(late())) {
                assert!(!stays, "{kind:?} at {node}: {error}");
                self.tally.failures.fetch_add(1, Relaxed);
                sleep(Duration::from_millis(50)).await;
            }
        }
    }

    async fn exchange(&self, node: &str, kind: Kind) -> io::Result<()> {
        let mut wire = TcpStream::connect(&self.listener).await?;
        wire.set_nodelay(true)?;
        let tally = &self.tally;
        match kind {
            Kind::Small => {
                for _ in 0..20 {
                    let body = ask(&mut wire, &request("GET", "/", node, ""), b"").await?;
                    same(&body, b"well");
                    tally.requests.fetch_add(1, Relaxed);
                }
            }
            Kind::Download => {
                let body = ask(&mut wire, &request("GET", "/whole", node, ""), b"").await?;
                same(&body, &self.whole);
                tally.bytes.fetch_add(body.len() as u64, Relaxed);
            }
            Kind::Upload => {
                let body = &self.whole[..UPLOAD];
                let length = format!("Content-Length: {UPLOAD}\r\n");
                let back = ask(&mut wire, &request("POST", "/mirror", node, &length), body).await?;
                same(&back, body);
                tally.bytes.fetch_add(2 * UPLOAD as u64, Relaxed);
            }
            Kind::Abort => {
                let get = request("GET", "/whole", node, "");
                wire.write_all(get.as_bytes()).await?;
                // An error is shorter than the bytes that follow, and its connection stays open.
                let (status, _) = head_of(&mut wire).await?;
                expect(status, 200)?;
                let mut some = [0; 1000];
                wire.read_exact(&mut some).await?;
                SockRef::from(&wire).set_linger(Some(Duration::ZERO))?;
                tally.aborts.fetch_add(1, Relaxed);
            }
            Kind::Session => {
                let upgrade = "Connection: Upgrade\r\nUpgrade: echo\r\n";
                let head = request("GET", "/echo", node, upgrade);
                wire.write_all(head.as_bytes()).await?;
                let (status, _) = head_of(&mut wire).await?;
                expect(status, 101)?;
                for number in 0..100 {
                    let message = format!("{number:016}");
                    wire.write_all(message.as_bytes()).await?;
                    let mut echoed = [0; 16];
                    wire.read_exact(&mut echoed).await?;
                    same(&echoed, message.as_bytes());
                }
                tally.sessions.fetch_add(1, Relaxed);
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Small,
    Download,
    Upload,
    Abort,
    Session,
}

fn request(method: &str, path: &str, node: &str, fields: &str) -> String {
    format!("{method} {path} HTTP/1.1\r\nHost: {node}:9100\r\n{fields}\r\n")
}

/// All received bytes must be right, even if other parts fail.
fn same(found: &[u8], wanted: &[u8]) {
    assert!(
        found == wanted,
        "wrong bytes: {} instead of {}",
        found.len(),
        wanted.len()
    );
}

fn expect(status: u16, wanted: u16) -> io::Result<()> {
    if status == wanted {
        return Ok(());
    }
    Err(io::Error::other(format!("status {status}")))
}

/// Sends head and body, and reads a whole answer.
async fn ask(wire: &mut TcpStream, head: &str, body: &[u8]) -> io::Result<Vec<u8>> {
    wire.write_all(head.as_bytes()).await?;
    let (mut read, mut write) = wire.split();
    let sending = async {
        write.write_all(body).await?;
        io::Result::Ok(())
    };
    let reading = async {
        let (status, length) = head_of(&mut read).await?;
        expect(status, 200)?;
        let mut body = vec![0; length];
        read.read_exact(&mut body).await?;
        io::Result::Ok(body)
    };
    let ((), body) = tokio::try_join!(sending, reading)?;
    Ok(body)
}

/// Status and Content-Length of an answer's head.
async fn head_of(wire: &mut (impl AsyncReadExt + Unpin)) -> io::Result<(u16, usize)> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(wire.read_u8().await?);
    }
    let head = String::from_utf8_lossy(&head).to_ascii_lowercase();
    let status = head.get(9..12).and_then(|text| text.parse().ok());
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "));
    Ok((
        status.ok_or_else(|| io::Error::other("no status"))?,
        length.and_then(|text| text.parse().ok()).unwrap_or(0),
    ))
}

/// Kills and starts edges 3 and 4 in turn, sends SIGHUP to all processes, and measures memory, until the load ends.
async fn disturb(
    load: &Load,
    site: &GatewayProcess,
    edges: &mut Vec<Process>,
    app: &App,
) -> Vec<[Usage; 2]> {
    let mut samples = Vec::new();
    let mut turn = 0_usize;
    while Instant::now() < load.until {
        samples.push([site.gateway.usage(), edges[0].usage()]);
        let victim = 2 + turn % 2;
        let node = format!("edge-{}", victim + 1);
        let old = edges.remove(victim);
        if turn % 4 < 2 {
            old.kill().await;
        } else {
            old.stop().await;
        }
        let mut edge = site.edge(&node, app.port()).start();
        edge.wait_for_line("tunnel registered").await;
        edges.insert(victim, edge);
        for process in std::iter::once(&site.gateway).chain(&edges[..2]) {
            process.signal("HUP").await;
        }
        load.tally.restarts.fetch_add(1, Relaxed);
        turn += 1;
        sleep_until((Instant::now() + Duration::from_secs(1)).min(load.until)).await;
    }
    samples
}

/// Memory in the last quarter is the same as in the second, except for noise.
fn flat(samples: &[[Usage; 2]]) {
    let quarter = samples.len() / 4;
    if quarter == 0 {
        return;
    }
    for (side, name) in ["gateway", "edge"].into_iter().enumerate() {
        let middle = |part: &[[Usage; 2]]| {
            let mut memory: Vec<_> = part.iter().map(|sample| sample[side].memory).collect();
            memory.sort_unstable();
            memory[memory.len() / 2]
        };
        let (early, late) = (
            middle(&samples[quarter..2 * quarter]),
            middle(&samples[3 * quarter..]),
        );
        assert!(
            late <= early + early / 10 + NOISE,
            "memory of the {name} has grown from {early} to {late} bytes"
        );
    }
}

fn report(tally: &Tally, lasts: Duration, samples: &[[Usage; 2]]) {
    let of = |count: &AtomicU64| count.load(Relaxed);
    println!(
        "soak of {lasts:?}: {} small requests, {} MiB in bodies, {} aborts, {} sessions of 100 messages, \
         {} restarts of edges, {} exchanges failed at nodes that were away",
        of(&tally.requests),
        of(&tally.bytes) >> 20,
        of(&tally.aborts),
        of(&tally.sessions),
        of(&tally.restarts),
        of(&tally.failures),
    );
    for [gateway, edge] in samples.iter().step_by(samples.len().div_ceil(12).max(1)) {
        println!(
            "  gateway {:4} MiB {:4} files, edge-1 {:4} MiB {:4} files",
            gateway.memory >> 20,
            gateway.files,
            edge.memory >> 20,
            edge.files
        );
    }
}
