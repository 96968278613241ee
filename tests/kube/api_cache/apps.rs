//! `CoreDNS` and kube-proxy on nodes, as in the example: both start while the cloud is unavailable.

use std::{
    fs,
    time::{Duration, Instant},
};

use serde_json::json;

use super::{
    examples::example,
    scene::{Edge, Scene},
};
use crate::world::process::{PATIENCE, Process, within};

/// Time until names on a node have changes that were made while the node was cut off.
const NAMES: Duration = Duration::from_secs(2);
/// Time until the rules have the change, which kube-proxy delays a while.
const RULES: Duration = Duration::from_secs(5);

/// The Service's own address.
const ADDRESS: &str = "10.96.77.1";

/// A Service with an address of its own, and a Service without, both with this endpoint.
fn leads_to(scene: &Scene, endpoint: &str) {
    let cluster = &scene.cluster;
    for (name, address) in [("routed", ADDRESS), ("named", "None")] {
        cluster.apply(&json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": { "name": name, "namespace": "a" },
            "spec": { "clusterIP": address, "ports": [{ "port": 80, "targetPort": 8080 }] },
        }));
        cluster.apply(&json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {
                "name": format!("{name}-1"), "namespace": "a",
                "labels": { "kubernetes.io/service-name": name },
            },
            "ports": [{ "name": "", "port": 8080, "protocol": "TCP" }],
            "endpoints": [{ "addresses": [endpoint], "conditions": { "ready": true } }],
        }));
    }
}

fn coredns(edge: &Edge) -> Process {
    let file = edge.folder.join("Corefile");
    fs::write(&file, example("Corefile", &[])).unwrap();
    let coredns = edge.part("coredns").args(["-conf".into(), file]);
    let mut coredns = coredns.start(&edge.folder.join("coredns.log"));
    coredns.says("CoreDNS-");
    coredns
}

fn kube_proxy(edge: &Edge) -> Process {
    let kubeconfig = edge.folder.join("api-cache.kubeconfig");
    fs::write(&kubeconfig, example("api-cache.kubeconfig", &[])).unwrap();
    let file = edge.folder.join("kube-proxy.yaml");
    let here = kubeconfig.display().to_string();
    let text = example(
        "kube-proxy.yaml",
        &[("/etc/causeway/api-cache.kubeconfig", here)],
    );
    fs::write(&file, text).unwrap();
    let proxy = edge.part("kube-proxy").args(["--config".into(), file]);
    let proxy = proxy.args(["--hostname-override", &edge.name]);
    proxy.start(&edge.folder.join("kube-proxy.log"))
}

/// Returns the addresses that a name resolves to on the node.
fn meaning(edge: &Edge, name: &str) -> String {
    let dig = edge.site.at("dig");
    let dig = dig.words("+short +time=1 +tries=1 @127.0.0.1");
    let name = format!("{name}.a.svc.cluster.local");
    dig.args([name]).run().text().trim().to_owned()
}

/// Returns the rules of the node's kernel.
fn rules(edge: &Edge) -> String {
    edge.site.at("nft").words("list ruleset").run().ok().text()
}

pub(super) fn coredns_and_kube_proxy_start_offline_and_catch_up(scene: &mut Scene) {
    let (before, behind) = ("10.244.9.1", "10.244.9.2");
    leads_to(scene, before);
    scene.agree();
    scene.cut_all();
    leads_to(scene, behind);
    let mut names: Vec<Process> = scene.edges.iter().map(coredns).collect();
    let proxies: Vec<Process> = scene.edges.iter().map(kube_proxy).collect();
    for ((edge, names), proxy) in scene.edges.iter().zip(&mut names).zip(&proxies) {
        let answers = || meaning(edge, "routed") == ADDRESS && meaning(edge, "named") == before;
        assert!(within(PATIENCE, answers), "{}", names.output());
        let led = || {
            let rules = rules(edge);
            rules.contains(ADDRESS) && rules.contains(before)
        };
        assert!(within(PATIENCE, led), "{}\n{}", rules(edge), proxy.output());
    }
    for edge in &scene.edges {
        edge.site.mend();
    }
    let back = Instant::now();
    for edge in &scene.edges {
        let answers = || meaning(edge, "named") == behind;
        if !within(PATIENCE, answers) {
            scene.fail("names do not follow");
        }
        let after = back.elapsed();
        println!(
            "{}: names follow {after:?} after the cloud is back",
            edge.name
        );
        assert!(after < NAMES, "{after:?}");
    }
    for (edge, proxy) in scene.edges.iter().zip(&proxies) {
        let led = || {
            let rules = rules(edge);
            rules.contains(behind) && !rules.contains(before)
        };
        assert!(within(PATIENCE, led), "{}\n{}", rules(edge), proxy.output());
        let after = back.elapsed();
        println!(
            "{}: rules follow {after:?} after the cloud is back",
            edge.name
        );
        assert!(after < RULES, "{after:?}");
    }
    drop((names, proxies));
    let delete = "delete svc,endpointslice -n a routed named routed-1 named-1 --ignore-not-found";
    scene.cluster.kubectl(delete).run().ok();
    scene.agree();
}
