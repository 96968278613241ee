//! One tunnel: its streams and its end, after its hello (`greeting`).
//!
//! The tunnel's connection moves only while this polls it, so everything here happens in one loop. Streams are
//! tasks of the session: when the tunnel is lost each ends by itself, and passes the reset on to its app.
//! To leave: say so, serve what is open, let the gateway close; the edge initiates no GOAWAY (design trap 11). An edge that
//! stops while streams are open still serves new ones that have no other way to the node.

use super::{
    super::{
        dial::{Dialled, Place},
        reader::Voice,
        roots,
        trouble::Trouble,
    },
    Links, Missed,
    bulk::Bulk,
    greeting::{Greeting, unexpected},
    heard::Fault,
    reached::{Claim, Party},
};
use crate::{metrics::Standing, state::Row};
use causeway_tunnel::{
    Refusal,
    hello::{Control, ControlError, Dismissal, ToEdge, ToGateway},
    load::Load,
    server::{self, Asked, Incoming, Server, Settings},
    socket::Counted,
    tap::Tap,
    task::Tasks,
};
use rustls_pki_types::CertificateDer;
use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    net::TcpStream,
    sync::oneshot,
    time::{Instant, interval, timeout},
};
use tokio_rustls::client::TlsStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{debug, info, info_span};

/// How long streams get to pass the loss of their tunnel on to their apps.
const LOSS: Duration = Duration::from_secs(5);
/// After its last stream a leaving tunnel waits this long for the gateway to close it: a stream may have
/// been opened while the word was on its way.
const LINGER: Duration = Duration::from_secs(1);
/// How often a leaving tunnel looks whether its streams are over.
const LOOK: Duration = Duration::from_millis(50);

/// A stopping edge serves new streams while one is older than this; short requests end within it.
const SETTLE: Duration = Duration::from_secs(1);

pub(super) type Io = Tap<TlsStream<Counted<TcpStream>>, Fault>;

/// A registered tunnel.
pub(super) struct Session {
    server: Server<Io>,
    control: Control,
    place: Place,
    /// From which address of the node it was dialled.
    from: Option<IpAddr>,
    /// By what its gateway was believed.
    shown: Vec<CertificateDer<'static>>,
    slot: u32,
    early: Vec<Asked>,
    fault: Fault,
    load: Arc<Load>,
    bulk: Arc<Bulk>,
    links: Arc<Links>,
    row: Row,
    _standing: Standing,
    /// Says until when it counts among the newest sessions.
    newest: Option<DropGuard>,
    /// Where all gateways are reached.
    claim: Option<Claim>,
    /// What its gateway tells of the node's pool, until it drains.
    voice: Option<Voice>,
}

/// The newest session of each slot at each gateway process, for as long as its tunnel stands.
#[derive(Debug, Default)]
pub(crate) struct NewestSessions(Mutex<HashMap<(String, u32), CancellationToken>>);

impl NewestSessions {
    /// Whether the newest session of this slot at this gateway process still has its tunnel.
    pub(super) fn stands(&self, gateway: &str, slot: u32) -> bool {
        let sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let session = sessions.get(&(gateway.to_owned(), slot));
        session.is_some_and(|over| !over.is_cancelled())
    }

    /// Enters a session, which counts until the returned guard is dropped.
    fn enter(&self, gateway: String, slot: u32) -> DropGuard {
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|_, over| !over.is_cancelled());
        let over = CancellationToken::new();
        sessions.insert((gateway, slot), over.clone());
        over.drop_guard()
    }
}

/// A tunnel that is served by a task of its own.
pub(super) struct Served {
    pub(super) place: Place,
    /// Its gateway drains.
    pub(super) drains: bool,
    /// Asks it to leave.
    pub(super) leave: CancellationToken,
    /// It is over.
    pub(super) over: CancellationToken,
}

impl Served {
    /// Notes that its gateway drains.
    pub(super) fn draining(self) -> Self {
        Self {
            drains: true,
            ..self
        }
    }
}

