//! Open streams and their access records. A record is filled along the request path, and written when the last part of the stream
//! has been dropped.
//!
//! The record also owns the stream's permit, so that counting, logging and limits cover the same stream. A path is logged without
//! its query, which may contain secrets. Refusals, and the begin and end of each session, also write a line to the audit log
//! (target `audit`).

use crate::proxy::request::is_connect;
use crate::{
    audit::AUDIT,
    config::AccessLog,
    error::{Error, Reason},
    metrics::{StreamGuard, StreamOutcome},
    proxy::{
        authn::ClientIdentity,
        authz::{Action, Authorize},
        limits::{ClientPermit, CounterGuard},
        listener::{ClientConnection, Listener},
        route::Route,
        trace_context::Trace,
    },
    state::{Registry, TunnelId, pods::DestinationPod, policy::MatchedRule},
    worker::WorkerId,
};
use causeway_certs::NodeName;
use causeway_rt::connection_limit::Busy;
use causeway_tunnel::{copy::ByteCounters, eviction::Eviction};
use futures_util::task::AtomicWaker;
use http::{HeaderValue, Method, Request, StatusCode};
use slab::Slab;
use std::{
    collections::BTreeSet,
    future::{Future, poll_fn},
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};
use tokio_util::sync::CancellationToken;

/// Maximum number of bytes of a path in a log line, because lines wait in memory until the log is written.
const MAX_PATH_BYTES: usize = 4096;

/// Method of a session.
static CONNECT: Method = Method::CONNECT;

/// Open streams of a gateway, grouped by the worker that serves them.
#[derive(Debug)]
pub struct OpenStreams {
    workers: Box<[Mutex<Slab<Weak<AccessRecord>>>]>,
    /// Counter of the changes that may refuse an open stream.
    generation: AtomicU64,
    authorizer: Arc<dyn Authorize>,
    registry: Registry,
    /// Selection of the streams that are written to the access log.
    log: AccessLog,
    /// Maximum time of a drain.
    drain: Duration,
}

/// Index of a stream among the open streams of a worker.
#[derive(Clone, Copy, Debug)]
struct StreamIndex(WorkerId, usize);

impl OpenStreams {
    /// Returns an empty list for this number of workers.
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

    /// Returns the generation of the decisions. If it differs from a stream's generation, the stream is checked again.
    pub(super) fn generation(&self) -> u64 {
        let changes = self.generation.load(Acquire);
        changes.wrapping_add(self.authorizer.generation())
    }

    /// Returns the selection of the streams that are written to the access log.
    pub(super) fn access_log(&self) -> AccessLog {
        self.log
    }

    /// Requests a check of all open streams.
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

    /// Returns the streams of a worker that match `predicate`.
    pub(super) fn select(
        &self,
        worker: WorkerId,
        predicate: impl Fn(&AccessRecord) -> bool,
    ) -> Vec<Arc<AccessRecord>> {
        // Collected outside the lock, because the last holder of a record removes it from the list.
        let all: Vec<_> = self
            .worker(worker)
            .iter()
            .map(|(_, open)| open.clone())
            .collect();
        let open = all.iter().filter_map(Weak::upgrade);
        open.filter(|record| predicate(record)).collect()
    }
}

/// Access to a stream that was granted to the request of its record.
#[derive(Debug)]
pub(super) struct GrantedAccess {
    pub(super) action: Action,
    /// The port in the target of a CONNECT.
    pub(super) port: Option<u16>,
    /// The credential of the request, if the authentication depends on it.
    pub(super) authorization: Option<HeaderValue>,
}

impl GrantedAccess {
    pub(super) fn new<B>(
        action: Action,
        request: &Request<B>,
        (connection, credential): (&ClientConnection, Option<&HeaderValue>),
    ) -> Self {
        // Copied, because a field may be a slice of a whole read buffer.
        let copy_value = |value: &HeaderValue| {
            let mut copy = HeaderValue::from_bytes(value.as_bytes()).ok()?;
            copy.set_sensitive(true);
            Some(copy)
        };
        let credential = credential.filter(|_| connection.credentials.accept_token());
        Self {
            action,
            port: request.uri().port_u16(),
            authorization: credential.and_then(copy_value),
        }
    }

