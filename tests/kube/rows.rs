//! Output of kubectl for rows of the error table that take some trouble to bring about.
//!
//! Each command of kubectl shows a failure in another way. `logs` and `get --raw` have it as the text of a response. `exec`
//! and similar commands have it as the text of an upgrade that fails, by websocket or SPDY. All of them have to show the
//! sentence. The tests of each setup cover the responses for a policy, for a port without an upstream and for an edge that is
//! away.

mod apps;
mod clients;
mod ends;
mod nobody;

pub(crate) use clients::over_tcp;
pub(crate) use nobody::by_address;

use std::thread;

use libtest_mimic::Trial;

use crate::{
    full,
    steps::{self, by},
    world::{
        Way, World,
        causeway::{Clients, edge_anew},
        process::{Program, ToolOutput, until},
        world,
    },
};

/// The ways whose messages differ; those of addresses are the same as those of names.
pub(crate) fn trials(name: &str, way: Way) -> Vec<Trial> {
    let mut trials = Vec::new();
    if !matches!(way, Way::Addresses(_)) || full() {
        trials.push(by(
            format!("{name}::a_silent_kubelet_is_reported"),
            way,
            a_silent_kubelet_is_reported,
        ));
    }
    if matches!(way, Way::Names(_)) || full() {
        let limits = move |world: &mut World| limits_are_reported(world, way);
        trials.push(by(format!("{name}::limits_are_reported"), way, limits));
    }
    trials.extend(nobody::trials(name, way));
    trials.extend(apps::trials(name, way));
    trials.extend(ends::trials(name, way));
    trials
}

/// Returns the trials for errors that only a gateway returns which connects to kubelets itself.
pub(crate) fn own_trials(name: &str, way: Way) -> Vec<Trial> {
    let of = |row: &str| format!("{name}::{row}");
    vec![
        by(
            of("a_kubelet_of_another_ca_is_reported"),
            way,
            a_kubelet_of_another_ca_is_reported,
        ),
        by(
            of("a_long_command_works_and_an_oversized_one_is_reported"),
            way,
            a_long_command_works_and_an_oversized_one_is_reported,
        ),
        by(
            of("an_unauthenticated_api_server_gets_the_reason"),
            way,
            clients::an_unauthenticated_api_server_gets_the_reason,
        ),
        by(
            of("a_connect_listener_reports_that_it_serves_connect_only"),
            way,
            move |world| {
                clients::a_connect_listener_reports_that_it_serves_connect_only(world, way);
            },
        ),
    ]
}

/// Returns the trial for the error of a gateway that authenticates and authorizes its clients by the cluster.
pub(crate) fn dependency_unavailable(name: &str, way: Way) -> Trial {
    Trial::test(
        format!("{name}::an_unavailable_review_is_reported"),
        move || {
            let mut world = world();
            world.lets_in(way, Clients::Scrapers);
            an_unavailable_review_is_reported(&world);
            Ok(())
        },
    )
}

fn an_unavailable_review_is_reported(world: &World) {
    exec(world).ok();
    let reviews = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/egress/reviews.yaml");
    let delete = world.cluster.kubectl("delete -f").args([reviews]);
    delete.run().ok();
    let wanted = "the cluster does not allow this gateway to create subjectaccessreviews";
    until("cached reviews no longer count", || {
        let ran = exec(world);
        ran.code != Some(0) && ran.stderr.contains(wanted)
    });
    each_says(world, wanted, &[UPGRADES, REQUESTS].concat());
    world.cluster.apply_example("egress/reviews.yaml");
    until("the gateway may send reviews again", || {
        exec(world).code == Some(0)
    });
}

/// Commands for edge-1, one of each kind.
pub(crate) const UPGRADES: [&str; 2] = [
    "exec -n a ticker -- true",
    "port-forward -n a pod/echo 18081:8080",
];
pub(crate) const REQUESTS: [&str; 2] = [
    "logs -n a ticker",
    "get --raw /api/v1/nodes/edge-1/proxy/healthz",
];

/// Checks that all of these fail, at once, and with this message.
pub(crate) fn each_says(world: &World, wanted: &str, lines: &[&str]) {
    each_says_one_of(world, &[wanted], lines);
}

/// The same with any of these messages.
fn each_says_one_of(world: &World, wanted: &[&str], lines: &[&str]) {
    let mut programs: Vec<Program> = lines
        .iter()
        .map(|line| world.cluster.kubectl(line))
        .collect();
    if lines.contains(&UPGRADES[0]) {
        programs.extend(steps::old_kubectl(world, UPGRADES[0]));
    }
    let running: Vec<_> = programs
        .into_iter()
        .map(|program| thread::spawn(|| program.run()))
        .collect();
    for ran in running {
        let ran = ran.join().unwrap();
        assert!(
            ran.code != Some(0) && wanted.iter().any(|words| ran.stderr.contains(words)),
            "{wanted:?}: {ran:?}"
        );
    }
}

