//! Pool of idle connections to upstreams.
//!
//! HTTP/1.1: each upstream has a stack of idle connections, the last used on top. No task owns them. The stream that takes a
//! connection also drives it ([`PooledConnection`]). So the connection ends with a stream that is dropped, and no request
//! moves to another task. A connection that is dropped while it is busy is reset (invariant 3). HTTP/2: tasks drive the
//! connections, and streams share them, see [`UpstreamHttp2Pool`].

use super::{
    http2_pool::{Http2Sender, UpstreamHttp2Pool},
    request_body::{RequestBody, SendError},
    upstream::{UpstreamIo, UpstreamKey},
};
use bytes::Bytes;
use causeway_rt::socket::ResetOnClose;
use causeway_tunnel::request_target::TargetOverflow;
use causeway_upstream::{
    http1::{Answering, Http1Io, handshake, into_inner, while_moving},
    pool::Pool,
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

/// HTTP/1.1 connection that is driven by the task that holds it.
pub(super) struct PooledConnection {
    driver: ConnectionDriver,
    sender: http1::SendRequest<RequestBody>,
    idle_since: Instant,
    address: SocketAddr,
    /// Whether a request is in progress.
    is_busy: bool,
    /// Number of chunks of the request's body that hyper has taken.
    body_progress: Arc<AtomicUsize>,
    response_observer: Answering,
}

/// Pooled connections, by upstream.
pub(super) struct ConnectionPool {
    pool: Pool<UpstreamKey, Box<PooledConnection>, UpstreamHttp2Pool>,
    idle_timeout: Duration,
}

impl ConnectionPool {
    /// Creates a pool that keeps idle connections for `idle_timeout` at most.
    pub(super) fn new(idle_timeout: Duration) -> Self {
        Self {
            pool: Pool::default(),
            idle_timeout,
        }
    }

    /// Takes the idle connection that was used last, if there is one that is alive.
    pub(super) fn checkout(&self, key: &UpstreamKey) -> Option<Box<PooledConnection>> {
        self.pool
            .checkout(key, |connection| connection.is_alive(self.idle_timeout))
    }

    /// Returns a connection to the pool, once it is idle.
    pub(super) async fn checkin(&self, key: UpstreamKey, mut connection: Box<PooledConnection>) {
        if connection.wait_until_idle(self.idle_timeout).await {
            connection.idle_since = Instant::now();
            self.pool.checkin(key, connection);
        }
    }

    /// Returns the number of idle HTTP/1.1 connections.
    #[cfg(test)]
    pub(super) fn idle(&self) -> usize {
        self.pool.idle_count()
    }

    /// Returns the upstream's shared connections.
    pub(super) fn shared(&self, key: &UpstreamKey) -> Arc<UpstreamHttp2Pool> {
        self.pool.shared(key)
    }

    /// Closes connections that were idle for too long, or were closed by their upstream.
    pub(super) fn evict_expired(&self) {
        let idle_timeout = self.idle_timeout;
        self.pool.sweep(
            |connection| connection.is_alive(idle_timeout),
            |shared| shared.sweep(idle_timeout, Http2Sender::is_alive),
        );
    }
}

/// hyper's connection type.
type Engine = http1::Connection<Http1Io<UpstreamIo>, RequestBody>;

/// Driver of the hyper side of a pooled connection.
struct ConnectionDriver {
    /// Connection, or `None` once it was given up.
    connection: Option<Engine>,
    /// Whether the connection has finished. It must not be polled again, but may still hold bytes behind a 101.
    is_finished: bool,
}

impl ConnectionDriver {
    /// Drives the connection. Returns the error if the connection has failed.
    fn drive(&mut self, cx: &mut Context<'_>) -> hyper::Result<()> {
        match &mut self.connection {
            Some(connection) if !self.is_finished => match connection.poll_without_shutdown(cx) {
                Poll::Pending => Ok(()),
                Poll::Ready(ended) => {
                    self.is_finished = true;
                    ended
                }
            },
            _ => Ok(()),
        }
    }

    /// Polls `poll` while it drives the connection. If the connection has finished but `poll` is pending, drops the
    /// connection and polls again.
    fn poll_driven<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let polled = poll(cx);
        if polled.is_pending() && self.is_finished && self.connection.take().is_some() {
            return poll(cx);
        }
        polled
    }
}

