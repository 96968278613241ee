//! Open streams end when their client may no longer have them. Other streams continue.

use crate::{
    testbed::URL,
    world::{
        GATEWAY_NAME, LIFE, PATIENCE, World,
        app::{App, End, Head, Script, answer},
        client::{CallError, Client, Wire, assert_problem, exchange, read},
        gateway::{anonymous, listener},
        issuer::{Issuer, Key, claims, now},
        until,
    },
};
use causeway_certs::{
    Ca, CaError, Certificate, LeafCertificate, NodeName, OpenMode, RotationStep, Store, StoreError,
};
use causeway_gateway::{
    config::{ClientAuth, Config, Jwt, Listener, ListenerProtocol, Serial, policy},
    proxy::authz::{Authorize, AuthzDecision, AuthzRequest},
    state::{ClusterNode, Node, Policy, PolicyWriter},
};
use serde_json::{Value, json};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::Notify,
    time::timeout,
};

const UPGRADE: &str =
    "GET /session HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n";

/// An app that echoes sessions, and sends endless downloads.
async fn app() -> App {
    App::http(app_of).await
}

pub(crate) fn app_of(head: &Head) -> Script {
    match head.path().as_str() {
        "/session" => answer::switch("SPDY/3.1", b"hello"),
        "/endless" => answer::endless(),
        _ => answer::ok("it"),
    }
}

/// Opens a session through an upgrade, with further `fields`.
pub(crate) async fn session(client: &Client, fields: &str) -> impl Wire + use<> {
    session_at(client, "edge-1", fields).await
}

async fn session_at(client: &Client, node: &str, fields: &str) -> impl Wire + use<> {
    try_session_at(client, node, fields).await.unwrap()
}

/// The same, for a session that may be refused.
async fn try_session_at(
    client: &Client,
    node: &str,
    fields: &str,
) -> Result<impl Wire + use<>, CallError> {
    let upgrade = UPGRADE.replace("edge-1", node);
    let beginning = async {
        let mut wire = client.tls_stream(node, &["http/1.1"]).await?;
        let upgrade = format!("{upgrade}{fields}\r\n");
        wire.write_all(upgrade.as_bytes()).await?;
        wire.flush().await?;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(wire.read_u8().await?);
        }
        if !head.starts_with(b"HTTP/1.1 101 ") {
            return Err(String::from_utf8_lossy(&head).into());
        }
        let mut first = [0; 5];
        wire.read_exact(&mut first).await?;
        assert_eq!(&first, b"hello");
        Ok::<_, CallError>(wire)
    };
    timeout(PATIENCE, beginning).await?
}

/// Runs `begin` with a number of seconds after which a credential ends. Time is the subject: a machine that is too slow to begin
/// within that time tries again with twice as much.
async fn begin_before_expiry<T>(
    mut seconds: u64,
    begin: impl AsyncFn(u64) -> Result<T, CallError>,
) -> T {
    loop {
        let start = Instant::now();
        match begin(seconds).await {
            Ok(session) => return session,
            // Credentials end at a whole second.
            Err(error) => assert!(start.elapsed().as_secs() + 2 >= seconds, "{error}"),
        }
        seconds *= 2;
    }
}

/// Checks that bytes pass in both directions.
pub(crate) async fn echoes(wire: &mut impl Wire) {
    wire.write_all(b"ping").await.unwrap();
    assert_eq!(read(wire, 4).await, b"ping");
}

/// Waits until the gateway has ended a connection, by a reset and not in order.
pub(crate) async fn is_reset(wire: &mut impl Wire) {
    let mut rest = [0; 4096];
    loop {
        let read = timeout(PATIENCE, wire.read(&mut rest)).await;
        match read.expect("the gateway ends the connection") {
            Ok(0) => panic!("it ended in order"),
            Ok(_) => {}
            Err(_) => return,
        }
    }
}

pub(crate) fn compiled(rules: &Value) -> Policy {
    let policy: policy::Policy = serde_json::from_value(json!({ "rules": rules })).unwrap();
    Policy::compile(&policy).unwrap()
}

