//! Access policy: for every stream the first rule that matches decides, and the log names it.

use crate::world::{
    GATEWAY_NAME, LIFE, World,
    app::App,
    client::{assert_problem, exchange, whole},
    gateway::{anonymous, listener, loopback},
};
use causeway_certs::{Ca, NodeName, OpenMode, Store, install_provider};
use causeway_config::Specified;
use causeway_gateway::{
    Config, Gateway,
    config::{ClientAuth, Listener, ListenerProtocol, policy},
    state::{ClusterNode, Policy, PolicyWriter},
    worker::Workers,
};
use hyper::Request;
use serde_json::{Value, json};
use std::path::PathBuf;

fn compiled(rules: &Value) -> Policy {
    let policy: policy::Policy = serde_json::from_value(json!({ "rules": rules })).unwrap();
    Policy::compile(&policy).unwrap()
}

/// Returns the deciding rule of the newest access record.
fn decided(world: &World) -> Value {
    let records = world.log().records();
    records.last().unwrap()["rule"].clone()
}

#[tokio::test]
async fn the_first_matching_rule_decides_for_each_stream() {
    let rules = json!([
        { "name": "no shells", "what": { "paths": ["/exec"] }, "then": "deny" },
        { "name": "reading", "who": { "users": ["tester"] }, "what": { "methods": ["GET"] }, "then": "allow" },
    ]);
    let rules = PolicyWriter::new(Some(compiled(&rules)));
    let world = World::build().policy(rules.reader()).start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    for client in [world.client(), world.client().http2()] {
        let mut connection = client.connect("edge-1").await.unwrap();
        let answer = connection.get("https://edge-1:9100/metrics").await.unwrap();
        assert_eq!(answer.text(), "it");
        assert_eq!(decided(&world), "reading");
        for path in ["/exec/a", "/metrics/%2e%2e/exec"] {
            let url = format!("https://edge-1:9100{path}");
            let answer = connection.get(&url).await.unwrap();
            let says = format!("does not allow tester to GET {path} at port 9100 of edge-1");
            assert_problem(&answer, 403, "forbidden", &says);
            assert!(
                !answer.text().contains("no shells"),
                "rules are for the log"
            );
            assert_eq!(decided(&world), "no shells");
        }
        let post = Request::post("https://edge-1:9100/metrics")
            .body(whole("x"))
            .unwrap();
        let answer = connection.ask(post).await.unwrap();
        assert_problem(
            &answer,
            403,
            "forbidden",
            "does not allow tester to POST /metrics",
        );
        assert_eq!(decided(&world), Value::Null, "no rule has matched");
        let answer = connection.get("https://edge-1:9100/metrics").await.unwrap();
        assert_eq!(answer.text(), "it", "the connection goes on");
    }
    assert_eq!(app.requests(), 4);
}

#[tokio::test]
async fn replaced_rules_apply_to_the_next_stream_of_a_connection() {
    let rules = PolicyWriter::new(Some(compiled(&json!([{ "then": "allow" }]))));
    let world = World::build().policy(rules.reader()).start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let mut connection = world.client().http2().connect("edge-1").await.unwrap();
    let url = "https://edge-1:9100/";
    assert_eq!(connection.get(url).await.unwrap().status, 200);
    rules.replace(Some(compiled(&json!([]))));
    assert_eq!(connection.get(url).await.unwrap().status, 403);
    rules.replace(Some(compiled(&json!([{ "then": "allow" }]))));
    assert_eq!(connection.get(url).await.unwrap().status, 200);
}

