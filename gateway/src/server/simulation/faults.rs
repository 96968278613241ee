//! Faults of a simulation, which a seed determines.

use super::hosts::{EDGES, GATEWAYS, World, edge, gateway, holders};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{fmt, ops::Range, time::Duration};
use turmoil::Sim;

/// Latest begin of a fault after the begin of the requests, in seconds.
const LAST_BEGIN: u64 = 12;
/// Shortest and longest fault, in seconds.
const DURATIONS: Range<u64> = 8..25;
/// Latency of a link after it was slow.
const LATENCY: Duration = Duration::from_millis(10);

/// Host of the simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Host {
    Gateway(usize),
    Edge(usize),
}

impl Host {
    fn name(self) -> String {
        match self {
            Self::Gateway(number) => gateway(number),
            Self::Edge(number) => edge(number),
        }
    }
}

/// Effect of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Messages of both directions are lost.
    Drop,
    /// Messages from the first host to the second one are lost.
    DropOneWay,
    /// Messages of both directions arrive after the fault, as TCP repeats them.
    Hold,
    /// Messages arrive late.
    Delay(Duration),
    /// The host is killed, and starts again after the fault.
    Kill(Host),
}

/// One fault.
#[derive(Clone, Debug)]
pub(super) struct Fault {
    pub(super) effect: Effect,
    /// Pairs of hosts whose messages the fault affects.
    pub(super) links: Vec<(Host, Host)>,
    pub(super) begin: Duration,
    pub(super) end: Duration,
}

/// All faults of a simulation.
#[derive(Clone, Debug)]
pub(super) struct FaultPlan(pub(super) Vec<Fault>);

impl Fault {
    fn new(rng: &mut StdRng, start: Duration) -> Self {
        let number = rng.random_range(0..GATEWAYS);
        let one = Host::Gateway(number);
        let others = (0..GATEWAYS).filter(|other| *other != number);
        let peers = others.map(|other| (one, Host::Gateway(other)));
        let edges = (0..EDGES).filter(|edge| holders(*edge).contains(&number));
        let edges = edges.map(|edge| (one, Host::Edge(edge)));
        let lost = [Effect::Drop, Effect::DropOneWay, Effect::Hold][rng.random_range(0..3)];
        let late = Effect::Delay(Duration::from_secs([2, 10][rng.random_range(0..2)]));
        let (effect, mut links) = match rng.random_range(0..9) {
            0 => (lost, peers.collect()),
            1 => (lost, peers.take(1).collect()),
            2 => (late, peers.collect()),
            3 => (Effect::Kill(one), Vec::new()),
            4 => (
                Effect::Kill(Host::Edge(rng.random_range(0..EDGES))),
                Vec::new(),
            ),
            // The gateway is cut off from the edges, and not from its peers.
            _ => (lost, edges.collect::<Vec<_>>()),
        };
        if rng.random_bool(0.5) {
            for (from, to) in &mut links {
                std::mem::swap(from, to);
            }
        }
        let begin = start + Duration::from_millis(rng.random_range(0..LAST_BEGIN * 1000));
        let duration = Duration::from_secs(rng.random_range(DURATIONS));
        Self {
            effect,
            links,
            begin,
            end: begin + duration,
        }
    }

    /// Whether the fault affects the messages between two hosts.
    pub(super) fn affects_link(&self, between: (Host, Host)) -> bool {
        let (from, to) = between;
        self.links.contains(&(from, to)) || self.links.contains(&(to, from))
    }

    /// Whether the fault affects one of these hosts, or the messages between two of them.
    pub(super) fn affects_any(&self, hosts: &[Host]) -> bool {
        let is_killed = |host| self.effect == Effect::Kill(host);
        let is_between = |(from, to)| hosts.contains(from) && hosts.contains(to);
        hosts.iter().copied().any(is_killed)
            || self.links.iter().any(|link| is_between((&link.0, &link.1)))
    }

    /// Whether both faults change the same link or host.
    fn overlaps(&self, other: &Self) -> bool {
        let is_same_host = matches!(self.effect, Effect::Kill(_)) && self.effect == other.effect;
        is_same_host || self.links.iter().any(|link| other.affects_link(*link))
    }

    fn begin(&self, sim: &mut Sim<'_>, world: &World) {
        for (from, to) in self.links.iter().map(|(from, to)| (from.name(), to.name())) {
            match self.effect {
                Effect::Drop => sim.partition(from, to),
                Effect::DropOneWay => sim.partition_oneway(from, to),
                Effect::Hold => sim.hold(from, to),
                Effect::Delay(latency) => sim.set_link_latency(from, to, latency),
                Effect::Kill(_) => {}
            }
        }
        if let Effect::Kill(host) = self.effect {
            sim.crash(host.name());
            if let Host::Gateway(number) = host {
                world.forget_gateway(number);
            }
        }
    }

    fn end(&self, sim: &mut Sim<'_>) {
        for (from, to) in self.links.iter().map(|(from, to)| (from.name(), to.name())) {
            match self.effect {
                Effect::Drop => sim.repair(from, to),
                Effect::DropOneWay => sim.repair_oneway(from, to),
                Effect::Hold => sim.release(from, to),
                Effect::Delay(_) => sim.set_link_latency(from, to, LATENCY),
                Effect::Kill(_) => {}
            }
        }
        if let Effect::Kill(host) = self.effect {
            sim.bounce(host.name());
        }
    }
}

impl fmt::Display for FaultPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for fault in &self.0 {
            let (begin, end) = (fault.begin.as_secs_f32(), fault.end.as_secs_f32());
            write!(f, "{begin:.1}..{end:.1} s {:?}", fault.effect)?;
            for (from, to) in &fault.links {
                write!(f, " {}/{}", from.name(), to.name())?;
            }
            f.write_str("; ")?;
        }
        Ok(())
    }
}

impl FaultPlan {
    /// Returns two or three faults that begin after `start`.
    pub(super) fn new(seed: u64, start: Duration) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let count = rng.random_range(2..=3);
        let mut faults: Vec<Fault> = Vec::new();
        while faults.len() < count {
            let fault = Fault::new(&mut rng, start);
            if !faults.iter().any(|other| other.overlaps(&fault)) {
                faults.push(fault);
            }
        }
        Self(faults)
    }

    /// Returns the end of the last fault.
    pub(super) fn end(&self) -> Duration {
        let ends = self.0.iter().map(|fault| fault.end);
        ends.max().unwrap_or_default()
    }

    /// Begins and ends the faults that are due before the next step.
    pub(super) fn apply(&self, sim: &mut Sim<'_>, world: &World) {
        let due =
            |at: Duration, sim: &Sim<'_>| at <= sim.elapsed() && sim.elapsed() < at + super::TICK;
        for fault in &self.0 {
            if due(fault.begin, sim) {
                fault.begin(sim, world);
            }
            if due(fault.end, sim) {
                fault.end(sim);
            }
        }
    }
}