/// Returns the access record of a session that was refused afterwards.
pub(crate) async fn refused(world: &World, reason: &str) -> Value {
    let mut found = None;
    until("it is recorded why", async || {
        let records = world.log().records();
        let mut refused = records
            .into_iter()
            .filter(|record| record["reason"] == reason);
        found = refused.next_back();
        found.is_some()
    })
    .await;
    found.unwrap()
}

#[tokio::test]
async fn a_policy_that_denies_open_streams_ends_only_those() {
    let may = json!([{ "then": "allow" }]);
    let rules = PolicyWriter::new(Some(compiled(&may)));
    let world = World::build().policy(rules.reader()).start().await;
    let app = app().await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let denied = world.client();
    let other = world.client().certificate(&world.client_leaf("other"));
    let (mut first, mut stays) = (session(&denied, "").await, session(&other, "").await);
    let mut download = denied.clone().http2().connect("edge-1").await.unwrap();
    let request = hyper::Request::get("https://edge-1:9100/endless");
    let request = request.body(crate::world::client::whole("")).unwrap();
    let body = download.open(request).await.unwrap().into_body();
    echoes(&mut first).await;
    rules.replace(Some(compiled(&json!([
        { "who": { "users": ["tester"] }, "then": "deny" },
        { "then": "allow" },
    ]))));
    is_reset(&mut first).await;
    let cut = http_body_util::BodyExt::collect(body).await;
    assert!(cut.is_err(), "a download over HTTP/2 ends as well");
    echoes(&mut stays).await;
    let record = refused(&world, "forbidden").await;
    assert_eq!(
        (&record["client"], &record["rule"]),
        (&json!("tester"), &json!("rules[0]"))
    );
    // Other rules that still allow it end nothing.
    rules.replace(Some(compiled(&may)));
    let mut again = session(&denied, "").await;
    rules.replace(Some(compiled(
        &json!([{ "who": { "groups": ["system:authenticated"] }, "then": "allow" }]),
    )));
    until("the rules were checked", async || {
        world.client().get(URL).await.status == 200
    })
    .await;
    echoes(&mut again).await;
    echoes(&mut stays).await;
}

#[tokio::test]
async fn a_denied_client_that_reads_no_bytes_loses_its_download() {
    let may = json!([{ "then": "allow" }]);
    let rules = PolicyWriter::new(Some(compiled(&may)));
    let world = World::build().policy(rules.reader()).start().await;
    let app = app().await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let client = world.client();
    let mut http1 = client.tls_stream("edge-1", &["http/1.1"]).await.unwrap();
    let request = "GET /endless HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
    http1.write_all(request.as_bytes()).await.unwrap();
    let mut http2 = client.clone().http2().connect("edge-1").await.unwrap();
    let request = hyper::Request::get("https://edge-1:9100/endless");
    let request = request.body(crate::world::client::whole("")).unwrap();
    let unread = http2.open(request).await.unwrap();
    until("both streams stall", async || {
        world.metrics().await.sum("stalled_streams", &[]) == 2
    })
    .await;
    rules.replace(Some(compiled(&json!([]))));
    world.until_idle().await;
    drop((http1, unread));
}

#[tokio::test]
async fn sessions_over_connect_and_tcp_end_as_well() {
    let rules = PolicyWriter::new(Some(compiled(&json!([{ "then": "allow" }]))));
    let tcp = Listener {
        node: Some("edge-1".to_owned()),
        port: Some(22),
        ..anonymous("bytes", ListenerProtocol::Tcp)
    };
    let build = World::build().policy(rules.reader()).listener(tcp);
    let world = build
        .listener(listener("connect", ListenerProtocol::Connect))
        .start()
        .await;
    let app = App::tcp(Script::new().echo()).await;
    let _edge = world.edge("edge-1").port(22, app.address()).join().await;
    let mut bytes = tokio::net::TcpStream::connect(world.listener("bytes"))
        .await
        .unwrap();
    echoes(&mut bytes).await;
    let connect = world.client_at("connect");
    let mut through = connect.tls_stream("edge-1", &[]).await.unwrap();
    let head = exchange(
        &mut through,
        "CONNECT edge-1:22 HTTP/1.1\r\nHost: edge-1:22\r\n\r\n",
    )
    .await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    echoes(&mut through).await;
    rules.replace(Some(compiled(&json!([{ "then": "deny" }]))));
    is_reset(&mut bytes).await;
    is_reset(&mut through).await;
    world.until_idle().await;
}

