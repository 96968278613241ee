//! Sending: which frames leave next. Control frames go first, then heads, then data: streams that have sent little lately in
//! their order, then the others in turns. So small messages overtake bulk.

use super::{
    connection::{State, Unsent},
    error::Initiator,
    frame::{self, HEAD_LEN, Head, flag, kind},
    io::Outgoing,
    message,
    streams::{Half, Key, Lane, Store, Stream},
};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use std::collections::VecDeque;

/// Number of bytes that a stream may send ahead of bulk since it last had nothing to send.
const FRESH_BYTES: usize = 32 << 10;
/// Largest DATA frame while several streams wait.
const SHARED_FRAME: usize = 16 << 10;
/// Payload, in bytes, from which a frame's payload is written without a copy.
const UNCOPIED_BYTES: usize = 16 << 10;
/// Bytes of the connection's window for which one more waiting stream is resumed.
const UNBLOCK_BYTES: usize = 1 << 10;
/// Number of bytes that are taken for one write, apart from the last frame's.
const BATCH_BYTES: usize = 64 << 10;

/// Streams that have frames to send.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    fresh: VecDeque<Key>,
    bulk: VecDeque<Key>,
    /// Streams that wait for the connection's window.
    blocked: VecDeque<Key>,
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

    fn front(&self) -> Option<Key> {
        self.fresh.front().or_else(|| self.bulk.front()).copied()
    }

    fn is_shared(&self) -> bool {
        self.fresh.len() + self.bulk.len() > 1
    }

    fn pop(&mut self) -> Option<Key> {
        self.fresh.pop_front().or_else(|| self.bulk.pop_front())
    }

    /// Moves the first stream, which has sent a frame, to its next place.
    fn move_front(&mut self, stream: &mut Stream) {
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

impl State {
    /// Moves frames to `out`, which is empty: all control frames and heads, and a batch of data. Returns whether there is more.
    pub(super) fn drain(&mut self, out: &mut Outgoing) -> bool {
        self.put_window_updates();
        out.take(&mut self.control);
        self.unsent = Unsent::default();
        self.take_heads(out);
        while out.len() < BATCH_BYTES && self.send_frame(out) {
            // The end of a stream may have opened another one, whose data follows.
            self.take_heads(out);
        }
        self.schedule.has_frames()
            || !self.is_drained()
            || self.recv_window.is_due(self.config.connection_window)
    }

    /// Moves all heads to `out`, and opens the requests that waited because too many heads did.
    fn take_heads(&mut self, out: &mut Outgoing) {
        while !self.heads.is_empty() {
            out.take(&mut self.heads);
            self.open_waiting();
        }
    }

    /// Whether nothing is left to write.
    pub(super) fn is_drained(&self) -> bool {
        self.control.is_empty() && self.heads.is_empty()
    }

    /// Whether at most one stream is open, as on a tunnel without requests.
    pub(super) fn is_quiet(&self) -> bool {
        self.open_local + self.open_remote <= 1
    }

    /// Frees the memory that only traffic needs.
    pub(super) fn shrink(&mut self) {
        if self.is_drained() {
            self.control = BytesMut::new();
            self.heads = BytesMut::new();
        }
        self.updates.shrink_to_fit();
        self.schedule.shrink();
        self.store.shrink();
        self.shrink_queues();
    }

    fn put_window_updates(&mut self) {
        if self.recv_window.is_due(self.config.connection_window) {
            let bytes = self.recv_window.announce();
            frame::put_window_update(&mut self.control, 0, bytes);
        }
        for key in self.updates.drain(..) {
            let Some(stream) = self.store.get(key) else {
                continue;
            };
            stream.has_update = false;
            if stream.error.is_none() && stream.recv == Half::Open {
                let bytes = stream.recv_window.announce();
                frame::put_window_update(&mut self.control, key.id, bytes);
            }
        }
    }

    /// Sends one frame of a stream. Returns `false` if no stream can send.
    fn send_frame(&mut self, out: &mut Outgoing) -> bool {
        let window = self.send_window.size();
        let mut next = next_key(&mut self.schedule, &mut self.store);
        while next.is_none() && window > 0 && !self.schedule.blocked.is_empty() {
            self.schedule.unblock(window, &mut self.store);
            next = next_key(&mut self.schedule, &mut self.store);
        }
        let Some((key, stream)) = next.and_then(|key| Some((key, self.store.get(key)?))) else {
            return false;
        };
        if stream.queue.is_empty() {
            self.send_end(key, out);
            return true;
        }
        if window == 0 {
            stream.lane = Lane::Blocked;
            self.schedule.pop();
            self.schedule.blocked.push_back(key);
            return true;
        }
        let shared = if self.schedule.is_shared() {
            SHARED_FRAME
        } else {
            usize::MAX
        };
        let room = BATCH_BYTES.saturating_sub(out.len()).max(SHARED_FRAME);
        let length = stream.send_window.size().min(window);
        let length = length.min(shared).min(room).min(self.peer.max_frame);
        let sent = put_data(stream, length, out);
        self.send_window.take(sent);
        stream.wake_sender(self.send_window, &mut self.wakes);
        self.schedule.move_front(stream);
        self.after_frame(key);
        true
    }

    /// Ends a stream by trailers or an empty DATA frame.
    fn send_end(&mut self, key: Key, out: &mut Outgoing) {
        let Some(stream) = self.store.get(key) else {
            return;
        };
        stream.end_sent = true;
        if let Some(trailers) = stream.last_block.take() {
            let (encoder, max_frame) = (&mut self.encoder, self.peer.max_frame);
            frame::put_block(&mut out.bytes, (key.id, true), max_frame, |block| {
                message::put_trailers(encoder, &trailers, block);
            });
        } else {
            frame::put_frame(&mut out.bytes, kind::DATA, flag::END_STREAM, key.id, &[]);
        }
        self.schedule.move_front(stream);
        self.after_frame(key);
    }

    /// Does what follows from the end of a stream's sending half.
    fn after_frame(&mut self, key: Key) {
        let Some(stream) = self.store.get(key) else {
            return;
        };
        if !stream.end_sent {
            return;
        }
        match stream.reset_after_end.take() {
            Some(reason) if stream.recv != Half::Ended => {
                self.reset(key, reason, Initiator::User);
            }
            _ => self.settle(key),
        }
    }
}

/// Returns the stream that sends next. Streams that cannot are removed.
fn next_key(schedule: &mut Schedule, store: &mut Store) -> Option<Key> {
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

/// Appends a DATA frame of at most `length` bytes of the stream's queue. Returns its payload's length.
fn put_data(stream: &mut Stream, length: usize, out: &mut Outgoing) -> usize {
    let is_large = |chunk: &Bytes| chunk.len() >= UNCOPIED_BYTES;
    let first_len = stream.queue.front().map_or(0, Bytes::len);
    let is_uncopied = first_len.min(length) >= UNCOPIED_BYTES;
    let payload = if is_uncopied {
        first_len.min(length)
    } else {
        // Small chunks share a frame, up to the next large one.
        let mut joined = first_len;
        for chunk in stream
            .queue
            .iter()
            .skip(1)
            .take_while(|chunk| !is_large(chunk))
        {
            if joined >= length {
                break;
            }
            joined += chunk.len();
        }
        joined.min(length).min(SHARED_FRAME)
    };
    stream.queued -= payload;
    stream.send_window.take(payload);
    stream.recently_sent += payload;
    let is_last = stream.queued == 0 && stream.send == Half::Ended && stream.last_block.is_none();
    stream.end_sent = is_last;
    let head = Head {
        length: payload,
        kind: kind::DATA,
        flags: if is_last { flag::END_STREAM } else { 0 },
        stream: stream.id,
    };
    out.bytes
        .reserve(HEAD_LEN + if is_uncopied { 0 } else { payload });
    out.bytes.put_slice(&head.to_bytes());
    let mut left = payload;
    while left > 0 {
        let Some(chunk) = stream.queue.front_mut() else {
            break;
        };
        let count = chunk.len().min(left);
        left -= count;
        let part = if count == chunk.len() {
            stream.queue.pop_front()
        } else {
            Some(chunk.split_to(count))
        };
        let Some(part) = part else { break };
        if is_uncopied {
            out.put_large(part);
        } else {
            out.bytes.put_slice(part.chunk());
        }
    }
    payload
}
