use super::*;
use crate::control::tests::world::{World, name};
use axum::{body::Body, http};
use http_body_util::BodyExt;
use serde_json::Value;
use tower::Service;

fn app(world: &World) -> AdminState {
    AdminState {
        egress_usage: crate::state::EgressUsage::default(),
        registry: world.registry.clone(),
        nodes: world.reader(),
        metrics: world.metrics.clone(),
        memory_budget: Arc::default(),
        readiness: world.readiness.clone(),
        address: "127.0.0.1:10265".parse().unwrap(),
        reload_sender: ReloadSender::default(),
        node_sync: world.roll(),
        ca: world.live.clone(),
        certificates: CertificateInventory(Arc::new(|| Some(Vec::new()))),
        reload_ca: CaReloadFn(Arc::new(|| Ok(false))),
        state_sync: None,
    }
}

async fn get(world: &World, path: &str, host: &str) -> (u16, String, String) {
    get_from(router(app(world)), path, host).await
}

async fn get_from(mut router: Router, path: &str, host: &str) -> (u16, String, String) {
    let request = http::Request::get(path)
        .header("host", host)
        .body(Body::empty())
        .unwrap();
    let response = router.call(request).await.unwrap();
    let status = response.status().as_u16();
    let kind = response
        .headers()
        .get("content-type")
        .map(|kind| kind.to_str().unwrap().to_owned());
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (
        status,
        kind.unwrap_or_default(),
        String::from_utf8(body.to_vec()).unwrap(),
    )
}

async fn json(world: &World, path: &str) -> (u16, Value) {
    let (status, _, body) = get(world, path, "localhost").await;
    (status, serde_json::from_str(&body).unwrap())
}

#[tokio::test]
async fn ready_is_between_bound_and_draining_and_healthy_is_always() {
    let world = World::start();
    let ready = || async { get(&world, "/readyz", "localhost").await };
    assert_eq!(ready().await.0, 503);
    world.readiness.set_ready();
    assert_eq!(ready().await.0, 200);
    world.readiness.set_draining();
    world.readiness.set_ready();
    let (status, _, words) = ready().await;
    assert_eq!((status, words.as_str()), (503, "the gateway is draining\n"));
    assert_eq!(get(&world, "/healthz", "localhost").await.0, 200);
}

#[tokio::test]
async fn a_fault_is_named_and_leaves_the_gateway_ready() {
    let world = World::start();
    world.readiness.set_ready();
    let fault = world.readiness.report_fault("9052 is taken");
    let (status, _, text) = get(&world, "/readyz", "localhost").await;
    assert_eq!(
        (status, text.as_str()),
        (200, "ready\nfault: 9052 is taken\n")
    );
    drop(fault);
    let (status, _, text) = get(&world, "/readyz", "localhost").await;
    assert_eq!((status, text.as_str()), (200, "ready\n"));
}

#[tokio::test]
async fn a_remote_scraper_reads_only_metrics_by_any_name() {
    let world = World::start();
    let get = |path| {
        get_from(
            metrics_router(app(&world)),
            path,
            "gateways.causeway.svc:10271",
        )
    };
    let (status, _, text) = get("/metrics").await;
    assert_eq!(status, 200);
    assert!(text.contains("causeway_gateway_tunnels"), "{text}");
    for path in ["/api/v1/edges", "/api/v1/ca", "/readyz", "/healthz"] {
        assert_eq!(get(path).await.0, 404, "{path}");
    }
}

#[tokio::test]
async fn only_this_machines_own_names_are_answered() {
    let world = World::start();
    for host in [
        "localhost",
        "LOCALHOST:10265",
        "127.0.0.1:10265",
        "[::1]:1",
        "127.8.8.8",
    ] {
        assert_eq!(get(&world, "/healthz", host).await.0, 200, "{host}");
    }
    for host in [
        "evil.example",
        "edge-1:10265",
        "10.0.0.1",
        "localhost.evil.example",
        "",
    ] {
        let (status, kind, _) = get(&world, "/healthz", host).await;
        assert_eq!(
            (status, kind.as_str()),
            (421, "application/problem+json"),
            "{host}"
        );
    }
}

