//! Client of `TokenReview` and `SubjectAccessReview`: one request to the API for each review, without a cache.
//!
//! The gateway has the limits and the cache (`proxy::reviews`). Any response that is not a plain yes is a no. A missing
//! response is neither. Needs the verb `create` for both resources, which the role `system:auth-delegator` grants.

use causeway_gateway::proxy::access_review::{
    ReviewAttributes, ReviewClient as GatewayReviewClient, ReviewError, UserInfo,
};
use futures_util::future::BoxFuture;
use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus},
    authorization::v1::{
        ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec, SubjectAccessReviewStatus,
    },
};
use kube::{Api, Client, Error, api::PostParams};
use std::fmt;

/// Client that reviews tokens and access of clients.
#[derive(Clone)]
pub(crate) struct ReviewClient(Client);

impl ReviewClient {
    /// Returns a client for reviews that sends them by `client`.
    pub(crate) fn new(client: Client) -> Self {
        Self(client)
    }
}

impl fmt::Debug for ReviewClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReviewClient").finish_non_exhaustive()
    }
}

impl GatewayReviewClient for ReviewClient {
    fn review_token(
        &self,
        token: &str,
        audiences: &[String],
    ) -> BoxFuture<'static, Result<Option<UserInfo>, ReviewError>> {
        let (api, audiences) = (Api::all(self.0.clone()), audiences.to_vec());
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: Some(token.to_owned()),
                audiences: (!audiences.is_empty()).then(|| audiences.clone()),
            },
            ..TokenReview::default()
        };
        Box::pin(async move {
            let reviewed: TokenReview = api
                .create(&PostParams::default(), &review)
                .await
                .map_err(|error| review_error(&error, "tokenreviews.authentication.k8s.io"))?;
            Ok(reviewed
                .status
                .and_then(|status| user_info(status, &audiences)))
        })
    }

    fn review_access(
        &self,
        access: &ReviewAttributes,
    ) -> BoxFuture<'static, Result<bool, ReviewError>> {
        let (api, review) = (Api::all(self.0.clone()), access_review(access));
        Box::pin(async move {
            let reviewed: SubjectAccessReview = api
                .create(&PostParams::default(), &review)
                .await
                .map_err(|error| {
                review_error(&error, "subjectaccessreviews.authorization.k8s.io")
            })?;
            Ok(reviewed.status.as_ref().is_some_and(is_allowed))
        })
    }
}

/// Returns the user of the token, if the token is valid for one of these audiences.
fn user_info(status: TokenReviewStatus, audiences: &[String]) -> Option<UserInfo> {
    // A server that does not support audiences returns none and has checked none.
    let confirmed_audiences = status.audiences.unwrap_or_default();
    let is_intended = audiences.is_empty()
        || confirmed_audiences
            .iter()
            .any(|audience| audiences.contains(audience));
    let user = status.user.filter(|_| is_intended)?;
    (status.authenticated == Some(true)).then(|| UserInfo {
        user: user.username.unwrap_or_default(),
        uid: user.uid.unwrap_or_default(),
        groups: user.groups.unwrap_or_default(),
        extra: user.extra.unwrap_or_default(),
    })
}

fn access_review(access: &ReviewAttributes) -> SubjectAccessReview {
    let account = &access.account;
    let resource = ResourceAttributes {
        verb: Some(access.verb.to_owned()),
        version: Some("v1".to_owned()),
        resource: Some("nodes".to_owned()),
        name: Some(access.node.clone()),
        subresource: Some(access.subresource.to_owned()),
        ..ResourceAttributes::default()
    };
    SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(account.user.clone()),
            uid: Some(account.uid.clone()),
            groups: Some(account.groups.clone()),
            extra: Some(account.extra.clone()),
            resource_attributes: Some(resource),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    }
}

fn is_allowed(status: &SubjectAccessReviewStatus) -> bool {
    status.allowed && status.denied != Some(true)
}

/// Returns the error for a missing response, without any content of the request.
fn review_error(error: &Error, resource: &str) -> ReviewError {
    let detail = match error {
        Error::Api(status) if status.code == 403 => {
            format!("the cluster does not allow this gateway to create {resource}").into()
        }
        Error::Api(status) if status.code == 401 => {
            "the cluster's API does not accept this gateway's credentials".into()
        }
        _ => "the cluster's API does not answer".into(),
    };
    let cause = match error {
        Error::Api(status) => status.message.as_str().into(),
        error => error.to_string().as_str().into(),
    };
    ReviewError { detail, cause }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::authentication::v1::UserInfo;
    use kube::core::Status;

    fn said(authenticated: Option<bool>, audiences: &[&str]) -> TokenReviewStatus {
        TokenReviewStatus {
            authenticated,
            audiences: Some(audiences.iter().map(|each| (*each).to_owned()).collect()),
            user: Some(UserInfo {
                username: Some("ann".to_owned()),
                ..UserInfo::default()
            }),
            ..TokenReviewStatus::default()
        }
    }

    #[test]
    fn only_a_clear_yes_for_one_of_the_audiences_authenticates() {
        let ours = ["here".to_owned(), "there".to_owned()];
        for (status, audiences, counts) in [
            (said(Some(true), &["there", "x"]), &ours[..], true),
            (said(Some(true), &[]), &[], true),
            (said(Some(true), &["any"]), &[], true),
            (said(Some(true), &["x"]), &ours, false),
            (said(Some(true), &[]), &ours, false),
            (said(Some(false), &["here"]), &ours, false),
            (said(None, &["here"]), &ours, false),
            (TokenReviewStatus::default(), &[], false),
        ] {
            let found = user_info(status.clone(), audiences);
            assert_eq!(found.is_some(), counts, "{status:?}");
        }
        let status = |allowed, denied| SubjectAccessReviewStatus {
            allowed,
            denied,
            ..SubjectAccessReviewStatus::default()
        };
        assert!(is_allowed(&status(true, None)) && is_allowed(&status(true, Some(false))));
        assert!(!is_allowed(&status(true, Some(true))) && !is_allowed(&status(false, None)));
    }

    #[test]
    fn rights_that_are_missing_are_named() {
        let status = Status {
            code: 403,
            message: "User \"it\" cannot create resource".to_owned(),
            ..Status::default()
        };
        let error = Error::Api(Box::new(status));
        let why = review_error(&error, "tokenreviews.authentication.k8s.io");
        assert!(
            why.detail
                .contains("create tokenreviews.authentication.k8s.io")
        );
        assert!(why.cause.contains("cannot create resource"));
    }
}
