//! The part of a cluster's API by which nodes are followed: a list of Node objects, and a watch that continues; and their Leases.

mod leases;

use axum::{
    Json, Router,
    body::Body,
    extract::{Query, State},
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

async fn nodes(
    State(objects): State<watch::Receiver<Objects>>,
    Query(asked): Query<HashMap<String, String>>,
) -> Response {
    if !asked.contains_key("watch") {
        let now = objects.borrow().clone();
        let items: Vec<_> = now.nodes.into_values().collect();
        return Json(json!({
            "apiVersion": "v1", "kind": "NodeList", "items": items,
            "metadata": { "resourceVersion": now.happened.len().to_string() },
        }))
        .into_response();
    }
    let seen: usize = asked["resourceVersion"].parse().unwrap();
    let events = stream::unfold((objects, seen), |(mut objects, seen)| async move {
        let more = objects.wait_for(|objects| objects.happened.len() > seen);
        let event = more.await.ok()?.happened[seen].to_string();
        Some((Ok::<_, Infallible>(event + "\n"), (objects, seen + 1)))
    });
    Body::from_stream(events).into_response()
}
