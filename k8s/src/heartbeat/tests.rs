//! Delegated heartbeats against an API that keeps one Lease and one Node.

use super::{
    api::NAMESPACE,
    node_lease::{DELEGATE_HEARTBEAT, LeaseState, Renewal, renew, state, without_annotations},
    *,
};
use causeway_gateway::{control::heartbeat::AcceptedHeartbeat, state::ClusterNode};
use causeway_rt::task::TaskGroup;
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use k8s_openapi::{
    api::coordination::v1::Lease,
    jiff::{SignedDuration, Timestamp},
};
use kube::{ResourceExt, client::Body};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard},
};
use tokio::time::Instant;
use tracing::info_span;

const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/edge-1";
const NODE: &str = "/api/v1/nodes/edge-1";
const STATUS: &str = "/api/v1/nodes/edge-1/status";

fn ago(seconds: i64) -> Timestamp {
    Timestamp::now() - SignedDuration::from_secs(seconds)
}

/// Lease of edge-1, which its kubelet has renewed `age` seconds ago by a clock that is wrong by `offset` seconds.
fn lease(age: i64, offset: i64) -> Lease {
    let changed = ago(age);
    let renewed = changed + SignedDuration::from_secs(offset);
    serde_json::from_value(json!({
        "metadata": {
            "name": "edge-1",
            "namespace": NAMESPACE,
            "resourceVersion": "7",
            "annotations": { "example.com/kept": "yes" },
            "managedFields": [{
                "manager": "kubelet",
                "operation": "Update",
                "time": format!("{changed:.0}"),
            }],
        },
        "spec": {
            "holderIdentity": "edge-1",
            "leaseDurationSeconds": 40,
            "renewTime": format!("{renewed:.6}"),
        },
    }))
    .unwrap()
}

fn renew_time(lease: &Lease) -> Timestamp {
    lease.spec.as_ref().unwrap().renew_time.as_ref().unwrap().0
}

fn renewed(lease: &Lease, now: Timestamp) -> (Lease, u32) {
    match renew(lease, "edge-1", now) {
        Renewal::Renewed(lease, count) => (*lease, count),
        other => panic!("{other:?}"),
    }
}

/// Returns a Lease that a delegate has renewed `since` seconds ago, and the time of that. Its kubelet has renewed it `age` seconds
/// before that, or earlier on a slow machine.
fn renewed_once(age: i64, since: i64) -> (Lease, Timestamp) {
    let old = lease(age + since, 0);
    let at = ago(since);
    (renewed(&old, at).0, at)
}

/// The Lease as an API server returns it after a change at this time.
fn stored(mut lease: Lease, at: Timestamp) -> Lease {
    let managed = lease.metadata.managed_fields.as_mut().unwrap();
    let mut text = serde_json::to_value(&managed[0]).unwrap();
    text["time"] = json!(format!("{at:.0}"));
    managed[0] = serde_json::from_value(text).unwrap();
    lease
}

#[test]
fn only_an_old_lease_of_the_node_is_renewed() {
    let now = Timestamp::now();
    assert_eq!(renew(&lease(13, 0), "edge-1", now), Renewal::Fresh);
    let old = lease(20, 0);
    let now = Timestamp::now();
    assert_eq!(renew(&old, "edge-2", now), Renewal::Foreign);
    let mut other = old.clone();
    other.spec.as_mut().unwrap().holder_identity = Some("edge-2".to_owned());
    assert_eq!(renew(&other, "edge-1", now), Renewal::Foreign);
    let (renewed, count) = renewed(&old, now);
    assert_eq!(count, 1);
    assert_eq!(state(&renewed), LeaseState::Delegated(1));
    assert_eq!(renewed.annotations()[DELEGATE_HEARTBEAT], "true");
    assert_eq!(renewed.annotations()["example.com/kept"], "yes");
    assert_eq!(renewed.metadata.resource_version.as_deref(), Some("7"));
    assert_eq!(renew_time(&renewed).as_microsecond(), now.as_microsecond());
    let kept = without_annotations(&renewed).metadata.annotations;
    assert_eq!(kept.map(|all| all.len()), Some(1));
}

