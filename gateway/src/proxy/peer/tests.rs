//! Tests of both ends of a forwarded request: gateways whose links and tunnels are pipes in memory.

use super::*;
use crate::{
    config,
    proxy::{
        Proxy,
        authz::PolicyAuthorizer,
        tests::{answer, proxy, proxy_state, send, serve_streams},
    },
    state::{
        NewTunnel, Node, NodesWriter, Pod, Policy, PolicyWriter, Registry,
        directory::{ForwardingGateway, HeldState, Peer, PeerLink},
        registry::EdgeCertificate,
    },
    worker::{WorkerId, Workers},
};
use causeway_rt::{Exposition, socket::CountedIo, task::TaskGroup};
use causeway_tunnel::{
    control_stream::EdgeHello,
    edge_side::IncomingStream,
    gateway_side::{self, GatewaySideConfig},
};
use http::header::{CONNECTION, HOST, UPGRADE};
use http_body_util::Full;
use serde_json::json;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};
use tokio::{
    io::{DuplexStream, duplex},
    sync::{mpsc, watch},
};
use tokio_util::sync::CancellationToken;
use tracing::debug_span;

fn node() -> NodeName {
    NodeName::parse("edge-1").unwrap()
}

/// Gateway without a control plane.
struct Gateway {
    name: &'static str,
    registry: Registry,
    proxy: Proxy,
    tasks: TaskGroup,
    /// Freezes the edge that has a tunnel at this gateway.
    freeze_edge: watch::Sender<bool>,
    /// Freezes this gateway for the gateways that have links to it.
    freeze_links: watch::Sender<bool>,
    /// Time until its edge answers a request, in seconds.
    delay_heads: Arc<AtomicU64>,
}

impl Gateway {
    fn new(name: &'static str) -> Self {
        let registry = Registry::new(&Workers::on_current_runtime());
        Self {
            name,
            proxy: proxy(&proxy_state(&registry, &[node()])),
            registry,
            tasks: TaskGroup::default(),
            freeze_edge: watch::Sender::new(false),
            freeze_links: watch::Sender::new(false),
            delay_heads: Arc::default(),
        }
    }

    /// Returns a gateway that follows these pods of the node, and whose policy allows pods in the namespace `a`.
    fn with_pods(name: &'static str, pods: Vec<Pod>) -> Self {
        let registry = Registry::new(&Workers::on_current_runtime());
        let nodes = NodesWriter::default();
        nodes.upsert(node(), Node::default());
        nodes.follow_pods(&["10.250.0.0/16".parse().unwrap()]);
        nodes.pods(9).unwrap().replace(pods).unwrap();
        let rules = json!({ "rules": [{ "where": { "pod_namespaces": ["a"] }, "then": "allow" }] });
        let rules: config::policy::Policy = serde_json::from_value(rules).unwrap();
        let rules = PolicyWriter::new(Some(Policy::compile(&rules).unwrap()));
        let mut shared = Arc::into_inner(proxy_state(&registry, &[])).unwrap();
        shared.nodes = nodes.reader();
        shared.authorizer = Arc::new(PolicyAuthorizer {
            policy: rules.reader(),
            nodes: nodes.reader(),
        });
        Self {
            name,
            proxy: proxy(&Arc::new(shared)),
            registry,
            tasks: TaskGroup::default(),
            freeze_edge: watch::Sender::new(false),
            freeze_links: watch::Sender::new(false),
            delay_heads: Arc::default(),
        }
    }

    async fn connect(&self, io: DuplexStream) -> Tunnel {
        let io = CountedIo::new(io);
        let traffic = io.traffic();
        let config = GatewaySideConfig {
            control_streams: 0,
            ..GatewaySideConfig::default()
        };
        let connecting = gateway_side::connect(io, traffic, config);
        let (tunnel, driver) = connecting.await.unwrap();
        self.tasks.spawn(debug_span!("driver"), async move {
            driver.run().await;
        });
        tunnel
    }

