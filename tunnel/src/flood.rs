//! Limit on the small HTTP/2 frames of a peer, which cost this end work and serve no stream.
//!
//! h2 limits the size of frames, not their number. Each frame from the peer that carries no part of a body costs points. A
//! peer earns points by the streams that this end opens and by the bytes that it receives, since those cause such frames, and
//! over time. The tunnel of a peer without points is closed. Only the heads of frames are inspected, between TLS and h2.
//!
//! Frames of a body cost nothing, since many upstreams send a few bytes at a time. But small frames that are not consumed are
//! counted (see [`crate::small_frames`]). If a peer sends thousands of frames at once, other tasks of the thread run in
//! between.

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

/// Number of points at the beginning, which is also the maximum. All streams of a full tunnel may end at once, several times
/// over.
const MAX_TOKENS: u64 = 100_000;
/// Points that a peer earns per second. Keepalive and windows need less than one PING and SETTINGS per second.
const TOKENS_PER_SECOND: u64 = 10_000;
/// Points that a stream earns: for its response, its trailers, its reset, and occasional interim responses.
const TOKENS_PER_STREAM: u64 = 8;
/// Number of sent bytes that earn one point: peers update windows in larger steps.
const BYTES_PER_TOKEN: u64 = 1024;
/// Cost of a frame that an honest peer sends rarely or never.
const RARE_FRAME_COST: u64 = 10;

/// Number of frames after which other tasks of this thread run.
const YIELD_AFTER_FRAMES: u32 = 1_000;
/// Connection that fails when its peer floods it.
pub(crate) type FloodGuardedIo<S> = ObservedIo<S, FloodGuard>;

/// Wraps a connection whose preface is still to be sent. A trusted peer has no limit.
pub(crate) fn guard_io<S>(
    io: S,
    small_frames: Arc<SmallFrames>,
    is_trusted: bool,
) -> FloodGuardedIo<S> {
    let guard = FloodGuard {
        is_trusted,
        ..FloodGuard::new(small_frames)
    };
    ObservedIo::new(io, guard)
}

/// Observer of the peer's frames that charges for small ones.
#[derive(Debug)]
pub(crate) struct FloodGuard {
    read_parser: FrameParser,
    write_parser: FrameParser,
    bucket: TokenBucket,
    small_frames: Arc<SmallFrames>,
    /// Whether the peer pays for no frame.
    is_trusted: bool,
    /// Number of frames since other tasks ran.
    frames_since_yield: u32,
}

impl FloodGuard {
    fn new(small_frames: Arc<SmallFrames>) -> Self {
        Self {
            read_parser: FrameParser::default(),
            write_parser: FrameParser::for_client(),
            bucket: TokenBucket::new(MAX_TOKENS, TOKENS_PER_SECOND),
            small_frames,
            is_trusted: false,
            frames_since_yield: 0,
        }
    }
}

impl IoObserver for FloodGuard {
    fn poll_read_ready(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.frames_since_yield < YIELD_AFTER_FRAMES {
            return Poll::Ready(());
        }
        self.frames_since_yield = 0;
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn on_read(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Self {
            bucket,
            small_frames,
            frames_since_yield,
            is_trusted,
            ..
        } = self;
        let now = Instant::now();
        let mut flooding_kind = None;
        self.read_parser.parse(bytes, |part| {
            let FrameEvent::Header(FrameHeader {
                kind,
                length,
                stream,
                ..
            }) = part
            else {
                return;
            };
            *frames_since_yield += 1;
            if kind == DATA && cfg!(feature = "engine") {
                // The engine joins small frames, so they cost their bytes.
            } else if kind == DATA {
                small_frames.record_received(stream, usize::try_from(length).unwrap_or(usize::MAX));
            } else if !*is_trusted && !bucket.try_spend(frame_cost(kind), now) {
                flooding_kind = Some(kind);
            }
        });
        let Some(kind) = flooding_kind else {
            return Ok(());
        };
        let detail = format!("the edge floods its tunnel with {}", frame_name(kind));
        Err(io::Error::new(io::ErrorKind::InvalidData, detail))
    }

    fn on_written(&mut self, bytes: &[u8]) {
        let mut streams = 0;
        self.write_parser.parse(bytes, |part| {
            let opens = matches!(part, FrameEvent::Header(head) if head.kind == HEADERS);
            streams += u64::from(opens);
        });
        self.bucket
            .earn_for_sent(bytes.len(), streams, TOKENS_PER_STREAM);
    }
}

/// The peer's points.
#[derive(Debug)]
pub(crate) struct TokenBucket {
    tokens: u64,
    max_tokens: u64,
    per_second: u64,
    refilled_at: Instant,
    /// Bytes that were sent and have not yet earned points.
    unconverted_bytes: u64,
}

impl TokenBucket {
    /// Creates a full bucket, which refills over time.
    pub(crate) fn new(max_tokens: u64, per_second: u64) -> Self {
        Self {
            tokens: max_tokens,
            max_tokens,
            per_second,
            refilled_at: Instant::now(),
            unconverted_bytes: 0,
        }
    }

