//! Attacks on the ways in and the way back: each row is one attempt, and the answer that refuses it.

use crate::{
    laptop::{Laptop, opened},
    world::{
        PATIENCE,
        app::{App, Script},
        edge::Edge,
        evil,
        gateway::loopback,
        process::{GatewayProcess, Process, causeway},
        tool::{Running, Tool, need},
        until,
    },
};
use causeway_certs::{OpenMode, Store};
use causeway_edge::config::{Egress, EgressProxy};
use http_body_util::Empty;
use hyper::{Method, Request, Version, body::Bytes, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use std::{collections::BTreeSet, fs, net::SocketAddr, path::Path};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
    time::timeout,
};

/// The proxies for programs: at an edge, and of `causeway proxy` at a laptop. Their rules and the policy allow only
/// what is named.
struct Proxies {
    app: App,
    locals: [SocketAddr; 2],
    laptop: Laptop,
    _edge: Edge,
    _proxy: Running,
}

impl Proxies {
    async fn start() -> Self {
        let app = App::tcp(Script::new().write("reached").close()).await;
        let egress = json!({ "rules": [
            { "to": { "names": ["*.allowed.test"] } },
            { "to": { "nodes": ["edge-1"], "ports": [9100] } },
        ] });
        let build = Laptop::build().config(|config| {
            config.egress = Some(serde_json::from_value(egress).unwrap());
        });
        let laptop = Box::pin(Laptop::before_login(build, app.address())).await;
        laptop.login().await;
        let edge = laptop.world.edge("edge-2").config(|config| {
            config.egress = Some(Egress {
                proxy: Some(EgressProxy { listen: loopback() }),
                ..Egress::default()
            });
        });
        let edge = Box::pin(edge.join()).await;
        let listener = || edge.status().egress?.listeners.first().cloned();
        until("the proxy is open", async || listener().is_some()).await;
        let mut proxy = laptop.causeway("proxy --listen 127.0.0.1:0 --json").start();
        Self {
            app,
            locals: [listener().unwrap().listen, opened(&mut proxy).await],
            laptop,
            _edge: edge,
            _proxy: proxy,
        }
    }
}

/// A SOCKS5 greeting that offers no authentication, and a request (RFC 1928, section 4).
fn socks5(command: u8, address: &[u8], port: u16) -> Vec<u8> {
    [&[5, 1, 0, 5, command, 0][..], address, &port.to_be_bytes()].concat()
}

/// A domain as the address of a request.
fn domain(name: &[u8]) -> Vec<u8> {
    [&[3, u8::try_from(name.len()).unwrap()], name].concat()
}

/// Sends bytes to a proxy. Returns all that it answers, until it closes the connection.
async fn whole_answer(proxy: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut wire = TcpStream::connect(proxy).await.unwrap();
    wire.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    // A request with more bytes than the proxy reads ends with a reset.
    let reading = timeout(PATIENCE, wire.read_to_end(&mut answer)).await;
    let _ = reading.expect("the connection ends");
    answer
}

/// Codes of SOCKS5 (RFC 1928, section 6).
const NOT_ALLOWED: Option<u8> = Some(2);
const HOST_UNREACHABLE: Option<u8> = Some(4);
const REFUSED: Option<u8> = Some(5);
const COMMAND_NOT_SUPPORTED: Option<u8> = Some(7);
const UNKNOWN_ADDRESS: Option<u8> = Some(8);

