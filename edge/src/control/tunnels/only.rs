//! The one address at which some slots dial, and for how long.
//!
//! An address to which a name leads is dialled for as long as it does. One behind which a gateway was found (`seek`) is not
//! dialled again for that gateway: it may lead to any other.

use crate::control::dial::GatewayAddr;
use tokio::sync::watch;

/// The one address that is dialled. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct FixedAddress {
    pub(super) place: GatewayAddr,
    /// Whether a name leads here; nothing where a gateway was found here.
    wanted: Option<watch::Receiver<bool>>,
}

impl FixedAddress {
    /// Here for as long as it is `wanted`.
    pub(super) fn named(place: GatewayAddr, wanted: watch::Receiver<bool>) -> Self {
        let wanted = Some(wanted);
        Self { place, wanted }
    }

    /// Here, where a gateway was found.
    pub(super) fn found(place: GatewayAddr) -> Self {
        let wanted = None;
        Self { place, wanted }
    }

    /// Whether this slot's tunnel is dialled when there is none. A further one is for as long as the first stands.
    pub(super) fn wants(&self, slot: u32) -> bool {
        let named = self.wanted.as_ref();
        named.map_or(slot > 0, |wanted| *wanted.borrow())
    }

    /// Whether a name leads here, and did not merely lead a search here.
    pub(super) fn is_named(&self) -> bool {
        self.wanted.is_some()
    }

    /// Waits until no name leads here any more.
    pub(super) async fn unwanted(&self) {
        match self.wanted.clone() {
            // Whoever wanted it is gone with the edge.
            Some(mut wanted) => drop(wanted.wait_for(|wanted| !wanted).await),
            None => std::future::pending().await,
        }
    }
}
