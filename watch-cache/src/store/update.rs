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
    /// Records that the source is away, and for how long it already was.
    pub fn lost_for(&self, away: Duration) {
        let mut inner = self.inner();
        let now = SystemTime::now();
        let since = now.checked_sub(away).unwrap_or(UNIX_EPOCH);
        if inner.lost.is_none() {
            inner.noticed = Some(Instant::now());
        }
        inner.lost = Some(inner.lost.map_or(since, |lost| lost.min(since)));
        self.say(&inner);
    }

    /// Records that the source is in touch, and the age of its own view.
    pub(crate) fn found(&self, age: Option<Duration>) {
        let mut inner = self.inner();
        let now = SystemTime::now();
        inner.lost = age.map(|age| now.checked_sub(age).unwrap_or(UNIX_EPOCH));
        (inner.noticed, inner.behind) = (None, None);
        self.say(&inner);
    }

    /// A source that is in touch knows less than this store.
    pub(crate) fn behind(&self) {
        self.inner().behind.get_or_insert_with(Instant::now);
    }

    /// Returns the time for which the source has known less than the store.
    pub(crate) fn is_behind(&self) -> Option<Duration> {
        self.inner().behind.map(|since| since.elapsed())
    }

    pub(super) fn say(&self, inner: &Inner) {
        self.changed.send_replace(inner.version);
    }

    /// Records the kind that the source reports.
    pub(crate) fn learn(&self, kind: &str) {
        let mut inner = self.inner();
        let namespaced = inner.kind.as_ref().map(|known| known.namespaced);
        inner.kind = Some(GroupVersionKind {
            kind: kind.to_owned(),
            namespaced: namespaced.unwrap_or(false),
        });
    }

    /// Replaces all objects by a list at this version.
    pub(crate) fn replace(&self, version: u64, objects: Vec<Object>) {
        let mut inner = self.inner();
        let inner = &mut *inner;
        let in_namespaces = objects.iter().any(|object| !object.key.0.is_empty());
        if let Some(kind) = &mut inner.kind {
            kind.namespaced |= in_namespaces;
        }
        let objects: Vec<_> = objects.into_iter().map(Arc::new).collect();
        if inner.version == 0 || version < inner.version {
            inner.begin(version, objects);
        } else {
            advance(inner, version, objects);
        }
        inner.prune();
        self.say(inner);
    }

    /// An object was added or modified, or (`deleted`) is gone and this is its last state. What is known already is nothing new.
    pub(crate) fn apply(&self, object: Object, deleted: bool) {
        let mut inner = self.inner();
        let version = object.version;
        // Another source may send the same version again; within one history no older object follows.
        if version < inner.version && inner.version > 0 {
            return;
        }
        let object = Arc::new(object);
        if deleted {
            let Some(before) = inner.take(&object.key) else {
                return;
            };
            inner.window.push(version, Some(before), (object, true));
        } else {
            let same = inner.objects.get(&object.key);
            if same.is_some_and(|same| same.version == version) {
                return;
            }
            if let Some(kind) = &mut inner.kind {
                kind.namespaced |= !object.key.0.is_empty();
            }
            inner.set(version, object);
        }
        inner.version = version;
        inner.prune();
        self.say(&inner);
    }

    /// Records that nothing happened up to this version.
    pub(crate) fn pass(&self, version: u64) {
        let mut inner = self.inner();
        if version > inner.version {
            inner.version = version;
            inner.prune();
            self.say(&inner);
        }
    }
}

/// Appends the events that lead from the state at one version to a list at a later one.
///
/// Missing objects were deleted at unknown versions. A client resumes from the version of the last event that it received, so no
/// two events may have the list's version. All but the last have versions within the outage, and a client that was cut off there
/// lists anew.
fn advance(inner: &mut Inner, version: u64, objects: Vec<Arc<Object>>) {
    let old = inner.version;
    let mut gone: BTreeMap<&NamespacedName, &Arc<Object>> = inner.objects.iter().collect();
    let mut new = Vec::new();
    for object in &objects {
        let known = gone.remove(&object.key);
        if known.is_none_or(|known| known.version != object.version) {
            new.push(object.clone());
        }
    }
    // Each change has its own version. More changes than versions mean another cluster.
    if (gone.len() + new.len()) as u64 > version - old {
        inner.begin(version, objects);
        return;
    }
    let mut gone: Vec<_> = gone.into_values().cloned().collect();
    new.sort_by_key(|object| object.version);
    let first = old.saturating_add(1).min(version);
    let is_newest = new.last().is_some_and(|last| last.version >= version);
    let last = gone.pop_if(|_| !is_newest);
    inner.version = version;
    inner.outage(old);
    for object in gone {
        inner.drop_at(first, &object);
    }
    for object in new {
        // Its version is clamped, because it was unknown at the old version.
        inner.set(object.version.clamp(first, version), object);
    }
    if let Some(object) = last {
        inner.drop_at(version, &object);
    }
}

impl Inner {
    /// Records an outage since this version: only its outcome is known.
    fn outage(&mut self, since: u64) {
        if self.window.gap(since, self.version) {
            self.history.outages += 1;
        }
    }

    fn drop_at(&mut self, version: u64, object: &Object) {
        let before = self.take(&object.key);
        let last = Arc::new(object.at(version));
        self.window.push(version, before, (last, true));
    }
}
