//! API cache of a cluster at two edges of one pool, with a network of their own beside their uplinks to the cloud.
//!
//! kubectl, informers of client-go, reflectors of kube-rs, `CoreDNS` and kube-proxy read at the edges the objects that
//! `examples/api-cache` names. Whatever is cut, restarted or killed, all of them see in the end the state of the API server.
//! Meanwhile each of them gets an answer. A trial leaves everything running; the informers read through all of them.

mod apps;
mod cuts;
mod examples;
mod kubectl;
pub(crate) mod reflector;
mod restarts;
mod scene;
mod tls;
mod views;
mod yurthub;

use libtest_mimic::Trial;

use scene::Scene;

/// Function that runs a trial.
type Run = fn(&mut Scene);

/// In this order.
const TRIALS: [(&str, Run); 15] = [
    (
        "one_edge_of_a_pool_reads_for_all_of_it",
        cuts::one_edge_of_a_pool_reads_for_all_of_it,
    ),
    (
        "kubectl_reads_at_an_edge_what_it_reads_in_the_cloud",
        kubectl::reads_what_it_reads_in_the_cloud,
    ),
    (
        "kubectl_is_told_what_an_edge_does_not_do",
        kubectl::is_told_what_an_edge_does_not_do,
    ),
    (
        "a_gateway_that_was_away_is_caught_up_with",
        cuts::a_gateway_that_was_away_is_caught_up_with,
    ),
    (
        "an_api_server_that_was_restarted_is_caught_up_with",
        cuts::an_api_server_that_was_restarted_is_caught_up_with,
    ),
    (
        "an_api_server_that_hangs_is_noticed_and_how_long_is_told",
        cuts::an_api_server_that_hangs_is_noticed_and_how_long_is_told,
    ),
    (
        "where_the_leaders_uplink_is_cut_another_leads_and_both_see_changes",
        cuts::where_the_leaders_uplink_is_cut_another_leads_and_both_see_changes,
    ),
    (
        "where_the_leader_is_killed_another_leads",
        cuts::where_the_leader_is_killed_another_leads,
    ),
    (
        "with_all_uplinks_cut_both_serve_and_mended_in_any_order_both_are_right",
        cuts::with_all_uplinks_cut_both_serve_and_mended_in_any_order_both_are_right,
    ),
    (
        "coredns_and_kube_proxy_start_while_the_cloud_is_away_and_follow_when_it_is_back",
        apps::start_while_the_cloud_is_away_and_follow_when_it_is_back,
    ),
    (
        "nodes_that_start_while_the_cloud_is_away_serve_what_they_knew",
        restarts::nodes_that_start_while_the_cloud_is_away_serve_what_they_knew,
    ),
    (
        "a_damaged_file_is_set_aside_and_told",
        restarts::a_damaged_file_is_set_aside_and_told,
    ),
    (
        "programs_that_want_tls_read_by_it",
        tls::programs_that_want_tls_read_by_it,
    ),
    (
        "yurthubs_read_at_the_pools_edges_through_cuts",
        yurthub::read_at_the_pools_edges_through_cuts,
    ),
    (
        "a_right_that_the_gateway_misses_is_named",
        restarts::a_right_that_the_gateway_misses_is_named,
    ),
];

pub(crate) fn trials() -> Vec<Trial> {
    TRIALS.into_iter().map(trial).collect()
}

fn trial((name, run): (&str, Run)) -> Trial {
    Trial::test(format!("api_cache::{name}"), move || {
        let mut scene = scene::scene();
        scene.whole();
        run(&mut scene);
        Ok(())
    })
}
