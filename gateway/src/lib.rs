//! Causeway's cloud side: the gateway.
//!
//! The data path comes first and reads top to bottom (`proxy`), tables lie in the middle (`state`), and the control plane
//! comes last (`control`): `proxy` reads the tables, `control` writes them.

pub mod audit;
pub mod config;
pub mod error;
pub mod metrics;
pub mod state;
pub mod worker;

pub mod proxy;

pub mod control;

pub mod server;

pub use config::Config;
pub use error::{Error, Reason};
pub use server::{
    BindError, Bound, Gateway, ListenerDiff, PendingReload, RESTART_KEYS, ReloadSummary, Reloader,
    Watchdog, check,
};

#[cfg(test)]
mod tests {
    mod table_states;
}
