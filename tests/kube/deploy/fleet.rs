//! A cluster with all that runs a Deployment and a `DaemonSet`: their controllers, a scheduler, nodes in the cloud whose pods
//! can be dialled, and three nodes behind NAT.

use std::{
    fs,
    net::Ipv4Addr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Instant,
};

use serde_json::json;

use super::replicas::{Ends, ready_behind};
use crate::world::{
    World,
    causeway::BINARY,
    image,
    net::CLOUD,
    node::Node,
    process::{PATIENCE, Process, Program, ToolOutput, must, within},
};

/// Names of the image: the installed version, and another one, which is the same program.
pub(super) const VERSIONS: [&str; 2] = ["causeway:0.1.0", "causeway:0.1.1"];

/// The controllers that the tests' cluster does not run otherwise.
const CONTROLLERS: &str = "deployment-controller,replicaset-controller,daemonset-controller,job-controller,\
     garbage-collector-controller,disruption-controller";

/// The cluster's DNS.
const NAMES: Ipv4Addr = Ipv4Addr::new(10, 97, 0, 53);

/// The Service of the cluster's API, as kube-proxy would redirect it.
const API: &str = "table ip services {\n\
     chain in { type nat hook prerouting priority -100; ip daddr 10.96.0.1 tcp dport 443 dnat to API:6443; }\n\
     chain out { type nat hook output priority -100; ip daddr 10.96.0.1 tcp dport 443 dnat to API:6443; }\n}\n";

/// The nodes and processes. They end with it, and their Node objects too.
pub(super) struct Fleet<'a> {
    pub(super) world: &'a World,
    pub(super) clouds: Vec<Node>,
    pub(super) edges: Vec<Node>,
    processes: Vec<Process>,
}

impl<'a> Fleet<'a> {
    /// Starts a node in the cloud with this number and three edge nodes with the next ones. The other edge nodes get no
    /// `DaemonSet`. Returns `None` without a scheduler.
    pub(super) fn start(world: &'a World, number: u8) -> Option<Self> {
        Self::with_clouds(world, number, 1)
    }

    /// Starts the same with this many nodes in the cloud, which have the first numbers.
    pub(super) fn with_clouds(world: &'a World, number: u8, clouds: u8) -> Option<Self> {
        let cluster = &world.cluster;
        if !cluster.assets.join("kube-scheduler").exists() {
            crate::missing("kube-scheduler (tests/kube/assets/build)");
            return None;
        }
        let line = "label node edge-1 edge-2 causeway.io/edge-";
        cluster.kubectl(line).run().ok();
        let node = |number| Node::start(&world.folder, cluster, number);
        let numbers = number..number + clouds + 3;
        let mut clouds: Vec<_> = numbers.clone().map(node).collect();
        let edges = clouds.split_off(clouds.len() - 3);
        for (own, cloud) in numbers.clone().zip(&clouds) {
            let others = numbers.clone().filter(|other| *other != own);
            cloud.site.admits(&cloud.pods, others);
        }
        let mut fleet = Self {
            world,
            clouds,
            edges,
            processes: Vec::new(),
        };
        let archive = image::ours(&world.folder, BINARY);
        for node in fleet.nodes() {
            furnish(world, node, &archive.display().to_string());
        }
        fleet.belong_to_the_cloud();
        fleet.run();
        Some(fleet)
    }

