//! Delay before the next attempt to dial.
//!
//! A long back-off protects the gateway, but it delays an edge whose network has returned. So the delay is long only if the
//! other end refused, or requested a delay. While the network is silent, an attempt is made every 2 s. Jitter spreads over
//! the upper half of each delay, so that edges that lost their gateway at one moment do not all return at one moment.

use std::time::Duration;

/// Back-off with separate maximum delays for silence and refusals.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    /// Maximum delay while there is no response.
    pub silent_max: Duration,
    /// Maximum delay after refusals.
    pub refused_max: Duration,
    refusals: u32,
    silences: u32,
}

/// First delay, which doubles with each attempt.
const FIRST_DELAY: Duration = Duration::from_millis(250);

impl Backoff {
    /// Creates a back-off that begins with the first delay.
    pub fn new(silent_max: Duration, refused_max: Duration) -> Self {
        Self {
            silent_max,
            refused_max,
            refusals: 0,
            silences: 0,
        }
    }

    /// Resets the delay after a tunnel was open, so that the next failure begins with the first delay.
    pub fn reset(&mut self) {
        self.refusals = 0;
        self.silences = 0;
    }

    /// Returns the delay after an attempt that received no answer. `random` is from 0 to 1.
    pub fn silent(&mut self, random: f64) -> Duration {
        self.silences = self.silences.saturating_add(1);
        with_jitter(exponential_delay(self.silences, self.silent_max), random)
    }

    /// Returns the delay after a refusal, at least the `retry_after` that the other end requested.
    pub fn refused(&mut self, retry_after: Option<Duration>, random: f64) -> Duration {
        self.refusals = self.refusals.saturating_add(1);
        let delay = with_jitter(exponential_delay(self.refusals, self.refused_max), random);
        match retry_after {
            // Jitter above the requested delay, for edges that received the same value.
            Some(retry_after) => delay.max(retry_after.mul_f64(1.0 + random.clamp(0.0, 1.0) / 2.0)),
            None => delay,
        }
    }

    /// Returns the maximum delay, for a refusal that does not end by waiting.
    pub fn max_delay(&mut self, random: f64) -> Duration {
        self.refusals = u32::MAX;
        with_jitter(self.refused_max, random)
    }
}

fn exponential_delay(attempts: u32, max: Duration) -> Duration {
    let factor = 1_u32
        .checked_shl(attempts.saturating_sub(1).min(16))
        .unwrap_or(u32::MAX);
    FIRST_DELAY.saturating_mul(factor).min(max)
}

fn with_jitter(delay: Duration, random: f64) -> Duration {
    delay.mul_f64(0.5 + random.clamp(0.0, 1.0) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_retried_every_2_s_and_refusals_back_off_to_60_s() {
        let mut backoff = Backoff::new(Duration::from_secs(2), Duration::from_mins(1));
        for _ in 0..40 {
            assert!(backoff.silent(1.0) <= Duration::from_secs(2));
        }
        let delays: Vec<_> = (0..10).map(|_| backoff.refused(None, 1.0)).collect();
        assert!(delays.is_sorted());
        assert_eq!(delays[0], Duration::from_millis(250));
        assert_eq!(delays[9], Duration::from_mins(1));
        backoff.reset();
        assert_eq!(backoff.refused(None, 0.0), Duration::from_millis(125));
        assert_eq!(backoff.max_delay(0.0), Duration::from_secs(30));
    }

    #[test]
    fn a_delay_requested_by_the_server_is_kept_with_upward_jitter() {
        let mut backoff = Backoff::new(Duration::from_secs(2), Duration::from_mins(1));
        let asked = Some(Duration::from_secs(10));
        assert_eq!(backoff.refused(asked, 0.0), Duration::from_secs(10));
        assert_eq!(backoff.refused(asked, 1.0), Duration::from_secs(15));
    }
}
