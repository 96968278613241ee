//! A CA that another one takes the place of while it is in use.

use super::Ca;
use arc_swap::ArcSwap;
use std::sync::Arc;

/// The CA of a running process. Cheap to clone; all clones share one CA.
#[derive(Clone, Debug)]
pub struct LiveCa(Arc<ArcSwap<Ca>>);

impl LiveCa {
    /// Returns a handle to this CA, until another is swapped in.
    pub fn new(ca: Ca) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(ca)))
    }

    /// The CA as it is now.
    pub fn get(&self) -> Arc<Ca> {
        self.0.load_full()
    }

    /// Replaces the CA.
    pub fn swap(&self, ca: Ca) {
        self.0.store(Arc::new(ca));
    }
}
