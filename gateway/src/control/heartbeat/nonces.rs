//! Nonces of delegated heartbeats: random, valid for some seconds, and for each node once.

use causeway_certs::NodeName;
use causeway_tunnel::heartbeat::NONCE_LIFETIME;
use std::collections::{HashSet, VecDeque};
use tokio::time::Instant;

/// Issued nonces that are still valid, the oldest first.
#[derive(Default)]
pub(super) struct Nonces(VecDeque<Nonce>);

struct Nonce {
    text: String,
    issued: Instant,
    /// Nodes that have used it.
    used: HashSet<NodeName>,
}

/// Reason why a nonce is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NonceRefused {
    /// It was never issued, or is too old.
    Stale,
    /// The node has used it before.
    Replayed,
}

impl Nonces {
    /// Returns a new nonce.
    pub(super) fn issue(&mut self, now: Instant) -> String {
        self.remove_expired(now);
        let text = format!("{:032x}", rand::random::<u128>());
        self.0.push_back(Nonce {
            text: text.clone(),
            issued: now,
            used: HashSet::new(),
        });
        text
    }

    /// Checks whether a nonce is valid now.
    pub(super) fn check(&mut self, text: &str, now: Instant) -> Result<(), NonceRefused> {
        self.find(text, now).map(drop)
    }

    /// Records that a node has used a nonce.
    pub(super) fn spend(
        &mut self,
        text: &str,
        node: &NodeName,
        now: Instant,
    ) -> Result<(), NonceRefused> {
        let nonce = self.find(text, now)?;
        if !nonce.used.insert(node.clone()) {
            return Err(NonceRefused::Replayed);
        }
        Ok(())
    }

    fn find(&mut self, text: &str, now: Instant) -> Result<&mut Nonce, NonceRefused> {
        self.remove_expired(now);
        let found = self.0.iter_mut().find(|nonce| nonce.text == text);
        found.ok_or(NonceRefused::Stale)
    }

    /// Removes nonces that are too old.
    fn remove_expired(&mut self, now: Instant) {
        self.0.retain(|nonce| now <= nonce.issued + NONCE_LIFETIME);
    }
}
