//! A plain request to an upstream to which the gateway itself speaks.
//!
//! It uses HTTP/2 if the upstream chose it, else HTTP/1.1. As at an edge, fields pass unchanged, except those of one connection.
//! A body streams as it comes, both ways. An answer that comes before the request's body has been read passes at once. A request
//! that a pooled connection did not take, or did not answer, is sent once more on a new connection ([`Retry`]).
//!
//! Over HTTP/2 the head is sent first, the body after it in a task of its own, and a client that goes away resets the stream. A
//! request that the upstream has not taken is sent once more on a younger connection: an upstream that closed one may have
//! closed them all. The same applies to a request that can be repeated (RFC 9110 §9.2.2) and has no body, if the upstream
//! closed the connection in order without an answer.

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
        response_body::ResponseBody,
    },
};
use causeway_tunnel::{StreamError, StreamReceiver, headers, request_target::TargetOverflow, wire};
use causeway_upstream::{
    alpn::Alpn,
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
    /// The client's version of HTTP.
    version: Version,
    /// It waits for a 100.
    expects: bool,
}

/// Connection on which a request is sent. The bool is true if the connection was used before.
enum ConnectionChoice {
    /// A connection of HTTP/1.1.
    Line(InUse, bool),
    /// A stream of HTTP/2.
    Stream(UpstreamStreamPermit, bool),
}

/// Forwards a plain request.
///
/// # Errors
/// If there is no connection to the upstream, or it breaks before the answer's head.
pub(in crate::proxy) async fn run(
    way: StreamContext<'_>,
    app: &Arc<UpstreamTls>,
    request: Request<RequestBody>,
) -> Result<Response<ResponseBody>, Error> {
    let (parts, body) = request.into_parts();
    let content = RequestParts {
        body,
        version: parts.version,
        expects: headers::lists(&parts.headers, &EXPECT, "100-continue"),
    };
    let mut head = forward::head(way, parts)?;
    app.alone(head.headers_mut());
    if let Some(rest) = head.extensions().get::<TargetOverflow>().cloned() {
        let line = Box::pin(Http1Connection::open(way, app, Some(rest))).await?;
        return by_line(way, app, (head, content), (line.asking(), false)).await;
    }
    match choose(way, app, 0).await? {
        ConnectionChoice::Line(asking, reused) => {
            by_line(way, app, (head, content), (asking, reused)).await
        }
        ConnectionChoice::Stream(stream, reused) => {
            by_stream(way, app, (head, content), (stream, reused)).await
        }
    }
}

/// Chooses an idle connection, a stream of an open connection, or a new connection of either version. With a nonzero `after`,
/// only a connection that was dialled later than this shared one will do.
async fn choose(
    way: StreamContext<'_>,
    app: &Arc<UpstreamTls>,
    after: u64,
) -> Result<ConnectionChoice, Error> {
    let (kept, key) = (way.proxy.shared.apps.kept(), pool_key(way, app));
    while after == 0
        && let Some(line) = kept.of(&key).checkout(&key, |line| line.is_alive())
    {
        let believed = pin::holds(app.pins(), way.route, line.life.key);
        // Dropping it resets it: the next request opens a new connection to the app.
        let asking = line.asking();
        if believed {
            return Ok(ConnectionChoice::Line(asking, true));
        }
    }
    let shared = kept.of(&key).shared(&key);
    let _turn = match http2::turn(&shared, way, app, after).await? {
        Checkout::Open(stream) => return Ok(ConnectionChoice::Stream(stream, true)),
        Checkout::Http1 => None,
        Checkout::Dial(turn) => Some(turn),
    };
    // Allocated, since most requests find a connection and the future is moved with each.
    Box::pin(async {
        let dialled = UpstreamConnection::to(way, app, Alpn::Any).await?;
        if dialled.chose_http2() {
            let stream = http2::begin(&shared, way, app, dialled).await?;
            return Ok(ConnectionChoice::Stream(stream, false));
        }
        shared.chose_http1();
        let line = Http1Connection::begin(way, app, dialled, None).await?;
        Ok(ConnectionChoice::Line(line.asking(), false))
    })
    .await
}

