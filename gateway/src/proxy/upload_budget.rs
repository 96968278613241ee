//! Buffered request bytes of clients while the tunnel accepts none, as a part of the process's memory budget.
//!
//! hyper and h2 buffer up to a window of a body that is not polled, and do not expose the number of bytes. The maximum is
//! therefore counted, from the first sample without a poll until the body is polled again. A future that is polled and does not
//! poll its body waits for something else, which is the tunnel. The share of the budget is released when the future ends in any
//! way.

use causeway_tunnel::buffered::{BudgetShare, MemoryBudget, SAMPLE_INTERVAL};
use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    task::Poll,
};
use tokio::time::{Instant, sleep};

/// Buffered bytes of one body, reported by the task that reads it. Clones share the same state.
#[derive(Clone, Debug, Default)]
pub(super) struct BufferedBody(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// Size of the last chunk and of the bytes that may be buffered after it.
    buffered_len: AtomicUsize,
    /// Whether a chunk was returned since the last poll began.
    has_handed_out: AtomicBool,
    /// Whether the body was polled without a result since the last poll began, and no chunk was returned after it.
    is_polled_empty: AtomicBool,
}

impl BufferedBody {
    /// Records that the body was polled and has no chunk yet.
    pub(super) fn note_pending(&self) {
        self.0.is_polled_empty.store(true, Relaxed);
    }

    /// Records that the body returned a chunk. `bytes` is the size of the chunk and of the bytes that may be buffered after it.
    /// After the body's end it is 0.
    pub(super) fn note_chunk(&self, bytes: usize) {
        self.0.buffered_len.store(bytes, Relaxed);
        self.0.is_polled_empty.store(false, Relaxed);
        self.0.has_handed_out.store(true, Relaxed);
    }

    /// Whether bytes are buffered and the body was not polled for more.
    pub(super) fn is_blocked(&self) -> bool {
        self.0.buffered_len.load(Relaxed) > 0 && !self.0.is_polled_empty.load(Relaxed)
    }

    fn start_poll(&self) {
        self.0.is_polled_empty.store(false, Relaxed);
        self.0.has_handed_out.store(false, Relaxed);
    }
}

/// Runs `task`, which reads a body and forwards it. The buffered bytes count towards `memory_budget` meanwhile.
pub(super) async fn track_buffered<F: Future>(
    memory_budget: &Arc<MemoryBudget>,
    buffered: &BufferedBody,
    mut task: Pin<&mut F>,
) -> F::Output {
    let mut share = BudgetShare::new(memory_budget.clone());
    let mut sample_timer = pin!(sleep(SAMPLE_INTERVAL));
    let mut is_sampling = false;
    poll_fn(|cx| {
        buffered.start_poll();
        let polled = task.as_mut().poll(cx);
        if polled.is_ready() {
            return polled;
        }
        let buffered_len = buffered.0.buffered_len.load(Relaxed);
        let has_handed_out = buffered.0.has_handed_out.load(Relaxed);
        if buffered.0.is_polled_empty.load(Relaxed) {
            share.set(0);
            // The consumer may have polled only to join chunks and may wait now, which the next check detects.
            is_sampling = false;
            if !has_handed_out {
                return Poll::Pending;
            }
        } else if buffered_len == 0 || share.bytes() > 0 {
            is_sampling = false;
            share.set(buffered_len);
            return Poll::Pending;
        }
        if !std::mem::replace(&mut is_sampling, true) {
            sample_timer
                .as_mut()
                .reset(Instant::now() + SAMPLE_INTERVAL);
        }
        if sample_timer.as_mut().poll(cx).is_ready() {
            share.set(buffered_len);
        }
        Poll::Pending
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::sync::{Semaphore, mpsc};

    const LITTLE: Duration = Duration::from_millis(10);
    const LONG: Duration = Duration::from_millis(200);

    #[tokio::test(start_paused = true)]
    async fn waiting_uploads_count_after_a_delay_until_they_proceed() {
        let (pressure, waiting) = (Arc::new(MemoryBudget::new(100)), BufferedBody::default());
        let (say, mut message) = mpsc::channel(8);
        let room = Semaphore::new(0);
        let work = async {
            loop {
                let asked = poll_fn(|cx| {
                    let polled = message.poll_recv(cx);
                    match polled {
                        Poll::Ready(bytes) => waiting.note_chunk(bytes.unwrap_or(0)),
                        Poll::Pending => waiting.note_pending(),
                    }
                    polled
                });
                asked.await;
                // Polls once more and then waits, as a consumer that joins chunks does.
                if message.is_empty() {
                    waiting.note_pending();
                }
                room.acquire().await.unwrap().forget();
            }
        };
        let seen = async {
            let after = async |wait| {
                sleep(wait).await;
                pressure.bytes()
            };
            assert_eq!(after(LONG).await, 0, "nothing has arrived");
            say.send(70).await.unwrap();
            assert_eq!(after(LITTLE).await, 0, "it is young");
            assert_eq!(after(LONG).await, 70);
            room.add_permits(1);
            assert_eq!(after(LITTLE).await, 0, "it went");
            assert_eq!(after(LONG).await, 0, "and more is asked for");
            say.send(70).await.unwrap();
            say.send(30).await.unwrap();
            assert_eq!(after(LONG).await, 70);
            room.add_permits(1);
            assert_eq!(after(LONG).await, 30, "the next one waits");
        };
        let work = pin!(work);
        tokio::select! {
            () = track_buffered(&pressure, &waiting, work) => unreachable!("it never ends"),
            () = seen => {}
        }
        assert_eq!(pressure.bytes(), 0, "it goes with the work");
    }
}
