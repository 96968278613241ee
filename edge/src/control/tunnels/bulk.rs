//! Tracker of the slots with bulk transfers, and of the time of the last bulk transfer.
//!
//! A session marks its slot when its tunnel carries a bulk transfer. The next slot waits for that mark, and closes its tunnel
//! when no slot has been marked for a while.

use causeway_tunnel::load::BULK_SPAN;
use std::{collections::BTreeMap, time::Duration};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

/// Minimum time between two marks of one slot, because a bulk transfer marks it at every mebibyte.
const MIN_MARK_INTERVAL: Duration = Duration::from_millis(250);

/// Time of the last bulk transfer of each slot.
#[derive(Debug)]
pub(crate) struct BulkTracker(watch::Sender<BTreeMap<u32, Instant>>);

impl Default for BulkTracker {
    fn default() -> Self {
        Self(watch::Sender::new(BTreeMap::new()))
    }
}

impl BulkTracker {
    /// Records that a stream of this slot's tunnel is a bulk transfer.
    pub(crate) fn mark(&self, slot: u32) {
        self.0.send_if_modified(|marks| {
            let stale = marks
                .get(&slot)
                .is_none_or(|at| at.elapsed() >= MIN_MARK_INTERVAL);
            if stale {
                marks.insert(slot, Instant::now());
            }
            stale
        });
    }

    /// Waits until this slot has a bulk transfer.
    pub(crate) async fn wait_for_bulk(&self, slot: u32) {
        let mut marks = self.0.subscribe();
        let fresh = |marks: &BTreeMap<u32, Instant>| {
            marks.get(&slot).is_some_and(|at| at.elapsed() <= BULK_SPAN)
        };
        // The sender lives at least as long as this task.
        let _ = marks.wait_for(fresh).await;
    }

    /// Waits until no slot has moved bulk for `idle_timeout`.
    pub(crate) async fn wait_until_idle(&self, idle_timeout: Duration) {
        loop {
            let latest = self.0.borrow().values().max().copied();
            let deadline = latest.unwrap_or_else(Instant::now) + idle_timeout;
            if latest.is_some() && deadline <= Instant::now() {
                return;
            }
            sleep_until(deadline).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn bulk_adds_a_tunnel_at_once_until_a_minute_without_bulk() {
        let bulk = BulkTracker::default();
        bulk.mark(0);
        bulk.wait_for_bulk(0).await;
        let began = Instant::now();
        let minute = Duration::from_mins(1);
        let marking = async {
            tokio::time::sleep(Duration::from_secs(30)).await;
            bulk.mark(1);
        };
        tokio::join!(marking, bulk.wait_until_idle(minute));
        assert_eq!(began.elapsed(), Duration::from_secs(90));
    }
}
