//! The edge's end of a tunnel: the HTTP/2 server.
//!
//! Takes streams from the gateway and says what each is for. It initiates neither PING nor SETTINGS after the
//! handshake (invariant 11); its liveness is silence: a gateway that is alive is heard every 5 s.

use crate::{
    buffered,
    control_stream::ControlStream,
    cork::Cork,
    error::{RejectCode, Rejected, StreamError, TunnelEnd},
    flow_control, headers,
    load::{self, ByteCounter, OpenStreamGuard, TunnelLoad},
    request_target::MAX_OVERFLOW_BYTES,
    stream::{StreamKind, StreamReceiver, StreamSender},
    target::Target,
    wire,
};
use bytes::Bytes;
use causeway_rt::socket::IoActivity;
use h2::ext::Protocol;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header::CONTENT_LENGTH};
use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, sleep_until},
};

/// Configuration of the edge's end of a tunnel.
#[derive(Clone, Debug)]
pub struct EdgeSideConfig {
    /// Silence after which the tunnel is given up.
    pub silence: Duration,
    /// Bytes that all streams of the tunnel may have unread at this end.
    pub budget: usize,
    /// Streams that may be open at once.
    pub max_streams: u32,
    /// The round trip that TLS's handshake took.
    pub round_trip: Duration,
    /// A stream is bulk once it has moved more than this many bytes within [`load::BULK_SPAN`].
    pub bulk: u64,
    /// Bytes that all tunnels of this process leave unread.
    pub pressure: Arc<buffered::MemoryBudget>,
}

impl Default for EdgeSideConfig {
    fn default() -> Self {
        Self {
            silence: Duration::from_secs(15),
            budget: 64 << 20,
            max_streams: 10_000,
            round_trip: Duration::ZERO,
            bulk: load::BULK_BYTES,
            pressure: Arc::default(),
        }
    }
}

/// The edge's end of one tunnel.
#[derive(Debug)]
pub struct EdgeSide<S: AsyncRead + AsyncWrite + Unpin> {
    connection: h2::server::Connection<Cork<S>, Bytes>,
    cork: Cork<S>,
    traffic: Arc<IoActivity>,
    load: Arc<TunnelLoad>,
    settings: EdgeSideConfig,
    window: u32,
    weighed: Instant,
}

/// A stream from the gateway.
#[derive(Debug)]
pub enum IncomingStream {
    /// The control stream.
    Control(Box<ControlStream>),
    /// A plain request, an upgrade or a TCP session.
    Stream(Box<StreamRequest>),
}

/// Request that opened a stream, and all that is needed to serve it.
#[derive(Debug)]
pub struct StreamRequest {
    /// Purpose of the stream.
    pub kind: StreamKind,
    /// The address to dial, as the gateway names it.
    pub target: Target,
    /// The request as the upstream is to see it, without private fields.
    pub head: Request<()>,
    /// How many of the body's first bytes are the rest of the target.
    pub target_rest: usize,
    /// The request's body, or the far half of a session.
    pub body: StreamReceiver,
    /// Responder for the stream.
    pub reply: StreamResponder,
}

/// Responder for a stream. Dropping it resets the stream.
#[derive(Debug)]
pub struct StreamResponder {
    inner: h2::server::SendResponse<Bytes>,
    moved: ByteCounter,
}

/// Handle by which a stream is withdrawn: the edge's policy does not allow it any more.
#[derive(Debug)]
pub struct Withdrawal(OpenStreamGuard);

impl Withdrawal {
    /// Has the reset of the stream, which its holder drops now, tell the gateway why.
    pub fn withdraw(&self) {
        self.0.withdraw();
    }
}

/// Begins HTTP/2 on a connection whose TLS is done.
///
/// # Errors
/// If the connection fails.
pub async fn accept<S>(
    io: S,
    traffic: Arc<IoActivity>,
    settings: EdgeSideConfig,
) -> Result<EdgeSide<S>, TunnelEnd>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let window = flow_control::size(settings.round_trip, 1, settings.budget);
    let cork = Cork::new(io);
    let handshake = h2::server::Builder::new()
        .initial_window_size(window)
        .initial_connection_window_size(wire::CONNECTION_WINDOW)
        .max_frame_size(wire::MAX_FRAME)
        .max_header_list_size(wire::MAX_HEADER_LIST)
        .max_concurrent_streams(settings.max_streams)
        .max_concurrent_reset_streams(wire::MAX_RESETS)
        .max_pending_accept_reset_streams(wire::MAX_RESETS)
        .max_local_error_reset_streams(None)
        .data_frame_budget(wire::DATA_FRAME_BUDGET)
        .enable_connect_protocol()
        .handshake(cork.clone());
    let connection = tokio::time::timeout(settings.silence, handshake)
        .await
        .map_err(|_| TunnelEnd::Silent)?
        .map_err(|error| TunnelEnd::of(Err(error)))?;
    cork.cork();
    Ok(EdgeSide {
        connection,
        cork,
        traffic,
        load: Arc::new(TunnelLoad::of_process(
            settings.bulk,
            settings.pressure.clone(),
        )),
        settings,
        window,
        weighed: Instant::now(),
    })
}