    pub(super) fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.clouds.iter().chain(&self.edges)
    }

    /// The first node in the cloud.
    pub(super) fn cloud(&self) -> &Node {
        &self.clouds[0]
    }

    /// Makes the first nodes those of the cloud, as their pods' networks already are. The cluster's other node in the cloud is
    /// drained: its taint is the one of a cordoned node.
    fn belong_to_the_cloud(&self) {
        let cluster = &self.world.cluster;
        let names: Vec<_> = self.clouds.iter().map(|node| node.name.clone()).collect();
        for line in [
            format!(
                "label node {} causeway.io/edge- openyurt.io/is-edge-worker- node-role.kubernetes.io/control-plane=",
                names.join(" ")
            ),
            "label --overwrite node cloud-1 kubernetes.io/hostname=cloud-1".to_owned(),
            "taint --overwrite node cloud-1 node.kubernetes.io/unschedulable:NoSchedule".to_owned(),
        ] {
            cluster.kubectl(&line).run().ok();
        }
        // All addresses are routed, as on a machine of the cloud.
        for node in &self.clouds {
            let networks = node.path("cni/pods.conflist");
            let text = fs::read_to_string(&networks).unwrap();
            fs::write(networks, text.replace(&format!("{CLOUD}/32"), "0.0.0.0/0")).unwrap();
        }
    }

    fn run(&mut self) {
        let world = self.world;
        let config = format!(
            "--kubeconfig={}",
            world.cluster.pki.path("admin.kubeconfig")
        );
        let program = |name: &str| {
            let program = Program::new(world.cluster.assets.join(name));
            let program = program.args([&config]);
            program.words("--leader-elect=false --secure-port=0")
        };
        let controllers = program("kube-controller-manager");
        let controllers = controllers.args([format!("--controllers={CONTROLLERS}")]);
        let file = world.path("Corefile.fleet");
        let admin = world.cluster.pki.path("admin.kubeconfig");
        let text = format!(
            "cluster.local:53 {{\n bind {NAMES}\n kubernetes cluster.local {{\n kubeconfig {admin}\n }}\n}}\n"
        );
        fs::write(&file, text).unwrap();
        must(&format!("ip addr replace {NAMES}/24 dev cloud"));
        let names = Program::new(world.cluster.assets.join("coredns"));
        let names = names.args(["-conf".as_ref(), file.as_os_str()]);
        let start = |program: Program, log: &str| program.start(&world.path(log));
        let mut names = start(names, "fleet-names.log");
        names.says("CoreDNS-");
        self.processes = vec![
            start(controllers, "fleet-controllers.log"),
            start(program("kube-scheduler"), "fleet-scheduler.log"),
            names,
        ];
        for node in &self.edges {
            let www = node.path("www");
            fs::create_dir_all(&www).unwrap();
            fs::write(www.join("metrics"), "up 1\n").unwrap();
            for port in ["9100", "10255"] {
                let app = node.at(image::BUSYBOX).words("httpd -f -p");
                let app = app.args([format!("127.0.0.1:{port}")]).words("-h");
                let app = app.args([&www]).start(&node.path("app.log"));
                self.processes.push(app);
            }
        }
    }

    /// Waits until all pods of the two workloads are ready and of the newest version.
    pub(super) fn is_up(&self) {
        for what in [
            "-n causeway deployment/causeway-gateway",
            "-n causeway-edge daemonset/causeway-edge",
        ] {
            let line = format!("rollout status {what} --timeout=170s");
            let ran = self.world.cluster.kubectl(&line).within(3 * PATIENCE).run();
            assert_eq!(ran.code, Some(0), "{}{}", ran.stderr, self.state());
        }
    }

    /// Checks that the gateways are on nodes of the cloud that are not drained and were started once, and that all pods have this
    /// image.
    pub(super) fn runs(&self, image: &str) {
        let pods = self
            .world
            .cluster
            .get("pods -A -l app.kubernetes.io/name=causeway");
        let pods = pods.unwrap();
        let live = pods["items"].as_array().unwrap().iter();
        let live = live.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        for pod in live.filter(|pod| pod["status"]["phase"] == "Running") {
            assert_eq!(pod["spec"]["containers"][0]["image"], image);
            if pod["metadata"]["namespace"] == "causeway" {
                let node = &pod["spec"]["nodeName"];
                assert!(
                    self.clouds.iter().any(|cloud| *node == cloud.name),
                    "{pod:#}"
                );
                let container = &pod["status"]["containerStatuses"][0];
                assert_eq!(container["restartCount"], 0, "{pod:#}");
            }
        }
    }

    /// All pods, and the events of those that wait, for a message.
    fn state(&self) -> String {
        let show = |line: &str| self.world.cluster.kubectl(line).run().text();
        let events = show("get events -A --field-selector=type=Warning");
        let tail = events.lines().rev().take(30).collect::<Vec<_>>().join("\n");
        let logs = "logs -n causeway deployment/causeway-gateway --tail=20";
        format!(
            "{}{tail}{}",
            show("get pods -A -o wide --field-selector=metadata.namespace!=a"),
            show(logs)
        )
    }

    /// Runs `change` while requests go to all nodes. Returns the requests that were answered and those that failed.
    pub(super) fn under_requests(
        &self,
        (service, ask): Client<'_>,
        change: impl FnOnce(),
    ) -> Counted {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let asking = scope.spawn(|| self.asks_on((service, ask), &stop));
            let ends = Ends(&stop);
            change();
            drop(ends);
            let counted = asking.join().unwrap();
            if !counted.failed.is_empty() {
                eprintln!("{}", self.logs());
            }
            counted
        })
    }

    /// Returns the logs of all pods of the two workloads, for a message.
    fn logs(&self) -> String {
        let of = |namespace: &str| {
            let line = format!(
                "logs -n {namespace} -l app.kubernetes.io/name=causeway --prefix --all-containers --tail=-1"
            );
            let ran = self.world.cluster.kubectl(&line).run();
            format!("{}{}", ran.text(), ran.stderr)
        };
        ["causeway", "causeway-edge"].map(of).concat()
    }

    fn asks_on(&self, (service, ask): Client<'_>, stop: &AtomicBool) -> Counted {
        let mut counted = Counted::default();
        let begin = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            let gateways = service
                .map(|it| ready_behind(self.world, it))
                .unwrap_or_default();
            for (number, node) in self.edges.iter().enumerate() {
                let at = gateways.get((counted.answered + number) % gateways.len().max(1));
                let asked = begin.elapsed();
                let ran = ask(node, at.map(String::as_str));
                if ran.code == Some(0) {
                    counted.answered += 1;
                } else {
                    let (said, error) = (ran.text(), ran.stderr.trim());
                    let ended = begin.elapsed();
                    counted.failed.push(format!(
                        "{asked:.1?} to {ended:.1?}: {}: {at:?} {said} {error}",
                        node.name
                    ));
                }
            }
        }
        counted
    }
}

