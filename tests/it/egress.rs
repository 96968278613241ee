//! Egress: connections that nodes open to the cloud and to other nodes.

mod other_gateways;
mod otlp;
mod resets;
mod stalled;

use crate::world::{
    World, admin,
    app::{App, Script, answer},
    authority::Authority,
    client::{Client, ListenerAddress, exchange, read},
    edge::Edge,
    gateway::{fixed, loopback},
    process::{GatewayProcess, OPEN, Process, causeway},
    tool::{Tool, need},
    transfer::TransferServer,
    until,
};
use causeway_edge::config::{Egress, EgressListener, EgressProxy, Protocol};
use causeway_gateway::{
    config::{Listener, ListenerProtocol},
    state::PolicyWriter,
};
use serde_json::{Value, json};
use std::{fs, io, net::SocketAddr, path::Path, time::Duration};
use test_summary::unused_port;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// Starts a gateway with these rules.
async fn world(egress: Value) -> World {
    let build = World::build().config(|config| {
        config.egress = Some(serde_json::from_value(egress).unwrap());
    });
    build.start().await
}

/// Rules that allow every node to connect to this address, by the name `app`.
fn app_only(address: SocketAddr) -> Value {
    json!({
        "destinations": { "app": address.to_string() },
        "rules": [{ "name": "app", "to": { "destinations": ["app"] } }],
    })
}

/// Joins a node with a proxy and a listener for each destination.
async fn join(world: &World, node: &str, destinations: &[&str]) -> Edge {
    let listener = |to: &&str| EgressListener {
        listen: loopback(),
        to: (*to).to_owned(),
    };
    let egress = Egress {
        listeners: destinations.iter().map(listener).collect(),
        proxy: Some(EgressProxy { listen: loopback() }),
        ..Egress::default()
    };
    let edge = world.edge(node).config(|config| {
        config.egress = Some(egress);
        // Longer than any test waits.
        config.timeouts.drain = Duration::from_mins(10);
    });
    let edge = edge.join().await;
    until("the listeners are open", async || {
        listeners(&edge).len() == destinations.len() + 1
    })
    .await;
    edge
}

fn listeners(edge: &Edge) -> Vec<(Option<String>, SocketAddr)> {
    let status = edge.status().egress.unwrap();
    let all = status.listeners.into_iter();
    all.map(|listener| (listener.to, listener.listen)).collect()
}

/// Connects to the listener for this destination, or to the proxy.
async fn connect(edge: &Edge, to: Option<&str>) -> TcpStream {
    try_connect(edge, to).await.unwrap()
}

async fn try_connect(edge: &Edge, to: Option<&str>) -> io::Result<TcpStream> {
    let mut all = listeners(edge).into_iter();
    let found = all.find(|(found, _)| found.as_deref() == to);
    TcpStream::connect(found.unwrap().1).await
}

/// Asserts that the listener resets a new connection, perhaps even before this end has seen it open.
async fn assert_no_place(edge: &Edge, to: Option<&str>) {
    match try_connect(edge, to).await {
        Ok(wire) => assert_reset(wire).await,
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
    }
}

/// Asks the proxy for a connection by HTTP. Returns the head of its answer.
async fn proxied(edge: &Edge, target: &str) -> (TcpStream, String) {
    ask(connect(edge, None).await, target).await
}

/// Asks the proxy at the other end of this connection, as [`proxied`] does.
async fn ask(mut wire: TcpStream, target: &str) -> (TcpStream, String) {
    let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n");
    let head = exchange(&mut wire, request).await;
    (wire, head)
}

/// Returns the status of the proxy's answer, and its body if the connection was refused.
async fn refused(edge: &Edge, target: &str) -> (u16, String) {
    refused_at(connect(edge, None).await, target).await
}

/// Asks the proxy at the other end of this connection, as [`refused`] does.
async fn refused_at(wire: TcpStream, target: &str) -> (u16, String) {
    let (mut wire, head) = ask(wire, target).await;
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let mut body = String::new();
    if status != 200 {
        wire.read_to_string(&mut body).await.unwrap();
    }
    (status, body)
}

