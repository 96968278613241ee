//! A gateway that follows the cluster's Node objects, with the rights of `examples/egress/rbac.yaml` and no others.
//!
//! Each test has a gateway of its own, beside that of the egress selector's way.

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use causeway_certs::{Ca, NodeName, OpenMode, Pin, Store};
use libtest_mimic::Trial;
use serde_json::{Value, json};

use crate::{
    full, state, trial,
    world::{
        World,
        causeway::BINARY,
        net::MACHINE,
        process::{PATIENCE, Process, Program, ToolOutput, until, within},
        world,
    },
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial(
            "nodes::a_gateway_follows_node_objects",
            a_gateway_follows_node_objects,
        ),
        trial(
            "nodes::an_api_outage_is_survived_and_reported",
            an_api_outage_is_survived_and_reported,
        ),
        trial(
            "nodes::an_api_server_that_is_away_at_the_start_is_waited_for",
            an_api_server_that_is_away_at_the_start_is_waited_for,
        ),
        trial(
            "nodes::rights_that_are_missing_are_named",
            rights_that_are_missing_are_named,
        ),
        trial(
            "nodes::a_claim_of_a_foreign_address_gets_no_traffic",
            a_claim_of_a_foreign_address_gets_no_traffic,
        ),
        trial(
            "nodes::revocations_and_pinned_keys_outlive_a_gateway_in_a_secret",
            revocations_and_pinned_keys_outlive_a_gateway_in_a_secret,
        ),
        trial(
            "nodes::thousands_of_nodes_are_known_in_seconds",
            thousands_of_nodes_are_known_in_seconds,
        ),
    ]
}

/// Longest acceptable delay for a user who labels a node.
const SOON: Duration = Duration::from_secs(2);

/// A gateway without edges, which follows the cluster.
struct Gateway {
    process: Process,
    folder: PathBuf,
}

/// Starts a gateway that follows the cluster with these rules, at an address that no other process needs.
pub(crate) fn watching(folder: &Path, (tunnel, admin): (u16, u16), rules: &Value) -> Process {
    let config = json!({
        "data_dir": folder.join("data"),
        "tunnel": { "listen": format!("127.0.0.1:{tunnel}") },
        "admin": { "listen": format!("127.0.0.1:{admin}") },
        "kubernetes": rules,
        // No edge connects to it.
        "timeouts": { "edges": "0s" },
        "listeners": [{
            "name": "it", "protocol": "connect",
            "listen": format!("unix:{}", folder.join("it.sock").display()),
        }],
    });
    started(folder, &config.to_string())
}

/// Starts a gateway of this configuration, whose data is in `data` of the folder.
pub(crate) fn started(folder: &Path, config: &str) -> Process {
    let data = folder.join("data");
    if !data.exists() {
        let ca = Program::new(BINARY).words("ca init --data-dir");
        ca.args([&data]).run().ok();
    }
    let file = folder.join("gateway.yaml");
    fs::write(&file, config).unwrap();
    let mut process = Program::new(BINARY)
        .words("gateway --config")
        .args([&file])
        .words("--log-filter info,causeway_k8s=debug")
        .start(&folder.join("log"));
    process.says("gateway ready");
    process
}

impl Gateway {
    fn start(world: &World, name: &str, kubeconfig: &str) -> Self {
        let folder = world.path(name);
        fs::create_dir_all(&folder).unwrap();
        let rules = json!({ "kubeconfig": kubeconfig, "pod_networks": ["10.244.0.0/16"] });
        let process = watching(&folder, (11262, 11265), &rules);
        Self { process, folder }
    }

    fn ask(path: &str) -> ToolOutput {
        let url = format!("http://127.0.0.1:11265{path}");
        Program::new("curl").words("-sS").args([url]).run()
    }

    fn is_ready() -> bool {
        Self::ask("/readyz").text() == "ready\n"
    }

    /// Nodes at the edge and elsewhere.
    fn nodes() -> (u64, u64) {
        let all = Self::ask("/metrics").ok().text();
        let of = |place: &str| {
            number(
                &all,
                &format!("causeway_gateway_cluster_nodes{{place=\"{place}\"}} "),
            )
        };
        (of("edge"), of("elsewhere"))
    }

