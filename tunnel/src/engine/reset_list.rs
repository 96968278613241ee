//! Streams whose late frames are ignored.

use fnv::FnvHashMap;
use std::collections::VecDeque;

/// Numbers of the streams that this end has reset lately.
#[derive(Debug, Default)]
pub(super) struct ResetList {
    /// Each stream, and the bytes of its window that the peer may still have used before it learnt of the reset.
    windows: FnvHashMap<u32, usize>,
    order: VecDeque<u32>,
    /// Number of the oldest entries that were there at the last mark.
    marked: usize,
    /// Highest number that is not remembered any more.
    pub(super) highest_forgotten: u32,
}

impl ResetList {
    /// Adds a stream with the rest of its window. Of more than `max` streams the oldest is forgotten.
    pub(super) fn add(&mut self, (id, window): (u32, usize), max: usize) {
        if self.windows.contains_key(&id) {
            return;
        }
        self.windows.insert(id, window);
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
            (self.windows, self.order) = (FnvHashMap::default(), VecDeque::new());
        }
    }

    /// Forgets the oldest streams.
    fn forget(&mut self, count: usize) {
        for oldest in self.order.drain(..count) {
            self.windows.remove(&oldest);
            self.highest_forgotten = self.highest_forgotten.max(oldest);
        }
        self.marked = self.marked.saturating_sub(count);
    }

    pub(super) fn contains(&self, id: u32) -> bool {
        self.windows.contains_key(&id)
    }

    /// Takes the payload of a late DATA frame from the stream's window. Returns `false` if an honest peer could not send it.
    pub(super) fn take(&mut self, id: u32, payload: usize) -> bool {
        let window = self.windows.get_mut(&id);
        window.is_some_and(|window| {
            let left = window.checked_sub(payload);
            *window = left.unwrap_or(0);
            left.is_some()
        })
    }
}
