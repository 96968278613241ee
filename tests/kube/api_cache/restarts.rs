//! Nodes that lose their power, disks that lose bytes, and an account that lacks a right.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::PathBuf,
};

use flate2::read::GzDecoder;
use serde_json::Value;

use super::{
    examples::example,
    scene::{Edge, Scene},
};
use crate::world::process::until;

/// Returns the file in which an edge caches the Services.
fn kept(edge: &Edge) -> PathBuf {
    edge.folder.join("data/pool/v1_services.pool")
}

/// Returns the versions of all Services that the edge serves.
fn served(edge: &Edge) -> Vec<(String, String)> {
    let content = edge.ask("/api/v1/services").run().ok();
    let list: Value = serde_json::from_slice(&content.stdout).unwrap();
    versions(list["items"].as_array().unwrap().iter())
}

/// The same for the Services on its disk: after a line with a hash the file is gzip, which has a line with a description,
/// and a line for each Service.
fn saved(edge: &Edge) -> Vec<(String, String)> {
    let file = fs::read(kept(edge)).unwrap();
    let end = file.iter().position(|byte| *byte == b'\n').unwrap();
    let lines = BufReader::new(GzDecoder::new(&file[end + 1..])).lines();
    let read = |line: Result<String, _>| serde_json::from_str(&line.unwrap()).unwrap();
    let all: Vec<Value> = lines.skip(1).map(read).collect();
    versions(all.iter())
}

fn versions<'a>(objects: impl Iterator<Item = &'a Value>) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut all: Vec<_> = objects
        .map(|object| {
            let about = &object["metadata"];
            let name = format!("{}/{}", text(&about["namespace"]), text(&about["name"]));
            (name, text(&about["resourceVersion"]))
        })
        .collect();
    all.sort();
    all
}

pub(super) fn nodes_started_without_the_cloud_serve_their_cached_state(scene: &mut Scene) {
    scene.change(20);
    scene.agree();
    for edge in &scene.edges {
        until("the read objects are on the disk", || {
            kept(edge).exists() && saved(edge) == served(edge)
        });
    }
    scene.cut_all();
    let before = scene.edges.each_ref().map(served);
    assert!(before[0].len() > 1, "{before:?}");
    for edge in &mut scene.edges {
        edge.dies();
    }
    scene.change(20);
    for (edge, before) in scene.edges.iter_mut().zip(&before) {
        edge.starts(None);
        assert_eq!(served(edge), *before);
    }
    for edge in &scene.edges {
        // Clients get the age of the data, a few seconds after its source was lost.
        until("the answer has an age", || {
            let request = edge.ask("/api/v1/services").words("-o /dev/null -D -");
            let head = request.run().ok().text().to_ascii_lowercase();
            head.contains("\nage: ")
        });
    }
    // Only now: a connected edge gives its pool's members fresh data, which has no age.
    for edge in &scene.edges {
        edge.site.mend();
    }
    scene.agree();
}

pub(super) fn a_damaged_file_is_set_aside_and_reported(scene: &mut Scene) {
    let leader = scene.leader().expect("one leads");
    let edge = &mut scene.edges[1 - leader];
    until("the read objects are on the disk", || kept(edge).exists());
    edge.dies();
    let mut bytes = fs::read(kept(edge)).unwrap();
    let last = bytes.len() - 9;
    bytes[last] ^= 0x20;
    fs::write(kept(edge), &bytes).unwrap();
    edge.starts(None);
    let content = edge.output();
    assert!(
        content.contains("cannot use saved API cache data")
            && content.contains("damaged: the checksum does not match"),
        "{content}"
    );
    let aside = kept(edge).with_extension("bad");
    assert_eq!(fs::read(&aside).unwrap(), bytes);
    fs::remove_file(aside).unwrap();
    scene.agree();
}

/// Of the objects that the gateway caches, the Services.
fn services() -> Value {
    let kept = Scene::kept();
    let resources = kept["resources"].as_array().cloned().unwrap_or_default();
    let mut found = resources.into_iter();
    let found = found.find(|one| one["resource"] == "v1/services");
    found.unwrap_or_default()
}

pub(super) fn a_missing_gateway_permission_is_named(scene: &mut Scene) {
    let rights = example("rbac.yaml", &[("nodes, services, ", "nodes, ".to_owned())]);
    let apply = scene.cluster.kubectl("apply -f -");
    apply.input(rights).run().ok();
    scene.gateway_dies();
    scene.gateway_starts();
    scene.until("the missing right is named", |scene| {
        let content = scene.gateway_said();
        content.contains("cannot list resource \\\"services\\\"")
            || content.contains("cannot list resource \"services\"")
    });
    assert!(!services()["lost"].is_null(), "{}", services());
    let status = scene.causeway("status").run().ok().text();
    assert!(status.contains("v1/services"), "{status}");
    // The edges still serve their last state, and all else continues.
    for edge in &scene.edges {
        edge.get("svc -n default kubernetes").ok();
    }
    scene.cluster.grant("api-cache");
    scene.until("the gateway reads Services again", |_| {
        services()["lost"].is_null()
    });
    scene.change(10);
    scene.agree();
}
