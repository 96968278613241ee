//! DNS rebinding: a name that a rule allows, and whose addresses change or lead to a machine that no rule may reach.
//!
//! Gateway and edge are the built binary, in the hub of a network of their own. The test's own name server is their
//! only source of names. At each forbidden address a server listens at the requested port, so that a wrong decision is
//! a connection.

use crate::world::{
    PATIENCE,
    client::assert_problem,
    names::{A, AAAA, NameServer, Query},
    netns::{Host, NEED, SharedNetwork},
    process::{GatewayProcess, Process, address_after, causeway_asking},
    tool::need,
};
use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::timeout,
};

/// Address of the name server, in the namespace of the hub.
const SERVER: Ipv4Addr = Ipv4Addr::new(127, 53, 0, 1);
/// Name of which the rules of egress allow every subdomain.
const EGRESS_NAME: &str = "rebind.example.test";
/// Addresses that no wide rule reaches: this host in all its forms, its link, metadata services, and the same behind
/// NAT64.
const FORBIDDEN: [&str; 16] = [
    "127.0.0.1",
    "127.53.0.1",
    "10.77.0.1",
    "fd77::1",
    "169.254.169.254",
    "0.0.0.0",
    "::",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:10.77.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "fe80::1",
    "fd00:ec2::254",
    "100.100.100.200",
];

/// Listener for clients of the edge, and one that dials addresses that no edge serves.
const WEB: &str =
    "{ name: web, protocol: http, listen: \"127.0.0.1:0\", port: 9100, anonymous: true }";
const DIRECT: &str = "{ name: direct, protocol: connect, listen: \"127.0.0.1:0\", anonymous: true, \
    plaintext_networks: [127.0.0.0/8], direct_networks: [0.0.0.0/0, \"::/0\"] }";

/// HTTP server that answers each request with its name, and counts connections.
struct Server {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    _serving: JoinSet<()>,
}

impl Server {
    async fn start(name: &'static str, address: &str) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let counter = connections.clone();
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let answer = format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{name}",
                name.len()
            );
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                counter.fetch_add(1, SeqCst);
                let _ = stream.read(&mut [0; 4096]).await;
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        Self {
            address,
            connections,
            _serving: serving,
        }
    }

    fn connections(&self) -> usize {
        self.connections.load(SeqCst)
    }
}

/// Answers of the name server: one to the first query of a kind, and one to all later queries. It keeps the queries.
#[derive(Default)]
struct Answers {
    first: Vec<IpAddr>,
    later: Vec<IpAddr>,
    queries: Vec<Query>,
}

impl Answers {
    fn answer(&mut self, query: &Query) -> Vec<IpAddr> {
        let is_first = !self.queries.contains(query);
        self.queries.push(query.clone());
        let found = if is_first { &self.first } else { &self.later };
        found.clone()
    }
}

fn addresses(list: &[&str]) -> Vec<IpAddr> {
    list.iter().map(|text| text.parse().unwrap()).collect()
}

/// A gateway and edge-1 in the hub, a server in the cloud, and a server at each address of the hub itself.
struct Scene {
    site: GatewayProcess,
    proxy: String,
    answers: Arc<Mutex<Answers>>,
    /// Address of the server in the cloud.
    allowed: String,
    cloud: Server,
    /// At the same port of the hub, and at a port that has no server in the cloud.
    own: [Server; 2],
    _names: NameServer,
    _edge: Process,
}