/// Requests, and the replies of the edge's proxy and of `causeway proxy`.
fn socks5_rows() -> Vec<(Vec<u8>, [Option<u8>; 2])> {
    let any = [1, 127, 0, 0, 1];
    let v6 = |address: &str| {
        let address: std::net::Ipv6Addr = address.parse().unwrap();
        [&[4][..], &address.octets()].concat()
    };
    let at = |address: &[u8]| socks5(1, address, 9100);
    vec![
        (socks5(2, &any, 9100), [COMMAND_NOT_SUPPORTED; 2]),
        (socks5(3, &any, 9100), [COMMAND_NOT_SUPPORTED; 2]),
        (
            socks5(2, &domain(b"edge-1"), 9100),
            [COMMAND_NOT_SUPPORTED; 2],
        ),
        (socks5(0, &any, 9100), [COMMAND_NOT_SUPPORTED; 2]),
        (socks5(9, &any, 9100), [COMMAND_NOT_SUPPORTED; 2]),
        (at(&domain(&[b'a'; 255])), [NOT_ALLOWED, HOST_UNREACHABLE]),
        (at(&domain(b"edge-1\0")), [HOST_UNREACHABLE; 2]),
        (at(&domain(b"edge-1\0.allowed.test")), [HOST_UNREACHABLE; 2]),
        (at(&domain(b"")), [HOST_UNREACHABLE; 2]),
        (
            at(&domain(b"edge-1:9100 HTTP/1.1\r\nx: y")),
            [HOST_UNREACHABLE; 2],
        ),
        (at(&domain(b"edge-1@edge-2")), [HOST_UNREACHABLE; 2]),
        (socks5(1, &domain(b"edge-1"), 0), [HOST_UNREACHABLE; 2]),
        (at(&v6("::1")), [NOT_ALLOWED, HOST_UNREACHABLE]),
        (at(&v6("::ffff:127.0.0.1")), [NOT_ALLOWED, HOST_UNREACHABLE]),
        (at(&v6("fe80::1")), [NOT_ALLOWED, HOST_UNREACHABLE]),
        (at(&any), [NOT_ALLOWED, HOST_UNREACHABLE]),
        (at(&domain(b"edge-2")), [NOT_ALLOWED, NOT_ALLOWED]),
        (socks5(1, &domain(b"edge-1"), 22), [NOT_ALLOWED; 2]),
        // No text, and no kind of address.
        (at(&domain(&[0xff; 8])), [REFUSED; 2]),
        (at(&[2, 1, 2, 3, 4]), [UNKNOWN_ADDRESS; 2]),
    ]
}

#[tokio::test]
async fn socks5_requests_beside_the_rules_get_their_code() {
    let proxies = Box::pin(Proxies::start()).await;
    for (request, replies) in &socks5_rows() {
        for (proxy, expected) in proxies.locals.into_iter().zip(replies) {
            let answer = whole_answer(proxy, request).await;
            assert_eq!(answer.get(..2), Some(&[5, 0][..]), "{request:?}");
            let reply = answer.get(3).copied();
            assert_eq!(reply, *expected, "{request:?} at {proxy}: {answer:?}");
        }
    }
    // Methods of authentication: none is accepted, and none is expected.
    for (greeting, expected) in [
        (&[5, 1, 2][..], &[5, 255][..]),
        (&[5, 2, 1, 2], &[5, 255]),
        (&[5, 0], &[5, 255]),
        (&[5, 2, 2, 0, 1, 3, b'a', b'n', b'n', 1, b'x'], &[5, 0]),
    ] {
        for proxy in proxies.locals {
            let answer = whole_answer(proxy, greeting).await;
            assert_eq!(answer, expected, "{greeting:?} at {proxy}");
        }
    }
    assert_eq!(proxies.app.connections(), 0);
    for proxy in proxies.locals {
        let answer = whole_answer(proxy, &socks5(1, &domain(b"edge-1"), 9100)).await;
        let served = [&[5, 0, 5, 0, 0, 1, 0, 0, 0, 0, 0, 0][..], b"reached"].concat();
        assert_eq!(answer, served, "{proxy}");
    }
    // Each session counts for the identity of its own certificate. The records may be written in any order.
    let clients = || {
        let records = proxies.laptop.world.log().records().into_iter();
        let served = records.filter(|record| record["down"] == "reached".len());
        let clients = served.map(|record| record["client"].to_string());
        clients.collect::<BTreeSet<_>>()
    };
    let own = ["spiffe://world.test/edge/edge-2", "tester"].map(|own| json!(own).to_string());
    let own = BTreeSet::from(own);
    until("both sessions have a record", async || clients() == own).await;
}

/// The time limit of the proxies is 10 seconds, so all connections wait beside each other.
#[tokio::test]
async fn requests_that_never_end_are_given_up_by_both_proxies() {
    let proxies = Box::pin(Proxies::start()).await;
    let long = [&[5, 1, 0, 5, 1, 0, 3, 255][..], &[b'a'; 100]].concat();
    let starts: [&[u8]; 8] = [
        b"",
        &[5],
        &[5, 3, 0],
        &[5, 1, 0],
        &[5, 1, 0, 5, 1, 0],
        &long,
        b"CONNECT edge-1:9100 HTTP/1.1\r\n",
        b"C",
    ];
    let mut ended = JoinSet::new();
    for (start, proxy) in starts
        .iter()
        .flat_map(|start| proxies.locals.map(|to| (*start, to)))
    {
        let start = start.to_vec();
        ended.spawn(async move { (whole_answer(proxy, &start).await, start) });
    }
    while let Some(row) = ended.join_next().await {
        let (answer, start) = row.unwrap();
        let greeted = start.starts_with(&[5, 1, 0]);
        let expected: &[u8] = if greeted { &[5, 0] } else { &[] };
        assert_eq!(answer, expected, "{start:?}");
    }
    assert_eq!(proxies.app.connections(), 0);
}

