//! A cluster without kubelets, a gateway, and two edges in one pool. Each edge is behind a NAT, and both share a network.

use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use serde_json::{Value, json};

use super::{
    examples::{example, example_of, with_lines_of},
    views::Readers,
};
use crate::world::{
    assets, cage,
    causeway::BINARY,
    cluster::Cluster,
    net::{self, CLOUD, Site},
    pki::Pki,
    process::{PATIENCE, Process, Program, ToolOutput, until, within},
};

/// Endpoints at which programs on a node read, without TLS and with TLS.
pub(super) const ENDPOINT: &str = "http://127.0.0.1:10270";
pub(super) const BY_TLS: &str = "https://127.0.0.1:10270";

/// The admin listeners of both sides.
const GATEWAY: &str = "http://127.0.0.1:10265";
const EDGE: &str = "http://127.0.0.1:10266";

/// The pool that the nodes' tokens name, and that the example admits to the API cache.
pub(super) const POOL: &str = "north-1";

/// The whole setup.
pub(super) struct Scene {
    folder: PathBuf,
    pub(super) cluster: Cluster,
    gateway: Option<Process>,
    pub(super) edges: [Edge; 2],
    pub(super) readers: Readers,
}

/// An edge, with its node's network.
pub(super) struct Edge {
    pub(super) name: String,
    pub(super) site: Site,
    pub(super) folder: PathBuf,
    assets: PathBuf,
    process: Option<Process>,
    /// CA of the certificate that programs see at the endpoint, if they read over TLS.
    ca: Option<String>,
}

