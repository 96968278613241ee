//! The tunnels of an edge: dialled, maintained, replaced, and left in order.
//!
//! Its tunnels are `slots`, all of them at one gateway, and at another one if that fails; or (`all_gateways`) some at each
//! address that the gateways' names lead to, each gateway by one address only (`connected_gateways`), and at all gateways
//! behind one address (`discovery`). A tunnel says hello (`handshake`) and serves (`session`).

mod all_gateways;
mod bulk;
pub(crate) mod connected_gateways;
pub(crate) mod context;
mod discovery;
mod handshake;
pub(crate) mod newest_sessions;
mod session;
mod slots;
mod tls_error;

use super::network_monitor::NetworkMonitor;
use crate::config::TunnelMode;
use context::TunnelContext;
use slots::TunnelSlots;
use std::sync::Arc;

impl TunnelContext {
    /// Keeps the tunnels until the edge stops, then leaves in order.
    pub(crate) async fn run(self: Arc<Self>, changes: NetworkMonitor) {
        match self.config.tunnels.gateways {
            TunnelMode::One => {
                TunnelSlots::at_any_gateway(self)
                    .run_to_end(None, changes)
                    .await;
            }
            TunnelMode::Every => Box::pin(all_gateways::run(self, changes)).await,
        }
    }
}

#[cfg(test)]
mod tests;
