//! The generators as `bench/run` uses them: the built binary, real sockets, a real gateway.
//!
//! Nothing here judges how fast anything is; what is checked is that what is counted is what happened.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod callers;
mod fleet;
mod process;
mod reads;
mod ways;
