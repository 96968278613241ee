//! A bearer token in `Authorization`: one of the front's file, a JWT by its shape, or one that the cluster's API knows.
//!
//! Where a front takes several, a JWT of an issuer that it lists is judged by that alone, and the API is asked last.
//! What the last token on a connection came to is remembered, so that a kept-alive connection asks once. A JWT is
//! remembered no longer than it counts: not beyond its end, nor beyond the keys that proved it. One that the API knows
//! is not remembered here.

use super::{Authentication, Caller, Method, Validity, jwt, jwt::Expired};
use crate::{
    error::{Error, Reason},
    proxy::{Shared, front::Connection},
};
use causeway_tunnel::listener::Peer;
use std::sync::{Mutex, PoisonError};

/// The caller that the last token on a connection named.
pub(crate) type LastToken = Mutex<Option<Remembered>>;

/// A token that was tried with success.
#[derive(Debug)]
pub(crate) struct Remembered {
    presented: Vec<u8>,
    caller: Caller,
}

/// Whom what stands in `Authorization` names.
pub(super) async fn identify(
    front: &Authentication,
    (presented, expired): (&[u8], Expired<'_>),
    connection: &Connection,
    shared: &Shared,
) -> Result<Caller, Error> {
    if let Some(caller) = remembered(&connection.last_token, presented) {
        return Ok(caller);
    }
    let text = std::str::from_utf8(presented).unwrap_or_default();
    let token = match text.split_once(' ') {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => token.trim(),
        _ => {
            let nothing = "the Authorization field holds no bearer token";
            return Err(Reason::Unauthenticated.says(nothing));
        }
    };
    let caller = tried(front, (token, expired), connection.peer, shared).await?;
    if caller.method == Method::TokenReview {
        return Ok(caller);
    }
    let mut last = last(&connection.last_token);
    *last = Some(Remembered {
        presented: presented.to_vec(),
        caller: caller.clone(),
    });
    Ok(caller)
}

async fn tried(
    front: &Authentication,
    (token, expired): (&str, Expired<'_>),
    from: Peer,
    shared: &Shared,
) -> Result<Caller, Error> {
    let refuse = |why| Reason::Unauthenticated.says(why).of_token();
    let unproven = |refused| match refused {
        jwt::Refused::Wrong(why) => refuse(why),
        jwt::Refused::Undecided(why) => Reason::Undecided.says(why),
    };
    let for_jwts = |jwts: &jwt::Jwts| match &front.review {
        Some(_) => jwts.lists(token),
        None => front.tokens.is_none() || jwt::is_one(token),
    };
    if let Some(jwts) = front.jwts.as_ref().filter(|jwts| for_jwts(jwts)) {
        let bound = shared.timeouts.authorize;
        let named = jwts.identify((token, expired), bound).await;
        let named = named.map_err(unproven)?;
        let caller = Caller::new(&named.name, named.groups, Method::Jwt, shared);
        return Ok(Caller {
            validity: Some(named.validity),
            ..caller
        });
    }
    let found = front
        .tokens
        .as_ref()
        .and_then(|tokens| tokens.lookup(token));
    match (found, &front.review) {
        (Some(found), _) => {
            let groups = found.groups.clone();
            Ok(Caller::new(&found.name, groups, Method::Token, shared))
        }
        (None, Some(review)) => review.identify((token, expired), from, shared).await,
        (None, None) => Err(refuse("token: not one that this front knows".into())),
    }
}

/// Forgets the last token on a connection.
pub(crate) fn forget(last_token: &LastToken) {
    *last(last_token) = None;
}

fn remembered(last_token: &LastToken, presented: &[u8]) -> Option<Caller> {
    let last = last(last_token);
    let known = last.as_ref().filter(|known| known.presented == presented)?;
    let validity = known.caller.validity.as_ref();
    let holds = validity.is_none_or(Validity::holds);
    holds.then(|| known.caller.clone())
}

fn last(last_token: &LastToken) -> std::sync::MutexGuard<'_, Option<Remembered>> {
    last_token.lock().unwrap_or_else(PoisonError::into_inner)
}
