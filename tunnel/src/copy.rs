//! Bytes both ways between a socket and a stream.
//!
//! One future, no task and no lock: up is socket to stream, down is stream to socket. A half that ends in
//! order ends the other side's half in order; a reset on either side becomes a reset on the other and
//! ends both directions. Read buffers live only while there is something to read: an idle relay holds
//! none, a busy one up to 64 KiB.

use crate::{
    error::StreamError,
    stream::{StreamReceiver, StreamSender},
};
use bytes::{Bytes, BytesMut};
use causeway_rt::socket::ResetOnClose;
use std::{
    future::{Future, poll_fn},
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::io::poll_read_buf;

const SMALLEST: usize = 2 * 1024;
const LARGEST: usize = 64 * 1024;

/// Counters of the bytes that passed, which can be read while the relay runs.
#[derive(Debug, Default)]
pub struct ByteCounters {
    /// From the socket into the stream.
    pub up: AtomicU64,
    /// From the stream to the socket.
    pub down: AtomicU64,
}

/// How a relay ended.
#[derive(Debug)]
pub enum CopyOutcome {
    /// Both directions ended in order.
    Clean,
    /// The socket's peer reset or broke its connection; the stream was reset.
    Near(io::Error),
    /// The stream was reset or its tunnel lost; the socket closes with a reset.
    Far(StreamError),
}

/// A socket that closes with a reset unless its relay came to its end in order: one that is given up must not look whole.
struct Relayed<S: ResetOnClose> {
    socket: S,
    is_whole: bool,
}

impl<S: ResetOnClose> Drop for Relayed<S> {
    fn drop(&mut self) {
        if !self.is_whole {
            self.socket.abort();
        }
    }
}

/// Relays until both directions have ended. Dropped before, it resets both.
///
/// With `hold`, the target's bytes wait until the socket has sent its first: kube-apiserver wants no byte
/// behind the answer to its CONNECT before it has spoken (invariant 4).
pub async fn relay<S>(
    socket: S,
    send: StreamSender,
    receive: StreamReceiver,
    passed: Arc<ByteCounters>,
    hold: bool,
) -> CopyOutcome
where
    S: AsyncRead + AsyncWrite + ResetOnClose + Unpin,
{
    let mut up = ToStream::new(send);
    let mut down = FromStream::new(receive);
    let mut near = Relayed {
        socket,
        is_whole: false,
    };
    let outcome = poll_fn(|cx| {
        let halves = (&mut up, &mut down);
        poll_both(cx, &mut near.socket, halves, (&passed, hold))
    })
    .await;
    match &outcome {
        CopyOutcome::Clean => near.is_whole = true,
        CopyOutcome::Near(_) => up.send.break_off().await,
        CopyOutcome::Far(_) => {}
    }
    outcome
}

fn poll_both<S>(
    cx: &mut Context<'_>,
    socket: &mut S,
    (up, down): (&mut ToStream, &mut FromStream),
    (passed, hold): (&ByteCounters, bool),
) -> Poll<CopyOutcome>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    if !up.done
        && let Poll::Ready(Err(outcome)) = up.poll(cx, socket, &passed.up)
    {
        return Poll::Ready(outcome);
    }
    let waits = hold && !up.done && passed.up.load(Relaxed) == 0;
    if !waits
        && !down.done
        && down.broken.is_none()
        && let Poll::Ready(Err(outcome)) = down.poll(cx, socket, &passed.down)
    {
        match outcome {
            CopyOutcome::Near(error) if is_of_peer(&error) => down.broken = Some(error),
            outcome => return Poll::Ready(outcome),
        }
    }
    // Bytes that the peer sent before it broke the connection must still be read.
    if let Some(error) = down.broken.take() {
        let read = if up.done {
            Poll::Ready(Ok(()))
        } else {
            up.poll(cx, socket, &passed.up)
        };
        match read {
            Poll::Pending => down.broken = Some(error),
            Poll::Ready(Err(outcome @ CopyOutcome::Far(_))) => return Poll::Ready(outcome),
            Poll::Ready(_) => return Poll::Ready(CopyOutcome::Near(error)),
        }
    }
    if up.done && down.done {
        return Poll::Ready(CopyOutcome::Clean);
    }
    // While the socket is not read, only a flush reports that the peer is gone.
    if !up.chunk.is_empty()
        && let Poll::Ready(Err(error)) = Pin::new(&mut *socket).poll_flush(cx)
    {
        return Poll::Ready(CopyOutcome::Near(error));
    }
    // If `down` is done, waiting or blocked by the socket and `up` is idle, only this detects a reset.
    let stuck = !down.chunk.is_empty();
    if !down.done && down.receive.poll_evicted(cx).is_ready() {
        return Poll::Ready(CopyOutcome::Far(StreamError::Evicted));
    }
    if (stuck || (!up.done && (waits || down.done)))
        && let Poll::Ready(error) = up.send.poll_reset(cx)
    {
        return Poll::Ready(CopyOutcome::Far(error));
    }
    Poll::Pending
}

