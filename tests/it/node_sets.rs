//! Listeners for sets of nodes: each connection reaches a member that is connected, and that the client may reach.

use crate::world::{
    PATIENCE, World,
    app::{App, answer},
    authority::Authority,
    client::{Answer, Client, assert_problem, whole},
    edge::Edge,
    gateway::{anonymous, listener},
    until,
};
use causeway_edge::config::{HealthCheck, Protocol};
use causeway_gateway::{
    config::{Listener, ListenerProtocol, policy},
    state::{Policy, PolicyWriter},
};
use futures_util::{StreamExt, stream::FuturesUnordered};
use hyper::Request;
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use test_summary::unused_port;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;

const NODES: [&str; 3] = ["edge-1", "edge-2", "edge-3"];

fn of_pool(listener: Listener) -> Listener {
    Listener {
        pool: Some("mill".to_owned()),
        port: Some(9100),
        ..listener
    }
}

/// Three nodes of a pool, whose apps answer with the names of the nodes, and a node of no pool.
struct Site {
    edges: Vec<Edge>,
    _apps: Vec<App>,
}

impl Site {
    async fn start(world: &World) -> Self {
        let (mut edges, mut apps) = (Vec::new(), Vec::new());
        for node in NODES.into_iter().chain(["other"]) {
            let app = App::saying(node).await;
            let pool = if node == "other" { "quay" } else { "mill" };
            let plan = world.edge(node).pool(pool).label("site", pool);
            edges.push(plan.port(9100, app.address()).join().await);
            apps.push(app);
        }
        Self { edges, _apps: apps }
    }

    async fn kill(&mut self, world: &World, index: usize) {
        self.edges[index].kill().await;
        world.until_tunnels(NODES[index], 0).await;
    }
}

/// Sends a request over a `tcp` listener. Returns the name of the node; empty if the connection is reset.
async fn node_behind(world: &World, listener: &str) -> String {
    // A session that cannot begin is reset, at any of these steps.
    let Ok(mut socket) = TcpStream::connect(world.listener(listener)).await else {
        return String::new();
    };
    let request = b"GET / HTTP/1.1\r\nhost: api\r\n\r\n";
    let _ = socket.write_all(request).await;
    let _ = socket.shutdown().await;
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer).await;
    let answer = String::from_utf8(answer).unwrap();
    answer.split("\r\n\r\n").nth(1).unwrap_or("").to_owned()
}

async fn nodes_behind(world: &World, listener: &str) -> BTreeSet<String> {
    let mut nodes = BTreeSet::new();
    for _ in 0..9 {
        nodes.insert(node_behind(world, listener).await);
    }
    nodes
}

fn set(nodes: &[&str]) -> BTreeSet<String> {
    nodes.iter().map(|node| (*node).to_owned()).collect()
}

#[tokio::test]
async fn tcp_connections_reach_the_members_that_are_left() {
    let world = World::build()
        .listener(of_pool(anonymous("pool", ListenerProtocol::Tcp)))
        .listener(Listener {
            node_selector: Some("site in (mill),!spare".to_owned()),
            port: Some(9100),
            ..anonymous("labels", ListenerProtocol::Tcp)
        })
        .workers(2);
    let world = Box::pin(world.start()).await;
    let mut site = Box::pin(Site::start(&world)).await;
    for listener in ["pool", "labels"] {
        assert_eq!(nodes_behind(&world, listener).await, set(&NODES));
    }
    site.kill(&world, 0).await;
    assert_eq!(nodes_behind(&world, "pool").await, set(&NODES[1..]));
    site.kill(&world, 1).await;
    assert_eq!(nodes_behind(&world, "pool").await, set(&NODES[2..]));
    site.kill(&world, 2).await;
    assert_eq!(nodes_behind(&world, "pool").await, set(&[""]));
    // A session is counted after its reset is sent.
    let counted = async || world.metrics().await.outcomes("pool", "node_not_connected") == 9;
    until("refused sessions are counted", counted).await;
    site.edges[1].start().await.unwrap();
    world.until_tunnels(NODES[1], 1).await;
    assert_eq!(nodes_behind(&world, "labels").await, set(&NODES[1..2]));
}

