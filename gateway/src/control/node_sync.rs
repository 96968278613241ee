//! Reloads node records and revocations from the data directory, and closes tunnels of nodes that are revoked or unknown.
//!
//! Commands that run beside a gateway change the directory and then request this reload. An edge that connects at the same moment
//! is checked before its registration and once more afterwards. Either the check sees the new table, or this reload sees the
//! tunnel.

use super::{
    api_cache::ApiCacheServer,
    eligibility::{goaway_message, node_from_record, rejection_reason, untrusted_reason},
    gateway_revocation::GatewayRevocation,
    pin_writer::PinWriter,
    tunnel_listener::LiveTls,
};
use crate::state::{Node, NodesWriter, Registry, TunnelInfo};
use causeway_certs::{NodeName, Store, StoreError};
use causeway_rt::task::TaskGroup;
use causeway_tunnel::control_stream::GoAway;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};
use tokio::{runtime::Handle, sync::oneshot, task::spawn_blocking, time::sleep};
use tracing::Span;

/// Time to wait for further node changes after the first one.
const BATCH_INTERVAL: Duration = Duration::from_millis(500);
/// Time for an edge to read the reason for the disconnect. Then the gateway closes the connection.
const CLOSE_GRACE: Duration = Duration::from_millis(300);

/// Error of a reload of the nodes.
#[derive(Debug, thiserror::Error)]
pub enum RefreshError {
    /// The data directory cannot be read.
    #[error("the data directory cannot be read: {0}")]
    Store(#[from] StoreError),
    /// The nodes are reloaded, but the pinned keys were not.
    #[error(
        "the nodes were reloaded, but the pinned keys of apps (pins.json) could not be loaded: {0}"
    )]
    Keys(#[source] StoreError),
    /// Internal fault of the gateway.
    #[error("the nodes could not be reloaded: {0}")]
    Failed(#[from] tokio::task::JoinError),
}

/// Node state of a gateway: the records on disk, the table, and the tunnels.
#[derive(Clone, Debug)]
pub struct NodeSync {
    /// The data directory.
    pub store: Store,
    /// The table of nodes.
    pub nodes: NodesWriter,
    /// The pinned keys of upstreams on the nodes.
    pub pin_writer: PinWriter,
    /// The tunnel port's TLS, with the trusted CAs.
    pub tls: LiveTls,
    /// The connected tunnels.
    pub registry: Registry,
    /// Server of the API cache, if edges may read.
    pub api_cache: Option<ApiCacheServer>,
    /// The revocations of gateways' certificates.
    pub gateway_revocation: GatewayRevocation,
    /// Group of the tasks that close the tunnels, even if the client that requested the reload disconnects.
    pub tasks: Arc<TaskGroup>,
    /// Runtime of these tasks.
    pub runtime: Handle,
}

impl NodeSync {
    /// Runs [`NodeSync::refresh`] to its end, even if the returned future is dropped.
    ///
    /// # Errors
    /// Those of [`NodeSync::refresh`]. Returns `None` if the gateway shuts down meanwhile.
    pub async fn refresh_detached(&self) -> Option<Result<Vec<NodeName>, RefreshError>> {
        let (done_sender, done) = oneshot::channel();
        let node_sync = self.clone();
        self.tasks
            .spawn_on(&self.runtime, Span::current(), async move {
                // The send fails if the requester has gone.
                let _ = done_sender.send(node_sync.refresh().await);
            });
        done.await.ok()
    }

    /// Starts [`NodeSync::refresh_detached`] without waiting for it. Errors are logged.
    pub fn spawn_refresh(&self) {
        let node_sync = self.clone();
        self.tasks
            .spawn_on(&self.runtime, Span::current(), async move {
                if let Err(error) = node_sync.refresh().await {
                    tracing::error!(%error, "the records of admitted nodes could not be reloaded");
                }
            });
    }

    /// Reloads the nodes from the disk. Returns the nodes whose tunnels were closed as a result.
    ///
    /// # Errors
    /// If the disk cannot be read. The table is then unchanged, but tunnels with untrusted certificates are closed as well.
    pub async fn refresh(&self) -> Result<Vec<NodeName>, RefreshError> {
        let (store, nodes) = (self.store.clone(), self.nodes.clone());
        let pin_writer = self.pin_writer.clone();
        let previous_names = nodes.reader().record_names();
        let (revocation, registry) = (self.gateway_revocation.clone(), self.registry.clone());
        let reloaded = spawn_blocking(move || {
            revocation.reload_and_announce(&registry)?;
            reload_records(&nodes, &store)?;
            // Keeps only the keys of currently admitted nodes, and drops keys recorded in the meantime for others.
            pin_writer.refresh().map_err(RefreshError::Keys)
        })
        .await?;
        let current_names = self.nodes.reader().record_names();
        let removed = previous_names.difference(&current_names).cloned().collect();
        // The trusted roots do not depend on the node records on the disk.
        let closed = self.close_rejected(removed).await?;
        reloaded?;
        Ok(closed)
    }

    /// Closes the tunnels of all rejected nodes, and of nodes whose record was `removed`. If the cluster vouches for a removed
    /// node, its edge may connect again.
    async fn close_rejected(
        &self,
        removed: BTreeSet<NodeName>,
    ) -> Result<Vec<NodeName>, RefreshError> {
        // After the removal of a root, each chain takes two signature verifications.
        let node_sync = self.clone();
        let rejected = spawn_blocking(move || node_sync.rejected_tunnels(&removed)).await?;
        Ok(close_tunnels(rejected).await)
    }

    /// Closes the tunnels of nodes for which the cluster newly reports that they are not at the edge. Runs until dropped. A
    /// deleted Node closes no tunnel, because its kubelet may create the Node again.
    pub async fn follow_cluster(self) {
        let (nodes, mut changes) = (self.nodes.reader(), self.nodes.subscribe());
        while changes.changed().await.is_ok() {
            // Changes of many nodes cause one check of the tunnels.
            sleep(BATCH_INTERVAL).await;
            changes.mark_unchanged();
            let is_cloud_node = |node: &NodeName| nodes.cluster_says_edge(node) == Some(false);
            let judged = self.registry.all().into_iter();
            let judged = judged.filter(|(node, _)| is_cloud_node(node));
            let leaving = judged.filter_map(|(node, edge)| {
                let why = rejection_reason(&nodes, &node, &edge.tunnel.certificate)?;
                Some((node, edge, why))
            });
            let leaving: Vec<_> = leaving.collect();
            if !leaving.is_empty()
                && let Some(reading) = &self.api_cache
            {
                reading.close_rejected(|_, _| None);
            }
            close_tunnels(leaving).await;
        }
    }

    /// Returns the tunnels of rejected nodes with the reasons, and closes these nodes' connections to the API cache. A tunnel
    /// with a retired root keeps its streams and gets no new ones, if its process has another tunnel with a trusted root.
    fn rejected_tunnels(
        &self,
        removed: &BTreeSet<NodeName>,
    ) -> Vec<(NodeName, TunnelInfo, String)> {
        let (nodes, tls) = (self.nodes.reader(), self.tls.load());
        let removal_reason = |node: &NodeName| {
            let forgotten = removed.contains(node);
            forgotten.then(|| format!("node {node} was removed at this gateway"))
        };
        if let Some(reading) = &self.api_cache {
            reading.close_rejected(|node, shown| {
                untrusted_reason(tls.is_still_trusted(shown), node, shown)
                    .or_else(|| removal_reason(node))
            });
        }
        let process_of = |node: &NodeName, edge: &TunnelInfo| {
            let instance = edge.tunnel.hello.instance.clone();
            (node.clone(), instance)
        };
        let checked = self.registry.all().into_iter().map(|(node, edge)| {
            let shown = &edge.tunnel.certificate;
            let untrusted = untrusted_reason(tls.is_still_trusted(shown), &node, shown);
            (node, edge, untrusted)
        });
        let judged: Vec<_> = checked.collect();
        let standing = judged
            .iter()
            .filter(|(_, edge, gone)| !edge.is_leaving() && gone.is_none());
        let standing: BTreeSet<_> = standing
            .map(|(node, edge, _)| process_of(node, edge))
            .collect();
        let to_reject = |(node, edge, gone): (NodeName, TunnelInfo, Option<String>)| {
            let why = rejection_reason(&nodes, &node, &edge.tunnel.certificate)
                .or_else(|| removal_reason(&node));
            if why.is_none() && gone.is_some() && standing.contains(&process_of(&node, &edge)) {
                edge.tunnel.tunnel.drain();
                self.registry.mark_leaving(&node, edge.id);
                edge.tunnel.taken_over.cancel();
                return None;
            }
            Some((node, edge, why.or(gone)?))
        };
        judged.into_iter().filter_map(to_reject).collect()
    }
}

/// Closes these tunnels and reports each reason to its edge. Returns the nodes.
async fn close_tunnels(rejected: Vec<(NodeName, TunnelInfo, String)>) -> Vec<NodeName> {
    if rejected.is_empty() {
        return Vec::new();
    }
    for (node, edge, why) in &rejected {
        tracing::warn!(%node, why, "closing a tunnel of {node}");
        edge.tunnel.tunnel.drain();
        let message = goaway_message(GoAway::NotAdmitted, why.clone());
        // An edge that does not read the control stream receives nothing.
        let _ = edge.tunnel.control.try_send(Box::new(message));
    }
    sleep(CLOSE_GRACE).await;
    let mut closed = Vec::new();
    for (node, edge, _) in rejected {
        edge.tunnel.tunnel.close();
        closed.push(node);
    }
    closed.dedup();
    closed
}

/// Replaces the records in the table by those on the disk.
///
/// # Errors
/// If the file cannot be read, or is missing although records were read before. The revocations of those records remain in force.
pub(crate) fn reload_records(nodes: &NodesWriter, store: &Store) -> Result<(), StoreError> {
    let has_records = nodes.reader().has_records();
    nodes.refresh(|| {
        if has_records {
            store.nodes().require()?;
        }
        read_records(store)
    })
}

/// Reads the node records from the disk.
pub(crate) fn read_records(store: &Store) -> Result<BTreeMap<NodeName, Node>, StoreError> {
    Ok(store
        .nodes()
        .all()?
        .into_iter()
        .map(node_from_record)
        .collect())
}
