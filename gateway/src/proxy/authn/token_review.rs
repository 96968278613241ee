//! Authentication by a token that the cluster's API reviews, in most cases of a service account.
//!
//! Names and groups are those that the API assigns, `system:` included. Names that the kernel or our own CA assigns are never
//! accepted from the API. No token is cached here; `access_review` caches answers by the token's hash.

use super::{
    identity::{AuthMethod, ClientIdentity, Validity},
    jwt::{self, Expired, claims},
};
use crate::{
    error::{Error, Reason},
    proxy::{
        access_review::{ReviewCache, types::UserInfo},
        limits::Limits,
    },
    state::policy::AUTHENTICATED,
};
use causeway_certs::TrustDomain;
use causeway_rt::listener::RemoteAddr;
use std::{borrow::Cow, sync::Arc};

/// Settings for tokens that the cluster's API reviews.
#[derive(Debug)]
pub struct TokenReview {
    /// Audiences of which a token must have one; if empty, the token must be for the API server.
    pub audiences: Arc<[String]>,
    /// The own trust domain.
    pub trust_domain: TrustDomain,
}

impl TokenReview {
    /// Returns the holder of a token. If an expired token is accepted, the holder is the one that the API named before, because
    /// the API rejects every expired token.
    ///
    /// # Errors
    /// [`Reason::Unauthenticated`], or [`Reason::DependencyUnavailable`] if there is no answer.
    pub(super) async fn identify(
        &self,
        (token, expired): (&str, Expired<'_>),
        remote_address: RemoteAddr,
        (reviews, limits): (Option<&ReviewCache>, &Limits),
    ) -> Result<ClientIdentity, Error> {
        let subject = "your identity";
        let Some(answers) = reviews else {
            return Err(Reason::DependencyUnavailable.error(format!(
                "{subject} cannot be reviewed: this gateway has no API of a cluster"
            )));
        };
        if token.is_empty() || token.len() > jwt::MAX_TOKEN_BYTES {
            return Err(unauthenticated(
                "token_review: the token is empty or too large",
            ));
        }
        let account = if let Some(account) = self.account_before_expiry(expired) {
            account
        } else {
            let reviewed = answers
                .review_token(token, &self.audiences, remote_address)
                .await;
            let account = reviewed.map_err(|review_error| review_error.into_error(subject))?;
            // The token may have expired during the review.
            let account = account.or_else(|| self.account_before_expiry(expired));
            account.ok_or_else(|| {
                unauthenticated("token_review: the cluster does not accept the token")
            })?
        };
        let audiences = || self.audiences.clone();
        Ok(ClientIdentity {
            validity: jwt::unverified_expiry(token)
                .map(|end| Validity::for_reviewed_token(end, audiences())),
            ..self.client(account, limits)?
        })
    }

    /// Returns the user of this token for the same audiences, if the token has expired and expired tokens are accepted.
    fn account_before_expiry(&self, expired: Expired<'_>) -> Option<Arc<UserInfo>> {
        let Expired::AcceptFor(previous_client) = expired else {
            return None;
        };
        let validity = previous_client.validity.as_ref()?;
        let same_audiences = validity.audiences.as_deref() == Some(&*self.audiences);
        (same_audiences && validity.is_expired()).then(|| previous_client.account.clone())?
    }

    fn client(&self, account: Arc<UserInfo>, limits: &Limits) -> Result<ClientIdentity, Error> {
        let claimed_groups = account.groups.iter();
        let groups: Vec<_> = claimed_groups
            .filter(|group| group.as_str() != AUTHENTICATED)
            .cloned()
            .collect();
        let is_assignable = |name: &String| {
            claims::is_valid_name(name) && !claims::is_reserved_name(name, &self.trust_domain)
        };
        if !is_assignable(&account.user) || !groups.iter().all(is_assignable) {
            let detail = "token_review: one of its names or groups is reserved and must not come from a token";
            return Err(unauthenticated(detail));
        }
        let client = ClientIdentity::new(&account.user, groups, AuthMethod::TokenReview, limits);
        Ok(ClientIdentity {
            account: Some(account),
            ..client
        })
    }
}

fn unauthenticated(detail: &'static str) -> Error {
    Reason::Unauthenticated
        .error(Cow::Borrowed(detail))
        .as_token_error()
}
