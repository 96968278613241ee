//! Connections to a node whose tunnel another gateway has.

use super::{ask, assert_echo, refused_at};
use crate::{
    peers::Fleet,
    world::{
        app::{App, End, Script},
        process::Process,
        until,
    },
};
use serde_json::json;
use test_summary::unused_port;
use tokio::net::TcpStream;

/// Starts the edge of a node whose only gateway is the second one, with a proxy at the returned address.
async fn start(fleet: &Fleet, node: &str, app: &App) -> (Process, String) {
    // The edge joined at the first gateway, and would connect there as well.
    fleet.sites[0].forget_gateways(node);
    let listen = format!("127.0.0.1:{}", unused_port());
    let egress = json!({ "proxy": { "listen": listen } }).to_string();
    let flags = ["--tunnels-gateways", "one", "--egress", &egress];
    let mut edge = fleet.edge_with(&flags, node, &[1], (app, "")).await;
    edge.wait_for_line("egress listener is open").await;
    (edge, listen)
}

/// Only the policy of the gateway that has the tunnel tells the two nodes apart.
#[tokio::test]
async fn the_gateway_of_the_destination_decides_by_the_identity_of_the_node() {
    let app = App::tcp(Script::new().echo()).await;
    let rules = json!({ "rules": [{ "to": { "nodes": ["edge-2"], "ports": [9100] } }] });
    let nodes = ["edge-1", "edge-2", "edge-3"];
    let configuration = format!("egress: {rules}\naccess_log: all\n");
    let fleet = Fleet::start(2, &nodes, &app, &configuration).await;
    let client = |node: &str| format!("spiffe://causeway.local/edge/{node}");
    let allowed = [client("edge-1")];
    let policy = json!({ "rules": [{ "who": { "spiffe": allowed }, "then": "allow" }] });
    fleet.set_policy(0, &policy).await;
    let flags = ["--tunnels-gateways", "one"];
    let port = (&app, ", scheme: tcp");
    let _destination = fleet.edge_with(&flags, "edge-2", &[0], port).await;
    fleet.until_state(1, "edge-2", "connected").await;
    let (_first, proxy) = start(&fleet, "edge-1", &app).await;
    let (_third, other_proxy) = start(&fleet, "edge-3", &app).await;

    let program = async |proxy: &str| TcpStream::connect(proxy).await.unwrap();
    let (mut wire, head) = ask(program(&proxy).await, "edge-2:9100").await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert_echo(&mut wire).await;
    let (status, body) = refused_at(program(&other_proxy).await, "edge-2:9100").await;
    let denial = format!("the policy does not allow {} to", client("edge-3"));
    assert!(status == 403 && body.contains(&denial), "{status} {body}");
    assert_eq!(app.connections(), 1);
    // An abort passes both gateways.
    wire.set_zero_linger().unwrap();
    drop(wire);
    assert_eq!(app.end().await, End::Reset);

    let (holder, entry) = (&fleet.sites[0], &fleet.sites[1]);
    let metrics = entry.metrics().await;
    assert_eq!(metrics.sum("streams_forwarded_total", &[]), 2);
    let metrics = holder.metrics().await;
    assert_eq!(metrics.sum("streams_served_for_peers_total", &[]), 1);
    // The gateway of the client has the record, with the decision of the other one.
    for (node, status) in [("edge-1", "status=200"), ("edge-3", "reason=\"forbidden\"")] {
        let client = format!("client=\"{}\"", client(node));
        let parts = ["listener=\"egress\"", &client, "node=\"edge-2\"", status];
        until(&format!("the record of {node} is written"), async || {
            let written = entry.gateway.written();
            let is_record = |line: &str| parts.iter().all(|part| line.contains(part));
            written.line(is_record).is_some()
        })
        .await;
    }
}