#[test]
fn delegated_renewals_are_counted_until_the_node_renews_itself() {
    let (mut lease, begun) = renewed_once(20, 0);
    for count in 2..6 {
        let last = begun + SignedDuration::from_secs(10 * (count - 2));
        lease = stored(lease, last);
        let soon = last + SignedDuration::from_secs(3);
        assert_eq!(renew(&lease, "edge-1", soon), Renewal::Fresh, "two members");
        let (next, counted) = renewed(&lease, last + SignedDuration::from_secs(10));
        assert_eq!(i64::from(counted), count);
        assert!(renew_time(&next) > renew_time(&lease));
        lease = next;
    }
    // A kubelet copies the annotations.
    let back = begun + SignedDuration::from_secs(60);
    lease.spec.as_mut().unwrap().renew_time = Some(serde_json::from_value(json!(back)).unwrap());
    let lease = stored(lease, back);
    assert_eq!(state(&lease), LeaseState::Returned);
    let later = back + SignedDuration::from_secs(10);
    assert_eq!(renew(&lease, "edge-1", later), Renewal::Fresh);
    let (_, count) = renewed(&lease, back + SignedDuration::from_secs(20));
    assert_eq!(count, 1, "the next cut");
    assert_eq!(state(&without_annotations(&lease)), LeaseState::Direct);
}

#[test]
fn a_wrong_clock_of_the_node_changes_nothing() {
    let day = 86_400;
    for offset in [-day, day, -30, 0, 4] {
        let now = Timestamp::now();
        assert_eq!(renew(&lease(10, offset), "edge-1", now), Renewal::Fresh);
        let mut last = lease(20, offset);
        let now = Timestamp::now();
        for nth in 0..90 {
            let at = now + SignedDuration::from_secs(10 * nth);
            let (next, _) = renewed(&last, at);
            // kube-controller-manager takes later times only.
            assert!(renew_time(&next) > renew_time(&last), "{offset} {nth}");
            last = stored(next, at);
        }
        // The node returns 5 s after the last delegated renewal. Its second renewal has a later time again.
        let back = now + SignedDuration::from_secs(10 * 89 + 5);
        let own = back + SignedDuration::from_secs(offset + 10);
        assert!(own > renew_time(&last), "{offset}");
    }
}

/// API that keeps a Lease and a Node, and compares versions.
#[derive(Clone)]
struct Cluster {
    state: Arc<Mutex<State>>,
    tasks: Arc<TaskGroup>,
}

struct State {
    lease: Option<Value>,
    node: Value,
    version: u64,
    requests: Vec<String>,
    events: Vec<String>,
    event_names: BTreeSet<String>,
    /// The gateway may not change Nodes.
    forbids_nodes: bool,
    /// Another process writes the Lease between a read and the next write.
    races: bool,
    /// The same for the Node, once.
    node_races: bool,
}

