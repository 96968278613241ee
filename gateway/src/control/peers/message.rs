//! Messages of the control connection between two gateways, one JSON object per line.
//!
//! The gateway that has dialled sends its hello, and receives the hello of the other gateway and then that gateway's nodes: all of
//! them between `snapshot` and `synchronized`, later each change. The lines of one stream arrive in order and complete, so a change
//! needs no number. Reports about node pools come in the same way, except that a later snapshot does not repeat them. A stream that
//! begins with another question (`rotation_request`, `revocations_request`) carries only the answer to it.

use crate::{
    control::{ca_rotation::RotationProgress, gateway_revocation::RevocationProgress},
    state::{
        directory::HeldState,
        pool_reports::{
            NamedLeader, PoolReport, ReportedCandidate, ReportedMember, announceable_addresses,
        },
    },
};
use causeway_certs::NodeName;
use causeway_tunnel::wire::{MAX_MESSAGE, MAX_UNHEALTHY_PORTS};
use serde::{Deserialize, Serialize};
use std::{collections::VecDeque, net::IpAddr, ops::Not, sync::Arc, time::Duration};
use tokio::time::Instant;

/// Version of these messages. Gateways of different versions do not forward to each other.
pub(crate) const PROTOCOL: u32 = 1;
/// Maximum number of nodes in one message. So many names of 253 bytes, each with the maximum number of ports, fit into a line of
/// 64 KiB.
pub(super) const MAX_NODES: usize = 125;
/// Bytes for the pools of one message. The rest of the line is for the names of one pool and of its leader.
const MAX_POOL_BYTES: usize = MAX_MESSAGE - MAX_MESSAGE / 8;

/// First message of each gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PeerHello {
    /// [`PROTOCOL`] of the gateway.
    pub(crate) protocol: u32,
    /// The gateway's own version, for people.
    pub(crate) version: String,
    /// Random identifier of the process.
    pub(crate) instance: String,
    /// Whether the gateway that has dialled wants the nodes of the other one. It does not on connections for requests.
    #[serde(default)]
    pub(crate) wants_nodes: bool,
}

/// State of a node in a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeEntry {
    node: NodeName,
    /// `None` if the gateway holds no tunnel of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    state: Option<EntryState>,
    /// Ports whose health checks fail, at most [`MAX_UNHEALTHY_PORTS`]. Gateways of earlier versions neither send nor read it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    unhealthy: Vec<u16>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum EntryState {
    Connected,
    #[serde(other)]
    Draining,
}

impl NodeEntry {
    pub(super) fn new(node: NodeName, state: Option<HeldState>, unhealthy: Vec<u16>) -> Self {
        let state = state.map(|state| match state {
            HeldState::Connected => EntryState::Connected,
            HeldState::Draining => EntryState::Draining,
        });
        Self {
            node,
            state,
            unhealthy,
        }
    }

    pub(super) fn into_parts(mut self) -> (NodeName, Option<HeldState>, Vec<u16>) {
        self.unhealthy.truncate(MAX_UNHEALTHY_PORTS);
        let state = self.state.map(|state| match state {
            EntryState::Connected => HeldState::Connected,
            EntryState::Draining => HeldState::Draining,
        });
        (self.node, state, self.unhealthy)
    }
}

/// Report about a pool in a message. A report without members removes the earlier one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PoolEntry {
    pool: String,
    /// Whether the gateway drains. A gateway of an earlier version does not send it.
    #[serde(default, skip_serializing_if = "Not::not")]
    draining: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    leader: Option<LeaderEntry>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    members: Vec<MemberEntry>,
}

/// Leader that the gateway announces. All times are durations up to the moment of sending, in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct LeaderEntry {
    node: NodeName,
    /// Time for which it leads.
    leads_ms: u64,
    /// Time for which the gateway has not known it as a candidate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lost_ms: Option<u64>,
}

/// Member that is connected to the gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct MemberEntry {
    node: NodeName,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    at: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    candidate: Option<CandidateEntry>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct CandidateEntry {
    connected_ms: u64,
    #[serde(default)]
    streams: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    unanswered_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Not::not")]
    late: bool,
    #[serde(default, skip_serializing_if = "Not::not")]
    heard: bool,
}

