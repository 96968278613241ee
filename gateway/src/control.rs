//! The control path: admits and enrols edges, shows the gateway's state, ends it in order.
//!
//! Fills the tables of `state` and never stands in a request's way; nothing here imports `proxy`.
//! Reading order is an edge's life: it enrols (or its cluster asks the `signer` for it), is admitted, is shown, and is asked to go
//! elsewhere. Beside it, `pool` serves what edges read of their cluster, `jwks`
//! fetches the keys by which callers prove who they are, `dns` tells callers where nodes are to be had, and `nat` leads
//! callers of nodes' own addresses here; `address_conflicts` reports those that several nodes have, and
//! `certificate_expiry` the certificates that end.

pub(crate) mod broadcast;
pub mod ca_rotation;
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

pub mod http;

#[cfg(test)]
mod tests;
