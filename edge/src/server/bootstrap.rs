//! Identity of an edge at its start: the stored one, or one that is obtained with a join token or from the cluster.

use super::error::Error;
use crate::{
    config::Config,
    control::{
        csr_bootstrap::{self, CsrClient},
        enrol,
        rejoin_state::TokenSource,
    },
};
use causeway_certs::{EdgeIdentity, Store, StoreError};
use std::time::{Duration, SystemTime};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// Loads the identity from the data directory. Joins if there is none, or if it is of another node than the configured one.
/// `control::rejoin` handles refusals of the identity by gateways.
pub(super) async fn load_or_join(
    config: &Config,
    store: &Store,
    csr_client: Option<&dyn CsrClient>,
    (stop, on_progress): (&CancellationToken, &(dyn Fn(&str) + Send + Sync)),
) -> Result<EdgeIdentity, Error> {
    let stored = store.edge().map_err(|error| match error {
        StoreError::Corrupt { .. } => Error::DamagedIdentity(error),
        error => Error::Store(error),
    })?;
    let previous = match (stored, &config.node) {
        (None, _) => None,
        (Some(identity), Some(node)) if !node.eq_ignore_ascii_case(identity.node.as_str()) => {
            Some((identity.node, node.clone()))
        }
        (Some(identity), _) => return Ok(identity),
    };
    if let Some((certificate, configured)) = &previous {
        warn!(%certificate, configured, "the configured node name differs from the name in the identity: joining with the new name");
    }
    let joined = stop.run_until_cancelled(join(config, store, (csr_client, on_progress)));
    let joined = joined.await.ok_or(Error::Stopped)?;
    match (joined, previous) {
        (Err(error), Some((certificate, configured))) if error.is_final() => {
            Err(Error::OtherNode {
                configured,
                certificate: certificate.to_string(),
                why: error.to_string(),
            })
        }
        (joined, _) => joined,
    }
}

fn expiry(identity: &EdgeIdentity) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(identity.leaf.not_after().as_secs())
}

/// Logs a warning if the certificate has expired. The gateway refuses it, but only this machine knows that its own clock may
/// be the cause.
pub(super) fn warn_of_expiry(identity: &EdgeIdentity) {
    let expiry_time = expiry(identity);
    let now = SystemTime::now();
    // Certificates of an external CA have their own repeated warning.
    if now > expiry_time && !identity.is_external {
        warn!(
            expired = %humantime::format_rfc3339_seconds(expiry_time),
            now = %humantime::format_rfc3339_seconds(now),
            "this node's certificate has expired, unless this machine's clock is wrong",
        );
    }
}

async fn join(
    config: &Config,
    store: &Store,
    (csr_client, on_progress): (Option<&dyn CsrClient>, &enrol::ProgressFn<'_>),
) -> Result<EdgeIdentity, Error> {
    let token = if config.kubernetes.is_some() {
        None
    } else {
        let token = TokenSource::from_config(config).read()?;
        Some(token.ok_or_else(|| Error::NoIdentity(config.data_dir.display().to_string()))?)
    };
    if config.gateways.is_empty() {
        return Err(Error::NoGateway);
    }
    // A token is used once, so it is not sent if the identity could not be stored.
    store.check_edge_space()?;
    let revoked_gateways = store.gateway_revocations();
    let identity = if let Some(token) = &token {
        enrol::join(token, (config, &revoked_gateways), on_progress).await?
    } else {
        let cluster = csr_client.ok_or(Error::NoCluster)?;
        csr_bootstrap::join(cluster, (config, store), on_progress).await
    };
    let id = token.as_ref().map(|token| token.id.as_str());
    if let Some(backup_path) = store.replace_edge(&identity, id)? {
        info!(kept = %backup_path.display(), "the old identity of this node is kept as a copy");
    }
    Ok(EdgeIdentity {
        revoked_gateways,
        ..identity
    })
}
