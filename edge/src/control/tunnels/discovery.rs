//! Discovery of further gateways behind the addresses that an edge knows.
//!
//! An address may belong to a load balancer with several gateways behind it, and a connection to it reaches one of them. If a
//! gateway announces that more gateways exist than are connected, and the edge wants more (`tunnels.gateways`), or if all connected
//! gateways drain, the addresses are dialled in turn, with growing pauses (`DiscoveryBackoff`):
//! 1. If the gateway is already connected, the edge closes the connection after the gateway's hello, before it sends anything
//!    about itself.
//! 2. A new gateway gets tunnels (`slots`). When these end, the gateway must be discovered again.
//! 3. The pauses become short again when a useful gateway drains or is lost, when gateways announce another number, and when
//!    a network fault ends. An address that does not answer is left to its own tunnels (`slots`).
//!
//! If a load balancer only ever selects one of its gateways, the cost is one attempt in each of the longest pauses.

use super::{
    connected_gateways::{GatewayCount, MIN_USEFUL_DURATION},
    context::{TunnelContext, TunnelUnavailable},
    slots::TunnelSlots,
};
use crate::control::{
    connect_error::ConnectError, dial::GatewayAddr, network_monitor::NetworkMonitor,
};
use causeway_rt::task::TaskGroup;
use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tracing::{debug, info, info_span, warn};

/// Maximum of the first pauses, which is about the time that a load balancer takes to detect that a gateway was started or
/// stopped.
const INITIAL_PAUSE: Duration = Duration::from_secs(1);
/// Number of attempts for each gateway before the pauses double. With three gateways and a balancer that selects at random,
/// 18 attempts in 30 s find a certain one for all but one of 1,500 edges. A gateway waits that long before it accepts clients
/// (`deploy/`).
const ATTEMPTS_PER_GATEWAY: u32 = 2;
/// Maximum number of resets of the pauses within the same number of longest pauses.
const MAX_RESETS: u32 = 8;

/// Discovery of the gateways that have no own address.
pub(super) struct GatewayDiscovery {
    context: Arc<TunnelContext>,
    /// Addresses that may lead to further gateways.
    addresses: watch::Receiver<BTreeSet<GatewayAddr>>,
    /// Whether all addresses are dialled. Before that, the next address is a better choice than a search.
    is_exhausted: watch::Receiver<bool>,
    next_index: usize,
    /// Last logged refusal of this edge by a gateway.
    logged_refusal: Option<String>,
    /// Count of gateways in the last log message about a search, until the search ends.
    logged_count: Option<GatewayCount>,
}

impl GatewayDiscovery {
    /// Creates a discovery behind these addresses, which begins when all of them are dialled.
    pub(super) fn new(
        context: Arc<TunnelContext>,
        addresses: watch::Receiver<BTreeSet<GatewayAddr>>,
        is_exhausted: watch::Receiver<bool>,
    ) -> Self {
        Self {
            context,
            addresses,
            is_exhausted,
            next_index: 0,
            logged_refusal: None,
            logged_count: None,
        }
    }

    /// Searches for gateways until the edge stops. The tunnels of a discovered gateway run as tasks of `tasks`.
    pub(super) async fn run(mut self, mut changes: NetworkMonitor, tasks: &TaskGroup) {
        let context = self.context.clone();
        let max_pause = context.config.backoff.refused_max;
        // Time of the next attempt, and the earliest time that a gateway requested.
        let (mut next_attempt, mut not_before) = (None, Instant::now());
        // Whether the last attempt failed for a reason that a network change may resolve.
        let mut is_network_down = false;
        let mut count = GatewayCount::default();
        let (mut discovery_backoff, mut backoff) = (DiscoveryBackoff::default(), context.backoff());
        loop {
            let now = context.connected_gateways.count();
            if now != count {
                if now.lost_count == count.lost_count {
                    discovery_backoff.record_change(max_pause);
                } else {
                    discovery_backoff.record_lost();
                }
                count = now;
                self.report_count(count);
            }
            // Changes make the next attempt earlier, never later.
            let of = self.search_size(count);
            next_attempt = of.map(|of| discovery_backoff.next_attempt(of, max_pause, next_attempt));
            changes.mark_seen();
            tokio::select! {
                () = context.stop.cancelled() => return,
                () = context.connected_gateways.wait_for_change_from(count) => continue,
                // Without a sender the edge stops.
                Ok(()) = self.is_exhausted.changed() => continue,
                () = sleep_until_some(next_attempt.map(|due| due.max(not_before))) => {
                    discovery_backoff.record_attempt();
                    next_attempt = None;
                }
                () = changes.changed(), if is_network_down => {
                    discovery_backoff.record_change(max_pause);
                    not_before = Instant::now();
                    continue;
                }
            }
            let Some(place) = self.next_address() else {
                continue;
            };
            let slots = TunnelSlots::at_discovered_gateway(context.clone(), place.clone());
            let dialling = Box::pin(slots.dial_first());
            let Some(result) = context.stop.run_until_cancelled(dialling).await else {
                return;
            };
            is_network_down = false;
            match result {
                Ok(session) => {
                    let slots_task = slots.run_to_end(Some(session), changes.clone());
                    tasks.spawn(info_span!("gateway", %place), slots_task);
                    backoff.reset();
                    discovery_backoff.record_found();
                }
                Err(TunnelUnavailable::AlreadyConnected(_)) => {}
                // The gateway may have requested a delay.
                Err(TunnelUnavailable::ConnectFailed(error)) => {
                    self.log_failure(&place, &error);
                    is_network_down = error.may_be_network_error();
                    not_before = Instant::now() + error.delay(&mut backoff, rand::random());
                }
            }
        }
    }

