//! Size of a tunnel's stream window.
//!
//! A large window fills long links but lets each stalled stream buffer as many bytes, and h2 has one initial window for a
//! whole connection. So the window is the smaller of two values, but at least 64 KiB:
//!
//! - 160 MB/s × round trip, rounded up to 4, 8 or 16 MiB;
//! - the remaining budget of the tunnel / open streams.
//!
//! The window changes by factors of two only, down at once and up with a delay. So many short streams cause few SETTINGS. The
//! size that fills a link is one of those steps itself. A round trip that is measured slightly shorter than the last one
//! therefore changes nothing. Otherwise it would halve the window.

use std::time::Duration;

/// Rate at which a window fills a link, in bytes per second of round trip.
const WINDOW_BYTES_PER_SECOND: u64 = 160_000_000;
const MIN_BDP_WINDOW: u64 = 4 << 20;
const MAX_BDP_WINDOW: u64 = 16 << 20;
const MIN_STREAM_WINDOW: u64 = 64 << 10;

/// Returns the window that fills a link of this round trip, in bytes: 4, 8 or 16 MiB.
pub fn bdp_window(round_trip: Duration) -> u32 {
    let micros = u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX);
    let bytes = (WINDOW_BYTES_PER_SECOND / 1_000_000).saturating_mul(micros);
    let bytes = bytes
        .clamp(MIN_BDP_WINDOW, MAX_BDP_WINDOW)
        .next_power_of_two();
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Returns the window for `streams` open streams that share `budget` bytes. The bytes of stalled streams are already
/// subtracted from `budget`.
pub fn window_size(round_trip: Duration, streams: usize, budget: usize) -> u32 {
    per_stream_share(streams, budget).min(bdp_window(round_trip))
}

/// Returns the share of each of `streams` open streams in `budget` bytes, independent of the length of the link.
pub(crate) fn per_stream_share(streams: usize, budget: usize) -> u32 {
    let share = budget / streams.max(1);
    let share = u64::try_from(share)
        .unwrap_or(u64::MAX)
        .max(MIN_STREAM_WINDOW);
    u32::try_from(share).unwrap_or(u32::MAX)
}

/// Returns the new window, if `desired` differs from `current` by at least a factor of two.
pub(crate) fn next_window(current: u32, desired: u32) -> Option<u32> {
    let mut next = current;
    while next > desired {
        next = next.div_ceil(2);
    }
    while next <= desired / 2 {
        next *= 2;
    }
    (next != current).then_some(next.max(64 << 10))
}

/// Returns the number of streams at which the window falls below `current`.
pub(crate) fn stream_threshold(current: u32, budget: usize) -> usize {
    if current <= 64 << 10 {
        return usize::MAX;
    }
    let window = usize::try_from(current).unwrap_or(usize::MAX);
    (budget / window).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: usize = 64 << 20;

    #[test]
    fn a_window_follows_the_round_trip_and_the_crowd() {
        let near = Duration::from_micros(100);
        let far = Duration::from_millis(50);
        assert_eq!(window_size(near, 1, BUDGET), 4 << 20);
        assert_eq!(window_size(far, 1, BUDGET), 8 << 20);
        assert_eq!(window_size(Duration::from_millis(200), 1, BUDGET), 16 << 20);
        assert_eq!(window_size(far, 64, BUDGET), 1 << 20);
        assert_eq!(window_size(far, 100_000, BUDGET), 64 << 10);
    }

    #[test]
    fn a_varying_round_trip_keeps_a_window_that_fills_the_link() {
        for micros in (1_000..110_000).step_by(100) {
            let first = bdp_window(Duration::from_micros(micros));
            for then in [micros * 97 / 100, micros, micros * 103 / 100] {
                let wanted = bdp_window(Duration::from_micros(then));
                let window = next_window(first, wanted).unwrap_or(first);
                let needed = (WINDOW_BYTES_PER_SECOND / 1_000_000 * then).min(MAX_BDP_WINDOW);
                assert!(
                    u64::from(window) >= needed,
                    "{micros} us, then {then} us: {window} bytes"
                );
            }
        }
    }

    #[test]
    fn the_window_changes_by_factors_of_two_only() {
        assert_eq!(next_window(4 << 20, 4 << 20), None);
        assert_eq!(next_window(4 << 20, 3 << 20), Some(2 << 20));
        assert_eq!(next_window(4 << 20, 7 << 20), None);
        assert_eq!(next_window(4 << 20, 8 << 20), Some(8 << 20));
        assert_eq!(next_window(4 << 20, 64 << 10), Some(64 << 10));
        assert_eq!(next_window(64 << 10, 4 << 20), Some(4 << 20));
        assert_eq!(next_window(64 << 10, 64 << 10), None);
    }

    #[test]
    fn the_crowd_that_lowers_a_window_is_the_first_that_does() {
        for window in [4 << 20, 1 << 20, 128 << 10] {
            let streams = stream_threshold(window, BUDGET);
            assert_eq!(
                next_window(
                    window,
                    window_size(Duration::ZERO, streams - 1, BUDGET).min(window)
                ),
                None
            );
            assert!(next_window(window, window_size(Duration::ZERO, streams, BUDGET)).is_some());
        }
    }
}
