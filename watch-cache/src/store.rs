//! All objects of one resource as they are now, and what happened to them last.
//!
//! Whoever fills a store tells it lists and events at the cloud's versions; whoever reads it takes a state at a version, and
//! then the events after it by number. A list that comes after an outage becomes the events that lead to it, so readers who
//! were there go on; only whoever is at a version within the outage is told to list anew. Where versions went back (the
//! cloud's etcd was restored) another history has begun, and all list anew.

mod read;
mod update;

use crate::{
    event_buffer::{Event, EventBuffer},
    object::{NamespacedName, Object},
    resource::{GroupVersionKind, GroupVersionResource},
};
use serde::Serialize;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{sync::watch, time::Instant};

/// A view is as old as its last word from the source only after this time without one: a source that changes is no outage.
pub(crate) const GRACE: Duration = Duration::from_secs(10);
/// Nor sooner than this after the loss was noticed, which may take as long: what comes next may have been found by then.
const TURN: Duration = Duration::from_secs(3);
/// How long a state that is being told to a reader is kept for it.
const TELLING: Duration = Duration::from_mins(1);
/// How many such states there are at most: one a second, of what readers that begin during changes ask for.
const STATES: usize = 60;

/// The objects of one resource.
#[derive(Debug)]
pub struct Store {
    resource: GroupVersionResource,
    inner: Mutex<Inner>,
    changed: watch::Sender<u64>,
    watchers: AtomicUsize,
}

#[derive(Debug)]
struct Inner {
    kind: Option<GroupVersionKind>,
    objects: BTreeMap<NamespacedName, Arc<Object>>,
    bytes: usize,
    /// 0: never filled.
    version: u64,
    window: EventBuffer,
    history: Epoch,
    lost: Option<SystemTime>,
    /// When that was noticed, of a source that was there.
    noticed: Option<Instant>,
    /// Since when a source that is in touch has known less than this store.
    behind: Option<Instant>,
    states: VecDeque<(Instant, Arc<ListState>)>,
}

/// All objects at one version.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub(crate) kind: String,
    pub(crate) namespaced: bool,
    pub(crate) version: u64,
    /// When it was known to be the newest.
    pub(crate) at: SystemTime,
    pub(crate) objects: Vec<Arc<Object>>,
}

/// How a store is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    /// The resource.
    pub resource: String,
    /// How many objects there are.
    pub objects: usize,
    /// What they weigh, in bytes, about.
    pub bytes: usize,
    /// The version of the newest state; 0: it was never filled.
    pub version: u64,
    /// Whether it was ever filled.
    pub synced: bool,
    /// Since when it has not heard from its source, in milliseconds of the Unix epoch; none while it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<u64>,
    /// Watches that are open here.
    pub watchers: usize,
}

/// Which history it is: versions and numbers of another one mean nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Epoch {
    /// How often all began anew.
    pub(crate) number: u64,
    /// How often what happened was guessed from two lists: a reader who is read from in turn must not take such guesses for what
    /// happened, for who is at a version in between would be told too little.
    pub(crate) outages: u64,
}

/// All objects at one version, for whoever begins to read.
#[derive(Debug)]
pub(crate) struct ListState {
    pub(crate) version: u64,
    pub(crate) history: Epoch,
    /// The number of the first event after it.
    pub(crate) next: u64,
    pub(crate) objects: Vec<Arc<Object>>,
}

/// What a reader gets that asks for events.
#[derive(Debug)]
pub(crate) enum EventBatch {
    /// These, and the number of the next.
    Events(Vec<Event>, u64),
    /// It has missed some, or they belong to another history.
    Missed,
}

/// Why there is no state at a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VersionError {
    /// It was never filled.
    Empty,
    /// The version is behind what is known.
    Expired,
    /// The version is ahead of what is known, which is this.
    Future(u64),
}

/// A watch is open as long as this lives.
#[derive(Debug)]
pub(crate) struct WatchGuard(Arc<Store>);

impl Drop for WatchGuard {
    fn drop(&mut self) {
        self.0.watchers.fetch_sub(1, Relaxed);
    }
}

impl Inner {
    fn put(&mut self, object: Arc<Object>) -> Option<Arc<Object>> {
        self.bytes += object.weight();
        let before = self.objects.insert(object.key.clone(), object);
        self.bytes -= before.as_ref().map_or(0, |before| before.weight());
        before
    }

    fn take(&mut self, key: &NamespacedName) -> Option<Arc<Object>> {
        let before = self.objects.remove(key)?;
        self.bytes -= before.weight();
        Some(before)
    }

