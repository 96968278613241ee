//! Pods by Pod objects: a cluster in which the addresses of pods are in no `spec.podCIDRs`, as with pools of Calico
//! and Cilium.

use crate::{
    redirect::Pods,
    server_names::{RESET, UNRECOGNIZED, answer_to, client_hello, server_name_extension},
    world::{
        World,
        app::App,
        client::{Answer, assert_problem},
        cluster::Cluster,
        gateway::{anonymous, fixed, listener},
        netns::{HUB, NEED, SharedNetwork},
        process::{GatewayProcess, causeway},
        tool::{Tool, need},
        until,
    },
};
use causeway_certs::NodeName;
use causeway_gateway::{
    config::{Listener, ListenerProtocol, policy},
    proxy::authz::{Authorize, AuthzDecision, AuthzRequest},
    state::{ClusterNode, Pod, PodsWriter, Policy, PolicyWriter},
};
use serde_json::{Value, json};
use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
    time::Duration,
};
use tokio::sync::Semaphore;

fn configuration(cluster: &Cluster) -> String {
    let kubernetes = json!({
        "kubeconfig": cluster.kubeconfig(),
        "pod_networks": ["10.244.0.0/16", "10.250.0.0/16"],
        "pods": {},
    });
    format!(
        "listeners: [{{ name: web, protocol: https, listen: \"127.0.0.1:0\", port: 9100 }}]\nkubernetes: {kubernetes}"
    )
}

/// Returns the body and the status of a request of the client alice. The certificate must have the host, if it is a
/// name.
async fn get(site: &GatewayProcess, host: &str, port: u16) -> String {
    let certificate = if host.parse::<Ipv4Addr>().is_ok() {
        "--insecure"
    } else {
        "--fail-early"
    };
    let answer = Tool::curl()
        .args([Path::new("--cacert"), &site.data().join("ca.pem")])
        .args([Path::new("--cert"), &site.path("alice.pem")])
        .args([Path::new("--key"), &site.path("alice-key.pem")])
        .args([certificate, "-w", " %{http_code}"])
        .args(["--connect-to", &format!("{host}:{port}:{}", site.listener)])
        .args([format!("https://{host}:{port}/")]);
    answer.run().await.ok().text().clone()
}

/// Waits until the metrics have these numbers of pods, of pods at most, and of addresses that several pods have.
async fn until_counted(site: &GatewayProcess, expected: [u64; 3]) {
    let names = [
        "cluster_pods",
        "cluster_pods_limit",
        "pod_address_conflicts",
    ];
    // The metrics change after the table.
    until("the pods are counted", async || {
        let metrics = site.metrics().await;
        names.map(|name| metrics.sum(name, &[])) == expected
    })
    .await;
}

