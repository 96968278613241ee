//! Gateways that name the leader of one pool, with reports that need time from one to the other.

use super::*;
use crate::state::pool_reports::{PoolReport, ReportedCandidate, ReportedMember};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

const STEP: Duration = Duration::from_millis(100);
const POOL: &str = "north";

fn name(text: &str) -> NodeName {
    NodeName::parse(text).unwrap()
}

/// State of an edge at one gateway.
#[derive(Clone, Copy)]
struct HeldEdge {
    since: Instant,
    /// Time of a probe without an answer.
    unanswered_since: Option<Instant>,
    is_heard: bool,
}

struct Gateway {
    instance: String,
    naming: LeaderNaming,
    edges: BTreeMap<&'static str, HeldEdge>,
    is_draining: bool,
    /// Whether the gateway's version reports that it drains.
    reports_drain: bool,
    report: Arc<PoolReport>,
    /// Last report of each connected peer.
    peers: BTreeMap<usize, Arc<PoolReport>>,
}

struct Message {
    at: Instant,
    from: usize,
    to: usize,
    report: PoolReport,
}

/// Gateways in the order of their ranks, lowest first.
struct Fleet {
    now: Instant,
    transit: Duration,
    gateways: Vec<Gateway>,
    links: BTreeSet<(usize, usize)>,
    messages: Vec<Message>,
}

fn delayed(report: &PoolReport, transit: Duration) -> PoolReport {
    let mut report = report.clone();
    if let Some(leader) = &mut report.leader {
        leader.since += transit;
        leader.lost_at = leader.lost_at.map(|at| at + transit);
    }
    for candidate in report.members.iter_mut().flat_map(|one| &mut one.candidate) {
        candidate.connected_since += transit;
        candidate.unanswered_since = candidate.unanswered_since.map(|at| at + transit);
    }
    report
}

impl Fleet {
    fn new(count: usize, transit: Duration) -> Self {
        let mut instances: Vec<_> = (0..count).map(|nth| format!("gateway-{nth}")).collect();
        instances.sort_by_key(|instance| rendezvous_weight(POOL, instance));
        let gateway = |instance| Gateway {
            instance,
            naming: LeaderNaming::default(),
            edges: BTreeMap::new(),
            is_draining: false,
            reports_drain: true,
            report: Arc::default(),
            peers: BTreeMap::new(),
        };
        Self {
            now: Instant::now() + Duration::from_hours(1),
            transit,
            gateways: instances.into_iter().map(gateway).collect(),
            links: BTreeSet::new(),
            messages: Vec::new(),
        }
    }

    /// Returns gateways that are connected to each other.
    fn connected(count: usize, transit: Duration) -> Self {
        let mut fleet = Self::new(count, transit);
        for one in 0..count {
            (0..one).for_each(|other| fleet.connect(one, other));
        }
        fleet
    }

    fn send(&mut self, from: usize, to: usize) {
        self.messages.push(Message {
            at: self.now + self.transit,
            from,
            to,
            report: delayed(&self.gateways[from].report, self.transit),
        });
    }

    fn connect(&mut self, one: usize, other: usize) {
        self.connect_one_way(one, other);
        self.connect_one_way(other, one);
    }

    /// Lets the second gateway receive the reports of the first one.
    fn connect_one_way(&mut self, from: usize, to: usize) {
        self.links.insert((from, to));
        self.send(from, to);
    }

    fn disconnect(&mut self, one: usize, other: usize) {
        for (from, to) in [(one, other), (other, one)] {
            self.links.remove(&(from, to));
            self.messages
                .retain(|message| (message.from, message.to) != (from, to));
            self.gateways[to].peers.remove(&from);
        }
    }

    fn hold(&mut self, gateway: usize, node: &'static str) {
        let held = HeldEdge {
            since: self.now,
            unanswered_since: None,
            is_heard: false,
        };
        self.gateways[gateway].edges.insert(node, held);
    }

    fn lose(&mut self, gateway: usize, node: &'static str) {
        self.gateways[gateway].edges.remove(node);
    }