    /// Returns the number of gateways among which the edge searches, or `None` if it does not search.
    fn search_size(&mut self, count: GatewayCount) -> Option<u32> {
        let is_exhausted = *self.is_exhausted.borrow_and_update();
        let size = count.total.max(count.wanted);
        size.filter(|_| is_exhausted && count.has_missing())
    }

    /// Reports in the status how many gateways are connected. Logs the start and the end of a search, each once, however often
    /// gateways come and go meanwhile.
    fn report_count(&mut self, count: GatewayCount) {
        let GatewayCount {
            connected: reached,
            total,
            wanted,
            ..
        } = count;
        self.context.status.set_connected_gateways(reached, total);
        let of = wanted.unwrap_or(reached);
        if count.has_missing() {
            if self
                .logged_count
                .is_none_or(|message| message.total != total)
            {
                info!(
                    reached,
                    of, "searching for further gateways behind the known addresses"
                );
                self.logged_count = Some(count);
            }
        } else if reached > 0 && self.logged_count.take().is_some() {
            info!(
                reached,
                of, "connected to all gateways that this edge wants"
            );
        }
    }

    /// Returns the next address to dial. An address that is known to be unreachable is used only if there is no other.
    fn next_address(&mut self) -> Option<GatewayAddr> {
        let addresses = self.addresses.borrow();
        let start = self.next_index % addresses.len().max(1);
        let candidates = addresses.iter().enumerate().cycle().skip(start);
        let mut candidates = candidates.take(addresses.len());
        let is_reachable = |(_, place): &(usize, &GatewayAddr)| {
            !self.context.connected_gateways.is_unreachable(place)
        };
        let (index, place) = candidates
            .clone()
            .find(is_reachable)
            .or_else(|| candidates.next())?;
        self.next_index = index + 1;
        Some(place.clone())
    }

    /// Logs once that a further gateway refuses this edge. Other failures are logged at debug level, because there may be no
    /// further gateway.
    fn log_failure(&mut self, place: &GatewayAddr, error: &ConnectError) {
        let what = error.detail();
        if error.is_refusal() && self.logged_refusal.as_deref() != Some(what) {
            warn!(%place, reason = error.label(), what, "no tunnel to a further gateway");
            self.logged_refusal = Some(what.to_owned());
        } else {
            debug!(%place, what, "no further gateway found");
        }
    }
}

