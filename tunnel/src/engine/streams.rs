//! The streams of a connection: their states (RFC 9113 section 5.1), receive queues and send queues.

use super::{
    error::{Error, Reason},
    flow::{RecvWindow, SendWindow, StreamWindows},
};
use bytes::{Bytes, BytesMut};
use fnv::FnvHashMap;
use http::{HeaderMap, Method, Response, StatusCode};
use slab::Slab;
use std::{collections::VecDeque, task::Waker};

/// Number of bytes that a stream queues for sending at most, besides its peer's window.
pub(super) const MAX_QUEUED: usize = 128 << 10;
/// Payload, in bytes, from which a part of the read buffer is kept without a copy.
const SHARED_BYTES: usize = 4 << 10;
/// Largest chunk of joined small payloads, in bytes.
const MAX_JOINED: usize = 16 << 10;
/// Memory of fields for each byte of their size, which counts 32 bytes for each field.
const MEMORY_OF_FIELDS: usize = 3;
/// Memory of a chunk besides its bytes.
const CHUNK_OVERHEAD: usize = 64;

/// Place of a stream, and its number, which tells whether the place is still the stream's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) index: usize,
    pub(super) id: u32,
}

/// Received bytes of a body.
#[derive(Debug)]
enum Chunk {
    /// Part of a read buffer, and the memory that it keeps allocated beside that of the stream's other chunks.
    Shared(Bytes, usize),
    /// Small payloads in one buffer.
    Joined(BytesMut),
}

/// Bytes of a body that arrived and were not read.
#[derive(Debug, Default)]
pub(super) struct RecvQueue {
    chunks: VecDeque<Chunk>,
    /// Number of the read buffer of which the last shared chunk is a part.
    last_buffer: u64,
}

impl RecvQueue {
    /// Appends the first `length` bytes of the read buffer, which has this number and capacity, and removes them there.
    pub(super) fn push(&mut self, read: &mut BytesMut, length: usize, buffer: (u64, usize)) {
        if length >= SHARED_BYTES {
            let is_new = self.chunks.is_empty() || self.last_buffer != buffer.0;
            self.last_buffer = buffer.0;
            let cost = if is_new { buffer.1.max(length) } else { 0 };
            let bytes = read.split_to(length).freeze();
            self.chunks.push_back(Chunk::Shared(bytes, cost));
            return;
        }
        let payload = &read[..length];
        match self.chunks.back_mut() {
            Some(Chunk::Joined(last)) if last.len() + length <= MAX_JOINED => {
                last.extend_from_slice(payload);
            }
            _ => self
                .chunks
                .push_back(Chunk::Joined(BytesMut::from(payload))),
        }
        bytes::Buf::advance(read, length);
    }

    pub(super) fn pop(&mut self) -> Option<Bytes> {
        match self.chunks.pop_front()? {
            Chunk::Shared(bytes, _) => Some(bytes),
            Chunk::Joined(bytes) => Some(bytes.freeze()),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.chunks = VecDeque::new();
    }

    /// Returns the memory of the chunks, in bytes.
    pub(super) fn memory(&self) -> usize {
        let costs = self.chunks.iter().map(|chunk| match chunk {
            Chunk::Shared(_, cost) => CHUNK_OVERHEAD + cost,
            Chunk::Joined(bytes) => CHUNK_OVERHEAD + bytes.capacity(),
        });
        costs.sum()
    }
}

/// Progress of a half of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Half {
    /// The head is still to come.
    AwaitingHead,
    /// The head is past; data and trailers may follow.
    Open,
    /// `END_STREAM` was received, or queued for sending.
    Ended,
}

/// Place of a stream in the order of sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// Nothing to send, or no window.
    None,
    /// Has sent little since it last had nothing to send.
    Fresh,
    /// Has sent much.
    Bulk,
    /// Waits for the window of the connection.
    Blocked,
}

/// Length that the body of a received message must have (RFC 9113 section 8.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Any length.
    Any,
    /// As many octets as this are still to come.
    Left(u64),
    /// The response to HEAD has no body, whatever its `Content-Length`.
    OfHead,
    /// The successful response to CONNECT has no `Content-Length` (RFC 9110 section 9.3.6).
    OfConnect,
}

impl Content {
    /// Returns the rule for the response to a request with this method.
    pub(super) fn after(method: &Method) -> Self {
        match *method {
            Method::HEAD => Self::OfHead,
            Method::CONNECT => Self::OfConnect,
            _ => Self::Any,
        }
    }

