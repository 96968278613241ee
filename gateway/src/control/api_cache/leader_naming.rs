//! Naming of the leader of one pool, by all gateways together.
//!
//! - The gateway with the highest rendezvous rank for the pool, among those that answer, hold a candidate and do not drain, is in
//!   charge: it names the leader among the candidates of all gateways (`leader_policy`). The others repeat its leader. A gateway
//!   whose leader has been lost for too long is not in charge.
//! - A leader remains while it is a candidate at any gateway, and for [`MOVE_TIME`] after that, because it may be moving from one
//!   gateway to another.
//! - Gateways that meet may have named different leaders. The one that has led for longer remains. The gateway in charge accepts
//!   an older leader at once. A gateway with an older leader keeps it for [`ROUND_TRIP`], so that the gateway in charge
//!   can accept it, and then repeats the leader of the gateway in charge.
//! - Gateways that are connected to each other in both directions agree after that. If only one of two gateways is connected to the
//!   other one, both may be in charge for as long as this lasts, and name different leaders.
//!
//! A gateway without peers is always in charge.

#[cfg(test)]
mod tests;

use super::leader_policy::{self, Candidate};
use crate::state::pool_reports::{NamedLeader, PeerPool};
use causeway_certs::NodeName;
use sha2::{Digest, Sha256};
use std::time::Duration;
use tokio::time::Instant;

/// Time for which a leader that is no candidate any more remains, while there are other gateways to which it may be moving. An edge
/// dials another gateway within 2.5 s.
const MOVE_TIME: Duration = Duration::from_secs(3);
/// Maximum time after [`MOVE_TIME`] until the leader of another gateway arrives that replaces a lost one. The other gateway checks
/// its pools every second.
const REPLACEMENT_TIME: Duration = Duration::from_secs(2);
/// Maximum time that a report needs from one gateway to another. Times of different gateways are equal within it.
const TRANSIT_TOLERANCE: Duration = Duration::from_secs(5);
/// Maximum time until the answer of another gateway to a report has arrived.
const ROUND_TRIP: Duration = Duration::from_secs(10);

/// Facts from which the leader of a pool is named.
pub(super) struct NamingInput<'a> {
    pub(super) pool: &'a str,
    /// Identifier of this gateway's process, if it has peers.
    pub(super) instance: Option<&'a str>,
    /// Whether this gateway holds a candidate, and does not drain.
    pub(super) may_name: bool,
    /// Whether any other gateway is connected.
    pub(super) has_peers: bool,
    /// Candidates of all gateways.
    pub(super) candidates: &'a [Candidate<'a>],
    /// Reports of the peers about the pool.
    pub(super) peers: &'a [PeerPool],
}

impl NamingInput<'_> {
    fn is_candidate(&self, node: &NodeName) -> bool {
        self.candidates.iter().any(|one| one.node() == node)
    }

    /// Returns the peer that is in charge, and its leader; `None` if this gateway is in charge, or if no gateway may name a leader.
    fn peer_in_charge(&self, now: Instant) -> Option<(&PeerPool, &NamedLeader)> {
        let rank = |instance: &str| rendezvous_weight(self.pool, instance);
        let naming = self.peers.iter().filter(|peer| {
            let report = &peer.report;
            peer.is_active && !report.is_draining && report.candidates().next().is_some()
        });
        // A peer that repeats a lost leader waits for another gateway to replace it.
        let with_leader = naming.filter_map(|peer| {
            let leader = peer.report.leader.as_ref()?;
            let remains = self.remains_for(leader, MOVE_TIME + REPLACEMENT_TIME, now);
            remains.then_some((peer, leader))
        });
        // Equal weights have the order of the identifiers, which differ.
        let (best, leader) =
            with_leader.max_by_key(|(peer, _)| (rank(&peer.instance), &peer.instance))?;
        let is_own_rank_higher = self
            .instance
            .filter(|_| self.may_name)
            .is_some_and(|own| (rank(own), own) > (rank(&best.instance), &best.instance));
        (!is_own_rank_higher).then_some((best, leader))
    }

    /// Whether a leader remains: it is a candidate, or it may be moving.
    fn remains(&self, leader: &NamedLeader, now: Instant) -> bool {
        self.remains_for(leader, MOVE_TIME, now)
    }

    /// Whether a leader is a candidate, or has not been one for at most this time.
    fn remains_for(&self, leader: &NamedLeader, limit: Duration, now: Instant) -> bool {
        let is_recent = |at| now.saturating_duration_since(at) <= limit;
        self.is_candidate(&leader.node) || leader.lost_at.is_none_or(is_recent)
    }

    /// Returns the leader that has led for the longest time, of the leaders of peers that answer, except this one.
    fn oldest_of_peers(&self, except: Option<&NodeName>, now: Instant) -> Option<&NamedLeader> {
        let answering = self
            .peers
            .iter()
            .filter(|peer| peer.unanswered_for.is_none());
        let named = answering.filter_map(|peer| peer.report.leader.as_ref());
        named
            .filter(|leader| Some(&leader.node) != except && self.remains(leader, now))
            .min_by_key(|leader| (leader.since, &leader.node))
    }
}

