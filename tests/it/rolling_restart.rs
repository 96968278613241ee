//! Three gateways behind a balancer for their clients, under requests: a rolling restart with open sessions, and a kill.
//!
//! Real processes. With `CAUSEWAY_TEST_FULL=1` there are a thousand requests each second instead of a hundred.

use crate::{
    peers::peers_of,
    world::{
        PATIENCE,
        app::{App, answer},
        client::{Client, ListenerAddress, Wire, whole},
        process::{GatewayProcess, Process, causeway},
        tool::{Running, Tool, full, need},
        until,
    },
};
use futures_util::{StreamExt, future::join_all, stream};
use hyper::Request;
use std::{
    cell::{Cell, RefCell},
    fmt::{self, Write},
    fs, io,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    time::Duration,
};
use tempfile::TempDir;
use test_summary::unused_port;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};

const GATEWAYS: u8 = 3;
const NODES: [&str; 6] = ["edge-1", "edge-2", "edge-3", "edge-4", "edge-5", "edge-6"];
const SESSIONS: usize = 200;
/// `timeouts.drain`.
const DRAIN: Duration = Duration::from_secs(5);
/// Time for which a draining gateway waits at least for requests of clients that have connected.
const LATE: Duration = Duration::from_secs(1);
/// Body of a POST, which the app sends back.
const UPLOAD: &str = "a body of some bytes";
/// Number of the balancer's address.
const BALANCER: u8 = 100;

fn address(number: u8, port: u16) -> SocketAddr {
    (Ipv4Addr::new(127, 53, 24, number), port).into()
}

/// The gateways, their edges, and a client of the balancer.
struct Fleet {
    gateways: Vec<GatewayProcess>,
    client: Client,
    _edges: Vec<Process>,
    _balancer: (Running, TempDir),
    _app: App,
}

impl Fleet {
    async fn start(app: App) -> Self {
        let [tunnels, clients, admin] = [(); 3].map(|()| unused_port());
        let peers: Vec<_> = (1..=GATEWAYS)
            .map(|number| format!("\"{}\"", address(number, tunnels)))
            .collect();
        let configuration = |number| {
            format!(
                "listeners: [{{ name: web, protocol: http, listen: \"{}\", port: 9100, anonymous: true }}]\n\
                 peers: {{ addresses: [{}] }}\n\
                 timeouts: {{ drain: {DRAIN:?} }}\n",
                address(number, clients),
                peers.join(", ")
            )
        };
        let mut gateways: Vec<GatewayProcess> = Vec::new();
        for number in 1..=GATEWAYS {
            let tunnel = address(number, tunnels).to_string();
            let configuration = configuration(number);
            let gateway = match gateways.first() {
                Some(first) => first.replica_with(&tunnel, &configuration).await,
                None => start_with_nodes(&tunnel, &configuration, &app).await,
            };
            let file = gateway.path("gateway.yaml");
            let change = |_: &Path| {
                let text = fs::read_to_string(&file).unwrap();
                let listen = format!("admin: {{ listen: \"{}\"", address(number, admin));
                let text = text.replace("admin: { listen: \"127.0.0.1:0\"", &listen);
                fs::write(&file, text).unwrap();
            };
            gateways.push(gateway.restart(change).await);
        }
        for gateway in &gateways {
            until_synchronized(gateway).await;
        }
        let edges = edges(&gateways, &app).await;
        let balancer = balancer(clients, admin);
        let client = gateways[0].nobody_at(ListenerAddress::Plain(address(BALANCER, clients)));
        until("the balancer serves", async || {
            client.wire("", &[]).await.is_ok()
        })
        .await;
        Self {
            gateways,
            client,
            _edges: edges,
            _balancer: balancer,
            _app: app,
        }
    }
}

/// Starts the first gateway, which has seen the nodes join.
async fn start_with_nodes(tunnel: &str, configuration: &str, app: &App) -> GatewayProcess {
    let first = GatewayProcess::listening(tunnel, configuration).await;
    for node in NODES {
        first.join(node, app.port()).await.stop().await.ok();
    }
    first
}

