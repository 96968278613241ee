//! Keys that verify an issuer's JWTs: a fetcher writes them, the request path reads them.
//!
//! 1. A request uses the cached keys, without waiting, as long as they are not too old.
//! 2. A request that misses a key asks for a fetch of all keys and waits for its end. All requests that wait share one fetch.
//! 3. Fetches begin at least [`PAUSE`] apart. A request that misses a key sooner does not wait.
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

/// Minimum time between the begins of two fetches: tokens with unknown key ids cost an issuer no more than this.
pub const PAUSE: Duration = Duration::from_secs(10);

/// Why there are no keys to go by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyError {
    /// They never came.
    NotYet,
    /// They could not be fetched for this long, which is too long.
    TooOld(Duration),
}

/// Read access to an issuer's keys. A cheap clone; with the last one the writer ends.
#[derive(Clone, Debug)]
pub struct JwksCache(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    table: Arc<KeyTable>,
    _kept: DropGuard,
}

#[derive(Debug)]
struct KeyTable {
    known: ArcSwapOption<CachedKeys>,
    /// None where they do not age: they stand in a file that is watched.
    max_age: Option<Duration>,
    fetching: watch::Sender<FetchState>,
    wanted: Notify,
}

#[derive(Debug)]
struct CachedKeys {
    set: Arc<KeySet>,
    /// When its issuer last said so.
    at: Instant,
}

#[derive(Clone, Copy, Debug, Default)]
struct FetchState {
    began: Option<Instant>,
    runs: bool,
    ended: u64,
}

impl JwksCache {
    /// These, for good: they were read from a file.
    pub fn fixed(set: KeySet) -> Self {
        let (keys, writer) = of(None);
        writer.ended(Some(set));
        keys
    }

    /// Returns keys that are yet to be fetched, and the writer for them. Keys count for `max_age`.
    pub fn fetched(max_age: Duration) -> (Self, JwksWriter) {
        of(Some(max_age))
    }

    /// Returns the keys that count now.
    ///
    /// # Errors
    /// If there are none.
    pub fn now(&self) -> Result<Arc<KeySet>, KeyError> {
        let known = self.0.table.known.load();
        let known = known.as_ref().ok_or(KeyError::NotYet)?;
        let age = known.at.elapsed();
        match self.0.table.max_age {
            Some(most) if age > most => Err(KeyError::TooOld(age)),
            _ => Ok(known.set.clone()),
        }
    }

    /// Whether these are the keys that count now.
    pub fn are(&self, set: &Arc<KeySet>) -> bool {
        self.now().is_ok_and(|now| Arc::ptr_eq(&now, set))
    }

    /// Asks for them anew, and waits for that, but no longer than `bound`, and not at all where it was just done.
    pub async fn anew(&self, bound: Duration) {
        let table = &self.0.table;
        if table.max_age.is_none() {
            return;
        }
        let mut fetching = table.fetching.subscribe();
        let now = *fetching.borrow_and_update();
        if !now.runs {
            table.wanted.notify_one();
            if now.began.is_some_and(|began| began.elapsed() < PAUSE) {
                return;
            }
        }
        // If the fetch takes longer, the request continues without the keys.
        let _ = timeout(bound, fetching.wait_for(|later| later.ended > now.ended)).await;
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
    unread: CancellationToken,
}

impl JwksWriter {
    /// A fetch begins.
    pub fn begins(&self) {
        self.table.fetching.send_modify(|fetching| {
            fetching.began = Some(Instant::now());
            fetching.runs = true;
        });
    }

    /// A fetch has ended, with these keys or with none: then those before go on counting until they are too old.
    /// Whether they are others than before.
    pub fn ended(&self, set: Option<KeySet>) -> bool {
        let mut new = false;
        if let Some(set) = set {
            let before = self.table.known.load();
            let same = before.as_ref().filter(|known| *known.set == set);
            new = same.is_none();
            let set = same.map_or_else(|| Arc::new(set), |known| known.set.clone());
            let at = Instant::now();
            self.table
                .known
                .store(Some(Arc::new(CachedKeys { set, at })));
        }
        self.table.fetching.send_modify(|fetching| {
            fetching.runs = false;
            fetching.ended += 1;
        });
        new
    }

    /// Returns once a request misses a key.
    pub async fn wanted(&self) {
        self.table.wanted.notified().await;
    }

    /// Returns once the last [`JwksCache`] is dropped.
    pub async fn unread(&self) {
        self.unread.cancelled().await;
    }
}

fn of(max_age: Option<Duration>) -> (JwksCache, JwksWriter) {
    let table = Arc::new(KeyTable {
        known: ArcSwapOption::empty(),
        max_age,
        fetching: watch::Sender::default(),
        wanted: Notify::new(),
    });
    let unread = CancellationToken::new();
    let keys = JwksCache(Arc::new(Inner {
        table: table.clone(),
        _kept: unread.clone().drop_guard(),
    }));
    (keys, JwksWriter { table, unread })
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
        let (keys, writer) = JwksCache::fetched(DAY);
        assert_eq!(keys.now().unwrap_err(), KeyError::NotYet);
        assert!(writer.ended(Some(set("one"))));
        let first = keys.now().unwrap();
        tokio::time::advance(DAY).await;
        writer.ended(None);
        assert!(keys.are(&first));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(matches!(keys.now(), Err(KeyError::TooOld(age)) if age > DAY));
        assert!(!keys.are(&first));
        assert!(!writer.ended(Some(set("one"))), "the same as before");
        assert!(keys.are(&first), "tokens that they verified stay valid");
        assert!(writer.ended(Some(set("two"))));
        assert!(!keys.are(&first));
    }

    #[tokio::test(start_paused = true)]
    async fn requests_that_miss_a_key_share_one_fetch() {
        let (keys, writer) = JwksCache::fetched(DAY);
        let fetches = async {
            writer.wanted().await;
            writer.begins();
            tokio::time::sleep(Duration::from_secs(1)).await;
            writer.ended(Some(set("one")));
        };
        let began = Instant::now();
        let missing = futures_util::future::join_all((0..50).map(|_| keys.anew(BOUND)));
        tokio::join!(fetches, missing);
        assert_eq!(began.elapsed(), Duration::from_secs(1));
        keys.anew(BOUND).await;
        assert_eq!(
            began.elapsed(),
            Duration::from_secs(1),
            "the change is announced at once"
        );
        assert!(writer.wanted().now_or_never().is_some(), "and noted");
        assert!(writer.wanted().now_or_never().is_none(), "once");
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_fetch_delays_requests_only_up_to_the_bound() {
        let (keys, writer) = JwksCache::fetched(DAY);
        writer.begins();
        let began = Instant::now();
        keys.anew(BOUND).await;
        assert_eq!(began.elapsed(), BOUND);
        JwksCache::fixed(set("one")).anew(BOUND).await;
        assert_eq!(began.elapsed(), BOUND, "a file is not fetched");
    }

    #[tokio::test]
    async fn a_writer_without_readers_learns_of_it() {
        let (keys, writer) = JwksCache::fetched(DAY);
        let weak = keys.downgrade();
        let second = weak.upgrade().unwrap();
        drop(keys);
        assert!(writer.unread().now_or_never().is_none());
        drop(second);
        writer.unread().await;
        assert!(weak.upgrade().is_none());
    }
}
