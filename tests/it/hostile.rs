//! Malicious clients, at the level of the wire: fields that contradict the head, are repeated, or have another spelling.
//!
//! Each test sends bytes that no honest client sends, and checks which of them reached the app.

use crate::world::{GATEWAY_NAME, World, app::App, client::assert_problem, gateway};
use causeway_gateway::config::ListenerProtocol;
use std::net::SocketAddr;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

/// Reads one request with a chunked body and answers it. Returns all received bytes.
pub(crate) async fn one_chunked_request(listener: TcpListener) -> String {
    let (mut socket, _) = listener.accept().await.unwrap();
    let mut seen = Vec::new();
    while !(seen.windows(5).any(|bytes| bytes == b"\r\n0\r\n") && seen.ends_with(b"\r\n\r\n")) {
        assert!(socket.read_buf(&mut seen).await.unwrap() > 0, "{seen:?}");
    }
    let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
    socket.write_all(answer).await.unwrap();
    String::from_utf8(seen).unwrap()
}

#[tokio::test]
async fn trailers_carry_no_head_or_gateway_fields() {
    let world = World::start().await;
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0)))
        .await
        .unwrap();
    let address = listener.local_addr().unwrap();
    let _edge = world.edge("edge-1").port(9100, address).join().await;
    let request = "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nTransfer-Encoding: chunked\r\n\
        Trailer: causeway-target, authorization, connection, x-sum\r\n\r\n2\r\nab\r\n0\r\n\
        Causeway-Target: 127.0.0.1:22\r\nAuthorization: Bearer x\r\nConnection: close\r\nX-Sum: 7\r\n\r\n";
    let client = world.client();
    let (answer, seen) = tokio::join!(client.raw("edge-1", request), one_chunked_request(listener));
    assert_eq!(answer.status, 200, "{answer}");
    let (_, trailers) = seen.split_once("\r\n0\r\n").unwrap();
    assert_eq!(trailers.to_lowercase(), "x-sum: 7\r\n\r\n");
}

#[tokio::test]
async fn two_credentials_are_none() {
    let world = World::start().await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let request = "GET / HTTP/1.1\r\nHost: edge-1:9100\r\nAuthorization: Bearer good\r\n\
        Authorization: Basic other\r\n\r\n";
    let answer = world.client().raw("edge-1", request).await;
    assert_eq!(answer.status, 400, "{answer}");
    assert_eq!(app.requests(), 0);
}

#[tokio::test]
async fn a_roots_dot_hides_no_node() {
    let world = World::start().await;
    let apps = [App::saying("one").await, App::saying("two").await];
    let _one = world
        .edge("edge-1")
        .port(9100, apps[0].address())
        .join()
        .await;
    let _two = world
        .edge("edge-2")
        .port(9100, apps[1].address())
        .join()
        .await;
    let ask = async |host: &str| {
        let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
        world.client().raw("edge-1", request).await
    };
    let dotted = ask("edge-1.:9100").await;
    assert_eq!((dotted.status, dotted.text()), (200, "one".to_owned()));
    let elsewhere = ask("edge-2.:9100").await;
    assert_eq!(elsewhere.status, 421, "{elsewhere}");
    assert_eq!(apps[1].requests(), 0);
}

#[tokio::test]
async fn a_body_that_breaks_the_protocol_is_not_the_nodes_fault() {
    let world = World::start().await;
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0)))
        .await
        .unwrap();
    let address = listener.local_addr().unwrap();
    let _edge = world.edge("edge-1").port(9100, address).join().await;
    let request = "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nTransfer-Encoding: chunked\r\n\r\n\
        3;a\nb\r\nabc\r\n0\r\n\r\n";
    let answer = world.client().raw("edge-1", request).await;
    assert_problem(&answer, 400, "malformed", "body");
}

#[tokio::test]
async fn a_connect_has_no_content() {
    let world = World::build()
        .listener(gateway::listener("connect", ListenerProtocol::Connect))
        .start()
        .await;
    let app = App::saying("it").await;
    let _edge = world.edge("edge-1").port(9100, app.address()).join().await;
    let request = "CONNECT edge-1:9100 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nabcde";
    let answer = world.client_at("connect").raw(GATEWAY_NAME, request).await;
    assert_eq!(answer.status, 400, "{answer}");
    assert_eq!(app.connections(), 0);
}
