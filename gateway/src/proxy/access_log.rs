//! Open streams, and the access record that each of them has: filled along the request path, written when the last part of the
//! stream is gone.
//!
//! The record also owns the stream's permit, so that the counted, the logged and the limited stream are the same. A path is
//! logged without its query, which may contain secrets. Refusals, and each session's begin and end, also leave a line in the
//! audit log (target `audit`).

use crate::proxy::request::is_connect;
use crate::{
    audit::AUDIT,
    config::AccessLog,
    error::{Error, Reason},
    metrics::{StreamGuard, StreamOutcome},
    proxy::{
        authn::ClientIdentity,
        authz::{Action, Authorize},
        limits::Permit,
        listener::{ClientConnection, Listener},
        route::Route,
        trace_context::Trace,
    },
    state::{Registry, TunnelId, policy::MatchedRule},
    worker::WorkerId,
};
use causeway_certs::NodeName;
use causeway_rt::{connection_limit::Busy, socket::ResetOnClose as _};
use causeway_tunnel::{copy::ByteCounters, eviction::Eviction};
use futures_util::task::AtomicWaker;
use http::{HeaderValue, Method, Request, StatusCode, header::AUTHORIZATION};
use slab::Slab;
use std::{
    collections::BTreeSet,
    fmt::Write as _,
    future::{Future, poll_fn},
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};
use tokio_util::sync::CancellationToken;

/// Maximum bytes of a path in a log line: lines wait in memory until the log is written.
const MAX_PATH_BYTES: usize = 4096;

/// The open streams of a gateway, by the worker that serves them.
#[derive(Debug)]
pub struct OpenStreams {
    workers: Box<[Mutex<Slab<Weak<AccessRecord>>>]>,
    /// Rises with each change that may refuse a stream which is open.
    generation: AtomicU64,
    authorizer: Arc<dyn Authorize>,
    registry: Registry,
    /// Selection of the streams that leave a line in the access log.
    log: AccessLog,
    /// Maximum time of a drain.
    drain: Duration,
}

/// The place of a stream among those that are open.
#[derive(Clone, Copy, Debug)]
struct StreamIndex(WorkerId, usize);

impl OpenStreams {
    /// No streams, of this many workers.
    pub fn new(
        workers: usize,
        (authorizer, registry): (Arc<dyn Authorize>, Registry),
        (log, drain): (AccessLog, Duration),
    ) -> Self {
        Self {
            workers: (0..workers).map(|_| Mutex::default()).collect(),
            generation: AtomicU64::new(0),
            authorizer,
            registry,
            log,
            drain,
        }
    }

    /// Returns the number of changes after which open streams are decided about again.
    pub(super) fn generation(&self) -> u64 {
        let changes = self.generation.load(Acquire);
        changes.wrapping_add(self.authorizer.generation())
    }

    /// Has all open streams checked again.
    pub fn request_recheck(&self) {
        self.generation.fetch_add(1, Release);
    }

    fn insert(&self, worker: WorkerId, record: &Arc<AccessRecord>) -> StreamIndex {
        StreamIndex(worker, self.worker(worker).insert(Arc::downgrade(record)))
    }

    fn remove(&self, StreamIndex(worker, index): StreamIndex) {
        self.worker(worker).try_remove(index);
    }

    fn worker(&self, worker: WorkerId) -> MutexGuard<'_, Slab<Weak<AccessRecord>>> {
        let streams = &self.workers[worker.0 % self.workers.len()];
        streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the streams of a worker of which this holds.
    pub(super) fn select(
        &self,
        worker: WorkerId,
        predicate: impl Fn(&AccessRecord) -> bool,
    ) -> Vec<Arc<AccessRecord>> {
        // Outside the lock: the last holder of a record removes it.
        let all: Vec<_> = self
            .worker(worker)
            .iter()
            .map(|(_, open)| open.clone())
            .collect();
        let open = all.iter().filter_map(Weak::upgrade);
        open.filter(|record| predicate(record)).collect()
    }
}

