//! A gateway whose control connection to another one is slow, while the connections for requests are not.

use crate::{
    peers::{peers_of, status},
    world::{
        app::App,
        link::Link,
        process::{GatewayProcess, Process, causeway},
        tool::need,
        until,
    },
};
use std::{net::SocketAddr, time::Duration};
use test_summary::unused_port;

/// Delay in each direction with which a probe is answered too late for a healthy gateway, and in time for a live one.
const LATE: Duration = Duration::from_secs(4);
/// Delay in each direction with which no probe is answered in time.
const TOO_LATE: Duration = Duration::from_secs(10);
/// Log message about a peer that is connected.
const CONNECTED: &str = "connected to another gateway";
/// Log message about a peer that is lost.
const LOST: &str = "lost the connection to another gateway";

/// Two gateways that reach each other through links, and a node at each.
struct Fleet {
    sites: [GatewayProcess; 2],
    /// The link by which the first gateway dials the second one.
    link: Link,
    _way_back: Link,
    edges: Vec<Process>,
    app: App,
}

impl Fleet {
    /// Starts the gateways with these further keys.
    async fn start(further: &str) -> Self {
        let app = App::saying("here").await;
        let tunnels =
            [unused_port(), unused_port()].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let (link, way_back) = (Link::to(tunnels[1]).await, Link::to(tunnels[0]).await);
        // With one worker there is one connection for requests.
        let configuration = |to: &Link| {
            format!(
                "listeners: [{{ name: web, protocol: http, listen: \"127.0.0.1:0\", port: 9100, anonymous: true }}]\n\
                 workers: 1\ntimeouts: {{ reconnect: 2s }}\npeers: {{ addresses: [\"{}\"] }}\n{further}",
                to.address()
            )
        };
        let [first, second] = tunnels.map(|tunnel| tunnel.to_string());
        let first = GatewayProcess::listening(&first, &configuration(&link)).await;
        for node in ["edge-0", "edge-1", "edge-2"] {
            first.join(node, app.port()).await.stop().await.ok();
            first.forget_gateways(node);
        }
        let configuration = configuration(&way_back);
        let second = Box::pin(first.replica_with(&second, &configuration)).await;
        let mut fleet = Self {
            sites: [first, second],
            link,
            _way_back: way_back,
            edges: Vec::new(),
            app,
        };
        fleet.edge("edge-0", 0);
        fleet.edge("edge-1", 1);
        for (entry, node) in [(0, "edge-1"), (1, "edge-0")] {
            fleet.until_known(entry, node).await;
        }
        fleet
    }

    /// Starts the edge of a node at one gateway.
    fn edge(&mut self, node: &str, number: usize) {
        let ports = format!("{{9100: {{target: \"127.0.0.1:{}\"}}}}", self.app.port());
        let edge = causeway("edge --admin-listen 127.0.0.1:0 --tunnels-gateways one")
            .flag("--gateways", &self.sites[number].tunnel)
            .flag("--data-dir", self.sites[0].edge_data(node))
            .flag("--ports", ports);
        self.edges.push(edge.start());
    }

    /// Waits until a gateway knows that the other one holds a node, and has a connection for requests.
    async fn until_known(&self, entry: usize, node: &str) {
        let site = &self.sites[entry];
        until(&format!("gateway {entry} knows {node}"), async || {
            let peers = peers_of(site).await;
            let row = site.node(node).await;
            row["gateways"].as_array().is_some_and(|all| all.len() == 1)
                && peers.len() == 1
                && peers[0]["links"] == 1
        })
        .await;
    }

    /// Delays the control connection of the first gateway, and those that are opened from now on.
    fn delay_control(&self, time: Duration) {
        let opened = self.link.opened();
        self.link.delay(time, opened - 1..opened);
    }

    /// Requests a node. Returns whether the request succeeded. A request that fails says why.
    async fn request(&self, entry: usize, node: &str) -> bool {
        let client = self.sites[entry].nobody();
        let answer = client.get(&format!("http://{node}:9100/")).await;
        let text = answer.text();
        if answer.status == 200 {
            return true;
        }
        let error = (answer.status, answer.reason());
        assert_eq!(error, (503, "node_not_connected".to_owned()), "{text}");
        let holder = format!("by the gateway at {}", self.link.address());
        assert!(text.contains(&holder), "{text}");
        false
    }

