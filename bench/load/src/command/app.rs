//! A plain HTTP/1.1 app, cheap enough not to limit a benchmark.
//!
//! `GET /1k` and `GET /N` answer that many bytes, from one block that is never copied; `PUT` and `POST /sink` count a body.
//! By Upgrade, to any protocol: `/echo`, `/source/N` (N bytes and the end) and `/drain` (reads to the end, then sends the
//! number of bytes). Memory does not grow with a body's length.

use crate::{cli, report, stop::Stop};
use anyhow::Context as _;
use bytes::Bytes;
use causeway_rt::{
    listener::{BoundSocket, SocketListener},
    socket::Socket,
    task::TaskGroup,
};
use http::{
    HeaderValue, Method, Request, Response, StatusCode,
    header::{CONNECTION, UPGRADE},
};
use http_body_util::BodyExt;
use hyper::{
    body::{Body, Frame, Incoming, SizeHint},
    server::conn::http1,
    service::service_fn,
    upgrade::OnUpgrade,
};
use hyper_util::rt::TokioIo;
use serde_json::json;
use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tracing::Span;

/// Block of bytes that bodies consist of.
static BLOCK: [u8; 256 << 10] = [b'.'; 256 << 10];
/// Buffer sizes in bytes of an echo: while it is idle, and while it is busy.
const ECHO: (usize, usize) = (4 << 10, 64 << 10);
/// Time that open connections have to finish.
const GRACE: Duration = Duration::from_millis(100);

/// Serves until it is asked to stop.
pub(crate) async fn run(asked: &cli::App, stop: Stop) -> anyhow::Result<()> {
    let bound = BoundSocket::tcp(asked.listen).with_context(|| format!("{}", asked.listen))?;
    let address = bound.local_addr().context("the listener has no address")?;
    let listener = bound.attach()?;
    report::say(&json!({"event": "ready", "listen": address}));
    let connections = Arc::new(TaskGroup::default());
    stop.token
        .run_until_cancelled(accept(listener, &connections))
        .await;
    connections.drain(GRACE).await;
    Ok(())
}

async fn accept(listener: SocketListener, connections: &Arc<TaskGroup>) {
    loop {
        let (socket, _) = listener.accept().await;
        connections.spawn(Span::none(), serve(socket, connections.clone()));
    }
}

async fn serve(socket: Socket, tasks: Arc<TaskGroup>) {
    let service = service_fn(move |request| {
        let tasks = tasks.clone();
        async move { Ok::<_, Infallible>(answer(request, &tasks).await) }
    });
    let mut server = http1::Builder::new();
    let serving = server
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(socket), service)
        .with_upgrades();
    // In a benchmark many clients hang up; this is no error.
    let _ = serving.await;
}

/// Response that a path requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AppRequest {
    Bytes(u64),
    Sink,
    Echo,
    Source(u64),
    Drain,
    Nothing,
}

fn understand(path: &str) -> AppRequest {
    let path = path.strip_prefix('/').unwrap_or(path);
    match path.split_once('/') {
        None => match path {
            "1k" => AppRequest::Bytes(1024),
            "sink" => AppRequest::Sink,
            "echo" => AppRequest::Echo,
            "drain" => AppRequest::Drain,
            _ => path.parse().map_or(AppRequest::Nothing, AppRequest::Bytes),
        },
        Some(("source", length)) => length
            .parse()
            .map_or(AppRequest::Nothing, AppRequest::Source),
        Some(_) => AppRequest::Nothing,
    }
}

async fn answer(mut request: Request<Incoming>, tasks: &TaskGroup) -> Response<Payload> {
    let asked = understand(request.uri().path());
    let method = request.method();
    match asked {
        AppRequest::Bytes(length) if matches!(*method, Method::GET | Method::HEAD) => {
            Response::new(Payload::new(length))
        }
        AppRequest::Sink if matches!(*method, Method::PUT | Method::POST) => count(request).await,
        AppRequest::Echo | AppRequest::Source(_) | AppRequest::Drain => {
            let Some(token) = request.headers().get(UPGRADE).cloned() else {
                return plain(
                    StatusCode::UPGRADE_REQUIRED,
                    "this path requires an Upgrade\n",
                );
            };
            let upgrade = hyper::upgrade::on(&mut request);
            tasks.spawn(Span::none(), switched(upgrade, asked));
            let mut answer = plain(StatusCode::SWITCHING_PROTOCOLS, "");
            let fields = answer.headers_mut();
            fields.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
            fields.insert(UPGRADE, token);
            answer
        }
        AppRequest::Bytes(_) | AppRequest::Sink => {
            plain(StatusCode::METHOD_NOT_ALLOWED, "another method, please\n")
        }
        AppRequest::Nothing => plain(
            StatusCode::NOT_FOUND,
            "there is /1k, /N, /sink, /echo, /source/N and /drain\n",
        ),
    }
}