fn millis_since(at: Instant, now: Instant) -> u64 {
    let elapsed = now.saturating_duration_since(at);
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the time that was so long ago, or `now` if the clock does not reach so far back.
fn before(now: Instant, millis: u64) -> Instant {
    now.checked_sub(Duration::from_millis(millis))
        .unwrap_or(now)
}

fn encoded_len(value: &impl Serialize) -> usize {
    serde_json::to_vec(value).map_or(0, |text| text.len())
}

impl PoolEntry {
    /// Returns the entry for a report, as of now. Members that do not fit into a message are left out.
    fn new(pool: &str, report: Option<&PoolReport>, now: Instant) -> Self {
        let mut remaining = MAX_POOL_BYTES;
        let members = report.iter().flat_map(|report| &report.members);
        let members = members.map(|member| MemberEntry {
            node: member.node.clone(),
            at: member.at.clone(),
            candidate: member.candidate.map(|candidate| CandidateEntry {
                connected_ms: millis_since(candidate.connected_since, now),
                streams: candidate.streams,
                unanswered_ms: candidate.unanswered_since.map(|at| millis_since(at, now)),
                late: candidate.is_late,
                heard: candidate.is_heard,
            }),
        });
        let fitting = members.take_while(|member| {
            let size = encoded_len(member) + 1;
            let fits = size <= remaining;
            remaining = remaining.saturating_sub(size);
            fits
        });
        let leader = report.and_then(|report| report.leader.as_ref());
        Self {
            pool: pool.to_owned(),
            draining: report.is_some_and(|report| report.is_draining),
            members: fitting.collect(),
            leader: leader.map(|leader| LeaderEntry {
                node: leader.node.clone(),
                leads_ms: millis_since(leader.since, now),
                lost_ms: leader.lost_at.map(|at| millis_since(at, now)),
            }),
        }
    }

    /// Returns the pool, and the report that arrived now.
    pub(super) fn into_parts(self, now: Instant) -> (String, Option<PoolReport>) {
        if self.members.is_empty() {
            return (self.pool, None);
        }
        let members = self.members.into_iter().map(|member| ReportedMember {
            node: member.node,
            at: announceable_addresses(&member.at),
            candidate: member.candidate.map(|candidate| ReportedCandidate {
                connected_since: before(now, candidate.connected_ms),
                streams: candidate.streams,
                unanswered_since: candidate.unanswered_ms.map(|ms| before(now, ms)),
                is_late: candidate.late,
                is_heard: candidate.heard,
            }),
        });
        let report = PoolReport {
            is_draining: self.draining,
            members: members.collect(),
            leader: self.leader.map(|leader| NamedLeader {
                node: leader.node,
                since: before(now, leader.leads_ms),
                lost_at: leader.lost_ms.map(|ms| before(now, ms)),
            }),
        };
        (self.pool, Some(report))
    }
}

/// Takes the next changed pools, as many as fit into a message, each with its report. Returns the message as of now, or `None` if no
/// pool is left.
pub(super) fn next_pool_message(
    changes: &mut VecDeque<(String, Option<Arc<PoolReport>>)>,
    now: Instant,
) -> Option<PeerMessage> {
    let (mut pools, mut remaining) = (Vec::new(), MAX_POOL_BYTES);
    while let Some((pool, report)) = changes.front() {
        let entry = PoolEntry::new(pool, report.as_deref(), now);
        let size = encoded_len(&entry) + 1;
        if size > remaining && !pools.is_empty() {
            break;
        }
        remaining = remaining.saturating_sub(size);
        pools.push(entry);
        changes.pop_front();
    }
    (!pools.is_empty()).then_some(PeerMessage::Pools { pools })
}

/// Message between two gateways.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum PeerMessage {
    /// First message of each gateway.
    Hello(PeerHello),
    /// All nodes follow, and earlier ones are void at the next `synchronized`.
    Snapshot,
    /// States of nodes.
    Nodes {
        /// The nodes.
        nodes: Vec<NodeEntry>,
    },
    /// All nodes were sent.
    Synchronized,
    /// Addresses at which clients reach the gateway, if it has a DNS server with `dns.addresses`.
    Addresses {
        /// The addresses.
        addresses: Vec<IpAddr>,
    },
    /// Reports about node pools, of which each replaces the earlier one. Gateways without them ignore the message.
    Pools {
        /// The reports.
        pools: Vec<PoolEntry>,
    },
    /// The gateway drains: new requests should go to other gateways.
    Draining,
    /// First message of a stream that asks for the progress of a rotation. A gateway of an earlier version answers with its hello.
    RotationRequest,
    /// Answer to [`PeerMessage::RotationRequest`], or a part of it.
    Rotation {
        /// Roots and edges, at most [`MAX_NODES`] of them.
        part: RotationProgress,
        /// Whether the answer is complete with this part.
        is_last: bool,
    },
    /// First message of a stream that asks which nodes do not know the revocations of gateways. A gateway of an earlier version
    /// answers with its hello.
    RevocationsRequest,
    /// Answer to [`PeerMessage::RevocationsRequest`], or a part of it.
    Revocations {
        /// The nodes, at most [`MAX_NODES`] of them.
        part: RevocationProgress,
        /// Whether the answer is complete with this part.
        is_last: bool,
    },
    /// Message of a later version.
    #[serde(other)]
    Unknown,
}

