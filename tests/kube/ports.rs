//! Node ports that a `ConfigMap` lists, with the rights and objects of `examples/egress` and `examples/ports` and no
//! others.
//!
//! A gateway and an edge of the test's own run on this machine, separated by loopback addresses: clients connect to
//! `127.0.0.2`, apps listen on `127.0.0.1`. The edge is started once and never changed.

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    time::Duration,
};

use libtest_mimic::Trial;
use serde_json::json;

use crate::{
    certificates::{clean, kubelet},
    nodes::{TemporaryNode, node, number, started},
    steps::by,
    trial,
    world::{
        Way, World,
        causeway::{BINARY, REFUSING, edge_anew},
        image::BUSYBOX,
        net::CLOUD,
        process::{Process, Program, until, within},
        world,
    },
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial(
            "ports::a_listed_port_is_reachable_without_edge_changes",
            a_listed_port_is_reachable_without_edge_changes,
        ),
        trial(
            "ports::a_cluster_node_serves_listed_ports_without_configuration",
            a_cluster_node_serves_listed_ports_without_configuration,
        ),
        trial(
            "ports::an_unusable_entry_is_reported_on_the_list_and_others_served",
            an_unusable_entry_is_reported_on_the_list_and_others_served,
        ),
        trial(
            "ports::two_lists_for_one_service_leave_each_other_alone",
            two_lists_for_one_service_leave_each_other_alone,
        ),
    ]
}

/// Test of a listed port at a node's own address, to which the API server's proxy connects in this setup.
pub(crate) fn proxied(name: &str, way: Way) -> Trial {
    by(
        format!("{name}::a_port_of_the_nodes_own_address_is_listed_and_proxied_to"),
        way,
        move |world| a_port_of_the_nodes_own_address_is_listed_and_proxied_to(world, way),
    )
}

const TUNNEL: u16 = 11_362;
const ADMIN: u16 = 11_365;
const EDGES_ADMIN: u16 = 11_366;
/// Address that clients connect to.
const CALLED: &str = "127.0.0.2";

/// Owner of the list of ports at the edge.
#[derive(Clone, Copy)]
enum PortOwner {
    /// Its owner, as in the example.
    Owners,
    /// No owner: its node belongs to the cluster.
    Clusters,
}

/// Name of that node.
const NODE: &str = "ports-1";

/// Objects of the example, removed with the test.
struct PortsExample<'a> {
    world: &'a World,
    _gateway: Process,
    _edge: Process,
    _app: Process,
}

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("examples/ports")
        .join(name)
}

/// Returns one of the example's files with these replacements.
fn text(name: &str, places: &[(&str, &str)]) -> String {
    let text = fs::read_to_string(example(name)).unwrap();
    places.iter().fold(text, |text, (from, to)| {
        assert!(text.contains(from), "{name} has {from}");
        text.replace(from, to)
    })
}

impl<'a> PortsExample<'a> {
    fn new(world: &'a World, name: &str) -> Self {
        Self::start(world, name, PortOwner::Owners)
    }

    fn start(world: &'a World, name: &str, whose: PortOwner) -> Self {
        for file in ["rbac.yaml", "ports.yaml"] {
            let apply = world.cluster.kubectl("apply -f").args([example(file)]);
            apply.run().ok();
        }
        list(world, "");
        let folder = world.path(name);
        fs::create_dir_all(&folder).unwrap();
        let kubeconfig = world.cluster.account("egress");
        let own = format!("kubernetes:\n  kubeconfig: {kubeconfig}\n");
        // An edge on another host than the gateway would dial from an address of its node.
        let (tunnel, rules) = match whose {
            PortOwner::Owners => (format!("127.0.0.1:{TUNNEL}"), ""),
            PortOwner::Clusters => (format!("{CLOUD}:{TUNNEL}"), "  certificates: {}\n"),
        };
        let own = own + rules;
        let places = [
            ("kubernetes:\n", own.as_str()),
            ("10.0.0.20:", &format!("{CALLED}:")),
            ("10.0.0.0/24", "127.0.0.0/8"),
        ];
        let gateway = text("gateway.yaml", &places)
            + &format!(
                "data_dir: {}\ntunnel: {{ listen: {tunnel}, advertise: ['{tunnel}'] }}\nadmin: {{ listen: 127.0.0.1:{ADMIN} }}\n",
                folder.join("data").display(),
            );
        let gateway = started(&folder, &gateway);
        let edge = match whose {
            PortOwner::Owners => {
                let token = Program::new(BINARY)
                    .words("token create --node edge-p --data-dir")
                    .args([folder.join("data")]);
                let token = token.run().ok().text();
                format!("{}join: {}\n", text("edge.yaml", &[]), token.trim())
            }
            // Its configuration has no ports.
            PortOwner::Clusters => {
                let own = kubelet(world, NODE);
                format!("kubernetes: {{ kubeconfig: {own} }}\n")
            }
        };
        let edge = edge
            + &format!(
                "data_dir: {}\ngateways: ['{tunnel}']\nadmin: {{ listen: 127.0.0.1:{EDGES_ADMIN} }}\n",
                folder.join("edge").display(),
            );
        let file = folder.join("edge.yaml");
        fs::write(&file, edge).unwrap();
        let edge = Program::new(BINARY).words("edge --config").args([&file]);
        let mut edge = edge.start(&folder.join("edge.log"));
        edge.says("tunnel registered");
        Self {
            world,
            _gateway: gateway,
            _edge: edge,
            _app: served("127.0.0.1", 9051, &folder),
        }
    }