async fn count(request: Request<Incoming>) -> Response<Payload> {
    let mut body = request.into_body();
    let mut bytes = 0;
    while let Some(frame) = body.frame().await {
        match frame.map(Frame::into_data) {
            Ok(Ok(data)) => bytes += data.len(),
            Ok(Err(_)) => {}
            Err(_) => return plain(StatusCode::BAD_REQUEST, "the body broke off\n"),
        }
    }
    plain(StatusCode::OK, format!("{bytes}\n"))
}

fn plain(status: StatusCode, text: impl Into<Bytes>) -> Response<Payload> {
    let mut answer = Response::new(Payload {
        text: text.into(),
        left: 0,
    });
    *answer.status_mut() = status;
    answer
}

async fn switched(upgrade: OnUpgrade, asked: AppRequest) {
    let Ok(upgraded) = upgrade.await else {
        return;
    };
    let mut io = TokioIo::new(upgraded);
    // A client that leaves ends its session, in order or not.
    let _ = match asked {
        AppRequest::Source(length) => source(&mut io, length).await,
        AppRequest::Drain => drain(&mut io).await,
        _ => echo(&mut io).await,
    };
}

async fn source(io: &mut (impl AsyncWrite + Unpin), mut left: u64) -> std::io::Result<()> {
    while left > 0 {
        let block = block(&mut left);
        io.write_all(block).await?;
    }
    io.shutdown().await
}

async fn drain(io: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> std::io::Result<()> {
    let mut buffer = vec![0; ECHO.1];
    let mut bytes: u64 = 0;
    loop {
        match io.read(&mut buffer).await? {
            0 => break,
            read => bytes += u64::try_from(read).unwrap_or_default(),
        }
    }
    io.write_all(format!("{bytes}\n").as_bytes()).await?;
    io.shutdown().await
}

async fn echo(io: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> std::io::Result<()> {
    let mut buffer = vec![0; ECHO.0];
    loop {
        let read = io.read(&mut buffer).await?;
        if read == 0 {
            return io.shutdown().await;
        }
        io.write_all(buffer.get(..read).unwrap_or_default()).await?;
        io.flush().await?;
        if read == buffer.len() {
            buffer.resize(ECHO.1, 0);
        }
    }
}

/// A text, or bytes without meaning.
struct Payload {
    text: Bytes,
    left: u64,
}

impl Payload {
    fn new(length: u64) -> Self {
        Self {
            text: Bytes::new(),
            left: length,
        }
    }
}

/// Returns the next part with that many bytes.
fn block(left: &mut u64) -> &'static [u8] {
    let length = usize::try_from(*left)
        .unwrap_or(usize::MAX)
        .min(BLOCK.len());
    *left -= u64::try_from(length).unwrap_or_default();
    BLOCK.get(..length).unwrap_or_default()
}

impl Body for Payload {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if !self.text.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.text)))));
        }
        let part = block(&mut self.left);
        let frame = (!part.is_empty()).then(|| Ok(Frame::data(Bytes::from_static(part))));
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.text.is_empty() && self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        let text = u64::try_from(self.text.len()).unwrap_or_default();
        SizeHint::with_exact(self.left.saturating_add(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_select_the_response() {
        assert_eq!(understand("/1k"), AppRequest::Bytes(1024));
        assert_eq!(understand("/1073741824"), AppRequest::Bytes(1 << 30));
        assert_eq!(understand("/source/7"), AppRequest::Source(7));
        assert_eq!(understand("/source/x"), AppRequest::Nothing);
        assert_eq!(understand("/-1"), AppRequest::Nothing);
    }
}
