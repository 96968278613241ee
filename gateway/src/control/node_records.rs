//! Batched updates of node records in the data directory: arrivals and renewals.
//!
//! Each write contains the records of all nodes. During a write, further changes are collected for the next one, so that a fleet
//! that connects or renews at once takes a few writes. A write that has begun finishes, even if no task waits for it any more.

use super::eligibility::node_from_record;
use crate::state::NodesWriter;
use causeway_certs::{IssuedCertificate, NodeName, NodeRecord, NodeUpdate, Store, StoreError};
use rustls::pki_types::UnixTime;
use std::{
    mem,
    sync::{Arc, Mutex, PoisonError},
};
use tokio::{
    sync::{self, oneshot},
    task::spawn_blocking,
};

/// Writer of node records. Cheap to clone.
#[derive(Clone, Debug)]
pub struct NodeRecordWriter(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store: Store,
    nodes: NodesWriter,
    pending: Mutex<Vec<PendingWrite>>,
    /// Lock that is held during a write.
    write_lock: Arc<sync::Mutex<()>>,
    #[cfg(test)]
    writes: std::sync::atomic::AtomicUsize,
}

#[derive(Debug)]
struct PendingWrite {
    node: NodeName,
    change: NodeUpdate,
    responder: oneshot::Sender<WriteResult>,
}

/// Record of a node after the write, or the reason why the write failed.
pub(super) type WriteResult = Result<Option<NodeRecord>, WriteError>;

/// Reason why the data directory was not written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct WriteError(String);

impl WriteError {
    fn from_error(error: &impl ToString) -> Self {
        Self(error.to_string())
    }

    /// Returns the error for a process that ends during a write.
    fn cancelled<E>(_: E) -> Self {
        Self("the write was cancelled because the gateway is shutting down".to_owned())
    }
}

impl NodeRecordWriter {
    /// Returns a writer that updates the data directory first, and then the table.
    pub fn new(store: &Store, nodes: &NodesWriter) -> Self {
        Self(Arc::new(Inner {
            store: store.clone(),
            nodes: nodes.clone(),
            pending: Mutex::default(),
            write_lock: Arc::default(),
            #[cfg(test)]
            writes: std::sync::atomic::AtomicUsize::default(),
        }))
    }

    /// Makes sure that there is a record of a node that connects with a certificate of an external CA.
    ///
    /// # Errors
    /// If the disk cannot be written. The node then has no new record.
    pub async fn ensure_record(&self, node: &NodeName) -> Result<(), WriteError> {
        if self.0.nodes.reader().get(node).is_some() {
            return Ok(());
        }
        let at = UnixTime::now().as_secs();
        self.ensure_record_at(node, at).await
    }

    /// Adds a record to the table that is already on the disk.
    pub(super) fn add_stored(&self, record: NodeRecord) {
        let (name, node) = node_from_record(record);
        self.0.nodes.upsert(name, node);
    }

    /// Records a node's next certificate, unless the node is revoked. Returns the resulting record, or nothing if the node was
    /// removed meanwhile.
    ///
    /// # Errors
    /// If the disk cannot be written.
    pub async fn record_renewal(&self, node: &NodeName, issued: IssuedCertificate) -> WriteResult {
        self.enqueue(node, NodeUpdate::Renewed(issued)).await
    }

    /// Records the certificate of a node that joins by its cluster identity. Returns the resulting record. Certificates issued
    /// before `at` are no longer valid for the node.
    ///
    /// # Errors
    /// If the disk cannot be written.
    pub async fn record_join(
        &self,
        node: &NodeName,
        at: u64,
        issued: IssuedCertificate,
    ) -> WriteResult {
        self.enqueue(node, NodeUpdate::Joined { at, issued }).await
    }

    /// Makes sure that there is a record of a node that its cluster admits and that has joined through another gateway.
    ///
    /// # Errors
    /// If the disk cannot be written.
    pub async fn ensure_record_at(&self, node: &NodeName, at: u64) -> Result<(), WriteError> {
        self.enqueue(node, NodeUpdate::Connected { at }).await?;
        Ok(())
    }

    async fn enqueue(&self, node: &NodeName, change: NodeUpdate) -> WriteResult {
        let (tell, mut response) = oneshot::channel();
        self.0.with_pending(|gathered| {
            gathered.push(PendingWrite {
                node: node.clone(),
                change,
                responder: tell,
            });
        });
        let write_guard = tokio::select! {
            biased;
            written = &mut response => return written.map_err(WriteError::cancelled)?,
            writing = self.0.write_lock.clone().lock_owned() => writing,
        };
        let inner = self.0.clone();
        // Writes all collected records. Another task may have written this one in the meantime.
        let written = spawn_blocking(move || {
            // The next write begins only after this one has ended, even if the waiting task is gone.
            let _writing = write_guard;
            inner.write();
        });
        written
            .await
            .map_err(|error| WriteError::from_error(&error))?;
        response.await.map_err(WriteError::cancelled)?
    }
}

impl Inner {
    fn with_pending<T>(&self, with: impl FnOnce(&mut Vec<PendingWrite>) -> T) -> T {
        let gathered = self.pending.lock();
        with(&mut gathered.unwrap_or_else(PoisonError::into_inner))
    }

