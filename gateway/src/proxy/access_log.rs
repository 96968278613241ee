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
const LONGEST_PATH: usize = 4096;

/// The open streams of a gateway, by the worker that serves them.
#[derive(Debug)]
pub struct OpenStreams {
    workers: Box<[Mutex<Slab<Weak<AccessRecord>>>]>,
    /// Rises with each change that may refuse a stream which is open.
    changes: AtomicU64,
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
            changes: AtomicU64::new(0),
            authorizer,
            registry,
            log,
            drain,
        }
    }

    /// Returns the number of changes after which open streams are decided about again.
    pub(super) fn changes(&self) -> u64 {
        let changes = self.changes.load(Acquire);
        changes.wrapping_add(self.authorizer.changes())
    }

    /// Has all open streams checked again.
    pub fn changed(&self) {
        self.changes.fetch_add(1, Release);
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
        wanted: impl Fn(&AccessRecord) -> bool,
    ) -> Vec<Arc<AccessRecord>> {
        // Outside the lock: the last holder of a record removes it.
        let all: Vec<_> = self
            .worker(worker)
            .iter()
            .map(|(_, open)| open.clone())
            .collect();
        let open = all.iter().filter_map(Weak::upgrade);
        open.filter(|record| wanted(record)).collect()
    }
}

/// The request that a stream was allowed for.
#[derive(Debug)]
pub(super) struct GrantedAccess {
    pub(super) act: Action,
    pub(super) method: Method,
    /// The path of the request, without its query.
    pub(super) path: String,
    /// The port that a CONNECT names.
    pub(super) port: Option<u16>,
    /// The credential of the request, where it counts.
    pub(super) authorization: Option<HeaderValue>,
}

impl GrantedAccess {
    pub(super) fn new<B>(act: Action, request: &Request<B>, connection: &ClientConnection) -> Self {
        // Copied: a field may be a slice of a whole read buffer.
        let copied = |value: &HeaderValue| {
            let mut copy = HeaderValue::from_bytes(value.as_bytes()).ok()?;
            copy.set_sensitive(true);
            Some(copy)
        };
        let credential = request.headers().get(AUTHORIZATION);
        let credential = credential.filter(|_| matches!(connection.credentials.client, Ok(None)));
        Self {
            act,
            method: request.method().clone(),
            path: match act {
                Action::Connect => String::new(),
                Action::Request | Action::Upgrade => request.uri().path().to_owned(),
            },
            port: request.uri().port_u16(),
            authorization: credential.and_then(copied),
        }
    }

