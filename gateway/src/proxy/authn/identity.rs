//! Identity of a client, and its validity.

use crate::{
    config::Serial,
    proxy::{
        access_review::types::UserInfo,
        limits::{Counter, Limits},
    },
    state::{JwksCache, KeySet},
};
use causeway_certs::Fingerprint;
use rustls_pki_types::CertificateDer;
use std::{
    fmt,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

/// Prefix of the names of clients of a unix socket.
pub(crate) const UID_PREFIX: &str = "uid:";

/// Method by which a client was identified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AuthMethod {
    /// A client certificate.
    Certificate,
    /// A bearer token.
    Token,
    /// A JWT.
    Jwt,
    /// A token that the cluster's API reviews.
    TokenReview,
    /// The permission to connect to a unix socket (0600).
    Unix,
    /// None: the listener serves anonymous clients.
    Anonymous,
}

impl AuthMethod {
    /// Returns the word for the log.
    pub fn word(self) -> &'static str {
        match self {
            Self::Certificate => "certificate",
            Self::Token => "token",
            Self::Jwt => "jwt",
            Self::TokenReview => "token_review",
            Self::Unix => "unix",
            Self::Anonymous => "anonymous",
        }
    }
}

/// Identity of a client of a listener.
#[derive(Clone, Debug)]
pub struct ClientIdentity {
    /// The name: a certificate's common name or URI, a token's name, a user id, or an address.
    pub name: Arc<str>,
    /// Groups: a certificate's organizations, or those of the token.
    pub groups: Arc<[String]>,
    /// The URIs in its certificate.
    pub uris: Arc<[String]>,
    /// Method of identification.
    pub method: AuthMethod,
    /// Our root CA under which the certificate was verified.
    pub root: Option<Fingerprint>,
    /// Certificate that the client presented.
    pub certificate: Option<Arc<PresentedCertificate>>,
    /// Validity of the certificate or JWT.
    pub validity: Option<Validity>,
    /// User of the cluster, if the cluster has identified the client.
    pub account: Option<Arc<UserInfo>>,
    /// Counter of its open streams.
    pub open_streams: Counter,
}

impl fmt::Display for ClientIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl ClientIdentity {
    /// Returns a client with its counter of open streams.
    pub fn new(name: &str, groups: Vec<String>, method: AuthMethod, limits: &Limits) -> Self {
        let name: Arc<str> = name.into();
        Self {
            open_streams: limits.client_counter(&name),
            name,
            groups: groups.into(),
            uris: Arc::default(),
            method,
            root: None,
            certificate: None,
            validity: None,
            account: None,
        }
    }

    /// Adds the URIs of its certificate.
    #[must_use]
    pub fn with_uris(mut self, uris: Vec<String>) -> Self {
        self.uris = uris.into();
        self
    }

    #[cfg(test)]
    pub(crate) fn for_test(name: &str) -> Self {
        Self {
            name: name.into(),
            groups: Arc::new([]),
            uris: Arc::new([]),
            method: AuthMethod::Certificate,
            root: None,
            certificate: None,
            validity: None,
            account: None,
            open_streams: Counter::default(),
        }
    }
}

/// Certificate that a client presented.
#[derive(Debug)]
pub struct PresentedCertificate {
    /// Serial number of the certificate.
    pub serial: Serial,
    /// The certificate and its intermediates.
    pub chain: Vec<CertificateDer<'static>>,
    /// End of its validity in Unix seconds, inclusive.
    pub not_after: u64,
}

/// Returns the Unix time in seconds.
pub(super) fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().as_secs()
}

/// Validity of a certificate, a JWT or a token that the cluster's API reviewed.
#[derive(Clone, Debug)]
pub struct Validity {
    /// Last valid second, in Unix time.
    pub(super) valid_until: u64,
    /// The keys of a JWT's issuer, and the key set that verified the JWT.
    proven_by: Option<(JwksCache, Arc<KeySet>)>,
    /// The audiences for which the cluster's API accepted a token.
    pub(super) audiences: Option<Arc<[String]>>,
}

impl Validity {
    /// Returns the validity of a certificate, up to and including this Unix second.
    pub fn until_second(valid_until: u64) -> Self {
        Self {
            valid_until,
            proven_by: None,
            audiences: None,
        }
    }

    /// Returns the validity of a JWT that `set` has verified.
    pub fn for_jwt(valid_until: u64, keys: JwksCache, set: Arc<KeySet>) -> Self {
        Self {
            valid_until,
            proven_by: Some((keys, set)),
            audiences: None,
        }
    }

    /// Returns the validity of a token with this `exp` claim, which the cluster's API accepted for these audiences.
    pub fn for_reviewed_token(expires_at: u64, audiences: Arc<[String]>) -> Self {
        Self {
            // A token is no longer valid in the second that `exp` names (RFC 7519 section 4.1.4).
            valid_until: expires_at.saturating_sub(1),
            proven_by: None,
            audiences: Some(audiences),
        }
    }

    /// Whether the last valid second is over.
    pub fn is_expired(&self) -> bool {
        now() > self.valid_until
    }

    /// Whether the credential is valid without another verification: it has not expired, and the keys are the same.
    pub fn is_current(&self) -> bool {
        let is_same_set = |(keys, set): &(JwksCache, Arc<KeySet>)| keys.is_current(set);
        !self.is_expired() && self.proven_by.as_ref().is_none_or(is_same_set)
    }

    /// Whether its issuer has other keys now.
    pub fn keys_changed(&self) -> bool {
        let has_changed = |(keys, set): &(JwksCache, Arc<KeySet>)| {
            keys.current().is_ok() && !keys.is_current(set)
        };
        self.proven_by.as_ref().is_some_and(has_changed)
    }
}
