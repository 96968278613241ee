//! Routing: the node and target of a stream.
//!
//! 1. The node is the SNI's if that names a node, else the original destination's (DNAT), else the listener's fixed one, else the
//!    authority's (by name, then by confirmed address, then by pod network).
//! 2. An authority that names no node is ordinary (kube-apiserver sends its own) and passes untouched. An authority that names
//!    *another* node than the rest is refused: an ambiguous route is never guessed.
//! 3. While the nodes of a cluster are not known (`Nodes::pending`), nothing but the name of a recorded node names a node; all
//!    else is refused as ``dependency_unavailable``, and never taken for an address outside of the edges.
//! 4. The port is the authority's if that names this node, else the original destination's, else the listener's own, which is
//!    never the number that it listens on.

use crate::{
    error::{Error, Reason},
    state::{Nodes, nodes::AddressMatch},
};
use causeway_certs::NodeName;
use causeway_tunnel::{Target, target};
use std::net::{IpAddr, SocketAddr};

/// Input of routing, from a stream's connection, listener and head.
#[derive(Clone, Debug, Default)]
pub struct RouteInput<'a> {
    /// The server name of the ClientHello.
    pub sni: Option<&'a str>,
    /// The destination before DNAT.
    pub original: Option<SocketAddr>,
    /// The listener's fixed node.
    pub fixed: Option<&'a NodeName>,
    /// The node port that the listener stands for.
    pub port: Option<u16>,
    /// The Host, `:authority` or CONNECT authority.
    pub authority: Option<&'a str>,
}

/// Node and target of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The node.
    pub node: NodeName,
    /// Target that its edge dials: the node itself under its name, or a pod's address.
    pub target: Target,
}

/// Returns the node that the connection or the listener names before HTTP is parsed.
pub fn node(asked: &RouteInput<'_>, nodes: &Nodes) -> Option<NodeName> {
    bound(asked, nodes).ok().flatten().map(|(node, _)| node)
}

/// Meaning of an authority.
#[derive(Debug)]
struct AuthorityMatch {
    node: Option<NodeName>,
    /// A pod's address, which the edge dials as it is.
    pod: Option<IpAddr>,
    port: Option<u16>,
    /// Whether an address named the node, or a pod of it.
    by_address: bool,
}

/// The route of a stream.
///
/// # Errors
/// [`Reason::NodeUnknown`], [`Reason::Misdirected`] or [`Reason::Malformed`], with the names.
pub fn of(asked: &RouteInput<'_>, nodes: &Nodes) -> Result<Route, Error> {
    let meant = asked
        .authority
        .map(|text| meaning(text, nodes))
        .transpose()?;
    let named = meant.as_ref().and_then(|meant| meant.node.clone());
    let bound = bound(asked, nodes)?;
    let by_name = named.is_some() && meant.as_ref().is_some_and(|meant| !meant.by_address);
    if bound.is_none() && !by_name {
        pending(nodes)?;
    }
    let node = match (bound, named.clone()) {
        (Some((node, by)), Some(other)) if node != other => {
            let host = asked.authority.unwrap_or_default();
            return Err(Reason::Misdirected.error(format!(
                "{by} names {node}, and the Host {host:?} names {other}; one of them is wrong"
            )));
        }
        (Some((node, _)), _) | (None, Some(node)) => node,
        (None, None) => return Err(nobody(asked)),
    };
    let ours = meant.filter(|_| named.is_some());
    let port = ours
        .as_ref()
        .and_then(|meant| meant.port)
        .or(asked.original.map(|address| address.port()))
        .or(asked.port)
        .ok_or_else(|| {
            Reason::Malformed.error(format!(
                "the request names no port of {node}; write {node}:<port>"
            ))
        })?;
    let host = match ours
        .and_then(|meant| meant.pod)
        .or_else(|| pod(asked.original, &node, nodes))
    {
        Some(pod) => pod.to_string(),
        None => node.to_string(),
    };
    Ok(Route {
        node,
        target: Target::new(host, port),
    })
}

/// Returns the node that the connection or the listener is bound to, and the source of that binding.
fn bound(asked: &RouteInput<'_>, nodes: &Nodes) -> Result<Option<(NodeName, &'static str)>, Error> {
    if let Some(node) = asked.sni.and_then(|name| nodes.by_name(name)) {
        return Ok(Some((node, "the SNI")));
    }
    if let Some(original) = asked.original {
        pending(nodes)?;
        if let Some(node) = by_address(original.ip(), nodes)?.node {
            return Ok(Some((node, "the original destination")));
        }
    }
    Ok(asked.fixed.map(|node| (node.clone(), "this listener")))
}

fn meaning(authority: &str, nodes: &Nodes) -> Result<AuthorityMatch, Error> {
    let (host, port) = target::split(authority).map_err(|why| {
        Reason::Malformed.error(format!("{authority:?} is not a valid target: {why}"))
    })?;
    if let Some(node) = nodes.by_name(host) {
        return Ok(AuthorityMatch {
            node: Some(node),
            pod: None,
            port,
            by_address: false,
        });
    }
    match host.parse() {
        Ok(address) => by_address(address, nodes).map(|meant| AuthorityMatch { port, ..meant }),
        Err(_) => Ok(AuthorityMatch {
            node: None,
            pod: None,
            port,
            by_address: false,
        }),
    }
}

fn by_address(address: IpAddr, nodes: &Nodes) -> Result<AuthorityMatch, Error> {
    let (node, pod) = match nodes.by_address(address) {
        AddressMatch::Node(node) => (Some(node), None),
        AddressMatch::Pod(node) => (Some(node), Some(address.to_canonical())),
        AddressMatch::Nobody => (None, None),
        AddressMatch::Several(several) => {
            let names: Vec<_> = several.iter().map(NodeName::as_str).collect();
            return Err(Reason::Misdirected.error(format!(
                "{address} is an address of several nodes ({}); use the name of the node",
                names.join(", ")
            )));
        }
    };
    Ok(AuthorityMatch {
        node,
        pod,
        port: None,
        by_address: true,
    })
}

/// Fails while the nodes of the cluster are not known: an address that no node has yet may be an edge's, and one that a record
/// has may be another node's.
fn pending(nodes: &Nodes) -> Result<(), Error> {
    match nodes.pending() {
        Some(reason) => Err(Reason::DependencyUnavailable.error(reason.to_string())),
        None => Ok(()),
    }
}

/// The original destination, if it is a pod of this very node.
fn pod(original: Option<SocketAddr>, node: &NodeName, nodes: &Nodes) -> Option<IpAddr> {
    let address = original?.ip();
    let its_own = matches!(nodes.by_address(address), AddressMatch::Pod(holder) if holder == *node);
    its_own.then(|| address.to_canonical())
}

fn nobody(asked: &RouteInput<'_>) -> Error {
    let tried: Vec<String> = [
        asked.sni.map(|name| format!("SNI {name:?}")),
        asked
            .original
            .map(|address| format!("original destination {address}")),
        asked.authority.map(|text| format!("Host {text:?}")),
    ]
    .into_iter()
    .flatten()
    .collect();
    if tried.is_empty() {
        return Reason::Malformed.error("neither SNI, original destination nor Host names a node");
    }
    Reason::NodeUnknown.error(format!("no node matches {}", tried.join(" or ")))
}

#[cfg(test)]
mod tests;