#[tokio::test]
async fn pods_in_no_pod_cidr_are_reached_on_their_nodes() {
    need!(NEED, "curl");
    let street = SharedNetwork::new();
    let cluster = Cluster::at(HUB).await;
    let site = GatewayProcess::listening(&format!("{HUB}:0"), &configuration(&cluster)).await;
    let mut one = Pods::at(&street, &site, "edge-1", "10.250.0.7,10.244.1.7").await;
    let mut two = Pods::at(&street, &site, "edge-2", "10.250.0.7").await;
    cluster.node_with_pods("edge-1", true, &["10.0.0.11"], &["10.244.1.0/24"]);
    cluster.node_with_pods("edge-2", true, &["10.0.0.12"], &["10.244.2.0/24"]);
    let at_one = one.pod("10.250.0.7", "one").await.port();
    let at_two = two.pod("10.250.0.7", "two").await.port();
    cluster.pod("shop", "web-0", "edge-1", "10.250.0.7");
    until("the pod is known", async || {
        get(&site, "10.250.0.7", at_one).await == "one 200"
    })
    .await;
    assert_eq!(get(&site, "web-0.shop.pod", at_one).await, "one 200");

    // An address in the podCIDR of a node is no pod's, although the node would serve it.
    let no_pod = one.pod("10.244.1.7", "no pod").await.port();
    for (host, port) in [
        ("10.244.1.7", no_pod),
        ("10.250.0.8", at_one),
        ("web-1.shop.pod", at_one),
    ] {
        let answer = get(&site, host, port).await;
        assert!(
            answer.contains("no running pod") && answer.ends_with(" 404"),
            "{answer}"
        );
    }

    cluster.delete_pod("shop", "web-0");
    cluster.pod("shop", "web-0", "edge-2", "10.250.0.7");
    until("the pod has moved", async || {
        get(&site, "10.250.0.7", at_two).await == "two 200"
    })
    .await;
    assert_eq!(get(&site, "web-0.shop.pod", at_two).await, "two 200");

    // A second pod with the address, as a stolen kubelet can report it, gets nothing, and neither does the first.
    cluster.pod("shop", "thief", "edge-1", "10.250.0.7");
    until("the address is nobody's", async || {
        get(&site, "10.250.0.7", at_two).await.ends_with(" 404")
    })
    .await;
    until_counted(&site, [2, 200_000, 1]).await;
    let ended = json!({ "phase": "Failed", "podIPs": [{ "ip": "10.250.0.7" }] });
    cluster.put_pod(("shop", "thief"), "edge-1", &ended);
    until("a pod that has ended gives its address up", async || {
        get(&site, "10.250.0.7", at_two).await == "two 200"
    })
    .await;
    until_counted(&site, [1, 200_000, 0]).await;
}

#[tokio::test]
async fn without_the_right_to_read_pods_only_pods_are_unavailable() {
    need!("curl");
    let cluster = Cluster::at(Ipv4Addr::LOCALHOST).await;
    cluster.refuse_pods(true);
    cluster.node_with_pods("edge-1", true, &["10.0.0.11"], &["10.244.1.0/24"]);
    let site = GatewayProcess::with_listeners(&configuration(&cluster)).await;
    let app = App::saying("node").await;
    let _edge = site.join("edge-1", app.port()).await;
    let why = "pods is forbidden";
    let status = || causeway("status").flag("--data-dir", site.data()).run();
    until("the fault is reported", async || {
        status().await.stdout.contains(why)
    })
    .await;
    let lost = async || {
        let metrics = site.metrics().await;
        metrics.sum("cluster_pods_lost_timestamp_seconds", &[])
    };
    assert!(lost().await > 0);
    assert_eq!(get(&site, "edge-1", 9100).await, "node 200");
    for host in ["10.244.1.7", "web.shop.pod"] {
        let answer = get(&site, host, 9100).await;
        assert!(answer.contains(why) && answer.ends_with(" 503"), "{answer}");
    }
    let elsewhere = get(&site, "10.99.0.1", 9100).await;
    assert!(elsewhere.ends_with(" 404"), "{elsewhere}");

    cluster.refuse_pods(false);
    until("the pods are loaded", async || {
        get(&site, "10.244.1.7", 9100).await.ends_with(" 404")
    })
    .await;
    until("the fault is over", async || {
        !status().await.stdout.contains(why) && lost().await == 0
    })
    .await;
}

/// Returns the status of an answer of [`get`].
async fn status(site: &GatewayProcess, host: &str, port: u16) -> String {
    let answer = get(site, host, port).await;
    answer.rsplit(' ').next().unwrap().to_owned()
}

