//! Step 6b: HTTP/1.1 upgrade (101) and extended CONNECT (RFC 8441).
//!
//! The upgrade carries the client's own method and token; the edge performs it with the upstream. If the upstream switches
//! protocols, the client receives its 101 and then bytes pass both ways, unchanged. Any other response passes whole. A request's
//! body is sent first on the stream, with its length in a private field. A body without a length is short, and is collected
//! before.

use crate::{
    error::{Error, Reason},
    proxy::{
        client_session::PendingSession,
        context::StreamContext,
        counted_body::{CountedRequestBody, UploadError},
        forward, peer, relay, request,
        request_body::RequestBody,
        response_body::ResponseBody,
        response_head,
        upload_budget::{BufferedBody, track_buffered},
    },
};
use bytes::{Bytes, BytesMut};
use causeway_tunnel::{StreamKind, StreamReceiver, StreamSender, wire};
use http::{
    HeaderValue, Request, Response, StatusCode, Version,
    header::{CONNECTION, CONTENT_LENGTH, UPGRADE},
    response,
};
use http_body::Body;
use std::{
    future::poll_fn,
    pin::{Pin, pin},
};
use tokio::time::timeout;

/// Maximum size of a body without a length, in bytes.
const MAX_COLLECTED_BYTES: usize = 64 << 10;

/// Forwards an upgrade to the protocol in `token`.
///
/// # Errors
/// If the stream cannot be opened, or the upstream does not answer in time.
pub async fn forward_upgrade(
    ctx: StreamContext<'_>,
    mut request: Request<RequestBody>,
    token: &str,
) -> Result<Response<ResponseBody>, Error> {
    let session = PendingSession::take(&mut request);
    let (parts, body) = request.into_parts();
    let version = parts.version;
    let mut head = forward::build_head(ctx, parts)?;
    head.headers_mut().remove(CONTENT_LENGTH);
    let (buffered, has_content) = (BufferedBody::default(), !body.is_end_stream());
    let mut content = Content {
        body: forward::counted(ctx, (body, version), buffered.clone()),
        first: None,
    };
    if has_content && let Some(length) = content.body_length(ctx).await? {
        head.headers_mut().insert(wire::CONTENT, length.into());
    }
    let stream_kind = StreamKind::Upgrade(token.to_owned());
    let opened = peer::open_stream(ctx, &mut head, &stream_kind, false);
    let (opened, moved_to) = with_upgrade_timeout(ctx, opened).await?;
    // The body that follows may take hours.
    drop(head);
    let ctx = ctx.moved_to(moved_to.as_ref());
    let mut sender = opened.send;
    let mut answer = pin!(async {
        let answer = response_head::wait_for_response(ctx, opened.response, None).await;
        answer.map_err(|error| peer::stream_error(ctx, &error))
    });
    let answer = if has_content {
        let memory_budget = ctx.proxy.shared.limits.memory_budget();
        let mut sending_body = pin!(content.send_body(ctx, &mut sender));
        let mut sending = pin!(track_buffered(
            memory_budget,
            &buffered,
            sending_body.as_mut()
        ));
        tokio::select! {
            biased;
            early = &mut answer => {
                let early = early?;
                if early.headers().contains_key(wire::SWITCHED) {
                    sending.await?;
                }
                early
            }
            done = &mut sending => {
                done?;
                with_upgrade_timeout(ctx, &mut answer).await?
            }
        }
    } else {
        with_upgrade_timeout(ctx, &mut answer).await?
    };
    let Some(protocol) = answer.headers().get(wire::SWITCHED).cloned() else {
        return respond_without_upgrade(ctx, sender, answer);
    };
    let (parts, receive) = answer.into_parts();
    let parts = into_switching_head(parts, protocol);
    ctx.record.session_started(parts.status);
    relay::spawn_relay(ctx, session, (sender, receive), false);
    Ok(Response::from_parts(parts, ResponseBody::empty()))
}

