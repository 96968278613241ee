//! A world for one test: a gateway with its own CA, edges that joined with tokens, apps, clients.
//!
//! All of it runs in this process, on port 0 of loopback and in a temporary directory that is removed with it. A test waits
//! for conditions with a time limit, never for a time. The logs of the gateway and its edges are stored, so that a test can
//! compare an answer with its access record.

pub(crate) mod admin;
pub(crate) mod app;
pub(crate) mod authority;
pub(crate) mod client;
pub(crate) mod clock;
pub(crate) mod cluster;
pub(crate) mod edge;
pub(crate) mod etcd;
pub(crate) mod evil;
pub(crate) mod frames;
pub(crate) mod gateway;
pub(crate) mod issuer;
pub(crate) mod link;
pub(crate) mod log;
pub(crate) mod names;
pub(crate) mod netns;
pub(crate) mod process;
pub(crate) mod recorder;
pub(crate) mod tool;
pub(crate) mod transfer;

use causeway_certs::{Ca, JoinToken, LeafCertificate, NodeAttributes, NodeName, Store};
use causeway_gateway::{BindError, Config, ReloadSummary, state::NodesWriter};
use client::{Client, ListenerAddress};
use gateway::{Build, Running};
use log::Log;
use serde_json::Value;
use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};
use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};
use tool::Tool;

/// Limit of a wait for an event that takes milliseconds on an idle machine.
pub(crate) const PATIENCE: Duration = Duration::from_mins(2);
/// Least and greatest pause between two checks of a condition.
const LOOK: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(100)];
/// Lifetime of the certificates issued here.
pub(crate) const LIFE: Duration = Duration::from_hours(1);
/// A name in the certificate of every listener that is no node's name.
pub(crate) const GATEWAY_NAME: &str = "gateway.test";

/// A gateway and the other parts of a test.
pub(crate) struct World {
    gateway: Option<Running>,
    build: Build,
    ca: Ca,
    files: AtomicUsize,
}

impl World {
    /// Starts one gateway on this test's own thread, with an `https` listener for clients with a certificate.
    pub(crate) async fn start() -> Self {
        Self::build().start().await
    }

    /// The same, for a test that changes it before it starts.
    pub(crate) fn build() -> Build {
        Build::new()
    }

