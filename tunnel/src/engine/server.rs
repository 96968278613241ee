//! Server role: accepts streams.

use super::{
    builder::ServerRole,
    config::Config,
    error::{Error, Reason},
    flow::WindowLimits,
    frame,
    handle::{RecvStream, SendStream, StreamId, StreamRef, gone, poll_reset},
    io::Driver,
    message,
    streams::Half,
};
use bytes::Bytes;
use http::{Request, Response};
use std::{
    fmt,
    future::Future,
    io,
    marker::PhantomData,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite};

/// Configuration of a server's connection.
pub type Builder = super::builder::Builder<ServerRole>;

impl Builder {
    /// Creates the default configuration.
    pub fn new() -> Self {
        Self::with_config(Config::new(true))
    }

    /// Sets the number of streams that the peer may have open.
    pub fn max_concurrent_streams(&mut self, max: u32) -> &mut Self {
        self.config.settings.max_concurrent_streams = Some(max);
        self
    }

    /// Announces extended CONNECT (RFC 8441).
    pub fn enable_connect_protocol(&mut self) -> &mut Self {
        self.config.settings.enable_connect_protocol = Some(1);
        self
    }

    /// Begins HTTP/2 on a transport. The future is ready when the client's preface has arrived.
    pub fn handshake<S, B>(&self, io: S) -> Handshake<S, B>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        Handshake(Some(Connection {
            driver: Driver::new(io, self.config.clone()),
            _data: PhantomData,
        }))
    }
}

impl Default for Builder {
    fn default() -> Self {
        Self::new()
    }
}

/// Begins HTTP/2 with the default configuration.
pub fn handshake<S>(io: S) -> Handshake<S, Bytes>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    Builder::new().handshake(io)
}

/// Future that returns a connection once the client's preface has arrived.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct Handshake<S, B = Bytes>(Option<Connection<S, B>>);

impl<S: AsyncRead + AsyncWrite + Unpin, B> Future for Handshake<S, B> {
    type Output = Result<Connection<S, B>, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(connection) = &mut self.0 else {
            return Poll::Ready(Err(Error::user("the future is complete")));
        };
        let polled = connection.driver.poll(cx);
        if connection.driver.shared().lock().receiving.has_preface() {
            // The connection returns its end itself.
            return Poll::Ready(self.0.take().ok_or_else(gone));
        }
        ready!(polled)?;
        let text = "the connection was closed before its preface";
        let error = io::Error::new(io::ErrorKind::UnexpectedEof, text);
        Poll::Ready(Err(Error::io(error)))
    }
}

/// A server's connection.
pub struct Connection<S, B = Bytes> {
    driver: Driver<S>,
    _data: PhantomData<fn(B)>,
}

impl<S, B> fmt::Debug for Connection<S, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("server::Connection")
    }
}

/// A request with its receiving half, and the handle for its response.
pub type Accepted<B> = (Request<RecvStream>, SendResponse<B>);

impl<S, B> Connection<S, B> {
    /// Sets the limits for the windows of streams towards this end. By default all have the initial window.
    pub fn limit_windows(&mut self, limits: WindowLimits) {
        self.driver
            .with(|state| state.stream_windows.limits = limits);
    }

