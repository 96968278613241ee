//! Limit on the peer's frames that carry no part of a body: they cost this end work and serve no stream (CVE-2019-9512,
//! CVE-2019-9514, CVE-2019-9515, CVE-2023-44487).
//!
//! Each such frame costs tokens. A peer earns tokens by streams and by the bytes that it is sent, since
//! those cause such frames, and over time.

use super::frame::{Head, flag, kind};
use crate::token_bucket::TokenBucket;
use tokio::time::Instant;

/// Number of tokens at the beginning, which is also the maximum. All streams of a full connection may end at once, several
/// times over.
const MAX_TOKENS: u64 = 100_000;
/// Tokens that a peer earns per second. Keepalive needs less than one PING per second.
const TOKENS_PER_SECOND: u64 = 10_000;
/// Tokens that a stream earns: for its response, its trailers, its reset, and occasional interim responses.
const TOKENS_PER_STREAM: u64 = 8;
/// Cost of a frame that an honest peer sends rarely or never.
const RARE_FRAME_COST: u64 = 10;
/// Number of fields that cost one token, apart from that of their frame.
const FIELDS_PER_TOKEN: u64 = 32;
/// Least payload of DATA that nobody reads, in bytes, for which its bytes are cost enough.
const MIN_UNREAD_DATA: usize = 1024;
/// Number of kinds whose costs are counted: those of RFC 9113 section 6, and one for all others.
const KINDS: usize = kind::CONTINUATION as usize + 2;

/// Limit on the frames of one peer.
#[derive(Debug)]
pub(super) struct FrameLimit {
    tokens: TokenBucket,
    /// Tokens that recent frames of each kind have cost.
    costs: [u64; KINDS],
    /// Whether the peer was sent a head or data since its last PING. It may answer each burst with a PING, to measure the link.
    is_ping_due: bool,
}

impl FrameLimit {
    pub(super) fn new() -> Self {
        Self {
            tokens: TokenBucket::new(MAX_TOKENS, TOKENS_PER_SECOND),
            costs: [0; KINDS],
            is_ping_due: false,
        }
    }

    /// Charges for a frame other than DATA. Returns `false` if the peer floods this end.
    #[must_use]
    pub(super) fn charge(&mut self, head: Head) -> bool {
        let cost = match head.kind {
            kind::HEADERS | kind::CONTINUATION | kind::RST_STREAM | kind::WINDOW_UPDATE => 1,
            kind::PING if head.has(flag::ACK) => 1,
            kind::PING if std::mem::take(&mut self.is_ping_due) => 1,
            _ => RARE_FRAME_COST,
        };
        self.spend(head.kind, cost)
    }

    /// Charges for the fields of a header block. Returns `false` if the peer floods this end.
    #[must_use]
    pub(super) fn charge_fields(&mut self, count: u64) -> bool {
        self.spend(kind::HEADERS, count / FIELDS_PER_TOKEN)
    }

    /// Charges for a DATA frame that no reader gets. Returns `false` if the peer floods this end.
    #[must_use]
    pub(super) fn charge_unread_data(&mut self, payload: usize) -> bool {
        payload >= MIN_UNREAD_DATA || self.spend(kind::DATA, 1)
    }

    /// Charges for a reset of a stream that the user has not got, and takes back what the stream has earned. Returns `false` if the
    /// peer floods this end.
    #[must_use]
    pub(super) fn charge_unaccepted_reset(&mut self) -> bool {
        self.spend(kind::RST_STREAM, RARE_FRAME_COST + TOKENS_PER_STREAM)
    }

    fn spend(&mut self, frame_kind: u8, tokens: u64) -> bool {
        let cost = &mut self.costs[usize::from(frame_kind).min(KINDS - 1)];
        *cost += tokens;
        // Each kind that has cost a full bucket since then counts for more than all that came before.
        if *cost > MAX_TOKENS {
            self.costs = self.costs.map(|cost| cost / 2);
        }
        self.tokens.try_spend(tokens, Instant::now())
    }

    /// Returns the kind of frames that has cost the most recently. A flood may end with a cheap frame of another kind.
    pub(super) fn costliest_kind(&self) -> u8 {
        let costs = (0..).zip(self.costs);
        let costliest = costs.max_by_key(|(_, cost)| *cost);
        costliest.map_or(kind::DATA, |(frame_kind, _)| frame_kind)
    }

    /// Earns tokens for bytes that are sent to the peer. `has_messages`: some of them are heads or data.
    pub(super) fn earn_for_bytes(&mut self, bytes: usize, has_messages: bool) {
        self.tokens.earn_for_sent(bytes, 0, 0);
        self.is_ping_due |= has_messages;
    }

    /// Earns tokens for a new stream.
    pub(super) fn earn_for_stream(&mut self) {
        self.tokens.earn_for_sent(0, 1, TOKENS_PER_STREAM);
    }
}

/// Returns the name of a kind of frames, for messages.
pub(super) fn frame_name(frame_kind: u8) -> &'static str {
    match frame_kind {
        kind::DATA => "empty or unread DATA frames",
        kind::HEADERS => "HEADERS",
        kind::RST_STREAM => "RST_STREAM",
        kind::SETTINGS => "SETTINGS",
        kind::PING => "PING",
        kind::WINDOW_UPDATE => "WINDOW_UPDATE",
        kind::CONTINUATION => "CONTINUATION",
        _ => "frames of rare kinds",
    }
}