    /// Returns the access of a session of a TCP listener.
    pub(super) fn session() -> Self {
        Self {
            act: Action::Connect,
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
    began: Instant,
    method: String,
    path: String,
    trace: Trace,
    /// Keeps the connection's place for as long as the stream lives.
    _busy: Busy,
    /// Bytes both ways: up is from the client, down is to it.
    pub passed: Arc<ByteCounters>,
    filled: Mutex<RecordFields>,
    /// The changes (`OpenStreams`) that the decision to allow this stream has seen.
    decided_at: AtomicU64,
    ended: AtomicBool,
    /// The task that carries the stream.
    carrier: AtomicWaker,
    /// The task that carries the body of the request.
    uploader: AtomicWaker,
    checking: AtomicBool,
}

#[derive(Debug, Default)]
struct RecordFields {
    client: Option<ClientIdentity>,
    route: Option<Route>,
    /// The address that is dialled from here, where there is no route.
    direct: Option<SocketAddr>,
    tunnel: Option<TunnelId>,
    /// The request that was allowed, and the place of the stream among those that are open.
    allowed: Option<(Arc<GrantedAccess>, StreamIndex)>,
    by: Option<MatchedRule>,
    /// Ends the connection to an upstream on which the body of the request goes.
    upload_line: Option<CancellationToken>,
    /// Ends the answer of a client that reads nothing.
    eviction: Option<Eviction>,
    status: u16,
    reason: Option<Reason>,
    detail: String,
    first_byte: Option<Duration>,
    /// A session runs: an upgrade, a CONNECT or a TCP session.
    session: bool,
    /// The session has come to its end in order.
    session_ended: bool,
    permit: Option<Permit>,
    _open: Option<StreamGuard>,
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
        let trace = Trace::of(request.headers());
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
        Self::new(streams, at, connection, ("TCP", ""), Trace::begin())
    }

    /// Begins the record of an HTTP request whose head cannot be parsed.
    pub fn unparsed(
        streams: &Arc<OpenStreams>,
        at: (&Arc<Listener>, WorkerId),
        connection: &Arc<ClientConnection>,
    ) -> Arc<Self> {
        Self::new(streams, at, connection, ("-", "-"), Trace::begin())
    }

    fn new(
        streams: &Arc<OpenStreams>,
        (listener, worker): (&Arc<Listener>, WorkerId),
        connection: &Arc<ClientConnection>,
        (method, path): (&str, &str),
        trace: Trace,
    ) -> Arc<Self> {
        // A stream that begins at a replaced listener is checked by the new listener.
        let changes = streams.changes();
        let changes = if listener.is_retired() {
            u64::MAX
        } else {
            changes
        };
        let filled = RecordFields {
            _open: Some(listener.metrics.stream()),
            ..RecordFields::default()
        };
        Arc::new(Self {
            streams: streams.clone(),
            listener: listener.clone(),
            worker,
            connection: connection.clone(),
            began: Instant::now(),
            method: method.to_owned(),
            path: path[..path.floor_char_boundary(LONGEST_PATH)].to_owned(),
            trace,
            _busy: connection.room.busy(),
            passed: Arc::default(),
            filled: Mutex::new(filled),
            decided_at: AtomicU64::new(changes),
            ended: AtomicBool::new(false),
            carrier: AtomicWaker::new(),
            uploader: AtomicWaker::new(),
            checking: AtomicBool::new(false),
        })
    }

    /// Records the access that is about to be granted: from now on the stream is among those that are checked again.
    pub(super) fn allow(self: &Arc<Self>, allowed: GrantedAccess) {
        let place = self.streams.insert(self.worker, self);
        self.filled().allowed = Some((Arc::new(allowed), place));
    }

    /// Returns the granted access with the client and the route, if access was granted.
    pub(super) fn allowed(&self) -> Option<(Arc<GrantedAccess>, ClientIdentity, Option<Route>)> {
        let filled = self.filled();
        let (allowed, _) = filled.allowed.as_ref()?;
        let client = filled.client.clone()?;
        Some((allowed.clone(), client, filled.route.clone()))
    }

    /// Returns the address that is dialled from here, if one is.
    pub(super) fn direct(&self) -> Option<SocketAddr> {
        self.filled().direct
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
    pub(super) fn decided_at(&self, changes: u64) -> u64 {
        self.decided_at.swap(changes, Relaxed)
    }

    /// Whether the credential of the client has lapsed, at a listener that ends streams for that.
    pub(super) fn has_lapsed(&self) -> bool {
        let filled = self.filled();
        let validity = filled
            .client
            .as_ref()
            .and_then(|client| client.validity.as_ref());
        validity.is_some_and(|validity| {
            validity.has_other_keys()
                || (validity.is_over() && self.listener.latest().disconnect_expired)
        })
    }

    /// Whether the stream leads to one of these nodes.
    pub(super) fn leads_to(&self, nodes: &BTreeSet<NodeName>) -> bool {
        let leads = |route: &Route| nodes.contains(&route.node);
        !nodes.is_empty() && self.filled().route.as_ref().is_some_and(leads)
    }

    /// Notes the token that ends the connection to an upstream on which the body of the request goes, as long as it does.
    pub(super) fn uploads_on(&self, line: Option<CancellationToken>) {
        self.filled().upload_line = line;
    }

    /// Whether the stream was ended after its answer, so that no client waits for an answer.
    pub(super) fn has_ended_answered(&self) -> bool {
        self.ended.load(Acquire) && self.filled().status != 0
    }

    /// Ends the stream because its client may no longer have it.
    pub(super) fn end(&self, refusal: &Error) {
        self.failed(refusal);
        self.ended.store(true, Release);
        {
            let filled = self.filled();
            // Before its answer the request goes as a whole, and the refusal is the answer.
            if let Some(line) = filled.upload_line.as_ref().filter(|_| filled.status != 0) {
                line.cancel();
            }
        }
        self.carrier.wake();
        self.uploader.wake();
    }

    /// Notes by which handle the answer ends though its client reads nothing.
    pub(super) fn evictable(&self, eviction: Eviction) {
        self.filled().eviction = Some(eviction);
    }

    /// Ends the answer of a stream that [`Record::end`] has not ended, since its client reads nothing.
    pub(super) fn evict(&self) {
        if let Some(eviction) = &self.filled().eviction {
            eviction.evict();
        }
    }

    /// Has the stream decided about again with the next check.
    pub(super) fn decide_anew(&self) {
        self.decided_at.store(u64::MAX, Relaxed);
    }

    /// Notes that the stream is, or is no longer, being checked. Returns whether it was.
    pub(super) fn checking(&self, now: bool) -> bool {
        self.checking.swap(now, Relaxed)
    }

    /// Waits until the stream is to end, for the task that carries the body of the request.
    pub(super) async fn upload_ended(&self) {
        poll_fn(|cx| {
            self.uploader.register(cx.waker());
            if self.ended.load(Acquire) {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }

    /// Ready once the stream is to end, with the reason in [`Record::failure`]. Wakes the task that asked last.
    pub(super) fn poll_ended(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.carrier.register(cx.waker());
        if self.ended.load(Acquire) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    /// Carries the stream by `work` unless it is ended before.
    ///
    /// # Errors
    /// The refusal for which it was ended.
    pub(super) async fn unless_ended<T>(
        &self,
        work: Pin<&mut impl Future<Output = T>>,
    ) -> Result<T, Error> {
        let ended = poll_fn(|cx| self.poll_ended(cx));
        tokio::select! {
            biased;
            done = work => Ok(done),
            () = ended => Err(self
                .failure()
                .unwrap_or_else(|| Reason::Unauthenticated.error("the stream was ended"))),
        }
    }

    /// Carries a session by `work`, and resets the connection of its client if the session is ended before.
    pub(super) async fn session_unless_ended<T>(
        &self,
        work: Pin<&mut impl Future<Output = T>>,
    ) -> Option<T> {
        let done = self.unless_ended(work).await;
        if done.is_err() {
            self.connection.condition.abort();
        }
        done.ok()
    }

    /// Notes who called.
    pub fn client(&self, client: &ClientIdentity) {
        self.filled().client = Some(client.clone());
    }

    /// Notes where to.
    pub fn route(&self, route: &Route) {
        self.filled().route = Some(route.clone());
    }

    /// Notes the address that is about to be decided about and dialled from here.
    pub(super) fn dials(&self, address: SocketAddr) {
        self.filled().direct = Some(address);
    }

    /// Notes by which rule it was decided.
    pub fn decided(&self, by: MatchedRule) {
        self.filled().by = Some(by);
    }

    /// Notes on which tunnel.
    pub fn tunnel(&self, tunnel: TunnelId) {
        self.filled().tunnel = Some(tunnel);
    }

    /// Keeps the permit for as long as the stream lives.
    pub fn permit(&self, permit: Permit) {
        self.filled().permit = Some(permit);
    }

    /// Notes the answer's head.
    pub fn answered(&self, status: StatusCode) {
        let mut filled = self.filled();
        filled.status = status.as_u16();
        filled
            .first_byte
            .get_or_insert_with(|| self.began.elapsed());
    }

    /// Notes that the answer's head begins a session, and writes that to the audit log at once.
    pub fn opened(&self, status: StatusCode) {
        self.answered(status);
        let mut filled = self.filled();
        filled.session = true;
        self.audit("opened", &filled, (self.began.elapsed(), 0, 0));
    }

    /// Notes why the stream failed; the first reason stands.
    pub fn failed(&self, error: &Error) {
        let mut filled = self.filled();
        if filled.reason.is_none() {
            if error.reason == Reason::TunnelLost && self.streams.registry.is_over() {
                self.ended_by_drain(&mut filled);
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
    pub(super) fn session_ended(&self) {
        self.filled().session_ended = true;
    }

    /// Notes that the stream was abandoned before its end: the drain's time is over, or else the client has left. A reason that
    /// is known already stands.
    pub fn abandoned(&self, detail: &str) {
        let mut filled = self.filled();
        if filled.reason.is_some() {
            return;
        }
        if self.streams.registry.is_over() {
            return self.ended_by_drain(&mut filled);
        }
        filled.reason = Some(Reason::ClientClosed);
        detail.clone_into(&mut filled.detail);
    }

    /// Whether the answer has no body by its method or status (RFC 9110, section 6.4.1).
    pub(super) fn is_bodiless(&self) -> bool {
        self.method == Method::HEAD.as_str() || matches!(self.filled().status, 204 | 304)
    }

    /// Notes that the gateway stopped before the stream ended.
    fn ended_by_drain(&self, filled: &mut RecordFields) {
        let drain = humantime::format_duration(self.streams.drain);
        filled.reason = Some(Reason::Draining);
        filled.detail =
            format!("the gateway stopped after its drain time (timeouts.drain: {drain})");
    }

    /// Notes that the client went away, if it has no answer yet.
    pub fn client_closed(&self, detail: &str) {
        let mut filled = self.filled();
        if filled.reason.is_none() && filled.status == 0 {
            filled.reason = Some(Reason::ClientClosed);
            detail.clone_into(&mut filled.detail);
        }
    }

    /// Why the stream failed, if it has.
    pub fn failure(&self) -> Option<Error> {
        let filled = self.filled();
        filled
            .reason
            .map(|reason| reason.error(filled.detail.clone()))
    }

    /// Whether a CONNECT was asked.
    pub fn is_of_connect(&self) -> bool {
        self.method == Method::CONNECT.as_str()
    }

    /// The trace that this stream belongs to.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    fn filled(&self) -> MutexGuard<'_, RecordFields> {
        self.filled.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for AccessRecord {
    fn drop(&mut self) {
        let (status, in_session) = {
            let filled = self.filled();
            (filled.status, filled.session && !filled.session_ended)
        };
        if status == 0 {
            self.abandoned("the client disconnected before it received an answer");
        } else if in_session {
            self.abandoned("the client disconnected before the end of its session");
        }
        let mut filled = std::mem::take(&mut *self.filled());
        if let Some(reason @ (Reason::ClientClosed | Reason::Draining)) = filled.reason
            && filled.status == 0
        {
            filled.status = reason.status().as_u16();
        }
        if let Some((_, place)) = filled.allowed {
            self.streams.remove(place);
        }
        let duration = self.began.elapsed();
        let (up, down) = (self.passed.up.load(Relaxed), self.passed.down.load(Relaxed));
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
        if filled.session {
            self.audit("closed", &filled, (duration, up, down));
        } else if filled.reason.is_some_and(Reason::is_refusal) {
            self.audit("refused", &filled, (duration, up, down));
        }
    }
}

impl AccessRecord {
    fn write(&self, filled: &RecordFields, duration: Duration, (up, down): (u64, u64)) {
        let client = filled.client.as_ref();
        tracing::info!(
            target: "access",
            listener = self.listener.name,
            peer = %self.connection.peer,
            client = client.map_or("-", |client| &client.name),
            by = client.map_or("-", |client| client.method.word()),
            node = filled.route.as_ref().map_or("-", |route| route.node.as_str()),
            port = filled.route.as_ref().map(|route| route.target.port),
            method = self.method,
            path = self.path,
            rule = filled.by.as_ref().map(|by| &*by.rule),
            rule_line = filled.by.as_ref().map(|by| by.line),
            status = filled.status,
            reason = filled.reason.map(Reason::word),
            detail = (!filled.detail.is_empty()).then_some(filled.detail.as_str()),
            up,
            down,
            ms = millis(duration),
            first_byte_ms = filled.first_byte.map(millis),
            tunnel = filled.tunnel.map(|tunnel| tunnel.0),
            trace = self.trace.as_str(),
        );
    }
}

impl AccessRecord {
    fn audit(
        &self,
        event: &str,
        filled: &RecordFields,
        (duration, up, down): (Duration, u64, u64),
    ) {
        let client = filled.client.as_ref();
        let route = filled.route.as_ref();
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
            rule = filled.by.as_ref().map(|by| &*by.rule),
            rule_line = filled.by.as_ref().map(|by| by.line),
            status = filled.status,
            reason = filled.reason.map(Reason::word),
            detail = (!filled.detail.is_empty()).then_some(filled.detail.as_str()),
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
