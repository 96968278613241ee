//! Services behind a node: each is reached as `SERVICE.NODE`, and the policies of both sides decide.

use crate::{
    peers::Fleet,
    world::{
        World,
        app::{App, answer},
        authority::Authority,
        client::{assert_problem, exchange, read},
        gateway::{anonymous, listener, loopback},
        tool::{Tool, need},
        until,
    },
};
use causeway_edge::config::{Port, Service};
use causeway_gateway::{
    config::{Dns, Listener, ListenerProtocol, policy},
    state::{Policy, PolicyReader, PolicyWriter},
};
use serde_json::{Value, json};
use std::fs;

const ZONE: &str = "nodes.example.internal";

fn policy(rules: &Value) -> PolicyReader {
    let rules: policy::Policy = serde_json::from_value(json!({ "rules": rules })).unwrap();
    PolicyWriter::new(Some(Policy::compile(&rules).unwrap())).reader()
}

/// Returns the newest access record.
fn last_record(world: &World) -> Value {
    world.log().records().pop().unwrap()
}

#[tokio::test]
async fn a_service_is_reached_by_its_name_and_has_a_certificate() {
    let build = World::build().config(|config| {
        config.dns = Dns {
            listen: loopback(),
            zones: vec![ZONE.to_owned()],
            ..Dns::default()
        }
        .into();
    });
    let world = build
        .listener(anonymous("web", ListenerProtocol::Http))
        .start()
        .await;
    let (node, printer) = (App::saying("node").await, App::saying("printer").await);
    let edge = world.edge("edge-1").port(10250, node.address());
    let _edge = edge.service("printer", printer.address()).join().await;
    // The client verifies the name in the certificate of the gateway.
    for client in [world.client(), world.client().http2()] {
        for host in ["printer.edge-1", &format!("printer.edge-1.{ZONE}")] {
            let answer = client.get(&format!("https://{host}/jobs")).await;
            assert_eq!((answer.status, answer.text().as_str()), (200, "printer"));
            assert_eq!(printer.head().await.values("host"), [host]);
            let record = last_record(&world);
            assert_eq!(
                (&record["node"], &record["service"], &record["port"]),
                (&json!("edge-1"), &json!("printer"), &Value::Null)
            );
        }
        let answer = client.get("https://edge-1/").await;
        assert_eq!(answer.text(), "node", "the node itself");
        assert_eq!(last_record(&world)["service"], Value::Null);
    }
    // The port in the URL is the port of the listener.
    for host in ["printer.edge-1", "printer.edge-1:10264"] {
        let client = world.client_at("web").nobody().host(host);
        assert_eq!(client.get("http://gateway/").await.text(), "printer");
    }
}

