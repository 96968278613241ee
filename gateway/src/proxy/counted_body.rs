//! Body of a request on its way to the upstream, in a task of its own.
//!
//! The task ends with the request or its answer, even while it waits for a tunnel that takes nothing; until then its waiting
//! bytes count as buffered. A refused or aborted body resets the stream below: an upstream never takes a part for the whole.

use crate::{
    error::{Error, Reason},
    proxy::{
        ProxyState, StreamContext,
        access_log::AccessRecord,
        forwarding_headers,
        identity_headers::IdentityHeaderFields,
        request,
        request_body::RequestBody,
        upload_budget::{BufferedBody, track_buffered},
    },
};
use bytes::Bytes;
use causeway_certs::NodeName;
use causeway_tunnel::{
    StreamError, StreamSender,
    body::{PumpError, pump},
};
use futures_util::future::OptionFuture;
use http::Version;
use http_body::{Body, Frame};
use std::{
    io,
    pin::{Pin, pin},
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tracing::debug_span;

/// Sends the body in a task of its own. With `expects` it waits for the sender that is returned.
pub(super) fn start(
    way: StreamContext<'_>,
    (inner, version): (RequestBody, Version),
    (send, given_up): (StreamSender, CancellationToken),
    expects: bool,
) -> Option<oneshot::Sender<()>> {
    let (tell, told) = oneshot::channel();
    let told = OptionFuture::from(expects.then_some(told));
    let body = CountedRequestBody::new(way, (inner, version), BufferedBody::default());
    let shared = way.proxy.shared.clone();
    let (waiting, record) = (body.waiting.clone(), way.record.clone());
    // The body may continue after a complete answer.
    let busy = (version == Version::HTTP_2).then(|| way.connection.idle.busy());
    let node = way.route.node.clone();
    way.proxy.tasks.spawn(debug_span!("body"), async move {
        let task = pin!(run(body, send, told, (node, shared.timeouts.upload)));
        tokio::select! {
            biased;
            () = record.upload_ended() => {}
            () = given_up.cancelled() => {}
            () = track_buffered(shared.limits.pressure(), &waiting, task) => {}
        }
        drop(busy);
    });
    expects.then_some(tell)
}

async fn run(
    body: CountedRequestBody,
    mut send: StreamSender,
    go: OptionFuture<oneshot::Receiver<()>>,
    (node, patience): (NodeName, Duration),
) {
    // If a request is cancelled while it waits, its stream below is cancelled as well.
    let _ = go.await;
    let record = body.record.clone();
    match pump(body, &mut send, Some(patience)).await {
        Ok(()) => {}
        Err(PumpError::Stalled(_)) => {
            let patience = humantime::format_duration(patience);
            let detail =
                format!("the app on {node} has read nothing from the request body for {patience}");
            record.failed(&Reason::TargetTimeout.error(detail));
        }
        Err(PumpError::Body(error)) => {
            tracing::debug!(%error, "a client aborted its request body");
        }
        Err(PumpError::Stream(error @ StreamError::Evicted)) => {
            record.failed(&Error::of_stream(node.as_str(), &error));
        }
        Err(PumpError::Stream(error)) => {
            tracing::debug!(%error, "a request body was not read to its end");
        }
    }
}

/// A request's body, counted.
pub(super) struct CountedRequestBody {
    inner: RequestBody,
    /// Receive window, if the client speaks HTTP/2.
    window: Option<u32>,
    waiting: BufferedBody,
    shared: Arc<ProxyState>,
    record: Arc<AccessRecord>,
    told: IdentityHeaderFields,
}

impl CountedRequestBody {
    /// Returns the body of the request, which reports its chunks to `waiting`.
    pub(super) fn new(
        way: StreamContext<'_>,
        (inner, version): (RequestBody, Version),
        waiting: BufferedBody,
    ) -> Self {
        Self {
            inner,
            window: (version == Version::HTTP_2).then_some(way.connection.window),
            waiting,
            shared: way.proxy.shared.clone(),
            record: way.record.clone(),
            told: way.proxy.listener.told.clone(),
        }
    }

    /// How long the body is, if that is known.
    pub(super) fn length(&self) -> Option<u64> {
        self.inner.size_hint().exact()
    }

    /// Reports its chunks to `waiting` from now on.
    pub(super) fn tells(&mut self, waiting: BufferedBody) {
        self.waiting = waiting;
    }

    /// Notes the token that ends the upstream connection on which the body goes from now on; `None` if it goes on none any more.
    pub(super) fn goes_on(&self, line: Option<CancellationToken>) {
        self.record.uploads_on(line);
    }

    /// Returns the maximum number of bytes that are buffered here while this chunk waits: the chunk itself, and the bytes that
    /// hyper or h2 has read after it.
    fn held(&self, chunk: &Bytes) -> usize {
        if self.inner.is_end_stream() {
            return chunk.len();
        }
        let behind = match self.window {
            Some(window) => u64::from(window),
            // hyper reads one chunk ahead, of about the same size.
            None => u64::try_from(chunk.len()).unwrap_or(u64::MAX),
        };
        let left = self.inner.size_hint().upper().unwrap_or(u64::MAX);
        let behind = usize::try_from(behind.min(left)).unwrap_or(usize::MAX);
        chunk.len() + behind
    }

    fn checked(
        &self,
        frame: Result<Frame<Bytes>, hyper::Error>,
    ) -> Result<Frame<Bytes>, UploadError> {
        let mut frame = frame.map_err(|error| {
            if is_malformed(&error) {
                let detail = format!("the request body is malformed: {error}");
                self.record.failed(&Reason::Malformed.error(detail));
            } else {
                let detail = format!("the client aborted its request body: {error}");
                self.record.client_closed(&detail);
            }
            UploadError::Broken(error)
        })?;
        if let Some(chunk) = frame.data_ref() {
            let length = u64::try_from(chunk.len()).unwrap_or(u64::MAX);
            self.record.passed.up.fetch_add(length, Relaxed);
        }
        if let Some(trailers) = frame.trailers_mut() {
            let shared = &self.shared;
            let checked = request::trailers(trailers, shared.header_bytes, shared.max_headers);
            checked.map_err(|error| {
                self.record.failed(&error);
                UploadError::Refused(error.detail.into_owned())
            })?;
            self.told.strip(trailers);
            forwarding_headers::strip_trailers(trailers);
        }
        Ok(frame)
    }
}

/// Why a body does not go on.
#[derive(Debug, thiserror::Error)]
pub(super) enum UploadError {
    #[error(transparent)]
    Broken(hyper::Error),
    #[error("{0}")]
    Refused(String),
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
            self.waiting.none();
            return Poll::Pending;
        }
        let frame = ready!(polled).map(|frame| self.checked(frame));
        let chunk = frame
            .as_ref()
            .and_then(|frame| frame.as_ref().ok()?.data_ref());
        self.waiting.some(chunk.map_or(0, |chunk| self.held(chunk)));
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }
}

impl Drop for CountedRequestBody {
    fn drop(&mut self) {
        if self.record.has_ended_answered() {
            self.inner.cut();
        }
    }
}

/// Whether a body broke the protocol, as opposed to a client that went away.
fn is_malformed(error: &hyper::Error) -> bool {
    let cause =
        std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<io::Error>());
    let kind = cause.map(io::Error::kind);
    matches!(
        kind,
        Some(io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData)
    )
}