/// Asks the proxy for a connection to a domain by SOCKS5. Returns the code of its reply.
async fn by_socks(edge: &Edge, domain: &str, port: u16) -> (TcpStream, u8) {
    let mut wire = connect(edge, None).await;
    wire.write_all(&[5, 1, 0]).await.unwrap();
    assert_eq!(read(&mut wire, 2).await, [5, 0]);
    let length = u8::try_from(domain.len()).unwrap();
    let mut request = vec![5, 1, 0, 3, length];
    request.extend_from_slice(domain.as_bytes());
    request.extend_from_slice(&port.to_be_bytes());
    wire.write_all(&request).await.unwrap();
    let reply = read(&mut wire, 10).await;
    (wire, reply[1])
}

/// Waits until the connection ends, and asserts that it ends with a reset.
async fn assert_reset(mut wire: TcpStream) {
    let mut chunk = vec![0; 64 << 10];
    loop {
        match wire.read(&mut chunk).await {
            Ok(0) => panic!("a clean end"),
            Ok(_) => {}
            Err(error) => return assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
        }
    }
}

async fn assert_echo(wire: &mut TcpStream) {
    wire.write_all(b"there").await.unwrap();
    let mut answer = [0; 5];
    wire.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"there");
}

#[tokio::test]
async fn a_node_moves_a_large_transfer_each_way() {
    let server = TransferServer::start().await;
    let (length, address) = (server.length, server.address);
    let world = world(app_only(address)).await;
    let edge = join(&world, "edge-1", &["app"]).await;
    let wire = connect(&edge, Some("app:443")).await;
    let audit = || world.log().audit();
    until("the audit log has the begin", async || !audit().is_empty()).await;
    let at_egress = [("listener", "egress")];
    let metrics = world.metrics().await;
    assert_eq!(metrics.sum("open_streams", &at_egress), 1);
    assert_eq!(metrics.sum("streams_total", &at_egress), 0);
    server.transfer(wire).await;
    until("the record is written", async || {
        !world.log().records().is_empty()
    })
    .await;
    let events: Vec<_> = audit().iter().map(|line| line["event"].clone()).collect();
    assert_eq!(events, ["opened", "closed"]);
    let begin = &audit()[0];
    assert_eq!((&begin["up"], &begin["down"]), (&json!(0), &json!(0)));
    let end = audit().remove(1);
    assert_eq!(begin["trace"], end["trace"]);
    let record = &world.log().records()[0];
    for (key, value) in [("up", json!(length)), ("down", json!(length))] {
        assert_eq!(record[key], value, "{record}");
        assert_eq!(end[key], value, "{end}");
    }
    for (key, value) in [
        ("listener", json!("egress")),
        ("client", json!("spiffe://world.test/edge/edge-1")),
        ("by", json!("certificate")),
        ("path", json!("app:443")),
        ("rule", json!("app")),
        ("address", json!(address.to_string())),
        ("status", json!(200)),
    ] {
        for line in [record, begin, &end] {
            assert_eq!(line[key], value, "{line}");
        }
    }
    let metrics = world.metrics().await;
    assert_eq!(metrics.sum("open_streams", &at_egress), 0);
    assert_eq!(metrics.sum("streams_total", &at_egress), 1);
    assert_eq!(metrics.outcomes("egress", "ok"), 1);
    let bytes = metrics.sum("stream_bytes_total", &at_egress);
    assert_eq!(bytes, 2 * u64::try_from(length).unwrap());
}

#[tokio::test]
async fn bytes_after_a_half_close_arrive() {
    let app = App::tcp(Script::new().read_to_end().write("after the end").close()).await;
    let world = world(app_only(app.address())).await;
    let edge = join(&world, "edge-1", &["app"]).await;
    let mut wire = connect(&edge, Some("app:443")).await;
    wire.write_all(b"question").await.unwrap();
    wire.shutdown().await.unwrap();
    let mut answer = String::new();
    wire.read_to_string(&mut answer).await.unwrap();
    assert_eq!(answer, "after the end");
    assert_eq!(app.body().await, b"question");
}

#[tokio::test]
async fn an_abort_of_the_destination_is_a_reset_at_the_node() {
    let app = App::tcp(Script::new().write("a part").reset()).await;
    let world = world(app_only(app.address())).await;
    let edge = join(&world, "edge-1", &["app"]).await;
    assert_reset(connect(&edge, Some("app:443")).await).await;
}