    /// Returns the access of a session of a TCP listener.
    pub(super) fn session() -> Self {
        Self {
            action: Action::Connect,
            port: None,
            authorization: None,
        }
    }
}

/// Method of the request of a record.
#[derive(Debug)]
enum RecordMethod {
    Http(Method),
    /// Word for a record without an HTTP request.
    Other(&'static str),
}

impl RecordMethod {
    fn as_str(&self) -> &str {
        match self {
            Self::Http(method) => method.as_str(),
            Self::Other(word) => word,
        }
    }
}

/// Access record of one stream.
#[derive(Debug)]
pub struct AccessRecord {
    streams: Arc<OpenStreams>,
    listener: Arc<Listener>,
    worker: WorkerId,
    connection: Arc<ClientConnection>,
    started_at: Instant,
    method: RecordMethod,
    /// The path of the request without its query, or the target of a CONNECT.
    path: String,
    trace: Trace,
    /// Guard that counts the connection as busy while the stream is open.
    _busy_guard: Busy,
    /// Bytes in both directions: up is from the client, down is to the client.
    pub bytes: ByteCounters,
    /// The granted access, and the stream's index among the open streams.
    granted: OnceLock<(GrantedAccess, StreamIndex)>,
    fields: Mutex<RecordFields>,
    /// Generation (`OpenStreams`) of the last decision to allow this stream.
    decided_generation: AtomicU64,
    is_ended: AtomicBool,
    /// Waker of the task that serves the stream.
    stream_waker: AtomicWaker,
    /// Waker of the task that sends the request body.
    upload_waker: AtomicWaker,
    is_checking: AtomicBool,
    is_repeated: AtomicBool,
}

#[derive(Debug, Default)]
struct RecordFields {
    client: Option<ClientIdentity>,
    route: Option<Route>,
    /// The address that the gateway dials itself if there is no route.
    direct_address: Option<(SocketAddr, DestinationPod)>,
    tunnel: Option<TunnelId>,
    matched_rule: Option<MatchedRule>,
    /// Token that resets the connection to an upstream that carries the request body.
    upload_connection: Option<CancellationToken>,
    /// Handle that ends the response of a client that reads nothing.
    eviction_handle: Option<Eviction>,
    status: u16,
    reason: Option<Reason>,
    detail: String,
    first_byte: Option<Duration>,
    /// Whether the stream is a session: an upgrade, a CONNECT or a TCP session.
    is_session: bool,
    /// Whether the session has ended normally.
    session_ended_cleanly: bool,
    /// Permits of the stream for its client and for its node.
    permits: (Option<ClientPermit>, Option<CounterGuard>),
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
        let method = RecordMethod::Http(request.method().clone());
        Self::new(streams, at, connection, (method, path), trace)
    }

    /// Begins the record of a TCP session.
    pub fn session(
        streams: &Arc<OpenStreams>,
        at: (&Arc<Listener>, WorkerId),
        connection: &Arc<ClientConnection>,
    ) -> Arc<Self> {
        let request = (RecordMethod::Other("TCP"), "");
        Self::new(streams, at, connection, request, Trace::generate())
    }

    /// Begins the record of a connection that an edge opens to `target`.
    pub(super) fn egress(
        streams: &Arc<OpenStreams>,
        at: (&Arc<Listener>, WorkerId),
        connection: &Arc<ClientConnection>,
        target: &str,
    ) -> Arc<Self> {
        let request = (RecordMethod::Http(Method::CONNECT), target);
        Self::new(streams, at, connection, request, Trace::generate())
    }

    /// Begins the record of an HTTP request whose head cannot be parsed.
    pub fn unparsed(
        streams: &Arc<OpenStreams>,
        at: (&Arc<Listener>, WorkerId),
        connection: &Arc<ClientConnection>,
    ) -> Arc<Self> {
        let request = (RecordMethod::Other("-"), "-");
        Self::new(streams, at, connection, request, Trace::generate())
    }