/// Starts an edge for each node, with tunnels to two gateways.
async fn edges(gateways: &[GatewayProcess], app: &App) -> Vec<Process> {
    let addresses: Vec<_> = gateways.iter().map(|site| site.tunnel.as_str()).collect();
    let starts = NODES.map(|node| {
        let edge = causeway("edge --admin-listen 127.0.0.1:0 --tunnels-gateways 2")
            .flag("--gateways", addresses.join(","))
            .flag("--data-dir", gateways[0].edge_data(node))
            .flag(
                "--ports",
                format!("{{9100: {{target: \"127.0.0.1:{}\"}}}}", app.port()),
            );
        async {
            let mut edge = edge.start();
            edge.wait_for_line("tunnel registered").await;
            edge
        }
    });
    join_all(starts).await
}

/// Starts a balancer that connects clients to each gateway which reports that it is ready, as a Service does.
fn balancer(clients: u16, admin: u16) -> (Running, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("haproxy.cfg");
    let mut text = format!(
        "defaults\n mode tcp\n timeout connect 2s\n timeout client 1h\n timeout server 1h\n timeout check 10s\n option redispatch 1\n\
         listen gateways\n bind {}\n balance roundrobin\n option httpchk GET /readyz\n\
         default-server check inter 100ms fall 1 rise 1\n",
        address(BALANCER, clients)
    );
    for number in 1..=GATEWAYS {
        let (to, check) = (address(number, clients), address(number, admin));
        writeln!(
            text,
            " server g{number} {to} addr {} port {admin}",
            check.ip()
        )
        .unwrap();
    }
    fs::write(&file, text).unwrap();
    let haproxy = Tool::new("haproxy").args(["-db".as_ref(), "-f".as_ref(), file.as_os_str()]);
    (haproxy.start(), folder)
}

/// Waits as a rollout does before it restarts the next gateway.
async fn until_synchronized(gateway: &GatewayProcess) {
    until("the gateway and its peers are connected", async || {
        let peers = peers_of(gateway).await;
        peers.len() == usize::from(GATEWAYS) - 1
            && peers.iter().all(|peer| peer["synchronized"] == true)
    })
    .await;
}

/// Progress of the restart, and results of the clients.
struct Run {
    is_over: Cell<bool>,
    /// Times of the signals to the gateways.
    drains: RefCell<Vec<Instant>>,
    answered: Cell<usize>,
    /// Each failure of a session or a request, with the time at which it began.
    failed: RefCell<Vec<(Instant, String)>>,
    /// For each session, when the last bytes were sent that came back.
    echoes: RefCell<[Option<Instant>; SESSIONS]>,
    /// Sessions that ended after the drain time of a gateway.
    ended_sessions: Cell<usize>,
}

impl Run {
    fn new() -> Self {
        Self {
            is_over: Cell::new(false),
            drains: RefCell::default(),
            answered: Cell::new(0),
            failed: RefCell::default(),
            echoes: RefCell::new([None; SESSIONS]),
            ended_sessions: Cell::new(0),
        }
    }

    fn fail(&self, begun: Instant, error: &str) {
        let since = self
            .drains
            .borrow()
            .iter()
            .map(Instant::elapsed)
            .collect::<Vec<_>>();
        self.failed
            .borrow_mut()
            .push((begun, format!("{error}, after signals {since:?} ago")));
    }

    /// Whether a draining gateway may have refused a request or session that began at this time. The client had connected, and the
    /// machine stopped it for longer than the gateway waits for it, or until the drain time was over.
    fn is_late(&self, begun: Instant, failure: &Failure) -> bool {
        let drains = self.drains.borrow();
        let Some(signal) = drains.last() else {
            return false;
        };
        let may_be_refused = match failure {
            Failure::Connection(_) => true,
            Failure::Answer(answer) if answer.contains("tunnel_lost") => signal.elapsed() >= DRAIN,
            Failure::Answer(answer) => answer.contains("draining"),
        };
        may_be_refused && begun.elapsed() >= LATE
    }

