//! How many connections and streams may be open: connections in all, streams in all, for a caller, for a node; and none
//! where too much is unread.
//!
//! Only atomics on the way: a caller's count is looked up once a connection and travels with the caller, a
//! node's comes with the picked tunnel. A permit gives back what it took when it is dropped, wherever.

use crate::{
    config,
    error::{Error, Reason},
    metrics::Metrics,
};
use causeway_tunnel::{
    connection_limit::{ConnectionLimit, Slot},
    listener::Peer,
    unread::Pressure,
};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

/// Bodies of requests that are discarded at once: anybody may have one, and has no stream counted for it.
const DISCARDED_BODIES: usize = 1024;

/// Open streams of one caller or node.
pub type Count = Arc<AtomicUsize>;

/// The bounds and what is open.
#[derive(Debug)]
pub struct Limits {
    bounds: config::Limits,
    all: Count,
    connections: ConnectionLimit,
    discarded_bodies: ConnectionLimit,
    callers: Mutex<HashMap<Arc<str>, Weak<AtomicUsize>>>,
    pressure: Arc<Pressure>,
}

/// The right to one open stream.
#[derive(Debug)]
pub struct Permit {
    _all: Taken,
    _caller: Taken,
    _node: Taken,
}

/// One unit of a count.
#[derive(Debug)]
pub struct Taken(Count);

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

fn take(count: &Count, most: usize) -> Option<Taken> {
    let taken = Taken(count.clone());
    (count.fetch_add(1, Relaxed) < most).then_some(taken)
}

impl Limits {
    /// Nothing is open.
    pub fn new(bounds: config::Limits, metrics: &Arc<Metrics>) -> Self {
        Self {
            pressure: Arc::new(Pressure::new(bounds.unread)),
            connections: metrics.connection_limit("connections", bounds.connections),
            discarded_bodies: metrics.connection_limit("discarded_bodies", DISCARDED_BODIES),
            bounds,
            all: Count::default(),
            callers: Mutex::default(),
        }
    }

    /// The count of a caller, shared by all its connections.
    pub fn caller(&self, name: &Arc<str>) -> Count {
        let mut callers = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = callers.get(name).and_then(Weak::upgrade) {
            return count;
        }
        // Callers that are gone are swept when the table would grow.
        if callers.len() == callers.capacity() {
            callers.retain(|_, count| count.strong_count() > 0);
        }
        let count = Count::default();
        callers.insert(name.clone(), Arc::downgrade(&count));
        count
    }

    /// What waits unread, for tunnels and uploads to add to.
    pub fn pressure(&self) -> &Arc<Pressure> {
        &self.pressure
    }

    /// Callers' connections that are open.
    pub fn connections(&self) -> usize {
        self.connections.held()
    }

    /// Returns the place of one more connection of a client, if there is one.
    pub fn connection(&self, peer: Peer) -> Option<Slot> {
        self.connections.admit(peer).ok()
    }

    /// Returns the place of a body of this client that is discarded, the one of an older body if need be.
    pub fn discarded_body(&self, peer: Peer) -> Option<Slot> {
        self.discarded_bodies.admit(peer).ok()
    }

    /// Room for one more stream.
    ///
    /// # Errors
    /// [`Reason::LimitReached`], naming the limit.
    pub fn admit(&self, caller: &Count, node: &Count) -> Result<Permit, Error> {
        let full = |whose: &str, most: usize| {
            Reason::LimitReached.says(format!(
                "{whose} has {most} streams open, which is its limit"
            ))
        };
        let bounds = &self.bounds;
        if self.pressure.is_full() {
            return Err(Reason::LimitReached.says(format!(
                "{} bytes wait in this gateway for those who do not read them, of {} that may (limits.unread)",
                self.pressure.bytes(),
                bounds.unread
            )));
        }
        Ok(Permit {
            _all: take(&self.all, bounds.streams)
                .ok_or_else(|| full("this gateway", bounds.streams))?,
            _caller: take(caller, bounds.per_caller)
                .ok_or_else(|| full("this caller", bounds.per_caller))?,
            _node: take(node, bounds.per_node).ok_or_else(|| full("this node", bounds.per_node))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_holds_alone_and_gives_back_what_was_taken() {
        let bounds = config::Limits {
            streams: 3,
            per_caller: 2,
            per_node: 2,
            ..config::Limits::default()
        };
        let limits = Limits::new(bounds, &Metrics::new());
        let alice = limits.caller(&"alice".into());
        let bob = limits.caller(&"bob".into());
        let (near, far) = (Count::default(), Count::default());
        let first = limits.admit(&alice, &near).unwrap();
        let _second = limits.admit(&alice, &far).unwrap();
        let word = |error: Error| error.detail.split(' ').nth(1).unwrap().to_owned();
        assert_eq!(word(limits.admit(&alice, &far).unwrap_err()), "caller");
        let _third = limits.admit(&bob, &near).unwrap();
        assert_eq!(word(limits.admit(&bob, &far).unwrap_err()), "gateway");
        drop(first);
        assert_eq!(near.load(Relaxed), 1);
        let _fourth = limits.admit(&bob, &near).unwrap();
        assert_eq!(word(limits.admit(&alice, &near).unwrap_err()), "gateway");
        assert_eq!(
            limits.caller(&"alice".into()).load(Relaxed),
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
        let (caller, node) = (Count::default(), Count::default());
        let _held = limits.admit(&caller, &node).unwrap();
        assert!(
            limits
                .admit(&caller, &node)
                .unwrap_err()
                .detail
                .contains("this node")
        );
    }
}
