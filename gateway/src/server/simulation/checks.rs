//! Promises of several gateways (DESIGN.md, *Replicas*), checked after a simulation.

use super::{
    RECOVERY, REQUEST_LIMIT,
    faults::{Effect, Fault, FaultPlan, Host},
    hosts::{EDGES, GATEWAYS, SESSION_TIME, World, edge, gateway, holders, node},
    requests::RequestRecord,
};
use crate::{
    proxy::ProxyState,
    state::directory::{HeldState, TunnelId},
    worker::WorkerId,
};
use http::StatusCode;
use std::{collections::BTreeSet, time::Duration};

/// Maximum number of times that one request is forwarded: three attempts, two that were left to another gateway because a tunnel
/// was late (`proxy/peer.rs`), and one because its tunnel did not answer (`proxy/repeat.rs`).
const MAX_FORWARDED: usize = 3 + 2 + 1;
/// Time after which a gateway avoids a silent tunnel or peer for requests that are sent once: each node gets a request in a
/// second, the probe follows after a second without an answer, and the tunnel is late after another one.
const DETECTION: Duration = Duration::from_millis(3_500);
/// Time within which a request has found its path, if all gateways have noticed the faults.
const PROMPT: Duration = Duration::from_secs(1);
/// The same for a request without effects, which is sent again when its tunnel is late.
const REPEATED: Duration = Duration::from_secs(3);
/// Time after which all other gateways know that one was killed.
const KILL_DETECTION: Duration = Duration::from_millis(500);

/// Checks all requests. Returns what went wrong.
pub(super) fn check_requests(requests: &[RequestRecord], plan: &FaultPlan) -> Vec<String> {
    let mut wrong = Vec::new();
    for record in requests {
        let mut fail = |text: &str| wrong.push(format!("{text}: {record:?}"));
        let (entry, edge_number) = (record.entry, record.edge);
        if record.edges.iter().any(|edge| *edge != edge_number) {
            fail("a request at a wrong edge");
        }
        if !record.is_safe && record.edges.len() > 1 {
            fail("an edge received a request twice that must not be repeated");
        }
        if record.forwarded.iter().any(|(from, _)| *from != entry) {
            fail("a request passed between gateways twice");
        }
        if record.forwarded.len() > max_forwarded(record, plan) {
            fail("a request forwarded too often");
        }
        if record.is_lost {
            continue;
        }
        if !record.is_ended {
            fail("a request without an end");
        }
        let Some((time, status, server)) = &record.head else {
            fail("a request without a response");
            continue;
        };
        if *time > record.began + REQUEST_LIMIT {
            fail("a response took too long");
        }
        if *status == StatusCode::OK && *server != edge(edge_number) {
            fail("a response of a wrong edge");
        }
        if *status != StatusCode::OK && must_succeed(record, plan) {
            fail("a request failed that the faults spare");
        }
    }
    wrong
}

/// Faults that may affect a request.
struct RelevantFaults<'a> {
    faults: Vec<&'a Fault>,
    /// Time within which the request has found its path.
    search_end: Duration,
    entry: Host,
    target: Host,
}

impl<'a> RelevantFaults<'a> {
    fn new(record: &RequestRecord, plan: &'a FaultPlan) -> Self {
        let (entry, target) = (Host::Gateway(record.entry), Host::Edge(record.edge));
        let [first, second] = holders(record.edge).map(Host::Gateway);
        // A fault has effects until the recovery is over.
        let until = |end: Duration| -> Vec<&Fault> {
            let is_relevant = |fault: &&Fault| {
                let is_in_time = fault.begin <= end && record.began <= fault.end + RECOVERY;
                is_in_time && fault.affects_any(&[entry, target, first, second])
            };
            plan.0.iter().filter(is_relevant).collect()
        };
        let mut search_end = record.began + PROMPT;
        if record.is_safe && !until(search_end).is_empty() {
            search_end = record.began + REPEATED;
            let is_one_way = |fault: &&Fault| fault.effect == Effect::DropOneWay;
            if until(search_end).iter().any(is_one_way) {
                search_end += SESSION_TIME;
            }
        }
        Self {
            faults: until(search_end),
            search_end,
            entry,
            target,
        }
    }

    fn spare_host(&self, host: Host) -> bool {
        let mut faults = self.faults.iter();
        faults.all(|fault| fault.effect != Effect::Kill(host))
    }

    fn spare_link(&self, from: Host, to: Host) -> bool {
        let mut faults = self.faults.iter();
        faults.all(|fault| !fault.affects_link((from, to)))
    }

    /// Whether they spare both ends of the request.
    fn spare_ends(&self) -> bool {
        self.spare_host(self.entry) && self.spare_host(self.target)
    }

    /// Whether they spare the path through another gateway that holds the node.
    fn spare_path(&self, holder: usize) -> bool {
        let holder = Host::Gateway(holder);
        self.spare_host(holder)
            && self.spare_link(self.entry, holder)
            && self.spare_link(holder, self.target)
    }
}

/// Returns the other gateways that hold the node of a request.
fn other_holders(record: &RequestRecord) -> impl Iterator<Item = usize> + Clone {
    let holders = holders(record.edge).into_iter();
    let entry = record.entry;
    holders.filter(move |holder| *holder != entry)
}

