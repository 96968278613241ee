//! Informer that fills `state::pods` from Pod objects: the node and the addresses of each pod.
//!
//! 1. A paged list, then a watch with bookmarks. The field selector leaves out pods that have ended; the API reports
//!    such a pod as deleted. Only the fields in `PodObject` are parsed, so a page takes little memory.
//! 2. Pods in the network of their node are left out: their address is the node's. So are pods that are on no node yet,
//!    and mirror pods: a kubelet creates them, with any free name in any namespace.
//! 3. `kube::runtime::watcher` does not report that a watch was started again. In a cluster without changes the table
//!    would then count as lost for ever. So the requests are sent here, and a response ends an outage.
//! 4. While the pods cannot be read, `state::pods` decides how long the table is used. `/readyz` reports the fault,
//!    but the gateway stays ready, because only clients of pods need the table.
//! 5. After an outage in which the table was no longer used, the pods are listed again. A watch that continued would
//!    put the table into use before it has applied the changes that were missed.

use crate::{
    client::{WATCH_TIMEOUT, error_message},
    log_throttle::LogThrottle,
};
use causeway_certs::NodeName;
use causeway_gateway::{
    control::drain::{Readiness, ReadinessBlock},
    metrics::PodMetrics,
    state::{
        Pod, PodsWriter,
        pods::{MAX_LOST, TooManyPods},
    },
};
use causeway_rt::backoff::Backoff;
use futures_util::TryStreamExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{
    Client,
    api::{ListParams, WatchEvent, WatchParams},
    core::Request,
};
use rustls_pki_types::UnixTime;
use serde::{Deserialize, de::IgnoredAny};
use std::{collections::HashSet, convert::Infallible, pin::pin, time::Duration};
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// The resource.
const PATH: &str = "/api/v1/pods";
/// Pods that have ended give their addresses up.
const FIELDS: &str = "status.phase!=Succeeded,status.phase!=Failed";
/// Number of pods in one response of the API.
const PAGE_SIZE: u32 = 500;
/// Time limit of one page, and of the start of a watch.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Time after which a watch has ended, if the API server has not ended it at [`WATCH_TIMEOUT`].
const WATCH_LIMIT: Duration = Duration::from_secs(WATCH_TIMEOUT as u64 + 10);
/// Duration of a watch after which it is no failure, even without an event.
const MIN_WATCH_DURATION: Duration = Duration::from_secs(1);
/// Maximum pauses between attempts: while the API does not answer, and while it refuses.
const BACKOFF_RANGE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Pause before a list that is necessary because a version is too old for the first time since a watch.
const LIST_PAUSE: Duration = Duration::from_secs(1);
/// Time after which a cluster with too many pods is listed again.
const OVERFLOW_PAUSE: Duration = Duration::from_mins(1);
/// Maximum number of addresses of a pod: one of each family.
const MAX_ADDRESSES: usize = 2;

/// Informer that synchronizes the table of pods with the cluster.
pub(crate) struct PodInformer {
    /// The cluster's API.
    pub client: Client,
    /// Table of pods.
    pub pods: PodsWriter,
    /// Metrics of the informer.
    pub metrics: PodMetrics,
    /// Readiness, which reports that the pods cannot be read.
    pub readiness: Readiness,
}

