//! HTTP of the control plane: serves a router on one connection or on a listener, and defines the error format.
//!
//! At the connection limit, a connection between two requests is closed for another one (`ConnectionLimit`). A connection owns
//! all of its tasks: HTTP/2 streams are tasks of the connection's own group, and dropping the connection ends them. The lifetime
//! of a connection is bounded, so that no peer occupies one indefinitely. Connections that watch changes are excepted
//! (`control::api_cache`).

use axum::{
    Json, Router,
    http::{HeaderValue, StatusCode, Version, header},
    response::{IntoResponse, Response},
};
use causeway_certs::{Fingerprint, Identity, VerifiedNodeCertificate};
use causeway_rt::{
    connection_limit::{ConnectionLimit, Slot},
    listener::BoundSocket,
    task::{TaskExecutor, TaskGroup},
};
use http_body_util::BodyExt;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::conn::auto,
};
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    borrow::Cow,
    convert::Infallible,
    future::pending,
    net::IpAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tower::Service;
use tracing::info_span;

/// Timeout of a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of unread bytes of heads and bodies of a connection. Peers without a certificate have connections too.
const MAX_UNREAD_BYTES: u32 = 64 * 1024;
/// Maximum number of connections to one listener, at about 20 KiB each.
pub(crate) const MAX_CONNECTIONS: usize = 256;
/// Time that open requests get when the listener stops.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// Limits of one connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerLimits {
    /// Time after which the connection is closed gracefully; unlimited if `None`.
    pub(crate) max_lifetime: Option<Duration>,
    /// Maximum number of concurrent HTTP/2 requests.
    pub(crate) streams: u32,
    /// Time that open requests get after a graceful close begins.
    pub(crate) grace: Duration,
    /// Time for one more HTTP/1.1 request, whose response announces the end of the connection. If the connection closed without
    /// that response, a request in transit would be lost. HTTP/2 announces the end by GOAWAY and loses no request.
    pub(crate) last_request: Duration,
}

/// Limits for clients with short requests. A scraper that sends a request every minute keeps its connection, and the connection
/// of a peer without a certificate is closed soon.
pub(crate) const SHORT_REQUEST_LIMITS: ServerLimits = ServerLimits {
    max_lifetime: Some(Duration::from_mins(5)),
    streams: 16,
    grace: SHUTDOWN_GRACE,
    last_request: Duration::from_secs(1),
};

/// Peer of a connection, in the extensions of each of its requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// IP address of the peer, if it connected over TCP.
    pub address: Option<IpAddr>,
    /// Identity of its verified certificate, if it presented one.
    pub identity: Option<Identity>,
    /// Time at which that certificate was issued, in Unix seconds.
    pub issued_at: u64,
    /// Root of that certificate.
    pub root: Option<Fingerprint>,
    /// Certificate of the cluster that lets the peer join as a node.
    pub cluster_certificate: Option<VerifiedNodeCertificate>,
}

/// Signals that end a listener or a connection.
#[derive(Clone, Debug)]
pub struct Stop {
    /// Cancelled when responses have to announce the end of the connection.
    pub end_announced: CancellationToken,
    /// Cancelled when connections have to end.
    pub end: CancellationToken,
}

impl From<CancellationToken> for Stop {
    fn from(end: CancellationToken) -> Self {
        Self {
            end_announced: end.clone(),
            end,
        }
    }
}

/// Serves `router` on `listener` until `stop`; returns when the last connection is gone.
pub async fn run(listener: BoundSocket, router: Router, limit: ConnectionLimit, stop: Stop) {
    let listener = match listener.attach() {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "cannot serve: the listener cannot be registered with the runtime");
            return;
        }
    };
    let connections = TaskGroup::new(&CancellationToken::new());
    loop {
        let (socket, from) = tokio::select! {
            biased;
            () = stop.end.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let Ok(slot) = limit.admit(from) else {
            continue;
        };
        let peer = Peer {
            address: from.ip(),
            identity: None,
            issued_at: 0,
            root: None,
            cluster_certificate: None,
        };
        let (router, stop) = (router.clone(), stop.clone());
        connections.spawn(info_span!("control", %from), async move {
            let serving = pin!(serve(
                socket,
                router,
                (peer, Some(&slot)),
                SHORT_REQUEST_LIMITS,
                stop
            ));
            slot.run(serving).await;
        });
    }
    // The next process may bind the address.
    drop(listener);
    connections.drain(SHUTDOWN_GRACE).await;
}

