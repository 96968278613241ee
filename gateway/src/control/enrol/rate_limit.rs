//! Rate limit of refused tokens by source address.
//!
//! A token's secret has 256 bits, so the limit is not needed against guessing. It keeps the attempts off the shared state and out
//! of the log. Many edges share the address of their NAT or of a load balancer, so a few refused tokens are free. The same token
//! counts once, whatever the reason: an edge presents it repeatedly while it searches for the gateway that accepts it.
//!
//! A token whose secret the gateway knows is limited only by its own refusals as used, expired or revoked, whatever else comes
//! from its address. So neither wrong tokens nor those of edges that were not reconfigured keep the other edges of their address
//! out. Other refusals of a known token, such as one for another node, count once for its address.
//!
//! At an address that is limited, each well-formed token is looked up among the tokens in memory. This asks the disk whether the
//! files of the data directory have changed (`stat`), and reads the tokens again only if so. The secret is hashed before the
//! comparison, so the lookup takes as long for a wrong secret as for the right one.
//!
//! The table is bounded; when it is full, the entry that was idle longest is removed.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tokio::time::Instant;

/// Number of different refused tokens that one address may present without a delay, and of refusals of one token that was valid.
const FREE_ATTEMPTS: usize = 5;
/// Time without a refused token after which an address or a token starts again.
const FORGET_AFTER: Duration = Duration::from_mins(1);
/// Maximum number of entries in the table.
const MAX_SOURCES: usize = 1024;

/// Source of refused requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Source {
    Address(IpAddr),
    /// Requests from an address with a token that was valid. The token is the hash of its id.
    Token(IpAddr, u64),
}

#[derive(Debug)]
struct FailedAttempts {
    /// Hashes of the different tokens of an address, at most [`FREE_ATTEMPTS`].
    tokens: Vec<u64>,
    /// Number of attempts.
    count: usize,
    last_attempt: Instant,
}

/// Rate limiter of refused tokens, with a bounded table of sources.
#[derive(Debug, Default)]
pub(super) struct JoinRateLimiter {
    attempts: Mutex<HashMap<Source, FailedAttempts>>,
    hasher: RandomState,
}

impl JoinRateLimiter {
    /// Returns the number of seconds until an address may try again with a token that the gateway does not know, if it is limited
    /// now.
    pub(super) fn retry_after(&self, address: IpAddr) -> Option<u16> {
        self.seconds_left(Source::Address(address))
    }

    /// Returns the number of seconds until an address may try again with the token with this id, if that token is limited now.
    pub(super) fn retry_token_after(&self, address: IpAddr, token_id: &str) -> Option<u16> {
        self.seconds_left(Source::Token(address, self.hasher.hash_one(token_id)))
    }

    fn seconds_left(&self, source: Source) -> Option<u16> {
        let attempts = self.attempts.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = attempts.get(&source)?;
        let used = match source {
            Source::Address(_) => entry.tokens.len(),
            Source::Token(..) => entry.count,
        };
        let left = FORGET_AFTER.checked_sub(entry.last_attempt.elapsed());
        let left = left.filter(|_| used >= FREE_ATTEMPTS)?;
        u16::try_from(left.as_secs().max(1)).ok()
    }

    /// Records a refused request from this address.
    pub(super) fn record_failure(&self, address: IpAddr, token: &str) {
        self.record(Source::Address(address), self.hasher.hash_one(token));
    }

    /// Records the refusal of the token with this id, which was valid before.
    pub(super) fn record_invalid_token(&self, address: IpAddr, token_id: &str) {
        let token = self.hasher.hash_one(token_id);
        self.record(Source::Token(address, token), token);
    }

    fn record(&self, source: Source, token: u64) {
        let mut attempts = self.attempts.lock().unwrap_or_else(PoisonError::into_inner);
        if attempts.len() >= MAX_SOURCES && !attempts.contains_key(&source) {
            let idle = attempts.iter().min_by_key(|(_, seen)| seen.last_attempt);
            if let Some(idle) = idle.map(|(source, _)| *source) {
                attempts.remove(&idle);
            }
        }
        let now = Instant::now();
        let entry = attempts.entry(source).or_insert(FailedAttempts {
            tokens: Vec::new(),
            count: 0,
            last_attempt: now,
        });
        if entry.last_attempt.elapsed() >= FORGET_AFTER {
            entry.tokens.clear();
            entry.count = 0;
        }
        if !entry.tokens.contains(&token) && entry.tokens.len() < FREE_ATTEMPTS {
            entry.tokens.push(token);
        }
        entry.count += 1;
        entry.last_attempt = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_an_address_with_too_many_wrong_tokens_waits() {
        let strangers = JoinRateLimiter::default();
        let (one, other) = (IpAddr::from([192, 0, 2, 1]), IpAddr::from([192, 0, 2, 2]));
        for token in ["a", "b", "c", "d", "a", "d", "e"] {
            assert_eq!(strangers.retry_after(one), None, "{token}");
            strangers.record_failure(one, token);
        }
        assert_eq!(strangers.retry_after(one), Some(60));
        assert_eq!(strangers.retry_after(other), None);
        tokio::time::advance(FORGET_AFTER + Duration::from_secs(1)).await;
        assert_eq!(strangers.retry_after(one), None);
        strangers.record_failure(one, "a");
        assert_eq!(strangers.retry_after(one), None, "the count starts again");
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_that_was_valid_limits_only_itself() {
        let limiter = JoinRateLimiter::default();
        let (one, other) = (IpAddr::from([192, 0, 2, 1]), IpAddr::from([192, 0, 2, 2]));
        for token in 0..100 {
            limiter.record_invalid_token(one, &token.to_string());
        }
        assert_eq!(limiter.retry_after(one), None);
        assert_eq!(limiter.retry_token_after(one, "0"), None);
        for _ in 1..FREE_ATTEMPTS {
            assert_eq!(limiter.retry_token_after(one, "0"), None);
            limiter.record_invalid_token(one, "0");
        }
        assert_eq!(limiter.retry_token_after(one, "0"), Some(60));
        assert_eq!(limiter.retry_token_after(one, "1"), None);
        assert_eq!(limiter.retry_token_after(other, "0"), None);
        tokio::time::advance(FORGET_AFTER + Duration::from_secs(1)).await;
        assert_eq!(limiter.retry_token_after(one, "0"), None);
    }

    #[test]
    fn the_table_is_bounded() {
        let strangers = JoinRateLimiter::default();
        for address in 0..2_000_u32 {
            strangers.record_failure(IpAddr::from(address.to_be_bytes()), "a");
        }
        assert_eq!(strangers.attempts.lock().unwrap().len(), MAX_SOURCES);
    }
}