    /// Returns the ports of the Service, by name.
    fn service(&self) -> Vec<String> {
        let service = self
            .world
            .cluster
            .get("-n kube-system service causeway-clients");
        let service = service.unwrap();
        let ports = service["spec"]["ports"].as_array().unwrap().iter();
        ports
            .map(|port| format!("{}={}", port["name"].as_str().unwrap(), port["port"]))
            .collect()
    }

    /// Returns the events on the list.
    fn told(&self) -> String {
        let events = "-n kube-system get events.events.k8s.io -o json \
                      --field-selector regarding.name=causeway-ports,reason=PortsRefused";
        self.world.cluster.kubectl(events).run().text()
    }
}

impl Drop for PortsExample<'_> {
    fn drop(&mut self) {
        for file in ["rbac.yaml", "ports.yaml"] {
            let delete = self.world.cluster.kubectl("delete --ignore-not-found -f");
            delete.args([example(file)]).run();
        }
    }
}

/// Lists these ports as `http-proxy-ports`.
fn list(world: &World, ports: &str) {
    let patch = json!({ "data": { "http-proxy-ports": ports } }).to_string();
    let line = "-n kube-system patch configmap causeway-ports --type merge -p";
    world.cluster.kubectl(line).args([patch]).run().ok();
}

/// Returns the response to a client of this node port: the status, or 0 if nothing listens.
fn status(port: u16) -> String {
    status_of("edge-p", port)
}

fn status_of(node: &str, port: u16) -> String {
    let url = format!("http://{CALLED}:{port}/log");
    Program::new("curl")
        .words("-s -o /dev/null -w %{http_code} -H")
        .args([format!("Host: {node}:{port}"), url])
        .run()
        .text()
}

/// An app that listens only on this address.
fn served(address: &str, port: u16, folder: &Path) -> Process {
    let app = Program::new("python3")
        .words("-u -m http.server --bind")
        .args([address, &port.to_string(), "--directory"])
        .args([folder]);
    let mut app = app.start(&folder.join(format!("app-{port}.log")));
    app.says("Serving HTTP");
    app
}

fn metric(name: &str) -> u64 {
    let url = format!("http://127.0.0.1:{ADMIN}/metrics");
    let all = Program::new("curl").words("-sS").args([url]).run().text();
    number(&all, &format!("causeway_gateway_cluster_{name} "))
}

fn a_listed_port_is_reachable_without_edge_changes() {
    let world = world();
    let site = PortsExample::new(&world, "ports-served");
    assert_eq!(status(9051), "000");
    assert_eq!(status(10266), "000");
    assert_eq!(site.service(), ["kubelets=10250"]);

    list(&world, "9051, 8022");
    until("the port is served", || status(9051) == "200");
    assert_eq!(
        status(8022),
        "403",
        "the edge's owner does not permit listed ports"
    );
    let both = ["causeway-8022=8022", "causeway-9051=9051", "kubelets=10250"];
    until("the Service has the port", || {
        let mut ports = site.service();
        ports.sort();
        ports == both
    });

    let patch = r#"[{"op": "remove", "path": "/spec/ports/1"}]"#;
    let line = "-n kube-system patch service causeway-clients --type json -p";
    world.cluster.kubectl(line).args([patch]).run().ok();
    until("the removed ports exist again", || {
        site.service().len() == 3
    });

    list(&world, "");
    until("no process listens there", || status(9051) == "000");
    until("the Service does not report it either", || {
        site.service() == ["kubelets=10250"]
    });
    assert_eq!(metric("ports_refused"), 0);
}

