//! Interim responses (1xx) from the upstream to the client.
//!
//! hyper passes them to a callback, possibly on another task, and the stream's task sends them. Nothing slows down the
//! upstream meanwhile, and each sent one costs a frame on the tunnel that all streams share. Interim responses are hints,
//! except 100 Continue, which is passed on once. A few of the others are passed on at once. After that only the latest one is
//! passed on, once a second. Large ones are dropped. A stream fails if its upstream sends too many.

use causeway_tunnel::{headers, wire::MAX_INTERIM_RESPONSES};
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

/// Number of interim responses of a stream that are passed on at once. Together with the final response, its trailers and a
/// reset they stay within the frames that a tunnel accepts of each stream.
const MAX_IMMEDIATE: usize = 4;
/// Minimum time between further interim responses.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum size of the header fields of an interim response, in bytes.
const MAX_HEADER_BYTES: usize = 16 << 10;

/// Queue of the interim responses of one stream. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct InformationalQueue(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    pending: Mutex<PendingResponse>,
    /// Number of received interim responses, whether they are passed on or not.
    received_count: AtomicUsize,
    waker: AtomicWaker,
}

/// Interim responses that are waiting to be sent.
#[derive(Debug, Default)]
struct PendingResponse {
    /// Responses that may be sent now.
    ready: VecDeque<Response<()>>,
    /// Latest response that arrived too early after another one.
    deferred: Option<Response<()>>,
    /// Time at which a response other than 100 was sent last.
    last_sent: Option<Instant>,
    /// Number of responses other than 100 that were passed on at once.
    immediate_count: usize,
    /// Whether a 100 has arrived.
    has_continue: bool,
}

impl Inner {
    fn push(&self, status: StatusCode, fields: &HeaderMap) {
        if self.received_count.fetch_add(1, Relaxed) < MAX_INTERIM_RESPONSES {
            self.lock().push(status, fields);
        }
        self.waker.wake();
    }

    fn lock(&self) -> MutexGuard<'_, PendingResponse> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PendingResponse {
    fn push(&mut self, status: StatusCode, fields: &HeaderMap) {
        let mut head = Response::new(());
        *head.status_mut() = status;
        let is_too_large = headers::header_list_size(fields) > MAX_HEADER_BYTES;
        if !is_too_large {
            head.headers_mut().clone_from(fields);
            // An interim response has no body, and its length would be mistaken for the final response's.
            head.headers_mut().remove(CONTENT_LENGTH);
            headers::strip_hop_by_hop(head.headers_mut());
            headers::strip_private(head.headers_mut());
        }
        if status == StatusCode::CONTINUE {
            if !std::mem::replace(&mut self.has_continue, true) {
                self.ready.push_back(head);
            }
            return;
        }
        if is_too_large {
            return;
        }
        if self.immediate_count < MAX_IMMEDIATE {
            self.immediate_count += 1;
            self.last_sent = Some(Instant::now());
            self.ready.push_back(head);
        } else {
            self.deferred = Some(head);
        }
    }

    /// Returns the next response that may be sent now.
    fn pop(&mut self) -> Option<Response<()>> {
        if let Some(head) = self.ready.pop_front() {
            return Some(head);
        }
        if self.deferred.is_some() && self.remaining_pause().is_zero() {
            self.last_sent = Some(Instant::now());
            return self.deferred.take();
        }
        None
    }

    /// Returns the remaining time until a deferred response may be sent.
    fn remaining_pause(&self) -> Duration {
        let elapsed = self
            .last_sent
            .map_or(MIN_INTERVAL, |passed| passed.elapsed());
        MIN_INTERVAL.saturating_sub(elapsed)
    }
}

impl InformationalQueue {
    /// Makes hyper report the interim responses to `request` to this queue.
    pub(super) fn attach<B>(&self, request: &mut Request<B>) {
        let queue = self.0.clone();
        hyper::ext::on_informational(request, move |answer| {
            queue.push(answer.status(), answer.headers());
        });
    }

    /// Returns the next response if it may be sent now. Deferred ones are useless once the final response has arrived.
    pub(super) fn pop(&self) -> Option<Response<()>> {
        self.0.lock().pop()
    }

    /// Waits for the next response. Returns `None` if there were too many.
    pub(super) async fn next(&self) -> Option<Response<()>> {
        // Most streams have no interim responses and need no timer.
        let mut pause = pin!(None);
        poll_fn(|cx| {
            self.0.waker.register(cx.waker());
            if self.0.received_count.load(Relaxed) > MAX_INTERIM_RESPONSES {
                return Poll::Ready(None);
            }
            let mut pending = self.0.lock();
            if let Some(head) = pending.pop() {
                return Poll::Ready(Some(head));
            }
            if pending.deferred.is_some() {
                pause.set(Some(sleep(pending.remaining_pause())));
                let is_elapsed = pause.as_mut().as_pin_mut().map(|pause| pause.poll(cx));
                if is_elapsed.is_some_and(|over| over.is_ready()) {
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
            interim.0.push(HINTS, &hint(sent));
        }
        for expected in ["0", "1", "2", "3", "99"] {
            assert_eq!(number(&interim.next().await.unwrap()), expected);
        }
        let gone = began.elapsed();
        assert!(gone >= MIN_INTERVAL && gone < 2 * MIN_INTERVAL, "{gone:?}");
        assert!(interim.next().now_or_never().is_none());
        interim.0.push(HINTS, &hint(100));
        // The final response arrived.
        assert!(interim.pop().is_none());
        assert_eq!(number(&interim.next().await.unwrap()), "100");
    }

    #[tokio::test(start_paused = true)]
    async fn a_continue_passes_after_other_hints_and_large_hints_do_not() {
        let interim = InformationalQueue::default();
        let mut large = hint(0);
        large.insert("x-large", "x".repeat(MAX_HEADER_BYTES).parse().unwrap());
        interim.0.push(HINTS, &large);
        for sent in 1..10 {
            interim.0.push(HINTS, &hint(sent));
        }
        for _ in 0..2 {
            interim.0.push(StatusCode::CONTINUE, &large);
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
        for sent in 0..=MAX_INTERIM_RESPONSES {
            interim.0.push(HINTS, &hint(sent));
        }
        assert!(interim.next().await.is_none());
    }
}
