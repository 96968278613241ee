//! Copies bytes in both directions between a socket and a far end: a connection, or a stream of a tunnel.
//!
//! The relay is one future without a task or a lock. "Up" is from the socket to the far end, "down" from the far end to the
//! socket. When one side ends its sending half in order, the relay ends the other side's half in order. A reset on one side
//! becomes a reset on the other side and ends both directions. Read buffers exist only while there is data to read: an idle
//! relay has none, a busy one up to 64 KiB.

use crate::socket::{ResetOnClose, ResetUnlessComplete};
use bytes::{Buf, Bytes, BytesMut};
use std::{
    future::poll_fn,
    io::{self, IoSlice},
    ops::Deref,
    pin::Pin,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep_until},
};
use tokio_util::io::poll_read_buf;

const MIN_BUFFER_BYTES: usize = 2 * 1024;
const MAX_BUFFER_BYTES: usize = 64 * 1024;

/// Time without progress after which a relay ends that has a broken side, although there are bytes of this side to deliver.
const BROKEN_SIDE_TIMEOUT: Duration = Duration::from_secs(10);

/// Counters of the bytes that were copied. They can be read while the relay runs.
#[derive(Debug, Default)]
pub struct ByteCounters {
    /// Bytes from the socket to the far end.
    pub up: AtomicU64,
    /// Bytes from the far end to the socket.
    pub down: AtomicU64,
}

impl ByteCounters {
    fn add_up(&self, bytes: usize) {
        let bytes = u64::try_from(bytes).unwrap_or_default();
        self.up.fetch_add(bytes, Relaxed);
    }
}

/// Far end that counts its bytes, for code that copies without [`relay`].
pub struct MeteredIo<F, C> {
    inner: F,
    counters: C,
}

impl<F, C> MeteredIo<F, C> {
    /// Wraps a far end: the bytes that are written to it count as up.
    pub fn new(inner: F, counters: C) -> Self {
        Self { inner, counters }
    }
}

impl<F: ResetOnClose, C> ResetOnClose for MeteredIo<F, C> {
    fn abort(&self) {
        self.inner.abort();
    }
}

impl<F, C> AsyncRead for MeteredIo<F, C>
where
    F: AsyncRead + Unpin,
    C: Deref<Target = ByteCounters> + Unpin,
{
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let filled_before = buf.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        let read = u64::try_from(buf.filled().len() - filled_before).unwrap_or_default();
        self.counters.down.fetch_add(read, Relaxed);
        Poll::Ready(Ok(()))
    }
}

impl<F, C> AsyncWrite for MeteredIo<F, C>
where
    F: AsyncWrite + Unpin,
    C: Deref<Target = ByteCounters> + Unpin,
{
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.inner).poll_write(cx, buf))?;
        self.counters.add_up(written);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.inner).poll_write_vectored(cx, bufs))?;
        self.counters.add_up(written);
        Poll::Ready(Ok(written))
    }

    crate::forward!(inner: is_write_vectored, poll_flush, poll_shutdown);
}

/// Outcome of a relay. `E` is the error of the far end.
#[derive(Debug)]
pub enum CopyOutcome<E> {
    /// Both directions ended in order.
    Clean,
    /// The socket's peer reset or broke its connection. The far end was reset.
    Socket(io::Error),
    /// The stream or connection at the far end was reset or lost. The socket closes with a reset.
    Stream(E),
}

/// Relays between a socket and a far end until both directions have ended. If the future is dropped before, both sides are reset.
///
/// With `wait_for_socket`, the bytes of the far end wait until the socket has sent its first byte. A kube-apiserver must receive no
/// byte behind the response to its CONNECT before it has sent its own first byte (invariant 4).
pub fn relay<S, F>(
    socket: S,
    far_end: F,
    counters: impl Deref<Target = ByteCounters>,
    wait_for_socket: bool,
) -> impl Future<Output = CopyOutcome<F::Error>>
where
    S: AsyncRead + AsyncWrite + ResetOnClose + Unpin,
    F: FarEnd,
{
    relay_guarded(guarded(socket), far_end, counters, wait_for_socket)
}

