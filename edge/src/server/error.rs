//! Why an edge cannot start, and whether time mends that.

use crate::{
    control::{enrol::EnrolError, rejoin_state::TokenReadError},
    proxy::TlsError,
};
use causeway_certs::StoreError;
use std::{io, net::SocketAddr};

/// Why an edge cannot start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is neither an identity nor a token to get one.
    #[error("no identity in {0}; join with a token of `causeway token create`")]
    NoIdentity(String),
    /// The configuration names a cluster, and the program that runs this edge does not support one.
    #[error(
        "kubernetes: this program cannot request certificates from a cluster; join with a token instead"
    )]
    NoCluster,
    /// Neither configuration nor an earlier hello names a gateway.
    #[error("no gateway is configured; give one as HOST:PORT with `gateways` or --gateway")]
    NoGateway,
    /// The identity is another node's than the configured one, and no other could be had.
    #[error(
        "the certificate is for node {certificate}, but the configuration names {configured}: to join as \
         {configured}, create a token with `causeway token create --node {configured}` at the gateway and give it to this edge \
         with --join or join_file ({why})"
    )]
    OtherNode {
        /// The configured name.
        configured: String,
        /// The certificate's.
        certificate: String,
        /// Why this node has not joined by the configured name.
        why: String,
    },
    /// The configured token cannot be read.
    #[error(transparent)]
    Token(#[from] TokenReadError),
    /// A file of one of the reader's listeners cannot be used.
    #[error("{key}: {path}: {why}")]
    ApiCacheFile {
        /// The key that names it.
        key: &'static str,
        /// The file.
        path: String,
        /// Why.
        why: String,
    },
    /// The certificate that an external CA issues cannot be used.
    #[error("identity: {path}: {why}")]
    Identity {
        /// The file.
        path: String,
        /// Why.
        why: String,
    },
    /// The gateway did not let this node join.
    #[error(transparent)]
    Enrol(#[from] EnrolError),
    /// The stored identity is damaged.
    #[error(
        "{0}; `causeway edge leave` moves that file away, and this edge then joins with a token of \
         `causeway token create`"
    )]
    DamagedIdentity(StoreError),
    /// The data directory cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// TLS to an upstream cannot be set up.
    #[error(transparent)]
    UpstreamTls(#[from] TlsError),
    /// TLS to gateways cannot be set up.
    #[error("cannot set up TLS to gateways: {0}")]
    Tls(#[from] causeway_certs::verify::TrustError),
    /// An address cannot be bound.
    #[error("cannot listen on {address} ({key}): {source}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// Configuration key that names it.
        key: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The edge was stopped before it had joined.
    #[error("stopped before this node had joined")]
    Stopped,
}

impl Error {
    /// Whether an edge that is started again as it is would end the same way, until its owner changes something.
    pub fn is_final(&self) -> bool {
        match self {
            Self::NoIdentity(_)
            | Self::NoCluster
            | Self::NoGateway
            | Self::OtherNode { .. }
            | Self::Token(_) => true,
            // Other errors may pass: a captive portal or another server may respond instead of a gateway.
            Self::Enrol(error) => error.is_token_error(),
            // The external CA may issue the certificate later.
            Self::Identity { .. }
            | Self::ApiCacheFile { .. }
            | Self::DamagedIdentity(_)
            | Self::Store(_)
            | Self::UpstreamTls(_)
            | Self::Tls(_)
            | Self::Bind { .. }
            | Self::Stopped => false,
        }
    }
}