#[tokio::test]
async fn rules_for_namespaces_decide_about_the_pods_in_them() {
    need!(NEED, "curl");
    let (street, folder) = (SharedNetwork::new(), tempfile::tempdir().unwrap());
    let rules = folder.path().join("policy.yaml");
    let write = |text: &str| fs::write(&rules, format!("rules: [{text}]\n")).unwrap();
    write("{ where: { pod_namespaces: [shop] }, then: allow }");
    let cluster = Cluster::at(HUB).await;
    let configuration = format!("{}\npolicy: {}", configuration(&cluster), rules.display());
    let site = GatewayProcess::listening(&format!("{HUB}:0"), &configuration).await;
    let mut edge = Pods::at(&street, &site, "edge-1", "10.250.0.7,10.250.0.8,0.0.0.0/0").await;
    cluster.node_with_pods("edge-1", true, &["10.0.0.11"], &[]);
    let shop = edge.pod("10.250.0.7", "shop").await.port();
    let bank = edge.pod("10.250.0.8", "bank").await.port();
    cluster.pod("shop", "web-0", "edge-1", "10.250.0.7");
    cluster.pod("bank", "web-0", "edge-1", "10.250.0.8");
    until("the pod is known", async || {
        get(&site, "web-0.shop.pod", shop).await == "shop 200"
    })
    .await;
    assert_eq!(get(&site, "10.250.0.7", shop).await, "shop 200");
    for (host, port) in [
        ("web-0.bank.pod", bank),
        ("10.250.0.8", bank),
        ("edge-1", bank),
    ] {
        assert_eq!(status(&site, host, port).await, "403", "{host}");
    }

    // The address of the pod goes to a pod in another namespace.
    cluster.delete_pod("shop", "web-0");
    cluster.pod("bank", "web-1", "edge-1", "10.250.0.7");
    until("the other pod is judged", async || {
        status(&site, "10.250.0.7", shop).await == "403"
    })
    .await;

    // A rule that denies, and one without a condition on pods.
    write("{ where: { pod_namespaces: [b*] }, then: deny }, { then: allow }");
    cluster.delete_pod("bank", "web-1");
    cluster.pod("shop", "web-1", "edge-1", "10.250.0.7");
    until("the new rules decide", async || {
        let answer = get(&site, "edge-1", 9100).await;
        !answer.contains("the policy does not allow")
    })
    .await;
    until("the new pod is known", async || {
        get(&site, "web-1.shop.pod", shop).await == "shop 200"
    })
    .await;
    let answer = get(&site, "web-0.bank.pod", bank).await;
    assert!(answer.contains("the policy does not allow"), "{answer}");
    // An address of two pods leads to neither, whatever the rules say.
    cluster.pod("shop", "thief", "edge-1", "10.250.0.8");
    until("the address is nobody's", async || {
        status(&site, "10.250.0.8", bank).await == "404"
    })
    .await;
}

#[tokio::test]
async fn a_static_pod_neither_is_reached_nor_takes_an_address() {
    need!(NEED, "curl");
    let street = SharedNetwork::new();
    let cluster = Cluster::at(HUB).await;
    let site = GatewayProcess::listening(&format!("{HUB}:0"), &configuration(&cluster)).await;
    let mut edge = Pods::at(&street, &site, "edge-1", "10.250.0.7,10.250.0.8,0.0.0.0/0").await;
    cluster.node_with_pods("edge-1", true, &["10.0.0.11"], &["10.250.0.0/24"]);
    let own = edge.pod("10.250.0.7", "own").await.port();
    let of_kubelet = edge.pod("10.250.0.8", "static").await.port();
    cluster.mirror_pod(("shop", "thief-edge-1"), "edge-1", "10.250.0.7");
    cluster.mirror_pod(("kube-system", "proxy-edge-1"), "edge-1", "10.250.0.8");
    cluster.pod("shop", "web", "edge-1", "10.250.0.7");
    until("the pod is known", async || {
        get(&site, "10.250.0.7", own).await == "own 200"
    })
    .await;
    assert_eq!(get(&site, "web.shop.pod", own).await, "own 200");
    for host in [
        "10.250.0.8",
        "proxy-edge-1.kube-system.pod",
        "thief-edge-1.shop.pod",
    ] {
        let answer = get(&site, host, of_kubelet).await;
        assert!(
            answer.contains("no running pod") && answer.ends_with(" 404"),
            "{answer}"
        );
    }
}