/// Relays between a socket and a connection, see [`relay`].
pub fn relay_connection<S, C>(
    socket: S,
    connection: C,
    counters: impl Deref<Target = ByteCounters>,
    wait_for_socket: bool,
) -> impl Future<Output = CopyOutcome<io::Error>>
where
    S: AsyncRead + AsyncWrite + ResetOnClose + Unpin,
    C: AsyncRead + AsyncWrite + ResetOnClose + Unpin,
{
    let connection = Connection {
        io: guarded(connection),
        buffer: ReadBuffer::default(),
        unflushed: false,
    };
    relay(socket, connection, counters, wait_for_socket)
}

/// Guards a side of a relay from the beginning: a future that is dropped before its first poll resets both sides as well.
fn guarded<S: ResetOnClose>(socket: S) -> ResetUnlessComplete<S> {
    ResetUnlessComplete::new(socket)
}

async fn relay_guarded<S, F>(
    mut socket: ResetUnlessComplete<S>,
    mut far: F,
    counters: impl Deref<Target = ByteCounters>,
    wait_for_socket: bool,
) -> CopyOutcome<F::Error>
where
    S: AsyncRead + AsyncWrite + ResetOnClose + Unpin,
    F: FarEnd,
{
    let (mut up, mut down) = (ToFarEnd::default(), FromFarEnd::default());
    let mut deadline = DeliveryDeadline::default();
    let outcome = poll_fn(|cx| {
        let ends = (&mut socket.socket, &mut far);
        let directions = (&mut up, &mut down);
        match poll_both(cx, ends, directions, (&counters, wait_for_socket)) {
            Poll::Pending => deadline.poll(cx, &mut up, &mut down, &counters),
            outcome @ Poll::Ready(_) => outcome,
        }
    })
    .await;
    match &outcome {
        CopyOutcome::Clean => {
            socket.complete();
            far.complete();
        }
        CopyOutcome::Socket(_) => far.flush_and_abort().await,
        // The last bytes before the reset are still valid.
        CopyOutcome::Stream(_) => flush_before_reset(&mut socket.socket).await,
    }
    outcome
}

/// Flushes a socket as far as it accepts bytes at once, and lets other tasks run, which may send them.
async fn flush_before_reset<S: AsyncWrite + Unpin>(socket: &mut S) {
    poll_fn(|cx| Poll::Ready(Pin::new(&mut *socket).poll_flush(cx).is_ready())).await;
    tokio::task::yield_now().await;
}

