//! The controller against an API that has certificate requests of edges from the beginning.

use super::*;
use crate::csr_client::CSR_USAGES;
use causeway_certs::{Ca, LiveCa, OpenMode, PrivateKey, Store, TrustDomain};
use causeway_gateway::{control::node_records::NodeRecordWriter, state::ClusterNode};
use http::{Request, Response, StatusCode};
use k8s_openapi::api::certificates::v1::CertificateSigningRequestSpec;
use kube::client::Body;
use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard},
};
use tokio::time::sleep;

const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";

const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/default/events";

#[derive(Default)]
struct State {
    requests: Vec<CertificateSigningRequest>,
    /// Requests whose certificates are stored only after this time.
    slow: BTreeMap<String, Duration>,
    /// Beginning of the names of requests that the API refuses to approve.
    refused: Option<String>,
    /// Changes of requests that began or ended, in this order.
    log: Vec<String>,
    /// Times of the refusals.
    refusals: Vec<Instant>,
}

/// A cluster whose API has requests of edges.
#[derive(Clone)]
struct Cluster {
    state: Arc<Mutex<State>>,
    domain: TrustDomain,
}

impl Cluster {
    fn new() -> Self {
        Self {
            state: Arc::default(),
            domain: TrustDomain::parse("td").unwrap(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Adds a request of this name, by which a node requests its certificate.
    fn request(&self, name: &str, node: &str) {
        let key = PrivateKey::generate().unwrap();
        let node = NodeName::parse(node).unwrap();
        let pem = key.edge_request(&self.domain, &node).unwrap();
        let mut request = CertificateSigningRequest {
            spec: CertificateSigningRequestSpec {
                request: ByteString(pem.into_bytes()),
                signer_name: config::CsrSigning::default().signer,
                username: Some(format!("system:node:{node}")),
                groups: Some(vec!["system:nodes".to_owned()]),
                usages: Some(CSR_USAGES.map(str::to_owned).to_vec()),
                ..CertificateSigningRequestSpec::default()
            },
            ..CertificateSigningRequest::default()
        };
        request.metadata.name = Some(name.to_owned());
        request.metadata.uid = Some(name.to_owned());
        request.metadata.resource_version = Some("1".to_owned());
        self.state().requests.push(request);
    }

    async fn answer(self, request: Request<Body>) -> Response<Body> {
        let (path, query) = (request.uri().path(), request.uri().query());
        if query.unwrap_or_default().contains("watch=true") {
            return std::future::pending().await;
        }
        if path == REQUESTS {
            let requests = self.state().requests.clone();
            let list = json!({ "metadata": { "resourceVersion": "1" }, "items": requests });
            return response(StatusCode::OK, &list);
        }
        if path == EVENTS {
            // The answer never comes.
            return std::future::pending().await;
        }
        let change = path.strip_prefix(REQUESTS).unwrap().trim_start_matches('/');
        let (name, part) = change.split_once('/').unwrap();
        self.state().log.push(format!("begin {name} {part}"));
        let refused = self.state().refused.clone();
        if refused.is_some_and(|refused| name.starts_with(&refused)) {
            self.state().refusals.push(Instant::now());
            let status = json!({ "kind": "Status", "status": "Failure", "message": "refused", "reason": "InternalError", "code": 500 });
            return response(StatusCode::INTERNAL_SERVER_ERROR, &status);
        }
        let slow = self.state().slow.get(name).copied();
        if let Some(time) = slow.filter(|_| part == "status") {
            sleep(time).await;
        }
        let mut state = self.state();
        state.log.push(format!("end {name} {part}"));
        let object = state.requests.iter().find(|each| each.name_any() == name);
        response(StatusCode::OK, &json!(object))
    }

    /// Returns the names of the requests that have a certificate.
    fn signed(&self) -> BTreeSet<String> {
        let state = self.state();
        let ends = state.log.iter().filter_map(|change| {
            let name = change.strip_prefix("end ")?.strip_suffix(" status")?;
            Some(name.to_owned())
        });
        ends.collect()
    }

    /// Returns a controller with its data directory. All nodes that request certificates are at the edge.
    fn controller(&self) -> (CsrController, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), OpenMode::Create).unwrap();
        let ca = LiveCa::new(Ca::create(&self.domain).unwrap());
        let nodes = NodesWriter::default();
        let requests = self.state().requests.clone();
        let member = |request: &CertificateSigningRequest| {
            let user = request.spec.username.as_deref().unwrap();
            let node = user.strip_prefix("system:node:").unwrap();
            let member = ClusterNode {
                is_edge: true,
                ..ClusterNode::default()
            };
            (NodeName::parse(node).unwrap(), member)
        };
        nodes.replace_cluster(requests.iter().map(member).collect());
        let record_writer = NodeRecordWriter::new(&store, &nodes);
        let lifetime = Duration::from_hours(1);
        let cluster = self.clone();
        let api = tower::service_fn(move |request: Request<Body>| {
            cluster.clone().answer(request).map(Ok::<_, kube::Error>)
        });
        let controller = CsrController {
            client: Client::new(api, "it"),
            settings: config::CsrSigning::default(),
            signer: Signer::new(ca, nodes.reader(), record_writer, lifetime),
            roots: watch::Sender::new(String::new()).subscribe(),
            nodes,
            metrics: Metrics::new(),
            gateway: "gw".to_owned(),
        };
        (controller, folder)
    }

    /// Runs a controller for this time.
    async fn run_controller(&self, time: Duration) {
        let (controller, _folder) = self.controller();
        let never = Box::pin(controller.sign_requests());
        timeout(time, never).await.unwrap_err();
    }
}

fn response(status: StatusCode, body: &Value) -> Response<Body> {
    let response = Response::builder().status(status);
    response
        .body(Body::from(body.to_string().into_bytes()))
        .unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_slow_answer_does_not_delay_other_nodes() {
    let cluster = Cluster::new();
    let count = 3 * CONCURRENT_REQUESTS;
    for number in 0..count {
        let name = format!("edge-{number}");
        cluster.request(&name, &name);
    }
    cluster
        .state()
        .slow
        .insert("edge-0".to_owned(), REQUEST_TIMEOUT / 2);
    cluster.run_controller(REQUEST_TIMEOUT / 4).await;
    let signed = cluster.signed();
    assert_eq!(
        (signed.len(), signed.contains("edge-0")),
        (count - 1, false)
    );
}

/// The API answers no request for an event.
#[tokio::test(start_paused = true)]
async fn events_do_not_delay_the_signing() {
    let cluster = Cluster::new();
    let count = 2 * MAX_PENDING_EVENTS;
    for number in 0..count {
        let name = format!("a-{number}");
        cluster.request(&name, "edge-0");
        let mut state = cluster.state();
        state.requests[number].spec.usages = None;
    }
    cluster.request("z", "edge-1");
    cluster.run_controller(Duration::from_secs(1)).await;
    assert_eq!(cluster.signed(), ["z".to_owned()].into());
}

#[tokio::test(start_paused = true)]
async fn requests_of_one_node_are_signed_one_after_the_other() {
    let cluster = Cluster::new();
    let names = ["first", "second", "third"];
    for name in names {
        cluster.request(name, "edge-1");
        cluster
            .state()
            .slow
            .insert(name.to_owned(), Duration::from_secs(1));
    }
    cluster.request("other", "edge-2");
    cluster.run_controller(Duration::from_mins(1)).await;
    let mut log = cluster.state().log.clone();
    let end = log.iter().position(|change| change == "end other status");
    assert!(end < log.iter().position(|change| change == "end first status"));
    log.retain(|change| !change.contains("other"));
    let changes = |name: &str| {
        let change = |part: &str| ["begin", "end"].map(|step| format!("{step} {name} {part}"));
        [change("approval"), change("status")].concat()
    };
    assert_eq!(log, names.map(changes).concat());
}

#[tokio::test(start_paused = true)]
async fn failed_requests_are_retried_after_longer_pauses() {
    let cluster = Cluster::new();
    for number in 0..20 {
        let name = format!("bad-{number}");
        cluster.request(&name, &name);
    }
    cluster.state().refused = Some("bad".to_owned());
    cluster.run_controller(Duration::from_hours(1)).await;
    let refusals = std::mem::take(&mut cluster.state().refusals);
    let pauses: Vec<_> = refusals.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let pauses: Vec<_> = pauses.iter().filter(|pause| !pause.is_zero()).collect();
    // Requests that fail at once count as one failure.
    assert!(*pauses[0] <= Duration::from_millis(250), "{pauses:?}");
    let longest = BACKOFF_RANGE.1 / 2..=BACKOFF_RANGE.1;
    assert!(longest.contains(pauses[pauses.len() - 1]), "{pauses:?}");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_always_fails_delays_others_little() {
    let cluster = Cluster::new();
    for (name, node) in [("bad", "edge-1"), ("good", "edge-2")] {
        cluster.request(name, node);
    }
    let (controller, _folder) = cluster.controller();
    let (events, _receiver) = mpsc::channel(1);
    let mut backlog = CsrBacklog::new(&controller, events);
    for request in cluster.state().requests.clone() {
        backlog.handle_event(Ok(Event::Apply(request)));
    }
    let [bad, good] = [(); 2].map(|()| backlog.queue.pop(&BTreeSet::new()).unwrap());
    for _ in 0..10 {
        backlog.retry_later(&bad, "refused");
        sleep_until(backlog.not_before.unwrap()).await;
    }
    backlog.finish(&good, Ok(Outcome::Signed));
    backlog.retry_later(&bad, "refused");
    let pause = backlog.not_before.unwrap() - Instant::now();
    assert!(pause <= Duration::from_millis(250), "{pause:?}");
}
