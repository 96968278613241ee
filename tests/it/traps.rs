//! The invariants of ARCHITECTURE.md that need the whole product: each has a test with its number.
//!
//! | trap | here | and nearer to its cause |
//! | --- | --- | --- |
//! | 1 small chunks end h2's connection | `trap_1_…` | `tunnel::client`, `edge::proxy`: `trap_1_…` |
//! | 2 clients that hang up end it | `trap_2_…` | `tunnel::client`: `trap_2_…` |
//! | 3 an abort reads as an end | `trap_3_…`, more in `streams` | `tunnel::client`: `trap_3_…` |
//! | 4 a refused port looks like success | `trap_4_…`; bytes held back: `faces::an_egress_selector_…` | `edge::proxy::a_refused_port_…` |
//! | 5 heads between HTTP/1.1 and HTTP/2 | `trap_5_…`, more in `faces` | `tunnel::headers` |
//! | 6 no `close_notify` | `trap_6_…` | |
//! | 7 small requests behind bulk | `trap_7_…` | `gateway::state::registry`, `tunnel::load` |
//! | 8 a ClientHello in pieces, a kubelet without ALPN | `trap_8_…` (two) | |
//! | 9 bytes behind a 101, like-named fields | `trap_9_…` | `edge::proxy::an_upgrade_keeps_…` |
//! | 10 resumed sessions | `trap_10_…` | `certs::verify`: `trap_10_…`, `a_session_made_without_…` |
//! | 11 two ends that wait for each other | | `tunnel::client`: `trap_11_…`: its rates are 100 times the real ones |
//! | 12 contents of a CSR | | `certs::ca`: `trap_12_…` |
//! | 13 input that the parser accepts | `trap_13_…` | `gateway::proxy::request` |
//! | 14 one crypto provider | `trap_14_…` | `certs::verify`: `trap_14_…`; `deny.toml` |

use crate::{
    faces::{EXEC_SPDY, crlf, kubelet, tls, values},
    testbed::{TestBed, URL},
    world::{
        GATEWAY_NAME, World,
        app::{App, PauseGate, Script, answer, answer::pattern},
        client::{Connection, Wire, exchange, read, read_head, read_to_end},
        tool::full,
        until,
    },
};
use causeway_certs::ListenerName;
use causeway_edge::config::{Port, Protocol};
use causeway_tunnel::load::BULK_SPAN;
use rustls::{
    ClientConfig, HandshakeKind, RootCertStore, ServerConfig,
    pki_types::{PrivateKeyDer, ServerName, pem::PemObject},
};
use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, client::TlsStream};

const GET: &str = "GET / HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
const HTTP11: &[u8] = b"http/1.1";

#[tokio::test]
async fn trap_1_an_answer_in_64_byte_chunks_keeps_the_tunnel() {
    // h2 alone gives up after 2.2 MB of them.
    let total = if full() { 100_000_000 } else { 8_000_000 };
    let app = App::http(move |_| answer::small_chunks(total)).await;
    let testbed = TestBed::to(&app).await;
    let before = testbed.tunnels().await;
    let answer = testbed.client().get(URL).await;
    assert!(
        answer.body == pattern(total),
        "{} bytes came",
        answer.body.len()
    );
    // A second one was dialled for bulk; the first still exists.
    assert!(testbed.tunnels().await.starts_with(&before));
}

