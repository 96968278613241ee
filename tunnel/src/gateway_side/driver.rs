//! The task that owns a tunnel's connection on the gateway's side.
//!
//! The driver moves the connection, probes it, detects its silence and sizes its windows. Only the driver initiates PING and
//! SETTINGS, and at most one of them is outstanding (invariant 11). Otherwise two ends that each wait to write a control
//! frame could hang for ever. The engine does not report the acknowledgement of SETTINGS, but refuses new SETTINGS until then. While
//! an acknowledgement may be missing, the driver sends SETTINGS that change nothing as the next probe.

use super::{
    GatewaySideConfig, Inner, Tunnel, buffer_monitor::BufferMonitor, window_grant::GrantBackoff,
};
use crate::{
    engine::{self, Ping, PingPong},
    error::TunnelEnd,
    flow_control,
    liveness::{Keepalive, KeepaliveAction, ProbeReasons},
    load::TunnelLoad,
    wire,
};
use bytes::Bytes;
use causeway_rt::socket::IoActivity;
use futures_util::FutureExt;
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

/// Number of recent PINGs. The shortest of them counts as the round trip, because a PING under load measures queues.
const ROUND_TRIP_SAMPLES: usize = 8;
/// Maximum time for an edge's answer to SETTINGS or to a window grant while bytes arrive. All earlier bytes of the edge
/// arrive before the answer.
const ACK_TIMEOUT: Duration = Duration::from_mins(1);
/// Every tunnel has its control stream open.
const CONTROL_STREAMS: usize = 1;
/// Minimum time before a window is raised again, because crowds of short streams come and go.
const RAISE_INTERVAL: Duration = Duration::from_secs(1);

/// Begins HTTP/2 on a connection whose TLS is done.
///
/// # Errors
/// If the connection fails.
pub async fn connect<S>(
    io: S,
    traffic: Arc<IoActivity>,
    config: GatewaySideConfig,
) -> Result<(Tunnel, ConnectionDriver<S>), TunnelEnd>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let window = flow_control::window_size(config.round_trip, 1, config.budget);
    let load = Arc::new(TunnelLoad::for_node(
        config.node_budget.clone(),
        config.memory_budget.clone(),
    ));
    let mut builder = engine::client::Builder::new();
    if !config.is_trusted {
        builder.limit_control_frames();
    }
    let (sender, mut connection) = builder
        .initial_window_size(window)
        .initial_connection_window_size(wire::CONNECTION_WINDOW)
        .max_frame_size(wire::MAX_FRAME)
        .max_header_list_size(wire::MAX_HEADER_LIST)
        .max_concurrent_reset_streams(wire::MAX_RESETS)
        .max_pending_accept_reset_streams(wire::MAX_RESETS)
        .max_local_error_reset_streams(None)
        .initial_max_send_streams(1)
        .handshake(io)
        .await
        .map_err(|error| TunnelEnd::from_result(Err(error)))?;
    let ping_pong = connection
        .ping_pong()
        .ok_or_else(|| TunnelEnd::Failed("the HTTP/2 PING handle is not available".into()))?;
    load.set_resize_threshold(flow_control::stream_threshold(window, config.budget));
    let shared = Arc::new(Inner::new(load.clone(), traffic.clone(), &config));
    let tunnel = Tunnel {
        sender,
        shared: shared.clone(),
    };
    let close_requested = Box::pin(shared.close_token.clone().cancelled_owned());
    let buffer_monitor = BufferMonitor::new(config.control_streams);
    let driver = ConnectionDriver {
        connection,
        ping_pong,
        shared,
        traffic,
        keepalive: Keepalive::new(config.keepalive, rand::random()),
        timer: Box::pin(tokio::time::sleep(Duration::ZERO)),
        round_trips: VecDeque::new(),
        _end: EndNotifier(load),
        config,
        stream_window: window,
        last_resize: Instant::now(),
        last_probe: Instant::now(),
        buffer_monitor,
        grant_backoff: GrantBackoff::default(),
        pending_frame: PendingControlFrame::Idle,
        awaiting_ack_since: None,
        close_requested,
    };
    Ok((tunnel, driver))
}

