//! Renews a node's Lease for each accepted heartbeat, if the Lease is old.
//!
//! The Lease is read, and written at the version that was read. A conflict means that the node is back, or that another gateway
//! has renewed the Lease for another member. A Lease that does not exist is never created.

use super::{
    api::{ApiError, BOUND, NAMESPACE, NODE_MARK},
    node_lease::{Renewal, renew},
};
use crate::{
    event_writer::{EventWriter, WarningEvent},
    log_throttle::LogThrottle,
};
use causeway_gateway::{
    control::heartbeat::{AcceptedHeartbeat, AcceptedHeartbeats},
    metrics::Metrics,
    state::Nodes,
};
use futures_util::{StreamExt, stream};
use k8s_openapi::{
    api::{
        coordination::v1::Lease,
        core::v1::{Node, ObjectReference},
    },
    jiff::Timestamp,
};
use kube::{
    Api, Client, Resource,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use std::sync::Arc;
use tokio::{sync::Mutex, time::timeout};

/// Heartbeats that are handled at once.
const CONCURRENT: usize = 16;

/// Renewer of Leases.
pub(super) struct LeaseRenewer {
    leases: Api<Lease>,
    objects: Api<Node>,
    nodes: Nodes,
    metrics: Arc<Metrics>,
    events: Mutex<EventWriter>,
    failing: Mutex<LogThrottle>,
}

impl LeaseRenewer {
    pub(super) fn new(
        client: &Client,
        gateway: &str,
        nodes: &Nodes,
        metrics: &Arc<Metrics>,
    ) -> Self {
        let what = "writing an event for a Node with delegated heartbeats";
        let events = EventWriter::new(client.clone(), gateway.to_owned(), what);
        Self {
            leases: Api::namespaced(client.clone(), NAMESPACE),
            objects: Api::all(client.clone()),
            nodes: nodes.clone(),
            metrics: metrics.clone(),
            events: Mutex::new(events),
            failing: Mutex::new(LogThrottle::new("renewing the Lease of a node")),
        }
    }

    /// Renews Leases until no more heartbeats can arrive.
    pub(super) async fn run(self, accepted: AcceptedHeartbeats) {
        let beats = stream::unfold(accepted, async |mut accepted| {
            let beat = accepted.recv().await?;
            Some((beat, accepted))
        });
        let handling = beats.for_each_concurrent(CONCURRENT, |beat| self.handle(beat));
        handling.await;
    }

    async fn handle(&self, beat: AcceptedHeartbeat) {
        let renewed = self.renew(&beat).await;
        let result = renewed.as_ref().copied().unwrap_or("failed");
        self.metrics.delegated_beat(result);
        let mut failing = self.failing.lock().await;
        match renewed {
            Ok(_) => failing.log_recovery(),
            Err(error) => failing.log_failure(&format!("node {}: {error}", beat.node)),
        }
    }

    /// Returns the result as the metric's label has it.
    pub(super) async fn renew(&self, beat: &AcceptedHeartbeat) -> Result<&'static str, ApiError> {
        let node = beat.node.as_str();
        let found = timeout(BOUND, self.leases.get_opt(node)).await??;
        let Some(lease) = found else {
            return Ok("no_lease");
        };
        let (next, count) = match renew(&lease, node, Timestamp::now()) {
            Renewal::Renewed(next, count) => (next, count),
            Renewal::Fresh => return Ok("fresh"),
            Renewal::Foreign => return Ok("foreign_lease"),
        };
        let parameters = PostParams::default();
        let put = timeout(BOUND, self.leases.replace(node, &parameters, &next)).await;
        match put.map_err(ApiError::from).and_then(|put| Ok(put?)) {
            Ok(_) => {}
            Err(error) if error.is_conflict() => return Ok("conflict"),
            Err(error) => return Err(error),
        }
        if count == 1 || !self.nodes.is_delegated(&beat.node) {
            self.mark(beat).await?;
        }
        Ok("renewed")
    }

    /// Marks the Node, by which all gateways know that it is delegated, and writes an event.
    async fn mark(&self, beat: &AcceptedHeartbeat) -> Result<(), ApiError> {
        let (node, delegate) = (beat.node.as_str(), beat.delegate.as_str());
        let mark = json!({ "metadata": { "annotations": { NODE_MARK: delegate } } });
        let parameters = PatchParams::default();
        let patch = Patch::Merge(mark);
        let patched = self.objects.patch(node, &parameters, &patch);
        timeout(BOUND, patched).await??;
        tracing::info!(node, delegate, "the heartbeats of a node are delegated");
        let text = format!("heartbeat delegated through {delegate}");
        // With its name as uid, as in the events of kubelets.
        let about = ObjectReference {
            api_version: Some(Node::api_version(&()).into_owned()),
            kind: Some(Node::kind(&()).into_owned()),
            name: Some(node.to_owned()),
            uid: Some(node.to_owned()),
            ..ObjectReference::default()
        };
        let warning = WarningEvent {
            regarding: &about,
            reason: "HeartbeatDelegated",
            action: "RenewLease",
            note: &text,
        };
        self.events.lock().await.warn(&warning).await;
        Ok(())
    }
}
