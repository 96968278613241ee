//! Answers that are kept for a while, and asked for once by all who wait.
//!
//! `moka` does it. It is generic, and each type that it is used with is 150 KB of the binary; so it is used with one, here, and
//! what is kept is whatever each user puts in.

use futures_util::{FutureExt, future::BoxFuture};
use moka::{Expiry, future::Cache};
use std::{
    any::Any,
    fmt,
    marker::PhantomData,
    sync::Arc,
    time::{Duration, Instant},
};

type Held = Arc<dyn Any + Send + Sync>;
type Key = Box<[u8]>;

/// An answer, and how it is kept.
#[derive(Clone, Debug)]
pub struct Answer<T> {
    /// The answer.
    pub held: Arc<T>,
    /// What it takes of the room that there is.
    pub weight: u32,
    /// How long it is kept; without it, for as long as there is room.
    pub life: Option<Duration>,
}

#[derive(Clone)]
struct Entry {
    held: Held,
    weight: u32,
    life: Option<Duration>,
}

/// Answers of one type. A cheap clone.
pub struct Kept<T> {
    cache: Cache<Key, Entry>,
    holds: PhantomData<fn() -> T>,
}

impl<T> Clone for Kept<T> {
    fn clone(&self) -> Self {
        Self {
            cache: self.cache.clone(),
            holds: PhantomData,
        }
    }
}

impl<T> fmt::Debug for Kept<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let weight = self.cache.weighted_size();
        f.debug_struct("Kept")
            .field("weight", &weight)
            .finish_non_exhaustive()
    }
}

impl<T: Send + Sync + 'static> Kept<T> {
    /// With room for answers of this weight in all.
    pub fn new(most: u64) -> Self {
        Self {
            cache: cache(most),
            holds: PhantomData,
        }
    }

    /// The answer to this, if it is kept.
    pub async fn get(&self, key: &[u8]) -> Option<Arc<T>> {
        let entry = get(&self.cache, key).await?;
        entry.held.downcast().ok()
    }

    /// The same for who cannot wait; nothing as well where somebody else keeps the cache busy.
    pub fn look(&self, key: &[u8]) -> Option<Arc<T>> {
        let entry = get(&self.cache, key).now_or_never().flatten()?;
        entry.held.downcast().ok()
    }

    /// Keeps an answer. Where somebody else keeps the cache busy it may come a little later.
    pub fn keep(&self, key: &[u8], answer: Answer<T>) {
        let _later = insert(&self.cache, key.into(), answer.into()).now_or_never();
    }

    /// The answer that is kept, or that `ask` brings, which is asked once for all who wait. Who asks goes on asking for the
    /// others if it leaves; nobody else has to ask again.
    pub async fn get_with(&self, key: &[u8], ask: BoxFuture<'_, Answer<T>>) -> Option<Arc<T>> {
        let ask = ask.map(Entry::from).boxed();
        let entry = get_with(&self.cache, key.into(), ask).await;
        entry.held.downcast().ok()
    }

    /// What all that is kept weighs now.
    pub async fn weight(&self) -> u64 {
        settle(&self.cache).await;
        self.cache.weighted_size()
    }
}

impl<T: Send + Sync + 'static> From<Answer<T>> for Entry {
    fn from(answer: Answer<T>) -> Self {
        Self {
            held: answer.held,
            weight: answer.weight,
            life: answer.life,
        }
    }
}

// What is below is compiled once, since it knows no type of any user.

struct Life;

impl Expiry<Key, Entry> for Life {
    fn expire_after_create(&self, _: &Key, entry: &Entry, _: Instant) -> Option<Duration> {
        entry.life
    }

    fn expire_after_update(
        &self,
        _: &Key,
        entry: &Entry,
        _: Instant,
        _: Option<Duration>,
    ) -> Option<Duration> {
        entry.life
    }
}

#[inline(never)]
fn cache(most: u64) -> Cache<Key, Entry> {
    Cache::builder()
        .max_capacity(most)
        .weigher(|_, entry: &Entry| entry.weight)
        .expire_after(Life)
        .build()
}

#[inline(never)]
fn get<'a>(cache: &'a Cache<Key, Entry>, key: &'a [u8]) -> BoxFuture<'a, Option<Entry>> {
    Box::pin(cache.get(key))
}

#[inline(never)]
fn insert(cache: &Cache<Key, Entry>, key: Key, entry: Entry) -> BoxFuture<'_, ()> {
    Box::pin(cache.insert(key, entry))
}

#[inline(never)]
fn get_with<'a>(
    cache: &'a Cache<Key, Entry>,
    key: Key,
    ask: BoxFuture<'a, Entry>,
) -> BoxFuture<'a, Entry> {
    Box::pin(cache.get_with(key, ask))
}

#[inline(never)]
fn settle(cache: &Cache<Key, Entry>) -> BoxFuture<'_, ()> {
    Box::pin(cache.run_pending_tasks())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    fn answer(held: u32, life: Option<Duration>) -> Answer<u32> {
        Answer {
            held: Arc::new(held),
            weight: 100,
            life,
        }
    }

    #[tokio::test]
    async fn it_is_asked_once_for_all_who_wait_and_kept_for_its_life() {
        let kept = Kept::new(1000);
        let asked = AtomicUsize::new(0);
        let ask = || {
            async {
                let number = asked.fetch_add(1, Relaxed);
                tokio::time::sleep(Duration::from_millis(20)).await;
                answer(
                    u32::try_from(number).unwrap(),
                    Some(Duration::from_millis(200)),
                )
            }
            .boxed()
        };
        let all = (0..20).map(|_| kept.get_with(b"a", ask()));
        for held in futures_util::future::join_all(all).await {
            assert_eq!(held.as_deref(), Some(&0));
        }
        assert_eq!(kept.get(b"a").await.as_deref(), Some(&0));
        assert_eq!(kept.look(b"b"), None);
        let over = async {
            while kept.get(b"a").await.is_some() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), over)
            .await
            .unwrap();
        assert_eq!(kept.get_with(b"a", ask()).await.as_deref(), Some(&1));
    }

    #[tokio::test]
    async fn no_more_is_kept_than_there_is_room_for() {
        let kept = Kept::new(1000);
        for number in 0..100_u32 {
            kept.keep(&number.to_le_bytes(), answer(number, None));
            assert!(kept.weight().await <= 1000);
        }
        assert!((0..100_u32).any(|number| kept.look(&number.to_le_bytes()).is_some()));
    }
}
