//! Names and bounds of the requests about delegated nodes, and the error of a request.

use crate::client::error_message;
use std::time::Duration;

/// Annotation of Nodes whose Leases are renewed by delegated heartbeats; its value is the pool member that carried the first.
pub(crate) const NODE_MARK: &str = "causeway.io/delegated-heartbeat";
/// Namespace of the Leases of nodes.
pub(super) const NAMESPACE: &str = "kube-node-lease";
/// Time limit of one request.
pub(super) const BOUND: Duration = Duration::from_secs(5);
/// Interval in which delegated nodes are looked at: their return is noticed within this time.
pub(super) const LOOK: Duration = Duration::from_secs(5);

/// Error of a request.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    #[error("{}", error_message(.0))]
    Asked(#[from] kube::Error),
    #[error("the cluster's API did not answer in time")]
    Silent(#[from] tokio::time::error::Elapsed),
}

impl ApiError {
    /// Whether another writer was faster, or the object is gone.
    pub(super) fn is_conflict(&self) -> bool {
        matches!(self, Self::Asked(kube::Error::Api(status)) if status.is_conflict() || status.is_not_found())
    }
}
