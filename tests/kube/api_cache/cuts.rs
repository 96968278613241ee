//! Links that are cut, and processes that end, while the cluster changes: readers get answers meanwhile, and all agree
//! afterwards.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::scene::{Edge, Scene};
use crate::world::process::within;

/// Time until a lost leader is replaced.
const REPLACED: Duration = Duration::from_secs(10);

pub(super) fn one_edge_of_a_pool_reads_for_all_members(scene: &mut Scene) {
    scene.change(20);
    scene.agree();
    let leader = scene.leader().expect("one leads");
    let (leads, follows) = (&scene.edges[leader], &scene.edges[1 - leader]);
    let reading = follows.reading();
    assert_eq!(reading["reads_at"], leads.name, "{reading:#}");
    assert_eq!(reading["leader"], leads.name, "{reading:#}");
    assert_eq!(reading["members"].as_array().map(Vec::len), Some(2));
    // A connection, and a watch of each resource.
    scene.until("one edge reads at the gateway", |_| {
        Scene::metric("causeway_gateway_api_cache_connections ") == 1
    });
    for resource in ["v1/services", "discovery.k8s.io/v1/endpointslices"] {
        let watchers = format!("causeway_gateway_api_cache_watchers{{resource=\"{resource}\"}} ");
        assert_eq!(Scene::metric(&watchers), 1, "{resource}");
    }
    let status = scene.causeway("status").run().ok().text();
    assert!(
        status.contains("API cache: 5 resources") && status.contains("connected"),
        "{status}"
    );
}

pub(super) fn readers_catch_up_after_a_gateway_outage(scene: &mut Scene) {
    scene.gateway_dies();
    scene.change(80);
    both_serve(scene);
    scene.gateway_starts();
    let began = Instant::now();
    scene.agree();
    println!("all agree {:?} after the gateway was back", began.elapsed());
}

pub(super) fn readers_catch_up_after_an_api_server_restart(scene: &mut Scene) {
    scene.change(40);
    scene.cluster.restart();
    scene.change(40);
    let began = Instant::now();
    scene.agree();
    println!(
        "all agree {:?} after the API server was back",
        began.elapsed()
    );
}

pub(super) fn a_hanging_api_server_is_detected_and_its_age_reported(scene: &mut Scene) {
    scene.change(20);
    scene.agree();
    let hung = scene.cluster.hangs();
    let began = Instant::now();
    scene.until("both report the age", |scene| {
        scene.edges.iter().all(|edge| age(edge).is_some())
    });
    println!("both tell it after {:?}", began.elapsed());
    // Twice 5 s until the gateway is sure, and at each level 3 s in which the edge may find another source.
    let lasted = began.elapsed();
    assert!(lasted < Duration::from_secs(25), "{lasted:?}");
    for edge in &scene.edges {
        let lasts = began.elapsed().as_secs();
        let told = age(edge).unwrap_or_default();
        // It may have been silent for 5 s before, and each level reports whole seconds.
        assert!(
            (lasts - 3..lasts + 10).contains(&told),
            "{told} after {lasts} s"
        );
    }
    both_serve(scene);
    drop(hung);
    scene.change(20);
    scene.agree();
    scene.until("it is connected again", |scene| {
        scene.edges.iter().all(|edge| age(edge).is_none())
    });
}

/// Returns the age in seconds that its answers report.
fn age(edge: &Edge) -> Option<u64> {
    let message = edge.ask("/api/v1/services").words("-o /dev/null -D -");
    let head = message.run().ok().text().to_ascii_lowercase();
    let mut lines = head.lines();
    lines.find_map(|line| line.strip_prefix("age: ")?.trim().parse().ok())
}

pub(super) fn a_cut_leader_uplink_moves_leadership_and_both_see_changes(scene: &mut Scene) {
    let leader = scene.leader().expect("one leads");
    scene.edges[leader].site.cut();
    let began = Instant::now();
    scene.change_a_few();
    another_leads(scene, leader, began);
    println!("another leads {:?} after the cut", began.elapsed());
    scene.change(40);
    // The edge that is cut off reads from its neighbour.
    scene.agree();
    println!("all agree {:?} after the cut", began.elapsed());
    let reading = scene.edges[leader].reading();
    assert_eq!(
        reading["reads_at"],
        scene.edges[1 - leader].name,
        "{reading:#}"
    );
    scene.edges[leader].site.mend();
    scene.change(20);
    scene.agree();
}

/// The other edge leads in time.
fn another_leads(scene: &Scene, leader: usize, since: Instant) {
    let left = REPLACED.saturating_sub(since.elapsed());
    if !within(left, || scene.leader() == Some(1 - leader)) {
        scene.fail("the other edge does not lead");
    }
}

pub(super) fn another_node_leads_after_the_leader_is_killed(scene: &mut Scene) {
    let leader = scene.leader().expect("one leads");
    scene.edges[leader].dies();
    let began = Instant::now();
    scene.change_a_few();
    another_leads(scene, leader, began);
    println!("another leads {:?} after the kill", began.elapsed());
    scene.change(40);
    scene.agree_at(1 - leader);
    scene.edges[leader].starts(None);
    scene.change(20);
    scene.agree();
}

pub(super) fn all_uplinks_may_be_cut_and_repaired_in_any_order(scene: &mut Scene) {
    scene.cut_all();
    scene.change(80);
    both_serve(scene);
    let leader = scene.leader().unwrap_or_default();
    let began = Instant::now();
    scene.edges[1 - leader].site.mend();
    // When one edge has a path again, both have one through it.
    scene.agree();
    println!("all agree {:?} after one way was back", began.elapsed());
    scene.change(20);
    scene.edges[leader].site.mend();
    scene.agree();
}

/// Both answer with their last state.
fn both_serve(scene: &Scene) {
    for edge in &scene.edges {
        let message = edge.ask("/apis/discovery.k8s.io/v1/endpointslices");
        let list: Value = serde_json::from_slice(&message.run().ok().stdout).unwrap();
        let items = list["items"].as_array();
        assert!(items.is_some_and(|items| !items.is_empty()), "{list:#}");
        let message = edge.ask("/api/v1/namespaces/default/services/kubernetes");
        message.run().ok();
    }
}
