//! The edge's end of a tunnel: the HTTP/2 server.
//!
//! Accepts streams from the gateway and returns the purpose of each. It initiates neither PING nor SETTINGS after the
//! handshake (invariant 11). It detects a dead gateway by silence alone: a gateway that is alive sends something every 5 s.

use crate::{
    buffered,
    control_stream::ControlStream,
    engine::{self, WindowLimits, ext::Protocol},
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
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header::CONTENT_LENGTH};
use std::{
    future::poll_fn,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, Sleep, sleep_until},
};

/// Largest header list of a peer that is no gateway, in bytes. Its requests are CONNECTs.
const MAX_UNTRUSTED_HEADER_LIST: u32 = 32 << 10;

/// Number of resets that are remembered on a connection of such a peer: as many as it can have streams.
const MAX_UNTRUSTED_RESETS: usize = 10_000;
/// Number of streams that such a peer may have reset before they are accepted. After a pause of the network many arrive at once
/// together with their resets.
const MAX_UNTRUSTED_UNACCEPTED: usize = 1_000;

/// Configuration of the edge's end of a tunnel.
#[derive(Clone, Debug)]
pub struct EdgeSideConfig {
    /// Silence after which the tunnel is closed.
    pub read_timeout: Duration,
    /// Maximum number of unread bytes of all streams of the tunnel at this end.
    pub budget: usize,
    /// Largest window of a stream towards this end, in bytes.
    pub max_window: u32,
    /// Maximum number of open streams.
    pub max_streams: u32,
    /// Round trip that was measured during the TLS handshake.
    pub round_trip: Duration,
    /// Number of bytes. A stream is bulk once it has moved more bytes than this within [`load::BULK_SPAN`].
    pub bulk_threshold: u64,
    /// Budget of the unread bytes of all tunnels of this process.
    pub memory_budget: Arc<buffered::MemoryBudget>,
    /// Whether the other end is a gateway: thousands of resets are ordinary then, because its clients abort, and it may open
    /// control streams. Otherwise the limits against rapid resets and floods of frames apply (CVE-2023-44487).
    pub is_trusted: bool,
}

impl Default for EdgeSideConfig {
    fn default() -> Self {
        Self {
            read_timeout: Duration::from_secs(15),
            budget: 64 << 20,
            max_window: u32::MAX,
            max_streams: 10_000,
            round_trip: Duration::ZERO,
            bulk_threshold: load::BULK_BYTES,
            memory_budget: Arc::default(),
            is_trusted: true,
        }
    }
}

/// The edge's end of one tunnel.
#[derive(Debug)]
pub struct EdgeSide<S: AsyncRead + AsyncWrite + Unpin> {
    connection: engine::server::Connection<S, Bytes>,
    traffic: Arc<IoActivity>,
    load: Arc<TunnelLoad>,
    config: EdgeSideConfig,
    window_limits: WindowLimits,
    /// Bytes of stalled streams at the last sample.
    stalled: usize,
    last_sample: Instant,
    /// Timer of the next check for silence. Kept between streams, because starting a timer takes a lock.
    silence_timer: Pin<Box<Sleep>>,
}

/// A stream from the gateway.
#[derive(Debug)]
pub enum IncomingStream {
    /// The control stream.
    Control(Box<ControlStream>),
    /// A plain request, an upgrade or a TCP session.
    Stream(Box<StreamRequest>),
}

/// Request that opened a stream, with all data that is needed to serve it.
#[derive(Debug)]
pub struct StreamRequest {
    /// Purpose of the stream.
    pub kind: StreamKind,
    /// The address to dial, as the gateway names it.
    pub target: Target,
    /// The request as the upstream receives it, without private fields.
    pub head: Request<()>,
    /// Number of the body's first bytes that are the rest of the target.
    pub target_overflow_len: usize,
    /// The request's body, or the far half of a session.
    pub body: StreamReceiver,
    /// Responder for the stream.
    pub responder: StreamResponder,
    /// Address of the client of a TCP session, if the gateway states it.
    pub source: Option<SocketAddr>,
    /// Fields of a request that another gateway forwards; empty in a request to an edge.
    pub forwarded: ForwardedFields,
}

/// Private fields of a request that a gateway forwards to another gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ForwardedFields {
    /// Node whose edge has to receive the request ([`wire::NODE`]).
    pub node: Option<HeaderValue>,
    /// Client of the request ([`wire::CLIENT`]).
    pub client: Option<HeaderValue>,
    /// Trace in the sender's access record ([`wire::TRACE`]).
    pub trace: Option<HeaderValue>,
    /// Whether another gateway can be asked as well ([`wire::ALTERNATIVE`]).
    pub has_alternative: bool,
    /// Whether the sender takes the interim response [`wire::LATE`]. Gateways of earlier versions pass it on to their clients.
    pub takes_late_reports: bool,
}