    fn lost() -> u64 {
        let all = Self::ask("/metrics").ok().text();
        number(&all, "causeway_gateway_cluster_lost_timestamp_seconds ")
    }

    /// Returns the response to a CONNECT.
    fn connect(&self, target: &str) -> String {
        let mut wire = UnixStream::connect(self.folder.join("it.sock")).unwrap();
        wire.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(wire, "CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut answer = vec![0; 8 << 10];
        let read = wire.read(&mut answer).unwrap();
        String::from_utf8_lossy(&answer[..read]).into_owned()
    }
}

pub(crate) fn number(metrics: &str, name: &str) -> u64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(name));
    line.map_or(0, |value| value.parse().unwrap())
}

fn soon(what: &str, holds: impl FnMut() -> bool) {
    assert!(within(SOON, holds), "not soon: {what}");
}

pub(crate) fn node(world: &World, name: &str, edge: bool, addresses: &[&str]) {
    let labels = if edge {
        json!({ "causeway.io/edge": "true" })
    } else {
        json!({})
    };
    world.cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Node", "metadata": { "name": name, "labels": labels },
    }));
    let of = |address: &&str| json!({ "type": "InternalIP", "address": address });
    let addresses: Vec<Value> = addresses.iter().map(of).collect();
    let status = json!({ "status": { "addresses": addresses } });
    let patch = format!("patch node {name} --subresource=status --type=merge -p");
    let patch = world.cluster.kubectl(&patch).args([status.to_string()]);
    patch.run().ok();
}

pub(crate) fn delete(world: &World, names: &str) {
    let line = format!("delete node {names} --wait=false");
    world.cluster.kubectl(&line).run().ok();
}

/// A Node object that is removed with its test.
pub(crate) struct TemporaryNode<'a>(pub(crate) &'a World, pub(crate) &'static str);

impl Drop for TemporaryNode<'_> {
    fn drop(&mut self) {
        let line = format!("delete node {} --wait=false --ignore-not-found", self.1);
        self.0.cluster.kubectl(&line).run();
    }
}

fn a_gateway_follows_node_objects() {
    let world = world();
    let gateway = Gateway::start(&world, "follows", &world.cluster.account("egress"));
    until("the nodes are known", Gateway::is_ready);
    assert_eq!(Gateway::nodes(), (2, 1), "edge-1, edge-2 and cloud-1");

    // Other tests count nodes, also when this one fails.
    let new = TemporaryNode(&world, "new-1");
    node(&world, "new-1", true, &["10.1.9.1"]);
    soon("a new node is known", || Gateway::nodes() == (3, 1));
    // The object had no address at first.
    soon("the node is known by its address", || {
        let answer = gateway.connect("10.1.9.1:10250");
        answer.contains("new-1 is not connected")
    });
    world
        .cluster
        .kubectl("label node new-1 causeway.io/edge-")
        .run()
        .ok();
    soon("no edge serves it", || Gateway::nodes() == (2, 2));
    let answer = gateway.connect("new-1:10250");
    assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
    drop(new);
    soon("it is gone", || Gateway::nodes() == (2, 1));
}

fn an_api_outage_is_survived_and_reported() {
    let mut world = world();
    let gateway = Gateway::start(&world, "outage", &world.cluster.account("egress"));
    until("the nodes are known", Gateway::is_ready);
    assert_eq!(Gateway::lost(), 0);
    world.cluster.stop();
    until("the error is reported", || Gateway::lost() > 0);
    assert!(Gateway::is_ready(), "the known state is still served");
    let answer = gateway.connect("edge-1:10250");
    assert!(answer.contains("edge-1 is not connected"), "{answer}");
    world.cluster.restart();
    until("it is over", || Gateway::lost() == 0);
    assert_eq!(Gateway::nodes(), (2, 1));
    let content = gateway.process.output();
    assert!(
        content.contains("continues with the last known nodes"),
        "{content}"
    );
    assert!(content.contains("answers again"), "{content}");
}

