//! Checks of a listener's issuers of JWTs, and of the fields that describe the client to upstreams.
//!
//! A key that has no effect is a fault: an issuer on a listener that cannot accept a token, or a field that the listener cannot
//! set.

use std::collections::HashSet;
use std::time::Duration;

use super::{ListenerValidator, NOT_READ};
use crate::config::{
    Jwks, Jwt, ListenAddr, ListenerProtocol,
    identity_headers::{check_prefix, parse_field_name},
};

/// Minimum of `jwks_refresh`. A token with an unknown key id causes a fetch this soon in any case.
const SHORTEST_REFRESH: Duration = Duration::from_secs(10);
/// Prefix of names that only the kernel provides.
const UID: &str = "uid:";

impl ListenerValidator<'_> {
    pub(super) fn check_issuers(&mut self) {
        let listener = self.listener;
        if listener.protocol.is_opaque() && !listener.client_auth.jwt.is_empty() {
            self.add(
                "client_auth.jwt",
                "a plain TCP connection cannot carry a token; use client_auth.client_ca",
            );
        }
        if matches!(listener.listen, ListenAddr::Unix(_)) && !listener.client_auth.jwt.is_empty() {
            let message = "clients of a Unix socket are identified by the kernel and send no token; remove this key";
            self.add("client_auth.jwt", message);
        }
        let mut known = HashSet::new();
        for (index, jwt) in listener.client_auth.jwt.iter().enumerate() {
            let key = format!("client_auth.jwt[{index}]");
            if !known.insert(jwt.issuer.as_str()) {
                let message = format!(
                    "\"{}\" is listed earlier as an issuer of this listener; list all of its audiences in one entry",
                    jwt.issuer
                );
                self.add(&format!("{key}.issuer"), message);
            }
            self.check_issuer(jwt, &key);
            self.check_keys(jwt, &key);
        }
    }

    fn check_issuer(&mut self, jwt: &Jwt, key: &str) {
        if jwt.issuer.is_empty() {
            self.add(
                &format!("{key}.issuer"),
                "is empty; write the value of the tokens' iss claim",
            );
        }
        if jwt.audiences.is_empty() || jwt.audiences.iter().any(String::is_empty) {
            self.add(
                &format!("{key}.audiences"),
                "is empty; without an audience, the listener would accept a token for any other service",
            );
        }
        if jwt.algorithms.is_empty() {
            self.add(
                &format!("{key}.algorithms"),
                "is empty, so the listener would accept no token; remove this key to allow all safe algorithms",
            );
        }
        for (name, claim) in [
            ("username_claim", &jwt.username_claim),
            ("groups_claim", &jwt.groups_claim),
        ] {
            if claim.is_empty() {
                self.add(
                    &format!("{key}.{name}"),
                    "is empty; write the name of a claim",
                );
            }
        }
        for (name, prefix) in [
            ("username_prefix", &jwt.username_prefix),
            ("groups_prefix", &jwt.groups_prefix),
        ] {
            if prefix
                .as_ref()
                .is_some_and(|prefix| prefix.starts_with(UID))
            {
                let message =
                    "\"uid:\" is the prefix for clients of Unix sockets; write another prefix";
                self.add(&format!("{key}.{name}"), message);
            }
        }
    }

    fn check_keys(&mut self, jwt: &Jwt, key: &str) {
        match &jwt.jwks {
            Jwks::File(file) => self
                .faults
                .check_file(format!("{}.{key}.jwks", self.path), file),
            Jwks::Url(url) => {
                if jwt.jwks_ca.is_some() && url.scheme_str() == Some("http") {
                    let message =
                        "an http:// URL uses no certificate; remove this key or write https://";
                    self.add(&format!("{key}.jwks_ca"), message);
                }
                if jwt.jwks_refresh < SHORTEST_REFRESH {
                    self.add(&format!("{key}.jwks_refresh"), "is at least 10s");
                }
                if jwt.jwks_max_age < jwt.jwks_refresh {
                    let message = "is shorter than jwks_refresh, so the keys would expire before the next refresh";
                    self.add(&format!("{key}.jwks_max_age"), message);
                }
            }
        }
        match (&jwt.jwks_ca, &jwt.jwks) {
            (Some(_), Jwks::File(_)) => self.add(
                &format!("{key}.jwks_ca"),
                "applies only if jwks is a URL; remove this key",
            ),
            (Some(file), Jwks::Url(_)) => {
                self.faults
                    .check_file(format!("{}.{key}.jwks_ca", self.path), file);
            }
            (None, _) => {}
        }
    }

    pub(super) fn check_identity_headers(&mut self) {
        let listener = self.listener;
        let mut known = HashSet::new();
        for (key, name) in listener.identity_headers.field_names() {
            let key = format!("identity_headers.{key}");
            match (listener.protocol, parse_field_name(name)) {
                (ListenerProtocol::Tcp | ListenerProtocol::Passthrough, _) => {
                    self.add(&key, NOT_READ);
                }
                (_, Err(fault)) => self.add(&key, fault),
                (_, Ok(name)) if !known.insert(name.clone()) => {
                    self.add(
                        &key,
                        "is also the name of the other field; use two different names",
                    );
                }
                _ => {}
            }
        }
        let prefixes = listener.identity_headers.strip_prefixes.iter().flatten();
        for (index, prefix) in prefixes.enumerate() {
            let key = format!("identity_headers.strip_prefixes[{index}]");
            match (listener.protocol, check_prefix(prefix)) {
                (ListenerProtocol::Tcp | ListenerProtocol::Passthrough, _) => {
                    self.add(&key, NOT_READ);
                }
                (_, Err(fault)) => self.add(&key, fault),
                _ => {}
            }
        }
    }
}
