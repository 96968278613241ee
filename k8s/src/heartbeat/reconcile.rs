//! Reconciles delegated nodes: the taint and the condition `Ready` while they are delegated, and their return.
//!
//! Each step is idempotent, and reads before it writes: `OpenYurt`'s delegate-lease controller may do the same. Nothing is
//! written for a node whose state is as it should be.

use super::{
    api::{ApiError, NAMESPACE, NODE_ANNOTATION, send},
    node_events::{EventQueue, NodeChange, NodeEvent},
    node_lease::{LeaseState, age, is_due, state, without_annotations},
};
use crate::log_throttle::LogThrottle;
use causeway_certs::NodeName;
use causeway_gateway::{config, state::Nodes};
use k8s_openapi::{
    api::{
        coordination::v1::Lease,
        core::v1::{Node, NodeCondition, Taint},
    },
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::{SignedDuration, Timestamp},
};
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use std::{convert::Infallible, time::Duration};
use tokio::time::sleep;

/// Interval between two passes over all delegated nodes: the return of a node is noticed within this time.
pub(super) const RECONCILE_INTERVAL: Duration = Duration::from_secs(5);
/// Key of the taint that keeps new pods away, as `OpenYurt` has it.
const TAINT: &str = "node.openyurt.io/unschedulable";
const EFFECT: &str = "NoSchedule";
/// Reason and message of the condition `Ready`, as `OpenYurt` has them.
const REASON: &str = "NodeDelegateLease";
const MESSAGE: &str = "Node disconnect with ApiServer and lease delegate.";
/// Age up to which a delegated renewal shows that the node is alive; kube-controller-manager waits as long, or longer.
const GRACE_PERIOD: SignedDuration = SignedDuration::from_secs(40);

/// Reconciler of delegated nodes.
pub(super) struct Reconciler {
    leases: Api<Lease>,
    objects: Api<Node>,
    rules: config::Heartbeats,
    nodes: Nodes,
    events: EventQueue,
    failure_log: LogThrottle,
}

impl Reconciler {
    pub(super) fn new(
        client: &Client,
        rules: &config::Heartbeats,
        nodes: &Nodes,
        events: &EventQueue,
    ) -> Self {
        Self {
            leases: Api::namespaced(client.clone(), NAMESPACE),
            objects: Api::all(client.clone()),
            rules: rules.clone(),
            nodes: nodes.clone(),
            events: events.clone(),
            failure_log: LogThrottle::new("managing a node with delegated heartbeats"),
        }
    }

    pub(super) async fn run(&mut self) -> Infallible {
        loop {
            let mut failed = false;
            for node in self.nodes.delegated() {
                let reconciled = match self.reconcile(&node).await {
                    // `OpenYurt`'s controller removes its taint at the same moment: once more at once.
                    Err(error) if error.is_conflict() => self.reconcile(&node).await,
                    reconciled => reconciled,
                };
                match reconciled {
                    Ok(()) => {}
                    // The next pass sees the other writer's result.
                    Err(error) if error.is_conflict() => {
                        tracing::debug!(%node, %error, "another process has changed the node");
                    }
                    Err(error) => {
                        failed = true;
                        self.failure_log
                            .log_failure(&format!("node {node}: {error}"));
                    }
                }
            }
            if !failed {
                self.failure_log.log_recovery();
            }
            sleep(RECONCILE_INTERVAL).await;
        }
    }

    pub(super) async fn reconcile(&self, node: &NodeName) -> Result<(), ApiError> {
        let (name, now) = (node.as_str(), Timestamp::now());
        let Some(lease) = send(self.leases.get_opt(name)).await? else {
            return self.clean_node(name).await.map(drop);
        };
        match state(&lease) {
            LeaseState::Delegated(count) => {
                let is_alive = age(&lease, now).is_some_and(|age| age < GRACE_PERIOD);
                if !self.rules.taint || !is_alive {
                    return Ok(());
                }
                self.protect_node(name, count).await
            }
            LeaseState::Returned => {
                let direct = without_annotations(&lease);
                send(self.leases.replace(name, &PostParams::default(), &direct)).await?;
                self.release_node(name).await
            }
            // The Node is annotated before its Lease: the first delegated renewal may follow.
            LeaseState::Direct if is_due(&lease, now) => Ok(()),
            LeaseState::Direct => self.release_node(name).await,
        }
    }

