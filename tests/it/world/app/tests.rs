//! Tests of the apps: each behaves as its name says, seen over a plain socket.

use super::*;
use std::io;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

async fn talk(app: &App, bytes: impl AsRef<[u8]>) -> TcpStream {
    let mut socket = TcpStream::connect(app.address()).await.unwrap();
    socket.write_all(bytes.as_ref()).await.unwrap();
    socket
}

async fn rest(mut socket: TcpStream) -> io::Result<String> {
    let mut text = String::new();
    socket.read_to_string(&mut text).await.map(|_| text)
}

async fn read(socket: &mut TcpStream, length: usize) -> String {
    let mut bytes = vec![0; length];
    socket.read_exact(&mut bytes).await.unwrap();
    String::from_utf8(bytes).unwrap()
}

const GET: &str = "GET /a?b HTTP/1.1\r\nHost: edge-1\r\n\r\n";

/// Returns the bytes that the upstream sends until it closes.
async fn answer_of(script: Script) -> io::Result<String> {
    let app = App::http(move |_| script.clone()).await;
    rest(talk(&app, GET).await).await
}

#[tokio::test]
async fn a_request_is_recorded_exactly_and_connections_are_counted() {
    let app = App::saying("hi").await;
    let put = "PUT /x HTTP/1.1\r\nhost: a\r\nX-N: 2\r\nx-n: 1\r\nTransfer-Encoding: chunked\r\n\r\n\
               3;ext\r\nabc\r\n1\r\nd\r\n0\r\nT: t\r\n\r\n";
    let mut socket = talk(&app, format!("{put}{GET}")).await;
    let said = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi";
    assert_eq!(read(&mut socket, 2 * said.len()).await, said.repeat(2));

    let head = app.head().await;
    assert_eq!(head.line(), "PUT /x HTTP/1.1");
    assert_eq!((head.method(), head.path()), ("PUT".into(), "/x".into()));
    assert_eq!(head.values("X-N"), ["2", "1"]);
    assert_eq!(head.fields()[2], ("x-n".into(), "1".into()));
    assert_eq!(head.value("Host").as_deref(), Some("a"));
    assert_eq!(app.body().await, b"abcd");
    assert_eq!(app.head().await.bytes, GET.as_bytes());
    assert_eq!(app.body().await, b"");
    assert_eq!((app.connections(), app.requests()), (1, 2));

    drop(socket);
    assert_eq!(app.end().await, End::Finished);
}

#[tokio::test]
async fn a_refusing_address_refuses() {
    let app = App::refusing();
    let refused = TcpStream::connect(("127.0.0.1", app.port())).await;
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
}

