//! Nodes that do not answer: nodes of the cloud, with an unused address, or with the address of another node.
//!
//! The API server reads Node objects first, so that each has one, and a pod whose status claims to run there.

use libtest_mimic::Trial;
use serde_json::json;

use super::{UPGRADES, each_says, exec};
use crate::{
    addresses, names,
    nodes::TemporaryNode,
    steps::by,
    world::{Way, World, net::CLOUD, process::until},
};

/// Address without a redirection on this machine, at which nothing answers.
const NOBODYS: &str = "10.97.0.77";

pub(super) fn trials(name: &str, way: Way) -> Vec<Trial> {
    let title = format!("{name}::that_nobody_is_at_a_node_is_told");
    let run = match way {
        Way::Unix => no_node_of_that_name,
        way if way == names::CHECKED => no_address_of_that_name,
        way if way == addresses::CHECKED => no_node_at_that_address,
        _ => return Vec::new(),
    };
    vec![by(title, way, run)]
}

/// With an egress selector for addresses.
pub(crate) fn by_address() -> [Trial; 2] {
    let nobody = "egress::by_address_that_nobody_is_at_a_node_is_told";
    let two = "egress::by_address_that_two_nodes_have_one_is_told";
    [
        by(nobody.to_owned(), Way::Address, no_target_to_dial),
        by(two.to_owned(), Way::Address, two_nodes_of_one_address),
    ]
}

const COMMANDS: [&str; 3] = [
    "exec -n a adrift -- true",
    "logs -n a adrift",
    "get --raw /api/v1/nodes/lost-1/proxy/healthz",
];

/// A Node, and a pod of it that never runs. Both are removed with the test.
struct Lost<'a>(TemporaryNode<'a>);

impl<'a> Lost<'a> {
    fn new(world: &'a World, edge: bool, address: Option<&str>) -> Self {
        let lost = Self(TemporaryNode(world, "lost-1"));
        world.cluster.apply(&json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": "lost-1", "labels": { "causeway.io/edge": edge.to_string() } },
        }));
        let name = json!({ "type": "Hostname", "address": "lost-1" });
        let address = address.map(|address| json!({ "type": "InternalIP", "address": address }));
        let addresses: Vec<_> = address.into_iter().chain([name]).collect();
        let status = json!({ "status": { "addresses": addresses } });
        let patch = "patch node lost-1 --subresource=status --type=merge -p";
        let patch = world.cluster.kubectl(patch);
        patch.args([status.to_string()]).run().ok();
        world.cluster.pod("a", "adrift", "lost-1", "true");
        lost
    }
}

impl Drop for Lost<'_> {
    fn drop(&mut self) {
        let gone = "delete pod -n a adrift --ignore-not-found --force --grace-period=0";
        self.0.0.cluster.kubectl(gone).run();
    }
}

fn no_address_of_that_name(world: &mut World) {
    let _lost = Lost::new(world, false, None);
    let wanted = format!("lookup lost-1 on {CLOUD}:53: no such host");
    each_says(world, &wanted, &COMMANDS);
}

/// A listener that dials nothing itself. kube-apiserver's proxy to nodes resolves their names before it connects.
fn no_node_of_that_name(world: &mut World) {
    let _lost = Lost::new(world, false, None);
    each_says(
        world,
        "code 502: 502 no node matches Host \"lost-1:10250\"",
        &COMMANDS[..2],
    );
}

fn no_node_at_that_address(world: &mut World) {
    let edge = Lost::new(world, true, Some("10.1.9.9"));
    let wanted = "lost-1 is not connected and has not connected since this gateway started";
    until("its address is redirected here", || {
        let ran = world.cluster.kubectl(COMMANDS[0]).run();
        ran.stderr.contains(wanted)
    });
    each_says(world, wanted, &COMMANDS);
    drop(edge);
    let _cloud = Lost::new(world, false, Some(NOBODYS));
    let wanted = format!("dial tcp {NOBODYS}:10250: connect: no route to host");
    each_says(world, &wanted, &COMMANDS);
}

fn no_target_to_dial(world: &mut World) {
    let lost = Lost::new(world, false, Some(NOBODYS));
    let wanted = format!("502 this gateway could not dial {NOBODYS}:10250: No route to host");
    each_says(world, &wanted, &COMMANDS);
    drop(lost);
    let _far = Lost::new(world, false, Some("10.2.0.9"));
    let listener = "listener \"kube-apiserver\" dials itself (direct)";
    let wanted =
        format!("502 10.2.0.9:10250 is at no node's edge, and in no network that {listener}");
    each_says(world, &wanted, &COMMANDS);
}

fn two_nodes_of_one_address(world: &mut World) {
    let address = world.nodes[0].site.address().to_string();
    let twin = Lost::new(world, true, Some(&address));
    let wanted = format!(
        "502 {address} is an address of several nodes (edge-1, lost-1); use the name of the node"
    );
    until("the answer names no node", || {
        exec(world).stderr.contains(&wanted)
    });
    // Existing connections are still used.
    each_says(world, &wanted, &UPGRADES);
    drop(twin);
    until("edge-1 has the address again", || {
        exec(world).code == Some(0)
    });
}
