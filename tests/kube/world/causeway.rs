//! Causeway in the cluster: a gateway in the cloud, and an edge on each node, as processes of the built binary.
//!
//! Edges join with tokens, through the NAT, and serve the kubelet's port as bytes: TLS of kube-apiserver, or of the
//! gateway, goes through to the kubelet. Data and configuration are files in the tests' folder.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::json;

use super::{
    Checks, Way,
    cluster::Cluster,
    net::CLOUD,
    node::Node,
    process::{Process, Program},
};

/// A node port that edges allow, at which nothing listens.
pub(crate) const CLOSED: u16 = 9998;

/// Another, for requests, which anybody may make.
pub(crate) const REFUSING: u16 = 9996;

/// Where the nodes have names.
const ZONE: &str = "nodes.example.internal";

/// The binary that is tested.
pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_causeway");

/// A gateway with an edge for each node.
pub(crate) struct Road {
    folder: PathBuf,
    _gateway: Process,
    _names: Process,
    edges: Vec<Option<Process>>,
}

impl Road {
    /// Starts the gateway, and lets an edge of each node join.
    pub(crate) fn start(folder: &Path, cluster: &Cluster, nodes: &[Node]) -> Self {
        let folder = folder.join("causeway");
        fs::create_dir_all(&folder).unwrap();
        causeway(&folder).words("ca init").run().ok();
        asks_kubelets(cluster);
        fs::write(folder.join("policy.yaml"), policy()).unwrap();
        let config = folder.join("gateway.yaml");
        fs::write(&config, gateway(&folder, cluster)).unwrap();
        let mut gateway = causeway(&folder)
            .args(["gateway".as_ref(), "--config".as_ref(), config.as_os_str()])
            .start(&folder.join("gateway.log"));
        gateway.says("gateway ready");
        let mut road = Self {
            _names: names(&folder, &cluster.assets),
            folder,
            _gateway: gateway,
            edges: nodes.iter().map(|_| None).collect(),
        };
        for number in 0..nodes.len() {
            let node = &nodes[number];
            let token = causeway(&road.folder)
                .words("token create --node")
                .args([&node.name])
                .run()
                .ok()
                .text();
            road.join(nodes, number, Some(token.trim()));
        }
        road
    }

    /// Starts the edge of a node, and waits for its tunnel.
    pub(crate) fn join(&mut self, nodes: &[Node], number: usize, token: Option<&str>) {
        let node = &nodes[number];
        let config = node.path("edge.yaml");
        let text = json!({
            "node": node.name, "gateways": [format!("{CLOUD}:10262")],
            "data_dir": node.path("edge"),
            "ports": {
                "10250": { "scheme": "tcp" }, "8080": { "scheme": "tcp" },
                CLOSED.to_string(): { "scheme": "tcp" }, REFUSING.to_string(): {},
            },
            "allow": { "hosts": ["127.0.0.0/8", "10.244.0.0/16"] },
        });
        fs::write(&config, text.to_string()).unwrap();
        let mut edge =
            node.at(BINARY)
                .args(["edge".as_ref(), "--config".as_ref(), config.as_os_str()]);
        if let Some(token) = token {
            edge = edge.env("CAUSEWAY_JOIN", token);
        }
        let mut edge = edge.start(&node.path("edge.log"));
        edge.says("tunnel registered");
        self.edges[number] = Some(edge);
    }

    /// Ends the edge of a node at once, as a power cut does.
    pub(crate) fn kill(&mut self, number: usize) {
        drop(self.edges[number].take());
    }

    /// The CAs by which kube-apiserver checks who says to be a kubelet: the cluster's, and this gateway's.
    pub(crate) fn authority(&self, checks: Checks, cluster: &Cluster) -> Option<PathBuf> {
        let file = self.folder.join("kubelets-ca.pem");
        let pem = |path: &Path| fs::read_to_string(path).unwrap();
        let ours = pem(&self.folder.join("gateway/ca.pem"));
        let theirs = pem(cluster.pki.path("ca.pem").as_ref());
        fs::write(&file, format!("{theirs}\n{ours}")).unwrap();
        (checks == Checks::On).then_some(file)
    }

    /// The `resolv.conf` of who finds nodes by their names.
    pub(crate) fn resolver(&self) -> PathBuf {
        self.folder.join("resolv.conf")
    }

