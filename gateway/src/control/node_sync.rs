//! Who is welcome: what the data directory says of nodes is taken up, and tunnels of those who are not welcome end.
//!
//! The commands beside a gateway change the directory and then ask for this. An edge that comes in the same moment is
//! judged before it is registered and again afterwards: it meets either the new table or this.

use super::{api_cache::ApiCacheServer, pin_writer::PinWriter, tunnel_listener::LiveTls};
use crate::state::{
    Node, Nodes, NodesWriter, Registry, TunnelInfo, nodes::record_revoked,
    registry::EdgeCertificate,
};
use causeway_certs::{NodeName, NodeRecord, Store, StoreError};
use causeway_rt::task::TaskGroup;
use causeway_tunnel::control_stream::{GatewayMessage, GoAway};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};
use tokio::{runtime::Handle, sync::oneshot, task::spawn_blocking, time::sleep};
use tracing::Span;

/// How long an edge that is sent away stays away; it adds up to half of that by itself, which makes the minute that it ever
/// backs off.
pub(super) const REJECTED_BACKOFF: Duration = Duration::from_secs(40);
/// How long one stays away, likewise, that cannot be judged yet.
const SOON: Duration = Duration::from_secs(10);
/// What such an edge is told.
const EARLY: &str = "this gateway does not know yet which nodes the cluster has, for the cluster's API has not answered it; come again";
/// How long further changes of nodes are waited for once there is one.
const GATHER: Duration = Duration::from_millis(500);
/// What an edge gets to read why it is sent away. One that does not is hung up on.
const CLOSE_GRACE: Duration = Duration::from_millis(300);

