//! Streams whose late frames are ignored.

use fnv::FnvHashSet;
use std::collections::VecDeque;

/// Numbers of the streams that this end has reset lately.
#[derive(Debug, Default)]
pub(super) struct ResetList {
    numbers: FnvHashSet<u32>,
    order: VecDeque<u32>,
    /// Number of the oldest entries that were there at the last mark.
    marked: usize,
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
        if self.order.len() > max {
            self.forget(1);
        }
    }

    /// Marks the streams that are listed now.
    pub(super) fn mark(&mut self) {
        self.marked = self.order.len();
    }

    /// Forgets the streams that were listed at the last mark, because the peer has learnt of their resets since.
    pub(super) fn forget_marked(&mut self) {
        self.forget(self.marked);
        if self.order.is_empty() {
            (self.numbers, self.order) = (FnvHashSet::default(), VecDeque::new());
        }
    }

    /// Forgets the oldest streams.
    fn forget(&mut self, count: usize) {
        for oldest in self.order.drain(..count) {
            self.numbers.remove(&oldest);
            self.highest_forgotten = self.highest_forgotten.max(oldest);
        }
        self.marked = self.marked.saturating_sub(count);
    }

    pub(super) fn contains(&self, id: u32) -> bool {
        self.numbers.contains(&id)
    }
}
