//! An upgrade with an upstream to which the gateway itself speaks, on a connection of its own.
//!
//! The request is sent as the client made it, with its own method and its own `Upgrade`. If the upstream switched, the client
//! gets its 101 and then bytes both ways, those after the upstream's 101 first; any other answer passes whole. Once the upstream
//! has taken the request's body it has `timeouts.upgrade_first_byte` for its answer; the session has no bound.

use super::{
    body::UpstreamRequestBody,
    error::{self, find},
    forward::{check, listen, respond_by, to_origin, unanswered},
    http1::Http1Connection,
    tls::UpstreamTls,
};
use crate::{
    error::Error,
    proxy::{
        StreamContext,
        counted_body::CountedRequestBody,
        direct::{CountedIo, pass},
        forward,
        relay::UpgradedClient,
        request,
        request_body::RequestBody,
        response_body::ResponseBody,
        upload_budget::BufferedBody,
    },
};
use causeway_rt::socket::ResetOnClose;
use causeway_tunnel::{StreamError, request_target::TargetOverflow};
use http::{
    HeaderValue, Method, Request, Response, StatusCode, Version,
    header::{CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING, UPGRADE},
};
use http_body::Body;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use std::{
    pin::pin,
    sync::{Arc, atomic::Ordering::Relaxed},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout,
};
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
    prepare(way, &mut head, token, has_body)?;
    let rest = head.extensions_mut().remove::<TargetOverflow>();
    let opened = Http1Connection::open(way, app, rest).await?;
    let life = opened.life.clone();
    let mut asking = opened.asking();
    let body = if has_body {
        let upload = CountedRequestBody::new(way, (body, version), life.waiting.clone());
        UpstreamRequestBody::new((upload, None), &life, None)
    } else {
        UpstreamRequestBody::default()
    };
    let bound = way.proxy.shared.timeouts.upgrade_first_byte;
    let answered = {
        let mut request = head.map(|()| body);
        listen(way, &mut request, &asking, None);
        let mut asked = pin!(asking.ask(request));
        loop {
            let before = life.taken.load(Relaxed);
            match timeout(bound, &mut asked).await {
                Ok(answered) => break answered,
                Err(_) if life.taken.load(Relaxed) != before => {}
                Err(_) => {
                    let what = format!("did not answer the upgrade within {bound:?}");
                    return Err(error::slow(way.route, &what));
                }
            }
        }
    };
    let mut answer = answered.map_err(|error| unanswered(way, &asking, error.error()))?;
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        return respond_by(way, asking, answer);
    }
    let Some(protocol) = answer.headers().get(UPGRADE).cloned() else {
        let what = "switched protocols without saying to which";
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

fn prepare(
    way: StreamContext<'_>,
    head: &mut Request<()>,
    token: &str,
    has_body: bool,
) -> Result<(), Error> {
    to_origin(way, head);
    let has_content = matches!(*head.method(), Method::POST | Method::PUT | Method::PATCH);
    let token = HeaderValue::from_str(token)
        .map_err(|_| error::broken(way.route, "cannot be asked for this protocol"))?;
    let fields = head.headers_mut();
    fields.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    fields.insert(UPGRADE, token);
    if has_body {
        if !fields.contains_key(CONTENT_LENGTH) {
            fields.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        return Ok(());
    }
    fields.remove(CONTENT_LENGTH);
    if has_content {
        // RFC 9110 §8.6; kubectl's POST says so too.
        fields.insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
    }
    Ok(())
}

/// Passes bytes between the upgraded connections of the client and of the upstream, in a task of its own.
fn spawn(way: StreamContext<'_>, near: OnUpgrade, far: OnUpgrade) {
    let (connection, record) = (way.connection.clone(), way.record.clone());
    let route = way.route.clone();
    // The answer is over at once.
    let busy = connection.idle.busy();
    let work = async move {
        // The app's half is first: it is there at once, and a client that has left resets it.
        let far = match far.await {
            Ok(far) => UpgradedIo(TokioIo::new(far)),
            Err(error) => {
                return record.failed(&error::of_answer(&route, &error, "behind its 101"));
            }
        };
        let near = match near.await {
            Ok(near) => near,
            Err(error) => return tracing::debug!(%error, "a client left before its session began"),
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
                    let what = format!("broke the session off: {error}");
                    record.failed(&error::broken(&route, &what));
                } else {
                    record.abandoned(&format!("the client broke its session off: {error}"));
                }
            }
        }
    };
    way.proxy.tasks.spawn(debug_span!("session"), work);
}

/// The upstream's connection after HTTP has released it.
struct UpgradedIo(TokioIo<Upgraded>);

impl ResetOnClose for UpgradedIo {
    fn abort(&self) {
        // What is dropped before its end is reset, and this is about to be.
    }
}

impl AsyncRead for UpgradedIo {
    causeway_rt::forward!(0: poll_read);
}

impl AsyncWrite for UpgradedIo {
    causeway_rt::forward!(0: poll_write, poll_flush, poll_shutdown);
}