/// Control frame of ours that may be unanswered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PendingControlFrame {
    /// No frame is unanswered.
    Idle,
    /// A PING, sent at this time.
    Ping(Instant),
    /// SETTINGS. The engine does not report their acknowledgement.
    Settings,
    /// A window grant: the edge may change its window.
    WindowGrant,
}

/// The task that owns a tunnel's connection on the gateway's side.
#[derive(Debug)]
pub struct ConnectionDriver<S: AsyncRead + AsyncWrite + Unpin> {
    connection: engine::client::Connection<S, Bytes>,
    ping_pong: PingPong,
    shared: Arc<Inner>,
    traffic: Arc<IoActivity>,
    keepalive: Keepalive,
    timer: Pin<Box<Sleep>>,
    round_trips: VecDeque<Duration>,
    config: GatewaySideConfig,
    stream_window: u32,
    last_resize: Instant,
    /// Time of the last PING, or of the last SETTINGS in its place.
    last_probe: Instant,
    buffer_monitor: BufferMonitor,
    grant_backoff: GrantBackoff,
    pending_frame: PendingControlFrame,
    /// Time since which the driver waits for the edge's acknowledgement of SETTINGS or answer to a window grant.
    awaiting_ack_since: Option<Instant>,
    close_requested: Pin<Box<WaitForCancellationFutureOwned>>,
    /// Declared after the connection, so that it is dropped last.
    _end: EndNotifier,
}

/// Notifies a load, when dropped, that its tunnel has ended for any reason.
#[derive(Debug)]
struct EndNotifier(Arc<TunnelLoad>);

impl Drop for EndNotifier {
    fn drop(&mut self) {
        self.0.mark_ended();
    }
}

struct RunningDriver<S: AsyncRead + AsyncWrite + Unpin>(ConnectionDriver<S>);

