//! Connection to a gateway on which this edge opens streams.
//!
//! It is dialled when a stream needs it and none is open, with the identity of that moment, and closed after a time without streams.
//! Streams that are opened meanwhile wait for the same dial. After a change of the identity, and when the gateway stops, new streams get
//! a new connection, and the old one continues until its streams have ended. Here the edge is the HTTP/2 client, so it is the end that
//! probes a silent connection. A stream whose connection is lost before the gateway has answered is opened again, because none of its
//! bytes were sent.

use crate::{
    control::{
        connect_error::ConnectError,
        dial::{GatewayConnection, GatewayConnector},
        tunnels::context::TunnelContext,
    },
    metrics::EgressOutcome,
};
use causeway_certs::{LeafCertificate, verify::egress_client};
use causeway_rt::{backoff::Backoff, local_proxy::ConnectFailure, task::TaskGroup};
use causeway_tunnel::{
    StreamError, StreamKind, StreamReceiver, StreamSender, Target, Tunnel,
    gateway_side::{self, ConnectionDriver, GatewaySideConfig},
    wire,
};
use http::{HeaderMap, HeaderName, Request, StatusCode};
use rand::seq::SliceRandom;
use std::{
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{
    sync::Mutex as Turn,
    time::{Instant, MissedTickBehavior, interval, sleep_until, timeout, timeout_at},
};
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
/// Delay before the next dial after a gateway has said that it stops. Behind one address, the next dial must reach another gateway.
const DRAIN_DELAY: Duration = Duration::from_millis(250);
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
    /// Lock of the task that dials.
    dial_lock: Turn<()>,
}

struct LinkState {
    open: Option<OpenLink>,
    backoff: Backoff,
    /// Time before which no gateway is dialled, and the reason.
    not_before: Option<(Instant, String)>,
    /// Gateway that is dialled last, because it stops.
    stopping_gateway: Option<String>,
}

