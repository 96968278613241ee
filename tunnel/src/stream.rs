//! The two halves of a stream on a tunnel: the sending half and the receiving half.
//!
//! A half that is dropped before its end *resets* the stream. So an abort is never mistaken for a clean end (invariant 3).
//! The window for a chunk is released to the peer when the next chunk is requested, and never before. At that time the far
//! socket has taken the chunk.

use crate::{
    buffered::{BufferedStream, SenderEntry},
    engine::{self, Reason},
    error::StreamError,
    headers,
    load::ByteCounter,
    stall_monitor::Progress,
    wire,
};
use bytes::Bytes;
use http::HeaderMap;
use std::{
    future::poll_fn,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
};

/// Purpose of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamKind {
    /// A plain request.
    Request,
    /// Upgrade to this protocol: extended CONNECT (RFC 8441) in the tunnel.
    Upgrade(String),
    /// A TCP session: CONNECT.
    Tcp,
}

/// Sending half of a stream.
#[derive(Debug)]
pub struct StreamSender {
    inner: engine::SendStream<Bytes>,
    counter: ByteCounter,
    ended: bool,
    /// Set when the sender has to wait for the first time.
    sender_entry: Option<SenderEntry>,
}

impl StreamSender {
    pub(crate) fn new(inner: engine::SendStream<Bytes>, counter: ByteCounter, ended: bool) -> Self {
        Self {
            inner,
            counter,
            ended,
            sender_entry: None,
        }
    }

    /// Sends a chunk, waiting for the peer's window as often as needed.
    ///
    /// # Errors
    /// If the peer reset the stream or the tunnel is gone.
    pub async fn send_data(&mut self, mut chunk: Bytes) -> Result<(), StreamError> {
        poll_fn(|cx| self.poll_send_data(cx, &mut chunk)).await
    }

    /// Sends as much of `chunk` as the window takes; ready when it is empty.
    ///
    /// # Errors
    /// As [`StreamSender::send_data`].
    pub fn poll_send_data(
        &mut self,
        cx: &mut Context<'_>,
        chunk: &mut Bytes,
    ) -> Poll<Result<(), StreamError>> {
        while !chunk.is_empty() {
            let capacity = ready!(self.poll_send_capacity(cx, chunk.len()))?;
            let part = chunk.split_to(capacity.min(chunk.len()));
            self.counter.record_sent(part.len());
            self.inner.send_data(part, false)?;
        }
        Poll::Ready(Ok(()))
    }