#[tokio::test]
async fn rules_for_pods_need_pod_objects() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write(
        "policy.yaml",
        "rules:\n  - { name: shops, where: { pod_namespaces: [shop] }, then: deny }\n",
    );
    write("gateway.yaml", "policy: policy.yaml\n");
    let check = causeway("gateway --check-config --config gateway.yaml --data-dir data");
    let checked = check.within(folder.path()).run().await;
    let stderr = checked.with_code(2).stderr;
    assert!(
        stderr.contains("shops (line 2)") && stderr.contains("set kubernetes.pods"),
        "{stderr}"
    );
}

#[tokio::test]
async fn a_reload_refuses_rules_for_pods_until_a_start_follows_pods() {
    need!("curl");
    let cluster = Cluster::at(Ipv4Addr::LOCALHOST).await;
    let with_pods = configuration(&cluster);
    let without_pods = with_pods.replace(r#","pods":{}"#, "");
    assert_ne!(without_pods, with_pods);
    let app = App::saying("node").await;
    let site = GatewayProcess::with_listeners(&without_pods).await;
    let _edge = site.join("edge-1", app.port()).await;
    cluster.node_with_pods("edge-1", true, &["10.0.0.11"], &[]);
    until("the node is reached", async || {
        get(&site, "edge-1", 9100).await == "node 200"
    })
    .await;
    let rules = site.path("policy.yaml");
    fs::write(
        &rules,
        "rules: [{ where: { pod_namespaces: [bank] }, then: deny }]\n",
    )
    .unwrap();
    let file = site.path("gateway.yaml");
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains(&without_pods), "{text}");
    let text = text.replace(&without_pods, &with_pods);
    fs::write(&file, format!("{text}\npolicy: {}\n", rules.display())).unwrap();
    let reload = causeway("reload").flag("--data-dir", site.data()).run();
    let stderr = reload.await.with_code(2).stderr;
    assert!(
        stderr.contains("rules[0] (line 1)") && stderr.contains("restart it with kubernetes.pods"),
        "{stderr}"
    );
    // The rules before stay in force.
    assert_eq!(get(&site, "edge-1", 9100).await, "node 200");
}

/// Authorizer whose decisions wait for the test.
#[derive(Clone, Debug)]
struct SlowAuthorizer {
    asked: Arc<Semaphore>,
    decide: Arc<Semaphore>,
}

impl Authorize for SlowAuthorizer {
    fn authorize(&self, _: &AuthzRequest<'_>) -> AuthzDecision {
        self.asked.add_permits(1);
        let decide = self.decide.clone();
        AuthzDecision::Pending(Box::pin(async move {
            decide.acquire().await.unwrap().forget();
            Ok(())
        }))
    }
}

#[tokio::test]
async fn a_pod_that_gets_the_address_during_the_decision_is_not_reached() {
    let new = || Arc::new(Semaphore::new(0));
    let slow = SlowAuthorizer {
        asked: new(),
        decide: new(),
    };
    let build = World::build()
        .authorizer(slow.clone())
        .config(|config| config.timeouts.authorize = Duration::from_mins(1))
        .listener(listener("known", ListenerProtocol::Https));
    let world = Box::pin(build.start()).await;
    let mut pods = follow_pods(&world);
    let app = App::saying("node").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let client = world.client_at("known");
    for moves in [false, true] {
        let decision = async {
            slow.asked.acquire().await.unwrap().forget();
            if moves {
                pods.remove("a/open");
                pods.upsert(pod("b/other", "edge-1", "10.250.0.1")).unwrap();
            }
            slow.decide.add_permits(1);
        };
        let asking = client.get("https://open.a.pod:9100/");
        let (answer, ()) = tokio::join!(asking, decision);
        if moves {
            assert_problem(&answer, 404, "node_unknown", "another pod");
        } else {
            assert_eq!(answer.status, 403, "the edge does not serve the address");
        }
    }
}

