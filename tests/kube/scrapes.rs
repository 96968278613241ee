//! Released metrics-server and Prometheus, at kubelets behind NAT.
//!
//! Both run in the cloud with the configuration of `examples/scrapes`, which has the gateway's CA and the kind of address
//! to dial. They connect to kube-apiserver's own listener, with the tokens of their accounts. RBAC decides their access.

use std::{
    fs,
    path::{Path, PathBuf},
};

use libtest_mimic::Trial;
use serde_json::{Value, json};

use crate::{
    missing,
    steps::{self, NODES},
    world::{
        Way, World, assets,
        causeway::Clients,
        cluster::Cluster,
        net::CLOUD,
        process::{PATIENCE, Process, Program, within},
        world,
    },
};

/// Path of the gateway's CA in the pods of both scrapers, as in the example.
const CA: &str = "/etc/causeway/ca.crt";

/// Address of Prometheus.
const PROMETHEUS: &str = "127.0.0.1:9090";

/// In this setup.
pub(crate) fn trials(name: &str, way: Way) -> Vec<Trial> {
    let top = trial(
        &format!("by_{name}_kubectl_top_shows_nodes_and_pods"),
        "metrics-server",
        move |program| kubectl_top_shows_nodes_and_pods(way, program),
    );
    let scraped = trial(
        &format!("by_{name}_prometheus_scrapes_kubelets_while_it_may"),
        "prometheus",
        move |program| prometheus_scrapes_kubelets_while_it_may(way, program),
    );
    vec![top, scraped]
}

/// A test with a program that not every folder of Kubernetes programs has.
fn trial(name: &str, program: &'static str, test: impl FnOnce(&Path) + Send + 'static) -> Trial {
    Trial::test(format!("scrapes::{name}"), move || {
        let file = assets::folder().expect("the outer program has checked");
        let file = file.join(program);
        if file.exists() {
            test(&file);
        } else {
            missing(&format!("{program} (tests/kube/assets/build)"));
        }
        Ok(())
    })
}

fn example(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/scrapes");
    fs::read_to_string(folder.join(name)).unwrap()
}

/// A process beside the API server, which reaches it while it runs.
struct MetricsServer<'a> {
    cluster: &'a Cluster,
    process: Process,
}

impl Drop for MetricsServer<'_> {
    fn drop(&mut self) {
        let delete = "delete apiservice v1beta1.metrics.k8s.io";
        // A failed test has a more important message.
        self.cluster.kubectl(delete).run();
    }
}

impl<'a> MetricsServer<'a> {
    /// Creates all of the example's objects, and starts the program of its Deployment here.
    fn start(world: &'a World, way: Way, program: &Path) -> Self {
        let cluster = &world.cluster;
        let name = "metrics-server.kube-system.svc";
        cluster.pki.server("metrics-server", &[name], &[]);
        let pki = |name: &str| cluster.pki.path(name);
        let signer = data_encoding::BASE64.encode(&fs::read(pki("ca.pem")).unwrap());
        let objects = example("metrics-server.yaml").replace(
            "insecureSkipTLSVerify: true",
            &format!("caBundle: {signer}"),
        );
        cluster.kubectl("apply -f -").input(objects).run().ok();
        cluster.apply(&json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {
                "name": "metrics-server", "namespace": "kube-system",
                "labels": { "kubernetes.io/service-name": "metrics-server" },
            },
            "addressType": "IPv4",
            "endpoints": [{ "addresses": [CLOUD], "conditions": { "ready": true } }],
            "ports": [{ "name": "https", "port": 10251, "protocol": "TCP" }],
        }));
        let account = cluster.token("kube-system", "metrics-server");
        let account = cluster.with_token("metrics-server", &account);
        let road = world.the_road();
        let folder = world.path("metrics-server");
        fs::create_dir_all(&folder).unwrap();
        let here = [
            (CA, road.ca().display().to_string()),
            ("=Hostname", format!("={}", dialled(way))),
            (
                "--cert-dir=/tmp",
                format!("--cert-dir={}", folder.display()),
            ),
            ("resolution=15s", "resolution=10s".to_owned()),
        ];
        let mut process = road
            .finding(way, program)
            .args(arguments(cluster).into_iter().map(|argument| {
                here.iter()
                    .fold(argument, |text, (theirs, ours)| text.replace(theirs, ours))
            }))
            .args([
                format!("--kubeconfig={account}"),
                format!("--authentication-kubeconfig={account}"),
                format!("--authorization-kubeconfig={account}"),
                format!("--tls-cert-file={}", pki("metrics-server.pem")),
                format!("--tls-private-key-file={}", pki("metrics-server.key")),
            ])
            .words("--kubelet-request-timeout=9s")
            .start(&folder.join("log"));
        process.says("Serving securely");
        Self { cluster, process }
    }

    /// Waits until kubectl prints this for this command.
    fn says(&self, line: &str, holds: impl Fn(&str) -> bool) {
        let mut message = String::new();
        let there = within(2 * PATIENCE, || {
            let ran = self.cluster.kubectl(line).run();
            message = format!("{}{}", ran.text(), ran.stderr);
            ran.code == Some(0) && holds(&message)
        });
        let log = self.process.output();
        assert!(there, "{line}: {message}\n{log}");
    }
}

