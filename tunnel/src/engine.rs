//! HTTP/2 (RFC 9113) for tunnels: both roles of a connection.
//!
//! Unlike the crate h2, whose names the public ones follow, a connection reads also while it cannot write, sends small
//! responses before bulk, writes the frames of a turn together, and counts small frames by their bytes. Reading order: frames,
//! windows, streams; the state machine (`connection`, with `receive` for what comes in, `send` for what goes out, and `ends`),
//! which does no IO; `io`, which does; the handles.

pub mod client;
pub mod ext;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod server;

mod builder;
mod config;
mod connection;
mod ends;
mod error;
mod flow;
mod frame;
mod frame_limit;
mod handle;
mod hpack;
mod io;
mod message;
mod outgoing;
mod ready_queue;
mod receive;
mod receiving;
mod reset_list;
mod schedule;
mod send;
mod streams;

pub use error::{Error, Reason};
pub use flow::WindowLimits;
pub use handle::{FlowControl, Ping, PingPong, Pong, RecvStream, SendStream, StreamId};

#[cfg(test)]
mod tests;
