//! Monitor of the unread bytes in a tunnel's streams, which detects more of them than an honest edge may have sent.
//!
//! A sample queries every stream, which is costly, so at most one is taken per [`SAMPLE_INTERVAL`]. Between two samples a
//! fast edge could send more than its whole budget. So the monitor also makes a quick check each time as many bytes as the
//! whole budget have been read.

use crate::{
    buffered::{BufferedBytes, SAMPLE_INTERVAL},
    load::TunnelLoad,
};
use tokio::time::Instant;

/// Number of budgets that may be unread before the monitor concludes that the edge ignores windows. A change of windows takes
/// a round trip.
const OVERRUN_FACTOR: usize = 4;
/// Minimum window, which each stream has in addition to the budget.
const MIN_STREAM_WINDOW: usize = 64 << 10;

/// Monitor of the streams of one tunnel: the last sample, and its time.
#[derive(Debug)]
pub(super) struct BufferMonitor {
    control_streams: usize,
    last_sample: BufferedBytes,
    sampled_at: Instant,
    /// Bytes that had been read from the socket at the last quick check.
    read_at_check: u64,
}

impl BufferMonitor {
    pub(super) fn new(control_streams: usize) -> Self {
        Self {
            control_streams,
            last_sample: BufferedBytes::default(),
            sampled_at: Instant::now(),
            read_at_check: 0,
        }
    }

    /// Returns the time of the next sample, if no other event comes first.
    pub(super) fn next_sample_at(&self, load: &TunnelLoad, last_read: Instant) -> Option<Instant> {
        // Whether bytes arrived after the last sample.
        let has_new_bytes =
            last_read > self.sampled_at || self.last_sample.total > self.last_sample.stalled;
        (self.may_hold_bytes(load) && has_new_bytes).then(|| self.sampled_at + SAMPLE_INTERVAL)
    }

    /// Queries the buffered bytes of the streams, at most once per [`SAMPLE_INTERVAL`].
    pub(super) fn sample(&mut self, load: &TunnelLoad, now: Instant) {
        if self.may_hold_bytes(load)
            && now.saturating_duration_since(self.sampled_at) >= SAMPLE_INTERVAL
        {
            self.sampled_at = now;
            self.last_sample = load.sample_buffered();
        }
    }

    /// Returns the bytes that the streams hold, if that is more than their windows allow. `total_read` is the number of all bytes
    /// from the socket, and `budget` the number of bytes that the tunnel may leave unread.
    pub(super) fn overrun(
        &mut self,
        load: &TunnelLoad,
        total_read: u64,
        budget: usize,
    ) -> Option<usize> {
        let max_buffered =
            budget.saturating_mul(OVERRUN_FACTOR) + load.open_streams() * MIN_STREAM_WINDOW;
        let checked_bytes = self.quick_check(load, total_read, budget);
        let buffered_bytes = self.last_sample.total.max(checked_bytes);
        (buffered_bytes > max_buffered).then_some(buffered_bytes)
    }

    /// Returns the bytes that the streams hold if much has arrived since the last quick check, else 0.
    fn quick_check(&mut self, load: &TunnelLoad, total_read: u64, budget: usize) -> usize {
        if total_read - self.read_at_check < budget as u64 {
            return 0;
        }
        self.read_at_check = total_read;
        load.unread_bytes()
    }

    /// Whether any stream can hold bytes. A tunnel that has only its control stream is woken by probes alone, because control
    /// messages are consumed as they arrive.
    fn may_hold_bytes(&self, load: &TunnelLoad) -> bool {
        self.last_sample.total > 0 || load.open_streams() > self.control_streams
    }
}
