//! HTTP of the control path: a router over one connection or over a listener, and its failures.
//!
//! A connection between two requests gives its place to another one where there are no others (`ConnectionLimit`).
//! Everything that runs for a connection belongs to it: HTTP/2 streams are tasks of the connection's own
//! branch, and dropping the connection ends them. A connection's life is bounded, so that nobody holds
//! one for nothing, but for those that read what changes (`control::pool`).

use axum::{
    Router,
    http::{HeaderValue, StatusCode, Version, header},
    response::{IntoResponse, Response},
};
use causeway_certs::{Fingerprint, Identity, VerifiedNodeCertificate};
use causeway_rt::{
    connection_limit::{ConnectionLimit, Slot},
    listener::BoundSocket,
    task::TaskGroup,
};
use http_body_util::BodyExt;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::conn::auto,
};
use serde_json::json;
use std::{
    borrow::Cow,
    convert::Infallible,
    future::{Future, pending},
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

/// A head has to be there within this time.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
/// Bytes of heads and bodies that a connection holds unread: strangers have one too.
const UNREAD: u32 = 64 * 1024;
/// Connections at once to one listener, at about 20 KiB each.
pub(crate) const CONNECTIONS: usize = 256;
/// What requests get to end when the listener stops.
const GRACE: Duration = Duration::from_secs(5);

/// What one connection may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerLimits {
    /// It is asked to end after this time, if at all.
    pub(crate) life: Option<Duration>,
    /// Requests at once, by HTTP/2.
    pub(crate) streams: u32,
    /// What requests get to end when it is asked to.
    pub(crate) grace: Duration,
    /// Time for one more request of HTTP/1.1, which is told that the connection ends: closed without that, it would lose a
    /// request that is on its way. An HTTP/2 connection announces its end by GOAWAY and loses none.
    pub(crate) last_request: Duration,
}

/// Of those who ask for something and are done: a scraper that comes every minute keeps its own connection, and a
/// stranger's is gone soon.
pub(crate) const SHORT: ServerLimits = ServerLimits {
    life: Some(Duration::from_mins(5)),
    streams: 16,
    grace: GRACE,
    last_request: Duration::from_secs(1),
};

/// Who is at the other end of a connection; in the extensions of each of its requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The address, if it came over TCP.
    pub address: Option<IpAddr>,
    /// The identity, if it showed a certificate that was checked.
    pub identity: Option<Identity>,
    /// When that certificate was issued, in Unix seconds.
    pub issued: u64,
    /// The root on which it hangs.
    pub root: Option<Fingerprint>,
    /// As which node it may join, by a certificate of the cluster's.
    pub vouched: Option<VerifiedNodeCertificate>,
}

/// When a listener or a connection ends.
#[derive(Clone, Debug)]
pub struct Stop {
    /// Responses announce the end from now on.
    pub announced: CancellationToken,
    /// The end.
    pub end: CancellationToken,
}

impl From<CancellationToken> for Stop {
    fn from(end: CancellationToken) -> Self {
        Self {
            announced: end.clone(),
            end,
        }
    }
}

/// Serves `router` on `listener` until `stop`; returns when the last connection is gone.
pub async fn run(listener: BoundSocket, router: Router, limit: ConnectionLimit, stop: Stop) {
    let listener = match listener.attach() {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "cannot serve: the system does not take the listener");
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
            issued: 0,
            root: None,
            vouched: None,
        };
        let (router, stop) = (router.clone(), stop.clone());
        connections.spawn(info_span!("control", %from), async move {
            let serving = pin!(serve(socket, router, (peer, Some(&slot)), SHORT, stop));
            slot.run(serving).await;
        });
    }
    connections.drain(GRACE).await;
}

