//! Authentication by JWT: the issuers that a listener accepts, and the claims that a token needs.
//!
//! 1. The token names its issuer. No claim is used before a key of that issuer has verified the signature.
//! 2. A missing key is fetched once for all requests that wait for it: one of the two waits that the request path permits.
//! 3. Signature, `exp`, `nbf`, `iss` and `aud` are checked, with a tolerance of `CLOCK_SKEW_SECONDS`.
//! 4. Its name and groups must not be reserved for the kernel, this gateway or Kubernetes.
//!
//! A refusal contains the reason, but neither the content of the token nor the expected values.

pub(super) mod claims;

pub use claims::ClaimMappings;

use super::identity::{ClientIdentity, Validity};
use crate::{
    config,
    state::{
        JwksCache,
        jwks::{KeyError, KeyLookup, KeySet},
    },
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use jsonwebtoken::{
    Algorithm, DecodingKey, Header, Validation, dangerous, decode, decode_header,
    errors::{Error, ErrorKind},
};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::{
    borrow::Cow,
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

/// Maximum difference between two clocks, in seconds.
const CLOCK_SKEW_SECONDS: u64 = 60;
/// Maximum size of a token in bytes. Larger tokens are not parsed. Tokens with hundreds of groups are half as large.
pub(super) const MAX_TOKEN_BYTES: usize = 16 << 10;
/// Last second of the year 9999 in Unix time. Later times have no date.
const MAX_TIMESTAMP: u64 = 253_402_300_799;

/// Reason why a token was rejected, as the client receives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// The token is not accepted here.
    Invalid(Cow<'static, str>),
    /// The keys of its issuer are missing, so the token cannot be verified now.
    DependencyUnavailable(Cow<'static, str>),
}

impl<T: Into<Cow<'static, str>>> From<T> for Rejection {
    fn from(detail: T) -> Self {
        Self::Invalid(detail.into())
    }
}

/// Treatment of an expired token.
#[derive(Clone, Copy, Debug)]
pub enum Expired<'a> {
    /// An expired token is rejected.
    Reject,
    /// An expired token is accepted, because its expiry does not end the stream of this client.
    AcceptFor(&'a ClientIdentity),
}

/// Issuers that a listener accepts.
#[derive(Debug)]
pub struct JwtAuthenticator(Vec<Issuer>);

/// Issuer of tokens and its settings.
#[derive(Debug)]
pub struct Issuer {
    name: String,
    /// Validation settings by algorithm.
    validations: Vec<(Algorithm, Validation)>,
    claim_mappings: ClaimMappings,
    keys: JwksCache,
}

/// Client that a token identifies, and the validity of the token.
#[derive(Debug)]
pub struct JwtIdentity {
    /// The client's name.
    pub name: String,
    /// The client's groups.
    pub groups: Vec<String>,
    /// Validity of the token.
    pub validity: Validity,
}

/// Whether a bearer token has the shape of a JWT: three parts in base64url; the last part may be empty.
pub fn is_jwt_shaped(token: &str) -> bool {
    let is_base64url = |part: &str| {
        let is_base64url_byte =
            |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        part.bytes().all(is_base64url_byte)
    };
    let parts: Vec<_> = token.splitn(4, '.').collect();
    parts.len() == 3 && parts.iter().all(|text| is_base64url(text)) && !parts[0].is_empty()
}

/// Claims that are read before the signature is verified.
#[derive(Deserialize)]
struct UnverifiedClaims {
    iss: Option<String>,
}

impl Issuer {
    /// Returns an issuer with this name, whose tokens must be for one of these audiences and signed by one of `algorithms`.
    pub fn new(
        (name, audiences): (&str, &[String]),
        algorithms: &[config::Algorithm],
        claim_mappings: ClaimMappings,
        keys: JwksCache,
    ) -> Self {
        let build_validation = |algorithm| {
            let mut validation = Validation::new(algorithm);
            validation.leeway = CLOCK_SKEW_SECONDS;
            validation.validate_nbf = true;
            validation.set_issuer(&[name]);
            validation.set_audience(audiences);
            validation.set_required_spec_claims(&["exp", "iss", "aud"]);
            (algorithm, validation)
        };
        Self {
            name: name.to_owned(),
            validations: algorithms
                .iter()
                .copied()
                .map(algorithm)
                .map(build_validation)
                .collect(),
            claim_mappings,
            keys,
        }
    }

    async fn identify(
        &self,
        (token, expired): (&str, Expired<'_>),
        header: &Header,
        fetch_timeout: Duration,
    ) -> Result<JwtIdentity, Rejection> {
        let found = self
            .validations
            .iter()
            .find(|(known, _)| *known == header.alg);
        let (_, check) = found.ok_or("jwt: its algorithm is not accepted")?;
        let mut check = Cow::Borrowed(check);
        if matches!(expired, Expired::AcceptFor(_)) {
            check.to_mut().validate_exp = false;
        }
        let verified = match self.verify_with_cached_keys(token, header, &check) {
            Err(VerifyError::KeyMissing(_)) => {
                self.keys.request_fetch(fetch_timeout).await;
                self.verify_with_cached_keys(token, header, &check)
            }
            result => result,
        };
        let (set, claims) = verified.map_err(VerifyError::into_rejection)?;
        let expires_at = claims.get("exp").and_then(seconds).unwrap_or_default();
        let (name, groups) = self.claim_mappings.map_claims(&claims)?;
        let until = expires_at.saturating_add(CLOCK_SKEW_SECONDS);
        Ok(JwtIdentity {
            name,
            groups,
            validity: Validity::for_jwt(until, self.keys.clone(), set),
        })
    }

    fn verify_with_cached_keys(
        &self,
        token: &str,
        header: &Header,
        validation: &Validation,
    ) -> Result<VerifiedClaims, VerifyError> {
        let set = self
            .keys
            .current()
            .map_err(|key_error| VerifyError::KeyMissing(keys_unavailable(key_error)))?;
        let claims = match set.find(header.kid.as_deref(), header.alg) {
            KeyLookup::Key(key) => {
                verify_signature(token, key, validation).map_err(VerifyError::Invalid)?
            }
            KeyLookup::Several => {
                return Err(VerifyError::Invalid(
                    "jwt: more than one key of its issuer matches".into(),
                ));
            }
            KeyLookup::None if header.kid.is_none() => {
                return Err(VerifyError::KeyMissing(
                    "jwt: its issuer has no key for its algorithm".into(),
                ));
            }
            KeyLookup::None => {
                return Err(VerifyError::KeyMissing(
                    "jwt: its issuer has no key with this id".into(),
                ));
            }
        };
        Ok((set, claims))
    }
}

type VerifiedClaims = (Arc<KeySet>, Map<String, Value>);

/// Reason why a token could not be verified.
enum VerifyError {
    /// The key is missing here and may be fetched.
    KeyMissing(Rejection),
    /// The token cannot become valid.
    Invalid(Rejection),
}

impl VerifyError {
    fn into_rejection(self) -> Rejection {
        match self {
            Self::KeyMissing(rejection) | Self::Invalid(rejection) => rejection,
        }
    }
}

impl JwtAuthenticator {
    /// Returns an authenticator that accepts these issuers.
    pub fn new(issuers: Vec<Issuer>) -> Self {
        Self(issuers)
    }

    /// Whether the issuer that the token claims is one of these issuers.
    pub fn lists_issuer(&self, token: &str) -> bool {
        let claims = dangerous::insecure_decode_claims::<UnverifiedClaims>(token);
        let name = claims.ok().and_then(|claimed| claimed.iss);
        is_jwt_shaped(token)
            && name.is_some_and(|name| self.0.iter().any(|known| known.name == name))
    }

    /// Returns the client that this token identifies. Waits at most `fetch_timeout` for missing keys.
    ///
    /// # Errors
    /// The reason why the token is rejected.
    pub async fn identify(
        &self,
        (token, expired): (&str, Expired<'_>),
        fetch_timeout: Duration,
    ) -> Result<JwtIdentity, Rejection> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(format!("jwt: larger than {} KiB", MAX_TOKEN_BYTES >> 10).into());
        }
        if !is_jwt_shaped(token) {
            return Err("jwt: the bearer token is not a JWT".into());
        }
        let header = decode_header(token).map_err(|_| unreadable_header(token))?;
        if header.crit.is_some() {
            // RFC 7515 §4.1.11: this gateway supports no extension that `crit` could name.
            return Err("jwt: it requires unsupported extensions (crit)".into());
        }
        let claimed: UnverifiedClaims =
            dangerous::insecure_decode_claims(token).map_err(|_| "jwt: not readable")?;
        let name = claimed.iss.ok_or("jwt: it has no issuer")?;
        let issuer = self.0.iter().find(|issuer| issuer.name == name);
        let issuer = issuer.ok_or("jwt: its issuer is not configured for this listener")?;
        issuer
            .identify((token, expired), &header, fetch_timeout)
            .await
    }
}

/// Returns the rejection of a header that the library does not support, most often for an algorithm such as `none`.
fn unreadable_header(token: &str) -> Rejection {
    let header = token.split('.').next().unwrap_or_default();
    let header = URL_SAFE_NO_PAD.decode(header).unwrap_or_default();
    let header: Value = serde_json::from_slice(&header).unwrap_or_default();
    if header["alg"].is_string() {
        "jwt: its algorithm is not accepted".into()
    } else {
        "jwt: not readable".into()
    }
}

fn keys_unavailable(key_error: KeyError) -> Rejection {
    Rejection::DependencyUnavailable(match key_error {
        KeyError::NotFetched => {
            "jwt: the keys of its issuer have not been loaded yet; try again later".into()
        }
        KeyError::TooOld(age) => {
            let age = humantime::format_duration(Duration::from_secs(age.as_secs()));
            format!("jwt: the keys of its issuer are {age} old and could not be refreshed").into()
        }
    })
}

/// Returns the error detail for a token that was valid until this Unix second.
pub(super) fn expired_detail(valid_until: u64) -> Cow<'static, str> {
    let at = valid_until
        .saturating_sub(CLOCK_SKEW_SECONDS)
        .min(MAX_TIMESTAMP);
    let at = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(at));
    format!("jwt: expired at {at}").into()
}