#[tokio::test]
async fn everything_is_denied_without_rules() {
    let app = App::tcp(Script::new().echo()).await;
    let address = app.address().to_string();
    let world = World::start().await;
    let edge = join(&world, "edge-1", &[&address]).await;
    let wire = connect(&edge, Some(&address)).await;
    assert_reset(wire).await;
    let (status, body) = refused(&edge, &address).await;
    assert_eq!(status, 403, "{body}");
    assert!(
        body.contains("no rule of the gateway (egress.rules) allows edge-1"),
        "{body}"
    );
    let trouble = edge.status().egress.unwrap().trouble.unwrap();
    assert!(
        trouble.what.contains("no rule of the gateway"),
        "{}",
        trouble.what
    );
    assert_eq!(app.connections(), 0);
    until(
        "both refusals are in the access log and the audit log",
        async || {
            let records = world.log().records().into_iter();
            let denied = records.filter(|record| record["reason"] == "forbidden");
            let text = world.log().text();
            denied.count() == 2 && text.matches(r#""event":"refused""#).count() == 2
        },
    )
    .await;
    assert_eq!(world.metrics().await.outcomes("egress", "forbidden"), 2);
}

/// Names may resolve to any address, and texts that are no addresses here may be addresses for a resolver.
#[tokio::test]
async fn the_gateways_machine_and_metadata_are_never_reached_by_wide_rules() {
    let app = App::tcp(Script::new().echo()).await;
    let port = app.port();
    let world = world(json!({
        "rules": [{ "to": { "names": ["*"], "networks": ["0.0.0.0/0", "::/0"] } }],
    }))
    .await;
    let edge = join(&world, "edge-1", &[]).await;
    for host in [
        "127.0.0.1",
        "127.1.2.3",
        "localhost",
        "LOCALHOST.",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "2130706433",
        "0x7f000001",
        "127.1",
        "0",
        "0.0.0.0",
        "[::]",
        "169.254.169.254",
        "[::ffff:169.254.169.254]",
        "[fd00:ec2::254]",
    ] {
        let (status, body) = refused(&edge, &format!("{host}:{port}")).await;
        assert!(
            status == 403 || body.contains("cannot resolve"),
            "{host}: {status} {body}"
        );
    }
    assert_eq!(app.connections(), 0);
}

#[tokio::test]
async fn the_proxy_reaches_what_a_rule_lists_by_http_and_socks5() {
    let (app, other) = (
        App::tcp(Script::new().echo()).await,
        App::tcp(Script::new().echo()).await,
    );
    let world = world(json!({
        "rules": [{ "to": { "networks": ["127.0.0.1"], "ports": [app.port()] } }],
    }))
    .await;
    let edge = join(&world, "edge-1", &[]).await;
    let by_name = format!("localhost:{}", app.port());
    let (mut wire, head) = proxied(&edge, &by_name).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert_echo(&mut wire).await;
    assert_eq!(refused(&edge, &other.address().to_string()).await.0, 403);
    assert_eq!(refused(&edge, "example.invalid:443").await.0, 403);
    assert_eq!(other.connections(), 0);

    let (mut wire, reply) = by_socks(&edge, "localhost", app.port()).await;
    assert_eq!(reply, 0);
    assert_echo(&mut wire).await;
    let longest = "a".repeat(255);
    let (_, reply) = by_socks(&edge, &longest, app.port()).await;
    assert_ne!(reply, 0, "a domain of 255 bytes");
    let (mut wire, reply) = by_socks(&edge, "127.0.0.1", app.port()).await;
    assert_eq!(reply, 0, "the edge and the gateway still serve");
    assert_echo(&mut wire).await;
}

/// The page about egress: it prints a command of curl, and the setting of containerd, which uses CONNECT as curl does.
const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/howto/edge-to-cloud.md");

/// Returns the code in the page's text that begins with `start`, with the address of this proxy.
fn printed(start: &str, proxy: SocketAddr) -> String {
    let page = fs::read_to_string(PAGE).unwrap();
    let code = page.split('`').skip(1).step_by(2);
    let mut found = code.filter(|code| code.starts_with(start));
    let (one, more) = (found.next().unwrap(), found.next());
    assert_eq!(more, None);
    assert!(one.contains("127.0.0.1:1080"), "{one}");
    one.replace("127.0.0.1:1080", &proxy.to_string())
}

#[tokio::test]
async fn curl_uses_the_proxy_by_the_commands_of_the_page() {
    need!("curl");
    let name = "registry.example.com";
    let authority = Authority::new();
    let tls = authority.serve(&authority.app(&[name]), false);
    let app = App::https(tls, |_| answer::ok("an image")).await;
    let world = world(json!({
        "destinations": { name: app.address().to_string() },
        "rules": [{ "to": { "destinations": [name] } }],
    }))
    .await;
    let edge = join(&world, "edge-1", &[]).await;
    let proxy = listeners(&edge)[0].1;
    let ca = world.write(authority.pem());
    let curl = || Tool::curl().args([Path::new("--cacert"), &ca]);

    let command = printed("curl --proxy socks5h://", proxy);
    let mut words = command.split(' ');
    assert_eq!(words.next(), Some("curl"));
    let socks: Vec<_> = words.collect();
    let url = *socks.last().unwrap();
    assert_eq!(url, "https://registry.example.com");
    let by_socks = curl().args(&socks).run().await.ok();
    assert_eq!(by_socks.text(), "an image");

    let setting = printed("HTTPS_PROXY=", proxy);
    let (variable, address) = setting.split_once('=').unwrap();
    assert!(address.starts_with("http://"), "{address}");
    let by_variable = curl().env(variable, address).args([url]);
    assert_eq!(by_variable.run().await.ok().text(), "an image");
    let connect = ["--proxy", address, "-w", " %{http_connect}"];
    let by_connect = curl().args(connect).args([url]).run().await.ok();
    assert_eq!(by_connect.text(), "an image 200");
    assert_eq!(app.requests(), 3);

    // Exit codes of curl: a proxy whose protocol reports an error, and a proxy that refuses a CONNECT.
    let denied = "https://example.invalid";
    let by_socks = curl().args(&socks[..socks.len() - 1]).args([denied]);
    let by_socks = by_socks.run().await;
    assert_eq!(by_socks.status.code(), Some(97), "{by_socks:?}");
    let by_connect = curl().args(connect).args([denied]).run().await;
    assert_eq!(by_connect.status.code(), Some(56), "{by_connect:?}");
    assert_eq!(by_connect.text(), " 403", "{by_connect:?}");
}

/// `curl --proxy http://…` for a URL with `http://` sends no CONNECT.
#[tokio::test]
async fn the_proxy_forwards_plain_requests_that_a_rule_allows() {
    need!("curl");
    let name = "collector.example.com";
    let app = App::http(|head| match head.path().as_str() {
        "/cut" => answer::close_in_mid_body(),
        "/mirror" => answer::mirror(),
        _ => answer::ok("metrics"),
    })
    .await;
    let other = App::saying("secret").await;
    let closed = App::refusing();
    let world = world(json!({
        "destinations": { name: app.address().to_string(), "closed": closed.address().to_string() },
        "rules": [{ "to": { "destinations": [name, "closed"] } }],
    }))
    .await;
    let edge = join(&world, "edge-1", &[]).await;
    let proxy = listeners(&edge)[0].1;
    let command = printed("curl --proxy http://", proxy);
    let words: Vec<_> = command.split(' ').skip(1).collect();
    let (url, arguments) = words.split_last().unwrap();
    assert_eq!(*url, "http://collector.example.com/");
    let curl = |url: &str| {
        let curl = Tool::curl().args(arguments).args(["-w", " %{http_code}"]);
        curl.args([url])
    };
    assert_eq!(curl(url).run().await.ok().text(), "metrics 200");
    let upload = curl(&format!("{url}mirror")).args(["-d", "a sample"]);
    assert_eq!(upload.run().await.ok().text(), "a sample 200");
    let cut = curl(&format!("{url}cut")).run().await;
    // curl's codes of a transfer that broke off: by its end, or by a reset.
    assert!(matches!(cut.status.code(), Some(18 | 56)), "{cut:?}");

    for (url, status, reason) in [
        (format!("http://{}/", other.address()), "403", "no rule"),
        ("http://closed/".to_owned(), "502", "could not dial"),
    ] {
        let refused = curl(&url).run().await.ok().text();
        let is_refused = refused.ends_with(status) && refused.contains(reason);
        assert!(is_refused, "{url}: {refused}");
    }
    assert_eq!(other.connections(), 0);
    // The URL decides, and not `Host`.
    let mut wire = connect(&edge, None).await;
    let host = other.address();
    let head = format!("GET {url}last HTTP/1.1\r\nHost: {host}\r\n\r\n");
    wire.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    wire.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    until_outcomes(
        &edge,
        &[("done", 3), ("reset", 1), ("denied", 1), ("failed", 1)],
    )
    .await;
}

/// Waits until the edge has counted these ends of connections.
async fn until_outcomes(edge: &Edge, counts: &[(&str, usize)]) {
    let address = edge.admin().to_string();
    until("all connections have ended", async || {
        let text = admin::get(&address, "/metrics").await;
        counts.iter().all(|(outcome, count)| {
            let line = format!("egress_connections_total{{outcome=\"{outcome}\"}} {count}\n");
            text.contains(&line)
        })
    })
    .await;
}

#[tokio::test]
async fn a_failed_dial_reports_its_reason_to_the_program() {
    let closed = App::refusing();
    let world = world(json!({ "rules": [{ "to": { "networks": ["127.0.0.1"] } }] })).await;
    let edge = join(&world, "edge-1", &[]).await;
    let (status, body) = refused(&edge, &closed.address().to_string()).await;
    assert_eq!(status, 502);
    assert!(body.contains("could not dial"), "{body}");
}

#[tokio::test]
async fn a_node_reaches_another_node_only_by_a_rule_and_the_policy() {
    let app = App::tcp(Script::new().echo()).await;
    let policy = |spiffe: &str| {
        let rules = json!({ "rules": [{ "who": { "spiffe": [spiffe] }, "then": "allow" }] });
        let rules: causeway_gateway::config::policy::Policy =
            serde_json::from_value(rules).unwrap();
        Some(causeway_gateway::state::Policy::compile(&rules).unwrap())
    };
    let writer = PolicyWriter::new(policy("spiffe://world.test/edge/edge-1"));
    let rules = json!({
        "rules": [{ "who": { "nodes": ["edge-1", "edge-3"] }, "to": { "nodes": ["edge-2"], "ports": [9100] } }],
    });
    let build = World::build().policy(writer.reader()).config(|config| {
        config.egress = Some(serde_json::from_value(rules).unwrap());
    });
    let world = build.start().await;
    let destination = world.edge("edge-2");
    let destination = destination.port_as(9100, Protocol::Tcp, app.address());
    let destination = destination.port_as(9200, Protocol::Tcp, app.address());
    let _destination = destination.join().await;
    let edge = join(&world, "edge-1", &["edge-2:9100"]).await;
    let mut wire = connect(&edge, Some("edge-2:9100")).await;
    assert_echo(&mut wire).await;

    assert_eq!(refused(&edge, "edge-2:9200").await.0, 403, "another port");
    assert_eq!(refused(&edge, "edge-1:9100").await.0, 403, "another node");
    // A rule allows this node, and the policy does not.
    let third = join(&world, "edge-3", &[]).await;
    let (status, body) = refused(&third, "edge-2:9100").await;
    assert!(
        status == 403 && body.contains("the policy does not allow"),
        "{body}"
    );
    // No rule allows this node.
    let fourth = join(&world, "edge-4", &[]).await;
    let (status, body) = refused(&fourth, "edge-2:9100").await;
    assert!(
        status == 403 && body.contains("no rule of the gateway"),
        "{body}"
    );
    assert_eq!(app.connections(), 1);

    let (wire, head) = proxied(&edge, "edge-2:9100").await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    writer.replace(policy("spiffe://world.test/edge/nobody"));
    assert_reset(wire).await;
}

#[tokio::test]
async fn open_connections_end_when_the_rules_or_the_node_are_withdrawn() {
    let app = App::tcp(Script::new().echo()).await;
    let mut world = world(app_only(app.address())).await;
    let (edge, other) = (
        join(&world, "edge-1", &["app"]).await,
        join(&world, "edge-2", &["app"]).await,
    );
    let mut revoked = connect(&edge, Some("app:443")).await;
    assert_echo(&mut revoked).await;
    let mut kept = connect(&other, Some("app:443")).await;
    assert_echo(&mut kept).await;
    let revoke = |config: &mut causeway_gateway::Config| {
        config.tunnel.revoked = vec!["edge-1".to_owned()];
    };
    world.reload(revoke).unwrap();
    assert_reset(revoked).await;
    assert_echo(&mut kept).await;
    let refused = connect(&edge, Some("app:443"));
    assert_reset(refused.await).await;
    world.reload(|config| config.egress = None).unwrap();
    assert_reset(kept).await;
}

#[tokio::test]
async fn a_killed_gateway_is_a_reset_and_the_next_connection_works() {
    let app = App::tcp(Script::new().forever("still here ")).await;
    let mut world = world(app_only(app.address())).await;
    let edge = join(&world, "edge-1", &["app"]).await;
    let mut wire = connect(&edge, Some("app:443")).await;
    let mut first = [0; 11];
    wire.read_exact(&mut first).await.unwrap();
    world.kill_gateway().await;
    assert_reset(wire).await;
    world.start_gateway().await;
    let mut wire = connect(&edge, Some("app:443")).await;
    wire.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"still here ");
}