    /// Earns points for bytes that were sent to the peer, and `tokens_per_stream` points for each of `streams`.
    pub(crate) fn earn_for_sent(&mut self, bytes: usize, streams: u64, tokens_per_stream: u64) {
        self.unconverted_bytes += u64::try_from(bytes).unwrap_or(u64::MAX);
        self.add_tokens(self.unconverted_bytes / BYTES_PER_TOKEN + streams * tokens_per_stream);
        self.unconverted_bytes %= BYTES_PER_TOKEN;
    }

    fn add_tokens(&mut self, tokens: u64) {
        self.tokens = self.tokens.saturating_add(tokens).min(self.max_tokens);
    }

    /// Spends the cost of a frame. Returns `false` if there are not enough points.
    pub(crate) fn try_spend(&mut self, cost: u64, now: Instant) -> bool {
        if self.tokens < cost {
            let micros = now.saturating_duration_since(self.refilled_at).as_micros();
            let micros = u64::try_from(micros).unwrap_or(u64::MAX);
            self.add_tokens(micros.saturating_mul(self.per_second) / 1_000_000);
            self.refilled_at = now;
        }
        match self.tokens.checked_sub(cost) {
            Some(left) => self.tokens = left,
            None => return false,
        }
        true
    }
}

fn frame_cost(kind: u8) -> u64 {
    match kind {
        HEADERS | CONTINUATION | RST_STREAM | WINDOW_UPDATE => 1,
        _ => RARE_FRAME_COST,
    }
}

fn frame_name(kind: u8) -> &'static str {
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
        (0..2 * MAX_TOKENS)
            .take_while(|_| purse.try_spend(frame_cost(kind), now))
            .count() as u64
    }

    #[test]
    fn a_peer_that_sends_thousands_of_frames_yields_to_others() {
        let mut guard = FloodGuard::new(Arc::default());
        let mut cx = Context::from_waker(std::task::Waker::noop());
        let frame = [0, 0, 0, DATA, 0, 0, 0, 0, 1];
        for _ in 0..3 {
            for _ in 0..YIELD_AFTER_FRAMES {
                assert!(guard.poll_read_ready(&mut cx).is_ready());
                guard.on_read(&frame).unwrap();
            }
            assert!(guard.poll_read_ready(&mut cx).is_pending());
        }
    }

    #[test]
    fn a_flood_is_paid_for_a_while_and_time_and_traffic_earn_more() {
        let mut purse = TokenBucket::new(MAX_TOKENS, TOKENS_PER_SECOND);
        let now = purse.refilled_at;
        assert_eq!(times(&mut purse, PING, now), MAX_TOKENS / RARE_FRAME_COST);
        let later = now + Duration::from_secs(1);
        assert_eq!(
            times(&mut purse, PING, later),
            TOKENS_PER_SECOND / RARE_FRAME_COST
        );
        purse.earn_for_sent(
            usize::try_from(BYTES_PER_TOKEN).unwrap() * 5,
            2,
            TOKENS_PER_STREAM,
        );
        assert_eq!(times(&mut purse, HEADERS, later), 5 + 2 * TOKENS_PER_STREAM);
    }
}
