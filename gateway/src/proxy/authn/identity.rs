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
pub(crate) const UID: &str = "uid:";

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
    pub open: Counter,
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
            open: limits.client(&name),
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
            open: Counter::default(),
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
    pub(super) until: u64,
    /// The keys of a JWT's issuer, and those of them that proved it.
    keys: Option<(JwksCache, Arc<KeySet>)>,
    /// The audiences for which the cluster's API took a token.
    pub(super) audiences: Option<Arc<[String]>>,
}

impl Validity {
    /// The validity of a certificate: up to this second since 1970.
    pub fn until(until: u64) -> Self {
        Self {
            until,
            keys: None,
            audiences: None,
        }
    }

    /// The validity of a JWT that `set` has proved.
    pub fn proved(until: u64, keys: JwksCache, set: Arc<KeySet>) -> Self {
        Self {
            until,
            keys: Some((keys, set)),
            audiences: None,
        }
    }

    /// The validity of a token with this `exp` claim, which the cluster's API took for these audiences.
    pub fn reviewed(end: u64, audiences: Arc<[String]>) -> Self {
        Self {
            // RFC 7519 section 4.1.4: a token does not count in the second that it names.
            until: end.saturating_sub(1),
            keys: None,
            audiences: Some(audiences),
        }
    }

    /// Whether its last second is over.
    pub fn is_over(&self) -> bool {
        now() > self.until
    }

    /// Whether it counts without another proof: its time is not over, and the keys are the same.
    pub fn holds(&self) -> bool {
        let same = |(keys, set): &(JwksCache, Arc<KeySet>)| keys.are(set);
        !self.is_over() && self.keys.as_ref().is_none_or(same)
    }

    /// Whether its issuer has other keys by now.
    pub fn has_other_keys(&self) -> bool {
        let other = |(keys, set): &(JwksCache, Arc<KeySet>)| keys.now().is_ok() && !keys.are(set);
        self.keys.as_ref().is_some_and(other)
    }
}
