//! Identities: the holder that a certificate names.
//!
//! Owns `Identity` and the spiffe URIs in which our certificates carry it. Never decides whether a certificate is genuine:
//! `verify` finds the signer and then calls `Identity::from_own_certificate` or `Identity::from_foreign`. Only
//! the first can return `Edge`, `Gateway` or `Client`. So a foreign CA cannot issue one of our identities, whatever it writes
//! into its certificates.

use std::fmt;

use causeway_tls::{NameError, NodeName, TrustDomain, name::check_client};
use rustls_pki_types::CertificateDer;

use crate::certificate::Certificate;

/// Separator of groups in the organization of our client certificates: rcgen writes at most one organization. No group may
/// contain the separator.
const GROUP_SEPARATOR: char = ',';

/// Purpose for which an intermediate of ours signs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IssuerPurpose {
    /// Certificates of edges, as clients of the tunnel port.
    Edges,
    /// Certificates that listeners present to clients.
    Listeners,
    /// Certificates of gateways.
    Replicas,
    /// Certificates of clients of listeners.
    Clients,
}

impl IssuerPurpose {
    /// All purposes, in the order in which a root stores its intermediates.
    pub const ALL: [Self; 4] = [Self::Edges, Self::Listeners, Self::Replicas, Self::Clients];
}

impl fmt::Display for IssuerPurpose {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Edges => "edges",
            Self::Listeners => "listeners",
            Self::Replicas => "replicas",
            Self::Clients => "clients",
        })
    }
}

/// The holder of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// The edge of a node, certified by our root.
    Edge(NodeName),
    /// A gateway, certified by our root.
    Gateway,
    /// A client, certified by our root.
    Client {
        /// The client's name.
        name: String,
        /// The groups that the client belongs to.
        groups: Vec<String>,
    },
    /// A client, certified by another root that a listener's configuration trusts.
    Foreign {
        /// The subject's common name.
        common_name: Option<String>,
        /// The subject's organizations, which Kubernetes reads as groups.
        organizations: Vec<String>,
        /// The URI alternative names.
        uris: Vec<String>,
    },
}

impl Identity {
    /// Reads a certificate that our own root has signed.
    pub fn from_own_certificate(
        certificate: &CertificateDer<'_>,
        domain: &TrustDomain,
    ) -> Result<Self, NameError> {
        Self::from_own(&Certificate::parse(certificate)?, domain)
    }

    pub(crate) fn from_own(
        certificate: &Certificate,
        domain: &TrustDomain,
    ) -> Result<Self, NameError> {
        let uri = single_spiffe_uri(certificate)?;
        let unknown_identity = || NameError::UnknownIdentity {
            uri: uri.to_owned(),
            domain: domain.clone(),
        };
        let path = uri
            .strip_prefix("spiffe://")
            .and_then(|rest| rest.strip_prefix(domain.as_str()))
            .and_then(|rest| rest.strip_prefix('/'))
            .ok_or_else(unknown_identity)?;
        match path.split_once('/') {
            None if path == "gateway" => Ok(Self::Gateway),
            Some(("edge", node)) => {
                let name = NodeName::parse(node)?;
                // SPIFFE paths are case-sensitive, so a CA may treat these as two names.
                if name.as_str() == node {
                    Ok(Self::Edge(name))
                } else {
                    Err(unknown_identity())
                }
            }
            Some(("client", name)) => {
                check_client(name)?;
                let groups = certificate
                    .organizations
                    .iter()
                    .flat_map(|groups| groups.split(GROUP_SEPARATOR))
                    .filter(|group| !group.is_empty())
                    .map(str::to_owned)
                    .collect();
                Ok(Self::Client {
                    name: name.to_owned(),
                    groups,
                })
            }
            _ => Err(unknown_identity()),
        }
    }

