//! The control plane: admits and enrols edges, reports the gateway's state, and drains it.
//!
//! The control plane fills the tables of `state` and is never on the data path; nothing here imports `proxy`. The modules follow
//! an edge's life: it enrols (or its cluster requests its certificate from the `signer`), is admitted, is listed, and is asked to
//! connect elsewhere. Beside these, `api_cache` serves what edges read of their cluster, `jwks` fetches the keys that verify
//! clients' JWTs, `dns` resolves node names for clients, and `nat` redirects connections to nodes' own addresses to listeners.
//! `heartbeat` verifies heartbeats of nodes without a gateway. `address_conflicts` reports addresses that several nodes have, and `certificate_expiry` certificates that expire.

pub(crate) mod broadcast;
pub mod ca_rotation;
pub(crate) mod eligibility;
pub mod enrol;
pub mod node_sync;
pub mod startup_hold;

pub mod api_cache;
pub mod node_records;
pub mod pin_writer;
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

pub mod http;

#[cfg(test)]
mod tests;
