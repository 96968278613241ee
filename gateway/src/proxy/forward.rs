//! Step 6a: a plain request over a tunnel stream.
//!
//! The head is sent first, the body after it (`start_upload`), so that an answer that comes before the body is read passes at
//! once. A client that goes away drops this future or its body, and with it the stream: a reset.

use crate::{
    error::{Error, Reason},
    proxy::{
        access_log::AccessRecord,
        context::StreamContext,
        counted_body::{CONTINUE, CountedRequestBody},
        forwarding_headers::Hop,
        listener::ClientConnection,
        request,
        request_body::RequestBody,
        response_body::ResponseBody,
        trace_context,
        upload_budget::{BufferedBody, track_buffered},
    },
};
use causeway_certs::NodeName;
use causeway_tunnel::{
    RejectCode, StreamError, StreamKind, StreamReceiver, StreamSender,
    body::{PumpError, pump},
    gateway_side::StreamResponse,
    headers,
    informational::ExchangeId,
    request_target::TargetOverflow,
    wire,
};
use futures_util::future::OptionFuture;
use http::{
    HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Uri, Version,
    header::{AUTHORIZATION, CONTENT_LENGTH, EXPECT, VIA},
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
/// If the stream cannot be opened, or breaks before the answer's head.
pub async fn run(
    way: StreamContext<'_>,
    request: Request<RequestBody>,
) -> Result<Response<ResponseBody>, Error> {
    let (parts, body) = request.into_parts();
    let expects = headers::lists(&parts.headers, &EXPECT, "100-continue");
    let version = parts.version;
    let head = head(way, parts)?;
    let end = body.is_end_stream();
    let opened = way
        .tunnel
        .open(head, &StreamKind::Request, &way.route.target, end)
        .await
        .map_err(|error| failed(way, &error))?;
    let (go, upload, request) = if end {
        (None, None, Some(opened.send))
    } else {
        let given_up = CancellationToken::new();
        let go = start_upload(
            way,
            (body, version),
            (opened.send, given_up.clone()),
            expects,
        );
        (go, Some(given_up.drop_guard()), None)
    };
    let answer = match wait(way, opened.answer, go).await {
        Ok(answer) => answer,
        // The stream may have failed because of the client's own data, which is not a fault of the node.
        Err(error) => return Err(way.record.failure().unwrap_or_else(|| failed(way, &error))),
    };
    Ok(respond(way, answer)?.map(|body| body.with_upload(upload).with_request(request)))
}

/// Sends the body in a task of its own, which ends with the request or its answer, even while it waits for a tunnel that takes
/// nothing. Until then its waiting bytes count as buffered. With `expects` it waits for the sender that is returned.
pub(super) fn start_upload(
    way: StreamContext<'_>,
    (inner, version): (RequestBody, Version),
    (send, given_up): (StreamSender, CancellationToken),
    expects: bool,
) -> Option<oneshot::Sender<()>> {
    let (tell, told) = oneshot::channel();
    let told = OptionFuture::from(expects.then_some(told));
    let waiting = BufferedBody::default();
    let body = counted(way, (inner, version), waiting.clone());
    let shared = way.proxy.shared.clone();
    let record = way.record.clone();
    // The body may continue after a complete answer.
    let busy = (version == Version::HTTP_2).then(|| way.connection.idle.busy());
    let node = way.route.node.clone();
    way.proxy.tasks.spawn(debug_span!("body"), async move {
        let task = pin!(upload(
            body,
            send,
            told,
            (node, shared.timeouts.upload, &record)
        ));
        tokio::select! {
            biased;
            () = record.upload_ended() => {}
            () = given_up.cancelled() => {}
            () = track_buffered(shared.limits.pressure(), &waiting, task) => {}
        }
        drop(busy);
    });
    expects.then_some(tell)
}

async fn upload(
    body: CountedRequestBody,
    mut send: StreamSender,
    go: OptionFuture<oneshot::Receiver<()>>,
    (node, patience, record): (NodeName, Duration, &AccessRecord),
) {
    // If a request is cancelled while it waits, its stream below is cancelled as well.
    let _ = go.await;
    match pump(body, &mut send, Some(patience)).await {
        Ok(()) => {}
        Err(PumpError::Stalled(_)) => {
            let patience = humantime::format_duration(patience);
            let detail =
                format!("the app on {node} has read nothing from the request body for {patience}");
            record.failed(&Reason::TargetTimeout.error(detail));
        }
        Err(PumpError::Body(error)) => {
            tracing::debug!(%error, "a client aborted its request body");
        }
        Err(PumpError::Stream(error @ StreamError::Evicted)) => {
            record.failed(&Error::of_stream(node.as_str(), &error));
        }
        Err(PumpError::Stream(error)) => {
            tracing::debug!(%error, "a request body was not read to its end");
        }
    }
}

/// Returns the body of a request, which reports its chunks to `waiting`.
pub(super) fn counted(
    way: StreamContext<'_>,
    (inner, version): (RequestBody, Version),
    waiting: BufferedBody,
) -> CountedRequestBody {
    let shared = &way.proxy.shared;
    CountedRequestBody {
        inner,
        window: (version == Version::HTTP_2).then_some(way.connection.window),
        waiting,
        record: way.record.clone(),
        told: way.proxy.listener.told.clone(),
        bounds: (shared.header_bytes, shared.max_headers),
    }
}

/// Waits for the final answer, and forwards interim ones. Releases the body at the upstream's 100, at its answer, or after a
/// timeout.
pub(super) async fn wait(
    way: StreamContext<'_>,
    mut answer: StreamResponse,
    go: Option<oneshot::Sender<()>>,
) -> Result<Response<StreamReceiver>, StreamError> {
    if let Some(go) = go {
        let asked = async {
            while let Some(interim) = answer.interim().await? {
                let exchange = way.exchange;
                pass_interim(
                    way.connection,
                    exchange,
                    interim.status(),
                    interim.headers(),
                );
                if interim.status() == StatusCode::CONTINUE {
                    break;
                }
            }
            Ok::<_, StreamError>(())
        };
        if let Ok(failed) = tokio::time::timeout(CONTINUE, asked).await {
            failed?;
        }
        // A body that is gone needs no leave.
        let _ = go.send(());
    }
    while let Some(interim) = answer.interim().await? {
        let exchange = way.exchange;
        pass_interim(
            way.connection,
            exchange,
            interim.status(),
            interim.headers(),
        );
    }
    answer.await
}

/// Passes an interim answer on to the client (RFC 9110 §15.2).
pub(super) fn pass_interim(
    connection: &ClientConnection,
    exchange: ExchangeId,
    status: StatusCode,
    fields: &HeaderMap,
) {
    let of_engine = exchange == ExchangeId::Http1 && status == StatusCode::CONTINUE;
    if of_engine || exchange == ExchangeId::None {
        // hyper sends its own 100 for HTTP/1.1 when the body is polled.
        return;
    }
    let mut fields = fields.clone();
    request::clean(&mut fields);
    fields.remove(CONTENT_LENGTH);
    connection.interims.send(exchange, status, &fields);
}

/// The request's head as the tunnel takes it.
pub(super) fn head(
    way: StreamContext<'_>,
    parts: http::request::Parts,
) -> Result<Request<()>, Error> {
    let (version, scheme) = (parts.version, scheme(way));
    let mut fields = parts.headers;
    if !way.proxy.listener.forward_authorization {
        fields.remove(AUTHORIZATION);
    }
    let host = headers::take_host(&mut fields);
    let authority = parts.uri.authority().cloned().or(host);
    request::clean(&mut fields);
    let hop = Hop {
        peer: way.connection.peer.ip(),
        tls: way.connection.tls,
        authority: authority.as_ref(),
        last: &way.connection.forwarded,
    };
    way.proxy.listener.forwarding.apply(hop, &mut fields);
    via(&mut fields, version);
    trace_context::never_index(&mut fields);
    // After `clean`, so that the client's `Connection` field cannot remove it.
    way.proxy.listener.told.put(&mut fields, way.client);

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
    if let Some(rest) = parts.extensions.get::<TargetOverflow>() {
        head.extensions_mut().insert(rest.clone());
    }
    Ok(head)
}

fn scheme(way: StreamContext<'_>) -> uri::Scheme {
    if way.connection.tls {
        uri::Scheme::HTTPS
    } else {
        uri::Scheme::HTTP
    }
}

/// Adds this hop (RFC 9110 §7.6.3).
pub(super) fn via(fields: &mut HeaderMap, version: Version) {
    let value = if version == Version::HTTP_2 {
        "2 causeway"
    } else {
        "1.1 causeway"
    };
    fields.append(VIA, HeaderValue::from_static(value));
}

/// Returns the upstream's answer, or the edge's refusal as an error.
pub(super) fn respond(
    way: StreamContext<'_>,
    answer: Response<StreamReceiver>,
) -> Result<Response<ResponseBody>, Error> {
    let (mut parts, body) = answer.into_parts();
    refusal(way, &parts.headers)?;
    headers::reframe_answer(parts.status, &mut parts.headers).map_err(|what| {
        let (target, node) = (&way.route.target, way.route.node.as_str());
        Reason::TargetBroken.error(format!("{target} on {node} {what}"))
    })?;
    request::clean(&mut parts.headers);
    via(&mut parts.headers, Version::HTTP_2);
    parts.version = Version::default();
    parts.extensions.clear();
    way.record.answered(parts.status);
    let body = ResponseBody::stream(body, &way.route.node, way.record).sized(&parts.headers);
    Ok(Response::from_parts(parts, body))
}

/// The edge's own word, if it failed the stream.
///
/// # Errors
/// The refusal.
pub(super) fn refusal(way: StreamContext<'_>, fields: &HeaderMap) -> Result<(), Error> {
    let text = |name: &HeaderName| fields.get(name).and_then(|value| value.to_str().ok());
    let Some(word) = text(&wire::FAILURE) else {
        return Ok(());
    };
    let detail = text(&wire::DETAIL)
        .unwrap_or("the edge failed the request")
        .to_owned();
    let reason = RejectCode::parse(word).map_or(Reason::TargetBroken, Reason::from);
    // Edges name themselves in most messages; a client should always see which edge sent the message.
    let node = way.route.node.as_str();
    let named = detail.starts_with(node);
    let mut detail = if named {
        detail
    } else {
        format!("{node}: {detail}")
    };
    if reason == Reason::EdgePolicy && way.proxy.listener.listens == Some(way.route.target.port) {
        detail.push_str(
            "; that is the number that this listener listens on: write the node's own port into the URL, \
             and the listener's address into --connect-to or DNS",
        );
    }
    Err(reason.error(detail))
}

/// A stream that failed before its answer.
pub(super) fn failed(way: StreamContext<'_>, error: &StreamError) -> Error {
    Error::of_stream(way.route.node.as_str(), error)
}
