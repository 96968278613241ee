//! The control plane: admits and enrols edges, reports the gateway's state, and drains it.
//!
//! The control plane fills the tables of `state` and is never on the data path; nothing here imports `proxy`. The modules follow
//! the life cycle of an edge. The edge enrols (or its cluster requests its certificate from the `signer`), is admitted and is
//! listed. At a drain it is moved to another gateway. In addition, `api_cache` serves cluster resources to edges, and `jwks`
//! fetches the keys that verify clients' JWTs. `dns` resolves node names for clients, and `nat` redirects connections to node
//! addresses to listeners. `heartbeat` verifies heartbeats of nodes without a gateway. `address_conflicts` reports addresses that
//! several nodes share, and `certificate_expiry` reports certificates that expire.

pub(crate) mod broadcast;
pub mod ca_rotation;
pub(crate) mod eligibility;
pub mod enrol;
pub mod gateway_revocation;
pub mod node_sync;
pub mod startup_hold;
pub mod state_sync;

pub mod api_cache;
pub mod node_records;
pub mod peers;
pub mod pin_writer;
pub mod rebalance;
pub mod signer;
pub mod tunnel_listener;

pub mod jwks;

pub(crate) mod address_conflicts;
pub mod certificate_expiry;
pub mod dns;
pub mod nat;

pub mod admin;

pub mod drain;
pub(crate) mod evict;
pub mod heartbeat;
pub mod successor;

pub mod http;

#[cfg(test)]
mod tests;
