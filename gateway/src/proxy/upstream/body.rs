//! Bodies to and from an app that the gateway itself asks.
//!
//! A request's body goes as the engine takes it, behind the app's 100 where the caller waits for one. An answer's holds
//! its line until the end, and gives it back to rest there: one that is dropped before is reset.

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
use causeway_tunnel::{StreamError, StreamReceiver, eviction::Eviction, http2_pool::StreamPermit};
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

/// A request's body on its way to the app.
#[derive(Default)]
pub(super) struct UpstreamRequestBody(Option<ActiveUpload>);

struct ActiveUpload {
    upload: CountedRequestBody,
    life: Arc<ConnState>,
    /// What it waits for before it goes, and for how long at most.
    go: Option<(oneshot::Receiver<()>, Pin<Box<Sleep>>)>,
    /// It may go on behind an answer that is whole.
    _busy: Option<ActiveRequest>,
}

impl UpstreamRequestBody {
    /// This body, taken on a line of this life. With `go` it waits for that first.
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

    /// It goes on another line than it was made for.
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
            // Whoever does not say it any more has answered.
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
        // The engine does not ask once more behind the last part.
        self.life.waiting.some(0);
        self.upload.goes_on(None);
    }
}

/// Why an answer does not go on: for the record, and for the caller's engine.
pub(crate) type BodyError = (Error, StreamError);

/// Chunks shorter than this are joined with those behind them.
const JOIN_BELOW: usize = 16 * 1024;
/// How often nothing is said of a short chunk: hyper's HTTP/1.1 asks twice in one turn.
const LINGER: u8 = 2;

/// An answer's body on its way from the app, and the line that brings it.
///
/// An engine hands out one chunk at a time, and makes the next one when its own task is polled. So whoever has a short chunk
/// lets the other tasks have one turn, and takes along what has come by then: an app that writes single bytes does not cost
/// a frame, a record of TLS and a write for each. Nobody waits for more than that turn.
#[derive(Debug)]
pub(crate) struct UpstreamResponseBody {
    source: BodySource,
    route: Route,
    whole: bool,
    /// Short chunks that are not handed out yet.
    joined: BytesMut,
    /// How often nothing was said since the last one came.
    lingered: u8,
    /// What came behind them and is no short chunk.
    behind: Option<PollFrame>,
}

/// Who brings an answer's body.
#[derive(Debug)]
enum BodySource {
    /// A line of HTTP/1.1, to be given back.
    Line { incoming: Incoming, asking: InUse },
    /// A stream of HTTP/2, which keeps its place. Dropped, it is reset.
    Stream {
        receive: StreamReceiver,
        _place: StreamPermit,
        /// The tunnel below goes.
        leaving: CancellationToken,
    },
}

/// What comes of a body, as `Body::poll_frame` says it.
type PollFrame = Option<Result<Frame<Bytes>, BodyError>>;

impl UpstreamResponseBody {
    /// What a line brings.
    pub(super) fn of_line(incoming: Incoming, asking: InUse, route: &Route) -> Self {
        Self::new(BodySource::Line { incoming, asking }, route)
    }

    /// What a stream brings.
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

    /// The next frame, or why there is none.
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

    /// Whether the app has said all of it.
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
                        let why = error::of_answer(route, &error, "in mid answer");
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
                        let why = error::of_stream(route, leaving, (&error, "in mid answer"));
                        // A code goes on; what was lost is not the caller's connection.
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
        // Before the source goes: the engine must know by then that it was given up.
        if self.is_brought() {
            self.source.settle();
        } else if let BodySource::Line { asking, .. } = &self.source
            && let Some(life) = asking.life()
        {
            life.end.cancel();
        }
    }
}
