//! One tunnel after its hello (`handshake`): its streams and its end.
//!
//! The tunnel's connection makes progress only while this module polls it, so one loop handles everything. Streams are tasks
//! of the session. When the tunnel is lost, each stream ends by itself and resets its upstream. To leave, the edge announces
//! that to the gateway, serves the open streams, and lets the gateway close the tunnel. The edge never initiates a GOAWAY
//! (invariant 11). An edge that stops while streams are open still serves new streams for which the gateway has no other
//! tunnel to the node.

use super::{
    super::{
        api_cache::membership::MembershipUpdater,
        connect_error::ConnectError,
        dial::{GatewayAddr, GatewayConnection},
        gateway_list::Announcer,
        heartbeat::{HeartbeatRelay, relay::TunnelRelay},
    },
    bulk::BulkTracker,
    connected_gateways::{GatewayLease, TunnelGroup},
    context::{TunnelContext, TunnelUnavailable, UnhealthyPorts},
    handshake::{self, TlsErrorSlot, TunnelHandshake, TunnelIo, unexpected_message},
};
use crate::{metrics::TunnelGuard, status::TunnelSummary};
use causeway_rt::task::TaskGroup;
use causeway_tunnel::{
    RejectCode, TunnelEnd,
    control_stream::{ControlStream, ControlStreamError, EdgeMessage, GatewayMessage, GoAway},
    edge_side::{EdgeSide, IncomingStream, StreamRequest},
    heartbeat::DelegatedHeartbeat,
    load::TunnelLoad,
};
use rustls_pki_types::CertificateDer;
use std::{net::IpAddr, pin::pin, sync::Arc, time::Duration};
use tokio::{
    sync::{oneshot, watch},
    time::{Instant, Interval, MissedTickBehavior, interval, timeout},
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{debug, info, info_span, warn};

/// Time that streams get to reset their upstreams after the loss of their tunnel.
const LOSS_GRACE: Duration = Duration::from_secs(5);
/// Time that a tunnel of a stopping edge waits, after its last stream, for the gateway to close it.
const STOP_LINGER: Duration = Duration::from_secs(1);
/// Interval at which a draining tunnel checks whether its streams have ended.
const LEAVE_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Age from which a stream counts as long, or a quarter of `timeouts.drain` if that is shorter. A stopping edge serves new
/// streams while a long one is open. Short requests end earlier.
const MAX_LASTING_AGE: Duration = Duration::from_secs(1);

/// A registered tunnel.
pub(super) struct TunnelSession {
    edge_side: EdgeSide<TunnelIo>,
    control_stream: ControlStream,
    gateway_addr: GatewayAddr,
    /// Address of the node from which the tunnel was dialled.
    local_addr: Option<IpAddr>,
    /// Certificate chain of the gateway.
    gateway_chain: Vec<CertificateDer<'static>>,
    slot: u32,
    early_streams: Vec<StreamRequest>,
    tls_error: TlsErrorSlot,
    load: Arc<TunnelLoad>,
    bulk_tracker: Arc<BulkTracker>,
    context: Arc<TunnelContext>,
    summary: TunnelSummary,
    _tunnel_guard: TunnelGuard,
    /// Guard that keeps this session among the newest sessions.
    newest_guard: Option<DropGuard>,
    /// Handle for the gateway addresses that the gateway announces.
    announcer: Announcer,
    /// Lease of the gateway, if the edge has tunnels at several gateways.
    lease: Option<GatewayLease>,
    /// Handle for the gateway's announcements of the node's pool, until the gateway drains.
    membership_updater: Option<MembershipUpdater>,
    /// Results of the health checks of upstreams, which has seen those that the gateway has received.
    unhealthy_ports: watch::Receiver<UnhealthyPorts>,
    /// Relay of heartbeats of other pool members, until the gateway drains.
    relay: Option<TunnelRelay>,
    /// End of the gateway's drain, if it drains.
    drain_end: Option<Instant>,
}

/// Handle of a tunnel that its own task serves.
pub(super) struct SessionHandle {
    pub(super) gateway_addr: GatewayAddr,
    /// Whether the gateway drains.
    pub(super) is_draining: bool,
    /// Token that requests the tunnel to leave.
    pub(super) leave_token: CancellationToken,
    /// Token that is cancelled when a successor of the gateway accepts tunnels at the same address.
    pub(super) successor: CancellationToken,
    /// Token that is cancelled when the tunnel has ended.
    pub(super) ended: CancellationToken,
}

impl SessionHandle {
    /// Marks the gateway as draining.
    pub(super) fn into_draining(self) -> Self {
        Self {
            is_draining: true,
            ..self
        }
    }
}

/// Requests a tunnel to leave, if there is one.
pub(super) fn request_drain(handle: Option<SessionHandle>) {
    if let Some(handle) = handle {
        handle.leave_token.cancel();
    }
}

/// Phase of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// The edge stops, or the gateway drains and the edge has connected to another one. It still serves new streams for which the
    /// gateway has no other tunnel to the node.
    Serving {
        deadline: Instant,
        /// Time of the next check for long streams.
        next_check: Instant,
        /// Whether the edge stops.
        stopping: bool,
    },
    /// The tunnel ends when it has had no stream for a while.
    Leaving {
        idle_since: Instant,
    },
}

