//! Connection to a gateway on which this edge opens streams.
//!
//! It is dialled when a stream needs it and none is open, with the identity of that moment, and closed after a time without streams.
//! The dial is a task of its own, and all streams that need the connection wait for its result. A stream that stops waiting does not
//! cancel the dial.
//!
//! TLS 1.3 and HTTP/2 both let a client send before the server has decided about it, so a gateway may refuse this edge after the
//! handshakes. A dial therefore succeeds only with the gateway's first bytes, and the back-off continues until the gateway has answered
//! a stream. A connection that ends before that counts as a refusal.
//!
//! After a change of the identity, and when the gateway stops, new streams get
//! a new connection, and the old one continues until its streams have ended. Here the edge is the HTTP/2 client, so it is the end that
//! probes a silent connection. A stream whose connection is lost before the gateway has answered is opened again, because none of its
//! bytes were sent.

use crate::{
    control::{
        connect_error::{ConnectError, find_tls_error},
        dial::{GatewayConnection, GatewayConnector},
        tunnels::context::TunnelContext,
    },
    metrics::EgressOutcome,
    status::EgressStatus,
};
use causeway_certs::{LeafCertificate, verify::egress_client};
use causeway_rt::{backoff::Backoff, local_proxy::ConnectFailure, task::TaskGroup};
use causeway_tunnel::{
    StreamError, StreamKind, StreamReceiver, StreamSender, Target, Tunnel, TunnelEnd,
    gateway_side::{self, GatewaySideConfig},
    io_observer::{IoObserver, ObservedIo},
    wire,
};
use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use http::{HeaderMap, HeaderName, Request, StatusCode};
use rand::seq::SliceRandom;
use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::oneshot,
    time::{Instant, MissedTickBehavior, interval, sleep_until, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, info_span, warn};

/// Maximum time for which a new stream waits for a connection to a gateway.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time within which a gateway must answer. The gateway itself gives up after 10 s (`timeouts.connect`).
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(20);
/// Time without streams after which the connection is closed.
const IDLE_TIMEOUT: Duration = Duration::from_mins(5);
/// Interval of checks whether the connection is still needed.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Time for the connection to close in order.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of unread bytes of all streams at this end. Windows shrink to stay below it.
const UNREAD_BYTES: usize = 16 << 20;

/// Both halves of an open stream.
pub(super) type StreamHalves = (StreamSender, StreamReceiver);

/// Failure to open a stream.
#[derive(Debug)]
pub(super) struct EgressError {
    /// Kind of the failure, for a program that uses the proxy.
    pub(super) failure: ConnectFailure,
    /// Kind of the failure, for metrics.
    pub(super) outcome: EgressOutcome,
    /// Word of the gateway's error table, or of this edge.
    pub(super) reason: String,
    /// Reason, for people.
    pub(super) detail: String,
}

/// Connection to a gateway, opened on demand.
pub(super) struct GatewayLink {
    context: Arc<TunnelContext>,
    tasks: Arc<TaskGroup>,
    state: Mutex<LinkState>,
}

/// Result of a dial that is under way, for all streams that wait for it.
type PendingDial = Shared<oneshot::Receiver<Result<OpenLink, String>>>;

struct LinkState {
    open: Option<OpenLink>,
    pending_dial: Option<PendingDial>,
    /// Back-off of dials. The first answer on a stream resets it.
    backoff: Backoff,
    /// Time before which no gateway is dialled, and the reason.
    not_before: Option<(Instant, String)>,
    /// Gateway that is dialled last, because it stops, has refused this edge, or was lost.
    avoided_gateway: Option<String>,
}

impl LinkState {
    /// Delays the next dial, and returns the reason.
    fn delay_dial(&mut self, error: &ConnectError) -> String {
        let delay = error.delay(&mut self.backoff, rand::random());
        let detail = error.detail().to_owned();
        self.not_before = Some((Instant::now() + delay, detail.clone()));
        detail
    }
}

