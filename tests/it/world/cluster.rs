//! The part of a cluster's API by which nodes and pods are followed: lists of objects, and watches that continue; and Leases.

mod leases;

use axum::{
    Json, Router,
    body::Body,
    extract::{Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use futures_util::stream;
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    fs,
    net::Ipv4Addr,
    path::PathBuf,
};
use tempfile::TempDir;
use tokio::{net::TcpListener, sync::watch, task::JoinSet};

/// Current objects and all past events: the index in the list is the version.
#[derive(Clone, Debug, Default)]
struct Objects {
    nodes: BTreeMap<String, Value>,
    happened: Vec<Value>,
    pods: BTreeMap<String, Value>,
    pod_events: Vec<Value>,
    /// Whether the gateway may not read pods.
    refuses_pods: bool,
    leases: BTreeMap<String, Value>,
    /// Notes of events.
    notes: Vec<String>,
}

impl Objects {
    /// Takes a Node, which is new or has changed.
    fn put(&mut self, mut node: Value) -> Value {
        let version = (self.happened.len() + 1).to_string();
        node["metadata"]["resourceVersion"] = json!(version);
        let name = node["metadata"]["name"].as_str().unwrap().to_owned();
        let known = self.nodes.insert(name, node.clone());
        let kind = if known.is_some() { "MODIFIED" } else { "ADDED" };
        self.happened.push(json!({ "type": kind, "object": node }));
        node
    }
}

/// The API; dropping it stops it.
pub(crate) struct Cluster {
    folder: TempDir,
    objects: watch::Sender<Objects>,
    _serving: JoinSet<()>,
}

impl Cluster {
    /// An API without nodes, at this address of this thread's network.
    pub(crate) async fn at(address: Ipv4Addr) -> Self {
        let listener = TcpListener::bind((address, 0)).await.unwrap();
        let server = listener.local_addr().unwrap();
        let (objects, known) = watch::channel(Objects::default());
        let router = Router::new().route("/api/v1/nodes", get(nodes));
        let router = router.route("/api/v1/pods", get(pods));
        let router = router.with_state(known).merge(leases::routes(&objects));
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            axum::serve(listener, router).await.unwrap();
        });
        let folder = tempfile::tempdir().unwrap();
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "it",
            "clusters": [{ "name": "it", "cluster": { "server": format!("http://{server}") } }],
            "users": [{ "name": "it", "user": {} }],
            "contexts": [{ "name": "it", "context": { "cluster": "it", "user": "it" } }],
        });
        fs::write(folder.path().join("kubeconfig"), kubeconfig.to_string()).unwrap();
        Self {
            folder,
            objects,
            _serving: serving,
        }
    }

    /// Returns the kubeconfig for it.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
    }

    /// Adds or changes a node: with these addresses, at the edge or in the cloud, and pods in these networks.
    pub(crate) fn node_with_pods(&self, name: &str, edge: bool, addresses: &[&str], pods: &[&str]) {
        let addresses = addresses
            .iter()
            .map(|address| json!({ "type": "InternalIP", "address": address }));
        let addresses: Vec<_> = addresses.collect();
        self.objects.send_modify(|objects| {
            let labels = if edge {
                json!({ "causeway.io/edge": "true" })
            } else {
                json!({})
            };
            let node = json!({
                "apiVersion": "v1", "kind": "Node",
                "metadata": { "name": name, "labels": labels },
                "spec": { "podCIDRs": pods },
                "status": { "addresses": addresses },
            });
            objects.put(node);
        });
    }
}

impl Cluster {
    /// Adds or changes a pod, which is running on this node and has this address.
    pub(crate) fn pod(&self, namespace: &str, name: &str, node: &str, address: &str) {
        self.put_pod(
            (namespace, name),
            node,
            &json!({ "phase": "Running", "podIPs": [{ "ip": address }] }),
        );
    }

