//! Many edges and few gateways: restarts, and a gateway that leaves under load.
//!
//! Real processes. With `CAUSEWAY_TEST_FULL=1` the fleet is larger, the gateways' logs must confirm the promised times, and
//! the load lasts half a minute.

use crate::world::{
    GATEWAY_NAME, PATIENCE,
    app::{App, PauseGate, answer},
    client::{ListenerAddress, Wire, exchange, read, whole},
    process::{ExitedProcess, GatewayProcess, Process, address_after, causeway},
    tool::full,
    until,
};
use futures_util::{StreamExt, stream};
use hyper::Request;
use std::{
    collections::BTreeMap,
    io::Write,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    time::{Duration, SystemTime},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::{Instant, MissedTickBehavior, interval, timeout},
};

/// Number of edges of the fleet.
const EDGES: usize = 200;
/// Number of edges of the fleet without measured times.
const FEW: usize = 40;
/// Time in which a fleet is connected again after a gateway's restart.
const BACK: Duration = Duration::from_secs(10);
/// Time for which a draining gateway waits for requests of clients that connected before its listeners closed.
pub(super) const LATE_REQUEST: Duration = Duration::from_secs(1);
/// Width of a bin in which arrivals are counted.
const BIN: u64 = 100;

const URL: &str = "http://edge-1:9100/";
/// Log message of a gateway about an edge that has connected.
const ARRIVED: &str = " connected ";

/// Returns the time at which a line was written, in milliseconds since the Unix epoch.
fn moment(line: &str) -> u64 {
    let at = humantime::parse_rfc3339(line.split(' ').next().unwrap()).unwrap();
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap();
    u64::try_from(since.as_millis()).unwrap()
}

/// Returns the times at which lines with `part` were written.
fn moments(process: &Process, part: &str) -> Vec<u64> {
    let written = process.written();
    let lines = written.stdout.lines().chain(written.stderr.lines());
    lines
        .filter(|line| line.contains(part))
        .map(moment)
        .collect()
}

/// Returns the time at which an edge that was last refused meant to dial again.
fn dialled(edge: &Process) -> u64 {
    let written = edge.written();
    let mut lines = written.stdout.lines().chain(written.stderr.lines());
    let line = lines.rfind(|line| line.contains("retry_in="));
    let line = line.expect("it was refused");
    let (_, delay) = line.split_once("retry_in=").unwrap();
    let delay = delay.split(' ').next().unwrap();
    let delay = match delay.strip_suffix("ms") {
        Some(millis) => millis.parse::<f64>().unwrap() / 1e3,
        None => delay.strip_suffix('s').unwrap().parse().unwrap(),
    };
    let delay = Duration::from_secs_f64(delay).as_millis();
    moment(line) + u64::try_from(delay).unwrap()
}

/// Prints the number in each bin since `begin`. Returns the largest.
fn histogram(what: &str, begin: u64, moments: &[u64]) -> usize {
    let mut bins = BTreeMap::<u64, usize>::new();
    for at in moments {
        *bins
            .entry(at.saturating_sub(begin) / BIN * BIN)
            .or_default() += 1;
    }
    let shown = bins.iter();
    let shown: Vec<String> = shown.map(|(at, count)| format!("{at}: {count}")).collect();
    say(&format!("{what}, by ms: {}", shown.join(", ")));
    *bins.values().max().unwrap()
}

#[tokio::test]
async fn a_fleet_is_back_soon_after_a_restart_and_not_all_at_once() {
    let full = full();
    let count = if full { EDGES } else { FEW };
    let site = GatewayProcess::open_to_all("127.0.0.1:0").await;
    let joining = (0..count).map(|number| {
        let site = &site;
        // During a longer failure each attempt is a line of this level.
        let program = causeway("").env("CAUSEWAY_LOG_FILTER", "info,causeway_edge=debug");
        async move { site.join_by(program, &format!("edge-{number}"), 1).await }
    });
    let edges: Vec<Process> = stream::iter(joining).buffered(8).collect().await;

    let site = site.restart(|_| {}).await;
    all_back(&site, (count, full), "a restart at once").await;
    // Time is the subject: by then all edges have been refused several times, as in most restarts.
    let site = site.restart(|_| std::thread::sleep(Duration::from_secs(2)));
    let site = site.await;
    all_back(&site, (count, full), "a restart after two seconds").await;
    if !full {
        return;
    }
    // On a busy machine arrivals depend on the machine; the times of dials depend only on the edges.
    let dials: Vec<u64> = edges.iter().map(dialled).collect();
    let first = *dials.iter().min().unwrap();
    let most = histogram("they dialled", first, &dials);
    assert!(most <= EDGES / 4, "{most} edges dialled within {BIN} ms");
}

