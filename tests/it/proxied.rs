//! PROXY v2 on listeners: a trusted proxy gives the address of the client, and no other peer can give one. And to targets,
//! which read the client's address.

use crate::world::{
    PATIENCE, World,
    app::{App, Script, answer},
    authority::Authority,
    client::{read, read_to_end},
    gateway::{anonymous, fixed, loopback},
    tool::{Running, Tool, need},
    until,
};
use causeway_certs::LeafCertificate;
use causeway_edge::config::Protocol;
use causeway_gateway::config::{self, ListenAddr, Listener, ListenerProtocol};
use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};
use tempfile::TempDir;
use test_summary::unused_port;
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

/// Listener for sessions with a port of edge-1.
fn raw(name: &str, port: u16) -> Listener {
    Listener {
        anonymous: true,
        ..fixed(name, ListenerProtocol::Tcp, "edge-1", port)
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

/// Connects from this address of the system.
async fn dial(listener: SocketAddr, from: impl Into<IpAddr>) -> TcpStream {
    let socket = if listener.is_ipv4() {
        TcpSocket::new_v4().unwrap()
    } else {
        TcpSocket::new_v6().unwrap()
    };
    socket.bind(SocketAddr::new(from.into(), 0)).unwrap();
    socket.connect(listener).await.unwrap()
}

/// Returns the response to these bytes, or nothing if the connection is cut.
async fn exchange(listener: SocketAddr, from: [u8; 4], bytes: &[u8]) -> String {
    let mut stream = dial(listener, from).await;
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
    let world = World::build().listener(raw("bytes", 22)).start().await;
    let app = App::tcp(Script::new().echo()).await;
    let edge = world
        .edge("edge-1")
        .port_as(22, Protocol::Tcp, app.address());
    let edge = edge.config(|config| config.ports.get_mut(&22).unwrap().proxy_protocol = true);
    let _edge = edge.join().await;
    let mut socket = dial(world.listener("bytes"), ELSEWHERE).await;
    socket.write_all(b"hello").await.unwrap();
    let client = socket.local_addr().unwrap().port();
    let mut expected = header(ELSEWHERE, [127, 0, 0, 1], app.port());
    expected[24..26].copy_from_slice(&client.to_be_bytes());
    expected.extend(b"hello");
    assert_eq!(read(&mut socket, expected.len()).await, expected);
}

/// TLS of the gateway with an upstream whose certificate is not checked.
fn any_certificate() -> config::UpstreamTls {
    config::UpstreamTls {
        verify: false,
        ..config::UpstreamTls::default()
    }
}

/// The requests of several clients share a connection on which the gateway speaks TLS.
#[tokio::test]
async fn a_pooled_connection_names_no_client_in_its_proxy_header() {
    let authority = Authority::new();
    let tls = authority.serve(&authority.app(&["edge-1"]), false);
    let app = App::https_behind_proxy(tls, |_| answer::ok("here")).await;
    let build = World::build().listener(anonymous("web", ListenerProtocol::Http));
    let build = build.config(|config| drop(config.upstream_tls.insert(9100, any_certificate())));
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

/// A real `HAProxy` whose ports expect a PROXY header.
struct Haproxy {
    /// Passes bytes to an app, and logs the client of each session.
    bytes: SocketAddr,
    /// Answers each request with the address of the client.
    http: SocketAddr,
    /// The same over TLS.
    https: SocketAddr,
    process: Running,
    _folder: TempDir,
}

impl Haproxy {
    async fn start(app: &App, certificate: &LeafCertificate) -> Self {
        let any_port = || SocketAddr::from((Ipv4Addr::LOCALHOST, unused_port()));
        let (bytes, http, https, ready) = (any_port(), any_port(), any_port(), any_port());
        let folder = tempfile::tempdir().unwrap();
        let (file, pem) = (
            folder.path().join("haproxy.cfg"),
            folder.path().join("server.pem"),
        );
        let (chain, key) = (certificate.chain_pem(), certificate.key_pem());
        fs::write(&pem, format!("{chain}{}", key.expose())).unwrap();
        let text = format!(
            "global\n log stdout format raw local0\n\
             defaults\n timeout connect 1m\n timeout client 1h\n timeout server 1h\n\
             listen bytes\n mode tcp\n bind {bytes} accept-proxy\n log global\n\
             \x20log-format \"client %ci:%cp\"\n server app {}\n\
             frontend http\n mode http\n bind {http} accept-proxy\n\
             \x20bind {https} accept-proxy ssl crt {}\n bind {ready}\n\
             \x20http-request return status 200 content-type text/plain lf-string \"%[src]:%[src_port]\"\n",
            app.address(),
            pem.display()
        );
        fs::write(&file, text).unwrap();
        let haproxy = Tool::new("haproxy").args(["-db".as_ref(), "-f".as_ref(), file.as_os_str()]);
        let process = haproxy.start();
        until("HAProxy is open", async || {
            TcpStream::connect(ready).await.is_ok()
        })
        .await;
        Self {
            bytes,
            http,
            https,
            process,
            _folder: folder,
        }
    }
}

/// Returns a listener on IPv6 for a port of edge-1, if this machine has IPv6.
fn raw_ipv6(name: &str, port: u16) -> Option<Listener> {
    let listen = SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], 0));
    std::net::TcpListener::bind(listen).ok()?;
    let listen = ListenAddr::Tcp(listen);
    Some(Listener {
        listen,
        ..raw(name, port)
    })
}

