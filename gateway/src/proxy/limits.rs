//! Limits on open connections and streams: total connections, total streams, streams per client, and streams per node. No stream
//! is admitted while too many bytes are buffered.
//!
//! The request path uses only atomics. The counter of a client is looked up once per connection and stored with the client; the
//! counter of a node comes with the selected tunnel. A permit releases its units when it is dropped.

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
use tokio::sync::{Semaphore, SemaphorePermit};

/// Maximum number of request bodies that are discarded at once. Any client may have one, and no stream is counted for it.
const DISCARDED_BODIES: usize = 1024;

/// Maximum number of requests that are open on two tunnels because the first one does not answer. An edge that stands still must not
/// get all its requests twice.
const MAX_REPETITIONS: usize = 256;

/// Counter of the open streams of one client or node.
pub type Counter = Arc<AtomicUsize>;

/// Configured limits and the open connections and streams.
#[derive(Debug)]
pub struct Limits {
    config: config::Limits,
    open_streams: Counter,
    connections: ConnectionLimit,
    discarded_bodies: ConnectionLimit,
    repetitions: Semaphore,
    clients: Mutex<HashMap<Arc<str>, Weak<AtomicUsize>>>,
    memory_budget: Arc<MemoryBudget>,
}

/// Permit of one open stream for its client and this gateway.
#[derive(Debug)]
pub struct ClientPermit {
    _gateway: CounterGuard,
    _client: CounterGuard,
}

/// Guard of one unit of a counter.
#[derive(Debug)]
pub struct CounterGuard(Counter);

impl Drop for CounterGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// Takes one unit of a counter, if fewer than `limit` are taken.
pub(super) fn acquire(count: &Counter, limit: usize) -> Option<CounterGuard> {
    let guard = CounterGuard(count.clone());
    (count.fetch_add(1, Relaxed) < limit).then_some(guard)
}

impl Limits {
    /// Returns limits without any open streams.
    pub fn new(config: config::Limits, metrics: &Arc<Metrics>) -> Self {
        Self {
            memory_budget: Arc::new(MemoryBudget::new(config.buffered_bytes)),
            connections: metrics.connection_limit("connections", config.connections),
            discarded_bodies: metrics.connection_limit("discarded_bodies", DISCARDED_BODIES),
            config,
            open_streams: Counter::default(),
            repetitions: Semaphore::new(MAX_REPETITIONS),
            clients: Mutex::default(),
        }
    }

    /// Returns the counter of a client, shared by all its connections.
    pub fn client_counter(&self, name: &Arc<str>) -> Counter {
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

    /// Waits until a request may be sent a second time, and returns the permit for it.
    pub async fn admit_repetition(&self) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        self.repetitions.acquire().await.ok()
    }

    /// Returns the memory budget of buffered bytes, to which tunnels and uploads add theirs.
    pub fn memory_budget(&self) -> &Arc<MemoryBudget> {
        &self.memory_budget
    }

    /// Returns the number of open client connections.
    pub fn open_connections(&self) -> usize {
        self.connections.open_connections()
    }

    /// Returns the slot of one more connection of a client, if the limit permits it.
    pub fn admit_connection(&self, peer: RemoteAddr) -> Option<Slot> {
        self.connections.admit(peer).ok()
    }

    /// Returns the slot for a discarded body of this client. If necessary, an older body loses its slot.
    pub fn admit_discarded_body(&self, peer: RemoteAddr) -> Option<Slot> {
        self.discarded_bodies.admit(peer).ok()
    }

    /// Admits one more stream of a client. A stream gets this permit before it waits for its node.
    ///
    /// # Errors
    /// [`Reason::LimitReached`], naming the limit.
    pub fn admit_client(&self, client: &Counter) -> Result<ClientPermit, Error> {
        let bounds = &self.config;
        if self.memory_budget.is_full() {
            return Err(Reason::LimitReached.error(format!(
                "this gateway buffers {} bytes for slow readers and has reached its limit of {} bytes (limits.buffered_bytes)",
                self.memory_budget.bytes(),
                bounds.buffered_bytes
            )));
        }
        let limit_error = |subject, limit| Reason::LimitReached.error(limit_detail(subject, limit));
        Ok(ClientPermit {
            _gateway: acquire(&self.open_streams, bounds.streams)
                .ok_or_else(|| limit_error("this gateway", bounds.streams))?,
            _client: acquire(client, bounds.per_client)
                .ok_or_else(|| limit_error("this client", bounds.per_client))?,
        })
    }

    /// Admits one more stream to a node.
    ///
    /// # Errors
    /// [`Reason::NodeLimitReached`].
    pub fn admit_node(&self, node: &Counter) -> Result<CounterGuard, Error> {
        let limit = self.config.per_node;
        acquire(node, limit)
            .ok_or_else(|| Reason::NodeLimitReached.error(limit_detail("this node", limit)))
    }
}

fn limit_detail(subject: &str, limit: usize) -> String {
    format!("{subject} has reached its limit of {limit} open streams")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_applies_alone_and_returns_its_permits() {
        let bounds = config::Limits {
            streams: 3,
            per_client: 2,
            ..config::Limits::default()
        };
        let limits = Limits::new(bounds, &Metrics::new());
        let alice = limits.client_counter(&"alice".into());
        let bob = limits.client_counter(&"bob".into());
        let first = limits.admit_client(&alice).unwrap();
        let _second = limits.admit_client(&alice).unwrap();
        let word = |error: Error| error.detail.split(' ').nth(1).unwrap().to_owned();
        let refused = |client| word(limits.admit_client(client).unwrap_err());
        assert_eq!(refused(&alice), "client");
        let _third = limits.admit_client(&bob).unwrap();
        assert_eq!(refused(&bob), "gateway");
        drop(first);
        let _fourth = limits.admit_client(&bob).unwrap();
        assert_eq!(refused(&alice), "gateway");
        assert_eq!(
            limits.client_counter(&"alice".into()).load(Relaxed),
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
        let node = Counter::default();
        let held = limits.admit_node(&node).unwrap();
        let error = limits.admit_node(&node).unwrap_err();
        assert_eq!(error.reason, Reason::NodeLimitReached);
        assert!(error.detail.contains("this node"), "{error}");
        drop(held);
        assert!(limits.admit_node(&node).is_ok());
    }
}