    /// Sends this many requests each second, each on a connection of its own. Every other one has a body.
    async fn requests(&self, client: &Client, rate: u32) {
        let mut tick = interval(Duration::from_secs(1) / rate);
        tick.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let bodies = ["", UPLOAD].into_iter();
        let kinds = bodies
            .flat_map(|body| NODES.map(|node| (node, body)))
            .cycle();
        let requests = stream::unfold((tick, kinds), |(mut tick, mut kinds)| async {
            tick.tick().await;
            let request = self.request(client, kinds.next()?);
            (!self.is_over.get()).then_some((request, (tick, kinds)))
        });
        requests.buffer_unordered(500).collect::<()>().await;
    }

    /// Sends a GET, or a POST if there is a body. A late one is sent again.
    async fn request(&self, client: &Client, (node, body): (&str, &'static str)) {
        let method = if body.is_empty() { "GET" } else { "POST" };
        loop {
            let begun = Instant::now();
            let request = Request::builder().method(method);
            let request = request
                .uri(format!("http://{node}:9100/"))
                .body(whole(body));
            let answer = timeout(PATIENCE, client.try_send(request.unwrap())).await;
            let failure = match answer {
                Ok(Ok(answer)) if answer.status == 200 => {
                    let expected = if body.is_empty() { "here" } else { body };
                    assert_eq!(answer.text(), expected);
                    return self.answered.set(self.answered.get() + 1);
                }
                Ok(Ok(answer)) => Failure::Answer(answer.to_string()),
                Ok(Err(error)) => Failure::Connection(error.to_string()),
                Err(_) => return self.fail(begun, &format!("{method} {node}: no answer")),
            };
            if !self.is_late(begun, &failure) {
                return self.fail(begun, &format!("{method} {node}: {failure}"));
            }
        }
    }

    /// Keeps a session open, and begins another one whenever it ends.
    async fn session(&self, client: &Client, number: usize, node: &str) {
        while !self.is_over.get() {
            let begun = Instant::now();
            let mut session = match open_session(client, node).await {
                Ok(session) => session,
                Err(failure) if self.is_late(begun, &failure) => continue,
                Err(failure) => {
                    return self.fail(begun, &format!("session with {node}: {failure}"));
                }
            };
            while !self.is_over.get() {
                let sent = Instant::now();
                if !is_echoed(&mut *session).await {
                    break;
                }
                self.echoes.borrow_mut()[number] = Some(sent);
                sleep(Duration::from_millis(200)).await;
            }
            if self.is_over.get() {
                return;
            }
            let drained = |signal: &Instant| signal.elapsed() >= DRAIN;
            if !self.drains.borrow().last().is_some_and(drained) {
                return self.fail(begun, &format!("the session with {node} ended too early"));
            }
            self.ended_sessions.set(self.ended_sessions.get() + 1);
        }
    }

    /// Restarts each gateway, and waits for it before the next one.
    async fn restart(&self, gateways: Vec<GatewayProcess>) -> Vec<GatewayProcess> {
        let mut restarted = Vec::new();
        for gateway in gateways {
            self.until_open().await;
            self.drains.borrow_mut().push(Instant::now());
            gateway.gateway.signal("TERM").await;
            let gateway = gateway.start_again().await;
            until_synchronized(&gateway).await;
            restarted.push(gateway);
        }
        self.until_open().await;
        self.is_over.set(true);
        restarted
    }

    /// Waits until all sessions are open. A session of the gateway that ended counts only when it has begun again.
    async fn until_open(&self) {
        let since = Some(Instant::now());
        until("all sessions are open", async || {
            self.echoes.borrow().iter().all(|sent| *sent >= since)
                || !self.failed.borrow().is_empty()
        })
        .await;
    }
}

/// Failure of a request, or of the beginning of a session.
enum Failure {
    /// An answer other than the expected one.
    Answer(String),
    /// The connection ended without an answer.
    Connection(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Answer(text) | Self::Connection(text)) = self;
        f.write_str(text)
    }
}

