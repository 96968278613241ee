//! Client-side IO below HTTP, and the state of the connection.
//!
//! The response body and the socket are coordinated here. A body that breaks waits until the bytes before it are flushed. The
//! socket is then dropped with a reset and without `close_notify`. The state also measures for how long a head has been
//! incomplete, which limits slow heads without limiting idle clients. While no task reads from a client (its body waits for the
//! upstream), only `DisconnectWatch` detects a disconnect.

use super::{
    header_timeout::HeaderBlockTracker,
    request_line::{LongTarget, RequestLine},
};
use crate::{
    config::ErrorFormat, error::Reason, proxy::error_response::unparsed::unparsed_response,
};
use bytes::Bytes;
use causeway_rt::socket::{ResetOnClose, Socket};
use causeway_tunnel::{eviction::Eviction, wire};
use futures_util::task::AtomicWaker;
use std::{
    future::{Future, poll_fn},
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::Notify,
    time::{Instant, Sleep, sleep, sleep_until},
};
use tokio_rustls::server::TlsStream;

/// Time without progress of the socket after which a connection that lost a stream by eviction ends.
const STALL_LIMIT: Duration = Duration::from_secs(2);

/// State that a socket and the bodies above it share.
#[derive(Debug)]
pub struct ConnState {
    created_at: Instant,
    /// Whether the connection has to be closed by a reset.
    is_broken: AtomicBool,
    /// Whether a broken body waits for a flush.
    is_flushing: AtomicBool,
    flushed: AtomicWaker,
    /// Whether the next byte read begins a new head.
    expects_head: AtomicBool,
    /// Start of the head that is being received, in milliseconds after `created_at`, plus one; 0 means none.
    head_started_at: AtomicU64,
    /// Eviction handle of the stream that carries the response, if the client speaks HTTP/1.1.
    eviction: Mutex<Option<Eviction>>,
    /// Number of reads that returned bytes of HTTP/2, and of such bytes that a body or a session has taken.
    http2_activity: AtomicU64,
    /// Time since which the socket accepts no bytes, in milliseconds after `created_at`, plus one; 0 means none.
    blocked_since: AtomicU64,
    /// Time since which a flush is incomplete, in the same unit. TLS has accepted the bytes, and the socket has not.
    unflushed_since: AtomicU64,
    /// Time at which the last write or flush that had to wait was complete, in the same unit.
    sent_at: AtomicU64,
    /// Notified when a stream was evicted, if the client speaks HTTP/2.
    stream_lost: Notify,
    /// Whether the connection has become a session, whose bytes are not HTTP.
    is_session: AtomicBool,
    /// Whether the request body is incomplete, if the client speaks HTTP/1.1.
    has_open_body: AtomicBool,
    /// Whether the request may begin a session, whose bytes and end may come before the response.
    may_begin_session: AtomicBool,
    /// Whether bytes after the request were read before the response was complete. The next read may then begin within a head.
    has_read_ahead: AtomicBool,
    /// The part of the request target that is not passed to hyper.
    long_target: Mutex<Option<LongTarget>>,
    /// Reason in the response to a head that hyper cannot parse.
    parse_failure: Mutex<Option<Reason>>,
}

impl Default for ConnState {
    fn default() -> Self {
        Self {
            created_at: Instant::now(),
            is_broken: AtomicBool::new(false),
            is_flushing: AtomicBool::new(false),
            flushed: AtomicWaker::new(),
            // The first head is due from the start, even before its first byte arrives.
            expects_head: AtomicBool::new(false),
            head_started_at: AtomicU64::new(1),
            eviction: Mutex::default(),
            http2_activity: AtomicU64::new(0),
            blocked_since: AtomicU64::new(0),
            unflushed_since: AtomicU64::new(0),
            sent_at: AtomicU64::new(1),
            stream_lost: Notify::new(),
            is_session: AtomicBool::new(false),
            has_open_body: AtomicBool::new(false),
            may_begin_session: AtomicBool::new(false),
            has_read_ahead: AtomicBool::new(false),
            long_target: Mutex::default(),
            parse_failure: Mutex::default(),
        }
    }
}

