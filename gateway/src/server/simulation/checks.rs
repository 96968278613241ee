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

/// Maximum number of times that one request is forwarded: three attempts, and two that were left to another gateway because a
/// tunnel was late (`proxy/peer.rs`).
const MAX_FORWARDED: usize = 3 + 2;
/// Time after which a gateway avoids a silent tunnel or peer: the probe after 5 s, and a second without an answer.
const DETECTION: Duration = Duration::from_millis(6_500);
/// Time within which a request has found its path, if all gateways have noticed the faults.
const PROMPT: Duration = Duration::from_secs(1);
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
        if record.forwarded.len() > MAX_FORWARDED {
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

/// Whether a request has to succeed, because the faults have spared a path that it should have taken.
fn must_succeed(record: &RequestRecord, plan: &FaultPlan) -> bool {
    let (entry, target) = (Host::Gateway(record.entry), Host::Edge(record.edge));
    let holders = holders(record.edge);
    let hosts = [
        entry,
        target,
        Host::Gateway(holders[0]),
        Host::Gateway(holders[1]),
    ];
    // A fault has effects until the recovery is over.
    let is_relevant = |fault: &&Fault| {
        let is_in_time =
            fault.begin <= record.began + PROMPT && record.began <= fault.end + RECOVERY;
        is_in_time && fault.affects_any(&hosts)
    };
    let relevant: Vec<&Fault> = plan.0.iter().filter(is_relevant).collect();
    let is_sound_host = |host| {
        relevant
            .iter()
            .all(|fault| fault.effect != Effect::Kill(host))
    };
    let is_sound_link = |from, to| relevant.iter().all(|fault| !fault.affects_link((from, to)));
    if !is_sound_host(entry) || !is_sound_host(target) {
        return false;
    }
    if holders.contains(&record.entry) && is_sound_link(entry, target) {
        // The entry's own tunnel is preferred.
        return true;
    }
    let peers = holders.into_iter().filter(|holder| *holder != record.entry);
    let mut paths = peers.map(|holder| {
        let holder = Host::Gateway(holder);
        is_sound_host(holder) && is_sound_link(entry, holder) && is_sound_link(holder, target)
    });
    if !holders.contains(&record.entry) && paths.clone().all(|is_sound| is_sound) {
        return true;
    }
    paths.any(|is_sound| is_sound) && relevant.iter().all(|fault| is_detected(fault, record))
}

/// Whether all gateways have noticed the present state of a fault before the request began, and it does not change at once.
fn is_detected(fault: &Fault, record: &RequestRecord) -> bool {
    // A tunnel that has lost bytes of one direction is not late while long responses arrive in the other one.
    let one_way = DETECTION + SESSION_TIME;
    let (begin, end) = match fault.effect {
        Effect::Drop => (DETECTION, one_way),
        Effect::DropOneWay => (one_way, one_way),
        Effect::Hold => (DETECTION, DETECTION),
        // A request without effects is sent again.
        Effect::Kill(_) if record.is_safe => (Duration::ZERO, Duration::ZERO),
        Effect::Kill(_) => (KILL_DETECTION, KILL_DETECTION),
        // A slow link answers at times.
        Effect::Delay(_) => return false,
    };
    let changes = [(fault.begin, begin), (fault.end, end)].into_iter();
    let mut changes = changes.filter(|(change, _)| *change <= record.began + PROMPT);
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
