//! Plain request to the upstream, and its response.
//!
//! An upstream with the scheme http receives HTTP/1.1. The exception is gRPC (`content-type: application/grpc`), which
//! requires HTTP/2 and uses prior knowledge. The scheme h2c always uses prior knowledge, and https uses the protocol that
//! ALPN selected. Header fields are passed on unchanged, except those of a single connection. Bodies are streamed in both
//! directions. A response that arrives before the request's body has been read is passed on at once. If a pooled connection
//! did not accept or answer a request, the request is sent once more on a new connection ([`Retry`]).

use super::{
    dial::{Connected, Dialer},
    http1_pool::{ConnectionPool, PooledConnection},
    http2_pool::{self, Http2Sender, UpstreamStreamPermit},
    informational::InformationalQueue,
    request_body::{RequestBody, SendError},
    response::{ResponseBody, ResponseTail, UpstreamResponse},
    upstream::{
        RequestError, Upstream, UpstreamIo, broken, caused_by_client, map_error, timeout_error,
    },
};
use crate::{config::Protocol, metrics::Metrics};
use causeway_rt::task::TaskGroup;
use causeway_tunnel::{
    RejectCode, StreamReceiver, error::is_close, headers, request_target::TargetOverflow,
};
use causeway_upstream::{connection::Alpn, head, http2_pool::Checkout, retry::Retry};
use futures_util::future::Either;
use http::{HeaderMap, Request, Response, StatusCode};
use hyper::body::Incoming;
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::time::Instant;

/// HTTP client for upstreams.
pub(super) struct UpstreamClient {
    pub(super) dialer: Dialer,
    pub(super) pool: ConnectionPool,
    /// Maximum time from the end of an upgrade's request to the response.
    pub(super) upgrade_bound: Duration,
    /// Maximum number of header fields in a response.
    pub(super) most_fields: usize,
    pub(super) metrics: Arc<Metrics>,
    /// Owner of the tasks that drive HTTP/2 connections.
    pub(super) tasks: Arc<TaskGroup>,
}

/// Connection that a request uses.
enum ConnectionInUse {
    Http1(Box<PooledConnection>),
    Http2(UpstreamStreamPermit),
}

/// Sends the request to the upstream. Takes its head and its body.
pub(super) async fn send_request(
    client: &UpstreamClient,
    upstream: &Arc<Upstream>,
    (head, body): (&mut Request<()>, &mut Option<StreamReceiver>),
    (informational, connected): (&InformationalQueue, &Connected),
) -> Result<UpstreamResponse, RequestError> {
    let wants_http2 = wants_http2(upstream, head.headers());
    let overflow = head.extensions().get::<TargetOverflow>().cloned();
    let body = body.take().filter(|body| !body.is_end());
    let mut request = std::mem::take(head).map(|()| RequestBody::new(body));
    informational.attach(&mut request);
    let (mut connection, reused) = match overflow {
        None => checkout_or_connect(client, upstream, wants_http2, None).await?,
        Some(rest) => (
            Box::pin(connect_exclusive(client, upstream, rest)).await?,
            false,
        ),
    };
    connected.set(connection.address());
    prepare_head(&mut request, upstream, &connection);
    let retry = Retry::new(&request, reused, request.body().is_some());
    let mut error = match connection.send(request).await {
        Ok(response) => return to_upstream_response(upstream, connection, response),
        Err(error) => error,
    };
    let retry_request = retry.request(&mut error, |error| connection.closed_unanswered(error));
    let Some(mut request) = retry_request else {
        return Err(request_error(upstream, &error));
    };
    if caused_by_client(error.error()) {
        return Err(RequestError::Client);
    }
    client.metrics.count_retry();
    let newest_id = connection.newest_id();
    drop(connection);
    let (mut asking, _) =
        checkout_or_connect(client, upstream, wants_http2, Some(newest_id)).await?;
    connected.set(asking.address());
    informational.attach(&mut request);
    prepare_head(&mut request, upstream, &asking);
    match asking.send(request).await {
        Ok(response) => to_upstream_response(upstream, asking, response),
        Err(error) => Err(request_error(upstream, &error)),
    }
}

impl ConnectionInUse {
    /// Sends the request. The future that waits for the response does not hold the request, which hyper takes at once.
    fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> impl Future<Output = Result<Response<Incoming>, SendError>> {
        match self {
            Self::Http1(connection) => Either::Left(connection.send_request(request)),
            Self::Http2(stream) => Either::Right(stream.send_request(request)),
        }
    }

    /// Returns the address that the connection was dialled to.
    fn address(&self) -> SocketAddr {
        match self {
            Self::Http1(connection) => connection.address(),
            Self::Http2(stream) => stream.address,
        }
    }

    /// Whether the upstream closed the connection without an answer to the request, which failed with `error`.
    fn closed_unanswered(&self, error: &hyper::Error) -> bool {
        match self {
            Self::Http1(connection) => connection.closed_unanswered(error),
            Self::Http2(_) => is_close(error),
        }
    }

    /// Returns the id of the newest shared connection, or 0 for an HTTP/1.1 connection, which is not shared.
    fn newest_id(&self) -> u64 {
        match self {
            Self::Http1(_) => 0,
            Self::Http2(stream) => stream.newest_id,
        }
    }
}

fn wants_http2(upstream: &Upstream, fields: &HeaderMap) -> bool {
    match upstream.scheme {
        Protocol::H2c | Protocol::Https => true,
        Protocol::Http | Protocol::Tcp => headers::is_grpc(fields),
    }
}

