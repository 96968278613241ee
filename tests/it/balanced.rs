//! Several gateways behind one address, the only one that an edge has: a real `HAProxy` in front of them.

use crate::{
    fleet::{Load, load},
    world::{
        PATIENCE, admin,
        app::App,
        process::{GatewayProcess, OPEN, Process, address_after, causeway},
        tool::{Running, Tool, need},
        until,
    },
};
use std::{
    fmt::Write,
    fs,
    net::{Ipv4Addr, SocketAddr},
    sync::atomic::Ordering::Relaxed,
    time::Duration,
};
use tempfile::TempDir;
use test_summary::unused_port;
use tokio::{net::TcpStream, time::Instant};

/// Log message of a gateway about a new tunnel.
const ARRIVED: &str = "edge-1 connected";
const URL: &str = "http://edge-1:9100/";
/// The number of gateways that the balancer knows, running or not.
const PLACES: u8 = 4;

/// The gateways with one CA and one known node, and the balancer in front of them.
struct Balanced {
    /// An address of loopback that only this test uses.
    net: u8,
    port: u16,
    sites: Vec<GatewayProcess>,
    app: App,
    balancer: Running,
    _folder: TempDir,
}

/// An edge that has only the address of the balancer.
struct Edge {
    process: Process,
    admin: String,
}

impl Balanced {
    /// Starts two gateways, with these further keys of `tunnel`, behind a balancer with this `balance`.
    async fn start(net: u8, balance: &str, more: &str) -> Self {
        Self::start_with_nodes((net, balance), (more, ""), &["edge-1"]).await
    }

    /// The same with these nodes, and further keys of the configuration.
    async fn start_with_nodes(
        (net, balance): (u8, &str),
        (more, further): (&str, &str),
        nodes: &[&str],
    ) -> Self {
        let app = App::saying("here").await;
        let port = unused_port();
        let at = |number: u8| SocketAddr::from((Ipv4Addr::new(127, 53, net, number), port));
        let tunnel = format!("{{ advertise: [\"{}\"], replicas: 2{more} }}", at(100));
        let peers: Vec<_> = (1..=PLACES)
            .map(|number| format!("\"{}\"", at(number)))
            .collect();
        let further = further.replace("ALL", &peers.join(", "));
        // Clients start in bursts, and a busy machine serves some of them late.
        let timeouts = "timeouts: { tls: 2m, header: 2m }";
        let first = format!("tunnel: {tunnel}\n{timeouts}\n{further}{OPEN}");
        let first = GatewayProcess::listening(&at(1).to_string(), &first).await;
        // Joins where the test can wait for it.
        for node in nodes {
            first.join(node, app.port()).await.stop().await.ok();
            // Its lines are counted from then on.
            let left = format!("{node} disconnected");
            first.gateway.wrote(&left, 1, PATIENCE).await;
        }
        let second = first.replica_at(&at(2).to_string()).await;
        let mut gateways =
            format!(" balance {balance}\n default-server check inter 100ms fall 1 rise 1\n");
        for number in 1..=PLACES {
            writeln!(gateways, " server g{number} {}", at(number)).unwrap();
        }
        let (balancer, folder) = haproxy(at(100), &gateways);
        Self {
            net,
            port,
            sites: vec![first, second],
            app,
            balancer,
            _folder: folder,
        }
    }

