//! Tunnels of an edge: opened, maintained, replaced and closed in order.
//!
//! In the mode `one`, all `slots` have their tunnels at one gateway, and at another gateway if that one fails. In the mode
//! `every` (`all_gateways`), the edge has tunnels at each address that the gateways' names resolve to. With a number, it has
//! them at the addresses with the highest rank (`gateway_selection`). In both it reaches each gateway through one address only
//! (`connected_gateways`), and finds several gateways behind one address (`discovery`). A tunnel exchanges hellos
//! (`handshake`) and then serves streams (`session`).

mod all_gateways;
mod bulk;
pub(crate) mod connected_gateways;
pub(crate) mod context;
mod discovery;
mod gateway_selection;
mod handshake;
mod session;
mod slots;

use super::network_monitor::NetworkMonitor;
use crate::config::TunnelMode;
use context::TunnelContext;
use slots::TunnelSlots;
use std::sync::Arc;

impl TunnelContext {
    /// Maintains the tunnels until the edge stops, then closes them in order.
    pub(crate) async fn run(self: Arc<Self>, changes: NetworkMonitor) {
        match self.config.tunnels.gateways {
            TunnelMode::One => {
                TunnelSlots::at_any_gateway(self)
                    .run_to_end(None, changes)
                    .await;
            }
            TunnelMode::Every | TunnelMode::Count(_) => {
                Box::pin(all_gateways::run(self, changes)).await;
            }
        }
    }
}

#[cfg(test)]
mod tests;
