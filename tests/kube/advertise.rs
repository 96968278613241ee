//! Addresses at which edges reach a gateway, taken from a Service, with the rights of `examples/egress` and
//! `examples/advertise` and no others.
//!
//! The test does the work of a load balancer's controller by hand: it patches the Service's status. The gateway and its
//! edge are on this machine, and the edge has no other source for the address of the gateway.

use std::{fmt::Write, fs, path::Path};

use libtest_mimic::Trial;
use serde_json::{Value, json};

use crate::{
    nodes::started,
    trial,
    world::{
        World,
        causeway::BINARY,
        net::MACHINE,
        process::{Process, Program, until},
        world,
    },
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial(
        "advertise::edges_and_certificates_follow_service_address_and_replicas",
        edges_and_certificates_follow_service_address_and_replicas,
    )]
}

const TUNNEL: u16 = 11_562;
const ADMIN: u16 = 11_565;
const SERVICE: &str = "-n kube-system service causeway-tunnels";
const RIGHTS: &str = "advertise/rbac.yaml";
/// `EndpointSlice` behind the Service.
const SLICE: &str = "-n kube-system endpointslice causeway-tunnels-1";

/// The example's gateway.
fn gateway(world: &World, folder: &Path) -> Process {
    fs::create_dir_all(folder).unwrap();
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let text = fs::read_to_string(examples.join("advertise/gateway.yaml")).unwrap();
    let theirs = "/etc/causeway/gateway.kubeconfig";
    assert!(text.contains(theirs), "{text}");
    let ours = json!({
        "data_dir": folder.join("data"),
        "tunnel": { "listen": format!("127.0.0.1:{TUNNEL}") },
        "admin": { "listen": format!("127.0.0.1:{ADMIN}") },
        "listeners": [],
    });
    let mut config = text.replace(theirs, &world.cluster.account("egress"));
    for (key, value) in ours.as_object().unwrap() {
        writeln!(config, "{key}: {value}").unwrap();
    }
    started(folder, &config)
}

/// The example's rights except the right to count.
fn rights_but_to_count(world: &World) {
    let rights = format!("{}/examples/{RIGHTS}", env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(rights).unwrap();
    let lines = text.lines().filter(|line| !line.contains("endpointslices"));
    let without = lines.collect::<Vec<_>>().join("\n");
    assert_ne!(without.lines().count(), text.lines().count(), "{text}");
    let apply = world.cluster.kubectl("apply -f -");
    apply.input(without).run().ok();
}

/// Sets this number of ready gateways behind the Service, and one that terminates.
fn behind(world: &World, ready: u8) {
    let endpoint = |number: u8, goes: bool| {
        json!({
            "addresses": [format!("10.98.0.{number}")],
            "conditions": { "ready": true, "terminating": goes },
        })
    };
    let there = (1..=ready).map(|number| endpoint(number, false));
    let all: Vec<_> = there.chain([endpoint(100, true)]).collect();
    world.cluster.apply(&json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": "causeway-tunnels-1", "namespace": "kube-system",
            "labels": {
                "kubernetes.io/service-name": "causeway-tunnels",
                "endpointslice.kubernetes.io/managed-by": "tests",
            },
        },
        "addressType": "IPv4", "endpoints": all, "ports": [{ "name": "tunnels", "port": TUNNEL }],
    }));
}

/// An edge that knows one address, and has a tunnel to each gateway.
fn edge(folder: &Path) -> Process {
    let token = Program::new(BINARY).words("token create --node edge-9 --data-dir");
    let token = token.args([folder.join("data")]).run().ok().text();
    let edge = Program::new(BINARY)
        .words("edge --node edge-9 --admin-listen 127.0.0.1:0 --join")
        .args([token.trim(), "--tunnels-gateways", "every"])
        .args(["--gateway", &format!("127.0.0.1:{TUNNEL}")])
        .args(["--data-dir".into(), folder.join("edge")]);
    edge.start(&folder.join("edge.log"))
}

/// Returns the response to the readiness check that a load balancer makes before it sends clients.
fn readiness() -> String {
    let url = format!("http://127.0.0.1:{ADMIN}/readyz");
    Program::new("curl").words("-sS").args([url]).run().text()
}

