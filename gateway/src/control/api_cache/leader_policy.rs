//! Policy of leader election in a pool.
//!
//! A leader remains while it answers. If a leader has not answered a probe for a while, a candidate replaces it that has sent
//! data since the probe. Without such a candidate the leader remains, because members of a site share an uplink that may be the
//! cause of the silence. `candidates_to_probe` selects the candidates to probe in time. Of several candidates, the one with the
//! fewest streams leads, among those that have been connected for a while.

use crate::state::{
    TunnelInfo,
    advertised::SharedCell,
    pool_reports::{PeerPool, ReportedCandidate},
};
use causeway_certs::NodeName;
use causeway_tunnel::{Tunnel, control_stream::YurtHubAddr};
use std::{collections::BTreeMap, time::Duration};
use tokio::time::Instant;

/// Time after which a connected edge is likely to stay.
const STEADY_AFTER: Duration = Duration::from_secs(10);
/// Time without an answer to a probe after which a leader remains only if no candidate does better. Its tunnel is suspect 5 s
/// after the probe at the earliest, and the probe comes after 5 s of silence (`tunnel.ping_after`). With the time of a check, the
/// pool would then be without a leader for more than 10 s. For a link with longer round trips, the limit is twice the round trip.
const UNANSWERED_LIMIT: Duration = Duration::from_millis(2_500);
/// Time without an answer from the leader, after which other candidates are probed.
const PROBE_CANDIDATES_AFTER: Duration = Duration::from_secs(1);
/// Change of the number of streams that is too small for a report to peers.
const MIN_STREAMS_CHANGE: usize = 8;

/// Edge that may lead.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate<'a> {
    node: &'a NodeName,
    /// Time since the edge connected.
    connected_for: Duration,
    streams: usize,
    /// Whether the edge has not answered for [`UNANSWERED_LIMIT`].
    is_late: bool,
    /// Time for which its probe has had no answer.
    unanswered_for: Duration,
    /// Time since anything was received from the edge.
    silent_for: Duration,
}

impl<'a> Candidate<'a> {
    /// Returns the candidate for a connected edge. Of several tunnels, the best values count.
    pub(super) fn from_reader(reader: &'a ConnectedReader, connected_for: Duration) -> Self {
        let late_after = |tunnel: &Tunnel| UNANSWERED_LIMIT.max(2 * tunnel.round_trip());
        let unanswered_for = reader.active_tunnels().map(Tunnel::unanswered_for).min();
        let silent_for = reader.active_tunnels().map(Tunnel::idle_for).min();
        Self {
            node: &reader.node,
            connected_for,
            streams: reader.streams(),
            is_late: reader
                .active_tunnels()
                .all(|tunnel| tunnel.unanswered_for() >= late_after(tunnel)),
            unanswered_for: unanswered_for.unwrap_or_default(),
            silent_for: silent_for.unwrap_or(Duration::MAX),
        }
    }

    /// Returns the candidate that a peer has reported. A peer that does not answer counts as its candidates do: it may have failed
    /// together with them.
    fn from_report(
        (node, reported): (&'a NodeName, &ReportedCandidate),
        peer: &PeerPool,
        now: Instant,
    ) -> Self {
        let elapsed = |at| now.saturating_duration_since(at);
        let unanswered_for = reported.unanswered_since.map(elapsed);
        let silent_for = if reported.is_heard {
            Duration::ZERO
        } else {
            Duration::MAX
        };
        Self {
            node,
            connected_for: elapsed(reported.connected_since),
            streams: reported.streams,
            is_late: reported.is_late || peer.unanswered_for >= Some(UNANSWERED_LIMIT),
            unanswered_for: unanswered_for.max(peer.unanswered_for).unwrap_or_default(),
            silent_for: peer.unanswered_for.map_or(silent_for, |_| Duration::MAX),
        }
    }

    /// Returns the state that peers receive. A small change since the previous report is left out.
    pub(super) fn report(
        &self,
        connected_since: Instant,
        leading: Option<&Self>,
        (previous, now): (Option<&ReportedCandidate>, Instant),
    ) -> ReportedCandidate {
        let is_unanswered = self.unanswered_for >= PROBE_CANDIDATES_AFTER;
        let unanswered_since = previous
            .and_then(|one| one.unanswered_since)
            .or_else(|| now.checked_sub(self.unanswered_for));
        let is_similar = |reported: &usize| {
            let limit =
                |streams: usize| streams.saturating_mul(2).saturating_add(MIN_STREAMS_CHANGE);
            self.streams <= limit(*reported) && *reported <= limit(self.streams)
        };
        let reported_streams = previous.map(|one| one.streams).filter(is_similar);
        ReportedCandidate {
            connected_since,
            streams: reported_streams.unwrap_or(self.streams),
            unanswered_since: unanswered_since.filter(|_| is_unanswered),
            is_late: self.is_late,
            is_heard: leading.is_some_and(|leading| self.is_heard_since(leading)),
        }
    }

    /// Adds the state of the same edge at another gateway. The better values count.
    fn merge(&mut self, other: &Self) {
        self.connected_for = self.connected_for.max(other.connected_for);
        self.streams = self.streams.saturating_add(other.streams);
        self.is_late &= other.is_late;
        self.unanswered_for = self.unanswered_for.min(other.unanswered_for);
        self.silent_for = self.silent_for.min(other.silent_for);
    }

    pub(super) fn node(&self) -> &'a NodeName {
        self.node
    }