/// Returns the answer to a request through the proxy of an edge, and the status of the proxy.
async fn get_by_proxy(edge: &Pods<'_>, host: &str, port: u16) -> String {
    let url = format!("http://{host}:{port}/");
    let proxy = ["-p", "-x", "http://127.0.0.1:1080"];
    let output = ["-w", " %{http_connect}", &url];
    edge.curl(&[&proxy[..], &output].concat()).await.text()
}

#[tokio::test]
async fn nodes_reach_pods_of_namespaces_that_a_rule_lists() {
    need!(NEED, "curl");
    let street = SharedNetwork::new();
    let cluster = Cluster::at(HUB).await;
    let egress = json!({ "rules": [{ "to": { "pod_namespaces": ["shop"] } }] });
    let configuration = format!("{}\negress: {egress}", configuration(&cluster));
    let site = GatewayProcess::listening(&format!("{HUB}:0"), &configuration).await;
    let proxy = "egress: { proxy: { listen: 127.0.0.1:1080 } }\n";
    let one = Pods::with_config(&street, &site, ("edge-1", "10.0.0.0/8"), proxy).await;
    let mut two = Pods::at(&street, &site, "edge-2", "10.250.0.7,10.250.0.8,10.0.0.0/8").await;
    let mut cloud = Pods::elsewhere(&street);
    cluster.node_with_pods("edge-1", true, &["10.0.0.11"], &[]);
    cluster.node_with_pods("edge-2", true, &["10.0.0.12"], &[]);
    cluster.node_with_pods("cloud-1", false, &["10.0.0.14"], &[]);
    let shop = two.pod("10.250.0.7", "shop").await.port();
    let bank = two.pod("10.250.0.8", "bank").await.port();
    let at_cloud = cloud.pod("10.250.0.9", "cloud").await.port();
    let bank_at_cloud = cloud.pod("10.250.0.10", "cloud").await.port();
    cluster.pod("shop", "web", "edge-2", "10.250.0.7");
    cluster.pod("bank", "web", "edge-2", "10.250.0.8");
    cluster.pod("shop", "cloud", "cloud-1", "10.250.0.9");
    cluster.pod("bank", "cloud", "cloud-1", "10.250.0.10");
    let get = async |host: &str, port: u16| get_by_proxy(&one, host, port).await;
    until("the pod is known", async || {
        get("10.250.0.7", shop).await == "shop 200"
    })
    .await;
    assert_eq!(get("web.shop.pod", shop).await, "shop 200");
    until("the pod in the cloud is known", async || {
        get("10.250.0.9", at_cloud).await == "cloud 200"
    })
    .await;
    assert_eq!(get("cloud.shop.pod", at_cloud).await, "cloud 200");
    for (host, port) in [
        ("10.250.0.8", bank),
        ("web.bank.pod", bank),
        ("10.250.0.10", bank_at_cloud),
        ("cloud.bank.pod", bank_at_cloud),
        ("nobody.bank.pod", bank),
        ("edge-2", shop),
        ("10.250.0.99", bank),
    ] {
        let answer = get(host, port).await;
        assert!(answer.ends_with(" 403"), "{host}: {answer}");
    }

    // A second pod with the address: it leads to neither of them.
    cluster.pod("shop", "thief", "edge-1", "10.250.0.7");
    until("the address is nobody's", async || {
        get("10.250.0.7", shop).await.ends_with(" 403")
    })
    .await;
    // A pod at the edge neither takes the address of a pod in the cloud, nor lends its namespace.
    cluster.pod("shop", "thief", "edge-1", "10.250.0.10");
    until("the thief is known", async || {
        get("10.250.0.7", shop).await == "shop 200"
    })
    .await;
    assert!(get("10.250.0.10", bank_at_cloud).await.ends_with(" 403"));
}

