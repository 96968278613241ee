//! A TCP session: bytes both ways between a stream and an upstream.
//!
//! The upstream is dialled before the stream is answered, else a refused port would look like success (invariant 4). The
//! bytes are raw, whatever the port's scheme: the client speaks TLS itself if the upstream does. A reset on either side
//! becomes a reset on the other.

use super::{
    Proxy, RequestError, ResponseTail, UpstreamResponse,
    dial::{self, Connected},
    relayed,
    upstream::{Upstream, UpstreamIo},
};
use crate::metrics::StreamOutcome;
use causeway_tunnel::{StreamReceiver, StreamSender, copy};
use http::Response;
use std::sync::Arc;

/// Dials the upstream.
pub(super) async fn ask(
    way: &Proxy,
    app: &Upstream,
    body: StreamReceiver,
    connected: &Connected,
) -> Result<UpstreamResponse, RequestError> {
    let deadline = dial::deadline(way.timeouts.dial);
    let (tcp, address) = app.dial(way, deadline).await?;
    connected.set(address);
    Ok(UpstreamResponse {
        head: Response::new(()),
        then: ResponseTail::Bytes(Box::new(UpstreamIo::plain(tcp)), body),
    })
}

/// Passes bytes until both directions have ended. Serves upgrades too.
pub(super) async fn pass(
    socket: UpstreamIo,
    send: StreamSender,
    receive: StreamReceiver,
) -> StreamOutcome {
    let passed = Arc::new(copy::ByteCounters::default());
    relayed(&copy::relay(socket, send, receive, passed, false).await)
}
