//! The gateway's end of a tunnel: the HTTP/2 client, and the one place that opens streams.
//!
//! A [`Tunnel`] is a cheap handle for any thread; its [`ConnectionDriver`] is the one task that owns the connection, checks
//! liveness and sizes windows. Both share atomics, a token, and the notification of probes: opening a stream takes no lock.

mod buffer_monitor;
mod driver;

pub use driver::{ConnectionDriver, connect};

use crate::{
    buffered::{BufferedStream, MemoryBudget, NodeBudget},
    control_stream::ControlStream,
    engine::{self, ext::Protocol},
    error::StreamError,
    headers,
    liveness::KeepaliveConfig,
    load::{ByteCounter, OpenStreamGuard, TunnelLoad},
    request_target::TargetOverflow,
    stream::{StreamKind, StreamReceiver, StreamSender},
    target::Target,
    wire,
};
use bytes::Bytes;
use causeway_rt::socket::IoActivity;
use futures_util::FutureExt;
use http::{HeaderValue, Method, Request, Response, Uri, header::CONTENT_LENGTH};
use std::{
    future::{Future, poll_fn},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{sync::Notify, time::Instant};
use tokio_util::sync::CancellationToken;

/// Time without an answer to a PING after which a tunnel is stuck if it has read less than [`STUCK_MAX_BYTES`] meanwhile. The
/// answer waits behind up to 256 KiB in the edge's kernel, which a slow link needs longer to send.
const STUCK_AFTER: Duration = Duration::from_secs(10);
/// Bytes, see [`STUCK_AFTER`]: about 3 kB/s.
const STUCK_MAX_BYTES: u64 = 32 << 10;

/// Configuration of the gateway's end of a tunnel.
#[derive(Clone, Debug)]
pub struct GatewaySideConfig {
    /// Limits of liveness.
    pub keepalive: KeepaliveConfig,
    /// Maximum number of unread bytes of all streams of the node's tunnels at this end.
    pub budget: usize,
    /// Budget that the tunnels of the node share.
    pub node_budget: Arc<NodeBudget>,
    /// Maximum number of open streams.
    pub max_streams: usize,
    /// Number of streams that carry control messages, which are consumed as they arrive: 1 with an edge, otherwise 0.
    pub control_streams: usize,
    /// Round trip that was measured during the TLS handshake.
    pub round_trip: Duration,
    /// Budget of the bytes that all tunnels of this process leave unread. Windows stay small while it is high.
    pub memory_budget: Arc<MemoryBudget>,
    /// Whether the other end is a gateway, whose streams belong to many nodes. The limits that end the tunnel of an edge which
    /// floods it or fills its memory do not apply then: the other gateway applies them to each edge.
    pub is_trusted: bool,
}

impl Default for GatewaySideConfig {
    fn default() -> Self {
        Self {
            keepalive: KeepaliveConfig::default(),
            budget: 64 << 20,
            node_budget: Arc::default(),
            max_streams: 10_000,
            control_streams: 1,
            round_trip: Duration::ZERO,
            memory_budget: Arc::default(),
            is_trusted: false,
        }
    }
}

/// The gateway's handle to one tunnel.
#[derive(Clone, Debug)]
pub struct Tunnel {
    sender: engine::client::SendRequest<Bytes>,
    shared: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    load: Arc<TunnelLoad>,
    config: GatewaySideConfig,
    traffic: Arc<IoActivity>,
    suspect: AtomicBool,
    /// Whether a probe should be sent before it is due.
    probe_requested: AtomicBool,
    /// Time of the probe since which nothing has been read, in milliseconds from `started_at`; 0 if there is none.
    probe_sent_ms: AtomicU64,
    /// Notified when there is such a probe.
    probe_notify: Notify,
    /// Time of the PING without an answer, in milliseconds from `started_at`; 0 if there is none.
    ping_sent_ms: AtomicU64,
    /// Number of bytes that had been read from the socket at the time of that PING.
    read_at_ping: AtomicU64,
    started_at: Instant,
    draining: AtomicBool,
    round_trip_us: AtomicU64,
    long_targets: AtomicBool,
    upgrade_bodies: AtomicBool,
    close_token: CancellationToken,
    /// Token that is cancelled with `draining`, for tasks that wait for it. It is cancelled with `close` as well.
    leaving_token: CancellationToken,
}

impl Inner {
    fn new(load: Arc<TunnelLoad>, traffic: Arc<IoActivity>, config: &GatewaySideConfig) -> Self {
        let round_trip = u64::try_from(config.round_trip.as_micros()).unwrap_or(u64::MAX);
        let close_token = CancellationToken::new();
        Self {
            load,
            config: config.clone(),
            traffic,
            suspect: AtomicBool::new(false),
            probe_requested: AtomicBool::new(false),
            probe_sent_ms: AtomicU64::new(0),
            probe_notify: Notify::new(),
            ping_sent_ms: AtomicU64::new(0),
            read_at_ping: AtomicU64::new(0),
            started_at: Instant::now(),
            draining: AtomicBool::new(false),
            round_trip_us: AtomicU64::new(round_trip),
            long_targets: AtomicBool::new(false),
            upgrade_bodies: AtomicBool::new(false),
            leaving_token: close_token.child_token(),
            close_token,
        }
    }

    /// Records that a PING was sent.
    fn record_ping(&self) {
        self.read_at_ping.store(self.traffic.bytes_read(), Relaxed);
        let elapsed_ms = u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.ping_sent_ms.store(elapsed_ms.max(1), Relaxed);
    }

    /// Records that every PING was answered.
    fn clear_ping(&self) {
        self.ping_sent_ms.store(0, Relaxed);
    }

    /// Whether the tunnel makes no real progress, although single bytes arrive.
    fn is_stuck(&self) -> bool {
        let ping_sent_ms = self.ping_sent_ms.load(Relaxed);
        if ping_sent_ms == 0 {
            return false;
        }
        let unanswered_for = self
            .started_at
            .elapsed()
            .saturating_sub(Duration::from_millis(ping_sent_ms));
        let read = self
            .traffic
            .bytes_read()
            .saturating_sub(self.read_at_ping.load(Relaxed));
        unanswered_for >= STUCK_AFTER && read < STUCK_MAX_BYTES
    }

    /// Records the time since which a probe is unanswered.
    fn record_unanswered_probe(&self, probe_sent_at: Option<Instant>) {
        let after = probe_sent_at.map(|probed| probed.saturating_duration_since(self.started_at));
        let after = after.map_or(0, |after| {
            u64::try_from(after.as_millis()).unwrap_or(1).max(1)
        });
        let before = self.probe_sent_ms.load(Relaxed);
        self.probe_sent_ms.store(after, Relaxed);
        if before == 0 && after > 0 {
            self.probe_notify.notify_waiters();
        }
    }
}

/// An opened stream: its sending half, and the response to wait for.
#[derive(Debug)]
pub struct OpenStream {
    /// The request's body, or the near half of a session.
    pub send: StreamSender,
    /// Response on the stream.
    pub response: StreamResponse,
}

/// Response on an opened stream.
#[derive(Debug)]
pub struct StreamResponse {
    inner: engine::client::ResponseFuture,
    counter: Option<ByteCounter>,
    /// Entry among the streams that can hold unread bytes: a response may arrive long before it is read.
    buffered: Option<BufferedStream>,
    interim_count: usize,
}

impl Tunnel {
    /// Opens a stream. No other function opens streams to an edge.
    ///
    /// `head` is the request as the upstream receives it: its method, path, optional `:authority`, and fields that are ready
    /// for HTTP/2 (see [`crate::headers`]). With `end_stream` nothing follows the head. A [`TargetOverflow`] among its
    /// extensions is sent here.
    ///
    /// # Errors
    /// If the tunnel is gone, drains, has its maximum number of streams, or cannot carry the request.
    pub async fn open(
        &self,
        mut head: Request<()>,
        kind: &StreamKind,
        target: &Target,
        end_stream: bool,
    ) -> Result<OpenStream, StreamError> {
        self.open_kept(&mut head, kind, target, end_stream).await
    }

    /// Opens a stream, and leaves the caller the head, with the fields that this function adds. The head of a plain request
    /// without a [`TargetOverflow`] may open another stream for the same target; any other head has changed too much.
    ///
    /// # Errors
    /// As [`Tunnel::open`].
    pub async fn open_kept(
        &self,
        head: &mut Request<()>,
        kind: &StreamKind,
        target: &Target,
        end_stream: bool,
    ) -> Result<OpenStream, StreamError> {
        prepare_head(head, kind, target)?;
        let overflow = head.extensions_mut().remove::<TargetOverflow>();
        self.check_support(head, kind, overflow.is_some())?;
        let Some(TargetOverflow(overflow)) = overflow else {
            return self.open_http2_stream(head, end_stream).await;
        };
        let fields = head.headers_mut();
        fields.insert(wire::TARGET_REST, HeaderValue::from(overflow.len()));
        // Content-Length would not match the bytes of the stream.
        if let Some(length) = fields.remove(CONTENT_LENGTH) {
            fields.insert(wire::CONTENT, length);
        }
        let mut opened = self.open_http2_stream(head, false).await?;
        let sent = if end_stream {
            opened.send.send_last(overflow).await
        } else {
            opened.send.send_data(overflow).await
        };
        // An edge that refuses the request stops reading it and sends the reason in its response.
        drop(sent);
        Ok(opened)
    }

    /// Opens a stream for a request that another gateway has forwarded. The first `overflow_len` bytes of its body are the rest
    /// of its target.
    ///
    /// # Errors
    /// As [`Tunnel::open`].
    pub async fn open_forwarded(
        &self,
        mut head: Request<()>,
        (kind, target): (&StreamKind, &Target),
        (overflow_len, end_stream): (usize, bool),
    ) -> Result<OpenStream, StreamError> {
        prepare_head(&mut head, kind, target)?;
        let fields = head.headers_mut();
        if overflow_len > 0 {
            fields.insert(wire::TARGET_REST, HeaderValue::from(overflow_len));
        }
        // The receiver reads the length of a body that is only a part of the stream from a field of its own.
        let is_part_of_stream = overflow_len > 0 || matches!(kind, StreamKind::Upgrade(_));
        if is_part_of_stream && let Some(length) = fields.remove(CONTENT_LENGTH) {
            fields.insert(wire::CONTENT, length);
        }
        self.check_support(&head, kind, overflow_len > 0)?;
        self.open_http2_stream(&head, end_stream).await
    }

    /// Checks that the version of the edge supports the request.
    fn check_support(
        &self,
        head: &Request<()>,
        kind: &StreamKind,
        has_overflow: bool,
    ) -> Result<(), StreamError> {
        if has_overflow && !self.shared.long_targets.load(Relaxed) {
            return Err(StreamError::ProtocolViolation(
                "the edge's version does not support request targets of more than 65534 bytes; upgrade the edge",
            ));
        }
        let is_upgrade = matches!(kind, StreamKind::Upgrade(_));
        if is_upgrade && !self.sender.is_extended_connect_protocol_enabled() {
            return Err(StreamError::ProtocolViolation(
                "the edge has not announced support for upgrades",
            ));
        }
        let has_content = is_upgrade && head.headers().contains_key(wire::CONTENT);
        if has_content && !self.shared.upgrade_bodies.load(Relaxed) {
            // An older edge would mistake the body for the first bytes of the session.
            return Err(StreamError::ProtocolViolation(
                "the edge's version does not support upgrades with a body; upgrade the edge",
            ));
        }
        Ok(())
    }

    /// Opens a stream to a peer that is not an edge, such as an upstream. `head` is sent unchanged.
    ///
    /// # Errors
    /// As [`Tunnel::open`].
    pub async fn send_request(
        &self,
        head: &Request<()>,
        end_stream: bool,
    ) -> Result<OpenStream, StreamError> {
        self.open_http2_stream(head, end_stream).await
    }

    /// Returns the configuration for a connection inside a stream of this tunnel, to an upstream, which is never trusted. The
    /// unread bytes of its streams count against the same budget.
    pub fn nested_config(&self) -> GatewaySideConfig {
        let mut config = GatewaySideConfig {
            is_trusted: false,
            control_streams: 0,
            ..self.shared.config.clone()
        };
        // gRPC servers end connections with frequent PINGs.
        config.keepalive.unanswered_after = None;
        config
    }

    /// Opens the control stream (see [`crate::control_stream`]).
    ///
    /// # Errors
    /// If the tunnel is gone, or the edge does not take the stream.
    pub async fn open_control_stream(&self) -> Result<ControlStream, StreamError> {
        let mut head = Request::new(());
        *head.method_mut() = Method::POST;
        let version = HeaderValue::from(wire::VERSION);
        head.headers_mut().insert(wire::CONTROL, version);
        let opened = self.open_http2_stream(&head, false).await?;
        let (head, receive) = opened.response.await?.into_parts();
        if !head.status.is_success() {
            return Err(StreamError::ProtocolViolation(
                "the edge refused the control stream",
            ));
        }
        Ok(ControlStream::new(opened.send, receive))
    }

    async fn open_http2_stream(
        &self,
        head: &Request<()>,
        end_stream: bool,
    ) -> Result<OpenStream, StreamError> {
        let guard = OpenStreamGuard::new(&self.shared.load, self.shared.config.max_streams)
            .ok_or(StreamError::Busy)?;
        let path = head.uri().path_and_query();
        let path_len = path.map_or(0, |path| path.as_str().len());
        if headers::header_list_size(head.headers()) + path_len > wire::MAX_HEAD {
            return Err(StreamError::TooLarge);
        }
        let mut ready_sender = self.sender.clone().ready().await?;
        let (inner, send) = ready_sender.send_request(head, end_stream)?;
        let counter = ByteCounter::new(guard.clone());
        Ok(OpenStream {
            send: StreamSender::new(send, ByteCounter::new(guard), end_stream),
            response: StreamResponse {
                buffered: (inner.flow_control()).map(|flow| counter.register_receiver(flow)),
                inner,
                counter: Some(counter),
                interim_count: 0,
            },
        })
    }

    /// Returns the load of the tunnel.
    pub fn load(&self) -> &Arc<TunnelLoad> {
        &self.shared.load
    }

    /// Whether new streams may be opened: the tunnel is not known to be dead, and does not drain.
    pub fn is_open(&self) -> bool {
        !self.is_suspect()
            && !self.shared.draining.load(Relaxed)
            && !self.shared.close_token.is_cancelled()
    }

    /// Whether a probe is unanswered, or the tunnel has made no real progress since the last PING.
    pub fn is_suspect(&self) -> bool {
        self.shared.suspect.load(Relaxed) || self.shared.is_stuck()
    }

    /// Returns the time for which a probe has been unanswered, or zero if there is no such probe. Even before the tunnel is
    /// suspect, a long time may show that another tunnel would be better.
    pub fn unanswered_for(&self) -> Duration {
        match self.shared.probe_sent_ms.load(Relaxed) {
            0 => Duration::ZERO,
            probed => self
                .shared
                .started_at
                .elapsed()
                .saturating_sub(Duration::from_millis(probed)),
        }
    }

    /// Waits until there is a probe without an answer: for ever, if the tunnel ends before.
    pub async fn wait_for_unanswered_probe(&self) {
        let notified = self.shared.probe_notify.notified();
        if self.shared.probe_sent_ms.load(Relaxed) == 0 {
            notified.await;
        }
    }

    /// Returns the time since the last read.
    pub fn idle_for(&self) -> Duration {
        self.shared.traffic.last_read().elapsed()
    }

    /// Requests an immediate probe, unless a probe is outstanding, for code that cannot wait until the next one is due.
    pub fn request_probe(&self) {
        self.shared.probe_requested.store(true, Relaxed);
        self.shared.load.driver_waker().wake();
    }

    /// Whether the tunnel accepts no more streams because one end leaves.
    pub fn is_draining(&self) -> bool {
        self.shared.draining.load(Relaxed)
    }

    /// Stops the opening of new streams. Open streams continue.
    pub fn drain(&self) {
        self.shared.draining.store(true, Relaxed);
        self.leave();
    }

    /// Cancels the tasks that depend on the tunnel (see [`Tunnel::leaving_token`]). Streams may still be opened.
    pub fn leave(&self) {
        self.shared.leaving_token.cancel();
    }

    /// Returns the token that is cancelled when one end leaves or the tunnel is closed. The tunnel is then unsuitable for
    /// later use.
    pub fn leaving_token(&self) -> &CancellationToken {
        &self.shared.leaving_token
    }

    /// Whether the tunnel has been closed, or has ended by itself.
    pub fn is_closed(&self) -> bool {
        self.shared.close_token.is_cancelled()
    }

    /// Closes the tunnel at once, with all its streams.
    pub fn close(&self) {
        self.shared.close_token.cancel();
    }

    /// Sets whether requests are allowed to have a [`TargetOverflow`] from now on.
    pub fn allow_long_targets(&self, allowed: bool) {
        self.shared.long_targets.store(allowed, Relaxed);
    }

    /// Sets whether upgrades are allowed to have a body ([`wire::CONTENT`]) from now on.
    pub fn allow_upgrade_bodies(&self, allowed: bool) {
        self.shared.upgrade_bodies.store(allowed, Relaxed);
    }

    /// Returns the least of the recent round trips, at first that of the TLS handshake.
    pub fn round_trip(&self) -> Duration {
        Duration::from_micros(self.shared.round_trip_us.load(Relaxed))
    }
}

fn prepare_head(
    head: &mut Request<()>,
    kind: &StreamKind,
    target: &Target,
) -> Result<(), StreamError> {
    let target = target.to_host_port();
    match kind {
        StreamKind::Tcp => {
            *head.method_mut() = Method::CONNECT;
            *head.uri_mut() = Uri::builder()
                .authority(target)
                .build()
                .map_err(|_| StreamError::ProtocolViolation("the target is not an authority"))?;
            return Ok(());
        }
        StreamKind::Upgrade(token) => {
            let method = HeaderValue::from_str(head.method().as_str()).map_err(|_| {
                StreamError::ProtocolViolation("the method is not a valid header value")
            })?;
            head.headers_mut().insert(wire::METHOD, method);
            *head.method_mut() = Method::CONNECT;
            head.extensions_mut().insert(Protocol::from(token.as_str()));
        }
        StreamKind::Request => {}
    }
    let target = HeaderValue::try_from(target)
        .map_err(|_| StreamError::ProtocolViolation("the target is not a valid header value"))?;
    head.headers_mut().insert(wire::TARGET, target);
    Ok(())
}

impl StreamResponse {
    /// Returns the next interim response (1xx), if one arrives before the final response.
    ///
    /// # Errors
    /// If the stream was reset or the tunnel is gone.
    pub async fn next_informational(&mut self) -> Result<Option<Response<()>>, StreamError> {
        let interim =
            poll_fn(
                |cx| match BufferedStream::poll_evicted(self.buffered.as_ref(), cx) {
                    Poll::Ready(()) => Poll::Ready(Some(Err(StreamError::Evicted))),
                    Poll::Pending => {
                        let interim = self.inner.poll_informational(cx);
                        interim.map(|interim| interim.map(|head| head.map_err(StreamError::from)))
                    }
                },
            )
            .await;
        if interim.is_some() {
            self.count_interim()?;
        }
        interim.transpose()
    }

    fn count_interim(&mut self) -> Result<(), StreamError> {
        self.interim_count += 1;
        if self.interim_count > wire::MAX_INTERIM_RESPONSES {
            return Err(StreamError::ProtocolViolation(
                "too many interim responses came without a final response",
            ));
        }
        Ok(())
    }
}

impl Future for StreamResponse {
    type Output = Result<Response<StreamReceiver>, StreamError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if BufferedStream::poll_evicted(self.buffered.as_ref(), cx).is_ready() {
            return Poll::Ready(Err(StreamError::Evicted));
        }
        // The engine would buffer interim responses without a limit until the final response is polled.
        while let Some(interim) = ready!(self.inner.poll_informational(cx)) {
            interim?;
            self.count_interim()?;
        }
        let response = ready!(self.inner.poll_unpin(cx))?;
        let counter = self.counter.take().ok_or(StreamError::ProtocolViolation(
            "the response was read twice",
        ))?;
        let buffered = self.buffered.take();
        Poll::Ready(Ok(
            response.map(|body| StreamReceiver::new(body, counter, buffered))
        ))
    }
}

#[cfg(test)]
mod tests;
