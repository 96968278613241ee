//! The demo's app: through its routes if that is enough, over real sockets if the connection matters.

use super::*;
use axum::http::Request;
use causeway_rt::task::TaskGroup;
use http_body_util::BodyExt;
use std::net::{Ipv4Addr, SocketAddr};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tower::ServiceExt;

fn router(node: &str) -> Router {
    routes(App {
        node: node.into(),
        stop: CancellationToken::new(),
    })
}

async fn ask(request: Request<Body>) -> (Response<()>, Bytes) {
    let (head, body) = router("edge-1")
        .oneshot(request)
        .await
        .unwrap()
        .into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    (Response::from_parts(head, ()), body)
}

async fn get_path(path: &str) -> (Response<()>, Bytes) {
    ask(Request::get(path).body(Body::empty()).unwrap()).await
}

async fn served() -> (SocketAddr, CancellationToken, TaskGroup) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let server = TaskGroup::default();
    let app = serve(listener, "edge-1".to_owned(), stop.clone());
    server.spawn(tracing::info_span!("app"), app);
    (address, stop, server)
}

async fn send(address: SocketAddr, head: &str) -> TcpStream {
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket.write_all(head.as_bytes()).await.unwrap();
    socket
}

async fn read_until(socket: &mut TcpStream, end: &str) -> String {
    let mut seen = String::new();
    while !seen.contains(end) {
        let mut part = [0; 1024];
        let count = socket.read(&mut part).await.unwrap();
        assert_ne!(count, 0, "ended after {seen:?}");
        seen.push_str(&String::from_utf8_lossy(&part[..count]));
    }
    seen
}

#[tokio::test]
async fn curl_gets_a_line_and_a_browser_a_page() {
    let (_, line) = get_path("/").await;
    assert_eq!(line, "hello from edge-1\n");

    let browser = Request::get("/")
        .header("accept", "text/html,*/*")
        .header("forwarded", "for=\"<script>\"")
        .body(Body::empty())
        .unwrap();
    let (_, page) = ask(browser).await;
    let page = String::from_utf8(page.to_vec()).unwrap();
    assert!(page.contains("<h1>hello from edge-1</h1>"));
    assert!(page.contains("for=\"&lt;script&gt;\""));
    assert!(ROUTES.iter().all(|(path, _)| page.contains(path)));
}

#[tokio::test(start_paused = true)]
async fn a_stream_ticks_each_second_and_ends_when_asked() {
    let begun = Instant::now();
    let (_, lines) = get_path("/stream?ticks=3").await;
    assert_eq!(lines, "edge-1 tick 1\nedge-1 tick 2\nedge-1 tick 3\n");
    assert_eq!(begun.elapsed(), 2 * TICK_INTERVAL);
}

#[tokio::test]
async fn an_upload_is_measured() {
    let request = Request::put("/upload").body(Body::from("abc")).unwrap();
    let (_, answer) = ask(request).await;
    let sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    let expected = format!(r#"{{"bytes":3,"sha256":"{sha256}"}}"#) + "\n";
    assert_eq!(answer, expected);
}

#[tokio::test]
async fn a_download_has_its_length_and_is_the_same_each_time() {
    let (head, long) = get_path("/download?bytes=200003").await;
    assert_eq!(head.headers()["content-length"], "200003");
    assert_eq!(long.len(), 200_003);
    let (_, short) = get_path("/download?bytes=70001").await;
    assert_eq!(short, long[..70_001]);
    let (_, nothing) = get_path("/download?bytes=0").await;
    assert!(nothing.is_empty());
}

#[tokio::test]
async fn a_length_that_is_no_number_is_the_clients_fault() {
    let (head, _) = get_path("/download?bytes=-1").await;
    assert_eq!(head.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_websocket_echoes_text_and_binary() {
    let (address, _stop, _server) = served().await;
    let head = "GET /echo HTTP/1.1\r\nHost: edge-1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    let mut socket = send(address, head).await;
    let answer = read_until(&mut socket, "\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
    for kind in [0x81, 0x82] {
        // RFC 6455, section 5.2: two bytes, masked with zeros.
        let frame = [kind, 0x82, 0, 0, 0, 0, b'h', b'i'];
        socket.write_all(&frame).await.unwrap();
        let mut echo = [0; 4];
        socket.read_exact(&mut echo).await.unwrap();
        assert_eq!(echo, [kind, 2, b'h', b'i']);
    }
}

#[tokio::test]
async fn the_first_tick_is_immediate_and_a_stop_ends_endless_streams() {
    let (address, stop, server) = served().await;
    let mut socket = send(address, "GET /stream HTTP/1.1\r\nHost: edge-1\r\n\r\n").await;
    read_until(&mut socket, "edge-1 tick 1\n").await;
    stop.cancel();
    server.wait_until_idle().await;
    let mut rest = String::new();
    socket.read_to_string(&mut rest).await.unwrap();
    assert!(rest.ends_with("0\r\n\r\n"), "a clean end: {rest:?}");
}

#[tokio::test]
async fn a_stop_closes_idle_connections() {
    let (address, stop, server) = served().await;
    let mut socket = send(address, "GET / HTTP/1.1\r\nHost: edge-1\r\n\r\n").await;
    read_until(&mut socket, "hello from edge-1\n").await;
    stop.cancel();
    server.wait_until_idle().await;
    assert_eq!(socket.read(&mut [0]).await.unwrap(), 0);
}