/// Waits until the fleet is connected again. Where times are measured, it must be in time.
async fn all_back(site: &GatewayProcess, (count, measured): (usize, bool), occasion: &str) {
    let bound = Duration::from_mins(2);
    site.gateway.wrote(ARRIVED, count, bound).await;
    if !measured {
        return;
    }
    let ready = moments(&site.gateway, "gateway ready")[0];
    let arrivals = moments(&site.gateway, ARRIVED);
    histogram(
        &format!("{count} edges were back after {occasion}"),
        ready,
        &arrivals,
    );
    let last = arrivals.iter().max().unwrap().saturating_sub(ready);
    let last = Duration::from_millis(last);
    assert!(last <= BACK, "the last was back after {last:?}");
}

/// Prints a figure although the test runner hides the output of tests.
fn say(figure: &str) {
    writeln!(std::io::stderr().lock(), "{figure}").unwrap();
}

/// Results of the clients.
#[derive(Debug, Default)]
pub(super) struct GatewaysMet {
    /// Answered by the first gateway.
    pub(super) first: usize,
    /// Answered by the second gateway, after the first refused the connection.
    pub(super) refused: usize,
    /// Answered by the second gateway, after the first closed a connection that it had not accepted yet.
    pub(super) closed: usize,
    /// Answered by the second gateway, after the first answered that it has no tunnel.
    pub(super) told: usize,
    /// Answered by the second gateway, because the first had already drained when the request arrived. The client connected
    /// before the listener closed, and sent its request later than a draining gateway waits for it.
    pub(super) late: usize,
    /// Not answered, with the reason.
    pub(super) failed: Vec<String>,
}

/// A client that tries the first gateway, and then the second if the first does not serve it.
async fn call(first: &GatewayProcess, second: &GatewayProcess) -> GatewaysMet {
    let mut met = GatewaysMet::default();
    let begin = Instant::now();
    let ask = || Request::get(URL).body(whole("")).unwrap();
    let why = match first.nobody().try_send(ask()).await {
        Ok(answer) if answer.status == 200 => {
            met.first += 1;
            return met;
        }
        Ok(answer) if answer.status == 503 => {
            let text = answer.text();
            if text.contains("draining") && begin.elapsed() >= LATE_REQUEST {
                met.late += 1;
            } else {
                met.told += 1;
                println!("after {:?}: {text}", begin.elapsed());
            }
            text
        }
        Ok(answer) => {
            met.failed.push(answer.to_string());
            return met;
        }
        Err(error) => {
            let error = error.to_string();
            if error.contains("Connection refused") {
                met.refused += 1;
            } else {
                met.closed += 1;
                println!("after {:?}: {error}", begin.elapsed());
            }
            error
        }
    };
    match second.nobody().try_send(ask()).await {
        Ok(answer) if answer.status == 200 => met,
        Ok(answer) => GatewaysMet {
            failed: vec![format!("first: {why}; second: {answer}")],
            ..GatewaysMet::default()
        },
        Err(error) => GatewaysMet {
            failed: vec![format!("first: {why}; second: {error}")],
            ..GatewaysMet::default()
        },
    }
}

/// Shared state of a load: its stop flag and its progress.
#[derive(Debug, Default)]
pub(super) struct Load {
    pub(super) enough: AtomicBool,
    asked: AtomicUsize,
}

impl Load {
    /// Waits until this many more requests are answered.
    pub(super) async fn goes_on(&self, more: usize) {
        let until_asked = self.asked.load(Relaxed) + more;
        until("the load goes on", async || {
            self.asked.load(Relaxed) >= until_asked
        })
        .await;
    }
}

/// Starts a hundred clients a second until `enough`.
pub(super) async fn load(
    first: &GatewayProcess,
    second: &GatewayProcess,
    load: &Load,
) -> GatewaysMet {
    let mut beat = interval(Duration::from_millis(10));
    beat.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let calls = stream::unfold(beat, |mut beat| async {
        beat.tick().await;
        let call = call(first, second);
        (!load.enough.load(Relaxed)).then_some((call, beat))
    });
    let mut all = GatewaysMet::default();
    let mut met = std::pin::pin!(calls.buffer_unordered(200));
    while let Some(one) = met.next().await {
        load.asked.fetch_add(1, Relaxed);
        all.first += one.first;
        all.refused += one.refused;
        all.closed += one.closed;
        all.told += one.told;
        all.late += one.late;
        all.failed.extend(one.failed);
    }
    all
}

/// Sessions that are open when a gateway is asked to stop.
struct Open {
    socket: Box<dyn Wire>,
    connect: Box<dyn Wire>,
    download: Box<dyn Wire>,
}

