//! Step 6b: 101 and extended CONNECT (RFC 8441).
//!
//! The upgrade travels with the client's own method and token; the edge performs it with the upstream. If the upstream switched,
//! the client gets its 101 and then bytes both ways, untouched. Any other answer comes back whole. A request's body goes first on
//! the stream, and its length in a private field; one without a length is short, and collected before.

use crate::{
    error::{Error, Reason},
    proxy::{
        context::StreamContext,
        counted_body::{CountedRequestBody, UploadError},
        forward, relay, request,
        request_body::RequestBody,
        response_body::ResponseBody,
        upload_budget::{BufferedBody, track_buffered},
    },
};
use bytes::{Bytes, BytesMut};
use causeway_tunnel::{StreamError, StreamKind, StreamReceiver, StreamSender, wire};
use http::{
    HeaderValue, Request, Response, StatusCode, Version,
    header::{CONNECTION, CONTENT_LENGTH, UPGRADE},
};
use http_body::Body;
use std::{
    future::poll_fn,
    pin::{Pin, pin},
};
use tokio::time::timeout;

/// Bytes of a body without a length at most.
const MOST_COLLECTED: usize = 64 << 10;

/// Forwards an upgrade to the protocol that `token` names.
///
/// # Errors
/// If the stream cannot be opened, or the upstream does not answer in time.
pub async fn run(
    way: StreamContext<'_>,
    mut request: Request<RequestBody>,
    token: &str,
) -> Result<Response<ResponseBody>, Error> {
    let switched = hyper::upgrade::on(&mut request);
    let (parts, body) = request.into_parts();
    let version = parts.version;
    let mut head = forward::head(way, parts)?;
    head.headers_mut().remove(CONTENT_LENGTH);
    let (waiting, has_content) = (BufferedBody::default(), !body.is_end_stream());
    let mut content = Content {
        body: forward::counted(way, (body, version), waiting.clone()),
        first: None,
    };
    if has_content && let Some(length) = content.length(way).await? {
        head.headers_mut().insert(wire::CONTENT, length.into());
    }
    let ask = StreamKind::Upgrade(token.to_owned());
    let opened = way.tunnel.open(head, &ask, &way.route.target, false);
    let opened = within_bound(way, opened).await?;
    let mut send = opened.send;
    let mut answer = pin!(forward::wait(way, opened.answer, None));
    let answer = if has_content {
        let pressure = way.proxy.shared.limits.pressure();
        let mut sending = pin!(content.send(way, &mut send));
        let mut sending = pin!(track_buffered(pressure, &waiting, sending.as_mut()));
        tokio::select! {
            biased;
            early = &mut answer => {
                let early = early.map_err(|error| forward::failed(way, &error))?;
                if early.headers().contains_key(wire::SWITCHED) {
                    sending.await?;
                }
                early
            }
            done = &mut sending => {
                done?;
                within_bound(way, &mut answer).await?
            }
        }
    } else {
        within_bound(way, &mut answer).await?
    };
    let Some(protocol) = answer.headers().get(wire::SWITCHED).cloned() else {
        return refused(way, send, answer);
    };
    let (mut parts, receive) = answer.into_parts();
    request::clean(&mut parts.headers);
    parts.status = StatusCode::SWITCHING_PROTOCOLS;
    parts.version = Version::HTTP_11;
    parts
        .headers
        .insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    parts.headers.insert(UPGRADE, protocol);
    way.record.opened(parts.status);
    relay::spawn(way, (switched, None), (send, receive), false);
    Ok(Response::from_parts(parts, ResponseBody::empty()))
}

/// Waits for `work` as long as an upgrade may take.
async fn within_bound<T>(
    way: StreamContext<'_>,
    work: impl Future<Output = Result<T, StreamError>>,
) -> Result<T, Error> {
    let bound = way.proxy.shared.timeouts.upgrade_first_byte;
    let done = timeout(bound, work).await.map_err(|_| {
        let node = &way.route.node;
        let detail = format!("{node} did not answer the upgrade within {bound:?}");
        Reason::TargetTimeout.error(detail)
    })?;
    done.map_err(|error| forward::failed(way, &error))
}

/// The body of an upgrade.
struct Content {
    body: CountedRequestBody,
    /// All of it, where it was collected.
    first: Option<Bytes>,
}

impl Content {
    /// Returns the length of a body that is not empty, after it was collected if it does not say one.
    async fn length(&mut self, way: StreamContext<'_>) -> Result<Option<u64>, Error> {
        if let Some(length) = self.body.length() {
            return Ok((length > 0).then_some(length));
        }
        let mut collected = BytesMut::new();
        while let Some(chunk) = self.next(way).await? {
            if collected.len() + chunk.len() > MOST_COLLECTED {
                let detail = format!(
                    "the body of an upgrade request has more than {MOST_COLLECTED} bytes and no Content-Length; send a Content-Length for a larger body"
                );
                return Err(Reason::ContentTooLarge.error(detail));
            }
            collected.extend_from_slice(&chunk);
        }
        let length = u64::try_from(collected.len()).unwrap_or(u64::MAX);
        self.first = Some(collected.freeze());
        Ok((length > 0).then_some(length))
    }

    /// Sends it on a stream that goes on behind it.
    async fn send(&mut self, way: StreamContext<'_>, send: &mut StreamSender) -> Result<(), Error> {
        let patience = way.proxy.shared.timeouts.upload;
        while let Some(chunk) = self.next(way).await? {
            let taken = timeout(patience, send.data(chunk)).await.map_err(|_| {
                let (node, patience) = (&way.route.node, humantime::format_duration(patience));
                let detail = format!(
                    "the app on {node} has read nothing from the request body for {patience}"
                );
                Reason::TargetTimeout.error(detail)
            })?;
            taken.map_err(|error| forward::failed(way, &error))?;
        }
        Ok(())
    }

    async fn next(&mut self, way: StreamContext<'_>) -> Result<Option<Bytes>, Error> {
        if let Some(first) = self.first.take() {
            return Ok(Some(first).filter(|first| !first.is_empty()));
        }
        loop {
            let frame = poll_fn(|cx| Pin::new(&mut self.body).poll_frame(cx)).await;
            let Some(frame) = frame.transpose().map_err(|fault| broken(way, fault))? else {
                return Ok(None);
            };
            // Trailers are not possible before a session.
            if let Ok(chunk) = frame.into_data()
                && !chunk.is_empty()
            {
                return Ok(Some(chunk));
            }
        }
    }
}

fn broken(way: StreamContext<'_>, fault: UploadError) -> Error {
    way.record
        .failure()
        .unwrap_or_else(|| Reason::Malformed.with_source("the request body is incomplete", fault))
}

/// Returns the answer of an upstream that did not switch, which passes whole. The rest of the answer comes over the same stream,
/// so this end of it ends in order and not with a reset.
fn refused(
    way: StreamContext<'_>,
    mut send: StreamSender,
    answer: Response<StreamReceiver>,
) -> Result<Response<ResponseBody>, Error> {
    // A stream that is gone already says so in the body.
    let _ = send.end();
    forward::respond(way, answer)
}
