//! Window grants: the times at which the edge may change its window.
//!
//! Each end has SETTINGS of its own, and two control frames that wait for each other block a tunnel for ever (invariant 11).
//! So only the gateway chooses the time. It sends a grant over the control stream, and sends neither PING nor SETTINGS until
//! the edge has answered. The edge writes an acknowledgement before it reads on. So its answer also proves that it has
//! acknowledged the SETTINGS that were sent before the grant.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::sync::Notify;

/// Delay before an edge that took less than it was offered gets its next grant: at first, and at most.
const RETRY_DELAY_RANGE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(32));

/// Backoff for window grants. An edge that took less than it was offered may have had many streams at that time. An edge that
/// never takes more than before receives grants at longer and longer intervals.
#[derive(Debug)]
pub(super) struct GrantBackoff {
    /// Bytes that the edge took last, if that was less than the offer.
    last_partial: Option<u32>,
    retry_delay: Duration,
}

impl Default for GrantBackoff {
    fn default() -> Self {
        Self {
            last_partial: None,
            retry_delay: RETRY_DELAY_RANGE.0,
        }
    }
}

impl GrantBackoff {
    /// Records the window that the edge took, and the window that it was offered, in bytes.
    pub(super) fn record(&mut self, accepted: u32, offered: u32) {
        let is_unchanged = self.last_partial.is_some_and(|before| accepted <= before);
        self.retry_delay = if is_unchanged {
            (self.retry_delay * 2).min(RETRY_DELAY_RANGE.1)
        } else {
            RETRY_DELAY_RANGE.0
        };
        self.last_partial = (accepted < offered).then_some(accepted);
    }

    /// Returns the delay before the next grant, if there is one.
    pub(super) fn retry_delay(&self) -> Option<Duration> {
        self.last_partial.map(|_| self.retry_delay)
    }
}

/// Window grant in progress, shared by the driver and the task of the control stream.
#[derive(Debug, Default)]
pub(super) struct WindowGrant {
    /// Whether the edge supports window grants.
    is_enabled: AtomicBool,
    offer_notify: Notify,
    state: Mutex<GrantState>,
}

#[derive(Debug, Default)]
struct GrantState {
    /// Window to offer to the edge, taken once.
    offered: Option<u32>,
    /// Window that the edge took.
    accepted: Option<u32>,
}

impl WindowGrant {
    pub(super) fn enable(&self) {
        self.is_enabled.store(true, Relaxed);
    }

    /// Offers a window grant to the edge. Returns `false` if the edge does not support window grants.
    pub(super) fn offer(&self, window: u32) -> bool {
        if !self.is_enabled.load(Relaxed) {
            return false;
        }
        self.with_state(|state| state.offered = Some(window));
        self.offer_notify.notify_one();
        true
    }

    pub(super) async fn next_offer(&self) -> u32 {
        loop {
            if let Some(window) = self.with_state(|state| state.offered.take()) {
                return window;
            }
            self.offer_notify.notified().await;
        }
    }

    pub(super) fn complete(&self, window: u32) {
        self.with_state(|state| state.accepted = Some(window));
    }

    /// Returns the window that the edge took, once.
    pub(super) fn take_accepted(&self) -> Option<u32> {
        self.with_state(|state| state.accepted.take())
    }

    fn with_state<T>(&self, change: impl FnOnce(&mut GrantState) -> T) -> T {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