fn verify_signature(
    token: &str,
    key: &DecodingKey,
    validation: &Validation,
) -> Result<Map<String, Value>, Rejection> {
    match decode(token, key, validation) {
        Ok(verified) => Ok(verified.claims),
        Err(error) => Err(rejection_from(token, &error)),
    }
}

fn rejection_from(token: &str, error: &Error) -> Rejection {
    match error.kind() {
        ErrorKind::InvalidSignature => "jwt: its signature is not valid".into(),
        ErrorKind::ExpiredSignature => rejection_with_date("jwt: expired", "at", token, "exp"),
        ErrorKind::ImmatureSignature => {
            rejection_with_date("jwt: not valid", "before", token, "nbf")
        }
        ErrorKind::InvalidAudience => "jwt: not for this audience".into(),
        ErrorKind::MissingRequiredClaim(claim) | ErrorKind::InvalidClaimFormat(claim) => {
            format!("jwt: it has no valid claim {claim}").into()
        }
        _ => "jwt: not readable".into(),
    }
}

/// Returns a rejection with the date of a claim whose signature was verified.
fn rejection_with_date(problem: &str, preposition: &str, token: &str, claim: &str) -> Rejection {
    let claims = dangerous::insecure_decode_claims::<Map<String, Value>>(token);
    let at = claims.ok().and_then(|claims| seconds(claims.get(claim)?));
    match at.filter(|at| *at <= MAX_TIMESTAMP) {
        Some(at) => {
            let at = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(at));
            format!("{problem} {preposition} {at}").into()
        }
        None => format!("{problem} by its {claim}").into(),
    }
}

