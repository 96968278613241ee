//! A node whose uplink is cut keeps its pods: a real kube-controller-manager judges nodes by their Leases, and real kubelets are
//! asked for their health.
//!
//! Both nodes are in one pool and in a network that they share. The gateway has the rights of `deploy/components/heartbeats` and of
//! `examples/api-cache`, and no others.

use std::{
    collections::BTreeSet,
    fs,
    net::Ipv4Addr,
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

use libtest_mimic::Trial;
use serde_json::{Value, json};

use crate::{
    full, nodes, trial,
    world::{
        World,
        causeway::BINARY,
        net::{CLOUD, neighbours},
        node::{Node, Serving},
        process::{PATIENCE, Process, Program, until, within},
        world,
    },
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial(
        "heartbeats::a_cut_off_node_stays_ready_while_its_kubelet_lives",
        a_cut_off_node_stays_ready_while_its_kubelet_lives,
    )]
}

const TUNNEL: u16 = 12262;
const ADMIN: u16 = 12265;
const EDGE_ADMIN: u16 = 12266;
/// Time after the cut within which the first delegated heartbeat arrives.
const FIRST: Duration = Duration::from_secs(25);
/// Time after which kube-controller-manager makes a node without renewals `NotReady`, and some more.
const BEYOND_GRACE: Duration = Duration::from_secs(70);
/// Time after its return within which nothing of the delegation is left: an interval of the kubelet, and one of the gateway.
const UNDONE: Duration = Duration::from_secs(25);
const SECOND: Duration = Duration::from_secs(1);

/// The gateway, the edges, and the controller that judges nodes.
struct Scene {
    _gateway: Process,
    _edges: [Process; 2],
    _controllers: Process,
}

impl Scene {
    fn start(world: &World) -> Self {
        let folder = world.path("heartbeats");
        fs::create_dir_all(&folder).unwrap();
        let at = [1, 2].map(|number| Ipv4Addr::new(10, 2, 0, number));
        let [one, two] = &world.nodes;
        neighbours(&[(&one.site, at[0]), (&two.site, at[1])]);
        for node in &world.nodes {
            let line = format!(
                "label --overwrite node {} apps.openyurt.io/nodepool=north",
                node.name
            );
            world.cluster.kubectl(&line).run().ok();
        }
        let gateway = gateway(world, &folder);
        let edges = [0, 1].map(|number| edge(&folder, &world.nodes[number], at[number]));
        for node in &world.nodes {
            until("both members know each other", || {
                let status = status(node);
                let members = status["api_cache"]["members"].as_array();
                members.is_some_and(|members| members.len() == 2)
                    && status["heartbeat"]["kubelet"] == "alive"
            });
            // The API server makes the namespace of Leases some time after its start.
            let lease = format!("lease -n kube-node-lease {}", node.name);
            let found = within(2 * PATIENCE, || world.cluster.get(&lease).is_some());
            assert!(found, "the kubelet of {} has no Lease", node.name);
        }
        Self {
            _controllers: lifecycle(world, &folder),
            _gateway: gateway,
            _edges: edges,
        }
    }
}

fn gateway(world: &World, folder: &Path) -> Process {
    let kubeconfig = world.cluster.account("api-cache");
    let rights =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/components/heartbeats/rbac.yaml");
    let rights = fs::read_to_string(rights).unwrap();
    let rights = rights.replace("namespace: causeway }", "namespace: kube-system }");
    let apply = world.cluster.kubectl("apply -f -");
    apply.input(rights).run().ok();
    let config = json!({
        "data_dir": folder.join("data"),
        "tunnel": {
            "listen": format!("{CLOUD}:{TUNNEL}"), "advertise": [format!("{CLOUD}:{TUNNEL}")],
        },
        "admin": { "listen": format!("127.0.0.1:{ADMIN}") },
        "kubernetes": { "kubeconfig": kubeconfig, "heartbeats": { "enabled": true } },
        "api_cache": { "resources": ["v1/services"] },
        "timeouts": { "edges": "0s" },
        "listeners": [{
            "name": "it", "protocol": "connect",
            "listen": format!("unix:{}", folder.join("it.sock").display()),
        }],
    });
    nodes::started(folder, &config.to_string())
}

fn edge(folder: &Path, node: &Node, at: Ipv4Addr) -> Process {
    let create =
        Program::new(BINARY).words(&format!("token create --node {} --data-dir", node.name));
    let token = create.args([folder.join("data")]).run().ok().text();
    let own = folder.join(&node.name);
    fs::create_dir_all(&own).unwrap();
    let site = format!("{at}:12271");
    let config = json!({
        "data_dir": own.join("data"),
        "gateways": [format!("{CLOUD}:{TUNNEL}")],
        "admin": { "listen": format!("127.0.0.1:{EDGE_ADMIN}") },
        "api_cache": {
            "listen": "127.0.0.1:12270", "resources": ["v1/services"],
            "members": { "listen": site, "addresses": [site] },
        },
        "heartbeat": {},
    });
    let file = own.join("edge.yaml");
    fs::write(&file, config.to_string()).unwrap();
    let edge = node.site.at(BINARY).words("edge --config").args([file]);
    let edge = edge.env("CAUSEWAY_JOIN", token.trim());
    let mut edge = edge.start(&own.join("edge.log"));
    edge.says("tunnel registered");
    edge
}