impl ConnState {
    /// Marks the connection as broken. Becomes ready when the bytes written before are flushed.
    pub fn poll_flushed(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.is_broken.swap(true, Relaxed) {
            if !self.is_flushing.load(Relaxed) {
                return Poll::Ready(());
            }
        } else {
            self.is_flushing.store(true, Relaxed);
        }
        self.flushed.register(cx.waker());
        if self.is_flushing.load(Relaxed) {
            Poll::Pending
        } else {
            Poll::Ready(())
        }
    }

    /// Whether a head is being received. Bytes that are written then are not a response of the service.
    pub fn is_reading_head(&self) -> bool {
        self.head_started_at.load(Relaxed) > 0
    }

    /// Marks the head of a request as complete. For HTTP/2 the socket itself does this.
    pub fn head_complete(&self) {
        self.head_started_at.store(0, Relaxed);
    }

    /// Begins an HTTP/1.1 request: whether it has a body, and whether it may begin a session. Returns the part of its target that was
    /// not passed to hyper.
    pub fn begin_request(&self, has_body: bool, may_begin_session: bool) -> Option<LongTarget> {
        self.may_begin_session.store(may_begin_session, Relaxed);
        self.head_complete();
        // A head that was read together with the request before it begins with no further read.
        self.expects_head.store(false, Relaxed);
        self.has_open_body.store(has_body, Relaxed);
        lock(&self.long_target).take()
    }

    /// Marks the connection as a session: from now on all bytes pass unchanged, and none are discarded.
    pub fn begin_session(&self) {
        self.is_session.store(true, Relaxed);
    }

    fn is_session(&self) -> bool {
        self.is_session.load(Relaxed)
    }

    /// Whether a client that speaks HTTP/1.1 has sent a whole request, its response is not complete, and no session can follow.
    fn awaits_response(&self) -> bool {
        let is_between_requests = self.expects_head.load(Relaxed) || self.is_reading_head();
        let is_other = self.http2_activity() > 0
            || self.is_session()
            || self.may_begin_session.load(Relaxed)
            || self.has_open_body.load(Relaxed);
        !is_between_requests && !is_other
    }

    /// Marks the request body as complete.
    pub fn body_ended(&self) {
        self.has_open_body.store(false, Relaxed);
    }

    /// Returns the reason in the response to a head that hyper cannot parse.
    pub fn parse_failure(&self) -> Option<Reason> {
        *lock(&self.parse_failure)
    }

    /// Marks a response as complete: the next bytes begin a new head.
    pub fn response_complete(&self) {
        self.expects_head.store(true, Relaxed);
    }

    /// Sets the stream whose eviction ends the connection, because it carries the response.
    pub fn set_eviction(&self, eviction: Option<Eviction>) {
        *lock(&self.eviction) = eviction;
    }

    /// Waits until the stream that carries the response is evicted. Must be polled after the future that reads the stream.
    pub async fn wait_evicted(&self) {
        poll_fn(|cx| match lock(&self.eviction).as_ref() {
            Some(eviction) => eviction.poll_evicted(cx),
            None => Poll::Pending,
        })
        .await;
    }

    /// Records that bytes of HTTP/2 were read.
    pub(super) fn note_http2_read(&self) {
        self.http2_activity.fetch_add(1, Relaxed);
    }

    /// Records that a body or a session has taken bytes. Has no effect on HTTP/1.1.
    pub fn note_taken(&self) {
        if self.http2_activity.load(Relaxed) > 0 {
            self.http2_activity.fetch_add(1, Relaxed);
        }
    }

    /// Returns a number that changes with each activity of an HTTP/2 client; 0 for HTTP/1.1.
    pub(super) fn http2_activity(&self) -> u64 {
        self.http2_activity.load(Relaxed)
    }

    /// Records that a stream was evicted.
    pub fn lost_stream(&self) {
        self.stream_lost.notify_one();
    }

    /// Waits until the socket makes no progress after a stream was evicted. The bytes that HTTP/2 has queued for the stream are
    /// freed only with the connection.
    pub async fn wait_stalled(&self) {
        loop {
            self.stream_lost.notified().await;
            while self.blocked_since.load(Relaxed) > 0 {
                if self.blocked_for() >= STALL_LIMIT {
                    return;
                }
                sleep(STALL_LIMIT / 2).await;
            }
        }
    }

