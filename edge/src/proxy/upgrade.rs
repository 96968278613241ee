//! An upgrade: HTTP/1.1 with the app, on a connection of its own.
//!
//! The request goes as the caller made it, with its own method and its own `Upgrade`. A 101 travels as 200 with
//! the app's token in a private field, then bytes pass both ways, those behind the 101 first; any other
//! answer travels whole. The app has `timeouts.upgrade` for its first byte, the session has no bound.

use super::{
    Answer, Failed, Then, Way,
    app::{App, Offer, Replayed},
    body::{Body, Outgoing},
    broken, forward,
    kept::Line,
    target,
};
use causeway_tunnel::{Receive, wire};
use http::{
    HeaderValue, Method, Request, Response, StatusCode, Uri, Version,
    header::{CONNECTION, CONTENT_LENGTH, UPGRADE},
    uri::PathAndQuery,
};
use hyper::body::Incoming;
use tokio::time::timeout;

/// Asks the app to switch protocols.
pub(super) async fn ask(
    way: &Way,
    app: &App,
    token: &str,
    (head, body): (Request<()>, Receive),
) -> Result<Answer, Failed> {
    let request = prepare(head, app, token)
        .ok_or_else(|| broken(app, "cannot be asked for this protocol"))?;
    let deadline = target::deadline(way.timeouts.dial);
    let connection = app.connect(way, Offer::Http1, deadline).await?;
    let mut line = Line::begin(connection)
        .await
        .map_err(|error| forward::failed(app, &error))?;
    let asked = line.ask(request);
    let answer = match timeout(way.timeouts.upgrade, asked).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => return Err(forward::failed(app, error.error())),
        Err(_) => {
            let what = format!(
                "did not answer the upgrade within {:?}",
                way.timeouts.upgrade
            );
            return Err(target::slow(app, &what).into());
        }
    };
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        return switched(app, line, answer, body).await;
    }
    let (head, incoming) = forward::ended_head(app, answer)?;
    Ok(Answer {
        head,
        then: Then::Body(Box::new(Body::http1(app, Box::new(line), incoming))),
    })
}

fn prepare(head: Request<()>, app: &App, token: &str) -> Option<Request<Outgoing>> {
    let mut request = head.map(|()| Outgoing::default());
    let path = request.uri().path_and_query().cloned();
    let authority = request.uri().authority().cloned();
    *request.version_mut() = Version::HTTP_11;
    *request.uri_mut() = Uri::from(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
    let has_content = matches!(
        *request.method(),
        Method::POST | Method::PUT | Method::PATCH
    );
    let fields = request.headers_mut();
    forward::to_origin(fields, app, authority.as_ref());
    fields.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    fields.insert(UPGRADE, HeaderValue::from_str(token).ok()?);
    if has_content {
        // RFC 9110 §8.6; kubectl's POST says so too, and CONNECT could not carry it.
        fields.insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
    }
    Some(request)
}

async fn switched(
    app: &App,
    line: Line,
    answer: Response<Incoming>,
    body: Receive,
) -> Result<Answer, Failed> {
    let token = answer.headers().get(UPGRADE).cloned();
    let token = token.ok_or_else(|| broken(app, "switched protocols without saying to which"))?;
    let (mut head, _) = forward::ended_head(app, answer)?;
    *head.status_mut() = StatusCode::OK;
    head.headers_mut().insert(wire::SWITCHED, token);
    match line.into_bytes().await {
        Ok(Some((early, connection))) => Ok(Answer {
            head,
            then: Then::Bytes(Box::new(Replayed::new(early, connection)), body),
        }),
        Ok(None) => Err(broken(app, "closed the connection behind its 101")),
        Err(error) => Err(forward::failed(app, &error)),
    }
}
