//! Reset of the HTTP/2 stream of a client's session.
//!
//! hyper ends the stream of an upgraded request in order when its two halves are dropped, and has no call that resets it
//! (hyper 1.12, `H2Upgraded`). Dropping the task that sends the stream's bytes resets it. The session requests that here.

use futures_util::task::AtomicWaker;
use std::{
    sync::{
        Arc,
        atomic::{
            AtomicBool,
            Ordering::{Acquire, Release},
        },
    },
    task::{Context, Poll},
};

/// Request to reset a stream. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct StreamReset(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    is_requested: AtomicBool,
    waker: AtomicWaker,
}

impl StreamReset {
    /// Requests the reset. Both halves of the stream must be dropped afterwards.
    pub fn request(&self) {
        self.0.is_requested.store(true, Release);
        self.0.waker.wake();
    }

    /// Becomes ready when the reset is requested. Wakes the last task that polled.
    pub(super) fn poll_requested(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.0.waker.register(cx.waker());
        if self.0.is_requested.load(Acquire) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }
}
