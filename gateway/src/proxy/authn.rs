//! Authentication of clients: by certificate, by bearer token, by the mode of a unix socket, or as an anonymous client. A bearer
//! token is from a file, a JWT, or a token that the cluster's API reviews.
//!
//! A listener accepts only the methods that its configuration names. A certificate and a unix peer are checked once per
//! connection, a token at each request. Anonymous clients are served only if the listener has `anonymous: true`, and then only
//! from the networks and for the ports that it names. A wrong credential never makes a client anonymous. The detail of a refusal
//! begins with the method that was tried, and contains only the reason of the failure.

pub(crate) mod bearer;
pub mod identity;
pub mod jwt;
pub mod token_review;

use crate::{
    config::Serial,
    error::{Error, Reason},
    proxy::{access_review::ReviewCache, limits::Limits},
};
use causeway_certs::{
    StaticTokens,
    verify::{PeerRejected, Purpose, TrustStore, none_revoked, verify_peer},
};
use causeway_rt::listener::RemoteAddr;
use http::{
    HeaderMap, HeaderValue, Method,
    header::{AUTHORIZATION, PROXY_AUTHORIZATION},
};
use ipnet::IpNet;
use jwt::{Expired, JwtAuthenticator};
use rustls_pki_types::UnixTime;
use std::{collections::BTreeSet, sync::OnceLock, time::Duration};
use token_review::TokenReview;

use bearer::TokenCache;
pub(crate) use identity::UID_PREFIX;
use identity::now;
pub use identity::{AuthMethod, ClientIdentity, PresentedCertificate, Validity};

/// Returns the credential of a request. At a proxy this is `Proxy-Authorization` (RFC 9110 §11.7.2). `Authorization` is then for
/// the upstream, except in a CONNECT, which only the proxy reads.
pub(crate) fn credential<'a>(
    is_proxy: bool,
    method: &Method,
    fields: &'a HeaderMap,
) -> Option<&'a HeaderValue> {
    if !is_proxy {
        return fields.get(AUTHORIZATION);
    }
    let authorization = || {
        fields
            .get(AUTHORIZATION)
            .filter(|_| method == Method::CONNECT)
    };
    fields.get(PROXY_AUTHORIZATION).or_else(authorization)
}

impl ClientIdentity {
    /// Checks a certificate against the listener's current revocations and the current time.
    ///
    /// # Errors
    /// [`Reason::Unauthenticated`] if it is revoked, or if it has expired and the listener rejects expired certificates.
    pub(crate) fn is_welcome(
        &self,
        revoked: &BTreeSet<Serial>,
        disconnect_expired: bool,
    ) -> Result<(), Error> {
        let Some(certificate) = &self.certificate else {
            return Ok(());
        };
        if revoked.contains(&certificate.serial) {
            return Err(certificate_error(&PeerRejected::Revoked(
                self.name.to_string(),
            )));
        }
        match &self.validity {
            Some(validity) if disconnect_expired && validity.is_expired() => {
                let not_after = validity.valid_until;
                Err(certificate_error(&PeerRejected::Expired { not_after }))
            }
            _ => Ok(()),
        }
    }

    /// Checks that an unverifiable JWT has not expired, at a listener that refuses expired ones.
    ///
    /// # Errors
    /// [`Reason::Unauthenticated`] if it has expired.
    pub(crate) fn is_in_time(&self, disconnect_expired: bool) -> Result<(), Error> {
        match &self.validity {
            Some(validity)
                if self.method == AuthMethod::Jwt
                    && disconnect_expired
                    && validity.is_expired() =>
            {
                let detail = jwt::expired_detail(validity.valid_until);
                Err(Reason::Unauthenticated.error(detail).as_token_error())
            }
            _ => Ok(()),
        }
    }
}

impl PresentedCertificate {
    /// Verifies the certificate again with the listener's current trust roots. Without any it is not trusted.
    ///
    /// # Errors
    /// [`Reason::Unauthenticated`] if the certificate is no longer trusted.
    pub(crate) fn prove(
        &self,
        trust: Option<&TrustStore>,
        disconnect_expired: bool,
    ) -> Result<(), Error> {
        let Some(trust) = trust else {
            return Err(certificate_error(&PeerRejected::UnknownIssuer));
        };
        let seconds = if disconnect_expired {
            now()
        } else {
            now().min(self.not_after)
        };
        let at = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let result = verify_peer(Some(&self.chain), Purpose::Client, at, trust, &none_revoked);
        result
            .map(drop)
            .map_err(|rejection| certificate_error(&rejection))
    }
}

/// Credentials of a connection, and authentication results that its requests share.
#[derive(Debug)]
pub(crate) struct ConnectionCredentials {
    /// The client, if the connection identifies it (certificate, unix socket), or the reason why its certificate was rejected.
    pub(crate) client: Result<Option<ClientIdentity>, PeerRejected>,
    pub(crate) last_token: TokenCache,
    anonymous_client: OnceLock<ClientIdentity>,
}

