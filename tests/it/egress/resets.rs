//! Connections that the program on the node aborts.

use super::{assert_echo, by_socks, connect, join, proxied, world};
use crate::world::app::{App, End, Script};
use causeway_edge::config::Protocol;
use serde_json::json;

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
