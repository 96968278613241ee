//! PROXY v2 on listeners: a trusted proxy gives the address of the client, and no other peer can give one.

use crate::world::{
    PATIENCE, World,
    app::{App, Script, answer},
    authority::Authority,
    client::read,
    gateway::{anonymous, fixed, loopback},
};
use causeway_edge::config::Protocol;
use causeway_gateway::config::{self, Listener, ListenerProtocol};
use std::net::{Ipv4Addr, SocketAddr};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::timeout,
};

/// The only proxy that listeners trust.
const PROXY: [u8; 4] = [127, 0, 0, 1];
/// Any other host.
const ELSEWHERE: [u8; 4] = [127, 0, 0, 2];
const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: close\r\n\r\n";

/// Listener that trusts the proxy.
fn believing(name: &str, kind: ListenerProtocol) -> Listener {
    Listener {
        proxy_protocol: vec!["127.0.0.1/32".parse().unwrap()],
        original_destination: true,
        anonymous_from: vec![
            "192.0.2.0/24".parse().unwrap(),
            "127.0.0.2/32".parse().unwrap(),
        ],
        ..anonymous(name, kind)
    }
}

fn header(from: [u8; 4], to: [u8; 4], port: u16) -> Vec<u8> {
    let start = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c";
    [
        &start[..],
        &from,
        &to,
        &4000_u16.to_be_bytes(),
        &port.to_be_bytes(),
    ]
    .concat()
}

/// Returns the response to these bytes, or nothing if the connection is cut.
async fn exchange(listener: SocketAddr, from: [u8; 4], bytes: &[u8]) -> String {
    let socket = TcpSocket::new_v4().unwrap();
    socket
        .bind(SocketAddr::from((Ipv4Addr::from(from), 0)))
        .unwrap();
    let mut stream: TcpStream = socket.connect(listener).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let (mut message, mut piece) = (String::new(), [0; 4096]);
    let reading = async {
        while !message.ends_with("here")
            && let Ok(length @ 1..) = stream.read(&mut piece).await
        {
            message.push_str(&String::from_utf8_lossy(&piece[..length]));
        }
    };
    timeout(PATIENCE, reading)
        .await
        .expect("neither an answer nor an end");
    message
}

#[tokio::test]
async fn only_a_trusted_proxys_header_gives_source_and_destination() {
    let app = App::http(|_| answer::ok("here")).await;
    assert_eq!(loopback().ip(), Ipv4Addr::LOCALHOST);
    let build = World::build();
    let build = build.listener(believing("bytes", ListenerProtocol::Tcp));
    let world = build
        .listener(believing("web", ListenerProtocol::Http))
        .start()
        .await;
    let plan = world.edge("edge-1").port(9100, app.address());
    let _edge = plan.address("10.0.0.11").join().await;
    let (bytes, web) = (world.listener("bytes"), world.listener("web"));
    let client = [192, 0, 2, 7];
    let with = |from, to, port| [&header(from, to, port)[..], GET].concat();

    // Node and port are those of the destination: a tcp listener has no other source for them.
    let answer = exchange(bytes, PROXY, &with(client, [10, 0, 0, 11], 9100)).await;
    assert!(answer.ends_with("here"), "{answer}");
    let answer = exchange(web, PROXY, &with(client, [10, 0, 0, 99], 1)).await;
    assert!(answer.ends_with("here"), "{answer}");
    for record in world.log().records() {
        assert_eq!(record["peer"], "192.0.2.7:4000", "{record}");
        assert_eq!(record["client"], "192.0.2.7", "{record}");
    }
    // The gateway checks the client's address, not the proxy's.
    let answer = exchange(web, PROXY, &with([198, 51, 100, 1], [10, 0, 0, 11], 9100)).await;
    assert!(answer.starts_with("HTTP/1.1 401"), "{answer}");

    // The proxy itself is no client: the gateway cuts its connection without a header, or with an old one.
    let old = [&b"PROXY TCP4 192.0.2.7 10.0.0.11 4000 9100\r\n"[..], GET].concat();
    for sent in [GET, &old] {
        for listener in [bytes, web] {
            assert_eq!(exchange(listener, PROXY, sent).await, "");
        }
    }
    // Peers that are no proxies are served without a header, and a header of theirs is invalid HTTP.
    let answer = exchange(web, ELSEWHERE, GET).await;
    assert!(answer.ends_with("here"), "{answer}");
    let answer = exchange(web, ELSEWHERE, &with(client, [10, 0, 0, 11], 9100)).await;
    assert!(!answer.contains("here"), "{answer}");
}

#[tokio::test]
async fn an_app_of_bytes_reads_the_client_in_a_proxy_header() {
    let bytes = Listener {
        anonymous: true,
        ..fixed("bytes", ListenerProtocol::Tcp, "edge-1", 22)
    };
    let world = World::build().listener(bytes).start().await;
    let app = App::tcp(Script::new().echo()).await;
    let edge = world
        .edge("edge-1")
        .port_as(22, Protocol::Tcp, app.address());
    let edge = edge.config(|config| config.ports.get_mut(&22).unwrap().proxy_protocol = true);
    let _edge = edge.join().await;
    let socket = TcpSocket::new_v4().unwrap();
    let from = SocketAddr::from((Ipv4Addr::from(ELSEWHERE), 0));
    socket.bind(from).unwrap();
    let mut socket = socket.connect(world.listener("bytes")).await.unwrap();
    socket.write_all(b"hello").await.unwrap();
    let client = socket.local_addr().unwrap().port();
    let mut expected = header(ELSEWHERE, [127, 0, 0, 1], app.port());
    expected[24..26].copy_from_slice(&client.to_be_bytes());
    expected.extend(b"hello");
    assert_eq!(read(&mut socket, expected.len()).await, expected);
}

/// The requests of several clients share a connection on which the gateway speaks TLS.
#[tokio::test]
async fn a_pooled_connection_names_no_client_in_its_proxy_header() {
    let authority = Authority::new();
    let tls = authority.serve(&authority.app(&["edge-1"]), false);
    let app = App::https_behind_proxy(tls, |_| answer::ok("here")).await;
    let upstream_tls = config::UpstreamTls {
        verify: false,
        ..config::UpstreamTls::default()
    };
    let build = World::build().listener(anonymous("web", ListenerProtocol::Http));
    let build = build.config(|config| drop(config.upstream_tls.insert(9100, upstream_tls)));
    let world = build.workers(1).start().await;
    let plan = world.edge("edge-1");
    let plan = plan.port_as(9100, Protocol::Tcp, app.address());
    let plan = plan.config(|config| config.ports.get_mut(&9100).unwrap().proxy_protocol = true);
    let _edge = plan.join().await;
    let client = world.client_at("web").nobody();
    for from in ["127.0.0.2", "127.0.0.3"] {
        let answer = client.clone().from(from).get("http://edge-1:9100/").await;
        assert_eq!(answer.text(), "here");
    }
    assert_eq!(app.connections(), 1, "the connection was pooled");
    let local = b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0";
    assert_eq!(app.body().await, local);
}
