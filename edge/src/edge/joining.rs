//! Who an edge is when it starts: by what it keeps, or by a token.
//!
//! A certificate that holds is enough. One that has ended is given up only for another: it may be the clock that
//! is wrong.

use super::Error;
use crate::{
    config::{Config, Secret},
    control::enrol,
};
use causeway_certs::{EdgeIdentity, JoinToken, Store};
use std::time::{Duration, SystemTime};
use tracing::info;

/// The identity to go on with, or one that has ended where there is a token for another.
pub(super) fn usable(
    stored: Option<EdgeIdentity>,
    config: &Config,
) -> (Option<EdgeIdentity>, Option<EdgeIdentity>) {
    let Some(identity) = stored else {
        return (None, None);
    };
    let ended = end_of(&identity) < SystemTime::now();
    let joins = config.join.is_some() || config.join_file.is_some();
    match (joins, ended) {
        (true, true) => {
            info!("this node's certificate has expired: joining again with the token");
            (None, Some(identity))
        }
        (true, false) => {
            info!("this node has joined already: its certificate holds, the token is not used");
            (Some(identity), None)
        }
        (false, _) => (Some(identity), None),
    }
}

pub(super) fn end_of(identity: &EdgeIdentity) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(identity.leaf.not_after().as_secs())
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

pub(super) async fn join(
    config: &Config,
    store: &Store,
    tell: &enrol::Listener<'_>,
) -> Result<EdgeIdentity, Error> {
    let token = token(config)?;
    if config.gateways.is_empty() {
        return Err(Error::NoGateway);
    }
    // A token is good once: it is not given for an identity that cannot be kept.
    store.prepare_edge()?;
    let identity = enrol::join(&token, config, tell).await?;
    store.save_edge(&identity)?;
    Ok(identity)
}
