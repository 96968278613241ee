//! Who calls: by certificate, by bearer token, by the mode of a unix socket, or nobody in so many words.
//!
//! A front takes only what its configuration names. A certificate and a unix peer are known once a
//! connection, a token at each request. Nobody is served only where the front says `anonymous: true`, and
//! then only from the networks and for the ports that it names. A wrong credential is never "nobody".

use crate::{
    error::{Error, Reason},
    proxy::{Shared, front::Connection, limits::Count},
};
use causeway_certs::CallerTokens;
use causeway_tunnel::listener::Peer;
use http::{HeaderMap, header::AUTHORIZATION};
use ipnet::IpNet;
use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

/// What the names of a unix socket's callers begin with.
pub(crate) const UID: &str = "uid:";

/// How a caller was identified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// A client certificate.
    Certificate,
    /// A bearer token.
    Token,
    /// The permission to connect to a unix socket (0600).
    Unix,
    /// Not at all: the front serves anybody.
    Anonymous,
}

impl Method {
    /// The word, for the log.
    pub fn word(self) -> &'static str {
        match self {
            Self::Certificate => "certificate",
            Self::Token => "token",
            Self::Unix => "unix",
            Self::Anonymous => "anonymous",
        }
    }
}

/// Whoever connects to a front, once it is known who that is.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The name: a certificate's common name or URI, a token's name, a user id, or an address.
    pub name: Arc<str>,
    /// Groups: a certificate's organizations, or those of the token.
    pub groups: Arc<[String]>,
    /// The URIs in its certificate.
    pub uris: Arc<[String]>,
    /// How it is known.
    pub method: Method,
    /// Its streams that are open.
    pub open: Count,
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl Caller {
    /// A caller with its count of open streams.
    pub fn new(name: &str, groups: Vec<String>, method: Method, shared: &Shared) -> Self {
        let name: Arc<str> = name.into();
        Self {
            open: shared.limits.caller(&name),
            name,
            groups: groups.into(),
            uris: Arc::default(),
            method,
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
            method: Method::Certificate,
            open: Count::default(),
        }
    }
}

/// What a front takes for an identity.
#[derive(Debug, Default)]
pub struct Authentication {
    /// Bearer tokens, if the front takes them.
    pub tokens: Option<CallerTokens>,
    /// Whether certificates are asked for (for the sentence of a refusal).
    pub certificates: bool,
    /// Whether nobody is served.
    pub anonymous: bool,
    /// The networks that nobody may come from; empty is all.
    pub anonymous_from: Vec<IpNet>,
    /// The node ports that nobody may reach; empty is all.
    pub anonymous_ports: Vec<u16>,
}

/// The caller that the last token on a connection named, so that a kept-alive connection asks once.
pub(crate) type LastToken = Mutex<Option<(Vec<u8>, Caller)>>;

impl Authentication {
    /// Who sends this request to this node port.
    ///
    /// # Errors
    /// [`Reason::Unauthenticated`], saying what was tried.
    pub fn identify(
        &self,
        connection: &Connection,
        fields: &HeaderMap,
        port: Option<u16>,
        shared: &Shared,
    ) -> Result<Caller, Error> {
        if let Some(caller) = &connection.caller {
            return Ok(caller.clone());
        }
        if let Some(tokens) = &self.tokens
            && let Some(presented) = fields.get(AUTHORIZATION)
        {
            return bearer(tokens, presented.as_bytes(), connection, shared);
        }
        if self.admits_nobody(connection.peer, port) {
            return Ok(connection.nobody(shared));
        }
        Err(Reason::Unauthenticated.says(self.wants()))
    }

    fn admits_nobody(&self, peer: Peer, port: Option<u16>) -> bool {
        let from = |ip| self.anonymous_from.iter().any(|net| net.contains(&ip));
        let source = self.anonymous_from.is_empty() || peer.ip().is_some_and(from);
        let listed = |port| self.anonymous_ports.contains(&port);
        let port = self.anonymous_ports.is_empty() || port.is_some_and(listed);
        self.anonymous && source && port
    }

    fn wants(&self) -> &'static str {
        match (self.certificates, self.tokens.is_some()) {
            (true, true) => {
                "neither a client certificate nor a bearer token was sent; this front wants one of them"
            }
            (true, false) => "no client certificate was sent; this front wants one",
            (false, true) => "no bearer token was sent; this front wants one",
            (false, false) => "this front serves nobody from here",
        }
    }
}

fn bearer(
    tokens: &CallerTokens,
    presented: &[u8],
    connection: &Connection,
    shared: &Shared,
) -> Result<Caller, Error> {
    let mut last = connection
        .last_token
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    if let Some((known, caller)) = last.as_ref()
        && known == presented
    {
        return Ok(caller.clone());
    }
    let text = std::str::from_utf8(presented).unwrap_or_default();
    let token = match text.split_once(' ') {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => token.trim(),
        _ => {
            return Err(
                Reason::Unauthenticated.says("the Authorization field holds no bearer token")
            );
        }
    };
    let Some(found) = tokens.lookup(token) else {
        return Err(Reason::Unauthenticated.says("the bearer token is not known here"));
    };
    let caller = Caller::new(&found.name, found.groups.clone(), Method::Token, shared);
    *last = Some((presented.to_vec(), caller.clone()));
    Ok(caller)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_served_only_from_the_networks_and_for_the_ports_that_are_named() {
        let front = Authentication {
            anonymous: true,
            anonymous_from: vec!["10.0.0.0/8".parse().unwrap()],
            anonymous_ports: vec![9100],
            ..Authentication::default()
        };
        let from = |text: &str| Peer::Tcp(text.parse().unwrap());
        assert!(front.admits_nobody(from("10.1.2.3:5"), Some(9100)));
        assert!(front.admits_nobody(from("[::ffff:10.1.2.3]:5"), Some(9100)));
        assert!(!front.admits_nobody(from("10.1.2.3:5"), Some(10250)));
        assert!(!front.admits_nobody(from("10.1.2.3:5"), None));
        assert!(!front.admits_nobody(from("192.168.1.1:5"), Some(9100)));
        assert!(!front.admits_nobody(Peer::Unix(0), Some(9100)));
        assert!(!Authentication::default().admits_nobody(from("127.0.0.1:5"), None));
    }
}