fn poll_both<S, F>(
    cx: &mut Context<'_>,
    (socket, far): (&mut S, &mut F),
    (up, down): (&mut ToFarEnd<F::Error>, &mut FromFarEnd),
    (counters, wait_for_socket): (&ByteCounters, bool),
) -> Poll<CopyOutcome<F::Error>>
where
    S: AsyncRead + AsyncWrite + Unpin,
    F: FarEnd,
{
    let is_broken = down.write_error.is_some();
    if let Poll::Ready(Err(error)) = up.poll(cx, (socket, is_broken), far, &counters.up) {
        return Poll::Ready(CopyOutcome::Socket(error));
    }
    let is_waiting = wait_for_socket && !up.is_done && counters.up.load(Relaxed) == 0;
    if !is_waiting
        && !down.is_done
        && down.write_error.is_none()
        && let Poll::Ready(result) =
            down.poll(cx, socket, (far, up.send_error.is_some()), &counters.down)
    {
        match (result, up.send_error.take()) {
            (Err(CopyOutcome::Socket(error)), None) if is_peer_reset(&error) => {
                down.write_error = Some(error);
            }
            (Err(CopyOutcome::Stream(_)) | Ok(()), Some(error)) => {
                return Poll::Ready(CopyOutcome::Stream(error));
            }
            (Err(outcome), _) => return Poll::Ready(outcome),
            (Ok(()), None) => {}
        }
    }
    // Bytes that the peer sent before it broke the connection must still be read.
    if let Some(error) = down.write_error.take() {
        match up.poll(cx, (socket, true), far, &counters.up) {
            Poll::Pending => down.write_error = Some(error),
            Poll::Ready(_) => {
                let far_error = up.send_error.take();
                return Poll::Ready(
                    far_error.map_or(CopyOutcome::Socket(error), CopyOutcome::Stream),
                );
            }
        }
    }
    if up.is_done && down.is_done {
        let far_error = up.send_error.take();
        return Poll::Ready(far_error.map_or(CopyOutcome::Clean, CopyOutcome::Stream));
    }
    // While the socket is not read, only a flush reports that the peer is gone.
    if !up.chunk.is_empty()
        && let Poll::Ready(Err(error)) = Pin::new(&mut *socket).poll_flush(cx)
    {
        return Poll::Ready(CopyOutcome::Socket(error));
    }
    if !down.is_done
        && let Poll::Ready(error) = far.poll_evicted(cx)
    {
        return Poll::Ready(CopyOutcome::Stream(error));
    }
    // If `down` is done, waiting or blocked by the socket and `up` is idle, only this detects a reset.
    let has_unwritten = !down.chunk.is_empty();
    let is_idle = !up.is_done && (is_waiting || down.is_done);
    if (has_unwritten || is_idle || up.send_error.is_some())
        && let Poll::Ready(error) = far.poll_reset(cx)
    {
        return Poll::Ready(CopyOutcome::Stream(up.send_error.take().unwrap_or(error)));
    }
    Poll::Pending
}

/// Far end of a relay, whose near end is a socket. It is reset when it is dropped before its end.
pub trait FarEnd {
    /// Reason for which the far end broke.
    type Error;

    /// Sends a whole chunk. An empty chunk sends what remains of the last one.
    fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        chunk: &mut Bytes,
    ) -> Poll<Result<(), Self::Error>>;

    /// Ends the sending half in order.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>>;

    /// Returns the next chunk, or `None` after the last.
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Self::Error>>>;

    /// Ready once the far end was aborted by this process, because its bytes were not consumed.
    fn poll_evicted(&mut self, _: &mut Context<'_>) -> Poll<Self::Error> {
        Poll::Pending
    }

    /// Ready once the far end is known to be reset, although nothing is received from it.
    fn poll_reset(&mut self, _: &mut Context<'_>) -> Poll<Self::Error> {
        Poll::Pending
    }

    /// Aborts after the socket has failed. The socket's last bytes are still valid, and are sent first if they can be sent at once.
    fn flush_and_abort(&mut self) -> impl Future<Output = ()>;

    /// Records that both directions have ended in order.
    fn complete(&mut self) {}
}

/// Connection at the far end. It is reset when it is dropped before its end.
struct Connection<F: ResetOnClose> {
    io: ResetUnlessComplete<F>,
    buffer: ReadBuffer,
    unflushed: bool,
}

impl<F: AsyncRead + AsyncWrite + ResetOnClose + Unpin> FarEnd for Connection<F> {
    type Error = io::Error;

    fn poll_send(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes) -> Poll<io::Result<()>> {
        while !chunk.is_empty() {
            let written = ready!(Pin::new(&mut self.io.socket).poll_write(cx, chunk))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.unflushed = true;
            chunk.advance(written);
        }
        if self.unflushed {
            ready!(Pin::new(&mut self.io.socket).poll_flush(cx))?;
            self.unflushed = false;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        poll_half_close(cx, &mut self.io.socket)
    }

    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        let read = ready!(self.buffer.poll_read(cx, &mut self.io.socket));
        Poll::Ready(Some(read).filter(|read| !matches!(read, Ok(chunk) if chunk.is_empty())))
    }

    async fn flush_and_abort(&mut self) {
        flush_before_reset(&mut self.io.socket).await;
    }

    fn complete(&mut self) {
        self.io.complete();
    }
}

