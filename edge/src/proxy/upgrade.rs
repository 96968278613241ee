//! Upgrade: HTTP/1.1 with the upstream, on a separate connection.
//!
//! The request is sent as the client made it, with its own method and its own `Upgrade`. A 101 becomes a 200 with the
//! upstream's token in a private field. Then bytes pass in both directions, beginning with those that followed the 101. Any
//! other response is passed on as a whole. The body of the request is at the beginning of the stream, and is sent to the
//! upstream first. The upstream must respond within `timeouts.upgrade` after it has read its part of the body. The session
//! has no time limit.

use super::{
    dial::Connected,
    forward::{UpstreamClient, sanitize_head},
    http1_pool::PooledConnection,
    informational::InformationalQueue,
    request_body::{Behind, RequestBody},
    response::{ResponseBody, ResponseTail, UpstreamResponse},
    upstream::{RequestError, Upstream, broken, map_error, timeout_error},
};
use causeway_tunnel::{StreamReceiver, request_target::TargetOverflow, wire};
use causeway_upstream::{connection::Alpn, head, http1::while_moving};
use http::{
    Request, Response, StatusCode,
    header::{CONTENT_LENGTH, UPGRADE},
};
use hyper::body::Incoming;
use tokio::{io::AsyncWriteExt, sync::oneshot};

/// Source of a session's bytes.
enum Session {
    /// Whole stream, for a request without a body.
    Whole(StreamReceiver),
    /// Stream, once the request's body was read from it.
    Behind(oneshot::Receiver<Behind>),
}

/// Sends a request to switch protocols to the upstream.
pub(super) async fn send_upgrade(
    client: &UpstreamClient,
    upstream: &Upstream,
    token: &str,
    (head, body): (Request<()>, StreamReceiver),
    (informational, connected): (&InformationalQueue, &Connected),
) -> Result<UpstreamResponse, RequestError> {
    let (mut request, session) = prepare_request(head, upstream, token, body)
        .ok_or_else(|| broken(upstream, "cannot be requested with this upgrade protocol"))?;
    informational.attach(&mut request);
    let deadline = client.dialer.deadline();
    let connection = client
        .dialer
        .connect(upstream, Alpn::Http1, deadline)
        .await?;
    connected.set(connection.1);
    let overflow = request.extensions_mut().remove::<TargetOverflow>();
    let mut line = PooledConnection::open(connection, overflow, client.most_fields)
        .await
        .map_err(|error| map_error(upstream, &error))?;
    let (progress, bound) = (request.body().chunks_taken(), client.upgrade_bound);
    let Some(response) = while_moving(bound, &progress, line.send_request(request)).await else {
        let what = format!("did not answer the upgrade within {bound:?}");
        return Err(timeout_error(upstream, &what).into());
    };
    let answer = response.map_err(|error| map_error(upstream, error.error()))?;
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        return to_switched_response(upstream, line, answer, session).await;
    }
    let (head, incoming) = sanitize_head(upstream, answer)?;
    Ok(UpstreamResponse {
        head,
        then: ResponseTail::Body(ResponseBody::http1(upstream, line, incoming)),
    })
}

fn prepare_request(
    head: Request<()>,
    upstream: &Upstream,
    token: &str,
    stream: StreamReceiver,
) -> Option<(Request<RequestBody>, Session)> {
    let length = head.headers().get(CONTENT_LENGTH);
    let length = length.map_or(Some(0), |length| length.to_str().ok()?.parse().ok())?;
    let (content, session) = if length == 0 {
        (RequestBody::default(), Session::Whole(stream))
    } else {
        let (content, rest) = RequestBody::content(stream, length);
        (content, Session::Behind(rest))
    };
    let mut request = head.map(|()| content);
    head::to_upgrade(&mut request, &upstream.target, (token, length > 0))?;
    Some((request, session))
}

async fn to_switched_response(
    upstream: &Upstream,
    pooled: Box<PooledConnection>,
    response: Response<Incoming>,
    session: Session,
) -> Result<UpstreamResponse, RequestError> {
    let token = response.headers().get(UPGRADE).cloned();
    let token =
        token.ok_or_else(|| broken(upstream, "switched protocols without an Upgrade header"))?;
    let (mut head, _) = sanitize_head(upstream, response)?;
    *head.status_mut() = StatusCode::OK;
    head.headers_mut().insert(wire::SWITCHED, token);
    let upgraded = pooled.into_upgraded().await;
    let bytes = upgraded.map_err(|error| map_error(upstream, &error))?;
    let (prefix, mut connection) =
        bytes.ok_or_else(|| broken(upstream, "closed the connection after its 101 response"))?;
    let stream = match session {
        Session::Whole(stream) => stream,
        Session::Behind(mut rest) => {
            let (stream, first_bytes) = rest.try_recv().map_err(|_| {
                broken(
                    upstream,
                    "switched protocols before it had read the request",
                )
            })?;
            let written = connection.write_all(&first_bytes).await;
            written
                .map_err(|_| broken(upstream, "closed the connection after its 101 response"))?;
            stream
        }
    };
    Ok(UpstreamResponse {
        head,
        then: ResponseTail::Bytes(Box::new(connection.with_prefix(prefix)), stream),
    })
}