impl<S: AsyncRead + AsyncWrite + Unpin> Future for RunningDriver<S> {
    type Output = TunnelEnd;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<TunnelEnd> {
        let driver = &mut self.get_mut().0;
        let tunnel_end = std::task::ready!(driver.drive(cx));
        // Remaining handles see a closed tunnel.
        driver.shared.close_token.cancel();
        Poll::Ready(tunnel_end)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> ConnectionDriver<S> {
    /// Runs the connection until it ends. The driver is moved into the future once, because the size of this future is the
    /// cost of an idle edge.
    pub fn run(self) -> impl Future<Output = TunnelEnd> {
        RunningDriver(self)
    }

    fn drive(&mut self, cx: &mut Context<'_>) -> Poll<TunnelEnd> {
        if self.close_requested.as_mut().poll(cx).is_ready() {
            return Poll::Ready(TunnelEnd::Closed);
        }
        self.poll(cx)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<TunnelEnd> {
        loop {
            if let Poll::Ready(result) = self.connection.poll_unpin(cx) {
                return Poll::Ready(TunnelEnd::from_result(result));
            }
            let now = Instant::now();
            if let Poll::Ready(pong) = self.ping_pong.poll_pong(cx) {
                match pong {
                    Ok(_) => self.record_pong(now),
                    Err(error) => return Poll::Ready(TunnelEnd::from_result(Err(error))),
                }
            }
            let resized = self.resize_windows(now, cx);
            if let Some(why) = self.detect_violation(now) {
                return Poll::Ready(TunnelEnd::Failed(why));
            }
            match self.poll_keepalive(now, cx) {
                Poll::Ready(Some(ended)) => return Poll::Ready(ended),
                // The next poll of the connection writes the queued frames.
                Poll::Ready(None) => {}
                Poll::Pending if resized => {}
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    /// Checks liveness. Ready when a frame was sent or the tunnel is dead.
    fn poll_keepalive(
        &mut self,
        mut now: Instant,
        cx: &mut Context<'_>,
    ) -> Poll<Option<TunnelEnd>> {
        loop {
            let (read, written) = (self.traffic.last_read(), self.traffic.last_written());
            // Only one probe may be outstanding; the response to a turn also proves liveness.
            let probe_requested = self.shared.probe_requested.swap(false, Relaxed);
            // A tunnel may be stuck although single bytes arrive; only the response to a PING proves progress.
            let open_streams = self.shared.load.open_streams();
            let next_probe = self.last_probe + self.config.keepalive.probe_after;
            let is_due = open_streams > CONTROL_STREAMS && next_probe <= now;
            let may_probe = self.pending_frame != PendingControlFrame::WindowGrant;
            let reasons = ProbeReasons {
                has_streams: may_probe && open_streams > self.config.control_streams,
                is_requested: may_probe && (probe_requested || is_due),
            };
            let action = self.keepalive.check(now, (read, written), reasons);
            let suspect = matches!(action, KeepaliveAction::Suspect(_));
            self.shared.suspect.store(suspect, Relaxed);
            self.shared
                .record_unanswered_probe(self.keepalive.unanswered_probe_since());
            let (wake_at, sent) = match action {
                KeepaliveAction::Dead => return Poll::Ready(Some(TunnelEnd::Silent)),
                KeepaliveAction::Healthy(until) | KeepaliveAction::Suspect(until) => (until, false),
                KeepaliveAction::Probe(until) => (until, self.send_probe(now, read)),
            };
            let wake_at = match self.next_check(now) {
                // The caller handles windows.
                Some(due) if due <= now => return Poll::Ready(None),
                Some(due) => wake_at.min(due),
                None => wake_at,
            };
            // Resetting the timer for every byte would cost more than one extra check.
            if self.timer.is_elapsed() || wake_at < self.timer.deadline() {
                self.timer.as_mut().reset(wake_at);
            }
            if sent {
                return Poll::Ready(None);
            }
            if self.timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            now = Instant::now();
        }
    }

    /// Sends a PING, or SETTINGS that change nothing if earlier SETTINGS may still be outstanding. The engine refuses new SETTINGS in
    /// that case.
    fn send_probe(&mut self, now: Instant, last_read: Instant) -> bool {
        let is_quiet =
            now.saturating_duration_since(last_read) >= self.config.keepalive.probe_after / 2;
        match self.pending_frame {
            // The response to a turn is equivalent to a PING.
            PendingControlFrame::Ping(_) | PendingControlFrame::WindowGrant => false,
            // A quiet peer has sent everything, including its acknowledgement.
            PendingControlFrame::Settings if !is_quiet => {
                let sent = self.set_window(self.stream_window, now);
                if sent {
                    // The acknowledgement is a byte read. Without this, each acknowledgement would cause the next probe.
                    self.last_probe = now;
                }
                sent
            }
            PendingControlFrame::Idle | PendingControlFrame::Settings => {
                let sent = self.ping_pong.send_ping(Ping::opaque()).is_ok();
                if sent {
                    self.pending_frame = PendingControlFrame::Ping(now);
                    self.last_probe = now;
                    self.shared.record_ping();
                }
                sent
            }
        }
    }

    fn record_pong(&mut self, now: Instant) {
        if let PendingControlFrame::Ping(sent) = self.pending_frame {
            self.round_trips
                .push_back(now.saturating_duration_since(sent));
            if self.round_trips.len() > ROUND_TRIP_SAMPLES {
                self.round_trips.pop_front();
            }
            if let Some(min_round_trip) = self.round_trips.iter().min() {
                let min_round_trip = u64::try_from(min_round_trip.as_micros()).unwrap_or(u64::MAX);
                self.shared.round_trip_us.store(min_round_trip, Relaxed);
            }
        }
        self.pending_frame = PendingControlFrame::Idle;
        self.shared.clear_ping();
    }

    /// Returns the window that a single stream would have.
    fn max_window(&self) -> u32 {
        let round_trip = Duration::from_micros(self.shared.round_trip_us.load(Relaxed));
        let max_window = flow_control::window_size(round_trip, 1, self.config.budget);
        flow_control::next_window(self.stream_window, max_window).unwrap_or(self.stream_window)
    }

    /// Returns the time of the next check of the windows, if no other event comes first.
    fn next_check(&self, now: Instant) -> Option<Instant> {
        let next_raise = (self.stream_window < self.max_window()).then(|| now + RAISE_INTERVAL);
        let retry_grant = self.grant_backoff.retry_delay().map(|after| now + after);
        let next_sample = self
            .buffer_monitor
            .next_sample_at(&self.shared.load, self.traffic.last_read());
        let ack_due = self.awaiting_ack_since.map(|since| since + ACK_TIMEOUT);
        [next_raise, retry_grant, next_sample, ack_due]
            .into_iter()
            .flatten()
            .min()
    }

    /// Returns a description of behaviour that an honest edge does not show. The limits on its unread bytes at this end rely
    /// on its acknowledgements.
    fn detect_violation(&mut self, now: Instant) -> Option<String> {
        let (read, budget) = (self.traffic.bytes_read(), self.config.budget);
        let overrun = self.buffer_monitor.overrun(&self.shared.load, read, budget);
        if let Some(buffered) = overrun.filter(|_| !self.config.is_trusted) {
            return Some(format!(
                "the edge exceeded its flow-control windows: {buffered} bytes are buffered"
            ));
        }
        let overdue_since = self
            .awaiting_ack_since
            .filter(|since| now.saturating_duration_since(*since) >= ACK_TIMEOUT);
        overdue_since
            .map(|_| format!("the edge has not acknowledged new SETTINGS for {ACK_TIMEOUT:?}"))
    }

    /// Changes the window of the streams. Returns `false` if the edge has not acknowledged the last change.
    fn set_window(&mut self, window: u32, now: Instant) -> bool {
        let sent = self.connection.set_initial_window_size(window).is_ok();
        if sent {
            self.awaiting_ack_since = None;
        } else {
            self.awaiting_ack_since.get_or_insert(now);
        }
        sent
    }

    /// Returns the window that the open streams should have.
    fn desired_window(&self) -> u32 {
        let round_trip = Duration::from_micros(self.shared.round_trip_us.load(Relaxed));
        let streams = self.shared.load.node_budget().open_streams();
        flow_control::window_size(round_trip, streams, self.available_budget())
    }

    /// Returns the bytes that the moving streams may share.
    fn available_budget(&self) -> usize {
        if self.config.memory_budget.is_high() {
            return 0;
        }
        let stalled_bytes = self.shared.load.node_budget().stalled_bytes();
        self.config.budget.saturating_sub(stalled_bytes)
    }

    /// Changes the windows of both ends if the number of streams, the round trip or the unread bytes require it. Returns
    /// whether SETTINGS were queued.
    fn resize_windows(&mut self, now: Instant, cx: &mut Context<'_>) -> bool {
        self.shared.load.driver_waker().register(cx.waker());
        self.buffer_monitor.sample(&self.shared.load, now);
        if let Some(accepted_window) = self.shared.window_grant.take_accepted() {
            self.grant_backoff
                .record(accepted_window, self.stream_window);
            if self.pending_frame == PendingControlFrame::WindowGrant {
                self.pending_frame = PendingControlFrame::Idle;
                self.awaiting_ack_since = None;
            }
        }
        if matches!(
            self.pending_frame,
            PendingControlFrame::Ping(_) | PendingControlFrame::WindowGrant
        ) {
            return false;
        }
        let since_resize = now.saturating_duration_since(self.last_resize);
        let may_raise = since_resize >= RAISE_INTERVAL;
        let next_window = flow_control::next_window(self.stream_window, self.desired_window());
        let Some(next_window) = next_window.filter(|next| *next < self.stream_window || may_raise)
        else {
            self.awaiting_ack_since = None;
            if self
                .grant_backoff
                .retry_delay()
                .is_some_and(|after| since_resize >= after)
            {
                self.last_resize = now;
                self.offer_grant(now);
            }
            return false;
        };
        if !self.set_window(next_window, now) {
            return false;
        }
        self.stream_window = next_window;
        self.last_resize = now;
        self.pending_frame = PendingControlFrame::Settings;
        self.offer_grant(now);
        let resize_threshold = flow_control::stream_threshold(next_window, self.available_budget());
        self.shared.load.set_resize_threshold(resize_threshold);
        true
    }

    /// Offers a window grant to the edge.
    fn offer_grant(&mut self, now: Instant) {
        if self.shared.window_grant.offer(self.stream_window) {
            self.pending_frame = PendingControlFrame::WindowGrant;
            self.awaiting_ack_since = Some(now);
        }
    }
}
