//! Causeway in a real Kubernetes: etcd, kube-apiserver, kubelets with containerd behind NAT, and kubectl.
//!
//! One file for each group of promises; `world` has the parts of the cluster. Everything runs as a process and is tested
//! from the outside. The program starts itself: the outer process checks the requirements and cleans up. An inner process,
//! in namespaces of its own, runs tests one after the other. Tests mostly wait, so the whole suite is five groups that run
//! beside each other.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::disallowed_methods, reason = "threads of tests")]

mod addresses;
mod advertise;
mod api_cache;
mod book;
mod certificates;
mod deploy;
mod egress;
mod fleet;
mod heartbeats;
mod hosted;
mod hosts;
mod listeners;
mod names;
mod nodes;
mod only_tunnel;
mod pod_objects;
mod ports;
mod reviews;
mod rows;
mod scrapes;
mod site_api;
mod smoke;
mod stands;
mod state;
mod steps;
mod webhooks;
mod world;

use std::{env, process::ExitCode};

use libtest_mimic::{Arguments, Trial};
use test_summary::Skipped;
use world::{Way, assets, cage};

fn main() -> ExitCode {
    if let Some(ended) = api_cache::reflector::run() {
        return ended;
    }
    let mut arguments = Arguments::from_args();
    if arguments.list {
        return libtest_mimic::run(&arguments, trials()).exit_code();
    }
    if let Some(folder) = cage::inside() {
        cage::furnish(&folder);
        arguments.test_threads = Some(1);
        let trials = groups().into_iter().nth(cage::group());
        return libtest_mimic::run(&arguments, trials.unwrap_or_default()).exit_code();
    }
    if let Some(missing) = assets::missing() {
        return skipped(&missing);
    }
    match assets::folder() {
        Some(folder) => cage::run(&folder, &wanted(&arguments)),
        None => skipped("the parts of Kubernetes"),
    }
}

fn trials() -> Vec<Trial> {
    groups().into_iter().flatten().collect()
}

/// The numbers of the groups to run: those with tests of the name that the filter asks for. Without a filter the smoke tests,
/// or all others where `CAUSEWAY_TEST_FULL` is set.
fn wanted(arguments: &Arguments) -> Vec<usize> {
    let groups = groups();
    let Some(filter) = arguments.filter.as_deref() else {
        return if full() {
            (SMOKE + 1..groups.len()).collect()
        } else {
            vec![SMOKE]
        };
    };
    let wants = |group: &Vec<Trial>| group.iter().any(|trial| trial.name().contains(filter));
    let numbered = groups.iter().enumerate();
    numbered
        .filter(|(_, group)| wants(group))
        .map(|(number, _)| number)
        .collect()
}

/// The number of the group of smoke tests.
const SMOKE: usize = 0;

/// The smoke tests, and the whole suite in five groups. Each group has a cluster of its own, in which a way is set up once.
fn groups() -> [Vec<Trial>; 6] {
    let first = stands::trials()
        .into_iter()
        .chain(nodes::trials())
        .chain(state::trials())
        .chain(reviews::trials())
        .chain(site_api::trials())
        .chain(hosts::trials())
        .chain(deploy::trials())
        .chain(egress::trials())
        .chain(rows::trials("egress", Way::Unix))
        .chain(listeners::trials())
        .chain(pod_objects::trials())
        .chain([ports::proxied("egress", Way::Unix)])
        .chain(fleet::trials())
        .collect();
    let second = hosted::trials()
        .into_iter()
        .chain(names::trials())
        .chain(rows::trials("names", names::CHECKED))
        .chain(rows::own_trials("names", names::CHECKED))
        .chain([ports::proxied("names", names::CHECKED)])
        .chain(scrapes::trials("names", names::CHECKED))
        .chain([rows::dependency_unavailable("names", names::CHECKED)])
        .chain(addresses::trials())
        .chain(rows::trials("addresses", addresses::CHECKED))
        .chain([ports::proxied("addresses", addresses::CHECKED)])
        .chain(webhooks::trials())
        .chain(scrapes::trials("addresses", addresses::CHECKED))
        .chain(ports::trials())
        .chain(certificates::trials())
        .chain(advertise::trials())
        .chain(book::trials())
        .collect();
    let third = heartbeats::trials();
    [
        smoke::trials(),
        first,
        second,
        third,
        api_cache::trials(),
        only_tunnel::trials(),
    ]
}

/// A trial of this name.
fn trial(name: &str, test: fn()) -> Trial {
    Trial::test(name, move || {
        test();
        Ok(())
    })
}

fn required() -> bool {
    env::var_os("CAUSEWAY_TEST_REQUIRE_ALL").is_some_and(|value| value == "1")
}

/// Reports that a part of the tests cannot run here; fails if it has to run.
fn missing(what: &str) {
    assert!(!required(), "needs {what}");
    eprintln!("kube: skipped: needs {what}");
    let command = ".ci/setup && cargo test --test kube";
    add_skipped(&format!("needs {what}"), command);
}

fn skipped(what: &str) -> ExitCode {
    eprintln!("kube: skipped: needs {what}");
    if required() {
        return ExitCode::FAILURE;
    }
    let command = match what {
        "root" => r#"tests/kube/assets/build && sudo -E env "PATH=$PATH" cargo test --test kube"#,
        "the parts of Kubernetes" => "tests/kube/assets/build && cargo test --test kube",
        _ => ".ci/setup && cargo test --test kube",
    };
    add_skipped(&format!("needs {what}"), command);
    ExitCode::SUCCESS
}

fn add_skipped(reason: &str, command: &str) {
    let added = skips().add("the Kubernetes suite", reason, command);
    added.expect("the target directory can be written to");
}

/// Skipped tests of this run.
fn skips() -> Skipped {
    Skipped::of_this_run(env!("CARGO_TARGET_TMPDIR"))
}

/// Whether long runs, all variants and measurements are wanted (`CAUSEWAY_TEST_FULL=1`).
fn full() -> bool {
    skips().full("the Kubernetes suite")
}
