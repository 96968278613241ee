//! Prometheus of Debian finds nodes by the gateway's service discovery, and scrapes them through the gateway's proxy.
//!
//! Real processes, also as an authenticated client of a listener with TLS. With `CAUSEWAY_TEST_FULL=1` Prometheus must also
//! have no failed scrape of any node that stays.

use crate::world::{
    app::App,
    process::{GatewayProcess, Process, causeway},
    tool::{Running, Tool, full, need, prometheus},
    until,
};
use futures_util::future::join_all;
use serde_json::{Value, json};
use std::{collections::BTreeSet, fs};
use tempfile::TempDir;
use test_summary::unused_port;

/// Listener that is a proxy and has the list of nodes, without TLS. A scrape does not wait for a lost tunnel.
const PROXY: &str = "timeouts: { reconnect: 0s }\nlisteners: [{ name: proxy, protocol: connect, listen: \"127.0.0.1:0\", plaintext_networks: [127.0.0.0/8], anonymous: true }]";
const EDGES: usize = 20;
const DYING: usize = 5;

fn node(number: usize) -> String {
    format!("edge-{number}")
}

/// Instances of these edges.
fn instances(numbers: impl IntoIterator<Item = usize>) -> BTreeSet<String> {
    let instances = numbers
        .into_iter()
        .map(|number| format!("{}:9100", node(number)));
    instances.collect()
}

/// Prometheus with a job for each of the gateway's lists.
struct Prometheus {
    address: String,
    _process: Running,
}

impl Prometheus {
    fn start(site: &GatewayProcess) -> Self {
        // The interval limits the time of a scrape: a shorter one would fail on a slow machine.
        let seconds = "5s";
        let proxy = format!("http://{}", site.listener);
        let job = |name: &str, url: String| {
            json!({
                "job_name": name, "proxy_url": proxy,
                "http_sd_configs": [{ "url": url, "refresh_interval": "1s" }],
                "relabel_configs": [{ "source_labels": ["__meta_causeway_node"], "target_label": "node" }],
            })
        };
        let config = json!({
            "global": { "scrape_interval": seconds, "scrape_timeout": seconds },
            "scrape_configs": [
                job("admin", format!("http://{}/api/v1/http_sd?port=9100", site.admin)),
                job("client", format!("{proxy}/.well-known/causeway/http_sd?port=9100")),
            ],
        });
        Self::with_config(site, &config.to_string())
    }

    fn with_config(site: &GatewayProcess, config: &str) -> Self {
        let file = site.path("prometheus.yaml");
        fs::write(&file, config).unwrap();
        let address = format!("127.0.0.1:{}", unused_port());
        let process = Tool::new(prometheus().unwrap())
            .args([format!("--config.file={}", file.display())])
            .args([format!(
                "--storage.tsdb.path={}",
                site.path("prometheus").display()
            )])
            .args([format!("--web.listen-address={address}")])
            .args(["--log.level=error"])
            .start();
        Self {
            address,
            _process: process,
        }
    }

    /// Returns the response to a query; null until Prometheus serves.
    async fn get(&self, path: &str, query: &str) -> Value {
        let url = format!("http://{}/api/v1/{path}", self.address);
        let asked = Tool::curl().args(["--get", "--data-urlencode"]);
        let ran = asked.args([format!("query={query}"), url]).run().await;
        serde_json::from_slice(&ran.stdout).unwrap_or_default()
    }

    /// Returns the nodes' instances for which the query has this value in both jobs.
    async fn instances(&self, query: &str, value: &str) -> BTreeSet<String> {
        let answer = self.get("query", query).await;
        let series = answer["data"]["result"].as_array().into_iter().flatten();
        let series = series.filter(|series| series["value"][1] == value);
        let instance = |series: &Value, job: &str| {
            let labels = &series["metric"];
            let instance = labels["instance"].as_str()?;
            assert_eq!(labels["node"].as_str()?, instance.strip_suffix(":9100")?);
            (labels["job"] == job).then(|| instance.to_owned())
        };
        let series: Vec<_> = series.collect();
        let of = |job| {
            series
                .iter()
                .filter_map(move |series| instance(series, job))
        };
        let (admin, client): (BTreeSet<_>, BTreeSet<_>) =
            (of("admin").collect(), of("client").collect());
        &admin & &client
    }

