//! Write buffer that sends together all that an HTTP/2 connection writes in one poll.
//!
//! h2 flushes behind each DATA frame that is not tiny, and sends the next frame only after that flush. Each small response
//! would become a TLS record, a system call and a packet of its own. So a flush by h2 only reports that it is done. The
//! written bytes are buffered until the task that drives the connection has polled it. Then they are sent at once. The buffer
//! never waits for more bytes, and large writes are not copied.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Maximum number of buffered bytes: the plaintext of one TLS record (RFC 8446 §5.1).
const MAX_BUFFERED_BYTES: usize = 16 * 1024;
/// Size of a write, in bytes, from which it is passed on without buffering.
const PASS_THROUGH_BYTES: usize = 4 * 1024;

/// Connection whose small writes are buffered until [`Cork::uncork`]. h2 has one handle, its driver the other.
#[derive(Debug)]
pub struct Cork<S>(Arc<Mutex<Inner<S>>>);

#[derive(Debug)]
struct Inner<S> {
    io: S,
    /// Bytes that h2 has written and that are not sent yet. An idle connection allocates nothing for them.
    buffer: Vec<u8>,
    /// Whether bytes were written to the connection below and not yet flushed.
    unflushed: bool,
    /// Error of an uncork, which h2 receives at its next read or write.
    pending_error: Option<io::Error>,
    is_corked: bool,
}

impl<S> Clone for Cork<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S> Cork<S> {
    /// Wraps a connection. Nothing is buffered before [`Cork::cork`]: each call passes to the connection.
    pub fn new(io: S) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            io,
            buffer: Vec::new(),
            unflushed: false,
            pending_error: None,
            is_corked: false,
        })))
    }

    /// Buffers small writes from now on until [`Cork::uncork`], which the calling code has to ensure.
    pub fn cork(&self) {
        self.inner().is_corked = true;
    }

    /// Locks the state. Both handles belong to one task, so the lock never waits.
    fn inner(&self) -> MutexGuard<'_, Inner<S>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: AsyncWrite + Unpin> Cork<S> {
    /// Sends the buffered bytes, as far as the connection takes them. The task is woken when the connection takes more, and
    /// has to call this again after it has polled h2.
    pub fn uncork(&self, cx: &mut Context<'_>) {
        let mut inner = self.inner();
        if let Poll::Ready(Err(error)) = inner.poll_flush(cx) {
            inner.pending_error = Some(error);
            cx.waker().wake_by_ref();
        }
    }
}

impl<S> Inner<S> {
    fn take_pending_error(&mut self) -> io::Result<()> {
        self.pending_error.take().map_or(Ok(()), Err)
    }
}