    /// Adds or changes a pod, which is on this node and has this status.
    pub(crate) fn put_pod(&self, (namespace, name): (&str, &str), node: &str, status: &Value) {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "namespace": namespace, "name": name },
            "spec": { "nodeName": node, "containers": [] },
            "status": status,
        });
        self.objects.send_modify(|objects| {
            let known = objects
                .pods
                .insert(format!("{namespace}/{name}"), pod.clone());
            objects.record_pod(if known.is_some() { "MODIFIED" } else { "ADDED" }, pod);
        });
    }

    /// Adds a mirror pod, as the kubelet of a node does for a static pod. It has this address.
    pub(crate) fn mirror_pod(&self, (namespace, name): (&str, &str), node: &str, address: &str) {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "namespace": namespace, "name": name,
                "annotations": { "kubernetes.io/config.mirror": "3b6f", "kubernetes.io/config.source": "file" },
            },
            "spec": { "nodeName": node, "containers": [] },
            "status": { "phase": "Running", "podIPs": [{ "ip": address }] },
        });
        self.objects.send_modify(|objects| {
            objects
                .pods
                .insert(format!("{namespace}/{name}"), pod.clone());
            objects.record_pod("ADDED", pod);
        });
    }

    /// Deletes a pod.
    pub(crate) fn delete_pod(&self, namespace: &str, name: &str) {
        self.objects.send_modify(|objects| {
            let pod = objects.pods.remove(&format!("{namespace}/{name}")).unwrap();
            objects.record_pod("DELETED", pod);
        });
    }

    /// Sets whether the gateway may read pods.
    pub(crate) fn refuse_pods(&self, refuses: bool) {
        self.objects
            .send_modify(|objects| objects.refuses_pods = refuses);
    }
}

impl Objects {
    fn record_pod(&mut self, kind: &str, mut pod: Value) {
        pod["metadata"]["resourceVersion"] = json!((self.pod_events.len() + 1).to_string());
        self.pod_events.push(json!({ "type": kind, "object": pod }));
    }
}

async fn nodes(
    state: State<watch::Receiver<Objects>>,
    asked: Query<HashMap<String, String>>,
) -> Response {
    list_or_watch(state, asked, "NodeList", |objects| {
        (&objects.nodes, &*objects.happened)
    })
}

async fn pods(
    state: State<watch::Receiver<Objects>>,
    asked: Query<HashMap<String, String>>,
) -> Response {
    if state.borrow().refuses_pods {
        let message = "pods is forbidden: User \"gateway\" cannot list resource \"pods\"";
        let status = json!({
            "apiVersion": "v1", "kind": "Status", "status": "Failure", "code": 403,
            "reason": "Forbidden", "message": message, "metadata": {},
        });
        return (StatusCode::FORBIDDEN, Json(status)).into_response();
    }
    list_or_watch(state, asked, "PodList", |objects| {
        (&objects.pods, &*objects.pod_events)
    })
}

/// Objects of one kind by name, and all past events.
type ObjectsAndEvents<'a> = (&'a BTreeMap<String, Value>, &'a [Value]);

fn list_or_watch(
    State(objects): State<watch::Receiver<Objects>>,
    Query(asked): Query<HashMap<String, String>>,
    kind: &str,
    of: fn(&Objects) -> ObjectsAndEvents<'_>,
) -> Response {
    if !asked.contains_key("watch") {
        let now = objects.borrow().clone();
        let (items, events) = of(&now);
        let items: Vec<_> = items.values().collect();
        return Json(json!({
            "apiVersion": "v1", "kind": kind, "items": items,
            "metadata": { "resourceVersion": events.len().to_string() },
        }))
        .into_response();
    }
    let seen: usize = asked["resourceVersion"].parse().unwrap();
    let events = stream::unfold((objects, seen), move |(mut objects, seen)| async move {
        let more = objects.wait_for(|objects| of(objects).1.len() > seen);
        let event = of(&*more.await.ok()?).1[seen].to_string();
        Some((Ok::<_, Infallible>(event + "\n"), (objects, seen + 1)))
    });
    Body::from_stream(events).into_response()
}
