//! Simulation of several gateways and edges, with faults between them (turmoil): real registries, directories, peer connections and
//! request paths, over a simulated network in virtual time.
//!
//! TLS, enrolment, control streams of tunnels and sockets of clients are left out. The faults depend on a seed alone. Jitter and the
//! order of hash maps do not, so a check never depends on an order: it has margins of virtual time.
//!
//! `CAUSEWAY_TEST_SEEDS=FIRST..END` runs other seeds than the few of each test run.

mod checks;
mod faults;
mod hosts;
mod requests;
mod size;

use checks::{check_requests, check_tables};
use faults::FaultPlan;
use hosts::{EDGES, GATEWAYS, World, run_edge, run_gateway};
use requests::RequestRecord;
use std::{fmt::Write, ops::Range, time::Duration};
use turmoil::{Builder, Sim};

/// Time until all gateways and edges are connected.
const WARM_UP: Duration = Duration::from_secs(10);
/// Time after the last fault within which everything is reached again.
const RECOVERY: Duration = Duration::from_secs(30);
/// Time for which requests are sent after the recovery.
const EPILOGUE: Duration = Duration::from_secs(4);
/// Maximum time of a request: one that waits for the end of a silent tunnel (20 s) at each of two attempts, and for a node that
/// reconnects (5 s).
const REQUEST_LIMIT: Duration = Duration::from_secs(45);
/// Step of the virtual clock.
const TICK: Duration = Duration::from_millis(10);
/// Seeds of an ordinary test run.
const SEEDS: Range<u64> = 4..6;

#[test]
fn gateways_keep_their_promises_under_faults() {
    for seed in seeds() {
        let (plan, faults) = simulate(seed);
        let mut report = String::new();
        for fault in &faults {
            let _ = writeln!(report, "  {fault}");
        }
        assert!(
            faults.is_empty(),
            "seed {seed} fails:\n{report}with the faults {plan}\nrepeat: CAUSEWAY_TEST_SEEDS={seed}..{} cargo test --locked -p causeway-gateway --lib simulation",
            seed + 1
        );
    }
}

fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var("CAUSEWAY_TEST_SEEDS") else {
        return SEEDS;
    };
    let range = text.split_once("..").and_then(|(first, end)| {
        let range = first.parse().ok()?..end.parse().ok()?;
        (!range.is_empty()).then_some(range)
    });
    range.expect("CAUSEWAY_TEST_SEEDS is FIRST..END")
}

/// Runs one simulation. Returns its faults, and what went wrong.
fn simulate(seed: u64) -> (FaultPlan, Vec<String>) {
    let plan = FaultPlan::new(seed, WARM_UP);
    let load_end = plan.end() + RECOVERY + EPILOGUE;
    let world = World::new(WARM_UP..load_end);
    let mut sim = Builder::new()
        .rng_seed(seed)
        .tick_duration(TICK)
        .simulation_duration(Duration::MAX)
        .build();
    for gateway in 0..GATEWAYS {
        let world = world.clone();
        sim.host(hosts::gateway(gateway), move || {
            run_gateway(gateway, world.clone())
        });
    }
    for edge in 0..EDGES {
        let world = world.clone();
        sim.host(hosts::edge(edge), move || run_edge(edge, world.clone()));
    }
    run_until(&mut sim, WARM_UP, |_| {});
    let mut wrong = check_tables(&world, "before the faults");
    run_until(&mut sim, load_end, |sim| plan.apply(sim, &world));
    let limit = load_end + REQUEST_LIMIT;
    while world.log().has_open_requests() && sim.elapsed() < limit {
        let end = sim.elapsed() + Duration::from_secs(1);
        run_until(&mut sim, end, |_| {});
    }
    wrong.extend(check_tables(&world, "after the recovery"));
    let requests = world.requests();
    wrong.extend(check_requests(&requests, &plan));
    println!("seed {seed}: {}; {plan}", summary(&requests));
    (plan, wrong)
}

/// Returns the numbers of requests, which show whether the faults had an effect.
fn summary(requests: &[RequestRecord]) -> String {
    let count = |predicate: fn(&RequestRecord) -> bool| {
        let matching = requests.iter().filter(|record| predicate(record));
        matching.count()
    };
    format!(
        "{} requests, {} answered by edges, {} forwarded, {} of these repeatedly",
        requests.len(),
        count(RequestRecord::is_answered),
        count(|record| !record.forwarded.is_empty()),
        count(|record| record.forwarded.len() > 1),
    )
}

/// Runs the simulation until this virtual time, and calls a function before each step.
fn run_until(sim: &mut Sim<'_>, end: Duration, mut before_step: impl FnMut(&mut Sim<'_>)) {
    while sim.elapsed() < end {
        before_step(sim);
        sim.step().expect("no host ends by itself");
    }
}
