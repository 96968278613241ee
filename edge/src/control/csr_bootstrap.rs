//! Joining without a token: the cluster authenticates the node, and the gateway's CA signs the certificate requested from
//! the cluster.
//!
//! 1. The cluster publishes the trusted CA, and the API server returns the name of this node.
//! 2. The edge generates the key, which never leaves this machine. The edge submits a certificate request to the cluster. The
//!    request is saved, so that it survives a restart of this process.
//! 3. The edge waits for the answer, and reports at each poll why there is none yet. If the request is denied, or not
//!    answered within an hour, the edge submits another one for another key.
//! 4. The certificate must be for this node and chain to that CA. If a signer of the cluster itself has issued it, the edge
//!    presents it once to a gateway and receives a certificate of that CA.
//!
//! These steps obtain only the first certificate, and the next one after an expired certificate: gateways renew all others
//! (`renew`). This module does not depend on Kubernetes, which is behind [`CsrClient`].

use super::{
    connect_error::ConnectError,
    dial::GatewayConnector,
    enrol::ProgressFn,
    enrol_client::{self, EnrolRequest, EnrolRequestError},
    network_monitor::NetworkMonitor,
};
use crate::config::Config;
use causeway_certs::{
    EdgeIdentity, GatewayRevocations, LeafCertificate, NodeName, PendingCsr, PrivateKey, Requested,
    SignerProfile, Store, StoreError, verify::csr_exchange_client,
};
use causeway_rt::{backoff::Backoff, task::TaskGroup};
use futures_util::future::BoxFuture;
use rustls::pki_types::UnixTime;
use std::{fmt::Display, time::Duration};
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep},
};
use tracing::{info, warn};

/// Time that the edge waits for one request. A cluster deletes requests that are not approved within a day.
const REQUEST_TIMEOUT: Duration = Duration::from_hours(1);

/// Client of the cluster that this node belongs to.
pub trait CsrClient: Send + Sync {
    /// Returns the name of this node, as the API server authenticates it.
    fn node_name(&self) -> BoxFuture<'_, Result<String, CsrRequestError>>;
    /// Returns the CA certificates of gateways, as PEM.
    fn roots(&self) -> BoxFuture<'_, Result<String, CsrRequestError>>;
    /// Submits a certificate request, as PEM, under a name for later status queries. A name that was submitted before is not
    /// submitted again.
    fn submit<'a>(
        &'a self,
        name: &'a str,
        request: &'a str,
    ) -> BoxFuture<'a, Result<(), CsrRequestError>>;
    /// Returns the form of the node names in certificates, if the signer is one of the cluster itself.
    fn signer_profile(&self) -> Option<SignerProfile>;
    /// Returns the current status of a request.
    fn request_status<'a>(
        &'a self,
        name: &'a str,
    ) -> BoxFuture<'a, Result<CsrStatus, CsrRequestError>>;
}

/// Status of a request for a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CsrStatus {
    /// Certificate and its chain, as PEM.
    Signed(String),
    /// No certificate yet, with the reason.
    Pending(String),
    /// No certificate will be issued, with the reason.
    Refused(String),
}

/// Reason why a request to the cluster failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CsrRequestError {
    /// The cluster does not answer.
    Silent(String),
    /// The cluster does not allow this node to make the request.
    Refused(String),
}

impl From<CsrRequestError> for ConnectError {
    fn from(why: CsrRequestError) -> Self {
        match why {
            CsrRequestError::Silent(why) => Self::silent(why),
            CsrRequestError::Refused(why) => Self::refused(why),
        }
    }
}

/// Joins with a certificate of the cluster. Returns only with an identity: after each error it calls `on_progress` and tries
/// again. Drop the future to stop.
pub(crate) async fn join(
    cluster: &dyn CsrClient,
    (config, store): (&Config, &Store),
    on_progress: &ProgressFn<'_>,
) -> EdgeIdentity {
    let mut backoff = cluster_backoff(config);
    loop {
        let error = match submit_and_wait(cluster, (config, store), on_progress).await {
            Ok(identity) => {
                info!(
                    node = identity.node.as_str(),
                    "joined with a certificate of the cluster"
                );
                return identity;
            }
            Err(error) => error,
        };
        let delay = error.delay(&mut backoff, rand::random());
        warn!(what = error.detail(), retry_in = ?delay, "not joined yet");
        on_progress(error.detail());
        pause(&error, delay).await;
    }
}

