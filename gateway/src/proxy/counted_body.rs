//! Counted body of a request on its way to the upstream, with checked trailers. A refused or aborted body resets its stream, so
//! that an upstream never takes a part of a body for the whole.

use crate::{
    error::Reason,
    proxy::{
        access_log::AccessRecord, forwarding_headers, identity_headers::IdentityHeaderFields,
        request, request_body::RequestBody, upload_budget::BufferedBody,
    },
};
use bytes::Bytes;
use http_body::{Body, Frame};
use std::{
    io,
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio_util::sync::CancellationToken;

/// Time that a body waits for an upstream's 100 after `100-continue`. A client need not wait indefinitely (RFC 9110 §10.1.1);
/// curl waits as long.
pub(super) const CONTINUE_TIMEOUT: Duration = Duration::from_secs(1);

/// Counted body of a request.
pub(super) struct CountedRequestBody {
    pub(super) inner: RequestBody,
    /// Receive window, if the client speaks HTTP/2.
    pub(super) window: Option<u32>,
    /// Counter of the buffered bytes, to which the body reports its chunks.
    pub(super) waiting: BufferedBody,
    pub(super) record: Arc<AccessRecord>,
    pub(super) identity_headers: IdentityHeaderFields,
    /// Maximum number of bytes and of fields of trailers.
    pub(super) bounds: (usize, usize),
}

impl CountedRequestBody {
    /// Returns the length of the body, if it is known.
    pub(super) fn length(&self) -> Option<u64> {
        self.inner.size_hint().exact()
    }

    /// Makes the body report its chunks to `buffered`.
    pub(super) fn set_buffered(&mut self, buffered: BufferedBody) {
        self.waiting = buffered;
    }

    /// Records the token that resets the upstream connection that carries the body; `None` if no connection carries it.
    pub(super) fn set_upload_connection(&self, cancel_token: Option<CancellationToken>) {
        self.record.set_upload_connection(cancel_token);
    }

    /// Returns the maximum number of bytes that are buffered while this chunk waits: the chunk itself, and the bytes that hyper
    /// or h2 has read after it.
    fn buffered_len(&self, chunk: &Bytes) -> usize {
        if self.inner.is_end_stream() {
            return chunk.len();
        }
        let read_ahead = match self.window {
            Some(window) => u64::from(window),
            // hyper reads one chunk ahead, of about the same size.
            None => u64::try_from(chunk.len()).unwrap_or(u64::MAX),
        };
        let remaining = self.inner.size_hint().upper().unwrap_or(u64::MAX);
        let behind = usize::try_from(read_ahead.min(remaining)).unwrap_or(usize::MAX);
        chunk.len() + behind
    }

    fn check_frame(
        &self,
        frame: Result<Frame<Bytes>, hyper::Error>,
    ) -> Result<Frame<Bytes>, UploadError> {
        let mut frame = frame.map_err(|error| {
            if is_malformed(&error) {
                let detail = format!("the request body is malformed: {error}");
                self.record.record_failure(&Reason::Malformed.error(detail));
            } else {
                let detail = format!("the client aborted its request body: {error}");
                self.record.record_client_closed(&detail);
            }
            UploadError::Transport(error)
        })?;
        if let Some(chunk) = frame.data_ref() {
            let length = u64::try_from(chunk.len()).unwrap_or(u64::MAX);
            self.record.bytes.up.fetch_add(length, Relaxed);
        }
        if let Some(trailers) = frame.trailers_mut() {
            let checked = request::check_trailers(trailers, self.bounds.0, self.bounds.1);
            checked.map_err(|error| {
                self.record.record_failure(&error);
                UploadError::Rejected(error.detail.into_owned())
            })?;
            self.identity_headers.strip_fields(trailers);
            forwarding_headers::strip_trailers(trailers);
        }
        Ok(frame)
    }
}

/// Reason why a body ends early.
#[derive(Debug, thiserror::Error)]
pub(super) enum UploadError {
    #[error(transparent)]
    Transport(hyper::Error),
    #[error("{0}")]
    Rejected(String),
}

impl Body for CountedRequestBody {
    type Data = Bytes;
    type Error = UploadError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UploadError>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(cx);
        if polled.is_pending() {
            self.waiting.note_pending();
            return Poll::Pending;
        }
        let frame = ready!(polled).map(|frame| self.check_frame(frame));
        let chunk = frame
            .as_ref()
            .and_then(|frame| frame.as_ref().ok()?.data_ref());
        self.waiting
            .note_chunk(chunk.map_or(0, |chunk| self.buffered_len(chunk)));
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }
}

impl Drop for CountedRequestBody {
    fn drop(&mut self) {
        if self.record.has_ended_after_response() {
            self.inner.abort_on_drop();
        }
    }
}

/// Whether a body broke the protocol. A client that disconnected does not count.
fn is_malformed(error: &hyper::Error) -> bool {
    let cause =
        std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<io::Error>());
    let kind = cause.map(io::Error::kind);
    matches!(
        kind,
        Some(io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData)
    )
}
