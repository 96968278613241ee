//! Forwarding of a plain request to an upstream with which the gateway itself speaks HTTP.
//!
//! The request uses HTTP/2 if the upstream chose it, else HTTP/1.1. As at an edge, fields pass unchanged, except those of one
//! connection. A body is streamed in both directions. A response that comes before the request's body has been read passes at
//! once. A request that a pooled connection did not accept or answer is sent once more on a new connection ([`Retry`]).
//!
//! Over HTTP/2 the head is sent first and the body after it in its own task. A client that disconnects resets the stream. A
//! request that the upstream has not accepted is sent once more on a younger connection. An upstream that closed one connection
//! may have closed all older ones. The same applies to a repeatable request (RFC 9110 §9.2.2) without a body, if the upstream
//! closed the connection normally without a response.

use super::{
    connect::{UpstreamConnection, pool_key},
    error, http1, http2, pin,
    pool::{Http1Connection, InUse, UpstreamStreamPermit},
    request_body::UpstreamRequestBody,
    response_body::UpstreamResponseBody,
    tls::UpstreamTls,
};
use crate::{
    error::Error,
    proxy::{
        context::StreamContext, forward, request, request_body::RequestBody,
        response_body::ResponseBody, response_head,
    },
};
use causeway_tunnel::{StreamError, StreamReceiver, headers, request_target::TargetOverflow, wire};
use causeway_upstream::{
    connection::Alpn,
    head,
    http2_pool::{Checkout, StreamPermit},
    retry::{Retry, is_idempotent},
};
use http::{Request, Response, StatusCode, Version, header::EXPECT};
use http_body::Body;
use hyper::body::Incoming;
use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering::Relaxed},
};
use tokio::sync::oneshot;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Parts of a request after its head.
struct RequestParts {
    body: RequestBody,
    /// HTTP version of the client.
    version: Version,
    /// Whether the client waits for a 100.
    expects: bool,
}

/// Connection on which a request is sent. The bool is true if the connection was used before.
enum ConnectionChoice {
    /// HTTP/1.1 connection.
    Http1(InUse, bool),
    /// HTTP/2 stream.
    Http2(UpstreamStreamPermit, bool),
}

/// Forwards a plain request.
///
/// # Errors
/// If there is no connection to the upstream, or the connection breaks before the head of the response.
pub(in crate::proxy) async fn forward_request(
    ctx: StreamContext<'_>,
    upstream_tls: &Arc<UpstreamTls>,
    request: Request<RequestBody>,
) -> Result<Response<ResponseBody>, Error> {
    let (parts, body) = request.into_parts();
    let content = RequestParts {
        body,
        version: parts.version,
        expects: headers::contains_token(&parts.headers, &EXPECT, "100-continue"),
    };
    let mut head = forward::build_head(ctx, parts)?;
    upstream_tls.strip_authorization(head.headers_mut());
    if let Some(overflow) = head.extensions().get::<TargetOverflow>().cloned() {
        let connection = Box::pin(Http1Connection::open(ctx, upstream_tls, Some(overflow))).await?;
        return by_line(
            ctx,
            upstream_tls,
            (head, content),
            (connection.into_in_use(), false),
        )
        .await;
    }
    match choose(ctx, upstream_tls, 0).await? {
        ConnectionChoice::Http1(in_use, reused) => {
            by_line(ctx, upstream_tls, (head, content), (in_use, reused)).await
        }
        ConnectionChoice::Http2(stream, reused) => {
            by_stream(ctx, upstream_tls, (head, content), (stream, reused)).await
        }
    }
}

