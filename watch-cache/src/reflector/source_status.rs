//! Errors of a source and the age of its view.

use super::{ReflectorError, SourceResponse};
use crate::store::Store;
use http::{
    HeaderMap, StatusCode,
    header::{AGE, RETRY_AFTER},
};
use serde::Deserialize;
use std::time::Duration;

/// Maximum `Retry-After` that is accepted from a source.
const AWAY: Duration = Duration::from_mins(5);

/// Returns the time for which the source's own source has been away, if it is.
pub(super) fn view_age(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(AGE)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// A Kubernetes `Status`, as far as it matters here.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct SourceStatus {
    pub(super) message: String,
    code: u16,
    details: StatusDetails,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StatusDetails {
    causes: Vec<StatusCause>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StatusCause {
    reason: String,
}

impl SourceStatus {
    /// Whether the requested version is too old to resume from.
    pub(super) fn is_gone(&self) -> bool {
        self.code == StatusCode::GONE.as_u16()
    }

    /// Whether the source does not know the requested version yet.
    fn is_behind(&self) -> bool {
        let mut causes = self.details.causes.iter();
        causes.any(|cause| cause.reason == "ResourceVersionTooLarge")
    }
}

/// Returns the meaning of a failure, by its status and its message.
pub(super) fn map_status(store: &Store, answer: &SourceResponse, bytes: &[u8]) -> ReflectorError {
    let said: SourceStatus = serde_json::from_slice(bytes).unwrap_or_default();
    let behind = said.is_behind();
    let message = if said.message.is_empty() {
        answer.status.to_string()
    } else {
        said.message
    };
    if behind && view_age(&answer.headers).is_none() {
        store.behind();
        return ReflectorError::Stale(message, Duration::ZERO);
    }
    let retry = answer.headers.get(RETRY_AFTER);
    let retry = retry
        .and_then(|text| text.to_str().ok()?.parse().ok())
        .map(|seconds| Duration::from_secs(seconds).min(AWAY));
    ReflectorError::Refused(answer.status, message, retry)
}
