//! Limits on open connections and streams: connections in total, streams in total, for a client, for a node. No stream is
//! admitted while too many bytes are buffered.
//!
//! The request path uses only atomics: the count of a client is looked up once a connection and travels with the client, the
//! count of a node comes with the selected tunnel. A permit returns what it took when it is dropped, wherever.

use crate::{
    config,
    error::{Error, Reason},
    metrics::Metrics,
};
use causeway_rt::{
    connection_limit::{ConnectionLimit, Slot},
    listener::RemoteAddr,
};
use causeway_tunnel::buffered::MemoryBudget;
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

/// Bodies of requests that are discarded at once: anybody may have one, and has no stream counted for it.
const DISCARDED_BODIES: usize = 1024;

/// Open streams of one client or node.
pub type Counter = Arc<AtomicUsize>;

/// The bounds and what is open.
#[derive(Debug)]
pub struct Limits {
    bounds: config::Limits,
    all: Counter,
    connections: ConnectionLimit,
    discarded_bodies: ConnectionLimit,
    clients: Mutex<HashMap<Arc<str>, Weak<AtomicUsize>>>,
    pressure: Arc<MemoryBudget>,
}

/// The right to one open stream.
#[derive(Debug)]
pub struct Permit {
    _all: CounterGuard,
    _client: CounterGuard,
    _node: CounterGuard,
}

/// One unit of a count.
#[derive(Debug)]
pub struct CounterGuard(Counter);

impl Drop for CounterGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

fn take(count: &Counter, most: usize) -> Option<CounterGuard> {
    let taken = CounterGuard(count.clone());
    (count.fetch_add(1, Relaxed) < most).then_some(taken)
}

impl Limits {
    /// Nothing is open.
    pub fn new(bounds: config::Limits, metrics: &Arc<Metrics>) -> Self {
        Self {
            pressure: Arc::new(MemoryBudget::new(bounds.buffered_bytes)),
            connections: metrics.connection_limit("connections", bounds.connections),
            discarded_bodies: metrics.connection_limit("discarded_bodies", DISCARDED_BODIES),
            bounds,
            all: Counter::default(),
            clients: Mutex::default(),
        }
    }

    /// Returns the count of a client, shared by all its connections.
    pub fn client(&self, name: &Arc<str>) -> Counter {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = clients.get(name).and_then(Weak::upgrade) {
            return count;
        }
        // Entries of disconnected clients are removed when the table would grow.
        if clients.len() == clients.capacity() {
            clients.retain(|_, count| count.strong_count() > 0);
        }
        let count = Counter::default();
        clients.insert(name.clone(), Arc::downgrade(&count));
        count
    }

    /// Returns the memory budget of buffered bytes, to which tunnels and uploads add theirs.
    pub fn pressure(&self) -> &Arc<MemoryBudget> {
        &self.pressure
    }

    /// Returns the number of open client connections.
    pub fn connections(&self) -> usize {
        self.connections.open_connections()
    }

    /// Returns the place of one more connection of a client, if there is one.
    pub fn connection(&self, peer: RemoteAddr) -> Option<Slot> {
        self.connections.admit(peer).ok()
    }

    /// Returns the place of a body of this client that is discarded, the one of an older body if need be.
    pub fn discarded_body(&self, peer: RemoteAddr) -> Option<Slot> {
        self.discarded_bodies.admit(peer).ok()
    }

    /// Room for one more stream.
    ///
    /// # Errors
    /// [`Reason::LimitReached`], naming the limit.
    pub fn admit(&self, client: &Counter, node: &Counter) -> Result<Permit, Error> {
        let full = |whose: &str, most: usize| {
            Reason::LimitReached.error(format!(
                "{whose} has reached its limit of {most} open streams"
            ))
        };
        let bounds = &self.bounds;
        if self.pressure.is_full() {
            return Err(Reason::LimitReached.error(format!(
                "this gateway buffers {} bytes for slow readers and has reached its limit of {} bytes (limits.buffered_bytes)",
                self.pressure.bytes(),
                bounds.buffered_bytes
            )));
        }
        Ok(Permit {
            _all: take(&self.all, bounds.streams)
                .ok_or_else(|| full("this gateway", bounds.streams))?,
            _client: take(client, bounds.per_client)
                .ok_or_else(|| full("this client", bounds.per_client))?,
            _node: take(node, bounds.per_node).ok_or_else(|| full("this node", bounds.per_node))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_applies_alone_and_returns_its_permits() {
        let bounds = config::Limits {
            streams: 3,
            per_client: 2,
            per_node: 2,
            ..config::Limits::default()
        };
        let limits = Limits::new(bounds, &Metrics::new());
        let alice = limits.client(&"alice".into());
        let bob = limits.client(&"bob".into());
        let (near, far) = (Counter::default(), Counter::default());
        let first = limits.admit(&alice, &near).unwrap();
        let _second = limits.admit(&alice, &far).unwrap();
        let word = |error: Error| error.detail.split(' ').nth(1).unwrap().to_owned();
        assert_eq!(word(limits.admit(&alice, &far).unwrap_err()), "client");
        let _third = limits.admit(&bob, &near).unwrap();
        assert_eq!(word(limits.admit(&bob, &far).unwrap_err()), "gateway");
        drop(first);
        assert_eq!(near.load(Relaxed), 1);
        let _fourth = limits.admit(&bob, &near).unwrap();
        assert_eq!(word(limits.admit(&alice, &near).unwrap_err()), "gateway");
        assert_eq!(
            limits.client(&"alice".into()).load(Relaxed),
            1,
            "the same count"
        );
    }

    #[test]
    fn a_node_has_a_limit_of_its_own() {
        let bounds = config::Limits {
            per_node: 1,
            ..config::Limits::default()
        };
        let limits = Limits::new(bounds, &Metrics::new());
        let (client, node) = (Counter::default(), Counter::default());
        let _held = limits.admit(&client, &node).unwrap();
        assert!(
            limits
                .admit(&client, &node)
                .unwrap_err()
                .detail
                .contains("this node")
        );
    }
}
