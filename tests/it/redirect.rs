//! Clients of the nodes' own addresses: nftables rules redirect them to listeners, and no other connections.
//!
//! Real processes and a real kernel, in the test's own network: the gateway is on the hub, with clients there and on a host
//! that routes through the hub.

use crate::world::{
    PATIENCE,
    app::{App, PauseGate, Script, answer},
    cluster::Cluster,
    netns::{HUB, Host, NEED, SharedNetwork},
    process::{GatewayProcess, Process, binary, causeway, program},
    tool::{Tool, ToolOutput, full, need},
    until,
};
use causeway_certs::NodeName;
use causeway_gateway::{
    config::Redirect,
    control::nat::{Nat, NatError, PortMap},
    state::{Node, NodesWriter},
};
use serde_json::{Value, json};
use std::{
    io::Write,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

/// Time until a change of the nodes is in the rules, on an idle machine.
const SOON: Duration = Duration::from_secs(1);

const CONFIGURATION: &str = r#"
listeners:
  - { name: nodes, protocol: https, listen: "[::]:0", port: 9100, original_destination: true, anonymous: true }
  - { name: bytes, protocol: tcp, listen: "[::]:0", original_destination: true, anonymous: true }
redirect: { listeners: [nodes], ports: { 9200: bytes } }
timeouts: { drain: 1s }
"#;

/// Two nodes on the hub, whose addresses lead nowhere.
struct RedirectSetup {
    street: SharedNetwork,
    site: GatewayProcess,
    edges: Vec<Process>,
    apps: Vec<App>,
}

impl RedirectSetup {
    async fn new() -> Self {
        let mut scene = Self::without_nodes(SharedNetwork::new(), CONFIGURATION).await;
        scene
            .joins("edge-1", "--address 10.0.0.11 --address fd00::11")
            .await;
        scene
            .joins("edge-2", "--address 10.0.0.12 --address fd00::12")
            .await;
        // The rules change after the nodes.
        for address in ["10.0.0.11", "10.0.0.12"] {
            scene.listed(address, true).await;
        }
        scene
    }

    async fn without_nodes(street: SharedNetwork, configuration: &str) -> Self {
        street.opens_up();
        Self {
            street,
            site: GatewayProcess::with_listeners(configuration).await,
            edges: Vec::new(),
            apps: Vec::new(),
        }
    }

    async fn joins(&mut self, node: &'static str, addresses: &str) {
        let app = App::http(move |_| answer::ok(node)).await;
        self.joins_with(node, addresses, app).await;
    }

    async fn joins_with(&mut self, node: &'static str, addresses: &str, app: App) {
        let token = self.site.token(&format!("--node {node} {addresses}")).await;
        let port = app.port();
        let to = |number: u16| format!("{number}: {{ target: \"127.0.0.1:{port}\" }}");
        let edge = causeway("edge --admin-listen 127.0.0.1:0")
            .flag("--gateway", &self.site.tunnel)
            .flag("--data-dir", self.site.edge_data(node))
            .flag("--ports", format!("{{ {}, {} }}", to(9100), to(9200)))
            .flag("--join", token);
        let mut edge = edge.start();
        edge.wait_for_line("tunnel registered").await;
        self.edges.push(edge);
        self.apps.push(app);
    }

    /// A client on the hub, or on `host`.
    async fn curl(&self, url: &str, host: Option<&Host<'_>>) -> ToolOutput {
        let running = {
            let _there = host.map(Host::enter);
            let root = self.site.data().join("ca.pem");
            let curl = Tool::curl().args(["--cacert"]).args([root]);
            curl.args(["-g", url]).start()
        };
        running.finish().await
    }

    /// Replaces the gateway by a process that takes over. Returns the previous one.
    async fn take_over(mut self) -> (Self, Process) {
        let debug = ["--log-filter", "info,causeway_gateway=debug"];
        let (site, old) = self.site.take_over(&debug).await;
        self.site = site;
        (self, old)
    }

    fn set(&self, name: &str) -> String {
        let set = self.street.nft(&format!("list set inet causeway {name}"));
        set.unwrap()
    }

    async fn listed(&self, address: &str, there: bool) {
        let asked = Instant::now();
        until(&format!("{address} is redirected: {there}"), async || {
            self.set("edges4").contains(address) == there
        })
        .await;
        let took = asked.elapsed();
        assert!(!full() || took < SOON, "{took:?}");
    }

    async fn edge(&self, line: &str) {
        let order = causeway(&format!("node {line}"));
        order.flag("--data-dir", self.site.data()).run().await.ok();
    }
}

#[tokio::test]
async fn local_and_forwarded_dials_of_a_node_address_reach_the_node() {
    need!(NEED, "curl");
    let scene = RedirectSetup::new().await;
    let behind = scene.street.host();
    behind.opens_up();
    for (node, v4, v6) in [
        ("edge-1", "10.0.0.11", "[fd00::11]"),
        ("edge-2", "10.0.0.12", "[fd00::12]"),
    ] {
        for from in [None, Some(&behind)] {
            for address in [v4, v6] {
                // The handshake has no name: the certificate is for the address.
                for url in [
                    format!("https://{address}:9100/"),
                    format!("http://{address}:9200/"),
                ] {
                    let message = scene.curl(&url, from).await;
                    assert_eq!(
                        message.ok().text(),
                        node,
                        "{url}, behind: {}",
                        from.is_some()
                    );
                }
            }
        }
    }
    // The gateway's own listeners still work, and tunnels with them.
    let admin = format!("http://{}/healthz", scene.site.admin);
    scene.curl(&admin, None).await.ok();
}

/// Answers every client.
async fn itself(listener: TcpListener) {
    saying(listener, "itself").await;
}

async fn saying(listener: TcpListener, body: &str) {
    let message = format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        assert!(stream.read(&mut [0; 1024]).await.unwrap() > 0);
        stream.write_all(message.as_bytes()).await.unwrap();
    }
}

