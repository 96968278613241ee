//! Prometheus of Debian finds nodes by the gateway's service discovery, and scrapes them through the gateway's proxy.
//!
//! Real processes. With `CAUSEWAY_TEST_FULL=1` Prometheus must also have no failed scrape of any node that stays.

use crate::world::{
    app::App,
    process::{GatewayProcess, Process},
    tool::{Running, Tool, full, need, prometheus},
    until,
};
use futures_util::future::join_all;
use serde_json::{Value, json};
use std::{collections::BTreeSet, fs};
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
        let file = site.path("prometheus.yaml");
        fs::write(&file, config.to_string()).unwrap();
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