/// Returns the scene, which the first call makes.
pub(super) fn scene() -> MutexGuard<'static, Scene> {
    static SCENE: OnceLock<Mutex<Scene>> = OnceLock::new();
    let scene = SCENE.get_or_init(|| Mutex::new(Scene::start()));
    // Before the next test, links and processes are restored that a failed test has cut or ended.
    scene.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Scene {
    fn start() -> Self {
        let folder = cage::inside().expect("the tests run inside");
        let assets = assets::folder().expect("the outer program has checked");
        net::cloud();
        let cluster = Cluster::start(&folder, &assets);
        let edges = [1, 2].map(|number| Edge::new((&folder, &assets), &cluster, number));
        let shared = [1, 2].map(at_field);
        net::neighbours(
            "field",
            &[(&edges[0].site, shared[0]), (&edges[1].site, shared[1])],
        );
        let config = example(
            "gateway.yaml",
            &[
                ("gw.example.com", CLOUD.to_string()),
                (
                    "/etc/causeway/gateway.kubeconfig",
                    cluster.account("api-cache"),
                ),
            ],
        );
        // YurtHubs read as well, as configured in their own example.
        let hubs = example_of("yurthub", "gateway.yaml", &[]);
        cluster.apply_example("yurthub/rbac.yaml");
        let config = with_lines_of(&config, &hubs, "kubernetes:\n");
        fs::write(folder.join("gateway.yaml"), config).unwrap();
        let mut scene = Self {
            readers: Readers::default(),
            folder,
            cluster,
            gateway: None,
            edges,
        };
        scene.causeway("ca init").run().ok();
        scene.gateway_starts();
        for number in 0..scene.edges.len() {
            let create = format!(
                "token create --pool {POOL} --node {}",
                scene.edges[number].name
            );
            let token = scene.causeway(&create).run().ok().text();
            scene.edges[number].starts(Some(token.trim()));
        }
        scene.whole();
        scene
            .readers
            .start(&scene.folder, &scene.cluster, &scene.edges);
        scene
    }

    /// A command beside the gateway.
    pub(super) fn causeway(&self, line: &str) -> Program {
        let causeway = Program::new(BINARY).words(line);
        causeway.env("CAUSEWAY_DATA_DIR", self.folder.join("gateway"))
    }

    /// Checks that everything runs, no link is cut, and one edge leads.
    pub(super) fn whole(&mut self) {
        if self.gateway.is_none() {
            self.gateway_starts();
        }
        for edge in &mut self.edges {
            edge.site.mend();
            if edge.ca.is_some() {
                edge.shows(None);
            }
            if edge.process.is_none() {
                edge.starts(None);
            }
        }
        self.until(
            "one edge leads, the other follows, and both are connected",
            |scene| {
                scene.leader().is_some()
                    && scene
                        .edges
                        .iter()
                        .all(|edge| edge.reading()["ready"] == true)
                    && scene
                        .edges
                        .iter()
                        .any(|edge| edge.reading()["role"] == "leader")
                    && scene
                        .edges
                        .iter()
                        .any(|edge| edge.reading()["role"] == "follower")
            },
        );
    }

    /// Waits until the condition holds; a failure prints the state of all processes.
    pub(super) fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        if !within(PATIENCE, || holds(self)) {
            self.fail(what);
        }
    }

    /// Fails, and prints the state of all processes.
    pub(super) fn fail(&self, what: &str) -> ! {
        let edges: Vec<Value> = self.edges.iter().map(Edge::reading).collect();
        let (kept, content) = (Self::kept(), self.edges.each_ref().map(Edge::last_words));
        let gateway = self
            .gateway
            .as_ref()
            .map(Process::output)
            .unwrap_or_default();
        panic!(
            "{what}\ngateway: {kept:#}\n{}\nedges: {edges:#?}\n{}\n---\n{}",
            tail(&gateway),
            content[0],
            content[1]
        );
    }

    pub(super) fn gateway_starts(&mut self) {
        let config = self.folder.join("gateway.yaml");
        let mut gateway = self
            .causeway("gateway --config")
            .args([config])
            .start(&self.folder.join("gateway.log"));
        gateway.says("gateway ready");
        self.gateway = Some(gateway);
    }

    /// Ends the gateway at once.
    pub(super) fn gateway_dies(&mut self) {
        self.gateway = None;
    }

    /// Returns the output of the gateway since its start.
    pub(super) fn gateway_said(&self) -> String {
        self.gateway
            .as_ref()
            .map(Process::output)
            .unwrap_or_default()
    }

    /// Returns the objects that the gateway caches for edges, and the leader.
    pub(super) fn kept() -> Value {
        let asked = Program::new("curl").words(&format!("-q -sS {GATEWAY}/api/v1/pool"));
        serde_json::from_slice(&asked.run().stdout).unwrap_or_default()
    }

    /// Returns the number of the leader in the gateway's view.
    pub(super) fn leader(&self) -> Option<usize> {
        let kept = Self::kept();
        let led = kept["leaders"][POOL].as_str()?;
        self.edges.iter().position(|edge| edge.name == led)
    }

    /// Returns the value of one of the gateway's metrics.
    pub(super) fn metric(name: &str) -> u64 {
        let asked = Program::new("curl").words(&format!("-q -sS {GATEWAY}/metrics"));
        crate::nodes::number(&asked.run().ok().text(), name)
    }

    /// Makes this many changes in the cloud, different ones each time.
    pub(super) fn change(&mut self, count: usize) {
        self.readers.change(&self.cluster, count);
    }

    /// Makes a number of changes that takes almost no time.
    pub(super) fn change_a_few(&mut self) {
        self.readers.change_a_few(&self.cluster, 10);
    }

    /// Checks that all readers see the state of the API server.
    pub(super) fn agree(&mut self) {
        let all = |_: &str| true;
        if let Err(why) = self.readers.agree(&self.cluster, all) {
            self.fail(&why);
        }
    }

    /// The same for the readers at this edge.
    pub(super) fn agree_at(&mut self, number: usize) {
        let name = self.edges[number].name.clone();
        if let Err(why) = self.readers.agree(&self.cluster, |place| place == name) {
            self.fail(&why);
        }
    }

    /// Cuts all nodes off, and waits until they have noticed.
    pub(super) fn cut_all(&self) {
        for edge in &self.edges {
            edge.site.cut();
        }
        self.until("both edges have no peers", |scene| {
            let mut edges = scene.edges.iter();
            edges.all(|edge| edge.reading()["ready"] == false)
        });
    }
}

/// A node's address in the shared network.
fn at_field(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 2, 0, number)
}

