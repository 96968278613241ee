//! Streams whose late frames are ignored.

use fnv::FnvHashSet;
use std::collections::VecDeque;

/// Numbers of the streams that this end has reset lately.
#[derive(Debug, Default)]
pub(super) struct ResetList {
    numbers: FnvHashSet<u32>,
    order: VecDeque<u32>,
    /// Highest number that is not remembered any more.
    pub(super) highest_forgotten: u32,
}

impl ResetList {
    /// Adds a number. Of more than `max` numbers the oldest is forgotten.
    pub(super) fn add(&mut self, id: u32, max: usize) {
        if !self.numbers.insert(id) {
            return;
        }
        self.order.push_back(id);
        if self.order.len() > max
            && let Some(oldest) = self.order.pop_front()
        {
            self.numbers.remove(&oldest);
            self.highest_forgotten = self.highest_forgotten.max(oldest);
        }
    }

    pub(super) fn contains(&self, id: u32) -> bool {
        self.numbers.contains(&id)
    }
}