/// Ends the sending half of a connection. A peer that has closed both ways already needs no end; its reset, if any, is read.
fn poll_half_close<S: AsyncWrite + Unpin>(
    cx: &mut Context<'_>,
    socket: &mut S,
) -> Poll<io::Result<()>> {
    Poll::Ready(match ready!(Pin::new(socket).poll_shutdown(cx)) {
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
        result => result,
    })
}

/// Read buffer that grows with the chunks, and exists only while there is data to read.
struct ReadBuffer {
    buffer: BytesMut,
    size: usize,
}

impl Default for ReadBuffer {
    fn default() -> Self {
        Self {
            buffer: BytesMut::new(),
            size: MIN_BUFFER_BYTES,
        }
    }
}

impl ReadBuffer {
    /// Reads the next chunk, which is empty at the end.
    fn poll_read<S: AsyncRead + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut S,
    ) -> Poll<io::Result<Bytes>> {
        self.buffer.reserve(self.size);
        let capacity = self.buffer.capacity();
        let polled = poll_read_buf(Pin::new(socket), cx, &mut self.buffer);
        match &polled {
            Poll::Ready(Ok(read)) if *read >= capacity => {
                self.size = (self.size * 2).min(MAX_BUFFER_BYTES);
            }
            Poll::Ready(Ok(1..)) => {}
            Poll::Pending | Poll::Ready(_) => *self = Self::default(),
        }
        ready!(polled)?;
        Poll::Ready(Ok(self.buffer.split().freeze()))
    }
}

/// Direction from the socket to the far end.
struct ToFarEnd<E> {
    buffer: ReadBuffer,
    chunk: Bytes,
    has_ended: bool,
    /// Whether the direction has ended, in order or by `send_error`.
    is_done: bool,
    /// Error of the far end: it accepts no more bytes. Bytes that it sent before it broke must still be received.
    send_error: Option<E>,
}

impl<E> Default for ToFarEnd<E> {
    fn default() -> Self {
        Self {
            buffer: ReadBuffer::default(),
            chunk: Bytes::new(),
            has_ended: false,
            is_done: false,
            send_error: None,
        }
    }
}

