//! The generators as `bench/run` uses them: the built binary, real sockets, a real gateway.
//!
//! No test checks speed; the tests check that the counts match the events.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod callers;
mod fleet;
mod process;
mod reads;
mod ways;
