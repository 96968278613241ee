//! A plain request to the upstream, and its answer.
//!
//! An upstream of scheme http receives HTTP/1.1, except that gRPC (`content-type: application/grpc`) exists only over HTTP/2
//! and goes by prior knowledge; h2c is always prior knowledge; https uses the protocol that ALPN chose. Fields pass as they
//! came, save those of one connection; a body streams as it comes, both ways, and an answer that comes before the request's
//! body has been read passes at once. A request is sent once more, on a new connection, if the pooled connection did not
//! take it. So is one that can be repeated (RFC 9110 §9.2.2) and has no body, if the upstream closed the pooled connection
//! without a byte of an answer: a reset or garbage may be the effect of the request on the upstream.

use super::{
    Proxy, RequestError, ResponseTail, UpstreamResponse,
    body::{RequestBody, ResponseBody},
    broken,
    dial::{self, Connected},
    http1_pool::PooledConnection,
    http2_pool::{Checkout, UpstreamStreamPermit},
    informational::InformationalQueue,
    upstream::{Alpn, Upstream, UpstreamIo},
};
use crate::config::Protocol;
use causeway_tunnel::{
    RejectCode, StreamError, StreamReceiver, error::is_close, headers,
    request_target::TargetOverflow,
};
use http::{
    HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, Version,
    header::{CONNECTION, CONTENT_LENGTH, HOST, TE, TRANSFER_ENCODING},
    uri::{Authority, PathAndQuery},
};
use hyper::{body::Incoming, client::conn::TrySendError};
use std::{error::Error, net::SocketAddr, sync::Arc};
use tokio::time::{Instant, timeout_at};

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
    prepare(
        &mut request,
        app,
        matches!(asking, ConnectionInUse::Http2(_)),
    );
    let again = (reused && is_repeatable(&request)).then(|| copy(&request));
    let mut error = match asking.ask(request).await {
        Ok(answer) => return answered(app, asking, answer),
        Err(error) => error,
    };
    let unsent = reused.then(|| error.take_message()).flatten();
    let again = again.filter(|_| asking.closed_unanswered(error.error()));
    let Some(request) = unsent.or(again) else {
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
            Self::Http2(stream) => stream.address(),
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
            Self::Http2(stream) => stream.newest(),
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
    // Allocated: most requests find a connection that is kept.
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
        let detail =
            "the target of the request is too long for HTTP/2, which its port is configured for";
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
    let dialling = match timeout_at(deadline, shared.turn(after)).await {
        Ok(Checkout::Http1) => return Ok(None),
        Ok(Checkout::Open(stream)) => {
            way.metrics.connection(true);
            return Ok(Some((ConnectionInUse::Http2(stream), true)));
        }
        Ok(Checkout::Dial(dialling)) => dialling,
        Err(_) if shared.is_full() => {
            let what = "has as many streams as it allows, and none ended in time";
            return Err(dial::slow(app, what).into());
        }
        Err(_) => return Err(dial::slow(app, "did not take the connection in time").into()),
    };
    let connection = Box::pin(app.connect(way, Alpn::Any, deadline)).await?;
    way.metrics.connection(false);
    if app.tls.is_some() && !connection.0.chose_http2() {
        dialling.chose_http1();
        return Ok(Some((begin(way, app, connection, None).await?, false)));
    }
    let stream = Box::pin(dialling.begin(app, connection, (&way.tasks, deadline)));
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

/// Puts the head into the form of the upstream's HTTP version.
fn prepare(request: &mut Request<RequestBody>, app: &Upstream, http2: bool) {
    let path = request.uri().path_and_query().cloned();
    let path = path.unwrap_or_else(|| PathAndQuery::from_static("/"));
    let authority = request.uri().authority().cloned();
    if http2 {
        *request.version_mut() = Version::HTTP_2;
        let authority = headers::take_host(request.headers_mut()).or(authority);
        to_absolute(request, app, authority, path);
        return;
    }
    *request.version_mut() = Version::HTTP_11;
    to_origin(request.headers_mut(), app, authority.as_ref());
    *request.uri_mut() = Uri::from(path);
    let has_body = request.body().is_some();
    let fields = request.headers_mut();
    if has_body && !fields.contains_key(CONTENT_LENGTH) {
        // Said outright, since the engine takes it for granted that a GET has no body.
        fields.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    if fields.contains_key(TE) {
        // RFC 9110 §10.1.4.
        fields.insert(CONNECTION, HeaderValue::from_static("TE"));
    }
}

/// HTTP/2's pseudo-fields are made from an absolute URI.
fn to_absolute<B>(
    request: &mut Request<B>,
    app: &Upstream,
    authority: Option<Authority>,
    path: PathAndQuery,
) {
    let scheme = if app.tls.is_some() { "https" } else { "http" };
    let authority =
        authority.map_or_else(|| app.target.to_string(), |authority| authority.to_string());
    let uri = Uri::builder()
        .scheme(scheme)
        .authority(authority)
        .path_and_query(path);
    if let Ok(uri) = uri.build() {
        *request.uri_mut() = uri;
    }
}

/// Host and cookies as HTTP/1.1 has them.
pub(super) fn to_origin(fields: &mut HeaderMap, app: &Upstream, authority: Option<&Authority>) {
    headers::join_cookies(fields);
    if let Some(authority) = authority {
        headers::put_host(fields, authority);
    } else if !fields.contains_key(HOST)
        && let Ok(host) = HeaderValue::try_from(app.target.to_string())
    {
        headers::set_host(fields, host);
    }
}

fn is_repeatable(request: &Request<RequestBody>) -> bool {
    let idempotent = matches!(
        *request.method(),
        Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE | Method::PUT | Method::DELETE
    );
    idempotent && !request.body().is_some()
}

fn copy(request: &Request<RequestBody>) -> Request<RequestBody> {
    let mut copy = Request::new(RequestBody::default());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.version_mut() = request.version();
    *copy.headers_mut() = request.headers().clone();
    *copy.extensions_mut() = request.extensions().clone();
    copy
}

fn answered(
    app: &Upstream,
    asking: ConnectionInUse,
    answer: Response<Incoming>,
) -> Result<UpstreamResponse, RequestError> {
    let (head, incoming) = ended_head(app, answer)?;
    if head.status() == StatusCode::SWITCHING_PROTOCOLS {
        return Err(broken(
            app,
            "switched protocols, which nobody had asked for",
        ));
    }
    let body = match asking {
        ConnectionInUse::Http1(line) => ResponseBody::http1(app, line, incoming),
        ConnectionInUse::Http2(stream) => ResponseBody::http2(stream.into_place(), incoming),
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
    if error.is_parse_too_large() {
        let what = "answered with more fields than limits.max_headers of this edge allows, or with a head of more than 400 kB";
        return broken(app, what);
    }
    if error.is_parse() {
        return broken(app, &format!("answered what is not HTTP: {error}"));
    }
    if error.is_incomplete_message() || error.is_closed() {
        return broken(app, "closed the connection before it had answered");
    }
    let cause = error
        .source()
        .map_or_else(|| error.to_string(), ToString::to_string);
    broken(
        app,
        &format!("broke the connection before it had answered: {cause}"),
    )
}

fn caused_by_client(error: &hyper::Error) -> bool {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(each) = cause {
        if each.is::<StreamError>() {
            return true;
        }
        cause = each.source();
    }
    error.is_body_write_aborted()
}