/// Returns the expiry of a JWT in Unix seconds, if it has one. The token is not verified.
pub(in crate::proxy) fn unverified_expiry(token: &str) -> Option<u64> {
    if !is_jwt_shaped(token) {
        return None;
    }
    let claims = URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?).ok()?;
    let claims: Value = serde_json::from_slice(&claims).ok()?;
    seconds(claims.get("exp")?)
}

/// Parses the date of a claim as the library does: an integer, or a number with a fraction.
fn seconds(date: &Value) -> Option<u64> {
    let rounded = || {
        let seconds = date.as_f64()?.round();
        Duration::try_from_secs_f64(seconds)
            .ok()
            .map(|date| date.as_secs())
    };
    date.as_u64().or_else(rounded)
}

fn algorithm(algorithm: config::Algorithm) -> Algorithm {
    match algorithm {
        config::Algorithm::RS256 => Algorithm::RS256,
        config::Algorithm::RS384 => Algorithm::RS384,
        config::Algorithm::RS512 => Algorithm::RS512,
        config::Algorithm::PS256 => Algorithm::PS256,
        config::Algorithm::PS384 => Algorithm::PS384,
        config::Algorithm::PS512 => Algorithm::PS512,
        config::Algorithm::ES256 => Algorithm::ES256,
        config::Algorithm::ES384 => Algorithm::ES384,
        config::Algorithm::EdDSA => Algorithm::EdDSA,
    }
}

#[cfg(test)]
mod tests;