/// The request that a stream was allowed for.
#[derive(Debug)]
pub(super) struct GrantedAccess {
    pub(super) action: Action,
    pub(super) method: Method,
    /// The path of the request, without its query.
    pub(super) path: String,
    /// The port that a CONNECT names.
    pub(super) port: Option<u16>,
    /// The credential of the request, where it counts.
    pub(super) authorization: Option<HeaderValue>,
}

impl GrantedAccess {
    pub(super) fn new<B>(
        action: Action,
        request: &Request<B>,
        connection: &ClientConnection,
    ) -> Self {
        // Copied: a field may be a slice of a whole read buffer.
        let copy_value = |value: &HeaderValue| {
            let mut copy = HeaderValue::from_bytes(value.as_bytes()).ok()?;
            copy.set_sensitive(true);
            Some(copy)
        };
        let credential = request.headers().get(AUTHORIZATION);
        let credential = credential.filter(|_| matches!(connection.credentials.client, Ok(None)));
        Self {
            action,
            method: request.method().clone(),
            path: match action {
                Action::Connect => String::new(),
                Action::Request | Action::Upgrade => request.uri().path().to_owned(),
            },
            port: request.uri().port_u16(),
            authorization: credential.and_then(copy_value),
        }
    }

    /// Returns the access of a session of a TCP listener.
    pub(super) fn session() -> Self {
        Self {
            action: Action::Connect,
            method: Method::CONNECT,
            path: String::new(),
            port: None,
            authorization: None,
        }
    }
}

/// The record of one stream.
#[derive(Debug)]
pub struct AccessRecord {
    streams: Arc<OpenStreams>,
    listener: Arc<Listener>,
    worker: WorkerId,
    connection: Arc<ClientConnection>,
    started_at: Instant,
    method: String,
    path: String,
    trace: Trace,
    /// Keeps the connection's place for as long as the stream lives.
    _busy_guard: Busy,
    /// Bytes both ways: up is from the client, down is to it.
    pub bytes: Arc<ByteCounters>,
    fields: Mutex<RecordFields>,
    /// The changes (`OpenStreams`) that the decision to allow this stream has seen.
    decided_generation: AtomicU64,
    is_ended: AtomicBool,
    /// The task that carries the stream.
    stream_waker: AtomicWaker,
    /// The task that carries the body of the request.
    upload_waker: AtomicWaker,
    is_checking: AtomicBool,
}

#[derive(Debug, Default)]
struct RecordFields {
    client: Option<ClientIdentity>,
    route: Option<Route>,
    /// The address that is dialled from here, where there is no route.
    direct_address: Option<SocketAddr>,
    tunnel: Option<TunnelId>,
    /// The request that was allowed, and the place of the stream among those that are open.
    granted: Option<(Arc<GrantedAccess>, StreamIndex)>,
    matched_rule: Option<MatchedRule>,
    /// Ends the connection to an upstream on which the body of the request goes.
    upload_connection: Option<CancellationToken>,
    /// Ends the answer of a client that reads nothing.
    eviction_handle: Option<Eviction>,
    status: u16,
    reason: Option<Reason>,
    detail: String,
    first_byte: Option<Duration>,
    /// A session runs: an upgrade, a CONNECT or a TCP session.
    is_session: bool,
    /// The session has come to its end in order.
    session_ended_cleanly: bool,
    permit: Option<Permit>,
    _stream_guard: Option<StreamGuard>,
}

impl AccessRecord {
    /// Begins the record of an HTTP request.
    pub fn begin<B>(
        streams: &Arc<OpenStreams>,
        at: (&Arc<Listener>, WorkerId),
        connection: &Arc<ClientConnection>,
        request: &Request<B>,
    ) -> Arc<Self> {
        let path = match request.uri().authority() {
            Some(authority) if is_connect(request.method()) => authority.as_str(),
            _ => request.uri().path(),
        };
        let trace = Trace::from_headers(request.headers());
        Self::new(
            streams,
            at,
            connection,
            (request.method().as_str(), path),
            trace,
        )
    }

