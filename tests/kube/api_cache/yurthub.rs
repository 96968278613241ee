//! `YurtHub`s of `OpenYurt`, on the nodes of both edges: their clients see the state of the API server, which the hubs read
//! from the pool's edges.

use std::{fs, time::Duration};

use serde_json::{Value, json};

use super::{
    scene::{Edge, POOL, Scene},
    views::Readers,
};
use crate::world::{
    net::CLOUD,
    process::{Process, until, within},
    yurthub,
};

/// Address at which clients of a YurtHub send requests.
const PROXY: &str = "http://127.0.0.1:10261";
/// URL of a YurtHub's health check.
const HEALTH: &str = "http://127.0.0.1:10267/v1/healthz";
/// Maximum time that a YurtHub takes to start: it waits for two certificates and asks for each every few seconds.
const STARTS: Duration = Duration::from_secs(90);
/// Interval at which gateways check, and an allowance.
const LOOKS: Duration = Duration::from_secs(30);

/// Returns the data published to the YurtHubs of the pool.
fn told(scene: &Scene) -> Value {
    let map = scene
        .cluster
        .get(&format!("-n kube-system configmap leader-hub-{POOL}"));
    map.map(|map| map["data"].clone()).unwrap_or_default()
}

/// A YurtHub on an edge's node, which asks the cluster for its certificates.
fn hub(edge: &Edge, bootstrap: &str) -> Process {
    let folder = edge.folder.join("hub");
    // Certificates that a failed test left are of another run.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let path = |name: &str| folder.join(name).display().to_string();
    edge.part("yurthub")
        .args([
            format!("--node-name={}", edge.name),
            format!("--node-ip={}", edge.site.address()),
            format!("--nodepool-name={POOL}"),
            format!("--server-addr=https://{CLOUD}:6443"),
            format!("--bootstrap-file={bootstrap}"),
            format!("--root-dir={}", path("root")),
            format!("--disk-cache-path={}", path("cache")),
        ])
        .words("--working-mode=edge --enable-dummy-if=false --enable-resource-filter=false --v=2")
        .start(&edge.folder.join("hub.log"))
}

fn is_up(edge: &Edge) -> bool {
    let asked = edge.site.at("curl").words("-q -sS --max-time 2 --fail");
    asked.args([HEALTH]).run().code == Some(0)
}

/// Whether YurtHubs know both edges.
fn both_edges_are_listed(scene: &Scene) -> bool {
    let told = told(scene);
    let leaders = told["leaders"].as_str().unwrap_or_default();
    let mut edges = scene.edges.iter();
    edges.all(|edge| leaders.contains(&format!("causeway:{}/", edge.name)))
}

/// YurtHubs on all nodes, when they have their certificates.
fn start(scene: &Scene) -> Vec<Process> {
    yurthub::create_objects(&scene.cluster);
    if !within(LOOKS, || both_edges_are_listed(scene)) {
        scene.fail(&format!("hubs get {:#}", told(scene)));
    }
    let server = format!("https://{CLOUD}:6443");
    let bootstrap = yurthub::bootstrap(&scene.cluster, &server);
    let edges = scene.edges.iter();
    let hubs: Vec<Process> = edges.map(|edge| hub(edge, &bootstrap)).collect();
    let up = within(STARTS, || {
        yurthub::approve_requests(&scene.cluster);
        scene.edges.iter().all(is_up)
    });
    assert!(up, "{}", words(&hubs));
    hubs
}

fn words(hubs: &[Process]) -> String {
    let message = hubs.iter().map(Process::output);
    message.collect::<Vec<_>>().join("\n---\n")
}

pub(super) fn read_at_the_pools_edges_through_cuts(scene: &mut Scene) {
    let hubs = start(scene);
    let mut views = Readers::default();
    views.start_at(&scene.edges, PROXY);
    let mut agree = |scene: &Scene, when: &str| {
        if let Err(why) = views.agree(&scene.cluster, |_| true) {
            scene.fail(&format!("{when}: {why}\n{}", words(&hubs)));
        }
    };
    scene.change(40);
    agree(scene, "at first");
    // The hub on the leader's node reads from an edge as well.
    scene.until("both hubs watch both resources at edges", |scene| {
        scene.edges.iter().map(connections_of_hubs).sum::<usize>() >= 4
    });

    // A hub without a path to the cloud sees its changes through the other edge.
    let leader = scene.leader().expect("one leads");
    scene.edges[leader].site.cut();
    scene.change(40);
    agree(scene, "with the leader's uplink cut");
    scene.edges[leader].site.mend();
    scene.change(40);
    agree(scene, "with it mended");

    // If all links are cut, hubs continue with the last known state, and are up to date afterwards.
    scene.cut_all();
    scene.change(40);
    for edge in &scene.edges {
        let list = format!("{PROXY}/apis/discovery.k8s.io/v1/endpointslices");
        let asked = edge.site.at("curl").words("-q -sS --max-time 10 --fail");
        let message = asked.args([list]).run().ok();
        let list: Value = serde_json::from_slice(&message.stdout).unwrap();
        let items = list["items"].as_array();
        assert!(items.is_some_and(|items| !items.is_empty()), "{list:#}");
    }
    for edge in &scene.edges {
        edge.site.mend();
    }
    agree(scene, "with all mended");
    names_another_writer(scene);
}

/// If `OpenYurt`'s own controller writes, the gateway logs it and corrects the object.
fn names_another_writer(scene: &Scene) {
    let change = json!({ "data": { "leaders": "edge-9/10.9.9.9" } }).to_string();
    let line = format!(
        "patch -n kube-system configmap leader-hub-{POOL} --field-manager=yurt-manager --type=merge -p"
    );
    scene.cluster.kubectl(&line).args([change]).run().ok();
    let right = within(LOOKS, || both_edges_are_listed(scene));
    assert!(right, "{:#}", told(scene));
    let named = || scene.gateway_said().contains("yurt-manager");
    until("the log names the other writer", named);
}

/// Connections that YurtHubs have open at an edge: one for each watch.
fn connections_of_hubs(edge: &Edge) -> usize {
    let open = edge
        .site
        .at("ss")
        .words("-Htn state established sport = :10269");
    open.run().ok().text().lines().count()
}