#[derive(Clone)]
struct OpenLink {
    tunnel: Tunnel,
    gateway: String,
    /// Certificate that this node presented on the connection.
    certificate: LeafCertificate,
    progress: Arc<LinkProgress>,
}

/// Events of a connection that are handled only once.
#[derive(Debug, Default)]
struct LinkProgress {
    /// Whether the gateway has answered a stream.
    answered: AtomicBool,
    /// Whether the connection takes no new streams any more.
    left: AtomicBool,
}

/// Failure of one attempt to open a stream.
enum Attempt {
    /// The gateway has decided.
    Refused(EgressError),
    /// Another connection may serve the stream.
    Retry(String),
}

impl GatewayLink {
    pub(super) fn new(context: Arc<TunnelContext>, tasks: Arc<TaskGroup>) -> Self {
        let state = LinkState {
            open: None,
            pending_dial: None,
            backoff: context.backoff(),
            not_before: None,
            avoided_gateway: None,
        };
        Self {
            context,
            tasks,
            state: Mutex::new(state),
        }
    }

    /// Opens a stream to a destination.
    ///
    /// # Errors
    /// If no gateway is connected in time, or the gateway refuses the stream.
    pub(super) async fn open(
        self: &Arc<Self>,
        target: &Target,
    ) -> Result<StreamHalves, EgressError> {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let mut last_error = "no gateway answers".to_owned();
        while Instant::now() < deadline {
            let link = match timeout_at(deadline, self.connect(deadline)).await {
                Ok(Ok(link)) => link,
                Ok(Err((detail, may_retry))) => {
                    last_error = detail;
                    if may_retry {
                        continue;
                    }
                    break;
                }
                Err(_) => break,
            };
            match timeout(RESPONSE_TIMEOUT, request(&link, target)).await {
                Ok(Ok(halves)) => {
                    self.record_answer(&link);
                    return Ok(halves);
                }
                Ok(Err(Attempt::Refused(error))) => {
                    self.record_answer(&link);
                    return Err(error);
                }
                Ok(Err(Attempt::Retry(detail))) => {
                    debug!(gateway = link.gateway, detail, "a stream is opened again");
                    self.leave(&link, &detail);
                    last_error = detail;
                }
                Err(_) => {
                    return Err(EgressError {
                        failure: ConnectFailure::TimedOut,
                        outcome: EgressOutcome::Failed,
                        reason: "gateway_timeout".to_owned(),
                        detail: format!("the gateway {} did not answer in time", link.gateway),
                    });
                }
            }
        }
        Err(EgressError {
            failure: ConnectFailure::Other,
            outcome: EgressOutcome::NoGateway,
            reason: "no_gateway".to_owned(),
            detail: format!("no connection to a gateway: {last_error}"),
        })
    }

    fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the open connection, if it takes new streams and this node's certificate has not changed since it was dialled.
    fn reusable_link(&self) -> Option<OpenLink> {
        let certificate = self.context.identity_store.identity().leaf;
        let open = self.lock().open.clone()?;
        if open.certificate != certificate {
            open.progress.left.store(true, Relaxed);
            open.tunnel.leave();
            return None;
        }
        let is_usable = open.tunnel.is_open() && !open.tunnel.leaving_token().is_cancelled();
        if !is_usable {
            self.leave(&open, "it is lost");
            return None;
        }
        Some(open)
    }

    /// Records that the gateway has answered a stream: it serves this edge.
    fn record_answer(&self, link: &OpenLink) {
        if link.progress.answered.swap(true, Relaxed) {
            return;
        }
        let mut state = self.lock();
        state.backoff.reset();
        (state.not_before, state.avoided_gateway) = (None, None);
        drop(state);
        info!(gateway = link.gateway, "egress uses this gateway");
        let gateway = Some(link.gateway.clone());
        let change = |status: &mut EgressStatus| status.gateway = gateway;
        self.context.status.change_egress(change);
    }

