//! A stream as a connection: [`AsyncRead`] and [`AsyncWrite`] over its two halves.
//!
//! It is for code that speaks a protocol of its own through a tunnel, such as TLS with an upstream. The window for a chunk is
//! released to the other end once the whole chunk was read, and never before. A write sends as many bytes as the window
//! allows. A shutdown ends the sending half in order. Dropping the stream before its end resets it. A reset or a loss is an
//! error with the [`StreamError`] inside, and never an end of file.

use crate::{
    error::StreamError,
    stream::{StreamReceiver, StreamSender},
};
use bytes::{Buf, Bytes, BytesMut};
use causeway_rt::socket::ResetOnClose;
use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Maximum number of bytes that are joined into one frame: a TLS record.
const MAX_JOINED_BYTES: usize = 17 * 1024;

/// Both halves of a stream.
#[derive(Debug)]
pub struct StreamIo {
    send: StreamSender,
    receive: StreamReceiver,
    /// Bytes that were received and not read yet.
    unread: Bytes,
}

impl StreamIo {
    /// Combines the halves of an opened stream.
    pub fn new(send: StreamSender, receive: StreamReceiver) -> Self {
        Self {
            send,
            receive,
            unread: Bytes::new(),
        }
    }
}

fn to_io_error(error: StreamError) -> io::Error {
    let kind = if error.is_reset() {
        io::ErrorKind::ConnectionReset
    } else {
        io::ErrorKind::ConnectionAborted
    };
    io::Error::new(kind, error)
}

impl ResetOnClose for StreamIo {
    fn abort(&self) {
        // A stream that is dropped before its end is reset, and this one is about to be.
    }
}

impl AsyncRead for StreamIo {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.unread.is_empty() {
            match ready!(this.receive.poll_data(cx)) {
                None => return Poll::Ready(Ok(())),
                Some(chunk) => this.unread = chunk.map_err(to_io_error)?,
            }
        }
        let part = this.unread.len().min(buf.remaining());
        buf.put_slice(&this.unread[..part]);
        this.unread.advance(part);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for StreamIo {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.get_mut()
            .send
            .poll_send_some(cx, buf)
            .map_err(to_io_error)
    }

    /// Sends all ready buffers in one frame: each frame costs the other end as much as a large one (invariant 1).
    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let mut parts = bufs.iter().filter(|part| !part.is_empty());
        let first = parts.next().map_or(&[][..], |part| part);
        let mut joined = BytesMut::new();
        for part in parts {
            if joined.is_empty() {
                joined.extend_from_slice(first);
            }
            let room = MAX_JOINED_BYTES.saturating_sub(joined.len());
            joined.extend_from_slice(&part[..room.min(part.len())]);
        }
        let bytes = if joined.is_empty() { first } else { &joined };
        this.send.poll_send_some(cx, bytes).map_err(to_io_error)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The tunnel's task writes queued frames.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.get_mut().send.end().map_err(to_io_error))
    }
}
