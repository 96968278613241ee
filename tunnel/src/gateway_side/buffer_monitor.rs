//! Monitor of the unread bytes in a tunnel's streams. A sample queries every stream, which is costly, so at most one is taken per
//! [`SAMPLE_INTERVAL`].

use crate::{
    buffered::{BufferedBytes, SAMPLE_INTERVAL},
    load::TunnelLoad,
};
use tokio::time::Instant;

/// Monitor of the streams of one tunnel: the last sample, and its time.
#[derive(Debug)]
pub(super) struct BufferMonitor {
    control_streams: usize,
    last_sample: BufferedBytes,
    sampled_at: Instant,
}

impl BufferMonitor {
    pub(super) fn new(control_streams: usize) -> Self {
        Self {
            control_streams,
            last_sample: BufferedBytes::default(),
            sampled_at: Instant::now(),
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

    /// Returns the bytes that the streams held at the last sample.
    pub(super) fn held(&self) -> usize {
        self.last_sample.total
    }

    /// Whether any stream can hold bytes. A tunnel that has only its control stream is woken by probes alone, because control
    /// messages are consumed as they arrive.
    fn may_hold_bytes(&self, load: &TunnelLoad) -> bool {
        self.last_sample.total > 0 || load.open_streams() > self.control_streams
    }
}