    /// Uses another connection from now on, because the gateway stops or the connection is lost. The next dial is delayed, because
    /// behind one address it must reach another gateway.
    fn leave(&self, link: &OpenLink, why: &str) {
        link.tunnel.leave();
        if link.progress.left.swap(true, Relaxed) {
            return;
        }
        let gateway = &link.gateway;
        let detail = if link.progress.answered.load(Relaxed) {
            format!("the connection to the gateway {gateway} takes no new streams: {why}")
        } else {
            let detail = format!("the gateway {gateway} did not serve this edge: {why}");
            warn!(gateway, why, "the gateway did not serve this edge");
            detail
        };
        let mut state = self.lock();
        state.avoided_gateway = Some(gateway.clone());
        state.delay_dial(&ConnectError::refused(detail));
    }

    /// Returns the open connection, or the result of a dial. The error says whether another attempt can succeed before `deadline`.
    async fn connect(self: &Arc<Self>, deadline: Instant) -> Result<OpenLink, (String, bool)> {
        loop {
            if let Some(open) = self.reusable_link() {
                return Ok(open);
            }
            match self.join_dial() {
                Ok(dial) => {
                    let result = dial.await;
                    let result = result.map_err(|_| ("this edge stops".to_owned(), false))?;
                    return result.map_err(|detail| (detail, true));
                }
                Err((not_before, why)) if not_before >= deadline => return Err((why, false)),
                Err((not_before, _)) => sleep_until(not_before).await,
            }
        }
    }

    /// Returns the dial that is under way, or starts one.
    ///
    /// # Errors
    /// If no gateway may be dialled yet. The error has the time of the next dial, and the reason.
    fn join_dial(self: &Arc<Self>) -> Result<PendingDial, (Instant, String)> {
        let mut state = self.lock();
        if let Some(dial) = &state.pending_dial {
            return Ok(dial.clone());
        }
        let not_before = state.not_before.clone();
        if let Some(delayed) = not_before.filter(|(at, _)| *at > Instant::now()) {
            return Err(delayed);
        }
        let (sender, receiver) = oneshot::channel();
        let dial = state.pending_dial.insert(receiver.shared()).clone();
        drop(state);
        let link = self.clone();
        self.tasks.spawn(info_span!("egress"), async move {
            let result = link.dial().await;
            // All waiters are gone if this fails.
            let _ = sender.send(link.finish_dial(result));
        });
        Ok(dial)
    }

    /// Takes the new connection into use, or delays the next dial.
    fn finish_dial(
        self: &Arc<Self>,
        result: Result<(OpenLink, LinkDriver), ConnectError>,
    ) -> Result<OpenLink, String> {
        let mut state = self.lock();
        state.pending_dial = None;
        match result {
            Ok((open, driver)) => {
                state.open = Some(open.clone());
                drop(state);
                self.spawn_driver(&open, driver);
                Ok(open)
            }
            Err(error) => {
                let detail = state.delay_dial(&error);
                drop(state);
                if error.is_refusal() {
                    warn!(detail, "no gateway accepts this edge for egress");
                }
                Err(detail)
            }
        }
    }

    /// Returns the gateways in the order in which they are dialled: those with a tunnel of this edge first, because they work.
    fn gateways(&self) -> Vec<String> {
        let mut gateways = self.context.gateways.all();
        // Edges spread over the gateways.
        gateways.shuffle(&mut rand::rng());
        let connected = self.context.status.tunnel_gateways();
        let avoided = self.lock().avoided_gateway.clone();
        gateways.sort_by_key(|gateway| {
            let is_avoided = Some(gateway) == avoided.as_ref();
            (is_avoided, !connected.contains(gateway))
        });
        gateways
    }

