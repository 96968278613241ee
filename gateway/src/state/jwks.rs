//! Keys that verify an issuer's JWTs. A fetcher writes them, and the request path reads them.
//!
//! 1. A request uses the cached keys, without waiting, as long as they are not too old.
//! 2. A request that misses a key requests a fetch of all keys and waits for its end. All requests that wait share one fetch.
//! 3. Two fetches begin at least [`MIN_FETCH_INTERVAL`] apart. A request that misses a key sooner does not wait.
//!
//! This module never fetches. When the last [`JwksCache`] is dropped, the writer is notified and ends.

mod key_set;

pub use key_set::{KeyLookup, KeySet};

use arc_swap::ArcSwapOption;
use std::{
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, timeout},
};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Minimum time between the begins of two fetches. It limits the load that tokens with unknown key ids cause at an issuer.
pub const MIN_FETCH_INTERVAL: Duration = Duration::from_secs(10);

/// Reason why there are no valid keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyError {
    /// The keys were never fetched.
    NotFetched,
    /// The keys could not be fetched for this time, which exceeds their maximum age.
    TooOld(Duration),
}

/// Read access to an issuer's keys. Cheap to clone. The writer ends when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct JwksCache(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    table: Arc<KeyTable>,
    _cancel_on_drop: DropGuard,
}

#[derive(Debug)]
struct KeyTable {
    cached: ArcSwapOption<CachedKeys>,
    /// Maximum age of the keys; `None` for keys of a file, which do not age because the file is watched.
    max_age: Option<Duration>,
    fetch_state: watch::Sender<FetchState>,
    fetch_requested: Notify,
}

#[derive(Debug)]
struct CachedKeys {
    set: Arc<KeySet>,
    /// Time of the last successful fetch.
    fetched_at: Instant,
}

#[derive(Clone, Copy, Debug, Default)]
struct FetchState {
    started_at: Option<Instant>,
    is_running: bool,
    completed: u64,
}

impl JwksCache {
    /// Returns a cache of keys that were read from a file and never expire.
    pub fn fixed(set: KeySet) -> Self {
        let (keys, writer) = new_cache(None);
        writer.fetch_finished(Some(set));
        keys
    }

    /// Returns a cache without keys, and the writer for it. Keys are valid for `max_age` after each fetch.
    pub fn refreshable(max_age: Duration) -> (Self, JwksWriter) {
        new_cache(Some(max_age))
    }

    /// Returns the keys that are valid now.
    ///
    /// # Errors
    /// If there are no valid keys.
    pub fn current(&self) -> Result<Arc<KeySet>, KeyError> {
        let known = self.0.table.cached.load();
        let known = known.as_ref().ok_or(KeyError::NotFetched)?;
        let age = known.fetched_at.elapsed();
        match self.0.table.max_age {
            Some(most) if age > most => Err(KeyError::TooOld(age)),
            _ => Ok(known.set.clone()),
        }
    }

    /// Whether `set` is the set that is valid now.
    pub fn is_current(&self, set: &Arc<KeySet>) -> bool {
        self.current().is_ok_and(|now| Arc::ptr_eq(&now, set))
    }

    /// Requests a fetch, and waits for its end for at most `wait_limit`. Does not wait if a fetch began less than
    /// [`MIN_FETCH_INTERVAL`] ago.
    pub async fn request_fetch(&self, wait_limit: Duration) {
        let table = &self.0.table;
        if table.max_age.is_none() {
            return;
        }
        let mut fetching = table.fetch_state.subscribe();
        let before_fetch = *fetching.borrow_and_update();
        if !before_fetch.is_running {
            table.fetch_requested.notify_one();
            if before_fetch
                .started_at
                .is_some_and(|began| began.elapsed() < MIN_FETCH_INTERVAL)
            {
                return;
            }
        }
        // If the fetch takes longer, the request continues without the keys.
        let _ = timeout(
            wait_limit,
            fetching.wait_for(|later| later.completed > before_fetch.completed),
        )
        .await;
    }

    /// Returns a weak handle, which shares the keys as long as a [`JwksCache`] exists.
    pub fn downgrade(&self) -> WeakJwksCache {
        WeakJwksCache(Arc::downgrade(&self.0))
    }
}

/// Weak handle to an issuer's keys.
#[derive(Clone, Debug)]
pub struct WeakJwksCache(Weak<Inner>);

impl WeakJwksCache {
    /// Returns the keys, if a [`JwksCache`] still exists.
    pub fn upgrade(&self) -> Option<JwksCache> {
        self.0.upgrade().map(JwksCache)
    }
}

/// Write access to an issuer's keys, for the fetcher.
#[derive(Debug)]
pub struct JwksWriter {
    table: Arc<KeyTable>,
    unread_token: CancellationToken,
}

