//! Limit on the peer's frames that carry no part of a body: they cost this end work and serve no stream (CVE-2019-9512,
//! CVE-2019-9514, CVE-2019-9515, CVE-2023-44487).
//!
//! Each such frame costs tokens. A peer earns tokens by streams and by the bytes that it is sent, since
//! those cause such frames, and over time.

use super::frame::kind;
use crate::token_bucket::TokenBucket;
use tokio::time::Instant;

/// Number of tokens at the beginning, which is also the maximum. All streams of a full connection may end at once, several
/// times over.
const MAX_TOKENS: u64 = 100_000;
/// Tokens that a peer earns per second. Keepalive and windows need less than one PING and SETTINGS per second.
const TOKENS_PER_SECOND: u64 = 10_000;
/// Tokens that a stream earns: for its response, its trailers, its reset, and occasional interim responses.
const TOKENS_PER_STREAM: u64 = 8;
/// Cost of a frame that an honest peer sends rarely or never.
const RARE_FRAME_COST: u64 = 10;

/// Limit on the frames of one peer.
#[derive(Debug)]
pub(super) struct FrameLimit(TokenBucket);

impl FrameLimit {
    pub(super) fn new() -> Self {
        Self(TokenBucket::new(MAX_TOKENS, TOKENS_PER_SECOND))
    }

    /// Charges for a frame other than DATA. Returns `false` if the peer floods this end.
    #[must_use]
    pub(super) fn charge(&mut self, frame_kind: u8) -> bool {
        let cost = match frame_kind {
            kind::HEADERS | kind::CONTINUATION | kind::RST_STREAM | kind::WINDOW_UPDATE => 1,
            _ => RARE_FRAME_COST,
        };
        self.0.try_spend(cost, Instant::now())
    }

    /// Earns tokens for bytes that are sent to the peer.
    pub(super) fn earn_for_bytes(&mut self, bytes: usize) {
        self.0.earn_for_sent(bytes, 0, 0);
    }

    /// Earns tokens for a new stream.
    pub(super) fn earn_for_stream(&mut self) {
        self.0.earn_for_sent(0, 1, TOKENS_PER_STREAM);
    }
}

/// Returns the name of a kind of frames, for messages.
pub(super) fn frame_name(frame_kind: u8) -> &'static str {
    match frame_kind {
        kind::DATA => "empty DATA frames",
        kind::HEADERS => "HEADERS",
        kind::RST_STREAM => "RST_STREAM",
        kind::SETTINGS => "SETTINGS",
        kind::PING => "PING",
        kind::WINDOW_UPDATE => "WINDOW_UPDATE",
        kind::CONTINUATION => "CONTINUATION",
        _ => "frames of rare kinds",
    }
}