#[tokio::test]
async fn trap_2_clients_that_hang_up_repeatedly_affect_no_others() {
    let gate = PauseGate::new();
    let script = gate.clone();
    let app = App::http(move |head| match head.path().as_str() {
        "/stays" => answer::parts("text/plain", &["first", "last"], &script),
        _ => answer::silence(),
    })
    .await;
    let testbed = TestBed::to(&app).await;
    let before = testbed.tunnels().await;
    let mut stays = testbed.tls().await;
    let stays_head = GET.replace("/ ", "/stays ");
    gate.open();
    exchange(&mut stays, stays_head).await;
    assert_eq!(read(&mut stays, 10).await, b"5\r\nfirst\r\n");
    assert_eq!(app.head().await.path(), "/stays");

    // More than h2's limits of 20 pending and 1,024 in the tunnel's lifetime.
    for _ in 0..5 {
        let mut hanging = Vec::new();
        for _ in 0..256 {
            let mut wire = testbed.tcp("plain").await;
            wire.write_all(GET.as_bytes()).await.unwrap();
            hanging.push(wire);
        }
        for _ in 0..256 {
            app.head().await;
        }
        drop(hanging);
    }
    until("the others have left", async || {
        testbed.metrics().await.sum("open_streams", &[]) == 1
    })
    .await;
    gate.open();
    gate.open();
    assert_eq!(read(&mut stays, 14).await, b"4\r\nlast\r\n0\r\n\r\n");
    assert_eq!(testbed.tunnels().await, before);
}

#[tokio::test]
async fn trap_3_an_aborting_upstream_is_a_reset_on_every_listener() {
    let gate = PauseGate::new();
    let script = Script::new().write("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello");
    let script = script.until(&gate).reset();
    let app = App::tcp(script).await;
    let testbed = TestBed::to(&app).await;
    for listener in ["https", "plain", "bytes", "connect"] {
        let mut wire: Box<dyn Wire> = match listener {
            "https" => Box::new(testbed.tls().await),
            "connect" => Box::new(testbed.connect("edge-1:9100").await),
            bare => Box::new(testbed.tcp(bare).await),
        };
        // HTTP/1.0: the answer ends with its connection, so that only a reset distinguishes a break from an end.
        let head = exchange(&mut wire, "GET / HTTP/1.0\r\nHost: edge-1:9100\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1."), "{head}");
        assert_eq!(read(&mut wire, 5).await, b"hello");
        gate.open();
        let ended = read_to_end(&mut wire).await.map_err(|error| error.kind());
        assert_eq!(ended, Err(io::ErrorKind::ConnectionReset), "{listener}");
    }
}

#[tokio::test]
async fn trap_4_a_refused_port_is_never_a_200() {
    let app = App::refusing();
    let testbed = TestBed::to_as(Protocol::Tcp, app.address()).await;
    let client = testbed.client_at("connect");
    let mut wire = client.tls_stream(GATEWAY_NAME, &[]).await.unwrap();
    let head = "CONNECT edge-1:9100 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
    let answer = exchange(&mut wire, head).await;
    // kube-apiserver shows only the reason phrase.
    let line = answer.lines().next().unwrap();
    assert!(line.starts_with("HTTP/1.1 502 "), "{answer}");
    assert!(
        line.contains("edge-1") && line.contains(&app.port().to_string()),
        "{line}"
    );
    let mut wire = testbed.tcp("bytes").await;
    let ended = read_to_end(&mut wire).await.map_err(|error| error.kind());
    assert_eq!(ended, Err(io::ErrorKind::ConnectionReset));
}

#[tokio::test]
async fn trap_5_an_upgrade_may_be_a_tunnels_first_stream() {
    let head = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nContent-Length: 0\r\n\r\n";
    let app = App::http(move |_| Script::new().write(head).echo()).await;
    let (world, mut edge) = kubelet(&app).await;
    for _ in 0..5 {
        let mut wire = tls(&world).await;
        let answer = exchange(&mut wire, crlf(EXEC_SPDY)).await;
        assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
        assert!(values(&answer, "content-length").is_empty(), "{answer}");
        assert_eq!(app.head().await.values("content-length"), ["0"]);
        edge.stop().await;
        edge.start().await.unwrap();
        world.until_tunnels("edge-1", 1).await;
    }
}

