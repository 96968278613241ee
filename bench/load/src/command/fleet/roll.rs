//! List of the fleet: which nodes are up, which lost their tunnel, and when they were back.
//!
//! Nodes report that they came up or went down; [`watch`] compares this with the expected number. A loss begins when the
//! first node of a complete fleet goes down, and ends when the fleet is complete again.

use super::node::Failed;
use crate::{
    measure::Failures,
    report::{self, rounded},
};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender},
    time::Instant,
};

/// Width of a bin in which returns are counted.
const BIN: Duration = Duration::from_millis(100);

/// Up or down, and the time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    up: bool,
    at: Instant,
}

/// Recipient of the nodes' reports.
#[derive(Debug)]
pub(super) struct Roll {
    changed: UnboundedSender<Change>,
    full: AtomicU64,
    resumed: AtomicU64,
    asked: AtomicU64,
    failures: Mutex<Failures>,
}

impl Roll {
    pub(super) fn new(changed: UnboundedSender<Change>) -> Self {
        Self {
            changed,
            full: AtomicU64::new(0),
            resumed: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            failures: Mutex::default(),
        }
    }

    pub(super) fn up(&self) {
        self.change(true);
    }

    pub(super) fn down(&self) {
        self.change(false);
    }

    fn change(&self, up: bool) {
        let at = Instant::now();
        // The receiver is gone when the fleet is stopped.
        let _ = self.changed.send(Change { up, at });
    }

    pub(super) fn shook_hands(&self, resumed: bool) {
        let kind = if resumed { &self.resumed } else { &self.full };
        kind.fetch_add(1, Relaxed);
    }

    pub(super) fn asked(&self) {
        self.asked.fetch_add(1, Relaxed);
    }

    pub(super) fn failed(&self, failed: &Failed) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.add(failed.to_string());
    }

    /// All counts since the beginning.
    pub(super) fn counts(&self) -> Value {
        let failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        json!({
            "full": self.full.load(Relaxed),
            "resumed": self.resumed.load(Relaxed),
            "streams": self.asked.load(Relaxed),
            "failures": *failures,
        })
    }

    /// Full and resumed handshakes so far.
    pub(super) fn handshakes(&self) -> (u64, u64) {
        (self.full.load(Relaxed), self.resumed.load(Relaxed))
    }
}

/// A time in which the fleet gathers: at first, or after a loss.
struct ConnectPhase {
    began: Instant,
    epoch: f64,
    first: Option<Instant>,
    handshakes: (u64, u64),
    bins: BTreeMap<u128, u64>,
    down: u64,
}

impl ConnectPhase {
    fn begin(roll: &Roll, at: Instant) -> Self {
        Self {
            began: at,
            epoch: report::now(),
            first: None,
            handshakes: roll.handshakes(),
            bins: BTreeMap::new(),
            down: 0,
        }
    }

    fn came(&mut self, at: Instant) {
        self.first.get_or_insert(at);
        let age = at.saturating_duration_since(self.began).as_millis();
        *self
            .bins
            .entry(age / BIN.as_millis() * BIN.as_millis())
            .or_default() += 1;
    }

    fn complete(&self, event: &str, roll: &Roll, (nodes, at): (usize, Instant)) -> Value {
        let since = |from: Instant| {
            let passed = at.saturating_duration_since(from);
            rounded(passed.as_secs_f64(), 3)
        };
        let bins: Vec<_> = self.bins.iter().collect();
        let (full, resumed) = roll.handshakes();
        json!({
            "event": event,
            "nodes": nodes,
            "seconds": since(self.began),
            "seconds_from_first": since(self.first.unwrap_or(at)),
            "began_ms": self.epoch,
            "complete_ms": report::now(),
            "fell": self.down,
            "full": full.saturating_sub(self.handshakes.0),
            "resumed": resumed.saturating_sub(self.handshakes.1),
            "per_100_ms": bins,
            "counts": roll.counts(),
        })
    }
}

/// Reports `up`, then `fell` and `back` for each loss, without end.
pub(super) async fn watch(roll: &Roll, mut changes: UnboundedReceiver<Change>, nodes: usize) {
    let mut standing = 0_usize;
    let mut gathering = Some(ConnectPhase::begin(roll, Instant::now()));
    let mut event = "up";
    while let Some(Change { up, at }) = changes.recv().await {
        if up {
            standing += 1;
        } else {
            standing = standing.saturating_sub(1);
        }
        let mut current = gathering.take().unwrap_or_else(|| {
            report::say(&json!({"event": "fell", "at_ms": report::now()}));
            ConnectPhase::begin(roll, at)
        });
        if up {
            current.came(at);
        } else {
            current.down += 1;
        }
        if standing == nodes {
            report::say(&current.complete(event, roll, (nodes, at)));
            event = "back";
        } else {
            gathering = Some(current);
        }
    }
}
