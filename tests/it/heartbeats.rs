//! A node that loses its gateway and whose kubelet is alive: another member of its pool reports that, and its Lease is renewed.

use crate::world::{
    cluster::Cluster,
    netns::{HUB, Host, NEED, SharedNetwork, Switch},
    process::{GatewayProcess, OPEN, Process, address_after},
    tool::need,
    until,
};
use axum::{Router, http::StatusCode, routing::get};
use futures_util::future::join_all;
use serde_json::{Value, json};
use std::{net::Ipv4Addr, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::watch,
    task::JoinSet,
    time::Instant,
};

const DELEGATED: &str = "openyurt.io/delegate-heartbeat";
const ANNOTATION: &str = "causeway.io/delegated-heartbeat";
const POOL: &str = "apps.openyurt.io/nodepool";
/// Port of the kubelet's health check.
const HEALTHZ: u16 = 10248;
/// Age of a Lease whose node renews it.
const FRESH: Duration = Duration::from_secs(1);
/// Interval at which a kubelet renews the Lease of its node.
const KUBELET_INTERVAL: Duration = Duration::from_secs(10);
/// Age of a Lease whose node is cut off.
const OLD: Duration = Duration::from_secs(20);

/// A gateway of a cluster.
struct Cloud {
    cluster: Cluster,
    site: GatewayProcess,
}

impl Cloud {
    async fn start(enabled: bool) -> Self {
        let cluster = Cluster::at(HUB).await;
        let kubernetes = json!({
            "kubeconfig": cluster.kubeconfig(),
            "heartbeats": { "enabled": enabled, "threshold": 2 },
        });
        let readers = json!({ "resources": ["v1/services"] });
        // The edges wait 6 s for a byte. With the usual 5 s between two PINGs, a pause of a second would cut off a node.
        let configuration = format!(
            "{OPEN}\ntunnel: {{ ping_after: 1s }}\nkubernetes: {kubernetes}\napi_cache: {readers}"
        );
        let site = GatewayProcess::listening(&format!("{HUB}:0"), &configuration).await;
        Self { cluster, site }
    }

    async fn count(&self, result: &str) -> u64 {
        let metrics = self.site.metrics().await;
        metrics.sum("delegated_heartbeats_total", &[("result", result)])
    }

    fn is_delegated(&self, node: &str) -> bool {
        self.cluster.lease(node)["metadata"]["annotations"][DELEGATED] == "true"
    }

    fn renew_time(&self, node: &str) -> String {
        let lease = self.cluster.lease(node);
        lease["spec"]["renewTime"].as_str().unwrap().to_owned()
    }

    fn is_tainted(&self, node: &str) -> bool {
        let node = self.cluster.object(node);
        let taints = node["spec"]["taints"].as_array();
        taints.is_some_and(|taints| {
            let mut taints = taints.iter();
            taints.any(|taint| taint["key"] == "node.openyurt.io/unschedulable")
        })
    }
}

/// The health check of a kubelet.
struct Kubelet {
    alive: watch::Sender<bool>,
    _serving: JoinSet<()>,
}

impl Kubelet {
    fn on(host: &Host<'_>) -> Self {
        let there = host.enter();
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, HEALTHZ)).unwrap();
        drop(there);
        listener.set_nonblocking(true).unwrap();
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        let alive = watch::Sender::new(true);
        let known = Arc::new(alive.subscribe());
        let healthz = move || {
            let known = known.clone();
            async move {
                if *known.borrow() {
                    StatusCode::OK
                } else {
                    StatusCode::INTERNAL_SERVER_ERROR
                }
            }
        };
        let router = Router::new().route("/healthz", get(healthz));
        let mut serving = JoinSet::new();
        serving.spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self {
            alive,
            _serving: serving,
        }
    }
}

/// A node with its edge.
struct Node<'a> {
    name: &'static str,
    host: Host<'a>,
    kubelet: Kubelet,
    edge: Process,
    admin: u16,
}

