//! Copies bytes in both directions between a socket and a stream.
//!
//! The relay is one future without a task or a lock. "Up" is from the socket to the stream, "down" from the stream to the
//! socket. When one side ends its sending half in order, the relay ends the other side's half in order. A reset on one side
//! becomes a reset on the other side and ends both directions. Read buffers exist only while there is data to read: an idle
//! relay has none, a busy one up to 64 KiB.

use crate::{
    error::StreamError,
    stream::{StreamReceiver, StreamSender},
};
use bytes::{Bytes, BytesMut};
use causeway_rt::socket::{ResetOnClose, ResetUnlessComplete};
use std::{
    future::poll_fn,
    io,
    pin::Pin,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::io::poll_read_buf;

const MIN_BUFFER_BYTES: usize = 2 * 1024;
const MAX_BUFFER_BYTES: usize = 64 * 1024;

/// Counters of the bytes that were copied. They can be read while the relay runs.
#[derive(Debug, Default)]
pub struct ByteCounters {
    /// Bytes from the socket into the stream.
    pub up: AtomicU64,
    /// Bytes from the stream to the socket.
    pub down: AtomicU64,
}

/// Outcome of a relay.
#[derive(Debug)]
pub enum CopyOutcome {
    /// Both directions ended in order.
    Clean,
    /// The socket's peer reset or broke its connection. The stream was reset.
    Socket(io::Error),
    /// The stream was reset or its tunnel was lost. The socket closes with a reset.
    Stream(StreamError),
}

/// Relays until both directions have ended. If the future is dropped before, both sides are reset.
///
/// With `wait_for_socket`, the target's bytes wait until the socket has sent its first byte. A kube-apiserver must receive no
/// byte behind the response to its CONNECT before it has sent its own first byte (invariant 4).
pub async fn relay<S>(
    socket: S,
    send: StreamSender,
    receive: StreamReceiver,
    counters: &ByteCounters,
    wait_for_socket: bool,
) -> CopyOutcome
where
    S: AsyncRead + AsyncWrite + ResetOnClose + Unpin,
{
    let mut up = ToStream::new(send);
    let mut down = FromStream::new(receive);
    let mut guarded = ResetUnlessComplete::new(socket);
    let outcome = poll_fn(|cx| {
        let halves = (&mut up, &mut down);
        poll_both(cx, &mut guarded.socket, halves, (counters, wait_for_socket))
    })
    .await;
    match &outcome {
        CopyOutcome::Clean => guarded.complete(),
        CopyOutcome::Socket(_) => up.send.flush_and_abort().await,
        // The last bytes before the reset are still valid.
        CopyOutcome::Stream(_) => flush_before_reset(&mut guarded.socket).await,
    }
    outcome
}

/// Flushes a socket as far as it accepts bytes at once, and lets other tasks run, which may send them.
pub async fn flush_before_reset<S: AsyncWrite + Unpin>(socket: &mut S) {
    poll_fn(|cx| Poll::Ready(Pin::new(&mut *socket).poll_flush(cx).is_ready())).await;
    tokio::task::yield_now().await;
}

fn poll_both<S>(
    cx: &mut Context<'_>,
    socket: &mut S,
    (up, down): (&mut ToStream, &mut FromStream),
    (counters, wait_for_socket): (&ByteCounters, bool),
) -> Poll<CopyOutcome>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    if !up.is_done
        && let Poll::Ready(Err(outcome)) = up.poll(cx, socket, &counters.up)
    {
        return Poll::Ready(outcome);
    }
    let is_waiting = wait_for_socket && !up.is_done && counters.up.load(Relaxed) == 0;
    if !is_waiting
        && !down.is_done
        && down.write_error.is_none()
        && let Poll::Ready(Err(outcome)) = down.poll(cx, socket, &counters.down)
    {
        match outcome {
            CopyOutcome::Socket(error) if is_peer_reset(&error) => down.write_error = Some(error),
            outcome => return Poll::Ready(outcome),
        }
    }
    // Bytes that the peer sent before it broke the connection must still be read.
    if let Some(error) = down.write_error.take() {
        let read = if up.is_done {
            Poll::Ready(Ok(()))
        } else {
            up.poll(cx, socket, &counters.up)
        };
        match read {
            Poll::Pending => down.write_error = Some(error),
            Poll::Ready(Err(outcome @ CopyOutcome::Stream(_))) => return Poll::Ready(outcome),
            Poll::Ready(_) => return Poll::Ready(CopyOutcome::Socket(error)),
        }
    }
    if up.is_done && down.is_done {
        return Poll::Ready(CopyOutcome::Clean);
    }
    // While the socket is not read, only a flush reports that the peer is gone.
    if !up.chunk.is_empty()
        && let Poll::Ready(Err(error)) = Pin::new(&mut *socket).poll_flush(cx)
    {
        return Poll::Ready(CopyOutcome::Socket(error));
    }
    // If `down` is done, waiting or blocked by the socket and `up` is idle, only this detects a reset.
    let has_unwritten = !down.chunk.is_empty();
    if !down.is_done && down.receive.poll_evicted(cx).is_ready() {
        return Poll::Ready(CopyOutcome::Stream(StreamError::Evicted));
    }
    if (has_unwritten || (!up.is_done && (is_waiting || down.is_done)))
        && let Poll::Ready(error) = up.send.poll_reset(cx)
    {
        return Poll::Ready(CopyOutcome::Stream(error));
    }
    Poll::Pending
}

