//! A CA that another one takes the place of while it is in use.

use super::Ca;
use arc_swap::ArcSwap;
use std::sync::Arc;

/// The CA of a process that runs. Cheap to clone; all clones see the same.
#[derive(Clone, Debug)]
pub struct LiveCa(Arc<ArcSwap<Ca>>);

impl LiveCa {
    /// This one, until another is swapped in.
    pub fn new(ca: Ca) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(ca)))
    }

    /// The CA as it is now.
    pub fn get(&self) -> Arc<Ca> {
        self.0.load_full()
    }

    /// From now on it is this one.
    pub fn swap(&self, ca: Ca) {
        self.0.store(Arc::new(ca));
    }
}
