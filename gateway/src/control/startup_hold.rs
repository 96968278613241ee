//! Keeps a gateway that has just started unready until its edges have reconnected.
//!
//! A gateway that begins to drain stores in its data directory the names of the nodes that have a tunnel. The next process
//! becomes ready (`/readyz`) when these nodes have a tunnel again, or when `timeouts.edges` has passed. Without that file, as
//! after a kill, it waits for all enrolled nodes. A gateway that knows no node is ready at once.

use crate::{
    control::drain::ReadinessBlock,
    state::{Nodes, Registry},
};
use causeway_certs::{NodeName, Store, StoreError};
use std::{collections::BTreeSet, time::Duration};
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep},
};

/// Name of the file in the data directory.
const FILE_NAME: &str = "connected";
/// Interval of checks.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Stores the names of the nodes that have a tunnel.
pub async fn save_connected_nodes(store: &Store, registry: &Registry) {
    let nodes: BTreeSet<NodeName> = registry.all().into_iter().map(|(node, _)| node).collect();
    let text = serde_json::to_string(&nodes).unwrap_or_default();
    let store = store.clone();
    match spawn_blocking(move || store.write_runtime(FILE_NAME, &text)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::warn!(%error, "the list of connected nodes cannot be saved for the next start");
        }
        Err(error) => {
            tracing::debug!(%error, "the list of connected nodes is not saved: the gateway is shutting down");
        }
    }
}

/// Removes the stored names. A process that has taken over does not wait for them.
pub async fn forget_connected_nodes(store: &Store) {
    let store = store.clone();
    if let Ok(Err(error)) = spawn_blocking(move || store.remove_runtime(FILE_NAME)).await {
        tracing::warn!(%error, "the list of connected nodes cannot be removed");
    }
}

/// Reads and removes the file of the previous process, because it is valid for one restart only.
fn take_connected_nodes(store: &Store) -> Result<Option<BTreeSet<NodeName>>, StoreError> {
    let text = store.read_runtime(FILE_NAME)?;
    if text.is_some() {
        store.remove_runtime(FILE_NAME)?;
    }
    Ok(text.and_then(|text| serde_json::from_str(&text).ok()))
}

/// Wait for edges after the start of a gateway.
pub struct StartupHold {
    /// The data directory.
    pub store: Store,
    /// The tunnels.
    pub registry: Registry,
    /// The nodes.
    pub nodes: Nodes,
    /// Maximum time to wait.
    pub max_wait: Duration,
}

impl StartupHold {
    /// Drops `hold` when the edges have reconnected or the time has passed.
    pub async fn run(self, hold: ReadinessBlock) {
        let end = Instant::now() + self.max_wait;
        let store = self.store.clone();
        let saved_nodes = spawn_blocking(move || take_connected_nodes(&store)).await;
        let noted = match saved_nodes {
            Ok(Ok(noted)) => noted,
            Ok(Err(error)) => {
                tracing::warn!(%error, "the list of nodes that were connected before the start cannot be read");
                None
            }
            Err(_) => return,
        };
        while let Some((back, of)) = self.missing_nodes(noted.as_ref()) {
            if Instant::now() >= end {
                return tracing::info!(
                    back,
                    of,
                    "ready without waiting for the remaining edges (timeouts.edges)"
                );
            }
            hold.set_reason(format!(
                "waiting for edges: {back} of {of} nodes are connected (timeouts.edges)"
            ));
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Returns the number of awaited nodes that are connected, and the number of all awaited nodes; `None` if all are connected.
    fn missing_nodes(&self, saved_nodes: Option<&BTreeSet<NodeName>>) -> Option<(usize, usize)> {
        let known_nodes = self.nodes.names().into_iter();
        let awaited = known_nodes.filter(|node| {
            saved_nodes.is_none_or(|noted| noted.contains(node))
                && self.nodes.revocation_reason(node).is_none()
        });
        let awaited: Vec<_> = awaited.collect();
        // Requests for nodes of other gateways are forwarded.
        let directory = self.registry.directory();
        let is_back = |node: &&NodeName| {
            self.registry.has_tunnel(node) || !directory.holders(node).is_empty()
        };
        let back = awaited.iter().filter(is_back);
        let (back, of) = (back.count(), awaited.len());
        (back < of || self.nodes.pending_reason().is_some()).then_some((back, of))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        control::tests::world::{World, name},
        state::Node,
    };

    /// Returns whether the gateway is still unready after the first check.
    async fn waits(world: &World, bound: Duration) -> bool {
        let arrivals = StartupHold {
            store: world.store.clone(),
            registry: world.registry.clone(),
            nodes: world.reader(),
            max_wait: bound,
        };
        let running = arrivals.run(world.readiness.hold("waiting for edges"));
        let message = || world.readiness.hold_reason();
        let looked = async {
            while message().is_some_and(|why| why == "waiting for edges") {
                tokio::task::yield_now().await;
            }
            message().is_some()
        };
        tokio::select! {
            held = looked => held,
            () = running => false,
        }
    }

    #[tokio::test]
    async fn a_gateway_waits_for_its_last_connected_nodes_or_for_all() {
        let long = Duration::from_hours(1);
        let world = World::start();
        assert!(!waits(&world, long).await, "there is no node");
        let one = world.enrolled("edge-1");
        world.nodes.upsert(name("edge-2"), Node::default());
        assert!(waits(&world, long).await);
        assert!(!waits(&world, Duration::ZERO).await);
        let edge = world.joined(&one, "a", 0).await;
        assert!(
            waits(&world, long).await,
            "without a record it waits for all"
        );
        save_connected_nodes(&world.store, &world.registry).await;
        assert!(!waits(&world, long).await, "edge-2 was not there before");
        save_connected_nodes(&world.store, &world.registry).await;
        drop(edge);
        world
            .until(|world| !world.registry.has_tunnel(&name("edge-1")))
            .await;
        assert!(waits(&world, long).await);
        // The gateway does not wait for a node that is no longer admitted.
        save_connected_nodes(&world.store, &world.registry).await;
        world
            .nodes
            .replace_revoked([name("edge-1"), name("edge-2")].into());
        assert!(!waits(&world, long).await);
    }
}