/// Waits until this moment, or for ever without one.
pub(super) async fn sleep_until_some(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// Back-off of the attempts to discover gateways.
#[derive(Debug, Default)]
struct DiscoveryBackoff {
    /// Number of attempts since the last reset.
    attempts: u32,
    /// Time of the last discovery, until the discovered gateway has proved useful.
    found_at: Option<Instant>,
    /// Times of the last resets for changes that may repeat without end, oldest first.
    resets: VecDeque<Instant>,
}

impl DiscoveryBackoff {
    /// Returns the pause before the next attempt. `random` is from 0 to 1.
    fn pause(&self, gateways: u32, max_pause: Duration, random: f64) -> Duration {
        let doublings = self.attempts / gateways.saturating_mul(ATTEMPTS_PER_GATEWAY).max(1);
        let upper_bound = INITIAL_PAUSE
            .saturating_mul(1 << doublings.min(16))
            .min(max_pause);
        // By then it is known whether the last discovered gateway stays connected.
        let upper_bound = self
            .found_at
            .map_or(upper_bound, |_| upper_bound.min(MIN_USEFUL_DURATION));
        upper_bound.mul_f64(0.5 + random / 2.0)
    }

    /// Returns the time of the next attempt, at the latest `due`.
    fn next_attempt(&self, gateways: u32, max_pause: Duration, due: Option<Instant>) -> Instant {
        let next = Instant::now() + self.pause(gateways, max_pause, rand::random());
        due.map_or(next, |due| due.min(next))
    }

    fn record_attempt(&mut self) {
        // The last discovered gateway stays connected, so the next one may be available too.
        if self
            .found_at
            .take_if(|found| found.elapsed() > MIN_USEFUL_DURATION)
            .is_some()
        {
            self.attempts = 0;
        }
        self.attempts = self.attempts.saturating_add(1);
    }

    /// Records that a gateway was discovered.
    fn record_found(&mut self) {
        self.found_at = Some(Instant::now());
    }

    /// Records that a useful gateway drains or is lost. Another one will probably replace it.
    fn record_lost(&mut self) {
        self.attempts = 0;
    }

    /// Records that the gateways or their number changed. Each change resets the pauses, but only `MAX_RESETS` times in as
    /// many `max_pause`. So each step of a rolling update resets them, and endless changes reset them once in `max_pause`.
    fn record_change(&mut self, max_pause: Duration) {
        let is_stable = self
            .found_at
            .is_none_or(|found| found.elapsed() > MIN_USEFUL_DURATION);
        let reset_window = max_pause.saturating_mul(MAX_RESETS);
        self.resets
            .retain(|reset_at| reset_at.elapsed() < reset_window);
        if is_stable && self.resets.len() < MAX_RESETS as usize {
            self.resets.push_back(Instant::now());
            self.attempts = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_mins(1);

    /// Returns the duration of this number of attempts among three gateways.
    fn takes(pace: &mut DiscoveryBackoff, tries: u32, random: f64) -> Duration {
        let pauses = (0..tries).map(|_| {
            let pause = pace.pause(3, MOST, random);
            pace.record_attempt();
            pause
        });
        pauses.sum()
    }

    #[test]
    fn discovery_of_three_gateways_tries_18_times_then_backs_off() {
        let half_a_minute = takes(&mut DiscoveryBackoff::default(), 18, 0.5);
        assert_eq!(half_a_minute, Duration::from_millis(31_500));
        let mut pace = DiscoveryBackoff::default();
        assert_eq!(pace.pause(3, MOST, 0.0), INITIAL_PAUSE / 2);
        // Six attempts each at 1, 2, 4, 8, 16 and 32 s, then one per minute.
        assert_eq!(takes(&mut pace, 36, 1.0), Duration::from_secs(6 * 63));
        assert_eq!(takes(&mut pace, 1, 1.0), MOST);
        pace.attempts = u32::MAX;
        assert_eq!(takes(&mut pace, 1, 1.0), MOST);
    }

    #[tokio::test(start_paused = true)]
    async fn changes_restart_discovery_unless_a_gateway_was_lost_at_once() {
        let mut pace = DiscoveryBackoff::default();
        takes(&mut pace, 36, 1.0);
        pace.record_found();
        pace.record_change(MOST);
        assert_eq!(pace.pause(3, MOST, 1.0), MIN_USEFUL_DURATION);
        tokio::time::advance(MIN_USEFUL_DURATION * 2).await;
        pace.record_change(MOST);
        assert_eq!(pace.pause(3, MOST, 1.0), INITIAL_PAUSE);
    }

    #[tokio::test(start_paused = true)]
    async fn constant_changes_reset_the_pause_once_per_longest_pause() {
        let mut pace = DiscoveryBackoff::default();
        for _ in 0..MAX_RESETS {
            takes(&mut pace, 36, 1.0);
            pace.record_change(MOST);
            assert_eq!(
                pace.pause(3, MOST, 1.0),
                INITIAL_PAUSE,
                "some are a rolling update"
            );
        }
        takes(&mut pace, 36, 1.0);
        pace.record_change(MOST);
        assert_eq!(pace.pause(3, MOST, 1.0), MOST);
        tokio::time::advance(MOST * MAX_RESETS).await;
        pace.record_change(MOST);
        assert_eq!(pace.pause(3, MOST, 1.0), INITIAL_PAUSE);
    }

    #[tokio::test(start_paused = true)]
    async fn each_lost_gateway_restarts_discovery_at_once() {
        let mut pace = DiscoveryBackoff::default();
        for _ in 0..20 {
            takes(&mut pace, 36, 1.0);
            pace.record_found();
            pace.record_lost();
            assert_eq!(pace.pause(3, MOST, 1.0), INITIAL_PAUSE);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn discovery_restarts_after_a_lasting_tunnel() {
        let mut pace = DiscoveryBackoff::default();
        takes(&mut pace, 100, 1.0);
        pace.record_found();
        pace.record_attempt();
        assert_eq!(
            pace.pause(3, MOST, 1.0),
            MIN_USEFUL_DURATION,
            "it may not last"
        );
        tokio::time::advance(MIN_USEFUL_DURATION * 2).await;
        pace.record_attempt();
        assert_eq!(pace.pause(3, MOST, 1.0), INITIAL_PAUSE);
    }
}