impl Cluster {
    fn new(lease: Option<&Lease>, ready: &str) -> Self {
        let node = json!({
            "metadata": { "name": "edge-1", "resourceVersion": "7", "annotations": { "a": "b" } },
            "spec": { "taints": [{ "key": "own", "effect": "NoSchedule" }] },
            "status": { "conditions": [
                { "type": "MemoryPressure", "status": "Unknown" },
                { "type": "Ready", "status": ready, "reason": "NodeStatusUnknown" },
            ] },
        });
        let state = State {
            lease: lease.map(|lease| serde_json::to_value(lease).unwrap()),
            node,
            version: 7,
            requests: Vec::new(),
            events: Vec::new(),
            event_names: BTreeSet::new(),
            forbids_nodes: false,
            races: false,
            node_races: false,
        };
        Self {
            state: Arc::new(Mutex::new(state)),
            tasks: Arc::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn client(&self) -> Client {
        let cluster = self.clone();
        let api = tower::service_fn(move |asked: Request<Body>| {
            let cluster = cluster.clone();
            async move {
                let (head, body) = asked.into_parts();
                let body = body.collect().await.unwrap().to_bytes();
                let body = serde_json::from_slice(&body).unwrap_or_default();
                let (status, answer) = cluster.state().answer(&head.method, head.uri.path(), &body);
                let answer = Response::builder()
                    .status(status)
                    .body(Body::from(answer.to_string().into_bytes()));
                Ok::<_, kube::Error>(answer.unwrap())
            }
        });
        Client::new(api, "causeway")
    }

    /// Returns a queue whose events a task writes.
    fn events(&self) -> EventQueue {
        let (events, queued) = EventQueue::new();
        let writer = EventWriter::new(self.client(), "gateway".to_owned(), "writing an event");
        self.tasks
            .spawn(info_span!("events"), write_events(writer, queued));
        events
    }

    /// Waits until there are so many events, and returns them.
    async fn written_events(&self, count: usize) -> Vec<String> {
        while self.state().events.len() < count {
            tokio::task::yield_now().await;
        }
        self.state().events.clone()
    }

    fn lease(&self) -> Lease {
        serde_json::from_value(self.state().lease.clone().unwrap()).unwrap()
    }

    fn taints(&self) -> Vec<String> {
        let state = self.state();
        let taints = state.node["spec"]["taints"].as_array().unwrap();
        let key = |taint: &Value| taint["key"].as_str().unwrap().to_owned();
        taints.iter().map(key).collect()
    }

    fn ready(&self) -> (String, String) {
        let state = self.state();
        let ready = &state.node["status"]["conditions"][1];
        let text = |key: &str| ready[key].as_str().unwrap_or_default().to_owned();
        (text("status"), text("reason"))
    }

    fn writes(&self) -> usize {
        let state = self.state();
        let writes = state
            .requests
            .iter()
            .filter(|asked| !asked.starts_with("GET"));
        writes.count()
    }
}

fn failure(code: StatusCode, reason: &str) -> (StatusCode, Value) {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "message": reason, "reason": reason, "code": code.as_u16(),
    });
    (code, status)
}

impl State {
    fn answer(&mut self, method: &Method, path: &str, body: &Value) -> (StatusCode, Value) {
        self.requests.push(format!("{method} {path}"));
        let stale = |found: &Value| {
            let version = &body["metadata"]["resourceVersion"];
            !version.is_null() && *version != found["metadata"]["resourceVersion"]
        };
        match (method.as_str(), path) {
            ("GET", LEASES) => match &self.lease {
                Some(lease) => (StatusCode::OK, lease.clone()),
                None => failure(StatusCode::NOT_FOUND, "NotFound"),
            },
            ("PUT", LEASES) => {
                if self.races || stale(self.lease.as_ref().unwrap()) {
                    return failure(StatusCode::CONFLICT, "Conflict");
                }
                let mut next = body.clone();
                self.version += 1;
                next["metadata"]["resourceVersion"] = json!(self.version.to_string());
                next["metadata"]["managedFields"][0]["time"] =
                    json!(format!("{:.0}", Timestamp::now()));
                self.lease = Some(next.clone());
                (StatusCode::OK, next)
            }
            ("GET", NODE) => (StatusCode::OK, self.node.clone()),
            ("PATCH", _) if self.forbids_nodes => failure(StatusCode::FORBIDDEN, "Forbidden"),
            ("PATCH", NODE | STATUS) => {
                if std::mem::take(&mut self.node_races) || stale(&self.node) {
                    return failure(StatusCode::CONFLICT, "Conflict");
                }
                if path == NODE {
                    merge(&mut self.node, body);
                } else {
                    self.node["status"]["conditions"][1] = body["status"]["conditions"][0].clone();
                }
                self.version += 1;
                self.node["metadata"]["resourceVersion"] = json!(self.version.to_string());
                (StatusCode::OK, self.node.clone())
            }
            ("POST", "/apis/events.k8s.io/v1/namespaces/default/events") => {
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                let name = text(&body["metadata"]["name"]);
                if !self.event_names.insert(name) {
                    return failure(StatusCode::CONFLICT, "AlreadyExists");
                }
                let (kind, note) = (text(&body["type"]), text(&body["note"]));
                self.events.push(format!("{kind}: {note}"));
                (StatusCode::CREATED, body.clone())
            }
            _ => failure(StatusCode::FORBIDDEN, "Forbidden"),
        }
    }
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
            merge(fields.entry(key.clone()).or_insert(Value::Null), change);
        }
    }
}

