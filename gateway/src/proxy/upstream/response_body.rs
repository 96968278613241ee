//! Body of an answer of an upstream to which the gateway itself speaks.
//!
//! The body holds its connection until the end, and then returns the connection to the pool. If the body is dropped before, the
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

/// Reason why an answer does not go on: for the record, and for the client's connection.
pub(crate) type BodyError = (Error, StreamError);

/// Chunks shorter than this are joined with those behind them.
const JOIN_BELOW: usize = 16 * 1024;
/// How often nothing is said of a short chunk: hyper's HTTP/1.1 asks twice in one turn.
const LINGER: u8 = 2;

/// An answer's body on its way from the upstream, and the connection that brings it.
///
/// hyper and h2 hand out one chunk at a time, and make the next one when their own task is polled. So a body with a short chunk
/// lets the other tasks have one turn, and joins the chunks that have come by then: an upstream that writes single bytes does not
/// cost a frame, a TLS record and a write for each. The body waits for no more than that turn.
#[derive(Debug)]
pub(crate) struct UpstreamResponseBody {
    source: BodySource,
    route: Route,
    whole: bool,
    /// Short chunks that are not handed out yet.
    joined: BytesMut,
    /// Number of polls without a chunk since the last chunk came.
    lingered: u8,
    /// Frame or end that came after them and is no short chunk.
    behind: Option<PollFrame>,
}

/// Source of an answer's body.
#[derive(Debug)]
enum BodySource {
    /// A connection of HTTP/1.1, to be returned to the pool.
    Line { incoming: Incoming, asking: InUse },
    /// A stream of HTTP/2, which holds its permit. Dropped, it is reset.
    Stream {
        receive: StreamReceiver,
        _place: StreamPermit,
        /// Cancelled when the tunnel below leaves.
        leaving: CancellationToken,
    },
}

/// Result of polling a body, as in `Body::poll_frame`.
type PollFrame = Option<Result<Frame<Bytes>, BodyError>>;

impl UpstreamResponseBody {
    /// Returns the body that an HTTP/1.1 connection brings.
    pub(super) fn of_line(incoming: Incoming, asking: InUse, route: &Route) -> Self {
        Self::new(BodySource::Line { incoming, asking }, route)
    }

    /// Returns the body that an HTTP/2 stream brings.
    pub(super) fn of_stream(
        receive: StreamReceiver,
        place: StreamPermit,
        (leaving, route): (&CancellationToken, &Route),
    ) -> Self {
        let source = BodySource::Stream {
            receive,
            _place: place,
            leaving: leaving.clone(),
        };
        Self::new(source, route)
    }

    fn new(source: BodySource, route: &Route) -> Self {
        Self {
            source,
            route: route.clone(),
            whole: false,
            joined: BytesMut::new(),
            lingered: 0,
            behind: None,
        }
    }

    /// Returns the next frame, or the reason why there is none.
    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<PollFrame> {
        loop {
            let came = match self.behind.take() {
                Some(came) => came,
                None => match self.poll_incoming(cx) {
                    Poll::Ready(came) => came,
                    Poll::Pending if self.joined.is_empty() => return Poll::Pending,
                    Poll::Pending if self.lingered == LINGER => return self.hand_out(),
                    Poll::Pending => {
                        self.lingered += 1;
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                },
            };
            let short = |frame: &Frame<Bytes>| {
                let chunk = frame.data_ref();
                chunk.is_some_and(|chunk| chunk.len() < JOIN_BELOW)
            };
            match came {
                Some(Ok(frame)) if short(&frame) => {
                    let chunk = frame.into_data().unwrap_or_default();
                    let is_last = self.source.is_end();
                    if self.joined.is_empty() && is_last {
                        return Poll::Ready(Some(Ok(Frame::data(chunk))));
                    }
                    self.joined.extend_from_slice(&chunk);
                    self.lingered = 0;
                    if is_last || self.joined.len() >= JOIN_BELOW {
                        return self.hand_out();
                    }
                }
                other if self.joined.is_empty() => return Poll::Ready(other),
                other => {
                    self.behind = Some(other);
                    return self.hand_out();
                }
            }
        }
    }

    fn hand_out(&mut self) -> Poll<PollFrame> {
        self.lingered = 0;
        let joined = self.joined.split().freeze();
        Poll::Ready(Some(Ok(Frame::data(joined))))
    }

    fn poll_incoming(&mut self, cx: &mut Context<'_>) -> Poll<PollFrame> {
        let came = ready!(self.source.poll_frame(cx, &self.route));
        if came.is_none() {
            self.whole = true;
            self.source.settle();
        }
        Poll::Ready(came)
    }

    /// Handle by which the holder learns that the stream that brings the body is evicted.
    pub(crate) fn eviction(&self) -> Option<Eviction> {
        match &self.source {
            BodySource::Line { asking, .. } => asking.life()?.eviction.clone(),
            BodySource::Stream { receive, .. } => receive.eviction(),
        }
    }

    /// Whether nothing more will come.
    pub(crate) fn is_end(&self) -> bool {
        self.is_brought() && self.joined.is_empty() && self.behind.is_none()
    }

    /// Whether the upstream has sent the whole body.
    fn is_brought(&self) -> bool {
        self.whole || self.source.is_end()
    }
}

impl BodySource {
    fn poll_frame(&mut self, cx: &mut Context<'_>, route: &Route) -> Poll<PollFrame> {
        Poll::Ready(match self {
            Self::Line { incoming, .. } => {
                let came = ready!(Pin::new(incoming).poll_frame(cx));
                came.map(|came| {
                    came.map_err(|error| {
                        let why = error::of_answer(route, &error, "during the answer");
                        (why, StreamError::cancelled())
                    })
                })
            }
            Self::Stream {
                receive, leaving, ..
            } => {
                let came = ready!(Pin::new(receive).poll_frame(cx));
                came.map(|came| {
                    came.map_err(|error| {
                        let why = error::of_stream(route, leaving, (&error, "during the answer"));
                        // A reset code is forwarded; the lost connection is not the client's.
                        let reset = error.is_reset();
                        (
                            why,
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
            Self::Line { incoming, .. } => incoming.is_end_stream(),
            Self::Stream { receive, .. } => receive.is_end(),
        }
    }

    /// The answer came to its end.
    fn settle(&mut self) {
        if let Self::Line { asking, .. } = self {
            asking.settle();
        }
    }
}

impl Drop for UpstreamResponseBody {
    fn drop(&mut self) {
        // Before the source is dropped: hyper must know by then that the body was aborted.
        if self.is_brought() {
            self.source.settle();
        } else if let BodySource::Line { asking, .. } = &self.source
            && let Some(life) = asking.life()
        {
            life.end.cancel();
        }
    }
}