    fn leader(&self, gateway: usize) -> Option<String> {
        let leader = self.gateways[gateway].naming.leader();
        leader.map(|leader| leader.node.to_string())
    }

    /// Returns the leader that all gateways with an edge name.
    fn common_leader(&self) -> Option<String> {
        let with_edges = (0..self.gateways.len()).filter(|at| !self.gateways[*at].edges.is_empty());
        let leaders: BTreeSet<_> = with_edges.map(|at| self.leader(at)).collect();
        assert_eq!(leaders.len(), 1, "{leaders:?} {:?}", self.transit);
        leaders.into_iter().next().flatten()
    }

    fn check(&mut self, at: usize) {
        let now = self.now;
        let has_peers = self.links.iter().any(|(_, to)| *to == at);
        let instances: Vec<_> = self
            .gateways
            .iter()
            .map(|one| one.instance.clone())
            .collect();
        let gateway = &mut self.gateways[at];
        let members = gateway.edges.iter().map(|(node, held)| ReportedMember {
            node: name(node),
            at: vec!["10.0.0.1:10271".to_owned()],
            candidate: Some(ReportedCandidate {
                connected_since: held.since,
                streams: 0,
                unanswered_since: held.unanswered_since,
                is_late: held.unanswered_since.is_some(),
                is_heard: held.is_heard,
            }),
        });
        let mut report = PoolReport {
            is_draining: gateway.is_draining && gateway.reports_drain,
            leader: None,
            members: members.collect(),
        };
        let peer = |(from, report): (&usize, &Arc<PoolReport>)| PeerPool {
            instance: instances[*from].clone(),
            is_active: true,
            unanswered_for: None,
            report: report.clone(),
        };
        let peers: Vec<_> = gateway.peers.iter().map(peer).collect();
        let own = [peer((&at, &Arc::new(report.clone())))];
        let all = [own.as_slice(), &peers].concat();
        let input = NamingInput {
            pool: POOL,
            instance: Some(&instances[at]),
            may_name: !report.members.is_empty() && !gateway.is_draining,
            has_peers,
            candidates: &leader_policy::merge_candidates(&[], &all, now),
            peers: &peers,
        };
        // A gateway without edges of the pool does not name its leader.
        if report.members.is_empty() {
            gateway.naming = LeaderNaming::default();
        } else {
            report.leader = gateway.naming.update(&input, now).cloned();
        }
        if *gateway.report != report {
            gateway.report = Arc::new(report);
            let links: Vec<_> = self.links.iter().copied().collect();
            for (from, to) in links {
                if from == at {
                    self.send(from, to);
                }
            }
        }
    }

    /// Lets time pass, and calls `each` after each step.
    fn run_with(&mut self, time: Duration, mut each: impl FnMut(&Self)) {
        let end = self.now + time;
        while self.now < end {
            self.now += STEP;
            let now = self.now;
            for message in self.messages.extract_if(.., |message| message.at <= now) {
                let peers = &mut self.gateways[message.to].peers;
                peers.insert(message.from, Arc::new(message.report));
            }
            (0..self.gateways.len()).for_each(|at| self.check(at));
            each(self);
        }
    }

    fn run(&mut self, seconds: u64) {
        self.run_with(Duration::from_secs(seconds), |_| {});
    }
}

const TRANSITS: [Duration; 4] = [
    Duration::ZERO,
    Duration::from_millis(300),
    Duration::from_secs(2),
    Duration::from_millis(4_900),
];

#[test]
fn gateways_that_meet_keep_the_leader_that_is_older() {
    for transit in TRANSITS {
        for (first, second) in [(0, 1), (1, 0)] {
            for age in [0, 3, 12, 60] {
                let mut fleet = Fleet::new(2, transit);
                fleet.hold(first, "old");
                fleet.run(age);
                fleet.hold(second, "young");
                fleet.run(1);
                fleet.connect(0, 1);
                fleet.run_with(Duration::from_secs(20), |fleet| {
                    let kept = fleet.leader(first);
                    assert!(
                        age <= 10 || kept.as_deref() == Some("old"),
                        "{transit:?} {age}"
                    );
                });
                let leader = fleet.common_leader();
                if age > 10 {
                    assert_eq!(leader.as_deref(), Some("old"), "{transit:?} {first} {age}");
                }
                // They agree for ever.
                fleet.run_with(Duration::from_mins(1), |fleet| {
                    assert_eq!(fleet.common_leader(), leader);
                });
            }
        }
    }
}

