//! Idle connections to upstreams, pooled for the next request.
//!
//! HTTP/1.1: idle ones lie in a stack for each upstream, the last used on top, and belong to no task. The stream that takes
//! one drives it ([`PooledConnection`]), so a stream that ends takes its connection with it and no request changes tasks.
//! One that is dropped before it came to rest is reset (invariant 3). HTTP/2: connections are driven by tasks and shared
//! by streams, see [`UpstreamHttp2Pool`].

use super::{
    body::{ChunkCounter, RequestBody},
    http2_pool::UpstreamHttp2Pool,
    upstream::{UpstreamIo, UpstreamKey},
};
use bytes::Bytes;
use causeway_rt::socket::ResetOnClose;
use causeway_tunnel::{
    error::is_close,
    io_observer::{IoObserver, ObservedIo},
    request_target::{TargetOverflow, TargetWriter},
    status_line::StatusLine,
};
use http_body::{Body as _, Frame};
use hyper::{
    Request, Response,
    body::Incoming,
    client::conn::{TrySendError, http1},
};
use hyper_util::rt::TokioIo;
use std::{
    collections::HashMap,
    future::{Future, poll_fn},
    io,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};
use tokio::time::{Instant, timeout};

/// Fields of an answer that hyper takes by default.
const ENGINE_FIELDS: usize = 100;

/// Idle connections for each upstream at most: more clients at once than this are not ordinary on a node.
const MOST_IDLE: usize = 256;

/// One HTTP/1.1 connection, driven by the task that holds it.
pub(super) struct PooledConnection {
    driven: ConnectionDriver,
    sender: http1::SendRequest<RequestBody>,
    since: Instant,
    address: SocketAddr,
    /// A request is under way.
    busy: bool,
    /// Of its body.
    taken: ChunkCounter,
    answering: Answering,
}

/// Observer that records whether the upstream has sent a byte since the last request. Clones share the record.
#[derive(Clone, Debug, Default)]
struct Answering(Arc<AtomicBool>, StatusLine);

impl IoObserver for Answering {
    fn adjust(&mut self, bytes: &mut [u8]) {
        if !bytes.is_empty() {
            if !self.0.swap(true, Relaxed) {
                self.1.begin();
            }
            self.1.rewrite(bytes);
        }
    }

    /// Ignores broken pipes and resets. An upstream that has answered before it read the request's body may close its
    /// connection over that: the answer is still to be read.
    fn write_failed(&mut self, error: io::Error) -> io::Result<()> {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Ok(()),
            _ => Err(error),
        }
    }
}

/// Pooled connections, by upstream.
pub(super) struct ConnectionPool {
    idle: Mutex<HashMap<UpstreamKey, Vec<PooledConnection>>>,
    shared: Mutex<HashMap<UpstreamKey, Arc<UpstreamHttp2Pool>>>,
    bound: Duration,
}

impl ConnectionPool {
    /// Keeps what is idle for `bound` at most.
    pub(super) fn new(bound: Duration) -> Self {
        Self {
            idle: Mutex::default(),
            shared: Mutex::default(),
            bound,
        }
    }

    /// The idle connection that was used last, if one is alive.
    pub(super) fn checkout(&self, app: &UpstreamKey) -> Option<PooledConnection> {
        loop {
            let mut line = locked(&self.idle).get_mut(app)?.pop()?;
            if line.is_alive(self.bound) {
                return Some(line);
            }
        }
    }

    /// Keeps a connection, once it has come to rest.
    pub(super) async fn checkin(&self, app: UpstreamKey, mut line: PooledConnection) {
        if !line.rests(self.bound).await {
            return;
        }
        line.since = Instant::now();
        let mut idle = locked(&self.idle);
        let lines = idle.entry(app).or_default();
        if lines.len() < MOST_IDLE {
            lines.push(line);
        }
    }

    /// How many HTTP/1 connections rest.
    #[cfg(test)]
    pub(super) fn idle(&self) -> usize {
        locked(&self.idle).values().map(Vec::len).sum()
    }

    /// Returns the upstream's shared connections.
    pub(super) fn shared(&self, app: &UpstreamKey) -> Arc<UpstreamHttp2Pool> {
        let mut shared = locked(&self.shared);
        if let Some(found) = shared.get(app) {
            return found.clone();
        }
        shared.entry(app.clone()).or_default().clone()
    }

