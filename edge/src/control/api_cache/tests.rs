//! Edges with an API cache, over real sockets and TLS. The gateways are built from a tunnel's gateway side and a cache.

mod renewed;
mod strangers;
mod world;

use causeway_tunnel::control_stream::NodePoolMembers;
use serde_json::json;
use tokio::time::timeout;
use world::{Cloud, Edge, Gateway, SOON, World, get, watching};

#[tokio::test]
async fn a_poolless_node_reads_once_and_serves_lists_and_watches() {
    let world = World::new();
    let gateway = Gateway::start(&world.ca, Cloud::with(&["v1/services", "v1/endpoints"])).await;
    gateway.cloud.put("v1/services", "web");
    let edge = world.edge("edge-1").start(&[&gateway], json!({})).await;
    let status = edge.until(|api_cache| api_cache.ready).await;
    assert_eq!((status.role, status.healthy), ("follower", true));
    assert_eq!(status.reads_at, Some(gateway.address.to_string()));
    let (code, list) = get(edge.endpoint, "/api/v1/services").await;
    assert_eq!((code, names(&list)), (200, vec!["web".to_owned()]));
    let mut events = watching(edge.endpoint, "/api/v1/services", &version(&list)).await;
    gateway.cloud.put("v1/services", "db");
    assert_eq!(events.next().await, "db");
    assert_eq!(gateway.readings(), 1);
    let metrics = edge.admin("/metrics").await;
    for line in [
        "causeway_edge_api_cache_role{role=\"follower\"} 1",
        "causeway_edge_api_cache_role{role=\"pending\"} 0",
        "causeway_edge_api_cache_ready 1",
        "causeway_edge_api_cache_lost_timestamp_seconds 0",
        "causeway_edge_api_cache_objects{resource=\"v1/services\"} 2",
        "causeway_edge_api_cache_watchers{resource=\"v1/services\"} 1",
        "causeway_edge_api_cache_changes_total 1",
    ] {
        assert!(metrics.contains(line), "{line}\n{metrics}");
    }
}

#[tokio::test]
async fn an_edge_reports_its_api_cache_and_member_addresses() {
    let world = World::new();
    let gateway = Gateway::start(&world.ca, Cloud::with(&["v1/services"])).await;
    let site = json!({ "members": { "listen": "127.0.0.1:0", "addresses": ["10.1.0.5:10271"] } });
    for (api_cache, message) in [
        (None, None),
        (Some(json!({})), Some(vec![])),
        (Some(site), Some(vec!["10.1.0.5:10271".to_owned()])),
    ] {
        let node = world.edge("edge-1");
        let edge = node.start_with(&[&gateway], api_cache).await;
        assert_eq!(gateway.welcomed().await.site, message);
        edge.kill().await;
    }
}

#[tokio::test]
async fn cached_state_is_served_after_a_restart_without_a_gateway() {
    let world = World::new();
    let gateway = Gateway::start(&world.ca, Cloud::with(&["v1/services"])).await;
    gateway.cloud.put("v1/services", "web");
    let node = world.edge("edge-1");
    let edge = node.start(&[&gateway], json!({})).await;
    edge.until(|api_cache| api_cache.ready && api_cache.resources[0].objects == 1)
        .await;
    gateway.tell(&NodePoolMembers {
        pool: Some("north".into()),
        leader: Some("edge-1".into()),
        members: vec![world::at("edge-1", "127.0.0.1:9".parse().unwrap())],
    });
    let status = edge.until(|api_cache| api_cache.role == "leader").await;
    // A stop does not wait for a slow disk.
    node.until_saved(&status.resources[0], "edge-1").await;
    edge.stop().await;
    drop(gateway);
    let edge = node.start(&[], json!({})).await;
    let (code, list) = get(edge.endpoint, "/api/v1/services").await;
    assert_eq!((code, names(&list)), (200, vec!["web".to_owned()]));
    let status = edge.until(|api_cache| api_cache.healthy).await;
    assert_eq!((status.role, status.ready), ("leader", false));
    assert_eq!(status.members, ["edge-1"]);
}

#[tokio::test]
async fn a_node_with_an_empty_cache_reports_it_and_refuses_requests() {
    let world = World::new();
    let edge = world.edge("edge-1").start(&[], json!({})).await;
    let status = edge.until(|api_cache| api_cache.role == "pending").await;
    assert!(!status.healthy && !status.ready);
    let (code, _) = get(edge.endpoint, "/api/v1/services").await;
    assert_eq!(code, 429);
}