/// Returns the names and addresses for which the gateway has a certificate.
fn named() -> String {
    let at = format!("127.0.0.1:{TUNNEL}");
    let show = Program::new("openssl").words("s_client -alpn rh2 -connect");
    let shown = show.args([at]).run();
    let read = Program::new("openssl").words("x509 -noout -ext subjectAltName");
    read.input(shown.stdout).run().text()
}

fn patch(world: &World, more: &str, change: &Value) {
    let patch = format!("patch {SERVICE} {more} --type=merge -p");
    let patch = world.cluster.kubectl(&patch);
    patch.args([change.to_string()]).run().ok();
}

/// Waits until the edge has exactly these addresses, and the gateway's certificate has their hosts.
fn told(edge: &mut Process, addresses: &[&str], shown: &str) {
    edge.says(&format!("gateways={addresses:?}"));
    until(shown, || named().contains(shown));
}

fn edges_and_certificates_follow_service_address_and_replicas() {
    let world = world();
    let clean = || {
        let rights = format!("{}/examples/{RIGHTS}", env!("CARGO_MANIFEST_DIR"));
        let delete = world.cluster.kubectl("delete --ignore-not-found -f");
        delete.args([rights]).run().ok();
        for object in [SERVICE, SLICE] {
            let delete = format!("delete {object} --ignore-not-found");
            world.cluster.kubectl(&delete).run().ok();
        }
    };
    clean();
    let folder = world.path("advertise");
    let mut gateway = gateway(&world, &folder);
    gateway.says("cannot list resource \\\"services\\\"");
    assert!(readiness().contains("causeway-tunnels has not been loaded yet"));
    gateway.says("cannot list resource \\\"endpointslices\\\"");
    rights_but_to_count(&world);
    until("it is missing", || readiness().contains("it is not there"));
    world.cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "name": "causeway-tunnels", "namespace": "kube-system" },
        "spec": { "type": "LoadBalancer", "ports": [{ "name": "tunnels", "port": TUNNEL, "nodePort": 31562 }] },
    }));
    until("the gateway waits for an address", || {
        readiness().contains("no address yet")
    });
    let ingress = json!([{ "ip": "127.0.0.1" }, { "hostname": "lb.example" }]);
    let status = json!({ "status": { "loadBalancer": { "ingress": ingress } } });
    patch(&world, "--subresource=status", &status);
    until("it is ready", || readiness() == "ready\n");

    let mut edge = edge(&folder);
    edge.says("tunnel registered");
    assert!(named().contains("DNS:lb.example"), "{}", named());
    // So far the gateway could only not send the number of gateways.
    behind(&world, 2);
    world.cluster.apply_example(RIGHTS);
    edge.says("reached=1 of=2");
    behind(&world, 3);
    edge.says("reached=1 of=3");
    let annotated = |text: Option<&str>| json!({ "metadata": { "annotations": { "causeway.io/advertise": text } } });
    patch(
        &world,
        "",
        &annotated(Some("gw.example:10262, 127.0.0.1:11562")),
    );
    let both = ["gw.example:10262", "127.0.0.1:11562"];
    told(&mut edge, &both, "DNS:gw.example");
    assert!(!named().contains("lb.example"), "{}", named());
    // A change without new addresses has no effect.
    patch(&world, "", &annotated(Some("nonsense")));
    gateway.says("is not HOST:PORT");
    assert!(named().contains("DNS:gw.example"), "{}", named());
    patch(&world, "", &annotated(None));
    patch(&world, "", &json!({ "spec": { "type": "NodePort" } }));
    let node = format!("{MACHINE}:31562");
    told(&mut edge, &[&node], &format!("IP Address:{MACHINE}"));
    clean();
    gateway.says("it is not there");
    assert_eq!(readiness(), "ready\n");
    assert!(named().contains(&MACHINE.to_string()), "{}", named());
    let registered = edge.output().matches("tunnel registered").count();
    assert_eq!(registered, 1, "{}", edge.output());
}
