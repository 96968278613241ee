//! Nodes whose uplink is cut keep their pods: a real kube-controller-manager judges nodes by their Leases, and real kubelets are
//! asked for their health.
//!
//! Each test is a row of a table. A recorder samples all nodes once a second, and prints the row. With `CAUSEWAY_TEST_FULL=1` the
//! cuts last longer, and times are checked.

pub(crate) mod api;
mod light;
mod openyurt;
pub(crate) mod recorder;
mod rows;
mod scene;
mod sites;

use libtest_mimic::Trial;

use crate::trial;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial(
            "heartbeats::a_cut_off_node_stays_ready_while_its_kubelet_lives",
            rows::a_cut_off_node_stays_ready_while_its_kubelet_lives,
        ),
        trial(
            "heartbeats::another_member_carries_heartbeats_when_the_delegate_is_cut_off",
            rows::another_member_carries_heartbeats_when_the_delegate_is_cut_off,
        ),
        trial(
            "heartbeats::a_pool_that_is_cut_off_is_not_ready_and_keeps_its_pods_for_a_while",
            rows::a_pool_that_is_cut_off_is_not_ready_and_keeps_its_pods_for_a_while,
        ),
        trial(
            "heartbeats::an_uplink_that_flaps_makes_no_node_unready",
            rows::an_uplink_that_flaps_makes_no_node_unready,
        ),
        trial(
            "heartbeats::a_cut_during_a_change_of_the_leading_gateway",
            rows::a_cut_during_a_change_of_the_leading_gateway,
        ),
        trial(
            "heartbeats::two_members_send_heartbeats_of_one_node_at_once",
            rows::two_members_send_heartbeats_of_one_node_at_once,
        ),
        trial(
            "heartbeats::a_clock_that_is_off_by_a_day_changes_nothing",
            rows::a_clock_that_is_off_by_a_day_changes_nothing,
        ),
        trial(
            "heartbeats::a_kubelet_behind_a_yurthub_without_a_controller_of_openyurt",
            openyurt::a_kubelet_behind_a_yurthub_without_a_controller_of_openyurt,
        ),
        trial(
            "heartbeats::a_kubelet_behind_a_yurthub_beside_yurt_manager",
            openyurt::a_kubelet_behind_a_yurthub_beside_yurt_manager,
        ),
        trial(
            "heartbeats::a_site_of_fifty_nodes_is_cut_off_and_returns",
            sites::a_site_of_fifty_nodes_is_cut_off_and_returns,
        ),
    ]
}
