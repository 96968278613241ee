//! Controller of `CertificateSigningRequests` of edges, which join by their identity in the cluster.
//!
//! 1. `validate` checks whether a request is exactly the one that its node may make. The requester is the node, as the API
//!    server authenticated it, and the request names that node only. A request never changes, so it is validated once.
//! 2. A valid request of a Node at the edge is approved and then signed by the gateway (`Signer`), no matter who approved it.
//!    Any other request is left for people to decide, with one event that states the reason. If the Node may still appear,
//!    the request is checked again. If the cluster's own signer is used, the gateway only approves, or does not even approve.
//! 3. If several gateways run, one of them is the first to act. The others detect that by a conflict.
//! 4. Requests of different nodes are processed at once, those of one node one after the other. A request is not signed after a newer
//!    one of the same node: its certificate would replace that of the newer one in the record of the node.
//! 5. `ca_configmap` publishes the CA that edges must trust.
//!
//! Never ends the process.

mod ca_configmap;
mod requests;
#[cfg(test)]
mod tests;
mod validate;

use crate::{
    client::{WATCH_TIMEOUT, error_message, watch_error_message},
    event_writer::{EventContent, EventWriter},
    log_throttle::LogThrottle,
};
use ca_configmap::CaPublisher;
use causeway_certs::{NodeName, SignerProfile};
use causeway_gateway::{config, control::signer::Signer, metrics::Metrics, state::NodesWriter};
use causeway_rt::backoff::Backoff;
use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use k8s_openapi::{
    ByteString, api::certificates::v1::CertificateSigningRequest,
    apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams},
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use requests::{Csr, CsrQueue};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet, convert::Infallible, future::pending, pin::pin, sync::Arc,
    time::Duration,
};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until, timeout},
};
use validate::ValidCsr;

/// Time limit of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum pauses between attempts: while the API does not respond, and while it refuses.
const BACKOFF_RANGE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_mins(1));
/// Number of requests in one response of the API.
const PAGE_SIZE: u32 = 500;

/// Maximum number of requests that are processed at once. Each takes two requests to the API, and the records of those that are
/// signed at once take one write.
const CONCURRENT_REQUESTS: usize = 32;
/// Maximum number of events that wait for the API. Further ones are lost.
const MAX_PENDING_EVENTS: usize = 256;

/// Controller that signs the requests of edges.
pub(crate) struct CsrController {
    /// The cluster's API.
    pub client: Client,
    /// Configuration of the accepted requesters and of the place where the CA is published.
    pub settings: config::CsrSigning,
    /// Signer of the certificates.
    pub signer: Signer,
    /// Roots that edges must trust, as PEM.
    pub roots: watch::Receiver<String>,
    /// The table of nodes.
    pub nodes: NodesWriter,
    /// Metrics of the controller.
    pub metrics: Arc<Metrics>,
    /// Name of this gateway in events.
    pub gateway: String,
}

impl CsrController {
    /// Runs the controller. Never returns.
    pub(crate) async fn run(self) -> Infallible {
        let ca_publisher =
            CaPublisher::new(self.client.clone(), &self.settings, self.roots.clone());
        if self.settings.subject() == Some(SignerProfile::Kubelet) {
            // The cluster approves and signs these requests.
            return ca_publisher.run().await;
        }
        tokio::select! {
            never = self.sign_requests() => never,
            never = ca_publisher.run() => never,
        }
    }

    async fn sign_requests(&self) -> Infallible {
        let (sender, receiver) = mpsc::channel(MAX_PENDING_EVENTS);
        tokio::select! {
            never = self.process_requests(sender) => never,
            never = self.write_events(receiver) => never,
        }
    }

    /// Writes the reasons for which requests are left pending as events. The signing does not wait for them.
    async fn write_events(&self, mut reasons: mpsc::Receiver<PendingReason>) -> Infallible {
        let operation = "writing an event for a certificate request";
        let mut events = EventWriter::new(self.client.clone(), self.gateway.clone(), operation);
        while let Some(reason) = reasons.recv().await {
            let content = EventContent {
                regarding: &reason.request.object_ref,
                reason: "SignError",
                action: "Signing",
                note: &reason.note,
                occurrence: "",
            };
            events.warn(&content).await;
        }
        pending().await
    }

    async fn process_requests(&self, events: mpsc::Sender<PendingReason>) -> Infallible {
        let mut changes = self.nodes.subscribe();
        // Before the nodes of the cluster are loaded, no request may be refused because its node is missing.
        while self.nodes.reader().locations().is_none() && changes.changed().await.is_ok() {}
        let field_selector = format!("spec.signerName={}", self.settings.signer);
        let config = watcher::Config::default()
            .fields(&field_selector)
            .page_size(PAGE_SIZE);
        let mut backlog = CsrBacklog::new(self, events);
        let events = watcher(Api::all(self.client.clone()), config.timeout(WATCH_TIMEOUT));
        let mut events = pin!(events.default_backoff());
        let mut in_progress = FuturesUnordered::<InProgress<'_>>::new();
        loop {
            let has_room = in_progress.len() < CONCURRENT_REQUESTS;
            tokio::select! {
                biased;
                Some(event) = events.next() => backlog.handle_event(event),
                Ok(()) = changes.changed() => backlog.queue.requeue_all(),
                Some((request, outcome)) = in_progress.next() => backlog.finish(&request, outcome),
                () = backlog.wait_until_due(), if has_room => in_progress.extend(backlog.begin_next()),
            }
        }
    }
}

