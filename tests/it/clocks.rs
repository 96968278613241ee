//! Gateways and edges whose wall clock is wrong, or is corrected while they run. What stands goes on, and what is refused names the
//! clock.

use crate::{
    peers::peers_of,
    world::{
        app::App,
        clock::WallClock,
        etcd::Etcd,
        process::{Causeway, GatewayProcess, OPEN, Process, causeway},
        tool::need,
        until,
    },
};
use std::{
    path::PathBuf,
    time::{Duration, SystemTime},
};
use tempfile::TempDir;
use test_summary::unused_port;
use tokio::time::sleep;

const URL: &str = "http://edge-1:9100/";

/// Time within which a gateway has checked the certificates of its peers again.
const TRUST_CHECK: Duration = Duration::from_secs(3);
const HOUR: Duration = Duration::from_hours(1);
const DAY: Duration = Duration::from_hours(24);

/// Returns a folder for a gateway, with a CA that is older than all offsets of clocks.
async fn folder_with_old_ca() -> TempDir {
    let (folder, past) = (tempfile::tempdir().unwrap(), WallClock::new("-30d"));
    let init = past.causeway().args(["ca", "init"]);
    let init = init.flag("--data-dir", folder.path().join("gateway"));
    init.run().await.ok();
    folder
}

/// Returns an edge with these data that knows one gateway.
fn edge_at(site: &GatewayProcess, data: PathBuf, app: &App) -> Causeway {
    let ports = format!("{{9100: {{target: \"127.0.0.1:{}\"}}}}", app.port());
    // An edge that was refused tries again soon.
    causeway("edge --admin-listen 127.0.0.1:0 --backoff-refused-max 1s")
        .flag("--gateway", &site.tunnel)
        .flag("--data-dir", data)
        .flag("--ports", ports)
}

/// Two gateways, of which the second one has a clock of its own, and a node at each.
struct Fleet {
    clock: WallClock,
    sites: [GatewayProcess; 2],
    edges: Vec<Process>,
    app: App,
}

impl Fleet {
    async fn start() -> Self {
        let (clock, app) = (WallClock::new("+0"), App::saying("here").await);
        let tunnels = [unused_port(), unused_port()].map(|port| format!("127.0.0.1:{port}"));
        let [first, second] = &tunnels;
        let configuration = format!("{OPEN}\npeers: {{ addresses: [\"{first}\", \"{second}\"] }}");
        let folder = folder_with_old_ca().await;
        let first = GatewayProcess::of(folder, first, &configuration).await;
        for node in ["edge-0", "edge-1", "edge-2"] {
            first.join(node, app.port()).await.stop().await.ok();
            first.forget_gateways(node);
        }
        let folder = first.copied_folder().await;
        let second = GatewayProcess::of_by(clock.causeway(), folder, second, &configuration);
        let second = Box::pin(second).await;
        let mut fleet = Self {
            clock,
            sites: [first, second],
            edges: Vec::new(),
            app,
        };
        for (node, number) in [("edge-0", 0), ("edge-1", 1)] {
            let edge = fleet.edge(node, number).start();
            fleet.edges.push(edge);
        }
        for (entry, node) in [(0, "edge-1"), (1, "edge-0")] {
            until(&format!("gateway {entry} knows {node}"), async || {
                fleet.sites[entry].node(node).await["state"] == "connected"
            })
            .await;
        }
        fleet
    }

    /// Returns the edge of a node, which knows one gateway.
    fn edge(&self, node: &str, number: usize) -> Causeway {
        edge_at(
            &self.sites[number],
            self.sites[0].edge_data(node),
            &self.app,
        )
    }

    /// Sets the clock of the second gateway, and waits until the gateway shows it.
    async fn set_clock(&self, offset: &str, is_ahead: bool, by: Duration) {
        self.clock.set(offset);
        until(&format!("the clock has the offset {offset}"), async || {
            let row = self.sites[1].node("edge-1").await;
            let shown = humantime::parse_rfc3339(row["last_seen"].as_str().unwrap()).unwrap();
            let now = SystemTime::now();
            let expected = if is_ahead { now + by } else { now - by };
            let difference = shown.duration_since(expected);
            difference.unwrap_or_else(|error| error.duration()) < HOUR / 2
        })
        .await;
    }

    async fn requests_succeed(&self) {
        for site in &self.sites {
            for node in ["edge-0", "edge-1"] {
                let answer = site.nobody().get(&format!("http://{node}:9100/")).await;
                assert_eq!(answer.status, 200, "{node}: {}", answer.text());
            }
        }
    }

    /// Returns the times at which the gateways have connected to each other.
    async fn peers_since(&self) -> Vec<String> {
        let mut since = Vec::new();
        for site in &self.sites {
            let peers = peers_of(site).await;
            since.extend(peers.iter().map(|peer| peer["since"].to_string()));
        }
        since
    }
}