#[tokio::test]
async fn a_drain_waits_for_open_connections_and_serves_new_ones_meanwhile() {
    let app = App::tcp(Script::new().echo()).await;
    let build = World::build().config(|config| {
        config.egress = Some(serde_json::from_value(app_only(app.address())).unwrap());
        config.timeouts.drain = Duration::from_mins(10);
    });
    let mut world = build.start().await;
    let edge = join(&world, "edge-1", &["app"]).await;
    let mut first = connect(&edge, Some("app:443")).await;
    assert_echo(&mut first).await;
    world.drain_gateway();
    until("it drains", async || {
        world.metrics().await.sum("draining", &[]) == 1
    })
    .await;
    let mut second = connect(&edge, Some("app:443")).await;
    assert_echo(&mut second).await;
    assert_echo(&mut first).await;
    drop((first, second));
    world.stop_gateway().await;
    let records = world.log().records().into_iter();
    let drained = records.filter(|record| record["reason"] == "draining");
    assert_eq!(drained.count(), 0);
}

#[tokio::test]
async fn a_node_has_a_limit_of_connections() {
    let app = App::tcp(Script::new().echo()).await;
    let mut egress = app_only(app.address());
    egress["limits"] = json!({ "connections": 1 });
    let world = world(egress).await;
    let edge = join(&world, "edge-1", &["app"]).await;
    let in_status = async || world.node("edge-1").await["egress_connections"].clone();
    assert_eq!(in_status().await, Value::Null);
    let mut first = connect(&edge, Some("app:443")).await;
    assert_echo(&mut first).await;
    assert_eq!(in_status().await, 1);
    let (status, body) = refused(&edge, "app:443").await;
    assert_eq!(status, 502, "{body}");
    assert!(
        body.contains("limit of 1 open connections (egress.limits.connections)"),
        "{body}"
    );
    let other = join(&world, "edge-2", &["app"]).await;
    assert_echo(&mut connect(&other, Some("app:443")).await).await;
    drop(first);
    until("the connection is over", async || in_status().await == 0).await;
    assert_eq!(refused(&edge, "app:443").await.0, 200);
}

