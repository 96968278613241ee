//! Who is welcome: what the data directory says of nodes is taken up, and tunnels of those who are not welcome end.
//!
//! The commands beside a gateway change the directory and then ask for this. An edge that comes in the same moment is
//! judged before it is registered and again afterwards: it meets either the new table or this.

use crate::state::{Edge, Node, Nodes, NodesWriter, Registry};
use causeway_certs::{NodeName, Store, StoreError};
use causeway_tunnel::{
    hello::{Dismissal, ToEdge},
    task::Tasks,
};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::{sync::oneshot, task::spawn_blocking, time::sleep};
use tracing::Span;

/// How long an edge that is sent away stays away: as long as it ever backs off.
pub(super) const AWAY: Duration = Duration::from_mins(1);
/// What an edge gets to read why it is sent away. One that does not is hung up on.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// Why what the disk says of nodes was not taken up.
#[derive(Debug, thiserror::Error)]
pub enum RefreshError {
    /// The disk cannot be read.
    #[error("the data directory cannot be read: {0}")]
    Store(#[from] StoreError),
    /// Causeway's own fault.
    #[error("the nodes could not be read anew: {0}")]
    Failed(#[from] tokio::task::JoinError),
}

/// The nodes of a gateway, on the disk, in its table and at its doors.
#[derive(Clone, Debug)]
pub struct Roll {
    /// The disk.
    pub store: Store,
    /// The table.
    pub nodes: NodesWriter,
    /// Who is here.
    pub registry: Registry,
    /// Who ends the tunnels, even where whoever has asked for it goes away.
    pub tasks: Arc<Tasks>,
}

impl Roll {
    /// As [`Roll::refresh`], to its end even where nobody waits for it any more.
    ///
    /// # Errors
    /// As there; nothing where the gateway ends meanwhile.
    pub async fn refreshed(&self) -> Option<Result<Vec<NodeName>, RefreshError>> {
        let (tell, told) = oneshot::channel();
        let roll = self.clone();
        self.tasks.spawn(Span::current(), async move {
            // Nobody listens where the one that asked has gone.
            let _ = tell.send(roll.refresh().await);
        });
        told.await.ok()
    }

    /// Takes up what the disk says now. Returns the nodes whose tunnels were ended for that.
    ///
    /// # Errors
    /// If the disk cannot be read; then all is as it was.
    pub async fn refresh(&self) -> Result<Vec<NodeName>, RefreshError> {
        let (store, nodes) = (self.store.clone(), self.nodes.clone());
        let read = spawn_blocking(move || nodes.refresh(|| records(&store)));
        read.await??;
        let nodes = self.nodes.reader();
        let unwelcome = |(node, edge): (NodeName, Edge)| {
            let why = unwelcome(&nodes, &node, edge.admitted.certificate.issued_at)?;
            Some((node, edge, why))
        };
        let leaving: Vec<_> = self
            .registry
            .all()
            .into_iter()
            .filter_map(unwelcome)
            .collect();
        if leaving.is_empty() {
            return Ok(Vec::new());
        }
        for (node, edge, why) in &leaving {
            tracing::warn!(%node, why, "ending a tunnel of {node}");
            edge.admitted.tunnel.drain();
            let line = dismissal(Dismissal::Unwelcome, why.clone());
            // One that takes no lines hears nothing.
            let _ = edge.admitted.control.try_send(Box::new(line));
        }
        sleep(LAST_WORDS).await;
        let mut gone = Vec::new();
        for (node, edge, _) in leaving {
            edge.admitted.tunnel.close();
            gone.push(node);
        }
        gone.dedup();
        Ok(gone)
    }
}

/// The line that sends an edge away.
pub(super) fn dismissal(why: Dismissal, detail: String) -> ToEdge {
    ToEdge::Dismiss {
        why,
        detail,
        retry_after_ms: u64::try_from(AWAY.as_millis()).unwrap_or(u64::MAX),
    }
}

/// Why a node is not welcome here with a certificate that was `issued` then, if it is not.
pub(super) fn unwelcome(nodes: &Nodes, node: &NodeName, issued: u64) -> Option<String> {
    match nodes.get(node) {
        None => Some(format!(
            "node {node} is not enrolled at this gateway (or was removed); join again with a new token"
        )),
        Some(Node {
            revoked: Some(reason),
            ..
        }) => Some(format!("node {node} is revoked: {reason}")),
        // A machine that was stolen has the certificate of the one that took its place.
        Some(Node { joined_at, .. }) if issued < joined_at => Some(format!(
            "this certificate of node {node} is from before the node joined anew; join again with a new token"
        )),
        Some(_) => None,
    }
}

/// What the disk says of nodes.
pub(crate) fn records(store: &Store) -> Result<BTreeMap<NodeName, Node>, StoreError> {
    let records = store.nodes().all()?.into_iter().map(|record| {
        let node = Node {
            addresses: record.addresses,
            pool: record.pool,
            labels: record.labels,
            joined_at: record.enrolled_at,
            revoked: record.revoked.map(|revoked| revoked.reason),
            ..Node::default()
        };
        (record.node, node)
    });
    Ok(records.collect())
}
