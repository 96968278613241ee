//! The hosts file of all nodes in a `ConfigMap`, with the rights of `examples/egress` and `examples/hosts` and no others.
//!
//! Gateways without edges, with only the cluster, at ports of their own. kubectl and a real `CoreDNS`, configured as in
//! `examples/hosts`, read the files that the gateways write.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use libtest_mimic::Trial;
use serde_json::{Value, json};

use crate::{
    full,
    nodes::{TemporaryNode, delete, node, number, watching},
    trial,
    world::{
        World,
        causeway::BINARY,
        net::{CLOUD, MACHINE},
        process::{Process, Program, must, until, within},
        world,
    },
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial(
            "hosts::the_hosts_file_follows_nodes_and_coredns_answers_from_it",
            the_hosts_file_follows_nodes_and_coredns_answers_from_it,
        ),
        trial(
            "hosts::foreign_changes_are_corrected_and_reported",
            foreign_changes_are_corrected_and_reported,
        ),
        trial(
            "hosts::one_of_two_gateways_writes_and_the_other_takes_over",
            one_of_two_gateways_writes_and_the_other_takes_over,
        ),
        trial(
            "hosts::a_lost_lease_is_reacquired_and_ends_no_gateway",
            a_lost_lease_is_reacquired_and_ends_no_gateway,
        ),
        trial(
            "hosts::an_api_outage_ends_no_gateway_and_is_caught_up",
            an_api_outage_ends_no_gateway_and_is_caught_up,
        ),
        trial(
            "hosts::a_foreign_configmap_stays_unchanged_until_handed_over",
            a_foreign_configmap_stays_unchanged_until_handed_over,
        ),
        trial(
            "hosts::openyurt_users_find_its_names_and_format",
            openyurt_users_find_its_names_and_format,
        ),
        trial(
            "hosts::more_names_than_fit_into_one_object_are_in_several",
            more_names_than_fit_into_one_object_are_in_several,
        ),
        trial(
            "hosts::rights_that_are_missing_are_named",
            rights_that_are_missing_are_named,
        ),
    ]
}

const NAME: &str = "causeway-nodes";
const OPENYURT: &str = "yurt-tunnel-nodes";
/// Shorter than by default, for tests that wait for its end.
const LEASE: Duration = Duration::from_secs(6);
/// The gateway gathers changes for a second; the rest allows for other work of this machine.
const SOON: Duration = Duration::from_secs(8);

/// The nodes that always exist, as lines of the file.
fn always() -> String {
    format!("{MACHINE} cloud-1\n{CLOUD} edge-1\n{CLOUD} edge-2\n")
}

/// The rights of the examples, and the objects written with them, which are removed with the test.
struct Rights<'a> {
    world: &'a World,
    text: String,
    name: &'static str,
}

impl<'a> Rights<'a> {
    /// For objects of this name.
    fn of(world: &'a World, name: &'static str) -> Self {
        Self::apply(world, name, |text| text)
    }

    /// As in the example, with these changes.
    fn apply(world: &'a World, name: &'static str, change: fn(String) -> String) -> Self {
        let text = fs::read_to_string(example("rbac.yaml")).unwrap();
        let text = change(text.replace(NAME, name));
        let apply = world.cluster.kubectl("apply -f -").input(text.clone());
        apply.run().ok();
        Self { world, text, name }
    }
}

impl Drop for Rights<'_> {
    fn drop(&mut self) {
        let delete = "delete --ignore-not-found -f -";
        let delete = self.world.cluster.kubectl(delete).input(self.text.clone());
        delete.run();
        let name = self.name;
        let line = format!(
            "-n kube-system delete --ignore-not-found configmap/{name} configmap/{name}-1 configmap/{name}-2 lease/{name}"
        );
        self.world.cluster.kubectl(&line).run();
    }
}

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("examples/hosts")
        .join(name)
}

/// A gateway that writes the file, if it has the right.
struct Gateway {
    process: Process,
    admin: u16,
}

