//! Relay between a socket and a stream, see [`causeway_rt::copy`].

use crate::{
    error::StreamError,
    stream::{StreamReceiver, StreamSender},
};
use bytes::Bytes;
pub use causeway_rt::copy::{ByteCounters, MeteredIo, relay_connection};
use causeway_rt::{
    copy::{self, FarEnd},
    socket::ResetOnClose,
};
use std::{
    ops::Deref,
    task::{Context, Poll},
};
use tokio::io::{AsyncRead, AsyncWrite};

/// Outcome of a relay. `E` is the error of the far end.
pub type CopyOutcome<E = StreamError> = copy::CopyOutcome<E>;

/// Relays between a socket and a stream, see [`copy::relay`].
pub fn relay<S>(
    socket: S,
    send: StreamSender,
    receive: StreamReceiver,
    counters: impl Deref<Target = ByteCounters>,
    wait_for_socket: bool,
) -> impl Future<Output = CopyOutcome>
where
    S: AsyncRead + AsyncWrite + ResetOnClose + Unpin,
{
    let stream = StreamHalves { send, receive };
    copy::relay(socket, stream, counters, wait_for_socket)
}

/// Stream of a tunnel.
struct StreamHalves {
    send: StreamSender,
    receive: StreamReceiver,
}

impl FarEnd for StreamHalves {
    type Error = StreamError;

    fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        chunk: &mut Bytes,
    ) -> Poll<Result<(), StreamError>> {
        self.send.poll_send_data(cx, chunk)
    }

    fn poll_end(&mut self, _: &mut Context<'_>) -> Poll<Result<(), StreamError>> {
        Poll::Ready(self.send.end())
    }

    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, StreamError>>> {
        let received = self.receive.poll_data(cx);
        if let Poll::Ready(None) = received {
            // A session has no use for trailers, which would count as unread bytes.
            drop(self.receive.poll_trailers(cx));
        }
        received
    }

    fn poll_evicted(&mut self, cx: &mut Context<'_>) -> Poll<StreamError> {
        self.receive.poll_evicted(cx).map(|()| StreamError::Evicted)
    }

    fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<StreamError> {
        self.send.poll_reset(cx)
    }

    async fn flush_and_abort(&mut self) {
        self.send.flush_and_abort().await;
    }
}
