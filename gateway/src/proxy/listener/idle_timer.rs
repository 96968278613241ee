//! Idle time of a client's connection.
//!
//! Each request counts from the end of its head until all its parts have ended: its response, an upload after the
//! response, a session. Bytes that wait for the client's socket keep the connection busy as well: hyper takes the end of a response
//! into its buffer while a client reads nothing. A connection whose first head is not complete is not idle, because the
//! head has its own timeout.

use super::conn_io::ConnState;
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
    created_at: Instant,
    open_requests: AtomicUsize,
    /// Time at which the last request ended, in milliseconds after `created_at`, plus one; 0 means never.
    idle_since: AtomicU64,
}

impl Default for IdleTimer {
    fn default() -> Self {
        Self {
            created_at: Instant::now(),
            open_requests: AtomicUsize::new(0),
            idle_since: AtomicU64::new(0),
        }
    }
}

impl IdleTimer {
    /// Returns a guard for a part of a request. The connection is not idle while the guard exists.
    pub fn begin_request(self: &Arc<Self>) -> ActiveRequest {
        self.open_requests.fetch_add(1, Relaxed);
        ActiveRequest(self.clone())
    }

    /// Whether a request is open.
    pub fn has_open_requests(&self) -> bool {
        self.open_requests.load(Relaxed) > 0
    }

    fn idle_since(&self, socket: &ConnState) -> Option<Instant> {
        let since = self.idle_since.load(Relaxed);
        // A first head that h2 refuses itself begins no request.
        if self.has_open_requests() || (since == 0 && socket.is_reading_head()) {
            return None;
        }
        Some(self.created_at + Duration::from_millis(since.saturating_sub(1)))
    }

    /// Waits until no request has been open and no bytes have waited for the socket for `idle_timeout`, and at least for that time.
    pub async fn wait_idle(&self, socket: &ConnState, idle_timeout: Duration) {
        let mut deadline = Instant::now() + idle_timeout;
        loop {
            sleep_until(deadline).await;
            let now = Instant::now();
            let since = self.idle_since(socket).zip(socket.sent_at());
            deadline = since.map_or(now, |(ended, sent)| ended.max(sent)) + idle_timeout;
            if deadline <= now {
                return;
            }
        }
    }

    /// Waits until the socket has accepted no byte of the bytes that wait for it for `limit`, and no request has been open.
    pub async fn wait_unread(&self, socket: &ConnState, limit: Duration) {
        let mut deadline = Instant::now() + limit;
        loop {
            sleep_until(deadline).await;
            let now = Instant::now();
            let since = self.idle_since(socket).zip(socket.unsent_since());
            deadline = since.map_or(now, |(ended, unsent)| ended.max(unsent)) + limit;
            if deadline <= now {
                return;
            }
        }
    }
}

/// Guard of an open request, see [`IdleTimer::begin_request`].
#[derive(Debug)]
pub struct ActiveRequest(Arc<IdleTimer>);

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        let age = u64::try_from(self.0.created_at.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
        self.0.idle_since.store(age + 1, Relaxed);
        self.0.open_requests.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use tokio::time::{sleep, timeout};

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_idle_a_while_after_the_last_of_its_requests() {
        let (idle, socket) = (Arc::new(IdleTimer::default()), ConnState::default());
        let bound = Duration::from_secs(3);
        let long = 10 * bound;
        assert!(
            timeout(long, idle.wait_idle(&socket, bound)).await.is_err(),
            "no shutdown was requested"
        );
        let (first, second) = (idle.begin_request(), idle.begin_request());
        drop(first);
        assert!(
            timeout(long, idle.wait_idle(&socket, bound)).await.is_err(),
            "one is open"
        );
        drop(second);
        sleep(bound / 2).await;
        let again = idle.begin_request();
        drop(again);
        assert!(idle.wait_idle(&socket, bound).now_or_never().is_none());
        let began = Instant::now();
        idle.wait_idle(&socket, bound).await;
        assert_eq!(began.elapsed(), bound);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_whose_first_head_began_no_request_is_idle() {
        let (idle, socket) = (Arc::new(IdleTimer::default()), ConnState::default());
        let bound = Duration::from_secs(3);
        socket.head_complete();
        let began = Instant::now();
        idle.wait_idle(&socket, bound).await;
        assert_eq!(began.elapsed(), bound);
    }
}
