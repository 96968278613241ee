//! A connection, behind bytes that were read from it already.

use bytes::{Buf, Bytes};
use causeway_rt::socket::ResetOnClose;
use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A connection in front of which bytes are put back that were read from it too early: those behind a 101 may share its
/// segment (invariant 9).
#[derive(Debug)]
pub struct Rewind<S> {
    early: Bytes,
    connection: S,
}

impl<S> Rewind<S> {
    /// Puts `early` in front of the connection.
    pub fn new(early: Bytes, connection: S) -> Self {
        Self { early, connection }
    }
}

impl<S: ResetOnClose> ResetOnClose for Rewind<S> {
    fn abort(&self) {
        self.connection.abort();
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Rewind<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.early.is_empty() {
            return Pin::new(&mut this.connection).poll_read(cx, buf);
        }
        let part = this.early.len().min(buf.remaining());
        buf.put_slice(&this.early[..part]);
        this.early.advance(part);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Rewind<S> {
    causeway_rt::forward!(connection: poll_write, poll_write_vectored, is_write_vectored, poll_flush, poll_shutdown);
}
