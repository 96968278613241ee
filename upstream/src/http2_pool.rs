//! Pool of HTTP/2 connections that streams share.
//!
//! A connection takes as many streams as its upstream allows at once. One more goes to the next connection, or has a further
//! one dialled: streams that last (a watch, a subscription) do not block other streams. One stream dials at a time and the
//! others wait for it, since most find a place on the connection that it dials. A waiting stream has a bound of its own, and
//! is not passed to h2, which would queue it out of sight.

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

/// Connections to one upstream, at most. Servers allow 100 streams or more on each.
pub const MAX_CONNECTIONS: usize = 64;

/// Connection that streams share.
pub trait MultiplexedConnection: Clone {
    /// Whether a stream more can be opened at once, where `taken` are open and `allowed` may be.
    fn has_place(&self, taken: usize, allowed: usize) -> bool;
}

/// Connections to one upstream.
#[derive(Debug)]
pub struct Http2Pool<C> {
    known: Mutex<Http2PoolState<C>>,
    /// Lock of the stream that dials.
    dialling: tokio::sync::Mutex<()>,
    /// A stream has ended, or there is a connection more.
    freed: Arc<Notify>,
}

#[derive(Debug)]
struct Http2PoolState<C> {
    /// The upstream chose HTTP/1.1 last.
    http1: bool,
    /// The first with a place gets the next stream, so the last ones come to rest.
    lines: Vec<Http2PoolEntry<C>>,
    /// The number of the last that was dialled; they count from 1.
    newest: u64,
}

#[derive(Debug)]
struct Http2PoolEntry<C> {
    number: u64,
    connection: C,
    allowed: MaxConcurrentStreams,
    taken: Arc<AtomicUsize>,
    used: Instant,
}

/// A place for one stream on a connection, until all that is sent or received on it is over.
#[derive(Debug)]
pub struct StreamPermit {
    taken: Arc<AtomicUsize>,
    freed: Arc<Notify>,
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        self.taken.fetch_sub(1, Relaxed);
        self.freed.notify_one();
    }
}

/// A stream that may be opened.
#[derive(Debug)]
pub struct StreamSlot<C> {
    /// Connection on which to open the stream.
    pub connection: C,
    /// Its place there.
    pub place: StreamPermit,
    /// Number of the youngest connection that existed. A failed request is repeated on one with a number above: a peer that
    /// closed one of the existing connections may have closed them all.
    pub newest: u64,
}

/// Result of a pool checkout: a stream slot, HTTP/1.1, or the right to dial.
#[derive(Debug)]
pub enum Checkout<'a, C> {
    /// There is a place.
    Open(StreamSlot<C>),
    /// The upstream chose HTTP/1.1 last time, and streams do not wait for each other's dialling.
    Http1,
    /// This stream's, to dial, for as long as it holds this.
    Dial(tokio::sync::MutexGuard<'a, ()>),
}

impl<C> Default for Http2Pool<C> {
    fn default() -> Self {
        Self {
            known: Mutex::new(Http2PoolState {
                http1: false,
                lines: Vec::new(),
                newest: 0,
            }),
            dialling: tokio::sync::Mutex::default(),
            freed: Arc::default(),
        }
    }
}

