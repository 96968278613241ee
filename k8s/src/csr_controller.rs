//! Controller of `CertificateSigningRequests` of edges, which join by their identity in the cluster.
//!
//! 1. `validate` checks whether a request is exactly what that node may ask for. The requester is the node, as the API server
//!    authenticated it, and the request names that node only. A request never changes, so it is validated once.
//! 2. A valid request of a Node at the edge is approved and then signed by the gateway (`Signer`), no matter who approved it. Any
//!    other request is left for people to decide, with one event that gives the reason. If the Node may still appear, the request
//!    is checked again. If a signer of the cluster's own is used, the gateway only approves, or does not even approve.
//! 3. Of several gateways one is first; a conflict shows that another one was.
//! 4. `ca_configmap` publishes the CA that edges are to trust.
//!
//! Never ends the process.

mod ca_configmap;
mod requests;
mod validate;

use crate::{
    client::{WATCH_TIMEOUT, error_message, watch_error_message},
    event_writer::{EventWriter, WarningEvent},
    log_throttle::LogThrottle,
};
use ca_configmap::CaPublisher;
use causeway_certs::SignerProfile;
use causeway_gateway::{config, control::signer::Signer, metrics::Metrics, state::NodesWriter};
use causeway_rt::backoff::Backoff;
use futures_util::StreamExt;
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
use std::{convert::Infallible, pin::pin, sync::Arc, time::Duration};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};
use validate::ValidCsr;

/// Time limit of one request.
const BOUND: Duration = Duration::from_secs(10);
/// The longest pauses between tries.
const PAUSES: (Duration, Duration) = (Duration::from_secs(2), Duration::from_mins(1));
/// Requests in one answer of the API.
const PAGE: u32 = 500;

/// Signs what edges ask the cluster for.
pub struct CsrController {
    /// The cluster's API.
    pub client: Client,
    /// Configuration of the accepted requesters and of the place where the CA is published.
    pub rules: config::CsrSigning,
    /// Signer of the certificates.
    pub signer: Signer,
    /// Roots that edges are to trust, as PEM.
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
    pub async fn run(self) -> Infallible {
        let bundle = CaPublisher::new(self.client.clone(), &self.rules, self.roots.clone());
        if self.rules.subject() == Some(SignerProfile::Kubelet) {
            // The cluster approves these, and signs them.
            return bundle.run().await;
        }
        tokio::select! {
            never = self.sign() => never,
            never = bundle.run() => never,
        }
    }

    async fn sign(&self) -> Infallible {
        let mut changes = self.nodes.changes();
        // Before the nodes of the cluster are loaded, no request may be refused because its node is missing.
        while self.nodes.reader().places().is_none() && changes.changed().await.is_ok() {}
        let wanted = format!("spec.signerName={}", self.rules.signer);
        let config = watcher::Config::default().fields(&wanted).page_size(PAGE);
        let mut work = CsrBacklog::new(self);
        let events = watcher(work.api.clone(), config.timeout(WATCH_TIMEOUT));
        let mut events = pin!(events.default_backoff());
        loop {
            tokio::select! {
                biased;
                Some(event) = events.next() => work.heard(event),
                Ok(()) = changes.changed() => work.requests.again(),
                () = work.due() => work.settle().await,
            }
        }
    }
}

/// Pending work of the controller.
struct CsrBacklog<'a> {
    of: &'a CsrController,
    api: Api<CertificateSigningRequest>,
    requests: CsrQueue,
    backoff: Backoff,
    /// Earliest time of the next try.
    not_before: Option<Instant>,
    events: EventWriter,
    watching: LogThrottle,
    settling: LogThrottle,
}

impl<'a> CsrBacklog<'a> {
    fn new(of: &'a CsrController) -> Self {
        Self {
            of,
            api: Api::all(of.client.clone()),
            requests: CsrQueue::default(),
            backoff: Backoff::new(PAUSES.0, PAUSES.1),
            not_before: None,
            events: EventWriter::new(
                of.client.clone(),
                of.gateway.clone(),
                "writing an event for a certificate request",
            ),
            watching: LogThrottle::new("watching certificate requests"),
            settling: LogThrottle::new("signing the certificate requests of edges"),
        }
    }

    fn heard(&mut self, event: Result<Event<CertificateSigningRequest>, watcher::Error>) {
        let event = match event {
            Ok(event) => event,
            Err(error) => return self.watching.say(&watch_error_message(&error)),
        };
        let judge = |request: &CertificateSigningRequest| {
            validate::validate(request, &self.of.rules, &self.of.signer)
        };
        match event {
            // The watch emits the start of a list before it sends the request.
            Event::Init => return self.requests.listing(),
            Event::InitApply(request) | Event::Apply(request) => {
                if validate::is_ours(&request, &self.of.rules) {
                    self.requests.take(&request, judge);
                }
            }
            Event::InitDone => self.requests.whole(),
            Event::Delete(request) => self.requests.gone(&request.name_any()),
        }
        self.watching.over();
    }

