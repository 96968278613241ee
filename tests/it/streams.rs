//! Upgrades, gRPC, and how streams end: a reset stays a reset, a clean end stays clean, both at once.

use crate::{
    testbed::{TestBed, URL},
    world::{
        app::{App, End, PauseGate, Script, answer, answer::pattern},
        client::{Body, Wire, exchange, read, read_to_end, whole},
        tool::{Running, Tool, need},
        transfer::TransferServer,
        until,
    },
};
use causeway_certs::ListenerName;
use causeway_edge::config::{Port, Protocol};
use futures_util::{StreamExt, future, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::{
    Request,
    body::{Bytes, Frame},
};
use serde_json::Value;
use socket2::SockRef;
use std::{
    io,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
};

const GET: &str = "GET / HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
const SPDY: &str = "POST /exec HTTP/1.1\r\nHost: edge-1:9100\r\nContent-Length: 0\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";

#[tokio::test]
async fn websockets_pass_with_messages_of_all_sizes_and_subprotocol() {
    need!("python:websockets");
    let subprotocol = ["--subprotocol", "v5.channel.k8s.io"];
    let (mut app, testbed) = python("ws_server.py", &subprotocol).await;
    let client = testbed.python("ws_client.py");
    let verdict = client.args(subprotocol).run().await.json();
    assert_eq!(verdict["ok"], true, "{verdict}");
    assert_eq!(verdict["subprotocol"], "v5.channel.k8s.io");
    assert_eq!(event(&mut app, "closed").await["code"], 1000);
}

#[tokio::test]
async fn a_websockets_close_code_reaches_its_client() {
    need!("python:websockets");
    let (mut app, testbed) = python("ws_server.py", &[]).await;
    let client = testbed
        .python("ws_client.py")
        .args(["--path", "/close/4001"]);
    let verdict = client.run().await.json();
    let error = verdict["error"].as_str().unwrap();
    assert!(
        error.contains("4001") && error.contains("as you wish"),
        "{error}"
    );
    assert_eq!(event(&mut app, "closed").await["code"], 4001);
}

/// Checks a session that has received less than half of the old window, for which no credit was sent, and more than all of
/// the new window.
#[tokio::test]
async fn a_session_idle_during_a_window_shrink_continues_afterwards() {
    let app = App::tcp(Script::new().echo()).await;
    let testbed = TestBed::to_as(Protocol::Tcp, app.address()).await;
    let mut rests = testbed.connect("edge-1:9100").await;
    let half = pattern(700 << 10);
    let (mut reading, mut writing) = tokio::io::split(&mut rests);
    let (echoed, written) = tokio::join!(read(&mut reading, half.len()), writing.write_all(&half));
    written.unwrap();
    assert!(echoed == half);
    let mut crowd = Vec::new();
    for _ in 0..80 {
        let mut wire = testbed.connect("edge-1:9100").await;
        wire.write_all(b"here").await.unwrap();
        assert_eq!(read(&mut wire, 4).await, b"here");
        crowd.push(wire);
    }
    rests.write_all(b"again").await.unwrap();
    assert_eq!(read(&mut rests, 5).await, b"again");
}

#[tokio::test]
async fn a_refused_upgrade_comes_back_whole() {
    need!("python:websockets");
    let app = App::http(|_| answer::refuse_upgrade("403 Forbidden", "not you")).await;
    let testbed = TestBed::to(&app).await;
    let verdict = testbed.python("ws_client.py").run().await.json();
    assert_eq!(verdict["status"], 403, "{verdict}");
    assert_eq!(verdict["body"], "not you", "{verdict}");
    let fields = verdict["fields"].as_array().unwrap();
    let refused_by = fields.iter().find(|field| field[0] == "X-Refused-By");
    assert_eq!(refused_by.unwrap()[1], "the app", "{verdict}");
}

#[tokio::test]
async fn bytes_in_the_segment_of_a_101_arrive_unchanged_both_ways() {
    let first = pattern(3_000);
    let script = first.clone();
    let app = App::http(move |_| answer::switch("SPDY/3.1", &script)).await;
    let testbed = TestBed::to(&app).await;
    let mut wire = testbed.tls().await;
    let head = exchange(&mut wire, SPDY).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert!(head.contains("\r\nUpgrade: SPDY/3.1\r\n"), "{head}");
    assert_eq!(read(&mut wire, first.len()).await, first);
    let bytes = pattern(1 << 20);
    let (mut reader, mut writer) = tokio::io::split(&mut wire);
    let (sent, echoed) = tokio::join!(writer.write_all(&bytes), read(&mut reader, bytes.len()));
    sent.unwrap();
    assert!(echoed == bytes);
    wire.shutdown().await.unwrap();
    assert_eq!(read_to_end(&mut wire).await.unwrap(), b"");
    assert_eq!(app.end().await, End::Finished);
}

/// Bytes that a client sends with its request belong to the new protocol as well.
#[tokio::test]
async fn bytes_in_the_segment_of_an_upgrades_request_reach_the_app() {
    let app = App::http(|_| answer::switch("SPDY/3.1", b"")).await;
    let testbed = TestBed::to(&app).await;
    let mut wire = testbed.tls().await;
    let head = exchange(&mut wire, format!("{SPDY}early")).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert_eq!(read(&mut wire, 5).await, b"early");
}

#[tokio::test]
async fn grpc_passes_in_all_kinds_of_call_to_an_app_without_tls() {
    need!("python:grpc");
    let (app, testbed) = python_as(Protocol::H2c, "grpc_server.py").await;
    grpc(app, &testbed).await;
}

#[tokio::test]
async fn grpc_passes_in_all_kinds_of_call_to_an_app_with_tls() {
    need!("python:grpc");
    let build = TestBed::build();
    let folder = build.folder().to_owned();
    let world = build.start().await;
    let name = ListenerName::parse("app.test").unwrap();
    let leaf = world.ca().issue_listener(&[name], Duration::from_mins(10));
    let leaf = leaf.unwrap();
    let files = [
        world.write(&leaf.chain_pem()),
        world.write(leaf.key_pem().expose()),
    ];
    let mut app = Tool::python("grpc_server.py").args(files).start();
    let port = Port {
        target: Some(format!("127.0.0.1:{}", listening(&mut app).await)),
        scheme: Protocol::Https,
        ca: Some(folder.join("gateway/ca.pem")),
        server_name: Some("app.test".into()),
        ..Port::default()
    };
    let plan = world.edge("edge-1").config(|config| {
        config.ports.insert(9100, port);
    });
    let edge = plan.join().await;
    grpc(app, &TestBed::of(world, edge)).await;
}

async fn grpc(mut app: Running, testbed: &TestBed) {
    let verdict = testbed.python("grpc_client.py").run().await.json();
    assert_eq!(verdict["ok"], true, "{verdict:#}");
    // One by the client's deadline, one by its cancel.
    for _ in 0..2 {
        let cancelled = event(&mut app, "cancelled").await;
        assert_eq!(cancelled["method"], "Hang");
    }
    testbed.until_idle().await;
}

#[tokio::test]
async fn an_http_2_apps_reset_and_trailers_reach_an_http_2_client() {
    need!("python:h2");
    let (mut app, testbed) = python_as(Protocol::H2c, "h2c_server.py").await;
    let client = testbed.http2();
    let answer = client.get("https://edge-1:9100/trailers").await;
    assert_eq!(answer.trailers.unwrap()["x-last"], "after");
    let request = Request::get("https://edge-1:9100/reset")
        .body(whole(""))
        .unwrap();
    let error = client.try_send(request).await.err().unwrap();
    assert!(causes(error.as_ref()).contains("stream error"), "{error:?}");
    // The app had one connection, which still works.
    assert_eq!(client.ask("POST", URL, "again").await.text(), "again");
    event(&mut app, "opened").await;
}

#[tokio::test]
async fn a_leaving_client_ends_a_request_without_an_answer() {
    let app = App::http(|_| answer::silence()).await;
    let testbed = TestBed::to(&app).await;
    for reset in [false, true] {
        let mut wire = testbed.tls().await;
        wire.write_all(GET.as_bytes()).await.unwrap();
        app.head().await;
        leave(wire, reset);
        app.end().await;
    }
    testbed.until_idle().await;
}

#[tokio::test]
async fn a_client_that_goes_away_ends_an_answer_that_flows_or_rests() {
    let gate = PauseGate::new();
    let script = gate.clone();
    let app = App::http(move |head| match head.path().as_str() {
        "/flows" => answer::endless(),
        _ => answer::parts("text/plain", &["first", "never"], &script),
    })
    .await;
    let testbed = TestBed::to(&app).await;
    for (path, reset) in [
        ("flows", false),
        ("rests", false),
        ("flows", true),
        ("rests", true),
    ] {
        let mut wire = testbed.tls().await;
        if path == "rests" {
            gate.open();
        }
        let head = format!("GET /{path} HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n");
        exchange(&mut wire, head).await;
        read(&mut wire, 5).await;
        leave(wire, reset);
        app.end().await;
        testbed.until_idle().await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_during_an_upload_resets_the_request() {
    let app = App::http(|_| Script::new().body()).await;
    let testbed = TestBed::to(&app).await;
    for framing in ["Content-Length: 1000", "Transfer-Encoding: chunked"] {
        for reset in [false, true] {
            let mut wire = testbed.tls().await;
            let head =
                format!("POST / HTTP/1.1\r\nHost: edge-1:9100\r\n{framing}\r\n\r\n5\r\nhello\r\n");
            wire.write_all(head.as_bytes()).await.unwrap();
            app.head().await;
            leave(wire, reset);
            assert_eq!(app.end().await, End::Reset, "{framing}");
        }
    }
}

/// Bytes behind a request, which HTTP reads only after the response, hide no end of the connection.
#[tokio::test]
async fn a_client_that_leaves_behind_unread_bytes_ends_its_request() {
    let app = App::http(|_| answer::silence()).await;
    let testbed = TestBed::to(&app).await;
    let mut closed = Vec::new();
    for unread in ["\r\n", GET] {
        let bytes = format!("{GET}{unread}");
        for tls in [true, false] {
            // The gateway's session tickets are unread, so a dropped connection with TLS would be reset.
            let mut wire = wire(&testbed, tls).await;
            wire.write_all(bytes.as_bytes()).await.unwrap();
            app.head().await;
            wire.shutdown().await.unwrap();
            closed.push(wire);
        }
        let mut dropped = testbed.tcp("plain").await;
        dropped.write_all(bytes.as_bytes()).await.unwrap();
        app.head().await;
    }
    for _ in 0..6 {
        assert_eq!(app.end().await, End::Reset);
    }
    testbed.until_idle().await;
}

/// The end comes behind bytes that the gateway reads only when the app reads.
#[tokio::test]
async fn an_upload_that_ends_early_behind_unread_bytes_is_a_reset_at_the_upstream() {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4 << 10).unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let listener = socket.listen(8).unwrap();
    let testbed = TestBed::to_as(Protocol::Http, listener.local_addr().unwrap()).await;
    let chunked = "Transfer-Encoding: chunked\r\n\r\n3fffffff";
    for framing in ["Content-Length: 1000000000\r\n", chunked] {
        for stays in [true, false] {
            let mut wire = testbed.tcp("plain").await;
            let head = format!("POST / HTTP/1.1\r\nHost: edge-1:9100\r\n{framing}\r\n");
            wire.write_all(head.as_bytes()).await.unwrap();
            let mut app = listener.accept().await.unwrap().0;
            let chunk = vec![b'x'; 64 << 10];
            let sending = async {
                loop {
                    wire.write_all(&chunk).await.unwrap();
                }
            };
            tokio::select! {
                () = sending => {}
                () = until_still(&testbed) => {}
            }
            wire.shutdown().await.unwrap();
            let client = stays.then_some(wire);
            let ended = read_to_end(&mut app).await;
            assert!(is_reset(&ended), "{framing} {stays}");
            drop(client);
        }
    }
    testbed.until_idle().await;
}

/// The client's bytes wait at an app that does not read: these bytes must not hide the reset.
#[tokio::test]
async fn an_upstream_that_reads_no_bytes_notices_a_leaving_client() {
    let listener = TcpSocket::new_v4().unwrap();
    listener.set_recv_buffer_size(4 << 10).unwrap();
    listener.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let listener = listener.listen(8).unwrap();
    let testbed = TestBed::to_as(Protocol::Http, listener.local_addr().unwrap()).await;
    // Less than a tunnel's window, more than the edge's socket buffers.
    let mut session = testbed.connect("edge-1:9100").await;
    let app = listener.accept().await.unwrap().0;
    session.write_all(&vec![0; 3 << 20]).await.unwrap();
    session.flush().await.unwrap();
    until_still(&testbed).await;
    leave(session, true);
    until_gone(&app).await;

    // As much as the path buffers: the gateway waits for the tunnel.
    let mut connection = testbed.http2().connect("edge-1").await.unwrap();
    let endless = stream::repeat_with(|| Ok(Frame::data(Bytes::from(vec![0; 1 << 16]))));
    let request = Request::post(URL).body(BodyExt::boxed(StreamBody::new(endless)));
    let accepted = async {
        let app = listener.accept().await.unwrap().0;
        until_still(&testbed).await;
        app
    };
    let app = tokio::select! {
        answer = connection.open(request.unwrap()) => panic!("{answer:?}"),
        app = accepted => app,
    };
    until_gone(&app).await;
    testbed.until_idle().await;
}

#[tokio::test]
async fn an_http2_client_reset_ends_only_its_upstream_request() {
    let app = App::http(|head| match head.path().as_str() {
        "/silence" => answer::silence(),
        _ => answer::ok("still here"),
    })
    .await;
    let testbed = TestBed::to(&app).await;
    let mut connection = testbed.http2().connect("edge-1").await.unwrap();
    let request = Request::get("https://edge-1:9100/silence")
        .body(whole(""))
        .unwrap();
    tokio::select! {
        answer = connection.open(request) => panic!("{answer:?}"),
        _ = app.head() => {}
    }
    app.end().await;
    assert_eq!(connection.get(URL).await.unwrap().text(), "still here");
}

#[tokio::test]
async fn a_session_reset_or_end_by_the_client_reaches_the_upstream() {
    let app = App::tcp(Script::new().echo()).await;
    let testbed = TestBed::to_as(Protocol::Tcp, app.address()).await;
    for (reset, end) in [(true, End::Reset), (false, End::Finished)] {
        let mut tcp = testbed.tcp("bytes").await;
        tcp.write_all(b"hello").await.unwrap();
        read(&mut tcp, 5).await;
        arm(&tcp, reset);
        drop(tcp);
        assert_eq!(app.end().await, end, "tcp");
        let mut connect = testbed.connect("edge-1:9100").await;
        connect.write_all(b"hello").await.unwrap();
        read(&mut connect, 5).await;
        leave(connect, reset);
        assert_eq!(app.end().await, end, "connect");
    }
    testbed.until_idle().await;
}

#[tokio::test]
async fn an_upgrade_reset_or_end_by_the_client_reaches_the_upstream() {
    let app = App::http(|_| answer::switch("SPDY/3.1", b"hello")).await;
    let testbed = TestBed::to(&app).await;
    for (reset, end) in [(true, End::Reset), (false, End::Finished)] {
        let mut wire = testbed.tls().await;
        exchange(&mut wire, SPDY).await;
        read(&mut wire, 5).await;
        leave(wire, reset);
        assert_eq!(app.end().await, end);
    }
    testbed.until_idle().await;
}

#[tokio::test]
async fn an_answer_aborted_by_the_upstream_ends_with_a_reset() {
    for (kind, framing) in [
        ("by length", "Content-Length: 1000\r\n\r\nhello"),
        (
            "chunked",
            "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        ),
        ("by close", "Connection: close\r\n\r\nhello"),
    ] {
        let gate = PauseGate::new();
        let script = Script::new().write(format!("HTTP/1.1 200 OK\r\n{framing}"));
        let script = script.until(&gate).reset();
        let app = App::http(move |_| script.clone()).await;
        let testbed = TestBed::to(&app).await;
        for version in ["1.1", "1.0"] {
            for tls in [true, false] {
                let mut wire = wire(&testbed, tls).await;
                let head = format!("GET / HTTP/{version}\r\nHost: edge-1:9100\r\n\r\n");
                exchange(&mut wire, head).await;
                until_read(&mut wire, b"hello").await;
                gate.open();
                let ended = read_to_end(&mut wire).await;
                assert!(
                    is_reset(&ended),
                    "{kind}, HTTP/{version}, tls {tls}: {ended:?}"
                );
            }
        }
        let mut connection = testbed.http2().connect("edge-1").await.unwrap();
        let request = Request::get(URL).body(whole("")).unwrap();
        let mut body = connection.open(request).await.unwrap().into_body();
        let first = body.frame().await.unwrap().unwrap();
        assert_eq!(first.into_data().unwrap(), "hello", "{kind}");
        gate.open();
        let error = body.frame().await.unwrap().unwrap_err();
        assert!(
            causes(&error).contains("stream error received"),
            "{kind}: {error:?}"
        );
    }
}

/// Without a reset of its own: the kernel closes the sockets of a dying app in order.
#[tokio::test]
async fn an_answer_that_falls_short_of_its_length_ends_with_a_reset() {
    let app = App::http(|_| answer::close_in_mid_body()).await;
    let testbed = TestBed::to(&app).await;
    let mut wire = testbed.tls().await;
    let head = exchange(&mut wire, GET).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    until_read(&mut wire, b"cut short").await;
    let ended = read_to_end(&mut wire).await;
    assert!(is_reset(&ended), "{ended:?}");
}

#[tokio::test]
async fn a_clean_end_stays_clean() {
    let app = App::http(|_| answer::until_close("all of it")).await;
    let testbed = TestBed::to(&app).await;
    for tls in [true, false] {
        let mut wire = wire(&testbed, tls).await;
        exchange(&mut wire, "GET / HTTP/1.0\r\nHost: edge-1:9100\r\n\r\n").await;
        assert_eq!(read_to_end(&mut wire).await.unwrap(), b"all of it");
    }
    assert_eq!(testbed.client().get(URL).await.text(), "all of it");
    assert_eq!(testbed.http2().get(URL).await.text(), "all of it");
    let app = App::tcp(Script::new().write("all of it").read_to_end()).await;
    let testbed = TestBed::to_as(Protocol::Tcp, app.address()).await;
    let mut tcp = testbed.tcp("bytes").await;
    let mut connect = testbed.connect("edge-1:9100").await;
    for mut wire in [&mut tcp as &mut dyn Wire, &mut connect] {
        wire.shutdown().await.unwrap();
        assert_eq!(read_to_end(&mut wire).await.unwrap(), b"all of it");
    }
}

#[tokio::test]
async fn a_session_that_the_app_resets_ends_with_a_reset() {
    let gate = PauseGate::new();
    let app = App::tcp(Script::new().write("hello").until(&gate).reset()).await;
    let testbed = TestBed::to_as(Protocol::Tcp, app.address()).await;
    for connects in [false, true] {
        let mut wire = testbed.session(connects).await;
        assert_eq!(read(&mut wire, 5).await, b"hello");
        gate.open();
        let ended = read_to_end(&mut wire).await;
        assert!(is_reset(&ended), "connect {connects}: {ended:?}");
    }
}

#[tokio::test]
async fn an_upgrade_that_the_app_resets_ends_with_a_reset() {
    let gate = PauseGate::new();
    let head =
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\nhello";
    let script = Script::new().write(head).until(&gate).reset();
    let app = App::http(move |_| script.clone()).await;
    let testbed = TestBed::to(&app).await;
    for tls in [true, false] {
        let mut wire = wire(&testbed, tls).await;
        exchange(&mut wire, SPDY).await;
        assert_eq!(read(&mut wire, 5).await, b"hello");
        gate.open();
        let ended = read_to_end(&mut wire).await;
        assert!(is_reset(&ended), "tls {tls}: {ended:?}");
    }
}

#[tokio::test]
async fn an_answer_that_comes_before_the_body_was_read_passes_at_once() {
    let app = App::http(|_| answer::before_the_body()).await;
    let testbed = TestBed::to(&app).await;
    let mut wire = testbed.tls().await;
    let head =
        "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nContent-Length: 1000000000\r\n\r\nthe first";
    let answer = exchange(&mut wire, head).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    until_read(&mut wire, b"too much").await;
    let mut connection = testbed.http2().connect("edge-1").await.unwrap();
    let request = Request::post(URL).body(unfinished("the first")).unwrap();
    let answer = connection.open(request).await.unwrap();
    assert_eq!(answer.status(), 413);
    let body = answer.into_body().collect().await.unwrap();
    assert_eq!(body.to_bytes(), "too much");
}

#[tokio::test]
async fn an_early_hint_does_not_take_the_answers_place() {
    let app = App::http(|_| answer::after_hints("the answer")).await;
    let testbed = TestBed::to(&app).await;
    for client in [testbed.client(), testbed.http2()] {
        let answer = client.get(URL).await;
        assert_eq!((answer.status, answer.text().as_str()), (200, "the answer"));
    }
}

#[tokio::test]
async fn small_chunks_arrive_whole() {
    let app = App::http(|_| answer::small_chunks(1 << 20)).await;
    let testbed = TestBed::to(&app).await;
    for client in [testbed.client(), testbed.http2()] {
        assert!(client.get(URL).await.body == pattern(1 << 20));
    }
}

/// The upstream reads nothing, and ends its half when the client cannot send any more.
#[tokio::test]
async fn the_end_of_an_upstreams_half_loses_no_byte_of_the_client() {
    /// More than all windows and buffers.
    const LENGTH: usize = 64 << 20;
    for connects in [true, false] {
        let upstream = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let testbed = TestBed::to_as(Protocol::Tcp, upstream.local_addr().unwrap()).await;
        let session = testbed.session(connects).await;
        let (mut upstream, _) = upstream.accept().await.unwrap();
        let (mut read, mut write) = tokio::io::split(session);
        let sent = AtomicUsize::new(0);
        let sending = async {
            let chunk = vec![7; 64 << 10];
            while sent.load(Relaxed) < LENGTH {
                write.write_all(&chunk).await.unwrap();
                sent.fetch_add(chunk.len(), Relaxed);
            }
            write.shutdown().await.unwrap();
        };
        let receiving = async {
            let mut looks = vec![0];
            until("the client cannot send any more", async || {
                looks.push(sent.load(Relaxed));
                looks.ends_with(&[sent.load(Relaxed); 20])
            })
            .await;
            upstream.shutdown().await.unwrap();
            assert_eq!(read_to_end(&mut read).await.unwrap(), b"");
            read_to_end(&mut upstream).await.unwrap().len()
        };
        let ((), received) = tokio::join!(sending, receiving);
        assert_eq!(received, LENGTH, "connects: {connects}");
    }
}

/// Exchanges bytes that look like HTTP with an upstream that returns them.
async fn exchange_http_like_bytes(mut session: impl AsyncRead + AsyncWrite + Unpin) {
    let long_line = format!("PUT {} HTTP/1.5\r\n\r\n", "x".repeat(200_000));
    let response = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
    let preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    for text in [&long_line, response, response, preface] {
        session.write_all(text.as_bytes()).await.unwrap();
        let returned = read(&mut session, text.len()).await;
        let returned = String::from_utf8(returned).unwrap();
        assert!(returned == text, "{returned:.100}");
    }
}

#[tokio::test]
async fn sessions_pass_bytes_that_look_like_http_unchanged() {
    let app = App::tcp(Script::new().echo()).await;
    let testbed = TestBed::to_as(Protocol::Tcp, app.address()).await;
    for connects in [true, false] {
        exchange_http_like_bytes(testbed.session(connects).await).await;
    }
    let app = App::http(|_| answer::switch("SPDY/3.1", b"")).await;
    let testbed = TestBed::to(&app).await;
    let mut wire = testbed.tls().await;
    let head = exchange(&mut wire, SPDY).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    exchange_http_like_bytes(wire).await;
}

#[tokio::test]
async fn a_tcp_listener_moves_a_large_transfer_each_way() {
    let server = TransferServer::start().await;
    let testbed = TestBed::to_as(Protocol::Tcp, server.address).await;
    server.transfer(testbed.tcp("bytes").await).await;
    testbed.until_idle().await;
}

/// Starts an app of `clients`, with a gateway and an edge.
async fn python(script: &str, arguments: &[&str]) -> (Running, TestBed) {
    let mut app = Tool::python(script).args(arguments).start();
    let port = listening(&mut app).await;
    (
        app,
        Box::pin(TestBed::to_as(
            Protocol::Http,
            ([127, 0, 0, 1], port).into(),
        ))
        .await,
    )
}

async fn python_as(scheme: Protocol, script: &str) -> (Running, TestBed) {
    let mut app = Tool::python(script).start();
    let port = listening(&mut app).await;
    (
        app,
        Box::pin(TestBed::to_as(scheme, ([127, 0, 0, 1], port).into())).await,
    )
}

async fn listening(app: &mut Running) -> u16 {
    let port = event(app, "listening").await["port"].as_u64();
    port.unwrap().try_into().unwrap()
}

/// Returns the app's next event of this name.
async fn event(app: &mut Running, name: &str) -> Value {
    loop {
        let event = app.json().await;
        if event["event"] == name {
            return event;
        }
    }
}

/// An endless body that sends only this.
fn unfinished(first: &'static str) -> Body {
    let first = stream::once(future::ready(Ok(Frame::data(Bytes::from(first)))));
    BodyExt::boxed(StreamBody::new(first.chain(stream::pending())))
}

async fn wire(testbed: &TestBed, tls: bool) -> Box<dyn Wire> {
    if tls {
        Box::new(testbed.tls().await)
    } else {
        Box::new(testbed.tcp("plain").await)
    }
}

/// Drops a connection, with a reset or as for a killed process: a FIN, no `close_notify`.
fn leave(wire: tokio_rustls::client::TlsStream<TcpStream>, reset: bool) {
    arm(wire.get_ref().0, reset);
    drop(wire);
}

fn arm(tcp: &TcpStream, reset: bool) {
    if reset {
        SockRef::from(tcp).set_linger(Some(Duration::ZERO)).unwrap();
    }
}

/// Reads up to and with these bytes.
async fn until_read(wire: &mut (impl Wire + ?Sized), end: &[u8]) {
    let mut wire = wire;
    let mut all = Vec::new();
    while !all.ends_with(end) {
        all.extend(read(&mut wire, 1).await);
    }
}

fn is_reset(ended: &io::Result<Vec<u8>>) -> bool {
    matches!(ended, Err(error) if error.kind() == io::ErrorKind::ConnectionReset)
}

/// Waits until the tunnels have carried bytes to the node, and then carry none for a while.
async fn until_still(testbed: &TestBed) {
    let mut last = (0, Instant::now());
    until("the tunnels carry no bytes", async || {
        let up = testbed.node("edge-1").await["bytes_up"].as_u64().unwrap();
        if up != last.0 {
            last = (up, Instant::now());
        }
        up > 0 && last.1.elapsed() > Duration::from_millis(300)
    })
    .await;
}

/// Waits for the reset, without a read.
async fn until_gone(app: &TcpStream) {
    until("the app's socket has an error", async || {
        app.take_error().unwrap().is_some()
    })
    .await;
}

/// Formats an error with all its causes.
fn causes(error: &dyn std::error::Error) -> String {
    let all = std::iter::successors(Some(error), |error| error.source());
    let all: Vec<_> = all.map(ToString::to_string).collect();
    all.join(": ")
}