    /// Begins the record of a TCP session.
    pub fn session(
        streams: &Arc<OpenStreams>,
        at: (&Arc<Listener>, WorkerId),
        connection: &Arc<ClientConnection>,
    ) -> Arc<Self> {
        Self::new(streams, at, connection, ("TCP", ""), Trace::generate())
    }

    /// Begins the record of an HTTP request whose head cannot be parsed.
    pub fn unparsed(
        streams: &Arc<OpenStreams>,
        at: (&Arc<Listener>, WorkerId),
        connection: &Arc<ClientConnection>,
    ) -> Arc<Self> {
        Self::new(streams, at, connection, ("-", "-"), Trace::generate())
    }

    fn new(
        streams: &Arc<OpenStreams>,
        (listener, worker): (&Arc<Listener>, WorkerId),
        connection: &Arc<ClientConnection>,
        (method, path): (&str, &str),
        trace: Trace,
    ) -> Arc<Self> {
        // A stream that begins at a replaced listener is checked by the new listener.
        let changes = streams.generation();
        let changes = if listener.is_retired() {
            u64::MAX
        } else {
            changes
        };
        let fields = RecordFields {
            _stream_guard: Some(listener.metrics.stream_guard()),
            ..RecordFields::default()
        };
        Arc::new(Self {
            streams: streams.clone(),
            listener: listener.clone(),
            worker,
            connection: connection.clone(),
            started_at: Instant::now(),
            method: method.to_owned(),
            path: path[..path.floor_char_boundary(MAX_PATH_BYTES)].to_owned(),
            trace,
            _busy_guard: connection.slot.busy(),
            bytes: Arc::default(),
            fields: Mutex::new(fields),
            decided_generation: AtomicU64::new(changes),
            is_ended: AtomicBool::new(false),
            stream_waker: AtomicWaker::new(),
            upload_waker: AtomicWaker::new(),
            is_checking: AtomicBool::new(false),
        })
    }

    /// Records the access that is about to be granted: from now on the stream is among those that are checked again.
    pub(super) fn record_granted_access(self: &Arc<Self>, granted_access: GrantedAccess) {
        let place = self.streams.insert(self.worker, self);
        self.lock_fields().granted = Some((Arc::new(granted_access), place));
    }

    /// Returns the granted access with the client and the route, if access was granted.
    pub(super) fn granted_access(
        &self,
    ) -> Option<(Arc<GrantedAccess>, ClientIdentity, Option<Route>)> {
        let fields = self.lock_fields();
        let (allowed, _) = fields.granted.as_ref()?;
        let client = fields.client.clone()?;
        Some((allowed.clone(), client, fields.route.clone()))
    }

    /// Returns the address that is dialled from here, if one is.
    pub(super) fn direct_address(&self) -> Option<SocketAddr> {
        self.lock_fields().direct_address
    }

    /// Returns the listener that accepted the stream.
    pub(super) fn listener(&self) -> &Arc<Listener> {
        &self.listener
    }

    /// Returns the connection of the client.
    pub(super) fn connection(&self) -> &ClientConnection {
        &self.connection
    }

    /// Returns the changes that the last decision about this stream has seen, and notes those of another one.
    pub(super) fn swap_decided_generation(&self, changes: u64) -> u64 {
        self.decided_generation.swap(changes, Relaxed)
    }

    /// Whether the credential of the client has lapsed, at a listener that ends streams for that.
    pub(super) fn has_expired_credential(&self) -> bool {
        let fields = self.lock_fields();
        let validity = fields
            .client
            .as_ref()
            .and_then(|client| client.validity.as_ref());
        validity.is_some_and(|validity| {
            validity.keys_changed()
                || (validity.is_expired() && self.listener.latest().disconnect_expired)
        })
    }

