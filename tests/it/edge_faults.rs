//! Faults on the edge's side: clock, resolver, address, proxy, a list of gateways that is partly wrong.
//!
//! Each fault ends by itself when its cause is removed. Until then the edge's log and `causeway health` name it.

use crate::world::{
    app::App,
    clock::WallClock,
    netns::{HUB, Host, NEED, SharedNetwork},
    process::{Causeway, GatewayProcess, OPEN, PATIENCE, Process, causeway},
    tool::need,
};
use futures_util::future::join_all;
use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream, UdpSocket},
    task::JoinSet,
    time::timeout,
};

/// Address at which no process listens.
const NOBODY: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 99);
/// The gateway's name, with a port of this network.
const GATEWAY: &str = "gateway.test:10262";

/// Waits until the edge has logged a new tunnel, `times` in all. A refused edge may pause for a minute before it dials again.
async fn stands(edge: &Process, times: usize) {
    edge.wrote("tunnel registered", times, PATIENCE).await;
}

/// Waits until `health`, run by `program`, names the fault.
async fn complains(site: &GatewayProcess, program: impl Fn() -> Causeway, part: &str) {
    let mut message = String::new();
    let asking = async {
        while !message.contains(part) {
            let asked = program().args(["health"]);
            let asked = asked.flag("--data-dir", site.edge_data("edge-1"));
            let asked = asked.run().await;
            message = format!("{}{}", asked.stdout, asked.stderr);
        }
    };
    let named = timeout(PATIENCE, asking).await;
    assert!(named.is_ok(), "{part:?} is not in: {message}");
}

async fn serves(site: &GatewayProcess) {
    let answer = site.nobody().get("http://edge-1:9100/").await;
    assert_eq!(answer.text(), "here");
}

async fn app_at(host: &Host<'_>) -> App {
    let _there = host.enter();
    App::saying("here").await
}

#[tokio::test]
async fn a_clock_off_by_a_day_is_named_and_the_edge_recovers_with_it() {
    need!("faketime");
    for (wrong, named) in [("-1d", true), ("+1d", false)] {
        let app = App::saying("here").await;
        let site = GatewayProcess::open_to_all("127.0.0.1:0").await;
        site.join("edge-1", app.port()).await.stop().await.ok();
        let clock = WallClock::new(wrong);
        let mut edge = site.edge_of(clock.causeway(), "edge-1", app.port()).start();
        if named {
            edge.wait_for_line("check the clock").await;
            complains(&site, || causeway(""), "check the clock").await;
            clock.set("+0");
        }
        stands(&edge, 1).await;
        serves(&site).await;
    }
}

/// A name server on a host, whose answer a test chooses; without an answer the name does not exist.
struct Names {
    answer: Arc<Mutex<Option<Ipv4Addr>>>,
    _serving: JoinSet<()>,
}

impl Names {
    async fn at(host: &Host<'_>, answer: Option<Ipv4Addr>) -> Self {
        let _there = host.enter();
        let here = Ipv4Addr::LOCALHOST;
        let socket = UdpSocket::bind((here, 53)).await.unwrap();
        host.asks(here.into());
        let answer = Arc::new(Mutex::new(answer));
        let chosen = answer.clone();
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut query = [0; 512];
            while let Ok((length, from)) = socket.recv_from(&mut query).await {
                let address = *chosen.lock().unwrap();
                let reply = reply(&query[..length], address);
                socket.send_to(&reply, from).await.unwrap();
            }
        });
        Self {
            answer,
            _serving: serving,
        }
    }

    fn say(&self, address: Ipv4Addr) {
        *self.answer.lock().unwrap() = Some(address);
    }
}

