//! Errors that clients receive: a Kubernetes `Status` (`meta/v1`), with kube-apiserver's wording in the parts that clients check.

use crate::{resource::GroupVersionResource, store::VersionError};
use http::StatusCode;
use serde_json::{Value, json};

/// An error that is sent as a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiStatus {
    pub(crate) status: StatusCode,
    reason: &'static str,
    message: String,
    /// Cause by which clients distinguish errors.
    cause: Option<&'static str>,
    pub(crate) retry_after: Option<u16>,
}

impl ApiStatus {
    fn new(status: StatusCode, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            reason,
            message: message.into(),
            cause: None,
            retry_after: None,
        }
    }

    pub(crate) fn malformed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequest", message)
    }

    pub(crate) fn not_served() -> Self {
        let message = "the server could not find the requested resource";
        Self::new(StatusCode::NOT_FOUND, "NotFound", message)
    }

    pub(crate) fn not_found(resource: &GroupVersionResource, name: &str) -> Self {
        let message = format!("{} {name:?} not found", resource.qualified_name());
        Self::new(StatusCode::NOT_FOUND, "NotFound", message)
    }

    pub(crate) fn read_only() -> Self {
        let message = "this API cache is read-only; make changes at the API server of the cluster";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", message)
    }

    pub(crate) fn forbidden(subject: &str) -> Self {
        let message = format!(
            "this node is not allowed to read {subject}: see `api_cache.allow` of the gateway for the node's pool"
        );
        Self::new(StatusCode::FORBIDDEN, "Forbidden", message)
    }

    pub(crate) fn not_acceptable() -> Self {
        let message = "only the following media types are accepted: application/json, application/vnd.kubernetes.protobuf";
        Self::new(StatusCode::NOT_ACCEPTABLE, "NotAcceptable", message)
    }

    /// Returns the error for an object of a watch that does not match its schema.
    pub(crate) fn no_protobuf() -> Self {
        let message = "an object cannot be encoded as protobuf; request JSON";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", message)
    }

    /// Returns the error for a resource that has not been read so far.
    pub(crate) fn not_loaded(resource: &GroupVersionResource) -> Self {
        let message = format!("{resource} have not been read yet, please try again later");
        Self {
            retry_after: Some(1),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, "TooManyRequests", message)
        }
    }

    pub(crate) fn expired(message: impl Into<String>) -> Self {
        Self::new(StatusCode::GONE, "Expired", message)
    }

    pub(crate) fn too_old(version: u64) -> Self {
        Self::expired(format!("too old resource version: {version}"))
    }

    pub(crate) fn future_version(version: u64, current: u64) -> Self {
        let message = format!("Timeout: Too large resource version: {version}, current: {current}");
        Self {
            cause: Some("ResourceVersionTooLarge"),
            retry_after: Some(1),
            ..Self::new(StatusCode::GATEWAY_TIMEOUT, "Timeout", message)
        }
    }

    /// Returns the error for a version without a state.
    pub(crate) fn version_error(
        resource: &GroupVersionResource,
        version: u64,
        why: VersionError,
    ) -> Self {
        match why {
            VersionError::Empty => Self::not_loaded(resource),
            VersionError::Expired => Self::too_old(version),
            VersionError::Future(current) => Self::future_version(version, current),
        }
    }

    /// Returns the error as a `Status`.
    pub(crate) fn to_json(&self) -> Value {
        let mut status = json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.status.as_u16(),
        });
        let mut details = json!({});
        if let Some(cause) = self.cause {
            details["causes"] =
                json!([{ "reason": cause, "message": "Too large resource version" }]);
        }
        if let Some(seconds) = self.retry_after {
            details["retryAfterSeconds"] = seconds.into();
        }
        if details
            .as_object()
            .is_some_and(|details| !details.is_empty())
        {
            status["details"] = details;
        }
        status
    }
}
