//! Read operations of a store: states at a version, and the events after it.

use super::{Epoch, EventBatch, ListState, Store, VersionError};
use crate::object::{NamespacedName, Object};
use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};
use tokio::time::Instant;

impl Store {
    /// Returns the present state, for a watch that begins with it.
    pub(crate) fn state(&self) -> Result<Weak<ListState>, VersionError> {
        let mut inner = self.inner();
        if inner.version == 0 {
            return Err(VersionError::Empty);
        }
        inner.prune();
        let newest = inner.states.back();
        let same = |state: &ListState| {
            (state.version, state.history, state.next)
                == (inner.version, inner.history, inner.window.next())
        };
        if let Some((_, state)) = newest.filter(|(_, state)| same(state)) {
            return Ok(Arc::downgrade(state));
        }
        let state = Arc::new(ListState {
            version: inner.version,
            history: inner.history,
            next: inner.window.next(),
            objects: inner.objects.values().cloned().collect(),
        });
        let told = Arc::downgrade(&state);
        inner.states.push_back((Instant::now(), state));
        Ok(told)
    }

    /// Returns the state at a version, or the present state without one.
    pub(crate) fn at(&self, version: Option<u64>) -> Result<ListState, VersionError> {
        let inner = self.inner();
        if inner.version == 0 {
            return Err(VersionError::Empty);
        }
        let version = version.unwrap_or(inner.version);
        if version > inner.version {
            return Err(VersionError::Future(inner.version));
        }
        let mut then = BTreeMap::new();
        if version < inner.version {
            if !inner.window.reaches(version) {
                return Err(VersionError::Expired);
            }
            then = inner.window.rewind(version);
        }
        let (history, next) = (inner.history, inner.window.after(version));
        let now: Vec<_> = inner.objects.values().cloned().collect();
        // Released early, so that the reflector and other readers do not wait longer.
        drop(inner);
        let objects = if then.is_empty() {
            now
        } else {
            back(now, then)
        };
        Ok(ListState {
            version,
            history,
            next,
            objects,
        })
    }

    pub(crate) fn get(&self, key: &NamespacedName) -> Option<Arc<Object>> {
        self.inner().objects.get(key).cloned()
    }

    /// Returns the present history, and the number of the first event after a version that a client knows. A client that
    /// `follows` serves others, and receives only events that are known to have happened.
    pub(crate) fn after(&self, version: u64, follows: bool) -> Result<(Epoch, u64), VersionError> {
        let inner = self.inner();
        match inner.version {
            0 => Err(VersionError::Empty),
            newest if version > newest => Err(VersionError::Future(newest)),
            _ if !inner.window.reaches(version) => Err(VersionError::Expired),
            _ if follows && inner.window.guesses(version) => Err(VersionError::Expired),
            _ => Ok((inner.history, inner.window.after(version))),
        }
    }

    /// Returns the present history, the newest version, and the number of the first event after it.
    pub(crate) fn position(&self) -> (Epoch, u64, u64) {
        let inner = self.inner();
        (inner.history, inner.version, inner.window.next())
    }

    /// Returns events from this number on, `most` of them, for a client that `follows` or one that does not.
    pub(crate) fn events(
        &self,
        history: Epoch,
        from: u64,
        (most, follows): (usize, bool),
    ) -> EventBatch {
        let inner = self.inner();
        let window = &inner.window;
        let is_same = history.number == inner.history.number
            && (!follows || history.outages == inner.history.outages);
        if !is_same || from < window.first() {
            return EventBatch::Missed;
        }
        let events: Vec<_> = (from..)
            .map_while(|number| window.get(number))
            .take(most)
            .cloned()
            .collect();
        let next = from + events.len() as u64;
        EventBatch::Events(events, next)
    }
}

/// Returns objects in their former state, from the present state and the former state of those that have changed; both are in the
/// order of their keys.
fn back(
    now: Vec<Arc<Object>>,
    mut then: BTreeMap<NamespacedName, Option<Arc<Object>>>,
) -> Vec<Arc<Object>> {
    let mut objects = Vec::with_capacity(now.len() + then.len());
    for object in now {
        while let Some(entry) = then.first_entry().filter(|entry| *entry.key() < object.key) {
            objects.extend(entry.remove());
        }
        match then
            .first_entry()
            .filter(|entry| *entry.key() == object.key)
        {
            Some(entry) => objects.extend(entry.remove()),
            None => objects.push(object),
        }
    }
    objects.extend(then.into_values().flatten());
    objects
}
