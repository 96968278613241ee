//! Bearer token in `Authorization`, or in `Proxy-Authorization` of a proxy's client: a token of the listener's file, a JWT by its shape, or a token that the cluster's API
//! reviews.
//!
//! If a listener accepts several kinds, a JWT of a listed issuer is verified by that issuer's keys alone, and the API is called
//! last. Each connection caches the identity of its last token, so that a persistent connection is checked once. A JWT is cached
//! neither after its expiry nor after a change of the keys that verified it. A token that the API reviews is not cached here.

use super::{
    Authenticator, AuthnContext, ConnectionCredentials,
    identity::{AuthMethod, ClientIdentity, Validity},
    jwt,
    jwt::Expired,
};
use crate::error::{Error, Reason};
use base64::{Engine, engine::general_purpose::STANDARD};
use causeway_rt::listener::RemoteAddr;
use std::{
    borrow::Cow,
    sync::{Mutex, PoisonError},
};

/// Identity of the client from the last token on a connection.
pub(crate) type TokenCache = Mutex<Option<CachedIdentity>>;

/// Token that was verified successfully.
#[derive(Debug)]
pub(crate) struct CachedIdentity {
    authorization: Vec<u8>,
    client: ClientIdentity,
}

/// Identifies the client by the `Authorization` field.
pub(super) async fn identify(
    listener: &Authenticator,
    (authorization, expired): (&[u8], Expired<'_>),
    (credentials, peer): (&ConnectionCredentials, RemoteAddr),
    context: AuthnContext<'_>,
) -> Result<ClientIdentity, Error> {
    if let Some(client) = cached_client(&credentials.last_token, authorization) {
        return Ok(client);
    }
    let text = std::str::from_utf8(authorization).unwrap_or_default();
    let token = match text.split_once(' ') {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => {
            Some(Cow::Borrowed(token.trim()))
        }
        Some((scheme, credentials))
            if listener.accepts_basic && scheme.eq_ignore_ascii_case("basic") =>
        {
            basic_password(credentials.trim()).map(Cow::Owned)
        }
        _ => None,
    };
    let Some(token) = token else {
        let detail = if listener.accepts_basic {
            "the credential is neither a bearer token nor a user and a token as the password"
        } else {
            "the Authorization field contains no bearer token"
        };
        return Err(Reason::Unauthenticated.error(detail));
    };
    let client = verify_token(listener, (&token, expired), peer, context).await?;
    if client.method == AuthMethod::TokenReview {
        return Ok(client);
    }
    let mut last = lock_token_cache(&credentials.last_token);
    *last = Some(CachedIdentity {
        authorization: authorization.to_vec(),
        client: client.clone(),
    });
    Ok(client)
}

/// Returns the password of Basic credentials (RFC 7617). The user is not used, because the token identifies the client.
fn basic_password(credentials: &str) -> Option<String> {
    let decoded = String::from_utf8(STANDARD.decode(credentials).ok()?).ok()?;
    let (_, password) = decoded.split_once(':')?;
    Some(password.to_owned())
}

async fn verify_token(
    listener: &Authenticator,
    (token, expired): (&str, Expired<'_>),
    remote_address: RemoteAddr,
    context: AuthnContext<'_>,
) -> Result<ClientIdentity, Error> {
    let unauthenticated = |why| Reason::Unauthenticated.error(why).as_token_error();
    let rejection_error = |refused| match refused {
        jwt::Rejection::Invalid(why) => unauthenticated(why),
        jwt::Rejection::DependencyUnavailable(why) => Reason::DependencyUnavailable.error(why),
    };
    let is_for_jwts = |jwts: &jwt::JwtAuthenticator| match &listener.review {
        Some(_) => jwts.lists_issuer(token),
        None => listener.tokens.is_none() || jwt::is_jwt_shaped(token),
    };
    if let Some(jwts) = listener.jwts.as_ref().filter(|jwts| is_for_jwts(jwts)) {
        let bound = context.bound;
        let identified = jwts.identify((token, expired), bound).await;
        let identity = identified.map_err(rejection_error)?;
        let client = ClientIdentity::new(
            &identity.name,
            identity.groups,
            AuthMethod::Jwt,
            context.limits,
        );
        return Ok(ClientIdentity {
            validity: Some(identity.validity),
            ..client
        });
    }
    let static_token = listener
        .tokens
        .as_ref()
        .and_then(|tokens| tokens.lookup(token));
    match (static_token, &listener.review) {
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
                .identify(
                    (token, expired),
                    remote_address,
                    (context.reviews, context.limits),
                )
                .await
        }
        (None, None) => Err(unauthenticated("token: not known to this listener".into())),
    }
}

/// Removes the last token of a connection from the cache.
pub(crate) fn forget(last_token: &TokenCache) {
    *lock_token_cache(last_token) = None;
}

fn cached_client(last_token: &TokenCache, authorization: &[u8]) -> Option<ClientIdentity> {
    let last = lock_token_cache(last_token);
    let cached = last
        .as_ref()
        .filter(|known| known.authorization == authorization)?;
    let validity = cached.client.validity.as_ref();
    let is_valid = validity.is_none_or(Validity::is_current);
    is_valid.then(|| cached.client.clone())
}

fn lock_token_cache(last_token: &TokenCache) -> std::sync::MutexGuard<'_, Option<CachedIdentity>> {
    last_token.lock().unwrap_or_else(PoisonError::into_inner)
}
