//! The gateway of `overlays/ports` and an edge as pods: tests which clients reach which node port at which of their
//! addresses.
//!
//! The list is edited as its user would do, and nothing else is changed. The tests have no network that enforces
//! `NetworkPolicies`: they only show which clients the gateway itself refuses.

use std::fs;

use libtest_mimic::Trial;
use serde_json::{Value, json};

use super::{
    pods::CreatedObjects,
    replicas::{GATEWAYS, edge, names},
};
use crate::{
    trial,
    world::{
        World, image,
        process::{Process, Program, until},
        world,
    },
};

pub(super) fn trials() -> [Trial; 1] {
    [trial(
        "deploy::pods_reach_a_listed_port_only_at_the_gateways_own_address",
        pods_reach_a_listed_port_only_at_the_gateways_own_address,
    )]
}

/// Arguments of `rm` for the folder with the identity of the edge's pod; with another CA the identity belongs to another edge.
pub(super) const KEPT: &str = "-rf /var/lib/causeway-edge";

/// The gateway's pod, as seen from its node.
struct Gateway<'a> {
    world: &'a World,
    /// Its address, and the file of its network.
    at: String,
    network: String,
}

impl<'a> Gateway<'a> {
    fn new(world: &'a World, at: String) -> Self {
        let find = "for network in /run/netns/*; do \
             nsenter --net=$network ip -o addr | grep -qF \" $0/\" && echo $network; done";
        let found = world.nodes[0].at("sh").args(["-c", find, &at]).run().text();
        Self {
            world,
            at,
            network: found.trim().to_owned(),
        }
    }

    /// A program, in its pod's network.
    fn inside(&self, program: &str) -> Program {
        let network = format!("--net={}", self.network);
        self.world.nodes[0].at("nsenter").args([&network, program])
    }

    /// Returns the addresses at which the pod listens for this port.
    fn listens(&self, port: u16) -> Vec<String> {
        let all = self.inside("ss").words("-Hltn").run().ok().text();
        let own = all
            .lines()
            .filter_map(|line| line.split_whitespace().nth(3));
        let (own, end) = (own.map(str::to_owned), format!(":{port}"));
        own.filter(|own| own.ends_with(&end)).collect()
    }

    /// Returns the response of a port of `edge-1` to a client on its node, from this source address if any: the status and
    /// the body.
    fn ask(&self, port: u16, from: Option<String>, method: &str) -> (String, String) {
        let name = format!("edge-1:{port}");
        let mut curl = self.world.nodes[0]
            .at("curl")
            .words("-sS --max-time 20 -w \\n%{http_code} -X")
            .args([method, "--resolve", &format!("{name}:{}", self.at)]);
        if let Some(from) = from {
            curl = curl.args(["--interface", &from]);
        }
        let message = curl.args([format!("http://{name}/metrics")]).run().text();
        let (body, code) = message.rsplit_once('\n').unwrap_or_default();
        (code.to_owned(), body.to_owned())
    }
}

/// An app that listens only on this address of the node.
fn app(world: &World, address: &str, port: u16) -> Process {
    let (node, www) = (&world.nodes[0], world.path("deploy-ports"));
    fs::create_dir_all(&www).unwrap();
    fs::write(www.join("metrics"), "up 1\n").unwrap();
    let app = node.at(image::BUSYBOX).words("httpd -f -p");
    let app = app.args([format!("{address}:{port}"), "-h".into()]);
    app.args([www])
        .start(&world.path(format!("deploy-ports-{port}.log")))
}

fn list(world: &World, ports: &str) {
    let patch = json!({ "data": { "http-proxy-ports": ports } }).to_string();
    let line = "-n causeway patch configmap causeway-ports --type merge -p";
    world.cluster.kubectl(line).args([patch]).run().ok();
}

/// The ports of the Service to which clients connect.
fn service(world: &World) -> Vec<Value> {
    let service = world.cluster.get("-n causeway service causeway-clients");
    let service = service.unwrap();
    let ports = service["spec"]["ports"].as_array().unwrap().iter();
    let mut ports: Vec<Value> = ports.map(|port| port["name"].clone()).collect();
    ports.sort_by_key(Value::to_string);
    ports
}

fn pods_reach_a_listed_port_only_at_the_gateways_own_address() {
    let world = world();
    let node = &world.nodes[0];
    node.at("rm").words(KEPT).run().ok();
    let made = CreatedObjects::new(&world, "ports", GATEWAYS);
    let own = node.site.address().to_string();
    let _names = names(&world);
    let _apps = [("127.0.0.1", 9051), (own.as_str(), 9052)].map(|(at, port)| app(&world, at, port));
    made.begin("DaemonSet", "causeway-edge", "edge", edge);
    let gateway = Gateway::new(&world, made.gateway());
    made.ready("causeway-edge", "edge");
    let listened = |port| gateway.listens(port);
    let at = |port: u16| vec![format!("{}:{port}", gateway.at)];
    assert_eq!((listened(10255), listened(9051)), (at(10255), vec![]));

    list(&world, "9051, 9052, 10276");
    for port in [9051, 9052] {
        until(
            "its app is reached, wherever it listens on the node",
            || gateway.ask(port, None, "GET") == ("200".into(), "up 1\n".into()),
        );
        assert_eq!(listened(port), at(port));
    }
    let (code, body) = gateway.ask(10276, None, "GET");
    assert_eq!(code, "403", "{body}");
    assert!(body.contains("edge-1 does not serve port 10276"), "{body}");
    let url = "http://127.0.0.1:9051/metrics";
    let loopback = gateway
        .inside("curl")
        .words("-sS --max-time 20")
        .args([url]);
    assert_ne!(loopback.run().code, Some(0), "it is served on loopback");
    until("the Service has the ports", || {
        let names = ["10276", "9051", "9052"].map(|port| format!("causeway-{port}"));
        let names = names
            .iter()
            .map(String::as_str)
            .chain(["dns", "dns-tcp", "plain"]);
        service(&world) == names.map(Value::from).collect::<Vec<_>>()
    });
    let dig = node.at("dig").words("+short -p 10253");
    let dig = dig.args([
        format!("@{}", gateway.at),
        "edge-1.nodes.example.internal".into(),
    ]);
    assert_eq!(dig.run().ok().text(), "10.96.0.21\n");

    // From a node, which is no pod; the test adds the route back to it.
    let back = gateway.inside("ip").args(["route", "add", &own, "via"]);
    let bridge = "ip -4 -o addr show cni0 | sed 's|.* inet \\([0-9.]*\\)/.*|\\1|'";
    let bridge = node.at("sh").args(["-c", bridge]).run().ok().text();
    back.args([bridge.trim()]).run().ok();
    let (code, body) = gateway.ask(9051, Some(own.clone()), "GET");
    assert_eq!(code, "401", "{body}");
    assert!(
        body.contains("this listener does not serve clients from this address"),
        "{body}"
    );
    let (code, body) = gateway.ask(9051, None, "POST");
    assert_eq!(code, "403", "{body}");

    list(&world, "");
    until("no process listens there", || listened(9051).is_empty());
    drop(made);
    node.at("rm").words(KEPT).run().ok();
}
