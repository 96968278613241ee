//! Setup by addresses: kube-apiserver dials the nodes' own addresses, and nftables rules on its host redirect it to the
//! gateway.
//!
//! The gateway terminates the API server's TLS, with a certificate for the dialled address, and connects to kubelets
//! itself. The dialled address is the only name of the node: the handshake has no name, whether certificates are verified
//! or not.

use libtest_mimic::Trial;

use crate::{
    steps::{self, by, failures_tell},
    world::{Checks, Way, World, causeway::REFUSING},
};

/// Setup by addresses, with all certificates verified.
pub(crate) const CHECKED: Way = Way::Addresses(Checks::On);

pub(crate) fn trials() -> Vec<Trial> {
    let unchecked = Way::Addresses(Checks::Off);
    let mut trials = steps::some("addresses_unchecked", unchecked);
    trials.extend(steps::most("addresses", CHECKED));
    trials.extend(steps::variant("addresses", CHECKED, steps::MOVED));
    trials.extend([
        by(
            "addresses::a_network_of_two_nodes_names_neither".to_owned(),
            CHECKED,
            |world| {
                steps::a_network_of_two_nodes_names_neither(world, |world| {
                    world.the_road().output()
                });
            },
        ),
        by(
            "addresses::cloud_targets_are_dialled_directly".to_owned(),
            CHECKED,
            steps::cloud_targets_are_dialled_directly,
        ),
        by(
            "addresses::pods_and_services_are_proxied_to".to_owned(),
            CHECKED,
            steps::pods_and_services_are_proxied_to,
        ),
        by(
            "addresses::failures_state_the_remedy".to_owned(),
            CHECKED,
            failures_state_the_remedy,
        ),
    ]);
    trials
}

fn failures_state_the_remedy(world: &mut World) {
    let refused = format!("http:edge-1:{REFUSING}");
    let failures = [(
        refused.as_str(),
        "edge-1 could not dial 127.0.0.1:9996: connection refused",
    )];
    failures_tell(world, &failures);
}