impl ConnectionCredentials {
    pub(crate) fn new(client: Result<Option<ClientIdentity>, PeerRejected>) -> Self {
        Self {
            client,
            last_token: TokenCache::default(),
            anonymous_client: OnceLock::new(),
        }
    }

    /// Whether a token may identify the client. A certificate that proves nothing is ignored then: one of an unknown CA may be for the
    /// upstream, and the client could leave it out as well.
    pub(crate) fn accept_token(&self) -> bool {
        match &self.client {
            Ok(client) => client.is_none(),
            Err(rejection) => rejection.is_unverified(),
        }
    }

    /// Returns the error of a token with a note on the certificate that was ignored.
    fn name_certificate(&self, mut error: Error) -> Error {
        if let (Err(rejection), Reason::Unauthenticated) = (&self.client, error.reason) {
            let ignored = rejection.to_string();
            let ignored = ignored.replacen("the certificate", "the client's certificate", 1);
            error.detail = format!("{}; {ignored}", error.detail).into();
        }
        error
    }

    /// Returns the anonymous client of this connection.
    fn nobody(&self, peer: RemoteAddr, limits: &Limits) -> ClientIdentity {
        let new_client = || {
            let name = peer
                .ip()
                .map_or_else(|| "unix".to_owned(), |ip| ip.to_string());
            ClientIdentity::new(&name, Vec::new(), AuthMethod::Anonymous, limits)
        };
        self.anonymous_client.get_or_init(new_client).clone()
    }
}

/// Parts of the gateway that authentication uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AuthnContext<'a> {
    pub(crate) limits: &'a Limits,
    /// Cache of the token reviews by the cluster's API, if the gateway has one.
    pub(crate) reviews: Option<&'a ReviewCache>,
    /// Maximum time of a wait for the missing keys of an issuer.
    pub(crate) bound: Duration,
}

/// Authentication methods that a listener accepts.
#[derive(Debug, Default)]
pub struct Authenticator {
    /// Bearer tokens, if the listener accepts them.
    pub tokens: Option<StaticTokens>,
    /// JWTs, if the listener accepts them.
    pub jwts: Option<JwtAuthenticator>,
    /// Tokens that the cluster's API reviews, if the listener accepts them.
    pub review: Option<TokenReview>,
    /// Whether the token may also be the password of Basic authentication (RFC 7617), which is all that many clients of proxies
    /// can send.
    pub accepts_basic: bool,
    /// Whether certificates are requested; used in the message of a refusal.
    pub accepts_certificates: bool,
    /// Whether anonymous clients are served.
    pub allows_anonymous: bool,
    /// The networks from which anonymous clients are served; empty means all.
    pub anonymous_from: Vec<IpNet>,
    /// The node ports that anonymous clients may reach; empty means all.
    pub anonymous_ports: Vec<u16>,
}

impl Authenticator {
    /// Identifies the client that sends this request to this node port. Waits only for missing keys of an issuer and for a token
    /// review of the cluster's API.
    ///
    /// # Errors
    /// [`Reason::Unauthenticated`] with the method that was tried, or [`Reason::DependencyUnavailable`] if the client cannot be
    /// identified now.
    pub(crate) async fn identify(
        &self,
        (credentials, peer): (&ConnectionCredentials, RemoteAddr),
        (credential, expired): (Option<&HeaderValue>, Expired<'_>),
        port: Option<u16>,
        context: AuthnContext<'_>,
    ) -> Result<ClientIdentity, Error> {
        if credentials.accept_token()
            && self.accepts_bearer_tokens()
            && let Some(presented) = credential
        {
            let presented = (presented.as_bytes(), expired);
            let identified = bearer::identify(self, presented, (credentials, peer), context).await;
            return identified.map_err(|error| credentials.name_certificate(error));
        }
        match &credentials.client {
            Ok(Some(client)) => return Ok(client.clone()),
            // A client whose certificate was rejected is never anonymous.
            Err(rejection) => return Err(certificate_error(rejection)),
            Ok(None) => {}
        }
        if self.admits_anonymous(peer, port) {
            return Ok(credentials.nobody(peer, context.limits));
        }
        Err(self.missing_credentials())
    }

    /// Returns the error of a client without credentials.
    pub(crate) fn missing_credentials(&self) -> Error {
        Reason::Unauthenticated.error(self.missing_credentials_detail())
    }

    /// Whether this listener accepts a token in `Authorization`.
    pub fn accepts_bearer_tokens(&self) -> bool {
        self.tokens.is_some() || self.jwts.is_some() || self.review.is_some()
    }

    fn admits_anonymous(&self, peer: RemoteAddr, port: Option<u16>) -> bool {
        let is_listed_source = |ip| self.anonymous_from.iter().any(|net| net.contains(&ip));
        let source_allowed =
            self.anonymous_from.is_empty() || peer.ip().is_some_and(is_listed_source);
        self.allows_anonymous && source_allowed && self.serves_anonymously(port)
    }

    /// Whether anonymous clients may reach this node port. `None` is a service, of which only the edge knows the port.
    pub(crate) fn serves_anonymously(&self, port: Option<u16>) -> bool {
        let is_listed_port = |port| self.anonymous_ports.contains(&port);
        self.anonymous_ports.is_empty() || port.is_some_and(is_listed_port)
    }

    fn missing_credentials_detail(&self) -> &'static str {
        match (self.accepts_certificates, self.accepts_bearer_tokens()) {
            (true, true) => {
                "no credentials were presented; this listener requires a client certificate or a bearer token \
                 (a client does not send a certificate from a CA that this listener does not list)"
            }
            (true, false) => {
                "no credentials were presented; this listener requires a client certificate \
                 (a client does not send a certificate from a CA that this listener does not list)"
            }
            (false, true) => "no credentials were presented; this listener requires a bearer token",
            (false, false) => "this listener does not serve clients from this address",
        }
    }
}