/// Returns a pooled connection and true, or a new one and false. With `after`, only a new connection is used, or a shared one
/// that is newer than this id.
async fn checkout_or_connect(
    client: &UpstreamClient,
    upstream: &Upstream,
    http2: bool,
    after: Option<u64>,
) -> Result<(ConnectionInUse, bool), RequestError> {
    let deadline = client.dialer.deadline();
    if http2
        && let Some(opened) = checkout_http2(client, upstream, after.unwrap_or(0), deadline).await?
    {
        return Ok(opened);
    }
    if after.is_none()
        && let Some(line) = client.pool.checkout(&upstream.id)
    {
        client.metrics.count_connection(true);
        return Ok((ConnectionInUse::Http1(line), true));
    }
    // Boxed, because most requests find an idle connection.
    let connection = Box::pin(client.dialer.connect(upstream, Alpn::Http1, deadline)).await?;
    client.metrics.count_connection(false);
    Ok((
        begin_http1(client, upstream, connection, None).await?,
        false,
    ))
}

/// Opens an HTTP/1.1 connection for a request whose target has this overflow.
async fn connect_exclusive(
    client: &UpstreamClient,
    upstream: &Upstream,
    overflow: TargetOverflow,
) -> Result<ConnectionInUse, RequestError> {
    if upstream.scheme == Protocol::H2c {
        let detail = "the request target is too long for HTTP/2, which is configured for this port";
        return Err(RejectCode::Malformed.with_detail(detail).into());
    }
    let deadline = client.dialer.deadline();
    let connection = client
        .dialer
        .connect(upstream, Alpn::Http1, deadline)
        .await?;
    client.metrics.count_connection(false);
    begin_http1(client, upstream, connection, Some(overflow)).await
}

/// Returns a stream on a shared HTTP/2 connection, or `None` if the upstream selected HTTP/1.1 before.
async fn checkout_http2(
    client: &UpstreamClient,
    upstream: &Upstream,
    after: u64,
    deadline: Instant,
) -> Result<Option<(ConnectionInUse, bool)>, RequestError> {
    let shared = client.pool.shared(&upstream.id);
    let checkout = shared.checkout_until(deadline, after, Http2Sender::is_alive);
    let _turn = match checkout
        .await
        .map_err(|what| timeout_error(upstream, what))?
    {
        Checkout::Http1 => return Ok(None),
        Checkout::Open(stream) => {
            client.metrics.count_connection(true);
            return Ok(Some((ConnectionInUse::Http2(stream.into()), true)));
        }
        Checkout::Dial(guard) => guard,
    };
    let connection = Box::pin(client.dialer.connect(upstream, Alpn::Any, deadline)).await?;
    client.metrics.count_connection(false);
    if upstream.tls.is_some() && !connection.0.chose_http2() {
        shared.set_http1();
        return Ok(Some((
            begin_http1(client, upstream, connection, None).await?,
            false,
        )));
    }
    let by = (&client.tasks, deadline);
    let stream = Box::pin(http2_pool::open(&shared, upstream, connection, by));
    Ok(Some((ConnectionInUse::Http2(stream.await?), false)))
}

/// Starts HTTP/1.1 on a connection.
async fn begin_http1(
    client: &UpstreamClient,
    upstream: &Upstream,
    connection: (UpstreamIo, SocketAddr),
    overflow: Option<TargetOverflow>,
) -> Result<ConnectionInUse, RequestError> {
    match PooledConnection::open(connection, overflow, client.most_fields).await {
        Ok(pooled) => Ok(ConnectionInUse::Http1(pooled)),
        Err(error) => Err(map_error(upstream, &error)),
    }
}

/// Converts the head for the HTTP version of the connection.
fn prepare_head(
    request: &mut Request<RequestBody>,
    upstream: &Upstream,
    connection: &ConnectionInUse,
) {
    if matches!(connection, ConnectionInUse::Http2(_)) {
        let scheme = if upstream.tls.is_some() {
            "https"
        } else {
            "http"
        };
        return head::to_http2(request, &upstream.target, scheme);
    }
    let has_body = request.body().is_some();
    head::to_http1(request, &upstream.target, has_body);
}

fn to_upstream_response(
    upstream: &Upstream,
    connection: ConnectionInUse,
    response: Response<Incoming>,
) -> Result<UpstreamResponse, RequestError> {
    let (head, incoming) = sanitize_head(upstream, response)?;
    if head.status() == StatusCode::SWITCHING_PROTOCOLS {
        return Err(broken(
            upstream,
            "switched protocols without a request to do so",
        ));
    }
    let body = match connection {
        ConnectionInUse::Http1(connection) => ResponseBody::http1(upstream, connection, incoming),
        ConnectionInUse::Http2(stream) => ResponseBody::http2(stream.permit, incoming),
    };
    Ok(UpstreamResponse {
        head,
        then: ResponseTail::Body(body),
    })
}

/// Returns the head that is sent through the tunnel: with normalized framing, without hop-by-hop fields, and without private
/// fields.
pub(super) fn sanitize_head(
    upstream: &Upstream,
    response: Response<Incoming>,
) -> Result<(Response<()>, Incoming), RequestError> {
    let (parts, incoming) = response.into_parts();
    let mut head = Response::new(());
    *head.status_mut() = parts.status;
    *head.headers_mut() = parts.headers;
    headers::normalize_response_framing(parts.status, head.headers_mut())
        .map_err(|what| broken(upstream, what))?;
    headers::strip_hop_by_hop(head.headers_mut());
    headers::strip_private(head.headers_mut());
    Ok((head, incoming))
}

fn request_error(upstream: &Upstream, error: &SendError) -> RequestError {
    map_error(upstream, error.error())
}
