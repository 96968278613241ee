//! A site of many nodes, all of which lose the same uplink.
//!
//! Each has an edge of its own. The nodes have no kubelets: their Leases are renewed by the test, and all ask one server in place of
//! the kubelet's health check.

use std::{net::Ipv4Addr, time::Duration};

use k8s_openapi::jiff::SignedDuration;

use super::{
    light::health,
    recorder::{Recorder, State},
    scene::{POOL, Scene, Setup},
};
use crate::{
    full,
    world::{
        net::{Site, neighbour},
        process::{PATIENCE, Process, within},
        world,
    },
};

const NODES: u16 = 50;
/// Age of each Lease after the cut within which it is renewed.
const ALL: Duration = Duration::from_secs(40);

pub(super) fn a_site_of_fifty_nodes_is_cut_off_and_returns() {
    let mut world = world();
    let scene = Scene::start(&mut world, Setup::new("heartbeats-site"));
    let (site, at) = (Site::new(5), Ipv4Addr::new(10, 2, 0, 5));
    neighbour(("field", 4), &site, at);
    let _health = health(&site, &scene.folder.join("site"));
    let names: Vec<String> = (1..=NODES).map(|number| format!("far-{number}")).collect();
    scene
        .light
        .add(&world, &names, Some(POOL), SignedDuration::ZERO);
    let edges = start_edges(&scene, &site, at, &names);
    let recorder = Recorder::start("a site of 50 nodes", &scene.api, &["far-1", "edge-1"]);
    for name in &names {
        recorder.sees((name, Duration::ZERO), "whole", State::is_whole);
    }
    let known = within(2 * PATIENCE, || {
        Scene::status(&world, 0)["api_cache"]["members"]
            .as_array()
            .is_some_and(|members| members.len() == usize::from(NODES) + 3)
    });
    assert!(known, "{:#}", Scene::status(&world, 0)["api_cache"]);
    site.cut();
    scene.light.pause(&names);
    let cut = recorder.mark("the site is cut off");
    all_are_renewed(&recorder, &names, cut);
    recorder.until(cut + Duration::from_secs(100));
    for name in names.iter().map(String::as_str).chain(["edge-1", "edge-2"]) {
        recorder.always((name, cut), "ready", |state| {
            state.is_ready() && !state.evicts
        });
    }
    let oldest = names.iter().flat_map(|name| recorder.since(name, cut));
    let oldest = oldest.map(|sample| sample.age).max().unwrap();
    recorder.mark(format!("the oldest Lease had {} s", oldest.as_secs()));
    assert!(!full() || oldest <= ALL, "{oldest:?}");
    let results = [
        "renewed",
        "fresh",
        "conflict",
        "too_many",
        "overloaded",
        "failed",
    ]
    .map(|result| format!("{result} {}", scene.beats(result)));
    recorder.mark(format!("heartbeats at the gateway: {}", results.join(", ")));
    assert_eq!((scene.beats("overloaded"), scene.beats("failed")), (0, 0));

    site.mend();
    scene.light.resume(&names, SignedDuration::ZERO);
    let back = recorder.mark("the site is back");
    let mut last = back;
    for name in &names {
        last = last.max(recorder.sees((name, back), "whole", State::is_whole).at);
    }
    let took = last.saturating_sub(back).as_secs();
    recorder.mark(format!(
        "nothing is left at any node {took} s after the return"
    ));
    drop(edges);
    scene.light.pause(&names);
    let delete = world.cluster.kubectl("delete node --wait=false");
    delete.args(&names).run().ok();
}

fn start_edges(scene: &Scene, site: &Site, at: Ipv4Addr, names: &[String]) -> Vec<Process> {
    let start = |(number, name): (u16, &String)| {
        let at = format!("{at}:{}", 13_000 + number);
        let config = scene.edge_config(1, name, &at, [14_000 + number, 15_000 + number]);
        scene.joins(site, name, &config)
    };
    (0..NODES).zip(names).map(start).collect()
}

/// Waits until each Lease has a delegated renewal, and marks when these came.
fn all_are_renewed(recorder: &Recorder, names: &[String], cut: Duration) {
    let mut firsts = Vec::new();
    for name in names {
        let first = recorder.sees((name, cut), "renewed for it", |state| state.renewed_for_it);
        firsts.push(first.at.saturating_sub(cut));
    }
    firsts.sort();
    let of = |index: usize| firsts[index].as_secs();
    recorder.mark(format!(
        "all are delegated; first renewals after {} to {} s, half of them within {} s",
        of(0),
        of(firsts.len() - 1),
        of(firsts.len() / 2),
    ));
}