/// RFC 1035 §4: the question is repeated, with the address if the question was for one.
fn reply(query: &[u8], address: Option<Ipv4Addr>) -> Vec<u8> {
    let name = 12 + query[12..].iter().position(|byte| *byte == 0).unwrap();
    let question = &query[12..name + 5];
    let kind = u16::from_be_bytes([query[name + 1], query[name + 2]]);
    let found = address.filter(|_| kind == 1);
    // Response, recursion desired and available; NXDOMAIN if there is no address of any kind.
    let code = if address.is_some() { 0x80 } else { 0x83 };
    let mut reply = vec![query[0], query[1], 0x81, code, 0, 1, 0, 0, 0, 0, 0, 0];
    reply.extend_from_slice(question);
    if let Some(address) = found {
        reply[7] = 1;
        reply.extend_from_slice(&[0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4]);
        reply.extend_from_slice(&address.octets());
    }
    reply
}

#[tokio::test]
async fn a_failing_then_wrong_resolver_is_named_and_recovered_from() {
    need!(NEED);
    let street = SharedNetwork::new();
    let host = street.host();
    let names = Names::at(&host, None).await;
    let app = app_at(&host).await;
    // Otherwise the gateway would send its address, and the edge would no longer need a resolver.
    let told = format!("tunnel: {{ advertise: [\"{GATEWAY}\"] }}\n{OPEN}");
    let mut site = GatewayProcess::listening(&format!("{HUB}:10262"), &told).await;
    let joined = site.join_by(host.causeway(), "edge-1", app.port()).await;
    joined.stop().await.ok();
    site.tunnel = GATEWAY.to_owned();
    let mut edge = site.edge_of(host.causeway(), "edge-1", app.port()).start();
    edge.wait_for_line("could not resolve gateway.test").await;
    let health = || host.causeway();
    complains(&site, health, "could not resolve gateway.test").await;
    names.say(NOBODY);
    let dialled = format!("({NOBODY}:10262)");
    edge.wait_for_line(&dialled).await;
    complains(&site, health, &dialled).await;
    names.say(HUB);
    stands(&edge, 1).await;
    serves(&site).await;
}

#[tokio::test]
async fn an_edge_with_a_changed_address_reconnects_from_the_new_one() {
    need!(NEED);
    let street = SharedNetwork::new();
    let mut host = street.host();
    let app = app_at(&host).await;
    let mut site = GatewayProcess::open_to_all(&format!("{HUB}:0")).await;
    let mut edge = site.join_by(host.causeway(), "edge-1", app.port()).await;
    serves(&site).await;
    host.moves_to(77);
    let ended = edge.wait_for_line("tunnel ended").await;
    assert!(ended.contains("reason="), "{ended}");
    stands(&edge, 2).await;
    let address = host.address().to_string();
    let arrived = |line: &str| line.contains(" connected ") && line.contains(&address);
    site.gateway.line("the new address", arrived).await;
    serves(&site).await;
}

/// HTTP proxy that refuses connections until the test allows them, and cuts each connection after `lasts`.
async fn proxy(open: Arc<AtomicBool>, lasts: Duration) -> (SocketAddr, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((mut near, _)) = listener.accept().await {
            let open = open.load(Relaxed);
            connections.spawn(async move {
                let mut head = String::new();
                while !head.ends_with("\r\n\r\n") {
                    head.push(char::from(near.read_u8().await.unwrap()));
                }
                if !open {
                    let refusal = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n";
                    return near.write_all(refusal).await.unwrap();
                }
                let target = head.split(' ').nth(1).unwrap();
                let mut far = TcpStream::connect(target).await.unwrap();
                near.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
                let _ = timeout(lasts, copy_bidirectional(&mut near, &mut far)).await;
            });
        }
    });
    (address, serving)
}

#[tokio::test]
async fn a_proxy_that_refuses_is_named_and_used_when_it_does_not() {
    let app = App::saying("here").await;
    let site = GatewayProcess::open_to_all("127.0.0.1:0").await;
    site.join("edge-1", app.port()).await.stop().await.ok();
    let open = Arc::new(AtomicBool::new(false));
    let (proxy, _serving) = proxy(open.clone(), Duration::MAX).await;
    let edge = site.edge("edge-1", app.port());
    let mut edge = edge.flag("--proxy", format!("http://{proxy}")).start();
    edge.wait_for_line("the proxy refused").await;
    complains(&site, || causeway(""), "the proxy refused").await;
    open.store(true, Relaxed);
    stands(&edge, 1).await;
    serves(&site).await;
}

