//! Reports about node pools that gateways exchange: members, candidates for leader, and the leader that a gateway announces.
//!
//! `control::api_cache` writes the reports of this gateway, and reads those of peers. `control::peers` sends the former, and
//! stores the latter in the directory. Reports have points in time; messages have durations, because clocks differ.

use causeway_certs::NodeName;
use causeway_config::host_port;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

/// Maximum number of announced addresses of one edge: one of each family on each of two networks.
const MAX_ADDRESSES: usize = 4;
/// Maximum length of an address: a DNS name and a port.
const MAX_ADDRESS_LEN: usize = 260;

/// Reports of one gateway by pool.
pub type PoolReports = BTreeMap<String, Arc<PoolReport>>;

/// Report of one gateway about a pool with edges that are connected to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolReport {
    /// Whether the gateway drains, so that it names no leader. It repeats the leader of another gateway.
    pub is_draining: bool,
    /// Leader that the gateway announces.
    pub leader: Option<NamedLeader>,
    /// Edges that are connected to the gateway and serve other members, the leader first.
    pub members: Vec<ReportedMember>,
}

impl PoolReport {
    /// Returns the members that may lead the pool.
    pub fn candidates(&self) -> impl Iterator<Item = (&NodeName, &ReportedCandidate)> {
        let members = self.members.iter();
        members.filter_map(|member| Some((&member.node, member.candidate.as_ref()?)))
    }
}

/// Leader of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedLeader {
    /// Node of the leader.
    pub node: NodeName,
    /// Time since which it leads.
    pub since: Instant,
    /// Time at which the gateway no longer knew it as a candidate; `None` while it is one. It may be moving to another gateway.
    pub lost_at: Option<Instant>,
}

/// Member of a pool that is connected to the reporting gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedMember {
    /// Node of the member.
    pub node: NodeName,
    /// Addresses at which it serves the other members, each `host:port`.
    pub at: Vec<String>,
    /// State as a candidate for leader, if it may lead.
    pub candidate: Option<ReportedCandidate>,
}

/// Returns the addresses that other edges may receive. Edges and other gateways state them, and nobody has verified them.
pub fn announceable_addresses<'a>(stated: impl IntoIterator<Item = &'a String>) -> Vec<String> {
    // Each character needs one byte in a message. `host_port` accepts any zone of an IPv6 address.
    let is_plain =
        |at: &str| !at.contains(|c: char| !c.is_ascii_graphic() || matches!(c, '"' | '\\'));
    let valid = stated
        .into_iter()
        .filter(|at| at.len() <= MAX_ADDRESS_LEN && is_plain(at) && host_port(at).is_ok());
    valid.take(MAX_ADDRESSES).cloned().collect()
}

/// State of a candidate for leader at the reporting gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReportedCandidate {
    /// Time since which the edge is connected.
    pub connected_since: Instant,
    /// Number of open streams, roughly.
    pub streams: usize,
    /// Time of a probe that the edge has not answered for a while.
    pub unanswered_since: Option<Instant>,
    /// Whether the edge has not answered for so long that another candidate should replace it.
    pub is_late: bool,
    /// Whether data arrived from the edge since the leader of the pool was probed.
    pub is_heard: bool,
}

/// Report of a peer, with the state of its control connection.
#[derive(Clone, Debug)]
pub struct PeerPool {
    /// Random identifier of the peer's process.
    pub instance: String,
    /// Whether the peer answers without delay, and has not announced on its connection that it drains.
    pub is_active: bool,
    /// Time for which the peer has not answered, if that is longer than usual.
    pub unanswered_for: Option<Duration>,
    /// The report.
    pub report: Arc<PoolReport>,
}

/// Reports of this gateway, and the pools about which peers have reported changes. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct PoolExchange {
    own: Arc<watch::Sender<PoolReports>>,
    /// Pools whose reports have changed at a peer since they were taken last.
    changed: Arc<Mutex<BTreeSet<String>>>,
    notify: Arc<Notify>,
}

impl PoolExchange {
    /// Replaces the reports of this gateway. Peers receive those that differ.
    pub fn publish(&self, reports: PoolReports) {
        self.own.send_if_modified(|current| {
            let has_changed = *current != reports;
            if has_changed {
                *current = reports;
            }
            has_changed
        });
    }

    /// Returns the reports of this gateway.
    pub fn own(&self) -> PoolReports {
        self.own.borrow().clone()
    }

    /// Returns the report of this gateway about a pool.
    pub fn own_report(&self, pool: &str) -> Option<Arc<PoolReport>> {
        self.own.borrow().get(pool).cloned()
    }

    /// Returns a watch of the reports of this gateway.
    pub fn subscribe(&self) -> watch::Receiver<PoolReports> {
        self.own.subscribe()
    }

    /// Records that the reports of a peer about these pools have changed.
    pub fn mark_changed(&self, pools: impl IntoIterator<Item = String>) {
        self.lock_changed().extend(pools);
        self.notify.notify_one();
    }

    /// Returns the pools that were recorded since the last call.
    pub fn take_changed(&self) -> BTreeSet<String> {
        std::mem::take(&mut self.lock_changed())
    }

    /// Waits for a change at a peer.
    pub async fn changed(&self) {
        self.notify.notified().await;
    }

    fn lock_changed(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.changed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announced_addresses_are_valid_and_few_and_need_no_escapes() {
        let zone = |text: &str| format!("[fe80::1%{text}]:10271");
        let long = format!("{}:10271", "n".repeat(MAX_ADDRESS_LEN));
        let stated = [
            "nonsense".to_owned(),
            long,
            zone("eth0\u{1}"),
            zone("\""),
            zone("\\"),
            zone("é"),
            zone("eth0"),
            "edge-1.test:10271".to_owned(),
            "10.0.0.1:10271".to_owned(),
            "[fd00::1]:10271".to_owned(),
            "10.0.0.2:10271".to_owned(),
        ];
        assert_eq!(announceable_addresses(&stated), stated[6..10]);
    }
}
