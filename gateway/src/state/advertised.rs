//! Data that is announced to edges when they connect and when it changes: the addresses of gateways, and the ports that the
//! cluster lists.

use arc_swap::ArcSwap;
use causeway_tunnel::control_stream::AnnouncedPorts;
use std::sync::Arc;

/// Value that is announced to edges. Cheap to clone; reads never wait.
#[derive(Debug, Default)]
pub struct SharedCell<T>(Arc<ArcSwap<T>>);

/// Addresses at which edges reach this gateway and the other gateways.
pub type AdvertisedGateways = SharedCell<GatewayEndpoints>;

/// Endpoints of the gateways.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GatewayEndpoints {
    /// The addresses, `host:port`, at which edges reach the gateways, this gateway's own first.
    pub gateways: Vec<String>,
    /// Number of gateways, if known. Several gateways may be behind one address.
    pub replicas: Option<u32>,
}

/// Node ports that the cluster lists, if the gateway reads them from the cluster.
pub type AnnouncedPortsCell = SharedCell<Option<AnnouncedPorts>>;

impl<T: Clone + PartialEq> SharedCell<T> {
    /// Returns a cell with this value.
    pub fn new(initial: T) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(initial)))
    }

    /// Returns the current value.
    pub fn get(&self) -> T {
        T::clone(&self.0.load())
    }

    /// Replaces the value. Returns whether it has changed.
    pub fn replace(&self, next: T) -> bool {
        let changed = **self.0.load() != next;
        self.0.store(Arc::new(next));
        changed
    }
}

impl<T> Clone for SharedCell<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}