    /// Waits until exactly these edges are up, and exactly those are down.
    async fn until_up(&self, what: &str, up: BTreeSet<String>, down: BTreeSet<String>) {
        until(what, async || {
            self.instances("up", "1").await == up && self.instances("up", "0").await == down
        })
        .await;
    }
}

/// Joins all edges, whose app has one metric.
async fn join(site: &GatewayProcess, app: &App) -> Vec<Process> {
    let names: Vec<_> = (0..EDGES).map(node).collect();
    join_all(names.iter().map(|node| site.join(node, app.port()))).await
}

#[tokio::test]
async fn killed_edges_are_down_until_they_return_and_all_others_stay_up() {
    need!("curl", "prometheus");
    let app = App::saying("well 1\n").await;
    let site = Box::pin(GatewayProcess::with_listeners(PROXY)).await;
    let mut edges = Box::pin(join(&site, &app)).await;
    let prometheus = Prometheus::start(&site);
    let (all, none) = (|| instances(0..EDGES), BTreeSet::new());
    prometheus.until_up("all are up", all(), none.clone()).await;
    until("the metric of all is known", async || {
        prometheus.instances("well", "1").await == all()
    })
    .await;

    for edge in edges.drain(..DYING) {
        edge.kill().await;
    }
    let (dead, rest) = (instances(0..DYING), instances(DYING..EDGES));
    prometheus
        .until_up("the killed are down", rest.clone(), dead.clone())
        .await;
    until("the targets show the reason", async || {
        let targets = prometheus.get("targets", "").await;
        let targets = targets["data"]["activeTargets"].as_array().unwrap();
        targets.iter().all(|target| {
            let is_dead = dead.contains(target["labels"]["instance"].as_str().unwrap());
            let error = target["lastError"].as_str().unwrap();
            error.contains("503") == is_dead
        })
    })
    .await;

    for number in 0..DYING {
        let mut edge = site.edge(&node(number), app.port()).start();
        edge.wait_for_line("tunnel registered").await;
        edges.push(edge);
    }
    prometheus.until_up("all are up again", all(), none).await;
    if full() {
        let always = prometheus.instances("min_over_time(up[1h])", "1").await;
        assert_eq!(always, rest);
    }
}

/// Returns a file of `examples/prometheus` with other addresses. Panics if it does not contain one of them.
fn example(name: &str, addresses: &[(&str, &str)]) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/prometheus");
    let text = fs::read_to_string(format!("{folder}/{name}")).unwrap();
    replace_all(&text, addresses)
}

/// Replaces texts. Panics if one of them is not there.
fn replace_all(text: &str, replaced: &[(&str, &str)]) -> String {
    replaced.iter().fold(text.to_owned(), |text, (from, to)| {
        assert!(text.contains(from), "no {from} in {text}");
        text.replace(from, to)
    })
}

/// Starts an edge with the example's configuration, whose node exporter is `app`.
async fn start_example_edge(site: &GatewayProcess, node: &str, app: u16) -> Process {
    let admin = unused_port();
    let ports = [("9100: {}", 9100, app), ("10266: {}", 10266, admin)];
    let ports = ports.map(|(from, port, target)| {
        let to = format!("{port}: {{ target: \"127.0.0.1:{target}\" }}");
        (from, to)
    });
    let [app, admin_port] = ports.each_ref().map(|(from, to)| (*from, to.as_str()));
    let gateway = ("gw.example.com:10262", site.tunnel.as_str());
    let file = site.path(&format!("{node}.yaml"));
    fs::write(&file, example("edge.yaml", &[gateway, app, admin_port])).unwrap();
    let token = site.token(&format!("--node {node} --pool mill")).await;
    let mut edge = causeway("edge")
        .flag("--config", file)
        .flag("--admin-listen", format!("127.0.0.1:{admin}"))
        .flag("--data-dir", site.edge_data(node))
        .flag("--join", token)
        .start();
    edge.wait_for_line("tunnel registered").await;
    edge
}