    /// Whether the stream leads to one of these nodes.
    pub(super) fn leads_to(&self, nodes: &BTreeSet<NodeName>) -> bool {
        let is_listed = |route: &Route| nodes.contains(&route.node);
        !nodes.is_empty() && self.lock_fields().route.as_ref().is_some_and(is_listed)
    }

    /// Notes the token that ends the connection to an upstream on which the body of the request goes, as long as it does.
    pub(super) fn set_upload_connection(&self, cancel_token: Option<CancellationToken>) {
        self.lock_fields().upload_connection = cancel_token;
    }

    /// Whether the stream was ended after its answer, so that no client waits for an answer.
    pub(super) fn has_ended_after_response(&self) -> bool {
        self.is_ended.load(Acquire) && self.lock_fields().status != 0
    }

    /// Ends the stream because its client may no longer have it.
    pub(super) fn terminate(&self, refusal: &Error) {
        self.record_failure(refusal);
        self.is_ended.store(true, Release);
        {
            let fields = self.lock_fields();
            // Before its answer the request goes as a whole, and the refusal is the answer.
            if let Some(upload_connection) = fields
                .upload_connection
                .as_ref()
                .filter(|_| fields.status != 0)
            {
                upload_connection.cancel();
            }
        }
        self.stream_waker.wake();
        self.upload_waker.wake();
    }

    /// Notes by which handle the answer ends though its client reads nothing.
    pub(super) fn set_eviction(&self, eviction: Eviction) {
        self.lock_fields().eviction_handle = Some(eviction);
    }

    /// Ends the answer of a stream that [`AccessRecord::terminate`] has not ended, since its client reads nothing.
    pub(super) fn evict(&self) {
        if let Some(eviction) = &self.lock_fields().eviction_handle {
            eviction.evict();
        }
    }

    /// Has the stream decided about again with the next check.
    pub(super) fn request_recheck(&self) {
        self.decided_generation.store(u64::MAX, Relaxed);
    }

    /// Notes that the stream is, or is no longer, being checked. Returns whether it was.
    pub(super) fn set_checking(&self, now: bool) -> bool {
        self.is_checking.swap(now, Relaxed)
    }