impl JwksWriter {
    /// Records that a fetch begins.
    pub fn fetch_started(&self) {
        self.table.fetch_state.send_modify(|fetching| {
            fetching.started_at = Some(Instant::now());
            fetching.is_running = true;
        });
    }

    /// Records that a fetch has ended, with new keys or without. Without new keys, the previous ones stay valid until they are
    /// too old. Returns whether the keys have changed.
    pub fn fetch_finished(&self, set: Option<KeySet>) -> bool {
        let mut new = false;
        if let Some(set) = set {
            let before = self.table.cached.load();
            let same = before.as_ref().filter(|known| *known.set == set);
            new = same.is_none();
            let set = same.map_or_else(|| Arc::new(set), |known| known.set.clone());
            let at = Instant::now();
            self.table.cached.store(Some(Arc::new(CachedKeys {
                set,
                fetched_at: at,
            })));
        }
        self.table.fetch_state.send_modify(|fetching| {
            fetching.is_running = false;
            fetching.completed += 1;
        });
        new
    }

    /// Waits until a request misses a key.
    pub async fn fetch_requested(&self) {
        self.table.fetch_requested.notified().await;
    }

    /// Waits until the last [`JwksCache`] is dropped.
    pub async fn all_readers_dropped(&self) {
        self.unread_token.cancelled().await;
    }
}

fn new_cache(max_age: Option<Duration>) -> (JwksCache, JwksWriter) {
    let table = Arc::new(KeyTable {
        cached: ArcSwapOption::empty(),
        max_age,
        fetch_state: watch::Sender::default(),
        fetch_requested: Notify::new(),
    });
    let unread = CancellationToken::new();
    let keys = JwksCache(Arc::new(Inner {
        table: table.clone(),
        _cancel_on_drop: unread.clone().drop_guard(),
    }));
    (
        keys,
        JwksWriter {
            table,
            unread_token: unread,
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    const DAY: Duration = Duration::from_hours(24);
    const BOUND: Duration = Duration::from_secs(3);

    fn set(id: &str) -> KeySet {
        KeySet::parse(key_set::tests::ed25519(id).as_bytes()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn keys_that_cannot_be_refetched_stay_valid_up_to_a_maximum_age() {
        let (keys, writer) = JwksCache::refreshable(DAY);
        assert_eq!(keys.current().unwrap_err(), KeyError::NotFetched);
        assert!(writer.fetch_finished(Some(set("one"))));
        let first = keys.current().unwrap();
        tokio::time::advance(DAY).await;
        writer.fetch_finished(None);
        assert!(keys.is_current(&first));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(matches!(keys.current(), Err(KeyError::TooOld(age)) if age > DAY));
        assert!(!keys.is_current(&first));
        assert!(
            !writer.fetch_finished(Some(set("one"))),
            "the same as before"
        );
        assert!(
            keys.is_current(&first),
            "tokens that they verified stay valid"
        );
        assert!(writer.fetch_finished(Some(set("two"))));
        assert!(!keys.is_current(&first));
    }

    #[tokio::test(start_paused = true)]
    async fn requests_that_miss_a_key_share_one_fetch() {
        let (keys, writer) = JwksCache::refreshable(DAY);
        let fetches = async {
            writer.fetch_requested().await;
            writer.fetch_started();
            tokio::time::sleep(Duration::from_secs(1)).await;
            writer.fetch_finished(Some(set("one")));
        };
        let began = Instant::now();
        let missing = futures_util::future::join_all((0..50).map(|_| keys.request_fetch(BOUND)));
        tokio::join!(fetches, missing);
        assert_eq!(began.elapsed(), Duration::from_secs(1));
        keys.request_fetch(BOUND).await;
        assert_eq!(
            began.elapsed(),
            Duration::from_secs(1),
            "the change is announced at once"
        );
        assert!(
            writer.fetch_requested().now_or_never().is_some(),
            "and noted"
        );
        assert!(writer.fetch_requested().now_or_never().is_none(), "once");
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_fetch_delays_requests_only_up_to_the_bound() {
        let (keys, writer) = JwksCache::refreshable(DAY);
        writer.fetch_started();
        let began = Instant::now();
        keys.request_fetch(BOUND).await;
        assert_eq!(began.elapsed(), BOUND);
        JwksCache::fixed(set("one")).request_fetch(BOUND).await;
        assert_eq!(began.elapsed(), BOUND, "a file is not fetched");
    }

    #[tokio::test]
    async fn a_writer_without_readers_learns_of_it() {
        let (keys, writer) = JwksCache::refreshable(DAY);
        let weak = keys.downgrade();
        let second = weak.upgrade().unwrap();
        drop(keys);
        assert!(writer.all_readers_dropped().now_or_never().is_none());
        drop(second);
        writer.all_readers_dropped().await;
        assert!(weak.upgrade().is_none());
    }
}
