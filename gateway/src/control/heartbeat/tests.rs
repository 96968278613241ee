use super::*;
use crate::{
    config::ApiCache,
    control::tests::{
        FakeEdge, LONG, welcome,
        world::{World, identity, name, new_ca},
    },
    state::{ClusterNode, Node},
};
use causeway_certs::EdgeIdentity;
use causeway_tunnel::{
    control_stream::{EdgeHello, EdgeMessage},
    heartbeat::NONCE_LIFETIME,
};
use std::collections::{BTreeMap, BTreeSet};
use tokio::time::timeout;

/// Starts a gateway of a cluster with edge-1 to edge-3 in the pool north, and edge-4 in the pool south.
fn world() -> World {
    let world = World::read(&ApiCache::default());
    let mut members = BTreeMap::new();
    for (node, pool) in [
        ("edge-1", "north"),
        ("edge-2", "north"),
        ("edge-3", "north"),
        ("edge-4", "south"),
    ] {
        world.nodes.upsert(name(node), Node::default());
        let member = ClusterNode {
            is_edge: true,
            pool: Some(pool.to_owned()),
            ..ClusterNode::default()
        };
        members.insert(name(node), member);
    }
    world.nodes.replace_cluster(members);
    // It joined, and the cluster has no Node of it.
    let outside = Node {
        pool: Some("north".to_owned()),
        ..Node::default()
    };
    world.nodes.upsert(name("edge-5"), outside);
    world
}

fn verifier(world: &World) -> &HeartbeatVerifier {
    &world.heartbeats
}

/// Returns a heartbeat by this identity for a nonce.
fn signed(edge: &EdgeIdentity, nonce: &str) -> DelegatedHeartbeat {
    let kubelet = KubeletState::Alive;
    let statement = HeartbeatStatement {
        nonce,
        node: &edge.node,
        kubelet: kubelet.as_str(),
    };
    DelegatedHeartbeat {
        node: edge.node.to_string(),
        nonce: nonce.to_owned(),
        chain: edge.leaf.chain_pem(),
        signature: BASE64_STANDARD.encode(statement.sign(&edge.leaf).unwrap()),
        kubelet,
    }
}

/// Connects a member of a pool.
async fn member(world: &World, node: &str, heartbeats: bool) -> FakeEdge {
    let hello = EdgeHello {
        site: Some(vec!["10.0.0.2:10271".to_owned()]),
        heartbeats,
        ..welcome(node, 0)
    };
    let (edge, heard) = world.says(&identity(&world.ca, node), hello).await;
    assert_eq!(heard, GatewayMessage::Registered);
    edge
}