impl Gateway {
    /// The gateway with this number, with these keys of `kubernetes.hosts` besides its address.
    fn start(world: &World, number: u16, keys: &Value) -> Self {
        let (tunnel, admin) = (11_300 + number, 11_400 + number);
        let folder = world.path(format!("hosts-{number}"));
        fs::create_dir_all(&folder).unwrap();
        let mut hosts = json!({ "addresses": [CLOUD], "lease_duration": format!("{LEASE:?}") });
        let more = keys.as_object().unwrap().clone();
        hosts.as_object_mut().unwrap().extend(more);
        let rules = json!({ "kubeconfig": world.cluster.account("egress"), "hosts": hosts });
        let process = watching(&folder, (tunnel, admin), &rules);
        Self { process, admin }
    }

    fn ask(&self, path: &str) -> String {
        let url = format!("http://127.0.0.1:{}{path}", self.admin);
        Program::new("curl").words("-sS").args([url]).run().text()
    }

    fn metric(&self, name: &str) -> u64 {
        let all = self.ask("/metrics");
        number(&all, &format!("causeway_gateway_cluster_hosts_{name} "))
    }

    fn leads(&self) -> bool {
        self.metric("leading") == 1
    }

    fn writes(&self) -> u64 {
        self.metric("writes_total{outcome=\"ok\"}")
    }
}

/// Returns the content of the file, if it exists.
fn file(world: &World, name: &str, key: &str) -> Option<String> {
    let map = world
        .cluster
        .get(&format!("configmap -n kube-system {name}"))?;
    map["data"][key].as_str().map(str::to_owned)
}

fn hosts(world: &World) -> String {
    file(world, NAME, "hosts").unwrap_or_default()
}

fn lease(world: &World) -> Value {
    let lease = format!("lease -n kube-system {NAME}");
    let lease = world.cluster.get(&lease).unwrap_or_default();
    lease["spec"].clone()
}

/// Changes an object of the namespace as a user of kubectl does.
fn patch(world: &World, what: &str, change: &Value) {
    let line = format!("-n kube-system patch {what} --type=merge -p");
    let patch = world.cluster.kubectl(&line).args([change.to_string()]);
    patch.run().ok();
}

fn soon(what: &str, holds: impl FnMut() -> bool) {
    assert!(within(SOON, holds), "not soon: {what}");
}

/// `CoreDNS` as in the example, with these files: a server block with the next file answers for names that are not in one.
fn coredns(world: &World, files: &[PathBuf]) -> Process {
    let folder = std::env::var_os("KUBEBUILDER_ASSETS").unwrap();
    let example = fs::read_to_string(example("Corefile")).unwrap();
    let block = |(number, file): (usize, &PathBuf)| {
        example
            .replace(
                ".:53 {",
                &format!(".:{} {{\n    bind 127.0.0.1", 5353 + number),
            )
            .replace("/etc/causeway/hosts", &file.display().to_string())
            .replace("/etc/resolv.conf", &format!("127.0.0.1:{}", 5354 + number))
    };
    let text: String = files.iter().enumerate().map(block).collect();
    let corefile = world.path("Corefile");
    fs::write(&corefile, text).unwrap();
    Program::new(Path::new(&folder).join("coredns"))
        .args(["-conf".as_ref(), corefile.as_os_str()])
        .start(&world.path("coredns.log"))
}

fn dig(name: &str) -> String {
    let dig = Program::new("dig").words("@127.0.0.1 -p 5353 +short +time=1 +tries=1");
    dig.args([name]).run().text().trim_end().to_owned()
}

