//! Cache of the Secrets, which watches fill.

use super::shard::{CA_SECRET, CONTENT_ID_KEY, PREPARED_KEY, SecretNames, ShardObject};
use crate::client::watch_error_message;
use causeway_certs::Entries;
use futures_util::{
    FutureExt, StreamExt,
    stream::{SelectAll, select_all},
};
use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api,
    runtime::{
        WatchStreamExt,
        utils::Backoff,
        watcher::{self, Event, watcher},
    },
};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{sync::watch, time::sleep};

/// Timeout of a watch, in seconds. A change is noticed after this time even if the watch's connection is dead.
const WATCH_TIMEOUT: u32 = 60;
/// Minimum and maximum pause before a watch that failed is requested again.
const BACKOFF_RANGE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));
/// Time after which a failed watch counts as a change again.
const STALE_INTERVAL: Duration = Duration::from_secs(5);

/// Number of Secrets: those of the entries, and that of the CA.
const SECRETS: usize = CA_SECRET + 1;

/// Last known state of a Secret.
#[derive(Clone, Debug)]
pub(super) enum Observed {
    /// The API has not answered yet.
    Unknown,
    /// The Secret does not exist.
    Missing,
    /// The Secret exists.
    Present(Arc<ShardObject>),
}

/// Cache of one Secret.
#[derive(Debug)]
struct CachedShard {
    observed: Observed,
    /// Number of changes of `observed`.
    generation: u64,
    /// `generation` before the watch's list began, and whether the list has the object.
    list: (u64, bool),
    /// Whether the watch failed after the last successful read.
    stale: bool,
    /// Last entries while the state was complete.
    last_entries: Option<Arc<Entries>>,
}

/// Content of the Secrets that this gateway has used.
#[derive(Clone, Debug)]
pub(super) struct LoadedContent {
    /// Id of the content. `None` after an operator has written the entries of the first Secret.
    pub(super) id: Option<String>,
}

/// Cache of all Secrets.
#[derive(Debug)]
pub(super) struct Cache {
    state: Mutex<CacheState>,
    /// Number of changes, which readers can wait for.
    changes: watch::Sender<u64>,
}

#[derive(Debug)]
struct CacheState {
    shards: Vec<CachedShard>,
    loaded: Option<LoadedContent>,
    /// Value of `changes` at the beginning of the last load.
    seen: u64,
}

impl Default for Cache {
    fn default() -> Self {
        let shard = || CachedShard {
            observed: Observed::Unknown,
            generation: 0,
            list: (0, false),
            stale: false,
            last_entries: None,
        };
        Self {
            state: Mutex::new(CacheState {
                shards: std::iter::repeat_with(shard).take(SECRETS).collect(),
                loaded: None,
                seen: 0,
            }),
            changes: watch::Sender::new(0),
        }
    }
}

impl Cache {
    fn lock(&self) -> MutexGuard<'_, CacheState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a load begins. Changes from now on are not in it.
    pub(super) fn begin_load(&self) {
        let number = *self.changes.borrow();
        self.lock().seen = number;
    }

    /// Waits until the Secrets may have changed since the last load began, or a watch has failed.
    pub(super) async fn changed(&self) {
        let seen = self.lock().seen;
        let mut changes = self.changes.subscribe();
        let next_change = changes.wait_for(|number| *number != seen).map(drop);
        let still_stale = async {
            sleep(STALE_INTERVAL).await;
            if self.stale_shards().is_empty() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = next_change => {}
            () = still_stale => {}
        }
    }

    /// Returns the numbers of the Secrets whose state may be outdated.
    pub(super) fn stale_shards(&self) -> Vec<usize> {
        let state = self.lock();
        let shards = state.shards.iter().enumerate();
        shards
            .filter(|(_, shard)| shard.stale || matches!(shard.observed, Observed::Unknown))
            .map(|(index, _)| index)
            .collect()
    }

    /// Returns the state of each Secret.
    pub(super) fn all(&self) -> Vec<Observed> {
        let state = self.lock();
        let shards = state.shards.iter();
        shards.map(|shard| shard.observed.clone()).collect()
    }

    /// Returns a Secret, unless its state may be outdated.
    pub(super) fn current(&self, index: usize) -> Option<Arc<ShardObject>> {
        let state = self.lock();
        match state.shards.get(index)? {
            CachedShard {
                observed: Observed::Present(object),
                stale: false,
                ..
            } => Some(object.clone()),
            _ => None,
        }
    }

    /// Returns the content that was loaded last, if there was a load.
    pub(super) fn loaded(&self) -> Option<LoadedContent> {
        self.lock().loaded.clone()
    }

    /// Returns the last entries of a Secret while the state was complete.
    pub(super) fn last_entries(&self, index: usize) -> Option<Arc<Entries>> {
        self.lock().shards.get(index)?.last_entries.clone()
    }

    /// Records that these Secrets are complete. Later changes of them are changes of this content.
    pub(super) fn record_loaded(&self, objects: &[Arc<ShardObject>]) {
        let mut state = self.lock();
        let id = objects.first().and_then(|first| first.text(CONTENT_ID_KEY));
        state.loaded = Some(LoadedContent {
            id: id.map(str::to_owned),
        });
        for (shard, object) in state.shards.iter_mut().zip(objects) {
            let is_newer =
                matches!(&shard.observed, Observed::Present(now) if now.is_later_than(object));
            if !is_newer || shard.last_entries.is_none() {
                shard.last_entries = object.parsed_entries().cloned();
            }
        }
    }

