//! Counter of small DATA frames that have arrived and have not been consumed.
//!
//! h2 stores each frame in an entry of its own, which costs the same for one byte as for a thousand. A window of 4 MiB that
//! is full of single bytes takes a gigabyte. The code below h2 counts frames that arrive, and the stream's owner counts
//! frames that it consumes. The cost of the remaining frames counts as if it were bytes.

use fnv::FnvHashMap;
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

/// Memory that h2 needs for a frame besides its payload, in bytes.
const FRAME_OVERHEAD_BYTES: usize = 256;
/// Payload, in bytes, from which the overhead of a frame is not counted.
const LARGE_FRAME_BYTES: usize = 1024;

/// Number of small frames that the open streams hold.
#[derive(Debug, Default)]
pub(crate) struct SmallFrames {
    /// Frames by stream. This end assigns the numbers of streams, so no peer can make their hashes collide.
    streams: Mutex<FnvHashMap<u32, usize>>,
    /// Number of frames of all streams.
    total: AtomicUsize,
}

impl SmallFrames {
    /// Records a frame that has arrived.
    pub(crate) fn record_received(&self, stream: u32, length: usize) {
        if length < LARGE_FRAME_BYTES
            && let Some(count) = self.streams().get_mut(&stream)
        {
            *count += 1;
            self.total.fetch_add(1, Relaxed);
        }
    }

    /// Returns the memory that the small frames of all streams cost besides their payload, in bytes. Queries no stream.
    pub(crate) fn total_cost(&self) -> usize {
        self.total.load(Relaxed) * FRAME_OVERHEAD_BYTES
    }

    /// Returns the memory that a stream's small frames cost besides their payload, in bytes.
    pub(crate) fn stream_cost(&self, stream: u32) -> usize {
        let count = self.streams().get(&stream).copied();
        count.unwrap_or_default() * FRAME_OVERHEAD_BYTES
    }

    fn record_consumed(&self, stream: u32, length: usize) {
        if length < LARGE_FRAME_BYTES
            && let Some(count) = self.streams().get_mut(&stream)
            && let Some(left) = count.checked_sub(1)
        {
            *count = left;
            self.total.fetch_sub(1, Relaxed);
        }
    }

    fn streams(&self) -> MutexGuard<'_, FnvHashMap<u32, usize>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Entry of a stream whose small frames are counted. It exists from before the first frame can arrive until the stream's
/// owner is dropped.
#[derive(Debug)]
pub(crate) struct SmallFrameCounter {
    small_frames: Arc<SmallFrames>,
    stream: u32,
}

impl SmallFrameCounter {
    pub(crate) fn new(small_frames: &Arc<SmallFrames>, stream: u32) -> Self {
        small_frames.streams().insert(stream, 0);
        Self {
            small_frames: small_frames.clone(),
            stream,
        }
    }

    /// Records a frame that was consumed.
    pub(crate) fn record_consumed(&self, length: usize) {
        self.small_frames.record_consumed(self.stream, length);
    }
}

impl Drop for SmallFrameCounter {
    fn drop(&mut self) {
        let count = self.small_frames.streams().remove(&self.stream);
        self.small_frames
            .total
            .fetch_sub(count.unwrap_or_default(), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffered_bytes_are_counted_while_their_stream_is_open() {
        let small = Arc::new(SmallFrames::default());
        small.record_received(1, 1);
        assert_eq!(small.stream_cost(1), 0, "no stream was opened");
        let stream = SmallFrameCounter::new(&small, 1);
        for length in [0, 1, LARGE_FRAME_BYTES - 1, LARGE_FRAME_BYTES, 60_000] {
            small.record_received(1, length);
            small.record_received(3, length);
        }
        assert_eq!(
            (small.stream_cost(1), small.total_cost()),
            (3 * FRAME_OVERHEAD_BYTES, 3 * FRAME_OVERHEAD_BYTES)
        );
        stream.record_consumed(LARGE_FRAME_BYTES);
        stream.record_consumed(1);
        let other = SmallFrameCounter::new(&small, 5);
        small.record_received(5, 1);
        assert_eq!(
            (small.stream_cost(1), small.total_cost()),
            (2 * FRAME_OVERHEAD_BYTES, 3 * FRAME_OVERHEAD_BYTES)
        );
        for _ in 0..9 {
            stream.record_consumed(0);
        }
        assert_eq!(
            (small.stream_cost(1), small.total_cost()),
            (0, FRAME_OVERHEAD_BYTES)
        );
        drop((stream, other));
        assert!(small.streams().is_empty());
        assert_eq!(
            small.total_cost(),
            0,
            "the bytes of a stream are released with it"
        );
    }
}