#[tokio::test]
async fn connect_takes_the_port_of_the_service_and_no_other() {
    let build = World::build().listener(listener("proxy", ListenerProtocol::Connect));
    let world = build.start().await;
    let printer = App::saying("printer").await;
    let edge = world.edge("edge-1");
    let _edge = edge.service("printer", printer.address()).join().await;
    let client = world.client_at("proxy");
    let port = printer.port();
    let mut wire = client.wire("gateway.test", &[]).await.unwrap();
    let connect = format!("CONNECT printer.edge-1:{port} HTTP/1.1\r\nHost: x\r\n\r\n");
    let head = exchange(&mut *wire, connect).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let head = exchange(&mut *wire, "GET / HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert_eq!(read(&mut wire, 7).await, b"printer");
    let url = format!("GET http://printer.edge-1:{port}/ HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_eq!(client.raw("gateway.test", url).await.text(), "printer");
    let connect = "CONNECT printer.edge-1:1 HTTP/1.1\r\nHost: x\r\n\r\n";
    let answer = client.raw("gateway.test", connect).await;
    let says = format!("edge-1 serves printer at port {port} only, not at 1");
    assert_problem(&answer, 403, "edge_policy", &says);
}

#[tokio::test]
async fn only_a_rule_that_names_services_opens_one_and_a_refusal_tells_no_names() {
    let rules = policy(&json!([
        { "where": { "services": ["printer"] }, "then": "allow" },
        { "where": { "nodes": ["edge-1"] }, "then": "allow" },
    ]));
    let world = World::build().policy(rules).start().await;
    let (node, printer) = (App::saying("node").await, App::saying("printer").await);
    let edge = world.edge("edge-1").port(10250, node.address());
    let edge = edge.service("printer", printer.address());
    let _edge = edge.service("camera", printer.address()).join().await;
    let client = world.client();
    assert_eq!(client.get("https://edge-1/").await.text(), "node");
    let answer = client.get("https://printer.edge-1/").await;
    assert_eq!(answer.text(), "printer");
    // The client may not know that there is a camera and no scanner.
    for service in ["camera", "scanner"] {
        let answer = client.get(&format!("https://{service}.edge-1/")).await;
        let says = format!("to GET / at the service {service} of edge-1");
        assert_problem(&answer, 403, "forbidden", &says);
    }
    assert_eq!(printer.requests(), 1);
}

#[tokio::test]
async fn services_are_targets_of_prometheus_which_its_proxy_reaches() {
    let rules = policy(&json!([
        { "who": { "users": ["tester"] }, "where": { "services": ["printer"] }, "then": "allow" },
    ]));
    let build = World::build().policy(rules);
    let world = build
        .listener(listener("proxy", ListenerProtocol::Connect))
        .start()
        .await;
    let (node, printer) = (App::saying("node").await, App::saying("printer").await);
    let edge = world.edge("edge-1").pool("mill").port(9100, node.address());
    let edge = edge.service("printer", printer.address());
    let mut edge = edge.service("camera", node.address()).join().await;
    let group = |service: &str, app: &App| {
        let mut labels =
            json!({ "__meta_causeway_node": "edge-1", "__meta_causeway_pool": "mill" });
        let target = if service.is_empty() {
            "edge-1:9100".to_owned()
        } else {
            labels["__meta_causeway_service"] = json!(service);
            format!("{service}.edge-1:{}", app.port())
        };
        json!({ "targets": [target], "labels": labels })
    };
    let admin = async |query: &str| -> Value {
        let (status, text) = world.admin_text(&format!("/api/v1/http_sd{query}")).await;
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap()
    };
    let client = world.client_at("proxy");
    let listed = async |query: &str| {
        let url = format!("https://gateway.test/.well-known/causeway/http_sd{query}");
        client.get(&url).await.json()
    };
    let camera = group("camera", &node);
    let all = json!([group("", &node), camera, group("printer", &printer)]);
    assert_eq!(admin("").await, all);
    let own = listed("").await;
    assert_eq!(own, json!([group("printer", &printer)]));
    assert_eq!(admin("?port=9100").await, json!([group("", &node)]));
    assert_eq!(listed("?port=9100").await, json!([]));
    let target = own[0]["targets"][0].as_str().unwrap();
    let request = format!("GET http://{target}/metrics HTTP/1.1\r\nHost: {target}\r\n\r\n");
    assert_eq!(client.raw("gateway.test", request).await.text(), "printer");
    // A node of this name hides the service.
    let hiding = world.edge("camera.edge-1").port(9100, node.address());
    let mut hiding = hiding.join().await;
    let labels = json!({ "__meta_causeway_node": "camera.edge-1" });
    let other = json!({ "targets": ["camera.edge-1:9100"], "labels": labels });
    let all = json!([other, group("", &node), group("printer", &printer)]);
    assert_eq!(admin("").await, all);
    hiding.stop().await;
    world.until_tunnels("camera.edge-1", 0).await;
    edge.stop().await;
    world.until_tunnels("edge-1", 0).await;
    assert_eq!(admin("").await, json!([]), "only the edge knows them");
}

#[tokio::test]
async fn the_edge_knows_its_services_and_permits_their_addresses() {
    let world = World::start().await;
    let printer = App::saying("printer").await;
    let edge = world.edge("edge-1").service("printer", printer.address());
    let mut edge = edge
        .config(|config| {
            // The name resolves to an address that `allow.hosts` does not permit.
            let port = Port {
                target: Some(format!("localhost:{}", printer.port())),
                ..Port::default()
            };
            config.services.insert("other".into(), Service(port));
        })
        .join()
        .await;
    let client = world.client();
    let answer = client.get("https://scanner.edge-1/").await;
    assert_problem(
        &answer,
        404,
        "service_unknown",
        "edge-1 has no service scanner",
    );
    assert_eq!(client.get("https://other.edge-1/").await.status, 200);
    edge.reload(|config| {
        config.allow.hosts = vec!["10.0.3.0/24".parse().unwrap()];
        config.services.remove("printer");
    });
    until("the edge has the new configuration", async || {
        client.get("https://printer.edge-1/").await.status == 404
    })
    .await;
    let answer = client.get("https://other.edge-1/").await;
    assert_problem(&answer, 403, "edge_policy", "does not allow localhost");
}

#[tokio::test]
async fn a_node_with_the_name_of_a_service_comes_first() {
    let world = World::start().await;
    let (node, service) = (App::saying("node").await, App::saying("service").await);
    let edge = world.edge("edge-1").service("printer", service.address());
    let _edge = edge.join().await;
    let client = world.client();
    let url = "https://printer.edge-1/";
    assert_eq!(client.get(url).await.text(), "service");
    let other = world.edge("printer.edge-1").port(10250, node.address());
    let _other = other.join().await;
    assert_eq!(client.get(url).await.text(), "node");
}

#[tokio::test]
async fn a_service_may_speak_tls_with_the_client_itself() {
    need!("curl");
    let passthrough = Listener {
        port: Some(9100),
        ..anonymous("through", ListenerProtocol::Passthrough)
    };
    let world = World::build().listener(passthrough).start().await;
    let authority = Authority::new();
    fs::write(world.folder().join("site.pem"), authority.pem()).unwrap();
    let tls = authority.serve(&authority.app(&["printer.edge-1"]), false);
    let app = App::https(tls, |_| answer::ok("printer")).await;
    let edge = world.edge("edge-1").service("printer", app.address());
    let _edge = edge.join().await;
    let to = format!("::{}", world.listener("through"));
    let curl = Tool::curl().args(["--connect-to", &to, "--cacert"]);
    let curl = curl.args([world.folder().join("site.pem")]);
    let ran = curl.args(["https://printer.edge-1/"]).run().await.ok();
    assert_eq!(ran.text(), "printer");
}

#[tokio::test]
async fn another_gateway_forwards_to_a_service_and_its_policy_decides_too() {
    let app = App::saying("printer").await;
    let fleet = Fleet::start(2, &["edge-1"], &app, "").await;
    let services = format!("{{printer: \"127.0.0.1:{}\"}}", app.port());
    let flags = ["--tunnels-gateways", "every", "--services", &services];
    let _edge = fleet.edge_with(&flags, "edge-1", &[0], (&app, "")).await;
    fleet.until_state(1, "edge-1", "connected").await;
    let far = fleet.sites[1].nobody();
    let answer = far.get("http://printer.edge-1/").await;
    assert_eq!((answer.status, answer.text().as_str()), (200, "printer"));
    let answer = far.get("http://scanner.edge-1/").await;
    assert_problem(
        &answer,
        404,
        "service_unknown",
        "edge-1 has no service scanner",
    );
    let metrics = fleet.sites[0].metrics().await;
    assert_eq!(metrics.sum("streams_served_for_peers_total", &[]), 2);
}
