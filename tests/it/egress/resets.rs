//! Connections that the program on the node aborts.

use super::{
    app_only, assert_echo, assert_reset, by_socks, connect, join, proxied, until_outcomes, world,
};
use crate::world::{
    app::{App, End, Script, answer},
    client::read,
    gateway::loopback,
    until,
};
use causeway_edge::config::Protocol;
use serde_json::json;
use tokio::{io::AsyncWriteExt, net::TcpListener};

/// A destination must not take a part of a transfer for the whole.
#[tokio::test]
async fn an_abort_of_the_program_is_a_reset_at_the_destination() {
    let app = App::tcp(Script::new().echo()).await;
    let world = world(json!({
        "destinations": { "app": app.address().to_string() },
        "rules": [{ "to": { "destinations": ["app"], "nodes": ["edge-2"] } }],
    }))
    .await;
    let node = world.edge("edge-2");
    let node = node.port_as(9100, Protocol::Tcp, app.address());
    let _node = node.join().await;
    let edge = join(&world, "edge-1", &["app", "edge-2:9100"]).await;
    let (to_app, to_node) = (
        by_socks(&edge, "app", 443).await,
        by_socks(&edge, "edge-2", 9100).await,
    );
    assert_eq!((to_app.1, to_node.1), (0, 0));
    let wires = [
        ("listener", connect(&edge, Some("app:443")).await),
        ("CONNECT", proxied(&edge, "app:443").await.0),
        ("SOCKS", to_app.0),
        (
            "listener for a node",
            connect(&edge, Some("edge-2:9100")).await,
        ),
        ("CONNECT to a node", proxied(&edge, "edge-2:9100").await.0),
        ("SOCKS to a node", to_node.0),
    ];
    for (way, mut wire) in wires {
        assert_echo(&mut wire).await;
        wire.set_zero_linger().unwrap();
        drop(wire);
        assert_eq!(app.end().await, End::Reset, "{way}");
    }
}

/// The destination reads no body, so the edge reads nothing from the program at last.
#[tokio::test]
async fn an_abort_of_a_stalled_plain_upload_is_a_reset_at_the_destination() {
    let destination = TcpListener::bind(loopback()).await.unwrap();
    let world = world(app_only(destination.local_addr().unwrap())).await;
    let edge = join(&world, "edge-1", &[]).await;
    let mut wire = connect(&edge, None).await;
    let head =
        "POST http://app:443/ HTTP/1.1\r\nHost: app:443\r\nContent-Length: 1000000000\r\n\r\n";
    wire.write_all(head.as_bytes()).await.unwrap();
    let (accepted, _) = destination.accept().await.unwrap();
    let chunk = vec![0; 64 << 10];
    let mut stalled = 0;
    until("the upload is stalled", async || {
        stalled += 1;
        while wire.try_write(&chunk).is_ok() {
            stalled = 0;
        }
        stalled == 20
    })
    .await;
    wire.set_zero_linger().unwrap();
    drop(wire);
    until_outcomes(&edge, &[("aborted", 1)]).await;
    assert_reset(accepted).await;
}

/// Bytes behind a request, which HTTP does not read, hide no end of the connection.
#[tokio::test]
async fn a_program_that_leaves_behind_unread_bytes_ends_its_plain_request() {
    let app = App::http(|_| answer::silence()).await;
    let world = world(app_only(app.address())).await;
    let edge = join(&world, "edge-1", &[]).await;
    let head = "GET http://app:443/ HTTP/1.1\r\nHost: app:443\r\n\r\n";
    for (unread, resets) in [("\r\n", false), (head, false), ("\r\n", true), (head, true)] {
        let mut wire = connect(&edge, None).await;
        let bytes = format!("{head}{unread}");
        wire.write_all(bytes.as_bytes()).await.unwrap();
        app.head().await;
        if resets {
            wire.set_zero_linger().unwrap();
        }
        drop(wire);
        assert_eq!(app.end().await, End::Reset);
    }
    until_outcomes(&edge, &[("aborted", 4)]).await;
}

/// The program must not take a part of the response for the whole.
#[tokio::test]
async fn a_plain_request_is_reset_when_its_rule_is_withdrawn() {
    let app = App::http(|_| answer::endless()).await;
    let mut world = world(app_only(app.address())).await;
    let edge = join(&world, "edge-1", &[]).await;
    let mut wire = connect(&edge, None).await;
    let head = "GET http://app:443/ HTTP/1.1\r\nHost: app:443\r\n\r\n";
    wire.write_all(head.as_bytes()).await.unwrap();
    assert_eq!(read(&mut wire, 15).await, b"HTTP/1.1 200 OK");
    world.reload(|config| config.egress = None).unwrap();
    assert_reset(wire).await;
    until_outcomes(&edge, &[("reset", 1)]).await;
}