#[test]
fn an_edge_of_another_gateway_repeats_the_leader() {
    for transit in TRANSITS {
        for (first, second) in [(0, 1), (1, 0)] {
            let mut fleet = Fleet::connected(2, transit);
            fleet.hold(first, "one");
            fleet.run(20);
            fleet.hold(second, "two");
            fleet.run_with(Duration::from_secs(20), |fleet| {
                assert_eq!(fleet.common_leader().as_deref(), Some("one"));
            });
            // The leader's edge ends.
            fleet.lose(first, "one");
            fleet.hold(first, "three");
            fleet.run_with(MOVE_TIME.saturating_sub(STEP), |fleet| {
                assert_eq!(fleet.leader(first).as_deref(), Some("one"));
            });
            fleet.run_with(2 * transit + 5 * STEP, |_| {});
            assert_ne!(fleet.common_leader().as_deref(), Some("one"));
        }
    }
}

#[test]
fn a_leader_keeps_its_pool_while_it_moves_to_another_gateway() {
    for away_ms in [0, 500, 2_500] {
        for (first, second) in [(0, 2), (2, 0), (1, 2), (0, 1)] {
            let mut fleet = Fleet::connected(3, Duration::from_millis(200));
            fleet.hold(first, "leader");
            fleet.run(12);
            (0..3)
                .zip(["a", "b", "c"])
                .for_each(|(at, node)| fleet.hold(at, node));
            fleet.run(12);
            for (from, to) in [(first, second), (second, first)] {
                let is_led = |fleet: &Fleet| {
                    assert_eq!(fleet.common_leader().as_deref(), Some("leader"));
                };
                fleet.lose(from, "leader");
                fleet.run_with(Duration::from_millis(away_ms), is_led);
                fleet.hold(to, "leader");
                fleet.run_with(Duration::from_secs(15), is_led);
            }
        }
    }
}

#[test]
fn all_edges_of_a_gateway_that_drains_keep_their_leader() {
    for (first, second) in [(0, 1), (1, 0)] {
        let mut fleet = Fleet::connected(2, Duration::from_millis(200));
        for node in ["a", "b", "c"] {
            fleet.hold(first, node);
            fleet.run(12);
        }
        assert_eq!(fleet.common_leader().as_deref(), Some("a"));
        fleet.gateways[first].is_draining = true;
        // The leader moves last. The other gateway had no edge of the pool before.
        for node in ["c", "b", "a"] {
            fleet.hold(second, node);
            fleet.run(1);
            fleet.lose(first, node);
            fleet.run_with(Duration::from_secs(1), |fleet| {
                assert_eq!(fleet.leader(second).as_deref(), Some("a"), "{node}");
            });
        }
        fleet.disconnect(0, 1);
        fleet.run_with(Duration::from_secs(20), |fleet| {
            assert_eq!(fleet.leader(second).as_deref(), Some("a"));
        });
    }
}

#[test]
fn a_leader_that_is_lost_at_a_gateway_that_drains_is_replaced() {
    for (first, second) in [(0, 1), (1, 0)] {
        for (reports_drain, limit) in [(true, MOVE_TIME), (false, MOVE_TIME + REPLACEMENT_TIME)] {
            let mut fleet = Fleet::connected(2, Duration::from_millis(300));
            for (gateway, node) in [(first, "leader"), (first, "a"), (second, "b")] {
                fleet.hold(gateway, node);
                fleet.run(12);
            }
            let draining = &mut fleet.gateways[first];
            (draining.is_draining, draining.reports_drain) = (true, reports_drain);
            fleet.run(1);
            assert_eq!(fleet.common_leader().as_deref(), Some("leader"));
            fleet.lose(first, "leader");
            // Reports go one way, and back.
            fleet.run_with(limit + Duration::from_millis(600) + 2 * STEP, |_| {});
            assert_ne!(fleet.leader(second).as_deref(), Some("leader"));
            fleet.run_with(Duration::from_millis(300) + STEP, |_| {});
            assert_ne!(fleet.common_leader().as_deref(), Some("leader"));
        }
    }
}