    /// The configuration by which kube-apiserver comes this way, as the binary prints it.
    pub(crate) fn egress(&self, way: Way) -> PathBuf {
        let front = |name: &str| self.folder.join(name).display().to_string();
        let pki = |name: &str| self.folder.with_file_name("pki").join(name);
        let words = Program::new(BINARY).words("k8s egress-config");
        let (name, words) = match way {
            Way::Names(_) | Way::Addresses(_) => unreachable!("they have no egress selector"),
            Way::Unix => ("unix", words.args(["--socket", &front("connect.sock")])),
            Way::Address => ("address", words.args(["--socket", &front("address.sock")])),
            Way::Tcp => {
                let url = format!("https://{CLOUD}:10264");
                let words = words.args(["--url", &url, "--server-name", "gateway"]);
                let words = words.args(["--ca", &front("gateway/ca.pem")]);
                let files = ["--certificate".into(), pki("egress.pem")];
                let words = words.args(files);
                ("tcp", words.args(["--key".into(), pki("egress.key")]))
            }
        };
        let file = self.folder.join(format!("egress-{name}.yaml"));
        fs::write(&file, words.run().ok().stdout).unwrap();
        file
    }
}

fn causeway(folder: &Path) -> Program {
    Program::new(BINARY).env("CAUSEWAY_DATA_DIR", folder.join("gateway"))
}

/// A certificate by which the gateway asks kubelets itself, with the rights that kube-apiserver has there and no more.
fn asks_kubelets(cluster: &Cluster) {
    let (file, user) = ("gateway-kubelet", "causeway-gateway");
    cluster.pki.client(file, user, None);
    let bind = "create clusterrolebinding gateway-kubelet --clusterrole=system:kubelet-api-admin";
    let bind = cluster.kubectl(bind).args([format!("--user={user}")]);
    bind.run().ok();
}

/// A front takes certificates of the cluster's CA, and each kubelet has one: who may come in is said by name.
fn policy() -> String {
    json!({ "rules": [
        {
            "name": "kube-apiserver", "then": "allow",
            "who": { "users": ["kube-apiserver-kubelet-client", "kube-apiserver", "uid:0"] },
        },
        {
            "name": "anybody", "then": "allow",
            "who": { "users": ["system:anonymous"] }, "what": { "ports": [REFUSING] },
        },
    ] })
    .to_string()
}

fn gateway(folder: &Path, cluster: &Cluster) -> String {
    let socket = |name| format!("unix:{}", folder.join(name).display());
    let pki = |name| cluster.pki.path(name);
    let callers = json!({ "own_ca": false, "client_ca": [pki("ca.pem")] });
    json!({
        "kubernetes": {
            "kubeconfig": cluster.account(), "pod_networks": ["10.244.0.0/16"],
            "address_networks": ["10.1.0.0/16", "10.97.0.0/24"],
        },
        "tunnel": { "advertise": [format!("{CLOUD}:10262")] },
        "policy": folder.join("policy.yaml"),
        "apps": { "10250": {
            "ca": pki("ca.pem"),
            "certificate": pki("gateway-kubelet.pem"), "key": pki("gateway-kubelet.key"),
        } },
        "dns": { "listen": format!("{CLOUD}:10253"), "zones": [ZONE], "addresses": [CLOUD] },
        "redirect": { "fronts": ["addresses", "addresses-apps"] },
        "fronts": [
            {
                "name": "egress-unix", "kind": "connect", "errors": "kubernetes",
                "listen": socket("connect.sock"),
            },
            {
                "name": "egress-address", "kind": "connect", "errors": "kubernetes",
                "listen": socket("address.sock"),
                "direct": ["10.97.0.0/24", "10.244.0.0/16"],
            },
            {
                "name": "egress-tcp", "kind": "connect", "errors": "kubernetes",
                "listen": format!("{CLOUD}:10264"), "names": ["gateway"], "callers": callers,
            },
            {
                "name": "names", "kind": "https", "errors": "kubernetes", "port": 10250,
                "listen": format!("{CLOUD}:10250"), "callers": callers,
            },
            {
                "name": "names-apps", "kind": "https", "errors": "kubernetes", "port": REFUSING,
                "listen": format!("{CLOUD}:{REFUSING}"), "anonymous": true, "anonymous_ports": [REFUSING],
            },
            {
                "name": "addresses", "kind": "https", "errors": "kubernetes", "port": 10250,
                "listen": "0.0.0.0:10263", "callers": callers, "original_destination": true,
            },
            {
                "name": "addresses-apps", "kind": "http", "errors": "kubernetes", "port": REFUSING,
                "listen": "127.0.0.1:10255", "original_destination": true,
                "anonymous": true, "anonymous_ports": [REFUSING],
            },
        ],
    })
    .to_string()
}

/// `CoreDNS` as a cluster has it, for names of nodes alone: it asks the gateway.
fn names(folder: &Path, assets: &Path) -> Process {
    let file = folder.join("Corefile");
    let text = format!("{ZONE}:53 {{\n bind {CLOUD}\n forward . {CLOUD}:10253\n}}\n");
    fs::write(&file, text).unwrap();
    fs::write(
        folder.join("resolv.conf"),
        format!("nameserver {CLOUD}\nsearch {ZONE}\n"),
    )
    .unwrap();
    let mut names = Program::new(assets.join("coredns"))
        .args(["-conf".as_ref(), file.as_os_str()])
        .start(&folder.join("coredns.log"));
    names.says("CoreDNS-");
    names
}
