//! A cluster, a gateway beside its API server, and two nodes whose routers pass connections to the tunnel port alone.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddrV4},
    path::PathBuf,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use serde_json::{Value, json};

use crate::{
    book,
    heartbeats::{api::Api, recorder::Recorder},
    world::{
        assets, cage,
        causeway::BINARY,
        cluster::{Cluster, Flags},
        image,
        net::{self, CLOUD},
        node::{Node, Serving},
        process::{PATIENCE, Process, Program, until},
    },
};

/// The page with the files.
const PAGE: &str = "docs/howto/edge-to-cloud.md";
/// The tunnel port of the gateway.
pub(super) const TUNNEL: SocketAddrV4 = SocketAddrV4::new(CLOUD, 10262);
/// The API server.
pub(super) const API: SocketAddrV4 = SocketAddrV4::new(CLOUD, 6443);
/// The API server as programs on a node reach it.
pub(super) const KUBELET_API: &str = "https://127.0.0.1:6443";
/// The address of the Service of the first node.
pub(super) const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 80);
/// Address of the second node at which its pods reach that Service.
pub(super) const BRIDGE: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 244, 2, 1), 8180);
/// Name by which the pods of the second node call that Service.
pub(super) const SERVICE_NAME: &str = "web.a.svc";

/// The whole setup.
pub(super) struct Scene {
    pub(super) folder: PathBuf,
    pub(super) cluster: Cluster,
    pub(super) nodes: [Node; 2],
    api: Api,
    gateway: Option<Process>,
    /// Number of starts of the gateway.
    started: usize,
    edges: Vec<Process>,
    _lifecycle: Process,
}

/// Returns the scene, which the first call makes.
pub(super) fn scene() -> MutexGuard<'static, Scene> {
    static SCENE: OnceLock<Mutex<Scene>> = OnceLock::new();
    let scene = SCENE.get_or_init(|| Mutex::new(Scene::start()));
    // A failed test has left it usable.
    scene.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a server answers at this URL on the node.
pub(super) fn reaches(node: &Node, url: &str) -> bool {
    let curl = node.at("curl").words("-q -sS --insecure --max-time 5");
    curl.args([url]).run().code == Some(0)
}

impl Scene {
    fn start() -> Self {
        let folder = cage::inside().expect("the tests run inside");
        let assets = assets::folder().expect("the outer program has checked");
        net::cloud();
        image::pack(&folder);
        let cluster = Cluster::start(&folder, &assets);
        let nodes = [1, 2].map(|number| Node::without_kubelet(&folder, &cluster, number));
        for node in &nodes {
            let url = format!("https://{API}/readyz");
            assert!(reaches(node, &url), "{} has a route at first", node.name);
            node.site.permits_only(TUNNEL);
            assert!(!reaches(node, &url), "{} has no route now", node.name);
        }
        let mut scene = Self {
            api: Api::new(&cluster),
            _lifecycle: cluster.node_lifecycle(&folder),
            folder,
            cluster,
            nodes,
            gateway: None,
            started: 0,
            edges: Vec::new(),
        };
        scene.write_gateway();
        scene.causeway("ca init").run().ok();
        scene.gateway_starts();
        scene.egress_selector();
        for number in 0..2 {
            let edge = scene.edge(number);
            scene.edges.push(edge);
            let name = scene.nodes[number].name.clone();
            let kubeconfig = scene.kubeconfig(&name);
            let started_from = scene.cluster.pki.path(&format!("{name}.kubeconfig"));
            assert_eq!(kubeconfig, started_from);
            scene.kubelet_starts(number);
        }
        for node in &scene.nodes {
            let name = &node.name;
            until("the kubelet has registered its Node", || {
                scene.cluster.get(&format!("node {name}")).is_some()
            });
            let cluster = &scene.cluster;
            cluster.wait("default", &format!("node/{name}"), "Ready");
        }
        scene
    }

    /// Starts what a failed test has ended.
    pub(super) fn whole(&mut self) {
        if self.gateway.is_none() {
            self.gateway_starts();
        }
    }

    /// Returns the file of the page that has this text, for this cloud and this holder of a certificate.
    fn file(&self, part: &str, holder: &str) -> String {
        let pki = |name: &str| self.cluster.pki.path(name);
        let mut text = book::file(PAGE, part);
        let current = "/var/lib/kubelet/pki/kubelet-client-current.pem";
        for (printed, here) in [
            ("gw.example.com", CLOUD.to_string()),
            ("10.0.0.1", CLOUD.to_string()),
            (
                "/run/causeway/kube-apiserver.sock",
                self.socket().display().to_string(),
            ),
            ("/etc/kubernetes/pki/ca.crt", pki("ca.pem")),
            (
                &format!("client-certificate: {current}"),
                format!("client-certificate: {}", pki(&format!("{holder}.pem"))),
            ),
            (
                &format!("client-key: {current}"),
                format!("client-key: {}", pki(&format!("{holder}.key"))),
            ),
        ] {
            text = text.replace(printed, &here);
        }
        text
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("kube-apiserver.sock")
    }

    /// Writes the kubeconfig of the page for the holder of a certificate. Returns its path.
    pub(super) fn kubeconfig(&self, holder: &str) -> String {
        let path = self.cluster.pki.path(&format!("{holder}.kubeconfig"));
        fs::write(&path, self.file("tls-server-name", holder)).unwrap();
        path
    }