/// A listener that accepts certificates of another CA, and a certificate of that CA.
fn of_another_ca(world: &std::path::Path, ca: &Ca) -> Listener {
    let file = world.join("clients.pem");
    std::fs::write(&file, ca.root_pem()).unwrap();
    Listener {
        client_auth: ClientAuth {
            client_ca: vec![file],
            ..ClientAuth::default()
        },
        ..listener("clients", ListenerProtocol::Https)
    }
}

fn serial(leaf: &LeafCertificate) -> Serial {
    let certificate = Certificate::parse(&leaf.chain()[0]).unwrap();
    Serial::try_from(certificate.serial_hex().to_uppercase()).unwrap()
}

#[tokio::test]
async fn a_revoked_certificate_ends_its_sessions_and_starts_none() {
    let build = World::build();
    let ca = Ca::create(&"others.test".parse().unwrap()).unwrap();
    let listener = of_another_ca(build.folder(), &ca);
    let mut world = build.listener(listener).start().await;
    let app = app().await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let leaves = ["ann", "bob"].map(|name| ca.issue_client(name, &[], LIFE).unwrap());
    let [ann, bob] = [0, 1].map(|index| world.client_at("clients").certificate(&leaves[index]));
    let (mut revoked, mut stays) = (session(&ann, "").await, session(&bob, "").await);
    let mut kept = ann.connect("edge-1").await.unwrap();
    assert_eq!(kept.get(URL).await.unwrap().status, 200);
    let listed = serial(&leaves[0]);
    let changed = world.reload(|config| {
        let listener = config
            .listeners
            .iter_mut()
            .find(|listener| listener.name == "clients");
        listener.unwrap().client_auth.revoked = vec![listed];
    });
    changed.unwrap();
    is_reset(&mut revoked).await;
    let answer = ann.get(URL).await;
    assert_eq!(answer.status, 401);
    assert!(
        answer.text().contains("certificate: revoked"),
        "{}",
        answer.text()
    );
    echoes(&mut stays).await;
    assert_eq!(bob.get(URL).await.status, 200);
    refused(&world, "unauthenticated").await;
    // The listener moves, and accepts certificates of another CA there.
    let next = Ca::create(&"next.test".parse().unwrap()).unwrap();
    std::fs::write(world.folder().join("clients.pem"), next.root_pem()).unwrap();
    let changed = world.reload(|config| {
        let listener = config
            .listeners
            .iter_mut()
            .find(|listener| listener.name == "clients");
        listener.unwrap().listen = "127.0.0.2:0"
            .parse::<std::net::SocketAddr>()
            .unwrap()
            .into();
    });
    assert_eq!(changed.unwrap().listeners.opened, ["clients"]);
    is_reset(&mut stays).await;
}

#[tokio::test]
async fn certificate_expiry_ends_sessions_if_the_listener_says_so() {
    let build = World::build();
    let ca = Ca::create(&"others.test".parse().unwrap()).unwrap();
    let ends = of_another_ca(build.folder(), &ca);
    let keeps = Listener {
        name: "keeps".to_owned(),
        disconnect_expired: false,
        ..ends.clone()
    };
    let world = build.listener(ends).listener(keeps).start().await;
    let app = app().await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let beginning = begin_before_expiry(10, async |seconds| {
        let life = Duration::from_secs(seconds);
        let leaf = ca.issue_client("ann", &[], life).unwrap();
        let [ends, keeps] =
            ["clients", "keeps"].map(|name| world.client_at(name).certificate(&leaf));
        let ended = try_session_at(&ends, "edge-1", "").await?;
        let kept = try_session_at(&keeps, "edge-1", "").await?;
        let mut connection = ends.connect("edge-1").await?;
        let answer = connection.get(URL).await?;
        match answer.status {
            200 => Ok((ended, kept, connection)),
            _ => Err(answer.to_string().into()),
        }
    });
    let (mut ended, mut kept, mut connection) = beginning.await;
    is_reset(&mut ended).await;
    let answer = connection.get(URL).await.unwrap();
    assert_eq!(answer.status, 401, "also on a kept connection");
    assert!(
        answer.text().contains("certificate: expired at"),
        "{}",
        answer.text()
    );
    echoes(&mut kept).await;
    refused(&world, "unauthenticated").await;
}

