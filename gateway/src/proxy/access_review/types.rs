//! Requests to the cluster's review API, and its answers.

use crate::error::{Error, Reason};
use futures_util::future::BoxFuture;
use std::{borrow::Cow, collections::BTreeMap, fmt::Debug, sync::Arc};

/// Client of the cluster's review API.
pub trait ReviewClient: Debug + Send + Sync + 'static {
    /// Returns the user of this token, if the token is valid for one of these audiences. Without audiences, the token must be
    /// valid for the API server itself.
    fn review_token(
        &self,
        token: &str,
        audiences: &[String],
    ) -> BoxFuture<'static, Result<Option<UserInfo>, ReviewError>>;

    /// Returns whether the access is allowed.
    fn review_access(
        &self,
        access: &ReviewAttributes,
    ) -> BoxFuture<'static, Result<bool, ReviewError>>;
}

/// User, as Kubernetes describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserInfo {
    /// The name.
    pub user: String,
    /// Unique identifier, which distinguishes users of the same name.
    pub uid: String,
    /// The groups.
    pub groups: Vec<String>,
    /// Additional attributes of the user, such as the pod that a token is bound to.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// Access to a node that needs a review.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReviewAttributes {
    /// The user.
    pub account: Arc<UserInfo>,
    /// The verb, such as `get`.
    pub verb: &'static str,
    /// The name of the `nodes` object.
    pub node: String,
    /// The subresource, such as `metrics`.
    pub subresource: &'static str,
}

/// Reason why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReviewError {
    /// Description for the client.
    pub detail: Cow<'static, str>,
    /// Cause for the log.
    pub cause: Arc<str>,
}

impl ReviewError {
    /// Returns the error of a stream that needed a decision about `subject`.
    pub(in crate::proxy) fn into_error(self, subject: &str) -> Error {
        let detail = format!("{subject} could not be reviewed: {}", self.detail);
        Reason::DependencyUnavailable.with_source(detail, &*self.cause)
    }
}