/// Event of a tunnel besides its streams.
enum Event {
    /// The tunnel has ended.
    Ended(TunnelEnd),
    /// All queued messages are sent.
    Sent,
    /// The gateway has sent a message, or the control stream has failed.
    Message(Result<GatewayMessage, ControlStreamError>),
    /// A heartbeat of another pool member has to be sent.
    Heartbeat(Box<DelegatedHeartbeat>),
    /// The results of the health checks have changed.
    HealthChanged,
    /// A stream moves bulk.
    Bulk,
    /// The edge stops, or no longer needs the tunnel.
    LeaveRequested,
    /// A check of a tunnel that leaves is due.
    LeaveCheckDue,
}

/// Owner of the tunnel.
pub(super) struct SessionOwner {
    pub(super) group: TunnelGroup,
    pub(super) slot: u32,
    /// Whether the tunnel replaces an open one, so that only the same gateway is accepted.
    pub(super) only_held: bool,
    /// Whether the gateway was discovered behind an address of other tunnels.
    pub(super) is_discovered: bool,
    /// Tracker of the slots that move bulk.
    pub(super) bulk_tracker: Arc<BulkTracker>,
}

/// Message of a session to its slot, sent once.
pub(super) enum SessionEnd {
    /// The session has ended.
    Ended(ConnectError),
    /// The gateway drains, so this edge should connect to another one. The session continues.
    Draining,
}

