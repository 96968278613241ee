use super::*;
use bytes::Bytes;
use causeway_gateway::{
    metrics::Metrics,
    state::{Nodes, NodesWriter, nodes::AddressMatch},
};
use futures_util::stream::{self, BoxStream, StreamExt as _};
use http::{Request as HttpRequest, Response, StatusCode};
use http_body::Frame;
use http_body_util::StreamBody;
use kube::client::Body;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

fn object(name: &str, node: &str, status: &Value) -> Value {
    json!({
        "metadata": { "namespace": "a", "name": name, "resourceVersion": "7" },
        "spec": { "nodeName": node, "containers": [{ "name": "it" }] },
        "status": status,
    })
}

fn running(address: &str) -> Value {
    json!({ "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }] })
}

fn reduced(object: Value) -> Option<Pod> {
    let object: PodObject = serde_json::from_value(object).unwrap();
    object.reduce(&mut HashSet::new())
}

#[test]
fn only_pods_with_an_address_of_their_own_on_a_node_are_followed() {
    let both = json!({
        "phase": "Running", "podIP": "10.1.0.7",
        "podIPs": [{ "ip": "10.1.0.7" }, { "ip": "fd00::7" }, { "ip": "10.1.0.8" }],
    });
    let pod = reduced(object("web", "edge-1", &both)).unwrap();
    assert_eq!(
        (&*pod.name, pod.node.as_str(), pod.ends_at),
        ("a/web", "edge-1", None)
    );
    let addresses: Vec<_> = pod.addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["10.1.0.7", "fd00::7"], "one of each family");

    for phase in ["Succeeded", "Failed"] {
        let ended = json!({ "phase": phase, "podIP": "10.1.0.7" });
        assert_eq!(reduced(object("web", "edge-1", &ended)), None, "{phase}");
    }
    let mut on_host = object("web", "edge-1", &running("10.0.0.11"));
    on_host["spec"]["hostNetwork"] = json!(true);
    assert_eq!(reduced(on_host), None);
    let mut by_kubelet = object("web", "edge-1", &running("10.1.0.7"));
    by_kubelet["metadata"]["annotations"] = json!({ "kubernetes.io/config.source": "api" });
    assert!(reduced(by_kubelet.clone()).is_some());
    by_kubelet["metadata"]["annotations"]["kubernetes.io/config.mirror"] = json!("3b6f");
    assert_eq!(reduced(by_kubelet), None, "a mirror pod");
    let mut pending = object("web", "edge-1", &json!({ "phase": "Pending" }));
    assert_eq!(reduced(pending.clone()).unwrap().addresses.len(), 0);
    pending["spec"] = json!({});
    assert_eq!(reduced(pending), None);

    let mut ending = object("web", "edge-1", &running("10.1.0.7"));
    ending["metadata"]["deletionTimestamp"] = json!("1970-01-01T00:01:40Z");
    assert_eq!(reduced(ending).unwrap().ends_at, Some(100));
}

/// Watch whose response has begun, and that has no events.
const SILENT_WATCH: (StatusCode, String) = (StatusCode::OK, String::new());

/// An API that answers the requests in this order, and records their paths. After the last answer it is silent.
#[derive(Clone)]
struct Api {
    answers: Arc<Mutex<Vec<(StatusCode, String)>>>,
    asked: Arc<Mutex<Vec<String>>>,
    /// Time before each answer.
    delay: Duration,
}

impl Api {
    fn new(answers: Vec<(StatusCode, String)>) -> Self {
        let answers = answers.into_iter().rev().collect();
        Self {
            answers: Arc::new(Mutex::new(answers)),
            asked: Arc::default(),
            delay: Duration::ZERO,
        }
    }

    fn client(&self) -> Client {
        let api = self.clone();
        let serve = tower::service_fn(move |request: HttpRequest<Body>| {
            let uri = request.uri().to_string();
            api.asked.lock().unwrap().push(uri);
            let answer = api.answers.lock().unwrap().pop();
            async move {
                let Some((status, body)) = answer else {
                    return std::future::pending().await;
                };
                sleep(api.delay).await;
                let response = Response::builder().status(status);
                let parts: BoxStream<'static, Result<Frame<Bytes>, Infallible>> =
                    if body == SILENT_WATCH.1 {
                        stream::pending().boxed()
                    } else {
                        stream::iter([Ok(Frame::data(Bytes::from(body)))]).boxed()
                    };
                let body = StreamBody::new(parts);
                Ok::<_, kube::Error>(response.body(body).unwrap())
            }
        });
        Client::new(serve, "default")
    }
}

fn list(version: &str, token: &str, items: &[Value]) -> (StatusCode, String) {
    let list = json!({
        "kind": "PodList", "apiVersion": "v1", "items": items,
        "metadata": { "resourceVersion": version, "continue": token },
    });
    (StatusCode::OK, list.to_string())
}

fn events(all: &[(&str, Value)]) -> (StatusCode, String) {
    let line =
        |(kind, object): &(&str, Value)| json!({ "type": kind, "object": object }).to_string();
    let lines: Vec<String> = all.iter().map(line).collect();
    (StatusCode::OK, lines.join("\n") + "\n")
}

fn failure(code: u16) -> (StatusCode, String) {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "metadata": {},
        "code": code, "message": "not today", "reason": "It",
    });
    (StatusCode::from_u16(code).unwrap(), status.to_string())
}