    fn new(
        streams: &Arc<OpenStreams>,
        (listener, worker): (&Arc<Listener>, WorkerId),
        connection: &Arc<ClientConnection>,
        (method, path): (RecordMethod, &str),
        trace: Trace,
    ) -> Arc<Self> {
        // The successor of a replaced listener checks the streams that begin at the replaced one.
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
            method,
            path: path.to_owned(),
            trace,
            _busy_guard: connection.slot.busy(),
            bytes: ByteCounters::default(),
            granted: OnceLock::new(),
            fields: Mutex::new(fields),
            decided_generation: AtomicU64::new(changes),
            is_ended: AtomicBool::new(false),
            stream_waker: AtomicWaker::new(),
            upload_waker: AtomicWaker::new(),
            is_checking: AtomicBool::new(false),
            is_repeated: AtomicBool::new(false),
        })
    }

    /// Records the access that is about to be granted. The stream is then included in the checks of open streams.
    pub(super) fn record_granted_access(self: &Arc<Self>, granted_access: GrantedAccess) {
        self.granted
            .get_or_init(|| (granted_access, self.streams.insert(self.worker, self)));
    }

    /// Returns the granted access, if access was granted.
    pub(super) fn granted_access(&self) -> Option<&GrantedAccess> {
        self.granted.get().map(|(granted_access, _)| granted_access)
    }

    /// Returns the method and the path about which the policy decides for this action. A session has no path.
    pub(super) fn method_and_path(&self, action: Action) -> (&Method, &str) {
        match (&self.method, action) {
            (RecordMethod::Http(method), Action::Request | Action::Upgrade) => (method, &self.path),
            (_, Action::Connect) | (RecordMethod::Other(_), _) => (&CONNECT, ""),
        }
    }

    /// Returns the client and the route, if the client is known.
    pub(super) fn client_and_route(&self) -> Option<(ClientIdentity, Option<Route>)> {
        let fields = self.lock_fields();
        Some((fields.client.clone()?, fields.route.clone()))
    }

    /// Returns the address that the gateway dials itself, if there is one, and the pod that had the address at that time.
    pub(super) fn direct_address(&self) -> Option<(SocketAddr, DestinationPod)> {
        self.lock_fields().direct_address.clone()
    }

    /// Returns the listener that accepted the stream.
    pub(super) fn listener(&self) -> &Arc<Listener> {
        &self.listener
    }

    /// Returns the connection of the client.
    pub(super) fn connection(&self) -> &ClientConnection {
        &self.connection
    }

    /// Sets the generation of the decision about this stream, and returns the previous one.
    pub(super) fn swap_decided_generation(&self, changes: u64) -> u64 {
        self.decided_generation.swap(changes, Relaxed)
    }

    /// Whether the client's credential has expired and the listener ends streams for that reason.
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

    /// Whether the stream is routed to one of these nodes.
    pub(super) fn leads_to(&self, nodes: &BTreeSet<NodeName>) -> bool {
        let is_listed = |route: &Route| nodes.contains(&route.node);
        !nodes.is_empty() && self.lock_fields().route.as_ref().is_some_and(is_listed)
    }

    /// Sets the token that resets the connection to an upstream that carries the request body; `None` if no connection carries
    /// it.
    pub(super) fn set_upload_connection(&self, cancel_token: Option<CancellationToken>) {
        self.lock_fields().upload_connection = cancel_token;
    }

    /// Whether the stream was ended after its response had started, so that no client waits for a response.
    pub(super) fn has_ended_after_response(&self) -> bool {
        self.is_ended.load(Acquire) && self.lock_fields().status != 0
    }

    /// Ends the stream because its client is no longer allowed to use it.
    pub(super) fn terminate(&self, refusal: &Error) {
        self.record_failure(refusal);
        self.is_ended.store(true, Release);
        {
            let fields = self.lock_fields();
            // Before the response, the whole request is cancelled, and the refusal becomes the response.
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

    /// Sets the handle that ends the response even if its client reads nothing.
    pub(super) fn set_eviction(&self, eviction: Eviction) {
        self.lock_fields().eviction_handle = Some(eviction);
    }

    /// Ends the response of a stream that [`AccessRecord::terminate`] could not end because its client reads nothing.
    pub(super) fn evict(&self) {
        if let Some(eviction) = &self.lock_fields().eviction_handle {
            eviction.evict();
        }
    }

    /// Makes the next check decide about the stream again.
    pub(super) fn request_recheck(&self) {
        self.decided_generation.store(u64::MAX, Relaxed);
    }

    /// Sets whether the stream is being checked, and returns the previous value.
    pub(super) fn set_checking(&self, now: bool) -> bool {
        self.is_checking.swap(now, Relaxed)
    }

    /// Whether the request may be sent again because its tunnel does not answer; true once.
    pub(super) fn take_repetition(&self) -> bool {
        !self.is_repeated.swap(true, Relaxed)
    }

    /// Waits until the stream is terminated; for the task that sends the request body.
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

    /// Becomes ready when the stream is terminated, with the reason in [`AccessRecord::failure`]. Wakes the last task that
    /// polled.
    pub(super) fn poll_terminated(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.stream_waker.register(cx.waker());
        if self.is_ended.load(Acquire) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    /// Runs `work` unless the stream is terminated before.
    ///
    /// # Errors
    /// The refusal that terminated the stream.
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

    /// Records the client.
    pub fn set_client(&self, client: &ClientIdentity) {
        self.lock_fields().client = Some(client.clone());
    }

    /// Records the route.
    pub fn set_route(&self, route: &Route) {
        self.lock_fields().route = Some(route.clone());
    }

    /// Records the address that the gateway is about to authorize and to dial itself, and the pod that has the address.
    pub(super) fn set_direct_address(&self, address: SocketAddr, pod: DestinationPod) {
        self.lock_fields().direct_address = Some((address, pod));
    }

    /// Records the rule that decided.
    pub fn set_matched_rule(&self, matched_rule: MatchedRule) {
        self.lock_fields().matched_rule = Some(matched_rule);
    }

    /// Records the tunnel.
    pub fn set_tunnel(&self, tunnel: TunnelId) {
        self.lock_fields().tunnel = Some(tunnel);
    }

    /// Returns the tunnel.
    pub(super) fn tunnel(&self) -> Option<TunnelId> {
        self.lock_fields().tunnel
    }

    /// Takes the permit of the client with `admit`, unless the stream has one, and keeps it while the stream is open.
    ///
    /// # Errors
    /// The error of `admit`.
    pub fn ensure_client_permit(
        &self,
        admit: impl FnOnce() -> Result<ClientPermit, Error>,
    ) -> Result<(), Error> {
        let permit = &mut self.lock_fields().permits.0;
        if permit.is_none() {
            *permit = Some(admit()?);
        }
        Ok(())
    }

    /// Keeps the permit of the node while the stream is open.
    pub fn set_node_permit(&self, permit: CounterGuard) {
        self.lock_fields().permits.1 = Some(permit);
    }

    /// Records the head of the response.
    pub fn response_started(&self, status: StatusCode) {
        let mut filled = self.lock_fields();
        filled.status = status.as_u16();
        filled
            .first_byte
            .get_or_insert_with(|| self.started_at.elapsed());
    }

    /// Records that the response head starts a session, and writes this to the audit log at once.
    pub fn session_started(&self, status: StatusCode) {
        self.response_started(status);
        let mut filled = self.lock_fields();
        filled.is_session = true;
        self.audit("opened", &filled, (self.started_at.elapsed(), 0, 0));
    }

    /// Records the reason why the stream failed. The first reason is kept.
    pub fn record_failure(&self, error: &Error) {
        let mut filled = self.lock_fields();
        if filled.reason.is_none() {
            if error.reason == Reason::TunnelLost && self.streams.registry.is_drain_expired() {
                self.set_ended_by_drain(&mut filled);
                return;
            }
            filled.reason = Some(error.reason);
            filled.detail = error.log_detail();
        }
    }

    /// Records that the session has ended normally.
    pub(super) fn mark_session_ended(&self) {
        self.lock_fields().session_ended_cleanly = true;
    }

    /// Records that the stream was abandoned before its end, because the drain time is over or the client has disconnected. A
    /// reason that is already recorded is kept.
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

    /// Whether the response has no body because of its method or status (RFC 9110, section 6.4.1).
    pub(super) fn is_bodiless(&self) -> bool {
        self.is_method(&Method::HEAD) || matches!(self.lock_fields().status, 204 | 304)
    }

    /// Records that the gateway stopped before the stream ended.
    fn set_ended_by_drain(&self, filled: &mut RecordFields) {
        let drain = humantime::format_duration(self.streams.drain);
        filled.reason = Some(Reason::Draining);
        filled.detail =
            format!("the gateway stopped after its drain time (timeouts.drain: {drain})");
    }

    /// Records that the client disconnected, if it has no response yet.
    pub fn record_client_closed(&self, detail: &str) {
        let mut filled = self.lock_fields();
        if filled.reason.is_none() && filled.status == 0 {
            filled.reason = Some(Reason::ClientClosed);
            detail.clone_into(&mut filled.detail);
        }
    }

    /// Returns the reason why the stream failed, if it has failed.
    pub fn failure(&self) -> Option<Error> {
        let fields = self.lock_fields();
        fields
            .reason
            .map(|reason| reason.error(fields.detail.clone()))
    }

    /// Whether the request is a CONNECT.
    pub fn is_connect_request(&self) -> bool {
        self.is_method(&Method::CONNECT)
    }

    fn is_method(&self, expected: &Method) -> bool {
        matches!(&self.method, RecordMethod::Http(method) if method == expected)
    }

    /// Returns the trace of this stream.
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
        if let Some((_, stream_index)) = self.granted.get() {
            self.streams.remove(*stream_index);
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
        if self.streams.log.includes(filled.reason.is_some()) {
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
            service = fields.route.as_ref().and_then(Route::service),
            port = fields.route.as_ref().and_then(Route::port),
            method = self.method.as_str(),
            path = loggable_path(&self.path),
            rule = fields.matched_rule.as_ref().map(|by| &*by.rule),
            rule_line = rule_line(fields.matched_rule.as_ref()),
            address = fields.direct_address.as_ref().map(|(address, _)| tracing::field::display(address)),
            pod = pod_name(fields),
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
            service = route.and_then(Route::service),
            port = route.and_then(Route::port),
            method = self.method.as_str(),
            path = loggable_path(&self.path),
            rule = fields.matched_rule.as_ref().map(|by| &*by.rule),
            rule_line = rule_line(fields.matched_rule.as_ref()),
            address = fields.direct_address.as_ref().map(|(address, _)| tracing::field::display(address)),
            pod = pod_name(fields),
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

/// Returns `NAMESPACE/NAME` of the pod to which the stream goes, if a Pod object names one.
fn pod_name(fields: &RecordFields) -> Option<&str> {
    let routed = fields.route.as_ref().map(|route| &route.pod);
    let direct = fields.direct_address.as_ref().map(|(_, pod)| pod);
    routed.or(direct).and_then(DestinationPod::name)
}

/// Returns the beginning of a path, as the log contains it.
pub(super) fn loggable_path(path: &str) -> &str {
    &path[..path.floor_char_boundary(MAX_PATH_BYTES)]
}

/// Returns the line of the rule in the policy file. Rules of other keys of the configuration have none.
pub(super) fn rule_line(matched_rule: Option<&MatchedRule>) -> Option<usize> {
    let line = matched_rule?.line;
    (line > 0).then_some(line)
}

/// Returns a duration in milliseconds, with three decimals.
pub(super) fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}
