//! Bodies between a stream and an app, and what each keeps hold of while it lasts.
//!
//! A request's body goes as the engine asks for it; an answer's brings its connection along, to be kept after the
//! last byte. On a shared connection either one holds the stream's place, since an app may answer
//! before it has read, and the place is free when both are over.

use super::{
    app::{App, AppId},
    kept::{Kept, Line},
};
use bytes::Bytes;
use causeway_tunnel::{Receive, StreamError, places::Place};
use http_body::{Body as _, Frame};
use hyper::body::Incoming;
use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};

/// A request's body on its way to the app.
#[derive(Default)]
pub(super) struct Outgoing {
    /// `None`: it has none.
    body: Option<Receive>,
    taken: Taken,
    place: Option<Arc<Place>>,
}

/// How many parts of a request's body the engine has taken. Clones share the count.
#[derive(Clone, Debug, Default)]
pub(super) struct Taken(Arc<AtomicUsize>);

impl Taken {
    pub(super) fn count(&self) -> usize {
        self.0.load(Relaxed)
    }
}

/// An answer's body on its way from the app, and the connection that brings it.
pub(super) enum Body {
    Http1 {
        app: AppId,
        line: Box<Line>,
        incoming: Incoming,
    },
    Http2 {
        incoming: Incoming,
        _place: Arc<Place>,
    },
}

impl http_body::Body for Outgoing {
    type Data = Bytes;
    type Error = StreamError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StreamError>>> {
        let Some(receive) = &mut self.body else {
            return Poll::Ready(None);
        };
        let frame = ready!(Pin::new(receive).poll_frame(cx));
        self.taken.0.fetch_add(1, Relaxed);
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Receive::is_end)
    }
}

impl Outgoing {
    pub(super) fn new(body: Option<Receive>) -> Self {
        Self {
            body,
            ..Self::default()
        }
    }

    pub(super) fn taken(&self) -> Taken {
        self.taken.clone()
    }

    /// Whether there is a body.
    pub(super) fn is_some(&self) -> bool {
        self.body.is_some()
    }

    /// Keeps a stream's place until the body has been sent or given up.
    pub(super) fn hold(&mut self, place: Arc<Place>) {
        drop(self.place.replace(place));
    }
}

impl Body {
    pub(super) fn http1(app: &App, line: Box<Line>, incoming: Incoming) -> Self {
        Self::Http1 {
            app: app.id.clone(),
            line,
            incoming,
        }
    }

    pub(super) fn http2(place: Arc<Place>, incoming: Incoming) -> Self {
        Self::Http2 {
            incoming,
            _place: place,
        }
    }

    /// Whether nothing follows the head.
    pub(super) fn is_end(&self) -> bool {
        match self {
            Self::Http1 { incoming, .. } | Self::Http2 { incoming, .. } => incoming.is_end_stream(),
        }
    }

    /// Keeps the connection for the next request, after the last byte.
    pub(super) async fn keep(self, kept: &Kept) {
        if let Self::Http1 {
            app,
            line,
            incoming,
        } = self
        {
            drop(incoming);
            kept.put(app, *line).await;
        }
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.get_mut() {
            Self::Http2 { incoming, .. } => Pin::new(incoming).poll_frame(cx),
            Self::Http1 { line, incoming, .. } => line.poll_frame(incoming, cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.is_end()
    }
}