/// Returns the arguments that the Deployment gives to its container.
fn arguments(cluster: &Cluster) -> Vec<String> {
    let deployment = cluster.get("deployment -n kube-system metrics-server");
    let container = &deployment.unwrap()["spec"]["template"]["spec"]["containers"][0];
    serde_json::from_value(container["args"].clone()).unwrap()
}

/// The type of the nodes' addresses that are dialled.
fn dialled(way: Way) -> &'static str {
    match way {
        Way::Names(_) => "Hostname",
        _ => "InternalIP",
    }
}

fn kubectl_top_shows_nodes_and_pods(way: Way, program: &Path) {
    let mut world = world();
    world.lets_in(way, Clients::Scrapers);
    // The listener's first clients still work, now that the cluster reviews all of its clients.
    steps::logs_and_exec(&mut world);
    let server = MetricsServer::start(&world, way, program);
    server.says("top nodes --no-headers", |message| {
        NODES.iter().all(|(_, node)| has_figures(message, node))
    });
    for (namespace, _) in NODES {
        // Figures of this node's pods, and of no others.
        let line = format!("top pods -n {namespace} --no-headers");
        server.says(&line, |message| {
            ["ticker", "echo", "silent"]
                .iter()
                .all(|pod| has_figures(message, pod))
        });
    }
    let raw = "get --raw /apis/metrics.k8s.io/v1beta1/nodes";
    let message = world.cluster.kubectl(raw).run().ok();
    let message: Value = serde_json::from_slice(&message.stdout).unwrap();
    let mut figures: Vec<_> = items(&message["items"])
        .map(|node| {
            let memory = node["usage"]["memory"].as_str().unwrap_or_default();
            (node["metadata"]["name"].as_str(), memory.len() > 2)
        })
        .collect();
    figures.sort_unstable();
    let wanted = [(Some("edge-1"), true), (Some("edge-2"), true)];
    assert_eq!(figures, wanted, "{message:#}");
}