    /// Returns the rule for the body of a response with this status and `Content-Length`.
    pub(super) fn of_response(self, status: StatusCode, length: Option<u64>) -> Self {
        match (self, status) {
            (Self::OfHead, _) => Self::Left(0),
            (_, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) => Self::Any,
            (Self::OfConnect, _) if status.is_success() => Self::Any,
            _ => length.map_or(Self::Any, Self::Left),
        }
    }

    /// Takes octets of the body, which may be its last. Returns `false` if the message is malformed.
    #[must_use]
    pub(super) fn take(&mut self, octets: usize, is_last: bool) -> bool {
        let Self::Left(left) = self else {
            return true;
        };
        let rest = left.checked_sub(octets as u64);
        *left = rest.unwrap_or(0);
        rest.is_some_and(|rest| rest == 0 || !is_last)
    }
}

/// One stream.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts")]
pub(super) struct Stream {
    pub(super) id: u32,
    /// Number of handles that keep the stream, those for flow control not counted.
    pub(super) handles: u32,
    /// Whether this end opened the stream.
    pub(super) is_local: bool,
    /// Whether the stream counts as open (RFC 9113 section 5.1.2).
    pub(super) is_counted: bool,
    /// Whether the user has not yet got the stream.
    pub(super) is_unaccepted: bool,
    /// Whether the stream waits until the peer allows one more stream. No frame of it is sent before.
    pub(super) is_waiting: bool,
    pub(super) recv: Half,
    pub(super) send: Half,
    /// Whether `END_STREAM` is written.
    pub(super) end_sent: bool,
    /// Reset or end of the connection.
    pub(super) error: Option<Error>,

    pub(super) response: Option<Box<Response<()>>>,
    pub(super) interim: VecDeque<Response<()>>,
    /// Size of the heads and trailers that arrived since none was unread, in bytes (RFC 9113 section 6.5.2).
    pub(super) fields_size: usize,
    pub(super) content: Content,
    pub(super) body: RecvQueue,
    pub(super) trailers: Option<Box<HeaderMap>>,
    /// Whether the receiving handle is dropped, so that further data is discarded.
    pub(super) is_unread: bool,
    pub(super) recv_window: RecvWindow,
    /// Bytes that have arrived and were not released.
    pub(super) in_flight: usize,
    /// Bytes that the reader has taken, at most `u32::MAX`.
    taken: u32,
    /// Whether the stream is in the list of due `WINDOW_UPDATE` frames.
    pub(super) has_update: bool,
    pub(super) recv_waker: Option<Waker>,

    pub(super) queue: VecDeque<Bytes>,
    pub(super) queued: usize,
    pub(super) last_block: Option<Box<HeaderMap>>,
    /// Bytes that the user wants to send beside those that are queued.
    pub(super) requested: usize,
    pub(super) send_window: SendWindow,
    pub(super) send_waker: Option<Waker>,
    pub(super) lane: Lane,
    /// Bytes sent since the stream last had nothing to send.
    pub(super) recently_sent: usize,
    /// Code of a reset that follows the queued data.
    pub(super) reset_after_end: Option<Reason>,
}

impl Stream {
    pub(super) fn new(id: u32, is_local: bool, send_window: SendWindow, recv: RecvWindow) -> Self {
        Self {
            id,
            handles: 0,
            is_local,
            is_counted: false,
            is_unaccepted: false,
            is_waiting: false,
            recv: Half::AwaitingHead,
            send: Half::AwaitingHead,
            end_sent: false,
            error: None,
            response: None,
            interim: VecDeque::new(),
            fields_size: 0,
            content: Content::Any,
            body: RecvQueue::default(),
            trailers: None,
            is_unread: false,
            recv_window: recv,
            in_flight: 0,
            taken: 0,
            has_update: false,
            recv_waker: None,
            queue: VecDeque::new(),
            queued: 0,
            last_block: None,
            requested: 0,
            send_window,
            send_waker: None,
            lane: Lane::None,
            recently_sent: 0,
            reset_after_end: None,
        }
    }

    /// Whether no frame of either end can follow.
    pub(super) fn is_closed(&self) -> bool {
        self.error.is_some() || (self.recv == Half::Ended && self.end_sent)
    }

