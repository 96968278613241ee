//! Client's side of a session: its connection after an HTTP/1.1 upgrade or CONNECT, or the HTTP/2 stream of its CONNECT.

use super::{
    listener::{ClientConnection, idle_timer::ActiveRequest, stream_reset::StreamReset},
    request_body::RequestBody,
    upload_budget::BufferedBody,
};
use causeway_rt::socket::ResetOnClose;
use http::Request;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use std::{
    future::pending,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Session that begins when the response was sent.
pub(super) struct PendingSession {
    on_upgrade: OnUpgrade,
    /// Reset of the stream, if the client speaks HTTP/2.
    reset: Option<StreamReset>,
}

impl PendingSession {
    /// Takes the session of a request.
    pub(super) fn take(request: &mut Request<RequestBody>) -> Self {
        Self {
            on_upgrade: hyper::upgrade::on(&mut *request),
            reset: request.extensions_mut().remove(),
        }
    }

    /// Waits until the session begins. It keeps the client's connection busy from this call until it is dropped. `None` if the
    /// client disconnects before.
    pub(super) fn start(
        self,
        connection: Arc<ClientConnection>,
    ) -> impl Future<Output = Option<ClientSession>> {
        // The response itself is complete at once.
        let busy_guard = connection.idle.begin_request();
        async move {
            match self.on_upgrade.await {
                Ok(upgraded) => Some(ClientSession {
                    io: TokioIo::new(upgraded),
                    connection,
                    reset: self.reset,
                    buffered: BufferedBody::default(),
                    _busy_guard: busy_guard,
                }),
                Err(error) => {
                    tracing::debug!(%error, "a client disconnected before its session began");
                    None
                }
            }
        }
    }
}

/// Client's side of a session.
pub(super) struct ClientSession {
    io: TokioIo<Upgraded>,
    connection: Arc<ClientConnection>,
    reset: Option<StreamReset>,
    buffered: BufferedBody,
    _busy_guard: ActiveRequest,
}

impl ClientSession {
    /// Returns the counter of the bytes that are buffered for an HTTP/2 client.
    pub(super) fn buffered(&self) -> BufferedBody {
        self.buffered.clone()
    }
}

impl ClientSession {
    /// Returns a future that ends when the client has reset its HTTP/2 stream, also while nothing is read from it.
    pub(super) fn wait_reset(&self) -> impl Future<Output = ()> + use<> {
        let reset = self.reset.clone();
        async move {
            match reset {
                Some(reset) => reset.wait_reset_by_client().await,
                None => pending().await,
            }
        }
    }
}

impl ResetOnClose for ClientSession {
    /// Makes the next close reset the HTTP/2 stream, and not the connection that it shares with other streams.
    fn abort(&self) {
        match &self.reset {
            Some(reset) => reset.request(),
            None => self.connection.condition.abort(),
        }
    }
}

impl AsyncRead for ClientSession {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let filled_before = buf.filled().len();
        let polled = Pin::new(&mut self.io).poll_read(cx, buf);
        if self.reset.is_none() {
            return polled;
        }
        match buf.filled().len() - filled_before {
            0 if polled.is_pending() => self.buffered.note_pending(),
            0 => self.buffered.note_chunk(0),
            read => {
                self.connection.condition.note_taken();
                // At most a window of bytes is buffered behind the bytes read.
                let window = usize::try_from(self.connection.window).unwrap_or(usize::MAX);
                self.buffered.note_chunk(read + window);
            }
        }
        polled
    }
}

impl AsyncWrite for ClientSession {
    causeway_rt::forward!(io: poll_write, poll_flush);

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(reset) = &self.reset {
            reset.mark_half_closed();
        }
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