#[tokio::test]
async fn trap_6_peers_killed_without_close_notify_are_not_logged() {
    let app = App::saying("it").await;
    let mut testbed = TestBed::to(&app).await;
    let mut idle = testbed.tls().await;
    exchange(&mut idle, GET).await;
    // A FIN and nothing before it: tokio-rustls sends close_notify only when it is shut down.
    drop(idle);
    testbed.edge.kill().await;
    testbed.until_tunnels("edge-1", 0).await;
    let logged = testbed.log().text();
    let trouble = logged.lines().filter(|line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        line["level"] == "WARN" || line["level"] == "ERROR"
    });
    assert_eq!(trouble.collect::<Vec<_>>(), Vec::<&str>::new());
}

#[tokio::test]
async fn trap_7_small_requests_do_not_queue_behind_a_download() {
    let app = App::http(|head| match head.path().as_str() {
        "/bulk" => answer::endless(),
        _ => answer::ok("small"),
    })
    .await;
    let testbed = TestBed::to(&app).await;
    let mut bulk = testbed.tls().await;
    exchange(&mut bulk, GET.replace("/ ", "/bulk ")).await;
    let mut reading = JoinSet::new();
    reading.spawn(async move { tokio::io::copy(&mut bulk, &mut tokio::io::sink()).await });
    testbed.until_tunnels("edge-1", 2).await;
    let mut connection = testbed.http2().connect("edge-1").await.unwrap();
    for attempt in 1.. {
        let (before, began) = (opened(&testbed).await, Instant::now());
        let took = small_requests(&mut connection).await;
        let after = opened(&testbed).await;
        // After a pause of the machine no tunnel has moved bulk for a while, and a request may use any.
        if after[0] != before[0] && began.elapsed() > BULK_SPAN && attempt < 10 {
            continue;
        }
        // All parts share this test's thread with the download, in a debug build; in a queue as deep as the window the request
        // would wait for seconds.
        assert!(!full() || took[10] < Duration::from_millis(250), "{took:?}");
        assert_eq!(
            (after[0], after[1] - before[1]),
            (before[0], 21),
            "bulk has its own tunnel"
        );
        break;
    }
}

/// Sends 21 small requests one after the other. Returns their times, the shortest first.
async fn small_requests(connection: &mut Connection) -> Vec<Duration> {
    let mut took = Vec::new();
    for _ in 0..21 {
        let began = Instant::now();
        assert_eq!(connection.get(URL).await.unwrap().text(), "small");
        took.push(began.elapsed());
    }
    took.sort();
    took
}

#[tokio::test]
async fn trap_8_a_client_hello_in_many_pieces_still_names_its_node() {
    let app = App::saying("it").await;
    let (world, _edge) = kubelet(&app).await;
    for fragment in [None, Some(100)] {
        let mut config = config(&world, &[b"a protocol whose name is long".as_slice(); 60]);
        config.alpn_protocols.push(HTTP11.to_vec());
        // Split only in TCP segments, and in TLS records as well.
        config.max_fragment_size = fragment;
        let tcp = ChunkedWriter {
            tcp: world.client().tcp_stream().await,
            rested: false,
            written: 0,
        };
        let name = ServerName::try_from("edge-1").unwrap();
        let connector = TlsConnector::from(Arc::new(config));
        let mut wire = connector.connect(name, tcp).await.unwrap();
        assert!(wire.get_ref().0.written > 1_500);
        // Only the SNI contains the destination.
        let head = "GET / HTTP/1.1\r\nHost: 10.97.0.1:6443\r\n\r\n";
        let answer = exchange(&mut wire, head).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    }
}