impl PooledConnection {
    /// Starts HTTP/1.1 on a connection. `overflow` is the rest of the first request's target. A response may have at most
    /// `max_response_headers` fields. The result is boxed once, because each request moves it out of the pool and back.
    pub(super) async fn open(
        (connection, address): (UpstreamIo, SocketAddr),
        overflow: Option<TargetOverflow>,
        max_response_headers: usize,
    ) -> hyper::Result<Box<Self>> {
        let handshake_result =
            handshake(connection, overflow, (max_response_headers, None)).await?;
        let (sender, connection, answering) = handshake_result;
        Ok(Box::new(Self {
            driver: ConnectionDriver {
                connection: Some(connection),
                is_finished: false,
            },
            sender,
            idle_since: Instant::now(),
            address,
            is_busy: false,
            body_progress: Arc::default(),
            response_observer: answering,
        }))
    }

    /// Returns the address that the connection was dialled to.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sends the request, and returns the future that waits for the head of the response.
    pub(super) fn send_request(
        &mut self,
        request: Request<RequestBody>,
    ) -> impl Future<Output = Result<Response<Incoming>, SendError>> {
        self.is_busy = true;
        self.body_progress = request.body().chunks_taken();
        self.response_observer.reset();
        let response = self.sender.try_send_request(request);
        let driver = &mut self.driver;
        async move {
            let mut response = pin!(response);
            poll_fn(|cx| {
                // `response` receives the error as well.
                let _ = driver.drive(cx);
                driver.poll_driven(cx, |cx| response.as_mut().poll(cx))
            })
            .await
        }
    }

    /// Whether the upstream closed the connection before it sent any byte of a response to the last request, which failed
    /// with `error`.
    pub(super) fn closed_unanswered(&self, error: &hyper::Error) -> bool {
        self.response_observer.closed_unanswered(error)
    }

    /// Polls for the next frame of the response's body.
    pub(super) fn poll_frame(
        &mut self,
        incoming: &mut Incoming,
        cx: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let ended = self.driver.drive(cx);
        match self
            .driver
            .poll_driven(cx, |cx| Pin::new(&mut *incoming).poll_frame(cx))
        {
            // hyper reports a clean end for a body whose connection failed; the error is returned instead.
            Poll::Ready(None) => Poll::Ready(ended.err().map(Err)),
            polled => polled,
        }
    }

    /// Returns the connection of the switched protocol after a 101, with the bytes that followed the 101.
    pub(super) async fn into_upgraded(mut self) -> hyper::Result<Option<(Bytes, UpstreamIo)>> {
        let Some(connection) = self.driver.connection.take() else {
            return Ok(None);
        };
        let parts = if self.driver.is_finished {
            connection.into_parts()
        } else {
            connection.without_shutdown().await?
        };
        Ok(Some((parts.read_buf, into_inner(parts.io))))
    }

    /// Waits until the next request can be sent, as long as the request's body makes progress. Returns false if the
    /// connection has ended or the time is over. A body that the upstream does not read, or that its client does not send,
    /// has at most twice `timeout`.
    async fn wait_until_idle(&mut self, timeout: Duration) -> bool {
        let Self { driver, sender, .. } = self;
        let idle = poll_fn(|cx| {
            if driver.drive(cx).is_err() || driver.is_finished {
                return Poll::Ready(false);
            }
            sender.poll_ready(cx).map(|ready| ready.is_ok())
        });
        let is_ready = while_moving(timeout, &self.body_progress, idle).await;
        self.is_busy = is_ready != Some(true);
        !self.is_busy
    }

    /// Whether an idle connection can be used: not expired, and not closed by the upstream.
    fn is_alive(&mut self, idle_timeout: Duration) -> bool {
        let mut noop_context = Context::from_waker(Waker::noop());
        let is_open = self.driver.drive(&mut noop_context).is_ok() && !self.driver.is_finished;
        is_open && self.idle_since.elapsed() < idle_timeout && self.sender.is_ready()
    }
}

impl Drop for PooledConnection {
    /// Resets a busy connection, so that the upstream does not take an aborted request for a complete one.
    fn drop(&mut self) {
        if self.is_busy
            && let Some(connection) = self.driver.connection.take()
        {
            into_inner(connection.into_parts().io).abort();
        }
    }
}
