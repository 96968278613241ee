//! The body of a request, from the stream to the upstream, which is sent as hyper asks for it.
//!
//! On a shared connection it holds the stream's place, as the answer's body does, since an upstream may answer before it has
//! read. The place is free when both are over.

use bytes::Bytes;
use causeway_tunnel::{StreamError, StreamReceiver};
use causeway_upstream::http2_pool::StreamPermit;
use http_body::Frame;
use hyper::{Request, client::conn::TrySendError};
use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};
use tokio::sync::oneshot;

/// A request's body from the stream to the upstream.
#[derive(Default)]
pub(super) struct RequestBody {
    /// `None`: it has none.
    body: Option<Source>,
    /// Number of parts that hyper has taken.
    taken: Arc<AtomicUsize>,
    place: Option<Arc<StreamPermit>>,
}

/// A request that was not sent, or not answered.
pub(super) type SendError = TrySendError<Request<RequestBody>>;

/// Source of a request's body.
enum Source {
    /// All of a stream.
    Stream(StreamReceiver),
    /// The beginning of a stream.
    Content(Box<Content>),
}

/// The body of an upgrade: so many bytes of a stream, which belongs to the session behind them.
struct Content {
    stream: Option<StreamReceiver>,
    left: u64,
    session: Option<oneshot::Sender<Behind>>,
}

/// A stream behind the body of an upgrade, and bytes that were read of it too early.
pub(super) type Behind = (StreamReceiver, Bytes);

impl Content {
    fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StreamError>>> {
        let Some(stream) = &mut self.stream else {
            return Poll::Ready(None);
        };
        let Some(mut chunk) = ready!(stream.poll_data(cx)).transpose()? else {
            let what = "the stream ended in the middle of the request body";
            return Poll::Ready(Some(Err(StreamError::Nonsense(what))));
        };
        let most = usize::try_from(self.left).unwrap_or(usize::MAX);
        let behind = chunk.split_off(most.min(chunk.len()));
        self.left -= u64::try_from(chunk.len()).unwrap_or(self.left);
        if self.left == 0
            && let (Some(stream), Some(session)) = (self.stream.take(), self.session.take())
        {
            // The receiver is gone if the upgrade was aborted.
            let _ = session.send((stream, behind));
        }
        Poll::Ready(Some(Ok(Frame::data(chunk))))
    }
}

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = StreamError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StreamError>>> {
        let frame = match &mut self.body {
            None => return Poll::Ready(None),
            Some(Source::Stream(receive)) => ready!(Pin::new(receive).poll_frame(cx)),
            Some(Source::Content(content)) => ready!(content.poll_frame(cx)),
        };
        self.taken.fetch_add(1, Relaxed);
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        match &self.body {
            None => true,
            Some(Source::Stream(receive)) => receive.is_end(),
            Some(Source::Content(content)) => content.left == 0,
        }
    }
}

impl RequestBody {
    pub(super) fn new(body: Option<StreamReceiver>) -> Self {
        Self {
            body: body.map(Source::Stream),
            ..Self::default()
        }
    }

    /// The first `length` bytes of a stream, which is handed to the receiver behind them.
    pub(super) fn content(
        stream: StreamReceiver,
        length: u64,
    ) -> (Self, oneshot::Receiver<Behind>) {
        let (session, behind) = oneshot::channel();
        let content = Content {
            stream: Some(stream),
            left: length,
            session: Some(session),
        };
        let body = Self {
            body: Some(Source::Content(Box::new(content))),
            ..Self::default()
        };
        (body, behind)
    }

    /// Number of parts that hyper has taken.
    pub(super) fn taken(&self) -> Arc<AtomicUsize> {
        self.taken.clone()
    }

    /// Whether there is a body.
    pub(super) fn is_some(&self) -> bool {
        self.body.is_some()
    }

    /// Keeps a stream's place until the body has been sent or given up.
    pub(super) fn hold(&mut self, place: Arc<StreamPermit>) {
        drop(self.place.replace(place));
    }
}
