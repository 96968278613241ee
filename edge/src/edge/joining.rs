//! Who an edge is when it starts: by what it keeps, or by a token, or by its cluster's word.
//!
//! A certificate that holds is enough. One that has ended is given up only for another: it may be the clock that
//! is wrong.

use super::Error;
use crate::{
    config::{Config, Secret},
    control::{
        enrol,
        vouch::{self, Cluster},
    },
};
use causeway_certs::{EdgeIdentity, JoinToken, Store};
use std::time::{Duration, SystemTime};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// The identity in the data directory; without one it is joined for.
pub(super) async fn own(
    config: &Config,
    store: &Store,
    cluster: Option<&dyn Cluster>,
    (stop, tell): (&CancellationToken, &(dyn Fn(&str) + Send + Sync)),
) -> Result<EdgeIdentity, Error> {
    let (identity, expired) = usable(store.edge()?, config);
    if let Some(identity) = identity {
        return Ok(identity);
    }
    let joined = stop.run_until_cancelled(join(config, store, (cluster, tell)));
    let joined = joined.await;
    match (joined.ok_or(Error::Stopped)?, expired) {
        // It may be the clock that is wrong: the certificate is tried until the one or the other is mended.
        (Err(Error::Enrol(error)), Some(identity)) if error.is_of_token() => {
            warn!(%error, "going on with the certificate that seems to have expired");
            Ok(identity)
        }
        (joined, _) => joined,
    }
}

/// The identity to go on with, or one that has ended where there is a token for another.
fn usable(
    stored: Option<EdgeIdentity>,
    config: &Config,
) -> (Option<EdgeIdentity>, Option<EdgeIdentity>) {
    let Some(identity) = stored else {
        return (None, None);
    };
    let ended = end_of(&identity) < SystemTime::now();
    let token = config.join.is_some() || config.join_file.is_some();
    let joins = token || config.kubernetes.is_some();
    match (joins, ended) {
        (true, true) => {
            let by = if token {
                "with the token"
            } else {
                "by the cluster's word"
            };
            info!("this node's certificate has expired: joining again {by}");
            (None, Some(identity))
        }
        (true, false) => {
            if token {
                info!("this node has joined already: its certificate holds, the token is not used");
            }
            (Some(identity), None)
        }
        (false, _) => (Some(identity), None),
    }
}

fn end_of(identity: &EdgeIdentity) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(identity.leaf.not_after().as_secs())
}

/// An expired certificate is refused by the gateway; only this machine can say that its clock may be why.
pub(super) fn warn_of_expiry(identity: &EdgeIdentity) {
    let end = end_of(identity);
    let now = SystemTime::now();
    // Of what another system makes, it is told as long as that lasts.
    if now > end && !identity.given {
        warn!(
            expired = %humantime::format_rfc3339_seconds(end),
            now = %humantime::format_rfc3339_seconds(now),
            "this node's certificate has expired, unless this machine's clock is wrong; rejoin with a fresh token, by --join",
        );
    }
}

/// The configured token; its file is read only now, for it may be gone once it was used.
fn token(config: &Config) -> Result<JoinToken, Error> {
    let text = match (&config.join, &config.join_file) {
        (Some(token), _) => token.clone(),
        (None, Some(path)) => {
            let text = std::fs::read_to_string(path).map_err(|source| Error::TokenFile {
                path: path.display().to_string(),
                source,
            })?;
            Secret::new(text)
        }
        (None, None) => return Err(Error::NoIdentity(config.data_dir.display().to_string())),
    };
    Ok(JoinToken::parse(text.expose().trim())?)
}

async fn join(
    config: &Config,
    store: &Store,
    (cluster, tell): (Option<&dyn Cluster>, &enrol::Listener<'_>),
) -> Result<EdgeIdentity, Error> {
    let token = match config.kubernetes {
        Some(_) => None,
        None => Some(token(config)?),
    };
    if config.gateways.is_empty() {
        return Err(Error::NoGateway);
    }
    // A token is good once: it is not given for an identity that cannot be kept.
    store.prepare_edge()?;
    let identity = if let Some(token) = token {
        enrol::join(&token, config, tell).await?
    } else {
        let cluster = cluster.ok_or(Error::NoCluster)?;
        vouch::join(cluster, (config, store), tell).await
    };
    store.save_edge(&identity)?;
    Ok(identity)
}
