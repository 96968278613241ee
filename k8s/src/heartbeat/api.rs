//! Requests about delegated nodes: names, limits and errors.

use crate::client::error_message;
use std::time::Duration;
use tokio::time::timeout;

/// Annotation of Nodes whose Leases are renewed by delegated heartbeats. The value is the pool member that carried the first
/// heartbeat.
pub(crate) const NODE_ANNOTATION: &str = "causeway.io/delegated-heartbeat";
/// Namespace of the Leases of nodes.
pub(super) const NAMESPACE: &str = "kube-node-lease";
/// Time limit of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Error of a request.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    #[error("{}", error_message(.0))]
    Request(#[from] kube::Error),
    #[error("the cluster's API did not answer within {REQUEST_TIMEOUT:?}")]
    Timeout(#[from] tokio::time::error::Elapsed),
}

impl ApiError {
    /// Whether another writer was faster, or the object is gone.
    pub(super) fn is_conflict(&self) -> bool {
        matches!(self, Self::Request(kube::Error::Api(status)) if status.is_conflict() || status.is_not_found())
    }
}

/// Waits for the answer to a request.
///
/// # Errors
/// If the API refuses the request, or does not answer in time.
pub(super) async fn send<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, ApiError> {
    Ok(timeout(REQUEST_TIMEOUT, request).await??)
}
