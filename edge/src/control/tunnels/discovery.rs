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
    connected_gateways::{GatewayCount, OF_USE},
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
const FIRST: Duration = Duration::from_secs(1);
/// Attempts for each gateway before pauses double. One of three is found by 18 attempts, which take 30 s, by all edges but
/// one of 1,500, if a balancer leads each time to any; that is how long a gateway waits before it takes clients (`deploy/`).
const ATTEMPTS_PER_GATEWAY: u32 = 2;
/// How often what changes may have pauses begin anew in as many of the longest pauses.
const ANEW: u32 = 8;

/// Finds the gateways that have no address of their own.
pub(super) struct GatewayDiscovery {
    links: Arc<TunnelContext>,
    /// Addresses at which gateways are looked for.
    places: watch::Receiver<BTreeSet<GatewayAddr>>,
    turn: usize,
    /// Refusal of this edge by the gateways, as far as it has been logged.
    refused: Option<String>,
}

impl GatewayDiscovery {
    /// Looks behind these places.
    pub(super) fn at(
        links: Arc<TunnelContext>,
        places: watch::Receiver<BTreeSet<GatewayAddr>>,
    ) -> Self {
        Self {
            links,
            places,
            turn: 0,
            refused: None,
        }
    }

    /// Looks for gateways until the edge stops. What it finds has tunnels as tasks of `tasks`.
    pub(super) async fn run(mut self, mut changes: NetworkMonitor, tasks: &TaskGroup) {
        let links = self.links.clone();
        let most = links.config.backoff.refused_max;
        // Time of the next attempt, and the earliest time that a gateway requested.
        let (mut due, mut not_before) = (None, Instant::now());
        // Whether the last attempt failed for a reason that a network change may resolve.
        let mut cut_off = false;
        let (mut count, mut said) = (GatewayCount::default(), None);
        let (mut tries, mut backoff) = (DiscoveryBackoff::default(), links.backoff());
        loop {
            let now = links.reached.count();
            if now != count {
                if now.lost == count.lost {
                    tries.changed(most);
                } else {
                    tries.lost();
                }
                count = now;
                links.state.reached(count.reached, count.of);
                say(count, &mut said);
            }
            // Changes make the next attempt earlier, never later.
            let of = count.of.filter(|_| count.is_short());
            due = of.map(|of| tries.next(of, most, due));
            let next = due.map(|due| due.max(not_before));
            changes.forget();
            tokio::select! {
                () = links.stop.cancelled() => return,
                () = links.reached.other_than(count) => continue,
                () = at(next) => {
                    tries.tried();
                    due = None;
                }
                () = changes.next(), if cut_off => {
                    tries.changed(most);
                    not_before = Instant::now();
                    continue;
                }
            }
            let Some(place) = self.next() else { continue };
            let slots = TunnelSlots::found(links.clone(), place.clone());
            let begun = Box::pin(slots.begin());
            let Some(found) = links.stop.run_until_cancelled(begun).await else {
                return;
            };
            cut_off = false;
            match found {
                Ok(session) => {
                    let kept = slots.keep(Some(session), changes.clone());
                    tasks.spawn(info_span!("gateway", %place), kept);
                    backoff.reset();
                    tries.found();
                }
                Err(TunnelUnavailable::Reached(_)) => {}
                // The gateway may have requested a delay.
                Err(TunnelUnavailable::Trouble(trouble)) => {
                    self.troubled(&place, &trouble);
                    cut_off = trouble.may_be_the_network();
                    not_before = Instant::now() + trouble.delay(&mut backoff, rand::random());
                }
            }
        }
    }

    /// The place whose turn it is.
    fn next(&mut self) -> Option<GatewayAddr> {
        let places = self.places.borrow();
        let begin = self.turn % places.len().max(1);
        let turns = places.iter().enumerate().cycle().skip(begin);
        let mut turns = turns.take(places.len());
        let lives = |(_, place): &(usize, &GatewayAddr)| !self.links.reached.is_dead(place);
        let (turn, place) = turns.clone().find(lives).or_else(|| turns.next())?;
        self.turn = turn + 1;
        Some(place.clone())
    }

    /// Says once that a further gateway refuses this edge; one that is out of reach may be none.
    fn troubled(&mut self, place: &GatewayAddr, trouble: &ConnectError) {
        let what = trouble.what();
        if trouble.is_refusal() && self.refused.as_deref() != Some(what) {
            warn!(%place, reason = trouble.word(), what, "no tunnel to a further gateway");
            self.refused = Some(what.to_owned());
        } else {
            debug!(%place, what, "no further gateway found");
        }
    }
}

/// Waits for this moment; without one for ever.
async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// When it is looked for gateways.
#[derive(Debug, Default)]
struct DiscoveryBackoff {
    /// Attempts since something changed.
    tries: u32,
    /// When the last one was found, until it has been of use.
    found: Option<Instant>,
    /// When pauses began anew last for what may change without end, oldest first.
    anew: VecDeque<Instant>,
}