impl Edge {
    fn new((folder, assets): (&Path, &Path), cluster: &Cluster, number: u8) -> Self {
        let (name, site) = (format!("edge-{number}"), Site::new(number));
        let folder = folder.join(&name);
        fs::create_dir_all(&folder).unwrap();
        let config = example(
            "edge.yaml",
            &[
                ("gw.example.com", CLOUD.to_string()),
                ("10.1.0.5", at_field(number).to_string()),
            ],
        );
        let hubs_at = at_field(number);
        let certificate = format!("hubs-{number}");
        cluster.pki.server(&certificate, &[], &[hubs_at.into()]);
        let file = |name: String| cluster.pki.path(&name);
        let hubs = example_of(
            "yurthub",
            "edge.yaml",
            &[
                ("10.1.0.5", hubs_at.to_string()),
                ("/etc/causeway/hubs.pem", file(format!("{certificate}.pem"))),
                ("/etc/causeway/hubs.key", file(format!("{certificate}.key"))),
                ("/etc/kubernetes/pki/ca.crt", file("ca.pem".into())),
            ],
        );
        let config = with_lines_of(&config, &hubs, "api_cache:\n");
        let own = format!(
            "node: {name}\ndata_dir: {}\n",
            folder.join("data").display()
        );
        fs::write(folder.join("edge.yaml"), config + &own).unwrap();
        cluster.apply(&json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } }));
        let addresses = [json!({ "type": "InternalIP", "address": site.address() })];
        let status = json!({ "status": { "addresses": addresses } });
        let patch = format!("patch node {name} --subresource=status --type=merge -p");
        let patch = cluster.kubectl(&patch).args([status.to_string()]);
        patch.run().ok();
        cluster.gives_pods(&name, &format!("10.244.{number}.0/24"));
        Self {
            name,
            site,
            folder,
            assets: assets.to_owned(),
            process: None,
            ca: None,
        }
    }

    /// Ends it; from its next start on it shows programs this certificate of the CA, or has no TLS.
    pub(super) fn shows(&mut self, shown: Option<(&Pki, &str)>) {
        self.dies();
        let (file, key) = (self.folder.join("edge.yaml"), "api_cache:\n");
        let config = fs::read_to_string(&file).unwrap();
        let lines = config.split_inclusive('\n');
        let mut config: String = lines.filter(|line| !line.starts_with("  tls:")).collect();
        if let Some((pki, name)) = shown {
            let [certificate, private] =
                ["pem", "key"].map(|end| pki.path(&format!("{name}.{end}")));
            let line = format!("  tls: {{ certificate: {certificate}, key: {private} }}\n");
            config = config.replace(key, &format!("{key}{line}"));
        }
        fs::write(&file, config).unwrap();
        self.ca = shown.map(|(pki, _)| pki.path("ca.pem"));
    }

    /// Starts it, and waits until programs can read from it. Its earlier output is kept in another file.
    pub(super) fn starts(&mut self, token: Option<&str>) {
        let config = self.folder.join("edge.yaml");
        let mut edge = self.site.at(BINARY).words("edge --config").args([config]);
        if let Some(token) = token {
            edge = edge.env("CAUSEWAY_JOIN", token);
        }
        let log = self.folder.join("edge.log");
        // Before the first start there is none.
        let _ = fs::rename(&log, self.folder.join("edge-before.log"));
        self.process = Some(edge.start(&log));
        until("the edge has its endpoint", || {
            let asked = self.ask("/version").run();
            asked.code == Some(0)
        });
    }

    /// Ends it at once, as a power cut does.
    pub(super) fn dies(&mut self) {
        self.process = None;
    }

    /// Returns the output of the edge since its start.
    pub(super) fn output(&self) -> String {
        self.process
            .as_ref()
            .map(Process::output)
            .unwrap_or_default()
    }

    fn last_words(&self) -> String {
        tail(&self.output())
    }

    /// Returns the edge's own status of its API cache.
    pub(super) fn reading(&self) -> Value {
        let asked = self.site.at("curl").words("-q -sS");
        let asked = asked.args([format!("{EDGE}/status")]).run();
        let status: Value = serde_json::from_slice(&asked.stdout).unwrap_or_default();
        status["api_cache"].clone()
    }

    /// Sends a request to its endpoint.
    pub(super) fn ask(&self, path: &str) -> Program {
        let curl = self
            .site
            .at("curl")
            .words("-q -sS --max-time 5 --fail-with-body");
        match &self.ca {
            Some(ca) => curl.args(["--cacert", ca, &format!("{BY_TLS}{path}")]),
            None => curl.args([format!("{ENDPOINT}{path}")]),
        }
    }

    /// Runs a part of Kubernetes on its node.
    pub(super) fn part(&self, name: &str) -> Program {
        self.site
            .at(self.assets.join(name))
            .env("HOME", &self.folder)
    }

    /// kubectl on its node, with only the address of the endpoint.
    pub(super) fn kubectl(&self, line: &str) -> Program {
        let server = ["--server", ENDPOINT];
        self.part("kubectl").args(server).words(line)
    }

    /// Runs `kubectl get` there.
    pub(super) fn get(&self, line: &str) -> ToolOutput {
        self.kubectl("get").words(line).run()
    }
}

/// Returns the end of an output.
fn tail(content: &str) -> String {
    let lines: Vec<&str> = content.lines().collect();
    lines[lines.len().saturating_sub(25)..].join("\n")
}
