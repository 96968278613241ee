//! Cache of encoded responses, shared by all clients that send the same request: bounded in bytes. An evicted response must be
//! encoded again.

use bytes::Bytes;
use moka::sync::Cache;

/// Cost of an entry beyond its response, in bytes.
const ENTRY_OVERHEAD: usize = 160;

/// Encoded responses by request. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct ResponseCache(Cache<Box<str>, Bytes>);

impl ResponseCache {
    /// Returns a cache with room for this many bytes.
    pub(crate) fn new(max_bytes: u64) -> Self {
        let cache = Cache::builder()
            .max_capacity(max_bytes)
            .weigher(weight)
            .build();
        Self(cache)
    }

    pub(crate) fn get(&self, key: &str) -> Option<Bytes> {
        self.0.get(key)
    }

    pub(crate) fn put(&self, key: &str, bytes: &Bytes) {
        self.0.insert(key.into(), bytes.clone());
    }

    /// Returns the size of the cached responses, in bytes.
    #[cfg(test)]
    pub(crate) fn cached_bytes(&self) -> u64 {
        self.0.run_pending_tasks();
        self.0.weighted_size()
    }
}

/// Returns the cost of an entry, in bytes.
#[expect(clippy::borrowed_box, reason = "the signature of moka's weigher")]
fn weight(key: &Box<str>, bytes: &Bytes) -> u32 {
    u32::try_from(key.len() + bytes.len() + ENTRY_OVERHEAD).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_response_cache_stays_within_its_size() {
        let cache = ResponseCache::new(100_000);
        let bytes = Bytes::from(vec![0; 1000]);
        for number in 0..1000 {
            cache.put(&format!("{number}"), &bytes);
            assert!(cache.cached_bytes() <= 100_000);
        }
        assert!((0..1000).any(|number| cache.get(&format!("{number}")).is_some()));
        assert!(cache.get("1001").is_none());
    }
}