    /// Connects to a gateway, and waits for its first bytes.
    async fn dial(&self) -> Result<(OpenLink, LinkDriver), ConnectError> {
        let identity = self.context.identity_store.identity();
        let tls = egress_client(&identity);
        let tls = tls.map_err(|error| ConnectError::unwelcome(error.to_string()))?;
        let connector = GatewayConnector::new(tls, &self.context.config);
        let connection = connector.dial(&self.gateways(), None).await?;
        let gateway = connection.gateway_addr.gateway.clone();
        let hello_timeout = self.context.config.timeouts.hello;
        let connecting = self.start_http2(connection, identity.leaf);
        let connected = timeout(hello_timeout, connecting).await;
        let connected = connected.unwrap_or_else(|_| {
            let what = format!("{gateway} did not answer to HTTP/2 in time");
            Err(ConnectError::silent(what))
        });
        connected.inspect_err(|_| self.lock().avoided_gateway = Some(gateway))
    }

    /// Starts HTTP/2, and waits for the first bytes of the gateway.
    async fn start_http2(
        &self,
        connection: GatewayConnection,
        certificate: LeafCertificate,
    ) -> Result<(OpenLink, LinkDriver), ConnectError> {
        let GatewayConnection {
            io,
            gateway_addr,
            round_trip,
        } = connection;
        let traffic = io.get_ref().0.traffic();
        let chain = io.get_ref().1.peer_certificates().unwrap_or_default();
        let gateway_chain = chain.iter().map(|one| one.clone().into_owned()).collect();
        let config = GatewaySideConfig {
            budget: UNREAD_BYTES,
            control_streams: 0,
            round_trip,
            memory_budget: self.context.memory_budget.clone(),
            is_trusted: true,
            ..GatewaySideConfig::default()
        };
        let answer = FirstAnswer::default();
        let io = ObservedIo::new(io, answer.clone());
        let gateway = gateway_addr.gateway;
        let connected = gateway_side::connect(io, traffic, config).await;
        let (tunnel, driver) = connected.map_err(|end| answer.to_connect_error(&gateway, &end))?;
        let mut driving = driver.run().boxed();
        tokio::select! {
            biased;
            end = &mut driving => return Err(answer.to_connect_error(&gateway, &end)),
            () = answer.arrived.cancelled() => {}
        }
        let open = OpenLink {
            tunnel,
            gateway,
            certificate,
            progress: Arc::default(),
        };
        let driver = LinkDriver {
            driving,
            gateway_chain,
        };
        Ok((open, driver))
    }

    /// Spawns the task that owns the connection.
    fn spawn_driver(self: &Arc<Self>, open: &OpenLink, link_driver: LinkDriver) {
        let (link, open) = (self.clone(), open.clone());
        let span = info_span!("egress", gateway = open.gateway);
        self.tasks.spawn(span, async move {
            let context = &link.context;
            let identity_store = context.identity_store.clone();
            let untrusted = identity_store.wait_until_untrusted(link_driver.gateway_chain);
            let mut driving = link_driver.driving;
            tokio::select! {
                end = driving.as_mut() => {
                    info!(%end, "the connection to the gateway ended");
                    link.leave(&open, &end.to_string());
                }
                why = untrusted => warn!("{why}: closed the connection for egress"),
                () = wait_until_unused(&open.tunnel) => {
                    open.progress.left.store(true, Relaxed);
                    open.tunnel.close();
                    // The connection counts as closed after the timeout.
                    let _ = timeout(CLOSE_TIMEOUT, driving).await;
                }
            }
            open.progress.left.store(true, Relaxed);
            open.tunnel.close();
            context.status.change_egress(|status| {
                status.gateway = status.gateway.take().filter(|other| *other != open.gateway);
            });
        });
    }
}

/// Task of a connection, before it is spawned.
struct LinkDriver {
    driving: BoxFuture<'static, TunnelEnd>,
    gateway_chain: Vec<rustls_pki_types::CertificateDer<'static>>,
}