fn pod(pod: &str, node: &str, address: &str) -> Pod {
    Pod {
        name: pod.into(),
        node: NodeName::parse(node).unwrap(),
        addresses: [address.parse().unwrap()].into(),
        ends_at: None,
    }
}

/// Has the nodes of a cluster in this world, whose pods `a/open` on `edge-1`, `a/closed` on `edge-2` and `a/cloud` in the cloud have addresses.
fn follow_pods(world: &World) -> PodsWriter {
    let nodes = world.nodes();
    nodes.follow_pods(&["10.250.0.0/16".parse().unwrap()]);
    let name = |node: &str| NodeName::parse(node).unwrap();
    let member = |node: &str| {
        let is_edge = node.starts_with("edge");
        (
            name(node),
            ClusterNode {
                is_edge,
                ..ClusterNode::default()
            },
        )
    };
    nodes.replace_cluster(["edge-1", "edge-2", "cloud-1"].map(member).into());
    let mut pods = nodes.pods(9).unwrap();
    let all = [
        pod("a/open", "edge-1", "10.250.0.1"),
        pod("a/closed", "edge-2", "10.250.0.2"),
        pod("a/cloud", "cloud-1", "10.250.0.3"),
    ];
    pods.replace(all.into()).unwrap();
    pods
}

#[tokio::test]
async fn anonymous_clients_do_not_learn_which_pods_exist() {
    let rules = json!({ "rules": [
        { "where": { "nodes": ["edge-2"] }, "then": "deny" },
        { "what": { "ports": [9100] }, "then": "allow" },
    ] });
    let rules: policy::Policy = serde_json::from_value(rules).unwrap();
    let rules = PolicyWriter::new(Some(Policy::compile(&rules).unwrap()));
    let world = World::build()
        .policy(rules.reader())
        .listener(anonymous("all", ListenerProtocol::Http))
        .listener(Listener {
            anonymous_ports: vec![9100],
            ..anonymous("some", ListenerProtocol::Http)
        })
        // Hosts that name no edge are ordinary ones here.
        .listener(Listener {
            anonymous: true,
            ..fixed("one", ListenerProtocol::Http, "edge-1", 9100)
        })
        .listener(listener("known", ListenerProtocol::Https));
    let world = Box::pin(world.start()).await;
    let _pods = follow_pods(&world);
    let get = async |at: &str, host: &str| -> Answer {
        let client = world.client_at(at);
        client.get(&format!("http://{host}:9100/")).await
    };
    let body = |answer: &Answer| {
        let mut body: Value = serde_json::from_str(&answer.text()).unwrap();
        body["trace"].take();
        body
    };
    for at in ["all", "some", "one"] {
        // A pod that the client may reach is reached, as far as there is a tunnel.
        assert_eq!(get(at, "10.250.0.1").await.status, 503, "{at}");
        let unknown = get(at, "10.250.0.9").await;
        assert_problem(&unknown, 401, "unauthenticated", "");
        for host in [
            "10.250.0.2",
            "closed.a.pod",
            "nobody.a.pod",
            "10.250.0.3",
            "cloud.a.pod",
        ] {
            let answer = get(at, host).await;
            assert_eq!(answer.status, unknown.status, "{at} {host}");
            assert_eq!(body(&answer), body(&unknown), "{at} {host}");
        }
    }
    let known = async |host: &str| {
        let client = world.client_at("known");
        client.get(&format!("https://{host}:9100/")).await
    };
    assert_problem(&known("closed.a.pod").await, 403, "forbidden", "");
    assert_problem(
        &known("nobody.a.pod").await,
        404,
        "node_unknown",
        "no running pod",
    );
}

/// Returns the answer to a ClientHello with this server name.
async fn hello(to: SocketAddr, name: &str) -> String {
    let hello = client_hello(&server_name_extension(&[name.as_bytes()]));
    answer_to(to, &hello).await
}