/// Whether one of these lines has this name, with millicores and mebibytes.
fn has_figures(message: &str, name: &str) -> bool {
    message.lines().any(|line| {
        let mut words = line.split_whitespace();
        let of = words.next() == Some(name);
        let figure = |unit: &str| {
            let mut found = words.clone().filter_map(|word| word.strip_suffix(unit));
            found.find_map(|figure| figure.parse::<u64>().ok())
        };
        of && figure("m").is_some() && figure("Mi").is_some()
    })
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

/// Prometheus, with the example's configuration and the token of its account.
struct Prometheus {
    process: Process,
    token: PathBuf,
    ca: PathBuf,
}

impl Prometheus {
    fn start(world: &World, way: Way, program: &Path) -> Self {
        let cluster = &world.cluster;
        cluster.apply_example("scrapes/rbac.yaml");
        let folder = world.path("prometheus");
        fs::create_dir_all(&folder).unwrap();
        let token = folder.join("token");
        fs::write(&token, cluster.token("monitoring", "prometheus")).unwrap();
        let road = world.the_road();
        let api = format!(
            "role: node, api_server: 'https://{CLOUD}:6443', tls_config: {{ ca_file: {} }}, \
             authorization: {{ credentials_file: {} }}",
            cluster.pki.path("ca.pem"),
            token.display(),
        );
        let text = example("prometheus.yaml")
            .replace(CA, &road.ca().display().to_string())
            .replace(
                "/var/run/secrets/kubernetes.io/serviceaccount/token",
                &token.display().to_string(),
            )
            .replace("role: node", &api)
            .replace("scrape_interval: 30s", "scrape_interval: 1s");
        let names = |line: &&str| dialled(way) == "Hostname" || !line.contains("__address__");
        let text: Vec<_> = text.lines().filter(names).collect();
        let file = folder.join("prometheus.yaml");
        fs::write(&file, text.join("\n")).unwrap();
        let file = |name: &str, file: PathBuf| format!("--{name}={}", file.display());
        let process = road
            .finding(way, program)
            .args([
                file("config.file", folder.join("prometheus.yaml")),
                file("storage.tsdb.path", folder.join("data")),
                format!("--web.listen-address={PROMETHEUS}"),
            ])
            .start(&folder.join("log"));
        Self {
            process,
            token,
            ca: road.ca(),
        }
    }

    /// Returns the listener's whole response to such a request.
    fn refused(&self, way: Way) -> String {
        let names = format!("edge-1:10250:{CLOUD}");
        let (place, lead) = match way {
            Way::Names(_) => ("edge-1", ["--resolve", &names]),
            _ => ("10.1.1.11", ["--noproxy", "*"]),
        };
        let token = fs::read_to_string(&self.token).unwrap();
        let asked = Program::new("curl")
            .words("-q -sS --cacert")
            .args([&self.ca]);
        let asked = asked
            .args(lead)
            .args(["-H", &format!("Authorization: Bearer {token}")]);
        let asked = asked.args([format!("https://{place}:10250/metrics")]);
        asked.run().ok().text()
    }

    /// The node in the instance, its label of this name, and the value, of each series.
    fn query(query: &str, label: &str) -> Vec<[String; 3]> {
        let message = asked("query", query);
        let mut found: Vec<_> = items(&message["data"]["result"])
            .map(|series| {
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                let labels = &series["metric"];
                [&labels["instance"], &labels[label], &series["value"][1]].map(text)
            })
            .collect();
        found.sort();
        found
    }

    /// Waits until a query has this result.
    fn knows(&self, (query, label): (&str, &str), wanted: &[[&str; 3]]) {
        let mut found = Vec::new();
        let there = within(PATIENCE, || {
            found = Self::query(query, label);
            found == wanted
        });
        let targets = asked("targets", "");
        let log = self.process.output();
        assert!(there, "{query}: {found:?}\n{targets:#}\n{log}");
    }
}

/// Returns the response of Prometheus' API.
fn asked(path: &str, query: &str) -> Value {
    let ran = Program::new("curl")
        .words("-q -sS --get --data-urlencode")
        .args([format!("query={query}")])
        .args([format!("http://{PROMETHEUS}/api/v1/{path}")])
        .run();
    serde_json::from_slice(&ran.stdout).unwrap_or_default()
}

/// The example's.
const JOBS: [&str; 2] = ["edge-cadvisor", "edge-kubelets"];

fn prometheus_scrapes_kubelets_while_it_may(way: Way, program: &Path) {
    let mut world = world();
    world.lets_in(way, Clients::Scrapers);
    let prometheus = Prometheus::start(&world, way, program);
    let all = |value| {
        let of = |node| JOBS.map(|job| [node, job, value]);
        [of("edge-1"), of("edge-2")].concat()
    };
    prometheus.knows(("up", "job"), &all("1"));
    let nodes = [["edge-1", "edge-1", "1"], ["edge-2", "edge-2", "1"]];
    prometheus.knows(("kubelet_node_name", "node"), &nodes);
    let pods = "group by (instance, namespace) (container_memory_usage_bytes{pod=\"ticker\"})";
    let pods = (pods, "namespace");
    prometheus.knows(pods, &[["edge-1", "a", "1"], ["edge-2", "b", "1"]]);
    for target in items(&asked("targets", "")["data"]["activeTargets"]) {
        let place = if dialled(way) == "Hostname" {
            "https://edge-"
        } else {
            "https://10.1."
        };
        let url = target["scrapeUrl"].as_str().unwrap();
        assert!(
            url.starts_with(place) && target["health"] == "up",
            "{target:#}"
        );
    }
    let delete = "delete clusterrolebinding prometheus";
    world.cluster.kubectl(delete).run().ok();
    prometheus.knows(("up", "job"), &all("0"));
    for target in items(&asked("targets", "")["data"]["activeTargets"]) {
        // The listener has kube-apiserver's format of errors, whose body has the rest.
        let wanted = "server returned HTTP status 502 Bad Gateway";
        assert_eq!(target["lastError"], wanted, "{target:#}");
    }
    let message = prometheus.refused(way);
    let wanted = "the cluster does not allow system:serviceaccount:monitoring:prometheus to get nodes/metrics of edge-1";
    assert!(message.contains(wanted), "{message}");
}
