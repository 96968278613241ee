//! Step 6a: a plain request over a tunnel stream.
//!
//! The head is sent first, the body after it (`start_upload`), so that a response that comes before the body was read passes at
//! once. A client that disconnects drops this future or its body, which resets the stream. A request that may be repeated is sent
//! again if its tunnel does not answer (`repeat`).

use crate::{
    error::{Error, Reason},
    proxy::{
        access_log::AccessRecord,
        context::StreamContext,
        counted_body::CountedRequestBody,
        forwarding_headers::Hop,
        peer, repeat, request,
        request_body::RequestBody,
        response_body::ResponseBody,
        response_head, trace_context,
        upload_budget::{BufferedBody, track_buffered},
    },
};
use causeway_certs::NodeName;
use causeway_tunnel::{
    RejectCode, StreamError, StreamKind, StreamReceiver, StreamSender,
    body::{PumpError, pump},
    headers,
    request_target::TargetOverflow,
    wire,
};
use futures_util::future::OptionFuture;
use http::{
    HeaderMap, HeaderName, HeaderValue, Request, Response, Uri, Version,
    header::{AUTHORIZATION, EXPECT, VIA},
    uri,
};
use http_body::Body;
use std::{pin::pin, time::Duration};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tracing::debug_span;

/// Forwards a plain request.
///
/// # Errors
/// If the stream cannot be opened, or breaks before the head of the response.
pub async fn forward_request(
    ctx: StreamContext<'_>,
    request: Request<RequestBody>,
) -> Result<Response<ResponseBody>, Error> {
    let (parts, body) = request.into_parts();
    let expects_continue = headers::contains_token(&parts.headers, &EXPECT, "100-continue");
    let version = parts.version;
    let mut head = build_head(ctx, parts)?;
    let end_stream = body.is_end_stream();
    let may_repeat = repeat::may_repeat(&head, end_stream);
    let opening = peer::open_stream(ctx, &mut head, &StreamKind::Request, end_stream);
    let (opened, moved_to) = opening.await?;
    let ctx = ctx.moved_to(moved_to.as_ref());
    if may_repeat {
        let (answer, sender, moved_to) = repeat::wait_for_response(ctx, opened, &head).await?;
        let response = into_client_response(ctx.moved_to(moved_to.as_ref()), answer)?;
        return Ok(response.map(|body| body.with_sender(Some(sender))));
    }
    // Only a repetition needs it, and an upload may take hours.
    drop(head);
    let (release_body, upload, sender) = if end_stream {
        (None, None, Some(opened.send))
    } else {
        let cancel_token = CancellationToken::new();
        let go = start_upload(
            ctx,
            (body, version),
            (opened.send, cancel_token.clone()),
            expects_continue,
        );
        (go, Some(cancel_token.drop_guard()), None)
    };
    let answer = match response_head::wait_for_response(ctx, opened.response, release_body).await {
        Ok(answer) => answer,
        // The stream may have failed because of the client's own data, which is not a fault of the node.
        Err(error) => {
            return Err(ctx
                .record
                .failure()
                .unwrap_or_else(|| peer::stream_error(ctx, &error)));
        }
    };
    Ok(into_client_response(ctx, answer)?.map(|body| body.with_upload(upload).with_sender(sender)))
}

/// Sends the body in its own task, which ends with the request or its response, even while it waits for a tunnel that accepts
/// nothing. Until then, its waiting bytes count as buffered. With `expects`, the task waits for the returned sender.
pub(super) fn start_upload(
    ctx: StreamContext<'_>,
    (inner, version): (RequestBody, Version),
    (send, cancel_token): (StreamSender, CancellationToken),
    expects: bool,
) -> Option<oneshot::Sender<()>> {
    let (release_sender, release) = oneshot::channel();
    let release = OptionFuture::from(expects.then_some(release));
    let waiting = BufferedBody::default();
    let body = counted(ctx, (inner, version), waiting.clone());
    let shared = ctx.proxy.shared.clone();
    let record = ctx.record.clone();
    let node = ctx.route.node.clone();
    ctx.proxy.tasks.spawn(debug_span!("body"), async move {
        let task = pin!(upload(
            body,
            send,
            release,
            (node, shared.timeouts.upload, &record)
        ));
        tokio::select! {
            biased;
            () = record.wait_terminated_upload() => {}
            () = cancel_token.cancelled() => {}
            () = track_buffered(shared.limits.memory_budget(), &waiting, task) => {}
        }
    });
    expects.then_some(release_sender)
}

async fn upload(
    body: CountedRequestBody,
    mut send: StreamSender,
    release: OptionFuture<oneshot::Receiver<()>>,
    (node, patience, record): (NodeName, Duration, &AccessRecord),
) {
    // A request that is cancelled while it waits also cancels its stream.
    let _ = release.await;
    match pump(body, &mut send, Some(patience)).await {
        Ok(()) => {}
        Err(PumpError::Stalled(_)) => {
            let formatted_timeout = humantime::format_duration(patience);
            let detail = format!(
                "the app on {node} has read nothing from the request body for {formatted_timeout}"
            );
            record.record_failure(&Reason::TargetTimeout.error(detail));
        }
        Err(PumpError::Body(error)) => {
            tracing::debug!(%error, "a client aborted its request body");
        }
        Err(PumpError::Stream(error @ StreamError::Evicted)) => {
            record.record_failure(&Error::from_stream_error(node.as_str(), &error));
        }
        Err(PumpError::Stream(error)) => {
            tracing::debug!(%error, "a request body was not read to its end");
        }
    }
}

