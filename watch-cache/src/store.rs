//! Store of one resource: all its objects as they are now, and the latest events.
//!
//! The source gives the store lists and events at the cloud's versions. A client takes a state at a version, and then the events
//! after it by number. A list that comes after an outage is turned into the events that lead to it, so clients that were at the
//! version before the outage resume. Only a client at a version within the outage must list anew. If versions went back (the
//! cloud's etcd was restored), another history has begun, and all clients list anew.

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

/// Time without contact to the source after which a view counts as old: a change of sources is no outage.
pub(crate) const GRACE: Duration = Duration::from_secs(10);
/// Minimum time after the loss was noticed before a view counts as old. The notice may take as long as `GRACE`, and the next
/// source may be found within this time.
const TURN: Duration = Duration::from_secs(3);
/// Period for which a state is retained while it is sent to a client.
const TELLING: Duration = Duration::from_mins(1);
/// Retained states, at most: one a second, if clients start during changes.
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
    /// Present version; 0 if the store was never filled.
    version: u64,
    window: EventBuffer,
    history: Epoch,
    lost: Option<SystemTime>,
    /// Time when the loss of a connected source was noticed.
    noticed: Option<Instant>,
    /// Time since when a source that is in touch has known less than this store.
    behind: Option<Instant>,
    states: VecDeque<(Instant, Arc<ListState>)>,
}

/// All objects at one version.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub(crate) kind: String,
    pub(crate) namespaced: bool,
    pub(crate) version: u64,
    /// Time when the version was known to be the newest.
    pub(crate) at: SystemTime,
    pub(crate) objects: Vec<Arc<Object>>,
}

/// Status of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, schemars::JsonSchema)]
#[schemars(rename = "ResourceStatus")]
pub struct Status {
    /// The resource.
    pub resource: String,
    /// Number of objects.
    pub objects: usize,
    /// Approximate size of the objects, in bytes.
    pub bytes: usize,
    /// Version of the newest state; 0 if the store was never filled.
    pub version: u64,
    /// Whether it was ever filled.
    pub synced: bool,
    /// Time of the last contact with the source, in milliseconds of the Unix epoch; `None` while the source is in touch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<u64>,
    /// Watches that are open here.
    pub watchers: usize,
}

/// Identifier of a history: versions and numbers of another history are meaningless.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Epoch {
    /// Number of restarts of the history.
    pub(crate) number: u64,
    /// Number of outages after which events were derived from two lists. A client that serves others must not take derived events
    /// for real ones, because its own clients at a version in between would miss some.
    pub(crate) outages: u64,
}

/// All objects at one version, for clients that start.
#[derive(Debug)]
pub(crate) struct ListState {
    pub(crate) version: u64,
    pub(crate) history: Epoch,
    /// The number of the first event after it.
    pub(crate) next: u64,
    pub(crate) objects: Vec<Arc<Object>>,
}

/// Result of a client's request for events.
#[derive(Debug)]
pub(crate) enum EventBatch {
    /// These events, and the number of the next.
    Events(Vec<Event>, u64),
    /// The client has missed some events, or they belong to another history.
    Missed,
}

/// Reason why there is no state at a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VersionError {
    /// The store was never filled.
    Empty,
    /// The version is older than the buffer.
    Expired,
    /// The version is newer than the store's, which is this.
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

    /// Begins a new history with these objects; the events that led to them are unknown.
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

    /// Drops states that were sent for a minute or are too many. Their clients start anew.
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

    /// Returns the resource.
    pub fn resource(&self) -> &GroupVersionResource {
        &self.resource
    }

    /// Returns the kind of the resource, once it is known.
    pub(crate) fn kind(&self) -> Option<GroupVersionKind> {
        self.inner().kind.clone()
    }

    /// Returns a receiver of the version, which changes whenever the version changes, or the source is lost or found.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Returns the present status.
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

    /// Returns the newest version; 0 if the store was never filled.
    pub(crate) fn version(&self) -> u64 {
        self.inner().version
    }

    /// Returns the age of the view, if it is longer than a change of sources takes.
    pub(crate) fn age(&self) -> Option<Duration> {
        let inner = self.inner();
        // If the clock went back, the view counts as new and readers do not wait.
        let age = inner.lost?.elapsed().unwrap_or_default();
        let turned = inner
            .noticed
            .is_none_or(|noticed| noticed.elapsed() >= TURN);
        (age > GRACE && turned).then_some(age)
    }

    /// Returns the time until the view becomes old, if it is not yet and its source does not come back.
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

    /// Returns a snapshot for the disk.
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

    /// Restores a snapshot, if no newer state has come meanwhile. The state has the age of the snapshot.
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