#[tokio::test]
async fn a_refused_edge_backs_off_and_its_programs_get_the_reason() {
    let app = App::tcp(Script::new().echo()).await;
    let mut world = world(app_only(app.address())).await;
    let edge = join(&world, "edge-1", &["app"]).await;
    let revoke = |config: &mut causeway_gateway::Config| {
        config.tunnel.revoked = vec!["edge-1".to_owned()];
    };
    world.reload(revoke).unwrap();
    let (status, body) = refused(&edge, "app:443").await;
    assert_eq!(status, 502, "{body}");
    assert!(body.contains("revoked"), "{body}");
    // Delays of 0.125 s and more that double allow 7 attempts within the 10 s for which a program waits.
    let text = world.log().text();
    let refusals = text.matches("refused a connection to the tunnel port");
    let attempts = refusals.count();
    assert!((1..=8).contains(&attempts), "{attempts} attempts: {text}");
}

#[tokio::test]
async fn idle_connections_to_the_proxy_leave_the_other_listeners_their_share() {
    let app = App::tcp(Script::new().echo()).await;
    let world = world(app_only(app.address())).await;
    let egress = Egress {
        listeners: vec![EgressListener {
            listen: loopback(),
            to: "app".to_owned(),
        }],
        proxy: Some(EgressProxy { listen: loopback() }),
        max_connections: 2,
    };
    let edge = world.edge("edge-1");
    let edge = edge.config(|config| config.egress = Some(egress));
    let edge = edge.join().await;
    until("the listeners are open", async || {
        listeners(&edge).len() == 2
    })
    .await;
    let _idle = connect(&edge, None).await;
    assert_no_place(&edge, None).await;
    let mut wire = connect(&edge, Some("app:443")).await;
    assert_echo(&mut wire).await;
    assert_no_place(&edge, Some("app:443")).await;
}