impl<S: AsyncRead + AsyncWrite + Unpin> EdgeSide<S> {
    /// Returns the load of the tunnel.
    pub fn load(&self) -> Arc<TunnelLoad> {
        self.load.clone()
    }

    /// Changes the window of the streams, to `most` bytes at most and to what this end's own budget allows. Only when the gateway
    /// has said that it may (invariant 11). Returns the window as it is then, in bytes.
    /// How long the link is, the gateway has measured since; this end knows what it was at the handshake.
    pub fn resize(&mut self, most: u32) -> u32 {
        let left = (self.settings.budget).saturating_sub(self.load.weigh().stalled);
        let wanted = flow_control::per_stream_share(self.load.streams(), left).min(most);
        // h2 refuses this while an earlier change is not acknowledged; the next turn retries.
        if wanted != self.window && self.connection.set_initial_window_size(wanted).is_ok() {
            self.window = wanted;
        }
        self.window
    }

    /// The next stream. Drives the whole connection: it must be polled for any stream to move.
    /// Cancel-safe.
    ///
    /// # Errors
    /// How the tunnel ended.
    pub async fn next(&mut self) -> Result<IncomingStream, TunnelEnd> {
        loop {
            let (request, respond) = self.accept().await?;
            let max = usize::try_from(self.settings.max_streams).unwrap_or(usize::MAX);
            let Some(open) = OpenStreamGuard::new(&self.load, max.saturating_add(1)) else {
                continue;
            };
            let reply = StreamResponder {
                inner: respond,
                moved: ByteCounter::new(open.clone()),
            };
            let (head, body) = request.into_parts();
            let body = StreamReceiver::new(body, ByteCounter::new(open));
            let head = Request::from_parts(head, ());
            if head.headers().contains_key(wire::CONTROL) {
                if let Ok(send) = reply.send(Response::new(()), false) {
                    return Ok(IncomingStream::Control(Box::new(ControlStream::new(
                        send, body,
                    ))));
                }
                continue;
            }
            match parse_request(head) {
                Ok((kind, target, target_rest, head)) => {
                    let asked = StreamRequest {
                        kind,
                        target,
                        head,
                        target_rest,
                        body,
                        reply,
                    };
                    return Ok(IncomingStream::Stream(Box::new(asked)));
                }
                Err(detail) => reply.refuse(&crate::RejectCode::Malformed.because(detail)),
            }
        }
    }

    async fn accept(
        &mut self,
    ) -> Result<(Request<h2::RecvStream>, h2::server::SendResponse<Bytes>), TunnelEnd> {
        let silence = self.settings.silence;
        let mut timer = std::pin::pin!(sleep_until(self.traffic.last_read() + silence));
        let Self {
            connection,
            cork,
            load,
            weighed,
            ..
        } = self;
        let mut accept = poll_fn(|cx| {
            let accepted = connection.poll_accept(cx);
            cork.uncork(cx);
            // Stalls are detected by comparison with the last sample; shrunk windows also need this without new streams.
            if weighed.elapsed() >= buffered::SAMPLE_INTERVAL {
                *weighed = Instant::now();
                load.weigh();
            }
            accepted
        });
        loop {
            tokio::select! {
                biased;
                accepted = &mut accept => return match accepted {
                    Some(Ok(accepted)) => Ok(accepted),
                    Some(Err(error)) => Err(TunnelEnd::of(Err(error))),
                    None => Err(TunnelEnd::Peer),
                },
                () = timer.as_mut() => {
                    let due = self.traffic.last_read() + silence;
                    if due <= Instant::now() {
                        return Err(TunnelEnd::Silent);
                    }
                    timer.as_mut().reset(due);
                }
            }
        }
    }
}

