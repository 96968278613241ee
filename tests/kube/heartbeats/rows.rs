//! Rows of the table with plain kubelets.

use std::{collections::BTreeMap, fs, sync::MutexGuard, time::Duration};

use k8s_openapi::jiff::SignedDuration;

use super::{
    light::health,
    recorder::{Recorder, State},
    scene::{Scene, Setup, THIRD, member_address, member_name, site},
};
use crate::{
    full,
    world::{
        World,
        net::{Site, neighbour},
        node::Serving,
        process::{Program, until},
        world,
    },
};

/// Time after the cut within which the first delegated heartbeat arrives.
const FIRST: Duration = Duration::from_secs(25);
/// Age of a Lease from which kube-controller-manager makes a node `NotReady`.
const GRACE: Duration = Duration::from_secs(50);
/// Time after which it has made a node without renewals `NotReady`, and some more.
pub(super) const BEYOND_GRACE: Duration = Duration::from_secs(70);
/// Time after the node's own renewal within which nothing of the delegation is left.
const UNDONE: Duration = Duration::from_secs(10);
/// Requests that are refused since another writer was faster, in one row. A storm has hundreds.
const CONFLICTS: usize = 5;

/// Returns a duration of the short run, or that of the full run.
pub(super) fn lasts(short: Duration, long: Duration) -> Duration {
    if full() { long } else { short }
}

pub(super) fn minutes(minutes: u64) -> Duration {
    Duration::from_mins(minutes)
}

/// Waits for the first delegated renewal; prints and checks its time.
pub(super) fn first_beat(recorder: &Recorder, node: &str, cut: Duration) -> Duration {
    let sample = recorder.sees((node, cut), "a delegated renewal", |state| {
        state.renewed_for_it
    });
    let took = sample.at.saturating_sub(cut);
    recorder.mark(format!(
        "{node}: first delegated renewal, {} s after the cut",
        took.as_secs()
    ));
    assert!(!full() || took <= FIRST, "{took:?}");
    sample.at
}

/// Waits until nothing of the delegation is left; prints and checks the times.
pub(super) fn undone(recorder: &Recorder, node: &str, back: Duration) {
    let direct = recorder.sees((node, back), "a renewal by the node", |state| {
        !state.renewed_for_it && state.is_ready()
    });
    let whole = recorder.sees((node, back), "whole", State::is_whole);
    let (own, all) = (
        direct.at.saturating_sub(back),
        whole.at.saturating_sub(back),
    );
    let since = whole.at.saturating_sub(direct.at);
    recorder.mark(format!(
        "{node}: own renewal {} s after the return; nothing is left {} s after the return, {} s after the renewal",
        own.as_secs(),
        all.as_secs(),
        since.as_secs(),
    ));
    assert!(!full() || since <= UNDONE, "{since:?}");
}

/// Checks that a node has never been unready, that nothing evicts, and that its pods are the same.
pub(super) fn kept(recorder: &Recorder, node: &str, from: Duration) {
    let pods = recorder.since(node, Duration::ZERO)[0].state.pods.clone();
    recorder.always((node, from), "ready, with its pods", |state| {
        state.is_ready() && !state.evicts && state.pods == pods
    });
    let samples = recorder.since(node, from);
    let oldest = samples.iter().map(|sample| sample.age).max();
    let oldest = oldest.unwrap_or_default();
    assert!(!full() || oldest < GRACE, "{oldest:?}");
}

/// Counts the requests of gateways since this number, each with the code of its answer.
fn requests(world: &World, from: usize) -> BTreeMap<String, usize> {
    let mut counted = BTreeMap::new();
    for request in Scene::requests(world).split_off(from) {
        *counted.entry(request).or_default() += 1;
    }
    counted
}

/// Prints these requests, and checks that there are few conflicts.
pub(super) fn no_storm(recorder: &Recorder, world: &World, from: usize) {
    let counted = requests(world, from);
    let shown = counted
        .iter()
        .filter(|(request, _)| !request.starts_with("get "));
    let shown: Vec<String> = shown
        .map(|(request, count)| format!("{count} x {request}"))
        .collect();
    recorder.mark(format!("writes by gateways: {}", shown.join(", ")));
    let conflicts = counted
        .iter()
        .filter(|(request, _)| request.ends_with(" 409"));
    let conflicts: usize = conflicts.map(|(_, count)| count).sum();
    assert!(conflicts <= CONFLICTS, "{counted:#?}");
}