/// Outcome of the processing of a request.
enum Outcome {
    /// The gateway has signed the request, or has approved it for the cluster's own signer.
    Signed,
    /// Another gateway or a person was faster.
    HandledElsewhere,
    /// The request is left for people to decide, for this reason.
    Left(String),
}

/// Reason for which a request is left pending, for an event.
struct PendingReason {
    request: Arc<Csr>,
    note: String,
}

/// Future of a request that is being processed, and of its outcome.
type InProgress<'a> = BoxFuture<'a, (Arc<Csr>, Result<Outcome, String>)>;

/// Pending work of the controller.
struct CsrBacklog<'a> {
    controller: &'a CsrController,
    queue: CsrQueue,
    /// Nodes whose requests are being processed.
    busy: BTreeSet<NodeName>,
    backoff: Backoff,
    /// Earliest time of the next attempt.
    not_before: Option<Instant>,
    events: mpsc::Sender<PendingReason>,
    watch_log: LogThrottle,
    signing_log: LogThrottle,
}

impl<'a> CsrBacklog<'a> {
    fn new(controller: &'a CsrController, events: mpsc::Sender<PendingReason>) -> Self {
        Self {
            controller,
            queue: CsrQueue::default(),
            busy: BTreeSet::new(),
            backoff: Backoff::new(BACKOFF_RANGE.0, BACKOFF_RANGE.1),
            not_before: None,
            events,
            watch_log: LogThrottle::new("watching certificate requests"),
            signing_log: LogThrottle::new("signing the certificate requests of edges"),
        }
    }

    fn handle_event(&mut self, event: Result<Event<CertificateSigningRequest>, watcher::Error>) {
        let event = match event {
            Ok(event) => event,
            Err(error) => return self.watch_log.log_failure(&watch_error_message(&error)),
        };
        let validator = |request: &CertificateSigningRequest| {
            validate::validate(request, &self.controller.settings, &self.controller.signer)
        };
        match event {
            // The watch emits the start of a list before it sends the request.
            Event::Init => return self.queue.begin_list(),
            Event::InitApply(request) | Event::Apply(request) => {
                if validate::is_edge_request(&request, &self.controller.settings) {
                    self.queue.apply(&request, validator);
                }
            }
            Event::InitDone => self.queue.end_list(),
            Event::Delete(request) => self.queue.remove(&request.name_any()),
        }
        self.watch_log.log_recovery();
    }

    /// Waits until there is pending work.
    async fn wait_until_due(&self) {
        match self.not_before {
            _ if !self.queue.has_pending(&self.busy) => pending().await,
            Some(moment) => sleep_until(moment).await,
            None => {}
        }
    }

    /// Begins to process the next request. Returns a future of the request and its outcome.
    fn begin_next(&mut self) -> Option<InProgress<'a>> {
        let request = loop {
            let request = self.queue.pop(&self.busy)?;
            if !self.queue.is_outdated(&request) {
                break request;
            }
            let why = "a request of the same node that the API server has created later was signed; delete this one";
            self.leave_pending(&request, why.to_owned());
        };
        self.busy.extend(request.node().cloned());
        let controller = self.controller;
        let process = async move {
            let outcome = controller.try_process(&request).await;
            (request, outcome)
        };
        Some(process.boxed())
    }

    fn finish(&mut self, request: &Arc<Csr>, outcome: Result<Outcome, String>) {
        if let Some(node) = request.node() {
            self.busy.remove(node);
        }
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(why) => return self.retry_later(request, &why),
        };
        // Others wait at most for the shortest pause while some requests fail each time.
        self.backoff.reset();
        if !self.queue.record_success(request) {
            self.signing_log.log_recovery();
        }
        match outcome {
            Outcome::Signed => self.queue.mark_signed(request),
            Outcome::HandledElsewhere => {}
            Outcome::Left(why) => self.leave_pending(request, why),
        }
    }

    /// Queues a request that failed again, and begins no other one for a while.
    fn retry_later(&mut self, request: &Csr, why: &str) {
        self.controller.metrics.count_cluster_certificate("failed");
        self.signing_log.log_failure(why);
        self.queue.requeue(request);
        // Requests that were begun before the pause do not prolong it.
        if self
            .not_before
            .is_none_or(|moment| moment <= Instant::now())
        {
            let pause = self.backoff.refused(None, rand::random());
            self.not_before = Some(Instant::now() + pause);
        }
    }

    /// Leaves a request pending, and reports the reason once.
    fn leave_pending(&mut self, request: &Arc<Csr>, why: String) {
        let why = if request.approved {
            format!("the request is approved, but was not signed: {why}")
        } else {
            why
        };
        if !self.queue.record_reason(request, &why) {
            return;
        }
        tracing::info!(
            request = request.name,
            by = request.requester,
            why,
            "a certificate request was not approved"
        );
        self.controller.metrics.count_cluster_certificate("left");
        let reason = PendingReason {
            request: request.clone(),
            note: why,
        };
        // The log has the reason of an event that is lost because the API is slow.
        let _ = self.events.try_send(reason);
    }
}

