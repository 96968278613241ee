//! Engine of the shared state: a cache of all entries, which a watch keeps current.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicI64, Ordering::Relaxed},
    },
    time::Duration,
};

use crate::{
    config::Etcd,
    shared_state::engine::{EngineError, StateEngine, send_all},
};
use causeway_certs::{Entries, EntryChange};
use futures_util::{FutureExt, future::BoxFuture};
use tokio::{
    sync::Mutex as AsyncMutex,
    time::{Instant, sleep_until, timeout},
};

use super::{
    client::{Access, Client, REQUEST_TIMEOUT},
    messages::{
        self, EventKind, KeyValue, PAGE_LIMIT, RangeResponse, TxnResponse, WatchResponse,
        prefix_end,
    },
    watch::Watch,
};

/// Minimum time between two loads of all entries.
const MIN_LOAD_INTERVAL: Duration = Duration::from_secs(1);

/// Time without a message of the watch, after which the engine checks that it has missed no change. TCP keepalive detects a
/// peer that is gone. The check detects a proxy or a member whose connection is alive but which sends nothing. etcd cannot
/// help: an idle watch has a message each 10 minutes only, and the JSON gateway passes no further message of a client over
/// HTTP/1.1.
const CHECK_INTERVAL: Duration = Duration::from_mins(1);

const RANGE_PATH: &str = "/v3/kv/range";
const TXN_PATH: &str = "/v3/kv/txn";
const WATCH_PATH: &str = "/v3/watch";

/// etcd, as the engine of the shared state.
#[derive(Debug)]
pub struct EtcdEngine {
    client: Client,
    /// Prefix of the keys, and the end of their range.
    prefix: String,
    end: String,
    cache: Mutex<Cache>,
    watch: AsyncMutex<WatchState>,
    /// Revision of the last load, or of a later write.
    revision: AtomicI64,
}

/// Entries, and those that were removed lately.
#[derive(Debug, Default)]
struct Cache(BTreeMap<String, CachedEntry>);

#[derive(Debug, PartialEq)]
struct CachedEntry {
    /// `None` if the entry does not exist.
    value: Option<String>,
    /// Revision of the change, or a later one at which the entry was the same.
    revision: i64,
}

impl Cache {
    /// Records an entry as it is at a revision. Returns whether the entry is new.
    fn observe(&mut self, key: String, value: Option<String>, revision: i64) -> bool {
        let entry = CachedEntry { value, revision };
        match self.0.get_mut(&key) {
            Some(current) if current.revision > revision => return false,
            Some(current) => *current = entry,
            None => drop(self.0.insert(key, entry)),
        }
        true
    }

    /// Replaces all entries by those of a revision, except for entries that were observed later.
    fn replace(&mut self, entries: Vec<(String, String, i64)>, revision: i64) {
        self.0.retain(|_, entry| entry.revision > revision);
        for (key, value, revision) in entries {
            self.observe(key, Some(value), revision);
        }
    }

    /// Forgets removed entries whose removal the watch has passed: no older change of them can follow.
    fn prune(&mut self, revision: i64) {
        let is_needed = |entry: &CachedEntry| entry.value.is_some() || entry.revision > revision;
        self.0.retain(|_, entry| is_needed(entry));
    }

    fn entries(&self) -> Entries {
        let entries = self.0.iter();
        entries
            .filter_map(|(key, entry)| Some((key.clone(), entry.value.clone()?)))
            .collect()
    }

    /// Returns the number of entries.
    fn len(&self) -> usize {
        let entries = self.0.values();
        entries.filter(|entry| entry.value.is_some()).count()
    }
}

/// Watch of the entries.
#[derive(Debug, Default)]
struct WatchState {
    /// `None` before the first load, and after a failure.
    watch: Option<Watch>,
    /// Whether an entry may have changed since the last load began.
    has_changes: bool,
    /// Revision up to which the cache has all changes.
    revision: i64,
    /// Time at which the last load of all entries began.
    loaded_at: Option<Instant>,
}

impl EtcdEngine {
    /// Returns an engine for a validated configuration. It connects when it is used.
    ///
    /// # Errors
    /// If a file of the configuration cannot be used.
    pub fn new(config: &Etcd) -> Result<Self, EngineError> {
        Ok(Self {
            client: Client::new(config)?,
            prefix: config.prefix.clone(),
            end: prefix_end(&config.prefix),
            cache: Mutex::default(),
            watch: AsyncMutex::default(),
            revision: AtomicI64::default(),
        })
    }