/// The configuration that users are told to copy: the edges' own metrics arrive through their tunnels.
#[tokio::test]
async fn the_example_scrapes_the_edges_and_their_nodes() {
    need!("curl", "prometheus");
    let exporter = App::saying("node_load1 1\n").await;
    let gateway = [
        ("gw.example.com:10262", "127.0.0.1:0"),
        ("127.0.0.1:3128", "127.0.0.1:0"),
    ];
    let listeners = example("gateway.yaml", &gateway);
    let listeners = &listeners[listeners.find("listeners:").unwrap()..];
    let site = Box::pin(GatewayProcess::with_listeners(listeners)).await;
    let _first = start_example_edge(&site, "edge-1", exporter.port()).await;
    let _second = start_example_edge(&site, "edge-2", exporter.port()).await;
    let addresses = [
        ("127.0.0.1:10265", &*site.admin),
        ("127.0.0.1:3128", &*site.listener),
    ];
    let config = format!(
        "global: {{ scrape_interval: 1s }}\n{}",
        example("prometheus.yaml", &addresses)
    );
    let prometheus = Prometheus::with_config(&site, &config);
    let url = format!("http://{}/.well-known/causeway/http_sd", site.listener);
    let listed = Tool::curl().args([url]).run().await.ok().json();
    let targets: Vec<_> = listed.as_array().unwrap().iter().collect();
    let targets: Vec<_> = targets.iter().map(|group| &group["targets"]).collect();
    let expected = ["edge-1", "edge-2"];
    let expected = expected.map(|node| json!([format!("{node}:9100"), format!("{node}:10266")]));
    assert_eq!(json!(targets), json!(expected), "the listener's own list");
    for (query, job) in [("causeway_edge_tunnels", "edges"), ("node_load1", "nodes")] {
        until(query, async || {
            let answer = prometheus.get("query", query).await;
            let series = answer["data"]["result"].as_array().into_iter().flatten();
            let nodes: BTreeSet<_> = series
                .map(|series| &series["metric"])
                .filter(|labels| labels["job"] == job && labels["pool"] == "mill")
                .map(|labels| labels["node"].to_string())
                .collect();
            nodes == ["\"edge-1\"", "\"edge-2\""].map(str::to_owned).into()
        })
        .await;
    }
}

/// Returns the block of the page about Prometheus that contains `part`, with other texts. Panics if one of them is not there.
fn page_block(part: &str, replaced: &[(&str, &str)]) -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/howto/prometheus.md");
    let page = fs::read_to_string(page).unwrap();
    let mut blocks = page.split("```yaml\n").skip(1);
    let block = blocks.find_map(|rest| {
        let (block, _) = rest.split_once("```").unwrap();
        block.contains(part).then(|| block.to_owned())
    });
    replace_all(&block.unwrap(), replaced)
}

/// The job of the page for services behind the nodes: only the services that it keeps are scraped, at their own ports.
#[tokio::test]
async fn a_job_for_services_scrapes_exporters_behind_the_nodes() {
    need!("curl", "prometheus");
    let (exporter, other) = (App::saying("well 1\n").await, App::saying("well 2\n").await);
    let site = Box::pin(GatewayProcess::with_listeners(PROXY)).await;
    let services = format!(
        "{{plc-exporter: \"127.0.0.1:{}\", printer: \"127.0.0.1:{}\"}}",
        exporter.port(),
        other.port()
    );
    drop(site.join("edge-1", other.port()).await);
    let mut edge = site.edge("edge-1", other.port());
    edge = edge.flag("--services", services);
    let mut edge = edge.start();
    edge.wait_for_line("tunnel registered").await;
    let job = page_block(
        "job_name: services",
        &[
            ("127.0.0.1:10265", &site.admin),
            ("127.0.0.1:3128", &site.listener),
        ],
    );
    let config = format!("global: {{ scrape_interval: 1s }}\n{job}");
    let prometheus = Prometheus::with_config(&site, &config);
    let mut found = Value::Null;
    until("the exporter is scraped", async || {
        let answer = prometheus.get("query", "well").await;
        found = answer["data"]["result"].clone();
        found.as_array().is_some_and(|series| !series.is_empty())
    })
    .await;
    let (instance, node) = (&found[0]["metric"]["instance"], &found[0]["metric"]["node"]);
    let expected = format!("plc-exporter.edge-1:{}", exporter.port());
    assert_eq!((instance, node), (&json!(expected), &json!("edge-1")));
    assert_eq!(
        (&found[0]["value"][1], found.as_array().unwrap().len()),
        (&json!("1"), 1)
    );
}

