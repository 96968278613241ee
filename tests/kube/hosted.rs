//! Setup by names without the gateway's DNS: a real `CoreDNS` reads them from the hosts file in a `ConfigMap`.
//!
//! The gateway is that of `examples/dns`, with `examples/hosts` in place of its own DNS. The only difference is how a name
//! becomes the gateway's address. Therefore these tests only show that this works, with verified certificates and without.

use libtest_mimic::Trial;

use crate::{
    steps,
    world::{Checks, Way, World},
};

pub(crate) fn trials() -> Vec<Trial> {
    [("hosted_unchecked", Checks::Off), ("hosted", Checks::On)]
        .into_iter()
        .map(|(name, checks)| {
            steps::by(
                format!("{name}::logs_and_sessions_reach_the_node_that_was_meant"),
                Way::Hosts(checks),
                logs_and_sessions_reach_the_node_that_was_meant,
            )
        })
        .collect()
}

/// By websocket, and by SPDY, which carries 1 MiB in both directions.
fn logs_and_sessions_reach_the_node_that_was_meant(world: &mut World) {
    steps::logs_and_exec(world);
    steps::spdy(world);
    steps::nodes_are_proxied_to(world);
}