/// Value of [`wire::ALTERNATIVE`] by a gateway that takes the interim response [`wire::LATE`]; earlier versions sent 1.
const TAKES_LATE_REPORTS: HeaderValue = HeaderValue::from_static("2");

impl ForwardedFields {
    /// Adds the fields to a request.
    pub fn set(self, fields: &mut HeaderMap) {
        let has_alternative = self.has_alternative.then_some(TAKES_LATE_REPORTS);
        let all = [
            (wire::NODE, self.node),
            (wire::CLIENT, self.client),
            (wire::TRACE, self.trace),
            (wire::ALTERNATIVE, has_alternative),
        ];
        for (name, value) in all {
            if let Some(value) = value {
                fields.insert(name, value);
            }
        }
    }

    fn take(fields: &mut HeaderMap) -> Self {
        let alternative = fields.remove(wire::ALTERNATIVE);
        Self {
            node: fields.remove(wire::NODE),
            client: fields.remove(wire::CLIENT),
            trace: fields.remove(wire::TRACE),
            takes_late_reports: alternative.as_ref() == Some(&TAKES_LATE_REPORTS),
            has_alternative: alternative.is_some(),
        }
    }
}

/// States the address of the client to the edge that receives a CONNECT request.
pub fn set_source(fields: &mut HeaderMap, source: SocketAddr) {
    if let Ok(value) = HeaderValue::try_from(source.to_string()) {
        fields.insert(wire::SOURCE, value);
    }
}

fn take_source(fields: &mut HeaderMap) -> Option<SocketAddr> {
    fields.remove(wire::SOURCE)?.to_str().ok()?.parse().ok()
}

/// Responder for a stream. Dropping it resets the stream.
#[derive(Debug)]
pub struct StreamResponder {
    inner: engine::server::SendResponse<Bytes>,
    counter: ByteCounter,
}

/// Handle that withdraws a stream when the edge's policy does not allow it any more.
#[derive(Debug)]
pub struct Withdrawal(OpenStreamGuard);

impl Withdrawal {
    /// Marks the stream as withdrawn. The holder of the stream must drop it then, and the reset carries the reason to the
    /// gateway.
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
    config: EdgeSideConfig,
) -> Result<EdgeSide<S>, TunnelEnd>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut builder = engine::server::Builder::new();
    if config.is_trusted {
        builder
            .max_header_list_size(wire::MAX_HEADER_LIST)
            .max_concurrent_reset_streams(wire::MAX_RESETS)
            .max_pending_accept_reset_streams(wire::MAX_RESETS)
            .max_local_error_reset_streams(None);
    } else {
        builder
            .max_header_list_size(MAX_UNTRUSTED_HEADER_LIST)
            .max_concurrent_reset_streams(MAX_UNTRUSTED_RESETS)
            .max_pending_accept_reset_streams(MAX_UNTRUSTED_UNACCEPTED)
            .limit_control_frames();
    }
    let handshake = builder
        .initial_connection_window_size(wire::CONNECTION_WINDOW)
        .max_frame_size(wire::MAX_FRAME)
        .max_concurrent_streams(config.max_streams)
        .enable_connect_protocol()
        .handshake(io);
    let connection = tokio::time::timeout(config.read_timeout, handshake)
        .await
        .map_err(|_| TunnelEnd::Silent)?
        .map_err(|error| TunnelEnd::from_result(Err(error)))?;
    Ok(EdgeSide {
        connection,
        silence_timer: Box::pin(sleep_until(traffic.last_read() + config.read_timeout)),
        traffic,
        load: Arc::new(TunnelLoad::for_process(
            config.bulk_threshold,
            config.memory_budget.clone(),
        )),
        config,
        window_limits: WindowLimits::default(),
        stalled: 0,
        last_sample: Instant::now(),
    })
}

impl<S: AsyncRead + AsyncWrite + Unpin> EdgeSide<S> {
    /// Returns the load of the tunnel.
    pub fn load(&self) -> Arc<TunnelLoad> {
        self.load.clone()
    }

