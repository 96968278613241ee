//! Causeway on the node: dials the gateway and serves what the node's owner allows.
//!
//! [`Edge::open`] takes up the identity (or joins), [`Edge::bind`] takes the admin port, [`Bound::run`] lives
//! until it is stopped. Reading order: the way of a stream (`proxy`), the table between (`state`), what
//! keeps the tunnels (`control`). Everything runs on the caller's runtime, and several edges can live
//! in one process.

pub mod config;

mod edge;

mod proxy;

pub mod state;

mod control;

mod metrics;

pub use config::Config;
pub use control::enrol::EnrolError;
pub use control::rejoin::TokenFault;
pub use control::vouch::{Answer, Cluster, NoAnswer};
pub use edge::{Bound, Changed, Edge, Error, Prepared, Reloader, check, knows_gateway};
pub use proxy::TlsError;
