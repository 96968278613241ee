//! Joining without a token: the cluster authenticates the node, and the gateway's CA signs the certificate requested from
//! the cluster.
//!
//! 1. The cluster publishes the CA to trust; the API server tells which node this is.
//! 2. The key is made here and stays here. A request for it is submitted to the cluster, and outlives this process.
//! 3. The edge waits for the answer, and reports at each look why it takes long. A request that was not answered within an
//!    hour, or that was denied, is followed by another for another key.
//! 4. The certificate has to be for this node and to chain to that CA. If a signer of the cluster's own has made it, it is
//!    shown to a gateway, once, for a certificate of that CA.
//!
//! Only the first certificate, and the one after one that has ended, are obtained by these steps: gateways renew (`renew`).
//! This module knows nothing of Kubernetes: a [`Cluster`] does.

use super::{
    connect_error::ConnectError,
    dial::GatewayConnector,
    enrol::ProgressFn,
    enrol_client::{self, EnrolRequest, EnrolRequestError},
};
use crate::config::Config;
use causeway_certs::{
    EdgeIdentity, LeafCertificate, NodeName, PendingCsr, PrivateKey, Requested, SignerProfile,
    Store, StoreError, verify::csr_exchange_client,
};
use causeway_rt::backoff::Backoff;
use futures_util::future::BoxFuture;
use rustls::pki_types::UnixTime;
use std::{fmt::Display, time::Duration};
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep},
};
use tracing::{info, warn};

/// Time that the edge waits for one request: a cluster forgets requests that are not approved after a day.
const PATIENCE: Duration = Duration::from_hours(1);

/// The cluster that this node is of.
pub trait CsrClient: Send + Sync {
    /// The name of this node, as the API server knows who asks.
    fn node(&self) -> BoxFuture<'_, Result<String, CsrRequestError>>;
    /// The CA certificates of gateways, as PEM.
    fn roots(&self) -> BoxFuture<'_, Result<String, CsrRequestError>>;
    /// Asks for a certificate by a request in PEM, under a name by which to look for the answer. What has been asked under
    /// that name is not asked again.
    fn ask<'a>(
        &'a self,
        name: &'a str,
        request: &'a str,
    ) -> BoxFuture<'a, Result<(), CsrRequestError>>;
    /// How its signer names nodes, where that is one of the cluster's own.
    fn subject(&self) -> Option<SignerProfile>;
    /// Returns the current status of a request.
    fn answer<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<CsrStatus, CsrRequestError>>;
}

/// Status of a request for a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CsrStatus {
    /// The certificate with what it hangs by, as PEM.
    Signed(String),
    /// Not yet; what is waited for.
    Waiting(String),
    /// Nothing will come of it.
    Refused(String),
}

/// Why a cluster says nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CsrRequestError {
    /// The cluster does not answer.
    Silent(String),
    /// It does not let this node.
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

/// Joins by the cluster's word. Returns only with an identity: everything else is tried again, and `tell` hears of it each
/// time. Drop the future to stop.
pub(crate) async fn join(
    cluster: &dyn CsrClient,
    (config, store): (&Config, &Store),
    tell: &ProgressFn<'_>,
) -> EdgeIdentity {
    let mut backoff = bounds(config);
    loop {
        let trouble = match submit_and_wait(cluster, (config, store), tell).await {
            Ok(identity) => {
                info!(
                    node = identity.node.as_str(),
                    "joined with a certificate of the cluster"
                );
                return identity;
            }
            Err(trouble) => trouble,
        };
        let delay = trouble.delay(&mut backoff, rand::random());
        warn!(what = trouble.what(), retry_in = ?delay, "not joined yet");
        tell(trouble.what());
        sleep(delay).await;
    }
}

