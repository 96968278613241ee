//! What keeps a gateway from being bound: each says what to do, by the name of what is missing, malformed or taken.

use crate::control::nat::NatError;
use causeway_certs::{CaError, StoreError, verify::TrustError};
use std::{io, path::PathBuf};

/// What keeps a gateway from being bound.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The data directory cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is no CA in the data directory.
    #[error("there is no CA in {}; make one with `causeway ca init --data-dir {}`", .0.display(), .0.display())]
    NoCa(PathBuf),
    /// The CA cannot issue what the gateway needs.
    #[error("the gateway's certificate cannot be issued: {0}")]
    Ca(#[from] CaError),
    /// A TLS configuration cannot be built.
    #[error("{what}: {cause}")]
    Trust {
        /// For which listener.
        what: String,
        /// Why.
        cause: TrustError,
    },
    /// A file that the configuration names cannot be used.
    #[error("{what}: {}: {why}", path.display())]
    File {
        /// For which listener.
        what: String,
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// A listener cannot be bound.
    #[error("{what} cannot listen on {listen}: {cause}")]
    Listen {
        /// Which listener.
        what: String,
        /// Its address.
        listen: String,
        /// Why; most often the address is in use.
        cause: io::Error,
    },
    /// A socket of a front that stands is in the way.
    #[error(
        "front {front:?} cannot listen on {listen}: front {by:?} of this gateway is there; take that away by one reload, and add this by the next"
    )]
    Held {
        /// Which front.
        front: String,
        /// Its address.
        listen: String,
        /// The front whose socket it is.
        by: String,
    },
    /// A name of the configuration is none.
    #[error("{0}")]
    Name(String),
    /// Connections to nodes' own addresses cannot be redirected.
    #[error("redirect: {0}")]
    Redirect(#[from] NatError),
    /// A gateway that is leaving opens no fronts any more.
    #[error("the gateway is draining; its next start reads the configuration")]
    Leaving,
    /// The cores cannot be started.
    #[error("the gateway's threads cannot be started: {0}")]
    Cores(io::Error),
}

impl BindError {
    /// Whether a gateway that is started again as it is would end the same way, until its owner changes something.
    pub fn is_final(&self) -> bool {
        matches!(
            self,
            Self::NoCa(_) | Self::Name(_) | Self::Redirect(NatError::NotAllowed)
        )
    }
}