    /// Sets the condition `Ready` of a delegated node, and taints it from the threshold on.
    async fn protect_node(&self, name: &str, count: u32) -> Result<(), ApiError> {
        let mut object = send(self.objects.get(name)).await?;
        if let Some(ready) = ready(&object).filter(|ready| ready.status == "Unknown") {
            object = self.set_ready(&object, ready).await?;
            tracing::info!(
                node = name,
                "set the condition Ready of a node with delegated heartbeats to True"
            );
        }
        if count >= self.rules.threshold && !is_tainted(&object) {
            let mut taints = taints(&object);
            taints.push(Taint {
                key: TAINT.to_owned(),
                value: Some("true".to_owned()),
                effect: EFFECT.to_owned(),
                time_added: None,
            });
            let change = json!({ "spec": { "taints": taints } });
            self.patch(&object, change).await?;
            tracing::info!(
                node = name,
                count,
                taint = TAINT,
                "tainted a node with delegated heartbeats: it gets no new pods"
            );
        }
        Ok(())
    }

    async fn set_ready(&self, object: &Node, ready: &NodeCondition) -> Result<Node, ApiError> {
        let ready = NodeCondition {
            status: "True".to_owned(),
            reason: Some(REASON.to_owned()),
            message: Some(MESSAGE.to_owned()),
            last_transition_time: Some(Time(Timestamp::now())),
            ..ready.clone()
        };
        let change = json!({
            "metadata": { "resourceVersion": object.resource_version() },
            "status": { "conditions": [ready] },
        });
        let (name, parameters) = (object.name_any(), PatchParams::default());
        let patch = Patch::Strategic(change);
        send(self.objects.patch_status(&name, &parameters, &patch)).await
    }

    /// Cleans a node that renews its Lease itself, and reports its return.
    async fn release_node(&self, name: &str) -> Result<(), ApiError> {
        if let Some(object) = self.clean_node(name).await? {
            tracing::info!(node = name, "a node sends its own heartbeats again");
            self.events.push(NodeEvent {
                node: name.to_owned(),
                change: NodeChange::Direct,
                version: object.resource_version().unwrap_or_default(),
            });
        }
        Ok(())
    }

    /// Removes the taint and the annotation of a node that is not delegated any more. Returns the changed Node, or `None` if there
    /// was nothing to remove. An earlier configuration may have tainted the node, so the current one does not matter here.
    async fn clean_node(&self, name: &str) -> Result<Option<Node>, ApiError> {
        // The table of nodes may be older than the object.
        let object = send(self.objects.get_opt(name)).await?;
        let annotated = |object: &Node| object.annotations().contains_key(NODE_ANNOTATION);
        let Some(object) = object.filter(annotated) else {
            return Ok(None);
        };
        let mut change = json!({ "metadata": { "annotations": { NODE_ANNOTATION: null } } });
        if is_tainted(&object) {
            let mut taints = taints(&object);
            taints.retain(|taint| taint.key != TAINT);
            change["spec"] = json!({ "taints": taints });
        }
        self.patch(&object, change).await.map(Some)
    }

    /// Changes a Node at the version that was read, since a list of taints is replaced as a whole. Returns the new version.
    async fn patch(&self, object: &Node, mut change: Value) -> Result<Node, ApiError> {
        change["metadata"]["resourceVersion"] = json!(object.resource_version());
        let (name, parameters) = (object.name_any(), PatchParams::default());
        let patch = Patch::Merge(change);
        send(self.objects.patch(&name, &parameters, &patch)).await
    }
}

fn taints(object: &Node) -> Vec<Taint> {
    let spec = object.spec.as_ref();
    let taints = spec.and_then(|spec| spec.taints.clone());
    taints.unwrap_or_default()
}

fn is_tainted(object: &Node) -> bool {
    taints(object).iter().any(|taint| taint.key == TAINT)
}

fn ready(object: &Node) -> Option<&NodeCondition> {
    let conditions = object.status.as_ref()?.conditions.as_ref()?;
    conditions
        .iter()
        .find(|condition| condition.type_ == "Ready")
}
