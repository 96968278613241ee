//! Names: of nodes, of trust domains, of servers and of clients.
//!
//! Owns `NodeName`, `TrustDomain` and `HostName`, and the rule for names of clients. Every name from outside is parsed here
//! once. From then on it is lower-case, short and free of special characters. Never decides who owns a name.

use std::borrow::Borrow;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Longest DNS name (RFC 1035, section 2.3.4, without the root's dot).
const MAX_NAME: usize = 253;
/// Longest label of a DNS name (RFC 1035, section 2.3.4).
const MAX_LABEL: usize = 63;
/// Longest common name (RFC 5280, ub-common-name), and so the longest name of a client.
const MAX_CLIENT: usize = 64;

/// Error that refuses a name, or a certificate's name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NameError {
    /// The name is not a DNS-1123 subdomain.
    #[error("'{name}' is not a valid name: {why}")]
    InvalidDnsName {
        /// The rejected name.
        name: String,
        /// Description of the fault.
        why: &'static str,
    },
    /// The word is not usable as the name or group of a client.
    #[error("'{word}' is not a valid client or group: {why}")]
    InvalidClientName {
        /// The rejected word.
        word: String,
        /// Description of the fault.
        why: &'static str,
    },
    /// The bytes are not a certificate.
    #[error("{0}")]
    Certificate(String),
    /// The certificate carries no identity of ours, or more than one.
    #[error("the certificate carries {count} identities (spiffe URIs) instead of one")]
    NotOneIdentity {
        /// Number of identities that it carries.
        count: usize,
    },
    /// The certificate's one identity is not one of this trust domain.
    #[error("the certificate's identity '{uri}' is not of trust domain {domain}")]
    UnknownIdentity {
        /// URI in the certificate.
        uri: String,
        /// Expected trust domain.
        domain: TrustDomain,
    },
}

/// Returns the lower-case form of `text` if it is a DNS-1123 subdomain.
fn parse_dns(text: &str) -> Result<Arc<str>, NameError> {
    let invalid = |why| NameError::InvalidDnsName {
        name: text.chars().take(MAX_NAME).collect(),
        why,
    };
    if text.is_empty() {
        return Err(invalid("it is empty"));
    }
    if text.len() > MAX_NAME {
        return Err(invalid("it is longer than 253 characters"));
    }
    for label in text.split('.') {
        if label.is_empty() {
            return Err(invalid("a part between dots is empty"));
        }
        if label.len() > MAX_LABEL {
            return Err(invalid("a part between dots is longer than 63 characters"));
        }
        if !label
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        {
            return Err(invalid("only letters, digits, '-' and '.' are allowed"));
        }
        if label.starts_with('-') || label.ends_with('-') {
            return Err(invalid("no part may begin or end with '-'"));
        }
    }
    Ok(text.to_ascii_lowercase().into())
}

macro_rules! dns_name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks and lower-cases a name.
            pub fn parse(text: &str) -> Result<Self, NameError> {
                parse_dns(text).map(Self)
            }

            /// Returns the name, in lower case.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = NameError;
            fn from_str(text: &str) -> Result<Self, NameError> {
                Self::parse(text)
            }
        }

        impl TryFrom<&str> for $name {
            type Error = NameError;
            fn try_from(text: &str) -> Result<Self, NameError> {
                Self::parse(text)
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;
            fn try_from(text: String) -> Result<Self, NameError> {
                Self::parse(&text)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.as_str().to_owned()
            }
        }

        /// Shares the text.
        impl From<&$name> for Arc<str> {
            fn from(name: &$name) -> Self {
                name.0.clone()
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                self.as_str()
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                self.as_str()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.pad(self.as_str())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(self.as_str(), out)
            }
        }
    };
}

dns_name! {
    /// A machine at the edge: a DNS-1123 subdomain in lower case. Cheap to clone.
    NodeName
}

dns_name! {
    /// Name of a trust domain, which contains the identities of one CA: the host of their spiffe URIs.
    TrustDomain
}

/// A pattern of node names: one name, or a pattern in which `*` stands for any characters except a dot. So a pattern without
/// dots matches no address and no DNS name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NodePattern(String);

