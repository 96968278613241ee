//! An upgrade: HTTP/1.1 with the upstream, on a connection of its own.
//!
//! The request goes as the client made it, with its own method and its own `Upgrade`. A 101 travels as 200 with the
//! upstream's token in a private field, then bytes pass both ways, those behind the 101 first; any other answer travels
//! whole. A body comes first on the stream, and goes first to the upstream. Once the upstream has taken its part of the
//! body, it has `timeouts.upgrade` for its answer; the session has no bound.

use super::{
    dial::Connected,
    forward::{UpstreamClient, ended_head},
    http1_pool::PooledConnection,
    informational::InformationalQueue,
    request_body::{Behind, RequestBody},
    response::{ResponseBody, ResponseTail, UpstreamResponse},
    upstream::{RequestError, Upstream, broken, map_error, slow},
};
use causeway_tunnel::{StreamReceiver, request_target::TargetOverflow, wire};
use causeway_upstream::{alpn::Alpn, head, progress::while_moving};
use http::{
    Request, Response, StatusCode,
    header::{CONTENT_LENGTH, UPGRADE},
};
use hyper::body::Incoming;
use tokio::{io::AsyncWriteExt, sync::oneshot};

/// Source of a session's bytes.
enum Session {
    /// The stream: the request has no body.
    Whole(StreamReceiver),
    /// The stream, once the request's body was read from it.
    Behind(oneshot::Receiver<Behind>),
}

/// Asks the upstream to switch protocols.
pub(super) async fn ask(
    client: &UpstreamClient,
    app: &Upstream,
    token: &str,
    (head, body): (Request<()>, StreamReceiver),
    (interim, connected): (&InformationalQueue, &Connected),
) -> Result<UpstreamResponse, RequestError> {
    let (mut request, session) = prepare(head, app, token, body)
        .ok_or_else(|| broken(app, "cannot be requested with this upgrade protocol"))?;
    interim.listen(&mut request);
    let deadline = client.dialer.deadline();
    let connection = client.dialer.connect(app, Alpn::Http1, deadline).await?;
    connected.set(connection.1);
    let rest = request.extensions_mut().remove::<TargetOverflow>();
    let mut line = PooledConnection::begin(connection, rest, client.most_fields)
        .await
        .map_err(|error| map_error(app, &error))?;
    let (progress, bound) = (request.body().taken(), client.upgrade_bound);
    let Some(answer) = while_moving(bound, &progress, line.ask(request)).await else {
        let what = format!("did not answer the upgrade within {bound:?}");
        return Err(slow(app, &what).into());
    };
    let answer = answer.map_err(|error| map_error(app, error.error()))?;
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        return switched(app, line, answer, session).await;
    }
    let (head, incoming) = ended_head(app, answer)?;
    Ok(UpstreamResponse {
        head,
        then: ResponseTail::Body(Box::new(ResponseBody::http1(app, Box::new(line), incoming))),
    })
}

fn prepare(
    head: Request<()>,
    app: &Upstream,
    token: &str,
    stream: StreamReceiver,
) -> Option<(Request<RequestBody>, Session)> {
    let length = head.headers().get(CONTENT_LENGTH);
    let length = length.map_or(Some(0), |length| length.to_str().ok()?.parse().ok())?;
    let (content, session) = if length == 0 {
        (RequestBody::default(), Session::Whole(stream))
    } else {
        let (content, behind) = RequestBody::content(stream, length);
        (content, Session::Behind(behind))
    };
    let mut request = head.map(|()| content);
    head::to_upgrade(&mut request, &app.target, (token, length > 0))?;
    Some((request, session))
}

async fn switched(
    app: &Upstream,
    line: PooledConnection,
    answer: Response<Incoming>,
    session: Session,
) -> Result<UpstreamResponse, RequestError> {
    let token = answer.headers().get(UPGRADE).cloned();
    let token = token.ok_or_else(|| broken(app, "switched protocols without an Upgrade header"))?;
    let (mut head, _) = ended_head(app, answer)?;
    *head.status_mut() = StatusCode::OK;
    head.headers_mut().insert(wire::SWITCHED, token);
    let bytes = line.into_bytes().await;
    let bytes = bytes.map_err(|error| map_error(app, &error))?;
    let (early, mut connection) =
        bytes.ok_or_else(|| broken(app, "closed the connection after its 101 response"))?;
    let stream = match session {
        Session::Whole(stream) => stream,
        Session::Behind(mut behind) => {
            let (stream, first) = behind
                .try_recv()
                .map_err(|_| broken(app, "switched protocols before it had read the request"))?;
            let written = connection.write_all(&first).await;
            written.map_err(|_| broken(app, "closed the connection after its 101 response"))?;
            stream
        }
    };
    Ok(UpstreamResponse {
        head,
        then: ResponseTail::Bytes(Box::new(connection.behind(early)), stream),
    })
}