pub(super) fn requested(world: &World) -> usize {
    Scene::requests(world).len()
}

/// Starts the world and a scene, and waits until all members are whole.
pub(super) fn begin(
    setup: Setup,
    row: &'static str,
    shown: &[&str],
) -> (MutexGuard<'static, World>, Scene, Recorder) {
    let mut world = world();
    let scene = Scene::start(&mut world, setup);
    let recorder = Recorder::start(row, &scene.api, shown);
    for number in 0..3 {
        let name = member_name(number);
        recorder.sees((&name, Duration::ZERO), "whole at first", State::is_whole);
    }
    (world, scene, recorder)
}

pub(super) fn a_cut_off_node_stays_ready_while_its_kubelet_lives() {
    let (mut world, scene, recorder) = begin(
        Setup::new("heartbeats-one"),
        "one node is cut off",
        &["edge-1"],
    );
    let node = "edge-1";
    let before = requested(&world);
    scene.cut(&world, 0);
    let cut = recorder.mark("edge-1 is cut off");
    let first = first_beat(&recorder, node, cut);
    let marked = recorder.sees((node, cut), "marked", |state| state.delegate.is_some());
    let events = world.cluster.get("events -n default").unwrap().to_string();
    let delegate = marked.state.delegate.unwrap();
    let event = format!("heartbeat delegated through {delegate}");
    assert!(events.contains(&event), "{events}");
    if full() {
        // A minute in which nothing changes.
        recorder.until(first + minutes(2));
        let from = requested(&world);
        recorder.until(first + minutes(3));
        recorder.mark(format!(
            "requests in one minute: {:?}",
            requests(&world, from)
        ));
    }
    recorder.until(cut + lasts(BEYOND_GRACE, minutes(15)));
    recorder.sees((node, cut), "tainted", |state| state.tainted);
    kept(&recorder, node, cut);

    scene.mend(&world, 0);
    let back = recorder.mark("edge-1 is back");
    undone(&recorder, node, back);
    kept(&recorder, node, cut);
    no_storm(&recorder, &world, before);
    // The mark, the taint, and the return.
    let counted = requests(&world, before);
    let patches = counted.get("patch nodes edge-1 200").copied();
    assert_eq!(patches, Some(3), "{counted:#?}");
    dies_while_cut_off(&mut world, &scene, &recorder);
}

/// A kubelet that dies on a cut-off node does not keep it.
fn dies_while_cut_off(world: &mut World, scene: &Scene, recorder: &Recorder) {
    until("the edge is back", || {
        Scene::status(world, 0)["state"] == "connected"
    });
    scene.cut(world, 0);
    let cut = recorder.mark("edge-1 is cut off again");
    first_beat(recorder, "edge-1", cut);
    world.nodes[0].kubelet_dies();
    let died = recorder.mark("its kubelet dies");
    let lost = recorder.sees(("edge-1", died), "unready", |state| !state.is_ready());
    let took = lost.at.saturating_sub(died).as_secs();
    recorder.mark(format!(
        "edge-1 is not ready {took} s after that, with a Lease of {} s",
        lost.age.as_secs()
    ));
    let World { cluster, nodes, .. } = world;
    nodes[0].serves(cluster, Serving::Signed);
    scene.mend(world, 0);
    let back = recorder.mark("its kubelet and its uplink are back");
    recorder.sees(("edge-1", back), "whole", State::is_whole);
}

pub(super) fn another_member_carries_heartbeats_when_the_delegate_is_cut_off() {
    let (world, scene, recorder) = begin(
        Setup::new("heartbeats-delegate"),
        "the delegate is cut off too",
        &["edge-1", "edge-2", "edge-3"],
    );
    delegate_is_cut_off(&world, &scene, &recorder);
}