#[tokio::test]
async fn haproxy_as_a_target_reads_the_client_in_the_proxy_header() {
    need!("haproxy");
    let authority = Authority::new();
    let app = App::tcp(Script::new().echo()).await;
    let mut haproxy = Haproxy::start(&app, &authority.app(&["edge-1"])).await;
    let mut build = World::build()
        .listener(raw("bytes", 22))
        .listener(raw("http", 80))
        .listener(anonymous("web", ListenerProtocol::Http))
        .config(|config| drop(config.upstream_tls.insert(443, any_certificate())));
    let ipv6 = raw_ipv6("ipv6", 80);
    let has_ipv6 = ipv6.is_some();
    if let Some(listener) = ipv6 {
        build = build.listener(listener);
    }
    let world = build.start().await;
    let plan = world
        .edge("edge-1")
        .port_as(22, Protocol::Tcp, haproxy.bytes)
        .port_as(80, Protocol::Tcp, haproxy.http)
        .port_as(443, Protocol::Tcp, haproxy.https);
    let plan = plan.config(|config| {
        let ports = config.ports.values_mut();
        ports.for_each(|port| port.proxy_protocol = true);
    });
    let _edge = plan.join().await;

    let mut session = dial(world.listener("bytes"), ELSEWHERE).await;
    session.write_all(b"hello").await.unwrap();
    assert_eq!(read(&mut session, 5).await, b"hello");
    let client = session.local_addr().unwrap();
    drop(session);
    // HAProxy also writes messages of its own.
    let logged = format!("client {client}");
    while haproxy.process.line().await != logged {}

    let mut from = vec![("http", IpAddr::from(ELSEWHERE))];
    if has_ipv6 {
        from.push(("ipv6", IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1])));
    }
    for (listener, ip) in from {
        let mut session = dial(world.listener(listener), ip).await;
        let client = session.local_addr().unwrap();
        session.write_all(GET).await.unwrap();
        let answer = String::from_utf8(read_to_end(&mut session).await.unwrap()).unwrap();
        let expected = format!("\r\n\r\n{ip}:{}", client.port());
        assert!(answer.ends_with(&expected), "{expected:?} in {answer:?}");
    }

    // Several clients share this connection, so its header names none, and HAProxy shows the edge's own address.
    let client = world.client_at("web").nobody().from("127.0.0.3");
    let answer = client.get("http://edge-1:443/").await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(answer.text().starts_with("127.0.0.1:"), "{}", answer.text());
}
