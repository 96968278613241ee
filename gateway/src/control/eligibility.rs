//! Decides by a node's record and certificate whether the node may connect, and builds the messages to rejected edges.

use crate::state::{Node, Nodes, nodes::record_revoked, registry::EdgeCertificate};
use causeway_certs::{NodeName, NodeRecord};
use causeway_tunnel::control_stream::{GatewayMessage, GoAway};
use std::time::Duration;

/// Time for which a rejected edge stays away. The edge adds up to half of it, so that the total reaches the edge's maximum
/// backoff of one minute.
const REJECTED_BACKOFF: Duration = Duration::from_secs(40);
/// Time for which an edge stays away that the gateway cannot check yet. The edge adds up to half of it as well.
const UNCHECKED_BACKOFF: Duration = Duration::from_secs(10);
/// Error message to an edge that connects before the nodes of the cluster are known.
const NODES_PENDING_DETAIL: &str = "this gateway does not know the nodes of the cluster yet, because the cluster's API has not answered; try again later";

/// Returns the message that makes an edge retry soon, because the gateway cannot check it yet.
pub(super) fn retry_later_message() -> GatewayMessage {
    GatewayMessage::Dismiss {
        why: GoAway::Full,
        detail: NODES_PENDING_DETAIL.to_owned(),
        retry_after_ms: u64::try_from(UNCHECKED_BACKOFF.as_millis()).unwrap_or(u64::MAX),
    }
}

/// Returns the message that makes an edge disconnect.
pub(super) fn goaway_message(reason: GoAway, detail: String) -> GatewayMessage {
    GatewayMessage::Dismiss {
        why: reason,
        detail,
        retry_after_ms: u64::try_from(REJECTED_BACKOFF.as_millis()).unwrap_or(u64::MAX),
    }
}

/// Returns the reason why a node with this `certificate` is rejected, if it is.
pub(super) fn rejection_reason(
    nodes: &Nodes,
    node: &NodeName,
    certificate: &EdgeCertificate,
) -> Option<String> {
    match nodes.get(node) {
        None if nodes.cluster_says_edge(node) == Some(false) => Some(format!(
            "the cluster's Node {node} is not an edge node: it has none of the labels in kubernetes.edge_labels, and no token names it"
        )),
        None if certificate.external_chain.is_some() => Some(format!(
            "node {node} is not registered at this gateway: run `causeway node add {node}` at the gateway to admit it"
        )),
        None => Some(format!(
            "node {node} is not enrolled at this gateway (or was removed); join again with a new token of `causeway token create --node {node}`"
        )),
        Some(Node {
            revoked: Some(reason),
            ..
        }) => {
            let revocation_reason = nodes.revocation_reason(node);
            Some(revocation_reason.unwrap_or_else(|| record_revoked(node, &reason)))
        }
        // An old certificate may come from a stolen machine whose replacement has joined since.
        Some(Node { joined_at, .. }) if certificate.issued_at < joined_at => Some(format!(
            "this certificate of node {node} was issued before the node joined again; join again with a new token of `causeway token create --node {node}`"
        )),
        Some(_) => None,
    }
}

/// Returns the reason why a node's `certificate` is no longer valid, unless it `is_trusted`.
pub(super) fn untrusted_reason(
    is_trusted: bool,
    node: &NodeName,
    certificate: &EdgeCertificate,
) -> Option<String> {
    let cause = if certificate.external_chain.is_some() {
        "is no longer trusted by this gateway (tunnel.identity.client_ca)".to_owned()
    } else {
        format!("was retired; join again with a new token of `causeway token create --node {node}`")
    };
    (!is_trusted)
        .then(|| format!("the certificate of node {node} was issued under a root that {cause}"))
}

/// Converts a record of the data directory to an entry of the node table.
pub(super) fn node_from_record(record: NodeRecord) -> (NodeName, Node) {
    let node = Node {
        addresses: record.addresses,
        pool: record.pool,
        labels: record.labels,
        joined_at: record.enrolled_at,
        join_key: record.join_key,
        revoked: record.revoked.map(|revoked| revoked.reason),
        follows_cluster: record.follows_cluster,
        ..Node::default()
    };
    (record.node, node)
}