impl NodePattern {
    /// Checks and lower-cases a name or a pattern.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        // With a letter in place of each star, the pattern must be a valid name.
        parse_dns(&text.replace('*', "x")).map_err(|error| match error {
            NameError::InvalidDnsName { why, .. } => NameError::InvalidDnsName {
                name: text.chars().take(MAX_NAME).collect(),
                why,
            },
            other => other,
        })?;
        Ok(Self(text.to_ascii_lowercase()))
    }

    /// Returns the node, if the pattern is one name.
    pub fn node(&self) -> Option<NodeName> {
        NodeName::parse(&self.0).ok()
    }

    /// Whether the pattern matches this node. `localhost` is matched by its exact name only, because every machine has that
    /// name.
    pub fn matches(&self, node: &NodeName) -> bool {
        let node = node.as_str();
        if node == "localhost" || self.0.split('.').count() != node.split('.').count() {
            return self.0 == node;
        }
        let mut labels = self.0.split('.').zip(node.split('.'));
        labels.all(|(pattern, label)| matches_label(pattern, label))
    }
}

/// Whether a label matches a pattern for one label.
fn matches_label(pattern: &str, label: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut remaining) = label.strip_prefix(parts.next().unwrap_or_default()) else {
        return false;
    };
    let Some(last) = parts.next_back() else {
        return remaining.is_empty();
    };
    // Each part between stars matches at its first position, which leaves most text for the rest.
    for part in parts {
        let Some((_, after)) = remaining.split_once(part) else {
            return false;
        };
        remaining = after;
    }
    remaining.ends_with(last)
}

impl From<&NodeName> for NodePattern {
    fn from(node: &NodeName) -> Self {
        Self(node.as_str().to_owned())
    }
}

impl TryFrom<String> for NodePattern {
    type Error = NameError;
    fn try_from(text: String) -> Result<Self, NameError> {
        Self::parse(&text)
    }
}

impl From<NodePattern> for String {
    fn from(pattern: NodePattern) -> Self {
        pattern.0
    }
}

impl FromStr for NodePattern {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        Self::parse(text)
    }
}

impl fmt::Display for NodePattern {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(&self.0)
    }
}

/// A name for which a server's certificate is valid.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum HostName {
    /// A DNS name in lower case.
    Dns(Arc<str>),
    /// An address.
    Ip(IpAddr),
}

/// A name or address under which edges dial the gateway.
pub type GatewayName = HostName;
/// A name or address under which clients reach a listener.
pub type ListenerName = HostName;

impl HostName {
    /// Parses an address, or else a DNS name.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        match text.parse() {
            Ok(address) => Ok(Self::Ip(address)),
            Err(_) => parse_dns(text).map(Self::Dns),
        }
    }
}

impl FromStr for HostName {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        Self::parse(text)
    }
}

impl From<IpAddr> for HostName {
    fn from(address: IpAddr) -> Self {
        Self::Ip(address)
    }
}

impl From<&NodeName> for HostName {
    /// Returns an address if the name is one, since Kubernetes permits nodes that are named by their address.
    fn from(node: &NodeName) -> Self {
        node.as_str()
            .parse()
            .map_or_else(|_| Self::Dns(Arc::clone(&node.0)), Self::Ip)
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dns(name) => out.pad(name),
            Self::Ip(address) => fmt::Display::fmt(address, out),
        }
    }
}

/// Checks the name or a group of a client. It must be usable without quoting in a URI's path, in a line of the bearer token
/// file and in a log.
pub fn check_client(word: &str) -> Result<(), NameError> {
    let invalid = |why| {
        Err(NameError::InvalidClientName {
            word: word.chars().take(MAX_CLIENT).collect(),
            why,
        })
    };
    if word.is_empty() {
        return invalid("it is empty");
    }
    if word.len() > MAX_CLIENT {
        return invalid("it is longer than 64 characters");
    }
    if !word
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b"-._:@".contains(&byte))
    {
        return invalid("only letters, digits and - . _ : @ are allowed");
    }
    Ok(())
}

#[cfg(test)]
mod tests;
