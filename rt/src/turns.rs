//! Turns for work that takes much CPU time in one poll, such as the first step of a TLS handshake.
//!
//! A task that is ready waits for all tasks that were ready before it. So a thousand handshakes at one moment would delay each
//! request, and each step of the other handshakes, by their sum. With turns only a few of them run between two polls of any other
//! task; the others wait, first in, first out.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    task::Poll,
};
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    task::yield_now,
};

/// Limit on the futures of one runtime that are polled for the first time in one turn of its queue of ready tasks.
#[derive(Debug)]
pub struct Turns(Semaphore);

impl Turns {
    /// Creates a limit of so many first polls in a turn.
    pub fn new(per_turn: usize) -> Self {
        Self(Semaphore::new(per_turn))
    }

    /// Waits for a turn.
    pub async fn acquire(&self) -> Turn<'_> {
        Turn {
            _permit: self.0.acquire().await.ok(),
        }
    }
}

/// Turn of one future. Dropping it passes it on.
#[derive(Debug)]
pub struct Turn<'a> {
    /// The semaphore is never closed.
    _permit: Option<SemaphorePermit<'a>>,
}

impl Turn<'_> {
    /// Polls the future for the first time, and then as any other future to its end. Only work that the future itself does is in its
    /// turn, and not work that creates it.
    pub async fn run<F: Future>(self, future: F) -> F::Output {
        let mut future = pin!(future);
        let first = poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await;
        // The tasks that are ready now run before the next turn.
        yield_now().await;
        drop(self);
        match first {
            Poll::Ready(output) => output,
            Poll::Pending => future.await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::TaskGroup;
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    };
    use tracing::Span;

    #[tokio::test]
    async fn other_tasks_run_between_a_few_first_polls() {
        const PER_TURN: usize = 4;
        const ALL: usize = 1000;
        let (turns, begun) = (
            Arc::new(Turns::new(PER_TURN)),
            Arc::new(AtomicUsize::new(0)),
        );
        let tasks = TaskGroup::default();
        for _ in 0..ALL {
            let (turns, begun) = (turns.clone(), begun.clone());
            let work = async move {
                begun.fetch_add(1, SeqCst);
                yield_now().await;
            };
            tasks.spawn(Span::none(), async move {
                turns.acquire().await.run(work).await;
            });
        }
        let mut before = 0;
        while before < ALL {
            yield_now().await;
            let now = begun.load(SeqCst);
            // The runtime polls this task twice in a turn at most.
            assert!(now - before <= 2 * PER_TURN, "{}", now - before);
            before = now;
        }
        while !tasks.is_empty() {
            yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_future_that_is_dropped_in_its_turn_ends_the_turn() {
        let turns = Turns::new(1);
        let run = async {
            turns
                .acquire()
                .await
                .run(std::future::pending::<()>())
                .await;
        };
        let (dropped, output) = tokio::join!(
            async {
                tokio::select! { () = run => false, () = yield_now() => true }
            },
            async { turns.acquire().await.run(async { 7 }).await },
        );
        assert!(dropped);
        assert_eq!(output, 7);
    }
}