/// Parses the request of a head; private fields are read and removed.
fn parse_request(
    mut head: Request<()>,
) -> Result<(StreamKind, Target, usize, Request<()>), &'static str> {
    let protocol = head.extensions_mut().remove::<Protocol>();
    if head.method() == Method::CONNECT && protocol.is_none() {
        let authority = head.uri().authority().ok_or("CONNECT without a target")?;
        let target = authority
            .as_str()
            .parse()
            .map_err(|_| "CONNECT with an invalid target")?;
        return Ok((StreamKind::Tcp, target, 0, head));
    }
    let target = take_header(head.headers_mut(), &wire::TARGET)
        .ok_or("a request without a target")?
        .parse()
        .map_err(|_| "a request with an invalid target")?;
    let kind = match protocol {
        None => StreamKind::Request,
        Some(protocol) => {
            let method = take_header(head.headers_mut(), &wire::METHOD)
                .ok_or("an upgrade without a method")?;
            *head.method_mut() = Method::from_bytes(method.as_bytes())
                .map_err(|_| "an upgrade with an invalid method")?;
            StreamKind::Upgrade(protocol.as_str().to_owned())
        }
    };
    if let Some(length) = head.headers_mut().remove(wire::CONTENT) {
        head.headers_mut().insert(CONTENT_LENGTH, length);
    }
    let rest = match take_header(head.headers_mut(), &wire::TARGET_REST) {
        None => 0,
        Some(length) => (length.parse().ok())
            .filter(|length| (1..=MAX_OVERFLOW_BYTES).contains(length))
            .ok_or("a split request target whose remaining length is invalid or too large")?,
    };
    crate::headers::strip_private(head.headers_mut());
    Ok((kind, target, rest, head))
}

fn take_header(headers: &mut HeaderMap, name: &http::HeaderName) -> Option<String> {
    headers.remove(name)?.to_str().ok().map(str::to_owned)
}

impl StreamResponder {
    /// Answers; with `end` nothing follows the head.
    ///
    /// # Errors
    /// If the stream was reset, the tunnel is gone, or the head is too large. In the last case the client receives the
    /// reason.
    pub fn send(mut self, head: Response<()>, end: bool) -> Result<StreamSender, StreamError> {
        let size = headers::size(head.headers());
        if size > wire::MAX_HEAD {
            let most = wire::MAX_HEAD;
            let detail =
                format!("the response header has {size} bytes; a tunnel allows at most {most}");
            self.refuse(&RejectCode::TargetBroken.because(detail));
            return Err(StreamError::TooLarge);
        }
        let send = self.inner.send_response(head, end)?;
        Ok(StreamSender::new(send, self.moved, end))
    }

    /// Sends an interim answer (1xx, RFC 9110 §15.2), unless it is too large: it is advice.
    ///
    /// # Errors
    /// If the stream was reset or the tunnel is gone.
    pub fn interim(&mut self, head: Response<()>) -> Result<(), StreamError> {
        if headers::size(head.headers()) > wire::MAX_HEAD {
            return Ok(());
        }
        Ok(self.inner.send_informational(head)?)
    }

    /// Answers that the edge itself failed the stream.
    pub fn refuse(self, refused: &Rejected) {
        let mut head = Response::new(());
        *head.status_mut() = StatusCode::BAD_GATEWAY;
        let word = HeaderValue::from_static(refused.refusal.word());
        head.headers_mut().insert(wire::FAILURE, word);
        // Only visible ASCII is a valid header value.
        let plain: String = refused
            .detail
            .chars()
            .map(|each| {
                if each.is_ascii_graphic() || each == ' ' {
                    each
                } else {
                    '?'
                }
            })
            .take(1024)
            .collect();
        if let Ok(detail) = HeaderValue::try_from(plain) {
            head.headers_mut().insert(wire::DETAIL, detail);
        }
        // A disconnected client needs no response.
        let _ = self.send(head, true);
    }

    /// Handle by which the stream is withdrawn later on.
    pub fn withdrawal(&self) -> Withdrawal {
        Withdrawal(self.moved.open().clone())
    }

    /// Waits until the gateway resets the stream, which means that the client went away.
    pub async fn reset(&mut self) -> StreamError {
        poll_fn(|cx| self.poll_reset(cx)).await
    }

    fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<StreamError> {
        match ready!(self.inner.poll_reset(cx)) {
            Ok(reason) => Poll::Ready(h2::Error::from(reason).into()),
            Err(error) => Poll::Ready(error.into()),
        }
    }
}
