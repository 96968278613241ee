//! The task that owns a tunnel's connection on the gateway's side.
//!
//! The driver moves the connection, probes it, detects its silence and limits its windows. Only the driver initiates PING, and at
//! most one is outstanding (invariant 11).

use super::{GatewaySideConfig, Inner, Tunnel, buffer_monitor::BufferMonitor};
use crate::{
    engine::{self, Ping, PingPong, WindowLimits},
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
/// Every tunnel has its control stream open.
const CONTROL_STREAMS: usize = 1;
/// Number of budgets of memory that an edge may make this end hold for its streams, besides [`MIN_STREAM_MEMORY`] for each.
const MAX_OVERSHOOT: usize = 8;
const MIN_STREAM_MEMORY: usize = 256 << 10;

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
    let load = Arc::new(TunnelLoad::for_node(
        config.node_budget.clone(),
        config.memory_budget.clone(),
    ));
    let mut builder = engine::client::Builder::new();
    if !config.is_trusted {
        builder.limit_control_frames();
    }
    let (sender, mut connection) = builder
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
        window_limits: WindowLimits::default(),
        last_probe: Instant::now(),
        buffer_monitor,
        ping_sent_at: None,
        close_requested,
    };
    Ok((tunnel, driver))
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
    window_limits: WindowLimits,
    /// Time of the last PING.
    last_probe: Instant,
    /// Time of the PING that is not answered.
    ping_sent_at: Option<Instant>,
    buffer_monitor: BufferMonitor,
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

    fn config(&self) -> &GatewaySideConfig {
        &self.shared.config
    }

    fn drive(&mut self, cx: &mut Context<'_>) -> Poll<TunnelEnd> {
        if self.close_requested.as_mut().poll(cx).is_ready() {
            return Poll::Ready(TunnelEnd::Closed);
        }
        self.poll(cx)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<TunnelEnd> {
        self.shared.load.driver_waker().register(cx.waker());
        loop {
            self.buffer_monitor
                .sample(&self.shared.load, Instant::now());
            if let Some(end) = self.detect_hoarding() {
                return Poll::Ready(end);
            }
            self.limit_windows();
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
            match self.poll_keepalive(now, cx) {
                Poll::Ready(Some(ended)) => return Poll::Ready(ended),
                // The next poll of the connection writes the queued frames.
                Poll::Ready(None) => {}
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
            let probe_requested = self.shared.probe_requested.swap(false, Relaxed);
            // A tunnel may be stuck although single bytes arrive; only the response to a PING proves progress.
            let open_streams = self.shared.load.open_streams();
            let next_probe = self.last_probe + self.config().keepalive.probe_after;
            let is_due = open_streams > CONTROL_STREAMS && next_probe <= now;
            let reasons = ProbeReasons {
                has_streams: open_streams > self.config().control_streams,
                is_requested: probe_requested || is_due,
            };
            let action = self.keepalive.check(now, (read, written), reasons);
            let suspect = matches!(action, KeepaliveAction::Suspect(_));
            self.shared.suspect.store(suspect, Relaxed);
            self.shared
                .record_unanswered_probe(self.keepalive.unanswered_probe_since());
            let (wake_at, sent) = match action {
                KeepaliveAction::Dead => return Poll::Ready(Some(TunnelEnd::Silent)),
                KeepaliveAction::Healthy(until) | KeepaliveAction::Suspect(until) => (until, false),
                KeepaliveAction::Probe(until) => (until, self.send_probe(now)),
            };
            let next_sample =
                (self.buffer_monitor).next_sample_at(&self.shared.load, self.traffic.last_read());
            let wake_at = match next_sample {
                // The caller takes the sample.
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

    /// Sends a PING unless one is not answered. Returns whether it was sent.
    fn send_probe(&mut self, now: Instant) -> bool {
        if self.ping_sent_at.is_some() || self.ping_pong.send_ping(Ping::opaque()).is_err() {
            return false;
        }
        self.ping_sent_at = Some(now);
        self.last_probe = now;
        self.shared.record_ping();
        true
    }

    fn record_pong(&mut self, now: Instant) {
        if let Some(sent) = self.ping_sent_at.take() {
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
        self.shared.clear_ping();
    }

    /// Returns the end of the tunnel if an edge makes this end hold much more memory than windows allow: each byte of them may keep
    /// several in memory, and a stream keeps a window that it got while fewer streams were open.
    fn detect_hoarding(&self) -> Option<TunnelEnd> {
        let streams = self.shared.load.open_streams() * MIN_STREAM_MEMORY;
        let max_held = self.config().budget.saturating_mul(MAX_OVERSHOOT) + streams;
        let held = self.buffer_monitor.held();
        (held > max_held && !self.config().is_trusted)
            .then(|| TunnelEnd::Failed(format!("the edge makes {held} bytes wait for readers")))
    }

    /// Adjusts the limits of windows to the number of streams, the round trip and the unread bytes.
    fn limit_windows(&mut self) {
        let node = self.shared.load.node_budget();
        let config = self.config();
        let budget = (config.memory_budget).allowance(config.budget, node.stalled_bytes());
        let round_trip = Duration::from_micros(self.shared.round_trip_us.load(Relaxed));
        let limits = flow_control::window_limits(round_trip, node.open_streams(), budget);
        if self.window_limits != limits {
            self.window_limits = limits;
            self.connection.limit_windows(limits);
        }
    }
}
