//! Client role: opens streams.

use super::{
    builder::ClientRole,
    config::Config,
    connection::{Shared, register},
    error::Error,
    flow::WindowLimits,
    handle::{FlowControl, PingPong, RecvStream, SendStream, StreamId, StreamRef, gone},
    io::Driver,
};
use bytes::Bytes;
use http::{Request, Response};
use std::{
    collections::VecDeque,
    fmt,
    future::{Future, poll_fn},
    marker::PhantomData,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite};

/// Configuration of a client's connection.
pub type Builder = super::builder::Builder<ClientRole>;

impl Builder {
    /// Creates the default configuration.
    pub fn new() -> Self {
        let mut config = Config::new(false);
        config.settings.enable_push = Some(0);
        Self::with_config(config)
    }

    /// Sets the number of streams that may be opened before the peer's SETTINGS arrive.
    pub fn initial_max_send_streams(&mut self, max: usize) -> &mut Self {
        self.config.initial_max_streams = max;
        self
    }

    /// Begins HTTP/2 on a transport: writes the preface and SETTINGS, as far as it takes them.
    ///
    /// # Errors
    /// Never; the connection returns the errors of the transport.
    pub async fn handshake<S, B>(&self, io: S) -> Result<(SendRequest<B>, Connection<S, B>), Error>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let mut driver = Driver::new(io, self.config.clone());
        poll_fn(|cx| {
            driver.start(cx);
            Poll::Ready(())
        })
        .await;
        let sender = SendRequest::new(driver.shared().clone());
        let connection = Connection {
            driver,
            has_ping_pong: true,
            _data: PhantomData,
        };
        Ok((sender, connection))
    }
}

impl Default for Builder {
    fn default() -> Self {
        Self::new()
    }
}

/// Begins HTTP/2 with the default configuration.
///
/// # Errors
/// Never; the connection returns the errors of the transport.
pub async fn handshake<S>(io: S) -> Result<(SendRequest<Bytes>, Connection<S, Bytes>), Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    Builder::new().handshake(io).await
}

/// The last of the handles that can open streams tells the connection when it goes.
struct Sender(Arc<Shared>);

impl Drop for Sender {
    fn drop(&mut self) {
        self.0.with(|state| {
            state.has_no_senders = true;
            state.has_work = true;
        });
    }
}

/// Handle that opens streams.
pub struct SendRequest<B = Bytes> {
    sender: Arc<Sender>,
    _data: PhantomData<fn(B)>,
}

impl<B> Clone for SendRequest<B> {
    fn clone(&self) -> Self {
        Self {
            sender: self.sender.clone(),
            _data: PhantomData,
        }
    }
}

impl<B> fmt::Debug for SendRequest<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SendRequest")
    }
}

impl<B> SendRequest<B> {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            sender: Arc::new(Sender(shared)),
            _data: PhantomData,
        }
    }

    /// Returns a future that gives the handle back once a stream may be opened.
    pub fn ready(self) -> ReadySendRequest<B> {
        ReadySendRequest {
            sender: Some(self),
            ticket: None,
        }
    }

    /// Whether the peer accepts extended CONNECT (RFC 8441 section 3).
    pub fn is_extended_connect_protocol_enabled(&self) -> bool {
        self.sender.0.lock().peer.allows_protocol
    }

    /// Opens a stream. If the peer allows no more streams now, the request waits.
    ///
    /// # Errors
    /// If the connection has ended or the peer leaves, or the head is malformed.
    pub fn send_request(
        &mut self,
        request: &Request<()>,
        end_of_stream: bool,
    ) -> Result<(ResponseFuture, SendStream<B>), Error> {
        let shared = &self.sender.0;
        let key = shared.with(|state| state.send_request(request, end_of_stream))?;
        let handle = || StreamRef {
            shared: shared.clone(),
            key,
        };
        let response = ResponseFuture {
            id: StreamId::new(key.id),
            stream: Some(handle()),
        };
        Ok((response, SendStream::new(handle())))
    }
}

/// Future that returns a [`SendRequest`] once a stream may be opened.
#[derive(Debug)]
pub struct ReadySendRequest<B = Bytes> {
    sender: Option<SendRequest<B>>,
    /// Place in the queue of those that wait.
    ticket: Option<u64>,
}

