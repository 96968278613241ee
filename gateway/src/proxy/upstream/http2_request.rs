//! A plain request on an HTTP/2 connection to an upstream, which other requests share.
//!
//! As over the node's tunnel itself: the head is sent first, the body after it in a task of its own, and a client that goes away
//! resets the stream. A request that the upstream has not taken is sent once more on a younger connection: an upstream that
//! closed one may have closed them all. The same applies to a request that can be repeated (RFC 9110 §9.2.2) and has no body, if
//! the upstream closed the connection in order without an answer.

use super::{
    body::UpstreamResponseBody,
    error,
    forward::{ConnectionChoice, RequestParts, by_line, check, choose, respond},
    http2::UpstreamStreamPermit,
    tls::UpstreamTls,
};
use crate::{
    error::Error,
    proxy::{StreamContext, counted_body, forward, response_body::ResponseBody},
};
use causeway_tunnel::{StreamError, StreamReceiver};
use causeway_upstream::{head, http2_pool::StreamPermit, retry::is_idempotent};
use http::{Request, Response, Version};
use http_body::Body;
use std::sync::Arc;
use tokio_util::sync::{CancellationToken, DropGuard};

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
pub(super) async fn run(
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
        return Err(unanswered(way, &broke));
    };
    match choose(way, app, newest).await? {
        ConnectionChoice::Line(asking, _) => {
            Box::pin(by_line(way, app, (head, content), (asking, false))).await
        }
        ConnectionChoice::Stream(stream, _) => {
            let second = ask(way, &head, &mut Some(content), stream).await;
            second.unwrap_or_else(|broke| Err(unanswered(way, &broke)))
        }
    }
}

fn unanswered(way: StreamContext<'_>, broke: &RequestError) -> Error {
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
            let go = counted_body::start(way, body, send, content.expects);
            (go, Some(given_up.drop_guard()))
        }
    };
    match forward::wait(way, opened.answer, go).await {
        Ok(answer) => Ok(answered(way, answer, (place, upload))),
        Err(error) => Err(RequestError {
            taken: !error.is_refused(),
            error,
        }),
    }
}

fn answered(
    way: StreamContext<'_>,
    answer: Response<StreamReceiver>,
    (place, upload): (StreamPermit, Option<DropGuard>),
) -> Result<Response<ResponseBody>, Error> {
    let (mut parts, receive) = answer.into_parts();
    check(way, &mut parts)?;
    let body = UpstreamResponseBody::of_stream(receive, place, way);
    let response = respond(way, parts, body, Version::HTTP_2);
    Ok(response.map(|body| body.with_upload(upload)))
}