fn an_api_server_that_is_away_at_the_start_is_waited_for() {
    let mut world = world();
    let account = world.cluster.account("egress");
    world.cluster.stop();
    let gateway = Gateway::start(&world, "away", &account);
    until("it reports why it waits", || {
        let why = Gateway::ask("/readyz").text();
        why.contains("the nodes of the cluster have not been loaded yet: ")
            && why.contains("refused")
    });
    let content = || gateway.process.output();
    until("a retry is not logged", || {
        content().matches("the cluster's API still fails").count() >= 2
    });
    assert!(Gateway::lost() > 0);
    world.cluster.restart();
    until("the nodes are known", Gateway::is_ready);
    assert_eq!(Gateway::nodes(), (2, 1));
    let content = content();
    let times = |what: &str| content.matches(what).count();
    assert_eq!(times("cannot be listed"), 1, "logged once: {content}");
    assert_eq!(times("answers again"), 1, "{content}");
    assert!(!content.contains("ERROR"), "{content}");
}

fn rights_that_are_missing_are_named() {
    let world = world();
    world.cluster.pki.client("nobody", "nobody-special", None);
    let kubeconfig = world.cluster.kubeconfig("nobody");
    let gateway = Gateway::start(&world, "rights", &kubeconfig);
    let wanted = "User \"nobody-special\" cannot list resource \"nodes\" in API group \"\" at the cluster scope";
    until("the missing right is named", || {
        Gateway::ask("/readyz").text().contains(wanted)
    });
    let content = gateway.process.output();
    assert!(content.contains("cannot list resource"), "{content}");
}

fn a_claim_of_a_foreign_address_gets_no_traffic() {
    let world = world();
    let address = world.nodes[0].site.address().to_string();
    let gateway = Gateway::start(&world, "claims", &world.cluster.account("egress"));
    until("the nodes are known", Gateway::is_ready);
    let target = format!("{address}:10250");
    let answer = gateway.connect(&target);
    assert!(answer.contains("edge-1 is not connected"), "{answer}");
    // Other tests need the address, also when this one fails.
    let evil = TemporaryNode(&world, "evil-1");
    let cloud = MACHINE.to_string();
    node(
        &world,
        "evil-1",
        true,
        &[&address, &cloud, "127.0.0.1", "169.254.169.254"],
    );
    let named = format!("{address} is an address of edge-1, which keeps it");
    until("an event on the Node names the other", || {
        let events = "get events.events.k8s.io -n default -o json";
        let events = world.cluster.kubectl(events).run().ok().text();
        let events: Value = serde_json::from_str(&events).unwrap();
        let events = events["items"].as_array().unwrap().clone();
        events.iter().any(|event| {
            event["reason"] == "AddressConflict"
                && event["regarding"]["name"] == "evil-1"
                && event["note"].as_str().unwrap().contains(&named)
        })
    });
    let content = gateway.process.output();
    assert!(
        content.contains("several nodes claim this address") && content.contains("edge-1, evil-1"),
        "{content}"
    );
    let answer = gateway.connect(&target);
    assert!(answer.contains("edge-1 is not connected"), "{answer}");
    let answer = gateway.connect(&format!("{cloud}:6443"));
    assert!(answer.starts_with("HTTP/1.1 404 "), "no edge's: {answer}");
    for own in ["127.0.0.1:10265", "169.254.169.254:80"] {
        let answer = gateway.connect(own);
        assert!(answer.starts_with("HTTP/1.1 404 "), "{own}: {answer}");
    }
    // By name all stay reachable.
    let answer = gateway.connect("edge-1:10250");
    assert!(answer.contains("edge-1 is not connected"), "{answer}");
    drop(evil);
}

/// Returns the answer of the admin listener at this port.
fn asked(port: u16, path: &str) -> String {
    let url = format!("http://127.0.0.1:{port}{path}");
    Program::new("curl").words("-sS").args([url]).run().text()
}

/// Runs a command of `causeway node` for this data directory.
fn node_command(words: &str, data: &Path) -> String {
    let order = Program::new(BINARY).words("node").words(words);
    order.words("--data-dir").args([data]).run().ok().text()
}

/// The entries of the state that gateways share.
fn shared_state(world: &World) -> Value {
    // The id of the content is no JSON.
    let parse = |(key, text): (String, String)| {
        let value = serde_json::from_str(&text);
        (key, value.unwrap_or(Value::String(text)))
    };
    state::stored_entries(world)
        .into_iter()
        .map(parse)
        .collect()
}

