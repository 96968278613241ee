//! A plain request to the app, and its answer.
//!
//! An app of scheme http is asked by HTTP/1.1, except that gRPC (`content-type: application/grpc`) exists only
//! over HTTP/2 and goes by prior knowledge; h2c is always prior knowledge; https is what ALPN chose.
//! Fields pass as they came, save those of one connection; a body streams as it comes, both ways, and
//! an answer that comes before the request's body has been read passes at once.
//! A kept connection that turns out closed is tried once more on a new one, if the request was never
//! sent, or can be repeated (RFC 9110 §9.2.2) and has no body.

use super::{
    Answer, Failed, Then, Way,
    app::{App, AppId, Offer},
    broken,
    interim::Interim,
    kept::{Kept, Line, Shared, begin_http2},
    target,
};
use crate::config::Scheme;
use bytes::Bytes;
use causeway_tunnel::{Receive, StreamError, headers};
use http::{
    HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, Version,
    header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, TE, TRANSFER_ENCODING},
    uri::{Authority, PathAndQuery},
};
use http_body::{Body as _, Frame};
use hyper::{
    body::Incoming,
    client::conn::{TrySendError, http2},
};
use std::{
    error::Error,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};
use tokio::time::timeout;

/// A request's body on its way to the app. `None`: it has none.
pub(super) struct Outgoing(Option<Receive>);

/// An answer's body on its way from the app, and the connection that brings it.
pub(super) enum Body {
    Http1 {
        app: AppId,
        line: Box<Line>,
        incoming: Incoming,
    },
    Http2(Incoming),
}

/// A connection to ask on.
enum Asking {
    Http1(Box<Line>),
    Http2(http2::SendRequest<Outgoing>),
}

type Unanswered = TrySendError<Request<Outgoing>>;

/// Asks the app.
pub(super) async fn ask(
    way: &Way,
    app: &Arc<App>,
    (head, body): (Request<()>, Receive),
    interim: &Interim,
) -> Result<Answer, Failed> {
    let wants_http2 = wants_http2(app, head.headers());
    let body = (!body.is_end()).then_some(body);
    let mut request = head.map(|()| Outgoing(body));
    interim.listen(&mut request);
    let (mut asking, reused) = open(way, app, wants_http2, false).await?;
    prepare(&mut request, app, matches!(asking, Asking::Http2(_)));
    let again = (reused && is_repeatable(&request)).then(|| copy(&request));
    let error = match asking.ask(request).await {
        Ok(answer) => return answered(app, asking, answer),
        Err(error) => error,
    };
    let mut error = error;
    let Some(request) = (reused.then(|| error.take_message()).flatten()).or(again) else {
        return Err(unanswered(app, &error));
    };
    if caused_by_caller(error.error()) {
        return Err(Failed::Caller);
    }
    way.metrics.retried();
    let (mut asking, _) = open(way, app, wants_http2, true).await?;
    match asking.ask(request).await {
        Ok(answer) => answered(app, asking, answer),
        Err(error) => Err(unanswered(app, &error)),
    }
}

impl Asking {
    async fn ask(&mut self, request: Request<Outgoing>) -> Result<Response<Incoming>, Unanswered> {
        match self {
            Self::Http1(line) => line.ask(request).await,
            Self::Http2(sender) => sender.try_send_request(request).await,
        }
    }
}

fn wants_http2(app: &App, fields: &HeaderMap) -> bool {
    let is_grpc = || {
        let kind = fields.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
        kind.is_some_and(|kind| kind.starts_with(b"application/grpc"))
    };
    match app.scheme {
        Scheme::H2c | Scheme::Https => true,
        Scheme::Http | Scheme::Tcp => is_grpc(),
    }
}

/// A kept connection, or a new one. True with it: it was kept.
async fn open(way: &Way, app: &App, http2: bool, fresh: bool) -> Result<(Asking, bool), Failed> {
    if http2 && let Some(opened) = open_http2(way, app, fresh).await? {
        return Ok(opened);
    }
    if !fresh && let Some(line) = way.kept.take(&app.id) {
        way.metrics.connection(true);
        return Ok((Asking::Http1(Box::new(line)), true));
    }
    let connection = app.connect(way, Offer::Any).await?;
    way.metrics.connection(false);
    let line = Line::begin(connection)
        .await
        .map_err(|error| failed(app, &error))?;
    Ok((Asking::Http1(Box::new(line)), false))
}