impl Scene {
    /// With an edge that has these flags.
    async fn start(host: &Host<'_>, flags: impl Fn(u16) -> Vec<String>) -> Self {
        host.has("169.254.169.254".parse().unwrap());
        let cloud = {
            let _there = host.enter();
            Server::start("cloud", "0.0.0.0:0").await
        };
        let port = cloud.address.port();
        let same = Server::start("own", &format!("[::]:{port}")).await;
        let other = Server::start("own", "[::]:0").await;
        let answers = Arc::<Mutex<Answers>>::default();
        let shared = answers.clone();
        let answer = move |query: &Query| shared.lock().unwrap().answer(query);
        let names = NameServer::start_with(SERVER, answer).await;
        let rules = format!(
            "egress: {{ rules: [{{ to: {{ names: [\"*.example.test\"], ports: [{port}] }} }}, \
             {{ to: {{ networks: [0.0.0.0/0, \"::/0\"], ports: [{}] }} }}] }}",
            other.address.port()
        );
        let configuration = format!("listeners: [{WEB}, {DIRECT}]\n{rules}\n");
        let site = GatewayProcess::asking(SERVER.into(), &configuration).await;
        let edge = causeway_asking(SERVER.into(), &site.path(""));
        let token = site.token("--node edge-1").await;
        let edge = edge.args(["edge", "--admin-listen", "127.0.0.1:0"]);
        let edge = edge.flag("--gateway", &site.tunnel).flag("--join", token);
        let edge = edge.flag("--data-dir", site.edge_data("edge-1"));
        // A link-local address, as for the pods of a node.
        host.hub_has("169.254.20.11".parse().unwrap());
        let edge = edge.flag("--egress", r#"{"proxy": {"listen": "169.254.20.11:0"}}"#);
        let mut edge = edge.args(flags(port)).start();
        edge.wait_for_line("tunnel registered").await;
        let line = edge.wait_for_line("egress listener is open").await;
        Self {
            proxy: address_after(&line, "is open listen="),
            site,
            answers,
            allowed: host.address().to_string(),
            cloud,
            own: [same, other],
            _names: names,
            _edge: edge,
        }
    }

    /// Sets the addresses of all names, and forgets all queries.
    fn resolve_to(&self, first: &[&str], later: &[&str]) {
        let mut answers = self.answers.lock().unwrap();
        *answers = Answers {
            first: addresses(first),
            later: addresses(later),
            queries: Vec::new(),
        };
    }

    /// Asserts that the name was resolved once, or never, since the addresses were set.
    #[track_caller]
    fn assert_queries(&self, name: &str, times: usize, row: &str) {
        let answers = self.answers.lock().unwrap();
        for kind in [A, AAAA] {
            let of_kind = answers.queries.iter();
            let of_kind = of_kind.filter(|query| query.kind == kind && query.name == name);
            assert_eq!(of_kind.count(), times, "{row}: {:?}", answers.queries);
        }
    }

    /// Sends a request through a proxy. Returns the status of the CONNECT, and the body of the answer.
    async fn ask(&self, proxy: &str, host: &str, port: u16) -> (String, String) {
        let asking = async {
            let mut wire = TcpStream::connect(proxy).await.unwrap();
            let head = format!(
                "CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            );
            wire.write_all(head.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            while !answer.ends_with(b"\r\n\r\n") {
                answer.push(wire.read_u8().await.unwrap());
            }
            let status = String::from_utf8(answer[9..12].to_vec()).unwrap();
            if status == "200" {
                let _ = wire.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await;
            }
            let mut rest = Vec::new();
            let ended = wire.read_to_end(&mut rest).await;
            let rest = String::from_utf8(rest).unwrap();
            assert!(ended.is_ok(), "{host}:{port} {status} {rest} {ended:?}");
            let body = rest.rsplit("\r\n").next().unwrap().to_owned();
            (status, body)
        };
        let answer = timeout(PATIENCE, asking).await;
        answer.expect("the proxy answers")
    }

    /// Sends a request through the proxy of the edge.
    async fn ask_egress(&self, host: &str, port: u16) -> (String, String) {
        self.ask(&self.proxy, host, port).await
    }

    /// Asserts that the gateway refuses a destination by its rules.
    async fn assert_denied(&self, host: &str, port: u16, row: &str) {
        let (status, body) = self.ask_egress(host, port).await;
        let says = format!(
            "no rule of the gateway (egress.rules) allows edge-1 to connect to {host}:{port}"
        );
        assert!(
            status == "403" && body.contains(&says),
            "{row}: {status} {body}"
        );
    }

    fn own_connections(&self) -> usize {
        self.own.iter().map(Server::connections).sum()
    }
}

#[tokio::test]
async fn egress_reaches_only_the_checked_address_of_a_rebinding_name() {
    need!(NEED, "mounts");
    let network = SharedNetwork::new();
    network.opens_up();
    let host = network.host();
    let scene = Box::pin(Scene::start(&host, |_| Vec::new())).await;
    let [named, wide] = scene.own.each_ref().map(|own| own.address.port());
    let allowed = scene.allowed.as_str();
    for address in FORBIDDEN {
        for port in [named, wide] {
            scene.resolve_to(&[address], &[allowed]);
            scene.assert_denied(EGRESS_NAME, port, address).await;
            scene.assert_queries(EGRESS_NAME, 1, address);
        }
    }
    assert_eq!((scene.cloud.connections(), scene.own_connections()), (0, 0));

    for (number, address) in FORBIDDEN.into_iter().enumerate() {
        // The name changes after the check. A second query before the dial would get the other address.
        scene.resolve_to(&[allowed], &[address]);
        let (status, body) = scene.ask_egress(EGRESS_NAME, named).await;
        assert_eq!((&*status, &*body), ("200", "cloud"), "{address}");
        scene.assert_queries(EGRESS_NAME, 1, address);
        scene.assert_denied(EGRESS_NAME, named, address).await;
        // Of several addresses only the good one is dialled, and no other one if it fails.
        for both in [[allowed, address], [address, allowed]] {
            scene.resolve_to(&both, &[address]);
            let (status, body) = scene.ask_egress(EGRESS_NAME, named).await;
            assert_eq!((&*status, &*body), ("200", "cloud"), "{both:?}");
            scene.resolve_to(&both, &[address]);
            let (status, body) = scene.ask_egress(EGRESS_NAME, wide).await;
            assert_eq!(status, "502", "{both:?}: {body}");
            assert!(body.contains("could not dial"), "{both:?}: {body}");
        }
        assert_eq!(scene.cloud.connections(), 3 * (number + 1), "{address}");
    }
    assert_eq!(scene.own_connections(), 0);

    // Names beside the rule are not resolved: the server learns nothing of them.
    scene.resolve_to(&[allowed], &[allowed]);
    for name in ["example.test", "rebind.example.test.evil.test", "a.test"] {
        scene.assert_denied(name, named, name).await;
        scene.assert_queries(name, 0, name);
    }
}

#[tokio::test]
async fn a_listener_dials_only_the_checked_address_of_a_rebinding_name() {
    need!(NEED, "mounts");
    let network = SharedNetwork::new();
    network.opens_up();
    let host = network.host();
    let mut scene = Box::pin(Scene::start(&host, |_| Vec::new())).await;
    let is_open = |line: &str| line.contains("listener open") && line.contains("direct");
    let line = scene.site.gateway.line("listener open", is_open).await;
    let direct = address_after(&line, "address=");
    let (allowed, port) = (scene.allowed.as_str(), scene.cloud.address.port());
    let denial = format!(
        "{EGRESS_NAME}:{port} belongs to no edge, and is in no network that listener \\\"direct\\\" dials itself"
    );
    for address in FORBIDDEN {
        scene.resolve_to(&[address], &[allowed]);
        let (status, body) = scene.ask(&direct, EGRESS_NAME, port).await;
        assert!(
            status == "403" && body.contains(&denial),
            "{address}: {status} {body}"
        );
        for first in [&[allowed][..], &[allowed, address], &[address, allowed]] {
            scene.resolve_to(first, &[address]);
            let (status, body) = scene.ask(&direct, EGRESS_NAME, port).await;
            assert_eq!((&*status, &*body), ("200", "cloud"), "{first:?}");
            scene.assert_queries(EGRESS_NAME, 1, address);
        }
    }
    assert_eq!(scene.cloud.connections(), 3 * FORBIDDEN.len());
    assert_eq!(scene.own_connections(), 0);
}

#[tokio::test]
async fn an_edge_reaches_only_the_checked_address_of_a_rebinding_name() {
    need!(NEED, "mounts");
    let network = SharedNetwork::new();
    network.opens_up();
    let host = network.host();
    let allowed = host.address().to_string();
    let flags = |port: u16| {
        let services = format!(
            "{{printer: {{target: \"rebind.site.test:{port}\"}}, camera: {{target: \"named.site.test:{port}\"}}}}"
        );
        let hosts = format!("[{}, named.site.test]", host.address());
        vec![
            "--services".to_owned(),
            services,
            "--allow-hosts".to_owned(),
            hosts,
        ]
    };
    let scene = Box::pin(Scene::start(&host, flags)).await;
    let client = scene.site.nobody();
    let ask = async |service: &str| client.get(&format!("http://{service}.edge-1/")).await;
    let denial = |name: &str| {
        let port = scene.cloud.address.port();
        format!("edge-1 does not allow {name}.site.test:{port}")
    };
    let mut served = 0;
    for address in FORBIDDEN {
        scene.resolve_to(&[&allowed], &[address]);
        let answer = ask("printer").await;
        assert_eq!(answer.text(), "cloud", "{address}");
        scene.assert_queries("rebind.site.test", 1, address);
        let answer = ask("printer").await;
        assert_problem(&answer, 403, "edge_policy", &denial("rebind"));
        served += 1;
        for both in [[&*allowed, address], [address, &*allowed]] {
            scene.resolve_to(&both, &[address]);
            assert_eq!(ask("printer").await.text(), "cloud", "{both:?}");
            served += 1;
        }
    }
    // The owner trusts this name with any address of the site, but not with this machine.
    for address in ["127.0.0.1", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::"] {
        scene.resolve_to(&[address], &[&allowed]);
        let answer = ask("camera").await;
        assert_problem(&answer, 403, "edge_policy", &denial("named"));
        scene.assert_queries("named.site.test", 1, address);
    }
    assert_eq!(scene.cloud.connections(), served);
    assert_eq!(scene.own_connections(), 0);
}