    /// Returns the number of changes of a Secret, for [`Cache::record_read`].
    pub(super) fn generation(&self, index: usize) -> u64 {
        let state = self.lock();
        state.shards.get(index).map_or(0, |shard| shard.generation)
    }

    /// Records the response to a read that began at this generation, or to a write.
    ///
    /// A read sees all completed changes. So it replaces the state even by an earlier version, which occurs after a restore
    /// of etcd, unless the state has changed since the read began.
    pub(super) fn record_read(
        &self,
        index: usize,
        generation: u64,
        object: Option<Arc<ShardObject>>,
    ) {
        let mut state = self.lock();
        let Some(shard) = state.shards.get_mut(index) else {
            return;
        };
        shard.stale = false;
        let is_current = shard.generation == generation;
        let replaces = match (&shard.observed, &object) {
            (Observed::Present(now), Some(next)) => {
                next.is_later_than(now) || (is_current && next.version() != now.version())
            }
            (Observed::Missing, None) => false,
            (Observed::Unknown, _) => true,
            _ => is_current,
        };
        if replaces {
            self.replace(&mut state, index, object);
        }
    }

    fn replace(&self, state: &mut CacheState, index: usize, object: Option<Arc<ShardObject>>) {
        let id = |object: &ShardObject| object.text(CONTENT_ID_KEY).map(str::to_owned);
        let is_same_content = match (&object, &state.loaded) {
            (Some(object), Some(loaded)) if index == 0 => id(object) == loaded.id,
            (Some(object), Some(_)) => object.text(PREPARED_KEY).is_none(),
            _ => false,
        };
        let Some(shard) = state.shards.get_mut(index) else {
            return;
        };
        if let Some(entries) = object.as_ref().and_then(|object| object.parsed_entries())
            && is_same_content
        {
            shard.last_entries = Some(entries.clone());
        }
        shard.observed = object.map_or(Observed::Missing, Observed::Present);
        shard.generation += 1;
        self.changes.send_modify(|number| *number += 1);
    }

    /// Records an event of the watch of a Secret.
    fn record_event(&self, index: usize, event: Result<Event<Secret>, watcher::Error>) {
        let generation = self.generation(index);
        let mut state = self.lock();
        let Some(shard) = state.shards.get_mut(index) else {
            return;
        };
        match event {
            Ok(Event::Init) => shard.list = (generation, false),
            Ok(Event::InitApply(secret)) => {
                shard.list.1 = true;
                let began = shard.list.0;
                drop(state);
                self.record_read(
                    index,
                    began,
                    Some(Arc::new(ShardObject::parse(index, secret))),
                );
            }
            Ok(Event::InitDone) => {
                let (began, listed) = shard.list;
                drop(state);
                if !listed {
                    self.record_read(index, began, None);
                }
            }
            Ok(Event::Apply(secret)) => {
                let object = Arc::new(ShardObject::parse(index, secret));
                let is_earlier =
                    matches!(&shard.observed, Observed::Present(now) if !object.is_later_than(now));
                shard.stale = false;
                if !is_earlier {
                    self.replace(&mut state, index, Some(object));
                }
            }
            Ok(Event::Delete(secret)) => {
                let object = ShardObject::parse(index, secret);
                let is_deleted = matches!(&shard.observed, Observed::Present(now) if !now.is_later_than(&object));
                if is_deleted {
                    self.replace(&mut state, index, None);
                }
            }
            Err(error) => {
                let why = watch_error_message(&error);
                tracing::debug!(
                    shard = index,
                    why,
                    "watching a Secret of the shared state failed"
                );
                if !std::mem::replace(&mut shard.stale, true) {
                    self.changes.send_modify(|number| *number += 1);
                }
            }
        }
    }

    /// Watches the Secrets. Never returns.
    pub(super) async fn watch(self: Arc<Self>, api: Api<Secret>, names: SecretNames) {
        let watch = |index: usize| {
            let config = watcher::Config::default()
                .fields(&format!("metadata.name={}", names.name(index)))
                .timeout(WATCH_TIMEOUT);
            let events = watcher(api.clone(), config).backoff(WatchBackoff::default());
            events.map(move |event| (index, event)).boxed()
        };
        let mut events: SelectAll<_> = select_all((0..SECRETS).map(watch));
        while let Some((index, event)) = events.next().await {
            self.record_event(index, event);
        }
    }
}

/// Pauses of a watch that fails, which double.
///
/// kube's own back-off reaches 30 s, which would delay changes for as long after an outage of the API.
#[derive(Default)]
struct WatchBackoff {
    failures: u32,
}

impl Iterator for WatchBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let (min, max) = BACKOFF_RANGE;
        let delay = min.saturating_mul(1 << self.failures.min(10)).min(max);
        self.failures += 1;
        Some(delay.mul_f64(0.5 + rand::random::<f64>() / 2.0))
    }
}

impl Backoff for WatchBackoff {
    fn reset(&mut self) {
        self.failures = 0;
    }
}
