//! What edges are told, as they connect and when it changes: the addresses of gateways, and the ports that the cluster lists.

use arc_swap::ArcSwap;
use causeway_tunnel::control_stream::AnnouncedPorts;
use std::sync::Arc;

/// Something that edges are told. A cheap clone; a reader never waits.
#[derive(Debug, Default)]
pub struct SharedCell<T>(Arc<ArcSwap<T>>);

/// Where edges find this gateway and its siblings.
pub type AdvertisedGateways = SharedCell<GatewayEndpoints>;

/// Where gateways are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GatewayEndpoints {
    /// By which addresses, `host:port`, edges reach them, this gateway's own first.
    pub gateways: Vec<String>,
    /// How many there are, where that is known: one address may lead to several.
    pub replicas: Option<u32>,
}

/// Which node ports the cluster lists, where it is asked.
pub type AnnouncedPortsCell = SharedCell<Option<AnnouncedPorts>>;

impl<T: Clone + PartialEq> SharedCell<T> {
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

impl<T> Clone for SharedCell<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}
