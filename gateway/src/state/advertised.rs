//! What edges are told, as they connect and when it changes: the addresses of gateways, and the ports that the cluster lists.

use arc_swap::ArcSwap;
use causeway_tunnel::hello::Listed;
use std::sync::Arc;

/// Something that edges are told. A cheap clone; a reader never waits.
#[derive(Debug, Default)]
pub struct Told<T>(Arc<ArcSwap<T>>);

/// By which addresses, `host:port`, edges reach this gateway and its siblings, this gateway's own first.
pub type Advertised = Told<Vec<String>>;

/// Which node ports the cluster lists, where it is asked.
pub type ListedPorts = Told<Option<Listed>>;

impl<T: Clone + PartialEq> Told<T> {
    /// This to begin with.
    pub fn new(begin: T) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(begin)))
    }

    /// What holds now.
    pub fn all(&self) -> T {
        T::clone(&self.0.load())
    }

    /// This from now on; whether that is a change.
    pub fn replace(&self, next: T) -> bool {
        let new = **self.0.load() != next;
        self.0.store(Arc::new(next));
        new
    }
}

impl<T> Clone for Told<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}
