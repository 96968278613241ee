//! Body of a client's request, which is read to its end even if no task needs it.
//!
//! A client that is in the middle of a body may look for the answer only after the end of the body. A connection that is closed
//! over unread bytes is reset, and the answer is lost with it (RFC 9112, section 9.6). HTTP/2 resets the stream in the same
//! place, and some clients drop the answer that came before (RFC 9113, section 8.1). So a body that is dropped before its end is
//! discarded for a while instead. If its end comes, an HTTP/1.1 connection stays open. The number of discarded bodies is limited
//! for the whole gateway; one source gets three quarters of it. One more aborts the oldest.

use super::{limits::Limits, listener::conn_io::ConnState};
use bytes::Bytes;
use causeway_rt::{connection_limit::Slot, listener::RemoteAddr, task::TaskGroup};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::time::timeout;

/// Time for which a body is discarded.
const MAX_DISCARD_TIME: Duration = Duration::from_secs(10);
/// Bytes of a body that are discarded.
const MAX_DISCARD_BYTES: usize = 256 << 20;

/// The body of a request.
#[derive(Debug)]
pub struct RequestBody {
    inner: Option<Incoming>,
    /// Connection of a client that speaks HTTP/1.1, which hears of the body's end.
    condition: Option<Arc<ConnState>>,
    /// None where there is no body, or where the client waits to be asked for it.
    discarding: Option<Discarding>,
}

/// Whatever discards the rest of a body.
#[derive(Debug)]
struct Discarding {
    limits: Arc<Limits>,
    tasks: Arc<TaskGroup>,
    peer: RemoteAddr,
}

impl RequestBody {
    /// Returns the body of a request. If `is_awaited`, the client waits for a 100 before it sends any body.
    pub fn new(
        inner: Incoming,
        is_awaited: bool,
        (limits, tasks, peer): (&Arc<Limits>, &Arc<TaskGroup>, RemoteAddr),
        condition: Option<&Arc<ConnState>>,
    ) -> Self {
        let discards = !is_awaited && !inner.is_end_stream();
        Self {
            condition: condition.filter(|_| !inner.is_end_stream()).cloned(),
            inner: Some(inner),
            discarding: discards.then(|| Discarding {
                limits: limits.clone(),
                tasks: tasks.clone(),
                peer,
            }),
        }
    }

    /// Has the body broken off when it is dropped, and not read to its end.
    pub(super) fn cut(&mut self) {
        self.discarding = None;
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(inner) = &mut self.inner else {
            return Poll::Ready(None);
        };
        let frame = ready!(Pin::new(&mut *inner).poll_frame(cx));
        if (frame.is_none() || inner.is_end_stream())
            && let Some(condition) = &self.condition
        {
            condition.body_ended();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let hint = self.inner.as_ref().map(Body::size_hint);
        hint.unwrap_or_else(|| SizeHint::with_exact(0))
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        if let (Some(inner), Some(discarding)) = (self.inner.take(), self.discarding.take())
            && !inner.is_end_stream()
            && let Some(place) = discarding.limits.discarded_body(discarding.peer)
        {
            let span = tracing::debug_span!("unwanted");
            discarding.tasks.spawn(span, discard(inner, place));
        }
    }
}

async fn discard(mut body: Incoming, place: Slot) {
    let discarded = async {
        let mut left = MAX_DISCARD_BYTES;
        while let Some(Ok(frame)) = body.frame().await {
            let length = frame.data_ref().map_or(0, Bytes::len);
            left = left.saturating_sub(length);
            if left == 0 {
                return;
            }
        }
    };
    // A body that continues is aborted; over HTTP/1.1 its connection is closed too.
    tokio::select! {
        _ = timeout(MAX_DISCARD_TIME, discarded) => {}
        () = place.evicted() => {}
    }
}