#[tokio::test]
async fn trap_8_a_kubelet_without_alpn_is_spoken_to_in_http1() {
    let world = World::start().await;
    let name = ListenerName::parse("kubelet.test").unwrap();
    let leaf = world
        .ca()
        .issue_listener(&[name], Duration::from_mins(10))
        .unwrap();
    let key = PrivateKeyDer::from_pem_slice(leaf.key_pem().expose().as_bytes()).unwrap();
    let config = ServerConfig::builder().with_no_client_auth();
    let config = config.with_single_cert(leaf.chain().to_vec(), key).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = Port {
        target: Some(listener.local_addr().unwrap().to_string()),
        scheme: Protocol::Https,
        ca: Some(world.root_path()),
        server_name: Some("kubelet.test".into()),
        ..Port::default()
    };
    let plan = world.edge("edge-1").config(|config| {
        config.ports.insert(10250, port);
    });
    let _edge = plan.join().await;
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let tcp = listener.accept().await.unwrap().0;
        let mut wire = acceptor.accept(tcp).await.unwrap();
        let mut heads = Vec::new();
        for _ in 0..2 {
            heads.push(read_head(&mut wire).await);
            wire.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nit")
                .await
                .unwrap();
            wire.flush().await.unwrap();
        }
        (wire.get_ref().1.alpn_protocol().map(<[u8]>::to_vec), heads)
    });
    for client in [world.client().http2(), world.client()] {
        assert_eq!(client.get("https://edge-1:10250/pods").await.text(), "it");
    }
    let (alpn, heads) = serving.join_next().await.unwrap().unwrap();
    assert_eq!(alpn, None);
    assert!(
        heads
            .iter()
            .all(|head| head.starts_with("GET /pods HTTP/1.1\r\n")),
        "{heads:?}"
    );
}

#[tokio::test]
async fn trap_9_repeated_fields_keep_order_and_bytes_after_101_pass() {
    let first = pattern(300);
    let script = first.clone();
    let app = App::http(move |_| answer::switch("SPDY/3.1", &script)).await;
    let (world, _edge) = kubelet(&app).await;
    let mut wire = tls(&world).await;
    exchange(&mut wire, crlf(EXEC_SPDY)).await;
    assert_eq!(read(&mut wire, first.len()).await, first);
    let sent = values(&crlf(EXEC_SPDY), "x-stream-protocol-version");
    assert_eq!(sent.len(), 5);
    assert_eq!(app.head().await.values("x-stream-protocol-version"), sent);
}

#[tokio::test]
async fn trap_10_a_session_made_to_join_does_not_resume_as_a_tunnel() {
    let app = App::saying("it").await;
    let testbed = TestBed::to(&app).await;
    let mut config = ClientConfig::builder()
        .with_root_certificates(roots(&testbed))
        .with_no_client_auth();
    config.alpn_protocols = vec![HTTP11.to_vec()];
    let mut joining = to_tunnel(&testbed, &config).await.unwrap();
    // Tickets would arrive after the handshake, before the answer.
    exchange(&mut joining, "GET / HTTP/1.1\r\nHost: gateway\r\n\r\n").await;
    let again = to_tunnel(&testbed, &config).await.unwrap();
    let kind = again.get_ref().1.handshake_kind();
    assert_eq!(kind, Some(HandshakeKind::Full));
    config.alpn_protocols = vec![b"rh2".to_vec()];
    let ended = match to_tunnel(&testbed, &config).await {
        Ok(mut wire) => read_to_end(&mut wire).await,
        Err(error) => Err(error),
    };
    assert!(ended.is_err(), "{ended:?}");
    assert_eq!(testbed.tunnels().await.len(), 1);
}

