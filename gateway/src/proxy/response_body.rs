//! Body of a response on its way to the client.
//!
//! A stream that breaks must not look like an end. On HTTP/2 the error code is forwarded. On HTTP/1.1 the received bytes are
//! flushed first, then the body fails and the socket is dropped with a reset. Without the flush, the last bytes would be lost.
//! Without the reset, a close-delimited response would seem complete (trap 3).

use crate::{
    error::Error,
    proxy::{
        access_log::AccessRecord,
        listener::{conn_io::ConnState, idle_timer::ActiveRequest},
        upstream::UpstreamResponseBody,
    },
};
use bytes::Bytes;
use causeway_certs::NodeName;
use causeway_tunnel::{StreamError, StreamReceiver, StreamSender, eviction::Eviction};
use http::{HeaderMap, header::CONTENT_LENGTH};
use http_body::{Body, Frame, SizeHint};
use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::time::Sleep;
use tokio_util::sync::DropGuard;

/// Time for which a client that does not read may delay the end of a broken response.
const ABORT_FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// Time that a client gets to read the bytes before the end of its stream. Without progress of the client, the stream ends
/// without these bytes.
pub(super) const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Body of a response.
#[derive(Debug)]
pub struct ResponseBody {
    inner: Inner,
    /// Socket of an HTTP/1.1 client, on which the next head is expected after this body.
    socket: Option<Arc<ConnState>>,
    /// Guard that keeps the connection from being idle.
    busy_guard: Option<ActiveRequest>,
}

#[derive(Debug)]
enum Inner {
    Empty,
    /// Text of the gateway itself.
    Text(Option<Bytes>),
    /// Body from a tunnel.
    Stream(Box<TunnelBody>),
}

/// Source of a body.
#[derive(Debug)]
enum BodySource {
    /// Stream of a tunnel.
    Tunnel(StreamReceiver),
    /// Upstream with which the gateway itself speaks HTTP through a tunnel.
    Upstream(Box<UpstreamResponseBody>),
}

/// Body from a tunnel with its record.
#[derive(Debug)]
struct TunnelBody {
    source: BodySource,
    node: NodeName,
    record: Arc<AccessRecord>,
    failure: Option<(StreamError, Pin<Box<Sleep>>)>,
    /// Whether the task yielded once, so that the connection of an HTTP/2 client could take the bytes before the break.
    has_yielded: bool,
    /// Number of bytes that remain of the response's Content-Length, if it has one.
    remaining: Option<u64>,
    /// Guard of the request body's task, which ends with an abandoned response.
    upload_guard: Option<DropGuard>,
    eviction_handle: Option<Eviction>,
}

impl ResponseBody {
    /// Returns an empty body. The access record of the stream ends with the head.
    pub fn empty() -> Self {
        Self::from_inner(Inner::Empty)
    }

    /// Returns a body with a text of the gateway itself.
    pub fn text(text: impl Into<Bytes>) -> Self {
        Self::from_inner(Inner::Text(Some(text.into())))
    }

    /// Returns a body from a tunnel stream.
    pub fn stream(receiver: StreamReceiver, node: &NodeName, record: &Arc<AccessRecord>) -> Self {
        Self::from_source(BodySource::Tunnel(receiver), node, record)
    }

    /// Returns a body from an upstream with which the gateway itself speaks HTTP through a tunnel.
    pub(super) fn upstream(
        body: UpstreamResponseBody,
        node: &NodeName,
        record: &Arc<AccessRecord>,
    ) -> Self {
        Self::from_source(BodySource::Upstream(Box::new(body)), node, record)
    }

    fn from_source(source: BodySource, node: &NodeName, record: &Arc<AccessRecord>) -> Self {
        let eviction = source.eviction();
        if let Some(eviction) = &eviction {
            eviction.mark_response();
            record.set_eviction(eviction.clone());
        }
        let tunnel_body = TunnelBody {
            eviction_handle: eviction,
            source,
            node: node.clone(),
            record: record.clone(),
            failure: None,
            has_yielded: false,
            remaining: None,
            upload_guard: None,
        };
        Self::from_inner(Inner::Stream(Box::new(tunnel_body)))
    }

    fn from_inner(inner: Inner) -> Self {
        Self {
            inner,
            socket: None,
            busy_guard: None,
        }
    }

    /// Records the Content-Length, because the body's end may never be polled after that many bytes.
    #[must_use]
    pub(super) fn with_content_length(mut self, fields: &HeaderMap) -> Self {
        if let Inner::Stream(streamed) = &mut self.inner {
            let length = fields.get(CONTENT_LENGTH);
            let length = length.and_then(|length| length.to_str().ok());
            streamed.remaining = length.and_then(|length| length.parse().ok());
        }
        self
    }

    /// Ties the upload of the request body to this body. The upload may continue after a complete response, but not after an
    /// abandoned one.
    #[must_use]
    pub fn with_upload(mut self, upload_guard: Option<DropGuard>) -> Self {
        if let Inner::Stream(streamed) = &mut self.inner {
            streamed.upload_guard = upload_guard;
        }
        self
    }

    /// Ties the request half of the stream to this body. If the stream is evicted because its client reads nothing, that half
    /// ends too.
    #[must_use]
    pub fn with_sender(self, sender: Option<StreamSender>) -> Self {
        if let (Some(eviction), Some(send)) = (self.eviction_handle(), sender) {
            eviction.attach_sender(send);
        }
        self
    }

