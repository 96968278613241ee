//! Causeway's cloud side: the gateway.
//!
//! The data path comes first and reads top to bottom (`proxy`), tables lie in the middle (`state`), the control
//! path comes last (`control`): proxy reads, control writes, state lies between.

pub mod audit;
pub mod config;
pub mod core;
pub mod error;
pub mod metrics;
mod seldom;
pub mod state;

pub mod proxy;

pub mod control;

pub mod gateway;

pub use config::Config;
pub use error::{Error, Reason};
pub use gateway::{BindError, Bound, Changed, Gateway, Prepared, Pulse, Reloader, Turnover, check};

#[cfg(test)]
mod tests {
    mod table_states;
}