/// The listener `clients` of this configuration.
fn clients(config: &mut Config) -> &mut Listener {
    let mut listeners = config.listeners.iter_mut();
    listeners
        .find(|listener| listener.name == "clients")
        .unwrap()
}

fn without_clients(config: &mut Config) {
    config
        .listeners
        .retain(|listener| listener.name != "clients");
}

#[tokio::test]
async fn sessions_of_a_removed_listener_are_rechecked_like_others() {
    let rules = PolicyWriter::new(Some(compiled(&json!([{ "then": "allow" }]))));
    let build = World::build().policy(rules.reader());
    let ca = Ca::create(&"others.test".parse().unwrap()).unwrap();
    let listener = of_another_ca(build.folder(), &ca);
    let token = build.token("dan");
    let clients = Listener {
        client_auth: ClientAuth {
            own_ca: true,
            tokens: Some(build.tokens()),
            ..listener.client_auth.clone()
        },
        ..listener.clone()
    };
    // It accepts the same certificates, and stays.
    let beside = Listener {
        name: "beside".to_owned(),
        ..listener
    };
    let mut world = build.listener(clients).listener(beside).start().await;
    let app = app().await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let leaves = ["ann", "bob", "cid"].map(|name| ca.issue_client(name, &[], LIFE).unwrap());
    let at = |leaf: &LeafCertificate| world.client_at("clients").certificate(leaf);
    let mut ann = session(&at(&leaves[0]), "").await;
    let mut bob = session(&at(&leaves[1]), "").await;
    let mut cid = session(&at(&leaves[2]), "").await;
    let mut dan = session(&world.client_at("clients").nobody(), &bearer(&token)).await;
    // The certificate of an unknown CA is ignored beside the token.
    let unknown = Ca::create(&"unknown.test".parse().unwrap()).unwrap();
    let unknown = unknown.issue_client("eve", &[], LIFE).unwrap();
    let mut eve = session(&at(&unknown), &bearer(&token)).await;
    world.reload(without_clients).unwrap();
    echoes(&mut ann).await;
    // Another policy.
    rules.replace(Some(compiled(&json!([
        { "who": { "spiffe": ["spiffe://others.test/client/ann"] }, "then": "deny" },
        { "then": "allow" },
    ]))));
    is_reset(&mut ann).await;
    // A certificate is revoked, but its client is still allowed.
    let listed = serial(&leaves[1]);
    let revoked = world.reload(|config| {
        let beside = config
            .listeners
            .iter_mut()
            .find(|listener| listener.name == "beside");
        beside.unwrap().client_auth.revoked = vec![listed];
    });
    revoked.unwrap();
    is_reset(&mut bob).await;
    // The file has another root, and no token.
    echoes(&mut cid).await;
    echoes(&mut dan).await;
    echoes(&mut eve).await;
    let next = Ca::create(&"next.test".parse().unwrap()).unwrap();
    std::fs::write(world.folder().join("clients.pem"), next.root_pem()).unwrap();
    std::fs::write(world.folder().join("clients"), "# none\n").unwrap();
    world.reload(|_| {}).unwrap();
    is_reset(&mut cid).await;
    is_reset(&mut dan).await;
    is_reset(&mut eve).await;
    world.until_idle().await;
}

