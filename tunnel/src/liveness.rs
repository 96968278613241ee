//! Liveness of a tunnel, which both ends judge from bytes and a round trip, and not from socket states.
//!
//! 1. The gateway probes when 5 s have passed without a byte read, or without a byte written. It probes at once if a probe is
//!    requested.
//! 2. 5 s after a probe without any byte read the tunnel is not selected any more (`Suspect`).
//! 3. After 5 s more the tunnel is closed (`Dead`).
//!
//! The edge never probes (invariant 11): it only measures silence. This module is pure: the time is an argument.

use std::time::Duration;
use tokio::time::Instant;

/// Time limits of the keepalive.
#[derive(Clone, Copy, Debug)]
pub struct KeepaliveConfig {
    /// Silence in either direction after which a probe is sent.
    pub probe_after: Duration,
    /// Silence after a probe after which the tunnel is not selected any more.
    pub suspect_after: Duration,
    /// Further silence that closes the tunnel.
    pub close_after: Duration,
}

impl Default for KeepaliveConfig {
    /// Returns limits of 5 s each: both ends detect a silent failure after 15 s.
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
    /// The tunnel is healthy. The next check is due at this time.
    Healthy(Instant),
    /// A probe must be sent. The next check is due at this time.
    Probe(Instant),
    /// A probe is unanswered: the tunnel must not get new streams. The next check is due at this time.
    Suspect(Instant),
    /// The tunnel must be closed.
    Dead,
}

/// State of the keepalive at the end that probes.
#[derive(Debug)]
pub(crate) struct Keepalive {
    config: KeepaliveConfig,
    /// `probe_after`, shortened by up to a tenth so that the probes of many tunnels are spread.
    probe_after: Duration,
    probe_sent_at: Option<Instant>,
}

impl Keepalive {
    /// Creates the state. `jitter` is from 0 to 1.
    pub(crate) fn new(config: KeepaliveConfig, jitter: f64) -> Self {
        let reduction = config.probe_after.mul_f64(jitter.clamp(0.0, 1.0) / 10.0);
        Self {
            config,
            probe_after: config.probe_after.saturating_sub(reduction),
            probe_sent_at: None,
        }
    }

    /// Returns the time of the probe since which nothing has been read.
    pub(crate) fn unanswered_probe_since(&self) -> Option<Instant> {
        self.probe_sent_at
    }

    /// Returns the action to take now. With `hurry` a probe is due, independent of reads and writes, unless one is
    /// outstanding.
    pub(crate) fn check(
        &mut self,
        now: Instant,
        (read, written): (Instant, Instant),
        force_probe: bool,
    ) -> KeepaliveAction {
        if self.probe_sent_at.is_some_and(|probed| read >= probed) {
            self.probe_sent_at = None;
        }
        let Some(probed) = self.probe_sent_at else {
            let probe_at = read.min(written) + self.probe_after;
            if now < probe_at && !force_probe {
                return KeepaliveAction::Healthy(probe_at);
            }
            self.probe_sent_at = Some(now);
            return KeepaliveAction::Probe(now + self.config.suspect_after);
        };
        let suspect_at = probed + self.config.suspect_after;
        let dead_at = suspect_at + self.config.close_after;
        if now >= dead_at {
            KeepaliveAction::Dead
        } else if now >= suspect_at {
            KeepaliveAction::Suspect(dead_at)
        } else {
            KeepaliveAction::Healthy(suspect_at)
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
        assert_eq!(at(0), KeepaliveAction::Healthy(start + seconds(5)));
        assert_eq!(at(5), KeepaliveAction::Probe(start + seconds(10)));
        assert_eq!(at(9), KeepaliveAction::Healthy(start + seconds(10)));
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
        assert_eq!(verdict, KeepaliveAction::Healthy(start + seconds(16)));
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
            KeepaliveAction::Healthy(start + seconds(6))
        );
        let read = start + seconds(3);
        assert_eq!(
            at(3, false, read),
            KeepaliveAction::Healthy(start + seconds(8))
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
            KeepaliveAction::Healthy(start + Duration::from_millis(4_500))
        );
    }
}
