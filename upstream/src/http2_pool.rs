//! Pool of HTTP/2 connections that streams share.
//!
//! A connection takes as many streams as its upstream allows at once. A further stream uses the next connection, or dials a
//! new one, so long-lived streams (a watch, a subscription) do not block other streams. Only one stream dials at a time and
//! the others wait for it, since most of them will find a place on the new connection. A waiting stream has a time limit of
//! its own. It is not passed to h2, which would queue it invisibly.

use crate::http2_observer::MaxConcurrentStreams;
use std::{
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};

/// Maximum number of connections to one upstream. Servers allow 100 streams or more on each.
pub const MAX_CONNECTIONS: usize = 64;

/// Connection that streams share.
pub trait MultiplexedConnection: Clone {
    /// Whether a further stream can be opened at once, if `open_streams` are open and `max_streams` are allowed.
    fn has_capacity(&self, open_streams: usize, max_streams: usize) -> bool;
}

/// Connections to one upstream.
#[derive(Debug)]
pub struct Http2Pool<C> {
    state: Mutex<Http2PoolState<C>>,
    /// Lock that the dialling stream holds.
    dial_lock: tokio::sync::Mutex<()>,
    /// Notified when a stream has ended, or a connection was added.
    slot_freed: Arc<Notify>,
}

#[derive(Debug)]
struct Http2PoolState<C> {
    /// Whether the upstream chose HTTP/1.1 last time.
    is_http1: bool,
    /// Connections. The first one with a free place gets the next stream, so the last ones become idle.
    connections: Vec<Http2PoolEntry<C>>,
    /// Number of the connection that was dialled last. The numbers begin with 1.
    newest_id: u64,
}

#[derive(Debug)]
struct Http2PoolEntry<C> {
    id: u64,
    connection: C,
    max_streams: MaxConcurrentStreams,
    open_streams: Arc<AtomicUsize>,
    last_used: Instant,
}

/// Place for one stream on a connection, until the stream has ended in both directions.
#[derive(Debug)]
pub struct StreamPermit {
    open_streams: Arc<AtomicUsize>,
    slot_freed: Arc<Notify>,
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        self.open_streams.fetch_sub(1, Relaxed);
        self.slot_freed.notify_one();
    }
}

/// Place for a new stream on a connection.
#[derive(Debug)]
pub struct StreamSlot<C> {
    /// Connection on which to open the stream.
    pub connection: C,
    /// Permit for the stream.
    pub permit: StreamPermit,
    /// Number of the newest connection at the time of the checkout. A failed request is repeated on a connection with a
    /// higher number: a peer that closed one of the existing connections may have closed all of them.
    pub newest_id: u64,
}

/// Result of a pool checkout: a stream slot, HTTP/1.1, or the right to dial.
#[derive(Debug)]
pub enum Checkout<'a, C> {
    /// A connection has a free place.
    Open(StreamSlot<C>),
    /// The upstream chose HTTP/1.1 last time. Streams then dial in parallel.
    Http1,
    /// The calling stream must dial, and holds this lock meanwhile.
    Dial(tokio::sync::MutexGuard<'a, ()>),
}

impl<C> Default for Http2Pool<C> {
    fn default() -> Self {
        Self {
            state: Mutex::new(Http2PoolState {
                is_http1: false,
                connections: Vec::new(),
                newest_id: 0,
            }),
            dial_lock: tokio::sync::Mutex::default(),
            slot_freed: Arc::default(),
        }
    }
}