    /// Registers a tunnel of the node, whose upstream answers with the name of this gateway.
    async fn register_edge(&self) {
        self.register_slot(0, self.freeze_edge.subscribe()).await;
    }

    /// Registers the tunnel of a slot of the edge, which does not answer while it is frozen.
    async fn register_slot(&self, slot: u32, is_frozen: watch::Receiver<bool>) {
        let (near, far) = duplex(64 << 10);
        let (name, delay) = (self.name, self.delay_heads.clone());
        self.tasks.spawn(debug_span!("edge"), async move {
            serve_streams(far, is_frozen, |stream, tasks| {
                if let IncomingStream::Stream(request) = stream {
                    let delay = delay.clone();
                    tasks.spawn(debug_span!("request"), async move {
                        sleep(Duration::from_secs(delay.load(Relaxed))).await;
                        answer(*request, name.to_owned(), Duration::ZERO).await;
                    });
                }
            })
            .await;
        });
        let tunnel = NewTunnel {
            tunnel: self.connect(near).await,
            hello: Arc::new(EdgeHello {
                slot,
                ..EdgeHello::default()
            }),
            remote_address: ([192, 0, 2, 1], 4711).into(),
            certificate: EdgeCertificate::default(),
            roots: Arc::default(),
            crls: Arc::default(),
            unhealthy_ports: Arc::default(),
            control: mpsc::channel(1).0,
            taken_over: CancellationToken::new(),
        };
        self.registry.register(&node(), tunnel).unwrap();
    }

    /// Opens a link to a peer, and adds the peer to the directory as a holder of the node.
    async fn add_holder(&self, peer: &Self) {
        let (near, far) = duplex(64 << 10);
        let (shared, is_frozen) = (peer.proxy.shared.clone(), peer.freeze_links.subscribe());
        peer.tasks.spawn(debug_span!("link"), async move {
            serve_streams(far, is_frozen, |stream, tasks| {
                if let IncomingStream::Stream(request) = stream {
                    let shared = shared.clone();
                    tasks.spawn(debug_span!("request"), async move {
                        let forwarded_by = ForwardingGateway {
                            address: ([192, 0, 2, 2], 4711).into(),
                            serial: "4a".into(),
                        };
                        serve(&shared, *request, forwarded_by).await;
                    });
                }
            })
            .await;
        });
        let tunnel = self.connect(near).await;
        let identity = (peer.name.to_owned(), "1".to_owned());
        let entry = Peer::new(peer.name, identity, tunnel.clone(), 1);
        let id = self.registry.next_tunnel_id();
        entry.set_link(WorkerId(0), Some(PeerLink { tunnel, id }));
        entry.replace_nodes([(node(), HeldState::Connected)].into());
        assert!(self.registry.directory().add(&Arc::new(entry)));
    }

    /// Sends a request of a client, and returns the status and the body of the response.
    async fn get(&self) -> (StatusCode, String) {
        self.get_from(node().as_str()).await
    }

    async fn get_from(&self, host: &str) -> (StatusCode, String) {
        let request = Request::get("/").header(HOST, host);
        let request = request.body(Full::default()).unwrap();
        let response = send(&self.proxy, request, |_| {}).await.unwrap();
        let text = String::from_utf8(response.body().to_vec()).unwrap();
        (response.status(), text)
    }

    fn metric(&self, name: &str) -> String {
        let all = self.proxy.shared.metrics.encode(Exposition::OpenMetrics);
        let mut values = all.lines().filter_map(|line| {
            let line = line.strip_prefix("causeway_gateway_")?;
            line.strip_prefix(name)?.strip_prefix(' ')
        });
        values.next().unwrap().to_owned()
    }
}

