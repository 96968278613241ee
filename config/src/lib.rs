//! Configuration types that gateway and edge share.
//!
//! Contains:
//! - durations and sizes as people write them;
//! - secrets that no log contains;
//! - addresses that may be a unix socket;
//! - `ConfigError` for the fault of a value and its path;
//! - the channel for reload requests to a running process;
//! - the description of admin listeners (OpenAPI).
//!
//! This crate knows neither YAML nor flags: the binary reads those, and these types only parse text.

mod address;
mod error;
mod log;
pub mod openapi;
mod reload;
mod restart_keys;
mod secret;
mod specified;
mod units;

pub use address::{ListenAddr, ListenAddrs, SocketAddrStr, host_port};
pub use error::{ConfigError, ConfigErrors, Validate};
pub use log::{Log, LogFormat};
pub use reload::{ReloadReceiver, ReloadRequest, ReloadResult, ReloadSender, reload_channel};
pub use restart_keys::{RestartKey, RestartKeys};
pub use secret::Secret;
pub use specified::Specified;
pub use units::{ByteSize, DurationStr, IpNetList, canonical_network};