#[tokio::test]
async fn a_retired_root_ends_the_sessions_of_a_removed_listener() {
    let build = World::build().listener(listener("clients", ListenerProtocol::Https));
    let mut world = build.start().await;
    let app = app().await;
    let edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let store = world.store();
    let step = |world: &mut World, step: fn(Ca) -> Result<(Ca, RotationStep), CaError>| {
        let changed = store.change_ca(|ca| Ok::<_, StoreError>(step(ca).unwrap()));
        changed.unwrap();
        world.reload(|_| {}).unwrap();
    };
    let believes = |roots: usize| {
        let store = Store::open(edge.folder(), OpenMode::Existing).unwrap();
        store.edge().unwrap().unwrap().roots.len() == roots
    };
    let tunnels = async |world: &World| world.node("edge-1").await["details"].clone();
    step(&mut world, Ca::prepare);
    until("the edge trusts both roots", async || believes(2)).await;
    let before = tunnels(&world).await[0]["id"].clone();
    step(&mut world, Ca::activate);
    until("the edge has connected under the new root", async || {
        let now = tunnels(&world).await;
        now.as_array().is_some_and(|all| all.len() == 1) && now[0]["id"] != before
    })
    .await;
    let by_old = world.client_leaf("eve");
    let mut eve = session(&world.client_at("clients").certificate(&by_old), "").await;
    world.reload(without_clients).unwrap();
    echoes(&mut eve).await;
    step(&mut world, Ca::retire);
    is_reset(&mut eve).await;
    let record = refused(&world, "unauthenticated").await;
    assert_eq!(record["client"], "eve");
}

fn bearer(token: &str) -> String {
    format!("Authorization: Bearer {token}\r\n")
}

#[tokio::test]
async fn a_listener_that_is_back_decides_about_the_sessions_of_before() {
    let build = World::build();
    let ca = Ca::create(&"others.test".parse().unwrap()).unwrap();
    let listener = of_another_ca(build.folder(), &ca);
    let mut world = build.listener(listener.clone()).start().await;
    let app = app().await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let leaf = ca.issue_client("ann", &[], LIFE).unwrap();
    let mut ann = session(&world.client_at("clients").certificate(&leaf), "").await;
    world.reload(without_clients).unwrap();
    world
        .reload(|config| config.listeners.push(listener))
        .unwrap();
    echoes(&mut ann).await;
    let listed = serial(&leaf);
    let revoked = world.reload(|config| clients(config).client_auth.revoked = vec![listed]);
    revoked.unwrap();
    is_reset(&mut ann).await;
    // Removed and revoked elsewhere in one step.
    let other = ca.issue_client("bob", &[], LIFE).unwrap();
    let mut bob = session(&world.client_at("clients").certificate(&other), "").await;
    let revoked = world.reload(|config| {
        let beside = clients(config);
        beside.name = "beside".to_owned();
        beside.listen = "127.0.0.2:0"
            .parse::<std::net::SocketAddr>()
            .unwrap()
            .into();
        beside.client_auth.revoked = vec![serial(&other)];
    });
    assert_eq!(revoked.unwrap().listeners.closed, ["clients"]);
    is_reset(&mut bob).await;
}

#[tokio::test]
async fn sessions_that_were_dialled_from_here_end_with_their_network() {
    let networks = |list: &[&str]| list.iter().map(|net| net.parse().unwrap()).collect();
    let dialling = Listener {
        direct_networks: networks(&["127.0.0.1/32", "127.0.0.2/32"]),
        ..anonymous("connect", ListenerProtocol::Connect)
    };
    let mut world = World::build().listener(dialling).start().await;
    let script = || Script::new().echo();
    let (first, second) = (App::tcp(script()).await, App::tcp(script()).await);
    let connect = async |target: String| {
        let client = world.client_at("connect");
        let mut wire = client.tls_stream(GATEWAY_NAME, &[]).await.unwrap();
        let head = format!("CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n");
        let answer = exchange(&mut wire, head).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        wire
    };
    let mut by_address = connect(first.address().to_string()).await;
    let mut by_name = connect(format!("localhost:{}", second.port())).await;
    let proxy = async |list: &[&str], world: &mut World| {
        let list = networks(list);
        let changed = world.reload(|config| {
            let mut listeners = config.listeners.iter_mut();
            let listener = listeners.find(|listener| listener.name == "connect");
            listener.unwrap().direct_networks = list;
        });
        changed.unwrap();
    };
    proxy(&["127.0.0.1/32"], &mut world).await;
    echoes(&mut by_address).await;
    proxy(&["127.0.0.2/32"], &mut world).await;
    is_reset(&mut by_address).await;
    is_reset(&mut by_name).await;
    let record = refused(&world, "forbidden").await;
    let detail = record["detail"].as_str().unwrap();
    assert!(detail.contains("is no longer in a network"), "{detail}");
    assert_eq!(first.end().await, End::Reset);
    world.until_idle().await;
}