/// Reason why the pods are not followed.
#[derive(Debug, thiserror::Error)]
enum SyncError {
    #[error("{}", error_message(.0))]
    Api(#[from] kube::Error),
    #[error("the cluster's API does not answer")]
    Silent,
    #[error("the watch ended immediately")]
    Ended,
    /// The version of the watch is too old to continue.
    #[error("the version of the pods is too old")]
    Expired,
    #[error(transparent)]
    TooMany(#[from] TooManyPods),
}

impl SyncError {
    /// Whether the API has refused the request because of a missing right.
    fn is_forbidden(&self) -> bool {
        matches!(self, Self::Api(kube::Error::Api(status)) if status.code == 403)
    }

    /// Whether the version of the watch, or of a page, is too old.
    fn is_expired(&self) -> bool {
        let is_gone = matches!(self, Self::Api(kube::Error::Api(status)) if status.code == 410);
        is_gone || matches!(self, Self::Expired)
    }
}

impl PodInformer {
    /// Runs the informer. Never returns. Drops `hold` when the table is filled, or cannot be filled for the first time.
    pub(crate) async fn run(self, hold: ReadinessBlock) -> Infallible {
        let mut sync = self.into_sync(hold);
        loop {
            let error = match sync.run().await {
                Ok(never) => match never {},
                Err(error) => error,
            };
            sleep(sync.record_failure(&error)).await;
        }
    }

    fn into_sync(self, hold: ReadinessBlock) -> PodSync {
        PodSync {
            client: self.client,
            pods: self.pods,
            metrics: self.metrics,
            names: HashSet::new(),
            version: None,
            proven_at: Instant::now(),
            has_expired: false,
            outage: Outage {
                readiness: self.readiness,
                hold: Some(hold),
                fault: None,
                log: LogThrottle::new("reading the pods of the cluster"),
            },
            backoff: Backoff::new(BACKOFF_RANGE.0, BACKOFF_RANGE.1),
        }
    }
}

/// State of the informer between requests.
struct PodSync {
    client: Client,
    pods: PodsWriter,
    metrics: PodMetrics,
    /// Names of nodes, so that the pods of a node share one.
    names: HashSet<NodeName>,
    /// Version with which the watch continues; `None` if the pods must be listed.
    version: Option<String>,
    /// Time of the last event, the last complete list, or the last start of a watch.
    proven_at: Instant,
    /// Whether a version was too old, and no watch has followed since.
    has_expired: bool,
    outage: Outage,
    backoff: Backoff,
}

/// Report of an outage.
struct Outage {
    readiness: Readiness,
    hold: Option<ReadinessBlock>,
    fault: Option<ReadinessBlock>,
    log: LogThrottle,
}

impl PodSync {
    /// Lists the pods if necessary, and watches them until that fails.
    async fn run(&mut self) -> Result<Infallible, SyncError> {
        loop {
            self.drop_old_version();
            let version = match self.version.clone() {
                Some(version) => version,
                None => self.list().await?,
            };
            self.watch(version).await?;
        }
    }

    /// Requests a list if the table is no longer used because of the time since the last proof.
    fn drop_old_version(&mut self) {
        if self.proven_at.elapsed() >= MAX_LOST && self.version.take().is_some() {
            self.pods
                .set_lost_since(self.proven_at, "the pods must be listed again");
        }
    }

    /// Replaces the table by a complete list. Returns the version of the list.
    async fn list(&mut self) -> Result<String, SyncError> {
        self.names.clear();
        let mut params = ListParams::default().fields(FIELDS).limit(PAGE_SIZE);
        let mut all = Vec::new();
        loop {
            let request = Request::new(PATH)
                .list(&params)
                .map_err(kube::Error::BuildRequest);
            let page = self.client.request::<PodList>(request?);
            let page = timeout(REQUEST_TIMEOUT, page)
                .await
                .map_err(|_| SyncError::Silent)??;
            let items = page.items.into_iter();
            let pods = items.filter_map(|pod| pod.reduce(&mut self.names));
            all.extend(pods.filter(|pod| self.pods.has_address(pod)));
            match page.metadata.r#continue {
                // The rest of a list that is too long is not read.
                Some(token) if !token.is_empty() && all.len() <= self.pods.max_pods() => {
                    params.continue_token = Some(token);
                }
                _ => {
                    self.pods.replace(all)?;
                    self.record_list();
                    let version = page.metadata.resource_version.unwrap_or_default();
                    self.version = Some(version.clone());
                    return Ok(version);
                }
            }
        }
    }

    /// Applies the changes since this version until the watch ends.
    async fn watch(&mut self, version: String) -> Result<(), SyncError> {
        let params = WatchParams::default().fields(FIELDS).timeout(WATCH_TIMEOUT);
        let request = Request::new(PATH)
            .watch(&params, &version)
            .map_err(kube::Error::BuildRequest);
        let starting = self.client.request_events::<PodObject>(request?);
        let events = timeout(REQUEST_TIMEOUT, starting)
            .await
            .map_err(|_| SyncError::Silent)??;
        let mut events = pin!(events);
        let (open_at, deadline) = (
            Instant::now() + MIN_WATCH_DURATION,
            Instant::now() + WATCH_LIMIT,
        );
        let mut is_proven = false;
        loop {
            let until = if is_proven { deadline } else { open_at };
            let next = timeout_at(until, events.try_next()).await;
            if !is_proven {
                self.drop_old_version();
                if self.version.is_none() {
                    return Ok(());
                }
            }
            match next {
                Ok(event) => match event? {
                    Some(event) => self.apply(event)?,
                    None if is_proven => return Ok(()),
                    None => return Err(SyncError::Ended),
                },
                // The connection may be dead.
                Err(_) if is_proven => return Ok(()),
                Err(_) => {}
            }
            if !is_proven {
                is_proven = true;
                self.has_expired = false;
                self.record_success();
            }
        }
    }

    fn apply(&mut self, event: WatchEvent<PodObject>) -> Result<(), SyncError> {
        let version = match event {
            WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                let (name, version) = (pod.name(), pod.metadata.resource_version.clone());
                match pod.reduce(&mut self.names) {
                    Some(pod) => self.pods.upsert(pod)?,
                    None => self.pods.remove(&name),
                }
                version
            }
            WatchEvent::Deleted(pod) => {
                self.pods.remove(&pod.name());
                pod.metadata.resource_version
            }
            WatchEvent::Bookmark(bookmark) => Some(bookmark.metadata.resource_version),
            WatchEvent::Error(status) if status.code == 410 => return Err(SyncError::Expired),
            WatchEvent::Error(status) => return Err(kube::Error::Api(status).into()),
        };
        self.version = version.or(self.version.take());
        self.proven_at = Instant::now();
        self.update_metrics();
        Ok(())
    }

    fn update_metrics(&self) {
        let pods = &self.pods;
        self.metrics
            .set_pods(pods.count(), pods.max_pods(), pods.count_conflicts());
    }