struct Informer {
    sync: PodSync,
    api: Api,
    readiness: Readiness,
    nodes: Nodes,
}

fn informer(max_pods: usize, answers: Vec<(StatusCode, String)>) -> Informer {
    let nodes = NodesWriter::default();
    nodes.follow_pods(&["10.1.0.0/16".parse().unwrap()]);
    let (api, readiness) = (Api::new(answers), Readiness::default());
    let hold = readiness.hold("not loaded yet");
    let informer = PodInformer {
        client: api.client(),
        pods: nodes.pods(max_pods).unwrap(),
        metrics: Metrics::new().pod_metrics(),
        readiness: readiness.clone(),
    };
    Informer {
        sync: informer.into_sync(hold),
        api,
        readiness,
        nodes: nodes.reader(),
    }
}

impl Informer {
    /// Runs until the next failure.
    async fn run(&mut self) -> SyncError {
        match self.sync.run().await {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    /// Runs for this time, in which nothing fails.
    async fn run_for(&mut self, time: Duration) {
        let run = timeout(time, self.run()).await;
        assert!(run.is_err(), "{run:?}");
    }

    /// Runs until the next failure, and records it. Returns the pause.
    async fn fail(&mut self) -> Duration {
        let error = self.run().await;
        self.sync.record_failure(&error)
    }

    fn add_answers(&self, answers: Vec<(StatusCode, String)>) {
        let mut all = self.api.answers.lock().unwrap();
        all.splice(0..0, answers.into_iter().rev());
    }

    /// Whether the table is used.
    fn is_used(&self) -> bool {
        let found = self.nodes.by_address("10.1.0.1".parse().unwrap());
        !matches!(found, AddressMatch::Undecided(_))
    }

    fn asked(&self) -> Vec<String> {
        self.api.asked.lock().unwrap().clone()
    }
}

#[tokio::test(start_paused = true)]
async fn pages_of_a_list_and_then_changes_fill_the_table() {
    let bookmark =
        json!({ "kind": "Pod", "apiVersion": "v1", "metadata": { "resourceVersion": "12" } });
    let mut informer = informer(
        9,
        vec![
            list(
                "5",
                "next",
                &[object("one", "edge-1", &running("10.1.0.1"))],
            ),
            list("5", "", &[object("two", "edge-1", &running("10.1.0.2"))]),
            events(&[
                ("ADDED", object("three", "edge-2", &running("10.1.0.3"))),
                ("DELETED", object("one", "edge-1", &running("10.1.0.1"))),
                (
                    "MODIFIED",
                    object("two", "edge-1", &json!({ "phase": "Failed" })),
                ),
                ("BOOKMARK", bookmark),
            ]),
            failure(500),
        ],
    );
    assert!(matches!(informer.run().await, SyncError::Api(_)));
    assert_eq!(informer.sync.pods.count(), 1);
    let asked = informer.asked();
    // Of the list, of its second page and of the watch.
    let selector = "fieldSelector=status.phase%21%3DSucceeded%2Cstatus.phase%21%3DFailed";
    for question in &asked[..3] {
        assert!(question.contains(selector), "{question}");
    }
    assert!(
        asked[0].contains("limit=500") && asked[1].contains("continue=next"),
        "{asked:?}"
    );
    assert!(
        asked[2].contains("watch=true") && asked[2].contains("resourceVersion=5"),
        "{asked:?}"
    );
    assert!(asked[2].contains("allowWatchBookmarks=true"), "{asked:?}");
    assert!(asked[3].contains("resourceVersion=12"), "{asked:?}");
}

#[tokio::test(start_paused = true)]
async fn a_version_that_is_too_old_is_followed_by_a_list() {
    let expired = json!({ "kind": "Status", "apiVersion": "v1", "code": 410, "message": "too old", "metadata": {} });
    for ends in [events(&[("ERROR", expired)]), failure(410)] {
        let mut informer = informer(
            9,
            vec![
                list("5", "", &[]),
                ends,
                list("8", "", &[object("one", "edge-1", &running("10.1.0.1"))]),
                failure(500),
            ],
        );
        let error = informer.run().await;
        informer.sync.record_failure(&error);
        assert_eq!(
            informer.readiness.faults(),
            Vec::<String>::new(),
            "no outage"
        );
        informer.run().await;
        assert_eq!(informer.sync.pods.count(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn versions_that_are_always_too_old_are_an_outage() {
    // A list whose second page is never found.
    let pages = informer(9, Vec::new());
    // A list after which no watch can begin.
    let watches = informer(9, Vec::new());
    let starts = informer(9, Vec::new());
    let expired = json!({ "kind": "Status", "apiVersion": "v1", "code": 410, "message": "too old", "metadata": {} });
    for _ in 0..10 {
        pages.add_answers(vec![list("5", "next", &[]), failure(410)]);
        watches.add_answers(vec![list("5", "", &[]), failure(410)]);
        starts.add_answers(vec![
            list("5", "", &[]),
            events(&[("ERROR", expired.clone())]),
        ]);
    }
    for (mut informer, is_filled) in [(pages, false), (watches, true), (starts, true)] {
        assert_eq!(informer.fail().await, LIST_PAUSE);
        assert_eq!(informer.readiness.faults(), Vec::<String>::new());
        assert_eq!(informer.readiness.hold_reason().is_none(), is_filled);
        let mut pauses = Vec::new();
        for _ in 0..9 {
            pauses.push(informer.fail().await);
            assert_eq!(informer.readiness.faults().len(), 1);
            assert_eq!(informer.readiness.hold_reason(), None);
        }
        assert!(pauses[8] > BACKOFF_RANGE.1 / 4, "{pauses:?}");
        // A watch ends the outage. Then the first version that is too old is normal again.
        informer.add_answers(vec![list("5", "", &[]), SILENT_WATCH]);
        informer.run_for(Duration::from_secs(5)).await;
        assert_eq!(informer.readiness.faults(), Vec::<String>::new());
        informer.add_answers(vec![failure(410)]);
        assert_eq!(informer.fail().await, LIST_PAUSE);
        assert_eq!(informer.readiness.faults(), Vec::<String>::new());
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_after_a_version_that_is_too_old_ends_the_start() {
    let mut informer = informer(9, vec![failure(410), list("5", "", &[])]);
    assert_eq!(informer.fail().await, LIST_PAUSE);
    assert!(informer.readiness.hold_reason().is_some());
    informer.run_for(REQUEST_TIMEOUT / 2).await;
    assert_eq!(informer.readiness.hold_reason(), None);
}

#[tokio::test(start_paused = true)]
async fn the_time_of_loss_counts_from_the_last_event() {
    let second = Duration::from_secs(1);
    let mut informer = informer(9, vec![list("5", "", &[]), SILENT_WATCH]);
    informer.run_for(second * 2).await;
    // The watch was proven a second ago.
    tokio::time::advance(MAX_LOST.saturating_sub(second * 2)).await;
    informer.add_answers(vec![failure(500)]);
    informer.fail().await;
    assert!(informer.is_used());
    tokio::time::advance(second).await;
    assert!(!informer.is_used());
}

#[tokio::test(start_paused = true)]
async fn a_table_that_is_no_longer_used_is_listed_before_it_is_used_again() {
    let mut informer = informer(9, vec![list("5", "", &[]), failure(500)]);
    informer.fail().await;
    tokio::time::advance(MAX_LOST).await;
    informer.add_answers(vec![failure(500), list("9", "", &[]), failure(500)]);
    for is_used in [false, true] {
        informer.fail().await;
        assert_eq!(informer.is_used(), is_used);
    }
    let asked = informer.asked();
    let is_watch: Vec<_> = asked.iter().map(|uri| uri.contains("watch=true")).collect();
    assert_eq!(is_watch, [false, true, false, false, true], "{asked:?}");
    assert!(asked[4].contains("resourceVersion=9"), "{asked:?}");
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_begins_too_late_does_not_put_the_table_into_use() {
    let late = object("one", "edge-1", &running("10.1.0.1"));
    for watch in [SILENT_WATCH, events(&[("ADDED", late)])] {
        let mut informer = informer(9, vec![list("5", "", &[]), failure(500)]);
        informer.fail().await;
        // The time ends between the request and the first proof.
        informer.add_answers(vec![watch]);
        tokio::time::advance(MAX_LOST.saturating_sub(MIN_WATCH_DURATION / 2)).await;
        informer.api.delay = MIN_WATCH_DURATION / 2;
        informer.sync.client = informer.api.client();
        informer.run_for(Duration::from_secs(5)).await;
        assert!(!informer.is_used());
        let asked = informer.asked();
        assert!(
            asked[2].contains("watch=true") && !asked[3].contains("watch=true"),
            "{asked:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_missing_right_is_a_fault_that_keeps_no_clients_away() {
    let mut informer = informer(9, vec![failure(403), list("5", "", &[]), failure(403)]);
    assert!(informer.readiness.hold_reason().is_some());
    let error = informer.run().await;
    informer.sync.record_failure(&error);
    assert_eq!(informer.readiness.hold_reason(), None);
    let faults = informer.readiness.faults();
    assert!(
        faults.len() == 1 && faults[0].contains("ClusterRole must allow list and watch"),
        "{faults:?}"
    );
    informer.run().await;
    assert_eq!(informer.readiness.faults(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_watch_without_events_ends_an_outage() {
    let mut informer = informer(9, vec![list("5", "", &[]), failure(500)]);
    let error = informer.run().await;
    informer.sync.record_failure(&error);
    assert_eq!(informer.readiness.faults().len(), 1);
    informer.api.answers.lock().unwrap().push(events(&[]));
    let error = informer.run().await;
    assert!(matches!(error, SyncError::Ended), "{error}");
    informer.sync.record_failure(&error);
    assert_eq!(
        informer.readiness.faults().len(),
        1,
        "a watch that ends at once is no success"
    );
    informer.api.answers.lock().unwrap().push(SILENT_WATCH);
    let run = tokio::time::timeout(Duration::from_secs(5), informer.run());
    assert!(run.await.is_err(), "the watch is silent");
    assert_eq!(informer.readiness.faults(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn too_many_pods_are_reported_and_listed_again_later() {
    let pods =
        ["1", "2", "3"].map(|name| object(name, "edge-1", &running(&format!("10.1.0.{name}"))));
    let host = object("host", "edge-1", &running("192.168.0.1"));
    let mut informer = informer(
        2,
        vec![
            list("5", "", &[pods[0].clone(), pods[1].clone(), host]),
            events(&[("ADDED", pods[2].clone())]),
            list("6", "next", &pods),
            list("7", "", &pods[..2]),
        ],
    );
    // The number stays near or above the maximum, so that an alert on it stays.
    for count in [2, 3] {
        let error = informer.run().await;
        assert!(matches!(error, SyncError::TooMany(_)), "{error}");
        assert_eq!(informer.sync.pods.count(), count);
        assert_eq!(informer.sync.record_failure(&error), OVERFLOW_PAUSE);
        let faults = informer.readiness.faults();
        assert!(
            faults[0].contains("more than 2 pods") && faults[0].contains("max_pods"),
            "{faults:?}"
        );
    }
    // The second page of the list that is too long was not requested.
    assert_eq!(informer.asked().len(), 3);
    let run = tokio::time::timeout(Duration::from_secs(5), informer.run());
    assert!(run.await.is_err(), "the watch is silent");
    assert_eq!(informer.sync.pods.count(), 2);
}
