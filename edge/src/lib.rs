//! Edge agent of Causeway: connects to the gateway and serves the targets that the node's owner allows.
//!
//! [`Edge::open`] loads the identity (or joins), [`Edge::bind`] binds the admin port, and [`Bound::run`] runs until it is
//! stopped. Reading order: the data path of a stream (`proxy`), the table between (`status`), the control plane of the
//! tunnels (`control`). Everything runs on the runtime of the caller, and several edges can run in one process.

pub mod config;

mod server;

mod proxy;

pub mod status;

mod control;

mod metrics;

pub use config::Config;
pub use control::admin::openapi;
pub use control::csr_bootstrap::{CsrClient, CsrRequestError, CsrStatus};
pub use control::enrol::EnrolError;
pub use control::rejoin_state::TokenReadError;
pub use metrics::describe as describe_metrics;
pub use proxy::TlsError;
pub use server::{
    Bound, Edge, Error, PendingReload, RESTART_KEYS, ReloadSummary, Reloader, check_files,
    knows_gateway,
};
