//! Inputs of the decision whether an edge replaces its identity: the configured join token, and the last refusal of the
//! identity by gateways.

use super::connect_error::IdentityRefusal;
use crate::config::{Config, Secret};
use arc_swap::ArcSwap;
use causeway_certs::{JoinToken, TokenError};
use std::{io, path::PathBuf, sync::Arc};
use tokio::sync::watch;

/// Source of the join token in the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TokenSource {
    pub(super) token: Option<Secret>,
    pub(super) file: Option<PathBuf>,
}

/// Reason why the configured join token cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TokenReadError {
    /// The text is not a token.
    #[error(transparent)]
    Malformed(#[from] TokenError),
    /// The file cannot be read.
    #[error(
        "cannot read the join token in {path} (join_file): {source}; \
         create one with `causeway token create --node NODE`"
    )]
    File {
        /// Path of the file.
        path: String,
        /// I/O error.
        source: io::Error,
    },
}

impl TokenSource {
    pub(crate) fn from_config(config: &Config) -> Self {
        Self {
            token: config.join.clone(),
            file: config.join_file.clone(),
        }
    }

    /// Returns the current token, or `None` if none is configured. Blocks on the disk.
    pub(crate) fn read(&self) -> Result<Option<JoinToken>, TokenReadError> {
        let text = match (&self.token, &self.file) {
            (Some(token), _) => token.clone(),
            (None, Some(path)) => {
                let text =
                    std::fs::read_to_string(path).map_err(|source| TokenReadError::File {
                        path: path.display().to_string(),
                        source,
                    })?;
                Secret::new(text)
            }
            (None, None) => return Ok(None),
        };
        Ok(Some(JoinToken::parse(text.expose().trim())?))
    }
}

/// Inputs of the decision whether a running edge replaces its identity.
#[derive(Debug)]
pub(crate) struct RejoinState {
    /// Current source of the join token.
    pub(crate) token: ArcSwap<TokenSource>,
    /// Last refusal of the identity by a gateway.
    pub(crate) refusals: watch::Sender<Option<IdentityRefusal>>,
    /// Whether the owner requests another identity (`--rejoin`).
    pub(crate) is_requested: bool,
}

impl RejoinState {
    pub(crate) fn new(config: &Config, is_requested: bool) -> Arc<Self> {
        Arc::new(Self {
            token: ArcSwap::from_pointee(TokenSource::from_config(config)),
            refusals: watch::Sender::default(),
            is_requested,
        })
    }
}