    /// Closes connections that were idle for too long, or were closed by their upstream.
    pub(super) fn evict_expired(&self) {
        locked(&self.idle).retain(|_, lines| {
            lines.retain_mut(|line| line.is_alive(self.bound));
            !lines.is_empty()
        });
        // A stream that is about to dial holds what it will put there.
        locked(&self.shared)
            .retain(|_, shared| shared.sweep(self.bound) || Arc::strong_count(shared) > 1);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection as hyper has it.
type Engine =
    http1::Connection<TokioIo<ObservedIo<TargetWriter<UpstreamIo>, Answering>>, RequestBody>;

/// hyper's half of a pooled connection.
struct ConnectionDriver {
    /// `None` once it was given up.
    connection: Option<Engine>,
    /// It must not be polled again, but may still hold bytes behind a 101.
    over: bool,
}

impl ConnectionDriver {
    /// Moves bytes. An error is how it ended.
    fn drive(&mut self, cx: &mut Context<'_>) -> hyper::Result<()> {
        match &mut self.connection {
            Some(connection) if !self.over => match connection.poll_without_shutdown(cx) {
                Poll::Pending => Ok(()),
                Poll::Ready(ended) => {
                    self.over = true;
                    ended
                }
            },
            _ => Ok(()),
        }
    }

    /// Polls `fed` while it drives the connection. Gives up a connection that is over before any task waits for it.
    fn feed<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut fed: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let polled = fed(cx);
        if polled.is_pending() && self.over && self.connection.take().is_some() {
            return fed(cx);
        }
        polled
    }
}

impl PooledConnection {
    /// Begins HTTP/1.1 on a connection, whose first request has this rest of its target. Answers have so many fields at most.
    pub(super) async fn begin(
        (connection, address): (UpstreamIo, SocketAddr),
        rest: Option<TargetOverflow>,
        most_fields: usize,
    ) -> hyper::Result<Self> {
        let answering = Answering::default();
        let connection = ObservedIo::new(TargetWriter::new(connection, rest), answering.clone());
        let mut builder = http1::Builder::new();
        builder.title_case_headers(true);
        if most_fields != ENGINE_FIELDS {
            // Said, it costs an allocation for each answer.
            builder.max_headers(most_fields);
        }
        let (sender, connection) = builder.handshake(TokioIo::new(connection)).await?;
        Ok(Self {
            driven: ConnectionDriver {
                connection: Some(connection),
                over: false,
            },
            sender,
            since: Instant::now(),
            address,
            busy: false,
            taken: ChunkCounter::default(),
            answering,
        })
    }

    /// Returns the address that the connection was dialled to.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Asks, and waits for the answer's head.
    pub(super) async fn ask(
        &mut self,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, TrySendError<Request<RequestBody>>> {
        self.busy = true;
        self.taken = request.body().taken();
        self.answering.0.store(false, Relaxed);
        let mut answer = pin!(self.sender.try_send_request(request));
        let driven = &mut self.driven;
        poll_fn(|cx| {
            // How it ended reaches `answer` too.
            let _ = driven.drive(cx);
            driven.feed(cx, |cx| answer.as_mut().poll(cx))
        })
        .await
    }

    /// Whether the upstream closed the connection without a byte of an answer to the last request, which failed with
    /// `error`.
    pub(super) fn closed_unanswered(&self, error: &hyper::Error) -> bool {
        let closed = error.is_incomplete_message() || is_close(error);
        closed && !self.answering.0.load(Relaxed)
    }

    /// The next frame of the answer's body.
    pub(super) fn poll_frame(
        &mut self,
        incoming: &mut Incoming,
        cx: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let ended = self.driven.drive(cx);
        match self
            .driven
            .feed(cx, |cx| Pin::new(&mut *incoming).poll_frame(cx))
        {
            // Never the clean end that the engine makes of a body whose connection failed.
            Poll::Ready(None) => Poll::Ready(ended.err().map(Err)),
            polled => polled,
        }
    }

    /// Returns the switched protocol's connection after a 101, with the bytes behind the 101.
    pub(super) async fn into_bytes(mut self) -> hyper::Result<Option<(Bytes, UpstreamIo)>> {
        let Some(connection) = self.driven.connection.take() else {
            return Ok(None);
        };
        let parts = if self.driven.over {
            connection.into_parts()
        } else {
            connection.without_shutdown().await?
        };
        let connection = parts.io.into_inner().into_inner().into_inner();
        Ok(Some((parts.read_buf, connection)))
    }

    /// As [`PooledConnection::rest`], for as long as the request's body moves: an upstream may answer and read on for hours.
    /// A body that the upstream does not read, or that its client does not send, has `bound` and no more than that again.
    async fn rests(&mut self, bound: Duration) -> bool {
        loop {
            let taken = self.taken.count();
            match timeout(bound, self.rest()).await {
                Ok(rested) => return rested,
                Err(_) if self.taken.count() == taken => return false,
                Err(_) => {}
            }
        }
    }

    /// Waits until the next request can be sent. False if the connection ended instead.
    async fn rest(&mut self) -> bool {
        let rested = poll_fn(|cx| {
            if self.driven.drive(cx).is_err() || self.driven.over {
                return Poll::Ready(false);
            }
            self.sender.poll_ready(cx).map(|ready| ready.is_ok())
        })
        .await;
        self.busy = !rested;
        rested
    }

    /// Whether an idle connection can be used: not too old, and not closed by the upstream.
    fn is_alive(&mut self, bound: Duration) -> bool {
        let mut unwatched = Context::from_waker(Waker::noop());
        let sound = self.driven.drive(&mut unwatched).is_ok() && !self.driven.over;
        sound && self.since.elapsed() < bound && self.sender.is_ready()
    }
}

impl Drop for PooledConnection {
    /// Resets a busy connection: an upstream whose request is given up must not take it for one that ended in order.
    fn drop(&mut self) {
        if self.busy
            && let Some(connection) = self.driven.connection.take()
        {
            let io = connection.into_parts().io;
            io.into_inner().into_inner().into_inner().abort();
        }
    }
}
