//! Quotas: limits of each client's share in a limited resource.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, PoisonError},
};

/// Number of guards that each key has. Cheap to clone.
#[derive(Clone)]
pub(super) struct Quota<K>(Arc<Mutex<HashMap<K, usize>>>);

/// One unit of a key's quota, which is returned when this is dropped.
pub(super) struct QuotaGuard<K: Eq + Hash> {
    quota: Quota<K>,
    key: K,
}

impl<K: Eq + Hash + Clone> Quota<K> {
    pub(super) fn new() -> Self {
        Self(Arc::default())
    }

    /// Takes one unit for this key, or returns `None` if the key has reached `limit`.
    pub(super) fn acquire(&self, key: K, limit: usize) -> Option<QuotaGuard<K>> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.get(&key).is_some_and(|count| *count >= limit) {
            return None;
        }
        *counts.entry(key.clone()).or_default() += 1;
        let quota = self.clone();
        Some(QuotaGuard { quota, key })
    }
}

impl<K: Eq + Hash> Drop for QuotaGuard<K> {
    fn drop(&mut self) {
        let mut counts = self.quota.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_client_has_its_share_and_returns_it() {
        let shares = Quota::new();
        let mut first: Vec<_> = (0..3).filter_map(|_| shares.acquire("first", 2)).collect();
        assert_eq!(first.len(), 2);
        assert!(shares.acquire("second", 2).is_some());
        first.pop();
        assert!(shares.acquire("first", 2).is_some());
        drop(first);
        assert!(shares.0.lock().unwrap().is_empty());
    }
}