impl<B> Drop for ReadySendRequest<B> {
    fn drop(&mut self) {
        if let (Some(sender), Some(ticket)) = (&self.sender, self.ticket) {
            let shared = &sender.sender.0;
            shared.with(|state| state.leave_queue(ticket));
        }
    }
}

impl<B> Future for ReadySendRequest<B> {
    type Output = Result<SendRequest<B>, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let Some(sender) = &this.sender else {
            return Poll::Ready(Err(Error::user("the future is complete")));
        };
        let ready = (sender.sender.0).with(|state| state.poll_ready(&mut this.ticket, cx));
        let Some(ready) = ready else {
            return Poll::Pending;
        };
        let sender = this.sender.take().ok_or_else(gone);
        Poll::Ready(ready.and(sender))
    }
}

/// Response on a stream.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct ResponseFuture {
    id: StreamId,
    stream: Option<StreamRef>,
}

impl ResponseFuture {
    /// Returns the stream's number.
    pub fn stream_id(&self) -> StreamId {
        self.id
    }

    /// Returns the handle of the receive window, until the response is taken.
    pub fn flow_control(&self) -> Option<FlowControl> {
        self.stream.as_ref().map(FlowControl::new)
    }

    /// Returns the next interim response, or `None` once the final response is there.
    pub fn poll_informational(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Response<()>, Error>>> {
        let Some(stream) = &self.stream else {
            return Poll::Ready(None);
        };
        let mut state = stream.shared.lock();
        let Some(stream) = state.store.get(stream.key) else {
            return Poll::Ready(Some(Err(gone())));
        };
        if let Some(response) = stream.interim.pop_front() {
            return Poll::Ready(Some(Ok(response)));
        }
        if stream.response.is_some() {
            return Poll::Ready(None);
        }
        if let Some(error) = &stream.error {
            return Poll::Ready(Some(Err(error.clone())));
        }
        register(&mut stream.recv_waker, cx);
        Poll::Pending
    }
}

impl Future for ResponseFuture {
    type Output = Result<Response<RecvStream>, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let response = {
            let Some(stream) = &self.stream else {
                return Poll::Ready(Err(Error::user("the response was taken")));
            };
            let mut state = stream.shared.lock();
            let Some(stream) = state.store.get(stream.key) else {
                return Poll::Ready(Err(gone()));
            };
            stream.interim = VecDeque::new();
            match (stream.response.take(), &stream.error) {
                (Some(response), _) => response,
                (None, Some(error)) => return Poll::Ready(Err(error.clone())),
                (None, None) => {
                    register(&mut stream.recv_waker, cx);
                    return Poll::Pending;
                }
            }
        };
        let Some(stream) = self.stream.take() else {
            return Poll::Ready(Err(gone()));
        };
        Poll::Ready(Ok(response.map(|()| RecvStream::new(stream))))
    }
}

/// A client's connection: the future that moves it.
#[must_use = "futures do nothing unless polled"]
pub struct Connection<S, B = Bytes> {
    driver: Driver<S>,
    has_ping_pong: bool,
    _data: PhantomData<fn(B)>,
}

impl<S, B> fmt::Debug for Connection<S, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("client::Connection")
    }
}

impl<S, B> Connection<S, B> {
    /// Returns the handle for PINGs, once.
    pub fn ping_pong(&mut self) -> Option<PingPong> {
        let is_left = std::mem::take(&mut self.has_ping_pong);
        is_left.then(|| PingPong(self.driver.shared().clone()))
    }

    /// Sets the limits for the windows of streams towards this end. By default all have the initial window.
    pub fn limit_windows(&mut self, limits: WindowLimits) {
        self.driver
            .with(|state| state.stream_windows.limits = limits);
    }
}

#[cfg(any(test, feature = "fuzzing"))]
impl<S: AsyncRead + AsyncWrite + Unpin, B> Connection<S, B> {
    /// Returns the size of all buffers, in bytes.
    pub fn buffered_memory(&self) -> usize {
        self.driver.buffered_memory()
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin, B> Future for Connection<S, B> {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(ready!(self.driver.poll(cx)))
    }
}
