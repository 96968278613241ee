//! Byte stream of which only so much is read, for the start of a connection.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Maximum number of bytes of a connection up to the end of its `ClientHello`. A session ticket in it may contain a certificate chain.
/// rustls alone would buffer up to 64 KiB.
pub const MAX_CLIENT_HELLO: usize = 16 << 10;

/// Stream whose reads fail once the limit is exceeded.
#[derive(Debug)]
pub struct ReadLimit<S> {
    stream: S,
    remaining: usize,
}

impl<S> ReadLimit<S> {
    /// Limits the bytes that are read from a stream.
    pub fn new(stream: S, limit: usize) -> Self {
        Self {
            stream,
            remaining: limit,
        }
    }

    /// Returns the stream without a limit.
    pub fn into_inner(self) -> S {
        self.stream
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ReadLimit<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let read = buffer.filled().len() - before;
        let Some(remaining) = self.remaining.checked_sub(read) else {
            let error = "the start of the connection is too long";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, error)));
        };
        self.remaining = remaining;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ReadLimit<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;

    #[tokio::test]
    async fn reads_fail_above_the_limit_and_continue_without_it() {
        let sent: &[u8] = b"abcdef";
        let mut limited = ReadLimit::new(sent, 4);
        let mut read = [0; 4];
        limited.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"abcd");
        let mut rest = limited.into_inner();
        assert_eq!(rest.read_u8().await.unwrap(), b'e');
        let error = ReadLimit::new(sent, 5).read(&mut [0; 8]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
