//! Handles of streams, for their users. Each call takes the lock of the connection's state once.

use super::{
    connection::{Shared, register},
    error::{Error, Initiator, Reason},
    streams::{Half, Key},
};
use bytes::Bytes;
use http::HeaderMap;
use std::{
    fmt,
    marker::PhantomData,
    sync::Arc,
    task::{Context, Poll},
};

/// Number of a stream (RFC 9113 section 5.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamId(u32);

impl StreamId {
    pub(super) fn new(id: u32) -> Self {
        Self(id)
    }

    /// Returns the number.
    pub fn as_u32(self) -> u32 {
        self.0
    }
}

/// Counted handle of a stream: a stream without such handles is reset, if it is not complete.
pub(super) struct StreamRef {
    pub(super) shared: Arc<Shared>,
    pub(super) key: Key,
}

impl StreamRef {
    pub(super) fn id(&self) -> StreamId {
        StreamId(self.key.id)
    }
}

impl fmt::Debug for StreamRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Stream").field(&self.key.id).finish()
    }
}

impl Drop for StreamRef {
    fn drop(&mut self) {
        self.shared.with(|state| state.drop_handle(self.key));
    }
}

/// Error of a handle whose stream is gone. It cannot be, since the handle is counted.
pub(super) fn gone() -> Error {
    Error::user("the stream is gone")
}

/// Frame that follows queued data.
enum Next {
    More,
    End,
    Trailers(Box<HeaderMap>),
}

/// Sending half of a stream.
#[derive(Debug)]
pub struct SendStream<B = Bytes> {
    stream: StreamRef,
    _data: PhantomData<fn(B)>,
}

impl<B> SendStream<B> {
    pub(super) fn new(stream: StreamRef) -> Self {
        Self {
            stream,
            _data: PhantomData,
        }
    }

    /// Requests capacity for this many bytes beside those that are queued.
    pub fn reserve_capacity(&mut self, bytes: usize) {
        let mut state = self.stream.shared.lock();
        if let Some(stream) = state.store.get(self.stream.key) {
            stream.requested = bytes;
        }
    }

    /// Returns the number of bytes that can be sent now without more than a bounded queue.
    pub fn capacity(&self) -> usize {
        let mut state = self.stream.shared.lock();
        let max_queued = state.max_queued();
        let stream = state.store.get(self.stream.key);
        stream.map_or(0, |stream| stream.capacity(max_queued))
    }

    /// Waits for requested capacity, and returns it. `None` if the sending half has ended.
    pub fn poll_capacity(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<usize, Error>>> {
        let mut state = self.stream.shared.lock();
        let max_queued = state.max_queued();
        let Some(stream) = state.store.get(self.stream.key) else {
            return Poll::Ready(None);
        };
        if stream.error.is_some() || stream.send == Half::Ended {
            return Poll::Ready(None);
        }
        let capacity = stream.capacity(max_queued);
        if capacity > 0 {
            return Poll::Ready(Some(Ok(capacity)));
        }
        register(&mut stream.send_waker, cx);
        Poll::Pending
    }

    /// Resets the stream, both halves.
    pub fn send_reset(&mut self, reason: Reason) {
        let key = self.stream.key;
        (self.stream.shared).with(|state| state.reset(key, reason, Initiator::User));
    }

    /// Waits for a reset, and returns its code, or the error by which the connection ended.
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<Result<Reason, Error>> {
        poll_reset(&self.stream, cx)
    }

    /// Returns the stream's number.
    pub fn stream_id(&self) -> StreamId {
        self.stream.id()
    }

    /// Ends the sending half with trailers.
    ///
    /// # Errors
    /// If the half has ended, or the trailers have a field that HTTP/2 forbids.
    pub fn send_trailers(&mut self, trailers: HeaderMap) -> Result<(), Error> {
        if super::message::has_forbidden_field(&trailers) {
            return Err(Error::user("the trailers are malformed"));
        }
        self.send(Bytes::new(), Next::Trailers(Box::new(trailers)))
    }

    /// Queues data, and what follows.
    fn send(&self, data: Bytes, next: Next) -> Result<(), Error> {
        let key = self.stream.key;
        self.stream.shared.with(|state| {
            let stream = state.store.get(key).ok_or_else(gone)?;
            if let Some(error) = &stream.error {
                return Err(error.clone());
            }
            if stream.send != Half::Open {
                return Err(Error::user("the sending half has ended"));
            }
            if !data.is_empty() {
                stream.queued += data.len();
                state.queued += data.len();
                stream.requested = stream.requested.saturating_sub(data.len());
                stream.queue.push_back(data);
            }
            if !matches!(next, Next::More) {
                stream.send = Half::Ended;
            }
            if let Next::Trailers(trailers) = next {
                stream.last_block = Some(trailers);
            }
            if stream.has_frame() {
                state.schedule.add(key, stream);
                state.has_work = true;
            }
            Ok(())
        })
    }
}

impl SendStream<Bytes> {
    /// Queues data, as much as the caller likes; [`SendStream::capacity`] is advice. With `end_stream` it is the last.
    ///
    /// # Errors
    /// If the stream was reset, or this half has ended.
    pub fn send_data(&mut self, data: Bytes, end_stream: bool) -> Result<(), Error> {
        self.send(data, if end_stream { Next::End } else { Next::More })
    }
}

/// Waits for the end of a stream by an error.
pub(super) fn poll_reset(stream: &StreamRef, cx: &Context<'_>) -> Poll<Result<Reason, Error>> {
    let mut state = stream.shared.lock();
    let Some(stream) = state.store.get(stream.key) else {
        return Poll::Ready(Err(gone()));
    };
    let Some(error) = &stream.error else {
        register(&mut stream.send_waker, cx);
        return Poll::Pending;
    };
    Poll::Ready(error.reason().ok_or_else(|| error.clone()))
}

/// Handle of a stream's receive window. It does not keep the stream.
#[derive(Clone)]
pub struct FlowControl {
    shared: Arc<Shared>,
    key: Key,
}

impl fmt::Debug for FlowControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FlowControl").field(&self.key.id).finish()
    }
}