#[tokio::test]
async fn each_connection_reaches_the_member_with_the_fewest_streams() {
    let world = World::build();
    let world = world.listener(of_pool(anonymous("pool", ListenerProtocol::Tcp)));
    let world = Box::pin(world.start()).await;
    let _site = Box::pin(Site::start(&world)).await;
    let streams = async || {
        let mut counts = Vec::new();
        for node in NODES {
            counts.push(world.node(node).await["streams"].as_u64().unwrap());
        }
        counts
    };
    let open = async |count: u64| {
        let before = streams().await;
        let session = TcpStream::connect(world.listener("pool")).await.unwrap();
        until("the session is open", async || {
            streams().await.iter().sum::<u64>() == count
        })
        .await;
        let after = streams().await;
        let member = (0..3).find(|&member| after[member] > before[member]);
        (member.unwrap(), session)
    };
    let mut sessions = Vec::new();
    for count in 1..=9 {
        sessions.push(open(count).await);
    }
    assert_eq!(streams().await, [3, 3, 3]);
    sessions.retain(|(member, _)| *member != 0);
    until("the sessions of a member have ended", async || {
        streams().await == [0, 3, 3]
    })
    .await;
    for count in 7..=9 {
        sessions.push(open(count).await);
    }
    assert_eq!(streams().await, [3, 3, 3]);
}

/// Returns the answer and the node of the access record.
async fn get(world: &World, client: &Client, url: &str) -> (Answer, String) {
    let answer = client.get(url).await;
    let record = world.log().records().pop().unwrap();
    (
        answer,
        record["node"].as_str().unwrap_or_default().to_owned(),
    )
}

#[tokio::test]
async fn an_https_connection_keeps_its_member_until_that_leaves() {
    let world = World::build();
    let world = world.listener(of_pool(listener("web", ListenerProtocol::Https)));
    let world = Box::pin(world.start()).await;
    let mut site = Box::pin(Site::start(&world)).await;
    for client in [world.client_at("web"), world.client_at("web").http2()] {
        let client = client.sni("gateway.test");
        let mut connection = client.connect("api.example").await.unwrap();
        let mut nodes = BTreeSet::new();
        for _ in 0..5 {
            let answer = connection.get("https://api.example/").await.unwrap();
            nodes.insert(answer.text());
        }
        assert_eq!(nodes.len(), 1, "{nodes:?}");
        let first = nodes.pop_first().unwrap();
        let index = NODES.iter().position(|node| *node == first).unwrap();
        site.kill(&world, index).await;
        let answer = connection.get("https://api.example/").await.unwrap();
        assert_ne!(answer.text(), first);
        assert!(NODES.contains(&&*answer.text()));
        site.edges[index].start().await.unwrap();
        world.until_tunnels(NODES[index], 1).await;
    }
    let client = world.client_at("web").sni("gateway.test");
    let (answer, node) = get(&world, &client, "https://edge-2:9100/").await;
    assert_eq!((&*answer.text(), &*node), ("edge-2", "edge-2"), "the Host");
    let (answer, _) = get(&world, &client, "https://other:9100/").await;
    assert_problem(&answer, 421, "misdirected", "names other, which is not one");
    let named = world.client_at("web").sni("other");
    let (answer, _) = get(&world, &named, "https://other:9100/").await;
    let words = "the connection is for other, which is not one";
    assert_problem(&answer, 421, "misdirected", words);
    for index in 0..NODES.len() {
        site.kill(&world, index).await;
    }
    let (answer, _) = get(&world, &client, "https://api.example/").await;
    let words = "this listener serves 3 nodes, and none is connected";
    assert_problem(&answer, 503, "node_not_connected", words);
}

#[tokio::test]
async fn a_member_that_the_policy_denies_is_not_selected() {
    let rules = json!([
        { "where": { "nodes": ["edge-1"] }, "then": "deny" },
        { "what": { "methods": ["GET"] }, "then": "allow" },
    ]);
    let rules: policy::Policy = serde_json::from_value(json!({ "rules": rules })).unwrap();
    let rules = PolicyWriter::new(Some(Policy::compile(&rules).unwrap()));
    let world = World::build().policy(rules.reader());
    let world = world.listener(of_pool(listener("web", ListenerProtocol::Https)));
    let world = Box::pin(world.start()).await;
    let mut site = Box::pin(Site::start(&world)).await;
    let client = world.client_at("web").sni("gateway.test");
    let url = "https://api.example/";
    for _ in 0..6 {
        let (answer, node) = get(&world, &client, url).await;
        assert_eq!((answer.status, &*answer.text()), (200, &*node));
        assert_ne!(node, "edge-1");
    }
    let answer = client.ask("POST", url, "x").await;
    assert_problem(&answer, 403, "forbidden", "does not allow tester to POST /");
    site.kill(&world, 1).await;
    site.kill(&world, 2).await;
    let (answer, _) = get(&world, &client, url).await;
    assert_problem(&answer, 403, "forbidden", "at port 9100 of edge-1");
}

