//! Nodes that come by certificates of another system, where each that has one is welcome: noted when they come first, and
//! from then on to be revoked, labelled and shown like any other.
//!
//! While one write goes to the disk, whoever comes gathers for the next: a fleet that comes at once takes a few.

use crate::state::{Node, NodesWriter};
use causeway_certs::{NodeName, Store};
use rustls::pki_types::UnixTime;
use std::{
    collections::BTreeSet,
    mem,
    sync::{Arc, Mutex, PoisonError},
};
use tokio::{sync, task::spawn_blocking};

/// Who notes them. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Arrivals(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store: Store,
    nodes: NodesWriter,
    waiting: Mutex<BTreeSet<NodeName>>,
    /// Held while the disk is written.
    writing: sync::Mutex<()>,
}

impl Arrivals {
    /// Notes them in the data directory, and then in the table.
    pub fn new(store: &Store, nodes: &NodesWriter) -> Self {
        Self(Arc::new(Inner {
            store: store.clone(),
            nodes: nodes.clone(),
            waiting: Mutex::default(),
            writing: sync::Mutex::default(),
        }))
    }

    /// Makes sure that a node is known.
    ///
    /// # Errors
    /// If the disk cannot be written; then the node is no more known than before.
    pub async fn note(&self, node: &NodeName) -> Result<(), String> {
        let known = || self.0.nodes.reader().get(node).is_some();
        if known() {
            return Ok(());
        }
        self.waiting(|waiting| waiting.insert(node.clone()));
        let _writing = self.0.writing.lock().await;
        // Whoever wrote meanwhile has written for all that had gathered.
        if known() {
            return Ok(());
        }
        let mut gathered = self.waiting(mem::take);
        gathered.insert(node.clone());
        let inner = self.0.clone();
        let written = spawn_blocking(move || {
            let gathered: Vec<_> = gathered.into_iter().collect();
            let now = UnixTime::now().as_secs();
            inner.store.nodes().arrived(&gathered, now)?;
            inner.nodes.add(gathered, &Node::default());
            Ok::<_, causeway_certs::StoreError>(())
        });
        match written.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn waiting<T>(&self, with: impl FnOnce(&mut BTreeSet<NodeName>) -> T) -> T {
        with(
            &mut self
                .0
                .waiting
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_certs::Access;
    use futures_util::future::join_all;

    fn name(number: usize) -> NodeName {
        NodeName::parse(&format!("edge-{number}")).unwrap()
    }

    #[tokio::test]
    async fn a_fleet_that_comes_at_once_is_noted_whole_by_few_writes() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().join("data"), Access::Create).unwrap();
        let nodes = NodesWriter::default();
        let arrivals = Arrivals::new(&store, &nodes);
        let all: Vec<_> = (0..500).map(name).collect();
        for noted in join_all(all.iter().map(|node| arrivals.note(node))).await {
            noted.unwrap();
        }
        assert_eq!(store.nodes().all().unwrap().len(), all.len());
        assert_eq!(nodes.reader().names().len(), all.len());
    }

    #[tokio::test]
    async fn what_is_known_of_a_node_stays_and_a_disk_that_fails_lets_nobody_in() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().join("data"), Access::Create).unwrap();
        let nodes = NodesWriter::default();
        let arrivals = Arrivals::new(&store, &nodes);
        let pool = Some("north".to_owned());
        let known = Node {
            pool: pool.clone(),
            ..Node::default()
        };
        nodes.put(name(1), known);
        arrivals.note(&name(1)).await.unwrap();
        assert_eq!(nodes.reader().get(&name(1)).unwrap().pool, pool);
        std::fs::remove_dir_all(folder.path().join("data")).unwrap();
        arrivals.note(&name(2)).await.unwrap_err();
        assert_eq!(nodes.reader().get(&name(2)), None);
    }
}
