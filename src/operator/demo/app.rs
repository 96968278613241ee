//! Small upstream on each node of the demo: a target to reach through the tunnel.
//!
//! The app serves HTTP/1.1 and h2c on one port. It has a hello page, a stream of ticks, a websocket that echoes, an upload
//! that is measured, and a download of any size. It uses plain HTTP on loopback and knows nothing of tunnels: its information
//! about the client comes from the request. Every body is produced or consumed chunk by chunk, so that the use of memory does
//! not depend on the size.

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{
        Query, State, WebSocketUpgrade,
        ws::{Message, WebSocket},
    },
    http::{HeaderMap, StatusCode, header},
    response::{Html, IntoResponse, Response},
    routing::{get, post},
};
use causeway_rt::{listener::SocketListener, socket::Socket, task::TaskGroup};
use futures_util::{StreamExt, stream};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
    service::TowerToHyperService,
};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::{convert::Infallible, fmt::Write, pin::pin, sync::Arc, time::Duration};
use tokio::{
    net::TcpListener,
    select,
    time::{Instant, interval_at},
};
use tokio_util::sync::CancellationToken;
use tracing::info_span;

/// Time that open requests have to finish. It is short because a user does not wait for a demo.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
const TICK_INTERVAL: Duration = Duration::from_secs(1);
/// Size of a chunk, in bytes: as large as a DATA frame on the tunnel.
const CHUNK_BYTES: usize = 64 * 1024;
const DEFAULT_DOWNLOAD: u64 = 1024 * 1024;

const ROUTES: [(&str, &str); 4] = [
    (
        "/stream",
        "sends a line each second until you disconnect; ?ticks=N sends N lines",
    ),
    ("/echo", "a websocket that echoes your messages"),
    (
        "/upload",
        "POST or PUT a body; the response contains its size and SHA-256",
    ),
    ("/download?bytes=N", "sends N bytes, the same each time"),
];

#[derive(Clone)]
struct App {
    node: Arc<str>,
    stop: CancellationToken,
}

/// Serves the app until `stop`. Returns when the last connection has ended, at most a second later.
pub(crate) async fn serve(listener: TcpListener, node: String, stop: CancellationToken) {
    let service = TowerToHyperService::new(routes(App {
        node: node.into(),
        stop: stop.clone(),
    }));
    let listener = SocketListener::Tcp(listener);
    let connections = TaskGroup::new(&CancellationToken::new());
    loop {
        let (socket, client) = select! {
            biased;
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let connection = serve_connection(socket, service.clone(), stop.clone());
        connections.spawn(info_span!("app", %client), connection);
    }
    connections.drain(DRAIN_TIMEOUT).await;
}

async fn serve_connection(
    socket: Socket,
    service: TowerToHyperService<Router>,
    stop: CancellationToken,
) {
    let mut server = auto::Builder::new(TokioExecutor::new());
    server.http1().timer(TokioTimer::new());
    server.http2().timer(TokioTimer::new());
    let mut connection = pin!(server.serve_connection_with_upgrades(TokioIo::new(socket), service));
    let result = select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "a connection of the demo's app failed");
    }
}

fn routes(app: App) -> Router {
    Router::new()
        .route("/", get(hello))
        .route("/stream", get(ticks))
        .route("/echo", get(echo))
        .route("/upload", post(upload).put(upload))
        .route("/download", get(download))
        .with_state(app)
}

async fn hello(State(app): State<App>, headers: HeaderMap) -> Response {
    let field = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let accept = field(header::ACCEPT).unwrap_or_default();
    if !accept.contains("text/html") {
        return format!("hello from {}\n", app.node).into_response();
    }
    let mut rows = String::new();
    for name in [
        header::HOST,
        header::FORWARDED,
        header::VIA,
        header::USER_AGENT,
    ] {
        let value = escape_html(field(name.clone()).unwrap_or("–"));
        let _ = writeln!(rows, "<tr><th>{name}<td>{value}");
    }
    Html(page(&escape_html(&app.node), &rows)).into_response()
}

fn page(node: &str, rows: &str) -> String {
    let mut routes = String::new();
    for (path, description) in ROUTES {
        let _ = writeln!(routes, "<tr><th>{path}<td>{description}");
    }
    format!(
        "<!doctype html>\n\
         <meta charset=utf-8>\n\
         <title>{node}</title>\n\
         <style>body {{ font: 1rem/1.5 system-ui; margin: 3rem }} th {{ text-align: left; padding-right: 2rem }}</style>\n\
         <h1>hello from {node}</h1>\n\
         <p>Your request reached this node through the tunnel that the node itself opened. It contained:\n\
         <table>\n{rows}</table>\n\
         <p>Other paths of this app:\n\
         <table>\n{routes}</table>\n"
    )
}

