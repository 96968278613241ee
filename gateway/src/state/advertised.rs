//! By which addresses edges reach this gateway and its siblings: what joins and what connects is told them.

use arc_swap::ArcSwap;
use std::sync::Arc;

/// The addresses, `host:port`, this gateway's own first. A cheap clone; a reader never waits.
#[derive(Clone, Debug, Default)]
pub struct Advertised(Arc<ArcSwap<Vec<String>>>);

impl Advertised {
    /// These to begin with.
    pub fn new(addresses: Vec<String>) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(addresses)))
    }

    /// Those that hold now.
    pub fn all(&self) -> Vec<String> {
        self.0.load().to_vec()
    }

    /// These from now on; whether that is a change.
    pub fn replace(&self, addresses: Vec<String>) -> bool {
        let new = **self.0.load() != addresses;
        self.0.store(Arc::new(addresses));
        new
    }
}