fn name(text: &str) -> NodeName {
    NodeName::parse(text).unwrap()
}

fn nodes(delegated: bool) -> NodesWriter {
    let writer = NodesWriter::default();
    let member = ClusterNode {
        is_edge: true,
        delegated,
        ..ClusterNode::default()
    };
    writer.replace_cluster(BTreeMap::from([(name("edge-1"), member)]));
    writer
}

#[test]
fn the_log_names_nodes_that_are_still_delegated() {
    assert_eq!(delegated_names(&nodes(false).reader()), None);
    let one = delegated_names(&nodes(true).reader());
    assert_eq!(one.as_deref(), Some("edge-1"));
    let writer = NodesWriter::default();
    let member = ClusterNode {
        is_edge: true,
        delegated: true,
        ..ClusterNode::default()
    };
    let members = (0..30).map(|nth| (name(&format!("edge-{nth}")), member.clone()));
    writer.replace_cluster(members.collect());
    let many = delegated_names(&writer.reader()).unwrap();
    assert!(many.ends_with(" and 10 more"), "{many}");
}

fn renewer(cluster: &Cluster, nodes: &NodesWriter) -> LeaseRenewer {
    let (metrics, events) = (Metrics::new(), cluster.events());
    LeaseRenewer::new(&cluster.client(), &nodes.reader(), &metrics, &events)
}

fn reconciler(cluster: &Cluster, rules: &config::Heartbeats) -> Reconciler {
    let events = cluster.events();
    Reconciler::new(&cluster.client(), rules, &nodes(true).reader(), &events)
}

fn heartbeat() -> AcceptedHeartbeat {
    AcceptedHeartbeat {
        node: name("edge-1"),
        delegate: name("edge-2"),
        received_at: Instant::now(),
    }
}

#[tokio::test]
async fn a_heartbeat_renews_an_old_lease_and_annotates_the_node_once() {
    let cluster = Cluster::new(Some(&lease(20, 0)), "True");
    let known = nodes(false);
    let renewer = renewer(&cluster, &known);
    assert_eq!(renewer.renew(&heartbeat()).await.unwrap(), "renewed");
    assert_eq!(state(&cluster.lease()), LeaseState::Delegated(1));
    assert_eq!(
        cluster.state().node["metadata"]["annotations"][NODE_ANNOTATION],
        "edge-2"
    );
    let events = cluster.written_events(1).await;
    assert_eq!(events, ["Warning: heartbeat delegated through edge-2"]);
    // The Lease, the Node and the event.
    assert_eq!(cluster.writes(), 3);
    // As if it was renewed right now, however slow the machine is.
    let lease = stored(cluster.lease(), ago(-60));
    cluster.state().lease = Some(serde_json::to_value(lease).unwrap());
    assert_eq!(renewer.renew(&heartbeat()).await.unwrap(), "fresh");
    assert_eq!(cluster.writes(), 3);
}

