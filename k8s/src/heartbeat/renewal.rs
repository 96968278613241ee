//! Renews a node's Lease for each accepted heartbeat, if the Lease is old.
//!
//! The Lease is read, and written at the version that was read. A conflict means that the node is back, or that another gateway
//! has renewed the Lease for another member. A Lease that does not exist is never created.
//!
//! The Node is annotated before its Lease is renewed for the first time. The reconciler finds delegated nodes by this annotation,
//! so no annotation of a Lease can remain without it.

use super::{
    api::{ApiError, NAMESPACE, NODE_ANNOTATION, send},
    node_events::{EventQueue, NodeChange, NodeEvent},
    node_lease::{Renewal, renew},
};
use causeway_gateway::{
    control::heartbeat::{AcceptedHeartbeat, AcceptedHeartbeats},
    metrics::Metrics,
    state::Nodes,
};
use causeway_rt::log_throttle::LogThrottle;
use causeway_tunnel::heartbeat::NONCE_INTERVAL;
use futures_util::{StreamExt, stream};
use k8s_openapi::{
    api::{coordination::v1::Lease, core::v1::Node},
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use std::{sync::Arc, time::Duration};

/// Heartbeats that are handled at once.
const CONCURRENT: usize = 16;
/// Age up to which a heartbeat counts. After this time the node has sent another one, or its kubelet may be dead.
const MAX_AGE: Duration = NONCE_INTERVAL;

/// Renewer of Leases.
pub(super) struct LeaseRenewer {
    leases: Api<Lease>,
    objects: Api<Node>,
    nodes: Nodes,
    metrics: Arc<Metrics>,
    events: EventQueue,
    failures: LogThrottle,
}

impl LeaseRenewer {
    pub(super) fn new(
        client: &Client,
        nodes: &Nodes,
        metrics: &Arc<Metrics>,
        events: &EventQueue,
    ) -> Self {
        Self {
            leases: Api::namespaced(client.clone(), NAMESPACE),
            objects: Api::all(client.clone()),
            nodes: nodes.clone(),
            metrics: metrics.clone(),
            events: events.clone(),
            failures: LogThrottle::default(),
        }
    }

    /// Renews Leases until no more heartbeats can arrive.
    pub(super) async fn run(self, accepted: AcceptedHeartbeats) {
        let heartbeats = stream::unfold(accepted, async |mut accepted| {
            let heartbeat = accepted.recv().await?;
            Some((heartbeat, accepted))
        });
        let handling =
            heartbeats.for_each_concurrent(CONCURRENT, |heartbeat| self.handle(heartbeat));
        handling.await;
    }

    async fn handle(&self, heartbeat: AcceptedHeartbeat) {
        let renewed = self.renew(&heartbeat).await;
        let result = renewed.as_ref().copied().unwrap_or("failed");
        self.metrics.count_delegated_heartbeat(result);
        if let Err(error) = renewed
            && let Some(count) = self.failures.record()
        {
            tracing::warn!(
                node = %heartbeat.node,
                why = %error,
                count,
                "the Lease of a node was not renewed for a delegated heartbeat; the node's next heartbeat is another try"
            );
        }
    }

    /// Renews the Lease of a heartbeat's node if it is old. Returns the result as the metric's label has it.
    pub(super) async fn renew(
        &self,
        heartbeat: &AcceptedHeartbeat,
    ) -> Result<&'static str, ApiError> {
        if heartbeat.received_at.elapsed() > MAX_AGE {
            return Ok("expired");
        }
        let (node, delegate) = (heartbeat.node.as_str(), heartbeat.delegate.as_str());
        let Some(lease) = send(self.leases.get_opt(node)).await? else {
            return Ok("no_lease");
        };
        let (next, count) = match renew(&lease, node, Timestamp::now()) {
            Renewal::Renewed(next, count) => (next, count),
            Renewal::Fresh => return Ok("fresh"),
            Renewal::Foreign => return Ok("foreign_lease"),
        };
        if count == 1 || !self.nodes.is_delegated(&heartbeat.node) {
            let change = json!({ "metadata": { "annotations": { NODE_ANNOTATION: delegate } } });
            let (parameters, patch) = (PatchParams::default(), Patch::Merge(change));
            send(self.objects.patch(node, &parameters, &patch)).await?;
        }
        let parameters = PostParams::default();
        let written = match send(self.leases.replace(node, &parameters, &next)).await {
            Ok(written) => written,
            Err(error) if error.is_conflict() => return Ok("conflict"),
            Err(error) => return Err(error),
        };
        if count == 1 {
            tracing::info!(
                node,
                delegate,
                "a node has lost its gateways; a member of its pool reports that its kubelet is alive, and this gateway renews its Lease"
            );
            self.events.push(NodeEvent {
                node: node.to_owned(),
                change: NodeChange::Delegated {
                    delegate: delegate.to_owned(),
                },
                version: written.resource_version().unwrap_or_default(),
            });
        }
        Ok("renewed")
    }
}
