//! Reset of the HTTP/2 stream of a client's session.
//!
//! hyper ends the stream of an upgraded request in order when its two halves are dropped, and has no call that resets it
//! (hyper 1.12, `H2Upgraded`). Dropping the task that sends the stream's bytes resets it. The session requests that here. It also
//! learns here that the client has reset the stream, while nothing is read from it. The connection below hyper replaces the code of
//! the reset, by which the client would take the session for complete.

use causeway_tunnel::reset_codes::AbortedStreams;
use futures_util::task::AtomicWaker;
use std::{
    future::poll_fn,
    sync::{
        Arc,
        atomic::{
            AtomicBool,
            Ordering::{Acquire, Release},
        },
    },
    task::{Context, Poll},
};

/// Reset of a stream, by either side. Clones share it.
#[derive(Clone, Debug)]
pub struct StreamReset(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Number of the stream, if it is known.
    stream: Option<u32>,
    /// The aborted streams of the connection.
    aborted: AbortedStreams,
    is_requested: AtomicBool,
    sender_waker: AtomicWaker,
    /// Whether the task that sends the stream's bytes has ended.
    is_sender_done: AtomicBool,
    /// Whether the session ends its half in order.
    is_half_closed: AtomicBool,
    session_waker: AtomicWaker,
}

impl StreamReset {
    /// Returns the reset of the stream with this number, if it is known.
    pub(super) fn new(stream: Option<u32>, aborted: AbortedStreams) -> Self {
        Self(Arc::new(Shared {
            stream,
            aborted,
            is_requested: AtomicBool::new(false),
            sender_waker: AtomicWaker::new(),
            is_sender_done: AtomicBool::new(false),
            is_half_closed: AtomicBool::new(false),
            session_waker: AtomicWaker::new(),
        }))
    }

    /// Requests the reset. Both halves of the stream must be dropped afterwards.
    pub fn request(&self) {
        self.0.aborted.insert(self.0.stream);
        self.0.is_requested.store(true, Release);
        self.0.sender_waker.wake();
    }

    /// Records that the session ends its half in order, which ends the task that sends the stream's bytes.
    pub fn mark_half_closed(&self) {
        self.0.is_half_closed.store(true, Release);
    }

    /// Waits until the client has reset the stream or is gone. Once the session has ended its half, only reading reports that.
    pub async fn wait_reset_by_client(&self) {
        poll_fn(|cx| {
            self.0.session_waker.register(cx.waker());
            if self.0.is_sender_done.load(Acquire) && !self.0.is_half_closed.load(Acquire) {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }

    pub(super) fn mark_sender_done(&self) {
        self.0.is_sender_done.store(true, Release);
        self.0.session_waker.wake();
    }

    /// Becomes ready when the reset is requested. Wakes the last task that polled.
    pub(super) fn poll_requested(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.0.sender_waker.register(cx.waker());
        if self.0.is_requested.load(Acquire) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }
}