    /// An object is like this now.
    fn set(&mut self, version: u64, object: Arc<Object>) {
        let before = self.put(object.clone());
        self.window.push(version, before, (object, false));
    }

    /// All there is, of which nothing led to it that is known.
    fn begin(&mut self, version: u64, objects: Vec<Arc<Object>>) {
        self.version = version;
        self.history.number += 1;
        self.window.begin(version);
        self.objects.clear();
        self.bytes = 0;
        self.states.clear();
        for object in objects {
            self.put(object);
        }
    }

    /// Readers that have taken a minute to hear a state begin anew.
    fn prune(&mut self) {
        while self
            .states
            .front()
            .is_some_and(|state| self.states.len() > STATES || state.0.elapsed() > TELLING)
        {
            self.states.pop_front();
        }
    }
}

impl Store {
    pub(crate) fn new(resource: GroupVersionResource, window: usize) -> Self {
        Self {
            inner: Mutex::new(Inner {
                kind: resource.kind(),
                objects: BTreeMap::new(),
                bytes: 0,
                version: 0,
                window: EventBuffer::new(window),
                history: Epoch::default(),
                lost: Some(UNIX_EPOCH),
                noticed: None,
                behind: None,
                states: VecDeque::new(),
            }),
            resource,
            changed: watch::Sender::new(0),
            watchers: AtomicUsize::new(0),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which resource it is.
    pub fn resource(&self) -> &GroupVersionResource {
        &self.resource
    }

    /// Its kind, once that is known.
    pub(crate) fn kind(&self) -> Option<GroupVersionKind> {
        self.inner().kind.clone()
    }

    /// The version, whenever that changes, or the source is lost or found.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// How it is doing now.
    pub fn status(&self) -> Status {
        let inner = self.inner();
        let millis = |lost: SystemTime| {
            let since = lost.duration_since(UNIX_EPOCH).unwrap_or_default();
            u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
        };
        Status {
            resource: self.resource.to_string(),
            objects: inner.objects.len(),
            bytes: inner.bytes,
            version: inner.version,
            synced: inner.version > 0,
            lost: inner.lost.map(millis),
            watchers: self.watchers.load(Relaxed),
        }
    }

    /// The newest version; 0: it was never filled.
    pub(crate) fn version(&self) -> u64 {
        self.inner().version
    }

    /// How old the view is, where that is longer than a change of sources takes.
    pub(crate) fn age(&self) -> Option<Duration> {
        let inner = self.inner();
        // A clock that went back makes a view young, not the reader wait.
        let age = inner.lost?.elapsed().unwrap_or_default();
        let turned = inner
            .noticed
            .is_none_or(|noticed| noticed.elapsed() >= TURN);
        (age > GRACE && turned).then_some(age)
    }

    /// When the view becomes old, if it is not yet and its source does not come back.
    pub(crate) fn ages_in(&self) -> Option<Duration> {
        let inner = self.inner();
        let age = inner.lost?.elapsed().unwrap_or_default();
        let turns = inner.noticed.map_or(TURN, |noticed| noticed.elapsed());
        Some(GRACE.saturating_sub(age).max(TURN.saturating_sub(turns)))
    }

    pub(crate) fn watching(self: &Arc<Self>) -> WatchGuard {
        self.watchers.fetch_add(1, Relaxed);
        WatchGuard(self.clone())
    }

    /// All of it, for the disk.
    pub fn snapshot(&self) -> Option<Snapshot> {
        let inner = self.inner();
        let kind = inner.kind.as_ref().filter(|_| inner.version > 0)?;
        Some(Snapshot {
            kind: kind.kind.clone(),
            namespaced: kind.namespaced,
            version: inner.version,
            at: inner.lost.unwrap_or_else(SystemTime::now),
            objects: inner.objects.values().cloned().collect(),
        })
    }

    /// Serves what was kept, if nothing newer has come meanwhile; as old as it was then.
    pub fn restore(&self, snapshot: Snapshot) {
        let mut inner = self.inner();
        let inner = &mut *inner;
        if inner.version > 0 {
            return;
        }
        inner.kind = Some(GroupVersionKind {
            kind: snapshot.kind,
            namespaced: snapshot.namespaced,
        });
        inner.begin(snapshot.version, snapshot.objects);
        (inner.lost, inner.noticed) = (Some(snapshot.at), None);
        self.say(inner);
    }
}

#[cfg(test)]
pub(crate) mod tests;
