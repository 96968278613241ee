//! The edge's turn: when the other end may change its window.
//!
//! Each end has SETTINGS of its own, and two control frames that wait for each other hang a tunnel (invariant 11).
//! So only the gateway decides when: it says over the control stream that the edge may, and sends neither PING nor
//! SETTINGS until the edge has said that it did. The answer also proves that SETTINGS which were sent before the
//! line have been acknowledged, since the edge writes an acknowledgement before it reads on.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::sync::Notify;

/// How long an edge that took less than it was offered is left alone at first, and at most.
const RETRY_DELAY_RANGE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(32));

/// Whether the edge is to be offered its turn again. One that took less than it could may have had a crowd; one that never
/// takes more than before is asked more and more seldom.
#[derive(Debug)]
pub(super) struct GrantBackoff {
    /// Bytes that the edge took last, if that was less than it was offered.
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
    /// The edge took so much of what it was offered, in bytes.
    pub(super) fn record(&mut self, accepted: u32, offered: u32) {
        let is_unchanged = self.last_partial.is_some_and(|before| accepted <= before);
        self.retry_delay = if is_unchanged {
            (self.retry_delay * 2).min(RETRY_DELAY_RANGE.1)
        } else {
            RETRY_DELAY_RANGE.0
        };
        self.last_partial = (accepted < offered).then_some(accepted);
    }

    /// How long behind its last turn it has its next, if it has one.
    pub(super) fn retry_delay(&self) -> Option<Duration> {
        self.last_partial.map(|_| self.retry_delay)
    }
}

/// Window grant in progress, shared by the driver and the task of the control stream.
#[derive(Debug, Default)]
pub(super) struct WindowGrant {
    /// Whether the edge knows of turns.
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

    /// Offers the edge its turn. False where the edge knows of none.
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
