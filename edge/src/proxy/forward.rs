//! A plain request to the upstream, and its answer.
//!
//! An upstream of scheme http receives HTTP/1.1, except that gRPC (`content-type: application/grpc`) exists only over HTTP/2
//! and goes by prior knowledge; h2c is always prior knowledge; https uses the protocol that ALPN chose. Fields pass as they
//! came, save those of one connection; a body streams as it comes, both ways, and an answer that comes before the request's
//! body has been read passes at once. A request that a pooled connection did not take, or did not answer, is sent once more
//! on a new connection ([`Retry`]).

use super::{
    dial::{Connected, Dialer},
    http1_pool::{ConnectionPool, PooledConnection},
    http2_pool::{self, Http2Sender, UpstreamStreamPermit},
    informational::InformationalQueue,
    request_body::{RequestBody, SendError},
    response::{ResponseBody, ResponseTail, UpstreamResponse},
    upstream::{RequestError, Upstream, UpstreamIo, broken, caused_by_client, map_error, slow},
};
use crate::{config::Protocol, metrics::Metrics};
use causeway_rt::task::TaskGroup;
use causeway_tunnel::{
    RejectCode, StreamReceiver, error::is_close, headers, request_target::TargetOverflow,
};
use causeway_upstream::{alpn::Alpn, head, http2_pool::Checkout, retry::Retry};
use http::{HeaderMap, Request, Response, StatusCode};
use hyper::body::Incoming;
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::time::Instant;

/// The client of upstreams.
pub(super) struct UpstreamClient {
    pub(super) dialer: Dialer,
    pub(super) kept: ConnectionPool,
    /// Maximum time from the end of an upgrade's request to the answer.
    pub(super) upgrade_bound: Duration,
    /// Fields of an answer at most.
    pub(super) most_fields: usize,
    pub(super) metrics: Arc<Metrics>,
    /// Owner of the tasks that drive HTTP/2 connections.
    pub(super) tasks: Arc<TaskGroup>,
}

/// A connection to ask on.
enum ConnectionInUse {
    Http1(Box<PooledConnection>),
    Http2(UpstreamStreamPermit),
}

/// Sends the request to the upstream.
pub(super) async fn send_request(
    client: &UpstreamClient,
    app: &Arc<Upstream>,
    (head, body): (Request<()>, StreamReceiver),
    (interim, connected): (&InformationalQueue, &Connected),
) -> Result<UpstreamResponse, RequestError> {
    let wants_http2 = wants_http2(app, head.headers());
    let rest = head.extensions().get::<TargetOverflow>().cloned();
    let body = (!body.is_end()).then_some(body);
    let mut request = head.map(|()| RequestBody::new(body));
    interim.listen(&mut request);
    let (mut asking, reused) = match rest {
        None => open(client, app, wants_http2, None).await?,
        Some(rest) => (Box::pin(open_alone(client, app, rest)).await?, false),
    };
    connected.set(asking.address());
    prepare(&mut request, app, &asking);
    let retry = Retry::new(&request, reused, request.body().is_some());
    let mut error = match asking.ask(request).await {
        Ok(answer) => return answered(app, asking, answer),
        Err(error) => error,
    };
    let again = retry.request(&mut error, |error| asking.closed_unanswered(error));
    let Some(mut request) = again else {
        return Err(unanswered(app, &error));
    };
    if caused_by_client(error.error()) {
        return Err(RequestError::Client);
    }
    client.metrics.retried();
    let newest = asking.newest();
    drop(asking);
    let (mut asking, _) = open(client, app, wants_http2, Some(newest)).await?;
    connected.set(asking.address());
    prepare(&mut request, app, &asking);
    match asking.ask(request).await {
        Ok(answer) => answered(app, asking, answer),
        Err(error) => Err(unanswered(app, &error)),
    }
}