    /// Keeps the connection busy.
    #[must_use]
    pub fn with_busy_guard(mut self, busy_guard: ActiveRequest) -> Self {
        self.busy_guard = Some(busy_guard);
        self
    }

    /// Returns the handle that notifies the connection of the stream's eviction; `None` if no tunnel carries the body.
    pub(super) fn eviction_handle(&self) -> Option<Eviction> {
        match &self.inner {
            Inner::Stream(streamed) => streamed.eviction_handle.clone(),
            Inner::Empty | Inner::Text(_) => None,
        }
    }

    /// Ties the body to the socket of an HTTP/1.1 client.
    #[must_use]
    pub fn with_socket(mut self, socket: Option<Arc<ConnState>>) -> Self {
        self.socket = socket;
        self
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        if let Some(socket) = &self.socket {
            socket.response_complete();
        }
    }
}

impl Drop for TunnelBody {
    fn drop(&mut self) {
        if (self.eviction_handle.as_ref()).is_some_and(Eviction::is_evicted) {
            let evicted = Error::from_stream_error(self.node.as_str(), &StreamError::Evicted);
            self.record.record_failure(&evicted);
        }
        if let Some(eviction) = &self.eviction_handle {
            eviction.release();
        }
        if !self.source.is_end() && self.remaining != Some(0) && !self.record.is_bodiless() {
            let detail = "the client disconnected before the end of its answer";
            self.record.record_abandoned(detail);
        }
        if self.source.is_end()
            && let Some(upload) = self.upload_guard.take()
        {
            upload.disarm();
        }
    }
}

impl BodySource {
    fn eviction(&self) -> Option<Eviction> {
        match self {
            Self::Tunnel(receive) => receive.eviction_handle(),
            Self::Upstream(body) => body.eviction(),
        }
    }

    fn is_end(&self) -> bool {
        match self {
            Self::Tunnel(receive) => receive.is_end(),
            Self::Upstream(body) => body.is_end(),
        }
    }
}

impl TunnelBody {
    /// Polls the source for its next frame. The reason of a failure is recorded.
    fn poll_source(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StreamError>>> {
        match &mut self.source {
            BodySource::Tunnel(receive) => {
                let polled = ready!(Pin::new(receive).poll_frame(cx));
                if let Some(Err(error)) = &polled {
                    self.record
                        .record_failure(&Error::from_stream_error(self.node.as_str(), error));
                }
                // The edge sends this code to the gateway only, so the client gets another code.
                Poll::Ready(polled.map(|frame| {
                    frame.map_err(|error| match error {
                        error if error.is_withdrawn() => StreamError::cancelled(),
                        error => error,
                    })
                }))
            }
            BodySource::Upstream(body) => match ready!(body.poll_frame(cx)) {
                Some(Err((why, error))) => {
                    self.record.record_failure(&why);
                    Poll::Ready(Some(Err(error)))
                }
                Some(Ok(frame)) => Poll::Ready(Some(Ok(frame))),
                None => Poll::Ready(None),
            },
        }
    }

    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        socket: Option<&Arc<ConnState>>,
    ) -> Poll<Option<Result<Frame<Bytes>, StreamError>>> {
        if self.failure.is_none() && self.record.poll_terminated(cx).is_ready() {
            let cancelled = StreamError::cancelled();
            self.failure = Some((cancelled, Box::pin(tokio::time::sleep(FLUSH_TIMEOUT))));
        }
        if self.failure.is_none() {
            match ready!(self.poll_source(cx)) {
                Some(Err(error)) => {
                    self.failure = Some((error, Box::pin(tokio::time::sleep(ABORT_FLUSH_TIMEOUT))));
                }
                Some(Ok(frame)) => {
                    if let Some(chunk) = frame.data_ref() {
                        let length = u64::try_from(chunk.len()).unwrap_or(u64::MAX);
                        self.record.bytes.down.fetch_add(length, Relaxed);
                        self.remaining = self.remaining.map(|left| left.saturating_sub(length));
                    }
                    return Poll::Ready(Some(Ok(frame)));
                }
                None => return Poll::Ready(None),
            }
        }
        if let (Some(socket), Some((_, flush_timer))) = (socket, &mut self.failure) {
            let flushed = socket.poll_flushed(cx);
            if flushed.is_pending() {
                ready!(flush_timer.as_mut().poll(cx));
            }
        } else if !std::mem::replace(&mut self.has_yielded, true) {
            // A reset discards the data that h2 has queued for the stream.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(self.failure.take().map(|(error, _)| Err(error)))
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = StreamError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StreamError>>> {
        let this = self.get_mut();
        match &mut this.inner {
            Inner::Empty => Poll::Ready(None),
            Inner::Text(text) => Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
            Inner::Stream(streamed) => streamed.poll(cx, this.socket.as_ref()),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            Inner::Empty => true,
            Inner::Text(text) => text.is_none(),
            Inner::Stream(streamed) => streamed.failure.is_none() && streamed.source.is_end(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Inner::Empty | Inner::Text(None) => SizeHint::with_exact(0),
            Inner::Text(Some(text)) => {
                SizeHint::with_exact(u64::try_from(text.len()).unwrap_or(u64::MAX))
            }
            Inner::Stream(_) => SizeHint::default(),
        }
    }
}