    /// Begins the end (RFC 9113 section 6.8): a GOAWAY that still accepts streams, one that names the last stream a round trip
    /// later, and the end once all streams have ended.
    pub fn graceful_shutdown(&mut self) {
        self.driver.with(super::connection::State::shut_down);
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin, B> Connection<S, B> {
    /// Moves the connection, and returns the next request. `None` when the connection has ended.
    pub fn poll_accept(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Accepted<B>, Error>>> {
        // Nothing more is read while a request waits, so that the heads of a fast peer do not pile up.
        if let Some(accepted) = self.next_request() {
            return Poll::Ready(Some(Ok(accepted)));
        }
        if let Poll::Ready(result) = self.driver.poll(cx) {
            return Poll::Ready(result.err().map(Err));
        }
        self.next_request()
            .map_or(Poll::Pending, |accepted| Poll::Ready(Some(Ok(accepted))))
    }

    fn next_request(&mut self) -> Option<Accepted<B>> {
        if !self.driver.has_requests {
            return None;
        }
        let (key, request) = self.driver.with(super::connection::State::next_request)?;
        let handle = || StreamRef {
            shared: self.driver.shared().clone(),
            key,
        };
        let respond = SendResponse {
            stream: handle(),
            _data: PhantomData,
        };
        let request = request.map(|()| RecvStream::new(handle()));
        Some((request, respond))
    }

    /// Returns the size of all buffers, in bytes.
    #[cfg(feature = "fuzzing")]
    pub fn buffered_memory(&self) -> usize {
        self.driver.buffered_memory()
    }

    /// Returns the next request, see [`Connection::poll_accept`].
    pub async fn accept(&mut self) -> Option<Result<Accepted<B>, Error>> {
        std::future::poll_fn(|cx| self.poll_accept(cx)).await
    }
}

/// Handle for the response on a stream.
#[derive(Debug)]
pub struct SendResponse<B = Bytes> {
    stream: StreamRef,
    _data: PhantomData<fn(B)>,
}

impl<B> SendResponse<B> {
    /// Sends the head of the response. With `end_of_stream` nothing follows.
    ///
    /// # Errors
    /// If the stream was reset, a response was sent already, or the head is malformed.
    #[expect(clippy::needless_pass_by_value, reason = "the interface of h2")]
    pub fn send_response(
        &mut self,
        response: Response<()>,
        end_of_stream: bool,
    ) -> Result<SendStream<B>, Error> {
        self.send_head(&response, true, end_of_stream)?;
        Ok(SendStream::new(StreamRef {
            shared: self.stream.shared.clone(),
            key: self.stream.key,
        }))
    }

    /// Sends an interim response (RFC 9110 section 15.2).
    ///
    /// # Errors
    /// As [`SendResponse::send_response`].
    #[expect(clippy::needless_pass_by_value, reason = "the interface of h2")]
    pub fn send_informational(&mut self, response: Response<()>) -> Result<(), Error> {
        if !response.status().is_informational() {
            return Err(Error::user("the response is not an interim one"));
        }
        self.send_head(&response, false, false)
    }

    fn send_head(&self, response: &Response<()>, is_final: bool, end: bool) -> Result<(), Error> {
        if message::has_forbidden_field(response.headers()) {
            return Err(Error::user("the response's head is malformed"));
        }
        let key = self.stream.key;
        self.stream.shared.with(|state| {
            let stream = state.store.get(key).ok_or_else(gone)?;
            if let Some(error) = &stream.error {
                return Err(error.clone());
            }
            if stream.send != Half::AwaitingHead {
                return Err(Error::user("the response was sent already"));
            }
            if is_final {
                stream.handles += 1;
                stream.send = if end { Half::Ended } else { Half::Open };
                stream.end_sent = end;
            }
            let (encoder, max_frame) = (&mut state.encoder, state.peer.max_frame);
            frame::put_block(&mut state.heads, (key.id, end), max_frame, |block| {
                message::put_response(encoder, response, block);
            });
            state.has_work = true;
            state.settle(key);
            Ok(())
        })
    }

    /// Waits for a reset, and returns its code, or the error by which the connection ended.
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<Result<Reason, Error>> {
        poll_reset(&self.stream, cx)
    }

    /// Resets the stream.
    pub fn send_reset(&mut self, reason: Reason) {
        let key = self.stream.key;
        (self.stream.shared).with(|state| state.reset(key, reason, super::error::Initiator::User));
    }

    /// Returns the stream's number.
    pub fn stream_id(&self) -> StreamId {
        self.stream.id()
    }
}