/// As proxies of companies do. A client that sends a request meanwhile waits for the next tunnel.
#[tokio::test]
async fn a_proxy_that_cuts_each_connection_costs_no_request() {
    let app = App::saying("here").await;
    // On a busy machine an edge may need longer than the usual time for its next tunnel.
    let configuration = format!("{OPEN}\ntimeouts: {{ reconnect: 10m }}");
    let site = GatewayProcess::with_listeners(&configuration).await;
    site.join("edge-1", app.port()).await.stop().await.ok();
    let open = Arc::new(AtomicBool::new(true));
    let (proxy, _serving) = proxy(open, Duration::from_secs(1)).await;
    for gateways in ["one", "every"] {
        let edge = site.edge("edge-1", app.port());
        let edge = edge.flag("--proxy", format!("http://{proxy}"));
        let edge = edge.flag("--tunnels-gateways", gateways).start();
        stands(&edge, 1).await;
        let asked = (0..16).map(|_| async {
            while edge.written().count("tunnel ended") < 5 {
                let answer = site.nobody().get("http://edge-1:9100/").await;
                // A request on the tunnel is lost when the tunnel is cut.
                let expected = [200, 502].contains(&answer.status);
                assert!(expected, "{gateways}: {}", answer.text());
            }
        });
        join_all(asked).await;
        edge.stop().await.ok();
    }
}

/// The network works, as the tunnel to the other gateway shows: pauses grow beyond those of a silent network (2 s).
#[tokio::test]
async fn a_single_silent_address_is_dialled_rarely_and_named_once() {
    let app = App::saying("here").await;
    let mut site = GatewayProcess::open_to_all("127.0.0.1:0").await;
    site.join("edge-1", app.port()).await.stop().await.ok();
    let dead = App::refusing();
    site.tunnel = format!("{},{}", site.tunnel, dead.address());
    let edge = site.edge("edge-1", app.port());
    let edge = edge.args(["--tunnels-gateways", "every"]);
    let mut edge = edge.flag("--log-filter", "debug").start();
    let named = format!("could not dial {}", dead.address());
    let grown = |line: &str| {
        let delay = line.split_once("retry_in=").map_or("", |(_, delay)| delay);
        let delay = delay.split(' ').next().unwrap_or_default();
        let seconds = delay.strip_suffix('s').and_then(|delay| delay.parse().ok());
        line.contains(&named) && seconds.is_some_and(|seconds: f64| seconds > 2.0)
    };
    edge.line("a pause of more than 2 s", grown).await;
    let written = edge.written();
    let warned = |line: &&str| line.contains(" WARN ") && line.contains(&named);
    let lines = written.stdout.lines().chain(written.stderr.lines());
    assert_eq!(lines.filter(warned).count(), 1, "{written:?}");
    serves(&site).await;
}

#[tokio::test]
async fn a_blackhole_gateway_does_not_block_the_next_gateway() {
    need!(NEED);
    let street = SharedNetwork::new();
    let (host, hole) = (street.host(), street.host());
    let app = app_at(&host).await;
    let mut site = GatewayProcess::open_to_all(&format!("{HUB}:0")).await;
    let joined = site.join_by(host.causeway(), "edge-1", app.port()).await;
    joined.stop().await.ok();
    hole.cut();
    let swallows = format!("{}:10262", hole.address());
    site.tunnel = format!("{swallows},{}", site.tunnel);
    let edge = site.edge_of(host.causeway(), "edge-1", app.port());
    let mut edge = edge.args(["--tunnels-gateways", "one"]).start();
    let named = edge
        .wait_for_line("connected to this gateway after others")
        .await;
    assert!(named.contains(&swallows), "{named}");
    stands(&edge, 1).await;
    serves(&site).await;
}