    /// A command beside the gateway.
    fn causeway(&self, line: &str) -> Program {
        let causeway = Program::new(BINARY).words(line);
        causeway.env("CAUSEWAY_DATA_DIR", self.folder.join("gateway"))
    }

    fn write_gateway(&self) {
        let other = book::file(PAGE, "name: line-control").replace("mill-", "edge-");
        let (_, rule) = other.split_once("  rules:\n").unwrap();
        let (text, listeners) = {
            let text = self.file("# /etc/causeway/gateway.yaml", "");
            let (before, listeners) = text.split_once("listeners:\n").unwrap();
            (before.to_owned(), listeners.to_owned())
        };
        let text = format!("{text}{rule}listeners:\n{listeners}");
        fs::write(self.folder.join("gateway.yaml"), text).unwrap();
    }

    /// Lets the API server reach kubelets through the gateway.
    fn egress_selector(&mut self) {
        let config = self.causeway("k8s egress-config --socket");
        let config = config.args([self.socket()]).run().ok().stdout;
        let file = self.folder.join("egress.yaml");
        fs::write(&file, config).unwrap();
        self.cluster.with(Flags {
            egress: Some(file),
            authority: Some(self.cluster.pki.path("ca.pem").into()),
            addresses: "Hostname",
            ..Flags::default()
        });
    }

    fn edge(&self, number: usize) -> Process {
        let node = &self.nodes[number];
        let create = format!("token create --node {}", node.name);
        let token = self.causeway(&create).run().ok().text();
        let (port, listener) = (
            format!("ports:\n  8080: {{ scheme: tcp, target: \"{SERVICE}:80\" }}\n"),
            format!("  listeners:\n    - {{ listen: {BRIDGE}, to: edge-1:8080 }}\n"),
        );
        let mut text = self.file("# /etc/causeway/edge.yaml", "");
        text = match number {
            0 => text.replace("ports:\n", &port) + "allow: { hosts: [127.0.0.0/8, 10.96.0.80] }\n",
            _ => text.replace("  listeners:\n", &listener),
        };
        let own = format!(
            "node: {}\ndata_dir: {}\n",
            node.name,
            node.path("edge").display()
        );
        let file = node.path("edge.yaml");
        fs::write(&file, text + &own).unwrap();
        let edge = node.at(BINARY).words("edge --config").args([file]);
        let edge = edge.env("CAUSEWAY_JOIN", token.trim());
        let mut edge = edge.start(&node.path("edge.log"));
        edge.says("tunnel registered");
        edge
    }

    /// Starts the kubelet of a node, in place of a running one.
    pub(super) fn kubelet_starts(&mut self, number: usize) {
        self.nodes[number].serves(&self.cluster, Serving::Signed);
    }

    fn starts(&mut self, flags: &str) -> Process {
        self.started += 1;
        let log = format!("gateway-{}.log", self.started);
        let gateway = self.causeway("gateway --config");
        let gateway = gateway.args([self.folder.join("gateway.yaml")]);
        let mut gateway = gateway.words(flags).start(&self.folder.join(log));
        gateway.says("gateway ready");
        gateway
    }

    pub(super) fn gateway_starts(&mut self) {
        self.gateway = Some(self.starts(""));
    }

    /// Requests the end of the gateway, and waits for it.
    pub(super) fn gateway_stops(&mut self) {
        let mut gateway = self.gateway.take().expect("it runs");
        gateway.is_to_end();
        assert_eq!(gateway.ended().0, Some(0), "{}", gateway.output());
    }

    /// Ends the gateway at once.
    pub(super) fn gateway_dies(&mut self) {
        self.gateway = None;
    }

    /// Starts another gateway that takes over, and waits for the end of the running one.
    pub(super) fn gateway_is_replaced(&mut self) {
        let next = self.starts("--take-over");
        let mut before = self.gateway.replace(next).expect("it runs");
        assert_eq!(before.ended().0, Some(0), "{}", before.output());
    }

    /// Starts the recorder for this row of the table.
    pub(super) fn recorder(&self, row: &'static str) -> Recorder {
        Recorder::start(row, &self.api, &["edge-1"])
    }

    /// Creates this many Services without addresses.
    pub(super) fn services(&self, name: &str, count: usize) {
        let service = |number| {
            json!({
                "apiVersion": "v1", "kind": "Service",
                "metadata": { "name": format!("{name}-{number}"), "namespace": "a" },
                "spec": { "clusterIP": "None", "ports": [{ "port": 80 }] },
            })
        };
        let items: Vec<Value> = (0..count).map(service).collect();
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
        let create = self.cluster.kubectl("create --validate=false -f -");
        let create = create.input(list.to_string());
        create.within(5 * PATIENCE).run().ok();
    }

    /// Returns the number of connections to gateways that the edges have lost.
    pub(super) fn lost_connections(&self) -> usize {
        let lost = |edge: &Process| {
            let output = edge.output();
            output
                .matches("the connection to the gateway ended")
                .count()
        };
        self.edges.iter().map(lost).sum()
    }

    /// Returns the output of the gateway and the edges.
    pub(super) fn output(&self) -> String {
        let all = self.gateway.iter().chain(&self.edges);
        all.map(Process::output).collect::<Vec<_>>().join("\n---\n")
    }
}
