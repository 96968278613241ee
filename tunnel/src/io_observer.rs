//! A connection that is listened to below an engine.
//!
//! The one place where reading and writing are passed on by hand for it: who listens says what the bytes mean.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Who listens to a connection.
pub trait IoObserver {
    /// Asked before each read. Pending puts the read off; whoever says so sees to it that it is tried again.
    fn poll_turn(&mut self, _cx: &mut Context<'_>) -> Poll<()> {
        Poll::Ready(())
    }

    /// These bytes were read, and may be changed before [`IoObserver::read`] gets them.
    fn adjust(&mut self, _bytes: &mut [u8]) {}

    /// These bytes were read; none is the end.
    ///
    /// # Errors
    /// What the connection is to fail with.
    fn read(&mut self, _bytes: &[u8]) -> io::Result<()> {
        Ok(())
    }

    /// A read has failed.
    fn failed(&mut self, _error: &io::Error) {}

    /// These bytes were written.
    fn written(&mut self, _bytes: &[u8]) {}

    /// A write has failed.
    ///
    /// # Errors
    /// The error, unless what is written from now on is to be thrown away in silence.
    fn write_failed(&mut self, error: io::Error) -> io::Result<()> {
        Err(error)
    }
}

/// A connection, and who listens to it.
#[derive(Debug)]
pub struct ObservedIo<S, L> {
    io: S,
    listener: L,
}

impl<S, L> ObservedIo<S, L> {
    /// Lets `listener` hear what passes through `io`.
    pub fn new(io: S, listener: L) -> Self {
        Self { io, listener }
    }

    /// Returns the connection.
    pub fn into_inner(self) -> S {
        self.io
    }
}

impl<S: AsyncRead + Unpin, L: IoObserver + Unpin> AsyncRead for ObservedIo<S, L> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.listener.poll_turn(cx));
        let before = buf.filled().len();
        let read = ready!(Pin::new(&mut this.io).poll_read(cx, buf));
        Poll::Ready(match read {
            Ok(()) => {
                let bytes = buf.filled_mut().get_mut(before..).unwrap_or_default();
                this.listener.adjust(bytes);
                this.listener.read(bytes)
            }
            Err(error) => {
                this.listener.failed(&error);
                Err(error)
            }
        })
    }
}

impl<S: AsyncWrite + Unpin, L: IoObserver + Unpin> AsyncWrite for ObservedIo<S, L> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        Poll::Ready(match ready!(Pin::new(&mut this.io).poll_write(cx, buf)) {
            Ok(written) => {
                this.listener
                    .written(buf.get(..written).unwrap_or_default());
                Ok(written)
            }
            Err(error) => this.listener.write_failed(error).map(|()| buf.len()),
        })
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = ready!(Pin::new(&mut this.io).poll_flush(cx));
        Poll::Ready(flushed.or_else(|error| this.listener.write_failed(error)))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = match ready!(Pin::new(&mut this.io).poll_write_vectored(cx, bufs)) {
            Ok(written) => written,
            Err(error) => {
                this.listener.write_failed(error)?;
                return Poll::Ready(Ok(bufs.iter().map(|buf| buf.len()).sum()));
            }
        };
        let mut left = written;
        for buf in bufs {
            let part = buf.len().min(left);
            this.listener.written(buf.get(..part).unwrap_or_default());
            left -= part;
        }
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}
