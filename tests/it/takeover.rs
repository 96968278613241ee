//! A gateway whose successor takes over its sockets (`gateway --take-over`): no client, edge or command is refused meanwhile.

use crate::sessions::echoes;
use crate::world::{
    app::{App, Head, Script, answer},
    client::{Client, Wire, exchange, read},
    process::{Causeway, GatewayProcess, OPEN, Process, address_after, binary, causeway, program},
    tool::{Tool, need},
    until,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

const URL: &str = "http://edge-1:9100/";
/// Time for which a draining gateway waits at least for the next request on a connection.
const LATE: Duration = Duration::from_secs(1);
const UPGRADE: &str = "GET /session HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";

fn script(head: &Head) -> Script {
    match head.path().as_str() {
        "/session" => answer::switch("SPDY/3.1", b"hello"),
        _ => answer::ok("it"),
    }
}

/// Returns a gateway that admits every client, and an edge of it.
async fn start(app: &App, configuration: &str) -> (GatewayProcess, Process) {
    start_with(app, &format!("{OPEN}\n{configuration}")).await
}

/// Returns a gateway with this configuration, and an edge of it.
async fn start_with(app: &App, configuration: &str) -> (GatewayProcess, Process) {
    let site = GatewayProcess::with_listeners(configuration).await;
    let edge = site.join("edge-1", app.port()).await;
    (site, edge)
}

/// Returns a process that takes over from the gateway, started by `command` if there is one.
fn successor(site: &GatewayProcess, command: &str) -> Causeway {
    causeway(&format!("{command} gateway --take-over"))
        .flag("--config", site.path("gateway.yaml"))
        .flag("--tunnel-listen", &site.tunnel)
}

/// A session through an upgrade.
async fn session(client: &Client) -> Box<dyn Wire> {
    let mut wire: Box<dyn Wire> = Box::new(client.tcp_stream().await);
    let head = exchange(&mut wire, UPGRADE).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert_eq!(read(&mut wire, 5).await, b"hello");
    wire
}

/// Clients that send requests until they are stopped: half of them over one connection each as long as the gateway keeps it,
/// half over a new connection each time.
struct Load {
    stop: CancellationToken,
    answers: Arc<AtomicUsize>,
    tasks: JoinSet<()>,
}

impl Load {
    async fn start(site: &GatewayProcess) -> Self {
        let mut load = Self {
            stop: CancellationToken::new(),
            answers: Arc::default(),
            tasks: JoinSet::new(),
        };
        for keeps in [true, false].into_iter().cycle().take(8) {
            let (client, stop, answers) = (site.nobody(), load.stop.clone(), load.answers.clone());
            load.tasks.spawn(async move {
                while !stop.is_cancelled() {
                    let mut before = Instant::now();
                    let mut connection = client.connect("edge-1").await.unwrap();
                    loop {
                        let now = Instant::now();
                        let answer = match connection.get(URL).await {
                            Ok(answer) => answer,
                            // This process was stopped between two requests, and the gateway has closed the connection.
                            Err(_) if before.elapsed() >= LATE => break,
                            Err(error) => panic!("{error}"),
                        };
                        before = now;
                        assert_eq!(answer.status, 200, "{answer}");
                        answers.fetch_add(1, Ordering::Relaxed);
                        if !keeps || answer.field("connection") == "close" || stop.is_cancelled() {
                            break;
                        }
                    }
                }
            });
        }
        load.more(100).await;
        load
    }

    /// Waits for further answers.
    async fn more(&self, answers: usize) {
        let wanted = self.answers.load(Ordering::Relaxed) + answers;
        until("clients get answers", async || {
            self.answers.load(Ordering::Relaxed) >= wanted
        })
        .await;
    }

    /// Ends the load. Panics if a request has failed.
    async fn end(mut self) {
        self.more(100).await;
        self.stop.cancel();
        while let Some(ended) = self.tasks.join_next().await {
            ended.unwrap();
        }
    }
}

#[tokio::test]
async fn a_takeover_costs_no_request_and_can_be_repeated() {
    let app = App::http(script).await;
    let (mut site, edge) = start(&app, "").await;
    let load = Load::start(&site).await;
    for _ in 0..3 {
        let (admin, listener) = (site.admin.clone(), site.listener.clone());
        let (successor, old) = site.take_over(&[]).await;
        site = successor;
        assert_eq!((&site.admin, &site.listener), (&admin, &listener));
        load.more(100).await;
        let ended = old.ended().await.ok();
        assert!(
            ended.stderr.contains("another process serves clients now"),
            "{ended:?}"
        );
        // The edge has left the old process, and the new one answers commands.
        let status = causeway("status").flag("--data-dir", site.data());
        let status = status.run().await.ok();
        assert!(status.stdout.contains("edge-1"), "{status:?}");
    }
    load.end().await;
    assert!(edge.written().ended().is_empty());
}

/// A rollout replaces edges and the gateway at the same time.
#[tokio::test]
async fn a_request_that_waits_for_its_edge_is_answered_before_the_takeover() {
    let app = App::http(script).await;
    let (mut site, edge) = start(&app, "timeouts: { reconnect: 5m }").await;
    edge.kill().await;
    site.gateway.wait_for_line("edge-1 disconnected").await;
    let client = site.nobody();
    let mut waiting = JoinSet::new();
    waiting.spawn(async move { client.get(URL).await });
    until("the request waits", async || {
        site.metrics().await.sum("open_streams", &[]) > 0
    })
    .await;
    let mut next = successor(&site, "").start();
    site.gateway
        .wait_for_line("another process takes over")
        .await;
    // The edge connects to the process in which the request waits.
    let _edge = site.edge("edge-1", app.port()).start();
    let answer = waiting.join_next().await.unwrap().unwrap();
    assert_eq!(answer.status, 200, "{answer}");
    next.wait_for_line("gateway ready").await;
    assert_eq!(site.nobody().get(URL).await.status, 200);
}

#[tokio::test]
async fn a_session_outlasts_the_takeover() {
    let app = App::http(script).await;
    let (site, _edge) = start(&app, "timeouts: { drain: 5m }").await;
    let mut session = session(&site.nobody()).await;
    let (site, old) = site.take_over(&[]).await;
    echoes(&mut session).await;
    assert_eq!(site.nobody().get(URL).await.status, 200);
    drop(session);
    old.ended().await.ok();
}

#[tokio::test]
async fn a_process_that_cannot_start_leaves_the_running_one_unchanged() {
    let app = App::http(script).await;
    let (mut site, _edge) = start(&app, "").await;
    let occupied = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = occupied.local_addr().unwrap().to_string();
    let failed = successor(&site, "")
        .flag("--admin-metrics-listen", &address)
        .run()
        .await;
    failed.failed(&["admin.metrics_listen", &address]);
    assert_eq!(site.nobody().get(URL).await.status, 200);
    // It still accepts tunnels and commands.
    let _second = site.join("edge-2", app.port()).await;
    let (_site, old) = {
        site.gateway.wait_for_line("edge-2 connected").await;
        site.take_over(&[]).await
    };
    old.ended().await.ok();
}

#[tokio::test]
async fn a_start_without_take_over_is_refused_beside_a_running_process() {
    let app = App::http(script).await;
    let (site, _edge) = start(&app, "").await;
    let second = causeway("gateway --tunnel-listen 127.0.0.1:0")
        .flag("--config", site.path("gateway.yaml"))
        .run()
        .await;
    second.failed(&["in use by another causeway process"]);
    assert_eq!(site.nobody().get(URL).await.status, 200);
}

#[tokio::test]
async fn a_revocation_after_the_takeover_ends_streams_of_the_old_process() {
    let app = App::http(script).await;
    let (site, _edge) = start(&app, "timeouts: { drain: 5m }").await;
    let mut session = session(&site.nobody()).await;
    let (site, old) = site.take_over(&[]).await;
    echoes(&mut session).await;
    let revoke = causeway("node revoke edge-1 --reason stolen");
    revoke.flag("--data-dir", site.data()).run().await.ok();
    // Nothing else would end the old process within its drain time.
    old.ended().await.ok();
    assert_ne!(site.nobody().get(URL).await.status, 200);
}

#[tokio::test]
async fn a_policy_change_after_the_takeover_ends_streams_of_the_old_process() {
    let app = App::http(script).await;
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.yaml");
    fs::write(
        &policy,
        "rules: [{ then: allow, who: { users: [\"system:anonymous\"] } }]\n",
    )
    .unwrap();
    let configuration = format!("timeouts: {{ drain: 5m }}\npolicy: {}", policy.display());
    let (site, _edge) = start(&app, &configuration).await;
    let mut session = session(&site.nobody()).await;
    let (site, mut old) = site.take_over(&[]).await;
    old.wait_for_line("another process serves clients now")
        .await;
    echoes(&mut session).await;
    fs::write(&policy, "rules: []\n").unwrap();
    let reload = causeway("reload").flag("--data-dir", site.data());
    reload.run().await.ok();
    assert_eq!(site.nobody().get(URL).await.status, 403);
    // Nothing else would end the old process within its drain time.
    old.ended().await.ok();
}

#[tokio::test]
async fn a_revoked_token_after_the_takeover_ends_streams_of_the_old_process() {
    let app = App::http(script).await;
    let folder = tempfile::tempdir().unwrap();
    let tokens = folder.path().join("clients");
    let made = causeway("client token --name bob").flag("--file", &tokens);
    let token = made.run().await.ok().stdout.trim().to_owned();
    let configuration = format!(
        "listeners: [{{ name: web, protocol: http, listen: \"127.0.0.1:0\", port: 9100, client_auth: {{ own_ca: false, tokens: {} }} }}]\ntimeouts: {{ drain: 5m }}",
        tokens.display()
    );
    let (site, _edge) = start_with(&app, &configuration).await;
    let mut session: Box<dyn Wire> = Box::new(site.nobody().tcp_stream().await);
    let (line, fields) = UPGRADE.split_once("\r\n").unwrap();
    let upgrade = format!("{line}\r\nAuthorization: Bearer {token}\r\n{fields}");
    let head = exchange(&mut session, &upgrade).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert_eq!(read(&mut session, 5).await, b"hello");
    let (site, mut old) = site.take_over(&[]).await;
    old.wait_for_line("another process serves clients now")
        .await;
    echoes(&mut session).await;
    let revoke = causeway("client revoke --name bob").flag("--file", &tokens);
    revoke.run().await.ok();
    let reload = causeway("reload").flag("--data-dir", site.data());
    reload.run().await.ok();
    // Nothing else would end the old process within its drain time.
    old.ended().await.ok();
}

#[tokio::test]
async fn a_stopping_gateway_hands_over_what_it_still_serves() {
    let app = App::http(script).await;
    let (site, _edge) = start(&app, "timeouts: { drain: 5m }").await;
    let mut session = session(&site.nobody()).await;
    let load = Load::start(&site).await;
    // Because of the session it keeps its listeners open and drains for minutes.
    site.gateway.signal("TERM").await;
    let (site, mut old) = site.take_over(&[]).await;
    old.wait_for_line("another process serves clients now")
        .await;
    echoes(&mut session).await;
    load.end().await;
    drop(session);
    old.ended().await.ok();
    assert_eq!(site.nobody().get(URL).await.status, 200);
}

#[tokio::test]
async fn after_the_end_of_the_running_process_a_takeover_is_an_ordinary_start() {
    let app = App::http(script).await;
    let (site, _edge) = start(&app, "").await;
    site.gateway.signal("KILL").await;
    let mut next = successor(&site, "").start();
    next.wait_for_line("edge-1 connected").await;
}

#[tokio::test]
async fn a_crash_of_the_successor_does_not_wait_for_the_old_process() {
    let app = App::http(script).await;
    let (site, _edge) = start(&app, "timeouts: { drain: 5m }").await;
    let mut session = session(&site.nobody()).await;
    let (site, mut old) = site.take_over(&[]).await;
    old.wait_for_line("another process serves clients now")
        .await;
    site.gateway.signal("KILL").await;
    let mut next = successor(&site, "").start();
    next.wait_for_line("edge-1 connected").await;
    echoes(&mut session).await;
    drop(session);
    old.ended().await.ok();
}

#[tokio::test]
async fn a_supervised_process_that_cannot_start_has_the_last_line_and_the_exit_code() {
    let failed = causeway("supervise gateway --data-dir /dev/null --admin-listen nonsense")
        .run()
        .await;
    let failed = failed.with_code(2);
    let last = failed.stderr.lines().last().unwrap();
    assert!(last.contains("nonsense"), "{failed:?}");
}

#[tokio::test]
async fn a_supervised_process_that_fails_at_once_is_not_restarted_at_once() {
    let site = GatewayProcess::with_listeners(OPEN).await;
    let occupied = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = occupied.local_addr().unwrap().to_string();
    let start = || {
        successor(&site, "supervise")
            .flag("--admin-metrics-listen", &address)
            .start()
    };
    let began = Instant::now();
    start().ended().await.failed(&[&address]);
    assert!(began.elapsed() >= Duration::from_secs(5));
    // Neither the child nor the supervisor's own failures are retried at once.
    let began = Instant::now();
    let without_room = causeway("supervise completions bash").env("TMPDIR", "/nonexistent");
    let failed = without_room.run().await;
    assert!(
        failed.stderr.contains("cannot relay messages"),
        "{failed:?}"
    );
    assert!(began.elapsed() >= Duration::from_secs(5));
    let began = Instant::now();
    causeway("supervise completions bash").run().await.ok();
    assert!(began.elapsed() >= Duration::from_secs(5));
    // A stop does not wait.
    let mut stopped = start();
    stopped.wait_for_line(&address).await;
    stopped.signal("TERM").await;
    stopped.ended().await.ok();
}

#[tokio::test]
async fn a_supervised_process_that_hangs_at_the_stop_is_killed() {
    let app = App::http(script).await;
    let (site, _edge) = start(&app, "").await;
    let supervised = || successor(&site, "supervise");
    let mut first = supervised().start();
    first.wait_for_line("gateway ready").await;
    let id = first.id();
    let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
    let child = Pid::from_raw(children.trim().parse().unwrap());
    kill(child, Signal::SIGSTOP).unwrap();
    first.signal("TERM").await;
    first
        .ended()
        .await
        .failed(&["did not stop within 10s, and was killed"]);
    // A process that hangs would not hand over its sockets.
    let mut second = supervised().start();
    second.wait_for_line("edge-1 connected").await;
    second.signal("TERM").await;
    second.ended().await.ok();
}

#[tokio::test]
async fn a_supervised_restart_does_not_wait_for_open_sessions() {
    let app = App::http(script).await;
    let (site, _edge) = start(&app, "timeouts: { drain: 5m }").await;
    let supervised = || successor(&site, "supervise");
    let mut first = supervised().start();
    first.wait_for_line("gateway ready").await;
    let mut session = session(&site.nobody()).await;
    let load = Load::start(&site).await;
    // The child continues after this.
    first.signal("TERM").await;
    let mut second = supervised().start();
    second.wait_for_line("gateway ready").await;
    load.end().await;
    echoes(&mut session).await;
    drop(session);
    let ended = first.ended().await.ok();
    assert!(
        ended.stderr.contains("another process serves clients now"),
        "{ended:?}"
    );
    second.signal("TERM").await;
    second.ended().await.ok();
}

#[tokio::test]
async fn the_next_process_starts_although_an_earlier_one_still_drains() {
    let app = App::http(script).await;
    let (site, _edge) = start(&app, "timeouts: { drain: 5m }").await;
    let mut first_session = session(&site.nobody()).await;
    let (site, mut first) = site.take_over(&[]).await;
    first
        .wait_for_line("another process serves clients now")
        .await;
    let mut second_session = session(&site.nobody()).await;
    let (mut site, mut second) = site.take_over(&[]).await;
    second
        .wait_for_line("another process serves clients now")
        .await;
    // The newest process is killed while both earlier ones drain: its successor binds the addresses itself.
    site.gateway.signal("KILL").await;
    let (listener, admin) = (site.listener.clone(), site.admin.clone());
    let text = fs::read_to_string(site.path("gateway.yaml")).unwrap();
    let text = text.replace("127.0.0.1:0\", port", &format!("{listener}\", port"));
    fs::write(site.path("gateway.yaml"), text).unwrap();
    let mut next = successor(&site, "").flag("--admin-listen", &admin).start();
    next.wait_for_line("edge-1 connected").await;
    assert_eq!(site.nobody().get(URL).await.status, 200);
    for session in [&mut first_session, &mut second_session] {
        echoes(session).await;
    }
    // An operator who ends the earlier processes at once leaves the files of the running one.
    for earlier in [&first, &second] {
        earlier.signal("TERM").await;
        earlier.signal("INT").await;
    }
    first.ended().await;
    second.ended().await;
    let revoke = causeway("node revoke edge-1 --reason stolen").flag("--data-dir", site.data());
    let revoked = revoke.run().await.ok();
    assert!(!revoked.stdout.contains("no gateway runs"), "{revoked:?}");
    assert_ne!(site.nobody().get(URL).await.status, 200);
    site.gateway = next;
}

#[tokio::test]
async fn the_running_process_serves_on_if_its_successor_is_killed() {
    let app = App::http(script).await;
    let dns = "dns: { listen: \"127.0.0.1:0\", zones: [edges.example], addresses: [192.0.2.1] }";
    let (site, _edge) = start(&app, &format!("timeouts: {{ drain: 5m }}\n{dns}")).await;
    // The successor waits for this edge, which does not respond.
    let silent = site.join("edge-2", app.port()).await;
    silent.signal("STOP").await;
    let next = || successor(&site, "");
    let mut killed = next().start();
    killed
        .wait_for_line("taking over from the running gateway")
        .await;
    killed.wait_for_line("edge-1 connected").await;
    killed.kill().await;
    for _ in 0..10 {
        assert_eq!(site.nobody().get(URL).await.status, 200);
    }
    silent.signal("CONT").await;
    let mut next = next().start();
    next.wait_for_line("gateway ready").await;
    assert_eq!(site.nobody().get(URL).await.status, 200);
    let GatewayProcess { gateway, .. } = site;
    gateway.ended().await.ok();
}

#[tokio::test]
async fn unix_listeners_and_dns_are_taken_over() {
    need!("dig");
    let app = App::http(script).await;
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("web.sock");
    let (site, _edge) = start_with(
        &app,
        &format!(
            "listeners: [{{ name: web, protocol: http, listen: \"127.0.0.1:0\", port: 9100, anonymous: true }}, {{ name: local, protocol: http, listen: \"unix:{}\", port: 9100, anonymous: true }}]\ndns: {{ listen: \"127.0.0.1:0\", zones: [edges.example], addresses: [192.0.2.1] }}",
            socket.display()
        ),
    )
    .await;
    let dns = site.gateway.written();
    let dns = address_after(
        dns.line(|line| line.contains("answering DNS")).unwrap(),
        "address=",
    );
    let (host, port) = dns.split_once(':').unwrap();
    let resolve = async || {
        let asked = Tool::new("dig").args([&format!("@{host}"), "-p", port, "+short", "+time=2"]);
        asked.args(["edge-1.edges.example"]).run().await.ok().text()
    };
    let local = async || {
        let curl = Tool::curl().args(["--unix-socket"]).args([&socket]);
        curl.args(["-H", "Host: edge-1:9100", "http://edge-1:9100/"])
            .run()
            .await
            .ok()
            .text()
    };
    assert_eq!(
        (resolve().await.trim(), local().await.as_str()),
        ("192.0.2.1", "it")
    );
    let (_site, old) = site.take_over(&[]).await;
    assert_eq!(
        (resolve().await.trim(), local().await.as_str()),
        ("192.0.2.1", "it")
    );
    old.ended().await.ok();
    assert_eq!(
        (resolve().await.trim(), local().await.as_str()),
        ("192.0.2.1", "it")
    );
}

/// Pods of one host have the same data directory. A probe of the next pod must not report the previous one as its own process.
#[tokio::test]
async fn health_tells_a_process_of_another_container_apart() {
    need!("mounts");
    let site = GatewayProcess::start().await;
    site.until_ready().await;
    let data = site.data();
    let health = |flags: &[&str]| causeway("health").flag("--data-dir", &data).args(flags);
    health(&["--ready", "--same-container"]).run().await.ok();
    let elsewhere = |flags: &[&str]| {
        let other = program("unshare").args(["--pid", "--fork", binary(), "health"]);
        other.flag("--data-dir", &data).args(flags)
    };
    elsewhere(&["--ready"]).run().await.ok();
    let refused = elsewhere(&["--ready", "--same-container"]).run().await;
    refused.failed(&["runs in another container"]);
}