#[test]
fn a_gateway_in_charge_with_interruptions_ends_a_disagreement() {
    let mut fleet = Fleet::new(2, Duration::from_millis(300));
    fleet.hold(0, "old");
    fleet.run(20);
    fleet.hold(1, "young");
    fleet.run(1);
    // The gateway in charge does not receive the older leader.
    for _ in 0..4 {
        fleet.connect_one_way(1, 0);
        fleet.run(4);
        fleet.disconnect(0, 1);
        fleet.run(1);
    }
    fleet.run_with(MOVE_TIME / 2, |fleet| {
        assert_eq!(fleet.leader(0).as_deref(), Some("young"));
    });
}

#[test]
fn a_disagreement_ends_when_no_gateway_names_leaders() {
    let mut naming = LeaderNaming {
        disagrees_since: Some(Instant::now()),
        ..LeaderNaming::default()
    };
    let input = NamingInput {
        pool: POOL,
        instance: Some("own"),
        may_name: false,
        has_peers: true,
        candidates: &[],
        peers: &[],
    };
    assert_eq!(naming.update(&input, Instant::now()), None);
    assert_eq!(naming.disagrees_since, None);
}

#[test]
fn a_leader_remains_while_it_leaves_a_gateway_that_has_died() {
    for (first, second) in [(0, 1), (1, 0)] {
        let mut fleet = Fleet::connected(2, Duration::from_millis(200));
        fleet.hold(first, "leader");
        fleet.run(12);
        fleet.hold(second, "other");
        fleet.run(12);
        fleet.disconnect(0, 1);
        fleet.lose(first, "leader");
        fleet.run(2);
        assert_eq!(fleet.leader(second).as_deref(), Some("leader"));
        fleet.hold(second, "leader");
        fleet.run(12);
        assert_eq!(fleet.leader(second).as_deref(), Some("leader"));
        // No gateway is left to which it may move.
        fleet.lose(second, "leader");
        fleet.run_with(STEP, |_| {});
        assert_eq!(fleet.leader(second).as_deref(), Some("other"));
    }
}

#[test]
fn a_partition_that_heals_leaves_the_older_leader() {
    for transit in TRANSITS {
        for cut in [
            vec![0],
            vec![1],
            vec![2],
            vec![0, 1],
            vec![0, 2],
            vec![1, 2],
        ] {
            let mut fleet = Fleet::connected(3, transit);
            fleet.hold(0, "a");
            fleet.run(20);
            fleet.hold(1, "b");
            fleet.hold(2, "c");
            fleet.run(20);
            assert_eq!(fleet.common_leader().as_deref(), Some("a"));
            let pairs = [(0, 1), (0, 2), (1, 2)];
            let is_cut = |(one, other): &(usize, usize)| cut.contains(one) != cut.contains(other);
            for (one, other) in pairs.into_iter().filter(is_cut) {
                fleet.disconnect(one, other);
            }
            fleet.run(20);
            assert_eq!(fleet.leader(0).as_deref(), Some("a"), "{cut:?}");
            for at in 0..3 {
                let is_with_leader = cut.contains(&at) == cut.contains(&0);
                assert_eq!(
                    fleet.leader(at).as_deref() == Some("a"),
                    is_with_leader,
                    "{cut:?}"
                );
            }
            let keeps_leader = |fleet: &Fleet| {
                assert_eq!(fleet.leader(0).as_deref(), Some("a"), "{cut:?} {transit:?}");
            };
            for (one, other) in pairs.into_iter().filter(is_cut) {
                fleet.connect(one, other);
                // They find each other one by one.
                fleet.run_with(Duration::from_secs(1), keeps_leader);
            }
            fleet.run_with(Duration::from_secs(20), keeps_leader);
            fleet.run_with(Duration::from_secs(30), |fleet| {
                assert_eq!(
                    fleet.common_leader().as_deref(),
                    Some("a"),
                    "{cut:?} {transit:?}"
                );
            });
        }
    }
}