#[tokio::test]
async fn a_follower_switches_sources_without_losing_events() {
    let world = World::new();
    let gateway = Gateway::start(&world.ca, Cloud::with(&["v1/services"])).await;
    gateway.cloud.put("v1/services", "first");
    let (one, two) = (world.edge("edge-1"), world.edge("edge-2"));
    let leader = one.start(&[&gateway], json!({})).await;
    let follower = two.start(&[&gateway], json!({})).await;
    gateway.tell(&world::pool("edge-1", &[&leader, &follower]));
    let reads_at = |node: &str| {
        let node = node.to_owned();
        move |api_cache: &crate::status::ApiCacheStatus| {
            api_cache.ready && api_cache.reads_at.as_ref() == Some(&node)
        }
    };
    let status = follower.until(reads_at("edge-1")).await;
    assert_eq!(
        (status.role, &*status.members),
        ("follower", &["edge-1".to_owned(), "edge-2".to_owned()][..])
    );
    let (_, list) = get(follower.endpoint, "/api/v1/services").await;
    let mut events = watching(follower.endpoint, "/api/v1/services", &version(&list)).await;
    gateway.cloud.put("v1/services", "by the leader");
    assert_eq!(events.next().await, "by the leader");
    leader.kill().await;
    gateway.cloud.put("v1/services", "while no edge leads");
    follower.until(reads_at(&gateway.address.to_string())).await;
    gateway.cloud.put("v1/services", "by a gateway");
    assert_eq!(events.next().await, "while no edge leads");
    assert_eq!(events.next().await, "by a gateway");
    let leader = one.start(&[&gateway], json!({})).await;
    gateway.tell(&world::pool("edge-1", &[&leader, &follower]));
    follower.until(reads_at("edge-1")).await;
    gateway.cloud.put("v1/services", "by the leader again");
    assert_eq!(events.next().await, "by the leader again");
}

#[tokio::test]
async fn a_leader_without_its_gateway_is_replaced_by_a_connected_one() {
    let world = World::new();
    let cloud = Cloud::with(&["v1/services"]);
    let leaders = Gateway::start(&world.ca, cloud.clone()).await;
    let followers = Gateway::start(&world.ca, cloud.clone()).await;
    cloud.put("v1/services", "web");
    let leader = world.edge("edge-1").start(&[&leaders], json!({})).await;
    let follower = world.edge("edge-2").start(&[&followers], json!({})).await;
    let told = world::pool("edge-1", &[&leader, &follower]);
    leaders.tell(&told);
    followers.tell(&told);
    let at_leader = |api_cache: &crate::status::ApiCacheStatus| {
        api_cache.ready && api_cache.reads_at.as_deref() == Some("edge-1")
    };
    follower.until(at_leader).await;
    let gone = leaders.stop().await;
    let place = Some(followers.address.to_string());
    follower
        .until(|api_cache| api_cache.ready && api_cache.reads_at == place)
        .await;
    // The leader reads from a member with a fresh view, and that is the follower.
    leader
        .until(|api_cache| api_cache.ready && api_cache.reads_at.as_deref() == Some("edge-2"))
        .await;
    let (_, list) = get(leader.endpoint, "/api/v1/services").await;
    let mut events = watching(leader.endpoint, "/api/v1/services", &version(&list)).await;
    cloud.put("v1/services", "db");
    assert_eq!(events.next().await, "db");
    let _back = gone.again(&world.ca).await;
    follower.until(at_leader).await;
}

#[tokio::test]
async fn without_any_gateway_a_member_with_a_fresh_view_is_read_from() {
    let world = World::new();
    let gateway = Gateway::start(&world.ca, Cloud::with(&["v1/services"])).await;
    gateway.cloud.put("v1/services", "web");
    let (one, two) = (world.edge("edge-1"), world.edge("edge-2"));
    let fresh = one.start(&[&gateway], json!({})).await;
    // The leader is unreachable, and so are all gateways that the second node knows.
    let mut told = world::pool("edge-0", &[&fresh]);
    told.members
        .push(world::at("edge-0", "127.0.0.1:9".parse().unwrap()));
    told.members
        .push(world::at("edge-2", "127.0.0.1:9".parse().unwrap()));
    gateway.tell(&told);
    fresh
        .until(|api_cache| api_cache.ready && api_cache.members.len() == 3)
        .await;
    two.knows(&told);
    let alone = two.start(&[], json!({})).await;
    let status = alone.until(|api_cache| api_cache.ready).await;
    assert_eq!(status.reads_at.as_deref(), Some("edge-1"));
    let (_, list) = get(alone.endpoint, "/api/v1/services").await;
    let mut events = watching(alone.endpoint, "/api/v1/services", &version(&list)).await;
    gateway.cloud.put("v1/services", "db");
    assert_eq!(events.next().await, "db");
}

