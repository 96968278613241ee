//! Rate limit of a peer's HTTP/2 frames: tokens that frames cost, and that traffic and time earn.

use tokio::time::Instant;

/// Number of sent bytes that earn one token: peers update windows in larger steps.
const BYTES_PER_TOKEN: u64 = 1024;

/// Tokens of one peer.
#[derive(Debug)]
pub(crate) struct TokenBucket {
    tokens: u64,
    max_tokens: u64,
    per_second: u64,
    refilled_at: Instant,
    /// Bytes that were sent and have not yet earned tokens.
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

    /// Earns tokens for bytes that were sent to the peer, and `tokens_per_stream` tokens for each of `streams`.
    pub(crate) fn earn_for_sent(&mut self, bytes: usize, streams: u64, tokens_per_stream: u64) {
        self.unconverted_bytes += u64::try_from(bytes).unwrap_or(u64::MAX);
        self.add_tokens(self.unconverted_bytes / BYTES_PER_TOKEN + streams * tokens_per_stream);
        self.unconverted_bytes %= BYTES_PER_TOKEN;
    }

    fn add_tokens(&mut self, tokens: u64) {
        self.tokens = self.tokens.saturating_add(tokens).min(self.max_tokens);
    }

    /// Spends the cost of a frame. Returns `false` if there are not enough tokens.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Returns the number of frames of this cost that the bucket covers.
    fn covered(bucket: &mut TokenBucket, cost: u64, now: Instant) -> usize {
        let tries = (0..100_000).take_while(|_| bucket.try_spend(cost, now));
        tries.count()
    }

    #[test]
    fn time_and_traffic_earn_tokens() {
        let mut bucket = TokenBucket::new(100_000, 10_000);
        let now = bucket.refilled_at;
        assert_eq!(covered(&mut bucket, 10, now), 10_000);
        let later = now + Duration::from_secs(1);
        assert_eq!(covered(&mut bucket, 10, later), 1_000);
        let bytes = usize::try_from(BYTES_PER_TOKEN).unwrap() * 50;
        bucket.earn_for_sent(bytes, 2, 25);
        assert_eq!(covered(&mut bucket, 10, later), 10);
    }
}
