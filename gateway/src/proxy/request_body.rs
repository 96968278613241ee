//! Body of a client's request, which is read to its end even if no task needs it.
//!
//! A client that is sending a body may read the response only after the end of the body. A connection that is closed with unread
//! bytes is reset, and the response is lost (RFC 9112, section 9.6). HTTP/2 resets the stream in that case, and some clients drop
//! the response that came before (RFC 9113, section 8.1). A body that is dropped before its end is therefore discarded for a
//! while. If it ends in that time, an HTTP/1.1 connection stays open. The number of discarded bodies is limited for the whole
//! gateway, and one source gets three quarters of it. At the limit, the oldest discarding is aborted.

use super::{
    limits::Limits,
    listener::{ClientConnection, conn_io::ConnState, idle_timer::ActiveRequest},
};
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
/// Maximum number of bytes of a body that are discarded.
const MAX_DISCARD_BYTES: usize = 256 << 20;

/// Body of a request.
#[derive(Debug)]
pub struct RequestBody {
    inner: Option<Incoming>,
    /// State of the client's connection, which is notified of the body's progress and end. `None` if there is no body.
    connection_state: Option<Arc<ConnState>>,
    /// Parts for discarding the body; `None` if there is no body, or if the client waits for a 100 before it sends the body.
    discarder: Option<Discarding>,
    /// Guard that keeps the connection from being idle, because the body may continue after the response.
    busy_guard: Option<ActiveRequest>,
}

/// Parts of the gateway that discard the rest of a body.
#[derive(Debug)]
struct Discarding {
    limits: Arc<Limits>,
    tasks: Arc<TaskGroup>,
    peer: RemoteAddr,
}

impl RequestBody {
    /// Returns the body of a request. If `expects_continue`, the client waits for a 100 before it sends any body.
    pub fn new(
        inner: Incoming,
        expects_continue: bool,
        (limits, tasks): (&Arc<Limits>, &Arc<TaskGroup>),
        connection: &ClientConnection,
    ) -> Self {
        let has_content = !inner.is_end_stream();
        let should_discard = !expects_continue && has_content;
        Self {
            connection_state: has_content.then(|| connection.condition.clone()),
            inner: Some(inner),
            discarder: should_discard.then(|| Discarding {
                limits: limits.clone(),
                tasks: tasks.clone(),
                peer: connection.peer,
            }),
            busy_guard: has_content.then(|| connection.idle.begin_request()),
        }
    }

    /// Returns a body without content.
    pub(super) fn empty() -> Self {
        Self {
            inner: None,
            connection_state: None,
            discarder: None,
            busy_guard: None,
        }
    }

    /// Makes the body abort when it is dropped, instead of being read to its end.
    pub(super) fn abort_on_drop(&mut self) {
        self.discarder = None;
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
        let has_ended = frame.is_none() || inner.is_end_stream();
        if let Some(condition) = &self.connection_state {
            condition.note_taken();
            if has_ended {
                condition.body_ended();
            }
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
        let connection_state = self.connection_state.take();
        if let (Some(inner), Some(discarder)) = (self.inner.take(), self.discarder.take())
            && !inner.is_end_stream()
            && let Some(place) = discarder.limits.admit_discarded_body(discarder.peer)
        {
            let span = tracing::debug_span!("unwanted");
            let connection = (connection_state, self.busy_guard.take());
            discarder
                .tasks
                .spawn(span, discard(inner, place, connection));
        } else if let Some(condition) = connection_state {
            // hyper reads no more of the body than it has buffered.
            condition.body_ended();
        }
    }
}

async fn discard(
    mut body: Incoming,
    slot: Slot,
    (connection_state, _busy_guard): (Option<Arc<ConnState>>, Option<ActiveRequest>),
) {
    let discarding = async {
        let mut remaining = MAX_DISCARD_BYTES;
        while let Some(Ok(frame)) = body.frame().await {
            let length = frame.data_ref().map_or(0, Bytes::len);
            remaining = remaining.saturating_sub(length);
            if remaining == 0 {
                return;
            }
        }
    };
    // A body that does not end in time is aborted, which also closes an HTTP/1.1 connection.
    tokio::select! {
        _ = timeout(MAX_DISCARD_TIME, discarding) => {}
        () = slot.evicted() => {}
    }
    if let Some(condition) = connection_state {
        condition.body_ended();
    }
}