#[cfg(test)]
mod tests {
    use super::*;
    use causeway_tunnel::control_stream::parse_message;

    fn report(count: usize, label: usize, now: Instant) -> PoolReport {
        let node = |nth: usize| NodeName::parse(&format!("{nth:04}{}", "n".repeat(label))).unwrap();
        let candidate = ReportedCandidate {
            connected_since: now - Duration::from_secs(30),
            streams: 4,
            unanswered_since: Some(now - Duration::from_secs(2)),
            is_late: true,
            is_heard: false,
        };
        let members = (0..count).map(|nth| ReportedMember {
            node: node(nth),
            at: vec!["[2001:db8::1]:10271".to_owned(); 4],
            candidate: Some(candidate),
        });
        PoolReport {
            is_draining: true,
            leader: Some(NamedLeader {
                node: node(0),
                since: now - Duration::from_secs(20),
                lost_at: Some(now - Duration::from_secs(1)),
            }),
            members: members.collect(),
        }
    }

    fn sent(pools: &[(String, PoolReport)], now: Instant) -> Vec<PoolEntry> {
        let mut arrived = Vec::new();
        let changes = pools.iter().cloned();
        let changes = changes.map(|(pool, report)| (pool, Some(Arc::new(report))));
        let mut changes = changes.collect();
        while let Some(message) = next_pool_message(&mut changes, now) {
            let line = serde_json::to_vec(&message).unwrap();
            assert!(line.len() < MAX_MESSAGE, "{}", line.len());
            match parse_message(&line).unwrap() {
                PeerMessage::Pools { pools } => arrived.extend(pools),
                other => panic!("{other:?}"),
            }
        }
        arrived
    }

    #[tokio::test(start_paused = true)]
    async fn pool_reports_arrive_unchanged_in_messages_of_limited_size() {
        // The clock may begin with the process.
        tokio::time::advance(Duration::from_mins(1)).await;
        let now = Instant::now();
        let small = report(5, 20, now);
        let pools: Vec<_> = (0..200)
            .map(|nth| (format!("pool-{nth}"), small.clone()))
            .collect();
        let arrived = sent(&pools, now);
        let expected = pools
            .iter()
            .map(|(pool, report)| PoolEntry::new(pool, Some(report), now));
        assert_eq!(arrived, expected.collect::<Vec<_>>());
        let later = now + Duration::from_secs(3);
        let (pool, received) = arrived[7].clone().into_parts(later);
        assert_eq!(pool, "pool-7");
        // Durations count up to the arrival, whatever the clocks say.
        let shifted = report(5, 20, later);
        assert_eq!(received, Some(shifted));

        let pool = ("p".repeat(253), report(2000, 50, now));
        let large = PoolEntry::new(&pool.0, Some(&pool.1), now);
        let arrived = sent(&[pool.clone(), pool], now);
        assert_eq!(arrived, [large.clone(), large]);
        assert!(arrived[0].members.len() > 100);
        let gone = PoolEntry::new("pool-7", None, now).into_parts(now);
        assert_eq!(gone, ("pool-7".to_owned(), None));
    }