#[tokio::test]
async fn a_member_whose_target_refuses_gives_way_to_the_next() {
    let world = World::build()
        .listener(of_pool(anonymous("pool", ListenerProtocol::Tcp)))
        .listener(of_pool(listener("web", ListenerProtocol::Https)));
    let world = Box::pin(world.start()).await;
    let (dead, app) = (App::refusing(), App::saying("alive").await);
    let plan = |node| world.edge(node).pool("mill");
    let _dead = plan("edge-1").port(9100, dead.address()).join().await;
    let _live = plan("edge-2").port(9100, app.address()).join().await;
    for _ in 0..4 {
        assert_eq!(node_behind(&world, "pool").await, "alive");
    }
    let client = world.client_at("web").sni("gateway.test");
    let mut connection = client.connect("api.example").await.unwrap();
    for _ in 0..4 {
        let answer = connection.get("https://api.example/").await.unwrap();
        assert_eq!(answer.text(), "alive");
    }
    until("all streams have ended", async || {
        world.metrics().await.sum("open_streams", &[]) == 0
    })
    .await;
}

/// An app that answers with its name, and `/healthz` with 503 while it is not healthy.
async fn app_with_health(name: &'static str, is_healthy: &Arc<AtomicBool>) -> App {
    let is_healthy = is_healthy.clone();
    App::http(move |head| {
        if head.path() == "/healthz" && !is_healthy.load(Relaxed) {
            return answer::status("503 Service Unavailable", [], "no");
        }
        answer::ok(name)
    })
    .await
}

fn health_check() -> HealthCheck {
    HealthCheck {
        path: Some("/healthz".to_owned()),
        interval: Duration::from_millis(20),
        // The app answers each check, perhaps late.
        timeout: PATIENCE,
        unhealthy_threshold: 2,
        ..HealthCheck::default()
    }
}

#[tokio::test]
async fn a_member_is_left_out_while_its_health_check_fails() {
    let world = World::build()
        .listener(of_pool(anonymous("pool", ListenerProtocol::Tcp)))
        .listener(of_pool(listener("web", ListenerProtocol::Https)));
    let world = Box::pin(world.start()).await;
    let (mut states, mut edges, mut apps) = (Vec::new(), Vec::new(), Vec::new());
    for node in ["edge-1", "edge-2"] {
        let is_healthy = Arc::new(AtomicBool::new(true));
        let app = app_with_health(node, &is_healthy).await;
        let plan = world.edge(node).pool("mill").port(9100, app.address());
        let plan = plan.config(|config| {
            let port = config.ports.get_mut(&9100).unwrap();
            port.health_check = Some(health_check());
        });
        edges.push(plan.join().await);
        apps.push(app);
        states.push(is_healthy);
    }
    let until_ports = async |node: &str, ports: Value| {
        until("the gateway knows the health", async || {
            world.node(node).await["unhealthy_ports"] == ports
        })
        .await;
    };
    for node in ["edge-1", "edge-2"] {
        until_ports(node, Value::Null).await;
    }
    assert_eq!(nodes_behind(&world, "pool").await, set(&NODES[..2]));
    states[0].store(false, Relaxed);
    until_ports("edge-1", json!([9100])).await;
    assert_eq!(nodes_behind(&world, "pool").await, set(&["edge-2"]));
    assert_eq!(world.metrics().await.sum("unhealthy_ports", &[]), 1);
    // A new tunnel says so from its beginning.
    edges[0].stop().await;
    world.until_tunnels("edge-1", 0).await;
    edges[0].start().await.unwrap();
    world.until_tunnels("edge-1", 1).await;
    assert_eq!(world.node("edge-1").await["unhealthy_ports"], json!([9100]));
    assert_eq!(nodes_behind(&world, "pool").await, set(&["edge-2"]));
    states[1].store(false, Relaxed);
    until_ports("edge-2", json!([9100])).await;
    let client = world.client_at("web").sni("gateway.test");
    let (answer, _) = get(&world, &client, "https://api.example/").await;
    let words = "2 of them fail the health check of port 9100";
    assert_problem(&answer, 503, "node_not_connected", words);
    states[0].store(true, Relaxed);
    until_ports("edge-1", Value::Null).await;
    assert_eq!(nodes_behind(&world, "pool").await, set(&["edge-1"]));
}