/// Why what the disk says of nodes was not taken up.
#[derive(Debug, thiserror::Error)]
pub enum RefreshError {
    /// The disk cannot be read.
    #[error("the data directory cannot be read: {0}")]
    Store(#[from] StoreError),
    /// The nodes are taken up, and keys of apps that were of others stay where they are.
    #[error("it is done, but the keys of apps (pins.json) could not be taken up: {0}")]
    Keys(#[source] StoreError),
    /// Causeway's own fault.
    #[error("the nodes could not be read anew: {0}")]
    Failed(#[from] tokio::task::JoinError),
}

/// The nodes of a gateway, on the disk, in its table and at its doors.
#[derive(Clone, Debug)]
pub struct NodeSync {
    /// The disk.
    pub store: Store,
    /// The table.
    pub nodes: NodesWriter,
    /// By which keys apps of theirs are known.
    pub keeper: PinWriter,
    /// Who is believed.
    pub tls: LiveTls,
    /// Who is here.
    pub registry: Registry,
    /// Who reads here, if anybody may.
    pub reading: Option<ApiCacheServer>,
    /// Who ends the tunnels, even where whoever has asked for it goes away.
    pub tasks: Arc<TaskGroup>,
    /// Where that is done.
    pub runtime: Handle,
}

impl NodeSync {
    /// As [`NodeSync::refresh`], to its end even where nobody waits for it any more.
    ///
    /// # Errors
    /// As there; nothing where the gateway ends meanwhile.
    pub async fn refreshed(&self) -> Option<Result<Vec<NodeName>, RefreshError>> {
        let (tell, told) = oneshot::channel();
        let roll = self.clone();
        self.tasks
            .spawn_on(&self.runtime, Span::current(), async move {
                // Nobody listens where the one that asked has gone.
                let _ = tell.send(roll.refresh().await);
            });
        told.await.ok()
    }

    /// The same without waiting for it; what cannot be read is logged.
    pub fn look(&self) {
        let roll = self.clone();
        self.tasks
            .spawn_on(&self.runtime, Span::current(), async move {
                if let Err(error) = roll.refresh().await {
                    tracing::error!(%error, "who is welcome could not be read anew");
                }
            });
    }

    /// Takes up what the disk says now. Returns the nodes whose tunnels were ended for that.
    ///
    /// # Errors
    /// If the disk cannot be read; then the table is as it was, and whoever is not believed is gone all the same.
    pub async fn refresh(&self) -> Result<Vec<NodeName>, RefreshError> {
        let (store, nodes) = (self.store.clone(), self.nodes.clone());
        let keeper = self.keeper.clone();
        let before = nodes.reader().record_names();
        let read = spawn_blocking(move || {
            reload_records(&nodes, &store)?;
            // Of those who are welcome now: what was noted meanwhile of others goes as well.
            keeper.refresh().map_err(RefreshError::Keys)
        })
        .await?;
        let after = self.nodes.reader().record_names();
        let removed = before.difference(&after).cloned().collect();
        // Who is believed does not hang on what the disk says of nodes.
        let gone = self.expel(removed).await?;
        read?;
        Ok(gone)
    }

    /// Ends the tunnels of all who are not welcome, and of those whose record was `removed`: a cluster may vouch for the node
    /// all the same, and lets its edge in again.
    async fn expel(&self, removed: BTreeSet<NodeName>) -> Result<Vec<NodeName>, RefreshError> {
        // To follow a chain takes two signatures each, where a root is gone.
        let roll = self.clone();
        let leaving = spawn_blocking(move || roll.leaving(&removed)).await?;
        Ok(send_away(leaving).await)
    }

    /// Ends, for as long as it is polled, the tunnels of nodes that the cluster has come to say are not at the edge. A Node that
    /// is gone ends none: its kubelet may write it anew.
    pub async fn follow_cluster(self) {
        let (nodes, mut changes) = (self.nodes.reader(), self.nodes.changes());
        while changes.changed().await.is_ok() {
            // Changes of many nodes are one look at the tunnels.
            sleep(GATHER).await;
            changes.mark_unchanged();
            let moved = |node: &NodeName| nodes.is_clusters_edge(node) == Some(false);
            let judged = self.registry.all().into_iter();
            let judged = judged.filter(|(node, _)| moved(node));
            let leaving = judged.filter_map(|(node, edge)| {
                let why = rejection_reason(&nodes, &node, &edge.admitted.certificate)?;
                Some((node, edge, why))
            });
            let leaving: Vec<_> = leaving.collect();
            if !leaving.is_empty()
                && let Some(reading) = &self.reading
            {
                reading.judge(|_, _| None);
            }
            send_away(leaving).await;
        }
    }

    /// Returns the tunnels of those who are not welcome, and why; connections by which they read are ended. A tunnel whose
    /// root was retired keeps its streams, and gets no new ones, where its process has another one by a trusted root.
    fn leaving(&self, removed: &BTreeSet<NodeName>) -> Vec<(NodeName, TunnelInfo, String)> {
        let (nodes, tls) = (self.nodes.reader(), self.tls.load());
        let forgotten = |node: &NodeName| {
            let forgotten = removed.contains(node);
            forgotten.then(|| format!("node {node} was removed at this gateway"))
        };
        if let Some(reading) = &self.reading {
            reading.judge(|node, shown| {
                untrusted_reason(tls.believes(shown), node, shown).or_else(|| forgotten(node))
            });
        }
        let process = |node: &NodeName, edge: &TunnelInfo| {
            let instance = edge.admitted.welcome.instance.clone();
            (node.clone(), instance)
        };
        let judged = self.registry.all().into_iter().map(|(node, edge)| {
            let shown = &edge.admitted.certificate;
            let gone = untrusted_reason(tls.believes(shown), &node, shown);
            (node, edge, gone)
        });
        let judged: Vec<_> = judged.collect();
        let standing = judged
            .iter()
            .filter(|(_, edge, gone)| !edge.is_leaving() && gone.is_none());
        let standing: BTreeSet<_> = standing
            .map(|(node, edge, _)| process(node, edge))
            .collect();
        let unwelcome = |(node, edge, gone): (NodeName, TunnelInfo, Option<String>)| {
            let why = rejection_reason(&nodes, &node, &edge.admitted.certificate)
                .or_else(|| forgotten(&node));
            if why.is_none() && gone.is_some() && standing.contains(&process(&node, &edge)) {
                edge.admitted.tunnel.drain();
                self.registry.leaves(&node, edge.id);
                edge.admitted.taken_over.cancel();
                return None;
            }
            Some((node, edge, why.or(gone)?))
        };
        judged.into_iter().filter_map(unwelcome).collect()
    }
}

/// Ends these tunnels, each for its reason. Returns their nodes.
async fn send_away(leaving: Vec<(NodeName, TunnelInfo, String)>) -> Vec<NodeName> {
    if leaving.is_empty() {
        return Vec::new();
    }
    for (node, edge, why) in &leaving {
        tracing::warn!(%node, why, "ending a tunnel of {node}");
        edge.admitted.tunnel.drain();
        let line = goaway_message(GoAway::Unwelcome, why.clone());
        // One that takes no lines hears nothing.
        let _ = edge.admitted.control.try_send(Box::new(line));
    }
    sleep(CLOSE_GRACE).await;
    let mut gone = Vec::new();
    for (node, edge, _) in leaving {
        edge.admitted.tunnel.close();
        gone.push(node);
    }
    gone.dedup();
    gone
}

/// The line that has an edge come again soon, for nobody can tell yet whether it is welcome.
pub(super) fn retry_later_message() -> GatewayMessage {
    GatewayMessage::Dismiss {
        why: GoAway::Full,
        detail: EARLY.to_owned(),
        retry_after_ms: u64::try_from(SOON.as_millis()).unwrap_or(u64::MAX),
    }
}

/// The line that sends an edge away.
pub(super) fn goaway_message(why: GoAway, detail: String) -> GatewayMessage {
    GatewayMessage::Dismiss {
        why,
        detail,
        retry_after_ms: u64::try_from(REJECTED_BACKOFF.as_millis()).unwrap_or(u64::MAX),
    }
}

/// Why a node is not welcome here with the certificate that it has `shown`, if it is not.
pub(super) fn rejection_reason(
    nodes: &Nodes,
    node: &NodeName,
    shown: &EdgeCertificate,
) -> Option<String> {
    match nodes.get(node) {
        None if nodes.is_clusters_edge(node) == Some(false) => Some(format!(
            "the cluster's Node {node} is not at the edge: it has none of the labels of kubernetes.edge_labels, and no token names it"
        )),
        None if shown.given.is_some() => Some(format!(
            "node {node} is not known at this gateway: `causeway edge add {node}` there lets it in"
        )),
        None => Some(format!(
            "node {node} is not enrolled at this gateway (or was removed); join again with a new token of `causeway token create --node {node}`"
        )),
        Some(Node {
            revoked: Some(reason),
            ..
        }) => {
            let why = nodes.revoked(node);
            Some(why.unwrap_or_else(|| record_revoked(node, &reason)))
        }
        // A machine that was stolen has the certificate of the one that took its place.
        Some(Node { joined_at, .. }) if shown.issued_at < joined_at => Some(format!(
            "this certificate of node {node} is from before the node joined anew; join again with a new token of `causeway token create --node {node}`"
        )),
        Some(_) => None,
    }
}

/// Why the certificate that a node has `shown` is good no more, since it is not `believed`, if that is so.
pub(super) fn untrusted_reason(
    believed: bool,
    node: &NodeName,
    shown: &EdgeCertificate,
) -> Option<String> {
    let why = if shown.given.is_some() {
        "is not believed here any more (tunnel.identity.client_ca)".to_owned()
    } else {
        format!("was retired; join again with a new token of `causeway token create --node {node}`")
    };
    (!believed).then(|| format!("the certificate of node {node} hangs on a root that {why}"))
}

/// Replaces the records in the table by those on the disk.
///
/// # Errors
/// If the file cannot be read, or is missing though records were read before: its revocations hold on.
pub(crate) fn reload_records(nodes: &NodesWriter, store: &Store) -> Result<(), StoreError> {
    let has_records = nodes.reader().has_records();
    nodes.refresh(|| {
        if has_records {
            store.nodes().require()?;
        }
        records(store)
    })
}

/// What the disk says of nodes.
pub(crate) fn records(store: &Store) -> Result<BTreeMap<NodeName, Node>, StoreError> {
    Ok(store.nodes().all()?.into_iter().map(known).collect())
}

/// A node as it is known by what the disk says.
pub(super) fn known(record: NodeRecord) -> (NodeName, Node) {
    let node = Node {
        addresses: record.addresses,
        pool: record.pool,
        labels: record.labels,
        joined_at: record.enrolled_at,
        revoked: record.revoked.map(|revoked| revoked.reason),
        follows_cluster: record.follows_cluster,
        ..Node::default()
    };
    (record.node, node)
}