/// One request, and what comes of it. One that waits for an answer since before this process began is gone on with.
pub(crate) async fn submit_and_wait(
    cluster: &dyn CsrClient,
    (config, store): (&Config, &Store),
    tell: &ProgressFn<'_>,
) -> Result<EdgeIdentity, ConnectError> {
    // No certificate is requested if it could not be stored.
    on_disk(store, Store::prepare_edge).await?;
    let roots = cluster.roots().await?;
    let domain = EdgeIdentity::domain_of(&roots);
    let domain = domain.map_err(|error| unsound(&"the CA that the cluster publishes", &error))?;
    let node = match &config.node {
        Some(node) => node.clone(),
        None => cluster.node().await?,
    };
    let node = NodeName::parse(&node).map_err(|error| unsound(&"the node's name", &error))?;
    let own = |error| unsound(&"the key", &error);
    let subject = cluster.subject();
    let asks = subject.map_or_else(|| domain.to_string(), |subject| subject.to_string());
    let pending = pending(store, &node, asks).await?;
    let key = pending.key().map_err(own)?;
    let request = match subject {
        Some(subject) => key.request_as(subject, &node),
        None => key.request_of(&domain, &node),
    };
    cluster.ask(&pending.name, &request.map_err(own)?).await?;
    let made = answered(cluster, &pending, (config, tell)).await;
    // In every case: the next request uses another key.
    on_disk(store, |store| store.forget_pending(Requested::Identity)).await?;
    let chain = made?;
    // The roots may have changed meanwhile.
    let roots = cluster.roots().await?;
    let unusable = |error: &dyn Display| unsound(&"the certificate of the cluster", error);
    let identity = if subject.is_some() {
        let shown = LeafCertificate::load(&chain, key.key_pem().expose());
        let shown = shown.map_err(|error| unusable(&error))?;
        exchange_certificate(&roots, &shown, (config, tell)).await?
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

/// Returns the request that waits, or a new one, which is saved before it is submitted.
async fn pending(store: &Store, node: &NodeName, asks: String) -> Result<PendingCsr, ConnectError> {
    let asks = format!("{node}: {asks}");
    let kept = on_disk(store, |store| store.pending(Requested::Identity)).await?;
    let now = UnixTime::now().as_secs();
    let waits = |kept: &PendingCsr| kept.asks == asks && now < kept.since + PATIENCE.as_secs();
    if let Some(kept) = kept.filter(waits) {
        return Ok(kept);
    }
    let key = PrivateKey::generate().map_err(|error| unsound(&"the key", &error))?;
    let name = format!("causeway-edge-{node}-{:08x}", rand::random::<u32>());
    let pending = PendingCsr::new(name, asks, now, &key);
    let kept = pending.clone();
    on_disk(store, move |store| {
        store.save_pending(Requested::Identity, &kept)
    })
    .await?;
    Ok(pending)
}

async fn on_disk<T: Send + 'static>(
    store: &Store,
    work: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
) -> Result<T, ConnectError> {
    let store = store.clone();
    let done = spawn_blocking(move || work(&store)).await;
    let done = done.map_err(|error| unsound(&"the data directory", &error))?;
    done.map_err(|error| unsound(&"the data directory", &error))
}

/// One of the gateways' certificates for that of the cluster, with a key of its own.
async fn exchange_certificate(
    roots: &str,
    shown: &LeafCertificate,
    (config, tell): (&Config, &ProgressFn<'_>),
) -> Result<EdgeIdentity, ConnectError> {
    let own = |error: &dyn Display| unsound(&"the cluster's certificate", error);
    let tls = csr_exchange_client(roots, shown).map_err(|error| own(&error))?;
    let key = PrivateKey::generate().map_err(|error| own(&error))?;
    let asking = EnrolRequest::new(&key).map_err(|error| own(&error))?;
    let dialler = GatewayConnector::new(enrol_client::http1(&tls), config);
    let (mut backoff, until) = (bounds(config), Instant::now() + PATIENCE);
    let granted = loop {
        let asked = asking.ask(&dialler, &config.gateways, "/v1/vouched").await;
        let trouble = match asked {
            Ok(granted) => break granted,
            Err(EnrolRequestError::Trouble(trouble)) => trouble,
            Err(EnrolRequestError::Answer(why)) => {
                return Err(unsound(&"the gateway's response", &why));
            }
            // The refusal concerns the node; the cluster's certificate remains valid.
            Err(EnrolRequestError::Refused { reason, detail }) => {
                let why = format!("the gateway refuses this node ({reason}): {detail}");
                ConnectError::unwelcome(why)
            }
        };
        if Instant::now() >= until {
            return Err(trouble);
        }
        let delay = trouble.delay(&mut backoff, rand::random());
        warn!(what = trouble.what(), retry_in = ?delay, "not joined yet");
        tell(trouble.what());
        sleep(delay).await;
    };
    let identity = EdgeIdentity::new(&granted.root, &granted.certificate, &key.key_pem());
    let mut identity = identity.map_err(|error| unsound(&"the gateway's response", &error))?;
    identity.gateways = granted.gateways;
    Ok(identity)
}

/// Waited for within its time, or until it is clear that nothing comes.
async fn answered(
    cluster: &dyn CsrClient,
    pending: &PendingCsr,
    (config, tell): (&Config, &ProgressFn<'_>),
) -> Result<String, ConnectError> {
    let mut backoff = bounds(config);
    let begun = Instant::now();
    let waited = UnixTime::now().as_secs().saturating_sub(pending.since);
    let patience = PATIENCE.saturating_sub(Duration::from_secs(waited));
    loop {
        let trouble = match cluster.answer(&pending.name).await {
            Ok(CsrStatus::Signed(chain)) => return Ok(chain),
            Ok(CsrStatus::Refused(why)) => return Err(ConnectError::unwelcome(why)),
            Ok(CsrStatus::Waiting(why)) => ConnectError::refused(why),
            Err(why) => why.into(),
        };
        if begun.elapsed() >= patience {
            return Err(trouble);
        }
        let delay = trouble.delay(&mut backoff, rand::random());
        // The first delay is short, so it is not logged.
        if delay > Duration::from_secs(1) {
            warn!(what = trouble.what(), retry_in = ?delay, "not joined yet");
        }
        tell(trouble.what());
        sleep(delay).await;
    }
}

fn bounds(config: &Config) -> Backoff {
    Backoff::new(config.backoff.silent_max, config.backoff.refused_max)
}

fn unsound(what: &dyn Display, why: &dyn Display) -> ConnectError {
    ConnectError::unwelcome(format!("{what} cannot be used: {why}"))
}

#[cfg(test)]
pub(super) mod tests;
