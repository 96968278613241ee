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
        trust_roots,
    },
    bulk::BulkTracker,
    connected_gateways::{GatewayLease, TunnelGroup},
    context::{TunnelContext, TunnelUnavailable},
    handshake::{TunnelHandshake, unexpected},
    tls_error::{TlsErrorSlot, TunnelIo},
};
use crate::{metrics::TunnelGuard, status::TunnelSummary};
use causeway_rt::task::TaskGroup;
use causeway_tunnel::{
    RejectCode,
    control_stream::{ControlStream, ControlStreamError, EdgeMessage, GatewayMessage, GoAway},
    edge_side::{self, EdgeSide, EdgeSideConfig, IncomingStream, StreamRequest},
    io_observer::ObservedIo,
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
const LOSS: Duration = Duration::from_secs(5);
/// After its last stream a leaving tunnel waits this long for the gateway to close it: a stream may have
/// been opened while the word was on its way.
const LINGER: Duration = Duration::from_secs(1);
/// How often a leaving tunnel looks whether its streams are over.
const LOOK: Duration = Duration::from_millis(50);

/// A stopping edge serves new streams while one is older than this; short requests end within it.
const SETTLE: Duration = Duration::from_secs(1);

/// A registered tunnel.
pub(super) struct TunnelSession {
    server: EdgeSide<TunnelIo>,
    control: ControlStream,
    place: GatewayAddr,
    /// From which address of the node it was dialled.
    from: Option<IpAddr>,
    /// By what its gateway was believed.
    shown: Vec<CertificateDer<'static>>,
    slot: u32,
    early: Vec<StreamRequest>,
    fault: TlsErrorSlot,
    load: Arc<TunnelLoad>,
    bulk: Arc<BulkTracker>,
    links: Arc<TunnelContext>,
    row: TunnelSummary,
    _standing: TunnelGuard,
    /// Says until when it counts among the newest sessions.
    newest: Option<DropGuard>,
    /// Lease of the gateway, if the edge has tunnels at all gateways.
    claim: Option<GatewayLease>,
    /// Handle for the gateway's announcements of the node's pool, until the gateway drains.
    voice: Option<MembershipUpdater>,
}

/// A tunnel that is served by a task of its own.
pub(super) struct SessionHandle {
    pub(super) place: GatewayAddr,
    /// Its gateway drains.
    pub(super) drains: bool,
    /// Asks it to leave.
    pub(super) leave: CancellationToken,
    /// It is over.
    pub(super) over: CancellationToken,
}

impl SessionHandle {
    /// Notes that its gateway drains.
    pub(super) fn draining(self) -> Self {
        Self {
            drains: true,
            ..self
        }
    }
}

/// Asks a tunnel to leave, if there is one.
pub(super) fn request_drain(served: Option<SessionHandle>) {
    if let Some(served) = served {
        served.leave.cancel();
    }
}

/// Stage of a tunnel's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Standing,
    /// The edge stops, and serves what has no other way to its node.
    Serving {
        until: Instant,
        /// When it is looked next whether a stream lasts.
        next: Instant,
    },
    /// It ends when it has had no stream for a while.
    Leaving {
        quiet: Instant,
    },
}