async fn nonce(edge: &mut FakeEdge) -> String {
    loop {
        match edge.hear().await {
            GatewayMessage::HeartbeatNonce { nonce } => return nonce,
            GatewayMessage::Pool(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_member_carries_a_heartbeat_of_its_pool_once() {
    let world = world();
    let mut accepted = verifier(&world).take_accepted().unwrap();
    let mut carrier = member(&world, "edge-2", true).await;
    let nonce = nonce(&mut carrier).await;
    let heartbeat = Box::new(signed(&identity(&world.ca, "edge-1"), &nonce));
    let line = EdgeMessage::DelegatedHeartbeat(heartbeat);
    carrier.control.send(&line).await.unwrap();
    let found = timeout(LONG, accepted.recv()).await.unwrap().unwrap();
    let nodes = (found.node.as_str(), found.delegate.as_str());
    assert_eq!(nodes, ("edge-1", "edge-2"));
    carrier.control.send(&line).await.unwrap();
    let replayed = "delegated_heartbeats_total{result=\"replayed\"} 1";
    world.until(|world| world.counted(replayed)).await;
    assert!(accepted.try_recv().is_err());
}

#[tokio::test]
async fn an_edge_without_the_feature_gets_no_nonce() {
    let world = world();
    let mut last = HashMap::new();
    let (_old, _new) = (
        member(&world, "edge-2", false).await,
        member(&world, "edge-3", true).await,
    );
    verifier(&world).send_nonces(&world.registry, &mut last);
    assert_eq!(last.len(), 1);
}

#[tokio::test]
async fn a_delegated_node_is_a_member_for_a_gateway_that_never_saw_it() {
    let world = world();
    let member_of_north = |delegated| ClusterNode {
        is_edge: true,
        pool: Some("north".to_owned()),
        delegated,
        ..ClusterNode::default()
    };
    let members = [
        ("edge-1", true),
        ("edge-2", false),
        ("edge-3", false),
        ("edge-6", true),
    ];
    let members = members.map(|(node, delegated)| (name(node), member_of_north(delegated)));
    world.nodes.replace_cluster(BTreeMap::from(members));
    // A revoked node is no member, whatever its Node says.
    let revoked = BTreeSet::from([name("edge-6")]);
    world.nodes.replace_revoked(revoked);
    let mut edge = member(&world, "edge-2", false).await;
    let GatewayMessage::Pool(announced) = edge.hear().await else {
        panic!("no announcement");
    };
    let announced: Vec<_> = announced
        .members
        .iter()
        .map(|one| (&*one.node, one.at.len()))
        .collect();
    assert_eq!(announced, [("edge-2", 1), ("edge-1", 0)]);
}

#[tokio::test(start_paused = true)]
async fn forged_and_foreign_heartbeats_are_refused() {
    let world = world();
    let issue = || verifier(&world).state().nonces.issue(Instant::now());
    let verdict = |delegate: &str, heartbeat: &DelegatedHeartbeat| {
        let accepted = verifier(&world).accept(&name(delegate), heartbeat);
        accepted.map_or_else(|refused| refused.label(), |()| "accepted")
    };
    let [one, three, four, five] =
        ["edge-1", "edge-3", "edge-4", "edge-5"].map(|node| identity(&world.ca, node));
    let nonce = issue();
    let good = signed(&one, &nonce);
    // The member has its own key only.
    let other_key = DelegatedHeartbeat {
        signature: signed(&three, &nonce).signature,
        ..good.clone()
    };
    let other_name = DelegatedHeartbeat {
        node: "edge-1".to_owned(),
        ..signed(&three, &nonce)
    };
    let other_ca = signed(&identity(&new_ca("test.example"), "edge-1"), &nonce);
    let other_nonce = DelegatedHeartbeat {
        nonce: issue(),
        ..good.clone()
    };
    for forged in [other_key, other_name, other_ca, other_nonce] {
        assert_eq!(verdict("edge-2", &forged), "forged", "{forged:?}");
    }
    let unknown = signed(&one, "00000000000000000000000000000000");
    assert_eq!(verdict("edge-2", &unknown), "stale");
    let dead = DelegatedHeartbeat {
        kubelet: KubeletState::Unknown,
        ..good.clone()
    };
    assert_eq!(verdict("edge-2", &dead), "kubelet");
    let long = DelegatedHeartbeat {
        signature: "A".repeat(1000),
        ..good.clone()
    };
    assert_eq!(verdict("edge-2", &long), "malformed");
    let broken = DelegatedHeartbeat {
        signature: "?".to_owned(),
        ..good.clone()
    };
    assert_eq!(verdict("edge-2", &broken), "malformed");
    for (delegate, heartbeat) in [
        // Of another pool, either of the two; of itself; of a node that the cluster does not have.
        ("edge-2", signed(&four, &nonce)),
        ("edge-4", good.clone()),
        ("edge-1", good.clone()),
        ("edge-2", signed(&five, &nonce)),
    ] {
        assert_eq!(
            verdict(delegate, &heartbeat),
            "pool",
            "{delegate} {}",
            heartbeat.node
        );
    }
    // None of these has used up the nonce.
    assert_eq!(verdict("edge-2", &good), "accepted");
    assert_eq!(verdict("edge-3", &good), "replayed");
    assert_eq!(verdict("edge-3", &signed(&one, &issue())), "too_many");
}

#[tokio::test(start_paused = true)]
async fn a_revoked_node_has_no_heartbeats() {
    let world = world();
    world
        .nodes
        .replace_revoked(BTreeSet::from([name("edge-1")]));
    let nonce = verifier(&world).state().nonces.issue(Instant::now());
    let heartbeat = signed(&identity(&world.ca, "edge-1"), &nonce);
    let refused = verifier(&world)
        .accept(&name("edge-2"), &heartbeat)
        .unwrap_err();
    assert_eq!(refused.label(), "rejected");
    assert!(refused.to_string().contains("revoked"), "{refused}");
}

#[test]
fn a_nonce_is_valid_for_twenty_seconds_and_once_for_each_node() {
    let (mut nonces, begun) = (Nonces::default(), Instant::now());
    let nonce = nonces.issue(begun);
    let other = nonces.issue(begun + NONCE_INTERVAL);
    assert_ne!(nonce, other);
    let end = begun + NONCE_LIFETIME;
    assert_eq!(nonces.spend(&nonce, &name("edge-1"), begun), Ok(()));
    assert_eq!(nonces.spend(&nonce, &name("edge-2"), end), Ok(()));
    let again = nonces.spend(&nonce, &name("edge-1"), end);
    assert_eq!(again, Err(NonceRefused::Replayed));
    let late = end + Duration::from_millis(1);
    assert_eq!(nonces.check(&nonce, late), Err(NonceRefused::Stale));
    assert_eq!(nonces.check(&other, late), Ok(()));
    assert_eq!(nonces.check("", late), Err(NonceRefused::Stale));
}

#[test]
fn delegates_pools_and_nodes_have_limits_of_their_own() {
    let (mut limiter, now) = (HeartbeatRateLimiter::default(), Instant::now());
    let later = now + NONCE_INTERVAL;
    let (delegate, node) = (name("edge-2"), name("edge-1"));
    for at in [now, later] {
        let taken = (0..300).filter(|_| limiter.take_of_delegate(&delegate, at));
        assert_eq!(taken.count(), 256, "one of each member of a full pool");
        let taken = (0..300).filter(|_| limiter.take_of_pool("north", at));
        assert_eq!(taken.count(), 256, "one of each member of a full pool");
    }
    assert!(limiter.take_of_delegate(&node, now) && limiter.take_of_pool("south", now));
    assert!(limiter.take_of_node(&node, now));
    assert!(!limiter.take_of_node(&node, now + Duration::from_secs(4)));
    assert!(limiter.take_of_node(&node, later));
    limiter.remove_expired(later);
    assert!(!limiter.is_empty());
    limiter.remove_expired(later + NONCE_INTERVAL);
    assert!(limiter.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_delegate_that_forges_heartbeats_takes_nothing_from_its_pool() {
    let world = world();
    let issue = || verifier(&world).state().nonces.issue(Instant::now());
    let nonce = issue();
    let good = signed(&identity(&world.ca, "edge-1"), &nonce);
    let forged = DelegatedHeartbeat {
        nonce: issue(),
        ..good.clone()
    };
    let accept = |delegate, heartbeat| verifier(&world).accept(&name(delegate), heartbeat);
    let mut refused = (0..1000).map(|_| accept("edge-3", &forged).unwrap_err().label());
    assert!(refused.any(|label| label == "too_many"));
    assert_eq!(accept("edge-2", &good), Ok(()));
}