/// Whether a request has to succeed, because the faults have spared a path that it should have taken.
fn must_succeed(record: &RequestRecord, plan: &FaultPlan) -> bool {
    let relevant = RelevantFaults::new(record, plan);
    if !relevant.spare_ends() {
        return false;
    }
    let is_holder = holders(record.edge).contains(&record.entry);
    if is_holder && relevant.spare_link(relevant.entry, relevant.target) {
        // The entry's own tunnel is preferred.
        return true;
    }
    let mut peers = other_holders(record);
    if !is_holder && peers.clone().all(|holder| relevant.spare_path(holder)) {
        return true;
    }
    let mut faults = relevant.faults.iter();
    peers.any(|holder| relevant.spare_path(holder))
        && faults.all(|fault| is_detected(fault, record, relevant.search_end))
}

/// Returns the maximum number of times that a request may be forwarded. If the faults spare one of the gateways that hold the node,
/// at most one entry of the directory is stale, and the request is forwarded at most once more.
fn max_forwarded(record: &RequestRecord, plan: &FaultPlan) -> usize {
    let relevant = RelevantFaults::new(record, plan);
    let is_holder = holders(record.edge).contains(&record.entry);
    if relevant.faults.is_empty() {
        return usize::from(!is_holder);
    }
    // A slow link answers at times, so its gateway may be asked again.
    let is_slow = |fault: &&Fault| matches!(fault.effect, Effect::Delay(_));
    let is_spared = relevant.spare_ends()
        && !relevant.faults.iter().any(is_slow)
        && other_holders(record).any(|holder| relevant.spare_path(holder));
    if is_spared { 2 } else { MAX_FORWARDED }
}

/// Whether all gateways have noticed the present state of a fault before the request began, or the request is sent again, and the
/// fault does not change until `search_end`.
fn is_detected(fault: &Fault, record: &RequestRecord, search_end: Duration) -> bool {
    // A tunnel that has lost bytes of one direction is not late while long responses arrive in the other one.
    let one_way = DETECTION + SESSION_TIME;
    let (begin, end) = match fault.effect {
        // A slow link answers at times.
        Effect::Delay(_) => return false,
        _ if record.is_safe => (Duration::ZERO, Duration::ZERO),
        Effect::Drop => (DETECTION, one_way),
        Effect::DropOneWay => (one_way, one_way),
        Effect::Hold => (DETECTION, DETECTION),
        Effect::Kill(_) => (KILL_DETECTION, KILL_DETECTION),
    };
    let changes = [(fault.begin, begin), (fault.end, end)].into_iter();
    let mut changes = changes.filter(|(change, _)| *change <= search_end);
    changes.all(|(change, detection)| record.began >= change + detection)
}

/// Checks that the registries and directories of all gateways are true, and that no stream is open. Returns what went wrong.
pub(super) fn check_tables(world: &World, time: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let held_at = |gateway: usize| -> BTreeSet<String> {
        let held = (0..EDGES).filter(|edge| holders(*edge).contains(&gateway));
        held.map(edge).collect()
    };
    for number in 0..GATEWAYS {
        let mut fail = |text: String| wrong.push(format!("{} {time}: {text}", gateway(number)));
        let Some(state) = world.gateway(number) else {
            fail("does not run".to_owned());
            continue;
        };
        let held = state.registry.held_nodes().into_iter();
        let held: BTreeSet<_> = held
            .filter(|(_, state)| *state == HeldState::Connected)
            .map(|(node, _)| node.to_string())
            .collect();
        if held != held_at(number) {
            fail(format!("holds {held:?}"));
        }
        let stated = state.registry.directory().peers();
        let stated: Vec<BTreeSet<_>> = stated
            .iter()
            .map(|peer| peer.node_names().iter().map(ToString::to_string).collect())
            .collect();
        let mut expected: Vec<_> = (0..GATEWAYS)
            .filter(|other| *other != number)
            .map(held_at)
            .collect();
        let mut sorted = stated.clone();
        sorted.sort();
        expected.sort();
        if sorted != expected {
            fail(format!("the directory is {stated:?}"));
        }
        let open = open_streams(&state);
        if open > 0 {
            fail(format!("{open} streams are open"));
        }
    }
    wrong
}

/// Returns the number of open streams of all tunnels and links.
fn open_streams(state: &ProxyState) -> usize {
    let own = (0..EDGES).flat_map(|edge| state.registry.node_tunnels(&node(edge)).0);
    let own = own.map(|tunnel| (tunnel.id, tunnel.tunnel.tunnel));
    let links = (0..EDGES).filter_map(|edge| {
        let selected = state
            .registry
            .directory()
            .select(&node(edge), WorkerId(0))?;
        Some((selected.link.id, selected.link.tunnel.clone()))
    });
    let mut counted: BTreeSet<TunnelId> = BTreeSet::new();
    let all = own.chain(links).filter(|(id, _)| counted.insert(*id));
    all.map(|(_, tunnel)| tunnel.load().open_streams()).sum()
}
