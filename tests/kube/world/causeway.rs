//! Causeway in the cluster: a gateway in the cloud, and an edge on each node, as processes of the built binary.
//!
//! Edges join with tokens, through the NAT, and serve the kubelet's port as bytes: kube-apiserver's TLS goes through to
//! the kubelet. Data and configuration are files in the tests' folder.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::json;

use super::{
    Way,
    net::CLOUD,
    node::Node,
    pki::Pki,
    process::{Process, Program},
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
    pub(crate) fn start(folder: &Path, pki: &Pki, nodes: &[Node]) -> Self {
        let folder = folder.join("causeway");
        fs::create_dir_all(&folder).unwrap();
        causeway(&folder).words("ca init").run().ok();
        let config = folder.join("gateway.yaml");
        fs::write(&config, gateway(&folder, pki)).unwrap();
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
            "ports": { "10250": { "scheme": "tcp" }, CLOSED.to_string(): { "scheme": "tcp" } },
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

    /// The configuration by which kube-apiserver comes this way.
    pub(crate) fn egress(&self, way: Way) -> PathBuf {
        let (name, transport) = match way {
            Way::Unix => ("unix", json!({ "uds": { "udsName": self.socket() } })),
            Way::Tcp => {
                let pki = self.folder.with_file_name("pki");
                let tls = json!({
                    "caBundle": self.folder.join("gateway/ca.pem"),
                    "clientCert": pki.join("egress.pem"), "clientKey": pki.join("egress.key"),
                    "tlsServerName": "gateway",
                });
                let url = format!("https://{CLOUD}:10264");
                ("tcp", json!({ "tcp": { "url": url, "tlsConfig": tls } }))
            }
        };
        let file = self.folder.join(format!("egress-{name}.yaml"));
        let text = json!({
            "apiVersion": "apiserver.k8s.io/v1beta1", "kind": "EgressSelectorConfiguration",
            "egressSelections": [{
                "name": "cluster",
                "connection": { "proxyProtocol": "HTTPConnect", "transport": transport },
            }],
        });
        fs::write(&file, text.to_string()).unwrap();
        file
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("connect.sock")
    }
}

fn causeway(folder: &Path) -> Program {
    Program::new(BINARY).env("CAUSEWAY_DATA_DIR", folder.join("gateway"))
}

fn gateway(folder: &Path, pki: &Pki) -> String {
    json!({
        "tunnel": { "advertise": [format!("{CLOUD}:10262")] },
        "fronts": [
            {
                "name": "egress-unix", "kind": "connect", "errors": "kubernetes",
                "listen": format!("unix:{}", folder.join("connect.sock").display()),
            },
            {
                "name": "egress-tcp", "kind": "connect", "errors": "kubernetes",
                "listen": format!("{CLOUD}:10264"), "names": ["gateway"],
                "callers": { "own_ca": false, "client_ca": [pki.path("ca.pem")] },
            },
        ],
    })
    .to_string()
}