/// Asks a tunnel to leave, if there is one.
pub(super) fn leave(served: Option<Served>) {
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

/// Whose tunnel it is.
pub(super) struct Whose {
    pub(super) party: Party,
    pub(super) slot: u32,
    /// It belongs to a tunnel that stands: no other gateway than that one's will do.
    pub(super) keeps: bool,
    /// Which slots move bulk.
    pub(super) bulk: Arc<Bulk>,
}

/// What a slot hears of its session, once.
pub(super) enum Finish {
    /// It is over.
    Ended(Trouble),
    /// The gateway wants this edge to connect elsewhere; the session goes on.
    Draining,
}

impl Session {
    /// Begins HTTP/2 and says hello; both within `timeouts.hello`.
    ///
    /// # Errors
    /// If the gateway does not answer in time, or sends this edge away.
    pub(super) async fn register(
        links: &Arc<Links>,
        dialled: Dialled,
        whose: Whose,
    ) -> Result<Self, Missed> {
        let Dialled {
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
        let fault = Fault::default();
        let settings = Settings {
            silence: links.config.timeouts.silence,
            round_trip,
            bulk: u64::try_from(links.config.tunnels.bulk_after).unwrap_or(u64::MAX),
            pressure: links.pressure.clone(),
            ..Settings::default()
        };
        let bound = links.config.timeouts.hello;
        let greeting = async {
            let io = Tap::new(io, fault.clone());
            let server = server::accept(io, traffic, settings)
                .await
                .map_err(|ended| fault.trouble(&ended))?;
            let mut greeting = Greeting {
                server,
                early: Vec::new(),
                fault: fault.clone(),
            };
            let greeted = greeting
                .greet(links, whose.party, (slot, whose.keeps))
                .await?;
            Ok((greeting, greeted))
        };
        let late = || Trouble::silent(format!("{} said no hello in time", place.gateway));
        let greeted = timeout(bound, greeting).await;
        let (greeting, greeted) = greeted.unwrap_or_else(|_| Err(Missed::Trouble(late())))?;
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

    /// Where it leads.
    pub(super) fn place(&self) -> &Place {
        &self.place
    }

    /// Serves until the tunnel ends, or `leave` and the last stream is over.
    pub(super) async fn serve(mut self, leave: CancellationToken, told: oneshot::Sender<Finish>) {
        let streams = Tasks::default();
        for asked in std::mem::take(&mut self.early) {
            self.take(asked, &streams);
        }
        let mut told = Some(told);
        let ended = self.run(&leave, &mut told, &streams).await;
        info!(
            gateway = self.place.gateway,
            reason = ended.what(),
            "tunnel ended"
        );
        // Whoever hears that it is over dials anew, and may have this gateway again.
        drop((self.claim.take(), self.voice.take(), self.newest.take()));
        let Self { server, row, .. } = self;
        // Whether another tunnel stands decides about the identity that was refused here.
        drop(row);
        if let Some(told) = told {
            // A slot that stopped does not listen.
            let _ = told.send(Finish::Ended(ended));
        }
        drop(server);
        streams.drain(LOSS).await;
    }

    async fn run(
        &mut self,
        leave: &CancellationToken,
        told: &mut Option<oneshot::Sender<Finish>>,
        streams: &Tasks,
    ) -> Trouble {
        let mut look = interval(LOOK);
        let (mut heard, mut phase) = (true, Phase::Standing);
        loop {
            tokio::select! {
                next = self.server.next() => match next {
                    Ok(Incoming::Stream(asked)) => self.take(*asked, streams),
                    Ok(Incoming::Control(_)) => debug!("a second control stream was opened"),
                    Err(ended) => return self.fault.trouble(&ended),
                },
                line = self.control.exchange(), if heard => {
                    let Some(line) = line.transpose() else { continue };
                    if let Ok(line @ ToEdge::Dismiss { why: Dismissal::Superseded, .. }) = &line {
                        // Another process of this node gets the new streams; the open ones go on until they end.
                        self.leaves();
                        phase = Phase::Leaving { quiet: Instant::now() };
                        if let Some(told) = told.take() {
                            // A slot that stopped does not listen.
                            let _ = told.send(Finish::Ended(unexpected(line)));
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
                // What leaves takes no new streams that bulk could hold up.
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
                        return Trouble::silent("this edge left");
                    }
                    Phase::Leaving { .. } | Phase::Standing => {}
                },
            }
        }
    }

    /// Tells the gateway that this tunnel leaves. While streams of an edge that stops last, it serves new ones as well if the
    /// gateway has no other tunnel for them.
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
        self.tell(&ToGateway::Leave {
            detail: "this edge leaves".into(),
            until_idle: !self.links.stop.is_cancelled(),
            serves,
        });
        let quiet = Instant::now();
        Phase::Leaving { quiet }
    }

    /// Gives up what only a tunnel has that gets new streams.
    fn leaves(&mut self) {
        self.row.leaves();
        // A gateway that is reached by leaving tunnels alone is dialled like any other.
        self.claim = None;
        self.voice = None;
    }

    /// What is answered at once.
    async fn answer(&mut self, line: &Result<ToEdge, ControlError>) -> Option<ToGateway> {
        match line {
            Ok(ToEdge::Window { bytes }) => Some(ToGateway::Window {
                bytes: self.server.resize(*bytes),
            }),
            Ok(ToEdge::Roots { pem }) => Some(ToGateway::Roots {
                roots: roots::learn(&self.links, pem).await,
            }),
            _ => None,
        }
    }

    /// What the gateway says while the tunnel stands. False when it will say no more.
    async fn hear(
        &mut self,
        line: Result<ToEdge, ControlError>,
        told: &mut Option<oneshot::Sender<Finish>>,
    ) -> Result<bool, Trouble> {
        match line {
            Ok(ToEdge::Drain { .. }) => {
                self.row.leaves();
                if let Some(claim) = &self.claim {
                    claim.drains();
                }
                // It says no more of who leads.
                self.voice = None;
                if let Some(told) = told.take() {
                    // A slot that stopped does not listen.
                    let _ = told.send(Finish::Draining);
                }
            }
            Ok(ToEdge::Gateways { gateways, replicas }) => {
                if let Some(claim) = &self.claim {
                    claim.says(replicas);
                }
                self.links.gateways.learn(gateways).await;
            }
            Ok(ToEdge::Ports(listed)) => (self.links.list)(listed, self.from),
            Ok(ToEdge::Pool(members)) => {
                if let Some(voice) = &self.voice {
                    voice.says(members);
                }
            }
            Ok(line @ ToEdge::Dismiss { .. }) => return Err(unexpected(&line)),
            Ok(ToEdge::Renew { within_ms }) => {
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
    fn tell(&mut self, message: &ToGateway) {
        if let Err(error) = self.control.queue(message) {
            debug!(%error, "a line for the gateway is lost");
        }
    }

    fn take(&self, asked: Asked, streams: &Tasks) {
        let links = &self.links;
        let Ok(place) = links.places.clone().try_acquire_owned() else {
            let most = links.config.limits.streams;
            let detail = format!(
                "{} has {most} streams open, which is its limit (limits.streams)",
                links.node
            );
            return asked.reply.refuse(&Refusal::Busy.because(detail));
        };
        let span = info_span!("stream", target = %asked.target);
        let serving = (links.serve)(asked);
        streams.spawn(span, async move {
            serving.await;
            drop(place);
        });
    }
}