fn the_hosts_file_follows_nodes_and_coredns_answers_from_it() {
    let world = world();
    let _rights = Rights::of(&world, NAME);
    let text = fs::read_to_string(example("gateway.yaml")).unwrap();
    let ca = world.cluster.pki.path("ca.pem");
    let copy = world.path("hosts-example.yaml");
    let kubeconfig = world.cluster.pki.path("admin.kubeconfig");
    let text = text.replace("/etc/causeway/gateway.kubeconfig", &kubeconfig);
    fs::write(&copy, text.replace("/etc/kubernetes/pki/ca.crt", &ca)).unwrap();
    let checked = Program::new(BINARY).words("gateway --check-config --config");
    checked.args([copy]).run().ok();
    let gateway = Gateway::start(&world, 1, &json!({}));
    soon("the file is there", || hosts(&world) == always());
    assert!(gateway.leads());
    let mounted = world.path("hosts-mounted");
    fs::write(&mounted, hosts(&world)).unwrap();
    let _coredns = coredns(&world, std::slice::from_ref(&mounted));
    until("an edge's name is the gateway's", || {
        dig("edge-1") == CLOUD.to_string()
    });
    assert_eq!(dig("cloud-1"), MACHINE.to_string());
    assert_eq!(dig("new-1"), "");

    let new = TemporaryNode(&world, "new-1");
    node(&world, "new-1", true, &["10.1.9.1", "fd01::9"]);
    let with = |addresses: &[&str]| {
        let lines = addresses.iter().map(|address| format!("{address} new-1\n"));
        format!("{}{}", always(), lines.collect::<String>())
    };
    let edge = with(&[&CLOUD.to_string()]);
    soon("the new node is in it", || hosts(&world) == edge);
    fs::write(&mounted, hosts(&world)).unwrap();
    until("CoreDNS has read it", || dig("new-1") == CLOUD.to_string());
    let label = "label node new-1 causeway.io/edge-";
    world.cluster.kubectl(label).run().ok();
    let own = with(&["10.1.9.1", "fd01::9"]);
    soon("by its own addresses", || hosts(&world) == own);

    // Heartbeats, renewals of the lease and labels change no line.
    let writes = gateway.writes();
    let label = "label node new-1 else=nothing";
    world.cluster.kubectl(label).run().ok();
    for _ in 0..3 {
        let renewed = lease(&world)["renewTime"].clone();
        until("the lease is renewed", || {
            lease(&world)["renewTime"] != renewed
        });
    }
    assert_eq!(gateway.writes(), writes);
    let _second = TemporaryNode(&world, "new-2");
    node(&world, "new-2", false, &["10.1.9.2"]);
    delete(&world, "new-1");
    drop(new);
    let both = format!("{}10.1.9.2 new-2\n", always());
    soon("one was added, the other removed", || hosts(&world) == both);
    let more = gateway.writes() - writes;
    assert!((1..=3).contains(&more), "{more} writes for two nodes");
}

fn foreign_changes_are_corrected_and_reported() {
    let world = world();
    let _rights = Rights::of(&world, NAME);
    let mut gateway = Gateway::start(&world, 1, &json!({}));
    soon("the file is there", || hosts(&world) == always());
    let what = format!("configmap {NAME}");
    let evil = json!({ "data": { "hosts": "10.9.9.9 edge-1\n", "more": "x" } });
    patch(&world, &what, &evil);
    soon("the object is corrected", || hosts(&world) == always());
    assert_eq!(file(&world, NAME, "more"), None);
    gateway
        .process
        .says("was changed by another process and has been restored");
    gateway.process.says("kubectl-patch");
    // Harmless data of other writers stays.
    let mark = json!({ "metadata": { "annotations": { "team": "network" } } });
    patch(&world, &what, &mark);
    let writes = gateway.writes();
    let line = format!("-n kube-system delete configmap {NAME}");
    world.cluster.kubectl(&line).run().ok();
    soon("it exists again", || hosts(&world) == always());
    gateway
        .process
        .says("was deleted by another process and has been restored");
    assert_eq!(gateway.writes(), writes + 1, "an annotation is no reason");
}

