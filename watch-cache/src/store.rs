//! Store of one resource: all its present objects, and the latest events.
//!
//! The source gives the store lists and events at the cloud's versions. A client reads a state at a version, and then the
//! events after it by number. A list after an outage is converted to the events that lead to it, so clients at the version
//! before the outage resume. Only a client at a version within the outage must list again. If versions decreased (the cloud's
//! etcd was restored), another history begins, and all clients list again.

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
pub(crate) const STALE_AFTER: Duration = Duration::from_secs(10);
/// Minimum time between the detection of the loss and the time when a view counts as old. The detection may take as long as
/// `STALE_AFTER`, and the next source may be found within this time.
const STALE_NOTICE_DELAY: Duration = Duration::from_secs(3);
/// Period for which a state is retained while it is sent to a client.
const LIST_STATE_TTL: Duration = Duration::from_mins(1);
/// Maximum number of retained states: one per second, if clients start during changes.
const MAX_LIST_STATES: usize = 60;

/// The objects of one resource.
#[derive(Debug)]
pub struct Store {
    resource: GroupVersionResource,
    inner: Mutex<Inner>,
    version_sender: watch::Sender<u64>,
    watchers: AtomicUsize,
}

#[derive(Debug)]
struct Inner {
    kind: Option<GroupVersionKind>,
    objects: BTreeMap<NamespacedName, Arc<Object>>,
    bytes: usize,
    /// Present version; 0 if the store was never filled.
    version: u64,
    event_buffer: EventBuffer,
    epoch: Epoch,
    lost_since: Option<SystemTime>,
    /// Time when the loss of the source was detected.
    loss_noticed_at: Option<Instant>,
    /// Time since when a connected source has had an older state than this store.
    behind_since: Option<Instant>,
    list_states: VecDeque<(Instant, Arc<ListState>)>,
}

/// All objects at one version.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub(crate) kind: String,
    pub(crate) namespaced: bool,
    pub(crate) version: u64,
    /// Time when the version was known to be the newest.
    pub(crate) as_of: SystemTime,
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
    /// Time of the last contact with the source, in milliseconds since the Unix epoch; `None` while the source is in touch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<u64>,
    /// Watches that are open here.
    pub watchers: usize,
}

/// Identifier of a history: versions and numbers of another history are meaningless.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Epoch {
    /// Number of times that a new history began.
    pub(crate) restarts: u64,
    /// Number of outages after which events were derived from two lists. A client that serves others must not treat derived
    /// events as real ones. Its own clients at a version in between would miss some events.
    pub(crate) outages: u64,
}

/// All objects at one version, for clients that start.
#[derive(Debug)]
pub(crate) struct ListState {
    pub(crate) version: u64,
    pub(crate) epoch: Epoch,
    /// Number of the first event after it.
    pub(crate) next_event: u64,
    pub(crate) objects: Vec<Arc<Object>>,
}

/// Result of a client's request for events.
#[derive(Debug)]
pub(crate) enum EventBatch {
    /// Events, and the number of the next one.
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
    /// The version is newer than the store's version, which is this one.
    Future(u64),
}

/// Guard of an open watch.
#[derive(Debug)]
pub(crate) struct WatchGuard(Arc<Store>);

impl Drop for WatchGuard {
    fn drop(&mut self) {
        self.0.watchers.fetch_sub(1, Relaxed);
    }
}

impl Inner {
    fn insert(&mut self, object: Arc<Object>) -> Option<Arc<Object>> {
        self.bytes += object.memory_size();
        let previous = self.objects.insert(object.key.clone(), object);
        self.bytes -= previous.as_ref().map_or(0, |before| before.memory_size());
        previous
    }

    fn remove(&mut self, key: &NamespacedName) -> Option<Arc<Object>> {
        let previous = self.objects.remove(key)?;
        self.bytes -= previous.memory_size();
        Some(previous)
    }

    /// Sets the present state of an object.
    fn upsert(&mut self, version: u64, object: Arc<Object>) {
        let previous = self.insert(object.clone());
        self.event_buffer.push(version, previous, (object, false));
    }

    /// Begins a new history with these objects. The events that led to them are unknown.
    fn start_epoch(&mut self, version: u64, objects: Vec<Arc<Object>>) {
        self.version = version;
        self.epoch.restarts += 1;
        self.event_buffer.reset(version);
        self.objects.clear();
        self.bytes = 0;
        self.list_states.clear();
        for object in objects {
            self.insert(object);
        }
    }

