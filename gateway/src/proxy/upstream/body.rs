//! Bodies to and from an upstream to which the gateway itself speaks.
//!
//! A request's body is sent as hyper takes it, after the upstream's 100 if the client waits for one. An answer's body holds its
//! connection until the end, and then returns the connection to the pool. If the body is dropped before, the connection is reset.

use super::{
    error,
    http1::{ConnState, InUse},
};
use crate::{
    error::Error,
    proxy::{
        StreamContext,
        counted_body::{CountedRequestBody, UploadError},
        forward::CONTINUE,
        listener::idle_timer::ActiveRequest,
        route::Route,
    },
};
use bytes::{Bytes, BytesMut};
use causeway_tunnel::{StreamError, StreamReceiver, eviction::Eviction};
use causeway_upstream::http2_pool::StreamPermit;
use http_body::{Body, Frame};
use hyper::body::Incoming;
use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll, ready},
};
use tokio::{
    sync::oneshot,
    time::{Sleep, sleep},
};
use tokio_util::sync::CancellationToken;

/// A request's body on its way to the upstream.
#[derive(Default)]
pub(super) struct UpstreamRequestBody(Option<ActiveUpload>);

struct ActiveUpload {
    upload: CountedRequestBody,
    life: Arc<ConnState>,
    /// Signal that the body waits for before it is sent, and the maximum time of that wait.
    go: Option<(oneshot::Receiver<()>, Pin<Box<Sleep>>)>,
    /// Guard of the client's connection: the body may go on after a complete answer.
    _busy: Option<ActiveRequest>,
}

impl UpstreamRequestBody {
    /// Returns this body, sent on the connection with this state. With `go` it waits for that first.
    pub(super) fn new(
        (upload, busy): (CountedRequestBody, Option<ActiveRequest>),
        life: &Arc<ConnState>,
        go: Option<oneshot::Receiver<()>>,
    ) -> Self {
        upload.goes_on(Some(life.end.clone()));
        Self(Some(ActiveUpload {
            upload,
            life: life.clone(),
            go: go.map(|go| (go, Box::pin(sleep(CONTINUE)))),
            _busy: busy,
        }))
    }

    /// Moves the body to another connection than it was made for.
    pub(super) fn moved(mut self, life: &Arc<ConnState>) -> Self {
        if let Some(uploading) = &mut self.0 {
            uploading.upload.tells(life.waiting.clone());
            uploading.upload.goes_on(Some(life.end.clone()));
            uploading.life = life.clone();
        }
        self
    }
}

impl Body for UpstreamRequestBody {
    type Data = Bytes;
    type Error = UploadError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UploadError>>> {
        let Some(uploading) = &mut self.0 else {
            return Poll::Ready(None);
        };
        if let Some((go, bound)) = &mut uploading.go {
            // If the sender was dropped, the app has answered already.
            if Pin::new(go).poll(cx).is_pending() {
                ready!(bound.as_mut().poll(cx));
            }
            uploading.go = None;
        }
        let frame = ready!(Pin::new(&mut uploading.upload).poll_frame(cx));
        uploading.life.taken.fetch_add(1, Relaxed);
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.0
            .as_ref()
            .is_none_or(|uploading| uploading.upload.is_end_stream())
    }
}

impl Drop for ActiveUpload {
    fn drop(&mut self) {
        // hyper does not poll again after the last part.
        self.life.waiting.some(0);
        self.upload.goes_on(None);
    }
}

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
        way: StreamContext<'_>,
    ) -> Self {
        let source = BodySource::Stream {
            receive,
            _place: place,
            leaving: way.tunnel.leaving().clone(),
        };
        Self::new(source, way.route)
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