impl DiscoveryBackoff {
    /// How long is waited before the next attempt. `random` is from 0 to 1.
    fn pause(&self, gateways: u32, most: Duration, random: f64) -> Duration {
        let doubled = self.tries / gateways.saturating_mul(ATTEMPTS_PER_GATEWAY).max(1);
        let longest = FIRST.saturating_mul(1 << doubled.min(16)).min(most);
        // By then it is known whether the last discovered gateway stays connected.
        let longest = self.found.map_or(longest, |_| longest.min(OF_USE));
        longest.mul_f64(0.5 + random / 2.0)
    }

    /// When the next attempt is made, which was to be made at `due`.
    fn next(&self, gateways: u32, most: Duration, due: Option<Instant>) -> Instant {
        let next = Instant::now() + self.pause(gateways, most, rand::random());
        due.map_or(next, |due| due.min(next))
    }

    fn tried(&mut self) {
        // The last discovered gateway stays connected, so the next one may be available too.
        if self
            .found
            .take_if(|found| found.elapsed() > OF_USE)
            .is_some()
        {
            self.tries = 0;
        }
        self.tries = self.tries.saturating_add(1);
    }

    /// One was found.
    fn found(&mut self) {
        self.found = Some(Instant::now());
    }

    /// One that was of use drains or is lost: another one comes in its place.
    fn lost(&mut self) {
        self.tries = 0;
    }

    /// Records that the gateways or their number changed. If they change all the time, pauses begin anew once in `most`; a
    /// roll of some gateways has them begin anew each time.
    fn changed(&mut self, most: Duration) {
        let lasts = self.found.is_none_or(|found| found.elapsed() > OF_USE);
        let span = most.saturating_mul(ANEW);
        self.anew.retain(|anew| anew.elapsed() < span);
        if lasts && self.anew.len() < ANEW as usize {
            self.anew.push_back(Instant::now());
            self.tries = 0;
        }
    }
}

/// Says what is looked for, and that it is found: once, however often gateways come and go meanwhile.
fn say(count: GatewayCount, said: &mut Option<GatewayCount>) {
    let GatewayCount { reached, of, .. } = count;
    let of = of.unwrap_or(reached);
    if count.is_short() {
        if said.is_none_or(|said| said.of != count.of) {
            info!(
                reached,
                of, "searching for further gateways behind the known addresses"
            );
            *said = Some(count);
        }
    } else if reached > 0 && said.take().is_some() {
        info!(reached, of, "connected to all gateways");
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
            pace.tried();
            pause
        });
        pauses.sum()
    }

    #[test]
    fn discovery_of_three_gateways_tries_18_times_then_backs_off() {
        let half_a_minute = takes(&mut DiscoveryBackoff::default(), 18, 0.5);
        assert_eq!(half_a_minute, Duration::from_millis(31_500));
        let mut pace = DiscoveryBackoff::default();
        assert_eq!(pace.pause(3, MOST, 0.0), FIRST / 2);
        // Six attempts each at 1, 2, 4, 8, 16 and 32 s, then one per minute.
        assert_eq!(takes(&mut pace, 36, 1.0), Duration::from_secs(6 * 63));
        assert_eq!(takes(&mut pace, 1, 1.0), MOST);
        pace.tries = u32::MAX;
        assert_eq!(takes(&mut pace, 1, 1.0), MOST);
    }

    #[tokio::test(start_paused = true)]
    async fn changes_restart_discovery_unless_a_gateway_was_lost_at_once() {
        let mut pace = DiscoveryBackoff::default();
        takes(&mut pace, 36, 1.0);
        pace.found();
        pace.changed(MOST);
        assert_eq!(pace.pause(3, MOST, 1.0), OF_USE);
        tokio::time::advance(OF_USE * 2).await;
        pace.changed(MOST);
        assert_eq!(pace.pause(3, MOST, 1.0), FIRST);
    }

    #[tokio::test(start_paused = true)]
    async fn constant_changes_reset_the_pause_once_per_longest_pause() {
        let mut pace = DiscoveryBackoff::default();
        for _ in 0..ANEW {
            takes(&mut pace, 36, 1.0);
            pace.changed(MOST);
            assert_eq!(pace.pause(3, MOST, 1.0), FIRST, "some are a rolling update");
        }
        takes(&mut pace, 36, 1.0);
        pace.changed(MOST);
        assert_eq!(pace.pause(3, MOST, 1.0), MOST);
        tokio::time::advance(MOST * ANEW).await;
        pace.changed(MOST);
        assert_eq!(pace.pause(3, MOST, 1.0), FIRST);
    }

    #[tokio::test(start_paused = true)]
    async fn each_lost_gateway_restarts_discovery_at_once() {
        let mut pace = DiscoveryBackoff::default();
        for _ in 0..20 {
            takes(&mut pace, 36, 1.0);
            pace.found();
            pace.lost();
            assert_eq!(pace.pause(3, MOST, 1.0), FIRST);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn discovery_restarts_after_a_lasting_tunnel() {
        let mut pace = DiscoveryBackoff::default();
        takes(&mut pace, 100, 1.0);
        pace.found();
        pace.tried();
        assert_eq!(pace.pause(3, MOST, 1.0), OF_USE, "it may not last");
        tokio::time::advance(OF_USE * 2).await;
        pace.tried();
        assert_eq!(pace.pause(3, MOST, 1.0), FIRST);
    }
}