/// Chooses an idle connection, a stream of an open connection, or a new connection of either version. With a nonzero
/// `after_number`, a shared connection is used only if it was dialled later than the one with that number.
async fn choose(
    ctx: StreamContext<'_>,
    upstream_tls: &Arc<UpstreamTls>,
    after_number: u64,
) -> Result<ConnectionChoice, Error> {
    let (pool, key) = (
        ctx.proxy.shared.upstream_tls_ports.pool(),
        pool_key(ctx, upstream_tls),
    );
    while after_number == 0
        && let Some(connection) = pool
            .worker_pool(&key)
            .checkout(&key, |line| line.is_alive())
    {
        let believed = pin::holds(upstream_tls.pins(), ctx.route, connection.life.key);
        // Dropping an untrusted connection resets it, and the next request opens a new one.
        let in_use = connection.into_in_use();
        if believed {
            return Ok(ConnectionChoice::Http1(in_use, true));
        }
    }
    let upstream_state = pool.worker_pool(&key).shared(&key);
    let _dial_turn = match http2::checkout(&upstream_state, ctx, upstream_tls, after_number).await?
    {
        Checkout::Open(stream) => return Ok(ConnectionChoice::Http2(stream, true)),
        Checkout::Http1 => None,
        Checkout::Dial(turn) => Some(turn),
    };
    // Boxed, since most requests find a connection and the future is moved with each request.
    Box::pin(async {
        let connection = UpstreamConnection::open(ctx, upstream_tls, Alpn::Any).await?;
        if connection.chose_http2() {
            let stream = http2::start_http2(&upstream_state, ctx, upstream_tls, connection).await?;
            return Ok(ConnectionChoice::Http2(stream, false));
        }
        upstream_state.set_http1();
        let line = Http1Connection::begin(ctx, upstream_tls, connection, None).await?;
        Ok(ConnectionChoice::Http1(line.into_in_use(), false))
    })
    .await
}

/// Sends the request on an HTTP/1.1 connection, and once more on a new one if the connection was used before.
async fn by_line(
    ctx: StreamContext<'_>,
    upstream_tls: &Arc<UpstreamTls>,
    (mut head, content): (Request<()>, RequestParts),
    (mut in_use, reused): (InUse, bool),
) -> Result<Response<ResponseBody>, Error> {
    let RequestParts {
        body,
        version,
        expects,
    } = content;
    let has_body = !body.is_end_stream();
    head::to_http1(&mut head, &ctx.route.target, has_body);
    let retry = Retry::new(&head, reused, has_body);
    let (release_sender, release_receiver) = oneshot::channel();
    let body = match in_use.conn_state() {
        Some(conn_state) if has_body => {
            let upload = forward::counted(ctx, (body, version), conn_state.waiting.clone());
            UpstreamRequestBody::new(upload, conn_state, expects.then_some(release_receiver))
        }
        _ => UpstreamRequestBody::default(),
    };
    let mut request = head.map(|()| body);
    forward_informational_responses(ctx, &mut request, &in_use, Some(release_sender));
    let mut error = match in_use.send_request(request).await {
        Ok(answer) => return respond_to_request(ctx, in_use, answer),
        Err(error) => error,
    };
    let retried = retry.request(&mut error, |error| {
        in_use.was_closed_without_response(error)
    });
    let Some(request) = retried else {
        return Err(no_response_error(ctx, &in_use, error.error()));
    };
    drop(in_use);
    let connection = Box::pin(Http1Connection::open(ctx, upstream_tls, None)).await?;
    let mut request = request.map(|body| body.on_connection(&connection.life));
    let mut in_use = connection.into_in_use();
    // A body waits for a 100 only until its own timeout.
    forward_informational_responses(ctx, &mut request, &in_use, None);
    match in_use.send_request(request).await {
        Ok(answer) => respond_to_request(ctx, in_use, answer),
        Err(error) => Err(no_response_error(ctx, &in_use, error.error())),
    }
}

