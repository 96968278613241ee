//! Transport in memory whose other end is the fuzzer, and wakers that tell whether they were woken.

use bytes::{Buf, BytesMut};
use std::{
    cell::RefCell,
    io,
    pin::Pin,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, Wake, Waker},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Waker that remembers whether it was woken.
#[derive(Default)]
pub(super) struct Flag(AtomicBool);

impl Flag {
    pub(super) fn is_set(&self) -> bool {
        self.0.load(Relaxed)
    }

    /// Returns whether the waker was woken since the last call.
    pub(super) fn take(&self) -> bool {
        self.0.swap(false, Relaxed)
    }
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Relaxed);
    }
}

#[derive(Default)]
pub(super) struct Pipe {
    /// Bytes for the engine.
    pub(super) input: BytesMut,
    pub(super) is_closed: bool,
    /// Bytes of the engine.
    pub(super) output: BytesMut,
    /// Number of bytes that the engine may write.
    pub(super) room: usize,
    wakers: Vec<Waker>,
}

impl Pipe {
    /// Wakes the engine after a change.
    pub(super) fn wake(&mut self) {
        self.wakers.drain(..).for_each(Waker::wake);
    }
}

#[derive(Clone, Default)]
pub(super) struct Transport(pub(super) Rc<RefCell<Pipe>>);

impl AsyncRead for Transport {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut pipe = self.0.borrow_mut();
        if pipe.input.is_empty() && !pipe.is_closed {
            pipe.wakers.push(cx.waker().clone());
            return Poll::Pending;
        }
        let count = pipe.input.len().min(buf.remaining());
        buf.put_slice(&pipe.input[..count]);
        pipe.input.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Transport {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut pipe = self.0.borrow_mut();
        let count = pipe.room.min(bytes.len());
        if count == 0 && !bytes.is_empty() {
            pipe.wakers.push(cx.waker().clone());
            return Poll::Pending;
        }
        pipe.room -= count;
        pipe.output.extend_from_slice(&bytes[..count]);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