fn escape_html(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[derive(Deserialize)]
struct Ticks {
    ticks: Option<u64>,
}

async fn ticks(State(app): State<App>, Query(query): Query<Ticks>) -> Response {
    let clock = interval_at(Instant::now(), TICK_INTERVAL);
    let node = app.node;
    let lines = stream::unfold((clock, 0_u64), move |(mut clock, sent)| {
        let node = node.clone();
        async move {
            if query.ticks.is_some_and(|wanted| sent >= wanted) {
                return None;
            }
            clock.tick().await;
            let number = sent + 1;
            let line = Bytes::from(format!("{node} tick {number}\n"));
            Some((Ok::<_, Infallible>(line), (clock, number)))
        }
    });
    let lines = lines.take_until(app.stop.cancelled_owned());
    let content_type = (header::CONTENT_TYPE, "text/plain; charset=utf-8");
    // Prevents caches and compressors from delaying the lines.
    let cache_control = (header::CACHE_CONTROL, "no-store, no-transform");
    ([content_type, cache_control], Body::from_stream(lines)).into_response()
}

async fn echo(State(app): State<App>, upgrade: WebSocketUpgrade) -> Response {
    upgrade.on_upgrade(async move |socket| {
        app.stop.run_until_cancelled(echo_messages(socket)).await;
    })
}

async fn echo_messages(mut socket: WebSocket) {
    while let Some(Ok(message)) = socket.recv().await {
        // Pings are answered and a close is confirmed by the library.
        if !matches!(message, Message::Text(_) | Message::Binary(_)) {
            continue;
        }
        if socket.send(message).await.is_err() {
            break;
        }
    }
}

async fn upload(body: Body) -> Result<Response, StatusCode> {
    let mut chunks = body.into_data_stream();
    let mut digest = Sha256::new();
    let mut bytes = 0_u64;
    while let Some(chunk) = chunks.next().await {
        // The client disconnected in the middle of the body and does not read the response.
        let chunk = chunk.map_err(|_| StatusCode::BAD_REQUEST)?;
        digest.update(&chunk);
        bytes = bytes.saturating_add(u64::try_from(chunk.len()).unwrap_or(u64::MAX));
    }
    let mut sha256 = String::with_capacity(64);
    for byte in digest.finalize() {
        let _ = write!(sha256, "{byte:02x}");
    }
    // Ends with a newline, for terminals.
    let response = format!("{{\"bytes\":{bytes},\"sha256\":\"{sha256}\"}}\n");
    let json = (header::CONTENT_TYPE, "application/json");
    Ok(([json], response).into_response())
}

#[derive(Deserialize)]
struct Download {
    bytes: Option<u64>,
}

async fn download(Query(query): Query<Download>) -> Response {
    let total = query.bytes.unwrap_or(DEFAULT_DOWNLOAD);
    let chunks = stream::unfold((0, total), async |(block, left)| {
        let length = usize::try_from(left)
            .unwrap_or(CHUNK_BYTES)
            .min(CHUNK_BYTES);
        if length == 0 {
            return None;
        }
        let (chunk, next) = pseudo_random_bytes(block, length);
        let left = left - u64::try_from(length).unwrap_or(left);
        Some((Ok::<_, Infallible>(chunk), (next, left)))
    });
    let content_type = (header::CONTENT_TYPE, "application/octet-stream".to_owned());
    let length = (header::CONTENT_LENGTH, total.to_string());
    ([content_type, length], Body::from_stream(chunks)).into_response()
}

/// Returns `length` bytes that do not compress, from the eight-byte block with the number `block` on, and the number of the
/// next block.
///
/// Each block is splitmix64 of its number, so the bytes depend on their position alone.
fn pseudo_random_bytes(mut block: u64, length: usize) -> (Bytes, u64) {
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        block = block.wrapping_add(1);
        let mut mixed = block.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.extend_from_slice(&(mixed ^ (mixed >> 31)).to_le_bytes());
    }
    bytes.truncate(length);
    (bytes.into(), block)
}

#[cfg(test)]
mod tests;
