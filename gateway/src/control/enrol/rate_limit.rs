//! Rate limit of refused tokens by source address.
//!
//! A token's secret has 256 bits, so the limit is not needed against guessing. It keeps the attempts off the disk and the
//! shared state, and out of the log. Many edges share the address of their NAT or of a load balancer, so a few refused tokens are free. The same token counts
//! once: an edge presents it repeatedly while it searches for the gateway that accepts it. The table is bounded; when it is full,
//! the address that was idle longest is removed.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tokio::time::Instant;

/// Number of different refused tokens that one address may present without a delay.
const FREE_ATTEMPTS: usize = 5;
/// Time without a refused token after which an address starts again.
const FORGET_AFTER: Duration = Duration::from_mins(1);
/// Maximum number of addresses in the table.
const MAX_ADDRESSES: usize = 1024;

#[derive(Debug)]
struct FailedAttempts {
    /// Hashes of the first [`FREE_ATTEMPTS`] tokens.
    tokens: Vec<u64>,
    last_attempt: Instant,
}

/// Rate limiter of refused tokens, with a bounded table of source addresses.
#[derive(Debug, Default)]
pub(super) struct JoinRateLimiter {
    attempts: Mutex<HashMap<IpAddr, FailedAttempts>>,
    hasher: RandomState,
}

impl JoinRateLimiter {
    /// Returns the number of seconds until an address may try again, if it is limited now.
    pub(super) fn retry_after(&self, address: IpAddr) -> Option<u16> {
        let attempts = self.attempts.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = attempts
            .get(&address)
            .filter(|seen| seen.tokens.len() >= FREE_ATTEMPTS)?;
        let left = FORGET_AFTER.checked_sub(entry.last_attempt.elapsed())?;
        u16::try_from(left.as_secs().max(1)).ok()
    }

    /// Records a refused token from this address.
    pub(super) fn record_failure(&self, address: IpAddr, token: &str) {
        let token = self.hasher.hash_one(token);
        let mut attempts = self.attempts.lock().unwrap_or_else(PoisonError::into_inner);
        if attempts.len() >= MAX_ADDRESSES && !attempts.contains_key(&address) {
            let idle = attempts.iter().min_by_key(|(_, seen)| seen.last_attempt);
            if let Some(idle) = idle.map(|(address, _)| *address) {
                attempts.remove(&idle);
            }
        }
        let now = Instant::now();
        let entry = attempts.entry(address).or_insert(FailedAttempts {
            tokens: Vec::new(),
            last_attempt: now,
        });
        if entry.last_attempt.elapsed() >= FORGET_AFTER {
            entry.tokens.clear();
        }
        if !entry.tokens.contains(&token) && entry.tokens.len() < FREE_ATTEMPTS {
            entry.tokens.push(token);
        }
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

    #[test]
    fn the_table_is_bounded() {
        let strangers = JoinRateLimiter::default();
        for address in 0..2_000_u32 {
            strangers.record_failure(IpAddr::from(address.to_be_bytes()), "a");
        }
        assert_eq!(strangers.attempts.lock().unwrap().len(), MAX_ADDRESSES);
    }
}