#[tokio::test]
async fn nothing_is_created_and_a_conflict_means_that_the_node_is_back() {
    let cluster = Cluster::new(None, "True");
    let renewing = renewer(&cluster, &nodes(false));
    assert_eq!(renewing.renew(&heartbeat()).await.unwrap(), "no_lease");
    assert_eq!(cluster.writes(), 0);
    let cluster = Cluster::new(Some(&lease(20, 0)), "True");
    cluster.state().races = true;
    let renewing = renewer(&cluster, &nodes(false));
    assert_eq!(renewing.renew(&heartbeat()).await.unwrap(), "conflict");
    assert_eq!(cluster.writes(), 2, "the Node, and the refused one");
    assert!(cluster.state().events.is_empty());
}

#[tokio::test]
async fn a_heartbeat_that_has_waited_for_the_api_renews_nothing() {
    let cluster = Cluster::new(Some(&lease(20, 0)), "True");
    let renewer = renewer(&cluster, &nodes(false));
    let late = AcceptedHeartbeat {
        received_at: Instant::now() - Duration::from_secs(11),
        ..heartbeat()
    };
    assert_eq!(renewer.renew(&late).await.unwrap(), "expired");
    assert!(cluster.state().requests.is_empty());
}

#[tokio::test]
async fn a_lease_is_not_renewed_if_the_node_cannot_be_annotated() {
    let cluster = Cluster::new(Some(&lease(20, 0)), "True");
    cluster.state().forbids_nodes = true;
    let renewer = renewer(&cluster, &nodes(false));
    assert!(renewer.renew(&heartbeat()).await.is_err());
    assert_eq!(state(&cluster.lease()), LeaseState::Direct);
}

#[tokio::test]
async fn a_node_is_kept_annotated_until_its_first_delegated_renewal() {
    let cluster = Cluster::new(Some(&lease(20, 0)), "True");
    cluster.state().node["metadata"]["annotations"][NODE_ANNOTATION] = json!("edge-2");
    let reconciling = reconciler(&cluster, &config::Heartbeats::default());
    reconciling.reconcile(&name("edge-1")).await.unwrap();
    assert_eq!(cluster.writes(), 0);
    // The node was back before that.
    cluster.state().lease = Some(serde_json::to_value(lease(1, 0)).unwrap());
    reconciling.reconcile(&name("edge-1")).await.unwrap();
    let annotations = cluster.state().node["metadata"]["annotations"].clone();
    assert_eq!(annotations, json!({ "a": "b" }));
}

#[tokio::test]
async fn each_delegation_and_each_return_has_an_event() {
    let cluster = Cluster::new(Some(&lease(20, 0)), "True");
    let (known, rules) = (nodes(false), config::Heartbeats::default());
    let (renewer, reconciler) = (renewer(&cluster, &known), reconciler(&cluster, &rules));
    for round in 1..3 {
        assert_eq!(renewer.renew(&heartbeat()).await.unwrap(), "renewed");
        cluster.written_events(2 * round - 1).await;
        // A kubelet copies the annotations.
        let back = Lease {
            spec: lease(1, 0).spec,
            ..cluster.lease()
        };
        cluster.state().lease = Some(serde_json::to_value(back).unwrap());
        reconciler.reconcile(&name("edge-1")).await.unwrap();
        cluster.written_events(2 * round).await;
        let gone = stored(cluster.lease(), ago(20));
        cluster.state().lease = Some(serde_json::to_value(gone).unwrap());
    }
    let delegated = "Warning: heartbeat delegated through edge-2";
    let direct = "Normal: the node sends its own heartbeats again";
    let events = cluster.written_events(4).await;
    assert_eq!(events, [delegated, direct, delegated, direct]);
}