/// Owner of the tunnel.
pub(super) struct SessionOwner {
    pub(super) party: TunnelGroup,
    pub(super) slot: u32,
    /// It belongs to a tunnel that stands: no other gateway than that one's will do.
    pub(super) keeps: bool,
    /// Tracker of the slots that move bulk.
    pub(super) bulk: Arc<BulkTracker>,
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
        links: &Arc<TunnelContext>,
        dialled: GatewayConnection,
        whose: SessionOwner,
    ) -> Result<Self, TunnelUnavailable> {
        let GatewayConnection {
            io,
            place,
            round_trip,
        } = dialled;
        let traffic = io.get_ref().0.traffic();
        let tcp = io.get_ref().0.get_ref();
        let from = tcp.and_then(|tcp| tcp.local_addr().ok());
        let slot = whose.slot;
        let shown = io.get_ref().1.peer_certificates().unwrap_or_default();
        let shown = shown.iter().map(|one| one.clone().into_owned()).collect();
        let fault = TlsErrorSlot::default();
        let settings = EdgeSideConfig {
            silence: links.config.timeouts.silence,
            round_trip,
            bulk: u64::try_from(links.config.tunnels.bulk_after).unwrap_or(u64::MAX),
            pressure: links.pressure.clone(),
            ..EdgeSideConfig::default()
        };
        let bound = links.config.timeouts.hello;
        let greeting = async {
            let io = ObservedIo::new(io, fault.clone());
            let server = edge_side::accept(io, traffic, settings)
                .await
                .map_err(|ended| fault.trouble(&ended))?;
            let mut greeting = TunnelHandshake {
                server,
                early: Vec::new(),
                fault: fault.clone(),
            };
            let greeted = greeting
                .greet(links, whose.party, (slot, whose.keeps))
                .await?;
            Ok::<_, TunnelUnavailable>((greeting, greeted))
        };
        let late = || ConnectError::silent(format!("{} sent no hello in time", place.gateway));
        let greeted = timeout(bound, greeting).await.map_err(|_| late())?;
        let (greeting, greeted) = greeted?;
        let load = greeting.server.load();
        info!(gateway = place.gateway, round_trip = ?round_trip, "tunnel registered");
        Ok(Self {
            server: greeting.server,
            control: greeted.control,
            row: links.state.stands(slot, &place, round_trip, load.clone()),
            place,
            from: from.map(|from| from.ip()),
            shown,
            slot,
            early: greeting.early,
            fault: greeting.fault,
            load,
            bulk: whose.bulk,
            newest: Some(links.newest.enter(greeted.gateway, slot)),
            links: links.clone(),
            _standing: links.metrics.standing(),
            claim: greeted.claim,
            voice: greeted.voice,
        })
    }

    /// By what its gateway was believed.
    pub(super) fn shown(&mut self) -> Vec<CertificateDer<'static>> {
        std::mem::take(&mut self.shown)
    }

    /// Returns the address of the gateway.
    pub(super) fn place(&self) -> &GatewayAddr {
        &self.place
    }

    /// Serves until the tunnel ends, or `leave` and the last stream is over.
    pub(super) async fn serve(
        mut self,
        leave: CancellationToken,
        told: oneshot::Sender<SessionEnd>,
    ) {
        let streams = TaskGroup::default();
        for asked in std::mem::take(&mut self.early) {
            self.accept_stream(asked, &streams);
        }
        let mut told = Some(told);
        let ended = self.run(&leave, &mut told, &streams).await;
        info!(
            gateway = self.place.gateway,
            reason = ended.what(),
            "tunnel ended"
        );
        // The slot dials again after this session ends, and may then own this gateway again.
        drop((self.claim.take(), self.voice.take(), self.newest.take()));
        let Self { server, row, .. } = self;
        // Removed first: whether another tunnel is open decides how a refused identity is handled.
        drop(row);
        if let Some(told) = told {
            // A stopped slot does not receive this.
            let _ = told.send(SessionEnd::Ended(ended));
        }
        drop(server);
        streams.drain(LOSS).await;
    }

    async fn run(
        &mut self,
        leave: &CancellationToken,
        told: &mut Option<oneshot::Sender<SessionEnd>>,
        streams: &TaskGroup,
    ) -> ConnectError {
        let mut look = interval(LOOK);
        let (mut heard, mut phase) = (true, Phase::Standing);
        loop {
            tokio::select! {
                next = self.server.next() => match next {
                    Ok(IncomingStream::Stream(asked)) => self.accept_stream(*asked, streams),
                    Ok(IncomingStream::Control(_)) => debug!("the gateway opened a second control stream"),
                    Err(ended) => return self.fault.trouble(&ended),
                },
                line = self.control.exchange(), if heard => {
                    let Some(line) = line.transpose() else { continue };
                    if let Ok(line @ GatewayMessage::Dismiss { why: GoAway::Superseded, .. }) = &line {
                        // New streams go to another process of this node; open streams continue here.
                        self.leaves();
                        phase = Phase::Leaving { quiet: Instant::now() };
                        if let Some(told) = told.take() {
                            // A stopped slot does not receive this.
                            let _ = told.send(SessionEnd::Ended(unexpected(line)));
                        }
                        continue;
                    }
                    if let Some(answer) = self.answer(&line).await {
                        self.tell(&answer);
                        continue;
                    }
                    match self.hear(line, told).await {
                        Ok(more) => heard = more,
                        Err(trouble) => return trouble,
                    }
                }
                // A leaving tunnel gets no new streams that bulk transfers could delay.
                () = self.load.bulk(), if phase == Phase::Standing => self.bulk.mark(self.slot),
                () = leave.cancelled(), if phase == Phase::Standing => {
                    self.leaves();
                    phase = self.leave();
                }
                _ = look.tick(), if phase != Phase::Standing => match &mut phase {
                    Phase::Serving { until, next } => {
                        let now = Instant::now();
                        let settled = now >= *next && self.load.turn_over();
                        if now >= *next {
                            *next = now + self.settle();
                        }
                        if settled || now >= *until {
                            phase = self.say_leave(false);
                        }
                    }
                    Phase::Leaving { quiet } if !streams.is_empty() => *quiet = Instant::now(),
                    Phase::Leaving { quiet } if quiet.elapsed() >= LINGER => {
                        return ConnectError::silent("this edge closed the tunnel");
                    }
                    Phase::Leaving { .. } | Phase::Standing => {}
                },
            }
        }
    }

    /// Announces to the gateway that this tunnel leaves. While streams of an edge that stops last, it serves new ones as
    /// well if the gateway has no other tunnel for them.
    fn leave(&mut self) -> Phase {
        self.load.turn_over();
        if !self.links.stop.is_cancelled() || self.load.earlier() == 0 {
            return self.say_leave(false);
        }
        let drain = self.links.config.timeouts.drain;
        let (now, settle) = (Instant::now(), self.settle());
        self.say_leave(true);
        Phase::Serving {
            until: now + drain.saturating_sub(settle),
            next: now + settle,
        }
    }

    /// Returns the age from which a stream lasts: new streams are given up when none does, and so long before the drain ends.
    fn settle(&self) -> Duration {
        SETTLE.min(self.links.config.timeouts.drain / 4)
    }

    fn say_leave(&mut self, serves: bool) -> Phase {
        self.tell(&EdgeMessage::Leave {
            detail: "this edge is closing the tunnel".into(),
            until_idle: !self.links.stop.is_cancelled(),
            serves,
        });
        let quiet = Instant::now();
        Phase::Leaving { quiet }
    }

    /// Gives up what only a tunnel has that gets new streams.
    fn leaves(&mut self) {
        self.row.leaves();
        // A gateway with only leaving tunnels is dialled like any other.
        self.claim = None;
        self.voice = None;
    }

    /// Returns the message that is answered at once, if there is one.
    async fn answer(
        &mut self,
        line: &Result<GatewayMessage, ControlStreamError>,
    ) -> Option<EdgeMessage> {
        match line {
            Ok(GatewayMessage::Window { bytes }) => Some(EdgeMessage::Window {
                bytes: self.server.resize(*bytes),
            }),
            Ok(GatewayMessage::Roots { pem }) => Some(EdgeMessage::Roots {
                roots: trust_roots::update_roots(&self.links, pem).await,
            }),
            _ => None,
        }
    }

    /// Handles a message that the gateway sends while the tunnel stands. Returns false when the gateway will send no more.
    async fn hear(
        &mut self,
        line: Result<GatewayMessage, ControlStreamError>,
        told: &mut Option<oneshot::Sender<SessionEnd>>,
    ) -> Result<bool, ConnectError> {
        match line {
            Ok(GatewayMessage::Drain { .. }) => {
                self.row.leaves();
                if let Some(claim) = &self.claim {
                    claim.drains();
                }
                // A draining gateway no longer announces the pool leader.
                self.voice = None;
                if let Some(told) = told.take() {
                    // A stopped slot does not receive this.
                    let _ = told.send(SessionEnd::Draining);
                }
            }
            Ok(GatewayMessage::Gateways { gateways, replicas }) => {
                if let Some(claim) = &self.claim {
                    claim.says(replicas);
                }
                self.links.gateways.learn(gateways).await;
            }
            Ok(GatewayMessage::Ports(listed)) => (self.links.list)(listed, self.from),
            Ok(GatewayMessage::Pool(members)) => {
                if let Some(voice) = &self.voice {
                    voice.says(members);
                }
            }
            Ok(line @ GatewayMessage::Dismiss { .. }) => return Err(unexpected(&line)),
            Ok(GatewayMessage::Renew { within_ms }) => {
                let within = Duration::from_millis(within_ms);
                self.links.renewal.send_replace(within);
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
    fn tell(&mut self, message: &EdgeMessage) {
        if let Err(error) = self.control.queue(message) {
            debug!(%error, "cannot send a control message to the gateway");
        }
    }

    fn accept_stream(&self, asked: StreamRequest, streams: &TaskGroup) {
        let links = &self.links;
        let Ok(place) = links.places.clone().try_acquire_owned() else {
            let most = links.config.limits.streams;
            let detail = format!(
                "{} has {most} streams open, which is its limit (limits.streams)",
                links.node
            );
            return asked.reply.refuse(&RejectCode::Busy.because(detail));
        };
        let span = info_span!("stream", target = %asked.target);
        let serving = (links.serve)(asked);
        streams.spawn(span, async move {
            serving.await;
            drop(place);
        });
    }
}
