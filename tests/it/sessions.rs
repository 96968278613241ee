//! Sessions outlast the tunnels beside them, and restarts of either end cost no request.

use crate::{
    road::{Road, URL},
    world::{
        app::{App, answer},
        caller::{Wire, exchange, read},
        until,
    },
};
use std::time::Duration;
use tokio::{io::AsyncWriteExt, task::JoinSet};

const GET: &str = "GET /bulk HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
const UPGRADE: &str = "GET /session HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";

/// An app that sends bulk, echoes sessions, and answers everything else.
async fn app() -> App {
    App::http(|head| match head.path().as_str() {
        "/bulk" => answer::endless(),
        "/session" => answer::switch("SPDY/3.1", b"hello"),
        _ => answer::ok("here"),
    })
    .await
}

/// A session through an upgrade.
async fn session(road: &Road) -> Box<dyn Wire> {
    let mut wire = road.tls().await;
    let head = exchange(&mut wire, UPGRADE).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert_eq!(read(&mut wire, 5).await, b"hello");
    Box::new(wire)
}

/// Bytes go there and back whole.
async fn echoes(session: &mut Box<dyn Wire>) {
    let bytes = answer::pattern(10_000);
    session.write_all(&bytes).await.unwrap();
    assert!(read(session, bytes.len()).await == bytes, "other bytes");
}

/// A download that goes on until this is dropped.
async fn bulk(road: &Road) -> JoinSet<()> {
    let mut wire = road.tls().await;
    exchange(&mut wire, GET).await;
    let mut reading = JoinSet::new();
    reading.spawn(async move {
        // It never ends by itself.
        let _ = tokio::io::copy(&mut wire, &mut tokio::io::sink()).await;
    });
    reading
}

/// How many tunnels the edge has in this slot and state.
fn tunnels(road: &Road, slot: u32, state: &str) -> usize {
    let tunnels = road.edge.status().tunnels;
    let those = tunnels.iter();
    those
        .filter(|tunnel| tunnel.slot == slot && tunnel.state == state)
        .count()
}

#[tokio::test]
async fn bulk_of_others_does_not_cut_sessions_on_a_tunnel_that_leaves() {
    let app = app().await;
    let world = Road::build().start().await;
    let edge = world.edge("edge-1").port(9100, app.address());
    let edge = edge.config(|config| config.tunnels.bulk_idle = Duration::from_millis(200));
    let edge = edge.join().await;
    let road = Road::of(world, edge);
    let mut sessions = Vec::new();
    for round in 1..=3 {
        let others = bulk(&road).await;
        until("there is a tunnel beside the bulk", async || {
            tunnels(&road, 1, "standing") == 1
        })
        .await;
        for session in &mut sessions {
            echoes(session).await;
        }
        sessions.push(session(&road).await);
        drop(others);
        // Each keeps the session that was begun on it.
        until("the further tunnel leaves", async || {
            tunnels(&road, 1, "leaving") == round
        })
        .await;
        for session in &mut sessions {
            echoes(session).await;
        }
    }
    drop(sessions);
    until("tunnels without sessions are gone", async || {
        road.tunnels().await.len() == 1 && tunnels(&road, 1, "leaving") == 0
    })
    .await;
    assert_eq!(road.caller().get(URL).await.text(), "here");
}