fn one_of_two_gateways_writes_and_the_other_takes_over() {
    let world = world();
    let _rights = Rights::of(&world, NAME);
    let first = Gateway::start(&world, 1, &json!({}));
    until("the first writes", || first.leads());
    let second = Gateway::start(&world, 2, &json!({}));
    let renewed = lease(&world)["renewTime"].clone();
    until("it renews", || lease(&world)["renewTime"] != renewed);
    assert_eq!((second.leads(), second.writes()), (false, 0));
    assert!(first.leads());
    let before = lease(&world);
    // A power cut.
    let killed = Instant::now();
    drop(first);
    until("the second writes", || second.leads());
    let took = killed.elapsed();
    assert!(!full() || took < LEASE + Duration::from_secs(3), "{took:?}");
    let after = lease(&world);
    assert_ne!(before["holderIdentity"], after["holderIdentity"]);
    assert_eq!(after["leaseTransitions"], 1);
    let new = TemporaryNode(&world, "new-1");
    node(&world, "new-1", true, &["10.1.9.1"]);
    soon("the names follow the nodes", || {
        hosts(&world).contains("new-1")
    });
    drop(new);
    soon("the names follow again", || hosts(&world) == always());

    // The lease of a gateway that ended in order is free at once.
    let third = Gateway::start(&world, 1, &json!({}));
    let stopped = Instant::now();
    must(&format!("kill -TERM {}", second.process.id()));
    until("the third writes", || third.leads());
    let ended = stopped.elapsed();
    assert!(
        !full() || ended + Duration::from_millis(1500) < LEASE,
        "{ended:?}"
    );
    let holder = lease(&world)["holderIdentity"].clone();
    assert_ne!(holder, after["holderIdentity"]);
    println!("taken over after {took:?}, and in order after {ended:?}");
}

fn a_lost_lease_is_reacquired_and_ends_no_gateway() {
    let world = world();
    let _rights = Rights::of(&world, NAME);
    let mut gateway = Gateway::start(&world, 1, &json!({}));
    until("it writes", || gateway.leads());
    let line = format!("-n kube-system delete lease {NAME}");
    world.cluster.kubectl(&line).run().ok();
    soon("it has the lease again", || {
        lease(&world)["holderIdentity"].is_string() && gateway.leads()
    });
    let what = format!("lease {NAME}");
    let taken = json!({ "spec": { "holderIdentity": "somebody" } });
    patch(&world, &what, &taken);
    gateway.process.says("somebody holds it now");
    until("it is a candidate", || !gateway.leads());
    let new = TemporaryNode(&world, "new-1");
    node(&world, "new-1", true, &["10.1.9.1"]);
    // Renewed by hand, with a clock that is wrong by a day.
    let taken = json!({ "spec": { "renewTime": "2020-01-01T00:00:00.000000Z" } });
    patch(&world, &what, &taken);
    assert_eq!(
        hosts(&world),
        always(),
        "the gateway does not write objects of others"
    );
    until("it writes once more", || gateway.leads());
    soon("the changes in the meantime have arrived", || {
        hosts(&world).contains("new-1")
    });
    drop(new);
    soon("and goes", || hosts(&world) == always());
    assert_eq!(gateway.ask("/readyz"), "ready\n");
}

fn an_api_outage_ends_no_gateway_and_is_caught_up() {
    let mut world = world();
    // The names stay while the API is unavailable.
    std::mem::forget(Rights::of(&world, NAME));
    let mut gateway = Gateway::start(&world, 1, &json!({}));
    soon("the file is there", || hosts(&world) == always());
    world.cluster.stop();
    gateway.process.says("this gateway is on standby");
    assert!(
        !gateway.leads(),
        "another gateway may have the lease by now"
    );
    assert_eq!(gateway.ask("/readyz"), "ready\n");
    world.cluster.restart();
    let _rights = Rights::of(&world, NAME);
    let _new = TemporaryNode(&world, "new-1");
    node(&world, "new-1", true, &["10.1.9.1"]);
    until("it writes again", || {
        gateway.leads() && hosts(&world).contains("new-1")
    });
}

fn a_foreign_configmap_stays_unchanged_until_handed_over() {
    let world = world();
    let _rights = Rights::of(&world, NAME);
    world.cluster.apply(&json!({
        "apiVersion": "v1", "kind": "ConfigMap", "data": { "hosts": "10.9.9.9 mine\n" },
        "metadata": { "name": NAME, "namespace": "kube-system" },
    }));
    let mut gateway = Gateway::start(&world, 1, &json!({}));
    gateway.process.says(&format!(
        "the ConfigMap kube-system/{NAME} does not belong to this gateway but to kubectl-client-side-apply"
    ));
    assert_eq!(hosts(&world), "10.9.9.9 mine\n");
    assert_eq!(gateway.writes(), 0);
    assert_eq!(gateway.ask("/readyz"), "ready\n");
    assert!(gateway.metric("writes_total{outcome=\"failed\"}") > 0);
    // Runs the command from the log.
    let message = gateway.process.output();
    let (_, rest) = message
        .split_once("transfer it to Causeway (kubectl ")
        .unwrap();
    let (line, _) = rest.split_once(')').unwrap();
    world.cluster.kubectl(line).run().ok();
    soon("the lease is taken over", || hosts(&world) == always());
}