#[tokio::test]
async fn a_node_that_changes_labels_or_pool_loses_denied_streams() {
    let rules = json!([
        { "where": { "labels": { "tier": "gold" } }, "then": "allow" },
        { "where": { "pools": ["north"] }, "then": "allow" },
    ]);
    let rules = PolicyWriter::new(Some(compiled(&rules)));
    let world = World::build().policy(rules.reader()).start().await;
    let app = app().await;
    let port = |node| world.edge(node).port(9100, app.address());
    let _by_label = port("edge-1").label("tier", "gold").join().await;
    let _by_pool = port("edge-2").pool("north").join().await;
    let _stays = port("edge-3").join().await;
    let cluster = |labels: &[(&str, &str)]| {
        let labels = labels.iter();
        let member = ClusterNode {
            is_edge: true,
            labels: labels
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
            ..ClusterNode::default()
        };
        let name = NodeName::parse("edge-3").unwrap();
        world.nodes().replace_cluster([(name, member)].into());
    };
    cluster(&[("tier", "gold")]);
    let mut sessions = Vec::new();
    for node in ["edge-1", "edge-2", "edge-3"] {
        sessions.push(session_at(&world.client(), node, "").await);
    }
    let change = |node: &str, change: &dyn Fn(&mut Node)| {
        let name = NodeName::parse(node).unwrap();
        let mut known = world.nodes().reader().get(&name).unwrap();
        change(&mut known);
        world.nodes().upsert(name, known);
    };
    // No rule reads this field.
    change("edge-2", &|node| {
        node.addresses.push("10.0.0.1".parse().unwrap());
    });
    change("edge-1", &|node| {
        node.labels.insert("tier".into(), "tin".into());
    });
    is_reset(&mut sessions[0]).await;
    change("edge-2", &|node| node.pool = Some("south".into()));
    is_reset(&mut sessions[1]).await;
    // As the cluster reports it.
    echoes(&mut sessions[2]).await;
    cluster(&[]);
    is_reset(&mut sessions[2]).await;
    refused(&world, "forbidden").await;
    world.until_idle().await;
}

/// A listener for JWTs of this issuer.
fn jwts(jwt: Jwt, disconnect_expired: bool) -> Listener {
    Listener {
        disconnect_expired,
        client_auth: ClientAuth {
            own_ca: false,
            jwt: vec![jwt],
            ..ClientAuth::default()
        },
        ..listener("clients", ListenerProtocol::Https)
    }
}

async fn jwt_session(world: &World, token: &str) -> impl Wire + use<> {
    session(&world.client_at("clients").nobody(), &bearer(token)).await
}

