//! Causeway in the cluster: a gateway in the cloud, and an edge on each node, as processes of the built binary.
//!
//! The gateway has the configuration of the setup's example, with this cloud's addresses and files, and further listeners
//! that tests need. Edges join once, with tokens, through the NAT, and serve the kubelet's port as bytes: the TLS of
//! kube-apiserver, or of the gateway, passes through to the kubelet.

use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use super::{
    Checks, Way,
    cluster::Cluster,
    net::{self, CLOUD, HOSTED},
    node::Node,
    process::{Process, Program, ToolOutput, until},
};

/// A node port that edges allow, at which nothing listens.
pub(crate) const CLOSED: u16 = 9998;

/// Another, for requests, which every client may use.
pub(crate) const REFUSING: u16 = 9996;

/// DNS zone of the nodes' names.
const ZONE: &str = "nodes.example.internal";

/// The tested binary.
pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_causeway");

/// Folder of the examples.
const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples");

/// Clients that a gateway serves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Clients {
    /// Only kube-apiserver.
    Server,
    /// Scrapers of kubelets as well: the commented part of the example is active.
    Scrapers,
}

/// A gateway with an edge for each node.
pub(crate) struct CausewayProcesses {
    folder: PathBuf,
    gateway: Option<(&'static str, Clients, Process)>,
    _names: Process,
    hosted: Option<Process>,
    edges: Vec<Option<Process>>,
}

impl CausewayProcesses {
    /// Makes the gateway's CA, starts it for this setup, and lets an edge of each node join.
    pub(crate) fn start(
        folder: &Path,
        cluster: &Cluster,
        nodes: &[Node],
        (way, clients): (Way, Clients),
    ) -> Self {
        let folder = folder.join("causeway");
        fs::create_dir_all(&folder).unwrap();
        causeway(&folder).words("ca init").run().ok();
        cluster.signs("gateway-kubelet", "causeway-gateway");
        let mut road = Self {
            _names: names(&folder, &cluster.assets),
            folder,
            gateway: None,
            hosted: None,
            edges: nodes.iter().map(|_| None).collect(),
        };
        road.serves(way, clients, cluster);
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

    /// Starts the gateway of this setup's example, and waits for the previous tunnels.
    pub(crate) fn serves(&mut self, way: Way, clients: Clients, cluster: &Cluster) {
        let (example, name) = (way.example(), way.gateway());
        let is = self.gateway.as_ref();
        if is.is_some_and(|(of, whom, _)| (*of, *whom) == (name, clients)) {
            return;
        }
        // Its sockets and kernel rules are removed with it.
        self.gateway = None;
        if example == "addresses" {
            net::leads_on();
        }
        let text = self.config(way, clients, cluster);
        // Edges stay the same in all setups, though each example has a file for them.
        let edges = format!("{EXAMPLES}/{example}/edge.yaml");
        let check = Program::new(BINARY).words("edge --check-config --config");
        check.args([edges]).run().ok();
        self.runs(name, clients, text);
        if name == "hosts" {
            self.hosted = Some(hosted(&self.folder, cluster));
        }
    }

    /// Starts a gateway with this configuration.
    fn runs(&mut self, name: &'static str, clients: Clients, text: String) {
        let config = self.folder.join("gateway.yaml");
        fs::write(&config, text).unwrap();
        let mut gateway = causeway(&self.folder)
            .args(["gateway".as_ref(), "--config".as_ref(), config.as_os_str()])
            .start(&self.folder.join(format!("gateway-{name}.log")));
        gateway.says("gateway ready");
        self.gateway = Some((name, clients, gateway));
        let joined = self.edges.iter().flatten().count();
        until("the edges are back", || {
            let status = causeway(&self.folder).words("status").run();
            status.text().matches(" connected ").count() == joined
        });
    }

    /// Changes the gateway of this setup.
    pub(crate) fn otherwise(
        &mut self,
        way: Way,
        cluster: &Cluster,
        change: impl Fn(String) -> String,
    ) {
        self.gateway = None;
        let text = self.config(way, Clients::Server, cluster);
        self.runs("another", Clients::Server, change(text));
    }

    /// Changes the gateway's configuration, and reloads it.
    pub(crate) fn gateway_anew(&self, change: impl Fn(String) -> String) {
        rewrite(&self.folder.join("gateway.yaml"), change);
        causeway(&self.folder).words("reload").run().ok();
    }

    /// Returns the example's configuration for this machine.
    fn config(&self, way: Way, clients: Clients, cluster: &Cluster) -> String {
        let example = way.example();
        let read = |name: &str| fs::read_to_string(format!("{EXAMPLES}/{example}/{name}"));
        let ours = |name: &str| self.folder.join(name).display().to_string();
        let pki = |name: &str| cluster.pki.path(name);
        if way.example() != "egress" {
            self.rules(way, clients, "");
        }
        let mut listeners = "\nlisteners:\n".to_owned();
        for listener in further(example, &self.folder, cluster) {
            writeln!(listeners, "  - {listener}").unwrap();
        }
        let mut text = clients.read(&read("gateway.yaml").unwrap());
        if clients == Clients::Scrapers {
            cluster.apply_example("egress/reviews.yaml");
            text = text.replace("\nkubernetes:\n", &format!("\nkubernetes:\n{REVIEWS}"));
        }
        for (theirs, here) in [
            ("gw.example.com", CLOUD.to_string()),
            ("10.0.0.20", CLOUD.to_string()),
            (
                "[10.0.0.0/16, 10.1.0.0/16]",
                "[10.97.0.0/24, 10.1.0.0/16]".into(),
            ),
            ("/etc/causeway/gateway.kubeconfig", cluster.account(example)),
            ("/etc/causeway/cluster-ca.crt", pki("ca.pem")),
            (
                "signer: kubernetes.io/kube-apiserver-client ",
                format!(
                    "certificate: {}\n    key: {} ",
                    pki("gateway-kubelet.pem"),
                    pki("gateway-kubelet.key"),
                ),
            ),
            ("approve: true ", String::new()),
            ("/etc/causeway/policy.yaml", ours("policy.yaml")),
            ("/run/causeway/kube-apiserver.sock", ours("address.sock")),
            ("\nlisteners:\n", listeners),
            (
                "listeners: [kubelets]",
                "listeners: [kubelets, apps]\n  pods: pods".into(),
            ),
        ] {
            text = text.replace(theirs, &here);
        }
        let more = match way.gateway() {
            "addresses" => PODS.to_owned(),
            "hosts" => {
                cluster.apply_example("hosts/rbac.yaml");
                let (before, dns) = text.split_once("\ndns:\n").unwrap();
                let (_, behind) = dns.split_once("\nlisteners:\n").unwrap();
                text = format!("{before}\nlisteners:\n{behind}");
                format!("  hosts: {{ addresses: [{CLOUD}] }}\n")
            }
            _ => String::new(),
        };
        text.replace("\nkubernetes:\n", &format!("\nkubernetes:\n{more}"))
    }

    /// Returns the policy of this setup's example, with this line before its rules.
    fn rules(&self, way: Way, clients: Clients, first: &str) {
        let file = format!("{EXAMPLES}/{}/policy.yaml", way.example());
        let policy = clients.read(&fs::read_to_string(file).unwrap());
        let policy = policy.replace("\nrules:\n", &format!("\nrules:\n{first}"));
        fs::write(self.folder.join("policy.yaml"), policy + ANYBODY).unwrap();
    }

    /// Writes that policy, and reloads it.
    pub(crate) fn rules_anew(&self, way: Way, first: &str) {
        self.rules(way, Clients::Server, first);
        causeway(&self.folder).words("reload").run().ok();
    }

    /// Lets the gateway of the setup by names trust kubelets by pinned keys, or by the cluster's CA as in its example.
    pub(crate) fn pins(&self, pins: bool, cluster: &Cluster) {
        let mut text = self.config(crate::names::CHECKED, Clients::Server, cluster);
        if pins {
            let signed = format!("\n    ca: {}", cluster.pki.path("ca.pem"));
            assert!(text.contains(&signed), "{text}");
            text = text.replace(&signed, "\n    pin: true");
        }
        fs::write(self.folder.join("gateway.yaml"), text).unwrap();
        self.orders("reload").ok();
    }

    /// Runs a command beside the gateway.
    pub(crate) fn orders(&self, line: &str) -> ToolOutput {
        causeway(&self.folder).words(line).run()
    }

    /// Starts the edge of a node, and waits for its tunnel.
    pub(crate) fn join(&mut self, nodes: &[Node], number: usize, token: Option<&str>) {
        let node = &nodes[number];
        let config = node.path("edge.yaml");
        let text = fs::read_to_string(format!("{EXAMPLES}/egress/edge.yaml")).unwrap();
        let (name, data) = (&node.name, node.path("edge"));
        let further = format!(
            "\nports:\n  8080: {{ scheme: tcp }}\n  {CLOSED}: {{ scheme: tcp }}\n  {REFUSING}: {{}}\n"
        );
        let text = text
            .replace("gw.example.com", &CLOUD.to_string())
            .replace("10.244.0.0/16", "10.244.0.0/16, 10.250.0.0/16")
            .replace("\nports:\n", &further);
        let own = format!("node: {name}\ndata_dir: {}\n", data.display());
        fs::write(&config, text + &own).unwrap();
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

    /// Requests the end of a node's edge, and returns its process.
    pub(crate) fn leaves(&mut self, number: usize) -> Process {
        let edge = self.edges[number].take().expect("it has joined");
        edge.is_to_end();
        edge
    }

    /// Requests the gateway's end, and returns its process. The next setup starts another gateway.
    pub(crate) fn drains(&mut self) -> Process {
        let (_, _, gateway) = self.gateway.take().expect("it was started");
        gateway.is_to_end();
        gateway
    }

    /// The CAs by which kube-apiserver verifies kubelets: the cluster's, and this gateway's.
    pub(crate) fn authority(&self, checks: Checks, cluster: &Cluster) -> Option<PathBuf> {
        let file = self.folder.join("kubelets-ca.pem");
        let bundle = causeway(&self.folder).words("k8s ca-bundle --kubelet-ca");
        let bundle = bundle.args([cluster.pki.path("ca.pem")]).run().ok();
        fs::write(&file, bundle.stdout).unwrap();
        (checks == Checks::On).then_some(file)
    }

    /// Returns the output of the gateway.
    pub(crate) fn output(&self) -> String {
        let (_, _, gateway) = self.gateway.as_ref().expect("it was started");
        gateway.output()
    }

    /// The gateway's CA, with which clients verify it.
    pub(crate) fn ca(&self) -> PathBuf {
        self.folder.join("gateway/ca.pem")
    }

    /// A program of the cloud that finds nodes in this setup.
    pub(crate) fn finding(&self, way: Way, program: &Path) -> Program {
        match way {
            Way::Names(_) | Way::Hosts(_) => net::asking(&self.resolver(way), program),
            _ => Program::new(program),
        }
    }

    /// The `resolv.conf` of programs that find nodes by their names.
    pub(crate) fn resolver(&self, way: Way) -> PathBuf {
        self.folder.join(match way {
            Way::Hosts(_) => "hosted/resolv.conf",
            _ => "resolv.conf",
        })
    }

    /// The configuration with which kube-apiserver uses this setup, as printed by the binary; nothing for other setups.
    pub(crate) fn egress(&self, way: Way) -> Option<PathBuf> {
        let listener = |name: &str| self.folder.join(name).display().to_string();
        let pki = |name: &str| self.folder.with_file_name("pki").join(name);
        let words = Program::new(BINARY).words("k8s egress-config");
        let (name, words) = match way {
            Way::Names(_) | Way::Hosts(_) | Way::Addresses(_) => return None,
            Way::Unix => ("unix", words.args(["--socket", &listener("connect.sock")])),
            Way::Address => (
                "address",
                words.args(["--socket", &listener("address.sock")]),
            ),
            Way::Tcp => {
                let url = format!("https://{CLOUD}:10264");
                let words = words.args(["--url", &url, "--server-name", "gateway"]);
                let words = words.args(["--ca", &listener("gateway/ca.pem")]);
                let files = ["--certificate".into(), pki("egress.pem")];
                let words = words.args(files);
                ("tcp", words.args(["--key".into(), pki("egress.key")]))
            }
        };
        let file = self.folder.join(format!("egress-{name}.yaml"));
        fs::write(&file, words.run().ok().stdout).unwrap();
        Some(file)
    }
}

/// Configuration of the networks in which addresses of pods are accepted.
const PODS: &str = "  pod_networks: [10.244.0.0/16]\n";

/// For a short time only: a test waits until a client without the right is refused.
const REVIEWS: &str = "  review_allowed_for: 2s\n  review_refused_for: 1s\n  token_allowed_for: 2s\n  token_refused_for: 1s\n";

impl Clients {
    /// Returns a file of an example with its indented comments, which scrapers need, as text.
    fn read(self, text: &str) -> String {
        let line = |line: &str| {
            let told = line.trim_start();
            let indent = &line[..line.len() - told.len()];
            match told.strip_prefix("# ") {
                Some(told) if self == Self::Scrapers && !indent.is_empty() => {
                    format!("{indent}{told}\n")
                }
                _ => format!("{line}\n"),
            }
        };
        text.lines().map(line).collect()
    }
}

/// Changes an edge's configuration while it runs. Returns the previous one.
pub(crate) fn edge_anew(node: &Node, change: impl Fn(String) -> String) -> String {
    // The edge notices the change by itself.
    rewrite(&node.path("edge.yaml"), change)
}

fn rewrite(file: &Path, change: impl Fn(String) -> String) -> String {
    let text = fs::read_to_string(file).unwrap();
    let changed = change(text.clone());
    assert_ne!(text, changed, "{}", file.display());
    fs::write(file, changed).unwrap();
    text
}

fn causeway(folder: &Path) -> Program {
    Program::new(BINARY).env("CAUSEWAY_DATA_DIR", folder.join("gateway"))
}

/// Rules that the examples' policies have here in addition: `REFUSING` is for everyone, and so are pods and ports that are
/// listed.
const ANYBODY: &str = "  - { who: { users: [\"system:anonymous\"] }, what: { ports: [9996, 8080, 9100, 9443] }, then: allow }\n";

/// Further listeners besides those of an example.
fn further(example: &str, folder: &Path, cluster: &Cluster) -> Vec<Value> {
    let anybody = |name: &str, protocol: &str, listen: String, original: bool| {
        json!({
            "name": name, "protocol": protocol, "listen": listen, "port": REFUSING, "errors": "kubernetes",
            "original_destination": original, "anonymous": true, "anonymous_ports": [REFUSING],
        })
    };
    match example {
        "dns" => vec![anybody(
            "apps",
            "https",
            format!("{CLOUD}:{REFUSING}"),
            false,
        )],
        "addresses" => vec![
            anybody("apps", "http", "127.0.0.1:10255".into(), true),
            json!({
                "name": "pods", "protocol": "tcp", "listen": "127.0.0.1:10264",
                "original_destination": true, "anonymous": true,
            }),
        ],
        _ => vec![
            json!({
                "name": "unix", "protocol": "connect", "errors": "kubernetes",
                "listen": format!("unix:{}", folder.join("connect.sock").display()),
            }),
            json!({
                "name": "tcp", "protocol": "connect", "errors": "kubernetes",
                "listen": format!("{CLOUD}:10264"), "names": ["gateway"],
                "client_auth": { "own_ca": false, "client_ca": [cluster.pki.path("ca.pem")] },
            }),
        ],
    }
}

/// `CoreDNS` as in a cluster: it forwards queries for names of nodes to the gateway, and has no other source for them.
fn names(folder: &Path, assets: &Path) -> Process {
    let file = folder.join("Corefile");
    let text = format!(
        "{ZONE}:53 {{\n bind {CLOUD}\n forward . {CLOUD}:10253\n}}\n\
         .:53 {{\n bind {CLOUD}\n template ANY ANY {{\n rcode NXDOMAIN\n }}\n}}\n"
    );
    fs::write(&file, text).unwrap();
    let resolver = format!("nameserver {CLOUD}\nsearch {ZONE}\n");
    fs::write(folder.join("resolv.conf"), resolver).unwrap();
    let mut names = Program::new(assets.join("coredns"))
        .args(["-conf".as_ref(), file.as_os_str()])
        .start(&folder.join("coredns.log"));
    names.says("CoreDNS-");
    names
}

/// `CoreDNS` as in `examples/hosts`, with the file that this gateway has written.
fn hosted(folder: &Path, cluster: &Cluster) -> Process {
    let folder = folder.join("hosted");
    fs::create_dir_all(&folder).unwrap();
    let mut text = String::new();
    until("the gateway has written the names", || {
        let map = cluster.get("configmap -n kube-system causeway-nodes");
        let map = map.unwrap_or_default();
        let hosts = map["data"]["hosts"].as_str();
        hosts.unwrap_or_default().clone_into(&mut text);
        text.contains("edge-1") && text.contains("edge-2")
    });
    let (mounted, file) = (folder.join("hosts"), folder.join("Corefile"));
    fs::write(&mounted, text).unwrap();
    let example = fs::read_to_string(format!("{EXAMPLES}/hosts/Corefile")).unwrap();
    // `CoreDNS` forwards no query for names that are not in the file.
    let example = example
        .replace(".:53 {", &format!(".:53 {{\n    bind {HOSTED}"))
        .replace("/etc/causeway/hosts", &mounted.display().to_string())
        .replace("    forward . /etc/resolv.conf\n", "");
    fs::write(&file, example).unwrap();
    fs::write(folder.join("resolv.conf"), format!("nameserver {HOSTED}\n")).unwrap();
    let mut names = Program::new(cluster.assets.join("coredns"))
        .args(["-conf".as_ref(), file.as_os_str()])
        .start(&folder.join("coredns.log"));
    names.says("CoreDNS-");
    names
}