/// A gateway with an access policy, edge-1 behind it, and a hostile node.
struct HostileEgress {
    site: GatewayProcess,
    app: App,
    _edge: Process,
}

impl HostileEgress {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let rules = folder.path().join("policy.yaml");
        let allowed = json!({ "rules": [
            { "who": { "users": ["evil"] }, "what": { "ports": [9101] }, "then": "allow" },
            { "who": { "spiffe": ["spiffe://causeway.local/edge/edge-2"] },
              "what": { "ports": [9102] }, "then": "allow" },
            { "who": { "spiffe": ["spiffe://causeway.local/edge/evil"] }, "where": { "nodes": ["edge-1"] },
              "what": { "ports": [9100, 9109] }, "then": "allow" },
        ] });
        fs::write(&rules, allowed.to_string()).unwrap();
        let app = App::tcp(Script::new().write("reached").close()).await;
        let egress = json!({ "rules": [{ "to": { "nodes": ["*"] } }] });
        let configuration = format!(
            "policy: {}\negress: {egress}\naccess_log: all\n",
            rules.display()
        );
        let site = GatewayProcess::with(&configuration).await;
        let site = site.restart(evil::enrol).await;
        let port =
            |number: u16| format!("{number}: {{target: \"{}\", scheme: tcp}}", app.address());
        let ports: Vec<_> = (9100..=9102).map(port).collect();
        let token = site.token("--node edge-1").await;
        let edge = causeway("edge --admin-listen 127.0.0.1:0").flag("--join", token);
        let edge = edge.flag("--gateway", &site.tunnel);
        let edge = edge.flag("--data-dir", site.edge_data("edge-1"));
        let edge = edge.flag(
            "--services",
            format!("{{db: {{target: \"{}\"}}}}", app.address()),
        );
        let mut edge = edge
            .flag("--ports", format!("{{{}}}", ports.join(", ")))
            .start();
        edge.wait_for_line("tunnel registered").await;
        Self {
            site,
            app,
            _edge: edge,
        }
    }

    /// Opens a stream. Returns its status, the reason, and the sentence of the gateway; status 0 for a reset.
    async fn open(&self, mut request: Request<Empty<Bytes>>) -> (u16, String, String) {
        let io = TokioIo::new(evil::egress_connection(&self.site).await);
        let (mut sender, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        *request.version_mut() = Version::HTTP_2;
        let answer = match sender.send_request(request).await {
            Ok(answer) => answer,
            Err(error) => return (0, "reset".to_owned(), format!("{error:?}")),
        };
        let field = |name: &str| {
            let value = answer.headers().get(name);
            value.map_or("", |value| value.to_str().unwrap()).to_owned()
        };
        // A stream that is refused before its destination is read has a word of the tunnel.
        let reason = field("causeway-reason") + &field("causeway-failure");
        (answer.status().as_u16(), reason, field("causeway-detail"))
    }
}

/// Refusal by the policy, which names the client by its certificate.
const POLICY_DENIAL: &str =
    "the policy does not allow spiffe://causeway.local/edge/evil to connect to ";

fn connect(authority: &str) -> hyper::http::request::Builder {
    Request::builder().method(Method::CONNECT).uri(authority)
}