#[tokio::test]
async fn a_gateway_whose_clock_jumps_keeps_its_tunnels_and_peers() {
    need!("faketime", "curl");
    let fleet = Box::pin(Fleet::start()).await;
    let since = fleet.peers_since().await;
    assert_eq!(since.len(), 2);
    for (offset, is_ahead, by) in [
        ("+1h", true, HOUR),
        ("+2d", true, DAY * 2),
        ("-1h", false, HOUR),
        ("-2d", false, DAY * 2),
    ] {
        fleet.set_clock(offset, is_ahead, by).await;
        // The gateways check each other's certificates without notice.
        sleep(TRUST_CHECK).await;
        fleet.requests_succeed().await;
        let mut edge = fleet.edge("edge-2", 1).start();
        if by == HOUR || is_ahead {
            edge.wait_for_line("tunnel registered").await;
        } else {
            edge.wait_for_line("check the clocks of both machines")
                .await;
            fleet.clock.set("+0");
            edge.wait_for_line("tunnel registered").await;
        }
        edge.stop().await.ok();
    }
    fleet.requests_succeed().await;
    assert_eq!(fleet.peers_since().await, since);
    for edge in &fleet.edges {
        assert_eq!(edge.written().count("tunnel ended"), 0);
    }
}

#[tokio::test]
async fn a_gateway_replaces_its_certificate_when_its_clock_is_corrected() {
    need!("faketime", "curl");
    let (clock, app) = (WallClock::new("-8d"), App::saying("here").await);
    let folder = folder_with_old_ca().await;
    let site = GatewayProcess::of_by(clock.causeway(), folder, "127.0.0.1:0", OPEN).await;
    let token = site.token("--node edge-1").await;
    let edge = site.edge("edge-1", app.port()).flag("--join", token);
    let mut edge = edge.start();
    edge.wait_for_line("check the clock").await;
    clock.set("+0");
    edge.wait_for_line("tunnel registered").await;
    let answer = site.nobody().get(URL).await;
    assert_eq!(answer.text(), "here");
}

#[tokio::test]
async fn an_edge_whose_clock_is_ahead_renews_once_and_names_the_clock() {
    need!("faketime", "curl");
    let (clock, app) = (WallClock::new("+2h"), App::saying("here").await);
    let lifetime = format!("{OPEN}\ntunnel: {{ edge_certificate_lifetime: 1h }}");
    let site = GatewayProcess::with_listeners(&lifetime).await;
    let edge = site.join("edge-1", app.port()).await;
    edge.stop().await.ok();
    let edge = site.edge_of(clock.causeway(), "edge-1", app.port());
    let mut edge = edge.start();
    edge.wait_for_line("this machine's clock is ahead of the gateway's; check the clock")
        .await;
    edge.wait_for_line("this node's certificate is renewed")
        .await;
    // Without the pause the next renewal follows after ten seconds.
    sleep(Duration::from_secs(12)).await;
    let renewed = edge.written().count("this node's certificate is renewed");
    assert_eq!(renewed, 1);
    let answer = site.nobody().get(URL).await;
    assert_eq!(answer.text(), "here");
}

/// The record of a node in the shared state has the time of its enrolment.
#[tokio::test]
async fn a_node_that_joined_under_a_wrong_clock_can_join_again() {
    need!("faketime", "etcd", "curl");
    let (etcd, clock) = (Etcd::start().await, WallClock::new("+2d"));
    let app = App::saying("here").await;
    let endpoint = etcd.url();
    let configuration = format!("{OPEN}\nstate: {{ etcd: {{ endpoints: [\"{endpoint}\"] }} }}");
    let folder = folder_with_old_ca().await;
    let right = GatewayProcess::of(folder, "127.0.0.1:0", &configuration).await;
    right.until_ready().await;
    let folder = tempfile::tempdir().unwrap();
    let wrong = GatewayProcess::of_by(clock.causeway(), folder, "127.0.0.1:0", &configuration);
    let wrong = Box::pin(wrong).await;
    let expired = right.token("--node edge-1").await;
    let token = right.token("--node edge-1 --ttl 7d").await;
    let refused = wrong.edge("edge-1", app.port()).flag("--join", expired);
    refused
        .run()
        .await
        .failed(&["the join token expired", "correct the clock"]);
    let edge = |site: &GatewayProcess| edge_at(site, wrong.edge_data("edge-1"), &app);
    let mut joined = edge(&wrong).flag("--join", &token).start();
    joined.wait_for_line("tunnel registered").await;
    joined.stop().await.ok();

    let mut refused = edge(&right).start();
    refused
        .wait_for_line("check the clocks of both machines")
        .await;
    refused.stop().await.ok();
    clock.set("+0");
    let token = right.token("--node edge-1").await;
    let rejoin = edge(&right).args(["--rejoin", "--join", &token]);
    let mut rejoined = rejoin.start();
    rejoined.wait_for_line("tunnel registered").await;
    assert_eq!(right.nobody().get(URL).await.text(), "here");
    rejoined.stop().await.ok();
    let mut elsewhere = edge(&wrong).start();
    elsewhere.wait_for_line("tunnel registered").await;
    let served = async || wrong.nobody().get(URL).await.status == 200;
    until("the node is served there as well", served).await;
}
