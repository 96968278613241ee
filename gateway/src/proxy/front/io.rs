//! A caller's socket below HTTP, and its condition.
//!
//! The body of an answer and the socket know of each other here: a body that breaks waits until what came before
//! it is flushed, and the socket is then dropped with a reset and without `close_notify`. The condition
//! also tells how long a head has been on its way, which bounds slow ones without bounding idle callers.
//! While nobody asks for a caller's bytes (its body waits for the app), `Watch` alone hears it go.

use super::blocks::Blocks;
use causeway_tunnel::{
    eviction::Eviction,
    socket::{Abort, Socket},
};
use futures_util::task::AtomicWaker;
use std::{
    future::poll_fn,
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::Notify,
    time::{Instant, Sleep, sleep, sleep_until},
};
use tokio_rustls::server::TlsStream;

/// Time that a socket takes nothing after which a connection that lost a stream by eviction ends.
const STUCK: Duration = Duration::from_secs(2);

/// What a socket and the bodies above it know of each other.
#[derive(Debug)]
pub struct Condition {
    began: Instant,
    /// The close is to be a reset.
    broken: AtomicBool,
    /// A broken body waits for a flush.
    flushing: AtomicBool,
    flushed: AtomicWaker,
    /// The next byte read is of a new head.
    expecting: AtomicBool,
    /// When the head on its way began, in milliseconds after `began`, plus one; 0 is none.
    head: AtomicU64,
    /// Of the stream that brings the answer, where HTTP/1.1 is spoken.
    eviction: Mutex<Option<Eviction>>,
    /// Since when the socket takes nothing, in milliseconds after `began`, plus one; 0 is none.
    blocked: AtomicU64,
    /// A stream was evicted, where HTTP/2 is spoken.
    lost: Notify,
}

impl Default for Condition {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            broken: AtomicBool::new(false),
            flushing: AtomicBool::new(false),
            flushed: AtomicWaker::new(),
            // The first head is due from the start, whether a byte of it has come or not.
            expecting: AtomicBool::new(false),
            head: AtomicU64::new(1),
            eviction: Mutex::default(),
            blocked: AtomicU64::new(0),
            lost: Notify::new(),
        }
    }
}

impl Condition {
    /// Breaks the connection: ready once what was written before is flushed.
    pub fn poll_flushed(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.broken.swap(true, Relaxed) {
            if !self.flushing.load(Relaxed) {
                return Poll::Ready(());
            }
        } else {
            self.flushing.store(true, Relaxed);
        }
        self.flushed.register(cx.waker());
        if self.flushing.load(Relaxed) {
            Poll::Pending
        } else {
            Poll::Ready(())
        }
    }

    /// A request's head is complete. For HTTP/2 the socket itself says so.
    pub fn asked(&self) {
        self.head.store(0, Relaxed);
    }

    /// An answer is complete: the next bytes are of a new head.
    pub fn answered(&self) {
        self.expecting.store(true, Relaxed);
    }

    /// From now on the connection ends when the stream that brings its answer is evicted.
    pub fn evictable(&self, eviction: Option<Eviction>) {
        *self.eviction() = eviction;
    }

    /// Waits until the stream that brings the answer is evicted. Has to be polled after what the stream is read by.
    pub async fn evicted(&self) {
        poll_fn(|cx| match self.eviction().as_ref() {
            Some(eviction) => eviction.poll_evicted(cx),
            None => Poll::Pending,
        })
        .await;
    }

    /// Notes that a stream was evicted.
    pub fn lost_stream(&self) {
        self.lost.notify_one();
    }

    /// Waits until the socket takes nothing after a stream was evicted: what HTTP/2 has queued for the stream is freed with
    /// the connection only.
    pub async fn stuck(&self) {
        loop {
            self.lost.notified().await;
            while self.blocked.load(Relaxed) > 0 {
                if self.blocked_for() >= STUCK {
                    return;
                }
                sleep(STUCK / 2).await;
            }
        }
    }

