//! Causeway in the cluster: a gateway in the cloud, and an edge on each node, as processes of the built binary.
//!
//! Edges join with tokens, through the NAT, and serve the kubelet's port as bytes: kube-apiserver's TLS goes through to
//! the kubelet. Data and configuration are files in the tests' folder.

use std::{
    fs,
    path::{Path, PathBuf},
};

use data_encoding::BASE64;
use serde_json::json;

use super::{
    Way,
    cluster::Cluster,
    net::CLOUD,
    node::Node,
    process::{Process, Program, until},
};

/// A node port that edges allow, at which nothing listens.
pub(crate) const CLOSED: u16 = 9998;

/// The binary that is tested.
pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_causeway");

/// A gateway with an edge for each node.
pub(crate) struct Road {
    folder: PathBuf,
    _gateway: Process,
    edges: Vec<Option<Process>>,
}

impl Road {
    /// Starts the gateway, and lets an edge of each node join.
    pub(crate) fn start(folder: &Path, cluster: &Cluster, nodes: &[Node]) -> Self {
        let folder = folder.join("causeway");
        fs::create_dir_all(&folder).unwrap();
        causeway(&folder).words("ca init").run().ok();
        let config = folder.join("gateway.yaml");
        fs::write(&config, gateway(&folder, cluster)).unwrap();
        let mut gateway = causeway(&folder)
            .args(["gateway".as_ref(), "--config".as_ref(), config.as_os_str()])
            .start(&folder.join("gateway.log"));
        gateway.says("gateway ready");
        let mut road = Self {
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
                CLOSED.to_string(): { "scheme": "tcp" },
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

    /// The configuration by which kube-apiserver comes this way, as the binary prints it.
    pub(crate) fn egress(&self, way: Way) -> PathBuf {
        let front = |name: &str| self.folder.join(name).display().to_string();
        let pki = |name: &str| self.folder.with_file_name("pki").join(name);
        let words = Program::new(BINARY).words("k8s egress-config");
        let (name, words) = match way {
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

/// An account of the cluster for the gateway, with the rights of the example and no others.
fn account(folder: &Path, cluster: &Cluster) -> PathBuf {
    let rights = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/egress/rbac.yaml");
    let apply = cluster.kubectl("apply -f").args([rights]);
    apply.run().ok();
    let secret = "secret -n kube-system causeway-gateway";
    let read = || {
        cluster.get(secret)?["data"]["token"]
            .as_str()
            .map(str::to_owned)
    };
    until("the account has a token", || read().is_some());
    let token = BASE64.decode(read().unwrap().as_bytes()).unwrap();
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "it",
        "clusters": [{ "name": "it", "cluster": {
            "server": format!("https://{CLOUD}:6443"),
            "certificate-authority": cluster.pki.path("ca.pem"),
        } }],
        "users": [{ "name": "it", "user": { "token": String::from_utf8(token).unwrap() } }],
        "contexts": [{ "name": "it", "context": { "cluster": "it", "user": "it" } }],
    });
    let file = folder.join("gateway.kubeconfig");
    fs::write(&file, config.to_string()).unwrap();
    file
}

fn causeway(folder: &Path) -> Program {
    Program::new(BINARY).env("CAUSEWAY_DATA_DIR", folder.join("gateway"))
}

fn gateway(folder: &Path, cluster: &Cluster) -> String {
    let socket = |name| format!("unix:{}", folder.join(name).display());
    let account = account(folder, cluster);
    json!({
        "kubernetes": {
            "kubeconfig": account, "pod_networks": ["10.244.0.0/16"],
            "address_networks": ["10.1.0.0/16", "10.97.0.0/24"],
        },
        "tunnel": { "advertise": [format!("{CLOUD}:10262")] },
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
                "listen": format!("{CLOUD}:10264"), "names": ["gateway"],
                "callers": { "own_ca": false, "client_ca": [cluster.pki.path("ca.pem")] },
            },
        ],
    })
    .to_string()
}