pub(super) fn delegate_is_cut_off(world: &World, scene: &Scene, recorder: &Recorder) {
    let before = requested(world);
    scene.cut(world, 0);
    let cut = recorder.mark("edge-1 is cut off");
    first_beat(recorder, "edge-1", cut);
    let marked = recorder.sees(("edge-1", cut), "marked", |state| state.delegate.is_some());
    let delegate = marked.state.delegate.unwrap();
    let number = [1, 2]
        .into_iter()
        .find(|number| member_name(*number) == delegate);
    let number = number.expect("it is a member");
    scene.cut(world, number);
    let second = recorder.mark(format!("its delegate {delegate} is cut off"));
    first_beat(recorder, &delegate, second);
    recorder.until(second + BEYOND_GRACE);
    for node in ["edge-1", &*delegate] {
        kept(recorder, node, cut);
    }
    for number in [0, number] {
        scene.mend(world, number);
    }
    let back = recorder.mark("both are back");
    for node in ["edge-1", &*delegate] {
        undone(recorder, node, back);
        kept(recorder, node, cut);
    }
    no_storm(recorder, world, before);
}

pub(super) fn a_pool_that_is_cut_off_is_not_ready_and_keeps_its_pods_for_a_while() {
    let (world, scene, recorder) = begin(
        Setup::new("heartbeats-pool"),
        "the whole pool is cut off",
        &["edge-1", "edge-2", "edge-3"],
    );
    pool_is_cut_off(&world, &scene, &recorder);
}

pub(super) fn pool_is_cut_off(world: &World, scene: &Scene, recorder: &Recorder) {
    let before = requested(world);
    let nodes = ["edge-1", "edge-2", THIRD];
    for number in 0..3 {
        scene.cut(world, number);
    }
    let cut = recorder.mark("all are cut off");
    for node in nodes {
        recorder.sees((node, cut), "unready", |state| state.ready == "Unknown");
    }
    recorder.mark("all are not ready");
    // Their zone is full of nodes that are not ready, and another is not: evictions are not stopped.
    recorder.sees(("edge-1", cut), "tainted for eviction", |state| {
        state.evicts
    });
    recorder.until(cut + Duration::from_secs(90));
    for number in 0..3 {
        scene.mend(world, number);
    }
    let back = recorder.mark("all are back");
    for node in nodes {
        let pods = recorder.since(node, Duration::ZERO)[0].state.pods.clone();
        let whole = recorder.sees((node, back), "whole", State::is_whole);
        let took = whole.at.saturating_sub(back).as_secs();
        recorder.mark(format!("{node} is whole {took} s after the return"));
        recorder.always((node, cut), "with its pods, without heartbeats", |state| {
            state.pods == pods && !state.delegated
        });
    }
    no_storm(recorder, world, before);
}

pub(super) fn an_uplink_that_flaps_makes_no_node_unready() {
    let (world, scene, recorder) = begin(
        Setup::new("heartbeats-flaps"),
        "the uplink flaps every 15 s",
        &["edge-1"],
    );
    uplink_flaps(&world, &scene, &recorder);
}

pub(super) fn uplink_flaps(world: &World, scene: &Scene, recorder: &Recorder) {
    let before = requested(world);
    let begun = recorder.mark("edge-1 flaps");
    let mut next = begun;
    while next < begun + minutes(2) {
        scene.cut(world, 0);
        next += Duration::from_secs(15);
        recorder.until(next);
        scene.mend(world, 0);
        next += Duration::from_secs(15);
        recorder.until(next);
    }
    let back = recorder.mark("edge-1 stays connected");
    undone(recorder, "edge-1", back);
    kept(recorder, "edge-1", begun);
    recorder.mark(format!(
        "delegated renewals: {}; too early: {}; conflicts: {}",
        scene.beats("renewed"),
        scene.beats("fresh"),
        scene.beats("conflict"),
    ));
    no_storm(recorder, world, before);
}

pub(super) fn a_cut_during_a_change_of_the_leading_gateway() {
    let setup = Setup {
        gateways: 2,
        ..Setup::new("heartbeats-leader")
    };
    let row = "cut off while the leading gateway dies";
    let (world, mut scene, recorder) = begin(setup, row, &["edge-1"]);
    leading_gateway_dies(&world, &mut scene, &recorder);
}

