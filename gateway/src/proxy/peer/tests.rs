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
        directory::{HeldState, Peer, PeerLink},
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
use http::header::HOST;
use http_body_util::Full;
use serde_json::json;
use std::sync::Arc;
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
        }
    }

    async fn connect(&self, io: DuplexStream) -> Tunnel {
        let io = CountedIo::new(io);
        let traffic = io.traffic();
        let connecting = gateway_side::connect(io, traffic, GatewaySideConfig::default());
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
        let name = self.name;
        self.tasks.spawn(debug_span!("edge"), async move {
            serve_streams(far, is_frozen, |stream, tasks| {
                if let IncomingStream::Stream(request) = stream {
                    tasks.spawn(
                        debug_span!("request"),
                        answer(*request, name.to_owned(), Duration::ZERO),
                    );
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
        let (shared, is_frozen) = (peer.proxy.shared.clone(), watch::channel(false).1);
        peer.tasks.spawn(debug_span!("link"), async move {
            serve_streams(far, is_frozen, |stream, tasks| {
                if let IncomingStream::Stream(request) = stream {
                    let shared = shared.clone();
                    tasks.spawn(debug_span!("request"), async move {
                        serve(&shared, *request, ([192, 0, 2, 2], 4711).into()).await;
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
