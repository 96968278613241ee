//! Reconciles delegated nodes: the taint and the condition `Ready` while they are delegated, and their return.
//!
//! Each step is idempotent, and reads before it writes: `OpenYurt`'s delegate-lease controller may do the same. Nothing is
//! written for a node whose state is as it should be.

use super::{
    api::{ApiError, BOUND, LOOK, NAMESPACE, NODE_MARK},
    node_lease::{LeaseState, age, state, without_annotations},
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
use std::convert::Infallible;
use tokio::time::{sleep, timeout};

/// Key of the taint that keeps new pods away, as `OpenYurt` has it.
const TAINT: &str = "node.openyurt.io/unschedulable";
const EFFECT: &str = "NoSchedule";
/// Reason and message of the condition `Ready`, as `OpenYurt` has them.
const REASON: &str = "NodeDelegateLease";
const MESSAGE: &str = "Node disconnect with ApiServer and lease delegate.";
/// Age up to which a delegated renewal shows that the node is alive; kube-controller-manager waits as long, or longer.
const CURRENT: SignedDuration = SignedDuration::from_secs(40);

/// Reconciler of delegated nodes.
pub(super) struct Reconciler {
    leases: Api<Lease>,
    objects: Api<Node>,
    rules: config::Heartbeats,
    nodes: Nodes,
    failing: LogThrottle,
}

impl Reconciler {
    pub(super) fn new(client: &Client, rules: &config::Heartbeats, nodes: &Nodes) -> Self {
        Self {
            leases: Api::namespaced(client.clone(), NAMESPACE),
            objects: Api::all(client.clone()),
            rules: rules.clone(),
            nodes: nodes.clone(),
            failing: LogThrottle::new("managing a node with delegated heartbeats"),
        }
    }

    pub(super) async fn run(&mut self) -> Infallible {
        loop {
            let mut failed = false;
            for node in self.nodes.delegated() {
                match self.reconcile(&node).await {
                    Ok(()) => {}
                    // The next look sees the other writer's result.
                    Err(error) if error.is_conflict() => {
                        tracing::debug!(%node, %error, "another process has changed the node");
                    }
                    Err(error) => {
                        failed = true;
                        self.failing.log_failure(&format!("node {node}: {error}"));
                    }
                }
            }
            if !failed {
                self.failing.log_recovery();
            }
            sleep(LOOK).await;
        }
    }

    pub(super) async fn reconcile(&self, node: &NodeName) -> Result<(), ApiError> {
        let name = node.as_str();
        let lease = timeout(BOUND, self.leases.get_opt(name)).await??;
        let Some(lease) = lease else {
            return self.forget(name).await;
        };
        match state(&lease) {
            LeaseState::Delegated(count) => {
                let age = age(&lease, Timestamp::now());
                let current = age.is_some_and(|age| age < CURRENT);
                if !self.rules.taint || !current {
                    return Ok(());
                }
                self.keep(name, count).await
            }
            LeaseState::Returned => {
                let plain = without_annotations(&lease);
                let parameters = PostParams::default();
                timeout(BOUND, self.leases.replace(name, &parameters, &plain)).await??;
                self.forget(name).await
            }
            LeaseState::Direct => self.forget(name).await,
        }
    }

    /// Keeps the pods of a delegated node, and new ones away.
    async fn keep(&self, name: &str, count: u32) -> Result<(), ApiError> {
        let mut object = timeout(BOUND, self.objects.get(name)).await??;
        if let Some(ready) = ready(&object).filter(|ready| ready.status == "Unknown") {
            object = self.set_ready(&object, ready).await?;
            tracing::info!(
                node = name,
                "a node with delegated heartbeats is Ready again"
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
                "tainted a node with delegated heartbeats"
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
        let patched = self.objects.patch_status(&name, &parameters, &patch);
        Ok(timeout(BOUND, patched).await??)
    }

    /// Removes the taint and the mark of a node that is not delegated any more.
    async fn forget(&self, name: &str) -> Result<(), ApiError> {
        let Some(object) = timeout(BOUND, self.objects.get_opt(name)).await?? else {
            return Ok(());
        };
        let mut change = json!({ "metadata": { "annotations": { NODE_MARK: null } } });
        if self.rules.taint && is_tainted(&object) {
            let mut taints = taints(&object);
            taints.retain(|taint| taint.key != TAINT);
            change["spec"] = json!({ "taints": taints });
        }
        self.patch(&object, change).await?;
        tracing::info!(node = name, "a node sends its own heartbeats again");
        Ok(())
    }

    /// Changes a Node at the version that was read: a list of taints is replaced as a whole.
    async fn patch(&self, object: &Node, mut change: Value) -> Result<(), ApiError> {
        change["metadata"]["resourceVersion"] = json!(object.resource_version());
        let parameters = PatchParams::default();
        let name = object.name_any();
        let patch = Patch::Merge(change);
        let patched = self.objects.patch(&name, &parameters, &patch);
        timeout(BOUND, patched).await??;
        Ok(())
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
