//! API cache of a cluster at two edges of one pool, with a network of their own beside their uplinks to the cloud.
//!
//! kubectl, informers of client-go, reflectors of kube-rs, `CoreDNS` and kube-proxy read from the edges the objects that
//! `examples/api-cache` names. After each cut, restart or kill, all of them finally see the state of the API server.
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
        "one_edge_of_a_pool_reads_for_all_members",
        cuts::one_edge_of_a_pool_reads_for_all_members,
    ),
    (
        "kubectl_reads_the_same_as_in_the_cloud",
        kubectl::reads_the_same_as_in_the_cloud,
    ),
    (
        "kubectl_gets_errors_for_unsupported_requests",
        kubectl::gets_errors_for_unsupported_requests,
    ),
    (
        "readers_catch_up_after_a_gateway_outage",
        cuts::readers_catch_up_after_a_gateway_outage,
    ),
    (
        "readers_catch_up_after_an_api_server_restart",
        cuts::readers_catch_up_after_an_api_server_restart,
    ),
    (
        "a_hanging_api_server_is_detected_and_its_age_reported",
        cuts::a_hanging_api_server_is_detected_and_its_age_reported,
    ),
    (
        "a_cut_leader_uplink_moves_leadership_and_both_see_changes",
        cuts::a_cut_leader_uplink_moves_leadership_and_both_see_changes,
    ),
    (
        "another_node_leads_after_the_leader_is_killed",
        cuts::another_node_leads_after_the_leader_is_killed,
    ),
    (
        "all_uplinks_may_be_cut_and_repaired_in_any_order",
        cuts::all_uplinks_may_be_cut_and_repaired_in_any_order,
    ),
    (
        "coredns_and_kube_proxy_start_offline_and_catch_up",
        apps::coredns_and_kube_proxy_start_offline_and_catch_up,
    ),
    (
        "nodes_started_without_the_cloud_serve_their_cached_state",
        restarts::nodes_started_without_the_cloud_serve_their_cached_state,
    ),
    (
        "a_damaged_file_is_set_aside_and_reported",
        restarts::a_damaged_file_is_set_aside_and_reported,
    ),
    (
        "programs_can_read_over_tls",
        tls::programs_can_read_over_tls,
    ),
    (
        "yurthubs_read_at_the_pools_edges_through_cuts",
        yurthub::read_at_the_pools_edges_through_cuts,
    ),
    (
        "a_missing_gateway_permission_is_named",
        restarts::a_missing_gateway_permission_is_named,
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
