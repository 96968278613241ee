//! Bounded cache with a time to live for each entry and single-flight fetches, over `moka`.

use moka::{Expiry, future};
use std::{
    fmt,
    hash::Hash,
    time::{Duration, Instant},
};

/// A value with its time to live.
#[derive(Clone, Debug)]
pub struct CachedValue<V> {
    /// The value.
    pub value: V,
    /// Time after which the cache drops the value. With zero, only the tasks that already wait for the fetch receive it.
    pub ttl: Duration,
}

/// Cache with a bounded number of entries. Clones share the entries.
pub struct Cache<K, V> {
    inner: future::Cache<K, CachedValue<V>>,
}

impl<K, V> Clone for Cache<K, V> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
        }
    }
}

impl<K, V> fmt::Debug for Cache<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache").finish_non_exhaustive()
    }
}

impl<K, V> Cache<K, V>
where
    K: Hash + Eq + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    /// Creates a cache of at most `max_entries` entries.
    pub fn new(max_entries: u64) -> Self {
        let inner = future::Cache::builder()
            .max_capacity(max_entries)
            .expire_after(EntryTtl)
            .build();
        Self { inner }
    }

    /// Returns the cached value.
    pub async fn get(&self, key: &K) -> Option<V> {
        Some(self.inner.get(key).await?.value)
    }

    /// Returns the cached value, or the value that `fetch` produces.
    ///
    /// Concurrent calls with the same key share one fetch. If the call whose fetch runs is dropped, a waiting call runs its
    /// own.
    pub async fn get_or_fetch(&self, key: K, fetch: impl Future<Output = CachedValue<V>>) -> V {
        self.inner.get_with(key, fetch).await.value
    }
}

/// Expiry of each entry by the time to live of its value.
struct EntryTtl;

impl<K, V> Expiry<K, CachedValue<V>> for EntryTtl {
    fn expire_after_create(&self, _: &K, entry: &CachedValue<V>, _: Instant) -> Option<Duration> {
        Some(entry.ttl)
    }

    fn expire_after_update(
        &self,
        _: &K,
        entry: &CachedValue<V>,
        _: Instant,
        _: Option<Duration>,
    ) -> Option<Duration> {
        Some(entry.ttl)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::future::join_all;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    const LONG: Duration = Duration::from_hours(1);

    #[tokio::test]
    async fn concurrent_clients_share_one_fetch_and_its_value_is_cached() {
        let cache = Cache::new(10);
        let fetches = AtomicUsize::new(0);
        let fetch = async || {
            let value = fetches.fetch_add(1, Relaxed);
            // All clients wait before the fetch ends.
            tokio::task::yield_now().await;
            CachedValue { value, ttl: LONG }
        };
        let all = (0..20).map(|_| cache.get_or_fetch("a", fetch()));
        assert_eq!(join_all(all).await, [0; 20]);
        assert_eq!(cache.get(&"a").await, Some(0));
        assert_eq!(cache.get(&"b").await, None);
        assert_eq!(cache.get_or_fetch("a", fetch()).await, 0);
    }

    #[tokio::test]
    async fn value_is_fetched_again_after_its_time_to_live() {
        let cache = Cache::new(10);
        for (value, ttl) in [(1, Duration::ZERO), (2, LONG), (3, LONG)] {
            let fetched = cache
                .get_or_fetch("a", async { CachedValue { value, ttl } })
                .await;
            assert_eq!(fetched, value.min(2));
        }
    }

    #[tokio::test]
    async fn cache_holds_no_more_entries_than_its_bound() {
        let cache = Cache::new(10);
        for number in 0..1000_u32 {
            let value = CachedValue {
                value: number,
                ttl: LONG,
            };
            cache.get_or_fetch(number, async { value }).await;
        }
        cache.inner.run_pending_tasks().await;
        assert!(cache.inner.entry_count() <= 10);
    }
}