/// Serves one connection until its peer, its time or `stop` ends it. Each request keeps `slot` busy until its answer is
/// written.
pub(crate) async fn serve(
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    (peer, slot): (Peer, Option<&Slot>),
    bounds: ServerLimits,
    stop: Stop,
) {
    let builder = builder(bounds);
    let ending = Arc::new(Ending::default());
    let noted = ending.clone();
    let service = service_fn(move |mut request: hyper::Request<Incoming>| {
        let ending = noted.clone();
        let is_http2 = request.version() == Version::HTTP_2;
        ending.is_http2.store(is_http2, Relaxed);
        request.extensions_mut().insert(peer.clone());
        let busy = slot.map(Slot::busy);
        let answer = router.clone().call(request);
        async move {
            let mut answer = answer.await?;
            if !is_http2 && ending.is_due.load(Relaxed) {
                // The engine then closes the connection (RFC 9112, section 9.6).
                let close = HeaderValue::from_static("close");
                answer.headers_mut().insert(header::CONNECTION, close);
            }
            Ok::<_, Infallible>(answer.map(|body| {
                body.map_frame(move |frame| {
                    let _until_written = &busy;
                    frame
                })
            }))
        }
    });
    let mut connection = pin!(builder.serve_connection(TokioIo::new(io), service));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = ending.reached(bounds, &stop) => {
            connection.as_mut().graceful_shutdown();
            timeout(bounds.grace, connection.as_mut()).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        tracing::debug!(error, "a control connection ended out of order");
    }
}

fn builder(bounds: ServerLimits) -> auto::Builder<TaskExecutor> {
    let mut builder = auto::Builder::new(TaskExecutor(Arc::new(TaskGroup::default())));
    builder
        .http1()
        .timer(TokioTimer::new())
        .max_buf_size(UNREAD as usize)
        .header_read_timeout(HEAD_WITHIN);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(bounds.streams)
        .initial_stream_window_size(UNREAD)
        .initial_connection_window_size(UNREAD)
        .keep_alive_interval(HEAD_WITHIN)
        .keep_alive_timeout(HEAD_WITHIN);
    builder
}

/// Knowledge of a connection that its requests and its end share.
#[derive(Debug, Default)]
struct Ending {
    /// The connection is asked to end.
    is_due: AtomicBool,
    is_http2: AtomicBool,
}

impl Ending {
    /// Waits until the connection is to end, by its age or by `stop`, and has been announced for long enough.
    async fn reached(&self, bounds: ServerLimits, stop: &Stop) {
        let aged = async {
            match bounds.life {
                Some(life) => sleep(life).await,
                None => pending().await,
            }
        };
        let is_aged = tokio::select! {
            () = aged => true,
            () = stop.announced.cancelled() => false,
            () = stop.end.cancelled() => false,
        };
        self.is_due.store(true, Relaxed);
        if !self.is_http2.load(Relaxed) {
            sleep(bounds.last_request).await;
        }
        if !is_aged {
            stop.end.cancelled().await;
        }
    }
}

/// The owner of a connection's HTTP/2 streams.
#[derive(Clone, Debug)]
struct TaskExecutor(Arc<TaskGroup>);

impl<F> hyper::rt::Executor<F> for TaskExecutor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, stream: F) {
        self.0.spawn(tracing::Span::current(), stream);
    }
}

/// A failure of the control path: status and `application/problem+json` (RFC 9457).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProblemDetails {
    /// The status.
    pub status: StatusCode,
    /// One word that programs compare.
    pub reason: &'static str,
    /// What happened, and what to do about it.
    pub detail: Cow<'static, str>,
    /// When to come again, in seconds, where that helps.
    pub retry_after: Option<u16>,
}

impl ProblemDetails {
    /// A failure that trying again does not change.
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
        let body = json!({
            "type": format!("urn:causeway:problem:{}", self.reason),
            "title": self.status.canonical_reason(),
            "status": self.status.as_u16(),
            "detail": self.detail,
            "reason": self.reason,
        });
        let problem = HeaderValue::from_static("application/problem+json");
        let mut response = (
            self.status,
            [(header::CONTENT_TYPE, problem)],
            body.to_string(),
        )
            .into_response();
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
            issued: 0,
            root: None,
            vouched: None,
        };
        let router = Router::new().route("/", get(|| async { "it" }));
        let serving = serve(server, router, (peer, None), SHORT, stop.clone().into());
        let asking = async {
            let head = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
            client.write_all(head).await.unwrap();
            let mut answer = vec![0; 4096];
            let read = client.read(&mut answer).await.unwrap();
            let first = String::from_utf8_lossy(&answer[..read]).to_lowercase();
            assert!(!first.contains("connection: close"), "{first}");
            stop.cancel();
            // It rests, and asks once more.
            sleep(SHORT.last_request / 2).await;
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
