//! HTTP/2 connections of an upstream, which streams share ([`causeway_upstream::http2_pool`]).
//!
//! A failed request is repeated only on a connection that is newer than the failure. If an upstream closed one of its earlier
//! connections, it may have closed all of them.

use super::{
    request_body::{RequestBody, SendError},
    upstream::{RequestError, Upstream, UpstreamIo, broken, map_error, timeout_error},
};
use causeway_rt::task::{TaskExecutor, TaskGroup};
use causeway_upstream::{
    http2_observer::observe,
    http2_pool::{self, Http2Pool, StreamPermit},
};
use hyper::{Request, Response, body::Incoming, client::conn::http2};
use hyper_util::rt::TokioIo;
use std::{net::SocketAddr, sync::Arc};
use tokio::time::{Instant, timeout_at};
use tracing::info_span;

/// Maximum size of a response's head, in bytes.
const MAX_RESPONSE_HEAD: u32 = 256 << 10;
/// Number of bytes that an upstream may send on one stream before they are read. The connection's window is the largest
/// possible one, so that stalled streams do not block the others.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;

/// HTTP/2 connections of an upstream.
pub(super) type UpstreamHttp2Pool = Http2Pool<Http2Sender>;

#[derive(Clone)]
pub(super) struct Http2Sender(http2::SendRequest<RequestBody>, SocketAddr);

impl http2_pool::MultiplexedConnection for Http2Sender {
    fn has_capacity(&self, taken: usize, allowed: usize) -> bool {
        taken < allowed && self.0.is_ready()
    }
}

impl Http2Sender {
    pub(super) fn is_alive(&self) -> bool {
        !self.0.is_closed()
    }
}

/// Permit to open one stream.
pub(super) struct UpstreamStreamPermit {
    sender: http2::SendRequest<RequestBody>,
    /// Address that the connection was dialled to.
    pub(super) address: SocketAddr,
    pub(super) permit: Arc<StreamPermit>,
    /// Id of the newest connection at that time.
    pub(super) newest_id: u64,
}

impl From<http2_pool::StreamSlot<Http2Sender>> for UpstreamStreamPermit {
    fn from(stream: http2_pool::StreamSlot<Http2Sender>) -> Self {
        Self {
            sender: stream.connection.0,
            address: stream.connection.1,
            permit: Arc::new(stream.permit),
            newest_id: stream.newest_id,
        }
    }
}

impl UpstreamStreamPermit {
    /// Sends the request and waits for the head of the response.
    pub(super) fn send_request(
        &mut self,
        mut request: Request<RequestBody>,
    ) -> impl Future<Output = Result<Response<Incoming>, SendError>> + use<> {
        // The upstream may respond before it has read the body, which is still being sent.
        request.body_mut().hold_permit(self.permit.clone());
        self.sender.try_send_request(request)
    }
}

/// Starts HTTP/2 on a connection, which a task of `tasks` drives, and takes a permit for the first stream.
pub(super) async fn open(
    shared: &UpstreamHttp2Pool,
    upstream: &Upstream,
    (connection, address): (UpstreamIo, SocketAddr),
    (tasks, deadline): (&Arc<TaskGroup>, Instant),
) -> Result<UpstreamStreamPermit, RequestError> {
    let (observed, mut max_streams) = observe(connection);
    let (sender, connection) =
        http2::Builder::new(TaskExecutor::new(tasks.clone(), || info_span!("app")))
            .initial_stream_window_size(STREAM_WINDOW)
            // The same limit as in a tunnel; hyper's default is 16 KiB.
            .max_header_list_size(MAX_RESPONSE_HEAD)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .handshake(TokioIo::new(observed))
            .await
            .map_err(|error| map_error(upstream, &error))?;
    tasks.spawn(info_span!("app"), async move {
        // Each stream receives the error.
        let _ = connection.await;
    });
    // SETTINGS is the first frame of a server (RFC 9113 §3.4).
    match timeout_at(deadline, max_streams.wait_for(Option::is_some)).await {
        Ok(Ok(_)) => {}
        Ok(Err(_)) => {
            return Err(broken(
                upstream,
                "closed the connection or does not support HTTP/2",
            ));
        }
        Err(_) => return Err(timeout_error(upstream, "did not start HTTP/2 in time").into()),
    }
    let id = shared.allocate_id();
    let stream = shared.insert(id, Http2Sender(sender, address), max_streams);
    Ok(stream.into())
}
