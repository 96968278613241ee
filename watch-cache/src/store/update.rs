//! Write operations of a store: the connection state of its source, lists, and events.

use super::{Inner, Store};
use crate::{
    object::{NamespacedName, Object},
    resource::GroupVersionKind,
};
use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::time::Instant;

impl Store {
    /// Records that the source is lost, and for how long it already was.
    pub fn mark_lost(&self, lost_duration: Duration) {
        let mut inner = self.lock();
        let now = SystemTime::now();
        let lost_at = now.checked_sub(lost_duration).unwrap_or(UNIX_EPOCH);
        if inner.lost_since.is_none() {
            inner.loss_noticed_at = Some(Instant::now());
        }
        inner.lost_since = Some(inner.lost_since.map_or(lost_at, |lost| lost.min(lost_at)));
        self.notify(&inner);
    }

    /// Records that the source is connected, and the age of its own data.
    pub(crate) fn mark_connected(&self, age: Option<Duration>) {
        let mut inner = self.lock();
        let now = SystemTime::now();
        inner.lost_since = age.map(|age| now.checked_sub(age).unwrap_or(UNIX_EPOCH));
        (inner.loss_noticed_at, inner.behind_since) = (None, None);
        self.notify(&inner);
    }

    /// Records that a connected source has an older state than this store.
    pub(crate) fn mark_behind(&self) {
        self.lock().behind_since.get_or_insert_with(Instant::now);
    }

    /// Returns the time for which the source has had an older state than the store.
    pub(crate) fn behind_duration(&self) -> Option<Duration> {
        self.lock().behind_since.map(|since| since.elapsed())
    }

    pub(super) fn notify(&self, inner: &Inner) {
        self.version_sender.send_replace(inner.version);
    }

    /// Records the kind that the source reports.
    pub(crate) fn set_kind(&self, kind: &str) {
        let mut inner = self.lock();
        let namespaced = inner.kind.as_ref().map(|known| known.namespaced);
        inner.kind = Some(GroupVersionKind {
            kind: kind.to_owned(),
            namespaced: namespaced.unwrap_or(false),
        });
    }

    /// Replaces all objects with a list at this version.
    pub(crate) fn replace(&self, version: u64, objects: Vec<Object>) {
        let mut inner = self.lock();
        let inner = &mut *inner;
        let has_namespaced = objects.iter().any(|object| !object.key.0.is_empty());
        if let Some(kind) = &mut inner.kind {
            kind.namespaced |= has_namespaced;
        }
        let objects: Vec<_> = objects.into_iter().map(Arc::new).collect();
        if inner.version == 0 || version < inner.version {
            inner.start_epoch(version, objects);
        } else {
            apply_list_diff(inner, version, objects);
        }
        inner.prune_list_states();
        self.notify(inner);
    }

    /// Applies an event: an object was added or modified, or with `deleted` it was deleted and this is its last state. An
    /// event that is already known changes nothing.
    pub(crate) fn apply(&self, object: Object, deleted: bool) {
        let mut inner = self.lock();
        let version = object.version;
        // Another source may send the same version again; within one history no older object follows.
        if version < inner.version && inner.version > 0 {
            return;
        }
        let object = Arc::new(object);
        if deleted {
            let Some(before) = inner.remove(&object.key) else {
                return;
            };
            inner
                .event_buffer
                .push(version, Some(before), (object, true));
        } else {
            let existing = inner.objects.get(&object.key);
            if existing.is_some_and(|same| same.version == version) {
                return;
            }
            if let Some(kind) = &mut inner.kind {
                kind.namespaced |= !object.key.0.is_empty();
            }
            inner.upsert(version, object);
        }
        inner.version = version;
        inner.prune_list_states();
        self.notify(&inner);
    }

    /// Records that nothing happened up to this version.
    pub(crate) fn advance_version(&self, version: u64) {
        let mut inner = self.lock();
        if version > inner.version {
            inner.version = version;
            inner.prune_list_states();
            self.notify(&inner);
        }
    }
}

/// Appends the events that lead from the state at one version to a list at a later one.
///
/// Missing objects were deleted at unknown versions. A client resumes from the version of the last event that it received, so
/// no two events may have the list's version. All events except the last have versions within the outage. A client that was
/// disconnected at one of these versions lists again.
fn apply_list_diff(inner: &mut Inner, version: u64, objects: Vec<Arc<Object>>) {
    let old_version = inner.version;
    let mut removed: BTreeMap<&NamespacedName, &Arc<Object>> = inner.objects.iter().collect();
    let mut changed = Vec::new();
    for object in &objects {
        let previous = removed.remove(&object.key);
        if previous.is_none_or(|known| known.version != object.version) {
            changed.push(object.clone());
        }
    }
    // Each change has its own version. More changes than versions mean another cluster.
    if (removed.len() + changed.len()) as u64 > version - old_version {
        inner.start_epoch(version, objects);
        return;
    }
    let mut removed: Vec<_> = removed.into_values().cloned().collect();
    changed.sort_by_key(|object| object.version);
    let first_version = old_version.saturating_add(1).min(version);
    let is_newest = changed.last().is_some_and(|last| last.version >= version);
    let last_removed = removed.pop_if(|_| !is_newest);
    inner.version = version;
    inner.record_outage(old_version);
    for object in removed {
        inner.remove_at(first_version, &object);
    }
    for object in changed {
        // Its version is clamped, because it was unknown at the old version.
        inner.upsert(object.version.clamp(first_version, version), object);
    }
    if let Some(object) = last_removed {
        inner.remove_at(version, &object);
    }
}

impl Inner {
    /// Records an outage since this version, of which only the difference is known.
    fn record_outage(&mut self, since_version: u64) {
        if self.event_buffer.record_gap(since_version, self.version) {
            self.epoch.outages += 1;
        }
    }

    fn remove_at(&mut self, version: u64, object: &Object) {
        let previous = self.remove(&object.key);
        let last_state = Arc::new(object.with_version(version));
        self.event_buffer
            .push(version, previous, (last_state, true));
    }
}
