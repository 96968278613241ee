//! Idle time of an HTTP/2 connection.
//!
//! hyper bounds idle connections of HTTP/1.1 only. Here each request counts from the time when its head is complete until all its
//! parts have ended: its answer, an upload after that, a session. A connection without any request yet is not idle: its first
//! head has a bound of its own.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep_until};

/// Open requests of a connection, and the end of the last one.
#[derive(Debug)]
pub struct IdleTimer {
    began: Instant,
    open: AtomicUsize,
    /// When the last request ended, in milliseconds after `began`, plus one; 0 is never.
    since: AtomicU64,
}

impl Default for IdleTimer {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            open: AtomicUsize::new(0),
            since: AtomicU64::new(0),
        }
    }
}

impl IdleTimer {
    /// Returns a guard for a part of a request: the connection is not idle as long as the guard exists.
    pub fn busy(self: &Arc<Self>) -> ActiveRequest {
        self.open.fetch_add(1, Relaxed);
        ActiveRequest(self.clone())
    }

    /// Whether a request has been made.
    pub fn has_begun(&self) -> bool {
        self.open.load(Relaxed) > 0 || self.since.load(Relaxed) > 0
    }

    fn since(&self) -> Option<Instant> {
        let since = self.since.load(Relaxed).checked_sub(1);
        let since = since.filter(|_| self.open.load(Relaxed) == 0)?;
        Some(self.began + Duration::from_millis(since))
    }

    /// Waits for `bound`, and on until nothing has been open for so long.
    pub async fn idle(&self, bound: Duration) {
        let mut due = Instant::now() + bound;
        loop {
            sleep_until(due).await;
            let now = Instant::now();
            due = self.since().unwrap_or(now) + bound;
            if due <= now {
                return;
            }
        }
    }
}

/// See [`IdleTimer::busy`].
#[derive(Debug)]
pub struct ActiveRequest(Arc<IdleTimer>);

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        let age = u64::try_from(self.0.began.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
        self.0.since.store(age + 1, Relaxed);
        self.0.open.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use tokio::time::{sleep, timeout};

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_idle_a_while_after_the_last_of_its_requests() {
        let idle = Arc::new(IdleTimer::default());
        let bound = Duration::from_secs(3);
        let long = 10 * bound;
        assert!(
            timeout(long, idle.idle(bound)).await.is_err(),
            "no shutdown was requested"
        );
        let (first, second) = (idle.busy(), idle.busy());
        drop(first);
        assert!(
            timeout(long, idle.idle(bound)).await.is_err(),
            "one is open"
        );
        drop(second);
        sleep(bound / 2).await;
        let again = idle.busy();
        drop(again);
        assert!(idle.idle(bound).now_or_never().is_none());
        let began = Instant::now();
        idle.idle(bound).await;
        assert_eq!(began.elapsed(), bound);
    }
}