#[tokio::test]
async fn an_aborted_connection_frees_its_place_before_a_gateway_answers() {
    let app = App::tcp(Script::new().echo()).await;
    let mut world = world(app_only(app.address())).await;
    let edge = join(&world, "edge-1", &["app"]).await;
    world.kill_gateway().await;
    let url = format!("http://{}/metrics", edge.admin());
    let client = Client::new(
        ListenerAddress::Plain(edge.admin()),
        world.ca().root(),
        world.log(),
    );
    let has = async |sample: &str| client.get(&url).await.text().contains(sample);
    for (to, aborted) in [(Some("app:443"), 1), (None, 2)] {
        let mut wire = connect(&edge, to).await;
        if to.is_none() {
            let head = b"CONNECT app:443 HTTP/1.1\r\nHost: app:443\r\n\r\n";
            wire.write_all(head).await.unwrap();
        }
        until("the edge serves the program", async || {
            has("egress_open_connections 1").await
        })
        .await;
        let aborted = format!("egress_connections_total{{outcome=\"aborted\"}} {aborted}");
        assert!(!has(&aborted).await);
        wire.set_zero_linger().unwrap();
        drop(wire);
        until("the connection is counted as aborted", async || {
            has(&aborted).await
        })
        .await;
    }
}

#[tokio::test]
async fn a_stopping_edge_does_not_wait_for_connections_that_last() {
    let app = App::tcp(Script::new().echo()).await;
    let world = world(app_only(app.address())).await;
    let mut edge = join(&world, "edge-1", &["app"]).await;
    let listen = listeners(&edge)[0].1;
    let mut wire = connect(&edge, Some("app:443")).await;
    assert_echo(&mut wire).await;
    edge.drain();
    until("the listener is closed", async || {
        TcpStream::connect(listen).await.is_err()
    })
    .await;
    edge.stop().await;
    let error = wire.read(&mut [0]).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
}