/// Configurations of the page for a Prometheus elsewhere: the gateway's, with a policy and a file of tokens, and the jobs.
struct Remote {
    site: GatewayProcess,
    tokens: TempDir,
}

impl Remote {
    /// A gateway whose client `prometheus` has a certificate, and a token in the file `token`.
    async fn start() -> Self {
        let tokens = tempfile::tempdir().unwrap();
        let file = |name: &str| tokens.path().join(name).display().to_string();
        fs::write(file("policy.yaml"), page_block("rules:", &[])).unwrap();
        let made = causeway("client token --name prometheus").flag("--file", file("clients"));
        fs::write(file("token"), made.run().await.ok().stdout.trim()).unwrap();
        let accepted = format!(
            "names: [localhost]\n    client_auth: {{ tokens: {} }}",
            file("clients")
        );
        let listeners = page_block(
            "protocol: connect",
            &[
                ("0.0.0.0:10443", "127.0.0.1:0"),
                ("names: [gw.example.com]", &accepted),
                ("/etc/causeway/policy.yaml", &file("policy.yaml")),
            ],
        );
        let site = Box::pin(GatewayProcess::with_listeners(&listeners)).await;
        let made = causeway("client certificate --name prometheus")
            .flag("--out", site.path(""))
            .flag("--data-dir", site.data());
        made.run().await.ok();
        Self { site, tokens }
    }

    /// The page's job, and the same with the token in place of the certificate.
    fn config(&self) -> String {
        let port = self.site.listener.rsplit_once(':').unwrap().1;
        let gateway = format!("localhost:{port}");
        let path = |name: &str| self.site.path(name).display().to_string();
        let ca = self.site.data().join("ca.pem").display().to_string();
        let jobs = page_block(
            ".well-known/causeway/http_sd",
            &[
                ("gw.example.com:10443", &gateway),
                ("/etc/prometheus/ca.pem", &ca),
                ("/etc/prometheus/prometheus.pem", &path("prometheus.pem")),
                (
                    "/etc/prometheus/prometheus-key.pem",
                    &path("prometheus-key.pem"),
                ),
            ],
        );
        let file = self.tokens.path().join("token");
        let token = fs::read_to_string(&file).unwrap();
        let by_token = json!({
            "job_name": "by token",
            "proxy_url": format!("https://prometheus:{token}@{gateway}"),
            "enable_http2": false,
            "tls_config": { "ca_file": ca },
            "http_sd_configs": [{
                "url": format!("https://{gateway}/.well-known/causeway/http_sd?port=9100"),
                "authorization": { "type": "Bearer", "credentials_file": file },
                "tls_config": { "ca_file": ca },
            }],
            "relabel_configs": [{ "source_labels": ["__meta_causeway_node"], "target_label": "node" }],
        });
        format!("global: {{ scrape_interval: 1s }}\n{jobs}  - {by_token}\n")
    }
}

/// A Prometheus that is not on the gateway's host proves its identity to the list and to the proxy, and finds only the nodes that
/// it may reach.
#[tokio::test]
async fn a_remote_prometheus_scrapes_the_nodes_that_it_may_reach() {
    need!("curl", "prometheus");
    let app = App::saying("well 1\n").await;
    let remote = Box::pin(Remote::start()).await;
    let site = &remote.site;
    let _first = site.join("edge-1", app.port()).await;
    let _second = site.join("edge-2", app.port()).await;
    let _hidden = site.join("other", app.port()).await;
    let prometheus = Prometheus::with_config(site, &remote.config());
    let expected: BTreeSet<_> = ["nodes", "by token"]
        .into_iter()
        .flat_map(|job| ["edge-1", "edge-2"].map(|node| (job.to_owned(), node.to_owned())))
        .collect();
    for query in ["well", "up"] {
        let mut found = BTreeSet::new();
        until(query, async || {
            let answer = prometheus.get("query", &format!("{query} == 1")).await;
            let series = answer["data"]["result"].as_array().into_iter().flatten();
            let series = series.map(|series| &series["metric"]);
            let label = |labels: &Value, name| labels[name].as_str().unwrap().to_owned();
            let names = series.map(|labels| (label(labels, "job"), label(labels, "node")));
            found = names.collect();
            found.is_superset(&expected)
        })
        .await;
        assert_eq!(found, expected, "{query}");
    }
}