fn exec(world: &World) -> ToolOutput {
    world.cluster.kubectl(UPGRADES[0]).run()
}

/// Firewall rules of a node, which exist until this value is dropped.
struct Firewall<'a>(&'a World);

impl<'a> Firewall<'a> {
    /// For packets to its kubelet.
    fn new(world: &'a World, does: &str) -> Self {
        let table =
            "table inet row { chain in { type filter hook input priority 0; tcp dport 10250";
        Self::of(world, format!("{table} {does};\n}}\n}}\n"))
    }

    /// Redirects the connections that the node's edge makes to these ports to another port.
    fn leading(world: &'a World, ports: &str, to: u16) -> Self {
        let table = "table ip row { chain out { type nat hook output priority -100; tcp dport";
        let rules = format!("{table} {{ {ports} }} redirect to :{to};\n}}\n}}\n");
        Self::of(world, rules)
    }

    fn of(world: &'a World, rules: String) -> Self {
        let nft = world.nodes[0].at("nft").words("-f -").input(rules);
        nft.run().ok();
        Self(world)
    }
}

impl Drop for Firewall<'_> {
    fn drop(&mut self) {
        // A failed test has a more important message, and no rule is left twice.
        for family in ["inet", "ip"] {
            let delete = self.0.nodes[0].at("nft").words("delete table");
            delete.args([family, "row"]).run();
        }
    }
}

fn a_silent_kubelet_is_reported(world: &mut World) {
    let all = [UPGRADES, REQUESTS].concat();
    let firewall = Firewall::new(world, "reject with tcp reset");
    each_says(
        world,
        "edge-1 could not dial 127.0.0.1:10250: connection refused",
        &all,
    );
    drop(firewall);
    until("the kubelet answers", || exec(world).code == Some(0));
    // Existing connections are not affected.
    let firewall = Firewall::new(world, "tcp flags & (syn | ack) == syn drop");
    each_says(
        world,
        "127.0.0.1:10250 on edge-1 did not accept the connection in time",
        &UPGRADES,
    );
    drop(firewall);
    let serves = "  10250: { scheme: tcp }";
    let without = |text: String| text.replace(serves, "  10251: { scheme: tcp }");
    let before = edge_anew(&world.nodes[0], without);
    let wanted = "edge-1 does not serve port 10250";
    until("its owner's policy is in effect", || {
        let ran = exec(world);
        ran.code != Some(0) && ran.stderr.contains(wanted)
    });
    each_says(world, wanted, &UPGRADES);
    let with = |_| before.clone();
    edge_anew(&world.nodes[0], with);
    until("it is unchanged", || exec(world).code == Some(0));
}

/// Limits take effect at a gateway's start.
fn limits_are_reported(world: &mut World, way: Way) {
    let few = |text: String| text + "\nlimits: { per_client: 1 }\n";
    world.otherwise(way, few);
    let mut open = world
        .cluster
        .kubectl("exec -i -n a echo -- cat /tmp/node -")
        .start(&world.path("limit.log"));
    open.says("edge-1");
    each_says(
        world,
        "this client has reached its limit of 1 open streams",
        &[UPGRADES, REQUESTS].concat(),
    );
    open.close_input();
    assert_eq!(open.ended().0, Some(0), "{}", open.output());
    until("a connection is free again", || exec(world).code == Some(0));
    world.by(way);
}

fn a_kubelet_of_another_ca_is_reported(world: &mut World) {
    let road = world.the_road();
    let (cluster, other) = (world.cluster.pki.path("ca.pem"), road.ca());
    let of = |ca: &str| format!("    ca: {ca}");
    let (cluster, other) = (of(&cluster), of(&other.display().to_string()));
    road.gateway_anew(|text| text.replace(&cluster, &other));
    let all = [UPGRADES, REQUESTS].concat();
    each_says(
        world,
        "shows a certificate that none of the CAs of upstream_tls has signed",
        &all,
    );
    road.gateway_anew(|text| text.replace(&other, &cluster));
    exec(world).ok();
}

/// The request's path contains each word of a command.
fn a_long_command_works_and_an_oversized_one_is_reported(world: &mut World) {
    let content = |length: usize| {
        let exec = world.cluster.kubectl("exec -n a ticker -- echo");
        exec.args(["x".repeat(length)]).run()
    };
    assert_eq!(content(40_000).ok().stdout.len(), 40_001);
    let content = content(65_200).failed();
    let wanted = "bytes, at most 65536 are allowed";
    assert!(content.contains(wanted), "{content}");
}