/// Starts the edge of edge-1, which has joined, at one of these gateways. Returns the address of its listener for `app` as well.
async fn edge_process(site: &GatewayProcess, gateways: &str) -> (Process, String) {
    let listen = format!("127.0.0.1:{}", unused_port());
    let listener = json!({ "listeners": [{ "listen": listen, "to": "app" }] });
    let mut edge = causeway("edge --admin-listen 127.0.0.1:0 --tunnels-gateways one")
        .flag("--gateways", gateways)
        .flag("--data-dir", site.edge_data("edge-1"))
        .flag("--egress", listener.to_string())
        .start();
    edge.wait_for_line("tunnel registered").await;
    edge.wait_for_line("egress listener is open").await;
    (edge, listen)
}

/// Whether a new connection is served.
async fn is_served(listen: &str) -> bool {
    let mut answer = [0; 5];
    let exchange = async {
        let mut wire = TcpStream::connect(listen).await?;
        wire.write_all(b"there").await?;
        wire.read_exact(&mut answer).await
    };
    exchange.await.is_ok() && &answer == b"there"
}

/// No end of TCP arrives, so the edge must find out by itself.
#[tokio::test]
async fn a_gateway_that_hangs_is_a_reset_and_serves_again_when_it_continues() {
    let app = App::tcp(Script::new().echo()).await;
    let rules = app_only(app.address());
    let site = GatewayProcess::with_listeners(&format!("{OPEN}\negress: {rules}\n")).await;
    site.join("edge-1", app.port()).await.stop().await.ok();
    let (mut edge, listen) = edge_process(&site, &site.tunnel).await;
    let mut open = TcpStream::connect(&listen).await.unwrap();
    assert_echo(&mut open).await;
    site.gateway.signal("STOP").await;
    let mut waiting = TcpStream::connect(&listen).await.unwrap();
    waiting.write_all(b"there").await.unwrap();
    assert_reset(open).await;
    assert_reset(waiting).await;
    edge.wait_for_line("the connection to the gateway ended")
        .await;
    site.gateway.signal("CONT").await;
    until("new connections are served", async || {
        is_served(&listen).await
    })
    .await;
}