    fn at(&self, number: u8) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::new(127, 53, self.net, number), self.port))
    }

    /// Starts one more gateway at this address.
    async fn another(&mut self, number: u8) {
        let tunnel = self.at(number).to_string();
        let site = self.sites[0].replica_at(&tunnel).await;
        self.sites.push(site);
    }

    /// From now on all gateways announce this number of gateways.
    async fn say(&self, before: u32, now: u32) {
        for site in &self.sites {
            let file = site.path("gateway.yaml");
            let text = fs::read_to_string(&file).unwrap();
            let said = |count: u32| format!("replicas: {count}");
            let text = text.replace(&said(before), &said(now));
            assert!(text.contains(&said(now)), "{text}");
            fs::write(&file, text).unwrap();
            let reload = causeway("reload").flag("--data-dir", site.data());
            reload.run().await.ok();
        }
    }

    async fn edge(&self) -> Edge {
        self.edge_of("edge-1", "every").await
    }

    /// Starts the edge of a node with this value of `tunnels.gateways`.
    async fn edge_of(&self, node: &str, mode: &str) -> Edge {
        let first = &self.sites[0];
        let edge = causeway("edge --admin-listen 127.0.0.1:0")
            .flag("--gateway", self.at(100).to_string())
            .args(["--tunnels-gateways", mode, "--tunnels-resolve-after", "1s"])
            .flag("--data-dir", first.edge_data(node))
            .flag(
                "--ports",
                format!("{{9100: {{target: \"127.0.0.1:{}\"}}}}", self.app.port()),
            );
        let mut process = edge.start();
        let runs = process.wait_for_line("edge is running").await;
        let admin = address_after(&runs, "admin=");
        Edge { process, admin }
    }

    /// Returns the number of tunnels that have connected to each gateway.
    fn arrived(&self) -> Vec<usize> {
        let written = self.sites.iter().map(|site| site.gateway.written());
        written.map(|written| written.count(ARRIVED)).collect()
    }

    /// Checks that this number of tunnels has connected to each gateway, whose lines may still be on their way.
    async fn has_arrived(&self, expected: &[usize]) {
        until("all tunnels are in the logs", async || {
            let arrived = self.arrived();
            let mut both = arrived.iter().zip(expected);
            both.all(|(now, least)| now >= least)
        })
        .await;
        assert_eq!(self.arrived(), expected, "dialled again");
    }

    /// Checks that each gateway has the node.
    async fn serve(&self) {
        for site in &self.sites {
            assert_eq!(site.nobody().get(URL).await.text(), "here");
        }
    }
}

impl Edge {
    async fn ask(&self, path: &str) -> String {
        admin::get(&self.admin, path).await
    }

    /// Returns how often the edge reached a gateway to which it already had a tunnel.
    async fn misses(&self) -> usize {
        let metrics = self.ask("/metrics").await;
        let misses = "causeway_edge_tunnel_attempts_total{outcome=\"reached\"} ";
        let message = metrics.lines().find_map(|line| line.strip_prefix(misses));
        message.map_or(0, |message| message.parse().unwrap())
    }

    /// Waits until the edge has reached this many of this many gateways.
    async fn reaches(&self, gateways: u32, of: u32) {
        let wanted = format!("\"reached\":{{\"gateways\":{gateways},\"of\":{of}");
        until(&wanted, async || {
            self.ask("/status").await.contains(&wanted)
        })
        .await;
    }
}

/// Starts `HAProxy` at this address, in front of these servers.
fn haproxy(listen: SocketAddr, servers: &str) -> (Running, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("haproxy.cfg");
    let text = format!(
        "defaults\n mode tcp\n timeout connect 2s\n timeout client 1h\n timeout server 1h\n\
         listen gateways\n bind {listen}\n{servers}"
    );
    fs::write(&file, text).unwrap();
    let balancer = Tool::new("haproxy").args(["-db".as_ref(), "-f".as_ref(), file.as_os_str()]);
    (balancer.start(), folder)
}

