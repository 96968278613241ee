//! Conversations with the tunnel's HTTP/2 engine as a server. The fuzzer is its peer and its user.
//!
//! Whatever the peer writes, the engine writes only what RFC 9113 allows, wakes all tasks that can go on, keeps its buffers small,
//! and ends. From a peer that obeys the RFC all data arrives, and no stream or connection is refused.

#![no_main]

use causeway_fuzz::http2::{Role, run};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| run(Role::Server, input));
