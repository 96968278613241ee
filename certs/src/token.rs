//! Join tokens: the credential with which a new edge may enrol, once as one node, or as one of a limited number that match a
//! pattern.
//!
//! `JoinToken` is the text that the operator passes on, `cwj1.<id>.<secret>.<sha256 of the CA>`. The last part lets the edge
//! recognise the gateway before it has any root. `TokenStore` stores the other half, with a hash instead of the secret. The
//! one rule: a token is spent on disk before any peer receives the information that it was valid.

mod store;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use causeway_tls::{Fingerprint, NodeName, NodePattern};
use serde::{Deserialize, Deserializer, Serialize};
use thiserror::Error;

pub(crate) use store::TOKENS_FILE;
pub use store::{Joining, NodeStatus, RepeatCheck, TokenRejected, TokenStore};

use crate::secret::{self, random_secret};
use crate::store::atomic_file::OtherFields;
use causeway_config::Secret;

/// Prefix of all tokens: their kind and version.
const PREFIX: &str = "cwj1";
/// Number of bytes of an id, enough to avoid collisions in one data directory.
const ID_BYTES: usize = 9;
/// Number of bytes of a secret.
const SECRET_BYTES: usize = 32;

/// Error that makes a text unusable as a join token.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TokenError {
    /// The text is empty.
    #[error("the join token is empty")]
    Empty,
    /// The text is not a join token, or is a token of another version.
    #[error("this is not a join token: it should begin with '{PREFIX}.'")]
    Prefix,
    /// A part is missing, for example because only half of the token was copied.
    #[error("the join token is incomplete: it has {found} of 4 parts")]
    Truncated {
        /// Number of its parts.
        found: usize,
    },
    /// The text is longer than a token.
    #[error("the join token has more than 4 parts")]
    TooLong,
    /// A part is malformed.
    #[error("the join token's {part} is damaged: copy the whole token again")]
    Damaged {
        /// `id`, `secret` or `CA hash`.
        part: &'static str,
    },
}

/// A join token as the edge holds it. `Debug` does not show the secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// Id of the token; not secret.
    pub id: String,
    /// Secret that proves the possession of the token.
    pub secret: Secret,
    /// Fingerprint of the gateway's root.
    pub root: Fingerprint,
}

impl JoinToken {
    /// Generates a token for a gateway with this root.
    pub(crate) fn generate(root: Fingerprint) -> Self {
        let mut id = secret::random_bytes::<ID_BYTES>();
        // Begins with a letter, because `token revoke` would parse a leading `-` as a flag.
        id[0] &= 0x7f;
        Self {
            id: secret::base64url(&id),
            secret: random_secret(),
            root,
        }
    }

    /// Parses a token. White space around it is ignored.
    pub fn parse(text: &str) -> Result<Self, TokenError> {
        let text = text.trim();
        if text.is_empty() {
            return Err(TokenError::Empty);
        }
        let mut parts = text.split('.');
        if parts.next() != Some(PREFIX) {
            return Err(TokenError::Prefix);
        }
        let (id, secret, root) = match (parts.next(), parts.next(), parts.next(), parts.next()) {
            (Some(id), Some(secret), Some(root), None) => (id, secret, root),
            (_, _, _, Some(_)) => return Err(TokenError::TooLong),
            (id, secret, _, _) => {
                let found = 1 + usize::from(id.is_some()) + usize::from(secret.is_some());
                return Err(TokenError::Truncated { found });
            }
        };
        decode::<ID_BYTES>(id, "id")?;
        decode::<SECRET_BYTES>(secret, "secret")?;
        let root = Fingerprint::from_bytes(decode(root, "CA hash")?);
        Ok(Self {
            id: id.to_owned(),
            secret: Secret::new(secret),
            root,
        })
    }

    /// Returns the text for the edge. This is the only way to print the secret.
    pub fn text(&self) -> Secret {
        let root = secret::base64url(self.root.as_bytes());
        Secret::new(format!(
            "{PREFIX}.{}.{}.{root}",
            self.id,
            self.secret.expose()
        ))
    }
}

impl FromStr for JoinToken {
    type Err = TokenError;
    fn from_str(text: &str) -> Result<Self, TokenError> {
        Self::parse(text)
    }
}

impl fmt::Display for JoinToken {
    /// Formats the token without its secret.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "join token {}", self.id)
    }
}

fn decode<const N: usize>(text: &str, part: &'static str) -> Result<[u8; N], TokenError> {
    secret::from_base64url(text)
        .and_then(|bytes| bytes.try_into().ok())
        .ok_or(TokenError::Damaged { part })
}

/// Attributes of a node that joining by a token confirms.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeAttributes {
    /// Addresses by which clients name the node.
    pub addresses: Vec<IpAddr>,
    /// The pool that the node belongs to.
    pub pool: Option<String>,
    /// Labels of the node.
    pub labels: BTreeMap<String, String>,
}

/// Record of a join token at the gateway. Times are in Unix seconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRecord {
    /// Id of the token.
    pub id: String,
    /// SHA-256 of the secret.
    pub hash: Fingerprint,
    /// The nodes that may join with it.
    #[serde(alias = "node")]
    pub nodes: NodePattern,
    /// Addresses that the node may serve.
    pub addresses: Vec<IpAddr>,
    /// The pool that the node belongs to.
    pub pool: Option<String>,
    /// Labels of the node.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Time when the token was made.
    pub created: u64,
    /// Time from which the token is no longer accepted.
    pub expires: u64,
    /// Number of nodes that may join with the token.
    #[serde(default = "once")]
    pub uses: u32,
    /// Nodes that have joined with the token.
    #[serde(default, deserialize_with = "joined")]
    pub used: Vec<JoinRecord>,
    /// Time of the revocation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<u64>,
    /// The root that the token carries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<Fingerprint>,
    /// Fields of later versions.
    #[serde(flatten)]
    pub other: OtherFields,
}

/// A node that joined with a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinRecord {
    /// Name of the node, if it was recorded.
    pub node: Option<NodeName>,
    /// Time of the join, in Unix seconds.
    pub at: u64,
    /// SHA-256 of the node's public key, by which a repeated request is recognised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<Fingerprint>,
    /// Fields of later versions.
    #[serde(flatten)]
    pub other: OtherFields,
}

fn once() -> u32 {
    1
}

/// Reads the joins of a token. Older versions only recorded the time of the single join.
fn joined<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<JoinRecord>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Read {
        All(Vec<JoinRecord>),
        One(Option<u64>),
    }
    Ok(match Read::deserialize(deserializer)? {
        Read::All(all) => all,
        Read::One(at) => at
            .map(|at| JoinRecord {
                node: None,
                at,
                key: None,
                other: OtherFields::new(),
            })
            .into_iter()
            .collect(),
    })
}

#[cfg(test)]
mod tests;
