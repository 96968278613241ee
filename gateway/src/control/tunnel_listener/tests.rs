mod streams;
mod turns;

use super::TunnelPortLimits;
use crate::{
    control::{
        ca_rotation,
        drain::{DrainListeners, drain},
        gateway_revocation::{PeerRevocations, RevocationProgress},
        successor::Successor,
        tests::{
            FakeEdge, LONG, SHORT, dismissal, welcome,
            world::{World, identity, name, new_ca},
        },
    },
    state::{ClusterNode, EgressUsage, NodeUnavailable},
    worker::Workers,
};
use causeway_certs::{
    Ca, CaError, EdgeIdentity, Fingerprint, NodeRecord, RotationStep, StoreError, verify,
    verify_crls,
};
use causeway_rt::task::TaskGroup;
use causeway_tunnel::{
    StreamKind, Target,
    control_stream::{EdgeMessage, GatewayMessage, GoAway},
    edge_side::StreamRequest,
    gateway_side::OpenStream,
    wire,
};
use futures_util::FutureExt;
use http::Request;
use rustls::{ClientConfig, ClientConnection, pki_types::ServerName};
use serde_json::{Value, json};
use std::{sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tracing::Span;

/// Returns a client configuration with another ALPN.
fn offering(config: &Arc<ClientConfig>, alpn: &[u8]) -> Arc<ClientConfig> {
    let mut config = ClientConfig::clone(config);
    config.alpn_protocols = vec![alpn.to_vec()];
    Arc::new(config)
}

/// Returns the error with which the gateway refuses a handshake. TLS 1.3 reports it at the first read.
async fn alert(world: &World, config: Arc<ClientConfig>) -> String {
    let refused = async {
        let mut io = world.tls(config).await?;
        io.read_u8().await
    };
    timeout(LONG, refused)
        .await
        .unwrap()
        .unwrap_err()
        .to_string()
}

#[tokio::test]
async fn an_edge_is_registered_after_its_hello_and_removed_on_close() {
    let world = World::start();
    let edge = world.joined(&world.enrolled("edge-1"), "a", 0).await;
    let GatewayMessage::Hello(hello) = &edge.hello else {
        panic!("the first line is the hello, not {:?}", edge.hello);
    };
    assert_eq!(
        (hello.protocol, hello.node.as_str()),
        (wire::VERSION, "edge-1")
    );
    assert_eq!(hello.gateways, ["gw.example:10262", "gw2.example:10262"]);
    assert!(world.registry.select_tunnel(&name("edge-1")).is_ok());
    assert!(world.counted("tunnels 1"));
    drop(edge);
    world
        .until(|world| !world.registry.has_tunnel(&name("edge-1")))
        .await;
    world
        .until(|world| world.counted(r#"tunnels_ended_total{why="peer_gone"} 1"#))
        .await;
    assert!(world.counted("tunnels 0"));
    assert!(matches!(
        world.registry.select_tunnel(&name("edge-1")),
        Err(NodeUnavailable::LastSeen { .. })
    ));
}

#[tokio::test]
async fn a_tunnel_serves_streams_on_the_worker_of_its_node() {
    let workers = Workers::start(2).unwrap();
    let world = World::on(&workers);
    let mut edges: Vec<FakeEdge> = Vec::new();
    for node in ["edge-1", "edge-2", "edge-3", "edge-4"] {
        let mut edge = world.joined(&world.enrolled(node), "a", 0).await;
        let tunnel = world.registry.select_tunnel(&name(node)).unwrap().tunnel;
        let head = Request::get("/").body(()).unwrap();
        let target = Target::new(node, 9100);
        let opened = tunnel
            .open(head, &StreamKind::Request, &target, true)
            .await
            .unwrap();
        let asked = timeout(LONG, edge.streams.recv()).await.unwrap().unwrap();
        assert_eq!(asked.target, target);
        asked.responder.send(http::Response::new(()), true).unwrap();
        assert_eq!(opened.response.await.unwrap().status(), 200);
        edges.push(edge);
    }
    let used: std::collections::HashSet<_> = ["edge-1", "edge-2", "edge-3", "edge-4"]
        .map(|node| workers.worker_of(&name(node)).0)
        .into();
    assert_eq!(
        used.len(),
        2,
        "the names of this test spread over both workers"
    );
}

#[tokio::test]
async fn a_hello_that_is_never_answered_ends_the_tunnel() {
    let world = World::start();
    let edge = world.dial(&world.enrolled("edge-1")).await;
    edge.ended().await;
    world
        .until(|world| world.counted(r#"registrations_total{outcome="hello_timeout"} 1"#))
        .await;
}

#[tokio::test]
async fn an_oversized_or_malformed_hello_is_answered_with_the_reason() {
    let world = World::start();
    let identity = world.enrolled("edge-1");
    let mut edge = world.dial(&identity).await;
    let long = format!("\"{}\"\n", "x".repeat(80 * 1024));
    edge.control.send_raw(long.into()).await.unwrap();
    let heard = edge.hear().await;
    let (why, detail) = dismissal(&heard).unwrap();
    assert!(
        why == GoAway::Malformed && detail.contains("longer than"),
        "{detail}"
    );
    edge.ended().await;
    let nameless = welcome("", 0);
    let newer = causeway_tunnel::control_stream::EdgeHello {
        protocol: 99,
        ..welcome("a", 0)
    };
    for (message, words) in [
        (nameless, "the instance id must have"),
        (newer, "version 99"),
    ] {
        let (edge, heard) = world.says(&identity, message).await;
        let (why, detail) = dismissal(&heard).unwrap();
        assert_eq!(why, GoAway::Malformed);
        assert!(detail.contains(words), "{detail}");
        edge.ended().await;
    }
    let mut edge = world.dial(&identity).await;
    edge.control.send(&"not a welcome").await.unwrap();
    assert_eq!(dismissal(&edge.hear().await).unwrap().0, GoAway::Malformed);
    assert!(!world.registry.has_tunnel(&name("edge-1")));
}

#[tokio::test]
async fn a_node_that_is_not_enrolled_is_refused() {
    let world = World::start();
    let stranger = identity(&world.ca, "edge-9");
    let (edge, heard) = world.says(&stranger, welcome("a", 0)).await;
    let (why, detail) = dismissal(&heard).unwrap();
    assert_eq!(why, GoAway::NotAdmitted);
    assert!(detail.contains("edge-9 is not enrolled"), "{detail}");
    edge.ended().await;
    world
        .until(|world| world.counted(r#"registrations_total{outcome="not_admitted"} 1"#))
        .await;
}

#[tokio::test]
async fn before_the_node_list_is_known_refusals_are_short() {
    let world = World::of_a_cluster();
    let (known, other) = (world.enrolled("edge-1"), identity(&world.ca, "edge-2"));
    world.joined(&known, "a", 0).await;
    let (early, heard) = world.says(&other, welcome("b", 0)).await;
    let GatewayMessage::Dismiss {
        why,
        detail,
        retry_after_ms,
    } = heard
    else {
        panic!("{heard:?}")
    };
    assert!(matches!(why, GoAway::Full), "it must dial again: {why:?}");
    assert!(detail.contains("try again later"), "{detail}");
    assert_eq!(retry_after_ms, 10_000, "edges add up to half of that");
    early.ended().await;
    world
        .until(|world| world.counted(r#"registrations_total{outcome="early"} 1"#))
        .await;
    let member = ClusterNode {
        is_edge: true,
        ..ClusterNode::default()
    };
    let naming = async {
        let members = [(name("edge-2"), member)];
        world.nodes.replace_cluster(members.into());
    };
    let (_edge, ()) = tokio::join!(world.joined(&other, "b", 0), naming);
    let stranger = identity(&world.ca, "edge-3");
    let (_edge, heard) = world.says(&stranger, welcome("c", 0)).await;
    assert_eq!(dismissal(&heard).unwrap().0, GoAway::NotAdmitted);
}

#[tokio::test]
async fn nodes_admitted_without_the_cluster_do_not_wait_for_it() {
    let world = World::of_a_cluster();
    world.admit_any_node();
    let stranger = EdgeIdentity {
        is_external: true,
        ..identity(&world.ca, "edge-1")
    };
    let _edge = world.joined(&stranger, "a", 0).await;
}

#[tokio::test]
async fn a_clients_certificate_gets_no_tunnel() {
    let world = World::start();
    let leaf = world.ca.issue_client("ann", &[], LONG).unwrap();
    let client = EdgeIdentity {
        leaf,
        ..world.enrolled("edge-1")
    };
    let (_edge, heard) = world.says(&client, welcome("a", 0)).await;
    let (why, detail) = dismissal(&heard).unwrap();
    assert_eq!(why, GoAway::NotAdmitted);
    assert!(detail.contains("kind client"), "{detail}");
}

#[tokio::test]
async fn a_missing_or_foreign_certificate_or_alpn_gets_an_alert() {
    let world = World::start();
    let ours = world.enrolled("edge-1");
    let join = verify::join_client(world.ca.fingerprint()).unwrap();
    let of = |domain: &str| {
        let leaf = identity(&new_ca(domain), "edge-1").leaf;
        verify::tunnel_client(&EdgeIdentity {
            leaf,
            ..ours.clone()
        })
        .unwrap()
    };
    for (config, words) in [
        (offering(&join, wire::ALPN_TUNNEL), "CertificateRequired"),
        (offering(&join, wire::ALPN_EGRESS), "CertificateRequired"),
        (of("other.example"), "UnknownCA"),
        // A certificate of another CA of the same trust domain has an unknown issuer, not a bad signature.
        (of("test.example"), "UnknownCA"),
        (offering(&join, b"spdy/3"), "NoApplicationProtocol"),
    ] {
        let message = alert(&world, config).await;
        assert!(message.contains(words), "{words}: {message}");
    }
    let why = r#"handshakes_failed_total{listener="tunnel",why="certificate"} 4"#;
    world.until(|world| world.counted(why)).await;
}

#[tokio::test]
async fn a_silent_peer_is_disconnected() {
    let world = World::with_handshake_timeout(SHORT);
    let mut silent = TcpStream::connect(world.address).await.unwrap();
    let mut rest = Vec::new();
    timeout(LONG, silent.read_to_end(&mut rest))
        .await
        .unwrap()
        .unwrap();
    let why = r#"handshakes_failed_total{listener="tunnel",why="timeout"} 1"#;
    world.until(|world| world.counted(why)).await;
}

#[tokio::test]
async fn nonsense_instead_of_tls_is_refused_without_ado() {
    let world = World::start();
    let mut http = TcpStream::connect(world.address).await.unwrap();
    http.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let mut rest = Vec::new();
    // Whether it ends by FIN or by RST is the system's choice.
    let _ = timeout(LONG, http.read_to_end(&mut rest)).await.unwrap();
    let why = r#"handshakes_failed_total{listener="tunnel",why="protocol"} 1"#;
    world.until(|world| world.counted(why)).await;
}

/// Connects with a PROXY v2 header whose source is port 4000 of 192.0.2.`host`.
async fn connect_by_balancer(world: &World, host: u8) -> TcpStream {
    let start = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c";
    let addresses = [192, 0, 2, host, 127, 0, 0, 1, 0x0f, 0xa0, 0x28, 0x16];
    let header = [&start[..], &addresses].concat();
    let mut tcp = TcpStream::connect(world.address).await.unwrap();
    tcp.write_all(&header).await.unwrap();
    tcp
}

#[tokio::test]
async fn the_header_of_a_listed_balancer_gives_the_address_of_an_edge() {
    let world = World::behind_a_balancer(TunnelPortLimits::default());
    let tcp = connect_by_balancer(&world, 7).await;
    let config = verify::tunnel_client(&world.enrolled("edge-1")).unwrap();
    let io = world.tls_on(tcp, config).await.unwrap();
    let mut edge = FakeEdge::greeted(io).await.unwrap();
    let hello = EdgeMessage::Welcome(Box::new(welcome("a", 0)));
    edge.control.send(&hello).await.unwrap();
    assert_eq!(edge.hear().await, GatewayMessage::Registered);
    let (_, info) = world.registry.all().pop().unwrap();
    assert_eq!(info.tunnel.remote_address.to_string(), "192.0.2.7:4000");
}

#[tokio::test]
async fn silent_connections_of_one_source_behind_a_balancer_evict_each_other() {
    let world = World::behind_a_balancer(TunnelPortLimits {
        arriving: 4,
        ..TunnelPortLimits::default()
    });
    let config = verify::tunnel_client(&world.enrolled("edge-1")).unwrap();
    let slow = connect_by_balancer(&world, 7).await;
    // The gateway has read the header of the first connection when a later one has finished TLS.
    let tcp = connect_by_balancer(&world, 8).await;
    drop(world.tls_on(tcp, config.clone()).await.unwrap());
    let mut silent = Vec::new();
    for _ in 0..20 {
        silent.push(connect_by_balancer(&world, 9).await);
    }
    let newest = silent.pop().unwrap();
    assert!(world.tls_on(newest, config.clone()).await.is_ok());
    assert!(world.tls_on(slow, config).await.is_ok());
}

#[tokio::test]
async fn a_health_check_of_a_balancer_is_an_ordinary_end() {
    let world = World::behind_a_balancer(TunnelPortLimits::default());
    drop(TcpStream::connect(world.address).await.unwrap());
    let why = r#"handshakes_failed_total{listener="tunnel",why="peer_gone"} 1"#;
    world.until(|world| world.counted(why)).await;
}

#[tokio::test]
async fn a_connection_of_a_listed_balancer_without_a_header_is_refused() {
    let world = World::behind_a_balancer(TunnelPortLimits::default());
    let config = verify::tunnel_client(&world.enrolled("edge-1")).unwrap();
    assert!(world.tls(config).await.is_err());
    let why = r#"handshakes_failed_total{listener="tunnel",why="proxy"} 1"#;
    world.until(|world| world.counted(why)).await;
}

#[tokio::test]
async fn the_header_of_an_unlisted_peer_is_refused() {
    let world = World::start();
    let tcp = connect_by_balancer(&world, 7).await;
    let config = verify::tunnel_client(&world.enrolled("edge-1")).unwrap();
    assert!(world.tls_on(tcp, config).await.is_err());
    let why = r#"handshakes_failed_total{listener="tunnel",why="protocol"} 1"#;
    world.until(|world| world.counted(why)).await;
}

#[tokio::test]
async fn the_newest_instance_wins_and_locks_out_the_old_one() {
    let world = World::start();
    let identity = world.enrolled("edge-1");
    let mut old = world.joined(&identity, "old", 0).await;
    let new = world.joined(&identity, "new", 0).await;
    let told = old.hear().await;
    assert_eq!(dismissal(&told).unwrap().0, GoAway::Superseded);
    old.ended().await;
    let (_back, heard) = world.says(&identity, welcome("old", 0)).await;
    assert_eq!(dismissal(&heard).unwrap().0, GoAway::Superseded);
    assert!(
        world.registry.select_tunnel(&name("edge-1")).is_ok(),
        "the new one is untouched"
    );
    drop(new);
    world
        .until(|world| !world.registry.has_tunnel(&name("edge-1")))
        .await;
    world.joined(&identity, "old", 0).await;
}

#[tokio::test]
async fn a_superseded_edge_that_does_not_listen_is_hung_up_on() {
    let world = World::start();
    let identity = world.enrolled("edge-1");
    let old = world.joined(&identity, "old", 0).await;
    let _new = world.joined(&identity, "new", 0).await;
    old.ended().await;
    world
        .until(|world| world.counted(r#"tunnels_ended_total{why="superseded"} 1"#))
        .await;
}

#[tokio::test]
async fn a_redialled_slot_replaces_only_its_old_tunnel() {
    let world = World::start();
    let identity = world.enrolled("edge-1");
    let first = world.joined(&identity, "a", 0).await;
    let _bulk = world.joined(&identity, "a", 1).await;
    let _again = world.joined(&identity, "a", 0).await;
    first.ended().await;
    world.until(|world| world.counted("tunnels 2")).await;
    let slots = world.registry.node_tunnels(&name("edge-1")).0;
    let slots: Vec<_> = slots.iter().map(|edge| edge.tunnel.hello.slot).collect();
    assert_eq!(slots, [1, 0]);
}

#[tokio::test]
async fn a_draining_edge_gets_no_new_streams_and_its_open_ones_end() {
    let world = World::start();
    let mut edge = world.joined(&world.enrolled("edge-1"), "a", 0).await;
    let tunnel = world
        .registry
        .select_tunnel(&name("edge-1"))
        .unwrap()
        .tunnel;
    let head = Request::get("/").body(()).unwrap();
    let target = Target::new("edge-1", 9100);
    let opened = tunnel
        .open(head, &StreamKind::Request, &target, true)
        .await
        .unwrap();
    let leave = EdgeMessage::Leave {
        detail: "the node restarts".to_owned(),
        until_idle: false,
        serves: false,
    };
    edge.control.send(&leave).await.unwrap();
    let gone = |world: &World| world.registry.select_tunnel(&name("edge-1")).is_err();
    world.until(gone).await;
    assert!(matches!(
        world.registry.select_tunnel(&name("edge-1")),
        Err(NodeUnavailable::Draining)
    ));
    let asked = timeout(LONG, edge.streams.recv()).await.unwrap().unwrap();
    asked.responder.send(http::Response::new(()), true).unwrap();
    assert_eq!(opened.response.await.unwrap().status(), 200);
    drop((opened.send, asked.body));
    edge.ended().await;
    world
        .until(|world| world.counted(r#"tunnels_ended_total{why="left"} 1"#))
        .await;
}

#[tokio::test]
async fn a_superseded_tunnel_keeps_its_streams_until_the_last_ends() {
    let world = World::start();
    let identity = world.enrolled("edge-1");
    let mut old = world.joined(&identity, "a", 0).await;
    let before = world.registry.select_tunnel(&name("edge-1")).unwrap();
    let head = Request::get("/").body(()).unwrap();
    let target = Target::new("edge-1", 9100);
    let opened = before
        .tunnel
        .open(head, &StreamKind::Request, &target, true)
        .await
        .unwrap();
    let takes_over = causeway_tunnel::control_stream::EdgeHello {
        takes_over: true,
        ..welcome("a", 0)
    };
    let (_new, message) = world.says(&identity, takes_over).await;
    assert_eq!(message, GatewayMessage::Registered);
    let after = world.registry.select_tunnel(&name("edge-1")).unwrap();
    assert_ne!(after.id, before.id, "new streams go to the new one");
    let leave = EdgeMessage::Leave {
        detail: "as edges say then".to_owned(),
        until_idle: true,
        serves: false,
    };
    old.control.send(&leave).await.unwrap();
    // An idle connection of the same kind is closed in the meantime.
    let idle = world.enrolled("edge-2");
    let mut idle_before = world.joined(&idle, "a", 0).await;
    let takes_over = causeway_tunnel::control_stream::EdgeHello {
        takes_over: true,
        ..welcome("a", 0)
    };
    let (_idle, message) = world.says(&idle, takes_over).await;
    assert_eq!(message, GatewayMessage::Registered);
    idle_before.control.send(&leave).await.unwrap();
    idle_before.ended().await;
    assert_eq!(world.registry.node_tunnels(&name("edge-1")).0.len(), 2);
    let asked = timeout(LONG, old.streams.recv()).await.unwrap().unwrap();
    asked.responder.send(http::Response::new(()), true).unwrap();
    assert_eq!(opened.response.await.unwrap().status(), 200);
    drop((opened.send, asked.body));
    old.ended().await;
    assert_eq!(
        world.registry.select_tunnel(&name("edge-1")).unwrap().id,
        after.id
    );
}

#[tokio::test]
async fn superseded_tunnels_keep_streams_and_revocation_ends_all() {
    let world = World::start();
    let identity = world.enrolled("edge-1");
    let (target, mut edges, mut open) = (Target::new("edge-1", 9100), Vec::new(), Vec::new());
    for _ in 0..20 {
        let takes_over = causeway_tunnel::control_stream::EdgeHello {
            takes_over: true,
            ..welcome("a", 0)
        };
        let (edge, message) = world.says(&identity, takes_over).await;
        assert_eq!(message, GatewayMessage::Registered);
        let tunnel = world
            .registry
            .select_tunnel(&name("edge-1"))
            .unwrap()
            .tunnel;
        let head = Request::get("/").body(()).unwrap();
        // The edge does not answer any of these requests.
        open.push(tunnel.open(head, &StreamKind::Request, &target, true).await);
        edges.push(edge);
    }
    world
        .until(|world| world.registry.node_tunnels(&name("edge-1")).0.len() == 20)
        .await;
    let roll = world.roll();
    // Removes the record of the node. A directory without any records would be refused.
    let nodes = world.store.nodes();
    nodes
        .put(NodeRecord::name_only(&name("edge-1"), 0))
        .unwrap();
    nodes.remove(&name("edge-1")).unwrap();
    assert_eq!(roll.refresh().await.unwrap(), [name("edge-1")]);
    world
        .until(|world| world.registry.node_tunnels(&name("edge-1")).0.is_empty())
        .await;
    drop(open);
}

#[tokio::test]
async fn removing_a_node_ends_its_tunnel_despite_a_cluster_node() {
    let world = World::start();
    let node = name("edge-1");
    let identity = world.enrolled("edge-1");
    let nodes = world.store.nodes();
    nodes.put(NodeRecord::name_only(&node, 0)).unwrap();
    let roll = world.roll();
    roll.refresh().await.unwrap();
    let member = ClusterNode {
        is_edge: true,
        ..ClusterNode::default()
    };
    world.nodes.replace_cluster([(node.clone(), member)].into());
    let _edge = world.joined(&identity, "a", 0).await;
    nodes.remove(&node).unwrap();
    assert_eq!(roll.refresh().await.unwrap(), std::slice::from_ref(&node));
    world
        .until(|world| world.registry.node_tunnels(&node).0.is_empty())
        .await;
    // The cluster admits the node again.
    let _edge = world.joined(&identity, "b", 0).await;
    assert_eq!(roll.refresh().await.unwrap(), []);
}

#[tokio::test]
async fn a_tunnel_ends_with_the_reason_if_its_node_changes_kind() {
    let world = World::start();
    let [moves, stays, deleted] = ["edge-1", "edge-2", "edge-3"].map(name);
    let member = |edge| ClusterNode {
        is_edge: edge,
        ..ClusterNode::default()
    };
    let cluster = |nodes: &[(&causeway_certs::NodeName, bool)]| {
        let members = nodes
            .iter()
            .map(|(node, edge)| ((*node).clone(), member(*edge)));
        world.nodes.replace_cluster(members.collect());
    };
    cluster(&[(&moves, true), (&stays, true), (&deleted, true)]);
    let vouched = |node: &causeway_certs::NodeName| identity(&world.live.get(), node.as_str());
    let mut edge = world.joined(&vouched(&moves), "a", 0).await;
    let _stays = world.joined(&vouched(&stays), "b", 0).await;
    let _deleted = world.joined(&vouched(&deleted), "c", 0).await;
    let following = TaskGroup::default();
    following.spawn(Span::none(), world.roll().follow_cluster());
    tokio::task::yield_now().await;
    cluster(&[(&moves, false), (&stays, true)]);
    let heard = edge.hear().await;
    let (why, detail) = dismissal(&heard).unwrap();
    assert_eq!(why, GoAway::NotAdmitted, "{detail}");
    assert!(
        detail.contains("Node edge-1 is not an edge node"),
        "{detail}"
    );
    world
        .until(|world| !world.registry.has_tunnel(&moves))
        .await;
    assert!(world.registry.has_tunnel(&stays) && world.registry.has_tunnel(&deleted));
}

/// Makes another root the signing one; both roots are trusted.
fn turn(world: &World, step: fn(Ca) -> Result<(Ca, RotationStep), CaError>) {
    let next = world
        .store
        .change_ca(|ca| Ok::<_, StoreError>(step(ca).unwrap()));
    world.live.swap(next.unwrap().0);
    world.take_up();
}

/// The edge connects under the old root and delays its hello.
#[tokio::test]
async fn a_refused_edge_replaces_no_other_tunnel() {
    let world = World::patient();
    let old = world.enrolled("edge-1");
    turn(&world, Ca::prepare);
    turn(&world, Ca::activate);
    let rightful = identity(&world.live.get(), "edge-1");
    let mut rightful = world.joined(&rightful, "a", 0).await;
    let mut late = world.dial(&old).await;
    let marker = identity(&world.live.get(), "edge-1");
    turn(&world, Ca::retire);
    let message = EdgeMessage::Welcome(Box::new(welcome("b", 0)));
    late.control.send(&message).await.unwrap();
    let heard = late.hear().await;
    let (why, detail) = dismissal(&heard).unwrap();
    assert_eq!(why, GoAway::NotAdmitted, "{detail}");
    drop(late);
    let _marker = world.joined(&marker, "a", 1).await;
    let message = rightful.control.receive::<GatewayMessage>().now_or_never();
    assert!(message.is_none(), "it was asked to leave");
    assert!(world.registry.select_tunnel(&name("edge-1")).is_ok());
}

#[tokio::test]
async fn an_unreadable_disk_admits_no_node_of_a_retired_root() {
    let world = World::start();
    let mut edge = world.joined(&world.enrolled("edge-1"), "a", 0).await;
    for step in [Ca::prepare, Ca::activate, Ca::retire] {
        turn(&world, step);
    }
    std::fs::write(world.store.root_path().with_file_name("nodes.json"), "{").unwrap();
    world.roll().refresh().await.unwrap_err();
    assert!(dismissal(&edge.hear().await).is_some());
    world
        .until(|world| !world.registry.has_tunnel(&name("edge-1")))
        .await;
}

#[tokio::test]
async fn a_node_of_a_retired_root_is_closed_unless_it_renewed() {
    let world = World::start();
    for node in ["edge-1", "edge-2"] {
        world
            .store
            .nodes()
            .put(NodeRecord::name_only(&name(node), 0))
            .unwrap();
    }
    let mut late = world.joined(&world.enrolled("edge-1"), "a", 0).await;
    let mut before = world.joined(&world.enrolled("edge-2"), "b", 0).await;
    let first = request(&world, "edge-2", &mut before).await;
    let mut bulk = world.joined(&world.enrolled("edge-2"), "b", 1).await;
    let second = request(&world, "edge-2", &mut bulk).await;
    turn(&world, Ca::prepare);
    turn(&world, Ca::activate);
    let takes_over = causeway_tunnel::control_stream::EdgeHello {
        takes_over: true,
        ..welcome("b", 0)
    };
    let renewed = identity(&world.live.get(), "edge-2");
    let (mut after, message) = world.says(&renewed, takes_over).await;
    assert_eq!(message, GatewayMessage::Registered);
    turn(&world, Ca::retire);
    world.roll().spawn_refresh();
    let message = late.hear().await;
    let (why, detail) = dismissal(&message).unwrap();
    assert_eq!(why, GoAway::NotAdmitted);
    assert!(detail.contains("a root that was retired"), "{detail}");
    drop(late);
    world
        .until(|world| !world.registry.has_tunnel(&name("edge-1")))
        .await;
    // Open streams under the old root of its process continue, and new ones use the new root.
    let third = request(&world, "edge-2", &mut after).await;
    for open in [first, second, third] {
        answered(open).await;
    }
    before.ended().await;
    bulk.ended().await;
}

/// Opens a request that its edge has received and not answered.
async fn request(
    world: &World,
    node: &str,
    edge: &mut FakeEdge,
) -> (OpenStream, Box<StreamRequest>) {
    let tunnel = world.registry.select_tunnel(&name(node)).unwrap().tunnel;
    let (head, target) = (Request::new(()), Target::new(node, 9100));
    let opened = tunnel.open(head, &StreamKind::Request, &target, true).await;
    let asked = timeout(LONG, edge.streams.recv()).await.unwrap();
    (opened.unwrap(), asked.unwrap())
}

/// Answers a request, and checks that the client receives the answer.
async fn answered((opened, asked): (OpenStream, Box<StreamRequest>)) {
    asked.responder.send(http::Response::new(()), true).unwrap();
    let answer = timeout(LONG, opened.response).await.unwrap();
    assert_eq!(answer.unwrap().status(), 200);
}

#[tokio::test]
async fn lines_that_an_edge_does_not_take_end_none_of_its_streams() {
    let world = World::start();
    let mut edge = world.joined(&world.enrolled("edge-1"), "a", 0).await;
    let open = request(&world, "edge-1", &mut edge).await;
    let control = world.registry.node_tunnels(&name("edge-1")).0[0]
        .tunnel
        .control
        .clone();
    let telling = async {
        let pem = "x".repeat(wire::MAX_MESSAGE / 2);
        while control
            .send(Box::new(GatewayMessage::Roots { pem: pem.clone() }))
            .await
            .is_ok()
        {}
    };
    // Completes when the hello timeout of another tunnel has passed.
    let bound = async { world.dial(&world.enrolled("edge-2")).await.ended().await };
    tokio::select! {
        () = telling => panic!("the tunnel was closed"),
        _ = bound => {}
    }
    answered(open).await;
}

#[tokio::test]
async fn a_message_that_is_too_long_for_an_edge_is_left_out() {
    let world = World::start();
    let mut edge = world.joined(&world.enrolled("edge-1"), "a", 0).await;
    let tunnels = world.registry.node_tunnels(&name("edge-1")).0;
    let control = &tunnels[0].tunnel.control;
    let roots = |length| GatewayMessage::Roots {
        pem: "x".repeat(length),
    };
    for length in [wire::MAX_MESSAGE, 10] {
        control.send(Box::new(roots(length))).await.unwrap();
    }
    assert_eq!(edge.hear().await, roots(10));
}

#[tokio::test]
async fn edges_that_ask_receive_root_changes_and_others_do_not() {
    let world = World::start();
    let asks = |roots: &[causeway_certs::Fingerprint]| causeway_tunnel::control_stream::EdgeHello {
        roots: Some(roots.iter().map(ToString::to_string).collect()),
        ..welcome("a", 0)
    };
    let step = |step: fn(Ca) -> Result<(Ca, RotationStep), CaError>| {
        let next = world.store.change_ca(|ca| {
            let stepped = step(ca).unwrap();
            Ok::<_, StoreError>(stepped)
        });
        world.live.swap(next.unwrap().0);
        ca_rotation::announce_rotation(&world.live.get(), &world.registry);
    };
    let before = world.live.get().fingerprints();
    let (mut here, heard) = world.says(&world.enrolled("edge-1"), asks(&before)).await;
    assert_eq!(heard, GatewayMessage::Registered);
    let (mut silent, heard) = world.says(&world.enrolled("edge-2"), welcome("b", 0)).await;
    assert_eq!(heard, GatewayMessage::Registered);

    step(Ca::prepare);
    let told = |ca: &Ca| GatewayMessage::Roots {
        pem: ca.bundle_pem(),
    };
    assert_eq!(here.hear().await, told(&world.live.get()));
    let roots = world.live.get().fingerprints();
    let roots: Vec<_> = roots.iter().map(ToString::to_string).collect();
    here.control
        .send(&EdgeMessage::Roots { roots })
        .await
        .unwrap();
    let believes = |world: &World| {
        let edges = world.registry.node_tunnels(&name("edge-1")).0;
        let roots = edges[0].tunnel.roots.load();
        roots.as_ref().is_some_and(|roots| roots.len() == 2)
    };
    world.until(believes).await;
    step(Ca::activate);
    // The roots are the same in another order: the signing root comes first.
    assert_eq!(here.hear().await, told(&world.live.get()));
    assert!(matches!(here.hear().await, GatewayMessage::Renew { .. }));
    let (mut late, heard) = world.says(&world.enrolled("edge-3"), asks(&before)).await;
    assert_eq!(heard, GatewayMessage::Registered);
    assert_eq!(late.hear().await, told(&world.live.get()));
    assert!(matches!(late.hear().await, GatewayMessage::Renew { .. }));

    let drain = GatewayMessage::Drain {
        grace_ms: 1,
        successor: false,
    };
    let edges = world.registry.node_tunnels(&name("edge-2")).0;
    edges[0]
        .tunnel
        .control
        .try_send(Box::new(drain.clone()))
        .unwrap();
    assert_eq!(silent.hear().await, drain, "and nothing before it");
}

#[tokio::test]
async fn edges_that_ask_receive_revocations_of_gateways_and_others_do_not() {
    let world = World::start();
    let asks = || causeway_tunnel::control_stream::EdgeHello {
        crls: true,
        ..welcome("a", 0)
    };
    let (mut here, heard) = world.says(&world.enrolled("edge-1"), asks()).await;
    assert_eq!(heard, GatewayMessage::Registered);
    let (mut silent, heard) = world.says(&world.enrolled("edge-2"), welcome("b", 0)).await;
    assert_eq!(heard, GatewayMessage::Registered);
    let reload = || {
        let revocation = &world.gateway_revocation;
        revocation.reload_and_announce(&world.registry).unwrap();
    };
    world.store.revoke_gateway("40aa", "stolen").unwrap();
    reload();
    let read = |message: GatewayMessage| {
        let GatewayMessage::Crls { pem } = message else {
            panic!("{message:?}");
        };
        let identity = identity(&world.ca, "edge-1");
        let verified = verify_crls(&pem, &identity.roots, &identity.trust_domain);
        verified.unwrap().0.serials()
    };
    assert_eq!(read(here.hear().await), ["40aa".to_owned()].into());
    // An unchanged list is not sent again.
    reload();
    let (mut late, heard) = world.says(&world.enrolled("edge-3"), asks()).await;
    assert_eq!(heard, GatewayMessage::Registered);
    assert_eq!(read(late.hear().await), ["40aa".to_owned()].into());
    world.store.revoke_gateway("40bb", "stolen").unwrap();
    // The nodes of this test have no records on the disk.
    world.roll().refresh().await.unwrap_err();
    let both = ["40aa".to_owned(), "40bb".to_owned()].into();
    assert_eq!(read(here.hear().await), both);

    let drain = GatewayMessage::Drain {
        grace_ms: 1,
        successor: false,
    };
    let edges = world.registry.node_tunnels(&name("edge-2")).0;
    let control = &edges[0].tunnel.control;
    control.try_send(Box::new(drain.clone())).unwrap();
    assert_eq!(silent.hear().await, drain, "and nothing before it");
}

#[tokio::test]
async fn nodes_that_confirm_the_present_revocations_are_counted() {
    let world = World::start();
    let asks = causeway_tunnel::control_stream::EdgeHello {
        crls: true,
        ..welcome("a", 0)
    };
    let (mut here, _) = world.says(&world.enrolled("edge-1"), asks).await;
    let (_silent, _) = world.says(&world.enrolled("edge-2"), welcome("b", 0)).await;
    let status = || {
        let status = world.gateway_revocation.status(&world.registry, Vec::new());
        serde_json::to_value(status).unwrap()
    };
    let expected =
        |revoked, informed| json!({ "revoked": revoked, "connected": 2, "informed": informed });
    assert_eq!(status(), expected(0, 2));
    for (revoked, serial) in [(1, "40aa"), (2, "40bb")] {
        world.store.revoke_gateway(serial, "stolen").unwrap();
        let revocation = &world.gateway_revocation;
        revocation.reload_and_announce(&world.registry).unwrap();
        let message = here.hear().await;
        let GatewayMessage::Crls { pem } = message else {
            panic!("{message:?}");
        };
        // The confirmation of an earlier list does not count.
        assert_eq!(status(), expected(revoked, 0));
        let digest = Fingerprint::digest(pem.as_bytes());
        let confirmation = EdgeMessage::Crls {
            digest: digest.to_string(),
        };
        here.control.send(&confirmation).await.unwrap();
        let is_received = |world: &World| {
            let edges = world.registry.node_tunnels(&name("edge-1")).0;
            edges[0].tunnel.crls.load().as_deref() == Some(&digest)
        };
        world.until(is_received).await;
        assert_eq!(status(), expected(revoked, 1));
    }
}

#[tokio::test]
async fn nodes_of_other_gateways_count_if_these_have_the_same_revocations() {
    let world = World::start();
    let (_here, _) = world.says(&world.enrolled("edge-1"), welcome("a", 0)).await;
    world.store.revoke_gateway("40aa", "stolen").unwrap();
    let revocation = &world.gateway_revocation;
    revocation.reload_and_announce(&world.registry).unwrap();
    let own = revocation.progress(&world.registry);
    let status = |progress| {
        let other = PeerRevocations {
            address: "192.0.2.1:10262".to_owned(),
            // The first node has not confirmed at this gateway either.
            nodes: vec![name("edge-1"), name("edge-2")],
            progress,
        };
        serde_json::to_value(revocation.status(&world.registry, vec![other])).unwrap()
    };
    let counted = json!({ "revoked": 1, "connected": 2, "informed": 1 });
    assert_eq!(status(Ok(own)), counted);
    let different = Ok(RevocationProgress::default());
    for (progress, error) in [
        (different, "it does not have the same revocations"),
        (Err("it is silent".to_owned()), "it is silent"),
    ] {
        let uncounted = json!([{ "address": "192.0.2.1:10262", "error": error }]);
        let expected =
            json!({ "revoked": 1, "connected": 2, "informed": 0, "uncounted": uncounted });
        assert_eq!(status(progress), expected);
    }
}

#[tokio::test]
async fn a_list_that_cannot_be_signed_is_in_force_here_and_no_node_counts() {
    let world = World::start();
    let asks = causeway_tunnel::control_stream::EdgeHello {
        crls: true,
        ..welcome("a", 0)
    };
    let (mut here, _) = world.says(&world.enrolled("edge-1"), asks).await;
    let revocation = &world.gateway_revocation;
    let reload = || revocation.reload_and_announce(&world.registry).unwrap();
    let status = || serde_json::to_value(revocation.status(&world.registry, Vec::new())).unwrap();
    let expected =
        |revoked, informed| json!({ "revoked": revoked, "connected": 1, "informed": informed });
    world.store.revoke_gateway("40aa", "stolen").unwrap();
    let file = world.store.root_path();
    let file = file.with_file_name("revoked-gateways.json");
    let valid = std::fs::read_to_string(&file).unwrap();
    // A CRL has no such time.
    let mut list: Value = serde_json::from_str(&valid).unwrap();
    list["40aa"]["at"] = u64::MAX.into();
    std::fs::write(&file, list.to_string()).unwrap();
    reload();
    assert!(revocation.revoked().contains("40aa"));
    assert_eq!(status(), expected(1, 0));
    // The list with a valid time is signed and sent.
    std::fs::write(&file, valid).unwrap();
    reload();
    let GatewayMessage::Crls { pem } = here.hear().await else {
        panic!("no revocations");
    };
    let digest = Fingerprint::digest(pem.as_bytes());
    let confirmation = EdgeMessage::Crls {
        digest: digest.to_string(),
    };
    here.control.send(&confirmation).await.unwrap();
    world
        .until(|world| {
            let status = world.gateway_revocation.status(&world.registry, Vec::new());
            serde_json::to_value(status).unwrap() == expected(1, 1)
        })
        .await;
    // The CRLs before this list are confirmed, and do not have its revocation.
    list["40bb"] = list["40aa"].clone();
    std::fs::write(&file, list.to_string()).unwrap();
    reload();
    assert_eq!(status(), expected(2, 0));
}

#[tokio::test]
async fn shutdown_of_the_gateway_leaves_no_task_or_socket() {
    let mut world = World::start();
    let edge = world.joined(&world.enrolled("edge-1"), "a", 0).await;
    let tunnel = world
        .registry
        .select_tunnel(&name("edge-1"))
        .unwrap()
        .tunnel;
    drop(std::mem::take(&mut world.tasks));
    edge.ended().await;
    assert!(!tunnel.is_open());
    assert!(!world.registry.has_tunnel(&name("edge-1")));
    assert!(world.counted("tunnels 0"));
}

#[tokio::test]
async fn a_drain_tells_the_edges_lets_streams_end_and_closes() {
    let world = World::start();
    let mut edge = world.joined(&world.enrolled("edge-1"), "a", 0).await;
    let tunnel = world
        .registry
        .select_tunnel(&name("edge-1"))
        .unwrap()
        .tunnel;
    let head = Request::get("/").body(()).unwrap();
    let target = Target::new("edge-1", 9100);
    let opened = tunnel
        .open(head, &StreamKind::Request, &target, true)
        .await
        .unwrap();
    let asked = timeout(LONG, edge.streams.recv()).await.unwrap().unwrap();
    world.readiness.set_ready();
    world.stop.cancel();
    let grace = LONG;
    let listeners = CancellationToken::new();
    let draining = drain(
        &world.registry,
        &world.metrics,
        &world.readiness,
        listeners_of(&listeners),
        grace,
    );
    let serving = async {
        assert!(matches!(
            edge.hear().await,
            GatewayMessage::Drain {
                grace_ms: 1..=120_000,
                successor: false,
            }
        ));
        assert!(world.readiness.is_draining());
        assert!(tunnel.is_open() && !listeners.is_cancelled());
        asked.responder.send(http::Response::new(()), true).unwrap();
        assert_eq!(opened.response.await.unwrap().status(), 200);
        drop((opened.send, asked.body));
        edge.ended().await;
        assert!(listeners.is_cancelled());
    };
    timeout(LONG, async { tokio::join!(draining, serving) })
        .await
        .unwrap();
    world.until(|world| world.tasks.is_empty()).await;
    assert!(
        TcpStream::connect(world.address).await.is_err(),
        "the port is closed"
    );
}

/// Returns listeners without clients.
fn listeners_of(close: &CancellationToken) -> DrainListeners<'_> {
    DrainListeners {
        close,
        clients: &|| 0,
        egress: EgressUsage::default(),
        successor: Successor::default(),
    }
}

#[tokio::test]
async fn a_drain_ends_streams_that_do_not_end_themselves() {
    let world = World::start();
    let mut edge = world.joined(&world.enrolled("edge-1"), "a", 0).await;
    let tunnel = world
        .registry
        .select_tunnel(&name("edge-1"))
        .unwrap()
        .tunnel;
    let target = Target::new("edge-1", 22);
    let opened = tunnel
        .open(Request::new(()), &StreamKind::Tcp, &target, false)
        .await
        .unwrap();
    let asked = timeout(LONG, edge.streams.recv()).await.unwrap().unwrap();
    let grace = Duration::from_millis(400);
    let listeners = CancellationToken::new();
    drain(
        &world.registry,
        &world.metrics,
        &world.readiness,
        listeners_of(&listeners),
        grace,
    )
    .await;
    assert!(listeners.is_cancelled());
    assert!(opened.response.await.is_err());
    drop(asked);
    edge.ended().await;
}

/// Small limits that a test can reach.
const FEW: TunnelPortLimits = TunnelPortLimits {
    arriving: 8,
    handshakes: 4,
    joining: 4,
    renewing: 4,
};

/// All connections come from the edge's own address, which is the worst case.
#[tokio::test]
async fn silent_connections_keep_no_edge_out() {
    let world = World::with_places(FEW);
    let edge = world.enrolled("edge-1");
    let mut silent = Vec::new();
    for _ in 0..4 * FEW.arriving {
        silent.push(TcpStream::connect(world.address).await.unwrap());
    }
    let _tunnel = world.joined(&edge, "a", 0).await;
    let evicted = 4 * FEW.arriving - FEW.arriving * 3 / 4 + 1;
    let line = format!(
        r#"connections_rejected_total{{limit="tunnel_arriving",outcome="evicted"}} {evicted}"#
    );
    world.until(|world| world.counted(&line)).await;
}

/// Each connection comes from a different address, and the same number is opened again when the edge restarts.
#[tokio::test]
async fn silent_connections_from_many_addresses_keep_no_edge_out() {
    let world = World::with_places(FEW);
    let edge = world.enrolled("edge-1");
    let mut silent = Vec::new();
    let mut stranger = async |number: usize| {
        let socket = TcpSocket::new_v4().unwrap();
        let [.., high, low] = u32::try_from(number).unwrap().to_be_bytes();
        let from = std::net::SocketAddr::from(([127, 1, high, low], 0));
        socket.bind(from).unwrap();
        silent.push(socket.connect(world.address).await.unwrap());
    };
    for round in 0..8 {
        for number in 0..2 * FEW.arriving {
            stranger(round * 2 * FEW.arriving + number).await;
        }
        // The edge process has another instance identifier each time.
        let _tunnel = world.joined(&edge, &round.to_string(), 0).await;
    }
}

/// A peer that has sent half of its `ClientHello` counts like a peer that has sent nothing.
#[tokio::test]
async fn begun_client_hellos_keep_no_edge_out() {
    let world = World::with_places(FEW);
    let edge = world.enrolled("edge-1");
    let mut begun = Vec::new();
    for _ in 0..4 * FEW.arriving {
        let mut tcp = TcpStream::connect(world.address).await.unwrap();
        // Sends the header of a handshake record without its content.
        tcp.write_all(&[22, 3, 1, 0, 200, 1]).await.unwrap();
        begun.push(tcp);
    }
    let _tunnel = world.joined(&edge, "a", 0).await;
}

#[tokio::test]
async fn a_connection_that_waits_too_long_for_its_handshake_is_refused() {
    let world = World::with_places(TunnelPortLimits {
        handshakes: 1,
        ..FEW
    });
    let edge = world.enrolled("edge-1");
    let config = verify::tunnel_client(&edge).unwrap();
    let stall = async || {
        let name = ServerName::from(world.address.ip());
        let mut hello = Vec::new();
        let mut stalled = ClientConnection::new(config.clone(), name).unwrap();
        stalled.write_tls(&mut hello).unwrap();
        let mut tcp = TcpStream::connect(world.address).await.unwrap();
        tcp.write_all(&hello).await.unwrap();
        // The gateway has answered, and waits for the end of the handshake.
        tcp.read_u8().await.unwrap();
        tcp
    };
    let refused = async {
        loop {
            let stalled = stall().await;
            if world.tls(config.clone()).await.is_err() {
                return stalled;
            }
            // On a slow machine the time of the stalled handshake was over first.
        }
    };
    let tcp = timeout(LONG, refused).await.unwrap();
    let refused = r#"handshakes_failed_total{listener="tunnel",why="overloaded"} 1"#;
    world.until(|world| world.counted(refused)).await;
    drop(tcp);
    let _tunnel = world.joined(&edge, "a", 0).await;
}

#[tokio::test]
async fn unknown_tls_peers_block_neither_enrolment_nor_renewal() {
    let world = World::with_places(FEW);
    let stranger = verify::join_client(world.ca.fingerprint()).unwrap();
    let stranger = offering(&stranger, wire::ALPN_HTTP11);
    let mut idle = Vec::new();
    for _ in 0..4 * FEW.joining {
        idle.push(world.tls(stranger.clone()).await.unwrap());
    }
    let asks = async |config: Arc<ClientConfig>| {
        let mut io = world.tls(config).await.unwrap();
        io.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            .await
            .unwrap();
        let mut head = [0; 12];
        timeout(LONG, io.read_exact(&mut head))
            .await
            .unwrap()
            .unwrap();
        String::from_utf8(head.to_vec()).unwrap()
    };
    assert_eq!(asks(stranger).await, "HTTP/1.1 404");
    let edge = world.enrolled("edge-1");
    let renews = verify::control_client(&edge).unwrap();
    assert_eq!(
        asks(offering(&renews, wire::ALPN_HTTP11)).await,
        "HTTP/1.1 404"
    );
    let metrics = world.metrics.encode(causeway_rt::Exposition::OpenMetrics);
    assert!(
        !metrics.contains("limit=\"renewing\""),
        "no unauthenticated connection is counted there"
    );
}

#[tokio::test]
async fn peers_hear_of_flapping_health_once_in_a_while_and_of_its_last_state() {
    const REPORTS: usize = 64;
    let world = World::start();
    let mut edge = world.joined(&world.enrolled("edge-1"), "a", 0).await;
    let mut changes = world.registry.watch_changes();
    let mut report = async |unhealthy: Vec<u16>| {
        let message = EdgeMessage::Health {
            unhealthy: unhealthy.clone(),
        };
        edge.control.send(&message).await.unwrap();
        let is_known = |world: &World| world.registry.unhealthy_ports(&name("edge-1")) == unhealthy;
        world.until(is_known).await;
    };
    for number in 0..REPORTS {
        report(if number % 2 == 0 { vec![80] } else { vec![] }).await;
    }
    let notices = std::iter::from_fn(|| changes.try_recv().ok()).count();
    assert!(notices < REPORTS / 2, "{notices} notices");
    report(vec![443]).await;
    let last = timeout(LONG, changes.recv()).await.unwrap();
    assert_eq!(last.unwrap(), name("edge-1"));
}