impl<C: MultiplexedConnection> Http2Pool<C> {
    /// Waits, without a time limit, for a place on a connection with a number above `after`, or for the right to dial.
    /// Removes connections that are not `alive`.
    pub async fn checkout(&self, after: u64, alive: impl Fn(&C) -> bool) -> Checkout<'_, C> {
        loop {
            let mut slot_freed = pin!(self.slot_freed.notified());
            if let Some(checkout) = self.try_checkout(after, &alive) {
                return checkout;
            }
            tokio::select! {
                biased;
                () = &mut slot_freed => continue,
                guard = self.dial_lock.lock() => {
                    // The connection that was opened meanwhile may have capacity.
                    if let Some(found) = self.try_checkout(after, &alive) {
                        return found;
                    }
                    if !self.is_full() {
                        return Checkout::Dial(guard);
                    }
                }
            }
            slot_freed.await;
        }
    }

    /// Waits for [`Http2Pool::checkout`] until `deadline`.
    ///
    /// # Errors
    /// The reason, as the end of a sentence whose subject is the upstream.
    pub async fn checkout_until(
        &self,
        deadline: Instant,
        after: u64,
        alive: impl Fn(&C) -> bool,
    ) -> Result<Checkout<'_, C>, &'static str> {
        let checkout = timeout_at(deadline, self.checkout(after, alive)).await;
        checkout.map_err(|_| {
            if self.is_full() {
                "has reached its own limit of streams, and none ended in time"
            } else {
                "did not accept the connection in time"
            }
        })
    }

    fn try_checkout(&self, after: u64, alive: impl Fn(&C) -> bool) -> Option<Checkout<'static, C>> {
        let mut state = self.lock();
        state.connections.retain(|entry| alive(&entry.connection));
        let newest_id = state.newest_id;
        let mut newer = state
            .connections
            .iter_mut()
            .filter(|entry| entry.id > after);
        if let Some(entry) = newer.find(|line| line.has_capacity()) {
            return Some(Checkout::Open(entry.open(newest_id, &self.slot_freed)));
        }
        state.is_http1.then_some(Checkout::Http1)
    }

    /// Returns the number for a connection that is about to be added.
    pub fn allocate_id(&self) -> u64 {
        let mut state = self.lock();
        state.newest_id += 1;
        state.newest_id
    }

    /// Adds the connection with this number, and opens the first stream on it.
    pub fn insert(
        &self,
        id: u64,
        connection: C,
        max_streams: MaxConcurrentStreams,
    ) -> StreamSlot<C> {
        let mut entry = Http2PoolEntry {
            id,
            connection,
            max_streams,
            open_streams: Arc::default(),
            last_used: Instant::now(),
        };
        let mut state = self.lock();
        state.is_http1 = false;
        let stream = entry.open(id, &self.slot_freed);
        state.connections.push(entry);
        drop(state);
        self.slot_freed.notify_waiters();
        stream
    }

    /// Records that the upstream has chosen HTTP/1.1.
    pub fn set_http1(&self) {
        self.lock().is_http1 = true;
    }

    /// Removes a connection, so that it gets no further streams.
    pub fn remove(&self, id: u64) {
        self.lock().connections.retain(|line| line.id != id);
    }

    /// Removes connections that are not `alive`, and those that no stream has used for `idle_timeout`, except the first.
    /// Returns `false` if the pool then holds no information.
    pub fn sweep(&self, idle_timeout: Duration, alive: impl Fn(&C) -> bool) -> bool {
        let mut state = self.lock();
        state.connections.retain(|entry| alive(&entry.connection));
        let mut is_first = true;
        state.connections.retain(|line| {
            let is_needed =
                line.open_streams.load(Relaxed) > 0 || line.last_used.elapsed() < idle_timeout;
            std::mem::take(&mut is_first) || is_needed
        });
        state.is_http1 || !state.connections.is_empty()
    }

    /// Whether no further connection may be dialled.
    fn is_full(&self) -> bool {
        self.lock().connections.len() >= MAX_CONNECTIONS
    }

    /// Whether there is no connection.
    pub fn is_empty(&self) -> bool {
        self.lock().connections.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, Http2PoolState<C>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C: MultiplexedConnection> Http2PoolEntry<C> {
    fn has_capacity(&self) -> bool {
        let max_streams = self.max_streams.borrow().unwrap_or_default();
        let max_streams = usize::try_from(max_streams).unwrap_or(usize::MAX);
        self.connection
            .has_capacity(self.open_streams.load(Relaxed), max_streams)
    }

    fn open(&mut self, newest_id: u64, slot_freed: &Arc<Notify>) -> StreamSlot<C> {
        self.open_streams.fetch_add(1, Relaxed);
        self.last_used = Instant::now();
        StreamSlot {
            connection: self.connection.clone(),
            permit: StreamPermit {
                open_streams: self.open_streams.clone(),
                slot_freed: slot_freed.clone(),
            },
            newest_id,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use tokio::sync::watch;

    /// A connection that consists of a name only.
    #[derive(Clone, Debug, PartialEq)]
    struct Named(&'static str);

    impl MultiplexedConnection for Named {
        fn has_capacity(&self, taken: usize, allowed: usize) -> bool {
            taken < allowed
        }
    }

    fn allows(streams: u32) -> (watch::Sender<Option<u32>>, MaxConcurrentStreams) {
        watch::channel(Some(streams))
    }

    fn all(_: &Named) -> bool {
        true
    }

    /// Returns the checkout that is available without waiting.
    fn now(places: &Http2Pool<Named>, after: u64) -> Option<Checkout<'_, Named>> {
        places.checkout(after, all).now_or_never()
    }

    fn opened(places: &Http2Pool<Named>, after: u64) -> StreamSlot<Named> {
        match now(places, after) {
            Some(Checkout::Open(stream)) => stream,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn one_request_dials_and_others_wait_for_its_connection() {
        let places = Http2Pool::default();
        let Some(Checkout::Dial(turn)) = now(&places, 0) else {
            panic!("no dial is made");
        };
        assert!(now(&places, 0).is_none(), "two dial at a time");
        let mut waits = pin!(places.checkout(0, all));
        assert!((&mut waits).now_or_never().is_none());
        let (_says, allowed) = allows(2);
        let first = places.insert(places.allocate_id(), Named("a"), allowed);
        drop(turn);
        let Checkout::Open(second) = waits.await else {
            panic!("who waited dials as well");
        };
        assert_eq!((second.newest_id, second.connection), (1, Named("a")));
        // The upstream accepts no more streams, so a third connection is opened.
        assert!(matches!(now(&places, 0), Some(Checkout::Dial(_))));
        drop(first);
        opened(&places, 0);
        // A request that failed on it is retried on a newer connection.
        assert!(matches!(now(&places, 1), Some(Checkout::Dial(_))));
    }

    #[tokio::test]
    async fn an_ended_stream_and_more_connections_than_may_be() {
        let places = Http2Pool::default();
        let (_says, allowed) = allows(1);
        let mut streams: Vec<_> = (0..MAX_CONNECTIONS)
            .map(|_| places.insert(places.allocate_id(), Named("a"), allowed.clone()))
            .collect();
        let mut waits = pin!(places.checkout(0, all));
        assert!(
            (&mut waits).now_or_never().is_none(),
            "a further one is dialled"
        );
        streams.pop();
        let Checkout::Open(stream) = waits.await else {
            panic!("one more is dialled than may be");
        };
        assert_eq!(stream.newest_id, 64);
    }

    #[tokio::test]
    async fn an_http1_upstream_delays_no_request_until_it_chooses_http2() {
        let places = Http2Pool::default();
        let Some(Checkout::Dial(_turn)) = now(&places, 0) else {
            panic!("no dial is made");
        };
        places.set_http1();
        assert!(matches!(now(&places, 0), Some(Checkout::Http1)));
        let (_says, allowed) = allows(1);
        drop(places.insert(places.allocate_id(), Named("a"), allowed));
        opened(&places, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn dead_removed_or_idle_closing_connections_are_not_handed_out() {
        let places = Http2Pool::default();
        let bound = Duration::from_mins(1);
        let (says, allowed) = allows(10);
        assert!(!places.sweep(bound, all), "nothing is known");
        let kept = places.insert(places.allocate_id(), Named("a"), allowed.clone());
        drop(places.insert(places.allocate_id(), Named("b"), allowed.clone()));
        let used = places.insert(places.allocate_id(), Named("c"), allowed);
        drop(kept);
        tokio::time::advance(bound).await;
        // The first connection and those in use stay.
        assert!(places.sweep(bound, all));
        assert_eq!(opened(&places, 1).connection, Named("c"));
        let alive = |connection: &Named| *connection != Named("a");
        assert!(places.sweep(bound, alive));
        assert_eq!(opened(&places, 0).connection, Named("c"));
        says.send_replace(Some(0));
        assert!(
            matches!(now(&places, 0), Some(Checkout::Dial(_))),
            "the app accepts no stream"
        );
        says.send_replace(Some(10));
        places.remove(3);
        drop(used);
        assert!(places.is_empty() && !places.sweep(bound, all));
    }
}