/// Behaviour of a [`Target`] that listens.
#[derive(Clone)]
enum Listening {
    /// Answers requests with its name.
    Plain,
    /// The same over TLS.
    Tls(TlsAcceptor),
    /// Closes each connection at once.
    Closing,
}

/// Target of a node that can die and return at its address.
struct Target {
    name: &'static str,
    address: SocketAddr,
    serving: JoinSet<()>,
}

impl Target {
    async fn new(name: &'static str, listening: Listening) -> Self {
        // The port stays free while the target is dead.
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, unused_port()));
        let serving = JoinSet::new();
        let mut target = Self {
            name,
            address,
            serving,
        };
        target.listen(listening).await;
        target
    }

    async fn listen(&mut self, listening: Listening) {
        let mut listener = None;
        until("the address is free", async || {
            listener = TcpListener::bind(self.address).await.ok();
            listener.is_some()
        })
        .await;
        let (listener, name) = (listener.unwrap(), self.name);
        self.serving.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                match listening.clone() {
                    Listening::Plain => drop(connections.spawn(answer_with_name(socket, name))),
                    Listening::Tls(tls) => drop(connections.spawn(async move {
                        if let Ok(socket) = tls.accept(socket).await {
                            answer_with_name(socket, name).await;
                        }
                    })),
                    Listening::Closing => {}
                }
            }
        });
    }

    async fn die(&mut self) {
        self.serving.shutdown().await;
    }
}

/// Answers one request. A health check without a path sends none.
async fn answer_with_name(mut socket: impl AsyncRead + AsyncWrite + Unpin, name: &str) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match socket.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    let length = name.len();
    let answer =
        format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{name}");
    let _ = socket.write_all(answer.as_bytes()).await;
    let _ = socket.shutdown().await;
}

/// Two nodes of the pool, whose targets are checked without a path.
struct CheckedSite {
    world: World,
    scheme: Protocol,
    targets: Vec<Target>,
    _edges: Vec<Edge>,
}

impl CheckedSite {
    async fn start(scheme: Protocol, authority: &Authority, listening: &Listening) -> Self {
        let world = World::build()
            .listener(of_pool(anonymous("pool", ListenerProtocol::Tcp)))
            .listener(of_pool(listener("web", ListenerProtocol::Https)));
        let world = Box::pin(world.start()).await;
        let ca = world.write(authority.pem());
        let (mut targets, mut edges) = (Vec::new(), Vec::new());
        for node in &NODES[..2] {
            let target = Target::new(node, listening.clone()).await;
            let plan = world.edge(node).pool("mill");
            let plan = plan.port_as(9100, scheme, target.address).config(|config| {
                let port = config.ports.get_mut(&9100).unwrap();
                port.ca = (scheme == Protocol::Https).then(|| ca.clone());
                port.health_check = Some(HealthCheck {
                    path: None,
                    // A slow machine does not make a target unhealthy.
                    timeout: PATIENCE,
                    ..health_check()
                });
            });
            edges.push(Box::pin(plan.join()).await);
            targets.push(target);
        }
        Self {
            world,
            scheme,
            targets,
            _edges: edges,
        }
    }

