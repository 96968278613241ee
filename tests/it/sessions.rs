//! Sessions outlast the end of other tunnels, and restarts of either end cost no request.

use crate::{
    testbed::{TestBed, URL},
    world::{
        World,
        app::{App, answer},
        client::{Wire, assert_problem, exchange, read},
        edge::Edge,
        process::{GatewayProcess, OPEN, address_after, causeway},
        tool::Tool,
        until,
    },
};
use causeway_edge::config::Protocol;
use causeway_tunnel::load::BULK_SPAN;
use futures_util::future::join_all;
use serde_json::Value;
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{io::AsyncWriteExt, task::JoinSet};
use tokio_util::sync::CancellationToken;

const GET: &str = "GET /bulk HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
const UPGRADE: &str = "GET /session HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";

/// An app that sends bulk, echoes sessions, and answers all other requests.
async fn app() -> App {
    App::http(|head| match head.path().as_str() {
        "/bulk" => answer::endless(),
        "/session" => answer::switch("SPDY/3.1", b"hello"),
        _ => answer::ok("here"),
    })
    .await
}

/// A session through an upgrade.
async fn session(testbed: &TestBed) -> Box<dyn Wire> {
    let mut wire = testbed.tls().await;
    let head = exchange(&mut wire, UPGRADE).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert_eq!(read(&mut wire, 5).await, b"hello");
    Box::new(wire)
}

/// Checks that bytes pass unchanged in both directions.
pub(crate) async fn echoes(session: &mut Box<dyn Wire>) {
    let bytes = answer::pattern(10_000);
    session.write_all(&bytes).await.unwrap();
    assert!(
        read(session, bytes.len()).await == bytes,
        "the bytes differ"
    );
}

/// A download that continues until this is dropped.
async fn bulk(testbed: &TestBed) -> JoinSet<()> {
    let mut wire = testbed.tls().await;
    exchange(&mut wire, GET).await;
    let mut reading = JoinSet::new();
    reading.spawn(async move {
        // It never ends by itself.
        let _ = tokio::io::copy(&mut wire, &mut tokio::io::sink()).await;
    });
    reading
}

/// Returns the tunnels in slot 1 as the gateway shows them, which chooses the tunnels of new streams.
async fn additional(testbed: &TestBed) -> Vec<Value> {
    let node = testbed.node("edge-1").await;
    let mut tunnels = node["details"].as_array().unwrap().clone();
    tunnels.retain(|tunnel| tunnel["slot"] == 1);
    tunnels
}

/// Returns the number of tunnels in slot 1 that are in this state.
async fn additional_in_state(testbed: &TestBed, state: &str) -> usize {
    let mut tunnels = additional(testbed).await;
    tunnels.retain(|tunnel| tunnel["state"] == state);
    tunnels.len()
}

/// Returns the number of tunnels in slot 1 with an open stream.
async fn additional_in_use(testbed: &TestBed) -> usize {
    let mut tunnels = additional(testbed).await;
    tunnels.retain(|tunnel| tunnel["streams"].as_u64().unwrap() > 0);
    tunnels.len()
}

#[tokio::test]
async fn bulk_of_others_does_not_cut_sessions_on_a_tunnel_that_leaves() {
    let app = app().await;
    let world = TestBed::build().start().await;
    let edge = world.edge("edge-1").port(9100, app.address());
    let edge = edge.config(|config| config.tunnels.bulk_idle = BULK_SPAN);
    let edge = edge.join().await;
    let testbed = TestBed::of(world, edge);
    let mut sessions = Vec::new();
    for round in 1..=3 {
        let others = bulk(&testbed).await;
        let begun = loop {
            until("there is a tunnel beside the bulk", async || {
                additional_in_state(&testbed, "connected").await == 1
            })
            .await;
            for session in &mut sessions {
                echoes(session).await;
            }
            let begun = session(&testbed).await;
            // While the machine pauses no bulk moves, and the edge may close the tunnel before the session begins.
            if additional_in_use(&testbed).await == round {
                break begun;
            }
        };
        sessions.push(begun);
        drop(others);
        // Each keeps the session that was begun on it.
        until("closing the additional tunnel", async || {
            additional_in_state(&testbed, "draining").await == round
        })
        .await;
        for session in &mut sessions {
            echoes(session).await;
        }
    }
    drop(sessions);
    until("tunnels without sessions are gone", async || {
        testbed.tunnels().await.len() == 1
    })
    .await;
    assert_eq!(testbed.client().get(URL).await.text(), "here");
}

/// The state of the node, as the gateway shows it.
async fn until_state(world: &World, state: &str) {
    until(&format!("edge-1 is {state}"), async || {
        world.node("edge-1").await["state"] == state
    })
    .await;
}