    /// Returns when there is something to do.
    async fn due(&self) {
        match self.not_before {
            _ if !self.requests.is_due() => std::future::pending().await,
            Some(moment) => sleep_until(moment).await,
            None => {}
        }
    }

    /// Does one thing that is to be done.
    async fn settle(&mut self) {
        let Some(request) = self.requests.next() else {
            return;
        };
        match self.attempt(&request).await {
            Ok(()) => {
                self.backoff.reset();
                self.not_before = None;
                self.settling.over();
            }
            Err(why) => {
                self.of.metrics.cluster_certificate("failed");
                self.settling.say(&why);
                self.requests.put_back(&request);
                let pause = self.backoff.refused(None, rand::random());
                self.not_before = Some(Instant::now() + pause);
            }
        }
    }

    async fn attempt(&mut self, request: &Arc<Csr>) -> Result<(), String> {
        let right = match &request.judged {
            Ok(right) => right,
            Err(why) => {
                self.leave(request, why).await;
                return Ok(());
            }
        };
        if let Some(why) = self.of.signer.refuses(&right.node) {
            self.leave(request, &why).await;
            return Ok(());
        }
        let version = if request.approved {
            Some(request.version.clone())
        } else {
            self.approve(request, right).await?
        };
        if self.of.rules.subject().is_some() {
            // The cluster's own signer sees to the rest.
            if version.is_some() {
                self.requests.done(request);
            }
            return Ok(());
        }
        if let Some(version) = version
            && self.sign(request, right, &version).await?
        {
            self.requests.done(request);
        }
        Ok(())
    }

    /// Leaves a request as it is, and reports the reason once.
    async fn leave(&mut self, request: &Csr, why: &str) {
        let why = if request.approved {
            format!("the request is approved, but was not signed: {why}")
        } else {
            why.to_owned()
        };
        if !self.requests.tells(request, &why) {
            return;
        }
        tracing::info!(
            request = request.name,
            by = request.requester,
            why,
            "a certificate request was not approved"
        );
        self.of.metrics.cluster_certificate("left");
        let warning = WarningEvent {
            about: &request.about,
            reason: "SignError",
            action: "Signing",
            note: &why,
        };
        self.events.warn(&warning).await;
    }

    /// Approves a request. Returns its new version, or `None` if another approver was faster.
    async fn approve(&self, request: &Csr, right: &ValidCsr) -> Result<Option<String>, String> {
        let message = format!("Node {} requests its own certificate", right.node);
        let status = json!({ "conditions": [{
            "type": "Approved", "status": "True", "reason": "CausewayEdge", "message": message,
            "lastUpdateTime": Time(Timestamp::now()),
        }] });
        let approved = self.patch("approval", request, (&request.version, &status));
        let approved = approved.await?;
        if approved.is_some() {
            self.of.metrics.cluster_certificate("approved");
        }
        Ok(approved.and_then(|approved| approved.resource_version()))
    }

    /// Whether it is signed now, and by us.
    async fn sign(&self, request: &Csr, right: &ValidCsr, version: &str) -> Result<bool, String> {
        let signer = &self.of.signer;
        let key = signer.read(&right.request, &right.node);
        let key = key.map_err(|error| error.to_string())?;
        let chain = signer.sign((key, &right.node), right.life, request.asked_at);
        let chain = chain.await.map_err(|error| error.to_string())?;
        let status = json!({ "certificate": ByteString(chain.into_bytes()) });
        let patched = self.patch("status", request, (version, &status)).await?;
        if patched.is_none() {
            return Ok(false);
        }
        self.of.metrics.cluster_certificate("signed");
        tracing::info!(node = %right.node, request = request.name, "issued an edge's certificate for a request in the cluster");
        Ok(true)
    }

    /// Patches a request. Returns the new version, or `None` if the request was replaced meanwhile, or is gone.
    async fn patch(
        &self,
        part: &str,
        request: &Csr,
        (version, status): (&str, &Value),
    ) -> Result<Option<CertificateSigningRequest>, String> {
        let patch = json!({ "metadata": { "resourceVersion": version }, "status": status });
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(&patch));
        let asked = self
            .api
            .patch_subresource(part, &request.name, &parameters, &patch);
        match timeout(BOUND, asked).await {
            Ok(Ok(patched)) => Ok(Some(patched)),
            Ok(Err(kube::Error::Api(status))) if status.is_conflict() || status.is_not_found() => {
                tracing::debug!(
                    request = request.name,
                    "another gateway has handled the request already"
                );
                Ok(None)
            }
            Ok(Err(error)) => Err(self.refused(part, &error_message(&error))),
            Err(_) => Err("the cluster's API did not answer in time".to_owned()),
        }
    }

    /// Returns the refusal, with the missing permission if the API server does not name it.
    fn refused(&self, part: &str, said: &str) -> String {
        let verb = if part == "approval" {
            "approve"
        } else {
            "sign"
        };
        if said.contains("not permitted") {
            let signer = &self.of.rules.signer;
            return format!(
                "{said} (the gateway needs the verb \"{verb}\" on resource \"signers\" named {signer} in API group \"certificates.k8s.io\")"
            );
        }
        said.to_owned()
    }
}
