//! Body of a response of an upstream with which the gateway itself speaks HTTP.
//!
//! The body holds its connection until the end, and then returns it to the pool. If the body is dropped before the end, the
//! connection is reset.

use super::{error, pool::InUse};
use crate::{error::Error, proxy::route::Route};
use bytes::{Bytes, BytesMut};
use causeway_tunnel::{StreamError, StreamReceiver, eviction::Eviction};
use causeway_upstream::http2_pool::StreamPermit;
use http_body::{Body, Frame};
use hyper::body::Incoming;
use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio_util::sync::CancellationToken;

/// Error of an incomplete response: for the record, and for the client's connection.
pub(crate) type BodyError = (Error, StreamError);

/// Size in bytes below which a chunk is joined with the following ones.
const JOIN_BELOW: usize = 16 * 1024;
/// Maximum number of polls without a result while a short chunk waits, because hyper's HTTP/1.1 polls twice in one turn.
const MAX_EMPTY_POLLS: u8 = 2;

/// Body of a response, and the upstream connection that carries it.
///
/// hyper and h2 return one chunk at a time, and make the next one when their own task is polled. A body with a short chunk
/// therefore yields once to the other tasks, and joins the chunks that have arrived by then. An upstream that writes single bytes
/// then does not cost a frame, a TLS record and a write for each byte. The body waits no longer than that.
#[derive(Debug)]
pub(crate) struct UpstreamResponseBody {
    source: BodySource,
    route: Route,
    is_complete: bool,
    /// Short chunks that are not returned yet.
    joined_chunks: BytesMut,
    /// Number of polls without a chunk since the last chunk.
    empty_polls: u8,
    /// Frame or end that follows these chunks and is not a short chunk.
    deferred: Option<PollFrame>,
}

/// Source of a response body.
#[derive(Debug)]
enum BodySource {
    /// HTTP/1.1 connection, which is returned to the pool.
    Http1 { incoming: Incoming, in_use: InUse },
    /// HTTP/2 stream, which holds its permit. Dropping it resets it.
    Http2 {
        receiver: StreamReceiver,
        _permit: StreamPermit,
        /// Cancelled when the tunnel below leaves.
        leaving: CancellationToken,
    },
}

/// Result of polling a body, as in `Body::poll_frame`.
type PollFrame = Option<Result<Frame<Bytes>, BodyError>>;

impl UpstreamResponseBody {
    /// Returns the body of a response on an HTTP/1.1 connection.
    pub(super) fn from_http1(incoming: Incoming, in_use: InUse, route: &Route) -> Self {
        Self::new(BodySource::Http1 { incoming, in_use }, route)
    }

    /// Returns the body of a response on an HTTP/2 stream.
    pub(super) fn of_stream(
        receiver: StreamReceiver,
        permit: StreamPermit,
        (leaving, route): (&CancellationToken, &Route),
    ) -> Self {
        let source = BodySource::Http2 {
            receiver,
            _permit: permit,
            leaving: leaving.clone(),
        };
        Self::new(source, route)
    }

    fn new(source: BodySource, route: &Route) -> Self {
        Self {
            source,
            route: route.clone(),
            is_complete: false,
            joined_chunks: BytesMut::new(),
            empty_polls: 0,
            deferred: None,
        }
    }

