//! Interim answers (1xx) from the upstream to the client.
//!
//! hyper hands them to a callback, maybe on another task than the stream's; the stream's task sends them on. Nothing holds
//! the upstream back meanwhile, and each that goes out costs the tunnel a frame that all its streams pay for. They are
//! advice, save 100 Continue, which passes, once. Of the others a few pass at once and then one a second, the latest; large
//! ones never do. An upstream that sends them without end never comes to its answer.

use causeway_tunnel::{headers, wire::MOST_INTERIMS};
use futures_util::task::AtomicWaker;
use http::{HeaderMap, Request, Response, StatusCode, header::CONTENT_LENGTH};
use std::{
    collections::VecDeque,
    future::{Future, poll_fn},
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::Poll,
    time::Duration,
};
use tokio::time::{Instant, sleep};

/// How many of a stream's interim answers pass as they come. With the answer, its trailers and a reset they are no more
/// frames than a tunnel bears of each stream.
const AT_ONCE: usize = 4;
/// Pause between the interim answers behind those.
const PAUSE: Duration = Duration::from_secs(1);
/// Bytes of the fields of one that passes.
const MOST_FIELDS: usize = 16 << 10;

/// The interim answers of one stream. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct InformationalQueue(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    waiting: Mutex<PendingResponse>,
    /// How many have come, passed on or not.
    came: AtomicUsize,
    waker: AtomicWaker,
}

/// Interim answers that are to be sent.
#[derive(Debug, Default)]
struct PendingResponse {
    /// Now.
    heads: VecDeque<Response<()>>,
    /// The last that came too soon after another.
    latest: Option<Response<()>>,
    /// When one of the others passed last.
    passed: Option<Instant>,
    /// How many of the others have passed as they came.
    at_once: usize,
    /// There was a 100.
    continued: bool,
}

impl Inner {
    fn came(&self, status: StatusCode, fields: &HeaderMap) {
        if self.came.fetch_add(1, Relaxed) < MOST_INTERIMS {
            self.waiting().came(status, fields);
        }
        self.waker.wake();
    }

    fn waiting(&self) -> MutexGuard<'_, PendingResponse> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PendingResponse {
    fn came(&mut self, status: StatusCode, fields: &HeaderMap) {
        let mut head = Response::new(());
        *head.status_mut() = status;
        let large = headers::size(fields) > MOST_FIELDS;
        if !large {
            head.headers_mut().clone_from(fields);
            // An interim response has no body, and its length would be mistaken for the final response's.
            head.headers_mut().remove(CONTENT_LENGTH);
            headers::strip_hop_by_hop(head.headers_mut());
            headers::strip_private(head.headers_mut());
        }
        if status == StatusCode::CONTINUE {
            if !std::mem::replace(&mut self.continued, true) {
                self.heads.push_back(head);
            }
            return;
        }
        if large {
            return;
        }
        if self.at_once < AT_ONCE {
            self.at_once += 1;
            self.passed = Some(Instant::now());
            self.heads.push_back(head);
        } else {
            self.latest = Some(head);
        }
    }

    /// The next that may pass now.
    fn pop(&mut self) -> Option<Response<()>> {
        if let Some(head) = self.heads.pop_front() {
            return Some(head);
        }
        if self.latest.is_some() && self.pause().is_zero() {
            self.passed = Some(Instant::now());
            return self.latest.take();
        }
        None
    }

    /// Returns the rest of the pause behind the last.
    fn pause(&self) -> Duration {
        let gone = self.passed.map_or(PAUSE, |passed| passed.elapsed());
        PAUSE.saturating_sub(gone)
    }
}

impl InformationalQueue {
    /// Makes hyper report the interim answers to `request` here.
    pub(super) fn listen<B>(&self, request: &mut Request<B>) {
        let queue = self.0.clone();
        hyper::ext::on_informational(request, move |answer| {
            queue.came(answer.status(), answer.headers());
        });
    }

    /// The next, if it may pass now. What must wait is of no use once there is an answer.
    pub(super) fn pop(&self) -> Option<Response<()>> {
        self.0.waiting().pop()
    }

    /// Waits for the next. `None`: there have been too many.
    pub(super) async fn next(&self) -> Option<Response<()>> {
        // Most streams have no interim responses and need no timer.
        let mut pause = pin!(None);
        poll_fn(|cx| {
            self.0.waker.register(cx.waker());
            if self.0.came.load(Relaxed) > MOST_INTERIMS {
                return Poll::Ready(None);
            }
            let mut waiting = self.0.waiting();
            if let Some(head) = waiting.pop() {
                return Poll::Ready(Some(head));
            }
            if waiting.latest.is_some() {
                pause.set(Some(sleep(waiting.pause())));
                let over = pause.as_mut().as_pin_mut().map(|pause| pause.poll(cx));
                if over.is_some_and(|over| over.is_ready()) {
                    cx.waker().wake_by_ref();
                }
            }
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    const HINTS: StatusCode = StatusCode::EARLY_HINTS;

    fn hint(number: usize) -> HeaderMap {
        let mut fields = HeaderMap::new();
        fields.insert("x-hint", number.into());
        fields
    }

    fn number(head: &Response<()>) -> &str {
        head.headers()["x-hint"].to_str().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_few_hints_pass_at_once_and_then_the_latest_each_second() {
        let interim = InformationalQueue::default();
        let began = Instant::now();
        for sent in 0..100 {
            interim.0.came(HINTS, &hint(sent));
        }
        for expected in ["0", "1", "2", "3", "99"] {
            assert_eq!(number(&interim.next().await.unwrap()), expected);
        }
        let gone = began.elapsed();
        assert!(gone >= PAUSE && gone < 2 * PAUSE, "{gone:?}");
        assert!(interim.next().now_or_never().is_none());
        interim.0.came(HINTS, &hint(100));
        // The final response arrived.
        assert!(interim.pop().is_none());
        assert_eq!(number(&interim.next().await.unwrap()), "100");
    }

    #[tokio::test(start_paused = true)]
    async fn a_continue_passes_after_other_hints_and_large_hints_do_not() {
        let interim = InformationalQueue::default();
        let mut large = hint(0);
        large.insert("x-large", "x".repeat(MOST_FIELDS).parse().unwrap());
        interim.0.came(HINTS, &large);
        for sent in 1..10 {
            interim.0.came(HINTS, &hint(sent));
        }
        for _ in 0..2 {
            interim.0.came(StatusCode::CONTINUE, &large);
        }
        let mut passed = Vec::new();
        while let Some(head) = interim.pop() {
            passed.push(head.status().as_u16());
            assert!(!head.headers().contains_key("x-large"));
        }
        assert_eq!(passed, [103, 103, 103, 103, 100]);
    }

    #[tokio::test(start_paused = true)]
    async fn endless_hints_are_reported_even_if_none_passes() {
        let interim = InformationalQueue::default();
        for sent in 0..=MOST_INTERIMS {
            interim.0.came(HINTS, &hint(sent));
        }
        assert!(interim.next().await.is_none());
    }
}
