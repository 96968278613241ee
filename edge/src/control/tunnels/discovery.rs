//! Looks for further gateways behind the addresses that an edge knows.
//!
//! An address may belong to a balancer with several gateways behind it: a connection to it reaches one of them. If a gateway
//! announces that there are more gateways than are connected, the addresses are dialled in turn, with pauses that grow
//! (`Pace`):
//! 1. a gateway that is connected already is left after its hello, before it has heard anything of this edge;
//! 2. another one has tunnels from then on (`slots`); when these end it is looked for like all others;
//! 3. pauses begin anew when a gateway that was of use drains or is lost, when gateways announce another number, and when a
//!    network fault ends. An address at which nothing answers is left to its own tunnels (`slots`).
//!
//! A balancer that leads to one of them only, for any reason, costs one attempt in each of the longest pauses.

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

/// The first pauses at most: about what a balancer takes to notice that a gateway came or went.
const INITIAL_PAUSE: Duration = Duration::from_secs(1);
/// Attempts for each gateway before pauses double. One of three is found by 18 attempts, which take 30 s, by all edges but
/// one of 1,500, if a balancer leads each time to any; that is how long a gateway waits before it takes clients (`deploy/`).
const ATTEMPTS_PER_GATEWAY: u32 = 2;
/// How often what changes may have pauses begin anew in as many of the longest pauses.
const MAX_RESETS: u32 = 8;

/// Finds the gateways that have no address of their own.
pub(super) struct GatewayDiscovery {
    context: Arc<TunnelContext>,
    /// Addresses at which gateways are looked for.
    addresses: watch::Receiver<BTreeSet<GatewayAddr>>,
    next_index: usize,
    /// Refusal of this edge by the gateways, as far as it has been logged.
    logged_refusal: Option<String>,
    /// Count of gateways in the last log message about a search, until the search ends.
    logged_count: Option<GatewayCount>,
}

impl GatewayDiscovery {
    /// Looks behind these places.
    pub(super) fn new(
        context: Arc<TunnelContext>,
        addresses: watch::Receiver<BTreeSet<GatewayAddr>>,
    ) -> Self {
        Self {
            context,
            addresses,
            next_index: 0,
            logged_refusal: None,
            logged_count: None,
        }
    }

    /// Looks for gateways until the edge stops. What it finds has tunnels as tasks of `tasks`.
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
            let of = count.total.filter(|_| count.has_missing());
            next_attempt = of.map(|of| discovery_backoff.next_attempt(of, max_pause, next_attempt));
            let next = next_attempt.map(|due| due.max(not_before));
            changes.mark_seen();
            tokio::select! {
                () = context.stop.cancelled() => return,
                () = context.connected_gateways.wait_for_change_from(count) => continue,
                () = sleep_until_some(next) => {
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

    /// Reports in the status how many gateways are connected. Logs the start and the end of a search, each once, however often
    /// gateways come and go meanwhile.
    fn report_count(&mut self, count: GatewayCount) {
        let GatewayCount {
            connected: reached,
            total,
            ..
        } = count;
        self.context.status.set_connected_gateways(reached, total);
        let of = total.unwrap_or(reached);
        if count.has_missing() {
            if self.logged_count.is_none_or(|said| said.total != total) {
                info!(
                    reached,
                    of, "searching for further gateways behind the known addresses"
                );
                self.logged_count = Some(count);
            }
        } else if reached > 0 && self.logged_count.take().is_some() {
            info!(reached, of, "connected to all gateways");
        }
    }

    /// The place whose turn it is.
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

    /// Says once that a further gateway refuses this edge; one that is out of reach may be none.
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

/// Waits for this moment; without one for ever.
async fn sleep_until_some(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// When it is looked for gateways.
#[derive(Debug, Default)]
struct DiscoveryBackoff {
    /// Attempts since something changed.
    attempts: u32,
    /// When the last one was found, until it has been of use.
    found_at: Option<Instant>,
    /// When pauses began anew last for what may change without end, oldest first.
    resets: VecDeque<Instant>,
}

impl DiscoveryBackoff {
    /// How long is waited before the next attempt. `random` is from 0 to 1.
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

    /// When the next attempt is made, which was to be made at `due`.
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

    /// One was found.
    fn record_found(&mut self) {
        self.found_at = Some(Instant::now());
    }

    /// One that was of use drains or is lost: another one comes in its place.
    fn record_lost(&mut self) {
        self.attempts = 0;
    }

    /// Records that the gateways or their number changed. If they change all the time, pauses begin anew once in `max_pause`; a
    /// roll of some gateways has them begin anew each time.
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

    /// How long so many further attempts among three gateways take.
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
