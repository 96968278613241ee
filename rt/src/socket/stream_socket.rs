//! Stream sockets of gateways and edges: TCP or unix in one type.

use super::ResetOnClose;
use futures_util::FutureExt;
use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::{TcpStream, UnixStream},
};
use tokio_util::either::Either;

/// A connected stream socket of this runtime.
#[derive(Debug)]
pub struct Socket {
    stream: Either<TcpStream, UnixStream>,
    /// Error that a read returned. The system reports it once. TLS delays it until its next read, which may never happen.
    read_error: Option<io::ErrorKind>,
}

impl From<TcpStream> for Socket {
    fn from(tcp: TcpStream) -> Self {
        Self {
            stream: Either::Left(tcp),
            read_error: None,
        }
    }
}

impl From<UnixStream> for Socket {
    fn from(unix: UnixStream) -> Self {
        Self {
            stream: Either::Right(unix),
            read_error: None,
        }
    }
}

/// A connected stream socket that belongs to no runtime, while it moves to another thread.
#[derive(Debug)]
pub enum DetachedSocket {
    /// TCP over IPv4 or IPv6.
    Tcp(std::net::TcpStream),
    /// A unix stream socket.
    Unix(std::os::unix::net::UnixStream),
}

impl Socket {
    /// Detaches the socket from this thread's runtime.
    ///
    /// # Errors
    /// If the runtime cannot release it.
    pub fn detach(self) -> io::Result<DetachedSocket> {
        match self.stream {
            Either::Left(tcp) => tcp.into_std().map(DetachedSocket::Tcp),
            Either::Right(unix) => unix.into_std().map(DetachedSocket::Unix),
        }
    }

    /// Returns the TCP socket, if it is one.
    pub fn tcp(&self) -> Option<&TcpStream> {
        match &self.stream {
            Either::Left(tcp) => Some(tcp),
            Either::Right(_) => None,
        }
    }

    /// Returns the error that broke the connection, such as a reset: the error that a read returned, or the one pending in
    /// the system.
    ///
    /// # Errors
    /// If the connection is broken, or the system cannot say.
    pub fn check_error(&self) -> io::Result<()> {
        if let Some(kind) = self.read_error {
            return Err(kind.into());
        }
        let pending_error = match &self.stream {
            Either::Left(tcp) => tcp.take_error()?,
            Either::Right(unix) => unix.take_error()?,
        };
        pending_error.map_or(Ok(()), Err)
    }

    /// Whether the peer has ended its sending side, as far as the system has reported it. Unread bytes may come before the end.
    pub fn is_read_closed(&self) -> bool {
        let ready = match &self.stream {
            Either::Left(tcp) => tcp.ready(Interest::READABLE).now_or_never(),
            Either::Right(unix) => unix.ready(Interest::READABLE).now_or_never(),
        };
        matches!(ready, Some(Ok(ready)) if ready.is_read_closed())
    }
}

impl DetachedSocket {
    /// Attaches the socket to this thread's runtime.
    ///
    /// # Errors
    /// If the runtime cannot register it.
    pub fn attach(self) -> io::Result<Socket> {
        match self {
            Self::Tcp(tcp) => TcpStream::from_std(tcp).map(Socket::from),
            Self::Unix(unix) => UnixStream::from_std(unix).map(Socket::from),
        }
    }
}

impl ResetOnClose for Socket {
    fn abort(&self) {
        if let Either::Left(tcp) = &self.stream {
            tcp.abort();
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_read(cx, buf);
        if let Poll::Ready(Err(error)) = &polled {
            this.read_error = Some(error.kind());
        }
        polled
    }
}

impl AsyncWrite for Socket {
    crate::forward!(stream: poll_write, poll_write_vectored, is_write_vectored, poll_flush, poll_shutdown);
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    #[tokio::test]
    async fn a_reset_seen_by_a_read_is_reported_to_later_checks() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut far = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let mut near = Socket::from(listener.accept().await.unwrap().0);
        far.write_all(b"last words").await.unwrap();
        let mut words = [0; 10];
        near.read_exact(&mut words).await.unwrap();
        near.check_error().unwrap();
        far.abort();
        drop(far);
        let told = near.read(&mut words).await.unwrap_err().kind();
        assert_eq!(told, io::ErrorKind::ConnectionReset);
        for _ in 0..2 {
            let told = near.check_error().unwrap_err().kind();
            assert_eq!(told, io::ErrorKind::ConnectionReset);
        }
    }
}