    fn range(&self) -> (&str, &str) {
        (&self.prefix, &self.end)
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn corrupt(message: &str) -> EngineError {
        EngineError(format!("etcd: {message}"))
    }

    async fn load_entries(&self) -> Result<Entries, EngineError> {
        let mut state = self.watch.lock().await;
        state.has_changes = false;
        self.apply_received(&mut state);
        if state.watch.is_none() {
            self.load_all(&mut state).await?;
            // A restored etcd has a lower revision.
            self.revision.store(state.revision, Relaxed);
        }
        state.has_changes = false;
        self.revision.fetch_max(state.revision, Relaxed);
        let mut cache = self.cache();
        cache.prune(state.revision);
        Ok(cache.entries())
    }

    /// Applies the messages that the watch has received.
    fn apply_received(&self, state: &mut WatchState) {
        while let Some(watch) = &mut state.watch
            && let Some(message) = watch.next().now_or_never()
        {
            self.apply(state, message);
        }
    }

    /// Applies a message of the watch, or drops the watch.
    fn apply(&self, state: &mut WatchState, message: Result<WatchResponse, String>) {
        let applied = message.and_then(|response| {
            for event in response.events {
                let key = event.kv.name(&self.prefix)?;
                let revision = event.kv.mod_revision;
                let value = match event.kind {
                    EventKind::Put => Some(event.kv.value()?),
                    EventKind::Delete => None,
                };
                self.cache().observe(key, value, revision);
                state.has_changes = true;
                state.revision = state.revision.max(revision);
            }
            Ok(())
        });
        if let Err(why) = applied {
            self.drop_watch(state, &why);
        }
    }

    fn drop_watch(&self, state: &mut WatchState, why: &str) {
        if let Some(watch) = state.watch.take() {
            let endpoint = &watch.endpoint;
            self.client.avoid(endpoint);
            tracing::info!(
                endpoint,
                why,
                "the watch of etcd ended; all entries are loaded again"
            );
        }
    }

    /// Reads all entries at one revision, and watches their changes from then on.
    async fn load_all(&self, state: &mut WatchState) -> Result<(), EngineError> {
        state.loaded_at = Some(Instant::now());
        // A restored etcd has a lower revision. What was observed before must not outlast the load.
        self.cache().0.clear();
        let (mut key, mut revision) = (self.prefix.clone(), 0);
        let mut entries = Vec::new();
        loop {
            let request = messages::range((&key, &self.end), PAGE_LIMIT, revision);
            let page: RangeResponse = self.client.call(Access::Read, RANGE_PATH, &request).await?;
            if revision == 0 {
                revision = page.header.revision;
            }
            for kv in page.kvs {
                let name = kv.name(&self.prefix).map_err(|why| Self::corrupt(&why))?;
                let mod_revision = kv.mod_revision;
                let value = kv.value().map_err(|why| Self::corrupt(&why))?;
                entries.push((name, value, mod_revision));
            }
            match entries.last() {
                // The least key after the last one.
                Some((last, ..)) if page.more => key = format!("{}{last}\0", self.prefix),
                _ => break,
            }
        }
        let watch = self.open_watch(revision + 1).await?;
        tracing::debug!(revision, count = entries.len(), "etcd: loaded all entries");
        self.cache().replace(entries, revision);
        state.revision = revision;
        state.watch = Some(watch);
        Ok(())
    }

    async fn open_watch(&self, start_revision: i64) -> Result<Watch, EngineError> {
        let request = messages::watch(self.range(), start_revision);
        let (endpoint, body) = self.client.open_stream(WATCH_PATH, &request).await?;
        let mut watch = Watch::new(endpoint, body);
        // The first message says that the watch is created.
        let created = match timeout(REQUEST_TIMEOUT, watch.next()).await {
            Ok(created) => created,
            Err(_) => Err(format!("no message within {REQUEST_TIMEOUT:?}")),
        };
        match created {
            Ok(_) => Ok(watch),
            Err(why) => {
                let endpoint = &watch.endpoint;
                self.client.avoid(endpoint);
                Err(EngineError(format!(
                    "etcd at {endpoint}: the entries cannot be watched: {why}"
                )))
            }
        }
    }

    async fn wait_for_change(&self) {
        let mut state = self.watch.lock().await;
        while !state.has_changes {
            let Some(watch) = &mut state.watch else {
                // Not at once, or a member that ends each watch would be asked for all entries all the time.
                if let Some(loaded_at) = state.loaded_at {
                    sleep_until(loaded_at + MIN_LOAD_INTERVAL).await;
                }
                return;
            };
            let check_at = watch.last_checked + CHECK_INTERVAL;
            tokio::select! {
                message = watch.next() => self.apply(&mut state, message),
                () = sleep_until(check_at) => self.check(&mut state).await,
            }
        }
    }

    /// Drops the watch if it has missed a change.
    async fn check(&self, state: &mut WatchState) {
        match self.has_missed_changes(state.revision).await {
            Err(error) => self.drop_watch(state, &error.to_string()),
            Ok(true) => self.drop_watch(state, "a change is missing"),
            Ok(false) => {
                if let Some(watch) = &mut state.watch {
                    watch.last_checked = Instant::now();
                }
            }
        }
    }

    async fn has_missed_changes(&self, revision: i64) -> Result<bool, EngineError> {
        let request = messages::changed_since(self.range(), revision);
        let response: RangeResponse = self.client.call(Access::Read, RANGE_PATH, &request).await?;
        let count = usize::try_from(response.count).unwrap_or(0);
        Ok(response.header.revision < revision
            || !response.kvs.is_empty()
            || count != self.cache().len())
    }

    /// Records the state of one entry, and returns its value.
    fn observe(
        &self,
        key: &str,
        kv: Option<KeyValue>,
        revision: i64,
    ) -> Result<Option<String>, EngineError> {
        let (value, revision) = match kv {
            Some(kv) => {
                let revision = kv.mod_revision;
                let value = kv.value().map_err(|why| Self::corrupt(&why))?;
                (Some(value), revision)
            }
            None => (None, revision),
        };
        self.cache()
            .observe(key.to_owned(), value.clone(), revision);
        Ok(value)
    }

    async fn get_entry(&self, key: &str) -> Result<Option<String>, EngineError> {
        let request = messages::get(&format!("{}{key}", self.prefix));
        let response: RangeResponse = self.client.call(Access::Read, RANGE_PATH, &request).await?;
        let kv = response.kvs.into_iter().next();
        self.observe(key, kv, response.header.revision)
    }

    /// Applies a change. Returns whether the entry had the expected value.
    async fn apply_change(&self, change: EntryChange) -> Result<bool, EngineError> {
        let request = messages::compare_and_swap(&self.prefix, &change);
        let response: TxnResponse = self.client.call(Access::Write, TXN_PATH, &request).await?;
        let revision = response.header.revision;
        let EntryChange { key, value, .. } = change;
        if response.succeeded {
            self.revision.fetch_max(revision, Relaxed);
            self.cache().observe(key, value, revision);
            return Ok(true);
        }
        self.observe(&key, response.current(), revision)?;
        Ok(false)
    }
}

impl fmt::Display for EtcdEngine {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "etcd at {}", self.client.endpoints().join(", "))
    }
}