    fn blocked_for(&self) -> Duration {
        let since = self.instant(&self.blocked_since);
        since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Returns the current time in milliseconds after `created_at`, plus one.
    fn now_millis(&self) -> u64 {
        u64::try_from(self.created_at.elapsed().as_millis()).unwrap_or(u64::MAX - 1) + 1
    }

    /// Returns the time that a field has recorded, if it has recorded one.
    fn instant(&self, field: &AtomicU64) -> Option<Instant> {
        let millis = field.load(Relaxed).checked_sub(1)?;
        Some(self.created_at + Duration::from_millis(millis))
    }

    /// Returns the time since which the socket has accepted no byte of those that wait for it; `None` if no bytes wait.
    pub(super) fn unsent_since(&self) -> Option<Instant> {
        let blocked = self.instant(&self.blocked_since);
        blocked.or_else(|| self.instant(&self.unflushed_since))
    }

    /// Returns the time since which no bytes have waited for the socket; `None` if bytes wait.
    pub(super) fn sent_at(&self) -> Option<Instant> {
        let is_sent = self.unsent_since().is_none();
        is_sent.then(|| self.instant(&self.sent_at)).flatten()
    }

    /// Handles the outcome of a write to the socket.
    fn note_write<T>(&self, polled: &Poll<T>) {
        let was_blocked = self.blocked_since.load(Relaxed) > 0;
        if polled.is_pending() {
            if !was_blocked {
                self.blocked_since.store(self.now_millis(), Relaxed);
            }
        } else if was_blocked || self.unflushed_since.load(Relaxed) > 0 {
            self.blocked_since.store(0, Relaxed);
            // The next flush starts it again.
            self.unflushed_since.store(0, Relaxed);
            self.sent_at.store(self.now_millis(), Relaxed);
        }
    }

    /// Waits until a head has been incomplete for longer than `head_timeout`.
    pub async fn wait_slow_head(&self, head_timeout: Duration) {
        let mut deadline = Instant::now();
        loop {
            sleep_until(deadline).await;
            let now = Instant::now();
            let began = self.instant(&self.head_started_at);
            // A head that begins later is not late before the next check, so no notification is needed.
            deadline = began.unwrap_or(now) + head_timeout;
            if deadline <= now {
                return;
            }
        }
    }

    /// Records that bytes were read. Returns whether they begin a head, as far as that is known.
    fn note_read(&self) -> bool {
        if self.has_open_body.load(Relaxed) {
            // The bytes are of the body. A head may follow in them, so no later read is known to begin it. If the rest of that
            // head never arrives, the connection is idle.
            if self.expects_head.load(Relaxed) {
                self.has_read_ahead.store(true, Relaxed);
            }
            return false;
        }
        if self.expects_head.swap(false, Relaxed) {
            self.start_head();
            return !self.has_read_ahead.swap(false, Relaxed);
        }
        if !self.is_reading_head() {
            self.has_read_ahead.store(true, Relaxed);
        }
        false
    }

    fn start_head(&self) {
        self.head_started_at.store(self.now_millis(), Relaxed);
    }

    /// Records a change of the header blocks of an HTTP/2 client, see [`HeaderBlockTracker::track`].
    fn note_header_block(&self, open: Option<bool>) {
        match open {
            // The first head is due from the start.
            Some(true) if self.head_started_at.load(Relaxed) == 1 => {}
            Some(true) => self.start_head(),
            Some(false) => self.head_complete(),
            None => {}
        }
    }

    /// Handles the outcome of a flush of the socket.
    fn note_flush<T>(&self, polled: &Poll<T>) {
        let was_pending = self.unflushed_since.load(Relaxed) > 0;
        if polled.is_pending() {
            if !was_pending {
                self.unflushed_since.store(self.now_millis(), Relaxed);
            }
            return;
        }
        if was_pending {
            self.unflushed_since.store(0, Relaxed);
            self.sent_at.store(self.now_millis(), Relaxed);
        }
        if self.is_flushing.swap(false, Relaxed) {
            self.flushed.wake();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ResetOnClose for ConnState {
    fn abort(&self) {
        self.is_broken.store(true, Relaxed);
    }
}

/// Connection of a client, plain or with TLS.
#[derive(Debug)]
pub struct ClientIo {
    transport: Transport,
    condition: Arc<ConnState>,
    header_blocks: HeaderBlockTracker,
    negotiated: Agreed,
    request_line: RequestLine,
    parse_error_response: Unparsed,
    disconnect_watch: DisconnectWatch,
    /// Whether our half of the connection was closed normally.
    is_shut_down: bool,
    /// Number of bytes discarded after that, and the timer that limits the discarding.
    discarded: usize,
    linger_timer: Option<Pin<Box<Sleep>>>,
}

/// Response to a head that hyper cannot parse. It replaces hyper's own response, which has no text.
///
/// hyper answers such a head itself before it returns the error. Its response is recognized by the status, the length of the
/// body, and the absence of the fields that all responses of a gateway have.
#[derive(Debug)]
struct Unparsed {
    error_format: ErrorFormat,
    response: Vec<u8>,
    written_len: usize,
}

impl Unparsed {
    fn new(error_format: ErrorFormat) -> Self {
        Self {
            error_format,
            response: Vec::new(),
            written_len: 0,
        }
    }

    /// Prepares the replacement if these bytes are one of hyper's own responses. Returns the reason, if there is one.
    fn prepare_replacement(&mut self, bytes: &[u8], line: &RequestLine) -> Option<Reason> {
        let status = bytes.strip_prefix(b"HTTP/1.1 4")?;
        let head = String::from_utf8_lossy(bytes).to_ascii_lowercase();
        let is_hyper_response =
            head.contains("\r\ncontent-length: 0\r\n") && !head.contains("\r\nvia: ");
        if !self.response.is_empty() || !bytes.ends_with(b"\r\n\r\n") || !is_hyper_response {
            return None;
        }
        let reason = match status.first_chunk() {
            _ if line.has_other_version() => Reason::VersionNotSupported,
            Some(b"00") => Reason::Malformed,
            Some(b"31") if !line.is_target_too_long() => Reason::HeaderTooLarge,
            _ => Reason::UriTooLong,
        };
        self.response = unparsed_response(self.error_format, reason);
        Some(reason)
    }

    fn is_pending(&self) -> bool {
        !self.response.is_empty()
    }
}

/// HTTP version that the handshake negotiated, which binds both sides (RFC 7301, section 3.2).
#[derive(Clone, Copy, Debug)]
enum Agreed {
    /// The client offered no protocol or does not use TLS, so its first bytes decide.
    NotNegotiated,
    Http1,
    Http2,
}

impl Agreed {
    /// Returns the version that a connection has negotiated, at a listener that is a proxy or not.
    fn of(stream: &TlsStream<Socket>, is_proxy: bool) -> Self {
        match stream.get_ref().1.alpn_protocol() {
            None => Self::NotNegotiated,
            // Clients in Go offer h2 to a proxy, and then send an HTTP/1.1 CONNECT.
            Some(wire::ALPN_H2) if is_proxy => Self::NotNegotiated,
            Some(wire::ALPN_H2) => Self::Http2,
            Some(_) => Self::Http1,
        }
    }

    /// Checks that the client speaks the HTTP version that ALPN negotiated.
    fn check(self, header_blocks: &HeaderBlockTracker) -> io::Result<()> {
        let is_mismatch = match self {
            Self::NotNegotiated => false,
            Self::Http1 => header_blocks.is_http2(),
            Self::Http2 => header_blocks.is_other_protocol(),
        };
        if is_mismatch {
            let detail = "the client uses another HTTP version than the one negotiated by ALPN";
            return Err(io::Error::new(io::ErrorKind::InvalidData, detail));
        }
        Ok(())
    }
}

#[derive(Debug)]
enum Transport {
    /// Socket, and bytes that were read from it and not processed yet.
    Plain(Socket, Bytes),
    Tls(Box<TlsStream<Socket>>),
}

impl ClientIo {
    /// Returns a connection without TLS to a listener with this error format and this limit of targets. `unread` are bytes of the
    /// client that were read from the socket.
    pub fn plain(
        (socket, unread): (Socket, Bytes),
        condition: &Arc<ConnState>,
        error_config: (ErrorFormat, usize),
    ) -> Self {
        Self::new(
            Transport::Plain(socket, unread),
            Agreed::NotNegotiated,
            condition,
            error_config,
        )
    }

    /// Returns a connection whose TLS handshake is finished, at a listener that is a proxy or not.
    pub fn tls(
        (stream, is_proxy): (TlsStream<Socket>, bool),
        condition: &Arc<ConnState>,
        of: (ErrorFormat, usize),
    ) -> Self {
        let negotiated = Agreed::of(&stream, is_proxy);
        Self::new(Transport::Tls(Box::new(stream)), negotiated, condition, of)
    }

    fn new(
        transport: Transport,
        negotiated: Agreed,
        condition: &Arc<ConnState>,
        (error_format, max_target): (ErrorFormat, usize),
    ) -> Self {
        Self {
            transport,
            condition: condition.clone(),
            header_blocks: HeaderBlockTracker::default(),
            negotiated,
            request_line: RequestLine::new(max_target),
            parse_error_response: Unparsed::new(error_format),
            disconnect_watch: DisconnectWatch::default(),
            is_shut_down: false,
            discarded: 0,
            linger_timer: None,
        }
    }
}

impl Transport {
    fn poll_read(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Plain(_, unread) if !unread.is_empty() => {
                let length = unread.len().min(buf.remaining());
                buf.put_slice(&unread.split_to(length));
                Poll::Ready(Ok(()))
            }
            Self::Plain(socket, _) => Pin::new(socket).poll_read(cx, buf),
            Self::Tls(stream) => ignore_missing_close_notify(Pin::new(stream).poll_read(cx, buf)),
        }
    }

    fn poll_write(&mut self, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self {
            Self::Plain(socket, _) => Pin::new(socket).poll_write(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }
}

impl ClientIo {
    /// Writes the replacement response if `bytes` are hyper's own response to a head that it cannot parse.
    fn poll_unparsed(
        &mut self,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Option<Poll<io::Result<usize>>> {
        if self.condition.is_session() || !self.condition.is_reading_head() {
            return None;
        }
        if let Some(reason) = self
            .parse_error_response
            .prepare_replacement(bytes, &self.request_line)
        {
            *lock(&self.condition.parse_failure) = Some(reason);
        }
        let length = bytes.len();
        let is_pending = self.parse_error_response.is_pending();
        is_pending.then(|| self.poll_write_unparsed(cx).map_ok(|()| length))
    }

    fn poll_write_unparsed(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let unparsed = &mut self.parse_error_response;
        while let Some(unwritten @ [_, ..]) = unparsed.response.get(unparsed.written_len..) {
            unparsed.written_len += ready!(self.transport.poll_write(cx, unwritten))?;
        }
        Poll::Ready(Ok(()))
    }

    /// Whether bytes of the client may be unread. Closing the connection then would reset it, and the client would lose the
    /// response (RFC 9112, section 9.6).
    fn may_have_unread(&self) -> bool {
        let condition = &self.condition;
        !self.disconnect_watch.is_reading
            && !condition.is_session()
            && !condition.is_broken.load(Relaxed)
    }

    /// Discards the bytes that still arrive. Becomes ready when the client has closed its side or the time is over.
    fn poll_discard(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let linger_timer = self
            .linger_timer
            .get_or_insert_with(|| Box::pin(sleep(LINGER)));
        if linger_timer.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        let mut discard_buffer = [0; 8192];
        while self.discarded < MAX_DISCARDED {
            let mut buf = ReadBuf::new(&mut discard_buffer);
            let read = ready!(self.transport.poll_read(cx, &mut buf));
            if read.is_err() || buf.filled().is_empty() {
                break;
            }
            self.discarded += buf.filled().len();
        }
        Poll::Ready(())
    }
}

/// Time for which the bytes of a client are discarded after the last response.
const LINGER: Duration = Duration::from_secs(2);
/// Maximum number of discarded bytes, which is more than a head that is refused for its size.
const MAX_DISCARDED: usize = 4 << 20;

/// Interval between checks of a client from which no task reads.
const DISCONNECT_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Detects that a client has disconnected while no task reads from its connection.
///
/// The system reports a disconnect only to a task that reads, and a body that waits for its upstream is not read. The system's
/// keepalive turns a lost client into an error of the socket. This type polls for that error, which TLS may have received
/// already. hyper reads nothing either while it has bytes behind a request whose response is not complete: an end of the
/// connection behind these bytes is then a disconnect, as it is without them. An end behind the bytes of a body is none, because
/// the body may be complete. If it is not, that is an error once it has been read.
#[derive(Debug, Default)]
struct DisconnectWatch {
    /// Whether a task waits for bytes and would be notified of a disconnect.
    is_reading: bool,
    timer: Option<Pin<Box<Sleep>>>,
}

impl DisconnectWatch {
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        (socket, condition): (&Socket, &ConnState),
    ) -> io::Result<()> {
        if self.is_reading {
            if self.timer.as_ref().is_some_and(|timer| timer.is_elapsed()) {
                self.timer = None;
            }
            return Ok(());
        }
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(sleep(DISCONNECT_CHECK_INTERVAL)));
        while timer.as_mut().poll(cx).is_ready() {
            socket.check_error()?;
            if condition.awaits_response() && socket.is_read_closed() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            timer
                .as_mut()
                .reset(Instant::now() + DISCONNECT_CHECK_INTERVAL);
        }
        Ok(())
    }
}

impl ResetOnClose for ClientIo {
    fn abort(&self) {
        self.condition.abort();
    }
}

impl Drop for ClientIo {
    /// Resets the connection if it is dropped early, as a drain does with the remaining ones.
    fn drop(&mut self) {
        if !self.is_shut_down || self.condition.is_broken.load(Relaxed) {
            match &self.transport {
                Transport::Plain(socket, _) => socket.abort(),
                Transport::Tls(stream) => stream.get_ref().0.abort(),
            }
        }
    }
}

impl AsyncRead for ClientIo {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let filled_before = buf.filled().len();
        loop {
            let polled = this.transport.poll_read(cx, buf);
            this.disconnect_watch.is_reading = polled.is_pending();
            if this.condition.is_session() {
                return polled;
            }
            let Some(received @ [_, ..]) = buf.filled_mut().get_mut(filled_before..) else {
                return polled;
            };
            if this.condition.note_read() {
                this.request_line.begin();
            }
            this.condition
                .note_header_block(this.header_blocks.track(received));
            if this.header_blocks.is_http2() {
                this.condition.note_http2_read();
            }
            this.negotiated.check(&this.header_blocks)?;
            let forwarded_len = this.request_line.rewrite(received);
            if let Some(long_target) = this.request_line.take_overflow() {
                *lock(&this.condition.long_target) = Some(long_target);
            }
            buf.set_filled(filled_before + forwarded_len);
            if forwarded_len > 0 {
                return polled;
            }
        }
    }
}

/// Treats a peer that closes without `close_notify` as an ordinary disconnect (trap 6).
fn ignore_missing_close_notify(polled: Poll<io::Result<()>>) -> Poll<io::Result<()>> {
    match polled {
        Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Poll::Ready(Ok(()))
        }
        other => other,
    }
}

impl AsyncWrite for ClientIo {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if let Some(written) = this.poll_unparsed(cx, buf) {
            return written;
        }
        let polled = this.transport.poll_write(cx, buf);
        this.condition.note_write(&polled);
        polled
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = match &mut this.transport {
            Transport::Plain(socket, _) => Pin::new(socket).poll_flush(cx),
            Transport::Tls(stream) => Pin::new(stream).poll_flush(cx),
        };
        this.condition.note_flush(&polled);
        let socket = match &this.transport {
            Transport::Plain(socket, _) => socket,
            Transport::Tls(stream) => stream.get_ref().0,
        };
        let watched = (socket, &*this.condition);
        this.disconnect_watch.poll(cx, watched)?;
        polled
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.is_shut_down {
            ready!(match &mut this.transport {
                Transport::Plain(socket, _) => Pin::new(socket).poll_shutdown(cx),
                Transport::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
            })?;
            this.is_shut_down = true;
        }
        if this.may_have_unread() {
            ready!(this.poll_discard(cx));
        }
        Poll::Ready(Ok(()))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if let [buf] = bufs
            && let Some(written) = this.poll_unparsed(cx, buf)
        {
            return written;
        }
        let polled = match &mut this.transport {
            Transport::Plain(socket, _) => Pin::new(socket).poll_write_vectored(cx, bufs),
            Transport::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        };
        this.condition.note_write(&polled);
        polled
    }

    fn is_write_vectored(&self) -> bool {
        match &self.transport {
            Transport::Plain(socket, _) => socket.is_write_vectored(),
            Transport::Tls(stream) => stream.is_write_vectored(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::idle_timer::IdleTimer, *};
    use tokio::time::timeout;

    const LIMIT: Duration = Duration::from_secs(3);
    const PENDING: Poll<()> = Poll::Pending;
    const READY: Poll<()> = Poll::Ready(());

    /// Returns the state of a connection whose only request is complete.
    fn after_request() -> (Arc<IdleTimer>, ConnState) {
        let idle = Arc::new(IdleTimer::default());
        drop(idle.begin_request());
        (idle, ConnState::default())
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_with_unsent_bytes_is_not_idle() {
        let (idle, socket) = after_request();
        let wait = || timeout(10 * LIMIT, idle.wait_idle(&socket, LIMIT));
        socket.note_write(&PENDING);
        // A plain socket has nothing to flush, while its writer waits.
        socket.note_flush(&READY);
        wait().await.expect_err("a write waits");
        socket.note_write(&READY);
        // TLS has accepted the rest.
        socket.note_flush(&PENDING);
        wait().await.expect_err("a flush waits");
        let flushing = async {
            sleep(LIMIT + LIMIT / 2).await;
            socket.note_flush(&READY);
            Instant::now()
        };
        let (flushed, idle) = tokio::join!(flushing, wait());
        idle.expect("all is sent");
        assert_eq!(flushed.elapsed(), LIMIT);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_nothing_after_its_requests_is_limited() {
        let (idle, socket) = after_request();
        let wait = || timeout(10 * LIMIT, idle.wait_unread(&socket, LIMIT));
        wait().await.expect_err("nothing is unsent");
        for unsent in [ConnState::note_write, ConnState::note_flush] {
            unsent(&socket, &PENDING);
            let request = idle.begin_request();
            wait().await.expect_err("a request is open");
            drop(request);
            let reading = async {
                for _ in 0..100 {
                    sleep(LIMIT / 2).await;
                    socket.note_write(&READY);
                    unsent(&socket, &PENDING);
                }
            };
            tokio::select! {
                () = idle.wait_unread(&socket, LIMIT) => panic!("the client reads"),
                () = reading => {}
            }
            wait().await.expect("the client reads nothing");
            socket.note_write(&READY);
        }
    }

    #[test]
    fn an_end_behind_unread_bytes_counts_only_if_they_can_be_no_body_and_no_session() {
        let state = ConnState::default();
        for (has_body, may_begin_session, awaits) in [
            (false, false, true),
            (true, false, false),
            (false, true, false),
        ] {
            state.begin_request(has_body, may_begin_session);
            assert_eq!(state.awaits_response(), awaits);
        }
        state.response_complete();
        assert!(!state.awaits_response());
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_of_a_body_begin_no_head() {
        let state = ConnState::default();
        state.begin_request(true, false);
        state.response_complete();
        assert!(!state.note_read());
        let slow = timeout(10 * LIMIT, state.wait_slow_head(LIMIT)).await;
        slow.expect_err("the upload continues");
        state.body_ended();
        assert!(!state.note_read(), "the head may have begun with the body");
        let slow = timeout(10 * LIMIT, state.wait_slow_head(LIMIT)).await;
        slow.expect("the next head has begun");
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_after_a_pipelined_request_begin_no_head() {
        for has_body in [false, true] {
            let state = ConnState::default();
            state.begin_request(false, false);
            assert!(!state.note_read(), "the second head");
            state.response_complete();
            state.begin_request(has_body, false);
            assert!(!state.note_read(), "the third head, or the body");
            let slow = timeout(10 * LIMIT, state.wait_slow_head(LIMIT)).await;
            slow.expect_err("the second request is open");
        }
    }
}