#[tokio::test]
async fn non_edge_addresses_and_ports_without_listener_are_untouched() {
    need!(NEED, "curl");
    let mut scene = RedirectSetup::new().await;
    {
        let cloud = scene.street.host();
        let listener = {
            let _there = cloud.enter();
            TcpListener::bind("0.0.0.0:0").await.unwrap()
        };
        let port = listener.local_addr().unwrap().port();
        let mut serving = JoinSet::new();
        serving.spawn(itself(listener));
        for address in ["10.0.0.11", "10.0.0.50"] {
            cloud.has(address.parse().unwrap());
        }
        // Addresses of no host, of a host that is no node, and of a node at a port without a listener.
        for address in ["10.0.0.50", &cloud.address().to_string(), "10.0.0.11"] {
            let url = format!("http://{address}:{port}/");
            assert_eq!(scene.curl(&url, None).await.ok().text(), "itself", "{url}");
        }
        let node = scene.curl("https://10.0.0.11:9100/", None).await;
        assert_eq!(node.ok().text(), "edge-1");
    }
    scene
        .joins("edge-3", "--address 10.0.0.50 --address 127.0.0.9")
        .await;
    scene.listed("10.0.0.50", true).await;
    scene
        .joins("edge-4", &format!("--address 10.0.0.50 --address {HUB}"))
        .await;
    // If two edge nodes have the address, the answer names both.
    let conflict = "10.0.0.50 is an address of several nodes (edge-3, edge-4)";
    until("both nodes are named", async || {
        let both = scene.curl("https://10.0.0.50:9100/", None).await;
        both.ok().text().contains(conflict)
    })
    .await;
    let status = causeway("status").flag("--admin", &scene.site.admin);
    let status = status.run().await.ok().stdout;
    assert!(
        status.contains("conflict: 10.0.0.50 is an address of edge-3, edge-4;"),
        "{status}"
    );
    let message = scene
        .site
        .gateway
        .wait_for_line("several nodes have this address");
    let message = message.await;
    assert!(
        message.contains("10.0.0.50") && message.contains("edge-3, edge-4"),
        "{message}"
    );
    let metrics = format!("http://{}/metrics", scene.site.admin);
    let metrics = scene.curl(&metrics, None).await.ok().text();
    assert!(
        metrics.contains("causeway_gateway_node_address_conflicts 1\n"),
        "{metrics}"
    );
    assert!(!scene.set("edges4").contains("127.0.0.9"));
    // The host's own addresses stay its own, even if a node claims them.
    scene.listed(&HUB.to_string(), true).await;
    let own = scene.curl(&format!("http://{HUB}:9200/"), None).await;
    assert_eq!(own.status.code(), Some(7), "{own:?}");
}