/// Returns the error for a client whose certificate was rejected. Further details are for the log.
fn certificate_error(rejection: &PeerRejected) -> Error {
    let detail = match rejection {
        PeerRejected::Identity(_) | PeerRejected::Invalid(_) => "not readable".to_owned(),
        PeerRejected::Revoked(_) => "revoked".to_owned(),
        PeerRejected::IssuerPeriod(_) => "an issuer is not valid now".to_owned(),
        other => {
            let said = other.to_string().replacen("the certificate's", "its", 1);
            said.strip_prefix("the certificate ")
                .unwrap_or(&said)
                .to_owned()
        }
    };
    Reason::Unauthenticated.with_source(format!("certificate: {detail}"), rejection.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rejected_certificate_gets_its_reason_and_no_detail() {
        use causeway_certs::verify::Purpose;
        let wanted = Purpose::Client;
        for (refused, says) in [
            (
                PeerRejected::Expired { not_after: 0 },
                "certificate: expired at 1970-01-01",
            ),
            (
                PeerRejected::UnknownIssuer,
                "certificate: is not issued by a CA that is trusted here",
            ),
            (
                PeerRejected::WrongPurpose { wanted },
                "certificate: its purpose does not permit use as client",
            ),
            (PeerRejected::Revoked("ann".into()), "certificate: revoked"),
            (
                PeerRejected::Invalid("inner workings".into()),
                "certificate: not readable",
            ),
        ] {
            let error = certificate_error(&refused);
            assert!(error.detail.starts_with(says), "{error}");
            assert!(!error.is_token_error);
            let cause = error.cause.unwrap().to_string();
            assert_eq!(cause, refused.to_string(), "the log has all of it");
        }
    }

    #[test]
    fn the_credential_for_a_proxy_is_not_the_one_for_the_upstream() {
        let fields = |names: &[http::HeaderName]| {
            let value = |name: &http::HeaderName| HeaderValue::from_str(name.as_str()).unwrap();
            let fields = names.iter().map(|name| (name.clone(), value(name)));
            fields.collect::<HeaderMap>()
        };
        let both = fields(&[AUTHORIZATION, PROXY_AUTHORIZATION]);
        let own = fields(&[AUTHORIZATION]);
        for (is_proxy, method, fields, expected) in [
            (false, Method::GET, &both, Some("authorization")),
            (true, Method::GET, &both, Some("proxy-authorization")),
            (true, Method::CONNECT, &both, Some("proxy-authorization")),
            (true, Method::CONNECT, &own, Some("authorization")),
            (true, Method::GET, &own, None),
        ] {
            let found = credential(is_proxy, &method, fields);
            assert_eq!(found.map(|value| value.to_str().unwrap()), expected);
        }
    }

    #[test]
    fn anonymous_clients_need_a_listed_network_and_port() {
        let listener = Authenticator {
            allows_anonymous: true,
            anonymous_from: vec!["10.0.0.0/8".parse().unwrap()],
            anonymous_ports: vec![9100],
            ..Authenticator::default()
        };
        let from = |text: &str| RemoteAddr::Tcp(text.parse().unwrap());
        assert!(listener.admits_anonymous(from("10.1.2.3:5"), Some(9100)));
        assert!(listener.admits_anonymous(from("[::ffff:10.1.2.3]:5"), Some(9100)));
        assert!(!listener.admits_anonymous(from("10.1.2.3:5"), Some(10250)));
        assert!(!listener.admits_anonymous(from("10.1.2.3:5"), None));
        assert!(!listener.admits_anonymous(from("192.168.1.1:5"), Some(9100)));
        assert!(!listener.admits_anonymous(RemoteAddr::Unix(0), Some(9100)));
        assert!(!Authenticator::default().admits_anonymous(from("127.0.0.1:5"), None));
    }
}
