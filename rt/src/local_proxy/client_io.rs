//! Connection of a program that has sent one HTTP request, and waits for the response.

use crate::socket::ResetOnClose;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use std::{
    io,
    mem::MaybeUninit,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// State of a request, shared by the connection of the program and the body of the request.
#[derive(Clone, Default)]
pub(super) struct RequestState(Arc<Flags>);

#[derive(Default)]
struct Flags {
    /// Whether the destination's side has taken the whole body.
    has_body: AtomicBool,
    /// Whether the program has ended its connection behind the request.
    is_client_gone: AtomicBool,
}

impl RequestState {
    /// Whether the program has ended its connection behind the request.
    pub(super) fn is_client_gone(&self) -> bool {
        self.0.is_client_gone.load(Relaxed)
    }
}

/// Connection that discards the bytes behind a request, such as a further request or an empty line.
///
/// While a response is incomplete, hyper reads nothing more once it has bytes behind the request, and so would not notice that the
/// program has gone. hyper flushes each time that it is polled, unless the program does not read, so a flush looks for the end. Bytes of
/// a body for which the destination has no room still hide an end behind them.
pub(super) struct ClientIo<S> {
    io: S,
    state: RequestState,
}

impl<S> ClientIo<S> {
    pub(super) fn new(io: S, state: RequestState) -> Self {
        Self { io, state }
    }
}

impl<S: AsyncRead + Unpin> ClientIo<S> {
    /// Discards what the program has sent. Ready when its connection has ended.
    fn poll_discard(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut discarded = [MaybeUninit::uninit(); 4096];
        loop {
            let mut discarded = ReadBuf::uninit(&mut discarded);
            ready!(Pin::new(&mut self.io).poll_read(cx, &mut discarded))?;
            if discarded.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ClientIo<S> {
    crate::forward!(io: poll_read);
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ClientIo<S> {
    crate::forward!(io: poll_write, poll_write_vectored, is_write_vectored, poll_shutdown);

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flags = &this.state.0;
        if flags.has_body.load(Relaxed) && !flags.is_client_gone.load(Relaxed) {
            let is_gone = this.poll_discard(cx).is_ready();
            this.state.0.is_client_gone.store(is_gone, Relaxed);
        }
        Pin::new(&mut this.io).poll_flush(cx)
    }
}

impl<S: ResetOnClose> ResetOnClose for ClientIo<S> {
    fn abort(&self) {
        self.io.abort();
    }
}

/// Body of the request, which records its end.
pub(super) struct ClientBody {
    body: Incoming,
    state: RequestState,
}

impl ClientBody {
    pub(super) fn new(body: Incoming, state: RequestState) -> Self {
        let body = Self { body, state };
        body.record_end(false);
        body
    }

    fn record_end(&self, is_at_end: bool) {
        if is_at_end || self.body.is_end_stream() {
            self.state.0.has_body.store(true, Relaxed);
        }
    }
}

impl Body for ClientBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let this = self.get_mut();
        let frame = ready!(Pin::new(&mut this.body).poll_frame(cx));
        let is_at_end = match &frame {
            None => true,
            Some(Ok(frame)) => frame.is_trailers(),
            Some(Err(_)) => false,
        };
        this.record_end(is_at_end);
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
