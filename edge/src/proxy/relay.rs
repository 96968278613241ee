//! TCP session: bytes in both directions between a stream and an upstream.
//!
//! The edge connects to the upstream before it answers the stream, because otherwise a refused port would look like success
//! (invariant 4). The bytes are raw, whatever the port's scheme is: the client itself uses TLS if the upstream requires it. A
//! reset on either side becomes a reset on the other side.

use super::{
    dial::{Connected, Dialer},
    response::{ResponseTail, UpstreamResponse},
    upstream::{RequestError, Upstream, UpstreamIo},
};
use crate::metrics::StreamOutcome;
use causeway_tunnel::{
    StreamError, StreamReceiver, StreamSender,
    copy::{self, CopyOutcome},
};
use http::Response;
use std::sync::Arc;

/// Connects to the upstream.
pub(super) async fn dial_upstream(
    dialer: &Dialer,
    upstream: &Upstream,
    body: StreamReceiver,
    connected: &Connected,
) -> Result<UpstreamResponse, RequestError> {
    let (tcp, address) = dialer.dial(upstream, dialer.deadline()).await?;
    connected.set(address);
    Ok(UpstreamResponse {
        head: Response::new(()),
        then: ResponseTail::Bytes(Box::new(UpstreamIo::plain(tcp)), body),
    })
}

/// Copies bytes until both directions have ended. Upgrades use this too.
pub(super) async fn relay_bytes(
    socket: UpstreamIo,
    send: StreamSender,
    receive: StreamReceiver,
) -> StreamOutcome {
    let counters = Arc::new(copy::ByteCounters::default());
    match copy::relay(socket, send, receive, counters, false).await {
        CopyOutcome::Clean => StreamOutcome::Done,
        CopyOutcome::Socket(_) => StreamOutcome::UpstreamFailed,
        CopyOutcome::Stream(StreamError::Lost { .. }) => StreamOutcome::TunnelLost,
        CopyOutcome::Stream(StreamError::Evicted) => StreamOutcome::Evicted,
        CopyOutcome::Stream(_) => StreamOutcome::ClientClosed,
    }
}
