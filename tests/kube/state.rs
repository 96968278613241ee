//! The engine that stores the state of gateways in Secrets, at a real API server, with the rights of the examples.
//!
//! Each trial begins without Secrets. The engines are used without a gateway.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    time::{Duration, Instant},
};

use causeway_certs::{
    Entries, EntryChange, Fingerprint, NodeName, OpenMode, Pin, Revocation, SharedCa, Store,
    entry_text,
};
use causeway_gateway::shared_state::StateEngine;
use causeway_k8s::{SecretEngine, build_client};
use data_encoding::BASE64;
use libtest_mimic::Trial;
use serde_json::{Value, json};
use tokio::{
    runtime::Builder,
    time::{sleep, timeout},
};

use crate::{
    full,
    nodes::{started, watching},
    trial,
    world::{
        World,
        causeway::BINARY,
        process::{PATIENCE, Process, Program, ToolOutput, until},
        world,
    },
};

const EXAMPLE: &str = "state/rbac.yaml";

/// Ports of the gateway whose edges reconnect.
const TUNNEL: u16 = 13_262;
const ADMIN: u16 = 13_265;

/// Secret with the CA.
const CA_SECRET: &str = "causeway-ca";

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial(
            "state::gateways_share_entries_in_secrets",
            gateways_share_entries_in_secrets,
        ),
        trial(
            "state::revocations_of_an_earlier_version_are_moved",
            revocations_of_an_earlier_version_are_moved,
        ),
        trial(
            "state::a_deleted_or_replaced_secret_removes_no_entry",
            a_deleted_or_replaced_secret_removes_no_entry,
        ),
        trial(
            "state::an_operator_can_go_on_without_lost_entries",
            an_operator_can_go_on_without_lost_entries,
        ),
        trial(
            "state::changes_are_seen_after_a_restart_of_the_api_server",
            changes_are_seen_after_a_restart_of_the_api_server,
        ),
        trial(
            "state::the_state_moves_to_secrets_and_back",
            the_state_moves_to_secrets_and_back,
        ),
        trial(
            "state::a_rotation_is_at_all_gateways_and_at_replaced_ones",
            a_rotation_is_at_all_gateways_and_at_replaced_ones,
        ),
        trial(
            "state::edges_that_reconnect_write_nothing_to_secrets",
            edges_that_reconnect_write_nothing_to_secrets,
        ),
    ]
}

/// Names of the Secrets with the entries other than the CA.
pub(crate) fn secret_names() -> impl Iterator<Item = String> {
    let others = (1..16).map(|number| format!("causeway-state-{number}"));
    std::iter::once("causeway-state".to_owned()).chain(others)
}

/// Deletes the Secrets, so that the next test begins without them.
pub(crate) fn delete_secrets(world: &World) {
    let names = secret_names().collect::<Vec<_>>().join(" ");
    let delete = format!("delete -n kube-system secret {CA_SECRET} {names} --ignore-not-found");
    world.cluster.kubectl(&delete).run().ok();
}

/// The content of the Secret with the CA, as the entry `ca`.
fn stored_ca(world: &World) -> Option<String> {
    let line = format!("secret -n kube-system {CA_SECRET}");
    let secret = world.cluster.get(&line)?;
    let read = |name: &str| {
        let text = secret["data"][name].as_str()?;
        String::from_utf8(BASE64.decode(text.as_bytes()).unwrap()).ok()
    };
    SharedCa::entry_of_files(read).unwrap()
}

/// The entries in all Secrets, except the CA.
pub(crate) fn stored_entries(world: &World) -> BTreeMap<String, String> {
    let list = world.cluster.get("secret -n kube-system").unwrap();
    let ours: BTreeSet<String> = secret_names().collect();
    let items = list["items"].as_array().unwrap().iter();
    let ours = items.filter(|it| ours.contains(it["metadata"]["name"].as_str().unwrap()));
    let texts = ours.filter_map(|secret| secret["data"]["entries.json"].as_str());
    let texts = texts.map(|text| BASE64.decode(text.as_bytes()).unwrap());
    texts
        .flat_map(|text| serde_json::from_slice::<BTreeMap<String, String>>(&text).unwrap())
        .collect()
}