/// Serves one connection until its peer, its lifetime or `stop` ends it. Each request holds `slot` until its response is written.
pub(crate) async fn serve(
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    (peer, slot): (Peer, Option<&Slot>),
    limits: ServerLimits,
    stop: Stop,
) {
    let builder = builder(limits);
    let connection_end = Arc::new(Ending::default());
    let shared_end = connection_end.clone();
    let service = service_fn(move |mut request: hyper::Request<Incoming>| {
        let ending = shared_end.clone();
        let is_http2 = request.version() == Version::HTTP_2;
        ending.is_http2.store(is_http2, Relaxed);
        request.extensions_mut().insert(peer.clone());
        let busy_guard = slot.map(Slot::busy);
        let answer = router.clone().call(request);
        async move {
            let mut answer = answer.await?;
            if !is_http2 && ending.is_due.load(Relaxed) {
                // hyper closes the connection after this response (RFC 9112, section 9.6).
                let close = HeaderValue::from_static("close");
                answer.headers_mut().insert(header::CONNECTION, close);
            }
            Ok::<_, Infallible>(answer.map(|body| {
                body.map_frame(move |frame| {
                    let _held_until_written = &busy_guard;
                    frame
                })
            }))
        }
    });
    let mut connection = pin!(builder.serve_connection(TokioIo::new(io), service));
    let result = tokio::select! {
        ended = connection.as_mut() => ended,
        () = connection_end.wait_end(limits, &stop) => {
            connection.as_mut().graceful_shutdown();
            timeout(limits.grace, connection.as_mut()).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = result {
        tracing::debug!(error, "a control connection ended with an error");
    }
}

fn builder(limits: ServerLimits) -> auto::Builder<TaskExecutor> {
    let mut builder = auto::Builder::new(TaskExecutor::new(Arc::default(), tracing::Span::current));
    builder
        .http1()
        .timer(TokioTimer::new())
        .max_buf_size(MAX_UNREAD_BYTES as usize)
        .header_read_timeout(HEAD_TIMEOUT);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.streams)
        .initial_stream_window_size(MAX_UNREAD_BYTES)
        .initial_connection_window_size(MAX_UNREAD_BYTES)
        .keep_alive_interval(HEAD_TIMEOUT)
        .keep_alive_timeout(HEAD_TIMEOUT);
    builder
}

/// Closing state of a connection, shared by its requests and the task that closes it.
#[derive(Debug, Default)]
struct Ending {
    /// Whether the connection has to end.
    is_due: AtomicBool,
    is_http2: AtomicBool,
}

impl Ending {
    /// Waits until the age of the connection or `stop` requires its end, and the announcement has lasted long enough.
    async fn wait_end(&self, limits: ServerLimits, stop: &Stop) {
        let lifetime_over = async {
            match limits.max_lifetime {
                Some(life) => sleep(life).await,
                None => pending().await,
            }
        };
        let is_aged = tokio::select! {
            () = lifetime_over => true,
            () = stop.end_announced.cancelled() => false,
            () = stop.end.cancelled() => false,
        };
        self.is_due.store(true, Relaxed);
        if !self.is_http2.load(Relaxed) {
            sleep(limits.last_request).await;
        }
        if !is_aged {
            stop.end.cancelled().await;
        }
    }
}

/// Error of the control plane: status and `application/problem+json` (RFC 9457).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProblemDetails {
    /// The status.
    pub status: StatusCode,
    /// One word that programs compare.
    pub reason: &'static str,
    /// The cause, and how to correct it.
    pub detail: Cow<'static, str>,
    /// Time until a retry, in seconds, if a retry helps.
    pub retry_after: Option<u16>,
}

/// Media type of [`ProblemBody`].
pub(super) const PROBLEM_JSON: &str = "application/problem+json";

/// Error as a body (RFC 9457).
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Problem")]
pub(super) struct ProblemBody<'a> {
    /// `urn:causeway:problem:` and the reason.
    #[serde(rename = "type")]
    kind: String,
    /// Name of the status.
    title: Option<&'static str>,
    /// The status.
    status: u16,
    /// The cause, and how to correct it.
    detail: &'a str,
    /// One word that programs compare.
    reason: &'static str,
}

impl ProblemDetails {
    /// Returns an error that a retry does not change.
    pub fn new(
        status: StatusCode,
        reason: &'static str,
        detail: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self {
            status,
            reason,
            detail: detail.into(),
            retry_after: None,
        }
    }
}

impl IntoResponse for ProblemDetails {
    fn into_response(self) -> Response {
        let body = ProblemBody {
            kind: format!("urn:causeway:problem:{}", self.reason),
            title: self.status.canonical_reason(),
            status: self.status.as_u16(),
            detail: &self.detail,
            reason: self.reason,
        };
        let problem = HeaderValue::from_static(PROBLEM_JSON);
        let mut response = (self.status, Json(body)).into_response();
        response.headers_mut().insert(header::CONTENT_TYPE, problem);
        if let Some(seconds) = self.retry_after {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    #[tokio::test(start_paused = true)]
    async fn a_kept_connection_hears_of_its_end_with_one_more_answer() {
        let (mut client, server) = duplex(4096);
        let stop = CancellationToken::new();
        let peer = Peer {
            address: None,
            identity: None,
            issued_at: 0,
            root: None,
            cluster_certificate: None,
        };
        let router = Router::new().route("/", get(|| async { "it" }));
        let serving = serve(
            server,
            router,
            (peer, None),
            SHORT_REQUEST_LIMITS,
            stop.clone().into(),
        );
        let asking = async {
            let head = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
            client.write_all(head).await.unwrap();
            let mut answer = vec![0; 4096];
            let read = client.read(&mut answer).await.unwrap();
            let first = String::from_utf8_lossy(&answer[..read]).to_lowercase();
            assert!(!first.contains("connection: close"), "{first}");
            stop.cancel();
            // The client sends one more request on the idle connection.
            sleep(SHORT_REQUEST_LIMITS.last_request / 2).await;
            client.write_all(head).await.unwrap();
            let mut last = String::new();
            client.read_to_string(&mut last).await.unwrap();
            let last = last.to_lowercase();
            assert!(
                last.contains("connection: close") && last.ends_with("it"),
                "{last}"
            );
        };
        tokio::join!(serving, asking);
    }
}
