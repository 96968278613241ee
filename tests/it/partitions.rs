//! Partitions of three gateways: packets of one of them do not arrive at another one, while edges, clients and the third gateway
//! reach both; or one of them and the edges do not reach each other.
//!
//! Each gateway runs on a host of its own. Requests for nodes with tunnels at two gateways succeed at every gateway. A node that is
//! at the unreachable gateway alone gets an error that says so.

use crate::{
    peers::{peers_of, status},
    world::{
        app::{App, answer},
        client::Answer,
        netns::{Host, NEED, SharedNetwork},
        process::{GatewayProcess, Process},
        tool::need,
        until,
    },
};
use futures_util::future::join_all;
use serde_json::Value;
use std::{
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    time::Duration,
};
use tokio::time::{Instant, timeout};

/// Tunnel port of each gateway.
const PORT: u16 = 10262;

/// Time for a request that may have been sent on a tunnel which the partition has cut.
const ATTEMPT: Duration = Duration::from_secs(5);

/// Time for requests that another gateway does not accept: three attempts of 7 s each, and a slow machine.
const UNACCEPTED: Duration = Duration::from_secs(30);

/// Nodes, each with the numbers of the gateways that hold it.
const NODES: [(&str, &[usize]); 4] = [
    ("edge-0", &[0]),
    ("edge-1", &[1]),
    ("edge-0-2", &[0, 2]),
    ("edge-1-2", &[1, 2]),
];

/// Three gateways on hosts of a network, and their edges on another host.
struct Fleet<'a> {
    hosts: Vec<Host<'a>>,
    edge_host: Host<'a>,
    sites: Vec<GatewayProcess>,
    _edges: Vec<Process>,
    app: App,
}