    /// An edge before it joins.
    pub(crate) fn edge(&self, node: &str) -> edge::Plan<'_> {
        edge::Plan::new(self, node)
    }

    /// A client at the `https` listener with a certificate of the world's CA.
    pub(crate) fn client(&self) -> Client {
        self.client_at("https")
    }

    /// The same at another listener.
    pub(crate) fn client_at(&self, listener: &str) -> Client {
        let leaf = self.client_leaf("tester");
        Client::new(self.place(listener), self.ca.root(), self.log()).certificate(&leaf)
    }

    /// A client's certificate by the world's CA.
    pub(crate) fn client_leaf(&self, name: &str) -> LeafCertificate {
        self.ca.issue_client(name, &[], LIFE).unwrap()
    }

    /// curl with the world's CA and a client's certificate; every URL leads to the `https` listener.
    pub(crate) fn curl<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Tool {
        let leaf = self.client_leaf("curl");
        let both = format!("{}{}", leaf.chain_pem(), leaf.key_pem().expose());
        let certificate = self.write(&both);
        let to = format!("::{}", self.listener("https"));
        Tool::curl()
            .args([Path::new("--cacert"), &self.root_path()])
            .args([Path::new("--cert"), &certificate])
            .args(["--connect-to", &to])
            .args(arguments)
    }

    /// The address of a listener.
    pub(crate) fn listener(&self, name: &str) -> SocketAddr {
        let found = self.gateway().addresses.listener(name);
        found.unwrap_or_else(|| panic!("no listener {name:?} with an address"))
    }

    /// Returns the address of a listener for clients.
    pub(crate) fn place(&self, listener: &str) -> ListenerAddress {
        self.gateway().place(listener)
    }

    /// The table of nodes, for tests that take the place of a cluster.
    pub(crate) fn nodes(&self) -> &NodesWriter {
        &self.gateway().nodes
    }

    /// The tunnel port.
    pub(crate) fn tunnel(&self) -> SocketAddr {
        self.gateway().addresses.tunnel
    }

    /// The admin listener.
    pub(crate) fn admin(&self) -> SocketAddr {
        self.gateway().addresses.admin
    }

    /// The DNS server.
    pub(crate) fn dns(&self) -> SocketAddr {
        self.gateway().addresses.dns.expect("there is a DNS server")
    }

    /// The world's CA.
    pub(crate) fn ca(&self) -> &Ca {
        &self.ca
    }

    /// The file of its root, for `--cacert`.
    pub(crate) fn root_path(&self) -> PathBuf {
        self.store().root_path()
    }

    /// The gateway's data directory.
    pub(crate) fn store(&self) -> Store {
        gateway::store(self.folder())
    }

    /// A directory that is removed with the world.
    pub(crate) fn folder(&self) -> &Path {
        self.build.folder()
    }

    /// Writes a private file with this text.
    pub(crate) fn write(&self, text: &str) -> PathBuf {
        let number = self.files.fetch_add(1, Ordering::SeqCst);
        let path = self.folder().join(format!("file-{number}.pem"));
        std::fs::write(&path, text).unwrap();
        path
    }

    /// A join token for this node.
    pub(crate) fn token(&self, node: &str, life: Duration) -> JoinToken {
        let node = NodeName::parse(node).unwrap();
        let tokens = self.store().tokens().unwrap();
        tokens
            .create(&node, life, NodeAttributes::default())
            .unwrap()
    }

    /// Returns the log so far.
    pub(crate) fn log(&self) -> Log {
        self.build.log()
    }

    /// The gateway's metrics now.
    pub(crate) async fn metrics(&self) -> Metrics {
        Metrics(self.admin_text("/metrics").await.1)
    }

    /// Returns the response of the admin listener.
    pub(crate) async fn admin_text(&self, path: &str) -> (u16, String) {
        let admin = self.admin();
        let client = Client::new(ListenerAddress::Plain(admin), self.ca.root(), self.log());
        let answer = client.get(&format!("http://{admin}{path}")).await;
        (answer.status, answer.text())
    }

    /// Returns the admin API's row of a node; null if there is none.
    pub(crate) async fn node(&self, node: &str) -> Value {
        let (status, text) = self.admin_text(&format!("/api/v1/edges/{node}")).await;
        match status {
            200 => serde_json::from_str(&text).unwrap(),
            _ => Value::Null,
        }
    }

    /// Waits until the gateway has this many tunnels of a node.
    pub(crate) async fn until_tunnels(&self, node: &str, tunnels: usize) {
        let what = format!("{node} has {tunnels} tunnels");
        until(&what, async || {
            self.node(node).await["tunnels"].as_u64().unwrap_or(0) == tunnels as u64
        })
        .await;
    }

    /// Waits until no client's stream is open.
    pub(crate) async fn until_idle(&self) {
        until("no stream is open", async || {
            self.metrics().await.sum("open_streams", &[]) == 0
        })
        .await;
    }

    /// Stops the gateway in order and waits for its end.
    pub(crate) async fn stop_gateway(&mut self) {
        let running = self.gateway.take().expect("the gateway runs");
        running.stop().await;
    }

    /// Gives the running gateway a changed configuration. After a restart it has the old one.
    pub(crate) fn reload(
        &mut self,
        change: impl FnOnce(&mut Config),
    ) -> Result<ReloadSummary, BindError> {
        self.reload_with(change, None::<fn()>)
    }

    /// Gives the gateway a changed configuration. Applies `rules` when the old listeners have stopped.
    pub(crate) fn reload_with(
        &mut self,
        change: impl FnOnce(&mut Config),
        rules: Option<impl FnOnce()>,
    ) -> Result<ReloadSummary, BindError> {
        self.gateway
            .as_mut()
            .expect("the gateway runs")
            .reload(change, rules)
    }

    /// Requests the gateway's shutdown; it drains meanwhile.
    pub(crate) fn drain_gateway(&self) {
        self.gateway().ask();
    }

    /// Ends the gateway without a shutdown.
    pub(crate) async fn kill_gateway(&mut self) {
        let running = self.gateway.take().expect("the gateway runs");
        running.kill().await;
    }

    /// Starts it again, at the same addresses.
    pub(crate) async fn start_gateway(&mut self) {
        assert!(self.gateway.is_none(), "the gateway runs");
        self.gateway = Some(self.build.run().await);
    }

    fn gateway(&self) -> &Running {
        self.gateway.as_ref().expect("the gateway runs")
    }
}

/// The metrics of one scrape.
pub(crate) struct Metrics(String);

impl Metrics {
    /// The sum of all series of `causeway_gateway_NAME` that have these labels.
    pub(crate) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        let series = self.0.lines().filter_map(|line| {
            let rest = line.strip_prefix("causeway_gateway_")?.strip_prefix(name)?;
            let (found, value) = rest.rsplit_once(' ')?;
            let named = found.is_empty() || found.starts_with('{');
            let labelled = labels
                .iter()
                .all(|(label, value)| found.contains(&format!("{label}=\"{value}\"")));
            (named && labelled).then(|| value.parse::<u64>().unwrap())
        });
        series.sum()
    }

    /// Returns the value of `causeway_gateway_NAME`, which has no labels.
    pub(crate) fn seconds(&self, name: &str) -> f64 {
        let series = format!("causeway_gateway_{name} ");
        let mut lines = self.0.lines();
        let value = lines.find_map(|line| line.strip_prefix(&series));
        value.unwrap().parse().unwrap()
    }

    /// Returns the number of streams of a listener that ended with this result.
    pub(crate) fn outcomes(&self, listener: &str, outcome: &str) -> u64 {
        self.sum(
            "streams_total",
            &[("listener", listener), ("outcome", outcome)],
        )
    }
}

/// Waits until a condition holds. The longer that takes, the less often it is checked, because many checks start a program.
pub(crate) async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let [least, greatest] = LOOK;
    let begun = Instant::now();
    let looking = async {
        while !holds().await {
            sleep((begun.elapsed() / 16).clamp(least, greatest)).await;
        }
    };
    let held = timeout(PATIENCE, looking).await;
    assert!(held.is_ok(), "not within {PATIENCE:?}: {what}");
}

/// A directory for a world.
fn folder() -> TempDir {
    tempfile::Builder::new()
        .prefix("causeway-it-")
        .tempdir()
        .unwrap()
}