#[test]
fn a_silent_leader_is_replaced_by_a_candidate_of_another_gateway() {
    for (first, second) in [(0, 1), (1, 0)] {
        let mut fleet = Fleet::connected(2, Duration::from_millis(300));
        fleet.hold(first, "silent");
        fleet.run(12);
        fleet.hold(second, "heard");
        fleet.run(12);
        let now = fleet.now;
        let silent = fleet.gateways[first].edges.get_mut("silent").unwrap();
        silent.unanswered_since = Some(now);
        fleet.run(5);
        assert_eq!(
            fleet.common_leader().as_deref(),
            Some("silent"),
            "none was heard"
        );
        fleet.gateways[second]
            .edges
            .get_mut("heard")
            .unwrap()
            .is_heard = true;
        fleet.run(1);
        // Its leader is now another one, which answers.
        fleet.gateways[second]
            .edges
            .get_mut("heard")
            .unwrap()
            .is_heard = false;
        fleet.run_with(Duration::from_secs(20), |fleet| {
            assert_eq!(fleet.common_leader().as_deref(), Some("heard"));
        });
    }
}

#[test]
fn a_pool_without_candidates_has_no_leader_after_a_while() {
    let mut fleet = Fleet::connected(2, Duration::from_millis(300));
    fleet.hold(0, "a");
    fleet.run(12);
    fleet.lose(0, "a");
    fleet.run(5);
    assert_eq!((fleet.leader(0), fleet.leader(1)), (None, None));
    // A gateway without peers names the next leader at once.
    let mut alone = Fleet::new(1, Duration::ZERO);
    alone.hold(0, "a");
    alone.hold(0, "b");
    alone.run(12);
    assert_eq!(alone.leader(0).as_deref(), Some("a"));
    alone.lose(0, "a");
    alone.run_with(STEP, |_| {});
    assert_eq!(alone.leader(0).as_deref(), Some("b"));
}

#[test]
fn the_gateway_in_charge_does_not_depend_on_the_order_of_reports() {
    let report = |node: &str| {
        let mut fleet = Fleet::new(1, Duration::ZERO);
        fleet.gateways[0].instance = node.to_owned();
        fleet.hold(0, "a");
        fleet.run(1);
        PeerPool {
            instance: node.to_owned(),
            is_active: true,
            unanswered_for: None,
            report: fleet.gateways[0].report.clone(),
        }
    };
    let mut peers: Vec<_> = (0..20)
        .map(|nth| report(&format!("gateway-{nth}")))
        .collect();
    let in_charge = |peers: &[PeerPool]| {
        let input = NamingInput {
            pool: POOL,
            instance: Some("own"),
            may_name: false,
            has_peers: true,
            candidates: &[],
            peers,
        };
        let in_charge = input.peer_in_charge(Instant::now());
        in_charge.map(|(peer, _)| peer.instance.clone())
    };
    let first = in_charge(&peers).unwrap();
    peers.reverse();
    assert_eq!(in_charge(&peers).as_ref(), Some(&first));
    // A peer that drains or does not answer is not in charge.
    let of_first = |peer: &mut PeerPool| peer.is_active &= peer.instance != first;
    peers.iter_mut().for_each(of_first);
    let second = in_charge(&peers).unwrap();
    assert_ne!(second, first);
    // Its leader was no member of the pool.
    let of_second = peers.iter_mut().find(|peer| peer.instance == second);
    Arc::make_mut(&mut of_second.unwrap().report).leader = None;
    assert_ne!(in_charge(&peers), Some(second));
}