impl<'a> Fleet<'a> {
    /// Starts gateways with these settings of `tunnel`.
    async fn start(network: &'a SharedNetwork, settings: &str) -> Self {
        let edge_host = network.host();
        let app = {
            let _there = edge_host.enter();
            let was_asked = AtomicBool::new(false);
            App::http(move |head| match head.path().as_str() {
                "/silent" => answer::silence(),
                "/silent-once" if !was_asked.swap(true, SeqCst) => answer::silence(),
                _ => answer::ok("here"),
            })
            .await
        };
        let hosts: Vec<_> = (0..3).map(|_| network.host()).collect();
        let tunnels: Vec<_> = hosts.iter().map(tunnel).collect();
        let configuration = |host: &Host<'_>| {
            format!(
                "listeners: [{{ name: web, protocol: http, listen: \"{}:0\", port: 9100, anonymous: true }}]\n\
                 peers: {{ addresses: [{}] }}\ntimeouts: {{ reconnect: 2s }}\ntunnel: {{ {settings} }}",
                host.address(),
                tunnels.join(", ")
            )
        };
        let first = GatewayProcess::on_host(&hosts[0], PORT, &configuration(&hosts[0])).await;
        for (node, _) in NODES {
            first.join(node, app.port()).await.stop().await.ok();
            first.forget_gateways(node);
        }
        let mut sites = vec![first];
        for host in &hosts[1..] {
            let configuration = configuration(host);
            let site = sites[0].replica_on_host(host, PORT, &configuration);
            let site = site.await;
            sites.push(site);
        }
        let edges = NODES.map(|(node, holders)| {
            let gateways: Vec<_> = holders.iter().map(|at| tunnels[*at].as_str()).collect();
            let edge = edge_host
                .causeway()
                .args(["edge", "--tunnels-gateways", "every"]);
            edge.flag("--admin-listen", "127.0.0.1:0")
                .flag("--timeouts-silence", "20m")
                .flag("--gateways", gateways.join(","))
                .flag("--data-dir", sites[0].edge_data(node))
                .flag(
                    "--ports",
                    format!("{{9100: {{target: \"127.0.0.1:{}\"}}}}", app.port()),
                )
                .start()
        });
        let fleet = Self {
            hosts,
            edge_host,
            sites,
            _edges: edges.into(),
            app,
        };
        fleet.until_complete().await;
        fleet
    }

    /// Waits until each gateway knows both others, and all holders of each node.
    async fn until_complete(&self) {
        for site in &self.sites {
            until("all gateways and nodes are known", async || {
                let peers = peers_of(site).await;
                let is_connected =
                    |peer: &Value| peer["synchronized"] == true && peer["state"] == "connected";
                if peers.len() != 2 || !peers.iter().all(is_connected) {
                    return false;
                }
                for (node, holders) in NODES {
                    let row = site.node(node).await;
                    let at_peers = row["gateways"].as_array().map_or(0, Vec::len);
                    let own = usize::from(row["tunnels"] != 0);
                    if at_peers + own != holders.len() {
                        return false;
                    }
                }
                true
            })
            .await;
        }
    }

    async fn get(&self, entry: usize, node: &str, path: &str) -> Answer {
        self.ask(entry, "GET", node, path).await
    }

    async fn ask(&self, entry: usize, method: &str, node: &str, path: &str) -> Answer {
        let client = self.sites[entry].nobody();
        let url = format!("http://{node}:9100{path}");
        client.ask(method, &url, "").await
    }

    /// Lets no packet pass between a gateway and the edges.
    fn cut_off_from_edges(&self, gateway: usize) {
        let gateway = &self.hosts[gateway];
        gateway.drop_packets_of(&self.edge_host);
        self.edge_host.drop_packets_of(gateway);
    }

    /// Requests each node at each gateway, except those that only the gateway behind the partition holds.
    async fn requests_succeed(&self, pair: [usize; 2]) {
        let requests = (0..3).flat_map(|entry| NODES.map(|(node, holders)| (entry, node, holders)));
        let is_reachable = |(entry, _, holders): &(usize, &str, &[usize])| {
            !pair.contains(entry) || holders.contains(entry) || holders.contains(&2)
        };
        let reachable = requests.filter(is_reachable);
        join_all(reachable.map(|(entry, node, _)| async move {
            let answer = self.get(entry, node, "/").await;
            let text = answer.text();
            assert_eq!(answer.status, 200, "{node} at gateway {entry}: {text}");
        }))
        .await;
    }

    /// Whether a gateway shows another one as a peer.
    async fn shows(&self, site: usize, other: usize) -> bool {
        let address = tunnel(&self.hosts[other]);
        let peers = peers_of(&self.sites[site]).await;
        peers.iter().any(|peer| peer["address"] == *address)
    }

    /// Waits until a gateway has suspected another one and then given it up, which its metrics and its status show.
    async fn until_given_up(&self, site: usize, other: usize) {
        let count = async |state: &str| {
            let metrics = self.sites[site].metrics().await;
            metrics.sum("peers", &[("state", state)])
        };
        let what = format!("gateway {site} suspects gateway {other}");
        until(&what, async || count("suspect").await == 1).await;
        let what = format!("gateway {site} has given gateway {other} up");
        until(&what, async || !self.shows(site, other).await).await;
        let what = format!("gateway {site} counts only the third gateway");
        until(&what, async || {
            (count("connected").await, count("suspect").await) == (1, 0)
        })
        .await;
        let shown = status(&self.sites[site]).await.stdout;
        let (_, others) = shown.split_once("OTHER GATEWAY").unwrap();
        let is_shown = |gateway: usize| others.contains(&tunnel(&self.hosts[gateway]));
        assert!(is_shown(2) && !is_shown(other), "{shown}");
    }

    /// Requests a node that only the other gateway holds, before and after that one has been given up.
    async fn requests_fail(&self, entry: usize, other: usize) {
        let node = NODES[other].0;
        // The partition is not known yet.
        let early = ["GET", "POST"].map(|method| self.ask(entry, method, node, "/"));
        let early = timeout(UNACCEPTED, join_all(early)).await;
        for early in early.expect("the requests fail long before the link is closed") {
            let text = early.text();
            assert_eq!(early.status, 502, "{text}");
            let says = format!("the gateway that has the tunnel of {node} does not answer");
            assert!(text.contains(&says), "{text}");
        }
        let is_given_up = async || !self.shows(entry, other).await;
        until("the other gateway is given up", is_given_up).await;
        let late = self.get(entry, node, "/").await;
        let (text, holder) = (late.text(), tunnel(&self.hosts[other]));
        assert_eq!(
            (late.status, late.reason()),
            (503, "node_not_connected".into())
        );
        assert!(
            text.contains(&format!("by the gateway at {holder}")),
            "{text}"
        );
    }

    /// Checks that a stream through a link that the partition has cut ends with an error.
    async fn held_stream_ends(&self, entry: usize, other: usize) {
        let answer = self.get(entry, NODES[other].0, "/silent").await;
        let reason = answer.reason();
        assert_eq!((answer.status, reason.as_str()), (502, "tunnel_lost"));
    }

    /// Returns the number of open files of each gateway.
    fn open_files(&self) -> Vec<usize> {
        let sites = self.sites.iter();
        sites.map(|site| site.gateway.usage().files).collect()
    }

    async fn open_streams(&self) -> u64 {
        let mut open = 0;
        for site in &self.sites {
            open += site.metrics().await.sum("open_streams", &[]);
        }
        open
    }
}

