//! Runtime components that are independent of Causeway's protocol.
//!
//! `cache` is a bounded cache with a time to live for each entry and one fetch for all concurrent calls. `resolve` turns
//! host names into addresses, and `happy_eyeballs` connects to one of them. `exposition` writes metrics as text, with those of
//! the process. The other modules are needed by connections: tasks with an owner, sockets, relays, listeners, limits, turns, a
//! client for one HTTP request, throttles of log lines.
//! `local_proxy` serves the requests of local programs that use SOCKS5 or an HTTP proxy; `http_fields` has rules for fields of
//! HTTP. `host_addresses` knows the addresses of this host's interfaces. `descriptor_passing` passes open sockets to another
//! process.
//!
//! On other systems than Linux, the crate has only the parts that do not need Linux, for the users' client.

pub mod backoff;
mod cache;
pub mod copy;
mod exposition;
mod forward;
pub mod happy_eyeballs;
pub mod http_client;
pub mod http_fields;
pub mod lingering_close;
pub mod local_proxy;
pub mod log_throttle;
mod process;
pub mod read_limit;
mod resolve;
pub mod socket;
pub mod task;
pub mod tcp_memory;
pub mod turns;

#[cfg(target_os = "linux")]
pub mod connection_limit;
#[cfg(target_os = "linux")]
pub mod descriptor_passing;
#[cfg(target_os = "linux")]
pub mod host_addresses;
#[cfg(target_os = "linux")]
pub mod listener;

pub use cache::{Cache, CachedValue};
pub use exposition::Exposition;
pub use process::count_dropped_log_lines;
pub use resolve::resolve;
