//! The task that owns a tunnel's connection on the gateway's side.
//!
//! Moves the connection, probes it, judges its silence, sizes its windows. Only the driver initiates PING and SETTINGS, and
//! has at most one outstanding (invariant 11): two ends that each wait to write a control frame hang for ever. h2 does not
//! show that SETTINGS were acknowledged, but refuses new ones while they are not. If that is in doubt, the next probe is
//! SETTINGS that change nothing.

use super::{
    GatewaySideConfig, Inner, Tunnel,
    buffer_monitor::{self, BufferMonitor},
    window_grant::GrantBackoff,
};
use crate::{
    cork::Cork,
    error::TunnelEnd,
    flood::{FloodGuardedIo, guard_io},
    flow_control,
    liveness::{Keepalive, KeepaliveAction},
    load::TunnelLoad,
    wire,
};
use bytes::Bytes;
use causeway_rt::socket::IoActivity;
use futures_util::FutureExt;
use h2::{Ping, PingPong};
use std::{
    collections::VecDeque,
    future::Future,
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, Sleep},
};
use tokio_util::sync::WaitForCancellationFutureOwned;

/// How many PINGs the round trip is the least of: one under load measures queues.
const RECENT: usize = 8;
/// Maximum time for an edge's answer to SETTINGS or a turn while bytes arrive: all that the edge sent before comes first.
const ANSWER: Duration = Duration::from_mins(1);
/// Every tunnel has its control stream open.
const CONTROL: usize = 1;
/// A window is not raised more often than this: a crowd comes and goes.
const RAISE_AFTER: Duration = Duration::from_secs(1);

/// Begins HTTP/2 on a connection whose TLS is done.
///
/// # Errors
/// If the connection fails.
pub async fn connect<S>(
    io: S,
    traffic: Arc<IoActivity>,
    settings: GatewaySideConfig,
) -> Result<(Tunnel, ConnectionDriver<S>), TunnelEnd>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let window = flow_control::size(settings.round_trip, 1, settings.budget);
    let load = Arc::new(TunnelLoad::among(
        settings.siblings.clone(),
        settings.pressure.clone(),
    ));
    let cork = Cork::new(io);
    let (sender, mut connection) = h2::client::Builder::new()
        .initial_window_size(window)
        .initial_connection_window_size(wire::CONNECTION_WINDOW)
        .max_frame_size(wire::MAX_FRAME)
        .max_header_list_size(wire::MAX_HEADER_LIST)
        .max_concurrent_reset_streams(wire::MAX_RESETS)
        .max_pending_accept_reset_streams(wire::MAX_RESETS)
        .max_local_error_reset_streams(None)
        .data_frame_budget(wire::DATA_FRAME_BUDGET)
        .initial_max_send_streams(1)
        .enable_push(false)
        .handshake(guard_io(cork.clone(), load.small().clone()))
        .await
        .map_err(|error| TunnelEnd::of(Err(error)))?;
    cork.cork();
    let ping_pong = connection
        .ping_pong()
        .ok_or_else(|| TunnelEnd::Failed("the HTTP/2 PING handle is not available".into()))?;
    load.set_crowd(flow_control::stream_threshold(window, settings.budget));
    let shared = Arc::new(Inner::new(load.clone(), traffic.clone(), &settings));
    let tunnel = Tunnel {
        sender,
        shared: shared.clone(),
    };
    let closing = Box::pin(shared.close.clone().cancelled_owned());
    let driver = ConnectionDriver {
        connection,
        cork,
        ping_pong,
        shared,
        traffic,
        liveness: Keepalive::new(settings.liveness, rand::random()),
        timer: Box::pin(tokio::time::sleep(Duration::ZERO)),
        round_trips: VecDeque::new(),
        _end: EndNotifier(load),
        settings,
        window,
        raised: Instant::now(),
        pinged: Instant::now(),
        scales: BufferMonitor::new(),
        again: GrantBackoff::default(),
        air: PendingControlFrame::Clear,
        unanswered: None,
        closing,
    };
    Ok((tunnel, driver))
}

/// The control frame of ours that may not have been answered yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PendingControlFrame {
    /// None.
    Clear,
    /// A PING, sent then.
    Ping(Instant),
    /// SETTINGS, whose acknowledgement h2 does not show.
    Settings,
    /// The edge's turn: it was informed that it may change its window.
    Turn,
}

/// The task that owns a tunnel's connection on the gateway's side.
#[derive(Debug)]
pub struct ConnectionDriver<S: AsyncRead + AsyncWrite + Unpin> {
    connection: h2::client::Connection<FloodGuardedIo<Cork<S>>, Bytes>,
    cork: Cork<S>,
    ping_pong: PingPong,
    shared: Arc<Inner>,
    traffic: Arc<IoActivity>,
    liveness: Keepalive,
    timer: Pin<Box<Sleep>>,
    round_trips: VecDeque<Duration>,
    settings: GatewaySideConfig,
    window: u32,
    raised: Instant,
    /// When the last PING was sent.
    pinged: Instant,
    scales: BufferMonitor,
    again: GrantBackoff,
    air: PendingControlFrame,
    /// Since when the edge owes the acknowledgement of SETTINGS, or its turn, that is waited for.
    unanswered: Option<Instant>,
    closing: Pin<Box<WaitForCancellationFutureOwned>>,
    /// Behind the connection.
    _end: EndNotifier,
}