    /// Whether data arrived from the edge since this leader was probed.
    fn is_heard_since(&self, leading: &Candidate<'_>) -> bool {
        self.silent_for < leading.unanswered_for
    }
}

/// Returns the candidates of this gateway and of its peers by node.
pub(super) fn merge_candidates<'a>(
    own: &[Candidate<'a>],
    peers: &'a [PeerPool],
    now: Instant,
) -> Vec<Candidate<'a>> {
    let own = own.iter().map(|one| (one.node, *one));
    let mut all: BTreeMap<&NodeName, Candidate<'a>> = own.collect();
    for peer in peers {
        for reported in peer.report.candidates() {
            let candidate = Candidate::from_report(reported, peer, now);
            all.entry(candidate.node)
                .and_modify(|known| known.merge(&candidate))
                .or_insert(candidate);
        }
    }
    all.into_values().collect()
}

pub(super) fn find_leader<'a, 'b>(
    current: Option<&NodeName>,
    candidates: &'b [Candidate<'a>],
) -> Option<&'b Candidate<'a>> {
    candidates.iter().find(|one| Some(one.node) == current)
}

/// Returns the leader of a pool with these candidates; `None` if there is no candidate.
pub(super) fn elect<'a>(
    current: Option<&NodeName>,
    candidates: &[Candidate<'a>],
) -> Option<&'a NodeName> {
    let leading = find_leader(current, candidates);
    let all_late = candidates.iter().all(|one| one.is_late);
    let is_eligible = |one: &&Candidate<'_>| match leading {
        Some(leading) => !one.is_late && one.is_heard_since(leading),
        None => all_late || !one.is_late,
    };
    let least_loaded = |min_connected: Duration| {
        let eligible = candidates.iter().filter(is_eligible);
        let fit = eligible.filter(move |one| one.connected_for >= min_connected);
        fit.min_by_key(|one| (one.streams, one.node))
    };
    let healthy_leader = leading.filter(|one| !one.is_late);
    let elected = healthy_leader.or_else(|| least_loaded(STEADY_AFTER));
    let named = elected.or_else(|| least_loaded(Duration::ZERO));
    named.or(leading).map(|one| one.node)
}

/// Returns the candidates to probe now. The answers show which candidates could replace a leader that does not answer.
pub(super) fn candidates_to_probe<'a>(
    current: Option<&NodeName>,
    candidates: &[Candidate<'a>],
) -> Vec<&'a NodeName> {
    let Some(leading) =
        find_leader(current, candidates).filter(|one| one.unanswered_for >= PROBE_CANDIDATES_AFTER)
    else {
        return Vec::new();
    };
    let silent_candidates = candidates.iter().filter(|one| !one.is_heard_since(leading));
    silent_candidates.map(|one| one.node).collect()
}

/// Leader of each pool, shared with the admin API.
pub(super) type NodePoolLeaders = SharedCell<BTreeMap<String, NodeName>>;

/// Connected node with an API cache.
pub(super) struct ConnectedReader {
    pub(super) node: NodeName,
    pub(super) pool: Option<String>,
    /// Addresses at which the node serves other members.
    pub(super) addresses: Vec<String>,
    /// Endpoint at which the node serves `YurtHub`s.
    pub(super) yurthub: Option<Box<YurtHubAddr>>,
    pub(super) instance: String,
    /// Tunnels over which announcements are sent.
    pub(super) tunnels: Vec<TunnelInfo>,
}

impl ConnectedReader {
    pub(super) fn tunnel_handles(&self) -> impl Iterator<Item = &Tunnel> {
        self.tunnels.iter().map(|edge| &edge.tunnel.tunnel)
    }

    /// Whether other members may use this node.
    pub(super) fn serves_members(&self) -> bool {
        !self.addresses.is_empty() && self.active_tunnels().next().is_some()
    }

    /// Returns the tunnels that do not drain, including tunnels that do not answer.
    pub(super) fn active_tunnels(&self) -> impl Iterator<Item = &Tunnel> {
        self.tunnel_handles().filter(|tunnel| !tunnel.is_draining())
    }

    /// Returns the number of open streams in the node's tunnels.
    pub(super) fn streams(&self) -> usize {
        self.tunnel_handles()
            .map(|tunnel| tunnel.load().open_streams())
            .sum()
    }