/// Sends a request to an app of this node. It succeeds if the app answers. The address is that of a ready gateway behind the
/// client's Service, if it has one.
pub(super) type Ask<'a> = &'a (dyn Fn(&Node, Option<&str>) -> ToolOutput + Sync);

/// A client, with the Service through which it reaches the gateways.
pub(super) type Client<'a> = (Option<&'static str>, Ask<'a>);

#[derive(Debug, Default)]
pub(super) struct Counted {
    pub(super) answered: usize,
    pub(super) failed: Vec<String>,
}

impl Counted {
    /// Prints the numbers, and checks that requests were sent.
    pub(super) fn report(&self, what: &str) -> &Self {
        let (answered, failed) = (self.answered, self.failed.len());
        eprintln!("counted: {what}: {answered} answered, {failed} failed");
        for line in &self.failed {
            eprintln!("counted:   {line}");
        }
        assert!(answered > 0, "{what}: {:#?}", self.failed);
        self
    }

    pub(super) fn none_failed(&self) {
        assert!(self.failed.is_empty(), "{:#?}", self.failed);
    }
}

impl Drop for Fleet<'_> {
    fn drop(&mut self) {
        let cluster = &self.world.cluster;
        for namespace in ["causeway", "causeway-edge"] {
            let line =
                format!("delete deployment,daemonset,pod -n {namespace} --all --timeout=50s");
            cluster.kubectl(&line).run();
        }
        self.processes.clear();
        let names: Vec<_> = self.nodes().map(|node| node.name.clone()).collect();
        for node in self.clouds.iter_mut().chain(&mut self.edges) {
            node.kubelet_dies();
        }
        for line in [
            format!("delete node {} --ignore-not-found", names.join(" ")),
            "label --overwrite node edge-1 edge-2 causeway.io/edge=true".to_owned(),
            "label node cloud-1 kubernetes.io/hostname-".to_owned(),
            "taint node cloud-1 node.kubernetes.io/unschedulable-".to_owned(),
        ] {
            cluster.kubectl(&line).run();
        }
    }
}

/// Has a node run pods: the images, the way to the API's Service, and no taint of a node that has just registered.
fn furnish(world: &World, node: &Node, archive: &str) {
    let cluster = &world.cluster;
    let name = &node.name;
    let registered = within(PATIENCE, || cluster.get(&format!("node {name}")).is_some());
    assert!(registered, "{name}");
    cluster.wait("default", &format!("node/{name}"), "Ready");
    cluster.gives_pods(name, &node.pods);
    let taint = format!("taint node {name} node.kubernetes.io/not-ready-");
    cluster.kubectl(&taint).run();
    let ctr = |line: &str| node.at("ctr").words("-n k8s.io images").words(line);
    ctr("import").args([archive]).run().ok();
    let [from, to] = VERSIONS.map(|name| format!("docker.io/library/{name}"));
    ctr("tag").args([from, to]).run().ok();
    let rules = API.replace("API", &CLOUD.to_string());
    node.at("nft").words("-f -").input(rules).run().ok();
    let rm = "rm -rf /var/lib/causeway-edge /var/lib/causeway";
    node.at("sh").args(["-c", rm]).run().ok();
}

/// Has an edge's pod use the cluster's DNS. In the tests its node has none.
pub(super) fn dns() -> serde_json::Value {
    let searches = ["causeway.svc.cluster.local"];
    json!({ "dnsPolicy": "None", "dnsConfig": { "nameservers": [NAMES], "searches": searches } })
}