/// Asks on a line, and once more on a new one if it was used before.
async fn by_line(
    way: StreamContext<'_>,
    app: &Arc<UpstreamTls>,
    (mut head, content): (Request<()>, RequestParts),
    (mut asking, reused): (InUse, bool),
) -> Result<Response<ResponseBody>, Error> {
    let RequestParts {
        body,
        version,
        expects,
    } = content;
    let has_body = !body.is_end_stream();
    head::to_http1(&mut head, &way.route.target, has_body);
    let retry = Retry::new(&head, reused, has_body);
    let (go, gone) = oneshot::channel();
    let body = match asking.life() {
        Some(life) if has_body => {
            let upload = forward::counted(way, (body, version), life.waiting.clone());
            let busy = (version == Version::HTTP_2).then(|| way.connection.idle.busy());
            UpstreamRequestBody::new((upload, busy), life, expects.then_some(gone))
        }
        _ => UpstreamRequestBody::default(),
    };
    let mut request = head.map(|()| body);
    listen(way, &mut request, &asking, Some(go));
    let mut error = match asking.ask(request).await {
        Ok(answer) => return answered(way, asking, answer),
        Err(error) => error,
    };
    let again = retry.request(&mut error, |error| asking.closed_unanswered(error));
    let Some(request) = again else {
        return Err(unanswered(way, &asking, error.error()));
    };
    drop(asking);
    let line = Box::pin(Http1Connection::open(way, app, None)).await?;
    let mut request = request.map(|body| body.moved(&line.life));
    let mut asking = line.asking();
    // A body waits at most its own time limit for a 100.
    listen(way, &mut request, &asking, None);
    match asking.ask(request).await {
        Ok(answer) => answered(way, asking, answer),
        Err(error) => Err(unanswered(way, &asking, error.error())),
    }
}

/// Passes interim answers on: a 100 lets the body go, too many end the line.
pub(super) fn listen(
    way: StreamContext<'_>,
    request: &mut Request<UpstreamRequestBody>,
    asking: &InUse,
    go: Option<oneshot::Sender<()>>,
) {
    let Some(life) = asking.life() else { return };
    let (end, came) = (life.end.clone(), AtomicUsize::new(0));
    let (connection, exchange) = (way.connection.clone(), way.exchange);
    let go = Mutex::new(go);
    hyper::ext::on_informational(request, move |answer| {
        // A cancelled exchange has its answer already.
        if !end.is_cancelled() {
            forward::pass_interim(&connection, exchange, answer.status(), answer.headers());
        }
        if answer.status() == StatusCode::CONTINUE
            && let Some(go) = go.lock().unwrap_or_else(PoisonError::into_inner).take()
        {
            // A body that is gone needs no leave.
            let _ = go.send(());
        }
        if came.fetch_add(1, Relaxed) >= wire::MOST_INTERIMS {
            end.cancel();
        }
    });
}

fn answered(
    way: StreamContext<'_>,
    asking: InUse,
    answer: Response<Incoming>,
) -> Result<Response<ResponseBody>, Error> {
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        let what = "switched protocols without a request to do so";
        return Err(error::broken(way.route, what));
    }
    respond_by(way, asking, answer)
}

/// The answer that a line brings, whole.
pub(super) fn respond_by(
    way: StreamContext<'_>,
    asking: InUse,
    answer: Response<Incoming>,
) -> Result<Response<ResponseBody>, Error> {
    let (mut parts, incoming) = answer.into_parts();
    check(way, &mut parts)?;
    let body = UpstreamResponseBody::of_line(incoming, asking, way.route);
    Ok(respond(way, parts, body, Version::HTTP_11))
}

/// Returns the upstream's answer, by this version of HTTP.
fn respond(
    way: StreamContext<'_>,
    mut parts: http::response::Parts,
    body: UpstreamResponseBody,
    version: Version,
) -> Response<ResponseBody> {
    request::clean(&mut parts.headers);
    forward::via(&mut parts.headers, version);
    parts.version = Version::default();
    parts.extensions.clear();
    way.record.answered(parts.status);
    let body = ResponseBody::app(body, &way.route.node, way.record).sized(&parts.headers);
    Response::from_parts(parts, body)
}

/// Frames an answer anew, and refuses one whose head is larger than the limit of heads.
pub(super) fn check(
    way: StreamContext<'_>,
    parts: &mut http::response::Parts,
) -> Result<(), Error> {
    let framed = headers::reframe_answer(parts.status, &mut parts.headers);
    framed.map_err(|what| error::broken(way.route, what))?;
    if headers::size(&parts.headers) > wire::MAX_HEAD {
        let what = "sent an answer whose head is too large";
        return Err(error::broken(way.route, what));
    }
    Ok(())
}

