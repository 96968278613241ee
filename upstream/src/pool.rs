//! Idle connections to upstreams, and the state of the connections that requests share.
//!
//! Idle HTTP/1.1 connections are in a stack per key, the one used last on top. HTTP/2 connections are shared by streams, and
//! `M` holds them.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Maximum number of idle connections per key. More concurrent clients are unusual on a node.
const MAX_IDLE_PER_KEY: usize = 256;

/// Pooled connections by key. Connections with the same key are interchangeable.
#[derive(Debug)]
pub struct Pool<K, C, M> {
    idle: Mutex<HashMap<K, Vec<C>>>,
    shared: Mutex<HashMap<K, Arc<M>>>,
}

impl<K, C, M> Default for Pool<K, C, M> {
    fn default() -> Self {
        Self {
            idle: Mutex::default(),
            shared: Mutex::default(),
        }
    }
}

impl<K: Clone + Eq + Hash, C, M: Default> Pool<K, C, M> {
    /// Returns the idle connection that was used last, if one is `alive`.
    pub fn checkout(&self, key: &K, mut alive: impl FnMut(&mut C) -> bool) -> Option<C> {
        loop {
            let mut connection = lock(&self.idle).get_mut(key)?.pop()?;
            if alive(&mut connection) {
                return Some(connection);
            }
        }
    }

    /// Stores an idle connection. Returns `false` if the maximum is reached.
    pub fn checkin(&self, key: K, connection: C) -> bool {
        let mut idle = lock(&self.idle);
        let connections = idle.entry(key).or_default();
        let has_room = connections.len() < MAX_IDLE_PER_KEY;
        if has_room {
            connections.push(connection);
        }
        has_room
    }

    /// Removes an idle connection. Returns `false` if there is no such connection.
    pub fn remove(&self, key: &K, matches: impl Fn(&C) -> bool) -> bool {
        let mut idle = lock(&self.idle);
        let Some(connections) = idle.get_mut(key) else {
            return false;
        };
        let at = connections.iter().position(matches);
        let removed = at.map(|at| connections.remove(at));
        if connections.is_empty() {
            idle.remove(key);
        }
        drop(idle);
        removed.is_some()
    }

    /// Returns the connections that requests share.
    pub fn shared(&self, key: &K) -> Arc<M> {
        let mut shared = lock(&self.shared);
        if let Some(found) = shared.get(key) {
            return found.clone();
        }
        shared.entry(key.clone()).or_default().clone()
    }

    /// Removes the shared state of a key, unless it `is_in_use` or a request that is about to dial holds it.
    pub fn forget_shared(&self, key: &K, is_in_use: impl Fn(&M) -> bool) {
        let mut shared = lock(&self.shared);
        let is_unused = |found: &Arc<M>| Arc::strong_count(found) == 1 && !is_in_use(found);
        if shared.get(key).is_some_and(is_unused) {
            shared.remove(key);
        }
    }

    /// Removes idle connections that are not `alive`, and shared state that is not in use.
    pub fn sweep(&self, mut alive: impl FnMut(&mut C) -> bool, is_in_use: impl Fn(&M) -> bool) {
        lock(&self.idle).retain(|_, connections| {
            connections.retain_mut(&mut alive);
            !connections.is_empty()
        });
        // A request that is about to dial holds the shared state, to which it adds the connection later.
        lock(&self.shared).retain(|_, shared| is_in_use(shared) || Arc::strong_count(shared) > 1);
    }

    /// Returns the number of idle connections.
    pub fn idle_count(&self) -> usize {
        lock(&self.idle).values().map(Vec::len).sum()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_used_that_lives_is_taken_and_what_is_full_takes_none() {
        let pool = Pool::<_, usize, ()>::default();
        for each in 0..MAX_IDLE_PER_KEY {
            assert!(pool.checkin("a", each));
        }
        assert!(!pool.checkin("a", MAX_IDLE_PER_KEY) && pool.checkin("b", 0));
        assert_eq!(pool.checkout(&"a", |each| *each < 7), Some(6));
        assert!(pool.remove(&"a", |each| *each == 3) && !pool.remove(&"a", |each| *each == 3));
        assert_eq!(pool.idle_count(), 6);
        pool.sweep(|each| *each > 4, |()| true);
        assert_eq!(pool.checkout(&"a", |_| true), Some(5));
        assert_eq!(pool.checkout(&"b", |_| true), None);
    }

    #[test]
    fn shared_connections_stay_while_something_is_known_or_a_request_holds_them() {
        let pool = Pool::<_, (), u8>::default();
        let held = pool.shared(&"a");
        pool.forget_shared(&"a", |_| false);
        pool.sweep(|()| true, |_| false);
        assert!(Arc::ptr_eq(&held, &pool.shared(&"a")));
        let known = Arc::downgrade(&held);
        drop(held);
        pool.forget_shared(&"a", |_| true);
        assert!(known.upgrade().is_some());
        pool.forget_shared(&"a", |_| false);
        assert!(known.upgrade().is_none());
    }
}
