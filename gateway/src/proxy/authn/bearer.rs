//! Bearer token in `Authorization`: one of the listener's file, a JWT by its shape, or one that the cluster's API knows.
//!
//! If a listener accepts several, a JWT of an issuer that it lists is judged by that issuer alone, and the API is asked last.
//! Each connection caches the identity of its last token, so that a persistent connection is checked once. A JWT is cached no
//! longer than it counts: neither beyond its expiry, nor beyond the keys that verified it. A token that the API knows is not
//! cached here.

use super::{
    Authenticator, AuthnContext, ConnectionCredentials,
    identity::{AuthMethod, ClientIdentity, Validity},
    jwt,
    jwt::Expired,
};
use crate::error::{Error, Reason};
use causeway_rt::listener::RemoteAddr;
use std::sync::{Mutex, PoisonError};

/// Identity of the client that the last token on a connection named.
pub(crate) type TokenCache = Mutex<Option<CachedIdentity>>;

/// A token that was tried with success.
#[derive(Debug)]
pub(crate) struct CachedIdentity {
    presented: Vec<u8>,
    client: ClientIdentity,
}

/// Returns the client that the `Authorization` field identifies.
pub(super) async fn identify(
    listener: &Authenticator,
    (presented, expired): (&[u8], Expired<'_>),
    (credentials, peer): (&ConnectionCredentials, RemoteAddr),
    context: AuthnContext<'_>,
) -> Result<ClientIdentity, Error> {
    if let Some(client) = remembered(&credentials.last_token, presented) {
        return Ok(client);
    }
    let text = std::str::from_utf8(presented).unwrap_or_default();
    let token = match text.split_once(' ') {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => token.trim(),
        _ => {
            let nothing = "the Authorization field contains no bearer token";
            return Err(Reason::Unauthenticated.error(nothing));
        }
    };
    let client = tried(listener, (token, expired), peer, context).await?;
    if client.method == AuthMethod::TokenReview {
        return Ok(client);
    }
    let mut last = last(&credentials.last_token);
    *last = Some(CachedIdentity {
        presented: presented.to_vec(),
        client: client.clone(),
    });
    Ok(client)
}

async fn tried(
    listener: &Authenticator,
    (token, expired): (&str, Expired<'_>),
    from: RemoteAddr,
    context: AuthnContext<'_>,
) -> Result<ClientIdentity, Error> {
    let refuse = |why| Reason::Unauthenticated.error(why).of_token();
    let unproven = |refused| match refused {
        jwt::Rejection::Wrong(why) => refuse(why),
        jwt::Rejection::DependencyUnavailable(why) => Reason::DependencyUnavailable.error(why),
    };
    let for_jwts = |jwts: &jwt::JwtAuthenticator| match &listener.review {
        Some(_) => jwts.lists(token),
        None => listener.tokens.is_none() || jwt::is_one(token),
    };
    if let Some(jwts) = listener.jwts.as_ref().filter(|jwts| for_jwts(jwts)) {
        let bound = context.bound;
        let named = jwts.identify((token, expired), bound).await;
        let named = named.map_err(unproven)?;
        let client =
            ClientIdentity::new(&named.name, named.groups, AuthMethod::Jwt, context.limits);
        return Ok(ClientIdentity {
            validity: Some(named.validity),
            ..client
        });
    }
    let found = listener
        .tokens
        .as_ref()
        .and_then(|tokens| tokens.lookup(token));
    match (found, &listener.review) {
        (Some(found), _) => {
            let groups = found.groups.clone();
            Ok(ClientIdentity::new(
                &found.name,
                groups,
                AuthMethod::Token,
                context.limits,
            ))
        }
        (None, Some(review)) => {
            review
                .identify((token, expired), from, (context.reviews, context.limits))
                .await
        }
        (None, None) => Err(refuse("token: not known to this listener".into())),
    }
}

/// Forgets the last token on a connection.
pub(crate) fn forget(last_token: &TokenCache) {
    *last(last_token) = None;
}

fn remembered(last_token: &TokenCache, presented: &[u8]) -> Option<ClientIdentity> {
    let last = last(last_token);
    let known = last.as_ref().filter(|known| known.presented == presented)?;
    let validity = known.client.validity.as_ref();
    let holds = validity.is_none_or(Validity::holds);
    holds.then(|| known.client.clone())
}

fn last(last_token: &TokenCache) -> std::sync::MutexGuard<'_, Option<CachedIdentity>> {
    last_token.lock().unwrap_or_else(PoisonError::into_inner)
}
