//! An upstream's HTTP/2 connections, which streams share ([`http2_pool`](causeway_tunnel::http2_pool)).
//!
//! A request that failed is repeated on a connection younger than the failure, and not on any that was there before: an
//! upstream that closed one of them may have closed them all.

use super::{
    RequestError,
    body::RequestBody,
    broken, dial,
    forward::{self, SendError},
    upstream::{Upstream, UpstreamIo},
};
use causeway_rt::task::{TaskExecutor, TaskGroup};
use causeway_tunnel::{
    http2_observer::observe,
    http2_pool::{self, Http2Pool, StreamPermit},
};
use hyper::{Request, Response, body::Incoming, client::conn::http2};
use hyper_util::rt::TokioIo;
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    sync::MutexGuard,
    time::{Instant, timeout_at},
};
use tracing::info_span;

/// Largest head of an answer, in bytes.
const MOST_HEAD: u32 = 256 << 10;
/// Bytes that an upstream may send ahead on one stream. The window of the whole connection is the largest that there is, so
/// that stalled streams do not block the others.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;

/// HTTP/2 connections of an upstream.
#[derive(Default)]
pub(super) struct UpstreamHttp2Pool(Http2Pool<Http2Sender>);

#[derive(Clone)]
struct Http2Sender(http2::SendRequest<RequestBody>, SocketAddr);

impl http2_pool::MultiplexedConnection for Http2Sender {
    fn has_place(&self, taken: usize, allowed: usize) -> bool {
        taken < allowed && self.0.is_ready()
    }
}

impl Http2Sender {
    fn is_alive(&self) -> bool {
        !self.0.is_closed()
    }
}

/// A stream that may be opened.
pub(super) struct UpstreamStreamPermit {
    sender: http2::SendRequest<RequestBody>,
    address: SocketAddr,
    place: Arc<StreamPermit>,
    newest: u64,
}

/// Result of a pool checkout.
pub(super) enum Checkout<'a> {
    /// The upstream speaks HTTP/1.1.
    Http1,
    /// There is a place.
    Open(UpstreamStreamPermit),
    /// This stream's, to dial.
    Dial(DialGuard<'a>),
}

/// The turn to dial.
pub(super) struct DialGuard<'a> {
    shared: &'a UpstreamHttp2Pool,
    _turn: MutexGuard<'a, ()>,
}

impl UpstreamHttp2Pool {
    /// Waits for a place on a connection with a number above `after`, or for the turn to dial one.
    pub(super) async fn turn(&self, after: u64) -> Checkout<'_> {
        match self.0.turn(after, Http2Sender::is_alive).await {
            http2_pool::Checkout::Http1 => Checkout::Http1,
            http2_pool::Checkout::Open(stream) => Checkout::Open(stream.into()),
            http2_pool::Checkout::Dial(turn) => Checkout::Dial(DialGuard {
                shared: self,
                _turn: turn,
            }),
        }
    }

    /// Whether no further connection may be dialled.
    pub(super) fn is_full(&self) -> bool {
        self.0.is_full()
    }

    /// Closes connections that the upstream closed, and those that no stream has needed for `bound`. Returns false if
    /// nothing is known any more.
    pub(super) fn sweep(&self, bound: Duration) -> bool {
        self.0.sweep(bound, Http2Sender::is_alive)
    }
}

impl From<http2_pool::StreamSlot<Http2Sender>> for UpstreamStreamPermit {
    fn from(stream: http2_pool::StreamSlot<Http2Sender>) -> Self {
        Self {
            sender: stream.connection.0,
            address: stream.connection.1,
            place: Arc::new(stream.place),
            newest: stream.newest,
        }
    }
}

impl UpstreamStreamPermit {
    /// Asks, and waits for the answer's head.
    pub(super) async fn ask(
        &mut self,
        mut request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, SendError> {
        // The app may answer before it has read the body, which goes on being sent.
        request.body_mut().hold(self.place.clone());
        self.sender.try_send_request(request).await
    }

    /// Returns the address that the connection was dialled to.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The youngest connection that there was.
    pub(super) fn newest(&self) -> u64 {
        self.newest
    }

    pub(super) fn into_place(self) -> Arc<StreamPermit> {
        self.place
    }
}

impl DialGuard<'_> {
    /// Records that the upstream chose HTTP/1.1.
    pub(super) fn chose_http1(self) {
        self.shared.0.chose_http1();
    }

    /// Begins HTTP/2 on a connection, which a task of `tasks` drives, and opens the first stream.
    pub(super) async fn begin(
        self,
        app: &Upstream,
        (connection, address): (UpstreamIo, SocketAddr),
        (tasks, deadline): (&Arc<TaskGroup>, Instant),
    ) -> Result<UpstreamStreamPermit, RequestError> {
        let (heard, mut allowed) = observe(connection);
        let (sender, connection) =
            http2::Builder::new(TaskExecutor::new(tasks.clone(), || info_span!("app")))
                .initial_stream_window_size(STREAM_WINDOW)
                // As much as a tunnel carries; the engine's own limit is 16 KiB.
                .max_header_list_size(MOST_HEAD)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .handshake(TokioIo::new(heard))
                .await
                .map_err(|error| forward::map_error(app, &error))?;
        tasks.spawn(info_span!("app"), async move {
            // How it ended reaches each of its streams.
            let _ = connection.await;
        });
        // An app's SETTINGS are the first that it says (RFC 9113 §3.4).
        match timeout_at(deadline, allowed.wait_for(Option::is_some)).await {
            Ok(Ok(_)) => {}
            Ok(Err(_)) => return Err(broken(app, "ended the connection or does not speak HTTP/2")),
            Err(_) => return Err(dial::slow(app, "did not begin HTTP/2 in time").into()),
        }
        let places = &self.shared.0;
        Ok(places
            .add(places.next(), Http2Sender(sender, address), allowed)
            .into())
    }
}
