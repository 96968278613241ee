//! The cluster's Leases, changes of single Nodes, and a list without Services.

use super::{Cluster, Objects};
use axum::{
    Json, Router,
    body::Body,
    extract::{Path, Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, patch, post},
};
use futures_util::stream;
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    convert::Infallible,
    time::{Duration, SystemTime},
};
use tokio::sync::watch;

type Answer = (StatusCode, Json<Value>);
type Table = State<watch::Sender<Objects>>;

pub(super) fn routes(objects: &watch::Sender<Objects>) -> Router {
    let leases = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases";
    Router::new()
        .route("/api/v1/services", get(services))
        .route(leases, post(create))
        .route(&format!("{leases}/{{name}}"), get(read).put(replace))
        .route("/api/v1/nodes/{name}", get(node).patch(change))
        .route("/api/v1/nodes/{name}/status", patch(change_status))
        .route(
            "/apis/events.k8s.io/v1/namespaces/default/events",
            post(event),
        )
        .with_state(objects.clone())
}

impl Cluster {
    /// The kubelet of a node has renewed its Lease so long ago. It copies the annotations, as a real one does.
    pub(crate) fn renews(&self, node: &str, ago: Duration) {
        self.objects.send_modify(|objects| {
            let key = format!("kube-node-lease/{node}");
            let before = objects.leases.get(&key);
            let annotations = before.map(|lease| lease["metadata"]["annotations"].clone());
            let at = time(ago);
            let lease = json!({
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {
                    "name": node, "namespace": "kube-node-lease",
                    "annotations": annotations.unwrap_or_else(|| json!({})),
                    "managedFields": [{ "manager": "kubelet", "operation": "Update", "time": at }],
                },
                "spec": { "holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": at },
            });
            store(objects, &key, lease);
        });
    }

    /// The Lease of a node.
    pub(crate) fn lease(&self, node: &str) -> Value {
        self.objects.borrow().leases[&format!("kube-node-lease/{node}")].clone()
    }

    /// A Node object.
    pub(crate) fn object(&self, node: &str) -> Value {
        self.objects.borrow().nodes[node].clone()
    }

    /// A Node has this label.
    pub(crate) fn labels(&self, node: &str, key: &str, value: &str) {
        self.objects.send_modify(|objects| {
            let mut node = objects.nodes[node].clone();
            node["metadata"]["labels"][key] = json!(value);
            objects.put(node);
        });
    }

    /// Notes of the events so far.
    pub(crate) fn notes(&self) -> Vec<String> {
        self.objects.borrow().notes.clone()
    }
}

fn time(ago: Duration) -> String {
    let at = SystemTime::now() - ago;
    humantime::format_rfc3339_micros(at).to_string()
}

fn store(objects: &mut Objects, key: &str, mut lease: Value) -> Value {
    let before = objects.leases.get(key);
    let version = before.map_or(0, |lease| version(lease).parse::<u64>().unwrap());
    lease["metadata"]["resourceVersion"] = json!((version + 1).to_string());
    objects.leases.insert(key.to_owned(), lease.clone());
    lease
}

fn version(object: &Value) -> &str {
    object["metadata"]["resourceVersion"].as_str().unwrap_or("")
}

fn failure(code: StatusCode, reason: &str) -> Answer {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": reason, "reason": reason, "code": code.as_u16(),
    });
    (code, Json(status))
}

async fn read(State(objects): Table, Path((namespace, name)): Path<(String, String)>) -> Answer {
    match objects.borrow().leases.get(&format!("{namespace}/{name}")) {
        Some(lease) => (StatusCode::OK, Json(lease.clone())),
        None => failure(StatusCode::NOT_FOUND, "NotFound"),
    }
}

async fn create(
    State(objects): Table,
    Path(namespace): Path<String>,
    Json(mut lease): Json<Value>,
) -> Answer {
    // Only gateways create Leases, and none of a node.
    assert_ne!(namespace, "kube-node-lease");
    let name = lease["metadata"]["name"].as_str().unwrap().to_owned();
    let key = format!("{namespace}/{name}");
    lease["metadata"]["namespace"] = json!(namespace);
    let mut answer = failure(StatusCode::CONFLICT, "AlreadyExists");
    objects.send_modify(|objects| {
        if !objects.leases.contains_key(&key) {
            answer = (StatusCode::CREATED, Json(store(objects, &key, lease)));
        }
    });
    answer
}

async fn replace(
    State(objects): Table,
    Path((namespace, name)): Path<(String, String)>,
    Json(mut lease): Json<Value>,
) -> Answer {
    let key = format!("{namespace}/{name}");
    let mut answer = failure(StatusCode::CONFLICT, "Conflict");
    objects.send_modify(|objects| {
        let known = objects.leases.get(&key).map(version);
        if known == Some(version(&lease)) {
            let at = time(Duration::ZERO);
            lease["metadata"]["managedFields"] = json!([{ "manager": "gateway", "time": at }]);
            answer = (StatusCode::OK, Json(store(objects, &key, lease)));
        }
    });
    answer
}

async fn node(State(objects): Table, Path(name): Path<String>) -> Answer {
    match objects.borrow().nodes.get(&name) {
        Some(node) => (StatusCode::OK, Json(node.clone())),
        None => failure(StatusCode::NOT_FOUND, "NotFound"),
    }
}

async fn change(
    State(objects): Table,
    Path(name): Path<String>,
    Json(change): Json<Value>,
) -> Answer {
    let mut answer = failure(StatusCode::CONFLICT, "Conflict");
    objects.send_modify(|objects| {
        let mut node = objects.nodes[&name].clone();
        let wanted = version(&change);
        if wanted.is_empty() || wanted == version(&node) {
            merge(&mut node, &change);
            answer = (StatusCode::OK, Json(objects.put(node)));
        }
    });
    answer
}

async fn change_status(
    State(objects): Table,
    Path(name): Path<String>,
    Json(change): Json<Value>,
) -> Answer {
    let mut answer = failure(StatusCode::NOT_FOUND, "NotFound");
    objects.send_modify(|objects| {
        let mut node = objects.nodes[&name].clone();
        // Of the conditions the tests have `Ready` alone.
        node["status"]["conditions"] = change["status"]["conditions"].clone();
        answer = (StatusCode::OK, Json(objects.put(node)));
    });
    answer
}

async fn services(Query(asked): Query<HashMap<String, String>>) -> Response {
    if asked.contains_key("watch") {
        return Body::from_stream(stream::pending::<Result<String, Infallible>>()).into_response();
    }
    Json(json!({
        "apiVersion": "v1", "kind": "ServiceList", "items": [],
        "metadata": { "resourceVersion": "1" },
    }))
    .into_response()
}

async fn event(State(objects): Table, Json(event): Json<Value>) -> Answer {
    objects.send_modify(|objects| {
        let note = event["note"].as_str().unwrap().to_owned();
        objects.notes.push(note);
    });
    (StatusCode::CREATED, Json(event))
}

/// A JSON merge patch (RFC 7386).
fn merge(target: &mut Value, patch: &Value) {
    let (Some(fields), Some(patch)) = (target.as_object_mut(), patch.as_object()) else {
        *target = patch.clone();
        return;
    };
    for (key, change) in patch {
        if change.is_null() {
            fields.remove(key);
        } else {
            merge(fields.entry(key.clone()).or_insert(json!({})), change);
        }
    }
}
