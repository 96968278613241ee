//! A plain request to the upstream, and its answer.
//!
//! An upstream of scheme http receives HTTP/1.1, except that gRPC (`content-type: application/grpc`) exists only over HTTP/2
//! and goes by prior knowledge; h2c is always prior knowledge; https uses the protocol that ALPN chose. Fields pass as they
//! came, save those of one connection; a body streams as it comes, both ways, and an answer that comes before the request's
//! body has been read passes at once. A request that a pooled connection did not take, or did not answer, is sent once more
//! on a new connection ([`Retry`]).

use super::{
    Proxy, RequestError, ResponseTail, UpstreamResponse,
    body::{RequestBody, ResponseBody},
    broken,
    dial::{self, Connected},
    http1_pool::PooledConnection,
    http2_pool::{self, Http2Sender, UpstreamStreamPermit},
    informational::InformationalQueue,
    upstream::{Upstream, UpstreamIo},
};
use crate::config::Protocol;
use causeway_tunnel::{
    RejectCode, StreamError, StreamReceiver, error::is_close, headers,
    request_target::TargetOverflow,
};
use causeway_upstream::{
    alpn::Alpn,
    head,
    http2_pool::Checkout,
    response_error::{describe, find},
    retry::Retry,
};
use http::{HeaderMap, Request, Response, StatusCode};
use hyper::{body::Incoming, client::conn::TrySendError};
use std::{net::SocketAddr, sync::Arc};
use tokio::time::Instant;

/// A connection to ask on.
enum ConnectionInUse {
    Http1(Box<PooledConnection>),
    Http2(UpstreamStreamPermit),
}

pub(super) type SendError = TrySendError<Request<RequestBody>>;

/// Sends the request to the upstream.
pub(super) async fn send_request(
    way: &Proxy,
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
        None => open(way, app, wants_http2, None).await?,
        Some(rest) => (Box::pin(open_alone(way, app, rest)).await?, false),
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
    way.metrics.retried();
    let newest = asking.newest();
    drop(asking);
    let (mut asking, _) = open(way, app, wants_http2, Some(newest)).await?;
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
    way: &Proxy,
    app: &Upstream,
    http2: bool,
    after: Option<u64>,
) -> Result<(ConnectionInUse, bool), RequestError> {
    let deadline = dial::deadline(way.timeouts.dial);
    if http2 && let Some(opened) = open_http2(way, app, after.unwrap_or(0), deadline).await? {
        return Ok(opened);
    }
    if after.is_none()
        && let Some(line) = way.kept.checkout(&app.id)
    {
        way.metrics.connection(true);
        return Ok((ConnectionInUse::Http1(Box::new(line)), true));
    }
    // Boxed, because most requests find an idle connection.
    let connection = Box::pin(app.connect(way, Alpn::Http1, deadline)).await?;
    way.metrics.connection(false);
    Ok((begin(way, app, connection, None).await?, false))
}

/// A new connection of HTTP/1.1 for a request with this rest of its target.
async fn open_alone(
    way: &Proxy,
    app: &Upstream,
    rest: TargetOverflow,
) -> Result<ConnectionInUse, RequestError> {
    if app.scheme == Protocol::H2c {
        let detail = "the request target is too long for HTTP/2, which is configured for this port";
        return Err(RejectCode::Malformed.because(detail).into());
    }
    let deadline = dial::deadline(way.timeouts.dial);
    let connection = app.connect(way, Alpn::Http1, deadline).await?;
    way.metrics.connection(false);
    begin(way, app, connection, Some(rest)).await
}

/// Returns a place on a shared HTTP/2 connection; `None` if the upstream chose HTTP/1.1 before.
async fn open_http2(
    way: &Proxy,
    app: &Upstream,
    after: u64,
    deadline: Instant,
) -> Result<Option<(ConnectionInUse, bool)>, RequestError> {
    let shared = way.kept.shared(&app.id);
    let turn = shared.turn_until(deadline, after, Http2Sender::is_alive);
    let _turn = match turn.await.map_err(|what| dial::slow(app, what))? {
        Checkout::Http1 => return Ok(None),
        Checkout::Open(stream) => {
            way.metrics.connection(true);
            return Ok(Some((ConnectionInUse::Http2(stream.into()), true)));
        }
        Checkout::Dial(turn) => turn,
    };
    let connection = Box::pin(app.connect(way, Alpn::Any, deadline)).await?;
    way.metrics.connection(false);
    if app.tls.is_some() && !connection.0.chose_http2() {
        shared.chose_http1();
        return Ok(Some((begin(way, app, connection, None).await?, false)));
    }
    let by = (&way.tasks, deadline);
    let stream = Box::pin(http2_pool::begin(&shared, app, connection, by));
    Ok(Some((ConnectionInUse::Http2(stream.await?), false)))
}

/// Begins HTTP/1.1 on a connection.
async fn begin(
    way: &Proxy,
    app: &Upstream,
    connection: (UpstreamIo, SocketAddr),
    rest: Option<TargetOverflow>,
) -> Result<ConnectionInUse, RequestError> {
    match PooledConnection::begin(connection, rest, way.most_fields).await {
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

/// Returns why the upstream did not answer, or the client did not complete its request.
pub(super) fn map_error(app: &Upstream, error: &hyper::Error) -> RequestError {
    if caused_by_client(error) {
        return RequestError::Client;
    }
    let bounds = "more fields than limits.max_headers of this edge allows, or with a head of more than 400 kB";
    broken(app, &describe(error, "before it sent a response", bounds))
}

fn caused_by_client(error: &hyper::Error) -> bool {
    find::<StreamError>(error).is_some() || error.is_body_write_aborted()
}
