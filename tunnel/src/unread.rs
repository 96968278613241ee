//! What has arrived at this end and nobody has taken yet, in bytes: of a tunnel, and of the whole process.
//!
//! The engine keeps up to a window for each stream whose reader stalls, and says how much only stream by stream. So
//! each stream is entered here while it can hold something, and whoever sizes windows adds them up, now and
//! then. What a tunnel holds counts into the [`Pressure`] of its process, which is for all tunnels together and for
//! whatever else waits unread there.

use crate::small::Small;
use h2::FlowControl;
use slab::Slab;
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

/// Streams are asked what they hold not more often than this, while bytes move.
pub const WEIGH_AFTER: Duration = Duration::from_millis(100);

/// The streams of one tunnel that can hold unread bytes.
#[derive(Debug, Default)]
pub(crate) struct Unread(Mutex<Slab<Stream>>);

#[derive(Debug)]
struct Stream {
    id: u32,
    flow: FlowControl,
    /// What it held when it was last asked.
    held: usize,
}

/// What the streams of a tunnel hold, in bytes, with what their small frames cost besides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// All of them.
    pub all: usize,
    /// Those that hold just what they held the last time: nobody takes it.
    pub stalled: usize,
}

impl Unread {
    /// Bytes that all streams hold now. Asks each of them, and remembers nothing.
    pub(crate) fn total(&self) -> usize {
        let streams = self.streams();
        streams
            .iter()
            .map(|(_, stream)| stream.flow.used_capacity())
            .sum()
    }

    /// What all streams hold now. Asks each of them: not for every poll.
    pub(crate) fn weigh(&self, small: &Small) -> Held {
        let mut sum = Held::default();
        for (_, stream) in self.streams().iter_mut() {
            let held = stream.flow.used_capacity() + small.cost(stream.id);
            sum.all += held;
            if held == stream.held {
                sum.stalled += held;
            }
            stream.held = held;
        }
        sum
    }

    fn streams(&self) -> MutexGuard<'_, Slab<Stream>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A stream's place among those that can hold unread bytes.
#[derive(Debug)]
pub(crate) struct Entry {
    unread: Arc<Unread>,
    key: usize,
}

impl Entry {
    /// Enters a stream. It has to leave before its last other handle does, or it would never be given up.
    pub(crate) fn new(unread: &Arc<Unread>, id: u32, flow: FlowControl) -> Self {
        let stream = Stream { id, flow, held: 0 };
        let key = unread.streams().insert(stream);
        Self {
            unread: unread.clone(),
            key,
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let stream = self.unread.streams().try_remove(self.key);
        // Outside of the lock: it may take the engine's.
        drop(stream);
    }
}

/// Unread bytes of a process, and how many there may be.
#[derive(Debug)]
pub struct Pressure {
    bytes: AtomicUsize,
    bound: usize,
}

impl Pressure {
    /// None yet; `bound` bytes at most.
    pub fn new(bound: usize) -> Self {
        Self {
            bytes: AtomicUsize::new(0),
            bound,
        }
    }

    /// Bytes that were unread when each part last looked.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    /// Bytes that may be unread.
    pub fn bound(&self) -> usize {
        self.bound
    }

    /// Whether windows have to be small: half of the bound is taken.
    pub fn is_high(&self) -> bool {
        self.bytes() >= self.bound / 2
    }

    /// Whether there is room for no further stream.
    pub fn is_full(&self) -> bool {
        self.bytes() >= self.bound
    }
}

impl Default for Pressure {
    /// Without a bound.
    fn default() -> Self {
        Self::new(usize::MAX)
    }
}

/// What the tunnels of one node share: their streams leave unread what one budget allows, however many tunnels bulk
/// has brought.
#[derive(Debug, Default)]
pub struct Siblings {
    streams: AtomicUsize,
    stalled: Arc<Pressure>,
}

impl Siblings {
    /// Streams that are open in all of them.
    pub(crate) fn streams(&self) -> usize {
        self.streams.load(Relaxed)
    }

    /// One more, or one less.
    pub(crate) fn count(&self) -> &AtomicUsize {
        &self.streams
    }

    /// Bytes that stalled streams hold, in all of them.
    pub(crate) fn stalled(&self) -> usize {
        self.stalled.bytes()
    }

    /// What one of them adds to that.
    pub(crate) fn part(&self) -> Part {
        Part::new(self.stalled.clone())
    }
}

/// What one tunnel, or one body on its way into a tunnel, adds to the pressure; dropping it takes that away.
#[derive(Debug)]
pub struct Part {
    pressure: Arc<Pressure>,
    bytes: usize,
}

impl Part {
    /// Nothing yet.
    pub fn new(pressure: Arc<Pressure>) -> Self {
        Self { pressure, bytes: 0 }
    }

    /// What it adds now.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds so much from now on.
    pub fn set(&mut self, bytes: usize) {
        let all = &self.pressure.bytes;
        if bytes >= self.bytes {
            all.fetch_add(bytes - self.bytes, Relaxed);
        } else {
            all.fetch_sub(self.bytes - bytes, Relaxed);
        }
        self.bytes = bytes;
    }

    pub(crate) fn pressure(&self) -> &Pressure {
        &self.pressure
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pressure_is_the_sum_of_its_parts() {
        let pressure = Arc::new(Pressure::new(100));
        let mut near = Part::new(pressure.clone());
        let mut far = Part::new(pressure.clone());
        near.set(30);
        far.set(30);
        assert_eq!(
            (pressure.bytes(), pressure.is_high(), pressure.is_full()),
            (60, true, false)
        );
        near.set(70);
        assert!(pressure.is_full());
        near.set(10);
        drop(far);
        assert_eq!((pressure.bytes(), pressure.is_high()), (10, false));
        drop(near);
        assert_eq!(pressure.bytes(), 0);
        assert!(!Pressure::default().is_high());
    }
}
