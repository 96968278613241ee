//! The newest session of each slot at each gateway.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Newest session of each slot at each gateway process, for as long as its tunnel is open.
#[derive(Debug, Default)]
pub(crate) struct NewestSessions(Mutex<HashMap<(String, u32), CancellationToken>>);

impl NewestSessions {
    /// Whether the tunnel of the newest session of this slot at this gateway process is still open.
    pub(super) fn is_open(&self, gateway: &str, slot: u32) -> bool {
        let sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let session = sessions.get(&(gateway.to_owned(), slot));
        session.is_some_and(|ended| !ended.is_cancelled())
    }

    /// Adds a session as the newest one of its slot, until the returned guard is dropped.
    pub(super) fn insert(&self, gateway: String, slot: u32) -> DropGuard {
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|_, ended| !ended.is_cancelled());
        let ended = CancellationToken::new();
        sessions.insert((gateway, slot), ended.clone());
        ended.drop_guard()
    }
}
