//! Body of a request, from the stream to the upstream. It is read as hyper polls it.
//!
//! On a shared connection the bodies of the request and of the response both hold the permit of the stream. The permit is
//! free when both have ended, because an upstream may answer before it has read the request.

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
    /// Source of the body, or `None` without a body.
    source: Option<Source>,
    /// Number of chunks that hyper has taken.
    taken: Arc<AtomicUsize>,
    permit: Option<Arc<StreamPermit>>,
}

/// Error of a request that was not sent or not answered.
pub(super) type SendError = TrySendError<Request<RequestBody>>;

/// Source of a request's body.
enum Source {
    /// Whole stream. Boxed, because requests without a body are moved as well.
    Stream(Box<StreamReceiver>),
    /// Beginning of a stream.
    Content(Box<Content>),
}

/// Body of an upgrade: the first bytes of a stream. The session behind the body then owns the stream.
struct Content {
    stream: Option<StreamReceiver>,
    remaining: u64,
    session_tx: Option<oneshot::Sender<Behind>>,
}

/// Stream behind the body of an upgrade, and the bytes of the session that were already read.
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
            return Poll::Ready(Some(Err(StreamError::ProtocolViolation(what))));
        };
        let remaining = usize::try_from(self.remaining).unwrap_or(usize::MAX);
        let rest = chunk.split_off(remaining.min(chunk.len()));
        self.remaining -= u64::try_from(chunk.len()).unwrap_or(self.remaining);
        if self.remaining == 0
            && let (Some(stream), Some(session)) = (self.stream.take(), self.session_tx.take())
        {
            // The receiver is gone if the upgrade was aborted.
            let _ = session.send((stream, rest));
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
        let frame = match &mut self.source {
            None => return Poll::Ready(None),
            Some(Source::Stream(receive)) => ready!(Pin::new(&mut **receive).poll_frame(cx)),
            Some(Source::Content(content)) => ready!(content.poll_frame(cx)),
        };
        self.taken.fetch_add(1, Relaxed);
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            None => true,
            Some(Source::Stream(receive)) => receive.is_end(),
            Some(Source::Content(content)) => content.remaining == 0,
        }
    }
}

impl RequestBody {
    pub(super) fn new(body: Option<StreamReceiver>) -> Self {
        Self {
            source: body.map(Box::new).map(Source::Stream),
            ..Self::default()
        }
    }

    /// Creates a body from the first `length` bytes of a stream. The receiver gets the stream once these bytes have been
    /// read.
    pub(super) fn content(
        stream: StreamReceiver,
        length: u64,
    ) -> (Self, oneshot::Receiver<Behind>) {
        let (session_tx, session_rx) = oneshot::channel();
        let content = Content {
            stream: Some(stream),
            remaining: length,
            session_tx: Some(session_tx),
        };
        let body = Self {
            source: Some(Source::Content(Box::new(content))),
            ..Self::default()
        };
        (body, session_rx)
    }

    /// Returns the counter of the chunks that hyper has taken.
    pub(super) fn chunks_taken(&self) -> Arc<AtomicUsize> {
        self.taken.clone()
    }

    /// Whether there is a body.
    pub(super) fn is_some(&self) -> bool {
        self.source.is_some()
    }

    /// Holds a stream's permit until the body has been sent or dropped.
    pub(super) fn hold_permit(&mut self, permit: Arc<StreamPermit>) {
        drop(self.permit.replace(permit));
    }
}