#[tokio::test]
async fn trap_13_ambiguous_requests_are_refused_or_normalized() {
    let app = App::http(|_| answer::ok("it")).await;
    let testbed = TestBed::to(&app).await;
    let refused = [
        "GET / HTTP/1.1\r\nHost: edge-1:9100\r\nHost: edge-1:9100\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: edge-1:9100\r\nHost: edge-2:9100\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "GET https://edge-2:9100/ HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n",
        "GET https://edge-1:22/ HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: user@edge-1:9100\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
        "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nContent-Length: 2, 3\r\n\r\nabc",
        "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nContent-Length: +2\r\n\r\nab",
        "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nTransfer-Encoding: gzip\r\n\r\nabc",
        "GET / HTTP/1.1\r\nHost : edge-1:9100\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: edge-1:9100\r\n folded: 1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: edge-1:9100\r\nX: a\rb\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: edge-1:9100\r\nX: a\0b\r\n\r\n",
    ];
    for head in refused {
        let mut wire = testbed.tls().await;
        let answer = exchange(&mut wire, head).await;
        assert!(answer.starts_with("HTTP/1.1 400 "), "{head:?}: {answer}");
    }
    assert_eq!(app.requests(), 0);
    // The parser accepts these; the app must get one request, strictly written.
    for (head, body) in [
        ("GET / HTTP/1.1\nHost: edge-1:9100\n\n", ""),
        (
            "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n2\r\nab\r\n0\r\n\r\n",
            "ab",
        ),
        (
            "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
            "ab",
        ),
        (
            "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nab",
            "ab",
        ),
    ] {
        let mut wire = testbed.tls().await;
        let answer = exchange(&mut wire, head).await;
        if answer.starts_with("HTTP/1.1 400 ") {
            continue;
        }
        let seen = app.head().await;
        let text = String::from_utf8(seen.bytes.clone()).unwrap();
        assert_eq!(text.matches('\n').count(), text.matches("\r\n").count());
        let framed = seen.values("content-length").len() + seen.values("transfer-encoding").len();
        assert_eq!(framed, usize::from(!body.is_empty()), "{text}");
        assert_eq!(app.body().await, body.as_bytes(), "{text}");
    }
}

#[test]
fn trap_14_one_crypto_provider_is_in_the_tree() {
    let mut cargo = std::process::Command::new(env!("CARGO"));
    cargo.args([
        "tree",
        "--offline",
        "--workspace",
        "--edges",
        "normal,build",
    ]);
    cargo.args(["--prefix", "none", "--format", "{p}"]);
    let listed = cargo
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(
        listed.status.success(),
        "{}",
        String::from_utf8_lossy(&listed.stderr)
    );
    let listed = String::from_utf8(listed.stdout).unwrap();
    let names: Vec<_> = listed
        .lines()
        .filter_map(|line| line.split(' ').next())
        .collect();
    assert!(names.contains(&"aws-lc-rs"));
    for banned in ["ring", "openssl", "openssl-sys", "native-tls"] {
        assert!(!names.contains(&banned), "{banned}");
    }
}

/// Returns the number of streams of each so far.
async fn opened(testbed: &TestBed) -> Vec<u64> {
    testbed.details("streams_opened").await
}

/// A client's TLS that offers these protocols.
fn config(world: &World, alpn: &[&[u8]]) -> ClientConfig {
    let leaf = world.client_leaf("pieces");
    let key = PrivateKeyDer::from_pem_slice(leaf.key_pem().expose().as_bytes()).unwrap();
    let config = ClientConfig::builder().with_root_certificates(roots(world));
    let mut config = config
        .with_client_auth_cert(leaf.chain().to_vec(), key)
        .unwrap();
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    config
}

fn roots(world: &World) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(world.ca().root().clone()).unwrap();
    roots
}

async fn to_tunnel(testbed: &TestBed, config: &ClientConfig) -> io::Result<TlsStream<TcpStream>> {
    let tcp = TcpStream::connect(testbed.tunnel()).await.unwrap();
    let name = ServerName::from(testbed.tunnel().ip());
    TlsConnector::from(Arc::new(config.clone()))
        .connect(name, tcp)
        .await
}

/// Writes 100 bytes at a time, and lets all readers run before the next.
struct ChunkedWriter {
    tcp: TcpStream,
    rested: bool,
    written: usize,
}

impl AsyncRead for ChunkedWriter {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_read(cx, buf)
    }
}

impl AsyncWrite for ChunkedWriter {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if !std::mem::replace(&mut self.rested, true) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.rested = false;
        let piece = &bytes[..bytes.len().min(100)];
        let written = ready!(Pin::new(&mut self.tcp).poll_write(cx, piece))?;
        self.written += written;
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}
