//! Interim answers (1xx) on their way from the app to the caller.
//!
//! The HTTP engine hands them to a callback, maybe on another task than the stream's; the stream's task sends
//! them on. What nobody has read yet is bounded, and so is how many there may be: they are advice, and an app that sends
//! them without end never comes to its answer.

use causeway_tunnel::wire::MOST_INTERIMS;
use futures_util::task::AtomicWaker;
use http::{Request, Response};
use std::{
    collections::VecDeque,
    future::poll_fn,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::Poll,
};

/// Unsent interim answers of one stream at most.
const MOST: usize = 16;

/// The interim answers of one stream. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Interim(Arc<Queue>);

#[derive(Debug, Default)]
struct Queue {
    heads: Mutex<VecDeque<Response<()>>>,
    /// How many have come, read or not.
    came: AtomicUsize,
    waker: AtomicWaker,
}

impl Interim {
    /// Lets the engine report the interim answers to `request` here.
    pub(super) fn listen<B>(&self, request: &mut Request<B>) {
        let queue = self.0.clone();
        hyper::ext::on_informational(request, move |answer| {
            if queue.came.fetch_add(1, Relaxed) >= MOST_INTERIMS {
                return queue.waker.wake();
            }
            let mut head = Response::new(());
            *head.status_mut() = answer.status();
            *head.headers_mut() = answer.headers().clone();
            causeway_tunnel::headers::strip_hop_by_hop(head.headers_mut());
            causeway_tunnel::headers::strip_private(head.headers_mut());
            let mut heads = queue.heads.lock().unwrap_or_else(PoisonError::into_inner);
            if heads.len() < MOST {
                heads.push_back(head);
            }
            drop(heads);
            queue.waker.wake();
        });
    }

    /// The next, if it is there.
    pub(super) fn pop(&self) -> Option<Response<()>> {
        let mut heads = self.0.heads.lock().unwrap_or_else(PoisonError::into_inner);
        heads.pop_front()
    }

    /// Waits for the next. `None`: there have been too many.
    pub(super) async fn next(&self) -> Option<Response<()>> {
        poll_fn(|cx| {
            self.0.waker.register(cx.waker());
            if self.0.came.load(Relaxed) > MOST_INTERIMS {
                return Poll::Ready(None);
            }
            self.pop()
                .map_or(Poll::Pending, |head| Poll::Ready(Some(head)))
        })
        .await
    }
}
