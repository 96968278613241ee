//! Tests of whole connections: against the crate h2 as an oracle, and against raw frames.

mod conversations;
mod ends;
mod limits;
mod noise;
mod order;
mod raw;
mod rules;