/// Submits one request and waits for its result. Continues with a request that an earlier process has submitted and that is
/// still pending.
pub(crate) async fn submit_and_wait(
    cluster: &dyn CsrClient,
    (config, store): (&Config, &Store),
    on_progress: &ProgressFn<'_>,
) -> Result<EdgeIdentity, ConnectError> {
    // No certificate is requested if it could not be stored.
    run_blocking(store, Store::check_edge_space).await?;
    let roots = cluster.roots().await?;
    let domain = EdgeIdentity::trust_domain_of(&roots);
    let domain =
        domain.map_err(|error| unusable_error(&"the CA that the cluster publishes", &error))?;
    let node = match &config.node {
        Some(node) => node.clone(),
        None => cluster.node_name().await?,
    };
    let node =
        NodeName::parse(&node).map_err(|error| unusable_error(&"the node's name", &error))?;
    let key_error = |error| unusable_error(&"the key", &error);
    let signer_profile = cluster.signer_profile();
    let subject_text =
        signer_profile.map_or_else(|| domain.to_string(), |subject| subject.to_string());
    let pending = load_or_create_pending(store, &node, subject_text).await?;
    let key = pending.key().map_err(key_error)?;
    let request = match signer_profile {
        Some(subject) => key.cluster_request(subject, &node),
        None => key.edge_request(&domain, &node),
    };
    cluster
        .submit(&pending.name, &request.map_err(key_error)?)
        .await?;
    let result = wait_for_certificate(cluster, &pending, (config, on_progress)).await;
    // Removed in every case, because the next request uses another key.
    run_blocking(store, |store| store.remove_pending(Requested::Identity)).await?;
    let chain = result?;
    // The roots may have changed meanwhile.
    let roots = cluster.roots().await?;
    let unusable = |error: &dyn Display| unusable_error(&"the certificate of the cluster", error);
    let identity = if signer_profile.is_some() {
        let client_cert = LeafCertificate::load(&chain, key.key_pem().expose());
        let client_cert = client_cert.map_err(|error| unusable(&error))?;
        let revoked = run_blocking(store, |store| Ok(store.gateway_revocations())).await?;
        exchange_certificate((&roots, &revoked), &client_cert, (config, on_progress)).await?
    } else {
        let identity = EdgeIdentity::new(&roots, &chain, &key.key_pem());
        identity.map_err(|error| unusable(&error))?
    };
    if identity.node != node {
        let other = format!("it is for node {}", identity.node);
        return Err(unusable(&other));
    }
    Ok(identity)
}

/// Returns the pending request, or a new one, which is saved before it is submitted.
async fn load_or_create_pending(
    store: &Store,
    node: &NodeName,
    subject_text: String,
) -> Result<PendingCsr, ConnectError> {
    let asks = format!("{node}: {subject_text}");
    let saved = run_blocking(store, |store| store.pending(Requested::Identity)).await?;
    let now = UnixTime::now().as_secs();
    let is_still_pending = |request: &PendingCsr| {
        request.asks == asks && now < request.since + REQUEST_TIMEOUT.as_secs()
    };
    if let Some(saved) = saved.filter(is_still_pending) {
        return Ok(saved);
    }
    let key = PrivateKey::generate().map_err(|error| unusable_error(&"the key", &error))?;
    let name = format!("causeway-edge-{node}-{:08x}", rand::random::<u32>());
    let pending = PendingCsr::new(name, asks, now, &key);
    let to_save = pending.clone();
    run_blocking(store, move |store| {
        store.save_pending(Requested::Identity, &to_save)
    })
    .await?;
    Ok(pending)
}

async fn run_blocking<T: Send + 'static>(
    store: &Store,
    work: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
) -> Result<T, ConnectError> {
    let store = store.clone();
    let result = spawn_blocking(move || work(&store)).await;
    let result = result.map_err(|error| unusable_error(&"the data directory", &error))?;
    result.map_err(|error| unusable_error(&"the data directory", &error))
}

