//! Bound on the small HTTP/2 frames that a peer may send, which cost this end work and serve no stream.
//!
//! h2 bounds the size of frames, not their number. Each frame from the peer that carries nothing of a body costs points.
//! Streams that this end opens and bytes that it sends earn some, since those cause such frames; time earns the rest. A peer
//! that has no points left ends its tunnel. Only the heads of frames are inspected, as they pass between TLS and h2.
//!
//! Frames of a body cost nothing, since upstreams that send a few bytes at a time are ordinary. But small ones that are not
//! consumed are counted (see [`crate::small_frames`]), and a peer that sends thousands at once lets the others have their
//! turn in between.

use crate::{
    frame_parser::{
        CONTINUATION, DATA, FrameEvent, FrameHeader, FrameParser, HEADERS, PING, RST_STREAM,
        SETTINGS, WINDOW_UPDATE,
    },
    io_observer::{IoObserver, ObservedIo},
    small_frames::SmallFrames,
};
use std::{
    io,
    sync::Arc,
    task::{Context, Poll},
};
use tokio::time::Instant;

/// Points at the beginning, and at most: all streams of a full tunnel may end at once, several times over.
const MOST: u64 = 100_000;
/// Points that a second earns. Liveness and windows need less than one PING and SETTINGS a second.
const PER_SECOND: u64 = 10_000;
/// Points that a stream earns: its answer, its trailers, its reset, and interim answers now and then.
const PER_STREAM: u64 = 8;
/// Bytes sent that earn a point: peers give windows back in larger parts.
const BYTES: u64 = 1024;
/// Cost of a frame that an honest peer sends seldom or never.
const RARE: u64 = 10;

/// Frames that are read before others on this thread get their turn.
const YIELD_AFTER_FRAMES: u32 = 1_000;
/// The client's connection, which fails when its peer floods it.
pub(crate) type FloodGuardedIo<S> = ObservedIo<S, FloodGuard>;

/// A connection whose preface is still to be sent.
pub(crate) fn guard_io<S>(io: S, small: Arc<SmallFrames>) -> FloodGuardedIo<S> {
    ObservedIo::new(io, FloodGuard::new(small))
}

/// Observer of the peer's frames that charges for small ones.
#[derive(Debug)]
pub(crate) struct FloodGuard {
    read: FrameParser,
    written: FrameParser,
    purse: TokenBucket,
    small: Arc<SmallFrames>,
    /// Frames since others had their turn.
    frames: u32,
}

impl FloodGuard {
    fn new(small: Arc<SmallFrames>) -> Self {
        Self {
            read: FrameParser::default(),
            written: FrameParser::of_client(),
            purse: TokenBucket::new(MOST, PER_SECOND),
            small,
            frames: 0,
        }
    }
}

impl IoObserver for FloodGuard {
    fn poll_turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.frames < YIELD_AFTER_FRAMES {
            return Poll::Ready(());
        }
        self.frames = 0;
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn read(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Self {
            purse,
            small,
            frames,
            ..
        } = self;
        let now = Instant::now();
        let mut flooded = None;
        self.read.pass(bytes, |part| {
            let FrameEvent::Head(FrameHeader {
                kind,
                length,
                stream,
                ..
            }) = part
            else {
                return;
            };
            *frames += 1;
            if kind == DATA {
                small.received(stream, usize::try_from(length).unwrap_or(usize::MAX));
            } else if !purse.pay(price(kind), now) {
                flooded = Some(kind);
            }
        });
        let Some(kind) = flooded else { return Ok(()) };
        let why = format!("the edge floods its tunnel with {}", name(kind));
        Err(io::Error::new(io::ErrorKind::InvalidData, why))
    }

    fn written(&mut self, bytes: &[u8]) {
        let mut streams = 0;
        self.written.pass(bytes, |part| {
            let opens = matches!(part, FrameEvent::Head(head) if head.kind == HEADERS);
            streams += u64::from(opens);
        });
        self.purse.sent(bytes.len(), streams, PER_STREAM);
    }
}

/// The peer's points.
#[derive(Debug)]
pub(crate) struct TokenBucket {
    points: u64,
    most: u64,
    per_second: u64,
    counted: Instant,
    /// Sent, and not yet turned into points.
    bytes: u64,
}

impl TokenBucket {
    /// A full purse, which time fills again.
    pub(crate) fn new(most: u64, per_second: u64) -> Self {
        Self {
            points: most,
            most,
            per_second,
            counted: Instant::now(),
            bytes: 0,
        }
    }

    /// Earns points for bytes sent to the peer, and `each` for so many streams.
    pub(crate) fn sent(&mut self, bytes: usize, streams: u64, each: u64) {
        self.bytes += u64::try_from(bytes).unwrap_or(u64::MAX);
        self.earn(self.bytes / BYTES + streams * each);
        self.bytes %= BYTES;
    }

    fn earn(&mut self, points: u64) {
        self.points = self.points.saturating_add(points).min(self.most);
    }

    /// Takes a frame's price; false where there is not enough.
    pub(crate) fn pay(&mut self, price: u64, now: Instant) -> bool {
        if self.points < price {
            let micros = now.saturating_duration_since(self.counted).as_micros();
            let micros = u64::try_from(micros).unwrap_or(u64::MAX);
            self.earn(micros.saturating_mul(self.per_second) / 1_000_000);
            self.counted = now;
        }
        match self.points.checked_sub(price) {
            Some(left) => self.points = left,
            None => return false,
        }
        true
    }
}

fn price(kind: u8) -> u64 {
    match kind {
        HEADERS | CONTINUATION | RST_STREAM | WINDOW_UPDATE => 1,
        _ => RARE,
    }
}

fn name(kind: u8) -> &'static str {
    match kind {
        HEADERS => "HEADERS",
        RST_STREAM => "RST_STREAM",
        SETTINGS => "SETTINGS",
        PING => "PING",
        WINDOW_UPDATE => "WINDOW_UPDATE",
        CONTINUATION => "CONTINUATION",
        _ => "frames of rare kinds",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn times(purse: &mut TokenBucket, kind: u8, now: Instant) -> u64 {
        (0..2 * MOST)
            .take_while(|_| purse.pay(price(kind), now))
            .count() as u64
    }

    #[test]
    fn a_peer_that_sends_thousands_of_frames_yields_to_others() {
        let mut guard = FloodGuard::new(Arc::default());
        let mut cx = Context::from_waker(std::task::Waker::noop());
        let frame = [0, 0, 0, DATA, 0, 0, 0, 0, 1];
        for _ in 0..3 {
            for _ in 0..YIELD_AFTER_FRAMES {
                assert!(guard.poll_turn(&mut cx).is_ready());
                guard.read(&frame).unwrap();
            }
            assert!(guard.poll_turn(&mut cx).is_pending());
        }
    }

    #[test]
    fn a_flood_is_paid_for_a_while_and_time_and_traffic_earn_more() {
        let mut purse = TokenBucket::new(MOST, PER_SECOND);
        let now = purse.counted;
        assert_eq!(times(&mut purse, PING, now), MOST / RARE);
        let later = now + Duration::from_secs(1);
        assert_eq!(times(&mut purse, PING, later), PER_SECOND / RARE);
        purse.sent(usize::try_from(BYTES).unwrap() * 5, 2, PER_STREAM);
        assert_eq!(times(&mut purse, HEADERS, later), 5 + 2 * PER_STREAM);
    }
}