pub(super) fn leading_gateway_dies(world: &World, scene: &mut Scene, recorder: &Recorder) {
    let before = requested(world);
    let leader = scene.leader();
    scene.gateway_dies(leader);
    scene.cut(world, 0);
    let cut = recorder.mark(format!("gateway {leader} dies, and edge-1 is cut off"));
    first_beat(recorder, "edge-1", cut);
    let next = scene.leader();
    recorder.mark(format!("gateway {next} manages delegated nodes"));
    recorder.until(cut + BEYOND_GRACE);
    recorder.sees(("edge-1", cut), "tainted", |state| state.tainted);
    scene.mend(world, 0);
    let back = recorder.mark("edge-1 is back");
    undone(recorder, "edge-1", back);
    kept(recorder, "edge-1", cut);
    no_storm(recorder, world, before);
}

/// A second process with the identity of the node sends heartbeats as well, through another member.
pub(super) fn two_members_send_heartbeats_of_one_node_at_once() {
    let (world, scene, recorder) = begin(
        Setup::new("heartbeats-two"),
        "two members send heartbeats of one node",
        &["edge-1"],
    );
    let before = requested(&world);
    let other = Site::new(4);
    other.cut();
    neighbour(("field", 3), &other, member_address(3));
    let folder = scene.folder.join("copy");
    fs::create_dir_all(&folder).unwrap();
    let _health = health(&other, &folder);
    // The edge saves the members some time after it gets them.
    let data = scene.folder.join("edge-1/data");
    let members = data.join("run-members");
    until("the members are saved", || {
        fs::read_to_string(&members).is_ok_and(|saved| saved.contains(THIRD))
    });
    let copy = Program::new("cp").args(["-r"]);
    let copy = copy.args([data, folder.join("data")]);
    copy.run().ok();
    // One of them reaches only edge-2, the other only edge-3.
    let unreachable = |from: &Site, to: usize| {
        let route = format!("route add blackhole {}", member_address(to));
        from.at("ip").words(&route).run().ok();
    };
    unreachable(&other, 1);
    unreachable(site(&world, 0), 2);
    let at = format!("{}:12271", member_address(3));
    let config = scene.edge_config(1, "copy", &at, [12270, 12266]);
    scene.cut(&world, 0);
    let cut = recorder.mark("edge-1 is cut off, and another process has its identity");
    let copy = scene.joining(&other, "copy", &config);
    first_beat(&recorder, "edge-1", cut);
    let delegate = |message: &str| message.contains("are delegated to a member of its pool");
    until("both have a member", || delegate(&copy.output()));
    recorder.until(cut + Duration::from_secs(80));
    kept(&recorder, "edge-1", cut);
    drop(copy);
    let reachable = format!("route del blackhole {}", member_address(2));
    site(&world, 0).at("ip").words(&reachable).run().ok();
    scene.mend(&world, 0);
    let back = recorder.mark("edge-1 is back, and the other process is gone");
    undone(&recorder, "edge-1", back);
    recorder.mark(format!(
        "delegated renewals: {}; too early: {}; refused: {} for their nonce, {} for their rate; conflicts: {}",
        scene.beats("renewed"),
        scene.beats("fresh"),
        scene.beats("replayed"),
        scene.beats("too_many"),
        scene.beats("conflict"),
    ));
    no_storm(&recorder, &world, before);
}

pub(super) fn a_clock_that_is_off_by_a_day_changes_nothing() {
    // kube-controller-manager accepts a clock that goes forwards only: first the slow clock, then the fast one.
    let day = SignedDuration::from_hours(24);
    let setup = Setup {
        clock: -day,
        ..Setup::new("heartbeats-clock")
    };
    let row = "the clock of the node is off by a day";
    let (world, scene, recorder) = begin(setup, row, &[THIRD]);
    let third = [THIRD.to_owned()];
    for offset in [-day, day] {
        scene.light.resume(&third, offset);
        let from = recorder.mark(format!("the clock is off by {} hours", offset.as_hours()));
        until("its tunnel stands", || {
            Scene::status(&world, 2)["state"] == "connected"
        });
        recorder.until(from + Duration::from_secs(20));
        scene.cut(&world, 2);
        let cut = recorder.mark("it is cut off");
        first_beat(&recorder, THIRD, cut);
        recorder.until(cut + BEYOND_GRACE);
        site(&world, 2).mend();
        scene.light.resume(&third, offset);
        let back = recorder.mark("it is back");
        undone(&recorder, THIRD, back);
        if offset.is_negative() {
            // The node's own renewals count for kube-controller-manager, though their times are old.
            recorder.until(back + BEYOND_GRACE);
        }
        kept(&recorder, THIRD, from);
    }
}