impl ConnectionInUse {
    async fn ask(
        &mut self,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, SendError> {
        match self {
            Self::Http1(line) => line.ask(request).await,
            Self::Http2(stream) => stream.ask(request).await,
        }
    }

    /// Returns the address that the connection was dialled to.
    fn address(&self) -> SocketAddr {
        match self {
            Self::Http1(line) => line.address(),
            Self::Http2(stream) => stream.address,
        }
    }

    /// Whether the upstream closed the connection without an answer to the request, which failed with `error`.
    fn closed_unanswered(&self, error: &hyper::Error) -> bool {
        match self {
            Self::Http1(line) => line.closed_unanswered(error),
            Self::Http2(_) => is_close(error),
        }
    }

    /// The youngest of the connections that may be used again, if this is one of them.
    fn newest(&self) -> u64 {
        match self {
            Self::Http1(_) => 0,
            Self::Http2(stream) => stream.newest,
        }
    }
}

fn wants_http2(app: &Upstream, fields: &HeaderMap) -> bool {
    match app.scheme {
        Protocol::H2c | Protocol::Https => true,
        Protocol::Http | Protocol::Tcp => headers::is_grpc(fields),
    }
}

/// Returns a pooled connection and true, or a new one and false. With `after`, only a shared connection that was dialled
/// later than that one will do.
async fn open(
    client: &UpstreamClient,
    app: &Upstream,
    http2: bool,
    after: Option<u64>,
) -> Result<(ConnectionInUse, bool), RequestError> {
    let deadline = client.dialer.deadline();
    if http2 && let Some(opened) = open_http2(client, app, after.unwrap_or(0), deadline).await? {
        return Ok(opened);
    }
    if after.is_none()
        && let Some(line) = client.kept.checkout(&app.id)
    {
        client.metrics.connection(true);
        return Ok((ConnectionInUse::Http1(Box::new(line)), true));
    }
    // Boxed, because most requests find an idle connection.
    let connection = Box::pin(client.dialer.connect(app, Alpn::Http1, deadline)).await?;
    client.metrics.connection(false);
    Ok((begin(client, app, connection, None).await?, false))
}

/// A new connection of HTTP/1.1 for a request with this rest of its target.
async fn open_alone(
    client: &UpstreamClient,
    app: &Upstream,
    rest: TargetOverflow,
) -> Result<ConnectionInUse, RequestError> {
    if app.scheme == Protocol::H2c {
        let detail = "the request target is too long for HTTP/2, which is configured for this port";
        return Err(RejectCode::Malformed.because(detail).into());
    }
    let deadline = client.dialer.deadline();
    let connection = client.dialer.connect(app, Alpn::Http1, deadline).await?;
    client.metrics.connection(false);
    begin(client, app, connection, Some(rest)).await
}

/// Returns a place on a shared HTTP/2 connection; `None` if the upstream chose HTTP/1.1 before.
async fn open_http2(
    client: &UpstreamClient,
    app: &Upstream,
    after: u64,
    deadline: Instant,
) -> Result<Option<(ConnectionInUse, bool)>, RequestError> {
    let shared = client.kept.shared(&app.id);
    let turn = shared.turn_until(deadline, after, Http2Sender::is_alive);
    let _turn = match turn.await.map_err(|what| slow(app, what))? {
        Checkout::Http1 => return Ok(None),
        Checkout::Open(stream) => {
            client.metrics.connection(true);
            return Ok(Some((ConnectionInUse::Http2(stream.into()), true)));
        }
        Checkout::Dial(turn) => turn,
    };
    let connection = Box::pin(client.dialer.connect(app, Alpn::Any, deadline)).await?;
    client.metrics.connection(false);
    if app.tls.is_some() && !connection.0.chose_http2() {
        shared.chose_http1();
        return Ok(Some((begin(client, app, connection, None).await?, false)));
    }
    let by = (&client.tasks, deadline);
    let stream = Box::pin(http2_pool::begin(&shared, app, connection, by));
    Ok(Some((ConnectionInUse::Http2(stream.await?), false)))
}

/// Begins HTTP/1.1 on a connection.
async fn begin(
    client: &UpstreamClient,
    app: &Upstream,
    connection: (UpstreamIo, SocketAddr),
    rest: Option<TargetOverflow>,
) -> Result<ConnectionInUse, RequestError> {
    match PooledConnection::begin(connection, rest, client.most_fields).await {
        Ok(line) => Ok(ConnectionInUse::Http1(Box::new(line))),
        Err(error) => Err(map_error(app, &error)),
    }
}

/// Puts the head into the form of the connection's HTTP version.
fn prepare(request: &mut Request<RequestBody>, app: &Upstream, asking: &ConnectionInUse) {
    if matches!(asking, ConnectionInUse::Http2(_)) {
        let scheme = if app.tls.is_some() { "https" } else { "http" };
        return head::to_http2(request, &app.target, scheme);
    }
    let has_body = request.body().is_some();
    head::to_http1(request, &app.target, has_body);
}

fn answered(
    app: &Upstream,
    asking: ConnectionInUse,
    answer: Response<Incoming>,
) -> Result<UpstreamResponse, RequestError> {
    let (head, incoming) = ended_head(app, answer)?;
    if head.status() == StatusCode::SWITCHING_PROTOCOLS {
        return Err(broken(app, "switched protocols without a request to do so"));
    }
    let body = match asking {
        ConnectionInUse::Http1(line) => ResponseBody::http1(app, line, incoming),
        ConnectionInUse::Http2(stream) => ResponseBody::http2(stream.place, incoming),
    };
    Ok(UpstreamResponse {
        head,
        then: ResponseTail::Body(Box::new(body)),
    })
}

/// The head as it travels: framed anew, without the fields of one connection, and without private ones.
pub(super) fn ended_head(
    app: &Upstream,
    answer: Response<Incoming>,
) -> Result<(Response<()>, Incoming), RequestError> {
    let (parts, incoming) = answer.into_parts();
    let mut head = Response::new(());
    *head.status_mut() = parts.status;
    *head.headers_mut() = parts.headers;
    headers::reframe_answer(parts.status, head.headers_mut()).map_err(|what| broken(app, what))?;
    headers::strip_hop_by_hop(head.headers_mut());
    headers::strip_private(head.headers_mut());
    Ok((head, incoming))
}

fn unanswered(app: &Upstream, error: &SendError) -> RequestError {
    map_error(app, error.error())
}