    /// Waits until the stream is to end, for the task that carries the body of the request.
    pub(super) async fn wait_terminated_upload(&self) {
        poll_fn(|cx| {
            self.upload_waker.register(cx.waker());
            if self.is_ended.load(Acquire) {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }

    /// Ready once the stream is to end, with the reason in [`AccessRecord::failure`]. Wakes the task that asked last.
    pub(super) fn poll_terminated(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.stream_waker.register(cx.waker());
        if self.is_ended.load(Acquire) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    /// Carries the stream by `work` unless it is ended before.
    ///
    /// # Errors
    /// The refusal for which it was ended.
    pub(super) async fn run_unless_terminated<T>(
        &self,
        work: Pin<&mut impl Future<Output = T>>,
    ) -> Result<T, Error> {
        let terminated = poll_fn(|cx| self.poll_terminated(cx));
        tokio::select! {
            biased;
            output = work => Ok(output),
            () = terminated => Err(self
                .failure()
                .unwrap_or_else(|| Reason::Unauthenticated.error("the stream was ended"))),
        }
    }

    /// Carries a session by `work`, and resets the connection of its client if the session is ended before.
    pub(super) async fn run_session_unless_terminated<T>(
        &self,
        work: Pin<&mut impl Future<Output = T>>,
    ) -> Option<T> {
        let done = self.run_unless_terminated(work).await;
        if done.is_err() {
            self.connection.condition.abort();
        }
        done.ok()
    }

    /// Notes who called.
    pub fn set_client(&self, client: &ClientIdentity) {
        self.lock_fields().client = Some(client.clone());
    }

    /// Notes where to.
    pub fn set_route(&self, route: &Route) {
        self.lock_fields().route = Some(route.clone());
    }

    /// Notes the address that is about to be decided about and dialled from here.
    pub(super) fn set_direct_address(&self, address: SocketAddr) {
        self.lock_fields().direct_address = Some(address);
    }

    /// Notes by which rule it was decided.
    pub fn set_matched_rule(&self, matched_rule: MatchedRule) {
        self.lock_fields().matched_rule = Some(matched_rule);
    }

    /// Notes on which tunnel.
    pub fn set_tunnel(&self, tunnel: TunnelId) {
        self.lock_fields().tunnel = Some(tunnel);
    }

    /// Keeps the permit for as long as the stream lives.
    pub fn set_permit(&self, permit: Permit) {
        self.lock_fields().permit = Some(permit);
    }

    /// Notes the answer's head.
    pub fn response_started(&self, status: StatusCode) {
        let mut filled = self.lock_fields();
        filled.status = status.as_u16();
        filled
            .first_byte
            .get_or_insert_with(|| self.started_at.elapsed());
    }

    /// Notes that the answer's head begins a session, and writes that to the audit log at once.
    pub fn session_started(&self, status: StatusCode) {
        self.response_started(status);
        let mut filled = self.lock_fields();
        filled.is_session = true;
        self.audit("opened", &filled, (self.started_at.elapsed(), 0, 0));
    }

    /// Notes why the stream failed; the first reason stands.
    pub fn record_failure(&self, error: &Error) {
        let mut filled = self.lock_fields();
        if filled.reason.is_none() {
            if error.reason == Reason::TunnelLost && self.streams.registry.is_drain_expired() {
                self.set_ended_by_drain(&mut filled);
                return;
            }
            filled.reason = Some(error.reason);
            filled.detail = error.to_string();
            if let Some(cause) = &error.cause {
                let _ = write!(filled.detail, ": {cause}");
            }
        }
    }

    /// Notes that the session has come to its end in order.
    pub(super) fn mark_session_ended(&self) {
        self.lock_fields().session_ended_cleanly = true;
    }

    /// Notes that the stream was abandoned before its end: the drain's time is over, or else the client has left. A reason that
    /// is known already stands.
    pub fn record_abandoned(&self, detail: &str) {
        let mut filled = self.lock_fields();
        if filled.reason.is_some() {
            return;
        }
        if self.streams.registry.is_drain_expired() {
            return self.set_ended_by_drain(&mut filled);
        }
        filled.reason = Some(Reason::ClientClosed);
        detail.clone_into(&mut filled.detail);
    }

    /// Whether the answer has no body by its method or status (RFC 9110, section 6.4.1).
    pub(super) fn is_bodiless(&self) -> bool {
        self.method == Method::HEAD.as_str() || matches!(self.lock_fields().status, 204 | 304)
    }

    /// Notes that the gateway stopped before the stream ended.
    fn set_ended_by_drain(&self, filled: &mut RecordFields) {
        let drain = humantime::format_duration(self.streams.drain);
        filled.reason = Some(Reason::Draining);
        filled.detail =
            format!("the gateway stopped after its drain time (timeouts.drain: {drain})");
    }

    /// Notes that the client went away, if it has no answer yet.
    pub fn record_client_closed(&self, detail: &str) {
        let mut filled = self.lock_fields();
        if filled.reason.is_none() && filled.status == 0 {
            filled.reason = Some(Reason::ClientClosed);
            detail.clone_into(&mut filled.detail);
        }
    }

    /// Why the stream failed, if it has.
    pub fn failure(&self) -> Option<Error> {
        let fields = self.lock_fields();
        fields
            .reason
            .map(|reason| reason.error(fields.detail.clone()))
    }

    /// Whether a CONNECT was asked.
    pub fn is_connect_request(&self) -> bool {
        self.method == Method::CONNECT.as_str()
    }

    /// The trace that this stream belongs to.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    fn lock_fields(&self) -> MutexGuard<'_, RecordFields> {
        self.fields.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for AccessRecord {
    fn drop(&mut self) {
        let (status, in_session) = {
            let fields = self.lock_fields();
            (
                fields.status,
                fields.is_session && !fields.session_ended_cleanly,
            )
        };
        if status == 0 {
            self.record_abandoned("the client disconnected before it received an answer");
        } else if in_session {
            self.record_abandoned("the client disconnected before the end of its session");
        }
        let mut filled = std::mem::take(&mut *self.lock_fields());
        if let Some(reason @ (Reason::ClientClosed | Reason::Draining)) = filled.reason
            && filled.status == 0
        {
            filled.status = reason.status().as_u16();
        }
        if let Some((_, stream_index)) = filled.granted {
            self.streams.remove(stream_index);
        }
        let duration = self.started_at.elapsed();
        let (up, down) = (self.bytes.up.load(Relaxed), self.bytes.down.load(Relaxed));
        self.listener.metrics.stream_ended(&StreamOutcome {
            reason: filled.reason,
            status: filled.status,
            duration,
            first_byte: filled.first_byte,
            up,
            down,
        });
        let wanted = match self.streams.log {
            AccessLog::All => true,
            AccessLog::Failures => filled.reason.is_some(),
            AccessLog::None => false,
        };
        if wanted {
            self.write(&filled, duration, (up, down));
        }
        if filled.is_session {
            self.audit("closed", &filled, (duration, up, down));
        } else if filled.reason.is_some_and(Reason::is_refusal) {
            self.audit("refused", &filled, (duration, up, down));
        }
    }
}

impl AccessRecord {
    fn write(&self, fields: &RecordFields, duration: Duration, (up, down): (u64, u64)) {
        let client = fields.client.as_ref();
        tracing::info!(
            target: "access",
            listener = self.listener.name,
            peer = %self.connection.peer,
            client = client.map_or("-", |client| &client.name),
            by = client.map_or("-", |client| client.method.word()),
            node = fields.route.as_ref().map_or("-", |route| route.node.as_str()),
            port = fields.route.as_ref().map(|route| route.target.port),
            method = self.method,
            path = self.path,
            rule = fields.matched_rule.as_ref().map(|by| &*by.rule),
            rule_line = fields.matched_rule.as_ref().map(|by| by.line),
            status = fields.status,
            reason = fields.reason.map(Reason::word),
            detail = (!fields.detail.is_empty()).then_some(fields.detail.as_str()),
            up,
            down,
            ms = millis(duration),
            first_byte_ms = fields.first_byte.map(millis),
            tunnel = fields.tunnel.map(|tunnel| tunnel.0),
            trace = self.trace.as_str(),
        );
    }
}

impl AccessRecord {
    fn audit(
        &self,
        event: &str,
        fields: &RecordFields,
        (duration, up, down): (Duration, u64, u64),
    ) {
        let client = fields.client.as_ref();
        let route = fields.route.as_ref();
        tracing::info!(
            target: AUDIT,
            event,
            listener = self.listener.name,
            peer = %self.connection.peer,
            client = client.map(|client| &*client.name),
            groups = client.map(|client| client.groups.join(",")),
            by = client.map(|client| client.method.word()),
            serial = client
                .and_then(|client| client.certificate.as_ref())
                .map(|certificate| certificate.serial.as_str()),
            node = route.map(|route| route.node.as_str()),
            port = route.map(|route| route.target.port),
            method = self.method,
            path = self.path,
            rule = fields.matched_rule.as_ref().map(|by| &*by.rule),
            rule_line = fields.matched_rule.as_ref().map(|by| by.line),
            status = fields.status,
            reason = fields.reason.map(Reason::word),
            detail = (!fields.detail.is_empty()).then_some(fields.detail.as_str()),
            up,
            down,
            ms = millis(duration),
            trace = self.trace.as_str(),
        );
    }
}

fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}
