//! One tunnel: its streams and its end, after its hello (`handshake`).
//!
//! The tunnel's connection moves only while this polls it, so everything here happens in one loop. Streams are tasks of the
//! session: when the tunnel is lost each ends by itself, and passes the reset on to its upstream. To leave, the edge says
//! so, serves the open streams, and lets the gateway close; the edge initiates no GOAWAY (invariant 11). An edge that
//! stops while streams are open still serves new ones that have no other tunnel to the node.

use super::{
    super::{
        api_cache::membership::MembershipUpdater,
        connect_error::ConnectError,
        dial::{GatewayAddr, GatewayConnection},
        heartbeat::{HeartbeatRelay, relay::TunnelRelay},
        trust_roots,
    },
    bulk::BulkTracker,
    connected_gateways::{GatewayLease, TunnelGroup},
    context::{TunnelContext, TunnelUnavailable},
    handshake::{TunnelHandshake, unexpected_message},
    tls_error::{TlsErrorSlot, TunnelIo},
};
use crate::{metrics::TunnelGuard, status::TunnelSummary};
use causeway_rt::task::TaskGroup;
use causeway_tunnel::{
    RejectCode,
    control_stream::{ControlStream, ControlStreamError, EdgeMessage, GatewayMessage, GoAway},
    edge_side::{EdgeSide, IncomingStream, StreamRequest},
    heartbeat::DelegatedHeartbeat,
    load::TunnelLoad,
};
use rustls_pki_types::CertificateDer;
use std::{net::IpAddr, sync::Arc, time::Duration};
use tokio::{
    sync::oneshot,
    time::{Instant, interval, timeout},
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{debug, info, info_span};

/// Time that streams get to pass the loss of their tunnel on to their upstreams.
const LOSS_GRACE: Duration = Duration::from_secs(5);
/// After its last stream a leaving tunnel waits this long for the gateway to close it: a stream may have
/// been opened while the word was on its way.
const LINGER: Duration = Duration::from_secs(1);
/// How often a leaving tunnel looks whether its streams are over.
const LEAVE_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// A stopping edge serves new streams while one is older than this; short requests end within it.
const MAX_LASTING_AGE: Duration = Duration::from_secs(1);

/// A registered tunnel.
pub(super) struct TunnelSession {
    edge_side: EdgeSide<TunnelIo>,
    control_stream: ControlStream,
    gateway_addr: GatewayAddr,
    /// From which address of the node it was dialled.
    local_addr: Option<IpAddr>,
    /// By what its gateway was believed.
    gateway_chain: Vec<CertificateDer<'static>>,
    slot: u32,
    early_streams: Vec<StreamRequest>,
    tls_error: TlsErrorSlot,
    load: Arc<TunnelLoad>,
    bulk_tracker: Arc<BulkTracker>,
    context: Arc<TunnelContext>,
    summary: TunnelSummary,
    _tunnel_guard: TunnelGuard,
    /// Says until when it counts among the newest sessions.
    newest_guard: Option<DropGuard>,
    /// Lease of the gateway, if the edge has tunnels at all gateways.
    lease: Option<GatewayLease>,
    /// Handle for the gateway's announcements of the node's pool, until the gateway drains.
    membership_updater: Option<MembershipUpdater>,
    /// Relay of heartbeats of other pool members, until the gateway drains.
    relay: Option<TunnelRelay>,
}

/// A tunnel that is served by a task of its own.
pub(super) struct SessionHandle {
    pub(super) gateway_addr: GatewayAddr,
    /// Its gateway drains.
    pub(super) is_draining: bool,
    /// Asks it to leave.
    pub(super) leave_token: CancellationToken,
    /// It is over.
    pub(super) ended: CancellationToken,
}

impl SessionHandle {
    /// Notes that its gateway drains.
    pub(super) fn into_draining(self) -> Self {
        Self {
            is_draining: true,
            ..self
        }
    }
}

/// Asks a tunnel to leave, if there is one.
pub(super) fn request_drain(handle: Option<SessionHandle>) {
    if let Some(handle) = handle {
        handle.leave_token.cancel();
    }
}

/// Stage of a tunnel's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// The edge stops, and serves what has no other way to its node.
    Serving {
        deadline: Instant,
        /// When it is looked next whether a stream lasts.
        next_check: Instant,
    },
    /// It ends when it has had no stream for a while.
    Leaving {
        idle_since: Instant,
    },
}

