//! HTTP/2 (RFC 9113) for tunnels: both roles of a connection.
//!
//! The public names and their semantics are those of the part of the crate h2 that a tunnel uses, so that either can stand
//! behind `use … as h2`. Reading order: frames, windows, streams; the state machine ([`connection`], with [`receive`] for
//! what comes in and [`send`] for what goes out), which does no IO; [`io`], which does; the handles.

pub mod client;
pub mod ext;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod server;

mod builder;
mod config;
mod connection;
mod error;
mod flow;
mod frame;
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
pub use handle::{FlowControl, Ping, PingPong, Pong, RecvStream, SendStream, StreamId};

#[cfg(test)]
mod tests;