#[tokio::test]
async fn jwt_sessions_go_on_without_keys_and_are_rechecked_with_them() {
    let [first, second] = ["first", "second"].map(Key::new);
    let here = Issuer::start(&first);
    let build = World::build();
    let rules = PolicyWriter::new(Some(compiled(&json!([{ "then": "allow" }]))));
    let build = build.policy(rules.reader());
    let before = here.jwt(&build.folder().join("before"));
    let mut world = build.listener(jwts(before, true)).start().await;
    let app = app().await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let token = first.sign(&claims(&json!({})));
    let mut wire = jwt_session(&world, &token).await;
    let bob = first.sign(&claims(&json!({ "sub": "bob" })));
    let mut denied = jwt_session(&world, &bob).await;
    let mut beside = session(&world.client(), "").await;
    // The URL of its keys has changed, and does not work.
    let mut away = Issuer::silent(&second);
    let elsewhere = away.jwt(&world.folder().join("elsewhere"));
    let moved = world.reload(|config| clients(config).client_auth.jwt = vec![elsewhere]);
    moved.unwrap();
    let answer = world
        .client_at("clients")
        .only_bearer(&token)
        .get(URL)
        .await;
    assert_problem(
        &answer,
        503,
        "dependency_unavailable",
        "jwt: the keys of its issuer have not been loaded yet",
    );
    // In the same round the gateway ends unknown clients, and known clients that are no longer allowed.
    rules.replace(Some(compiled(&json!([
        { "who": { "users": ["tester", "bob"] }, "then": "deny" },
        { "then": "allow" },
    ]))));
    is_reset(&mut beside).await;
    is_reset(&mut denied).await;
    echoes(&mut wire).await;
    away.answer();
    is_reset(&mut wire).await;
    let record = refused(&world, "unauthenticated").await;
    let detail = record["detail"].as_str().unwrap();
    assert!(
        detail.contains("jwt: its issuer has no key with this id"),
        "{detail}"
    );
}

#[tokio::test]
async fn jwt_expiry_ends_sessions_only_if_the_listener_says_so() {
    let rules = PolicyWriter::new(Some(compiled(&json!([{ "then": "allow" }]))));
    let key = Key::new("key");
    let issuer = Issuer::start(&key);
    let build = World::build().policy(rules.reader());
    let jwt = issuer.jwt(build.folder());
    let mut world = build.listener(jwts(jwt, false)).start().await;
    let app = app().await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let beginning = begin_before_expiry(8, async |seconds| {
        // A minute beyond its end is allowed for different clocks.
        let end = now() + seconds - 60;
        let sign = |name: &str| key.sign(&claims(&json!({ "sub": name, "exp": end })));
        let [ann, bob] = ["ann", "bob"].map(sign);
        let client = world.client_at("clients").nobody();
        let ann_wire = try_session_at(&client, "edge-1", &bearer(&ann)).await?;
        let bob_wire = try_session_at(&client, "edge-1", &bearer(&bob)).await?;
        Ok((bob, ann_wire, bob_wire))
    });
    let (bob, mut ann_wire, mut bob_wire) = beginning.await;
    until("both have expired", async || {
        world
            .client_at("clients")
            .only_bearer(&bob)
            .get(URL)
            .await
            .status
            == 401
    })
    .await;
    rules.replace(Some(compiled(&json!([
        { "who": { "users": ["ann"] }, "then": "deny" },
        { "then": "allow" },
    ]))));
    is_reset(&mut ann_wire).await;
    echoes(&mut bob_wire).await;
    world
        .reload(|config| clients(config).forward_authorization = true)
        .unwrap();
    rules.replace(Some(compiled(&json!([{ "then": "allow" }]))));
    let cid = key.sign(&claims(&json!({ "sub": "cid" })));
    let mut checked = jwt_session(&world, &cid).await;
    rules.replace(Some(compiled(&json!([
        { "who": { "users": ["cid"] }, "then": "deny" },
        { "then": "allow" },
    ]))));
    is_reset(&mut checked).await;
    echoes(&mut bob_wire).await;
    // Its issuer is no longer configured.
    let other = Jwt {
        issuer: "https://other.test".to_owned(),
        ..issuer.jwt(world.folder())
    };
    world
        .reload(|config| clients(config).client_auth.jwt = vec![other])
        .unwrap();
    is_reset(&mut bob_wire).await;
}

/// Allows at first. The second time it waits for the gate before it allows, and later it denies.
#[derive(Debug, Default)]
struct Slow {
    changes: AtomicU64,
    /// Number of reads of the change counter: one in each round of checks.
    rounds: AtomicU64,
    waiting: AtomicU64,
    gate: Arc<Notify>,
}