async fn open_session(client: &Client, node: &str) -> Result<Box<dyn Wire>, Failure> {
    let opened = client.wire("", &[]).await;
    let mut session = opened.map_err(|error| Failure::Connection(error.to_string()))?;
    let head = format!(
        "GET /session HTTP/1.1\r\nHost: {node}:9100\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    );
    let answer = timeout(PATIENCE, send_and_read_head(&mut *session, &head)).await;
    let answer = answer.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    let answer = answer.map_err(|error| Failure::Connection(error.to_string()))?;
    let is_switched = answer.starts_with("HTTP/1.1 101 ");
    is_switched
        .then_some(session)
        .ok_or(Failure::Answer(answer))
}

async fn send_and_read_head(session: &mut dyn Wire, request: &str) -> io::Result<String> {
    session.write_all(request.as_bytes()).await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(session.read_u8().await?);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

/// Whether bytes still pass in both directions. Panics if other bytes arrive than were sent.
async fn is_echoed(session: &mut dyn Wire) -> bool {
    let echo = async {
        session.write_all(b"still here").await?;
        let mut echoed = [0; 10];
        session.read_exact(&mut echoed).await?;
        assert_eq!(&echoed, b"still here");
        io::Result::Ok(())
    };
    timeout(PATIENCE, echo)
        .await
        .is_ok_and(|echoed| echoed.is_ok())
}

async fn start_fleet() -> Fleet {
    let app = App::http(|head| match head.path().as_str() {
        "/session" => answer::switch("websocket", b""),
        _ if head.method() == "POST" => answer::mirror(),
        _ => answer::ok("here"),
    })
    .await;
    Box::pin(Fleet::start(app)).await
}

fn rate() -> u32 {
    if full() { 1_000 } else { 100 }
}

#[tokio::test]
async fn a_rolling_restart_fails_no_request_and_gives_sessions_the_drain_time() {
    need!("haproxy");
    let mut fleet = start_fleet().await;
    let (run, began) = (Run::new(), Instant::now());
    let (gateways, client) = (std::mem::take(&mut fleet.gateways), &fleet.client);
    let sessions = (0..SESSIONS).zip(NODES.into_iter().cycle());
    let sessions = join_all(sessions.map(|(number, node)| run.session(client, number, node)));
    let (_gateways, (), _) = tokio::join!(
        run.restart(gateways),
        run.requests(client, rate()),
        sessions
    );
    let (answered, took) = (run.answered.get(), began.elapsed());
    println!(
        "{answered} requests in {took:?}, {} sessions ended after their drain time",
        run.ended_sessions.get()
    );
    let failed = run.failed.borrow();
    assert!(
        failed.is_empty(),
        "{} failed, for example {:#?}",
        failed.len(),
        &failed[..failed.len().min(5)]
    );
    let expected = if full() {
        u64::from(rate()) * took.as_secs() * 8 / 10
    } else {
        500
    };
    assert!(answered as u64 >= expected, "{answered} of {expected}");
    // Each session was at a gateway that was restarted.
    assert!(
        run.ended_sessions.get() >= SESSIONS,
        "{}",
        run.ended_sessions.get()
    );
}

#[tokio::test]
async fn a_kill_of_a_gateway_fails_no_request_that_begins_after_it() {
    need!("haproxy");
    let mut fleet = start_fleet().await;
    let killed = fleet.gateways.remove(0);
    let run = Run::new();
    let until_answered = async |more: usize| {
        let wanted = run.answered.get() + more;
        until("requests are answered", async || {
            run.answered.get() >= wanted
        })
        .await;
    };
    let kill = async {
        until_answered(300).await;
        assert!(run.failed.borrow().is_empty(), "{:#?}", run.failed);
        killed.gateway.kill().await;
        let after = Instant::now();
        until_answered(1_000).await;
        run.is_over.set(true);
        after
    };
    let (after, ()) = tokio::join!(kill, run.requests(&fleet.client, rate()));
    let failed = run.failed.borrow();
    println!(
        "{} requests answered, {} failed: {:#?}",
        run.answered.get(),
        failed.len(),
        &failed[..failed.len().min(5)]
    );
    let late: Vec<_> = failed.iter().filter(|(begun, _)| *begun >= after).collect();
    assert!(late.is_empty(), "they began after the kill: {late:#?}");
    // The others lost their connection, or were being forwarded, so that the node may have received them.
    let is_expected = |error: &str| !error.contains(": 5") || error.contains(": 502 ");
    let unexpected = failed.iter().find(|(_, error)| !is_expected(error));
    assert!(unexpected.is_none(), "{unexpected:#?}");
}
