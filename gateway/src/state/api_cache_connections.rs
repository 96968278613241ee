//! Connections of edges to the API cache: the node of each, and the token that ends it.
//!
//! A connection is added when it is admitted and removed when it has ended. Each entry has the certificate and the access rule
//! that admitted the connection. After a change of these, the connections that are no longer admitted can be ended.

use super::registry::EdgeCertificate;
use crate::config::AccessLevel;
use causeway_certs::NodeName;
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};
use tokio_util::sync::CancellationToken;

/// Connection of an edge to the API cache.
#[derive(Clone, Debug)]
pub struct ApiCacheConnection {
    id: u64,
    /// Certificate of the edge on this connection.
    pub certificate: EdgeCertificate,
    /// Access rule of the connection.
    pub access: AccessLevel,
    /// Cancelled when the connection has to end.
    pub cancel_token: CancellationToken,
}

type ByNode = BTreeMap<NodeName, Vec<ApiCacheConnection>>;

/// All connections to the API cache. Cheap to clone, for any thread.
#[derive(Clone, Debug, Default)]
pub struct ApiCacheConnections {
    by_node: Arc<Mutex<ByNode>>,
    next_id: Arc<AtomicU64>,
}

/// Guard of a registered connection. Dropping it removes the connection.
#[derive(Debug)]
pub struct ConnectionGuard {
    connections: ApiCacheConnections,
    node: NodeName,
    id: u64,
    /// Cancelled when the connection has to end.
    pub cancel_token: CancellationToken,
}

impl ApiCacheConnections {
    /// Registers a connection of this node. If the node already has `max_connections`, the oldest connections are cancelled.
    pub fn register(
        &self,
        node: &NodeName,
        (certificate, access): (EdgeCertificate, AccessLevel),
        max_connections: usize,
    ) -> ConnectionGuard {
        let (id, end) = (self.next_id.fetch_add(1, Relaxed), CancellationToken::new());
        let mut all = self.lock();
        let node_connections = all.entry(node.clone()).or_default();
        let excess = (node_connections.len() + 1).saturating_sub(max_connections);
        for oldest in node_connections.iter().take(excess) {
            oldest.cancel_token.cancel();
        }
        node_connections.push(ApiCacheConnection {
            id,
            certificate,
            access,
            cancel_token: end.clone(),
        });
        ConnectionGuard {
            connections: self.clone(),
            node: node.clone(),
            id,
            cancel_token: end,
        }
    }

    /// Cancels each connection for which there is a reason, and logs the reason.
    pub fn cancel_where(
        &self,
        close_reason: impl Fn(&NodeName, &ApiCacheConnection) -> Option<String>,
    ) {
        // Computing the reason may take time, and other connections may be registered meanwhile; these are checked after their
        // registration.
        let all = self.lock().clone();
        for (node, own) in &all {
            for connection in own
                .iter()
                .filter(|reading| !reading.cancel_token.is_cancelled())
            {
                if let Some(why) = close_reason(node, connection) {
                    tracing::info!(%node, why, "closing an API cache connection of {node}");
                    connection.cancel_token.cancel();
                }
            }
        }
    }

    /// Returns the number of connections of a node.
    pub fn count(&self, node: &NodeName) -> usize {
        self.lock().get(node).map_or(0, Vec::len)
    }

    fn lock(&self) -> MutexGuard<'_, ByNode> {
        self.by_node.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        let mut all = self.connections.lock();
        if let Some(own) = all.get_mut(&self.node) {
            own.retain(|reading| reading.id != self.id);
            if own.is_empty() {
                all.remove(&self.node);
            }
        }
    }
}