    /// Returns the number of bytes that the user may queue. `max_queued` is that of [`super::connection::State::max_queued`].
    pub(super) fn capacity(&self, max_queued: usize) -> usize {
        if self.is_waiting {
            return 0;
        }
        let limit = self.send_window.size().min(max_queued);
        limit.saturating_sub(self.queued).min(self.requested)
    }

    /// Whether a frame is to be sent for which the stream has the window.
    pub(super) fn has_frame(&self) -> bool {
        if self.is_waiting || self.error.is_some() {
            return false;
        }
        match self.queue.front() {
            Some(_) => self.send_window.size() > 0,
            None => self.send == Half::Ended && !self.end_sent,
        }
    }

    /// Frees the queues of the sending half. Returns the number of bytes that were queued.
    #[must_use]
    pub(super) fn clear_send_queue(&mut self) -> usize {
        self.queue = VecDeque::new();
        self.last_block = None;
        std::mem::take(&mut self.queued)
    }

    /// Wakes the sender, once a good part of its queue is free.
    pub(super) fn wake_sender(&mut self, max_queued: usize, wakes: &mut Vec<Waker>) {
        if self.send_waker.is_some()
            && self.queued * 2 <= MAX_QUEUED
            && self.capacity(max_queued) > 0
        {
            wakes.extend(self.send_waker.take());
        }
    }

    /// Collects the wakers of the stream's tasks.
    pub(super) fn wake_all(&mut self, wakes: &mut Vec<Waker>) {
        wakes.extend(self.recv_waker.take());
        wakes.extend(self.send_waker.take());
    }

    /// Releases bytes that the reader has taken, and adjusts the window to them.
    pub(super) fn release(&mut self, bytes: usize, windows: StreamWindows) {
        let bytes_taken = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.taken = self.taken.saturating_add(bytes_taken);
        self.recv_window.release(bytes);
        self.recv_window.resize(windows.after(self.taken));
    }

    fn has_unread_fields(&self) -> bool {
        self.response.is_some() || self.trailers.is_some() || !self.interim.is_empty()
    }

    /// Adds the size of fields that wait for the reader from now on.
    pub(super) fn add_unread_fields(&mut self, size: usize) {
        if !self.has_unread_fields() {
            self.fields_size = 0;
        }
        self.fields_size += size;
    }

    /// Returns the bytes or the memory that unread data takes, whichever is more, and the memory of unread heads and trailers.
    pub(super) fn used(&self) -> usize {
        let fields = if self.has_unread_fields() {
            self.fields_size * MEMORY_OF_FIELDS
        } else {
            0
        };
        self.in_flight.max(self.body.memory()) + fields
    }
}

/// The streams of a connection, and the numbers of those that are open on the wire.
#[derive(Debug, Default)]
pub(super) struct Store {
    slab: Slab<Stream>,
    by_id: FnvHashMap<u32, usize>,
}

impl Store {
    pub(super) fn insert(&mut self, stream: Stream) -> Key {
        let id = stream.id;
        if self.slab.is_empty() {
            // Most tunnels have one stream most of the time; a vector begins with the memory of four.
            self.slab.reserve_exact(1);
        }
        let index = self.slab.insert(stream);
        self.by_id.insert(id, index);
        Key { index, id }
    }

    pub(super) fn get(&mut self, key: Key) -> Option<&mut Stream> {
        self.slab
            .get_mut(key.index)
            .filter(|stream| stream.id == key.id)
    }

    pub(super) fn find(&self, id: u32) -> Option<Key> {
        self.by_id.get(&id).map(|index| Key { index: *index, id })
    }

    /// Removes the number of a stream that is closed on the wire.
    pub(super) fn forget_id(&mut self, id: u32) {
        self.by_id.remove(&id);
    }

    pub(super) fn remove(&mut self, key: Key) -> Option<Stream> {
        self.get(key)?;
        self.by_id.remove(&key.id);
        self.slab.try_remove(key.index)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (Key, &mut Stream)> {
        self.slab.iter_mut().map(|(index, stream)| {
            let id = stream.id;
            (Key { index, id }, stream)
        })
    }

    /// Frees the unused memory of at most one stream.
    pub(super) fn shrink(&mut self) {
        if self.slab.len() <= 1 && self.slab.capacity() > 1 {
            self.slab.shrink_to_fit();
            self.by_id.shrink_to_fit();
        }
        for (_, stream) in &mut self.slab {
            stream.queue.shrink_to_fit();
            stream.body.chunks.shrink_to_fit();
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.slab.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.slab.len()
    }
}