/// Returns the connections to this address that the kernel tracks, in this thread's network.
fn remembered(address: &str) -> usize {
    let all = std::fs::read_to_string("/proc/thread-self/net/nf_conntrack").unwrap();
    all.matches(&format!(" dst={address} ")).count()
}

#[tokio::test]
async fn a_removed_node_is_not_redirected_and_conntrack_is_cleared() {
    need!(NEED, "curl");
    let scene = RedirectSetup::new().await;
    let mut kept = Vec::new();
    for address in ["10.0.0.11:9200", "10.0.0.12:9200"] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream
            .write_all(b"GET / HTTP/1.1\r\nHost: app\r\n\r\n")
            .await
            .unwrap();
        assert!(stream.read(&mut [0; 64]).await.unwrap() > 0);
        kept.push(stream);
    }
    assert_eq!([remembered("10.0.0.11"), remembered("10.0.0.12")], [1, 1]);
    scene.edge("remove edge-1").await;
    scene.listed("10.0.0.11", false).await;
    until("it is not tracked", async || remembered("10.0.0.11") == 0).await;
    assert_eq!(remembered("10.0.0.12"), 1);
    assert_eq!(
        scene
            .curl("https://10.0.0.12:9100/", None)
            .await
            .ok()
            .text(),
        "edge-2"
    );
    // Another node takes the address, and clients that still retry reach it.
    scene.edge("add edge-2 --address 10.0.0.11").await;
    scene.listed("10.0.0.11", true).await;
    assert_eq!(
        scene
            .curl("https://10.0.0.11:9100/", None)
            .await
            .ok()
            .text(),
        "edge-2"
    );
}

/// Configuration of a gateway that learns the addresses of nodes from this cluster.
fn in_cluster(cluster: &Cluster) -> String {
    let kubeconfig = cluster.kubeconfig();
    format!(
        "{CONFIGURATION}kubernetes: {{ kubeconfig: {}, address_networks: [10.0.0.0/16] }}\n",
        kubeconfig.display()
    )
}

const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: app\r\n\r\n";

