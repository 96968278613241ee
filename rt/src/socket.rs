//! Sockets: options, resets, counters of bytes below TLS, and on Linux TCP or unix in one type.
//!
//! A reset from one side of a relay must reach the other side as a reset: [`ResetOnClose::abort`] makes the next close an RST
//! (`SO_LINGER` 0). [`CountedIo`] lies below TLS and records the time of the last byte for the keepalive. Its socket can be
//! taken out and put back, so that a live connection can move to another thread. `SO_SNDBUF` and `SO_RCVBUF` of a tunnel's
//! socket are not set (invariant 11).

#[cfg(target_os = "linux")]
mod stream_socket;

use bytes::Bytes;
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
    net::TcpStream,
    time::Instant,
};

#[cfg(target_os = "linux")]
pub use stream_socket::{DetachedSocket, Socket};

/// Transport whose close can be made a reset.
pub trait ResetOnClose {
    /// Makes the next close send RST instead of FIN, if the transport has one.
    fn abort(&self);
}

/// Socket that closes with a reset unless its transfer was marked as complete, so that the peer never takes an aborted transfer
/// for a complete one.
#[derive(Debug)]
pub struct ResetUnlessComplete<S: ResetOnClose> {
    /// The socket.
    pub socket: S,
    is_complete: bool,
}

impl<S: ResetOnClose> ResetUnlessComplete<S> {
    /// Guards a socket.
    pub fn new(socket: S) -> Self {
        Self {
            socket,
            is_complete: false,
        }
    }

    /// Marks the transfer as complete: the socket closes in order.
    pub fn complete(&mut self) {
        self.is_complete = true;
    }
}

impl<S: ResetOnClose> Drop for ResetUnlessComplete<S> {
    fn drop(&mut self) {
        if !self.is_complete {
            self.socket.abort();
        }
    }
}

impl<S: ResetOnClose> ResetOnClose for &mut S {
    fn abort(&self) {
        (**self).abort();
    }
}

impl ResetOnClose for TcpStream {
    fn abort(&self) {
        // A closed socket needs no reset.
        let _ = SockRef::from(self).set_linger(Some(Duration::ZERO));
    }
}

/// Stream that first yields bytes that were read before, such as those behind a head.
#[derive(Debug)]
pub struct PrefixedStream<S> {
    unread: Bytes,
    io: S,
}