    /// Records a complete list. After a version that was too old, only a watch ends the outage: its version may be too
    /// old again.
    fn record_list(&mut self) {
        self.proven_at = Instant::now();
        self.update_metrics();
        self.outage.hold = None;
        if !self.has_expired {
            self.record_success();
        }
    }

    fn record_success(&mut self) {
        self.proven_at = Instant::now();
        self.pods.set_found();
        self.update_metrics();
        self.metrics.set_lost(None);
        self.outage.log.log_recovery();
        self.backoff.reset();
        (self.outage.hold, self.outage.fault) = (None, None);
    }

    /// Reports a failure. Returns the pause before the next attempt.
    fn record_failure(&mut self, error: &SyncError) -> Duration {
        if error.is_expired() || matches!(error, SyncError::TooMany(_)) {
            self.version = None;
        }
        // The first time is normal: the API server keeps the versions of a few minutes.
        if error.is_expired() && !std::mem::replace(&mut self.has_expired, true) {
            return LIST_PAUSE;
        }
        let mut why = error.to_string();
        if error.is_forbidden() {
            why = format!(
                "{why}; the gateway's ClusterRole must allow list and watch for pods (kubernetes.pods)"
            );
        }
        self.pods.set_lost_since(self.proven_at, &why);
        self.update_metrics();
        if self.outage.fault.is_none() {
            let lost_for = self.proven_at.elapsed().as_secs();
            let since = UnixTime::now().as_secs().saturating_sub(lost_for);
            self.metrics.set_lost(Some(since));
        }
        let text = format!("the pods of the cluster cannot be read (kubernetes.pods): {why}");
        self.outage.fault = Some(self.outage.readiness.report_fault(text));
        self.outage.hold = None;
        self.outage.log.log_failure(&why);
        match error {
            SyncError::TooMany(_) => OVERFLOW_PAUSE,
            SyncError::Api(kube::Error::Api(_)) | SyncError::Expired => {
                self.backoff.refused(None, rand::random())
            }
            _ => self.backoff.silent(rand::random()),
        }
    }
}

/// Page of a list of pods.
#[derive(Deserialize)]
struct PodList {
    #[serde(default)]
    metadata: ListMeta,
    #[serde(default = "Vec::new")]
    items: Vec<PodObject>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMeta {
    resource_version: Option<String>,
    r#continue: Option<String>,
}

/// Fields of a Pod object (core/v1) that the table needs.
#[derive(Clone, Deserialize)]
struct PodObject {
    metadata: PodMeta,
    #[serde(default)]
    spec: PodSpec,
    #[serde(default)]
    status: PodStatus,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodMeta {
    #[serde(default)]
    namespace: String,
    name: String,
    resource_version: Option<String>,
    deletion_timestamp: Option<Time>,
    annotations: Option<PodAnnotations>,
}

#[derive(Clone, Deserialize)]
struct PodAnnotations {
    /// Present on the mirror of a static pod, which the kubelet of the pod's node creates.
    #[serde(rename = "kubernetes.io/config.mirror")]
    mirror: Option<IgnoredAny>,
}

#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodSpec {
    node_name: Option<String>,
    host_network: Option<bool>,
}

#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodStatus {
    phase: Option<String>,
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    #[serde(rename = "podIPs")]
    pod_ips: Option<Vec<PodIp>>,
}

#[derive(Clone, Deserialize)]
struct PodIp {
    ip: Option<String>,
}

impl PodObject {
    fn name(&self) -> String {
        format!("{}/{}", self.metadata.namespace, self.metadata.name)
    }

    /// Whether a kubelet has created the object, with a name of its choice.
    fn is_mirror(&self) -> bool {
        let annotations = self.metadata.annotations.as_ref();
        annotations.is_some_and(|all| all.mirror.is_some())
    }

    /// Returns the pod, or `None` if it has ended, has no address of its own, is on no node, or is a mirror pod.
    fn reduce(self, names: &mut HashSet<NodeName>) -> Option<Pod> {
        let has_ended = matches!(self.status.phase.as_deref(), Some("Succeeded" | "Failed"));
        if has_ended || self.spec.host_network == Some(true) || self.is_mirror() {
            return None;
        }
        let name = self.name().into();
        let node = NodeName::parse(&self.spec.node_name?).ok()?;
        let node = names.get(&node).cloned().unwrap_or_else(|| {
            names.insert(node.clone());
            node
        });
        let all = self
            .status
            .pod_ips
            .into_iter()
            .flatten()
            .filter_map(|own| own.ip);
        // Before Kubernetes 1.16 there was only the one address.
        let addresses = all
            .chain(self.status.pod_ip)
            .filter_map(|text| text.parse().ok());
        let deletion = self.metadata.deletion_timestamp;
        Some(Pod {
            name,
            node,
            addresses: addresses.take(MAX_ADDRESSES).collect(),
            ends_at: deletion.map(|time| u64::try_from(time.0.as_second()).unwrap_or_default()),
        })
    }
}

#[cfg(test)]
mod tests;