/// Owner of the tunnel.
pub(super) struct SessionOwner {
    pub(super) group: TunnelGroup,
    pub(super) slot: u32,
    /// It belongs to a tunnel that stands: no other gateway than that one's will do.
    pub(super) only_held: bool,
    /// Tracker of the slots that move bulk.
    pub(super) bulk_tracker: Arc<BulkTracker>,
}

/// Message of a session to its slot, sent once.
pub(super) enum SessionEnd {
    /// It is over.
    Ended(ConnectError),
    /// The gateway wants this edge to connect elsewhere; the session goes on.
    Draining,
}

impl TunnelSession {
    /// Begins HTTP/2 and says hello; both within `timeouts.hello`.
    ///
    /// # Errors
    /// If the gateway does not answer in time, or sends this edge away.
    pub(super) async fn register(
        context: &Arc<TunnelContext>,
        connection: GatewayConnection,
        owner: SessionOwner,
    ) -> Result<Self, TunnelUnavailable> {
        let GatewayConnection {
            io,
            gateway_addr,
            round_trip,
        } = connection;
        let slot = owner.slot;
        let tcp = io.get_ref().0.get_ref();
        let local_addr = tcp.and_then(|tcp| tcp.local_addr().ok());
        let gateway_chain = io.get_ref().1.peer_certificates().unwrap_or_default();
        let gateway_chain = gateway_chain
            .iter()
            .map(|one| one.clone().into_owned())
            .collect();
        let hello_timeout = context.config.timeouts.hello;
        let exchange = async {
            let mut handshake = TunnelHandshake::begin(context, io, round_trip).await?;
            let established = handshake
                .exchange_hello(context, owner.group, (slot, owner.only_held))
                .await?;
            Ok::<_, TunnelUnavailable>((handshake, established))
        };
        let timeout_error =
            || ConnectError::silent(format!("{} sent no hello in time", gateway_addr.gateway));
        let result = timeout(hello_timeout, exchange)
            .await
            .map_err(|_| timeout_error())?;
        let (handshake, established) = result?;
        let load = handshake.edge_side.load();
        info!(gateway = gateway_addr.gateway, round_trip = ?round_trip, "tunnel registered");
        Ok(Self {
            edge_side: handshake.edge_side,
            control_stream: established.control_stream,
            summary: context
                .status
                .add_tunnel(slot, &gateway_addr, round_trip, load.clone()),
            gateway_addr,
            local_addr: local_addr.map(|from| from.ip()),
            gateway_chain,
            slot,
            early_streams: handshake.early_streams,
            tls_error: handshake.tls_error,
            load,
            bulk_tracker: owner.bulk_tracker,
            newest_guard: Some(
                context
                    .newest_sessions
                    .insert(established.gateway_instance, slot),
            ),
            relay: context.heartbeats.as_ref().map(HeartbeatRelay::tunnel),
            context: context.clone(),
            _tunnel_guard: context.metrics.tunnel_guard(),
            lease: established.lease,
            membership_updater: established.membership_updater,
        })
    }