/// Returns the counted body of a request, which reports its chunks to `waiting`.
pub(super) fn counted(
    ctx: StreamContext<'_>,
    (inner, version): (RequestBody, Version),
    waiting: BufferedBody,
) -> CountedRequestBody {
    let shared = &ctx.proxy.shared;
    CountedRequestBody {
        inner,
        window: (version == Version::HTTP_2).then_some(ctx.connection.window),
        waiting,
        record: ctx.record.clone(),
        identity_headers: ctx.proxy.listener.identity_headers.clone(),
        bounds: (shared.header_bytes, shared.max_headers),
    }
}

/// Builds the request head for the tunnel.
pub(super) fn build_head(
    ctx: StreamContext<'_>,
    parts: http::request::Parts,
) -> Result<Request<()>, Error> {
    let (version, scheme) = (parts.version, scheme(ctx));
    let mut fields = parts.headers;
    if !ctx.proxy.listener.forwards_authorization() {
        fields.remove(AUTHORIZATION);
    }
    let host = headers::take_host(&mut fields);
    let authority = parts.uri.authority().cloned().or(host);
    request::strip_connection_headers(&mut fields);
    let hop = Hop {
        peer: ctx.connection.peer.ip(),
        tls: is_https(ctx),
        authority: authority.as_ref(),
        cached_values: &ctx.connection.forwarded,
    };
    ctx.proxy.listener.forwarding.apply(hop, &mut fields);
    append_via(&mut fields, version);
    trace_context::never_index(&mut fields);
    // Set after `strip_connection_headers`, so that the client's `Connection` field cannot remove these fields.
    ctx.proxy
        .listener
        .identity_headers
        .set_identity(&mut fields, ctx.client);

    let mut target = uri::Parts::default();
    target.path_and_query = parts.uri.path_and_query().cloned();
    if authority.is_some() {
        target.scheme = Some(scheme);
        target.authority = authority;
    }
    let mut head = Request::new(());
    *head.method_mut() = parts.method;
    *head.uri_mut() = Uri::from_parts(target).map_err(|error| {
        Reason::Malformed.with_source("the request's target is malformed", error)
    })?;
    *head.headers_mut() = fields;
    if let Some(overflow) = parts.extensions.get::<TargetOverflow>() {
        head.extensions_mut().insert(overflow.clone());
    }
    Ok(head)
}

/// Whether the scheme of the client's request is https. The TLS of a connection to a proxy is not a part of the request.
fn is_https(ctx: StreamContext<'_>) -> bool {
    ctx.connection.tls && !ctx.proxy.listener.is_proxy()
}

fn scheme(ctx: StreamContext<'_>) -> uri::Scheme {
    if is_https(ctx) {
        uri::Scheme::HTTPS
    } else {
        uri::Scheme::HTTP
    }
}

/// Appends this hop to `Via` (RFC 9110 §7.6.3).
pub(super) fn append_via(fields: &mut HeaderMap, version: Version) {
    let value = if version == Version::HTTP_2 {
        "2 causeway"
    } else {
        "1.1 causeway"
    };
    fields.append(VIA, HeaderValue::from_static(value));
}

/// Returns the upstream's response, or the edge's rejection as an error.
pub(super) fn into_client_response(
    ctx: StreamContext<'_>,
    answer: Response<StreamReceiver>,
) -> Result<Response<ResponseBody>, Error> {
    let (mut parts, body) = answer.into_parts();
    check_edge_rejection(ctx, &parts.headers)?;
    headers::normalize_response_framing(parts.status, &mut parts.headers).map_err(|what| {
        let (target, node) = (&ctx.route.target, ctx.route.node.as_str());
        Reason::TargetBroken.error(format!("{target} on {node} {what}"))
    })?;
    request::strip_connection_headers(&mut parts.headers);
    append_via(&mut parts.headers, Version::HTTP_2);
    parts.version = Version::default();
    parts.extensions.clear();
    ctx.record.response_started(parts.status);
    let body =
        ResponseBody::stream(body, &ctx.route.node, ctx.record).with_content_length(&parts.headers);
    Ok(Response::from_parts(parts, body))
}

/// Checks the error that the edge itself reports, if it rejected the stream.
///
/// # Errors
/// The rejection.
pub(super) fn check_edge_rejection(
    way: StreamContext<'_>,
    fields: &HeaderMap,
) -> Result<(), Error> {
    peer::check_rejection(way, fields)?;
    let header_text = |name: &HeaderName| fields.get(name).and_then(|value| value.to_str().ok());
    let Some(code) = header_text(&wire::FAILURE) else {
        return Ok(());
    };
    let detail = header_text(&wire::DETAIL)
        .unwrap_or("the edge failed the request")
        .to_owned();
    let reason = RejectCode::parse(code).map_or(Reason::TargetBroken, Reason::from);
    // Most messages contain the name of the edge. A client should always see which edge sent the message.
    let node = way.route.node.as_str();
    let names_node = detail.starts_with(node);
    let mut detail = if names_node {
        detail
    } else {
        format!("{node}: {detail}")
    };
    let listener_port = way.proxy.listener.bound_port;
    if reason == Reason::EdgePolicy && listener_port.is_some() && listener_port == way.route.port()
    {
        detail.push_str(
            "; that is the number that this listener listens on: write the node's own port into the URL, \
             and the listener's address into --connect-to or DNS",
        );
    }
    Err(reason.error(detail))
}