/// Runs a test with a function that makes engines with the rights of the examples.
fn with_engines(test: impl AsyncFnOnce(&mut World, &dyn Fn() -> SecretEngine)) {
    let mut world = world();
    delete_secrets(&world);
    let account = world.cluster.account("egress");
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = build_client(Some(account.as_ref())).await.unwrap();
        let engine =
            || SecretEngine::new(client.clone(), "kube-system", "causeway-state", CA_SECRET);
        test(&mut world, &engine).await;
    });
    delete_secrets(&world);
}

fn change(key: &str, expected: Option<&str>, value: Option<&str>) -> EntryChange {
    EntryChange {
        key: key.to_owned(),
        expected: expected.map(str::to_owned),
        value: value.map(str::to_owned),
    }
}

/// Waits until the engine has an entry with this value.
async fn until_loaded(engine: &SecretEngine, key: &str, value: Option<&str>) {
    let loaded = timeout(PATIENCE, async {
        loop {
            match engine.load().await {
                Ok(entries) if entries.get(key).map(String::as_str) == value => return,
                Ok(_) => engine.changed().await,
                Err(why) => {
                    eprintln!("{why}");
                    sleep(Duration::from_millis(200)).await;
                }
            }
        }
    });
    loaded
        .await
        .unwrap_or_else(|_| panic!("{key} is not {value:?}"));
}

fn gateways_share_entries_in_secrets() {
    with_engines(async |world, engine| {
        let (first, second) = (engine(), engine());
        let why = first.load().await.unwrap_err().to_string();
        assert!(
            why.contains("causeway-state") && why.contains("forbidden"),
            "{why}"
        );
        world.cluster.apply_example(EXAMPLE);
        let loaded = async |engine: &SecretEngine| {
            while engine.load().await.is_err() {
                sleep(Duration::from_millis(100)).await;
            }
            engine.load().await
        };
        let (one, two) = tokio::join!(loaded(&first), loaded(&second));
        assert_eq!((one.unwrap(), two.unwrap()), Default::default());

        // One entry: one of the two wins. Two entries of one Secret: both are written.
        let write = |engine, value, port: u16| {
            let changes = vec![
                change("node/edge-1", None, Some(value)),
                change(&format!("pin/edge-1:{port}"), None, Some(value)),
            ];
            SecretEngine::write(engine, changes)
        };
        let (one, two) = tokio::join!(write(&first, "1", 1), write(&second, "2", 2));
        let (one, two) = (one.unwrap(), two.unwrap());
        assert_eq!([one, two.clone()].concat(), ["node/edge-1"]);
        let winner = if two.is_empty() { "2" } else { "1" };
        for engine in [&first, &second] {
            let current = engine.get("node/edge-1").await.unwrap();
            assert_eq!(current.as_deref(), Some(winner));
            until_loaded(engine, "node/edge-1", Some(winner)).await;
            until_loaded(engine, "pin/edge-1:1", Some("1")).await;
            until_loaded(engine, "pin/edge-1:2", Some("2")).await;
        }

        // A watch brings changes, about as fast as the API server writes them.
        let mut slowest = Duration::ZERO;
        for number in 0..20 {
            let key = format!("revoked/node-{number}");
            let conflicts = first.write(vec![change(&key, None, Some("1"))]).await;
            assert!(conflicts.unwrap().is_empty());
            let written = Instant::now();
            until_loaded(&second, &key, Some("1")).await;
            slowest = slowest.max(written.elapsed());
        }
        println!("counted: a change is loaded by another gateway within {slowest:?}");
        assert!(slowest < Duration::from_secs(1), "{slowest:?}");
        if full() {
            let begun = requests(world);
            sleep(Duration::from_mins(2)).await;
            let ended = requests(world);
            let count = |key: &String| ended[key] - begun.get(key).unwrap_or(&0);
            let counts: Vec<_> = ended.keys().map(|verb| (verb, count(verb))).collect();
            println!("counted: requests for Secrets in two minutes, two idle gateways: {counts:?}");
        }
        assert_eq!(stored_entries(world), second.load().await.unwrap());
    });
}

