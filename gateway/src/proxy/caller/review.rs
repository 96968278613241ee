//! Who calls by a token that the cluster's API knows: a service account's, for the most part.
//!
//! Names and groups are those that the API gives, `system:` and all. Some are never taken from it, since others give
//! them: the kernel's, and those of our own CA. Nothing of a token is remembered here; `reviews` keeps answers by its hash.

use super::{
    Caller, Method, Validity,
    jwt::{self, naming},
};
use crate::{
    error::{Error, Reason},
    proxy::{Shared, reviews::Account},
    state::policy::AUTHENTICATED,
};
use causeway_certs::TrustDomain;
use causeway_tunnel::listener::Peer;
use std::{borrow::Cow, sync::Arc};

/// Tokens that the API is asked about.
#[derive(Debug)]
pub struct TokenReview {
    /// For whom they must be; empty is the API server itself.
    pub audiences: Vec<String>,
    /// The own trust domain.
    pub domain: TrustDomain,
}

impl TokenReview {
    /// Whose token this is.
    ///
    /// # Errors
    /// [`Reason::Unauthenticated`], or [`Reason::Undecided`] if there is no answer.
    pub(super) async fn identify(
        &self,
        token: &str,
        from: Peer,
        shared: &Shared,
    ) -> Result<Caller, Error> {
        let what = "who you are";
        let Some(answers) = &shared.reviews else {
            return Err(Reason::Undecided.says(format!("{what} can be asked of nobody")));
        };
        if token.is_empty() || token.len() > jwt::LARGEST {
            return Err(refuse("token_review: the token is empty or too large"));
        }
        let asked = answers.token(token, &self.audiences, from).await;
        let account = asked.map_err(|unanswered| unanswered.of(what))?;
        let account =
            account.ok_or_else(|| refuse("token_review: not one that the cluster takes here"))?;
        Ok(Caller {
            validity: jwt::end(token).map(Validity::until),
            ..self.caller(account, shared)?
        })
    }

    fn caller(&self, account: Arc<Account>, shared: &Shared) -> Result<Caller, Error> {
        let said = account.groups.iter();
        let groups: Vec<_> = said
            .filter(|group| group.as_str() != AUTHENTICATED)
            .cloned()
            .collect();
        let given =
            |name: &String| naming::is_sound(name) && !naming::is_others(name, &self.domain);
        if !given(&account.user) || !groups.iter().all(given) {
            let why = "token_review: a name or group of its holder is one that no token can give";
            return Err(refuse(why));
        }
        let caller = Caller::new(&account.user, groups, Method::TokenReview, shared);
        Ok(Caller {
            account: Some(account),
            ..caller
        })
    }
}

fn refuse(why: &'static str) -> Error {
    Reason::Unauthenticated.says(Cow::Borrowed(why)).of_token()
}