fn a_cluster_node_serves_listed_ports_without_configuration() {
    let world = world();
    clean(&world);
    world.cluster.apply_example("certificates/rbac.yaml");
    let _node = TemporaryNode(&world, NODE);
    node(&world, NODE, true, &[]);
    let _site = PortsExample::start(&world, "ports-default", PortOwner::Clusters);
    let folder = world.path("ports-default");
    let _own = served(&CLOUD.to_string(), 9061, &folder);
    let status = |port| status_of(NODE, port);
    let is = |what: &str, codes: [&str; 3]| {
        until(what, || [9051, 9061, EDGES_ADMIN].map(status) == codes);
    };

    list(&world, &format!("9051, 9061, {EDGES_ADMIN}"));
    is(
        "the node's apps are served, and not its edge",
        ["200", "200", "403"],
    );
    let file = folder.join("edge.yaml");
    let edge = fs::read_to_string(&file).unwrap();
    let owner = |says: &str| fs::write(&file, format!("{edge}listed_ports: {says}\n")).unwrap();
    owner("[\"9000-9059\", \"11300-11399\"]");
    is("its owner has narrowed it", ["200", "403", "403"]);
    owner(&format!("[\"9061\", \"{EDGES_ADMIN}\"]"));
    is("its owner has said it of each", ["403", "200", "404"]);
    owner("[]");
    is("its owner lets nothing be listed", ["403"; 3]);
    clean(&world);
}

fn an_unusable_entry_is_reported_on_the_list_and_others_served() {
    let world = world();
    let site = PortsExample::new(&world, "ports-refused");
    list(&world, "9051");
    until("the port is served", || status(9051) == "200");

    list(&world, "9051, ninety");
    until("the error is reported", || {
        site.told()
            .contains("http-proxy-ports: \\\"ninety\\\" is not a valid port")
    });
    assert_eq!((status(9051).as_str(), metric("ports_refused")), ("200", 1));

    let taken = TcpListener::bind((CALLED, 9052)).unwrap();
    list(&world, "9051, 9052, 9053");
    until("the conflict of ports is reported", || {
        site.told().contains(&format!("{CALLED}:9052"))
    });
    until("the other client is served", || status(9053) == "502");
    assert_eq!((status(9051).as_str(), metric("ports_refused")), ("200", 1));
    until("the Service has the served ports", || {
        site.service().len() == 3
    });

    // The gateway gets no event when the port is free: it retries.
    drop(taken);
    until("all are served", || status(9052) == "502");
    until("no request is refused", || metric("ports_refused") == 0);
    assert_eq!(status(9051), "200");
}

/// An app on `edge-1` that does not listen on loopback; by names it speaks TLS, and without TLS the API server names no
/// node.
fn a_port_of_the_nodes_own_address_is_listed_and_proxied_to(world: &mut World, way: Way) {
    let (port, listeners, key) = match way {
        Way::Names(_) => (9443, "{ https: apps }", "https-proxy-ports"),
        Way::Addresses(_) => (9100, "{ http: apps }", "http-proxy-ports"),
        _ => (9100, "{}", "http-proxy-ports"),
    };
    for file in ["rbac.yaml", "ports.yaml"] {
        world.cluster.apply_example(&format!("ports/{file}"));
    }
    let put = |world: &World, ports: &str| {
        let patch =
            json!({ "data": { "http-proxy-ports": "", "https-proxy-ports": "", key: ports } });
        let line = "-n kube-system patch configmap causeway-ports --type merge -p";
        let patch = world.cluster.kubectl(line).args([patch.to_string()]);
        patch.run().ok();
    };
    put(world, "");
    let ca = world.cluster.pki.path("ca.pem");
    let ports = format!("\nkubernetes:\n  ports: {listeners}\n");
    // Apps to which a gateway itself speaks TLS.
    let apps = format!("\napps:\n  {REFUSING}: {{ ca: {ca} }}\n");
    world.otherwise(way, |text| {
        let text = text.replace("\nkubernetes:\n", &ports);
        if key == "https-proxy-ports" {
            text.replace("\napps:\n", &apps)
        } else {
            text
        }
    });
    let (world, node) = (&*world, &world.nodes[0]);
    let own = node.site.address();
    let _app = app(world, port);
    let opened = |text: String| {
        let listed = format!("\nlisted_ports: [\"{port}\"]\naddresses: [{own}]\nports:\n");
        let text = text.replace("\nports:\n", &listed);
        text.replace(
            "hosts: [127.0.0.0/8,",
            &format!("hosts: [127.0.0.0/8, {own},"),
        )
    };
    let before = edge_anew(node, opened);
    let scheme = if port == 9443 { "https:" } else { "" };
    let raw = format!("get --raw /api/v1/nodes/{scheme}edge-1:{port}/proxy/metrics");
    let ask = || world.cluster.kubectl(&raw).run();
    assert_ne!(ask().code, Some(0), "it is not listed");
    put(world, &port.to_string());
    until("the port is listed", || ask().text() == "up 1\n");
    put(world, "");
    until("the port is not served", || ask().code != Some(0));
    edge_anew(node, |_| before.clone());
}

