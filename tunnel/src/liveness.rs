//! Liveness of a tunnel, which both ends judge from bytes and a round trip, and not from socket states.
//!
//! 1. The gateway probes when 5 s have passed without a byte read, or without a byte written. While streams are open it also probes
//!    1 s after a write without a byte read, so that other tunnels are preferred soon, see `Tunnel::unanswered_for`. It probes at
//!    once if a probe is requested.
//! 2. 5 s after a probe without any byte read the tunnel is not selected any more (`Suspect`). An early probe leaves this time as
//!    it is, because some links are silent for seconds.
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
    /// Silence after a write, while streams are open, after which a probe is sent. `None` for peers that end connections with
    /// frequent PINGs.
    pub unanswered_after: Option<Duration>,
    /// Silence after a probe after which the tunnel is not selected any more.
    pub suspect_after: Duration,
    /// Further silence that closes the tunnel.
    pub close_after: Duration,
}

impl Default for KeepaliveConfig {
    /// Returns limits of 5 s each: both ends detect a silent failure after 15 s. A write without an answer is probed after 1 s.
    fn default() -> Self {
        Self {
            probe_after: Duration::from_secs(5),
            unanswered_after: Some(Duration::from_secs(1)),
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
    /// Time of a write since which nothing has been read.
    unanswered_write: Option<Instant>,
    probe: Option<OutstandingProbe>,
}

/// Probe since which nothing has been read.
#[derive(Clone, Copy, Debug)]
struct OutstandingProbe {
    sent_at: Instant,
    suspect_at: Instant,
}

/// Reasons for a probe before silence requires it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ProbeReasons {
    /// Whether streams are open that may wait for bytes of the other end.
    pub(crate) has_streams: bool,
    /// Whether a probe is due, independent of reads and writes.
    pub(crate) is_requested: bool,
}

impl Keepalive {
    /// Creates the state. `jitter` is from 0 to 1.
    pub(crate) fn new(config: KeepaliveConfig, jitter: f64) -> Self {
        let reduction = config.probe_after.mul_f64(jitter.clamp(0.0, 1.0) / 10.0);
        Self {
            config,
            probe_after: config.probe_after.saturating_sub(reduction),
            unanswered_write: None,
            probe: None,
        }
    }

    /// Returns the time of the probe since which nothing has been read.
    pub(crate) fn unanswered_probe_since(&self) -> Option<Instant> {
        self.probe.map(|probe| probe.sent_at)
    }

    /// Returns the action to take now. No probe is sent while one is outstanding.
    pub(crate) fn check(
        &mut self,
        now: Instant,
        (read, written): (Instant, Instant),
        reasons: ProbeReasons,
    ) -> KeepaliveAction {
        if !reasons.has_streams || written <= read {
            self.unanswered_write = None;
        } else if self.unanswered_write.is_none_or(|write| write <= read) {
            self.unanswered_write = Some(written);
        }
        if self.probe.is_some_and(|probe| read >= probe.sent_at) {
            self.probe = None;
        }
        let Some(OutstandingProbe { suspect_at, .. }) = self.probe else {
            let silent_at = read.min(written) + self.probe_after;
            let unanswered = self.unanswered_write.zip(self.config.unanswered_after);
            let unanswered_at = unanswered.map_or(silent_at, |(write, after)| write + after);
            let probe_at = silent_at.min(unanswered_at);
            if now < probe_at && !reasons.is_requested {
                return KeepaliveAction::Healthy(probe_at);
            }
            let probe_due = if reasons.is_requested {
                now
            } else {
                now.max(silent_at)
            };
            let suspect_at = probe_due + self.config.suspect_after;
            let sent_at = now;
            self.probe = Some(OutstandingProbe {
                sent_at,
                suspect_at,
            });
            return KeepaliveAction::Probe(suspect_at);
        };
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
        let mut at = |after: u64| {
            liveness.check(
                start + seconds(after),
                (start, start),
                ProbeReasons::default(),
            )
        };
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
        liveness.check(start + seconds(5), (start, start), ProbeReasons::default());
        let read = start + seconds(12);
        let verdict = liveness.check(
            start + seconds(13),
            (read, start + seconds(11)),
            ProbeReasons::default(),
        );
        assert_eq!(verdict, KeepaliveAction::Healthy(start + seconds(16)));
    }

    #[tokio::test(start_paused = true)]
    async fn own_silence_sends_a_probe_for_the_edge() {
        let start = Instant::now();
        let mut liveness = Keepalive::new(KeepaliveConfig::default(), 0.0);
        let read = start + seconds(5);
        let verdict = liveness.check(start + seconds(5), (read, start), ProbeReasons::default());
        assert_eq!(verdict, KeepaliveAction::Probe(start + seconds(10)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_without_an_answer_is_probed_after_1_s_while_streams_are_open() {
        let start = Instant::now();
        let mut liveness = Keepalive::new(KeepaliveConfig::default(), 0.0);
        let idle = ProbeReasons::default();
        let busy = ProbeReasons {
            has_streams: true,
            ..idle
        };
        let mut at = |after: u64, (read, written): (u64, u64), reasons: ProbeReasons| {
            let activity = (start + seconds(read), start + seconds(written));
            liveness.check(start + seconds(after), activity, reasons)
        };
        let healthy = |until: u64| KeepaliveAction::Healthy(start + seconds(until));
        let probe = |until: u64| KeepaliveAction::Probe(start + seconds(until));
        // The first write counts, and not the last one.
        assert_eq!(at(3, (0, 3), busy), healthy(4));
        // The tunnel is suspect when it would have been without the early probe.
        assert_eq!(at(4, (0, 4), busy), probe(10));
        // The answer to the probe is sufficient, whatever the upstream does.
        assert_eq!(at(5, (5, 4), busy), healthy(9));
        assert_eq!(at(6, (5, 4), busy), healthy(9));
        // A write before the streams does not count.
        assert_eq!(at(7, (5, 7), idle), healthy(10));
        assert_eq!(at(9, (5, 9), busy), healthy(10));
        assert_eq!(at(10, (10, 9), busy), healthy(14));
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_may_be_early_and_only_one_is_outstanding() {
        let start = Instant::now();
        let mut liveness = Keepalive::new(KeepaliveConfig::default(), 0.0);
        let mut at = |after: u64, hurry: bool, read: Instant| {
            let now = start + seconds(after);
            let reasons = ProbeReasons {
                is_requested: hurry,
                ..ProbeReasons::default()
            };
            liveness.check(now, (read, now), reasons)
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
        let verdict = liveness.check(start, (start, start), ProbeReasons::default());
        assert_eq!(
            verdict,
            KeepaliveAction::Healthy(start + Duration::from_millis(4_500))
        );
    }
}