/// The shared HTTP/2 connection; `None` if the app chose HTTP/1.1 before.
async fn open_http2(way: &Way, app: &App, fresh: bool) -> Result<Option<(Asking, bool)>, Failed> {
    let slot = way.kept.shared(&app.id);
    // Whoever waits for another stream's dial has the same bound as if it dialled itself.
    let Ok(mut shared) = timeout(way.timeouts.dial, slot.lock()).await else {
        return Err(target::slow(app, "did not take the connection in time").into());
    };
    match &*shared {
        Shared::Http1 => return Ok(None),
        // Another stream may have renewed it meanwhile: "fresh" only says that a dead one will not do.
        Shared::Http2(sender) if sender.is_ready() && !fresh => {
            way.metrics.connection(true);
            return Ok(Some((Asking::Http2(sender.clone()), true)));
        }
        Shared::Http2(_) | Shared::Unknown => {}
    }
    let connection = app.connect(way, Offer::Any).await?;
    way.metrics.connection(false);
    if app.tls.is_some() && !connection.chose_http2() {
        *shared = Shared::Http1;
        let line = Line::begin(connection)
            .await
            .map_err(|error| failed(app, &error))?;
        return Ok(Some((Asking::Http1(Box::new(line)), false)));
    }
    let sender = begin_http2(connection, &way.tasks)
        .await
        .map_err(|error| failed(app, &error))?;
    *shared = Shared::Http2(sender.clone());
    Ok(Some((Asking::Http2(sender), false)))
}

/// Puts the head into the form of the app's HTTP version.
fn prepare(request: &mut Request<Outgoing>, app: &App, http2: bool) {
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
    let has_body = request.body().0.is_some();
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
    app: &App,
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
pub(super) fn to_origin(fields: &mut HeaderMap, app: &App, authority: Option<&Authority>) {
    headers::join_cookies(fields);
    if let Some(authority) = authority {
        headers::put_host(fields, authority);
    } else if !fields.contains_key(HOST)
        && let Ok(host) = HeaderValue::try_from(app.target.to_string())
    {
        fields.insert(HOST, host);
    }
}

fn is_repeatable(request: &Request<Outgoing>) -> bool {
    let idempotent = matches!(
        *request.method(),
        Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE | Method::PUT | Method::DELETE
    );
    idempotent && request.body().0.is_none()
}

fn copy(request: &Request<Outgoing>) -> Request<Outgoing> {
    let mut copy = Request::new(Outgoing(None));
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.version_mut() = request.version();
    *copy.headers_mut() = request.headers().clone();
    *copy.extensions_mut() = request.extensions().clone();
    copy
}

fn answered(app: &App, asking: Asking, answer: Response<Incoming>) -> Result<Answer, Failed> {
    if !headers::codes_only_by_chunks(answer.headers()) {
        return Err(broken(
            app,
            "answered with a Transfer-Encoding that is not chunked alone",
        ));
    }
    let (head, incoming) = ended_head(answer);
    if head.status() == StatusCode::SWITCHING_PROTOCOLS {
        return Err(broken(
            app,
            "switched protocols, which nobody had asked for",
        ));
    }
    let body = match asking {
        Asking::Http1(line) => Body::http1(app, line, incoming),
        Asking::Http2(_) => Body::Http2(incoming),
    };
    Ok(Answer {
        head,
        then: Then::Body(Box::new(body)),
    })
}

/// The head as it travels: without the fields of one connection, and without ours.
pub(super) fn ended_head(answer: Response<Incoming>) -> (Response<()>, Incoming) {
    let (parts, incoming) = answer.into_parts();
    let mut head = Response::new(());
    *head.status_mut() = parts.status;
    *head.headers_mut() = parts.headers;
    headers::strip_hop_by_hop(head.headers_mut());
    headers::strip_private(head.headers_mut());
    (head, incoming)
}

fn unanswered(app: &App, error: &Unanswered) -> Failed {
    failed(app, error.error())
}

/// Why the app did not answer, or the caller did not ask to the end.
pub(super) fn failed(app: &App, error: &hyper::Error) -> Failed {
    if caused_by_caller(error) {
        return Failed::Caller;
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

fn caused_by_caller(error: &hyper::Error) -> bool {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(each) = cause {
        if each.is::<StreamError>() {
            return true;
        }
        cause = each.source();
    }
    error.is_body_write_aborted()
}

impl http_body::Body for Outgoing {
    type Data = Bytes;
    type Error = StreamError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StreamError>>> {
        match &mut self.0 {
            Some(receive) => Pin::new(receive).poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(Receive::is_end)
    }
}

impl Outgoing {
    /// No body.
    pub(super) fn none() -> Self {
        Self(None)
    }
}

impl Body {
    pub(super) fn http1(app: &App, line: Box<Line>, incoming: Incoming) -> Self {
        Self::Http1 {
            app: app.id.clone(),
            line,
            incoming,
        }
    }

    /// Whether nothing follows the head.
    pub(super) fn is_end(&self) -> bool {
        match self {
            Self::Http1 { incoming, .. } | Self::Http2(incoming) => incoming.is_end_stream(),
        }
    }

    /// Keeps the connection for the next request, after the last byte.
    pub(super) async fn keep(self, kept: &Kept) {
        if let Self::Http1 {
            app,
            line,
            incoming,
        } = self
        {
            drop(incoming);
            kept.put(app, *line).await;
        }
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.get_mut() {
            Self::Http2(incoming) => Pin::new(incoming).poll_frame(cx),
            Self::Http1 { line, incoming, .. } => line.poll_frame(incoming, cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.is_end()
    }
}
