//! The only writer of the table of nodes: each change builds a new table from the records and the cluster.

use super::{Cluster, ClusterNode, Node, NodeSources, Nodes, Table};
use crate::state::pods::PodsWriter;
use causeway_certs::NodeName;
use ipnet::IpNet;
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
    write_lock: Arc<Mutex<()>>,
    /// Notifies of a new table. The request path never uses it.
    changed: Arc<watch::Sender<()>>,
}

impl NodesWriter {
    /// Returns read access to this table.
    pub fn reader(&self) -> Nodes {
        self.nodes.clone()
    }

    /// Subscribes to later changes of this table, for data that is derived from the table.
    pub fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Subscribes to later changes of the cluster's pods; `None` if pods are not followed.
    pub fn subscribe_pods(&self) -> Option<watch::Receiver<()>> {
        self.nodes.pods.subscribe()
    }

    /// Starts to follow the cluster's pods in these networks. From now on no address in them is routed by the networks of nodes.
    pub fn follow_pods(&self, networks: &[IpNet]) {
        self.nodes.pods.follow(networks);
    }

    /// Returns write access to the table of pods for its only writer, or `None` if pods are not followed.
    pub fn pods(&self, max_pods: usize) -> Option<PodsWriter> {
        PodsWriter::new(&self.nodes.pods, max_pods)
    }

    /// Adds or replaces one node. A revoked node stays revoked.
    pub fn upsert(&self, name: NodeName, node: Node) {
        self.upsert_all([(name, node)]);
    }

    /// Adds or replaces nodes like [`NodesWriter::upsert`]. Each change of the table copies the table.
    pub fn upsert_all(&self, new_nodes: impl IntoIterator<Item = (NodeName, Node)>) {
        self.edit_records(|nodes| {
            for (name, mut node) in new_nodes {
                if let Some(previous) = nodes.get(&name) {
                    node.revoked.clone_from(&previous.revoked);
                }
                nodes.insert(name, node);
            }
        });
    }

    /// Replaces the cluster's data about its nodes.
    pub fn replace_cluster(&self, members: BTreeMap<NodeName, ClusterNode>) {
        let _making = self
            .write_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let cluster = Cluster::Known(Arc::new(members));
        self.publish(NodeSources {
            cluster,
            ..self.sources()
        });
    }

    /// Records the reason why the cluster's first list of nodes has not arrived. Does nothing after the list has arrived.
    pub fn set_pending(&self, reason: &str) {
        let _making = self
            .write_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let previous = self.sources();
        if matches!(previous.cluster, Cluster::Known(_)) {
            return;
        }
        self.publish(NodeSources {
            cluster: Cluster::Pending(reason.into()),
            ..previous
        });
    }

    /// Replaces the zones in which nodes have names as well, `NODE.ZONE`.
    pub fn replace_zones(&self, zones: &[String]) {
        let _making = self
            .write_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let to_suffix =
            |zone: &String| format!(".{}", zone.trim_end_matches('.').to_ascii_lowercase());
        let zones: Arc<[String]> = zones
            .iter()
            .map(to_suffix)
            .filter(|zone| zone != ".")
            .collect();
        let previous = self.sources();
        if previous.zones != zones {
            self.publish(NodeSources { zones, ..previous });
        }
    }

    /// Replaces the nodes that are revoked independent of their records. Returns whether the set has changed.
    pub fn replace_revoked(&self, names: BTreeSet<NodeName>) -> bool {
        let _making = self
            .write_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let (previous, revoked) = (self.sources(), Arc::new(names));
        let changed = previous.revoked != revoked;
        if changed {
            self.publish(NodeSources {
                revoked,
                ..previous
            });
        }
        changed
    }

    /// Adds the nodes that `write` returns. The table is locked during the call.
    ///
    /// # Errors
    /// The error of `write`. The table is then unchanged.
    pub fn add_records<E>(
        &self,
        write: impl FnOnce() -> Result<Vec<(NodeName, Node)>, E>,
    ) -> Result<(), E> {
        let _making = self
            .write_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let new_records = write()?;
        if new_records.is_empty() {
            return Ok(());
        }
        self.publish_edited(|records| {
            for (name, node) in new_records {
                records.insert(name, node);
            }
        });
        Ok(())
    }

    /// Replaces all nodes with those that `read_records` returns. The table is locked during the call.
    ///
    /// # Errors
    /// The error of `read_records`. The table is then unchanged.
    pub fn refresh<E>(
        &self,
        read_records: impl FnOnce() -> Result<BTreeMap<NodeName, Node>, E>,
    ) -> Result<(), E> {
        let _making = self
            .write_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let new_records = read_records()?;
        self.publish_edited(|records| *records = new_records);
        Ok(())
    }

    /// Removes one node.
    pub fn remove(&self, name: &NodeName) {
        self.edit_records(|nodes| {
            nodes.remove(name);
        });
    }

    /// Replaces all nodes.
    pub fn replace(&self, all: BTreeMap<NodeName, Node>) {
        self.edit_records(|nodes| *nodes = all);
    }

    fn edit_records(&self, edit: impl FnOnce(&mut BTreeMap<NodeName, Node>)) {
        let _making = self
            .write_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.publish_edited(edit);
    }

    /// Stores edited records. `write_lock` must be locked.
    fn publish_edited(&self, edit: impl FnOnce(&mut BTreeMap<NodeName, Node>)) {
        let mut sources = self.sources();
        edit(&mut sources.records);
        self.publish(sources);
    }

    fn sources(&self) -> NodeSources {
        self.nodes.table.load().sources.clone()
    }

    fn publish(&self, sources: NodeSources) {
        let mut table = Table::from_sources(sources);
        table.record_relabels(&self.nodes.table.load());
        self.nodes.table.store(Arc::new(table));
        self.changed.send_replace(());
    }
}