/// Reads a response with this body, and nothing after it.
async fn response(stream: &mut TcpStream, body: &str) -> std::io::Result<()> {
    let (mut read, end) = (Vec::new(), format!("\r\n\r\n{body}"));
    while !read.ends_with(end.as_bytes()) {
        if stream.read_buf(&mut read).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}

/// A takeover in a cluster: the addresses of nodes arrive after the start of the next process.
#[tokio::test]
async fn a_response_after_a_takeover_reaches_the_client_of_a_node_address() {
    need!(NEED);
    let street = SharedNetwork::new();
    let cluster = Cluster::at(HUB).await;
    cluster.node_with_pods("edge-1", true, &["10.0.0.11"], &[]);
    let configuration = in_cluster(&cluster).replace("drain: 1s", "drain: 5m");
    let mut scene = RedirectSetup::without_nodes(street, &configuration).await;
    let gate = PauseGate::new();
    let held = gate.clone();
    let late = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nlate";
    let app = App::http(move |_| Script::new().until(&held).write(late)).await;
    scene.joins_with("edge-1", "", app).await;
    scene.listed("10.0.0.11", true).await;

    let mut stream = TcpStream::connect("10.0.0.11:9200").await.unwrap();
    stream.write_all(GET).await.unwrap();
    scene.apps[0].head().await;
    let (mut scene, _old) = scene.take_over().await;
    scene.site.gateway.wait_for_line("addresses=1").await;
    // The first packet of this connection since the takeover comes from the previous process.
    gate.open();
    timeout(PATIENCE, response(&mut stream, "late"))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(remembered("10.0.0.11"), 1);

    // From now on the next process deletes the connections to addresses that move.
    cluster.node_with_pods("edge-1", true, &["10.0.0.13"], &[]);
    until("it is not tracked", async || remembered("10.0.0.11") == 0).await;
}

#[tokio::test]
async fn no_client_of_a_node_address_is_refused_during_takeovers() {
    need!(NEED);
    let street = SharedNetwork::new();
    let cluster = Cluster::at(HUB).await;
    cluster.node_with_pods("edge-1", true, &["10.0.0.11"], &[]);
    // A response that has begun may take longer than a second on a slow machine.
    let configuration = in_cluster(&cluster).replace("drain: 1s", "drain: 1m");
    let mut scene = RedirectSetup::without_nodes(street, &configuration).await;
    scene.joins("edge-1", "").await;
    scene.listed("10.0.0.11", true).await;
    let (stop, answers) = (CancellationToken::new(), Arc::new(AtomicUsize::new(0)));
    let mut load = JoinSet::new();
    for _ in 0..4 {
        let (stop, answers) = (stop.clone(), answers.clone());
        load.spawn(async move {
            while !stop.is_cancelled() {
                let mut stream = TcpStream::connect("10.0.0.11:9200").await.unwrap();
                stream.write_all(GET).await.unwrap();
                let answered = timeout(PATIENCE, response(&mut stream, "edge-1"));
                answered.await.expect("there is a response").unwrap();
                answers.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    for table in ["causeway-2", "causeway", "causeway-2"] {
        let wanted = answers.load(Ordering::Relaxed) + 100;
        until("clients get answers", async || {
            answers.load(Ordering::Relaxed) >= wanted
        })
        .await;
        let old;
        (scene, old) = scene.take_over().await;
        old.ended().await.ok();
        // The table of the previous process has ended with it.
        let tables = scene.street.nft("list tables inet").unwrap();
        let ours: Vec<_> = tables
            .lines()
            .filter(|it| it.contains("causeway"))
            .collect();
        assert_eq!(ours, [format!("table inet {table}")]);
    }
    stop.cancel();
    while let Some(ended) = load.join_next().await {
        ended.unwrap();
    }
}

#[tokio::test]
async fn the_rules_survive_a_flush_and_end_with_the_gateway() {
    need!(NEED, "curl");
    let scene = RedirectSetup::new().await;
    let table = || scene.street.nft("list table inet causeway");
    scene.street.nft("flush ruleset").unwrap();
    assert!(table().unwrap().contains("10.0.0.11"));
    assert!(scene.street.nft("delete table inet causeway").is_err());
    assert_eq!(
        scene
            .curl("https://10.0.0.11:9100/", None)
            .await
            .ok()
            .text(),
        "edge-1"
    );

    let street = &scene.street;
    let table = || street.nft("list table inet causeway");
    // A table of that name which another program left without an owner.
    let site = scene
        .site
        .restart(|_| {
            assert!(table().is_err(), "the rules stay after a kill");
            street.nft("add table inet causeway").unwrap();
            street.nft("add chain inet causeway stale").unwrap();
        })
        .await;
    let stands = table().unwrap();
    assert!(
        stands.contains("10.0.0.11") && !stands.contains("stale"),
        "{stands}"
    );
    site.gateway.stop().await;
    assert!(table().is_err(), "the rules stay after a stop");
}

#[tokio::test]
async fn a_reload_redirects_other_ports_and_drops_removed_ones() {
    need!(NEED, "curl");
    let scene = RedirectSetup::new().await;
    let file = scene.site.path("gateway.yaml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("9200: bytes", "9300: bytes")).unwrap();
    let reload = causeway("reload").flag("--data-dir", scene.site.data());
    reload.run().await.ok();
    until("the rules have changed", async || {
        let ports = scene.street.nft("list map inet causeway local4").unwrap();
        ports.contains("9300") && ports.contains("9100") && !ports.contains("9200")
    })
    .await;
    let message = scene.curl("https://10.0.0.11:9100/", None).await;
    assert_eq!(message.ok().text(), "edge-1");
}

#[tokio::test]
async fn a_missing_capability_or_taken_table_name_is_reported() {
    need!(NEED);
    let _street = SharedNetwork::new();
    let site = GatewayProcess::with_listeners(CONFIGURATION).await;
    let configuration = site.path("gateway.yaml");
    let nodes = NodesWriter::default();
    let ports = watch::Sender::default().subscribe();
    let taken = Nat::install(&Redirect::default().table, &nodes, &ports, false);
    assert!(matches!(taken, Err(NatError::TableInUse(_))), "{taken:?}");
    site.gateway.kill().await;
    let less = program("setpriv").args(["--bounding-set=-net_admin", binary(), "gateway"]);
    let less = less
        .flag("--config", configuration)
        .flag("--tunnel-listen", "127.0.0.1:0");
    let message = less.run().await;
    assert!(
        message.stderr.contains("redirect: needs CAP_NET_ADMIN"),
        "{}",
        message.stderr
    );
}

/// A node with an address of each family.
fn node(number: u32) -> (NodeName, Node) {
    let name = NodeName::parse(&format!("edge-{number}")).unwrap();
    let v4 = IpAddr::from(Ipv4Addr::from_bits(0x0a00_0000 + number));
    let v6 = format!("fd00::{number:x}").parse().unwrap();
    let addresses = vec![v4, v6];
    (
        name,
        Node {
            addresses,
            ..Node::default()
        },
    )
}

#[tokio::test]
async fn five_thousand_nodes_need_no_more_rules_than_one() {
    need!(NEED);
    let street = SharedNetwork::new();
    let rules = || {
        let table = street.nft("list table inet causeway").unwrap();
        let rules = table
            .lines()
            .filter(|line| line.contains("redirect to") || line.ends_with(" return"));
        rules.count()
    };
    let nodes = NodesWriter::default();
    nodes.replace([node(1)].into());
    let ports = watch::Sender::<PortMap>::default();
    let table = Redirect::default().table;
    // A process that another test starts has a copy of each socket until it executes its program.
    let install = async || {
        let mut nat = None;
        until("the last table is gone", async || {
            nat = Nat::install(&table, &nodes, &ports.subscribe(), false).ok();
            nat.is_some()
        })
        .await;
        nat.unwrap()
    };
    drop(install().await);
    let one = {
        let _nat = install().await;
        rules()
    };
    nodes.replace((1..=5000).map(node).collect());
    let began = Instant::now();
    let nat = install().await;
    let installed = began.elapsed();
    assert_eq!(rules(), one);
    let stop = CancellationToken::new();
    let mut running = JoinSet::new();
    running.spawn(nat.run(stop.clone()));
    let there = |number: u32| {
        let address = Ipv4Addr::from_bits(0x0a00_0000 + number);
        street
            .nft(&format!("get element inet causeway edges4 {{ {address} }}"))
            .is_ok()
    };
    assert!(there(5000) && !there(5001));
    let (name, added) = node(5001);
    let began = Instant::now();
    nodes.upsert(name, added);
    until("the node's address is redirected", async || there(5001)).await;
    let changed = began.elapsed();
    let began = Instant::now();
    assert!(there(5001));
    let asking = began.elapsed();
    writeln!(
        std::io::stderr().lock(),
        "5,000 nodes are redirected after {installed:?}, and one more after {changed:?}, {asking:?} of which nft takes to look"
    )
    .unwrap();
    assert!(!full() || changed < SOON, "{changed:?}");
    stop.cancel();
    timeout(PATIENCE, running.join_next()).await.unwrap();
    assert!(street.nft("list table inet causeway").is_err());
}

/// A node with pods, on a host of its own.
pub(crate) struct Pods<'a> {
    host: Host<'a>,
    _edge: Option<Process>,
    serving: JoinSet<()>,
}

impl<'a> Pods<'a> {
    /// A node in the cloud.
    pub(crate) fn elsewhere(street: &'a SharedNetwork) -> Self {
        Self {
            host: street.host(),
            _edge: None,
            serving: JoinSet::new(),
        }
    }

    /// A node whose edge admits these target hosts.
    pub(crate) async fn at(
        street: &'a SharedNetwork,
        site: &GatewayProcess,
        node: &'static str,
        allowed: &str,
    ) -> Self {
        Self::with_config(street, site, (node, allowed), "{}").await
    }

    /// The same, with this configuration file of the edge.
    pub(crate) async fn with_config(
        street: &'a SharedNetwork,
        site: &GatewayProcess,
        (node, allowed): (&'static str, &str),
        configuration: &str,
    ) -> Self {
        let file = site.path(&format!("{node}.yaml"));
        std::fs::write(&file, configuration).unwrap();
        let Self { host, serving, .. } = Self::elsewhere(street);
        let token = site.token(&format!("--node {node}")).await;
        let edge = host
            .causeway()
            .args(["edge", "--admin-listen", "127.0.0.1:0"]);
        let edge = edge
            .flag("--gateway", &site.tunnel)
            .flag("--data-dir", site.edge_data(node))
            .flag("--allow-hosts", allowed)
            .flag("--join", token);
        let mut edge = edge.flag("--config", file).start();
        edge.wait_for_line("tunnel registered").await;
        Self {
            host,
            _edge: Some(edge),
            serving,
        }
    }

    /// Starts a pod with this address, which is also reachable from the hub and answers with this text. Returns its
    /// address. It belongs to the edge's host here, so the edge has to allow this very address.
    pub(crate) async fn pod(&mut self, address: &str, says: &'static str) -> SocketAddr {
        self.pod_at(address, 0, says).await
    }

    /// The same, with this port.
    pub(crate) async fn pod_at(
        &mut self,
        address: &str,
        port: u16,
        says: &'static str,
    ) -> SocketAddr {
        self.host.has(address.parse().unwrap());
        let listener = {
            let _there = self.host.enter();
            TcpListener::bind((address, port)).await.unwrap()
        };
        let at = listener.local_addr().unwrap();
        self.serving.spawn(saying(listener, says));
        at
    }

    /// Runs curl on the host of this node.
    pub(crate) async fn curl(&self, arguments: &[&str]) -> ToolOutput {
        let running = {
            let _there = self.host.enter();
            Tool::curl().args(arguments).start()
        };
        running.finish().await
    }
}

/// Returns the configuration of a gateway that follows pods and redirects connections to them.
fn pod_configuration(cluster: &Cluster) -> String {
    let kubernetes = json!({
        "kubeconfig": cluster.kubeconfig(),
        "pod_networks": ["10.244.0.0/16", "10.250.0.0/16", "fd01::/48"],
        "pods": {},
    });
    format!(
        "listeners: [{{ name: pods, protocol: tcp, listen: \"[::]:0\", original_destination: true, anonymous: true }}]\n\
         redirect: {{ pods: pods }}\nkubernetes: {kubernetes}\n"
    )
}

/// Returns the elements of a set in the table.
fn elements_of(street: &SharedNetwork, set: &str) -> String {
    let set = street.nft(&format!("list set inet causeway {set}"));
    let set = set.unwrap();
    let elements = set.split("elements = {").nth(1).unwrap_or_default();
    let elements = elements.split('}').next().unwrap_or_default();
    elements.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the status of a pod with addresses of both families.
fn dual_stack() -> Value {
    json!({ "phase": "Running", "podIPs": [{ "ip": "10.250.0.7" }, { "ip": "fd01::7" }] })
}

#[tokio::test]
async fn with_pod_objects_only_addresses_of_pods_at_edges_are_redirected() {
    need!(NEED, "curl");
    let street = SharedNetwork::new();
    street.opens_up();
    let cluster = Cluster::at(HUB).await;
    let configuration = pod_configuration(&cluster);
    let mut site = GatewayProcess::listening(&format!("{HUB}:0"), &configuration).await;
    let mut one = Pods::at(&street, &site, "edge-1", "10.250.0.7,0.0.0.0/0").await;
    let mut cloud = Pods::elsewhere(&street);
    cluster.node_with_pods("edge-1", true, &["10.0.0.11"], &["10.244.1.0/24"]);
    cluster.node_with_pods("edge-2", true, &["10.0.0.12"], &[]);
    cluster.node_with_pods("cloud-1", false, &["10.0.0.14"], &["10.244.9.0/24"]);
    // The address of a bridge of that node, which no object has.
    cluster.pod("shop", "bridge-thief", "edge-1", "10.244.9.1");
    let v4 = one.pod("10.250.0.7", "edge").await;
    cluster.put_pod(("shop", "web"), "edge-1", &dual_stack());
    // A pod in the cloud, whose address is in the podCIDR of the edge node, and its thief.
    let straight = cloud.pod("10.244.1.9", "cloud").await;
    cluster.pod("shop", "cloud", "cloud-1", "10.244.1.9");
    cluster.pod("shop", "thief", "edge-1", "10.244.1.9");
    let elements = |name: &str| elements_of(&street, name);
    until("the pod is redirected", async || {
        elements("pods4") == "10.250.0.7" && elements("pods6") == "fd01::7"
    })
    .await;
    let curl = async |at: SocketAddr| {
        let url = format!("http://{at}/");
        Tool::curl().args(["-g", &url]).run().await.ok().text()
    };
    assert_eq!(curl(v4).await, "edge");
    let asked = format!("node=\"edge-1\" port={} ", v4.port());
    site.gateway.wait_for_line(&asked).await;
    assert_eq!(curl(straight).await, "cloud");

    // Another pod takes an address, which leads to neither then.
    cluster.pod("shop", "thief", "edge-2", "10.250.0.7");
    until("the address is not redirected", async || {
        elements("pods4").is_empty()
    })
    .await;
    cluster.delete_pod("shop", "thief");
    cluster.pod("shop", "db", "edge-1", "10.250.0.8");
    until("it is redirected again", async || {
        elements("pods4") == "10.250.0.7, 10.250.0.8"
    })
    .await;
    // A change of the nodes does not change the pods.
    cluster.node_with_pods("edge-3", true, &["10.0.0.13"], &["10.244.3.0/24"]);
    until("the node is redirected", async || {
        elements("edges4").contains("10.0.0.13")
    })
    .await;
    assert_eq!(elements("pods4"), "10.250.0.7, 10.250.0.8");
    let mut kept = TcpStream::connect(v4).await.unwrap();
    kept.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    assert!(kept.read(&mut [0; 64]).await.unwrap() > 0);
    assert!(remembered("10.250.0.7") > 0);
    cluster.delete_pod("shop", "web");
    until("it is neither redirected nor tracked", async || {
        elements("pods4") == "10.250.0.8"
            && elements("pods6").is_empty()
            && remembered("10.250.0.7") == 0
    })
    .await;
}

#[tokio::test]
async fn pods_of_edge_nodes_are_reachable_if_both_sides_allow_it() {
    need!(NEED, "curl");
    let street = SharedNetwork::new();
    street.opens_up();
    let cluster = Cluster::at(HUB).await;
    let configuration = format!(
        "listeners: [{{ name: pods, protocol: tcp, listen: \"[::]:0\", original_destination: true, anonymous: true }}]\n\
         redirect: {{ pods: pods }}\n\
         kubernetes: {{ kubeconfig: {}, pod_networks: [10.244.0.0/16, \"fd01::/48\"] }}\n",
        cluster.kubeconfig().display()
    );
    let mut site = GatewayProcess::listening(&format!("{HUB}:0"), &configuration).await;
    let mut one = Pods::at(&street, &site, "edge-1", "10.244.1.7,fd01:0:0:1::/64").await;
    let mut two = Pods::at(&street, &site, "edge-2", "127.0.0.0/8").await;
    let mut cloud = Pods::elsewhere(&street);
    cluster.node_with_pods(
        "edge-1",
        true,
        &["10.0.0.11"],
        &["10.244.1.0/24", "fd01:0:0:1::/64"],
    );
    cluster.node_with_pods("edge-2", true, &["10.0.0.12"], &["10.244.2.0/24"]);
    // A network that also contains addresses of the cloud belongs to no node.
    cluster.node_with_pods("edge-3", true, &["10.0.0.13"], &["10.244.8.0/23"]);
    cluster.node_with_pods("cloud-1", false, &["10.0.0.14"], &["10.244.9.0/24"]);
    let set = |name: &str| {
        street
            .nft(&format!("list set inet causeway {name}"))
            .unwrap()
    };
    until("networks are redirected", async || {
        set("pods4").contains("10.244.1.0/24") && set("pods4").contains("10.244.2.0/24")
    })
    .await;
    assert!(!set("pods4").contains("10.244.8"), "{}", set("pods4"));
    assert!(set("pods6").contains("fd01:0:0:1::/64"), "{}", set("pods6"));

    let curl = async |at: SocketAddr| {
        let url = format!("http://{at}/");
        Tool::curl().args(["-g", &url]).run().await
    };
    let v4 = one.pod("10.244.1.7", "edge").await;
    assert_eq!(curl(v4).await.ok().text(), "edge");
    let asked = |node: &str, at: SocketAddr| format!("node=\"{node}\" port={} ", at.port());
    site.gateway.wait_for_line(&asked("edge-1", v4)).await;
    // The owner of that node denies access to its pods: the gateway uses no other path to them, although one exists.
    let refused = two.pod("10.244.2.7", "edge").await;
    let code = curl(refused).await.status.code();
    // Reset, before or after curl has noticed that it is connected.
    assert!(matches!(code, Some(7 | 56)), "{code:?}");
    site.gateway.wait_for_line(&asked("edge-2", refused)).await;
    let straight = cloud.pod("10.244.9.7", "cloud").await;
    assert_eq!(curl(straight).await.ok().text(), "cloud");

    let mut kept = TcpStream::connect(v4).await.unwrap();
    kept.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    assert!(kept.read(&mut [0; 64]).await.unwrap() > 0);
    assert!(remembered("10.244.1.7") > 0);
    cluster.node_with_pods("edge-1", true, &["10.0.0.11"], &["fd01:0:0:1::/64"]);
    until("it is neither redirected nor tracked", async || {
        !set("pods4").contains("10.244.1.0") && remembered("10.244.1.7") == 0
    })
    .await;
}