/// Leader of one pool, as this gateway announces it.
#[derive(Debug, Default)]
pub(super) struct LeaderNaming {
    leader: Option<NamedLeader>,
    /// Identifier of the gateway whose leader this gateway repeats.
    followed: Option<String>,
    /// Time since which this gateway keeps a leader that the gateway in charge has not named.
    disagrees_since: Option<Instant>,
    /// Last time at which another gateway was in charge.
    peer_in_charge_at: Option<Instant>,
    /// Leader that this gateway has replaced, and the time. Peers repeat it until they learn of the new leader.
    replaced: Option<(NodeName, Instant)>,
    /// Whether any other gateway was connected when the leader was a candidate, or has been since.
    had_peers: bool,
}

impl LeaderNaming {
    /// Returns the leader that this gateway announces.
    pub(super) fn leader(&self) -> Option<&NamedLeader> {
        self.leader.as_ref()
    }

    /// Names the leader anew, and returns it.
    pub(super) fn update(&mut self, input: &NamingInput<'_>, now: Instant) -> Option<&NamedLeader> {
        self.record_loss(input, now);
        let own = self.leader.take();
        let remaining = own.clone().filter(|leader| {
            input.is_candidate(&leader.node) || (self.had_peers && input.remains(leader, now))
        });
        self.leader = if let Some((peer, theirs)) = input.peer_in_charge(now) {
            Some(self.follow((&peer.instance, theirs), (own, remaining), now))
        } else if input.may_name {
            if remaining.is_none() {
                // Peers still repeat it.
                self.replaced = own
                    .map(|leader| (leader.node, now))
                    .or(self.replaced.take());
            }
            self.name(remaining, input, now)
        } else {
            // At present nobody names a leader.
            (self.followed, self.disagrees_since) = (None, None);
            remaining.or_else(|| input.oldest_of_peers(None, now).cloned())
        };
        self.record_loss(input, now);
        self.leader.as_ref()
    }

    /// Records whether the leader is a candidate, and since when it is not.
    fn record_loss(&mut self, input: &NamingInput<'_>, now: Instant) {
        if let Some(leader) = &mut self.leader {
            if input.is_candidate(&leader.node) {
                leader.lost_at = None;
                self.had_peers = input.has_peers;
            } else {
                leader.lost_at.get_or_insert(now);
                self.had_peers |= input.has_peers;
            }
        }
    }

    /// Returns the leader that this gateway names, as the gateway in charge.
    fn name(
        &mut self,
        own: Option<NamedLeader>,
        input: &NamingInput<'_>,
        now: Instant,
    ) -> Option<NamedLeader> {
        self.followed = None;
        // A peer that is in charge with interruptions ends a disagreement as well.
        let is_recent = |at: Instant| now.saturating_duration_since(at) <= ROUND_TRIP;
        self.disagrees_since
            .take_if(|_| !self.peer_in_charge_at.is_some_and(is_recent));
        let is_old = |at: Instant| now.saturating_duration_since(at) > ROUND_TRIP + MOVE_TIME;
        self.replaced.take_if(|(_, at)| is_old(*at));
        let replaced = self.replaced.as_ref().map(|(node, _)| node);
        let theirs = input.oldest_of_peers(replaced, now);
        let current = match (own, theirs) {
            (Some(own), Some(theirs)) if !is_older(theirs, &own) => Some(own),
            (own, theirs) => theirs.cloned().or(own),
        };
        let node = current.as_ref().map(|leader| &leader.node);
        if node.is_some_and(|node| !input.is_candidate(node)) {
            // It may be moving.
            return current;
        }
        match leader_policy::elect(node, input.candidates) {
            Some(elected) if node != Some(elected) => {
                let leader = new_leader(elected, now);
                self.replaced = current
                    .map(|replaced| (replaced.node, now))
                    .or(self.replaced.take());
                Some(leader)
            }
            _ => current,
        }
    }

    /// Returns the leader that this gateway repeats, as a gateway that is not in charge. `remaining` is its own leader, unless that
    /// is lost.
    fn follow(
        &mut self,
        (instance, theirs): (&String, &NamedLeader),
        (own, remaining): (Option<NamedLeader>, Option<NamedLeader>),
        now: Instant,
    ) -> NamedLeader {
        self.peer_in_charge_at = Some(now);
        let is_followed = self.followed.as_ref() == Some(instance);
        let other = remaining.filter(|own| own.node != theirs.node && is_older(own, theirs));
        if let Some(own) = other.filter(|_| !is_followed) {
            let since = *self.disagrees_since.get_or_insert(now);
            if now.saturating_duration_since(since) <= ROUND_TRIP {
                return own;
            }
        }
        self.disagrees_since = None;
        self.followed = Some(instance.clone());
        // Small differences between the times are not reported back.
        own.filter(|own| own.node == theirs.node && !is_older(theirs, own))
            .unwrap_or_else(|| theirs.clone())
    }
}

fn new_leader(node: &NodeName, now: Instant) -> NamedLeader {
    NamedLeader {
        node: node.clone(),
        since: now,
        lost_at: None,
    }
}

/// Whether a leader has led for longer than another one, beyond the tolerance.
fn is_older(leader: &NamedLeader, than: &NamedLeader) -> bool {
    leader.since + TRANSIT_TOLERANCE < than.since
}

/// Returns the rendezvous weight of a gateway for a pool. It is the same at all gateways, in all versions.
fn rendezvous_weight(pool: &str, instance: &str) -> u64 {
    let mut hash = Sha256::new();
    hash.update(pool);
    // Neither text contains a zero byte.
    hash.update([0]);
    hash.update(instance);
    let digest = hash.finalize();
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    u64::from_be_bytes(first)
}