/// Socket to stream.
struct ToStream {
    send: StreamSender,
    buffer: BytesMut,
    size: usize,
    chunk: Bytes,
    done: bool,
}

impl ToStream {
    fn new(send: StreamSender) -> Self {
        Self {
            send,
            buffer: BytesMut::new(),
            size: SMALLEST,
            chunk: Bytes::new(),
            done: false,
        }
    }

    fn poll<S: AsyncRead + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut S,
        passed: &AtomicU64,
    ) -> Poll<Result<(), CopyOutcome>> {
        loop {
            if !self.chunk.is_empty() {
                ready!(self.send.poll_data(cx, &mut self.chunk)).map_err(CopyOutcome::Far)?;
            }
            let read = ready!(self.poll_read(cx, socket)).map_err(CopyOutcome::Near)?;
            if read == 0 {
                self.done = true;
                self.buffer = BytesMut::new();
                return Poll::Ready(self.send.end().map_err(CopyOutcome::Far));
            }
            passed.fetch_add(u64::try_from(read).unwrap_or(u64::MAX), Relaxed);
            self.chunk = self.buffer.split().freeze();
        }
    }

    fn poll_read<S: AsyncRead + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut S,
    ) -> Poll<io::Result<usize>> {
        self.buffer.reserve(self.size);
        let room = self.buffer.capacity();
        let polled = poll_read_buf(Pin::new(socket), cx, &mut self.buffer);
        match &polled {
            Poll::Ready(Ok(read)) if *read >= room => self.size = (self.size * 2).min(LARGEST),
            Poll::Ready(_) => {}
            Poll::Pending => {
                self.buffer = BytesMut::new();
                self.size = SMALLEST;
            }
        }
        polled
    }
}

/// Stream to socket.
struct FromStream {
    receive: StreamReceiver,
    chunk: Bytes,
    unflushed: bool,
    ended: bool,
    done: bool,
    /// The socket takes nothing any more.
    broken: Option<io::Error>,
}

/// Whether a write failed because the peer has reset the connection.
fn is_of_peer(error: &io::Error) -> bool {
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
            done: false,
            broken: None,
        }
    }

    fn poll<S: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut S,
        passed: &AtomicU64,
    ) -> Poll<Result<(), CopyOutcome>> {
        while !self.ended {
            ready!(self.poll_write(cx, socket, passed)).map_err(CopyOutcome::Near)?;
            match self.receive.poll_data(cx) {
                Poll::Ready(Some(Ok(chunk))) => self.chunk = chunk,
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(CopyOutcome::Far(error))),
                Poll::Ready(None) => self.ended = true,
                Poll::Pending => {
                    ready!(self.poll_flush(cx, socket)).map_err(CopyOutcome::Near)?;
                    return Poll::Pending;
                }
            }
        }
        // A peer that closed both ways already needs no half-close; its reset, if any, is read by `Up`.
        let shut = ready!(Pin::new(socket).poll_shutdown(cx));
        self.done = true;
        match shut {
            Err(error) if error.kind() != io::ErrorKind::NotConnected => {
                Poll::Ready(Err(CopyOutcome::Near(error)))
            }
            _ => Poll::Ready(Ok(())),
        }
    }

    fn poll_write<S: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut S,
        passed: &AtomicU64,
    ) -> Poll<io::Result<()>> {
        while !self.chunk.is_empty() {
            let written = ready!(Pin::new(&mut *socket).poll_write(cx, &self.chunk))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.unflushed = true;
            passed.fetch_add(u64::try_from(written).unwrap_or(u64::MAX), Relaxed);
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

/// Waits for `future`, unless the other end resets the stream first.
///
/// # Errors
/// The reset.
pub async fn unless_reset<F: Future>(
    send: &mut StreamSender,
    future: F,
) -> Result<F::Output, StreamError> {
    tokio::select! {
        output = future => Ok(output),
        error = send.reset() => Err(error),
    }
}
