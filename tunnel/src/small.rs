//! Small DATA frames that have arrived and nobody has taken.
//!
//! The engine keeps each frame in a place of its own, which costs the same for one byte as for a thousand: a window of
//! 4 MiB full of single bytes takes a gigabyte. What is below the engine sees frames come, the stream's owner sees
//! them go, and what is left between them counts as if it were bytes.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// What the engine needs for a frame besides its bytes.
const PLACE: usize = 256;
/// Frames of this many bytes have places that count no more.
const LARGE: usize = 1024;

/// By stream, of those that are open: how many small frames it holds.
#[derive(Debug, Default)]
pub(crate) struct Small(Mutex<HashMap<u32, usize>>);

impl Small {
    /// A frame has arrived.
    pub(crate) fn came(&self, stream: u32, length: usize) {
        if length < LARGE
            && let Some(count) = self.streams().get_mut(&stream)
        {
            *count += 1;
        }
    }

    /// Bytes that a stream's small frames cost besides their own.
    pub(crate) fn cost(&self, stream: u32) -> usize {
        let count = self.streams().get(&stream).copied();
        count.unwrap_or_default() * PLACE
    }

    fn went(&self, stream: u32, length: usize) {
        if length < LARGE
            && let Some(count) = self.streams().get_mut(&stream)
        {
            *count = count.saturating_sub(1);
        }
    }

    fn streams(&self) -> MutexGuard<'_, HashMap<u32, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A stream whose small frames are counted, from before the first can come until its owner is gone.
#[derive(Debug)]
pub(crate) struct Counted {
    small: Arc<Small>,
    stream: u32,
}

impl Counted {
    pub(crate) fn new(small: &Arc<Small>, stream: u32) -> Self {
        small.streams().insert(stream, 0);
        Self {
            small: small.clone(),
            stream,
        }
    }

    /// A frame was taken.
    pub(crate) fn took(&self, length: usize) {
        self.small.went(self.stream, length);
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.small.streams().remove(&self.stream);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_and_did_not_go_is_counted_while_its_stream_is_open() {
        let small = Arc::new(Small::default());
        small.came(1, 1);
        assert_eq!(small.cost(1), 0, "nobody has opened it");
        let stream = Counted::new(&small, 1);
        for length in [0, 1, LARGE - 1, LARGE, 60_000] {
            small.came(1, length);
            small.came(3, length);
        }
        assert_eq!(small.cost(1), 3 * PLACE);
        stream.took(LARGE);
        stream.took(1);
        assert_eq!(small.cost(1), 2 * PLACE);
        for _ in 0..9 {
            stream.took(0);
        }
        assert_eq!(small.cost(1), 0);
        drop(stream);
        assert!(small.streams().is_empty());
    }
}