impl<E> ToFarEnd<E> {
    /// Copies until the direction is done. The end of a broken socket is no end in order: the system reports a reset only once, and a
    /// write may have received it.
    ///
    /// # Errors
    /// If the socket fails.
    fn poll<S, F>(
        &mut self,
        cx: &mut Context<'_>,
        (socket, is_broken): (&mut S, bool),
        far: &mut F,
        counter: &AtomicU64,
    ) -> Poll<io::Result<()>>
    where
        S: AsyncRead + Unpin,
        F: FarEnd<Error = E>,
    {
        while !self.is_done {
            let sent = match ready!(far.poll_send(cx, &mut self.chunk)) {
                Ok(()) if self.has_ended => ready!(far.poll_end(cx)).map(|()| self.is_done = true),
                sent => sent,
            };
            if let Err(error) = sent {
                self.send_error = Some(error);
                self.is_done = true;
            }
            if !self.is_done {
                self.chunk = ready!(self.buffer.poll_read(cx, socket))?;
                self.has_ended = self.chunk.is_empty();
                if self.has_ended && is_broken {
                    return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
                }
                let read = u64::try_from(self.chunk.len()).unwrap_or(u64::MAX);
                counter.fetch_add(read, Relaxed);
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// Direction from the far end to the socket.
#[derive(Default)]
struct FromFarEnd {
    chunk: Bytes,
    unflushed: bool,
    ended: bool,
    is_done: bool,
    /// Error of a write: the socket accepts no more bytes.
    write_error: Option<io::Error>,
}

/// Deadline of a relay with a broken side. The bytes that this side sent before must still reach the other side, but a side that
/// reads nothing does not hold the relay: no more event comes from the broken side, because the system reports a reset only once.
#[derive(Default)]
struct DeliveryDeadline {
    timer: Option<Pin<Box<Sleep>>>,
    /// Bytes read and not yet accepted in both directions, at the last progress.
    progress: (u64, usize, u64, usize),
}

impl DeliveryDeadline {
    /// Ready once a side is broken and [`BROKEN_SIDE_TIMEOUT`] has passed without progress.
    fn poll<E>(
        &mut self,
        cx: &mut Context<'_>,
        up: &mut ToFarEnd<E>,
        down: &mut FromFarEnd,
        counters: &ByteCounters,
    ) -> Poll<CopyOutcome<E>> {
        if down.write_error.is_none() && up.send_error.is_none() {
            return Poll::Pending;
        }
        let progress = (
            counters.up.load(Relaxed),
            up.chunk.len(),
            counters.down.load(Relaxed),
            down.chunk.len(),
        );
        let deadline = || Instant::now() + BROKEN_SIDE_TIMEOUT;
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(sleep_until(deadline())));
        if progress != self.progress {
            self.progress = progress;
            timer.as_mut().reset(deadline());
        }
        ready!(timer.as_mut().poll(cx));
        let of_far_end = up.send_error.take().map(CopyOutcome::Stream);
        let of_socket = || down.write_error.take().map(CopyOutcome::Socket);
        of_far_end
            .or_else(of_socket)
            .map_or(Poll::Pending, Poll::Ready)
    }
}

/// Whether a write failed because the peer has reset the connection.
fn is_peer_reset(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}

impl FromFarEnd {
    /// Copies until the direction is done, or until the end of a broken far end, see [`ToFarEnd::poll`].
    fn poll<S, F>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut S,
        (far, is_broken): (&mut F, bool),
        counter: &AtomicU64,
    ) -> Poll<Result<(), CopyOutcome<F::Error>>>
    where
        S: AsyncWrite + Unpin,
        F: FarEnd,
    {
        while !self.ended {
            ready!(self.poll_write(cx, socket, counter)).map_err(CopyOutcome::Socket)?;
            match far.poll_receive(cx) {
                Poll::Ready(Some(Ok(chunk))) => self.chunk = chunk,
                Poll::Ready(Some(Err(error))) => {
                    return Poll::Ready(Err(CopyOutcome::Stream(error)));
                }
                Poll::Ready(None) if is_broken => return Poll::Ready(Ok(())),
                Poll::Ready(None) => self.ended = true,
                Poll::Pending => {
                    ready!(self.poll_flush(cx, socket)).map_err(CopyOutcome::Socket)?;
                    return Poll::Pending;
                }
            }
        }
        ready!(poll_half_close(cx, socket)).map_err(CopyOutcome::Socket)?;
        self.is_done = true;
        Poll::Ready(Ok(()))
    }

    fn poll_write<S: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut S,
        counter: &AtomicU64,
    ) -> Poll<io::Result<()>> {
        while !self.chunk.is_empty() {
            let written = ready!(Pin::new(&mut *socket).poll_write(cx, &self.chunk))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.unflushed = true;
            counter.fetch_add(u64::try_from(written).unwrap_or(u64::MAX), Relaxed);
            self.chunk = self.chunk.split_off(written);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_flush<S: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut S,
    ) -> Poll<io::Result<()>> {
        if self.unflushed {
            ready!(Pin::new(socket).poll_flush(cx))?;
            self.unflushed = false;
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, ReadBuf},
        net::{TcpListener, TcpStream},
        time::timeout,
    };

    const LAST: &[u8] = &[7; 30_000];

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap());
        let (near, accepted) = tokio::join!(near, listener.accept());
        let (near, accepted) = (near.unwrap(), accepted.unwrap().0);
        near.set_nodelay(true).unwrap();
        accepted.set_nodelay(true).unwrap();
        (near, accepted)
    }