/// Why there was no answer.
pub(super) fn unanswered(way: StreamContext<'_>, asking: &InUse, error: &hyper::Error) -> Error {
    if asking.is_stalled() {
        let patience = humantime::format_duration(way.proxy.shared.timeouts.upload);
        let what = format!("has read nothing from the request body for {patience}");
        return error::slow(way.route, &what);
    }
    http1::of_http(way, error)
}

/// Why there is no answer.
struct RequestError {
    error: StreamError,
    /// The upstream may have taken the request.
    taken: bool,
}

/// Sends the request on this stream. `reused` is true if other requests have used its connection before.
///
/// # Errors
/// If the upstream does not take the request, or closes the connection before its answer's head.
async fn by_stream(
    way: StreamContext<'_>,
    app: &Arc<UpstreamTls>,
    (head, content): (Request<()>, RequestParts),
    (stream, reused): (UpstreamStreamPermit, bool),
) -> Result<Response<ResponseBody>, Error> {
    let (newest, mut content) = (stream.newest, Some(content));
    let first = ask(way, &head, &mut content, stream).await;
    let broke = match first {
        Ok(answered) => return answered,
        Err(broke) => broke,
    };
    let again = reused && (!broke.taken || (broke.error.is_closed() && is_idempotent(&head)));
    let Some(content) = content.filter(|_| again) else {
        return Err(unanswered_on_stream(way, &broke));
    };
    match choose(way, app, newest).await? {
        ConnectionChoice::Line(asking, _) => {
            Box::pin(by_line(way, app, (head, content), (asking, false))).await
        }
        ConnectionChoice::Stream(stream, _) => {
            let second = ask(way, &head, &mut Some(content), stream).await;
            second.unwrap_or_else(|broke| Err(unanswered_on_stream(way, &broke)))
        }
    }
}

fn unanswered_on_stream(way: StreamContext<'_>, broke: &RequestError) -> Error {
    // The stream may have failed because of the client's own data.
    way.record.failure().unwrap_or_else(|| {
        let leaving = way.tunnel.leaving();
        error::of_stream(
            way.route,
            leaving,
            (&broke.error, "before it sent a response"),
        )
    })
}

/// Asks. The content is taken once it is on its way, if there is any.
async fn ask(
    way: StreamContext<'_>,
    head: &Request<()>,
    content: &mut Option<RequestParts>,
    stream: UpstreamStreamPermit,
) -> Result<Result<Response<ResponseBody>, Error>, RequestError> {
    let (tunnel, place) = (stream.connection.tunnel, stream.place);
    let has_body = |content: &mut RequestParts| !content.body.is_end_stream();
    let end = !content.as_mut().is_some_and(has_body);
    let mut head = head.clone();
    head::to_http2(&mut head, &way.route.target, "https");
    let opened = tunnel.ask(head, end).await;
    let opened = opened.map_err(|error| {
        if matches!(error, StreamError::Lost { .. } | StreamError::Reset { .. }) {
            // The connection accepts no new streams; open streams continue.
            tunnel.drain();
        }
        let taken = false;
        RequestError { error, taken }
    })?;
    let (go, upload) = match content.take_if(has_body) {
        None => (None, None),
        Some(content) => {
            let given_up = CancellationToken::new();
            let body = (content.body, content.version);
            let send = (opened.send, given_up.clone());
            let go = forward::start_upload(way, body, send, content.expects);
            (go, Some(given_up.drop_guard()))
        }
    };
    match forward::wait(way, opened.answer, go).await {
        Ok(answer) => Ok(answered_on_stream(way, answer, (place, upload))),
        Err(error) => Err(RequestError {
            taken: !error.is_refused(),
            error,
        }),
    }
}

fn answered_on_stream(
    way: StreamContext<'_>,
    answer: Response<StreamReceiver>,
    (place, upload): (StreamPermit, Option<DropGuard>),
) -> Result<Response<ResponseBody>, Error> {
    let (mut parts, receive) = answer.into_parts();
    check(way, &mut parts)?;
    let body = UpstreamResponseBody::of_stream(receive, place, (way.tunnel.leaving(), way.route));
    let response = respond(way, parts, body, Version::HTTP_2);
    Ok(response.map(|body| body.with_upload(upload)))
}
