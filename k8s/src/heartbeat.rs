//! Controller of delegated heartbeats: renews the Leases of nodes that have lost their gateways, and keeps their pods.
//!
//! 1. Each gateway renews the Lease of a node when it gets a heartbeat of it, if the Lease is old (`renewal`). It marks the Node
//!    with an annotation, by which all gateways know the nodes concerned.
//! 2. One gateway at a time, which holds the Lease `causeway-heartbeats`, looks at these nodes every few seconds (`reconcile`). It
//!    taints those that have been delegated for a while, and undoes everything when a node is back.
//! 3. The state is in annotations of the Lease of the node (`node_lease`): another gateway can go on at any time.
//!
//! Never ends the process: it retries after any failure. A node of which no heartbeat arrives becomes `NotReady` as without this.

mod api;
mod node_lease;
mod reconcile;
mod renewal;

#[cfg(test)]
mod tests;

use crate::leader_election::LeaderElector;
use api::LOOK;
pub(crate) use api::NODE_MARK;
use causeway_gateway::{
    config, control::heartbeat::AcceptedHeartbeats, metrics::Metrics, state::Nodes,
};
use kube::Client;
use reconcile::Reconciler;
use renewal::LeaseRenewer;
use std::{convert::Infallible, sync::Arc, time::Duration};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// Name of the Lease that selects the gateway which manages delegated nodes.
const ELECTION: &str = "causeway-heartbeats";
/// Time after which another gateway replaces one that has died, as Kubernetes' own components have it.
const ELECTION_DURATION: Duration = Duration::from_secs(15);

/// Controller of the Leases of nodes without a gateway.
pub struct HeartbeatController {
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
    pub async fn run(self, stop: CancellationToken) {
        let renewer = LeaseRenewer::new(&self.client, &self.gateway, &self.nodes, &self.metrics);
        let reconciler = Reconciler::new(&self.client, &self.rules, &self.nodes);
        let election = LeaderElector::new(
            self.client.clone(),
            "delegated nodes",
            (&self.rules.namespace, ELECTION),
            format!("{}_{:016x}", self.gateway, rand::random::<u64>()),
            ELECTION_DURATION,
        );
        let renewing = async {
            stop.run_until_cancelled(renewer.run(self.accepted)).await;
        };
        let counting = async {
            let counting = count(&self.nodes, &self.metrics);
            stop.run_until_cancelled(counting).await;
        };
        let managing = manage(reconciler, election, &self.metrics, &stop);
        tokio::join!(renewing, counting, managing);
    }
}

/// Keeps the metric of delegated nodes.
async fn count(nodes: &Nodes, metrics: &Metrics) -> Infallible {
    loop {
        metrics.delegated_nodes(nodes.delegated().len());
        sleep(LOOK).await;
    }
}

/// Manages delegated nodes while this gateway holds the Lease of the election.
async fn manage(
    mut reconciler: Reconciler,
    mut election: LeaderElector,
    metrics: &Metrics,
    stop: &CancellationToken,
) {
    loop {
        if stop.run_until_cancelled(election.acquire()).await.is_none() {
            break;
        }
        tracing::info!("this gateway now manages nodes with delegated heartbeats");
        metrics.delegated_nodes_leading(true);
        let lost = tokio::select! {
            biased;
            () = stop.cancelled() => None,
            why = election.renew_until_lost() => Some(why),
            never = reconciler.run() => match never {},
        };
        metrics.delegated_nodes_leading(false);
        match lost {
            Some(why) => tracing::warn!(
                why,
                "the lease of delegated nodes is lost; this gateway is on standby"
            ),
            None => break,
        }
    }
    election.release().await;
}