impl<C: MultiplexedConnection> Http2Pool<C> {
    /// Waits, without a bound, for a place on a connection with a number above `after`, or for the turn to dial one.
    /// Connections that are not `alive` are forgotten.
    pub async fn turn(&self, after: u64, alive: impl Fn(&C) -> bool) -> Checkout<'_, C> {
        loop {
            let mut freed = pin!(self.freed.notified());
            if let Some(turn) = self.at_once(after, &alive) {
                return turn;
            }
            tokio::select! {
                biased;
                () = &mut freed => continue,
                turn = self.dialling.lock() => {
                    // The connection that was opened meanwhile may have capacity.
                    if let Some(found) = self.at_once(after, &alive) {
                        return found;
                    }
                    if !self.is_full() {
                        return Checkout::Dial(turn);
                    }
                }
            }
            freed.await;
        }
    }

    /// Waits for [`Http2Pool::turn`] until `deadline`.
    ///
    /// # Errors
    /// The reason, as the end of a sentence about the upstream.
    pub async fn turn_until(
        &self,
        deadline: Instant,
        after: u64,
        alive: impl Fn(&C) -> bool,
    ) -> Result<Checkout<'_, C>, &'static str> {
        let turn = timeout_at(deadline, self.turn(after, alive)).await;
        turn.map_err(|_| {
            if self.is_full() {
                "has reached its own limit of streams, and none ended in time"
            } else {
                "did not accept the connection in time"
            }
        })
    }

    fn at_once(&self, after: u64, alive: impl Fn(&C) -> bool) -> Option<Checkout<'static, C>> {
        let mut known = self.known();
        known.lines.retain(|line| alive(&line.connection));
        let newest = known.newest;
        let mut younger = known.lines.iter_mut().filter(|line| line.number > after);
        if let Some(line) = younger.find(|line| line.has_place()) {
            return Some(Checkout::Open(line.open(newest, &self.freed)));
        }
        known.http1.then_some(Checkout::Http1)
    }

    /// The number of a connection that is to be added.
    pub fn next(&self) -> u64 {
        let mut known = self.known();
        known.newest += 1;
        known.newest
    }

    /// Adds the connection of this number, and opens the first stream on it.
    pub fn add(&self, number: u64, connection: C, allowed: MaxConcurrentStreams) -> StreamSlot<C> {
        let mut line = Http2PoolEntry {
            number,
            connection,
            allowed,
            taken: Arc::default(),
            used: Instant::now(),
        };
        let mut known = self.known();
        known.http1 = false;
        let stream = line.open(number, &self.freed);
        known.lines.push(line);
        drop(known);
        self.freed.notify_waiters();
        stream
    }

    /// Records that the upstream has chosen HTTP/1.1.
    pub fn chose_http1(&self) {
        self.known().http1 = true;
    }

    /// Lets no further stream onto this connection.
    pub fn forget(&self, number: u64) {
        self.known().lines.retain(|line| line.number != number);
    }

    /// Forgets connections that are not `alive`, and those that no stream has needed for `bound`, except the first.
    /// False: nothing is known.
    pub fn sweep(&self, bound: Duration, alive: impl Fn(&C) -> bool) -> bool {
        let mut known = self.known();
        known.lines.retain(|line| alive(&line.connection));
        let mut first = true;
        known.lines.retain(|line| {
            let needed = line.taken.load(Relaxed) > 0 || line.used.elapsed() < bound;
            std::mem::take(&mut first) || needed
        });
        known.http1 || !known.lines.is_empty()
    }

    /// Whether no further connection may be dialled.
    fn is_full(&self) -> bool {
        self.known().lines.len() >= MAX_CONNECTIONS
    }

    /// Whether there is no connection.
    pub fn is_empty(&self) -> bool {
        self.known().lines.is_empty()
    }

    fn known(&self) -> MutexGuard<'_, Http2PoolState<C>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C: MultiplexedConnection> Http2PoolEntry<C> {
    fn has_place(&self) -> bool {
        let allowed = self.allowed.borrow().unwrap_or_default();
        let allowed = usize::try_from(allowed).unwrap_or(usize::MAX);
        self.connection.has_place(self.taken.load(Relaxed), allowed)
    }

    fn open(&mut self, newest: u64, freed: &Arc<Notify>) -> StreamSlot<C> {
        self.taken.fetch_add(1, Relaxed);
        self.used = Instant::now();
        StreamSlot {
            connection: self.connection.clone(),
            place: StreamPermit {
                taken: self.taken.clone(),
                freed: freed.clone(),
            },
            newest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use tokio::sync::watch;

    /// A connection that is only a name.
    #[derive(Clone, Debug, PartialEq)]
    struct Named(&'static str);

    impl MultiplexedConnection for Named {
        fn has_place(&self, taken: usize, allowed: usize) -> bool {
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
        places.turn(after, all).now_or_never()
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
        let mut waits = pin!(places.turn(0, all));
        assert!((&mut waits).now_or_never().is_none());
        let (_says, allowed) = allows(2);
        let first = places.add(places.next(), Named("a"), allowed);
        drop(turn);
        let Checkout::Open(second) = waits.await else {
            panic!("who waited dials as well");
        };
        assert_eq!((second.newest, second.connection), (1, Named("a")));
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
            .map(|_| places.add(places.next(), Named("a"), allowed.clone()))
            .collect();
        let mut waits = pin!(places.turn(0, all));
        assert!(
            (&mut waits).now_or_never().is_none(),
            "a further one is dialled"
        );
        streams.pop();
        let Checkout::Open(stream) = waits.await else {
            panic!("one more is dialled than may be");
        };
        assert_eq!(stream.newest, 64);
    }

    #[tokio::test]
    async fn an_http1_upstream_delays_no_request_until_it_chooses_http2() {
        let places = Http2Pool::default();
        let Some(Checkout::Dial(_turn)) = now(&places, 0) else {
            panic!("no dial is made");
        };
        places.chose_http1();
        assert!(matches!(now(&places, 0), Some(Checkout::Http1)));
        let (_says, allowed) = allows(1);
        drop(places.add(places.next(), Named("a"), allowed));
        opened(&places, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn dead_removed_or_idle_closing_connections_are_not_handed_out() {
        let places = Http2Pool::default();
        let bound = Duration::from_mins(1);
        let (says, allowed) = allows(10);
        assert!(!places.sweep(bound, all), "nothing is known");
        let kept = places.add(places.next(), Named("a"), allowed.clone());
        drop(places.add(places.next(), Named("b"), allowed.clone()));
        let used = places.add(places.next(), Named("c"), allowed);
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
        places.forget(3);
        drop(used);
        assert!(places.is_empty() && !places.sweep(bound, all));
    }
}