fn openyurt_users_find_its_names_and_format() {
    let world = world();
    let _rights = Rights::of(&world, OPENYURT);
    let _gateway = Gateway::start(&world, 1, &json!({ "format": "openyurt" }));
    let mut lines = [
        format!("{MACHINE}\tcloud-1"),
        format!("{CLOUD}\tedge-1"),
        format!("{CLOUD}\tedge-2"),
    ];
    lines.sort();
    soon("the file is there", || {
        file(&world, OPENYURT, "tunnel-nodes") == Some(lines.join("\n"))
    });
}

fn more_names_than_fit_into_one_object_are_in_several() {
    let world = world();
    let _rights = Rights::of(&world, NAME);
    // Some 170 kB for each edge: five of them fit into one object, and six do not.
    let label = "z".repeat(60);
    let zone = |number| format!("{number}.{label}.{label}.{label}");
    let zones: Vec<String> = (0..10).map(zone).collect();
    let further = (1..90).map(|last| format!("192.0.2.{last}"));
    let addresses: Vec<String> = [CLOUD.to_string()].into_iter().chain(further).collect();
    let passing = ["many-1", "many-2", "many-3", "many-4"].map(|name| TemporaryNode(&world, name));
    for name in &passing {
        node(&world, name.1, true, &[]);
    }
    let keys = json!({ "zones": zones, "addresses": addresses });
    let gateway = Gateway::start(&world, 1, &keys);
    let both = || [NAME, &format!("{NAME}-1")].map(|name| file(&world, name, "hosts"));
    until("there are two", || both().iter().all(Option::is_some));
    let files: Vec<PathBuf> = both()
        .into_iter()
        .zip(["first.hosts", "second.hosts"])
        .map(|(text, name)| {
            let file = world.path(name);
            fs::write(&file, text.unwrap()).unwrap();
            file
        })
        .collect();
    let _coredns = coredns(&world, &files);
    let edges = ["edge-1", "edge-2", "many-1", "many-2", "many-3", "many-4"];
    for name in edges {
        until("its name is in one of them", || {
            dig(name).lines().count() == addresses.len()
        });
    }
    assert_eq!(dig("cloud-1"), MACHINE.to_string());

    let (before, writes) = (both(), gateway.writes());
    let addressless = "label node many-1 causeway.io/edge-";
    world.cluster.kubectl(addressless).run().ok();
    soon("one has changed", || both() != before);
    let changed = both()
        .iter()
        .zip(&before)
        .filter(|(new, old)| new != old)
        .count();
    assert_eq!((changed, gateway.writes() - writes), (1, 1));
    drop(passing);
    until("one is enough", || {
        let [first, second] = both();
        second.is_none() && first.is_some_and(|text| text.lines().count() == 2 * 90 + 1)
    });
}

fn rights_that_are_missing_are_named() {
    let world = world();
    let mut gateway = Gateway::start(&world, 1, &json!({}));
    gateway.process.says(
        "cannot get resource \\\"leases\\\" in API group \\\"coordination.k8s.io\\\" in the namespace \\\"kube-system\\\"",
    );
    assert!(!gateway.leads());
    let few = |text: String| {
        let verbs = "[get, list, watch, update, delete]";
        assert!(text.contains(verbs));
        text.replace(verbs, "[get]")
    };
    let few = Rights::apply(&world, NAME, few);
    until("it may create", || hosts(&world) == always());
    let cannot = |verb| format!("cannot {verb} resource \\\"configmaps\\\" in API group");
    gateway.process.says(&cannot("list"));
    let new = TemporaryNode(&world, "new-1");
    node(&world, "new-1", true, &["10.1.9.1"]);
    gateway.process.says(&cannot("update"));
    let _all = Rights::of(&world, NAME);
    until("it may update", || hosts(&world).contains("new-1"));
    drop((new, few));
}