/// Observer of the first bytes from a gateway, or of the TLS alert in their place.
#[derive(Clone, Debug, Default)]
struct FirstAnswer {
    arrived: CancellationToken,
    tls_error: Arc<Mutex<Option<rustls::Error>>>,
}

impl FirstAnswer {
    /// Returns the error of a connection that ended before the first bytes.
    fn to_connect_error(&self, gateway: &str, end: &TunnelEnd) -> ConnectError {
        let tls_error = self.tls_error.lock();
        match tls_error.unwrap_or_else(PoisonError::into_inner).as_ref() {
            Some(error) => ConnectError::tls(error),
            None => ConnectError::refused(format!(
                "{gateway} ended the connection before its first answer: {end}"
            )),
        }
    }
}

impl IoObserver for FirstAnswer {
    fn on_read(&mut self, bytes: &[u8]) -> io::Result<()> {
        if !bytes.is_empty() && !self.arrived.is_cancelled() {
            self.arrived.cancel();
        }
        Ok(())
    }

    fn on_read_failed(&mut self, error: &io::Error) {
        let mut slot = self
            .tls_error
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *slot = find_tls_error(error).cloned();
    }
}

/// Waits until the connection has had no stream for a while, or none at all after another connection has replaced it.
async fn wait_until_unused(tunnel: &Tunnel) {
    let mut ticks = interval(IDLE_CHECK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut used_at = Instant::now();
    loop {
        ticks.tick().await;
        if tunnel.load().open_streams() > 0 {
            used_at = Instant::now();
        } else if tunnel.leaving_token().is_cancelled() || used_at.elapsed() >= IDLE_TIMEOUT {
            return;
        }
    }
}

/// Opens a stream on this connection.
async fn request(link: &OpenLink, target: &Target) -> Result<StreamHalves, Attempt> {
    let lost = |error: StreamError| Attempt::Retry(error.to_string());
    let opening = link
        .tunnel
        .open(Request::new(()), &StreamKind::Tcp, target, false);
    let opened = opening.await.map_err(lost)?;
    let response = opened.response.await.map_err(|error| match error {
        StreamError::Lost { .. } => lost(error),
        error if error.is_refused() => lost(error),
        error => Attempt::Refused(EgressError {
            failure: ConnectFailure::Other,
            outcome: EgressOutcome::Failed,
            reason: "reset".to_owned(),
            detail: format!("the gateway {} aborted the stream: {error}", link.gateway),
        }),
    })?;
    if response.status() == StatusCode::OK {
        return Ok((opened.send, response.into_body()));
    }
    let reason = text(response.headers(), &wire::REASON).unwrap_or("unknown");
    let detail = text(response.headers(), &wire::DETAIL).unwrap_or("the gateway refused");
    if reason == "draining" {
        return Err(Attempt::Retry(detail.to_owned()));
    }
    Err(Attempt::Refused(refusal(reason, detail)))
}

fn text<'a>(fields: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    fields.get(name)?.to_str().ok()
}

/// Returns the error of a refusal with this word of the gateway's error table.
fn refusal(reason: &str, detail: &str) -> EgressError {
    let failure = match reason {
        "forbidden" | "edge_policy" => ConnectFailure::Forbidden,
        "target_refused" => ConnectFailure::Refused,
        "target_timeout" | "resolve_timeout" => ConnectFailure::TimedOut,
        "target_unresolved" | "target_unreachable" | "node_unknown" | "node_not_connected" => {
            ConnectFailure::Unreachable
        }
        _ => ConnectFailure::Other,
    };
    let outcome = match failure {
        ConnectFailure::Forbidden => EgressOutcome::Denied,
        _ => EgressOutcome::Failed,
    };
    EgressError {
        failure,
        outcome,
        reason: reason.to_owned(),
        detail: detail.to_owned(),
    }
}