#[tokio::test]
async fn a_passthrough_listener_leads_to_pods_by_their_names() {
    need!(NEED);
    let (street, folder) = (SharedNetwork::new(), tempfile::tempdir().unwrap());
    let rules = folder.path().join("policy.yaml");
    let text = "rules: [{ where: { pod_namespaces: [shop] }, then: allow }]\n";
    fs::write(&rules, text).unwrap();
    let cluster = Cluster::at(HUB).await;
    // Each pod has a port of its own, but a listener has one.
    let port = 9443;
    let kubernetes = json!({
        "kubeconfig": cluster.kubeconfig(),
        "pod_networks": ["10.250.0.0/16"],
        "pods": {},
    });
    let configuration = format!(
        "listeners: [{{ name: through, protocol: passthrough, listen: \"127.0.0.1:0\", port: {port}, node: edge-1, anonymous: true }}]\n\
         kubernetes: {kubernetes}\npolicy: {}",
        rules.display()
    );
    let site = GatewayProcess::listening(&format!("{HUB}:0"), &configuration).await;
    let mut edge = Pods::at(&street, &site, "edge-1", "10.250.0.7,10.250.0.8,0.0.0.0/0").await;
    cluster.node_with_pods("edge-1", true, &["10.0.0.11"], &[]);
    cluster.node_with_pods("cloud-1", false, &["10.0.0.14"], &[]);
    edge.pod_at("10.250.0.7", port, "shop").await;
    edge.pod_at("10.250.0.8", port, "bank").await;
    cluster.pod("shop", "web", "edge-1", "10.250.0.7");
    cluster.pod("bank", "web", "edge-1", "10.250.0.8");
    cluster.pod("shop", "cloud", "cloud-1", "10.250.0.9");
    let to = site.listener.parse().unwrap();
    until("the pod is known", async || {
        hello(to, "web.shop.pod").await.ends_with("shop")
    })
    .await;
    // A client does not learn which pods exist.
    for name in [
        "web.bank.pod",
        "nobody.bank.pod",
        "nobody.shop.pod",
        "cloud.shop.pod",
    ] {
        assert_eq!(hello(to, name).await, RESET, "{name}");
    }
    assert_eq!(hello(to, "web.shop.example").await, UNRECOGNIZED);
    cluster.delete_pod("shop", "web");
    until("the pod is gone", async || {
        hello(to, "web.shop.pod").await == RESET
    })
    .await;
}

#[tokio::test]
async fn names_of_pods_are_names_at_passthrough_listeners_only_with_pod_objects() {
    let world = World::build().listener(Listener {
        port: Some(9100),
        ..anonymous("through", ListenerProtocol::Passthrough)
    });
    let world = Box::pin(world.start()).await;
    let to = world.listener("through");
    assert_eq!(hello(to, "open.a.pod").await, UNRECOGNIZED);
    let _pods = follow_pods(&world);
    for name in ["open.a.pod", "closed.a.pod", "nobody.a.pod", "cloud.a.pod"] {
        assert_eq!(hello(to, name).await, RESET, "{name}");
    }
}

#[tokio::test]
async fn certificates_have_names_of_pods_only_where_all_nodes_are_served() {
    let world = World::build()
        .listener(anonymous("web", ListenerProtocol::Https))
        .listener(fixed("one", ListenerProtocol::Https, "edge-1", 9100));
    let world = Box::pin(world.start()).await;
    let is_valid = async |at: &str, name: &str| {
        let handshake = world.client_at(at).tls_stream(name, &[]).await;
        handshake.is_ok()
    };
    assert!(
        !is_valid("web", "open.a.pod").await,
        "pods are not followed"
    );
    let _pods = follow_pods(&world);
    for name in ["open.a.pod", "nobody.a.pod"] {
        assert!(is_valid("web", name).await, "{name}");
        assert!(!is_valid("one", name).await, "{name}");
    }
}
