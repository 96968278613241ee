//! Liveness: a round trip, known at both ends, judged from bytes and not from socket states.
//!
//! 1. When 5 s have passed without a byte read, or without a byte written, the gateway probes; at once if a probe is
//!    requested.
//! 2. 5 s after a probe without any byte read the tunnel is out of selection (`Suspect`).
//! 3. After 5 s more it is closed (`Dead`).
//!
//! The edge never probes (invariant 11): it counts silence only. Pure: time comes in as arguments.

use std::time::Duration;
use tokio::time::Instant;

/// The bounds of liveness.
#[derive(Clone, Copy, Debug)]
pub struct KeepaliveConfig {
    /// Silence in either direction after which a probe is sent.
    pub probe_after: Duration,
    /// Silence after a probe that takes the tunnel out of selection.
    pub suspect_after: Duration,
    /// Further silence that closes the tunnel.
    pub close_after: Duration,
}

impl Default for KeepaliveConfig {
    /// 5 s each: both ends know of a silent death after 15 s.
    fn default() -> Self {
        Self {
            probe_after: Duration::from_secs(5),
            suspect_after: Duration::from_secs(5),
            close_after: Duration::from_secs(5),
        }
    }
}

/// Action that the keepalive requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeepaliveAction {
    /// All is well; look again then.
    Well(Instant),
    /// Send a probe, and look again then.
    Probe(Instant),
    /// A probe went unanswered: not for new streams. Look again then.
    Suspect(Instant),
    /// Close.
    Dead,
}

/// The state of liveness on the side that probes.
#[derive(Debug)]
pub(crate) struct Keepalive {
    bounds: KeepaliveConfig,
    /// `probe_after`, shortened by up to a tenth so that a fleet's probes spread.
    probe_after: Duration,
    probed: Option<Instant>,
}

impl Keepalive {
    /// `jitter` is from 0 to 1.
    pub(crate) fn new(bounds: KeepaliveConfig, jitter: f64) -> Self {
        let shorten = bounds.probe_after.mul_f64(jitter.clamp(0.0, 1.0) / 10.0);
        Self {
            bounds,
            probe_after: bounds.probe_after.saturating_sub(shorten),
            probed: None,
        }
    }

    /// When the probe was sent that nothing has been read since.
    pub(crate) fn unanswered(&self) -> Option<Instant> {
        self.probed
    }

    /// Returns the action to take now. With `hurry` a probe is due whatever was read or written, unless one is outstanding.
    pub(crate) fn check(
        &mut self,
        now: Instant,
        (read, written): (Instant, Instant),
        hurry: bool,
    ) -> KeepaliveAction {
        if self.probed.is_some_and(|probed| read >= probed) {
            self.probed = None;
        }
        let Some(probed) = self.probed else {
            let due = read.min(written) + self.probe_after;
            if now < due && !hurry {
                return KeepaliveAction::Well(due);
            }
            self.probed = Some(now);
            return KeepaliveAction::Probe(now + self.bounds.suspect_after);
        };
        let suspect = probed + self.bounds.suspect_after;
        let dead = suspect + self.bounds.close_after;
        if now >= dead {
            KeepaliveAction::Dead
        } else if now >= suspect {
            KeepaliveAction::Suspect(dead)
        } else {
            KeepaliveAction::Well(suspect)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_link_is_probed_suspected_and_closed_within_15_s() {
        let start = Instant::now();
        let mut liveness = Keepalive::new(KeepaliveConfig::default(), 0.0);
        let mut at = |after: u64| liveness.check(start + seconds(after), (start, start), false);
        assert_eq!(at(0), KeepaliveAction::Well(start + seconds(5)));
        assert_eq!(at(5), KeepaliveAction::Probe(start + seconds(10)));
        assert_eq!(at(9), KeepaliveAction::Well(start + seconds(10)));
        assert_eq!(at(10), KeepaliveAction::Suspect(start + seconds(15)));
        assert_eq!(at(15), KeepaliveAction::Dead);
    }

    #[tokio::test(start_paused = true)]
    async fn any_byte_read_makes_a_suspect_well_again() {
        let start = Instant::now();
        let mut liveness = Keepalive::new(KeepaliveConfig::default(), 0.0);
        liveness.check(start + seconds(5), (start, start), false);
        let read = start + seconds(12);
        let verdict = liveness.check(start + seconds(13), (read, start + seconds(11)), false);
        assert_eq!(verdict, KeepaliveAction::Well(start + seconds(16)));
    }

    #[tokio::test(start_paused = true)]
    async fn own_silence_sends_a_probe_for_the_edge() {
        let start = Instant::now();
        let mut liveness = Keepalive::new(KeepaliveConfig::default(), 0.0);
        let read = start + seconds(5);
        let verdict = liveness.check(start + seconds(5), (read, start), false);
        assert_eq!(verdict, KeepaliveAction::Probe(start + seconds(10)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_may_be_early_and_only_one_is_outstanding() {
        let start = Instant::now();
        let mut liveness = Keepalive::new(KeepaliveConfig::default(), 0.0);
        let mut at = |after: u64, hurry: bool, read: Instant| {
            let now = start + seconds(after);
            liveness.check(now, (read, now), hurry)
        };
        assert_eq!(
            at(1, true, start),
            KeepaliveAction::Probe(start + seconds(6))
        );
        assert_eq!(
            at(2, true, start),
            KeepaliveAction::Well(start + seconds(6))
        );
        let read = start + seconds(3);
        assert_eq!(
            at(3, false, read),
            KeepaliveAction::Well(start + seconds(8))
        );
        assert_eq!(
            at(4, true, read),
            KeepaliveAction::Probe(start + seconds(9))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn jitter_only_shortens() {
        let start = Instant::now();
        let mut liveness = Keepalive::new(KeepaliveConfig::default(), 1.0);
        let verdict = liveness.check(start, (start, start), false);
        assert_eq!(
            verdict,
            KeepaliveAction::Well(start + Duration::from_millis(4_500))
        );
    }
}