impl FlowControl {
    pub(super) fn new(stream: &StreamRef) -> Self {
        Self {
            shared: stream.shared.clone(),
            key: stream.key,
        }
    }

    /// Releases bytes that were read, so that the peer may send as many more.
    ///
    /// # Errors
    /// If more bytes are released than were received.
    pub fn release_capacity(&mut self, bytes: usize) -> Result<(), Error> {
        let key = self.key;
        self.shared.with(|state| {
            let windows = state.stream_windows;
            let Some(stream) = state.store.get(key) else {
                return Ok(());
            };
            let left = stream.in_flight.checked_sub(bytes);
            stream.in_flight = left.ok_or(Error::user("more bytes are released than arrived"))?;
            stream.release(bytes, windows);
            state.release_connection(bytes);
            state.mark_update(key);
            Ok(())
        })
    }

    /// Returns the bytes that have arrived and were not released, or the memory that they take if that is more.
    pub fn used_capacity(&self) -> usize {
        let mut state = self.shared.lock();
        state.store.get(self.key).map_or(0, |stream| stream.used())
    }
}

/// Receiving half of a stream.
#[derive(Debug)]
#[must_use = "streams do nothing unless polled"]
pub struct RecvStream {
    flow: FlowControl,
    /// Dropped after the half is marked as unread.
    stream: StreamRef,
}

impl RecvStream {
    pub(super) fn new(stream: StreamRef) -> Self {
        Self {
            flow: FlowControl::new(&stream),
            stream,
        }
    }

    /// Returns the next chunk, or `None` after the last.
    pub fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Error>>> {
        let mut state = self.stream.shared.lock();
        let Some(stream) = state.store.get(self.stream.key) else {
            return Poll::Ready(Some(Err(gone())));
        };
        if let Some(chunk) = stream.body.pop() {
            return Poll::Ready(Some(Ok(chunk)));
        }
        if stream.recv == Half::Ended {
            return Poll::Ready(None);
        }
        if let Some(error) = &stream.error {
            return Poll::Ready(Some(Err(error.clone())));
        }
        register(&mut stream.recv_waker, cx);
        Poll::Pending
    }

    /// Returns the trailers, after the last chunk.
    pub fn poll_trailers(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<HeaderMap>, Error>> {
        let mut state = self.stream.shared.lock();
        let Some(stream) = state.store.get(self.stream.key) else {
            return Poll::Ready(Err(gone()));
        };
        if stream.body.is_empty() {
            if stream.recv == Half::Ended {
                return Poll::Ready(Ok(stream.trailers.take().map(|trailers| *trailers)));
            }
            if let Some(error) = &stream.error {
                return Poll::Ready(Err(error.clone()));
            }
        }
        register(&mut stream.recv_waker, cx);
        Poll::Pending
    }

    /// Whether nothing more will be returned, not even trailers.
    pub fn is_end_stream(&self) -> bool {
        let mut state = self.stream.shared.lock();
        state.store.get(self.stream.key).is_none_or(|stream| {
            stream.recv == Half::Ended && stream.body.is_empty() && stream.trailers.is_none()
        })
    }

    /// Returns the handle of the receive window.
    pub fn flow_control(&mut self) -> &mut FlowControl {
        &mut self.flow
    }

    /// Returns the stream's number.
    pub fn stream_id(&self) -> StreamId {
        self.stream.id()
    }
}

impl Drop for RecvStream {
    fn drop(&mut self) {
        let key = self.stream.key;
        self.stream.shared.with(|state| {
            let Some(stream) = state.store.get(key) else {
                return;
            };
            stream.is_unread = true;
            stream.body.clear();
            stream.trailers = None;
            let in_flight = std::mem::take(&mut stream.in_flight);
            state.release_connection(in_flight);
        });
    }
}

/// A PING to send.
#[derive(Debug)]
pub struct Ping(());

impl Ping {
    /// Creates a PING with a payload of the engine's own.
    pub fn opaque() -> Self {
        Self(())
    }
}

/// The answer to a PING.
#[derive(Debug)]
pub struct Pong(());

/// Handle for PINGs, one at a time (RFC 9113 section 6.7).
pub struct PingPong(pub(super) Arc<Shared>);

impl fmt::Debug for PingPong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PingPong")
    }
}

impl PingPong {
    /// Sends a PING.
    ///
    /// # Errors
    /// If the last one is unanswered, or the connection has ended.
    pub fn send_ping(&mut self, _ping: Ping) -> Result<(), Error> {
        self.0.with(super::connection::State::send_ping)
    }

    /// Waits for the answer.
    pub fn poll_pong(&mut self, cx: &mut Context<'_>) -> Poll<Result<Pong, Error>> {
        let answered = self.0.lock().take_pong(cx);
        answered.map_or(Poll::Pending, |result| {
            Poll::Ready(result.map(|()| Pong(())))
        })
    }
}