#[tokio::test]
async fn a_balancer_passes_the_addresses_of_edges_by_the_proxy_header() {
    need!("haproxy");
    let app = App::saying("here").await;
    let port = unused_port();
    let at = |number: u8| SocketAddr::from((Ipv4Addr::new(127, 53, 31, number), port));
    let tunnel = format!(
        "{{ advertise: [\"{}\"], proxy_protocol: [127.53.31.9/32] }}",
        at(100)
    );
    let configuration = format!("tunnel: {tunnel}\n{OPEN}");
    let site = GatewayProcess::listening(&at(1).to_string(), &configuration).await;
    // The connections of a health check have no header of a client.
    let server = format!(
        " server g1 {} source 127.53.31.9 send-proxy-v2 check inter 100ms\n",
        at(1)
    );
    let (_balancer, _folder) = haproxy(at(100), &server);
    let edge = causeway("edge --admin-listen 127.0.0.1:0")
        .flag("--gateway", at(100).to_string())
        .flag("--data-dir", site.edge_data("edge-1"))
        .flag(
            "--ports",
            format!("{{9100: {{target: \"127.0.0.1:{}\"}}}}", app.port()),
        );
    let mut edge = edge
        .flag("--join", site.token("--node edge-1").await)
        .start();
    edge.wait_for_line("tunnel registered").await;
    assert_eq!(site.nobody().get(URL).await.text(), "here");
    let address = site.node("edge-1").await["address"].clone();
    assert!(
        address.as_str().unwrap().starts_with("127.0.0.1:"),
        "the balancer connects from 127.53.31.9, and the edge from {address}"
    );
    // From other addresses no header is expected.
    let _direct = site.join("edge-2", app.port()).await;
}

#[tokio::test]
async fn gateways_behind_one_address_change_without_request_loss() {
    need!("haproxy");
    let mut all = Balanced::start(26, "roundrobin", "").await;
    let before = all.arrived();
    let edge = all.edge().await;
    edge.reaches(2, 2).await;
    all.serve().await;
    all.has_arrived(&[before[0] + 1, before[1] + 1]).await;

    // An update: the next gateway is ready before the previous one leaves.
    all.another(3).await;
    all.say(2, 3).await;
    edge.reaches(3, 3).await;
    all.serve().await;
    let (one, two, three) = (&all.sites[0], &all.sites[1], &all.sites[2]);
    let shared = Load::default();
    let acting = async {
        // One load before the signal, and one after it.
        shared.goes_on(100).await;
        one.gateway.signal("TERM").await;
        until("its listener is closed", async || {
            TcpStream::connect(&one.listener).await.is_err()
        })
        .await;
        shared.goes_on(100).await;
        shared.enough.store(true, Relaxed);
    };
    let (ones, threes, ()) =
        tokio::join!(load(one, two, &shared), load(three, two, &shared), acting);
    for met in [&ones, &threes] {
        let example = met.failed.first();
        assert!(met.failed.is_empty(), "for example {example:?}");
        // Each gateway always had a tunnel.
        assert_eq!(met.told, 0, "{met:?}");
        assert!(met.first > 0, "{met:?}");
    }

    // A gateway dies without notice, and another one takes its place.
    let stood = all.arrived()[1];
    let killed = all.sites.remove(2);
    let gone = all.sites.remove(0);
    killed.gateway.kill().await;
    edge.reaches(1, 3).await;
    all.another(3).await;
    edge.reaches(2, 3).await;
    all.another(4).await;
    edge.reaches(3, 3).await;
    all.serve().await;
    all.has_arrived(&[stood, 1, 1]).await;
    drop((gone, all.balancer));
}

#[tokio::test]
async fn edges_move_to_a_gateway_that_starts_later_without_request_loss() {
    need!("haproxy");
    let nodes = ["edge-1", "edge-2", "edge-3", "edge-4", "edge-5", "edge-6"];
    let balance = (22, "roundrobin");
    let peers = ("", "peers: { addresses: [ALL] }\n");
    let mut all = Balanced::start_with_nodes(balance, peers, &nodes).await;
    let mut edges = Vec::new();
    for node in nodes {
        let edge = all.edge_of(node, "2").await;
        edge.reaches(2, 2).await;
        edges.push(edge);
    }
    all.another(3).await;
    all.say(2, 3).await;
    let (one, two) = (&all.sites[0], &all.sites[1]);
    let shared = Load::default();
    let acting = async {
        // Both others have more than the average. Perhaps all edges discovered the same one of them.
        until("the third gateway has an edge", async || {
            let metrics = all.sites[2].metrics().await;
            metrics.sum("tunnels", &[]) >= 1
        })
        .await;
        shared.enough.store(true, Relaxed);
    };
    let (requests, ()) = tokio::join!(load(one, two, &shared), acting);
    assert!(requests.failed.is_empty(), "{requests:?}");
    for edge in &edges {
        edge.reaches(2, 3).await;
    }
}

