//! Nodes without a kubelet: a Node, a Lease that is renewed as by a kubelet, and a server in place of the kubelet's health check.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::api::Api;
use crate::world::{
    World, image,
    net::Site,
    process::{Process, until},
};

/// Interval of renewals, as kubelets have it.
const INTERVAL: Duration = Duration::from_secs(10);

/// Nodes that renew their Leases, with the offset of their clocks.
type Renewing = Arc<Mutex<BTreeMap<String, SignedDuration>>>;

/// Renewer of the Leases of nodes without a kubelet.
pub(super) struct Light {
    renewing: Renewing,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Light {
    pub(super) fn start(api: &Api) -> Self {
        let (renewing, ends) = (Renewing::default(), Arc::<AtomicBool>::default());
        let thread = thread::spawn({
            let (api, renewing, ends) = (api.clone(), renewing.clone(), ends.clone());
            move || {
                let mut last: Option<Instant> = None;
                while !ends.load(Ordering::Relaxed) {
                    if last.is_none_or(|last| last.elapsed() >= INTERVAL) {
                        last = Some(Instant::now());
                        // Locked meanwhile: nothing is renewed once a node is cut off.
                        renew(
                            &api,
                            &renewing.lock().unwrap_or_else(PoisonError::into_inner),
                        );
                    }
                    thread::sleep(Duration::from_millis(100));
                }
            }
        });
        Self {
            renewing,
            ends,
            thread: Some(thread),
        }
    }

    /// Creates nodes of a pool with Leases, which are renewed from now on by a clock that is off by `offset`.
    pub(super) fn add(
        &self,
        world: &World,
        names: &[String],
        pool: Option<&str>,
        offset: SignedDuration,
    ) {
        let node = |name: &String| {
            let mut labels =
                json!({ "openyurt.io/is-edge-worker": "true", "causeway.io/edge": "true" });
            if let Some(pool) = pool {
                labels["apps.openyurt.io/nodepool"] = pool.into();
            }
            json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name, "labels": labels } })
        };
        let lease = |name: &String| {
            json!({
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": { "name": name, "namespace": "kube-node-lease" },
                "spec": { "holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now(offset) },
            })
        };
        let items: Vec<Value> = names.iter().map(node).collect();
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
        world.cluster.apply(&list);
        let old = world
            .cluster
            .kubectl("delete lease --ignore-not-found -n kube-node-lease");
        old.args(names).run().ok();
        let items: Vec<Value> = names.iter().map(lease).collect();
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
        let create = world.cluster.kubectl("create -f -");
        create.input(list.to_string()).run().ok();
        self.resume(names, offset);
    }

    /// Renews the Leases of these nodes from now on.
    pub(super) fn resume(&self, names: &[String], offset: SignedDuration) {
        let mut renewing = self.renewing.lock().unwrap_or_else(PoisonError::into_inner);
        renewing.extend(names.iter().map(|name| (name.clone(), offset)));
    }

    /// Renews them no more.
    pub(super) fn pause(&self, names: &[String]) {
        let mut renewing = self.renewing.lock().unwrap_or_else(PoisonError::into_inner);
        renewing.retain(|name, _| !names.contains(name));
    }
}

impl Drop for Light {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn now(offset: SignedDuration) -> String {
    let now = Timestamp::now() + offset;
    now.strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string()
}

/// Renews as a kubelet does: annotations stay, and the condition `Ready` is true.
fn renew(api: &Api, nodes: &BTreeMap<String, SignedDuration>) {
    let lease = |(name, offset): (&String, &SignedDuration)| {
        let path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";
        (
            format!("{path}/{name}"),
            json!({ "spec": { "renewTime": now(*offset) } }),
        )
    };
    let leases: Vec<_> = nodes.iter().map(lease).collect();
    let ready = json!({ "type": "Ready", "status": "True", "reason": "KubeletReady" });
    let status = json!({ "status": { "conditions": [ready] } });
    let status = |name: &String| (format!("/api/v1/nodes/{name}/status"), status.clone());
    let statuses: Vec<_> = nodes.keys().map(status).collect();
    if !leases.is_empty() {
        api.patch("merge", &leases);
        api.patch("strategic-merge", &statuses);
    }
}

/// A server that answers in place of the kubelet's health check.
pub(super) fn health(site: &Site, folder: &Path) -> Process {
    let files = folder.join("health");
    fs::create_dir_all(&files).unwrap();
    fs::write(files.join("healthz"), "ok").unwrap();
    let server = site
        .at(image::BUSYBOX)
        .words("httpd -f -p 127.0.0.1:10248 -h");
    let server = server.args([files]).start(&folder.join("health.log"));
    until("the health check answers", || {
        let ask = site
            .at("curl")
            .words("-q -sS --fail http://127.0.0.1:10248/healthz");
        ask.run().code == Some(0)
    });
    server
}