impl<'a> Node<'a> {
    async fn join(
        cloud: &Cloud,
        (street, switch): (&'a SharedNetwork, &Switch),
        (name, pool): (&'static str, &str),
    ) -> Self {
        cloud.cluster.node_with_pods(name, true, &[], &[]);
        cloud.cluster.labels(name, POOL, pool);
        cloud.cluster.renews(name, FRESH);
        let host = street.host();
        let kubelet = Kubelet::on(&host);
        let at = format!("{}:10271", switch.takes(&host));
        let token = cloud.site.token(&format!("--node {name}")).await;
        let edge = cloud.site.edge_of(host.causeway(), name, 1);
        let members = json!({ "listen": at, "addresses": [at] });
        let api_cache = json!({ "resources": ["v1/services"], "members": members });
        let edge = edge.flag("--api-cache", api_cache.to_string());
        let edge = edge.flag("--heartbeat", "{}").flag("--join", token);
        let mut edge = edge.flag("--timeouts-silence", "6s").start();
        let admin = address_after(&edge.wait_for_line("edge is running").await, "admin=");
        let (_, port) = admin.rsplit_once(':').unwrap();
        let admin = port.parse().unwrap();
        Self {
            name,
            host,
            kubelet,
            edge,
            admin,
        }
    }

    /// Starts nodes in these pools, and waits until each knows the members of its pool.
    async fn join_all<const N: usize>(
        cloud: &Cloud,
        place: (&'a SharedNetwork, &Switch),
        pools: [&str; N],
    ) -> [Self; N] {
        let names = ["edge-1", "edge-2", "edge-3"].into_iter();
        let joining = names
            .zip(pools)
            .map(|named| Self::join(cloud, place, named));
        let nodes = join_all(joining).await;
        for (node, pool) in nodes.iter().zip(pools) {
            let is_in_pool = |other: &&&str| **other == pool;
            node.knows(pools.iter().filter(is_in_pool).count()).await;
        }
        nodes.try_into().ok().unwrap()
    }

    async fn ask(&self, path: &str) -> String {
        let mut stream = self.host.dial(self.admin).unwrap();
        let request = format!("GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    async fn status(&self) -> Value {
        let answer = self.ask("/status").await;
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        serde_json::from_str(body).unwrap()
    }

    /// Waits until the node knows so many members of its pool.
    async fn knows(&self, count: usize) {
        until("the members are known", async || {
            let status = self.status().await;
            let members = status["api_cache"]["members"].as_array();
            members.is_some_and(|members| members.len() == count)
                && status["heartbeat"]["kubelet"] == "alive"
        })
        .await;
    }
}

#[tokio::test]
async fn members_of_a_pool_carry_the_heartbeats_of_a_cut_off_node() {
    need!(NEED, "curl");
    let street = SharedNetwork::new();
    let cloud = Cloud::start(true).await;
    let switch = street.switch();
    let [one, two, three] = Node::join_all(&cloud, (&street, &switch), ["north"; 3]).await;
    assert!(one.ask("/readyz?cache").await.starts_with("HTTP/1.0 200"));
    let delegate = cut_off(&cloud, &one).await;
    for member in [&two, &three] {
        // A member that drops heartbeats does not get all of them.
        until("each of the other members carries some", async || {
            let sent = r#"causeway_edge_heartbeats_relayed_total{outcome="sent"}"#;
            member.ask("/metrics").await.contains(sent)
        })
        .await;
    }
    let (gone, last) = if delegate == "edge-2" {
        (&two, &three)
    } else {
        (&three, &two)
    };
    lose_delegate(&cloud, &one, (gone, last)).await;
    come_back(&cloud, &one).await;
}

/// Cuts a node off, and waits until it is delegated and tainted. Returns the member that has carried the first heartbeat.
async fn cut_off(cloud: &Cloud, one: &Node<'_>) -> String {
    one.host.cut();
    // Its kubelet still reaches the API server: a fresh Lease is left as it is.
    until("a heartbeat of a fresh Lease arrives", async || {
        cloud.cluster.renews(one.name, FRESH);
        cloud.count("fresh").await > 0
    })
    .await;
    assert!(!cloud.is_delegated(one.name));
    cloud.cluster.renews(one.name, OLD);
    let delegate = || cloud.cluster.object(one.name)["metadata"]["annotations"][ANNOTATION].clone();
    until("its Lease is renewed, and the Node annotated", async || {
        cloud.is_delegated(one.name) && delegate().is_string()
    })
    .await;
    let delegate = delegate().as_str().unwrap().to_owned();
    assert!(["edge-2", "edge-3"].contains(&&*delegate), "{delegate}");
    let note = format!("heartbeat delegated through {delegate}");
    until("there is an event", async || {
        cloud.cluster.notes() == [note.clone()]
    })
    .await;
    until("it is tainted", async || cloud.is_tainted(one.name)).await;
    let metrics = cloud.site.metrics().await;
    assert_eq!(metrics.sum("delegated_nodes", &[]), 1);
    delegate
}

/// Cuts the delegate off as well: the third member goes on.
async fn lose_delegate(cloud: &Cloud, one: &Node<'_>, (gone, last): (&Node<'_>, &Node<'_>)) {
    gone.host.cut();
    until("another member carries", async || {
        one.status().await["heartbeat"]["delegate"] == last.name
    })
    .await;
    let before = cloud.renew_time(one.name);
    until("its Lease is renewed again", async || {
        cloud.renew_time(one.name) > before
    })
    .await;
}

/// Connects the node again, and waits until nothing of the delegation is left.
async fn come_back(cloud: &Cloud, one: &Node<'_>) {
    // A plain kubelet copies the annotation.
    one.host.mend();
    let renew = || {
        cloud.cluster.renews(one.name, Duration::ZERO);
        Instant::now()
    };
    let mut renewed = renew();
    until("nothing of the delegation is left", async || {
        // Otherwise a node that connects late would be delegated again, and stay so.
        if renewed.elapsed() >= KUBELET_INTERVAL {
            renewed = renew();
        }
        let object = cloud.cluster.object(one.name);
        let annotated = object["metadata"]["annotations"][ANNOTATION].is_string();
        !cloud.is_delegated(one.name) && !cloud.is_tainted(one.name) && !annotated
    })
    .await;
    let returned = "the node sends its own heartbeats again".to_owned();
    until("there is an event of the return", async || {
        cloud.cluster.notes().contains(&returned)
    })
    .await;
    until("it has no delegate", async || {
        one.status().await["heartbeat"]["delegate"].is_null()
    })
    .await;
}

#[tokio::test]
async fn heartbeats_of_a_delegated_node_continue_after_a_restart_of_the_gateway() {
    need!(NEED, "curl");
    let street = SharedNetwork::new();
    let mut cloud = Cloud::start(true).await;
    let switch = street.switch();
    let [one, _two] = Node::join_all(&cloud, (&street, &switch), ["north"; 2]).await;
    one.host.cut();
    cloud.cluster.renews(one.name, OLD);
    let delegate = |cloud: &Cloud| {
        cloud.cluster.object("edge-1")["metadata"]["annotations"][ANNOTATION].clone()
    };
    until("its Lease is renewed, and the Node annotated", async || {
        cloud.is_delegated(one.name) && delegate(&cloud) == "edge-2"
    })
    .await;
    // The new process has never seen the node.
    cloud.site = cloud.site.restart(|_| {}).await;
    let before = cloud.renew_time(one.name);
    until("its Lease is renewed again", async || {
        cloud.renew_time(one.name) > before
    })
    .await;
    // It manages the node once the lease of the killed process is over.
    come_back(&cloud, &one).await;
}

#[tokio::test]
async fn no_heartbeat_is_sent_for_a_dead_kubelet_or_through_another_pool() {
    need!(NEED, "curl");
    let street = SharedNetwork::new();
    let cloud = Cloud::start(true).await;
    let switch = street.switch();
    let pools = ["north", "north", "south"];
    let [one, two, other] = Node::join_all(&cloud, (&street, &switch), pools).await;
    one.kubelet.alive.send_replace(false);
    until("its kubelet is not alive", async || {
        one.status().await["heartbeat"]["kubelet"] == "not_alive"
    })
    .await;
    cloud.cluster.renews(one.name, OLD);
    cloud.cluster.renews(other.name, OLD);
    one.host.cut();
    other.host.cut();
    until("the third has no member to ask", async || {
        other.status().await["heartbeat"]["last_error"].is_string()
    })
    .await;
    // By then the first has noticed the cut as well.
    until("the first has no tunnel", async || {
        one.status().await["tunnels"].as_array().unwrap().is_empty()
    })
    .await;
    assert!(!cloud.is_delegated(one.name) && !cloud.is_delegated(other.name));
    one.kubelet.alive.send_replace(true);
    until("its Lease is renewed", async || {
        cloud.is_delegated(one.name)
    })
    .await;
    until("it has a delegate", async || {
        one.status().await["heartbeat"]["delegate"] == two.name
    })
    .await;
    one.kubelet.alive.send_replace(false);
    until("it has no delegate any more", async || {
        one.status().await["heartbeat"]["delegate"].is_null()
    })
    .await;
    assert!(!cloud.is_delegated(other.name));
    assert_eq!(other.edge.written().count("are delegated to a member"), 0);
}

#[tokio::test]
async fn without_the_feature_at_the_gateway_nothing_is_written() {
    need!(NEED, "curl");
    let street = SharedNetwork::new();
    let cloud = Cloud::start(false).await;
    let switch = street.switch();
    let [one, _two] = Node::join_all(&cloud, (&street, &switch), ["north"; 2]).await;
    cloud.cluster.renews(one.name, OLD);
    one.host.cut();
    until("no member has a nonce", async || {
        let trouble = one.status().await["heartbeat"]["last_error"].clone();
        trouble
            .as_str()
            .is_some_and(|why| why.contains("no gateway"))
    })
    .await;
    assert!(!cloud.is_delegated(one.name));
}