#[tokio::test]
async fn node_attributes_come_from_enrolment_and_not_from_edges() {
    let rules = json!([
        { "where": { "pools": ["north"], "labels": { "tier": "gold" } }, "then": "allow" },
    ]);
    let rules = PolicyWriter::new(Some(compiled(&rules)));
    let world = World::build().policy(rules.reader()).start().await;
    let app = App::saying("it").await;
    let edge = world.edge("edge-1").pool("north").label("tier", "gold");
    let _gold = edge.port(9100, app.address()).join().await;
    let edge = world
        .edge("edge-2")
        .port(9100, app.address())
        .config(|config| {
            config.pool = Some("north".into());
            config.labels.insert("tier".into(), "gold".into());
        });
    let _liar = edge.join().await;
    let client = world.client();
    assert_eq!(client.get("https://edge-1:9100/").await.status, 200);
    assert_eq!(client.get("https://edge-2:9100/").await.status, 403);
    assert_eq!(
        world.node("edge-1").await["confirmed_labels"]["tier"],
        "gold"
    );
    assert_eq!(world.node("edge-2").await["confirmed_labels"], json!({}));
}

/// As documented: a Node object cannot remove a label of a token.
#[tokio::test]
async fn labels_of_a_token_survive_a_cluster_node_of_that_name() {
    let rules = json!([
        { "name": "no shells on gold", "where": { "labels": { "tier": "gold" } }, "what": { "paths": ["/exec"] }, "then": "deny" },
        { "then": "allow" },
    ]);
    let rules = PolicyWriter::new(Some(compiled(&rules)));
    let world = World::build().policy(rules.reader()).start().await;
    let app = App::saying("it").await;
    let edge = world.edge("edge-1").label("tier", "gold");
    let _gold = edge.port(9100, app.address()).join().await;
    for labels in [json!({}), json!({ "tier": "tin" })] {
        let member = ClusterNode {
            is_edge: true,
            labels: serde_json::from_value(labels).unwrap(),
            ..ClusterNode::default()
        };
        let node = NodeName::parse("edge-1").unwrap();
        world.nodes().replace_cluster([(node, member)].into());
        let answer = world.client().get("https://edge-1:9100/exec/a").await;
        assert_problem(&answer, 403, "forbidden", "does not allow tester");
        assert_eq!(decided(&world), "no shells on gold");
        let answer = world.client().get("https://edge-1:9100/metrics").await;
        assert_eq!(answer.status, 200);
    }
}

#[tokio::test]
async fn clients_are_matched_by_network_certificate_and_identity() {
    let rules = json!([
        { "who": { "users": ["system:anonymous"], "networks": ["127.0.0.2"] }, "then": "allow" },
        { "who": { "spiffe": ["spiffe://world.test/client/test*"] }, "then": "allow" },
    ]);
    let rules = PolicyWriter::new(Some(compiled(&rules)));
    let build = World::build().policy(rules.reader());
    let world = build
        .listener(anonymous("open", ListenerProtocol::Https))
        .start()
        .await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let url = "https://edge-1:9100/";
    assert_eq!(world.client().get(url).await.status, 200);
    let nobody = world.client_at("open").nobody();
    assert_eq!(nobody.clone().from("127.0.0.2").get(url).await.status, 200);
    assert_eq!(nobody.from("127.0.0.3").get(url).await.status, 403);
    let other = world.client_leaf("other");
    assert_eq!(
        world.client().certificate(&other).get(url).await.status,
        403
    );
}

#[tokio::test]
async fn a_session_is_refused_if_any_possible_request_is() {
    let rules = json!([
        { "where": { "nodes": ["edge-1"] }, "what": { "paths": ["/exec"] }, "then": "deny" },
        { "then": "allow" },
    ]);
    let rules = PolicyWriter::new(Some(compiled(&rules)));
    let build = World::build().policy(rules.reader());
    let world = build
        .listener(listener("connect", ListenerProtocol::Connect))
        .start()
        .await;
    let app = App::saying("it").await;
    let _one = world.edge("edge-1").port(9100, app.address()).join().await;
    let _two = world.edge("edge-2").port(9100, app.address()).join().await;
    for (node, status) in [("edge-1", "403"), ("edge-2", "200")] {
        let head = format!("CONNECT {node}:9100 HTTP/1.1\r\nHost: {node}:9100\r\n\r\n");
        let mut wire = world
            .client_at("connect")
            .wire(GATEWAY_NAME, &[])
            .await
            .unwrap();
        let answer = exchange(&mut *wire, head).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{answer}"
        );
    }
}

