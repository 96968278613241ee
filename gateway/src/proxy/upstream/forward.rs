//! A plain request to an upstream to which the gateway itself speaks.
//!
//! It uses HTTP/2 if the upstream chose it (`http2_request`), else HTTP/1.1. As at an edge, fields pass unchanged, except those
//! of one connection. A body streams as it comes, both ways. An answer that comes before the request's body has been read passes
//! at once. A request that a pooled connection did not take, or did not answer, is sent once more on a new connection
//! ([`Retry`]).

use super::{
    body::{UpstreamRequestBody, UpstreamResponseBody},
    connect::UpstreamConnection,
    error,
    http1::{self, Http1Connection, InUse},
    http2::{self, UpstreamStreamPermit},
    http2_request, pin,
    pool::ConnectionPoolKey,
    tls::UpstreamTls,
};
use crate::{
    error::Error,
    proxy::{
        StreamContext, counted_body::CountedRequestBody, forward, request,
        request_body::RequestBody, response_body::ResponseBody,
    },
};
use causeway_tunnel::{headers, request_target::TargetOverflow, wire};
use causeway_upstream::{alpn::Alpn, head, http2_pool::Checkout, retry::Retry};
use http::{Request, Response, StatusCode, Version, header::EXPECT};
use http_body::Body;
use hyper::body::Incoming;
use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering::Relaxed},
};
use tokio::sync::oneshot;

/// Parts of a request after its head.
pub(super) struct RequestParts {
    pub(super) body: RequestBody,
    /// The client's version of HTTP.
    pub(super) version: Version,
    /// It waits for a 100.
    pub(super) expects: bool,
}

/// Connection on which a request is sent. The bool is true if the connection was used before.
pub(super) enum ConnectionChoice {
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
            http2_request::run(way, app, (head, content), (stream, reused)).await
        }
    }
}

/// Chooses an idle connection, a stream of an open connection, or a new connection of either version. With a nonzero `after`,
/// only a connection that was dialled later than this shared one will do.
pub(super) async fn choose(
    way: StreamContext<'_>,
    app: &Arc<UpstreamTls>,
    after: u64,
) -> Result<ConnectionChoice, Error> {
    let (kept, key) = (
        way.proxy.shared.apps.kept(),
        ConnectionPoolKey::of(way, app),
    );
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
pub(super) async fn by_line(
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
            let upload = CountedRequestBody::new(way, (body, version), life.waiting.clone());
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
pub(super) fn respond(
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
