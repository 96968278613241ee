//! Sending: control frames go first, then heads, then data in the order of [`super::schedule`].

use super::{
    connection::{State, Unsent},
    error::Initiator,
    frame::{self, HEAD_LEN, Head, flag, kind},
    message,
    outgoing::Outgoing,
    schedule::next_key,
    streams::{Half, Key, Lane, Stream},
};
use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Largest DATA frame while several streams wait.
const SHARED_FRAME: usize = 16 << 10;
/// Payload, in bytes, from which a frame's payload is written without a copy.
const UNCOPIED_BYTES: usize = 16 << 10;
/// Number of bytes that are taken for one write, apart from the last frame's.
const BATCH_BYTES: usize = 64 << 10;

impl State {
    /// Moves frames to `out`, which is empty: all control frames and heads, and a batch of data. Returns whether there is more.
    pub(super) fn drain(&mut self, out: &mut Outgoing) -> bool {
        self.put_window_updates();
        out.take(&mut self.control);
        self.unsent = Unsent::default();
        let control_len = out.len();
        self.take_heads(out);
        while out.len() < BATCH_BYTES && self.send_frame(out) {
            // The end of a stream may have opened another one, whose data follows.
            self.take_heads(out);
        }
        if let Some(limit) = &mut self.frame_limit {
            limit.earn_for_bytes(out.len(), out.len() > control_len);
        }
        self.schedule.has_frames() || !self.is_drained() || self.recv_window.is_due()
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
        if self.recv_window.is_due() {
            let bytes = self.recv_window.announce();
            frame::put_window_update(&mut self.control, 0, bytes);
        }
        for key in self.updates.drain(..) {
            let Some(stream) = self.store.get(key) else {
                continue;
            };
            stream.has_update = false;
            // The window may have become smaller since the stream was listed. Its next release lists it again.
            let is_due = stream.recv_window.is_due();
            if is_due && stream.error.is_none() && stream.recv == Half::Open {
                let bytes = stream.recv_window.announce();
                frame::put_window_update(&mut self.control, key.id, bytes);
            }
        }
    }

    /// Sends one frame of a stream. Returns `false` if no stream can send.
    fn send_frame(&mut self, out: &mut Outgoing) -> bool {
        let (window, max_queued) = (self.send_window.size(), self.max_queued());
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
        self.queued -= sent;
        stream.wake_sender(max_queued, &mut self.wakes);
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
