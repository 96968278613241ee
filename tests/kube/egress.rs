//! Setup by the egress selector: kube-apiserver connects to nodes through a `connect` listener, by name or by address.
//!
//! All steps that each way must pass run over a unix socket; the first of them also over TCP with certificates. This file
//! also tests the parts that only this way has: pods and Services, and addresses that no edge serves.

use libtest_mimic::Trial;

use crate::{
    rows,
    steps::{self, by, failures_tell},
    world::{Way, World, causeway::CLOSED},
};

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = vec![
        by(
            "egress::over_tcp_logs_and_exec".to_owned(),
            Way::Tcp,
            steps::logs_and_exec,
        ),
        rows::over_tcp(),
        by(
            "egress::by_address_logs_and_exec".to_owned(),
            Way::Address,
            steps::logs_and_exec,
        ),
        by(
            "egress::pods_and_services_are_proxied_to".to_owned(),
            Way::Address,
            steps::pods_and_services_are_proxied_to,
        ),
        by(
            "egress::a_network_of_two_nodes_names_neither".to_owned(),
            Way::Address,
            |world| steps::a_network_of_two_nodes_names_neither(world, not_reached),
        ),
        by(
            "egress::what_is_in_the_cloud_is_dialled_from_there".to_owned(),
            Way::Address,
            steps::cloud_targets_are_dialled_directly,
        ),
    ];
    trials.extend(rows::by_address());
    trials.extend(steps::all("egress", Way::Unix));
    trials.extend(steps::variant("egress", Way::Unix, steps::MOVED));
    trials.extend([
        by(
            "egress::failures_state_the_remedy".to_owned(),
            Way::Unix,
            failures_state_the_remedy,
        ),
        by(
            "egress::the_api_server_comes_back_to_the_same_road".to_owned(),
            Way::Unix,
            steps::the_api_server_comes_back_to_the_same_road,
        ),
    ]);
    trials
}

fn not_reached(world: &World) -> String {
    let raw = "get --raw /api/v1/namespaces/a/pods/echo:8080/proxy/";
    world.cluster.kubectl(raw).run().failed()
}

fn failures_state_the_remedy(world: &mut World) {
    let refused = format!("http:edge-1:{CLOSED}");
    let failures = [
        (
            refused.as_str(),
            "edge-1 could not dial 127.0.0.1:9998: connection refused",
        ),
        ("http:edge-1:9997", "edge-1 does not serve port 9997"),
        ("https:cloud-1:10250", "no node matches"),
    ];
    failures_tell(world, &failures);
}
