//! Sockets: TCP or unix under one type, options, resets, and bytes counted under TLS.
//!
//! A reset from one side of a relay must reach the other as a reset: [`Socket::abort`] makes the next close an RST
//! (`SO_LINGER` 0). [`CountedIo`] sits below TLS and tells liveness when a byte last passed; its socket can be taken out and
//! put back, which is how a live connection changes threads. `SO_SNDBUF` and `SO_RCVBUF` are not set here (invariant 11).

use socket2::SockRef;
use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpStream, UnixStream},
    time::Instant,
};
use tokio_util::either::Either;

/// A connected stream socket of this runtime.
#[derive(Debug)]
pub struct Socket {
    stream: Either<TcpStream, UnixStream>,
    /// Error that a read returned. The system reports it once, and TLS holds it back for its next read, which may never
    /// come.
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

/// A connected stream socket that belongs to no runtime, on its way to another thread.
#[derive(Debug)]
pub enum DetachedSocket {
    /// TCP over IPv4 or IPv6.
    Tcp(std::net::TcpStream),
    /// A unix stream socket.
    Unix(std::os::unix::net::UnixStream),
}

/// Something whose close can be made a reset.
pub trait ResetOnClose {
    /// The next close sends RST instead of FIN where the transport has one.
    fn abort(&self);
}

impl Socket {
    /// Takes the socket off this thread's runtime.
    ///
    /// # Errors
    /// If the runtime cannot give it up.
    pub fn detach(self) -> io::Result<DetachedSocket> {
        match self.stream {
            Either::Left(tcp) => tcp.into_std().map(DetachedSocket::Tcp),
            Either::Right(unix) => unix.into_std().map(DetachedSocket::Unix),
        }
    }

    /// The TCP socket, if it is one.
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
}

impl DetachedSocket {
    /// Puts the socket on this thread's runtime.
    ///
    /// # Errors
    /// If the runtime cannot take it.
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

impl ResetOnClose for TcpStream {
    fn abort(&self) {
        // A closed socket needs no reset.
        let _ = SockRef::from(self).set_linger(Some(Duration::ZERO));
    }
}

/// Unsent bytes that the system takes at most. Left to itself it takes 4 MiB for each reader that stalls, and a thousand
/// of them take all the memory that it has for TCP: then no connection moves.
const MAX_UNSENT_BYTES: u32 = 256 * 1024;

/// The options of every TCP connection: no delay, a short unsent queue, and keepalive as the net below liveness.
pub fn set_tcp_options(tcp: &TcpStream) {
    let socket = SockRef::from(tcp);
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(Duration::from_mins(1))
        .with_interval(Duration::from_secs(15));
    // Refused options cost speed, not correctness.
    let _ = socket.set_tcp_nodelay(true);
    let _ = socket.set_tcp_notsent_lowat(MAX_UNSENT_BYTES);
    let _ = socket.set_tcp_keepalive(&keepalive);
}

/// Bytes that the system reads ahead from an upstream on this machine.
const LOCAL_RECEIVE_BUFFER: usize = 128 * 1024;

/// Sets the options of a connection to an upstream on this machine: as [`set_tcp_options`], with a small receive buffer. By
/// default the system reads up to 32 MiB ahead for each client that stalls, which is as much memory as the unsent bytes
/// above are. A local upstream is so near that a larger buffer is of no use.
pub fn set_local_tcp_options(tcp: &TcpStream) {
    set_tcp_options(tcp);
    let _ = SockRef::from(tcp).set_recv_buffer_size(LOCAL_RECEIVE_BUFFER);
}

/// The options of a tunnel's connection: as [`set_tcp_options`], bbr where the kernel has it (at 1 % loss and 50 ms
/// it moves two hundred times as much as cubic). The short unsent queue keeps small requests from queueing
/// behind bulk (invariant 7).
pub fn set_tunnel_options(tcp: &TcpStream) {
    set_tcp_options(tcp);
    let socket = SockRef::from(tcp);
    let _ = socket.set_tcp_congestion(b"bbr");
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

/// When bytes last passed, and how many, in each direction.
#[derive(Debug)]
pub struct IoActivity {
    created_at: Instant,
    last_read_us: AtomicU64,
    last_write_us: AtomicU64,
    bytes_read: AtomicU64,
}

impl Default for IoActivity {
    fn default() -> Self {
        Self {
            created_at: Instant::now(),
            last_read_us: AtomicU64::new(0),
            last_write_us: AtomicU64::new(0),
            bytes_read: AtomicU64::new(0),
        }
    }
}

impl IoActivity {
    /// When a byte was last read (at first: when the connection began).
    pub fn last_read(&self) -> Instant {
        self.created_at + Duration::from_micros(self.last_read_us.load(Relaxed))
    }

    /// When a byte was last written (at first: when the connection began).
    pub fn last_written(&self) -> Instant {
        self.created_at + Duration::from_micros(self.last_write_us.load(Relaxed))
    }

    /// Bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Relaxed)
    }

    /// Adds to the bytes read. Only the one task that reads calls this and writes the counter, so no lock is needed.
    fn add_read(&self, bytes: u64) {
        let all = self.bytes_read.load(Relaxed) + bytes;
        self.bytes_read.store(all, Relaxed);
    }

    fn touch(&self, timestamp: &AtomicU64) {
        let age = self.created_at.elapsed().as_micros();
        timestamp.store(u64::try_from(age).unwrap_or(u64::MAX), Relaxed);
    }
}

/// A transport whose bytes are noted in a [`IoActivity`], and which can change threads.
#[derive(Debug)]
pub struct CountedIo<S> {
    io: Option<S>,
    traffic: Arc<IoActivity>,
}

impl<S> CountedIo<S> {
    /// Counts what passes through `io`.
    pub fn new(io: S) -> Self {
        Self {
            io: Some(io),
            traffic: Arc::default(),
        }
    }

    /// Returns the shared record of the bytes that have passed.
    pub fn traffic(&self) -> Arc<IoActivity> {
        self.traffic.clone()
    }

    /// Takes the transport out, to be put back by [`CountedIo::put`] on another thread.
    pub fn take(&mut self) -> Option<S> {
        self.io.take()
    }

    /// Puts a transport in.
    pub fn put(&mut self, io: S) {
        self.io = Some(io);
    }

    /// The transport, unless it is out.
    pub fn get_ref(&self) -> Option<&S> {
        self.io.as_ref()
    }

    fn io(&mut self) -> io::Result<&mut S> {
        self.io
            .as_mut()
            .ok_or_else(|| io::Error::other("the connection is between two threads"))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for CountedIo<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let polled = Pin::new(this.io()?).poll_read(cx, buf);
        let read = buf.filled().len() - before;
        if read > 0 {
            this.traffic.touch(&this.traffic.last_read_us);
            this.traffic.add_read(read as u64);
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for CountedIo<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(this.io()?).poll_write(cx, buf);
        if matches!(polled, Poll::Ready(Ok(1..))) {
            this.traffic.touch(&this.traffic.last_write_us);
        }
        polled
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.get_mut().io()?).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.get_mut().io()?).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(this.io()?).poll_write_vectored(cx, bufs);
        if matches!(polled, Poll::Ready(Ok(1..))) {
            this.traffic.touch(&this.traffic.last_write_us);
        }
        polled
    }

    fn is_write_vectored(&self) -> bool {
        self.io.as_ref().is_some_and(AsyncWrite::is_write_vectored)
    }
}

impl<S: ResetOnClose> ResetOnClose for CountedIo<S> {
    fn abort(&self) {
        if let Some(io) = &self.io {
            io.abort();
        }
    }
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