    /// Returns the next stream. Drives the whole connection: it must be polled for any stream to move. Cancel-safe.
    ///
    /// # Errors
    /// The reason for the end of the tunnel.
    pub async fn next_stream(&mut self) -> Result<IncomingStream, TunnelEnd> {
        loop {
            let (request, respond) = self.accept_request().await?;
            let max_streams = usize::try_from(self.config.max_streams).unwrap_or(usize::MAX);
            let Some(guard) = OpenStreamGuard::new(&self.load, max_streams.saturating_add(1))
            else {
                continue;
            };
            let responder = StreamResponder {
                inner: respond,
                counter: ByteCounter::new(guard.clone()),
            };
            let (head, mut body) = request.into_parts();
            let counter = ByteCounter::new(guard);
            let flow = (!body.is_end_stream()).then(|| body.flow_control().clone());
            let buffered = flow.map(|flow| counter.register_receiver(flow));
            let body = StreamReceiver::new(body, counter, buffered);
            let mut head = Request::from_parts(head, ());
            let forwarded = ForwardedFields::take(head.headers_mut());
            let source = take_source(head.headers_mut());
            if head.headers().contains_key(wire::CONTROL) {
                if !self.config.is_trusted {
                    let detail = "this connection has no control stream";
                    responder.reject(&RejectCode::Malformed.with_detail(detail));
                } else if let Ok(send) = responder.send(Response::new(()), false) {
                    return Ok(IncomingStream::Control(Box::new(ControlStream::new(
                        send, body,
                    ))));
                }
                continue;
            }
            match parse_request(head) {
                Ok((kind, target, target_overflow_len, head)) => {
                    let stream_request = StreamRequest {
                        kind,
                        target,
                        head,
                        target_overflow_len,
                        body,
                        responder,
                        source,
                        forwarded,
                    };
                    return Ok(IncomingStream::Stream(Box::new(stream_request)));
                }
                Err(detail) => responder.reject(&RejectCode::Malformed.with_detail(detail)),
            }
        }
    }

    /// Begins the end of the tunnel (GOAWAY). From then on, [`EdgeSide::next_stream`] returns streams that were already under way, and an
    /// error once all streams have ended and all their bytes are sent.
    pub fn start_shutdown(&mut self) {
        self.connection.graceful_shutdown();
    }

    async fn accept_request(
        &mut self,
    ) -> Result<
        (
            Request<engine::RecvStream>,
            engine::server::SendResponse<Bytes>,
        ),
        TunnelEnd,
    > {
        let Self {
            connection,
            traffic,
            load,
            config,
            window_limits,
            stalled,
            last_sample,
            silence_timer,
        } = self;
        let mut next_request = poll_fn(|cx| {
            // Stalls are detected by comparison with the last sample.
            if last_sample.elapsed() >= buffered::SAMPLE_INTERVAL {
                *last_sample = Instant::now();
                *stalled = load.sample_buffered().stalled;
            } else {
                load.mark_buffered_changed();
            }
            let budget = config.memory_budget.allowance(config.budget, *stalled);
            let mut limits =
                flow_control::window_limits(config.round_trip, load.open_streams(), budget);
            limits.max = limits.max.min(config.max_window);
            if *window_limits != limits {
                *window_limits = limits;
                connection.limit_windows(limits);
            }
            connection.poll_accept(cx)
        });
        loop {
            tokio::select! {
                biased;
                accepted = &mut next_request => return match accepted {
                    Some(Ok(accepted)) => Ok(accepted),
                    Some(Err(error)) => Err(TunnelEnd::from_result(Err(error))),
                    None => Err(TunnelEnd::Peer),
                },
                () = silence_timer.as_mut() => {
                    let deadline = traffic.last_read() + config.read_timeout;
                    if deadline <= Instant::now() {
                        return Err(TunnelEnd::Silent);
                    }
                    silence_timer.as_mut().reset(deadline);
                }
            }
        }
    }
}

/// Parses the head of a request. Private fields are read and removed.
fn parse_request(
    mut head: Request<()>,
) -> Result<(StreamKind, Target, usize, Request<()>), &'static str> {
    let protocol = head.extensions_mut().remove::<Protocol>();
    if head.method() == Method::CONNECT && protocol.is_none() {
        let authority = head.uri().authority().ok_or("CONNECT without a target")?;
        let target = Target::parse_private(authority.as_str())
            .map_err(|_| "CONNECT with an invalid target")?;
        return Ok((StreamKind::Tcp, target, 0, head));
    }
    let target = head.headers_mut().remove(wire::TARGET);
    let target = target.ok_or("a request without a target")?;
    let target = target
        .to_str()
        .ok()
        .and_then(|text| Target::parse_private(text).ok());
    let target = target.ok_or("a request with an invalid target")?;
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
    let overflow_len = match take_header(head.headers_mut(), &wire::TARGET_REST) {
        None => 0,
        Some(length) => (length.parse().ok())
            .filter(|length| (1..=MAX_OVERFLOW_BYTES).contains(length))
            .ok_or("a split request target whose remaining length is invalid or too large")?,
    };
    crate::headers::strip_private(head.headers_mut());
    Ok((kind, target, overflow_len, head))
}