    /// Polls for the next frame, or the reason of a failure.
    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<PollFrame> {
        loop {
            let polled = match self.deferred.take() {
                Some(came) => came,
                None => match self.poll_from_source(cx) {
                    Poll::Ready(came) => came,
                    Poll::Pending if self.joined_chunks.is_empty() => return Poll::Pending,
                    Poll::Pending if self.empty_polls == MAX_EMPTY_POLLS => {
                        return self.take_joined();
                    }
                    Poll::Pending => {
                        self.empty_polls += 1;
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                },
            };
            let is_short = |frame: &Frame<Bytes>| {
                let chunk = frame.data_ref();
                chunk.is_some_and(|chunk| chunk.len() < JOIN_BELOW)
            };
            match polled {
                Some(Ok(frame)) if is_short(&frame) => {
                    let chunk = frame.into_data().unwrap_or_default();
                    let is_last = self.source.is_end();
                    if self.joined_chunks.is_empty() && is_last {
                        return Poll::Ready(Some(Ok(Frame::data(chunk))));
                    }
                    self.joined_chunks.extend_from_slice(&chunk);
                    self.empty_polls = 0;
                    if is_last || self.joined_chunks.len() >= JOIN_BELOW {
                        return self.take_joined();
                    }
                }
                other if self.joined_chunks.is_empty() => return Poll::Ready(other),
                other => {
                    self.deferred = Some(other);
                    return self.take_joined();
                }
            }
        }
    }

    fn take_joined(&mut self) -> Poll<PollFrame> {
        self.empty_polls = 0;
        let joined = self.joined_chunks.split().freeze();
        Poll::Ready(Some(Ok(Frame::data(joined))))
    }

    fn poll_from_source(&mut self, cx: &mut Context<'_>) -> Poll<PollFrame> {
        let came = ready!(self.source.poll_frame(cx, &self.route));
        if came.is_none() {
            self.is_complete = true;
            self.source.release_connection();
        }
        Poll::Ready(came)
    }

    /// Returns the handle that notifies of the eviction of the stream that carries the body.
    pub(crate) fn eviction(&self) -> Option<Eviction> {
        match &self.source {
            BodySource::Http1 { in_use: asking, .. } => asking.conn_state()?.eviction.clone(),
            BodySource::Http2 {
                receiver: receive, ..
            } => receive.eviction_handle(),
        }
    }

    /// Whether the body is complete.
    pub(crate) fn is_end(&self) -> bool {
        self.is_fully_received() && self.joined_chunks.is_empty() && self.deferred.is_none()
    }

    /// Whether the upstream has sent the whole body.
    fn is_fully_received(&self) -> bool {
        self.is_complete || self.source.is_end()
    }
}

impl BodySource {
    fn poll_frame(&mut self, cx: &mut Context<'_>, route: &Route) -> Poll<PollFrame> {
        Poll::Ready(match self {
            Self::Http1 { incoming, .. } => {
                let came = ready!(Pin::new(incoming).poll_frame(cx));
                came.map(|came| {
                    came.map_err(|error| {
                        let record_error =
                            error::response_error(route, &error, "during the answer");
                        (record_error, StreamError::cancelled())
                    })
                })
            }
            Self::Http2 {
                receiver: receive,
                leaving,
                ..
            } => {
                let came = ready!(Pin::new(receive).poll_frame(cx));
                came.map(|came| {
                    came.map_err(|error| {
                        let record_error = error::upstream_stream_error(
                            route,
                            leaving,
                            (&error, "during the answer"),
                        );
                        // A reset code is forwarded. A lost connection to the upstream does not close the client's connection.
                        let reset = error.is_reset();
                        (
                            record_error,
                            if reset {
                                error
                            } else {
                                StreamError::cancelled()
                            },
                        )
                    })
                })
            }
        })
    }

    fn is_end(&self) -> bool {
        match self {
            Self::Http1 { incoming, .. } => incoming.is_end_stream(),
            Self::Http2 {
                receiver: receive, ..
            } => receive.is_end(),
        }
    }

    /// Returns the connection to the pool after a complete response.
    fn release_connection(&mut self) {
        if let Self::Http1 { in_use: asking, .. } = self {
            asking.return_to_pool();
        }
    }
}

impl Drop for UpstreamResponseBody {
    fn drop(&mut self) {
        // Done before the source is dropped, because hyper must know by then that the body was aborted.
        if self.is_fully_received() {
            self.source.release_connection();
        } else if let BodySource::Http1 { in_use: asking, .. } = &self.source
            && let Some(life) = asking.conn_state()
        {
            life.cancel_token.cancel();
        }
    }
}