#[tokio::test]
async fn a_gateway_without_the_wanted_resource_is_left_for_another() {
    let world = World::new();
    let none = Gateway::start(&world.ca, Cloud::with(&["v1/pods"])).await;
    let some = Gateway::start(&world.ca, Cloud::with(&["v1/services"])).await;
    let edge = world.edge("edge-1").start(&[&none, &some], json!({})).await;
    let status = edge.until(|api_cache| api_cache.ready).await;
    assert_eq!(status.reads_at, Some(some.address.to_string()));
}

#[tokio::test]
async fn a_returning_gateway_is_read_again_without_missing_events() {
    let world = World::new();
    let gateway = Gateway::start(&world.ca, Cloud::with(&["v1/services"])).await;
    gateway.cloud.put("v1/services", "web");
    let edge = world.edge("edge-1").start(&[&gateway], json!({})).await;
    edge.until(|api_cache| api_cache.ready).await;
    let (_, list) = get(edge.endpoint, "/api/v1/services").await;
    let mut events = watching(edge.endpoint, "/api/v1/services", &version(&list)).await;
    let gateway = gateway.stop().await;
    edge.until(|api_cache| !api_cache.ready && api_cache.healthy)
        .await;
    gateway.cloud.put("v1/services", "meanwhile");
    let gateway = gateway.again(&world.ca).await;
    edge.until(|api_cache| api_cache.ready).await;
    assert_eq!(events.next().await, "meanwhile");
    gateway.cloud.put("v1/services", "afterwards");
    assert_eq!(events.next().await, "afterwards");
}

#[tokio::test]
async fn a_request_under_another_host_name_neither_reads_nor_writes() {
    let world = World::new();
    let edge = world.edge("edge-1").start(&[], json!({})).await;
    let ask = |line: &'static str, host: &'static str| {
        let endpoint = edge.endpoint;
        async move {
            world::raw(
                endpoint,
                &format!("{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"),
            )
            .await
        }
    };
    for host in ["localhost:10270", "127.0.0.1", "[::1]:1", "edge-1"] {
        let answer = ask("GET /version", host).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{host}: {answer}");
    }
    assert!(
        ask("GET /version", "evil.example")
            .await
            .starts_with("HTTP/1.1 421")
    );
    assert!(
        ask("DELETE /api/v1/services", "localhost")
            .await
            .starts_with("HTTP/1.1 405")
    );
    assert!(
        ask("GET /metrics", "localhost")
            .await
            .starts_with("HTTP/1.1 404")
    );
}

#[tokio::test]
async fn a_stopping_edge_ends_watches_without_delay() {
    let world = World::new();
    let gateway = Gateway::start(&world.ca, Cloud::with(&["v1/services"])).await;
    gateway.cloud.put("v1/services", "web");
    let edge = world.edge("edge-1").start(&[&gateway], json!({})).await;
    edge.until(|api_cache| api_cache.ready).await;
    let (_, list) = get(edge.endpoint, "/api/v1/services").await;
    let mut events = watching(edge.endpoint, "/api/v1/services", &version(&list)).await;
    edge.stop().await;
    assert!(timeout(SOON, events.end()).await.is_ok());
}

fn names(list: &serde_json::Value) -> Vec<String> {
    let items = list["items"].as_array().unwrap().iter();
    let name = |item: &serde_json::Value| item["metadata"]["name"].as_str().unwrap().to_owned();
    items.map(name).collect()
}

fn version(list: &serde_json::Value) -> String {
    list["metadata"]["resourceVersion"]
        .as_str()
        .unwrap()
        .to_owned()
}

/// Nodes that a test uses.
type Nodes<'a> = &'a [&'a Edge];