    /// Sends as many of `bytes` as the window takes, and returns their number. Ready once some bytes are sent, or if there
    /// are none to send.
    ///
    /// # Errors
    /// As [`StreamSender::send_data`].
    pub fn poll_send_some(
        &mut self,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize, StreamError>> {
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let capacity = ready!(self.poll_send_capacity(cx, bytes.len()))?;
        let part = &bytes[..capacity.min(bytes.len())];
        self.counter.record_sent(part.len());
        self.inner.send_data(Bytes::copy_from_slice(part), false)?;
        Poll::Ready(Ok(part.len()))
    }

    fn poll_send_capacity(
        &mut self,
        cx: &mut Context<'_>,
        requested: usize,
    ) -> Poll<Result<usize, StreamError>> {
        self.inner.reserve_capacity(requested);
        loop {
            let capacity = self.inner.capacity();
            if capacity > 0 {
                if let Some(sender_entry) = &self.sender_entry {
                    sender_entry.progress().set_blocked(false);
                    sender_entry.progress().record_chunk();
                }
                return Poll::Ready(Ok(capacity));
            }
            let polled = self.inner.poll_capacity(cx);
            if polled.is_pending() {
                let sender_entry = self
                    .sender_entry
                    .get_or_insert_with(|| self.counter.register_sender());
                sender_entry.mark_blocked();
                if sender_entry.progress().poll_evicted(cx).is_ready() {
                    // The code informs the peer that it was too slow.
                    self.ended = true;
                    self.inner.send_reset(Reason::ENHANCE_YOUR_CALM);
                    return Poll::Ready(Err(StreamError::Evicted));
                }
            }
            match ready!(polled) {
                Some(Ok(_)) => {}
                Some(Err(error)) => return Poll::Ready(Err(error.into())),
                None => return Poll::Ready(Err(StreamError::cancelled())),
            }
        }
    }

    /// Ends this half in order (`END_STREAM`).
    ///
    /// # Errors
    /// If the stream is reset already.
    pub fn end(&mut self) -> Result<(), StreamError> {
        if !self.ended {
            self.ended = true;
            self.inner.send_data(Bytes::new(), true)?;
        }
        Ok(())
    }

    /// Sends the last chunk and ends this half, in one frame if the window allows.
    ///
    /// # Errors
    /// As [`StreamSender::send_data`].
    pub async fn send_last(&mut self, chunk: Bytes) -> Result<(), StreamError> {
        let mut chunk = chunk;
        poll_fn(|cx| {
            while !chunk.is_empty() {
                let capacity = ready!(self.poll_send_capacity(cx, chunk.len()))?;
                if capacity >= chunk.len() {
                    break;
                }
                let part = chunk.split_to(capacity);
                self.counter.record_sent(part.len());
                self.inner.send_data(part, false)?;
            }
            Poll::Ready(Ok::<_, StreamError>(()))
        })
        .await?;
        self.counter.record_sent(chunk.len());
        self.ended = true;
        Ok(self.inner.send_data(chunk, true)?)
    }

    /// Ends this half with trailers. Only the trailers that [`headers::clean_trailers`] keeps are sent.
    ///
    /// # Errors
    /// If the stream is reset already, or the trailers are too large. The latter resets the stream.
    pub fn send_trailers(&mut self, mut trailers: HeaderMap) -> Result<(), StreamError> {
        headers::clean_trailers(&mut trailers);
        if trailers.is_empty() {
            return self.end();
        }
        if headers::header_list_size(&trailers) > wire::MAX_HEAD {
            self.abort();
            return Err(StreamError::TooLarge);
        }
        self.ended = true;
        Ok(self.inner.send_trailers(trailers)?)
    }

    /// Aborts the whole stream, both directions (`RST_STREAM` with CANCEL, unless it was withdrawn).
    pub fn abort(&mut self) {
        self.ended = true;
        self.inner.send_reset(self.counter.reset_code());
    }

    /// Aborts the stream like [`StreamSender::abort`], after its source has failed. The source's last bytes are still valid,
    /// and are sent first if the tunnel takes them at once.
    pub async fn flush_and_abort(&mut self) {
        // A reset discards queued frames including the head, so the connection's driver runs once before.
        tokio::task::yield_now().await;
        self.abort();
    }

    /// Waits until the other end resets the stream, or the tunnel is lost.
    pub async fn wait_for_reset(&mut self) -> StreamError {
        poll_fn(|cx| self.poll_reset(cx)).await
    }

    /// Polls for a reset by the other end, see [`StreamSender::wait_for_reset`].
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<StreamError> {
        match ready!(self.inner.poll_reset(cx)) {
            Ok(reason) => Poll::Ready(engine::Error::from(reason).into()),
            Err(error) => Poll::Ready(error.into()),
        }
    }
}

impl Drop for StreamSender {
    fn drop(&mut self) {
        if !self.ended {
            self.inner.send_reset(self.counter.reset_code());
        }
    }
}

/// Receiving half of a stream.
#[derive(Debug)]
pub struct StreamReceiver {
    buffered: Option<BufferedStream>,
    inner: engine::RecvStream,
    counter: ByteCounter,
    /// Number of bytes that were handed out and whose window has not been released.
    unreleased: usize,
    /// Bytes that were put back.
    put_back: Bytes,
    ended: bool,
}

impl StreamReceiver {
    /// Creates the receiver of a stream. `buffered` is its entry among those that can hold unread bytes.
    pub(crate) fn new(
        inner: engine::RecvStream,
        counter: ByteCounter,
        buffered: Option<BufferedStream>,
    ) -> Self {
        Self {
            buffered,
            inner,
            counter,
            unreleased: 0,
            put_back: Bytes::new(),
            ended: false,
        }
    }

    /// Puts the end of the last chunk back, which is then the next chunk.
    pub fn put_back(&mut self, rest: Bytes) {
        self.unreleased = self.unreleased.saturating_sub(rest.len());
        self.put_back = rest;
    }

    /// Returns the next chunk, or `None` after the last.
    ///
    /// # Errors
    /// If the peer reset the stream or the tunnel is gone.
    pub async fn next_chunk(&mut self) -> Option<Result<Bytes, StreamError>> {
        poll_fn(|cx| self.poll_data(cx)).await
    }