impl TunnelSession {
    /// Starts HTTP/2 and exchanges the hellos, both within `timeouts.hello`.
    ///
    /// # Errors
    /// If the gateway does not answer in time, or refuses this edge.
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
        let (group, slot) = ((owner.group, owner.is_discovered), owner.slot);
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
                .exchange_hello(context, group, (slot, owner.only_held))
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
            announcer: established.announcer,
            lease: established.lease,
            membership_updater: established.membership_updater,
            unhealthy_ports: established.unhealthy_ports,
            drain_end: None,
        })
    }

    /// Takes the certificate chain of the gateway.
    pub(super) fn take_gateway_chain(&mut self) -> Vec<CertificateDer<'static>> {
        std::mem::take(&mut self.gateway_chain)
    }

    /// Returns the address of the gateway.
    pub(super) fn gateway_addr(&self) -> &GatewayAddr {
        &self.gateway_addr
    }

    /// Serves streams until the tunnel ends. After `leave_token` is cancelled, the tunnel ends with its last stream. Cancels
    /// `successor` if the gateway has one.
    pub(super) async fn serve(
        mut self,
        (leave_token, successor): (CancellationToken, CancellationToken),
        end_tx: oneshot::Sender<SessionEnd>,
    ) {
        let streams = TaskGroup::default();
        for request in std::mem::take(&mut self.early_streams) {
            accept_stream(&self.context, Box::new(request), &streams);
        }
        let mut end_tx = Some(end_tx);
        let error = self
            .run((&leave_token, &successor), &mut end_tx, &streams)
            .await;
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
        (leave_token, successor): (&CancellationToken, &CancellationToken),
        end_tx: &mut Option<oneshot::Sender<SessionEnd>>,
        streams: &TaskGroup,
    ) -> ConnectError {
        let mut leave_check = interval(LEAVE_CHECK_INTERVAL);
        // The checks begin when the tunnel is old.
        leave_check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut is_control_open, mut phase) = (true, Phase::Open);
        loop {
            match self
                .next_event(
                    (phase, is_control_open),
                    (leave_token, &mut leave_check),
                    streams,
                )
                .await
            {
                Event::Ended(ended) => return self.tls_error.to_connect_error(&ended),
                Event::Sent => {}
                Event::Message(line) => {
                    if let Ok(
                        line @ GatewayMessage::Dismiss {
                            why: GoAway::Superseded,
                            ..
                        },
                    ) = &line
                    {
                        phase = self.leave_to_successor(line, end_tx);
                        continue;
                    }
                    if let Some(reply) = self.immediate_reply(&line).await {
                        self.enqueue(&reply);
                        continue;
                    }
                    match self.handle_message(line, (end_tx, successor)).await {
                        Ok(more) => is_control_open = more,
                        Err(error) => return error,
                    }
                }
                Event::Heartbeat(heartbeat) => {
                    self.enqueue(&EdgeMessage::DelegatedHeartbeat(heartbeat));
                }
                Event::HealthChanged => {
                    let unhealthy = self.unhealthy_ports.borrow_and_update().clone();
                    let unhealthy = unhealthy.iter().copied().collect();
                    self.enqueue(&EdgeMessage::Health { unhealthy });
                }
                Event::Bulk => self.bulk_tracker.mark(self.slot),
                Event::LeaveRequested => {
                    self.release_claims();
                    phase = self.begin_leave();
                }
                Event::LeaveCheckDue => {
                    let Some(next) = self.next_phase(phase, streams) else {
                        return ConnectError::silent("this edge closed the tunnel");
                    };
                    phase = next;
                }
            }
        }
    }

    /// Leaves, because new streams go to another process of this node. Open streams continue here.
    fn leave_to_successor(
        &mut self,
        superseded: &GatewayMessage,
        end_tx: &mut Option<oneshot::Sender<SessionEnd>>,
    ) -> Phase {
        self.release_claims();
        if let Some(end_tx) = end_tx.take() {
            // A stopped slot does not receive this.
            let _ = end_tx.send(SessionEnd::Ended(unexpected_message(superseded)));
        }
        Phase::Leaving {
            idle_since: Instant::now(),
        }
    }

    /// Accepts streams until another event of the tunnel. The waits for such events begin once, and not
    /// again for each stream.
    async fn next_event(
        &mut self,
        (phase, is_control_open): (Phase, bool),
        (leave_token, leave_check): (&CancellationToken, &mut Interval),
        streams: &TaskGroup,
    ) -> Event {
        let is_all_sent = !self.control_stream.has_unsent();
        let is_check_due = phase != Phase::Open || self.drain_end.is_some();
        let mut event = pin!(async {
            tokio::select! {
                line = self.control_stream.exchange(), if is_control_open => {
                    line.transpose().map_or(Event::Sent, Event::Message)
                }
                heartbeat = next_heartbeat(&mut self.relay), if is_all_sent => Event::Heartbeat(heartbeat),
                // The runner of the checks owns the sender.
                Ok(()) = self.unhealthy_ports.changed(), if is_all_sent => Event::HealthChanged,
                // A draining tunnel gets no new streams that bulk transfers could delay.
                () = self.load.wait_for_bulk(), if phase == Phase::Open => Event::Bulk,
                () = leave_token.cancelled(), if phase == Phase::Open => Event::LeaveRequested,
                _ = leave_check.tick(), if is_check_due => Event::LeaveCheckDue,
            }
        });
        loop {
            tokio::select! {
                next = self.edge_side.next_stream() => match next {
                    Ok(IncomingStream::Stream(asked)) => accept_stream(&self.context, asked, streams),
                    Ok(IncomingStream::Control(_)) => debug!("the gateway opened a second control stream"),
                    Err(ended) => return Event::Ended(ended),
                },
                event = &mut event => return event,
            }
        }
    }

    /// Returns the phase after a check of the streams and of the other gateways, or `None` if the tunnel has left.
    fn next_phase(&mut self, phase: Phase, streams: &TaskGroup) -> Option<Phase> {
        Some(match phase {
            Phase::Open if self.is_served_by_other_gateway() => self.begin_leave(),
            // The gateway drains, and now the edge stops as well.
            Phase::Serving {
                stopping: false, ..
            } if self.context.stop.is_cancelled() => self.begin_leave(),
            Phase::Serving {
                deadline,
                mut next_check,
                stopping,
            } => {
                let now = Instant::now();
                let settled = now >= next_check && self.load.rotate_generation();
                if settled || now >= deadline {
                    return Some(self.send_leave(false));
                }
                if now >= next_check {
                    next_check = now + self.lasting_age();
                }
                Phase::Serving {
                    deadline,
                    next_check,
                    stopping,
                }
            }
            Phase::Leaving { .. } if !streams.is_empty() => Phase::Leaving {
                idle_since: Instant::now(),
            },
            Phase::Leaving { idle_since } if idle_since.elapsed() >= self.linger() => return None,
            Phase::Leaving { .. } | Phase::Open => phase,
        })
    }

    /// Returns the time that a leaving tunnel waits, after its last stream, for the gateway to close it. The gateway may have opened
    /// a stream before it received the announcement, which a link or a busy gateway can delay by seconds.
    fn linger(&self) -> Duration {
        if self.context.stop.is_cancelled() {
            STOP_LINGER
        } else {
            self.context.config.timeouts.silence
        }
    }

    /// Announces to the gateway that this tunnel leaves. If the edge stops and has long streams, or if the gateway drains, the edge
    /// also serves new streams for which the gateway has no other tunnel. A gateway that drains closes the tunnel itself.
    fn begin_leave(&mut self) -> Phase {
        if let Some(deadline) = self.drain_end
            && !self.context.stop.is_cancelled()
        {
            self.send_leave(true);
            return Phase::Serving {
                deadline,
                next_check: deadline,
                stopping: false,
            };
        }
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
            stopping: true,
        }
    }

    /// Whether the gateway drains and the edge, which has tunnels at several gateways, is connected to another one. The tunnel keeps
    /// its lease, so that the edge does not dial the draining gateway.
    fn is_served_by_other_gateway(&self) -> bool {
        self.drain_end.is_some()
            && self.lease.is_some()
            && self.context.connected_gateways.count().connected > 0
    }

    /// Returns the age from which a stream counts as long. It is also the interval of the checks, and the time before the end
    /// of the drain from which no new streams are served.
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

    /// Releases everything that only a tunnel with new streams needs.
    fn release_claims(&mut self) {
        self.summary.mark_draining();
        // A gateway with only draining tunnels is dialled like any other.
        self.lease = None;
        self.membership_updater = None;
        self.relay = None;
    }

    /// Returns the message that must be sent at once as a reply, if there is one.
    async fn immediate_reply(
        &mut self,
        message: &Result<GatewayMessage, ControlStreamError>,
    ) -> Option<EdgeMessage> {
        match message {
            Ok(GatewayMessage::Roots { pem }) => Some(EdgeMessage::Roots {
                roots: handshake::update_roots(&self.context, pem).await,
            }),
            Ok(GatewayMessage::Crls { pem }) => {
                let digest = handshake::update_crls(&self.context, pem).await?;
                let digest = digest.to_string();
                Some(EdgeMessage::Crls { digest })
            }
            _ => None,
        }
    }

    /// Handles a message from the gateway while the tunnel is open. Returns false if the gateway will send no more messages.
    async fn handle_message(
        &mut self,
        message: Result<GatewayMessage, ControlStreamError>,
        (end_tx, successor_token): (&mut Option<oneshot::Sender<SessionEnd>>, &CancellationToken),
    ) -> Result<bool, ConnectError> {
        match message {
            Ok(GatewayMessage::Drain {
                grace_ms,
                successor,
            }) => {
                self.summary.mark_draining();
                if let Some(claim) = &self.lease {
                    claim.mark_draining();
                }
                self.drain_end = Some(Instant::now() + Duration::from_millis(grace_ms));
                if successor {
                    // The successor gets the tunnels of this group.
                    self.lease = None;
                    successor_token.cancel();
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
                self.announcer.update(gateways).await;
            }
            Ok(GatewayMessage::Rebalance) => {
                if let Some(claim) = &self.lease {
                    claim.mark_crowded();
                }
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

    /// Queues a message for the gateway. A message that cannot be sent is left out.
    fn enqueue(&mut self, message: &EdgeMessage) {
        if let Err(error) = self.control_stream.enqueue(message) {
            warn!(%error, "cannot send a control message to the gateway");
        }
    }
}

fn accept_stream(context: &TunnelContext, request: Box<StreamRequest>, streams: &TaskGroup) {
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

/// Returns the next heartbeat to send; never, if the tunnel relays none.
async fn next_heartbeat(relay: &mut Option<TunnelRelay>) -> Box<DelegatedHeartbeat> {
    match relay {
        Some(relay) => relay.next().await,
        None => std::future::pending().await,
    }
}