/// Bytes of this transfer take more than 20 minutes at the limit.
#[tokio::test]
async fn bytes_beyond_the_limit_of_a_node_wait_until_the_limit_is_raised() {
    let server = TransferServer::of(8_000_000).await;
    let mut rules = app_only(server.address);
    rules["limits"] = json!({ "bytes_per_second": "10kB" });
    let config = rules.clone();
    let build =
        World::build().config(|all| all.egress = Some(serde_json::from_value(config).unwrap()));
    let bytes = Listener {
        anonymous: true,
        ..fixed("bytes", ListenerProtocol::Tcp, "edge-2", 9100)
    };
    let mut world = build.listener(bytes).start().await;
    let edge = join(&world, "edge-1", &["app"]).await;
    let wire = connect(&edge, Some("app:443")).await;
    let mut transfer = std::pin::pin!(server.transfer(wire));
    // The limit is for egress alone.
    let unlimited = async {
        let server = TransferServer::of(8_000_000).await;
        let other = world.edge("edge-2");
        let other = other.port_as(9100, Protocol::Tcp, server.address);
        let _other = other.join().await;
        let wire = TcpStream::connect(world.listener("bytes")).await.unwrap();
        server.transfer(wire).await;
    };
    tokio::select! {
        biased;
        () = transfer.as_mut() => panic!("the limit is not kept"),
        () = unlimited => {}
    }
    rules["limits"] = json!({});
    world
        .reload(|config| config.egress = Some(serde_json::from_value(rules).unwrap()))
        .unwrap();
    transfer.await;
}

#[tokio::test]
async fn a_drain_leaves_open_connections_and_new_ones_use_another_gateway() {
    let app = App::tcp(Script::new().echo()).await;
    let rules = app_only(app.address());
    let configuration = format!("{OPEN}\negress: {rules}\ntimeouts: {{ drain: 10m }}\n");
    let first = GatewayProcess::with_listeners(&configuration).await;
    first.join("edge-1", app.port()).await.stop().await.ok();
    let second = first.replica_at("127.0.0.1:0").await;
    let gateways = format!("{},{}", first.tunnel, second.tunnel);
    let (edge, listen) = edge_process(&first, &gateways).await;
    let mut open = TcpStream::connect(&listen).await.unwrap();
    assert_echo(&mut open).await;
    let uses = |site: &GatewayProcess| {
        let written = edge.written();
        let lines = written.stdout.lines().chain(written.stderr.lines());
        let mut lines = lines.filter(|line| line.contains("egress uses this gateway"));
        lines.any(|line| line.contains(&site.tunnel))
    };
    until("the edge has logged its gateway", async || {
        uses(&first) || uses(&second)
    })
    .await;
    let (drained, other) = if uses(&first) {
        (first, second)
    } else {
        (second, first)
    };
    let web = drained.listener.clone();
    let program = async {
        until("new connections use the other gateway", async || {
            let mut wire = TcpStream::connect(&listen).await.unwrap();
            assert_echo(&mut wire).await;
            uses(&other)
        })
        .await;
        until("the listeners are closed", async || {
            TcpStream::connect(&web).await.is_err()
        })
        .await;
        assert_echo(&mut open).await;
        open.shutdown().await.unwrap();
        assert_eq!(open.read(&mut [0]).await.unwrap(), 0, "an end in order");
    };
    let (ended, ()) = tokio::join!(drained.gateway.stop(), program);
    assert!(ended.ok().stderr.contains("cut=0"));
}
