//! Reports confirmed addresses that several nodes share.
//!
//! At most one of these nodes is reached by such an address (`state::nodes`); the others are reached only by name. The log names
//! each address with its nodes, and the metric counts the addresses. The admin API names the nodes as well, and so does the error
//! of a request to a shared address.

use crate::{
    metrics::Metrics,
    state::{NodesWriter, nodes::AddressConflicts},
};
use causeway_certs::NodeName;
use std::{collections::BTreeSet, sync::Arc, time::Duration};
use tokio::time::sleep;

/// Time to wait for further changes, so that a fleet that joins causes one report.
const BATCH_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of log lines of one report.
const MAX_LINES: usize = 20;
/// Maximum number of nodes named in one line.
const MAX_NAMES: usize = 5;

/// Reports conflicts when the table of nodes changes.
pub(crate) async fn run(nodes: NodesWriter, metrics: Arc<Metrics>) {
    let mut changes = nodes.subscribe();
    let nodes = nodes.reader();
    let mut reported = AddressConflicts::new();
    loop {
        let conflicts = nodes.address_conflicts();
        metrics.set_address_conflicts(conflicts.len());
        report(&reported, &conflicts);
        reported = conflicts;
        sleep(BATCH_INTERVAL).await;
        if changes.changed().await.is_err() {
            return;
        }
    }
}

fn report(reported: &AddressConflicts, current: &AddressConflicts) {
    let new = current
        .iter()
        .filter(|(address, conflict)| reported.get(address) != Some(conflict));
    for (address, conflict) in new.clone().take(MAX_LINES) {
        let nodes = join_names(&conflict.nodes);
        if let Some(holder) = &conflict.holder {
            tracing::warn!(%address, nodes, %holder, "several nodes claim this address: the address leads only to its holder, use names for the other nodes");
        } else {
            tracing::warn!(%address, nodes, "several nodes have this address: the address leads to none of them, use their names");
        }
    }
    let more = new.count().saturating_sub(MAX_LINES);
    if more > 0 {
        tracing::warn!(
            more,
            "several nodes have the same address; `causeway status` lists them"
        );
    }
    let resolved = reported
        .keys()
        .filter(|address| !current.contains_key(address));
    for address in resolved.take(MAX_LINES) {
        tracing::info!(%address, "only one node has this address now");
    }
}

/// Returns the names of the nodes, or the first [`MAX_NAMES`] names and the number of the others.
fn join_names(nodes: &BTreeSet<NodeName>) -> String {
    let names: Vec<_> = nodes.iter().take(MAX_NAMES).map(NodeName::as_str).collect();
    let names = names.join(", ");
    match nodes.len().saturating_sub(MAX_NAMES) {
        0 => names,
        more => format!("{names} and {more} more"),
    }
}