    /// Reads all bytes, which a reset must follow.
    async fn read_to_reset(mut peer: TcpStream) -> Vec<u8> {
        let (mut received, mut buf) = (Vec::new(), [0; 4096]);
        loop {
            match peer.read(&mut buf).await {
                Ok(0) => panic!("an end in order"),
                Ok(read) => received.extend_from_slice(&buf[..read]),
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
                    return received;
                }
            }
        }
    }

    #[tokio::test]
    async fn metered_bytes_are_counted_in_both_directions() {
        let (near, mut far) = pair().await;
        let counters = ByteCounters::default();
        let mut metered = MeteredIo::new(near, &counters);
        assert!(metered.is_write_vectored());
        let parts = [IoSlice::new(b"he"), IoSlice::new(b"ad")];
        assert_eq!(metered.write_vectored(&parts).await.unwrap(), 4);
        metered.write_all(b"body").await.unwrap();
        let mut received = [0; 8];
        far.read_exact(&mut received).await.unwrap();
        assert_eq!(received, *b"headbody");
        far.write_all(b"answer").await.unwrap();
        metered.read_exact(&mut received[..6]).await.unwrap();
        let bytes = (counters.up.load(Relaxed), counters.down.load(Relaxed));
        assert_eq!(bytes, (8, 6));
    }

    /// Each side breaks its connection before the relay has read its bytes, while there are bytes to write to it.
    #[tokio::test]
    async fn last_bytes_of_either_side_precede_its_reset() {
        for broken in ["socket", "connection"] {
            let (mut client, socket) = pair().await;
            let (mut target, connection) = pair().await;
            client.write_all(LAST).await.unwrap();
            target.write_all(LAST).await.unwrap();
            let (broken_peer, peer) = if broken == "socket" {
                (client, target)
            } else {
                (target, client)
            };
            broken_peer.abort();
            drop(broken_peer);
            let counters = ByteCounters::default();
            let outcome = relay_connection(socket, connection, &counters, false).await;
            match (broken, outcome) {
                ("socket", CopyOutcome::Socket(_)) | ("connection", CopyOutcome::Stream(_)) => {}
                (_, outcome) => panic!("{broken}: {outcome:?}"),
            }
            assert_eq!(read_to_reset(peer).await, LAST, "{broken}");
        }
    }

    #[tokio::test]
    async fn connections_that_end_in_order_are_relayed_whole() {
        let (mut client, socket) = pair().await;
        let (mut target, connection) = pair().await;
        let counters = ByteCounters::default();
        let relaying = relay_connection(socket, connection, &counters, true);
        let talking = async {
            let mut received = Vec::new();
            target.write_all(b"hello").await.unwrap();
            client.write_all(LAST).await.unwrap();
            client.shutdown().await.unwrap();
            target.read_to_end(&mut received).await.unwrap();
            assert_eq!(received, LAST);
            target.write_all(b" there").await.unwrap();
            target.shutdown().await.unwrap();
            received.clear();
            client.read_to_end(&mut received).await.unwrap();
            assert_eq!(received, b"hello there");
        };
        let (outcome, ()) = tokio::join!(relaying, talking);
        assert!(matches!(outcome, CopyOutcome::Clean), "{outcome:?}");
        let bytes = (counters.up.load(Relaxed), counters.down.load(Relaxed));
        assert_eq!(bytes, (30_000, 11));
    }

    #[tokio::test]
    async fn a_relay_that_never_runs_resets_both_sides() {
        let (client, socket) = pair().await;
        let (target, connection) = pair().await;
        drop(relay_connection(
            socket,
            connection,
            &ByteCounters::default(),
            false,
        ));
        for peer in [client, target] {
            assert_eq!(read_to_reset(peer).await, b"");
        }
    }

    /// Stream that was reset behind bytes that are not received yet.
    struct ResetFar(Vec<&'static [u8]>);

    impl FarEnd for ResetFar {
        type Error = &'static str;

        fn poll_send(
            &mut self,
            _: &mut Context<'_>,
            chunk: &mut Bytes,
        ) -> Poll<Result<(), &'static str>> {
            let is_empty = chunk.is_empty();
            Poll::Ready(if is_empty { Ok(()) } else { Err("sending") })
        }

        fn poll_end(&mut self, _: &mut Context<'_>) -> Poll<Result<(), &'static str>> {
            Poll::Ready(Err("ending"))
        }

        fn poll_receive(
            &mut self,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Bytes, &'static str>>> {
            let next = self.0.pop().map(Bytes::from_static);
            Poll::Ready(Some(next.ok_or("receiving")))
        }

        async fn flush_and_abort(&mut self) {
            panic!("the socket is sound");
        }
    }

    #[tokio::test]
    async fn bytes_before_a_reset_arrive_although_sending_fails_first() {
        for sent in [&b"request"[..], b""] {
            let (mut client, socket) = pair().await;
            client.write_all(sent).await.unwrap();
            client.shutdown().await.unwrap();
            let far = ResetFar(vec![b"last", b"the "]);
            let counters = ByteCounters::default();
            let outcome = relay_guarded(guarded(socket), far, &counters, false).await;
            let expected = if sent.is_empty() { "ending" } else { "sending" };
            assert!(matches!(outcome, CopyOutcome::Stream(error) if error == expected));
            assert_eq!(read_to_reset(client).await, b"the last");
        }
    }

    /// Socket that has bytes to read and accepts none: each write fails, or none ends.
    struct DeadSocket {
        write_error: Option<io::ErrorKind>,
    }

    impl AsyncRead for DeadSocket {
        fn poll_read(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            buf.put_slice(b"up");
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for DeadSocket {
        fn poll_write(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            _: &[u8],
        ) -> Poll<io::Result<usize>> {
            let error = self.write_error.map(|kind| Err(kind.into()));
            error.map_or(Poll::Pending, Poll::Ready)
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    impl ResetOnClose for DeadSocket {
        fn abort(&self) {}
    }

    /// Far end that sends without end. It accepts a chunk at each of these instants, and then none, or is broken.
    struct SlowFar {
        accepts: Vec<Pin<Box<Sleep>>>,
        send_error: Option<&'static str>,
    }

    impl FarEnd for SlowFar {
        type Error = &'static str;

        fn poll_send(
            &mut self,
            cx: &mut Context<'_>,
            chunk: &mut Bytes,
        ) -> Poll<Result<(), &'static str>> {
            if chunk.is_empty() {
                return Poll::Ready(Ok(()));
            }
            if let Some(error) = self.send_error {
                return Poll::Ready(Err(error));
            }
            let Some(next) = self.accepts.first_mut() else {
                return Poll::Pending;
            };
            ready!(next.as_mut().poll(cx));
            drop(self.accepts.remove(0));
            chunk.clear();
            Poll::Ready(Ok(()))
        }

        fn poll_end(&mut self, _: &mut Context<'_>) -> Poll<Result<(), &'static str>> {
            panic!("no end in order");
        }

        fn poll_receive(
            &mut self,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Bytes, &'static str>>> {
            Poll::Ready(Some(Ok(Bytes::from_static(b"down"))))
        }

        async fn flush_and_abort(&mut self) {}
    }

    /// The other side of a broken one accepts nothing any more: nothing but the timeout ends the relay.
    #[tokio::test(start_paused = true)]
    async fn a_broken_side_is_not_kept_by_a_side_that_reads_nothing() {
        let reset = io::ErrorKind::ConnectionReset;
        for (write_error, send_error, accepts, ends_after) in [
            (Some(reset), None, &[][..], 10),
            // As long as there is progress, the bytes are delivered.
            (Some(reset), None, &[6, 14], 24),
            (None, Some("sending"), &[], 10),
        ] {
            let begin = Instant::now();
            let at = |seconds: &u64| Box::pin(sleep_until(begin + Duration::from_secs(*seconds)));
            let far = SlowFar {
                accepts: accepts.iter().map(at).collect(),
                send_error,
            };
            let socket = guarded(DeadSocket { write_error });
            let counters = ByteCounters::default();
            let relaying = relay_guarded(socket, far, &counters, false);
            let outcome = timeout(Duration::from_mins(1), relaying).await.unwrap();
            match (send_error, &outcome) {
                (None, CopyOutcome::Socket(error)) => assert_eq!(error.kind(), reset),
                (Some(expected), CopyOutcome::Stream(error)) => assert_eq!(*error, expected),
                _ => panic!("{outcome:?}"),
            }
            assert_eq!(begin.elapsed().as_secs(), ends_after);
        }
    }
}
