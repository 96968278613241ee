//! Cached objects on the disk: loaded before the listener accepts clients, and written when they have changed.
//!
//! Each resource has one file, which a blocking thread writes at most once in `save_every`. A process that stops in order has
//! saved everything. A process that is killed loses at most the changes of the last `save_every`. Once a minute the time is
//! recorded until which the saved state was the newest.

use super::{membership::Membership, status::any_changed};
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

/// Interval at which the time is saved until which the states were the newest. The file is small, and writes wear flash
/// storage.
const TIMES_INTERVAL: Duration = Duration::from_mins(1);
/// Maximum time for the last write. A disk that hangs must not prevent an edge from stopping.
const FINAL_SAVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Writer that saves a cache to disk. Cheap to clone.
#[derive(Clone)]
pub(super) struct DiskWriter(Arc<Inner>);

struct Inner {
    cache: Arc<WatchCache>,
    snapshots: SnapshotDir,
    membership: Membership,
    data_dir: DataDir,
    /// Version of each store that is on the disk. Locked during a write, by threads that may block.
    saved_versions: Mutex<Vec<u64>>,
}

impl DiskWriter {
    pub(super) fn new(
        cache: Arc<WatchCache>,
        (dir, max_bytes): (PathBuf, u64),
        (membership, data): (Membership, DataDir),
    ) -> Self {
        Self(Arc::new(Inner {
            saved_versions: Mutex::new(vec![0; cache.stores().len()]),
            snapshots: SnapshotDir::new(dir, max_bytes),
            cache,
            membership,
            data_dir: data,
        }))
    }

    /// Loads the saved objects. Returns when they are loaded.
    pub(super) async fn load(&self) {
        let this = self.clone();
        let loaded = spawn_blocking(move || {
            for fault in this.0.snapshots.load(&this.0.cache) {
                warn!(fault, "cannot use saved API cache data");
            }
            let current_versions = this.0.cache.stores().iter().map(|store| version(store));
            *this
                .0
                .saved_versions
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = current_versions.collect();
        });
        if let Err(error) = loaded.await {
            debug!(%error, "saved API cache data is not loaded, because this edge is stopping");
        }
    }

    /// Writes changes for as long as it is polled.
    pub(super) async fn run(self, save_interval: Duration) {
        let mut store_changes: Vec<_> = self
            .0
            .cache
            .stores()
            .iter()
            .map(|store| store.subscribe())
            .collect();
        let mut membership_changes = self.0.membership.changes();
        let mut save_times = interval(TIMES_INTERVAL);
        loop {
            tokio::select! {
                () = any_changed(&mut store_changes) => {
                    // Batches changes that follow soon.
                    sleep(save_interval).await;
                    store_changes.iter_mut().for_each(tokio::sync::watch::Receiver::mark_unchanged);
                    self.save_changed().await;
                }
                _ = save_times.tick() => {
                    let stores = self.0.cache.stores();
                    if stores.iter().any(|store| store.status().lost.is_none()) {
                        self.save_times().await;
                    }
                }
                changed = membership_changes.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    membership_changes.mark_unchanged();
                    let this = self.clone();
                    // A failed write is repeated with the next change.
                    let _ = spawn_blocking(move || this.0.membership.save(&this.0.data_dir)).await;
                }
            }
        }
    }

    /// Writes the stores that have changed since they were saved.
    async fn save_changed(&self) {
        let this = self.clone();
        let save_task = spawn_blocking(move || {
            let inner = &this.0;
            let mut saved_versions = inner
                .saved_versions
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            for (store, saved_version) in inner.cache.stores().iter().zip(saved_versions.iter_mut())
            {
                let current_version = version(store);
                if current_version == *saved_version {
                    continue;
                }
                match inner.snapshots.write(store) {
                    Ok(()) => *saved_version = current_version,
                    Err(error) => {
                        warn!(resource = %store.resource(), %error, "cannot save API cache data to disk; retrying");
                    }
                }
            }
        });
        if let Err(error) = save_task.await {
            debug!(%error, "API cache data is not saved, because this edge is stopping");
        }
    }

    /// Saves the time until which the saved state was the newest.
    async fn save_times(&self) {
        let this = self.clone();
        let save_task = spawn_blocking(move || {
            if let Err(error) = this.0.snapshots.write_times(&this.0.cache) {
                warn!(%error, "cannot save the age of the API cache data; retrying");
            }
        });
        if let Err(error) = save_task.await {
            debug!(%error, "the age of the API cache data is not saved, because this edge is stopping");
        }
    }

    /// Writes everything that has not been saved, before the edge stops.
    pub(super) async fn final_save(&self) {
        let last = async {
            self.save_changed().await;
            self.save_times().await;
        };
        if timeout(FINAL_SAVE_TIMEOUT, last).await.is_err() {
            warn!("the disk is too slow: the latest API cache data is not saved");
        }
    }
}

fn version(store: &Store) -> u64 {
    store.status().version
}