/// Forwards interim responses. A 100 releases the body, and too many interim responses end the connection.
pub(super) fn forward_informational_responses(
    ctx: StreamContext<'_>,
    request: &mut Request<UpstreamRequestBody>,
    in_use: &InUse,
    release: Option<oneshot::Sender<()>>,
) {
    let Some(conn_state) = in_use.conn_state() else {
        return;
    };
    let (end, informational_count) = (conn_state.cancel_token.clone(), AtomicUsize::new(0));
    let (connection, exchange) = (ctx.connection.clone(), ctx.exchange);
    let go = Mutex::new(release);
    hyper::ext::on_informational(request, move |answer| {
        // A cancelled exchange already has its response.
        if !end.is_cancelled() {
            response_head::forward_informational(
                &connection,
                exchange,
                answer.status(),
                answer.headers(),
            );
        }
        if answer.status() == StatusCode::CONTINUE
            && let Some(go) = go.lock().unwrap_or_else(PoisonError::into_inner).take()
        {
            // The send fails if the body has ended.
            let _ = go.send(());
        }
        if informational_count.fetch_add(1, Relaxed) >= wire::MAX_INTERIM_RESPONSES {
            end.cancel();
        }
    });
}

fn respond_to_request(
    ctx: StreamContext<'_>,
    in_use: InUse,
    answer: Response<Incoming>,
) -> Result<Response<ResponseBody>, Error> {
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        let what = "switched protocols without a request to do so";
        return Err(error::broken_upstream(ctx.route, what));
    }
    respond_http1(ctx, in_use, answer)
}

/// Returns the whole response of an HTTP/1.1 connection.
pub(super) fn respond_http1(
    ctx: StreamContext<'_>,
    in_use: InUse,
    answer: Response<Incoming>,
) -> Result<Response<ResponseBody>, Error> {
    let (mut parts, incoming) = answer.into_parts();
    check_response_head(ctx, &mut parts)?;
    let body = UpstreamResponseBody::from_http1(incoming, in_use, ctx.route);
    Ok(respond(ctx, parts, body, Version::HTTP_11))
}

/// Returns the upstream's response in this HTTP version.
fn respond(
    ctx: StreamContext<'_>,
    mut parts: http::response::Parts,
    body: UpstreamResponseBody,
    version: Version,
) -> Response<ResponseBody> {
    request::strip_connection_headers(&mut parts.headers);
    forward::append_via(&mut parts.headers, version);
    parts.version = Version::default();
    parts.extensions.clear();
    ctx.record.response_started(parts.status);
    let body = ResponseBody::upstream(body, &ctx.route.node, ctx.record)
        .with_content_length(&parts.headers);
    Response::from_parts(parts, body)
}

/// Sets the framing of a response, and refuses a response whose head exceeds the limit of heads.
pub(super) fn check_response_head(
    ctx: StreamContext<'_>,
    parts: &mut http::response::Parts,
) -> Result<(), Error> {
    let framed = headers::normalize_response_framing(parts.status, &mut parts.headers);
    framed.map_err(|what| error::broken_upstream(ctx.route, what))?;
    if headers::header_list_size(&parts.headers) > wire::MAX_HEAD {
        let what = "sent an answer whose head is too large";
        return Err(error::broken_upstream(ctx.route, what));
    }
    Ok(())
}

/// Returns the reason why there was no response.
pub(super) fn no_response_error(
    way: StreamContext<'_>,
    asking: &InUse,
    error: &hyper::Error,
) -> Error {
    if asking.is_stalled() {
        let formatted_timeout = humantime::format_duration(way.proxy.shared.timeouts.upload);
        let what = format!("has read nothing from the request body for {formatted_timeout}");
        return error::upstream_timeout(way.route, &what);
    }
    http1::http_error(way, error)
}

/// Error of a request without a response.
struct RequestError {
    error: StreamError,
    /// Whether the upstream may have processed the request.
    may_be_processed: bool,
}