    pub(super) fn can_lead(&self) -> bool {
        !self.addresses.is_empty() && self.is_open()
    }

    pub(super) fn is_open(&self) -> bool {
        self.tunnel_handles().any(Tunnel::is_open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(text: &str) -> NodeName {
        NodeName::parse(text).unwrap()
    }

    #[test]
    fn a_leader_stays_else_the_steady_least_loaded_node_leads() {
        let nodes = ["a", "b", "c"].map(node);
        let seconds = Duration::from_secs;
        // Per candidate: connection time, streams, and silence; a silence of 9 s also means an unanswered probe for 3 s.
        for (current, candidates, expected) in [
            (None, vec![], None),
            (None, vec![(0, 0, 0, 0)], Some(0)),
            (None, vec![(0, 1, 0, 0), (1, 30, 5, 4)], Some(1)),
            (
                None,
                vec![(0, 30, 7, 4), (1, 30, 5, 4), (2, 2, 0, 0)],
                Some(1),
            ),
            (None, vec![(0, 2, 3, 0), (1, 3, 3, 0)], Some(0)),
            (None, vec![(0, 30, 1, 9), (2, 30, 5, 4)], Some(2)),
            (None, vec![(0, 30, 5, 9), (2, 30, 1, 9)], Some(2)),
            (Some(2), vec![(0, 30, 0, 0), (2, 1, 9, 4)], Some(2)),
            (Some(2), vec![(0, 30, 4, 0), (1, 10, 0, 0)], Some(1)),
            // A leader that is late is replaced by a candidate that has answered since the leader was probed.
            (
                Some(2),
                vec![(0, 1, 4, 0), (1, 30, 5, 2), (2, 30, 0, 9)],
                Some(1),
            ),
            (
                Some(2),
                vec![(0, 30, 4, 9), (1, 1, 5, 2), (2, 30, 0, 9)],
                Some(1),
            ),
            (
                Some(2),
                vec![(0, 30, 4, 4), (1, 1, 5, 2), (2, 30, 0, 9)],
                Some(1),
            ),
            (
                Some(2),
                vec![(0, 30, 4, 4), (1, 1, 5, 3), (2, 30, 0, 9)],
                Some(2),
            ),
            (Some(2), vec![(0, 30, 0, 9), (2, 30, 2, 9)], Some(2)),
        ] {
            let of = |(which, lasts, streams, silent): &(usize, u64, usize, u64)| Candidate {
                node: &nodes[*which],
                connected_for: seconds(*lasts),
                streams: *streams,
                is_late: *silent == 9,
                unanswered_for: seconds(if *silent == 9 { 3 } else { 0 }),
                silent_for: seconds(*silent),
            };
            let all: Vec<_> = candidates.iter().map(of).collect();
            let current = current.map(|which: usize| &nodes[which]);
            let expected = expected.map(|which: usize| &nodes[which]);
            assert_eq!(elect(current, &all), expected, "{candidates:?}");
        }
    }

    #[test]
    fn candidates_of_a_peer_are_late_if_the_peer_is() {
        let now = Instant::now();
        let reported = ReportedCandidate {
            connected_since: now,
            streams: 0,
            unanswered_since: None,
            is_late: false,
            is_heard: true,
        };
        let just_before = UNANSWERED_LIMIT.saturating_sub(Duration::from_millis(1));
        for (unanswered_for, expected) in [
            (None, false),
            (Some(just_before), false),
            (Some(UNANSWERED_LIMIT), true),
        ] {
            let peer = PeerPool {
                instance: "peer".to_owned(),
                is_active: unanswered_for.is_none(),
                unanswered_for,
                report: std::sync::Arc::default(),
            };
            let name = node("a");
            let candidate = Candidate::from_report((&name, &reported), &peer, now);
            assert_eq!(candidate.is_late, expected, "{unanswered_for:?}");
        }
    }

    #[test]
    fn candidates_are_probed_after_leader_silence_unless_just_heard() {
        let nodes = ["a", "b", "c"].map(node);
        let seconds = Duration::from_secs;
        for (unanswered, expected) in [(0, &[][..]), (1, &nodes[1..]), (2, &nodes[2..])] {
            let of = |(node, silent)| Candidate {
                node,
                connected_for: STEADY_AFTER,
                streams: 0,
                is_late: false,
                unanswered_for: seconds(if silent == 9 { unanswered } else { 0 }),
                silent_for: seconds(silent),
            };
            let all: Vec<_> = nodes.iter().zip([0, 1, 9]).map(of).collect();
            let asked: Vec<_> = candidates_to_probe(Some(&nodes[2]), &all);
            assert_eq!(asked, expected.iter().collect::<Vec<_>>(), "{unanswered}");
        }
    }
}
