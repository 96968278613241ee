//! Step 6b: 101 and extended CONNECT (RFC 8441).
//!
//! The upgrade travels with the caller's own method and token; the edge performs it with the app. Where the app
//! switched, the caller gets its 101 and then bytes both ways, untouched. Any other answer comes back whole.

use crate::{
    error::{Error, Reason},
    proxy::{Way, forward, outgoing::Outgoing, relay, request, request_body::RequestBody},
};
use causeway_tunnel::{client::Ask, wire};
use http::{
    HeaderValue, Request, Response, StatusCode, Version,
    header::{CONNECTION, CONTENT_LENGTH, UPGRADE},
};

/// Forwards an upgrade to the protocol that `token` names.
///
/// # Errors
/// If the stream cannot be opened, or the app does not answer in time.
pub async fn run(
    way: Way<'_>,
    mut request: Request<RequestBody>,
    token: &str,
) -> Result<Response<Outgoing>, Error> {
    let switched = hyper::upgrade::on(&mut request);
    let (parts, _) = request.into_parts();
    let mut head = forward::head(way, parts)?;
    head.headers_mut().remove(CONTENT_LENGTH);
    let bound = way.proxy.shared.timeouts.upgrade_first_byte;
    let ask = Ask::Upgrade(token.to_owned());
    let answered = async {
        let opened = way
            .tunnel
            .open(head, &ask, &way.route.target, false)
            .await?;
        Ok((opened.send, opened.answer.await?))
    };
    let (send, answer) = match tokio::time::timeout(bound, answered).await {
        Ok(Ok(opened)) => opened,
        Ok(Err(error)) => return Err(forward::failed(way, &error)),
        Err(_) => {
            let detail = format!(
                "{} did not answer the upgrade within {bound:?}",
                way.route.node
            );
            return Err(Reason::TargetTimeout.says(detail));
        }
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
    Ok(Response::from_parts(parts, Outgoing::empty()))
}

/// The app did not switch: its answer passes whole. What it may still send comes over the same stream, so
/// this end of it ends in order and not with a reset.
fn refused(
    way: Way<'_>,
    mut send: causeway_tunnel::Send,
    answer: Response<causeway_tunnel::Receive>,
) -> Result<Response<Outgoing>, Error> {
    // A stream that is gone already says so in the body.
    let _ = send.end();
    forward::respond(way, answer)
}