impl<S: AsyncWrite + Unpin> Inner<S> {
    /// Passes on the buffered bytes, without flushing the connection below.
    fn poll_write_buffer(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut written_len = 0;
        let outcome = loop {
            let unwritten = self.buffer.get(written_len..).unwrap_or_default();
            if unwritten.is_empty() {
                break Poll::Ready(Ok(()));
            }
            self.unflushed = true;
            match Pin::new(&mut self.io).poll_write(cx, unwritten) {
                Poll::Ready(Ok(0)) => break Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(Ok(written)) => written_len += written,
                Poll::Ready(Err(error)) => break Poll::Ready(Err(error)),
                Poll::Pending => break Poll::Pending,
            }
        };
        if written_len == self.buffer.len() {
            self.buffer = Vec::new();
        } else {
            self.buffer.drain(..written_len);
        }
        outcome
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_buffer(cx))?;
        if self.unflushed {
            ready!(Pin::new(&mut self.io).poll_flush(cx))?;
            self.unflushed = false;
        }
        Poll::Ready(Ok(()))
    }

    /// Buffers the bytes, or writes as many of them as the connection accepts.
    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.take_pending_error()?;
        let length = bufs.iter().map(|buf| buf.len()).sum::<usize>();
        let is_small = self.is_corked && length < PASS_THROUGH_BYTES;
        if !is_small || self.buffer.len() + length > MAX_BUFFERED_BYTES {
            ready!(self.poll_write_buffer(cx))?;
        }
        if is_small {
            if self.buffer.capacity() == 0 {
                self.buffer.reserve_exact(MAX_BUFFERED_BYTES);
            }
            for buf in bufs {
                self.buffer.extend_from_slice(buf);
            }
            return Poll::Ready(Ok(length));
        }
        self.unflushed = true;
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Cork<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut inner = self.inner();
        inner.take_pending_error()?;
        Pin::new(&mut inner.io).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Cork<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.inner().poll_write(cx, &[IoSlice::new(buf)])
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.inner();
        inner.take_pending_error()?;
        if inner.is_corked {
            return Poll::Ready(Ok(()));
        }
        ready!(inner.poll_write_buffer(cx))?;
        inner.unflushed = false;
        Pin::new(&mut inner.io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.inner();
        inner.take_pending_error()?;
        ready!(inner.poll_flush(cx))?;
        Pin::new(&mut inner.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.inner().poll_write(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::task::noop_waker_ref;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    /// Connection that accepts a limited number of bytes and records each write.
    #[derive(Debug, Default)]
    struct Wire {
        room: usize,
        writes: Vec<Vec<u8>>,
        flushes: usize,
        broken: bool,
    }

    impl AsyncRead for Wire {
        fn poll_read(
            self: Pin<&mut Self>,
            _cx: &mut Context<'_>,
            _buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    impl AsyncWrite for Wire {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _cx: &mut Context<'_>,
            buf: &[u8],
        ) -> Poll<io::Result<usize>> {
            if self.broken {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            let taken = buf.len().min(self.room);
            if taken == 0 {
                return Poll::Pending;
            }
            self.room -= taken;
            self.writes.push(buf[..taken].to_vec());
            Poll::Ready(Ok(taken))
        }

        fn poll_flush(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.flushes += 1;
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    fn holding(room: usize) -> Cork<Wire> {
        let cork = Cork::new(Wire {
            room,
            ..Wire::default()
        });
        cork.cork();
        cork
    }

    fn cx() -> Context<'static> {
        Context::from_waker(noop_waker_ref())
    }

    fn write(cork: &mut Cork<Wire>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(cork).poll_write(&mut cx(), bytes)
    }

    fn flush(cork: &mut Cork<Wire>) {
        assert!(Pin::new(cork).poll_flush(&mut cx()).is_ready());
    }

    #[test]
    fn writes_of_one_turn_join_and_idle_connections_need_no_buffer() {
        let mut cork = holding(usize::MAX);
        for part in ["one", "two", "three"] {
            assert!(write(&mut cork, part.as_bytes()).is_ready());
            flush(&mut cork);
        }
        assert!(cork.inner().io.writes.is_empty());
        cork.uncork(&mut cx());
        cork.uncork(&mut cx());
        let inner = cork.inner();
        assert_eq!(inner.io.writes, [b"onetwothree"]);
        // One flush for all writes; a turn without writes does not flush.
        assert_eq!(inner.io.flushes, 1);
        assert_eq!(inner.buffer.capacity(), 0);
    }

    #[test]
    fn a_large_write_follows_the_buffered_bytes_unbuffered() {
        let mut cork = holding(usize::MAX);
        let large = vec![b'x'; PASS_THROUGH_BYTES];
        assert!(write(&mut cork, b"head").is_ready());
        assert!(write(&mut cork, &large).is_ready());
        assert_eq!(cork.inner().io.writes, [b"head".to_vec(), large]);
    }

    #[test]
    fn at_most_one_record_is_buffered_and_stalls_lose_no_bytes() {
        let mut cork = holding(0);
        let part: Vec<u8> = (0..=255).cycle().take(PASS_THROUGH_BYTES - 1).collect();
        let mut taken = Vec::new();
        while write(&mut cork, &part).is_ready() {
            taken.extend_from_slice(&part);
            cork.uncork(&mut cx());
        }
        assert!(taken.len() <= MAX_BUFFERED_BYTES && taken.len() + part.len() > MAX_BUFFERED_BYTES);
        // In small parts, as on a slow link.
        for room in [1, 700, MAX_BUFFERED_BYTES] {
            cork.inner().io.room = room;
            cork.uncork(&mut cx());
        }
        assert_eq!(cork.inner().io.writes.concat(), taken);
    }

    #[test]
    fn an_uncorked_connection_passes_all_writes() {
        let mut cork = Cork::new(Wire {
            room: usize::MAX,
            ..Wire::default()
        });
        assert!(write(&mut cork, b"preface").is_ready());
        flush(&mut cork);
        // The connection may do more in a flush than to send bytes.
        flush(&mut cork);
        assert_eq!(cork.inner().io.flushes, 2);
        cork.cork();
        assert!(write(&mut cork, b"goaway").is_ready());
        assert!(Pin::new(&mut cork).poll_shutdown(&mut cx()).is_ready());
        assert_eq!(
            cork.inner().io.writes,
            [b"preface".to_vec(), b"goaway".to_vec()]
        );
    }

    #[test]
    fn a_connection_error_at_a_flush_wakes_the_engine() {
        struct Woken(AtomicUsize);
        impl std::task::Wake for Woken {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Relaxed);
            }
        }
        let woken = Arc::new(Woken(AtomicUsize::new(0)));
        let waker = woken.clone().into();
        let mut cx = Context::from_waker(&waker);
        let mut cork = holding(usize::MAX);
        assert!(write(&mut cork, b"answer").is_ready());
        cork.inner().io.broken = true;
        cork.uncork(&mut cx);
        assert_eq!(woken.0.load(Relaxed), 1);
        let mut space = [0; 8];
        let read = Pin::new(&mut cork).poll_read(&mut cx, &mut ReadBuf::new(&mut space));
        let Poll::Ready(Err(error)) = read else {
            panic!("{read:?}");
        };
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
