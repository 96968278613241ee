//! Delegated heartbeats: a node that has lost its gateways has another member of its pool report that its kubelet is alive.
//!
//! 1. `sender` checks the health of this node's own kubelet.
//! 2. When no tunnel is open, `sender` asks members of the pool for a gateway's nonce. It signs the nonce with the key of this
//!    node's certificate, and gives the member the signed heartbeat. The data directory has the members, so they are known after
//!    a restart.
//! 3. `relay` is the member's side. It has the newest nonce of each tunnel, answers requests with it, and sends heartbeats of other
//!    nodes to the gateway that issued their nonce.
//!
//! The gateway decides whether to renew the node's Lease, by the age of the Lease. A heartbeat of a node whose kubelet
//! still reaches the API server changes nothing there.

mod member_client;
pub(crate) mod relay;
mod sender;

pub(crate) use relay::HeartbeatRelay;
pub(crate) use sender::HeartbeatSender;

#[cfg(test)]
mod tests;