    /// By what its gateway was believed.
    pub(super) fn take_gateway_chain(&mut self) -> Vec<CertificateDer<'static>> {
        std::mem::take(&mut self.gateway_chain)
    }

    /// Returns the address of the gateway.
    pub(super) fn gateway_addr(&self) -> &GatewayAddr {
        &self.gateway_addr
    }

    /// Serves until the tunnel ends, or `leave` and the last stream is over.
    pub(super) async fn serve(
        mut self,
        leave_token: CancellationToken,
        end_tx: oneshot::Sender<SessionEnd>,
    ) {
        let streams = TaskGroup::default();
        for request in std::mem::take(&mut self.early_streams) {
            self.accept_stream(request, &streams);
        }
        let mut end_tx = Some(end_tx);
        let error = self.run(&leave_token, &mut end_tx, &streams).await;
        info!(
            gateway = self.gateway_addr.gateway,
            reason = error.detail(),
            "tunnel ended"
        );
        // The slot dials again after this session ends, and may then own this gateway again.
        drop((
            self.lease.take(),
            self.membership_updater.take(),
            self.newest_guard.take(),
        ));
        self.relay = None;
        let Self {
            edge_side: server,
            summary,
            ..
        } = self;
        // Removed first: whether another tunnel is open decides how a refused identity is handled.
        drop(summary);
        if let Some(end_tx) = end_tx {
            // A stopped slot does not receive this.
            let _ = end_tx.send(SessionEnd::Ended(error));
        }
        drop(server);
        streams.drain(LOSS_GRACE).await;
    }

    async fn run(
        &mut self,
        leave_token: &CancellationToken,
        end_tx: &mut Option<oneshot::Sender<SessionEnd>>,
        streams: &TaskGroup,
    ) -> ConnectError {
        let mut leave_check = interval(LEAVE_CHECK_INTERVAL);
        let (mut is_control_open, mut phase) = (true, Phase::Open);
        loop {
            tokio::select! {
                next = self.edge_side.next_stream() => match next {
                    Ok(IncomingStream::Stream(asked)) => self.accept_stream(*asked, streams),
                    Ok(IncomingStream::Control(_)) => debug!("the gateway opened a second control stream"),
                    Err(ended) => return self.tls_error.to_connect_error(&ended),
                },
                line = self.control_stream.exchange(), if is_control_open => {
                    let Some(line) = line.transpose() else { continue };
                    if let Ok(line @ GatewayMessage::Dismiss { why: GoAway::Superseded, .. }) = &line {
                        // New streams go to another process of this node; open streams continue here.
                        self.release_claims();
                        phase = Phase::Leaving { idle_since: Instant::now() };
                        if let Some(end_tx) = end_tx.take() {
                            // A stopped slot does not receive this.
                            let _ = end_tx.send(SessionEnd::Ended(unexpected_message(line)));
                        }
                        continue;
                    }
                    if let Some(reply) = self.immediate_reply(&line).await {
                        self.enqueue(&reply);
                        continue;
                    }
                    match self.handle_message(line, end_tx).await {
                        Ok(more) => is_control_open = more,
                        Err(error) => return error,
                    }
                }
                beat = next_heartbeat(&mut self.relay), if !self.control_stream.has_unsent() => {
                    self.enqueue(&EdgeMessage::DelegatedHeartbeat(beat));
                }
                // A leaving tunnel gets no new streams that bulk transfers could delay.
                () = self.load.wait_for_bulk(), if phase == Phase::Open => self.bulk_tracker.mark(self.slot),
                () = leave_token.cancelled(), if phase == Phase::Open => {
                    self.release_claims();
                    phase = self.begin_leave();
                }
                _ = leave_check.tick(), if phase != Phase::Open => match &mut phase {
                    Phase::Serving { deadline, next_check } => {
                        let now = Instant::now();
                        let settled = now >= *next_check && self.load.rotate_generation();
                        if now >= *next_check {
                            *next_check = now + self.lasting_age();
                        }
                        if settled || now >= *deadline {
                            phase = self.send_leave(false);
                        }
                    }
                    Phase::Leaving { idle_since } if !streams.is_empty() => *idle_since = Instant::now(),
                    Phase::Leaving { idle_since } if idle_since.elapsed() >= LINGER => {
                        return ConnectError::silent("this edge closed the tunnel");
                    }
                    Phase::Leaving { .. } | Phase::Open => {}
                },
            }
        }
    }

    /// Announces to the gateway that this tunnel leaves. While streams of an edge that stops last, it serves new ones as
    /// well if the gateway has no other tunnel for them.
    fn begin_leave(&mut self) -> Phase {
        self.load.rotate_generation();
        if !self.context.stop.is_cancelled() || self.load.earlier_streams() == 0 {
            return self.send_leave(false);
        }
        let drain = self.context.config.timeouts.drain;
        let (now, settle) = (Instant::now(), self.lasting_age());
        self.send_leave(true);
        Phase::Serving {
            deadline: now + drain.saturating_sub(settle),
            next_check: now + settle,
        }
    }

    /// Returns the age from which a stream lasts: new streams are given up when none does, and so long before the drain ends.
    fn lasting_age(&self) -> Duration {
        MAX_LASTING_AGE.min(self.context.config.timeouts.drain / 4)
    }

    fn send_leave(&mut self, serves: bool) -> Phase {
        self.enqueue(&EdgeMessage::Leave {
            detail: "this edge is closing the tunnel".into(),
            until_idle: !self.context.stop.is_cancelled(),
            serves,
        });
        let idle_since = Instant::now();
        Phase::Leaving { idle_since }
    }

    /// Gives up what only a tunnel has that gets new streams.
    fn release_claims(&mut self) {
        self.summary.mark_leaving();
        // A gateway with only leaving tunnels is dialled like any other.
        self.lease = None;
        self.membership_updater = None;
        self.relay = None;
    }

    /// Returns the message that is answered at once, if there is one.
    async fn immediate_reply(
        &mut self,
        message: &Result<GatewayMessage, ControlStreamError>,
    ) -> Option<EdgeMessage> {
        match message {
            Ok(GatewayMessage::Window { bytes }) => Some(EdgeMessage::Window {
                bytes: self.edge_side.resize_window(*bytes),
            }),
            Ok(GatewayMessage::Roots { pem }) => Some(EdgeMessage::Roots {
                roots: trust_roots::update_roots(&self.context, pem).await,
            }),
            _ => None,
        }
    }

    /// Handles a message that the gateway sends while the tunnel stands. Returns false when the gateway will send no more.
    async fn handle_message(
        &mut self,
        message: Result<GatewayMessage, ControlStreamError>,
        end_tx: &mut Option<oneshot::Sender<SessionEnd>>,
    ) -> Result<bool, ConnectError> {
        match message {
            Ok(GatewayMessage::Drain { .. }) => {
                self.summary.mark_leaving();
                if let Some(claim) = &self.lease {
                    claim.mark_draining();
                }
                // A draining gateway no longer announces the pool leader, and sends no nonces.
                self.membership_updater = None;
                self.relay = None;
                if let Some(end_tx) = end_tx.take() {
                    // A stopped slot does not receive this.
                    let _ = end_tx.send(SessionEnd::Draining);
                }
            }
            Ok(GatewayMessage::Gateways { gateways, replicas }) => {
                if let Some(claim) = &self.lease {
                    claim.set_replicas(replicas);
                }
                self.context.gateways.update_announced(gateways).await;
            }
            Ok(GatewayMessage::Ports(listed)) => {
                (self.context.on_announced_ports)(listed, self.local_addr);
            }
            Ok(GatewayMessage::Pool(members)) => {
                if let Some(voice) = &self.membership_updater {
                    voice.update(members);
                }
            }
            Ok(GatewayMessage::HeartbeatNonce { nonce }) => {
                if let Some(relay) = &self.relay {
                    relay.set_nonce(nonce);
                }
            }
            Ok(line @ GatewayMessage::Dismiss { .. }) => return Err(unexpected_message(&line)),
            Ok(GatewayMessage::Renew { within_ms }) => {
                let within = Duration::from_millis(within_ms);
                self.context.renewal_requests.send_replace(within);
            }
            Ok(_) => {}
            Err(error) => {
                debug!(%error, "the control stream ended");
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Queues a line for the gateway. One that does not hear it sees the tunnel close.
    fn enqueue(&mut self, message: &EdgeMessage) {
        if let Err(error) = self.control_stream.enqueue(message) {
            debug!(%error, "cannot send a control message to the gateway");
        }
    }

    fn accept_stream(&self, request: StreamRequest, streams: &TaskGroup) {
        let context = &self.context;
        let Ok(permit) = context.stream_permits.clone().try_acquire_owned() else {
            let max_streams = context.config.limits.streams;
            let detail = format!(
                "{} has {max_streams} streams open, which is its limit (limits.streams)",
                context.node
            );
            return request
                .responder
                .reject(&RejectCode::Busy.with_detail(detail));
        };
        let span = info_span!("stream", target = %request.target);
        let stream_task = (context.serve_stream)(request);
        streams.spawn(span, async move {
            stream_task.await;
            drop(permit);
        });
    }
}

/// Returns the next heartbeat to send; never, if the tunnel relays none.
async fn next_heartbeat(relay: &mut Option<TunnelRelay>) -> Box<DelegatedHeartbeat> {
    match relay {
        Some(relay) => relay.next().await,
        None => std::future::pending().await,
    }
}
