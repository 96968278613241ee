mod cluster;

use super::*;
use crate::{
    control::tests::world::{World, identity, name},
    shared_state::tests::MemoryEngine,
    state::GatewayEndpoints,
};
use axum::{body::Body, http::Request};
use causeway_certs::{EdgeIdentity, NodeAttributes, PrivateKey, verify};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::UnixTime;
use serde_json::{Value, json};
use std::net::IpAddr;
use tower::Service;

const HOME: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

/// The enrolment router, called without a connection.
struct Counter {
    world: World,
    router: Router,
    key: PrivateKey,
}

impl Counter {
    fn open() -> Self {
        Self::sharing(None)
    }

    /// Returns a router whose gateway shares its state by this engine.
    fn sharing(engine: Option<&MemoryEngine>) -> Self {
        let world = World::start();
        let shared = |engine: &MemoryEngine| {
            SharedState::new(Arc::new(engine.clone()), world.store.clone(), true)
        };
        let router = router(Enrolment {
            ca: world.live.clone(),
            store: world.store.clone(),
            nodes: world.nodes.clone(),
            shared_state: engine.map(shared),
            record_writer: NodeRecordWriter::new(&world.store, &world.nodes),
            metrics: world.metrics.clone(),
            lifetime: Duration::from_hours(1),
            advertised: AdvertisedGateways::new(GatewayEndpoints {
                gateways: vec!["gw.example:10262".to_owned()],
                replicas: None,
            }),
            accepts_cluster_identity: true,
            accepts_cluster_certificates: true,
        });
        Self {
            world,
            router,
            key: PrivateKey::generate().unwrap(),
        }
    }

    fn token(&self, node: &str, ttl: Duration) -> String {
        let book = self.world.store.tokens().unwrap();
        let confirmed = NodeAttributes {
            addresses: vec![[10, 0, 0, 1].into()],
            pool: Some("north".to_owned()),
            labels: [("tier".to_owned(), "gold".to_owned())].into(),
        };
        let token = book.create(&name(node), ttl, confirmed).unwrap();
        token.text().expose().to_owned()
    }

    fn csr(&self) -> String {
        STANDARD.encode(self.key.request().unwrap())
    }

    /// Posts a body, and returns status and answer.
    async fn post(&self, path: &str, peer: Option<Identity>, body: String) -> (u16, Value) {
        self.post_as(path, Self::peer(peer), body).await
    }

    fn peer(identity: Option<Identity>) -> Peer {
        Peer {
            issued_at: UnixTime::now().as_secs(),
            root: None,
            address: Some(HOME),
            identity,
            cluster_certificate: None,
        }
    }

