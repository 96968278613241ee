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
const PATIENCE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(32));

/// Whether the edge is to be offered its turn again. One that took less than it could may have had a crowd; one that never
/// takes more than before is asked more and more seldom.
#[derive(Debug)]
pub(super) struct GrantBackoff {
    /// Bytes that the edge took last, if that was less than it was offered.
    less: Option<u32>,
    patience: Duration,
}

impl Default for GrantBackoff {
    fn default() -> Self {
        Self {
            less: None,
            patience: PATIENCE.0,
        }
    }
}

impl GrantBackoff {
    /// The edge took so much of what it was offered, in bytes.
    pub(super) fn took(&mut self, taken: u32, offered: u32) {
        let stays = self.less.is_some_and(|before| taken <= before);
        self.patience = if stays {
            (self.patience * 2).min(PATIENCE.1)
        } else {
            PATIENCE.0
        };
        self.less = (taken < offered).then_some(taken);
    }

    /// How long behind its last turn it has its next, if it has one.
    pub(super) fn after(&self) -> Option<Duration> {
        self.less.map(|_| self.patience)
    }
}

/// Window grant in progress, shared by the driver and the task of the control stream.
#[derive(Debug, Default)]
pub(super) struct WindowGrant {
    /// Whether the edge knows of turns.
    given: AtomicBool,
    asked: Notify,
    state: Mutex<GrantState>,
}

#[derive(Debug, Default)]
struct GrantState {
    /// Window to offer to the edge, taken once.
    offered: Option<u32>,
    /// Window that the edge took.
    taken: Option<u32>,
}

impl WindowGrant {
    pub(super) fn give(&self) {
        self.given.store(true, Relaxed);
    }

    /// Offers the edge its turn. False where the edge knows of none.
    pub(super) fn offer(&self, window: u32) -> bool {
        if !self.given.load(Relaxed) {
            return false;
        }
        self.state(|state| state.offered = Some(window));
        self.asked.notify_one();
        true
    }

    pub(super) async fn asked(&self) -> u32 {
        loop {
            if let Some(window) = self.state(|state| state.offered.take()) {
                return window;
            }
            self.asked.notified().await;
        }
    }

    pub(super) fn over(&self, window: u32) {
        self.state(|state| state.taken = Some(window));
    }

    /// Returns the window that the edge took, once.
    pub(super) fn taken(&self) -> Option<u32> {
        self.state(|state| state.taken.take())
    }

    fn state<T>(&self, change: impl FnOnce(&mut GrantState) -> T) -> T {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
