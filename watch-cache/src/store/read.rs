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
    pub(crate) fn list_state(&self) -> Result<Weak<ListState>, VersionError> {
        let mut inner = self.lock();
        if inner.version == 0 {
            return Err(VersionError::Empty);
        }
        inner.prune_list_states();
        let latest = inner.list_states.back();
        let is_current = |state: &ListState| {
            (state.version, state.epoch, state.next_event)
                == (inner.version, inner.epoch, inner.event_buffer.next_number())
        };
        if let Some((_, state)) = latest.filter(|(_, state)| is_current(state)) {
            return Ok(Arc::downgrade(state));
        }
        let state = Arc::new(ListState {
            version: inner.version,
            epoch: inner.epoch,
            next_event: inner.event_buffer.next_number(),
            objects: inner.objects.values().cloned().collect(),
        });
        let weak_state = Arc::downgrade(&state);
        inner.list_states.push_back((Instant::now(), state));
        Ok(weak_state)
    }

    /// Returns the state at a version, or the present state without one.
    pub(crate) fn state_at(&self, version: Option<u64>) -> Result<ListState, VersionError> {
        let inner = self.lock();
        if inner.version == 0 {
            return Err(VersionError::Empty);
        }
        let version = version.unwrap_or(inner.version);
        if version > inner.version {
            return Err(VersionError::Future(inner.version));
        }
        let mut former = BTreeMap::new();
        if version < inner.version {
            if !inner.event_buffer.has_all_after(version) {
                return Err(VersionError::Expired);
            }
            former = inner.event_buffer.rewind(version);
        }
        let (epoch, next_event) = (inner.epoch, inner.event_buffer.first_number_after(version));
        let current: Vec<_> = inner.objects.values().cloned().collect();
        // Released early, so that the reflector and other readers do not wait longer.
        drop(inner);
        let objects = if former.is_empty() {
            current
        } else {
            restore_former(current, former)
        };
        Ok(ListState {
            version,
            epoch,
            next_event,
            objects,
        })
    }

    pub(crate) fn get(&self, key: &NamespacedName) -> Option<Arc<Object>> {
        self.lock().objects.get(key).cloned()
    }

    /// Returns the present history, and the number of the first event after a version that a client knows. A client that
    /// `is_follower` serves others, and receives only events that really happened.
    pub(crate) fn position_after(
        &self,
        version: u64,
        is_follower: bool,
    ) -> Result<(Epoch, u64), VersionError> {
        let inner = self.lock();
        match inner.version {
            0 => Err(VersionError::Empty),
            newest if version > newest => Err(VersionError::Future(newest)),
            _ if !inner.event_buffer.has_all_after(version) => Err(VersionError::Expired),
            _ if is_follower && inner.event_buffer.has_gap_after(version) => {
                Err(VersionError::Expired)
            }
            _ => Ok((inner.epoch, inner.event_buffer.first_number_after(version))),
        }
    }

    /// Returns the present history, the newest version, and the number of the first event after it.
    pub(crate) fn position(&self) -> (Epoch, u64, u64) {
        let inner = self.lock();
        (inner.epoch, inner.version, inner.event_buffer.next_number())
    }

    /// Returns at most `limit` events from this number on. A client that `is_follower` receives no derived events.
    pub(crate) fn read_events(
        &self,
        epoch: Epoch,
        from: u64,
        (limit, is_follower): (usize, bool),
    ) -> EventBatch {
        let inner = self.lock();
        let event_buffer = &inner.event_buffer;
        let is_same = epoch.restarts == inner.epoch.restarts
            && (!is_follower || epoch.outages == inner.epoch.outages);
        if !is_same || from < event_buffer.first_number() {
            return EventBatch::Missed;
        }
        let events: Vec<_> = (from..)
            .map_while(|number| event_buffer.get(number))
            .take(limit)
            .cloned()
            .collect();
        let next = from + events.len() as u64;
        EventBatch::Events(events, next)
    }
}

/// Returns objects in their former state. The result combines the present state with the former state of the objects that
/// have changed; both are in the order of their keys.
fn restore_former(
    current: Vec<Arc<Object>>,
    mut former: BTreeMap<NamespacedName, Option<Arc<Object>>>,
) -> Vec<Arc<Object>> {
    let mut objects = Vec::with_capacity(current.len() + former.len());
    for object in current {
        while let Some(entry) = former
            .first_entry()
            .filter(|entry| *entry.key() < object.key)
        {
            objects.extend(entry.remove());
        }
        match former
            .first_entry()
            .filter(|entry| *entry.key() == object.key)
        {
            Some(entry) => objects.extend(entry.remove()),
            None => objects.push(object),
        }
    }
    objects.extend(former.into_values().flatten());
    objects
}