#[derive(Debug)]
struct SlowReviewer(Arc<Slow>);

impl Authorize for SlowReviewer {
    fn authorize(&self, _: &AuthzRequest<'_>) -> AuthzDecision {
        match self.0.changes.load(SeqCst) {
            0 => AuthzDecision::Allow,
            1 => {
                self.0.waiting.fetch_add(1, SeqCst);
                let gate = self.0.gate.clone();
                AuthzDecision::Pending(Box::pin(async move {
                    gate.notified().await;
                    Ok(())
                }))
            }
            _ => AuthzDecision::Deny("not any more".into()),
        }
    }

    fn generation(&self) -> u64 {
        self.0.rounds.fetch_add(1, SeqCst);
        self.0.changes.load(SeqCst)
    }
}

#[tokio::test]
async fn a_change_while_a_stream_is_checked_has_it_checked_once_more() {
    let slow = Arc::new(Slow::default());
    let build = World::build().authorizer(SlowReviewer(slow.clone()));
    let build = build.config(|config| config.timeouts.authorize = PATIENCE * 2);
    let world = build.start().await;
    let app = app().await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let mut wire = session(&world.client(), "").await;
    slow.changes.store(1, SeqCst);
    until("it is being checked", async || {
        slow.waiting.load(SeqCst) == 1
    })
    .await;
    slow.changes.store(2, SeqCst);
    let before = slow.rounds.load(SeqCst);
    until("a round of checks is over", async || {
        slow.rounds.load(SeqCst) > before + 1
    })
    .await;
    slow.gate.notify_one();
    is_reset(&mut wire).await;
    refused(&world, "forbidden").await;
}

#[tokio::test]
async fn an_edge_with_fewer_allowed_ports_ends_those_streams() {
    let build = World::build().listener(listener("connect", ListenerProtocol::Connect));
    let world = build.start().await;
    let (app, silent) = (app().await, App::http(|_| answer::silence()).await);
    let bytes = App::tcp(Script::new().echo()).await;
    let edge = world.edge("edge-1").port(9100, app.address());
    let edge = edge.port(9101, silent.address());
    let mut edge = edge.port(22, bytes.address()).join().await;
    let client = world.client();
    let mut upgraded = session(&client, "").await;
    let mut http2 = client.clone().http2().connect("edge-1").await.unwrap();
    let request = hyper::Request::get("https://edge-1:9100/endless");
    let request = request.body(crate::world::client::whole("")).unwrap();
    let download = http2.open(request).await.unwrap().into_body();
    let mut through = world
        .client_at("connect")
        .tls_stream("edge-1", &[])
        .await
        .unwrap();
    let connect = "CONNECT edge-1:22 HTTP/1.1\r\nHost: edge-1:22\r\n\r\n";
    let head = exchange(&mut through, connect).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let mut unanswered = tokio::task::JoinSet::new();
    unanswered.spawn(async move { client.get("https://edge-1:9101/").await });
    silent.head().await;
    // Only upgrades.
    edge.reload(|config| config.allow.upgrades = false);
    is_reset(&mut upgraded).await;
    assert_eq!(app.end().await, End::Reset);
    let record = refused(&world, "edge_policy").await;
    let detail = record["detail"].as_str().unwrap();
    assert!(
        detail.contains("the policy of edge-1 was changed"),
        "{detail}"
    );
    echoes(&mut through).await;
    // One port.
    edge.reload(|config| drop(config.ports.remove(&22)));
    is_reset(&mut through).await;
    assert_eq!(bytes.end().await, End::Reset);
    // Place of the other data directories.
    edge.reload(|config| config.allow.hosts = vec!["10.0.0.0/8".parse().unwrap()]);
    let cut = http_body_util::BodyExt::collect(download).await;
    assert!(cut.is_err());
    let answer = unanswered.join_next().await.unwrap().unwrap();
    assert_problem(&answer, 403, "edge_policy", "does not allow");
    world.until_idle().await;
}
