//! Gateways that forward requests to each other: a client reaches each node at any gateway, whichever has the node's tunnel.

use crate::world::{
    admin,
    app::{App, answer},
    authority::Authority,
    client::{exchange, read, read_to_end},
    process::{Causeway, ExitedProcess, GatewayProcess, Process, address_after, causeway},
    tool::Tool,
    until,
};
use serde_json::{Value, json};
use std::{
    fs,
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};
use test_summary::unused_port;
use tokio::{io::AsyncWriteExt, net::TcpStream};
use tokio_util::sync::CancellationToken;

const URL: &str = "http://edge-1:9100/";

/// Listeners for requests to any node, for sessions with one node, and for sessions with any node of the pool.
const LISTENERS: &str = "listeners:
  - { name: web, protocol: http, listen: \"127.0.0.1:0\", port: 9100, anonymous: true }
  - { name: raw, protocol: tcp, listen: \"127.0.0.1:0\", node: edge-1, port: 9100, anonymous: true }
  - { name: set, protocol: tcp, listen: \"127.0.0.1:0\", pool: north, port: 9100, anonymous: true }
timeouts: { reconnect: 2s }
";

/// Gateways with one CA and the same nodes, which know each other's tunnel ports.
pub(crate) struct Fleet {
    pub(crate) sites: Vec<GatewayProcess>,
}

/// Returns the address of a gateway.
fn address(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(127, 53, 20, u8::try_from(number).unwrap() + 1)
}

impl Fleet {
    /// Starts gateways that have seen these nodes of one pool join.
    pub(crate) async fn start(count: usize, nodes: &[&str], app: &App, further: &str) -> Self {
        let configuration = format!("{LISTENERS}{further}");
        Self::start_with(count, nodes, app, &configuration).await
    }

    /// The same, where a request waits for a node that moves until the gateways have told each other.
    async fn start_with_long_wait(count: usize, nodes: &[&str], app: &App) -> Self {
        let configuration = LISTENERS.replace("reconnect: 2s", "reconnect: 1m");
        assert_ne!(configuration, LISTENERS);
        Self::start_with(count, nodes, app, &configuration).await
    }

    /// Starts gateways with this configuration.
    async fn start_with(count: usize, nodes: &[&str], app: &App, configuration: &str) -> Self {
        let port = unused_port();
        let tunnel = |number| format!("{}:{port}", address(number));
        let peers: Vec<_> = (0..count)
            .map(|number| format!("\"{}\"", tunnel(number)))
            .collect();
        let peers = format!("peers: {{ addresses: [{}] }}\n", peers.join(", "));
        let configuration = format!("{configuration}{peers}");
        let first = GatewayProcess::listening(&tunnel(0), &configuration).await;
        for node in nodes {
            let token = first.token(&format!("--node {node} --pool north")).await;
            let mut edge = first.edge(node, app.port()).flag("--join", token).start();
            edge.wait_for_line("tunnel registered").await;
            edge.stop().await.ok();
        }
        let mut sites = vec![first];
        for number in 1..count {
            let site = sites[0].replica_at(&tunnel(number)).await;
            sites.push(site);
        }
        let fleet = Self { sites };
        for site in &fleet.sites {
            until("the gateways are connected", async || {
                let peers = peers_of(site).await;
                peers.len() == count - 1 && peers.iter().all(|peer| peer["synchronized"] == true)
            })
            .await;
        }
        fleet
    }

    /// Starts the edge of a node at this gateway only.
    async fn edge(&self, node: &str, number: usize, app: &App) -> Process {
        self.edge_at(node, &[number], app).await
    }

    /// Starts the edge of a node at these gateways.
    async fn edge_at(&self, node: &str, numbers: &[usize], app: &App) -> Process {
        self.edge_in_mode("every", node, numbers, app).await
    }

    /// Starts the edge of a node with this value of `tunnels.gateways`.
    async fn edge_in_mode(&self, mode: &str, node: &str, numbers: &[usize], app: &App) -> Process {
        self.edge_with(&["--tunnels-gateways", mode], node, numbers, (app, ""))
            .await
    }

    /// Starts the edge of a node with these flags, and further keys of its port.
    pub(crate) async fn edge_with(
        &self,
        flags: &[&str],
        node: &str,
        numbers: &[usize],
        (app, port): (&App, &str),
    ) -> Process {
        let edge = causeway("edge --admin-listen 127.0.0.1:0").args(flags);
        let gateways: Vec<_> = numbers
            .iter()
            .map(|number| self.sites[*number].tunnel.as_str())
            .collect();
        let edge = edge
            .flag("--gateways", gateways.join(","))
            .flag("--data-dir", self.sites[0].edge_data(node))
            .flag(
                "--ports",
                format!("{{9100: {{target: \"127.0.0.1:{}\"{port}}}}}", app.port()),
            );
        let mut edge = edge.start();
        edge.wait_for_line("tunnel registered").await;
        edge
    }

    /// Gives one of the gateways, which have no access policy, this one.
    pub(crate) async fn set_policy(&self, number: usize, rules: &Value) {
        let site = &self.sites[number];
        let policy = site.path("policy.yaml");
        fs::write(&policy, rules.to_string()).unwrap();
        let configuration = site.path("gateway.yaml");
        let text = fs::read_to_string(&configuration).unwrap();
        let text = format!("{text}policy: {}\n", policy.display());
        fs::write(&configuration, text).unwrap();
        let reload = causeway("reload").flag("--data-dir", site.data());
        reload.run().await.ok();
    }

    /// Returns the address of the listener for sessions with one node.
    fn raw(&self, number: usize) -> String {
        self.listener(number, "raw")
    }

    fn listener(&self, number: usize, name: &str) -> String {
        let (log, name) = (
            self.sites[number].gateway.written().stderr,
            format!("\"{name}\""),
        );
        let is_named = |line: &&str| line.contains("listener open") && line.contains(&name);
        address_after(log.lines().find(is_named).unwrap(), "address=")
    }

    /// Returns the response of the node that the listener for the pool selects; empty if it selects none.
    async fn answer_of_set(&self, number: usize) -> String {
        let address = self.listener(number, "set");
        let Ok(mut session) = TcpStream::connect(address).await else {
            return String::new();
        };
        // A session that cannot begin is reset, at any of these steps.
        let _ = session
            .write_all(b"GET / HTTP/1.1\r\nHost: any\r\n\r\n")
            .await;
        let _ = session.shutdown().await;
        let answer = read_to_end(&mut session).await.unwrap_or_default();
        let answer = String::from_utf8(answer).unwrap();
        answer.split("\r\n\r\n").nth(1).unwrap_or("").to_owned()
    }

    pub(crate) async fn until_state(&self, number: usize, node: &str, state: &str) {
        let is_in_state = async || self.sites[number].node(node).await["state"] == state;
        until(
            &format!("{node} is {state} at gateway {number}"),
            is_in_state,
        )
        .await;
    }
}

pub(crate) async fn peers_of(site: &GatewayProcess) -> Vec<Value> {
    site.api("peers").await.as_array().unwrap().clone()
}

/// An app that echoes bodies and sessions, and says `here` otherwise.
async fn app() -> App {
    App::http(|head| match head.path().as_str() {
        "/session" => answer::switch("SPDY/3.1", b"hello"),
        "/echo" => answer::mirror(),
        _ => answer::ok("here"),
    })
    .await
}

pub(crate) async fn status(site: &GatewayProcess) -> ExitedProcess {
    causeway("status")
        .flag("--admin", &site.admin)
        .run()
        .await
        .ok()
}

/// Regression case of gravitational/teleport#59555: streams to nodes of other gateways failed although the tunnels were open.
#[tokio::test]
async fn each_kind_of_stream_reaches_a_node_of_another_gateway() {
    let app = app().await;
    let fleet = Fleet::start(2, &["edge-1"], &app, "").await;
    let edge = fleet.edge("edge-1", 0, &app).await;
    fleet.until_state(1, "edge-1", "connected").await;
    let far = &fleet.sites[1];

    let plain = far.nobody().get(URL).await;
    assert_eq!((plain.status, plain.text().as_str()), (200, "here"));
    let body = answer::pattern(300_000);
    let echoed = far
        .nobody()
        .ask("POST", &format!("{URL}echo"), body.clone())
        .await;
    assert_eq!(echoed.status, 200);
    assert!(echoed.body == body, "the bytes differ");

    let mut wire = TcpStream::connect(&far.listener).await.unwrap();
    let upgrade = "GET /session HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";
    let head = exchange(&mut wire, upgrade).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert_eq!(read(&mut wire, 5).await, b"hello");
    wire.write_all(b"both ways").await.unwrap();
    assert_eq!(read(&mut wire, 9).await, b"both ways");

    let mut session = TcpStream::connect(fleet.raw(1)).await.unwrap();
    let request = "GET / HTTP/1.1\r\nHost: any\r\n\r\n";
    session.write_all(request.as_bytes()).await.unwrap();
    // The half-close passes both gateways, and the app then ends the other direction.
    session.shutdown().await.unwrap();
    let answer = String::from_utf8(read_to_end(&mut session).await.unwrap()).unwrap();
    assert!(answer.ends_with("here"), "{answer}");

    let metrics = far.metrics().await;
    assert_eq!(metrics.sum("streams_forwarded_total", &[]), 4);
    let metrics = fleet.sites[0].metrics().await;
    assert_eq!(metrics.sum("streams_served_for_peers_total", &[]), 4);
    let holder = &fleet.sites[0].tunnel;
    let shown = status(far).await.stdout;
    assert!(shown.contains(&format!("at gateway {holder}")), "{shown}");
    assert!(shown.contains("OTHER GATEWAY"), "{shown}");

    // The node leaves the other gateway, and the client hears so.
    edge.kill().await;
    fleet.until_state(1, "edge-1", "away").await;
    let gone = far.nobody().get(URL).await;
    assert_eq!(gone.status, 503);
    assert!(
        gone.text().contains("edge-1 is not connected"),
        "{}",
        gone.text()
    );
}

#[tokio::test]
async fn a_set_of_nodes_spans_gateways_which_tell_each_other_the_health() {
    let is_healthy = Arc::new(AtomicBool::new(true));
    let state = is_healthy.clone();
    let far = App::http(move |head| match head.path().as_str() {
        "/healthz" if !state.load(Relaxed) => answer::status("503 No", [], ""),
        _ => answer::ok("far"),
    });
    let (near, far) = (App::saying("near").await, far.await);
    let fleet = Fleet::start(2, &["edge-1", "edge-2"], &near, "").await;
    let near_edge = fleet.edge("edge-1", 1, &near).await;
    // The app answers each check, perhaps late.
    let check =
        ", health_check: { path: /healthz, interval: 1s, timeout: 2m, unhealthy_threshold: 1 }";
    let flags = ["--tunnels-gateways", "every"];
    let _far = fleet.edge_with(&flags, "edge-2", &[0], (&far, check)).await;
    let entry = &fleet.sites[1];
    until(
        "the entry has a tunnel, and knows a healthy node elsewhere",
        async || {
            let far = entry.node("edge-2").await;
            let is_far = far["state"] == "connected" && far["unhealthy_ports"].is_null();
            entry.node("edge-1").await["tunnels"] == 1 && is_far
        },
    )
    .await;
    for _ in 0..4 {
        assert_eq!(fleet.answer_of_set(1).await, "near");
    }
    near_edge.kill().await;
    fleet.until_state(1, "edge-1", "away").await;
    for _ in 0..2 {
        assert_eq!(fleet.answer_of_set(1).await, "far");
    }
    is_healthy.store(false, Relaxed);
    until(
        "the entry knows that the other node is not healthy",
        async || entry.node("edge-2").await["unhealthy_ports"] == serde_json::json!([9100]),
    )
    .await;
    assert_eq!(fleet.answer_of_set(1).await, "");
    let shown = status(entry).await.stdout;
    assert!(
        shown.contains("the health check fails at edge-2, port 9100"),
        "{shown}"
    );
    is_healthy.store(true, Relaxed);
    until("the other node is healthy again", async || {
        entry.node("edge-2").await["unhealthy_ports"].is_null()
    })
    .await;
    assert_eq!(fleet.answer_of_set(1).await, "far");
}

#[tokio::test]
async fn a_node_that_moves_to_another_gateway_is_followed() {
    let app = app().await;
    let fleet = Fleet::start_with_long_wait(3, &["edge-1"], &app).await;
    let client = fleet.sites[2].nobody();
    for number in [0, 1, 0] {
        let edge = fleet.edge("edge-1", number, &app).await;
        // The request waits until the other gateway has said that it holds the node.
        let answer = client.get(URL).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        // The edge may have connected to another gateway first, whose address it has learned.
        let holder = serde_json::json!(fleet.sites[number].tunnel);
        until("the new gateway holds the node", async || {
            let node = fleet.sites[2].node("edge-1").await;
            let gateways = node["gateways"].as_array();
            gateways.is_some_and(|all| all.contains(&holder))
        })
        .await;
        edge.stop().await.ok();
    }
}

#[tokio::test]
async fn the_death_of_a_gateway_fails_no_request_that_begins_after_it() {
    let app = app().await;
    let mut fleet = Fleet::start(3, &["edge-1"], &app, "").await;
    let _edge = fleet.edge_at("edge-1", &[0, 1], &app).await;
    let entry = fleet.sites.remove(2);
    until("both gateways hold the node", async || {
        let node = entry.node("edge-1").await;
        node["gateways"]
            .as_array()
            .is_some_and(|all| all.len() == 2)
    })
    .await;
    let client = entry.nobody();
    for number in [0, 0] {
        let holder = fleet.sites.remove(number);
        assert_eq!(client.get(URL).await.status, 200);
        holder.gateway.kill().await;
        if fleet.sites.is_empty() {
            break;
        }
        for _ in 0..20 {
            let answer = client.get(URL).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
    }
    // A request that is sent before the end of the connection is noticed gets 502: it may have reached the node.
    until("the node is known to be away", async || {
        let status = client.get(URL).await.status;
        assert!([502, 503].contains(&status), "{status}");
        status == 503
    })
    .await;
}

/// The state of a gateway that was suspended is old: its peers and its edges have given it up.
#[tokio::test]
async fn a_gateway_that_was_suspended_serves_at_once_when_it_continues() {
    let app = app().await;
    let fleet = Fleet::start_with_long_wait(2, &["edge-1"], &app).await;
    let _edge = fleet.edge_at("edge-1", &[0, 1], &app).await;
    let suspended = &fleet.sites[1];
    fleet.until_state(1, "edge-1", "connected").await;
    suspended.gateway.signal("STOP").await;
    until("the other gateway has given it up", async || {
        peers_of(&fleet.sites[0]).await.is_empty()
    })
    .await;
    suspended.gateway.signal("CONT").await;
    for _ in 0..20 {
        let answer = suspended.nobody().get(URL).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
}

#[tokio::test]
async fn the_drain_of_a_gateway_fails_no_request_of_another_one() {
    let app = app().await;
    let mut fleet = Fleet::start_with_long_wait(3, &["edge-1"], &app).await;
    // The edge goes to the second gateway when the first one drains.
    let _edge = fleet.edge_in_mode("one", "edge-1", &[0, 1], &app).await;
    fleet.until_state(2, "edge-1", "connected").await;
    let client = fleet.sites[2].nobody();
    let stopped = CancellationToken::new();
    // The last ones may begin after the drain on a slow machine.
    let load = async {
        let mut requests = 0;
        while requests < 20 || !stopped.is_cancelled() {
            let answer = client.get(URL).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            requests += 1;
        }
    };
    let drained = fleet.sites.remove(0);
    let draining = async {
        let ended = drained.gateway.stop().await.ok();
        // The connections of the other gateways have not held up the end.
        assert!(ended.stderr.contains("stuck=0"), "{}", ended.stderr);
        stopped.cancel();
    };
    tokio::join!(load, draining);
    assert_eq!(client.get(URL).await.status, 200);
}

#[tokio::test]
async fn a_gateway_decides_by_its_own_policy_about_forwarded_requests() {
    let app = app().await;
    let fleet = Fleet::start(2, &["edge-1"], &app, "").await;
    let _edge = fleet.edge("edge-1", 0, &app).await;
    fleet.until_state(1, "edge-1", "connected").await;
    let allowed = json!({ "rules": [{ "what": { "paths": ["/metrics"] }, "then": "allow" }] });
    fleet.set_policy(0, &allowed).await;
    let client = fleet.sites[1].nobody();
    assert_eq!(client.get("http://edge-1:9100/metrics").await.status, 200);
    let refused = client.get(URL).await;
    assert_eq!(refused.status, 403, "{}", refused.text());
}

/// Returns the access record of a gateway for a request of this path, once it is written.
async fn record(site: &GatewayProcess, path: &str) -> String {
    let path = format!(" path=\"{path}\"");
    let mut found = Vec::new();
    until("the record is written", async || {
        let log = site.gateway.written().stderr;
        let records = log.lines().filter(|line| line.contains(" access: "));
        found = (records
            .filter(|line| line.contains(&path))
            .map(str::to_owned))
        .collect();
        !found.is_empty()
    })
    .await;
    assert_eq!(found.len(), 1, "{found:#?}");
    found.remove(0)
}

/// Returns the value of a field of a record.
fn field<'a>(record: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = record.split_once(&format!(" {name}="))?;
    rest.split(' ').next()
}

/// Opens a session and a request without a response, and resets both.
async fn reset_open_streams(entry: &GatewayProcess, app: &App) {
    for (path, further) in [
        ("session", "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n"),
        ("silent", ""),
    ] {
        let mut wire = TcpStream::connect(&entry.listener).await.unwrap();
        let head = format!("GET /{path} HTTP/1.1\r\nHost: edge-1:9100\r\n{further}\r\n");
        if path == "session" {
            exchange(&mut wire, head).await;
        } else {
            wire.write_all(head.as_bytes()).await.unwrap();
            while app.head().await.path() != "/silent" {}
        }
        wire.set_zero_linger().unwrap();
    }
}

/// An operator finds a stream in the log of each gateway that it has passed.
#[tokio::test]
async fn a_forwarded_stream_has_a_record_at_both_gateways_and_counts_at_the_first() {
    let app = App::http(|head| match head.path().as_str() {
        "/session" => answer::switch("SPDY/3.1", b"hello"),
        "/echo" => answer::mirror(),
        "/silent" => answer::silence(),
        _ => answer::ok("here"),
    })
    .await;
    let fleet = Fleet::start(2, &["edge-1"], &app, "").await;
    let _edge = fleet.edge("edge-1", 0, &app).await;
    fleet.until_state(1, "edge-1", "connected").await;
    let paths = json!({ "paths": ["/session", "/echo", "/silent"] });
    let rules = json!({ "rules": [{ "name": "some", "what": paths, "then": "allow" }] });
    fleet.set_policy(0, &rules).await;
    let (holder, entry) = (&fleet.sites[0], &fleet.sites[1]);
    let client = entry.nobody();
    let echo = format!("{URL}echo");
    let echoed = client.ask("POST", &echo, answer::pattern(300_000)).await;
    assert_eq!(echoed.status, 200);
    assert_eq!(client.get(&format!("{URL}refused")).await.status, 403);
    reset_open_streams(entry, &app).await;
    for (path, method, status, reason, bytes) in [
        ("/echo", "POST", "200", None, Some("300000")),
        ("/refused", "GET", "403", Some("forbidden"), Some("0")),
        ("/session", "GET", "101", Some("client_closed"), None),
        ("/silent", "GET", "499", Some("client_closed"), Some("0")),
    ] {
        let (first, second) = (record(entry, path).await, record(holder, path).await);
        assert!(field(&first, "trace").is_some(), "{first}");
        for name in ["trace", "node", "port", "method", "client"] {
            assert_eq!(field(&first, name), field(&second, name), "{second}");
        }
        assert_eq!(field(&first, "forwarded_by"), None);
        assert!(field(&second, "forwarded_by").unwrap().starts_with("127."));
        let serial = serial_of(entry).await;
        let forwarded_by = field(&second, "gateway_serial");
        assert_eq!(forwarded_by, Some(&*format!("\"{serial}\"")));
        assert_eq!(field(&second, "listener"), None);
        let quoted = |word: &str| format!("\"{word}\"");
        assert_eq!(field(&second, "method"), Some(&*quoted(method)));
        for record in [&first, &second] {
            assert_eq!(field(record, "status"), Some(status), "{record}");
            let found = field(record, "reason").map(str::to_owned);
            assert_eq!(found, reason.map(quoted), "{record}");
        }
        assert!(bytes.is_none() || field(&second, "up") == bytes, "{second}");
        let rule = field(&second, "rule");
        assert_eq!(rule, (path != "/refused").then_some("\"some\""), "{second}");
    }
    let metrics = holder.metrics().await;
    assert_eq!(metrics.sum("streams_total", &[]), 0);
    assert_eq!(metrics.sum("streams_served_for_peers_total", &[]), 3);
    assert_eq!(entry.metrics().await.sum("streams_total", &[]), 4);
}

/// One link carries the requests for all nodes of a gateway, and connections to upstreams through it are pooled.
#[tokio::test]
async fn a_pooled_connection_to_an_upstream_serves_its_own_node_alone() {
    let authority = Authority::new();
    let nodes = ["edge-1", "edge-2"];
    let app = |node: &'static str| {
        let tls = authority.serve(&authority.app(&[node]), false);
        App::https(tls, move |_| answer::ok(node))
    };
    let apps = [app(nodes[0]).await, app(nodes[1]).await];
    // One worker has one link for both nodes.
    let further = "workers: 1\nupstream_tls: { 9100: { verify: false } }\n";
    let fleet = Fleet::start(2, &nodes, &apps[0], further).await;
    let mut edges = Vec::new();
    for (node, app) in nodes.iter().zip(&apps) {
        edges.push(
            fleet
                .edge_with(&[], node, &[0], (app, ", scheme: tcp"))
                .await,
        );
        fleet.until_state(1, node, "connected").await;
    }
    let client = fleet.sites[1].nobody();
    for _ in 0..5 {
        for node in nodes {
            let answer = client.get(&format!("http://{node}:9100/")).await;
            assert_eq!((answer.status, answer.text().as_str()), (200, node));
        }
    }
    let dialled = apps.iter().map(App::connections).max().unwrap();
    assert!(dialled < 5, "{dialled} connections: none was pooled");
}

/// Returns the leader of the pool that a gateway announces.
async fn leader_at(site: &GatewayProcess) -> Option<String> {
    let pool = site.api("pool").await;
    pool["leaders"]["north"].as_str().map(str::to_owned)
}

/// Returns the state of the API cache of an edge.
async fn api_cache(edge: &Process) -> Value {
    let log = edge.written();
    let line = log.line(|line| line.contains("edge is running")).unwrap();
    let status = admin::json(&address_after(line, "admin="), "/status").await;
    status["api_cache"].clone()
}

/// The edges of a pool are at one gateway each, so neither gateway knows both of them by itself.
#[tokio::test]
async fn a_pool_whose_edges_are_at_different_gateways_has_one_leader() {
    let app = app().await;
    let objects = tempfile::tempdir().unwrap();
    let service = r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"web","namespace":"shop"},"spec":{}}"#;
    fs::write(objects.path().join("web.json"), service).unwrap();
    // An edge that answers a probe late loses the lead to one that does not, so there are no probes.
    let further = format!(
        "api_cache: {{ manifests: {} }}\ntunnel: {{ ping_after: 5m }}\n",
        objects.path().display()
    );
    let nodes = ["edge-1", "edge-2"];
    let fleet = Fleet::start(2, &nodes, &app, &further).await;
    let start = async |number: usize| {
        let at = format!("127.0.0.1:{}", unused_port());
        let cache = format!(
            "{{ listen: \"127.0.0.1:0\", members: {{ listen: \"{at}\", addresses: [\"{at}\"] }} }}"
        );
        let flags = ["--tunnels-gateways", "every", "--api-cache", &cache];
        let flags = [&flags[..], &["--timeouts-silence", "10m"]].concat();
        let to = (&app, "");
        fleet.edge_with(&flags, nodes[number], &[number], to).await
    };
    let until_leader = async |node: &str| {
        for site in &fleet.sites {
            until(&format!("{node} leads"), async || {
                leader_at(site).await.as_deref() == Some(node)
            })
            .await;
        }
    };
    let first = start(0).await;
    until("edge-1 leads", async || {
        leader_at(&fleet.sites[0]).await.as_deref() == Some("edge-1")
    })
    .await;
    let second = start(1).await;
    until_leader("edge-1").await;
    // It reads at the leader, whose address it has from its own gateway.
    until("edge-2 reads at edge-1", async || {
        let cache = api_cache(&second).await;
        cache["role"] == "follower" && cache["reads_at"] == "edge-1"
    })
    .await;
    first.kill().await;
    until("edge-2 leads", async || {
        leader_at(&fleet.sites[1]).await.as_deref() == Some("edge-2")
    })
    .await;
    // An edge that returns finds the leader that its gateway has heard of.
    let first = start(0).await;
    until_leader("edge-2").await;
    until("edge-1 reads at edge-2", async || {
        let cache = api_cache(&first).await;
        cache["role"] == "follower" && cache["reads_at"] == "edge-2"
    })
    .await;
}

/// Runs `ca rotate` at a gateway.
async fn rotate(site: &GatewayProcess, step: &str) -> ExitedProcess {
    let order = causeway("ca rotate").args(step.split(' '));
    order.flag("--data-dir", site.data()).run().await
}

/// Gives the second gateway the CA of the first one.
async fn copy_ca(fleet: &Fleet) {
    let [first, second] = &fleet.sites[..] else {
        panic!("not two gateways");
    };
    fs::copy(first.data().join("ca.json"), second.data().join("ca.json")).unwrap();
    let reload = causeway("reload").flag("--data-dir", second.data());
    reload.run().await.ok();
}

/// Runs `ca rotate` at the first gateway, which refuses, until it says why in these words: a slow gateway gives no answer.
async fn until_refused(fleet: &Fleet, step: &str, words: &[&str]) {
    until(&format!("{step} is refused: {words:?}"), async || {
        let stderr = rotate(&fleet.sites[0], step).await.failed(&[]);
        words.iter().all(|word| stderr.contains(word))
    })
    .await;
}

/// Runs `ca rotate` at the first gateway until it succeeds.
async fn until_rotated(fleet: &Fleet, step: &str) {
    until(&format!("{step} succeeds"), async || {
        rotate(&fleet.sites[0], step).await.code == Some(0)
    })
    .await;
}

#[tokio::test]
async fn a_rotation_waits_for_each_gateway_and_its_edges() {
    let app = app().await;
    // The tunnel of an edge that is suspended must last.
    let further = "tunnel: { close_after: 5m }\n";
    let mut fleet = Fleet::start(2, &["edge-1"], &app, further).await;
    let edge = fleet.edge("edge-1", 1, &app).await;
    let (first, other) = (&fleet.sites[0], fleet.sites[1].tunnel.clone());
    fleet.until_state(0, "edge-1", "connected").await;
    rotate(first, "prepare").await.ok();
    let lagging = format!("gateway {other} has not loaded the prepared root");
    until_refused(&fleet, "activate", &[&lagging]).await;

    edge.signal("STOP").await;
    copy_ca(&fleet).await;
    let lagging = format!(
        "1 of 1 connected edges of gateway {other} do not trust the prepared root yet: edge-1; wait"
    );
    until_refused(&fleet, "activate", &[&lagging, "--force"]).await;
    until("the status shows the edge", async || {
        let shown = status(first).await.stdout;
        shown.contains(&format!("gateway {other} do not"))
    })
    .await;
    edge.signal("CONT").await;
    // The connections between gateways soon use certificates of the new root, so that they outlast the old one.
    let since = async || peers_of(first).await[0]["since"].clone();
    let before = since().await;
    until_rotated(&fleet, "activate").await;
    until(
        "the gateway has connected by its new certificate",
        async || {
            let peers = peers_of(first).await;
            peers.first().is_some_and(|peer| peer["since"] != before)
        },
    )
    .await;
    let lagging = format!("gateway {other} does not sign with the new root yet");
    until_refused(&fleet, "retire", &[&lagging]).await;
    copy_ca(&fleet).await;
    fleet.sites.remove(1).gateway.kill().await;
    let refused = rotate(&fleet.sites[0], "retire").await;
    refused.failed(&[&format!("gateway {other} cannot be asked"), "--force"]);
    rotate(&fleet.sites[0], "retire --force").await.ok();
}

/// Returns the serial number of the certificate that a gateway presents to edges and other gateways.
pub(crate) async fn serial_of(site: &GatewayProcess) -> String {
    let all = site.api("certificates").await;
    let all = all.as_array().unwrap();
    let own = all.iter().find(|it| it["used_for"] == "tunnel").unwrap();
    own["serial"].as_str().unwrap().to_owned()
}

/// Runs `ca revoke-gateway` at a gateway.
async fn revoke_gateway(site: &GatewayProcess, arguments: &[&str]) -> ExitedProcess {
    let revoke = causeway("ca revoke-gateway").args(arguments);
    revoke.flag("--data-dir", site.data()).run().await
}

/// Returns the output of `ca gateways` at a gateway.
pub(crate) async fn list_gateways(site: &GatewayProcess) -> String {
    let list = causeway("ca gateways").flag("--data-dir", site.data());
    list.run().await.ok().stdout
}

/// Returns the edge of `edge-1`, which is given this gateway's address and has learned those of others.
fn known_edge(fleet: &Fleet, number: usize, app: &App) -> Causeway {
    let ports = format!("{{9100: {{target: \"127.0.0.1:{}\"}}}}", app.port());
    causeway("edge --admin-listen 127.0.0.1:0")
        .flag("--gateways", &fleet.sites[number].tunnel)
        .flag("--data-dir", fleet.sites[0].edge_data("edge-1"))
        .flag("--ports", ports)
}

/// The gateways share no state, so the second one keeps its certificate, as a thief of it does.
#[tokio::test]
async fn a_revoked_gateway_is_refused_until_it_has_another_certificate() {
    let app = app().await;
    let mut fleet = Fleet::start(2, &["edge-1"], &app, "").await;
    let mut edge = fleet.edge_at("edge-1", &[0, 1], &app).await;
    let holds = async |site: &GatewayProcess| site.node("edge-1").await["tunnels"] != 0;
    until("both gateways hold the node", async || {
        holds(&fleet.sites[0]).await && holds(&fleet.sites[1]).await
    })
    .await;
    let serial = serial_of(&fleet.sites[1]).await;
    assert_eq!(peers_of(&fleet.sites[0]).await[0]["serial"], *serial);
    let own = serial_of(&fleet.sites[0]).await;
    let refused = revoke_gateway(&fleet.sites[0], &[&own]).await;
    refused.failed(&["the certificate of this gateway itself", "--force"]);
    let refused = revoke_gateway(&fleet.sites[0], &["40aabb"]).await;
    refused.failed(&["no gateway that is known here", &serial, "--force"]);
    let revoked = revoke_gateway(&fleet.sites[0], &[&serial, "--reason", "stolen"]).await;
    assert!(revoked.ok().stdout.contains("is revoked"));

    let closed = format!("certificate with serial number {serial} is revoked: closed the tunnel");
    edge.wait_for_line(&closed).await;
    let by_peer = format!("the gateway with serial number {serial} is revoked");
    fleet.sites[0].gateway.wait_for_line(&by_peer).await;
    until("no gateway is connected to the other one", async || {
        peers_of(&fleet.sites[0]).await.is_empty() && peers_of(&fleet.sites[1]).await.is_empty()
    })
    .await;
    assert_eq!(fleet.sites[0].nobody().get(URL).await.status, 200);
    until("the revocation is listed and confirmed", async || {
        let listed = list_gateways(&fleet.sites[0]).await;
        let confirmed = "1 of 1 connected nodes have confirmed";
        let expected = [confirmed, "stolen", &serial];
        expected.iter().all(|text| listed.contains(text))
    })
    .await;
    let known = "the other end knows that this gateway's certificate is revoked";
    fleet.sites[1].gateway.wait_for_line(known).await;

    // After its own restart, the edge refuses the gateway although it cannot ask the other one.
    edge.stop().await.ok();
    fleet.sites[0].gateway.signal("STOP").await;
    let mut edge = known_edge(&fleet, 1, &app).start();
    edge.wait_for_line("the gateway's certificate is revoked")
        .await;
    assert!(!holds(&fleet.sites[1]).await);
    fleet.sites[0].gateway.signal("CONT").await;
    edge.wait_for_line("tunnel registered").await;
    assert_eq!(fleet.sites[0].nobody().get(URL).await.status, 200);

    // The gateway hears of the revocation, and replaces its certificate.
    revoke_gateway(&fleet.sites[1], &[&serial, "--force"])
        .await
        .ok();
    until("both gateways hold the node, and each other", async || {
        let peers = [
            peers_of(&fleet.sites[0]).await,
            peers_of(&fleet.sites[1]).await,
        ];
        let is_connected = peers.iter().all(|peers| peers.len() == 1);
        is_connected && holds(&fleet.sites[0]).await && holds(&fleet.sites[1]).await
    })
    .await;
    assert_ne!(serial_of(&fleet.sites[1]).await, serial);
    assert_eq!(fleet.sites[1].nobody().get(URL).await.status, 200);
}

/// Prometheus at any gateway has every known node as a target: those of other gateways, and those that are away.
#[tokio::test]
async fn service_discovery_lists_nodes_of_other_gateways_and_away_nodes() {
    let app = app().await;
    let proxy = "  - { name: proxy, protocol: connect, listen: \"127.0.0.1:0\", plaintext_networks: [127.0.0.0/8], anonymous: true }\n";
    let hidden = proxy.replace("name: proxy", "name: hidden, node_list: false");
    let listeners = LISTENERS.replacen("listeners:\n", &format!("listeners:\n{proxy}{hidden}"), 1);
    let fleet = Fleet::start_with(2, &["edge-1", "edge-2"], &app, &listeners).await;
    let _edge = fleet.edge("edge-1", 0, &app).await;
    fleet.until_state(1, "edge-1", "connected").await;
    let ask = async |address: &str, path: &str| {
        let curl = Tool::curl().args(["--write-out", "%{stderr}%{http_code}"]);
        let ran = curl.args([format!("http://{address}{path}")]).run().await;
        (ran.stderr.clone(), ran.text())
    };
    let targets = |text: &str| {
        let groups: Value = serde_json::from_str(text).unwrap();
        let groups = groups.as_array().unwrap().clone();
        let targets = groups.into_iter().map(|group| group["targets"][0].clone());
        targets.collect::<Vec<_>>()
    };
    let (admin, proxy) = (&fleet.sites[1].admin, fleet.listener(1, "proxy"));
    for (address, path) in [
        (admin, "/api/v1/http_sd?port=9100"),
        (&proxy, "/.well-known/causeway/http_sd?port=9100"),
    ] {
        let (status, text) = ask(address, path).await;
        assert_eq!(status, "200", "{text}");
        assert_eq!(targets(&text), ["edge-1:9100", "edge-2:9100"], "{path}");
    }
    // Without a port, a gateway knows only the ports that edges report to it.
    let (_, text) = ask(&fleet.sites[0].admin, "/api/v1/http_sd").await;
    assert_eq!(targets(&text), ["edge-1:9100"]);
    let (status, text) = ask(admin, "/api/v1/http_sd?ports=9100").await;
    assert!(status == "400" && text.contains("port=9100"), "{text}");
    let hidden = fleet.listener(1, "hidden");
    for path in ["nodes", "http_sd?port=9100"] {
        let (status, text) = ask(&hidden, &format!("/.well-known/causeway/{path}")).await;
        assert_eq!(status, "405", "{text}");
        assert!(!text.contains("edge-1"), "{text}");
    }
}