/// Starts an upstream that answers `up 1` at this port, only at the own address of `edge-1`.
fn app(world: &World, port: u16) -> Process {
    let node = &world.nodes[0];
    let (own, place) = (node.site.address(), node.path("www"));
    fs::create_dir_all(&place).unwrap();
    fs::write(place.join("metrics"), "up 1\n").unwrap();
    if port != 9443 {
        let httpd = node.at(BUSYBOX).words("httpd -f -p");
        let httpd = httpd.args([format!("{own}:{port}"), "-h".into()]);
        return httpd.args([&place]).start(&node.path("www.log"));
    }
    let pki = &world.cluster.pki;
    pki.server("edge-1-app", &["edge-1"], &[]);
    let serve = "import http.server, ssl, sys, os\n\
         context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)\n\
         context.load_cert_chain(sys.argv[3], sys.argv[4])\n\
         os.chdir(sys.argv[5])\n\
         server = http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), http.server.SimpleHTTPRequestHandler)\n\
         server.socket = context.wrap_socket(server.socket, server_side=True)\n\
         print('serving', flush=True)\n\
         server.serve_forever()\n";
    let python = node.at("python3").args(["-c", serve]);
    let python = python.args([own.to_string(), port.to_string()]);
    let python = python.args([pki.path("edge-1-app.pem"), pki.path("edge-1-app.key")]);
    let mut app = python.args([&place]).start(&node.path("www.log"));
    app.says("serving");
    app
}

/// Two gateways with a list each: neither removes the ports of the other, nor adds them again.
fn two_lists_for_one_service_leave_each_other_alone() {
    let world = world();
    let site = PortsExample::new(&world, "ports-two");
    let role = r#"{"rules": [
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch"]},
        {"apiGroups": [""], "resources": ["services"], "verbs": ["list", "watch", "patch"]}
    ]}"#;
    let line = "-n kube-system patch role causeway-gateway-ports --type merge -p";
    world.cluster.kubectl(line).args([role]).run().ok();
    let line = "-n kube-system create configmap other-ports --from-literal=http-proxy-ports=9061";
    world.cluster.kubectl(line).run().ok();
    let folder = world.path("ports-other");
    fs::create_dir_all(&folder).unwrap();
    let kubeconfig = world.cluster.account("egress");
    let other = json!({
        "data_dir": folder.join("data"),
        "tunnel": { "listen": "127.0.0.1:11372" }, "admin": { "listen": "127.0.0.1:11375" },
        "kubernetes": {
            "kubeconfig": kubeconfig,
            "ports": { "name": "other-ports", "http": "plain", "service": "causeway-clients" },
        },
        "listeners": [{
            "name": "plain", "protocol": "http", "listen": "127.0.0.3:10255", "port": 10255,
            "anonymous": true, "anonymous_ports": [10255],
        }],
    });
    let _other = started(&folder, &other.to_string());
    list(&world, "9051");
    let both = ["causeway-9051=9051", "causeway-9061=9061", "kubelets=10250"];
    let is_both = || {
        let mut ports = site.service();
        ports.sort();
        ports == both
    };
    until("the Service has the ports of both lists", is_both);
    let version = || {
        let service = world.cluster.get("-n kube-system service causeway-clients");
        service.unwrap()["metadata"]["resourceVersion"].clone()
    };
    list(&world, "9051, 9052");
    until("the Service has the change", || site.service().len() == 4);
    // Time is the subject: while the list does not change, the gateway writes nothing.
    let before = version();
    let written = within(Duration::from_secs(4), || version() != before);
    assert!(!written, "{:?}", site.service());
    let line = "-n kube-system delete configmap other-ports";
    world.cluster.kubectl(line).run().ok();
}