#[tokio::test]
async fn a_gateway_without_its_configured_policy_does_not_start() {
    install_provider();
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path(), OpenMode::Create).unwrap();
    store
        .save_ca(&Ca::create(&"td".parse().unwrap()).unwrap())
        .unwrap();
    let mut config = Config {
        data_dir: folder.path().to_owned(),
        policy: Specified::from(PathBuf::from("policy.yaml")),
        listeners: Vec::new(),
        ..Config::default()
    };
    config.tunnel.listen = loopback();
    config.admin.listen = loopback();
    let bind = |gateway: Gateway| gateway.workers(Workers::on_current_runtime()).bind();
    let refused = bind(Gateway::new(config.clone())).unwrap_err().to_string();
    assert!(refused.contains("policy.yaml"), "{refused}");
    let rules = PolicyWriter::new(Some(Policy::default()));
    assert!(bind(Gateway::new(config).policy(rules.reader())).is_ok());
}

#[tokio::test]
async fn an_extra_client_ca_gives_no_names_of_our_trust_domain() {
    let rules = json!([
        { "who": { "spiffe": ["spiffe://world.test/*"] }, "then": "deny" },
        { "who": { "spiffe": ["spiffe://partner.test/client/ann"] }, "then": "allow" },
    ]);
    let rules = PolicyWriter::new(Some(compiled(&rules)));
    let build = World::build().policy(rules.reader());
    let cas =
        ["world.test", "partner.test"].map(|domain| Ca::create(&domain.parse().unwrap()).unwrap());
    let file = build.folder().join("partners.pem");
    std::fs::write(&file, cas.iter().map(Ca::root_pem).collect::<String>()).unwrap();
    let theirs = Listener {
        client_auth: ClientAuth {
            client_ca: vec![file],
            ..ClientAuth::default()
        },
        ..listener("theirs", ListenerProtocol::Https)
    };
    let world = build.listener(theirs).start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let url = "https://edge-1:9100/";
    let mut by = Vec::new();
    for ca in &cas {
        let leaf = ca.issue_client("ann", &[], LIFE).unwrap();
        let client = world.client_at("theirs").certificate(&leaf);
        by.push((client.get(url).await.status, decided(&world)));
    }
    // The rule of the own domain does not apply here.
    assert_eq!(by, [(403, Value::Null), (200, json!("rules[1]"))]);
    let own = world.client_at("theirs").get(url).await.status;
    assert_eq!((own, decided(&world)), (403, json!("rules[0]")));
}

#[tokio::test]
async fn upgrades_and_tokens_on_a_kept_connection_follow_the_policy() {
    let build = World::build();
    let (ann, bob) = (build.token("ann"), build.token("bob"));
    let tokens = Listener {
        client_auth: ClientAuth {
            tokens: Some(build.tokens()),
            ..ClientAuth::default()
        },
        ..listener("tokens", ListenerProtocol::Https)
    };
    let rules = json!([
        { "what": { "streams": ["upgrade"] }, "then": "deny" },
        { "who": { "users": ["ann"] }, "then": "allow" },
    ]);
    let rules = PolicyWriter::new(Some(compiled(&rules)));
    let world = build.listener(tokens).policy(rules.reader()).start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let client = world.client_at("tokens").nobody();
    let mut connection = client.connect("edge-1").await.unwrap();
    let request = |token: &str| {
        let request = Request::get("https://edge-1:9100/");
        request.header("authorization", format!("Bearer {token}"))
    };
    for (token, status) in [(&ann, 200), (&bob, 403), (&ann, 200)] {
        let request = request(token).body(whole("")).unwrap();
        assert_eq!(connection.ask(request).await.unwrap().status, status);
    }
    let upgrade = request(&ann).header("connection", "Upgrade");
    let upgrade = upgrade
        .header("upgrade", "websocket")
        .body(whole(""))
        .unwrap();
    assert_eq!(connection.ask(upgrade).await.unwrap().status, 403);
}