#[tokio::test]
async fn a_delegated_node_is_ready_and_tainted_from_the_threshold_on() {
    let (lease, now) = renewed_once(20, 0);
    let cluster = Cluster::new(Some(&stored(lease, now)), "Unknown");
    let rules = config::Heartbeats {
        threshold: 2,
        ..config::Heartbeats::default()
    };
    let reconciling = reconciler(&cluster, &rules);
    reconciling.reconcile(&name("edge-1")).await.unwrap();
    let ready = ("True".to_owned(), "NodeDelegateLease".to_owned());
    assert_eq!(cluster.ready(), ready);
    assert_eq!(cluster.taints(), ["own"]);
    let (lease, count) = renewed(&cluster.lease(), now + SignedDuration::from_secs(10));
    assert_eq!(count, 2);
    cluster.state().lease = Some(serde_json::to_value(stored(lease, now)).unwrap());
    reconciling.reconcile(&name("edge-1")).await.unwrap();
    assert_eq!(cluster.taints(), ["own", "node.openyurt.io/unschedulable"]);
    // Idempotent.
    let writes = cluster.writes();
    reconciling.reconcile(&name("edge-1")).await.unwrap();
    assert_eq!(cluster.writes(), writes);
}

#[tokio::test]
async fn a_node_without_heartbeats_is_left_to_kubernetes() {
    let (lease, now) = renewed_once(20, 60);
    let cluster = Cluster::new(Some(&stored(lease, now)), "Unknown");
    let rules = config::Heartbeats {
        threshold: 1,
        ..config::Heartbeats::default()
    };
    let reconciling = reconciler(&cluster, &rules);
    reconciling.reconcile(&name("edge-1")).await.unwrap();
    assert_eq!(cluster.ready().0, "Unknown");
    assert_eq!(cluster.writes(), 0);
}

#[tokio::test]
async fn a_returned_node_loses_its_annotations_and_taint() {
    let (delegated, _) = renewed(&lease(40, 0), ago(10));
    let mut back = delegated;
    let own = serde_json::from_value(json!(ago(1))).unwrap();
    back.spec.as_mut().unwrap().renew_time = Some(own);
    let cluster = Cluster::new(Some(&stored(back, ago(1))), "True");
    {
        let mut state = cluster.state();
        state.node["metadata"]["annotations"][NODE_ANNOTATION] = json!("edge-2");
        let taint = json!({ "key": "node.openyurt.io/unschedulable", "effect": "NoSchedule" });
        state.node["spec"]["taints"]
            .as_array_mut()
            .unwrap()
            .push(taint);
    }
    // An earlier configuration tainted it.
    let rules = config::Heartbeats {
        taint: false,
        ..config::Heartbeats::default()
    };
    let reconciling = reconciler(&cluster, &rules);
    reconciling.reconcile(&name("edge-1")).await.unwrap();
    assert_eq!(cluster.taints(), ["own"]);
    assert_eq!(state(&cluster.lease()), LeaseState::Direct);
    assert!(
        !cluster
            .lease()
            .annotations()
            .contains_key(DELEGATE_HEARTBEAT)
    );
    let annotations = cluster.state().node["metadata"]["annotations"].clone();
    assert_eq!(annotations, json!({ "a": "b" }));
}

#[tokio::test(start_paused = true)]
async fn a_conflict_with_another_controller_is_retried_at_once() {
    let cluster = Cluster::new(Some(&lease(1, 0)), "True");
    {
        let mut state = cluster.state();
        state.node["metadata"]["annotations"][NODE_ANNOTATION] = json!("edge-2");
        state.node_races = true;
    }
    let mut reconciling = reconciler(&cluster, &config::Heartbeats::default());
    let pass = tokio::time::timeout(RECONCILE_INTERVAL / 2, reconciling.run());
    assert!(pass.await.is_err());
    let annotations = cluster.state().node["metadata"]["annotations"].clone();
    assert_eq!(annotations, json!({ "a": "b" }));
}

#[tokio::test]
async fn without_taint_only_the_return_is_managed() {
    let (lease, now) = renewed_once(20, 0);
    let cluster = Cluster::new(Some(&stored(lease, now)), "Unknown");
    let rules = config::Heartbeats {
        threshold: 1,
        taint: false,
        ..config::Heartbeats::default()
    };
    let reconciling = reconciler(&cluster, &rules);
    reconciling.reconcile(&name("edge-1")).await.unwrap();
    assert_eq!(cluster.writes(), 0);
}
