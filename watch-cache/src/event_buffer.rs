//! Buffer of the latest events, so that a client that was disconnected for a while resumes from its version.
//!
//! Events are in the order of their versions. Several may have one version. An object that is missing in a list was deleted
//! at an unknown version, and counts as deleted at the list's version.

use crate::object::{NamespacedName, Object};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

/// An event of one object.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    /// Number of the event in the store, without gaps.
    pub(crate) number: u64,
    pub(crate) version: u64,
    /// Object before the event; `None` if there was none.
    pub(crate) before: Option<Arc<Object>>,
    /// Object after the event; for a deleted object its last state, at this version.
    pub(crate) object: Arc<Object>,
    pub(crate) deleted: bool,
}

/// Latest events of a store, bounded in bytes.
#[derive(Debug)]
pub(crate) struct EventBuffer {
    events: VecDeque<Event>,
    bytes: usize,
    most: usize,
    /// First version from which no event is missing.
    complete_since: u64,
    /// Number of the next event.
    next_number: u64,
    /// Ranges between two versions for which only the difference between the ends is known. An object that was created and
    /// deleted within one range was never received.
    gaps: VecDeque<(u64, u64)>,
}

impl EventBuffer {
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self {
            events: VecDeque::new(),
            bytes: 0,
            most: max_bytes,
            complete_since: 0,
            next_number: 0,
            gaps: VecDeque::new(),
        }
    }

    /// Drops all events: those before this version are unknown.
    pub(crate) fn reset(&mut self, version: u64) {
        self.events.clear();
        self.gaps.clear();
        self.bytes = 0;
        self.complete_since = version;
    }

    /// Returns the number of the next event.
    pub(crate) fn next_number(&self) -> u64 {
        self.next_number
    }

    pub(crate) fn push(
        &mut self,
        version: u64,
        before: Option<Arc<Object>>,
        (object, deleted): (Arc<Object>, bool),
    ) {
        let event = Event {
            number: self.next_number,
            version,
            before,
            object,
            deleted,
        };
        self.next_number += 1;
        self.bytes += weight(&event);
        self.events.push_back(event);
        while self.bytes > self.most {
            let Some(oldest) = self.events.pop_front() else {
                break;
            };
            self.bytes -= weight(&oldest);
            self.complete_since = self.complete_since.max(oldest.version);
        }
        let complete_since = self.complete_since;
        self.gaps.retain(|gap| gap.1 > complete_since);
    }

    /// Records that only the difference between these two versions is known. Returns whether there are versions between them.
    pub(crate) fn record_gap(&mut self, from: u64, to: u64) -> bool {
        if to <= from.saturating_add(1) {
            return false;
        }
        self.gaps.push_back((from, to));
        // Merges the oldest gaps, so that clients list too much rather than too little.
        while self.gaps.len() > 64 {
            if let (Some(first), Some(second)) = (self.gaps.pop_front(), self.gaps.front_mut()) {
                second.0 = first.0;
            }
        }
        true
    }

    /// Whether the buffer has every event after this version, for a client that knows all events up to it.
    pub(crate) fn has_all_after(&self, version: u64) -> bool {
        let mut gaps = self.gaps.iter();
        version >= self.complete_since && !gaps.any(|gap| gap.0 < version && version < gap.1)
    }

    /// Returns the number of the first event after this version.
    pub(crate) fn first_number_after(&self, version: u64) -> u64 {
        let index = self
            .events
            .partition_point(|event| event.version <= version);
        self.events
            .get(index)
            .map_or(self.next_number, |event| event.number)
    }

    /// Returns the event with this number, or `None` if there is none yet. Events before [`EventBuffer::first_number`] are gone.
    pub(crate) fn get(&self, number: u64) -> Option<&Event> {
        let index = number.checked_sub(self.first_number())?;
        self.events.get(usize::try_from(index).ok()?)
    }

    /// Returns the number of the oldest event.
    pub(crate) fn first_number(&self) -> u64 {
        self.events
            .front()
            .map_or(self.next_number, |event| event.number)
    }

    /// Whether only the difference is known for a range of versions that ends after this version.
    pub(crate) fn has_gap_after(&self, version: u64) -> bool {
        self.gaps.iter().any(|gap| gap.1 > version)
    }

    /// Returns the former state of each object that changed after `version`, `None` if it did not exist. The buffer must reach
    /// that version ([`EventBuffer::has_all_after`]).
    pub(crate) fn rewind(&self, version: u64) -> BTreeMap<NamespacedName, Option<Arc<Object>>> {
        let later = self.events.iter().rev();
        let later = later.take_while(|event| event.version > version);
        later
            .map(|event| (event.object.key.clone(), event.before.clone()))
            .collect()
    }
}

/// Returns the approximate memory of an event in bytes, beyond the objects that exist now.
fn weight(event: &Event) -> usize {
    event.object.memory_size() + event.before.as_ref().map_or(0, |_| 64) + 64
}
