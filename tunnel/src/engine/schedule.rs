//! Order of sending: streams that have sent little lately in their order, then the others in turns. So small messages overtake
//! bulk.

use super::streams::{Key, Lane, Store, Stream};
use std::collections::VecDeque;

/// Number of bytes that a stream may send ahead of bulk since it last had nothing to send.
const FRESH_BYTES: usize = 32 << 10;
/// Bytes of the connection's window for which one more waiting stream is resumed.
const UNBLOCK_BYTES: usize = 1 << 10;

/// Streams that have frames to send.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    fresh: VecDeque<Key>,
    bulk: VecDeque<Key>,
    /// Streams that wait for the connection's window.
    pub(super) blocked: VecDeque<Key>,
    /// Number of entries whose stream is removed, or more.
    removed: usize,
}

impl Schedule {
    /// Adds a stream that has got something to send.
    pub(super) fn add(&mut self, key: Key, stream: &mut Stream) {
        if stream.lane != Lane::None || !stream.has_frame() {
            return;
        }
        if stream.recently_sent < FRESH_BYTES {
            stream.lane = Lane::Fresh;
            self.fresh.push_back(key);
        } else {
            stream.lane = Lane::Bulk;
            self.bulk.push_back(key);
        }
    }

    /// Resumes streams that wait for the connection's window, not many more than a window of this many bytes serves: a peer that
    /// opens it byte by byte causes no work for all of them each time.
    pub(super) fn unblock(&mut self, window: usize, store: &mut Store) {
        let count = (window / UNBLOCK_BYTES + 1).min(self.blocked.len());
        for _ in 0..count {
            let Some(key) = self.blocked.pop_front() else {
                break;
            };
            if let Some(stream) = store.get(key) {
                stream.lane = Lane::None;
                self.add(key, stream);
            }
        }
    }

    /// Whether a stream may have a frame to send now.
    pub(super) fn has_frames(&self) -> bool {
        !self.fresh.is_empty() || !self.bulk.is_empty()
    }

    /// Returns the number of entries.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.fresh.len() + self.bulk.len() + self.blocked.len()
    }

    pub(super) fn front(&self) -> Option<Key> {
        self.fresh.front().or_else(|| self.bulk.front()).copied()
    }

    pub(super) fn is_shared(&self) -> bool {
        self.fresh.len() + self.bulk.len() > 1
    }

    pub(super) fn pop(&mut self) -> Option<Key> {
        self.fresh.pop_front().or_else(|| self.bulk.pop_front())
    }

    /// Moves the first stream, which has sent a frame, to its next place.
    pub(super) fn move_front(&mut self, stream: &mut Stream) {
        let (was_fresh, Some(key)) = (!self.fresh.is_empty(), self.pop()) else {
            return;
        };
        if !stream.has_frame() {
            stream.lane = Lane::None;
            if stream.queue.is_empty() {
                stream.recently_sent = 0;
            }
        } else if was_fresh && stream.recently_sent < FRESH_BYTES {
            self.fresh.push_front(key);
        } else {
            stream.lane = Lane::Bulk;
            self.bulk.push_back(key);
        }
    }

    /// Counts a removed stream, whose entry stays until it is its turn or there are more such entries than streams.
    pub(super) fn count_removed(&mut self, store: &mut Store) {
        self.removed += 1;
        if self.removed <= 64 + store.len() {
            return;
        }
        self.removed = 0;
        for queue in [&mut self.fresh, &mut self.bulk, &mut self.blocked] {
            queue.retain(|key| store.get(*key).is_some());
        }
    }

    /// Frees unused memory.
    pub(super) fn shrink(&mut self) {
        for queue in [&mut self.fresh, &mut self.bulk, &mut self.blocked] {
            if queue.is_empty() {
                *queue = VecDeque::new();
            }
        }
    }
}

/// Returns the stream that sends next. Streams that cannot are removed.
pub(super) fn next_key(schedule: &mut Schedule, store: &mut Store) -> Option<Key> {
    loop {
        let key = schedule.front()?;
        match store.get(key) {
            Some(stream) if stream.has_frame() => return Some(key),
            Some(stream) => stream.lane = Lane::None,
            None => {}
        }
        schedule.pop();
    }
}