/// Exchanges the cluster's certificate for a certificate of the gateways' CA, with a new key.
async fn exchange_certificate(
    (roots, revoked): (&str, &GatewayRevocations),
    client_cert: &LeafCertificate,
    (config, on_progress): (&Config, &ProgressFn<'_>),
) -> Result<EdgeIdentity, ConnectError> {
    let cluster_cert_error =
        |error: &dyn Display| unusable_error(&"the cluster's certificate", error);
    let tls = csr_exchange_client(roots, client_cert, revoked)
        .map_err(|error| cluster_cert_error(&error))?;
    let key = PrivateKey::generate().map_err(|error| cluster_cert_error(&error))?;
    let request = EnrolRequest::new(&key).map_err(|error| cluster_cert_error(&error))?;
    let connector = GatewayConnector::new(enrol_client::http1(&tls), config);
    let (mut backoff, deadline) = (
        Backoff::new(config.backoff.silent_max, config.backoff.refused_max),
        Instant::now() + REQUEST_TIMEOUT,
    );
    let granted = loop {
        let response = request
            .send(&connector, &config.gateways, "/v1/vouched")
            .await;
        let error = match response {
            Ok(granted) => break granted,
            Err(EnrolRequestError::Retryable(error)) => error,
            Err(EnrolRequestError::MalformedResponse(why)) => {
                return Err(unusable_error(&"the gateway's response", &why));
            }
            // The refusal concerns the node; the cluster's certificate remains valid.
            Err(EnrolRequestError::Refused { reason, detail }) => {
                let why = format!("the gateway refuses this node ({reason}): {detail}");
                ConnectError::unwelcome(why)
            }
        };
        if Instant::now() >= deadline {
            return Err(error);
        }
        let delay = error.delay(&mut backoff, rand::random());
        warn!(what = error.detail(), retry_in = ?delay, "not joined yet");
        on_progress(error.detail());
        sleep(delay).await;
    };
    let identity = EdgeIdentity::new(&granted.root, &granted.certificate, &key.key_pem());
    let mut identity =
        identity.map_err(|error| unusable_error(&"the gateway's response", &error))?;
    identity.gateways = granted.gateways;
    Ok(identity)
}

/// Waits for the certificate, until its time is over or the request is refused.
async fn wait_for_certificate(
    cluster: &dyn CsrClient,
    pending: &PendingCsr,
    (config, on_progress): (&Config, &ProgressFn<'_>),
) -> Result<String, ConnectError> {
    let mut backoff = cluster_backoff(config);
    let started = Instant::now();
    let waited = UnixTime::now().as_secs().saturating_sub(pending.since);
    let remaining = REQUEST_TIMEOUT.saturating_sub(Duration::from_secs(waited));
    loop {
        let error = match cluster.request_status(&pending.name).await {
            Ok(CsrStatus::Signed(chain)) => return Ok(chain),
            Ok(CsrStatus::Refused(why)) => return Err(ConnectError::unwelcome(why)),
            Ok(CsrStatus::Pending(why)) => ConnectError::refused(why),
            Err(why) => why.into(),
        };
        if started.elapsed() >= remaining {
            return Err(error);
        }
        let delay = error.delay(&mut backoff, rand::random());
        // The first delay is short, so it is not logged.
        if delay > Duration::from_secs(1) {
            warn!(what = error.detail(), retry_in = ?delay, "not joined yet");
        }
        on_progress(error.detail());
        pause(&error, delay).await;
    }
}

/// Waits for this time, or until the network of this machine has changed, if that may be the cause of the error.
async fn pause(error: &ConnectError, delay: Duration) {
    if !error.may_be_network_error() {
        return sleep(delay).await;
    }
    let tasks = TaskGroup::default();
    let mut changes = NetworkMonitor::start(&tasks);
    changes.sleep_unless_changed(delay).await;
}

/// Returns the back-off for requests to the cluster. Delays grow also while it is silent: an API server that returns after an
/// outage must not receive the requests of all new nodes each second.
fn cluster_backoff(config: &Config) -> Backoff {
    Backoff::new(config.backoff.refused_max, config.backoff.refused_max)
}

fn unusable_error(what: &dyn Display, why: &dyn Display) -> ConnectError {
    ConnectError::unwelcome(format!("{what} cannot be used: {why}"))
}

#[cfg(test)]
pub(super) mod tests;
