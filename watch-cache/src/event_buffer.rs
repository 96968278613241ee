//! What happened last, so that a reader that was away for a while goes on from where it was.
//!
//! Events are in the order of their versions. Several may have one version: what a list shows to be gone went at some version
//! that nobody knows, and counts as gone at the list's.

use crate::object::{NamespacedName, Object};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

/// What happened to one object.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    /// Which event of the store it is, without gaps.
    pub(crate) number: u64,
    pub(crate) version: u64,
    /// Before; `None`: there was none.
    pub(crate) before: Option<Arc<Object>>,
    /// Afterwards; of what was deleted its last state, at this version.
    pub(crate) object: Arc<Object>,
    pub(crate) deleted: bool,
}

/// The last events of a store, bounded in bytes.
#[derive(Debug)]
pub(crate) struct EventBuffer {
    events: VecDeque<Event>,
    bytes: usize,
    most: usize,
    /// From this version on nothing is missing.
    since: u64,
    /// The number of the next event.
    next: u64,
    /// Stretches between two versions of which only the ends are known: what came and went within one was seen by nobody.
    gaps: VecDeque<(u64, u64)>,
}

impl EventBuffer {
    pub(crate) fn new(most: usize) -> Self {
        Self {
            events: VecDeque::new(),
            bytes: 0,
            most,
            since: 0,
            next: 0,
            gaps: VecDeque::new(),
        }
    }

    /// Forgets all: what is before this version is unknown.
    pub(crate) fn begin(&mut self, version: u64) {
        self.events.clear();
        self.gaps.clear();
        self.bytes = 0;
        self.since = version;
    }

    /// The number of the next event.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    pub(crate) fn push(
        &mut self,
        version: u64,
        before: Option<Arc<Object>>,
        (object, deleted): (Arc<Object>, bool),
    ) {
        let event = Event {
            number: self.next,
            version,
            before,
            object,
            deleted,
        };
        self.next += 1;
        self.bytes += weight(&event);
        self.events.push_back(event);
        while self.bytes > self.most {
            let Some(oldest) = self.events.pop_front() else {
                break;
            };
            self.bytes -= weight(&oldest);
            self.since = self.since.max(oldest.version);
        }
        let since = self.since;
        self.gaps.retain(|gap| gap.1 > since);
    }

    /// Between these two versions only the difference is known, unless there are none between.
    pub(crate) fn gap(&mut self, from: u64, to: u64) -> bool {
        if to <= from.saturating_add(1) {
            return false;
        }
        self.gaps.push_back((from, to));
        // Old ones become one: too much is asked for anew rather than too little.
        while self.gaps.len() > 64 {
            if let (Some(first), Some(second)) = (self.gaps.pop_front(), self.gaps.front_mut()) {
                second.0 = first.0;
            }
        }
        true
    }

    /// Whether a reader that knows all up to this version can be told all that came after it.
    pub(crate) fn reaches(&self, version: u64) -> bool {
        let mut gaps = self.gaps.iter();
        version >= self.since && !gaps.any(|gap| gap.0 < version && version < gap.1)
    }

    /// The number of the first event after this version.
    pub(crate) fn after(&self, version: u64) -> u64 {
        let at = self
            .events
            .partition_point(|event| event.version <= version);
        self.events.get(at).map_or(self.next, |event| event.number)
    }

    /// The event with this number; `None` if there is none yet. Those before [`Window::first`] are gone.
    pub(crate) fn get(&self, number: u64) -> Option<&Event> {
        let at = number.checked_sub(self.first())?;
        self.events.get(usize::try_from(at).ok()?)
    }

    /// The number of the oldest event.
    pub(crate) fn first(&self) -> u64 {
        self.events.front().map_or(self.next, |event| event.number)
    }

    /// Whether of some of what came after this version only the outcome is known.
    pub(crate) fn guesses(&self, version: u64) -> bool {
        self.gaps.iter().any(|gap| gap.1 > version)
    }

    /// What came after `version` as it was then, `None` if it was not there; [`Window::reaches`] it.
    pub(crate) fn rewind(&self, version: u64) -> BTreeMap<NamespacedName, Option<Arc<Object>>> {
        let later = self.events.iter().rev();
        let later = later.take_while(|event| event.version > version);
        later
            .map(|event| (event.object.key.clone(), event.before.clone()))
            .collect()
    }
}

/// What an event holds beyond the objects that are there now, in bytes, about.
fn weight(event: &Event) -> usize {
    event.object.weight() + event.before.as_ref().map_or(0, |_| 64) + 64
}
