//! Time limits of waits during which a request's body may move.

use std::{
    pin::pin,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::Duration,
};
use tokio::time::timeout;

/// Waits for `work` as long as the body moves, because an upstream may read for hours. `progress` is the number of consumed
/// parts of the body. Returns `None` if none was consumed for `idle_timeout`.
pub async fn while_moving<T>(
    idle_timeout: Duration,
    progress: &AtomicUsize,
    work: impl Future<Output = T>,
) -> Option<T> {
    let mut work = pin!(work);
    loop {
        let before = progress.load(Relaxed);
        match timeout(idle_timeout, &mut work).await {
            Ok(done) => return Some(done),
            Err(_) if progress.load(Relaxed) == before => return None,
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;
    use tokio::time::{Instant, sleep};

    #[tokio::test(start_paused = true)]
    async fn a_wait_lasts_while_parts_are_taken_and_one_bound_more() {
        let (taken, bound) = (AtomicUsize::new(0), Duration::from_secs(10));
        let began = Instant::now();
        let parts = async {
            for _ in 0..5 {
                sleep(Duration::from_secs(9)).await;
                taken.fetch_add(1, Relaxed);
            }
            pending::<()>().await;
        };
        assert!(while_moving(bound, &taken, parts).await.is_none());
        assert!(began.elapsed() >= Duration::from_secs(45) + Duration::from_secs(5));
        let late = async { sleep(bound / 2).await };
        assert!(while_moving(bound, &taken, late).await.is_some());
    }
}