    /// Polls for the next chunk, see [`StreamReceiver::next_chunk`].
    pub fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, StreamError>>> {
        if self.unreleased > 0 {
            let unreleased = std::mem::take(&mut self.unreleased);
            // The poll below returns the error of a reset stream.
            let _ = self.inner.flow_control().release_capacity(unreleased);
        }
        if !self.put_back.is_empty() {
            let chunk = std::mem::take(&mut self.put_back);
            self.unreleased = chunk.len();
            return Poll::Ready(Some(Ok(chunk)));
        }
        if self.ended {
            return Poll::Ready(None);
        }
        if (self.buffered.as_ref()).is_some_and(|holds| holds.progress().is_evicted()) {
            self.ended = true;
            return Poll::Ready(Some(Err(StreamError::Evicted)));
        }
        match ready!(self.poll_chunk(cx)) {
            Some(Ok(chunk)) => {
                if let Some(buffered) = &self.buffered {
                    buffered.progress().record_chunk();
                }
                self.unreleased = chunk.len();
                self.counter.record_received(chunk.len());
                Poll::Ready(Some(Ok(chunk)))
            }
            Some(Err(error)) => {
                self.ended = true;
                Poll::Ready(Some(Err(error.into())))
            }
            None => {
                self.ended = true;
                Poll::Ready(None)
            }
        }
    }

    /// Polls the next chunk. The engine returns a separate `END_STREAM` as an empty chunk, which is skipped.
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, engine::Error>>> {
        loop {
            match ready!(self.inner.poll_data(cx)) {
                Some(Ok(chunk)) if chunk.is_empty() => {}
                polled => return Poll::Ready(polled),
            }
        }
    }

    /// Returns the trailers, after the last chunk. They are cleaned: the other end cannot state private fields in them.
    ///
    /// # Errors
    /// As [`StreamReceiver::next_chunk`].
    pub fn poll_trailers(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<HeaderMap>, StreamError>> {
        let trailers = ready!(self.inner.poll_trailers(cx))?.map(|mut trailers| {
            headers::clean_trailers(&mut trailers);
            trailers
        });
        Poll::Ready(Ok(trailers.filter(|trailers| !trailers.is_empty())))
    }

    /// Returns a handle by which the holder of this half detects an eviction of the stream, or `None` if the stream began
    /// without a body.
    pub fn eviction_handle(&self) -> Option<Eviction> {
        let buffered = self.buffered.as_ref();
        buffered.map(|holds| Eviction::new(holds.progress()))
    }

    /// Ready once the stream is evicted, see [`crate::eviction`].
    pub(crate) fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        BufferedStream::poll_evicted(self.buffered.as_ref(), cx)
    }

    /// Whether nothing more will arrive, not even trailers.
    pub fn is_end(&self) -> bool {
        self.put_back.is_empty() && self.inner.is_end_stream()
    }
}

/// Handle by which the task that holds a stream detects an eviction of the stream. The task has to drop the stream then.
#[derive(Clone, Debug)]
pub struct Eviction {
    progress: Arc<Progress>,
    /// The ended sending half, which reports a reset by the other end.
    sender: Arc<Mutex<Option<StreamSender>>>,
}

impl Eviction {
    pub(crate) fn new(progress: &Arc<Progress>) -> Self {
        Self {
            progress: progress.clone(),
            sender: Arc::default(),
        }
    }

    /// Attaches the sending half, which has ended. By it the handle also detects evictions by the other end, which a reader
    /// that consumes nothing does not receive.
    pub fn attach_sender(&self, sender: StreamSender) {
        *self.sender() = Some(sender);
    }

    /// Drops the half that was given to [`Eviction::attach_sender`], because the holder has finished with the stream.
    pub fn release(&self) {
        let sender = self.sender().take();
        drop(sender);
    }

    /// Ready once the stream is evicted, by this end or the other one. One task at a time is woken.
    pub fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.progress.poll_evicted(cx).is_ready() {
            return Poll::Ready(());
        }
        if !self.progress.is_stalled() {
            return Poll::Pending;
        }
        let mut sender = self.sender();
        match sender.as_mut().map(|send| send.poll_reset(cx)) {
            Some(Poll::Ready(error)) if error.is_eviction() => {
                self.progress.set_evicted();
                Poll::Ready(())
            }
            // Data from before another end is still valid; the reader receives the end after it.
            Some(Poll::Ready(_)) => {
                *sender = None;
                Poll::Pending
            }
            Some(Poll::Pending) | None => Poll::Pending,
        }
    }

    /// Waits until the stream is evicted.
    pub async fn wait_for_eviction(&self) {
        poll_fn(|cx| self.poll_evicted(cx)).await;
    }

    /// Whether the stream is evicted.
    pub fn is_evicted(&self) -> bool {
        self.progress.is_evicted()
    }

    /// Evicts the stream, for another reason than memory.
    pub fn evict(&self) {
        self.progress.evict();
    }

    /// Makes the stream subject to [`crate::eviction::Bounds::response_timeout`].
    pub fn mark_response(&self) {
        self.progress.mark_response();
    }

    fn sender(&self) -> MutexGuard<'_, Option<StreamSender>> {
        self.sender.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
