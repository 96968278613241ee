//! Upgrade with an upstream with which the gateway itself speaks HTTP, on a separate connection.
//!
//! The request is sent as the client made it, with its own method and its own `Upgrade`. If the upstream switches protocols, the
//! client receives its 101 and then bytes pass both ways, starting with the bytes after the upstream's 101. Any other response
//! passes whole. After the upstream has received the request body, `timeouts.upgrade_first_byte` limits the wait for its
//! response. The session has no timeout.

use super::{
    connect::GuardedIo,
    error,
    forward::{
        check_response_head, forward_informational_responses, no_response_error, respond_http1,
    },
    pool::Http1Connection,
    request_body::UpstreamRequestBody,
    tls::UpstreamTls,
};
use crate::{
    error::Error,
    proxy::{
        client_session::PendingSession, context::StreamContext, forward, request,
        request_body::RequestBody, response_body::ResponseBody,
    },
};
use causeway_tunnel::{
    StreamError,
    copy::{self, CopyOutcome},
    request_target::TargetOverflow,
    stream_io::StreamIo,
};
use causeway_upstream::{
    connection::UpstreamIo,
    head,
    http1::{self, Http1Io, while_moving},
    response_error::find,
};
use http::{
    HeaderValue, Request, Response, StatusCode, Version,
    header::{CONNECTION, UPGRADE},
};
use http_body::Body;
use hyper::upgrade::{OnUpgrade, Upgraded};
use std::{pin::pin, sync::Arc};
use tracing::debug_span;

/// Forwards an upgrade to the protocol in `token`.
///
/// # Errors
/// If there is no connection to the upstream, or it does not answer in time.
pub(in crate::proxy) async fn forward_upgrade(
    way: StreamContext<'_>,
    app: &Arc<UpstreamTls>,
    mut request: Request<RequestBody>,
    token: &str,
) -> Result<Response<ResponseBody>, Error> {
    let session = PendingSession::take(&mut request);
    let (parts, body) = request.into_parts();
    let version = parts.version;
    let mut head = forward::build_head(way, parts)?;
    app.strip_authorization(head.headers_mut());
    let has_body = !body.is_end_stream();
    head::to_upgrade(&mut head, &way.route.target, (token, has_body)).ok_or_else(|| {
        error::broken_upstream(way.route, "cannot be requested to use this protocol")
    })?;
    let overflow = head.extensions_mut().remove::<TargetOverflow>();
    let connection = Http1Connection::open(way, app, overflow).await?;
    let conn_state = connection.life.clone();
    let mut in_use = connection.into_in_use();
    let body = if has_body {
        let upload = forward::counted(way, (body, version), conn_state.waiting.clone());
        UpstreamRequestBody::new(upload, &conn_state, None)
    } else {
        UpstreamRequestBody::default()
    };
    let upgrade_timeout = way.proxy.shared.timeouts.upgrade_first_byte;
    let mut request = head.map(|()| body);
    forward_informational_responses(way, &mut request, &in_use, None);
    let result = while_moving(
        upgrade_timeout,
        &conn_state.taken,
        in_use.send_request(request),
    )
    .await;
    let answered = result.ok_or_else(|| {
        let what = format!("did not answer the upgrade within {upgrade_timeout:?}");
        error::upstream_timeout(way.route, &what)
    })?;
    let mut answer = answered.map_err(|error| no_response_error(way, &in_use, error.error()))?;
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        return respond_http1(way, in_use, answer);
    }
    let Some(protocol) = answer.headers().get(UPGRADE).cloned() else {
        let what = "switched protocols without naming the new protocol";
        return Err(error::broken_upstream(way.route, what));
    };
    let upstream_upgrade = hyper::upgrade::on(&mut answer);
    let (mut parts, _) = answer.into_parts();
    check_response_head(way, &mut parts)?;
    request::strip_connection_headers(&mut parts.headers);
    forward::append_via(&mut parts.headers, Version::HTTP_11);
    parts.version = Version::HTTP_11;
    parts.extensions.clear();
    let fields = &mut parts.headers;
    fields.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    fields.insert(UPGRADE, protocol);
    way.record.session_started(parts.status);
    in_use.mark_upgraded();
    spawn_relay(way, session, upstream_upgrade);
    Ok(Response::from_parts(parts, ResponseBody::empty()))
}

/// Spawns a task that relays bytes between the upgraded connections of the client and of the upstream.
fn spawn_relay(way: StreamContext<'_>, session: PendingSession, upstream_upgrade: OnUpgrade) {
    let starting = session.start(way.connection.clone());
    let (record, route) = (way.record.clone(), way.route.clone());
    let work = async move {
        // The upstream's half is awaited first: it is available at once, and a client that has disconnected resets it.
        let far = match upstream_upgrade.await {
            Ok(upgraded) => into_upstream_io(upgraded),
            Err(error) => {
                return record.record_failure(&error::response_error(
                    &route,
                    &error,
                    "after its 101 answer",
                ));
            }
        };
        let Some(far) = far else {
            let what = "has a connection that HTTP does not release";
            return record.record_failure(&error::broken_upstream(&route, what));
        };
        let Some(session) = starting.await else {
            return;
        };
        let relaying = copy::relay_connection(session, far, &record.bytes, false);
        let outcome = record.run_unless_terminated(pin!(relaying)).await;
        match outcome {
            Err(_terminated) => {}
            Ok(CopyOutcome::Clean) => record.mark_session_ended(),
            Ok(CopyOutcome::Stream(error)) => {
                if let Some(stream) = find::<StreamError>(&error) {
                    record.record_failure(&Error::from_stream_error(route.node.as_str(), stream));
                } else {
                    let what = format!("aborted the session: {error}");
                    record.record_failure(&error::broken_upstream(&route, &what));
                }
            }
            Ok(CopyOutcome::Socket(error)) => {
                record.record_abandoned(&format!("the client aborted its session: {error}"));
            }
        }
    };
    way.proxy.tasks.spawn(debug_span!("session"), work);
}

/// Returns the upstream's connection after HTTP, preceded by the bytes that were already read from it.
fn into_upstream_io(far: Upgraded) -> Option<UpstreamIo<StreamIo>> {
    let parts = far.downcast::<Http1Io<GuardedIo>>().ok()?;
    let connection = http1::into_inner(parts.io).into_inner();
    Some(connection.with_prefix(parts.read_buf))
}