/// Sends the request on this stream. `reused` is true if other requests have used its connection before.
///
/// # Errors
/// If the upstream does not accept the request, or closes the connection before the head of its response.
async fn by_stream(
    ctx: StreamContext<'_>,
    upstream_tls: &Arc<UpstreamTls>,
    (head, content): (Request<()>, RequestParts),
    (stream, reused): (UpstreamStreamPermit, bool),
) -> Result<Response<ResponseBody>, Error> {
    let (newest, mut content) = (stream.newest_id, Some(content));
    let first_result = ask(ctx, &head, &mut content, stream).await;
    let request_error = match first_result {
        Ok(answered) => return answered,
        Err(broke) => broke,
    };
    let should_retry = reused
        && (!request_error.may_be_processed
            || (request_error.error.is_closed() && is_idempotent(&head)));
    let Some(content) = content.filter(|_| should_retry) else {
        return Err(unanswered_on_stream(ctx, &request_error));
    };
    match choose(ctx, upstream_tls, newest).await? {
        ConnectionChoice::Http1(asking, _) => {
            Box::pin(by_line(ctx, upstream_tls, (head, content), (asking, false))).await
        }
        ConnectionChoice::Http2(stream, _) => {
            let second_result = ask(ctx, &head, &mut Some(content), stream).await;
            second_result.unwrap_or_else(|broke| Err(unanswered_on_stream(ctx, &broke)))
        }
    }
}

fn unanswered_on_stream(way: StreamContext<'_>, broke: &RequestError) -> Error {
    // The stream may have failed because of the client's own data.
    way.record.failure().unwrap_or_else(|| {
        let leaving = way.tunnel.leaving_token();
        error::upstream_stream_error(
            way.route,
            leaving,
            (&broke.error, "before it sent a response"),
        )
    })
}

/// Sends the request. `content`, if there is any, is taken when the request is sent.
async fn ask(
    ctx: StreamContext<'_>,
    head: &Request<()>,
    content: &mut Option<RequestParts>,
    stream: UpstreamStreamPermit,
) -> Result<Result<Response<ResponseBody>, Error>, RequestError> {
    let (tunnel, permit) = (stream.connection.tunnel, stream.permit);
    let has_body = |content: &mut RequestParts| !content.body.is_end_stream();
    let end_stream = !content.as_mut().is_some_and(has_body);
    let mut head = head.clone();
    head::to_http2(&mut head, &ctx.route.target, "https");
    let opened = tunnel.send_request(&head, end_stream).await;
    drop(head);
    let opened = opened.map_err(|error| {
        if matches!(error, StreamError::Lost { .. } | StreamError::Reset { .. }) {
            // The connection accepts no new streams; open streams continue.
            tunnel.drain();
        }
        let taken = false;
        RequestError {
            error,
            may_be_processed: taken,
        }
    })?;
    let (release_body, upload) = match content.take_if(has_body) {
        None => (None, None),
        Some(content) => {
            let given_up = CancellationToken::new();
            let body = (content.body, content.version);
            let send = (opened.send, given_up.clone());
            let go = forward::start_upload(ctx, body, send, content.expects);
            (go, Some(given_up.drop_guard()))
        }
    };
    match response_head::wait_for_response(ctx, opened.response, release_body).await {
        Ok(answer) => Ok(answered_on_stream(ctx, answer, (permit, upload))),
        Err(error) => Err(RequestError {
            may_be_processed: !error.is_refused(),
            error,
        }),
    }
}

fn answered_on_stream(
    ctx: StreamContext<'_>,
    answer: Response<StreamReceiver>,
    (permit, upload): (StreamPermit, Option<DropGuard>),
) -> Result<Response<ResponseBody>, Error> {
    let (mut parts, receive) = answer.into_parts();
    check_response_head(ctx, &mut parts)?;
    let body =
        UpstreamResponseBody::of_stream(receive, permit, (ctx.tunnel.leaving_token(), ctx.route));
    let response = respond(ctx, parts, body, Version::HTTP_2);
    Ok(response.map(|body| body.with_upload(upload)))
}
