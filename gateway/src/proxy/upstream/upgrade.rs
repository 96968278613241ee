//! An upgrade with an upstream to which the gateway itself speaks, on a connection of its own.
//!
//! The request is sent as the client made it, with its own method and its own `Upgrade`. If the upstream switched, the client
//! gets its 101 and then bytes both ways, those after the upstream's 101 first; any other answer passes whole. Once the upstream
//! has taken the request's body it has `timeouts.upgrade_first_byte` for its answer; the session has no bound.

use super::{
    connect::GuardedIo,
    error,
    forward::{check, listen, respond_by, unanswered},
    pool::Http1Connection,
    request_body::UpstreamRequestBody,
    tls::UpstreamTls,
};
use crate::{
    error::Error,
    proxy::{
        context::StreamContext,
        direct::{CountedIo, pass},
        forward,
        relay::UpgradedClient,
        request,
        request_body::RequestBody,
        response_body::ResponseBody,
        upload_budget::BufferedBody,
    },
};
use causeway_tunnel::{StreamError, request_target::TargetOverflow, stream_io::StreamIo};
use causeway_upstream::{
    connection::UpstreamIo,
    head,
    http1::{self, Http1Io},
    progress::while_moving,
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

/// Forwards an upgrade to the protocol that `token` names.
///
/// # Errors
/// If there is no connection to the upstream, or it does not answer in time.
pub(in crate::proxy) async fn run(
    way: StreamContext<'_>,
    app: &Arc<UpstreamTls>,
    mut request: Request<RequestBody>,
    token: &str,
) -> Result<Response<ResponseBody>, Error> {
    let switched = hyper::upgrade::on(&mut request);
    let (parts, body) = request.into_parts();
    let version = parts.version;
    let mut head = forward::head(way, parts)?;
    app.alone(head.headers_mut());
    let has_body = !body.is_end_stream();
    head::to_upgrade(&mut head, &way.route.target, (token, has_body))
        .ok_or_else(|| error::broken(way.route, "cannot be requested to use this protocol"))?;
    let rest = head.extensions_mut().remove::<TargetOverflow>();
    let opened = Http1Connection::open(way, app, rest).await?;
    let life = opened.life.clone();
    let mut asking = opened.asking();
    let body = if has_body {
        let upload = forward::counted(way, (body, version), life.waiting.clone());
        UpstreamRequestBody::new((upload, None), &life, None)
    } else {
        UpstreamRequestBody::default()
    };
    let bound = way.proxy.shared.timeouts.upgrade_first_byte;
    let mut request = head.map(|()| body);
    listen(way, &mut request, &asking, None);
    let answered = while_moving(bound, &life.taken, asking.ask(request)).await;
    let answered = answered.ok_or_else(|| {
        let what = format!("did not answer the upgrade within {bound:?}");
        error::slow(way.route, &what)
    })?;
    let mut answer = answered.map_err(|error| unanswered(way, &asking, error.error()))?;
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        return respond_by(way, asking, answer);
    }
    let Some(protocol) = answer.headers().get(UPGRADE).cloned() else {
        let what = "switched protocols without naming the new protocol";
        return Err(error::broken(way.route, what));
    };
    let far = hyper::upgrade::on(&mut answer);
    let (mut parts, _) = answer.into_parts();
    check(way, &mut parts)?;
    request::clean(&mut parts.headers);
    forward::via(&mut parts.headers, Version::HTTP_11);
    parts.version = Version::HTTP_11;
    parts.extensions.clear();
    let fields = &mut parts.headers;
    fields.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    fields.insert(UPGRADE, protocol);
    way.record.opened(parts.status);
    asking.switched();
    spawn(way, switched, far);
    Ok(Response::from_parts(parts, ResponseBody::empty()))
}

/// Passes bytes between the upgraded connections of the client and of the upstream, in a task of its own.
fn spawn(way: StreamContext<'_>, near: OnUpgrade, far: OnUpgrade) {
    let (connection, record) = (way.connection.clone(), way.record.clone());
    let route = way.route.clone();
    // The answer is over at once.
    let busy = connection.idle.busy();
    let work = async move {
        // The app's half comes first: it is available at once, and a client that has disconnected resets it.
        let far = match far.await {
            Ok(far) => released(far),
            Err(error) => {
                return record.failed(&error::of_answer(&route, &error, "after its 101 answer"));
            }
        };
        let Some(far) = far else {
            let what = "has a connection that HTTP does not release";
            return record.failed(&error::broken(&route, what));
        };
        let near = match near.await {
            Ok(near) => near,
            Err(error) => {
                return tracing::debug!(%error, "a client disconnected before its session began");
            }
        };
        let session = UpgradedClient::new(near, connection, (None, BufferedBody::default()), busy);
        let mut far = CountedIo::new(far, record.passed.clone());
        let passed = {
            let work = pin!(pass(session, &mut far, false));
            record.session_unless_ended(work).await
        };
        match passed {
            None => {}
            Some(Ok(())) => record.session_ended(),
            Some(Err(error)) => {
                if let Some(stream) = find::<StreamError>(&error) {
                    record.failed(&Error::of_stream(route.node.as_str(), stream));
                } else if far.is_broken() {
                    let what = format!("aborted the session: {error}");
                    record.failed(&error::broken(&route, &what));
                } else {
                    record.abandoned(&format!("the client aborted its session: {error}"));
                }
            }
        }
    };
    way.proxy.tasks.spawn(debug_span!("session"), work);
}

/// Returns the upstream's connection from HTTP, behind the bytes that were read of it too early.
fn released(far: Upgraded) -> Option<UpstreamIo<StreamIo>> {
    let parts = far.downcast::<Http1Io<GuardedIo>>().ok()?;
    let connection = http1::into_inner(parts.io).into_inner();
    Some(connection.behind(parts.read_buf))
}
