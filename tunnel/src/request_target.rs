//! Request targets that are longer than `http::Uri` can hold.
//!
//! A `Uri` ends at 65,534 bytes; the command line of a `kubectl exec` may need a megabyte. hyper and h2 receive the target's
//! first [`MAX_URI_BYTES`] bytes, path included. The rest of the query is a [`TargetOverflow`] beside the request. On a
//! tunnel the rest is sent as the first bytes of the stream, and [`crate::wire::TARGET_REST`] states their number.
//! [`TargetWriter`] puts the rest back into the request line of HTTP/1.1, below hyper.

use bytes::{Buf, Bytes};
use std::{
    io,
    pin::Pin,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite};

/// Maximum size of a target that hyper and h2 accept, in bytes: the limit of `http::Uri`.
pub const MAX_URI_BYTES: usize = 65_534;
/// Maximum size of the rest of a target, in bytes: the longest command line that Linux accepts is 6 MiB (`execve(2)`).
pub const MAX_OVERFLOW_BYTES: usize = 8 << 20;
/// Maximum size of all rests in this process, in bytes.
const MAX_PROCESS_OVERFLOW_BYTES: usize = 64 << 20;

static PROCESS_OVERFLOW_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Rest of a request's query, behind the bytes that hyper or h2 holds. An extension of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetOverflow(pub Bytes);

/// Collects a [`TargetOverflow`] within a budget of the process.
#[derive(Debug, Default)]
pub struct OverflowBuffer(Vec<u8>);

impl OverflowBuffer {
    /// Appends `bytes`. Returns whether the budget had room for them.
    pub fn append(&mut self, bytes: &[u8]) -> bool {
        let before = PROCESS_OVERFLOW_BYTES.fetch_add(bytes.len(), Relaxed);
        if before + bytes.len() > MAX_PROCESS_OVERFLOW_BYTES {
            PROCESS_OVERFLOW_BYTES.fetch_sub(bytes.len(), Relaxed);
            return false;
        }
        self.0.extend_from_slice(bytes);
        true
    }

    /// Returns the number of appended bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nothing was appended.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the collected bytes. They count against the budget until their last clone is dropped.
    pub fn finish(self) -> TargetOverflow {
        TargetOverflow(Bytes::from_owner(self))
    }
}

impl AsRef<[u8]> for OverflowBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for OverflowBuffer {
    fn drop(&mut self) {
        PROCESS_OVERFLOW_BYTES.fetch_sub(self.0.len(), Relaxed);
    }
}

/// A connection that inserts a [`TargetOverflow`] behind the target of the first request that is written to it.
#[derive(Debug)]
pub struct TargetWriter<S> {
    io: S,
    overflow: Bytes,
    /// Number of spaces of the request line that were written.
    spaces_written: u8,
}

impl<S> TargetWriter<S> {
    /// Wraps a connection, and inserts `overflow` if there is one.
    pub fn new(io: S, overflow: Option<TargetOverflow>) -> Self {
        let overflow = overflow
            .map(|TargetOverflow(rest)| rest)
            .unwrap_or_default();
        Self {
            io,
            overflow,
            spaces_written: 0,
        }
    }

    /// Returns the connection.
    pub fn into_inner(self) -> S {
        self.io
    }

    /// Returns the number of `bytes` in front of the space behind the target, and the number of spaces that are then written.
    fn split_at_target_end(&self, bytes: &[u8]) -> (usize, u8) {
        let mut spaces = self.spaces_written;
        for (at, byte) in bytes.iter().enumerate() {
            if *byte == b' ' {
                if spaces == 1 {
                    return (at, spaces);
                }
                spaces += 1;
            }
        }
        (bytes.len(), spaces)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TargetWriter<S> {
    causeway_rt::forward!(io: poll_read);
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TargetWriter<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        while !this.overflow.is_empty() {
            let (before, _) = this.split_at_target_end(buf);
            if before > 0 {
                let part = buf.get(..before).unwrap_or_default();
                let written = ready!(Pin::new(&mut this.io).poll_write(cx, part))?;
                this.spaces_written = this
                    .split_at_target_end(part.get(..written).unwrap_or_default())
                    .1;
                return Poll::Ready(Ok(written));
            }
            let written = ready!(Pin::new(&mut this.io).poll_write(cx, &this.overflow))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            this.overflow.advance(written);
        }
        Pin::new(&mut this.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.overflow.is_empty() {
            return Pin::new(&mut self.get_mut().io).poll_write_vectored(cx, bufs);
        }
        let first = bufs.iter().find(|buf| !buf.is_empty());
        self.poll_write(cx, first.map_or(&[][..], |buf| buf))
    }

    causeway_rt::forward!(io: poll_flush, poll_shutdown, is_write_vectored);
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    #[tokio::test]
    async fn the_rest_stands_behind_the_target_however_the_head_is_cut() {
        let head = b"GET /a?b HTTP/1.1\r\nHost: a b c\r\n\r\n";
        for cut in 1..=head.len() {
            let rest = TargetOverflow(Bytes::from_static(b"=c&d"));
            let mut io = TargetWriter::new(Vec::new(), Some(rest));
            for part in head.chunks(cut) {
                io.write_all(part).await.unwrap();
            }
            let written = String::from_utf8(io.into_inner()).unwrap();
            assert_eq!(
                written, "GET /a?b=c&d HTTP/1.1\r\nHost: a b c\r\n\r\n",
                "{cut}"
            );
        }
    }
}