impl StateEngine for EtcdEngine {
    fn load(&self) -> BoxFuture<'_, Result<Entries, EngineError>> {
        self.load_entries().boxed()
    }

    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<String>, EngineError>> {
        self.get_entry(key).boxed()
    }

    /// etcd writes the changes that arrive at once to its disk together.
    fn write_each(
        &self,
        changes: Vec<EntryChange>,
    ) -> BoxFuture<'_, Vec<Result<bool, EngineError>>> {
        let changes = changes.into_iter();
        send_all(changes.map(|change| self.apply_change(change))).boxed()
    }

    fn revision(&self) -> Option<u64> {
        u64::try_from(self.revision.load(Relaxed)).ok()
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        self.wait_for_change().boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(cache: &Cache) -> Vec<(String, String)> {
        cache.entries().into_iter().collect()
    }

    fn entry(key: &str, value: &str) -> (String, String) {
        (key.to_owned(), value.to_owned())
    }

    #[test]
    fn an_older_change_does_not_replace_an_own_write() {
        let mut cache = Cache::default();
        cache.replace(vec![("a".to_owned(), "1".to_owned(), 3)], 5);
        cache.observe("a".to_owned(), Some("3".to_owned()), 7);
        assert!(!cache.observe("a".to_owned(), Some("2".to_owned()), 6));
        assert_eq!(entries(&cache), [entry("a", "3")]);
        cache.observe("a".to_owned(), None, 9);
        assert!(!cache.observe("a".to_owned(), Some("4".to_owned()), 8));
        cache.prune(8);
        assert_eq!((entries(&cache), cache.0.len()), (Vec::new(), 1));
        cache.prune(9);
        assert!(cache.0.is_empty());
    }

    #[test]
    fn a_load_replaces_all_but_later_observations() {
        let mut cache = Cache::default();
        cache.observe("gone".to_owned(), Some("1".to_owned()), 4);
        cache.observe("later".to_owned(), Some("2".to_owned()), 6);
        cache.observe("removed".to_owned(), None, 7);
        let loaded = [("later", 3), ("removed", 3), ("same", 2)];
        let loaded = loaded.map(|(key, revision)| (key.to_owned(), "old".to_owned(), revision));
        cache.replace(loaded.into(), 5);
        assert_eq!(entries(&cache), [entry("later", "2"), entry("same", "old")]);
        assert_eq!(cache.len(), 2);
    }
}