    fn blocked_for(&self) -> Duration {
        let since = self.blocked.load(Relaxed).checked_sub(1);
        let since = since.map(|since| self.began + Duration::from_millis(since));
        since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Handles the outcome of a write to the socket.
    fn wrote<T>(&self, polled: &Poll<T>) {
        let blocked = self.blocked.load(Relaxed) > 0;
        if polled.is_pending() == blocked {
            return;
        }
        let age = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
        self.blocked
            .store(if blocked { 0 } else { age + 1 }, Relaxed);
    }

    fn eviction(&self) -> MutexGuard<'_, Option<Eviction>> {
        self.eviction.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a head has been on its way for longer than `bound`.
    pub async fn slow_head(&self, bound: Duration) {
        let mut due = Instant::now();
        loop {
            sleep_until(due).await;
            let now = Instant::now();
            let began = self.head.load(Relaxed).checked_sub(1);
            let began = began.map(|began| self.began + Duration::from_millis(began));
            // A head that begins from now on is not late before the next look: nobody has to tell of it.
            due = began.unwrap_or(now) + bound;
            if due <= now {
                return;
            }
        }
    }

    fn read(&self) {
        if self.expecting.swap(false, Relaxed) {
            self.began_head();
        }
    }

    fn began_head(&self) {
        let age = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
        self.head.store(age + 1, Relaxed);
    }

    /// What a read has changed for the field lists of a caller that speaks HTTP/2, see [`Blocks::pass`].
    fn passed(&self, open: Option<bool>) {
        match open {
            // The first head is on its way from the start.
            Some(true) if self.head.load(Relaxed) == 1 => {}
            Some(true) => self.began_head(),
            Some(false) => self.asked(),
            None => {}
        }
    }

    fn wrote_all(&self) {
        if self.flushing.swap(false, Relaxed) {
            self.flushed.wake();
        }
    }
}

impl Abort for Condition {
    fn abort(&self) {
        self.broken.store(true, Relaxed);
    }
}

/// A caller's connection, plain or in TLS.
#[derive(Debug)]
pub struct Io {
    transport: Transport,
    condition: Arc<Condition>,
    blocks: Blocks,
    watch: Watch,
    /// Our half was ended in order.
    ended: bool,
}

#[derive(Debug)]
enum Transport {
    Plain(Socket),
    Tls(Box<TlsStream<Socket>>),
}

impl Io {
    /// A connection without TLS.
    pub fn plain(socket: Socket, condition: &Arc<Condition>) -> Self {
        Self {
            transport: Transport::Plain(socket),
            condition: condition.clone(),
            blocks: Blocks::default(),
            watch: Watch::default(),
            ended: false,
        }
    }

    /// A connection whose TLS is done.
    pub fn tls(stream: TlsStream<Socket>, condition: &Arc<Condition>) -> Self {
        Self {
            transport: Transport::Tls(Box::new(stream)),
            condition: condition.clone(),
            blocks: Blocks::default(),
            watch: Watch::default(),
            ended: false,
        }
    }
}

/// How often a caller whose bytes nobody asks for is looked after.
const LOOK: Duration = Duration::from_secs(5);

/// Hears that a caller is gone while nothing is read from it.
///
/// The system tells whoever reads, and a body that waits for its app is not read. The system's keepalive turns a
/// caller that is gone into an error of the socket; this looks for that error, which TLS may have met already.
#[derive(Debug, Default)]
struct Watch {
    /// Somebody waits for bytes, and would hear it.
    reads: bool,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Watch {
    fn poll(&mut self, cx: &mut Context<'_>, socket: &Socket) -> io::Result<()> {
        if self.reads {
            if self.timer.as_ref().is_some_and(|timer| timer.is_elapsed()) {
                self.timer = None;
            }
            return Ok(());
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(LOOK)));
        while timer.as_mut().poll(cx).is_ready() {
            socket.unbroken()?;
            timer.as_mut().reset(Instant::now() + LOOK);
        }
        Ok(())
    }
}

impl Abort for Io {
    fn abort(&self) {
        self.condition.abort();
    }
}

impl Drop for Io {
    /// What is dropped before its end, as a drain does with what is left, was broken off.
    fn drop(&mut self) {
        if !self.ended || self.condition.broken.load(Relaxed) {
            match &self.transport {
                Transport::Plain(socket) => socket.abort(),
                Transport::Tls(stream) => stream.get_ref().0.abort(),
            }
        }
    }
}

impl AsyncRead for Io {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let polled = match &mut this.transport {
            Transport::Plain(socket) => Pin::new(socket).poll_read(cx, buf),
            Transport::Tls(stream) => quiet(Pin::new(stream).poll_read(cx, buf)),
        };
        this.watch.reads = polled.is_pending();
        if let Some(new @ [_, ..]) = buf.filled().get(before..) {
            this.condition.read();
            this.condition.passed(this.blocks.pass(new));
        }
        polled
    }
}

/// A peer that goes without `close_notify` is an ordinary disconnect (trap 6).
fn quiet(polled: Poll<io::Result<()>>) -> Poll<io::Result<()>> {
    match polled {
        Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Poll::Ready(Ok(()))
        }
        other => other,
    }
}

impl AsyncWrite for Io {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = match &mut this.transport {
            Transport::Plain(socket) => Pin::new(socket).poll_write(cx, buf),
            Transport::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        };
        this.condition.wrote(&polled);
        polled
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = match &mut this.transport {
            Transport::Plain(socket) => Pin::new(socket).poll_flush(cx),
            Transport::Tls(stream) => Pin::new(stream).poll_flush(cx),
        };
        if polled.is_ready() {
            this.condition.wrote_all();
        }
        let socket = match &this.transport {
            Transport::Plain(socket) => socket,
            Transport::Tls(stream) => stream.get_ref().0,
        };
        this.watch.poll(cx, socket)?;
        polled
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = match &mut this.transport {
            Transport::Plain(socket) => Pin::new(socket).poll_shutdown(cx),
            Transport::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        };
        this.ended |= polled.is_ready();
        polled
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = match &mut this.transport {
            Transport::Plain(socket) => Pin::new(socket).poll_write_vectored(cx, bufs),
            Transport::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        };
        this.condition.wrote(&polled);
        polled
    }

    fn is_write_vectored(&self) -> bool {
        match &self.transport {
            Transport::Plain(socket) => socket.is_write_vectored(),
            Transport::Tls(stream) => stream.is_write_vectored(),
        }
    }
}