#[tokio::test]
async fn a_hostile_edge_reaches_only_what_its_own_certificate_may() {
    let hostile = Box::pin(HostileEgress::start()).await;
    let no_rule = "no rule of the gateway (egress.rules) allows evil to connect to ";
    for (authority, reason, says) in [
        // The name of the node is the name of a user, whom the policy allows.
        ("edge-1:9101", "forbidden", POLICY_DENIAL),
        // Another edge may reach this port.
        ("edge-1:9102", "forbidden", POLICY_DENIAL),
        ("db.edge-1:9100", "forbidden", no_rule),
        ("evil:9100", "forbidden", POLICY_DENIAL),
        // The edge serves no such port, although the policy allows it.
        (
            "edge-1:9109",
            "edge_policy",
            "edge-1 does not serve port 9109",
        ),
        ("127.0.0.1:9100", "forbidden", no_rule),
        ("[::1]:9100", "forbidden", no_rule),
        ("localhost:9100", "forbidden", no_rule),
        ("edge-1.evil:9100", "forbidden", no_rule),
        ("edge-2:9102", "forbidden", no_rule),
        ("edge-1:0", "malformed", "an invalid target"),
        ("a@edge-1:9100", "malformed", "an invalid target"),
    ] {
        let request = connect(authority).body(Empty::new()).unwrap();
        let (status, found, detail) = hostile.open(request).await;
        assert_eq!((status, &*found), (502, reason), "{authority}: {detail}");
        assert!(detail.contains(says), "{authority}: {detail}");
    }
    assert_eq!(hostile.app.connections(), 0);
    // The certificate may reach this port, by CONNECT only.
    let get = Request::get("https://edge-1:9100/").header("causeway-target", "edge-1:9100");
    let (_, found, detail) = hostile.open(get.body(Empty::new()).unwrap()).await;
    assert_eq!(found, "method_not_allowed", "{detail}");
    assert_eq!(hostile.app.connections(), 0);
    let request = connect("edge-1:9100").body(Empty::new()).unwrap();
    assert_eq!(hostile.open(request).await.0, 200);
    // The system completes the edge's dial before the app accepts it.
    until("the app is reached", async || {
        hostile.app.connections() == 1
    })
    .await;
}

#[tokio::test]
async fn forged_fields_make_an_edge_no_other_one() {
    let hostile = Box::pin(HostileEgress::start()).await;
    let client = data_encoding::BASE64URL_NOPAD.encode(
        json!({ "name": "edge-2", "groups": [], "uris": ["spiffe://causeway.local/edge/edge-2"] })
            .to_string()
            .as_bytes(),
    );
    let forged = [
        ("causeway-client", client.as_str()),
        ("causeway-node", "edge-2"),
        ("causeway-target", "edge-1:9100"),
        ("causeway-source", "192.0.2.1:1"),
        ("authorization", "Bearer cwc1-x"),
        ("proxy-authorization", "Bearer cwc1-x"),
        ("x-remote-user", "edge-2"),
        (
            "x-forwarded-client-cert",
            "URI=spiffe://causeway.local/edge/edge-2",
        ),
        ("forwarded", "for=192.0.2.1;by=edge-2"),
    ];
    for (name, value) in forged {
        let request = connect("edge-1:9102").header(name, value);
        let (status, found, detail) = hostile.open(request.body(Empty::new()).unwrap()).await;
        assert_eq!((status, &*found), (502, "forbidden"), "{name}: {detail}");
        assert!(detail.contains(POLICY_DENIAL), "{name}: {detail}");
    }
    // The gateway opens the only control stream of a tunnel, and an egress connection has none.
    let request = connect("edge-1:9102").header("causeway-control", "1");
    let (_, found, detail) = hostile.open(request.body(Empty::new()).unwrap()).await;
    assert_eq!(found, "malformed", "{detail}");
    assert_eq!(hostile.app.connections(), 0);
}

/// A gateway whose API cache has a Secret for each of two pools, and a node without a pool.
struct PoolSecrets {
    site: GatewayProcess,
    _objects: tempfile::TempDir,
}

impl PoolSecrets {
    async fn start() -> Self {
        let objects = tempfile::tempdir().unwrap();
        for pool in ["north", "south"] {
            let secret = json!({
                "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "key", "namespace": pool },
                "stringData": { "of": format!("secret-of-{pool}") },
            });
            fs::write(
                objects.path().join(format!("{pool}.json")),
                secret.to_string(),
            )
            .unwrap();
        }
        let rule = |pool: &str| json!({ "pools": [pool], "namespaces": [pool], "resources": ["v1/secrets"] });
        let rules = json!({
            "manifests": objects.path(),
            "resources": ["v1/secrets", "v1/services"],
            "allow": [rule("north"), rule("south")],
        });
        let site = GatewayProcess::with(&format!("api_cache: {rules}\n")).await;
        for (node, pool) in [
            ("edge-1", "--pool north"),
            ("edge-2", "--pool south"),
            ("edge-3", ""),
        ] {
            let token = site.token(&format!("--node {node} {pool}")).await;
            let mut edge = site.edge(node, 1).flag("--join", token).start();
            edge.wait_for_line("tunnel registered").await;
            edge.stop().await.ok();
            let store = Store::open(site.edge_data(node), OpenMode::Existing).unwrap();
            let leaf = store.edge().unwrap().unwrap().leaf;
            let both = leaf.chain_pem() + leaf.key_pem().expose();
            fs::write(site.path(node), both).unwrap();
        }
        Self {
            site,
            _objects: objects,
        }
    }

