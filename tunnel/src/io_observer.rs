//! A connection that is observed below h2 or hyper.
//!
//! This is the only module that passes reads and writes on by hand for that purpose. The observer interprets the bytes.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Observer of a connection's reads and writes.
pub trait IoObserver {
    /// Called with bytes that were read. The implementation may change them before [`IoObserver::on_read`] receives them.
    fn rewrite_read(&mut self, _bytes: &mut [u8]) {}

    /// Called with the bytes that were read; an empty slice is the end.
    ///
    /// # Errors
    /// The error that the connection is to fail with.
    fn on_read(&mut self, _bytes: &[u8]) -> io::Result<()> {
        Ok(())
    }

    /// Called when a read has failed.
    fn on_read_failed(&mut self, _error: &io::Error) {}

    /// Called with the bytes that were written.
    fn on_written(&mut self, _bytes: &[u8]) {}

    /// Ends the writing half.
    fn poll_shutdown<S: AsyncRead + AsyncWrite + Unpin>(
        &mut self,
        io: &mut S,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(io).poll_shutdown(cx)
    }

    /// Called when a write has failed.
    ///
    /// # Errors
    /// The error, unless all further written bytes are to be discarded silently.
    fn on_write_failed(&mut self, error: io::Error) -> io::Result<()> {
        Err(error)
    }
}

/// A connection with its observer.
#[derive(Debug)]
pub struct ObservedIo<S, L> {
    io: S,
    observer: L,
}

impl<S, L> ObservedIo<S, L> {
    /// Reports the bytes that pass through `io` to `observer`.
    pub fn new(io: S, observer: L) -> Self {
        Self { io, observer }
    }

    /// Returns a reference to the connection.
    pub fn get_ref(&self) -> &S {
        &self.io
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
        let filled_before = buf.filled().len();
        let result = ready!(Pin::new(&mut this.io).poll_read(cx, buf));
        Poll::Ready(match result {
            Ok(()) => {
                let bytes = buf
                    .filled_mut()
                    .get_mut(filled_before..)
                    .unwrap_or_default();
                this.observer.rewrite_read(bytes);
                this.observer.on_read(bytes)
            }
            Err(error) => {
                this.observer.on_read_failed(&error);
                Err(error)
            }
        })
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin, L: IoObserver + Unpin> AsyncWrite for ObservedIo<S, L> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        Poll::Ready(match ready!(Pin::new(&mut this.io).poll_write(cx, buf)) {
            Ok(written) => {
                this.observer
                    .on_written(buf.get(..written).unwrap_or_default());
                Ok(written)
            }
            Err(error) => this.observer.on_write_failed(error).map(|()| buf.len()),
        })
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = ready!(Pin::new(&mut this.io).poll_flush(cx));
        Poll::Ready(flushed.or_else(|error| this.observer.on_write_failed(error)))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.observer.poll_shutdown(&mut this.io, cx)
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
                this.observer.on_write_failed(error)?;
                return Poll::Ready(Ok(bufs.iter().map(|buf| buf.len()).sum()));
            }
        };
        let mut left = written;
        for buf in bufs {
            let part = buf.len().min(left);
            this.observer
                .on_written(buf.get(..part).unwrap_or_default());
            left -= part;
        }
        Poll::Ready(Ok(written))
    }

    causeway_rt::forward!(io: is_write_vectored);
}