#[tokio::test]
async fn bad_answers_are_bad() {
    assert_eq!(answer_of(answer::close()).await.unwrap(), "");
    let garbage = answer_of(answer::garbage()).await.unwrap();
    assert!(garbage.contains("not HTTP"));
    let cut = answer_of(answer::close_in_mid_body()).await.unwrap();
    assert!(cut.ends_with("Content-Length: 1000\r\n\r\ncut short"));

    let gate = PauseGate::new();
    let script = answer::reset_in_mid_body(&gate);
    let app = App::http(move |_| script.clone()).await;
    let mut socket = talk(&app, GET).await;
    read(&mut socket, cut.len()).await;
    gate.open();
    let error = rest(socket).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn a_silent_app_sees_its_client_leave() {
    let app = App::http(|_| answer::silence()).await;
    let socket = talk(&app, GET).await;
    app.head().await;
    drop(socket);
    assert_eq!(app.end().await, End::Finished);

    let socket = talk(&app, GET).await;
    app.head().await;
    let linger = socket2::SockRef::from(&socket).set_linger(Some(Duration::ZERO));
    linger.unwrap();
    drop(socket);
    assert_eq!(app.end().await, End::Reset);
}

#[tokio::test]
async fn an_endless_app_sees_its_client_leave() {
    let app = App::http(|_| answer::endless()).await;
    let mut socket = talk(&app, GET).await;
    read(&mut socket, 100_000).await;
    drop(socket);
    assert_eq!(app.end().await, End::Reset);
}

#[tokio::test]
async fn interim_answers_come_before_the_final_one() {
    let app = App::http(|head| match &*head.path() {
        "/continue" => answer::after_continue("done"),
        _ => answer::after_hints("done"),
    });
    let app = app.await;
    let head = "POST /continue HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n";
    let mut socket = talk(&app, head).await;
    assert_eq!(read(&mut socket, 25).await, "HTTP/1.1 100 Continue\r\n\r\n");
    socket.write_all(b"body").await.unwrap();
    let last = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone";
    assert_eq!(read(&mut socket, last.len()).await, last);
    assert_eq!(app.body().await, b"body");

    socket.write_all(GET.as_bytes()).await.unwrap();
    assert_eq!(read(&mut socket, 26).await, "HTTP/1.1 103 Early Hints\r\n");
}

#[tokio::test]
async fn an_answer_may_come_before_the_body() {
    let app = App::http(|_| answer::before_the_body()).await;
    let mut socket = talk(&app, "POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n").await;
    assert!(read(&mut socket, 12).await.ends_with("413"));
}

#[tokio::test]
async fn bodies_are_framed_as_asked() {
    let closed = answer_of(answer::until_close("to the end")).await.unwrap();
    assert!(closed.ends_with("\r\nConnection: close\r\n\r\nto the end"));

    let app = App::http(|head| match &*head.method() {
        "HEAD" => answer::to_head(70),
        "POST" => answer::mirror(),
        _ => answer::small_chunks(70),
    });
    let app = app.await;
    let mut socket = talk(&app, GET).await;
    let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(read(&mut socket, head.len()).await, head);
    let bytes = answer::pattern(70);
    let framed = [
        b"40\r\n",
        &bytes[..64],
        b"\r\n6\r\n",
        &bytes[64..],
        b"\r\n0\r\n\r\n",
    ]
    .concat();
    assert_eq!(read(&mut socket, framed.len()).await.into_bytes(), framed);

    let more = "HEAD / HTTP/1.1\r\n\r\nPOST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc";
    socket.write_all(more.as_bytes()).await.unwrap();
    let lengths = "HTTP/1.1 200 OK\r\nContent-Length: 70\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc";
    assert_eq!(read(&mut socket, lengths.len()).await, lengths);
}

#[tokio::test]
async fn parts_wait_for_the_test() {
    let gate = PauseGate::new();
    let script = answer::parts("text/event-stream", &["data: 1\n\n", "data: 2\n\n"], &gate);
    let app = App::http(move |_| script.clone()).await;
    let mut socket = talk(&app, GET).await;
    let head =
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(read(&mut socket, head.len()).await, head);
    for part in ["9\r\ndata: 1\n\n\r\n", "9\r\ndata: 2\n\n\r\n", "0\r\n\r\n"] {
        gate.open();
        assert_eq!(read(&mut socket, part.len()).await, part);
    }
}

#[tokio::test]
async fn upgrades_switch_with_bytes_behind_or_are_refused() {
    let app = App::http(|head| match head.value("Upgrade") {
        Some(protocol) if protocol == "SPDY/3.1" => answer::switch(&protocol, b"first"),
        _ => answer::refuse_upgrade("403 Forbidden", "not for you"),
    });
    let app = app.await;
    let mut socket = talk(
        &app,
        "POST /exec HTTP/1.1\r\nUpgrade: SPDY/3.1\r\n\r\nearly",
    )
    .await;
    socket.shutdown().await.unwrap();
    let switched = rest(socket).await.unwrap();
    assert!(switched.starts_with("HTTP/1.1 101 "));
    assert!(switched.ends_with("\r\n\r\nfirstearly"));
    assert_eq!(app.end().await, End::Finished);

    let mut socket = talk(&app, "GET / HTTP/1.1\r\nUpgrade: websocket\r\n\r\n").await;
    assert!(read(&mut socket, 22).await.ends_with("403 Forbidden"));
    let other =
        answer_of(answer::status("401 Unauthorized", [("Connection", "close")], "").close());
    assert!(other.await.unwrap().starts_with("HTTP/1.1 401 "));
}

#[tokio::test]
async fn a_tcp_app_speaks_first_and_answers_after_the_half_close() {
    let script = Script::new()
        .write("220 ready\r\n")
        .read_to_end()
        .write("got it");
    let app = App::tcp(script).await;
    let mut socket = talk(&app, "").await;
    assert_eq!(read(&mut socket, 11).await, "220 ready\r\n");
    socket.write_all(b"all of it").await.unwrap();
    socket.shutdown().await.unwrap();
    assert_eq!(rest(socket).await.unwrap(), "got it");
    assert_eq!(app.body().await, b"all of it");
    assert_eq!(app.end().await, End::Finished);
}

#[tokio::test]
async fn a_tcp_app_echoes_and_resets() {
    let app = App::tcp(Script::new().echo()).await;
    let mut socket = talk(&app, "in both directions").await;
    socket.shutdown().await.unwrap();
    assert_eq!(rest(socket).await.unwrap(), "in both directions");

    let app = App::tcp(Script::new().reset()).await;
    let socket = TcpStream::connect(app.address()).await.unwrap();
    let error = rest(socket).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
}