    /// Sends a request with the certificate of a node. Returns the status, and the body.
    async fn get(&self, node: &str, path: &str, field: &str) -> (String, String) {
        let url = format!("https://{}{path}", self.site.tunnel);
        let curl = Tool::curl().args(["-k", "--http2", "--path-as-is", "--max-time", "60"]);
        let curl = curl.args(["-w", "\n%{http_code}", "-H", field]);
        let curl = curl.args([Path::new("--cert"), &self.site.path(node)]);
        let curl = curl.args([Path::new("--key"), &self.site.path(node)]);
        let text = curl.args([url]).run().await.ok().text();
        let (body, status) = text.rsplit_once('\n').unwrap();
        (status.to_owned(), body.to_owned())
    }
}

/// Path of the Secret of a pool.
fn secret(pool: &str) -> String {
    format!("/api/v1/namespaces/{pool}/secrets/key")
}

#[tokio::test]
async fn an_edge_reads_no_secrets_of_another_pool() {
    need!("curl");
    let secrets = Box::pin(PoolSecrets::start()).await;
    let own = secret("south");
    until("the cache is filled", async || {
        secrets.get("edge-2", &own, "").await.0 == "200"
    })
    .await;
    let other = secret("north");
    for (path, status) in [
        (other.clone(), "403"),
        (format!("{other}?pretty=true&namespace=south"), "403"),
        (format!("{other}?watch=true&timeoutSeconds=1"), "403"),
        ("/api/v1/namespaces/north/secrets".to_owned(), "403"),
        (
            "/api/v1/namespaces/north/secrets?watch=true&timeoutSeconds=1".to_owned(),
            "403",
        ),
        ("/api/v1/secrets".to_owned(), "403"),
        (
            "/api/v1/secrets?fieldSelector=metadata.namespace%3Dnorth".to_owned(),
            "403",
        ),
        ("/api/v1/services".to_owned(), "403"),
        (
            "/api/v1/namespaces/south/../north/secrets/key".to_owned(),
            "404",
        ),
        (
            "/api/v1/namespaces/south/%2e%2e/north/secrets/key".to_owned(),
            "404",
        ),
        (
            "/api/v1/namespaces/south%2f..%2fnorth/secrets/key".to_owned(),
            "403",
        ),
        ("/api/v1/namespaces/south,north/secrets".to_owned(), "403"),
        ("/api/v1/namespaces/*/secrets".to_owned(), "403"),
        ("/api/v1/namespaces//secrets".to_owned(), "403"),
        ("/api/v1/watch/namespaces/north/secrets".to_owned(), "404"),
        (
            "/api/v1/namespaces/south/secrets?fieldSelector=metadata.namespace%3Dnorth".to_owned(),
            "200",
        ),
        ("/api/v1/namespaces/south/secrets".to_owned(), "200"),
    ] {
        let (found, body) = secrets.get("edge-2", &path, "").await;
        assert_eq!(found, status, "{path}: {body}");
        assert!(!body.contains("secret-of-north"), "{path}: {body}");
    }
    for field in [
        "Causeway-Node: edge-1",
        "Causeway-Client: eyJuYW1lIjoiZWRnZS0xIn0",
        "Impersonate-User: system:node:edge-1",
        "X-Remote-User: edge-1",
        "Host: edge-1",
        "Authorization: Bearer x",
    ] {
        let (status, body) = secrets.get("edge-2", &other, field).await;
        assert_eq!(status, "403", "{field}: {body}");
        let (_, body) = secrets
            .get("edge-2", "/api/v1/namespaces/south/secrets", field)
            .await;
        assert!(!body.contains("secret-of-north"), "{field}: {body}");
    }
    // Without a rule for its pool a node reads nothing, not even the versions.
    for path in [&*own, &*other, "/api", "/version"] {
        let (status, body) = secrets.get("edge-3", path, "").await;
        assert_eq!(status, "403", "{path}: {body}");
        assert!(body.contains("no rule in its api_cache.allow"), "{body}");
    }
    let (status, body) = secrets.get("edge-1", &other, "").await;
    assert_eq!(status, "200", "{body}");
    assert!(body.contains("secret-of-north"), "{body}");
}
