//! The words of configuration that gateway and edge share.
//!
//! Durations and sizes as people write them, secrets that no log shows, addresses that
//! may be a unix socket, and `Fault`: what is wrong with a value and where it stands.
//! Knows neither YAML nor flags: the binary reads those, these types only parse text.

mod fault;
mod given;
mod human;
mod listen;
mod log;
mod secret;

pub use fault::{Fault, Faults, Validate};
pub use given::Given;
pub use human::{HumanDuration, HumanNetworks, HumanSize};
pub use listen::{HumanAddress, Listen, Listeners, host_port};
pub use log::{Log, LogFormat};
pub use secret::Secret;