#[derive(Clone)]
struct OpenLink {
    tunnel: Tunnel,
    gateway: String,
    /// Certificate that this node presented on the connection.
    certificate: LeafCertificate,
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
            backoff: context.backoff(),
            not_before: None,
            stopping_gateway: None,
        };
        Self {
            context,
            tasks,
            state: Mutex::new(state),
            dial_lock: Turn::default(),
        }
    }

    /// Opens a stream to a destination.
    ///
    /// # Errors
    /// If no gateway is connected in time, or the gateway refuses the stream.
    pub(super) async fn open(&self, target: &Target) -> Result<StreamHalves, EgressError> {
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
                Ok(Ok(halves)) => return Ok(halves),
                Ok(Err(Attempt::Refused(error))) => return Err(error),
                Ok(Err(Attempt::Retry(detail))) => {
                    debug!(gateway = link.gateway, detail, "a stream is opened again");
                    self.leave(&link);
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
        let mut state = self.lock();
        let is_usable = |open: &OpenLink| {
            let is_open = open.tunnel.is_open() && !open.tunnel.leaving_token().is_cancelled();
            is_open && open.certificate == certificate
        };
        match state.open.take() {
            Some(open) if is_usable(&open) => state.open.insert(open).clone().into(),
            Some(open) => {
                open.tunnel.leave();
                None
            }
            None => None,
        }
    }

    /// Uses another connection from now on, because the gateway stops or the connection is lost.
    fn leave(&self, link: &OpenLink) {
        link.tunnel.leave();
        let mut state = self.lock();
        state.stopping_gateway = Some(link.gateway.clone());
        let why = format!("the gateway {} stops", link.gateway);
        state.not_before = Some((Instant::now() + DRAIN_DELAY, why));
    }

    /// Returns the open connection, or dials a new one. The error says whether another attempt can succeed before `deadline`.
    async fn connect(&self, deadline: Instant) -> Result<OpenLink, (String, bool)> {
        if let Some(open) = self.reusable_link() {
            return Ok(open);
        }
        let _dial_guard = self.dial_lock.lock().await;
        // The previous holder of the lock may have opened a connection.
        if let Some(open) = self.reusable_link() {
            return Ok(open);
        }
        let not_before = self.lock().not_before.clone();
        if let Some((not_before, why)) = not_before {
            if not_before >= deadline {
                return Err((why, false));
            }
            sleep_until(not_before).await;
        }
        match self.dial().await {
            Ok((open, driver)) => {
                let mut state = self.lock();
                state.backoff.reset();
                (state.not_before, state.stopping_gateway) = (None, None);
                info!(gateway = open.gateway, "egress uses this gateway");
                self.spawn_driver(&open, driver);
                let gateway = Some(open.gateway.clone());
                self.context
                    .status
                    .change_egress(|status| status.gateway = gateway);
                Ok(state.open.insert(open).clone())
            }
            Err(error) => {
                let mut state = self.lock();
                let delay = error.delay(&mut state.backoff, rand::random());
                let detail = error.detail().to_owned();
                state.not_before = Some((Instant::now() + delay, detail.clone()));
                Err((detail, true))
            }
        }
    }

    async fn dial(&self) -> Result<(OpenLink, LinkDriver), ConnectError> {
        let identity = self.context.identity_store.identity();
        let tls = egress_client(&identity);
        let tls = tls.map_err(|error| ConnectError::unwelcome(error.to_string()))?;
        let connector = GatewayConnector::new(tls, &self.context.config);
        let mut gateways = self.context.gateways.all();
        // Edges spread over the gateways.
        gateways.shuffle(&mut rand::rng());
        let stopping_gateway = self.lock().stopping_gateway.clone();
        gateways.sort_by_key(|gateway| Some(gateway) == stopping_gateway.as_ref());
        let GatewayConnection {
            io,
            gateway_addr,
            round_trip,
        } = connector.dial(&gateways, None).await?;
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
        let connecting = gateway_side::connect(io, traffic, config);
        let connected = timeout(self.context.config.timeouts.hello, connecting).await;
        let connected = connected.map_err(|_| ConnectError::silent("no answer to HTTP/2"))?;
        let (tunnel, driver) = connected.map_err(|end| ConnectError::tunnel_ended(&end, None))?;
        let open = OpenLink {
            tunnel,
            gateway: gateway_addr.gateway,
            certificate: identity.leaf,
        };
        Ok((
            open,
            LinkDriver {
                driver,
                gateway_chain,
            },
        ))
    }

    /// Spawns the task that owns the connection.
    fn spawn_driver(&self, open: &OpenLink, link_driver: LinkDriver) {
        let (tunnel, gateway) = (open.tunnel.clone(), open.gateway.clone());
        let identity_store = self.context.identity_store.clone();
        let status = self.context.status.clone();
        self.tasks.spawn(info_span!("egress", gateway), async move {
            let untrusted = identity_store.wait_until_untrusted(link_driver.gateway_chain);
            let mut driving = pin!(link_driver.driver.run());
            tokio::select! {
                end = driving.as_mut() => info!(%end, "the connection to the gateway ended"),
                why = untrusted => warn!("{why}: closed the connection for egress"),
                () = wait_until_unused(&tunnel) => {
                    tunnel.close();
                    // The connection counts as closed after the timeout.
                    let _ = timeout(CLOSE_TIMEOUT, driving).await;
                }
            }
            tunnel.close();
            status.change_egress(|status| {
                status.gateway = status.gateway.take().filter(|other| *other != gateway);
            });
        });
    }
}

/// Task of a connection, before it runs.
struct LinkDriver {
    driver: BoxedDriver,
    gateway_chain: Vec<rustls_pki_types::CertificateDer<'static>>,
}

/// Driver of a connection over TLS.
type BoxedDriver = ConnectionDriver<
    tokio_rustls::client::TlsStream<causeway_rt::socket::CountedIo<tokio::net::TcpStream>>,
>;

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