impl Open {
    async fn at(site: &GatewayProcess, connect: &str) -> Self {
        let client = site.nobody();
        let host = "Host: edge-1:9100\r\n";
        let upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\n";
        let mut socket = client.wire("", &[]).await.unwrap();
        let head = format!("GET /socket HTTP/1.1\r\n{host}{upgrade}\r\n");
        let switched = exchange(&mut *socket, &head).await;
        assert!(switched.starts_with("HTTP/1.1 101 "), "{switched}");
        let out = site.nobody_at(ListenerAddress::Tls(connect.parse().unwrap()));
        let mut tunnelled = out.tls_stream(GATEWAY_NAME, &[]).await.unwrap();
        let asked = "CONNECT edge-1:9100 HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
        let answered = exchange(&mut tunnelled, asked).await;
        assert!(answered.starts_with("HTTP/1.1 200 "), "{answered}");
        let switched = exchange(&mut tunnelled, &head).await;
        assert!(switched.starts_with("HTTP/1.1 101 "), "{switched}");
        let mut download = client.wire("", &[]).await.unwrap();
        let begun = exchange(
            &mut *download,
            format!("GET /slow HTTP/1.1\r\n{host}Connection: close\r\n\r\n"),
        );
        assert!(begun.await.starts_with("HTTP/1.1 200 "));
        Self {
            socket,
            connect: Box::new(tunnelled),
            download,
        }
    }

    /// Checks that both sessions still carry bytes in both directions.
    async fn passes(&mut self) {
        for wire in [&mut self.socket, &mut self.connect] {
            wire.write_all(b"still here").await.unwrap();
            assert_eq!(read(wire, 10).await, b"still here");
        }
    }
}

/// Starts two gateways that know the same nodes, an edge of the first that knows both, and the first one's listener for
/// CONNECT.
async fn pair(app: &App) -> (GatewayProcess, GatewayProcess, Process, String) {
    let listener = format!("listen: \"127.0.0.1:0\", anonymous: true, names: [{GATEWAY_NAME}]");
    // The sessions of these tests are open until the end of the drain, which may take long on a busy machine.
    let configuration = format!(
        "listeners: [{{ name: web, protocol: http, port: 9100, {listener} }}, {{ name: out, protocol: connect, {listener} }}]\n\
         timeouts: {{ drain: 10m }}"
    );
    let first = GatewayProcess::with_listeners(&configuration).await;
    let edge = first.join("edge-1", app.port()).await;
    let second = first.twin().await;
    let addresses = format!("{},{}", first.tunnel, second.tunnel);
    let mut first = first.advertising(&addresses).await;
    first.gateway.wait_for_line(ARRIVED).await;
    let out = |line: &str| line.contains("listener open") && line.contains("listener=\"out\"");
    let out = first.gateway.line("the listener for CONNECT", out).await;
    let out = address_after(&out, "address=");
    (first, second, edge, out)
}

#[tokio::test]
async fn a_gateway_that_drains_under_load_loses_no_request() {
    let gate = PauseGate::new();
    let held = gate.clone();
    let app = App::http(move |head| match head.path().as_str() {
        "/socket" => answer::switch("websocket", b""),
        "/slow" => answer::parts("text/plain", &["whole\n"], &held),
        _ => answer::ok("here"),
    });
    let app = app.await;
    let (first, second, _edge, out) = pair(&app).await;
    let mut open = Open::at(&first, &out).await;

    let (shared, began) = (Load::default(), Instant::now());
    let acting = async {
        // One load before the signal, and one after it.
        shared.goes_on(before()).await;
        first.gateway.signal("TERM").await;
        until("the edge is at the second gateway", async || {
            second.gateway.written().count(ARRIVED) > 0
        })
        .await;
        until("the listener is closed", async || {
            tokio::net::TcpStream::connect(&first.listener)
                .await
                .is_err()
        })
        .await;
        shared.goes_on(100).await;
        shared.enough.store(true, Relaxed);
    };
    let (met, ()) = tokio::join!(load(&first, &second, &shared), acting);
    let took = began.elapsed();
    say(&format!(
        "in {took:?} clients were answered by the first gateway: {}, by the second after the first said so: {}, \
         refused: {}, closed: {}",
        met.first, met.told, met.refused, met.closed
    ));
    let failed = met.failed.len();
    assert_eq!(failed, 0, "for example {:?}", met.failed.first());
    assert!(met.first > 0 && met.refused > 0, "{met:?}");

    open.passes().await;
    gate.open();
    gate.open();
    let mut rest = String::new();
    let whole = open.download.read_to_string(&mut rest);
    timeout(PATIENCE, whole).await.unwrap().unwrap();
    assert!(rest.ends_with("whole\n\r\n0\r\n\r\n"), "{rest:?}");
    drop(open);
    let ExitedProcess { stderr, .. } = first.gateway.ended().await.ok();
    assert!(stderr.contains("gateway stopped cut=0"), "{stderr}");
}

/// Number of clients that send requests before the gateway is asked to stop.
fn before() -> usize {
    if full() { 3_000 } else { 200 }
}