/// Direction from the socket to the stream.
struct ToStream {
    send: StreamSender,
    buffer: BytesMut,
    buffer_size: usize,
    chunk: Bytes,
    is_done: bool,
}

impl ToStream {
    fn new(send: StreamSender) -> Self {
        Self {
            send,
            buffer: BytesMut::new(),
            buffer_size: MIN_BUFFER_BYTES,
            chunk: Bytes::new(),
            is_done: false,
        }
    }

    fn poll<S: AsyncRead + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut S,
        counter: &AtomicU64,
    ) -> Poll<Result<(), CopyOutcome>> {
        loop {
            if !self.chunk.is_empty() {
                ready!(self.send.poll_send_data(cx, &mut self.chunk))
                    .map_err(CopyOutcome::Stream)?;
            }
            let read = ready!(self.poll_read(cx, socket)).map_err(CopyOutcome::Socket)?;
            if read == 0 {
                self.is_done = true;
                self.buffer = BytesMut::new();
                return Poll::Ready(self.send.end().map_err(CopyOutcome::Stream));
            }
            counter.fetch_add(u64::try_from(read).unwrap_or(u64::MAX), Relaxed);
            self.chunk = self.buffer.split().freeze();
        }
    }

    fn poll_read<S: AsyncRead + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut S,
    ) -> Poll<io::Result<usize>> {
        self.buffer.reserve(self.buffer_size);
        let capacity = self.buffer.capacity();
        let polled = poll_read_buf(Pin::new(socket), cx, &mut self.buffer);
        match &polled {
            Poll::Ready(Ok(read)) if *read >= capacity => {
                self.buffer_size = (self.buffer_size * 2).min(MAX_BUFFER_BYTES);
            }
            Poll::Ready(_) => {}
            Poll::Pending => {
                self.buffer = BytesMut::new();
                self.buffer_size = MIN_BUFFER_BYTES;
            }
        }
        polled
    }
}

/// Direction from the stream to the socket.
struct FromStream {
    receive: StreamReceiver,
    chunk: Bytes,
    unflushed: bool,
    ended: bool,
    is_done: bool,
    /// Error of a write: the socket accepts no more bytes.
    write_error: Option<io::Error>,
}

/// Whether a write failed because the peer has reset the connection.
fn is_peer_reset(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}

impl FromStream {
    fn new(receive: StreamReceiver) -> Self {
        Self {
            receive,
            chunk: Bytes::new(),
            unflushed: false,
            ended: false,
            is_done: false,
            write_error: None,
        }
    }

    fn poll<S: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut S,
        counter: &AtomicU64,
    ) -> Poll<Result<(), CopyOutcome>> {
        while !self.ended {
            ready!(self.poll_write(cx, socket, counter)).map_err(CopyOutcome::Socket)?;
            match self.receive.poll_data(cx) {
                Poll::Ready(Some(Ok(chunk))) => self.chunk = chunk,
                Poll::Ready(Some(Err(error))) => {
                    return Poll::Ready(Err(CopyOutcome::Stream(error)));
                }
                Poll::Ready(None) => self.ended = true,
                Poll::Pending => {
                    ready!(self.poll_flush(cx, socket)).map_err(CopyOutcome::Socket)?;
                    return Poll::Pending;
                }
            }
        }
        // A peer that closed both ways already needs no half-close; its reset, if any, is read by `Up`.
        let shutdown_result = ready!(Pin::new(socket).poll_shutdown(cx));
        self.is_done = true;
        match shutdown_result {
            Err(error) if error.kind() != io::ErrorKind::NotConnected => {
                Poll::Ready(Err(CopyOutcome::Socket(error)))
            }
            _ => Poll::Ready(Ok(())),
        }
    }

    fn poll_write<S: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut S,
        counter: &AtomicU64,
    ) -> Poll<io::Result<()>> {
        while !self.chunk.is_empty() {
            let written = ready!(Pin::new(&mut *socket).poll_write(cx, &self.chunk))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.unflushed = true;
            counter.fetch_add(u64::try_from(written).unwrap_or(u64::MAX), Relaxed);
            self.chunk = self.chunk.split_off(written);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_flush<S: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut S,
    ) -> Poll<io::Result<()>> {
        if self.unflushed {
            ready!(Pin::new(socket).poll_flush(cx))?;
            self.unflushed = false;
        }
        Poll::Ready(Ok(()))
    }
}
