//! Issuer of JWTs in a listener's configuration: its name, the audiences of its tokens, and its verification keys.
//!
//! Tokens must be signed with the private key of an asymmetric key pair. A shared secret, or no signature, cannot be configured.
//! Keys come from a file or over HTTPS; plain HTTP is allowed on loopback only.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use causeway_config::DurationStr;
use http::Uri;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Issuer whose tokens a listener accepts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Jwt {
    /// Exact value of `iss` in its tokens.
    pub issuer: String,
    /// Accepted audiences: `aud` of a token must contain one of these.
    pub audiences: Vec<String>,
    /// Its keys (JWKS): a file, or an `https://` URL; `http://` on loopback only.
    pub jwks: Jwks,
    /// CAs that may sign the URL's certificate (PEM file). Without this key: those of the system.
    #[serde(default)]
    pub jwks_ca: Option<PathBuf>,
    /// Interval at which keys are fetched from the URL. A token with an unknown key id causes an earlier fetch.
    #[serde(default = "refresh", with = "DurationStr")]
    pub jwks_refresh: Duration,
    /// Maximum age of keys that cannot be fetched again.
    #[serde(default = "max_age", with = "DurationStr")]
    pub jwks_max_age: Duration,
    /// Claim that holds the client's name.
    #[serde(default = "sub")]
    pub username_claim: String,
    /// Prefix of that name. Without this key names of Kubernetes (`system:…`) are refused; `""` accepts them as they are.
    #[serde(default)]
    pub username_prefix: Option<String>,
    /// Claim that holds the client's groups: a list, or one.
    #[serde(default = "groups")]
    pub groups_claim: String,
    /// Prefix of groups, as `username_prefix` is for names.
    #[serde(default)]
    pub groups_prefix: Option<String>,
    /// Accepted signature algorithms.
    #[serde(default = "algorithms")]
    pub algorithms: Vec<Algorithm>,
}

impl Jwt {
    /// Returns an issuer with defaults for all other settings.
    pub fn new(issuer: impl Into<String>, audience: impl Into<String>, jwks: Jwks) -> Self {
        Self {
            issuer: issuer.into(),
            audiences: vec![audience.into()],
            jwks,
            jwks_ca: None,
            jwks_refresh: refresh(),
            jwks_max_age: max_age(),
            username_claim: sub(),
            username_prefix: None,
            groups_claim: groups(),
            groups_prefix: None,
            algorithms: algorithms(),
        }
    }

    /// Returns the files that the issuer's configuration names.
    pub fn files(&self) -> impl Iterator<Item = &PathBuf> {
        let keys = match &self.jwks {
            Jwks::File(path) => Some(path),
            Jwks::Url(_) => None,
        };
        keys.into_iter().chain(&self.jwks_ca)
    }
}

/// Default of `jwks_refresh`. An issuer that rotates keys announces a key for longer than this before it signs with that key.
fn refresh() -> Duration {
    Duration::from_mins(10)
}

/// Default of `jwks_max_age`. An issuer's outage over a night should not lock out clients, and a withdrawn key should not remain
/// valid for long.
fn max_age() -> Duration {
    Duration::from_hours(24)
}

fn sub() -> String {
    "sub".to_owned()
}

fn groups() -> String {
    "groups".to_owned()
}

fn algorithms() -> Vec<Algorithm> {
    Algorithm::ALL.to_vec()
}

/// Source of an issuer's keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Jwks {
    /// A file.
    File(PathBuf),
    /// An `http` or `https` URL.
    Url(Uri),
}

impl fmt::Display for Jwks {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(out),
            Self::Url(url) => url.fmt(out),
        }
    }
}

impl FromStr for Jwks {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((scheme, _)) = text.split_once("://") else {
            return if text.is_empty() {
                Err("is empty; write a file or an https:// URL".to_owned())
            } else {
                Ok(Self::File(text.into()))
            };
        };
        let invalid = |why: &str| Err(format!("\"{text}\" {why}"));
        let Ok(url) = text.parse::<Uri>() else {
            return invalid("is not a valid URL; write https://host/path");
        };
        let authority = url.authority().map_or("", |authority| authority.as_str());
        // The message omits the text because it contains a password.
        if authority.contains('@') {
            return Err("the URL of the keys must not contain a user or a password".to_owned());
        }
        match (scheme.to_ascii_lowercase().as_str(), url.host()) {
            (_, None | Some("")) => invalid("contains no host"),
            ("https", Some(_)) => Ok(Self::Url(url)),
            ("http", Some(host)) if is_loopback(host) => Ok(Self::Url(url)),
            ("http", Some(_)) => invalid(
                "would fetch keys without encryption, so an attacker could change them; write https://",
            ),
            _ => invalid("is neither a file nor a URL; write https://host/path"),
        }
    }
}

/// Whether a URL's host is this machine.
pub(super) fn is_loopback(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let ip = host.parse::<IpAddr>();
    host.eq_ignore_ascii_case("localhost") || ip.is_ok_and(|ip| ip.to_canonical().is_loopback())
}

impl Serialize for Jwks {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Jwks {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(de::Error::custom)
    }
}

impl schemars::JsonSchema for Jwks {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Jwks".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string" })
    }
}

/// Signature algorithm of a token (RFC 7518 §3.1, RFC 8037): by a private key, never by a shared secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[allow(missing_docs, reason = "the RFC's names")]
pub enum Algorithm {
    RS256,
    RS384,
    RS512,
    PS256,
    PS384,
    PS512,
    ES256,
    ES384,
    EdDSA,
}

impl Algorithm {
    /// All algorithms.
    pub const ALL: [Self; 9] = [
        Self::RS256,
        Self::RS384,
        Self::RS512,
        Self::PS256,
        Self::PS384,
        Self::PS512,
        Self::ES256,
        Self::ES384,
        Self::EdDSA,
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_an_issuer_count_as_much_as_the_configuration() {
        let mut listener = crate::config::Listener::https();
        let keys = Jwks::File("/keys.json".into());
        let url = "https://id.example.com/keys".parse().unwrap();
        listener.client_auth.jwt = vec![
            Jwt::new("one", "a", keys),
            Jwt {
                jwks_ca: Some("/ca.pem".into()),
                ..Jwt::new("two", "a", url)
            },
        ];
        let config = crate::config::Config {
            listeners: vec![listener],
            ..Default::default()
        };
        let files = config.files();
        assert_eq!(files, [PathBuf::from("/keys.json"), "/ca.pem".into()]);
    }

    #[test]
    fn keys_come_from_file_or_tls_and_plain_http_only_from_loopback() {
        for good in [
            "/etc/keys.json",
            "keys.json",
            "https://id.example.com/keys?p=one",
            "HTTPS://id.example.com",
            "http://127.0.0.1:8080/keys",
            "http://[::1]/keys",
            "http://localhost/keys",
        ] {
            let parsed: Jwks = good.parse().unwrap();
            let file = !good.contains("://");
            assert_eq!(matches!(parsed, Jwks::File(_)), file, "{good}");
        }
        for (bad, says) in [
            ("http://id.example.com/keys", "without encryption"),
            ("http://127.0.0.1.example.com/", "without encryption"),
            ("ftp://id.example.com/keys", "neither a file nor a URL"),
            ("https:///keys", "URL"),
            ("https://ann:secret@id.example.com/", "user or a password"),
            ("", "is empty"),
        ] {
            let refused = bad.parse::<Jwks>().unwrap_err();
            assert!(refused.contains(says), "{bad}: {refused}");
            assert!(!refused.contains("secret"), "{refused}");
        }
    }
}
