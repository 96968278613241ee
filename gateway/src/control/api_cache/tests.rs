//! Edges that read from the gateway, over real connections to a tunnel port.

use super::*;
use crate::{
    config::{AccessRule, ApiCache},
    control::tests::{
        FakeEdge, LONG, welcome,
        world::{World, impatient, name},
    },
    state::{
        Node,
        directory::Peer,
        pool_reports::{NamedLeader, PoolReport, ReportedCandidate, ReportedMember},
    },
};
use axum::body::Bytes;
use causeway_certs::{EdgeIdentity, verify};
use causeway_rt::task::TaskGroup;
use causeway_tunnel::{
    control_stream::{EdgeHello, GatewayMessage, NodePoolMember, NodePoolMembers},
    wire,
};
use causeway_watch_cache::{ListWatch, SourceResponse, reflect};
use futures_util::{StreamExt, stream};
use http_body_util::{BodyExt, Empty};
use hyper::{Request as Asked, body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::Value;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use tracing::info_span;

const SERVICES: &str = "/api/v1/services";

/// Fake cluster with one object of each resource, which never changes.
struct Still;

impl ListWatch for Still {
    fn get(&self, asked: String) -> BoxFuture<'_, Result<SourceResponse, String>> {
        let kind = if asked.starts_with(SERVICES) {
            "ServiceList"
        } else if asked.contains("endpointslices") {
            "EndpointSliceList"
        } else {
            "EndpointsList"
        };
        let object = json!({ "metadata": { "name": "one", "namespace": "shop", "uid": "u", "resourceVersion": "5" } });
        let list =
            json!({ "kind": kind, "metadata": { "resourceVersion": "7" }, "items": [object] });
        let body = if asked.contains("watch=true") {
            stream::pending().boxed()
        } else {
            stream::iter([Ok(Bytes::from(list.to_string()))]).boxed()
        };
        Box::pin(async move {
            Ok(SourceResponse {
                status: StatusCode::OK,
                headers: axum::http::HeaderMap::new(),
                body,
            })
        })
    }
}

/// Starts a gateway whose API cache reads from [`Still`].
async fn world(rules: &ApiCache) -> World {
    let world = World::read(rules);
    for store in world.reading.as_ref().unwrap().watch_cache().stores() {
        let store = store.clone();
        world.tasks.spawn(info_span!("cluster"), async move {
            reflect(&store, &Still).await;
        });
    }
    world
        .until(|world| {
            let pool = world.reading.as_ref().unwrap().watch_cache();
            pool.stores().iter().all(|store| store.status().synced)
        })
        .await;
    world
}

/// One API cache connection of an edge.
struct Client {
    send: http2::SendRequest<Empty<Bytes>>,
    _driver: TaskGroup,
}

impl Client {
    /// Connects by HTTP/2, with the certificate of `identity` if there is one.
    async fn dial(world: &World, identity: Option<&EdgeIdentity>) -> Self {
        let config = match identity {
            Some(identity) => verify::control_client(identity),
            None => verify::join_client(world.ca.fingerprint()),
        };
        let mut config = rustls::ClientConfig::clone(&config.unwrap());
        config.alpn_protocols = vec![wire::ALPN_H2.to_vec()];
        let io = world.tls(Arc::new(config)).await.unwrap();
        let io = TokioIo::new(io);
        let connected = http2::handshake(TokioExecutor::new(), io).await;
        let (send, connection) = connected.unwrap();
        let driver = TaskGroup::default();
        driver.spawn(info_span!("api_cache"), async move {
            let _ = connection.await;
        });
        Self {
            send,
            _driver: driver,
        }
    }

    async fn ask(&mut self, path: &str) -> hyper::Result<Response<Incoming>> {
        let asked = Asked::get(format!("https://gw{path}"));
        let asked = asked.body(Empty::new()).unwrap();
        timeout(LONG, self.send.send_request(asked)).await.unwrap()
    }

    async fn get(&mut self, path: &str) -> (u16, Value) {
        let answer = self.ask(path).await.unwrap();
        let code = answer.status().as_u16();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (code, serde_json::from_slice(&body).unwrap_or_default())
    }

    async fn watch(&mut self) -> Incoming {
        let path = format!("{SERVICES}?watch=true&resourceVersion=7");
        let answer = self.ask(&path).await.unwrap();
        assert_eq!(answer.status(), 200);
        answer.into_body()
    }
}

/// Waits until a watch has ended in order.
async fn over(mut watch: Incoming) {
    let ended = async { while watch.frame().await.transpose().unwrap().is_some() {} };
    timeout(LONG, ended).await.unwrap();
}