#[tokio::test]
async fn connected_and_disconnected_edges_are_listed() {
    let world = World::start();
    let away = world.enrolled("edge-2");
    drop(world.joined(&away, "b", 0).await);
    let _edge = world.joined(&world.enrolled("edge-1"), "a", 0).await;
    world
        .until(|world| !world.registry.has_tunnel(&name("edge-2")))
        .await;
    world
        .nodes
        .upsert(name("edge-3"), crate::state::Node::default());
    let (status, all) = json(&world, "/api/v1/edges").await;
    assert_eq!((status, all.as_array().unwrap().len()), (200, 3));
    let found: Vec<_> = (0..3)
        .map(|at| all[at]["state"].as_str().unwrap())
        .collect();
    assert_eq!(found, ["connected", "away", "away"]);
    let here = &all[0];
    assert_eq!(here["version"], "1.2.3");
    assert_eq!(here["tunnels"], 1);
    assert_eq!(here["streams"], 0);
    assert_eq!(here["ports"], serde_json::json!([9100]));
    assert!(here["rtt_ms"].as_f64().unwrap() > 0.0);
    assert!(here["address"].as_str().unwrap().starts_with("127.0.0.1:"));
    assert!(here["since"].as_str().unwrap().ends_with('Z'));
    assert!(all[1]["last_seen"].is_string() && all[1]["rtt_ms"].is_null());
    assert!(all[2]["last_seen"].is_null(), "never seen");
}

#[tokio::test]
async fn one_edge_is_shown_with_its_tunnels() {
    let world = World::start();
    let identity = world.enrolled("edge-1");
    let _edge = world.joined(&identity, "a", 0).await;
    let _bulk = world.joined(&identity, "a", 1).await;
    let (status, one) = json(&world, "/api/v1/edges/EDGE-1").await;
    assert_eq!((status, &one["instance"]), (200, &Value::from("a")));
    let slots: Vec<_> = (0..2)
        .map(|at| one["details"][at]["slot"].as_u64().unwrap())
        .collect();
    assert_eq!(slots, [0, 1]);
    for path in ["/api/v1/edges/edge-9", "/api/v1/edges/no..name"] {
        let (status, message) = json(&world, path).await;
        assert_eq!(
            (status, &message["reason"]),
            (404, &Value::from("node_unknown"))
        );
    }
    assert_eq!(json(&world, "/nothing").await.0, 404);
}

#[tokio::test]
async fn openmetrics_output_has_current_round_trip_times() {
    let world = World::start();
    let _edge = world.joined(&world.enrolled("edge-1"), "a", 0).await;
    let (status, kind, body) = get(&world, "/metrics", "localhost").await;
    assert_eq!(
        (status, kind.as_str()),
        (200, Exposition::OpenMetrics.content_type())
    );
    assert!(body.contains("causeway_gateway_tunnels 1\n"));
    assert!(body.contains("causeway_gateway_tunnel_round_trip_seconds{quantile=\"1\"} "));
    assert!(body.ends_with("# EOF\n"));
}

#[tokio::test]
async fn metrics_use_the_text_format_if_the_scraper_asks_for_it() {
    let world = World::start();
    let request = http::Request::get("/metrics")
        .header("host", "localhost")
        .header("accept", "text/plain;version=0.0.4")
        .body(Body::empty())
        .unwrap();
    let response = router(app(&world)).call(request).await.unwrap();
    let kind = response.headers()["content-type"].to_str().unwrap();
    assert_eq!(kind, "text/plain; version=0.0.4; charset=utf-8");
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let body = String::from_utf8(body.to_vec()).unwrap();
    let declared = "# TYPE causeway_gateway_streams_crossed_total counter\n";
    assert!(body.contains(declared) && !body.contains("# EOF"), "{body}");
}
