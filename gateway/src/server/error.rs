//! Errors that prevent a gateway from being bound. Each names the missing, malformed or occupied item and the remedy.

use crate::control::nat::NatError;
use causeway_certs::{CaError, StoreError, verify::TrustError};
use std::{io, path::PathBuf};

/// Error that prevents a gateway from being bound.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The data directory cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is no CA in the data directory.
    #[error("there is no CA in {}; create one with `causeway ca init --data-dir {}`", .0.display(), .0.display())]
    NoCa(PathBuf),
    /// The CA cannot issue the certificates of the gateway.
    #[error("the gateway's certificate cannot be issued: {0}")]
    Ca(#[from] CaError),
    /// A TLS configuration cannot be built.
    #[error("{what}: {cause}")]
    Trust {
        /// The affected listener.
        what: String,
        /// The cause.
        cause: TrustError,
    },
    /// A file that the configuration names cannot be used.
    #[error("{what}: {}: {why}", path.display())]
    File {
        /// The affected listener.
        what: String,
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// A listener cannot be bound.
    #[error("{what} cannot listen on {listen}: {cause}")]
    Listen {
        /// The listener.
        what: String,
        /// Address of the listener.
        listen: String,
        /// The cause; in most cases the address is in use.
        cause: io::Error,
    },
    /// The socket of another listener of this gateway occupies the address.
    #[error(
        "listener {listener:?} cannot listen on {listen}: listener {holder:?} of this gateway uses that address; remove {holder:?} with one reload, and add {listener:?} with the next"
    )]
    AddressHeld {
        /// The listener to open.
        listener: String,
        /// Address of the listener.
        listen: String,
        /// The listener that owns the socket.
        holder: String,
    },
    /// A name in the configuration is invalid.
    #[error("{0}")]
    Name(String),
    /// Connections to node addresses cannot be redirected.
    #[error("redirect: {0}")]
    Redirect(#[from] NatError),
    /// The workers cannot be started.
    #[error("the gateway's threads cannot be started: {0}")]
    Workers(io::Error),
}

impl BindError {
    /// Whether a gateway that is started again unchanged would fail in the same way, until its operator corrects the cause.
    pub fn is_final(&self) -> bool {
        matches!(
            self,
            Self::NoCa(_) | Self::Name(_) | Self::Redirect(NatError::NotAllowed)
        )
    }
}
