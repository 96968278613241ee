//! The data directory as an engine, for `causeway state migrate`: a gateway alone works on its directory without one.

use super::engine::{EngineError, StateEngine, results_of_keys};
use causeway_certs::{Entries, EntryChange, EntryKey, SharedCa, Store, StoreError};
use futures_util::{FutureExt, future::BoxFuture};
use std::{fmt, future::pending, path::PathBuf};
use tokio::task::spawn_blocking;

/// Engine that stores the state in a data directory.
#[derive(Debug)]
pub struct DataDirEngine {
    store: Store,
    path: PathBuf,
}

impl DataDirEngine {
    /// Returns the engine of the data directory at `path`.
    pub fn new(store: Store, path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        Self { store, path }
    }

    async fn on_disk<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, EngineError> {
        let store = self.store.clone();
        let done = spawn_blocking(move || work(&store)).await;
        let done = done.map_err(|error| EngineError(error.to_string()))?;
        done.map_err(|error| EngineError(error.to_string()))
    }
}

impl fmt::Display for DataDirEngine {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "the data directory {}", self.path.display())
    }
}

impl StateEngine for DataDirEngine {
    fn load(&self) -> BoxFuture<'_, Result<Entries, EngineError>> {
        self.on_disk(Store::entries).boxed()
    }

    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<String>, EngineError>> {
        async move { Ok(self.load().await?.remove(key)) }.boxed()
    }

    fn write_each(
        &self,
        changes: Vec<EntryChange>,
    ) -> BoxFuture<'_, Vec<Result<bool, EngineError>>> {
        let keys: Vec<_> = changes.iter().map(|change| change.key.clone()).collect();
        let work = move |store: &Store| {
            // The other entries have no effect without the CA.
            let (ca, others): (Vec<_>, Vec<_>) = changes
                .into_iter()
                .partition(|change| EntryKey::parse(&change.key) == Some(EntryKey::Ca));
            let mut conflicts = store.change_entries(&others)?;
            for change in ca {
                let current = store.entries()?.remove(&change.key);
                match &change.value {
                    Some(text) if current == change.expected => import_ca(store, text)?,
                    _ => conflicts.push(change.key),
                }
            }
            Ok(conflicts)
        };
        let written = self.on_disk(work);
        async move { results_of_keys(keys, &written.await) }.boxed()
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        pending().boxed()
    }
}

fn import_ca(store: &Store, text: &str) -> Result<(), StoreError> {
    let shared = SharedCa::from_entry(text).map_err(|why| StoreError::Entry {
        key: EntryKey::Ca.to_string(),
        why,
    })?;
    store.import_shared(&shared).map(drop)
}
