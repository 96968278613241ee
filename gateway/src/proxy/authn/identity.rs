//! Identity of a client, and for how long it counts.

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
    /// A token that the cluster's API knows.
    TokenReview,
    /// The permission to connect to a unix socket (0600).
    Unix,
    /// None: the listener serves anonymous clients.
    Anonymous,
}

impl AuthMethod {
    /// The word, for the log.
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
    /// How it is known.
    pub method: AuthMethod,
    /// The root of ours on which its certificate hangs.
    pub root: Option<Fingerprint>,
    /// The certificate that it has shown.
    pub certificate: Option<Arc<PresentedCertificate>>,
    /// For how long its certificate or JWT counts.
    pub validity: Option<Validity>,
    /// User of the cluster, if the cluster has identified the client.
    pub account: Option<Arc<UserInfo>>,
    /// Its streams that are open.
    pub open_streams: Counter,
}

impl fmt::Display for ClientIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl ClientIdentity {
    /// Returns a client with its count of open streams.
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

    /// With the URIs of its certificate.
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

/// A certificate that a client has shown.
#[derive(Debug)]
pub struct PresentedCertificate {
    /// Its serial number.
    pub serial: Serial,
    /// It, and the intermediates that came with it.
    pub chain: Vec<CertificateDer<'static>>,
    /// Its last second, since 1970.
    pub not_after: u64,
}

/// Returns the seconds since 1970.
pub(super) fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().as_secs()
}

/// For how long a certificate, a JWT or a token that the cluster knows counts.
#[derive(Clone, Debug)]
pub struct Validity {
    /// The last second, since 1970.
    pub(super) valid_until: u64,
    /// The keys of a JWT's issuer, and those of them that proved it.
    proven_by: Option<(JwksCache, Arc<KeySet>)>,
    /// The audiences for which the cluster's API took a token.
    pub(super) audiences: Option<Arc<[String]>>,
}

impl Validity {
    /// The validity of a certificate: up to this second since 1970.
    pub fn until_second(valid_until: u64) -> Self {
        Self {
            valid_until,
            proven_by: None,
            audiences: None,
        }
    }

    /// The validity of a JWT that `set` has proved.
    pub fn for_jwt(valid_until: u64, keys: JwksCache, set: Arc<KeySet>) -> Self {
        Self {
            valid_until,
            proven_by: Some((keys, set)),
            audiences: None,
        }
    }

    /// The validity of a token with this `exp` claim, which the cluster's API took for these audiences.
    pub fn for_reviewed_token(expires_at: u64, audiences: Arc<[String]>) -> Self {
        Self {
            // RFC 7519 section 4.1.4: a token does not count in the second that it names.
            valid_until: expires_at.saturating_sub(1),
            proven_by: None,
            audiences: Some(audiences),
        }
    }

    /// Whether its last second is over.
    pub fn is_expired(&self) -> bool {
        now() > self.valid_until
    }

    /// Whether it counts without another proof: its time is not over, and the keys are the same.
    pub fn is_current(&self) -> bool {
        let is_same_set = |(keys, set): &(JwksCache, Arc<KeySet>)| keys.is_current(set);
        !self.is_expired() && self.proven_by.as_ref().is_none_or(is_same_set)
    }

    /// Whether its issuer has other keys by now.
    pub fn keys_changed(&self) -> bool {
        let has_changed = |(keys, set): &(JwksCache, Arc<KeySet>)| {
            keys.current().is_ok() && !keys.is_current(set)
        };
        self.proven_by.as_ref().is_some_and(has_changed)
    }
}