/// Returns an entry without a tunnel, and two holders that it knows. The edge does not answer on the tunnel at the first one.
async fn half_dead() -> (Gateway, Gateway, Gateway) {
    let [entry, late, healthy] = ["entry", "late", "healthy"].map(Gateway::new);
    for holder in [&late, &healthy] {
        holder.register_edge().await;
        entry.add_holder(holder).await;
    }
    assert_eq!(entry.get().await, (StatusCode::OK, "late".to_owned()));
    late.freeze_edge.send_replace(true);
    // The probe is sent after 4.5 to 5 s, and the tunnel is suspect 5 s after the probe.
    sleep(Duration::from_secs(7)).await;
    let (own, _) = late.registry.select_own_tunnel(&node()).unwrap();
    assert!(own.is_late());
    (entry, late, healthy)
}

#[tokio::test(start_paused = true)]
async fn a_holder_leaves_a_request_to_another_while_its_tunnel_is_late() {
    let (entry, late, _healthy) = Box::pin(half_dead()).await;
    let began = Instant::now();
    for _ in 0..3 {
        let served = Box::pin(entry.get()).await;
        assert_eq!(served, (StatusCode::OK, "healthy".to_owned()));
    }
    assert!(began.elapsed() < Duration::from_millis(100));
    // The node has not left that gateway.
    assert_eq!(entry.metric("stale_holders_total"), "0");
    assert_eq!(late.metric("streams_served_for_peers_total"), "1");
    late.freeze_edge.send_replace(false);
    sleep(REFUSAL_TIME).await;
    let served = Box::pin(entry.get()).await;
    assert_eq!(served, (StatusCode::OK, "late".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_does_not_know_a_pod_yet_denies_nothing() {
    let pod = |name: &str| Pod {
        name: name.into(),
        node: node(),
        addresses: ["10.250.0.7".parse().unwrap()].into(),
        ends_at: None,
    };
    for (known, expected) in [
        (vec![pod("a/web")], StatusCode::OK),
        (Vec::new(), StatusCode::SERVICE_UNAVAILABLE),
        // By the holder's own table, the address belongs to a pod in another namespace.
        (vec![pod("b/web")], StatusCode::FORBIDDEN),
    ] {
        let entry = Gateway::with_pods("entry", vec![pod("a/web")]);
        let holder = Gateway::with_pods("holder", known);
        holder.register_edge().await;
        entry.add_holder(&holder).await;
        let (status, text) = entry.get_from("10.250.0.7:9100").await;
        assert_eq!(status, expected, "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_tunnel_that_answers_is_used_before_a_late_one_of_the_same_edge() {
    let gateway = Gateway::new("it");
    gateway.register_edge().await;
    gateway.register_slot(1, watch::channel(false).1).await;
    gateway.freeze_edge.send_replace(true);
    sleep(Duration::from_secs(7)).await;
    let (own, _) = gateway.registry.select_own_tunnel(&node()).unwrap();
    assert!(!own.is_late());
}

#[tokio::test(start_paused = true)]
async fn a_holder_uses_its_late_tunnel_if_the_sender_can_ask_no_other() {
    let (entry, late, healthy) = Box::pin(half_dead()).await;
    // The other holder has lost the node, and has not said so yet.
    let (lost, _) = healthy.registry.select_own_tunnel(&node()).unwrap();
    assert!(healthy.registry.unregister(&node(), lost.id));
    let thaw = async {
        sleep(Duration::from_millis(500)).await;
        late.freeze_edge.send_replace(false);
    };
    let began = Instant::now();
    let (served, ()) = Box::pin(futures_util::future::join(entry.get(), thaw)).await;
    assert_eq!(served, (StatusCode::OK, "late".to_owned()));
    assert!(began.elapsed() < REFUSAL_TIME, "it was asked again at once");
    assert_eq!(entry.metric("stale_holders_total"), "1");
}

#[tokio::test(start_paused = true)]
async fn a_holder_with_a_late_tunnel_serves_a_request_that_all_others_refuse() {
    let (entry, late, healthy) = Box::pin(half_dead()).await;
    let third = Gateway::new("third");
    third.register_edge().await;
    entry.add_holder(&third).await;
    for holder in [&healthy, &third] {
        let (lost, _) = holder.registry.select_own_tunnel(&node()).unwrap();
        assert!(holder.registry.unregister(&node(), lost.id));
    }
    let thaw = async {
        sleep(Duration::from_millis(500)).await;
        late.freeze_edge.send_replace(false);
    };
    let (served, ()) = Box::pin(futures_util::future::join(entry.get(), thaw)).await;
    assert_eq!(served, (StatusCode::OK, "late".to_owned()));
    assert_eq!(entry.metric("stale_holders_total"), "2");
}

/// Returns a gateway whose own tunnel does not answer from now on, and another gateway that holds the node.
async fn own_half_dead() -> (Gateway, Gateway) {
    let [entry, healthy] = ["entry", "healthy"].map(Gateway::new);
    for gateway in [&entry, &healthy] {
        gateway.register_edge().await;
    }
    entry.add_holder(&healthy).await;
    assert_eq!(entry.get().await, (StatusCode::OK, "entry".to_owned()));
    // The next write is later than the last read.
    sleep(Duration::from_secs(2)).await;
    entry.freeze_edge.send_replace(true);
    (entry, healthy)
}

/// Sends a request, and thaws the edge of the gateway after some seconds.
async fn get_and_thaw(gateway: &Gateway, after: u64) -> (StatusCode, String) {
    let thaw = async {
        sleep(Duration::from_secs(after)).await;
        gateway.freeze_edge.send_replace(false);
    };
    Box::pin(futures_util::future::join(gateway.get(), thaw))
        .await
        .0
}

async fn post(gateway: &Gateway, body: &'static str) -> (StatusCode, String) {
    let request = Request::post("/").header(HOST, node().as_str());
    let request = request.body(Full::from(body)).unwrap();
    let response = send(&gateway.proxy, request, |_| {}).await.unwrap();
    let text = String::from_utf8(response.body().to_vec()).unwrap();
    (response.status(), text)
}

#[tokio::test(start_paused = true)]
async fn a_request_on_a_dead_tunnel_is_repeated_at_another_gateway() {
    let (entry, _healthy) = Box::pin(own_half_dead()).await;
    let began = Instant::now();
    let served = Box::pin(entry.get()).await;
    assert_eq!(served, (StatusCode::OK, "healthy".to_owned()));
    // One second until the probe, and another one without an answer to it.
    let waited = began.elapsed();
    assert!(waited < Duration::from_millis(2_100), "{waited:?}");
    assert_eq!(entry.metric("requests_repeated_total"), "1");
    assert_eq!(entry.metric("stale_holders_total"), "0");
    // The next request does not wait.
    let began = Instant::now();
    assert_eq!(entry.get().await.1, "healthy");
    assert!(began.elapsed() < Duration::from_millis(100));
    assert_eq!(entry.metric("requests_repeated_total"), "1");
}

#[tokio::test(start_paused = true)]
async fn a_request_on_a_dead_tunnel_is_repeated_on_another_one_of_the_edge() {
    let gateway = Gateway::new("it");
    gateway.register_edge().await;
    sleep(Duration::from_secs(1)).await;
    gateway.freeze_edge.send_replace(true);
    let arrival = async {
        sleep(Duration::from_secs(4)).await;
        gateway.register_slot(1, watch::channel(false).1).await;
    };
    let began = Instant::now();
    let (served, ()) = Box::pin(futures_util::future::join(gateway.get(), arrival)).await;
    assert_eq!(served, (StatusCode::OK, "it".to_owned()));
    assert!(began.elapsed() < Duration::from_secs(6));
    assert_eq!(gateway.metric("requests_repeated_total"), "1");
}

#[tokio::test(start_paused = true)]
async fn requests_with_effects_and_with_large_heads_are_sent_once() {
    let (entry, healthy) = Box::pin(own_half_dead()).await;
    let large = Request::get("/").header(HOST, node().as_str());
    let large = large.header("x-large", "x".repeat(9 << 10));
    let large = large.body(Full::default()).unwrap();
    let large = send(&entry.proxy, large, |_| {});
    let (posted, empty) = (post(&entry, "a body"), post(&entry, ""));
    let all = Box::pin(futures_util::future::join3(posted, empty, large)).await;
    let (posted, empty, large) = all;
    assert_eq!(posted.0, StatusCode::BAD_GATEWAY, "{}", posted.1);
    assert_eq!(empty.0, StatusCode::BAD_GATEWAY, "{}", empty.1);
    assert_eq!(large.unwrap().status(), StatusCode::BAD_GATEWAY);
    assert_eq!(healthy.metric("streams_served_for_peers_total"), "0");
}

#[tokio::test(start_paused = true)]
async fn a_request_without_another_place_waits_for_its_tunnel() {
    let entry = Gateway::new("entry");
    entry.register_edge().await;
    entry.freeze_edge.send_replace(true);
    let served = get_and_thaw(&entry, 8).await;
    assert_eq!(served, (StatusCode::OK, "entry".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn repetitions_are_limited() {
    let (entry, _healthy) = Box::pin(own_half_dead()).await;
    let limits = &entry.proxy.shared.limits;
    let permits = futures_util::future::join_all((0..256).map(|_| limits.admit_repetition())).await;
    let served = get_and_thaw(&entry, 4).await;
    assert_eq!(served, (StatusCode::OK, "entry".to_owned()));
    assert_eq!(entry.metric("requests_repeated_total"), "0");
    drop(permits);
}

#[tokio::test(start_paused = true)]
async fn a_request_returns_to_its_tunnel_if_the_other_place_refuses_it() {
    let (entry, healthy) = Box::pin(own_half_dead()).await;
    let (lost, _) = healthy.registry.select_own_tunnel(&node()).unwrap();
    assert!(healthy.registry.unregister(&node(), lost.id));
    let served = get_and_thaw(&entry, 4).await;
    assert_eq!(served, (StatusCode::OK, "entry".to_owned()));
    assert_eq!(entry.metric("requests_repeated_total"), "0");
    assert_eq!(entry.metric("stale_holders_total"), "1");
}

#[tokio::test(start_paused = true)]
async fn the_first_response_to_a_repeated_request_wins() {
    let (entry, healthy) = Box::pin(own_half_dead()).await;
    healthy.delay_heads.store(30, Relaxed);
    let served = get_and_thaw(&entry, 4).await;
    assert_eq!(served, (StatusCode::OK, "entry".to_owned()));
    assert_eq!(healthy.metric("streams_served_for_peers_total"), "1");
    let (own, _) = healthy.registry.select_own_tunnel(&node()).unwrap();
    while own.tunnel.load().open_streams() > 0 {
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_upstream_gets_each_request_once() {
    let [entry, holder, other] = ["entry", "holder", "other"].map(Gateway::new);
    for gateway in [&holder, &other] {
        gateway.delay_heads.store(30, Relaxed);
        gateway.register_edge().await;
        entry.add_holder(gateway).await;
    }
    let began = Instant::now();
    assert_eq!(entry.get().await, (StatusCode::OK, "holder".to_owned()));
    assert!(began.elapsed() >= Duration::from_secs(30));
    assert_eq!(other.metric("streams_served_for_peers_total"), "0");
}

#[tokio::test(start_paused = true)]
async fn a_request_is_repeated_at_once_if_its_tunnel_ends() {
    let (entry, _healthy) = Box::pin(own_half_dead()).await;
    let (own, _) = entry.registry.select_own_tunnel(&node()).unwrap();
    let end = async {
        sleep(Duration::from_millis(500)).await;
        own.tunnel.close();
    };
    let began = Instant::now();
    let (served, ()) = Box::pin(futures_util::future::join(entry.get(), end)).await;
    assert_eq!(served, (StatusCode::OK, "healthy".to_owned()));
    assert!(began.elapsed() < Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn a_request_is_repeated_if_the_tunnel_at_its_holder_dies_or_ends() {
    for ends in [false, true] {
        let [entry, dying, healthy] = ["entry", "dying", "healthy"].map(Gateway::new);
        for holder in [&dying, &healthy] {
            holder.register_edge().await;
            entry.add_holder(holder).await;
        }
        assert_eq!(entry.get().await, (StatusCode::OK, "dying".to_owned()));
        // The next write is later than the last read.
        sleep(Duration::from_secs(1)).await;
        dying.freeze_edge.send_replace(true);
        let (own, _) = dying.registry.select_own_tunnel(&node()).unwrap();
        let end = async {
            sleep(Duration::from_millis(500)).await;
            if ends {
                own.tunnel.close();
            }
        };
        let began = Instant::now();
        let (served, ()) = Box::pin(futures_util::future::join(entry.get(), end)).await;
        assert_eq!(served, (StatusCode::OK, "healthy".to_owned()));
        let waited = began.elapsed();
        assert!(waited < Duration::from_millis(2_100), "{waited:?}");
        assert_eq!(entry.metric("requests_repeated_total"), "1");
        // The node has not left that gateway.
        assert_eq!(entry.metric("stale_holders_total"), "0");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_with_effects_fails_soon_if_a_silent_peer_has_not_accepted_it() {
    let [entry, silent, other] = ["entry", "silent", "other"].map(Gateway::new);
    for holder in [&silent, &other] {
        holder.register_edge().await;
    }
    entry.add_holder(&silent).await;
    assert_eq!(entry.get().await, (StatusCode::OK, "silent".to_owned()));
    sleep(Duration::from_secs(1)).await;
    silent.freeze_links.send_replace(true);
    let upgrade = async {
        let request = Request::get("/").header(HOST, node().as_str());
        let request = request.header(CONNECTION, "upgrade").header(UPGRADE, "x");
        let request = request.body(Full::default()).unwrap();
        let response = send(&entry.proxy, request, |_| {}).await.unwrap();
        let text = String::from_utf8(response.body().to_vec()).unwrap();
        (response.status(), text)
    };
    let began = Instant::now();
    let posts = futures_util::future::join(post(&entry, "a body"), post(&entry, ""));
    let ((first, second), third) = Box::pin(futures_util::future::join(posts, upgrade)).await;
    for (status, text) in [first, second, third] {
        assert_eq!(status, StatusCode::BAD_GATEWAY, "{text}");
        assert!(text.contains("tunnel_lost"), "{text}");
        assert!(text.contains("edge-1 does not answer"), "{text}");
    }
    let waited = began.elapsed();
    assert!(waited < Duration::from_millis(6_200), "{waited:?}");
    // The next request goes to another gateway at once.
    entry.add_holder(&other).await;
    assert_eq!(post(&entry, "a body").await.1, "other");
}

#[tokio::test(start_paused = true)]
async fn a_request_leaves_a_silent_peer_soon_if_another_one_holds_the_node() {
    let [entry, silent, other] = ["entry", "silent", "other"].map(Gateway::new);
    silent.register_edge().await;
    entry.add_holder(&silent).await;
    assert_eq!(entry.get().await, (StatusCode::OK, "silent".to_owned()));
    sleep(Duration::from_secs(1)).await;
    silent.freeze_links.send_replace(true);
    let thaw = async {
        sleep(Duration::from_secs(4)).await;
        silent.freeze_links.send_replace(false);
    };
    // No other gateway could serve it, so it waits.
    let (served, ()) = Box::pin(futures_util::future::join(entry.get(), thaw)).await;
    assert_eq!(served, (StatusCode::OK, "silent".to_owned()));
    other.register_edge().await;
    entry.add_holder(&other).await;
    // A probe measures the round trip of the link without the pause.
    sleep(Duration::from_secs(6)).await;
    silent.freeze_links.send_replace(true);
    let began = Instant::now();
    let served = Box::pin(entry.get()).await;
    assert_eq!(served, (StatusCode::OK, "other".to_owned()));
    let waited = began.elapsed();
    assert!(waited < Duration::from_millis(2_100), "{waited:?}");
}