fn is_open(watch: &mut Incoming) -> bool {
    let mut context = Context::from_waker(std::task::Waker::noop());
    http_body::Body::poll_frame(Pin::new(watch), &mut context).is_pending()
}

#[tokio::test]
async fn a_reader_needs_an_edge_certificate_and_others_join_as_before() {
    let world = world(&ApiCache::default()).await;
    let identity = world.enrolled("edge-1");
    let mut reader = Client::dial(&world, Some(&identity)).await;
    let (code, list) = reader.get(SERVICES).await;
    assert_eq!((code, &list["kind"]), (200, &json!("ServiceList")));
    assert_eq!(list["items"][0]["metadata"]["name"], "one");
    assert!(world.counted("api_cache_connections 1"));
    let (code, _) = Client::dial(&world, None).await.get(SERVICES).await;
    assert_eq!(code, 404);
    let stranger = crate::control::tests::world::identity(&world.ca, "edge-9");
    let mut stranger = Client::dial(&world, Some(&stranger)).await;
    assert!(stranger.ask(SERVICES).await.is_err());
    assert!(world.counted(r#"handshakes_failed_total{listener="tunnel",why="not_admitted"} 1"#));
    let off = World::start();
    let identity = off.enrolled("edge-1");
    let mut joining = Client::dial(&off, Some(&identity)).await;
    assert_eq!(joining.get(SERVICES).await.0, 404);
}

#[tokio::test]
async fn readers_are_limited_by_api_cache_connections_and_counted() {
    let rules = ApiCache {
        connections: 1,
        ..ApiCache::default()
    };
    let world = world(&rules).await;
    let mut first = Client::dial(&world, Some(&world.enrolled("edge-1"))).await;
    let mut watch = first.watch().await;
    world
        .until(|world| world.counted("api_cache_connections 1"))
        .await;
    let mut second = Client::dial(&world, Some(&world.enrolled("edge-2"))).await;
    assert!(second.ask(SERVICES).await.is_err());
    let refused = r#"limits_reached_total{limit="api_cache_connections"} 1"#;
    world.until(|world| world.counted(refused)).await;
    assert!(world.counted("api_cache_connections_limit 1") && is_open(&mut watch));
}

#[tokio::test]
async fn a_fifth_connection_of_a_node_ends_its_oldest() {
    let world = world(&ApiCache::default()).await;
    let identity = world.enrolled("edge-1");
    let mut all = Vec::new();
    for _ in 0..5 {
        let mut reader = Client::dial(&world, Some(&identity)).await;
        let watch = reader.watch().await;
        all.push((reader, watch));
    }
    let (_oldest, watch) = all.remove(0);
    over(watch).await;
    world
        .until(|world| world.counted("api_cache_connections 4"))
        .await;
    assert!(all.iter_mut().all(|(_, watch)| is_open(watch)));
}

#[tokio::test]
async fn revocation_ends_a_nodes_watches_and_refuses_new_ones() {
    let world = world(&ApiCache::default()).await;
    let identity = world.enrolled("edge-1");
    let mut reader = Client::dial(&world, Some(&identity)).await;
    let watch = reader.watch().await;
    world.nodes.replace_revoked([name("edge-1")].into());
    over(watch).await;
    world
        .until(|world| world.counted("api_cache_connections 0"))
        .await;
    let mut again = Client::dial(&world, Some(&identity)).await;
    assert!(again.ask(SERVICES).await.is_err());
}

#[tokio::test]
async fn retirement_of_its_root_ends_an_idle_nodes_watches() {
    let world = world(&ApiCache::default()).await;
    let identity = world.enrolled("edge-1");
    let mut reader = Client::dial(&world, Some(&identity)).await;
    let watch = reader.watch().await;
    world
        .live
        .swap(crate::control::tests::world::new_ca("test.example"));
    world.take_up();
    // The data directory has no record of the node, which is also a reason to close, but this call does not use the data
    // directory.
    let roll = world.roll();
    let (reading, tls) = (roll.api_cache.unwrap(), roll.tls.load_full());
    reading.close_rejected(|node, shown| {
        super::super::eligibility::untrusted_reason(tls.is_still_trusted(shown), node, shown)
    });
    over(watch).await;
}

#[tokio::test]
async fn a_drain_ends_watches_in_order() {
    let world = world(&ApiCache::default()).await;
    let identity = world.enrolled("edge-1");
    let mut reader = Client::dial(&world, Some(&identity)).await;
    let watch = reader.watch().await;
    world.stop.cancel();
    over(watch).await;
}

#[tokio::test]
async fn a_pool_reads_by_its_rule_until_the_node_changes_pool() {
    let texts = |all: &[&str]| Some(all.iter().map(ToString::to_string).collect());
    let rules = ApiCache {
        allow: Some(vec![AccessRule {
            pools: texts(&["north-*"]),
            resources: texts(&["v1/services"]),
            namespaces: None,
        }]),
        ..ApiCache::default()
    };
    let world = world(&rules).await;
    let of = |pool: &str| Node {
        pool: Some(pool.to_owned()),
        ..Node::default()
    };
    let identity = world.enrolled("edge-1");
    let mut nobody = Client::dial(&world, Some(&identity)).await;
    let (code, status) = nobody.get(SERVICES).await;
    assert_eq!((code, &status["reason"]), (403, &json!("Forbidden")));
    let message = status["message"].as_str().unwrap();
    assert!(message.contains("api_cache.allow"), "{message}");
    world.nodes.upsert(name("edge-1"), of("north-1"));
    let mut reader = Client::dial(&world, Some(&identity)).await;
    assert_eq!(reader.get(SERVICES).await.0, 200);
    assert_eq!(reader.get("/api/v1/endpoints").await.0, 403);
    let watch = reader.watch().await;
    world.nodes.upsert(name("edge-1"), of("south"));
    over(watch).await;
}

/// Connects an edge that serves other members, and returns its tunnel with the first announcement.
async fn member(world: &World, node: &str, at: &str) -> (FakeEdge, NodePoolMembers) {
    let identity = crate::control::tests::world::identity(&world.ca, node);
    let welcome = EdgeHello {
        site: Some(vec![at.to_owned(), "nonsense".to_owned()]),
        ..welcome(node, 0)
    };
    let (mut edge, heard) = world.says(&identity, welcome).await;
    assert_eq!(heard, GatewayMessage::Registered);
    let told = told(&mut edge).await;
    (edge, told)
}

async fn told(edge: &mut FakeEdge) -> NodePoolMembers {
    match edge.hear().await {
        GatewayMessage::Pool(members) => members,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn one_pool_leader_stays_until_lost_and_members_get_changes() {
    let world = World::read(&ApiCache::default());
    for node in ["edge-1", "edge-2", "edge-4"] {
        is_of_north(&world, node);
    }
    world.nodes.upsert(name("edge-3"), Node::default());
    let at = |nth: u8| NodePoolMember {
        node: format!("edge-{nth}"),
        at: vec![format!("10.0.0.{nth}:10271")],
    };
    let expected = |leader: &str, members: &[u8]| NodePoolMembers {
        pool: Some("north".to_owned()),
        leader: Some(leader.to_owned()),
        members: members.iter().map(|nth| at(*nth)).collect(),
    };
    let (mut first, text) = member(&world, "edge-1", "10.0.0.1:10271").await;
    assert_eq!(text, expected("edge-1", &[1]));
    let (mut second, text) = member(&world, "edge-2", "10.0.0.2:10271").await;
    assert_eq!(text, expected("edge-1", &[1, 2]));
    let (_alone, text) = member(&world, "edge-3", "10.0.0.3:10271").await;
    assert_eq!(text, NodePoolMembers::default());
    // A new member gets the whole list, because it may be cut off soon.
    let (_third, text) = member(&world, "edge-4", "10.0.0.4:10271").await;
    assert_eq!(text, expected("edge-1", &[1, 2, 4]));
    // The leader receives each change at once. The other member may receive it together with later changes.
    assert_eq!(told(&mut first).await, expected("edge-1", &[1, 2]));
    assert_eq!(told(&mut first).await, expected("edge-1", &[1, 2, 4]));
    assert_eq!(told(&mut second).await, expected("edge-1", &[1, 2, 4]));
    world
        .until(|world| world.counted("api_cache_leaders 1"))
        .await;
    drop(first);
    // An edge that lost its path to the cloud reads from the other edge, which has to admit it.
    let text = told(&mut second).await;
    assert_eq!(text, expected("edge-2", &[2, 4, 1]));
    world.nodes.upsert(name("edge-1"), Node::default());
    assert_eq!(told(&mut second).await, expected("edge-2", &[2, 4]));
    assert!(leads_north(&world, "edge-2"));
}

/// Its tunnel is closed only after the table of nodes has changed.
#[tokio::test]
async fn a_revoked_member_leaves_its_pool_before_its_tunnel_ends() {
    let world = World::read(&ApiCache::default());
    for node in ["edge-1", "edge-2", "edge-3"] {
        is_of_north(&world, node);
    }
    let names = |text: &NodePoolMembers| {
        let members = text.members.iter().map(|member| member.node.clone());
        members.collect::<Vec<_>>()
    };
    let (first, _) = member(&world, "edge-1", "10.0.0.1:10271").await;
    let (mut second, text) = member(&world, "edge-2", "10.0.0.2:10271").await;
    assert_eq!(text.leader.as_deref(), Some("edge-1"));
    world.nodes.replace_revoked([name("edge-1")].into());
    let text = told(&mut second).await;
    assert_eq!(text.leader.as_deref(), Some("edge-2"));
    assert_eq!(names(&text), ["edge-2"]);
    assert!(world.registry.has_tunnel(&name("edge-1")));
    drop(first);
    world
        .until(|world| !world.registry.has_tunnel(&name("edge-1")))
        .await;
    // Nor is it a member that has lost its gateway.
    let (_third, text) = member(&world, "edge-3", "10.0.0.3:10271").await;
    assert_eq!(names(&text), ["edge-2", "edge-3"]);
    assert_eq!(told(&mut second).await, text);
}

/// Lets time pass for timers, while sockets go on.
async fn advance(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}

/// Returns a peer that has reported these members of the pool, and the first one as the leader for a minute.
fn peer_of_north(world: &World, members: &[u8]) -> Arc<Peer> {
    let since = Instant::now() - Duration::from_mins(1);
    let node = |nth: u8| name(&format!("edge-{nth}"));
    let leader = node(members[0]);
    let members = members.iter().map(|nth| ReportedMember {
        node: node(*nth),
        at: vec![format!("10.0.0.{nth}:10271")],
        candidate: Some(ReportedCandidate {
            connected_since: since,
            streams: 0,
            unanswered_since: None,
            is_late: false,
            is_heard: false,
        }),
    });
    let report = PoolReport {
        is_draining: false,
        leader: Some(NamedLeader {
            node: leader,
            since,
            lost_at: None,
        }),
        members: members.collect(),
    };
    // Any tunnel that answers serves as its control connection.
    let control = world
        .registry
        .select_tunnel(&name("edge-1"))
        .unwrap()
        .tunnel;
    let identity = ("peer".to_owned(), "1".to_owned());
    let peer = Arc::new(Peer::new("peer.test:1", identity, control, 1));
    peer.set_pool("north".to_owned(), Some(report));
    peer
}

#[tokio::test]
async fn edges_learn_members_and_leader_of_other_gateways() {
    let world = World::read(&ApiCache::default());
    for node in ["edge-1", "edge-2", "edge-3", "edge-4"] {
        is_of_north(&world, node);
    }
    world.nodes.replace_revoked([name("edge-3")].into());
    let expected = |leader: u8, members: &[u8]| {
        let members = members.iter().map(|nth| NodePoolMember {
            node: format!("edge-{nth}"),
            at: vec![format!("10.0.0.{nth}:10271")],
        });
        NodePoolMembers {
            pool: Some("north".to_owned()),
            leader: Some(format!("edge-{leader}")),
            members: members.collect(),
        }
    };
    let (mut edge, text) = member(&world, "edge-1", "10.0.0.1:10271").await;
    assert_eq!(text, expected(1, &[1]));
    let directory = world.registry.directory();
    let peer = peer_of_north(&world, &[2, 3, 4]);
    assert!(directory.add(&peer));
    // The peer's leader has led for longer. A node that is revoked here is no member.
    assert_eq!(told(&mut edge).await, expected(2, &[2, 1, 4]));
    let own = directory.pool_exchange().own_report("north").unwrap();
    let nodes = own.members.iter().map(|member| member.node.clone());
    assert_eq!(nodes.collect::<Vec<_>>(), [name("edge-1")]);
    world.until(|world| leads_north(world, "edge-2")).await;
    assert!(world.counted("api_cache_leaders 0"), "it leads elsewhere");
    // The leader may be moving here. Edges that have lost their gateway remain members.
    assert!(directory.remove(&peer));
    advance(Duration::from_secs(1)).await;
    let is_lost = |world: &World| {
        let exchange = world.registry.directory().pool_exchange();
        let leader = exchange
            .own_report("north")
            .and_then(|report| report.leader.clone());
        leader.is_some_and(|leader| leader.lost_at.is_some())
    };
    world.until(is_lost).await;
    assert!(leads_north(&world, "edge-2"));
    advance(Duration::from_secs(4)).await;
    assert_eq!(told(&mut edge).await, expected(1, &[1, 2, 4]));
    world
        .until(|world| world.counted("api_cache_leaders 1"))
        .await;
}

#[tokio::test]
async fn other_gateways_put_no_node_into_a_pool_to_which_it_does_not_belong() {
    let world = World::read(&ApiCache::default());
    for node in ["edge-1", "edge-2"] {
        is_of_north(&world, node);
    }
    let of_south = Node {
        pool: Some("south".to_owned()),
        ..Node::default()
    };
    world.nodes.upsert(name("edge-3"), of_south);
    let (mut edge, _) = member(&world, "edge-1", "10.0.0.1:10271").await;
    let directory = world.registry.directory();
    // There is no node with the name edge-4.
    assert!(directory.add(&peer_of_north(&world, &[3, 2, 4])));
    let text = told(&mut edge).await;
    let members = text.members.iter().map(|member| member.node.as_str());
    assert_eq!(members.collect::<Vec<_>>(), ["edge-1", "edge-2"]);
    assert_eq!(text.leader.as_deref(), Some("edge-1"));
    // The peer knew earlier that the node has moved to the pool.
    is_of_north(&world, "edge-3");
    assert_eq!(told(&mut edge).await.leader.as_deref(), Some("edge-3"));
}

#[tokio::test]
async fn a_peer_is_not_in_charge_once_it_answers_late() {
    // It is late long before it is suspect.
    let world = World::read_with(config::Tunnel {
        ping_timeout: LONG,
        ..impatient()
    });
    is_of_north(&world, "edge-1");
    let (edge, _) = member(&world, "edge-1", "10.0.0.1:10271").await;
    let peer = peer_of_north(&world, &[1]);
    let directory = world.registry.directory();
    assert!(directory.add(&peer));
    assert!(directory.pool_reports("north")[0].is_active);
    edge.hushed.send_replace(true);
    peer.control().request_probe();
    world
        .until(|_| !peer.control().unanswered_for().is_zero())
        .await;
    advance(Duration::from_millis(1_200)).await;
    let late = &directory.pool_reports("north")[0];
    assert!(!late.is_active && late.unanswered_for.is_some());
    assert!(!peer.is_suspect());
}

#[tokio::test]
async fn peers_learn_that_a_gateway_that_drains_names_no_leaders() {
    let world = World::read(&ApiCache::default());
    is_of_north(&world, "edge-1");
    let (_edge, _) = member(&world, "edge-1", "10.0.0.1:10271").await;
    let exchange = world.registry.directory().pool_exchange();
    let mut reports = exchange.subscribe();
    assert!(!exchange.own_report("north").unwrap().is_draining);
    world.stop.cancel();
    let reported = reports.wait_for(|reports| {
        let report = reports.get("north");
        report.is_some_and(|report| report.is_draining)
    });
    timeout(LONG, reported).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_silent_leader_stays_until_another_node_was_heard() {
    let world = World::read(&ApiCache::default());
    for node in ["edge-1", "edge-2"] {
        is_of_north(&world, node);
    }
    let (first, _) = member(&world, "edge-1", "10.0.0.1:10271").await;
    let (second, text) = member(&world, "edge-2", "10.0.0.2:10271").await;
    assert_eq!(text.leader.as_deref(), Some("edge-1"));
    // The edges stop answering, as in a site whose uplink stalls.
    first.hushed.send_replace(true);
    second.hushed.send_replace(true);
    let tunnel = |node| world.registry.select_tunnel(&name(node)).unwrap().tunnel;
    let (leading, other) = (tunnel("edge-1"), tunnel("edge-2"));
    // An answer in transit would be heard after the leader's probe.
    world
        .until(|_| other.idle_for() > Duration::from_millis(300))
        .await;
    leading.request_probe();
    world.until(|_| !other.unanswered_for().is_zero()).await;
    world.until(|_| leading.is_suspect()).await;
    // Longer than the interval between two checks.
    advance(Duration::from_millis(1_200)).await;
    assert!(leads_north(&world, "edge-1"));
    second.hushed.send_replace(false);
    world.until(|world| leads_north(world, "edge-2")).await;
    assert!(!leading.leaving_token().is_cancelled(), "it still exists");
}

fn is_of_north(world: &World, node: &str) {
    let of_north = Node {
        pool: Some("north".to_owned()),
        ..Node::default()
    };
    world.nodes.upsert(name(node), of_north);
}

fn leads_north(world: &World, node: &str) -> bool {
    let led = world.reading.as_ref().unwrap().leaders.get();
    led["north"] == name(node)
}
