//! Connection of a program that sends one HTTP request.

use crate::{lingering_close::MAX_DISCARDED_BYTES, socket::ResetOnClose};
use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

/// Connection that yields the bytes of one request, and discards bytes behind it, such as a further request or an empty line.
///
/// While a response is incomplete, hyper reads nothing more once it has bytes behind the request. It would not notice that the
/// program has gone. Bytes behind a chunked body reach hyper nevertheless, because the length of that body is unknown here.
pub(super) struct OneRequest<S> {
    io: S,
    /// Number of bytes of the request that may follow.
    unread: u64,
    /// Number of bytes that may still be discarded.
    discardable: u64,
}

impl<S> OneRequest<S> {
    /// Returns a connection that yields at most `length` bytes.
    pub(super) fn new(io: S, length: u64) -> Self {
        Self {
            io,
            unread: length,
            discardable: MAX_DISCARDED_BYTES,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for OneRequest<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.unread > 0 {
            let mut request = (&mut this.io).take(this.unread);
            let polled = Pin::new(&mut request).poll_read(cx, buf);
            this.unread = request.limit();
            return polled;
        }
        let mut discarded = [0; 1024];
        while this.discardable > 0 {
            let mut discarded = ReadBuf::new(&mut discarded);
            ready!(Pin::new(&mut this.io).poll_read(cx, &mut discarded))?;
            let length = discarded.filled().len() as u64;
            if length == 0 {
                return Poll::Ready(Ok(()));
            }
            this.discardable = this.discardable.saturating_sub(length);
        }
        // The program sends without end, and waits for the response like one whose bytes nobody reads.
        Poll::Pending
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for OneRequest<S> {
    crate::forward!(io: poll_write, poll_write_vectored, is_write_vectored, poll_flush, poll_shutdown);
}

impl<S: ResetOnClose> ResetOnClose for OneRequest<S> {
    fn abort(&self) {
        self.io.abort();
    }
}