/// Processing of one request.
impl CsrController {
    async fn try_process(&self, request: &Arc<Csr>) -> Result<Outcome, String> {
        let valid_csr = match &request.validation {
            Ok(valid_csr) => valid_csr,
            Err(why) => return Ok(Outcome::Left(why.clone())),
        };
        if let Some(why) = self.signer.refusal_reason(&valid_csr.node) {
            return Ok(Outcome::Left(why));
        }
        let version = if request.approved {
            Some(request.version.clone())
        } else {
            self.approve(request, valid_csr).await?
        };
        let Some(version) = version else {
            return Ok(Outcome::HandledElsewhere);
        };
        // With a subject, the cluster's own signer does the rest.
        if self.settings.subject().is_some() || self.sign(request, valid_csr, &version).await? {
            return Ok(Outcome::Signed);
        }
        Ok(Outcome::HandledElsewhere)
    }

    /// Approves a request. Returns its new version, or `None` if another approver was faster.
    async fn approve(&self, request: &Csr, valid_csr: &ValidCsr) -> Result<Option<String>, String> {
        let message = format!("Node {} requests its own certificate", valid_csr.node);
        let status = json!({ "conditions": [{
            "type": "Approved", "status": "True", "reason": "CausewayEdge", "message": message,
            "lastUpdateTime": Time(Timestamp::now()),
        }] });
        let approved = self.patch("approval", request, (&request.version, &status));
        let approved = approved.await?;
        if approved.is_some() {
            self.metrics.count_cluster_certificate("approved");
        }
        Ok(approved.and_then(|approved| approved.resource_version()))
    }

    /// Signs a request. Returns whether this gateway has signed it now.
    async fn sign(
        &self,
        request: &Csr,
        valid_csr: &ValidCsr,
        version: &str,
    ) -> Result<bool, String> {
        let signer = &self.signer;
        let key = signer.verify_request(&valid_csr.request, &valid_csr.node);
        let key = key.map_err(|error| error.to_string())?;
        let chain = signer.sign(
            (key, &valid_csr.node),
            valid_csr.lifetime,
            request.requested_at,
        );
        let chain = chain.await.map_err(|error| error.to_string())?;
        let status = json!({ "certificate": ByteString(chain.into_bytes()) });
        let patched = self.patch("status", request, (version, &status)).await?;
        if patched.is_none() {
            return Ok(false);
        }
        self.metrics.count_cluster_certificate("signed");
        tracing::info!(node = %valid_csr.node, request = request.name, "issued an edge's certificate for a request in the cluster");
        Ok(true)
    }

    /// Patches a request. Returns the new version, or `None` if the request was replaced meanwhile or no longer exists.
    async fn patch(
        &self,
        part: &str,
        request: &Csr,
        (version, status): (&str, &Value),
    ) -> Result<Option<CertificateSigningRequest>, String> {
        let patch = json!({ "metadata": { "resourceVersion": version }, "status": status });
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(&patch));
        let api = Api::<CertificateSigningRequest>::all(self.client.clone());
        let patch_request = api.patch_subresource(part, &request.name, &parameters, &patch);
        match timeout(REQUEST_TIMEOUT, patch_request).await {
            Ok(Ok(patched)) => Ok(Some(patched)),
            Ok(Err(kube::Error::Api(status))) if status.is_conflict() || status.is_not_found() => {
                tracing::debug!(
                    request = request.name,
                    "another gateway has handled the request already"
                );
                Ok(None)
            }
            Ok(Err(error)) => Err(self.permission_error(part, &error_message(&error))),
            Err(_) => Err("the cluster's API did not answer in time".to_owned()),
        }
    }

    /// Returns the error, with the missing permission if the API server does not name it.
    fn permission_error(&self, part: &str, message: &str) -> String {
        let verb = if part == "approval" {
            "approve"
        } else {
            "sign"
        };
        if message.contains("not permitted") {
            let signer = &self.settings.signer;
            return format!(
                "{message} (the gateway needs the verb \"{verb}\" on resource \"signers\" named {signer} in API group \"certificates.k8s.io\")"
            );
        }
        message.to_owned()
    }
}
