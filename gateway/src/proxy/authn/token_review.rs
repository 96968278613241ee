//! Authentication by a token that the cluster's API knows: a service account's, for the most part.
//!
//! Names and groups are those that the API assigns, `system:` included. Names that the kernel or our own CA assigns are never
//! taken from the API. No token is cached here; `access_review` caches answers by the token's hash.

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

/// Tokens that the API is asked about.
#[derive(Debug)]
pub struct TokenReview {
    /// Audiences that tokens must have; empty is the API server itself.
    pub audiences: Arc<[String]>,
    /// The own trust domain.
    pub domain: TrustDomain,
}

impl TokenReview {
    /// Returns the holder of a token. Where a token that has expired counts, its holder is the one that the API has named
    /// before: the API takes none that has expired, and cannot be asked whether it would but for that.
    ///
    /// # Errors
    /// [`Reason::Unauthenticated`], or [`Reason::DependencyUnavailable`] if there is no answer.
    pub(super) async fn identify(
        &self,
        (token, expired): (&str, Expired<'_>),
        from: RemoteAddr,
        (reviews, limits): (Option<&ReviewCache>, &Limits),
    ) -> Result<ClientIdentity, Error> {
        let what = "your identity";
        let Some(answers) = reviews else {
            return Err(Reason::DependencyUnavailable.error(format!(
                "{what} cannot be reviewed: this gateway has no API of a cluster"
            )));
        };
        if token.is_empty() || token.len() > jwt::LARGEST {
            return Err(refuse("token_review: the token is empty or too large"));
        }
        let account = if let Some(account) = self.before_it_expired(expired) {
            account
        } else {
            let asked = answers.token(token, &self.audiences, from).await;
            let account = asked.map_err(|unanswered| unanswered.of(what))?;
            // It may have expired meanwhile.
            let account = account.or_else(|| self.before_it_expired(expired));
            account.ok_or_else(|| refuse("token_review: the cluster does not accept the token"))?
        };
        let audiences = || self.audiences.clone();
        Ok(ClientIdentity {
            validity: jwt::end(token).map(|end| Validity::reviewed(end, audiences())),
            ..self.client(account, limits)?
        })
    }

    /// Returns the user of this token for the same audiences, if the token has expired and counts nevertheless.
    fn before_it_expired(&self, expired: Expired<'_>) -> Option<Arc<UserInfo>> {
        let Expired::Taken(before) = expired else {
            return None;
        };
        let validity = before.validity.as_ref()?;
        let same = validity.audiences.as_deref() == Some(&*self.audiences);
        (same && validity.is_over()).then(|| before.account.clone())?
    }

    fn client(&self, account: Arc<UserInfo>, limits: &Limits) -> Result<ClientIdentity, Error> {
        let said = account.groups.iter();
        let groups: Vec<_> = said
            .filter(|group| group.as_str() != AUTHENTICATED)
            .cloned()
            .collect();
        let given =
            |name: &String| claims::is_sound(name) && !claims::is_others(name, &self.domain);
        if !given(&account.user) || !groups.iter().all(given) {
            let why = "token_review: one of its names or groups is reserved and must not come from a token";
            return Err(refuse(why));
        }
        let client = ClientIdentity::new(&account.user, groups, AuthMethod::TokenReview, limits);
        Ok(ClientIdentity {
            account: Some(account),
            ..client
        })
    }
}

fn refuse(why: &'static str) -> Error {
    Reason::Unauthenticated.error(Cow::Borrowed(why)).of_token()
}