    async fn post_as(&self, path: &str, peer: Peer, body: String) -> (u16, Value) {
        let request = Request::post(path)
            .header("content-type", "application/json")
            .extension(peer)
            .body(Body::from(body))
            .unwrap();
        let response = self.router.clone().call(request).await.unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    async fn join(&self, token: &str, node: Option<&str>, csr: &str) -> (u16, Value) {
        let body = json!({ "token": token, "node": node, "csr": csr, "version": "1" });
        self.post("/v1/enrol", None, body.to_string()).await
    }

    /// Joins with a new key, and returns the reason of the refusal.
    async fn refused(&self, token: &str, node: &str) -> (u16, String) {
        self.refused_from(HOME, token, node).await
    }

    async fn refused_from(&self, address: IpAddr, token: &str, node: &str) -> (u16, String) {
        let key = PrivateKey::generate().unwrap();
        let csr = STANDARD.encode(key.request().unwrap());
        let body = json!({ "token": token, "node": node, "csr": csr, "version": "1" });
        let peer = Peer {
            address: Some(address),
            ..Self::peer(None)
        };
        let answer = self.post_as("/v1/enrol", peer, body.to_string());
        let (status, message) = answer.await;
        assert!(!message["detail"].as_str().unwrap().is_empty());
        (status, message["reason"].as_str().unwrap().to_owned())
    }
}

#[tokio::test]
async fn a_token_becomes_the_certificate_of_its_node() {
    let counter = Counter::open();
    let token = counter.token("edge-1", Duration::from_hours(1));
    let (status, message) = counter.join(&token, Some("edge-1"), &counter.csr()).await;
    assert_eq!(status, 200, "{message}");
    assert_eq!(message["gateways"], json!(["gw.example:10262"]));
    assert_eq!(message["trust_domain"], "test.example");
    let (root, chain) = (
        message["root"].as_str().unwrap(),
        message["certificate"].as_str().unwrap(),
    );
    let edge = EdgeIdentity::new(root, chain, &counter.key.key_pem()).unwrap();
    assert_eq!(edge.node, name("edge-1"));
    let known = counter.world.reader().get(&name("edge-1")).unwrap();
    assert_eq!(
        (known.addresses, known.pool.as_deref()),
        (vec![[10, 0, 0, 1].into()], Some("north"))
    );
    let kept = counter.world.store.nodes().all().unwrap();
    assert_eq!((kept.len(), &kept[0].node), (1, &name("edge-1")));
    assert!(
        counter
            .world
            .counted(r#"enrolments_total{operation="enrol",outcome="ok"} 1"#)
    );
}

#[tokio::test]
async fn an_unnamed_edge_gets_the_node_name_of_its_token() {
    let counter = Counter::open();
    let token = counter.token("edge-7", Duration::from_hours(1));
    let (status, message) = counter.join(&token, None, &counter.csr()).await;
    assert_eq!((status, &message["node"]), (200, &json!("edge-7")));
}

#[tokio::test]
async fn each_refusal_has_its_reason() {
    let counter = Counter::open();
    let token = counter.token("edge-1", Duration::from_hours(1));
    let other = counter.token("edge-2", Duration::from_hours(1));
    let late = counter.token("edge-1", Duration::ZERO);
    let foreign = Counter::open().token("edge-1", Duration::from_hours(1));
    assert_eq!(
        counter.join(&token, Some("edge-1"), &counter.csr()).await.0,
        200
    );
    let forged = token.replacen(&token[6..12], "AAAAAA", 1);
    for (token, node, expected) in [
        ("hello", "edge-1", (400, "token_malformed")),
        (&forged, "edge-1", (403, "token_unknown")),
        (&late, "edge-1", (403, "token_expired")),
        (&token, "edge-1", (403, "token_used")),
        (&other, "edge-1", (403, "token_other_node")),
        (&foreign, "edge-1", (403, "token_wrong_ca")),
        (&other, "no/node", (400, "node_malformed")),
    ] {
        let elsewhere = IpAddr::from([192, 0, 2, 1]);
        let (status, reason) = match expected.1 {
            // The number of refused tokens of one address is limited.
            "token_malformed" | "token_wrong_ca" => {
                counter.refused_from(elsewhere, token, node).await
            }
            _ => counter.refused(token, node).await,
        };
        assert_eq!((status, reason.as_str()), expected);
    }
    assert_eq!(
        counter.join(&other, Some("edge-2"), &counter.csr()).await.0,
        200,
        "the token is not used up"
    );
}

/// The answer to a request may be lost. The edge repeats the request with the same key.
#[tokio::test]
async fn the_same_request_is_accepted_again_until_the_node_changes() {
    let counter = Counter::open();
    let store = &counter.world.store;
    let token = counter.token("edge-1", Duration::from_hours(1));
    let join = async || {
        let (status, answer) = counter.join(&token, Some("edge-1"), &counter.csr()).await;
        (status, answer["reason"].as_str().map(str::to_owned))
    };
    let (accepted, used) = ((200, None), (403, Some("token_used".to_owned())));
    assert_eq!(join().await, accepted);
    assert_eq!(join().await, accepted);
    assert_eq!(store.tokens().unwrap().all().unwrap()[0].used.len(), 1);
    // Another machine becomes the node.
    let newer = counter.token("edge-1", Duration::from_hours(1));
    let key = PrivateKey::generate().unwrap();
    let csr = STANDARD.encode(key.request().unwrap());
    assert_eq!(counter.join(&newer, None, &csr).await.0, 200);
    assert_eq!(join().await, used);
    // The node is removed.
    let again = counter.join(&newer, None, &csr).await;
    assert_eq!(again.0, 200);
    store.nodes().remove(&name("edge-1")).unwrap();
    counter.world.nodes.remove(&name("edge-1"));
    assert_eq!(join().await, used);
    let (status, _) = counter.join(&newer, None, &csr).await;
    assert_eq!(status, 403);
}

#[tokio::test]
async fn a_known_node_whose_record_was_not_written_may_join_again() {
    let counter = Counter::open();
    let world = &counter.world;
    let record = causeway_certs::NodeRecord::name_only(&name("edge-1"), 5);
    world.store.nodes().put(record.clone()).unwrap();
    let (node, known) = crate::control::eligibility::node_from_record(record);
    world.nodes.upsert(node, known);
    let token = counter.token("edge-1", Duration::from_hours(1));
    let file = world.store.root_path().with_file_name("nodes.json");
    let aside = file.with_extension("aside");
    std::fs::rename(&file, &aside).unwrap();
    std::fs::create_dir(&file).unwrap();
    let failed = counter.join(&token, None, &counter.csr()).await;
    assert_eq!(failed.1["reason"], "gateway_failed");
    std::fs::remove_dir(&file).unwrap();
    std::fs::rename(&aside, &file).unwrap();
    assert_eq!(counter.refused(&token, "edge-1").await.1, "token_used");
    let again = counter.join(&token, None, &counter.csr()).await;
    assert_eq!(again.0, 200, "{}", again.1);
}

/// A pattern token enrols nodes that have not joined. A node that exists only in the cluster counts as not joined.
#[tokio::test]
async fn a_node_of_the_cluster_joins_by_a_pattern_once() {
    let counter = Counter::open();
    let member = crate::state::ClusterNode {
        is_edge: true,
        ..Default::default()
    };
    let members = [(name("edge-1"), member)].into();
    counter.world.nodes.replace_cluster(members);
    let book = counter.world.store.tokens().unwrap();
    let pattern = (&"edge-*".parse().unwrap(), 2);
    let token = book.create_for(pattern, Duration::from_hours(1), NodeAttributes::default());
    let token = token.unwrap().text().expose().to_owned();
    let (status, message) = counter.join(&token, Some("edge-1"), &counter.csr()).await;
    assert_eq!(status, 200, "{message}");
    let (status, reason) = counter.refused(&token, "edge-1").await;
    assert_eq!((status, reason.as_str()), (403, "token_not_new"));
}

/// A token for any node must not redirect the traffic of a cluster node without an edge.
#[tokio::test]
async fn a_pattern_token_takes_no_cluster_node_and_is_not_used_up() {
    let counter = Counter::open();
    let nodes = &counter.world.nodes;
    let book = counter.world.store.tokens().unwrap();
    let create = |pattern: &str| {
        let pattern = (&pattern.parse().unwrap(), 3);
        let token = book.create_for(pattern, Duration::from_hours(1), NodeAttributes::default());
        token.unwrap().text().expose().to_owned()
    };
    let (any, named) = (
        create("*"),
        counter.token("cloud-2", Duration::from_hours(1)),
    );
    nodes.set_pending("the API has not answered");
    let refused = async |node| counter.refused(&any, node).await;
    assert_eq!(refused("cloud-1").await, (503, "nodes_unknown".to_owned()));
    let member = |edge| crate::state::ClusterNode {
        is_edge: edge,
        ..Default::default()
    };
    let cluster = |of_edge_3| {
        let all = [
            ("cloud-1", false),
            ("cloud-2", false),
            ("edge-3", of_edge_3),
        ];
        let all = all.map(|(node, edge)| (name(node), member(edge)));
        nodes.replace_cluster(all.into());
    };
    cluster(true);
    assert_eq!(refused("cloud-1").await, (503, "node_elsewhere".to_owned()));
    assert!(counter.world.store.nodes().all().unwrap().is_empty());
    for (token, node) in [(&any, "edge-3"), (&any, "new-4"), (&named, "cloud-2")] {
        let (status, message) = counter.join(token, Some(node), &counter.csr()).await;
        assert_eq!(status, 200, "{message}");
    }
    let is_edge = |node: &str| counter.world.reader().by_name(node).is_some();
    assert!(is_edge("cloud-2"), "a token names it");
    // From now on, the cluster has one of them as a node without an edge.
    assert!(is_edge("edge-3"));
    cluster(false);
    assert!(!is_edge("edge-3"));
    let records = counter.world.store.nodes().all().unwrap();
    let follows = records.iter().map(|record| record.follows_cluster);
    assert_eq!(follows.collect::<Vec<_>>(), [false, true, true]);
}

#[tokio::test]
async fn a_bad_request_does_not_burn_the_token() {
    let counter = Counter::open();
    let token = counter.token("edge-1", Duration::from_hours(1));
    let mut unsigned = counter.key.request().unwrap();
    *unsigned.last_mut().unwrap() ^= 1;
    for csr in ["%%%", "aGVsbG8=", &STANDARD.encode(&unsigned)] {
        let (status, message) = counter.join(&token, Some("edge-1"), csr).await;
        assert_eq!(
            (status, &message["reason"]),
            (400, &json!("csr_invalid")),
            "{csr}"
        );
    }
    assert_eq!(
        counter.join(&token, Some("edge-1"), &counter.csr()).await.0,
        200
    );
}

/// Sends a request as a peer at `192.0.2.LAST`.
fn stranger(
    counter: &Counter,
    last: u8,
    identity: Option<Identity>,
    body: Body,
) -> impl Future<Output = Result<axum::response::Response, std::convert::Infallible>> + use<> {
    let peer = Peer {
        address: Some([192, 0, 2, last].into()),
        ..Counter::peer(identity)
    };
    let request = Request::post("/v1/enrol").header("content-type", "application/json");
    let request = request.extension(peer).body(body).unwrap();
    counter.router.clone().call(request)
}

/// Bodies that do not arrive, from as many sources as there are permits.
#[tokio::test(start_paused = true)]
async fn strangers_without_a_body_keep_no_edge_out() {
    let counter = Counter::open();
    let mut strangers: Vec<_> = (0..=u8::MAX)
        .map(|last| {
            let body = Body::from_stream(futures_util::stream::pending::<std::io::Result<Bytes>>());
            Box::pin(stranger(&counter, last, None, body))
        })
        .collect();
    assert!(strangers.len() >= MAX_UNAUTHENTICATED);
    for each in &mut strangers {
        assert!(futures_util::FutureExt::now_or_never(each).is_none());
    }
    let token = counter.token("edge-1", Duration::from_hours(1));
    let joined = async { counter.join(&token, None, &counter.csr()).await.0 };
    let strangers = futures_util::future::join_all(strangers);
    let (status, strangers) = tokio::join!(joined, strangers);
    assert_eq!(status, 200);
    for answer in strangers {
        assert_eq!(answer.unwrap().status(), 504);
    }
}

/// Unfinished bodies of peers without a certificate use only the permits of their own address.
#[tokio::test(start_paused = true)]
async fn requests_without_certificate_are_limited_per_address() {
    let counter = Counter::open();
    let from = |last: u8, identity, body: Body| stranger(&counter, last, identity, body);
    let asked = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let endless = || {
        let asked = asked.clone();
        Body::from_stream(futures_util::stream::poll_fn(move |_| {
            asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            std::task::Poll::<Option<Result<Bytes, std::io::Error>>>::Pending
        }))
    };
    let mut waiting: Vec<_> = (0..1_000)
        .map(|_| Box::pin(from(1, None, endless())))
        .collect();
    for each in &mut waiting {
        assert!(futures_util::FutureExt::now_or_never(each).is_none());
    }
    let read = asked.load(std::sync::atomic::Ordering::Relaxed);
    assert!(read < MAX_UNAUTHENTICATED, "{read} bodies are read at once");
    let edge = Some(Identity::Edge(name("edge-1")));
    for (last, identity) in [(2, None), (1, edge)] {
        let answer = from(last, identity, Body::from("{")).await.unwrap();
        assert_eq!(answer.status(), 400);
    }
}

#[tokio::test]
async fn a_body_that_is_none_is_refused_and_a_large_one_not_read() {
    let counter = Counter::open();
    let (status, message) = counter.post("/v1/enrol", None, "{".to_owned()).await;
    assert_eq!(
        (status, &message["reason"]),
        (400, &json!("request_malformed"))
    );
    let large = json!({ "token": "x".repeat(MAX_BODY), "csr": "" }).to_string();
    assert_eq!(counter.post("/v1/enrol", None, large).await.0, 413);
}

#[tokio::test]
async fn wrong_tokens_without_end_are_put_off() {
    let counter = Counter::open();
    let token = counter.token("edge-1", Duration::from_hours(1));
    let mut last = (0, String::new());
    for number in 100_000..100_021 {
        let forged = token.replacen(&token[6..12], &number.to_string(), 1);
        last = counter.refused(&forged, "edge-1").await;
    }
    assert_eq!(last, (429, "too_many_attempts".to_owned()));
    // A wrong secret of a token that exists is put off, too.
    let other = counter.token("edge-2", Duration::from_hours(1));
    let [token_parts, other_parts] = [&token, &other].map(|token| token.split('.'));
    let mut parts: Vec<_> = token_parts.collect();
    parts[2] = other_parts.collect::<Vec<_>>()[2];
    let refused = counter.refused(&parts.join("."), "edge-1").await;
    assert_eq!(refused, (429, "too_many_attempts".to_owned()));
    // The machines with wrong tokens do not keep this one out, which has the same address.
    let joined = counter.join(&token, None, &counter.csr()).await;
    assert_eq!(joined.0, 200, "{}", joined.1);
}

#[tokio::test]
async fn old_tokens_keep_no_other_edge_of_their_address_out() {
    let counter = Counter::open();
    let late = |number| counter.token(&format!("edge-{number}"), Duration::ZERO);
    for (number, token) in (0..10).map(late).enumerate() {
        let refused = counter.refused(&token, &format!("edge-{number}")).await;
        assert_eq!(refused.1, "token_expired");
    }
    let used = counter.token("edge-1", Duration::from_hours(1));
    let joined = counter.join(&used, None, &counter.csr()).await;
    assert_eq!(joined.0, 200, "{}", joined.1);
    for _ in 0..5 {
        assert_eq!(counter.refused(&used, "edge-1").await.1, "token_used");
    }
    let refused = counter.refused(&used, "edge-1").await;
    assert_eq!(refused, (429, "too_many_attempts".to_owned()));
    let new = counter.token("edge-2", Duration::from_hours(1));
    assert_eq!(counter.join(&new, None, &counter.csr()).await.0, 200);
}

#[tokio::test]
async fn refusals_of_any_kind_are_put_off() {
    let counter = Counter::open();
    let mut reasons = Vec::new();
    for _ in 0..6 {
        let foreign = Counter::open().token("edge-1", Duration::from_hours(1));
        reasons.push(counter.refused(&foreign, "edge-1").await.1);
    }
    assert_eq!(reasons[..5], ["token_wrong_ca"; 5]);
    assert_eq!(reasons[5], "too_many_attempts");
}

#[tokio::test]
async fn known_refusals_do_not_ask_the_engine() {
    let engine = MemoryEngine::default();
    let counter = Counter::sharing(Some(&engine));
    let store = &counter.world.store;
    let shared = SharedState::new(Arc::new(engine.clone()), store.clone(), true);
    let used = counter.token("edge-1", Duration::from_hours(1));
    let late = counter.token("edge-1", Duration::ZERO);
    let foreign = Counter::open().token("edge-1", Duration::from_hours(1));
    let joined = counter.join(&used, None, &counter.csr()).await;
    assert_eq!(joined.0, 200, "{}", joined.1);
    // The use is in the data directory.
    shared.synchronize().await.unwrap();
    let reads = engine.reads();
    for (token, expected) in [
        (&used, "token_used"),
        (&late, "token_expired"),
        (&foreign, "token_wrong_ca"),
    ] {
        assert_eq!(counter.refused(token, "edge-1").await.1, expected);
    }
    assert_eq!(engine.reads(), reads);
    // The edge of a removed node asks for a renewal again and again.
    let renew = async || {
        let body = json!({ "csr": counter.csr(), "version": "1" }).to_string();
        let edge = Some(Identity::Edge(name("edge-9")));
        let (_, answer) = counter.post("/v1/renew", edge, body).await;
        answer["reason"].clone()
    };
    let members = [(name("edge-1"), crate::state::ClusterNode::default())];
    counter.world.nodes.replace_cluster(members.into());
    assert_eq!(renew().await, "node_unknown");
    let reads = engine.reads();
    assert_eq!(renew().await, "node_unknown");
    assert_eq!(engine.reads(), reads);
}

/// Joins 300 nodes at once, each with its own key: 100 by tokens of their own, the others by one token for 150 nodes. Each join is
/// sent twice, as by an edge whose first answer was lost.
async fn join_at_once(counter: &Counter) {
    let book = counter.world.store.tokens().unwrap();
    let site = (&"site-*".parse().unwrap(), 150);
    let site = book.create_for(site, Duration::from_hours(1), NodeAttributes::default());
    let site = site.unwrap().text().expose().to_owned();
    let own = |number| {
        let node = format!("edge-{number}");
        (counter.token(&node, Duration::from_hours(1)), node)
    };
    let by_own = (0..100).map(own);
    let by_site = (0..200).map(|number| (site.clone(), format!("site-{number}")));
    let joins = by_own.chain(by_site).map(|(token, node)| {
        let key = PrivateKey::generate().unwrap();
        let csr = STANDARD.encode(key.request().unwrap());
        async move {
            let once = || counter.join(&token, Some(&node), &csr);
            let (first, second) = tokio::join!(once(), once());
            // After several refusals of the used token, a repeated request may be put off.
            let answer = if first.0 == 200 { first } else { second };
            (node, key, answer)
        }
    });
    let joined = futures_util::future::join_all(joins.collect::<Vec<_>>()).await;
    let mut accepted = std::collections::BTreeSet::new();
    for (node, key, (status, answer)) in joined {
        if status != 200 {
            let reason = answer["reason"].as_str().unwrap();
            assert!(
                ["token_used", "too_many_attempts"].contains(&reason),
                "{answer}"
            );
            continue;
        }
        let (root, chain) = (&answer["root"], &answer["certificate"]);
        let (root, chain) = (root.as_str().unwrap(), chain.as_str().unwrap());
        let edge = EdgeIdentity::new(root, chain, &key.key_pem()).unwrap();
        assert_eq!(edge.node, name(&node));
        accepted.insert(edge.node);
    }
    assert_eq!(accepted.len(), 250);
    let is_stored = |record: &causeway_certs::NodeRecord| accepted.contains(&record.node);
    let records = counter.world.store.nodes().all().unwrap();
    assert_eq!((records.len(), records.iter().all(is_stored)), (250, true));
    assert_eq!(counter.world.reader().record_names(), accepted);
}

fn token_uses(counter: &Counter) -> Vec<usize> {
    let tokens = counter.world.store.tokens().unwrap().all().unwrap();
    let mut uses: Vec<_> = tokens.iter().map(|token| token.used.len()).collect();
    uses.sort_unstable();
    uses
}

#[tokio::test]
async fn of_nodes_that_join_at_once_each_is_admitted_and_counted_once() {
    let counter = Counter::open();
    join_at_once(&counter).await;
    let expected: Vec<_> = std::iter::repeat_n(1, 100).chain([150]).collect();
    assert_eq!(token_uses(&counter), expected);
}

#[tokio::test]
async fn nodes_that_join_at_once_are_in_the_engine_and_counted_once() {
    let engine = MemoryEngine::default();
    let counter = Counter::sharing(Some(&engine));
    join_at_once(&counter).await;
    let shared = SharedState::new(Arc::new(engine.clone()), counter.world.store.clone(), true);
    shared.synchronize().await.unwrap();
    let expected: Vec<_> = std::iter::repeat_n(1, 100).chain([150]).collect();
    assert_eq!(token_uses(&counter), expected);
    let nodes = |entries: &mut causeway_certs::Entries| {
        let keys = entries.keys();
        keys.filter(|key| key.starts_with("node/")).count()
    };
    assert_eq!(engine.with(nodes).unwrap(), 250);
}

/// Returns the tokens and the certificate requests of so many nodes, `edge-0` and so on.
fn create_joins(counter: &Counter, count: usize) -> (Vec<String>, Vec<String>) {
    let create = |number| counter.token(&format!("edge-{number}"), Duration::from_hours(1));
    let tokens: Vec<_> = (0..count).map(create).collect();
    let csr = || STANDARD.encode(PrivateKey::generate().unwrap().request().unwrap());
    (tokens, (0..count).map(|_| csr()).collect())
}

/// Time passes only while nothing else is to be done, and each request to the engine takes 300 ms.
#[tokio::test(start_paused = true)]
async fn a_slow_engine_serves_all_joins_that_wait() {
    let engine = MemoryEngine::default();
    let counter = Counter::sharing(Some(&engine));
    let (tokens, csrs) = create_joins(&counter, MAX_UNAUTHENTICATED);
    let store = counter.world.store.clone();
    let shared = SharedState::new(Arc::new(engine.clone()), store, true);
    shared.synchronize().await.unwrap();
    engine.set_delay(Duration::from_millis(300));
    // The second time, each request repeats one whose answer was lost.
    for _ in 0..2 {
        let joins = tokens.iter().zip(&csrs);
        let joins = joins.map(|(token, csr)| counter.join(token, None, csr));
        let answers = futures_util::future::join_all(joins).await;
        let mut statuses: Vec<_> = answers.iter().map(|(status, _)| *status).collect();
        statuses.dedup();
        assert_eq!(statuses, [200]);
    }
}

#[tokio::test(start_paused = true)]
async fn an_invalid_token_is_refused_while_the_engine_does_not_answer() {
    let engine = MemoryEngine::default();
    let counter = Counter::sharing(Some(&engine));
    let valid = counter.token("edge-1", Duration::from_hours(1));
    let late = counter.token("edge-2", Duration::ZERO);
    engine.set_delay(REQUEST_TIMEOUT * 2);
    let csr = counter.csr();
    let waiting = counter.join(&valid, None, &csr);
    let refused = async {
        // The first join is in a batch by now.
        tokio::time::sleep(Duration::from_secs(1)).await;
        counter.refused(&late, "edge-2").await
    };
    tokio::select! {
        biased;
        (status, _) = waiting => panic!("the join was answered first: {status}"),
        (_, reason) = refused => assert_eq!(reason, "token_expired"),
    }
}

#[tokio::test]
async fn an_entry_that_cannot_be_parsed_fails_only_the_joins_that_need_it() {
    let engine = MemoryEngine::default();
    let counter = Counter::sharing(Some(&engine));
    let store = counter.world.store.clone();
    let shared = SharedState::new(Arc::new(engine.clone()), store, true);
    let (tokens, csrs) = create_joins(&counter, 5);
    shared.synchronize().await.unwrap();
    let id = |number: usize| JoinToken::parse(&tokens[number]).unwrap().id;
    // As if another gateway had created these tokens.
    let own = counter.world.store.tokens().unwrap();
    assert!([0, 3].map(id).iter().all(|id| own.remove(id).unwrap()));
    let keys = [
        format!("token/{}", id(0)),
        format!("token/{}", id(1)),
        "node/edge-2".to_owned(),
    ];
    for key in &keys {
        let damage = |entries: &mut causeway_certs::Entries| {
            entries.insert(key.clone(), r#"{"format":2}"#.to_owned());
        };
        engine.with(damage).unwrap();
    }
    let joins = tokens.iter().zip(&csrs);
    let joins = joins.map(|(token, csr)| counter.join(token, None, csr));
    let answers = futures_util::future::join_all(joins).await;
    for (key, (status, answer)) in keys.iter().zip(&answers) {
        let detail = answer["detail"].as_str().unwrap();
        assert_eq!((*status, detail.contains(key)), (503, true), "{answer}");
    }
    for (status, answer) in &answers[3..] {
        assert_eq!(*status, 200, "{answer}");
    }
}

#[tokio::test]
async fn of_two_edges_that_join_at_once_as_one_new_node_one_is_admitted() {
    let counter = Counter::open();
    let book = counter.world.store.tokens().unwrap();
    let any = (&"edge-*".parse().unwrap(), 9);
    let any = book.create_for(any, Duration::from_hours(1), NodeAttributes::default());
    let any = any.unwrap().text().expose().to_owned();
    let edges = (0..8).map(|_| async {
        let key = PrivateKey::generate().unwrap();
        let csr = STANDARD.encode(key.request().unwrap());
        let (status, answer) = counter.join(&any, Some("edge-1"), &csr).await;
        (status, answer["reason"].as_str().map(str::to_owned))
    });
    let mut answers = futures_util::future::join_all(edges).await;
    answers.sort_unstable();
    let refused = (403, Some("token_not_new".to_owned()));
    assert_eq!(answers[0], (200, None));
    assert!(
        answers[1..].iter().all(|answer| *answer == refused),
        "{answers:?}"
    );
    assert_eq!(token_uses(&counter), [1]);
}

#[tokio::test]
async fn a_renewal_keeps_the_node_and_needs_its_certificate() {
    let counter = Counter::open();
    let body = || json!({ "csr": counter.csr(), "version": "1" }).to_string();
    let edge = || Some(Identity::Edge(name("edge-1")));
    let (status, message) = counter.post("/v1/renew", None, body()).await;
    assert_eq!(
        (status, &message["reason"]),
        (401, &json!("certificate_missing"))
    );
    // The nodes of the cluster, which decide this, are not loaded yet.
    let (status, message) = counter.post("/v1/renew", edge(), body()).await;
    assert_eq!((status, &message["reason"]), (503, &json!("nodes_unknown")));
    counter.world.nodes.replace_cluster([].into());
    let (status, message) = counter.post("/v1/renew", edge(), body()).await;
    assert_eq!((status, &message["reason"]), (403, &json!("node_unknown")));
    let token = counter.token("edge-1", Duration::from_hours(1));
    assert_eq!(counter.join(&token, None, &counter.csr()).await.0, 200);
    let before = counter.world.store.nodes().all().unwrap();
    let (status, message) = counter.post("/v1/renew", edge(), body()).await;
    assert_eq!((status, &message["node"]), (200, &json!("edge-1")));
    let after = counter.world.store.nodes().all().unwrap();
    assert_ne!(before[0].serial, after[0].serial);
    assert_eq!(before[0].addresses, after[0].addresses);
    assert_eq!(before[0].enrolled_at, after[0].enrolled_at);
}

#[tokio::test]
async fn an_edge_that_another_gateway_admitted_by_cluster_renews_here() {
    let counter = Counter::open();
    let body = || json!({ "csr": counter.csr() }).to_string();
    let edge = || Some(Identity::Edge(name("edge-1")));
    let cluster = |edge| {
        let member = crate::state::ClusterNode {
            is_edge: edge,
            ..Default::default()
        };
        counter
            .world
            .nodes
            .replace_cluster([(name("edge-1"), member)].into());
    };
    cluster(false);
    assert_eq!(counter.post("/v1/renew", edge(), body()).await.0, 403);
    cluster(true);
    assert_eq!(counter.post("/v1/renew", edge(), body()).await.0, 200);
    let records = counter.world.store.nodes().all().unwrap();
    assert!(records.len() == 1 && !records[0].serial.is_empty());
}

/// Covers a connection that is older than the retirement of its root, and one older than a new enrolment of its node.
#[tokio::test]
async fn a_certificate_that_is_no_longer_valid_renews_nothing() {
    let counter = Counter::open();
    let token = counter.token("edge-1", Duration::from_hours(1));
    assert_eq!(counter.join(&token, None, &counter.csr()).await.0, 200);
    let body = || json!({ "csr": counter.csr() }).to_string();
    let good = Peer {
        issued_at: UnixTime::now().as_secs(),
        root: Some(counter.world.live.get().fingerprint()),
        address: Some(HOME),
        identity: Some(Identity::Edge(name("edge-1"))),
        cluster_certificate: None,
    };
    let retired = Peer {
        root: Some(crate::control::tests::world::new_ca("test.example").fingerprint()),
        ..good.clone()
    };
    let earlier = Peer {
        issued_at: good.issued_at - 60,
        ..good.clone()
    };
    assert_eq!(counter.post_as("/v1/renew", good, body()).await.0, 200);
    for (peer, word) in [(retired, "retired"), (earlier, "before the node joined")] {
        let (status, message) = counter.post_as("/v1/renew", peer, body()).await;
        let detail = message["detail"].as_str().unwrap();
        assert_eq!(
            (status, &message["reason"]),
            (403, &json!("certificate_replaced"))
        );
        assert!(detail.contains(word), "{detail}");
    }
}

/// Sends the request over TLS to the tunnel port, as an edge does.
async fn over_the_port(
    world: &World,
    config: Arc<rustls::ClientConfig>,
    path: &str,
    body: Value,
) -> Value {
    let mut config = rustls::ClientConfig::clone(&config);
    config.alpn_protocols = vec![b"h2".to_vec()];
    let io = world.tls(Arc::new(config)).await.unwrap();
    let (mut client, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(io))
            .await
            .unwrap();
    let request = Request::post(format!("https://gw{path}"))
        .header("content-type", "application/json")
        .body(Full::<axum::body::Bytes>::from(body.to_string()))
        .unwrap();
    let asked = async {
        let response = client.send_request(request).await.unwrap();
        response.into_body().collect().await.unwrap().to_bytes()
    };
    let body = tokio::select! {
        body = asked => body,
        _ = connection => panic!("the connection ended"),
    };
    serde_json::from_slice(&body).unwrap()
}

#[tokio::test]
async fn an_edge_joins_and_renews_over_the_tunnel_port() {
    let counter = Counter::open();
    let world = &counter.world;
    let token = counter.token("edge-1", Duration::from_hours(1));
    let join = verify::join_client(world.ca.fingerprint()).unwrap();
    let body = json!({ "token": token, "csr": counter.csr(), "version": "1" });
    let message = over_the_port(world, join.clone(), "/v1/enrol", body).await;
    let (root, chain) = (
        message["root"].as_str().unwrap(),
        message["certificate"].as_str().unwrap(),
    );
    let edge = EdgeIdentity::new(root, chain, &counter.key.key_pem()).unwrap();
    world.joined(&edge, "a", 0).await;
    let body = json!({ "csr": counter.csr(), "version": "1" });
    let nobody = over_the_port(world, join, "/v1/renew", body.clone()).await;
    assert_eq!(nobody["reason"], "certificate_missing");
    let control = verify::control_client(&edge).unwrap();
    let message = over_the_port(world, control, "/v1/renew", body.clone()).await;
    assert_eq!(message["node"], "edge-1");
    world.nodes.replace_cluster([].into());
    let stranger = verify::control_client(&identity(&world.ca, "edge-9")).unwrap();
    let message = over_the_port(world, stranger, "/v1/renew", body).await;
    assert_eq!(message["reason"], "node_unknown");
}