/// Requests for Secrets by verb. A watch is counted when it ends.
pub(crate) fn requests(world: &World) -> BTreeMap<String, u64> {
    let metrics = world
        .cluster
        .kubectl("get --raw /metrics")
        .run()
        .ok()
        .text();
    let mut counts = BTreeMap::new();
    let lines = metrics.lines().filter(|line| {
        line.starts_with("apiserver_request_total{") && line.contains(r#"resource="secrets""#)
    });
    for line in lines {
        let (_, verb) = line.split_once(r#"verb=""#).unwrap();
        let (verb, rest) = verb.split_once('"').unwrap();
        let (_, count) = rest.rsplit_once(' ').unwrap();
        *counts.entry(verb.to_owned()).or_default() += count.parse::<u64>().unwrap();
    }
    counts
}

/// Returns the number of writes of Secrets since the start of the API server.
pub(crate) fn writes(world: &World) -> u64 {
    let requests = requests(world);
    let writes = ["POST", "PUT", "PATCH", "APPLY", "DELETE"];
    let counts = writes.map(|verb| requests.get(verb).copied().unwrap_or_default());
    counts.iter().sum()
}

fn revocations_of_an_earlier_version_are_moved() {
    with_engines(async |world, engine| {
        let key = "5a".repeat(32).parse::<Fingerprint>().unwrap();
        let earlier = json!({
            "revoked": { "edge-1": { "at": 7, "reason": "stolen" }, "edge-2": { "at": 8, "reason": "lost" } },
            "pins": { "edge-3:10250": { "key": key, "since": 9 } },
        });
        // As a gateway wrote it, and not `kubectl apply`, which would remove it at the next time.
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
            "metadata": { "name": "causeway-state", "namespace": "kube-system" },
            "data": { "state.json": BASE64.encode(earlier.to_string().as_bytes()) },
        });
        let create = world.cluster.kubectl("create -f -");
        create.input(secret.to_string()).run().ok();
        world.cluster.apply_example(EXAMPLE);
        let revocation = |at, reason: &str| {
            let reason = reason.to_owned();
            entry_text(&Revocation {
                at,
                reason,
                other: causeway_certs::OtherFields::new(),
            })
        };
        let entries: Entries = [
            ("revoked/edge-1", revocation(7, "stolen")),
            ("revoked/edge-2", revocation(8, "lost")),
            ("pin/edge-3:10250", entry_text(&Pin { key, since: 9 })),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into();
        let (first, second) = (engine(), engine());
        let (one, two) = tokio::join!(first.load(), second.load());
        assert_eq!(one.unwrap(), entries);
        assert_eq!(two.unwrap(), entries);
        let secret = world.cluster.get("secret -n kube-system causeway-state");
        let left = secret.unwrap()["data"]["state.json"].as_str().map(|text| {
            let text = BASE64.decode(text.as_bytes()).unwrap();
            String::from_utf8(text).unwrap()
        });
        assert!(!left.unwrap().contains("stolen"));
    });
}

fn a_deleted_or_replaced_secret_removes_no_entry() {
    with_engines(async |world, engine| {
        world.cluster.apply_example(EXAMPLE);
        let gateway = engine();
        gateway.load().await.unwrap();
        // Of edge-1 is causeway-state-15.
        let keys = [
            "version",
            "revoked/edge-1",
            "revoked/edge-2",
            "token/0123456789ab",
        ];
        let changes = keys.map(|key| change(key, None, Some("1"))).to_vec();
        assert!(gateway.write(changes).await.unwrap().is_empty());
        let entries = gateway.load().await.unwrap();
        assert_eq!(entries.len(), keys.len());

        world.cluster.apply_example(EXAMPLE);
        assert_eq!(
            stored_entries(world),
            entries,
            "to apply again changes nothing"
        );

        let delete = "delete -n kube-system secret causeway-state-15";
        world.cluster.kubectl(delete).run().ok();
        let missing = timeout(PATIENCE, async {
            loop {
                match gateway.load().await {
                    Ok(loaded) => assert_eq!(loaded, entries),
                    Err(why) => return why.to_string(),
                }
                gateway.changed().await;
            }
        });
        let why = missing.await.unwrap();
        assert!(
            why.contains("causeway-state-15: it does not exist; apply"),
            "{why}"
        );
        world.cluster.apply_example(EXAMPLE);
        let new = engine().load().await.unwrap_err().to_string();
        assert!(new.contains("patch secret causeway-state-15 -p"), "{new}");
        until_loaded(&gateway, "revoked/edge-1", Some("1")).await;
        assert_eq!(stored_entries(world), entries, "written back");

        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/state/rbac.yaml");
        let replace = world.cluster.kubectl("replace -f").args([file]);
        replace.run().ok();
        assert!(stored_entries(world).is_empty());
        let written_back = timeout(PATIENCE, async {
            while stored_entries(world) != entries {
                gateway.changed().await;
                assert_eq!(gateway.load().await.unwrap(), entries);
            }
        });
        written_back.await.unwrap();
    });
}

fn an_operator_can_go_on_without_lost_entries() {
    with_engines(async |world, engine| {
        world.cluster.apply_example(EXAMPLE);
        let gateway = engine();
        gateway.load().await.unwrap();
        let keys = ["version", "revoked/edge-1"];
        let changes = keys.map(|key| change(key, None, Some("1"))).to_vec();
        assert!(gateway.write(changes).await.unwrap().is_empty());
        // No gateway is left that has the state.
        drop(gateway);
        let delete = "delete -n kube-system secret causeway-state-15";
        world.cluster.kubectl(delete).run().ok();
        world.cluster.apply_example(EXAMPLE);
        let new = engine();
        let why = new.load().await.unwrap_err().to_string();
        let (_, command) = why.split_once("kubectl ").unwrap();
        let (command, patch) = command.split_once(" -p ").unwrap();
        let patch = patch.trim_matches('\'');
        let command = world.cluster.kubectl(command).args(["-p", patch]);
        command.run().ok();
        let left = new.load().await.unwrap();
        assert!(left.keys().eq(["version"]), "{left:?}");
    });
}

fn changes_are_seen_after_a_restart_of_the_api_server() {
    with_engines(async |world, engine| {
        world.cluster.apply_example(EXAMPLE);
        let gateway = engine();
        gateway.load().await.unwrap();
        world.cluster.stop();
        let failed = timeout(PATIENCE, async {
            while gateway.load().await.is_ok() {
                gateway.changed().await;
            }
        });
        failed.await.unwrap();
        let why = gateway.get("version").await.unwrap_err().to_string();
        assert!(
            why.starts_with("Secret kube-system/causeway-state: "),
            "{why}"
        );
        assert!(
            gateway
                .write(vec![change("version", None, Some("1"))])
                .await
                .is_err()
        );
        world.cluster.restart();
        let other = engine();
        other.load().await.unwrap();
        let conflicts = other.write(vec![change("version", None, Some("2"))]).await;
        assert!(conflicts.unwrap().is_empty());
        until_loaded(&gateway, "version", Some("2")).await;
        // The watches of both run again.
        sleep(Duration::from_secs(6)).await;
        let conflicts = gateway
            .write(vec![change("version", Some("2"), None)])
            .await;
        assert!(conflicts.unwrap().is_empty());
        let written = Instant::now();
        until_loaded(&other, "version", None).await;
        assert!(
            written.elapsed() < Duration::from_secs(1),
            "{:?}",
            written.elapsed()
        );
    });
}

/// Runs `state migrate` with these configurations in a folder.
fn migrate(folder: &Path, from: &str, to: &str) -> ToolOutput {
    let migrate = Program::new(BINARY).words("state migrate --from");
    let migrate = migrate.args([folder.join(from)]).words("--to");
    migrate.args([folder.join(to)]).run()
}

/// Makes a data directory with an entry of each kind.
fn make_state(data: &Path) {
    for line in [
        "ca init",
        "token create --node edge-1",
        "node add edge-2 --pool north",
        "node revoke edge-3 --unseen --reason lost",
    ] {
        let order = Program::new(BINARY).words(line).words("--data-dir");
        order.args([data]).run().ok();
    }
    let key = Fingerprint::digest(b"the key of an app");
    let pin = (
        NodeName::parse("edge-2").unwrap(),
        10250,
        Pin { key, since: 9 },
    );
    let store = Store::open(data, OpenMode::Existing).unwrap();
    store.pins().record_new(&[pin]).unwrap();
}

fn the_state_moves_to_secrets_and_back() {
    let world = world();
    delete_secrets(&world);
    let kubeconfig = world.cluster.account("egress");
    world.cluster.apply_example(EXAMPLE);
    let folder = world.path("migrated");
    fs::create_dir_all(&folder).unwrap();
    let (data, back) = (folder.join("data"), folder.join("back"));
    make_state(&data);
    let kubernetes = json!({ "kubeconfig": kubeconfig, "state": "kube-system/causeway-state" });
    for (file, configuration) in [
        ("from.yaml", json!({ "data_dir": data })),
        (
            "cluster.yaml",
            json!({ "data_dir": folder.join("unused"), "kubernetes": kubernetes }),
        ),
        ("back.yaml", json!({ "data_dir": back })),
    ] {
        fs::write(folder.join(file), configuration.to_string()).unwrap();
    }

    // A repeated command changes nothing.
    for _ in 0..2 {
        let copied = migrate(&folder, "from.yaml", "cluster.yaml").ok();
        let expected = "copied 2 nodes, 1 revocations, 1 join tokens, 1 pinned keys and the CA";
        assert!(copied.text().contains(expected), "{}", copied.text());
    }
    let entries = |data: &Path| {
        let store = Store::open(data, OpenMode::Existing).unwrap();
        store.entries().unwrap()
    };
    let mut expected = entries(&data);
    assert_eq!(stored_ca(&world), expected.remove("ca"));
    let stored = stored_entries(&world);
    assert!(stored.keys().eq(expected.keys()), "{stored:?}");

    migrate(&folder, "cluster.yaml", "back.yaml").ok();
    assert_eq!(entries(&back), entries(&data));

    // A state that differs is not overwritten.
    let change = Program::new(BINARY).words("node add edge-2 --pool south --data-dir");
    change.args([&data]).run().ok();
    let refused = migrate(&folder, "from.yaml", "cluster.yaml").failed();
    assert!(refused.contains("has another state already"), "{refused}");
    assert_eq!(stored_entries(&world), stored);
    delete_secrets(&world);
}

/// Runs a step of the rotation at one of two gateways, whose Secret with the CA is empty at the beginning.
fn a_rotation_is_at_all_gateways_and_at_replaced_ones() {
    let world = world();
    delete_secrets(&world);
    let kubeconfig = world.cluster.account("egress");
    world.cluster.apply_example(EXAMPLE);
    let rules = json!({ "kubeconfig": kubeconfig, "state": "kube-system/causeway-state" });
    let begin = |name: &str, ports: (u16, u16)| {
        let folder = world.path(name);
        fs::create_dir_all(&folder).unwrap();
        let gateway = watching(&folder, ports, &rules);
        (gateway, folder.join("data"))
    };
    let ca = |data: &Path| {
        let store = Store::open(data, OpenMode::Existing).unwrap();
        store.shared().unwrap().to_entry().ok()
    };
    let (first, here) = begin("rotated-1", (TUNNEL, ADMIN));
    until("the CA of the first gateway is stored", || {
        stored_ca(&world) == ca(&here)
    });
    // It has no CA of its own.
    Store::open(world.path("rotated-2").join("data"), OpenMode::Create).unwrap();
    let (second, there) = begin("rotated-2", (TUNNEL + 1, ADMIN + 1));
    assert_eq!(ca(&there), ca(&here));
    let prepare = Program::new(BINARY).words("ca rotate prepare --data-dir");
    prepare.args([&there]).run().ok();
    assert_eq!(stored_ca(&world), ca(&there), "as soon as the command ends");
    until("the first gateway has the step", || ca(&here) == ca(&there));
    let rotated = ca(&here);
    drop((first, second));
    fs::remove_dir_all(&there).unwrap();
    Store::open(&there, OpenMode::Create).unwrap();
    let (replaced, there) = begin("rotated-2", (TUNNEL + 1, ADMIN + 1));
    assert_eq!(ca(&there), rotated);
    drop(replaced);
    delete_secrets(&world);
}

/// Starts an edge that joins by a token.
fn join(folder: &Path, node: &str) -> Process {
    let create = Program::new(BINARY).words("token create --node");
    let create = create.args([node, "--data-dir"]);
    let token = create.args([folder.join("data")]).run().ok().text();
    let edge = Program::new(BINARY).words("edge --admin-listen 127.0.0.1:0 --data-dir");
    let edge = edge.args([folder.join(node)]).args(["--gateway"]);
    let edge = edge.args([format!("127.0.0.1:{TUNNEL}"), "--join".to_owned()]);
    let edge = edge.args([token.trim(), "--ports", "{9100: {}}"]);
    edge.start(&folder.join(format!("{node}.log")))
}

/// Returns the number of nodes that are connected to the gateway.
fn connected() -> usize {
    let url = format!("http://127.0.0.1:{ADMIN}/api/v1/edges");
    let listed = Program::new("curl").words("-sS").args([url]).run();
    let nodes: Vec<Value> = serde_json::from_slice(&listed.stdout).unwrap_or_default();
    let connected = nodes.iter().filter(|node| node["state"] == "connected");
    connected.count()
}

/// Each reconnection is one after the death of the gateway. With `CAUSEWAY_TEST_FULL=1` there are 1,000 of them.
fn edges_that_reconnect_write_nothing_to_secrets() {
    const EDGES: usize = 10;
    let rounds = if full() { 100 } else { 5 };
    let world = world();
    delete_secrets(&world);
    let kubeconfig = world.cluster.account("egress");
    world.cluster.apply_example(EXAMPLE);
    let folder = world.path("reconnects");
    fs::create_dir_all(&folder).unwrap();
    let config = json!({
        "data_dir": folder.join("data"),
        "tunnel": { "listen": format!("127.0.0.1:{TUNNEL}") },
        "admin": { "listen": format!("127.0.0.1:{ADMIN}") },
        "timeouts": { "edges": "0s" },
        "kubernetes": { "kubeconfig": kubeconfig, "state": "kube-system/causeway-state" },
    });
    let mut gateway = started(&folder, &config.to_string());
    let names = (0..EDGES).map(|number| format!("reconnecting-{number}"));
    let edges: Vec<_> = names.map(|node| join(&folder, &node)).collect();
    until("all edges are connected", || connected() == EDGES);
    until("all nodes are in the Secrets", || {
        let stored = stored_entries(&world);
        let nodes = stored.keys().filter(|key| key.starts_with("node/"));
        nodes.count() == EDGES
    });

    let before = writes(&world);
    for _ in 0..rounds {
        drop(gateway);
        gateway = started(&folder, &config.to_string());
        until("all edges are connected again", || connected() == EDGES);
    }
    let written = writes(&world) - before;
    println!(
        "counted: writes of Secrets while edges connected again {} times: {written}",
        rounds * EDGES
    );
    assert_eq!(written, 0);
    drop((edges, gateway));
    delete_secrets(&world);
}