    #[test]
    fn addresses_in_reports_of_other_gateways_are_checked() {
        let now = Instant::now();
        let mut stated = report(1, 20, now);
        let valid = stated.members[0].at.clone();
        let more = ["nonsense", "[fe80::1%\"]:10271", "10.0.0.1:10271"].map(str::to_owned);
        stated.members[0].at.splice(0..0, more[..2].to_vec());
        stated.members[0].at.push(more[2].clone());
        let (_, received) = PoolEntry::new("pool-7", Some(&stated), now).into_parts(now);
        assert_eq!(received.unwrap().members[0].at, valid);
    }

    #[test]
    fn the_longest_message_fits_into_a_line_and_returns_unchanged() {
        let name = |nth: usize| {
            let label = "n".repeat(60);
            NodeName::parse(&format!("{nth:03}.{label}.{label}.{label}.{label}")).unwrap()
        };
        let ports = vec![u16::MAX; MAX_UNHEALTHY_PORTS];
        let entry = |nth| NodeEntry::new(name(nth), Some(HeldState::Draining), ports.clone());
        let nodes = (0..MAX_NODES).map(entry);
        let message = PeerMessage::Nodes {
            nodes: nodes.collect(),
        };
        let line = serde_json::to_vec(&message).unwrap();
        assert!(line.len() < MAX_MESSAGE, "{}", line.len());
        assert_eq!(parse_message::<PeerMessage>(&line).unwrap(), message);
    }

    #[test]
    fn the_progress_of_a_large_fleet_fits_into_lines_and_is_joined_again() {
        let node = |nth: usize| format!("{nth:05}.{}", "n".repeat(60));
        let nodes: Vec<_> = (0..=MAX_NODES * 2).map(node).collect();
        let progress = serde_json::json!({
            "roots": [{ "stage": "active", "fingerprint": "a".repeat(64) }],
            "connected": nodes.len(),
            "too_old": [],
            "without_roots": nodes,
            "on_another_root": nodes[..1],
        });
        let progress: RotationProgress = serde_json::from_value(progress).unwrap();
        let mut joined = RotationProgress::default();
        let parts = progress.clone().into_parts(MAX_NODES);
        assert_eq!(parts.len(), 5);
        for part in parts {
            let is_last = false;
            let line = serde_json::to_vec(&PeerMessage::Rotation { part, is_last }).unwrap();
            let PeerMessage::Rotation { part, .. } = parse_message(&line).unwrap() else {
                panic!("another message");
            };
            joined.merge(part);
        }
        assert_eq!(joined, progress);
    }

    #[test]
    fn the_revocations_of_a_large_fleet_fit_into_lines_and_are_joined_again() {
        let nodes = (0..=MAX_NODES * 2).map(|nth| format!("{nth:05}.{}", "n".repeat(60)));
        let progress = serde_json::json!({
            "list": "a".repeat(64),
            "uninformed": nodes.collect::<Vec<_>>(),
        });
        let progress: RevocationProgress = serde_json::from_value(progress).unwrap();
        let mut joined = RevocationProgress::default();
        let parts = progress.clone().into_parts(MAX_NODES);
        assert_eq!(parts.len(), 4);
        for part in parts {
            let is_last = false;
            let line = serde_json::to_vec(&PeerMessage::Revocations { part, is_last }).unwrap();
            let PeerMessage::Revocations { part, .. } = parse_message(&line).unwrap() else {
                panic!("another message");
            };
            joined.merge(part);
        }
        assert_eq!(joined, progress);
    }

    #[test]
    fn later_messages_and_states_are_accepted() {
        let later = br#"{"type":"of_a_later_version","nodes":1}"#;
        assert_eq!(
            parse_message::<PeerMessage>(later).unwrap(),
            PeerMessage::Unknown
        );
        let earlier: NodeEntry =
            serde_json::from_str(r#"{"node":"edge-1","state":"connected"}"#).unwrap();
        assert_eq!(earlier.into_parts().2, [0_u16; 0]);
        let entry: NodeEntry =
            serde_json::from_str(r#"{"node":"edge-1","state":"of_a_later_version"}"#).unwrap();
        assert_eq!(entry.into_parts().1, Some(HeldState::Draining));
    }
}