/// The controllers that judge nodes and evict pods, with their defaults.
fn lifecycle(world: &World, folder: &Path) -> Process {
    let cluster = &world.cluster;
    Program::new(cluster.assets.join("kube-controller-manager"))
        .args([
            format!("--kubeconfig={}", cluster.pki.path("admin.kubeconfig")),
            "--controllers=node-lifecycle-controller,taint-eviction-controller".to_owned(),
        ])
        .words("--leader-elect=false --secure-port=0")
        .start(&folder.join("lifecycle.log"))
}

fn status(node: &Node) -> Value {
    let url = format!("http://127.0.0.1:{EDGE_ADMIN}/status");
    let asked = node.site.at("curl").words("-q -sS").args([url]).run();
    serde_json::from_slice(&asked.stdout).unwrap_or_default()
}

/// Facts of a node that the cluster has.
fn facts(world: &World, node: &str) -> BTreeSet<&'static str> {
    let object = world.cluster.get(&format!("node {node}")).unwrap();
    let lease = format!("lease -n kube-node-lease {node}");
    let lease = world.cluster.get(&lease).unwrap();
    let all = |list: &Value, key: &str, value: &str| {
        let list = list.as_array().map_or(&[][..], Vec::as_slice);
        list.iter().any(|one| one[key] == value)
    };
    let (spec, status) = (&object["spec"], &object["status"]);
    let conditions = status["conditions"].as_array().unwrap();
    let ready = conditions.iter().find(|one| one["type"] == "Ready");
    let annotations = &object["metadata"]["annotations"];
    let delegated = &lease["metadata"]["annotations"]["openyurt.io/delegate-heartbeat"];
    let facts = [
        ("ready", ready.unwrap()["status"] == "True"),
        (
            "tainted",
            all(&spec["taints"], "key", "node.openyurt.io/unschedulable"),
        ),
        ("evicts", all(&spec["taints"], "effect", "NoExecute")),
        (
            "marked",
            annotations["causeway.io/delegated-heartbeat"].is_string(),
        ),
        ("delegated", *delegated == "true"),
    ];
    let holding = facts.into_iter().filter(|(_, holds)| *holds);
    holding.map(|(fact, _)| fact).collect()
}

fn pod(world: &World) -> Value {
    let pod = world.cluster.get("pod -n a ticker").unwrap();
    assert!(pod["metadata"]["deletionTimestamp"].is_null(), "{pod:#}");
    pod["metadata"]["uid"].clone()
}

fn a_cut_off_node_stays_ready_while_its_kubelet_lives() {
    let mut world = world();
    let scene = Scene::start(&world);
    let name = world.nodes[0].name.clone();
    let is = |world: &World, fact: &str| facts(world, &name).contains(fact);
    let before = pod(&world);
    world.nodes[0].site.cut();
    let cut = Instant::now();
    until("the first delegated heartbeat arrives", || {
        is(&world, "delegated")
    });
    let first = cut.elapsed();
    println!("first delegated heartbeat {first:?} after the cut");
    assert!(!full() || first < FIRST, "{first:?}");
    until("the node is marked", || is(&world, "marked"));
    while cut.elapsed() < BEYOND_GRACE {
        let now = facts(&world, &name);
        assert!(now.contains("ready") && !now.contains("evicts"), "{now:?}");
        // The pace of the looking.
        sleep(SECOND);
    }
    until("the node is tainted", || is(&world, "tainted"));
    let events = world.cluster.get("events -n default").unwrap();
    let events = events.to_string();
    let note = "heartbeat delegated through edge-2";
    assert!(events.contains(note), "{events}");
    assert_eq!(pod(&world), before);

    world.nodes[0].site.mend();
    let back = Instant::now();
    let ready = BTreeSet::from(["ready"]);
    let undone = within(UNDONE, || facts(&world, &name) == ready);
    assert!(undone, "{:?}", facts(&world, &name));
    println!("nothing is left {:?} after the return", back.elapsed());
    dies_while_cut_off(&mut world, &name);
    drop(scene);
}

/// A kubelet that dies on a cut-off node does not keep it.
fn dies_while_cut_off(world: &mut World, name: &str) {
    until("the edge is back", || {
        status(&world.nodes[0])["state"] == "connected"
    });
    world.nodes[0].site.cut();
    until("its heartbeats are delegated", || {
        facts(world, name).contains("delegated")
    });
    world.nodes[0].kubelet_dies();
    let lost = within(2 * PATIENCE, || !facts(world, name).contains("ready"));
    assert!(lost, "its heartbeats went on");
    let World { cluster, nodes, .. } = world;
    nodes[0].site.mend();
    nodes[0].serves(cluster, Serving::Signed);
    let ready = BTreeSet::from(["ready"]);
    let whole = within(2 * PATIENCE, || facts(world, name) == ready);
    assert!(whole, "{:?}", facts(world, name));
}