    /// Waits until the gateway knows whether the first target is healthy, and asserts which nodes new connections reach.
    async fn assert_first(&self, is_healthy: bool) {
        let unhealthy = if is_healthy {
            Value::Null
        } else {
            json!([9100])
        };
        for (node, unhealthy) in NODES.into_iter().zip([unhealthy, Value::Null]) {
            until("the gateway knows the health", async || {
                self.world.node(node).await["unhealthy_ports"] == unhealthy
            })
            .await;
        }
        let found = if self.scheme == Protocol::Tcp {
            nodes_behind(&self.world, "pool").await
        } else {
            let client = self.world.client_at("web").sni("gateway.test");
            let mut nodes = BTreeSet::new();
            for _ in 0..9 {
                nodes.insert(client.get("https://api.example/").await.text());
            }
            nodes
        };
        let first = usize::from(!is_healthy);
        assert_eq!(found, set(&NODES[first..2]), "{:?}", self.scheme);
    }
}

/// Without a path, a check is a connection, and with the scheme `https` also the TLS handshake.
#[tokio::test]
async fn targets_that_die_and_return_are_noticed_without_a_path() {
    let authority = Authority::new();
    let tls = |authority: &Authority| {
        let tls = authority.serve(&authority.app(&["127.0.0.1"]), false);
        Listening::Tls(tls.into())
    };
    let other = tls(&Authority::new());
    for (scheme, alive, dead) in [
        (Protocol::Tcp, Listening::Plain, vec![None]),
        (
            Protocol::Https,
            tls(&authority),
            vec![None, Some(Listening::Closing), Some(other)],
        ),
    ] {
        let mut site = Box::pin(CheckedSite::start(scheme, &authority, &alive)).await;
        site.assert_first(true).await;
        for dead in dead {
            site.targets[0].die().await;
            if let Some(dead) = dead {
                site.targets[0].listen(dead).await;
            }
            site.assert_first(false).await;
            site.targets[0].die().await;
            site.targets[0].listen(alive.clone()).await;
            site.assert_first(true).await;
        }
    }
}

#[tokio::test]
async fn a_member_at_its_limit_gives_way_to_the_next() {
    let per_node = World::build().config(|config| config.limits.per_node = 1);
    let per_tunnel = World::build().config(|config| config.tunnel.max_streams_per_tunnel = 1);
    for (build, method, body) in [(per_node, "POST", "x"), (per_tunnel, "GET", "")] {
        let build = build.listener(of_pool(listener("web", ListenerProtocol::Https)));
        let world = Box::pin(build.start()).await;
        let (mut edges, mut apps) = (Vec::new(), Vec::new());
        for node in &NODES[..2] {
            let app = App::http(move |head| match head.path().as_str() {
                "/held" => answer::silence(),
                _ => answer::ok(node),
            });
            let app = app.await;
            let plan = world.edge(node).pool("mill").port(9100, app.address());
            edges.push(plan.join().await);
            apps.push(app);
        }
        let client = world.client_at("web").http2().sni("gateway.test");
        let mut connection = client.connect("api.example").await.unwrap();
        let url = "https://api.example/";
        let first = connection.get(url).await.unwrap().text();
        let held = Request::get(format!("{url}held")).body(whole("")).unwrap();
        let _held = connection.hold(held);
        until("the member has a stream", async || {
            world.metrics().await.sum("open_streams", &[]) == 1
        })
        .await;
        let request = Request::builder().method(method).uri(url);
        let request = request.body(whole(body)).unwrap();
        let answer = connection.ask(request).await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_ne!(answer.text(), first);
    }
}

#[tokio::test]
async fn a_client_at_its_limit_does_not_wait_for_a_set() {
    let world = World::build()
        .config(|config| {
            config.limits.per_client = 1;
            config.timeouts.reconnect = Duration::from_mins(5);
        })
        .listener(of_pool(anonymous("pool", ListenerProtocol::Tcp)));
    let world = Box::pin(world.start()).await;
    let app = App::saying("here").await;
    let plan = world.edge("edge-1").pool("mill");
    let mut edge = plan.port(9100, app.address()).join().await;
    edge.kill().await;
    world.until_tunnels("edge-1", 0).await;
    let sessions = [(); 2].map(|()| node_behind(&world, "pool"));
    let mut sessions = FuturesUnordered::from_iter(sessions);
    // One of them is refused at once, and the other one waits.
    assert_eq!(sessions.next().await.unwrap(), "");
    let counted = async || world.metrics().await.outcomes("pool", "limit_reached") == 1;
    until("the refused session is counted", counted).await;
    edge.start().await.unwrap();
    assert_eq!(sessions.next().await.unwrap(), "here");
}