/// Returns the address of the tunnel port of the gateway on a host.
fn tunnel(host: &Host<'_>) -> String {
    format!("{}:{PORT}", host.address())
}

/// No packet of the gateway `from` arrives at the gateway `to`, which are the first two.
async fn partition(from: usize, to: usize) {
    need!(NEED, "curl");
    let network = SharedNetwork::new();
    // The test has to see the time between suspicion and giving up, also on a slow machine.
    let fleet = &Box::pin(Fleet::start(&network, "close_after: 30s")).await;
    fleet.requests_succeed([from, to]).await;
    let files = fleet.open_files();
    let both = [(from, to), (to, from)];
    let cutting = async {
        for holder in [from, to] {
            let (node, _) = NODES[holder];
            until(&format!("{node} has a stream"), async || {
                let row = fleet.sites[holder].node(node).await;
                row["details"][0]["streams"] == 1
            })
            .await;
        }
        fleet.hosts[to].drop_packets_of(&fleet.hosts[from]);
        let failing = both.map(|(entry, other)| fleet.requests_fail(entry, other));
        let knowing = both.map(|(site, other)| fleet.until_given_up(site, other));
        let succeeding = async {
            while fleet.shows(from, to).await || fleet.shows(to, from).await {
                fleet.requests_succeed([from, to]).await;
            }
            fleet.requests_succeed([from, to]).await;
        };
        tokio::join!(join_all(failing), join_all(knowing), succeeding);
    };
    let held = both.map(|(entry, other)| fleet.held_stream_ends(entry, other));
    tokio::join!(join_all(held), Box::pin(cutting));
    fleet.hosts[to].accept_packets();
    fleet.until_complete().await;
    for (entry, other) in both {
        assert_eq!(fleet.get(entry, NODES[other].0, "/").await.status, 200);
    }
    until("no stream and no further connection is open", async || {
        let mut now = fleet.open_files().into_iter().zip(&files);
        fleet.open_streams().await == 0 && now.all(|(now, before)| now <= *before)
    })
    .await;
}

#[tokio::test]
async fn a_partition_from_the_first_gateway_to_the_second_is_survived() {
    Box::pin(partition(0, 1)).await;
}

#[tokio::test]
async fn a_partition_from_the_second_gateway_to_the_first_is_survived() {
    Box::pin(partition(1, 0)).await;
}

/// Nothing but a request without an answer shows here that the edges are out of reach: no tunnel is ever suspect.
#[tokio::test]
async fn a_gateway_without_its_edges_soon_reaches_their_nodes_through_another_one() {
    need!(NEED, "curl");
    let network = SharedNetwork::new();
    let fleet = &Box::pin(Fleet::start(&network, "ping_after: 10m")).await;
    fleet.cut_off_from_edges(0);
    until("a request reaches the node", async || {
        let answer = timeout(ATTEMPT, fleet.get(0, "edge-0-2", "/")).await;
        answer.is_ok_and(|answer| answer.status == 200)
    })
    .await;
    let metrics = fleet.sites[0].metrics().await;
    assert_eq!(metrics.sum("suspect_tunnels", &[]), 0);
}

/// The requests have no response when the edges get out of reach. Only those without effects reach the app again.
#[tokio::test]
async fn requests_on_a_cut_tunnel_are_answered_through_another_gateway() {
    need!(NEED, "curl");
    let network = SharedNetwork::new();
    let fleet = &Box::pin(Fleet::start(&network, "")).await;
    let (node, before) = ("edge-0-2", fleet.app.requests());
    let cutting = async {
        until("both requests are at the app", async || {
            fleet.app.requests() == before + 2
        })
        .await;
        fleet.cut_off_from_edges(0);
        Instant::now()
    };
    let getting = async {
        let answer = fleet.get(0, node, "/silent-once").await;
        (answer, Instant::now())
    };
    let posting = fleet.ask(0, "POST", node, "/silent");
    let ((answer, answered_at), posted, cut_at) = tokio::join!(getting, posting, cutting);
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(answered_at - cut_at < ATTEMPT, "{:?}", answered_at - cut_at);
    assert_eq!(
        (posted.status, posted.reason()),
        (502, "tunnel_lost".into())
    );
    assert_eq!(fleet.app.requests(), before + 3);
    let metrics = fleet.sites[0].metrics().await;
    assert_eq!(metrics.sum("requests_repeated_total", &[]), 1);
}
