//! Largest window of a tunnel's streams.
//!
//! A large window fills long links but lets each stalled stream buffer as many bytes. So a stream gets the largest window only once
//! its reader has taken many bytes ([`WindowLimits`]). It is the smaller of two values:
//!
//! - 160 MB/s × round trip, rounded up to 4, 8 or 16 MiB, so that a round trip which is measured slightly shorter than the last
//!   one changes nothing;
//! - the remaining budget of the tunnel / open streams.

use crate::engine::WindowLimits;
use std::time::Duration;

/// Rate at which a window fills a link, in bytes per second of round trip.
const WINDOW_BYTES_PER_SECOND: u64 = 160_000_000;
const MIN_BDP_WINDOW: u64 = 4 << 20;
const MAX_BDP_WINDOW: u64 = 16 << 20;

/// Round trip from which a window that is too small costs more than a frame for each stream.
const FAR: Duration = Duration::from_millis(2);

/// Returns the window that fills a link of this round trip, in bytes: 4, 8 or 16 MiB.
fn bdp_window(round_trip: Duration) -> u32 {
    let micros = u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX);
    let bytes = (WINDOW_BYTES_PER_SECOND / 1_000_000).saturating_mul(micros);
    let bytes = bytes
        .clamp(MIN_BDP_WINDOW, MAX_BDP_WINDOW)
        .next_power_of_two();
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Returns the limits for the windows of `streams` open streams that share `budget` bytes. The bytes of stalled streams are
/// already subtracted from `budget`.
pub(crate) fn window_limits(round_trip: Duration, streams: usize, budget: usize) -> WindowLimits {
    let share = u32::try_from(budget / streams.max(1)).unwrap_or(u32::MAX);
    // A power of two, so that each stream that begins or ends does not change it.
    let share = share.checked_ilog2().map_or(0, |exponent| 1 << exponent);
    WindowLimits {
        max: bdp_window(round_trip).min(share),
        is_far: round_trip >= FAR,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: usize = 64 << 20;

    #[test]
    fn a_window_follows_the_round_trip_and_the_crowd() {
        let max_window =
            |round_trip, streams, budget| window_limits(round_trip, streams, budget).max;
        let near = Duration::from_micros(100);
        let far = Duration::from_millis(50);
        assert_eq!(max_window(near, 1, BUDGET), 4 << 20);
        assert_eq!(max_window(far, 1, BUDGET), 8 << 20);
        assert_eq!(max_window(Duration::from_millis(200), 1, BUDGET), 16 << 20);
        assert_eq!(max_window(far, 64, BUDGET), 1 << 20);
        assert_eq!(max_window(far, 65, BUDGET), 512 << 10);
        assert_eq!(max_window(far, 100_000, BUDGET), 512);
        assert_eq!(max_window(far, 0, 0), 0);
        assert!(window_limits(far, 1, BUDGET).is_far && !window_limits(near, 1, BUDGET).is_far);
    }

    #[test]
    fn a_varying_round_trip_keeps_a_window_that_fills_the_link() {
        for micros in (1_000..110_000).step_by(100) {
            for measured in [micros * 97 / 100, micros, micros * 103 / 100] {
                let window = bdp_window(Duration::from_micros(measured));
                let needed = (WINDOW_BYTES_PER_SECOND / 1_000_000 * measured).min(MAX_BDP_WINDOW);
                assert!(u64::from(window) >= needed, "{measured} us: {window} bytes");
            }
        }
    }
}