#[tokio::test]
async fn a_sticky_balancer_costs_few_attempts_and_one_log_line() {
    need!("haproxy");
    let all = Balanced::start(21, "source", "").await;
    let edge = all.edge().await;
    edge.reaches(1, 2).await;
    until("it has searched for some seconds", async || {
        edge.misses().await >= 4
    })
    .await;
    // Time is the subject: the next pauses are 1 s at least.
    let (began, before) = (Instant::now(), edge.misses().await);
    until("the edge dials three more times", async || {
        edge.misses().await >= before + 3
    })
    .await;
    let took = began.elapsed();
    assert!(took >= Duration::from_secs(2), "two pauses in {took:?}");
    let message = edge.process.written();
    assert_eq!(message.count("searching for further gateways"), 1);
    let statuses = all
        .sites
        .iter()
        .map(async |site| site.nobody().get(URL).await.status);
    let mut statuses = futures_util::future::join_all(statuses).await;
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 503]);
    assert_eq!(message.count("tunnel registered"), 1);
    // The edge finds a gateway at another address as soon as the balancer leads to it.
    let (there, gone): (Vec<_>, Vec<_>) = {
        let mut parts = (Vec::new(), Vec::new());
        for site in all.sites {
            let has = site.nobody().get(URL).await.status == 200;
            if has { &mut parts.1 } else { &mut parts.0 }.push(site);
        }
        parts
    };
    drop(gone);
    until("the edge is at the other gateway", async || {
        there[0].nobody().get(URL).await.status == 200
    })
    .await;
}

#[tokio::test]
async fn renewal_behind_a_balancer_supersedes_at_each_gateway() {
    need!("haproxy");
    // Renewed after two thirds of it, so a slow machine has 20 s.
    let lifetime = ", edge_certificate_lifetime: 1m";
    let all = Balanced::start(25, "roundrobin", lifetime).await;
    let before = all.arrived();
    let edge = all.edge().await;
    edge.reaches(2, 2).await;
    let (one, two) = (&all.sites[0], &all.sites[1]);
    let shared = Load::default();
    let renewed = async {
        let twice = [before[0] + 2, before[1] + 2];
        until("both have a tunnel with the new certificate", async || {
            let arrived = all.arrived();
            arrived[0] >= twice[0] && arrived[1] >= twice[1]
        })
        .await;
        shared.enough.store(true, Relaxed);
    };
    let (ones, twos, ()) = tokio::join!(load(one, two, &shared), load(two, one, &shared), renewed);
    for met in [&ones, &twos] {
        assert!(met.failed.is_empty(), "{met:?}");
        assert_eq!((met.told, met.refused, met.closed), (0, 0, 0), "{met:?}");
    }
    edge.reaches(2, 2).await;
}

/// Each gateway has its own tokens.
#[tokio::test]
async fn an_edge_joins_any_gateway_that_knows_its_token() {
    need!("haproxy");
    let all = Balanced::start(23, "roundrobin", "").await;
    let list = [all.at(1), all.at(2)];
    for (node, gateways) in [("edge-2", &list[..]), ("edge-3", &[all.at(100)])] {
        for site in &all.sites {
            let token = site.token(&format!("--node {node}")).await;
            let mut edge = causeway("edge --admin-listen 127.0.0.1:0")
                .flag(
                    "--data-dir",
                    all.sites[0].path(&format!("{node}{}", site.tunnel)),
                )
                .flag("--join", token);
            for gateway in gateways {
                edge = edge.flag("--gateway", gateway.to_string());
            }
            edge.start().wait_for_line("joined").await;
        }
    }
}
