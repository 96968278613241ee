//! Body of a request to an upstream with which the gateway itself speaks HTTP, and the state of its connection.
//!
//! The body is sent when hyper polls it, after the upstream's 100 if the client waits for one.

use crate::proxy::{
    counted_body::{CONTINUE_TIMEOUT, CountedRequestBody, UploadError},
    upload_budget::BufferedBody,
};
use bytes::Bytes;
use causeway_certs::Fingerprint;
use causeway_tunnel::eviction::Eviction;
use http_body::{Body, Frame};
use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};
use tokio::{
    sync::oneshot,
    time::{Sleep, sleep},
};
use tokio_util::sync::CancellationToken;

/// State that a connection's task shares with the request on the connection.
#[derive(Debug, Default)]
pub(super) struct ConnState {
    /// Key by which the upstream was verified, if it is verified by its key.
    pub(super) key: Option<Fingerprint>,
    /// Eviction handle of the stream below.
    pub(super) eviction: Option<Eviction>,
    /// Token that ends the connection at once, by a reset.
    pub(super) cancel_token: CancellationToken,
    /// Number of parts of request bodies that the connection has accepted.
    pub(super) taken: AtomicUsize,
    /// Buffered bytes of request bodies.
    pub(super) waiting: BufferedBody,
    /// Whether the connection has accepted nothing for too long.
    pub(super) is_stalled: AtomicBool,
}

/// Body of a request on its way to the upstream.
#[derive(Default)]
pub(super) struct UpstreamRequestBody(Option<ActiveUpload>);

struct ActiveUpload {
    upload: CountedRequestBody,
    life: Arc<ConnState>,
    /// Signal that the body waits for before it is sent, and the maximum time of that wait.
    release: Option<(oneshot::Receiver<()>, Pin<Box<Sleep>>)>,
}

impl UpstreamRequestBody {
    /// Returns this body for the connection with this state. With `release`, the body waits for that signal first.
    pub(super) fn new(
        upload: CountedRequestBody,
        conn_state: &Arc<ConnState>,
        release: Option<oneshot::Receiver<()>>,
    ) -> Self {
        upload.set_upload_connection(Some(conn_state.cancel_token.clone()));
        Self(Some(ActiveUpload {
            upload,
            life: conn_state.clone(),
            release: release.map(|go| (go, Box::pin(sleep(CONTINUE_TIMEOUT)))),
        }))
    }

    /// Moves the body to another connection than the one that it was created for.
    pub(super) fn on_connection(mut self, conn_state: &Arc<ConnState>) -> Self {
        if let Some(active) = &mut self.0 {
            active.upload.set_buffered(conn_state.waiting.clone());
            active
                .upload
                .set_upload_connection(Some(conn_state.cancel_token.clone()));
            active.life = conn_state.clone();
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
        if let Some((release, release_timer)) = &mut uploading.release {
            // If the sender was dropped, the app has already answered.
            if Pin::new(release).poll(cx).is_pending() {
                ready!(release_timer.as_mut().poll(cx));
            }
            uploading.release = None;
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
        // hyper does not poll after the last part.
        self.life.waiting.note_chunk(0);
        self.upload.set_upload_connection(None);
    }
}
