//! Cached objects on the disk: loaded before the endpoint listens, and written when they have changed.
//!
//! One file for each resource, written by a thread that may block, at most once in `save_every`. A process that stops in
//! order has saved all of it. A process that is killed has the state of `save_every` before. Once a minute the time is
//! recorded until which the saved state was the newest.

use super::{changes::any_changed, membership::Membership};
use causeway_certs::Store as DataDir;
use causeway_watch_cache::{Store, WatchCache, disk::SnapshotDir};
use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    task::spawn_blocking,
    time::{interval, sleep, timeout},
};
use tracing::{debug, warn};

/// How often it is noted until when the states were the newest: a small file, and a disk that wears out.
const NOTE: Duration = Duration::from_mins(1);
/// A disk that hangs does not keep an edge from stopping.
const LAST: Duration = Duration::from_secs(5);

/// Writer that saves a cache to disk. Cheap to clone.
#[derive(Clone)]
pub(super) struct DiskWriter(Arc<Inner>);

struct Inner {
    pool: Arc<WatchCache>,
    saved: SnapshotDir,
    told: Membership,
    data: DataDir,
    /// Version of each store that is on the disk. Locked while it is written, by threads that may block.
    written: Mutex<Vec<u64>>,
}

impl DiskWriter {
    pub(super) fn new(
        pool: Arc<WatchCache>,
        (dir, most): (PathBuf, u64),
        (told, data): (Membership, DataDir),
    ) -> Self {
        Self(Arc::new(Inner {
            written: Mutex::new(vec![0; pool.stores().len()]),
            saved: SnapshotDir::new(dir, most),
            pool,
            told,
            data,
        }))
    }

    /// Takes up what is on the disk. Returns when it is there.
    pub(super) async fn load(&self) {
        let keep = self.clone();
        let loaded = spawn_blocking(move || {
            for fault in keep.0.saved.load(&keep.0.pool) {
                warn!(fault, "cannot use saved API cache data");
            }
            let versions = keep.0.pool.stores().iter().map(|store| version(store));
            *keep
                .0
                .written
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = versions.collect();
        });
        if let Err(error) = loaded.await {
            debug!(%error, "saved API cache data is not loaded, because this edge is stopping");
        }
    }

    /// Writes what changes, for as long as it is polled.
    pub(super) async fn run(self, every: Duration) {
        let mut changes: Vec<_> = self
            .0
            .pool
            .stores()
            .iter()
            .map(|store| store.changed())
            .collect();
        let mut told = self.0.told.changes();
        let mut note = interval(NOTE);
        loop {
            tokio::select! {
                () = any_changed(&mut changes) => {
                    // Batches changes that follow soon.
                    sleep(every).await;
                    changes.iter_mut().for_each(tokio::sync::watch::Receiver::mark_unchanged);
                    self.write().await;
                }
                _ = note.tick() => {
                    let stores = self.0.pool.stores();
                    if stores.iter().any(|store| store.status().lost.is_none()) {
                        self.note().await;
                    }
                }
                heard = told.changed() => {
                    if heard.is_err() {
                        return;
                    }
                    told.mark_unchanged();
                    let keep = self.clone();
                    // A failed write is repeated with the next change.
                    let _ = spawn_blocking(move || keep.0.told.keep(&keep.0.data)).await;
                }
            }
        }
    }

    /// Writes what is not on the disk.
    async fn write(&self) {
        let keep = self.clone();
        let writing = spawn_blocking(move || {
            let inner = &keep.0;
            let mut written = inner.written.lock().unwrap_or_else(PoisonError::into_inner);
            for (store, on_disk) in inner.pool.stores().iter().zip(written.iter_mut()) {
                let now = version(store);
                if now == *on_disk {
                    continue;
                }
                match inner.saved.write(store) {
                    Ok(()) => *on_disk = now,
                    Err(error) => {
                        warn!(resource = %store.resource(), %error, "cannot save API cache data to disk; retrying");
                    }
                }
            }
        });
        if let Err(error) = writing.await {
            debug!(%error, "API cache data is not saved, because this edge is stopping");
        }
    }

    /// Notes until when what is on the disk was the newest.
    async fn note(&self) {
        let keep = self.clone();
        let noting = spawn_blocking(move || {
            if let Err(error) = keep.0.saved.write_times(&keep.0.pool) {
                warn!(%error, "cannot save the age of the API cache data; retrying");
            }
        });
        if let Err(error) = noting.await {
            debug!(%error, "the age of the API cache data is not saved, because this edge is stopping");
        }
    }

    /// Writes what is not on the disk, before the end.
    pub(super) async fn end(&self) {
        let last = async {
            self.write().await;
            self.note().await;
        };
        if timeout(LAST, last).await.is_err() {
            warn!("the disk is too slow: the latest API cache data is not saved");
        }
    }
}

fn version(store: &Store) -> u64 {
    store.status().version
}
