//! Waiting for the head of a response on a stream, with the interim responses before it.

use super::{
    context::StreamContext, counted_body::CONTINUE_TIMEOUT, listener::ClientConnection, peer,
    request,
};
use causeway_tunnel::{
    StreamError, StreamReceiver, gateway_side::StreamResponse, informational::ExchangeId,
};
use http::{HeaderMap, Response, StatusCode, header::CONTENT_LENGTH};
use tokio::sync::oneshot;

/// Waits for the final response, and forwards interim ones. Releases the body at the upstream's 100, at its response, or after a
/// timeout.
pub(super) async fn wait_for_response(
    ctx: StreamContext<'_>,
    mut answer: StreamResponse,
    release_body: Option<oneshot::Sender<()>>,
) -> Result<Response<StreamReceiver>, StreamError> {
    if let Some(go) = release_body {
        let is_continue = |interim: &Response<()>| interim.status() == StatusCode::CONTINUE;
        let continued = forward_interims(ctx, &mut answer, is_continue);
        if let Ok(outcome) = tokio::time::timeout(CONTINUE_TIMEOUT, continued).await {
            outcome?;
        }
        // The send fails if the body has ended.
        let _ = go.send(());
    }
    forward_interims(ctx, &mut answer, |_| false).await?;
    answer.await
}

/// Forwards interim responses until the final response, or until one for which `is_last` is true. Returns whether there was one.
/// Those of another gateway are not for the client.
pub(super) async fn forward_interims(
    ctx: StreamContext<'_>,
    answer: &mut StreamResponse,
    is_last: impl Fn(&Response<()>) -> bool,
) -> Result<bool, StreamError> {
    while let Some(interim) = answer.next_informational().await? {
        if !peer::says_late(ctx, &interim) {
            let status = interim.status();
            forward_informational(ctx.connection, ctx.exchange, status, interim.headers());
        }
        if is_last(&interim) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Forwards an interim response to the client (RFC 9110 §15.2).
pub(super) fn forward_informational(
    connection: &ClientConnection,
    exchange: ExchangeId,
    status: StatusCode,
    fields: &HeaderMap,
) {
    let is_sent_by_hyper = exchange == ExchangeId::Http1 && status == StatusCode::CONTINUE;
    if is_sent_by_hyper || exchange == ExchangeId::None {
        // hyper sends its own 100 for HTTP/1.1 when the body is polled.
        return;
    }
    let mut fields = fields.clone();
    request::strip_connection_headers(&mut fields);
    fields.remove(CONTENT_LENGTH);
    connection.interims.send(exchange, status, &fields);
}
