//! Intended ends of an edge or a gateway, and an unintended one, while kubectl has a session open.

use std::time::Duration;

use libtest_mimic::Trial;

use super::{REQUESTS, UPGRADES, apps, each_says, exec};
use crate::{
    full, names,
    steps::by,
    world::{
        Way, World,
        causeway::REFUSING,
        net::CLOUD,
        process::{Process, until},
    },
};

/// The ways whose messages differ; an edge's own messages are the same on all.
pub(super) fn trials(name: &str, way: Way) -> Vec<Trial> {
    let of = |row: &str| format!("{name}::{row}");
    let mut trials = Vec::new();
    if way == names::CHECKED || full() {
        trials.push(by(
            of("a_draining_edge_reports_it_and_ends_after_its_streams"),
            way,
            a_draining_edge_reports_it_and_ends_after_its_streams,
        ));
    }
    if way == names::CHECKED {
        trials.push(by(
            of("an_edge_lost_while_awaiting_an_upstream_is_reported"),
            way,
            an_edge_lost_while_awaiting_an_upstream_is_reported,
        ));
    }
    let wanted = match way {
        Way::Unix => "connect.sock: connection refused".to_owned(),
        // Queries for names are answered until the end.
        Way::Names(_) => format!("dial tcp {CLOUD}:10250: connect: connection refused"),
        _ => return trials,
    };
    trials.push(by(
        of("a_draining_gateway_admits_no_client_and_ends_streams_in_time"),
        way,
        move |world| {
            a_draining_gateway_admits_no_client_and_ends_streams_in_time(world, way, &wanted);
        },
    ));
    trials
}

/// A session on edge-1 that prints its input.
fn session(world: &World, log: &str) -> Process {
    let exec = "exec -i -n a echo -- cat /tmp/node -";
    let mut session = world.cluster.kubectl(exec).start(&world.path(log));
    session.says("edge-1");
    session
}

fn goes_on(session: &mut Process) {
    session.send(b"still here\n");
    session.says("still here");
}

fn a_draining_edge_reports_it_and_ends_after_its_streams(world: &mut World) {
    let mut open = session(world, "leaves.log");
    let mut edge = world.road().leaves(0);
    let wanted = "edge-1 is disconnecting from this gateway and accepts no new streams";
    until("it has logged this", || exec(world).stderr.contains(wanted));
    each_says(world, wanted, &[UPGRADES, REQUESTS].concat());
    goes_on(&mut open);
    open.close_input();
    assert_eq!(open.ended().0, Some(0), "{}", open.output());
    assert_eq!(edge.ended().0, Some(0), "{}", edge.output());
    world.rejoin(0);
    until("it is back", || exec(world).code == Some(0));
}

fn a_draining_gateway_admits_no_client_and_ends_streams_in_time(
    world: &mut World,
    way: Way,
    wanted: &str,
) {
    world.otherwise(way, |text| text + "\ntimeouts: { drain: 10s }\n");
    let [mut ends, mut stays] = ["ends.log", "stays.log"].map(|log| session(world, log));
    let mut gateway = world.road().drains();
    until("its listeners are closed", || {
        exec(world).stderr.contains(wanted)
    });
    each_says(world, wanted, &[UPGRADES, REQUESTS].concat());
    goes_on(&mut ends);
    goes_on(&mut stays);
    ends.close_input();
    assert_eq!(ends.ended().0, Some(0), "{}", ends.output());
    let (code, took) = gateway.ended();
    assert_eq!(code, Some(0), "{}", gateway.output());
    assert!(took < Duration::from_secs(11), "{took:?}");
    let (code, took) = stays.ended();
    assert!(code.is_some_and(|code| code != 0), "{code:?}");
    assert!(
        took < Duration::from_secs(5),
        "{took:?}: {}",
        stays.output()
    );
    let message = stays.output();
    assert!(message.contains("unexpected EOF"), "{message}");
}

fn an_edge_lost_while_awaiting_an_upstream_is_reported(world: &mut World) {
    let mut app = apps::ill(world);
    let led = apps::resting(world);
    let raw = format!("get --raw /api/v1/nodes/https:edge-1:{REFUSING}/proxy/");
    let mut asks = world.cluster.kubectl(&raw).start(&world.path("lost.log"));
    app.says("by rests");
    drop(led);
    world.road().kill(0);
    let (code, took) = asks.ended();
    assert!(code.is_some_and(|code| code != 0), "{code:?}");
    assert!(took < Duration::from_secs(5), "{took:?}: {}", asks.output());
    let message = asks.output();
    assert!(
        message.contains("the tunnel of edge-1 was lost during the stream"),
        "{message}"
    );
    world.rejoin(0);
    until("it is back", || exec(world).code == Some(0));
}
