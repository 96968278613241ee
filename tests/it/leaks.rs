//! Resources that could leak if clients leave at the worst moment: none must leak.
//!
//! The tests count the open streams and open connections of each listener.

use crate::{
    testbed::TestBed,
    world::{
        app::{App, answer},
        client::{Wire, exchange, read_to_end},
        until,
    },
};
use causeway_edge::config::Protocol;
use serde_json::json;
use socket2::SockRef;
use std::{io::ErrorKind, time::Duration};
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    time::timeout,
};

const HEAD: &str = "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nContent-Length: 1000000000\r\n\r\n";

/// Tests clients whose sockets are not read, so that the system does not report when they leave.
#[tokio::test]
async fn a_client_that_aborts_a_waiting_upload_is_released() {
    let deaf = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let testbed = TestBed::to_as(Protocol::Http, deaf.local_addr().unwrap()).await;
    let mut taken = Vec::new();
    for listener in ["https", "connect"] {
        let mut wire = match listener {
            "https" => testbed.tls().await,
            _ => testbed.connect("edge-1:9100").await,
        };
        fill(&mut wire).await;
        taken.push(deaf.accept().await.unwrap());
        break_off(wire.get_ref().0);
    }
    for listener in ["plain", "bytes"] {
        let mut wire = testbed.tcp(listener).await;
        fill(&mut wire).await;
        taken.push(deaf.accept().await.unwrap());
        break_off(&wire);
    }
    until("all clients are released", async || {
        let metrics = testbed.metrics().await;
        metrics.sum("open_streams", &[]) == 0 && metrics.sum("open_connections", &[]) == 0
    })
    .await;
}

/// Checks that a response that the drain time is too short for does not look complete.
#[tokio::test]
async fn a_response_cut_by_a_drain_ends_with_a_reset() {
    let app = App::http(|_| answer::endless()).await;
    let build = TestBed::build().config(|config| config.timeouts.drain = Duration::from_secs(1));
    let testbed = TestBed::along(build, Protocol::Http, app.address()).await;
    let get = "GET / HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
    let mut wires: Vec<Box<dyn Wire>> = vec![
        Box::new(testbed.tls().await),
        Box::new(testbed.connect("edge-1:9100").await),
        Box::new(testbed.tcp("plain").await),
        Box::new(testbed.tcp("bytes").await),
    ];
    for wire in &mut wires {
        let head = exchange(wire, get).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    }
    testbed.drain_gateway();
    let ends = wires.iter_mut().map(read_to_end);
    for (number, end) in futures_util::future::join_all(ends)
        .await
        .iter()
        .enumerate()
    {
        let end = end.as_ref().map(Vec::len).map_err(std::io::Error::kind);
        assert_eq!(end, Err(ErrorKind::ConnectionReset), "client {number}");
    }
    until("each stream is recorded", async || {
        testbed.log().records().len() == 4
    })
    .await;
    for record in testbed.log().records() {
        assert_eq!(
            (&record["status"], &record["reason"]),
            (&json!(200), &json!("draining"))
        );
    }
}

/// Uploads until no more bytes are accepted.
async fn fill(wire: &mut impl Wire) {
    wire.write_all(HEAD.as_bytes()).await.unwrap();
    let chunk = vec![0; 64 << 10];
    while let Ok(written) = timeout(Duration::from_secs(1), wire.write_all(&chunk)).await {
        written.unwrap();
    }
}

/// The close of the socket is a reset, as the kernel's is for a process that was killed with bytes unread.
fn break_off(tcp: &TcpStream) {
    SockRef::from(tcp).set_linger(Some(Duration::ZERO)).unwrap();
}