    fn logged(&self, part: &str) -> usize {
        self.sites[0].gateway.written().count(part)
    }

    /// Returns the lag of the second gateway, in seconds, that `causeway status` shows at the first one.
    async fn shown_lag(&self) -> f64 {
        let table = status(&self.sites[0]).await.stdout;
        let mut rows = table
            .lines()
            .skip_while(|line| !line.starts_with("OTHER GATEWAY"));
        assert!(rows.next().unwrap().contains(" LAG "), "{table}");
        let row = rows.next().unwrap_or_default();
        let cells: Vec<&str> = row.split_whitespace().rev().collect();
        let [version, "s", lag, ..] = cells[..] else {
            panic!("{table}");
        };
        assert_eq!(version, env!("CARGO_PKG_VERSION"), "{table}");
        lag.parse().unwrap()
    }

    /// Returns whether the peer is suspect, and for how many seconds a probe has been unanswered.
    async fn suspicion(&self) -> (bool, f64) {
        let metrics = self.sites[0].metrics().await;
        let is_suspect = metrics.sum("peers", &[("state", "suspect")]) == 1;
        (is_suspect, metrics.seconds("peer_lag_seconds"))
    }
}

#[tokio::test]
async fn late_probes_of_a_peer_fail_no_request_and_end_no_connection() {
    need!("curl");
    // A machine that stops for seconds must not make an answer too late for a live gateway.
    let mut fleet = Box::pin(Fleet::start("tunnel: { close_after: 5m }\n")).await;
    let connections = fleet.link.opened();
    fleet.delay_control(LATE);
    fleet.edge("edge-2", 1);
    for _ in 0..2 {
        for suspect in [true, false] {
            until(&format!("the peer is suspect: {suspect}"), async || {
                assert!(fleet.request(0, "edge-1").await, "the peer is not lost");
                let (is_suspect, lag) = fleet.suspicion().await;
                is_suspect == suspect && (lag > 1.0 || !suspect)
            })
            .await;
        }
    }
    until("the lag is shown at each place", async || {
        let first = &fleet.sites[0];
        let peer_lag = peers_of(first).await[0]["lag_ms"].as_f64().unwrap();
        let metric = first.metrics().await.seconds("peer_lag_seconds");
        peer_lag > 1_000.0 && metric > 1.0 && fleet.shown_lag().await > 1.0
    })
    .await;
    fleet.until_known(0, "edge-2").await;
    assert!(fleet.request(0, "edge-2").await);
    fleet.link.delay(Duration::ZERO, 0..0);
    until("the peer answers at once", async || {
        let peers = peers_of(&fleet.sites[0]).await;
        peers[0]["lag_ms"] == 0.0 && fleet.suspicion().await == (false, 0.0)
    })
    .await;
    assert_eq!((fleet.logged(LOST), fleet.link.opened()), (0, connections));
}

#[tokio::test]
async fn a_peer_that_is_too_slow_is_given_up_once_and_returns() {
    need!("curl");
    let fleet = Box::pin(Fleet::start("")).await;
    // The log follows the state.
    until("the connection is logged", async || {
        fleet.logged(CONNECTED) > 0
    })
    .await;
    let connected = fleet.logged(CONNECTED);
    fleet.delay_control(TOO_LATE);
    until("the peer is given up", async || {
        assert!(fleet.request(1, "edge-0").await, "the way back is not slow");
        !fleet.request(0, "edge-1").await
    })
    .await;
    until("the loss is logged", async || fleet.logged(LOST) > 0).await;
    assert!(peers_of(&fleet.sites[0]).await.is_empty());
    let opened = fleet.link.opened();
    until("two attempts have failed", async || {
        assert!(fleet.request(1, "edge-0").await, "the way back is not slow");
        assert!(!fleet.request(0, "edge-1").await, "the peer is given up");
        fleet.link.opened() > opened + 2
    })
    .await;
    assert_eq!(
        (fleet.logged(LOST), fleet.logged(CONNECTED)),
        (1, connected)
    );
    fleet.link.delay(Duration::ZERO, 0..0);
    fleet.until_known(0, "edge-1").await;
    assert!(fleet.request(0, "edge-1").await);
    until("the new connection is logged", async || {
        fleet.logged(CONNECTED) > connected
    })
    .await;
    assert_eq!(
        (fleet.logged(LOST), fleet.logged(CONNECTED)),
        (1, connected + 1)
    );
}
