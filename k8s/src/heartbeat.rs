//! Controller of delegated heartbeats: renews the Leases of nodes that have lost their gateways, and keeps their pods.
//!
//! 1. Each gateway renews the Lease of a node when it gets a heartbeat of the node, if the Lease is old (`renewal`). Before the
//!    first renewal it annotates the Node, so all gateways know the delegated nodes.
//! 2. One gateway at a time holds the Lease `causeway-heartbeats`. It reads these nodes every few seconds (`reconcile`). It taints
//!    those that have been delegated for a while, and undoes everything when a node is back.
//! 3. The state is in annotations of the Lease of the node (`node_lease`), so another gateway can continue at any time.
//! 4. `node_events` writes an event on the Node at both changes.
//!
//! The controller retries after any failure. A node without heartbeats becomes `NotReady`, as in a cluster without Causeway.

mod api;
mod node_events;
mod node_lease;
mod reconcile;
mod renewal;

#[cfg(test)]
mod tests;

use crate::{event_writer::EventWriter, leader_election::LeaderElector};
pub(crate) use api::NODE_ANNOTATION;
use causeway_certs::NodeName;
use causeway_gateway::{
    config,
    control::heartbeat::AcceptedHeartbeats,
    metrics::Metrics,
    state::{Nodes, NodesWriter},
};
use kube::Client;
use node_events::{EventQueue, write_events};
use reconcile::{RECONCILE_INTERVAL, Reconciler};
use renewal::LeaseRenewer;
use std::{convert::Infallible, sync::Arc, time::Duration};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// Name of the Lease that selects the gateway which manages delegated nodes.
const ELECTION: &str = "causeway-heartbeats";
/// Time after which another gateway replaces one that has died, as Kubernetes' own components have it.
const ELECTION_DURATION: Duration = Duration::from_secs(15);

/// Nodes that one log line names at most.
const MAX_NAMES: usize = 20;

/// Controller of the Leases of nodes without a gateway.
pub(crate) struct HeartbeatController {
    /// The cluster's API.
    pub client: Client,
    /// Configuration of taints.
    pub rules: config::Heartbeats,
    /// Heartbeats that this gateway has accepted.
    pub accepted: AcceptedHeartbeats,
    /// Table of nodes.
    pub nodes: Nodes,
    /// Metrics of the controller.
    pub metrics: Arc<Metrics>,
    /// Name of this gateway among the candidates for the Lease; a random part is added.
    pub gateway: String,
}

impl HeartbeatController {
    /// Runs the controller. Returns soon after `stop`, when the Lease of the election is released.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let (events, queued) = EventQueue::new();
        let operation = "writing an event for a Node with delegated heartbeats";
        let writer = EventWriter::new(self.client.clone(), self.gateway.clone(), operation);
        let renewer = LeaseRenewer::new(&self.client, &self.nodes, &self.metrics, &events);
        let reconciler = Reconciler::new(&self.client, &self.rules, &self.nodes, &events);
        let election = LeaderElector::new(
            self.client.clone(),
            "nodes with delegated heartbeats",
            (&self.rules.namespace, ELECTION),
            format!("{}_{:016x}", self.gateway, rand::random::<u64>()),
            ELECTION_DURATION,
        );
        let renewals = stop.run_until_cancelled(renewer.run(self.accepted));
        let counts = stop.run_until_cancelled(count_nodes(&self.nodes, &self.metrics));
        let events = stop.run_until_cancelled(write_events(writer, queued));
        let reconciliations = reconcile_as_leader(reconciler, election, &self.metrics, &stop);
        tokio::join!(renewals, counts, events, reconciliations);
    }
}

/// Logs the names of nodes that are still annotated as delegated, although this gateway does not manage them: delegated heartbeats
/// are disabled. Returns after the cluster has named its nodes.
pub(crate) async fn warn_about_delegated_nodes(nodes: NodesWriter) {
    let (mut changes, nodes) = (nodes.subscribe(), nodes.reader());
    while !nodes.has_cluster() {
        if changes.changed().await.is_err() {
            return;
        }
    }
    if let Some(names) = delegated_names(&nodes) {
        tracing::warn!(
            nodes = names,
            annotation = NODE_ANNOTATION,
            "kubernetes.heartbeats.enabled is false at this gateway, and nodes are still annotated as delegated; if it is false at all gateways, remove their taint and annotations as docs/howto/heartbeats.md describes"
        );
    }
}

/// Returns the names of delegated nodes, the first of them if there are many, or `None` if there are none.
fn delegated_names(nodes: &Nodes) -> Option<String> {
    let delegated = nodes.delegated();
    let names: Vec<_> = delegated
        .iter()
        .take(MAX_NAMES)
        .map(NodeName::as_str)
        .collect();
    let more = delegated.len() - names.len();
    match (names.is_empty(), more) {
        (true, _) => None,
        (false, 0) => Some(names.join(", ")),
        (false, more) => Some(format!("{} and {more} more", names.join(", "))),
    }
}

/// Updates the metric of delegated nodes.
async fn count_nodes(nodes: &Nodes, metrics: &Metrics) -> Infallible {
    loop {
        metrics.set_delegated_nodes(nodes.delegated().len());
        sleep(RECONCILE_INTERVAL).await;
    }
}

/// Reconciles delegated nodes while this gateway holds the Lease of the election.
async fn reconcile_as_leader(
    mut reconciler: Reconciler,
    mut election: LeaderElector,
    metrics: &Metrics,
    stop: &CancellationToken,
) {
    loop {
        if stop.run_until_cancelled(election.acquire()).await.is_none() {
            break;
        }
        tracing::info!(
            "this gateway holds the Lease causeway-heartbeats and now manages the taints of nodes with delegated heartbeats"
        );
        metrics.set_delegated_nodes_leading(true);
        let lost = tokio::select! {
            biased;
            () = stop.cancelled() => None,
            why = election.renew_until_lost() => Some(why),
            never = reconciler.run() => match never {},
        };
        metrics.set_delegated_nodes_leading(false);
        match lost {
            Some(why) => tracing::warn!(
                why,
                "this gateway has lost the Lease causeway-heartbeats; the gateway that acquires it manages the taints of nodes with delegated heartbeats"
            ),
            None => break,
        }
    }
    election.release().await;
}