    /// Writes the collected changes. Blocks on the disk.
    fn write(&self) {
        let entries = self.with_pending(mem::take);
        if entries.is_empty() {
            return;
        }
        let (changes, responders): (Vec<_>, Vec<_>) = entries
            .into_iter()
            .map(
                |PendingWrite {
                     node,
                     change,
                     responder: tell,
                 }| ((node, change), tell),
            )
            .unzip();
        #[cfg(test)]
        self.writes
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mut records = Vec::new();
        let written = self.nodes.add_records(|| {
            records = self.store.nodes().change(&changes)?;
            let updates = changes.iter().zip(&records);
            let new_nodes = updates.filter_map(|((_, change), record)| {
                // A renewal changes nothing in the table.
                let is_renewal = matches!(change, NodeUpdate::Renewed(_));
                record.clone().filter(|_| !is_renewal).map(node_from_record)
            });
            Ok::<_, StoreError>(new_nodes.collect())
        });
        let results: Vec<WriteResult> = match written {
            Ok(()) => records.into_iter().map(Ok).collect(),
            Err(error) => {
                let why = WriteError::from_error(&error);
                responders.iter().map(|_| Err(why.clone())).collect()
            }
        };
        for (tell, written) in responders.into_iter().zip(results) {
            // The requesting task may have ended.
            let _ = tell.send(written);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        control::tests::world::{name, new_ca},
        state::Node,
    };
    use causeway_certs::{NodeAttributes, OpenMode, PrivateKey, Revocation, VerifiedPublicKey};
    use futures_util::future::join_all;
    use std::time::Duration;

    struct World {
        folder: tempfile::TempDir,
        store: Store,
        nodes: NodesWriter,
        ledger: NodeRecordWriter,
    }

    fn world() -> World {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path().join("data"), OpenMode::Create).unwrap();
        let nodes = NodesWriter::default();
        World {
            ledger: NodeRecordWriter::new(&store, &nodes),
            folder,
            store,
            nodes,
        }
    }

    fn issued(node: &NodeName) -> IssuedCertificate {
        let key = PrivateKey::generate().unwrap();
        let csr = VerifiedPublicKey::verify(&key.request().unwrap()).unwrap();
        let life = Duration::from_hours(1);
        new_ca("td").issue_edge(&csr, node, life).unwrap()
    }

    #[tokio::test]
    async fn a_fleet_that_comes_at_once_is_noted_whole_by_one_write() {
        let world = world();
        let all: Vec<_> = (0..500).map(|n| name(&format!("edge-{n}"))).collect();
        // The first write holds the lock until all other nodes have been added.
        let disk = world.ledger.0.write_lock.lock().await;
        let coming = join_all(all.iter().map(|node| world.ledger.ensure_record(node)));
        let mut coming = std::pin::pin!(coming);
        assert!(futures_util::poll!(&mut coming).is_pending());
        assert_eq!(
            world.ledger.0.with_pending(|gathered| gathered.len()),
            all.len()
        );
        drop(disk);
        for arrived in coming.await {
            arrived.unwrap();
        }
        assert_eq!(world.store.nodes().all().unwrap().len(), all.len());
        assert_eq!(world.nodes.reader().names().len(), all.len());
        let writes = world
            .ledger
            .0
            .writes
            .load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(writes, 1);
    }

    #[tokio::test]
    async fn a_cancelled_waiter_leaves_the_answer_to_other_waiters() {
        let world = world();
        let (first, second) = (name("edge-1"), name("edge-2"));
        let disk = world.ledger.0.write_lock.lock().await;
        let mut gone = Box::pin(world.ledger.ensure_record(&first));
        assert!(futures_util::poll!(&mut gone).is_pending());
        drop((gone, disk));
        world.ledger.ensure_record(&second).await.unwrap();
        assert_eq!(world.nodes.reader().names(), [first, second]);
    }

    #[tokio::test]
    async fn known_node_records_stay_and_a_failing_disk_admits_no_node() {
        let world = world();
        let (known, new) = (name("edge-1"), name("edge-2"));
        let pool = Some("north".to_owned());
        world.nodes.upsert(
            known.clone(),
            Node {
                pool: pool.clone(),
                ..Node::default()
            },
        );
        world.ledger.ensure_record(&known).await.unwrap();
        assert_eq!(world.nodes.reader().get(&known).unwrap().pool, pool);
        // The data directory is newer than the table, as after a command that did not notify the gateway.
        let (late, at) = (name("edge-3"), 7);
        let nodes = world.store.nodes();
        nodes.confirm(&late, NodeAttributes::default(), at).unwrap();
        let reason = "stolen".to_owned();
        nodes
            .set_revoked(
                &late,
                Some(Revocation {
                    at,
                    reason,
                    other: causeway_certs::OtherFields::new(),
                }),
            )
            .unwrap();
        world.ledger.ensure_record(&late).await.unwrap();
        let found = world.nodes.reader().get(&late).unwrap();
        assert_eq!(
            (found.joined_at, found.revoked.as_deref()),
            (at, Some("stolen"))
        );
        let nobody = world.ledger.record_renewal(&new, issued(&new)).await;
        assert_eq!(nobody, Ok(None), "it has not joined");
        std::fs::remove_dir_all(world.folder.path().join("data")).unwrap();
        world.ledger.ensure_record(&new).await.unwrap_err();
        assert_eq!(world.nodes.reader().get(&new), None);
    }
}
