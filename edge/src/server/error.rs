//! Errors of the start of an edge, and whether a later start may succeed.

use crate::{
    control::{enrol::EnrolError, rejoin_state::TokenReadError},
    proxy::TlsError,
};
use causeway_certs::StoreError;
use std::{io, net::SocketAddr};

/// Reason why an edge cannot start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is neither an identity nor a token.
    #[error("no identity in {0}; join with a token of `causeway token create`")]
    NoIdentity(String),
    /// The configuration names a cluster, and the program that runs this edge does not support one.
    #[error(
        "kubernetes: this program cannot request certificates from a cluster; join with a token instead"
    )]
    NoCluster,
    /// Neither the configuration nor an earlier hello contains a gateway.
    #[error("no gateway is configured; give one as HOST:PORT with `gateways` or --gateway")]
    NoGateway,
    /// The identity is of another node than the configured one, and the edge could not join with the configured name.
    #[error(
        "the certificate is for node {certificate}, but the configuration names {configured}: to join as \
         {configured}, create a token with `causeway token create --node {configured}` at the gateway and give it to this edge \
         with --join or join_file ({why})"
    )]
    OtherNode {
        /// Node name in the configuration.
        configured: String,
        /// Node name in the certificate.
        certificate: String,
        /// Reason why this node has not joined with the configured name.
        why: String,
    },
    /// The configured token cannot be read.
    #[error(transparent)]
    Token(#[from] TokenReadError),
    /// A file of one of the API cache's listeners cannot be used.
    #[error("{key}: {path}: {why}")]
    ApiCacheFile {
        /// Configuration key with the path.
        key: &'static str,
        /// Path of the file.
        path: String,
        /// Description of the error.
        why: String,
    },
    /// The certificate that an external CA issues cannot be used.
    #[error("identity: {path}: {why}")]
    Identity {
        /// Path of the file.
        path: String,
        /// Description of the error.
        why: String,
    },
    /// The gateway did not enrol this node.
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
        /// Address that could not be bound.
        address: SocketAddr,
        /// Configuration key with the address.
        key: &'static str,
        /// I/O error.
        source: io::Error,
    },
    /// The edge was stopped before it had joined.
    #[error("stopped before this node had joined")]
    Stopped,
}

impl Error {
    /// Whether another start of the edge would fail in the same way until its owner changes something.
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
