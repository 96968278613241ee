//! The words of configuration that gateway and edge share.
//!
//! Durations and sizes as people write them, secrets that no log shows, addresses that
//! may be a unix socket, `Fault`: what is wrong with a value and where it stands, and how a running process is asked
//! to read all of it anew.
//! Knows neither YAML nor flags: the binary reads those, these types only parse text.

mod fault;
mod given;
mod human;
mod listen;
mod log;
mod reload;
mod secret;

pub use fault::{Fault, Faults, Validate};
pub use given::Given;
pub use human::{HumanDuration, HumanNetworks, HumanSize, whole};
pub use listen::{HumanAddress, Listen, Listeners, host_port};
pub use log::{Log, LogFormat};
pub use reload::{Outcome, Reload, Reloading, Reloads, reloads};
pub use secret::Secret;
