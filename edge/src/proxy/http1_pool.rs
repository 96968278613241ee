//! Idle connections to upstreams, pooled for the next request.
//!
//! HTTP/1.1: idle ones lie in a stack for each upstream, the last used on top, and belong to no task. The stream that takes
//! one drives it ([`PooledConnection`]), so a stream that ends takes its connection with it and no request changes tasks.
//! One that is dropped before it came to rest is reset (invariant 3). HTTP/2: connections are driven by tasks and shared
//! by streams, see [`UpstreamHttp2Pool`].

use super::{
    http2_pool::{Http2Sender, UpstreamHttp2Pool},
    request_body::{RequestBody, SendError},
    upstream::{UpstreamIo, UpstreamKey},
};
use bytes::Bytes;
use causeway_rt::socket::ResetOnClose;
use causeway_tunnel::request_target::TargetOverflow;
use causeway_upstream::{
    http1::{Answering, Http1Io, handshake, into_inner},
    pool::Pool,
    progress::while_moving,
};
use http_body::{Body as _, Frame};
use hyper::{Request, Response, body::Incoming, client::conn::http1};
use std::{
    future::{Future, poll_fn},
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{Arc, atomic::AtomicUsize},
    task::{Context, Poll, Waker},
    time::Duration,
};
use tokio::time::Instant;

/// One HTTP/1.1 connection, driven by the task that holds it.
pub(super) struct PooledConnection {
    driven: ConnectionDriver,
    sender: http1::SendRequest<RequestBody>,
    since: Instant,
    address: SocketAddr,
    /// A request is under way.
    busy: bool,
    /// Of its body.
    taken: Arc<AtomicUsize>,
    answering: Answering,
}

/// Pooled connections, by upstream.
pub(super) struct ConnectionPool {
    pool: Pool<UpstreamKey, PooledConnection, UpstreamHttp2Pool>,
    bound: Duration,
}

impl ConnectionPool {
    /// Keeps what is idle for `bound` at most.
    pub(super) fn new(bound: Duration) -> Self {
        Self {
            pool: Pool::default(),
            bound,
        }
    }

    /// The idle connection that was used last, if one is alive.
    pub(super) fn checkout(&self, app: &UpstreamKey) -> Option<PooledConnection> {
        self.pool.checkout(app, |line| line.is_alive(self.bound))
    }

    /// Keeps a connection, once it has come to rest.
    pub(super) async fn checkin(&self, app: UpstreamKey, mut line: PooledConnection) {
        if line.rests(self.bound).await {
            line.since = Instant::now();
            self.pool.checkin(app, line);
        }
    }

    /// How many HTTP/1 connections rest.
    #[cfg(test)]
    pub(super) fn idle(&self) -> usize {
        self.pool.idle()
    }

    /// Returns the upstream's shared connections.
    pub(super) fn shared(&self, app: &UpstreamKey) -> Arc<UpstreamHttp2Pool> {
        self.pool.shared(app)
    }

    /// Closes connections that were idle for too long, or were closed by their upstream.
    pub(super) fn evict_expired(&self) {
        let bound = self.bound;
        self.pool.sweep(
            |line| line.is_alive(bound),
            |shared| shared.sweep(bound, Http2Sender::is_alive),
        );
    }
}

/// A connection as hyper has it.
type Engine = http1::Connection<Http1Io<UpstreamIo>, RequestBody>;

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
        let begun = handshake(connection, rest, (most_fields, None)).await?;
        let (sender, connection, answering) = begun;
        Ok(Self {
            driven: ConnectionDriver {
                connection: Some(connection),
                over: false,
            },
            sender,
            since: Instant::now(),
            address,
            busy: false,
            taken: Arc::default(),
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
    ) -> Result<Response<Incoming>, SendError> {
        self.busy = true;
        self.taken = request.body().taken();
        self.answering.begin();
        let mut answer = pin!(self.sender.try_send_request(request));
        let driven = &mut self.driven;
        poll_fn(|cx| {
            // `answer` receives the error as well.
            let _ = driven.drive(cx);
            driven.feed(cx, |cx| answer.as_mut().poll(cx))
        })
        .await
    }

    /// Whether the upstream closed the connection without a byte of an answer to the last request, which failed with
    /// `error`.
    pub(super) fn closed_unanswered(&self, error: &hyper::Error) -> bool {
        self.answering.closed_unanswered(error)
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
            // hyper reports a clean end for a body whose connection failed; the error is returned instead.
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
        Ok(Some((parts.read_buf, into_inner(parts.io))))
    }

    /// Waits until the next request can be sent, for as long as the request's body moves. False if the connection ended
    /// instead. A body that the upstream does not read, or that its client does not send, has `bound` and no more than that
    /// again.
    async fn rests(&mut self, bound: Duration) -> bool {
        let Self { driven, sender, .. } = self;
        let rest = poll_fn(|cx| {
            if driven.drive(cx).is_err() || driven.over {
                return Poll::Ready(false);
            }
            sender.poll_ready(cx).map(|ready| ready.is_ok())
        });
        let rested = while_moving(bound, &self.taken, rest).await;
        self.busy = rested != Some(true);
        !self.busy
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
            into_inner(connection.into_parts().io).abort();
        }
    }
}