    /// Returns the kind of our own machines that a certificate names, independent of its signer and its other content.
    pub(crate) fn own_machine_kind(
        certificate: &Certificate,
        domain: &TrustDomain,
    ) -> Option<&'static str> {
        certificate.uris.iter().find_map(|uri| {
            let (scheme, rest) = uri.split_once("://")?;
            let (host, path) = rest.split_once('/')?;
            let is_own_domain =
                scheme.eq_ignore_ascii_case("spiffe") && host.eq_ignore_ascii_case(domain.as_str());
            match path.split('/').next() {
                Some("edge") if is_own_domain => Some("edge"),
                Some("gateway") if is_own_domain => Some("gateway"),
                _ => None,
            }
        })
    }

    pub(crate) fn from_foreign(certificate: Certificate) -> Self {
        Self::Foreign {
            common_name: certificate.common_name,
            organizations: certificate.organizations,
            uris: certificate.uris,
        }
    }

    /// Returns the kind in one word, for logs and refusals.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Edge(_) => "edge",
            Self::Gateway => "gateway",
            Self::Client { .. } => "client",
            Self::Foreign { .. } => "foreign",
        }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Edge(node) => write!(out, "edge {node}"),
            Self::Gateway => out.write_str("gateway"),
            Self::Client { name, .. } => write!(out, "client {name}"),
            Self::Foreign {
                common_name: Some(name),
                ..
            } => write!(out, "foreign CN={name}"),
            Self::Foreign { uris, .. } => match uris.first() {
                Some(uri) => write!(out, "foreign {uri}"),
                None => out.write_str("foreign without a name"),
            },
        }
    }
}

/// Returns the only spiffe URI of a certificate. None or several are refused, so that no certificate can be read as two
/// identities.
fn single_spiffe_uri(certificate: &Certificate) -> Result<&str, NameError> {
    let is_spiffe = |uri: &&String| {
        uri.get(..9)
            .is_some_and(|scheme| scheme.eq_ignore_ascii_case("spiffe://"))
    };
    let mut uris = certificate.uris.iter().filter(is_spiffe);
    match (uris.next(), uris.count()) {
        (Some(uri), 0) => Ok(uri),
        (first, rest) => Err(NameError::NotOneIdentity {
            count: usize::from(first.is_some()) + rest,
        }),
    }
}

/// Whether a certificate names a gateway, in any trust domain and by any signer.
pub(crate) fn names_gateway(leaf: &Certificate) -> bool {
    single_spiffe_uri(leaf).is_ok_and(|uri| {
        let path = uri.get(9..).and_then(|rest| rest.split_once('/'));
        path.is_some_and(|(_, path)| path == "gateway")
    })
}

/// Returns the trust domain of a leaf's only identity.
pub(crate) fn trust_domain_of(leaf: &Certificate) -> Result<TrustDomain, NameError> {
    let uri = single_spiffe_uri(leaf)?.get(9..).unwrap_or_default();
    TrustDomain::parse(uri.split('/').next().unwrap_or_default())
}

/// Returns the trust domain that a root names: its only URI `spiffe://<trust domain>`.
pub(crate) fn trust_domain_of_root(root: &Certificate) -> Result<TrustDomain, NameError> {
    let uri = single_spiffe_uri(root)?;
    TrustDomain::parse(uri.get(9..).unwrap_or_default())
}

/// Returns the URI in the certificate of a node's edge.
pub fn edge_uri(domain: &TrustDomain, node: &NodeName) -> String {
    format!("spiffe://{domain}/edge/{node}")
}

pub(crate) fn gateway_uri(domain: &TrustDomain) -> String {
    format!("spiffe://{domain}/gateway")
}

pub(crate) fn client_uri(domain: &TrustDomain, name: &str) -> String {
    format!("spiffe://{domain}/client/{name}")
}

pub(crate) fn issuer_uri(domain: &TrustDomain, purpose: IssuerPurpose) -> String {
    format!("spiffe://{domain}/issuer/{purpose}")
}

/// Returns the purpose for which an intermediate signs, from its only URI.
pub(crate) fn issuer_purpose(
    intermediate: &Certificate,
    domain: &TrustDomain,
) -> Option<IssuerPurpose> {
    let uri = single_spiffe_uri(intermediate).ok()?;
    let is_match =
        |purpose: &IssuerPurpose| intermediate.is_ca && issuer_uri(domain, *purpose) == uri;
    IssuerPurpose::ALL.into_iter().find(is_match)
}

pub(crate) fn root_uri(domain: &TrustDomain) -> String {
    format!("spiffe://{domain}")
}

/// Joins groups into one organization of a certificate.
pub(crate) fn join_groups(groups: &[String]) -> Result<String, NameError> {
    groups.iter().try_for_each(|group| check_client(group))?;
    Ok(groups.join(","))
}

#[cfg(test)]
mod tests;