impl<S> PrefixedStream<S> {
    /// Returns a stream that yields `unread`, and then the bytes of `io`.
    pub fn new(unread: Bytes, io: S) -> Self {
        Self { unread, io }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for PrefixedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.unread.is_empty() {
            return Pin::new(&mut self.io).poll_read(cx, buf);
        }
        let length = self.unread.len().min(buf.remaining());
        buf.put_slice(&self.unread.split_to(length));
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PrefixedStream<S> {
    crate::forward!(io: poll_write, poll_write_vectored, is_write_vectored, poll_flush, poll_shutdown);
}

impl<S: ResetOnClose> ResetOnClose for PrefixedStream<S> {
    fn abort(&self) {
        self.io.abort();
    }
}

/// Maximum number of unsent bytes in the system. By default the system accepts 4 MiB for each stalled reader. A thousand such
/// readers take all of its memory for TCP, and then no connection makes progress.
#[cfg(target_os = "linux")]
const MAX_UNSENT_BYTES: u32 = 256 * 1024;

/// Sets the options of every TCP connection: no delay, on Linux a short unsent queue, and TCP keepalive as a fallback for our own.
pub fn set_tcp_options(tcp: &TcpStream) {
    let socket = SockRef::from(tcp);
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(Duration::from_mins(1))
        .with_interval(Duration::from_secs(15));
    // Refused options cost speed, not correctness.
    let _ = socket.set_tcp_nodelay(true);
    #[cfg(target_os = "linux")]
    let _ = socket.set_tcp_notsent_lowat(MAX_UNSENT_BYTES);
    let _ = socket.set_tcp_keepalive(&keepalive);
}

/// Sets the options of a connection of a user's machine: as [`set_tcp_options`], but the loss of an idle connection is noticed after a
/// minute. The machine may have slept, or may be in another network now. There is no `TCP_USER_TIMEOUT`, because it also ends
/// connections whose peer lives and does not read.
pub fn set_client_tcp_options(tcp: &TcpStream) {
    set_tcp_options(tcp);
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(Duration::from_secs(20))
        .with_interval(Duration::from_secs(10))
        .with_retries(4);
    let _ = SockRef::from(tcp).set_tcp_keepalive(&keepalive);
}

/// Receive buffer of a connection to an upstream on this machine, in bytes.
const LOCAL_RECEIVE_BUFFER: usize = 128 * 1024;

/// Sets the options of a connection to an upstream on this machine: as [`set_tcp_options`], with a small receive buffer. By
/// default the system reads up to 32 MiB ahead for each stalled client, which exhausts the same memory as the unsent bytes. A
/// local upstream is so near that a larger buffer is useless.
pub fn set_local_tcp_options(tcp: &TcpStream) {
    set_tcp_options(tcp);
    let _ = SockRef::from(tcp).set_recv_buffer_size(LOCAL_RECEIVE_BUFFER);
}

/// Sets the options of a tunnel's connection: as [`set_tcp_options`], with bbr if the kernel has it. At 1 % loss and 50 ms,
/// bbr moves two hundred times as much as cubic. The short unsent queue prevents small requests from queueing behind bulk
/// (invariant 7).
#[cfg(target_os = "linux")]
pub fn set_tunnel_options(tcp: &TcpStream) {
    set_tcp_options(tcp);
    let socket = SockRef::from(tcp);
    let _ = socket.set_tcp_congestion(b"bbr");
}

/// Time of the last bytes, and number of bytes, in each direction.
#[derive(Debug)]
pub struct IoActivity {
    created_at: Instant,
    last_read_ns: AtomicU64,
    last_write_ns: AtomicU64,
    bytes_read: AtomicU64,
}

impl Default for IoActivity {
    fn default() -> Self {
        Self {
            created_at: Instant::now(),
            last_read_ns: AtomicU64::new(0),
            last_write_ns: AtomicU64::new(0),
            bytes_read: AtomicU64::new(0),
        }
    }
}

impl IoActivity {
    /// Returns the time of the last read, at first the beginning of the connection.
    pub fn last_read(&self) -> Instant {
        self.created_at + Duration::from_nanos(self.last_read_ns.load(Relaxed))
    }

    /// Returns the time of the last write, at first the beginning of the connection.
    pub fn last_written(&self) -> Instant {
        self.created_at + Duration::from_nanos(self.last_write_ns.load(Relaxed))
    }

    /// Returns the number of bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Relaxed)
    }

    /// Adds to the bytes read. Only the one task that reads calls this and writes the counter, so no lock is needed.
    fn add_read(&self, bytes: u64) {
        let all = self.bytes_read.load(Relaxed) + bytes;
        self.bytes_read.store(all, Relaxed);
    }

    fn touch(&self, timestamp: &AtomicU64) {
        // Exact, so that a read never seems to be older than a probe that it answers at once.
        let age = self.created_at.elapsed().as_nanos();
        timestamp.store(u64::try_from(age).unwrap_or(u64::MAX), Relaxed);
    }
}

/// Transport whose bytes are recorded in an [`IoActivity`], and that can move to another thread.
#[derive(Debug)]
pub struct CountedIo<S> {
    io: Option<S>,
    traffic: Arc<IoActivity>,
}

impl<S> CountedIo<S> {
    /// Wraps `io`, and counts its bytes.
    pub fn new(io: S) -> Self {
        Self {
            io: Some(io),
            traffic: Arc::default(),
        }
    }

    /// Returns the shared record of the counted bytes.
    pub fn traffic(&self) -> Arc<IoActivity> {
        self.traffic.clone()
    }

    /// Takes the transport out, so that [`CountedIo::put`] can put it back on another thread.
    pub fn take(&mut self) -> Option<S> {
        self.io.take()
    }

    /// Puts a transport back.
    pub fn put(&mut self, io: S) {
        self.io = Some(io);
    }

    /// Returns the transport, unless it was taken out.
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
            this.traffic.touch(&this.traffic.last_read_ns);
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
            this.traffic.touch(&this.traffic.last_write_ns);
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
            this.traffic.touch(&this.traffic.last_write_ns);
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