/// Notifies a load that its tunnel has ended, for any reason.
#[derive(Debug)]
struct EndNotifier(Arc<TunnelLoad>);

impl Drop for EndNotifier {
    fn drop(&mut self) {
        self.0.end();
    }
}

struct RunningDriver<S: AsyncRead + AsyncWrite + Unpin>(ConnectionDriver<S>);

impl<S: AsyncRead + AsyncWrite + Unpin> Future for RunningDriver<S> {
    type Output = TunnelEnd;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<TunnelEnd> {
        let driver = &mut self.get_mut().0;
        let ended = std::task::ready!(driver.drive(cx));
        // Remaining handles see a closed tunnel.
        driver.shared.close.cancel();
        Poll::Ready(ended)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> ConnectionDriver<S> {
    /// Runs the connection until it ends. The driver is moved into the future once: an idle edge costs
    /// what this holds.
    pub fn run(self) -> impl Future<Output = TunnelEnd> {
        RunningDriver(self)
    }

    fn drive(&mut self, cx: &mut Context<'_>) -> Poll<TunnelEnd> {
        if self.closing.as_mut().poll(cx).is_ready() {
            return Poll::Ready(TunnelEnd::Closed);
        }
        self.poll(cx)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<TunnelEnd> {
        loop {
            if let Poll::Ready(result) = self.connection.poll_unpin(cx) {
                return Poll::Ready(TunnelEnd::of(result));
            }
            self.cork.uncork(cx);
            if let Poll::Ready(pong) = self.ping_pong.poll_pong(cx) {
                match pong {
                    Ok(_) => self.answered(),
                    Err(error) => return Poll::Ready(TunnelEnd::of(Err(error))),
                }
            }
            let resized = self.resize(cx);
            if let Some(why) = self.misbehaves() {
                return Poll::Ready(TunnelEnd::Failed(why));
            }
            match self.watch(cx) {
                Poll::Ready(Some(ended)) => return Poll::Ready(ended),
                // The next poll of the connection writes the queued frames.
                Poll::Ready(None) => {}
                Poll::Pending if resized => {}
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    /// Liveness: ready when something was sent or the tunnel is dead.
    fn watch(&mut self, cx: &mut Context<'_>) -> Poll<Option<TunnelEnd>> {
        loop {
            let now = Instant::now();
            let (read, written) = (self.traffic.last_read(), self.traffic.last_written());
            // Only one probe may be outstanding; the response to a turn also proves liveness.
            let asked = self.shared.hurry.swap(false, Relaxed);
            // A tunnel may be stuck although single bytes arrive; only the response to a PING proves progress.
            let streams = self.shared.load.streams() > CONTROL;
            let due = self.pinged + self.settings.liveness.probe_after;
            let hurry = self.air != PendingControlFrame::Turn && (asked || (streams && due <= now));
            let verdict = self.liveness.check(now, (read, written), hurry);
            let suspect = matches!(verdict, KeepaliveAction::Suspect(_));
            self.shared.suspect.store(suspect, Relaxed);
            self.shared.unanswered(self.liveness.unanswered());
            let (until, sent) = match verdict {
                KeepaliveAction::Dead => return Poll::Ready(Some(TunnelEnd::Silent)),
                KeepaliveAction::Well(until) | KeepaliveAction::Suspect(until) => (until, false),
                KeepaliveAction::Probe(until) => (until, self.probe(now, read)),
            };
            let until = match self.look(now) {
                // The caller handles windows.
                Some(due) if due <= now => return Poll::Ready(None),
                Some(due) => until.min(due),
                None => until,
            };
            // Resetting the timer for every byte would cost more than one extra check.
            if self.timer.is_elapsed() || until < self.timer.deadline() {
                self.timer.as_mut().reset(until);
            }
            if sent {
                return Poll::Ready(None);
            }
            if self.timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
    }

    /// Sends a PING, or SETTINGS that change nothing if earlier ones may still be outstanding: h2 refuses new ones while
    /// they are.
    fn probe(&mut self, now: Instant, read: Instant) -> bool {
        let quiet = now.saturating_duration_since(read) >= self.settings.liveness.probe_after / 2;
        match self.air {
            // The response to a turn is equivalent to a PING.
            PendingControlFrame::Ping(_) | PendingControlFrame::Turn => false,
            // A quiet peer has sent everything, including its acknowledgement.
            PendingControlFrame::Settings if !quiet => self.set_window(self.window),
            PendingControlFrame::Clear | PendingControlFrame::Settings => {
                let sent = self.ping_pong.send_ping(Ping::opaque()).is_ok();
                if sent {
                    self.air = PendingControlFrame::Ping(now);
                    self.pinged = now;
                    self.shared.pinged();
                }
                sent
            }
        }
    }

    fn answered(&mut self) {
        if let PendingControlFrame::Ping(sent) = self.air {
            self.round_trips.push_back(sent.elapsed());
            if self.round_trips.len() > RECENT {
                self.round_trips.pop_front();
            }
            if let Some(least) = self.round_trips.iter().min() {
                let least = u64::try_from(least.as_micros()).unwrap_or(u64::MAX);
                self.shared.round_trip_us.store(least, Relaxed);
            }
        }
        self.air = PendingControlFrame::Clear;
        self.shared.ponged();
    }

    /// The window that a single stream would have.
    fn most(&self) -> u32 {
        let round_trip = Duration::from_micros(self.shared.round_trip_us.load(Relaxed));
        let most = flow_control::size(round_trip, 1, self.settings.budget);
        flow_control::next_window(self.window, most).unwrap_or(self.window)
    }

    /// When windows are to be looked at without anything happening before.
    fn look(&self, now: Instant) -> Option<Instant> {
        let raise = (self.window < self.most()).then(|| now + RAISE_AFTER);
        let again = self.again.after().map(|after| now + after);
        let weigh = self.scales.due(&self.shared.load, self.traffic.last_read());
        let owed = self.unanswered.map(|since| since + ANSWER);
        [raise, again, weigh, owed].into_iter().flatten().min()
    }

    /// Returns a description of behaviour that an honest edge does not show: the bounds on its unread bytes here rest on its
    /// acknowledgements.
    fn misbehaves(&mut self) -> Option<String> {
        let (read, budget) = (self.traffic.read(), self.settings.budget);
        let excess = self.scales.overrun(&self.shared.load, read, budget);
        if let Some(held) = excess {
            return Some(format!(
                "the edge exceeded its flow-control windows: {held} bytes are buffered"
            ));
        }
        let owed = self.unanswered.filter(|since| since.elapsed() >= ANSWER);
        owed.map(|_| format!("the edge has not acknowledged new SETTINGS for {ANSWER:?}"))
    }

    /// Changes the window of the streams; false where the edge has not acknowledged the last change.
    fn set_window(&mut self, window: u32) -> bool {
        let sent = self.connection.set_initial_window_size(window).is_ok();
        if sent {
            self.unanswered = None;
        } else {
            self.unanswered.get_or_insert_with(Instant::now);
        }
        sent
    }

    /// The window that the open streams should have.
    fn wanted(&self) -> u32 {
        let round_trip = Duration::from_micros(self.shared.round_trip_us.load(Relaxed));
        let streams = self.shared.load.siblings().streams();
        flow_control::size(round_trip, streams, self.budget())
    }

    /// Returns the bytes that the moving streams may share.
    fn budget(&self) -> usize {
        if self.settings.pressure.is_high() {
            return 0;
        }
        let stalled = self.shared.load.siblings().stalled();
        // Small frames cost more memory than a window counts, so an honest edge is slowed down before the limit.
        let small =
            buffer_monitor::significant_small_frame_cost(&self.shared.load, self.settings.budget);
        self.settings.budget.saturating_sub(stalled.max(small))
    }

    /// Changes the windows of both ends if the crowd, the round trip or what is unread asks for it. True if
    /// SETTINGS were queued.
    fn resize(&mut self, cx: &mut Context<'_>) -> bool {
        self.shared.load.crowded().register(cx.waker());
        self.scales.sample(&self.shared.load);
        if let Some(taken) = self.shared.turn.taken() {
            self.again.took(taken, self.window);
            if self.air == PendingControlFrame::Turn {
                self.air = PendingControlFrame::Clear;
                self.unanswered = None;
            }
        }
        if matches!(
            self.air,
            PendingControlFrame::Ping(_) | PendingControlFrame::Turn
        ) {
            return false;
        }
        let rest = self.raised.elapsed();
        let rested = rest >= RAISE_AFTER;
        let next = flow_control::next_window(self.window, self.wanted());
        let Some(next) = next.filter(|next| *next < self.window || rested) else {
            self.unanswered = None;
            if self.again.after().is_some_and(|after| rest >= after) {
                self.raised = Instant::now();
                self.offer();
            }
            return false;
        };
        if !self.set_window(next) {
            return false;
        }
        self.window = next;
        self.raised = Instant::now();
        self.air = PendingControlFrame::Settings;
        self.offer();
        let crowd = flow_control::stream_threshold(next, self.budget());
        self.shared.load.set_crowd(crowd);
        true
    }

    /// Offers the edge to do the same.
    fn offer(&mut self) {
        if self.shared.turn.offer(self.window) {
            self.air = PendingControlFrame::Turn;
            self.unanswered = Some(Instant::now());
        }
    }
}
