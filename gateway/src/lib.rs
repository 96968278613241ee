//! Causeway's cloud side: the gateway.
//!
//! The data path is `proxy`, which reads the tables in `state`. The control plane is `control`, which writes them.

pub mod audit;
pub mod config;
pub mod error;
pub mod metrics;
pub mod state;
pub mod worker;

pub mod proxy;
pub mod proxy_protocol;

pub mod control;

pub mod server;
pub mod shared_state;

pub use config::Config;
pub use error::{Error, Reason};
pub use server::{
    BindError, Bound, Gateway, ListenerDiff, PendingReload, RESTART_KEYS, ReloadSummary, Reloader,
    RunEnd, Watchdog, check,
};

#[cfg(test)]
mod tests {
    mod table_states;
}