    /// Drops states that are older than a minute or too many. Their clients start again.
    fn prune_list_states(&mut self) {
        while self.list_states.front().is_some_and(|state| {
            self.list_states.len() > MAX_LIST_STATES || state.0.elapsed() > LIST_STATE_TTL
        }) {
            self.list_states.pop_front();
        }
    }
}

impl Store {
    pub(crate) fn new(resource: GroupVersionResource, event_buffer_bytes: usize) -> Self {
        Self {
            inner: Mutex::new(Inner {
                kind: resource.kind(),
                objects: BTreeMap::new(),
                bytes: 0,
                version: 0,
                event_buffer: EventBuffer::new(event_buffer_bytes),
                epoch: Epoch::default(),
                lost_since: Some(UNIX_EPOCH),
                loss_noticed_at: None,
                behind_since: None,
                list_states: VecDeque::new(),
            }),
            resource,
            version_sender: watch::Sender::new(0),
            watchers: AtomicUsize::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the resource.
    pub fn resource(&self) -> &GroupVersionResource {
        &self.resource
    }

    /// Returns the kind of the resource, once it is known.
    pub(crate) fn kind(&self) -> Option<GroupVersionKind> {
        self.lock().kind.clone()
    }

    /// Returns a receiver of the version, which changes whenever the version changes, or the source is lost or found.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.version_sender.subscribe()
    }

    /// Returns the present status.
    pub fn status(&self) -> Status {
        let inner = self.lock();
        let unix_millis = |lost: SystemTime| {
            let elapsed = lost.duration_since(UNIX_EPOCH).unwrap_or_default();
            u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
        };
        Status {
            resource: self.resource.to_string(),
            objects: inner.objects.len(),
            bytes: inner.bytes,
            version: inner.version,
            synced: inner.version > 0,
            lost: inner.lost_since.map(unix_millis),
            watchers: self.watchers.load(Relaxed),
        }
    }

    /// Returns the newest version; 0 if the store was never filled.
    pub(crate) fn version(&self) -> u64 {
        self.lock().version
    }

    /// Returns the age of the view, if it is longer than a change of sources takes.
    pub(crate) fn stale_age(&self) -> Option<Duration> {
        let inner = self.lock();
        // If the clock went back, the view counts as new and readers do not wait.
        let age = inner.lost_since?.elapsed().unwrap_or_default();
        let notice_elapsed = inner
            .loss_noticed_at
            .is_none_or(|noticed_at| noticed_at.elapsed() >= STALE_NOTICE_DELAY);
        (age > STALE_AFTER && notice_elapsed).then_some(age)
    }

    /// Returns the time after which the view becomes old if its source does not come back, or `None` while the source is
    /// connected.
    pub(crate) fn time_until_stale(&self) -> Option<Duration> {
        let inner = self.lock();
        let age = inner.lost_since?.elapsed().unwrap_or_default();
        let since_notice = inner
            .loss_noticed_at
            .map_or(STALE_NOTICE_DELAY, |noticed| noticed.elapsed());
        Some(
            STALE_AFTER
                .saturating_sub(age)
                .max(STALE_NOTICE_DELAY.saturating_sub(since_notice)),
        )
    }

    pub(crate) fn register_watch(self: &Arc<Self>) -> WatchGuard {
        self.watchers.fetch_add(1, Relaxed);
        WatchGuard(self.clone())
    }

    /// Returns a snapshot for the disk.
    pub fn snapshot(&self) -> Option<Snapshot> {
        let inner = self.lock();
        let kind = inner.kind.as_ref().filter(|_| inner.version > 0)?;
        Some(Snapshot {
            kind: kind.kind.clone(),
            namespaced: kind.namespaced,
            version: inner.version,
            as_of: inner.lost_since.unwrap_or_else(SystemTime::now),
            objects: inner.objects.values().cloned().collect(),
        })
    }

    /// Restores a snapshot, unless a newer state has arrived. The state has the age of the snapshot.
    pub fn restore(&self, snapshot: Snapshot) {
        let mut inner = self.lock();
        let inner = &mut *inner;
        if inner.version > 0 {
            return;
        }
        inner.kind = Some(GroupVersionKind {
            kind: snapshot.kind,
            namespaced: snapshot.namespaced,
        });
        inner.start_epoch(snapshot.version, snapshot.objects);
        (inner.lost_since, inner.loss_noticed_at) = (Some(snapshot.as_of), None);
        self.notify(inner);
    }
}

#[cfg(test)]
pub(crate) mod tests;
