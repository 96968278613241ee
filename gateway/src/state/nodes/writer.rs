//! The only writer of the table of nodes: each change builds a new table from the records and the cluster.

use super::{Cluster, ClusterNode, Node, NodeSources, Nodes, Table};
use causeway_certs::NodeName;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};
use tokio::sync::watch;

/// Write access to the table.
#[derive(Clone, Debug, Default)]
pub struct NodesWriter {
    nodes: Nodes,
    /// Locked while a new table is built from the old one.
    making: Arc<Mutex<()>>,
    /// Notifies of a new table. The request path never uses it.
    changes: Arc<watch::Sender<()>>,
}

impl NodesWriter {
    /// Returns read access to this table.
    pub fn reader(&self) -> Nodes {
        self.nodes.clone()
    }

    /// Subscribes to changes of this table from now on, for data that is derived from the table.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Adds or replaces one node; one that is revoked stays so.
    pub fn put(&self, name: NodeName, mut node: Node) {
        self.change(|nodes| {
            if let Some(before) = nodes.get(&name) {
                node.revoked.clone_from(&before.revoked);
            }
            nodes.insert(name, node);
        });
    }

    /// Replaces the data that the cluster has of its nodes.
    pub fn cluster(&self, members: BTreeMap<NodeName, ClusterNode>) {
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        let cluster = Cluster::Known(Arc::new(members));
        self.publish(NodeSources {
            cluster,
            ..self.said()
        });
    }

    /// Notes why the cluster's first list of nodes has not arrived. Does nothing once it has.
    pub fn pending(&self, reason: &str) {
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.said();
        if matches!(before.cluster, Cluster::Known(_)) {
            return;
        }
        self.publish(NodeSources {
            cluster: Cluster::Pending(reason.into()),
            ..before
        });
    }

    /// Replaces the zones in which nodes have names as well, `NODE.ZONE`.
    pub fn zones(&self, zones: &[String]) {
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        let behind =
            |zone: &String| format!(".{}", zone.trim_end_matches('.').to_ascii_lowercase());
        let zones: Arc<[String]> = zones
            .iter()
            .map(behind)
            .filter(|zone| zone != ".")
            .collect();
        let before = self.said();
        if before.zones != zones {
            self.publish(NodeSources { zones, ..before });
        }
    }

    /// Replaces the revoked nodes, which are revoked whatever the records contain. Returns whether the set has changed.
    pub fn revoke(&self, names: BTreeSet<NodeName>) -> bool {
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, revoked) = (self.said(), Arc::new(names));
        let new = before.revoked != revoked;
        if new {
            self.publish(NodeSources { revoked, ..before });
        }
        new
    }

    /// Adds the nodes that `written` returns. The table is locked meanwhile.
    ///
    /// # Errors
    /// The error of `written`; then the table is unchanged.
    pub fn add<E>(
        &self,
        written: impl FnOnce() -> Result<Vec<(NodeName, Node)>, E>,
    ) -> Result<(), E> {
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        let written = written()?;
        if written.is_empty() {
            return Ok(());
        }
        self.store(|records| {
            for (name, node) in written {
                records.insert(name, node);
            }
        });
        Ok(())
    }

    /// Replaces all nodes by those that `read` returns. The table is locked meanwhile.
    ///
    /// # Errors
    /// The error of `read`; then the table is unchanged.
    pub fn refresh<E>(
        &self,
        read: impl FnOnce() -> Result<BTreeMap<NodeName, Node>, E>,
    ) -> Result<(), E> {
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        let read = read()?;
        self.store(|records| *records = read);
        Ok(())
    }

    /// Removes one node.
    pub fn remove(&self, name: &NodeName) {
        self.change(|nodes| {
            nodes.remove(name);
        });
    }

    /// Replaces all nodes.
    pub fn replace(&self, all: BTreeMap<NodeName, Node>) {
        self.change(|nodes| *nodes = all);
    }

    fn change(&self, edit: impl FnOnce(&mut BTreeMap<NodeName, Node>)) {
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        self.store(edit);
    }

    /// Stores edited records. `making` must be locked.
    fn store(&self, edit: impl FnOnce(&mut BTreeMap<NodeName, Node>)) {
        let mut said = self.said();
        edit(&mut said.records);
        self.publish(said);
    }

    fn said(&self) -> NodeSources {
        self.nodes.0.load().said.clone()
    }

    fn publish(&self, said: NodeSources) {
        let mut table = Table::of(said);
        table.follow(&self.nodes.0.load());
        self.nodes.0.store(Arc::new(table));
        self.changes.send_replace(());
    }
}