/// No test waits that long for the end of a drain.
const LONG: Duration = Duration::from_hours(1);

/// An edge that allows its open streams an hour.
async fn patient(app: &App) -> TestBed {
    let world = TestBed::build().start().await;
    let edge = lasting_edge(&world, "edge-1", app).await;
    TestBed::of(world, edge)
}

#[tokio::test]
async fn a_draining_edge_serves_new_requests_during_a_session() {
    let app = app().await;
    let mut testbed = patient(&app).await;
    let mut first = session(&testbed).await;
    testbed.edge.drain();
    until_state(&testbed, "draining").await;
    for client in [testbed.client(), testbed.http2()] {
        assert_eq!(client.get(URL).await.text(), "here");
    }
    let mut connect = testbed.connect("edge-1:9100").await;
    let answer = exchange(&mut connect, "GET / HTTP/1.1\r\nHost: app\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let mut second = session(&testbed).await;
    echoes(&mut first).await;
    drop((first, connect));
    // A session that began meanwhile counts like one from before.
    assert_eq!(testbed.client().get(URL).await.text(), "here");
    echoes(&mut second).await;
    drop(second);
    testbed.edge.stop().await;
    until_state(&testbed, "away").await;
}

#[tokio::test]
async fn the_successor_of_a_draining_edge_gets_new_requests_at_once() {
    let (app, next) = (app().await, App::saying("next").await);
    let mut testbed = patient(&app).await;
    let mut open = session(&testbed).await;
    testbed.edge.drain();
    until_state(&testbed, "draining").await;
    let copy = testbed.folder().join("copy");
    let copied = Tool::new("cp").args(["-a".as_ref(), testbed.edge.folder().as_path(), &copy]);
    copied.run().await.ok();
    let successor = World::edge(&testbed, "edge-1").port(9100, next.address());
    let successor = successor.config(|config| config.data_dir = copy).join();
    let _successor = successor.await;
    for client in [testbed.client(), testbed.http2()] {
        assert_eq!(client.get(URL).await.text(), "next");
    }
    echoes(&mut open).await;
    drop(open);
    testbed.edge.stop().await;
    assert_eq!(testbed.client().get(URL).await.text(), "next");
}

/// A gateway that drains for an hour, and lets requests wait as long for a node, with such an edge and an app.
async fn lasting(app: &App) -> TestBed {
    let build = TestBed::build().config(|config| {
        config.timeouts.drain = LONG;
        config.timeouts.reconnect = LONG;
    });
    let world = Box::pin(build.start()).await;
    let edge = lasting_edge(&world, "edge-1", app).await;
    TestBed::of(world, edge)
}

/// An edge that allows its open streams an hour: a shorter drain time would end requests while the machine pauses.
async fn lasting_edge(world: &World, node: &str, app: &App) -> Edge {
    let edge = world.edge(node).port(9100, app.address());
    let edge = edge.config(|config| config.timeouts.drain = LONG);
    Box::pin(edge.join()).await
}

#[tokio::test]
async fn the_only_gateway_drains_open_sessions_and_holds_requests() {
    let app = app().await;
    let mut testbed = lasting(&app).await;
    let mut first = session(&testbed).await;
    testbed.drain_gateway();
    until("listeners stay open", async || {
        testbed.log().text().contains("listeners stay open")
    })
    .await;
    for client in [testbed.client(), testbed.http2()] {
        assert_eq!(client.get(URL).await.text(), "here");
    }
    let mut second = session(&testbed).await;
    echoes(&mut first).await;
    drop(first);
    assert_eq!(testbed.client().get(URL).await.text(), "here");
    echoes(&mut second).await;
    drop(second);
    // It ends long before its drain is over, and the edge dials again by itself.
    testbed.restart_gateway().await;
    assert_eq!(testbed.client().get(URL).await.text(), "here");
    let mut third = session(&testbed).await;
    echoes(&mut third).await;
}

#[tokio::test]
async fn requests_wait_only_for_a_node_with_a_restarting_edge() {
    let app = app().await;
    let mut testbed = lasting(&app).await;
    let unknown = testbed.client_at("plain").get("http://edge-2:9100/").await;
    assert_eq!(unknown.status, 404);
    testbed.edge.kill().await;
    // A request that is sent before that is lost with the tunnel.
    until("the gateway has noticed", async || {
        testbed.node("edge-1").await["state"] == "away"
    })
    .await;
    let clients = [testbed.client(), testbed.http2()];
    let asking = join_all(clients.iter().map(|client| client.get(URL)));
    let (answers, started) = tokio::join!(asking, testbed.edge.start());
    started.unwrap();
    for answer in answers {
        assert_eq!(answer.text(), "here");
    }
}

/// As a `DaemonSet` updates them: one is stopped in order and starts again, and the next follows when that one is ready.
#[tokio::test]
async fn edges_that_are_updated_one_by_one_cost_no_request() {
    let app = app().await;
    let mut testbed = lasting(&app).await;
    let join = |node| lasting_edge(&testbed, node, &app);
    let (mut second, mut third) = tokio::join!(join("edge-2"), join("edge-3"));
    let (stop, answered) = (
        CancellationToken::new(),
        Arc::new([const { AtomicUsize::new(0) }; 3]),
    );
    let mut asking = JoinSet::new();
    for number in 0..3 {
        let client = testbed.client_at("plain");
        let (stop, answered) = (stop.clone(), answered.clone());
        asking.spawn(async move {
            let url = format!("http://edge-{}:9100/", number + 1);
            while !stop.is_cancelled() {
                let answer = client.get(&url).await;
                assert_eq!((answer.status, answer.text().as_str()), (200, "here"));
                answered[number].fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let counts = || {
        answered
            .each_ref()
            .map(|count| count.load(Ordering::Relaxed))
    };
    for number in 0..3 {
        let edge = [&mut testbed.edge, &mut second, &mut third]
            .into_iter()
            .nth(number)
            .unwrap();
        edge.stop().await;
        edge.start().await.unwrap();
        let before = counts();
        until("requests of each node are answered again", async || {
            counts()
                .iter()
                .zip(&before)
                .all(|(now, before)| now > before)
        })
        .await;
    }
    stop.cancel();
    while let Some(ended) = asking.join_next().await {
        ended.unwrap();
    }
}

#[tokio::test]
async fn requests_wait_no_longer_than_configured() {
    let app = app().await;
    let build = TestBed::build();
    let build = build.config(|config| config.timeouts.reconnect = Duration::from_millis(100));
    let mut testbed = TestBed::along(build, Protocol::Http, app.address()).await;
    testbed.edge.stop().await;
    let answer = testbed.client().get(URL).await;
    assert_problem(
        &answer,
        503,
        "node_not_connected",
        "edge-1 is not connected; it was last seen at",
    );
}

/// As a service manager restarts it: SIGTERM, the end, a new process.
#[tokio::test]
async fn an_orderly_gateway_restart_costs_no_request() {
    let app = app().await;
    // An edge that the machine stops for a while dials late.
    let configuration = format!("{OPEN}\ntimeouts: {{ reconnect: 5m }}");
    let mut site = GatewayProcess::with_listeners(&configuration).await;
    let _edge = site.join("edge-1", app.port()).await;
    let client = site.nobody();
    let mut open = client.wire("edge-1", &[]).await.unwrap();
    let head = exchange(&mut open, UPGRADE).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    read(&mut open, 5).await;
    site.gateway.signal("TERM").await;
    site.gateway.wait_for_line("listeners stay open").await;
    assert_eq!(client.get("http://edge-1:9100/").await.text(), "here");
    echoes(&mut open).await;
    drop(open);
    let site = site.start_again().await;
    let answer = site.nobody().get("http://edge-1:9100/").await;
    assert_eq!(answer.text(), "here");
}

#[tokio::test]
async fn a_successor_edge_starts_beside_its_draining_predecessor() {
    let (app, next) = (app().await, App::saying("next").await);
    let site = GatewayProcess::open_to_all("127.0.0.1:0").await;
    let mut first = site.join("edge-1", app.port()).await;
    let written = first.written();
    let runs = written.line(|line| line.contains("edge is running"));
    let admin = address_after(runs.unwrap(), "admin=");
    let client = site.nobody();
    let mut open = client.wire("edge-1", &[]).await.unwrap();
    let head = exchange(&mut open, UPGRADE).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    read(&mut open, 5).await;
    let second = || {
        let ports = format!("{{9100: {{target: \"{}\"}}}}", next.address());
        let second = causeway("edge").flag("--gateway", &site.tunnel);
        let second = second.flag("--data-dir", site.edge_data("edge-1"));
        second.flag("--admin-listen", &admin).flag("--ports", ports)
    };
    second().run().await.failed(&["in use"]);
    first.signal("TERM").await;
    let mut second = second().start();
    first
        .wait_for_line("another process has taken over the data directory")
        .await;
    second.wait_for_line("tunnel registered").await;
    let url = "http://edge-1:9100/";
    assert_eq!(client.get(url).await.text(), "next");
    echoes(&mut open).await;
    drop(open);
    first.ended().await.ok();
    assert_eq!(client.get(url).await.text(), "next");
    let health = causeway("health").flag("--data-dir", site.edge_data("edge-1"));
    health.run().await.ok();
}