/// Returns the head of the client's 101 from the head of an answer that switched to `protocol`.
fn into_switching_head(mut parts: response::Parts, protocol: HeaderValue) -> response::Parts {
    request::strip_connection_headers(&mut parts.headers);
    parts.status = StatusCode::SWITCHING_PROTOCOLS;
    parts.version = Version::HTTP_11;
    parts
        .headers
        .insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    parts.headers.insert(UPGRADE, protocol);
    parts
}

/// Waits for `operation` at most for the timeout of an upgrade.
async fn with_upgrade_timeout<T>(
    ctx: StreamContext<'_>,
    operation: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let upgrade_timeout = ctx.proxy.shared.timeouts.upgrade_first_byte;
    timeout(upgrade_timeout, operation).await.map_err(|_| {
        let node = &ctx.route.node;
        let detail = format!("{node} did not answer the upgrade within {upgrade_timeout:?}");
        Reason::TargetTimeout.error(detail)
    })?
}

/// Body of an upgrade request.
struct Content {
    body: CountedRequestBody,
    /// The whole body, if it was collected.
    first: Option<Bytes>,
}

impl Content {
    /// Returns the length of the body; `None` if it is empty. A body without a declared length is collected first.
    async fn body_length(&mut self, ctx: StreamContext<'_>) -> Result<Option<u64>, Error> {
        if let Some(length) = self.body.length() {
            return Ok((length > 0).then_some(length));
        }
        let mut collected = BytesMut::new();
        while let Some(chunk) = self.next_chunk(ctx).await? {
            if collected.len() + chunk.len() > MAX_COLLECTED_BYTES {
                let detail = format!(
                    "the body of an upgrade request has more than {MAX_COLLECTED_BYTES} bytes and no Content-Length; send a Content-Length for a larger body"
                );
                return Err(Reason::ContentTooLarge.error(detail));
            }
            collected.extend_from_slice(&chunk);
        }
        let length = u64::try_from(collected.len()).unwrap_or(u64::MAX);
        self.first = Some(collected.freeze());
        Ok((length > 0).then_some(length))
    }

    /// Sends the body on a stream that continues after it.
    async fn send_body(
        &mut self,
        ctx: StreamContext<'_>,
        send: &mut StreamSender,
    ) -> Result<(), Error> {
        let read_timeout = ctx.proxy.shared.timeouts.upload;
        while let Some(chunk) = self.next_chunk(ctx).await? {
            let result = timeout(read_timeout, send.send_data(chunk))
                .await
                .map_err(|_| {
                    let (node, patience) =
                        (&ctx.route.node, humantime::format_duration(read_timeout));
                    let detail = format!(
                        "the app on {node} has read nothing from the request body for {patience}"
                    );
                    Reason::TargetTimeout.error(detail)
                })?;
            result.map_err(|error| peer::stream_error(ctx, &error))?;
        }
        Ok(())
    }

    async fn next_chunk(&mut self, ctx: StreamContext<'_>) -> Result<Option<Bytes>, Error> {
        if let Some(first) = self.first.take() {
            return Ok(Some(first).filter(|first| !first.is_empty()));
        }
        loop {
            let frame = poll_fn(|cx| Pin::new(&mut self.body).poll_frame(cx)).await;
            let Some(frame) = frame.transpose().map_err(|fault| body_error(ctx, fault))? else {
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

fn body_error(ctx: StreamContext<'_>, upload_error: UploadError) -> Error {
    ctx.record.failure().unwrap_or_else(|| {
        Reason::Malformed.with_source("the request body is incomplete", upload_error)
    })
}

/// Returns the response of an upstream that did not switch protocols, which passes whole. The rest of the response comes over the
/// same stream, so this side of the stream ends normally and not with a reset.
fn respond_without_upgrade(
    ctx: StreamContext<'_>,
    mut sender: StreamSender,
    answer: Response<StreamReceiver>,
) -> Result<Response<ResponseBody>, Error> {
    // A stream that is gone already says so in the body.
    let _ = sender.end();
    forward::into_client_response(ctx, answer)
}