fn revocations_and_pinned_keys_outlive_a_gateway_in_a_secret() {
    let world = world();
    let account = world.cluster.account("egress");
    let rules = json!({ "kubeconfig": account, "state": "kube-system/causeway-state" });
    let begin = |name: &str, ports: (u16, u16)| {
        let folder = world.path(name);
        fs::create_dir_all(&folder).unwrap();
        (watching(&folder, ports, &rules), folder.join("data"))
    };
    let (first, data) = begin("state-1", (11262, 11265));
    until("it reports what is missing", || {
        let why = asked(11265, "/readyz");
        why.contains("causeway-state")
    });
    world.cluster.apply_example("state/rbac.yaml");
    until("the first gateway is ready", || {
        asked(11265, "/readyz") == "ready\n"
    });
    node_command("revoke edge-1 --unseen --reason stolen", &data);
    let other = Ca::create(&"pins.test".parse().unwrap()).unwrap();
    let (key, since) = (other.fingerprint(), 7);
    let node = NodeName::parse("edge-2").unwrap();
    let store = Store::open(&data, OpenMode::Existing).unwrap();
    let pins = [(node, 10250, Pin { key, since })];
    store.pins().record_new(&pins).unwrap();
    until("both are in the Secret", || {
        let state = shared_state(&world);
        state["revoked/edge-1"]["reason"] == "stolen" && state["pin/edge-2:10250"]["since"] == 7
    });
    drop(first);

    // The other gateways load the CA of the first one.
    for name in ["state-2", "state-3"] {
        Store::open(world.path(name).join("data"), OpenMode::Create).unwrap();
    }
    let (second, data) = begin("state-2", (11262, 11265));
    until("the second is ready", || {
        asked(11265, "/readyz") == "ready\n"
    });
    let known = asked(11265, "/api/v1/edges/edge-1");
    assert!(known.contains(r#""state":"revoked""#), "{known}");
    let pins = node_command("pins -o json", &data);
    assert!(pins.contains("edge-2") && pins.contains("10250"), "{pins}");

    // A node that is allowed again at one gateway is allowed at the others.
    let (third, _) = begin("state-3", (11263, 11266));
    let is_revoked = || asked(11266, "/api/v1/edges/edge-1").contains(r#""state":"revoked""#);
    until("the third edge has the state", is_revoked);
    node_command("allow edge-1", &data);
    until("the third gateway has the change", || !is_revoked());
    assert_eq!(shared_state(&world)["revoked/edge-1"], Value::Null);
    drop((second, third));
    state::delete_secrets(&world);
}

fn thousands_of_nodes_are_known_in_seconds() {
    let world = world();
    let full = full();
    let count: u64 = if full { 5_000 } else { 1_200 };
    let list: Vec<Value> = (0..count)
        .map(|number| {
            json!({
                "apiVersion": "v1", "kind": "Node",
                "metadata": { "name": format!("many-{number}"), "labels": { "causeway.io/edge": "true" } },
                "status": { "addresses": [{
                    "type": "InternalIP",
                    "address": format!("10.{}.{}.{}", 100 + number / 62_500, number / 250 % 250, number % 250 + 1),
                }] },
            })
        })
        .collect();
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": list });
    let create = world.cluster.kubectl("create --validate=false -f -");
    let create = create
        .input(list.to_string())
        .within(Duration::from_mins(5));
    create.run().ok();
    let gateway = Gateway::start(&world, "many", &world.cluster.account("egress"));
    let known = within(Duration::from_mins(if full { 1 } else { 5 }), || {
        Gateway::nodes() == (2 + count, 1)
    });
    assert!(known, "{:?} of {count}", Gateway::nodes());
    let status = fs::read_to_string(format!("/proc/{}/status", gateway.process.id())).unwrap();
    let memory = status
        .lines()
        .find(|line| line.starts_with("VmRSS"))
        .unwrap();
    println!("{count} nodes: {memory}");
    let kib: u64 = memory.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(!full || kib < 200 << 10, "{memory}");
    world
        .cluster
        .kubectl("delete nodes -l causeway.io/edge=true --field-selector metadata.name!=edge-1,metadata.name!=edge-2 --wait=false")
        .within(Duration::from_mins(5))
        .run()
        .ok();
    until("they are gone", || Gateway::nodes() == (2, 1));
}
