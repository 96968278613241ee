//! kubectl on a node that has only the address of the edge's endpoint.

use std::time::Duration;

use serde_json::json;

use super::scene::{Edge, Scene};
use crate::world::process::{ToolOutput, until, within};

/// Time until a change is visible on a node.
const SEEN: Duration = Duration::from_secs(5);

/// A Service that is the first of both namespaces.
fn expose(scene: &Scene, name: &str) {
    let spec = json!({ "ports": [{ "port": 80 }], "selector": { "app": name } });
    scene.cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "name": name, "namespace": "a", "labels": { "tier": "shop" } }, "spec": spec,
    }));
}

/// Runs the same command in the cloud and at each edge.
fn same(scene: &Scene, line: &str) -> String {
    let mut message = Vec::new();
    let equal = within(SEEN, || {
        let cloud: ToolOutput = scene.cluster.kubectl("get").words(line).run();
        let edges = scene.edges.iter().map(|edge| edge.get(line));
        message = [cloud]
            .into_iter()
            .chain(edges)
            .map(|ran| told(&ran))
            .collect();
        message.iter().all(|one| *one == message[0])
    });
    assert!(equal, "get {line}: {message:#?}");
    message.swap_remove(0)
}

fn told(ran: &ToolOutput) -> String {
    ran.text() + &ran.stderr
}

pub(super) fn reads_the_same_as_in_the_cloud(scene: &mut Scene) {
    for name in ["shop-1", "shop-2"] {
        expose(scene, name);
    }
    scene.change(10);
    // The first time kubectl's cache has nothing about the server.
    for line in [
        "endpointslices -A -o json",
        "svc -A -o yaml",
        "endpointslices.v1.discovery.k8s.io -A -o json",
        "svc -A -l tier=shop -o yaml",
        "svc -n a --selector tier!=shop -o name",
        "svc -n a shop-1 -o jsonpath={.spec.clusterIP}",
        "svc -n a --field-selector metadata.name=shop-2 -o name",
        "svc -n a nobody",
        "namespaces -o name",
        "nodes -o yaml",
        "servicecidrs -o name",
        "endpointslices -A --chunk-size=3 -o name",
    ] {
        let message = same(scene, line);
        assert!(!message.trim().is_empty(), "get {line}");
    }
    assert!(same(scene, "svc -n a -o name").contains("service/shop-1"));
    // Without an output format kubectl requests a table, and prints the fields that plain objects have in common.
    for edge in &scene.edges {
        let message = edge.get("svc -A -l tier=shop --show-labels").ok().text();
        let lines: Vec<Vec<_>> = message
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            lines[0],
            ["NAMESPACE", "NAME", "AGE", "LABELS"],
            "{message}"
        );
        assert_eq!(lines[1][..2], ["a", "shop-1"], "{message}");
    }
    sees_a_change(scene);
    let delete = "delete svc -n a shop-1 shop-2 shop-3";
    scene.cluster.kubectl(delete).run().ok();
}

fn sees_a_change(scene: &Scene) {
    let watch = |edge: &Edge| {
        let watch = edge.kubectl("get svc -n a -w");
        watch.start(&edge.folder.join("watch.log"))
    };
    let mut watches = scene.edges.each_ref().map(watch);
    for watch in &mut watches {
        watch.says("shop-1");
    }
    expose(scene, "shop-3");
    let seen = || {
        watches
            .iter()
            .all(|watch| watch.output().contains("shop-3"))
    };
    assert!(within(SEEN, seen), "{}", watches[0].output());
}

pub(super) fn gets_errors_for_unsupported_requests(scene: &mut Scene) {
    expose(scene, "kept");
    for edge in &scene.edges {
        until("the edge has the Service", || {
            edge.get("svc -n a kept").code == Some(0)
        });
        let message = edge.kubectl("delete svc -n a kept").run().failed();
        let ours = "make changes at the API server of the cluster";
        assert!(message.contains(ours), "{message}");
        let message = edge.get("pods -A").failed();
        let unknown = "the server doesn't have a resource type \"pods\"";
        assert!(message.contains(unknown), "{message}");
        let status = edge.ask("/api/v1/namespaces/a/services/kept");
        let status = status.words("-X DELETE -w %{http_code}").run();
        assert!(status.text().ends_with("405"), "{}", status.text());
    }
    scene.cluster.kubectl("delete svc -n a kept").run().ok();
}