fn take_header(headers: &mut HeaderMap, name: &http::HeaderName) -> Option<String> {
    headers.remove(name)?.to_str().ok().map(str::to_owned)
}

impl StreamResponder {
    /// Sends the response head. With `end_stream` nothing follows the head.
    ///
    /// # Errors
    /// If the stream was reset, the tunnel is gone, or the head is too large. In the last case the client receives the
    /// reason.
    pub fn send(
        mut self,
        head: Response<()>,
        end_stream: bool,
    ) -> Result<StreamSender, StreamError> {
        let size = headers::header_list_size(head.headers());
        if size > wire::MAX_HEAD {
            let max_size = wire::MAX_HEAD;
            let detail =
                format!("the response header has {size} bytes; a tunnel allows at most {max_size}");
            self.reject(&RejectCode::TargetBroken.with_detail(detail));
            return Err(StreamError::TooLarge);
        }
        let send = self.inner.send_response(head, end_stream)?;
        Ok(StreamSender::new(send, self.counter, end_stream))
    }

    /// Sends an interim response (1xx, RFC 9110 §15.2). Drops it if it is too large, because it is only advice.
    ///
    /// # Errors
    /// If the stream was reset or the tunnel is gone.
    pub fn send_informational(&mut self, head: Response<()>) -> Result<(), StreamError> {
        if headers::header_list_size(head.headers()) > wire::MAX_HEAD {
            return Ok(());
        }
        Ok(self.inner.send_informational(head)?)
    }

    /// Sends a response that reports a failure of the edge itself.
    pub fn reject(self, rejection: &Rejected) {
        let mut head = Response::new(());
        *head.status_mut() = StatusCode::BAD_GATEWAY;
        let code = HeaderValue::from_static(rejection.code.as_str());
        head.headers_mut().insert(wire::FAILURE, code);
        self.fail(head, &rejection.detail);
    }

    /// Sends a response that reports a failure of this gateway to the gateway that has forwarded the request: a word of the gateways'
    /// error table or [`wire::LATE`], and a sentence for people.
    pub fn reject_forwarded(self, reason: &'static str, detail: &str) {
        let mut head = Response::new(());
        *head.status_mut() = StatusCode::BAD_GATEWAY;
        head.headers_mut()
            .insert(wire::REASON, HeaderValue::from_static(reason));
        self.fail(head, detail);
    }

    fn fail(self, mut head: Response<()>, detail: &str) {
        // Only visible ASCII is a valid header value.
        let sanitized_detail: String = detail
            .chars()
            .map(|ch| {
                if ch.is_ascii_graphic() || ch == ' ' {
                    ch
                } else {
                    '?'
                }
            })
            .take(1024)
            .collect();
        if let Ok(detail) = HeaderValue::try_from(sanitized_detail) {
            head.headers_mut().insert(wire::DETAIL, detail);
        }
        // A disconnected client needs no response.
        let _ = self.send(head, true);
    }

    /// Returns a handle with which the stream can be withdrawn later.
    pub fn withdrawal_handle(&self) -> Withdrawal {
        Withdrawal(self.counter.guard().clone())
    }

    /// Waits until the gateway resets the stream, which means that the client has disconnected.
    pub async fn wait_for_reset(&mut self) -> StreamError {
        poll_fn(|cx| self.poll_reset(cx)).await
    }

    fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<StreamError> {
        match ready!(self.inner.poll_reset(cx)) {
            Ok(reason) => Poll::Ready(engine::Error::from(reason).into()),
            Err(error) => Poll::Ready(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gateways_of_earlier_versions_name_an_alternative_and_take_no_late_reports() {
        let taken = |value: &'static str| {
            let field = (wire::ALTERNATIVE, HeaderValue::from_static(value));
            let taken = ForwardedFields::take(&mut HeaderMap::from_iter([field]));
            (taken.has_alternative, taken.takes_late_reports)
        };
        assert_eq!((taken("1"), taken("2")), ((true, false), (true, true)));
        let sent = ForwardedFields {
            has_alternative: true,
            ..ForwardedFields::default()
        };
        let mut fields = HeaderMap::new();
        sent.set(&mut fields);
        let taken = ForwardedFields::take(&mut fields);
        assert!(taken.takes_late_reports && fields.is_empty());
        assert_eq!(
            ForwardedFields::take(&mut fields),
            ForwardedFields::default()
        );
    }
}
